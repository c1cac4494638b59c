//! Changing who may read an encrypted shared volume.
//!
//! Only the volume's owner can. A user who is removed keeps the read keys of the epochs so far, and so can
//! read what is sealed with them: [`begin_epoch`](super::groups::begin_epoch) makes writers seal with
//! another one.

use std::sync::Arc;

use atoll_dht::Blocks;
use atoll_env::Env;
use atoll_key::{SecretKey, SignedBlock, UserId, VolumeId};

use super::groups::put_signed;
use super::reader_record::{Reader, ReaderRecord};
use super::{AccessError, next_version, read_signed};

/// The newest record of a volume's readers; `None` if the ring has none.
///
/// # Errors
/// If the ring cannot be asked, or what it has is no record of readers.
pub async fn read_readers(
    blocks: &Arc<dyn Blocks>,
    volume: VolumeId,
) -> Result<Option<ReaderRecord>, AccessError> {
    let block = read_signed(blocks, ReaderRecord::id(volume)).await?;
    block.map(|block| decode(&block)).transpose()
}

fn decode(block: &SignedBlock) -> Result<ReaderRecord, AccessError> {
    ReaderRecord::decode(&block.payload)
        .map_err(|error| AccessError::Bad { of: "volume's readers", error })
}

/// Puts the record of a new volume, whose only reader is `user`.
pub(super) async fn put_first(
    env: &Env,
    blocks: &Arc<dyn Blocks>,
    volume: &SecretKey,
    (user, label): (UserId, &str),
) -> Result<(), AccessError> {
    let mut record = ReaderRecord::default();
    record.add(volume, user, label, 0)?;
    let sign = |held: Option<&SignedBlock>| {
        Ok(Some(record.sign(volume, next_version(held, env.unix_ms()))?))
    };
    put_signed(blocks, ReaderRecord::id(volume.volume_id()), sign).await.map(drop)
}

/// Changes the record of a volume's readers: `change` is called with it and the time in seconds since
/// 1970, again if another change came first. Returns what it returned. A record that has not changed is
/// not put.
pub(super) async fn change_readers<T>(
    env: &Env,
    blocks: &Arc<dyn Blocks>,
    volume: &SecretKey,
    mut change: impl FnMut(&mut ReaderRecord, u64) -> Result<T, AccessError>,
) -> Result<T, AccessError> {
    let mut outcome = None;
    put_signed(blocks, ReaderRecord::id(volume.volume_id()), |held| {
        let held = held.ok_or(AccessError::NoReaders)?;
        let before = decode(held)?;
        let (mut record, now_ms) = (before.clone(), env.unix_ms());
        outcome = Some(change(&mut record, now_ms / 1000)?);
        match record == before {
            true => Ok(None),
            false => Ok(Some(record.sign(volume, next_version(Some(held), now_ms))?)),
        }
    })
    .await?;
    Ok(outcome.expect("it was called"))
}

/// Lets a user read a volume, until that time (seconds since 1970; 0: for good). An empty label keeps a
/// former one. The end counts for the read keys of epochs that begin after it.
///
/// # Errors
/// If the volume is not encrypted, the record is too long after the change, the user's key is no key, the
/// time has passed, or the ring does not take it.
pub async fn add_reader(
    env: &Env,
    blocks: &Arc<dyn Blocks>,
    volume: &SecretKey,
    (user, label): (UserId, &str),
    until_secs: u64,
) -> Result<(), AccessError> {
    change_readers(env, blocks, volume, |record, now_secs| {
        if until_secs > 0 && until_secs < now_secs {
            return Err(AccessError::Past);
        }
        record.add(volume, user, label, until_secs)
    })
    .await
}

/// Gives a user no read key of a later epoch; returns the reader if the user was one.
///
/// # Errors
/// As of [`add_reader`].
pub async fn remove_reader(
    env: &Env,
    blocks: &Arc<dyn Blocks>,
    volume: &SecretKey,
    user: UserId,
) -> Result<Option<Reader>, AccessError> {
    change_readers(env, blocks, volume, |record, _| Ok(record.readers.remove(&user))).await
}
