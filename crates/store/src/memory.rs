//! `MemoryStore`: blocks in memory, for simulations with thousands of nodes and tests.
//!
//! It keeps the rules of [`BlockStore`] (replacement, leases, capacity) without any
//! medium under it: its futures are ready when first polled and the blocks it returns
//! share their bytes with those it was given. Nothing survives its process.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use atoll_env::BoxFuture;
use atoll_key::{Key, KeyRange};
use futures_util::future::ready;

use crate::engine::holdings::Holdings;
use crate::summary::{Changed, Question, Summaries};
use crate::{
    BlockInfo, BlockStore, MAX_GROWTH_BYTES, Owner, OwnerUsage, Owners, Part, ScrubStep,
    StoreError, StoredBlock, Summary, Usage,
};

/// What a block is counted with beside its bytes, so that a store of empty blocks
/// fills up as well: the size of a record's header on disk.
const OVERHEAD_BYTES: u64 = crate::segment::RECORD_HEADER_BYTES as u64;

/// Blocks in memory, up to a capacity.
#[derive(Debug)]
pub struct MemoryStore {
    capacity_bytes: u64,
    state: Mutex<State>,
    /// Locked by each question, so that one never waits for another.
    summaries: Mutex<Summaries>,
}

#[derive(Debug, Default)]
struct State {
    blocks: BTreeMap<Key, StoredBlock>,
    block_bytes: u64,
    holdings: Holdings,
    changed: Arc<Changed>,
}

fn seen(info: &BlockInfo) -> (u64, u64) {
    (info.version, info.expires_unix_secs)
}

impl State {
    fn used_bytes(&self) -> u64 {
        self.block_bytes + self.blocks.len() as u64 * OVERHEAD_BYTES
    }

    fn insert(&mut self, block: StoredBlock) {
        self.block_bytes += u64::from(block.info.len_bytes);
        self.holdings.add(&block.info.owner, block.info.len_bytes);
        let info = block.info;
        let old = self.blocks.insert(info.key, block);
        self.changed.note(&info.key, old.as_ref().map(|old| seen(&old.info)), Some(seen(&info)));
        if let Some(old) = old {
            self.forget(&old);
        }
    }

    fn remove(&mut self, key: &Key) -> bool {
        let removed = self.blocks.remove(key);
        if let Some(old) = &removed {
            self.forget(old);
            self.changed.note(key, Some(seen(&old.info)), None);
        }
        removed.is_some()
    }

    /// Takes a block that is no longer held out of the sums.
    fn forget(&mut self, old: &StoredBlock) {
        self.block_bytes -= u64::from(old.info.len_bytes);
        self.holdings.take(&old.info.owner, old.info.len_bytes);
    }

    fn renew(&mut self, key: &Key, expires_unix_secs: u64, owner: Owner) -> bool {
        let Some(block) = self.blocks.get_mut(key) else { return false };
        let info = &mut block.info;
        if info.expires_unix_secs < expires_unix_secs {
            let old = seen(info);
            info.expires_unix_secs = expires_unix_secs;
            self.changed.note(key, Some(old), Some(seen(info)));
            if owner != Owner::NOBODY {
                self.holdings.take(&info.owner, info.len_bytes);
                self.holdings.add(&owner, info.len_bytes);
                info.owner = owner;
            }
        }
        true
    }

    fn shorten(&mut self, key: &Key, expires_unix_secs: u64) {
        let Some(block) = self.blocks.get_mut(key) else { return };
        if block.info.expires_unix_secs > expires_unix_secs {
            let old = seen(&block.info);
            block.info.expires_unix_secs = expires_unix_secs;
            self.changed.note(key, Some(old), Some(seen(&block.info)));
        }
    }

    /// Whether all of `changes` are of blocks that are held, and hardly longer.
    fn holds_all(&self, changes: &BTreeMap<Key, StoredBlock>) -> bool {
        let grows_little = |(key, new): (&Key, &StoredBlock)| {
            let held = self.blocks.get(key);
            held.is_some_and(|held| new.bytes.len() <= held.bytes.len() + MAX_GROWTH_BYTES)
        };
        changes.iter().all(grows_little)
    }

    /// What of `batch` would change the store, the last of equal keys standing, and
    /// the bytes used afterwards.
    fn plan(&self, batch: Vec<StoredBlock>) -> (BTreeMap<Key, StoredBlock>, u64) {
        let mut changes: BTreeMap<Key, StoredBlock> = BTreeMap::new();
        let mut used_bytes = self.used_bytes();
        for mut block in batch {
            block.info.len_bytes = u32::try_from(block.bytes.len()).unwrap_or(u32::MAX);
            let key = block.info.key;
            let Some(held) = changes.get(&key).or_else(|| self.blocks.get(&key)) else {
                used_bytes += OVERHEAD_BYTES + u64::from(block.info.len_bytes);
                changes.insert(key, block);
                continue;
            };
            let is_longer = block.info.expires_unix_secs > held.info.expires_unix_secs;
            let expires = held.info.expires_unix_secs.max(block.info.expires_unix_secs);
            if block.info.kind.replaces(block.info.version, held.info.version) {
                used_bytes -= u64::from(held.info.len_bytes);
                used_bytes += u64::from(block.info.len_bytes);
            } else {
                let owner = block.info.owner;
                block = held.clone();
                if is_longer && owner != Owner::NOBODY {
                    block.info.owner = owner;
                }
            }
            block.info.expires_unix_secs = expires;
            changes.insert(key, block);
        }
        (changes, used_bytes)
    }
}

