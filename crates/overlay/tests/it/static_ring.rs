//! The provided methods of an overlay, on one that is not Chord.

use atoll_env::Env;
use atoll_key::{Key, PeerId};
use atoll_net::Peer;
use atoll_overlay::static_ring::StaticRing;
use atoll_overlay::walk::{Step, WalkLimits, walk};
use atoll_overlay::{Node, Overlay, Route, VirtualServerId};
use atoll_sim::{Sim, SimConfig};
use futures_util::FutureExt;

const COPIES: usize = 3;

fn peer(n: u8) -> Peer {
    Peer { id: PeerId([n; 32]), addr: ([10, 0, 0, n], 1).into() }
}

/// Eight nodes of two virtual servers each, every one with its own view.
fn ring(env: &Env) -> Vec<StaticRing> {
    let index = |index| VirtualServerId { index, ..VirtualServerId::default() };
    let all: Vec<Node> = (0..8).flat_map(|n| [0, 1].map(|i| Node::at(peer(n), index(i)))).collect();
    (0..8).map(|n| StaticRing::new(env.clone(), peer(n), all.clone())).collect()
}

fn env() -> Env {
    let sim = Sim::new(SimConfig::default());
    let host = sim.add_host(atoll_sim::HostConfig::default());
    sim.env(host)
}

fn keys() -> impl Iterator<Item = Key> {
    (0..=255).map(|n| Key::hashed([n; 32]))
}

#[test]
fn each_key_has_one_root_and_all_nodes_agree_on_its_replica_set() {
    let ring = ring(&env());
    for key in keys() {
        let sets: Vec<Vec<Node>> =
            ring.iter().map(|view| view.known_replica_set(&key, COPIES).unwrap()).collect();
        assert!(sets.iter().all(|set| *set == sets[0] && set.len() == COPIES));
        let roots: Vec<Node> =
            ring.iter().flat_map(|v| v.group_by_own_root(&[key])).map(|(root, _)| root).collect();
        assert_eq!(roots, [sets[0][0]], "exactly one virtual server is the root");
    }
}

#[test]
fn served_ranges_cover_the_ring_once_and_name_the_replica_sets_of_their_keys() {
    let ring = ring(&env());
    for key in keys() {
        let mut serving = 0;
        for view in &ring {
            let served = view.served_ranges(COPIES);
            assert!(served.complete);
            for range in served.ranges.iter().filter(|served| served.range.contains(&key)) {
                serving += 1;
                let set = view.known_replica_set(&key, COPIES).unwrap();
                assert_eq!(range.replicas, set[1..]);
            }
        }
        assert_eq!(serving, 1, "{key}");
    }
}

/// The walk finds its way with the trait alone: it asks the root and no one else.
#[test]
fn a_lookup_over_a_full_table_asks_the_root_only() {
    let env = env();
    let ring = ring(&env);
    for key in keys() {
        let root = ring[0].known_replica_set(&key, 1).unwrap()[0];
        let step = |node: Node, as_root: bool| {
            let view = ring.iter().find(|view| view.positions()[0].peer == node.peer).unwrap();
            let route = view.route(&key, as_root);
            let is_root = matches!(&route, Route::Root(list) if list[0].peer == node.peer);
            let answer = if is_root { Step::Done(node) } else { Step::Route(route) };
            async move { Ok(answer) }.boxed()
        };
        let found = walk(&*env, &ring[0], &key, WalkLimits::default(), step);
        let found = found.now_or_never().expect("no call waits").expect("the root answers");
        assert_eq!((found.value.peer, found.trace.0.len()), (root.peer, 1));
    }
}
