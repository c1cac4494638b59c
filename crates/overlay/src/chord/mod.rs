//! Chord: successor lists, and shortcuts across the ring.
//!
//! CFS §4 with Zave's corrected operations. [`ring`] is the protocol as plain data and
//! [`messages`] its calls as bytes. [`Chord`] drives it on a runtime and a transport: it joins and
//! leaves ([`membership`]), stabilises ([`maintenance`]), checks other nodes ([`trust`]), keeps the
//! adaptive routing table ([`table`]) and answers calls. The byte tables and the protocol in prose
//! are in `docs/design/chord.md`.
//!
//! Failure detection: the first successor is called every `stabilize_every`, which also tells it
//! that its predecessor lives; a silent predecessor is pinged. A call that merely timed out is
//! tried once more before its node counts as dead. A node that others report dead
//! (`report_failure`, `REPORT_FAILED`) is pinged before it is forgotten for long. Lists travel only
//! when they changed, and a node whose list changed nudges its predecessor. A ring at rest
//! therefore costs one small call per node and period, and a change reaches all lists that hold it
//! in r round trips.
//!
//! A node holds several ring positions, its virtual servers (CFS §5.3): each stabilises by itself,
//! all share the rest ([`ring::servers`]). Virtual servers of one node never call each other.
//!
//! A node enters a table only after it was checked ([`trust::verify`], CFS §4.4).
//!
//! Chord does not know blocks, and it does not choose members: any peer that the transport lets in
//! and that is where it says may be on the ring.

mod calls;
mod config;
mod maintenance;
mod membership;
pub mod messages;
mod overlay;
pub mod ring;
mod service;
pub mod table;
pub mod trust;

use std::sync::{Arc, Mutex, MutexGuard, Weak};

use atoll_env::{Env, Instant, Notify};
use atoll_key::Key;
use atoll_net::{Peer, Transport};
use futures_channel::oneshot;

use crate::clock::ClockVotes;
use crate::peer_book::PeerBook;
use crate::walk::{Found, Start, WalkError};
use crate::{MAX_VIRTUAL_SERVERS, Node, Route};
pub use config::ChordConfig;
use maintenance::Maintenance;
use membership::Membership;
pub use membership::lifecycle::{JoinError, JoinFailure, VirtualServersError};
use membership::remembered::RememberedPeers;
pub use membership::remembered::{MAX_REMEMBERED, RememberedPeer};
use membership::ring_merge::Introductions;
use messages::Doubt;
use ring::servers::Servers;
use ring::state::ChordState;
use table::explore::Explorer;
pub use table::explore::TablePolicy;
use trust::PeerTrust;
pub use trust::duplicates::Duplicate;

/// A node's part in a Chord ring. Made by [`Chord::new`], put on a ring by
/// [`Chord::create`] or [`Chord::join`]; hand it to a `net::Router` as family
/// [`messages::FAMILY`].
pub struct Chord {
    this: Weak<Chord>,
    env: Env,
    transport: Arc<dyn Transport>,
    config: ChordConfig,
    /// Notified when the neighbourhood should be looked at before the next period.
    stabilize_due: Arc<Notify>,
    /// Notified when fingers are missing.
    fingers_due: Arc<Notify>,
    /// Notified when an introduced node waits to be placed, or this node has become alone.
    merge_due: Arc<Notify>,
    /// Notified when another process of this node's key has superseded this one.
    superseded_due: Notify,
    peer_book: PeerBook,
    clocks: Mutex<ClockVotes>,
    inner: Mutex<Inner>,
}

/// The state behind the lock: each part is owned by the folder that defines it.
struct Inner {
    servers: Servers,
    trust: PeerTrust,
    membership: Membership,
    maintenance: Maintenance,
    explorer: Explorer,
    /// Callers of [`crate::Overlay::changed`].
    waiters: Vec<oneshot::Sender<u64>>,
}

