//! Each decoder against each thing that can be wrong with a block.

use atoll_key::{BlockHash, MAX_BLOCK_BYTES};
use atoll_vfs::{FileKind, FileTime};
use atoll_volume::format::inode::{Data, Shape};
use atoll_volume::format::{
    Child, Content, DirectoryBlock, DirectoryEntry, DirectoryRef, FormatError, InodeBlock, Nodes,
    Owner, PointerBlock, xattrs,
};
use atoll_volume::owned::Root;
use bytes::Bytes;
use proptest::prelude::*;

use crate::ring::root_of;

fn hash(n: u8) -> BlockHash {
    BlockHash([n; 32])
}

fn file(name: &[u8]) -> DirectoryEntry {
    DirectoryEntry {
        name: Bytes::copy_from_slice(name),
        mode: 0o644,
        mtime: FileTime { secs: 1, nanos: 2 },
        content: Content::Regular { size_bytes: 513, blocks_512: 2, inode: Some(hash(1)) },
        xattrs: None,
        owner: None,
    }
}

fn leaf(entries: Vec<DirectoryEntry>) -> Vec<u8> {
    DirectoryBlock { level: 0, nodes: Nodes::Leaf(entries) }.encode()
}

fn interior(level: u8, names: &[&str]) -> Vec<u8> {
    let children = names.iter().map(|name| Child {
        hash: hash(3),
        entries: 5,
        subdirectories: 1,
        first_name: Bytes::copy_from_slice(name.as_bytes()),
    });
    DirectoryBlock { level, nodes: Nodes::Interior(children.collect()) }.encode()
}

fn decode_directory(bytes: Vec<u8>) -> Result<DirectoryBlock, FormatError> {
    DirectoryBlock::decode(&Bytes::from(bytes))
}

/// `block` with the bytes at `at` replaced.
fn with(mut block: Vec<u8>, at: usize, bytes: &[u8]) -> Vec<u8> {
    block[at..at + bytes.len()].copy_from_slice(bytes);
    block
}

/// Offsets in a leaf whose first entry is a file with a one-byte name.
const KIND: usize = 10;
const FLAGS: usize = 11;
const MODE: usize = 12;
const NANOS: usize = 22;
const NAME_LEN: usize = 26;
const NAME: usize = 27;
const SIZE: usize = 28;
const BLOCKS: usize = 36;
const INODE: usize = 44;

#[test]
fn a_directory_block_that_lies_is_refused_for_what_is_wrong_with_it() {
    let good = leaf(vec![file(b"a"), file(b"b")]);
    assert!(decode_directory(good.clone()).is_ok());
    let bad_name = |bytes: &[u8]| with(good.clone(), NAME, bytes);
    let reason = |block: Vec<u8>| decode_directory(block).expect_err("it lies").to_string();
    let many = u32::MAX.to_be_bytes();
    let linked = |kind, inode| {
        leaf(vec![DirectoryEntry { content: Content::Linked { kind, inode }, ..file(b"a") }])
    };
    let owned = |owner| leaf(vec![DirectoryEntry { owner: Some(owner), ..file(b"a") }]);
    let cases = [
        ("magic", with(good.clone(), 0, b"ATIN"), "not a directory block"),
        ("layout", with(good.clone(), 4, &[9]), "layout 9"),
        ("level", with(good.clone(), 5, &[8]), "9 levels"),
        ("no entries", with(good.clone(), 6, &[0; 4]), "empty"),
        ("entries stated", with(good.clone(), 6, &many), "ends too early"),
        ("one entry stated more", with(good.clone(), 9, &[3]), "ends too early"),
        ("one entry stated less", with(good.clone(), 9, &[1]), "bytes too many"),
        ("kind", with(good.clone(), KIND, &[9]), "unknown kind 9"),
        ("kind 0", with(good.clone(), KIND, &[0]), "unknown kind 0"),
        ("flags", with(good.clone(), FLAGS, &[4]), "unknown flags 0x4"),
        ("mode", with(good.clone(), MODE, &[0x10, 0]), "mode 0o10000"),
        ("nanoseconds", with(good.clone(), NANOS, &1_000_000_000u32.to_be_bytes()), "1000000000"),
        ("slash", bad_name(b"/"), "slash"),
        ("NUL", bad_name(b"\0"), "NUL"),
        ("dot", bad_name(b"."), "means a directory"),
        ("order", leaf(vec![file(b"b"), file(b"a")]), "not in order"),
        ("twice", leaf(vec![file(b"a"), file(b"a")]), "there twice"),
        ("two dots", leaf(vec![file(b"..")]), "means a directory"),
        ("no name", leaf(vec![file(b"")]), "it is empty"),
        ("name past the end", with(good.clone(), NAME_LEN, &[255]), "ends too early"),
        ("file too long", with(good.clone(), SIZE, &[0x80]), "length of 9223372036854776321"),
        ("space", with(good.clone(), BLOCKS, &[1]), "space taken"),
        ("linked directory", linked(FileKind::Directory, 7), "several names"),
        ("link to no file", linked(FileKind::Regular, 0), "several names"),
        ("owner without a number", owned(Owner { links: 1, ..Owner::default() }), "number 0"),
        ("owner without names", owned(Owner { inode: 1, ..Owner::default() }), "no names"),
        ("zero inode", with(good.clone(), INODE, &[0; 32]), "inode block is zero"),
    ];
    for (what, block, part) in cases {
        let told = reason(block);
        assert!(told.contains(part), "{what}: {told:?} does not say {part:?}");
    }
}

