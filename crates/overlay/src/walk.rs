//! The iterative lookup: one node asks its way around the ring, with backtracking.
//!
//! CFS Figure 3 (`find_predecessor`) and Figure 5 (`lookup`), generic over what is asked:
//! `dht` asks for blocks on the way, [`Overlay::find_root`] only for the way. The walker
//! keeps every node it was ever told of and always asks the best one it has not asked:
//! first those said to be the key's root, nearest after the key first, then those before
//! the key, nearest first. A dead or useless node therefore costs one question, and
//! backtracking is simply taking the next best.
//!
//! Departures from Figure 5:
//! - The path is a sorted set instead of a stack. The previous hop is alerted only when
//!   all it named are dead and so are the next best: its list usually holds a live node.
//! - A node asked *as the root* that knows a node nearer to the key says so (`Back`).
//!   Figure 5 calls that state an error; here a newcomer is found at once.
//! - When the root fails, the next node of the list is asked as the root, and is taken
//!   for it even if it still believes in its dead predecessor: it is the first live
//!   successor.
//!
//! Invariants: no node is asked the same question twice (twice only after it has been
//! warned of dead nodes it had named); at most [`WalkLimits::asks`] questions; the walk
//! ends, whatever the nodes answer.
//!
//! It does not know what is asked, nor any message; and it does not detect a node that
//! lies about being the root (CFS §4.2 leaves that open as well). Node IDs cannot be made
//! up: they are derived from the peers' keys on receipt.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use atoll_env::{BoxFuture, Runtime, timeout};
use atoll_key::{Key, NodeId};
use atoll_net::{CallError, Peer};

use crate::{Node, Overlay, Route};

/// Bounds of a walk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WalkLimits {
    /// The most questions asked. CFS lookups take ½·log2 N; the rest is for failures.
    pub asks: usize,
    /// How many of the root's successors are asked as well when the root says that it
    /// should have it and does not.
    pub replicas: usize,
    /// The longest the whole walk may take.
    pub deadline: Duration,
}

impl Default for WalkLimits {
    fn default() -> WalkLimits {
        WalkLimits { asks: 64, replicas: 3, deadline: Duration::from_secs(30) }
    }
}

/// What a node answered to one question of a walk.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Step<T> {
    /// Here it is.
    Done(T),
    /// The node is the key's root, should have it, and does not; its successors.
    Absent(Vec<Node>),
    /// The node does not have it; where to ask next.
    Route(Route),
}

/// How a walk succeeded.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Found<T> {
    /// What the last node answered.
    pub value: T,
    /// Who that was.
    pub at: Node,
    /// All that was asked, in order.
    pub trace: Trace,
}

/// A question of a walk, and its answer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Asked {
    /// Who was asked.
    pub node: Node,
    /// Whether it was asked as the key's root.
    pub as_root: bool,
    /// Whether it is this very node, so that the question crossed no network.
    pub local: bool,
    /// What it said.
    pub said: Said,
}

/// An answer, in short.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Said {
    /// Had it.
    Done,
    /// Is the root and does not have it.
    Absent,
    /// Named this many nodes nearer to the key.
    Closer(usize),
    /// Named the root.
    Root(Node),
    /// Named its predecessor.
    Back(Node),
    /// Knew nobody, or named nobody of use.
    Nowhere,
    /// Did not answer, or refused.
    Failed(CallError),
}

impl fmt::Display for Said {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Said::Done => f.write_str("has it"),
            Said::Absent => f.write_str("should have it and does not"),
            Said::Closer(count) => write!(f, "named {count} nearer nodes"),
            Said::Root(node) => write!(f, "named {node:?} as the root"),
            Said::Back(node) => write!(f, "named its predecessor {node:?}"),
            Said::Nowhere => f.write_str("knows nobody"),
            Said::Failed(error) => error.fmt(f),
        }
    }
}

/// Everything a walk asked, in order.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Trace(pub Vec<Asked>);

impl Trace {
    /// Calls that were answered. As in CFS Figure 14, attempts to reach failed nodes do
    /// not count, nor does asking this node itself.
    pub fn calls(&self) -> usize {
        self.0.iter().filter(|a| !a.local && !matches!(a.said, Said::Failed(_))).count()
    }

