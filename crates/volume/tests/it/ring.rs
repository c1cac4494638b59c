//! A ring in memory, with the short ways to publish to it and read from it that the
//! tests take.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use atoll_dht::{
    Blocks, GetError, HeldBlock, LeaseRenewal, MemoryBlocks, NewBlock, OverMemory, PutError,
    Renewed, Wanted,
};
use atoll_env::{BoxFuture, Env, Instant, Runtime, Task, TokioRuntime};
use atoll_key::{BlockHash, BlockId, SecretKey, SignedBlock};
use atoll_volume::format::DirectoryRef;
use atoll_volume::owned::Root;
use atoll_volume::owned::{
    NoLeaseRecorder, NoProgress, PublishOptions, Published, Snapshot, Volume, VolumeOptions,
    publish,
};
use bytes::Bytes;

pub(crate) fn env() -> Env {
    Arc::new(TokioRuntime::current())
}

/// A runtime whose wall clock goes as the test's time does, from when it was made.
struct Clocked(TokioRuntime, Instant);

impl Runtime for Clocked {
    fn now(&self) -> Instant {
        self.0.now()
    }

    fn unix_ms(&self) -> u64 {
        1_700_000_000_000 + self.0.now().since(self.1).as_millis() as u64
    }

    fn sleep_until(&self, at: Instant) -> BoxFuture<'static, ()> {
        self.0.sleep_until(at)
    }

    fn spawn(&self, task: BoxFuture<'static, ()>) -> Task {
        self.0.spawn(task)
    }

    fn random_u64(&self) -> u64 {
        self.0.random_u64()
    }
}

pub(crate) fn clocked() -> Env {
    let real = TokioRuntime::current();
    let began = real.now();
    Arc::new(Clocked(real, began))
}

pub(crate) fn secret() -> SecretKey {
    SecretKey::from_seed(&[42; 32])
}

/// Small data blocks, so that small files have several.
pub(crate) fn small_blocks() -> PublishOptions {
    PublishOptions { block_size_bytes: 4096, ..PublishOptions::default() }
}

pub(crate) async fn publish_with(
    blocks: &Arc<impl Blocks>,
    source: &Path,
    options: PublishOptions,
) -> Published {
    let blocks: Arc<dyn Blocks> = blocks.clone();
    let progress = Arc::new(NoProgress);
    publish(env(), blocks, source, &secret(), options, progress, Arc::new(NoLeaseRecorder))
        .await
        .expect("publishes")
}

pub(crate) async fn open_with(blocks: &Arc<impl Blocks>, options: VolumeOptions) -> Arc<Volume> {
    let blocks: Arc<dyn Blocks> = blocks.clone();
    Volume::open(env(), blocks, secret().volume_id(), options).await.expect("opens")
}

pub(crate) async fn snapshot(blocks: &Arc<impl Blocks>) -> Arc<Snapshot> {
    open_with(blocks, VolumeOptions::default()).await.snapshot().await
}

/// A root around a directory, as a publisher would sign it.
pub(crate) fn root_of(directory: DirectoryRef) -> Root {
    Root {
        block_size_log2: 12,
        mode: 0o755,
        mtime: Default::default(),
        published_unix_ms: 1,
        files: 0,
        dirs: 1,
        symlinks: 0,
        bytes: 0,
        directory,
        label: None,
        xattrs: None,
        mounted: Default::default(),
    }
}

pub(crate) async fn put(blocks: &impl Blocks, block: Vec<u8>) -> BlockHash {
    let hash = BlockHash::of(&block);
    blocks.put(vec![(hash, Bytes::from(block))]).await.expect("memory takes it");
    hash
}

pub(crate) async fn put_root(blocks: &impl Blocks, version: u64, payload: &[u8]) {
    let block = SignedBlock::sign(&secret(), b"", version, payload);
    blocks.put_signed(block).await.expect("memory takes it");
}

