//! Whoever does not know the network secret gets nothing and is counted.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use atoll_net::{CallError, Peer, RefusalReason, TcpConfig, TcpTransport, Transport};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
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

#[tokio::test]
async fn silent_connections_are_capped_and_members_get_in_when_they_are_gone() {
    let few = TcpConfig { max_handshakes: 3, ..config(1) };
    let server = TcpTransport::start(few).await.unwrap();
    server.serve(Arc::new(Echo));
    let mut silent = Vec::new();
    for _ in 0..3 {
        silent.push(TcpStream::connect(server.local().addr).await.unwrap());
    }
    let mut refused = TcpStream::connect(server.local().addr).await.unwrap();
    assert!(matches!(refused.read(&mut [0; 1]).await, Ok(0) | Err(_)), "closed at once");
    let counted = BTreeMap::from([(RefusalReason::TooManyHandshakes, 1)]);
    assert_eq!(server.refusals(), counted);
    silent.clear();
    until("their ends are seen", || server.refusals().get(&RefusalReason::Tls) == Some(&3)).await;
    let member = node(2, Echo).await;
    member.call(server.local(), request(b""), LONG).await.unwrap();
}

/// One machine without the secret kept every place for handshakes taken.
#[tokio::test]
async fn one_stranger_cannot_keep_members_out() {
    let few = TcpConfig { max_handshakes: 3, ..config(1) };
    let server = TcpTransport::start(few).await.unwrap();
    server.serve(Arc::new(Echo));
    let mut silent = Vec::new();
    for _ in 0..3 {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.2:0".parse().unwrap()).unwrap();
        silent.push(socket.connect(server.local().addr).await.unwrap());
    }
    // Connections are accepted in their order, so these hold the places by now.
    let member = node(2, Echo).await;
    member.call(server.local(), request(b""), LONG).await.unwrap();
    let counted = BTreeMap::from([(RefusalReason::TooManyHandshakes, 1)]);
    assert_eq!(server.refusals(), counted);
    assert!(matches!(silent[0].read(&mut [0; 1]).await, Ok(0) | Err(_)), "the oldest went");
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
