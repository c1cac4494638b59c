//! Members that hold their places lawfully and lie about their surroundings: successor lists are
//! cross-checked, so that every honest node knows its true successors.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use atoll_env::BoxFuture;
use atoll_net::{Peer, Refusal, Reply, Request, Router, Service};
use atoll_overlay::chord::messages::{self, FAMILY, Surroundings, WireNode, WireNodes, WireRoute};
use atoll_overlay::chord::{Chord, ChordConfig, TablePolicy};
use atoll_overlay::{Neighbourhood, Node, Overlay, Route};
use atoll_sim::HostId;

use super::cluster::{Cluster, MINUTE, lan};

const NODES: usize = 60;
/// One in so many lies.
const ONE_IN: usize = 5;
/// So many of the successors hold the copies of a block.
const COPIES: usize = 6;

fn config(table: TablePolicy) -> ChordConfig {
    ChordConfig { table, ..ChordConfig::default() }
}

/// The surroundings that a liar tells.
#[derive(Clone, Copy, Debug)]
enum Lie {
    /// Its successors and the roots of all keys are its accomplices.
    Accomplices,
    /// The same, and its predecessor is one too.
    AccomplicesAround,
    /// It has no successors.
    Empty,
    /// No honest node is there, but the way to all of them is shown as it is.
    Denies,
    /// Every second honest node is not there.
    Thinned,
    /// The four honest nodes after it are not there.
    Skips,
    /// It names each caller as its predecessor.
    Flatters,
}

const LIES: [Lie; 7] = [
    Lie::Accomplices,
    Lie::AccomplicesAround,
    Lie::Empty,
    Lie::Denies,
    Lie::Thinned,
    Lie::Skips,
    Lie::Flatters,
];

/// Keeps its place as an honest node does, and lies about its surroundings.
struct Liar {
    honest: Arc<Chord>,
    lie: Lie,
    /// All liars, in ring order.
    accomplices: Arc<Vec<Node>>,
}

impl Liar {
    /// The accomplices, from the first at or after a place on.
    fn accomplices_from(&self, key: &atoll_key::Key) -> Vec<Node> {
        let mut accomplices = self.accomplices.to_vec();
        accomplices.sort_unstable_by_key(|node| node.id.key().distance_from(key));
        accomplices
    }

    fn is_hidden(&self, nth: usize, node: &Node) -> bool {
        let is_honest = !self.accomplices.contains(node);
        is_honest
            && match self.lie {
                Lie::Accomplices | Lie::AccomplicesAround | Lie::Empty | Lie::Denies => true,
                Lie::Thinned => node.id.0.0[0].is_multiple_of(2),
                Lie::Skips => nth < 4,
                Lie::Flatters => false,
            }
    }

    fn surroundings(&self, from: Peer, mut said: Surroundings) -> Surroundings {
        let me = self.honest.me();
        let mut around = self.accomplices_from(&me.id.key().next());
        around.retain(|node| *node != me);
        // It is fetched anew every time.
        said.epoch = u64::from(rand(said.epoch));
        match self.lie {
            Lie::Accomplices => said.successors = Some(WireNodes(around)),
            Lie::AccomplicesAround => {
                said.predecessor = around.last().copied().map(WireNode);
                said.successors = Some(WireNodes(around));
            }
            Lie::Empty => said.successors = Some(WireNodes::default()),
            Lie::Denies | Lie::Thinned | Lie::Skips => {
                let list = self.honest.neighbourhood().successors.into_iter().enumerate();
                let left = list.filter(|(nth, node)| !self.is_hidden(*nth, node));
                said.successors = Some(WireNodes(left.map(|(_, node)| node).collect()));
            }
            Lie::Flatters => said.predecessor = Some(WireNode(Node::of(from))),
        }
        said
    }

    fn route(&self, asked: &messages::AskRoute, route: Route) -> Route {
        let key = asked.key.0;
        match (self.lie, route) {
            (Lie::Accomplices | Lie::AccomplicesAround | Lie::Empty, _) => {
                Route::Root(self.accomplices_from(&key))
            }
            (_, Route::Root(list)) => {
                let mut left = list.clone();
                let mut nth = 0;
                left.retain(|node| {
                    nth += 1;
                    !self.is_hidden(nth, node)
                });
                Route::Root(if left.is_empty() { list } else { left })
            }
            (_, route) => route,
        }
    }
}

