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

use std::collections::{BTreeMap, BTreeSet};

use atoll_env::Instant;
use atoll_key::{Key, NodeId, PeerId};
use atoll_net::{CallError, Peer};

use super::density::{Doubt, is_plausible};
use super::selection::{Report, Selection, cost_secs};
use super::{Asked, Said, Step, Trace, WalkError, WalkLimits};
use crate::peer_book::{Misdeed, PeerBook};
use crate::{Node, Overlay, Route};

/// The longest root list believed: more than any replica set, less than a flood.
const MAX_ROOTS_TAKEN: usize = 64;
/// After so many predecessors in a row the route is not stale by a newcomer or two: the
/// last one is asked for the way instead. A guess: bursts of eight joins were seen.
const MAX_BACKS: usize = 16;
/// How often in a walk a node is warned and asked again. A guess.
const MAX_WARNINGS: usize = 8;
/// So many nodes farther from the key are tried before the nearest guide is warned: a
/// warning costs the guide a round of pings. A guess.
const MAX_BEHIND_GUIDE: usize = 2;
/// Where there are several routes, none asks more questions than this: liars can name
/// each other for ever. CFS lookups essentially never take above 10.
const MAX_ASKS_ON_ROUTE: usize = 24;
/// A guide that named so many dead nodes and no live one is scored for it. A guess.
const MANY_DEAD: usize = 3;

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
    /// Ask this node, as the root or for the way; what was said of its latency.
    Ask(Node, bool, Option<Report>),
    Warn(Node, Vec<Peer>),
    End(End),
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
    report: Option<Report>,
}

/// See the module.
pub(super) struct Plan {
    key: Key,
    me: Node,
    limits: WalkLimits,
    /// About how many nodes are on the ring.
    nodes: f64,
    /// Who was asked which question. By peer: all virtual servers of a node know the same.
    asked: BTreeSet<(PeerId, bool)>,
    /// Nodes that gave no answer or refused one.
    failed: BTreeSet<PeerId>,
    /// Those of them that may be dead.
    dead: Vec<Peer>,
    /// Nodes that said they are the root, or were found to be the first live one, by their
    /// distance after the key, with the successors they told.
    claims: BTreeMap<Key, (Node, Vec<Node>)>,
    /// Nodes after the key that answered or were named.
    roots_known: BTreeMap<Key, Node>,
    /// Who named whom, to tell who is worth believing.
    named: BTreeMap<PeerId, Vec<PeerId>>,
    misdeeds: Vec<(PeerId, Misdeed)>,
    warnings: usize,
    own_table: OwnTable,
    /// How many routes ended at each claimed root.
    ends: BTreeMap<NodeId, usize>,
    routes: usize,
    swept: bool,
    trace: Trace,
    route: RouteState,
}

/// What is forgotten when another route begins.
#[derive(Default)]
struct RouteState {
    asks: usize,
    /// Nodes before the key, by their distance to it.
    on_the_way: BTreeMap<Key, Candidate>,
    /// Nodes said to be the key's root or to follow it, by their distance after the key.
    roots: BTreeMap<Key, Node>,
    /// Nodes that gave directions, by their distance to the key.
    guides: BTreeMap<Key, Node>,
    /// Who named a node as its predecessor when asked as the root.
    named_by: BTreeMap<PeerId, Node>,
    backs: usize,
    /// A node after so many `Back`s, to be asked for the way before anything else.
    detour: Option<Node>,
    /// The root lies before this distance after the key: a live node there is not it.
    not_beyond: Option<Key>,
    /// How many nodes had failed when a guide was last warned.
    warned: BTreeMap<Key, usize>,
    /// Questions to nodes farther from the key than the nearest guide, since it was
    /// last warned.
    asked_behind_guide: usize,
    /// The root that was reached.
    root: Option<Node>,
    /// Questions left for the root's successors, once the root has been reached.
    replicas_left: Option<usize>,
}

impl Plan {
    pub fn new(key: Key, overlay: &dyn Overlay, limits: WalkLimits) -> Plan {
        Plan {
            key,
            me: overlay.neighbourhood().me,
            limits,
            nodes: overlay.estimated_nodes(),
            asked: BTreeSet::new(),
            failed: BTreeSet::new(),
            dead: Vec::new(),
            claims: BTreeMap::new(),
            roots_known: BTreeMap::new(),
            named: BTreeMap::new(),
            misdeeds: Vec::new(),
            warnings: 0,
            own_table: OwnTable::NotUsed,
            ends: BTreeMap::new(),
            routes: 1,
            swept: false,
            trace: Trace::default(),
            route: RouteState::default(),
        }
    }

