//! A caller that does not know the network secret gets nothing and is counted.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use atoll_net::{CallError, Peer, RefusalReason, TcpConfig, TcpTransport, Transport};
use tokio::io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional};
use tokio::net::{TcpListener, TcpSocket, TcpStream};

use crate::services::{Echo, LONG, SECRET, config, node, request, until};

#[tokio::test]
async fn a_stranger_without_the_secret_gets_nothing_and_is_counted() {
    let server = node(1, Echo).await;
    let mut stranger = config(2);
    stranger.network.members = Arc::new([41; 32]);
    let stranger = TcpTransport::start(stranger).await.unwrap();
    stranger.serve(Arc::new(Echo));
    let error = stranger.call(server.local(), request(b""), LONG).await.unwrap_err();
    assert!(matches!(error, CallError::Unreachable(_)), "{error}");
    assert_eq!(server.refusals(), BTreeMap::from([(RefusalReason::WrongSecret, 1)]));
    let stats = server.stats();
    assert_eq!((stats.calls_served, stats.connections, stats.bytes_out), (0, 0, 0));

    // Nor does a member speak to a stranger that listens.
    let error = server.call(stranger.local(), request(b""), LONG).await.unwrap_err();
    assert!(matches!(error, CallError::Unreachable(_)), "{error}");
    assert_eq!(stranger.stats().calls_served, 0);
}

#[tokio::test]
async fn garbage_instead_of_tls_is_refused_and_counted() {
    let server = node(1, Echo).await;
    let mut stream = TcpStream::connect(server.local().addr).await.unwrap();
    stream.write_all(b"GET / HTTP/1.1\r\nHost: atoll\r\n\r\n").await.unwrap();
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer).await;
    // At most a TLS alert: a record head and two bytes.
    assert!(answer.len() <= 7, "{answer:?}");
    until("it is counted", || server.refusals() == BTreeMap::from([(RefusalReason::Tls, 1)])).await;
}

/// A connection from another address of this machine, which says nothing.
async fn silent(from: &str, to: &TcpTransport) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind(format!("{from}:0").parse().unwrap()).unwrap();
    socket.connect(to.local().addr).await.unwrap()
}

async fn is_closed(stream: &mut TcpStream) -> bool {
    matches!(stream.read(&mut [0; 1]).await, Ok(0) | Err(_))
}

#[tokio::test]
async fn silent_connections_are_capped_and_the_oldest_makes_way() {
    let few = TcpConfig { max_handshakes: 3, ..config(1) };
    let server = TcpTransport::start(few).await.unwrap();
    server.serve(Arc::new(Echo));
    let mut strangers = Vec::new();
    for _ in 0..4 {
        strangers.push(silent("127.0.0.2", &server).await);
    }
    assert!(is_closed(&mut strangers[0]).await, "closed at once");
    let counted = BTreeMap::from([(RefusalReason::TooManyHandshakes, 1)]);
    assert_eq!(server.refusals(), counted);
    strangers.clear();
    until("their ends are seen", || server.refusals().get(&RefusalReason::Tls) == Some(&3)).await;
}

/// One machine without the secret kept every place for handshakes taken, and later as many
/// machines as there are places did.
#[tokio::test]
async fn strangers_that_hold_every_place_keep_no_member_out() {
    for (max_handshakes, addresses) in [(3, 1), (3, 3), (64, 64)] {
        let server = TcpConfig { max_handshakes, ..config(1) };
        let server = TcpTransport::start(server).await.unwrap();
        server.serve(Arc::new(Echo));
        let mut strangers = Vec::new();
        for n in 0..max_handshakes {
            strangers.push(silent(&format!("127.0.1.{}", 1 + n % addresses), &server).await);
        }
        // Connections are accepted in their order, so these hold the places by now.
        let member = node(2, Echo).await;
        member.call(server.local(), request(b""), LONG).await.unwrap();
        let counted = BTreeMap::from([(RefusalReason::TooManyHandshakes, 1)]);
        assert_eq!(server.refusals(), counted);
        assert!(is_closed(&mut strangers[0]).await, "the oldest went");
        // More of them than there are places, while it is here.
        for n in 0..2 * max_handshakes {
            strangers.push(silent(&format!("127.0.2.{}", 1 + n % addresses), &server).await);
            if n % 8 == 0 {
                assert_eq!(member.reach(server.local(), LONG).await, Ok(()));
            }
        }
    }
}

