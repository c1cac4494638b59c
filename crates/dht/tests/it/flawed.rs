//! A store in memory with the weaknesses of one on a disk.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use atoll_env::{BoxFuture, Env, sleep};
use atoll_key::Key;
use atoll_store::{
    BlockInfo, BlockStore, DiskFailure, MemoryStore, Owner, OwnerUsage, Owners, Part, ScrubStep,
    StoreError, StoredBlock, Summary, Usage,
};
use futures_util::FutureExt;

/// See the module.
pub(crate) struct Flawed {
    inner: Arc<MemoryStore>,
    damaged: Mutex<Option<Key>>,
    /// How long batches wait in its queue, by whose clock.
    queue: Option<(Env, Duration)>,
    /// Every write fails.
    is_broken: bool,
    /// Leases cannot be extended.
    pub refuses_renewals: AtomicBool,
    /// What it says of its disk.
    pub failure: Mutex<Option<DiskFailure>>,
    /// The next batch waits so long before it reaches the store's queue, and those after it do not.
    pub stall: Mutex<Option<(Env, Duration)>>,
    read: AtomicU64,
}

impl Flawed {
    pub(crate) fn new(capacity_bytes: u64) -> Flawed {
        let inner = Arc::new(MemoryStore::new(capacity_bytes));
        let (damaged, read) = (Mutex::new(None), AtomicU64::new(0));
        let (refuses_renewals, failure) = (AtomicBool::new(false), Mutex::new(None));
        let (queue, is_broken, stall) = (None, false, Mutex::new(None));
        Flawed { inner, damaged, queue, is_broken, refuses_renewals, failure, stall, read }
    }

    /// One that reads and does not write.
    pub(crate) fn broken() -> Flawed {
        Flawed { is_broken: true, ..Flawed::new(1 << 30) }
    }

    /// One that keeps a batch it has begun with, so much later, whether or not its caller waits.
    pub(crate) fn slow(capacity_bytes: u64, env: Env, delay: Duration) -> Flawed {
        Flawed { queue: Some((env, delay)), ..Flawed::new(capacity_bytes) }
    }

    /// How many blocks it has been asked for or has listed.
    pub(crate) fn read(&self) -> u64 {
        self.read.load(Ordering::Relaxed)
    }

    fn note_read(&self, blocks: usize) {
        self.read.fetch_add(blocks as u64, Ordering::Relaxed);
    }

    /// The block is found damaged when it is read next.
    pub(crate) fn damage(&self, key: Key) {
        *self.damaged.lock().expect("not poisoned") = Some(key);
    }

    fn hit(&self, key: &Key) -> bool {
        self.damaged.lock().expect("not poisoned").take_if(|damaged| damaged == key).is_some()
    }
}

impl BlockStore for Flawed {
    fn put(&self, batch: Vec<StoredBlock>) -> BoxFuture<'static, Result<(), StoreError>> {
        if self.is_broken {
            return Box::pin(async { Err(StoreError::Io("input/output error".to_owned())) });
        }
        let stall = self.stall.lock().expect("not poisoned").take();
        if let Some((env, delay)) = stall {
            let (inner, pause) = (self.inner.clone(), sleep(&*env, delay));
            return Box::pin(async move {
                pause.await;
                inner.put(batch).await
            });
        }
        let Some((env, delay)) = self.queue.clone() else { return self.inner.put(batch) };
        let (inner, pause) = (self.inner.clone(), sleep(&*env, delay));
        let written = async move {
            pause.await;
            inner.put(batch).await
        };
        let written = written.boxed().shared();
        env.spawn(Box::pin(written.clone().map(|_| ())));
        Box::pin(written)
    }
    fn get(&self, key: &Key) -> BoxFuture<'static, Result<Option<StoredBlock>, StoreError>> {
        self.note_read(1);
        if self.hit(key) {
            let (key, removed) = (*key, self.inner.remove(vec![*key]));
            return Box::pin(async move {
                removed.await?;
                Err(StoreError::Corrupted { key })
            });
        }
        self.inner.get(key)
    }
    fn info(&self, key: &Key) -> Result<Option<BlockInfo>, StoreError> {
        self.note_read(1);
        self.inner.info(key)
    }
    fn list(&self, range: atoll_key::KeyRange, limit: usize) -> Result<Vec<BlockInfo>, StoreError> {
        let found = self.inner.list(range, limit)?;
        self.note_read(found.len());
        Ok(found)
    }
    fn summaries(
        &self,
        ranges: Vec<atoll_key::KeyRange>,
        now: u64,
    ) -> BoxFuture<'static, Result<Vec<Summary>, StoreError>> {
        self.inner.summaries(ranges, now)
    }
    fn cut(
        &self,
        range: atoll_key::KeyRange,
        now: u64,
    ) -> BoxFuture<'static, Result<Vec<Part>, StoreError>> {
        self.inner.cut(range, now)
    }
    fn renew(&self, keys: &[Key], expires: u64, by: Owner) -> Result<Vec<bool>, StoreError> {
        if self.refuses_renewals.load(Ordering::Relaxed) {
            return Err(StoreError::Io("input/output error".to_owned()));
        }
        self.inner.renew(keys, expires, by)
    }
    fn shorten(&self, keys: &[Key], expires: u64) -> Result<(), StoreError> {
        self.inner.shorten(keys, expires)
    }
    fn remove(&self, keys: Vec<Key>) -> BoxFuture<'static, Result<(), StoreError>> {
        self.inner.remove(keys)
    }
    fn remove_expired(&self, now: u64) -> BoxFuture<'static, Result<u64, StoreError>> {
        self.inner.remove_expired(now)
    }
    fn usage(&self) -> Usage {
        self.inner.usage()
    }
    fn disk_failure(&self) -> Option<DiskFailure> {
        self.failure.lock().expect("not poisoned").clone()
    }
    fn usage_of(&self, owner: &Owner) -> OwnerUsage {
        self.inner.usage_of(owner)
    }
    fn owners(&self, limit: usize) -> Owners {
        self.inner.owners(limit)
    }
    fn scrub(
        &self,
        from: Option<Key>,
        budget: u64,
    ) -> BoxFuture<'static, Result<ScrubStep, StoreError>> {
        self.inner.scrub(from, budget)
    }
    fn reclaim(&self, budget: u64) -> BoxFuture<'static, Result<u64, StoreError>> {
        self.inner.reclaim(budget)
    }
}
