//! Two processes of one key, as when a node's directory was copied: one of them ends, and nobody can
//! make a node end that is the only one.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use atoll_env::BoxFuture;
use atoll_net::{CallError, Peer, Refusal, Reply, Request, Service, Transport};
use atoll_overlay::Overlay;
use atoll_overlay::chord::messages::{self, KEY_CLAIM, KeyClaim, SEEN_AT, SeenAt, WirePeer};
use atoll_overlay::chord::{Chord, ChordConfig, JoinError};
use atoll_sim::{HostConfig, HostId};

use super::cluster::{Cluster, MINUTE, lan};

const SEEDS: u64 = 6;

/// Adds a host with the key of `original`: a copy of its node, on no ring yet.
fn add_copy(cluster: &Cluster, original: HostId, config: &ChordConfig) -> HostId {
    let identity = Some(cluster.peer(original).id);
    let host = cluster.sim.add_host(HostConfig { identity, ..HostConfig::default() });
    let (env, transport) = (cluster.sim.env(host), cluster.sim.transport(host));
    cluster.serve(host, Chord::new(env, transport, config.clone()));
    host
}

/// Runs until one of the two has to end, and checks that it is `copy`, for the other one's sake.
#[track_caller]
fn only_the_copy_ends(cluster: &Cluster, original: HostId, copy: HostId, limit: Duration) {
    let (goes_on, ends) = (cluster.chord(original), cluster.chord(copy));
    let seed = cluster.sim.seed();
    let is_found = cluster.sim.run_until_true(limit, |_| {
        ends.superseded_by().is_some() || goes_on.superseded_by().is_some()
    });
    assert!(is_found, "seed {seed}: two processes of one key went on for {limit:?}");
    assert_eq!(ends.superseded_by(), Some(cluster.peer(original).addr), "seed {seed}");
    // It has left for good.
    cluster.run_secs(5);
    ends.create();
    let (again, via) = (ends.clone(), cluster.peer(cluster.hosts()[0]));
    let join = cluster.sim.block_on(MINUTE, async move { again.join(vec![via]).await }).unwrap();
    assert!(matches!(join, Err(JoinError::Superseded { .. })), "seed {seed}: {join:?}");
    assert!(ends.neighbourhoods().iter().all(|place| !place.joined), "seed {seed}");
    // Its process ends, and the ring is as if it had never been there.
    cluster.crash(copy);
    cluster.run_until_ideal(MINUTE * 4);
    cluster.run_secs(60);
    assert_eq!(goes_on.superseded_by(), None, "seed {seed}");
    let found = goes_on.duplicate().expect("the other one knows");
    assert!(!found.prevails && found.addr.ip() == cluster.sim.peer(copy).addr.ip(), "seed {seed}");
    cluster.run_until_ideal(MINUTE);
}

/// A ring that has run for a while, and one of its nodes.
fn ring(seed: u64) -> (Cluster, HostId) {
    let cluster = Cluster::grown(lan(seed), ChordConfig::default(), 5);
    cluster.run_until_ideal(MINUTE);
    cluster.run_secs(30);
    let original = cluster.hosts()[seed as usize % 5];
    (cluster, original)
}

/// Both counted as one node, and stored other blocks.
#[test]
fn of_two_processes_with_one_key_the_one_started_later_ends() {
    for seed in 0..SEEDS {
        let (cluster, original) = ring(seed);
        let copy = add_copy(&cluster, original, &cluster.config);
        let via = cluster.hosts().into_iter().find(|host| *host != original).unwrap();
        cluster.join_in_background(copy, via);
        only_the_copy_ends(&cluster, original, copy, MINUTE);
    }
}

/// A wrong wall clock of either changes nothing.
#[test]
fn the_wall_clock_does_not_decide_which_one_ends() {
    for (seed, skew_ms) in [(1, -40 * 365 * 86_400_000), (2, 40 * 365 * 86_400_000)] {
        let (cluster, original) = ring(seed);
        let copy = add_copy(&cluster, original, &cluster.config);
        cluster.sim.set_clock_skew_ms(copy, skew_ms);
        let via = cluster.hosts().into_iter().find(|host| *host != original).unwrap();
        cluster.join_in_background(copy, via);
        only_the_copy_ends(&cluster, original, copy, MINUTE);
    }
}

