//! Corroborated nodes: this node found them by other ways than its successor's list, asked them,
//! and they follow it.
//!
//! A successor list repeats the list of the first successor. A node that is missing there, by
//! malice or because the news has not come round, stays in the list if it was found otherwise
//! ([`crate::chord::trust::audit`]), in its place among the others. Liars can therefore withhold
//! nodes only from a node that knows no honest one. A corroborated node leaves the list as any
//! other does: when it is found dead, or when enough nearer nodes are known.
//!
//! Invariant: all of them are in the successor list.

use atoll_key::NodeId;

use super::{ChordState, Told};
use crate::Node;
use crate::chord::ring::list::wanted_list;
use crate::chord::trust::admission::{Judge, Verdict};

impl ChordState {
    /// Whether a live node at `id` may belong into the list, behind the first successor.
    pub fn lacks(&self, id: &NodeId) -> bool {
        let Some(head) = self.head() else { return false };
        self.joined
            && *id != self.me.id
            && self.distance(id) > self.distance(&head.id)
            && (self.is_within_list(id) || !self.length.is_full(&self.me.peer, &self.successors))
            && !self.successors.iter().any(|node| node.id == *id)
    }

    fn is_within_list(&self, id: &NodeId) -> bool {
        self.successors.last().is_some_and(|last| self.distance(id) <= self.distance(&last.id))
    }

    /// Takes `node`, alive and checked, into the list, between others. Returns whether it was
    /// missing there.
    pub fn corroborate(&mut self, node: Node) -> bool {
        let is_missing = self.lacks(&node.id) && self.is_within_list(&node.id);
        if is_missing {
            let mut list = self.successors.clone();
            list.push(node);
            list.sort_by_cached_key(|node| self.distance(&node.id));
            self.take_corroborated(&[node], list);
        }
        is_missing
    }

    /// Whether there should be more in the list than there is.
    pub fn is_short(&self) -> bool {
        let is_full = self.length.is_full(&self.me.peer, &self.successors);
        self.joined && !is_full && !self.knows_whole_ring()
    }

    /// Whether a list too short ends just before a node that has said `told`. No other node may
    /// continue it: the list might then skip a member (Zave's base).
    pub fn is_continued_by(&self, node: &Node, told: &Told) -> bool {
        self.lacks(&node.id)
            && !self.is_within_list(&node.id)
            && self.is_short()
            && told.predecessor.map(|before| before.id) == self.successors.last().map(|n| n.id)
    }

    /// Continues a list too short with a node that follows its last one, and with that one's
    /// own list, as far as they may be taken in.
    pub fn continue_with(&mut self, node: Node, told: &Told, judge: &Judge<'_>) {
        if self.is_continued_by(&node, told) {
            let onward = told.successors.iter().copied();
            let onward = onward.take_while(|node| judge(node) == Verdict::Welcome);
            let mut list = self.successors.clone();
            for node in std::iter::once(node).chain(onward) {
                let has_come_around = list.last().is_some_and(|last| {
                    node.id == self.me.id || self.distance(&node.id) <= self.distance(&last.id)
                });
                if has_come_around {
                    break;
                }
                list.push(node);
            }
            let new = list[self.successors.len()..].to_vec();
            self.take_corroborated(&new, list);
        }
    }

    fn take_corroborated(&mut self, new: &[Node], list: Vec<Node>) {
        self.corroborated.extend(new);
        let list = wanted_list(&self.me, list.into_iter(), self.length);
        self.set_successors(list);
    }

    /// The corroborated nodes.
    pub(in crate::chord) fn corroborated(&self) -> &[Node] {
        &self.corroborated
    }

    /// `list`, which begins with the first successor, with the corroborated nodes between its
    /// entries. Beyond its last entry they stay if they stand right behind it now: the list then
    /// skips only nodes that it skipped before.
    pub(in crate::chord) fn with_corroborated(
        &self,
        mut list: Vec<Node>,
        judge: &Judge<'_>,
    ) -> Vec<Node> {
        let (Some(head), Some(end)) = (list.first().copied(), list.last().copied()) else {
            return list;
        };
        let (nearest, farthest) = (self.distance(&head.id), self.distance(&end.id));
        let lives = |node: &&Node| judge(node) != Verdict::Suspected;
        for node in self.corroborated.iter().filter(lives) {
            let distance = self.distance(&node.id);
            let is_new = !list.iter().any(|listed| listed.id == node.id);
            if is_new && distance > nearest && distance < farthest {
                list.push(*node);
            }
        }
        list.sort_by_cached_key(|node| self.distance(&node.id));
        let behind = self.successors.iter().skip_while(|node| node.id != end.id).skip(1);
        list.extend(behind.take_while(|node| self.corroborated.contains(node) && lives(node)));
        wanted_list(&self.me, list.into_iter(), self.length)
    }

    /// Keeps the invariant.
    pub(in crate::chord) fn forget_unlisted(&mut self) {
        let successors = &self.successors;
        self.corroborated.retain(|node| successors.contains(node));
    }
}
