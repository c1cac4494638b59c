//! The keeper: has the ring keep what was published from here.
//!
//! Blocks live for a lease and are gone when nobody renews it (CFS §3.1: publishers must
//! periodically ask for an extension). For each volume the keeper goes through its
//! manifest a third of a lease after the last time, so that two attempts may fail
//! altogether before anything is lost: it renews the content blocks in batches and puts
//! the signed root again. It has no blocks of its own; those the ring has lost are
//! counted and shown, because only publishing the directory again can bring them back.
//!
//! When it last did so is on disk (`kept`), so a restart neither forgets nor repeats it.

use std::sync::Arc;
use std::time::Duration;

use atoll_dht::{Blocks, PutError};
use atoll_env::{Env, jittered, sleep};
use atoll_key::BlockHash;

use crate::manifest::Manifest;
use crate::volumes::{Kept, VolumeError, Volumes};

/// Blocks renewed by one call.
const BATCH: u64 = 1024;
/// How often a batch is tried before it is put off.
const ATTEMPTS: u32 = 3;
/// After so many batches in a row that nobody answered for, the rest is put off too: the
/// ring is away, and each takes minutes to fail.
const MAX_UNANSWERED: u32 = 8;
/// Wait between two attempts.
const PAUSE: Duration = Duration::from_secs(2);
/// The longest wait before the volumes are looked at again.
const MAX_LOOK: Duration = Duration::from_secs(600);

/// Renews the leases of the volumes published from here.
pub(crate) struct Keeper {
    pub env: Env,
    pub blocks: Arc<dyn Blocks>,
    pub volumes: Arc<Volumes>,
    pub lease: Duration,
}

impl Keeper {
    /// Looks at the volumes again and again; ends only by being aborted.
    pub(crate) async fn run(self: Arc<Self>) {
        loop {
            sleep(&*self.env, jittered(&*self.env, (self.lease / 60).min(MAX_LOOK))).await;
            self.look().await;
        }
    }

    /// Refreshes the volumes for which it is time.
    pub(crate) async fn look(&self) {
        let names = match self.off_thread(|volumes| volumes.names()).await {
            Ok(names) => names,
            Err(error) => return tracing::warn!("cannot look at the volumes: {error}"),
        };
        for name in names {
            let volume = name.clone();
            let kept = self.off_thread(move |volumes| volumes.kept(&volume)).await;
            if is_due(&kept, self.now_unix_secs(), self.lease) {
                let _ = self.refresh(&name).await;
            }
        }
    }

    /// Refreshes one volume and records the outcome, which a failure's reason is part of.
    ///
    /// # Errors
    /// If there is no such volume, nothing has been published, or the list of what to keep
    /// is damaged.
    pub(crate) async fn refresh(&self, name: &str) -> Result<Kept, VolumeError> {
        let volume = name.to_owned();
        let opened = self
            .off_thread(move |volumes| -> Result<Option<Manifest>, VolumeError> {
                volumes.key(&volume)?;
                let Some(manifest) = volumes.manifest(&volume)? else { return Ok(None) };
                manifest.check()?;
                Ok(Some(manifest))
            })
            .await;
        let manifest = match opened {
            Ok(Some(manifest)) => Arc::new(manifest),
            Ok(None) => return Err(VolumeError::Unpublished { name: name.to_owned() }),
            // Somebody's typing is no trouble of this node's.
            Err(error @ (VolumeError::Unknown { .. } | VolumeError::BadName { .. })) => {
                return Err(error);
            }
            Err(error) => {
                tracing::error!("volume {name} is not kept alive: {error}");
                return Err(error);
            }
        };
        let began = self.now_unix_secs();
        let volume = name.to_owned();
        let before = self.off_thread(move |volumes| volumes.kept(&volume)).await;
        let root_version = manifest.root().version;
        let mut kept = Kept { root_version, tried_unix_secs: began, ..before };
        match self.renew_all(&manifest).await {
            Ok(lost_blocks) => {
                tracing::info!(
                    "volume {name}: {} blocks kept, {lost_blocks} lost",
                    manifest.count()
                );
                kept.refreshed_unix_secs = began;
                kept.lost_blocks = lost_blocks;
                kept.trouble = None;
            }
            Err(trouble) => {
                tracing::warn!("volume {name}: its leases could not be renewed: {trouble}");
                kept.trouble = Some(trouble);
            }
        }
        let (volume, outcome) = (name.to_owned(), kept.clone());
        if let Err(error) = self.off_thread(move |volumes| volumes.set_kept(&volume, &kept)).await {
            tracing::warn!("volume {name}: cannot record its renewal: {error}");
        }
        Ok(outcome)
    }

