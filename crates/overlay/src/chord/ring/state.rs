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
//!   the node names no root for a key before that successor.
//! - A [`Judge`] says which nodes may enter a table: a node found dead is *suspected* for a
//!   while, so that the lists of others, which still name it, do not bring it back; one
//!   that has not been checked (CFS §4.4) waits, and the list goes on behind it with what
//!   it held before.
//! - A list holds nodes that this node has found itself (`corroborated`) beside those that its
//!   successor names.
//! - A list goes on beyond r entries until it holds enough different physical nodes
//!   ([`ListLength`]), since a node may hold many positions (CFS §5.3).
//!
//! Invariants ([`ChordState::check_invariants`]): the successors are distinct, in
//! clockwise order from this node, no more than are wanted, without this position; each
//! finger lies at or beyond its start.
//!
//! One state is one virtual server. There is no clock, no network and no task here.

mod corroborated;
mod questions;

use atoll_key::{Key, NodeId};

use crate::chord::ring::fingers::Fingers;
use crate::chord::ring::list::{ListLength, wanted_list};
use crate::chord::trust::admission::{Judge, Verdict};
use crate::wire::MAX_NODES;
use crate::{Neighbourhood, Node};

/// The surroundings of a member, as it tells them.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Told {
    /// Its predecessor.
    pub predecessor: Option<Node>,
    /// Its successor list.
    pub successors: Vec<Node>,
}

/// The outcome of another node's claim to be our predecessor (Zave: rectify).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Claim {
    /// It was the predecessor already, or it is this node itself.
    Known,
    /// It is the predecessor now, instead of this one, which lives on farther back.
    Adopted(Option<Node>),
    /// Our predecessor is nearer. The claim holds only if that one turns out dead.
    Nearer(Node),
}

/// A node's ring position, predecessor, successor list and fingers.
#[derive(Clone, Debug)]
pub struct ChordState {
    me: Node,
    length: ListLength,
    joined: bool,
    predecessor: Option<Node>,
    successors: Vec<Node>,
    /// Those successors that this node found itself ([`corroborated`]).
    corroborated: Vec<Node>,
    pub(in crate::chord) fingers: Fingers,
    /// The first successor is only the nearest node known, because all true ones failed: nodes
    /// before it are unknown until stabilisation has walked back.
    guessing: bool,
    epoch: u64,
}

impl ChordState {
    /// A position on no ring yet. `length` is the paper's r; `epoch` is where the
    /// neighbourhood's epochs start.
    ///
    /// # Panics
    /// If `length` is zero, or more than travel in a message.
    pub fn new(me: Node, length: impl Into<ListLength>, epoch: u64) -> ChordState {
        let length = length.into();
        assert!(length.entries > 0, "without successors there is no ring");
        assert!(length.entries <= MAX_NODES, "a list has to fit into a message");
        ChordState {
            me,
            length,
            joined: false,
            predecessor: None,
            successors: Vec::new(),
            corroborated: Vec::new(),
            fingers: Fingers::default(),
            guessing: false,
            epoch,
        }
    }

