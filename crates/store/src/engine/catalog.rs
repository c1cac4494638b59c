//! The blocks that a store holds: the index on disk and, over it, the changes that have not been
//! committed to it yet.
//!
//! A key is looked up in `recent`, then in `committing`, then in the snapshot of the
//! index. During a commit `recent` becomes `committing`, and afterwards the new snapshot
//! replaces both; so at each moment the three together are one consistent state.
//!
//! The lock is never held while the index is read from disk. A thread that read the index outside
//! the lock, and then changes something based on it, compares the snapshot's generation and
//! begins again if there is a newer one.
//!
//! Invariant: nothing is in here that the log would not give back after power loss,
//! except extended leases and the absence of expired blocks.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, RwLock, RwLockReadGuard, RwLockWriteGuard, Weak};

use atoll_key::{Key, KeyRange};

use crate::engine::entry::IndexEntry;
use crate::engine::error::IndexError;
use crate::engine::holdings::{Holding, Holdings, OwnerUsage, Owners};
use crate::engine::index::{Changes, Checkpoint, Contents, Frozen, SegmentStat, Snapshot};
use crate::segment::{ALIGNMENT, record_bytes};
use crate::summary::{Changed, Summaries};
use crate::{BlockInfo, Owner};

/// A change that has become durable in the log.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Change {
    /// A new block, or a higher version.
    Put(IndexEntry),
    /// The entry as held, with a longer lease.
    Extend(IndexEntry),
    /// The same record at another place.
    Move(IndexEntry),
    /// No longer held.
    Remove,
}

#[derive(Default)]
pub(crate) struct State {
    recent: Changes,
    committing: Arc<Changes>,
    /// `None` only until the store has been opened.
    snapshot: Option<Arc<Snapshot>>,
    segments: BTreeMap<u64, SegmentStat>,
    touched: BTreeSet<u64>,
    holdings: Holdings,
    /// Owners whose holdings differ from the index.
    touched_owners: BTreeSet<Owner>,
    checkpoint: Checkpoint,
    /// Sum of the lengths of all segments.
    log_bytes: u64,
    index_bytes: u64,
    /// Told of each change of what is held.
    watchers: Vec<Weak<Changed>>,
}

pub(crate) struct Catalog {
    state: RwLock<State>,
    /// Digests of what is held.
    pub(crate) summaries: Summaries,
}

impl Default for Catalog {
    fn default() -> Catalog {
        let catalog = Catalog { state: RwLock::default(), summaries: Summaries::default() };
        catalog.watch(&catalog.summaries.changed);
        catalog
    }
}

impl State {
    /// The entry if it is known without reading the index.
    fn known(&self, key: &Key) -> Option<Option<IndexEntry>> {
        self.recent.get(key).or_else(|| self.committing.get(key)).copied()
    }

    fn generation(&self) -> u64 {
        self.snapshot.as_ref().map_or(0, |s| s.generation)
    }

    /// Sets what is held under `key` instead of `old`, keeping the sums.
    fn set(&mut self, key: Key, old: Option<IndexEntry>, new: Option<IndexEntry>) {
        if let Some(old) = old {
            self.checkpoint.blocks -= 1;
            self.checkpoint.block_bytes -= u64::from(old.len_bytes);
            self.touch(old.segment, |stat| {
                stat.live_bytes = stat.live_bytes.saturating_sub(old.record_bytes());
            });
            self.holdings.take(&old.owner, old.len_bytes);
            self.touched_owners.insert(old.owner);
        }
        if let Some(new) = new {
            self.checkpoint.blocks += 1;
            self.checkpoint.block_bytes += u64::from(new.len_bytes);
            self.touch(new.segment, |stat| stat.live_bytes += new.record_bytes());
            self.holdings.add(&new.owner, new.len_bytes);
            self.touched_owners.insert(new.owner);
        }
        self.recent.insert(key, new);
        let seen = |entry: IndexEntry| (entry.version, entry.expires_unix_secs);
        for watcher in self.watchers.iter().filter_map(Weak::upgrade) {
            watcher.note(&key, old.map(seen), new.map(seen));
        }
    }

    fn touch(&mut self, segment: u64, change: impl FnOnce(&mut SegmentStat)) {
        if let Some(stat) = self.segments.get_mut(&segment) {
            change(stat);
            self.touched.insert(segment);
        }
    }