/// A number that differs from the last.
fn rand(epoch: u64) -> u32 {
    (epoch.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33) as u32
}

impl Service for Liar {
    fn handle(&self, from: Peer, request: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        let (method, header) = (request.method, request.header.clone());
        if method == messages::INTRODUCE {
            // It passes on no introduction.
            return Box::pin(std::future::ready(Ok(Reply::default())));
        }
        let answer = self.honest.handle(from, request);
        let liar = Liar {
            honest: self.honest.clone(),
            lie: self.lie,
            accomplices: self.accomplices.clone(),
        };
        Box::pin(async move {
            let mut reply = answer.await?;
            match method {
                messages::NEIGHBOURS | messages::NOTIFY => {
                    let said = messages::decode::<Surroundings>(&reply.header)?;
                    reply.header = messages::encode(&liar.surroundings(from, said));
                }
                messages::ROUTE => {
                    let asked = messages::decode(&header)?;
                    let honest = messages::decode::<WireRoute>(&reply.header)?.0;
                    reply.header = messages::encode(&WireRoute(liar.route(&asked, honest)));
                }
                _ => {}
            }
            Ok(reply)
        })
    }
}

/// A ring at rest, of which every fifth node begins to lie.
struct Captured {
    cluster: Cluster,
    accomplices: Arc<Vec<Node>>,
}

impl Captured {
    fn new(seed: u64, table: TablePolicy, lies: &[Lie]) -> Captured {
        let cluster = Cluster::perfect(lan(seed), config(table), NODES, true);
        cluster.run_secs(5);
        let liars: Vec<HostId> = cluster.hosts().into_iter().step_by(ONE_IN).collect();
        let mut accomplices: Vec<Node> =
            liars.iter().map(|host| cluster.chord(*host).me()).collect();
        accomplices.sort_unstable_by_key(|node| node.id);
        let accomplices = Arc::new(accomplices);
        for (n, host) in liars.iter().enumerate() {
            let lie = lies[n % lies.len()];
            let liar = Liar { honest: cluster.chord(*host), lie, accomplices: accomplices.clone() };
            let router = Router::new().route(FAMILY, Arc::new(liar));
            cluster.sim.transport(*host).serve(Arc::new(router));
        }
        Captured { cluster, accomplices }
    }

    fn is_liar(&self, host: HostId) -> bool {
        let peer = self.cluster.peer(host);
        self.accomplices.iter().any(|node| node.peer == peer)
    }

    fn honest(&self) -> Vec<Neighbourhood> {
        let all = self.cluster.live();
        all.into_iter().filter(|around| !self.accomplices.contains(&around.me)).collect()
    }

    /// Runs until all honest nodes know their true successors; how many seconds that took.
    fn run_until_true(&self) -> u64 {
        for secs in 1..=300 {
            self.cluster.run_secs(1);
            if self.truth() == (1.0, 1.0) {
                return secs;
            }
        }
        panic!("seed {}: still captured: {:?}", self.cluster.sim.seed(), self.truth());
    }

    /// The share of honest nodes whose first successors are the nodes that follow them, and
    /// the share of those with the predecessor that is the node before them.
    fn truth(&self) -> (f64, f64) {
        let mut ring: Vec<Node> = self.cluster.live().iter().map(|around| around.me).collect();
        ring.sort_unstable_by_key(|node| node.id);
        let at: BTreeMap<_, _> = ring.iter().enumerate().map(|(at, node)| (node.id, at)).collect();
        let (mut lists, mut predecessors) = (0, 0);
        let honest = self.honest();
        for around in &honest {
            let at = at[&around.me.id];
            let follows = |n: usize| ring[(at + n) % ring.len()];
            let first: Vec<Node> = around.successors.iter().take(COPIES).copied().collect();
            lists += usize::from(first == (1..=COPIES).map(follows).collect::<Vec<_>>());
            let before = follows(ring.len() - 1);
            predecessors += usize::from(around.predecessor == Some(before));
        }
        (lists as f64 / honest.len() as f64, predecessors as f64 / honest.len() as f64)
    }
}