    /// Starts in this node's own tables, which say this.
    pub fn start_here(&mut self, route: &Route) {
        self.own_table = OwnTable::ReadAfterFailures(0);
        let me = self.me;
        self.learn(&me, route);
    }

    /// Starts at other nodes, and never asks or finds this one.
    pub fn start_elsewhere(&mut self, start: &[Node]) {
        self.asked.extend([(self.me.peer.id, false), (self.me.peer.id, true)]);
        for node in start {
            self.add_on_the_way(*node, None);
        }
    }

    /// Starts by asking the node that was the root before.
    pub fn start_at_root(&mut self, likely: Node) {
        self.add_root(likely);
        self.own_table = OwnTable::Unread;
    }

    /// Whom to ask next.
    pub fn next(&mut self, overlay: &dyn Overlay, now: Instant) -> Next {
        loop {
            if self.trace.0.len() >= self.limits.asks {
                let root_reached = !self.claims.is_empty();
                return Next::End(if root_reached { End::Absent } else { End::GaveUp });
            }
            let end = match self.next_on_route(overlay, now) {
                Ok(next) => return next,
                Err(end) => end,
            };
            if self.is_settled(end) {
                return Next::End(end);
            }
            if !self.begin_route(overlay, now) && !self.sweep() {
                let root_reached = !self.claims.is_empty();
                return Next::End(if root_reached { End::Absent } else { End::NoWay });
            }
        }
    }

    /// What this route has left to ask, or how it ended.
    fn next_on_route(&mut self, overlay: &dyn Overlay, now: Instant) -> Result<Next, End> {
        let book = overlay.peer_book();
        let reached = self.route.replicas_left.is_some();
        let end = if reached { End::Absent } else { End::NoWay };
        let cut = self.limits.routes > 1 && self.route.asks >= MAX_ASKS_ON_ROUTE;
        if self.route.replicas_left == Some(0) || cut {
            return Err(end);
        }
        if let Some(node) = self.route.detour.take()
            && self.asked.insert((node.peer.id, false))
        {
            return Ok(Next::Ask(node, false, None));
        }
        if let Some(node) = self.next_root(book, now) {
            return Ok(Next::Ask(node, true, None));
        }
        if reached {
            return Err(end);
        }
        if let Some(next) = self.next_on_the_way(overlay, now) {
            return Ok(next);
        }
        self.backtrack(overlay, now)
    }

    /// The nearest root named, or the nearest that is not avoided if any replica will do.
    fn next_root(&mut self, book: &PeerBook, now: Instant) -> Option<Node> {
        let asked = &self.asked;
        self.route.roots.retain(|_, node| !asked.contains(&(node.peer.id, true)));
        let any_of = self.limits.replicas.max(1);
        let nearest = self.route.roots.iter().take(any_of);
        let trusted = nearest.map(|(at, n)| (*at, n)).find(|(_, n)| !is_avoided(book, n, now));
        let at = trusted.map(|(at, _)| at).or_else(|| self.route.roots.keys().next().copied())?;
        let node = self.route.roots.remove(&at)?;
        self.asked.insert((node.peer.id, true));
        Some(node)
    }

