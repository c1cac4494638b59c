//! The multiplexer over a pipe in memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use atoll_net::frame::{Frame, HEAD_BYTES};
use atoll_net::mux::{
    Context, Keepalive, MAX_HELD_REPLY_BYTES, MAX_OPEN_CALLS, Mux, MuxError, REPLY_QUEUE_BYTES,
    REQUEST_WINDOW_BYTES,
};
use atoll_net::{LOCAL_CALLER, MAX_MESSAGE_BYTES, MAX_PARTS, Refusal, Reply, Request, Service};
use bytes::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};

use crate::services::{By, Echo, LONG, Never, bulk, request, until};

fn serving(service: impl Service) -> Context {
    let context = Context::default();
    *context.service.write().unwrap() = Some(Arc::new(service));
    context
}

fn start(io: DuplexStream, context: Context) -> Mux {
    let (mux, driver) = Mux::new(io, LOCAL_CALLER, context);
    tokio::spawn(driver);
    mux
}

fn pair(ours: Context, theirs: Context) -> (Mux, Mux) {
    let (here, there) = tokio::io::duplex(64 << 10);
    (start(here, ours), start(there, theirs))
}

#[tokio::test]
async fn both_sides_call_over_one_connection() {
    let name = |name: &'static str| {
        serving(By(move |_, _| {
            Ok(Reply { header: Bytes::from_static(name.as_bytes()), parts: vec![] })
        }))
    };
    let (left, right) = pair(name("left"), name("right"));
    let (of_right, of_left) =
        tokio::join!(left.call(request(b""), LONG), right.call(request(b""), LONG));
    assert_eq!(of_right.unwrap().header, "right");
    assert_eq!(of_left.unwrap().header, "left");
}

#[tokio::test]
async fn the_largest_message_passes_and_a_larger_one_is_not_sent() {
    let (left, _right) = pair(Context::default(), serving(Echo));
    let largest = bulk(MAX_MESSAGE_BYTES);
    let reply = left.call(largest.clone(), LONG).await.unwrap();
    assert_eq!(reply.parts, largest.parts);
    assert_eq!(left.call(bulk(MAX_MESSAGE_BYTES + 1), LONG).await, Err(MuxError::TooLarge));
    let parts = vec![Bytes::new(); MAX_PARTS + 1];
    let many = Request { parts, ..Request::default() };
    assert_eq!(left.call(many, LONG).await, Err(MuxError::TooLarge));
}

#[tokio::test]
async fn a_reply_beyond_the_limits_becomes_a_refusal() {
    let huge =
        By(|_, _| Ok(Reply { header: Bytes::new(), parts: bulk(MAX_MESSAGE_BYTES + 1).parts }));
    let (left, _right) = pair(Context::default(), serving(huge));
    let Err(MuxError::Refused(refusal)) = left.call(request(b""), LONG).await else {
        panic!("the reply cannot be sent");
    };
    assert_eq!(refusal.code, Refusal::INTERNAL);
}

#[tokio::test]
async fn a_service_that_panics_is_a_refusal_at_once() {
    let (left, _right) = pair(Context::default(), serving(By(|_, _| panic!("on purpose"))));
    let Err(MuxError::Refused(refusal)) = left.call(request(b""), LONG).await else {
        panic!("a panic is no reply");
    };
    assert_eq!(refusal.code, Refusal::INTERNAL);
}

#[tokio::test]
async fn a_node_that_serves_nothing_yet_refuses() {
    let (left, _right) = pair(Context::default(), Context::default());
    let Err(MuxError::Refused(refusal)) = left.call(request(b""), LONG).await else {
        panic!("nobody serves");
    };
    assert_eq!(refusal.code, Refusal::OVERLOADED);
}

#[tokio::test]
async fn a_dropped_call_drops_the_serving_future() {
    let never = Never::default();
    let (left, _right) = pair(Context::default(), serving(never.clone()));
    {
        let call = left.call(request(b""), LONG);
        tokio::pin!(call);
        let begun = until("the request arrives", || never.begun.load(Ordering::SeqCst) == 1);
        tokio::select! { _ = &mut call => panic!("never answered"), () = begun => {} }
        assert_eq!(never.dropped.load(Ordering::SeqCst), 0);
    }
    until("the serving future is dropped", || never.dropped.load(Ordering::SeqCst) == 1).await;
    assert!(left.is_open());
    until("nothing is open", || left.is_idle()).await;
}

