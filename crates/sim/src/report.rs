//! What a run has cost, and why it does not end.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use atoll_env::Instant;

use crate::HostId;

/// Counts since the simulation began.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Messages sent: requests, replies, resets and cancels.
    pub sent_count: u64,
    /// Bytes of requests and replies sent, with the overhead of each message.
    pub sent_bytes: u64,
    /// Messages lost by chance, on cut links, or void with their sender or receiver.
    pub lost_count: u64,
    /// TCP connections opened (with [`crate::Connections::Tcp`], and by transfers).
    pub connection_count: u64,
    /// Chunks of TCP connections that were dropped and sent again.
    pub lost_chunk_count: u64,
    /// Calls whose deadline passed.
    pub timed_out_count: u64,
    /// Sleeps that ended.
    pub timer_count: u64,
    /// Polls of tasks.
    pub poll_count: u64,
    /// By method.
    pub methods: BTreeMap<u16, MethodStats>,
}

/// Counts of one method.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MethodStats {
    /// Calls begun.
    pub call_count: u64,
    /// Requests that reached a running host.
    pub delivered_count: u64,
    /// Replies (and refusals) sent.
    pub reply_count: u64,
    /// Bytes of headers and parts of requests sent.
    pub request_bytes: u64,
    /// Bytes of headers and parts of replies sent.
    pub reply_bytes: u64,
}

impl Stats {
    pub(crate) fn method(&mut self, method: u16) -> &mut MethodStats {
        self.methods.entry(method).or_default()
    }

    /// Calls begun, of all methods.
    pub fn call_count(&self) -> u64 {
        self.methods.values().map(|method| method.call_count).sum()
    }
}

/// A call that has no outcome yet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PendingCall {
    /// The caller.
    pub from: HostId,
    /// The callee; [`HostId::OUTSIDE`] if no host has the address.
    pub to: HostId,
    /// Which method.
    pub method: u16,
    /// When it began.
    pub started_at: Instant,
    /// Whether the callee is at work on it (and not a message under way).
    pub is_being_served: bool,
}

/// `block_on` did not finish: what was going on.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Stuck {
    /// The seed that replays the run.
    pub seed: u64,
    /// When it was given up.
    pub at: Instant,
    /// Nothing at all was left to happen (a deadlock), rather than the limit passed.
    pub is_idle: bool,
    /// Calls without an outcome, oldest first, at most [`Stuck::MAX_LISTED`].
    pub pending_calls: Vec<PendingCall>,
    /// How many calls had no outcome.
    pub pending_call_count: usize,
    /// Hosts with most tasks first, at most [`Stuck::MAX_LISTED`].
    pub tasks_by_host: Vec<(HostId, usize)>,
    /// How many tasks lived.
    pub task_count: usize,
    /// How many timers, deadlines and messages were still to come.
    pub scheduled_count: usize,
}

impl Stuck {
    /// Longest list in the report.
    pub const MAX_LISTED: usize = 16;
}

impl fmt::Display for Stuck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let why = if self.is_idle { "nothing is left to happen" } else { "the limit passed" };
        let at = Duration::from_nanos(self.at.as_nanos());
        writeln!(f, "stuck at {at:?} with seed {}: {why}", self.seed)?;
        writeln!(
            f,
            "{} tasks, {} calls without outcome, {} events to come",
            self.task_count, self.pending_call_count, self.scheduled_count
        )?;
        for call in &self.pending_calls {
            let age = self.at.since(call.started_at);
            let state = if call.is_being_served { "being served" } else { "under way" };
            let PendingCall { from, to, method, .. } = call;
            writeln!(f, "  {from} calls {to}, method {method:#06x}, for {age:?}: {state}")?;
        }
        for (host, count) in &self.tasks_by_host {
            writeln!(f, "  {host} has {count} tasks")?;
        }
        Ok(())
    }
}

impl std::error::Error for Stuck {}
