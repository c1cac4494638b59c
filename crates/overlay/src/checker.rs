//! Looks at many nodes from outside and says whether they form one good ring.
//!
//! The invariants are those of P. Zave, "Reasoning about identifier spaces: how to make
//! Chord correct" (2017): at least one ring, at most one ring, an ordered ring, connected
//! appendages ([`check_ring`]), ordered successor lists without duplicates, and a base
//! that no list skips ([`check_base`]). While they hold, stabilisation repairs everything
//! else; [`check_ideal`] says whether it has finished.
//!
//! Departures: Zave keeps r + 1 members for ever and pads lists to length r. Here a list
//! shorter than r whose nodes are all dead belongs to a node that is alone: its own
//! successor. The base condition is meant for rings that do keep such members.
//!
//! Arguments are the neighbourhoods of all virtual servers of all *live* nodes. Those that have not
//! joined are left out. It makes no call and knows no clock; tests and the simulator call it after
//! every step.

use std::collections::{BTreeMap, BTreeSet};

use atoll_key::NodeId;

use crate::chord::ring::list::{ListLength, wanted_list};
use crate::{Neighbourhood, Node};

/// The numbers of live members on the ring and beside it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    /// Members on the ring.
    pub on_ring: usize,
    /// Members that point to the ring but are not on it yet.
    pub appendages: usize,
}

/// Why nodes do not form one good ring.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{text}")]
pub struct Violation {
    /// Which condition is violated.
    pub broken: Condition,
    /// Where and how, for people.
    pub text: String,
}

/// The conditions that a ring has to meet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Condition {
    /// A successor list goes clockwise, repeats no node and does not hold its owner.
    OrderedList,
    /// A member has a live successor.
    LiveSuccessor,
    /// There is one ring.
    OneRing,
    /// The ring goes around the circle once.
    OrderedRing,
    /// No list skips a member of the base.
    BaseNotSkipped,
    /// At rest, every table is exactly right.
    Ideal,
}

fn violated<T>(broken: Condition, text: String) -> Result<T, Violation> {
    Err(Violation { broken, text })
}

/// Zave's invariants but the base, for live positions with lists of `length`.
///
/// # Errors
/// The first violation found.
pub fn check_ring(
    live: &[Neighbourhood],
    length: impl Into<ListLength>,
) -> Result<Shape, Violation> {
    let length = length.into();
    let members: BTreeMap<NodeId, &Neighbourhood> =
        live.iter().filter(|n| n.joined).map(|n| (n.me.id, n)).collect();
    let mut next: BTreeMap<NodeId, NodeId> = BTreeMap::new();
    for member in members.values() {
        check_order(member)?;
        let best = member.successors.iter().find(|s| members.contains_key(&s.id));
        let best = match best {
            Some(best) => best.id,
            None if member.successors.len() < length.entries => member.me.id,
            None => {
                let text =
                    format!("{:?}: all successors are dead: {:?}", member.me, member.successors);
                return violated(Condition::LiveSuccessor, text);
            }
        };
        next.insert(member.me.id, best);
    }
    let Some(start) = members.keys().next() else {
        return Ok(Shape { on_ring: 0, appendages: 0 });
    };
    let ring = ring_reached_from(*start, &next);
    // Every member has a best successor, so each is on a ring or leads to one.
    let mut settled: BTreeSet<NodeId> = ring.iter().copied().collect();
    for id in members.keys() {
        let mut path = BTreeSet::new();
        let mut at = *id;
        while !settled.contains(&at) {
            if !path.insert(at) {
                let (one, other) = (members[&ring[0]].me, members[&at].me);
                let text = format!("two rings: one holds {one:?}, another {other:?}");
                return violated(Condition::OneRing, text);
            }
            at = next[&at];
        }
        settled.append(&mut path);
    }
    let turns = (0..ring.len()).filter(|i| ring[(i + 1) % ring.len()] <= ring[*i]).count();
    if turns != 1 {
        let ring: Vec<Node> = ring.iter().map(|id| members[id].me).collect();
        return violated(Condition::OrderedRing, format!("a ring of {turns} turns: {ring:?}"));
    }
    Ok(Shape { on_ring: ring.len(), appendages: members.len() - ring.len() })
}

fn check_order(member: &Neighbourhood) -> Result<(), Violation> {
    let me = member.me.id.key();
    let mut farthest = me.distance_from(me);
    for node in &member.successors {
        let distance = node.id.key().distance_from(me);
        if distance <= farthest {
            let (owner, list) = (member.me, &member.successors);
            let text = format!("{owner:?}: {node:?} is out of order in the list {list:?}");
            return violated(Condition::OrderedList, text);
        }
        farthest = distance;
    }
    Ok(())
}

/// The cycle that following best successors ends in, beginning with its smallest ID.
fn ring_reached_from(start: NodeId, next: &BTreeMap<NodeId, NodeId>) -> Vec<NodeId> {
    let mut at = start;
    for _ in 0..next.len() {
        at = next[&at];
    }
    // After as many steps as there are members we are on the cycle.
    let mut ring = vec![at];
    let mut walker = next[&at];
    while walker != at {
        ring.push(walker);
        walker = next[&walker];
    }
    let smallest = (0..ring.len()).min_by_key(|i| ring[*i]).expect("a ring has a member");
    ring.rotate_left(smallest);
    ring
}