/// A name of 300 bytes cannot be written down: its length has one byte. One that claims
/// 255 bytes and has fewer is cut short.
#[test]
fn a_name_is_never_longer_than_255_bytes() {
    let long = vec![b'n'; 255];
    let block = decode_directory(leaf(vec![file(&long)])).expect("255 bytes are allowed");
    assert_eq!(block.first_name().len(), 255);
    let result = std::panic::catch_unwind(|| leaf(vec![file(&[b'n'; 300])]));
    assert!(result.is_err(), "the publisher's own mistake is an assertion");
}

#[test]
fn links_and_directories_that_lie_are_refused() {
    let with_content = |content| leaf(vec![DirectoryEntry { content, ..file(b"a") }]);
    let directory = |entries, subdirectories, hash| {
        with_content(Content::Directory(DirectoryRef { entries, subdirectories, hash }))
    };
    let link = |target: &'static [u8]| DirectoryEntry {
        content: Content::Symlink(Bytes::from_static(target)),
        ..file(b"a")
    };
    let cases = [
        (leaf(vec![link(b""), file(b"b")]), "it is empty"),
        (with_content(Content::Symlink(Bytes::from_static(b"a\0b"))), "NUL"),
        (directory(1, 2, Some(hash(1))), "subdirectories, against entries"),
        (directory(1, 0, Some(hash(0))), "directory block is zero"),
        (directory(0, 0, Some(hash(1))), "32 bytes too many"),
        (directory(1, 0, None), "ends too early"),
        (
            leaf(vec![DirectoryEntry { xattrs: Some(hash(0)), ..file(b"a") }]),
            "hash of the xattr block is zero",
        ),
    ];
    for (block, part) in cases {
        let told = decode_directory(block).expect_err("it lies").to_string();
        assert!(told.contains(part), "{told:?} does not say {part:?}");
    }
    // A target's length is written before it: 4,096 is one too many.
    let mut long = with_content(Content::Symlink(Bytes::from(vec![b't'; 4095])));
    assert!(decode_directory(long.clone()).is_ok());
    long[28..30].copy_from_slice(&4096u16.to_be_bytes());
    long.push(b't');
    assert_eq!(
        decode_directory(long),
        Err(FormatError::BadTarget("it is longer than a path can be"))
    );
}

#[test]
fn an_interior_block_that_lies_is_refused() {
    let good = interior(1, &["a", "c"]);
    assert!(decode_directory(good.clone()).is_ok());
    let cases = [
        (interior(1, &["c", "a"]), "not in order"),
        (interior(1, &["a", "a"]), "there twice"),
        (interior(1, &["a/b"]), "slash"),
        (with(good.clone(), 10, &[0; 32]), "directory block is zero"),
        (with(good.clone(), 42, &[0; 8]), "subdirectories, against entries"),
    ];
    for (block, part) in cases {
        let told = decode_directory(block).expect_err("it lies").to_string();
        assert!(told.contains(part), "{told:?} does not say {part:?}");
    }
}

