//! Counters of a node's block layer.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use atoll_key::PeerId;
use bytes::Bytes;

/// The most peers whose bad blocks are counted one by one; the rest share an entry.
const MAX_MARKED: usize = 256;

/// What happened since the node started.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DhtStats {
    /// Blocks fetched for clients.
    pub gets: u64,
    /// Fetches that failed.
    pub failed_gets: u64,
    /// Blocks stored for clients.
    pub puts: u64,
    /// Remote calls made by fetches.
    pub get_calls: u64,
    /// Blocks served to peers.
    pub served: u64,
    /// Bytes of them.
    pub served_bytes: u64,
    /// Blocks that did not match their key, by who sent them.
    pub bad_blocks: BTreeMap<PeerId, u64>,
    /// Bad blocks of senders beyond the first 256.
    pub bad_blocks_others: u64,
    /// Blocks found damaged on this node's disk.
    pub damaged_blocks: u64,
    /// Blocks dropped because their lease ended.
    pub expired_blocks: u64,
    /// Fetches that asked a second replica because the first was slow.
    pub hedges: u64,
    /// Those of them in which the second replica's answer came first.
    pub hedges_won: u64,
    /// Questions, of peers and of this node's clients, that the cache answered.
    pub cache_hits: u64,
    /// Questions that neither the store nor the cache answered.
    pub cache_misses: u64,
    /// Bytes the cache takes at present, with what it needs to find them again.
    pub cache_bytes: u64,
    /// Blocks in the cache at present.
    pub cache_blocks: u64,
    /// Blocks that left the cache to make room for others.
    pub cache_evictions: u64,
    /// Copies that peers sent for the cache and that were not taken.
    pub cache_refused: u64,
    /// Copies sent to the caches of others.
    pub cache_sent: u64,
    /// Copies that other nodes keep for this one at present, for want of room.
    pub pointers: u64,
    /// Copies that this node keeps for others at present.
    pub held_for_others: u64,
}

/// The counters themselves.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub gets: AtomicU64,
    pub failed_gets: AtomicU64,
    pub puts: AtomicU64,
    pub get_calls: AtomicU64,
    pub served: AtomicU64,
    pub served_bytes: AtomicU64,
    pub damaged_blocks: AtomicU64,
    pub expired_blocks: AtomicU64,
    pub hedges: AtomicU64,
    pub hedges_won: AtomicU64,
    pub cache_hits: AtomicU64,
    pub cache_misses: AtomicU64,
    pub cache_refused: AtomicU64,
    pub cache_sent: AtomicU64,
    marked: Mutex<(BTreeMap<PeerId, u64>, u64)>,
}

pub(crate) fn add(counter: &AtomicU64, count: u64) {
    counter.fetch_add(count, Ordering::Relaxed);
}

impl Counters {
    /// Counts a block of `sender` that did not match its key.
    pub(crate) fn mark(&self, sender: PeerId) {
        let mut marked = self.marked.lock().expect("no holder of this lock panics");
        let (known, others) = &mut *marked;
        if known.len() < MAX_MARKED || known.contains_key(&sender) {
            *known.entry(sender).or_default() += 1;
        } else {
            *others += 1;
        }
    }

    /// Blocks were sent to a peer.
    pub(crate) fn count_served<'a>(&self, blocks: impl IntoIterator<Item = &'a Bytes>) {
        for bytes in blocks {
            add(&self.served, 1);
            add(&self.served_bytes, bytes.len() as u64);
        }
    }

    pub(crate) fn snapshot(&self) -> DhtStats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let (bad_blocks, bad_blocks_others) =
            self.marked.lock().expect("no holder of this lock panics").clone();
        DhtStats {
            gets: read(&self.gets),
            failed_gets: read(&self.failed_gets),
            puts: read(&self.puts),
            get_calls: read(&self.get_calls),
            served: read(&self.served),
            served_bytes: read(&self.served_bytes),
            bad_blocks,
            bad_blocks_others,
            damaged_blocks: read(&self.damaged_blocks),
            expired_blocks: read(&self.expired_blocks),
            hedges: read(&self.hedges),
            hedges_won: read(&self.hedges_won),
            cache_hits: read(&self.cache_hits),
            cache_misses: read(&self.cache_misses),
            cache_refused: read(&self.cache_refused),
            cache_sent: read(&self.cache_sent),
            // What the cache and the pointers' store know is added by the caller.
            ..DhtStats::default()
        }
    }
}
