//! Ring merge: rings that lost sight of each other join, and nodes that a list lacks enter it.
//!
//! A node looks for other rings by asking peers it remembers for its own successor. A node that is
//! found so, or that is introduced by another (`INTRODUCE`), is placed: before a first successor of
//! this node, which is then introduced to it in turn; in a list of this node that lacks it
//! ([`crate::chord::trust::audit`]); or it is passed on to the nearest node before its position.
//! Two rings so merge position by position.
//!
//! Introductions cost calls, so their number is limited: [`MAX_WAITING`] wait, [`MAX_OF_ONE`] of
//! them from one peer; each is passed on at most [`INTRODUCE_HOPS`] times, and to one node; so many
//! are accepted from one peer and from all as [`crate::chord::trust::limiter`] says.

use std::collections::VecDeque;

use atoll_env::random_below;
use atoll_key::PeerId;
use atoll_net::Peer;

use crate::Node;
use crate::chord::Chord;
use crate::walk::Start;

/// How often an introduction is passed on towards its place: any lookup is shorter.
pub(in crate::chord) const INTRODUCE_HOPS: u8 = 32;
/// How often a node looks again when its successor changed during an introduction.
const INTRODUCE_TRIES: usize = 4;
/// The most introductions waiting.
const MAX_WAITING: usize = 64;
/// The most of them that one peer has made.
const MAX_OF_ONE: usize = 16;

/// A node that this one may not know, perhaps of another ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::chord) struct Introduction {
    pub node: Node,
    /// How often it may still be passed on.
    pub hops_left: u8,
    /// The peer that introduced it; none if this node itself came upon it.
    pub source: Option<PeerId>,
}

impl Introduction {
    /// This node itself came upon `node`.
    pub(crate) fn own(node: Node, hops_left: u8) -> Introduction {
        Introduction { node, hops_left, source: None }
    }
}

/// Introductions that wait, each node once.
#[derive(Default)]
pub(in crate::chord) struct Introductions(VecDeque<Introduction>);

impl Introductions {
    /// Queues one, if there is room; whether it does.
    pub(crate) fn add(&mut self, new: Introduction) -> bool {
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

impl Chord {
    /// Asks a remembered peer outside the neighbourhood for the successor of this node's position.
    /// On the same ring that is this node's successor; on another ring it is a node to place.
    pub(in crate::chord) async fn look_for_other_rings(&self) {
        let Some(stranger) = self.choose_stranger() else { return };
        let index = {
            let count = u64::from(self.lock().servers.count());
            random_below(&*self.env, count) as u16
        };
        let key = self.lock().servers.position(index).id.key().next();
        let Ok(found) = self.walk_to_place(&key, Start::Elsewhere(&[stranger])).await else {
            self.note_failure(&stranger);
            return;
        };
        self.lock().membership.remembered.answered(&stranger.peer);
        self.spent_on_the_way(found.trace.calls());
        let successor = found.value[0];
        let is_known = self.lock().servers.known().iter().any(|node| node.id == successor.id);
        if !is_known && !self.owns(&successor) {
            self.place_node(Introduction::own(successor, INTRODUCE_HOPS)).await;
        }
    }

    fn choose_stranger(&self) -> Option<Node> {
        let mut inner = self.lock();
        let known = inner.servers.known();
        for node in &known {
            inner.membership.remembered.met(node.peer, &*self.env);
        }
        let is_stranger = |peer: &Peer| !known.iter().any(|node| node.peer.id == peer.id);
        let hurried = inner.servers.is_alone();
        let chosen = inner.membership.remembered.choose(is_stranger, hurried, &*self.env)?;
        Some(Node::at(chosen, inner.servers.position(0).virtual_server))
    }

    /// A remembered peer did not answer. A node that is alone may itself be cut off, and counts
    /// nothing against others.
    fn note_failure(&self, stranger: &Node) {
        let mut inner = self.lock();
        if !inner.servers.is_alone() {
            inner.membership.remembered.failed(&stranger.peer, self.config.merge_every, &*self.env);
        }
    }

    pub(in crate::chord) fn queue_introduction(&self, new: Introduction) {
        let mut inner = self.lock();
        let is_welcome = !self.owns(&new.node) && inner.servers.admission.is_possible(&new.node);
        if is_welcome && inner.membership.introductions.add(new) {
            drop(inner);
            self.merge_due.notify();
        }
    }

    pub(in crate::chord) async fn place_introduced(&self) {
        while let Some(next) = {
            let mut inner = self.lock();
            inner.membership.introductions.next()
        } {
            self.place_node(next).await;
        }
    }

    async fn place_node(&self, Introduction { node: stranger, hops_left, source }: Introduction) {
        for _ in 0..INTRODUCE_TRIES {
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
                self.corroborate_if_missing(&stranger, source, hops_left).await;
                if let Some(next) = next
                    && hops_left > 0
                {
                    let _ = self.call_introduce(&next, &stranger, hops_left - 1).await;
                }
                return;
            };
            if !self.adopt(index, &stranger, source).await {
                return;
            }
            // A nearer successor may have joined meanwhile: then that one has to be told.
        }
    }
}
