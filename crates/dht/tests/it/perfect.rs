//! Large rings that need not be joined node by node, and lookups on them.

use std::sync::Arc;
use std::time::Duration;

use atoll_dht::durable::MemoryState;
use atoll_dht::{Blocks, Dht, DhtConfig, SimulatedKeys};
use atoll_key::BlockHash;
use atoll_net::Router;
use atoll_overlay::Node;
use atoll_overlay::chord::ring::state::ChordState;
use atoll_overlay::chord::{Chord, ChordConfig, TablePolicy};
use atoll_sim::{HostConfig, Sim};
use atoll_store::MemoryStore;
use bytes::Bytes;
use futures_util::{StreamExt, stream};

const BLOCK_BYTES: usize = 8192;

fn block(n: usize) -> (BlockHash, Bytes) {
    let mut bytes = vec![0; BLOCK_BYTES];
    bytes[..8].copy_from_slice(&n.to_be_bytes());
    (BlockHash::of(&bytes), Bytes::from(bytes))
}

/// A ring whose tables are right from the start, with all upkeep running.
pub(crate) fn ring_with(sim: &Sim, count: usize, dht_config: &DhtConfig) -> Vec<Arc<Dht>> {
    ring_of(sim, count, TablePolicy::default(), dht_config)
}

/// The same with a routing table of this kind.
pub(crate) fn ring_of(
    sim: &Sim,
    count: usize,
    table: TablePolicy,
    dht_config: &DhtConfig,
) -> Vec<Arc<Dht>> {
    let hosts = sim.add_hosts(count, &HostConfig::default());
    let mut nodes: Vec<Node> = hosts.iter().map(|host| Node::of(sim.peer(*host))).collect();
    nodes.sort_by_key(|node| node.id);
    // CFS §4.2: r is 2 log2 N.
    let successors = (2 * count.ilog2() as usize).max(4);
    let config = ChordConfig { successors, table, ..ChordConfig::default() };
    let mut dhts = Vec::with_capacity(count);
    for host in hosts {
        let (env, transport) = (sim.env(host), sim.transport(host));
        let me = Node::of(sim.peer(host));
        let state = ChordState::perfect(me, &nodes, successors);
        let chord = Chord::with_state(env.clone(), transport.clone(), config.clone(), state);
        let store = Arc::new(MemoryStore::new(1 << 30));
        let keys = Arc::new(SimulatedKeys(me.peer.id));
        let config = dht_config.clone();
        let dht = Dht::new(
            env,
            transport.clone(),
            chord.clone(),
            store,
            keys,
            Arc::new(MemoryState::default()),
            config,
        );
        transport.serve(Arc::new(Router::new().route(1, chord.clone()).route(2, dht.clone())));
        chord.start();
        dht.start();
        dhts.push(dht);
    }
    dhts
}

/// Which node makes operation `n`: spread over the ring, the same in every run.
fn node_for(n: usize, nodes: usize) -> usize {
    (n.wrapping_mul(2_654_435_761) >> 7) % nodes
}

/// Puts `blocks` blocks of 8 KiB on a ring of `nodes` and looks each up once, from nodes
/// all over the ring; the remote calls each lookup took, in ascending order.
pub(crate) fn calls_per_lookup(sim: &Sim, nodes: usize, blocks: usize) -> Vec<usize> {
    let dhts = ring_with(sim, nodes, &DhtConfig::default());
    let limit = Duration::from_secs(3600);
    let puts = stream::iter(0..blocks)
        .map(|n| dhts[node_for(n, nodes)].put(vec![block(n)]))
        .buffer_unordered(200)
        .for_each(|put| async { put.expect("a healthy ring takes blocks") });
    sim.block_on(limit, puts).expect("puts end");
    let lookups = stream::iter(0..blocks)
        .map(|n| {
            let dht = dhts[node_for(n + 1_000_003, nodes)].clone();
            async move { dht.lookup(block(n).0).await }
        })
        .buffer_unordered(200)
        .map(|found| found.expect("a healthy ring finds blocks").trace.calls())
        .collect::<Vec<usize>>();
    let mut calls = sim.block_on(limit, lookups).expect("lookups end");
    calls.sort_unstable();
    calls
}
