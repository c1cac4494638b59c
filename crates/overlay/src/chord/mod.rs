//! Chord: who follows whom on the ring, and shortcuts across it.
//!
//! CFS §4 with Zave's corrected operations. [`state`] is the protocol as plain data;
//! [`messages`] its calls as bytes; [`Chord`] drives it on a runtime and a transport:
//! it joins, stabilises, refreshes fingers, merges rings and answers calls. The byte
//! tables and the protocol in prose are in `docs/design/chord.md`.
//!
//! Failure detection: the first successor is called every `stabilize_every`, which also
//! tells it that its predecessor lives; a predecessor that falls silent is pinged. A call
//! that merely timed out is tried once more before its node is taken for dead; whoever
//! was reported dead by others (`alert`, `warn`) is pinged before it is forgotten for
//! long. Lists travel only when they changed, and a node whose list changed nudges its
//! predecessor, so a ring at rest costs one small call per node and period, and a change
//! reaches all lists that hold it in r round trips.
//!
//! Departures from CFS: no server selection by latency (§4.3) yet; node IDs are hashes of
//! public keys, proven by the handshake, instead of hashes of addresses (§4.4).
//!
//! It does not know blocks, and it does not choose whom to trust: any peer that the
//! transport lets in may be on the ring.

mod bell;
mod calls;
mod fingers;
mod lifecycle;
pub mod messages;
mod peers;
mod service;
pub mod state;
mod upkeep;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use atoll_env::{BoxFuture, Env, Instant, Task};
use atoll_key::{Key, NodeId};
use atoll_net::{Peer, Transport};
use futures_channel::oneshot;

use crate::peer_book::PeerBook;
use crate::walk::{Found, WalkError};
use crate::{Neighbourhood, Node, Overlay, Route};
use bell::Bell;
pub use lifecycle::{JoinError, JoinFailure};
use peers::RememberedPeers;
use state::ChordState;

/// What can be set. The times fit a LAN and the open internet alike; all but the first
/// are guesses that the simulator bears out.
#[derive(Clone, Debug)]
pub struct ChordConfig {
    /// The paper's r, "2 log2 N for the foreseeable maximum number of nodes" (CFS §4.2).
    pub successors: usize,
    /// How often the first successor is called.
    pub stabilize_every: Duration,
    /// How often one finger is verified.
    pub fix_fingers_every: Duration,
    /// How often a remembered peer outside the neighbourhood is asked for a nearer
    /// successor, to find rings that were split off. Alone on a ring: `stabilize_every`.
    pub merge_every: Duration,
    /// The limit of one call.
    pub call_limit: Duration,
    /// How long a node found dead is not taken from hearsay.
    pub suspect_for: Duration,
    /// Peers known from an earlier run.
    pub remembered: Vec<Peer>,
}

impl Default for ChordConfig {
    fn default() -> ChordConfig {
        ChordConfig {
            successors: 16,
            stabilize_every: Duration::from_secs(1),
            fix_fingers_every: Duration::from_secs(5),
            merge_every: Duration::from_secs(20),
            call_limit: Duration::from_secs(2),
            suspect_for: Duration::from_secs(10),
            remembered: Vec::new(),
        }
    }
}

/// A node's part in a Chord ring. Made by [`Chord::new`], put on a ring by
/// [`Chord::create`] or [`Chord::join`]; hand it to a `net::Router` as family
/// [`messages::FAMILY`].
pub struct Chord {
    this: Weak<Chord>,
    env: Env,
    transport: Arc<dyn Transport>,
    config: ChordConfig,
    /// Rung when the neighbourhood should be looked at before the next period.
    stabilize_bell: Arc<Bell>,
    /// Rung when fingers are missing.
    finger_bell: Arc<Bell>,
    /// Rung when there is somebody to meet.
    meet_bell: Arc<Bell>,
    peer_book: PeerBook,
    inner: Mutex<Inner>,
}

