//! Replica sets and ranges, from a node's surroundings: which nodes hold copies of a key, and for
//! which ranges of keys a node answers.
//!
//! A key belongs to its successor, the *root*; the copies are on the root and on the nodes after
//! it, one virtual server of each physical node (CFS §5.1, §5.3). Everything here is pure: it is
//! the computations behind the provided methods of [`Overlay`](crate::Overlay).

use atoll_key::{Key, KeyRange};

use crate::{Neighbourhood, Node};

/// The first `count` of `nodes` that are different physical nodes. The copies of a block
/// never share one, however many virtual servers it runs (CFS §5.1, §5.3).
pub fn distinct_peers(nodes: &[Node], count: usize) -> Vec<Node> {
    let mut distinct: Vec<Node> = Vec::new();
    for node in nodes {
        if distinct.len() == count {
            break;
        }
        if !distinct.iter().any(|taken| taken.peer.id == node.peer.id) {
            distinct.push(*node);
        }
    }
    distinct
}

/// A range of keys that a node is the root of, and the other nodes that should hold copies.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ServedRange {
    /// The keys.
    pub range: KeyRange,
    /// The rest of their replica set, nearest first, without the node itself.
    pub replicas: Vec<Node>,
}

/// All ranges that a node is the root of, by all its virtual servers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ServedRanges {
    /// In ring order. Adjacent ranges with the same replicas are one: a node has one store.
    pub ranges: Vec<ServedRange>,
    /// Whether all virtual servers have joined and know their ranges.
    pub complete: bool,
}

impl ServedRanges {
    /// The ranges of a node with these virtual servers, with so many copies of a block.
    pub fn new(neighbourhoods: &[Neighbourhood], copies: usize) -> ServedRanges {
        let mut ranges: Vec<ServedRange> = Vec::new();
        for hood in neighbourhoods.iter().filter(|hood| hood.joined) {
            let Some(range) = hood.range() else { continue };
            ranges.push(ServedRange { range, replicas: hood.replica_set(copies).split_off(1) });
        }
        let complete = ranges.len() == neighbourhoods.len();
        ranges.sort_by_key(|served| served.range.upto);
        let mut merged: Vec<ServedRange> = Vec::with_capacity(ranges.len());
        for served in ranges {
            match merged.last_mut() {
                Some(last) if last.continues_in(&served) => last.range.upto = served.range.upto,
                _ => merged.push(served),
            }
        }
        // Around the end of the circle.
        if merged.len() > 1 && merged[merged.len() - 1].continues_in(&merged[0]) {
            let last = merged.pop().expect("there are two");
            merged[0].range.after = last.range.after;
        }
        ServedRanges { ranges: merged, complete }
    }
}

impl ServedRange {
    fn continues_in(&self, next: &ServedRange) -> bool {
        self.range.upto == next.range.after && self.replicas == next.replicas
    }
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

    /// The nodes that should hold the keys of this range: this virtual server and those after it
    /// on other physical nodes, at most `copies`.
    pub fn replica_set(&self, copies: usize) -> Vec<Node> {
        let mut nodes = vec![self.me];
        nodes.extend(&self.successors);
        distinct_peers(&nodes, copies)
    }

    /// The predecessor and the first successors, at most `successors` of them.
    pub fn neighbours(&self, successors: usize) -> Vec<Node> {
        let after = self.successors.iter().take(successors).copied();
        self.predecessor.into_iter().chain(after).collect()
    }
}

/// Groups the numbers of `keys` by the group that `group_of` names for each; leaves out those for
/// which it names nothing.
pub(crate) fn group_keys(
    keys: &[Key],
    group_of: impl Fn(&Key) -> Option<Node>,
) -> Vec<(Node, Vec<usize>)> {
    let mut groups: Vec<(Node, Vec<usize>)> = Vec::new();
    for (index, key) in keys.iter().enumerate() {
        let Some(node) = group_of(key) else { continue };
        match groups.iter_mut().find(|(of, _)| *of == node) {
            Some((_, indices)) => indices.push(index),
            None => groups.push((node, vec![index])),
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use atoll_key::{NodeId, PeerId};
    use atoll_net::Peer;

    use super::*;

    fn node(peer: u8, at: u8) -> Node {
        let addr = "127.0.0.1:1".parse().expect("an address");
        let mut node = Node::of(Peer { id: PeerId([peer; 32]), addr });
        node.id = NodeId(key(at));
        node
    }

    fn key(at: u8) -> Key {
        Key::hashed([at; 32])
    }

    /// The surroundings of `me` on a ring of these nodes in ring order.
    fn around(ring: &[Node], me: usize) -> Neighbourhood {
        let (before, from) = ring.split_at(me);
        let successors: Vec<Node> = from[1..].iter().chain(before).copied().collect();
        let predecessor = successors.last().copied();
        Neighbourhood { epoch: 1, me: ring[me], predecessor, successors, joined: true }
    }

    #[test]
    fn replicas_are_other_machines_and_adjacent_virtual_servers_share_a_range() {
        // Peers:         1   1   2   1   3   2
        let ring: Vec<Node> = [(1, 10), (1, 20), (2, 30), (1, 40), (3, 50), (2, 60)]
            .map(|(p, at)| node(p, at))
            .into();
        let own = [around(&ring, 0), around(&ring, 1), around(&ring, 3)];
        let served = ServedRanges::new(&own, 3);
        let range = |after, upto, replicas: [usize; 2]| ServedRange {
            range: KeyRange::new(key(after), key(upto)),
            replicas: replicas.map(|i| ring[i]).into(),
        };
        let ranges = vec![range(60, 20, [2, 4]), range(30, 40, [4, 5])];
        assert_eq!(served, ServedRanges { ranges, complete: true });
        let unsure = Neighbourhood { predecessor: None, ..around(&ring, 3) };
        let served = ServedRanges::new(&[own[0].clone(), unsure], 3);
        assert_eq!((served.ranges.len(), served.complete), (1, false));
    }

    #[test]
    fn a_node_that_is_the_whole_ring_serves_one_range() {
        let ring: Vec<Node> = [10, 20, 30].map(|at| node(1, at)).into();
        let own: Vec<Neighbourhood> = (0..3).map(|me| around(&ring, me)).collect();
        let served = ServedRanges::new(&own, 3);
        assert_eq!(served.ranges.len(), 1);
        assert!(served.ranges[0].range.is_full() && served.ranges[0].replicas.is_empty());
    }
}
