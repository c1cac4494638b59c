//! The one task that owns a connection's byte stream.
//!
//! Each time it is woken it reads what has arrived, hands replies to their callers and
//! requests to tasks of their own, writes what is queued, and looks at its clocks. It
//! never waits for room or for a service, so a connection always makes progress while
//! the peer reads. Frames that became ready meanwhile leave in one write.

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context as Cx, Poll};

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::{Instant, Interval, MissedTickBehavior};

use super::budget::{Account, Held};
use super::outgoing::Outgoing;
use super::pace::Pace;
use super::reader::FrameReader;
use super::shared::{Serving, Shared};
use super::{Context, MAX_OPEN_CALLS, MAX_SERVED_BYTES, MuxError, UNCOUNTED_REQUEST_BYTES};
use crate::frame::{self, Frame, FrameError};
use crate::stats::{Counters, add, bump};
use crate::{Peer, Refusal, Reply, Request};

/// How many bytes of waiting frames are encoded at once. Small frames that come later
/// wait for these.
const BATCH_BYTES: usize = 128 << 10;

/// Why a connection is over.
enum End {
    Closed(String),
    Malformed(FrameError),
    Misbehaved(&'static str),
}

impl From<io::Error> for End {
    fn from(error: io::Error) -> End {
        End::Closed(format!("the connection broke: {error}"))
    }
}

pub(super) struct Driver<S> {
    io: S,
    peer: Peer,
    shared: Arc<Shared>,
    context: Context,
    reader: FrameReader,
    serving: Account,
    partial: Account,
    /// The memory of the frame that `reader` has not read to its end.
    partial_held: Option<Held>,
    outgoing: Outgoing,
    unflushed: bool,
    clocks: Clocks,
    peer_goes_away: bool,
    leaving: Leaving,
}

/// How far a connection that both sides let go has come to its end.
#[derive(PartialEq, Eq)]
enum Leaving {
    No,
    /// Nothing is left to be sent; the peer is being told.
    Closing,
    /// The peer was told. Its messages are read until it closes too: closing with bytes unread
    /// would reset the connection, and the peer would lose the bytes that it has not read.
    Closed,
}

struct Clocks {
    tick: Interval,
    /// Something arrived since the last tick.
    heard: bool,
    last_heard: Instant,
    /// Nothing waited to be written at some moment since the last tick.
    all_written: bool,
    writing: Pace,
    /// A call went either way since the last ping.
    used: bool,
    last_ping: Instant,
    /// The ping that is not answered yet.
    ping: Option<u64>,
    pings: u64,
    going_away_since: Option<Instant>,
    /// Since when a frame has begun and none has ended.
    partial_since: Option<Instant>,
    /// A frame ended since the last tick.
    frame_ended: bool,
    reading: Pace,
}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Driver<S> {
    pub(super) fn new(io: S, peer: Peer, shared: Arc<Shared>, context: Context) -> Driver<S> {
        let mut tick = tokio::time::interval(context.keepalive.tick);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let now = Instant::now();
        let clocks = Clocks {
            tick,
            heard: false,
            last_heard: now,
            all_written: true,
            writing: Pace::new(now),
            used: false,
            last_ping: now,
            ping: None,
            pings: 0,
            going_away_since: None,
            partial_since: None,
            frame_ended: false,
            reading: Pace::new(now),
        };
        let serving = context.budget.serving.open(peer.id, Arc::downgrade(&shared));
        let partial = context.budget.partial.open(peer.id, Arc::downgrade(&shared));
        bump(&context.counters.connections);
        Driver {
            io,
            peer,
            shared,
            context,
            reader: FrameReader::new(),
            serving,
            partial,
            partial_held: None,
            outgoing: Outgoing::default(),
            unflushed: false,
            clocks,
            peer_goes_away: false,
            leaving: Leaving::No,
        }
    }

    /// Drives the connection until it is over.
    pub(super) async fn run(mut self) {
        // The first ping measures the round trip.
        self.ping();
        let end = poll_fn(|cx| self.poll(cx)).await;
        let why = match end {
            End::Closed(why) => why,
            End::Malformed(error) => self.misbehaved(&error.to_string()),
            End::Misbehaved(what) => self.misbehaved(what),
        };
        self.shared.end(&why);
        // Says goodbye if that is possible at once; the peer notices either way.
        poll_fn(|cx| {
            let _ = Pin::new(&mut self.io).poll_shutdown(cx);
            Poll::Ready(())
        })
        .await;
    }

    fn misbehaved(&self, what: &str) -> String {
        if let Some(times) = self.context.counters.malformed(self.peer.id) {
            tracing::warn!(peer = %self.peer, times, "closing the connection: {what}");
        }
        format!("the peer broke the protocol: {what}")
    }

    fn poll(&mut self, cx: &mut Cx<'_>) -> Poll<End> {
        self.shared.driver.register(cx.waker());
        match self.poll_progress(cx) {
            Ok(()) => Poll::Pending,
            Err(end) => Poll::Ready(end),
        }
    }

    fn poll_progress(&mut self, cx: &mut Cx<'_>) -> Result<(), End> {
        while self.clocks.tick.poll_tick(cx).is_ready() {
            self.on_tick()?;
        }
        self.poll_read(cx)?;
        if self.leaving == Leaving::No {
            self.poll_write(cx)?;
        }
        if let Some(why) = self.shared.closed() {
            return Err(End::Closed(why));
        }
        if self.leaving == Leaving::No && self.is_over() {
            self.leaving = Leaving::Closing;
        }
        if self.leaving == Leaving::Closing && Pin::new(&mut self.io).poll_shutdown(cx)?.is_ready()
        {
            self.leaving = Leaving::Closed;
        }
        Ok(())
    }

    /// Whether both sides begin no more calls, and the open ones are over.
    fn is_over(&self) -> bool {
        if !self.peer_goes_away || !self.outgoing.is_empty() || self.unflushed {
            return false;
        }
        let state = self.shared.state();
        state.going_away && state.is_idle()
    }

    /// Reads until the stream has nothing more; tokio's budget for a task ends it at last.
    fn poll_read(&mut self, cx: &mut Cx<'_>) -> Result<(), End> {
        let mut read_bytes = 0;
        let result = loop {
            match self.reader.next_frame() {
                Ok(Some(frame)) => {
                    self.clocks.frame_ended = true;
                    match self.on_frame(frame) {
                        Ok(()) => continue,
                        Err(end) => break Err(end),
                    }
                }
                Ok(None) => {}
                Err(error) => break Err(End::Malformed(error)),
            }
            if !self.hold_partial() {
                break Err(End::Closed("no memory is left for what the peer sends".to_owned()));
            }
            match self.reader.poll_fill(&mut self.io, cx) {
                Poll::Pending => break Ok(()),
                Poll::Ready(Ok(0)) if self.reader.at_boundary() => {
                    break Err(End::Closed("the peer closed the connection".to_owned()));
                }
                Poll::Ready(Ok(0)) => break Err(End::Malformed(FrameError::Truncated)),
                Poll::Ready(Ok(bytes)) => read_bytes += bytes,
                Poll::Ready(Err(error)) => break Err(error.into()),
            }
        };
        if read_bytes > 0 {
            self.clocks.heard = true;
            self.clocks.reading.add(read_bytes);
            add(&self.context.counters.bytes_in, read_bytes);
        }
        result
    }

    /// Holds memory for the frame being read. False if there is none.
    fn hold_partial(&mut self) -> bool {
        let bytes = self.reader.partial_bytes();
        match &mut self.partial_held {
            Some(held) if bytes > 0 => held.resize(bytes),
            None if bytes > 0 => {
                self.partial_held = self.partial.hold(bytes);
                self.partial_held.is_some()
            }
            held => {
                *held = None;
                true
            }
        }
    }

    fn poll_write(&mut self, cx: &mut Cx<'_>) -> Result<(), End> {
        let mut written = 0;
        let result = self.poll_write_queued(cx, &mut written);
        if written > 0 {
            add(&self.context.counters.bytes_out, written);
        }
        self.clocks.writing.add(written);
        self.clocks.all_written |= result.is_ready();
        match result {
            Poll::Ready(Err(error)) => Err(error.into()),
            Poll::Ready(Ok(())) | Poll::Pending => Ok(()),
        }
    }

    fn poll_write_queued(&mut self, cx: &mut Cx<'_>, written: &mut usize) -> Poll<io::Result<()>> {
        loop {
            if self.outgoing.is_empty() {
                let Driver { shared, outgoing, clocks, .. } = self;
                shared.take_queued(BATCH_BYTES, |queued| {
                    clocks.used |= matches!(queued.frame, Frame::Request(..) | Frame::Reply(..));
                    outgoing.push(queued)
                });
                if self.outgoing.is_empty() {
                    break;
                }
            }
            self.unflushed = true;
            std::task::ready!(self.outgoing.poll_write(&mut self.io, cx, written))?;
        }
        if self.unflushed {
            std::task::ready!(Pin::new(&mut self.io).poll_flush(cx))?;
            self.unflushed = false;
        }
        Poll::Ready(Ok(()))
    }

    fn on_frame(&mut self, frame: Frame) -> Result<(), End> {
        match frame {
            Frame::Request(id, request) => {
                self.clocks.used = true;
                self.on_request(id, request)
            }
            Frame::Reply(id, reply) => {
                self.shared.answer(id, Ok(reply));
                Ok(())
            }
            Frame::Refusal(id, mut refusal) => {
                refusal.text = printable(&refusal.text);
                self.shared.answer(id, Err(MuxError::Refused(refusal)));
                Ok(())
            }
            Frame::Cancel(id) => {
                self.shared.cancelled(id);
                Ok(())
            }
            Frame::Ping(id) => self.queue_control(Frame::Pong(id)),
            Frame::Pong(id) => {
                if self.clocks.ping == Some(id) {
                    self.clocks.ping = None;
                    self.shared.measured(self.clocks.last_ping.elapsed());
                }
                Ok(())
            }
            Frame::GoAway => {
                self.peer_goes_away = true;
                self.shared.go_away();
                Ok(())
            }
        }
    }

    fn queue_control(&self, frame: Frame) -> Result<(), End> {
        if self.shared.queue_control(frame) {
            return Ok(());
        }
        Err(End::Misbehaved("it asks and does not read the answers"))
    }

    fn on_request(&mut self, id: u64, request: Request) -> Result<(), End> {
        let counters = &self.context.counters;
        let service = self.context.service.read().expect("no holder panics").clone();
        let bytes = frame::payload_bytes(&request.header, &request.parts);
        let Some(service) = service else {
            return self.refuse(id, "the node is still starting");
        };
        // Before this connection's state is locked: another connection may have to be closed.
        let is_counted = bytes > UNCOUNTED_REQUEST_BYTES;
        let held = is_counted.then(|| self.serving.hold(bytes)).flatten();
        let mut state = self.shared.state();
        if state.serving.contains_key(&id) {
            return Err(End::Misbehaved("two open calls have the same id"));
        }
        let excess = state.held_requests() >= MAX_OPEN_CALLS
            || state.serving_bytes + bytes > MAX_SERVED_BYTES
            || (is_counted && held.is_none());
        if excess {
            drop(state);
            bump(&counters.calls_overloaded);
            return self.refuse(id, "too many requests at once");
        }
        bump(&counters.calls_served);
        state.serving_bytes += bytes;
        let slot = ServeSlot {
            id,
            shared: self.shared.clone(),
            counters: counters.clone(),
            answered: false,
        };
        let peer = self.peer;
        // Spawned while the lock is held: the task cannot end before it is in the table.
        let task = tokio::spawn(async move {
            let result = service.handle(peer, request).await;
            slot.answer(result).await;
        });
        state.serving.insert(id, Serving { task: task.abort_handle(), bytes, _held: held });
        Ok(())
    }

    fn refuse(&self, id: u64, why: &str) -> Result<(), End> {
        self.queue_control(Frame::Refusal(id, Refusal::new(Refusal::OVERLOADED, why)))
    }

    fn ping(&mut self) {
        self.clocks.pings += 1;
        self.clocks.ping = Some(self.clocks.pings);
        self.clocks.last_ping = Instant::now();
        self.clocks.used = false;
        // One ping is open at a time, so it cannot be what makes too many wait.
        let _ = self.shared.queue_control(Frame::Ping(self.clocks.pings));
    }

    fn on_tick(&mut self) -> Result<(), End> {
        let now = Instant::now();
        let rules = self.context.keepalive;
        let clocks = &mut self.clocks;
        if std::mem::take(&mut clocks.heard) {
            clocks.last_heard = now;
        }
        let patience = rules.idle_ping + rules.dead_after;
        let is_slow = |pace: &mut Pace| pace.is_too_slow(now, patience, rules.least_bytes_per_sec);
        // A peer may talk and not read; what it asked for would be held for ever.
        if std::mem::take(&mut clocks.all_written) || (self.outgoing.is_empty() && !self.unflushed)
        {
            clocks.writing.restart(now);
        } else if is_slow(&mut clocks.writing) {
            return Err(End::Closed("the peer reads too slowly what is sent".to_owned()));
        }
        if std::mem::take(&mut clocks.frame_ended) || self.reader.at_boundary() {
            clocks.partial_since = None;
            clocks.reading.restart(now);
        } else if now - *clocks.partial_since.get_or_insert(now) >= rules.frame_limit
            || is_slow(&mut clocks.reading)
        {
            return Err(End::Misbehaved("a frame does not come to its end"));
        }
        if self.shared.state().going_away {
            let since = *clocks.going_away_since.get_or_insert(now);
            if now - since >= rules.drain_limit {
                return Err(End::Closed("the connection was let go".to_owned()));
            }
        }
        let silent_since = clocks.last_heard.max(clocks.last_ping);
        if clocks.ping.is_some() {
            if now - silent_since >= rules.dead_after {
                return Err(End::Closed("the peer does not answer pings".to_owned()));
            }
        } else if now - silent_since >= rules.idle_ping
            || (clocks.used && now - clocks.last_ping >= rules.measure_every)
        {
            self.ping();
        }
        Ok(())
    }
}

impl<S> Drop for Driver<S> {
    fn drop(&mut self) {
        // Reached without `run` having ended when the runtime stops or the task is aborted.
        self.shared.end("the connection was dropped");
        let connections = &self.context.counters.connections;
        connections.fetch_sub(1, std::sync::atomic::Ordering::Relaxed);
    }
}

/// A peer's text for people, which goes into logs and onto terminals: one line, and
/// nothing that steers.
fn printable(text: &str) -> String {
    let steers = |c: char| {
        c.is_control()
            || matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{2069}')
    };
    text.replace(steers, "?")
}

/// A request being served. Dropped unanswered it was cancelled, or its service panicked.
struct ServeSlot {
    id: u64,
    shared: Arc<Shared>,
    counters: Arc<Counters>,
    answered: bool,
}

impl ServeSlot {
    async fn answer(mut self, result: Result<Reply, Refusal>) {
        let result = result.and_then(|reply| {
            if frame::within_limits(&reply.header, &reply.parts) {
                return Ok(reply);
            }
            Err(Refusal::new(Refusal::INTERNAL, "the reply exceeds the limits of a message"))
        });
        if !self.shared.reply(self.id, result).await {
            bump(&self.counters.calls_overloaded);
        }
        self.answered = true;
    }
}

impl Drop for ServeSlot {
    fn drop(&mut self) {
        if !self.answered {
            // If it was cancelled, it is no longer in the table, and nothing is sent.
            let refusal =
                Frame::Refusal(self.id, Refusal::new(Refusal::INTERNAL, "the service failed"));
            self.shared.finish_request(refusal, self.id, None);
        }
    }
}