#[tokio::test]
async fn a_call_that_times_out_is_cancelled_too() {
    let never = Never::default();
    let (left, _right) = pair(Context::default(), serving(never.clone()));
    let result = left.call(request(b""), Duration::from_millis(500)).await;
    assert_eq!(result, Err(MuxError::TimedOut));
    until("the serving future is dropped", || never.dropped.load(Ordering::SeqCst) == 1).await;
}

#[tokio::test]
async fn excess_calls_wait_for_a_slot_and_are_not_refused() {
    let never = Never::default();
    let (left, _right) = pair(Context::default(), serving(never.clone()));
    let calls: Vec<_> = (0..2 * MAX_OPEN_CALLS)
        .map(|_| {
            let left = left.clone();
            tokio::spawn(async move { left.call(request(b""), Duration::from_millis(1500)).await })
        })
        .collect();
    until("the first are served", || never.begun.load(Ordering::SeqCst) == MAX_OPEN_CALLS).await;
    for call in calls {
        assert_eq!(call.await.unwrap(), Err(MuxError::TimedOut));
    }
    until("all that began are dropped", || {
        never.dropped.load(Ordering::SeqCst) == never.begun.load(Ordering::SeqCst)
    })
    .await;
}

/// Neither the requests sent to a peer that does not read its socket nor those its
/// service never finishes may pile up: callers wait, then time out.
#[tokio::test]
async fn a_peer_that_reads_nothing_makes_callers_wait_in_bounded_memory() {
    let (here, _unread) = tokio::io::duplex(1 << 10);
    let left = start(here, Context::default());
    let begun = Arc::new(AtomicUsize::new(0));
    let calls: Vec<_> = (0..64)
        .map(|_| {
            let (left, begun) = (left.clone(), begun.clone());
            tokio::spawn(async move {
                let call = left.call(bulk(1 << 20), Duration::from_millis(1500));
                begun.fetch_add(1, Ordering::SeqCst);
                call.await
            })
        })
        .collect();
    until("all have begun", || begun.load(Ordering::SeqCst) == 64).await;
    tokio::task::yield_now().await;
    let (bytes, frames) = left.queued();
    assert!(frames > 0, "nothing waits: the test does not test");
    assert!(bytes <= REQUEST_WINDOW_BYTES, "{bytes} bytes are queued");
    for call in calls {
        assert_eq!(call.await.unwrap(), Err(MuxError::TimedOut));
    }
    let (bytes, _) = left.queued();
    assert_eq!(bytes, 0, "what was given up is taken back");
}

#[tokio::test]
async fn replies_to_a_peer_that_does_not_read_them_are_bounded() {
    let big = By(|_, _| Ok(Reply { header: Bytes::new(), parts: bulk(1 << 20).parts }));
    let (here, mut there) = tokio::io::duplex(64 << 10);
    let right = start(here, serving(big));
    for id in 0..64 {
        there.write_all(&Frame::Request(id, request(b"")).encode()).await.unwrap();
    }
    until("replies are queued", || right.queued().1 == (REPLY_QUEUE_BYTES >> 20) - 1).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    let (bytes, _) = right.queued();
    assert!(bytes <= REPLY_QUEUE_BYTES, "{bytes} bytes are queued");
}

