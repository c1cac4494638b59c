//! Server selection (CFS §4.3) on a simulated network with distances.

use std::time::Duration;

use atoll_overlay::chord::{ChordConfig, TablePolicy};
use atoll_overlay::walk::Selection;
use atoll_sim::{Latency, SimConfig};

use futures_util::future::join_all;

use super::cluster::{Cluster, MINUTE, keys};

const NODES: usize = 256;
/// So many of them look keys up, as readers of files do, and so come to know many nodes.
const CLIENTS: usize = 8;
const LOOKUPS: u64 = 400;

/// Nodes spread over a sphere, as in Pastis, that have measured those in their tables.
fn sphere(selection: Selection) -> Cluster {
    let latency = Latency::Sphere { max: Duration::from_millis(300) };
    let sim = SimConfig { seed: 5, latency, ..SimConfig::default() };
    let config = ChordConfig { selection, table: TablePolicy::Fingers, ..ChordConfig::default() };
    let cluster = Cluster::perfect(sim, config, NODES, true);
    cluster.run_secs(10);
    cluster
}

/// The mean time of a lookup and the mean number of its calls; all find the root.
fn lookups(cluster: &Cluster) -> (Duration, f64) {
    let clients = cluster.hosts().into_iter().take(CLIENTS).enumerate().map(|(n, host)| {
        let (chord, env) = (cluster.chord(host), cluster.sim.env(host));
        async move {
            let (mut took, mut calls) = (Duration::ZERO, 0);
            for key in keys(LOOKUPS).into_iter().skip(n).step_by(CLIENTS) {
                let start = env.now();
                let found = chord.find_root_traced(&key).await.expect("no node has failed");
                took += env.now().since(start);
                calls += found.trace.calls();
                assert_eq!(found.value[0].id, cluster.root(&key));
            }
            (took, calls)
        }
    });
    let all = cluster.sim.block_on(MINUTE * 30, join_all(clients)).unwrap();
    let took: Duration = all.iter().map(|(took, _)| took).sum();
    let calls: usize = all.iter().map(|(_, calls)| calls).sum();
    (took / LOOKUPS as u32, calls as f64 / LOOKUPS as f64)
}

#[test]
fn selection_makes_lookups_faster_for_hardly_more_calls() {
    let (without, calls_without) = lookups(&sphere(Selection::NearestKey));
    let (with, calls_with) = lookups(&sphere(Selection::Cost));
    println!("{without:?} and {calls_without:.2} calls without, {with:?} and {calls_with:.2} with");
    assert!(with < without, "{with:?} with selection, {without:?} without");
    assert!(calls_with < calls_without * 1.15, "{calls_with} calls, {calls_without} without");
}
