//! The verdict of a search: the root that it believes, and the peers that it has caught lying.

use std::collections::BTreeSet;

use atoll_key::{Key, PeerId};
use atoll_net::Peer;

use super::Search;
use super::density::{Density, Doubt};
use crate::Node;
use crate::peer_book::Misdeed;
use crate::walk::memory::{MAX_ROOTS_TAKEN, Memory};
use crate::walk::route::End;
use crate::walk::{Asked, Said, Trace, WalkError};

/// A guide that named so many dead nodes and no live one is scored for it. A guess.
const MANY_DEAD: usize = 3;
/// So many dead nodes of those that one node named count as having died lately.
const DEAD_BELIEVED: usize = 2;
/// The lists of others may be shorter than this node's by so much: they go on until they
/// hold enough different machines. A guess.
const SHORTER_LISTS: f64 = 0.7;

impl Search<'_> {
    /// Whether a route that ended like this ends the walk.
    pub(super) fn is_settled(&self, end: End) -> bool {
        if self.memory.limits.routes <= 1 || self.swept {
            return true;
        }
        end == End::Absent && self.route.root().is_some_and(|root| self.is_certain(&root))
    }

    /// Whether enough routes have led to a root that fits, and to none nearer to the key.
    /// The more there are, the less it has to fit.
    pub(super) fn is_certain(&self, root: &Node) -> bool {
        let routes = self.ends.get(&root.id).copied().unwrap_or(0);
        let doubt = match (self.memory.limits.confirm, routes) {
            (2.., 0..=2) => Doubt::Much,
            (2.., 3) => Doubt::Little,
            (2.., _) => Doubt::Least,
            _ => self.doubt(root),
        };
        let nearest = self.memory.root_claims.values().next().map(|(node, _)| node.id);
        routes >= self.memory.limits.confirm
            && nearest == Some(root.id)
            && self.memory.is_plausible(doubt)
    }

    /// How much a root has to fit: less if several led to it.
    pub(super) fn doubt(&self, root: &Node) -> Doubt {
        match self.reached.get(&root.id) {
            Some(2..) => Doubt::Least,
            _ => Doubt::Little,
        }
    }

    /// The misdeeds that this walk has caught. `found`: the node that had the value, and whether it
    /// was asked as the root.
    pub(crate) fn misdeeds(&self, found: Option<(Node, bool)>) -> Vec<(PeerId, Misdeed)> {
        let mut misdeeds = self.memory.misdeeds.clone();
        if let Some((holder, true)) = found {
            let at = self.memory.distance_after(&holder);
            let denied = self.memory.trace.0.iter().filter(|a| {
                !a.local && a.said == Said::Absent && self.memory.distance_after(&a.node) < at
            });
            misdeeds.extend(denied.map(|a| (a.node.peer.id, Misdeed::DeniedBlock)));
            let false_roots = self
                .memory
                .root_claims
                .range(at..)
                .filter(|(_, (node, told))| told.is_some() && node.peer.id != holder.peer.id);
            misdeeds.extend(false_roots.map(|(_, (node, _))| (node.peer.id, Misdeed::FalseRoot)));
            let doubted = self.memory.doubted.iter().filter(|(_, root)| *root > at);
            misdeeds.extend(doubted.map(|(guide, _)| (*guide, Misdeed::FalseRoot)));
        }
        for (namer, named) in &self.memory.named {
            let is_dead = |peer: &&Peer| self.memory.dead.contains(peer);
            let (dead, others): (Vec<&Peer>, Vec<&Peer>) = named.iter().partition(is_dead);
            let asked = |peer: &&Peer| {
                self.memory.asked.contains(&(**peer, false))
                    || self.memory.asked.contains(&(**peer, true))
            };
            let answered = others.iter().any(asked);
            if dead.len() >= MANY_DEAD && !answered && *namer != self.memory.me.peer.id {
                misdeeds.push((*namer, Misdeed::NamedDead));
            }
        }
        misdeeds
    }

    /// The questions and answers.
    pub(crate) fn into_trace(self) -> Trace {
        self.memory.trace
    }

    /// The error of a walk that ended like this.
    pub(crate) fn into_error(mut self, end: End) -> WalkError {
        if end == End::Absent {
            self.memory.note_silent_roots();
        }
        let (key, trace) = (self.memory.key, std::mem::take(&mut self.memory.trace));
        match end {
            End::Absent => WalkError::Absent { key, roots: self.memory.root_list(), trace },
            End::NoWay => WalkError::NoWay { key, trace },
            End::GaveUp => WalkError::GaveUp { key, trace },
        }
    }
}

