//! A node's place on a Chord ring: plain data with pure methods.
//!
//! CFS §4.1–4.2 with the operations of P. Zave, "Reasoning about identifier spaces: how
//! to make Chord correct" (2017), which repair the original: a member answers for its
//! whole successor list, lists are rebuilt as `[successor] + successor.list`, a new
//! successor is adopted only after it has answered, and a predecessor is replaced by a
//! farther one only after it has been found dead.
//!
//! Departures from Zave:
//! - A list is not padded. It holds what is known: on a ring of fewer than r + 1 nodes,
//!   all others; after a failure, one less until the next stabilisation.
//! - She assumes r + 1 members that never leave. A ring here may shrink to one node,
//!   whose list is empty: it is its own successor.
//! - A node whose last successor fails falls back to the nearest node it knows of
//!   (a finger or its predecessor), and stabilisation walks back from there. Until it has,
//!   the node does not say who the root of a key before that successor is.
//! - A node found dead is *suspected* for a while, so that the lists of others, which
//!   still name it, do not bring it back.
//!
//! Invariants ([`ChordState::check_invariants`]): the successors are distinct, in
//! clockwise order from this node, at most r, without this node, none suspected; each
//! finger lies at or beyond its start.
//!
//! Time is an argument; there is no clock, no network and no task here.

use std::collections::BTreeMap;

use atoll_env::Instant;
use atoll_key::{Key, NodeId};

use super::fingers::Fingers;
use crate::{MAX_CLOSER, Neighbourhood, Node, Route};

/// What a member says of its surroundings.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Told {
    /// Its predecessor.
    pub predecessor: Option<Node>,
    /// Its successor list.
    pub successors: Vec<Node>,
}

/// What became of another node's claim to be our predecessor (Zave: rectify).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Claim {
    /// It was the predecessor already, or it is this node itself.
    Known,
    /// It is the predecessor now, instead of this one, which lives on farther back.
    Adopted(Option<Node>),
    /// Our predecessor is nearer. The claim holds only if that one turns out dead.
    Nearer(Node),
}

/// The most nodes remembered as suspected of being dead.
const MAX_SUSPECTS: usize = 256;

/// A node's ring position, predecessor, successor list and fingers.
#[derive(Clone, Debug)]
pub struct ChordState {
    me: Node,
    max_successors: usize,
    joined: bool,
    predecessor: Option<Node>,
    successors: Vec<Node>,
    pub(super) fingers: Fingers,
    /// Until when a node found dead is not believed to live on hearsay.
    suspects: BTreeMap<NodeId, Instant>,
    /// The first successor is only the nearest node known, because all true ones failed:
    /// what lies before it is not known until stabilisation has walked back.
    guessing: bool,
    epoch: u64,
}

impl ChordState {
    /// A node that is on no ring yet. `max_successors` is the paper's r; `epoch` is
    /// where the neighbourhood's epochs start.
    ///
    /// # Panics
    /// If `max_successors` is zero.
    pub fn new(me: Node, max_successors: usize, epoch: u64) -> ChordState {
        assert!(max_successors > 0, "without successors there is no ring");
        ChordState {
            me,
            max_successors,
            joined: false,
            predecessor: None,
            successors: Vec::new(),
            fingers: Fingers::default(),
            suspects: BTreeMap::new(),
            guessing: false,
            epoch,
        }
    }

    /// The state of `me` once a ring of exactly `ring` has come to rest, for starting
    /// large rings at once. `ring` is sorted by ID and contains `me`.
    ///
    /// # Panics
    /// If `me` is not in `ring`.
    pub fn perfect(me: Node, ring: &[Node], max_successors: usize) -> ChordState {
        let at = ring.binary_search_by(|n| n.id.cmp(&me.id)).expect("`me` is on the ring");
        let mut state = ChordState::new(me, max_successors, 0);
        state.joined = true;
        let others = ring.len() - 1;
        let nth = |n: usize| ring[(at + n) % ring.len()];
        state.successors = (1..=others.min(max_successors)).map(nth).collect();
        state.predecessor = (others > 0).then(|| nth(others));
        for exponent in state.wanted_fingers() {
            let start = state.finger_start(exponent);
            let first = ring.partition_point(|n| *n.id.key() < start) % ring.len();
            state.set_finger(exponent, ring[first]);
        }
        state
    }

