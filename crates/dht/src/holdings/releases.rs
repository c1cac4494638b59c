//! Blocks that were released and are to be removed ([`ReleaseEffect::Removed`]), and which were put or renewed of late.
//!
//! A release says that its blocks were not needed at a time. It counts for a block that no publisher has put or
//! renewed then or later. The two may arrive in either order, so the time of each put and renewal, which its receipt
//! says, is remembered for as long as an older release is still admitted.
//!
//! Each release of a block is recorded in a store beside the blocks. The record lasts as long as the lease of a block that
//! was put at the release's time. So a node that restarts still removes the block, and takes no copy of it from
//! a node that missed the release. A later put or renewal deletes the record.
//!
//! **Invariants:** a record is written before it is looked whether the block was put since, and a put is noted before the
//! record is looked for: one of the two sees the other. A block leaves only while a record of it is there
//! (`replication::released`).
//!
//! It does not know who may release a block.
//!
//! [`ReleaseEffect::Removed`]: atoll_key::kinds::ReleaseEffect::Removed

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use atoll_env::{Instant, Notify};
use atoll_key::kinds::REMOVED_AFTER_SECS;
use atoll_key::{BlockKind, Key, KeyRange, PeerId};
use atoll_store::{BlockInfo, BlockStore, Owner, StoreError, StoredBlock};
use bytes::Bytes;

/// No release is admitted that is of a later time than so long from now, seconds.
const ADMITTED_AHEAD_SECS: u64 = 600;
/// For so long puts are remembered, seconds: releases are admitted that were signed ten minutes ago, by a clock that is as
/// far from this one's again.
const PUTS_FOR_SECS: u64 = 1500;
/// Puts remembered. A guess: 9 MiB of memory.
const MAX_PUTS: usize = 65_536;
/// A node that was started anew counts all it holds as put so long after its start: the clock of a publisher that
/// put blocks before may be ahead of its own.
const RESTART_SLACK_SECS: u64 = 60;
/// Blocks remembered that a node refused because they were released.
const MAX_REFUSED: usize = 131_072;
/// How long such a block is not offered to it again. A guess.
const REFUSED_FOR: Duration = Duration::from_secs(3600);
/// Records read at once.
const PAGE: usize = 1024;

/// See the module.
pub(crate) struct ReleaseRecords {
    store: Arc<dyn BlockStore>,
    state: Mutex<State>,
    /// Notified when a block is to be removed earlier than was known.
    pub sooner: Notify,
}

#[derive(Default)]
struct State {
    /// When blocks were put or renewed last, seconds since 1970.
    puts: BTreeMap<Key, u64>,
    /// All others were put or renewed at this time or before.
    others_put_at: u64,
    /// Blocks to be removed, by when: seconds since 1970.
    due: BTreeSet<(u64, Key)>,
    /// Blocks that a node refused because they were released, and until when they are not offered to it.
    refused: BTreeMap<(PeerId, Key), Instant>,
}

impl ReleaseRecords {
    /// With the records of an earlier incarnation, at `now_unix_secs`; `has_blocks`: it may have left blocks, too.
    pub(crate) fn new(
        store: Arc<dyn BlockStore>,
        has_blocks: bool,
        now_unix_secs: u64,
    ) -> ReleaseRecords {
        let others_put_at = if has_blocks { now_unix_secs + RESTART_SLACK_SECS } else { 0 };
        let state = Mutex::new(State { others_put_at, ..State::default() });
        let releases = ReleaseRecords { store, state, sooner: Notify::default() };
        releases.find_due();
        releases
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder of this lock panics")
    }

    fn is_empty(&self) -> bool {
        self.store.usage().blocks == 0
    }

    /// Has everything on record removed, as far as it is still here.
    fn find_due(&self) {
        if self.is_empty() {
            return;
        }
        let mut after = Key::MAX;
        loop {
            let records = self.store.list(KeyRange::new(after, Key::MAX), PAGE);
            let records = records.unwrap_or_else(|error| {
                tracing::error!(%error, "releases could not be read");
                Vec::new()
            });
            let due = records.iter().map(|info| (due_at(info.version), info.key));
            self.state().due.extend(due);
            match records.last() {
                Some(last) if last.key != Key::MAX && records.len() == PAGE => after = last.key,
                _ => return,
            }
        }
    }

