//! Joining what is put with what is held, for kinds of blocks whose versions are joined
//! ([`BlockKind::joins`](atoll_key::BlockKind::joins)).
//!
//! The store keeps one block under a key, and knows nothing of joining. So this node reads what it
//! holds, joins it with what comes, and stores the result. Two of these at once would lose one:
//! each would be joined with what was held before. Therefore they take turns ([`JoinTurns`]).
//!
//! A block that comes with its writer's receipt is fresh: it is taken only if the kind's rules admit
//! it at this time. A copy, which any node may send, is refused only if its time has not come yet.

use std::sync::Arc;

use atoll_key::{Key, NotAdmitted};
use atoll_store::StoreError;
use futures_util::lock::{Mutex, OwnedMutexGuard};

use super::Replication;
use crate::accounting::admission::{Origin, Sound, reserve_joined};
use crate::accounting::quota::Reservation;
use crate::rpc::PutStatus;

/// Blocks with different values of the first byte of their keys, modulo so many, do not wait for
/// each other.
const TURNS: usize = 64;

/// Whose turn it is to be joined with what is held.
pub(crate) struct JoinTurns([Arc<Mutex<()>>; TURNS]);

/// The turn of a batch: it lasts until all copies of this are dropped.
pub(super) type Turn = Arc<Vec<OwnedMutexGuard<()>>>;

impl Default for JoinTurns {
    fn default() -> JoinTurns {
        JoinTurns(std::array::from_fn(|_| Arc::default()))
    }
}

impl JoinTurns {
    /// Waits until no other task joins blocks with these keys; the result keeps the turn.
    async fn take(&self, keys: impl Iterator<Item = &Key>) -> Turn {
        let mut places: Vec<usize> = keys.map(|key| usize::from(key.0[0]) % TURNS).collect();
        // In one order everywhere: no two tasks wait for each other.
        places.sort_unstable();
        places.dedup();
        let mut turns = Vec::with_capacity(places.len());
        for place in places {
            turns.push(self.0[place].clone().lock_owned().await);
        }
        Arc::new(turns)
    }
}

/// Blocks of a batch as they are to be stored.
pub(super) struct Joined {
    /// In the order of the batch.
    pub sound: Vec<Sound>,
    /// For each block of the batch: why it is not taken, or nothing of those in `sound`.
    pub refused: Vec<Option<PutStatus>>,
    /// Kept until the store has decided, also if nobody waits for that any more.
    pub turn: Turn,
}

/// Joins those blocks of a batch whose kinds join with what is held of them; `room` grows with them.
pub(super) async fn join_held(
    replication: &Replication,
    origin: &Origin,
    batch: &[Sound],
    room: &mut Reservation,
) -> Joined {
    let joining = batch.iter().filter(|sound| sound.stored.info.kind.joins());
    let turn = replication.join_turns.take(joining.map(|sound| &sound.stored.info.key)).await;
    let (mut sound, mut refused) = (Vec::with_capacity(batch.len()), Vec::new());
    for one in batch {
        let joined = match one.stored.info.kind.joins() {
            true => join_one(replication, origin, one.clone(), room).await,
            false => Ok(one.clone()),
        };
        refused.push(joined.as_ref().err().copied());
        sound.extend(joined);
    }
    Joined { sound, refused, turn }
}

async fn join_one(
    replication: &Replication,
    origin: &Origin,
    mut sound: Sound,
    room: &mut Reservation,
) -> Result<Sound, PutStatus> {
    let came = sound.clone();
    let info = &mut sound.stored.info;
    let held = match replication.store.get(&info.key).await {
        Ok(held) => held,
        // It is lost here: what comes may take its place, and repair brings the rest.
        Err(error @ StoreError::Corrupted { .. }) => {
            replication.note_store_error(&error);
            None
        }
        Err(_) => return Err(PutStatus::Failed),
    };
    let held_bytes = held.as_ref().map(|held| &held.bytes[..]);
    let now_ms = replication.env.unix_ms();
    let admitted = match origin {
        Origin::Publisher { .. } => info.kind.admit(held_bytes, &sound.block.bytes, now_ms),
        Origin::Carrier | Origin::Diverted => info.kind.admit_copy(&sound.block.bytes, now_ms),
    };
    admitted.map_err(|why| match (why, &held) {
        (NotAdmitted::Outdated, Some(held)) => PutStatus::Superseded { held: held.info.version },
        _ => PutStatus::NotAdmitted,
    })?;
    let Some(held) = held else { return Ok(sound) };
    let joined = info.kind.join(&held.bytes, &sound.block.bytes);
    let (joined, version) = joined.ok_or(PutStatus::Invalid)?;
    info.version = version;
    info.len_bytes = u32::try_from(joined.len()).expect("verified blocks are short");
    sound.stored.bytes = joined.into();
    room.add(reserve_joined(replication, &came, &sound)?);
    Ok(sound)
}
