//! Introductions: rings that lost sight of each other close like a zipper, and nodes that a
//! list lacks come into it.
//!
//! A node looks for other rings by asking peers it remembers. Whoever is found, or is
//! introduced by anybody (`MEET`), is found its place: before a first successor of ours,
//! which is then introduced to it in turn; in a list of ours that lacks it
//! ([`super::audit`]); or farther on, whoever stands there.
//!
//! Introductions cost calls. Their number is bounded: [`MAX_WAITING`] wait, [`MAX_OF_ONE`] of them from
//! one peer; each is passed on at most [`MEET_HOPS`] times, and to one node; and in ten seconds
//! [`MeetingBudget::OF_ONE`] are taken from one peer and [`MeetingBudget::OF_ALL`] in all.

use std::collections::{BTreeMap, VecDeque};

use atoll_env::{Instant, random_below};
use atoll_key::PeerId;
use atoll_net::Peer;

use super::Chord;
use super::checks::WINDOW;
use crate::Node;

/// How often an introduction is passed on towards its place: any lookup is shorter.
pub(super) const MEET_HOPS: u8 = 32;
/// How often a node looks again when its successor changed during an introduction.
const MEET_TRIES: usize = 4;
/// The most introductions waiting.
const MAX_WAITING: usize = 64;
/// The most of them that one peer has made.
const MAX_OF_ONE: usize = 16;

/// A node that this one may not know, perhaps of another ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Introduction {
    pub node: Node,
    /// How often it may still be passed on.
    pub hops_left: u8,
    /// Who introduced it; none if this node itself came upon it.
    pub source: Option<PeerId>,
}

impl Introduction {
    /// This node itself came upon `node`.
    pub fn own(node: Node, hops_left: u8) -> Introduction {
        Introduction { node, hops_left, source: None }
    }
}

/// Introductions that wait, each node once.
#[derive(Default)]
pub(super) struct Introductions(VecDeque<Introduction>);

impl Introductions {
    /// Queues one, if there is room; whether it does.
    pub fn add(&mut self, new: Introduction) -> bool {
        let of_source = self.0.iter().filter(|waiting| waiting.source == new.source).count();
        let is_known = self.0.iter().any(|waiting| waiting.node == new.node);
        let has_room =
            self.0.len() < MAX_WAITING && (new.source.is_none() || of_source < MAX_OF_ONE);
        let is_taken = !is_known && has_room;
        if is_taken {
            self.0.push_back(new);
        }
        is_taken
    }

    fn next(&mut self) -> Option<Introduction> {
        self.0.pop_front()
    }
}

/// How many introductions of others are taken in a [`WINDOW`].
#[derive(Debug, Default)]
pub(super) struct MeetingBudget {
    began: Instant,
    taken: BTreeMap<PeerId, usize>,
}

impl MeetingBudget {
    /// The most of one peer. A guess: when two rings close, a node of some virtual servers
    /// passes on one for each of them.
    const OF_ONE: usize = 32;
    /// The most of all peers together. A guess: eight that pass on as many as they may.
    const OF_ALL: usize = 256;

    /// Whether one more of `by` is taken. If so, that counts.
    pub fn take(&mut self, by: PeerId, now: Instant) -> bool {
        if now.since(self.began) >= WINDOW {
            *self = MeetingBudget { began: now, ..MeetingBudget::default() };
        }
        let of_one = self.taken.get(&by).copied().unwrap_or(0);
        let may = of_one < Self::OF_ONE && self.taken.values().sum::<usize>() < Self::OF_ALL;
        if may {
            self.taken.insert(by, of_one + 1);
        }
        may
    }
}

impl Chord {
    /// Asks a remembered peer outside the neighbourhood who follows us. On our own ring
    /// the answer is our successor; on another it is somebody to meet.
    pub(super) async fn look_for_other_rings(&self) {
        let Some(stranger) = self.choose_stranger() else { return };
        let index = {
            let count = u64::from(self.lock().servers.count());
            random_below(&*self.env, count) as u16
        };
        let key = self.lock().servers.position(index).id.key().next();
        let Ok(found) = self.walk_to_root_from(&[stranger], &key).await else {
            self.note_failure(&stranger);
            return;
        };
        self.lock().remembered.answered(&stranger.peer);
        self.spent_on_walk(&found.trace);
        let successor = found.value[0];
        let is_known = self.lock().servers.known().iter().any(|node| node.id == successor.id);
        if !is_known && !self.owns(&successor) {
            self.meet(Introduction::own(successor, MEET_HOPS)).await;
        }
    }

    fn choose_stranger(&self) -> Option<Node> {
        let mut inner = self.lock();
        let known = inner.servers.known();
        for node in &known {
            inner.remembered.met(node.peer, &*self.env);
        }
        let is_stranger = |peer: &Peer| !known.iter().any(|node| node.peer.id == peer.id);
        let hurried = inner.servers.is_alone();
        let chosen = inner.remembered.choose(is_stranger, hurried, &*self.env)?;
        Some(Node::at(chosen, inner.servers.position(0).virtual_server))
    }

    /// A remembered peer did not answer. A node that is alone may itself be cut off, and counts
    /// nothing against others.
    fn note_failure(&self, stranger: &Node) {
        let mut inner = self.lock();
        if !inner.servers.is_alone() {
            inner.remembered.failed(&stranger.peer, self.config.merge_every, &*self.env);
        }
    }

    pub(super) fn meet_soon(&self, new: Introduction) {
        let mut inner = self.lock();
        let is_welcome = !self.owns(&new.node) && inner.servers.gate.is_possible(&new.node);
        if is_welcome && inner.to_meet.add(new) {
            drop(inner);
            self.meetings_due.notify();
        }
    }

    pub(super) async fn meet_all(&self) {
        while let Some(next) = {
            let mut inner = self.lock();
            inner.to_meet.next()
        } {
            self.meet(next).await;
        }
    }

    async fn meet(&self, Introduction { node: stranger, hops_left, source }: Introduction) {
        for _ in 0..MEET_TRIES {
            let (adopter, is_head, next) = {
                let inner = self.lock();
                let servers = &inner.servers;
                let is_head = servers.states().any(|s| s.head().is_some_and(|h| h == stranger));
                (servers.would_adopt(&stranger), is_head, servers.preceding(stranger.id.key()))
            };
            if is_head {
                return;
            }
            let Some(index) = adopter else {
                self.vouch_if_missing(&stranger, source, hops_left).await;
                if let Some(next) = next
                    && hops_left > 0
                {
                    let _ = self.call_meet(&next, &stranger, hops_left - 1, source).await;
                }
                return;
            };
            if !self.adopt(index, &stranger, source).await {
                return;
            }
            // Meanwhile somebody nearer may have come: then that one has to be told.
        }
    }
}
