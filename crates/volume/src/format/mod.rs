//! The bytes of each block, written and read. `docs/design/blocks.md` has the tables.
//!
//! Every decoder takes bytes a hostile publisher may have made: it checks each length
//! before it believes it, allocates no more than the block's own size calls for, never
//! panics, and names what is wrong ([`FormatError`]). A content block has one
//! encoding: bytes that decode are encoded to the same bytes again.
//!
//! Nothing here fetches or stores.

pub mod directory;
pub mod inode;
pub mod pointers;
pub mod xattrs;

pub(crate) mod build;
pub(crate) mod cursor;

use atoll_key::{MAX_BLOCK_BYTES, SealError};

pub use directory::{
    Child, Content, DirectoryBlock, DirectoryEntry, DirectoryRef, Nodes, Owner, link_name,
};
pub use inode::InodeBlock;
pub use pointers::{Pointer, PointerBlock};

/// The smallest data block, as a power of two: 4 KiB.
pub const MIN_BLOCK_SIZE_LOG2: u8 = 12;

/// The largest data block, as a power of two: 1 MiB.
pub const MAX_BLOCK_SIZE_LOG2: u8 = 20;

/// The largest directory block this program writes. Readers take up to
/// [`MAX_BLOCK_BYTES`]. 64 KiB is CFS's "tens of kilobytes" (§3.1) at today's speeds.
pub const DIRECTORY_BLOCK_BYTES: usize = 64 << 10;

/// Levels of directory blocks, leaves included. With the smallest possible blocks
/// (two children each) that is 256 leaves; with usual ones, 10^20 entries.
pub const MAX_DIRECTORY_LEVELS: u8 = 8;

/// How deep directories may lie in each other. Walks stop there with an error, since
/// a few blocks can describe a tree of any depth.
pub const MAX_DEPTH: usize = 128;

/// The longest target of a symbolic link (Linux `PATH_MAX` less its NUL).
pub const MAX_TARGET_BYTES: usize = 4095;

/// Pointers in an indirect block: 64 KiB of them.
pub const INDIRECT_POINTERS: u64 = 2048;

/// Pointers in an inode block: 8 KiB of them, so that a change in a large file costs
/// little more than the changed block.
pub const INODE_POINTERS: u64 = 256;

/// The most levels of indirect blocks: enough for any length at any block size.
pub const MAX_INDIRECT_LEVELS: u8 = 4;

/// The longest file: the largest `off_t`.
pub const MAX_FILE_BYTES: u64 = i64::MAX as u64;

/// The largest block of extended attributes (Linux `XATTR_SIZE_MAX` for one value).
pub const MAX_XATTR_BLOCK_BYTES: usize = 128 << 10;

const _: () = assert!(MAX_XATTR_BLOCK_BYTES <= MAX_BLOCK_BYTES);

/// How the root block of a shared volume begins; [`crate::shared`] reads it.
pub(crate) const SHARED_VOLUME_MAGIC: &[u8; 4] = b"ATSV";

/// What is wrong with the bytes of a block.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FormatError {
    /// The block ends in the middle of something.
    #[error("it ends too early")]
    Truncated,
    /// The block goes on after its end.
    #[error("it has {0} bytes too many")]
    TrailingBytes(usize),
    /// Another kind of block, or none at all.
    #[error("it is not a {0} block")]
    WrongMagic(&'static str),
    /// Made by a newer program.
    #[error("its layout {0} is not known; a newer program may read it")]
    UnknownLayout(u8),
    /// Needs something a newer program has.
    #[error("it needs feature {0}, which is not known; a newer program may read it")]
    UnknownFeature(u8),
    /// An entry of a kind that does not exist.
    #[error("an entry is of the unknown kind {0}")]
    UnknownKind(u8),
    /// Flags that do not exist.
    #[error("it has the unknown flags {0:#x}")]
    UnknownFlags(u8),
    /// A name that no directory may hold.
    #[error("the name {name:?} is not allowed: {reason}")]
    BadName {
        /// The name, shortened, with what is not text replaced.
        name: String,
        /// Why not.
        reason: &'static str,
    },
    /// Names out of order, or twice the same.
    #[error("the name {name:?} is not in order, or there twice")]
    Unsorted {
        /// The name, shortened.
        name: String,
    },
    /// Permission bits above `0o7777`.
    #[error("the mode {0:#o} has bits that do not exist")]
    BadMode(u16),
    /// A thousand million nanoseconds or more.
    #[error("a time has {0} nanoseconds")]
    BadTime(u32),
    /// A size of data blocks that is not allowed.
    #[error("data blocks of 2^{0} bytes are not allowed")]
    BadBlockSize(u8),
    /// A file longer than files can be.
    #[error("a file states a length of {0} bytes")]
    FileTooLong(u64),
    /// A length or count that another part of the tree contradicts.
    #[error("{what}: {stated} stated, {found} found")]
    Mismatch {
        /// Which length or count.
        what: &'static str,
        /// What the pointing block (or the header) says.
        stated: u64,
        /// What is there.
        found: u64,
    },
    /// A reference missing where there must be one, or there where there must be none.
    #[error("{0}")]
    BadReference(&'static str),
    /// A symbolic link to nothing, to too much, or with a NUL in it.
    #[error("the target of the symbolic link is not allowed: {0}")]
    BadTarget(&'static str),
    /// An extended attribute of a namespace that volumes do not carry.
    #[error("the extended attribute {name:?} is not allowed: {reason}")]
    BadXattr {
        /// Its name, shortened.
        name: String,
        /// Why not.
        reason: &'static str,
    },
    /// A directory of more levels than [`MAX_DIRECTORY_LEVELS`].
    #[error("the directory has {0} levels; the limit is {MAX_DIRECTORY_LEVELS}")]
    TooManyLevels(u8),
    /// A block of an encrypted volume that does not open.
    #[error("{0}")]
    Sealed(SealError),
    /// An inode in the clear, in an encrypted volume.
    #[error("it is not encrypted, and its volume is")]
    NotSealed,
    /// Sealed with the read key of an epoch that the user does not have.
    #[error("it is sealed with the read key of epoch {0}, which you do not have")]
    NoReadKey(u32),
    /// Directories in directories, more than [`MAX_DEPTH`].
    #[error("directories lie more than {MAX_DEPTH} deep in each other")]
    TooDeep,
}

/// A name for an error message: text, and not too much of it.
pub(crate) fn shown(name: &[u8]) -> String {
    const SHOWN_BYTES: usize = 48;
    let mut text = String::from_utf8_lossy(&name[..name.len().min(SHOWN_BYTES)]).into_owned();
    if name.len() > SHOWN_BYTES {
        text.push('…');
    }
    text
}

/// Whether `log2` is an allowed size of data blocks.
pub(crate) fn check_block_size(log2: u8) -> Result<(), FormatError> {
    if (MIN_BLOCK_SIZE_LOG2..=MAX_BLOCK_SIZE_LOG2).contains(&log2) {
        Ok(())
    } else {
        Err(FormatError::BadBlockSize(log2))
    }
}

/// Whether all bytes are zero.
pub(crate) fn is_zero(bytes: &[u8]) -> bool {
    // Most data shows in its first bytes; chunks of a word let the rest be fast.
    bytes.iter().take(64).all(|byte| *byte == 0)
        && bytes.chunks(4096).all(|chunk| chunk.iter().fold(0, |or, byte| or | byte) == 0)
}
