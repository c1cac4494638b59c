//! Removing blocks that were released, and not taking copies of them that missed the release (`docs/design/dht.md`,
//! *Releases*).
//!
//! **Invariant:** a block is removed only while it is on record that it was released, and no put or renewal of it is
//! under way ([`PendingRemovals`](crate::holdings::pending_removals::PendingRemovals)).
//!
//! A put after the release was acknowledged by a majority of the replica set. So if this node has missed it, most of the
//! others hold the block, and this one takes a copy then; one holder has missed the release. In a ring of fewer nodes than a
//! replica set has, one holder may be all that is left of the majority: there it takes a copy if all others hold it.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use atoll_env::sleep;
use atoll_key::{Key, PeerId};
use atoll_overlay::Node;
use futures_util::future::{join_all, select};

use super::eviction::Watching;
use super::upkeep::reclaim;
use crate::holdings::copies::ask_holdings;
use crate::placement::{MAX_SETS, by_root, expected_replicas};
use crate::replication::Replication;
use crate::rpc::{Block, MAX_BATCH_BLOCKS, MAX_KEYS, is_majority};
use crate::stats::add;

/// How long to wait when blocks could not be removed, or were being put.
const AGAIN_AFTER_SECS: u64 = 30;
/// How long a wait is at most: clocks are set.
const MAX_WAIT: Duration = Duration::from_secs(60);

/// Removes what was released, for ever.
pub(crate) async fn run(replication: Arc<Replication>) {
    loop {
        let (env, releases) = (&replication.env, &replication.releases);
        let now = env.unix_ms() / 1000;
        match releases.next_due() {
            Some(at) if at <= now => {
                let mut removed = 0;
                while releases.next_due().is_some_and(|at| at <= now) {
                    removed += remove_due(&replication, now).await;
                }
                if removed > 0 {
                    tracing::debug!(removed, "removed blocks that were released");
                    add(&replication.counters.released_blocks, removed);
                    reclaim(&replication).await;
                }
            }
            Some(at) => {
                let wait = Duration::from_secs(at - now).min(MAX_WAIT);
                let sooner = std::pin::pin!(releases.sooner.notified());
                select(sooner, sleep(&**env, wait)).await;
            }
            None => releases.sooner.notified().await,
        }
    }
}

/// Removes some of what is due; how many blocks were here.
async fn remove_due(replication: &Replication, now_unix_secs: u64) -> u64 {
    let releases = &replication.releases;
    let again_at = now_unix_secs + AGAIN_AFTER_SECS;
    let due = releases.take_due(now_unix_secs, MAX_BATCH_BLOCKS);
    let (here, elsewhere): (Vec<Key>, Vec<Key>) =
        due.into_iter().partition(|key| matches!(replication.store.info(key), Ok(Some(_))));
    let is_pointed = |key: &Key| replication.pointers.pointed(key).is_some();
    // Their holders have heard of the release, too.
    replication.pointers.forget(elsewhere.into_iter().filter(is_pointed).collect()).await;
    if here.is_empty() {
        return 0;
    }
    let _one = replication.eviction.lock().await;
    replication.pending.watch(here.iter().copied().collect());
    let _watching = Watching(&replication.pending);
    // As it is since they are watched.
    let is_released = |key: &&Key| releases.released(key).is_some();
    let released: Vec<Key> = here.iter().filter(is_released).copied().collect();
    match replication.pending.remove_untouched(&*replication.store, released.clone()).await {
        Ok(removed) => {
            let gone: BTreeSet<Key> = removed.iter().copied().collect();
            let left = released.into_iter().filter(|key| !gone.contains(key));
            releases.remove_at(left, again_at);
            removed.len() as u64
        }
        Err(error) => {
            tracing::error!(%error, "released blocks could not be removed");
            releases.remove_at(released.into_iter(), again_at);
            0
        }
    }
}

/// Which of the blocks that another node has were released, so that this node takes no copy of them.
pub(crate) async fn stay_released(replication: &Replication, keys: &[Key]) -> BTreeSet<Key> {
    let is_released = |key: &&Key| {
        replication.releases.released(key).is_some() && replication.known(key).is_none()
    };
    let released: Vec<Key> = keys.iter().filter(is_released).copied().collect();
    let mut stay = BTreeSet::new();
    for some in released.chunks(MAX_KEYS) {
        let places = (0..some.len()).collect();
        let copies = replication.config.replicas;
        let mut held = vec![0; some.len()];
        let mut are_all = vec![false; some.len()];
        for (set, places) in
            by_root(replication, places, |at: &usize| some[*at], copies, MAX_SETS).await
        {
            let others: Vec<&Node> = set.iter().filter(|node| !replication.is_me(node)).collect();
            let asks = others.iter().map(|node| {
                let keys = places.iter().map(|at| some[*at]).collect();
                async move { ask_holdings(replication, node, keys).await }
            });
            for answer in join_all(asks).await.into_iter().flatten() {
                for (at, copy) in places.iter().zip(answer) {
                    held[*at] += u32::from(copy.is_some());
                }
            }
            if set.len() < copies && !others.is_empty() {
                places.iter().for_each(|at| are_all[*at] = held[*at] as usize == others.len());
            }
        }
        let wanted = u32::try_from(expected_replicas(replication) + 1).expect("k is small");
        let places = some.iter().zip(held.into_iter().zip(are_all));
        let (again, gone): (Vec<_>, Vec<_>) =
            places.partition(|(_, (held, are_all))| *are_all || is_majority(*held, wanted));
        replication.releases.forget(again.into_iter().map(|(key, _)| *key).collect()).await;
        stay.extend(gone.into_iter().map(|(key, _)| *key));
    }
    stay
}

/// Those of a batch that came from another node and that this one does not take, because they were released.
pub(crate) async fn refused(replication: &Replication, blocks: &[Block]) -> BTreeSet<Key> {
    let removable = blocks.iter().filter(|block| block.header.kind.release_removes());
    let keys: Vec<Key> = removable.map(|block| block.header.key).collect();
    stay_released(replication, &keys).await
}

/// Of `keys`, those that `node` has not refused of late because they were released.
pub(super) fn not_refused(replication: &Replication, node: &PeerId, keys: Vec<Key>) -> Vec<Key> {
    let (releases, now) = (&replication.releases, replication.env.now());
    keys.into_iter().filter(|key| !releases.is_refused(node, key, now)).collect()
}