impl Memory<'_> {
    /// Whether the nodes known after the key may be all there are. A root tells its whole
    /// successor list.
    pub(super) fn is_plausible(&self, doubt: Doubt) -> bool {
        let told = self.root_claims.values().next().is_some_and(|(_, told)| told.is_some());
        let listed = if told { self.list_length } else { self.list_length / 2.0 };
        self.may_be_all(self.roots_known.keys().map(|at| at.0), listed, doubt)
    }

    /// Whether these may be the nodes that follow the key first. A node that names a root
    /// knows about half a list of its successors besides, often more.
    pub(crate) fn may_follow(&self, list: &[Node]) -> bool {
        let distances = list.iter().map(|node| self.distance_after(node));
        self.may_be_all(distances, self.list_length / 2.0, Doubt::Little)
    }

    /// Whether these may be the distances of all the nodes that follow the key first, if
    /// so many are usually named.
    fn may_be_all(&self, places: impl Iterator<Item = Key>, listed: f64, doubt: Doubt) -> bool {
        if !self.limits.density {
            return true;
        }
        let mut distances: Vec<f64> = places.map(|at| at.as_fraction()).collect();
        distances.sort_unstable_by(f64::total_cmp);
        distances.dedup();
        // N is estimated from lists that may name many nodes that have died since, as the walk
        // sees; the lists that it is told shrink with them. Dead nodes cannot be told from made-up
        // ones, so no more than a few are believed of one peer.
        let answered = (self.trace.0.len() - self.trace.failures()) as f64;
        let dead = |named: &Vec<Peer>| named.iter().filter(|peer| self.dead.contains(peer)).count();
        let dead: usize = self.named.values().map(|named| dead(named).min(DEAD_BELIEVED)).sum();
        let living = ((answered + 1.0) / (answered + 1.0 + dead as f64)).max(0.5);
        let ring = Density {
            nodes: self.nodes * living,
            list_length: self.list_length,
            listed: listed * living * SHORTER_LISTS,
        };
        ring.allows(&distances, doubt)
    }

    /// Nodes among the replicas that were not asked, because they left an earlier call
    /// unanswered: the trace says that they may have it.
    fn note_silent_roots(&mut self) {
        let mut places = BTreeSet::new();
        let nearest = self.roots_known.values().filter(|node| places.insert(node.peer.id));
        let left_out = |n: &&Node| !self.asked.contains(&(n.peer, true)) && self.seems_dead(n);
        let said = |n: &Node| Asked { node: *n, as_root: true, local: false, said: Said::Silent };
        let replicas = nearest.take(self.limits.replicas.max(1));
        let silent: Vec<Asked> = replicas.filter(left_out).map(said).collect();
        self.trace.0.extend(silent);
    }

    /// The root, which is the nearest node that claims to be it, and its successors: those it told
    /// if they fit, or else as far as known.
    fn root_list(&self) -> Vec<Node> {
        let Some((at, (root, told))) = self.root_claims.first_key_value() else {
            return Vec::new();
        };
        let (mut list, told) = (vec![*root], told.as_deref().unwrap_or_default());
        let whole: Vec<Node> = std::iter::once(root).chain(told).copied().collect();
        let fits = self.limits.routes <= 1 || self.may_follow(&whole);
        if !told.is_empty() && fits {
            list.extend(told.iter().take(MAX_ROOTS_TAKEN));
        } else {
            let after = self.roots_known.iter().filter(|((known, _), _)| known > at);
            list.extend(after.map(|(_, node)| *node));
        }
        list
    }
}
