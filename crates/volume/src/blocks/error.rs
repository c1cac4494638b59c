//! What is wrong with one block.

use atoll_dht::GetError;
use atoll_key::BlockHash;

use crate::format::FormatError;

/// What is wrong with one block; which path it belongs to is not known yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum BlockError {
    Fetch(GetError),
    Bad { hash: BlockHash, source: FormatError },
}

impl BlockError {
    pub(crate) fn bad(hash: BlockHash) -> impl FnOnce(FormatError) -> BlockError {
        move |source| BlockError::Bad { hash, source }
    }
}

/// Why bytes of a file were not fetched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum LoadError {
    /// A block cannot be read.
    Block(BlockError),
    /// What was swapped out cannot be read.
    Swap(String),
}

impl From<BlockError> for LoadError {
    fn from(error: BlockError) -> LoadError {
        LoadError::Block(error)
    }
}

/// Why a changed directory or file was not written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum EditError {
    /// A block of the old one cannot be read.
    Read(BlockError),
    /// What was swapped out cannot be read.
    Swap(String),
    /// Whoever takes the new blocks takes no more.
    Refused,
    /// The new one is more than the format can hold.
    Format(FormatError),
}

impl From<BlockError> for EditError {
    fn from(error: BlockError) -> EditError {
        EditError::Read(error)
    }
}

impl From<FormatError> for EditError {
    fn from(error: FormatError) -> EditError {
        EditError::Format(error)
    }
}