#[test]
fn a_directory_block_in_the_wrong_place_is_refused() {
    let block = decode_directory(leaf(vec![file(b"b"), file(b"d")])).expect("good");
    let child = |first: &'static [u8], entries, subdirectories| Child {
        hash: hash(1),
        entries,
        subdirectories,
        first_name: Bytes::from_static(first),
    };
    let place = |level, child: &Child, next: Option<&'static [u8]>| {
        let next = next.map(Bytes::from_static);
        block.check_place(level, child, next.as_ref()).map_err(|error| error.to_string())
    };
    assert_eq!(place(1, &child(b"b", 2, 0), Some(b"e")), Ok(()));
    let wrong = [
        (place(2, &child(b"b", 2, 0), None), "level"),
        (place(1, &child(b"b", 3, 0), None), "3 stated, 2 found"),
        (place(1, &child(b"b", 2, 1), None), "1 stated, 0 found"),
        (place(1, &child(b"a", 2, 0), None), "not in order"),
        (place(1, &child(b"b", 2, 0), Some(b"d")), "not in order"),
    ];
    for (result, part) in wrong {
        let told = result.expect_err("it is in the wrong place");
        assert!(told.contains(part), "{told:?} does not say {part:?}");
    }
}

fn inode(size_bytes: u64, log2: u8, rest: &[u8]) -> Result<InodeBlock, FormatError> {
    let mut block = b"ATIN\x01".to_vec();
    block.push(log2);
    block.extend_from_slice(&size_bytes.to_be_bytes());
    block.extend_from_slice(rest);
    InodeBlock::decode(&Bytes::from(block))
}

#[test]
fn an_inode_block_whose_length_lies_is_refused() {
    assert!(inode(3, 12, b"abc").is_ok());
    let pointers = |count: usize| vec![7; count * 32];
    assert!(inode(4097, 12, &pointers(2)).is_ok());
    let cases = [
        (inode(4, 12, b"abc"), "4 stated, 3 found"),
        (inode(2, 12, b"abc"), "2 stated, 3 found"),
        (inode(0, 12, b""), "empty file has no inode"),
        (inode(u64::MAX, 12, &pointers(2)), "length of 18446744073709551615"),
        (inode(1 << 62, 12, &pointers(2)), "stated, 64 found"),
        (inode(4097, 12, &pointers(1)), "64 stated, 32 found"),
        (inode(4097, 12, &pointers(3)), "64 stated, 96 found"),
        (inode(4097, 12, &[7; 65]), "64 stated, 65 found"),
        (inode(4097, 11, &pointers(3)), "2^11"),
        (inode(4097, 21, &pointers(3)), "2^21"),
        (inode(4097, 255, &pointers(3)), "2^255"),
    ];
    for (result, part) in cases {
        let told = result.expect_err("it lies").to_string();
        assert!(told.contains(part), "{told:?} does not say {part:?}");
    }
    let size = inode(3, 12, b"abc").expect("good").check_size(4);
    assert!(matches!(size, Err(FormatError::Mismatch { stated: 4, found: 3, .. })));
}

#[test]
fn an_indirect_block_that_lies_is_refused() {
    let block = |level: u8, rest: &[u8]| {
        let mut block = b"ATPT\x01".to_vec();
        block.push(level);
        block.extend_from_slice(rest);
        PointerBlock::decode(&Bytes::from(block))
    };
    let good = block(1, &[7; 64]).expect("good");
    assert_eq!(good.check_place(1, 2), Ok(()));
    let cases = [
        (block(0, &[7; 64]).map(drop), "0 levels"),
        (block(5, &[7; 64]).map(drop), "5 levels"),
        (block(1, &[]).map(drop), "0 found"),
        (block(1, &[7; 33]).map(drop), "33 found"),
        (block(1, &[7; 32 * 2049]).map(drop), "2049 found"),
        (block(1, &[0; 64]).map(drop), "nothing but holes"),
        (good.check_place(2, 2), "2 stated, 1 found"),
        (good.check_place(1, 3), "3 stated, 2 found"),
    ];
    for (result, part) in cases {
        let told = result.expect_err("it lies").to_string();
        assert!(told.contains(part), "{told:?} does not say {part:?}");
    }
}

