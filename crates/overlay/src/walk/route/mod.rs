//! One route to the root of a key: CFS Figure 5 (`lookup`) with Figure 3 (`preceding_node_list`).
//!
//! A route keeps the nodes it was told of, sorted by distance, and names the best one that was not
//! asked: first nodes said to be the key's root, nearest after the key first, then nodes before the
//! key. A dead or useless node therefore costs one question, and backtracking is taking the next
//! best. It ends when the root and enough of its successors have answered, or when no node is left
//! to ask.
//!
//! It makes no call: [`OneRoute::next`] returns the next action, and [`answers`] takes in answers.
//! Whether the root that it reached is believed is not decided here but by [`super::agreement`],
//! which takes it with [`OneRoute::take_reached`].

mod answers;
pub(super) mod selection;

use std::collections::{BTreeMap, BTreeSet};

use atoll_key::{Key, NodeId};
use atoll_net::Peer;

use super::memory::{Memory, Place};
use crate::Node;
use selection::{Selection, cost_secs};

/// After so many predecessors in a row the route is not stale by a newcomer or two: the
/// last one is asked for the way instead. A guess: bursts of eight joins were seen.
const MAX_NOT_ROOT: usize = 16;
/// After so many of them, from a root that was only guessed, the way is asked for first:
/// the guess stands far behind the key, and each step would lead back by one node. A guess.
const MAX_GUESSED_NOT_ROOT: usize = 2;
/// No node is guessed to be the root so many times farther from the key than nodes are from
/// each other. A guess: of roots, one in three thousand is.
const FARTHEST_GUESS: f64 = 8.0;
/// How often in a walk a node is told of failures and asked again. A guess.
const MAX_FAILURE_REPORTS: usize = 8;
/// So many nodes farther from the key are tried before the nearest guide is told of the failures:
/// that costs the guide a round of pings. A guess.
const MAX_BEHIND_GUIDE: usize = 2;
/// Where there are several routes, none takes more answers than this: liars can name each
/// other for ever. CFS lookups essentially never take above 10.
const MAX_ANSWERS_ON_ROUTE: usize = 24;
/// A route that led so often to roots that may be false is left for another, if a single
/// one is to be enough; the more patiently the more are wanted. A guess.
const MAX_DOUBTFUL: usize = 2;

/// How a walk without success ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum End {
    Absent,
    NoWay,
    GaveUp,
}

/// The next action of a search.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Next {
    Ask(Question),
    ReportFailures(Node, Vec<Peer>),
    End(End),
}

/// The next action of a route.
pub(super) enum OnRoute {
    Next(Next),
    /// Read this node's own table and [learn](OneRoute::learn) from it.
    ReadOwnTable,
    Ended(End),
}

/// A question to one node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Question {
    pub node: Node,
    /// Whether it is asked as the root, and not for the way.
    pub as_root: bool,
    /// Whether another node may be asked while it is waited for.
    pub hedged: bool,
}

/// One route: the state that is forgotten when another begins.
#[derive(Default)]
pub(super) struct OneRoute {
    answers: usize,
    /// Nodes before the key, by their distance to it.
    on_the_way: BTreeMap<Place, Node>,
    /// Nodes said to be the key's root or to follow it, by their distance after the key.
    roots: BTreeMap<Place, Node>,
    /// Those of them that were named together with others.
    listed: BTreeSet<Peer>,
    /// Nodes that gave directions, by their distance to the key.
    guides: BTreeMap<Key, Node>,
    /// The node that named each as its predecessor when asked as the root.
    named_by: BTreeMap<Peer, Node>,
    not_root: usize,
    /// Nodes that were only guessed to be the root, and those before them that were named as the
    /// root; how many these are, since a node last gave directions.
    guessed: BTreeSet<Peer>,
    guessed_not_root: usize,
    /// Those of them before which no node seems to live: the root, unless a node that knows the
    /// key's successors names a live one before them.
    guessed_root_claims: BTreeSet<Peer>,
    /// A node after so many `NotRoot`s, to be asked for the way before anything else.
    detour: Option<Node>,
    /// The root lies before this distance after the key: a live node there is not it.
    not_beyond: Option<Key>,
    /// How many nodes had failed when a guide was last told.
    reported: BTreeMap<Key, usize>,
    /// Questions to nodes farther from the key than the nearest guide, since it was
    /// last told of failures.
    asked_behind_guide: usize,
    /// The root at which the route ends.
    root: Option<Node>,
    /// The roots to which it led.
    reached: BTreeSet<NodeId>,
    /// How often a root was reached that may be false.
    doubtful: usize,
    /// A root that was just reached and is not judged yet.
    at_root: Option<Node>,
    /// Questions left for the root's successors, once the root has been reached.
    replicas_left: Option<usize>,
}