/// Only a few of many replies found room in the queue; the others waited outside it, as
/// large as they were, up to 512 of 4 MiB on each connection.
#[tokio::test]
async fn replies_that_wait_for_room_are_bounded_too() {
    let live = Arc::new(AtomicUsize::new(0));
    let count = live.clone();
    let big = By(move |_, _| Ok(Reply { header: Bytes::new(), parts: vec![counted(&count)] }));
    let (here, mut there) = tokio::io::duplex(64 << 10);
    let context = serving(big);
    let right = start(here, context.clone());
    for id in 0..MAX_OPEN_CALLS as u64 {
        there.write_all(&Frame::Request(id, request(b"")).encode()).await.unwrap();
    }
    let overloaded = || context.counters.snapshot().calls_overloaded as usize;
    let mebibyte = 1 << 20;
    until("all are served", || {
        overloaded() + live.load(Ordering::SeqCst) / mebibyte == MAX_OPEN_CALLS
    })
    .await;
    assert!(live.load(Ordering::SeqCst) <= MAX_HELD_REPLY_BYTES, "{live:?} bytes are held");
    assert!(overloaded() > 0);
    // When the connection is over, nothing is held any more.
    right.close("enough");
    until("all are dropped", || live.load(Ordering::SeqCst) == 0).await;
}

/// A mebibyte that is counted in `live` as long as it lives.
fn counted(live: &Arc<AtomicUsize>) -> Bytes {
    struct Counted(Vec<u8>, Arc<AtomicUsize>);
    impl AsRef<[u8]> for Counted {
        fn as_ref(&self) -> &[u8] {
            &self.0
        }
    }
    impl Drop for Counted {
        fn drop(&mut self) {
            self.1.fetch_sub(self.0.len(), Ordering::SeqCst);
        }
    }
    live.fetch_add(1 << 20, Ordering::SeqCst);
    Bytes::from_owner(Counted(vec![0; 1 << 20], live.clone()))
}

