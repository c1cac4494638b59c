//! The overlay: which node is responsible for a key, and how to reach it.
//!
//! An [`Overlay`] keeps a node's position on the ring and its routing tables, and answers
//! questions about them at once, from memory. It names all geometry that the crates above may
//! know: next hops, replica sets, the ranges that this node serves, and changes of these.
//! [`chord`] implements it (CFS §4); [`static_ring`] does so for tests.
//!
//! The overlay does not know blocks: `dht` walks the ring with these answers ([`walk`]) and looks
//! for blocks on the way (CFS §6.2, "integrated lookup"). [`checker`] looks at many nodes from
//! outside and says whether they form one correct ring.

pub mod census;
pub mod checker;
pub mod chord;
pub mod clock;
mod geometry;
mod mechanisms;
pub mod peer_book;
mod site;
pub mod static_ring;
pub mod walk;
pub mod wire;

use std::fmt;
use std::time::Duration;

use atoll_env::{BoxFuture, Instant};
use atoll_key::{IdProfile, Key, NodeId};
use atoll_net::Peer;

use crate::clock::ClockReport;
use crate::geometry::group_keys;
pub use crate::geometry::{ServedRange, ServedRanges, distinct_peers};
pub use crate::mechanisms::Mechanisms;
use crate::peer_book::PeerBook;
use crate::walk::WalkError;

/// The most virtual servers of one node: CFS Figure 12 runs 128. A larger virtual index
/// is refused, so that no node can try indices until one falls beside a victim (CFS §4.4).
pub const MAX_VIRTUAL_SERVERS: u16 = 128;

/// Which of a node's virtual servers: with the node's key and address it determines the ring
/// position (CFS §4.1, §5.3).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct VirtualServerId {
    /// The profile, which names the hashed values.
    pub profile: IdProfile,
    /// The virtual index, below [`MAX_VIRTUAL_SERVERS`].
    pub index: u16,
}

/// One virtual server of a node (CFS §5.3) and its ring position. The position is always
/// computed from the peer's key or address and the virtual index, never taken from a message.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Node {
    /// The ring position.
    pub id: NodeId,
    /// The node's key and address.
    pub peer: Peer,
    /// Which of that node's virtual servers.
    pub virtual_server: VirtualServerId,
}

impl Node {
    /// The node's virtual server 0, where IDs are hashes of public keys.
    pub fn of(peer: Peer) -> Node {
        Node::at(peer, VirtualServerId::default())
    }

    /// The virtual server of `peer` with this identifier.
    pub fn at(peer: Peer, virtual_server: VirtualServerId) -> Node {
        let VirtualServerId { profile, index } = virtual_server;
        let id = profile.position(&peer.id, peer.addr.ip(), u32::from(index));
        Node { id, peer, virtual_server }
    }
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.id, self.peer.addr)
    }
}

/// For people: a node by its ID and address, without its positions on the ring.
impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.peer.fmt(f)
    }
}

/// Where to ask next for a key.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Route {
    /// The key's root followed by the root's successors, as far as known here: its
    /// replica set is the first k of them. The first may be this node itself.
    Root(Vec<Node>),
    /// Nodes strictly between this one and the key, the nearest to the key first
    /// (CFS Figure 3, `preceding_node_list`), at most [`MAX_CLOSER`] and never none. Then at
    /// most [`MAX_GUESSES`] at or after the key, the nearest first, one of which is probably
    /// its root: it can be asked at once, but is unverified.
    Closer(Vec<Node>),
    /// This node was asked as the root and is not; the lookup goes on at its predecessor.
    NotRoot(Node),
    /// This node is not on the ring yet, or has just lost all its successors.
    Nowhere,
}

impl Route {
    /// A [`Route::Closer`] of these nodes.
    pub fn closer(nodes: impl IntoIterator<Item = Node>) -> Route {
        Route::Closer(nodes.into_iter().collect())
    }

    /// All the nodes named, in order.
    pub fn nodes(&self) -> Vec<Node> {
        match self {
            Route::Root(nodes) | Route::Closer(nodes) => nodes.clone(),
            Route::NotRoot(node) => vec![*node],
            Route::Nowhere => Vec::new(),
        }
    }
}

/// The most nodes before the key in a [`Route::Closer`].
pub const MAX_CLOSER: usize = 8;
/// The most guesses at the root in a [`Route::Closer`].
pub const MAX_GUESSES: usize = 2;

/// The surroundings of one virtual server of a node.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Neighbourhood {
    /// Changes whenever any other field does; never repeats while the node runs.
    pub epoch: u64,
    /// The virtual server.
    pub me: Node,
    /// The node before it, if one is known and alive. `None` also on a ring of one.
    pub predecessor: Option<Node>,
    /// The nodes after it, nearest first, without itself; empty on a ring of one.
    pub successors: Vec<Node>,
    /// Whether this node has finished joining (a ring of one is joined).
    pub joined: bool,
}

