//! Keeping blocks on this node and, as their root, on the nodes after it (CFS §5.1, §5.5).
//!
//! Only what was admitted (see `admission`) is stored, and goes on to other nodes. Blocks for
//! which there is no room here are kept by other nodes (see `diversion`). Of signed
//! blocks the higher version stays.

use std::collections::BTreeMap;
use std::sync::Arc;

use atoll_key::{BlockKind, Key, PeerId};
use atoll_net::{Peer, Refusal, Request};
use atoll_overlay::Node;
use atoll_store::{BlockInfo, Owner, StoreError, StoredBlock};
use futures_util::future::join_all;

use crate::accounting::admission::{Admitted, Origin, admit, kept, reserve};
use crate::accounting::attribution::{self, Copy};
use crate::accounting::quota::{OverQuota, Reservation};
use crate::client::ack_verification::{put_request, shows_newer, statuses_of};
use crate::diversion::{divert, follow};
use crate::inner::{Block, Inner};
use crate::rpc::put_times::WaitsFor;
use crate::rpc::quorum::{Calls, Event};
use crate::rpc::{self, AskRoom, AskRoomReply, PutStatus, from_header, is_majority, to_header};

/// Stores copies that nobody has signed for on this node; one status per block.
pub(crate) async fn store_here(inner: &Inner, from: &Peer, blocks: &[Block]) -> Vec<PutStatus> {
    let stored = store_put(inner, from, &Origin::Bearer, blocks.to_vec()).await;
    stored.unwrap_or_else(|refusal| {
        tracing::info!(%from, %refusal, "copies are not taken");
        vec![PutStatus::Failed; blocks.len()]
    })
}

/// Stores a batch on this node; one status per block.
pub(crate) async fn store_put(
    inner: &Inner,
    from: &Peer,
    origin: &Origin,
    blocks: Vec<Block>,
) -> Result<Vec<PutStatus>, Refusal> {
    let admitted = admit(inner, from, origin, blocks).await?;
    Ok(store_batch_of(inner, origin, admitted, Overflow::Diverted).await)
}

/// Stores a batch that this node keeps for a replica without room; one status per block.
pub(crate) async fn store_for_others(
    inner: &Inner,
    from: &Peer,
    origin: &Origin,
    blocks: Vec<Block>,
) -> Result<Vec<PutStatus>, Refusal> {
    let admitted = admit(inner, from, origin, blocks).await?;
    Ok(store_batch_of(inner, origin, admitted, Overflow::Refused).await)
}

/// What becomes of blocks for which there is no room here.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Overflow {
    /// Other nodes keep them for this one.
    Diverted,
    /// Nothing: they have been diverted once.
    Refused,
}

/// Stores what was admitted of a batch; one status per block of the whole.
async fn store_batch_of(
    inner: &Inner,
    origin: &Origin,
    admitted: Admitted,
    overflow: Overflow,
) -> Vec<PutStatus> {
    let Admitted { blocks, stored, indices, refused, room, .. } = admitted;
    let own = store_admitted(inner, origin, &blocks, stored, room, overflow).await;
    let mut statuses: Vec<PutStatus> =
        refused.into_iter().map(|status| status.unwrap_or(PutStatus::Failed)).collect();
    for (index, status) in indices.into_iter().zip(own) {
        statuses[index] = status;
    }
    statuses
}

/// Stores blocks that were admitted, here or, where there is no room, elsewhere; one status per
/// block.
async fn store_admitted(
    inner: &Inner,
    origin: &Origin,
    blocks: &[Block],
    stored: Vec<StoredBlock>,
    room: Reservation,
    overflow: Overflow,
) -> Vec<PutStatus> {
    if stored.is_empty() {
        return Vec::new();
    }
    let Err(failed) = store_batch(inner, stored.clone(), room).await else {
        return stored_statuses(inner, blocks).await;
    };
    // What is here already needs no room: only its lease is extended.
    let held: Vec<bool> = stored.iter().map(|new| is_held(inner, &new.info)).collect();
    let lacking: Vec<bool> = held.iter().map(|held| !held).collect();
    let mut statuses = vec![failed; blocks.len()];
    if held.contains(&true) {
        let (_, none) = reserve(inner, &[], &[]);
        let extended = store_batch(inner, kept(stored.clone(), &held), none).await;
        let answers = match extended {
            Ok(()) => stored_statuses(inner, &kept(blocks.to_vec(), &held)).await,
            Err(failed) => vec![failed; blocks.len()],
        };
        fill(&mut statuses, &held, answers);
    }
    if overflow == Overflow::Diverted && lacking.contains(&true) {
        let (blocks, stored) = (kept(blocks.to_vec(), &lacking), kept(stored, &lacking));
        fill(&mut statuses, &lacking, divert(inner, origin, &blocks, &stored).await);
    }
    statuses
}

