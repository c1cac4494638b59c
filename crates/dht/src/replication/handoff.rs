//! Blocks that a node holds without belonging to their replica set any more (CFS §5.1).
//!
//! They are left over when a node joins before this one, when one of this node's virtual
//! servers leaves its position (§5.3), or when a replica set comes back after others have taken
//! its place. They are given to the members of the set that lack them, kept for days of grace,
//! and dropped when the set proves to hold them (`docs/design/dht.md`, rules R1, R2). Until then
//! any peer that asks here gets them.
//!
//! The ring is gone through root by root. Each range has times of its own: one whose root fails
//! or refuses does not delay another. A round looks at [`MAX_RANGES`] ranges and [`MAX_PAGES`]
//! pages of blocks at most, and the next goes on from there.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use atoll_env::{Instant, Notify, jittered, sleep};
use atoll_key::{Key, KeyRange};
use atoll_overlay::{Node, ServedRanges};
use atoll_store::{BlockInfo, Usage};

use super::copying::{ExchangeError, give};
use crate::accounting::quota::cost_bytes;
use crate::diversion;
use crate::holdings::copies::ask_holdings;
use crate::lease_clock::least_lease;
use crate::replication::Replication;
use crate::replication::eviction::drop_proven;
use crate::replication::reconcile::Item;
use crate::rpc::budget::PeerBudget;
use crate::rpc::{HeldCopy, MAX_BATCH_BLOCKS};

/// Ranges remembered; of more, the grace of some begins again.
const MAX_STRAY_RANGES: usize = 4096;
/// Ranges looked at in a round.
const MAX_RANGES: usize = 64;
/// Roots that may not be found in a round.
const MAX_LOST_ROOTS: usize = 4;
/// How far the next root is looked for after one that is not found: a thousandth of the ring.
const SKIP_BITS: u32 = 502;
/// Pages of blocks looked at in a round.
const MAX_PAGES: usize = 256;
/// How long a range is left alone when its replica set has what it should have. A guess.
const RECHECK: Duration = Duration::from_secs(600);
/// How long until the next look where the last one did not come to all.
const AGAIN: Duration = Duration::from_secs(1);
/// How long when all of it is kept for members of its replica set: then it is not stray, and a
/// look only finds out whether the set has it still. A guess.
const HELD_RECHECK: Duration = Duration::from_secs(6 * 3600);
/// How long otherwise; twice as long each time.
const RETRY: Duration = Duration::from_secs(60);
/// At most so many doublings: about an hour.
const MAX_DOUBLINGS: u32 = 6;
/// Grace in a store that is nearly full. A guess: longer than a reboot.
const SHORT_GRACE: Duration = Duration::from_secs(600);
/// A store is nearly full from so many hundredths of its capacity on.
const NEARLY_FULL_PERCENT: u64 = 90;

/// What is known of strays.
#[derive(Default)]
pub(crate) struct Handoff {
    /// Notified when they should be gone through: after a round of repair.
    pub due: Notify,
    /// The ranges of strays, by the position of their roots.
    ranges: Mutex<BTreeMap<Key, Stray>>,
}

/// A range of strays.
#[derive(Clone, Copy, Debug)]
struct Stray {
    /// Where it begins; it ends at its root.
    after: Key,
    /// Since when this node has not belonged to its replica set, as far as it knows.
    since: Instant,
    /// When it is due to be looked at.
    next_at: Instant,
    /// How often in a row its replica set did not have what it should.
    failures: u32,
    /// Up to where a look that was interrupted had come.
    resume: Option<Key>,
}

impl Handoff {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<Key, Stray>> {
        self.ranges.lock().expect("no holder of this lock panics")
    }

    /// The range that `key` was in at the last look.
    fn containing(&self, key: &Key) -> Option<(Key, Stray)> {
        let ranges = self.lock();
        let (root, stray) = ranges.range(*key..).next().or_else(|| ranges.iter().next())?;
        KeyRange::new(stray.after, *root).contains(key).then_some((*root, *stray))
    }

