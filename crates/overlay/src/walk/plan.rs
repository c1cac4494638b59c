//! The walker's memory and its choices: whom it was told of, whom it asked, whom it asks
//! next. No network.
//!
//! A walk is made of *routes*. A route ends when the root of the key is reached, or when
//! nobody is left to ask. Where a single route is enough, as in the paper, that is the end
//! of the walk. Otherwise an end without success is believed only if the root fits the
//! density of the ring ([`super::density`]) and as many routes have ended there as
//! [`WalkLimits::confirm`] says. Until then another route begins, from other nodes of this
//! node's own tables and never through a node that was asked before: liars on one route
//! are not on the next. What was learnt of the key's neighbourhood is kept, and the node
//! nearest after the key that claims to be the root is taken for it, whoever else claims
//! that. At the very end the k nearest nodes after the key found by all the routes
//! together have been asked.

mod answers;
mod verdict;

use std::collections::{BTreeMap, BTreeSet};

use atoll_env::Instant;
use atoll_key::{Key, NodeId, PeerId};
use atoll_net::Peer;

use super::selection::{LatencyClaim, Selection, cost_secs};
use super::{Trace, WalkLimits};
use crate::peer_book::{Misdeed, Standing};
use crate::{Node, Overlay, Route};

/// The longest root list believed: more than any replica set, less than a flood.
const MAX_ROOTS_TAKEN: usize = 64;
/// After so many predecessors in a row the route is not stale by a newcomer or two: the
/// last one is asked for the way instead. A guess: bursts of eight joins were seen.
const MAX_NOT_ROOT: usize = 16;
/// After so many of them, from a root that was only guessed, the way is asked for first:
/// the guess stands far behind the key, and each step would lead back by one node. A guess.
const MAX_GUESSED_NOT_ROOT: usize = 2;
/// Nobody is guessed to be the root so many times farther from the key than nodes are from
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
/// A guide that named so many dead nodes and no live one is scored for it. A guess.
const MANY_DEAD: usize = 3;

/// So many dead nodes of those that one node named count as having died lately.
const DEAD_BELIEVED: usize = 2;

/// The lists of others may be shorter than this node's by so much: they go on until they
/// hold enough different machines. A guess.
const SHORTER_LISTS: f64 = 0.7;

/// How a walk without success ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum End {
    Absent,
    NoWay,
    GaveUp,
}

/// What to do next.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Next {
    Ask(Question),
    ReportFailures(Node, Vec<Peer>),
    End(End),
}

/// What one node is asked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Question {
    pub node: Node,
    /// Whether it is asked as the root, and not for the way.
    pub as_root: bool,
    /// What was said of its latency.
    pub claim: Option<LatencyClaim>,
    /// Whether somebody else may be asked while it is waited for.
    pub hedged: bool,
}

/// Whether and when the walk looks into this node's own tables.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum OwnTable {
    /// This node is not on the ring that is walked.
    NotUsed,
    Unread,
    /// Read when so many nodes had failed; worth reading again after further failures.
    ReadAfterFailures(usize),
}

/// A node before the key that may be asked, and who named it; none if this node did.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    node: Node,
    claim: Option<LatencyClaim>,
}

/// A distance, and the node at it: of two peer addresses with one key, one may be false.
type Place = (Key, Peer);

