//! Lookups on rings at rest and on broken ones.

use atoll_overlay::chord::{ChordConfig, TablePolicy};
use atoll_overlay::{Node, Overlay};

use super::cluster::{Cluster, Dice, MINUTE, keys, lan};

fn mean_calls(nodes: usize, lookups: u64) -> f64 {
    Cluster::perfect(lan(1), ChordConfig::default(), nodes, false).mean_calls(lookups)
}

#[test]
fn lookups_take_half_of_log2_n_calls_and_one() {
    for (nodes, lookups) in [(64, 300), (1024, 300)] {
        let mean = mean_calls(nodes, lookups);
        let bound = 0.5 * (nodes as f64).log2() + 1.0;
        println!("{nodes} nodes: {mean:.2} calls a lookup; ½·log2 N + 1 = {bound:.1}");
        assert!(mean <= bound, "{nodes} nodes: {mean} > {bound}");
    }
}

#[test]
fn on_a_ring_of_five_a_lookup_asks_the_root_only() {
    assert!(mean_calls(5, 100) <= 1.0);
}

#[test]
fn a_grown_ring_finds_its_fingers() {
    let config =
        ChordConfig { successors: 4, table: TablePolicy::Fingers, ..ChordConfig::default() };
    let cluster = Cluster::grown(lan(3), config, 60);
    cluster.run_until_ideal(MINUTE);
    cluster.run_secs(120);
    for host in cluster.hosts() {
        let state = cluster.chord(host).state();
        assert!(!state.wanted_fingers().is_empty());
        for exponent in state.wanted_fingers() {
            let first = cluster.root(&state.finger_start(exponent));
            let wanted = if state.finger(exponent).is_some() { Some(first) } else { None };
            // A finger may be missing only where no node is: the first beyond is nearer.
            assert_eq!(state.finger(exponent).map(|n| n.id), wanted);
            let beyond = first.key().distance_from(state.me().id.key());
            let exists = beyond >= atoll_key::Key::power_of_two(exponent);
            assert_eq!(wanted.is_some(), exists, "finger {exponent} of {:?}", state.me());
        }
    }
}

/// The nodes that live after each has failed with chance one half, all at once. "With high
/// probability" (CFS §4.2) no node loses all of its successors; where one does, others
/// are drawn.
fn halved(seed: u64) -> Cluster {
    let config = ChordConfig { successors: 14, ..ChordConfig::default() }; // 2·log2 128
    let mut dice = Dice(seed);
    loop {
        let cluster = Cluster::perfect(lan(seed), config.clone(), 128, false);
        for host in cluster.hosts() {
            if dice.below(2) == 0 {
                cluster.crash(host);
            }
        }
        let live = cluster.live();
        let lives = |node: &Node| live.iter().any(|n| n.me == *node);
        if live.iter().all(|n| n.successors.iter().any(lives)) {
            return cluster;
        }
    }
}

/// CFS §4.2, theorem 1: "if every node then fails with probability 1/2, then with high probability
/// find_successor returns the closest living successor to the query key", where r is 2 log2 N. No
/// node has noticed any failure yet.
#[test]
fn lookups_find_the_closest_live_successor_when_half_of_all_nodes_have_failed() {
    let (mut calls, mut failures, mut lookups) = (0, 0, 0);
    for seed in 0..20 {
        let cluster = halved(seed);
        let hosts = cluster.hosts();
        for (n, key) in keys(100).into_iter().enumerate() {
            let found = cluster.find_root(hosts[n % hosts.len()], key);
            let found = found.unwrap_or_else(|e| panic!("seed {seed}: {e}"));
            assert_eq!(found.value[0].id, cluster.root(&key), "seed {seed}: {}", found.trace);
            calls += found.trace.calls();
            failures += found.trace.failures();
            lookups += 1;
        }
    }
    let mean = f64::from(calls as u32) / f64::from(lookups);
    println!("{mean:.2} calls, {:.2} failures a lookup", failures as f64 / f64::from(lookups));
    // CFS Figure 14: about one call more than without failures.
    assert!(mean <= 0.5 * 7.0 + 2.0, "{mean}");
}

#[test]
fn a_ring_of_which_half_has_failed_heals() {
    let cluster = halved(77);
    for host in cluster.hosts() {
        cluster.chord(host).start();
    }
    let took = cluster.run_until_ideal(MINUTE * 2);
    println!("64 of 128 nodes gone: at rest after {took:?}");
}

#[test]
fn a_newcomer_that_its_predecessor_does_not_know_is_found() {
    let cluster = Cluster::perfect(lan(4), ChordConfig::default(), 40, false);
    let host = cluster.add();
    cluster.join(host, &[cluster.hosts()[0]]).unwrap();
    let newcomer = cluster.chord(host).me();
    // Only its successor knows it: the lists of all others name that one as the root.
    for asker in cluster.hosts() {
        let found = cluster.find_root(asker, *newcomer.id.key()).unwrap();
        assert_eq!(found.value[0], newcomer);
    }
}

#[test]
fn the_size_of_the_ring_is_estimated_from_the_successor_list() {
    let cluster = Cluster::perfect(lan(5), ChordConfig::default(), 1000, false);
    let estimates: Vec<f64> =
        cluster.hosts().iter().map(|h| cluster.chord(*h).estimated_nodes()).collect();
    let mean = estimates.iter().sum::<f64>() / estimates.len() as f64;
    assert!((800.0..1300.0).contains(&mean), "{mean}");
}

#[test]
fn a_ring_at_rest_costs_about_one_call_per_node_and_period() {
    let cluster = Cluster::perfect(
        lan(6),
        ChordConfig { table: TablePolicy::Fingers, ..ChordConfig::default() },
        200,
        true,
    );
    cluster.run_secs(30);
    let before = cluster.sim.stats().call_count();
    cluster.run_secs(100);
    let per_node_and_sec = (cluster.sim.stats().call_count() - before) as f64 / 200.0 / 100.0;
    println!("{per_node_and_sec:.2} calls per node and second at rest");
    assert!(per_node_and_sec < 2.0, "{per_node_and_sec}");
}
