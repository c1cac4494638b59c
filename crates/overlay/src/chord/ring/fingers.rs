//! The finger table: nodes at power-of-two distances.
//!
//! CFS §4.2: entry i names the first node at least 2^(i-1) beyond this one; here the
//! exponent itself is the index. Fingers speed lookups up and need not be right. Of the
//! 512 possible entries only those are kept whose start lies beyond the successor list:
//! in a ring of N nodes about log2(N / r), since hashed IDs are spread evenly.
//!
//! It does not know this node's ID, nor how fingers are found.

use std::collections::BTreeMap;

use atoll_key::Key;

use crate::Node;

/// The most fingers kept. IDs are hashes, so a ring would need 2^64 times r nodes to
/// want more; a list crowded together by chance or malice wants more and does not get it.
pub(crate) const MAX_FINGERS: u32 = 64;

/// Fingers by exponent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Fingers(BTreeMap<u32, Node>);

impl Fingers {
    /// The exponents whose power of two exceeds `distance`, highest first.
    pub(crate) fn beyond(distance: &Key) -> Vec<u32> {
        let lowest = Key::BITS - distance.leading_zeros();
        (lowest.max(Key::BITS - MAX_FINGERS)..Key::BITS).rev().collect()
    }

    /// The finger with this exponent.
    pub(crate) fn node(&self, exponent: u32) -> Option<Node> {
        self.0.get(&exponent).copied()
    }

    /// All fingers with their exponents, lowest first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, Node)> + '_ {
        self.0.iter().map(|(exponent, node)| (*exponent, *node))
    }

    /// The nodes, possibly repeated.
    pub(crate) fn nodes(&self) -> impl Iterator<Item = Node> + '_ {
        self.0.values().copied()
    }

    pub(in crate::chord) fn set(&mut self, exponent: u32, node: Node) {
        self.0.insert(exponent, node);
    }

    pub(in crate::chord) fn drop_exponent(&mut self, exponent: u32) {
        self.0.remove(&exponent);
    }

    pub(in crate::chord) fn replace(&mut self, now: &dyn Fn(&Node) -> Node) {
        self.0.values_mut().for_each(|node| *node = now(node));
    }

    pub(in crate::chord) fn remove(&mut self, gone: &dyn Fn(&Node) -> bool) {
        self.0.retain(|_, node| !gone(node));
    }

    pub(in crate::chord) fn keep_only(&mut self, exponents: &[u32]) {
        self.0.retain(|exponent, _| exponents.contains(exponent));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fingers_beyond_a_distance_start_strictly_after_it() {
        let eighth = Key::power_of_two(509);
        assert_eq!(Fingers::beyond(&eighth), vec![511, 510]);
        assert_eq!(Fingers::beyond(&eighth.previous()), vec![511, 510, 509]);
        assert_eq!(Fingers::beyond(&Key::MAX), Vec::<u32>::new());
    }

    #[test]
    fn a_crowded_list_does_not_demand_hundreds_of_fingers() {
        assert_eq!(Fingers::beyond(&Key::MIN.next()).len(), MAX_FINGERS as usize);
    }
}
