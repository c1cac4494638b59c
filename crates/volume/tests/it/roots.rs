//! Updates, replays and outages of a volume's root.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use atoll_dht::{
    Blocks, GetError, HeldBlock, LeaseRenewal, MemoryBlocks, NewBlock, PutError, Renewed, Wanted,
};
use atoll_env::BoxFuture;
use atoll_key::{BlockId, SignedBlock};
use atoll_volume::format::FormatError;
use atoll_volume::owned::RootError;
use atoll_volume::owned::{OpenError, Volume, VolumeOptions};

use crate::ring::{
    WatchedBlocks, env, open_with, publish_with, put_root, root_of, secret, small_blocks,
};

/// A ring whose nodes answer with whatever root they like.
#[derive(Default)]
struct Lying {
    root: std::sync::Mutex<Option<SignedBlock>>,
}

impl Lying {
    fn say(&self, version: u64, payload: &[u8]) {
        let block = SignedBlock::sign(&secret(), b"", version, payload);
        *self.root.lock().expect("not poisoned") = Some(block);
    }
}

impl Blocks for Lying {
    fn get_block(&self, id: BlockId, _: Wanted) -> BoxFuture<'static, Result<HeldBlock, GetError>> {
        let root = self.root.lock().expect("not poisoned").clone();
        let root = root.filter(|root| root.id() == id);
        let missing = GetError::NotFound { key: id.key, told: "nothing here".into() };
        Box::pin(async move { HeldBlock::verified(id, root.ok_or(missing)?.bytes().clone()) })
    }

    fn put_blocks(&self, blocks: Vec<NewBlock>) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        Box::pin(async move { vec![Ok(()); blocks.len()] })
    }

    fn put_in_order(&self, blocks: Vec<NewBlock>) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        self.put_blocks(blocks)
    }

    fn renew_blocks(
        &self,
        renewal: LeaseRenewal,
    ) -> BoxFuture<'static, Vec<Result<Renewed, PutError>>> {
        Box::pin(async move { vec![Ok(Renewed::Held); renewal.ids.len()] })
    }

    fn watch(&self, _: BlockId, _: u64) -> BoxFuture<'static, Result<Option<HeldBlock>, GetError>> {
        Box::pin(std::future::pending())
    }
}

fn eager() -> VolumeOptions {
    VolumeOptions { max_age: Duration::from_millis(1), ..VolumeOptions::default() }
}

/// Lets the root grow older than [`eager`] allows, and retries become due.
async fn wait() {
    tokio::time::sleep(Duration::from_secs(6)).await;
}

/// CFS §3.1: "A timestamp prevents replays of old updates."
#[tokio::test(start_paused = true)]
async fn a_root_with_a_lower_version_is_refused_and_reported() {
    let ring = Arc::new(Lying::default());
    let root = root_of(Default::default());
    ring.say(7, &root.encode());
    let volume = open_with(&ring, eager()).await;
    wait().await;
    ring.say(6, &root.encode());
    assert_eq!(volume.snapshot().await.version(), 7);
    let stale = volume.status().stale.expect("it says so");
    assert!(stale.contains("older version 6"), "{stale}");
    wait().await;
    ring.say(8, &root.encode());
    assert_eq!(volume.snapshot().await.version(), 8);
    assert_eq!(volume.status().stale, None);
}

#[tokio::test(start_paused = true)]
async fn two_roots_of_one_version_are_reported_and_the_first_stays() {
    let ring = Arc::new(Lying::default());
    let mut root = root_of(Default::default());
    ring.say(7, &root.encode());
    let volume = open_with(&ring, eager()).await;
    wait().await;
    root.mode = 0o700;
    ring.say(7, &root.encode());
    assert_eq!(volume.snapshot().await.info().mode, 0o755);
    let stale = volume.status().stale.expect("it says so");
    assert!(stale.contains("two different roots of version 7"), "{stale}");
}