    /// As of when a block was released, if it was: seconds since 1970.
    pub(crate) fn released(&self, key: &Key) -> Option<u64> {
        if self.is_empty() {
            return None;
        }
        let record = self.store.info(key).unwrap_or_else(|error| {
            tracing::error!(%error, "a release could not be read");
            None
        });
        record.map(|record| record.version)
    }

    /// Blocks were put or renewed by a publisher, at a time that its receipt says. They stay, whatever was
    /// released before: the releases on record count no more if they are sent again, also if the publisher's clock is
    /// behind.
    ///
    /// # Errors
    /// If the records could not be taken away. Then the blocks may be removed, so they are not to be acknowledged.
    pub(crate) async fn put_again(
        &self,
        keys: impl Iterator<Item = Key>,
        issued_unix_secs: u64,
        now_unix_secs: u64,
    ) -> Result<(), StoreError> {
        let keys: Vec<Key> = keys.collect();
        if keys.is_empty() {
            return Ok(());
        }
        {
            let mut state = self.state();
            for key in &keys {
                let at = state.puts.entry(*key).or_default();
                *at = (*at).max(issued_unix_secs);
            }
            state.forget_old_puts(now_unix_secs);
        }
        let released = |key: &Key| Some((*key, self.released(key)?));
        let released: Vec<(Key, u64)> = keys.iter().filter_map(released).collect();
        if released.is_empty() {
            return Ok(());
        }
        {
            let mut state = self.state();
            for (key, as_of) in &released {
                let at = state.puts.entry(*key).or_default();
                *at = (*at).max(*as_of);
            }
        }
        self.store.remove(released.into_iter().map(|(key, _)| key).collect()).await
    }

    /// Whether a block was put or renewed by a publisher at this time or later, or may have been.
    pub(crate) fn is_put_since(&self, key: &Key, unix_secs: u64) -> bool {
        let state = self.state();
        let put_at = state.puts.get(key).copied().unwrap_or(0);
        put_at.max(state.others_put_at) >= unix_secs
    }

    /// Records that blocks were released, until `expires_unix_secs` by the lease clock, and has them removed. Those that were
    /// put since are left out by the caller ([`ReleaseRecords::is_put_since`]).
    ///
    /// # Errors
    /// If it could not be recorded; then they stay.
    pub(crate) async fn record(
        &self,
        blocks: Vec<(Key, BlockKind)>,
        as_of_unix_secs: u64,
        expires_unix_secs: u64,
    ) -> Result<(), StoreError> {
        // A record of a block that never changes would stay as it is.
        let before: BTreeMap<Key, u64> =
            blocks.iter().filter_map(|(key, _)| Some((*key, self.released(key)?))).collect();
        let is_newer = |key: &Key| before.get(key).is_none_or(|as_of| *as_of < as_of_unix_secs);
        let older: Vec<Key> = before.keys().copied().filter(is_newer).collect();
        if !older.is_empty() {
            self.store.remove(older).await?;
        }
        let bytes = Bytes::from_static(&[0]);
        let record = |(key, kind): &(Key, BlockKind)| StoredBlock {
            info: BlockInfo {
                key: *key,
                kind: *kind,
                version: as_of_unix_secs,
                expires_unix_secs,
                len_bytes: 1,
                owner: Owner::NOBODY,
            },
            bytes: bytes.clone(),
        };
        let new: Vec<&(Key, BlockKind)> = blocks.iter().filter(|(key, _)| is_newer(key)).collect();
        if new.is_empty() {
            return Ok(());
        }
        self.store.put(new.iter().map(|block| record(block)).collect()).await?;
        let keys = new.into_iter().map(|(key, _)| *key);
        let (put_since, released): (Vec<Key>, Vec<Key>) =
            keys.partition(|key| self.is_put_since(key, as_of_unix_secs));
        self.state().due.extend(released.into_iter().map(|key| (due_at(as_of_unix_secs), key)));
        self.sooner.notify();
        self.forget(put_since).await;
        Ok(())
    }

