//! Keeping k copies of every block this node is the root of (CFS §5.1).
//!
//! "The DHash software in a block's successor server manages replication of that block":
//! a root compares its range `(predecessor, me]` with each of the k − 1 nodes after it and
//! copies what either lacks; a node with several virtual servers is the root of several
//! ranges (§5.3). That one rule restores copies after a failure (a new
//! successor lacks them), hands blocks over after a join (the new root lacks them and its
//! successor has them), and refetches blocks that the scrubber set aside. A round runs when the
//! neighbourhood has changed and settled, when a block was noticed missing, and periodically.
//!
//! A block that this node holds without belonging to its replica set, a *stray*, is given to the
//! set by `handoff`, a task of its own. A peer that fails, refuses, is full or slow affects only
//! the work with that peer (`docs/design/dht.md`, rule R5): each has a time budget in a round
//! ([`crate::rpc::budget`]), and the next peer is begun when one takes longer than usual.
//!
//! It does not know which blocks belong together, or whether they are wanted.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use atoll_env::{BoxFuture, jittered, sleep, timeout};
use atoll_key::{Key, KeyRange, PeerId};
use atoll_overlay::{Node, ServedRanges};
use futures_util::StreamExt;
use futures_util::future::select;
use futures_util::stream::FuturesUnordered;

use crate::blocks::GetError;
use crate::holdings::ranges::summaries;
use crate::replication::Replication;
use crate::replication::copying::{ExchangeError, Outcome};
use crate::replication::exchange::{Given, reconcile_with};
use crate::replication::state::Compared;
use crate::replication::status::OpenReplica;
use crate::replication::store::store_here;
use crate::rpc::Block;
use crate::rpc::backoff::SetBack;
use crate::rpc::budget::PEER_LIMIT;

/// A round repeats at most so often before it waits again.
const MAX_PASSES: usize = 4;
/// How long to wait after a round that could not finish.
const RETRY: Duration = Duration::from_secs(3);
/// How long to wait after a round that was still finding differences at its end, as it
/// does while blocks are being put.
const AGAIN: Duration = Duration::from_secs(1);
/// How often the settling neighbourhood is looked at, at most, before repair begins anyway.
const MAX_SETTLING: usize = 20;
/// The next replica is compared with when one has taken so long. A guess: longer than comparing
/// takes that finds no difference.
const NEXT_AFTER: Duration = Duration::from_secs(2);
/// Replicas compared with at once. A guess: each takes a few batches of blocks in memory.
const MAX_SIDE_BY_SIDE: usize = 8;

/// How a block is fetched from any node that holds it. Repair knows no other way to get what was
/// damaged here than a reader has.
pub(crate) type FetchBlock =
    Arc<dyn Fn(Key) -> BoxFuture<'static, Result<Block, GetError>> + Send + Sync>;

/// Keeps replicas up, for ever.
pub(crate) async fn run(replication: Arc<Replication>, fetch: FetchBlock) {
    let mut seen = None;
    loop {
        let epoch = replication.overlay.epoch();
        if seen == Some(epoch) {
            let pause = jittered(&*replication.env, replication.config.repair_every);
            let changed = replication.overlay.changed(epoch);
            let kick = Box::pin(replication.requests.wait_for_kick());
            select(select(changed, sleep(&*replication.env, pause)), kick).await;
        }
        settle(&replication).await;
        let (around, replicas) =
            (replication.overlay.neighbourhoods(), replication.config.replicas);
        let (now, unix_ms) = (replication.env.now(), replication.env.unix_ms());
        replication.losses.look(&around, replicas, now, unix_ms);
        replication.losses.remember(&*replication.durable).await;
        seen = Some(replication.overlay.epoch());
        let ended = round(&replication, &fetch).await;
        replication.handoff.due.notify();
        let again_after = match ended {
            Ended::Equal | Ended::Stuck => continue,
            Ended::Moving => AGAIN,
            Ended::Unfinished => RETRY,
        };
        sleep(&*replication.env, jittered(&*replication.env, again_after)).await;
        seen = None;
    }
}

/// Waits until the neighbourhood has stopped changing, within reason.
async fn settle(replication: &Replication) {
    for _ in 0..MAX_SETTLING {
        let before = replication.overlay.epoch();
        sleep(&*replication.env, replication.config.repair_settle).await;
        if replication.overlay.epoch() == before {
            break;
        }
    }
}

/// How a round ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ended {
    /// No replica differs, or this node is the root of nothing yet.
    Equal,
    /// Blocks were still being copied in the last pass.
    Moving,
    /// What differs cannot be copied at present: for want of room, or with a node that is left
    /// alone for a while.
    Stuck,
    /// Some replica could not be compared.
    Unfinished,
}

/// One round: compare and copy until nothing differs.
async fn round(replication: &Arc<Replication>, fetch: &FetchBlock) -> Ended {
    refetch_damaged(replication, fetch).await;
    let mut given: BTreeMap<PeerId, Given> = BTreeMap::new();
    let mut passes = 0;
    loop {
        let served = replication.overlay.served_ranges(replication.config.replicas);
        if served.ranges.is_empty() {
            return Ended::Equal;
        }
        let ended = pass(replication, &served, &mut given).await;
        passes += 1;
        if ended != Ended::Moving || passes == MAX_PASSES {
            return ended;
        }
    }
}

