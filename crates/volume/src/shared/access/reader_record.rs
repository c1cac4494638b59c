//! Who may read an encrypted shared volume: the payload of the signed block under the volume's key, named
//! `readers`.
//!
//! | bytes | field |
//! |---|---|
//! | 4 | magic `ATRD` |
//! | 1 | layout, 1 |
//! | 4 | epoch, below 4,096 |
//! | 1 | number of groups whose members are readers |
//! | 32 each | their public keys, ascending |
//! | 2 | number of readers, at most 4,096 |
//! | … | readers, their users ascending |
//!
//! | **reader** | |
//! |---|---|
//! | 32 | the user's public key |
//! | 8 | until when the user is a reader, seconds since 1970; 0: no end was said |
//! | 1 + n | label: the user's name as the granter typed it, UTF-8, at most 64 bytes; may be empty |
//! | 1 | 0: the user was named as a reader; n: the user is a member of the n-th of the groups |
//! | 56 | the epoch's read key, sealed to the user ([`atoll_key::epoch_key`]) |
//!
//! Members of groups are added and dropped by the owner's node once a day, and before an epoch begins.
//! The members of the volume's default group are readers too. Everybody who knows the volume's address can
//! read who its readers are. A record has one encoding.

use std::collections::{BTreeMap, BTreeSet};

use atoll_key::epoch_key::{MAX_EPOCHS, SEALED_KEY_BYTES};
use atoll_key::{BlockId, GroupId, ReadKey, SecretKey, SignedBlock, UserId, VolumeId};
use bytes::Bytes;

use super::group_record::{GroupRecord, MAX_MEMBER_LABEL_BYTES, MAX_MEMBERS};
use super::{AccessError, TooLong, put_label};
use crate::format::FormatError;
use crate::format::cursor::{Cursor, put_header, put_u64};

const MAGIC: &[u8; 4] = b"ATRD";
/// The most groups whose members are readers.
pub const MAX_GROUPS: usize = 255;
/// The name of the signed block under a volume's key.
pub const RECORD_NAME: &[u8] = b"readers";

/// One user who may read a volume.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Reader {
    /// Until when the user is to get new epochs' keys, seconds since 1970, inclusive; 0: no end was said.
    pub until_secs: u64,
    /// The user's name as the granter typed it, at most [`MAX_MEMBER_LABEL_BYTES`].
    pub label: String,
    /// The group whose member the user is; `None` if the user was named as a reader.
    pub group: Option<GroupId>,
    /// The read key, sealed to the user.
    pub sealed_key: [u8; SEALED_KEY_BYTES],
}

/// Who may read a volume, signed by its owner.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ReaderRecord {
    /// The epoch whose read key is sealed here; those of earlier ones follow from it.
    pub epoch: u32,
    /// Groups whose members are readers, at most [`MAX_GROUPS`].
    pub groups: BTreeSet<GroupId>,
    /// The readers, at most [`MAX_MEMBERS`].
    pub readers: BTreeMap<UserId, Reader>,
}

impl ReaderRecord {
    /// What names the block that has a volume's readers.
    pub fn id(volume: VolumeId) -> BlockId {
        SignedBlock::id_named(&volume.0, RECORD_NAME)
    }

    /// The payload's bytes.
    ///
    /// # Errors
    /// If a label is too long, or there are too many readers.
    pub fn encode(&self) -> Result<Vec<u8>, TooLong> {
        let mut out = Vec::with_capacity(16 + self.readers.len() * (SEALED_KEY_BYTES + 64));
        put_header(&mut out, MAGIC);
        out.extend_from_slice(&self.epoch.to_be_bytes());
        if self.readers.len() > MAX_MEMBERS || self.groups.len() > MAX_GROUPS {
            return Err(TooLong::Readers);
        }
        out.push(self.groups.len() as u8);
        self.groups.iter().for_each(|group| out.extend_from_slice(&group.0));
        out.extend_from_slice(&(self.readers.len() as u16).to_be_bytes());
        for (user, reader) in &self.readers {
            out.extend_from_slice(&user.0);
            put_u64(&mut out, reader.until_secs);
            put_label(&mut out, &reader.label, MAX_MEMBER_LABEL_BYTES)?;
            let place = |group| self.groups.iter().position(|known| *known == group);
            out.push(reader.group.and_then(place).map_or(0, |place| place as u8 + 1));
            out.extend_from_slice(&reader.sealed_key);
        }
        Ok(out)
    }

