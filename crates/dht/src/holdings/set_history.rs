//! Whose grants of a lock count: the *voters* of the replica sets whose root this node is.
//!
//! A majority of today's replica set need not have a node in common with a majority of yesterday's. So
//! the root keeps, for each of its sets, at most as many voters as a set has members, and only grants of voters
//! that belong to the present set count. A voter that has been away from the set for [`SETTLE`] is one no more, and a
//! member that has belonged to it for as long may take its place: no lease lasts then that the former one was needed
//! for. Until then it keeps its place, and counts again when it comes back. So a node that is killed and
//! started again, once or every few seconds, leaves the voters as they are. What it has granted it knows
//! (`holdings::lease_journal`), or it grants nothing for a lease's time.
//!
//! The root of a key is the one node that sees each change of its replica set. If the root itself is
//! new, it can vouch for nobody until [`SETTLE`] has passed. Whether a node is the root it learns from its neighbours, which
//! confirm its place ([`atoll_overlay::Overlay::unconfirmed_for`]): it vouches for nobody while none has done so for
//! [`MAX_UNCONFIRMED`], since another node may be the root by then, and it is new if there were more than [`MAX_GAP`] between
//! two confirmations, in one incarnation or across a restart. So a node that was killed and is back at once is not new: a node
//! that took its place meanwhile could vouch for nobody yet. One that does not see most of the
//! network's nodes may have been replaced long ago, and may take itself for the root of others' keys: it begins anew.
//!
//! Invariants:
//!
//! - A node that its predecessor calls instead of the former root vouches for nobody before what that one's voters grant has
//!   ended.
//! - A set has as many voters as copies are kept, at most.
//! - A voter loses its vote only after it was away for [`SETTLE`].
//!
//! It does not know leases.

use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use atoll_env::Instant;
use atoll_key::{Key, PeerId};
use atoll_overlay::{Neighbourhood, Node};
use minicbor::{Decode, Encode};

use crate::locks::{LOCK_LEASE, SETTLE};

/// A node whose place no neighbour has confirmed for so long is the root of nothing. Another node may have been the root for
/// as long, and has no voters yet. These are the ten seconds of [`SETTLE`] in which former roots notice that they are none;
/// Chord calls successors every four seconds at least.
const MAX_UNCONFIRMED: Duration = Duration::from_secs(SETTLE.as_secs() - LOCK_LEASE.as_secs());

/// A root with more time between two confirmations of its place begins anew. Another node may have been the root in between. That
/// one is confirmed no more, and so the root of nothing [`MAX_UNCONFIRMED`] later: before it could have voters.
const MAX_GAP: Duration = Duration::from_secs(SETTLE.as_secs() - MAX_UNCONFIRMED.as_secs());

/// The most members of a set of which something is said.
const MAX_MEMBERS: usize = 64;

/// The most parts of a range that are told apart; beyond, the one but last counts as new as the last.
const MAX_PARTS: usize = 16;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct SetHistory {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    sets: Sets,
    /// The virtual servers that were roots when they were looked at last.
    roots: Vec<[u8; 64]>,
    /// Whether they were ever, in this incarnation or, as far as it knows, before.
    was_noted: bool,
    /// Whether an earlier incarnation was the last one to look at them.
    is_resumed: bool,
}

/// The replica sets whose root this node is, or was a moment ago. Times are nanoseconds.
#[derive(Clone, PartialEq, Debug, Default, Encode, Decode)]
#[cbor(map)]
pub(crate) struct Sets {
    #[n(0)]
    sets: Vec<Set>,
}

/// The replica set of one virtual server's keys.
#[derive(Clone, PartialEq, Debug, Encode, Decode)]
#[cbor(map)]
struct Set {
    /// The virtual server's position.
    #[cbor(n(0), with = "minicbor::bytes")]
    root: [u8; 64],
    /// When its place was last known to be confirmed.
    #[n(1)]
    confirmed: u64,
    /// Its keys, in parts: the nearest ones first, which it has had for longest.
    #[n(2)]
    parts: Vec<Part>,
    /// The root first.
    #[n(3)]
    members: Vec<Member>,
    #[n(4)]
    voters: Vec<Voter>,
}

/// The keys at most so far before the virtual server.
#[derive(Clone, PartialEq, Debug, Encode, Decode)]
#[cbor(map)]
struct Part {
    #[cbor(n(0), with = "minicbor::bytes")]
    reach: [u8; 64],
    /// Since when it is their root. `None`: always.
    #[n(1)]
    since: Option<u64>,
}

