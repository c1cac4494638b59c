//! The shared state of repair: what it has found, what it was told of, how fast it may go.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::Duration;

use atoll_env::Instant;
use atoll_key::{Key, KeyRange};
use atoll_overlay::{Neighbourhood, Node};
use futures_util::task::AtomicWaker;

use crate::status::RepairStatus;

/// Damaged blocks remembered one by one.
const MAX_DAMAGED: usize = 4096;

/// What a root is responsible for: its range, and who should hold copies of it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Scope {
    pub range: KeyRange,
    pub replicas: Vec<Node>,
}

/// What the node is responsible for, once it has joined and knows its range.
pub(crate) fn scope_of(neighbourhood: &Neighbourhood, replicas: usize) -> Option<Scope> {
    if !neighbourhood.joined {
        return None;
    }
    let range = neighbourhood.range()?;
    let replicas = neighbourhood.successors.iter().take(replicas - 1).copied().collect();
    Some(Scope { range, replicas })
}

/// The shared state of repair.
#[derive(Default)]
pub(crate) struct Repair {
    kicked: AtomicBool,
    waker: AtomicWaker,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    status: RepairStatus,
    /// The scope that was last found without a difference, if nothing was noticed since.
    clean: Option<Scope>,
    next_slot: Instant,
    /// Blocks that were damaged here, to be fetched from another holder.
    damaged: BTreeSet<Key>,
    /// How many replicas a put must count on.
    expected: usize,
    /// Since when there have been fewer than that, and the most there have been since.
    fewer: Option<(Instant, usize)>,
}

impl Repair {
    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().expect("no holder of this lock panics")
    }

    /// Something is missing somewhere: a round should run.
    pub fn kick(&self) {
        self.lock().clean = None;
        self.kicked.store(true, Ordering::SeqCst);
        self.waker.wake();
    }

    /// A block was damaged here: it should be fetched again. Beyond [`MAX_DAMAGED`] only
    /// comparing ranges finds it.
    pub fn refetch(&self, key: Key) {
        {
            let mut state = self.lock();
            if state.damaged.len() < MAX_DAMAGED {
                state.damaged.insert(key);
            }
        }
        self.kick();
    }

    /// What was to be fetched again; the list is empty afterwards.
    pub fn take_damaged(&self) -> BTreeSet<Key> {
        std::mem::take(&mut self.lock().damaged)
    }

    /// A pass over all replicas has ended; `equal` is the scope if none differed.
    pub fn pass_ended(&self, equal: Option<&Scope>, root_blocks: u64, unix_ms: u64) {
        let mut state = self.lock();
        state.status.root_blocks = root_blocks;
        state.status.rounds += 1;
        state.status.last_round_unix_ms = unix_ms;
        state.clean = equal.cloned();
    }

    /// Resolves when somebody has kicked since it last did. One waiter at a time.
    pub async fn wait_for_kick(&self) {
        std::future::poll_fn(|context| {
            self.waker.register(context.waker());
            if self.kicked.swap(false, Ordering::SeqCst) { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    pub fn queue(&self, blocks: u64) {
        self.lock().status.queue_blocks += blocks;
    }

    pub fn unqueue(&self, blocks: u64) {
        let mut state = self.lock();
        state.status.queue_blocks = state.status.queue_blocks.saturating_sub(blocks);
    }

    pub fn done(&self, blocks: u64, bytes: u64) {
        let mut state = self.lock();
        state.status.repaired_blocks += blocks;
        state.status.repaired_bytes += bytes;
    }

    /// How many replicas a put must count on when `now` there are `replicas`: as many as
    /// there were during the last `memory`. A node cut off from the others must not take
    /// itself for a majority; a ring that has shrunk for good is believed after a while.
    pub fn expected_replicas(&self, now: Instant, replicas: usize, memory: Duration) -> usize {
        let mut state = self.lock();
        if replicas >= state.expected {
            (state.expected, state.fewer) = (replicas, None);
            return replicas;
        }
        // Counted from when fewer were first seen: nobody may have looked for long before.
        let (since, most) = state.fewer.unwrap_or((now, replicas));
        let most = most.max(replicas);
        state.fewer = Some((since, most));
        if now.since(since) > memory {
            state.expected = most;
            state.fewer = (replicas < most).then_some((now, replicas));
        }
        state.expected
    }

    /// Counts blocks in that were put since the last round; the next round counts anew.
    pub fn count_root_blocks(&self, new: u64) {
        self.lock().status.root_blocks += new;
    }

    /// Reserves the time that copying `bytes` may take; copying may go on at the result.
    pub fn pace(&self, now: Instant, bytes: u64, bytes_per_sec: u64) -> Instant {
        let mut state = self.lock();
        let cost = Duration::from_secs_f64(bytes as f64 / bytes_per_sec.max(1) as f64);
        state.next_slot = state.next_slot.max(now) + cost;
        state.next_slot
    }

    /// The state of repair, given what the node is responsible for at present.
    pub fn status(&self, neighbourhood: &Neighbourhood, replicas: usize) -> RepairStatus {
        let scope = scope_of(neighbourhood, replicas);
        let state = self.lock();
        RepairStatus {
            fully_replicated: scope.is_some() && state.clean == scope,
            replicas_wanted: scope.map_or(0, |scope| scope.replicas.len() as u32 + 1),
            ..state.status
        }
    }
}