/// Without any other node, which could tell it: a copy knows where its directory was used.
#[test]
fn a_copy_of_the_only_node_calls_the_address_it_had() {
    let cluster = Cluster::grown(lan(3), ChordConfig::default(), 1);
    cluster.run_secs(30);
    let original = cluster.hosts()[0];
    let former_address = Some(cluster.peer(original).addr);
    let config = ChordConfig { former_address, ..cluster.config.clone() };
    let copy = add_copy(&cluster, original, &config);
    cluster.chord(copy).create();
    only_the_copy_ends(&cluster, original, copy, MINUTE);
}

/// On either side of a partition the ring goes on with one of the two; it is noticed as the sides
/// meet.
#[test]
fn two_processes_that_were_kept_apart_are_noticed_as_the_rings_merge() {
    for seed in 0..SEEDS {
        let (cluster, original) = ring(seed);
        let (here, there): (Vec<HostId>, Vec<HostId>) =
            cluster.hosts().into_iter().partition(|host| *host <= original);
        if there.is_empty() {
            continue;
        }
        let copy = add_copy(&cluster, original, &cluster.config);
        cluster.sim.partition(&[&here, &[there.as_slice(), &[copy]].concat()]);
        cluster.run_secs(20);
        cluster.join_in_background(copy, there[0]);
        cluster.run_secs(120);
        assert!(cluster.chord(copy).neighbourhood().joined, "seed {seed}");
        for host in [original, copy] {
            assert_eq!(cluster.chord(host).duplicate(), None, "seed {seed}");
        }
        cluster.sim.heal();
        only_the_copy_ends(&cluster, original, copy, MINUTE * 4);
    }
}

/// Others reach both, which is no proof: nothing is done until one of them reaches the other.
#[test]
fn two_processes_that_cannot_reach_each_other_go_on_until_they_can() {
    for seed in 0..SEEDS {
        let (cluster, original) = ring(seed);
        let copy = add_copy(&cluster, original, &cluster.config);
        cluster.sim.cut(&[original], &[copy]);
        cluster.sim.cut(&[copy], &[original]);
        let via = cluster.hosts().into_iter().find(|host| *host != original).unwrap();
        cluster.join_in_background(copy, via);
        cluster.run_secs(120);
        for host in [original, copy] {
            assert_eq!(cluster.chord(host).duplicate(), None, "seed {seed}");
        }
        cluster.sim.heal();
        only_the_copy_ends(&cluster, original, copy, MINUTE);
    }
}

/// A new address, after a restart elsewhere.
#[test]
fn a_node_that_has_moved_is_not_ended() {
    for seed in 0..SEEDS {
        let (cluster, original) = ring(seed);
        let former_address = Some(cluster.peer(original).addr);
        // As a process that ended, or as a machine that is no more.
        match seed % 2 {
            0 => cluster.crash(original),
            _ => cluster.crash_silently(original),
        }
        let config = ChordConfig { former_address, ..cluster.config.clone() };
        let moved = add_copy(&cluster, original, &config);
        cluster.join(moved, &[cluster.hosts()[0]]).unwrap();
        for _ in 0..60 {
            cluster.run_secs(2);
            assert_eq!(cluster.chord(moved).duplicate(), None, "seed {seed}");
        }
        cluster.run_until_ideal(MINUTE);
    }
}

fn seen_at(one: Peer, other: Peer) -> bytes::Bytes {
    messages::encode(&SeenAt { one: WirePeer(one), other: WirePeer(other) })
}