    /// This node.
    pub fn me(&self) -> Node {
        self.me
    }

    /// The paper's r.
    pub fn max_successors(&self) -> usize {
        self.max_successors
    }

    /// Whether this node is a member of a ring.
    pub fn joined(&self) -> bool {
        self.joined
    }

    /// The node before this one, if known.
    pub fn predecessor(&self) -> Option<Node> {
        self.predecessor
    }

    /// The nodes after this one, nearest first.
    pub fn successors(&self) -> &[Node] {
        &self.successors
    }

    /// The first successor; `None` on a ring of one.
    pub fn head(&self) -> Option<Node> {
        self.successors.first().copied()
    }

    /// The neighbourhood's epoch; see [`Neighbourhood::epoch`].
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Every node in the tables, each once.
    pub fn known(&self) -> Vec<Node> {
        let mut known: Vec<Node> = self
            .successors
            .iter()
            .copied()
            .chain(self.predecessor)
            .chain(self.fingers.nodes())
            .collect();
        known.sort_unstable();
        known.dedup();
        known
    }

    /// This node's surroundings as the rest of the node sees them.
    pub fn neighbourhood(&self) -> Neighbourhood {
        Neighbourhood {
            epoch: self.epoch,
            me: self.me,
            predecessor: self.predecessor,
            successors: self.successors.clone(),
            joined: self.joined,
        }
    }

    /// What this node tells others of its surroundings.
    pub fn told(&self) -> Told {
        Told { predecessor: self.predecessor, successors: self.successors.clone() }
    }

    // --- membership -----------------------------------------------------------------

    /// Makes a ring of one.
    pub fn create(&mut self) {
        self.set_joined(true);
    }

    /// Joins a ring at `successor`, a live member found to be the root of the key after
    /// this node's, which said `told`.
    pub fn join(&mut self, successor: Node, told: &Told, now: Instant) {
        self.expire_suspicions(now);
        self.unsuspect(&successor.id);
        let list = self.reconcile(successor, &told.successors, now);
        self.set_successors(list);
        let before = told.predecessor.or(told.successors.is_empty().then_some(successor));
        let before = before.filter(|p| {
            !self.is_suspected(&p.id, now)
                && (p.id == successor.id
                    || p.id.key().strictly_between(successor.id.key(), self.key()))
        });
        self.set_predecessor(before);
        self.guessing = false;
        self.set_joined(true);
    }

    /// Leaves the ring: knows nobody, answers for nothing.
    pub fn leave(&mut self) {
        self.set_joined(false);
        self.set_predecessor(None);
        self.set_successors(Vec::new());
        self.fingers = Fingers::default();
    }

    /// Zave's *stabilize from successor*: `successor` answered `told`. Rebuilds the list
    /// if it is still the first; returns its predecessor if that might be a nearer
    /// successor of ours, to be asked and [adopted](ChordState::adopt).
    pub fn stabilize(&mut self, successor: &Node, told: &Told, now: Instant) -> Option<Node> {
        self.expire_suspicions(now);
        if self.head().map(|h| h.id) != Some(successor.id) {
            return None;
        }
        let list = self.reconcile(*successor, &told.successors, now);
        self.set_successors(list);
        let newer = self.newer_successor(told.predecessor, now);
        self.guessing &= newer.is_some();
        newer
    }

    /// As [`ChordState::stabilize`] when the successor's list has not changed.
    pub fn newer_successor(&self, candidate: Option<Node>, now: Instant) -> Option<Node> {
        candidate.filter(|c| !self.is_suspected(&c.id, now) && self.would_adopt(&c.id))
    }

    /// Whether a live node at `id` belongs before our first successor.
    pub fn would_adopt(&self, id: &NodeId) -> bool {
        let head = self.head().map_or(self.me.id, |h| h.id);
        self.joined && id.key().strictly_between(self.key(), head.key())
    }

