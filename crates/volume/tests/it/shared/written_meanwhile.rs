//! Files that programs write while what they wrote before is on its way to the ring.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use atoll_dht::{Blocks, MemoryBlocks, NewBlock, OverMemory, PutError};
use atoll_env::BoxFuture;
use atoll_vfs::{Caller, FileSystem, InodeNumber, OpenFlags, Writer};
use atoll_volume::shared::SharedFs;
use bytes::Bytes;
use futures_util::future::join3;

use super::mounts::{created, env, mounted};

const ROOT: InodeNumber = InodeNumber::ROOT;
/// How long a put of file data takes.
const DATA_TAKES: Duration = Duration::from_secs(2);
/// Half of the file: several data blocks.
const HALF: usize = 300_000;

/// Memory that takes its time with file data.
#[derive(Clone, Default)]
struct Slow {
    memory: MemoryBlocks,
    /// Puts of file data that are under way.
    under_way: Arc<AtomicUsize>,
}

impl OverMemory for Slow {
    fn memory(&self) -> &MemoryBlocks {
        &self.memory
    }

    fn put_blocks(&self, blocks: Vec<NewBlock>) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        let (is_data, under_way) =
            (blocks.iter().any(|block| !block.id.kind.is_mutable()), self.under_way.clone());
        let put = self.memory.put_blocks(blocks);
        Box::pin(async move {
            if is_data {
                under_way.fetch_add(1, Ordering::Relaxed);
                tokio::time::sleep(DATA_TAKES).await;
                under_way.fetch_sub(1, Ordering::Relaxed);
            }
            put.await
        })
    }
}

fn me() -> Caller {
    Caller::default()
}

fn half(byte: u8) -> Bytes {
    Bytes::from(vec![byte; HALF])
}

/// The whole file: its length, and whether both halves are what was written.
async fn read(fs: &SharedFs) -> (usize, bool) {
    let inode = fs.lookup(me(), ROOT, b"file").await.expect("is there").attr.inode;
    let opened = fs.open(me(), inode, OpenFlags::READ).await.expect("opens");
    let read = fs.read(inode, opened.handle, 0, 1 << 20).await.expect("reads");
    fs.close(inode, opened.handle).await.expect("closes");
    let is_it = |(at, byte): (usize, &u8)| *byte == if at < HALF { 1 } else { 2 };
    (read.len(), read.iter().enumerate().all(is_it))
}

/// On a slow machine a file of 3 MiB was shorter after its close than what had been written. A file that is created
/// reaches the ring after some seconds although it is open. What a program wrote while the data was on its way counted as
/// stored with that; the close found nothing to do, and dropped it.
#[tokio::test(start_paused = true)]
async fn what_is_written_while_a_file_is_stored_is_stored_too() {
    for closes_meanwhile in [false, true] {
        let slow = Slow::default();
        let blocks: Arc<dyn Blocks> = Arc::new(slow.clone());
        created(&env(), &blocks).await;
        let (one, two) = (mounted(&env(), &blocks, 1).await, mounted(&env(), &blocks, 2).await);
        let made = one.create(me(), ROOT, b"file", 0o644, OpenFlags::READ_WRITE).await;
        let (entry, opened) = made.expect("makes");
        let (inode, handle) = (entry.attr.inode, opened.handle);
        one.write(Writer::At(me()), inode, handle, 0, half(1)).await.expect("writes");
        let write = async {
            tokio::time::sleep(DATA_TAKES / 2).await;
            assert!(slow.under_way.load(Ordering::Relaxed) > 0, "the first half is on its way");
            let writer = Writer::At(me());
            one.write(writer, inode, handle, HALF as u64, half(2)).await.expect("writes");
        };
        let close = async {
            if closes_meanwhile {
                tokio::time::sleep(DATA_TAKES * 3 / 4).await;
                one.flush(inode, handle).await.expect("is stored");
            }
        };
        // By whatever stores the file: its age, another program that syncs it, a mount that makes room.
        let (stored, (), ()) = join3(one.fsync(inode, handle, false), write, close).await;
        stored.expect("is stored");
        one.flush(inode, handle).await.expect("is stored");
        one.close(inode, handle).await.expect("closes");
        for (mount, name) in [(&one, "writer"), (&two, "other")] {
            let context = format!("{name}, closed meanwhile: {closes_meanwhile}");
            assert_eq!(read(mount).await, (2 * HALF, true), "{context}");
        }
    }
}
