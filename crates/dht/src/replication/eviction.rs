//! Dropping copies whose leases last (`docs/design/dht.md`, rule R1): strays after their grace
//! (`handoff`), and copies that no longer fit because a node's owner takes disk space back
//! (TFS §2, dynamic contribution: "delete contributory files").
//!
//! **Invariant:** a copy is dropped only after two other members of the block's present replica
//! set, or all where fewer are wanted, have proven to hold it, while this node denied having it.
//! A block that is not proven stays, and repair at its root gives it to the others.
//!
//! It does not know whether those others are about to fail.

use std::collections::VecDeque;

use atoll_env::random_below;
use atoll_key::Key;
use atoll_overlay::Node;
use atoll_store::{BlockInfo, StoreError};

use crate::holdings::pending_removals::PendingRemovals;
use crate::holdings::proof::proven_by;
use crate::placement::expected_replicas;
use crate::replication::Replication;
use crate::rpc::MAX_BATCH_BLOCKS;

/// Others that must hold a block.
const PROVERS: usize = 2;

/// Removes those of `blocks` that others hold, and says which they are.
///
/// # Errors
/// If the store fails. What has been removed by then others hold.
pub(crate) async fn give_up(
    replication: &Replication,
    mut blocks: Vec<BlockInfo>,
) -> Result<Vec<BlockInfo>, StoreError> {
    blocks.sort_by_key(|info| info.key);
    let mut blocks = VecDeque::from(blocks);
    let mut gone = Vec::new();
    while let Some(first) = blocks.front().copied() {
        let copies = replication.config.replicas;
        let found = replication.overlay.find_replica_set(&first.key, copies).await;
        let Ok(set) = found else { break };
        let Some(root) = set.first().map(|node| node.id.0) else { break };
        let reach = root.wrapping_sub(&first.key);
        let of_root = |at: &BlockInfo| at.key.wrapping_sub(&first.key) <= reach;
        let count = blocks.iter().take_while(|info| of_root(info)).count();
        let same: Vec<BlockInfo> = blocks.drain(..count.max(1)).collect();
        for some in same.chunks(MAX_BATCH_BLOCKS) {
            let removed = drop_proven(replication, &set, some).await?;
            gone.extend(some.iter().filter(|info| removed.contains(&info.key)));
        }
    }
    Ok(gone)
}

/// Removes those of `blocks`, all of one replica set, that enough others of it prove to hold.
///
/// # Errors
/// If the store fails.
pub(crate) async fn drop_proven(
    replication: &Replication,
    set: &[Node],
    blocks: &[BlockInfo],
) -> Result<Vec<Key>, StoreError> {
    let mut others: Vec<Node> =
        set.iter().filter(|node| !replication.is_me(node)).copied().collect();
    let is_member = others.len() < set.len();
    // Nodes that are away for a moment do not make one copy enough.
    let should_be =
        if is_member { expected_replicas(replication) } else { replication.config.replicas };
    let wanted = PROVERS.min(should_be);
    if wanted == 0 || others.len() < wanted || (!is_member && others.len() < should_be) {
        return Ok(Vec::new());
    }
    for i in (1..others.len()).rev() {
        others.swap(i, random_below(&*replication.env, i as u64 + 1) as usize);
    }
    // While they are asked, this node denies having the blocks: the slow are asked last.
    others.sort_by_key(|node| !replication.backoff.is_fit(&node.peer.id, replication.env.now()));
    let _one = replication.eviction.lock().await;
    replication.pending.watch(blocks.iter().map(|info| info.key).collect());
    let _watching = Watching(&replication.pending);
    drop_watched(replication, &others, wanted, blocks).await
}

/// Ends the watch of pending removals when dropped, also when the removal is cancelled.
pub(super) struct Watching<'a>(pub(super) &'a PendingRemovals);

impl Drop for Watching<'_> {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// As [`drop_proven`], while the blocks are watched: asks as many of `others` as are wanted, and
/// the rest where these do not prove enough.
async fn drop_watched(
    replication: &Replication,
    others: &[Node],
    wanted: usize,
    blocks: &[BlockInfo],
) -> Result<Vec<Key>, StoreError> {
    let mut open: Vec<(BlockInfo, usize)> = Vec::with_capacity(blocks.len());
    for info in blocks {
        // As it is since it is watched.
        open.extend(replication.store.info(&info.key)?.map(|held| (held, 0)));
    }
    let mut enough = Vec::new();
    let (first, rest) = others.split_at(wanted);
    for provers in [first, rest] {
        let asked: Vec<BlockInfo> = open.iter().map(|(info, _)| *info).collect();
        for proven in proven_by(replication, provers, &asked).await {
            open.iter_mut().zip(proven).for_each(|((_, count), is)| *count += usize::from(is));
        }
        open.retain(|(info, count)| {
            let is_open = *count < wanted;
            if !is_open {
                enough.push(info.key);
            }
            is_open
        });
        if open.is_empty() {
            break;
        }
    }
    replication.pending.remove_untouched(&*replication.store, enough).await
}
