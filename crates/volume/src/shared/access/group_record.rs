//! Who belongs to a group: the payload of the signed block under the group's key, named `members`.
//!
//! | bytes | field |
//! |---|---|
//! | 4 | magic `ATGR` |
//! | 1 | layout, 1 |
//! | 1 + n | label: the group's name for people, UTF-8 |
//! | 2 | number of members, at most 4,096 |
//! | … | members, their users ascending |
//!
//! | **member** | |
//! |---|---|
//! | 144 | certificate ([`Certificate`]), of this group |
//! | 8 | until when the user belongs to it, seconds since 1970; 0: no end was said |
//! | 1 + n | label: the user's name as the granter typed it, UTF-8, at most 64 bytes; may be empty |
//!
//! Everybody who knows the group's key can read it. A record has one encoding.

use std::collections::BTreeMap;

use atoll_key::kinds::certified::{CERTIFICATE_BYTES, Certificate};
use atoll_key::{BlockId, GroupId, SecretKey, SignedBlock, UserId};
use bytes::Bytes;

use super::{TooLong, put_label};
use crate::format::FormatError;
use crate::format::cursor::{Cursor, put_header, put_u64};

const MAGIC: &[u8; 4] = b"ATGR";
/// The name of the signed block under a group's key.
pub const RECORD_NAME: &[u8] = b"members";
/// The most members of a group: a record of them fits a block.
pub const MAX_MEMBERS: usize = 4096;
/// The longest label of a member, bytes.
pub const MAX_MEMBER_LABEL_BYTES: usize = 64;

/// One member of a group.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Member {
    /// With what the member writes.
    pub certificate: Certificate,
    /// The user's name as the granter typed it, at most [`MAX_MEMBER_LABEL_BYTES`].
    pub label: String,
    /// Until when the user belongs to the group, seconds since 1970, inclusive; 0: no end was said.
    pub until_secs: u64,
}

impl Member {
    /// Whether the membership was to end before that time, seconds since 1970.
    pub fn has_ended(&self, now_secs: u64) -> bool {
        self.until_secs > 0 && self.until_secs < now_secs
    }
}

/// Who belongs to a group, signed by its owner.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct GroupRecord {
    /// The group's name for people, at most 255 bytes.
    pub label: String,
    /// The members, at most [`MAX_MEMBERS`]; each certificate is of the key's user.
    pub members: BTreeMap<UserId, Member>,
}

impl GroupRecord {
    /// What names the block that has a group's record.
    pub fn id(group: GroupId) -> BlockId {
        SignedBlock::id_named(&group.0, RECORD_NAME)
    }

    /// The payload's bytes.
    ///
    /// # Errors
    /// If a label is too long, or there are too many members.
    pub fn encode(&self) -> Result<Vec<u8>, TooLong> {
        let mut out = Vec::with_capacity(64 + self.members.len() * (CERTIFICATE_BYTES + 32));
        put_header(&mut out, MAGIC);
        put_label(&mut out, &self.label, usize::from(u8::MAX))?;
        if self.members.len() > MAX_MEMBERS {
            return Err(TooLong::Members);
        }
        out.extend_from_slice(&(self.members.len() as u16).to_be_bytes());
        for member in self.members.values() {
            member.certificate.encode(&mut out);
            put_u64(&mut out, member.until_secs);
            put_label(&mut out, &member.label, MAX_MEMBER_LABEL_BYTES)?;
        }
        Ok(out)
    }

    /// Reads a payload, which the owner of `group` has signed. Signatures of certificates are not
    /// checked.
    ///
    /// # Errors
    /// If it is not the record of this group.
    pub fn decode(payload: &Bytes, group: GroupId) -> Result<GroupRecord, FormatError> {
        let mut cursor = Cursor::header(payload, MAGIC, "group")?;
        let label = cursor.text()?;
        let count = usize::from(cursor.u16()?);
        if count > MAX_MEMBERS {
            return Err(FormatError::BadReference("it has too many members"));
        }
        let mut members = BTreeMap::new();
        for _ in 0..count {
            let certificate = Certificate::decode(&cursor.array()?);
            let until_secs = cursor.u64()?;
            let label = cursor.text()?;
            if certificate.group != group {
                return Err(FormatError::BadReference("a certificate is of another group"));
            }
            if label.len() > MAX_MEMBER_LABEL_BYTES {
                return Err(FormatError::BadReference("a label is too long"));
            }
            let user = certificate.user;
            if members.last_key_value().is_some_and(|(last, _)| *last >= user) {
                return Err(FormatError::BadReference("the members are out of order"));
            }
            members.insert(user, Member { certificate, label, until_secs });
        }
        cursor.end()?;
        Ok(GroupRecord { label, members })
    }

    /// The record as a block.
    pub(super) fn sign(&self, group: &SecretKey, version: u64) -> Result<SignedBlock, TooLong> {
        Ok(SignedBlock::sign(group, RECORD_NAME, version, &self.encode()?))
    }
}
