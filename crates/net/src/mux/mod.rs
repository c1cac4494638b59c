//! Many calls at once over one connection, whatever carries it.
//!
//! Both sides may call and serve. One task ([`driver`]) owns the byte stream, reads and
//! writes it and never waits for anything else; each request is served by a task of its
//! own. Messages of callers and servers wait in [`Shared`].
//!
//! Bounds of memory, which push back end to end:
//! - a caller waits for one of [`MAX_OPEN_CALLS`] slots, and with a bulk request also
//!   for space in the window of [`REQUEST_WINDOW_BYTES`], and holds both until its call
//!   is over. A peer that does not read makes callers wait until their deadlines;
//! - a served bulk reply waits for space in [`REPLY_QUEUE_BYTES`] before it is queued. It
//!   takes memory while it waits: its peer has a share of [`MAX_HELD_REPLY_BYTES`] of what
//!   the [`Budget`] holds for all. Where that is used up the reply becomes a refusal, or the
//!   connection of a peer that holds much more is closed. A peer that reads more slowly than
//!   [`Keepalive::least_bytes_per_sec`] while something waits for it is given up;
//! - the buffers of unfinished frames are counted and bounded in the same way, and an
//!   unfinished frame must arrive at that speed too;
//! - more requests than that, in number or bytes, come only from a peer that breaks these rules and
//!   are refused as overloaded. Those being served are counted as replies are, but for those of a
//!   few hundred bytes: a peer has a share of [`MAX_PEER_SERVING_BYTES`] of what the [`Budget`]
//!   holds for all. The socket is read all the same: pausing it would hold up replies to our own
//!   calls, and two nodes that call each other could block.
//!
//! Small frames overtake bulk frames that wait; a bulk frame that has begun is finished
//! first. This module does not know which peers may connect, nor what messages mean.

mod budget;
mod driver;
mod outgoing;
mod pace;
mod reader;
mod shared;

use std::future::Future;
use std::sync::{Arc, RwLock};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};

use crate::stats::Counters;
use crate::{CallError, Peer, Refusal, Reply, Request, Service, frame};
pub use budget::Budget;
use driver::Driver;
use shared::{CallGuard, Shared};

/// The most calls open at once from one side of a connection.
pub const MAX_OPEN_CALLS: usize = 512;
/// The most bytes of bulk requests open at once from one side of a connection: a
/// window that keeps 160 MB/s at 100 ms.
pub const REQUEST_WINDOW_BYTES: usize = 16 << 20;
/// The most bytes of bulk replies queued on one connection.
pub const REPLY_QUEUE_BYTES: usize = 8 << 20;
/// The most bytes of bulk replies held for one peer, those that wait for room in the queue
/// included: 512 open calls for blocks of 128 KiB. A guess.
pub const MAX_HELD_REPLY_BYTES: usize = 64 << 20;
/// Messages up to this size travel ahead of larger ones. A lookup step fits, a block
/// does not.
pub const SMALL_BYTES: usize = 4 << 10;
/// What a peer that keeps the rules may have open on a connection, in bytes: its window of
/// bulk requests, and small ones beside it.
pub const MAX_SERVED_BYTES: usize = REQUEST_WINDOW_BYTES + MAX_OPEN_CALLS * SMALL_BYTES;
/// The most bytes of requests being served of one peer: what it may have open on each of the
/// four connections that it may have for a while.
pub const MAX_PEER_SERVING_BYTES: usize = 4 * MAX_SERVED_BYTES;
/// The most bytes of requests being served on all connections together. A guess.
pub const MAX_SERVING_BYTES: usize = 256 << 20;
/// Requests up to this size are served whatever else is: steps of lookups pass although bulk
/// requests have used the memory up. The number of open calls bounds them, to 256 KiB a
/// connection.
pub const UNCOUNTED_REQUEST_BYTES: usize = 512;
/// The most bytes of bulk replies held on all connections together.
const MAX_REPLIES_BYTES: usize = 256 << 20;
/// The most bytes of unfinished frames of one peer: one of the longest on each of the four
/// connections that a peer may have for a while.
pub const MAX_PEER_PARTIAL_BYTES: usize = 16 << 20;
/// The most bytes of unfinished frames on all connections together. A guess.
pub const MAX_PARTIAL_BYTES: usize = 256 << 20;

/// How a connection watches over itself. The defaults are guesses in the range of what
/// others do; tests shorten them.
#[derive(Clone, Copy, Debug)]
pub struct Keepalive {
    /// How often the connection looks at its clocks.
    pub tick: Duration,
    /// A connection that is in use measures its round trip this often.
    pub measure_every: Duration,
    /// A connection on which nothing arrived for this long is pinged.
    pub idle_ping: Duration,
    /// One on which nothing arrived for this long after a ping is closed.
    pub dead_after: Duration,
    /// One on which a frame has begun and not ended for this long is closed: 4 MiB at
    /// 35 kB/s. A peer that dribbles would hold a buffer for ever.
    pub frame_limit: Duration,
    /// One whose peer takes less than this of what waits for it, or sends less than this of
    /// a frame that has begun, for as long as a silent one is kept, is closed.
    pub least_bytes_per_sec: u64,
    /// One that was asked to go away is closed after this long, whatever is open.
    pub drain_limit: Duration,
}