    /// The range of `root` that begins with `key`: as it was, or as part of one it was in.
    fn enter(&self, key: &Key, root: Key, now: Instant) -> Stray {
        let fresh = Stray { after: *key, since: now, next_at: now, failures: 0, resume: None };
        let known = self.lock().get(&root).copied();
        let around =
            || self.containing(key).map(|(_, around)| Stray { since: around.since, ..fresh });
        let stray = known.or_else(around).unwrap_or(fresh);
        Stray { after: key.previous(), ..stray }
    }

    fn put(&self, root: Key, stray: Stray, now: Instant) {
        let mut ranges = self.lock();
        if ranges.len() >= MAX_STRAY_RANGES && !ranges.contains_key(&root) {
            let due = ranges.iter().find(|(_, stray)| stray.next_at <= now).map(|(root, _)| *root);
            let out = due.or_else(|| ranges.keys().next().copied());
            out.map(|out| ranges.remove(&out));
        }
        ranges.insert(root, stray);
    }

    /// Blocks may have become stray: their ranges are due to be looked at.
    pub(crate) fn hasten(&self, keys: &[Key], now: Instant) {
        for key in keys {
            if let Some((root, stray)) = self.containing(key) {
                self.put(root, Stray { next_at: stray.next_at.min(now), ..stray }, now);
            }
        }
    }

    fn forget(&self, root: &Key) {
        self.lock().remove(root);
    }
}

/// What a round may still do for strays.
struct Budget {
    ranges: usize,
    pages: usize,
}

/// Goes through strays after each round of repair, and again while some are left, for ever. Nothing
/// waits for it: they are other nodes' blocks.
pub(crate) async fn run(replication: Arc<Replication>) {
    loop {
        replication.handoff.due.notified().await;
        let served = replication.overlay.served_ranges(replication.config.replicas);
        let again_after = match hand_over_strays(&replication, &served).await {
            Ok(false) => continue,
            Ok(true) => AGAIN,
            Err(error) => {
                tracing::warn!(%error, "strays could not be gone through");
                RETRY
            }
        };
        sleep(&*replication.env, jittered(&*replication.env, again_after)).await;
        replication.handoff.due.notify();
    }
}

/// Gives blocks this node should no longer hold to the nodes that should, and drops them after
/// their grace. Whether some are left for the next time.
async fn hand_over_strays(
    replication: &Replication,
    served: &ServedRanges,
) -> Result<bool, ExchangeError> {
    let scopes = &served.ranges;
    if !served.complete || scopes.is_empty() || scopes[0].range.is_full() {
        return Ok(false);
    }
    let mut budget = Budget { ranges: MAX_RANGES, pages: MAX_PAGES };
    for (i, scope) in scopes.iter().enumerate() {
        let next = &scopes[(i + 1) % scopes.len()];
        if scope.range.upto != next.range.after {
            let gap = KeyRange::new(scope.range.upto, next.range.after);
            hand_over_gap(replication, gap, &mut budget).await?;
        }
    }
    Ok(budget.ranges == 0 || budget.pages == 0)
}

/// Goes through the blocks held in a part of the ring where this node is no root.
async fn hand_over_gap(
    replication: &Replication,
    gap: KeyRange,
    budget: &mut Budget,
) -> Result<(), ExchangeError> {
    let mut cursor = gap.after;
    while cursor != gap.upto && budget.ranges > 0 && budget.pages > 0 {
        let elsewhere = KeyRange::new(cursor, gap.upto);
        let Some(first) = replication.store.list(elsewhere, 1)?.first().copied() else { break };
        let now = replication.env.now();
        let known =
            replication.handoff.containing(&first.key).filter(|(_, stray)| stray.next_at > now);
        cursor = match known {
            Some((root, _)) => root,
            None => {
                budget.ranges -= 1;
                hand_over_first(replication, &first.key, elsewhere, budget).await?
            }
        };
        if !elsewhere.contains(&cursor) {
            break;
        }
    }
    Ok(())
}