/// See the module.
pub(super) struct Plan<'w> {
    key: Key,
    me: Node,
    overlay: &'w dyn Overlay,
    /// What the time was when the walker last looked.
    now: Instant,
    limits: WalkLimits,
    questions: usize,
    /// About how many nodes are on the ring.
    nodes: f64,
    /// How long successor lists are. As a rule half as many nodes before a root know it.
    list_length: f64,
    /// Who was asked which question. By peer: all virtual servers of a node know the same.
    /// By key and address: a false address must not stand in the way of the right one.
    asked: BTreeSet<(Peer, bool)>,
    /// Nodes that gave no answer or refused one.
    failed: BTreeSet<Peer>,
    /// Those of them that may be dead.
    dead: Vec<Peer>,
    /// Nodes that others named, and that left a call of this node unanswered of late.
    presumed_dead: BTreeSet<Peer>,
    /// Nodes that said they are the root, with the successors they told, or were found to be
    /// the first live one; by their distance after the key.
    root_claims: BTreeMap<Key, (Node, Option<Vec<Node>>)>,
    /// Nodes after the key that answered or were named.
    roots_known: BTreeMap<Place, Node>,
    /// Who named whom, to tell who is worth believing.
    named: BTreeMap<PeerId, Vec<Peer>>,
    misdeeds: Vec<(PeerId, Misdeed)>,
    failure_reports: usize,
    own_table: OwnTable,
    /// How often each claimed root was reached.
    reached: BTreeMap<NodeId, usize>,
    /// How many routes led to each.
    ends: BTreeMap<NodeId, usize>,
    /// Who named nodes as a key's root and its successors that are too far apart for that,
    /// and where the first of them is.
    doubted: Vec<(PeerId, Key)>,
    routes: usize,
    swept: bool,
    trace: Trace,
    route: RouteState,
}

/// What is forgotten when another route begins.
#[derive(Default)]
struct RouteState {
    answers: usize,
    /// Nodes before the key, by their distance to it.
    on_the_way: BTreeMap<Place, Candidate>,
    /// Nodes said to be the key's root or to follow it, by their distance after the key.
    roots: BTreeMap<Place, Node>,
    /// Those of them that were named together with others.
    listed: BTreeSet<Peer>,
    /// Nodes that gave directions, by their distance to the key.
    guides: BTreeMap<Key, Node>,
    /// Who named a node as its predecessor when asked as the root.
    named_by: BTreeMap<Peer, Node>,
    not_root: usize,
    /// Nodes that were only guessed to be the root, and those before them that were named for
    /// it; how many these are, since somebody last gave directions.
    guessed: BTreeSet<Peer>,
    guessed_not_root: usize,
    /// Those of them before whom nobody lives, as it seems: the root, if somebody who knows
    /// who follows the key names none before them that lives.
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
    /// Questions left for the root's successors, once the root has been reached.
    replicas_left: Option<usize>,
}

impl<'w> Plan<'w> {
    pub fn new(key: Key, overlay: &'w dyn Overlay, limits: WalkLimits) -> Plan<'w> {
        let neighbourhood = overlay.neighbourhood();
        Plan {
            key,
            me: neighbourhood.me,
            overlay,
            now: Instant::default(),
            limits,
            questions: 0,
            nodes: overlay.estimated_nodes(),
            list_length: neighbourhood.successors.len() as f64,
            asked: BTreeSet::new(),
            failed: BTreeSet::new(),
            dead: Vec::new(),
            presumed_dead: BTreeSet::new(),
            root_claims: BTreeMap::new(),
            roots_known: BTreeMap::new(),
            named: BTreeMap::new(),
            misdeeds: Vec::new(),
            failure_reports: 0,
            own_table: OwnTable::NotUsed,
            reached: BTreeMap::new(),
            ends: BTreeMap::new(),
            doubted: Vec::new(),
            routes: 1,
            swept: false,
            trace: Trace::default(),
            route: RouteState::default(),
        }
    }

    /// As [`Plan::new`], at this time.
    pub fn at(mut self, now: Instant) -> Plan<'w> {
        self.now = now;
        self
    }

    /// Time has passed.
    pub fn set_time(&mut self, now: Instant) {
        self.now = now;
    }

    /// Starts in this node's own tables, which say this.
    pub fn start_here(&mut self, route: &Route) {
        self.own_table = OwnTable::ReadAfterFailures(0);
        let me = self.me;
        self.learn(&me, route);
    }

    /// Starts at other nodes, and never asks or finds this one.
    pub fn start_elsewhere(&mut self, start: &[Node]) {
        self.asked.extend([(self.me.peer, false), (self.me.peer, true)]);
        for node in start {
            self.add_on_the_way(*node, None);
        }
    }

    /// Starts by asking the node that was the root before.
    pub fn start_at_root(&mut self, likely: Node) {
        self.add_root(likely);
        self.own_table = OwnTable::Unread;
    }

