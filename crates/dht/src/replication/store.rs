//! Storing blocks on this node. Only admitted blocks are stored (`accounting::admission`); blocks
//! for which there is no room here are kept by other nodes (`diversion`).

use std::collections::BTreeSet;

use atoll_key::Key;
use atoll_net::{Peer, Refusal};
use atoll_store::{BlockInfo, StoreError, StoredBlock};
use bytes::Bytes;

use super::joining::{Joined, Turn, join_held};
use super::released;
use super::writes::Write;
use crate::accounting::admission::{Admitted, Origin, Sound, admit, answers};
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

/// Stores a batch on this node, or at others if there is no room here; one status per block.
pub(crate) async fn store_put(
    replication: &Replication,
    from: &Peer,
    origin: &Origin,
    blocks: Vec<Block>,
) -> Result<Vec<PutStatus>, Refusal> {
    let count = blocks.len();
    let (places, blocks) = without_released(replication, origin, blocks).await;
    let Admitted { mut sound, mut refused, room } =
        admit(replication, from, origin, blocks).await?;
    if is_ordered(origin, &sound) {
        stop_at_refused(&mut sound, &mut refused);
    }
    let stored = store_admitted(replication, origin, &sound, room, Overflow::Diverted).await;
    let mut statuses = vec![PutStatus::Released; count];
    for (place, status) in places.into_iter().zip(answers(refused, stored)) {
        statuses[place] = status;
    }
    Ok(statuses)
}

/// Those of a batch that are not copies of what was released, with their places in it.
async fn without_released(
    replication: &Replication,
    origin: &Origin,
    blocks: Vec<Block>,
) -> (Vec<usize>, Vec<Block>) {
    let released = match origin {
        Origin::Publisher { .. } => BTreeSet::new(),
        Origin::Carrier | Origin::Diverted => released::refused(replication, &blocks).await,
    };
    let blocks = blocks.into_iter().enumerate();
    blocks.filter(|(_, block)| !released.contains(&block.header.key)).unzip()
}

/// Whether these blocks have an order: mutable ones that their writer puts together.
fn is_ordered(origin: &Origin, sound: &[Sound]) -> bool {
    matches!(origin, Origin::Publisher { .. }) && sound.iter().all(|one| one.block.is_mutable())
}

/// Refuses all blocks after the first one that is refused, for the same reason.
fn stop_at_refused(sound: &mut Vec<Sound>, refused: &mut [Option<PutStatus>]) {
    if let Some(first) = refused.iter().position(Option::is_some) {
        sound.truncate(first);
        let why = refused[first];
        refused[first..].fill(why);
    }
}

/// What becomes of blocks for which there is no room here.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Overflow {
    /// Other nodes keep them for this one.
    Diverted,
    /// Nothing: they have been diverted once.
    Refused,
}

/// Stores blocks that were admitted; one status per block.
pub(crate) async fn store_admitted(
    replication: &Replication,
    origin: &Origin,
    sound: &[Sound],
    mut room: Reservation,
    overflow: Overflow,
) -> Vec<PutStatus> {
    if sound.is_empty() {
        return Vec::new();
    }
    if let Origin::Publisher { receipt, .. } = origin {
        let infos = sound.iter().map(|sound| &sound.stored.info);
        let keys = infos.filter(|info| info.kind.release_removes()).map(|info| info.key);
        let now = replication.env.unix_ms() / 1000;
        let again = replication.releases.put_again(keys, receipt.issued_unix_secs, now).await;
        if let Err(error) = again {
            tracing::error!(%error, "releases of blocks that are put again could not be taken back");
            return vec![PutStatus::Failed; sound.len()];
        }
    }
    let Joined { sound: mut joined, mut refused, turn } =
        join_held(replication, origin, sound, &mut room).await;
    if is_ordered(origin, sound) {
        stop_at_refused(&mut joined, &mut refused);
    }
    let stored = store_or_divert(replication, origin, &joined, (room, turn), overflow).await;
    let statuses = answers(refused, stored);
    for Sound { block, .. } in sound.iter().filter(|sound| sound.block.is_mutable()) {
        replication.watches.changed(&block.header.key);
    }
    statuses
}

