//! Trees signed by a publisher who means harm: each is read by path, by mount and by copy,
//! and each way says which path and block is wrong.

use std::sync::Arc;

use atoll_dht::{GetError, MemoryBlocks};
use atoll_key::BlockHash;
use atoll_vfs::{Caller, Errno, FileSystem, InodeNumber, OpenFlags};
use atoll_volume::format::inode::{Data, Shape};
use atoll_volume::format::{
    Child, Content, DirectoryBlock, DirectoryEntry, DirectoryRef, FormatError, InodeBlock, Nodes,
    PointerBlock,
};
use atoll_volume::owned::{
    GetOptions, GetTreeError, NoProgress, ReadError, VolumeFs, VolumeOptions, get_tree,
};
use bytes::Bytes;
use futures_util::TryStreamExt;

use crate::ring::{env, open_with, put, put_root, root_of, snapshot};

fn entry(name: &str, content: Content) -> DirectoryEntry {
    let name = Bytes::copy_from_slice(name.as_bytes());
    DirectoryEntry {
        name,
        mode: 0o644,
        mtime: Default::default(),
        content,
        xattrs: None,
        owner: None,
    }
}

fn file(name: &str, size_bytes: u64, inode: BlockHash) -> DirectoryEntry {
    entry(name, Content::Regular { size_bytes, blocks_512: 0, inode: Some(inode) })
}

fn dir(name: &str, entries: u64, subdirectories: u64, hash: BlockHash) -> DirectoryEntry {
    let directory = DirectoryRef { entries, subdirectories, hash: Some(hash) };
    entry(name, Content::Directory(directory))
}

fn leaf(entries: Vec<DirectoryEntry>) -> Vec<u8> {
    DirectoryBlock { level: 0, nodes: Nodes::Leaf(entries) }.encode()
}

/// A ring whose volume has these entries at its top.
async fn ring_with(blocks: &Arc<MemoryBlocks>, entries: Vec<DirectoryEntry>) {
    let count = entries.len() as u64;
    let dirs = entries.iter().filter(|e| matches!(e.content, Content::Directory(_))).count();
    let hash = put(&**blocks, leaf(entries)).await;
    ring_of(blocks, DirectoryRef { entries: count, subdirectories: dirs as u64, hash: Some(hash) })
        .await;
}

async fn ring_of(blocks: &Arc<MemoryBlocks>, directory: DirectoryRef) {
    put_root(&**blocks, 1, &root_of(directory).encode()).await;
}

/// Reads the file `path` in every way there is; each must say the same of `block`.
async fn assert_bad(blocks: &Arc<MemoryBlocks>, path: &str, block: BlockHash, part: &str) {
    let snapshot = snapshot(blocks).await;
    let by_path = async {
        let item = snapshot.resolve(path.as_bytes()).await?;
        snapshot.read_stream(&item).try_for_each(|_| async { Ok(()) }).await
    };
    let error = by_path.await.expect_err("it is bad");
    let ReadError::Bad { hash, .. } = &error else { panic!("{error}") };
    assert_eq!(*hash, block, "{error}");
    let told = error.to_string();
    assert!(told.starts_with('/') && told.contains(part), "{told:?} does not say {part:?}");
    assert!(told.contains(&block.to_string()), "{told:?} does not name the block");

    let dest = tempfile::tempdir().expect("a directory");
    let (root, dest) = (snapshot.root(), dest.path().join("copy"));
    let (options, progress) = (GetOptions::default(), Arc::new(NoProgress));
    let copied = get_tree(snapshot.clone(), &root, &dest, options, progress).await;
    let error = copied.expect_err("it is bad");
    let GetTreeError::Read(read) = &error else { panic!("{error}") };
    assert!(matches!(**read, ReadError::Bad { .. }), "{error}");

    let volume = open_with(blocks, VolumeOptions::default()).await;
    let fs = VolumeFs::new(env(), volume, 0, 0);
    let by_mount = async {
        let mut inode = InodeNumber::ROOT;
        for name in path.split('/') {
            inode = fs.lookup(Caller::default(), inode, name.as_bytes()).await?.attr.inode;
        }
        let handle = fs.open(Caller::default(), inode, OpenFlags::READ).await?.handle;
        let mut offset = 0;
        loop {
            let part = fs.read(inode, handle, offset, 1 << 20).await?;
            if part.is_empty() {
                return Ok(());
            }
            offset += part.len() as u64;
        }
    };
    assert_eq!(by_mount.await, Err(Errno::EIO));
}

