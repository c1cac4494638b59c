//! Rules of content that names its owner, what it belongs to, in its first bytes: it never changes, and those who may write the
//! owner can release it ([`super::Release`]).

use super::{InvalidBlock, QuotaClass, Rules};
use crate::hash::BlockHash;
use crate::ring::Key;

/// Bytes of such a block before the content: the owner.
pub(super) const OWNER_BYTES: usize = 32;

/// See the module.
pub(super) struct OwnedContent {
    /// The hash of all bytes; each kind of owner has a context of its own.
    pub hash_of: fn(&[u8]) -> BlockHash,
    /// See [`super::BlockKind::release_removes`].
    pub release_removes: bool,
}

impl Rules for OwnedContent {
    /// It has one version, 0.
    fn verify(&self, key: &Key, bytes: &[u8]) -> Result<u64, InvalidBlock> {
        if bytes.len() < OWNER_BYTES {
            return Err(InvalidBlock::Malformed("it names no owner"));
        }
        if (self.hash_of)(bytes).key() == *key { Ok(0) } else { Err(InvalidBlock::WrongHash) }
    }

    fn is_mutable(&self) -> bool {
        false
    }

    fn quota_class(&self) -> QuotaClass {
        QuotaClass::Data
    }

    fn belongs_to(&self, bytes: &[u8]) -> Option<[u8; 32]> {
        bytes.first_chunk().copied()
    }

    fn release_removes(&self) -> bool {
        self.release_removes
    }
}