    /// Renews all blocks of a manifest and its root; how many content blocks are lost.
    ///
    /// # Errors
    /// If something could not be renewed; what stands after it has been all the same, or one
    /// block that cannot be would take the others with it.
    async fn renew_all(&self, manifest: &Arc<Manifest>) -> Result<u64, String> {
        let mut lost = 0;
        let mut from = 0;
        let (mut unanswered, mut trouble) = (0, None);
        while from < manifest.count() {
            let open = manifest.clone();
            let batch = tokio::task::spawn_blocking(move || open.hashes(from, BATCH)).await;
            let batch = batch.map_err(|error| error.to_string())?.map_err(|e| e.to_string())?;
            from += batch.len() as u64;
            let renewed = self.renew(batch).await;
            unanswered = match &renewed {
                Err(PutError::Unavailable(_)) => unanswered + 1,
                _ => 0,
            };
            match renewed {
                Ok(lacking) => lost += lacking,
                Err(error) => trouble = trouble.or(Some(error.to_string())),
            }
            if unanswered == MAX_UNANSWERED {
                break;
            }
        }
        let root = self.put_root(manifest).await.map_err(|error| error.to_string());
        match trouble {
            Some(trouble) => Err(trouble),
            None => root.map(|()| lost),
        }
    }

    async fn renew(&self, batch: Vec<BlockHash>) -> Result<u64, PutError> {
        let mut attempt = 1;
        loop {
            match self.blocks.renew(batch.clone()).await {
                Ok(lacking) => return Ok(lacking.len() as u64),
                // It has been renewed as far as there is room.
                Err(error @ PutError::OverQuota { .. }) => return Err(error),
                Err(error) if attempt == ATTEMPTS => return Err(error),
                Err(_) => attempt += 1,
            }
            sleep(&*self.env, PAUSE).await;
        }
    }

    async fn put_root(&self, manifest: &Manifest) -> Result<(), PutError> {
        let mut attempt = 1;
        loop {
            match self.blocks.put_signed(manifest.root().clone()).await {
                Ok(()) => return Ok(()),
                // Published from another machine since: that one keeps the newer root.
                Err(PutError::Superseded { .. }) => return Ok(()),
                Err(error) if attempt == ATTEMPTS => return Err(error),
                Err(_) => attempt += 1,
            }
            sleep(&*self.env, PAUSE).await;
        }
    }

    async fn off_thread<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Volumes) -> T + Send + 'static,
    ) -> T {
        let volumes = self.volumes.clone();
        tokio::task::spawn_blocking(move || work(&volumes))
            .await
            .expect("what runs here neither panics nor is aborted")
    }

    fn now_unix_secs(&self) -> u64 {
        self.env.unix_ms() / 1000
    }
}

