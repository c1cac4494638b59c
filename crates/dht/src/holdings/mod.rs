//! What a node holds: blocks in its store, pointers to copies on other nodes, copies about to
//! be removed; and the proof that it holds them.

pub(crate) mod copies;
mod headroom;
pub(crate) mod lease_journal;
pub(crate) mod lock_leases;
pub(crate) mod pending_removals;
pub(crate) mod pointers;
pub(crate) mod promises;
pub(crate) mod proof;
pub(crate) mod ranges;
pub(crate) mod releases;
mod repair_requests;
pub(crate) mod ring_watch;
mod set_history;
mod watches;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use atoll_env::Notify;
use atoll_key::Key;
use atoll_net::Peer;
use atoll_overlay::Neighbourhood;
use atoll_store::{BlockInfo, Owner, StoreError, StoredBlock};

use crate::context::layer_above;
use crate::most_peers::Present;
use crate::rpc::{Block, Rpc};
use crate::stats::add;
use headroom::Headroom;
use lease_journal::{LeaseJournal, Recovered};
use lock_leases::LockLeases;
use pending_removals::PendingRemovals;
use pointers::Pointers;
use promises::Promises;
use releases::ReleaseRecords;
use repair_requests::RepairRequests;
use set_history::{Noted, SetHistory, Surroundings};
use watches::Watches;

/// See the module.
pub(crate) struct Holdings {
    rpc: Arc<Rpc>,
    /// Copies that other nodes keep for this one, and it for others.
    pub pointers: Pointers,
    /// Notified when pointers should be checked before it is due.
    pub pointer_doubts: Notify,
    /// Blocks that were released.
    pub releases: ReleaseRecords,
    /// Copies about to be dropped.
    pub pending: PendingRemovals,
    pub headroom: Headroom,
    pub requests: RepairRequests,
    pub watches: Watches,
    pub promises: Promises,
    pub lock_leases: LockLeases,
    /// Which members of the replica sets of this node's keys may grant locks.
    pub set_history: SetHistory,
    /// What the next incarnation must know of those three; the clock by which they go.
    pub lease_journal: LeaseJournal,
    /// Held while the surroundings are looked at: what one task has seen is in the journal before another relies on it.
    looking: Mutex<()>,
}
layer_above!(Holdings, rpc: Arc<Rpc>);

impl Holdings {
    pub(crate) fn new(rpc: Arc<Rpc>) -> Holdings {
        let has_blocks = rpc.store.usage().blocks > 0;
        let may_have_granted = rpc.most_peers.has_run_before() || has_blocks;
        let releases =
            ReleaseRecords::new(rpc.durable.releases(), has_blocks, rpc.env.unix_ms() / 1000);
        let journal = rpc.durable.journal(&rpc.env);
        let (lease_journal, recovered) = LeaseJournal::open(journal, may_have_granted);
        let now = lease_journal.now();
        let Recovered { leases, promises, sets, .. } = recovered;
        Holdings {
            promises: Promises::remembering(now, &promises),
            lock_leases: LockLeases::remembering(now, &leases),
            set_history: SetHistory::remembering(sets),
            lease_journal,
            releases,
            looking: Mutex::default(),
            pointers: Pointers::new(rpc.durable.pointers()),
            rpc,
            pointer_doubts: Notify::default(),
            pending: PendingRemovals::default(),
            headroom: Headroom::default(),
            requests: RepairRequests::default(),
            watches: Watches::default(),
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

    /// Notes how this node's replica sets are now, and how many nodes there are; whether these are
    /// more than half of those there were.
    pub(crate) fn note_ring(&self) -> bool {
        let _looking = self.looking.lock().expect("no holder of this lock panics");
        let (now, overlay) = (self.lease_journal.now(), &self.overlay);
        let own = self.transport.local().id;
        let confirmed = |hood: Neighbourhood| {
            let unconfirmed = overlay.unconfirmed_for(&hood.me);
            (hood, unconfirmed)
        };
        let hoods: Vec<_> = overlay.neighbourhoods().into_iter().map(confirmed).collect();
        let has_majority = self.most_peers.note(self.env.now(), Present::of(&**overlay, own));
        let surroundings = Surroundings {
            hoods: &hoods,
            copies: self.config.replicas,
            has_majority,
            begins_ring: !self.most_peers.has_run_before(),
        };
        let noted = self.set_history.note(now, &surroundings);
        if noted != Noted::Nowhere {
            let changed = noted == Noted::Changed;
            self.lease_journal.note_sets(now, changed, || self.set_history.sets());
        }
        has_majority
    }

    /// Promises a reader to be told of the next change of a block, if it can be, for as long as is returned; the reader
    /// may hear of it when the journal is written.
    pub(crate) fn promise(&self, key: Key, reader: Peer, number: u64) -> Option<Duration> {
        let round_trip = self.transport.round_trip(&reader.id);
        let lasts = self.promises.time_for(reader.id, round_trip);
        let record = self.promises.make(self.lease_journal.now(), key, (reader, number), lasts)?;
        self.lease_journal.promise(record);
        Some(lasts)
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
