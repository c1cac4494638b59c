//! The Unix carrier.

use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use atoll_net::{
    CallError, LOCAL_CALLER, Reply, UnixClient, UnixServeError, WhenAbsent, serve_unix,
};
use bytes::Bytes;
use tokio::io::AsyncWriteExt;
use tokio::net::UnixStream;

use crate::services::{By, Echo, LONG, Never, bulk, request, until};

const ABSENT: &str = "nobody answers on";

#[tokio::test]
async fn a_call_over_the_socket_is_answered() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("control");
    let _server = serve_unix(
        &path,
        Arc::new(By(|from, request: atoll_net::Request| {
            assert_eq!(from, LOCAL_CALLER);
            Ok(Reply { header: request.header, parts: request.parts })
        })),
    )
    .unwrap();
    let client = UnixClient::new(&path);
    let sent = atoll_net::Request { parts: bulk(1 << 20).parts, ..request(b"header") };
    let reply = client.call(sent.clone(), LONG, WhenAbsent::Fail).await.unwrap();
    assert_eq!((reply.header, reply.parts), (sent.header, sent.parts));
}

#[tokio::test]
async fn only_the_owner_may_open_the_socket() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("control");
    let _server = serve_unix(&path, Arc::new(Echo)).unwrap();
    let mode = std::fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o7777, 0o600);
    let names: Vec<_> = std::fs::read_dir(dir.path()).unwrap().collect();
    assert_eq!(names.len(), 1, "no other name is left");
}

#[tokio::test]
async fn a_socket_somebody_listens_on_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("control");
    let _server = serve_unix(&path, Arc::new(Echo)).unwrap();
    assert!(matches!(serve_unix(&path, Arc::new(Echo)), Err(UnixServeError::InUse(_))));
    UnixClient::new(&path).call(request(b""), LONG, WhenAbsent::Fail).await.unwrap();
}

#[tokio::test]
async fn a_stale_socket_is_replaced_and_a_file_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("control");
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    let server = serve_unix(&path, Arc::new(Echo)).unwrap();
    UnixClient::new(&path).call(request(b""), LONG, WhenAbsent::Fail).await.unwrap();
    server.shutdown().await;
    assert!(!path.exists());
    std::fs::write(&path, b"precious").unwrap();
    assert!(matches!(serve_unix(&path, Arc::new(Echo)), Err(UnixServeError::NotASocket(_))));
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
}

#[tokio::test]
async fn a_path_too_long_for_a_socket_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x".repeat(120));
    let Err(error) = serve_unix(&path, Arc::new(Echo)) else { panic!("too long") };
    assert!(error.to_string().contains("longer than"), "{error}");
}

#[tokio::test]
async fn without_a_server_a_call_fails_at_once_or_waits_for_its_deadline() {
    let dir = tempfile::tempdir().unwrap();
    let client = UnixClient::new(&dir.path().join("control"));
    let error = client.call(request(b""), LONG, WhenAbsent::Fail).await.unwrap_err();
    assert!(error.to_string().contains(ABSENT), "{error}");
    let limit = Duration::from_millis(120);
    let error = client.call(request(b""), limit, WhenAbsent::Wait(LONG)).await.unwrap_err();
    assert!(matches!(error, CallError::Unreachable(_) | CallError::TimedOut), "{error}");
}

#[tokio::test]
async fn a_client_that_waits_survives_the_servers_restart() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("control");
    let never = Never::default();
    let server = serve_unix(&path, Arc::new(never.clone())).unwrap();
    let client = Arc::new(UnixClient::new(&path));
    let call = |when_absent| {
        let client = client.clone();
        tokio::spawn(async move { client.call(request(b"hi"), LONG, when_absent).await })
    };
    let (waits, fails) = (call(WhenAbsent::Wait(LONG)), call(WhenAbsent::Fail));
    until("both are served", || never.begun.load(Ordering::SeqCst) == 2).await;
    server.shutdown().await;
    assert!(matches!(fails.await.unwrap(), Err(CallError::Unreachable(_))));
    let begun_late = call(WhenAbsent::Wait(LONG));
    let _server = serve_unix(&path, Arc::new(Echo)).unwrap();
    let hi = Ok(Reply { header: Bytes::from_static(b"hi"), parts: vec![] });
    assert_eq!(waits.await.unwrap(), hi);
    assert_eq!(begun_late.await.unwrap(), hi);
    assert_eq!(call(WhenAbsent::Fail).await.unwrap(), hi);
}

/// A mount's calls must not queue up behind a server that does not come back.
#[tokio::test(start_paused = true)]
async fn a_server_that_stays_away_holds_up_only_the_first_calls() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("control");
    let client = UnixClient::new(&path);
    let patience = Duration::from_secs(5);
    let call = || client.call(request(b"hi"), 100 * patience, WhenAbsent::Wait(patience));
    let begin = tokio::time::Instant::now();
    let waited = || begin.elapsed();
    assert!(matches!(call().await, Err(CallError::Unreachable(_))));
    let first = waited();
    assert!((patience - Duration::from_millis(100)..=patience).contains(&first), "{first:?}");
    assert!(matches!(call().await, Err(CallError::Unreachable(_))));
    assert!(waited() - first < Duration::from_millis(100), "{:?}", waited() - first);
    let server = serve_unix(&path, Arc::new(Echo)).unwrap();
    call().await.expect("the server is back");
    drop(server);
    let second = waited();
    assert!(matches!(call().await, Err(CallError::Unreachable(_))));
    let third = waited() - second;
    assert!(third > Duration::from_secs(4), "it is waited for again: {third:?}");
}

/// A process that is stopped keeps its socket: connections are made and nothing is said.
#[tokio::test(start_paused = true)]
async fn a_server_that_says_nothing_counts_as_gone() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("control");
    let _silent = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let client = UnixClient::new(&path).gone_when_silent_for(Duration::from_secs(2));
    let begin = tokio::time::Instant::now();
    let patience = Duration::from_secs(5);
    let answer = client.call(request(b"hi"), 100 * patience, WhenAbsent::Wait(patience)).await;
    assert_eq!(answer, Err(CallError::TimedOut));
    assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());
}

#[tokio::test]
async fn a_shutdown_lets_the_reply_to_a_call_being_served_out() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("control");
    let (asked, mut asks) = tokio::sync::mpsc::unbounded_channel();
    let service = By(move |_, _: atoll_net::Request| {
        asked.send(()).unwrap();
        Ok(Reply { header: Bytes::from_static(b"going down"), parts: bulk(1 << 20).parts })
    });
    let server = serve_unix(&path, Arc::new(service)).unwrap();
    let client = UnixClient::new(&path);
    let (reply, ()) = tokio::join!(client.call(request(b""), LONG, WhenAbsent::Fail), async {
        asks.recv().await.unwrap();
        server.shutdown().await;
    });
    assert_eq!(reply.unwrap().header, "going down");
    assert_eq!(server.stats().connections, 0);
}

#[tokio::test]
async fn a_malformed_frame_closes_one_connection_and_not_the_others() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("control");
    let server = serve_unix(&path, Arc::new(Echo)).unwrap();
    let client = UnixClient::new(&path);
    client.call(request(b""), LONG, WhenAbsent::Fail).await.unwrap();
    let mut bad = UnixStream::connect(&path).await.unwrap();
    bad.write_all(&[0xee; 100]).await.unwrap();
    until("it is counted", || server.stats().malformed_frames.len() == 1).await;
    client.call(request(b""), LONG, WhenAbsent::Fail).await.unwrap();
    assert_eq!(client.stats().connections_dialled, 1);
    assert_eq!(server.stats().connections, 1);
}
