//! Storing blocks on this node. Only admitted blocks are stored (`accounting::admission`); blocks
//! for which there is no room here are kept by other nodes (`diversion`).

use atoll_key::Key;
use atoll_net::{Peer, Refusal};
use atoll_store::{BlockInfo, StoreError, StoredBlock};
use bytes::Bytes;

use crate::accounting::admission::{Admitted, Origin, admit, kept, reserve};
use crate::accounting::attribution::{self, Copy};
use crate::accounting::quota::Reservation;
use crate::diversion::{divert, follow};
use crate::replication::Replication;
use crate::rpc::{Block, Put, PutStatus, from_blocks};

/// Stores copies without a receipt on this node; one status per block.
pub(crate) async fn store_here(
    replication: &Replication,
    from: &Peer,
    blocks: &[Block],
) -> Vec<PutStatus> {
    let stored = store_put(replication, from, &Origin::Carrier, blocks.to_vec()).await;
    stored.unwrap_or_else(|refusal| {
        tracing::info!(%from, %refusal, "copies are not taken");
        vec![PutStatus::Failed; blocks.len()]
    })
}

/// Stores a batch on this node; one status per block.
pub(crate) async fn store_put(
    replication: &Replication,
    from: &Peer,
    origin: &Origin,
    blocks: Vec<Block>,
) -> Result<Vec<PutStatus>, Refusal> {
    let admitted = admit(replication, from, origin, blocks).await?;
    Ok(store_batch_of(replication, origin, admitted, Overflow::Diverted).await)
}

/// Stores a batch that this node keeps for a replica without room; one status per block.
pub(crate) async fn store_for_others(
    replication: &Replication,
    from: &Peer,
    origin: &Origin,
    blocks: Vec<Block>,
) -> Result<Vec<PutStatus>, Refusal> {
    let admitted = admit(replication, from, origin, blocks).await?;
    Ok(store_batch_of(replication, origin, admitted, Overflow::Refused).await)
}

/// What becomes of blocks for which there is no room here.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Overflow {
    /// Other nodes keep them for this one.
    Diverted,
    /// Nothing: they have been diverted once.
    Refused,
}

/// Stores what was admitted of a batch; one status per block of the whole.
async fn store_batch_of(
    replication: &Replication,
    origin: &Origin,
    admitted: Admitted,
    overflow: Overflow,
) -> Vec<PutStatus> {
    let Admitted { blocks, stored, indices, refused, room, .. } = admitted;
    let own = store_admitted(replication, origin, &blocks, stored, room, overflow).await;
    let mut statuses: Vec<PutStatus> =
        refused.into_iter().map(|status| status.unwrap_or(PutStatus::Failed)).collect();
    for (index, status) in indices.into_iter().zip(own) {
        statuses[index] = status;
    }
    statuses
}

/// Stores blocks that were admitted, here or, where there is no room, elsewhere; one status per
/// block.
pub(crate) async fn store_admitted(
    replication: &Replication,
    origin: &Origin,
    blocks: &[Block],
    stored: Vec<StoredBlock>,
    room: Reservation,
    overflow: Overflow,
) -> Vec<PutStatus> {
    if stored.is_empty() {
        return Vec::new();
    }
    let statuses = store_or_divert(replication, origin, blocks, stored, room, overflow).await;
    for block in blocks.iter().filter(|block| block.is_mutable()) {
        replication.watches.changed(&block.header.key);
    }
    statuses
}

async fn store_or_divert(
    replication: &Replication,
    origin: &Origin,
    blocks: &[Block],
    stored: Vec<StoredBlock>,
    room: Reservation,
    overflow: Overflow,
) -> Vec<PutStatus> {
    let Err(failed) = store_batch(replication, stored.clone(), room).await else {
        return stored_statuses(replication, blocks).await;
    };
    // What is here already needs no room: only its lease is extended.
    let held: Vec<bool> = stored.iter().map(|new| is_held(replication, &new.info)).collect();
    let lacking: Vec<bool> = held.iter().map(|held| !held).collect();
    let mut statuses = vec![failed; blocks.len()];
    if held.contains(&true) {
        let (_, none) = reserve(replication, &[], &[]);
        let extended = store_batch(replication, kept(stored.clone(), &held), none).await;
        let answers = match extended {
            Ok(()) => stored_statuses(replication, &kept(blocks.to_vec(), &held)).await,
            Err(failed) => vec![failed; blocks.len()],
        };
        fill(&mut statuses, &held, answers);
    }
    if overflow == Overflow::Diverted && lacking.contains(&true) {
        let (blocks, stored) = (kept(blocks.to_vec(), &lacking), kept(stored, &lacking));
        fill(&mut statuses, &lacking, divert(replication, origin, &blocks, &stored).await);
    }
    statuses
}

