//! Who is responsible for a key.
//!
//! An [`Overlay`] keeps a node's place on the ring and its routing tables, and answers
//! questions about them at once, from memory. [`chord`] implements it (CFS §4). The
//! overlay does not know blocks: `dht` walks the ring with these answers ([`walk`]) and
//! looks for blocks on the way (CFS §6.2, "integrated lookup"). [`checker`] looks at
//! many nodes from outside and says whether they form one good ring.

pub mod checker;
pub mod chord;
pub mod walk;
pub mod wire;

use std::fmt;

use atoll_env::BoxFuture;
use atoll_key::{Key, KeyRange, NodeId};
use atoll_net::Peer;

use crate::walk::WalkError;

/// A place on the ring and the node at it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Node {
    /// The ring position.
    pub id: NodeId,
    /// The node's address card.
    pub peer: Peer,
}

impl Node {
    /// The node's virtual server 0: its only one for now.
    pub fn of(peer: Peer) -> Node {
        Node { id: peer.id.position(0), peer }
    }
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.id, self.peer.addr)
    }
}

/// Where to ask next for a key.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Route {
    /// The key's root followed by the root's successors, as far as known here: its
    /// replica set is the first k of them. The first may be this node itself.
    Root(Vec<Node>),
    /// Nodes strictly between this one and the key, the nearest to the key first
    /// (CFS Figure 3, `preceding_node_list`), at most [`MAX_CLOSER`]. Never empty.
    Closer(Vec<Node>),
    /// Answer to somebody who took this node for the root: it is not; ask its predecessor.
    Back(Node),
    /// This node is not on the ring yet, or has just lost all its successors.
    Nowhere,
}

/// The most nodes in a [`Route::Closer`].
pub const MAX_CLOSER: usize = 8;

/// A node's surroundings.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Neighbourhood {
    /// Changes whenever any other field does; never repeats while the node runs.
    pub epoch: u64,
    /// This node.
    pub me: Node,
    /// The node before it, if one is known and alive. `None` also on a ring of one.
    pub predecessor: Option<Node>,
    /// The nodes after it, nearest first, without itself; empty on a ring of one.
    pub successors: Vec<Node>,
    /// Whether this node has finished joining (a ring of one is joined).
    pub joined: bool,
}

impl Neighbourhood {
    /// The keys this node is the root of, `(predecessor, me]`: the whole circle on a ring
    /// of one, `None` while the predecessor is unknown on a larger one.
    pub fn range(&self) -> Option<KeyRange> {
        match (self.predecessor, self.successors.is_empty()) {
            (Some(before), _) => Some(KeyRange::new(before.id.0, self.me.id.0)),
            (None, true) if self.joined => Some(KeyRange::new(self.me.id.0, self.me.id.0)),
            (None, _) => None,
        }
    }
}

/// A node's place on the ring and its routing tables. The methods that
/// return no future answer at once, from memory.
pub trait Overlay: Send + Sync + 'static {
    /// This node's surroundings.
    fn neighbourhood(&self) -> Neighbourhood;

    /// Where to ask next for `key`. With `as_root` the asker took this node for the
    /// key's root: if it is not, the answer is `Back`, never a trip around the ring.
    fn route(&self, key: &Key, as_root: bool) -> Route;

    /// A call to `failed` brought no answer (CFS Figure 5, `alert`): route around it.
    fn alert(&self, failed: &Peer);

    /// Tells `at` that `failed` did not answer, as CFS Figure 5 alerts the previous hop.
    /// It checks for itself before it believes. Resolves when it has, with whether it can
    /// be asked again; an overlay that cannot do so says no.
    fn warn(&self, at: &Peer, failed: Vec<Peer>) -> BoxFuture<'static, bool> {
        let _ = (at, failed);
        Box::pin(async { false })
    }

    /// The live root of `key`, found by asking around, followed by its successors as far
    /// as they are known: never empty. The first may be this node itself.
    fn find_root(&self, key: &Key) -> BoxFuture<'static, Result<Vec<Node>, WalkError>>;

    /// Resolves with the new epoch once the neighbourhood's differs from `epoch`.
    fn changed(&self, epoch: u64) -> BoxFuture<'static, u64>;

    /// The estimated number of nodes on the ring, from the density of the successor
    /// list (CFS §6.1: r / f).
    fn estimated_nodes(&self) -> f64;
}
