//! Rings whose tables are right from the start, so that thousands of nodes need not join
//! one by one, and what experiments do with them: put blocks, look them up.
//!
//! A ring begins as after a long rest: successor lists and fingers are right, and where nodes keep
//! an adaptive table it holds the nodes that they would have learnt of in time, which are all (as
//! far as there is room) since a day without churn lets the budget keep more fresh.

use std::sync::Arc;
use std::time::Duration;

use atoll_dht::durable::MemoryState;
use atoll_dht::{Blocks, Dht, DhtConfig, Fetched, GetError, SimulatedKeys};
use atoll_env::random_below;
use atoll_key::BlockHash;
use atoll_net::{Router, Service};
use atoll_overlay::chord::{ChordConfig, TablePolicy};
use atoll_overlay::{Node, Overlay, VirtualServerId};
use atoll_sim::{Connections, HostConfig, HostId, Latency, RttMatrix, Sim, SimConfig};
use atoll_store::{BlockStore, MemoryStore};
use bytes::Bytes;
use futures_util::{StreamExt, stream};

use crate::LabError;
use crate::overlay::{KnownNode, OverlayNode, fill_tables};

/// Room for every block of any experiment.
pub(crate) const STORE_BYTES: u64 = 1 << 40;
/// Virtual time after which something is wrong with the ring.
pub(crate) const LIMIT: Duration = Duration::from_secs(30 * 24 * 3600);
/// Blocks of one put...
const BATCH: usize = 32;
/// ... and puts under way at a time.
const PARALLEL_PUTS: usize = 8;

/// What a ring is made of.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub seed: u64,
    pub nodes: usize,
    pub chord: ChordConfig,
    pub dht: DhtConfig,
    /// Whether stabilisation, fingers, repair and the rest run.
    pub upkeep: bool,
    /// How many virtual servers each node runs; one if it is beyond the end.
    pub virtual_servers: Vec<u16>,
    pub network: Network,
}

/// What is between the nodes.
#[derive(Clone, Debug)]
pub(crate) struct Network {
    /// Round trips; without them every two nodes are as far apart.
    pub latency: Option<Arc<RttMatrix>>,
    pub connections: Connections,
    /// Links, by node; nodes beyond the last have unlimited ones.
    pub links: Vec<HostConfig>,
}

impl Network {
    /// Unlimited links.
    pub(crate) fn plain(latency: Option<Arc<RttMatrix>>) -> Network {
        Network { latency, connections: Connections::Instant, links: Vec::new() }
    }
}

/// In a ring at rest every node was heard of within so long.
const HEARD_WITHIN_SECS: usize = 60;

/// Bytes of a message beside its segments' headers: a TLS record (22) and our frame.
const TLS_OVERHEAD_BYTES: usize = 44;

/// A node.
pub(crate) struct Member {
    pub host: HostId,
    pub overlay: OverlayNode,
    pub dht: Arc<Dht>,
    pub store: Arc<dyn BlockStore>,
}

/// A ring.
pub(crate) struct Ring {
    pub sim: Sim,
    pub members: Vec<Member>,
}

/// Block number `n`, of `len_bytes` bytes; numbers differ and so do the blocks.
pub(crate) fn block(n: usize, len_bytes: usize) -> (BlockHash, Bytes) {
    let mut bytes = vec![0; len_bytes.max(8)];
    bytes[..8].copy_from_slice(&(n as u64).to_be_bytes());
    (BlockHash::of(&bytes), Bytes::from(bytes))
}

impl Ring {
    /// Makes it; its tables are what they would be after a long rest.
    pub(crate) fn new(plan: &Plan) -> Ring {
        Ring::with_stores(plan, |_| Arc::new(MemoryStore::new(STORE_BYTES)))
    }

    /// The same, with a store of its own for each node, by its number.
    pub(crate) fn with_stores(plan: &Plan, store: impl Fn(usize) -> Arc<dyn BlockStore>) -> Ring {
        let Network { latency, connections, links } = &plan.network;
        let mut config =
            SimConfig { seed: plan.seed, connections: *connections, ..SimConfig::default() };
        if let Some(matrix) = latency {
            config.latency = Latency::Matrix(matrix.clone());
        }
        if *connections != Connections::Instant {
            config.message_overhead_bytes = TLS_OVERHEAD_BYTES;
        }
        let sim = Sim::new(config);
        let link = |n: usize| links.get(n).cloned().unwrap_or_default();
        let hosts: Vec<HostId> = (0..plan.nodes).map(|n| sim.add_host(link(n))).collect();
        let positions: Vec<Vec<Node>> = hosts
            .iter()
            .enumerate()
            .map(|(n, host)| {
                let count = plan.virtual_servers.get(n).copied().unwrap_or(1);
                let position = |index| VirtualServerId { profile: plan.chord.profile, index };
                (0..count).map(|index| Node::at(sim.peer(*host), position(index))).collect()
            })
            .collect();
        let mut circle: Vec<Node> = positions.iter().flatten().copied().collect();
        circle.sort_by_key(|node| node.id);
        let starts = hosts.iter().zip(&positions).enumerate();
        let members = starts
            .map(|(n, (host, positions))| start(&sim, *host, positions, &circle, plan, store(n)))
            .collect();
        let ring = Ring { sim, members };
        if plan.chord.table == TablePolicy::Adaptive {
            ring.fill_tables(&circle);
        }
        ring
    }