/// Writes answers about those of a batch that were `chosen` where they belong.
fn fill(statuses: &mut [PutStatus], chosen: &[bool], answers: Vec<PutStatus>) {
    let places = statuses.iter_mut().zip(chosen).filter(|(_, chosen)| **chosen);
    places.zip(answers).for_each(|((status, _), answer)| *status = answer);
}

fn is_held(replication: &Replication, new: &BlockInfo) -> bool {
    let held = replication.store.info(&new.key).ok().flatten();
    held.is_some_and(|held| held.version >= new.version)
}

/// What is said of blocks that the store has taken.
async fn stored_statuses(replication: &Replication, blocks: &[Block]) -> Vec<PutStatus> {
    let mut statuses = Vec::with_capacity(blocks.len());
    for block in blocks {
        let superseded = other_held(replication, block).await;
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
    replication: &Replication,
    batch: Vec<StoredBlock>,
    room: Reservation,
) -> Result<(), PutStatus> {
    let keys: Vec<Key> = batch.iter().map(|block| block.info.key).collect();
    let arriving = replication.pending.keep(keys.iter()).await;
    match replication
        .writes
        .write(&replication.env, replication.store.put(batch), (room, arriving))
        .await
    {
        Ok(()) => {
            follow::come_home(replication, keys).await;
            Ok(())
        }
        Err(error) => {
            replication.headroom.store_failed(&error, replication.store.usage());
            match error {
                // Whether it is full or not there for the moment: others may have room.
                StoreError::Full { .. } | StoreError::Away { .. } => Err(PutStatus::Full),
                StoreError::Corrupted { .. } | StoreError::Io(_) => Err(PutStatus::Failed),
            }
        }
    }
}

/// Stores a block that another node has kept for this one; whether there was room.
pub(crate) async fn store_home(replication: &Replication, block: StoredBlock) -> bool {
    let (_, none) = reserve(replication, &[], &[]);
    store_batch(replication, vec![block], none).await.is_ok()
}

/// Stores verified blocks that were fetched from `from`, as far as they may be charged to
/// anybody; returns how many.
pub(crate) async fn store_fetched(
    replication: &Replication,
    from: &Peer,
    mut batch: Vec<StoredBlock>,
) -> u64 {
    let copy = |block: &StoredBlock| {
        let BlockInfo { key, kind, version, .. } = block.info;
        Copy { key, kind, version, lease_secs: replication.lease_left(&block.info) }
    };
    let copies: Vec<Copy> = batch.iter().map(copy).collect();
    let charges = match attribution::charges(replication, from, &copies, false).await {
        Ok(charges) => charges,
        Err(refusal) => {
            tracing::info!(%from, %refusal, "copies are not taken");
            return 0;
        }
    };
    for (block, charge) in batch.iter_mut().zip(&charges) {
        block.info.owner = charge.owner;
        block.info.expires_unix_secs = replication.expiry(charge.lease_secs);
    }
    let (verdicts, room) = reserve(replication, &batch, &charges);
    let keep: Vec<bool> = verdicts.iter().map(Result::is_ok).collect();
    let batch = kept(batch, &keep);
    let block = |stored: &StoredBlock| Block {
        header: replication.header_of(&stored.info),
        bytes: stored.bytes.clone(),
    };
    let blocks: Vec<Block> = batch.iter().map(block).collect();
    let overflow = Overflow::Diverted;
    let statuses =
        store_admitted(replication, &Origin::Carrier, &blocks, batch, room, overflow).await;
    let is_kept = |status: &&PutStatus| {
        matches!(status, PutStatus::Stored { .. } | PutStatus::Superseded { .. })
    };
    statuses.iter().filter(is_kept).count() as u64
}

/// After a signed block was put into the store: whether that keeps another one.
async fn other_held(replication: &Replication, block: &Block) -> Option<PutStatus> {
    if !block.is_mutable() {
        return None;
    }
    match replication.store.get(&block.header.key).await {
        Ok(Some(held)) if held.bytes == block.bytes => None,
        Ok(Some(held)) => Some(PutStatus::Superseded { held: held.info.version }),
        Ok(None) | Err(_) => Some(PutStatus::Failed),
    }
}

/// The message that puts blocks.
pub(crate) fn put_message(origin: &Origin, blocks: Vec<Block>, as_root: bool) -> (Put, Vec<Bytes>) {
    let receipt = origin.to_wire(blocks.iter().map(|block| block.header.key));
    let (blocks, parts) = from_blocks(blocks);
    (Put { blocks, as_root, receipt }, parts)
}
