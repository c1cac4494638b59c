//! Rings whose tables are right from the start, so that thousands of nodes need not join
//! one by one, and what experiments do with them: put blocks, look them up.
//!
//! A ring begins as after a long rest: successor lists and fingers are right, and where nodes keep
//! an adaptive table it holds the nodes that they would have learnt of in time, which are all (as
//! far as there is room) since a day without churn lets the budget keep more fresh.
//!
//! A ring of ten thousands of nodes of which few are asked is [`Ring::with_idle_nodes`]: no node has
//! upkeep or a full table before it takes part, so an idle one costs some 32 KiB.

use std::sync::{Arc, Once};
use std::time::Duration;

use atoll_dht::durable::MemoryState;
use atoll_dht::{Blocks, Dht, DhtConfig, Fetched, GetError, SimulatedKeys, rpc};
use atoll_env::{BoxFuture, Env, random_below};
use atoll_key::BlockHash;
use atoll_net::{Peer, Refusal, Reply, Request, Router, Service};
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
    /// Distances; without them every two nodes are as far apart.
    pub latency: Option<Latency>,
    pub connections: Connections,
    /// Links, by node; nodes beyond the last have unlimited ones.
    pub links: Vec<HostConfig>,
}

impl Network {
    /// Unlimited links.
    pub(crate) fn plain(latency: Option<Arc<RttMatrix>>) -> Network {
        Network {
            latency: latency.map(Latency::Matrix),
            connections: Connections::Instant,
            links: Vec::new(),
        }
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
    /// All positions, in ring order.
    pub circle: Vec<Node>,
    /// What a table is filled with when its node is asked first; `None` if all tables are full.
    known: Option<Arc<Vec<KnownNode>>>,
}

/// A node that fills its table when it is asked first.
struct FilledWhenAsked {
    services: Router,
    overlay: OverlayNode,
    known: Arc<Vec<KnownNode>>,
    env: Env,
    filled: Once,
}

impl Service for FilledWhenAsked {
    fn handle(&self, from: Peer, request: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        // Blocks that are stored here are read and written without the table.
        if !matches!(request.method, rpc::READ | rpc::PUT | rpc::FETCH) {
            let now = self.env.now();
            self.filled.call_once(|| self.overlay.fill_table(&self.known, now));
        }
        self.services.handle(from, request)
    }
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

    /// The same without any upkeep. Tables are filled when a node is asked, or by
    /// [`Ring::start_upkeep`].
    pub(crate) fn with_idle_nodes(plan: &Plan) -> Ring {
        let mut ring = Ring::placed(&Plan { upkeep: false, ..plan.clone() }, |_| {
            Arc::new(MemoryStore::new(STORE_BYTES))
        });
        if plan.chord.table == TablePolicy::Adaptive {
            ring.known = Some(Arc::new(known(&ring.circle)));
            (0..ring.members.len()).for_each(|at| ring.serve(at, ring.members[at].dht.clone()));
        }
        ring
    }

    /// As [`Ring::new`], with a store of its own for each node, by its number.
    pub(crate) fn with_stores(plan: &Plan, store: impl Fn(usize) -> Arc<dyn BlockStore>) -> Ring {
        let ring = Ring::placed(plan, store);
        if plan.chord.table == TablePolicy::Adaptive {
            let overlays = ring.members.iter().map(|member| &member.overlay);
            fill_tables(overlays, &known(&ring.circle), ring.sim.now());
        }
        ring
    }

    /// Its nodes with right successor lists and fingers.
    fn placed(plan: &Plan, store: impl Fn(usize) -> Arc<dyn BlockStore>) -> Ring {
        let Network { latency, connections, links } = &plan.network;
        let mut config =
            SimConfig { seed: plan.seed, connections: *connections, ..SimConfig::default() };
        if let Some(latency) = latency {
            config.latency = latency.clone();
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
        Ring { sim, members, circle, known: None }
    }

    /// Starts the upkeep of one node of a ring of idle nodes: it learns how far others are.
    pub(crate) fn start_upkeep(&self, at: usize) {
        let Member { overlay, dht, .. } = &self.members[at];
        if let Some(known) = &self.known {
            overlay.fill_table(known, self.sim.now());
        }
        overlay.start();
        dht.start();
    }

    /// Lets a node answer, with `blocks` for its block service.
    fn serve(&self, at: usize, blocks: Arc<dyn Service>) {
        let Member { host, overlay, .. } = &self.members[at];
        let services = Router::new().route(1, overlay.service()).route(2, blocks);
        let transport = self.sim.transport(*host);
        let Some(known) = self.known.clone() else { return transport.serve(Arc::new(services)) };
        let (overlay, env, filled) = (overlay.clone(), self.sim.env(*host), Once::new());
        transport.serve(Arc::new(FilledWhenAsked { services, overlay, known, env, filled }));
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
        let Member { overlay, dht, .. } = &self.members[at];
        self.serve(at, as_what(dht.clone(), overlay.overlay()));
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

/// What every node has heard of after a rest.
fn known(circle: &[Node]) -> Vec<KnownNode> {
    let known = circle.iter().enumerate().map(|(nth, node)| KnownNode {
        node: *node,
        heard_secs_ago: (nth % HEARD_WITHIN_SECS) as u32,
    });
    known.collect()
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

    /// A table that is full from the start and one that is filled when its node is asked lead to the
    /// same blocks.
    #[test]
    fn idle_nodes_answer_as_all_others_do() {
        let plan = Plan {
            seed: 3,
            nodes: 150,
            chord: Setting::Default.chord(150),
            dht: Setting::Default.dht(),
            upkeep: false,
            virtual_servers: Vec::new(),
            network: Network::plain(None),
        };
        let ring = Ring::with_idle_nodes(&plan);
        let filled = || ring.members.iter().filter(|m| m.overlay.table_entries() >= 146).count();
        assert_eq!(filled(), 0, "before anything is asked");
        ring.start_upkeep(0);
        assert_eq!(filled(), 1);
        ring.put(40, 100).expect("a healthy ring");
        let found = ring.look_up(0, &(0..40).collect::<Vec<_>>(), 100, 4).expect("it ends");
        assert!(found.iter().all(Result::is_ok));
        assert!((2..150).contains(&filled()), "those that were asked: {}", filled());
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