/// It sends something now and then, and so was never taken for dead, while its replies
/// filled this node's queues for ever.
#[tokio::test]
async fn a_peer_that_talks_and_never_reads_is_given_up() {
    let keepalive = Keepalive {
        tick: Duration::from_millis(10),
        idle_ping: Duration::from_millis(100),
        dead_after: Duration::from_millis(200),
        ..Keepalive::default()
    };
    let big = By(|_, _| Ok(Reply { header: Bytes::new(), parts: bulk(1 << 20).parts }));
    let (here, mut there) = tokio::io::duplex(64 << 10);
    let right = start(here, Context { keepalive, ..serving(big) });
    there.write_all(&Frame::Request(0, request(b"")).encode()).await.unwrap();
    let mut pongs = 0;
    while there.write_all(&Frame::Pong(99).encode()).await.is_ok() {
        pongs += 1;
        assert!(pongs < 3000, "it is never given up");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(!right.is_open());
}

#[tokio::test]
async fn a_peer_that_ignores_the_limits_is_refused_as_overloaded() {
    let (here, mut there) = tokio::io::duplex(1 << 20);
    let never = Never::default();
    let context = serving(never.clone());
    let _right = start(here, context.clone());
    for id in 0..MAX_OPEN_CALLS as u64 + 3 {
        there.write_all(&Frame::Request(id, request(b"")).encode()).await.unwrap();
    }
    until("the excess is refused", || context.counters.snapshot().calls_overloaded == 3).await;
    assert_eq!(never.begun.load(Ordering::SeqCst), MAX_OPEN_CALLS);
}

#[tokio::test]
async fn requests_whose_bytes_exceed_the_window_are_refused_as_overloaded() {
    let (here, mut there) = tokio::io::duplex(1 << 20);
    let never = Never::default();
    let context = serving(never.clone());
    let _right = start(here, context.clone());
    let count = REQUEST_WINDOW_BYTES / MAX_MESSAGE_BYTES + 1;
    for id in 0..count as u64 {
        let frame = Frame::Request(id, bulk(MAX_MESSAGE_BYTES)).encode();
        there.write_all(&frame).await.unwrap();
    }
    until("the last is refused", || context.counters.snapshot().calls_overloaded == 1).await;
    assert_eq!(never.begun.load(Ordering::SeqCst), count - 1);
}

#[tokio::test]
async fn a_peer_that_pings_and_never_reads_is_closed() {
    let (here, mut there) = tokio::io::duplex(1 << 10);
    let context = Context::default();
    let right = start(here, context.clone());
    let mut id = 0;
    while there.write_all(&Frame::Ping(id).encode()).await.is_ok() {
        id += 1;
        assert!(id < 1_000_000, "pongs pile up");
    }
    assert!(!right.is_open());
    assert_eq!(context.counters.snapshot().malformed_frames[&LOCAL_CALLER.id], 1);
}

/// A small call overtakes bulk requests that wait. The service finishes bulk requests
/// only after it has seen the small one, so it would wait for ever if it came last.
#[tokio::test]
async fn a_small_call_overtakes_queued_bulk() {
    let (here, mut there) = tokio::io::duplex(1 << 10);
    let left = start(here, Context::default());
    let bulky: Vec<_> = (0..8)
        .map(|_| {
            let left = left.clone();
            tokio::spawn(async move { left.call(bulk(1 << 20), LONG).await })
        })
        .collect();
    until("bulk waits", || left.queued().1 == 7).await;
    let small = tokio::spawn({
        let left = left.clone();
        async move { left.call(request(b"small"), LONG).await }
    });
    until("the small call waits", || left.queued().1 == 8).await;
    let mut order = Vec::new();
    let mut arrived = Vec::new();
    while order.len() < 3 {
        there.read_buf(&mut arrived).await.unwrap();
        while let Some(length) = arrived.first_chunk().map(|field| u32::from_be_bytes(*field)) {
            let whole = 4 + length as usize;
            if arrived.len() < whole.max(HEAD_BYTES) {
                break;
            }
            let rest = arrived.split_off(whole);
            let frame = Bytes::from(std::mem::replace(&mut arrived, rest));
            match atoll_net::frame::decode(frame).unwrap() {
                Frame::Request(_, request) => order.push(request.header.len()),
                frame => assert!(matches!(frame, Frame::Ping(_))),
            }
        }
    }
    assert_eq!(order, [0, 5, 0], "one bulk frame had begun; the small one comes next");
    small.abort();
    bulky.into_iter().for_each(|call| call.abort());
}

#[tokio::test]
async fn a_malformed_frame_closes_the_connection_and_fails_its_calls() {
    let (here, mut there) = tokio::io::duplex(1 << 10);
    let context = Context::default();
    let left = start(here, context.clone());
    let call = tokio::spawn({
        let left = left.clone();
        async move { left.call(request(b""), LONG).await }
    });
    // The ping and the request have arrived.
    there.read_exact(&mut [0; 2 * HEAD_BYTES]).await.unwrap();
    there.write_all(&[0xff; HEAD_BYTES]).await.unwrap();
    assert!(matches!(call.await.unwrap(), Err(MuxError::Broken(_))));
    assert!(!left.is_open());
    assert_eq!(context.counters.snapshot().malformed_frames[&LOCAL_CALLER.id], 1);
    assert!(matches!(left.call(request(b""), LONG).await, Err(MuxError::NotSent(_))));
}

#[tokio::test]
async fn an_end_within_a_frame_is_malformed_and_one_between_frames_is_not() {
    let whole = Frame::Request(1, request(b"a header")).encode();
    for (cut, malformed) in [(whole.len(), 0), (whole.len() - 1, 1)] {
        let (here, mut there) = tokio::io::duplex(1 << 10);
        let context = serving(Echo);
        let left = start(here, context.clone());
        there.write_all(&whole[..cut]).await.unwrap();
        there.shutdown().await.unwrap();
        until("the connection is closed", || !left.is_open()).await;
        assert_eq!(context.counters.snapshot().malformed_frames.len(), malformed);
    }
}

#[tokio::test]
async fn two_open_calls_with_one_id_are_a_breach() {
    let (here, mut there) = tokio::io::duplex(1 << 10);
    let context = serving(Never::default());
    let right = start(here, context.clone());
    for _ in 0..2 {
        there.write_all(&Frame::Request(7, request(b"")).encode()).await.unwrap();
    }
    until("the connection is closed", || !right.is_open()).await;
    assert_eq!(context.counters.snapshot().malformed_frames[&LOCAL_CALLER.id], 1);
}

/// The text of a refusal goes into logs and onto terminals.
#[tokio::test]
async fn a_refusal_cannot_forge_a_line_of_the_log() {
    let (here, mut there) = tokio::io::duplex(1 << 10);
    let left = start(here, Context::default());
    let (answer, ()) = tokio::join!(left.call(request(b""), LONG), async {
        tokio::task::yield_now().await;
        let hostile = Refusal::new(100, "no\n2026 WARN forged\x1b[2J\r \u{9b}31m\u{202e}\u{e9}");
        there.write_all(&Frame::Refusal(0, hostile).encode()).await.unwrap();
    });
    let Err(MuxError::Refused(refusal)) = answer else { panic!("it was refused") };
    assert_eq!(refusal.text, "no?2026 WARN forged?[2J? ?31m?\u{e9}");
}

#[tokio::test]
async fn answers_to_nobody_are_ignored() {
    let (here, mut there) = tokio::io::duplex(1 << 10);
    let left = start(here, serving(Echo));
    for frame in [Frame::Reply(9, Reply::default()), Frame::Cancel(3), Frame::Pong(77)] {
        there.write_all(&frame.encode()).await.unwrap();
    }
    there.write_all(&Frame::Ping(5).encode()).await.unwrap();
    // Its own first ping, then the pong.
    let mut answer = [0; 2 * HEAD_BYTES];
    there.read_exact(&mut answer).await.unwrap();
    let pong = Bytes::copy_from_slice(&answer[HEAD_BYTES..]);
    assert_eq!(atoll_net::frame::decode(pong), Ok(Frame::Pong(5)));
    assert!(left.is_open());
}

#[tokio::test]
async fn going_away_lets_open_calls_finish_and_then_closes_both_ends() {
    let (release, wait) = tokio::sync::watch::channel(false);
    struct Held(tokio::sync::watch::Receiver<bool>);
    impl Service for Held {
        fn handle(
            &self,
            _from: atoll_net::Peer,
            _request: Request,
        ) -> atoll_env::BoxFuture<'static, Result<Reply, Refusal>> {
            let mut wait = self.0.clone();
            Box::pin(async move {
                let _ = wait.wait_for(|released| *released).await;
                Ok(Reply::default())
            })
        }
    }
    let context = serving(Held(wait));
    let (left, right) = pair(Context::default(), context.clone());
    let call = tokio::spawn({
        let left = left.clone();
        async move { left.call(request(b""), LONG).await }
    });
    until("the call is served", || context.counters.snapshot().calls_served == 1).await;
    right.go_away();
    until("the other end knows", || !left.is_open()).await;
    assert!(matches!(left.call(request(b""), LONG).await, Err(MuxError::NotSent(_))));
    assert!(!call.is_finished());
    release.send(true).unwrap();
    assert_eq!(call.await.unwrap(), Ok(Reply::default()));
    until("the connection is over", || context.counters.snapshot().connections == 0).await;
}

