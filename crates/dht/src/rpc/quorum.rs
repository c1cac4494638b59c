//! Calls to several nodes at once that do not wait for slow ones.
//!
//! A write is acknowledged when a majority of a replica set has it, and one slow, stopped or dead
//! member must not delay that. A call that takes longer than
//! [`PutTimes::patience`](super::put_times::PutTimes::patience) is *overdue*. Its answer still
//! counts when it comes, but a caller that has a majority does not wait for it. A node that left an
//! earlier call unanswered is asked and not waited for at all.
//!
//! A node is given [`MOST_USUAL`] and the time of the line before it is pinged on the side; one that leaves that
//! unanswered as well is overdue at once ([`super::overdue`]).
//!
//! An overdue call does not mean that its node is dead: either line may be slow. So the overlay
//! checks the node as it checks its neighbours, and treats it as failed only if that check fails.
//!
//! **Invariant:** an overdue call goes on after [`Calls::finish`], at most [`MAX_IN_BACKGROUND`] at
//! a time, so a replica that is merely slow gets its copy.
//!
//! It does not know what is asked, nor what answers count for.

use std::sync::Arc;
use std::time::Duration;

use atoll_env::{BoxFuture, Instant, sleep};
use atoll_net::CallError;
use atoll_overlay::Node;
use atoll_overlay::peer_book::Standing;
use futures_util::StreamExt;
use futures_util::future::{Either, select};
use futures_util::stream::FuturesUnordered;

use crate::rpc::Rpc;
use crate::rpc::overdue::{Heard, MOST_USUAL, ended, hear_long};
use crate::rpc::put_times::{Sending, WaitsFor};

/// Calls that go on although no caller waits for them; further ones are dropped. Each may hold a
/// batch of a mebibyte in memory. A guess.
pub(super) const MAX_IN_BACKGROUND: usize = 64;

/// A call's patience is looked at anew so often: other calls measure the line meanwhile. A guess.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// What happened.
#[derive(Debug)]
pub(crate) enum Event<T> {
    /// A node has answered, or its call has failed.
    Answer(Node, Result<T, CallError>),
    /// A call has become overdue.
    Overdue,
    /// This node's place on the ring has changed.
    RingChanged,
}

/// A call that is not overdue.
struct Watched {
    node: Node,
    sending: Arc<Sending>,
    /// The most that this node was sending at a time since then, as far as it was looked at.
    line_bytes: u64,
}

type Call<T> = BoxFuture<'static, (Node, Heard<Result<T, CallError>>)>;

/// See the module.
pub(crate) struct Calls<T> {
    rpc: Arc<Rpc>,
    waits_for: WaitsFor,
    calls: FuturesUnordered<Call<T>>,
    watched: Vec<Watched>,
    epoch: u64,
}

