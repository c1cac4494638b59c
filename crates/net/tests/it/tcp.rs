//! Nodes of one network that call each other.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use atoll_net::mux::MAX_OPEN_CALLS;
use atoll_net::{
    CallError, Peer, Refusal, RefusalReason, Reply, Router, TcpConfig, TcpTransport, Transport,
};
use bytes::Bytes;
use tokio::net::TcpListener;

use crate::services::{By, Echo, LONG, Never, bulk, config, key, node, request, until};

#[tokio::test]
async fn a_call_is_answered_by_the_holder_of_the_key() {
    let server = node(
        1,
        By(|from: Peer, _| Ok(Reply { header: Bytes::from(format!("{from}")), parts: vec![] })),
    )
    .await;
    let client = node(2, Echo).await;
    let reply = client.call(server.local(), request(b""), LONG).await.unwrap();
    assert_eq!(reply.header, format!("{}", client.local()), "the caller and its listening address");
    until("a round trip is measured", || client.round_trip(&server.local().id).is_some()).await;
    until("by the other side too", || server.round_trip(&client.local().id).is_some()).await;
}

/// A call goes over any connection of the peer's, also one that it dialled itself: that it
/// is answered does not say that anybody listens where the peer claims to.
#[tokio::test]
async fn an_address_is_reached_only_if_the_key_answers_there() {
    let (server, client) = (node(1, Echo).await, node(2, Echo).await);
    client.call(server.local(), request(b""), LONG).await.unwrap();
    let there = client.local();
    assert_eq!(server.reach(there, LONG).await, Ok(()));
    let elsewhere = Peer { addr: SocketAddr::from(([127, 0, 0, 1], 1)), ..there };
    assert!(server.call(elsewhere, request(b""), LONG).await.is_ok(), "its open connection");
    assert!(matches!(server.reach(elsewhere, LONG).await, Err(CallError::Unreachable(_))));
    let other = node(3, Echo).await;
    let anothers = Peer { addr: other.local().addr, ..there };
    assert!(matches!(server.reach(anothers, LONG).await, Err(CallError::Unreachable(_))));
}

/// The replicas of one put asked its publisher at once whether it is where it says: a third
/// of 200 got in.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_hundred_nodes_reach_one_at_once() {
    let publisher = node(1, Echo).await;
    let mut others = Vec::new();
    for number in 2..202 {
        others.push(node(number, Echo).await);
    }
    let there = publisher.local();
    let reaches = others.iter().map(|other| other.reach(there, LONG)).map(tokio::spawn);
    for reach in reaches.collect::<Vec<_>>() {
        assert_eq!(reach.await.unwrap(), Ok(()));
    }
    assert_eq!(publisher.refusals(), BTreeMap::new());
    assert_eq!(publisher.stats().connections_accepted, 0, "none of them carries calls");
}

#[tokio::test]
async fn each_side_knows_the_address_at_the_other_end() {
    let (server, client) = (node(1, Echo).await, node(2, Echo).await);
    assert_eq!(server.remote_ip(&client.local().id), None);
    client.call(server.local(), request(b""), LONG).await.unwrap();
    let loopback = Some(client.local().addr.ip());
    assert_eq!(client.remote_ip(&server.local().id), loopback);
    assert_eq!(server.remote_ip(&client.local().id), loopback);
    client.shutdown().await;
    until("it is closed", || server.remote_ip(&client.local().id).is_none()).await;
}

#[tokio::test]
async fn parts_arrive_as_they_were_sent() {
    let (server, client) = (node(1, Echo).await, node(2, Echo).await);
    let parts: Vec<Bytes> = [0, 1, 1023, 1024, 1025, 16_384, 65_536, 1 << 20]
        .map(|size| Bytes::from(vec![size as u8; size]))
        .into();
    let sent = atoll_net::Request { parts: parts.clone(), ..request(b"header") };
    let reply = client.call(server.local(), sent, LONG).await.unwrap();
    assert_eq!(reply, Reply { header: Bytes::from_static(b"header"), parts });
}