/// The frames that a mux sends to the other end of a pipe, until it closes.
async fn frames_sent(stream: &mut DuplexStream) -> Vec<Frame> {
    let mut arrived = Vec::new();
    stream.read_to_end(&mut arrived).await.unwrap();
    let mut frames = Vec::new();
    while let Some(length) = arrived.first_chunk().map(|field| u32::from_be_bytes(*field)) {
        let rest = arrived.split_off(4 + length as usize);
        let frame = Bytes::from(std::mem::replace(&mut arrived, rest));
        frames.push(atoll_net::frame::decode(frame).unwrap());
    }
    frames
}

/// Two nodes dialled each other at once, and let one of the connections go while requests
/// waited on it. The farewell overtook them: the other side closed, and the calls were lost.
#[tokio::test]
async fn a_connection_says_goodbye_after_the_requests_that_wait() {
    let (here, mut there) = tokio::io::duplex(1 << 10);
    let left = start(here, Context::default());
    let calls: Vec<_> = (0..3)
        .map(|_| {
            let left = left.clone();
            tokio::spawn(async move { left.call(bulk(200_000), LONG).await })
        })
        .collect();
    until("they wait", || left.queued().1 == 2).await;
    left.go_away();
    there.write_all(&Frame::GoAway.encode()).await.unwrap();
    for id in 0..3 {
        there.write_all(&Frame::Reply(id, Reply::default()).encode()).await.unwrap();
    }
    let sent = frames_sent(&mut there).await;
    let requests = |frames: &[Frame]| {
        frames.iter().filter(|frame| matches!(frame, Frame::Request(..))).count()
    };
    let goodbye = sent.iter().position(|frame| *frame == Frame::GoAway).expect("it is sent");
    assert_eq!((requests(&sent[..goodbye]), requests(&sent)), (3, 3));
    for call in calls {
        assert_eq!(call.await.unwrap(), Ok(Reply::default()));
    }
}