    /// The state of `me` once a ring of exactly `ring` has come to rest, for starting
    /// large rings at once. `ring` is sorted by ID and contains `me`.
    ///
    /// # Panics
    /// If `me` is not in `ring`.
    pub fn perfect(me: Node, ring: &[Node], length: impl Into<ListLength>) -> ChordState {
        let at = ring.binary_search_by(|n| n.id.cmp(&me.id)).expect("`me` is on the ring");
        let mut state = ChordState::new(me, length, 0);
        state.joined = true;
        let others = ring.len() - 1;
        let nth = |n: usize| ring[(at + n) % ring.len()];
        state.successors = wanted_list(&me, (1..=others).map(nth), state.length);
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

    /// How long the list is to be.
    pub fn length(&self) -> ListLength {
        self.length
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

    /// Every node in the tables, possibly repeated.
    pub fn nodes(&self) -> impl Iterator<Item = Node> + '_ {
        self.successors.iter().copied().chain(self.predecessor).chain(self.fingers.nodes())
    }

    /// Every node in the tables, each once.
    pub fn known(&self) -> Vec<Node> {
        let mut known: Vec<Node> = self.nodes().collect();
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

    /// This node's surroundings, as told to others.
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
    pub fn join(&mut self, successor: Node, told: &Told, judge: &Judge<'_>) {
        let list = self.reconcile(successor, &told.successors, judge);
        self.set_successors(list);
        let before = told.predecessor.or(told.successors.is_empty().then_some(successor));
        let before = before.filter(|p| {
            judge(p) == Verdict::Welcome
                && (p.id == successor.id
                    || p.id.key().strictly_between(successor.id.key(), self.key()))
        });
        self.set_predecessor(before);
        self.guessing = false;
        self.set_joined(true);
    }

    /// Leaves the ring: empties all tables, and is the root of no key.
    pub fn leave(&mut self) {
        self.set_joined(false);
        self.set_predecessor(None);
        self.set_successors(Vec::new());
        self.fingers = Fingers::default();
    }

    /// Zave's *stabilize from successor*: `successor` answered `told`. Rebuilds the list
    /// if it is still the first; returns its predecessor if that might be a nearer
    /// successor of ours, to be checked, asked and [adopted](ChordState::adopt).
    pub fn stabilize(&mut self, successor: &Node, told: &Told, judge: &Judge<'_>) -> Option<Node> {
        if self.head().map(|h| h.id) != Some(successor.id) {
            return None;
        }
        let list = self.reconcile(*successor, &told.successors, judge);
        self.set_successors(list);
        let newer = self.newer_successor(told.predecessor, judge);
        self.guessing &= newer.is_some();
        newer
    }

    /// As [`ChordState::stabilize`] when the successor's list has not changed.
    pub fn newer_successor(&self, candidate: Option<Node>, judge: &Judge<'_>) -> Option<Node> {
        candidate.filter(|c| judge(c) != Verdict::Suspected && self.would_adopt(&c.id))
    }

    /// Whether a live node at `id` belongs before our first successor.
    pub fn would_adopt(&self, id: &NodeId) -> bool {
        let head = self.head().map_or(self.me.id, |h| h.id);
        self.joined && id.key().strictly_between(self.key(), head.key())
    }

    /// Zave's *stabilize from predecessor*: `candidate`, alive and checked, answered
    /// `told`, and becomes the first successor if it is nearer than the present one.
    pub fn adopt(&mut self, candidate: Node, told: &Told, judge: &Judge<'_>) -> bool {
        if !self.would_adopt(&candidate.id) {
            return false;
        }
        // A newcomer's list may be short: the present list continues it. The entries stay in
        // order, and nodes skipped now were skipped before.
        let mut rest = told.successors.clone();
        let end = self.reconcile(candidate, &rest, judge).last().map_or(candidate.id, |n| n.id);
        let beyond = self.distance(&end);
        rest.extend(self.successors.iter().filter(|n| self.distance(&n.id) > beyond));
        let list = self.reconcile(candidate, &rest, judge);
        self.set_successors(list);
        true
    }

    /// Zave's *rectify*, first half: `claimant`, alive and checked, takes this node for its
    /// successor.
    pub fn notified(&mut self, claimant: Node) -> Claim {
        if !self.joined || claimant.id == self.me.id {
            return Claim::Known;
        }
        if self.successors.is_empty() {
            self.set_successors(vec![claimant]);
        }
        match self.predecessor {
            // Another peer at the same address: no nearer.
            Some(present) if present.id == claimant.id && present.peer.id != claimant.peer.id => {
                Claim::Nearer(present)
            }
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

    /// Replaces each node by what `now` says: the same position of the same node at another
    /// address.
    pub(in crate::chord) fn replace(&mut self, now: &dyn Fn(&Node) -> Node) {
        self.fingers.replace(now);
        self.corroborated.iter_mut().for_each(|node| *node = now(node));
        self.set_predecessor(self.predecessor.map(|node| now(&node)));
        self.set_successors(self.successors.iter().map(now).collect());
    }

    /// Forgets every node that is `gone`: dead, or left. Returns whether one of them was a
    /// neighbour.
    pub fn forget(&mut self, gone: &dyn Fn(&Node) -> bool) -> bool {
        self.fingers.remove(gone);
        let was_predecessor = self.predecessor.is_some_and(|p| gone(&p));
        if was_predecessor {
            self.set_predecessor(None);
        }
        let mut list = self.successors.clone();
        list.retain(|n| !gone(n));
        let was_successor = list.len() != self.successors.len();
        let has_lost_all = was_successor && list.is_empty();
        self.set_successors(list);
        if has_lost_all {
            let others: Vec<Node> = self.fingers.nodes().chain(self.predecessor).collect();
            self.fall_back(&others);
        }
        was_predecessor || was_successor
    }

    /// A member whose successors are all gone goes on from the nearest of `others`, if
    /// there is any, and from there stabilisation walks back.
    pub fn fall_back(&mut self, others: &[Node]) {
        if self.joined && self.successors.is_empty() {
            let others = others.iter().filter(|n| n.id != self.me.id);
            let nearest = others.min_by_key(|n| self.distance(&n.id)).copied();
            self.guessing = nearest.is_some();
            self.set_successors(nearest.into_iter().collect());
        }
    }

    /// `leaver` leaves in good order and tells its surroundings: its predecessor and
    /// successor close the gap at once (Zave treats this as a failure, which is slower).
    /// `gone` are all the nodes that leave with it, among them itself.
    pub fn left(
        &mut self,
        leaver: &Node,
        told: &Told,
        gone: &dyn Fn(&Node) -> bool,
        judge: &Judge<'_>,
    ) {
        let was_head = self.head().is_some_and(|h| h.id == leaver.id);
        let was_predecessor = self.predecessor.is_some_and(|p| p.id == leaver.id);
        self.forget(gone);
        if was_head
            && let Some(head) = self.head()
            && told.successors.first().map(|n| n.id) == Some(head.id)
        {
            let list = self.reconcile(head, &told.successors[1..], judge);
            self.set_successors(list);
        }
        if was_predecessor
            && self.predecessor.is_none()
            && !self.successors.is_empty()
            && let Some(before) = told.predecessor
            && before.id != self.me.id
            && judge(&before) == Verdict::Welcome
        {
            self.set_predecessor(Some(before));
        }
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
    /// come around, or is nonsense), without suspects, as long as wanted. At a node that is
    /// not checked yet the present list goes on: nodes skipped now were skipped before.
    /// Corroborated nodes stand where they belong.
    fn reconcile(&self, head: Node, list: &[Node], judge: &Judge<'_>) -> Vec<Node> {
        let mut out = vec![head];
        let mut farthest = self.distance(&head.id);
        let mut waits = false;
        for node in list.iter().take(MAX_NODES) {
            let distance = self.distance(&node.id);
            if distance <= farthest {
                break;
            }
            match judge(node) {
                Verdict::Welcome => out.push(*node),
                Verdict::Suspected => {}
                Verdict::Unknown => {
                    waits = true;
                    break;
                }
            }
            farthest = distance;
        }
        if waits {
            out.extend(self.successors.iter().filter(|n| self.distance(&n.id) > farthest));
        }
        self.with_corroborated(out, judge)
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
        self.forget_unlisted();
    }

    pub(in crate::chord) fn set_epoch(&mut self, epoch: u64) {
        self.epoch = epoch;
    }

    pub(in crate::chord) fn set_length(&mut self, length: ListLength) {
        self.length = length;
    }

    /// Panics with a description if an invariant of the module does not hold.
    pub fn check_invariants(&self) {
        let me = self.me;
        if let Some((_, but_last)) = self.successors.split_last() {
            assert!(!self.length.is_full(&me.peer, but_last), "{me:?}: list longer than wanted");
        }
        let mut farthest = Key::MIN;
        for node in &self.successors {
            let distance = self.distance(&node.id);
            assert!(distance > farthest, "{me:?}: {node:?} is out of order in the list");
            farthest = distance;
        }
        for node in &self.corroborated {
            assert!(
                self.successors.contains(node),
                "{me:?}: {node:?} is corroborated and not listed"
            );
        }
        if let Some(before) = self.predecessor {
            assert!(before.id != me.id, "{me:?} is its own predecessor");
            assert!(!self.successors.is_empty(), "{me:?} has a predecessor but no successor");
        }
        for (exponent, node) in self.fingers.iter() {
            let distance = self.distance(&node.id);
            assert!(distance >= Key::power_of_two(exponent), "{me:?}: finger {exponent} too near");
        }
        assert!(self.joined || self.successors.is_empty(), "{me:?} knows a ring it is not on");
    }
}
