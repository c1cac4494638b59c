//! CFS §4.2 with Figure 3, and §6.2 with Figure 5: how a lookup goes around the ring.
//!
//! The tables are those of a ring at rest; nodes that are `dead` do not answer, and are removed
//! from tables only by Figure 5's `alert`.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use atoll_env::BoxFuture;
use atoll_key::{Key, PeerId};
use atoll_net::{CallError, Peer};
use atoll_overlay::chord::ring::state::ChordState;
use atoll_overlay::peer_book::PeerBook;
use atoll_overlay::walk::{Found, Step, WalkError, WalkLimits, walk};
use atoll_overlay::{Neighbourhood, Node, Overlay, Route};
use atoll_sim::{Sim, SimConfig};
use futures_util::FutureExt;

use super::ring;

/// The states of all nodes during one lookup.
type States = Arc<Mutex<BTreeMap<PeerId, ChordState>>>;

/// The tables of the node that looks a key up.
struct Tables {
    me: PeerId,
    states: States,
    dead: Vec<Node>,
    book: PeerBook,
}

impl Tables {
    fn state(&self) -> ChordState {
        self.states.lock().unwrap()[&self.me].clone()
    }

    /// Figure 5, `n.alert(id)`: "delete server id from the finger list and successor list".
    fn alert(&self, at: &PeerId, failed: &[Peer]) {
        let gone = |node: &Node| self.dead.contains(node) && failed.contains(&node.peer);
        self.states.lock().unwrap().get_mut(at).unwrap().forget(&gone);
    }
}

impl Overlay for Tables {
    fn neighbourhoods(&self) -> Vec<Neighbourhood> {
        vec![self.state().neighbourhood()]
    }

    fn epoch(&self) -> u64 {
        self.state().epoch()
    }

    fn changed(&self, _: u64) -> BoxFuture<'static, u64> {
        Box::pin(std::future::pending())
    }

    fn peer_book(&self) -> &PeerBook {
        &self.book
    }

    fn route(&self, key: &Key, as_root: bool) -> Route {
        self.state().route(key, as_root)
    }

    fn find_root(&self, _: &Key) -> BoxFuture<'static, Result<Vec<Node>, WalkError>> {
        unreachable!("the walk is tested itself")
    }

    fn estimated_nodes(&self) -> f64 {
        self.state().estimated_nodes()
    }

    fn report_failure(&self, failed: &Peer) {
        self.alert(&self.me, &[*failed]);
    }

    fn send_failure_report(&self, at: &Peer, failed: Vec<Peer>) -> BoxFuture<'static, bool> {
        self.alert(&at.id, &failed);
        Box::pin(async { true })
    }
}

/// A ring at rest, of nodes some of which have died since.
struct Ring {
    nodes: Vec<Node>,
    tables: BTreeMap<PeerId, ChordState>,
    dead: Vec<Node>,
}

impl Ring {
    /// Successor lists hold `r` entries.
    fn new(count: u8, r: usize) -> Ring {
        let nodes = ring(count);
        let tables =
            nodes.iter().map(|me| (me.peer.id, ChordState::perfect(*me, &nodes, r))).collect();
        Ring { nodes, tables, dead: Vec::new() }
    }

    fn lives(&self, node: &Node) -> bool {
        !self.dead.contains(node)
    }

    /// The closest living successor of a key.
    fn live_root(&self, key: &Key) -> Node {
        let living = self.nodes.iter().filter(|node| self.lives(node));
        *living.min_by_key(|node| node.id.key().distance_from(key)).expect("some live")
    }

    /// Looks for a block that the nodes of `stored` have, from one node, as Figure 5 does.
    fn lookup(&self, from: usize, key: &Key, stored: &[Node]) -> Result<Found<()>, WalkError> {
        let sim = Sim::new(SimConfig::default());
        let env = sim.outside();
        let states: States = Arc::new(Mutex::new(self.tables.clone()));
        let overlay = Tables {
            me: self.nodes[from].peer.id,
            states: states.clone(),
            dead: self.dead.clone(),
            book: PeerBook::default(),
        };
        let step = |node: Node, as_root: bool| {
            let answer = if !self.lives(&node) {
                Err(CallError::TimedOut)
            } else if stored.contains(&node) {
                Ok(Step::Done(()))
            } else {
                Ok(Step::Route(states.lock().unwrap()[&node.peer.id].route(key, as_root)))
            };
            async move { answer }.boxed()
        };
        let found = walk(&*env, &overlay, key, WalkLimits::default(), step);
        found.now_or_never().expect("no step waits")
    }
}

/// Keys all around the ring.
fn keys() -> impl Iterator<Item = Key> {
    (0..=255).map(|n| Key::hashed([n; 32]))
}

