//! What the parts of a node's block layer share: configuration, the layers below, the
//! counters, and the few steps that all of them take.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use atoll_env::Env;
use atoll_key::{Key, PeerId};
use atoll_net::{Peer, Refusal, Transport};
use atoll_overlay::walk::Selection;
use atoll_overlay::{Node, Overlay};
use atoll_store::{BlockInfo, BlockStore, Owner, StoreError, StoredBlock};

use crate::accounting::confirm::Confirmations;
use crate::accounting::quota::{Quota, QuotaConfig};
use crate::accounting::receipt::Attestor;
use crate::cache::lru::Cache;
use crate::client::block_times::BlockTimes;
use crate::client::replica_selection::HedgeBudget;
use crate::client::seen::SeenVersions;
use crate::diversion::Diversion;
use crate::durable::DurableState;
use crate::holdings::pending_removals::Leaving;
use crate::lease_clock::LeaseClock;
use crate::mechanisms::Mechanisms;
use crate::replication::handoff::Handoff;
use crate::replication::in_flight::UnderWay;
use crate::replication::losses::Losses;
use crate::replication::state::Repair;
use crate::replication::writes::Writes;
use crate::rpc::Block;
use crate::rpc::put_times::PutTimes;
use crate::rpc::quorum::Background;
use crate::server::work_limit::WorkLimiter;
use crate::stats::{Counters, add};

/// Blocks in one reply stop at this many bytes (one block at least is sent).
pub(crate) const REPLY_BYTES: usize = 1 << 20;

/// Which of a block's replicas a fetch asks first.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ReplicaChoice {
    /// The root, as a plain Chord lookup ends there.
    Root,
    /// The one that answers this node fastest (CFS §5.1).
    #[default]
    Nearest,
}

/// Who keeps a copy of a block that was fetched, besides its replicas (CFS §5.2).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum CacheAt {
    /// Nobody; this node has no cache.
    Off,
    /// The second-to-last server of the lookup's path, and the node that fetched: the
    /// paper's "future version".
    #[default]
    SecondToLast,
    /// Every server of the path, as the paper's experiments had it.
    WholePath,
}

/// How a node's block layer behaves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DhtConfig {
    /// Copies of each block: k. At least 1. CFS §7.3 uses 6; 3 is what file systems of
    /// this kind default to.
    pub replicas: usize,
    /// The lease given to blocks stored by this node's clients.
    pub lease: Duration,
    /// The longest lease accepted from anybody.
    pub max_lease: Duration,
    /// How long a peer may take to answer one call.
    pub call_limit: Duration,
    /// How long a client's fetch may take, all attempts together.
    pub get_limit: Duration,
    /// How long a client's put may take, all attempts together.
    pub put_limit: Duration,
    /// How long fewer nodes than k must be all there are before fewer copies will do; see
    /// [`Dht::forget_absent`](crate::Dht::forget_absent) for when that is never.
    pub shrink_after: Duration,
    /// How often neighbours are compared when nothing seems to have changed.
    pub repair_every: Duration,
    /// How long the neighbourhood must be quiet before repair begins.
    pub repair_settle: Duration,
    /// How many bytes a second repair may copy.
    pub repair_bytes_per_sec: u64,
    /// How many bytes a second the scrubber reads: more in a store so large that reading it once
    /// would take weeks.
    pub scrub_bytes_per_sec: u64,
    /// How often expired blocks are looked for.
    pub expire_every: Duration,
    /// How much of this node publishers may use, until [`Dht::set_quota`](crate::Dht::set_quota)
    /// says otherwise.
    pub quota: QuotaConfig,
    /// How long a block is kept beyond the end of its lease: publishers may be late by so
    /// much, and nothing is lost.
    pub expire_grace: Duration,
    /// How long a block that belongs to other nodes is kept here after they have got it.
    pub stray_grace: Duration,
    /// How a lookup chooses its next hop (CFS §4.3).
    pub selection: Selection,
    /// How many routes a lookup may take, each through other nodes, while a block is not
    /// found (CFS §8). 1 believes the first node that says it does not exist.
    pub routes: usize,
    /// Which replica is asked first for a content block.
    pub replica_choice: ReplicaChoice,
    /// Whether a second replica is asked when the first is slower than it usually is, and
    /// another node for the way when an answer is overdue.
    pub hedge: bool,
    /// The most fetches in a hundred that ask a second replica, besides a short burst.
    pub hedge_percent: u32,
    /// Who caches what was fetched.
    pub cache_at: CacheAt,
    /// The most bytes the cache takes, in memory, until
    /// [`Dht::set_cache_bytes`](crate::Dht::set_cache_bytes) says otherwise; 0 for no cache.
    pub cache_bytes: u64,
    /// How often a block must have been asked for here of late to be cached: 1 as in the
    /// paper; with 2, fetching a large file once sends no copies about.
    pub cache_asks: u8,
    /// How old a cached signed block may be to be answered with; zero caches none.
    pub signed_cache: Duration,
    /// Whether other nodes keep copies for which a replica has no room (PAST §3.3).
    pub divert: bool,
    /// What is switched off, in an experiment.
    pub mechanisms: Mechanisms,
}