/// Zave's *base not skipped*: no two neighbours in `[me] + list` have a member of `base`
/// strictly between them. Holds on rings that keep all of `base`, at least r + 1 nodes.
///
/// # Errors
/// The first list that skips one.
pub fn check_base(live: &[Neighbourhood], base: &[NodeId]) -> Result<(), Violation> {
    for member in live.iter().filter(|n| n.joined) {
        let mut from = member.me;
        for to in &member.successors {
            let between = |id: &&NodeId| id.key().strictly_between(from.id.key(), to.id.key());
            if let Some(skipped) = base.iter().find(between) {
                let owner = member.me;
                let text = format!(
                    "{owner:?}: the list goes from {from:?} to {to:?} and skips {skipped:?} of the base"
                );
                return violated(Condition::BaseNotSkipped, text);
            }
            from = *to;
        }
    }
    Ok(())
}

/// Whether every predecessor and every successor list is exactly right: the state that
/// stabilisation reaches when membership stands still.
///
/// # Errors
/// The first difference.
pub fn check_ideal(live: &[Neighbourhood], length: impl Into<ListLength>) -> Result<(), Violation> {
    let length = length.into();
    let mut members: Vec<&Neighbourhood> = live.iter().filter(|n| n.joined).collect();
    members.sort_unstable_by_key(|n| n.me.id);
    let count = members.len();
    for (at, member) in members.iter().enumerate() {
        let nth = |n: usize| members[(at + n) % count].me;
        let wanted = wanted_list(&member.me, (1..count).map(nth), length);
        let (me, is) = (member.me, &member.successors);
        if *is != wanted {
            let text = format!("{me:?}: the successors should be {wanted:?} and are {is:?}");
            return violated(Condition::Ideal, text);
        }
        let (wanted, is) = ((count > 1).then(|| nth(count - 1)), member.predecessor);
        if is != wanted {
            let text = format!("{me:?}: the predecessor should be {wanted:?} and is {is:?}");
            return violated(Condition::Ideal, text);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddr};

    use atoll_key::{Key, PeerId};
    use atoll_net::Peer;

    use super::*;

    /// A node at a position of our choice; only the checker can be given one.
    fn at(position: u8) -> Node {
        let mut key = Key::MIN;
        key.0[0] = position;
        let addr = SocketAddr::from((Ipv4Addr::LOCALHOST, 1));
        Node {
            id: NodeId(key),
            peer: Peer { id: PeerId([position; 32]), addr },
            virtual_server: crate::VirtualServerId::default(),
        }
    }

    fn member(me: u8, before: Option<u8>, successors: &[u8]) -> Neighbourhood {
        Neighbourhood {
            epoch: 0,
            me: at(me),
            predecessor: before.map(at),
            successors: successors.iter().map(|p| at(*p)).collect(),
            joined: true,
        }
    }

    fn broken<T: std::fmt::Debug>(verdict: Result<T, Violation>) -> Condition {
        verdict.unwrap_err().broken
    }

    #[test]
    fn a_good_ring_is_ideal() {
        let ring = [
            member(10, Some(30), &[20, 30]),
            member(20, Some(10), &[30, 10]),
            member(30, Some(20), &[10, 20]),
        ];
        assert_eq!(check_ring(&ring, 2), Ok(Shape { on_ring: 3, appendages: 0 }));
        assert_eq!(check_ideal(&ring, 2), Ok(()));
    }

    #[test]
    fn a_newcomer_on_no_list_is_an_appendage() {
        let ring =
            [member(10, Some(30), &[30]), member(20, Some(10), &[30]), member(30, None, &[10])];
        assert_eq!(check_ring(&ring, 2), Ok(Shape { on_ring: 2, appendages: 1 }));
        assert_eq!(broken(check_ideal(&ring, 2)), Condition::Ideal);
    }

    #[test]
    fn dead_successors_are_passed_over_until_none_is_left() {
        let mut ring = vec![member(10, None, &[15, 30]), member(30, None, &[10, 15])];
        assert!(check_ring(&ring, 2).is_ok());
        ring[1] = member(30, None, &[15, 20]);
        assert_eq!(broken(check_ring(&ring, 2)), Condition::LiveSuccessor);
    }

    #[test]
    fn two_rings_are_found() {
        let rings = [
            member(10, None, &[30]),
            member(30, None, &[10]),
            member(20, None, &[40]),
            member(40, None, &[20]),
        ];
        assert_eq!(broken(check_ring(&rings, 2)), Condition::OneRing);
    }

    #[test]
    fn a_ring_that_goes_around_twice_is_found() {
        // 10 → 30 → 20 → 40 → 10: each list is in order, the ring is not.
        let ring = [
            member(10, None, &[30]),
            member(30, None, &[20]),
            member(20, None, &[40]),
            member(40, None, &[10]),
        ];
        assert_eq!(broken(check_ring(&ring, 1)), Condition::OrderedRing);
    }

    #[test]
    fn lists_out_of_order_are_found() {
        for list in [&[30, 20][..], &[20, 20], &[20, 10]] {
            let ring = [member(10, None, list), member(20, None, &[10]), member(30, None, &[10])];
            assert_eq!(broken(check_ring(&ring, 2)), Condition::OrderedList, "{list:?}");
        }
    }

    #[test]
    fn a_skipped_base_member_is_found() {
        let ring = [member(10, None, &[30]), member(20, None, &[30]), member(30, None, &[10])];
        assert_eq!(check_base(&ring, &[at(10).id, at(30).id]), Ok(()));
        assert_eq!(broken(check_base(&ring, &[at(20).id])), Condition::BaseNotSkipped);
    }
}
