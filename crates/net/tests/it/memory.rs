//! Members that make a node hold memory for them, and those who need some meanwhile.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use atoll_env::BoxFuture;
use atoll_key::PeerId;
use atoll_net::frame::Frame;
use atoll_net::mux::{
    Context, Keepalive, MAX_HELD_REPLY_BYTES, MAX_PARTIAL_BYTES, MAX_PEER_PARTIAL_BYTES,
    MAX_PEER_SERVING_BYTES, MAX_SERVING_BYTES, Mux, REQUEST_WINDOW_BYTES, UNCOUNTED_REQUEST_BYTES,
};
use atoll_net::{MAX_MESSAGE_BYTES, Peer, Refusal, Reply, Request, Service};
use bytes::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};

use crate::services::{By, Echo, LONG, Never, bulk, request, until};

const MEBIBYTE: usize = 1 << 20;

fn member(number: u8) -> Peer {
    Peer { id: PeerId([number; 32]), addr: SocketAddr::from(([127, 0, 0, 1], 1)) }
}

fn start(io: DuplexStream, peer: Peer, context: &Context) -> Mux {
    let (mux, driver) = Mux::new(io, peer, context.clone());
    tokio::spawn(driver);
    mux
}

/// Answers whatever is asked with a mebibyte.
fn generous(keepalive: Keepalive) -> Context {
    let context = Context { keepalive, ..Context::default() };
    let big = By(|_, _| Ok(Reply { header: Bytes::new(), parts: bulk(MEBIBYTE).parts }));
    *context.service.write().unwrap() = Some(Arc::new(big));
    context
}