#[test]
fn the_shape_of_a_file_follows_from_its_length_at_every_size() {
    for log2 in [12, 16, 20] {
        for power in 0..63 {
            for size in [(1u64 << power) - 1, 1 << power, (1 << power) + 1] {
                let Ok(shape) = Shape::new(size, log2) else { continue };
                if shape.is_inline() {
                    continue;
                }
                let levels = shape.indirect_levels();
                assert!(levels <= 4 && shape.top_pointers() <= 256, "{size} {log2}");
                assert!(levels == 0 || shape.data_blocks() > 256, "{size} {log2}");
                let covered = shape.top_pointers().saturating_mul(Shape::span_blocks(levels));
                assert!(covered >= shape.data_blocks(), "{size} {log2}");
                let last = shape.data_blocks() - 1;
                assert!((1..=1 << log2).contains(&shape.block_len_bytes(last)), "{size} {log2}");
            }
        }
    }
}

#[test]
fn a_root_payload_that_lies_is_refused() {
    let good = Root {
        label: Some("maps".into()),
        ..root_of(DirectoryRef { entries: 3, subdirectories: 1, hash: Some(hash(4)) })
    };
    let decode = |bytes: Vec<u8>| Root::decode(&Bytes::from(bytes));
    let mut mounted = good.clone();
    mounted.mounted.history = DirectoryRef { entries: 2, subdirectories: 0, hash: Some(hash(5)) };
    for keep in ["none", "5m/1000w", "24h/7d/4w"] {
        mounted.mounted.keep = keep.parse().expect("a policy");
        assert_eq!(decode(mounted.encode()).as_ref(), Ok(&mounted));
    }
    mounted.mounted.replaced = DirectoryRef { entries: 1, subdirectories: 0, hash: Some(hash(6)) };
    mounted.mounted.has_own_blocks = true;
    assert_eq!(decode(mounted.encode()).as_ref(), Ok(&mounted));
    let bytes = good.encode();
    assert_eq!(decode(bytes.clone()), Ok(good));
    let field = |tag: u8, value: &[u8]| {
        let mut out = bytes.clone();
        out.push(tag);
        out.extend_from_slice(&(value.len() as u16).to_be_bytes());
        out.extend_from_slice(value);
        decode(out)
    };
    assert!(field(77, b"from a later program").is_ok(), "what may be skipped is skipped");
    let cases = [
        (decode(with(bytes.clone(), 0, b"ATDB")), "not a volume root"),
        (decode(with(bytes.clone(), 4, &[2])), "layout 2"),
        (decode(with(bytes.clone(), 5, &[40])), "2^40"),
        (decode(with(bytes.clone(), 6, &[0xff])), "mode"),
        (decode(bytes[..90].to_vec()), "ends too early"),
        (decode(with(bytes.clone(), 76, &[0; 32])), "directory block is zero"),
        (field(130, b""), "feature 130"),
        (field(129, b"1"), "feature 129"),
        (field(128, b""), "ends too early"),
        (field(9, &[0; 17]), "1 bytes too many"),
        (field(128, &[0; 17]), "1 bytes too many"),
        (field(3, &[0; 44]), "number 0"),
        (field(4, &[1; 9]), "1 bytes too many"),
        (field(5, &[1; 23]), "ends too early"),
        (field(6, &[0; 17]), "1 bytes too many"),
        (field(6, &[0, 0, 0, 0, 0, 0, 0, 1]), "ends too early"),
        (field(7, &[0; 11]), "1 bytes too many"),
        (field(7, &[0; 9]), "ends too early"),
        (field(1, b"again"), "out of order"),
        (field(2, b"short"), "no hash"),
        (field(2, &[0; 32]), "xattr block is zero"),
    ];
    for (result, part) in cases {
        let told = result.expect_err("it lies").to_string();
        assert!(told.contains(part), "{told:?} does not say {part:?}");
    }
    for label in [&b""[..], b"\xff", &[b'x'; 256]] {
        let mut out = root_of(DirectoryRef::default()).encode();
        out.push(1);
        out.extend_from_slice(&(label.len() as u16).to_be_bytes());
        out.extend_from_slice(label);
        assert!(decode(out).is_err());
    }
}