/// Hands over the blocks of the root of `first`, and says where the next root's begin.
async fn hand_over_first(
    replication: &Replication,
    first: &Key,
    elsewhere: KeyRange,
    budget: &mut Budget,
) -> Result<Key, ExchangeError> {
    let copies = replication.config.replicas;
    let set = replication.overlay.find_replica_set(first, copies).await.unwrap_or_default();
    let Some(root) = set.first().copied() else {
        // Where one root is not found others may be; looking for it may have taken long.
        budget.ranges = budget.ranges.saturating_sub(MAX_RANGES / MAX_LOST_ROOTS);
        return Ok(first.wrapping_add(&Key::power_of_two(SKIP_BITS)));
    };
    if replication.is_me(&root) || !elsewhere.contains(&root.id.0) {
        // The ring has changed under us: only the next round can tell.
        return Ok(elsewhere.upto);
    }
    if set.len() < replication.config.replicas || set.iter().any(|node| replication.is_me(node)) {
        replication.handoff.forget(&root.id.0);
        return Ok(root.id.0);
    }
    let mut stray = replication.handoff.enter(first, root.id.0, replication.env.now());
    let is_over = replication.env.now().since(stray.since) >= grace(replication);
    let mut rest = Some(KeyRange::new(stray.resume.take().unwrap_or(stray.after), root.id.0));
    let (mut is_settled, mut are_held) = (true, true);
    while let Some(range) = rest.filter(|_| budget.pages > 0) {
        budget.pages -= 1;
        let infos = replication.store.list(range, MAX_BATCH_BLOCKS)?;
        diversion::end_foreign_holds(replication, &set, &infos).await;
        is_settled &= hand_over_page(replication, &set, &infos, is_over).await?;
        are_held &= droppable(replication, &infos).is_empty();
        rest = match infos.last() {
            Some(last) if infos.len() == MAX_BATCH_BLOCKS && last.key != range.upto => {
                Some(KeyRange::new(last.key, range.upto))
            }
            _ => None,
        };
    }
    let now = replication.env.now();
    stray.failures = if is_settled { 0 } else { stray.failures + 1 };
    let doublings = stray.failures.saturating_sub(1).min(MAX_DOUBLINGS);
    stray.next_at = match rest {
        Some(range) => {
            stray.resume = Some(range.after);
            now
        }
        None if is_settled && are_held => now + HELD_RECHECK,
        None if is_settled => {
            now + RECHECK.min(grace(replication).saturating_sub(now.since(stray.since)))
        }
        None => now + RETRY * 2u32.pow(doublings),
    };
    replication.handoff.put(root.id.0, stray, now);
    Ok(root.id.0)
}

/// How long strays are kept after they have been given away.
fn grace(replication: &Replication) -> Duration {
    match is_nearly_full(&replication.store.usage()) {
        true => replication.config.stray_grace.min(SHORT_GRACE),
        false => replication.config.stray_grace,
    }
}

/// Whether the blocks held, without garbage that compaction gives back, nearly fill a store.
fn is_nearly_full(usage: &Usage) -> bool {
    let live_bytes = usage.block_bytes.saturating_add(usage.blocks.saturating_mul(cost_bytes(0)));
    live_bytes >= usage.capacity_bytes / 100 * NEARLY_FULL_PERCENT
}

/// Gives the replica set what it lacks of a page of blocks; if their grace `is_over`, drops those
/// that it proves to hold. Whether nothing is left to do for them at present.
async fn hand_over_page(
    replication: &Replication,
    set: &[Node],
    infos: &[BlockInfo],
    is_over: bool,
) -> Result<bool, ExchangeError> {
    // What has expired goes its own way.
    let live = infos.iter().filter(|info| replication.lease_left(info) > 0);
    let live: Vec<BlockInfo> = live.copied().collect();
    if live.is_empty() {
        return Ok(true);
    }
    let is_settled = give_to_set(replication, set, &live).await;
    if !is_over {
        return Ok(is_settled);
    }
    let live = droppable(replication, &live);
    let gone = drop_proven(replication, set, &live).await?;
    if !gone.is_empty() {
        tracing::info!(count = gone.len(), root = ?set[0], "handed blocks over to their replicas");
    }
    Ok(is_settled && gone.len() == live.len())
}