#[test]
fn audits_find_the_true_successors_among_lying_ones() {
    for table in [TablePolicy::Fingers, TablePolicy::Adaptive] {
        for (n, lies) in LIES.map(|lie| vec![lie]).into_iter().chain([LIES.to_vec()]).enumerate() {
            let captured = Captured::new(n as u64, table, &lies);
            let took = captured.run_until_true();
            println!("{table:?} {lies:?}: {took} s");
            captured.cluster.run_secs(30);
            assert_eq!(captured.truth(), (1.0, 1.0), "it stays so: {table:?} {lies:?}");
        }
    }
}

#[test]
fn newcomers_among_liars_find_their_place_and_enter_the_lists() {
    for table in [TablePolicy::Fingers, TablePolicy::Adaptive] {
        let captured = Captured::new(9, table, &LIES);
        let via = captured.cluster.hosts()[1];
        captured.cluster.run_secs(30);
        let mut joined = 0;
        for _ in 0..8 {
            let host = captured.cluster.add();
            // The way may lead through too many liars; then it says so, and is on no ring.
            joined += usize::from(captured.cluster.join(host, &[via]).is_ok());
        }
        assert!(joined >= 6, "{joined} of 8");
        captured.cluster.run_secs(120);
        assert_eq!(captured.truth(), (1.0, 1.0), "{table:?}");
    }
}

#[test]
fn a_node_that_an_audit_added_leaves_the_lists_when_it_dies() {
    let captured = Captured::new(4, TablePolicy::Adaptive, &[Lie::Accomplices]);
    captured.cluster.run_secs(90);
    assert_eq!(captured.truth(), (1.0, 1.0));
    let honest: Vec<HostId> =
        captured.cluster.hosts().into_iter().filter(|host| !captured.is_liar(*host)).collect();
    for host in honest.iter().step_by(4) {
        captured.cluster.crash_silently(*host);
    }
    captured.cluster.run_secs(90);
    assert_eq!(captured.truth(), (1.0, 1.0));
}

/// Counts the cost of audits: on a ring that looks for no others and knows all fingers, no node
/// else asks the way.
struct Meter {
    honest: Arc<Chord>,
    bytes: Arc<AtomicU64>,
}

impl Service for Meter {
    fn handle(&self, from: Peer, request: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        let is_audit = matches!(request.method, messages::ROUTE | messages::INTRODUCE);
        let (asked, bytes) = (request.header.len(), self.bytes.clone());
        let answer = self.honest.handle(from, request);
        Box::pin(async move {
            let answer = answer.await;
            if is_audit {
                let told = answer.as_ref().map_or(0, |reply| reply.header.len());
                // The overhead of a message, both ways.
                bytes.fetch_add((asked + told + 2 * 96) as u64, Ordering::Relaxed);
            }
            answer
        })
    }
}

#[test]
fn a_ring_of_honest_nodes_at_rest_pays_hardly_anything_for_audits() {
    let config = ChordConfig { merge_every: MINUTE * 600, ..ChordConfig::default() };
    let cluster = Cluster::perfect(lan(3), config, NODES, true);
    let bytes = Arc::new(AtomicU64::new(0));
    for host in cluster.hosts() {
        let meter = Meter { honest: cluster.chord(host), bytes: bytes.clone() };
        let router = Router::new().route(FAMILY, Arc::new(meter));
        cluster.sim.transport(host).serve(Arc::new(router));
    }
    let share = |secs: u64| {
        bytes.store(0, Ordering::Relaxed);
        cluster.run_secs(secs);
        bytes.load(Ordering::Relaxed) as f64 / NODES as f64 / secs as f64
    };
    let (first, later) = (share(600), share(600));
    println!("audits of an honest ring: {first:.1} B/s for ten minutes, {later:.1} B/s then");
    assert!(first < 100.0 && later < 20.0, "{first} {later}");
    cluster.ideal().unwrap();
}