    /// Calls that brought no answer (CFS Figure 15).
    pub fn failures(&self) -> usize {
        self.0.iter().filter(|a| matches!(a.said, Said::Failed(_))).count()
    }
}

impl fmt::Display for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("nobody was asked");
        }
        for (i, asked) in self.0.iter().enumerate() {
            let separator = if i == 0 { "" } else { "; " };
            write!(f, "{separator}{:?} {}", asked.node, asked.said)?;
        }
        Ok(())
    }
}

/// Why a walk did not find what it looked for.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum WalkError {
    /// The root and those of its successors that answered do not have it.
    #[error("key {key} is absent: {trace}")]
    Absent {
        /// The key.
        key: Key,
        /// The live root, then its successors as far as they are known.
        roots: Vec<Node>,
        /// Who was asked and what each said.
        trace: Trace,
    },
    /// The root of the key was not reached.
    #[error("no way to the root of key {key}: {trace}")]
    NoWay {
        /// The key.
        key: Key,
        /// Who was asked and what each said.
        trace: Trace,
    },
    /// This node is not on a ring, or has just lost all its successors.
    #[error("this node is not on a ring (yet)")]
    NotJoined,
    /// The walk's deadline passed or its questions ran out.
    #[error("gave up the way to key {key}: {trace}")]
    GaveUp {
        /// The key.
        key: Key,
        /// Who was asked and what each said.
        trace: Trace,
    },
}

impl WalkError {
    /// Who was asked and what each said.
    pub fn trace(&self) -> Option<&Trace> {
        match self {
            WalkError::Absent { trace, .. }
            | WalkError::NoWay { trace, .. }
            | WalkError::GaveUp { trace, .. } => Some(trace),
            WalkError::NotJoined => None,
        }
    }
}

/// Walks from this node towards `key` until `step` is done.
///
/// `step(node, as_root)` asks one node one question, within its own time limit. It is
/// called with this node itself when this node is the key's root, and should then answer
/// without the network. A root that does not have what is wanted may answer
/// `Step::Absent` or `Step::Route(Route::Root([itself, …]))`: both mean the same.
///
/// Cancel-safe: dropping the future asks nobody anything more.
///
/// # Errors
/// See [`WalkError`]; it says who was asked and what each said.
pub async fn walk<'a, T>(
    env: &dyn Runtime,
    overlay: &dyn Overlay,
    key: &Key,
    limits: WalkLimits,
    step: impl Fn(Node, bool) -> BoxFuture<'a, Result<Step<T>, CallError>>,
) -> Result<Found<T>, WalkError> {
    let me = overlay.neighbourhood().me;
    let mut plan = Plan::new(*key, me.id, limits);
    let route = overlay.route(key, false);
    if route == Route::Nowhere {
        return Err(WalkError::NotJoined);
    }
    plan.learn(&me, &route);
    plan.own_table = OwnTable::ReadAfterFailures(0);
    run(env, overlay, plan, limits, step).await
}

/// As [`walk`], but starting at nodes that need not be on this node's ring, and never
/// asking or finding this node: how a node joins, and how rings that lost sight of each
/// other meet.
pub(crate) async fn walk_from<'a, T>(
    env: &dyn Runtime,
    overlay: &dyn Overlay,
    start: &[Node],
    key: &Key,
    limits: WalkLimits,
    step: impl Fn(Node, bool) -> BoxFuture<'a, Result<Step<T>, CallError>>,
) -> Result<Found<T>, WalkError> {
    let me = overlay.neighbourhood().me.id;
    let mut plan = Plan::new(*key, me, limits);
    plan.asked.extend([(me, false), (me, true)]);
    for node in start {
        plan.add_on_the_way(*node);
    }
    run(env, overlay, plan, limits, step).await
}

/// Verifies a root known from before: asks `likely` first, as the root.
pub(crate) async fn walk_to_likely<'a, T>(
    env: &dyn Runtime,
    overlay: &dyn Overlay,
    likely: Node,
    key: &Key,
    limits: WalkLimits,
    step: impl Fn(Node, bool) -> BoxFuture<'a, Result<Step<T>, CallError>>,
) -> Result<Found<T>, WalkError> {
    let me = overlay.neighbourhood().me.id;
    let mut plan = Plan::new(*key, me, limits);
    plan.add_root(likely);
    plan.own_table = OwnTable::Unread;
    run(env, overlay, plan, limits, step).await
}

