//! The changes that each answer makes to a route.

use atoll_net::{CallError, Peer};

use super::{FARTHEST_GUESS, MAX_GUESSED_NOT_ROOT, MAX_NOT_ROOT, OneRoute};
use crate::peer_book::{Misdeed, Standing};
use crate::walk::memory::{MAX_ROOTS_TAKEN, Memory};
use crate::walk::{Said, Step};
use crate::{MAX_CLOSER, MAX_GUESSES, Node, Route};

impl OneRoute {
    /// Takes in an answer; returns the value if that was the end of the search, and the answer in
    /// short.
    pub(crate) fn take_answer<T>(
        &mut self,
        memory: &mut Memory<'_>,
        node: Node,
        as_root: bool,
        answer: Result<Step<T>, CallError>,
    ) -> (Option<T>, Said) {
        let mut value = None;
        let in_replicas = as_root && self.replicas_left.is_some();
        let said = match answer {
            Ok(Step::Done(done)) => {
                value = Some(done);
                Said::Done
            }
            Ok(Step::Absent(successors)) => self.claimed(memory, node, Some(successors)),
            Ok(Step::Route(Route::Root(mut list)))
                if list.first().is_some_and(|root| root.peer.id == node.peer.id) =>
            {
                let root = list.remove(0);
                self.claimed(memory, root, Some(list))
            }
            Ok(Step::Route(_)) if in_replicas => Said::Absent,
            Ok(Step::Route(Route::Closer(_))) if as_root && memory.limits.routes > 1 => {
                memory.misdeeds.push((node.peer.id, Misdeed::LedInCircles));
                Said::Nowhere
            }
            Ok(Step::Route(Route::NotRoot(nearer))) if as_root => {
                self.take_not_root(memory, &node, nearer)
            }
            Ok(Step::Route(route)) => self.learn(memory, &node, &route),
            Err(error) => {
                self.no_answer(memory, &node, &error);
                Said::Failed(error)
            }
        };
        if as_root && said == Said::Nowhere && memory.limits.routes > 1 {
            // Neither the root nor of any help: the next one stands in, as for a dead one.
            self.pass_over(memory, &node);
        }
        if in_replicas && !matches!(said, Said::Failed(_)) {
            self.replicas_left = self.replicas_left.map(|left| left.saturating_sub(1));
        }
        self.answers += usize::from(!matches!(said, Said::Failed(_)));
        (value, said)
    }

    fn no_answer(&mut self, memory: &mut Memory<'_>, node: &Node, error: &CallError) {
        if error.is_failure_of_peer() {
            memory.dead.push(node.peer);
        }
        self.pass_over(memory, node);
    }

    fn pass_over(&mut self, memory: &mut Memory<'_>, node: &Node) {
        memory.failed.insert(node.peer);
        memory.roots_known.retain(|_, known| known.peer != node.peer);
        if let Some(after) = self.named_by.remove(&node.peer) {
            // The node that named it is the first live successor.
            self.claim_first_live(memory, after);
        }
    }

    /// A node says that it is the root and does not have it, or turns out to be the root.
    fn claimed(
        &mut self,
        memory: &mut Memory<'_>,
        node: Node,
        successors: Option<Vec<Node>>,
    ) -> Said {
        let at = memory.distance_after(&node);
        memory.roots_known.insert((at, node.peer), node);
        for successor in successors.iter().flatten().take(MAX_ROOTS_TAKEN) {
            self.add_root(memory, *successor);
        }
        memory.root_claims.insert(at, (node, successors));
        if self.replicas_left.is_none() {
            self.at_root = Some(node);
        }
        Said::Absent
    }

    /// The node before this one is dead. If this one was only guessed to be the root, others may
    /// live before that one: then a node that knows the key's successors has to be heard first.
    fn claim_first_live(&mut self, memory: &mut Memory<'_>, node: Node) -> Said {
        if !self.guessed.contains(&node.peer) {
            return self.claimed(memory, node, None);
        }
        let here = memory.distance_after(&node);
        memory.roots_known.insert((here, node.peer), node);
        self.guessed_root_claims.insert(node.peer);
        self.guessed_not_root = MAX_GUESSED_NOT_ROOT + 1;
        Said::Absent
    }

    /// A node asked as the root names its predecessor instead.
    fn take_not_root(&mut self, memory: &mut Memory<'_>, node: &Node, nearer: Node) -> Said {
        if memory.failed.contains(&nearer.peer) || memory.seems_dead(&nearer) {
            // It believes in a node that has failed: it is the first live successor.
            return self.claim_first_live(memory, *node);
        }
        let here = memory.distance_after(node);
        if memory.distance_after(&nearer) >= here {
            memory.misdeeds.push((node.peer.id, Misdeed::LedInCircles));
            return Said::Nowhere; // That leads away from the key.
        }
        // The root is no farther than `nearer`; nodes after this one matter again only if
        // `nearer` has failed.
        memory.roots_known.insert((here, node.peer), *node);
        let bound = self.not_beyond.map_or(here, |bound| bound.min(here));
        self.not_beyond = Some(bound);
        self.roots.retain(|at, _| at.0 < here);
        if !memory.asked.contains(&(nearer.peer, true)) {
            self.named_by.insert(nearer.peer, *node);
            self.not_root += 1;
            if self.not_root > MAX_NOT_ROOT {
                self.detour = Some(nearer);
            } else {
                self.add_root(memory, nearer);
            }
            if self.guessed.contains(&node.peer) {
                self.guessed.insert(nearer.peer);
                self.guessed_not_root += 1;
            }
        } else if memory.root_claims.contains_key(&memory.distance_after(&nearer)) {
            self.at_root = Some(nearer);
        }
        Said::NotRoot(nearer)
    }

