//! Nodes with wrong wall clocks find out, and their peers do.

use std::time::Duration;

use atoll_overlay::Overlay;
use atoll_overlay::chord::ChordConfig;
use atoll_sim::HostId;

use super::cluster::{Cluster, MINUTE, lan};

const YEAR_MS: i64 = 365 * 24 * 3600 * 1000;

fn correction(cluster: &Cluster, host: HostId) -> i64 {
    cluster.chord(host).clock_correction_ms()
}

fn wrong(cluster: &Cluster, host: HostId) -> Vec<HostId> {
    let report = cluster.chord(host).clock();
    report.wrong.iter().map(|(peer, _)| cluster.sim.host_of(&peer.id).unwrap()).collect()
}

#[test]
fn a_node_whose_clock_starts_in_1970_learns_the_time_while_it_joins() {
    for seed in 1..4 {
        let cluster = Cluster::grown(lan(seed), ChordConfig::default(), 9);
        cluster.run_until_ideal(MINUTE);
        let late = cluster.add();
        cluster.sim.set_clock_skew_ms(late, -50 * YEAR_MS);
        cluster.join(late, &cluster.hosts()[..1]).unwrap();
        let off = correction(&cluster, late) - 50 * YEAR_MS;
        assert!(off.abs() < 1000, "seed {seed}: {off}");
        cluster.run_secs(60);
        for host in cluster.hosts() {
            if host != late {
                assert_eq!(correction(&cluster, host), 0, "seed {seed}: {host:?} is right");
                assert_eq!(wrong(&cluster, host), [late], "seed {seed}");
            }
        }
        // The clock is set.
        cluster.sim.set_clock_skew_ms(late, 2000);
        assert_eq!(correction(&cluster, late), 0);
        cluster.sim.run_for(Duration::from_secs(900));
        assert!(cluster.hosts().iter().all(|host| wrong(&cluster, *host).is_empty()));
    }
}

#[test]
fn a_clock_that_jumps_while_its_node_runs_is_corrected_at_once() {
    let cluster = Cluster::grown(lan(5), ChordConfig::default(), 5);
    cluster.run_until_ideal(MINUTE);
    let jumped = cluster.hosts()[2];
    cluster.sim.set_clock_skew_ms(jumped, 3 * YEAR_MS);
    assert!((correction(&cluster, jumped) + 3 * YEAR_MS).abs() < 1000);
}

/// They all agree on the same lie, and are a third.
#[test]
fn a_minority_that_lies_about_the_time_corrects_no_honest_clock() {
    for seed in 1..4 {
        let cluster = Cluster::new(lan(seed), ChordConfig::default());
        let first = cluster.add();
        cluster.chord(first).create();
        for n in 1..12 {
            let host = cluster.add();
            if n % 3 == 0 {
                cluster.sim.set_clock_skew_ms(host, YEAR_MS);
            }
            cluster.join(host, &[first]).unwrap();
        }
        cluster.run_until_ideal(MINUTE);
        cluster.run_secs(300);
        for (n, host) in cluster.hosts().into_iter().enumerate() {
            let is_liar = n > 0 && n % 3 == 0;
            let right = if is_liar { -YEAR_MS } else { 0 };
            assert!((correction(&cluster, host) - right).abs() < 1000, "seed {seed}: {host:?}");
            assert_eq!(wrong(&cluster, host).len(), if is_liar { 2 } else { 3 }, "seed {seed}");
        }
    }
}
