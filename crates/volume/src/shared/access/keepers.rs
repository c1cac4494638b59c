//! Keepers: members who renew the certificates of a volume's members while its owner's node is away.
//!
//! A keeper has the secret key of the volume's default group, sealed to its user by the owner, and so *can* do what that key
//! can until a new epoch begins: certify anybody for any time, and write or remove the group's record. It cannot name
//! keepers, rebind inodes, read what it could not read, or begin an epoch, for which the volume's key is needed. And
//! nothing that it does outlasts its being a keeper: the owner keeps a list of the members of his own
//! ([`KeeperRecord::members`]), and taking the keeper's part away begins an epoch with the members of that list.
//!
//! A keeper's node *does* renew: it issues certificates to users who are both in the group's record and in the owner's list,
//! and drops others from the record. It adds nobody, so that a member whom the owner has just removed does not come
//! back by a keeper that has read the list before.

use std::sync::Arc;

use atoll_dht::Blocks;
use atoll_env::Env;
use atoll_key::{SecretKey, SignedBlock, UserId, VolumeId, volume_group};

use super::group_record::GroupRecord;
use super::groups::{Renewal, change_volume, put_signed, read_group, remove_member, renew_listed};
use super::keeper_record::{KeeperRecord, ListedMember, MAX_KEEPERS};
use super::{AccessError, TooLong, VolumeRecord, next_version, read_signed, read_volume};

/// The newest record of a volume's keepers; `None` if the ring has none.
///
/// # Errors
/// If the ring cannot be asked, or what it has is no record of keepers.
pub async fn read_keepers(
    blocks: &Arc<dyn Blocks>,
    volume: VolumeId,
) -> Result<Option<KeeperRecord>, AccessError> {
    let block = read_signed(blocks, KeeperRecord::id(volume)).await?;
    block.map(|block| decode(&block)).transpose()
}

fn decode(block: &SignedBlock) -> Result<KeeperRecord, AccessError> {
    KeeperRecord::decode(&block.payload)
        .map_err(|error| AccessError::Bad { of: "volume's keepers", error })
}

/// Changes the record of a volume's keepers, as [`change_group`](super::groups::change_group) does a group's. Without
/// a record it begins with `first`, if that is given.
pub(super) async fn change_keepers<T>(
    env: &Env,
    blocks: &Arc<dyn Blocks>,
    volume: &SecretKey,
    first: Option<&KeeperRecord>,
    mut change: impl FnMut(&mut KeeperRecord, u64) -> Result<T, AccessError>,
) -> Result<T, AccessError> {
    let mut outcome = None;
    put_signed(blocks, KeeperRecord::id(volume.volume_id()), |held| {
        let before = held.map(decode).transpose()?;
        let record = before.as_ref().or(first).ok_or(AccessError::NoKeepers)?;
        let (mut record, now_ms) = (record.clone(), env.unix_ms());
        outcome = Some(change(&mut record, now_ms / 1000)?);
        match before.as_ref() == Some(&record) {
            true => Ok(None),
            false => Ok(Some(record.sign(volume, next_version(held, now_ms))?)),
        }
    })
    .await?;
    Ok(outcome.expect("it was called"))
}

/// Makes a member of a volume's default group a keeper. Returns the volume's record, and the block that it is in.
///
/// # Errors
/// If the user is no member, its key is no key, there are too many keepers, or the ring does not take it.
pub async fn add_keeper(
    env: &Env,
    blocks: &Arc<dyn Blocks>,
    (volume, record): (&SecretKey, &VolumeRecord),
    user: UserId,
) -> Result<(SignedBlock, VolumeRecord), AccessError> {
    if !record.has_keepers {
        // Only the owner could write the group's record so far. That the owner's list counts is said before
        // anybody else can.
        let group = volume_group(volume, record.group_epoch).group_id();
        let group = read_group(blocks, group).await?.ok_or(AccessError::NoGroup)?;
        let listed = KeeperRecord::listing(&group);
        change_keepers(env, blocks, volume, Some(&listed), |keepers, _| {
            *keepers = listed.clone();
            Ok(())
        })
        .await?;
    }
    let changed = change_volume(env, blocks, volume, |record| record.has_keepers = true).await?;
    let epochs = changed.1.bound_epoch..=changed.1.group_epoch;
    change_keepers(env, blocks, volume, None, |keepers, _| {
        if !keepers.members.contains_key(&user) {
            return Err(AccessError::NotMember);
        }
        let mut users: Vec<UserId> = keepers.keepers.keys().copied().collect();
        if !users.contains(&user) {
            users.push(user);
        }
        if users.len() > MAX_KEEPERS {
            return Err(TooLong::Keepers.into());
        }
        keepers.give(volume, &users, epochs.clone())
    })
    .await?;
    Ok(changed)
}