/// Compares with each replica once, and copies what differs. One that fails or is slow delays no
/// other.
async fn pass(
    replication: &Arc<Replication>,
    served: &ServedRanges,
    given: &mut BTreeMap<PeerId, Given>,
) -> Ended {
    // What is asked for from now on may come too late for this pass.
    let requests = replication.requests.count();
    let (mut moved, mut open) = (0, Vec::new());
    let mut is_unfinished = false;
    let mut replicas = by_replica(served);
    // Replicas that misbehave come last.
    replicas.sort_by_key(|(replica, _)| {
        !replication.backoff.is_fit(&replica.peer.id, replication.env.now())
    });
    for (replica, outcome) in side_by_side(replication, replicas, given).await {
        let outcome = outcome.unwrap_or_else(|error| {
            tracing::info!(%error, ?replica, "a replica could not be compared");
            if error.is_misbehaviour() {
                let now = replication.env.now();
                replication.backoff.set_back(replica.peer.id, now, SetBack::Refuses);
            }
            is_unfinished |= error.is_failure();
            let mut outcome = Outcome::default();
            outcome.leave(1, error.obstacle());
            outcome
        });
        moved += outcome.moved;
        let left = outcome.left.into_iter();
        open.extend(left.map(|(why, blocks)| OpenReplica { peer: replica.peer, why, blocks }));
    }
    let ended = match moved {
        _ if is_unfinished => Ended::Unfinished,
        0 if open.is_empty() => Ended::Equal,
        0 => Ended::Stuck,
        _ => Ended::Moving,
    };
    let is_equal = ended == Ended::Equal;
    finish_pass(replication, Compared { served: served.clone(), requests, is_equal, open }).await;
    ended
}

/// Compares with all replicas, in this order; the next is begun when one has ended or takes long.
async fn side_by_side(
    replication: &Arc<Replication>,
    replicas: Vec<(Node, Vec<KeyRange>)>,
    given: &mut BTreeMap<PeerId, Given>,
) -> Vec<(Node, Result<Outcome, ExchangeError>)> {
    let exchange = |(replica, ranges): (Node, Vec<KeyRange>), mut given: Given| async move {
        let outcome = reconcile_with(replication, &replica, ranges, &mut given).await;
        (replica, outcome, given)
    };
    let (mut waiting, mut outcomes) = (replicas.into_iter(), Vec::new());
    let mut exchanges = FuturesUnordered::new();
    loop {
        let at_once = if replication.config.mechanisms.side_by_side { MAX_SIDE_BY_SIDE } else { 1 };
        if exchanges.len() < at_once
            && let Some(next) = waiting.next()
        {
            let given = given.remove(&next.0.peer.id).unwrap_or_default();
            exchanges.push(exchange(next, given));
        }
        match timeout(&*replication.env, NEXT_AFTER, exchanges.next()).await {
            Ok(Some((replica, outcome, taken))) => {
                given.insert(replica.peer.id, taken);
                outcomes.push((replica, outcome));
            }
            Ok(None) => return outcomes,
            Err(_) => {}
        }
    }
}

/// The other nodes that should hold copies, and of which ranges: one exchange with each,
/// however many virtual servers either has.
fn by_replica(served: &ServedRanges) -> Vec<(Node, Vec<KeyRange>)> {
    let mut replicas: BTreeMap<PeerId, (Node, Vec<KeyRange>)> = BTreeMap::new();
    for scope in &served.ranges {
        for node in &scope.replicas {
            let (_, ranges) = replicas.entry(node.peer.id).or_insert((*node, Vec::new()));
            ranges.push(scope.range);
        }
    }
    replicas.into_values().collect()
}

/// Fetches what was damaged here, as root or as replica. What no other node has is lost
/// here too; what cannot be reached is left to the comparison of ranges.
async fn refetch_damaged(replication: &Replication, fetch: &FetchBlock) {
    let until = replication.env.now() + PEER_LIMIT;
    for key in replication.requests.take_damaged() {
        if replication.env.now() >= until {
            // In the next round: a slow sender holds up no more of this one.
            replication.requests.refetch(key);
            continue;
        }
        match fetch(key).await {
            Ok(block) => {
                let me = replication.transport.local();
                store_here(replication, &me, std::slice::from_ref(&block)).await;
                replication.repair.done(1, block.bytes.len() as u64);
            }
            Err(error) => tracing::error!(%error, "a damaged block could not be fetched again"),
        }
    }
}

async fn finish_pass(replication: &Replication, compared: Compared) {
    let ranges = compared.served.ranges.iter().map(|scope| scope.range).collect();
    let held = summaries(replication, ranges).await.unwrap_or_else(|error| {
        tracing::error!(%error, "the blocks of this node's ranges could not be counted");
        Vec::new()
    });
    let root_blocks = held.iter().map(|summary| summary.count).sum();
    replication.repair.pass_ended(compared, root_blocks, replication.env.unix_ms());
}
