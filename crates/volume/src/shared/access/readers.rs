//! Changing who may read an encrypted shared volume.
//!
//! Only the volume's owner can. A user who is removed keeps the read keys of the epochs so far, and so can
//! read what is sealed with them: [`begin_epoch`](super::groups::begin_epoch) makes writers seal with
//! another one.

use std::collections::BTreeMap;
use std::sync::Arc;

use atoll_dht::Blocks;
use atoll_env::Env;
use atoll_key::{GroupId, SecretKey, SignedBlock, UserId, VolumeId};
use futures_util::future::join_all;

use super::group_record::GroupRecord;
use super::groups::{put_signed, read_group};
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

/// Makes the members of a group readers of a volume, those who are members now and those who will be. The owner's
/// node follows changes of the group once a day ([`follow_groups`]).
///
/// # Errors
/// As of [`add_reader`], and if the group's record cannot be read.
pub async fn add_reading_group(
    env: &Env,
    blocks: &Arc<dyn Blocks>,
    volume: &SecretKey,
    group: GroupId,
) -> Result<(usize, usize), AccessError> {
    let record = read_group(blocks, group).await?.ok_or(AccessError::NoGroup)?;
    let members = BTreeMap::from([(group, record)]);
    change_readers(env, blocks, volume, |readers, now_secs| {
        readers.groups.insert(group);
        readers.follow(volume, &members, now_secs)
    })
    .await
}

/// Gives the members of a group no read key of a later epoch, unless they were named as readers or belong to another
/// group that is to read. Whether the group was one of those.
///
/// # Errors
/// As of [`add_reader`].
pub async fn remove_reading_group(
    env: &Env,
    blocks: &Arc<dyn Blocks>,
    volume: &SecretKey,
    group: GroupId,
) -> Result<bool, AccessError> {
    change_readers(env, blocks, volume, |readers, now_secs| {
        let was_one = readers.groups.remove(&group);
        readers.follow(volume, &BTreeMap::new(), now_secs)?;
        Ok(was_one)
    })
    .await
}

/// Makes those readers who have joined one of the volume's reading groups, and nobody any more who has left. A group
/// whose record cannot be read keeps its readers. How many came and went.
///
/// # Errors
/// As of [`add_reader`].
pub async fn follow_groups(
    env: &Env,
    blocks: &Arc<dyn Blocks>,
    volume: &SecretKey,
) -> Result<(usize, usize), AccessError> {
    let members = reading_members(blocks, volume.volume_id()).await?;
    if members.is_empty() {
        return Ok((0, 0));
    }
    change_readers(env, blocks, volume, |readers, now_secs| {
        readers.follow(volume, &members, now_secs)
    })
    .await
}

/// The records of a volume's reading groups, as far as they can be read.
pub(super) async fn reading_members(
    blocks: &Arc<dyn Blocks>,
    volume: VolumeId,
) -> Result<BTreeMap<GroupId, GroupRecord>, AccessError> {
    let record = read_readers(blocks, volume).await?.ok_or(AccessError::NoReaders)?;
    let reads = record.groups.iter().map(|group| async move {
        // One whose lease has run out counts as one that cannot be read.
        Some((*group, read_group(blocks, *group).await.ok()??))
    });
    Ok(join_all(reads).await.into_iter().flatten().collect())
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
