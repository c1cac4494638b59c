//! Signed blocks, blocks under a key, and the texts people copy.

use atoll_key::kinds::certified::{
    Author, Binding, Certificate, CertifiedBlock, InodeRelease, WriterId,
};
use atoll_key::kinds::{MAX_RELEASED, Release, VolumeRelease};
use atoll_key::text::{decode_checked, encode_checked};
use atoll_key::volume_secret::{Cost, SALT_BYTES};
use atoll_key::{
    BlockHash, BlockKind, GroupId, Key, ReadAddress, ReadKey, SecretKey, SignedBlock, UserId,
    VolumeAddress, VolumeCipher, VolumeId, VolumeSecret,
};
use bytes::Bytes;

use super::{Target, target};

const SCHEME: &str = "atoll:";

pub(super) fn targets() -> Vec<Target> {
    let secret = SecretKey::from_seed(&[3; 32]);
    let signed =
        |name: &[u8], payload: &[u8]| SignedBlock::sign(&secret, name, 7, payload).bytes().to_vec();
    let blocks = vec![signed(b"", b"payload"), signed(&[b'n'; 64], &[]), signed(b"name", &[1; 99])];
    let root_key = secret.volume_id().root_key();
    let own_key = SignedBlock::sign(&secret, b"name", 7, b"payload").key();
    let mut keyed = vec![keyed(BlockKind::Content, BlockHash::of(b"content").key(), b"content")];
    keyed.push(self::keyed(BlockKind::Signed, root_key, &blocks[0]));
    keyed.push(self::keyed(BlockKind::Signed, own_key, &blocks[2]));
    let certified = certified();
    let blocks_of = |block: &CertifiedBlock| block.bytes().to_vec();
    keyed.push(self::keyed(BlockKind::Certified, certified[1].key(), certified[1].bytes()));
    let content = [&[7; 32][..], b"content"].concat();
    let own_key = BlockHash::of_inode_content(&content).key();
    keyed.push(self::keyed(BlockKind::InodeContent, own_key, &content));
    let own_key = BlockHash::of_volume_content(&content).key();
    keyed.push(self::keyed(BlockKind::VolumeContent, own_key, &content));
    let address = VolumeAddress(VolumeId([9; 32])).to_string();
    let texts = vec![
        address.clone().into_bytes(),
        address.to_uppercase().replace("ATOLL:", SCHEME).into_bytes(),
        format!("{address}/usr/include/stdio.h").into_bytes(),
    ];
    let address_bytes = vec![decode_checked(SCHEME, &address).expect("our own text")];
    vec![
        target("key/signed-block", blocks, decode_signed),
        target("key/certified-block", certified.iter().map(blocks_of).collect(), join_certified),
        target("key/release", releases().iter().map(Release::to_bytes).collect(), |input| {
            let Ok(release) = Release::decode(&Bytes::copy_from_slice(input)) else { return false };
            assert_eq!(release.to_bytes()[..], *input, "a release has one encoding");
            assert!((1..=MAX_RELEASED).contains(&release.keys().len()));
            true
        }),
        target("key/verify", keyed, verify),
        target("key/text", texts, |input| {
            std::str::from_utf8(input).is_ok_and(|text| {
                let checked = decode_checked(SCHEME, text.split('/').next().unwrap_or(text));
                let address = VolumeAddress::parse_with_path(text);
                assert!(checked.is_ok() || address.is_err(), "an address passed its checksum by");
                address.is_ok()
            })
        }),
        target("key/read-address", read_addresses(), |input| {
            let Ok(text) = std::str::from_utf8(input) else { return false };
            text.parse::<ReadAddress>().is_ok_and(|address| {
                assert_eq!(address.to_text().parse(), Ok(address), "it does not read back");
                true
            })
        }),
        target("key/read-key", vec![[&[1][..], &[7; 32]].concat()], |input| {
            let text = encode_checked("#", input);
            ReadKey::from_text(&text).is_ok_and(|key| {
                assert_eq!(key.to_text(), text, "a read key has two texts");
                true
            })
        }),
        // Without the key no input opens; the seeds are sealed by it.
        target("key/sealed", sealed(), |input| {
            cipher().open(input).is_ok_and(|block| {
                assert_eq!(cipher().seal(&block), input, "a block is sealed in two ways");
                true
            })
        }),
        // The tag is right, what it is of is not: the bytes behind it are the input.
        target(
            "key/sealed-inside",
            vec![[&[0, 0, 0, 5][..], &[3; 5], &[0; 251]].concat()],
            |input| {
                cipher().open(&cipher().seal_as_it_is(input)).is_ok_and(|block| {
                    assert_eq!(cipher().seal(&block), cipher().seal_as_it_is(input));
                    true
                })
            },
        ),
        // The passphrase is right: the header and the sealed content are the input.
        target("key/volume-secret", sealed_volume_secrets(), |input| {
            let text = encode_checked("atoll-key:", input);
            // More work and memory are allowed than a fuzzer can do.
            let is_cheap = input.get(1..6) == Some(&[0, 0, 0, 8, 1]);
            let is_refused = input.get(1).is_some_and(|memory| *memory > 0);
            (is_cheap || is_refused) && VolumeSecret::open(&text, "passphrase").is_ok()
        }),
        // The tag is right, what it is of is not: the content is the input.
        target("key/volume-secret-inside", vec![volume_secret().encode()], |input| {
            VolumeSecret::decode(input).is_some_and(|secret| {
                assert_eq!(secret.encode(), input, "a secret has two contents");
                true
            })
        }),
        // The checksum is right, what it is of is not: the bytes behind it are the input.
        target("key/address", address_bytes, |input| {
            let text = encode_checked(SCHEME, input);
            let address = text.parse::<VolumeAddress>();
            address.is_ok_and(|address| {
                assert_eq!(address.to_string(), text, "an address has two texts");
                true
            })
        }),
    ]
}

