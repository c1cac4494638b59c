//! Nodes with several ring positions (CFS §5.3).

use std::collections::BTreeSet;
use std::time::Duration;

use atoll_key::NodeId;
use atoll_overlay::chord::ring::list::ListLength;
use atoll_overlay::chord::{ChordConfig, VirtualServersError};
use atoll_overlay::{Overlay, Route, distinct_peers};
use atoll_sim::SimConfig;

use super::churn::churned;
use super::cluster::{Cluster, Dice, MINUTE, keys, lan};

fn config(successors: usize, virtual_servers: u16) -> ChordConfig {
    ChordConfig { successors, virtual_servers, ..ChordConfig::default() }
}

/// A ring of nodes with one to eight virtual servers, grown one by one.
pub(crate) fn mixed(sim: SimConfig, config: ChordConfig, nodes: usize) -> Cluster {
    let mut dice = Dice(sim.seed);
    let cluster = Cluster::new(sim, config);
    let first = cluster.add_with(1 + dice.below(8) as u16);
    cluster.chord(first).create();
    for _ in 1..nodes {
        let host = cluster.add_with(1 + dice.below(8) as u16);
        cluster.join(host, &[first]).unwrap();
    }
    cluster
}

fn mean_calls(virtual_servers: u16, successors: usize) -> f64 {
    Cluster::perfect(lan(1), config(successors, virtual_servers), 64, false).mean_calls(400)
}

/// CFS §5.3: virtual servers "can take short-cuts through each others' routing tables",
/// which "exactly compensates for the increased number of servers".
#[test]
fn hops_do_not_grow_with_virtual_servers() {
    // With short lists too, so that there are hops.
    for successors in [4, 16] {
        let alone = mean_calls(1, successors);
        for virtual_servers in [6, 24] {
            let many = mean_calls(virtual_servers, successors);
            println!(
                "64 nodes, r = {successors}: {alone:.2} calls a lookup, {many:.2} with {virtual_servers} virtual servers each"
            );
            assert!(many <= alone + 0.3, "{many} > {alone}");
        }
    }
}

#[test]
fn one_node_alone_with_many_virtual_servers_is_root_of_everything() {
    let cluster = Cluster::new(lan(1), config(16, 128));
    let host = cluster.add();
    let chord = cluster.chord(host);
    chord.create();
    cluster.ideal().unwrap();
    for key in keys(50) {
        let Route::Root(list) = chord.route(&key, true) else { panic!("{key}") };
        assert_eq!(list[0].id, cluster.root(&key));
    }
    assert_eq!(chord.estimated_peers(), 1.0);
    let before = cluster.sim.stats().call_count();
    cluster.run_secs(60);
    assert_eq!(cluster.sim.stats().call_count(), before, "no node calls itself");
    cluster.ideal().unwrap();
}

#[test]
fn nodes_with_one_to_eight_virtual_servers_come_to_rest_as_one_ring() {
    for seed in 1..=4 {
        let cluster = mixed(lan(seed), config(16, 1), 12);
        let took = cluster.run_until_ideal(MINUTE);
        assert!(took < Duration::from_secs(3), "seed {seed}: {took:?}");
        assert!(cluster.live().len() > 12);
        for host in cluster.hosts() {
            let chord = cluster.chord(host);
            assert_eq!(chord.neighbourhoods().len(), usize::from(chord.virtual_servers()));
        }
    }
}

#[test]
fn a_list_holds_enough_different_nodes_for_the_copies_of_a_block() {
    // Three nodes hold most positions.
    let cluster = Cluster::new(lan(3), config(4, 1));
    let length = ListLength { entries: 4, distinct: 4 };
    assert_eq!(cluster.config.list_length(), length);
    let first = cluster.add_with(30);
    cluster.chord(first).create();
    for virtual_servers in [30, 30, 1, 1, 1] {
        let host = cluster.add_with(virtual_servers);
        cluster.join(host, &[first]).unwrap();
    }
    cluster.run_until_ideal(MINUTE);
    let live = cluster.live();
    assert_eq!(live.len(), 93);
    for around in &live {
        let others: Vec<_> =
            around.successors.iter().filter(|n| n.peer != around.me.peer).copied().collect();
        assert_eq!(distinct_peers(&others, 10).len(), 4, "{:?}", around.me);
    }
    assert!(live.iter().any(|around| around.successors.len() > 12), "far beyond r");
}

/// CFS §5.3: with as_root, the virtual server at or after the key is meant.
#[test]
fn a_node_answers_for_whichever_of_its_virtual_servers_is_the_root() {
    let cluster = Cluster::perfect(lan(4), config(8, 8), 16, false);
    for key in keys(200) {
        let root = cluster.root(&key);
        for host in cluster.hosts() {
            let chord = cluster.chord(host);
            let own: BTreeSet<NodeId> = chord.neighbourhoods().iter().map(|n| n.me.id).collect();
            match chord.route(&key, true) {
                Route::Root(list) => {
                    assert_eq!(list[0].id, root);
                    assert!(own.contains(&root));
                }
                Route::NotRoot(before) => {
                    let nearest = own.iter().map(|id| id.key().distance_from(&key)).min().unwrap();
                    assert!(before.id.key().distance_from(&key) < nearest, "nearer than we are");
                }
                other => panic!("{other:?}"),
            }
            if let Route::Closer(nodes) = chord.route(&key, false) {
                assert!(nodes.iter().all(|node| !own.contains(&node.id)), "itself");
            }
        }
    }
}

