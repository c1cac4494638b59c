//! Signed blocks, blocks under a key, and the texts people copy.

use atoll_key::text::{decode_checked, encode_checked};
use atoll_key::{BlockHash, BlockKind, Key, SecretKey, SignedBlock, VolumeAddress, VolumeId};
use bytes::Bytes;

use super::{Target, target};

const SCHEME: &str = "atoll:";

pub fn targets() -> Vec<Target> {
    let secret = SecretKey::from_seed(&[3; 32]);
    let signed =
        |name: &[u8], payload: &[u8]| SignedBlock::sign(&secret, name, 7, payload).bytes().to_vec();
    let blocks = vec![signed(b"", b"payload"), signed(&[b'n'; 64], &[]), signed(b"name", &[1; 99])];
    let root_key = secret.volume_id().root_key();
    let own_key = SignedBlock::sign(&secret, b"name", 7, b"payload").key();
    let mut keyed = vec![keyed(BlockKind::Content, BlockHash::of(b"content").key(), b"content")];
    keyed.push(self::keyed(BlockKind::Signed, root_key, &blocks[0]));
    keyed.push(self::keyed(BlockKind::Signed, own_key, &blocks[2]));
    let address = VolumeAddress(VolumeId([9; 32])).to_string();
    let texts = vec![
        address.clone().into_bytes(),
        address.to_uppercase().replace("ATOLL:", SCHEME).into_bytes(),
        format!("{address}/usr/include/stdio.h").into_bytes(),
    ];
    let address_bytes = vec![decode_checked(SCHEME, &address).expect("our own text")];
    vec![
        target("key/signed-block", blocks, decode_signed),
        target("key/verify", keyed, verify),
        target("key/text", texts, |input| {
            std::str::from_utf8(input).is_ok_and(|text| {
                let checked = decode_checked(SCHEME, text.split('/').next().unwrap_or(text));
                let address = VolumeAddress::parse_with_path(text);
                assert!(checked.is_ok() || address.is_err(), "an address passed its checksum by");
                address.is_ok()
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

fn decode_signed(input: &[u8]) -> bool {
    let Ok(block) = SignedBlock::decode(&Bytes::copy_from_slice(input)) else { return false };
    assert_eq!(block.bytes()[..], *input, "a signed block has one encoding");
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