    /// Whether the ring that is walked is this node's own.
    pub fn is_on_own_ring(&self) -> bool {
        self.own_table != OwnTable::NotUsed
    }

    /// Whom to ask next, when nobody is waited for.
    pub fn next(&mut self) -> Next {
        loop {
            if self.questions >= self.limits.asks {
                let root_reached = !self.root_claims.is_empty();
                return Next::End(if root_reached { End::Absent } else { End::GaveUp });
            }
            let end = match self.next_on_route() {
                Ok(next) => return next,
                Err(end) => end,
            };
            if self.is_settled(end) {
                return Next::End(end);
            }
            if !self.begin_route() && !self.sweep() {
                let root_reached = !self.root_claims.is_empty();
                return Next::End(if root_reached { End::Absent } else { End::NoWay });
            }
        }
    }

    /// Whom to ask while answers are waited for that are overdue: whoever would be next if
    /// they never came, but no other route is begun.
    pub fn another(&mut self) -> Option<Next> {
        if self.questions >= self.limits.asks || self.is_cut() {
            return None;
        }
        self.forward()
    }

    /// What this route has left to ask, or how it ended.
    fn next_on_route(&mut self) -> Result<Next, End> {
        let reached = self.route.replicas_left.is_some();
        let end = if reached { End::Absent } else { End::NoWay };
        if self.is_cut() {
            return Err(end);
        }
        if let Some(next) = self.forward() {
            return Ok(next);
        }
        if reached {
            return Err(end);
        }
        self.backtrack()
            .or_else(|end| self.silent_root().or_else(|| self.silent_guide()).ok_or(end))
    }

    /// Whether this route is over, whoever is left to ask.
    fn is_cut(&self) -> bool {
        let too_long = self.route.answers >= MAX_ANSWERS_ON_ROUTE
            || self.route.doubtful >= MAX_DOUBTFUL * self.limits.confirm;
        self.route.replicas_left == Some(0) || (self.limits.routes > 1 && too_long)
    }

    /// The next question, if there is one to a node that is not known to be silent.
    fn forward(&mut self) -> Option<Next> {
        if let Some(node) = self.route.detour.take()
            && !self.asked.contains(&(node.peer, false))
        {
            return Some(self.ask(node, false, None));
        }
        let reached = self.route.replicas_left.is_some();
        if self.route.guessed_not_root > MAX_GUESSED_NOT_ROOT
            && !reached
            && let Some(next) = self.next_on_the_way()
        {
            return Some(next);
        }
        if let Some(node) = self.next_root() {
            return Some(self.ask(node, true, None));
        }
        if reached { None } else { self.next_on_the_way() }
    }

    fn ask(&mut self, node: Node, as_root: bool, claim: Option<LatencyClaim>) -> Next {
        self.asked.insert((node.peer, as_root));
        self.questions += 1;
        // Who names a list names all replicas, and how best to ask them is the step's
        // business. The root itself cannot be hedged: nobody else is it.
        let is_nobodys_root = || !self.route.listed.contains(&node.peer);
        let any_will_do = || is_nobodys_root() || self.route.replicas_left.is_some();
        let hedged = self.limits.hedge && (!as_root || (self.limits.replicas > 0 && any_will_do()));
        Next::Ask(Question { node, as_root, claim, hedged })
    }

    /// The nearest root named, or the nearest that is not avoided if any replica will do.
    fn next_root(&mut self) -> Option<Node> {
        let asked = &self.asked;
        self.route.roots.retain(|_, node| !asked.contains(&(node.peer, true)));
        let any_of = self.limits.replicas.max(1);
        let alive = || self.route.roots.iter().filter(|(_, node)| !self.seems_dead(node));
        let trusted = alive().take(any_of).find(|(_, node)| !self.is_avoided(node));
        let (at, node) = trusted.or_else(|| alive().next()).map(|(at, node)| (*at, *node))?;
        self.route.roots.remove(&at);
        Some(node)
    }