/// Writes answers about those of a batch that were `chosen` where they belong.
fn fill(statuses: &mut [PutStatus], chosen: &[bool], answers: Vec<PutStatus>) {
    let places = statuses.iter_mut().zip(chosen).filter(|(_, chosen)| **chosen);
    places.zip(answers).for_each(|((status, _), answer)| *status = answer);
}

fn is_held(inner: &Inner, new: &BlockInfo) -> bool {
    let held = inner.store.info(&new.key).ok().flatten();
    held.is_some_and(|held| held.version >= new.version)
}

/// What is said of blocks that the store has taken.
async fn stored_statuses(inner: &Inner, blocks: &[Block]) -> Vec<PutStatus> {
    let mut statuses = Vec::with_capacity(blocks.len());
    for block in blocks {
        let superseded = other_held(inner, block).await;
        statuses.push(superseded.unwrap_or(PutStatus::Stored { copies: 1, wanted: 1 }));
    }
    statuses
}

/// Puts verified blocks into this node's store, where `room` is reserved for them. They stay
/// even if they were about to leave, and are no longer needed where other nodes keep them.
///
/// # Errors
/// What to answer for each of them.
async fn store_batch(
    inner: &Inner,
    batch: Vec<StoredBlock>,
    room: Reservation,
) -> Result<(), PutStatus> {
    let keys: Vec<Key> = batch.iter().map(|block| block.info.key).collect();
    let arriving = inner.leaving.keep(keys.iter()).await;
    match inner.writes.write(&inner.env, inner.store.put(batch), (room, arriving)).await {
        Ok(()) => {
            follow::come_home(inner, keys).await;
            Ok(())
        }
        Err(error) => {
            inner.diversion.store_failed(&error, inner.store.usage());
            match error {
                // Whether it is full or not there for the moment: others may have room.
                StoreError::Full { .. } | StoreError::Away { .. } => Err(PutStatus::Full),
                StoreError::Corrupted { .. } | StoreError::Io(_) => Err(PutStatus::Failed),
            }
        }
    }
}

/// Stores a block that another node has kept for this one; whether there was room.
pub(crate) async fn store_home(inner: &Inner, block: StoredBlock) -> bool {
    let (_, none) = reserve(inner, &[], &[]);
    store_batch(inner, vec![block], none).await.is_ok()
}

/// Stores verified blocks that were fetched from `from`, as far as they may be charged to
/// anybody; returns how many.
pub(crate) async fn store_fetched(inner: &Inner, from: &Peer, mut batch: Vec<StoredBlock>) -> u64 {
    let copy = |block: &StoredBlock| {
        let BlockInfo { key, kind, version, .. } = block.info;
        Copy { key, kind, version, lease_secs: inner.lease_left(&block.info) }
    };
    let copies: Vec<Copy> = batch.iter().map(copy).collect();
    let charges = match attribution::charges(inner, from, &copies, false).await {
        Ok(charges) => charges,
        Err(refusal) => {
            tracing::info!(%from, %refusal, "copies are not taken");
            return 0;
        }
    };
    for (block, charge) in batch.iter_mut().zip(&charges) {
        block.info.owner = charge.owner;
        block.info.expires_unix_secs = inner.expiry(charge.lease_secs);
    }
    let (verdicts, room) = reserve(inner, &batch, &charges);
    let keep: Vec<bool> = verdicts.iter().map(Result::is_ok).collect();
    let batch = kept(batch, &keep);
    let block = |stored: &StoredBlock| Block {
        header: inner.header_of(&stored.info),
        bytes: stored.bytes.clone(),
    };
    let blocks: Vec<Block> = batch.iter().map(block).collect();
    let overflow = Overflow::Diverted;
    let statuses = store_admitted(inner, &Origin::Bearer, &blocks, batch, room, overflow).await;
    let is_kept = |status: &&PutStatus| {
        matches!(status, PutStatus::Stored { .. } | PutStatus::Superseded { .. })
    };
    statuses.iter().filter(is_kept).count() as u64
}