    /// Zave's *stabilize from predecessor*: `candidate`, alive, answered `told`, and
    /// becomes the first successor if it is nearer than the present one.
    pub fn adopt(&mut self, candidate: Node, told: &Told, now: Instant) -> bool {
        if !self.would_adopt(&candidate.id) {
            return false;
        }
        self.expire_suspicions(now);
        self.unsuspect(&candidate.id);
        // A newcomer's list may be short: what we knew before continues it. The entries
        // stay in order, and whoever is skipped now was skipped before.
        let mut rest = told.successors.clone();
        let end = self.reconcile(candidate, &rest, now).last().map_or(candidate.id, |n| n.id);
        let beyond = self.distance(&end);
        rest.extend(self.successors.iter().filter(|n| self.distance(&n.id) > beyond));
        let list = self.reconcile(candidate, &rest, now);
        self.set_successors(list);
        true
    }

    /// Zave's *rectify*, first half: `claimant`, alive, takes this node for its successor.
    pub fn notified(&mut self, claimant: Node) -> Claim {
        if !self.joined || claimant.id == self.me.id {
            return Claim::Known;
        }
        self.unsuspect(&claimant.id);
        if self.successors.is_empty() {
            self.set_successors(vec![claimant]);
        }
        match self.predecessor {
            Some(present) if present.id == claimant.id => {
                self.set_predecessor(Some(claimant));
                Claim::Known
            }
            Some(present) if !claimant.id.key().strictly_between(present.id.key(), self.key()) => {
                Claim::Nearer(present)
            }
            present => {
                self.set_predecessor(Some(claimant));
                Claim::Adopted(present)
            }
        }
    }

    /// A node is dead, or has left: forgets it and will not take it from hearsay until
    /// `until`. Returns whether it was a neighbour.
    pub fn failed(&mut self, id: &NodeId, until: Instant) -> bool {
        if *id == self.me.id {
            return false;
        }
        if self.suspects.len() >= MAX_SUSPECTS && !self.suspects.contains_key(id) {
            let soonest = self.suspects.iter().min_by_key(|(_, until)| **until);
            if let Some(soonest) = soonest.map(|(id, _)| *id) {
                self.suspects.remove(&soonest);
            }
        }
        self.suspects.insert(*id, until);
        self.fingers.remove(id);
        let was_predecessor = self.predecessor.is_some_and(|p| p.id == *id);
        if was_predecessor {
            self.set_predecessor(None);
        }
        let mut list = self.successors.clone();
        list.retain(|n| n.id != *id);
        let was_successor = list.len() != self.successors.len();
        if list.is_empty() {
            list.extend(self.nearest_other());
            self.guessing = !list.is_empty();
        }
        self.set_successors(list);
        was_predecessor || was_successor
    }

    /// `leaver` leaves in good order and says who surrounds it: its predecessor and
    /// successor close the gap at once (Zave treats this as a failure, which is slower).
    pub fn left(&mut self, leaver: &Node, told: &Told, now: Instant, until: Instant) {
        self.expire_suspicions(now);
        let was_head = self.head().is_some_and(|h| h.id == leaver.id);
        let was_predecessor = self.predecessor.is_some_and(|p| p.id == leaver.id);
        self.failed(&leaver.id, until);
        if was_head
            && let Some(head) = self.head()
            && told.successors.first().map(|n| n.id) == Some(head.id)
        {
            let list = self.reconcile(head, &told.successors[1..], now);
            self.set_successors(list);
        }
        if was_predecessor
            && !self.successors.is_empty()
            && let Some(before) = told.predecessor
            && before.id != self.me.id
            && !self.is_suspected(&before.id, now)
        {
            self.set_predecessor(Some(before));
        }
    }

    // --- suspicion ------------------------------------------------------------------

    /// Whether the node was found dead not long ago.
    pub fn is_suspected(&self, id: &NodeId, now: Instant) -> bool {
        self.suspects.get(id).is_some_and(|until| now < *until)
    }

    /// The node has answered: it lives.
    pub fn unsuspect(&mut self, id: &NodeId) {
        self.suspects.remove(id);
    }

