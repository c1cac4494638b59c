//! Changing who belongs to a group.
//!
//! Only the holder of a group's key can: its owner, and of a volume's default group the [keepers](super::keepers). A change
//! reads the record, puts the next version, and begins again if another version came first.

use std::collections::BTreeMap;
use std::sync::Arc;

use atoll_dht::{Blocks, PutError};
use atoll_env::Env;
use atoll_key::kinds::certified::Certificate;
use atoll_key::{GroupId, SecretKey, SignedBlock, UserId, volume_group};

use super::group_record::{GroupRecord, Member};
use super::keeper_record::{KeeperRecord, ListedMember};
use super::keepers::{change_keepers, follow_epochs, list_member};
use super::reader_record::ReaderRecord;
use super::readers::{add_reader, change_readers, follow_groups, reading_members};
use super::{ATTEMPTS, AccessError, VolumeRecord, next_version, read_signed, read_volume};

const DAY_SECS: u64 = 24 * 3600;
/// For how long a certificate is issued: a member who is removed can write for so long at most. A guess:
/// an owner's node may be away for six days without anybody noticing.
pub const CERTIFICATE_SECS: u64 = 7 * DAY_SECS;
/// A certificate that is valid for less than this is issued anew: once a day.
pub const RENEW_BELOW_SECS: u64 = 6 * DAY_SECS;
/// By how much a certificate is valid before it is issued, since clocks differ: what a replica allows
/// a fresh write.
const CLOCK_SLACK_SECS: u64 = 600;

/// What a renewal did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Renewal {
    /// Members with a new certificate.
    pub renewed: usize,
    /// Members who were dropped, since their time was over.
    pub dropped: usize,
}

/// The newest record of a group; `None` if the ring has none.
///
/// # Errors
/// If the ring cannot be asked, or what it has is no record of the group.
pub async fn read_group(
    blocks: &Arc<dyn Blocks>,
    group: GroupId,
) -> Result<Option<GroupRecord>, AccessError> {
    let block = read_signed(blocks, GroupRecord::id(group)).await?;
    block.map(|block| decode(&block, group)).transpose()
}

fn decode(block: &SignedBlock, group: GroupId) -> Result<GroupRecord, AccessError> {
    GroupRecord::decode(&block.payload, group)
        .map_err(|error| AccessError::Bad { of: "group", error })
}

/// Puts a record in the place of any other that the group has.
///
/// # Errors
/// If it is too long, or the ring does not take it.
pub async fn put_group(
    env: &Env,
    blocks: &Arc<dyn Blocks>,
    group: &SecretKey,
    record: &GroupRecord,
) -> Result<(), AccessError> {
    let id = GroupRecord::id(group.group_id());
    put_signed(blocks, id, |held| Ok(Some(record.sign(group, next_version(held, env.unix_ms()))?)))
        .await
        .map(drop)
}

/// Changes the record of a group: `change` is called with it and the time in seconds since 1970, again
/// if another change came first. Returns what it returned. A record that has not changed is not put.
///
/// # Errors
/// If there is no record, it is too long after the change, or the ring does not take it.
pub async fn change_group<T>(
    env: &Env,
    blocks: &Arc<dyn Blocks>,
    group: &SecretKey,
    mut change: impl FnMut(&mut GroupRecord, u64) -> T,
) -> Result<T, AccessError> {
    let group_id = group.group_id();
    let mut outcome = None;
    put_signed(blocks, GroupRecord::id(group_id), |held| {
        let held = held.ok_or(AccessError::NoGroup)?;
        let before = decode(held, group_id)?;
        let mut record = before.clone();
        let now_ms = env.unix_ms();
        outcome = Some(change(&mut record, now_ms / 1000));
        match record == before {
            true => Ok(None),
            false => Ok(Some(record.sign(group, next_version(Some(held), now_ms))?)),
        }
    })
    .await?;
    Ok(outcome.expect("it was called"))
}

/// Puts what `next` makes of the version that the ring holds, if it makes anything; begins again if that
/// was replaced meanwhile.
pub(super) async fn put_signed(
    blocks: &Arc<dyn Blocks>,
    id: atoll_key::BlockId,
    mut next: impl FnMut(Option<&SignedBlock>) -> Result<Option<SignedBlock>, AccessError>,
) -> Result<Option<SignedBlock>, AccessError> {
    for attempt in 1.. {
        let held = read_signed(blocks, id).await?;
        let Some(block) = next(held.as_ref())? else { return Ok(held) };
        match blocks.put_signed(block.clone()).await {
            Ok(()) => return Ok(Some(block)),
            Err(PutError::Superseded { .. }) if attempt < ATTEMPTS => {}
            Err(error) => return Err(error.into()),
        }
    }
    unreachable!("the last attempt returns")
}