#[derive(Clone, PartialEq, Debug, Encode, Decode)]
#[cbor(map)]
struct Member {
    #[cbor(n(0), with = "minicbor::bytes")]
    peer: [u8; 32],
    /// Since when it has belonged to the set. `None`: always.
    #[n(1)]
    since: Option<u64>,
}

#[derive(Clone, PartialEq, Debug, Encode, Decode)]
#[cbor(map)]
struct Voter {
    #[cbor(n(0), with = "minicbor::bytes")]
    peer: [u8; 32],
    /// Since when it has not belonged to the set, if it does not.
    #[n(1)]
    away: Option<u64>,
}

/// What a node sees around it.
pub(crate) struct Surroundings<'a> {
    /// The neighbourhoods of this node's virtual servers, and how long ago a neighbour confirmed each one's place.
    pub hoods: &'a [(Neighbourhood, Duration)],
    /// How many copies of a block there are.
    pub copies: usize,
    /// Whether these are most of the network's nodes.
    pub has_majority: bool,
    /// Whether there was no other ring before, if they are the first.
    pub begins_ring: bool,
}

/// What became of a look at the surroundings.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Noted {
    /// This node is not on the ring, or as far as it knows no root, or not on the side with most of the nodes.
    Nowhere,
    /// All is as it was.
    Same,
    /// What must be known after a restart has changed.
    Changed,
}

fn is_long(now: Instant, since: Option<u64>) -> bool {
    since.is_none_or(|at| now.since(Instant(at)) >= SETTLE)
}

/// A set as it is seen now.
struct Seen {
    root: [u8; 64],
    /// When the root's place was last confirmed.
    confirmed: Instant,
    /// How far its keys reach.
    reach: [u8; 64],
    members: Vec<PeerId>,
}

impl Sets {
    /// When the place of one of their roots was last known to be confirmed.
    pub(crate) fn confirmed(&self) -> Instant {
        Instant(self.sets.iter().map(|set| set.confirmed).max().unwrap_or_default())
    }

    #[cfg(test)]
    pub(crate) fn of_one_confirmed(at: Instant) -> Sets {
        let seen = Seen { root: [1; 64], confirmed: at, reach: [2; 64], members: Vec::new() };
        Sets { sets: vec![Set::new(&seen, None)] }
    }

    /// Whether there are none.
    pub(crate) fn is_empty(&self) -> bool {
        self.sets.is_empty()
    }

    /// Notes when the places of those that are seen were confirmed, and forgets sets whose roots were unconfirmed for too
    /// long; whether there were any.
    fn confirm(&mut self, now: Instant, seen: &[Seen]) -> bool {
        let before = self.sets.len();
        self.sets.retain_mut(|set| {
            let last = std::mem::take(&mut set.confirmed);
            let present = seen.iter().find(|one| one.root == set.root);
            set.confirmed = present.map_or(last, |one| last.max(one.confirmed.as_nanos()));
            let until = present.map_or(now, |one| one.confirmed);
            until.since(Instant(last)) <= MAX_GAP
        });
        self.sets.len() < before
    }

    fn seen(
        &self,
        now: Instant,
        hoods: &[(Neighbourhood, Duration)],
        copies: usize,
        is_resumed: bool,
    ) -> Vec<Seen> {
        let of = |(hood, unconfirmed): &(Neighbourhood, Duration)| {
            if !hood.joined || *unconfirmed >= MAX_UNCONFIRMED {
                return None;
            }
            let root = hood.me.id.0;
            let before = || {
                let known = self.sets.iter().find(|set| set.root == root.0)?;
                known.parts.last().map(|part| part.reach)
            };
            let reach = hood.range().map(|range| root.distance_from(&range.after.next()).0);
            // One that has lost its predecessor serves what it served, and soon more.
            let before = || (!is_resumed).then(before).flatten();
            let members = hood.replica_set(copies).iter().map(|node| node.peer.id).collect();
            let confirmed = now.as_nanos().saturating_sub(unconfirmed.as_nanos() as u64);
            let (root, confirmed, reach) = (root.0, Instant(confirmed), reach.or_else(before)?);
            Some(Seen { root, confirmed, reach, members })
        };
        hoods.iter().filter_map(of).collect()
    }
}

