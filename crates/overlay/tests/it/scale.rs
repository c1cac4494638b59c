//! Large rings, started in a perfect state.

use atoll_overlay::Overlay;
use atoll_overlay::chord::ChordConfig;

use super::cluster::{Cluster, lan};

#[test]
fn four_thousand_nodes_keep_a_perfect_ring_and_find_roots() {
    let cluster = Cluster::perfect(lan(1), ChordConfig::default(), 4096, true);
    cluster.run_secs(3);
    cluster.ideal().unwrap();
    let mean = cluster.mean_calls(300);
    println!("4096 nodes: {mean:.2} calls a lookup; ½·log2 N + 1 = 7");
    assert!(mean <= 7.0, "{mean}");
    // A twentieth crashes at once.
    for host in cluster.hosts().into_iter().step_by(20) {
        cluster.crash(host);
    }
    cluster.run_secs(5);
    cluster.ideal().unwrap();
    let estimate = cluster.chord(cluster.hosts()[0]).estimated_nodes();
    assert!((1000.0..12_000.0).contains(&estimate), "{estimate}");
}
