//! Sentences of the papers, one test each: CFS (Dabek et al., SOSP 2001) by section, and the
//! operations of P. Zave, "Reasoning about identifier spaces: how to make Chord correct" (2017),
//! by name. Where Atoll departs from a sentence, the test says how.

mod lookup;
mod operations;
mod placement;

use std::net::{Ipv4Addr, SocketAddr};

use atoll_key::PeerId;
use atoll_net::Peer;
use atoll_overlay::Node;
use atoll_overlay::chord::ring::state::{ChordState, Told};
use atoll_overlay::chord::trust::admission::Verdict;

/// `count` nodes in the order of their IDs.
pub(crate) fn ring(count: u8) -> Vec<Node> {
    let addr = SocketAddr::from((Ipv4Addr::LOCALHOST, 1));
    let mut nodes: Vec<Node> =
        (0..count).map(|n| Node::of(Peer { id: PeerId([n; 32]), addr })).collect();
    nodes.sort_unstable_by_key(|n| n.id);
    nodes
}

pub(crate) fn member(ring: &[Node], at: usize, r: usize) -> ChordState {
    ChordState::perfect(ring[at], ring, r)
}

pub(crate) fn told(predecessor: Option<Node>, successors: &[Node]) -> Told {
    Told { predecessor, successors: successors.to_vec() }
}

/// No node is suspected.
pub(crate) fn all(_: &Node) -> Verdict {
    Verdict::Welcome
}

/// Only `dead` is.
pub(crate) fn all_but(dead: Node) -> impl Fn(&Node) -> Verdict {
    move |node| if *node == dead { Verdict::Suspected } else { Verdict::Welcome }
}

pub(crate) fn fails(state: &mut ChordState, dead: &Node) {
    state.forget(&|node| node == dead);
}
