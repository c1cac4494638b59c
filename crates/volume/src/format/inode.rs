//! Inode blocks: where a regular file's bytes are. Names, modes and times are in the
//! directory, so that files of equal contents share one inode block and a listing with
//! attributes needs none.
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 4 | magic `ATIN` |
//! | 4 | 1 | layout, 1 |
//! | 5 | 1 | size of data blocks as a power of two: 12 to 20 |
//! | 6 | 8 | length of the file, at least 1 |
//! | 14 | … | the file's bytes, if they fit in one data block; else pointers |
//!
//! The length and the block size say which it is, how many pointers there are and how
//! many levels of [indirect blocks](super::pointers) lie below ([`Shape`]), so none of
//! these is written down and none can lie.

use atoll_key::BlockHash;
use bytes::Bytes;

use super::cursor::{Cursor, put_header, put_u64};
use super::pointers::{self, Pointer};
use super::{FormatError, INDIRECT_POINTERS, INODE_POINTERS, MAX_FILE_BYTES, check_block_size};

const MAGIC: &[u8; 4] = b"ATIN";
const NAME: &str = "inode";

/// Bytes before the data or the pointers.
pub(crate) const HEADER_BYTES: usize = 14;

/// How a file of some length lies in blocks of some size.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    /// Length of the file, bytes; at least 1.
    pub size_bytes: u64,
    /// Size of data blocks, as a power of two.
    pub block_size_log2: u8,
}

impl Shape {
    /// Of a file of `size_bytes` in data blocks of 2^`block_size_log2` bytes.
    pub fn new(size_bytes: u64, block_size_log2: u8) -> Result<Shape, FormatError> {
        check_block_size(block_size_log2)?;
        if size_bytes == 0 {
            return Err(FormatError::BadReference("an empty file has no inode block"));
        }
        if size_bytes > MAX_FILE_BYTES {
            return Err(FormatError::FileTooLong(size_bytes));
        }
        Ok(Shape { size_bytes, block_size_log2 })
    }

    /// Size of data blocks, bytes.
    pub fn block_size_bytes(&self) -> u64 {
        1 << self.block_size_log2
    }

    /// Whether the file lies in its inode block.
    pub fn is_inline(&self) -> bool {
        self.size_bytes <= self.block_size_bytes()
    }

    /// Number of data blocks, holes included.
    pub fn data_blocks(&self) -> u64 {
        self.size_bytes.div_ceil(self.block_size_bytes())
    }

    /// Levels of indirect blocks between the inode and the data blocks.
    pub fn indirect_levels(&self) -> u8 {
        let mut levels = 0;
        let mut top = self.data_blocks();
        while top > INODE_POINTERS {
            top = top.div_ceil(INDIRECT_POINTERS);
            levels += 1;
        }
        levels
    }

    /// How many data blocks one pointer of level `level` covers: 1 at level 0.
    pub fn span_blocks(level: u8) -> u64 {
        INDIRECT_POINTERS.pow(u32::from(level))
    }

    /// Number of pointers in the inode block.
    pub fn top_pointers(&self) -> u64 {
        self.data_blocks().div_ceil(Shape::span_blocks(self.indirect_levels()))
    }

    /// Number of pointers in the indirect block that a pointer of `level` (at least 1)
    /// names whose first data block is `first_block`.
    pub fn pointers_below(&self, level: u8, first_block: u64) -> u64 {
        let left = self.data_blocks().saturating_sub(first_block);
        left.min(Shape::span_blocks(level)).div_ceil(Shape::span_blocks(level - 1))
    }

    /// Length of data block `block`: full, but for the last.
    pub fn block_len_bytes(&self, block: u64) -> u64 {
        let start = block << self.block_size_log2;
        self.size_bytes.saturating_sub(start).min(self.block_size_bytes())
    }
}

/// Where a file's bytes are.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Data {
    /// Here.
    Inline(Bytes),
    /// In data blocks, by way of these pointers: raw, 32 bytes each.
    Pointers(Bytes),
}

/// An inode block, read.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct InodeBlock {
    /// The file's length and block size.
    pub shape: Shape,
    /// Its bytes, or where they are.
    pub data: Data,
}

impl InodeBlock {
    /// Reads a block.
    pub fn decode(block: &Bytes) -> Result<InodeBlock, FormatError> {
        let mut cursor = Cursor::header(block, MAGIC, NAME)?;
        let block_size_log2 = cursor.u8()?;
        let shape = Shape::new(cursor.u64()?, block_size_log2)?;
        let rest = cursor.take(cursor.len())?;
        if shape.is_inline() {
            if rest.len() as u64 != shape.size_bytes {
                return Err(FormatError::Mismatch {
                    what: "bytes of a file in its inode block",
                    stated: shape.size_bytes,
                    found: rest.len() as u64,
                });
            }
            return Ok(InodeBlock { shape, data: Data::Inline(rest) });
        }
        pointers::check_len(&rest, shape.top_pointers())?;
        Ok(InodeBlock { shape, data: Data::Pointers(rest) })
    }

    /// The block's bytes.
    pub fn encode(&self) -> Vec<u8> {
        let (Data::Inline(rest) | Data::Pointers(rest)) = &self.data;
        let mut out = header(self.shape, rest.len());
        out.extend_from_slice(rest);
        out
    }

    /// The pointer number `index` of the inode block.
    pub fn pointer(&self, index: u64) -> Option<Pointer> {
        match &self.data {
            Data::Inline(_) => None,
            Data::Pointers(raw) => pointers::at(raw, index),
        }
    }

    /// Checks the inode against the directory entry that points to it.
    pub fn check_size(&self, stated_bytes: u64) -> Result<(), FormatError> {
        if self.shape.size_bytes == stated_bytes {
            return Ok(());
        }
        Err(FormatError::Mismatch {
            what: "length of a file",
            stated: stated_bytes,
            found: self.shape.size_bytes,
        })
    }
}

/// The beginning of an inode block, with room for `rest_bytes` more.
pub(crate) fn header(shape: Shape, rest_bytes: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(HEADER_BYTES + rest_bytes);
    put_header(&mut out, MAGIC);
    out.push(shape.block_size_log2);
    put_u64(&mut out, shape.size_bytes);
    out
}

/// An inode block that holds these pointers.
pub(crate) fn with_pointers(shape: Shape, pointers: &[Option<BlockHash>]) -> Vec<u8> {
    let mut out = header(shape, pointers.len() * 32);
    pointers::append(&mut out, pointers);
    out
}