async fn run<'a, T>(
    env: &dyn Runtime,
    overlay: &dyn Overlay,
    mut plan: Plan,
    limits: WalkLimits,
    step: impl Fn(Node, bool) -> BoxFuture<'a, Result<Step<T>, CallError>>,
) -> Result<Found<T>, WalkError> {
    let steps = async {
        loop {
            match plan.next(overlay) {
                Next::Ask(node, as_root) => {
                    let answer = step(node, as_root).await;
                    if let Err(error) = &answer
                        && error.is_failure_of_peer()
                    {
                        overlay.alert(&node.peer);
                    }
                    if let Some(value) = plan.answered(node, as_root, answer) {
                        return Ok((value, node));
                    }
                }
                Next::Warn(node, failed) => {
                    if overlay.warn(&node.peer, failed).await {
                        plan.may_ask_again(node);
                    }
                }
                Next::End(error) => return Err(error),
            }
        }
    };
    match timeout(env, limits.deadline, steps).await {
        Ok(Ok((value, at))) => Ok(Found { value, at, trace: plan.trace }),
        Ok(Err(end)) => Err(plan.error(end)),
        Err(_) => Err(plan.error(End::GaveUp)),
    }
}

/// How a walk without success ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum End {
    Absent,
    NoWay,
    GaveUp,
}

/// What to do next.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Next {
    Ask(Node, bool),
    Warn(Node, Vec<Peer>),
    End(End),
}

/// Whether and when the walk looks into this node's own tables.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum OwnTable {
    /// This node is not on the ring that is walked.
    NotUsed,
    Unread,
    /// Read when so many nodes had failed; worth reading again after further failures.
    ReadAfterFailures(usize),
}

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

/// The walker's memory: whom it was told of, whom it asked. No clock, no network.
struct Plan {
    key: Key,
    me: NodeId,
    limits: WalkLimits,
    asked: BTreeSet<(NodeId, bool)>,
    /// Nodes that gave no answer or refused one.
    failed: BTreeSet<NodeId>,
    /// Those of them that may be dead.
    dead: Vec<Peer>,
    /// Nodes before the key, by their distance to it.
    on_the_way: BTreeMap<Key, Node>,
    /// Nodes said to be the key's root or to follow it, by their distance after the key.
    roots: BTreeMap<Key, Node>,
    /// Nodes after the key that answered or were named, for the error's root list.
    roots_known: BTreeMap<Key, Node>,
    /// Nodes that gave directions, by their distance to the key.
    guides: BTreeMap<Key, Node>,
    /// Who named a node as its predecessor when asked as the root.
    named_by: BTreeMap<NodeId, Node>,
    backs: usize,
    /// A node after so many `Back`s, to be asked for the way before anything else.
    detour: Option<Node>,
    /// The root lies before this distance after the key: a live node there is not it.
    not_beyond: Option<Key>,
    warnings: usize,
    /// How many nodes had failed when a guide was last warned.
    warned: BTreeMap<Key, usize>,
    /// Questions to nodes farther from the key than the nearest guide, since it was
    /// last warned.
    asked_behind_guide: usize,
    /// Questions left for the root's successors, once the root has said `Absent`.
    replicas_left: Option<usize>,
    own_table: OwnTable,
    trace: Trace,
}

impl Plan {
    fn new(key: Key, me: NodeId, limits: WalkLimits) -> Plan {
        Plan {
            key,
            me,
            limits,
            asked: BTreeSet::new(),
            failed: BTreeSet::new(),
            dead: Vec::new(),
            on_the_way: BTreeMap::new(),
            roots: BTreeMap::new(),
            roots_known: BTreeMap::new(),
            guides: BTreeMap::new(),
            named_by: BTreeMap::new(),
            backs: 0,
            detour: None,
            not_beyond: None,
            warnings: 0,
            warned: BTreeMap::new(),
            asked_behind_guide: 0,
            replicas_left: None,
            own_table: OwnTable::NotUsed,
            trace: Trace::default(),
        }
    }

