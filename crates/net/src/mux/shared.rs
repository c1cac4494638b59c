//! What a connection's callers, its serving tasks and its driver share.
//!
//! One mutex guards the queues and tables; nothing waits or calls out while holding it.
//! The life of a call: [`CallGuard::begin`] puts it into `pending` and its request into a
//! queue; the driver takes the frame (from then on it counts as sent); a reply, a refusal
//! or the end of the connection removes it from `pending` and answers it; a guard dropped
//! before that removes it and takes back the request, or queues a cancel. The life of a
//! served request: `serving` until it is answered or cancelled, then its reply is counted
//! in `answers` until it is written.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use futures_util::task::AtomicWaker;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::task::AbortHandle;

use super::budget::{Account, Closable, Held};
use super::{MAX_OPEN_CALLS, MuxError, REPLY_QUEUE_BYTES, REQUEST_WINDOW_BYTES, SMALL_BYTES};
use crate::frame::Frame;
use crate::{Refusal, Reply, Request};

type Answer = Result<Reply, MuxError>;

/// More small frames than this wait only when the peer asks and does not read what it
/// asked for: calls and replies are bounded by [`MAX_OPEN_CALLS`], pongs and refusals of
/// excess are not.
const MAX_URGENT_FRAMES: usize = 8 * MAX_OPEN_CALLS;

/// A frame that waits to be written.
pub(super) struct Queued {
    pub frame: Frame,
    /// Held until it is written, if it is a bulk reply.
    pub permit: Option<SendPermit>,
    /// Whether it is counted in `State::answers`.
    answers: bool,
}

/// A bulk reply's part of the reply queue and of the memory for replies, until it is written.
pub(super) struct SendPermit {
    _queue: OwnedSemaphorePermit,
    _held: Held,
}

struct Pending {
    answer: oneshot::Sender<Answer>,
    sent: bool,
}

/// A request being served.
pub(super) struct Serving {
    pub task: AbortHandle,
    pub bytes: usize,
    /// Its memory, if it is counted.
    pub _held: Option<Held>,
}

#[derive(Default)]
pub(super) struct State {
    /// Small frames, and all that control the connection.
    urgent: VecDeque<Queued>,
    bulk: VecDeque<Queued>,
    pending: BTreeMap<u64, Pending>,
    next_id: u64,
    pub serving: BTreeMap<u64, Serving>,
    pub serving_bytes: usize,
    /// Replies queued and not yet written.
    answers: usize,
    /// Why it is closed, once it is.
    closed: Option<String>,
    /// We said that we begin no more calls.
    pub going_away: bool,
}

impl State {
    fn queue(&mut self, frame: Frame) {
        self.push(Queued { frame, permit: None, answers: false });
    }

    fn push(&mut self, queued: Queued) {
        let small = queued.frame.payload_bytes() <= SMALL_BYTES;
        let queue = if small { &mut self.urgent } else { &mut self.bulk };
        queue.push_back(queued);
    }

    /// Takes a waiting frame back, if there is one.
    fn unqueue(&mut self, is_it: impl Fn(&Queued) -> bool) -> Option<Queued> {
        for queue in [&mut self.urgent, &mut self.bulk] {
            if let Some(at) = queue.iter().position(&is_it) {
                return queue.remove(at);
            }
        }
        None
    }

    fn on_taken(&mut self, queued: &Queued) {
        if queued.answers {
            self.answers -= 1;
        }
        if let Frame::Request(id, _) = &queued.frame
            && let Some(pending) = self.pending.get_mut(id)
        {
            pending.sent = true;
        }
    }

    /// Whether nothing is open in either direction and nothing waits to be written.
    pub(super) fn is_idle(&self) -> bool {
        self.pending.is_empty()
            && self.held_requests() == 0
            && self.urgent.is_empty()
            && self.bulk.is_empty()
    }

    /// How many requests hold memory here: being served, or answered and not written.
    pub(super) fn held_requests(&self) -> usize {
        self.serving.len() + self.answers
    }
}

/// What a connection's callers, its serving tasks and its driver share.
pub(super) struct Shared {
    state: Mutex<State>,
    /// Wakes the driver.
    pub driver: AtomicWaker,
    pub open_calls: Semaphore,
    pub request_window: Semaphore,
    reply_queue: Arc<Semaphore>,
    held_replies: Account,
    /// Smoothed round trip in nanoseconds; 0 when not measured.
    round_trip_ns: AtomicU64,
}