#[test]
fn an_xattr_block_that_lies_is_refused() {
    let pair = |name: &'static str, value: &'static str| {
        (Bytes::from_static(name.as_bytes()), Bytes::from_static(value.as_bytes()))
    };
    let block = |pairs: &[(Bytes, Bytes)]| xattrs::encode(pairs).expect("fits");
    let decode = |bytes: Vec<u8>| xattrs::decode(&Bytes::from(bytes));
    let good = [pair("user.a", "1"), pair("user.b", "")];
    assert_eq!(decode(block(&good)).as_deref(), Ok(&good[..]));
    let one = block(&good[..1]);
    let cases = [
        (decode(block(&[pair("security.capability", "x")])), "user namespace"),
        (decode(block(&[pair("system.posix_acl_access", "x")])), "user namespace"),
        (decode(block(&[pair("user.", "x")])), "user namespace"),
        (decode(block(&[pair("user.a\0b", "x")])), "NUL"),
        (decode(block(&[pair("user.b", ""), pair("user.a", "")])), "not in order"),
        (decode(block(&[pair("user.a", ""), pair("user.a", "")])), "there twice"),
        (decode(block(&[])), "empty"),
        (decode(with(one.clone(), 5, &[0xff, 0xff])), "ends too early"),
        (decode(with(one.clone(), 14, &[0xff; 4])), "ends too early"),
        (decode([one, vec![0]].concat()), "1 bytes too many"),
        (decode(vec![b'A'; (128 << 10) + 1]), "bytes too many"),
    ];
    for (result, part) in cases {
        let told = result.expect_err("it lies").to_string();
        assert!(told.contains(part), "{told:?} does not say {part:?}");
    }
    let large = [(Bytes::from_static(b"user.a"), Bytes::from(vec![0; 128 << 10]))];
    assert_eq!(xattrs::encode(&large), None);
}

/// All decoders at once: for fuzzing, and for [`any_bytes`](self) here.
fn decode_all(bytes: &Bytes) {
    let _ = Root::decode(bytes);
    let _ = DirectoryBlock::decode(bytes);
    let _ = InodeBlock::decode(bytes);
    let _ = PointerBlock::decode(bytes);
    let _ = xattrs::decode(bytes);
}

/// The largest block there can be, made to look like as many nodes as possible.
#[test]
fn the_largest_block_of_the_shortest_nodes_is_refused_without_reading_what_it_claims() {
    let mut block = vec![0; MAX_BLOCK_BYTES];
    block[..5].copy_from_slice(b"ATDB\x01");
    block[6..10].copy_from_slice(&u32::MAX.to_be_bytes());
    assert_eq!(decode_directory(block), Err(FormatError::Truncated));
}