    fn next(&mut self, overlay: &dyn Overlay) -> Next {
        if self.trace.0.len() >= self.limits.asks {
            return Next::End(self.end_or(End::GaveUp));
        }
        if self.replicas_left == Some(0) {
            return Next::End(End::Absent);
        }
        if let Some(node) = self.detour.take()
            && self.asked.insert((node.id, false))
        {
            return Next::Ask(node, false);
        }
        while let Some((_, node)) = self.roots.pop_first() {
            if self.asked.insert((node.id, true)) {
                return Next::Ask(node, true);
            }
        }
        if self.replicas_left.is_some() {
            return Next::End(End::Absent);
        }
        while let Some((distance, node)) = self.on_the_way.pop_first() {
            if self.asked.contains(&(node.id, false)) {
                continue;
            }
            let nearest_guide = self.guides.first_key_value().map(|(at, _)| *at);
            if nearest_guide.is_some_and(|guide| guide < distance) {
                // All that the nearest guide named is dead. One farther off may know
                // others; otherwise the guide has to be told (Figure 5's `alert`).
                self.asked_behind_guide += 1;
                if self.asked_behind_guide > MAX_BEHIND_GUIDE
                    && let Some(warning) = self.warning()
                {
                    self.on_the_way.insert(distance, node);
                    return warning;
                }
            }
            self.asked.insert((node.id, false));
            return Next::Ask(node, false);
        }
        self.backtrack(overlay)
    }

    /// Warns the guide nearest to the key of all that failed since it last answered.
    fn warning(&mut self) -> Option<Next> {
        if self.warnings >= MAX_WARNINGS {
            return None;
        }
        let news = |at: &Key| self.warned.get(at).copied().unwrap_or(0) < self.dead.len();
        let at = *self.guides.keys().find(|at| news(at))?;
        self.warned.insert(at, self.dead.len());
        self.warnings += 1;
        self.asked_behind_guide = 0;
        Some(Next::Warn(self.guides[&at], self.dead.clone()))
    }

    /// Everything known has been asked: look again where failed nodes hid live ones,
    /// first here, then at the guide nearest to the key.
    fn backtrack(&mut self, overlay: &dyn Overlay) -> Next {
        let read_again = match self.own_table {
            OwnTable::NotUsed => false,
            OwnTable::Unread => true,
            OwnTable::ReadAfterFailures(then) => then < self.dead.len(),
        };
        if read_again {
            self.own_table = OwnTable::ReadAfterFailures(self.dead.len());
            let route = overlay.route(&self.key, false);
            self.learn(&overlay.neighbourhood().me, &route);
            return self.next(overlay);
        }
        self.warning().unwrap_or(Next::End(End::NoWay))
    }

    fn may_ask_again(&mut self, guide: Node) {
        self.asked.remove(&(guide.id, false));
        self.on_the_way.insert(self.distance_before(&guide), guide);
    }

    /// Takes in an answer; returns the value if that was the end of the search.
    fn answered<T>(
        &mut self,
        node: Node,
        as_root: bool,
        answer: Result<Step<T>, CallError>,
    ) -> Option<T> {
        let mut value = None;
        let said = match answer {
            Ok(Step::Done(done)) => {
                value = Some(done);
                Said::Done
            }
            Ok(Step::Absent(successors)) => self.absent(&node, &successors),
            Ok(Step::Route(Route::Root(list))) if list.first().is_some_and(|r| r.id == node.id) => {
                self.absent(&node, &list[1..])
            }
            Ok(Step::Route(_)) if self.replicas_left.is_some() => self.one_replica_less(),
            Ok(Step::Route(Route::Back(nearer))) if as_root => self.back(&node, nearer),
            Ok(Step::Route(route)) => self.learn(&node, &route),
            Err(error) => {
                self.no_answer(&node, &error);
                Said::Failed(error)
            }
        };
        self.trace.0.push(Asked { node, as_root, local: node.id == self.me, said });
        value
    }

    fn no_answer(&mut self, node: &Node, error: &CallError) {
        self.failed.insert(node.id);
        if error.is_failure_of_peer() {
            self.dead.push(node.peer);
        }
        self.roots_known.remove(&self.distance_after(node));
        if let Some(after) = self.named_by.remove(&node.id) {
            // The node that named it is the first live successor.
            self.absent(&after, &[]);
        }
    }