/// Asks for as much as one peer may have waiting, reads a little of it now and then, and talks.
async fn ask_for_all_and_dawdle(number: u8, context: &Context) -> Mux {
    let (here, mut there) = tokio::io::duplex(16 << 10);
    let mux = start(here, member(number), context);
    for id in 0..(MAX_HELD_REPLY_BYTES / MEBIBYTE) as u64 {
        there.write_all(&Frame::Request(id, request(b"")).encode()).await.unwrap();
    }
    tokio::spawn(async move {
        let mut little = [0; 1024];
        while there.read(&mut little).await.is_ok_and(|read| read > 0) {
            let _ = there.write_all(&Frame::Pong(0).encode()).await;
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    });
    mux
}

/// Each of four members let 64 MiB of replies wait, which is all there is for replies, and
/// everybody else was refused for as long as they read a byte now and then.
#[tokio::test]
async fn members_that_read_slowly_do_not_keep_replies_from_others() {
    let context = generous(Keepalive::default());
    let mut slow = Vec::new();
    for number in 1..=4 {
        slow.push(ask_for_all_and_dawdle(number, &context).await);
    }
    let asked = 4 * MAX_HELD_REPLY_BYTES / MEBIBYTE;
    until("all are served", || context.counters.snapshot().calls_served as usize == asked).await;
    for number in 5..=30 {
        let (here, there) = tokio::io::duplex(MEBIBYTE);
        let _server = start(here, member(number), &context);
        let honest = start(there, member(0), &Context::default());
        let reply = honest.call(request(b""), LONG).await.expect("there is room");
        assert_eq!(reply.parts[0].len(), MEBIBYTE);
    }
    assert_eq!(slow.iter().filter(|mux| mux.is_open()).count(), 3, "one made room for all");
}

/// The share is the peer's: with four connections it had four shares.
#[tokio::test]
async fn a_second_connection_of_a_peer_brings_it_no_second_share() {
    let context = generous(Keepalive::default());
    let first = ask_for_all_and_dawdle(1, &context).await;
    let share = (MAX_HELD_REPLY_BYTES / MEBIBYTE) as u64;
    until("all are served", || context.counters.snapshot().calls_served == share).await;
    assert!(first.is_open());
    let second = ask_for_all_and_dawdle(1, &context).await;
    until("its first connection is closed", || !first.is_open()).await;
    assert!(second.is_open());
}

#[tokio::test]
async fn a_peer_that_reads_too_slowly_is_given_up_and_one_that_reads_is_not() {
    let keepalive = Keepalive {
        tick: Duration::from_millis(10),
        idle_ping: Duration::from_millis(500),
        dead_after: Duration::from_secs(2),
        least_bytes_per_sec: 64 << 10,
        ..Keepalive::default()
    };
    let context = generous(keepalive);
    let slow = ask_for_all_and_dawdle(1, &context).await;
    let (here, there) = tokio::io::duplex(64 << 10);
    let served = start(here, member(2), &context);
    let reader = start(there, member(0), &Context::default());
    let mut read = 0;
    while slow.is_open() {
        reader.call(request(b""), LONG).await.expect("it reads");
        read += 1;
        assert!(read < 100_000, "the slow one is never given up");
    }
    assert!(served.is_open());
}

/// Sends somewhat more than half of the longest frame, so that a buffer for all of it is
/// held, and then nothing.
async fn begin_a_frame(number: u8, context: &Context) -> (Mux, DuplexStream) {
    let (here, mut there) = tokio::io::duplex(MEBIBYTE);
    let mux = start(here, member(number), context);
    let frame = Frame::Request(1, bulk(MAX_MESSAGE_BYTES)).encode();
    // A connection that is closed for want of memory takes no more.
    let _ = there.write_all(&frame[..frame.len() / 2 + MEBIBYTE / 4]).await;
    (mux, there)
}

/// The buffers of unfinished frames were outside of every bound: 4 MiB on each of hundreds of
/// connections.
#[tokio::test]
async fn unfinished_frames_are_bounded_and_keep_nobody_from_sending() {
    let context = Context::default();
    *context.service.write().unwrap() = Some(Arc::new(Echo));
    let mut begun = Vec::new();
    let most = MAX_PARTIAL_BYTES / MAX_MESSAGE_BYTES;
    for number in 0..most + 8 {
        begun.push(begin_a_frame(number as u8 + 1, &context).await);
    }
    until("the excess is closed", || begun.iter().filter(|(mux, _)| mux.is_open()).count() <= most)
        .await;
    let (here, there) = tokio::io::duplex(MEBIBYTE);
    let _server = start(here, member(200), &context);
    let honest = start(there, member(0), &Context::default());
    let reply = honest.call(bulk(MAX_MESSAGE_BYTES), LONG).await.expect("there is room");
    assert_eq!(reply.parts[0].len(), MAX_MESSAGE_BYTES);
}

#[tokio::test]
async fn unfinished_frames_of_one_peer_are_bounded_over_all_its_connections() {
    let context = Context::default();
    let mut begun = Vec::new();
    let most = MAX_PEER_PARTIAL_BYTES / MAX_MESSAGE_BYTES;
    for _ in 0..most + 4 {
        begun.push(begin_a_frame(1, &context).await);
    }
    until("the excess is closed", || begun.iter().filter(|(mux, _)| mux.is_open()).count() <= most)
        .await;
    let (other, _stream) = begin_a_frame(2, &context).await;
    assert!(other.is_open(), "another's share");
}

/// Never answers the members with numbers up to 99, and echoes for the others.
struct SlowForSome(Never);

impl Service for SlowForSome {
    fn handle(&self, from: Peer, request: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        if from.id.0[0] < 100 { self.0.handle(from, request) } else { Echo.handle(from, request) }
    }
}

fn slow_for_some() -> Context {
    let context = Context::default();
    *context.service.write().unwrap() = Some(Arc::new(SlowForSome(Never::default())));
    context
}

/// Sends as many bytes of requests as one connection may have open, and waits until they are
/// served or refused.
async fn fill_a_window(number: u8, context: &Context) -> (Mux, DuplexStream) {
    let (here, mut there) = tokio::io::duplex(MEBIBYTE);
    let handled = || {
        let counters = context.counters.snapshot();
        counters.calls_served + counters.calls_overloaded
    };
    let (before, count) = (handled(), (REQUEST_WINDOW_BYTES / MAX_MESSAGE_BYTES) as u64);
    let mux = start(here, member(number), context);
    for id in 0..count {
        there.write_all(&Frame::Request(id, bulk(MAX_MESSAGE_BYTES)).encode()).await.unwrap();
    }
    until("all arrived", || handled() == before + count).await;
    (mux, there)
}

async fn echoes(number: u8, bytes: usize, context: &Context) -> bool {
    let (here, there) = tokio::io::duplex(MEBIBYTE);
    let _server = start(here, member(number), context);
    let caller = start(there, member(0), &Context::default());
    caller.call(bulk(bytes), LONG).await.is_ok()
}

/// One member with sixteen connections had all the bytes of requests that a node serves at a
/// time, as long as the service was slow, and everybody else was refused.
#[tokio::test]
async fn requests_of_one_peer_leave_room_for_those_of_others() {
    let context = slow_for_some();
    let mut open = Vec::new();
    for _ in 0..MAX_SERVING_BYTES / REQUEST_WINDOW_BYTES {
        open.push(fill_a_window(1, &context).await);
    }
    let left = open.iter().filter(|(mux, _)| mux.is_open()).count();
    assert!(left < open.len(), "its own connections make room for each other");
    let others = (MAX_SERVING_BYTES - MAX_PEER_SERVING_BYTES) / REQUEST_WINDOW_BYTES;
    let mut more = Vec::new();
    for number in 2..2 + others as u8 {
        more.push(fill_a_window(number, &context).await);
    }
    assert!(more.iter().all(|(mux, _)| mux.is_open()));
    assert_eq!(open.iter().filter(|(mux, _)| mux.is_open()).count(), left);
    assert!(echoes(100, MAX_MESSAGE_BYTES, &context).await);
}

#[tokio::test]
async fn members_that_have_all_requests_served_make_room_and_small_requests_need_none() {
    let context = slow_for_some();
    let mut open = Vec::new();
    for number in 0..(MAX_SERVING_BYTES / REQUEST_WINDOW_BYTES) as u8 {
        open.push(fill_a_window(number, &context).await);
    }
    assert_eq!(context.counters.snapshot().calls_overloaded, 0, "all the memory is used");
    let is_open = || open.iter().filter(|(mux, _)| mux.is_open()).count();
    assert!(echoes(100, UNCOUNTED_REQUEST_BYTES, &context).await);
    assert_eq!(is_open(), open.len(), "nobody had to go for a small request");
    assert!(echoes(100, MAX_MESSAGE_BYTES, &context).await);
    assert_eq!(is_open(), open.len() - 1, "one goes for a large one");
}
