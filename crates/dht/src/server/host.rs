//! The holder's part: keeping copies for members of replica sets that have no room.
//!
//! A holder admits a diverted copy as it admits any: charged to the publisher whose receipt came
//! with it, or to whom the replica set vouches for, or to the member that brings it. It takes none
//! that it holds already or should hold itself, for then the block would have a copy less than
//! its members count. And one member can fill no more than a quarter of a node so.

use atoll_key::{BlockKind, Key};
use atoll_net::header::Capped;
use atoll_net::{Peer, Refusal, Reply, Request};
use atoll_overlay::Node;
use atoll_store::{BlockInfo, StoreError};

use crate::accounting::admission::Origin;
use crate::accounting::quota::cost_bytes;
use crate::diversion::{MAX_SETS, has_room, holds_left, is_held_for_others, spare_bytes_for};
use crate::inner::{Block, Inner};
use crate::placement::by_root;
use crate::replication::store::store_for_others;
use crate::rpc::{
    Divert, DivertReply, Hold, HoldReply, MAX_RENEW_KEYS, PutStatus, Vouched, from_header,
    to_header,
};
use crate::server::{blocks_of, reply};

/// A hold ends when its member has not asked for the copy for so long: then it has forgotten its
/// pointer, or is gone. A guess; members ask several times a day.
const HOLD_SECS: u64 = 24 * 3600;

/// Answers a [`Divert`].
pub(crate) async fn serve_divert(
    inner: &Inner,
    from: Peer,
    request: Request,
) -> Result<Reply, Refusal> {
    let Divert { blocks: Capped(headers), receipt } = from_header(&request.header)?;
    let blocks = blocks_of(headers, request.parts)?;
    let keys: Vec<Key> = blocks.iter().map(|block| block.header.key).collect();
    let origin = match Origin::of(inner, &from, receipt, &keys).await? {
        Origin::Bearer => Origin::Diverted,
        publisher => publisher,
    };
    let taking = inner.diversion.take(keys.iter().copied());
    let mut statuses = refusals(inner, &from, &blocks);
    for (key, status) in keys.iter().zip(&mut statuses) {
        if !taking.keys.contains(key) {
            *status = Some(PutStatus::NotRoot);
        }
    }
    let taken: Vec<usize> = (0..blocks.len()).filter(|i| statuses[*i].is_none()).collect();
    let some: Vec<Block> = taken.iter().map(|index| blocks[*index].clone()).collect();
    if !some.is_empty() {
        let stored = store_for_others(inner, &from, &origin, some).await?;
        taken.iter().zip(stored).for_each(|(index, status)| statuses[*index] = Some(status));
    }
    let statuses: Vec<PutStatus> =
        statuses.into_iter().map(|status| status.unwrap_or(PutStatus::Failed)).collect();
    let is_kept = |status: &PutStatus| matches!(status, PutStatus::Stored { .. });
    let info = |(key, status)| if is_kept(status) { held(inner, key) } else { None };
    let infos: Vec<Option<BlockInfo>> = keys.iter().zip(&statuses).map(info).collect();
    inner
        .diversion
        .records
        .hold(&from, infos.iter().flatten().copied(), hold_until(inner))
        .await
        .map_err(|error| Refusal::new(Refusal::INTERNAL, error.to_string()))?;
    drop(taking);
    let held: Vec<Option<Vouched>> = infos.iter().map(|info| vouched(inner, info)).collect();
    let spare_bytes = spare_bytes_for(inner, &from.id);
    let answer = DivertReply { statuses: statuses.into(), held: held.into(), spare_bytes };
    Ok(reply(to_header(&answer), Vec::new()))
}

/// Which of a member's blocks this node may not keep for it, and why.
fn refusals(inner: &Inner, from: &Peer, blocks: &[Block]) -> Vec<Option<PutStatus>> {
    let mut spare_bytes = spare_bytes_for(inner, &from.id);
    let mut left = holds_left(inner, &from.id);
    let refusal = |block: &Block| {
        let key = &block.header.key;
        let is_replaced = inner.diversion.records.is_held_for(key, &from.id);
        if !is_replaced && (inner.known(key).is_some() || is_member(inner, key)) {
            return Some(PutStatus::NotRoot);
        }
        let is_there = is_replaced && held(inner, key).is_some_and(|held| is_content(&held));
        if is_there {
            return None;
        }
        if left == 0 || !has_room(spare_bytes, block.bytes.len()) {
            return Some(PutStatus::Full);
        }
        left -= 1;
        spare_bytes -= cost_bytes(u32::try_from(block.bytes.len()).unwrap_or(u32::MAX));
        None
    };
    blocks.iter().map(refusal).collect()
}