impl Closable for Shared {
    fn close(&self, why: &str) {
        Shared::close(self, why);
    }
}

impl Shared {
    pub(super) fn new(held_replies: Account) -> Shared {
        Shared {
            state: Mutex::default(),
            driver: AtomicWaker::new(),
            open_calls: Semaphore::new(MAX_OPEN_CALLS),
            request_window: Semaphore::new(REQUEST_WINDOW_BYTES),
            reply_queue: Arc::new(Semaphore::new(REPLY_QUEUE_BYTES)),
            held_replies,
            round_trip_ns: AtomicU64::new(0),
        }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("nothing panics while holding it")
    }

    pub(super) fn not_sent(&self) -> MuxError {
        let why = self.state().closed.clone();
        MuxError::NotSent(why.unwrap_or_else(|| "the connection is going away".to_owned()))
    }

    pub(super) fn is_open(&self) -> bool {
        let state = self.state();
        state.closed.is_none() && !state.going_away
    }

    pub(super) fn is_idle(&self) -> bool {
        self.state().is_idle()
    }

    pub(super) fn queued(&self) -> (usize, usize) {
        let state = self.state();
        let queued = state.urgent.iter().chain(&state.bulk);
        let bytes = queued.map(|queued| queued.frame.payload_bytes()).sum();
        (bytes, state.urgent.len() + state.bulk.len())
    }

    pub(super) fn round_trip(&self) -> Option<Duration> {
        match self.round_trip_ns.load(Ordering::Relaxed) {
            0 => None,
            nanos => Some(Duration::from_nanos(nanos)),
        }
    }

    /// Takes a sample in, smoothed as TCP does (RFC 6298: 1/8 of the new one).
    pub(super) fn measured(&self, sample: Duration) {
        let sample = u64::try_from(sample.as_nanos()).unwrap_or(u64::MAX / 8).max(1);
        let smoothed = match self.round_trip_ns.load(Ordering::Relaxed) {
            0 => sample,
            old => old - old / 8 + sample / 8,
        };
        self.round_trip_ns.store(smoothed.max(1), Ordering::Relaxed);
    }

    /// Closes the connection; the first reason stays.
    pub(super) fn close(&self, why: &str) {
        self.state().closed.get_or_insert_with(|| why.to_owned());
        self.driver.wake();
    }

    pub(super) fn closed(&self) -> Option<String> {
        self.state().closed.clone()
    }

    pub(super) fn go_away(&self) {
        let mut state = self.state();
        if !state.going_away {
            state.going_away = true;
            // Behind every request that waits, bulk ones too: once the peer has read it, and
            // answered what came before, it may close.
            state.bulk.push_back(Queued { frame: Frame::GoAway, permit: None, answers: false });
        }
        drop(state);
        self.driver.wake();
    }

    /// Queues a frame that needs no permit: pings, pongs, refusals of excess. False when
    /// the peer lets too many wait.
    #[must_use]
    pub(super) fn queue_control(&self, frame: Frame) -> bool {
        let mut state = self.state();
        state.queue(frame);
        state.urgent.len() <= MAX_URGENT_FRAMES
    }

    /// The next frames to write: all small ones while they are below `limit_bytes`, then
    /// at least one bulk frame and more while below it.
    pub(super) fn take_queued(&self, limit_bytes: usize, mut take: impl FnMut(Queued) -> usize) {
        let mut state = self.state();
        let mut taken_bytes = 0;
        while taken_bytes < limit_bytes
            && let Some(queued) = state.urgent.pop_front()
        {
            state.on_taken(&queued);
            taken_bytes += take(queued);
        }
        let mut first = true;
        while (first || taken_bytes < limit_bytes)
            && let Some(queued) = state.bulk.pop_front()
        {
            first = false;
            state.on_taken(&queued);
            taken_bytes += take(queued);
        }
    }

    /// Answers a pending call; one that was given up is ignored.
    pub(super) fn answer(&self, id: u64, answer: Answer) {
        let pending = self.state().pending.remove(&id);
        if let Some(pending) = pending {
            // The caller may be just giving up.
            let _ = pending.answer.send(answer);
        }
    }

