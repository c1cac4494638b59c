//! Keeping k copies of every block this node is the root of (CFS §5.1).
//!
//! "The DHash software in a block's successor server manages replication of that block":
//! a root compares its range `(predecessor, me]` with each of the k − 1 nodes after it and
//! copies what either lacks. That one rule restores copies after a failure (a new
//! successor lacks them), hands blocks over after a join (the new root lacks them and its
//! successor has them), and refetches what the scrubber set aside. A round runs when the
//! neighbourhood has changed and settled, when something was noticed missing, and every
//! so often.
//!
//! A block this node holds without being among its replica set any more, a *stray*, is
//! given to its root and dropped once the root has it.
//!
//! What it does not know: which blocks belong together, or whether anybody wants them.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::Duration;

use atoll_env::{Instant, jittered, sleep};
use atoll_key::{BlockKind, Key, KeyRange};
use atoll_net::Request;
use atoll_overlay::{Neighbourhood, Node};
use futures_util::future::{select, select_all};
use futures_util::task::AtomicWaker;

use crate::exchange::{ExchangeError, fingerprint, give, reconcile_with};
use crate::lookup::find;
use crate::messages::{self, MAX_RENEW_KEYS, Renew, RenewReply, from_header, to_header};
use crate::node::Inner;
use crate::reconcile::Item;
use crate::serve::store_here;
use crate::status::RepairStatus;

/// A round repeats at most so often before it waits again.
const MAX_PASSES: usize = 4;
/// Damaged blocks remembered one by one.
const MAX_DAMAGED: usize = 4096;
/// How long to wait after a round that could not finish.
const RETRY: Duration = Duration::from_secs(3);
/// How long to wait after a round that was still finding differences at its end, as it
/// does while blocks are being put.
const AGAIN: Duration = Duration::from_secs(1);
/// How often the settling neighbourhood is looked at, at most, before repair begins anyway.
const MAX_SETTLING: usize = 20;

/// What a root is responsible for: its range, and who should hold copies of it.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Scope {
    range: KeyRange,
    replicas: Vec<Node>,
}

