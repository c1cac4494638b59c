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
use atoll_sim::{HostConfig, HostId, Sim};
use atoll_store::MemoryStore;
use bytes::Bytes;
use futures_util::{StreamExt, stream};

use crate::ring::ROOMY;

const BLOCK_BYTES: usize = 8192;

fn block(n: usize) -> (BlockHash, Bytes) {
    let mut bytes = vec![0; BLOCK_BYTES];
    bytes[..8].copy_from_slice(&n.to_be_bytes());
    (BlockHash::of(&bytes), Bytes::from(bytes))
}

/// A node of a ring whose tables are right from the start.
pub(crate) struct Perfect {
    pub me: Node,
    pub dht: Arc<Dht>,
    pub chord: Arc<Chord>,
    /// What answers both of them.
    pub router: Arc<Router>,
}

/// Nodes whose tables are right and stay as they are, in the order of `hosts`.
pub(crate) fn ring_at_rest(
    sim: &Sim,
    hosts: &[HostId],
    chord_config: &ChordConfig,
    config: &DhtConfig,
) -> Vec<Perfect> {
    let mut nodes: Vec<Node> = hosts.iter().map(|host| Node::of(sim.peer(*host))).collect();
    nodes.sort_by_key(|node| node.id);
    let start = |host: &HostId| {
        let (env, transport) = (sim.env(*host), sim.transport(*host));
        let me = Node::of(sim.peer(*host));
        let state = ChordState::perfect(me, &nodes, chord_config.successors);
        let chord = Chord::with_state(env.clone(), transport.clone(), chord_config.clone(), state);
        let dht = Dht::new(
            env,
            transport.clone(),
            chord.clone(),
            Arc::new(MemoryStore::new(ROOMY)),
            Arc::new(SimulatedKeys(me.peer.id)),
            Arc::new(MemoryState::default()),
            config.clone(),
        );
        let router = Arc::new(Router::new().route(1, chord.clone()).route(2, dht.clone()));
        transport.serve(router.clone());
        Perfect { me, dht, chord, router }
    };
    hosts.iter().map(start).collect()
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
    // CFS §4.2: r is 2 log2 N.
    let successors = (2 * count.ilog2() as usize).max(4);
    let config = ChordConfig { successors, table, ..ChordConfig::default() };
    let hosts = sim.add_hosts(count, &HostConfig::default());
    let ring = ring_at_rest(sim, &hosts, &config, dht_config);
    for member in &ring {
        member.chord.start();
        member.dht.start();
    }
    ring.into_iter().map(|member| member.dht).collect()
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
