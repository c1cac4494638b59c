//! Copies of blocks that are asked for often (CFS §5.2).
//!
//! "DHash caches blocks to avoid overloading servers that hold popular data." A node that
//! has fetched a block sends a copy to the second-to-last server on the lookup's path
//! (the paper's "future version"); later lookups from elsewhere meet the copy, since
//! paths to one key come together near its root. The copies are in memory, not on disk as
//! the paper's: they are lost at a restart, which costs nothing, and need no looking after.
//!
//! Blocks leave in least-recently-used order, but a newcomer only takes the place of
//! blocks that were asked for less often than it ([`popularity`]); a block that this node was
//! never asked for is not taken at all, so a flood of copies evicts nothing that is used.
//!
//! **Invariants:** never more than the configured bytes; a cached copy is never counted as
//! a replica, and repair, renewal and comparison never see one; only blocks that never change
//! are cached.
//!
//! It does not verify blocks: its callers have done so.

use std::collections::BTreeMap;

use atoll_env::Instant;
use atoll_key::{BlockKind, Key, PeerId};
use bytes::Bytes;

use crate::cache::popularity::Popularity;

/// What finding a block again takes, bytes: counted, or a flood of small blocks would take
/// many times the limit. Measured roughly: two map entries with their share of the nodes.
const OVERHEAD_BYTES: u64 = 320;
/// The sketch is laid out for blocks of this size.
const USUAL_BLOCK_BYTES: u64 = 8192;
/// How many bytes a second one peer may send for the cache, and how many at once.
const PEER_BYTES_PER_SEC: u64 = 256 << 10;
const PEER_BURST_BYTES: u64 = 1 << 20;
/// Peers whose sending is measured at once; while so many are busy no other may send.
const MAX_SENDERS: usize = 256;

/// A block in the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Cached {
    /// What its key promises.
    pub kind: BlockKind,
    /// Its bytes, verified.
    pub bytes: Bytes,
    /// When its lease ends.
    pub until: Instant,
}

#[derive(Debug)]
struct Entry {
    block: Cached,
    used: u64,
}

impl Entry {
    fn cost(&self) -> u64 {
        cost(&self.block)
    }
}

fn cost(block: &Cached) -> u64 {
    block.bytes.len() as u64 + OVERHEAD_BYTES
}

/// What a peer may still send.
#[derive(Clone, Copy, Debug)]
struct SendBudget {
    bytes: u64,
    at: Instant,
}