/// A certificate from now on for as long as certificates are issued, or until the membership ends.
fn issue(group: &SecretKey, user: UserId, now_secs: u64, until_secs: u64) -> Certificate {
    let end = now_secs + CERTIFICATE_SECS;
    let end = if until_secs > 0 { end.min(until_secs) } else { end };
    Certificate::issue(group, user, now_secs.saturating_sub(CLOCK_SLACK_SECS), end)
}

/// A member from now on, until that time (seconds since 1970; 0: for good).
///
/// # Errors
/// If the time has passed.
pub fn new_member(
    group: &SecretKey,
    user: UserId,
    label: &str,
    now_secs: u64,
    until_secs: u64,
) -> Result<Member, AccessError> {
    let certificate = issue(group, user, now_secs, until_secs);
    let member = Member { certificate, label: label.to_owned(), until_secs };
    if member.has_ended(now_secs) { Err(AccessError::Past) } else { Ok(member) }
}

/// Adds a member, or says anew until when one belongs to the group. An empty label keeps a former one.
///
/// # Errors
/// As of [`change_group`], and if the time has passed.
pub async fn add_member(
    env: &Env,
    blocks: &Arc<dyn Blocks>,
    group: &SecretKey,
    user: UserId,
    label: &str,
    until_secs: u64,
) -> Result<(), AccessError> {
    change_group(env, blocks, group, |record, now_secs| {
        let mut member = new_member(group, user, label, now_secs, until_secs)?;
        if let Some(former) = record.members.get(&user)
            && label.is_empty()
        {
            member.label.clone_from(&former.label);
        }
        record.members.insert(user, member);
        Ok(())
    })
    .await?
}

/// Removes a member; returns it if it was one. Its certificate stays valid until its end.
///
/// # Errors
/// As of [`change_group`].
pub async fn remove_member(
    env: &Env,
    blocks: &Arc<dyn Blocks>,
    group: &SecretKey,
    user: UserId,
) -> Result<Option<Member>, AccessError> {
    change_group(env, blocks, group, |record, _| record.members.remove(&user)).await
}

/// Adds a member to a volume's default group, as [`add_member`] does, and to the readers of an encrypted
/// volume before. With keepers, the owner's list has the member first.
///
/// # Errors
/// As of [`change_group`], if the time has passed, and if the user's key is no key.
pub async fn add_volume_member(
    env: &Env,
    blocks: &Arc<dyn Blocks>,
    (volume, record): (&SecretKey, &VolumeRecord),
    (user, label): (UserId, &str),
    until_secs: u64,
) -> Result<(), AccessError> {
    if record.is_encrypted {
        add_reader(env, blocks, volume, (user, label), until_secs).await?;
    }
    if record.has_keepers {
        list_member(env, blocks, volume, (user, label), until_secs).await?;
    }
    let group = volume_group(volume, record.group_epoch);
    add_member(env, blocks, &group, user, label, until_secs).await
}

/// Issues certificates anew that are valid for less than [`RENEW_BELOW_SECS`], and drops the members
/// whose time is over.
///
/// # Errors
/// As of [`change_group`].
pub async fn renew(
    env: &Env,
    blocks: &Arc<dyn Blocks>,
    group: &SecretKey,
) -> Result<Renewal, AccessError> {
    change_group(env, blocks, group, |record, now_secs| {
        let mut renewal = Renewal::default();
        let count = record.members.len();
        record.members.retain(|_, member| !member.has_ended(now_secs));
        renewal.dropped = count - record.members.len();
        for (user, member) in &mut record.members {
            let left = member.certificate.not_after_secs.saturating_sub(now_secs);
            // Not if it lasts as long as the membership.
            let is_last = member.certificate.not_after_secs == member.until_secs;
            if left < RENEW_BELOW_SECS && !is_last {
                member.certificate = issue(group, *user, now_secs, member.until_secs);
                renewal.renewed += 1;
            }
        }
        renewal
    })
    .await
}

