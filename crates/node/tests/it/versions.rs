//! Rings of nodes that differ in version.

use atoll_dht::Blocks;
use atoll_node::{Client, Node, NodeConfig, Protocol, Versions};

use crate::world::{Home, LONG, blocks, code_of, sees, until};

/// What is taken to be added after version 1: nudges, introductions, questions about known
/// nodes, copies to caches, records of the network's state.
const LATER: [u16; 6] = [0x0103, 0x0107, 0x0110, 0x0208, 0x0400, 0x0401];

const OLD: Protocol = Protocol { versions: Versions { min: 1, max: 1 }, lacks: &LATER };
const BOTH: Protocol = Protocol { versions: Versions { min: 1, max: 2 }, lacks: &[] };
const NEW: Protocol = Protocol { versions: Versions { min: 2, max: 2 }, lacks: &[] };

/// Puts blocks until the ring takes them, and adds them to those acknowledged.
async fn put(
    client: &Client,
    round: u8,
    acknowledged: &mut Vec<(atoll_key::BlockHash, bytes::Bytes)>,
) {
    let some = blocks(round, 8, 3000);
    let putting = async {
        while client.put(some.clone()).await.is_err() {
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        }
    };
    tokio::time::timeout(LONG, putting).await.expect("the ring takes blocks");
    acknowledged.extend(some);
}

/// First all nodes learn version 2 beside version 1, one by one, then all forget version 1.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_ring_is_upgraded_node_by_node_while_it_takes_and_serves_blocks() {
    let mut nodes = Vec::new();
    for number in 0..4 {
        let home = Home::new();
        let code = match nodes.first() {
            Some((first, _)) => Some(code_of(first).await),
            None => None,
        };
        let config = NodeConfig { protocol: OLD, ..home.config(code) };
        let node = Node::start(config).await.expect("a fresh directory");
        nodes.push((home, node));
        sees(&nodes[number].1, number).await;
    }
    let mut acknowledged = Vec::new();
    let mut round = 0;
    for (protocol, spoken) in [(BOTH, 2), (NEW, 2)] {
        for at in 0..nodes.len() {
            let other = &nodes[(at + 1) % 4].0;
            put(&other.client().await, round, &mut acknowledged).await;
            round += 1;
            let (home, node) = nodes.remove(at);
            node.stop().await;
            // While it is away, too.
            let there = nodes[0].0.client().await;
            put(&there, round, &mut acknowledged).await;
            round += 1;
            let config = NodeConfig { protocol, ..NodeConfig::new(&home.dir) };
            let node = Node::start(config).await.expect("a node's directory");
            nodes.insert(at, (home, node));
            for (_, node) in &nodes {
                sees(node, 3).await;
            }
            for (home, _) in &nodes {
                let client = home.client().await;
                for (hash, bytes) in &acknowledged {
                    assert_eq!(client.get(*hash).await.as_ref(), Ok(bytes), "after step {round}");
                }
            }
        }
        for (home, _) in &nodes {
            let members = home.client().await.members().await.expect("answered").members;
            let others: Vec<_> = members.iter().filter(|m| m.status == "connected").collect();
            assert!(others.iter().all(|member| member.version == spoken), "{others:?}");
        }
    }
    for (_, node) in nodes {
        node.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_speaks_no_common_version_says_which_ones_there_are() {
    let (first, second) = (Home::new(), Home::new());
    let config = NodeConfig { protocol: OLD, ..first.config(None) };
    let founder = Node::start(config).await.expect("a fresh directory");
    let code = code_of(&first).await;
    let config = NodeConfig { protocol: NEW, ..second.config(Some(code)) };
    let other = Node::start(config).await.expect("a fresh directory");
    assert!(!other.status().joined);
    let told = "speaks protocol version 1, this node version 2";
    until("it says so", || other.status().warnings.iter().any(|w| w.contains(told))).await;
    let counts = || founder.status().refusals.contains_key("wrong_version");
    until("the founder counts it", counts).await;
    other.stop().await;
    founder.stop().await;
}
