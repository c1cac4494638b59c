//! The answers of one virtual server's tables: the way to a key, the size of the ring, its fingers.

use atoll_key::Key;

use super::ChordState;
use crate::chord::ring::fingers::Fingers;
use crate::chord::ring::routing;
use crate::{Node, Route};

impl ChordState {
    /// Where to ask next for `key`, from this virtual server's tables alone; see
    /// [`Route`] and [`crate::Overlay::route`].
    pub fn route(&self, key: &Key, as_root: bool) -> Route {
        routing::route(std::iter::once(self), key, as_root)
    }

    /// The successor list used as knowledge: the root may stand in it. Far down the list
    /// only if enough nodes follow, so that one of them lives when half of all have died.
    pub(in crate::chord) fn root_in_successors(&self, key: &Key) -> Option<Route> {
        let target = self.distance_of_key(key);
        let at = self.successors.iter().position(|s| self.distance(&s.id) >= target)?;
        let whole = self.knows_whole_ring();
        let enough = self.successors.len().min((self.length.entries / 2).max(4));
        if at == 0 && self.guessing {
            return None;
        }
        if target == Key::MIN || (at > 0 && !whole && self.successors.len() - at < enough) {
            return None;
        }
        let mut list = self.successors[at..].to_vec();
        if whole {
            list.push(self.me);
            list.extend_from_slice(&self.successors[..at]);
        }
        Some(Route::Root(list))
    }

    /// Whether the successor list goes around the whole ring.
    pub fn knows_whole_ring(&self) -> bool {
        match self.predecessor {
            Some(before) => self.successors.iter().any(|s| s.id == before.id),
            None => self.joined && self.successors.is_empty(),
        }
    }

    /// The part of the circle that the successor list covers; none without a list.
    pub fn covered(&self) -> Option<f64> {
        let last = self.successors.last()?;
        Some(self.distance(&last.id).as_fraction().max(f64::MIN_POSITIVE))
    }

    /// CFS §6.1: the r nodes of the successor list cover the fraction f of the circle,
    /// so there are about r / f. Exact on a ring that fits into the list.
    pub fn estimated_nodes(&self) -> f64 {
        match self.covered() {
            Some(covered) if !self.knows_whole_ring() => self.successors.len() as f64 / covered,
            _ => (self.successors.len() + 1) as f64,
        }
    }

    // --- fingers --------------------------------------------------------------------

    /// The exponents i of the fingers worth keeping: those whose start lies beyond the
    /// successor list, which covers the rest. About log2(N / r) of the 512.
    pub fn wanted_fingers(&self) -> Vec<u32> {
        match self.successors.last() {
            Some(last) if !self.knows_whole_ring() => Fingers::beyond(&self.distance(&last.id)),
            _ => Vec::new(),
        }
    }

    /// Where finger `exponent` starts: 2^exponent beyond this node. (The paper counts
    /// from 1: its i-th entry is exponent i − 1.)
    pub fn finger_start(&self, exponent: u32) -> Key {
        self.key().wrapping_add(&Key::power_of_two(exponent))
    }

    /// The finger with this exponent.
    pub fn finger(&self, exponent: u32) -> Option<Node> {
        self.fingers.node(exponent)
    }

    /// All fingers, with their exponents.
    pub fn fingers(&self) -> impl Iterator<Item = (u32, Node)> + '_ {
        self.fingers.iter()
    }

    /// `node` is the first at or after the start of finger `exponent`. If that is beyond
    /// this node, no node is in that half and the finger is dropped.
    pub fn set_finger(&mut self, exponent: u32, node: Node) {
        if node.id != self.me.id && self.distance(&node.id) >= Key::power_of_two(exponent) {
            self.fingers.set(exponent, node);
        } else {
            self.fingers.drop_exponent(exponent);
        }
    }

    /// Drops fingers that the successor list has grown to cover.
    pub fn prune_fingers(&mut self) {
        let wanted = self.wanted_fingers();
        self.fingers.keep_only(&wanted);
    }
}