    /// These are not released any more.
    pub(crate) async fn forget(&self, keys: Vec<Key>) {
        if keys.is_empty() {
            return;
        }
        if let Err(error) = self.store.remove(keys).await {
            // They are removed if they are not put again, which their publisher's next renewal would find.
            tracing::error!(%error, "releases could not be taken back");
        }
    }

    /// Forgets releases of blocks whose leases would have ended before then, by the lease clock.
    ///
    /// # Errors
    /// If the store fails.
    pub(crate) async fn forget_expired(&self, before_unix_secs: u64) -> Result<u64, StoreError> {
        if self.is_empty() {
            return Ok(0);
        }
        self.store.remove_expired(before_unix_secs).await
    }

    /// When the next block is to be removed, if there is one: seconds since 1970.
    pub(crate) fn next_due(&self) -> Option<u64> {
        self.state().due.first().map(|(at, _)| *at)
    }

    /// Takes up to `limit` blocks that are to be removed at `now_unix_secs`. Those that were put since are left out.
    pub(crate) fn take_due(&self, now_unix_secs: u64, limit: usize) -> BTreeSet<Key> {
        let mut taken = BTreeSet::new();
        while taken.len() < limit {
            let next = {
                let mut state = self.state();
                let is_due = state.due.first().is_some_and(|(at, _)| *at <= now_unix_secs);
                if is_due { state.due.pop_first() } else { None }
            };
            let Some((at, key)) = next else { break };
            // One that was released again meanwhile has its own time.
            if self.released(&key).is_some_and(|as_of| due_at(as_of) <= at.max(now_unix_secs)) {
                taken.insert(key);
            }
        }
        taken
    }

    /// Blocks that could not be removed are to be removed at another time.
    pub(crate) fn remove_at(&self, keys: impl Iterator<Item = Key>, unix_secs: u64) {
        self.state().due.extend(keys.map(|key| (unix_secs, key)));
    }

    /// A node refused a block because it was released.
    pub(crate) fn note_refused(&self, node: PeerId, key: Key, now: Instant) {
        let mut state = self.state();
        if state.refused.len() >= MAX_REFUSED {
            state.refused.retain(|_, until| *until > now);
        }
        if state.refused.len() < MAX_REFUSED {
            state.refused.insert((node, key), now + REFUSED_FOR);
        }
    }

    /// Whether a node has refused a block of late because it was released.
    pub(crate) fn is_refused(&self, node: &PeerId, key: &Key, now: Instant) -> bool {
        self.state().refused.get(&(*node, *key)).is_some_and(|until| *until > now)
    }
}

impl State {
    /// Keeps the memory bounded.
    fn forget_old_puts(&mut self, now_unix_secs: u64) {
        if self.puts.len() <= MAX_PUTS {
            return;
        }
        let oldest = now_unix_secs.saturating_sub(PUTS_FOR_SECS);
        self.puts.retain(|_, at| *at >= oldest);
        if self.puts.len() > MAX_PUTS {
            // A release of an earlier time then has no effect: its blocks stay until a later release, or their leases end.
            let last = self.puts.values().copied().max().unwrap_or(0);
            // A receipt may be of a time a day from now, and one publisher must not keep off the releases of all.
            let last = last.min(now_unix_secs.saturating_add(ADMITTED_AHEAD_SECS));
            self.others_put_at = self.others_put_at.max(last);
            self.puts.clear();
        }
    }
}

/// When a block is to be removed that was released as of then.
fn due_at(as_of_unix_secs: u64) -> u64 {
    as_of_unix_secs.saturating_add(REMOVED_AFTER_SECS)
}

#[cfg(test)]
mod tests {
    use atoll_store::MemoryStore;
    use futures_util::FutureExt;

    use super::*;

    const KIND: BlockKind = BlockKind::VolumeContent;

    fn key(n: u8) -> Key {
        Key::hashed([n; 32])
    }

    fn records() -> Arc<MemoryStore> {
        Arc::new(MemoryStore::new(1 << 20))
    }

    fn now<T>(future: impl Future<Output = T>) -> T {
        future.now_or_never().expect("memory answers at once")
    }

