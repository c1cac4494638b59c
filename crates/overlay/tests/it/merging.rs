//! Rings that lost sight of each other become one.

use atoll_net::{Peer, Request};
use atoll_overlay::chord::messages::{self, Meet, WireNode};
use atoll_overlay::chord::{Chord, ChordConfig};
use atoll_sim::HostConfig;

use super::cluster::{Cluster, MINUTE, lan};

#[test]
fn a_healed_partition_becomes_one_ring() {
    for (seed, count) in [(1, 6), (2, 7), (3, 40), (4, 40)] {
        let config = ChordConfig { successors: 4, ..ChordConfig::default() };
        let cluster = Cluster::grown(lan(seed), config, count);
        cluster.run_until_ideal(MINUTE);
        cluster.run_secs(30);
        let hosts = cluster.hosts();
        let (left, right) = hosts.split_at(count / 2);
        cluster.sim.partition(&[left, right]);
        cluster.run_secs(120);
        let known = |host| cluster.chord(host).state().known();
        let across = left
            .iter()
            .any(|l| known(*l).iter().any(|n| right.iter().any(|r| cluster.peer(*r) == n.peer)));
        assert!(!across, "seed {seed}: the halves have given each other up");
        cluster.sim.heal();
        let took = cluster.run_until_ideal(MINUTE * 3);
        println!("{count} nodes in two halves: one ring {took:?} after healing");
    }
}

#[test]
fn a_node_that_restarted_as_a_ring_of_its_own_finds_the_others() {
    let cluster = Cluster::grown(lan(5), ChordConfig::default(), 4);
    cluster.run_until_ideal(MINUTE);
    let hosts = cluster.hosts();
    let remembered: Vec<Peer> = cluster.chord(hosts[1]).known_peers();
    assert_eq!(remembered.len(), 3);
    cluster.crash(hosts[1]);
    cluster.run_until_ideal(MINUTE);
    cluster.run_secs(120);
    let (env, transport) = cluster.sim.restart(hosts[1]);
    let config = ChordConfig { remembered, ..cluster.config.clone() };
    let chord = Chord::new(env, transport, config);
    cluster.serve(hosts[1], chord.clone());
    chord.create();
    assert!(cluster.ideal().is_err(), "two rings");
    let took = cluster.run_until_ideal(MINUTE);
    assert!(took < MINUTE / 4, "{took:?}");
}

#[test]
fn a_node_cut_off_for_long_comes_back() {
    let cluster = Cluster::grown(lan(6), ChordConfig::default(), 5);
    cluster.run_until_ideal(MINUTE);
    let hosts = cluster.hosts();
    cluster.sim.partition(&[&hosts[..1], &hosts[1..]]);
    cluster.run_secs(600);
    cluster.sim.heal();
    cluster.run_until_ideal(MINUTE);
    assert_eq!(cluster.chord(hosts[0]).state().successors().len(), 4);
}

#[test]
fn one_introduction_closes_two_rings_like_a_zipper() {
    for seed in 1..10 {
        let config = ChordConfig {
            successors: 10,
            merge_every: MINUTE * 60_000,
            audit_every: MINUTE * 60_000,
            ..ChordConfig::default()
        };
        let cluster = Cluster::grown(lan(seed), config, 40);
        cluster.run_until_ideal(MINUTE);
        let hosts = cluster.hosts();
        let (left, right) = hosts.split_at(20);
        cluster.sim.partition(&[left, right]);
        cluster.run_secs(120);
        cluster.sim.heal();
        cluster.run_secs(30);
        assert!(cluster.ideal().is_err(), "nobody looks for other rings");
        let meet = Meet { node: WireNode(cluster.chord(right[0]).me()), hops_left: 32 };
        let request =
            Request { method: messages::MEET, header: messages::encode(&meet), parts: Vec::new() };
        let outsider = cluster.sim.add_host(HostConfig::default());
        let call = cluster.sim.transport(outsider).call(cluster.peer(left[0]), request, MINUTE);
        cluster.sim.block_on(MINUTE, call).unwrap().unwrap();
        let took = cluster.run_until_ideal(MINUTE);
        println!("seed {seed}: one ring {took:?} after the introduction");
    }
}
