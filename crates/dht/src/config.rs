//! How a node's block layer behaves.

use std::fmt;
use std::time::Duration;

use atoll_overlay::walk::Selection;

use crate::mechanisms::Mechanisms;

/// The longest lease accepted from any peer.
pub const MAX_LEASE: Duration = Duration::from_secs(90 * 24 * 3600);

/// Which of a block's replicas a fetch asks first.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ReplicaChoice {
    /// The root, as a plain Chord lookup ends there.
    Root,
    /// The one that answers this node fastest (CFS §5.1).
    #[default]
    Nearest,
}

/// Which nodes cache a block that was fetched (CFS §5.2).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum CacheAt {
    /// None; this node has no cache.
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
    /// How long a peer may take to answer one call.
    pub call_limit: Duration,
    /// How long a client's fetch may take, all attempts together.
    pub get_limit: Duration,
    /// How long a client's put may take, all attempts together.
    pub put_limit: Duration,
    /// How often neighbours are compared when nothing seems to have changed.
    pub repair_every: Duration,
    /// How long the neighbourhood must be quiet before repair begins.
    pub repair_settle: Duration,
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
    /// Which nodes cache a block that was fetched.
    pub cache_at: CacheAt,
    /// The most bytes the cache takes, in memory, until
    /// [`Dht::set_cache_bytes`](crate::Dht::set_cache_bytes) says otherwise; 0 for no cache.
    pub cache_bytes: u64,
    /// How often a block must have been asked for here of late to be cached: 1 as in the
    /// paper; with 2, fetching a large file once sends no copies about.
    pub cache_asks: u8,
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
            call_limit: Duration::from_secs(10),
            get_limit: Duration::from_secs(20),
            put_limit: Duration::from_secs(60),
            repair_every: Duration::from_secs(60),
            repair_settle: Duration::from_millis(500),
            expire_every: Duration::from_secs(3600),
            quota: QuotaConfig::default(),
            expire_grace: Duration::from_secs(DAY),
            // A guess: longer than a weekend.
            stray_grace: Duration::from_secs(3 * DAY),
            selection: Selection::Cost,
            // A guess, borne out by simulated crowds in which every fifth node lies.
            routes: 6,
            replica_choice: ReplicaChoice::default(),
            cache_at: CacheAt::default(),
            cache_bytes: 64 << 20,
            cache_asks: 2,
            divert: true,
            mechanisms: Mechanisms::default(),
        }
    }
}

/// A part of something, in millionths.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Share(u32);

impl Share {
    /// All of it.
    pub const WHOLE: Share = Share(1_000_000);

    /// So many millionths, at most all of it.
    pub fn from_millionths(millionths: u32) -> Share {
        Share(millionths.min(Share::WHOLE.0))
    }

    /// In millionths.
    pub fn millionths(self) -> u32 {
        self.0
    }

    /// This part of `bytes`.
    pub fn of(self, bytes: u64) -> u64 {
        let part = u128::from(bytes) * u128::from(self.0) / u128::from(Share::WHOLE.0);
        u64::try_from(part).expect("a part is no more than the whole")
    }
}

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} %", f64::from(self.0) / 10_000.0)
    }
}

/// How much publishers may use of this node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QuotaConfig {
    /// How many nodes' worth of storage a publisher may use in the whole network; on a
    /// network of no more nodes no publisher is limited. A guess.
    pub publisher_nodes: u32,
    /// The least share, however large the network is; CFS's fixed 0.1 %.
    pub floor_share: Share,
    /// The share of one key, instead of what follows from the network's size.
    pub key_share: Option<Share>,
    /// The share of one address, instead of what follows from the network's size.
    pub address_share: Option<Share>,
    /// What a neighbour may bring in copies that no other node knows of. A guess:
    /// large enough for the last holder of a range, too small to fill a node.
    pub copy_share: Share,
}

impl Default for QuotaConfig {
    fn default() -> QuotaConfig {
        QuotaConfig {
            publisher_nodes: 16,
            floor_share: Share(1_000),
            key_share: None,
            address_share: None,
            copy_share: Share(250_000),
        }
    }
}