impl MemoryStore {
    /// An empty store that takes `capacity_bytes` of blocks, each counted with the
    /// 144 bytes its header would take on disk.
    pub fn new(capacity_bytes: u64) -> MemoryStore {
        let summaries = Summaries::default();
        let state = State { changed: summaries.changed.clone(), ..State::default() };
        let (state, summaries) = (Mutex::new(state), Mutex::new(summaries));
        MemoryStore { capacity_bytes, state, summaries }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic while the lock is held")
    }

    fn summarize(&self, question: Question, now: u64) -> Result<Vec<Part>, StoreError> {
        let summaries = self.summaries.lock().expect("no panic while the lock is held");
        summaries.ask_now(question, now, &|range, limit| self.list(range, limit))
    }

    fn put_now(&self, batch: Vec<StoredBlock>) -> Result<(), StoreError> {
        let mut state = self.state();
        let (changes, used_bytes) = state.plan(batch);
        // As in a log: what is held has room for new versions when no new block has any.
        let room_for_versions_bytes =
            if state.holds_all(&changes) { self.capacity_bytes / 64 } else { 0 };
        let limit_bytes = self.capacity_bytes.saturating_add(room_for_versions_bytes);
        if used_bytes > limit_bytes && used_bytes > state.used_bytes() {
            return Err(StoreError::Full {
                used_bytes: state.used_bytes(),
                capacity_bytes: self.capacity_bytes,
            });
        }
        for block in changes.into_values() {
            state.insert(block);
        }
        Ok(())
    }

    fn remove_expired_now(&self, now_unix_secs: u64) -> u64 {
        let mut state = self.state();
        let expired: Vec<Key> = state
            .blocks
            .values()
            .filter(|block| block.info.expires_unix_secs < now_unix_secs)
            .map(|block| block.info.key)
            .collect();
        for key in &expired {
            state.remove(key);
        }
        expired.len() as u64
    }
}

impl BlockStore for MemoryStore {
    fn put(&self, batch: Vec<StoredBlock>) -> BoxFuture<'static, Result<(), StoreError>> {
        Box::pin(ready(self.put_now(batch)))
    }

    fn get(&self, key: &Key) -> BoxFuture<'static, Result<Option<StoredBlock>, StoreError>> {
        Box::pin(ready(Ok(self.state().blocks.get(key).cloned())))
    }

    fn info(&self, key: &Key) -> Result<Option<BlockInfo>, StoreError> {
        Ok(self.state().blocks.get(key).map(|block| block.info))
    }

    fn list(&self, range: KeyRange, limit: usize) -> Result<Vec<BlockInfo>, StoreError> {
        let state = self.state();
        Ok(range
            .linear()
            .into_iter()
            .flat_map(|(first, last)| state.blocks.range(first..=last))
            .map(|(_, block)| block.info)
            .take(limit)
            .collect())
    }

    fn summaries(
        &self,
        ranges: Vec<KeyRange>,
        now_unix_secs: u64,
    ) -> BoxFuture<'static, Result<Vec<Summary>, StoreError>> {
        let parts = self.summarize(Question::Summaries(ranges), now_unix_secs);
        let parts = parts.map(|parts| parts.into_iter().map(|part| part.summary).collect());
        Box::pin(ready(parts))
    }

    fn cut(
        &self,
        range: KeyRange,
        now_unix_secs: u64,
    ) -> BoxFuture<'static, Result<Vec<Part>, StoreError>> {
        Box::pin(ready(self.summarize(Question::Cut(range), now_unix_secs)))
    }

    fn renew(
        &self,
        keys: &[Key],
        expires_unix_secs: u64,
        owner: Owner,
    ) -> Result<Vec<bool>, StoreError> {
        let mut state = self.state();
        Ok(keys.iter().map(|key| state.renew(key, expires_unix_secs, owner)).collect())
    }

    fn shorten(&self, keys: &[Key], expires_unix_secs: u64) -> Result<(), StoreError> {
        let mut state = self.state();
        keys.iter().for_each(|key| state.shorten(key, expires_unix_secs));
        Ok(())
    }

    fn remove(&self, keys: Vec<Key>) -> BoxFuture<'static, Result<(), StoreError>> {
        let mut state = self.state();
        for key in &keys {
            state.remove(key);
        }
        Box::pin(ready(Ok(())))
    }

    fn remove_expired(&self, now_unix_secs: u64) -> BoxFuture<'static, Result<u64, StoreError>> {
        Box::pin(ready(Ok(self.remove_expired_now(now_unix_secs))))
    }

    fn usage(&self) -> Usage {
        let state = self.state();
        Usage {
            blocks: state.blocks.len() as u64,
            block_bytes: state.block_bytes,
            disk_bytes: state.used_bytes(),
            capacity_bytes: self.capacity_bytes,
        }
    }

    fn usage_of(&self, owner: &Owner) -> OwnerUsage {
        self.state().holdings.usage_of(owner)
    }

    fn owners(&self, limit: usize) -> Owners {
        self.state().holdings.largest(limit)
    }

    /// Nothing rots here; walks through the keys as a disk would, so that callers
    /// take the same steps.
    fn scrub(
        &self,
        from: Option<Key>,
        budget_bytes: u64,
    ) -> BoxFuture<'static, Result<ScrubStep, StoreError>> {
        let state = self.state();
        let mut step = ScrubStep::default();
        for (key, block) in state.blocks.range(from.unwrap_or(Key::MIN)..) {
            if step.checked > 0 && step.checked_bytes >= budget_bytes {
                step.next = Some(*key);
                break;
            }
            step.checked += 1;
            step.checked_bytes += u64::from(block.info.len_bytes);
        }
        Box::pin(ready(Ok(step)))
    }

    fn reclaim(&self, _budget_bytes: u64) -> BoxFuture<'static, Result<u64, StoreError>> {
        Box::pin(ready(Ok(0)))
    }
}