/// Its neighbours took a node for dead whose places for handshakes strangers held, while it
/// answered them over their connections all the time.
#[tokio::test]
async fn a_live_connection_is_proof_of_life_where_a_dial_fails() {
    // `b` is dialled through a forwarder, which can be taken away.
    let forwarder = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let outside = forwarder.local_addr().unwrap();
    // An address of this machine that nothing else uses.
    let behind = SocketAddr::from(([127, 0, 3, 1], outside.port()));
    let b = TcpConfig { advertise: Some(outside), listen: behind, ..config(2) };
    let b = TcpTransport::start(b).await.unwrap();
    b.serve(Arc::new(Echo));
    let forwarder = tokio::spawn(async move {
        loop {
            let (mut from, _) = forwarder.accept().await.unwrap();
            let mut to = TcpStream::connect(behind).await.unwrap();
            tokio::spawn(async move { copy_bidirectional(&mut from, &mut to).await });
        }
    });
    let a = node(1, Echo).await;
    b.call(a.local(), request(b""), LONG).await.unwrap();
    let there = b.local();
    assert_eq!(a.reach(there, LONG).await, Ok(()));
    forwarder.abort();
    assert!(forwarder.await.unwrap_err().is_cancelled());
    assert!(TcpStream::connect(there.addr).await.is_err(), "no dial succeeds any more");
    assert_eq!(a.reach(there, LONG).await, Ok(()), "it answers");
    // Elsewhere it was never reached, and when it is gone it is gone.
    let elsewhere = Peer { addr: SocketAddr::from(([127, 0, 0, 1], 1)), ..there };
    assert!(matches!(a.reach(elsewhere, LONG).await, Err(CallError::Unreachable(_))));
    b.shutdown().await;
    assert!(matches!(a.reach(there, LONG).await, Err(CallError::Unreachable(_))));
}

/// Forwards connections to `to` and keeps every byte of both directions.
async fn recording_proxy(to: SocketAddr) -> (SocketAddr, Arc<Mutex<Vec<u8>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let recorded = Arc::new(Mutex::new(Vec::new()));
    let record = recorded.clone();
    tokio::spawn(async move {
        let (client, _) = listener.accept().await.unwrap();
        let server = TcpStream::connect(to).await.unwrap();
        let ((from_client, to_client), (from_server, to_server)) =
            (client.into_split(), server.into_split());
        for (mut from, mut to) in [(from_client, to_server), (from_server, to_client)] {
            let record = record.clone();
            tokio::spawn(async move {
                let mut buffer = [0; 4096];
                while let Ok(read @ 1..) = from.read(&mut buffer).await {
                    record.lock().unwrap().extend_from_slice(&buffer[..read]);
                    to.write_all(&buffer[..read]).await.unwrap();
                }
            });
        }
    });
    (addr, recorded)
}

fn contains(haystack: &[u8], needle: &[u8]) -> bool {
    haystack.windows(needle.len()).any(|window| window == needle)
}

#[tokio::test]
async fn neither_the_secret_nor_a_message_is_seen_on_the_wire() {
    let (server, client) = (node(1, Echo).await, node(2, Echo).await);
    let (addr, recorded) = recording_proxy(server.local().addr).await;
    let through = Peer { addr, ..server.local() };
    let words = b"words that only the two nodes may read";
    client.call(through, request(words), LONG).await.unwrap();
    let recorded = recorded.lock().unwrap();
    assert!(contains(&recorded, b"\x03\x04"), "the proxy recorded a TLS 1.3 handshake");
    assert!(!contains(&recorded, &SECRET[..8]));
    assert!(!contains(&recorded, &words[..8]));
}