fn entry() -> impl Strategy<Value = DirectoryEntry> {
    let content = prop_oneof![
        (1u64..1 << 40, any::<[u8; 32]>()).prop_map(|(size_bytes, mut inode)| {
            inode[0] |= 1;
            let blocks_512 = size_bytes.div_ceil(512) / 2;
            Content::Regular { size_bytes, blocks_512, inode: Some(BlockHash(inode)) }
        }),
        Just(Content::Regular { size_bytes: 0, blocks_512: 0, inode: None }),
        (1u64..100).prop_map(|entries| Content::Directory(DirectoryRef {
            entries,
            subdirectories: entries / 2,
            hash: Some(BlockHash([9; 32])),
        })),
        Just(Content::Directory(DirectoryRef::default())),
        "[a-z/.]{1,60}".prop_map(|target| Content::Symlink(Bytes::from(target))),
        Just(Content::Special { kind: FileKind::Fifo, rdev: 0 }),
        Just(Content::Special { kind: FileKind::Socket, rdev: 0 }),
        any::<u64>().prop_map(|rdev| Content::Special { kind: FileKind::BlockDevice, rdev }),
        (1u64..).prop_map(|inode| Content::Linked { kind: FileKind::CharDevice, inode }),
    ];
    let name = "[a-zA-Z0-9 ]{1,40}";
    let owner =
        (1u64.., any::<u32>(), any::<u32>(), 1u32..).prop_map(|(inode, uid, gid, links)| {
            let (ctime, atime) =
                (FileTime { secs: -1, nanos: 2 }, FileTime { secs: i64::MAX, nanos: 999_999_999 });
            Owner { inode, uid, gid, links, ctime, atime }
        });
    let owner = proptest::option::of(owner);
    (name, 0u32..0o10000, any::<i64>(), 0u32..1_000_000_000, content, any::<bool>(), owner)
        .prop_map(|(name, mode, secs, nanos, content, xattrs, owner)| DirectoryEntry {
            name: Bytes::from(name),
            mode,
            mtime: FileTime { secs, nanos },
            content,
            xattrs: xattrs.then_some(BlockHash([5; 32])),
            owner,
        })
}

/// A directory with a FIFO alone was taken for one that is cut short.
#[test]
fn a_directory_of_the_shortest_entry_reads_back() {
    let content = Content::Special { kind: FileKind::Fifo, rdev: 0 };
    let entry = DirectoryEntry {
        name: Bytes::from_static(b"a"),
        mode: 0,
        mtime: FileTime { secs: 0, nanos: 0 },
        content,
        xattrs: None,
        owner: None,
    };
    let block = DirectoryBlock { level: 0, nodes: Nodes::Leaf(vec![entry]) };
    assert_eq!(DirectoryBlock::decode(&Bytes::from(block.encode())), Ok(block));
}

proptest! {
    #[test]
    fn a_directory_block_reads_back(
        entries in proptest::collection::btree_map("[a-z]{1,30}", entry(), 1..40),
    ) {
        let entries: Vec<DirectoryEntry> = entries
            .into_iter()
            .map(|(name, entry)| DirectoryEntry { name: Bytes::from(name), ..entry })
            .collect();
        let block = DirectoryBlock { level: 0, nodes: Nodes::Leaf(entries) };
        let bytes = Bytes::from(block.encode());
        let back = DirectoryBlock::decode(&bytes).expect("good");
        prop_assert_eq!(&back, &block);
        prop_assert_eq!(back.encode(), bytes);
    }

    #[test]
    fn any_bytes_decode_or_fail_without_panic(
        magic in prop_oneof![Just("ATVR"), Just("ATDB"), Just("ATIN"), Just("ATPT"), Just("ATXA")],
        bytes in proptest::collection::vec(any::<u8>(), 0..400),
    ) {
        decode_all(&Bytes::from(bytes.clone()));
        decode_all(&Bytes::from([magic.as_bytes(), b"\x01", &bytes].concat()));
        // Counts that are small are believed further.
        decode_all(&Bytes::from([magic.as_bytes(), b"\x01\x00\x00\x00\x00\x02", &bytes].concat()));
    }

    #[test]
    fn what_decodes_has_one_encoding(at in 0usize..400, flip in 1u8..) {
        let bytes = leaf(vec![file(b"a"), file(b"b"), file(b"c")]);
        let at = at % bytes.len();
        let byte = bytes[at] ^ flip;
        if let Ok(block) = decode_directory(with(bytes.clone(), at, &[byte])) {
            prop_assert_eq!(block.encode(), with(bytes, at, &[byte]));
        }
    }

    #[test]
    fn an_inline_inode_reads_back(bytes in proptest::collection::vec(any::<u8>(), 1..4096)) {
        let shape = Shape::new(bytes.len() as u64, 12).expect("allowed");
        let block = InodeBlock { shape, data: Data::Inline(Bytes::from(bytes)) };
        prop_assert_eq!(InodeBlock::decode(&Bytes::from(block.encode())), Ok(block));
    }
}