impl Chord {
    /// A node that is on no ring yet and knows `config.remembered`.
    ///
    /// # Panics
    /// If the configuration wants no virtual server, or more than a node may hold.
    pub fn new(env: Env, transport: Arc<dyn Transport>, config: ChordConfig) -> Arc<Chord> {
        let count = config.virtual_servers;
        assert!(count > 0 && count <= config.max_virtual_servers, "{count} virtual servers");
        // A start at random, so that a restarted node does not repeat epochs that its
        // neighbours have seen.
        let epoch = env.random_u64() >> 16;
        let (rules, length) = (config.rules(), config.list_length());
        let servers = Servers::new(transport.local(), count, rules, length, epoch);
        Chord::with_servers(env, transport, config, servers)
    }

    /// A node of one virtual server with a given state; see [`Chord::with_states`].
    pub fn with_state(
        env: Env,
        transport: Arc<dyn Transport>,
        config: ChordConfig,
        state: ChordState,
    ) -> Arc<Chord> {
        Chord::with_states(env, transport, config, vec![state])
    }

    /// A node with a given state for each virtual server, by index, to start large rings
    /// without joining one by one (see [`ChordState::perfect`]). Call [`Chord::start`] if
    /// the states are on a ring.
    ///
    /// # Panics
    /// If the states are not those of virtual servers 0, 1, 2 … of this node.
    pub fn with_states(
        env: Env,
        transport: Arc<dyn Transport>,
        config: ChordConfig,
        states: Vec<ChordState>,
    ) -> Arc<Chord> {
        let servers = Servers::of(states, config.rules(), config.list_length(), env.now());
        Chord::with_servers(env, transport, config, servers)
    }

    fn with_servers(
        env: Env,
        transport: Arc<dyn Transport>,
        config: ChordConfig,
        servers: Servers,
    ) -> Arc<Chord> {
        let first = servers.position(0);
        assert_eq!(first.peer, transport.local(), "the tables are this node's");
        assert_eq!(first.virtual_server.profile, config.profile, "the tables are of this network");
        assert!(config.max_virtual_servers <= MAX_VIRTUAL_SERVERS, "indices travel below it");
        let mut remembered = RememberedPeers::new(transport.local());
        config.remembered.iter().for_each(|peer| remembered.restore(*peer));
        config.bootstrap.iter().for_each(|peer| remembered.name(*peer));
        let explorer = Explorer::new(&config, first, env.now());
        let peer_book = PeerBook::with(config.suspect_for, config.mechanisms);
        Arc::new_cyclic(|this| Chord {
            this: this.clone(),
            inner: Mutex::new(Inner {
                servers,
                trust: PeerTrust::new(env.now()),
                membership: Membership { remembered, introductions: Introductions::default() },
                maintenance: Maintenance::default(),
                explorer,
                waiters: Vec::new(),
            }),
            env,
            transport,
            config,
            stabilize_due: Arc::default(),
            fingers_due: Arc::default(),
            merge_due: Arc::default(),
            superseded_due: Notify::default(),
            peer_book,
            clocks: Mutex::default(),
        })
    }

    /// This node's first virtual server.
    pub fn me(&self) -> Node {
        self.lock().servers.position(0)
    }

    /// How many virtual servers this node runs.
    pub fn virtual_servers(&self) -> u16 {
        self.lock().servers.count()
    }

    /// A copy of the first virtual server's tables, for checkers and for people.
    pub fn state(&self) -> ChordState {
        self.lock().servers.state(0).expect("there is always a first").clone()
    }

    /// A copy of all tables, for checkers and for people.
    pub fn servers(&self) -> Servers {
        self.lock().servers.clone()
    }

    /// Panics if the tables break an invariant of [`ring::servers`] or [`ring::state`].
    pub fn check_invariants(&self) {
        self.lock().servers.check_invariants(self.env.now());
    }

