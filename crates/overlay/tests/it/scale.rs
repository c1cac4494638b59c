//! Large rings, started in a perfect state.

use atoll_overlay::Overlay;
use atoll_overlay::chord::ChordConfig;

use super::cluster::{Cluster, Dice, MINUTE, keys, lan};

#[test]
fn four_thousand_nodes_keep_a_perfect_ring_and_find_roots() {
    let cluster = Cluster::perfect(lan(1), ChordConfig::default(), 4096, true);
    cluster.run_secs(3);
    cluster.ideal().unwrap();
    let hosts = cluster.hosts();
    let mut dice = Dice(3);
    let mut calls = 0;
    for key in keys(300) {
        let chord = cluster.chord(hosts[dice.below(hosts.len())]);
        let walk = async move { chord.find_root_traced(&key).await };
        let found = cluster.sim.block_on(MINUTE, walk).unwrap().unwrap();
        assert_eq!(found.value[0].id, cluster.root(&key));
        calls += found.trace.calls();
    }
    let mean = calls as f64 / 300.0;
    println!("4096 nodes: {mean:.2} calls a lookup; ½·log2 N + 1 = 7");
    assert!(mean <= 7.0, "{mean}");
    // A twentieth crashes at once.
    for host in hosts.iter().step_by(20) {
        cluster.crash(*host);
    }
    cluster.run_secs(5);
    cluster.ideal().unwrap();
    let estimate = cluster.chord(cluster.hosts()[0]).estimated_nodes();
    assert!((1000.0..12_000.0).contains(&estimate), "{estimate}");
}
