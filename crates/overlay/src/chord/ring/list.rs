//! How long a successor list is, and filling one.
//!
//! CFS §4.2 keeps r entries. A node may hold many of them (CFS §5.3), so a list goes on
//! until it holds enough different ones for all copies of a block. It never outgrows a
//! message.

use atoll_key::PeerId;
use atoll_net::Peer;

use crate::Node;
use crate::wire::MAX_NODES;

/// How long a successor list is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ListLength {
    /// The paper's r: entries, wherever the ring has as many.
    pub entries: usize,
    /// It goes on until it holds so many physical nodes other than its owner, so that all
    /// copies of a block can be placed (CFS §5.1: r ≥ k). Never beyond [`MAX_NODES`].
    pub distinct: usize,
}

/// So many different physical nodes a list holds unless told otherwise: more than the
/// copies of a block (CFS §7.2: six).
pub const DISTINCT_SUCCESSORS: usize = 8;

impl From<usize> for ListLength {
    /// r entries. With one virtual server a node they are r physical nodes.
    fn from(entries: usize) -> ListLength {
        ListLength { entries, distinct: entries.min(DISTINCT_SUCCESSORS) }
    }
}

impl ListLength {
    /// Whether a list of `owner`'s needs no further entry.
    pub fn is_full(&self, owner: &Peer, list: &[Node]) -> bool {
        let mut filling = Filling::new(*owner, *self);
        list.iter().for_each(|node| filling.push(*node));
        filling.is_full()
    }
}

/// The list of `owner` if `following` are the nodes after it, in order, once around.
pub fn wanted_list(
    owner: &Node,
    following: impl Iterator<Item = Node>,
    length: ListLength,
) -> Vec<Node> {
    let mut list = Filling::new(owner.peer, length);
    for node in following {
        if list.is_full() {
            break;
        }
        list.push(node);
    }
    list.list
}

/// A list that is being filled, nearest first.
pub(in crate::chord) struct Filling {
    owner: PeerId,
    length: ListLength,
    pub(in crate::chord) list: Vec<Node>,
    /// Physical nodes in it other than the owner, as far as they are counted.
    others: Vec<PeerId>,
}

impl Filling {
    pub(in crate::chord) fn new(owner: Peer, length: ListLength) -> Filling {
        Filling { owner: owner.id, length, list: Vec::new(), others: Vec::new() }
    }

    pub(in crate::chord) fn push(&mut self, node: Node) {
        let peer = node.peer.id;
        let counts = peer != self.owner && self.others.len() < self.length.distinct;
        if counts && !self.others.contains(&peer) {
            self.others.push(peer);
        }
        self.list.push(node);
    }

    pub(in crate::chord) fn is_full(&self) -> bool {
        let has_enough =
            self.list.len() >= self.length.entries && self.others.len() >= self.length.distinct;
        has_enough || self.list.len() >= MAX_NODES
    }
}
