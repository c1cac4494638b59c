//! What a node holds: blocks in its store, pointers to copies on other nodes, copies about to
//! be removed; and the proof that it holds them.

pub(crate) mod copies;
mod headroom;
pub(crate) mod lock_leases;
pub(crate) mod pending_removals;
pub(crate) mod pointers;
pub(crate) mod promises;
pub(crate) mod proof;
pub(crate) mod ranges;
mod repair_requests;
pub(crate) mod ring_watch;
mod set_history;
mod watches;

use std::sync::Arc;

use atoll_env::{Instant, Notify};
use atoll_key::Key;
use atoll_store::{BlockInfo, Owner, StoreError, StoredBlock};

use crate::context::layer_above;
use crate::locks::LOCK_LEASE;
use crate::most_peers::Present;
use crate::rpc::{Block, Rpc};
use crate::stats::add;
use headroom::Headroom;
use lock_leases::LockLeases;
use pending_removals::PendingRemovals;
use pointers::Pointers;
use promises::Promises;
use repair_requests::RepairRequests;
use set_history::SetHistory;
use watches::Watches;

/// See the module.
pub(crate) struct Holdings {
    rpc: Arc<Rpc>,
    /// Copies that other nodes keep for this one, and it for others.
    pub pointers: Pointers,
    /// Notified when pointers should be checked before it is due.
    pub pointer_doubts: Notify,
    /// Copies about to be dropped.
    pub pending: PendingRemovals,
    pub headroom: Headroom,
    pub requests: RepairRequests,
    pub watches: Watches,
    pub promises: Promises,
    pub lock_leases: LockLeases,
    /// Since when nodes belong to the replica sets of this node's keys.
    pub set_history: SetHistory,
    /// When this node was started.
    started: Instant,
}
layer_above!(Holdings, rpc: Arc<Rpc>);

impl Holdings {
    pub(crate) fn new(rpc: Arc<Rpc>) -> Holdings {
        let promises = Promises::new(rpc.env.now(), rpc.store.usage().blocks > 0);
        Holdings {
            promises,
            pointers: Pointers::new(rpc.durable.pointers()),
            started: rpc.env.now(),
            rpc,
            pointer_doubts: Notify::default(),
            pending: PendingRemovals::default(),
            headroom: Headroom::default(),
            requests: RepairRequests::default(),
            watches: Watches::default(),
            lock_leases: LockLeases::default(),
            set_history: SetHistory::default(),
        }
    }

    /// A block from this node's store; one that is damaged counts as missing.
    pub(crate) async fn read(&self, key: &Key) -> Option<StoredBlock> {
        let read = self.store.get(key).await;
        read.inspect_err(|error| self.note_store_error(error)).ok().flatten()
    }

    /// A damaged block counts as missing from now on: repair fetches it again.
    pub(crate) fn note_store_error(&self, error: &StoreError) {
        tracing::warn!(%error, "a block could not be read");
        if let StoreError::Corrupted { key } = error {
            add(&self.counters.damaged_blocks, 1);
            self.requests.refetch(*key);
        }
    }

    /// What is known of a block that is here, or that another node keeps for this one.
    pub(crate) fn known(&self, key: &Key) -> Option<BlockInfo> {
        let here = self.store.info(key).ok().flatten();
        let elsewhere = self.pointers.pointed(key);
        here.into_iter().chain(elsewhere).max_by_key(|info| info.version)
    }

    /// Whether lock leases that an earlier run of this node has granted may not have ended.
    pub(crate) fn may_have_granted(&self) -> bool {
        self.most_peers.has_run_before() && self.env.now().since(self.started) < LOCK_LEASE
    }

    /// Notes how this node's replica sets are now, and how many nodes there are; whether these are
    /// more than half of those there were.
    pub(crate) fn note_ring(&self) -> bool {
        let (now, overlay) = (self.env.now(), &self.overlay);
        let begins_ring = !self.most_peers.has_run_before();
        let (epoch, hoods) = (overlay.epoch(), overlay.neighbourhoods());
        self.set_history.note(now, epoch, &hoods, self.config.replicas, begins_ring);
        let own = self.transport.local().id;
        self.most_peers.note(now, Present::of(&**overlay, own))
    }

    /// A verified block as the store takes it.
    pub(crate) fn to_store(&self, block: &Block, version: u64) -> StoredBlock {
        let info = BlockInfo {
            key: block.header.key,
            kind: block.header.kind,
            version,
            expires_unix_secs: self.expiry(block.header.lease_secs),
            len_bytes: u32::try_from(block.bytes.len()).expect("verified blocks are short"),
            owner: Owner::NOBODY,
        };
        StoredBlock { info, bytes: block.bytes.clone() }
    }
}