impl Set {
    fn new(Seen { root, confirmed, reach, members }: &Seen, since: Option<u64>) -> Set {
        let member = |peer: &PeerId| Member { peer: peer.0, since };
        Set {
            root: *root,
            confirmed: confirmed.as_nanos(),
            parts: vec![Part { reach: *reach, since }],
            members: members.iter().map(member).collect(),
            voters: Vec::new(),
        }
    }

    fn update(&mut self, now: Instant, Seen { reach, members, .. }: &Seen) {
        match self.parts.iter().position(|part| part.reach >= *reach) {
            Some(last) => {
                self.parts.truncate(last + 1);
                self.parts[last].reach = *reach;
            }
            None => self.parts.push(Part { reach: *reach, since: Some(now.as_nanos()) }),
        }
        let since = |peer: &PeerId| {
            let known = self.members.iter().find(|member| member.peer == peer.0);
            known.map_or(Some(now.as_nanos()), |member| member.since)
        };
        self.members =
            members.iter().map(|peer| Member { peer: peer.0, since: since(peer) }).collect();
        for voter in &mut self.voters {
            let is_here = members.iter().any(|peer| peer.0 == voter.peer);
            let away = voter.away.or(Some(now.as_nanos()));
            voter.away = away.filter(|_| !is_here);
        }
    }

    /// Members that have been here for long take the places of voters that have been away for long.
    fn replace_voters(&mut self, now: Instant, copies: usize) {
        self.voters.retain(|voter| voter.away.is_none() || !is_long(now, voter.away));
        for member in &self.members {
            let is_voter = self.voters.iter().any(|voter| voter.peer == member.peer);
            if !is_voter && is_long(now, member.since) && self.voters.len() < copies {
                self.voters.push(Voter { peer: member.peer, away: None });
            }
        }
        while self.parts.get(1).is_some_and(|part| is_long(now, part.since)) {
            self.parts.remove(0);
        }
        while self.parts.len() > MAX_PARTS {
            self.parts.remove(self.parts.len() - 2);
        }
    }

    /// The part that a key is in.
    fn part(&self, key: &Key) -> Option<&Part> {
        let distance = Key(self.root).distance_from(key).0;
        self.parts.iter().find(|part| distance <= part.reach)
    }
}

impl SetHistory {
    /// With what the last incarnation has noted.
    pub(crate) fn remembering(sets: Sets) -> SetHistory {
        let was_noted = !sets.is_empty();
        let state = State { sets, roots: Vec::new(), was_noted, is_resumed: true };
        SetHistory { state: Mutex::new(state) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder of this lock panics")
    }

    /// The replica sets, as the next incarnation is to know them.
    pub(crate) fn sets(&self) -> Sets {
        self.lock().sets.clone()
    }

    /// Notes this node's surroundings as they are `now`.
    pub(crate) fn note(&self, now: Instant, surroundings: &Surroundings<'_>) -> Noted {
        let Surroundings { hoods, copies, has_majority, begins_ring } = *surroundings;
        let mut state = self.lock();
        let State { sets, roots, was_noted, is_resumed } = &mut *state;
        if !has_majority {
            // One that has just come back has not heard of all yet.
            if *is_resumed || sets.is_empty() {
                return Noted::Nowhere;
            }
            sets.sets.clear();
            return Noted::Changed;
        }
        let seen = sets.seen(now, hoods, copies, *is_resumed);
        *roots = seen.iter().map(|one| one.root).collect();
        let are_fewer = sets.confirm(now, &seen);
        if seen.is_empty() {
            return Noted::Nowhere;
        }
        let before = sets.sets.clone();
        let is_first = !*was_noted && begins_ring && seen.iter().all(|one| one.members.len() == 1);
        let since = (!is_first).then_some(now.as_nanos());
        sets.sets.retain(|set| set.voters.len() <= copies);
        for one in &seen {
            let at = sets.sets.iter().position(|set| set.root == one.root).unwrap_or_else(|| {
                sets.sets.push(Set::new(one, since));
                sets.sets.len() - 1
            });
            sets.sets[at].update(now, one);
            sets.sets[at].replace_voters(now, copies);
        }
        (*was_noted, *is_resumed) = (true, false);
        if are_fewer || sets.sets != before { Noted::Changed } else { Noted::Same }
    }

    /// Which nodes of a key's replica set, the first being the lowest bit, are its voters; none if this node
    /// has not been its root for [`SETTLE`]. `None` if it is not its root as of the last
    /// [`note`](SetHistory::note): a node that has lost its predecessor may take itself for the root of more keys.
    pub(crate) fn voters(&self, now: Instant, key: &Key, set: &[Node]) -> Option<u64> {
        let state = self.lock();
        if state.is_resumed {
            return None;
        }
        let is_root = |set: &&Set| state.roots.contains(&set.root);
        let mut present = state.sets.sets.iter().filter(is_root);
        let (known, part) = present.find_map(|set| Some((set, set.part(key)?)))?;
        if !is_long(now, part.since) {
            return Some(0);
        }
        let votes = |node: &Node| known.voters.iter().any(|voter| voter.peer == node.peer.id.0);
        let nodes = set.iter().take(MAX_MEMBERS).enumerate();
        Some(nodes.filter(|(_, node)| votes(node)).fold(0, |all, (at, _)| all | 1 << at))
    }
}

#[cfg(test)]
mod tests {
    use atoll_net::Peer;

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