    /// A successor that says that it cannot reach this node where it says it listens, and
    /// was not contradicted by others when this node joined. Until that is mended the node has
    /// no place on the ring.
    pub fn doubted_by(&self) -> Option<Peer> {
        let inner = self.lock();
        let refuted = |index: &u16| {
            inner.servers.server(*index).is_some_and(|s| s.doubt == Some(Doubt::Refuted))
        };
        let doubting = (0..inner.servers.count())
            .filter(refuted)
            .filter_map(|index| inner.servers.state(index)?.head().map(|head| head.peer));
        doubting.into_iter().find(|peer| inner.trust.overruled != Some(*peer))
    }

    /// Peers to keep for the next start, in the order in which they were met.
    pub fn remembered(&self) -> Vec<RememberedPeer> {
        self.lock().membership.remembered.kept()
    }

    /// All peers known: those in the tables, those met before and those the user named.
    pub fn known_peers(&self) -> Vec<Peer> {
        let inner = self.lock();
        let me = inner.servers.position(0).peer.id;
        let mut peers: Vec<Peer> = inner.servers.known().iter().map(|n| n.peer).collect();
        peers.extend(inner.membership.remembered.iter());
        peers.retain(|peer| peer.id != me);
        peers.sort_unstable();
        peers.dedup();
        peers
    }

    /// The live root of `key`, with the trace of the walk to it.
    ///
    /// # Errors
    /// See [`WalkError`].
    pub async fn find_root_traced(&self, key: &Key) -> Result<Found<Vec<Node>>, WalkError> {
        self.walk_to_root(key, Start::OwnTables, self.root_limits()).await
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("no thread panics while holding the tables")
    }

    fn clocks(&self) -> MutexGuard<'_, ClockVotes> {
        self.clocks.lock().expect("no thread panics while holding the votes")
    }

    fn arc(&self) -> Arc<Chord> {
        self.this.upgrade().expect("a borrowed Chord lives in its Arc")
    }

    /// Whether `node` is one of this node's virtual servers, running or not.
    fn owns(&self, node: &Node) -> bool {
        node.peer.id == self.transport.local().id
    }

    /// Changes the tables and tells all nodes that the change concerns.
    fn update<R>(&self, change: impl FnOnce(&mut Servers, Instant) -> R) -> R {
        let now = self.env.now();
        let mut inner = self.lock();
        let epoch = inner.servers.epoch();
        let result = change(&mut inner.servers, now);
        let mut news = inner.servers.settle(now);
        if inner.servers.epoch() == epoch {
            return result;
        }
        if cfg!(debug_assertions) {
            inner.servers.check_invariants(now);
        }
        let epoch = inner.servers.epoch();
        let waiters = std::mem::take(&mut inner.waiters);
        let nudges = self.config.mechanisms.nudges;
        news.nudges.retain(|nudge| nudges && inner.maintenance.nudging.insert(*nudge));
        let must_stabilize = !news.to_stabilize.is_empty();
        inner.maintenance.to_stabilize.extend(news.to_stabilize);
        drop(inner);
        for waiter in waiters {
            let _ = waiter.send(epoch);
        }
        for (from, node) in news.nudges {
            self.nudge(from, node);
        }
        if must_stabilize {
            self.stabilize_due.notify();
        }
        if news.alone {
            self.merge_due.notify();
        }
        result
    }

    /// Has a virtual server stabilised before the next period.
    fn stabilize_soon(&self, index: u16) {
        self.lock().maintenance.to_stabilize.insert(index);
        self.stabilize_due.notify();
    }

    /// Where to ask next, from all tables.
    fn routed(&self, key: &Key, as_root: bool) -> Route {
        let route = self.lock().servers.route(key, as_root);
        self.with_table(key, route)
    }
}

impl Drop for Chord {
    fn drop(&mut self) {
        // A panic elsewhere is not made worse here.
        if let Ok(inner) = self.inner.get_mut() {
            inner.maintenance.tasks.drain(..).for_each(|task| task.abort());
        }
    }
}
