//! Counting the nodes of a ring exactly, by walking around it.
//!
//! A node's successor list names all nodes of a small ring. The density of the list estimates the
//! number on a larger one, with an error of a quarter and more. Who has to know it exactly asks the
//! root of the key after the last node known for the nodes behind it, and so on around the ring:
//! a lookup for each length of a successor list.
//!
//! Nodes that have died a moment ago may be counted, and those that are joining not.

use std::collections::BTreeSet;

use atoll_key::PeerId;

use crate::walk::WalkError;
use crate::{Neighbourhood, Overlay};

/// How many nodes were met.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Census {
    /// Physical nodes, this one included.
    pub peers: u64,
    /// Whether they are all: the walk went around the ring.
    pub is_whole: bool,
}

/// The nodes that the neighbourhoods of one node name: all, if one of their successor lists goes
/// around the ring.
pub fn known(neighbourhoods: &[Neighbourhood]) -> Census {
    let mut peers = BTreeSet::new();
    let mut is_whole = false;
    for hood in neighbourhoods {
        peers.insert(hood.me.peer.id);
        peers.extend(hood.successors.iter().chain(&hood.predecessor).map(|node| node.peer.id));
        is_whole |= hood.joined
            && match &hood.predecessor {
                Some(before) => hood.successors.iter().any(|node| node.id == before.id),
                None => hood.successors.is_empty(),
            };
    }
    Census { peers: peers.len() as u64, is_whole }
}

/// Walks around the ring, over at most `max_positions` ring positions.
///
/// # Errors
/// If the root of a key is not found.
pub async fn count(overlay: &dyn Overlay, max_positions: usize) -> Result<Census, WalkError> {
    let hood = overlay.neighbourhood();
    let start = hood.me.id.0;
    let mut peers = BTreeSet::from([hood.me.peer.id]);
    let (mut last, mut positions) = (start, 1);
    let mut nodes = hood.successors;
    if nodes.is_empty() && hood.predecessor.is_none() {
        return Ok(Census { peers: 1, is_whole: hood.joined });
    }
    loop {
        for node in &nodes {
            // Beyond this node's own place, or back before the last: around.
            if node.id.0.distance_from(&start) <= last.distance_from(&start) {
                return Ok(census(&peers, true));
            }
            if positions == max_positions {
                return Ok(census(&peers, false));
            }
            (last, positions) = (node.id.0, positions + 1);
            peers.insert(node.peer.id);
        }
        nodes = overlay.find_root(&last.next()).await?;
    }
}

fn census(peers: &BTreeSet<PeerId>, is_whole: bool) -> Census {
    Census { peers: peers.len() as u64, is_whole }
}
