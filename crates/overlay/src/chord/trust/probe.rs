//! Probes: nodes that may have failed are pinged, and forgotten if they are dead.
//!
//! A node that gave no answer, that a failure report names, or that a call waits for too long is
//! pinged before anything else follows from it, except that a node which this node itself found
//! silent leaves the tables at once, and comes back if it answers the ping.

use atoll_net::{CallError, Peer};

use crate::Node;
use crate::chord::ring::servers::Servers;
use crate::chord::ring::state::ChordState;
use crate::chord::{Chord, calls};

/// The most nodes being pinged.
const MAX_PROBING: usize = 64;

impl Chord {
    /// Takes a node for dead, with all its virtual servers, until it is heard of first-hand
    /// or the suspicion runs out.
    pub(in crate::chord) fn found_dead(&self, peer: Peer) {
        let until = self.env.now() + self.config.suspect_for;
        self.table_failed(&peer);
        self.forget(&|node| node.peer == peer, |servers| {
            servers.admission.suspect_peer(peer, until)
        });
    }

    /// As [`Chord::found_dead`] for one virtual server of a node that lives.
    pub(in crate::chord) fn found_vacant(&self, gone: &Node) {
        let until = self.env.now() + self.config.suspect_for;
        self.forget(&|node| node == gone, |servers| servers.admission.suspect_node(*gone, until));
    }

    fn forget(&self, gone: &dyn Fn(&Node) -> bool, suspect: impl FnOnce(&mut Servers)) {
        let had_fingers = self.update(|servers, _| {
            let had_fingers =
                servers.states().flat_map(ChordState::fingers).any(|(_, node)| gone(&node));
            suspect(servers);
            servers.forget(gone);
            had_fingers
        });
        if had_fingers {
            self.fingers_due.notify();
        }
        let known = self.table_for_the_lost();
        if !known.is_empty() {
            self.update(|servers, now| servers.fall_back_on(&known, now));
        }
    }

    /// Pings a node that may have failed, unless that is being done, and takes it back if it answers
    /// and belongs before a first successor.
    pub(in crate::chord) fn probe_soon(&self, node: Node) {
        {
            let probing = &mut self.lock().trust.probing;
            if self.owns(&node) || probing.len() >= MAX_PROBING || !probing.insert(node) {
                return;
            }
        }
        let chord = self.arc();
        self.env.spawn(Box::pin(async move {
            if chord.probe_node(&node).await {
                let adopter = chord.lock().servers.would_adopt(&node);
                if let Some(index) = adopter {
                    chord.adopt(index, &node, None).await;
                }
            }
            chord.lock().trust.probing.remove(&node);
        }));
    }

    /// Pings a node and forgets it if it is dead. Returns whether it lives on a ring.
    pub(in crate::chord) async fn probe_node(&self, node: &Node) -> bool {
        match self.call_ping(node).await {
            Ok(true) => {
                self.lock().servers.admission.unsuspect(node);
                true
            }
            Ok(false) => {
                self.found_vacant(node);
                false
            }
            Err(error) => !self.forget_if_useless(node, &error),
        }
    }

    /// A call to a node brought this instead of an answer: draws the conclusion. Returns
    /// whether the node is of no use as a neighbour.
    pub(in crate::chord) fn forget_if_useless(&self, node: &Node, error: &CallError) -> bool {
        if calls::is_vacant(error) {
            self.found_vacant(node);
        } else if calls::is_no_neighbour(error) {
            self.found_dead(node.peer);
        } else {
            return false;
        }
        true
    }

    /// Pings the corroborated nodes: the successor may not report their death.
    pub(in crate::chord) fn probe_corroborated(&self) {
        let corroborated = self.lock().servers.corroborated();
        corroborated.into_iter().for_each(|node| self.probe_soon(node));
    }
}