    type Seat = (Neighbourhood, Duration);

    /// A place that has just been confirmed.
    fn seat(hood: Neighbourhood) -> Seat {
        (hood, Duration::ZERO)
    }

    fn around(hoods: &[Seat]) -> Surroundings<'_> {
        let (copies, has_majority, begins_ring) = (3, true, false);
        Surroundings { hoods, copies, has_majority, begins_ring }
    }

    /// A root whose surroundings change from time to time and are looked at all the time.
    struct Root {
        history: SetHistory,
        secs: u64,
        hood: Neighbourhood,
    }

    impl Root {
        fn new(history: SetHistory, secs: u64, hood: Neighbourhood) -> Root {
            let mut root = Root { history, secs, hood: hood.clone() };
            root.note(secs, hood);
            root
        }

        fn look(&self, secs: u64) -> Noted {
            self.history.note(at(secs), &around(&[seat(self.hood.clone())]))
        }

        /// Looks at the ring when no neighbour has confirmed its place for some time.
        fn look_unconfirmed(&self, secs: u64, unconfirmed: Duration) -> Noted {
            self.history.note(at(secs), &around(&[(self.hood.clone(), unconfirmed)]))
        }

        fn until(&mut self, secs: u64) {
            for secs in self.secs..=secs {
                self.look(secs);
            }
            self.secs = secs;
        }

        fn note(&mut self, secs: u64, hood: Neighbourhood) {
            self.until(secs);
            self.hood = hood;
            self.look(secs);
        }

        fn voters(&self, secs: u64, key: &Key) -> Option<u64> {
            self.history.voters(at(secs), key, &self.hood.replica_set(3))
        }

        fn settled(&mut self, secs: u64, key: &Key) -> u64 {
            self.until(secs);
            self.voters(secs, key).expect("it is the root")
        }
    }

    fn mine() -> Key {
        *node(1).id.key()
    }

    #[test]
    fn members_vote_after_a_while_and_lose_their_vote_to_others_only_when_they_are_away_for_long() {
        let mut root = Root::new(SetHistory::default(), 1, hood(Some(9), &[2, 3, 9]));
        assert_eq!(root.settled(25, &mine()), 0, "the root is new");
        assert_eq!(root.settled(26, &mine()), 0b111);
        root.note(30, hood(Some(9), &[3, 4, 9]));
        assert_eq!(root.settled(30, &mine()), 0b011, "4 is new");
        root.note(40, hood(Some(9), &[2, 3, 9]));
        assert_eq!(root.settled(41, &mine()), 0b111, "2 was away for ten seconds");
        root.note(70, hood(None, &[2, 3, 9]));
        root.note(71, hood(Some(8), &[2, 3, 8]));
        assert_eq!(root.settled(72, &mine()), 0b111, "its predecessor has died");
        root.note(80, hood(Some(9), &[3, 4, 9]));
        assert_eq!(root.settled(104, &mine()), 0b011);
        assert_eq!(root.settled(105, &mine()), 0b111, "4 has the place of 2");
        root.note(110, hood(Some(9), &[2, 3, 9]));
        assert_eq!(root.settled(134, &mine()), 0b101, "2 has lost its own");
        assert_eq!(root.settled(135, &mine()), 0b111);
    }

    #[test]
    fn a_voter_that_comes_back_does_not_count_besides_the_one_that_would_replace_it() {
        let mut root = Root::new(SetHistory::default(), 0, hood(Some(9), &[2, 3, 9]));
        assert_eq!(root.settled(30, &mine()), 0b111);
        // 4 pushes 3 out, then 2 dies.
        root.note(31, hood(Some(9), &[2, 4, 9]));
        assert_eq!(root.settled(54, &mine()), 0b011);
        root.note(55, hood(Some(9), &[4, 3, 9]));
        assert_eq!(root.settled(56, &mine()), 0b101, "3 votes, 4 does not");
        assert_eq!(root.settled(79, &mine()), 0b101, "2 may come back");
        assert_eq!(root.settled(80, &mine()), 0b111, "4 has the place of 2");
    }

