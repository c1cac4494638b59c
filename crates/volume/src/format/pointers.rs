//! Indirect blocks: pointers to data blocks, or to indirect blocks of the level below.
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 4 | magic `ATPT` |
//! | 4 | 1 | layout, 1 |
//! | 5 | 1 | level, 1 to 4: 1 points to data blocks |
//! | 6 | 32 × n | hashes, n from 1 to 2,048; all zeros: a hole |
//!
//! A hole stands for as many zero bytes as whatever it replaces would have held: one data
//! block, or all that an indirect block covers. An indirect block of nothing but holes is
//! not allowed; the publisher writes every data block of nothing but zeros as a hole.

use atoll_key::BlockHash;
use bytes::Bytes;

use super::cursor::{Cursor, put_header};
use super::{FormatError, INDIRECT_POINTERS, MAX_INDIRECT_LEVELS};

const MAGIC: &[u8; 4] = b"ATPT";
const NAME: &str = "indirect";

/// A pointer: the block's hash, or `None` for a hole.
pub type Pointer = Option<BlockHash>;

/// An indirect block, read.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PointerBlock {
    /// 1 if it points to data blocks, else one more than the level it points to.
    pub level: u8,
    raw: Bytes,
}

impl PointerBlock {
    /// Reads a block.
    pub fn decode(block: &Bytes) -> Result<PointerBlock, FormatError> {
        let mut cursor = Cursor::header(block, MAGIC, NAME)?;
        let level = cursor.u8()?;
        if !(1..=MAX_INDIRECT_LEVELS).contains(&level) {
            return Err(FormatError::TooManyLevels(level));
        }
        let raw = cursor.take(cursor.len())?;
        let count = raw.len() as u64 / 32;
        if count == 0 || count > INDIRECT_POINTERS {
            return Err(FormatError::Mismatch {
                what: "pointers in an indirect block, against the most there can be",
                stated: INDIRECT_POINTERS,
                found: count,
            });
        }
        check_len(&raw, count)?;
        if raw.iter().all(|byte| *byte == 0) {
            // Else a few blocks could describe more holes than anybody can step over.
            return Err(FormatError::BadReference("an indirect block has nothing but holes"));
        }
        Ok(PointerBlock { level, raw })
    }

    /// The block's bytes.
    pub fn encode(level: u8, pointers: &[Pointer]) -> Vec<u8> {
        let mut out = Vec::with_capacity(6 + pointers.len() * 32);
        put_header(&mut out, MAGIC);
        out.push(level);
        append(&mut out, pointers);
        out
    }

    /// Number of pointers.
    pub fn count(&self) -> u64 {
        self.raw.len() as u64 / 32
    }

    /// Pointer number `index`; `None` past the end.
    pub fn pointer(&self, index: u64) -> Option<Pointer> {
        at(&self.raw, index)
    }

    /// Checks the block against its place: `level` and `count` follow from the length of
    /// the file.
    pub fn check_place(&self, level: u8, count: u64) -> Result<(), FormatError> {
        if self.level != level {
            return Err(FormatError::Mismatch {
                what: "level of an indirect block",
                stated: u64::from(level),
                found: u64::from(self.level),
            });
        }
        if self.count() != count {
            return Err(FormatError::Mismatch {
                what: "pointers of an indirect block",
                stated: count,
                found: self.count(),
            });
        }
        Ok(())
    }
}

pub(super) fn append(out: &mut Vec<u8>, pointers: &[Pointer]) {
    for pointer in pointers {
        out.extend_from_slice(pointer.as_ref().map_or(&[0; 32], |hash| &hash.0));
    }
}

/// Checks that `raw` is exactly `count` pointers.
pub(super) fn check_len(raw: &Bytes, count: u64) -> Result<(), FormatError> {
    if raw.len() as u64 == count.saturating_mul(32) {
        return Ok(());
    }
    Err(FormatError::Mismatch {
        what: "bytes of pointers",
        stated: count.saturating_mul(32),
        found: raw.len() as u64,
    })
}

pub(super) fn at(raw: &Bytes, index: u64) -> Option<Pointer> {
    let start = usize::try_from(index).ok()?.checked_mul(32)?;
    let hash: [u8; 32] = raw.get(start..start.checked_add(32)?)?.try_into().ok()?;
    Some(Some(BlockHash(hash)).filter(|hash| hash.0 != [0; 32]))
}