/// Keys whose popularity is counted by a cache of `limit_bytes`.
fn keys_counted(limit_bytes: u64) -> usize {
    usize::try_from(limit_bytes / USUAL_BLOCK_BYTES).unwrap_or(usize::MAX).min(1 << 20)
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Cache {
    limit_bytes: u64,
    /// How often a block must have been asked for to be taken.
    asks: u8,
    entries: BTreeMap<Key, Entry>,
    /// The entries by when they were last used.
    by_use: BTreeMap<u64, Key>,
    uses: u64,
    used_bytes: u64,
    evictions: u64,
    popularity: Popularity,
    senders: BTreeMap<PeerId, SendBudget>,
}

impl Cache {
    /// An empty cache of at most `limit_bytes`, for blocks asked for at least `asks` times
    /// of late. `salt` is known to nobody else.
    pub(super) fn new(limit_bytes: u64, asks: u8, salt: [u8; 32]) -> Cache {
        Cache {
            limit_bytes,
            asks: asks.max(1),
            entries: BTreeMap::new(),
            by_use: BTreeMap::new(),
            uses: 0,
            used_bytes: 0,
            evictions: 0,
            popularity: Popularity::new(salt, keys_counted(limit_bytes)),
            senders: BTreeMap::new(),
        }
    }

    /// Changes the limit; what no longer fits goes, the least recently used first.
    pub(super) fn set_limit(&mut self, limit_bytes: u64) {
        if limit_bytes == self.limit_bytes {
            return;
        }
        self.limit_bytes = limit_bytes;
        self.popularity = self.popularity.resized(keys_counted(limit_bytes));
        while self.used_bytes > limit_bytes
            && let Some(key) = self.by_use.values().next().copied()
        {
            self.remove(&key);
            self.evictions += 1;
        }
    }

    /// The most bytes it takes.
    pub(super) fn limit_bytes(&self) -> u64 {
        self.limit_bytes
    }

    /// Bytes taken, blocks held, and blocks that had to leave so far.
    pub(super) fn usage(&self) -> (u64, u64, u64) {
        (self.used_bytes, self.entries.len() as u64, self.evictions)
    }

    /// Somebody asks for `key`, which this node does not store.
    pub(super) fn asked(&mut self, key: &Key) {
        if self.limit_bytes > 0 {
            self.popularity.count(key);
        }
    }

    /// The block under `key`.
    pub(super) fn get(&mut self, key: &Key, now: Instant) -> Option<Cached> {
        let entry = self.entries.get_mut(key)?;
        if entry.block.until <= now {
            self.remove(key);
            return None;
        }
        self.by_use.remove(&entry.used);
        self.uses += 1;
        entry.used = self.uses;
        self.by_use.insert(self.uses, *key);
        Some(entry.block.clone())
    }

    /// Whether a copy of `key` would be taken, as far as that can be said without it.
    pub(super) fn wants(&self, key: &Key) -> bool {
        let asked = self.popularity.of(key);
        if self.limit_bytes == 0 || asked < self.asks || self.entries.contains_key(key) {
            return false;
        }
        let full = self.used_bytes + USUAL_BLOCK_BYTES > self.limit_bytes;
        let weakest = self.by_use.first_key_value().map(|(_, key)| self.popularity.of(key));
        !full || weakest.is_some_and(|weakest| weakest < asked)
    }

    /// Whether `sender` may send `bytes` more by now; if so they are counted.
    pub(super) fn may_send(&mut self, sender: PeerId, bytes: u64, now: Instant) -> bool {
        let refilled = |allowance: &SendBudget| {
            let earned = now.since(allowance.at).as_secs_f64() * PEER_BYTES_PER_SEC as f64;
            (allowance.bytes + earned as u64).min(PEER_BURST_BYTES)
        };
        if self.senders.len() >= MAX_SENDERS && !self.senders.contains_key(&sender) {
            self.senders.retain(|_, allowance| refilled(allowance) < PEER_BURST_BYTES);
            if self.senders.len() >= MAX_SENDERS {
                return false;
            }
        }
        let allowance =
            self.senders.entry(sender).or_insert(SendBudget { bytes: PEER_BURST_BYTES, at: now });
        let left = refilled(allowance);
        let may = left >= bytes;
        *allowance = SendBudget { bytes: if may { left - bytes } else { left }, at: now };
        may
    }

    /// Takes a verified block, if it is asked for often enough: more often than each block
    /// that has to leave for it. Whether it is held now.
    pub(super) fn put(&mut self, key: Key, block: Cached) -> bool {
        if let Some(Entry { block: held, .. }) = self.entries.get_mut(&key) {
            held.until = held.until.max(block.until);
            return true;
        }
        let asked = self.popularity.of(&key);
        let cost = cost(&block);
        if cost > self.limit_bytes || asked < self.asks {
            return false;
        }
        let mut freed_bytes = 0;
        let mut leaving = Vec::new();
        for key in self.by_use.values() {
            if self.used_bytes - freed_bytes + cost <= self.limit_bytes {
                break;
            }
            if self.popularity.of(key) >= asked {
                return false;
            }
            freed_bytes += self.entries[key].cost();
            leaving.push(*key);
        }
        self.evictions += leaving.len() as u64;
        for key in &leaving {
            self.remove(key);
        }
        self.uses += 1;
        self.used_bytes += cost;
        self.by_use.insert(self.uses, key);
        // The bytes of a message share one buffer, which would stay in memory whole.
        let block = Cached { bytes: Bytes::copy_from_slice(&block.bytes), ..block };
        self.entries.insert(key, Entry { block, used: self.uses });
        true
    }

    /// Forgets a block.
    pub(super) fn remove(&mut self, key: &Key) {
        if let Some(entry) = self.entries.remove(key) {
            self.by_use.remove(&entry.used);
            self.used_bytes -= entry.cost();
        }
    }

    #[cfg(test)]
    fn check_invariants(&self) {
        assert_eq!(self.used_bytes, self.entries.values().map(Entry::cost).sum::<u64>());
        assert!(self.used_bytes <= self.limit_bytes);
        let by_use = self.entries.iter().map(|(key, entry)| (entry.used, *key));
        assert_eq!(by_use.collect::<BTreeMap<_, _>>(), self.by_use);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use atoll_key::BlockHash;

    use super::*;

    const BLOCK_BYTES: usize = 1000;
    const COST: u64 = BLOCK_BYTES as u64 + OVERHEAD_BYTES;

    fn key(n: u32) -> Key {
        BlockHash::of(&n.to_be_bytes()).key()
    }

    fn at(secs: u64) -> Instant {
        Instant::default() + Duration::from_secs(secs)
    }

    fn block(n: u32) -> Cached {
        let bytes = Bytes::from(vec![n as u8; BLOCK_BYTES]);
        Cached { kind: BlockKind::Content, bytes, until: at(1000) }
    }

    /// A cache with room for ten blocks.
    fn cache() -> Cache {
        Cache::new(10 * COST, 1, [3; 32])
    }

    fn ask_and_put(cache: &mut Cache, n: u32, asks: u32) -> bool {
        (0..asks).for_each(|_| cache.asked(&key(n)));
        let taken = cache.put(key(n), block(n));
        cache.check_invariants();
        taken
    }

    fn holds(cache: &mut Cache, n: u32) -> bool {
        cache.get(&key(n), at(0)).is_some()
    }

    #[test]
    fn the_least_recently_used_leaves_first() {
        let mut cache = cache();
        (0..10).for_each(|n| assert!(ask_and_put(&mut cache, n, 1)));
        assert!(holds(&mut cache, 0));
        assert!(ask_and_put(&mut cache, 10, 2));
        let held: Vec<u32> = (0..=10).filter(|n| holds(&mut cache, *n)).collect();
        assert_eq!(held, [0, 2, 3, 4, 5, 6, 7, 8, 9, 10]);
        assert_eq!(cache.usage(), (10 * COST, 10, 1));
    }

    #[test]
    fn a_smaller_limit_holds_at_once_and_zero_empties_it() {
        let mut cache = cache();
        (0..10).for_each(|n| assert!(ask_and_put(&mut cache, n, 1)));
        cache.set_limit(3 * COST);
        cache.check_invariants();
        let held: Vec<u32> = (0..10).filter(|n| holds(&mut cache, *n)).collect();
        assert_eq!(held, [7, 8, 9], "the last used");
        cache.set_limit(0);
        assert_eq!(cache.usage(), (0, 0, 10));
        cache.set_limit(10 * COST);
        assert!(ask_and_put(&mut cache, 20, 1), "and it can grow again");
    }

    #[test]
    fn a_flood_evicts_nothing_that_is_used_and_keeps_to_the_limit() {
        let mut cache = cache();
        (0..10).for_each(|n| assert!(ask_and_put(&mut cache, n, 3)));
        for n in 100..5000 {
            assert!(!ask_and_put(&mut cache, n, 0), "nobody has asked for {n}");
            assert!(!ask_and_put(&mut cache, n, 1), "{n} was asked for once");
            // What is used is asked for again and again.
            (0..10).filter(|used| n % 50 == *used).for_each(|n| cache.asked(&key(n)));
        }
        assert!((0..10).all(|n| holds(&mut cache, n)));
    }

    #[test]
    fn a_block_must_have_been_asked_for_as_often_as_configured() {
        let mut cache = Cache::new(10 * COST, 2, [3; 32]);
        assert!(!ask_and_put(&mut cache, 1, 1) && !cache.wants(&key(1)));
        cache.asked(&key(1));
        assert!(cache.wants(&key(1)) && ask_and_put(&mut cache, 1, 0));
        assert!(!cache.wants(&key(1)), "it has it");
        let mut none = Cache::new(0, 1, [3; 32]);
        assert!(!ask_and_put(&mut none, 1, 9) && !none.wants(&key(1)));
    }

    #[test]
    fn a_copy_does_not_outlive_the_lease() {
        let mut cache = cache();
        assert!(ask_and_put(&mut cache, 1, 1));
        assert!(cache.get(&key(1), at(999)).is_some());
        assert!(cache.get(&key(1), at(1000)).is_none());
        assert_eq!(cache.usage().0, 0);
    }

    #[test]
    fn a_peer_may_send_so_much_and_no_more() {
        let mut cache = cache();
        let (one, other) = (PeerId([1; 32]), PeerId([2; 32]));
        assert!(cache.may_send(one, PEER_BURST_BYTES, at(0)));
        assert!(!cache.may_send(one, 1000, at(0)));
        assert!(cache.may_send(other, 1000, at(0)));
        assert!(cache.may_send(one, PEER_BYTES_PER_SEC, at(1)));
        assert!(!cache.may_send(one, 1000, at(1)));
        for n in 0..3 * MAX_SENDERS as u32 {
            let peer = PeerId(*BlockHash::of(&n.to_be_bytes()).key().0.first_chunk().expect("64"));
            cache.may_send(peer, 1000, at(1));
        }
        assert_eq!(cache.senders.len(), MAX_SENDERS);
        assert!(cache.may_send(PeerId([3; 32]), 1000, at(60)), "the others have stopped");
    }
}
