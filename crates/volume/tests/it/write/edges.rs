//! What a mount met at the edges: files and directories that change while they are written.

use std::sync::Arc;

use atoll_dht::{Blocks, MemoryBlocks};
use atoll_vfs::{
    Caller, FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE, FileSystem, Handle, InodeNumber, OpenFlags,
    SetAttr, Writer,
};
use atoll_volume::owned::{WritableFs, WriteOptions};
use bytes::Bytes;

use super::{REGULAR, created, mounted};

const ROOT: InodeNumber = InodeNumber::ROOT;

/// A new volume, mounted.
async fn new_mount(block_size_log2: u8) -> (Arc<dyn Blocks>, WritableFs) {
    let blocks: Arc<dyn Blocks> = Arc::new(MemoryBlocks::new());
    created(&blocks, None, block_size_log2).await;
    let fs = mounted(&blocks, WriteOptions::default()).await.expect("mounts");
    (blocks, fs)
}

/// Makes or opens a file in the root directory.
async fn open(fs: &WritableFs, name: &str, flags: OpenFlags) -> (InodeNumber, Handle) {
    let made = fs.create(Caller::default(), ROOT, name.as_bytes(), 0o644, flags).await;
    let (entry, opened) = made.expect("opens");
    (entry.attr.inode, opened.handle)
}

async fn write(fs: &WritableFs, (inode, handle): (InodeNumber, Handle), at: u64, bytes: Vec<u8>) {
    let writer = Writer::At(Caller::default());
    fs.write(writer, inode, handle, at, Bytes::from(bytes)).await.expect("writes");
}

async fn resize(fs: &WritableFs, inode: InodeNumber, size_bytes: u64) {
    let changes = SetAttr { size_bytes: Some(size_bytes), ..SetAttr::default() };
    fs.setattr(Caller::default(), inode, None, changes).await.expect("is cut");
}

/// An editor's save: the old file is cut to nothing, and it takes a while until its first bytes.
#[tokio::test(start_paused = true)]
async fn a_file_is_written_after_it_was_flushed_empty() {
    let (blocks, fs) = new_mount(16).await;
    write(&fs, open(&fs, "file", OpenFlags::READ_WRITE).await, 0, vec![1; 100_000]).await;
    fs.end().await.expect("ends");

    let fs = mounted(&blocks, WriteOptions::default()).await.expect("mounts again");
    let flags = OpenFlags(OpenFlags::READ_WRITE.0 | OpenFlags::TRUNCATE);
    let file = open(&fs, "file", flags).await;
    fs.sync().await.expect("flushes");
    write(&fs, file, 10, vec![2; 10]).await;
    let read = fs.read(file.0, file.1, 0, 100).await.expect("reads");
    assert_eq!(read, [vec![0; 10], vec![2; 10]].concat());
}

#[tokio::test(start_paused = true)]
async fn a_hole_stays_one_when_the_file_is_cut_inside() {
    for flushes in [false, true] {
        let (_, fs) = new_mount(12).await;
        let file = open(&fs, "file", OpenFlags::READ_WRITE).await;
        write(&fs, file, 0, vec![1; 3 * 4096]).await;
        fs.sync().await.expect("flushes");
        let mode = FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE;
        let punched = fs.fallocate(Caller::default(), file.0, file.1, 4096, 4096, mode).await;
        punched.expect("makes a hole");
        resize(&fs, file.0, 6000).await;
        if flushes {
            fs.sync().await.expect("flushes");
        }
        let read = fs.read(file.0, file.1, 0, 10_000).await.expect("reads");
        assert_eq!(read, [vec![1; 4096], vec![0; 6000 - 4096]].concat(), "flushed: {flushes}");
    }
}

/// What a build does: directories are made, filled, emptied and removed.
#[tokio::test(start_paused = true)]
async fn a_removed_directory_leaves_the_memory() {
    let (_, fs) = new_mount(16).await;
    let me = Caller::default();
    for round in 0..4 {
        let dir = fs.mkdir(me, ROOT, b"dir", 0o755).await.expect("makes").attr.inode;
        let file = fs.mknod(me, dir, b"file", REGULAR, 0o644, 0).await.expect("makes");
        if round % 2 == 1 {
            fs.sync().await.expect("flushes");
        }
        fs.unlink(me, dir, b"file").await.expect("removes");
        fs.rmdir(me, ROOT, b"dir").await.expect("removes");
        fs.forget(file.attr.inode, 1);
        fs.forget(dir, 1);
    }
    fs.sync().await.expect("flushes");
    fs.check_invariants();
    assert_eq!(fs.files_in_memory(), 1, "the root directory");
}