    /// The best node before the key: one nearer than the nearest guide, or else one behind
    /// it; those who lied of late last of all.
    fn next_on_the_way(&mut self, overlay: &dyn Overlay, now: Instant) -> Option<Next> {
        let book = overlay.peer_book();
        let asked = &self.asked;
        self.route.on_the_way.retain(|_, c| !asked.contains(&(c.node.peer.id, false)));
        let guide = self.route.guides.first_key_value().map(|(at, _)| *at);
        let ahead = guide.unwrap_or(Key::MAX);
        let trusted = || {
            let all = self.route.on_the_way.iter();
            all.filter(|(_, c)| !is_avoided(book, &c.node, now)).map(|(at, c)| (*at, *c))
        };
        let in_front = match self.limits.selection {
            Selection::NearestKey => trusted().next().filter(|(at, _)| *at <= ahead),
            Selection::Cost => {
                let cost = |at: &Key, c: &Candidate| {
                    cost_secs(book, &c.node.peer.id, c.report, at, self.nodes)
                };
                let costs = trusted().take_while(|(at, _)| *at <= ahead);
                let costs = costs.map(|(at, c)| (cost(&at, &c), at, c));
                costs.min_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, at, c)| (at, c))
            }
        };
        let any = || self.route.on_the_way.iter().next().map(|(at, c)| (*at, *c));
        let (at, candidate) = in_front.or_else(|| trusted().next()).or_else(any)?;
        if guide.is_some_and(|guide| guide < at) {
            // All that the nearest guide named is dead. One farther off may know others;
            // otherwise the guide has to be told (Figure 5's `alert`).
            self.route.asked_behind_guide += 1;
            if self.route.asked_behind_guide > MAX_BEHIND_GUIDE
                && let Some(warning) = self.warning()
            {
                return Some(warning);
            }
        }
        self.route.on_the_way.remove(&at);
        self.asked.insert((candidate.node.peer.id, false));
        Some(Next::Ask(candidate.node, false, candidate.report))
    }

    /// Warns the guide nearest to the key of all that failed since it last answered.
    fn warning(&mut self) -> Option<Next> {
        if self.warnings >= MAX_WARNINGS {
            return None;
        }
        let news = |at: &Key| self.route.warned.get(at).copied().unwrap_or(0) < self.dead.len();
        let at = *self.route.guides.keys().find(|at| news(at))?;
        self.route.warned.insert(at, self.dead.len());
        self.warnings += 1;
        self.route.asked_behind_guide = 0;
        Some(Next::Warn(self.route.guides[&at], self.dead.clone()))
    }

    /// Everything known has been asked: look again where failed nodes hid live ones,
    /// first here, then at the guide nearest to the key.
    fn backtrack(&mut self, overlay: &dyn Overlay, now: Instant) -> Result<Next, End> {
        let read_again = match self.own_table {
            OwnTable::NotUsed => false,
            OwnTable::Unread => true,
            OwnTable::ReadAfterFailures(then) => then < self.dead.len(),
        };
        if read_again {
            self.own_table = OwnTable::ReadAfterFailures(self.dead.len());
            let route = overlay.route(&self.key, false);
            let me = self.me;
            self.learn(&me, &route);
            return self.next_on_route(overlay, now);
        }
        self.warning().ok_or(End::NoWay)
    }

    /// A guide has checked the nodes it was warned of.
    pub fn may_ask_again(&mut self, guide: Node) {
        self.asked.remove(&(guide.peer.id, false));
        self.add_on_the_way(guide, None);
    }

    // --- routes -----------------------------------------------------------------------

    /// Whether a route that ended like this ends the walk.
    fn is_settled(&mut self, end: End) -> bool {
        if self.limits.routes <= 1 || self.swept {
            return true;
        }
        let Some(root) = self.route.root.filter(|_| end == End::Absent) else { return false };
        let agreeing = self.ends.entry(root.id).or_default();
        *agreeing += 1;
        let agreeing = *agreeing;
        // A nearer claim of another route goes before this one.
        let nearest = self.claims.values().next().map(|(node, _)| node.id);
        let doubt = if self.limits.confirm > 1 { Doubt::Much } else { Doubt::Little };
        agreeing >= self.limits.confirm.max(1)
            && nearest == Some(root.id)
            && self.is_plausible(doubt)
    }

    /// Whether the nodes known after the key may be all there are.
    fn is_plausible(&self, doubt: Doubt) -> bool {
        let distances: Vec<f64> = self.roots_known.keys().map(Key::as_fraction).collect();
        is_plausible(&distances, self.nodes, doubt)
    }

    /// Begins another route at nodes known here that were not asked yet: those before the
    /// key if possible, the nearest first.
    fn begin_route(&mut self, overlay: &dyn Overlay, now: Instant) -> bool {
        if self.routes >= self.limits.routes || self.own_table == OwnTable::NotUsed {
            return false;
        }
        let mut starts = overlay.acquaintances();
        starts.retain(|node| {
            node.peer.id != self.me.peer.id
                && !self.asked.contains(&(node.peer.id, false))
                && !self.failed.contains(&node.peer.id)
        });
        let trusted = |node: &&Node| !is_avoided(overlay.peer_book(), node, now);
        if starts.iter().any(|node| trusted(&node)) {
            starts.retain(|node| trusted(&node));
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
    /// A root that may be false is left alone until another route has been tried.
    fn reached(&mut self, root: Node) {
        self.route.root = Some(root);
        if self.limits.routes > 1 && !self.is_plausible(Doubt::Little) {
            self.route.replicas_left = Some(0);
        } else {
            self.ask_replicas();
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
            if !self.asked.contains(&(node.peer.id, true)) {
                self.route.roots.insert(*at, *node);
            } else if places.len() <= self.limits.replicas + 1 {
                answered += 1;
            }
        }
        self.route.replicas_left = Some((self.limits.replicas + 1).saturating_sub(answered.max(1)));
    }

    // --- answers ----------------------------------------------------------------------

    /// Takes in an answer; returns the value if that was the end of the search.
    pub fn answered<T>(
        &mut self,
        node: Node,
        as_root: bool,
        answer: Result<Step<T>, CallError>,
    ) -> Option<T> {
        let mut value = None;
        let in_replicas = self.route.replicas_left.is_some();
        let said = match answer {
            Ok(Step::Done(done)) => {
                value = Some(done);
                Said::Done
            }
            Ok(Step::Absent(successors)) => self.claimed(node, successors),
            Ok(Step::Route(Route::Root(mut list)))
                if list.first().is_some_and(|root| root.peer.id == node.peer.id) =>
            {
                let root = list.remove(0);
                self.claimed(root, list)
            }
            Ok(Step::Route(_)) if in_replicas => Said::Absent,
            Ok(Step::Route(Route::Back(nearer))) if as_root => self.back(&node, nearer),
            Ok(Step::Route(route)) => self.learn(&node, &route),
            Err(error) => {
                self.no_answer(&node, &error);
                Said::Failed(error)
            }
        };
        if in_replicas && !matches!(said, Said::Failed(_)) {
            self.route.replicas_left = self.route.replicas_left.map(|left| left.saturating_sub(1));
        }
        self.route.asks += 1;
        let local = node.peer.id == self.me.peer.id;
        self.trace.0.push(Asked { node, as_root, local, said });
        value
    }

    fn no_answer(&mut self, node: &Node, error: &CallError) {
        self.failed.insert(node.peer.id);
        if error.is_failure_of_peer() {
            self.dead.push(node.peer);
        }
        self.roots_known.retain(|_, known| known.peer.id != node.peer.id);
        if let Some(after) = self.route.named_by.remove(&node.peer.id) {
            // The node that named it is the first live successor.
            self.claimed(after, Vec::new());
        }
    }

    /// A node says that it is the root and does not have it, or turns out to be the root.
    fn claimed(&mut self, node: Node, successors: Vec<Node>) -> Said {
        let at = self.distance_after(&node);
        self.roots_known.insert(at, node);
        for successor in successors.iter().take(MAX_ROOTS_TAKEN) {
            self.add_root(*successor);
        }
        self.claims.insert(at, (node, successors));
        if self.route.replicas_left.is_none() {
            self.reached(node);
        }
        Said::Absent
    }

    /// A node asked as the root names its predecessor instead.
    fn back(&mut self, node: &Node, nearer: Node) -> Said {
        if self.failed.contains(&nearer.peer.id) {
            // It believes in a node that has failed: it is the first live successor.
            return self.claimed(*node, Vec::new());
        }
        let here = self.distance_after(node);
        if self.distance_after(&nearer) >= here {
            return Said::Nowhere; // That leads away from the key.
        }
        // The root is no farther than `nearer`; who comes after this node matters again
        // only if `nearer` has failed.
        self.roots_known.insert(here, *node);
        let bound = self.route.not_beyond.map_or(here, |bound| bound.min(here));
        self.route.not_beyond = Some(bound);
        self.route.roots.retain(|at, _| *at < here);
        if !self.asked.contains(&(nearer.peer.id, true)) {
            self.route.named_by.insert(nearer.peer.id, *node);
            self.route.backs += 1;
            if self.route.backs > MAX_BACKS {
                self.route.detour = Some(nearer);
            } else {
                self.add_root(nearer);
            }
        } else if self.claims.contains_key(&self.distance_after(&nearer)) {
            self.reached(nearer);
        }
        Said::Back(nearer)
    }

    /// Takes in directions given by `guide`.
    fn learn(&mut self, guide: &Node, route: &Route) -> Said {
        let said = match route {
            Route::Root(list) => self.root_named(list),
            Route::Closer(leads) => {
                let nearer = |n: &Node| n.id.key().strictly_between(guide.id.key(), &self.key);
                let leads = leads.iter().filter(|lead| nearer(&lead.node));
                let leads: Vec<_> = leads.take(crate::MAX_CLOSER).copied().collect();
                let namer = guide.peer.id;
                self.named.insert(namer, leads.iter().map(|lead| lead.node.peer.id).collect());
                for lead in &leads {
                    let report = lead.latency.map(|latency| Report { namer, latency });
                    self.add_on_the_way(lead.node, report);
                }
                if leads.is_empty() { Said::Nowhere } else { Said::Closer(leads.len()) }
            }
            Route::Back(nearer) => {
                self.add_root(*nearer);
                Said::Back(*nearer)
            }
            Route::Nowhere => Said::Nowhere,
        };
        if guide.peer.id == self.me.peer.id {
            return said;
        }
        if said == Said::Nowhere {
            if !matches!(route, Route::Nowhere) {
                self.misdeeds.push((guide.peer.id, Misdeed::LedInCircles));
            }
        } else {
            self.route.guides.insert(self.distance_before(guide), *guide);
        }
        said
    }

    fn root_named(&mut self, list: &[Node]) -> Said {
        for node in list.iter().take(MAX_ROOTS_TAKEN) {
            self.add_root(*node);
        }
        let Some(root) = list.first() else { return Said::Nowhere };
        // Another route has been there already: this one agrees.
        let first = list.iter().find(|node| !self.failed.contains(&node.peer.id));
        if let Some(first) = first
            && self.claims.contains_key(&self.distance_after(first))
            && self.route.replicas_left.is_none()
        {
            self.reached(*first);
        }
        Said::Root(*root)
    }

    fn add_on_the_way(&mut self, node: Node, report: Option<Report>) {
        let peer = node.peer.id;
        if peer != self.me.peer.id
            && !self.failed.contains(&peer)
            && !self.asked.contains(&(peer, false))
        {
            let at = self.distance_before(&node);
            self.route.on_the_way.insert(at, Candidate { node, report });
        }
    }

    fn add_root(&mut self, node: Node) {
        if self.failed.contains(&node.peer.id) {
            return;
        }
        let at = self.distance_after(&node);
        self.roots_known.insert(at, node);
        let beyond = self.route.not_beyond.is_some_and(|bound| at >= bound);
        let matters = self.route.replicas_left.is_some() || !beyond;
        if matters && !self.asked.contains(&(node.peer.id, true)) {
            self.route.roots.insert(at, node);
        }
    }

    fn distance_before(&self, node: &Node) -> Key {
        self.key.distance_from(node.id.key())
    }

    fn distance_after(&self, node: &Node) -> Key {
        node.id.key().distance_from(&self.key)
    }

    // --- the end ----------------------------------------------------------------------

    /// What this walk has caught its witnesses at. `found`: who had what was looked for,
    /// and whether it was asked as the root.
    pub fn misdeeds(&self, found: Option<(Node, bool)>) -> Vec<(PeerId, Misdeed)> {
        let mut misdeeds = self.misdeeds.clone();
        if let Some((holder, true)) = found {
            let at = self.distance_after(&holder);
            let denied = self.trace.0.iter().filter(|a| {
                !a.local && a.said == Said::Absent && self.distance_after(&a.node) < at
            });
            misdeeds.extend(denied.map(|a| (a.node.peer.id, Misdeed::DeniedBlock)));
            let false_roots = self
                .claims
                .range(at..)
                .filter(|(_, (node, told))| !told.is_empty() && node.peer.id != holder.peer.id);
            misdeeds.extend(false_roots.map(|(_, (node, _))| (node.peer.id, Misdeed::FalseRoot)));
        }
        for (namer, named) in &self.named {
            let is_dead = |id: &&PeerId| self.dead.iter().any(|peer| peer.id == **id);
            let dead = named.iter().filter(is_dead).count();
            let alive =
                named.iter().filter(|id| self.asked.contains(&(**id, false))).count() - dead;
            if dead >= MANY_DEAD && alive == 0 && *namer != self.me.peer.id {
                misdeeds.push((*namer, Misdeed::NamedDead));
            }
        }
        misdeeds
    }

    /// All that was asked.
    pub fn into_trace(self) -> Trace {
        self.trace
    }

    /// The error of a walk that ended like this.
    pub fn into_error(mut self, end: End) -> WalkError {
        let (key, trace) = (self.key, std::mem::take(&mut self.trace));
        match end {
            End::Absent => WalkError::Absent { key, roots: self.root_list(), trace },
            End::NoWay => WalkError::NoWay { key, trace },
            End::GaveUp => WalkError::GaveUp { key, trace },
        }
    }

    /// The root, which is the nearest node that claims to be it, and who follows it: in its
    /// own words, or else as far as known.
    fn root_list(&self) -> Vec<Node> {
        let Some((at, (root, told))) = self.claims.first_key_value() else { return Vec::new() };
        let mut list = vec![*root];
        if told.is_empty() {
            list.extend(self.roots_known.range(*at..).map(|(_, node)| *node).skip(1));
        } else {
            list.extend_from_slice(told);
        }
        list
    }
}

fn is_avoided(book: &PeerBook, node: &Node, now: Instant) -> bool {
    book.is_avoided(&node.peer.id, now)
}
