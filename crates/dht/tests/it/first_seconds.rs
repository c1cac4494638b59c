//! The first seconds of a ring, before its nodes know all their neighbours.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use atoll_dht::durable::MemoryState;
use atoll_dht::{Blocks, Dht, DhtConfig, SimulatedKeys};
use atoll_env::{Env, sleep};
use atoll_net::{Peer, Router};
use atoll_overlay::Overlay;
use atoll_overlay::chord::{Chord, ChordConfig};
use atoll_sim::{HostConfig, HostId, Loss, Sim, SimConfig};
use atoll_store::MemoryStore;

use crate::lock_leases::SECOND;
use crate::ring::{MINUTE, ROOMY, block};

/// Blocks that are put one by one.
const BLOCKS: u32 = 12;

struct Starting {
    host: HostId,
    chord: Arc<Chord>,
    dht: Arc<Dht>,
}

fn starting(sim: &Sim) -> Starting {
    let host = sim.add_host(HostConfig::default());
    let (env, transport) = (sim.env(host), sim.transport(host));
    let chord = Chord::new(env.clone(), transport.clone(), ChordConfig::default());
    let store = Arc::new(MemoryStore::new(ROOMY));
    let keys = Arc::new(SimulatedKeys(transport.local().id));
    let config = DhtConfig::default();
    let (overlay, durable) = (chord.clone(), Arc::new(MemoryState::default()));
    let of = transport.clone();
    let dht = Dht::new(env, of, overlay, store, keys, durable, config);
    let router = Router::new().route(0x01, chord.clone()).route(0x02, dht.clone());
    transport.serve(Arc::new(router));
    dht.start();
    Starting { host, chord, dht }
}

async fn join(env: Env, chord: Arc<Chord>, through: Vec<Peer>, after: Duration) {
    sleep(&*env, after).await;
    while chord.join(through.clone()).await.is_err() {
        sleep(&*env, Duration::from_millis(500)).await;
    }
}

/// Three nodes start within a second, the first one as a ring of one. One of them, the taker, is given blocks as soon as it
/// knows another one. When it has acknowledged some of them, one node is killed for good. Returns how many those are; they must
/// be there.
fn kept_of_first_blocks(seed: u64, (taker, killed): (usize, usize), loss: Loss) -> usize {
    let sim = Sim::new(SimConfig { seed, jitter: 0.9, loss, ..SimConfig::default() });
    let env = sim.outside();
    let nodes: Vec<Starting> = (0..3).map(|_| starting(&sim)).collect();
    nodes[0].chord.create();
    for (node, other) in [(&nodes[1], &nodes[2]), (&nodes[2], &nodes[1])] {
        let (own, after) = (sim.env(node.host), Duration::from_millis(env.random_u64() % 400));
        let through = [&nodes[0], other].map(|node| sim.peer(node.host)).to_vec();
        own.spawn(Box::pin(join(own.clone(), node.chord.clone(), through, after)));
    }
    let has_met = |_: &Sim| !nodes[taker].chord.is_alone();
    if !sim.run_until_true(MINUTE, has_met) {
        return 0;
    }
    let acknowledged: Arc<Mutex<Vec<u32>>> = Arc::default();
    for n in 0..BLOCKS {
        let (own, dht) = (sim.env(nodes[taker].host), nodes[taker].dht.clone());
        let acknowledged = acknowledged.clone();
        own.spawn(Box::pin(async move {
            if dht.put(vec![block(n)]).await.is_ok() {
                acknowledged.lock().expect("no panics").push(n);
            }
        }));
    }
    let now = || acknowledged.lock().expect("no panics").clone();
    // Some of them are lost on the way, of those that find a ring that settles slowly.
    sim.run_until_true(SECOND * 3, |_| !now().is_empty());
    sim.set_loss(Loss::None);
    sim.run_until_true(MINUTE, |_| !now().is_empty());
    sim.crash(nodes[killed].host);
    let acknowledged = now();
    sim.run_for(MINUTE);
    // The two others may have known the first one alone, and be rings of their own now.
    for n in &acknowledged {
        let (hash, bytes) = block(*n);
        let is_readable = [1, 2].map(|after| {
            let reader = &nodes[(killed + after) % 3];
            sim.block_on(MINUTE, reader.dht.get(hash)).expect("gets have deadlines")
                == Ok(bytes.clone())
        });
        assert_ne!(
            is_readable, [false; 2],
            "block {n}, taker {taker}, killed {killed}, seed {seed}, {loss:?}"
        );
    }
    acknowledged.len()
}

/// A node that had lost its neighbours again before it had settled took itself for a ring of one, and acknowledged what it
/// alone had.
#[test]
fn what_is_acknowledged_in_a_rings_first_seconds_outlives_the_node_that_took_it() {
    for loss in [Loss::None, Loss::Drop { chance: 0.1 }, Loss::Drop { chance: 0.3 }] {
        for taker in 0..3 {
            let each =
                (0..40).map(|seed| (seed, (taker, [taker, seed as usize % 3][seed as usize % 2])));
            let kept: usize =
                each.map(|(seed, nodes)| kept_of_first_blocks(9000 + seed, nodes, loss)).sum();
            assert!(kept > 0, "nothing was taken: taker {taker}, {loss:?}");
        }
    }
}