fn scope_of(neighbourhood: &Neighbourhood, replicas: usize) -> Option<Scope> {
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
    /// The most replicas there were of late, and until when that counts.
    peak: (usize, Instant),
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

    async fn wait_for_kick(&self) {
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
        let (peak, until) = state.peak;
        if replicas >= peak || now > until {
            state.peak = (replicas, now + memory);
        }
        state.peak.0
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

/// Keeps replicas up, for ever.
pub(crate) async fn run(inner: Arc<Inner>) {
    let mut seen = None;
    loop {
        let epoch = inner.overlay.neighbourhood().epoch;
        if seen == Some(epoch) {
            let pause = jittered(&*inner.env, inner.config.repair_every);
            let kick = Box::pin(inner.repair.wait_for_kick());
            select(select_all([inner.overlay.changed(epoch), changed_after(&inner, pause)]), kick)
                .await;
        }
        settle(&inner).await;
        expected_replicas(&inner);
        seen = Some(inner.overlay.neighbourhood().epoch);
        let again_after = match round(&inner).await {
            Ok(Ended::Equal | Ended::Stuck) => continue,
            Ok(Ended::Moving) => AGAIN,
            Err(error) => {
                tracing::info!(%error, "repair could not finish a round; it will try again");
                RETRY
            }
        };
        sleep(&*inner.env, jittered(&*inner.env, again_after)).await;
        seen = None;
    }
}

/// The replicas a put must count on, see [`Repair::expected_replicas`].
pub(crate) fn expected_replicas(inner: &Inner) -> usize {
    let present = inner.overlay.neighbourhood().successors.len();
    let replicas = present.min(inner.config.replicas - 1);
    inner.repair.expected_replicas(inner.env.now(), replicas, inner.config.shrink_after)
}

fn changed_after(inner: &Inner, pause: Duration) -> atoll_env::BoxFuture<'static, u64> {
    let slept = sleep(&*inner.env, pause);
    Box::pin(async move {
        slept.await;
        0
    })
}

/// Waits until the neighbourhood has stopped changing, within reason.
async fn settle(inner: &Inner) {
    for _ in 0..MAX_SETTLING {
        let before = inner.overlay.neighbourhood().epoch;
        sleep(&*inner.env, inner.config.repair_settle).await;
        if inner.overlay.neighbourhood().epoch == before {
            break;
        }
    }
}

/// How a round ended.
enum Ended {
    /// No replica differs, or this node is the root of nothing yet.
    Equal,
    /// Blocks were still being copied in the last pass.
    Moving,
    /// What differs cannot be copied, for want of room.
    Stuck,
}

/// One round: compare and copy until nothing differs; then give strays away.
async fn round(inner: &Arc<Inner>) -> Result<Ended, ExchangeError> {
    refetch_damaged(inner).await;
    let replicas = inner.config.replicas;
    for _pass in 0..MAX_PASSES {
        let Some(scope) = scope_of(&inner.overlay.neighbourhood(), replicas) else {
            return Ok(Ended::Equal);
        };
        let (mut moved, mut left, mut failed) = (0, 0, None);
        for replica in &scope.replicas {
            match reconcile_with(inner, replica, scope.range).await {
                Ok(outcome) => {
                    moved += outcome.moved;
                    left += outcome.left;
                }
                // The others can still be supplied.
                Err(error) => failed = Some(error),
            }
        }
        finish_pass(inner, &scope, moved + left == 0 && failed.is_none()).await?;
        if let Some(error) = failed {
            return Err(error);
        }
        if moved == 0 && left == 0 {
            hand_over_strays(inner, &scope).await?;
            return Ok(Ended::Equal);
        }
        if moved == 0 {
            return Ok(Ended::Stuck);
        }
    }
    Ok(Ended::Moving)
}

/// Fetches what was damaged here, as root or as replica. What nobody else has is lost
/// here too; what cannot be reached is left to the comparison of ranges.
async fn refetch_damaged(inner: &Arc<Inner>) {
    let damaged = std::mem::take(&mut inner.repair.lock().damaged);
    for key in damaged {
        match find(inner, key).await {
            Ok((block, _)) => {
                let me = inner.me().peer;
                store_here(inner, &me, std::slice::from_ref(&block)).await;
                inner.repair.done(1, block.bytes.len() as u64);
            }
            Err(error) => tracing::error!(%error, "a damaged block could not be fetched again"),
        }
    }
}

async fn finish_pass(inner: &Inner, scope: &Scope, equal: bool) -> Result<(), ExchangeError> {
    let root_blocks = fingerprint(inner, &[0; 32], scope.range).await?.count;
    let unix_ms = inner.env.unix_ms();
    let mut state = inner.repair.lock();
    state.status.root_blocks = root_blocks;
    state.status.rounds += 1;
    state.status.last_round_unix_ms = unix_ms;
    state.clean = equal.then(|| scope.clone());
    Ok(())
}

/// Gives blocks this node should no longer hold to their roots, then drops them.
async fn hand_over_strays(inner: &Inner, scope: &Scope) -> Result<(), ExchangeError> {
    let me = inner.me();
    let mut cursor = me.id.0;
    // From just after this node around the ring to the start of its own range.
    loop {
        if scope.range.is_full() || cursor == scope.range.after {
            return Ok(());
        }
        let elsewhere = KeyRange::new(cursor, scope.range.after);
        let Some(first) = inner.store.list(elsewhere, 1)?.first().copied() else {
            return Ok(());
        };
        let Ok(nodes) = inner.root_list(&first.key).await else { return Ok(()) };
        let Some(root) = nodes.first().copied() else { return Ok(()) };
        if root == me || !elsewhere.contains(&root.id.0) {
            // The ring has changed under us: only the next round can tell.
            return Ok(());
        }
        let replica_set = &nodes[..nodes.len().min(inner.config.replicas)];
        if replica_set.len() == inner.config.replicas && !replica_set.contains(&me) {
            hand_over(inner, &root, KeyRange::new(cursor, root.id.0)).await?;
        }
        cursor = root.id.0;
    }
}

/// Gives all blocks of `range` to their root and drops those it has.
async fn hand_over(inner: &Inner, root: &Node, range: KeyRange) -> Result<(), ExchangeError> {
    let mut todo = Some(range);
    while let Some(range) = todo {
        let infos = inner.store.list(range, MAX_RENEW_KEYS)?;
        todo = match infos.last() {
            Some(last) if infos.len() == MAX_RENEW_KEYS && last.key != range.upto => {
                Some(KeyRange::new(last.key, range.upto))
            }
            _ => None,
        };
        let keys: Vec<_> = infos.iter().map(|info| info.key).collect();
        let count = keys.len();
        let header = to_header(&Renew { keys, lease_secs: 0, as_root: true });
        let request = Request { method: messages::RENEW, header, parts: Vec::new() };
        let held = from_header::<RenewReply>(&inner.call(root, request).await?.header)?.held;
        if held.len() != count {
            return Err(ExchangeError::IllFormed);
        }
        let now = inner.env.unix_ms() / 1000;
        let (mut settled, mut offered) = (Vec::new(), Vec::new());
        for (info, state) in infos.iter().zip(held) {
            // A signed block is always offered: the root may hold an older version.
            if state == 1 && info.kind == BlockKind::Content {
                settled.push(info.key);
            } else if info.expires_unix_secs > now {
                offered.push(Item { key: info.key, version: info.version });
            }
        }
        let outcome = give(inner, root, &offered, true).await?;
        if outcome.moved == offered.len() as u64 {
            settled.extend(offered.iter().map(|item| item.key));
        }
        if !settled.is_empty() {
            tracing::info!(count = settled.len(), ?root, "handed blocks over to their root");
            inner.store.remove(settled).await?;
        }
    }
    Ok(())
}
