//! Keeping k copies of every block this node is the root of (CFS §5.1).
//!
//! "The DHash software in a block's successor server manages replication of that block":
//! a root compares its range `(predecessor, me]` with each of the k − 1 nodes after it and
//! copies what either lacks; a node with several virtual servers is the root of several
//! ranges (§5.3). That one rule restores copies after a failure (a new
//! successor lacks them), hands blocks over after a join (the new root lacks them and its
//! successor has them), and refetches what the scrubber set aside. A round runs when the
//! neighbourhood has changed and settled, when something was noticed missing, and every
//! so often.
//!
//! A block this node holds without being among its replica set any more, a *stray*, is given to
//! the set, and dropped after a time of grace when the set proves to have it (`strays`). One node
//! that fails, refuses or is full affects the work with that node only (`docs/design/dht.md`,
//! rule R5).
//!
//! What it does not know: which blocks belong together, or whether anybody wants them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use atoll_env::{jittered, sleep};
use atoll_key::{KeyRange, PeerId};
use atoll_overlay::Node;
use futures_util::future::{select, select_all};

use crate::exchange::{Given, Outcome, reconcile_with};
use crate::holdings::summaries;
use crate::inner::Inner;
use crate::lookup::{Found, find};
use crate::repair_state::{Duties, duties_of};
use crate::replicas::{expected_replicas, store_here};
use crate::strays::hand_over_strays;

/// A round repeats at most so often before it waits again.
const MAX_PASSES: usize = 4;
/// How long to wait after a round that could not finish.
const RETRY: Duration = Duration::from_secs(3);
/// How long to wait after a round that was still finding differences at its end, as it
/// does while blocks are being put.
const AGAIN: Duration = Duration::from_secs(1);
/// How often the settling neighbourhood is looked at, at most, before repair begins anyway.
const MAX_SETTLING: usize = 20;

/// Keeps replicas up, for ever.
pub(crate) async fn run(inner: Arc<Inner>) {
    let mut seen = None;
    loop {
        let epoch = inner.overlay.epoch();
        if seen == Some(epoch) {
            let pause = jittered(&*inner.env, inner.config.repair_every);
            let kick = Box::pin(inner.repair.wait_for_kick());
            select(select_all([inner.overlay.changed(epoch), changed_after(&inner, pause)]), kick)
                .await;
        }
        settle(&inner).await;
        expected_replicas(&inner);
        let (seats, replicas) = (inner.overlay.neighbourhoods(), inner.config.replicas);
        inner.losses.look(&seats, replicas, inner.env.now(), inner.env.unix_ms());
        inner.losses.remember(&*inner.durable).await;
        inner.repair.remember_expected(&*inner.durable).await;
        seen = Some(inner.overlay.epoch());
        let again_after = match round(&inner).await {
            Ended::Equal | Ended::Stuck => continue,
            Ended::Moving => AGAIN,
            Ended::Unfinished => RETRY,
        };
        sleep(&*inner.env, jittered(&*inner.env, again_after)).await;
        seen = None;
    }
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
        let before = inner.overlay.epoch();
        sleep(&*inner.env, inner.config.repair_settle).await;
        if inner.overlay.epoch() == before {
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

/// One round: compare and copy until nothing differs, and give strays away.
async fn round(inner: &Arc<Inner>) -> Ended {
    refetch_damaged(inner).await;
    let mut given: BTreeMap<PeerId, Given> = BTreeMap::new();
    let (mut ended, mut duties);
    let mut passes = 0;
    loop {
        duties = duties_of(&inner.overlay.neighbourhoods(), inner.config.replicas);
        if duties.scopes.is_empty() {
            return Ended::Equal;
        }
        ended = pass(inner, &duties, &mut given).await;
        passes += 1;
        if ended != Ended::Moving || passes == MAX_PASSES {
            break;
        }
    }
    // Whatever became of the replicas: strays are other nodes' blocks.
    match hand_over_strays(inner, &duties).await {
        Ok(true) if ended == Ended::Equal => Ended::Moving,
        Ok(_) => ended,
        Err(error) => {
            tracing::warn!(%error, "strays could not be gone through");
            Ended::Unfinished
        }
    }
}

/// Compares with each replica once, and copies what differs. One that fails delays no other.
async fn pass(inner: &Arc<Inner>, duties: &Duties, given: &mut BTreeMap<PeerId, Given>) -> Ended {
    let mut sum = Outcome::default();
    let mut is_unfinished = false;
    let mut replicas = by_replica(duties);
    // The others first: one that misbehaves can take minutes.
    replicas.sort_by_key(|(replica, _)| !inner.repair.is_fit(&replica.peer.id, inner.env.now()));
    for (replica, ranges) in replicas {
        let id = replica.peer.id;
        let outcome = reconcile_with(inner, &replica, ranges, given.entry(id).or_default()).await;
        match outcome {
            Ok(outcome) => {
                sum.moved += outcome.moved;
                sum.left += outcome.left;
            }
            Err(error) => {
                tracing::info!(%error, ?replica, "a replica could not be compared");
                if error.is_misbehaviour() {
                    inner.repair.set_back(id, inner.env.now());
                }
                if error.is_failure() {
                    is_unfinished = true;
                } else {
                    sum.left += 1;
                }
            }
        }
    }
    let ended = match sum {
        _ if is_unfinished => Ended::Unfinished,
        Outcome { moved: 0, left: 0 } => Ended::Equal,
        Outcome { moved: 0, .. } => Ended::Stuck,
        _ => Ended::Moving,
    };
    finish_pass(inner, duties, ended == Ended::Equal).await;
    ended
}

/// The other nodes that should hold copies, and of which ranges: one exchange with each,
/// however many virtual servers either has.
fn by_replica(duties: &Duties) -> Vec<(Node, Vec<KeyRange>)> {
    let mut replicas: BTreeMap<PeerId, (Node, Vec<KeyRange>)> = BTreeMap::new();
    for scope in &duties.scopes {
        for node in &scope.replicas {
            let (_, ranges) = replicas.entry(node.peer.id).or_insert((*node, Vec::new()));
            ranges.push(scope.range);
        }
    }
    replicas.into_values().collect()
}

/// Fetches what was damaged here, as root or as replica. What nobody else has is lost
/// here too; what cannot be reached is left to the comparison of ranges.
async fn refetch_damaged(inner: &Arc<Inner>) {
    for key in inner.repair.take_damaged() {
        match find(inner, key, None).await {
            Ok(Found { block, .. }) => {
                let me = inner.transport.local();
                store_here(inner, &me, std::slice::from_ref(&block)).await;
                inner.repair.done(1, block.bytes.len() as u64);
            }
            Err(error) => tracing::error!(%error, "a damaged block could not be fetched again"),
        }
    }
}

async fn finish_pass(inner: &Inner, duties: &Duties, is_equal: bool) {
    let ranges = duties.scopes.iter().map(|scope| scope.range).collect();
    let held = summaries(inner, ranges).await.unwrap_or_else(|error| {
        tracing::error!(%error, "the blocks of this node's ranges could not be counted");
        Vec::new()
    });
    let root_blocks = held.iter().map(|summary| summary.count).sum();
    inner.repair.pass_ended(is_equal.then_some(duties), root_blocks, inner.env.unix_ms());
}
