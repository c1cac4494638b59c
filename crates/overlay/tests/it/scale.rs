//! Large rings, started in a perfect state.

use atoll_overlay::Overlay;
use atoll_overlay::census::{self, Census};
use atoll_overlay::chord::ChordConfig;

use super::cluster::{Cluster, MINUTE, lan};

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

/// A command that waited for 24 nodes never ended: each node sees 17 of them, and estimates 18 to 42.
#[test]
fn a_walk_around_the_ring_counts_its_nodes_exactly() {
    for (count, virtual_servers) in [(1, 1), (2, 1), (16, 1), (17, 1), (24, 1), (24, 3), (200, 1)] {
        let config = ChordConfig { virtual_servers, ..ChordConfig::default() };
        let cluster = Cluster::perfect(lan(1), config, count, true);
        cluster.run_secs(3);
        for host in cluster.hosts().into_iter().step_by(7) {
            let chord = cluster.chord(host);
            let known = census::known(&chord.neighbourhoods());
            let counting = async move { census::count(&*chord, 1000).await };
            let counted = cluster.sim.block_on(MINUTE, counting).expect("ends").expect("a ring");
            let all = Census { peers: count as u64, is_whole: true };
            assert_eq!(counted, all, "{count} nodes with {virtual_servers} places");
            assert!(!known.is_whole || known == all, "{known:?} of {count}");
            assert!(known.is_whole || count * usize::from(virtual_servers) > 17);
        }
    }
    let cluster = Cluster::perfect(lan(1), ChordConfig::default(), 200, true);
    let chord = cluster.chord(cluster.hosts()[0]);
    let counting = async move { census::count(&*chord, 100).await };
    let counted = cluster.sim.block_on(MINUTE, counting).expect("ends").expect("a ring");
    assert_eq!(counted, Census { peers: 100, is_whole: false }, "as far as it was to go");
}
