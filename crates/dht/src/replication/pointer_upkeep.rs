//! Looking after pointers and holds.
//!
//! Every pointer is checked now and then: its holder is asked whether it still has the copy, in
//! which version and for how long, and one block of each question is fetched and compared with
//! its key; if it is not there, others are fetched, until one is there or too many are not. A
//! pointer to a copy that is gone is dropped, and so are all pointers to a holder that did not
//! answer twice; repair then finds the blocks missing here and brings them, to this node if it has
//! room by then, or else to another holder. The cost is bounded by time: a page
//! of [`PAGE`] keys each [`PAGE_PAUSE`], however many there are.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use atoll_env::{jittered, random_below, sleep};
use atoll_key::{Key, KeyRange, PeerId};
use atoll_net::Peer;
use atoll_overlay::Node;
use atoll_store::{BlockInfo, StoreError, StoredBlock};
use futures_util::future::select;

use super::copying::pace;
use crate::accounting::quota::cost_bytes;
use crate::diversion::follow;
use crate::holdings::pointers::Pointers;
use crate::placement::{by_root, is_member};
use crate::replication::Replication;
use crate::replication::store::store_home;
use crate::rpc::{AskHoldings, HeldCopy, MAX_KEYS, Pointing};

/// How often all pointers are checked, if a pass takes no longer. A guess.
const CHECK_EVERY: Duration = Duration::from_secs(600);
/// How soon a holder that did not answer is asked again.
const CHECK_AGAIN: Duration = Duration::from_secs(60);
/// How long after a start they are checked first. A guess: by then a node has joined the ring.
const AFTER_START: Duration = Duration::from_secs(60);
/// Pointers checked at once.
const PAGE: usize = MAX_KEYS;
/// The least time between two pages: some 7 KB a second.
const PAGE_PAUSE: Duration = Duration::from_secs(10);
/// A holder that has none of so many blocks, drawn at random of a page, is taken to have lost all.
const MAX_SAMPLES: usize = 8;
/// Copies come home while more than one part in so many of this node is free: room that is about
/// to be filled again is not worth the copying.
const ROOMY: u64 = 8;

/// Checks pointers, for ever: soon after a start, since holders may have let copies go while this
/// node was away, and then now and then.
pub(crate) async fn run(replication: Arc<Replication>) {
    sleep(&*replication.env, jittered(&*replication.env, AFTER_START)).await;
    // Which holders are silent is not counted yet: this node may not have reached the ring.
    if let Err(error) = pass(&replication, &BTreeSet::new()).await {
        tracing::error!(%error, "pointers could not be checked");
    }
    let mut silent: BTreeSet<PeerId> = BTreeSet::new();
    loop {
        let pause = if silent.is_empty() { CHECK_EVERY } else { CHECK_AGAIN };
        let slept = sleep(&*replication.env, jittered(&*replication.env, pause));
        select(slept, Box::pin(replication.pointer_doubts.notified())).await;
        match pass(&replication, &silent).await {
            Ok(now_silent) => silent = now_silent,
            Err(error) => tracing::error!(%error, "pointers could not be checked"),
        }
        // Doubts that are raised all the time change nothing about the pace.
        sleep(&*replication.env, PAGE_PAUSE).await;
    }
}

/// Goes through all records once. `silent` are the holders that did not answer the last time;
/// returns those that did not answer now.
async fn pass(
    replication: &Replication,
    silent: &BTreeSet<PeerId>,
) -> Result<BTreeSet<PeerId>, StoreError> {
    let (mut after, mut silent_now) = (Key::MAX, BTreeSet::new());
    loop {
        let page = replication.pointers.list(KeyRange::new(after, Key::MAX), PAGE)?;
        let ended = |hold: &&BlockInfo| {
            is_member(replication, &hold.key)
                || matches!(replication.store.info(&hold.key), Ok(None))
        };
        let dissolved = Pointers::holds(&page).filter(ended);
        replication.pointers.forget(dissolved.map(|hold| hold.key).collect()).await;
        let pointers: Vec<BlockInfo> = Pointers::pointers(&page).copied().collect();
        check_page(replication, &pointers, silent, &mut silent_now).await?;
        match page.last() {
            Some(last) if page.len() == PAGE && last.key != Key::MAX => after = last.key,
            _ => return Ok(silent_now),
        }
        sleep(&*replication.env, PAGE_PAUSE).await;
    }
}