    /// Takes in directions given by `guide`.
    pub(crate) fn learn(&mut self, memory: &mut Memory<'_>, guide: &Node, route: &Route) -> Said {
        let said = match route {
            Route::Root(list) => self.root_named(memory, guide, list),
            Route::Closer(hops) => self.take_next_hops(memory, guide, hops),
            Route::NotRoot(nearer) => {
                self.add_root(memory, *nearer);
                Said::NotRoot(*nearer)
            }
            Route::Nowhere => Said::Nowhere,
        };
        if guide.peer.id == memory.me.peer.id {
            return said;
        }
        let named = route.nodes().into_iter().take(MAX_ROOTS_TAKEN);
        let silent: Vec<Peer> = named
            .filter(|node| memory.standing(node) == Standing::Silent)
            .map(|n| n.peer)
            .collect();
        memory.presumed_dead.extend(silent);
        if said == Said::Nowhere {
            if !matches!(route, Route::Nowhere) {
                memory.misdeeds.push((guide.peer.id, Misdeed::LedInCircles));
            }
        } else if !memory.doubted.iter().any(|(doubted, _)| *doubted == guide.peer.id) {
            self.guides.insert(memory.distance_before(guide), *guide);
        }
        said
    }

    /// Nodes before the key are named, and perhaps some that may be its root.
    fn take_next_hops(&mut self, memory: &mut Memory<'_>, guide: &Node, hops: &[Node]) -> Said {
        let is_nearer = |hop: &&Node| hop.id.key().strictly_between(guide.id.key(), &memory.key);
        let (nearer, others): (Vec<&Node>, Vec<&Node>) = hops.iter().partition(is_nearer);
        if nearer.is_empty() {
            return Said::Nowhere;
        }
        let nearer = &nearer[..nearer.len().min(MAX_CLOSER)];
        let named = memory.named.entry(guide.peer.id).or_default();
        named.extend(nearer.iter().map(|hop| hop.peer));
        for hop in nearer {
            self.add_on_the_way(memory, **hop);
        }
        self.guessed_not_root = 0;
        for guess in others.iter().take(MAX_GUESSES) {
            self.guess_root(memory, guess);
        }
        Said::Closer(nearer.len())
    }

    /// A node that may be the root: if it is not, it names a nearer one. No node has said that it
    /// follows the key, so it is not taken for a known successor.
    pub(crate) fn guess_root(&mut self, memory: &Memory<'_>, node: &Node) {
        let at = memory.distance_after(node);
        let is_near = at.as_fraction() * memory.nodes <= FARTHEST_GUESS
            && self.not_beyond.is_none_or(|bound| at < bound);
        let is_useless = node.peer.id == memory.me.peer.id
            || memory.failed.contains(&node.peer)
            || memory.asked.contains(&(node.peer, true))
            || memory.seems_dead(node);
        if memory.limits.guess
            && is_near
            && !is_useless
            && !self.roots.contains_key(&(at, node.peer))
        {
            self.guessed.insert(node.peer);
            self.roots.insert((at, node.peer), *node);
        }
    }

    fn root_named(&mut self, memory: &mut Memory<'_>, guide: &Node, list: &[Node]) -> Said {
        self.guessed_not_root = 0;
        let named = memory.named.entry(guide.peer.id).or_default();
        named.extend(list.iter().take(MAX_ROOTS_TAKEN).map(|node| node.peer));
        for node in list.iter().take(MAX_ROOTS_TAKEN) {
            self.guessed.remove(&node.peer);
            self.add_root(memory, *node);
        }
        if list.len() > 1 {
            self.listed.extend(list.iter().take(MAX_ROOTS_TAKEN).map(|node| node.peer));
        }
        let Some(root) = list.first() else { return Said::Nowhere };
        let hearsay = guide.peer.id != memory.me.peer.id;
        if hearsay && memory.limits.routes > 1 && !memory.may_follow(list) {
            memory.doubted.push((guide.peer.id, memory.distance_after(root)));
        }
        // Another route has been there already: this one agrees.
        let lives = |node: &&Node| !memory.failed.contains(&node.peer) && !memory.seems_dead(node);
        if let Some(first) = list.iter().find(lives).copied()
            && self.replicas_left.is_none()
        {
            if memory.root_claims.contains_key(&memory.distance_after(&first)) {
                self.at_root = Some(first);
            } else if self.guessed_root_claims.contains(&first.peer) {
                self.claimed(memory, first, None);
            }
        }
        Said::Root(*root)
    }

    pub(crate) fn add_on_the_way(&mut self, memory: &Memory<'_>, node: Node) {
        let peer = node.peer;
        if peer.id != memory.me.peer.id
            && !memory.failed.contains(&peer)
            && !memory.asked.contains(&(peer, false))
        {
            let at = memory.distance_before(&node);
            self.on_the_way.insert((at, peer), node);
        }
    }

    pub(crate) fn add_root(&mut self, memory: &mut Memory<'_>, node: Node) {
        if memory.failed.contains(&node.peer) {
            return;
        }
        let at = memory.distance_after(&node);
        memory.roots_known.insert((at, node.peer), node);
        let beyond = self.not_beyond.is_some_and(|bound| at >= bound);
        let matters = self.replicas_left.is_some() || !beyond;
        if matters && !memory.asked.contains(&(node.peer, true)) {
            self.roots.insert((at, node.peer), node);
        }
    }
}