fn is_content(info: &BlockInfo) -> bool {
    info.kind == BlockKind::Content
}

/// Whether this node belongs to the replica set of a block, as far as it knows.
pub(crate) fn is_member(inner: &Inner, key: &Key) -> bool {
    let set = inner.overlay.known_replica_set(key, inner.config.replicas);
    set.is_some_and(|set| set.iter().any(|node| inner.is_me(node)))
}

fn held(inner: &Inner, key: &Key) -> Option<BlockInfo> {
    let error = |error: StoreError| tracing::warn!(%error, "a block could not be looked up");
    inner.store.info(key).map_err(error).ok().flatten()
}

fn hold_until(inner: &Inner) -> u64 {
    inner.expiry(HOLD_SECS)
}

/// What is said to the member of a copy that is kept for it.
fn vouched(inner: &Inner, info: &Option<BlockInfo>) -> Option<Vouched> {
    let info = info.as_ref()?;
    let lease_secs = inner.header_of(info).lease_secs;
    let (publisher, ip) = (info.owner.publisher, info.owner.ip);
    Some(Vouched { version: info.version, lease_secs, publisher, ip, holder: None })
}

/// Answers a [`Hold`].
pub(crate) async fn serve_hold(
    inner: &Inner,
    from: Peer,
    request: Request,
) -> Result<Reply, Refusal> {
    let Hold { keys, keep } = from_header(&request.header)?;
    let records = &inner.diversion.records;
    let mut answers: Vec<Option<Vouched>> = vec![None; keys.len()];
    if keep {
        let (until, mut forgotten) = (hold_until(inner), Vec::new());
        for (place, key) in keys.iter().enumerate() {
            let info = held(inner, key);
            // A member keeps its own copy, and nobody's besides.
            if info.is_none() || is_member(inner, key) || inner.leaving.denies(key) {
                continue;
            }
            if !records.extend_hold(key, &from.id, until) {
                // It was forgotten here, or the copy is kept for another member.
                if !is_held_for_others(inner, key) {
                    forgotten.extend(info.map(|info| (place, info)));
                }
                continue;
            }
            answers[place] = vouched(inner, &info);
        }
        let again = held_again(inner, &from, forgotten).await;
        for (place, info) in &again {
            answers[*place] = vouched(inner, &Some(*info));
        }
        let noted = records.hold(&from, again.into_iter().map(|(_, info)| info), until).await;
        noted.map_err(|error| Refusal::new(Refusal::INTERNAL, error.to_string()))?;
    } else {
        let gone: Vec<Key> =
            keys.into_iter().filter(|key| records.is_held_for(key, &from.id)).collect();
        inner.strays.hasten(&gone, inner.env.now());
        records.forget(gone).await;
    }
    let held: Capped<Option<Vouched>, MAX_RENEW_KEYS> = answers.into();
    let spare_bytes = spare_bytes_for(inner, &from.id);
    Ok(reply(to_header(&HoldReply { held, spare_bytes }), Vec::new()))
}

/// Of blocks that a peer says it points here for, and no hold of it is noted for, those that are
/// held for it again: as far as it belongs to their replica sets, and within its share. Otherwise
/// anybody could keep strays here for ever.
async fn held_again(
    inner: &Inner,
    from: &Peer,
    forgotten: Vec<(usize, BlockInfo)>,
) -> Vec<(usize, BlockInfo)> {
    let left = usize::try_from(holds_left(inner, &from.id)).unwrap_or(usize::MAX);
    let replicas = inner.config.replicas;
    let sets = by_root(inner, forgotten, |(_, info)| info.key, replicas, MAX_SETS).await;
    let is_member = |set: &[Node]| set.iter().any(|node| node.peer.id == from.id);
    let its = sets.into_iter().filter(|(set, _)| is_member(set));
    its.flat_map(|(_, blocks)| blocks).take(left).collect()
}
