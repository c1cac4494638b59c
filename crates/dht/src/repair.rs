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

use std::sync::Arc;
use std::time::Duration;

use atoll_env::{jittered, sleep};
use atoll_key::{BlockKind, KeyRange};
use atoll_net::Request;
use atoll_overlay::Node;
use futures_util::future::{select, select_all};

use crate::exchange::{ExchangeError, fingerprint, give, reconcile_with};
use crate::inner::Inner;
use crate::lookup::find;
use crate::messages::{self, MAX_RENEW_KEYS, Renew, RenewReply, from_header, to_header};
use crate::reconcile::Item;
use crate::repair_state::{Scope, scope_of};
use crate::replicas::{expected_replicas, store_here};

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
    for key in inner.repair.take_damaged() {
        match find(inner, key).await {
            Ok((block, _)) => {
                let me = inner.transport.local();
                store_here(inner, &me, std::slice::from_ref(&block)).await;
                inner.repair.done(1, block.bytes.len() as u64);
            }
            Err(error) => tracing::error!(%error, "a damaged block could not be fetched again"),
        }
    }
}

async fn finish_pass(inner: &Inner, scope: &Scope, equal: bool) -> Result<(), ExchangeError> {
    let root_blocks = fingerprint(inner, &[0; 32], scope.range).await?.count;
    inner.repair.pass_ended(equal.then_some(scope), root_blocks, inner.env.unix_ms());
    Ok(())
}

/// Gives blocks this node should no longer hold to their roots, then drops them.
async fn hand_over_strays(inner: &Inner, scope: &Scope) -> Result<(), ExchangeError> {
    let me = inner.overlay.neighbourhood().me;
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
