//! Joining, leaving, and small rings.

use std::time::Duration;

use atoll_key::PeerId;
use atoll_net::Peer;
use atoll_overlay::chord::{Chord, ChordConfig, JoinError, JoinFailure};
use atoll_overlay::walk::Said;
use atoll_overlay::{Node, Overlay, Route};

use super::cluster::{Cluster, MINUTE, keys, lan};

#[test]
fn a_ring_of_one_answers_for_every_key() {
    let cluster = Cluster::grown(lan(1), ChordConfig::default(), 1);
    let chord = cluster.chord(cluster.hosts()[0]);
    assert!(chord.neighbourhood().range().unwrap().is_full());
    for key in keys(10) {
        assert_eq!(chord.route(&key, false), Route::Root(vec![chord.me()]));
    }
    assert_eq!(chord.estimated_nodes(), 1.0);
}

#[test]
fn a_node_on_no_ring_answers_for_nothing() {
    let cluster = Cluster::new(lan(1), ChordConfig::default());
    let chord = cluster.chord(cluster.add());
    assert_eq!(chord.neighbourhood().range(), None);
    assert_eq!(chord.route(&keys(1)[0], true), Route::Nowhere);
}

#[test]
fn five_nodes_are_at_rest_within_a_second_of_the_last_join() {
    for seed in 0..10 {
        let cluster = Cluster::grown(lan(seed), ChordConfig::default(), 5);
        let took = cluster.run_until_ideal(MINUTE);
        assert!(took < Duration::from_secs(1), "seed {seed}: {took:?}");
        for host in cluster.hosts() {
            assert_eq!(cluster.chord(host).estimated_nodes(), 5.0);
        }
    }
}

#[test]
fn five_nodes_of_which_two_are_killed_at_once_are_three_on_a_ring() {
    for seed in 0..10 {
        let cluster = Cluster::grown(lan(seed), ChordConfig::default(), 5);
        cluster.run_until_ideal(MINUTE);
        cluster.run_secs(30);
        let hosts = cluster.hosts();
        let first = seed as usize % 5;
        cluster.crash(hosts[first]);
        cluster.crash(hosts[(first + 1 + seed as usize / 5 % 4) % 5]);
        let took = cluster.run_until_ideal(MINUTE);
        assert_eq!(cluster.live().len(), 3);
        assert!(took < Duration::from_secs(4), "seed {seed}: {took:?}");
    }
}

#[test]
fn all_but_one_can_die_and_the_last_is_a_ring_of_one() {
    let cluster = Cluster::grown(lan(3), ChordConfig::default(), 4);
    cluster.run_until_ideal(MINUTE);
    for host in cluster.hosts().into_iter().skip(1) {
        cluster.crash(host);
    }
    cluster.run_until_ideal(MINUTE);
    let last = cluster.chord(cluster.hosts()[0]);
    assert!(last.neighbourhood().range().unwrap().is_full());
}

#[test]
fn a_node_that_leaves_is_forgotten_without_a_timeout() {
    let cluster = Cluster::grown(lan(5), ChordConfig::default(), 6);
    cluster.run_until_ideal(MINUTE);
    cluster.watch(Vec::new());
    cluster.leave(cluster.hosts()[2]);
    let took = cluster.run_until_ideal(MINUTE);
    assert!(took < Duration::from_millis(500), "{took:?}");
}

#[test]
fn a_node_that_left_can_come_back() {
    let cluster = Cluster::grown(lan(6), ChordConfig::default(), 4);
    cluster.run_until_ideal(MINUTE);
    let hosts = cluster.hosts();
    let chord = cluster.chord(hosts[2]);
    let leaver = chord.clone();
    cluster.sim.block_on(MINUTE, async move { leaver.leave().await }).unwrap();
    assert!(!chord.neighbourhood().joined);
    cluster.run_secs(5);
    cluster.join(hosts[2], &[hosts[0]]).unwrap();
    cluster.run_until_ideal(MINUTE);
    assert_eq!(chord.neighbourhood().successors.len(), 3);
}

#[test]
fn a_node_that_restarts_at_once_joins_a_ring_that_still_remembers_it() {
    let cluster = Cluster::grown(lan(7), ChordConfig::default(), 5);
    cluster.run_until_ideal(MINUTE);
    let hosts = cluster.hosts();
    cluster.crash(hosts[3]);
    let (env, transport) = cluster.sim.restart(hosts[3]);
    cluster.serve(hosts[3], Chord::new(env, transport, cluster.config.clone()));
    cluster.join(hosts[3], &[hosts[1]]).unwrap();
    cluster.run_until_ideal(MINUTE);
    assert_eq!(cluster.live().len(), 5);
}

#[test]
fn joining_twice_is_refused() {
    let cluster = Cluster::grown(lan(1), ChordConfig::default(), 2);
    let hosts = cluster.hosts();
    assert_eq!(cluster.join(hosts[1], &[hosts[0]]), Err(JoinError::AlreadyJoined));
}