fn cipher() -> VolumeCipher {
    VolumeCipher::new(&ReadKey::from_bytes([7; 32]), &VolumeId([9; 32]))
}

fn volume_secret() -> VolumeSecret {
    VolumeSecret {
        key: SecretKey::from_seed(&[1; 32]),
        read_key: Some(ReadKey::from_bytes([2; 32])),
        name: "diary".into(),
        source: Some(b"/home/me".to_vec()),
        token: Some([3; 16]),
    }
}

fn sealed_volume_secrets() -> Vec<Vec<u8>> {
    let cost = Cost { memory_kib: 8, passes: 1 };
    let text = volume_secret().seal("passphrase", [7; SALT_BYTES], cost).replace('\n', "");
    vec![decode_checked("atoll-key:", &text).expect("our own text")]
}

fn sealed() -> Vec<Vec<u8>> {
    [0, 5, 300, 5000].map(|len| cipher().seal(&vec![3; len])).to_vec()
}

fn read_addresses() -> Vec<Vec<u8>> {
    let volume = VolumeAddress(VolumeId([9; 32]));
    let read_key = Some(ReadKey::from_bytes([7; 32]));
    let whole = ReadAddress { volume, read_key }.to_text();
    vec![whole.into_bytes(), volume.to_string().into_bytes()]
}

fn decode_signed(input: &[u8]) -> bool {
    let Ok(block) = SignedBlock::decode(&Bytes::copy_from_slice(input)) else { return false };
    assert_eq!(block.bytes()[..], *input, "a signed block has one encoding");
    true
}

/// What a writer of an inode needs no longer, and the owner of a volume.
pub(super) fn releases() -> Vec<Release> {
    let group = SecretKey::from_seed(&[4; 32]);
    let secret = SecretKey::from_seed(&[5; 32]);
    let user = UserId(secret.public());
    let certificate = Certificate::issue(&group, user, 0, u64::MAX);
    let author = Author { secret, certificate, writer: WriterId::new(&user, [5; 8]) };
    let blocks = [BlockHash([1; 32]), BlockHash([2; 32])];
    let of_inode = InodeRelease::sign(&certified()[0], &author, 3, 0, &blocks).expect("a member");
    let of_volume = VolumeRelease::sign(&author.secret, 3, &blocks).expect("some blocks");
    vec![of_inode.into(), of_volume.into()]
}

/// An inode as its creator made it, and after two others have written it at once.
fn certified() -> Vec<CertifiedBlock> {
    let group = SecretKey::from_seed(&[4; 32]);
    let author = |n: u8| {
        let secret = SecretKey::from_seed(&[n; 32]);
        let user = UserId(secret.public());
        let certificate = Certificate::issue(&group, user, 0, u64::MAX);
        Author { secret, certificate, writer: WriterId::new(&user, [n; 8]) }
    };
    let binding = Binding::new(VolumeId([9; 32]), [1; 16], &[GroupId(group.public())]);
    let first = CertifiedBlock::create(binding.expect("a group"), &author(5), 1, b"first");
    let first = first.expect("a member");
    let write = |n, payload| first.write(&author(n), 2, Some(payload)).expect("a member");
    let both = write(6, &b"one"[..]).join(&write(7, &b"two"[..])).expect("one inode");
    vec![first, both]
}

/// Decoding without signatures, which no input guesses, and joining what comes of it.
fn join_certified(input: &[u8]) -> bool {
    let Ok(block) = CertifiedBlock::decode_verified(&Bytes::copy_from_slice(input)) else {
        return false;
    };
    assert_eq!(block.bytes()[..], *input, "a certified block has one encoding");
    for other in certified() {
        if let (Some(one), Some(two)) = (block.join(&other), other.join(&block)) {
            assert_eq!(one, two, "joining depends on the order");
            let again = one.join(&block).expect("one inode");
            assert_eq!(again, one, "joining again changes something");
        }
    }
    true
}

/// A kind, a key and the bytes said to be under it.
fn keyed(kind: BlockKind, key: Key, bytes: &[u8]) -> Vec<u8> {
    [&[kind as u8][..], &key.0, bytes].concat()
}

fn verify(input: &[u8]) -> bool {
    let Some((kind, rest)) = input.split_first() else { return false };
    let Some((key, bytes)) = rest.split_first_chunk::<64>() else { return false };
    BlockKind::from_u8(*kind).is_ok_and(|kind| kind.verify(&Key(*key), bytes).is_ok())
}