impl OneRoute {
    /// The root that the last answer led to, once.
    pub(super) fn take_reached(&mut self) -> Option<Node> {
        self.at_root.take()
    }

    /// Records that the route ends at this root; returns whether it did not before.
    pub(super) fn ends_at(&mut self, root: &Node) -> bool {
        self.reached.insert(root.id)
    }

    /// The root that was believed, if any.
    pub(super) fn root(&self) -> Option<Node> {
        self.root
    }

    /// Believes the root: the route ends once enough of its successors have answered.
    pub(super) fn accept_root(&mut self, root: Node) {
        self.root = Some(root);
    }

    /// Leaves alone a root that may be false, and goes on beside it.
    pub(super) fn pass_by_root(&mut self) {
        self.doubtful += 1;
        self.roots.clear();
        self.replicas_left = None;
    }

    /// Whether all answers wanted of the root and its successors have come.
    pub(super) fn has_asked_replicas(&self) -> bool {
        self.replicas_left == Some(0)
    }

    /// Whether this route is over, even if nodes are left to ask.
    pub(super) fn is_cut(&self, memory: &Memory<'_>) -> bool {
        let too_long = self.answers >= MAX_ANSWERS_ON_ROUTE
            || self.doubtful >= MAX_DOUBTFUL * memory.limits.confirm;
        self.replicas_left == Some(0) || (memory.limits.routes > 1 && too_long)
    }

    /// The next question, if there is one to a node that is not known to be silent.
    pub(super) fn forward(&mut self, memory: &mut Memory<'_>) -> Option<Next> {
        if let Some(node) = self.detour.take()
            && !memory.asked.contains(&(node.peer, false))
        {
            return Some(self.ask(memory, node, false));
        }
        let reached = self.replicas_left.is_some();
        if self.guessed_not_root > MAX_GUESSED_NOT_ROOT
            && !reached
            && let Some(next) = self.next_on_the_way(memory)
        {
            return Some(next);
        }
        if let Some(node) = self.next_root(memory) {
            return Some(self.ask(memory, node, true));
        }
        if reached { None } else { self.next_on_the_way(memory) }
    }

    fn ask(&mut self, memory: &mut Memory<'_>, node: Node, as_root: bool) -> Next {
        memory.asked.insert((node.peer, as_root));
        memory.questions += 1;
        // A node that names a list names all replicas, and the step decides how to ask them. The
        // root itself cannot be hedged: no other node is it.
        let is_unlisted = || !self.listed.contains(&node.peer);
        let any_will_do = || is_unlisted() || self.replicas_left.is_some();
        let hedged =
            memory.limits.hedge && (!as_root || (memory.limits.replicas > 0 && any_will_do()));
        Next::Ask(Question { node, as_root, hedged })
    }

    /// The nearest root named, or the nearest that is not avoided if any replica will do.
    fn next_root(&mut self, memory: &mut Memory<'_>) -> Option<Node> {
        let asked = &memory.asked;
        self.roots.retain(|_, node| !asked.contains(&(node.peer, true)));
        let any_of = memory.limits.replicas.max(1);
        let alive = || self.roots.iter().filter(|(_, node)| !memory.seems_dead(node));
        let trusted = alive().take(any_of).find(|(_, node)| !memory.is_avoided(node));
        let (at, node) = trusted.or_else(|| alive().next()).map(|(at, node)| (*at, *node))?;
        self.roots.remove(&at);
        Some(node)
    }

    /// The nearest root that left a call unanswered, if no other node is left and no root was
    /// reached. Of one that was, a replica that is silent is not asked: every lookup of a
    /// block that is lost would ask the dead again.
    fn silent_root(&mut self, memory: &mut Memory<'_>) -> Option<Next> {
        let standing = |(at, node): &(&Place, &Node)| (memory.standing(node), **at);
        let (at, node) = self.roots.iter().min_by_key(standing).map(|(at, n)| (*at, *n))?;
        self.roots.remove(&at);
        Some(self.ask(memory, node, true))
    }

    /// As [`OneRoute::silent_root`], of the nodes before the key.
    fn silent_guide(&mut self, memory: &mut Memory<'_>) -> Option<Next> {
        let standing = |(at, node): &(&Place, &Node)| (memory.standing(node), **at);
        let on_the_way = self.on_the_way.iter();
        let (at, node) = on_the_way.min_by_key(standing).map(|(at, node)| (*at, *node))?;
        self.on_the_way.remove(&at);
        Some(self.ask(memory, node, false))
    }