/// Corrects a group's record by the owner's list: drops users that are not listed, takes labels and ends from the list, and
/// issues a certificate in the place of each that lasts too short, or longer than an owner issues them. Listed users
/// that the record lacks are added only if `adds` says so.
pub(super) async fn renew_listed(
    env: &Env,
    blocks: &Arc<dyn Blocks>,
    group: &SecretKey,
    listed: &BTreeMap<UserId, ListedMember>,
    adds: bool,
) -> Result<Renewal, AccessError> {
    change_group(env, blocks, group, |record, now_secs| {
        let mut renewal = Renewal::default();
        let mut before = std::mem::take(&mut record.members);
        for (user, one) in listed.iter().filter(|(_, one)| !one.has_ended(now_secs)) {
            let held = before.remove(user).map(|member| member.certificate);
            if held.is_none() && !adds {
                continue;
            }
            let held = held.filter(|held| is_as_issued(held, now_secs, one.until_secs));
            renewal.renewed += usize::from(held.is_none());
            let certificate = held.unwrap_or_else(|| issue(group, *user, now_secs, one.until_secs));
            record.members.insert(*user, one.member(group, *user, Some(certificate)));
        }
        renewal.dropped = before.len();
        renewal
    })
    .await
}

/// Whether a certificate is one that its group's owner has issued, for this end of the membership, and that lasts.
fn is_as_issued(certificate: &Certificate, now_secs: u64, until_secs: u64) -> bool {
    let Certificate { not_before_secs, not_after_secs, .. } = *certificate;
    let longest = now_secs + CERTIFICATE_SECS + CLOCK_SLACK_SECS;
    let is_last = not_after_secs == until_secs;
    let is_too_long = not_after_secs > longest || (until_secs > 0 && not_after_secs > until_secs);
    let lasts = not_after_secs.saturating_sub(now_secs) >= RENEW_BELOW_SECS || is_last;
    not_before_secs <= now_secs && !is_too_long && lasts && certificate.is_signed()
}

/// Renews the certificates of a volume's default group; while a rebinding is not through, of the former
/// ones too, to which inodes are still bound. With keepers, the owner's list counts, and they are given the keys of these
/// epochs. Drops the readers of an encrypted volume whose time is over, and follows
/// its reading groups.
///
/// # Errors
/// As of [`change_group`].
pub async fn renew_volume(
    env: &Env,
    blocks: &Arc<dyn Blocks>,
    volume: &SecretKey,
    record: &VolumeRecord,
) -> Result<Renewal, AccessError> {
    let mut all = Renewal::default();
    let epochs = record.bound_epoch..=record.group_epoch;
    let listed = match record.has_keepers {
        true => Some(keepers_without(env, blocks, (volume, record), None, false).await?),
        false => None,
    };
    for epoch in epochs {
        let group = volume_group(volume, epoch);
        let renewed = match &listed {
            Some(listed) => {
                renew_listed(env, blocks, &group, listed, epoch == record.group_epoch).await
            }
            None => renew(env, blocks, &group).await,
        };
        match renewed {
            Ok(Renewal { renewed, dropped }) => {
                all.renewed += renewed;
                all.dropped += dropped;
            }
            // An epoch whose beginning was interrupted.
            Err(AccessError::NoGroup) if epoch < record.group_epoch => {}
            // Of a former epoch a former keeper can have made anything.
            Err(error) if epoch < record.group_epoch && record.has_keepers => {
                tracing::warn!("certificates of a former epoch are not renewed: {error}");
            }
            Err(error) => return Err(error),
        }
    }
    if record.is_encrypted {
        let ended = |readers: &mut ReaderRecord, now_secs| Ok(readers.drop_ended(now_secs));
        change_readers(env, blocks, volume, ended).await?;
        follow_groups(env, blocks, volume).await?;
    }
    Ok(all)
}

/// Changes a volume's record; returns it, and the block that it is in.
///
/// # Errors
/// If there is none, or the ring does not take it.
pub async fn change_volume(
    env: &Env,
    blocks: &Arc<dyn Blocks>,
    volume: &SecretKey,
    mut change: impl FnMut(&mut VolumeRecord),
) -> Result<(SignedBlock, VolumeRecord), AccessError> {
    let bad = |error| AccessError::Bad { of: "volume", error };
    let mut changed = None;
    let id = SignedBlock::id_at(volume.volume_id().root_key());
    let block = put_signed(blocks, id, |held| {
        let held = held.ok_or(AccessError::NoVolume)?;
        let mut record = VolumeRecord::decode(&held.payload).map_err(bad)?;
        change(&mut record);
        let version = next_version(Some(held), env.unix_ms());
        let block = SignedBlock::sign(volume, b"", version, &record.encode()?);
        changed = Some(record);
        Ok(Some(block))
    });
    Ok((block.await?.ok_or(AccessError::NoVolume)?, changed.expect("it was changed")))
}