/// Without what is kept for members of the replica set: their pointers lead to these copies.
fn droppable(replication: &Replication, infos: &[BlockInfo]) -> Vec<BlockInfo> {
    let is_held = |info: &&BlockInfo| diversion::is_held_for_others(replication, &info.key);
    infos.iter().filter(|info| !is_held(info)).copied().collect()
}

/// Gives each block to the first member of the set that lacks it: repair at the root brings it to
/// the others before the next look. Whether no member lacks any.
async fn give_to_set(replication: &Replication, set: &[Node], live: &[BlockInfo]) -> bool {
    let keys: Vec<Key> = live.iter().map(|info| info.key).collect();
    let mut given = vec![false; live.len()];
    let mut is_settled = true;
    for member in set {
        let Some(said) = ask_holdings(replication, member, keys.clone()).await else {
            is_settled = false;
            continue;
        };
        let mut lacking = Vec::new();
        for ((info, said), given) in live.iter().zip(said).zip(&mut given) {
            let lasts =
                |said: &HeldCopy| said.lease_secs >= least_lease(replication.lease_left(info));
            let said = said.filter(lasts);
            let has = said.is_some_and(|said| !info.kind.replaces(info.version, said.version));
            if !has && !std::mem::replace(given, true) {
                lacking.push(Item { key: info.key, version: info.version });
            }
            // A member that joins may hold another version, with siblings that this node lacks.
            is_settled &= said.is_some_and(|said| info.kind.reaches(said.version, info.version));
        }
        let mut time = PeerBudget::of(replication, member.peer.id);
        let given_to = give(replication, member, &lacking, &mut time).await;
        let left = match given_to {
            Ok((outcome, _)) => !outcome.left.is_empty(),
            Err(error) => {
                tracing::info!(%error, ?member, "strays could not be given away");
                true
            }
        };
        if left {
            // Another member may have room.
            for (info, given) in live.iter().zip(&mut given) {
                *given &= lacking.iter().all(|item| item.key != info.key);
            }
        }
    }
    is_settled
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(n: u8) -> Key {
        Key::hashed([n; 32])
    }

    fn at(secs: u64) -> Instant {
        Instant::default() + Duration::from_secs(secs)
    }

    #[test]
    fn a_range_keeps_its_grace_when_a_node_joins_within_it() {
        let handoff = Handoff::default();
        let stray = handoff.enter(&key(10), key(50), at(5));
        handoff.put(key(50), stray, at(5));
        assert_eq!(handoff.enter(&key(12), key(50), at(9)).since, at(5));
        assert_eq!(handoff.enter(&key(12), key(30), at(9)).since, at(5), "a root within it");
        assert_eq!(handoff.enter(&key(60), key(70), at(9)).since, at(9));
        handoff.forget(&key(50));
        assert_eq!(
            handoff.enter(&key(12), key(50), at(9)).since,
            at(9),
            "it was no stray for a time"
        );
    }

    /// After a large volume had expired, strays that should have been kept for days were dropped
    /// after minutes.
    #[test]
    fn garbage_does_not_shorten_the_grace() {
        let usage = |blocks| Usage {
            blocks,
            block_bytes: blocks * 8192,
            disk_bytes: 95 << 20,
            capacity_bytes: 100 << 20,
        };
        assert!(!is_nearly_full(&usage(1000)), "8 MiB live");
        assert!(is_nearly_full(&usage(11_500)), "90 MiB live");
    }

    #[test]
    fn ranges_are_bounded() {
        let handoff = Handoff::default();
        for n in 0..2 * MAX_STRAY_RANGES as u32 {
            let root = atoll_key::BlockHash::of(&n.to_be_bytes()).key();
            let stray = handoff.enter(&root, root, at(u64::from(n)));
            handoff.put(root, stray, at(u64::from(n)));
        }
        assert_eq!(handoff.lock().len(), MAX_STRAY_RANGES);
    }
}