impl<T: Send + 'static> Calls<T> {
    pub(crate) fn new(rpc: &Arc<Rpc>, waits_for: WaitsFor) -> Calls<T> {
        let (calls, watched, epoch) = (FuturesUnordered::new(), Vec::new(), rpc.overlay.epoch());
        Calls { rpc: rpc.clone(), waits_for, calls, watched, epoch }
    }

    /// Asks a node something, sending so many bytes of blocks when there is room on the line.
    pub(crate) fn ask(
        &mut self,
        node: Node,
        bytes: u64,
        call: impl Future<Output = Result<T, CallError>> + Send + 'static,
    ) {
        let rpc = self.rpc.clone();
        let bytes = if rpc.is_me(&node) { 0 } else { bytes };
        let sending = Arc::new(rpc.put_times.sending(self.waits_for, bytes));
        let waits = !rpc.config.mechanisms.hedged_puts;
        let is_watched = waits || answers(&rpc, &node);
        if is_watched {
            self.watched.push(Watched { node, sending: sending.clone(), line_bytes: 0 });
        }
        self.calls.push(Box::pin(async move {
            match rpc.config.mechanisms.line_window {
                true => sending.begin(&rpc.env).await,
                false => sending.begins(rpc.env.now()),
            }
            let line_bytes = rpc.put_times.held_bytes();
            if !is_watched {
                sending.give_up_room();
            }
            let asking = rpc.clone();
            let answered = async move {
                let answer = call.await;
                if answer.is_ok() && !asking.is_me(&node) {
                    sending.answered(&node.peer.id, line_bytes, asking.env.now());
                }
                drop(sending);
                answer
            };
            if waits || !is_watched {
                return (node, Heard::Answer(answered.await));
            }
            let times = rpc.put_times.clone();
            let line_time = move || times.line_time(times.under_way_bytes());
            let after = MOST_USUAL + line_time();
            (node, hear_long(&rpc, node, answered, after, line_time).await)
        }));
    }

    /// Whether a call is under way that is not overdue.
    pub(crate) fn is_patient(&self) -> bool {
        !self.watched.is_empty()
    }

    /// What happens next; `None` when no call is under way.
    pub(crate) async fn next(&mut self) -> Option<Event<T>> {
        loop {
            if self.calls.is_empty() {
                return None;
            }
            let now = self.rpc.env.now();
            let line_bytes = self.rpc.put_times.under_way_bytes();
            for watched in &mut self.watched {
                watched.line_bytes = watched.line_bytes.max(line_bytes);
            }
            let due = self.watched.iter().filter_map(|watched| self.due(watched)).min();
            // One that is waited for alone, without end, waits for the calls' own limits.
            let last = if self.is_patient() { LOOK_EVERY } else { Duration::from_secs(3600) };
            let pause = due.map_or(last, |due| due.since(now).min(LOOK_EVERY));
            let pause = sleep(&*self.rpc.env, pause);
            let changed = self.rpc.overlay.changed(self.epoch);
            match select(self.calls.next(), select(pause, changed)).await {
                Either::Left((answer, _)) => match answer? {
                    (node, Heard::Answer(answer)) => {
                        self.watched.retain(|watched| watched.node.id != node.id);
                        return Some(Event::Answer(node, answer));
                    }
                    (node, Heard::Silent(call)) => {
                        let rest = async move { (node, Heard::Answer(call.await)) };
                        self.calls.push(Box::pin(rest));
                        let is_its = |watched: &Watched| watched.node.id == node.id;
                        if let Some(at) = self.watched.iter().position(is_its) {
                            self.watched.remove(at).sending.give_up_room();
                            return Some(Event::Overdue);
                        }
                    }
                },
                Either::Right((Either::Right((epoch, _)), _)) => {
                    self.epoch = epoch;
                    return Some(Event::RingChanged);
                }
                Either::Right((Either::Left(_), _)) => {
                    if self.end_patience() {
                        return Some(Event::Overdue);
                    }
                }
            }
        }
    }

    /// When a call will be overdue; `None` while it waits for room on the line.
    fn due(&self, watched: &Watched) -> Option<Instant> {
        let mechanisms = &self.rpc.config.mechanisms;
        if !mechanisms.hedged_puts {
            return None;
        }
        let (times, book) = (&self.rpc.put_times, self.rpc.overlay.peer_book());
        let bytes = if mechanisms.line_rate { watched.line_bytes } else { 0 };
        let id = &watched.node.peer.id;
        let mut patience = times.patience(id, self.waits_for, bytes, book);
        if watched.sending.is_question() {
            patience = patience.min(MOST_USUAL + times.line_time(bytes));
        }
        Some(watched.sending.start()? + patience)
    }

    /// Whether a call's time has come; it is overdue then.
    fn end_patience(&mut self) -> bool {
        let now = self.rpc.env.now();
        let is_due = |watched: &Watched| self.due(watched).is_some_and(|due| due <= now);
        let Some(at) = self.watched.iter().position(is_due) else { return false };
        let Watched { node, sending, .. } = self.watched.remove(at);
        sending.give_up_room();
        if !self.rpc.is_me(&node) {
            self.rpc.overlay.peer_book().late(&node.peer, now);
            self.rpc.overlay.probe(&node.peer);
        }
        true
    }

    /// The caller waits no longer; the calls under way go on.
    pub(crate) fn finish(self) {
        for call in self.calls {
            let to_its_end = async move { drop(ended(call.await.1).await) };
            self.rpc.background.run(&self.rpc.env, to_its_end);
        }
    }
}

/// Whether a node left no earlier call unanswered.
pub(crate) fn answers(rpc: &Rpc, node: &Node) -> bool {
    rpc.overlay.peer_book().standing(&node.peer, rpc.env.now()) == Standing::Answers
}