    /// Gives every adaptive table what it would hold after a rest.
    fn fill_tables(&self, circle: &[Node]) {
        let known = circle.iter().enumerate().map(|(nth, node)| KnownNode {
            node: *node,
            heard_secs_ago: (nth % HEARD_WITHIN_SECS) as u32,
        });
        let known: Vec<KnownNode> = known.collect();
        fill_tables(self.members.iter().map(|member| &member.overlay), &known, self.sim.now());
    }

    /// Runs the simulation until `work` is done.
    pub(crate) fn block_on<F: Future>(&self, work: F) -> Result<F::Output, LabError> {
        self.sim.block_on(LIMIT, work).map_err(|stuck| LabError::Failed(stuck.to_string()))
    }

    /// A number below `bound`; the same in every run of the same seed.
    pub(crate) fn random_below(&self, bound: usize) -> usize {
        random_below(&*self.sim.outside(), bound as u64) as usize
    }

    /// Puts blocks `0..count` from nodes all over the ring, some at a time.
    pub(crate) fn put(&self, count: usize, len_bytes: usize) -> Result<(), LabError> {
        let batches: Vec<(usize, Vec<(BlockHash, Bytes)>)> = (0..count)
            .step_by(BATCH)
            .map(|first| {
                let numbers = first..count.min(first + BATCH);
                let from = self.random_below(self.members.len());
                (from, numbers.map(|n| block(n, len_bytes)).collect())
            })
            .collect();
        let puts = stream::iter(batches)
            .map(|(from, blocks)| self.members[from].dht.put(blocks))
            .buffer_unordered(PARALLEL_PUTS)
            .collect::<Vec<_>>();
        for put in self.block_on(puts)? {
            put.map_err(|error| LabError::Failed(format!("a block was not taken: {error}")))?;
        }
        Ok(())
    }

    /// Whether a running node's store holds block `n`.
    pub(crate) fn has_living_copy(&self, n: usize, len_bytes: usize) -> bool {
        let key = block(n, len_bytes).0.key();
        let holds = |member: &Member| matches!(member.store.info(&key), Ok(Some(_)));
        self.members.iter().any(|member| self.sim.is_up(member.host) && holds(member))
    }

    /// Replaces a node's block service by what `as_what` makes of it and the node's tables.
    pub(crate) fn disguise(
        &self,
        at: usize,
        as_what: impl FnOnce(Arc<dyn Service>, Arc<dyn Overlay>) -> Arc<dyn Service>,
    ) {
        let Member { host, overlay, dht, .. } = &self.members[at];
        let disguised = as_what(dht.clone(), overlay.overlay());
        let router = Router::new().route(1, overlay.service()).route(2, disguised);
        self.sim.transport(*host).serve(Arc::new(router));
    }

    /// Looks `blocks` up at one node, so many at a time; the results in any order.
    pub(crate) fn look_up(
        &self,
        at: usize,
        blocks: &[usize],
        len_bytes: usize,
        parallel: usize,
    ) -> Result<Vec<Result<Fetched, GetError>>, LabError> {
        let asked: Vec<(usize, usize)> = blocks.iter().map(|n| (at, *n)).collect();
        self.look_up_from(&asked, len_bytes, parallel)
    }

    /// Looks blocks up, each at a node: pairs of node and block.
    pub(crate) fn look_up_from(
        &self,
        asked: &[(usize, usize)],
        len_bytes: usize,
        parallel: usize,
    ) -> Result<Vec<Result<Fetched, GetError>>, LabError> {
        let lookups = stream::iter(asked)
            .map(|(at, n)| {
                let dht = self.members[*at].dht.clone();
                let hash = block(*n, len_bytes).0;
                async move { dht.lookup(hash).await }
            })
            .buffer_unordered(parallel)
            .collect::<Vec<_>>();
        self.block_on(lookups)
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        self.sim.shut_down();
    }
}

/// Starts a node at its place (or places) on a ring that has come to rest.
pub(crate) fn start(
    sim: &Sim,
    host: HostId,
    positions: &[Node],
    circle: &[Node],
    plan: &Plan,
    store: Arc<dyn BlockStore>,
) -> Member {
    let (env, transport) = (sim.env(host), sim.transport(host));
    let config = plan.chord.clone();
    let overlay = OverlayNode::at_rest(env.clone(), transport.clone(), config, positions, circle);
    let keys = Arc::new(SimulatedKeys(transport.local().id));
    let dht = Dht::new(
        env,
        transport.clone(),
        overlay.overlay(),
        store.clone(),
        keys,
        Arc::new(MemoryState::default()),
        plan.dht.clone(),
    );
    transport.serve(Arc::new(Router::new().route(1, overlay.service()).route(2, dht.clone())));
    if plan.upkeep {
        overlay.start();
        dht.start();
    }
    Member { host, overlay, dht, store }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::setting::Setting;

    fn at_rest(nodes: usize, seed: u64) -> Ring {
        Ring::new(&Plan {
            seed,
            nodes,
            chord: Setting::Default.chord(nodes),
            dht: Setting::Default.dht(),
            upkeep: true,
            virtual_servers: Vec::new(),
            network: Network::plain(None),
        })
    }

    #[test]
    fn adaptive_tables_begin_with_everybody() {
        let ring = at_rest(150, 1);
        for member in &ring.members {
            let entries = member.overlay.table_entries();
            assert!((146..=149).contains(&entries), "{entries}");
        }
    }

    /// What tables are filled with is no more than what they would learn.
    #[test]
    fn a_ring_that_rests_forgets_nobody() {
        let ring = at_rest(150, 2);
        ring.sim.run_for(Duration::from_secs(300));
        for member in &ring.members {
            let entries = member.overlay.table_entries();
            assert!(entries >= 145, "{entries}");
        }
    }
}