struct Inner {
    state: ChordState,
    /// The successor whose list ours was last rebuilt from, its epoch and ours then.
    seen: Option<(NodeId, u64, u64)>,
    /// When the predecessor was last heard.
    predecessor_heard: Instant,
    /// Nodes reported dead, to be pinged.
    to_check: BTreeMap<NodeId, Node>,
    /// Nodes we were told of that may be of another ring, and how far to pass them on.
    to_meet: VecDeque<(Node, u8)>,
    /// Predecessors with a nudge under way.
    nudging: BTreeSet<NodeId>,
    remembered: RememberedPeers,
    waiters: Vec<oneshot::Sender<u64>>,
    tasks: Vec<Task>,
}

/// The most reports of death waiting to be checked.
const MAX_TO_CHECK: usize = 64;
/// The most introductions waiting.
const MAX_TO_MEET: usize = 64;

impl Chord {
    /// A node that is on no ring yet and knows `config.remembered`.
    pub fn new(env: Env, transport: Arc<dyn Transport>, config: ChordConfig) -> Arc<Chord> {
        let me = Node::of(transport.local());
        // A start at random, so that a restarted node does not repeat epochs that its
        // neighbours have seen.
        let state = ChordState::new(me, config.successors, env.random_u64() >> 16);
        Chord::with_state(env, transport, config, state)
    }

    /// A node with a given state, to start large rings without joining one by one (see
    /// [`ChordState::perfect`]). Call [`Chord::start`] if the state is on a ring.
    pub fn with_state(
        env: Env,
        transport: Arc<dyn Transport>,
        config: ChordConfig,
        state: ChordState,
    ) -> Arc<Chord> {
        let mut remembered = RememberedPeers::new(transport.local());
        for peer in &config.remembered {
            remembered.add(*peer, &*env);
        }
        Arc::new_cyclic(|this| Chord {
            this: this.clone(),
            inner: Mutex::new(Inner {
                state,
                seen: None,
                predecessor_heard: env.now(),
                to_check: BTreeMap::new(),
                to_meet: VecDeque::new(),
                nudging: BTreeSet::new(),
                remembered,
                waiters: Vec::new(),
                tasks: Vec::new(),
            }),
            env,
            transport,
            config,
            stabilize_bell: Arc::default(),
            finger_bell: Arc::default(),
            meet_bell: Arc::default(),
            peer_book: PeerBook::default(),
        })
    }

    /// This node.
    pub fn me(&self) -> Node {
        self.lock().state.me()
    }

    /// The neighbourhood's epoch, without copying the neighbourhood.
    pub fn state_epoch(&self) -> u64 {
        self.lock().state.epoch()
    }

    /// A copy of the tables, for checkers and for people.
    pub fn state(&self) -> ChordState {
        self.lock().state.clone()
    }

    /// Peers to keep for the next start: those in the tables and some met before.
    pub fn known_peers(&self) -> Vec<Peer> {
        let inner = self.lock();
        let mut peers: Vec<Peer> = inner.state.known().iter().map(|n| n.peer).collect();
        peers.extend(inner.remembered.iter());
        peers.sort_unstable();
        peers.dedup();
        peers
    }

    /// The live root of `key` and what was asked on the way to it.
    ///
    /// # Errors
    /// See [`WalkError`].
    pub async fn find_root_traced(&self, key: &Key) -> Result<Found<Vec<Node>>, WalkError> {
        self.walk_to_root(key).await
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("nobody panics while holding the tables")
    }

    fn arc(&self) -> Arc<Chord> {
        self.this.upgrade().expect("a borrowed Chord lives in its Arc")
    }