#[tokio::test(start_paused = true)]
async fn a_newer_root_that_is_nonsense_leaves_the_old_one_in_use() {
    let ring = Arc::new(Lying::default());
    ring.say(7, &root_of(Default::default()).encode());
    let volume = open_with(&ring, eager()).await;
    wait().await;
    ring.say(8, b"not a root at all");
    assert_eq!(volume.snapshot().await.version(), 7);
    let stale = volume.status().stale.expect("it says so");
    assert!(stale.contains("version 8") && stale.contains("volume root"), "{stale}");
}

#[tokio::test]
async fn a_volume_that_is_not_there_or_whose_root_is_nonsense_does_not_open() {
    let ring = Arc::new(Lying::default());
    let blocks: Arc<dyn Blocks> = ring.clone();
    let id = secret().volume_id();
    let open = || Volume::open(env(), blocks.clone(), id, VolumeOptions::default());
    assert!(matches!(open().await, Err(OpenError::Gone(GetError::NotFound { .. }))));
    ring.say(1, b"ATVR\x03 of a later program");
    let error = open().await.expect_err("does not open");
    assert_eq!(error, OpenError::Root(RootError::Bad(FormatError::UnknownLayout(3))));
}

/// Design §7.13: a reader that cannot reach the others can go on reading, and is told that it
/// may be stale.
#[tokio::test(start_paused = true)]
async fn an_unreachable_ring_leaves_the_old_root_in_use_and_it_says_so() {
    let blocks = WatchedBlocks::new();
    put_root(&blocks.0.inner, 1, &root_of(Default::default()).encode()).await;
    let options = VolumeOptions { max_age: Duration::from_secs(30), ..VolumeOptions::default() };
    let volume = open_with(&blocks, options).await;
    blocks.0.cut_off.store(1, Ordering::Relaxed);
    blocks.0.delay_ms.store(60_000, Ordering::Relaxed);
    tokio::time::sleep(Duration::from_secs(31)).await;
    let before = env_now();
    assert_eq!(volume.snapshot().await.version(), 1);
    assert_eq!(before.elapsed(), Duration::from_secs(3), "waits a little, not for ever");
    let again = env_now();
    assert_eq!(volume.snapshot().await.version(), 1);
    assert_eq!(again.elapsed(), Duration::ZERO, "and only once");
    tokio::time::sleep(Duration::from_secs(60)).await;
    let status = volume.status();
    assert!(status.stale.expect("it says so").contains("the cable is cut"));
    assert!(status.age >= Duration::from_secs(90));

    blocks.0.cut_off.store(0, Ordering::Relaxed);
    blocks.0.delay_ms.store(0, Ordering::Relaxed);
    put_root(&blocks.0.inner, 2, &root_of(Default::default()).encode()).await;
    tokio::time::sleep(Duration::from_secs(6)).await;
    assert_eq!(volume.snapshot().await.version(), 2);
    assert_eq!(volume.status().stale, None);
}

fn env_now() -> tokio::time::Instant {
    tokio::time::Instant::now()
}

