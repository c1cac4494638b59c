//! Nodes that dial each other at the same moment, and dials that only check an address:
//! calls in flight are not lost.

use std::sync::Arc;
use std::time::Duration;

use atoll_net::{CallError, Peer, TcpTransport, Transport};

use crate::services::{Echo, LONG, bulk, node, request, until};

/// Calls `to` until `stop`, and returns what failed.
async fn call_again_and_again(from: Arc<TcpTransport>, to: Peer, count: usize) -> Vec<CallError> {
    let mut failed = Vec::new();
    for number in 0..count {
        let asked = if number % 4 == 0 { bulk(100_000) } else { request(b"small") };
        failed.extend(from.call(to, asked, LONG).await.err());
    }
    failed
}

/// The root of a put checks the publisher's address while the publisher calls it. The
/// publisher took the connection that was dialled for the check for a replacement of the one
/// that carried its calls, sent calls over it, and lost them when the check was over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_check_of_an_address_costs_the_checked_node_no_call() {
    let (publisher, root) = (node(1, Echo).await, node(2, Echo).await);
    publisher.call(root.local(), request(b""), LONG).await.unwrap();
    let calls: Vec<_> = (0..4)
        .map(|_| tokio::spawn(call_again_and_again(publisher.clone(), root.local(), 300)))
        .collect();
    let (here, there) = (root.clone(), publisher.local());
    let checks = tokio::spawn(async move {
        for _ in 0..60 {
            here.reach(there, LONG).await.unwrap();
        }
    });
    for call in calls {
        assert_eq!(call.await.unwrap(), vec![]);
    }
    checks.await.unwrap();
    let made = (publisher.stats().connections_dialled, root.stats().connections_dialled);
    assert_eq!(made, (1, 0), "no check replaces the connection");
}

/// All nodes of a network call all others at once, as after a common start.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_call_is_lost_when_many_nodes_dial_each_other_at_the_same_moment() {
    for round in 0..4u8 {
        let mut nodes = Vec::new();
        for number in 1..=10 {
            nodes.push(node(round * 10 + number, Echo).await);
        }
        let mut calls = Vec::new();
        for from in &nodes {
            for to in &nodes {
                if from.local() != to.local() {
                    for _ in 0..2 {
                        let call = call_again_and_again(from.clone(), to.local(), 20);
                        calls.push(tokio::spawn(call));
                    }
                }
            }
        }
        for call in calls {
            assert_eq!(call.await.unwrap(), vec![]);
        }
        for node in &nodes {
            until("one connection is left with each", || node.stats().connections == 9).await;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}
