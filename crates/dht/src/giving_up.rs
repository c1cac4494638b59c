//! Giving up copies for want of room (TFS §2, dynamic contribution: "delete contributory
//! files"): a node's owner wants his disk back.
//!
//! **Invariant:** a block is given up only while two others of its replica set, or all where
//! fewer are wanted, are seen to hold it, at this version and for about as long: one that lies
//! alone cannot have the last copy dropped. Nodes that give up the same block at once do not
//! count on each other ([`crate::leaving`]). What is not borne out stays, and repair at the
//! block's root sees to it that others get it.
//!
//! What it does not know: whether those others are about to fail.

use std::collections::VecDeque;

use atoll_key::Key;
use atoll_overlay::{Node, distinct_peers};
use atoll_store::{BlockInfo, StoreError};
use futures_util::future::join_all;

use crate::inner::Inner;
use crate::leaving::Scope;
use crate::messages::MAX_RENEW_KEYS;
use crate::replicas::expected_replicas;
use crate::witness::{Expected, has};

/// Others that must hold a block.
const WITNESSES: usize = 2;

/// Removes those of `blocks` that others hold, and says which they are.
///
/// # Errors
/// If the store fails. What has been removed by then others hold.
pub(crate) async fn give_up(
    inner: &Inner,
    blocks: Vec<BlockInfo>,
) -> Result<Vec<BlockInfo>, StoreError> {
    let _one = inner.giving_up.lock().await;
    let mut gone = Vec::new();
    for some in blocks.chunks(MAX_RENEW_KEYS) {
        inner.leaving.watch(Scope::Keys(some.iter().map(|info| info.key).collect()));
        let removed = give_up_some(inner, some).await;
        inner.leaving.end();
        let removed = removed?;
        gone.extend(some.iter().filter(|info| removed.contains(&info.key)));
    }
    Ok(gone)
}

async fn give_up_some(inner: &Inner, some: &[BlockInfo]) -> Result<Vec<Key>, StoreError> {
    let mut blocks = Vec::with_capacity(some.len());
    for info in some {
        // As it is since it is watched.
        let Some(held) = inner.store.info(&info.key)? else { continue };
        let lease_secs = inner.lease_left(&held);
        blocks.push(Expected { key: held.key, version: held.version, lease_secs });
    }
    blocks.sort_by_key(|expected| expected.key);
    let mut blocks = VecDeque::from(blocks);
    let mut borne_out = Vec::new();
    while let Some(first) = blocks.front().copied() {
        let Ok(nodes) = inner.root_list(&first.key).await else { break };
        let Some(root) = nodes.first().map(|node| node.id.0) else { break };
        let reach = root.wrapping_sub(&first.key);
        let of_root = |at: &Expected| at.key.wrapping_sub(&first.key) <= reach;
        let count = blocks.iter().take_while(|expected| of_root(expected)).count();
        let same: Vec<Expected> = blocks.drain(..count.max(1)).collect();
        borne_out.extend(held_by_others(inner, &nodes, &same).await);
    }
    inner.leaving.remove_untouched(&*inner.store, borne_out).await
}

/// Of blocks with the same root, the first of `nodes`, those that enough others hold.
async fn held_by_others(inner: &Inner, nodes: &[Node], blocks: &[Expected]) -> Vec<Key> {
    let set = distinct_peers(nodes, inner.config.replicas);
    let others: Vec<Node> = set.into_iter().filter(|node| !inner.is_me(node)).collect();
    // Nodes that are away for a moment do not make one copy enough.
    let wanted = WITNESSES.min(expected_replicas(inner));
    if wanted == 0 || others.len() < wanted {
        return Vec::new();
    }
    let answers = join_all(others.iter().map(|node| has(inner, node, blocks))).await;
    let count = |at: usize| answers.iter().flatten().filter(|held| held[at]).count();
    let borne_out = blocks.iter().enumerate().filter(|(at, _)| count(*at) >= wanted);
    borne_out.map(|(_, expected)| expected.key).collect()
}