/// Is told of a root of a key and its successors.
pub type Named = Box<dyn Fn(&[Node]) + Send + Sync>;

/// A node's place on the ring and its routing tables: everything about geometry that the crates
/// above may know. The methods that return no future answer at once, from memory.
///
/// An implementation tells this node's surroundings, the answers of its tables, and how to find
/// a root; the provided methods compute replica sets and ranges from that.
pub trait Overlay: Send + Sync + 'static {
    /// The surroundings of each of this node's virtual servers, by virtual index; never
    /// empty.
    fn neighbourhoods(&self) -> Vec<Neighbourhood>;

    /// The surroundings of this node's first virtual server.
    fn neighbourhood(&self) -> Neighbourhood {
        self.neighbourhoods().swap_remove(0)
    }

    /// Changes whenever any of the neighbourhoods does; never repeats while the node runs.
    fn epoch(&self) -> u64;

    /// Resolves with the new [`Overlay::epoch`] once it differs from `epoch`.
    fn changed(&self, epoch: u64) -> BoxFuture<'static, u64>;

    // --- this node's part of the ring -------------------------------------------------

    /// This node's virtual servers, by virtual index.
    fn positions(&self) -> Vec<Node> {
        self.neighbourhoods().into_iter().map(|hood| hood.me).collect()
    }

    /// Whether no other physical node surrounds this one.
    fn is_alone(&self) -> bool {
        let is_other = |node: &Node, me: &Node| node.peer.id != me.peer.id;
        !self
            .neighbourhoods()
            .iter()
            .any(|hood| hood.neighbours(usize::MAX).iter().any(|node| is_other(node, &hood.me)))
    }

    /// The ranges that this node is the root of, and the other nodes that hold copies of them,
    /// with so many copies of a block.
    fn served_ranges(&self, copies: usize) -> ServedRanges {
        ServedRanges::new(&self.neighbourhoods(), copies)
    }

    /// The replica sets whose root is a virtual server of this node, each with that one first.
    fn own_replica_sets(&self, copies: usize) -> Vec<Vec<Node>> {
        self.neighbourhoods().iter().map(|hood| hood.replica_set(copies)).collect()
    }

    /// The replica set whose root is this virtual server of this node; `None` if it does not run.
    fn own_replica_set(&self, root: &Node, copies: usize) -> Option<Vec<Node>> {
        let hood = self.neighbourhoods().into_iter().find(|hood| hood.me.id == root.id)?;
        Some(hood.replica_set(copies))
    }

    /// The nodes that follow one of this node's virtual servers, nearest first. Empty if it does
    /// not run.
    fn successors_of(&self, own: &Node) -> Vec<Node> {
        let hood = self.neighbourhoods().into_iter().find(|hood| hood.me.id == own.id);
        hood.map_or_else(Vec::new, |hood| hood.successors)
    }

    /// The nodes around one of this node's virtual servers: its predecessor and its first
    /// successors, at most so many of them. Empty if it does not run.
    fn neighbours_of(&self, own: &Node, successors: usize) -> Vec<Node> {
        let hood = self.neighbourhoods().into_iter().find(|hood| hood.me.id == own.id);
        hood.map_or_else(Vec::new, |hood| hood.neighbours(successors))
    }

    /// How long ago a neighbour last confirmed the place of this virtual server of this node: its predecessor called it as its
    /// successor, or, while it knew no predecessor, its successor named it as its predecessor. Zero without other nodes
    /// around it; [`Duration::MAX`] if none has since it is there. If it is long ago, another node may have its place, as
    /// where two neighbours cannot reach each other.
    fn unconfirmed_for(&self, _own: &Node) -> Duration {
        Duration::ZERO
    }

    /// Those of `keys` whose root is a virtual server of this node, as their numbers, by that
    /// virtual server.
    fn group_by_own_root(&self, keys: &[Key]) -> Vec<(Node, Vec<usize>)> {
        let hoods = self.neighbourhoods();
        let is_sure = hoods.iter().all(|hood| hood.range().is_some());
        group_keys(keys, |key| {
            let serves = |hood: &&Neighbourhood| hood.range().is_some_and(|r| r.contains(key));
            if let Some(hood) = hoods.iter().find(serves) {
                return Some(hood.me);
            }
            if is_sure {
                return None;
            }
            // One that does not know its predecessor may be the root.
            let Route::Root(nodes) = self.route(key, true) else { return None };
            nodes.first().filter(|root| hoods.iter().any(|hood| hood.me == **root)).copied()
        })
    }

    // --- any key ----------------------------------------------------------------------

    /// Where to ask next for `key`. With `as_root` the asker took this node for the
    /// key's root: if it is not, the answer is `NotRoot`, never a trip around the ring.
    fn route(&self, key: &Key, as_root: bool) -> Route;

    /// The root of `key` and the nodes after it, if this node's tables hold them.
    fn known_successors(&self, key: &Key) -> Option<Vec<Node>> {
        match self.route(key, false) {
            Route::Root(nodes) => Some(nodes),
            _ => None,
        }
    }

    /// The replica set of `key`, its root first, if this node's tables hold it.
    fn known_replica_set(&self, key: &Key, copies: usize) -> Option<Vec<Node>> {
        self.known_successors(key).map(|nodes| distinct_peers(&nodes, copies))
    }

    /// The live root of `key`, found by a lookup, followed by its successors as far
    /// as they are known: never empty. The first may be this node itself.
    fn find_root(&self, key: &Key) -> BoxFuture<'static, Result<Vec<Node>, WalkError>>;

    /// The same; `named` is told of each root, with its successors, that a node on the way names before that
    /// root has been asked. They are unverified.
    fn find_root_telling(
        &self,
        key: &Key,
        named: Named,
    ) -> BoxFuture<'static, Result<Vec<Node>, WalkError>> {
        drop(named);
        self.find_root(key)
    }

    /// The root of `key` and the nodes after it, from this node's tables if they hold them, else
    /// by a lookup.
    fn find_successors(&self, key: &Key) -> BoxFuture<'static, Result<Vec<Node>, WalkError>> {
        match self.known_successors(key) {
            Some(nodes) => Box::pin(async { Ok(nodes) }),
            None => self.find_root(key),
        }
    }

    /// The replica set of `key`, its root first, from this node's tables if they hold it, else
    /// by a lookup.
    fn find_replica_set(
        &self,
        key: &Key,
        copies: usize,
    ) -> BoxFuture<'static, Result<Vec<Node>, WalkError>> {
        let found = self.find_successors(key);
        Box::pin(async move { Ok(distinct_peers(&found.await?, copies)) })
    }

    /// Nodes one of which is probably the root of `key`, likeliest first, so that it can be
    /// asked at once; none if the tables do not tell. They are unverified.
    fn likely_roots(&self, key: &Key) -> Vec<Node> {
        let _ = key;
        Vec::new()
    }

    /// All nodes in this node's tables, in no particular order: where routes can begin.
    fn known_nodes(&self) -> Vec<Node> {
        let hoods = self.neighbourhoods();
        hoods.into_iter().flat_map(|hood| hood.neighbours(usize::MAX)).collect()
    }

    // --- the ring as a whole ----------------------------------------------------------

    /// The estimated number of ring positions, from the density of the successor lists
    /// (CFS §6.1: r / f). As many as nodes where each node is one virtual server.
    fn estimated_nodes(&self) -> f64;

    /// The estimated number of physical nodes, for shares of the whole network (CFS §5.4).
    fn estimated_peers(&self) -> f64 {
        self.estimated_nodes()
    }

    /// How this node's wall clock stands among those of others.
    fn clock(&self) -> ClockReport {
        ClockReport::default()
    }

    /// The difference of the network's time from this node's wall clock, milliseconds;
    /// see [`clock`].
    fn clock_correction_ms(&self) -> i64 {
        0
    }

    // --- observations of other nodes -------------------------------------------------

    /// This node's own measurements of other nodes: how fast they answer, and which lied.
    fn peer_book(&self) -> &PeerBook;

    /// Records that `node` answered a question of a lookup, whatever it said: it lives.
    fn record_answer(&self, node: &Node) {
        let _ = node;
    }

    /// Pings `peer`, a call to which takes long, if it is a known node, and forgets it if it is
    /// dead.
    fn probe(&self, peer: &Peer) {
        let _ = peer;
    }

    /// A call to `peer`, made at `start`, brought no answer. If the peer has answered another
    /// call since, it is slow, or the path to it is; if not, it is reported as failed.
    fn record_no_answer(&self, peer: &Peer, start: Instant) {
        if !self.peer_book().has_answered_since(&peer.id, start) {
            self.report_failure(peer);
        }
    }

    /// Tells this node's tables that a call to `failed` brought no answer: route around it.
    fn report_failure(&self, failed: &Peer);

    /// Tells the node `at` that nodes it named did not answer (CFS Figure 5, `alert`). It checks
    /// before it believes. Resolves when it has, with whether it can be asked again; an overlay
    /// that cannot do so says no.
    fn send_failure_report(&self, at: &Peer, failed: Vec<Peer>) -> BoxFuture<'static, bool> {
        let _ = (at, failed);
        Box::pin(async { false })
    }
}
