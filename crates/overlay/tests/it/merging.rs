//! Rings that lost sight of each other become one.

use std::time::Duration;

use atoll_overlay::chord::messages::{self, Introduce, WireNode};
use atoll_overlay::chord::{Chord, ChordConfig, TablePolicy};
use atoll_sim::{HostConfig, HostId};

use super::cluster::{Cluster, MINUTE, lan};
use super::virtual_servers::mixed;

#[test]
fn a_healed_partition_becomes_one_ring() {
    let config = || ChordConfig { successors: 4, ..ChordConfig::default() };
    let single = [(1, 6), (2, 7), (3, 40), (4, 40)]
        .map(|(seed, count)| Cluster::grown(lan(seed), config(), count));
    // Of one to eight virtual servers each.
    let many = [(1, 2), (2, 7), (3, 16)].map(|(seed, count)| mixed(lan(seed), config(), count));
    for cluster in single.into_iter().chain(many) {
        let (seed, count) = (cluster.sim.seed(), cluster.hosts().len());
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
    let remembered = cluster.chord(hosts[1]).remembered();
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
fn one_introduction_merges_two_rings_completely() {
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
        assert!(cluster.ideal().is_err(), "the search for other rings is off");
        let introduce = Introduce { node: WireNode(cluster.chord(right[0]).me()), hops_left: 32 };
        let outsider = cluster.sim.add_host(HostConfig::default());
        let header = messages::encode(&introduce);
        cluster.call(outsider, left[0], messages::INTRODUCE, header).unwrap();
        let took = cluster.run_until_ideal(MINUTE);
        println!("seed {seed}: one ring {took:?} after the introduction");
    }
}

/// How many nodes of either half remember a node of the other.
fn rememberers(cluster: &Cluster, halves: [&[HostId]; 2]) -> usize {
    let remembers = |host: &HostId, others: &[HostId]| {
        let known = cluster.chord(*host).known_peers();
        known.iter().any(|peer| others.iter().any(|other| cluster.peer(*other) == *peer))
    };
    let [left, right] = halves;
    left.iter().filter(|host| remembers(host, right)).count()
        + right.iter().filter(|host| remembers(host, left)).count()
}

/// Restarts a node with the state on its disk.
fn restart(cluster: &Cluster, host: HostId, via: HostId) {
    let remembered = cluster.chord(host).remembered();
    cluster.crash(host);
    let (env, transport) = cluster.sim.restart(host);
    let config = ChordConfig { remembered, ..cluster.config.clone() };
    cluster.serve(host, Chord::new(env, transport, config));
    cluster.join(host, &[via]).unwrap();
}

/// The peers a node remembers were displaced at random by those it goes on hearing from:
/// after some hours no node of either half of a partition remembered any node of the other,
/// and the halves stayed apart for ever. Here the search for other rings, and with it what
/// displaced them, runs 80 times as often as it usually does.
#[test]
fn halves_that_were_cut_off_for_hours_become_one_ring() {
    let config = ChordConfig {
        successors: 72,
        distinct_successors: 72,
        stabilize_every: Duration::from_secs(4),
        merge_every: Duration::from_millis(250),
        audit_every: MINUTE * 60_000,
        table: TablePolicy::Fingers,
        ..ChordConfig::default()
    };
    let cluster = Cluster::perfect(lan(7), config, 160, true);
    cluster.run_secs(30);
    let hosts = cluster.hosts();
    let (left, right) = hosts.split_at(80);
    cluster.sim.partition(&[left, right]);
    cluster.run_secs(600);
    for host in &left[..10] {
        restart(&cluster, *host, left[20]);
    }
    cluster.run_secs(600);
    println!("{} remember the other half", rememberers(&cluster, [left, right]));
    assert!(rememberers(&cluster, [&left[..10], right]) > 10 + right.len() / 2);
    cluster.sim.heal();
    let took = cluster.run_until_ideal(MINUTE * 30);
    println!("one ring {took:?} after healing");
}