    /// The best node before the key: one nearer than the nearest guide, or else one behind
    /// it; nodes that lied of late last of all.
    fn next_on_the_way(&mut self, memory: &mut Memory<'_>) -> Option<Next> {
        let asked = &memory.asked;
        self.on_the_way.retain(|_, node| !asked.contains(&(node.peer, false)));
        let guide = self.guides.first_key_value().map(|(at, _)| *at);
        let ahead = guide.unwrap_or(Key::MAX);
        let alive = || {
            let all = self.on_the_way.iter();
            all.filter(|(_, node)| !memory.seems_dead(node)).map(|(at, node)| (*at, *node))
        };
        let trusted = || alive().filter(|(_, node)| !memory.is_avoided(node));
        let in_front = match memory.limits.selection {
            Selection::NearestKey => trusted().next().filter(|(at, _)| at.0 <= ahead),
            Selection::Cost => {
                let book = memory.overlay.peer_book();
                let nodes = memory.nodes / (memory.list_length / 2.0).max(1.0);
                let cost = |at: &Key, node: &Node| cost_secs(book, &node.peer.id, at, nodes);
                let costs = trusted().take_while(|(at, _)| at.0 <= ahead);
                let costs = costs.map(|(at, node)| (cost(&at.0, &node), at, node));
                costs.min_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, at, node)| (at, node))
            }
        };
        let (at, node) = in_front.or_else(|| trusted().next()).or_else(|| alive().next())?;
        if guide.is_some_and(|guide| guide < at.0) {
            // All that the nearest guide named is dead. One farther off may know others;
            // otherwise the guide has to be told (Figure 5's `alert`).
            self.asked_behind_guide += 1;
            if self.asked_behind_guide > MAX_BEHIND_GUIDE
                && let Some(report) = self.failure_report(memory)
            {
                return Some(report);
            }
        }
        self.on_the_way.remove(&at);
        Some(self.ask(memory, node, false))
    }

    /// Reports to the guide nearest to the key all nodes that failed since it last answered.
    fn failure_report(&mut self, memory: &mut Memory<'_>) -> Option<Next> {
        if memory.failure_reports >= MAX_FAILURE_REPORTS || !memory.limits.failure_reports {
            return None;
        }
        let dead = memory.dead.len() + memory.presumed_dead.len();
        let news = |at: &Key| self.reported.get(at).copied().unwrap_or(0) < dead;
        let at = *self.guides.keys().find(|at| news(at))?;
        self.reported.insert(at, dead);
        memory.failure_reports += 1;
        self.asked_behind_guide = 0;
        let dead = memory.presumed_dead.iter().chain(&memory.dead).copied().collect();
        Some(Next::ReportFailures(self.guides[&at], dead))
    }

    /// The next action of this route, or how it ended.
    pub(super) fn next(&mut self, memory: &mut Memory<'_>) -> OnRoute {
        let reached = self.replicas_left.is_some();
        let end = if reached { End::Absent } else { End::NoWay };
        if self.is_cut(memory) {
            return OnRoute::Ended(end);
        }
        if let Some(next) = self.forward(memory) {
            return OnRoute::Next(next);
        }
        if reached {
            return OnRoute::Ended(end);
        }
        // Every node of use has been asked: look again where failed nodes hid live ones, first in
        // this node's tables, then at the guide nearest to the key; then ask the silent.
        if memory.own_table.is_worth_reading(memory.dead.len()) {
            return OnRoute::ReadOwnTable;
        }
        let next = self
            .failure_report(memory)
            .or_else(|| self.silent_root(memory))
            .or_else(|| self.silent_guide(memory));
        next.map_or(OnRoute::Ended(end), OnRoute::Next)
    }

    /// The nodes after the root hold replicas: k answers besides the root's are wanted,
    /// each of another machine.
    pub(super) fn ask_replicas(&mut self, memory: &Memory<'_>) {
        let (mut places, mut answered) = (BTreeSet::new(), 0);
        self.roots.clear();
        for (at, node) in &memory.roots_known {
            if !places.insert(node.peer.id) {
                continue;
            }
            if !memory.asked.contains(&(node.peer, true)) {
                self.roots.insert(*at, *node);
            } else if places.len() <= memory.limits.replicas + 1 {
                answered += 1;
            }
        }
        self.replicas_left = Some((memory.limits.replicas + 1).saturating_sub(answered.max(1)));
    }
}