#[tokio::test]
async fn a_file_whose_length_lies_is_refused() {
    let blocks = Arc::new(MemoryBlocks::new());
    let shape = Shape::new(5, 12).expect("allowed");
    let data = Data::Inline(Bytes::from_static(b"hello"));
    let inode = put(&*blocks, InodeBlock { shape, data }.encode()).await;
    ring_with(&blocks, vec![file("file", 6, inode)]).await;
    assert_bad(&blocks, "file", inode, "length of a file: 6 stated, 5 found").await;
}

#[tokio::test]
async fn data_blocks_of_the_wrong_length_are_refused() {
    for (first, last) in [(4095, 1), (4097, 1), (4096, 2), (0, 1)] {
        let blocks = Arc::new(MemoryBlocks::new());
        let one = put(&*blocks, vec![1; first]).await;
        let two = put(&*blocks, vec![2; last]).await;
        let shape = Shape::new(4097, 12).expect("allowed");
        let data = Data::Pointers(Bytes::from([one.0, two.0].concat()));
        let inode = put(&*blocks, InodeBlock { shape, data }.encode()).await;
        ring_with(&blocks, vec![file("file", 4097, inode)]).await;
        let bad = if first == 4096 { two } else { one };
        assert_bad(&blocks, "file", bad, "bytes of a data block").await;
    }
}

#[tokio::test]
async fn indirect_blocks_of_the_wrong_level_or_number_are_refused() {
    let data = vec![7; 4096];
    let hash = BlockHash::of(&data);
    // 300 data blocks: one indirect block of level 1 with 300 pointers.
    let wrong = [
        (PointerBlock::encode(2, &vec![Some(hash); 300]), "level of an indirect block"),
        (PointerBlock::encode(1, &vec![Some(hash); 299]), "300 stated, 299 found"),
        (PointerBlock::encode(1, &vec![None; 300]), "nothing but holes"),
        (data.clone(), "not a indirect block"),
    ];
    for (block, part) in wrong {
        let blocks = Arc::new(MemoryBlocks::new());
        put(&*blocks, data.clone()).await;
        let indirect = put(&*blocks, block).await;
        let shape = Shape::new(300 * 4096, 12).expect("allowed");
        let pointers = Data::Pointers(Bytes::copy_from_slice(&indirect.0));
        let inode = put(&*blocks, InodeBlock { shape, data: pointers }.encode()).await;
        ring_with(&blocks, vec![file("file", 300 * 4096, inode)]).await;
        assert_bad(&blocks, "file", indirect, part).await;
    }
}

#[tokio::test]
async fn a_block_of_another_kind_is_refused_wherever_it_is_put() {
    let blocks = Arc::new(MemoryBlocks::new());
    let shape = Shape::new(5, 12).expect("allowed");
    let data = Data::Inline(Bytes::from_static(b"hello"));
    let inode = put(&*blocks, InodeBlock { shape, data }.encode()).await;
    ring_with(&blocks, vec![dir("dir", 1, 0, inode)]).await;
    assert_bad(&blocks, "dir/x", inode, "not a directory block").await;

    let blocks = Arc::new(MemoryBlocks::new());
    let directory = put(&*blocks, leaf(vec![file("x", 1, BlockHash([1; 32]))])).await;
    ring_with(&blocks, vec![file("file", 5, directory)]).await;
    assert_bad(&blocks, "file", directory, "not a inode block").await;
}

