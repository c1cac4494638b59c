//! Counters of a node's block layer.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use atoll_key::PeerId;
use bytes::Bytes;

/// The most peers whose bad blocks are counted.
const MAX_MARKED: usize = 256;

macro_rules! counted {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// What happened since the node started.
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        pub struct DhtStats {
            $($(#[$doc])* pub $name: u64,)*
            /// Blocks that did not match their key, by sender; of the first 256 senders.
            pub bad_blocks: BTreeMap<PeerId, u64>,
            /// Bytes the cache takes at present, with what it needs to find them again.
            pub cache_bytes: u64,
            /// Blocks in the cache at present.
            pub cache_blocks: u64,
            /// Blocks that left the cache to make room for others.
            pub cache_evictions: u64,
            /// Copies that other nodes keep for this one at present, for want of room.
            pub pointers: u64,
            /// Copies that this node keeps for others at present.
            pub held_for_others: u64,
        }

        /// The counters themselves.
        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            $(pub $name: AtomicU64,)*
            marked: Mutex<BTreeMap<PeerId, u64>>,
        }

        impl Counters {
            /// What was counted; what the cache and the pointers' store know is added by the
            /// caller.
            pub(crate) fn snapshot(&self) -> DhtStats {
                DhtStats {
                    $($name: self.$name.load(Ordering::Relaxed),)*
                    bad_blocks: self.marked.lock().expect("no holder of this lock panics").clone(),
                    ..DhtStats::default()
                }
            }
        }
    };
}

counted! {
    /// Blocks fetched for clients.
    gets,
    /// Remote calls made by fetches.
    get_calls,
    /// Blocks served to peers.
    served,
    /// Bytes of them.
    served_bytes,
    /// Blocks found damaged on this node's disk.
    damaged_blocks,
    /// Blocks dropped because their lease ended.
    expired_blocks,
    /// Blocks removed because they were released.
    released_blocks,
    /// Fetches that asked a second replica because the first was slow.
    hedges,
    /// Those of them in which the second replica's answer came first.
    hedges_won,
    /// Questions, of peers and of this node's clients, that the cache answered.
    cache_hits,
    /// Questions that neither the store nor the cache answered.
    cache_misses,
    /// Copies that peers sent for the cache and that were not taken.
    cache_refused,
    /// Copies sent to the caches of others.
    cache_sent,
}

pub(crate) fn add(counter: &AtomicU64, count: u64) {
    counter.fetch_add(count, Ordering::Relaxed);
}

impl Counters {
    /// Counts a block of `sender` that did not match its key.
    pub(crate) fn mark(&self, sender: PeerId) {
        let mut marked = self.marked.lock().expect("no holder of this lock panics");
        if marked.len() < MAX_MARKED || marked.contains_key(&sender) {
            *marked.entry(sender).or_default() += 1;
        }
    }

    /// Blocks were sent to a peer.
    pub(crate) fn count_served<'a>(&self, blocks: impl IntoIterator<Item = &'a Bytes>) {
        for bytes in blocks {
            add(&self.served, 1);
            add(&self.served_bytes, bytes.len() as u64);
        }
    }
}