    /// Forgets suspicions that have run out.
    pub fn expire_suspicions(&mut self, now: Instant) {
        self.suspects.retain(|_, until| now < *until);
    }

    // --- questions ------------------------------------------------------------------

    /// Where to ask next for `key`; see [`Route`] and [`crate::Overlay::route`].
    pub fn route(&self, key: &Key, as_root: bool) -> Route {
        if !self.joined {
            return Route::Nowhere;
        }
        if self.successors.is_empty() {
            return Route::Root(vec![self.me]);
        }
        match self.predecessor {
            Some(before) if in_range(key, before.id.key(), self.key()) => self.root_here(),
            Some(before) if as_root => Route::Back(before),
            None if as_root => self.root_in_successors(key).unwrap_or_else(|| self.root_here()),
            _ => self.root_in_successors(key).unwrap_or_else(|| self.towards(key)),
        }
    }

    fn root_here(&self) -> Route {
        let list = std::iter::once(self.me).chain(self.successors.iter().copied());
        Route::Root(list.collect())
    }

    /// The successor list used as knowledge: the root may stand in it. Far down the list
    /// only if enough nodes follow, so that one of them lives when half of all have died.
    fn root_in_successors(&self, key: &Key) -> Option<Route> {
        let target = self.distance_of_key(key);
        let at = self.successors.iter().position(|s| self.distance(&s.id) >= target)?;
        let whole = self.knows_whole_ring();
        let enough = self.successors.len().min((self.max_successors / 2).max(4));
        if at == 0 && self.guessing {
            return None;
        }
        if target == Key::MIN || (at > 0 && !whole && self.successors.len() - at < enough) {
            return None;
        }
        let mut list = self.successors[at..].to_vec();
        if whole {
            list.push(self.me);
            list.extend_from_slice(&self.successors[..at]);
        }
        Some(Route::Root(list))
    }

    fn towards(&self, key: &Key) -> Route {
        let closer = self.closer(key);
        if closer.is_empty() { Route::Nowhere } else { Route::closer(closer) }
    }

    /// CFS Figure 3, `preceding_node_list`: nearest to the key first.
    fn closer(&self, key: &Key) -> Vec<Node> {
        let mut nodes: Vec<Node> =
            self.successors.iter().copied().chain(self.fingers.nodes()).collect();
        nodes.retain(|n| n.id.key().strictly_between(self.key(), key));
        nodes.sort_unstable_by_key(|n| key.distance_from(n.id.key()));
        nodes.dedup();
        nodes.truncate(MAX_CLOSER);
        nodes
    }

    /// The nearest node known strictly between this one and `key`.
    pub fn preceding(&self, key: &Key) -> Option<Node> {
        self.closer(key).first().copied()
    }

    /// Whether the successor list goes around the whole ring.
    pub fn knows_whole_ring(&self) -> bool {
        match self.predecessor {
            Some(before) => self.successors.iter().any(|s| s.id == before.id),
            None => self.joined && self.successors.is_empty(),
        }
    }

    /// CFS §6.1: the r nodes of the successor list cover the fraction f of the circle,
    /// so there are about r / f. Exact on a ring that fits into the list.
    pub fn estimated_nodes(&self) -> f64 {
        let Some(last) = self.successors.last() else { return 1.0 };
        if self.knows_whole_ring() {
            return (self.successors.len() + 1) as f64;
        }
        let covered = self.distance(&last.id).as_fraction().max(f64::MIN_POSITIVE);
        self.successors.len() as f64 / covered
    }

    // --- fingers --------------------------------------------------------------------

    /// The exponents i of the fingers worth keeping: those whose start lies beyond the
    /// successor list, which covers the rest. About log2(N / r) of the 512.
    pub fn wanted_fingers(&self) -> Vec<u32> {
        match self.successors.last() {
            Some(last) if !self.knows_whole_ring() => Fingers::beyond(&self.distance(&last.id)),
            _ => Vec::new(),
        }
    }

    /// Where finger `exponent` starts: 2^exponent beyond this node. (The paper counts
    /// from 1: its i-th entry is exponent i − 1.)
    pub fn finger_start(&self, exponent: u32) -> Key {
        self.key().wrapping_add(&Key::power_of_two(exponent))
    }