    #[test]
    fn a_root_that_takes_over_more_keys_vouches_for_nobody_there() {
        let mut before = [2, 9];
        before.sort_by_key(|n| mine().distance_from(node(*n).id.key()));
        let [near, far] = before;
        let taken_over = node(far).id.key().next();
        let mut root = Root::new(SetHistory::default(), 0, hood(Some(near), &[3, 4]));
        root.note(30, hood(Some(far), &[3, 4]));
        assert_eq!([mine(), taken_over].map(|key| root.settled(31, &key)), [0b111, 0]);
        // Its predecessor comes back, and dies again.
        root.note(50, hood(Some(near), &[3, 4]));
        root.note(52, hood(Some(far), &[3, 4]));
        assert_eq!([mine(), taken_over].map(|key| root.settled(76, &key)), [0b111, 0]);
        assert_eq!(root.settled(77, &taken_over), 0b111);
    }

    /// It cannot reach its predecessor, which is still the root of its own keys for all others.
    #[test]
    fn a_root_that_has_lost_its_predecessor_vouches_for_its_former_keys_alone() {
        let mut root = Root::new(SetHistory::default(), 0, hood(Some(9), &[2, 3, 4]));
        root.note(30, hood(None, &[2, 3, 4]));
        root.until(90);
        assert_eq!(root.voters(90, &mine()), Some(0b111));
        assert_eq!(root.voters(90, node(9).id.key()), None);
    }

    /// Its predecessor takes another node for its successor, which was away and which this one cannot reach.
    #[test]
    fn a_root_that_no_neighbour_confirms_vouches_for_nobody_and_begins_anew_after_a_while() {
        for (back, votes) in [(45, 0b111), (46, 0)] {
            let mut root = Root::new(SetHistory::default(), 0, hood(Some(9), &[2, 3, 9]));
            assert_eq!(root.settled(30, &mine()), 0b111);
            for secs in 31..back {
                root.look_unconfirmed(secs, Duration::from_secs(secs - 30));
                let is_known = secs < 40;
                assert_eq!(root.voters(secs, &mine()), is_known.then_some(0b111), "{secs}");
            }
            root.secs = back;
            let noted = root.look(back);
            assert_eq!(noted == Noted::Changed, votes == 0);
            assert_eq!(root.voters(back, &mine()), Some(votes));
            assert_eq!(root.settled(back + 25, &mine()), 0b111);
        }
    }

    /// It has been called before, but by nobody since it was started again.
    #[test]
    fn a_root_that_is_started_again_vouches_for_nobody_before_a_neighbour_confirms_its_place() {
        for (back, votes) in [(45, 0b111), (46, 0)] {
            let mut root = Root::new(SetHistory::default(), 0, hood(Some(9), &[2, 3, 9]));
            assert_eq!(root.settled(30, &mine()), 0b111);
            // Nothing but its own word says so for nine seconds before it is killed.
            root.look_unconfirmed(39, Duration::from_secs(9));
            let history = SetHistory::remembering(root.history.sets());
            let again = Root { history, secs: back, hood: root.hood.clone() };
            for secs in 40..back {
                assert_eq!(again.look_unconfirmed(secs, Duration::MAX), Noted::Nowhere);
                assert_eq!(again.voters(secs, &mine()), None);
            }
            again.look(back);
            assert_eq!(again.voters(back, &mine()), Some(votes));
        }
    }

    /// Another virtual server of the same node is confirmed all the time.
    #[test]
    fn each_place_is_confirmed_for_itself() {
        let other = Neighbourhood { me: node(5), ..hood(Some(1), &[2, 3, 9]) };
        let (history, mine) = (SetHistory::default(), mine());
        let set = hood(Some(9), &[2, 3, 9]).replica_set(3);
        let look = |secs: u64, unconfirmed: u64| {
            let own = (hood(Some(9), &[2, 3, 9]), Duration::from_secs(unconfirmed));
            history.note(at(secs), &around(&[own, seat(other.clone())]));
            history.voters(at(secs), &mine, &set)
        };
        for secs in 0..30 {
            look(secs, 0);
        }
        assert_eq!(look(30, 0), Some(0b111));
        assert_eq!(look(39, 9), Some(0b111));
        assert_eq!(look(40, 10), None);
        assert_eq!(look(46, 0), Some(0), "it is new");
        assert_eq!(history.voters(at(46), node(5).id.key(), &[node(5), node(2)]), Some(0b11));
    }