#[tokio::test]
async fn a_directory_whose_counts_lie_is_refused() {
    let blocks = Arc::new(MemoryBlocks::new());
    let inner = put(&*blocks, leaf(vec![file("x", 1, BlockHash([1; 32]))])).await;
    for (entries, subdirectories) in [(2, 0), (u64::MAX, 0), (1, 1)] {
        let blocks_now = Arc::new(MemoryBlocks::new());
        put(&*blocks_now, leaf(vec![file("x", 1, BlockHash([1; 32]))])).await;
        ring_with(&blocks_now, vec![dir("dir", entries, subdirectories, inner)]).await;
        assert_bad(&blocks_now, "dir/x", inner, "stated").await;
    }
}

#[tokio::test]
async fn leaves_that_are_not_where_their_names_belong_are_refused() {
    let item = |name| file(name, 1, BlockHash([1; 32]));
    // The second leaf begins before the name its parent gives; or the first goes on past it.
    let cases = [
        (vec![item("a"), item("b")], vec![item("c")], "b", true),
        (vec![item("a"), item("n")], vec![item("m")], "m", false),
    ];
    for (first, second, second_name, second_bad) in cases {
        let blocks = Arc::new(MemoryBlocks::new());
        let counts = (first.len() as u64, second.len() as u64);
        let one = put(&*blocks, leaf(first)).await;
        let two = put(&*blocks, leaf(second)).await;
        let child = |hash, entries, name: &str| Child {
            hash,
            entries,
            subdirectories: 0,
            first_name: Bytes::copy_from_slice(name.as_bytes()),
        };
        let children = vec![child(one, counts.0, "a"), child(two, counts.1, second_name)];
        let top = DirectoryBlock { level: 1, nodes: Nodes::Interior(children) }.encode();
        let hash = put(&*blocks, top).await;
        let entries = counts.0 + counts.1;
        ring_of(&blocks, DirectoryRef { entries, subdirectories: 0, hash: Some(hash) }).await;
        let (path, bad) = if second_bad { ("b", two) } else { ("a", one) };
        assert_bad(&blocks, path, bad, "not in order").await;
    }
}

/// A hash cannot contain itself, but a few blocks can describe a tree of any depth: a
/// directory that holds one directory, and so on. A copy reports the directory that lies too deep, and copies what lies
/// beside it, which it did not do once; a path may be as long as who asks makes it.
#[tokio::test]
async fn a_copy_leaves_out_what_lies_too_deep_and_nothing_else() {
    let blocks = Arc::new(MemoryBlocks::new());
    let regular = Content::Regular { size_bytes: 0, blocks_512: 0, inode: None };
    let empty = |name: &str| entry(name, regular.clone());
    let mut hash = put(&*blocks, leaf(vec![file("x", 1, BlockHash([1; 32]))])).await;
    let (mut entries, mut subdirectories) = (1, 0);
    for _ in 0..200 {
        let directory = dir("d", entries, subdirectories, hash);
        hash = put(&*blocks, leaf(vec![directory, empty("z")])).await;
        (entries, subdirectories) = (2, 1);
    }
    ring_of(&blocks, DirectoryRef { entries, subdirectories, hash: Some(hash) }).await;
    let snapshot = snapshot(&blocks).await;
    let dest = tempfile::tempdir().expect("a directory");
    let copy = dest.path().join("copy");
    let (root, progress) = (snapshot.root(), Arc::new(NoProgress));
    let copied = get_tree(snapshot.clone(), &root, &copy, GetOptions::default(), progress).await;
    let copied = copied.expect("all but one directory");
    assert_eq!((copied.files, copied.dirs, copied.unread_count), (129, 129, 2));
    let [unread] = &copied.unread[..] else { panic!("{:?}", copied.unread) };
    let ReadError::Bad { source, path, .. } = &unread.error else { panic!("{}", unread.error) };
    assert_eq!((source, path.matches("d").count()), (&FormatError::TooDeep, 129));
    assert!(copy.join("z").is_file());
    let path = vec!["d"; 200].join("/");
    assert!(snapshot.resolve(path.as_bytes()).await.is_ok());
}

