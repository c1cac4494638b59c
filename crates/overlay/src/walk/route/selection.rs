//! Which of several possible next hops to take: server selection (CFS §4.3).
//!
//! C(n) = d + d̄ · H(n): the latency to the candidate, plus the average latency of a call
//! for each hop that would be left after it. H counts the bits that are set among the
//! significant high bits of the distance from the candidate to the key.
//!
//! Departures from the paper:
//! - The namer's measurement of the latency to a candidate is not used: it says little about
//!   the distance from here, and no node can check it. Without a measurement of this node's own
//!   the average stands in.
//! - The lowest bits that the paper takes for significant are no hop where successor lists
//!   are used as knowledge: any node that near knows the root. And H is a little more than
//!   the paper's, see `hops_left`.

use std::time::Duration;

use atoll_key::{Key, PeerId};

use crate::peer_book::PeerBook;

/// How the next hop is chosen among those that lead nearer to the key.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Selection {
    /// The one nearest to the key: the fewest calls (CFS Figure 3).
    #[default]
    NearestKey,
    /// The one with the least C(n): the least time (CFS §4.3).
    Cost,
}

/// H(n): about how many hops are left from a node at this distance before the key until
/// one that knows the root, on a ring where one node out of `nodes` does.
///
/// The paper's ones() is the number of hops if every finger stood at its very start; they stand
/// a little beyond, and the average of a lookup, half of log2, is added. Simulated
/// on a sphere of 512 nodes, the paper's term alone made lookups slower than none did.
fn hops_left(distance: &Key, nodes: f64) -> f64 {
    let average = (1.0 + distance.as_fraction() * nodes).log2() / 2.0;
    f64::from(ones(distance, nodes)) + average
}

/// ones((n − id) >> (160 − log N)), of a distance n − id.
fn ones(distance: &Key, nodes: f64) -> u32 {
    let mut top = [0; 8];
    top.copy_from_slice(&distance.0[..8]);
    let significant_bits = nodes.max(1.0).log2().ceil().min(63.0) as u32;
    match significant_bits {
        0 => 0,
        bits => (u64::from_be_bytes(top) >> (64 - bits)).count_ones(),
    }
}

/// C(n), seconds; d is measured, or else the average.
pub(super) fn cost_secs(book: &PeerBook, peer: &PeerId, distance: &Key, nodes: f64) -> f64 {
    let mean = book.mean_latency().unwrap_or(Duration::from_secs(1));
    let latency = book.latency(peer).unwrap_or(mean);
    latency.as_secs_f64() + mean.as_secs_f64() * hops_left(distance, nodes)
}

#[cfg(test)]
mod tests {
    use atoll_env::Instant;

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn peer(n: u8) -> PeerId {
        PeerId([n; 32])
    }

    fn at_distance(top: u64) -> Key {
        let mut key = Key::MAX;
        key.0[..8].copy_from_slice(&top.to_be_bytes());
        key
    }

    /// CFS §4.3: ones((n − id) >> (160 − log N)).
    #[test]
    fn the_ones_among_the_significant_bits_are_counted() {
        assert_eq!(ones(&at_distance(0b1011 << 60), 16.0), 3);
        // The lower bits do not count, however many are set.
        assert_eq!(ones(&at_distance(u64::MAX >> 4), 16.0), 0);
        assert_eq!(ones(&at_distance(u64::MAX >> 4), 32.0), 1);
        assert_eq!(ones(&at_distance(u64::MAX), 1.0), 0);
        assert_eq!(ones(&at_distance(u64::MAX), 1e30), 63);
    }

    #[test]
    fn a_near_node_is_worth_a_hop_more_and_a_far_one_is_not() {
        let book = PeerBook::default();
        let now = Instant::default();
        (0..900).for_each(|_| book.answered(&peer(1), MS * 100, now));
        book.answered(&peer(2), MS, now);
        book.answered(&peer(3), MS * 350, now);
        let cost = |n, bits: u64| cost_secs(&book, &peer(n), &at_distance(bits << 60), 16.0);
        // A node that was never measured is as far as the average.
        assert!(cost(2, 0b0111) > cost(9, 0b0011), "a hop is more than 41 ms");
        assert!(cost(9, 0b0011) < cost(3, 0b0001), "and less than 264 ms");
    }
}