#[tokio::test]
async fn both_directions_share_one_connection() {
    let (one, two) = (node(1, Echo).await, node(2, Echo).await);
    one.call(two.local(), request(b""), LONG).await.unwrap();
    two.call(one.local(), request(b""), LONG).await.unwrap();
    assert_eq!(two.stats().connections_dialled, 0);
    assert_eq!(two.stats().connections_accepted, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_calls_at_once_share_one_dial() {
    let (server, client) = (node(1, Echo).await, node(2, Echo).await);
    let calls: Vec<_> = (0..1000u32)
        .map(|number| {
            let body = Bytes::copy_from_slice(&number.to_be_bytes());
            let call = client.call(
                server.local(),
                atoll_net::Request { method: 1, header: body.clone(), parts: bulk(5000).parts },
                LONG,
            );
            tokio::spawn(async move { (call.await.unwrap().header, body) })
        })
        .collect();
    for call in calls {
        let (reply, sent) = call.await.unwrap();
        assert_eq!(reply, sent);
    }
    assert_eq!(client.stats().connections_dialled, 1);
    assert_eq!(server.stats().calls_served, 1000);
    assert_eq!(server.stats().calls_overloaded, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_that_dial_each_other_at_once_end_with_one_connection() {
    let (one, two) = (node(1, Echo).await, node(2, Echo).await);
    for _ in 0..20 {
        let (there, back) = tokio::join!(
            one.call(two.local(), request(b""), LONG),
            two.call(one.local(), request(b""), LONG)
        );
        there.unwrap();
        back.unwrap();
    }
    until("one connection is left", || {
        (one.stats().connections, two.stats().connections) == (1, 1)
    })
    .await;
    one.call(two.local(), request(b""), LONG).await.unwrap();
}

#[tokio::test]
async fn a_service_that_never_finishes_cannot_grow_memory() {
    let never = Never::default();
    let (server, client) = (node(1, never.clone()).await, node(2, Echo).await);
    let calls: Vec<_> = (0..MAX_OPEN_CALLS + 100)
        .map(|_| tokio::spawn(client.call(server.local(), request(b""), Duration::from_secs(2))))
        .collect();
    until("as many as allowed are served", || never.begun.load(Ordering::SeqCst) == MAX_OPEN_CALLS)
        .await;
    for call in calls {
        assert_eq!(call.await.unwrap(), Err(CallError::TimedOut));
    }
    until("all are dropped", || {
        never.dropped.load(Ordering::SeqCst) == never.begun.load(Ordering::SeqCst)
    })
    .await;
    server.serve(Arc::new(Echo));
    client.call(server.local(), request(b""), LONG).await.unwrap();
}

#[tokio::test]
async fn a_peer_that_dies_fails_its_calls_at_once_and_is_found_again_after_its_restart() {
    let never = Never::default();
    let (server, client) = (node(1, never.clone()).await, node(2, Echo).await);
    let there = server.local();
    let call = tokio::spawn(client.call(there, request(b""), LONG));
    until("the call is served", || never.begun.load(Ordering::SeqCst) == 1).await;
    server.shutdown().await;
    assert!(matches!(call.await.unwrap(), Err(CallError::Unreachable(_))));
    until("the serving future is dropped", || never.dropped.load(Ordering::SeqCst) == 1).await;
    assert!(matches!(client.call(there, request(b""), LONG).await, Err(CallError::Unreachable(_))));

    let again = TcpConfig { listen: there.addr, ..config(1) };
    let server = TcpTransport::start(again).await.unwrap();
    server.serve(Arc::new(Echo));
    let mut failures = 0;
    while client.call(there, request(b""), LONG).await.is_err() {
        failures += 1;
        assert!(failures < 1000, "the restarted peer is never found");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn while_backing_off_calls_fail_without_dialling() {
    let client = node(2, Echo).await;
    let unused = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let nobody = Peer { id: key(9).peer_id(), addr: unused };
    // Ten failures bring the pause to its longest, 2 s: then a call does not dial.
    while client.stats().dials_failed < 6 {
        let error = client.call(nobody, request(b""), LONG).await.unwrap_err();
        assert!(matches!(error, CallError::Unreachable(_)), "{error}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let error = client.call(nobody, request(b""), LONG).await.unwrap_err();
    assert!(error.to_string().contains("a moment ago"), "{error}");
    assert_eq!(client.stats().dials_failed, 6);
}

#[tokio::test]
async fn a_peer_that_accepts_and_says_nothing_times_the_call_out() {
    let client = node(2, Echo).await;
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let peer = Peer { id: key(9).peer_id(), addr: silent.local_addr().unwrap() };
    let result = client.call(peer, request(b""), Duration::from_millis(100)).await;
    assert_eq!(result, Err(CallError::TimedOut));
}

#[tokio::test]
async fn a_wrong_key_at_the_right_address_is_refused() {
    let (server, client) = (node(1, Echo).await, node(2, Echo).await);
    let other = Peer { id: key(9).peer_id(), addr: server.local().addr };
    let error = client.call(other, request(b""), LONG).await.unwrap_err();
    assert!(matches!(error, CallError::Unreachable(_)), "{error}");
    assert_eq!(server.stats().calls_served, 0);
    assert_eq!(server.stats().connections, 0);
}

#[tokio::test]
async fn a_node_calls_itself_without_a_connection() {
    let one = node(1, Echo).await;
    let reply = one.call(one.local(), request(b"me"), LONG).await.unwrap();
    assert_eq!(reply.header, "me");
    assert_eq!(one.stats().connections_dialled, 0);
}

#[tokio::test]
async fn beyond_the_cap_the_oldest_connection_is_let_go_and_made_again() {
    let small = TcpConfig { max_connections: 2, ..config(9) };
    let client = TcpTransport::start(small).await.unwrap();
    let mut servers = Vec::new();
    for number in 1..=3 {
        let server = node(number, Echo).await;
        client.call(server.local(), request(b""), LONG).await.unwrap();
        servers.push(server);
    }
    until("two are left", || client.stats().connections == 2).await;
    assert_eq!(servers[0].stats().connections, 0, "the least recently used is gone");
    client.call(servers[0].local(), request(b""), LONG).await.unwrap();
    assert_eq!(client.stats().connections_dialled, 4);
}

#[tokio::test]
async fn refusals_arrive_with_their_reason() {
    let (server, client) = (node(1, Router::new()).await, node(2, Echo).await);
    let Err(CallError::Refused(refusal)) = client.call(server.local(), request(b""), LONG).await
    else {
        panic!("no method is known");
    };
    assert_eq!(refusal.code, Refusal::UNKNOWN_METHOD);
    assert!(refusal.text.contains("0x0101"), "{}", refusal.text);
}

#[tokio::test]
async fn shutdown_ends_every_connection() {
    let (server, client) = (node(1, Echo).await, node(2, Echo).await);
    client.call(server.local(), request(b""), LONG).await.unwrap();
    client.shutdown().await;
    assert_eq!(client.stats().connections, 0);
    until("the other end notices", || server.stats().connections == 0).await;
    let error = client.call(server.local(), request(b""), LONG).await.unwrap_err();
    assert!(matches!(error, CallError::Unreachable(_)), "{error}");
}

#[tokio::test]
async fn an_unspecified_listening_address_is_taken_from_the_connection() {
    let open = TcpConfig { listen: SocketAddr::from(([0, 0, 0, 0], 0)), ..config(2) };
    let client = TcpTransport::start(open).await.unwrap();
    let server = node(
        1,
        By(|from: Peer, _| Ok(Reply { header: Bytes::from(from.addr.to_string()), parts: vec![] })),
    )
    .await;
    let reply = client.call(server.local(), request(b""), LONG).await.unwrap();
    assert_eq!(reply.header, format!("127.0.0.1:{}", client.local().addr.port()));
    assert!(!client.local().addr.ip().is_unspecified());
}

#[tokio::test]
async fn a_node_of_another_profile_is_told_so_and_refused() {
    let server = node(1, Echo).await;
    let mut other = config(2);
    other.network.profile = Bytes::from_static(b"profile two");
    let client = TcpTransport::start(other).await.unwrap();
    let error = client.call(server.local(), request(b""), LONG).await.unwrap_err();
    assert!(error.to_string().contains("profile"), "{error}");
    assert_eq!(server.refusals(), BTreeMap::from([(RefusalReason::WrongProfile, 1)]));
    assert_eq!(server.stats().calls_served, 0);
}