/// The nodes that should hold the blocks whose root is this virtual server of this node, which
/// comes first; alone if it no longer runs.
pub(crate) fn replica_set(inner: &Inner, root: &Node) -> Vec<Node> {
    inner.overlay.own_replica_set(root, inner.config.replicas).unwrap_or_else(|| vec![*root])
}

/// Stores a batch whose root this node is and sends it to the replicas; resolves when a
/// majority has it, and those that could still answer in their usual time have.
pub(crate) async fn store_as_root(
    inner: &Arc<Inner>,
    from: &Peer,
    origin: &Origin,
    blocks: Vec<Block>,
) -> Result<Vec<PutStatus>, Refusal> {
    let mut statuses = vec![PutStatus::NotRoot; blocks.len()];
    let keys: Vec<Key> = blocks.iter().map(|block| block.header.key).collect();
    let parts = inner.overlay.group_by_own_root(&keys).into_iter().map(|(root, indices)| {
        let part = indices.iter().map(|index| blocks[*index].clone()).collect();
        async move { (indices, store_at_root(inner, from, origin, &root, part).await) }
    });
    for (indices, part) in join_all(parts).await {
        for (index, status) in indices.into_iter().zip(part?) {
            statuses[index] = status;
        }
    }
    Ok(statuses)
}

/// Stores blocks whose root is one virtual server of this node.
async fn store_at_root(
    inner: &Arc<Inner>,
    from: &Peer,
    origin: &Origin,
    root: &Node,
    blocks: Vec<Block>,
) -> Result<Vec<PutStatus>, Refusal> {
    let admitted = admit(inner, from, origin, blocks).await?;
    let Admitted { blocks: mine, stored, indices, refused, added_bytes, room } = admitted;
    let mut statuses: Vec<PutStatus> =
        refused.into_iter().map(|status| status.unwrap_or(PutStatus::Failed)).collect();
    if mine.is_empty() {
        return Ok(statuses);
    }
    if let Some(status) = conflict(inner, &mine).await {
        for index in indices {
            statuses[index] = status;
        }
        return Ok(statuses);
    }
    if let Some(over) = room_at_replicas(inner, root, origin, &mine, added_bytes).await {
        for index in indices {
            statuses[index] = over.into();
        }
        return Ok(statuses);
    }
    let is_new = |block: &&Block| inner.known(&block.header.key).is_none();
    let new = mine.iter().filter(is_new).count();
    let (acknowledged, own) = if mine.iter().any(is_signed) {
        // A replica that has another block of the same version decides before this node
        // keeps one that nothing would make equal again.
        let acknowledged = replicate(inner, root, origin, &mine).await;
        let refused = |refused: &Option<PutStatus>| refused.unwrap_or(PutStatus::Failed);
        let own = if acknowledged.refused.iter().any(Option::is_some) {
            acknowledged.refused.iter().map(refused).collect()
        } else {
            store_admitted(inner, origin, &mine, stored, room, Overflow::Diverted).await
        };
        (acknowledged, own)
    } else {
        // The network first: it works while this node writes.
        let replicated = replicate(inner, root, origin, &mine);
        let stored = store_admitted(inner, origin, &mine, stored, room, Overflow::Diverted);
        futures_util::join!(replicated, stored)
    };
    if own.iter().all(|status| matches!(status, PutStatus::Stored { .. })) {
        inner.repair.count_root_blocks(new as u64);
    }
    // What was counted on must hold after a restart as well.
    let is_remembered = inner.repair.remember_expected(&*inner.durable).await;
    let wanted = u32::try_from(acknowledged.wanted + 1).expect("k is small");
    for (position, index) in indices.into_iter().enumerate() {
        let is_here = matches!(own[position], PutStatus::Stored { .. });
        let copies = u32::from(is_here) + acknowledged.copies[position];
        statuses[index] = match (own[position], acknowledged.refused[position]) {
            (PutStatus::Stored { .. }, Some(refused)) => refused,
            (PutStatus::Stored { .. }, None) if !is_remembered => PutStatus::Failed,
            (PutStatus::Stored { .. }, None) => PutStatus::Stored { copies, wanted },
            // A root without room, for which no other node has any, coordinates all the same.
            (PutStatus::Full | PutStatus::Failed, None)
                if is_remembered && is_majority(copies, wanted) =>
            {
                PutStatus::Stored { copies, wanted }
            }
            (other, _) => other,
        };
    }
    Ok(statuses)
}