/// Gives the keepers the keys of the epochs whose certificates are renewed now.
///
/// # Errors
/// If the volume has no keepers, or the ring does not take it.
pub async fn follow_epochs(
    env: &Env,
    blocks: &Arc<dyn Blocks>,
    volume: &SecretKey,
    record: &VolumeRecord,
) -> Result<(), AccessError> {
    let epochs = record.bound_epoch..=record.group_epoch;
    change_keepers(env, blocks, volume, None, |keepers, _| {
        let users: Vec<UserId> = keepers.keepers.keys().copied().collect();
        keepers.give(volume, &users, epochs.clone())
    })
    .await
}

/// Notes a member in the owner's list. An empty label keeps a former one.
pub(super) async fn list_member(
    env: &Env,
    blocks: &Arc<dyn Blocks>,
    volume: &SecretKey,
    (user, label): (UserId, &str),
    until_secs: u64,
) -> Result<(), AccessError> {
    change_keepers(env, blocks, volume, None, |keepers, now_secs| {
        let former = keepers.members.remove(&user).map(|member| member.label);
        let label = if label.is_empty() { former.unwrap_or_default() } else { label.to_owned() };
        let member = ListedMember { until_secs, label };
        if member.has_ended(now_secs) {
            return Err(AccessError::Past);
        }
        keepers.members.insert(user, member);
        Ok(())
    })
    .await
}

/// Removes a member who is no keeper from a volume's default group; how long its certificate lasts, if it was a member: seconds
/// since 1970. With keepers, from the owner's list too.
///
/// # Errors
/// If the user is a keeper, whose key only a new epoch makes void; else as of
/// [`change_group`](super::groups::change_group).
pub async fn remove_volume_member(
    env: &Env,
    blocks: &Arc<dyn Blocks>,
    (volume, record): (&SecretKey, &VolumeRecord),
    user: UserId,
) -> Result<Option<u64>, AccessError> {
    let mut was_listed = false;
    if record.has_keepers {
        was_listed = change_keepers(env, blocks, volume, None, |keepers, _| {
            if keepers.keepers.contains_key(&user) {
                return Err(AccessError::IsKeeper);
            }
            Ok(keepers.members.remove(&user).is_some())
        })
        .await?;
    }
    let group = volume_group(volume, record.group_epoch);
    let removed = remove_member(env, blocks, &group, user).await?;
    let certified = removed.map(|member| member.certificate.not_after_secs);
    Ok(certified.or(was_listed.then_some(0)))
}

/// The members of a volume's default group, as the owner has them, each with the certificate that the group's record
/// has; one without a certificate has one that ended in 1970. Second, users in the group's record whom only a keeper can have
/// put there.
///
/// # Errors
/// If a record cannot be read.
pub async fn volume_members(
    blocks: &Arc<dyn Blocks>,
    volume: &SecretKey,
    record: &VolumeRecord,
) -> Result<(GroupRecord, Vec<UserId>), AccessError> {
    let group = volume_group(volume, record.group_epoch);
    let found = read_group(blocks, group.group_id()).await;
    if !record.has_keepers {
        return Ok((found?.ok_or(AccessError::NoGroup)?, Vec::new()));
    }
    let listed = read_keepers(blocks, volume.volume_id()).await?.ok_or(AccessError::NoKeepers)?;
    // What keepers have made of the group's record must not be in the owner's way.
    let mut found = found.ok().flatten().unwrap_or_default();
    let mut members = GroupRecord { label: record.label.clone(), ..GroupRecord::default() };
    for (user, listed) in &listed.members {
        let certificate = found.members.remove(user).map(|member| member.certificate);
        members.members.insert(*user, listed.member(&group, *user, certificate));
    }
    Ok((members, found.members.into_keys().collect()))
}

/// Renews the certificates of a volume's members for its keeper `user`; `None` if the user is no keeper.
///
/// # Errors
/// If a record cannot be read, or the ring does not take the group's.
pub async fn renew_as_keeper(
    env: &Env,
    blocks: &Arc<dyn Blocks>,
    volume: VolumeId,
    user: &SecretKey,
) -> Result<Option<Renewal>, AccessError> {
    let Some((_, record)) = read_volume(blocks, volume).await? else { return Ok(None) };
    if !record.has_keepers {
        return Ok(None);
    }
    let keepers = read_keepers(blocks, volume).await?.ok_or(AccessError::NoKeepers)?;
    let keys = keepers.keys_of(user, &volume);
    let Some((present, former)) = keys.split_last() else { return Ok(None) };
    let mut all = renew_listed(env, blocks, present, &keepers.members, false).await?;
    for group in former {
        match renew_listed(env, blocks, group, &keepers.members, false).await {
            Ok(Renewal { renewed, dropped }) => {
                all.renewed += renewed;
                all.dropped += dropped;
            }
            // An epoch whose beginning was interrupted, or of which a former keeper has made anything.
            Err(error) => tracing::debug!("certificates of a former epoch: {error}"),
        }
    }
    Ok(Some(all))
}
