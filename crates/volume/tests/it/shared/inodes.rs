//! The bytes of inodes.

use atoll_key::BlockHash;
use atoll_vfs::{FileKind, FileTime};
use atoll_volume::format::InodeBlock;
use atoll_volume::format::inode::{Data, Shape};
use atoll_volume::shared::entries::Entries;
use atoll_volume::shared::inode::{
    Attributes, Contents, FileData, Inode, InodeKey, Link, MAX_LINKS, MAX_XATTR_BYTES, TooLarge,
    Written,
};
use bytes::Bytes;
use proptest::prelude::*;

use super::{dot, entry, inode};

fn written() -> Written {
    Written { dot: dot(1, 7), time_ms: 1_795_442_101_000 }
}

fn small_file(bytes: &[u8]) -> Contents {
    let shape = Shape::new(bytes.len() as u64, 16).expect("allowed");
    let block = InodeBlock { shape, data: Data::Inline(Bytes::copy_from_slice(bytes)) };
    let size_bytes = bytes.len() as u64;
    Contents::Regular {
        size_bytes,
        blocks_512: 1,
        data: Some(FileData::Here(block)),
        written: written(),
    }
}

fn large_file() -> Contents {
    let data = Some(FileData::Elsewhere(BlockHash([7; 32])));
    Contents::Regular { size_bytes: 1 << 40, blocks_512: 9, data, written: written() }
}

fn all_kinds() -> Vec<Inode> {
    let entries = Entries::from_iter([
        entry("a", 1, dot(1, 5)),
        entry("a", 2, dot(2, 5)),
        entry("b", 1, dot(1, 6)),
    ]);
    let mut inodes: Vec<Inode> = vec![
        inode(Contents::Regular { size_bytes: 0, blocks_512: 0, data: None, written: written() }),
        inode(small_file(b"atoll\n")),
        inode(large_file()),
        inode(Contents::Directory(Entries::default())),
        inode(Contents::Directory(entries)),
        inode(Contents::Symlink(Bytes::from_static(b"../target"))),
        inode(Contents::Special { kind: FileKind::Fifo, rdev: 0 }),
        inode(Contents::Special { kind: FileKind::BlockDevice, rdev: 0x801 }),
    ];
    inodes[1].attributes = Attributes {
        mode: 0o4755,
        uid: 1000,
        gid: 100,
        mtime: FileTime { secs: -1, nanos: 999_999_999 },
        ctime: FileTime { secs: 2, nanos: 3 },
        atime: FileTime { secs: i64::MAX, nanos: 0 },
        xattrs: vec![(Bytes::from_static(b"user.a"), Bytes::from_static(b"value"))],
        origin: None,
    };
    inodes[1].links = (1..=3)
        .map(|n| Link { added: dot(n, u64::from(n)), directory: InodeKey([n; 32]) })
        .collect();
    inodes
}

#[test]
fn inodes_of_all_kinds_read_back() {
    for inode in all_kinds() {
        let bytes = Bytes::from(inode.encode().expect("short"));
        assert_eq!(Inode::decode(&bytes), Ok(inode));
        for cut in 0..bytes.len() {
            assert!(Inode::decode(&bytes.slice(..cut)).is_err(), "cut at {cut}");
        }
        let longer = Bytes::from([&bytes[..], &[0]].concat());
        assert!(Inode::decode(&longer).is_err());
    }
}

/// Volumes are found again by newer programs only if the bytes stay as they are.
#[test]
fn the_bytes_of_inodes_never_change() {
    let encoded: Vec<u8> =
        all_kinds().iter().flat_map(|inode| inode.encode().expect("short")).collect();
    assert_eq!(BlockHash::of(&encoded).to_hex(), GOLDEN);
}

const GOLDEN: &str = "3e54928217a0c9482dcbe54832d917d0395789c2b2ffe2133c0e04027e6b804c";

#[test]
fn what_is_too_long_for_an_inode_is_refused() {
    let mut linked = inode(Contents::Symlink(Bytes::from_static(b"x")));
    let link = |n: u64| Link { added: dot(1, n), directory: InodeKey([1; 32]) };
    linked.links = (1..=MAX_LINKS as u64).map(link).collect();
    assert!(linked.encode().is_ok());
    linked.links.insert(link(9999));
    assert_eq!(linked.encode(), Err(TooLarge::Links));

    let mut attributed = inode(large_file());
    let attribute = |bytes| (Bytes::from_static(b"user.a"), Bytes::from(vec![1; bytes]));
    attributed.attributes.xattrs = vec![attribute(MAX_XATTR_BYTES - 100)];
    assert!(attributed.encode().is_ok());
    attributed.attributes.xattrs = vec![attribute(MAX_XATTR_BYTES)];
    assert_eq!(attributed.encode(), Err(TooLarge::Xattrs));

    assert!(inode(small_file(&[1; 16_000])).encode().is_ok());
    assert_eq!(inode(small_file(&[1; 17_000])).encode(), Err(TooLarge::Payload));
    let entries =
        |count: u64| (0..count).map(|n| entry(&format!("{n:06}"), 1, dot(1, n))).collect();
    assert!(inode(Contents::Directory(entries(100_000))).encode().is_ok());
}

proptest! {
    #[test]
    fn any_bytes_are_refused_or_have_one_encoding(
        which in 0usize..8,
        changes in proptest::collection::vec((any::<usize>(), any::<u8>()), 0..4)
    ) {
        let mut bytes = all_kinds()[which].encode().expect("short");
        for (at, to) in changes {
            let at = at % bytes.len();
            bytes[at] = to;
        }
        if let Ok(inode) = Inode::decode(&Bytes::from(bytes.clone())) {
            prop_assert_eq!(inode.encode().expect("it was one"), bytes);
        }
    }
}