#[test]
fn a_join_error_names_the_peers_asked_and_their_answers() {
    let cluster = Cluster::new(lan(1), ChordConfig::default());
    let (host, other, dead) = (cluster.add(), cluster.add(), cluster.add());
    assert_eq!(cluster.join(host, &[]), Err(JoinError::NobodyToAsk));
    cluster.crash(dead);
    let error = cluster.join(host, &[host, other, dead]).unwrap_err();
    let JoinError::NobodyHelped { asked } = &error else { panic!("{error}") };
    assert_eq!(asked[0], (cluster.peer(host), JoinFailure::Itself));
    let said = |failure: &JoinFailure| match failure {
        JoinFailure::Walk(error) => error.trace().unwrap().0[0].said.clone(),
        other => panic!("{other}"),
    };
    // The other node is up, but on no ring; the third is dead.
    assert_eq!(said(&asked[1].1), Said::Nowhere);
    assert!(matches!(said(&asked[2].1), Said::Failed(e) if e.is_failure_of_peer()));
    for host in [host, other, dead] {
        assert!(error.to_string().contains(&cluster.peer(host).addr.to_string()), "{error}");
    }
    assert!(!cluster.chord(host).neighbourhood().joined);
}

#[test]
fn a_bootstrap_address_with_another_key_now_does_not_stop_the_next() {
    let cluster = Cluster::grown(lan(1), ChordConfig::default(), 1);
    let host = cluster.add();
    let there = cluster.peer(cluster.hosts()[0]);
    let chord = cluster.chord(host);
    let gone = Peer { id: PeerId([9; 32]), addr: there.addr };
    let join = async move { chord.join(vec![gone, there]).await };
    assert_eq!(cluster.sim.block_on(MINUTE, join).unwrap(), Ok(()));
}

#[test]
fn many_nodes_join_at_once() {
    let cluster = Cluster::grown(lan(9), ChordConfig::default(), 1);
    let first = cluster.hosts()[0];
    cluster.watch(Vec::new());
    for _ in 0..32 {
        let host = cluster.add();
        cluster.join_in_background(host, first);
    }
    cluster.run_secs(1);
    let took = cluster.run_until_ideal(MINUTE);
    assert_eq!(cluster.live().iter().filter(|n| n.joined).count(), 33, "{took:?}");
}

#[test]
fn two_hundred_and_fifty_six_nodes_join_at_once() {
    let cluster = Cluster::grown(lan(10), ChordConfig::default(), 1);
    let first = cluster.hosts()[0];
    for _ in 0..256 {
        let host = cluster.add();
        cluster.join_in_background(host, first);
    }
    cluster.run_secs(1);
    let took = cluster.run_until_ideal(MINUTE * 3);
    assert_eq!(cluster.live().iter().filter(|n| n.joined).count(), 257, "{took:?}");
    println!("257 nodes at rest after {took:?}");
}

#[test]
fn the_neighbourhood_tells_when_it_changes() {
    let cluster = Cluster::grown(lan(2), ChordConfig::default(), 2);
    cluster.run_until_ideal(MINUTE);
    let hosts = cluster.hosts();
    let chord = cluster.chord(hosts[0]);
    let epoch = chord.neighbourhood().epoch;
    let changed = chord.changed(epoch);
    cluster.crash(hosts[1]);
    let now = cluster.sim.block_on(MINUTE, changed).unwrap();
    assert_ne!(now, epoch);
    // An epoch that is past already resolves at once.
    let at_once = cluster.sim.block_on(Duration::ZERO, chord.changed(epoch)).unwrap();
    assert_eq!(at_once, chord.neighbourhood().epoch);
}

#[test]
fn a_failure_report_routes_around_a_node_and_a_false_one_is_taken_back() {
    let cluster = Cluster::grown(lan(2), ChordConfig::default(), 5);
    cluster.run_until_ideal(MINUTE);
    cluster.run_secs(3);
    let chord = cluster.chord(cluster.hosts()[0]);
    let head = chord.neighbourhood().successors[0];
    chord.report_failure(&head.peer);
    let routed = |key| match chord.route(key, false) {
        route @ (Route::Root(_) | Route::Closer(_)) => route.nodes(),
        other => panic!("{other:?}"),
    };
    assert!(keys(50).iter().all(|key| !routed(key).contains(&head)));
    let back = cluster.run_until_ideal(MINUTE);
    assert!(back < Duration::from_secs(1), "the node lives, and was pinged: {back:?}");
    assert_eq!(chord.neighbourhood().successors[0], Node::of(head.peer));
}

#[test]
fn a_dead_predecessor_is_noticed_even_if_no_node_takes_its_place() {
    let cluster = Cluster::perfect(lan(8), ChordConfig::default(), 30, false);
    // Only this node is kept up: no other finds out, and so none claims to precede it.
    let chord = cluster.chord(cluster.hosts()[4]);
    chord.start();
    let before = chord.neighbourhood().predecessor.unwrap();
    cluster.crash_silently(cluster.sim.host_of(&before.peer.id).unwrap());
    cluster.run_secs(10);
    assert_eq!(chord.neighbourhood().predecessor, None);
}