    /// Reads a payload, which the volume's owner has signed.
    ///
    /// # Errors
    /// If it is not a record of readers.
    pub fn decode(payload: &Bytes) -> Result<ReaderRecord, FormatError> {
        let mut cursor = Cursor::header(payload, MAGIC, "readers'")?;
        let epoch = cursor.u32()?;
        if epoch >= MAX_EPOCHS {
            return Err(FormatError::BadReference("there is no such epoch"));
        }
        let mut groups = BTreeSet::new();
        for _ in 0..cursor.u8()? {
            let group = GroupId(cursor.array()?);
            if groups.last().is_some_and(|last| *last >= group) {
                return Err(FormatError::BadReference("the groups are out of order"));
            }
            groups.insert(group);
        }
        let count = usize::from(cursor.u16()?);
        if count > MAX_MEMBERS {
            return Err(FormatError::BadReference("it has too many readers"));
        }
        let mut readers = BTreeMap::new();
        for _ in 0..count {
            let (user, until_secs) = (UserId(cursor.array()?), cursor.u64()?);
            let label = cursor.text()?;
            if label.len() > MAX_MEMBER_LABEL_BYTES {
                return Err(FormatError::BadReference("a label is too long"));
            }
            let group = match cursor.u8()? {
                0 => None,
                place => Some(groups.iter().nth(usize::from(place) - 1).copied().ok_or(
                    FormatError::BadReference("a reader is of a group that is not named"),
                )?),
            };
            let sealed_key = cursor.array()?;
            if readers.last_key_value().is_some_and(|(last, _)| *last >= user) {
                return Err(FormatError::BadReference("the readers are out of order"));
            }
            readers.insert(user, Reader { until_secs, label, group, sealed_key });
        }
        cursor.end()?;
        Ok(ReaderRecord { epoch, groups, readers })
    }

    /// The epoch's read key, if the user is a reader.
    pub fn key_of(&self, user: &SecretKey, volume: &VolumeId) -> Option<ReadKey> {
        let reader = self.readers.get(&user.user_id())?;
        ReadKey::open_sealed(&reader.sealed_key, user, volume, self.epoch)
    }

    /// Names a reader, or says anew until when one is. An empty label keeps a former one.
    ///
    /// # Errors
    /// If the user's key is no key, or the epoch does not exist.
    pub(super) fn add(
        &mut self,
        volume: &SecretKey,
        user: UserId,
        label: &str,
        until_secs: u64,
    ) -> Result<(), AccessError> {
        self.put(volume, (user, None), label, until_secs)
    }

    fn put(
        &mut self,
        volume: &SecretKey,
        (user, group): (UserId, Option<GroupId>),
        label: &str,
        until_secs: u64,
    ) -> Result<(), AccessError> {
        let key = ReadKey::of_epoch(volume, self.epoch).ok_or(AccessError::NoEpoch)?;
        let sealed_key = key.seal_to(&user, volume, self.epoch).ok_or(AccessError::BadUser)?;
        let former = self.readers.remove(&user).map(|reader| reader.label);
        let label = if label.is_empty() { former.unwrap_or_default() } else { label.to_owned() };
        self.readers.insert(user, Reader { until_secs, label, group, sealed_key });
        Ok(())
    }

    /// Makes the members of its groups readers, and nobody else who was one as a member; of groups whose records
    /// are not in `members` those who are readers stay. Who was named as a reader stays. How many came and went.
    ///
    /// # Errors
    /// If the epoch does not exist.
    pub(super) fn follow(
        &mut self,
        volume: &SecretKey,
        members: &BTreeMap<GroupId, GroupRecord>,
        now_secs: u64,
    ) -> Result<(usize, usize), AccessError> {
        let is_member = |user: &UserId, group: &GroupId| match members.get(group) {
            Some(record) => {
                record.members.get(user).is_some_and(|member| !member.has_ended(now_secs))
            }
            None => true,
        };
        let (count, groups) = (self.readers.len(), &self.groups);
        self.readers.retain(|user, reader| match &reader.group {
            Some(group) => groups.contains(group) && is_member(user, group),
            None => true,
        });
        let (gone, mut came) = (count - self.readers.len(), 0);
        for group in self.groups.clone() {
            for (user, member) in members.get(&group).iter().flat_map(|record| &record.members) {
                let known = self.readers.get(user);
                let is_new = known.is_none() && self.readers.len() < MAX_MEMBERS;
                let (label, until_secs) = (&member.label, member.until_secs);
                let is_changed = known.is_some_and(|known| {
                    known.group == Some(group)
                        && (known.until_secs != until_secs || known.label != *label)
                });
                if member.has_ended(now_secs) || !(is_new || is_changed) {
                    continue;
                }
                match self.put(volume, (*user, Some(group)), label, until_secs) {
                    Ok(()) => came += usize::from(is_new),
                    // Another's group can have members that are nobody.
                    Err(AccessError::BadUser) => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok((came, gone))
    }

    /// Drops the readers whose time is over; how many.
    pub(super) fn drop_ended(&mut self, now_secs: u64) -> usize {
        let count = self.readers.len();
        self.readers.retain(|_, one| one.until_secs == 0 || one.until_secs >= now_secs);
        count - self.readers.len()
    }

    /// Seals the read key of an epoch to all readers.
    ///
    /// # Errors
    /// As of [`ReaderRecord::add`].
    pub(super) fn begin(&mut self, volume: &SecretKey, epoch: u32) -> Result<(), AccessError> {
        if epoch >= MAX_EPOCHS {
            return Err(AccessError::NoEpoch);
        }
        self.epoch = epoch;
        for (user, Reader { until_secs, label, group, .. }) in std::mem::take(&mut self.readers) {
            self.put(volume, (user, group), &label, until_secs)?;
        }
        Ok(())
    }

    /// The record as a block.
    pub(super) fn sign(&self, volume: &SecretKey, version: u64) -> Result<SignedBlock, TooLong> {
        Ok(SignedBlock::sign(volume, RECORD_NAME, version, &self.encode()?))
    }
}
