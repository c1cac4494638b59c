//! The block layer knows no overlay but the trait: it works over one that is not Chord.

use std::sync::Arc;
use std::time::Duration;

use atoll_dht::durable::MemoryState;
use atoll_dht::{Blocks, Dht, SimulatedKeys};
use atoll_net::Router;
use atoll_overlay::static_ring::StaticRing;
use atoll_overlay::{Node, Overlay};
use atoll_sim::{HostConfig, Sim, SimConfig};
use atoll_store::{BlockStore, MemoryStore};

use crate::ring::{ROOMY, block, prompt};

const LIMIT: Duration = Duration::from_secs(120);

struct Member {
    overlay: Arc<StaticRing>,
    dht: Arc<Dht>,
    store: Arc<MemoryStore>,
}

fn members(sim: &Sim, count: usize) -> Vec<Member> {
    let hosts = sim.add_hosts(count, &HostConfig::default());
    let all: Vec<Node> = hosts.iter().map(|host| Node::of(sim.peer(*host))).collect();
    let start = |host| {
        let (env, transport, me) = (sim.env(host), sim.transport(host), sim.peer(host));
        let overlay = Arc::new(StaticRing::new(env.clone(), me, all.clone()));
        let store = Arc::new(MemoryStore::new(ROOMY));
        let dht = Dht::new(
            env,
            transport.clone(),
            overlay.clone(),
            store.clone(),
            Arc::new(SimulatedKeys(me.id)),
            Arc::new(MemoryState::default()),
            prompt(),
        );
        transport.serve(Arc::new(Router::new().route(2, dht.clone())));
        dht.start();
        Member { overlay, dht, store }
    };
    hosts.into_iter().map(start).collect()
}

#[test]
fn blocks_are_put_found_and_repaired_over_an_overlay_that_is_not_chord() {
    let sim = Sim::new(SimConfig { seed: 5, ..SimConfig::default() });
    let members = members(&sim, 7);
    let put = members[0].dht.put((0..40).map(block).collect());
    sim.block_on(LIMIT, put).expect("puts end").expect("a healthy ring takes blocks");
    for n in 0..40 {
        let (hash, bytes) = block(n);
        let got = members[1 + n as usize % 6].dht.get(hash);
        let got = sim.block_on(LIMIT, got).expect("gets end").expect("the block is there");
        assert_eq!(got, bytes);
    }
    // A member of the replica set that has lost a block gets it again.
    let key = block(3).0.key();
    let set = members[0].overlay.known_replica_set(&key, 3).expect("it knows all nodes");
    let of = |node: &Node| {
        members.iter().find(|m| m.overlay.positions()[0] == *node).expect("it is a member")
    };
    let removed = of(&set[1]).store.remove(vec![key]);
    sim.block_on(LIMIT, removed).expect("removing ends").expect("memory");
    sim.run_for(Duration::from_secs(1800));
    let holders = |n: u32| {
        let key = block(n).0.key();
        let set = members[0].overlay.known_replica_set(&key, 3).expect("it knows all nodes");
        set.iter().filter(|node| of(node).store.info(&key).expect("memory").is_some()).count()
    };
    assert!((0..40).all(|n| holders(n) == 3), "all copies of all blocks");
    assert!(members.iter().all(|m| m.dht.repair_status().fully_replicated));
}