impl Default for DhtConfig {
    fn default() -> DhtConfig {
        const DAY: u64 = 24 * 3600;
        DhtConfig {
            replicas: 3,
            lease: Duration::from_secs(30 * DAY),
            max_lease: Duration::from_secs(90 * DAY),
            call_limit: Duration::from_secs(10),
            get_limit: Duration::from_secs(20),
            put_limit: Duration::from_secs(60),
            // A guess: longer than a reboot.
            shrink_after: Duration::from_secs(600),
            repair_every: Duration::from_secs(60),
            repair_settle: Duration::from_millis(500),
            // Guesses: repair may take half of a gigabit link, scrubbing must not be noticed.
            repair_bytes_per_sec: 64 << 20,
            scrub_bytes_per_sec: 1 << 20,
            expire_every: Duration::from_secs(3600),
            quota: QuotaConfig::default(),
            expire_grace: Duration::from_secs(DAY),
            // A guess: longer than a weekend.
            stray_grace: Duration::from_secs(3 * DAY),
            selection: Selection::Cost,
            // A guess, borne out by simulated crowds in which every fifth node lies.
            routes: 6,
            replica_choice: ReplicaChoice::default(),
            hedge: true,
            hedge_percent: 5,
            cache_at: CacheAt::default(),
            cache_bytes: 64 << 20,
            cache_asks: 2,
            signed_cache: Duration::from_secs(10),
            divert: true,
            mechanisms: Mechanisms::default(),
        }
    }
}

pub(crate) struct Inner {
    pub env: Env,
    pub transport: Arc<dyn Transport>,
    pub overlay: Arc<dyn Overlay>,
    pub store: Arc<dyn BlockStore>,
    pub config: DhtConfig,
    pub attestor: Arc<dyn Attestor>,
    /// What survives a restart besides the blocks.
    pub durable: Arc<dyn DurableState>,
    /// Copies that others keep for this node, and it for others.
    pub diversion: Diversion,
    /// What leases are measured by.
    pub clock: LeaseClock,
    pub quota: Quota,
    pub confirmations: Confirmations,
    pub counters: Counters,
    pub repair: Repair,
    /// Replica sets that have disappeared.
    pub losses: Losses,
    /// Ranges of blocks that belong to others.
    pub handoff: Handoff,
    /// Copies about to be dropped.
    pub leaving: Leaving,
    /// Held while copies are dropped.
    pub giving_up: futures_util::lock::Mutex<()>,
    pub cache: Mutex<Cache>,
    pub hedges: HedgeBudget,
    /// How long replicas take to send a block: longer than a round trip.
    pub fetch_times: Arc<BlockTimes>,
    /// Work done for others: comparing ranges, proving that blocks are held.
    pub comparing: WorkLimiter,
    pub proving: WorkLimiter,
    /// How long puts may take.
    pub put_times: Arc<PutTimes>,
    /// Blocks of puts that this node is sending to replicas.
    pub under_way: Arc<UnderWay>,
    /// Calls of puts that nobody waits for any more.
    pub background: Background,
    /// Signed blocks are not read below these versions.
    pub seen: Arc<SeenVersions>,
    pub writes: Writes,
}

impl Inner {
    /// Whether `node` is one of this node's own virtual servers.
    pub fn is_me(&self, node: &Node) -> bool {
        node.peer.id == self.transport.local().id
    }

    /// Whether a peer is in this node's routing tables.
    pub fn is_known_peer(&self, peer: &PeerId) -> bool {
        self.overlay.known_nodes().iter().any(|node| node.peer.id == *peer)
    }

    /// 32 random bytes.
    pub fn random_bytes(&self) -> [u8; 32] {
        let mut bytes = [0; 32];
        for chunk in bytes.chunks_mut(8) {
            chunk.copy_from_slice(&self.env.random_u64().to_be_bytes());
        }
        bytes
    }

    /// What the lease clock says, seconds.
    pub fn lease_now(&self) -> u64 {
        self.clock.secs(self.env.now())
    }

    /// When a lease of `lease_secs` from now ends, by the lease clock.
    pub fn expiry(&self, lease_secs: u64) -> u64 {
        let lease_secs = lease_secs.min(self.config.max_lease.as_secs());
        self.lease_now().saturating_add(lease_secs)
    }

    /// How long the lease of a stored block still lasts, seconds; 0 if it has ended.
    pub fn lease_left(&self, info: &BlockInfo) -> u64 {
        info.expires_unix_secs.saturating_sub(self.lease_now())
    }

    /// What is known of a block that is here, or that another node keeps for this one.
    pub fn known(&self, key: &Key) -> Option<BlockInfo> {
        let here = self.store.info(key).ok().flatten();
        let elsewhere = self.diversion.records.pointed(key);
        here.into_iter().chain(elsewhere).max_by_key(|info| info.version)
    }

    /// A verified block as the store takes it.
    pub fn to_store(&self, block: &Block, version: u64) -> StoredBlock {
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

    /// Makes sure that a publisher, or who brings copies, is where it says; `from` has shown
    /// its receipt, or is the carrier.
    ///
    /// # Errors
    /// If it is not, or cannot be asked at present.
    pub async fn confirm(
        &self,
        from: &Peer,
        publisher: Peer,
        digest: Option<[u8; 32]>,
    ) -> Result<(), Refusal> {
        if !self.config.mechanisms.confirmations {
            return Ok(());
        }
        let limit = self.config.call_limit / 2;
        let (env, transport) = (&self.env, &self.transport);
        self.confirmations.confirm(env, transport, &from.id, publisher, digest, limit).await
    }

    /// A block from this node's store; one that is damaged counts as missing.
    pub async fn read(&self, key: &Key) -> Option<StoredBlock> {
        let read = self.store.get(key).await;
        read.inspect_err(|error| self.note_store_error(error)).ok().flatten()
    }

    /// A damaged block counts as missing from now on: repair fetches it again.
    pub fn note_store_error(&self, error: &StoreError) {
        tracing::warn!(%error, "a block could not be read");
        if let StoreError::Corrupted { key } = error {
            add(&self.counters.damaged_blocks, 1);
            self.repair.refetch(*key);
        }
    }
}
