//! Since when nodes belong to the replica sets whose root this node is, for lock leases.
//!
//! A majority of today's replica set need not have a node in common with a majority of yesterday's.
//! So the root says which members have belonged to the set for [`SETTLE`], itself included, and only
//! their grants count: what others granted before has ended by then.
//!
//! The root of a key is the one node that sees each change of its replica set. If the root itself is
//! new, it can vouch for nobody until [`SETTLE`] has passed.
//!
//! It does not know leases.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard};

use atoll_env::Instant;
use atoll_key::{Key, KeyRange, NodeId, PeerId};
use atoll_overlay::Neighbourhood;

use crate::locks::SETTLE;

/// The most members of a set of which something is said.
const MAX_MEMBERS: usize = 64;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct SetHistory {
    state: Mutex<VecDeque<Snapshot>>,
}

/// The replica sets from one moment on.
#[derive(Debug)]
struct Snapshot {
    /// `None`: always.
    since: Option<Instant>,
    epoch: u64,
    sets: Vec<Set>,
}

/// The replica set of one virtual server's keys.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Set {
    root: NodeId,
    range: KeyRange,
    members: Vec<PeerId>,
}

impl Snapshot {
    fn members(&self, key: &Key) -> Option<&Vec<PeerId>> {
        let own = self.sets.iter().find(|set| set.range.contains(key));
        own.map(|set| &set.members)
    }
}

impl SetHistory {
    fn lock(&self) -> MutexGuard<'_, VecDeque<Snapshot>> {
        self.state.lock().expect("no holder of this lock panics")
    }

    /// Notes this node's surroundings as they are `now`. If they are the first and the node
    /// `begins_ring`, there was no other set before.
    pub(crate) fn note(
        &self,
        now: Instant,
        epoch: u64,
        hoods: &[Neighbourhood],
        copies: usize,
        begins_ring: bool,
    ) {
        let mut history = self.lock();
        if history.back().is_some_and(|last| last.epoch == epoch) {
            return;
        }
        let before = |root: NodeId| {
            let mut sets = history.back()?.sets.iter();
            sets.find(|set| set.root == root).map(|set| set.range)
        };
        let own = |hood: &Neighbourhood| {
            let root = hood.me.id;
            // One that has lost its predecessor serves what it served, and soon more.
            let range = hood.range().or_else(|| before(root)).filter(|_| hood.joined)?;
            let members = hood.replica_set(copies).iter().map(|node| node.peer.id).collect();
            Some(Set { root, range, members })
        };
        let sets: Vec<Set> = hoods.iter().filter_map(own).collect();
        if sets.is_empty() && history.is_empty() {
            return;
        }
        match history.back_mut() {
            Some(last) if last.sets == sets => last.epoch = epoch,
            last => {
                let is_alone = sets.iter().all(|set| set.members.len() == 1);
                let is_first = last.is_none() && begins_ring && is_alone;
                let since = (!is_first).then_some(now);
                history.push_back(Snapshot { since, epoch, sets });
            }
        }
        // One that ended before the time that matters does not matter.
        while history.get(1).and_then(|next| next.since).is_some_and(|at| now.since(at) >= SETTLE) {
            history.pop_front();
        }
    }

    /// Which members of a key's replica set, the root being the lowest bit, have belonged to it for
    /// [`SETTLE`]; none if this node has not been its root for as long.
    pub(crate) fn settled(&self, now: Instant, key: &Key) -> u64 {
        let history = self.lock();
        let Some(members) = history.back().and_then(|last| last.members(key)) else { return 0 };
        let is_long = |since: Option<Instant>| since.is_none_or(|at| now.since(at) >= SETTLE);
        let oldest = history.iter().rposition(|snapshot| is_long(snapshot.since));
        let Some(oldest) = oldest else { return 0 };
        let was_there = |member: &PeerId| {
            let mut snapshots = history.range(oldest..);
            snapshots.all(|one| one.members(key).is_some_and(|then| then.contains(member)))
        };
        let settled = members.iter().take(MAX_MEMBERS).enumerate();
        settled.filter(|(_, member)| was_there(member)).fold(0, |all, (at, _)| all | 1 << at)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use atoll_net::Peer;
    use atoll_overlay::Node;

    use super::*;

    fn at(secs: u64) -> Instant {
        Instant::default() + Duration::from_secs(secs)
    }

    fn node(n: u8) -> Node {
        Node::of(Peer { id: PeerId([n; 32]), addr: "127.0.0.1:1".parse().expect("an address") })
    }

    /// The surroundings of node 1, root of all keys up to it after `before`.
    fn hood(before: Option<u8>, after: &[u8]) -> Neighbourhood {
        let successors = after.iter().copied().map(node).collect();
        Neighbourhood {
            epoch: 0,
            me: node(1),
            predecessor: before.map(node),
            successors,
            joined: true,
        }
    }

    #[test]
    fn members_count_when_they_have_belonged_to_the_set_long_enough() {
        let history = SetHistory::default();
        let key = *node(1).id.key();
        let note = |secs, hood: Neighbourhood| history.note(at(secs), secs, &[hood], 3, false);
        assert_eq!(history.settled(at(0), &key), 0);
        note(1, hood(Some(9), &[2, 3, 9]));
        assert_eq!(history.settled(at(25), &key), 0, "the root is new");
        assert_eq!(history.settled(at(26), &key), 0b111);
        note(30, hood(Some(9), &[3, 4, 9]));
        assert_eq!(history.settled(at(30), &key), 0b011, "4 is new");
        note(40, hood(Some(9), &[2, 3, 9]));
        assert_eq!(history.settled(at(41), &key), 0b101, "2 was away");
        assert_eq!(history.settled(at(64), &key), 0b101);
        assert_eq!(history.settled(at(65), &key), 0b111);
        note(70, hood(None, &[2, 3, 9]));
        note(71, hood(Some(8), &[2, 3, 8]));
        assert_eq!(history.settled(at(72), &key), 0b111, "its predecessor has died");
    }

    #[test]
    fn a_root_that_takes_over_more_keys_vouches_for_nobody_there() {
        let mine = *node(1).id.key();
        let mut before = [2, 9];
        before.sort_by_key(|n| mine.distance_from(node(*n).id.key()));
        let [near, far] = before;
        let (taken_over, key) = (node(far).id.key().next(), mine);
        let history = SetHistory::default();
        let note = |secs, before| {
            history.note(at(secs), secs, &[hood(Some(before), &[3, 4])], 3, false);
        };
        note(0, near);
        note(30, far);
        assert_eq!([key, taken_over].map(|key| history.settled(at(31), &key)), [0b111, 0]);
        assert_eq!(history.settled(at(55), &taken_over), 0b111);
    }

    #[test]
    fn who_begins_a_ring_has_always_been_its_root() {
        let key = Key::hashed([7; 32]);
        for (begins, settled) in [(true, 1), (false, 0)] {
            let history = SetHistory::default();
            history.note(at(0), 0, &[hood(None, &[])], 3, begins);
            assert_eq!(history.settled(at(0), &key), settled);
            let mine = *node(1).id.key();
            history.note(at(1), 1, &[hood(Some(2), &[2])], 3, begins);
            assert_eq!(history.settled(at(2), &mine), settled, "2 is new");
        }
    }
}
