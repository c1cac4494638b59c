//! Xattr blocks: the extended attributes of a file, directory or link. A block of their
//! own, so that they are no burden to the many files without, a listing can tell the two
//! apart, and files with equal contents share an inode whatever their attributes.
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 4 | magic `ATXA` |
//! | 4 | 1 | layout, 1 |
//! | 5 | 2 | number of attributes, at least 1 |
//! | 7 | … | attributes, names strictly ascending: 1 + n name, 4 + m value |
//!
//! Only names that begin with `user.` are allowed: the others (`security.capability`,
//! `system.posix_acl_access`) would let a publisher grant rights on a reader's machine.

use bytes::Bytes;

use super::cursor::{Cursor, put_header};
use super::{FormatError, MAX_XATTR_BLOCK_BYTES, shown};

const MAGIC: &[u8; 4] = b"ATXA";
const NAME: &str = "xattr";

/// What every attribute's name begins with.
pub const PREFIX: &[u8] = b"user.";

/// Writes attributes sorted by name; `None` if they are too many or too long for a block.
pub fn encode(sorted: &[(Bytes, Bytes)]) -> Option<Vec<u8>> {
    let mut out = Vec::new();
    put_header(&mut out, MAGIC);
    out.extend_from_slice(&u16::try_from(sorted.len()).ok()?.to_be_bytes());
    for (name, value) in sorted {
        out.push(u8::try_from(name.len()).ok()?);
        out.extend_from_slice(name);
        out.extend_from_slice(&u32::try_from(value.len()).ok()?.to_be_bytes());
        out.extend_from_slice(value);
    }
    Some(out).filter(|out| out.len() <= MAX_XATTR_BLOCK_BYTES)
}

/// Reads a block: names and values.
pub fn decode(block: &Bytes) -> Result<Vec<(Bytes, Bytes)>, FormatError> {
    if block.len() > MAX_XATTR_BLOCK_BYTES {
        return Err(FormatError::TrailingBytes(block.len() - MAX_XATTR_BLOCK_BYTES));
    }
    let mut cursor = Cursor::header(block, MAGIC, NAME)?;
    let count = usize::from(cursor.u16()?);
    if count == 0 {
        return Err(FormatError::BadReference("an xattr block is empty"));
    }
    // The shortest attribute is `user.x` with no value.
    if count > cursor.len() / (1 + PREFIX.len() + 1 + 4) {
        return Err(FormatError::Truncated);
    }
    let mut found: Vec<(Bytes, Bytes)> = Vec::with_capacity(count);
    for _ in 0..count {
        let name_len = usize::from(cursor.u8()?);
        let name = cursor.take(name_len)?;
        check_name(&name)?;
        if found.last().is_some_and(|(last, _)| *last >= name) {
            return Err(FormatError::Unsorted { name: shown(&name) });
        }
        let value_len = cursor.u32()? as usize;
        found.push((name, cursor.take(value_len)?));
    }
    cursor.end()?;
    Ok(found)
}

pub(crate) fn check_name(name: &[u8]) -> Result<(), FormatError> {
    let reason = if !name.starts_with(PREFIX) || name.len() == PREFIX.len() {
        "only the user namespace is"
    } else if name.contains(&0) {
        "it has a NUL in it"
    } else {
        return Ok(());
    };
    Err(FormatError::BadXattr { name: shown(name), reason })
}
