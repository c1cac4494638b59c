//! The agreement of several routes: whether the root that routes lead to is believed.
//!
//! A [`Search`] is made of routes ([`super::route`]). A route ends when the root of the key is
//! reached, or when no node is left to ask. Where a single route is enough, as in the paper, that
//! is the end of the search. Otherwise an end without success is believed only if the root fits the
//! density of the ring ([`density`]) and as many routes have ended there as [`WalkLimits::confirm`]
//! says. Until then another route begins, from other nodes of this node's own tables and never
//! through a node that was asked before: liars on one route are not on the next. Knowledge of the
//! key's neighbourhood is kept ([`super::memory`]), and the node nearest after the key that
//! claims to be the root is taken for it, whatever other nodes claim. At the very end the k nearest
//! nodes after the key found by all the routes together have been asked.

mod density;
mod verdict;

use std::collections::BTreeMap;

use atoll_env::Instant;
use atoll_key::{Key, NodeId};
use atoll_net::CallError;

use super::memory::{Memory, OwnTable};
use super::route::{End, Next, OnRoute, OneRoute};
use super::{Asked, Step, WalkLimits};
use crate::{Node, Overlay, Route};

/// A search for a key: one route after another until their ends agree.
pub(super) struct Search<'w> {
    memory: Memory<'w>,
    /// The route under way.
    route: OneRoute,
    /// How many routes there were.
    routes: usize,
    /// How often each claimed root was reached.
    reached: BTreeMap<NodeId, usize>,
    /// How many routes led to each.
    ends: BTreeMap<NodeId, usize>,
    /// Whether the replicas that no route asked have been asked at the end.
    swept: bool,
}

impl<'w> Search<'w> {
    pub(super) fn new(key: Key, overlay: &'w dyn Overlay, limits: WalkLimits) -> Search<'w> {
        Search {
            memory: Memory::new(key, overlay, limits),
            route: OneRoute::default(),
            routes: 1,
            reached: BTreeMap::new(),
            ends: BTreeMap::new(),
            swept: false,
        }
    }

    /// As [`Search::new`], at this time.
    pub(super) fn at(mut self, now: Instant) -> Search<'w> {
        self.memory.now = now;
        self
    }

    /// Time has passed.
    pub(super) fn set_time(&mut self, now: Instant) {
        self.memory.now = now;
    }

    /// Starts with the route that this node's own tables name.
    pub(super) fn start_here(&mut self, route: &Route) {
        self.learn_from_own_table(route);
    }

    /// Starts at other nodes, and never asks or finds this one.
    pub(super) fn start_elsewhere(&mut self, start: &[Node]) {
        self.memory.asked.extend([(self.memory.me.peer, false), (self.memory.me.peer, true)]);
        for node in start {
            self.route.add_on_the_way(&self.memory, *node);
        }
    }

    /// Starts by asking the node that was the root before.
    pub(super) fn start_at_root(&mut self, likely: Node) {
        self.route.add_root(&mut self.memory, likely);
        self.memory.own_table = OwnTable::Unread;
    }

    /// Adds guesses of this node's own at the root.
    pub(super) fn guess_roots(&mut self, guesses: &[Node]) {
        for node in guesses {
            self.route.guess_root(&self.memory, node);
        }
    }

    fn read_own_table(&mut self) {
        let route = self.memory.overlay.route(&self.memory.key, false);
        self.learn_from_own_table(&route);
    }

    fn learn_from_own_table(&mut self, route: &Route) {
        self.memory.own_table = OwnTable::ReadAfterFailures(self.memory.dead.len());
        let me = self.memory.me;
        self.route.learn(&mut self.memory, &me, route);
        self.judge_pending();
    }

    /// Whether the ring that is walked is this node's own.
    pub(super) fn is_on_own_ring(&self) -> bool {
        self.memory.own_table != OwnTable::NotUsed
    }