    /// Drops the request being served under `id`, or its reply if that still waits.
    pub(super) fn cancelled(&self, id: u64) {
        let mut state = self.state();
        if let Some(serving) = state.serving.remove(&id) {
            state.serving_bytes -= serving.bytes;
            drop(state);
            serving.task.abort();
        } else if let Some(reply) = state.unqueue(|queued| {
            queued.answers
                && matches!(queued.frame, Frame::Reply(of, _) | Frame::Refusal(of, _) if of == id)
        }) {
            state.answers -= 1;
            drop(state);
            drop(reply);
        }
    }

    /// Queues the answer to a request; a bulk reply first waits for space in the queue. It is dropped if
    /// the caller gave up meanwhile. False if it had to become a refusal, because too many
    /// replies wait already.
    pub(super) async fn reply(&self, id: u64, result: Result<Reply, Refusal>) -> bool {
        let frame = match result {
            Ok(reply) => Frame::Reply(id, reply),
            Err(refusal) => Frame::Refusal(id, refusal),
        };
        let bytes = frame.payload_bytes();
        if bytes <= SMALL_BYTES {
            self.finish_request(frame, id, None);
            return true;
        }
        let Some(held) = self.held_replies.hold(bytes) else {
            drop(frame);
            let refusal = Refusal::new(Refusal::OVERLOADED, "too many replies are not read yet");
            self.finish_request(Frame::Refusal(id, refusal), id, None);
            return false;
        };
        if let Ok(queue) = self.reply_queue.clone().acquire_many_owned(bytes as u32).await {
            let permit = SendPermit { _queue: queue, _held: held };
            self.finish_request(frame, id, Some(permit));
        }
        true
    }

    /// Moves a request from being served to being answered.
    pub(super) fn finish_request(&self, frame: Frame, id: u64, permit: Option<SendPermit>) {
        let mut state = self.state();
        let Some(serving) = state.serving.remove(&id) else { return };
        state.serving_bytes -= serving.bytes;
        state.answers += 1;
        state.push(Queued { frame, permit, answers: true });
        drop(state);
        self.driver.wake();
    }

    /// The connection is over: fails what is pending, drops what is being served.
    pub(super) fn end(&self, why: &str) {
        let mut state = self.state();
        let why = state.closed.get_or_insert_with(|| why.to_owned()).clone();
        let pending = std::mem::take(&mut state.pending);
        let serving = std::mem::take(&mut state.serving);
        let queues = (std::mem::take(&mut state.urgent), std::mem::take(&mut state.bulk));
        state.serving_bytes = 0;
        state.answers = 0;
        drop(state);
        self.open_calls.close();
        self.request_window.close();
        self.reply_queue.close();
        self.held_replies.close();
        drop(queues);
        for serving in serving.into_values() {
            serving.task.abort();
        }
        for pending in pending.into_values() {
            let error = if pending.sent {
                MuxError::Broken(why.clone())
            } else {
                MuxError::NotSent(why.clone())
            };
            let _ = pending.answer.send(Err(error));
        }
    }
}

/// A call that is open. Dropped before it is over, it gives the call up.
pub(super) struct CallGuard<'a> {
    shared: &'a Shared,
    id: u64,
    open: bool,
}

impl<'a> CallGuard<'a> {
    /// Queues `request`; its answer comes by the receiver.
    pub(super) fn begin(
        shared: &'a Shared,
        request: Request,
    ) -> Result<(CallGuard<'a>, oneshot::Receiver<Answer>), MuxError> {
        let (answer, receiver) = oneshot::channel();
        let mut state = shared.state();
        if state.closed.is_some() || state.going_away {
            drop(state);
            return Err(shared.not_sent());
        }
        let id = state.next_id;
        state.next_id += 1;
        state.pending.insert(id, Pending { answer, sent: false });
        state.queue(Frame::Request(id, request));
        drop(state);
        shared.driver.wake();
        Ok((CallGuard { shared, id, open: true }, receiver))
    }

    /// The answer has arrived.
    pub(super) fn over(&mut self) {
        self.open = false;
    }
}

impl Drop for CallGuard<'_> {
    fn drop(&mut self) {
        if !self.open {
            return;
        }
        let mut state = self.shared.state();
        let Some(pending) = state.pending.remove(&self.id) else { return };
        if pending.sent {
            state.queue(Frame::Cancel(self.id));
        } else {
            state.unqueue(|queued| matches!(queued.frame, Frame::Request(id, _) if id == self.id));
        }
        drop(state);
        self.shared.driver.wake();
    }
}
