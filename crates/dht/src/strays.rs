//! Blocks that a node holds without belonging to their replica set any more (CFS §5.1).
//!
//! They are left over when a node joins before this one, when one of this node's virtual
//! servers leaves its position (§5.3), or by chance. They are given to their root, and
//! dropped once it says that a majority of the replica set has them and one of the set
//! bears it out; until then whoever asks here gets them.
//!
//! **Invariant:** a block that was put or renewed here while its handing over was under way
//! stays: whoever sent it counts on this node. [`Leaving`] sees to that.

use atoll_env::random_below;
use atoll_key::{BlockKind, Key, KeyRange};
use atoll_net::Request;
use atoll_overlay::{Node, distinct_peers};
use atoll_store::BlockInfo;

use crate::diversion;
use crate::exchange::{ExchangeError, give};
use crate::inner::Inner;
use crate::leaving::Scope;
use crate::messages::{self, MAX_RENEW_KEYS, Renew, RenewReply, from_header, to_header};
use crate::reconcile::Item;
use crate::repair_state::Duties;

/// Gives blocks this node should no longer hold to their roots, then drops them.
pub(crate) async fn hand_over_strays(inner: &Inner, duties: &Duties) -> Result<(), ExchangeError> {
    let scopes = &duties.scopes;
    if !duties.complete || scopes.is_empty() || scopes[0].range.is_full() {
        return Ok(());
    }
    for (i, scope) in scopes.iter().enumerate() {
        let next = &scopes[(i + 1) % scopes.len()];
        if scope.range.upto != next.range.after {
            let gap = KeyRange::new(scope.range.upto, next.range.after);
            let ended = hand_over_gap(inner, gap).await;
            inner.strays.end();
            ended?;
        }
    }
    Ok(())
}

/// Goes through the blocks held in a part of the ring where this node is no root.
async fn hand_over_gap(inner: &Inner, gap: KeyRange) -> Result<(), ExchangeError> {
    let mut cursor = gap.after;
    while cursor != gap.upto {
        let elsewhere = KeyRange::new(cursor, gap.upto);
        let Some(first) = inner.store.list(elsewhere, 1)?.first().copied() else {
            return Ok(());
        };
        let Ok(nodes) = inner.root_list(&first.key).await else { return Ok(()) };
        let Some(root) = nodes.first().copied() else { return Ok(()) };
        if inner.is_me(&root) || !elsewhere.contains(&root.id.0) {
            // The ring has changed under us: only the next round can tell.
            return Ok(());
        }
        let replica_set = distinct_peers(&nodes, inner.config.replicas);
        let full = replica_set.len() == inner.config.replicas;
        if full && !replica_set.iter().any(|node| inner.is_me(node)) {
            let others: Vec<Node> = replica_set.into_iter().skip(1).collect();
            hand_over(inner, &root, &others, KeyRange::new(cursor, root.id.0)).await?;
        }
        cursor = root.id.0;
    }
    Ok(())
}

/// Gives all blocks of `range` to their root and drops those it has, as far as one of the
/// others bears it out.
async fn hand_over(
    inner: &Inner,
    root: &Node,
    others: &[Node],
    range: KeyRange,
) -> Result<(), ExchangeError> {
    let mut todo = Some(range);
    while let Some(range) = todo {
        inner.strays.watch(Scope::Range(range));
        let mut infos = inner.store.list(range, MAX_RENEW_KEYS)?;
        todo = match infos.last() {
            Some(last) if infos.len() == MAX_RENEW_KEYS && last.key != range.upto => {
                Some(KeyRange::new(last.key, range.upto))
            }
            _ => None,
        };
        // What is kept for a member of the set is where it belongs.
        infos.retain(|info| !diversion::is_held_for_others(inner, &info.key));
        if infos.is_empty() {
            continue;
        }
        let settled = settle_at(inner, root, &infos).await?;
        let settled = borne_out(inner, others, settled).await?;
        let gone = inner.strays.remove_untouched(&*inner.store, settled).await?;
        if !gone.is_empty() {
            tracing::info!(count = gone.len(), ?root, "handed blocks over to their root");
        }
    }
    Ok(())
}

/// Gives the root what its replica set lacks; the blocks that a majority of it has then.
async fn settle_at(
    inner: &Inner,
    root: &Node,
    infos: &[BlockInfo],
) -> Result<Vec<Key>, ExchangeError> {
    let keys: Vec<_> = infos.iter().map(|info| info.key).collect();
    let count = keys.len();
    let header = to_header(&Renew { keys, lease_secs: 0, as_root: true, receipt: None });
    let request = Request { method: messages::RENEW, header, parts: Vec::new() };
    let held = from_header::<RenewReply>(&inner.call(root, request).await?.header)?.held;
    if held.len() != count {
        return Err(ExchangeError::IllFormed);
    }
    let (mut settled, mut offered) = (Vec::new(), Vec::new());
    for (info, state) in infos.iter().zip(held) {
        // A signed block is always offered: the root may hold an older version.
        if state == 1 && info.kind == BlockKind::Content {
            settled.push(info.key);
        } else if inner.lease_left(info) > 0 {
            offered.push(Item { key: info.key, version: info.version });
        }
    }
    let outcome = give(inner, root, &offered, true).await?;
    if outcome.moved == offered.len() as u64 {
        settled.extend(offered.iter().map(|item| item.key));
    }
    Ok(settled)
}

/// Of the blocks that a root says its replica set has, those that one of the set, chosen
/// at random, holds too: a root that lies alone cannot have copies dropped. What is not
/// borne out is kept until the next round asks somebody else.
async fn borne_out(
    inner: &Inner,
    others: &[Node],
    keys: Vec<Key>,
) -> Result<Vec<Key>, ExchangeError> {
    if others.is_empty() || keys.is_empty() {
        return Ok(keys);
    }
    let witness = others[random_below(&*inner.env, others.len() as u64) as usize];
    let count = keys.len();
    let header =
        to_header(&Renew { keys: keys.clone(), lease_secs: 0, as_root: false, receipt: None });
    let request = Request { method: messages::RENEW, header, parts: Vec::new() };
    let held = from_header::<RenewReply>(&inner.call(&witness, request).await?.header)?.held;
    if held.len() != count {
        return Err(ExchangeError::IllFormed);
    }
    Ok(keys.into_iter().zip(held).filter(|(_, held)| *held == 1).map(|(key, _)| key).collect())
}