/// Whether it is time: a third of a lease after the last refresh, but a thirtieth
/// after an attempt that failed. A clock that went back counts as time passed.
fn is_due(kept: &Kept, now_unix_secs: u64, lease: Duration) -> bool {
    let since = |then: u64| now_unix_secs.checked_sub(then).unwrap_or(u64::MAX);
    since(kept.refreshed_unix_secs) >= lease.as_secs() / 3
        && (kept.trouble.is_none() || since(kept.tried_unix_secs) >= lease.as_secs() / 30)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;
    use std::sync::atomic::{AtomicU64, Ordering};

    use atoll_dht::{GetError, MemoryBlocks};
    use atoll_env::{BoxFuture, Instant, Runtime, Task, TokioRuntime};
    use atoll_key::{Key, SignedBlock};
    use bytes::Bytes;

    use crate::dir::NodeDir;

    const LEASE: Duration = Duration::from_secs(30 * 24 * 3600);
    const START: u64 = 1_700_000_000;
    const DAY: u64 = 24 * 3600;

    /// Real tasks, a wall clock set by hand, and no waiting.
    struct Clock {
        real: TokioRuntime,
        secs: AtomicU64,
    }

    impl Runtime for Clock {
        fn now(&self) -> Instant {
            self.real.now()
        }
        fn unix_ms(&self) -> u64 {
            self.secs.load(Ordering::Relaxed) * 1000
        }
        fn sleep_until(&self, _: Instant) -> BoxFuture<'static, ()> {
            Box::pin(async {})
        }
        fn spawn(&self, task: BoxFuture<'static, ()>) -> Task {
            self.real.spawn(task)
        }
        fn random_u64(&self) -> u64 {
            self.real.random_u64()
        }
    }

    /// A ring that counts renewals and can be down.
    #[derive(Default)]
    struct Ring {
        blocks: MemoryBlocks,
        renewed: AtomicU64,
        failures: AtomicU64,
    }

    impl Blocks for Ring {
        fn get(&self, hash: BlockHash) -> BoxFuture<'static, Result<Bytes, GetError>> {
            self.blocks.get(hash)
        }
        fn get_signed(&self, key: Key) -> BoxFuture<'static, Result<SignedBlock, GetError>> {
            self.blocks.get_signed(key)
        }
        fn put(&self, blocks: Vec<(BlockHash, Bytes)>) -> BoxFuture<'static, Result<(), PutError>> {
            self.blocks.put(blocks)
        }
        fn put_signed(&self, block: SignedBlock) -> BoxFuture<'static, Result<(), PutError>> {
            self.blocks.put_signed(block)
        }
        fn renew(
            &self,
            hashes: Vec<BlockHash>,
        ) -> BoxFuture<'static, Result<Vec<BlockHash>, PutError>> {
            let down = self
                .failures
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
            if down.is_ok() {
                return Box::pin(async { Err(PutError::Unavailable("nobody".into())) });
            }
            self.renewed.fetch_add(hashes.len() as u64, Ordering::Relaxed);
            self.blocks.renew(hashes)
        }
    }

    struct Scene {
        _temp: tempfile::TempDir,
        ring: Arc<Ring>,
        clock: Arc<Clock>,
        keeper: Keeper,
        root: SignedBlock,
        hashes: Vec<BlockHash>,
    }

    /// A volume `docs` of `count` blocks, committed at `START`.
    async fn scene(count: u32) -> Scene {
        let temp = tempfile::tempdir().expect("temp");
        let dir = NodeDir::at(temp.path());
        dir.prepare().expect("fresh");
        let volumes = Arc::new(Volumes::open(&dir).expect("open"));
        let (key, _) =
            volumes.open_or_create("docs", Some(Path::new("/docs")), START).expect("create");
        let ring = Arc::new(Ring::default());
        let blocks: Vec<(BlockHash, Bytes)> = (0..count)
            .map(|i| Bytes::copy_from_slice(&i.to_be_bytes()))
            .map(|bytes| (BlockHash::of(&bytes), bytes))
            .collect();
        let hashes: Vec<BlockHash> = blocks.iter().map(|(hash, _)| *hash).collect();
        ring.put(blocks).await.expect("put");
        let joined = crate::control::message::join_hashes(hashes.iter());
        volumes.keep_add("docs", 1, 0, &joined).expect("add");
        let root = SignedBlock::sign(&key, b"", 4, b"root");
        volumes.keep_commit("docs", 1, u64::from(count), &root, START).expect("commit");
        let clock = Arc::new(Clock { real: TokioRuntime::current(), secs: AtomicU64::new(START) });
        let keeper = Keeper { env: clock.clone(), blocks: ring.clone(), volumes, lease: LEASE };
        Scene { _temp: temp, ring, clock, keeper, root, hashes }
    }

    impl Scene {
        async fn look_at(&self, secs: u64) -> Kept {
            self.clock.secs.store(secs, Ordering::Relaxed);
            self.keeper.look().await;
            self.keeper.volumes.kept("docs")
        }
    }

    /// CFS §3.1: blocks live for an agreed-upon finite interval, which publishers extend.
    #[tokio::test]
    async fn leases_are_renewed_after_a_third_of_their_time_and_not_before() {
        let scene = scene(2500).await;
        scene.look_at(START + 9 * DAY).await;
        assert_eq!(scene.ring.renewed.load(Ordering::Relaxed), 0);
        let kept = scene.look_at(START + 10 * DAY).await;
        assert_eq!(scene.ring.renewed.load(Ordering::Relaxed), 2500);
        assert_eq!((kept.refreshed_unix_secs, kept.lost_blocks), (START + 10 * DAY, 0));
        let root = scene.ring.get_signed(scene.root.key()).await.expect("put again");
        assert_eq!(root, scene.root);
        scene.look_at(START + 11 * DAY).await;
        assert_eq!(scene.ring.renewed.load(Ordering::Relaxed), 2500, "not due again");
    }

    #[tokio::test]
    async fn lost_blocks_are_counted() {
        let scene = scene(1500).await;
        assert!(scene.ring.blocks.lose(&scene.hashes[3]));
        assert!(scene.ring.blocks.lose(&scene.hashes[1400]));
        assert_eq!(scene.look_at(START + 10 * DAY).await.lost_blocks, 2);
    }

    #[tokio::test]
    async fn a_refresh_that_fails_is_told_and_tried_again_soon() {
        let scene = scene(10).await;
        scene.ring.failures.store(u64::from(ATTEMPTS), Ordering::Relaxed);
        let kept = scene.look_at(START + 10 * DAY).await;
        assert!(kept.trouble.is_some_and(|trouble| trouble.contains("nobody")));
        assert_eq!(kept.refreshed_unix_secs, START);
        let kept = scene.look_at(START + 10 * DAY + 3600).await;
        assert!(kept.trouble.is_some(), "not yet again");
        let kept = scene.look_at(START + 11 * DAY).await;
        assert_eq!((kept.trouble, kept.refreshed_unix_secs), (None, START + 11 * DAY));
    }

    /// One batch that met with a quota, or with nobody, was the end of all that came after it.
    #[tokio::test]
    async fn what_cannot_be_renewed_does_not_keep_the_rest_from_it() {
        let scene = scene(3000).await;
        scene.ring.failures.store(u64::from(ATTEMPTS), Ordering::Relaxed);
        let kept = scene.look_at(START + 10 * DAY).await;
        assert!(kept.trouble.is_some_and(|trouble| trouble.contains("nobody")));
        assert_eq!(kept.refreshed_unix_secs, START);
        assert_eq!(scene.ring.renewed.load(Ordering::Relaxed), 3000 - BATCH, "all but the first");
        let root = scene.ring.get_signed(scene.root.key()).await.expect("put again");
        assert_eq!(root, scene.root);
    }

    #[tokio::test]
    async fn a_newer_root_from_elsewhere_is_left_in_place() {
        let scene = scene(1).await;
        let key = scene.keeper.volumes.key("docs").expect("key");
        let newer = SignedBlock::sign(&key, b"", 9, b"newer");
        scene.ring.put_signed(newer.clone()).await.expect("put");
        let kept = scene.look_at(START + 10 * DAY).await;
        assert_eq!(kept.trouble, None);
        assert_eq!(scene.ring.get_signed(newer.key()).await, Ok(newer));
    }

    #[test]
    fn a_clock_that_went_back_does_not_stop_renewal() {
        let kept = Kept { refreshed_unix_secs: START, ..Kept::default() };
        assert!(is_due(&kept, START - DAY, LEASE));
        assert!(!is_due(&kept, START + DAY, LEASE));
    }
}
