//! What a shared volume's address leads to: the payload of the signed block at the volume's root key.
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 4 | magic `ATSV` |
//! | 4 | 1 | layout, 1 |
//! | 5 | 32 | the root directory's key, its first half |
//! | 37 | 1 | size of data blocks that writers choose, as a power of two: 12 to 20 |
//! | 38 | 8 | when the volume was made, milliseconds since 1970 |
//! | 46 | 1 + n | label: a name for people, UTF-8 |
//! | 47 + n | 0 or more | fields: 1 tag, 2 length, value; tags strictly ascending |
//!
//! Fields: tag 1 the epoch of the volume's default group (4 bytes, absent: 0), tag 2 the epoch to which
//! all inodes were rebound (4 bytes, absent: 0; not above the other one), tag 3 which old versions are kept
//! (counts of minutes, ten minutes, hours, days and weeks, 2 bytes each; absent: 60, 144, 24, 7 and 4; none for longer
//! than four weeks), tag 4 that members other than the owner renew certificates ([`super::keeper_record`]; 1 byte, 1;
//! absent: none do), tag 128 that the volume is encrypted, and how (1 byte, 1). A reader skips an unknown tag below 128 and refuses the volume for one
//! of 128 or above.
//!
//! A mount needs the root directory and whether the volume is encrypted; the epochs are the owner's. If they differ, a rebinding that
//! was to shut a member out has not reached all inodes yet.

use atoll_key::epoch_key::MAX_EPOCHS;
use bytes::Bytes;

use super::TooLong;
use crate::format::cursor::{Cursor, put_field, put_header, put_u64, skip_field, whole};
use crate::format::{FormatError, SHARED_VOLUME_MAGIC as MAGIC, check_block_size};
use crate::keep::Keep;
use crate::shared::inode::InodeKey;

const TAG_GROUP_EPOCH: u8 = 1;
const TAG_BOUND_EPOCH: u8 = 2;
const TAG_KEEP: u8 = 3;
const TAG_KEEPERS: u8 = 4;
const TAG_ENCRYPTED: u8 = 128;
/// How an encrypted volume is sealed ([`crate::shared::sealing`]): the one way so far.
const SEALED: u8 = 1;

/// For how long old versions may be kept: what they share with nothing newer is not renewed, and leases last
/// two days longer than that.
pub const MAX_KEPT_SECS: u64 = 28 * 24 * 60 * 60;

/// What the owner of a shared volume signs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct VolumeRecord {
    /// The root directory.
    pub root: InodeKey,
    /// Size of data blocks, as a power of two.
    pub block_size_log2: u8,
    /// When the volume was made, milliseconds since 1970.
    pub created_unix_ms: u64,
    /// A name for people, at most 255 bytes.
    pub label: String,
    /// The epoch of the default group: new members belong to it.
    pub group_epoch: u32,
    /// The epoch of the default group to which all inodes were rebound.
    pub bound_epoch: u32,
    /// Whether only readers can read names and contents.
    pub is_encrypted: bool,
    /// Which old versions of files and directories are kept, none for longer than [`MAX_KEPT_SECS`].
    pub keep: Keep,
    /// Whether the volume has, or had, keepers: then there is a record of them, and its list of members counts for the
    /// owner.
    pub has_keepers: bool,
}

impl VolumeRecord {
    /// The payload's bytes.
    ///
    /// # Errors
    /// If the label is too long, or versions would be kept for too long.
    pub fn encode(&self) -> Result<Vec<u8>, TooLong> {
        if self.keep.longest_secs() > MAX_KEPT_SECS {
            return Err(TooLong::Kept);
        }
        let mut out = Vec::with_capacity(128);
        put_header(&mut out, MAGIC);
        out.extend_from_slice(&self.root.0);
        out.push(self.block_size_log2);
        put_u64(&mut out, self.created_unix_ms);
        super::put_label(&mut out, &self.label, usize::from(u8::MAX))?;
        for (tag, epoch) in
            [(TAG_GROUP_EPOCH, self.group_epoch), (TAG_BOUND_EPOCH, self.bound_epoch)]
        {
            if epoch > 0 {
                put_field(&mut out, tag, &epoch.to_be_bytes());
            }
        }
        if self.keep != Keep::default() {
            put_field(&mut out, TAG_KEEP, &self.keep.to_bytes());
        }
        if self.has_keepers {
            put_field(&mut out, TAG_KEEPERS, &[1]);
        }
        if self.is_encrypted {
            put_field(&mut out, TAG_ENCRYPTED, &[SEALED]);
        }
        Ok(out)
    }

    /// The epoch with whose read key new blocks are sealed; `None` if the volume is not encrypted.
    pub fn read_epoch(&self) -> Option<u32> {
        self.is_encrypted.then_some(self.group_epoch)
    }

    /// Reads a payload.
    ///
    /// # Errors
    /// If it is not a shared volume's.
    pub fn decode(payload: &Bytes) -> Result<VolumeRecord, FormatError> {
        let mut cursor = Cursor::header(payload, MAGIC, "shared volume's root")?;
        let mut record = VolumeRecord {
            root: InodeKey(cursor.array()?),
            block_size_log2: cursor.u8()?,
            created_unix_ms: cursor.u64()?,
            label: cursor.text()?,
            group_epoch: 0,
            bound_epoch: 0,
            is_encrypted: false,
            keep: Keep::default(),
            has_keepers: false,
        };
        check_block_size(record.block_size_log2)?;
        cursor.fields(|tag, value| {
            match tag {
                TAG_GROUP_EPOCH => record.group_epoch = whole(value, Cursor::u32)?,
                TAG_BOUND_EPOCH => record.bound_epoch = whole(value, Cursor::u32)?,
                TAG_KEEP => record.keep = whole(value, Keep::take)?,
                TAG_KEEPERS => match whole(value, Cursor::u8)? {
                    1 => record.has_keepers = true,
                    _ => return Err(FormatError::BadReference("keepers are there or not")),
                },
                TAG_ENCRYPTED => match whole(value, Cursor::u8)? {
                    SEALED => record.is_encrypted = true,
                    other => return Err(FormatError::UnknownLayout(other)),
                },
                tag => return skip_field(tag),
            }
            Ok(())
        })?;
        if record.read_epoch().is_some_and(|epoch| epoch >= MAX_EPOCHS) {
            return Err(FormatError::BadReference("there is no such epoch"));
        }
        if record.keep.longest_secs() > MAX_KEPT_SECS {
            return Err(FormatError::BadReference(
                "versions cannot be kept for longer than 4 weeks",
            ));
        }
        match record.bound_epoch <= record.group_epoch {
            true => Ok(record),
            false => Err(FormatError::BadReference("inodes are bound to a group of the future")),
        }
    }
}

/// Whether the payload of a volume's root block says that the volume is a shared one.
pub fn is_shared(payload: &[u8]) -> bool {
    payload.starts_with(MAGIC)
}