/// The turn ends before other nodes are called: one that hangs must hold up no other put.
async fn store_or_divert(
    replication: &Replication,
    origin: &Origin,
    sound: &[Sound],
    (room, turn): (Reservation, Turn),
    overflow: Overflow,
) -> Vec<PutStatus> {
    let guards = (Some(room), Some(turn.clone()));
    let Err(failed) = store_batch(replication, to_store(sound), guards).await else {
        drop(turn);
        come_home(replication, sound).await;
        return stored_statuses(replication, sound).await;
    };
    // A block that is held already needs no room: only its lease is extended. Joined blocks are not
    // diverted: there would be two places where they are joined.
    let is_held: Vec<bool> =
        sound.iter().map(|new| is_held(replication, &new.stored.info)).collect();
    let of = |wanted: bool| -> Vec<Sound> {
        let places = sound.iter().zip(&is_held).filter(|(_, is_held)| **is_held == wanted);
        places.map(|(sound, _)| sound.clone()).collect()
    };
    let (held, lacking) = (of(true), of(false));
    let extended = match store_batch(replication, to_store(&held), (None, Some(turn))).await {
        Ok(()) => {
            come_home(replication, &held).await;
            stored_statuses(replication, &held).await
        }
        Err(failed) => vec![failed; held.len()],
    };
    let may_leave =
        |sound: &Sound| overflow == Overflow::Diverted && !sound.stored.info.kind.joins();
    let leaving: Vec<Sound> = lacking.iter().filter(|s| may_leave(s)).cloned().collect();
    let mut diverted = divert(replication, origin, &leaving).await.into_iter();
    let elsewhere = lacking
        .iter()
        .map(|sound| may_leave(sound).then(|| diverted.next()).flatten().unwrap_or(failed));
    let mut extended = extended.into_iter();
    let held = is_held.into_iter().map(|is_held| if is_held { extended.next() } else { None });
    answers(held.collect(), elsewhere)
}

/// Blocks are kept here now, and no longer needed where other nodes keep them.
async fn come_home(replication: &Replication, sound: &[Sound]) {
    if !sound.is_empty() {
        let keys = sound.iter().map(|sound| sound.stored.info.key).collect();
        follow::come_home(replication, keys).await;
    }
}

fn to_store(sound: &[Sound]) -> Vec<StoredBlock> {
    sound.iter().map(|sound| sound.stored.clone()).collect()
}

fn is_held(replication: &Replication, new: &BlockInfo) -> bool {
    let held = replication.store.info(&new.key).ok().flatten();
    held.is_some_and(|held| !new.kind.replaces(new.version, held.version))
}

/// What is said of blocks that the store has taken.
async fn stored_statuses(replication: &Replication, sound: &[Sound]) -> Vec<PutStatus> {
    let mut statuses = Vec::with_capacity(sound.len());
    for Sound { block, .. } in sound {
        let superseded = other_held(replication, block).await;
        statuses.push(superseded.unwrap_or(PutStatus::Stored { copies: 1, wanted: 1 }));
    }
    statuses
}

/// Puts verified blocks into this node's store, where `room` is reserved for those that need it, in
/// the `turn` of those that were joined. They stay even if they were about to leave.
///
/// # Errors
/// What to answer for each of them.
async fn store_batch(
    replication: &Replication,
    batch: Vec<StoredBlock>,
    (room, turn): (Option<Reservation>, Option<Turn>),
) -> Result<(), PutStatus> {
    if batch.is_empty() {
        return Ok(());
    }
    let keys: Vec<Key> = batch.iter().map(|block| block.info.key).collect();
    let arriving = replication.pending.keep(keys.iter()).await;
    match Write::new(replication, batch, (room, arriving, turn)).await {
        Ok(()) => Ok(()),
        Err(error) => {
            replication.headroom.store_failed(&error, replication.store.usage());
            match error {
                StoreError::Full { .. } => Err(PutStatus::Full),
                // One that is away may be back in a moment: writers ask again.
                StoreError::Away { .. } | StoreError::Corrupted { .. } | StoreError::Io(_) => {
                    Err(PutStatus::Failed)
                }
            }
        }
    }
}

/// Stores a block that another node has kept for this one; whether there was room.
pub(crate) async fn store_home(replication: &Replication, block: StoredBlock) -> bool {
    let key = block.info.key;
    let is_kept = store_batch(replication, vec![block], (None, None)).await.is_ok();
    if is_kept {
        follow::come_home(replication, vec![key]).await;
    }
    is_kept
}

/// After a mutable block was put into the store: whether that keeps another one, without what this
/// one says.
async fn other_held(replication: &Replication, block: &Block) -> Option<PutStatus> {
    if !block.is_mutable() {
        return None;
    }
    match replication.store.get(&block.header.key).await {
        Ok(Some(held)) if held.bytes == block.bytes => None,
        Ok(Some(held)) if held.info.kind.joins() => {
            let versions = (held.info.version, 0);
            let includes = held.info.kind.includes(&held.bytes, &block.bytes, versions);
            (!includes).then_some(PutStatus::Failed)
        }
        Ok(Some(held)) => Some(PutStatus::Superseded { held: held.info.version }),
        Ok(None) | Err(_) => Some(PutStatus::Failed),
    }
}

/// The message that puts blocks.
pub(crate) fn put_message(origin: &Origin, blocks: Vec<Block>, as_root: bool) -> (Put, Vec<Bytes>) {
    let receipt = origin.to_wire(blocks.iter().map(|block| block.header.key));
    let (blocks, parts) = from_blocks(blocks);
    (Put { blocks, as_root, receipt, promises: Vec::new().into() }, parts)
}
