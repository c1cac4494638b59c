//! Several nodes: blocks, failures, restarts, strangers.

use atoll_dht::Blocks;
use atoll_key::{SecretKey, SignedBlock};
use atoll_node::{JoinCode, Network, Node, NodeConfig};

use crate::world::{Home, blocks, code_of, positions, ring, sees, until};

/// Kills nodes that remember each other; their directories.
async fn kill_all(nodes: Vec<(Home, Node)>) -> Vec<Home> {
    let mut homes = Vec::new();
    for (home, node) in nodes {
        let peers = home.dir.join("peers.cbor");
        until("its peers are remembered", || peers.exists()).await;
        node.kill().await;
        homes.push(home);
    }
    homes
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_one_client_puts_every_other_gets() {
    let nodes = ring(2).await;
    let put = blocks(1, 20, 5000);
    let root = SignedBlock::sign(&SecretKey::from_seed(&[4; 32]), b"", 3, b"root");
    let client = nodes[0].0.client().await;
    client.put(put.clone()).await.expect("put");
    client.put_signed(root.clone()).await.expect("put");
    for (home, _) in &nodes {
        let client = home.client().await;
        for (hash, bytes) in &put {
            assert_eq!(client.get(*hash).await.as_ref(), Ok(bytes));
        }
        assert_eq!(client.get_signed(root.key()).await.as_ref(), Ok(&root));
        let asked = put.iter().map(|(hash, _)| *hash).chain([atoll_key::BlockHash([8; 32])]);
        let lacking = client.renew(asked.collect()).await;
        assert_eq!(lacking, Ok(vec![atoll_key::BlockHash([8; 32])]));
    }
    for (_, node) in nodes {
        node.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_others_serve_when_one_crashes_and_it_comes_back_to_its_place() {
    let mut nodes = ring(2).await;
    let put = blocks(2, 20, 3000);
    nodes[0].0.client().await.put(put.clone()).await.expect("put");
    until("all copies are there", || nodes.iter().all(|(_, node)| node.status().blocks == 20))
        .await;
    let (home, node) = nodes.remove(1);
    let place = positions(&node.status());
    node.kill().await;
    for (other, _) in &nodes {
        let client = other.client().await;
        for (hash, bytes) in &put {
            assert_eq!(client.get(*hash).await.as_ref(), Ok(bytes));
        }
    }
    let node = home.start_again().await;
    assert_eq!(positions(&node.status()), place);
    assert_eq!(node.status().blocks, 20, "it kept its blocks");
    sees(&node, 2).await;
    for (_, other) in &nodes {
        sees(other, 2).await;
    }
    node.stop().await;
    for (_, node) in nodes {
        node.stop().await;
    }
}

/// After a power cut all machines came back with other addresses. No node found another, and a
/// fresh join code did not help: its node was known at its old address.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_all_addresses_have_changed_a_fresh_join_code_brings_the_ring_together() {
    let nodes = ring(2).await;
    let put = blocks(5, 5, 100);
    nodes[0].0.client().await.put(put.clone()).await.expect("put");
    let homes = kill_all(nodes).await;
    let moved = |home: &Home, number: usize, join: Option<JoinCode>| NodeConfig {
        listen: format!("127.0.1.{number}:0").parse().ok(),
        join,
        ..NodeConfig::new(&home.dir)
    };
    let first = Node::start(moved(&homes[0], 1, None)).await.expect("a node's directory");
    let warnings = first.status().warnings;
    assert!(warnings.iter().any(|warning| warning.contains("serving alone")), "{warnings:?}");
    let code = code_of(&homes[0]).await;
    assert_eq!(code.bootstrap[0], first.local());
    let mut nodes = vec![first];
    for (number, home) in homes.iter().enumerate().skip(1) {
        let config = moved(home, number + 1, Some(code.clone()));
        nodes.push(Node::start(config).await.expect("a node's directory"));
    }
    for node in &nodes {
        sees(node, 2).await;
    }
    for home in &homes {
        let client = home.client().await;
        for (hash, bytes) in &put {
            assert_eq!(client.get(*hash).await.as_ref(), Ok(bytes));
        }
    }
    // One that moves later is found without a code: the others are where it left them.
    let last = nodes.pop().expect("three");
    last.kill().await;
    nodes.push(Node::start(moved(&homes[2], 9, None)).await.expect("a node's directory"));
    for node in &nodes {
        sees(node, 2).await;
    }
    until("the clocks of others are known", || nodes[0].status().clock.compared >= 2).await;
    for node in nodes {
        node.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_ring_that_was_stopped_as_a_whole_finds_itself_again() {
    let nodes = ring(1).await;
    let put = blocks(3, 5, 100);
    nodes[0].0.client().await.put(put.clone()).await.expect("put");
    let homes = kill_all(nodes).await;
    // The first that is back finds no other node, but serves what it has, and says so.
    let first = homes[0].start_again().await;
    assert!(first.status().joined);
    let warnings = first.status().warnings;
    assert!(warnings.iter().any(|warning| warning.contains("serving alone")), "{warnings:?}");
    let client = homes[0].client().await;
    for (hash, bytes) in &put {
        assert_eq!(client.get(*hash).await.as_ref(), Ok(bytes));
    }
    let second = homes[1].start_again().await;
    sees(&second, 1).await;
    sees(&first, 1).await;
    until("the warning goes", || first.status().warnings.is_empty()).await;
    first.stop().await;
    second.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stranger_without_the_secret_is_refused_and_counted() {
    let home = Home::new();
    let node = home.found().await;
    let code = code_of(&home).await;
    let forged = JoinCode::new(
        Network { secret: [7; 32], ..code.network.clone() },
        code.bootstrap.iter().copied(),
    );
    let stranger = Home::new();
    let outside = stranger.join(&forged).await;
    assert!(!outside.status().joined);
    let status = node.status();
    assert!(status.refusals.get("wrong_secret").is_some_and(|count| *count > 0), "{status:?}");
    assert!(status.successors.is_empty());
    outside.stop().await;
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_leaves_is_gone_from_its_neighbours_at_once() {
    let mut nodes = ring(2).await;
    let (_home, leaver) = nodes.pop().expect("three");
    leaver.stop().await;
    for (_, node) in &nodes {
        assert_eq!(node.status().successors.len(), 1);
    }
    for (_, node) in nodes {
        node.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_who_joined_can_invite_others() {
    let nodes = ring(1).await;
    let code = code_of(&nodes[1].0).await;
    assert_eq!(code.bootstrap.len(), 2, "itself and a successor");
    let third = Home::new();
    let node = third.join(&code).await;
    sees(&node, 2).await;
    assert_eq!(node.status().network_id, nodes[0].1.status().network_id);
    node.stop().await;
    for (_, node) in nodes {
        node.stop().await;
    }
}
