//! Who may read an encrypted shared volume: the payload of the signed block under the volume's key, named
//! `readers`.
//!
//! | bytes | field |
//! |---|---|
//! | 4 | magic `ATRD` |
//! | 1 | layout, 1 |
//! | 4 | epoch, below 4,096 |
//! | 2 | number of readers, at most 4,096 |
//! | … | readers, their users ascending |
//!
//! | **reader** | |
//! |---|---|
//! | 32 | the user's public key |
//! | 8 | until when the user is a reader, seconds since 1970; 0: no end was said |
//! | 1 + n | label: the user's name as the granter typed it, UTF-8, at most 64 bytes; may be empty |
//! | 56 | the epoch's read key, sealed to the user ([`atoll_key::epoch_key`]) |
//!
//! The members of the volume's default group are readers too. Everybody who knows the volume's address can
//! read who its readers are. A record has one encoding.

use std::collections::BTreeMap;

use atoll_key::epoch_key::{MAX_EPOCHS, SEALED_KEY_BYTES};
use atoll_key::{BlockId, ReadKey, SecretKey, SignedBlock, UserId, VolumeId};
use bytes::Bytes;

use super::group_record::{MAX_MEMBER_LABEL_BYTES, MAX_MEMBERS};
use super::{AccessError, TooLong, put_label};
use crate::format::FormatError;
use crate::format::cursor::{Cursor, put_header, put_u64};

const MAGIC: &[u8; 4] = b"ATRD";
/// The name of the signed block under a volume's key.
pub const RECORD_NAME: &[u8] = b"readers";

/// One user who may read a volume.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Reader {
    /// Until when the user is to get new epochs' keys, seconds since 1970, inclusive; 0: no end was said.
    pub until_secs: u64,
    /// The user's name as the granter typed it, at most [`MAX_MEMBER_LABEL_BYTES`].
    pub label: String,
    /// The read key, sealed to the user.
    pub sealed_key: [u8; SEALED_KEY_BYTES],
}

/// Who may read a volume, signed by its owner.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ReaderRecord {
    /// The epoch whose read key is sealed here; those of earlier ones follow from it.
    pub epoch: u32,
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
        if self.readers.len() > MAX_MEMBERS {
            return Err(TooLong::Readers);
        }
        out.extend_from_slice(&(self.readers.len() as u16).to_be_bytes());
        for (user, reader) in &self.readers {
            out.extend_from_slice(&user.0);
            put_u64(&mut out, reader.until_secs);
            put_label(&mut out, &reader.label, MAX_MEMBER_LABEL_BYTES)?;
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
            let sealed_key = cursor.array()?;
            if readers.last_key_value().is_some_and(|(last, _)| *last >= user) {
                return Err(FormatError::BadReference("the readers are out of order"));
            }
            readers.insert(user, Reader { until_secs, label, sealed_key });
        }
        cursor.end()?;
        Ok(ReaderRecord { epoch, readers })
    }

    /// The epoch's read key, if the user is a reader.
    pub fn key_of(&self, user: &SecretKey, volume: &VolumeId) -> Option<ReadKey> {
        let reader = self.readers.get(&user.user_id())?;
        ReadKey::open_sealed(&reader.sealed_key, user, volume, self.epoch)
    }

    /// Adds a reader, or says anew until when one is. An empty label keeps a former one.
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
        let key = ReadKey::of_epoch(volume, self.epoch).ok_or(AccessError::NoEpoch)?;
        let sealed_key = key.seal_to(&user, volume, self.epoch).ok_or(AccessError::BadUser)?;
        let former = self.readers.remove(&user).map(|reader| reader.label);
        let label = if label.is_empty() { former.unwrap_or_default() } else { label.to_owned() };
        self.readers.insert(user, Reader { until_secs, label, sealed_key });
        Ok(())
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
        for (user, Reader { until_secs, label, .. }) in std::mem::take(&mut self.readers) {
            self.add(volume, user, &label, until_secs)?;
        }
        Ok(())
    }

    /// The record as a block.
    pub(super) fn sign(&self, volume: &SecretKey, version: u64) -> Result<SignedBlock, TooLong> {
        Ok(SignedBlock::sign(volume, RECORD_NAME, version, &self.encode()?))
    }
}