#[test]
fn the_number_of_physical_nodes_is_estimated_beside_that_of_positions() {
    let cluster = Cluster::perfect(lan(5), config(16, 4), 500, false);
    let mean = |of: &dyn Fn(&dyn Overlay) -> f64| {
        let hosts = cluster.hosts();
        hosts.iter().map(|h| of(&*cluster.chord(*h))).sum::<f64>() / hosts.len() as f64
    };
    let positions = mean(&|overlay| overlay.estimated_nodes());
    let peers = mean(&|overlay| overlay.estimated_peers());
    println!("500 nodes of 4 virtual servers: {positions:.0} positions, {peers:.0} nodes");
    assert!((1800.0..2300.0).contains(&positions), "{positions}");
    assert!((450.0..600.0).contains(&peers), "{peers}");
}

#[test]
fn virtual_servers_are_added_and_given_up_at_run_time() {
    let cluster = mixed(lan(6), config(8, 1), 6);
    cluster.run_until_ideal(MINUTE);
    cluster.watch(Vec::new());
    let host = cluster.hosts()[2];
    let chord = cluster.chord(host);
    for count in [12, 3, 1, 40, 39, 1] {
        // Positions given up are not believed to be back, on hearsay, for ten seconds.
        cluster.run_secs(11);
        let epoch = chord.epoch();
        let change = {
            let chord = chord.clone();
            async move { chord.set_virtual_servers(count).await }
        };
        cluster.sim.block_on(MINUTE, change).unwrap().unwrap();
        let took = cluster.run_until_ideal(MINUTE);
        println!("{count} virtual servers: at rest {took:?} after the change");
        assert_eq!(chord.virtual_servers(), count);
        assert_ne!(chord.epoch(), epoch, "watchers are told");
        assert!(took < Duration::from_secs(5), "{count}: {took:?}");
    }
    let too_many = {
        let chord = chord.clone();
        async move { (chord.set_virtual_servers(0).await, chord.set_virtual_servers(129).await) }
    };
    let (none, many) = cluster.sim.block_on(MINUTE, too_many).unwrap();
    assert_eq!(none, Err(VirtualServersError::None));
    assert_eq!(many, Err(VirtualServersError::TooMany { wanted: 129, most: 128 }));
    cluster.ideal().unwrap();
}

#[test]
fn a_node_that_leaves_takes_all_its_virtual_servers_with_it() {
    let cluster = mixed(lan(7), config(8, 1), 8);
    cluster.run_until_ideal(MINUTE);
    cluster.watch(Vec::new());
    let most = cluster.hosts().into_iter().max_by_key(|h| cluster.chord(*h).virtual_servers());
    cluster.leave(most.unwrap());
    let took = cluster.run_until_ideal(MINUTE);
    assert!(took < Duration::from_secs(1), "{took:?}");
}

#[test]
fn the_invariants_hold_while_nodes_with_virtual_servers_come_and_go() {
    for seed in 1..=4 {
        let cluster = churned(mixed(lan(seed), config(4, 1), 5), 8, 80, false);
        cluster.run_until_ideal(MINUTE);
    }
}

#[test]
fn the_invariants_hold_when_machines_vanish_with_all_their_virtual_servers() {
    for seed in 21..=24 {
        let cluster = churned(mixed(lan(seed), config(4, 1), 5), 8, 60, true);
        cluster.run_until_ideal(MINUTE * 2);
    }
}

/// Calls and bytes that a node of `virtual_servers` sends in a second when nothing happens.
fn idle_cost(virtual_servers: u16) -> (f64, f64) {
    const NODES: usize = 100;
    const SECS: u64 = 64;
    let cluster = Cluster::perfect(lan(9), config(16, virtual_servers), NODES, true);
    cluster.run_secs(30);
    let before = cluster.sim.stats();
    cluster.run_secs(SECS);
    let after = cluster.sim.stats();
    cluster.ideal().unwrap();
    let share = |count: u64| count as f64 / NODES as f64 / SECS as f64;
    (share(after.call_count() - before.call_count()), share(after.sent_bytes - before.sent_bytes))
}

#[test]
fn an_idle_virtual_server_costs_less_than_half_a_call_a_second() {
    for virtual_servers in [1, 16] {
        let (calls, bytes) = idle_cost(virtual_servers);
        println!("{virtual_servers} virtual servers, idle: {calls:.1} calls/s, {bytes:.0} B/s");
        assert!(calls <= 0.45 * f64::from(virtual_servers) + 0.5, "{calls}");
        assert!(bytes <= 150.0 * f64::from(virtual_servers) + 200.0, "{bytes}");
    }
}