    /// The root, or a replica, does not have it: ask the nodes after it.
    fn absent(&mut self, node: &Node, successors: &[Node]) -> Said {
        if self.replicas_left.is_some() {
            self.one_replica_less();
        } else {
            self.replicas_left = Some(self.limits.replicas);
            // Whoever was named between the key and the root turned out not to be there;
            // whoever was named after it may hold a replica.
            let root_at = self.distance_after(node);
            self.roots_known.retain(|at, _| *at > root_at);
            self.roots = self.roots_known.clone();
            self.roots.retain(|_, node| !self.asked.contains(&(node.id, true)));
        }
        self.roots_known.insert(self.distance_after(node), *node);
        for successor in successors.iter().take(MAX_ROOTS_TAKEN) {
            self.add_root(*successor);
        }
        Said::Absent
    }

    fn one_replica_less(&mut self) -> Said {
        self.replicas_left = self.replicas_left.map(|left| left.saturating_sub(1));
        Said::Absent
    }

    /// A node asked as the root names its predecessor instead.
    fn back(&mut self, node: &Node, nearer: Node) -> Said {
        if self.failed.contains(&nearer.id) {
            // It believes in a node that has failed: it is the first live successor.
            return self.absent(node, &[]);
        }
        let here = self.distance_after(node);
        if self.distance_after(&nearer) >= here {
            return Said::Nowhere; // That leads away from the key.
        }
        // The root is no farther than `nearer`; who comes after this node matters again
        // only if `nearer` has failed.
        self.roots_known.insert(here, *node);
        self.not_beyond = Some(self.not_beyond.map_or(here, |bound| bound.min(here)));
        self.roots.retain(|at, _| *at < here);
        if !self.asked.contains(&(nearer.id, true)) {
            self.named_by.insert(nearer.id, *node);
            self.backs += 1;
            if self.backs > MAX_BACKS {
                self.detour = Some(nearer);
            } else {
                self.add_root(nearer);
            }
        }
        Said::Back(nearer)
    }

    /// Takes in directions given by `guide`.
    fn learn(&mut self, guide: &Node, route: &Route) -> Said {
        let said = match route {
            Route::Root(list) => {
                for node in list.iter().take(MAX_ROOTS_TAKEN) {
                    self.add_root(*node);
                }
                list.first().map_or(Said::Nowhere, |root| Said::Root(*root))
            }
            Route::Closer(list) => {
                let onward = |n: &&Node| n.id.key().strictly_between(guide.id.key(), &self.key);
                let nodes: Vec<Node> = list.iter().map(|l| l.node).filter(|n| onward(&n)).collect();
                for node in nodes.iter().take(crate::MAX_CLOSER) {
                    self.add_on_the_way(*node);
                }
                if nodes.is_empty() { Said::Nowhere } else { Said::Closer(nodes.len()) }
            }
            Route::Back(nearer) => {
                self.add_root(*nearer);
                Said::Back(*nearer)
            }
            Route::Nowhere => Said::Nowhere,
        };
        if said != Said::Nowhere && guide.id != self.me {
            self.guides.insert(self.distance_before(guide), *guide);
        }
        said
    }

    fn add_on_the_way(&mut self, node: Node) {
        if node.id != self.me
            && !self.failed.contains(&node.id)
            && !self.asked.contains(&(node.id, false))
        {
            self.on_the_way.insert(self.distance_before(&node), node);
        }
    }

    fn add_root(&mut self, node: Node) {
        if !self.failed.contains(&node.id) {
            self.roots_known.insert(self.distance_after(&node), node);
            let beyond = self.not_beyond.is_some_and(|bound| self.distance_after(&node) >= bound);
            let matters = self.replicas_left.is_some() || !beyond;
            if matters && !self.asked.contains(&(node.id, true)) {
                self.roots.insert(self.distance_after(&node), node);
            }
        }
    }

    fn distance_before(&self, node: &Node) -> Key {
        self.key.distance_from(node.id.key())
    }

    fn distance_after(&self, node: &Node) -> Key {
        node.id.key().distance_from(&self.key)
    }

    fn end_or(&self, end: End) -> End {
        if self.replicas_left.is_some() { End::Absent } else { end }
    }

    fn error(self, end: End) -> WalkError {
        let Plan { key, trace, roots_known, .. } = self;
        match end {
            End::Absent => {
                WalkError::Absent { key, roots: roots_known.into_values().collect(), trace }
            }
            End::NoWay => WalkError::NoWay { key, trace },
            End::GaveUp => WalkError::GaveUp { key, trace },
        }
    }
}
