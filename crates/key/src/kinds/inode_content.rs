//! Content of an inode: blocks that never change, as content blocks, and say to which inode of a
//! shared volume they belong, so that its writers can release them ([`super::certified::InodeRelease`]).
//!
//! | bytes | field |
//! |---|---|
//! | 32 | first half of the key of the inode, a certified block |
//! | … | content |
//!
//! The key is BLAKE3 of all bytes in key-derivation mode, context `atoll v1 content of an inode`, and
//! 32 zero bytes. Content blocks have another context, so that none of them names an inode, whatever
//! its first bytes are: a file of somebody else's making cannot be made releasable by its contents.

use super::owned_content::{OWNER_BYTES, OwnedContent};
use super::{BlockId, BlockKind};
use crate::hash::BlockHash;

/// Bytes of a block of an inode's content before the content: the inode.
pub const INODE_PREFIX_BYTES: usize = OWNER_BYTES;

pub(super) static RULES: OwnedContent =
    OwnedContent { hash_of: BlockHash::of_inode_content, release_removes: false };

impl BlockHash {
    /// What names the block of an inode's content with this hash.
    pub fn inode_content_id(&self) -> BlockId {
        BlockId { kind: BlockKind::InodeContent, key: self.key() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kinds::InvalidBlock;

    fn of_inode(content: &[u8]) -> Vec<u8> {
        [&[7; INODE_PREFIX_BYTES], content].concat()
    }

    #[test]
    fn a_block_names_the_inode_that_it_begins_with() {
        let bytes = of_inode(b"abc");
        let id = BlockHash::of_inode_content(&bytes).inode_content_id();
        assert_eq!(id.verify(&bytes), Ok(0));
        assert_eq!(id.kind.belongs_to(&bytes), Some([7; 32]));
        assert_eq!(id.verify(&of_inode(b"abd")), Err(InvalidBlock::WrongHash));
        let short = &bytes[..INODE_PREFIX_BYTES - 1];
        let id = BlockHash::of_inode_content(short).inode_content_id();
        assert!(id.verify(short).is_err(), "it names no inode");
    }

    /// A file whose contents begin with an inode's key would else be its writers' to release.
    #[test]
    fn no_content_block_is_content_of_an_inode() {
        let bytes = of_inode(b"abc");
        let (content, own) = (BlockHash::of(&bytes), BlockHash::of_inode_content(&bytes));
        assert_ne!(content, own);
        assert!(content.inode_content_id().verify(&bytes).is_err());
        assert!(own.id().verify(&bytes).is_err());
        assert_eq!(BlockKind::Content.belongs_to(&bytes), None);
    }
}