#[tokio::test(start_paused = true)]
async fn many_readers_cause_one_refresh_and_a_fresh_root_none() {
    let blocks = WatchedBlocks::new();
    put_root(&blocks.0.inner, 1, &root_of(Default::default()).encode()).await;
    let options = VolumeOptions { max_age: Duration::from_secs(30), ..VolumeOptions::default() };
    let volume = open_with(&blocks, options).await;
    let asked = || blocks.0.root_gets.load(Ordering::Relaxed);
    for _ in 0..14 {
        volume.snapshot().await;
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    assert_eq!(asked(), 1, "the one that opened it");
    tokio::time::sleep(Duration::from_secs(40)).await;
    blocks.0.delay_ms.store(100, Ordering::Relaxed);
    put_root(&blocks.0.inner, 2, &root_of(Default::default()).encode()).await;
    let all = futures_util::future::join_all((0..100).map(|_| volume.snapshot())).await;
    assert_eq!(asked(), 2);
    assert!(all.iter().all(|snapshot| snapshot.version() == 2), "older than max_age: all wait");
    // Half as old as allowed: asked for in the background, and no reader waits.
    tokio::time::sleep(Duration::from_secs(16)).await;
    put_root(&blocks.0.inner, 3, &root_of(Default::default()).encode()).await;
    assert_eq!(volume.snapshot().await.version(), 2);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!((asked(), volume.snapshot().await.version()), (3, 3));
}

#[tokio::test]
async fn a_snapshot_stays_what_it_was_when_the_volume_moves_on() {
    let source = tempfile::tempdir().expect("a directory");
    fs::write(source.path().join("file"), b"old").expect("writes");
    let blocks = Arc::new(MemoryBlocks::new());
    publish_with(&blocks, source.path(), small_blocks()).await;
    let options = VolumeOptions { max_age: Duration::ZERO, ..VolumeOptions::default() };
    let volume = open_with(&blocks, options).await;
    let old = volume.snapshot().await;
    fs::write(source.path().join("file"), b"newer").expect("writes");
    publish_with(&blocks, source.path(), small_blocks()).await;
    let new = volume.snapshot().await;
    for (snapshot, bytes) in [(old, &b"old"[..]), (new, b"newer")] {
        let item = snapshot.resolve(b"file").await.expect("is there");
        assert_eq!(snapshot.read_range(&item, 0, 100).await.expect("reads"), bytes);
    }
}

/// CFS §3.1: blocks that are not refreshed are discarded. A mount of it says so, once it knows, and
/// goes on with what it has; when the publisher comes back, so does the volume.
#[tokio::test(start_paused = true)]
async fn a_mount_of_an_expired_volume_says_so_and_keeps_what_it_has() {
    use atoll_vfs::{Caller, Errno, FileSystem, InodeNumber, OpenFlags};
    let source = tempfile::tempdir().expect("a directory");
    for name in ["read", "unread"] {
        fs::write(source.path().join(name), crate::trees::patterned(5000, 6)).expect("writes");
    }
    fs::write(source.path().join("unread"), crate::trees::patterned(9000, 7)).expect("writes");
    let blocks = WatchedBlocks::new();
    publish_with(&blocks, source.path(), small_blocks()).await;
    let volume = open_with(&blocks, VolumeOptions::default()).await;
    let mount = atoll_volume::owned::VolumeFs::new(env(), volume.clone(), 0, 0);
    let find = async |name: &'static [u8]| {
        let found = mount.lookup(Caller::default(), InodeNumber::ROOT, name).await?;
        let inode = found.attr.inode;
        let handle = mount.open(Caller::default(), inode, OpenFlags::READ).await?.handle;
        mount.read(inode, handle, 0, 10_000).await
    };
    assert_eq!(find(b"read").await.expect("reads").len(), 5000);

    // A single lost block is no expiry.
    tokio::time::sleep(Duration::from_secs(10)).await;
    blocks.0.expired.store(1, Ordering::Relaxed);
    assert_eq!(find(b"unread").await, Err(Errno::EIO));
    assert!(!volume.status().expired);

    blocks.0.expired.store(2, Ordering::Relaxed);
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert_eq!(find(b"unread").await, Err(Errno::ESTALE));
    let status = volume.status();
    assert!(status.expired);
    let stale = status.stale.expect("it says so");
    assert!(stale.contains("lease has run out") && stale.contains("atoll renew"), "{stale}");
    assert_eq!(find(b"read").await.expect("is cached").len(), 5000);

    let ring: Arc<dyn Blocks> = blocks.clone();
    let error = Volume::open(env(), ring, secret().volume_id(), VolumeOptions::default()).await;
    let error = error.expect_err("it is gone").to_string();
    assert!(error.contains("the volume's lease has run out or it was never published"), "{error}");

    blocks.0.expired.store(0, Ordering::Relaxed);
    tokio::time::sleep(Duration::from_secs(31)).await;
    volume.snapshot().await;
    assert_eq!(find(b"unread").await.expect("is back").len(), 9000);
    assert!(!volume.status().expired);
}