async fn check_page(
    replication: &Replication,
    pointers: &[BlockInfo],
    silent: &BTreeSet<PeerId>,
    silent_now: &mut BTreeSet<PeerId>,
) -> Result<(), StoreError> {
    let mut needless = held_here(replication, pointers).await?;
    needless.extend(of_other_sets(replication, pointers).await);
    follow::come_home(replication, needless).await;
    let keys: Vec<Key> = pointers.iter().map(|info| info.key).collect();
    let mut lost = Vec::new();
    for (holder, places) in follow::by_holder(replication, &keys).await {
        let its: Vec<BlockInfo> = places.iter().map(|place| pointers[*place]).collect();
        match ask(replication, &holder, &its).await {
            Some(held) => lost.extend(judge(replication, &holder, &its, held).await),
            None if silent.contains(&holder.id) => {
                tracing::warn!(%holder, count = its.len(), "the holder of copies is gone");
                lost.extend(its.iter().map(|info| info.key));
            }
            None => {
                silent_now.insert(holder.id);
            }
        }
    }
    if !lost.is_empty() {
        replication.pointers.forget(lost).await;
        replication.requests.kick();
    }
    take_home(replication, &keys).await
}

/// Pointers to blocks that are here as well, as after a crash between two steps; a copy here
/// that is older is removed.
async fn held_here(
    replication: &Replication,
    pointers: &[BlockInfo],
) -> Result<Vec<Key>, StoreError> {
    let (mut needless, mut outdated) = (Vec::new(), Vec::new());
    for pointer in pointers {
        match replication.store.info(&pointer.key)? {
            Some(held) if held.version >= pointer.version => needless.push(pointer.key),
            Some(_) => outdated.push(pointer.key),
            None => {}
        }
    }
    if !outdated.is_empty() {
        replication.store.remove(outdated).await?;
    }
    Ok(needless)
}

/// Pointers to blocks whose replica set this node has left: their copies are strays of their
/// holders.
async fn of_other_sets(replication: &Replication, pointers: &[BlockInfo]) -> Vec<Key> {
    let keys: Vec<Key> = pointers.iter().map(|info| info.key).collect();
    let replicas = replication.config.replicas;
    let sets = by_root(replication, keys, |key| *key, replicas, PAGE).await;
    let is_other =
        |set: &[Node]| set.len() == replicas && !set.iter().any(|node| replication.is_me(node));
    let others = sets.into_iter().filter(|(set, _)| is_other(set));
    others.flat_map(|(_, its)| its).collect()
}

/// What a holder says that it keeps for this node; `None` if it does not answer.
async fn ask(
    replication: &Replication,
    holder: &Peer,
    its: &[BlockInfo],
) -> Option<Vec<Option<HeldCopy>>> {
    let keys: Vec<Key> = its.iter().map(|info| info.key).collect();
    let node = Node::of(*holder);
    let asked = AskHoldings { keys, pointing: Pointing::Yes };
    let (reply, _) = replication.call(&node, &asked, Vec::new()).await.ok()?;
    replication.learn(node, reply.spare_bytes, replication.env.now());
    Some(reply.held.0)
}

/// Which copies a holder does not have as it should; learns of the others how long they stay.
async fn judge(
    replication: &Replication,
    holder: &Peer,
    its: &[BlockInfo],
    held: Vec<Option<HeldCopy>>,
) -> Vec<Key> {
    let (mut lost, mut there) = (Vec::new(), Vec::new());
    for (info, held) in its.iter().zip(held) {
        match held.filter(|held| held.version >= info.version) {
            Some(held) => {
                let expires = replication.expiry(held.lease_secs);
                replication.pointers.extend(&info.key, expires, held.owner());
                there.push(info.key);
            }
            None => lost.push(info.key),
        }
    }
    // Others are looked at until one is there: a holder that dropped everything is found out at
    // once, and one that lost a block to rot costs one question more.
    for _ in 0..MAX_SAMPLES.min(there.len()) {
        let sample =
            there.swap_remove(random_below(&*replication.env, there.len() as u64) as usize);
        if follow::own(replication, &sample).await.is_some() {
            return lost;
        }
        tracing::warn!(%holder, key = %sample, "a holder does not have what it says");
        lost.push(sample);
    }
    lost.extend(there);
    lost
}

/// Fetches copies whose pointers are among `keys`, while there is much room here.
async fn take_home(replication: &Replication, keys: &[Key]) -> Result<(), StoreError> {
    for key in keys {
        let usage = replication.store.usage();
        let free_bytes = replication.headroom.free_bytes(usage);
        if free_bytes <= usage.capacity_bytes / ROOMY {
            return Ok(());
        }
        let Some(info) = replication.pointers.pointed(key) else { continue };
        let Some(block) = follow::own(replication, key).await else { continue };
        let Ok(version) = info.kind.verify(key, &block.bytes) else { continue };
        let bytes = block.bytes.len() as u64;
        let mut stored: StoredBlock = replication.to_store(&block, version);
        stored.info.owner = info.owner;
        if cost_bytes(stored.info.len_bytes) > free_bytes {
            return Ok(());
        }
        if !store_home(replication, stored).await {
            return Ok(());
        }
        replication.repair.done(1, bytes);
        pace(replication, bytes).await;
    }
    Ok(())
}