/// §4.2: a node "can always process a lookup correctly: if the desired key is between the node
/// and its successor, the latter node is the key's successor; otherwise the lookup can be
/// forwarded to the successor, which moves the lookup strictly closer to its destination".
#[test]
fn each_hop_of_a_lookup_is_strictly_closer_to_the_key() {
    let ring = Ring::new(200, 8);
    for key in keys() {
        let root = ring.live_root(&key);
        let found = ring.lookup(17, &key, &[root]).expect("no node has failed");
        assert_eq!(found.at, root);
        let hops = found.trace.0.iter().filter(|asked| !asked.as_root);
        let distances = hops.map(|asked| key.distance_from(asked.node.id.key()));
        assert!(distances.is_sorted_by(|a, b| a > b), "{key}");
    }
}

/// §4.2: "Since preceding_node_list never returns an ID greater than id, this process will never
/// overshoot the correct successor."
#[test]
fn a_lookup_never_overshoots_the_correct_successor() {
    let ring = Ring::new(200, 8);
    let me = ring.nodes[17].id;
    for key in keys() {
        let root = ring.live_root(&key);
        let found = ring.lookup(17, &key, &[root]).expect("no node has failed");
        for asked in found.trace.0.iter().filter(|asked| asked.node != root) {
            assert!(asked.node.id.key().strictly_between(me.key(), &key), "{key}: {asked:?}");
        }
    }
}

/// §4.2: "each iteration of the while loop eliminates half the remaining distance to the target",
/// so that lookups take "O(log N)" messages; §7.2 measures half of log2 N.
#[test]
fn a_lookup_takes_half_of_log_n_hops_and_without_fingers_many_more() {
    let mean_calls = |ring: &Ring| {
        let calls = |key: Key| {
            let root = ring.live_root(&key);
            ring.lookup(17, &key, &[root]).expect("no node has failed").trace.calls()
        };
        keys().map(calls).sum::<usize>() as f64 / 256.0
    };
    let mut ring = Ring::new(250, 4);
    let with_fingers = mean_calls(&ring);
    assert!(with_fingers <= 0.5 * 250f64.log2() + 1.0, "{with_fingers}");
    for state in ring.tables.values_mut() {
        let list = state.successors().to_vec();
        state.forget(&|node| !list.contains(node));
    }
    let without = mean_calls(&ring);
    assert!(without > 3.0 * with_fingers, "{without}: the successor list alone is slow");
}

/// §4.2: "Any one of them can be used to make progress towards the successor of id; they must all
/// be unresponsive for a lookup to fail."
#[test]
fn any_one_of_the_preceding_nodes_is_enough() {
    let mut ring = Ring::new(200, 8);
    let key = ring.nodes[150].id.key().previous();
    let own = ring.tables[&ring.nodes[17].peer.id].route(&key, false).nodes();
    assert!(own.len() > 4);
    for spared in &own {
        ring.dead = own.iter().filter(|node| *node != spared).copied().collect();
        let found = ring.lookup(17, &key, &[ring.nodes[150]]).expect("one is alive");
        assert_eq!(found.at, ring.nodes[150]);
    }
}

/// Figure 5: "If the called server (n') stores or caches the data associated with key, then
/// n'.lookup_step(key) returns that data."
#[test]
fn a_copy_on_the_way_ends_the_lookup() {
    let ring = Ring::new(200, 8);
    let key = ring.nodes[150].id.key().previous();
    let way = ring.lookup(17, &key, &[ring.nodes[150]]).expect("no node has failed").trace.0;
    assert!(way.len() > 1, "the root is not the first to be asked");
    let found = ring.lookup(17, &key, &[way[0].node, ring.nodes[150]]).expect("it is there");
    assert_eq!((found.at, found.trace.0.len()), (way[0].node, 1));
}

/// Figure 5: lookup_step "returns an error if n' is the true successor of the key but does not
/// store its associated data"; the lookup ends there, after asking the replicas.
#[test]
fn a_block_that_neither_the_root_nor_its_replicas_have_does_not_exist() {
    let ring = Ring::new(200, 8);
    let key = ring.nodes[150].id.key().previous();
    let error = ring.lookup(17, &key, &[]).expect_err("no node has it");
    let WalkError::Absent { roots, trace, .. } = error else { panic!("{error}") };
    assert_eq!(roots[0], ring.nodes[150]);
    let asked: Vec<Node> = trace.0.iter().filter(|a| a.as_root).map(|a| a.node).collect();
    assert_eq!(asked, ring.nodes[150..154], "the root and three more");
}

/// §6.2: "the second server of the pair may not be the key's original successor. However, that
/// second server will be the first live successor, and will hold a replica for key".
#[test]
fn a_lookup_ends_at_the_first_live_successor_when_the_root_has_failed() {
    let mut ring = Ring::new(200, 8);
    let key = ring.nodes[150].id.key().previous();
    for failed in 1..4 {
        ring.dead = ring.nodes[150..150 + failed].to_vec();
        let replicas = &ring.nodes[150..154];
        let found = ring.lookup(17, &key, replicas).expect("a replica is left");
        assert_eq!(found.at, ring.nodes[150 + failed]);
    }
}
