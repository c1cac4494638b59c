//! Nodes whose wall clocks are wrong: the others find out the time for them.
//!
//! The story: one machine started without a battery for its clock, 50 years back. It
//! refused every receipt as one from the far future, so that every put that came to it
//! failed, for all publishers.

use std::time::Duration;

use crate::ring::{Ring, block};

const YEAR_MS: i64 = 365 * 24 * 3600 * 1000;

/// `right` nodes whose clocks are right, then one for each of `skews_ms`.
fn ring(seed: u64, right: usize, skews_ms: &[i64]) -> Ring {
    let mut ring = Ring::configured(seed, atoll_dht::DhtConfig::default(), right);
    skews_ms.iter().for_each(|skew| ring.join_skewed(*skew));
    ring.settle();
    ring
}

/// All leases last as long as they should by their holders' lease clocks, which began at the
/// holders' own wall clocks.
fn assert_leases(ring: &Ring, numbers: std::ops::Range<u32>) {
    for n in numbers {
        for holder in ring.holders(&block(n).0.key()) {
            let info = ring.members[holder].store.info(&block(n).0.key());
            let began = ring.sim.env(ring.members[holder].host).unix_ms() / 1000;
            let end = began + ring.config.lease.as_secs();
            let expires = info.expect("memory does not fail").expect("a holder").expires_unix_secs;
            assert!(expires.abs_diff(end) < 600, "block {n} at {holder}: {expires}, not {end}");
        }
    }
}

#[test]
fn one_wrong_clock_does_not_keep_others_from_publishing() {
    for (seed, skew) in [(1, -50 * YEAR_MS), (2, 56 * YEAR_MS), (3, 3 * 24 * 3600 * 1000)] {
        let ring = ring(seed, 5, &[skew]);
        ring.put(0, 0..60);
        ring.put(3, 60..80);
        ring.until_replicated();
        ring.assert_placed(0..80);
        assert!(ring.members[5].store.usage().blocks > 0, "seed {seed}: it holds its share");
        assert_leases(&ring, 0..80);
        ring.assert_readable(0..20);
    }
}

#[test]
fn on_a_ring_of_three_two_right_clocks_are_enough() {
    let ring = ring(4, 2, &[-50 * YEAR_MS]);
    ring.put(0, 0..20);
    ring.assert_placed(0..20);
    assert_leases(&ring, 0..20);
}

#[test]
fn a_publisher_with_a_wrong_clock_publishes() {
    for (seed, skew) in [(5, -50 * YEAR_MS), (6, 56 * YEAR_MS)] {
        let ring = ring(seed, 5, &[skew]);
        ring.put(5, 0..40);
        ring.assert_placed(0..40);
        assert_leases(&ring, 0..40);
    }
}

/// A clock that is set while its node runs used to end all leases there at once.
#[test]
fn a_clock_that_jumps_ends_no_lease() {
    let ring = ring(7, 5, &[0]);
    ring.put(0, 0..40);
    ring.sim.set_clock_skew_ms(ring.members[5].host, YEAR_MS);
    ring.put(1, 40..60);
    ring.sim.run_for(Duration::from_secs(3 * 24 * 3600));
    ring.assert_placed(0..60);
    let dropped: u64 = ring.members.iter().map(|m| m.dht.stats().expired_blocks).sum();
    assert_eq!(dropped, 0);
}

/// A third of the nodes agree on a wrong time: they neither move the others nor keep any
/// from publishing.
#[test]
fn a_minority_of_wrong_clocks_stops_nobody() {
    let ring = ring(8, 6, &[YEAR_MS; 3]);
    ring.put(0, 0..40);
    ring.put(7, 40..60);
    ring.assert_placed(0..60);
    assert_leases(&ring, 0..60);
}