    /// The nearest root that left a call unanswered, if nobody else is left and none was
    /// reached. Of one that was, a replica that is silent is not asked: every lookup of a
    /// block that is lost would ask the dead again.
    fn silent_root(&mut self) -> Option<Next> {
        let standing = |(at, node): &(&Place, &Node)| (self.standing(node), **at);
        let (at, node) = self.route.roots.iter().min_by_key(standing).map(|(at, n)| (*at, *n))?;
        self.route.roots.remove(&at);
        Some(self.ask(node, true, None))
    }

    /// As [`Plan::silent_root`], of the nodes before the key.
    fn silent_guide(&mut self) -> Option<Next> {
        let standing = |(at, c): &(&Place, &Candidate)| (self.standing(&c.node), **at);
        let on_the_way = self.route.on_the_way.iter();
        let (at, candidate) = on_the_way.min_by_key(standing).map(|(at, c)| (*at, *c))?;
        self.route.on_the_way.remove(&at);
        Some(self.ask(candidate.node, false, candidate.claim))
    }

    /// The best node before the key: one nearer than the nearest guide, or else one behind
    /// it; those who lied of late last of all.
    fn next_on_the_way(&mut self) -> Option<Next> {
        let asked = &self.asked;
        self.route.on_the_way.retain(|_, c| !asked.contains(&(c.node.peer, false)));
        let guide = self.route.guides.first_key_value().map(|(at, _)| *at);
        let ahead = guide.unwrap_or(Key::MAX);
        let alive = || {
            let all = self.route.on_the_way.iter();
            all.filter(|(_, c)| !self.seems_dead(&c.node)).map(|(at, c)| (*at, *c))
        };
        let trusted = || alive().filter(|(_, c)| !self.is_avoided(&c.node));
        let in_front = match self.limits.selection {
            Selection::NearestKey => trusted().next().filter(|(at, _)| at.0 <= ahead),
            Selection::Cost => {
                let book = self.overlay.peer_book();
                let nodes = self.nodes / (self.list_length / 2.0).max(1.0);
                let cost =
                    |at: &Key, c: &Candidate| cost_secs(book, &c.node.peer.id, c.claim, at, nodes);
                let costs = trusted().take_while(|(at, _)| at.0 <= ahead);
                let costs = costs.map(|(at, c)| (cost(&at.0, &c), at, c));
                costs.min_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, at, c)| (at, c))
            }
        };
        let (at, candidate) = in_front.or_else(|| trusted().next()).or_else(|| alive().next())?;
        if guide.is_some_and(|guide| guide < at.0) {
            // All that the nearest guide named is dead. One farther off may know others;
            // otherwise the guide has to be told (Figure 5's `alert`).
            self.route.asked_behind_guide += 1;
            if self.route.asked_behind_guide > MAX_BEHIND_GUIDE
                && let Some(report) = self.failure_report()
            {
                return Some(report);
            }
        }
        self.route.on_the_way.remove(&at);
        Some(self.ask(candidate.node, false, candidate.claim))
    }

    /// Reports to the guide nearest to the key all nodes that failed since it last answered.
    fn failure_report(&mut self) -> Option<Next> {
        if self.failure_reports >= MAX_FAILURE_REPORTS || !self.overlay.mechanisms().warnings {
            return None;
        }
        let dead = self.dead.len() + self.presumed_dead.len();
        let news = |at: &Key| self.route.reported.get(at).copied().unwrap_or(0) < dead;
        let at = *self.route.guides.keys().find(|at| news(at))?;
        self.route.reported.insert(at, dead);
        self.failure_reports += 1;
        self.route.asked_behind_guide = 0;
        let dead = self.presumed_dead.iter().chain(&self.dead).copied().collect();
        Some(Next::ReportFailures(self.route.guides[&at], dead))
    }

    /// Everybody of use has been asked: look again where failed nodes hid live ones,
    /// first here, then at the guide nearest to the key.
    fn backtrack(&mut self) -> Result<Next, End> {
        let read_again = match self.own_table {
            OwnTable::NotUsed => false,
            OwnTable::Unread => true,
            OwnTable::ReadAfterFailures(then) => then < self.dead.len(),
        };
        if read_again {
            self.own_table = OwnTable::ReadAfterFailures(self.dead.len());
            let route = self.overlay.route(&self.key, false);
            let me = self.me;
            self.learn(&me, &route);
            return self.next_on_route();
        }
        self.failure_report().ok_or(End::NoWay)
    }

    // --- who is worth asking ----------------------------------------------------------

    /// Whether this node has lied so often of late that others are asked first.
    fn is_avoided(&self, node: &Node) -> bool {
        self.overlay.peer_book().is_avoided(&node.peer.id, self.now)
    }

    fn standing(&self, node: &Node) -> Standing {
        self.overlay.peer_book().standing(&node.peer, self.now)
    }

    /// Whether a call to the node was left unanswered of late, by this walk or another, so
    /// that it is as if it were not there while others are. Who is merely slow still is the
    /// root, if the root is what is looked for.
    fn seems_dead(&self, node: &Node) -> bool {
        match self.standing(node) {
            Standing::Answers => false,
            Standing::Late => self.limits.replicas > 0,
            Standing::Silent => true,
        }
    }

    /// A guide has checked the nodes reported to it.
    pub fn allow_asking_again(&mut self, guide: Node) {
        self.asked.remove(&(guide.peer, false));
        self.add_on_the_way(guide, None);
    }

    // --- routes -----------------------------------------------------------------------

    /// Begins another route at nodes known here that were not asked yet: those before the
    /// key if possible, the nearest first.
    fn begin_route(&mut self) -> bool {
        if self.routes >= self.limits.routes || self.own_table == OwnTable::NotUsed {
            return false;
        }
        let mut starts = self.overlay.known_nodes();
        starts.retain(|node| {
            node.peer.id != self.me.peer.id
                && !self.asked.contains(&(node.peer, false))
                && !self.failed.contains(&node.peer)
        });
        let worth = |node: &Node| (self.seems_dead(node), self.is_avoided(node));
        if let Some(best) = starts.iter().map(worth).min() {
            starts.retain(|node| worth(node) == best);
        }
        if starts.is_empty() {
            return false;
        }
        self.routes += 1;
        self.route = RouteState::default();
        self.own_table = OwnTable::ReadAfterFailures(self.dead.len());
        for node in starts {
            self.add_on_the_way(node, None);
        }
        true
    }

    /// Has those of the k nearest nodes after the key asked that have not been. Once.
    fn sweep(&mut self) -> bool {
        if self.swept || self.limits.replicas == 0 || self.roots_known.is_empty() {
            return false;
        }
        self.swept = true;
        self.route = RouteState::default();
        self.ask_replicas();
        self.route.replicas_left != Some(0)
    }

    /// The root has been reached: its successors are asked, as far as they have not been.
    /// A root that may be false is left alone, and the route goes on beside it.
    fn reached(&mut self, root: Node) {
        *self.reached.entry(root.id).or_default() += 1;
        if self.route.reached.insert(root.id) {
            *self.ends.entry(root.id).or_default() += 1;
        }
        if self.limits.routes > 1 && !self.is_plausible(self.doubt(&root)) {
            self.route.doubtful += 1;
            self.route.roots.clear();
            return;
        }
        self.ask_replicas();
        if self.limits.routes > 1
            && self.route.replicas_left == Some(0)
            && self.limits.replicas > 0
            && !self.is_certain(&root)
        {
            // Nothing new, and not enough: whoever led here may be one liar more.
            self.route.doubtful += 1;
            self.route.roots.clear();
            self.route.replicas_left = None;
        } else {
            self.route.root = Some(root);
        }
    }

    /// The nodes after the root hold replicas: k answers besides the root's are wanted,
    /// each of another machine.
    fn ask_replicas(&mut self) {
        let (mut places, mut answered) = (BTreeSet::new(), 0);
        self.route.roots.clear();
        for (at, node) in &self.roots_known {
            if !places.insert(node.peer.id) {
                continue;
            }
            if !self.asked.contains(&(node.peer, true)) {
                self.route.roots.insert(*at, *node);
            } else if places.len() <= self.limits.replicas + 1 {
                answered += 1;
            }
        }
        self.route.replicas_left = Some((self.limits.replicas + 1).saturating_sub(answered.max(1)));
    }
}