/// Names addresses where no node is, of other nodes, and of the liar; says that it has the key.
#[test]
fn liars_end_no_node_and_make_it_call_few_addresses() {
    let (cluster, victim) = ring(4);
    let (target, liar) = (cluster.peer(victim), cluster.sim.add_host(HostConfig::default()));
    let neighbours: Vec<Peer> = cluster.hosts().iter().map(|host| cluster.peer(*host)).collect();
    let before = cluster.sim.stats().methods.get(&KEY_CLAIM).map_or(0, |calls| calls.call_count);
    for round in 0..60u16 {
        for n in 0..50u16 {
            let addr = SocketAddr::from(([10, 200, n as u8, round as u8], 1));
            let elsewhere = Peer { addr, ..target };
            cluster.send(liar, victim, SEEN_AT, seen_at(elsewhere, target));
        }
        for addr in neighbours.iter().chain([&cluster.peer(liar)]).map(|peer| peer.addr) {
            let elsewhere = Peer { addr, ..target };
            cluster.send(liar, victim, SEEN_AT, seen_at(target, elsewhere));
        }
        cluster.run_secs(1);
        assert_eq!(cluster.chord(victim).duplicate(), None, "round {round}");
    }
    let calls = cluster.sim.stats().methods[&KEY_CLAIM].call_count - before;
    assert!(calls > 0, "they are looked at");
    // The claims of one peer, in seven windows of ten seconds.
    assert!(calls <= 64 * 7, "{calls} calls for {} hints", 60 * 56);
    let claim = KeyClaim { nonce: 1, uptime_ms: u64::MAX, incarnation: 0 };
    let refused = cluster.call(liar, victim, KEY_CLAIM, messages::encode(&claim));
    let is_refusal =
        matches!(&refused, Err(CallError::Refused(no)) if no.code == Refusal::MALFORMED);
    assert!(is_refusal, "{refused:?}");
    assert_eq!(cluster.chord(victim).duplicate(), None);
}

/// False hints do not hide the true ones.
#[test]
fn liars_do_not_hide_a_copy() {
    for seed in 0..SEEDS {
        let (cluster, original) = ring(seed);
        let (target, liar) = (cluster.peer(original), cluster.sim.add_host(HostConfig::default()));
        let copy = add_copy(&cluster, original, &cluster.config);
        let via = cluster.hosts().into_iter().find(|h| ![original, copy].contains(h)).unwrap();
        let lies = |host: HostId| {
            for n in 0..50 {
                let addr = SocketAddr::from(([10, 200, n, 1], 1));
                cluster.send(liar, host, SEEN_AT, seen_at(Peer { addr, ..target }, target));
            }
        };
        for _ in 0..10 {
            [original, copy].into_iter().for_each(lies);
            cluster.run_secs(1);
        }
        cluster.join_in_background(copy, via);
        let ends = cluster.chord(copy);
        for _ in 0..60 {
            [original, copy].into_iter().for_each(lies);
            cluster.run_secs(1);
        }
        assert_eq!(ends.superseded_by(), Some(target.addr), "seed {seed}");
        assert_eq!(cluster.chord(original).superseded_by(), None, "seed {seed}");
    }
}

/// A node behind an address translation, which leads its calls to `outside` back to itself.
struct Translated {
    inner: Arc<dyn Transport>,
    outside: SocketAddr,
    led_back: Arc<AtomicUsize>,
}

impl Transport for Translated {
    fn local(&self) -> Peer {
        self.inner.local()
    }

    fn call(
        &self,
        to: Peer,
        request: Request,
        limit: Duration,
    ) -> BoxFuture<'static, Result<Reply, CallError>> {
        if to.addr == self.outside {
            self.led_back.fetch_add(1, Ordering::Relaxed);
            return self.inner.call(self.local(), request, limit);
        }
        self.inner.call(to, request, limit)
    }

    fn round_trip(&self, peer: &atoll_key::PeerId) -> Option<Duration> {
        self.inner.round_trip(peer)
    }

    fn serve(&self, service: Arc<dyn Service>) {
        self.inner.serve(service);
    }
}

#[test]
fn a_node_that_reaches_itself_at_another_address_goes_on() {
    let cluster = Cluster::grown(lan(5), ChordConfig::default(), 4);
    let host = cluster.sim.add_host(HostConfig::default());
    let outside = SocketAddr::from(([10, 99, 0, 1], 1));
    let led_back = Arc::new(AtomicUsize::new(0));
    let transport =
        Translated { inner: cluster.sim.transport(host), outside, led_back: led_back.clone() };
    let env = cluster.sim.env(host);
    cluster.serve(host, Chord::new(env, Arc::new(transport), cluster.config.clone()));
    cluster.join(host, &[cluster.hosts()[0]]).unwrap();
    let me = cluster.peer(host);
    for _ in 0..3 {
        let seen = seen_at(Peer { addr: outside, ..me }, me);
        cluster.send(cluster.hosts()[0], host, SEEN_AT, seen);
        cluster.run_secs(30);
        assert_eq!(cluster.chord(host).duplicate(), None);
    }
    assert_eq!(led_back.load(Ordering::Relaxed), 3, "it was looked at each time");
    assert!(cluster.chord(host).neighbourhood().joined);
}
