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
//! A block this node holds without being among its replica set any more, a *stray*, is
//! given to its root and dropped once the replica set has it (`strays`).
//!
//! What it does not know: which blocks belong together, or whether anybody wants them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use atoll_env::{jittered, sleep};
use atoll_key::{KeyRange, PeerId};
use atoll_overlay::Node;
use futures_util::future::{select, select_all};

use crate::exchange::{ExchangeError, Given, count, reconcile_with};
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
        inner.repair.remember_expected(&*inner.durable).await;
        seen = Some(inner.overlay.epoch());
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
    let mut given: BTreeMap<PeerId, Given> = BTreeMap::new();
    for _pass in 0..MAX_PASSES {
        let duties = duties_of(&inner.overlay.neighbourhoods(), inner.config.replicas);
        if duties.scopes.is_empty() {
            return Ok(Ended::Equal);
        }
        let (mut moved, mut left, mut failed) = (0, 0, None);
        for (replica, ranges) in by_replica(&duties) {
            let given = given.entry(replica.peer.id).or_default();
            match reconcile_with(inner, &replica, ranges, given).await {
                Ok(outcome) => {
                    moved += outcome.moved;
                    left += outcome.left;
                }
                // The others can still be supplied.
                Err(error) => failed = Some(error),
            }
        }
        finish_pass(inner, &duties, moved + left == 0 && failed.is_none()).await?;
        if let Some(error) = failed {
            return Err(error);
        }
        if moved == 0 && left == 0 {
            hand_over_strays(inner, &duties).await?;
            return Ok(Ended::Equal);
        }
        if moved == 0 {
            return Ok(Ended::Stuck);
        }
    }
    Ok(Ended::Moving)
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

async fn finish_pass(inner: &Inner, duties: &Duties, equal: bool) -> Result<(), ExchangeError> {
    let mut root_blocks = 0;
    for scope in &duties.scopes {
        root_blocks += count(inner, scope.range).await?;
    }
    inner.repair.pass_ended(equal.then_some(duties), root_blocks, inner.env.unix_ms());
    Ok(())
}
