//! Which of several possible next hops to take: server selection (CFS §4.3).
//!
//! C(n) = d + d̄ · H(n): the latency to the candidate, plus the average latency of a call
//! for each hop that would be left after it. H counts the bits that are set among the
//! significant high bits of the distance from the candidate to the key.
//!
//! Departures from the paper:
//! - What a namer says about latencies is hearsay. This node's own measurement goes before
//!   it; without one, a claim from afar is no measure of the way from here: the candidate
//!   is taken to be as far as the third side of the triangle, with a right angle at the
//!   namer. So claiming to be near everybody attracts nobody.
//! - The lowest bits that the paper takes for significant are no hop where successor lists
//!   are used as knowledge: any node that near knows the root. And H is a little more than
//!   the paper's, see `hops_left`.

use std::time::Duration;

use atoll_env::Instant;
use atoll_key::{Key, PeerId};

use crate::peer_book::{Misdeed, PeerBook};

/// How the next hop is chosen among those that lead nearer to the key.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Selection {
    /// The one nearest to the key: the fewest calls (CFS Figure 3).
    #[default]
    NearestKey,
    /// The one with the least C(n): the least time (CFS §4.3).
    Cost,
}

/// What somebody said about the latency of a node it named.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::walk) struct LatencyClaim {
    pub namer: PeerId,
    pub latency: Duration,
}

/// No candidate is thought to be farther away than this many average calls: a false
/// claim may cost a detour, not rule anybody out. A guess.
const FARTHEST_IN_MEANS: u32 = 4;
/// A claim is false if the call took so many times what it and the way to the namer
/// allow, and [`SLACK`] more. A guess: far beyond what a busy node adds.
const FALSE_FROM_TIMES: u32 = 4;
/// See [`FALSE_FROM_TIMES`].
const SLACK: Duration = Duration::from_millis(100);

/// H(n): about how many hops are left from a node at this distance before the key until
/// somebody knows the root, on a ring where one node out of `nodes` does.
///
/// The paper's ones() is what is left if every finger stood at its very start; they stand
/// a little beyond, and what a lookup takes on average, half of log2, is added. Simulated
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

/// C(n), seconds.
pub(super) fn cost_secs(
    book: &PeerBook,
    peer: &PeerId,
    claim: Option<LatencyClaim>,
    distance: &Key,
    nodes: f64,
) -> f64 {
    let mean = book.mean_latency().unwrap_or(Duration::from_secs(1));
    let hops = hops_left(distance, nodes);
    latency(book, peer, claim, mean).as_secs_f64() + mean.as_secs_f64() * hops
}

/// d: measured, else claimed within bounds, else the average.
fn latency(
    book: &PeerBook,
    peer: &PeerId,
    claim: Option<LatencyClaim>,
    mean: Duration,
) -> Duration {
    if let Some(measured) = book.latency(peer) {
        return measured;
    }
    let Some(claim) = claim else { return mean };
    // The third side of a triangle, if the angle at the namer may be any: never less than
    // the way to the namer.
    let to_namer = book.latency(&claim.namer).unwrap_or(mean).as_secs_f64();
    let third = to_namer.hypot(claim.latency.as_secs_f64());
    Duration::from_secs_f64(third).min(mean * FARTHEST_IN_MEANS)
}

/// The node of a latency claim has answered after `took`: records a false claim.
pub(in crate::walk) fn check_latency_claim(
    book: &PeerBook,
    claim: LatencyClaim,
    took: Duration,
    now: Instant,
) {
    let Some(to_namer) = book.latency(&claim.namer) else { return };
    let allowed = (to_namer + claim.latency) * FALSE_FROM_TIMES + SLACK;
    if took > allowed {
        book.lied(&claim.namer, Misdeed::FalseLatency, now);
    }
}

#[cfg(test)]
mod tests {
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

    fn claim(latency: Duration) -> Option<LatencyClaim> {
        Some(LatencyClaim { namer: peer(1), latency })
    }

    fn book() -> PeerBook {
        let book = PeerBook::default();
        (0..9).for_each(|_| book.answered(&peer(1), MS * 100, Instant::default()));
        book
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
        let book = book();
        let cost = |latency, bits: u64| {
            cost_secs(&book, &peer(9), claim(latency), &at_distance(bits << 60), 16.0)
        };
        // The namer is 100 ms away, which is also the average.
        assert!(cost(MS, 0b0111) > cost(MS * 100, 0b0011), "a hop is more than 41 ms");
        assert!(cost(MS, 0b0011) < cost(MS * 350, 0b0001), "and less than 264 ms");
    }

    #[test]
    fn measuring_goes_before_hearsay_and_no_claim_is_the_average() {
        let book = book();
        book.answered(&peer(2), MS * 300, Instant::default());
        let mean = book.mean_latency().expect("ten calls");
        assert_eq!(latency(&book, &peer(2), claim(MS), mean), MS * 300);
        assert_eq!(latency(&book, &peer(3), None, mean), mean);
    }

    #[test]
    fn a_lie_about_latency_is_bounded_both_ways() {
        let book = book();
        assert_eq!(
            latency(&book, &peer(3), claim(MS), MS * 100).as_millis(),
            100,
            "as far as its namer"
        );
        assert_eq!(latency(&book, &peer(3), claim(MS * 99_999), MS * 100), MS * 400);
    }

    #[test]
    fn a_peer_that_claims_latencies_that_are_far_off_loses_trust() {
        let book = book();
        let trust = || book.trust(&peer(1), Instant::default());
        let claim = LatencyClaim { namer: peer(1), latency: MS * 10 };
        check_latency_claim(&book, claim, MS * 200, Instant::default());
        assert!(trust() > 0.999, "200 ms are not impossible");
        check_latency_claim(&book, claim, MS * 900, Instant::default());
        assert!(trust() < 0.999);
    }
}