    /// Applies one change; `indexed` is what the current snapshot says of the key.
    fn apply(&mut self, key: Key, indexed: Option<IndexEntry>, change: Change) {
        let old = self.known(&key).unwrap_or(indexed);
        // It may have been renewed since the change was planned.
        let leased = |entry: IndexEntry| old.map_or(entry, |old| entry.leased_as(&old));
        match (change, old) {
            // A block belongs to the owner of the version that replaces it.
            (Change::Put(entry), _) => {
                self.set(key, old, Some(IndexEntry { owner: entry.owner, ..leased(entry) }));
            }
            (Change::Extend(entry), _) => self.set(key, old, Some(leased(entry))),
            // Only what still is held moves: its lease may have ended meanwhile, or been shortened.
            (Change::Move(entry), Some(held)) if held.sequence == entry.sequence => {
                let IndexEntry { expires_unix_secs, owner, .. } = held;
                self.set(key, old, Some(IndexEntry { expires_unix_secs, owner, ..entry }));
            }
            (Change::Move(_), _) | (Change::Remove, None) => {}
            (Change::Remove, Some(_)) => self.set(key, old, None),
        }
    }
}

impl Catalog {
    pub(crate) fn read(&self) -> RwLockReadGuard<'_, State> {
        self.state.read().expect("no panic while the lock is held")
    }

    fn write(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write().expect("no panic while the lock is held")
    }

    /// Forgets everything, to begin again.
    pub(crate) fn clear(&self) {
        let mut state = self.write();
        let watchers = std::mem::take(&mut state.watchers);
        *state = State { watchers, ..State::default() };
    }

    /// From now on tells `changed` of each change, for as long as another part keeps it.
    pub(crate) fn watch(&self, changed: &Arc<Changed>) {
        let mut state = self.write();
        state.watchers.retain(|watcher| watcher.strong_count() > 0);
        state.watchers.push(Arc::downgrade(changed));
    }

    /// Begins with what the index holds.
    pub(crate) fn load(&self, contents: Contents) {
        let mut state = self.write();
        state.log_bytes = contents.segments.values().map(|stat| stat.len_bytes).sum();
        state.segments = contents.segments;
        state.holdings = Holdings::of(contents.owners);
        state.checkpoint = contents.checkpoint;
    }

    pub(crate) fn lookup(&self, key: &Key) -> Result<Option<IndexEntry>, IndexError> {
        let snapshot = {
            let state = self.read();
            match (state.known(key), &state.snapshot) {
                (Some(known), _) => return Ok(known),
                (None, None) => return Ok(None),
                (None, Some(snapshot)) => snapshot.clone(),
            }
        };
        snapshot.lookup(key)
    }

    /// Changes entries by what is held: `change` gets each key's entry and gives back
    /// the new one, `None` for no change.
    pub(crate) fn update(
        &self,
        keys: &[Key],
        mut change: impl FnMut(usize, Option<IndexEntry>) -> Option<Option<IndexEntry>>,
    ) -> Result<(), IndexError> {
        loop {
            let (snapshot, generation) = {
                let state = self.read();
                (state.snapshot.clone(), state.generation())
            };
            let mut indexed = Vec::with_capacity(keys.len());
            for key in keys {
                let known = self.read().known(key).is_some();
                indexed.push(match &snapshot {
                    Some(snapshot) if !known => snapshot.lookup(key)?,
                    _ => None,
                });
            }
            let mut state = self.write();
            if state.generation() != generation {
                continue;
            }
            for (i, key) in keys.iter().enumerate() {
                let held = state.known(key).unwrap_or(indexed[i]);
                if let Some(new) = change(i, held) {
                    state.set(*key, held, new);
                }
            }
            return Ok(());
        }
    }

    /// Applies changes that have become durable, with what the snapshot says of their
    /// keys. Only the thread that commits calls this, so no commit can come between its
    /// lookups and this.
    pub(crate) fn apply(&self, changes: &[(Key, Option<IndexEntry>, Change)], next_sequence: u64) {
        let mut state = self.write();
        for (key, indexed, change) in changes {
            state.apply(*key, *indexed, *change);
        }
        state.checkpoint.next_sequence = next_sequence;
    }

    /// What is held under `key`, if that is known without reading the index.
    pub(crate) fn known(&self, key: &Key) -> Option<Option<IndexEntry>> {
        self.read().known(key)
    }

    /// Up to `limit` entries of the index from `first` on, in key order, without what has changed
    /// since its last commit.
    pub(crate) fn indexed_page(
        &self,
        first: &Key,
        limit: usize,
    ) -> Result<Vec<(Key, IndexEntry)>, IndexError> {
        let snapshot = self.read().snapshot.clone();
        snapshot.map_or(Ok(Vec::new()), |snapshot| snapshot.range(first, &Key::MAX, limit))
    }

    /// Up to `limit` blocks of `range`, in ring order from its start.
    pub(crate) fn list(&self, range: KeyRange, limit: usize) -> Result<Vec<BlockInfo>, IndexError> {
        let mut found = Vec::new();
        for (first, last) in range.linear() {
            let mut from = Some(first);
            while let Some(first) = from
                && found.len() < limit
            {
                from = self.list_some(first, last, limit, &mut found)?;
            }
        }
        Ok(found)
    }

    /// Lists a part of `first..=last`; returns where to go on, `None` at the end.
    fn list_some(
        &self,
        first: Key,
        last: Key,
        limit: usize,
        found: &mut Vec<BlockInfo>,
    ) -> Result<Option<Key>, IndexError> {
        let want = limit - found.len();
        let (snapshot, generation) = {
            let state = self.read();
            (state.snapshot.clone(), state.generation())
        };
        let mut part: BTreeMap<Key, Option<IndexEntry>> = match &snapshot {
            Some(snapshot) => snapshot.range(&first, &last, want)?,
            None => Vec::new(),
        }
        .into_iter()
        .map(|(key, entry)| (key, Some(entry)))
        .collect();
        let exhausted = part.len() < want;
        let upto = if exhausted { last } else { part.keys().next_back().copied().unwrap_or(last) };
        {
            let state = self.read();
            if state.generation() != generation {
                return Ok(Some(first));
            }
            for changes in [&*state.committing, &state.recent] {
                part.extend(changes.range(first..=upto).map(|(key, entry)| (*key, *entry)));
            }
        }
        let listed = part.iter().filter_map(|(key, entry)| Some(entry.as_ref()?.info(*key)));
        found.extend(listed.take(want));
        Ok((upto != last).then(|| upto.next()))
    }

    /// Adds an empty segment.
    pub(crate) fn add_segment(&self, number: u64, salt: u64, len_bytes: u64) {
        let mut state = self.write();
        let stat = SegmentStat { salt, len_bytes, live_bytes: 0, removals: 0 };
        state.segments.insert(number, stat);
        state.touched.insert(number);
        state.log_bytes += len_bytes;
    }

    pub(crate) fn forget_segment(&self, number: u64) {
        let mut state = self.write();
        if let Some(stat) = state.segments.remove(&number) {
            state.log_bytes -= stat.len_bytes;
        }
        state.touched.insert(number);
    }

    pub(crate) fn count_removals(&self, number: u64, removals: u64) {
        self.write().touch(number, |stat| stat.removals += removals);
    }

    /// The removals in a segment that still matter have been copied elsewhere.
    pub(crate) fn clear_removals(&self, number: u64) {
        self.write().touch(number, |stat| stat.removals = 0);
    }

    /// The length of the last segment has changed, whether it is synced or not.
    pub(crate) fn set_segment_len(&self, number: u64, len_bytes: u64) {
        let mut state = self.write();
        let mut old_len_bytes = len_bytes;
        state.touch(number, |stat| {
            old_len_bytes = std::mem::replace(&mut stat.len_bytes, len_bytes);
        });
        state.log_bytes = state.log_bytes + len_bytes - old_len_bytes;
    }

    /// The log is synced up to here, and everything in it has been applied.
    pub(crate) fn set_synced(&self, segment: u64, offset: u64) {
        let mut state = self.write();
        state.checkpoint.segment = segment;
        state.checkpoint.offset = offset;
    }

    /// The next record will have this number.
    pub(crate) fn set_next_sequence(&self, next_sequence: u64) {
        self.write().checkpoint.next_sequence = next_sequence;
    }

    /// Takes what has changed, to commit it.
    pub(crate) fn freeze(&self) -> Frozen {
        let mut state = self.write();
        assert!(state.committing.is_empty(), "one commit at a time");
        state.committing = Arc::new(std::mem::take(&mut state.recent));
        let touched = std::mem::take(&mut state.touched);
        let owners = std::mem::take(&mut state.touched_owners);
        let owners = owners.into_iter().map(|owner| (owner, state.holdings.held(&owner)));
        let owners: BTreeMap<Owner, Holding> = owners.collect();
        let synced = state.checkpoint;
        let segments = touched
            .iter()
            .filter_map(|number| {
                let mut stat = *state.segments.get(number)?;
                // The index never claims more of the log than has been synced.
                match number.cmp(&synced.segment) {
                    Ordering::Less => {}
                    Ordering::Equal => stat.len_bytes = stat.len_bytes.min(synced.offset),
                    Ordering::Greater => stat.len_bytes = 0,
                }
                Some((*number, stat))
            })
            .collect();
        let dead = state
            .segments
            .iter()
            .filter(|(number, stat)| **number < synced.segment && stat.live_bytes == 0)
            .map(|(number, _)| *number)
            .collect();
        Frozen {
            dead,
            changes: state.committing.clone(),
            touched,
            segments,
            owners,
            checkpoint: state.checkpoint,
        }
    }

    /// What was frozen is in `snapshot`.
    pub(crate) fn committed(&self, snapshot: Snapshot, index_bytes: u64) {
        let mut state = self.write();
        state.committing = Arc::default();
        state.snapshot = Some(Arc::new(snapshot));
        state.index_bytes = index_bytes;
    }

    /// What was frozen could not be committed; it is kept for the next time.
    pub(crate) fn not_committed(&self, frozen: Frozen) {
        let mut state = self.write();
        let newer = std::mem::take(&mut state.recent);
        drop(std::mem::take(&mut state.committing));
        state.recent = Arc::unwrap_or_clone(frozen.changes);
        state.recent.extend(newer);
        state.touched.extend(frozen.touched);
        state.touched_owners.extend(frozen.owners.into_keys());
    }

    /// The index was opened again: same contents, new snapshot.
    pub(crate) fn set_snapshot(&self, snapshot: Snapshot, index_bytes: u64) {
        let mut state = self.write();
        state.snapshot = Some(Arc::new(snapshot));
        state.index_bytes = index_bytes;
    }

    /// Changes that wait for a commit.
    pub(crate) fn uncommitted(&self) -> usize {
        self.read().recent.len()
    }

    /// Checks the sums over owners against those over blocks.
    pub(crate) fn check_holdings(&self) {
        let state = self.read();
        let Checkpoint { blocks, block_bytes, .. } = state.checkpoint;
        state.holdings.check_invariants(blocks, block_bytes);
    }

    /// Checks what always holds between the sums.
    pub(crate) fn check_invariants(&self) {
        let state = self.read();
        let live: u64 = state.segments.values().map(|stat| stat.live_bytes).sum();
        let Checkpoint { blocks, block_bytes, .. } = state.checkpoint;
        let least = block_bytes + blocks * record_bytes(0);
        assert!(live >= least, "{live} live bytes are fewer than the {least} of the blocks");
        let most = least + blocks * ALIGNMENT as u64;
        assert!(live <= most, "more live bytes than blocks take");
        drop(state);
        self.check_holdings();
        let state = self.read();
        for (number, stat) in &state.segments {
            assert!(stat.live_bytes <= stat.len_bytes, "segment {number}: {stat:?}");
        }
    }
}

impl State {
    pub(crate) fn segments(&self) -> &BTreeMap<u64, SegmentStat> {
        &self.segments
    }

    pub(crate) fn checkpoint(&self) -> Checkpoint {
        self.checkpoint
    }

    pub(crate) fn index_bytes(&self) -> u64 {
        self.index_bytes
    }

    pub(crate) fn usage_of(&self, owner: &Owner) -> OwnerUsage {
        self.holdings.usage_of(owner)
    }

    pub(crate) fn largest_owners(&self, limit: usize) -> Owners {
        self.holdings.largest(limit)
    }

    /// What the store takes on its disk, bytes.
    pub(crate) fn disk_bytes(&self) -> u64 {
        self.log_bytes + self.index_bytes
    }
}