/// A connection was closed with bytes of the peer's unread, such as the answer to a ping: TCP
/// then resets it, and throws away replies on their way to the peer.
#[tokio::test]
async fn a_connection_that_was_let_go_is_read_until_the_peer_closes_too() {
    let (here, mut there) = tokio::io::duplex(1 << 10);
    let context = serving(Echo);
    let left = start(here, context.clone());
    left.go_away();
    there.write_all(&Frame::GoAway.encode()).await.unwrap();
    let sent = frames_sent(&mut there).await;
    assert_eq!(sent.last(), Some(&Frame::GoAway), "and then it closes");
    for id in 0..1000 {
        there.write_all(&Frame::Pong(id).encode()).await.expect("it is read");
    }
    assert_eq!(context.counters.snapshot().connections, 1);
    drop(there);
    until("it is over", || context.counters.snapshot().connections == 0).await;
}

#[tokio::test]
async fn a_peer_that_falls_silent_is_given_up() {
    let keepalive = Keepalive {
        tick: Duration::from_millis(10),
        idle_ping: Duration::from_millis(30),
        dead_after: Duration::from_millis(60),
        ..Keepalive::default()
    };
    let (here, _silent) = tokio::io::duplex(1 << 10);
    let left = start(here, Context { keepalive, ..Context::default() });
    let Err(MuxError::Broken(why)) = left.call(request(b""), LONG).await else {
        panic!("nobody answers");
    };
    assert_eq!(why, "the peer does not answer pings");
}

#[tokio::test]
async fn an_idle_connection_is_kept_by_pings() {
    let keepalive = Keepalive {
        tick: Duration::from_millis(5),
        idle_ping: Duration::from_millis(10),
        dead_after: Duration::from_secs(20),
        ..Keepalive::default()
    };
    let context = Context { keepalive, ..Context::default() };
    let (left, right) = pair(context.clone(), Context::default());
    let pings_bytes = 20 * HEAD_BYTES as u64;
    until("many pings", || context.counters.snapshot().bytes_out > pings_bytes).await;
    assert!(left.is_open() && right.is_open());
    assert!(left.round_trip().is_some());
}

/// A member could hold a buffer of 4 MiB on each of its connections for ever, a byte now
/// and then, and be taken for alive all the time.
#[tokio::test]
async fn a_peer_that_dribbles_a_frame_is_cut_off_and_one_that_sends_many_is_not() {
    let keepalive = Keepalive {
        tick: Duration::from_millis(5),
        frame_limit: Duration::from_secs(1),
        ..Keepalive::default()
    };
    let (here, mut there) = tokio::io::duplex(1 << 20);
    let context = Context { keepalive, ..Context::default() };
    let left = start(here, context.clone());
    let large = Request { parts: vec![Bytes::from(vec![1; 100_000])], ..Request::default() };
    let frame = Frame::Request(1, large).encode();
    // Whole frames, each in two pieces, for longer than the limit.
    for number in 0..16u64 {
        let ping = Frame::Ping(number).encode();
        there.write_all(&ping[..10]).await.unwrap();
        tokio::time::sleep(Duration::from_millis(80)).await;
        there.write_all(&ping[10..]).await.unwrap();
    }
    assert!(left.is_open());
    let mut pieces = frame.chunks(10);
    let dribble = async {
        while left.is_open() {
            there.write_all(pieces.next().expect("it is cut off before")).await.ok();
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(LONG, dribble).await.expect("it is cut off");
    assert_eq!(context.counters.snapshot().malformed_frames.values().sum::<u64>(), 1);
}