#[tokio::test]
async fn a_chain_of_interior_blocks_ends_at_the_eighth_level() {
    let blocks = Arc::new(MemoryBlocks::new());
    let mut hash = put(&*blocks, leaf(vec![file("x", 1, BlockHash([1; 32]))])).await;
    let mut top = hash;
    for level in 1..=8 {
        let first_name = Bytes::from_static(b"x");
        let child = Child { hash, entries: 1, subdirectories: 0, first_name };
        let block = DirectoryBlock { level, nodes: Nodes::Interior(vec![child]) }.encode();
        hash = put(&*blocks, block).await;
        if level == 7 {
            top = hash;
        }
    }
    let directory = |hash| DirectoryRef { entries: 1, subdirectories: 0, hash: Some(hash) };
    ring_of(&blocks, directory(top)).await;
    assert!(snapshot(&blocks).await.resolve(b"x").await.is_ok());
    let blocks_too = blocks.clone();
    put_root(&*blocks_too, 2, &root_of(directory(hash)).encode()).await;
    assert_bad(&blocks_too, "x", hash, "9 levels; the limit is 8").await;
}

/// Symbolic links are handed out as they are and not followed here.
#[tokio::test]
async fn links_are_not_followed_when_a_path_is_resolved() {
    let blocks = Arc::new(MemoryBlocks::new());
    let to_itself = entry("loop", Content::Symlink(Bytes::from_static(b"loop")));
    let up = entry("up", Content::Symlink(Bytes::from_static(b"../../etc/passwd")));
    ring_with(&blocks, vec![to_itself, up]).await;
    let snapshot = snapshot(&blocks).await;
    let item = snapshot.resolve(b"loop").await.expect("is there");
    assert_eq!(item.target().map(|t| &t[..]), Some(&b"loop"[..]));
    let below = snapshot.resolve(b"up/x").await;
    assert!(matches!(below, Err(ReadError::NotADirectory { .. })));
    assert!(matches!(snapshot.resolve(b"a/../b").await, Err(ReadError::NoSuchEntry { .. })));
    assert!(matches!(snapshot.resolve(b"../b").await, Err(ReadError::GoesUp { .. })));
}

#[tokio::test]
async fn a_missing_block_is_reported_with_its_path_and_its_name() {
    let blocks = Arc::new(MemoryBlocks::new());
    let lost = BlockHash([0x77; 32]);
    let inner = put(&*blocks, leaf(vec![file("file", 5, lost)])).await;
    ring_with(&blocks, vec![dir("dir", 1, 0, inner)]).await;
    let snapshot = snapshot(&blocks).await;
    let item = snapshot.resolve(b"dir/file").await.expect("is there");
    let error = snapshot.read_range(&item, 0, 5).await.expect_err("it is lost");
    let told = error.to_string();
    assert!(told.contains("/dir/file") && told.contains(&lost.to_string()), "{told}");
    let ReadError::Fetch { source: GetError::NotFound { key, .. }, .. } = error else {
        panic!("{error}")
    };
    assert_eq!(key, lost.key());
}

/// Eight exbibytes of holes, and one byte at the end: no code steps through them.
#[tokio::test]
async fn a_huge_hole_costs_nothing_to_pass_over() {
    let blocks = Arc::new(MemoryBlocks::new());
    let size = i64::MAX as u64;
    let shape = Shape::new(size, 12).expect("allowed");
    let pointers = vec![0; shape.top_pointers() as usize * 32];
    let data = Data::Pointers(Bytes::from(pointers));
    let inode = put(&*blocks, InodeBlock { shape, data }.encode()).await;
    ring_with(&blocks, vec![file("file", size, inode)]).await;
    let volume = open_with(&blocks, VolumeOptions::default()).await;
    let fs = VolumeFs::new(env(), volume, 0, 0);
    let me = Caller::default();
    let found = fs.lookup(me, InodeNumber::ROOT, b"file").await.expect("is there").attr;
    let handle = fs.open(me, found.inode, OpenFlags::READ).await.expect("opens").handle;
    let part = fs.read(found.inode, handle, size - 10, 100).await.expect("reads");
    assert_eq!(part, vec![0; 10]);
    let data = fs.seek(found.inode, handle, 5, atoll_vfs::SeekTo::Data).await;
    assert_eq!(data, Err(Errno::ENXIO));
}