    /// The set that is asked about may have changed since this node has looked at it.
    #[test]
    fn voters_are_told_by_their_place_in_the_set_that_is_asked_about() {
        let mut root = Root::new(SetHistory::default(), 0, hood(Some(9), &[2, 3, 9]));
        assert_eq!(root.settled(30, &mine()), 0b111);
        let voters = |set: &[u8]| {
            let set: Vec<Node> = set.iter().copied().map(node).collect();
            root.history.voters(at(30), &mine(), &set)
        };
        assert_eq!(voters(&[1, 4, 3]), Some(0b101));
        assert_eq!(voters(&[1, 3]), Some(0b11));
    }

    #[test]
    fn who_begins_a_ring_has_always_been_its_root() {
        let key = Key::hashed([7; 32]);
        for (begins, settled) in [(true, 1), (false, 0)] {
            let (history, alone) = (SetHistory::default(), hood(None, &[]));
            let begins_ring = begins;
            let alone_there = [seat(alone.clone())];
            history.note(at(0), &Surroundings { begins_ring, ..around(&alone_there) });
            let set = alone.replica_set(3);
            assert_eq!(history.voters(at(0), &key, &set), Some(settled));
            let two = hood(Some(2), &[2]);
            history.note(at(1), &around(&[seat(two.clone())]));
            let set = two.replica_set(3);
            assert_eq!(history.voters(at(2), &mine(), &set), Some(settled), "2 is new");
        }
    }

    #[test]
    fn a_root_that_was_away_for_a_moment_goes_on_and_one_that_was_away_for_long_begins_anew() {
        for (back, votes) in [(45, 0b101), (46, 0)] {
            let mut root = Root::new(SetHistory::default(), 0, hood(Some(9), &[2, 3, 9]));
            assert_eq!(root.settled(30, &mine()), 0b111);
            let again = SetHistory::remembering(root.history.sets());
            let unjoined = Neighbourhood { joined: false, ..hood(None, &[]) };
            assert_eq!(again.note(at(31), &around(&[seat(unjoined)])), Noted::Nowhere);
            let few = [seat(hood(Some(9), &[9]))];
            let alone = Surroundings { has_majority: false, ..around(&few) };
            assert_eq!(again.note(at(32), &alone), Noted::Nowhere);
            let now = hood(Some(9), &[4, 3, 9]);
            let set = now.replica_set(3);
            assert_eq!(again.voters(at(33), &mine(), &set), None, "it has not looked yet");
            again.note(at(back), &around(&[seat(now)]));
            assert_eq!(again.voters(at(back), &mine(), &set), Some(votes));
        }
    }

    /// It may have been replaced, and may take itself for the root of keys that have another one.
    #[test]
    fn a_root_that_has_lost_most_nodes_begins_anew() {
        let mut root = Root::new(SetHistory::default(), 0, hood(Some(9), &[2, 3, 9]));
        assert_eq!(root.settled(30, &mine()), 0b111);
        let none = [seat(hood(None, &[]))];
        let alone = Surroundings { has_majority: false, ..around(&none) };
        assert_eq!(root.history.note(at(31), &alone), Noted::Changed);
        assert_eq!(root.history.note(at(32), &alone), Noted::Nowhere);
        assert_eq!(root.voters(32, &mine()), None);
        assert_eq!(root.settled(33, &mine()), 0);
        assert_eq!(root.settled(56, &mine()), 0b111, "since it was looked at again");
    }

    #[test]
    fn a_root_that_was_stopped_for_long_begins_anew() {
        let mut root = Root::new(SetHistory::default(), 0, hood(Some(9), &[2, 3, 9]));
        assert_eq!(root.settled(30, &mine()), 0b111);
        assert_eq!(root.look(45), Noted::Same);
        assert_eq!(root.voters(45, &mine()), Some(0b111));
        assert_eq!(root.look_unconfirmed(61, Duration::from_secs(16)), Noted::Nowhere);
        assert_eq!(root.voters(61, &mine()), None);
        assert_eq!(root.look(62), Noted::Changed);
        assert_eq!(root.voters(62, &mine()), Some(0));
    }
}
