//! A mounted volume: the conformance kit, updates, and what the kernel may keep.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use atoll_dht::MemoryBlocks;
use atoll_env::{BoxFuture, Env};
use atoll_key::ReadKey;
use atoll_vfs::kit::{self, Features, Subject, Tree};
use atoll_vfs::{Caller, Errno, FileSystem, Handle, InodeNumber, OpenFlags};
use atoll_volume::owned::{PublishOptions, VolumeFs, VolumeOptions};

use crate::ring::{WatchedBlocks, env, open_with, publish_with, small_blocks};
use crate::trees::{patterned, set_mtime};

/// A published volume, encrypted if there is a key.
pub(crate) struct PublishedVolume {
    pub read_key: Option<ReadKey>,
}

impl Subject for PublishedVolume {
    fn name(&self) -> String {
        let kind = if self.read_key.is_some() { "encrypted owned" } else { "owned" };
        format!("{kind} volume")
    }

    fn features(&self) -> Features {
        Features::PUBLISHED
    }

    fn env(&self) -> Env {
        env()
    }

    fn make(&self, tree: Arc<Tree>) -> BoxFuture<'_, Result<Arc<dyn FileSystem>, String>> {
        let publish = PublishOptions { read_key: self.read_key.clone(), ..small_blocks() };
        let read = VolumeOptions { read_key: self.read_key.clone(), ..VolumeOptions::default() };
        Box::pin(async move {
            let source = tempfile::tempdir().map_err(|error| error.to_string())?;
            kit::write_tree_to_disk(&tree, source.path()).map_err(|error| error.to_string())?;
            let blocks = Arc::new(MemoryBlocks::new());
            publish_with(&blocks, source.path(), publish).await;
            let volume = open_with(&blocks, read).await;
            let fs: Arc<dyn FileSystem> = Arc::new(VolumeFs::new(env(), volume, 1000, 1000));
            Ok(fs)
        })
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_conforms() {
    kit::run_read_suite(&PublishedVolume { read_key: None }).await.assert_passes();
}

const ROOT: InodeNumber = InodeNumber::ROOT;

fn me() -> Caller {
    Caller::default()
}

/// A volume that is always asked for a newer root.
pub(crate) fn eager() -> VolumeOptions {
    VolumeOptions { max_age: Duration::ZERO, ..VolumeOptions::default() }
}

async fn read_all(fs: &VolumeFs, inode: InodeNumber, handle: Handle) -> Vec<u8> {
    fs.read(inode, handle, 0, 1 << 20).await.expect("reads").to_vec()
}

/// CFS §3.1: readers "see an authentic and internally consistent view": an open file
/// keeps its version, a path shows the newest.
#[tokio::test]
async fn an_open_file_keeps_its_version_and_a_path_shows_the_newest() {
    let source = tempfile::tempdir().expect("a directory");
    fs::create_dir(source.path().join("dir")).expect("makes");
    fs::write(source.path().join("dir/file"), b"old").expect("writes");
    fs::write(source.path().join("dir/same"), b"same").expect("writes");
    let blocks = Arc::new(MemoryBlocks::new());
    publish_with(&blocks, source.path(), small_blocks()).await;
    let fs = VolumeFs::new(env(), open_with(&blocks, eager()).await, 0, 0);
    let dir = fs.lookup(me(), ROOT, b"dir").await.expect("is there").attr;
    let old = fs.lookup(me(), dir.inode, b"file").await.expect("is there").attr.inode;
    let same = fs.lookup(me(), dir.inode, b"same").await.expect("is there").attr.inode;
    let opened = fs.open(me(), old, OpenFlags::READ).await.expect("opens");
    let listing = fs.opendir(me(), dir.inode).await.expect("opens").handle;
    assert!(opened.keep_cache);

    fs::write(source.path().join("dir/file"), b"newer").expect("writes");
    fs::write(source.path().join("dir/added"), b"added").expect("writes");
    set_mtime(&source.path().join("dir"), 5, 5);
    publish_with(&blocks, source.path(), small_blocks()).await;

    assert_eq!(read_all(&fs, old, opened.handle).await, b"old");
    assert_eq!(fs.getattr(old, None).await.expect("is held").attr.size_bytes, 3);
    let names = fs.readdir(dir.inode, listing, 0, 100, false).await.expect("lists");
    assert_eq!(names.len(), 2, "an open directory is one snapshot");
    let new = fs.lookup(me(), dir.inode, b"file").await.expect("is there").attr;
    assert_ne!(new.inode, old, "a changed file is another one");
    assert_eq!(new.size_bytes, 5);
    let again = fs.lookup(me(), dir.inode, b"same").await.expect("is there").attr.inode;
    assert_eq!(again, same);
    let found = fs.lookup(me(), ROOT, b"dir").await.expect("is there").attr;
    assert_eq!(found.inode, dir.inode, "a changed directory is the same one");
    assert_eq!((found.mtime.secs, found.size_bytes), (5, 3));
    assert_eq!(fs.getattr(dir.inode, None).await.expect("is held").attr, found);
}

#[tokio::test]
async fn a_removed_directory_is_stale_and_a_removed_name_does_not_exist() {
    let source = tempfile::tempdir().expect("a directory");
    fs::create_dir_all(source.path().join("dir/sub")).expect("makes");
    fs::write(source.path().join("dir/sub/file"), b"x").expect("writes");
    let blocks = Arc::new(MemoryBlocks::new());
    publish_with(&blocks, source.path(), small_blocks()).await;
    let fs = VolumeFs::new(env(), open_with(&blocks, eager()).await, 0, 0);
    let dir = fs.lookup(me(), ROOT, b"dir").await.expect("is there").attr.inode;
    let sub = fs.lookup(me(), dir, b"sub").await.expect("is there").attr.inode;

    fs::remove_dir_all(source.path().join("dir/sub")).expect("removes");
    fs::write(source.path().join("dir/sub"), b"a file now").expect("writes");
    publish_with(&blocks, source.path(), small_blocks()).await;
    assert_eq!(fs.getattr(sub, None).await, Err(Errno::ESTALE));
    assert_eq!(fs.lookup(me(), sub, b"file").await, Err(Errno::ESTALE));
    assert_eq!(fs.opendir(me(), sub).await, Err(Errno::ESTALE));
    assert_eq!(fs.lookup(me(), dir, b"gone").await, Err(Errno::ENOENT));
    let file = fs.lookup(me(), dir, b"sub").await.expect("is there").attr;
    assert!(file.inode != sub && file.size_bytes == 10);
}

#[tokio::test]
async fn forgotten_inodes_leave_nothing_behind_and_come_back_under_their_numbers() {
    let source = tempfile::tempdir().expect("a directory");
    fs::create_dir_all(source.path().join("a/b")).expect("makes");
    for i in 0..100 {
        fs::write(source.path().join(format!("a/b/{i}")), i.to_string()).expect("writes");
    }
    let blocks = Arc::new(MemoryBlocks::new());
    publish_with(&blocks, source.path(), small_blocks()).await;
    let fs = VolumeFs::new(env(), open_with(&blocks, VolumeOptions::default()).await, 0, 0);
    let a = fs.lookup(me(), ROOT, b"a").await.expect("is there").attr.inode;
    let b = fs.lookup(me(), a, b"b").await.expect("is there").attr.inode;
    let handle = fs.opendir(me(), b).await.expect("opens").handle;
    let entries = fs.readdir(b, handle, 0, 1000, true).await.expect("lists");
    assert_eq!((entries.len(), fs.held()), (100, (103, 1)));
    // The kernel may forget a directory before what is in it.
    fs.forget(a, 1);
    fs.forget(b, 1);
    let first = fs.getattr(entries[0].inode, None).await.expect("is held");
    entries.iter().for_each(|entry| fs.forget(entry.inode, 1));
    fs.closedir(b, handle).await.expect("closes");
    assert_eq!(fs.held(), (1, 0));
    assert_eq!(fs.getattr(entries[0].inode, None).await, Err(Errno::ESTALE));
    let a = fs.lookup(me(), ROOT, b"a").await.expect("is there").attr.inode;
    let b = fs.lookup(me(), a, b"b").await.expect("is there").attr.inode;
    let back = fs.lookup(me(), b, &entries[0].name).await.expect("is there");
    assert_eq!(back.attr, first.attr);
}

#[tokio::test]
async fn a_sequential_read_fetches_every_block_once_though_the_cache_is_smaller_than_the_file() {
    let source = tempfile::tempdir().expect("a directory");
    let bytes = patterned(8 << 20, 6);
    fs::write(source.path().join("file"), &bytes).expect("writes");
    let blocks = WatchedBlocks::new();
    publish_with(&blocks, source.path(), small_blocks()).await;
    blocks.0.delay_ms.store(1, Ordering::Relaxed);
    let options = VolumeOptions { cache_bytes: 2 << 20, ..VolumeOptions::default() };
    let fs = VolumeFs::new(env(), open_with(&blocks, options).await, 0, 0);
    let inode = fs.lookup(me(), ROOT, b"file").await.expect("is there").attr.inode;
    let handle = fs.open(me(), inode, OpenFlags::READ).await.expect("opens").handle;
    let mut back = Vec::new();
    while back.len() < bytes.len() {
        let part = fs.read(inode, handle, back.len() as u64, 128 << 10).await.expect("reads");
        back.extend_from_slice(&part);
    }
    assert!(back == bytes);
    // 2,048 data blocks, one indirect block, the inode, the directory.
    assert_eq!(blocks.0.gets.load(Ordering::Relaxed), 2048 + 3);
    let most = blocks.0.most_gets_in_flight.load(Ordering::SeqCst);
    assert!(most > 16, "read ahead: {most} fetches at once");
}

/// The window is one for all readers of a mount, and what is read ahead waits for it; what
/// a reader asks for does not.
#[tokio::test(start_paused = true)]
async fn a_reader_does_not_wait_for_what_is_read_ahead_for_another() {
    let source = tempfile::tempdir().expect("a directory");
    fs::write(source.path().join("large"), patterned(4096 * 8192, 5)).expect("writes");
    fs::write(source.path().join("small"), b"small").expect("writes");
    let blocks = WatchedBlocks::new();
    publish_with(&blocks, source.path(), small_blocks()).await;
    blocks.0.delay_ms.store(100, Ordering::Relaxed);
    let fs = VolumeFs::new(env(), open_with(&blocks, VolumeOptions::default()).await, 0, 0);
    let inode = fs.lookup(me(), ROOT, b"large").await.expect("is there").attr.inode;
    let handle = fs.open(me(), inode, OpenFlags::READ).await.expect("opens").handle;
    for part in 0..12 {
        fs.read(inode, handle, part * (128 << 10), 128 << 10).await.expect("reads");
    }
    let waiting = tokio::time::Instant::now();
    let small = fs.lookup(me(), ROOT, b"small").await.expect("is there").attr.inode;
    let opened = fs.open(me(), small, OpenFlags::READ).await.expect("opens").handle;
    assert_eq!(read_all(&fs, small, opened).await, b"small");
    assert!(waiting.elapsed() <= Duration::from_millis(101), "{:?}", waiting.elapsed());
}

#[tokio::test]
async fn readers_of_one_block_share_one_fetch() {
    let source = tempfile::tempdir().expect("a directory");
    fs::write(source.path().join("file"), patterned(4096 * 4, 6)).expect("writes");
    let blocks = WatchedBlocks::new();
    publish_with(&blocks, source.path(), small_blocks()).await;
    blocks.0.delay_ms.store(20, Ordering::Relaxed);
    let fs = VolumeFs::new(env(), open_with(&blocks, VolumeOptions::default()).await, 0, 0);
    let lookups = (0..50).map(|_| fs.lookup(me(), ROOT, b"file"));
    let found = futures_util::future::join_all(lookups).await;
    let inode = found[0].as_ref().expect("is there").attr.inode;
    let opens = (0..50).map(|_| fs.open(me(), inode, OpenFlags::READ));
    let opened = futures_util::future::join_all(opens).await;
    let reads = opened.iter().map(|opened| {
        let handle = opened.as_ref().expect("opens").handle;
        fs.read(inode, handle, 5000, 100)
    });
    futures_util::future::join_all(reads).await;
    // The directory, the inode, one data block.
    assert_eq!(blocks.0.gets.load(Ordering::Relaxed), 3);
}

/// The entries before a part of a directory that cannot be read were dropped with the error,
/// and their lookups, which the kernel did not hear of, counted for ever.
#[tokio::test]
async fn a_listing_that_breaks_off_gives_what_it_has_and_then_the_error() {
    let source = tempfile::tempdir().expect("a directory");
    for number in 0..4000 {
        fs::write(source.path().join(format!("a file with number {number:04}")), b"").expect("it");
    }
    let blocks = WatchedBlocks::new();
    publish_with(&blocks, source.path(), small_blocks()).await;
    let fs = VolumeFs::new(env(), open_with(&blocks, VolumeOptions::default()).await, 0, 0);
    let handle = fs.opendir(me(), ROOT).await.expect("opens").handle;
    // The first leaf, and a few behind it are fetched ahead.
    fs.readdir(ROOT, handle, 0, 1, false).await.expect("reads");
    tokio::time::sleep(Duration::from_millis(50)).await;
    blocks.0.cut_off.store(1, Ordering::Relaxed);
    let page = fs.readdir(ROOT, handle, 0, 4000, true).await.expect("what is there");
    assert!((100..4000).contains(&page.len()), "{}", page.len());
    assert_eq!(fs.held().0, 1 + page.len());
    let last = page.last().expect("not empty").cookie;
    let error = fs.readdir(ROOT, handle, last, 4000, true).await.expect_err("not there");
    assert_eq!(error, Errno::ETIMEDOUT);
    for entry in page {
        fs.forget(entry.inode, 1);
    }
    assert_eq!(fs.held().0, 1, "the root");
}

#[tokio::test]
async fn a_missing_block_is_an_io_error_and_an_unreachable_ring_a_timeout() {
    let source = tempfile::tempdir().expect("a directory");
    let bytes = patterned(4096 * 3, 6);
    fs::write(source.path().join("file"), &bytes).expect("writes");
    let blocks = WatchedBlocks::new();
    publish_with(&blocks, source.path(), small_blocks()).await;
    let fs = VolumeFs::new(env(), open_with(&blocks, VolumeOptions::default()).await, 0, 0);
    let inode = fs.lookup(me(), ROOT, b"file").await.expect("is there").attr.inode;
    let handle = fs.open(me(), inode, OpenFlags::READ).await.expect("opens").handle;
    blocks.0.inner.lose(&atoll_key::BlockHash::of(&bytes[4096..8192]));
    assert_eq!(fs.read(inode, handle, 4096, 10).await, Err(Errno::EIO));
    assert_eq!(fs.read(inode, handle, 0, 10).await.expect("reads").len(), 10);
    blocks.0.cut_off.store(1, Ordering::Relaxed);
    assert_eq!(fs.read(inode, handle, 8192, 10).await, Err(Errno::ETIMEDOUT));
    assert_eq!(fs.read(inode, handle, 0, 10).await.expect("is cached").len(), 10);
    blocks.0.cut_off.store(0, Ordering::Relaxed);
    assert_eq!(fs.read(inode, handle, 8192, 10).await.expect("is back").len(), 10);
}

/// A user of a mount sees an error and no reason: the root directory says it, also while
/// nothing else can be read, and not any more once it is over.
#[tokio::test(start_paused = true)]
async fn a_mount_whose_ring_is_gone_says_why_and_recovers() {
    let source = tempfile::tempdir().expect("a directory");
    fs::write(source.path().join("file"), patterned(20_000, 1)).expect("writes");
    let blocks = WatchedBlocks::new();
    publish_with(&blocks, source.path(), small_blocks()).await;
    let volume = open_with(&blocks, VolumeOptions::default()).await;
    let mount = VolumeFs::new(env(), volume, 1000, 1000);
    let status = || async {
        let said = mount.getxattr(ROOT, b"user.atoll.status").await.expect("is answered");
        String::from_utf8(said.to_vec()).expect("text")
    };
    assert_eq!(status().await, "ok");
    let found = mount.lookup(me(), ROOT, b"file").await.expect("is there");
    blocks.0.cut_off.store(1, Ordering::Relaxed);
    let flags = OpenFlags::default();
    let refused = mount.open(me(), found.attr.inode, flags).await.expect_err("cannot be read");
    assert_eq!(refused, Errno::ETIMEDOUT);
    assert_eq!(status().await, "blocks cannot be fetched: the cable is cut");
    blocks.0.cut_off.store(0, Ordering::Relaxed);
    let opened = mount.open(me(), found.attr.inode, flags).await.expect("can be read again");
    assert_eq!(read_all(&mount, found.attr.inode, opened.handle).await, patterned(20_000, 1));
    assert_eq!(status().await, "ok");
    let listed = mount.listxattr(ROOT).await.expect("lists");
    assert!(listed.is_empty(), "copies must not take it along: {listed:?}");
}
