//! The formats' bytes, fixed: published trees are found and shared by the hashes of these,
//! and an unnoticed change would orphan them all.

use atoll_key::BlockHash;
use atoll_vfs::FileTime;
use atoll_volume::format::inode::{Data, Shape};
use atoll_volume::format::{
    Child, Content, DirectoryBlock, DirectoryEntry, DirectoryRef, InodeBlock, Nodes, PointerBlock,
    xattrs,
};
use atoll_volume::owned::Root;
use bytes::Bytes;

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn entry(name: &'static str, content: Content, xattrs: Option<BlockHash>) -> DirectoryEntry {
    DirectoryEntry {
        name: Bytes::from_static(name.as_bytes()),
        mode: 0o644,
        mtime: FileTime { secs: -2, nanos: 3 },
        content,
        xattrs,
        owner: None,
    }
}

fn inline() -> Vec<u8> {
    let shape = Shape::new(6, 16).expect("allowed");
    InodeBlock { shape, data: Data::Inline(Bytes::from_static(b"atoll\n")) }.encode()
}

fn attributes() -> Vec<u8> {
    let pair = (Bytes::from_static(b"user.a"), Bytes::from_static(b"1"));
    xattrs::encode(&[pair]).expect("fits")
}

fn leaf() -> Vec<u8> {
    let inode = Some(BlockHash::of(&inline()));
    let entries = vec![
        entry("dir", Content::Directory(DirectoryRef::default()), None),
        entry("empty", Content::Regular { size_bytes: 0, blocks_512: 0, inode: None }, None),
        entry(
            "file",
            Content::Regular { size_bytes: 6, blocks_512: 1, inode },
            Some(BlockHash::of(&attributes())),
        ),
        entry("link", Content::Symlink(Bytes::from_static(b"file")), None),
    ];
    DirectoryBlock { level: 0, nodes: Nodes::Leaf(entries) }.encode()
}

#[test]
fn the_bytes_of_each_block_never_change() {
    let pointers = [Some(BlockHash([0xaa; 32])), None];
    let pointers = PointerBlock::encode(1, &pointers);
    let children = vec![Child {
        hash: BlockHash([0xbb; 32]),
        entries: 5,
        subdirectories: 2,
        first_name: Bytes::from_static(b"dir"),
    }];
    let interior = DirectoryBlock { level: 1, nodes: Nodes::Interior(children) };
    let root = Root {
        block_size_log2: 16,
        mode: 0o755,
        mtime: FileTime { secs: 1, nanos: 2 },
        published_unix_ms: 3,
        files: 2,
        dirs: 2,
        symlinks: 1,
        bytes: 6,
        directory: DirectoryRef {
            entries: 4,
            subdirectories: 1,
            hash: Some(BlockHash::of(&leaf())),
        },
        label: Some("label".into()),
        xattrs: Some(BlockHash([0xcc; 32])),
        mounted: Default::default(),
    };
    let found = [inline(), attributes(), leaf(), pointers, interior.encode(), root.encode()];
    assert_eq!(
        found.map(|block| hex(&block)),
        [INLINE, ATTRIBUTES, LEAF, POINTERS, INTERIOR, ROOT]
    );
}

/// A volume that is written through mounts: its root says that its blocks are content of the volume, and they are
/// named by another hash.
#[test]
fn the_bytes_of_a_volumes_own_blocks_never_change() {
    let mut root = Root {
        block_size_log2: 16,
        mode: 0o755,
        mtime: FileTime { secs: 1, nanos: 2 },
        published_unix_ms: 3,
        files: 0,
        dirs: 1,
        symlinks: 0,
        bytes: 0,
        directory: DirectoryRef::default(),
        label: None,
        xattrs: None,
        mounted: Default::default(),
    };
    let plain = hex(&root.encode());
    root.mounted.replaced =
        DirectoryRef { entries: 1, subdirectories: 0, hash: Some(BlockHash([0xdd; 32])) };
    root.mounted.has_own_blocks = true;
    let replaced = format!("090030{:016x}{:016x}{}", 1, 0, "dd".repeat(32));
    assert_eq!(hex(&root.encode()), format!("{plain}{replaced}810000"));
    let block = [&[7; 32][..], &inline()].concat();
    assert_eq!(BlockHash::of_volume_content(&block).to_hex(), OWN_BLOCK);
}

/// Where directories and files are cut into blocks is part of the format too: a publisher
/// that cuts elsewhere shares nothing with what is there.
#[tokio::test]
async fn a_published_tree_has_the_hashes_it_always_had() {
    use std::os::unix::fs::PermissionsExt;
    let source = tempfile::tempdir().expect("a directory");
    let top = source.path();
    std::fs::create_dir(top.join("many")).expect("makes");
    let file = |path: std::path::PathBuf, bytes: &[u8]| {
        std::fs::write(&path, bytes).expect("writes");
        let mode = std::fs::Permissions::from_mode(0o644);
        std::fs::set_permissions(&path, mode).expect("sets");
        crate::trees::set_mtime(&path, 7, 8);
    };
    for i in 0..2000 {
        file(top.join(format!("many/file-{i}")), format!("{i}").as_bytes());
    }
    file(top.join("large"), &crate::trees::patterned(2_000_000, 11));
    for dir in ["many", ""] {
        let path = top.join(dir);
        let mode = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(&path, mode).expect("sets");
        crate::trees::set_mtime(&path, 7, 8);
    }
    let blocks = std::sync::Arc::new(atoll_dht::MemoryBlocks::new());
    crate::ring::publish_with(&blocks, top, crate::ring::small_blocks()).await;
    let snapshot = crate::ring::snapshot(&blocks).await;
    let hash = snapshot.info().directory.hash.expect("it has entries");
    assert_eq!(hash.to_hex(), TREE);
}

const OWN_BLOCK: &str = "16685031646037bce6d77284da1259dc3879f45dda0c282d9290c2fb37d955f8";
const INLINE: &str = "4154494e0110000000000000000661746f6c6c0a";
const ATTRIBUTES: &str = "4154584101000106757365722e610000000131";
const LEAF: &str = concat!(
    "41544442010000000004020001a4fffffffffffffffe000000030364697200000000000000000000",
    "000000000000010001a4fffffffffffffffe0000000305656d707479000000000000000000000000",
    "00000000010101a4fffffffffffffffe000000030466696c65000000000000000600000000000000",
    "016e3bc9d6b30247329d1bd6bc7efae0b948b2935ce36c7a03c874f7237a848e483e3632561a8688",
    "8db0cdd88f9c9779cc9d7774ff29d5f4fbd6421c728cc1d701030001a4fffffffffffffffe000000",
    "03046c696e6b000466696c65",
);
const POINTERS: &str = concat!(
    "415450540101aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa0000",
    "000000000000000000000000000000000000000000000000000000000000",
);
const INTERIOR: &str = concat!(
    "41544442010100000001bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb",
    "bbbb0000000000000005000000000000000203646972",
);
const ROOT: &str = concat!(
    "41545652011001ed0000000000000001000000020000000000000003000000000000000200000000",
    "0000000200000000000000010000000000000006000000000000000400000000000000019436e3dd",
    "0191f154c13df6f6674a70dac982471afd0e4e760220aeccac39235f0100056c6162656c020020cc",
    "cccccccccccccccccccccccccccccccccccccccccccccccccccccccccccccc",
);
const TREE: &str = "384327f4593d1fcbf1a51ca388920f4c8b24068e59e5775e65acec9a36598721";
