//! Who renews the certificates of a shared volume's members beside its owner: the payload of the signed block under the
//! volume's key, named `keepers`.
//!
//! | bytes | field |
//! |---|---|
//! | 4 | magic `ATKP` |
//! | 1 | layout, 1 |
//! | 4 | the first epoch of the default group whose key is here |
//! | 1 | number *e* of epochs, at most 16: that one and those that follow |
//! | 1 | number of keepers, at most 16 |
//! | … | keepers, their users ascending |
//! | 2 | number of members, at most 4,096 |
//! | … | members, their users ascending |
//!
//! | **keeper** | |
//! |---|---|
//! | 32 | the user's public key |
//! | 56 e | of each epoch the secret key of the default group, sealed to the user ([`atoll_key::epoch_key`]) |
//!
//! | **member** | |
//! |---|---|
//! | 32 | the user's public key |
//! | 8 | until when the user belongs to the default group, seconds since 1970; 0: no end was said |
//! | 1 + n | label: the user's name as the granter typed it, UTF-8, at most 64 bytes; may be empty |
//!
//! A keeper has the group's key, and could add whomever it likes to the group's record. This list of members only the
//! owner can change: keepers renew the certificates of these alone, and a new epoch begins with these alone.
//!
//! Everybody who knows the volume's address can read it. A record has one encoding.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use atoll_key::epoch_key::{SEALED_KEY_BYTES, open_group_key, seal_group_key};
use atoll_key::kinds::certified::Certificate;
use atoll_key::{BlockId, SecretKey, SignedBlock, UserId, VolumeId, volume_group};
use bytes::Bytes;

use super::group_record::{GroupRecord, MAX_MEMBER_LABEL_BYTES, MAX_MEMBERS, Member};
use super::{AccessError, TooLong, put_label};
use crate::format::FormatError;
use crate::format::cursor::{Cursor, put_header, put_u64};

const MAGIC: &[u8; 4] = b"ATKP";
/// The name of the signed block under a volume's key.
pub const RECORD_NAME: &[u8] = b"keepers";
/// The most keepers of a volume. A guess: one is enough while it runs.
pub const MAX_KEEPERS: usize = 16;
/// The most epochs whose keys are kept at once: more than one only while a rebinding is not through. A guess.
pub const MAX_KEPT_EPOCHS: u32 = 16;

type SealedKey = [u8; SEALED_KEY_BYTES];

/// A member of the default group, as the owner has it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ListedMember {
    /// Until when the user belongs to the group, seconds since 1970, inclusive; 0: no end was said.
    pub until_secs: u64,
    /// The user's name as the granter typed it, at most [`MAX_MEMBER_LABEL_BYTES`].
    pub label: String,
}

impl ListedMember {
    /// The member of the group whose key this is, with a certificate that is there, or one that ended in 1970.
    pub(super) fn member(
        &self,
        group: &SecretKey,
        user: UserId,
        certificate: Option<Certificate>,
    ) -> Member {
        let certificate = certificate.unwrap_or_else(|| Certificate::issue(group, user, 0, 0));
        Member { certificate, label: self.label.clone(), until_secs: self.until_secs }
    }

    /// Whether the membership was to end before that time, seconds since 1970.
    pub fn has_ended(&self, now_secs: u64) -> bool {
        self.until_secs > 0 && self.until_secs < now_secs
    }
}

/// Who renews certificates, and whose, signed by the volume's owner.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct KeeperRecord {
    /// The first epoch whose key the keepers have.
    pub first_epoch: u32,
    /// The keepers, at most [`MAX_KEEPERS`], each with a key for each epoch.
    pub keepers: BTreeMap<UserId, Vec<SealedKey>>,
    /// The members of the default group, at most [`MAX_MEMBERS`].
    pub members: BTreeMap<UserId, ListedMember>,
}

impl KeeperRecord {
    /// What names the block that has a volume's keepers.
    pub fn id(volume: VolumeId) -> BlockId {
        SignedBlock::id_named(&volume.0, RECORD_NAME)
    }

    /// The payload's bytes.
    ///
    /// # Errors
    /// If a label is too long, or there are too many keepers, epochs or members.
    pub fn encode(&self) -> Result<Vec<u8>, TooLong> {
        let epochs = self.epochs();
        let mut out = Vec::with_capacity(64 + self.members.len() * 64);
        put_header(&mut out, MAGIC);
        out.extend_from_slice(&self.first_epoch.to_be_bytes());
        let is_whole = self.keepers.values().all(|keys| keys.len() == epochs);
        if self.keepers.len() > MAX_KEEPERS || epochs > MAX_KEPT_EPOCHS as usize || !is_whole {
            return Err(TooLong::Keepers);
        }
        if self.members.len() > MAX_MEMBERS {
            return Err(TooLong::Members);
        }
        out.extend_from_slice(&[epochs as u8, self.keepers.len() as u8]);
        for (user, keys) in &self.keepers {
            out.extend_from_slice(&user.0);
            out.extend_from_slice(keys.as_flattened());
        }
        out.extend_from_slice(&(self.members.len() as u16).to_be_bytes());
        for (user, member) in &self.members {
            out.extend_from_slice(&user.0);
            put_u64(&mut out, member.until_secs);
            put_label(&mut out, &member.label, MAX_MEMBER_LABEL_BYTES)?;
        }
        Ok(out)
    }