/// Whether a replica has no room for a publisher's batch, asked only of one that has used
/// much already: what the root and others took of a put that fails would stay, and repair
/// could bring it where there is no room for it.
async fn room_at_replicas(
    inner: &Arc<Inner>,
    root: &Node,
    origin: &Origin,
    blocks: &[Block],
    added_bytes: u64,
) -> Option<OverQuota> {
    let Origin::Publisher { owner, .. } = origin else { return None };
    let peers = inner.overlay.estimated_peers();
    let asks = inner.config.mechanisms.room_questions;
    if added_bytes == 0 || !asks || !inner.quota.is_near_limit(&*inner.store, peers, *owner) {
        return None;
    }
    let is_root = blocks.iter().any(is_signed);
    let Owner { publisher, ip } = *owner;
    let header = to_header(&AskRoom { publisher, ip, bytes: added_bytes, is_root });
    let request = Request { method: rpc::ROOM, header, parts: Vec::new() };
    let mut calls = Calls::new(inner, WaitsFor::Replica);
    for node in replica_set(inner, root).into_iter().skip(1) {
        let (inner, request) = (inner.clone(), request.clone());
        calls.ask(node, 0, async move {
            let reply = inner.ask_briefly(&node, request).await?;
            Ok(from_header::<AskRoomReply>(&reply.header)?.over)
        });
    }
    // A replica that does not answer will not take the blocks either.
    while calls.is_patient() {
        if let Some(Event::Answer(_, Ok(Some(over)))) = calls.next().await {
            return Some(over);
        }
    }
    None
}

fn is_signed(block: &Block) -> bool {
    block.header.kind == BlockKind::Signed as u8
}

/// After a signed block was put into the store: whether that keeps another one.
async fn other_held(inner: &Inner, block: &Block) -> Option<PutStatus> {
    if !is_signed(block) {
        return None;
    }
    match inner.store.get(&block.header.key).await {
        Ok(Some(held)) if held.bytes == block.bytes => None,
        Ok(Some(held)) => Some(PutStatus::Superseded { held: held.info.version }),
        Ok(None) | Err(_) => Some(PutStatus::Failed),
    }
}

/// Two different blocks of one version would leave replicas unequal for ever: the root
/// keeps the first. (Only signed blocks come alone in a batch and can conflict.)
async fn conflict(inner: &Inner, blocks: &[Block]) -> Option<PutStatus> {
    let [block] = blocks else { return None };
    if !is_signed(block) {
        return None;
    }
    let version = BlockKind::Signed.verify(&block.header.key, &block.bytes).ok()?;
    let held = inner.store.get(&block.header.key).await.ok()??;
    let differs = held.info.version == version && held.bytes != block.bytes;
    differs.then_some(PutStatus::Superseded { held: version })
}

/// How many replicas took each block of a batch.
struct Acknowledged {
    copies: Vec<u32>,
    /// Why one of them will not have the block, whatever the others say: it shows a newer one,
    /// or the publisher is over quota there. (If a majority could overrule a quota, repair
    /// would bring the block there all the same.)
    refused: Vec<Option<PutStatus>>,
    wanted: usize,
}

/// The most nodes that one batch is sent to, beside the root: members of the replica set, and
/// those that became members when others failed meanwhile.
const MAX_TARGETS: usize = 12;

