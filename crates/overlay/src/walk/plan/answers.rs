//! What the walker learns from each answer.

use atoll_key::Key;
use atoll_net::{CallError, Peer};

use super::{Candidate, FARTHEST_GUESS, MAX_GUESSED_NOT_ROOT, MAX_NOT_ROOT, MAX_ROOTS_TAKEN, Plan};
use crate::peer_book::{Misdeed, Standing};
use crate::walk::selection::LatencyClaim;
use crate::walk::{Asked, Said, Step};
use crate::{MAX_CLOSER, MAX_GUESSES, NextHop, Node, Route};

impl Plan<'_> {
    /// Takes in an answer; returns the value if that was the end of the search.
    pub fn answered<T>(
        &mut self,
        node: Node,
        as_root: bool,
        answer: Result<Step<T>, CallError>,
    ) -> Option<T> {
        let mut value = None;
        let in_replicas = as_root && self.route.replicas_left.is_some();
        let said = match answer {
            Ok(Step::Done(done)) => {
                value = Some(done);
                Said::Done
            }
            Ok(Step::Absent(successors)) => self.claimed(node, Some(successors)),
            Ok(Step::Route(Route::Root(mut list)))
                if list.first().is_some_and(|root| root.peer.id == node.peer.id) =>
            {
                let root = list.remove(0);
                self.claimed(root, Some(list))
            }
            Ok(Step::Route(_)) if in_replicas => Said::Absent,
            Ok(Step::Route(Route::Closer(_))) if as_root && self.limits.routes > 1 => {
                self.misdeeds.push((node.peer.id, Misdeed::LedInCircles));
                Said::Nowhere
            }
            Ok(Step::Route(Route::NotRoot(nearer))) if as_root => self.take_not_root(&node, nearer),
            Ok(Step::Route(route)) => self.learn(&node, &route),
            Err(error) => {
                self.no_answer(&node, &error);
                Said::Failed(error)
            }
        };
        if as_root && said == Said::Nowhere && self.limits.routes > 1 {
            // Neither the root nor of any help: the next one stands in, as for a dead one.
            self.pass_over(&node);
        }
        if in_replicas && !matches!(said, Said::Failed(_)) {
            self.route.replicas_left = self.route.replicas_left.map(|left| left.saturating_sub(1));
        }
        self.route.answers += usize::from(!matches!(said, Said::Failed(_)));
        let local = node.peer.id == self.me.peer.id;
        self.trace.0.push(Asked { node, as_root, local, said });
        value
    }

    fn no_answer(&mut self, node: &Node, error: &CallError) {
        if error.is_failure_of_peer() {
            self.dead.push(node.peer);
        }
        self.pass_over(node);
    }

    fn pass_over(&mut self, node: &Node) {
        self.failed.insert(node.peer);
        self.roots_known.retain(|_, known| known.peer != node.peer);
        if let Some(after) = self.route.named_by.remove(&node.peer) {
            // The node that named it is the first live successor.
            self.claim_first_live(after);
        }
    }

    /// A node says that it is the root and does not have it, or turns out to be the root.
    fn claimed(&mut self, node: Node, successors: Option<Vec<Node>>) -> Said {
        let at = self.distance_after(&node);
        self.roots_known.insert((at, node.peer), node);
        for successor in successors.iter().flatten().take(MAX_ROOTS_TAKEN) {
            self.add_root(*successor);
        }
        self.root_claims.insert(at, (node, successors));
        if self.route.replicas_left.is_none() {
            self.reached(node);
        }
        Said::Absent
    }

    /// The node before this one is dead. If this one was only guessed to be the root, others
    /// may live before that one: then who follows the key has to be heard first.
    fn claim_first_live(&mut self, node: Node) -> Said {
        if !self.route.guessed.contains(&node.peer) {
            return self.claimed(node, None);
        }
        let here = self.distance_after(&node);
        self.roots_known.insert((here, node.peer), node);
        self.route.guessed_root_claims.insert(node.peer);
        self.route.guessed_not_root = MAX_GUESSED_NOT_ROOT + 1;
        Said::Absent
    }

    /// A node asked as the root names its predecessor instead.
    fn take_not_root(&mut self, node: &Node, nearer: Node) -> Said {
        if self.failed.contains(&nearer.peer) || self.seems_dead(&nearer) {
            // It believes in a node that has failed: it is the first live successor.
            return self.claim_first_live(*node);
        }
        let here = self.distance_after(node);
        if self.distance_after(&nearer) >= here {
            self.misdeeds.push((node.peer.id, Misdeed::LedInCircles));
            return Said::Nowhere; // That leads away from the key.
        }
        // The root is no farther than `nearer`; who comes after this node matters again
        // only if `nearer` has failed.
        self.roots_known.insert((here, node.peer), *node);
        let bound = self.route.not_beyond.map_or(here, |bound| bound.min(here));
        self.route.not_beyond = Some(bound);
        self.route.roots.retain(|at, _| at.0 < here);
        if !self.asked.contains(&(nearer.peer, true)) {
            self.route.named_by.insert(nearer.peer, *node);
            self.route.not_root += 1;
            if self.route.not_root > MAX_NOT_ROOT {
                self.route.detour = Some(nearer);
            } else {
                self.add_root(nearer);
            }
            if self.route.guessed.contains(&node.peer) {
                self.route.guessed.insert(nearer.peer);
                self.route.guessed_not_root += 1;
            }
        } else if self.root_claims.contains_key(&self.distance_after(&nearer)) {
            self.reached(nearer);
        }
        Said::NotRoot(nearer)
    }

    /// Takes in directions given by `guide`.
    pub(super) fn learn(&mut self, guide: &Node, route: &Route) -> Said {
        let said = match route {
            Route::Root(list) => self.root_named(guide, list),
            Route::Closer(hops) => self.take_next_hops(guide, hops),
            Route::NotRoot(nearer) => {
                self.add_root(*nearer);
                Said::NotRoot(*nearer)
            }
            Route::Nowhere => Said::Nowhere,
        };
        if guide.peer.id == self.me.peer.id {
            return said;
        }
        let named = route.nodes().into_iter().take(MAX_ROOTS_TAKEN);
        let silent: Vec<Peer> =
            named.filter(|node| self.standing(node) == Standing::Silent).map(|n| n.peer).collect();
        self.presumed_dead.extend(silent);
        if said == Said::Nowhere {
            if !matches!(route, Route::Nowhere) {
                self.misdeeds.push((guide.peer.id, Misdeed::LedInCircles));
            }
        } else if !self.doubted.iter().any(|(doubted, _)| *doubted == guide.peer.id) {
            self.route.guides.insert(self.distance_before(guide), *guide);
        }
        said
    }

    /// Nodes before the key are named, and perhaps some that may be its root.
    fn take_next_hops(&mut self, guide: &Node, hops: &[NextHop]) -> Said {
        let is_nearer = |hop: &&NextHop| {
            let position = hop.node.id.key();
            position.strictly_between(guide.id.key(), &self.key)
        };
        let (nearer, others): (Vec<&NextHop>, Vec<&NextHop>) = hops.iter().partition(is_nearer);
        if nearer.is_empty() {
            return Said::Nowhere;
        }
        let nearer = &nearer[..nearer.len().min(MAX_CLOSER)];
        let namer = guide.peer.id;
        let named = self.named.entry(namer).or_default();
        named.extend(nearer.iter().map(|hop| hop.node.peer));
        for hop in nearer {
            let claim = hop.latency.map(|latency| LatencyClaim { namer, latency });
            self.add_on_the_way(hop.node, claim);
        }
        self.route.guessed_not_root = 0;
        for guess in others.iter().take(MAX_GUESSES) {
            self.guess_root(&guess.node);
        }
        Said::Closer(nearer.len())
    }

    /// Guesses of this node's own.
    pub fn guess_roots(&mut self, guesses: &[Node]) {
        for node in guesses {
            self.guess_root(node);
        }
    }

    /// A node that may be the root: if it is not, it names a nearer one. Nobody has said that
    /// it follows the key, so it does not bear on who does.
    fn guess_root(&mut self, node: &Node) {
        let at = self.distance_after(node);
        let is_near = at.as_fraction() * self.nodes <= FARTHEST_GUESS
            && self.route.not_beyond.is_none_or(|bound| at < bound);
        let is_useless = node.peer.id == self.me.peer.id
            || self.failed.contains(&node.peer)
            || self.asked.contains(&(node.peer, true))
            || self.seems_dead(node);
        if self.limits.guess
            && is_near
            && !is_useless
            && !self.route.roots.contains_key(&(at, node.peer))
        {
            self.route.guessed.insert(node.peer);
            self.route.roots.insert((at, node.peer), *node);
        }
    }

    fn root_named(&mut self, guide: &Node, list: &[Node]) -> Said {
        self.route.guessed_not_root = 0;
        let named = self.named.entry(guide.peer.id).or_default();
        named.extend(list.iter().take(MAX_ROOTS_TAKEN).map(|node| node.peer));
        for node in list.iter().take(MAX_ROOTS_TAKEN) {
            self.route.guessed.remove(&node.peer);
            self.add_root(*node);
        }
        if list.len() > 1 {
            self.route.listed.extend(list.iter().take(MAX_ROOTS_TAKEN).map(|node| node.peer));
        }
        let Some(root) = list.first() else { return Said::Nowhere };
        let hearsay = guide.peer.id != self.me.peer.id;
        if hearsay && self.limits.routes > 1 && !self.may_follow(list) {
            self.doubted.push((guide.peer.id, self.distance_after(root)));
        }
        // Another route has been there already: this one agrees.
        let lives = |node: &&Node| !self.failed.contains(&node.peer) && !self.seems_dead(node);
        if let Some(first) = list.iter().find(lives).copied()
            && self.route.replicas_left.is_none()
        {
            if self.root_claims.contains_key(&self.distance_after(&first)) {
                self.reached(first);
            } else if self.route.guessed_root_claims.contains(&first.peer) {
                self.claimed(first, None);
            }
        }
        Said::Root(*root)
    }

    pub(super) fn add_on_the_way(&mut self, node: Node, claim: Option<LatencyClaim>) {
        let peer = node.peer;
        if peer.id != self.me.peer.id
            && !self.failed.contains(&peer)
            && !self.asked.contains(&(peer, false))
        {
            let at = self.distance_before(&node);
            self.route.on_the_way.insert((at, peer), Candidate { node, claim });
        }
    }

    pub(super) fn add_root(&mut self, node: Node) {
        if self.failed.contains(&node.peer) {
            return;
        }
        let at = self.distance_after(&node);
        self.roots_known.insert((at, node.peer), node);
        let beyond = self.route.not_beyond.is_some_and(|bound| at >= bound);
        let matters = self.route.replicas_left.is_some() || !beyond;
        if matters && !self.asked.contains(&(node.peer, true)) {
            self.route.roots.insert((at, node.peer), node);
        }
    }

    pub(super) fn distance_before(&self, node: &Node) -> Key {
        self.key.distance_from(node.id.key())
    }

    pub(super) fn distance_after(&self, node: &Node) -> Key {
        node.id.key().distance_from(&self.key)
    }
}