    /// The finger with this exponent.
    pub fn finger(&self, exponent: u32) -> Option<Node> {
        self.fingers.node(exponent)
    }

    /// All fingers, with their exponents.
    pub fn fingers(&self) -> impl Iterator<Item = (u32, Node)> + '_ {
        self.fingers.iter()
    }

    /// `node` is the first at or after the start of finger `exponent`. If that is beyond
    /// this node, nobody is in that half and the finger is dropped.
    pub fn set_finger(&mut self, exponent: u32, node: Node) {
        if node.id != self.me.id && self.distance(&node.id) >= Key::power_of_two(exponent) {
            self.fingers.set(exponent, node);
        } else {
            self.fingers.drop_exponent(exponent);
        }
    }

    /// Drops fingers that the successor list has grown to cover.
    pub fn prune_fingers(&mut self) {
        let wanted = self.wanted_fingers();
        self.fingers.keep_only(&wanted);
    }

    // --- inner ----------------------------------------------------------------------

    fn key(&self) -> &Key {
        self.me.id.key()
    }

    fn distance(&self, id: &NodeId) -> Key {
        self.distance_of_key(id.key())
    }

    fn distance_of_key(&self, key: &Key) -> Key {
        key.distance_from(self.key())
    }

    /// `[head] + list`, cut where it stops going clockwise away from this node (it has
    /// come around, or is nonsense), without suspects, at most r.
    fn reconcile(&self, head: Node, list: &[Node], now: Instant) -> Vec<Node> {
        let mut out = vec![head];
        let mut farthest = self.distance(&head.id);
        for node in list {
            let distance = self.distance(&node.id);
            if distance <= farthest || out.len() >= self.max_successors {
                break;
            }
            farthest = distance;
            if !self.is_suspected(&node.id, now) {
                out.push(*node);
            }
        }
        out
    }

    fn nearest_other(&self) -> Option<Node> {
        let others = self.fingers.nodes().chain(self.predecessor);
        others.min_by_key(|n| self.distance(&n.id))
    }

    fn set_joined(&mut self, joined: bool) {
        self.epoch += u64::from(self.joined != joined);
        self.joined = joined;
    }

    fn set_predecessor(&mut self, predecessor: Option<Node>) {
        self.epoch += u64::from(self.predecessor != predecessor);
        self.predecessor = predecessor;
    }

    fn set_successors(&mut self, successors: Vec<Node>) {
        self.epoch += u64::from(self.successors != successors);
        self.successors = successors;
    }

    /// Panics with a description if an invariant of the module does not hold.
    pub fn check_invariants(&self) {
        let me = self.me;
        assert!(self.successors.len() <= self.max_successors, "{me:?}: list longer than r");
        let mut farthest = Key::MIN;
        for node in &self.successors {
            let distance = self.distance(&node.id);
            assert!(distance > farthest, "{me:?}: {node:?} is out of order in the list");
            farthest = distance;
            assert!(!self.suspects.contains_key(&node.id), "{me:?}: {node:?} is suspected");
        }
        if let Some(before) = self.predecessor {
            assert!(before.id != me.id, "{me:?} is its own predecessor");
            assert!(!self.suspects.contains_key(&before.id), "{me:?}: {before:?} is suspected");
            assert!(!self.successors.is_empty(), "{me:?} has a predecessor but no successor");
        }
        for (exponent, node) in self.fingers.iter() {
            let distance = self.distance(&node.id);
            assert!(distance >= Key::power_of_two(exponent), "{me:?}: finger {exponent} too near");
            assert!(!self.suspects.contains_key(&node.id), "{me:?}: {node:?} is suspected");
        }
        assert!(self.joined || self.successors.is_empty(), "{me:?} knows a ring it is not on");
        assert!(self.suspects.len() <= MAX_SUSPECTS, "{me:?} suspects everybody");
    }
}

fn in_range(key: &Key, after: &Key, upto: &Key) -> bool {
    atoll_key::KeyRange::new(*after, *upto).contains(key)
}