/// Sends a batch to the other k − 1 of the replica set of one virtual server, and to those that
/// replace them when they fail. Resolves when a majority has it and nobody is left whose answer
/// is not overdue; the other calls go on.
async fn replicate(
    inner: &Arc<Inner>,
    root: &Node,
    origin: &Origin,
    blocks: &[Block],
) -> Acknowledged {
    let request = put_request(origin, blocks.to_vec(), false);
    let bytes = blocks.iter().map(|block| block.bytes.len() as u64).sum();
    let mut calls = Calls::new(inner, WaitsFor::Replica);
    let mut set = replica_set(inner, root).split_off(1);
    let mut stored: BTreeMap<PeerId, Vec<bool>> = BTreeMap::new();
    let mut asked: Vec<PeerId> = Vec::new();
    let mut refused = vec![None; blocks.len()];
    loop {
        for node in set.iter().filter(|node| !is_asked(&asked, node)).copied().collect::<Vec<_>>() {
            if asked.len() < MAX_TARGETS {
                asked.push(node.peer.id);
                let (from, request, count) = (inner.clone(), request.clone(), blocks.len());
                let keys = blocks.iter().map(|block| block.header.key).collect();
                let under_way = inner.under_way.sends(node.peer.id, keys);
                calls.ask(node, bytes, async move {
                    let _under_way = under_way;
                    let answer = from.call(&node, request).await;
                    if answer.is_err() {
                        from.repair.kick();
                    }
                    statuses_of(answer?, count)
                });
            }
        }
        let wanted = expected_replicas(inner);
        let copies = copies_in(&set, &stored, blocks.len());
        let is_settled = |(copies, refused): (&u32, &Option<PutStatus>)| {
            refused.is_some() || is_majority(1 + copies, wanted as u32 + 1)
        };
        let are_settled = copies.iter().zip(&refused).all(is_settled);
        let event = match are_settled && !calls.is_patient() {
            true => None,
            false => calls.next().await,
        };
        let Some(event) = event else {
            calls.finish();
            return Acknowledged { copies, refused, wanted };
        };
        if let Event::Answer(node, answer) = event {
            let mut has = vec![false; blocks.len()];
            for (i, status) in answer.unwrap_or_default().into_iter().enumerate() {
                match status {
                    PutStatus::Stored { .. } => has[i] = true,
                    PutStatus::OverQuota { .. } => refused[i] = Some(status),
                    PutStatus::Superseded { .. } => {
                        let shown = shows_newer(inner, &node, &blocks[i]).await;
                        let held = shown.map(|held| PutStatus::Superseded { held });
                        refused[i] = held.or(refused[i]);
                    }
                    _ => {}
                }
            }
            if has.iter().zip(&refused).any(|(has, refused)| !has && refused.is_none()) {
                inner.repair.kick();
            }
            stored.insert(node.peer.id, has);
        }
        // One that failed may have left the set, and a new member is asked.
        if let Some(mut now) = inner.overlay.own_replica_set(root, inner.config.replicas) {
            set = now.split_off(1);
        }
    }
}

fn is_asked(asked: &[PeerId], node: &Node) -> bool {
    asked.contains(&node.peer.id)
}

/// How many of `set` have stored each block of a batch.
fn copies_in(set: &[Node], stored: &BTreeMap<PeerId, Vec<bool>>, blocks: usize) -> Vec<u32> {
    let members = || set.iter().filter_map(|node| stored.get(&node.peer.id));
    (0..blocks).map(|i| members().filter(|has| has[i]).count() as u32).collect()
}

/// How many other nodes of a replica set this node sees at present, at most k − 1.
pub(crate) fn present_replicas(inner: &Inner) -> usize {
    let sets = inner.overlay.own_replica_sets(inner.config.replicas);
    let others = sets.iter().map(|set| set.len() - 1);
    others.max().expect("a node has at least one virtual server")
}

/// How many members a replica set has of which these are there, those expected back included.
pub(crate) fn size_of(inner: &Inner, set: &[Node]) -> usize {
    set.len().max(expected_replicas(inner) + 1)
}

/// The replicas a put must count on, see [`Repair::expected_replicas`].
pub(crate) fn expected_replicas(inner: &Inner) -> usize {
    let replicas = present_replicas(inner);
    if !inner.config.mechanisms.expected_replicas {
        return replicas;
    }
    inner.repair.expected_replicas(inner.env.now(), replicas, inner.config.shrink_after)
}