impl Default for Keepalive {
    fn default() -> Keepalive {
        Keepalive {
            tick: Duration::from_secs(5),
            measure_every: Duration::from_secs(15),
            idle_ping: Duration::from_secs(60),
            dead_after: Duration::from_secs(20),
            frame_limit: Duration::from_secs(120),
            // An ISDN line.
            least_bytes_per_sec: 8 << 10,
            drain_limit: Duration::from_secs(30),
        }
    }
}

/// What all connections of one transport share.
#[derive(Clone, Default)]
pub struct Context {
    /// The service that answers; requests are refused while there is none.
    pub service: Arc<RwLock<Option<Arc<dyn Service>>>>,
    /// What is counted.
    pub counters: Arc<Counters>,
    /// What is held for peers.
    pub budget: Arc<Budget>,
    /// How connections watch over themselves.
    pub keepalive: Keepalive,
}

/// Why a call brought no reply.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum MuxError {
    /// The connection is closed and not one byte of the request was sent: it may be
    /// tried on another one.
    #[error("{0}")]
    NotSent(String),
    /// The connection broke when the request was, perhaps only in part, sent.
    #[error("{0}")]
    Broken(String),
    /// The deadline passed.
    #[error("no answer in time")]
    TimedOut,
    /// The peer refused.
    #[error("refused: {0}")]
    Refused(Refusal),
    /// The request exceeds the limits.
    #[error("the message exceeds the limits")]
    TooLarge,
}

impl From<MuxError> for CallError {
    fn from(error: MuxError) -> CallError {
        match error {
            MuxError::NotSent(why) | MuxError::Broken(why) => CallError::Unreachable(why),
            MuxError::TimedOut => CallError::TimedOut,
            MuxError::Refused(refusal) => CallError::Refused(refusal),
            MuxError::TooLarge => CallError::TooLarge,
        }
    }
}

/// A handle to one connection. The connection lives until it is closed or breaks, not
/// as long as its handles.
#[derive(Clone)]
pub struct Mux {
    shared: Arc<Shared>,
}

impl Mux {
    /// A connection over `io` with `peer`, and the future that drives it: to be spawned;
    /// it ends when the connection does.
    pub fn new<S>(io: S, peer: Peer, context: Context) -> (Mux, impl Future<Output = ()> + Send)
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let replies = &context.budget.replies;
        let shared = Arc::new_cyclic(|shared| Shared::new(replies.open(peer.id, shared.clone())));
        let mux = Mux { shared: shared.clone() };
        (mux, Driver::new(io, peer, shared, context).run())
    }

    /// Sends `request` and waits for its reply, at most until `limit` has passed.
    /// Dropping the future gives the call up, and sends a cancel if the request was sent.
    pub async fn call(&self, request: Request, limit: Duration) -> Result<Reply, MuxError> {
        match tokio::time::timeout(limit, self.call_unlimited(request)).await {
            Ok(result) => result,
            Err(_) => Err(MuxError::TimedOut),
        }
    }

    async fn call_unlimited(&self, request: Request) -> Result<Reply, MuxError> {
        if !frame::within_limits(&request.header, &request.parts) {
            return Err(MuxError::TooLarge);
        }
        let shared = &self.shared;
        let _slot = shared.open_calls.acquire().await.map_err(|_| shared.not_sent())?;
        let bytes = frame::payload_bytes(&request.header, &request.parts);
        let _window = if bytes > SMALL_BYTES {
            let wanted = shared.request_window.acquire_many(bytes as u32);
            Some(wanted.await.map_err(|_| shared.not_sent())?)
        } else {
            None
        };
        // Declared after the permits, so that a cancel is queued before a successor.
        let (mut call, reply) = CallGuard::begin(shared, request)?;
        let result = reply.await.expect("a pending call is answered when it is removed");
        call.over();
        result
    }

    /// Whether calls may begin on it.
    pub fn is_open(&self) -> bool {
        self.shared.is_open()
    }

    /// Whether it is over, or about to be: not merely being let go.
    pub(crate) fn is_closed(&self) -> bool {
        self.shared.closed().is_some()
    }

    /// Whether no call is open on it in either direction.
    pub fn is_idle(&self) -> bool {
        self.shared.is_idle()
    }

    /// Smoothed round-trip time, once a ping has been answered.
    pub fn round_trip(&self) -> Option<Duration> {
        self.shared.round_trip()
    }

    /// Closes it: pending calls fail, requests being served are dropped.
    pub fn close(&self, why: &str) {
        self.shared.close(why);
    }

    /// Begins no more calls here, asks the peer to do the same, and closes the
    /// connection when the open ones are over.
    pub fn go_away(&self) {
        self.shared.go_away();
    }

    /// Bytes and frames waiting to be sent: for tests of back-pressure.
    pub fn queued(&self) -> (usize, usize) {
        self.shared.queued()
    }
}
