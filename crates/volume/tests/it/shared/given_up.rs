//! Opens: what stays of those that are given up before the ring has answered, and when others see what they empty.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use atoll_dht::{
    Blocks, GetError, HeldBlock, MemoryBlocks, NewBlock, OverMemory, PutError, Wanted,
};
use atoll_env::BoxFuture;
use atoll_key::BlockId;
use atoll_vfs::{Caller, Errno, FileSystem, InodeNumber, OpenFlags, Writer};
use atoll_volume::shared::SharedFs;
use bytes::Bytes;

use super::mounts::{created, env, mounted};

const ROOT: InodeNumber = InodeNumber::ROOT;
const EMPTIES: OpenFlags = OpenFlags(OpenFlags::READ_WRITE.0 | OpenFlags::TRUNCATE);

fn me() -> Caller {
    Caller::default()
}

/// Memory that does not answer for a while.
#[derive(Clone, Default)]
struct Silent {
    memory: MemoryBlocks,
    gets: Arc<AtomicBool>,
    puts: Arc<AtomicBool>,
}

impl OverMemory for Silent {
    fn memory(&self) -> &MemoryBlocks {
        &self.memory
    }

    fn get_block(
        &self,
        id: BlockId,
        wanted: Wanted,
    ) -> BoxFuture<'static, Result<HeldBlock, GetError>> {
        match self.gets.load(Ordering::Relaxed) {
            true => Box::pin(std::future::pending()),
            false => self.memory.get_block(id, wanted),
        }
    }

    fn put_blocks(&self, blocks: Vec<NewBlock>) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        match self.puts.load(Ordering::Relaxed) {
            true => Box::pin(std::future::pending()),
            false => self.memory.put_blocks(blocks),
        }
    }
}

async fn mounts() -> (Silent, SharedFs) {
    let silent = Silent::default();
    let blocks: Arc<dyn Blocks> = Arc::new(silent.clone());
    created(&env(), &blocks).await;
    let fs = mounted(&env(), &blocks, 1).await;
    (silent, fs)
}

/// A file that is known by its name and has some text.
async fn made(fs: &SharedFs, name: &[u8]) -> InodeNumber {
    let (entry, opened) =
        fs.create(me(), ROOT, name, 0o644, OpenFlags::READ_WRITE).await.expect("makes");
    let inode = entry.attr.inode;
    let text = Bytes::from_static(b"text");
    fs.write(Writer::At(me()), inode, opened.handle, 0, text).await.expect("writes");
    fs.flush(inode, opened.handle).await.expect("is stored");
    fs.close(inode, opened.handle).await.expect("closes");
    inode
}

#[tokio::test(start_paused = true)]
async fn a_creation_that_is_given_up_leaves_nothing_open_and_no_name() {
    let (silent, fs) = mounts().await;
    let before = fs.files_in_memory();
    silent.puts.store(true, Ordering::Relaxed);
    let flags = OpenFlags(OpenFlags::READ_WRITE.0 | OpenFlags::EXCLUSIVE);
    let made = fs.create(me(), ROOT, b"lock", 0o644, flags).await;
    assert_eq!(made.err(), Some(Errno::ETIMEDOUT));
    silent.puts.store(false, Ordering::Relaxed);
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert_eq!(fs.lookup(me(), ROOT, b"lock").await.err(), Some(Errno::ENOENT));
    assert_eq!(fs.files_in_memory(), before);
}

#[tokio::test(start_paused = true)]
async fn an_open_by_its_name_that_is_given_up_leaves_nothing_known() {
    let (silent, fs) = mounts().await;
    let before = fs.files_in_memory();
    let inode = made(&fs, b"file").await;
    fs.forget(inode, 1);
    assert_eq!(fs.files_in_memory(), before);
    // The name is looked up, then the file is read.
    let names = fs.lookup(me(), ROOT, b"file").await.expect("is there");
    let again = fs.create(me(), ROOT, b"file", 0o644, EMPTIES);
    silent.gets.store(true, Ordering::Relaxed);
    assert_eq!(again.await.err(), Some(Errno::ETIMEDOUT));
    silent.gets.store(false, Ordering::Relaxed);
    fs.forget(names.attr.inode, 1);
    assert_eq!(fs.files_in_memory(), before);
}

/// Another call may have a file's turn at any moment: an open is either done or has no handle. (A race: an open that waits once more
/// fails one run in three.)
#[test]
fn an_open_that_empties_and_is_given_up_leaves_nothing_open() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("starts");
    let _entered = runtime.enter();
    let (_, fs) = runtime.block_on(mounts());
    let before = fs.files_in_memory();
    let inode = runtime.block_on(made(&fs, b"file"));
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let _entered = runtime.enter();
                for _ in 0..5_000 {
                    let mut open = fs.open(me(), inode, EMPTIES);
                    let first = open.as_mut().poll(&mut Context::from_waker(Waker::noop()));
                    drop(open);
                    let Poll::Ready(opened) = first else { continue };
                    let handle = opened.expect("opens").handle;
                    runtime.block_on(fs.flush(inode, handle)).expect("is stored");
                    runtime.block_on(fs.close(inode, handle)).expect("closes");
                }
            });
        }
    });
    fs.forget(inode, 1);
    assert_eq!(fs.files_in_memory(), before);
}

/// A mount that is killed between the two would leave an empty file, and others would see one.
#[tokio::test]
async fn a_file_that_an_open_empties_is_empty_for_others_when_it_is_closed() {
    let (silent, one) = mounts().await;
    let two = mounted(&env(), &(Arc::new(silent) as Arc<dyn Blocks>), 2).await;
    let inode = made(&one, b"file").await;
    let seen = || async {
        let inode = two.lookup(me(), ROOT, b"file").await.expect("is there").attr.inode;
        let opened = two.open(me(), inode, OpenFlags::READ).await.expect("opens");
        let read = two.read(inode, opened.handle, 0, 100).await.expect("reads");
        two.close(inode, opened.handle).await.expect("closes");
        read
    };
    let opened = one.open(me(), inode, EMPTIES).await.expect("opens");
    assert_eq!(one.getattr(inode, None).await.expect("is open").attr.size_bytes, 0);
    assert_eq!(seen().await, "text");
    one.flush(inode, opened.handle).await.expect("is stored");
    assert_eq!(seen().await, "");
    one.close(inode, opened.handle).await.expect("closes");
}
