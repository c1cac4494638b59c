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