    /// Changes the state and tells everybody whom the change concerns.
    fn update<R>(&self, change: impl FnOnce(&mut ChordState, Instant) -> R) -> R {
        let now = self.env.now();
        let mut inner = self.lock();
        let epoch = inner.state.epoch();
        let before = inner.state.told();
        inner.state.expire_suspicions(now);
        let result = change(&mut inner.state, now);
        if cfg!(debug_assertions) {
            inner.state.check_invariants();
        }
        if inner.state.epoch() == epoch {
            return result;
        }
        let epoch = inner.state.epoch();
        let waiters = std::mem::take(&mut inner.waiters);
        let predecessor = inner.state.predecessor();
        if predecessor != before.predecessor {
            inner.predecessor_heard = now;
        }
        let head_changed = inner.state.head() != before.successors.first().copied();
        let now_alone = inner.state.joined() && inner.state.head().is_none();
        let list_changed = inner.state.successors() != before.successors;
        let mut nudged = Vec::new();
        if list_changed {
            nudged.extend(predecessor);
        }
        if predecessor != before.predecessor {
            // It has to learn that somebody came between us.
            let living = |p: &Node| !inner.state.is_suspected(&p.id, now);
            nudged.extend(before.predecessor.filter(living));
        }
        nudged.sort_unstable();
        nudged.dedup();
        nudged.retain(|node| inner.nudging.insert(node.id));
        drop(inner);
        for waiter in waiters {
            let _ = waiter.send(epoch);
        }
        for node in nudged {
            self.nudge(node);
        }
        if head_changed {
            self.stabilize_bell.ring();
            if now_alone {
                self.meet_bell.ring();
            }
        }
        result
    }

    /// Takes a node for dead until it is heard of first-hand, or the suspicion runs out.
    fn found_dead(&self, node: &Node) {
        let until = self.env.now() + self.config.suspect_for;
        let had_fingers = self.lock().state.fingers().any(|(_, n)| n.id == node.id);
        self.update(|state, _| state.failed(&node.id, until));
        if had_fingers {
            self.finger_bell.ring();
        }
    }

    /// Has a node that somebody could not reach pinged soon.
    fn check_soon(&self, node: Node) {
        let mut inner = self.lock();
        if inner.to_check.len() < MAX_TO_CHECK {
            inner.to_check.insert(node.id, node);
            drop(inner);
            self.stabilize_bell.ring();
        }
    }

    fn meet_soon(&self, node: Node, hops_left: u8) {
        let mut inner = self.lock();
        let waiting = inner.to_meet.iter().any(|(n, _)| n.id == node.id);
        if !waiting && inner.to_meet.len() < MAX_TO_MEET && node.id != inner.state.me().id {
            inner.to_meet.push_back((node, hops_left));
            drop(inner);
            self.meet_bell.ring();
        }
    }
}

impl Overlay for Chord {
    fn neighbourhoods(&self) -> Vec<Neighbourhood> {
        vec![self.lock().state.neighbourhood()]
    }

    fn epoch(&self) -> u64 {
        self.lock().state.epoch()
    }

    fn peer_book(&self) -> &PeerBook {
        &self.peer_book
    }

    fn route(&self, key: &Key, as_root: bool) -> Route {
        self.lock().state.route(key, as_root)
    }

    fn alert(&self, failed: &Peer) {
        let node = Node::of(*failed);
        self.found_dead(&node);
        // The caller may have been impatient: see for ourselves.
        self.check_soon(node);
    }

    fn warn(&self, at: &Peer, failed: Vec<Peer>) -> BoxFuture<'static, bool> {
        let (chord, at) = (self.arc(), Node::of(*at));
        Box::pin(async move { chord.call_warn(at, &failed).await.is_ok() })
    }

    fn find_root(&self, key: &Key) -> BoxFuture<'static, Result<Vec<Node>, WalkError>> {
        let (chord, key) = (self.arc(), *key);
        Box::pin(async move { Ok(chord.walk_to_root(&key).await?.value) })
    }

    fn changed(&self, epoch: u64) -> BoxFuture<'static, u64> {
        let mut inner = self.lock();
        let now = inner.state.epoch();
        if now != epoch {
            return Box::pin(std::future::ready(now));
        }
        let (sender, receiver) = oneshot::channel();
        inner.waiters.retain(|waiter| !waiter.is_canceled());
        inner.waiters.push(sender);
        Box::pin(async move {
            match receiver.await {
                Ok(epoch) => epoch,
                // The overlay is gone and will not change any more.
                Err(_) => std::future::pending().await,
            }
        })
    }

    fn estimated_nodes(&self) -> f64 {
        self.lock().state.estimated_nodes()
    }
}

impl Drop for Chord {
    fn drop(&mut self) {
        // A panic elsewhere is not made worse here.
        if let Ok(inner) = self.inner.get_mut() {
            inner.tasks.drain(..).for_each(|task| task.abort());
        }
    }
}