    /// Reads a payload, which the volume's owner has signed.
    ///
    /// # Errors
    /// If it is not a record of keepers.
    pub fn decode(payload: &Bytes) -> Result<KeeperRecord, FormatError> {
        let bad = FormatError::BadReference;
        let mut cursor = Cursor::header(payload, MAGIC, "keepers'")?;
        let first_epoch = cursor.u32()?;
        let (epochs, count) = (cursor.u8()?, usize::from(cursor.u8()?));
        if u32::from(epochs) > MAX_KEPT_EPOCHS || count > MAX_KEEPERS {
            return Err(bad("it has too many keepers or epochs"));
        }
        if (epochs == 0) != (count == 0) || first_epoch.checked_add(epochs.into()).is_none() {
            return Err(bad("there are no such epochs"));
        }
        let mut record = KeeperRecord { first_epoch, ..KeeperRecord::default() };
        for _ in 0..count {
            let user = UserId(cursor.array()?);
            let keys = (0..epochs).map(|_| cursor.array()).collect::<Result<_, _>>()?;
            if record.keepers.last_key_value().is_some_and(|(last, _)| *last >= user) {
                return Err(bad("the keepers are out of order"));
            }
            record.keepers.insert(user, keys);
        }
        let count = usize::from(cursor.u16()?);
        if count > MAX_MEMBERS {
            return Err(bad("it has too many members"));
        }
        for _ in 0..count {
            let (user, until_secs) = (UserId(cursor.array()?), cursor.u64()?);
            let label = cursor.text()?;
            if label.len() > MAX_MEMBER_LABEL_BYTES {
                return Err(bad("a label is too long"));
            }
            if record.members.last_key_value().is_some_and(|(last, _)| *last >= user) {
                return Err(bad("the members are out of order"));
            }
            record.members.insert(user, ListedMember { until_secs, label });
        }
        cursor.end()?;
        Ok(record)
    }

    fn epochs(&self) -> usize {
        self.keepers.values().next().map_or(0, Vec::len)
    }

    /// The keys of the default group that a user has as a keeper, of former epochs first; none if the user is no keeper.
    pub fn keys_of(&self, user: &SecretKey, volume: &VolumeId) -> Vec<SecretKey> {
        let keys = self.keepers.get(&user.user_id()).into_iter().flatten();
        let open = |(sealed, epoch): (&SealedKey, u32)| open_group_key(sealed, user, volume, epoch);
        keys.zip(self.first_epoch..).filter_map(open).collect()
    }

    /// The members of a group's record, which only the owner could write so far.
    pub(super) fn listing(group: &GroupRecord) -> KeeperRecord {
        let listed = group.members.iter().map(|(user, member)| {
            let (until_secs, label) = (member.until_secs, member.label.clone());
            (*user, ListedMember { until_secs, label })
        });
        KeeperRecord { members: listed.collect(), ..KeeperRecord::default() }
    }

    /// Gives `keepers` the keys of the last of these epochs.
    ///
    /// # Errors
    /// If a keeper's key is no key.
    pub(super) fn give(
        &mut self,
        volume: &SecretKey,
        keepers: &[UserId],
        epochs: RangeInclusive<u32>,
    ) -> Result<(), AccessError> {
        let last = *epochs.end();
        let first = (*epochs.start()).max(last.saturating_sub(MAX_KEPT_EPOCHS - 1));
        let seal = |user: &UserId| {
            let key = |epoch| seal_group_key(&volume_group(volume, epoch), user, volume, epoch);
            let keys: Option<Vec<SealedKey>> = (first..=last).map(key).collect();
            Ok((*user, keys.ok_or(AccessError::BadUser)?))
        };
        self.keepers = keepers.iter().map(seal).collect::<Result<_, AccessError>>()?;
        self.first_epoch = if self.keepers.is_empty() { 0 } else { first };
        Ok(())
    }

    /// Drops the members whose time is over.
    pub(super) fn drop_ended(&mut self, now_secs: u64) {
        self.members.retain(|_, member| !member.has_ended(now_secs));
    }

    /// The record as a block.
    pub(super) fn sign(&self, volume: &SecretKey, version: u64) -> Result<SignedBlock, TooLong> {
        Ok(SignedBlock::sign(volume, RECORD_NAME, version, &self.encode()?))
    }
}