    fn record(releases: &ReleaseRecords, n: u8, as_of: u64) {
        now(releases.record(vec![(key(n), KIND)], as_of, 10_000)).expect("recorded");
    }

    #[test]
    fn the_later_of_a_put_and_a_release_counts_and_equal_seconds_are_for_the_put() {
        let releases = ReleaseRecords::new(records(), false, 0);
        now(releases.put_again([key(1)].into_iter(), 100, 100)).expect("noted");
        assert!(releases.is_put_since(&key(1), 100) && !releases.is_put_since(&key(1), 101));
        record(&releases, 1, 100);
        assert_eq!(releases.released(&key(1)), None, "it was put in that second");
        record(&releases, 1, 101);
        assert_eq!(releases.released(&key(1)), Some(101));
        assert!(releases.take_due(220, 9).is_empty());
        record(&releases, 1, 90);
        assert_eq!(releases.released(&key(1)), Some(101), "an older one changes nothing");
        now(releases.put_again([key(1)].into_iter(), 101, 101)).expect("noted");
        assert_eq!(releases.released(&key(1)), None);
        assert!(releases.take_due(1000, 9).is_empty());
    }

    #[test]
    fn a_second_release_has_a_time_of_its_own() {
        let releases = ReleaseRecords::new(records(), false, 0);
        record(&releases, 1, 100);
        record(&releases, 1, 150);
        assert!(releases.take_due(221, 9).is_empty(), "of the first one nothing is left");
        assert_eq!(releases.take_due(270, 9), BTreeSet::from([key(1)]));
    }

    #[test]
    fn a_restarted_node_goes_on_removing_and_ignores_what_was_signed_before_its_start() {
        let store = records();
        let releases = ReleaseRecords::new(store.clone(), false, 0);
        (1..=3).for_each(|n| record(&releases, n, 100));
        now(releases.put_again([key(2)].into_iter(), 110, 110)).expect("noted");
        let again = ReleaseRecords::new(store, true, 200);
        assert_eq!(again.next_due(), Some(220));
        assert_eq!(again.take_due(220, 9), BTreeSet::from([key(1), key(3)]));
        assert!(again.is_put_since(&key(9), 260) && !again.is_put_since(&key(9), 261));
    }

    #[test]
    fn many_puts_take_bounded_memory_and_none_is_forgotten() {
        let releases = ReleaseRecords::new(records(), false, 0);
        for n in 0..(MAX_PUTS as u32 + 10) {
            let mut hash = [0; 32];
            hash[..4].copy_from_slice(&n.to_be_bytes());
            now(releases.put_again([Key::hashed(hash)].into_iter(), 500, 500)).expect("noted");
        }
        assert!(releases.state().puts.len() <= MAX_PUTS);
        assert!(releases.is_put_since(&Key::hashed([0; 32]), 500), "the first of them");
        assert!(!releases.is_put_since(&Key::hashed([0; 32]), 501));
    }

    /// Receipts may be of a time a day from now.
    #[test]
    fn puts_of_a_time_to_come_keep_off_the_releases_of_others_for_minutes() {
        let releases = ReleaseRecords::new(records(), false, 0);
        for n in 0..(MAX_PUTS as u32 + 10) {
            let mut hash = [0; 32];
            hash[..4].copy_from_slice(&n.to_be_bytes());
            let keys = [Key::hashed(hash)].into_iter();
            now(releases.put_again(keys, 100_000, 20_000)).expect("noted");
        }
        assert!(releases.is_put_since(&key(9), 20_600) && !releases.is_put_since(&key(9), 20_601));
    }

    #[test]
    fn a_release_counts_no_more_after_a_put_by_a_clock_that_is_behind() {
        let releases = ReleaseRecords::new(records(), false, 0);
        record(&releases, 1, 100);
        now(releases.put_again([key(1)].into_iter(), 50, 110)).expect("noted");
        record(&releases, 1, 100);
        assert_eq!(releases.released(&key(1)), None, "it was sent again");
        record(&releases, 1, 101);
        assert_eq!(releases.released(&key(1)), Some(101));
    }
}