    /// The next action, when no answer is waited for.
    pub(super) fn next(&mut self) -> Next {
        loop {
            if self.memory.questions >= self.memory.limits.asks {
                let root_reached = !self.memory.root_claims.is_empty();
                return Next::End(if root_reached { End::Absent } else { End::GaveUp });
            }
            let end = match self.route.next(&mut self.memory) {
                OnRoute::Next(next) => return next,
                OnRoute::ReadOwnTable => {
                    self.read_own_table();
                    continue;
                }
                OnRoute::Ended(end) => end,
            };
            if self.is_settled(end) {
                return Next::End(end);
            }
            if !self.begin_route() && !self.sweep() {
                let root_reached = !self.memory.root_claims.is_empty();
                return Next::End(if root_reached { End::Absent } else { End::NoWay });
            }
        }
    }

    /// The next action while overdue answers are waited for: the same as if they never came, but no
    /// other route is begun.
    pub(super) fn another(&mut self) -> Option<Next> {
        if self.memory.questions >= self.memory.limits.asks || self.route.is_cut(&self.memory) {
            return None;
        }
        self.route.forward(&mut self.memory)
    }

    /// Takes in an answer; returns the value if that was the end of the search.
    pub(super) fn answered<T>(
        &mut self,
        node: Node,
        as_root: bool,
        answer: Result<Step<T>, CallError>,
    ) -> Option<T> {
        let (value, said) = self.route.take_answer(&mut self.memory, node, as_root, answer);
        self.judge_pending();
        let local = node.peer.id == self.memory.me.peer.id;
        self.memory.trace.0.push(Asked { node, as_root, local, said });
        value
    }

    fn judge_pending(&mut self) {
        if let Some(root) = self.route.take_reached() {
            self.judge_reached(root);
        }
    }

    /// A guide has checked the nodes reported to it.
    pub(super) fn allow_asking_again(&mut self, guide: Node) {
        self.memory.asked.remove(&(guide.peer, false));
        self.route.add_on_the_way(&self.memory, guide);
    }

    /// Begins another route at nodes known here that were not asked yet: those before the
    /// key if possible, the nearest first.
    fn begin_route(&mut self) -> bool {
        if self.routes >= self.memory.limits.routes || self.memory.own_table == OwnTable::NotUsed {
            return false;
        }
        let mut starts = self.memory.overlay.known_nodes();
        starts.retain(|node| {
            node.peer.id != self.memory.me.peer.id
                && !self.memory.asked.contains(&(node.peer, false))
                && !self.memory.failed.contains(&node.peer)
        });
        let worth = |node: &Node| (self.memory.seems_dead(node), self.memory.is_avoided(node));
        if let Some(best) = starts.iter().map(worth).min() {
            starts.retain(|node| worth(node) == best);
        }
        if starts.is_empty() {
            return false;
        }
        self.routes += 1;
        self.route = OneRoute::default();
        self.memory.own_table = OwnTable::ReadAfterFailures(self.memory.dead.len());
        for node in starts {
            self.route.add_on_the_way(&self.memory, node);
        }
        true
    }

    /// Has those of the k nearest nodes after the key asked that have not been. Once.
    fn sweep(&mut self) -> bool {
        if self.swept || self.memory.limits.replicas == 0 || self.memory.roots_known.is_empty() {
            return false;
        }
        self.swept = true;
        self.route = OneRoute::default();
        self.route.ask_replicas(&self.memory);
        !self.route.has_asked_replicas()
    }

    /// The root has been reached: its successors are asked, as far as they have not been.
    /// A root that may be false is left alone, and the route goes on beside it.
    fn judge_reached(&mut self, root: Node) {
        *self.reached.entry(root.id).or_default() += 1;
        if self.route.ends_at(&root) {
            *self.ends.entry(root.id).or_default() += 1;
        }
        let limits = self.memory.limits;
        if limits.routes > 1 && !self.memory.is_plausible(self.doubt(&root)) {
            return self.route.pass_by_root();
        }
        self.route.ask_replicas(&self.memory);
        let is_enough = !self.route.has_asked_replicas() || self.is_certain(&root);
        if limits.routes > 1 && limits.replicas > 0 && !is_enough {
            // The route brought nothing new: it may have been led by one liar more.
            self.route.pass_by_root();
        } else {
            self.route.accept_root(root);
        }
    }
}
