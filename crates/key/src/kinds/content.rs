//! Content blocks: named by the hash of their bytes, so they never change.
//!
//! CFS §5.5: a server accepts a content-hash block if its key is the hash of its content.

use super::{BlockId, BlockKind, InvalidBlock, QuotaClass, Rules};
use crate::hash::BlockHash;
use crate::ring::Key;

pub(super) struct Content;

impl Rules for Content {
    /// Content has one version, 0.
    fn verify(&self, key: &Key, bytes: &[u8]) -> Result<u64, InvalidBlock> {
        if BlockHash::of(bytes).key() == *key { Ok(0) } else { Err(InvalidBlock::WrongHash) }
    }

    fn is_mutable(&self) -> bool {
        false
    }

    fn quota_class(&self) -> QuotaClass {
        QuotaClass::Data
    }
}

impl BlockHash {
    /// What names the content block with this hash.
    pub fn id(&self) -> BlockId {
        BlockId { kind: BlockKind::Content, key: self.key() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// CFS §5.5: content is accepted "if the supplied key is equal to the hash".
    #[test]
    fn content_is_accepted_only_under_its_hash() {
        let key = BlockHash::of(b"abc").key();
        assert_eq!(BlockKind::Content.verify(&key, b"abc"), Ok(0));
        assert_eq!(BlockKind::Content.verify(&key, b"abd"), Err(InvalidBlock::WrongHash));
    }
}
