//! A disk that can be made full at will.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use atoll_env::BoxFuture;
use atoll_key::{Key, KeyRange};
use atoll_store::{
    BlockInfo, BlockStore, MemoryStore, Owner, OwnerUsage, Owners, Part, ScrubStep, StoreError,
    StoredBlock, Summary, Usage,
};

use crate::ring::ROOMY;

pub(super) struct Disk {
    blocks: MemoryStore,
    full: Arc<AtomicBool>,
}

impl Disk {
    /// An empty disk, which has no room while `full` says so.
    pub(super) fn new(full: Arc<AtomicBool>) -> Disk {
        Disk { blocks: MemoryStore::new(ROOMY), full }
    }
}

impl BlockStore for Disk {
    fn put(&self, batch: Vec<StoredBlock>) -> BoxFuture<'static, Result<(), StoreError>> {
        if self.full.load(Ordering::Relaxed) {
            let full = StoreError::Full { used_bytes: ROOMY, capacity_bytes: ROOMY };
            return Box::pin(async move { Err(full) });
        }
        self.blocks.put(batch)
    }

    fn get(&self, key: &Key) -> BoxFuture<'static, Result<Option<StoredBlock>, StoreError>> {
        self.blocks.get(key)
    }

    fn info(&self, key: &Key) -> Result<Option<BlockInfo>, StoreError> {
        self.blocks.info(key)
    }

    fn list(&self, range: KeyRange, limit: usize) -> Result<Vec<BlockInfo>, StoreError> {
        self.blocks.list(range, limit)
    }

    fn summaries(
        &self,
        ranges: Vec<KeyRange>,
        now: u64,
    ) -> BoxFuture<'static, Result<Vec<Summary>, StoreError>> {
        self.blocks.summaries(ranges, now)
    }

    fn cut(&self, range: KeyRange, now: u64) -> BoxFuture<'static, Result<Vec<Part>, StoreError>> {
        self.blocks.cut(range, now)
    }

    fn renew(&self, keys: &[Key], expires: u64, owner: Owner) -> Result<Vec<bool>, StoreError> {
        self.blocks.renew(keys, expires, owner)
    }

    fn shorten(&self, keys: &[Key], expires: u64) -> Result<(), StoreError> {
        self.blocks.shorten(keys, expires)
    }

    fn remove(&self, keys: Vec<Key>) -> BoxFuture<'static, Result<(), StoreError>> {
        self.blocks.remove(keys)
    }

    fn remove_expired(&self, now: u64) -> BoxFuture<'static, Result<u64, StoreError>> {
        self.blocks.remove_expired(now)
    }

    fn usage(&self) -> Usage {
        let usage = self.blocks.usage();
        if self.full.load(Ordering::Relaxed) {
            return Usage { disk_bytes: ROOMY, ..usage };
        }
        usage
    }

    fn usage_of(&self, owner: &Owner) -> OwnerUsage {
        self.blocks.usage_of(owner)
    }

    fn owners(&self, limit: usize) -> Owners {
        self.blocks.owners(limit)
    }

    fn scrub(
        &self,
        from: Option<Key>,
        budget_bytes: u64,
    ) -> BoxFuture<'static, Result<ScrubStep, StoreError>> {
        self.blocks.scrub(from, budget_bytes)
    }

    fn reclaim(&self, budget_bytes: u64) -> BoxFuture<'static, Result<u64, StoreError>> {
        self.blocks.reclaim(budget_bytes)
    }
}