/// Changes the record of a volume's keepers: they get the keys of the epochs whose certificates are renewed now, and members
/// whose time is over are dropped. The keeper `user` is one no more, and is dropped from the owner's list unless it
/// `stays` a member. Returns that list.
async fn keepers_without(
    env: &Env,
    blocks: &Arc<dyn Blocks>,
    (volume, record): (&SecretKey, &VolumeRecord),
    user: Option<UserId>,
    stays: bool,
) -> Result<BTreeMap<UserId, ListedMember>, AccessError> {
    let epochs = record.bound_epoch..=record.group_epoch;
    change_keepers(env, blocks, volume, None, |keepers, now_secs| {
        keepers.drop_ended(now_secs);
        if let Some(user) = user.filter(|_| !stays) {
            keepers.members.remove(&user);
        }
        let KeeperRecord { keepers: held, members, .. } = &*keepers;
        let is_left = |keeper: &UserId| Some(*keeper) != user && members.contains_key(keeper);
        let users: Vec<UserId> = held.keys().filter(|user| is_left(user)).copied().collect();
        keepers.give(volume, &users, epochs.clone())?;
        Ok(keepers.members.clone())
    })
    .await
}

/// Begins a new epoch of a volume's default group without `user`: the other members have certificates of
/// the new group, and what is made anew is bound to it once a [rebinding](mod@super::rebind) has reached
/// the directory it is made in. The other readers of an encrypted volume have its new read key before that, the other
/// keepers the group's key after it.
/// Returns the volume's record, and the block that it is in.
///
/// # Errors
/// As of [`change_group`].
pub async fn begin_epoch(
    env: &Env,
    blocks: &Arc<dyn Blocks>,
    volume: &SecretKey,
    user: UserId,
) -> Result<(SignedBlock, VolumeRecord), AccessError> {
    begin(env, blocks, volume, user, false).await
}

/// Begins a new epoch whose key `user`, who has been a keeper, does not have; the user stays a member.
///
/// # Errors
/// As of [`begin_epoch`], and if the volume never had keepers.
pub async fn begin_epoch_without_keeper(
    env: &Env,
    blocks: &Arc<dyn Blocks>,
    volume: &SecretKey,
    user: UserId,
) -> Result<(SignedBlock, VolumeRecord), AccessError> {
    begin(env, blocks, volume, user, true).await
}

/// As of [`begin_epoch`]; `stays` says whether the user is a member of the new epoch.
async fn begin(
    env: &Env,
    blocks: &Arc<dyn Blocks>,
    volume: &SecretKey,
    user: UserId,
    stays: bool,
) -> Result<(SignedBlock, VolumeRecord), AccessError> {
    let (_, record) =
        read_volume(blocks, volume.volume_id()).await?.ok_or(AccessError::NoVolume)?;
    if stays && !record.has_keepers {
        return Err(AccessError::NoKeepers);
    }
    let former = volume_group(volume, record.group_epoch);
    // The others need it until their inodes are bound to the new one.
    let change = |group: &mut GroupRecord, _| {
        if !stays {
            group.members.remove(&user);
        }
        group.clone()
    };
    let changed = change_group(env, blocks, &former, change).await;
    let (label, remaining) = if record.has_keepers {
        let listed = keepers_without(env, blocks, (volume, &record), Some(user), stays).await?;
        if let Err(error) = changed {
            // A keeper can have made it anything.
            tracing::warn!("the record of the former epoch's group stays as it is: {error}");
        }
        (record.label.clone(), listed)
    } else {
        let group = changed?;
        (group.label.clone(), KeeperRecord::listing(&group).members)
    };
    let mut epoch = record.group_epoch + 1;
    if record.is_encrypted {
        // Members who have left a reading group get no key any more.
        let members = reading_members(blocks, volume.volume_id()).await?;
        epoch = change_readers(env, blocks, volume, |readers, now_secs| {
            // A change that was interrupted here has given a key to readers whom this one may shut out.
            let epoch = record.group_epoch.max(readers.epoch) + 1;
            readers.follow(volume, &members, now_secs)?;
            if !stays {
                readers.readers.remove(&user);
            }
            readers.drop_ended(now_secs);
            readers.begin(volume, epoch)?;
            Ok(epoch)
        })
        .await?;
    }
    let group = volume_group(volume, epoch);
    let now_secs = env.unix_ms() / 1000;
    let mut next = GroupRecord { label, ..GroupRecord::default() };
    for (user, ListedMember { label, until_secs }) in &remaining {
        // One whose time is over is not taken along.
        if let Ok(member) = new_member(&group, *user, label, now_secs, *until_secs) {
            next.members.insert(*user, member);
        }
    }
    put_group(env, blocks, &group, &next).await?;
    let begun = change_volume(env, blocks, volume, |record| {
        record.group_epoch = record.group_epoch.max(epoch);
    });
    let begun = begun.await?;
    if record.has_keepers {
        follow_epochs(env, blocks, volume, &begun.1).await?;
    }
    Ok(begun)
}