/// A ring that can be cut off, that delays, and that counts what is on its way.
#[derive(Default)]
pub(crate) struct Watched {
    pub inner: MemoryBlocks,
    /// Milliseconds before each answer.
    pub delay_ms: AtomicU64,
    /// Nothing can be reached while this is not 0.
    pub cut_off: AtomicU64,
    /// The leases of content blocks (1), or of the root too (2), have run out.
    pub expired: AtomicU64,
    /// Fetches of blocks that went to the ring.
    pub gets: AtomicU64,
    /// Roots asked for.
    pub root_gets: AtomicU64,
    gets_in_flight: AtomicUsize,
    pub most_gets_in_flight: AtomicUsize,
    in_flight_bytes: AtomicUsize,
    pub most_in_flight_bytes: AtomicUsize,
}

impl Watched {
    fn pause(&self) -> BoxFuture<'static, ()> {
        let delay = Duration::from_millis(self.delay_ms.load(Ordering::Relaxed));
        if delay.is_zero() {
            return Box::pin(async {});
        }
        Box::pin(tokio::time::sleep(delay))
    }

    fn unreachable(&self) -> Option<String> {
        (self.cut_off.load(Ordering::Relaxed) != 0).then(|| "the cable is cut".to_string())
    }
}

/// [`Watched`] as blocks.
pub(crate) struct WatchedBlocks(pub Arc<Watched>);

impl WatchedBlocks {
    pub(crate) fn new() -> Arc<WatchedBlocks> {
        Arc::new(WatchedBlocks(Arc::default()))
    }
}

impl OverMemory for WatchedBlocks {
    fn memory(&self) -> &MemoryBlocks {
        &self.0.inner
    }

    fn get_block(
        &self,
        id: BlockId,
        wanted: Wanted,
    ) -> BoxFuture<'static, Result<HeldBlock, GetError>> {
        let (ring, is_root) = (self.0.clone(), id.kind.is_mutable());
        if is_root {
            ring.root_gets.fetch_add(1, Ordering::Relaxed);
        } else {
            ring.gets.fetch_add(1, Ordering::Relaxed);
            let now = ring.gets_in_flight.fetch_add(1, Ordering::SeqCst) + 1;
            ring.most_gets_in_flight.fetch_max(now, Ordering::SeqCst);
        }
        Box::pin(async move {
            ring.pause().await;
            let result = match ring.unreachable() {
                Some(told) => Err(GetError::Unavailable { key: id.key, told }),
                None if ring.expired.load(Ordering::Relaxed) > u64::from(is_root) => {
                    Err(GetError::NotFound { key: id.key, told: "all said no".into() })
                }
                None => ring.inner.get_block(id, wanted).await,
            };
            ring.gets_in_flight.fetch_sub(usize::from(!is_root), Ordering::SeqCst);
            result
        })
    }

    fn put_blocks(&self, blocks: Vec<NewBlock>) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        let ring = self.0.clone();
        let content = blocks.iter().filter(|block| !block.id.kind.is_mutable());
        let bytes = content.map(|block| block.bytes.len()).sum::<usize>();
        let now = ring.in_flight_bytes.fetch_add(bytes, Ordering::SeqCst) + bytes;
        ring.most_in_flight_bytes.fetch_max(now, Ordering::SeqCst);
        Box::pin(async move {
            ring.pause().await;
            let outcomes = match ring.unreachable() {
                Some(told) => vec![Err(PutError::Unavailable(told)); blocks.len()],
                None => ring.inner.put_blocks(blocks).await,
            };
            ring.in_flight_bytes.fetch_sub(bytes, Ordering::SeqCst);
            outcomes
        })
    }

    fn renew_blocks(
        &self,
        renewal: LeaseRenewal,
    ) -> BoxFuture<'static, Vec<Result<Renewed, PutError>>> {
        let ring = self.0.clone();
        Box::pin(async move {
            match ring.unreachable() {
                Some(told) => vec![Err(PutError::Unavailable(told)); renewal.ids.len()],
                None => ring.inner.renew_blocks(renewal).await,
            }
        })
    }
}
