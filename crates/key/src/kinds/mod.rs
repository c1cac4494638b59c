//! Kinds of blocks: what a key promises about the bytes stored under it, as rules.
//!
//! Each kind is a module that implements `Rules`. All other crates ask [`BlockKind`] and decide
//! nothing by comparing kinds, so that a new kind is a module here, a variant and a line in
//! `BlockKind::rules`. Nodes verify a block before storing it, and clients after fetching it.
//!
//! For every kind a version is a number, 0 if there is only one, that only the block's bytes say.
//! Of two versions under one key at most one supersedes the other. Blocks of some kinds are *joined*
//! instead: no version supersedes another, and a node that holds one and is given another keeps what
//! both say ([`BlockKind::join`]).

pub mod certified;
mod content;
#[cfg(any(test, feature = "test-kind"))]
pub mod counter;
mod inode_content;
mod owned_content;
mod release;
mod signed;
mod volume_content;

use crate::ring::Key;

pub use inode_content::INODE_PREFIX_BYTES;
pub use release::{MAX_RELEASED, Release, ReleaseEffect};
pub use signed::{MAX_SIGNED_NAME_BYTES, SignedBlock};
pub use volume_content::{REMOVED_AFTER_SECS, VOLUME_PREFIX_BYTES, VolumeRelease};

/// The largest block, in bytes: a data block of 1 MiB and its header.
pub const MAX_BLOCK_BYTES: usize = (1 << 20) + (64 << 10);

/// What kind of block a key names; the number is the one on the wire and on disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum BlockKind {
    /// Named by the hash of its bytes; never changes.
    Content = 1,
    /// Named by the hash of a public key (and name); the key's holder may replace it.
    Signed = 2,
    /// Named by the hash of who may write it; versions of several writers are joined.
    Certified = 3,
    /// Named by the hash of its bytes, which name an inode whose writers may release it.
    InodeContent = 4,
    /// Named by the hash of its bytes, which name the volume whose owner may release it.
    VolumeContent = 5,
    /// For tests, see [`counter`].
    #[cfg(any(test, feature = "test-kind"))]
    Counter = 255,
}

/// What part of a publisher's quota a block may use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum QuotaClass {
    /// All of it but what is reserved for roots.
    Data,
    /// All of it: a publisher that has used up the rest can still say what its volume is now.
    Root,
}

/// What a kind decides.
trait Rules: Sync {
    /// Checks that `bytes`, at most [`MAX_BLOCK_BYTES`], are what `key` names; returns the
    /// block's version.
    fn verify(&self, key: &Key, bytes: &[u8]) -> Result<u64, InvalidBlock>;

    /// Whether another block may take the place of one under its key.
    fn is_mutable(&self) -> bool;

    /// Whether a block of version `offered` takes the place of one of version `held`.
    fn supersedes(&self, offered: u64, held: u64) -> bool {
        self.is_mutable() && offered > held
    }

    /// See [`BlockKind::joins`].
    fn joins(&self) -> bool {
        false
    }

    /// That part of a version which never decreases when blocks are joined.
    fn rank(&self, version: u64) -> u64 {
        version
    }

    /// See [`BlockKind::join`].
    fn join(&self, held: &[u8], offered: &[u8]) -> Option<(Vec<u8>, u64)> {
        let _ = (held, offered);
        None
    }

    /// See [`BlockKind::admit`].
    fn admit(&self, held: Option<&[u8]>, offered: &[u8], now_ms: u64) -> Result<(), NotAdmitted> {
        let _ = (held, offered, now_ms);
        Ok(())
    }

    /// See [`BlockKind::admit_copy`].
    fn admit_copy(&self, offered: &[u8], now_ms: u64) -> Result<(), NotAdmitted> {
        let _ = (offered, now_ms);
        Ok(())
    }

    /// What part of a quota it may use.
    fn quota_class(&self) -> QuotaClass;

    /// See [`BlockKind::belongs_to`].
    fn belongs_to(&self, bytes: &[u8]) -> Option<[u8; 32]> {
        let _ = bytes;
        None
    }

    /// See [`BlockKind::release_removes`].
    fn release_removes(&self) -> bool {
        false
    }

    /// Whether a verified block is a tombstone.
    fn is_tombstone(&self, bytes: &[u8]) -> bool {
        let _ = bytes;
        false
    }
}

/// What names a block: where it lives, and the kind whose rules its bytes obey.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct BlockId {
    /// Its kind.
    pub kind: BlockKind,
    /// Its key.
    pub key: Key,
}

impl BlockId {
    /// Checks that `bytes` are this block; returns its version.
    pub fn verify(&self, bytes: &[u8]) -> Result<u64, InvalidBlock> {
        self.kind.verify(&self.key, bytes)
    }
}

/// Why bytes are not the block their key names.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidBlock {
    /// Longer than [`MAX_BLOCK_BYTES`].
    #[error("the block has {0} bytes; the limit is {MAX_BLOCK_BYTES}")]
    TooLong(usize),
    /// The bytes hash to another key.
    #[error("the block's bytes do not match its key")]
    WrongHash,
    /// The bytes do not have the layout of a signed block.
    #[error("not a signed block: {0}")]
    Malformed(&'static str),
    /// The signature is not the key holder's.
    #[error("the block's signature is wrong")]
    WrongSignature,
    /// An unknown kind number.
    #[error("unknown block kind {0}")]
    UnknownKind(u8),
}

/// Why a replica does not take a block that is new, although its signatures are right.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotAdmitted {
    /// Its writer has not seen enough of what is held: it should read the block, and write again.
    #[error("what is held has to be read first")]
    Outdated,
    /// It was not written now.
    #[error("written {} s from now: a clock is wrong", time_ms.abs_diff(*now_ms) / 1000)]
    Clock {
        /// When its writer says it was written, milliseconds since 1970.
        time_ms: u64,
        /// The replica's time.
        now_ms: u64,
    },
    /// The writer's certificate is valid no longer, or not yet.
    #[error("the writer's certificate ended at {not_after_secs} s since 1970, or has not begun")]
    Expired {
        /// Until when it was valid, seconds since 1970.
        not_after_secs: u64,
    },
}

impl BlockKind {
    /// All kinds.
    pub const ALL: &[BlockKind] = &[
        BlockKind::Content,
        BlockKind::Signed,
        BlockKind::Certified,
        BlockKind::InodeContent,
        BlockKind::VolumeContent,
        #[cfg(any(test, feature = "test-kind"))]
        BlockKind::Counter,
    ];

    fn rules(self) -> &'static dyn Rules {
        match self {
            BlockKind::Content => &content::Content,
            BlockKind::Signed => &signed::Signed,
            BlockKind::Certified => &certified::Certified,
            BlockKind::InodeContent => &inode_content::RULES,
            BlockKind::VolumeContent => &volume_content::RULES,
            #[cfg(any(test, feature = "test-kind"))]
            BlockKind::Counter => &counter::Counter,
        }
    }

    /// Reads a kind's number.
    pub fn from_u8(number: u8) -> Result<BlockKind, InvalidBlock> {
        let known = BlockKind::ALL.iter().find(|kind| **kind as u8 == number);
        known.copied().ok_or(InvalidBlock::UnknownKind(number))
    }

    /// Checks that `bytes` are what `key` names; returns the block's version.
    pub fn verify(self, key: &Key, bytes: &[u8]) -> Result<u64, InvalidBlock> {
        if bytes.len() > MAX_BLOCK_BYTES {
            return Err(InvalidBlock::TooLong(bytes.len()));
        }
        self.rules().verify(key, bytes)
    }

    /// Whether another block may take the place of one under its key. One that never changes
    /// may be cached for as long as its lease lasts, and kept by any node.
    pub fn is_mutable(self) -> bool {
        self.rules().is_mutable()
    }

    /// Whether a block of version `offered` takes the place of one of version `held` when the two
    /// meet under one key. If neither supersedes the other, the one that is held stays.
    pub fn supersedes(self, offered: u64, held: u64) -> bool {
        self.rules().supersedes(offered, held)
    }

    /// Whether two versions that meet under one key are joined: a node keeps what both say.
    pub fn joins(self) -> bool {
        self.rules().joins()
    }

    /// What two verified blocks of one key say together; for kinds that are joined. Joining is
    /// commutative and idempotent. Its bytes, which are verified, and its version; `None` if the bytes
    /// are not two blocks of one key.
    pub fn join(self, held: &[u8], offered: &[u8]) -> Option<(Vec<u8>, u64)> {
        self.rules().join(held, offered)
    }

    /// Whether a store that holds version `held` and is given `offered` keeps that instead: if it
    /// supersedes what is held, or, where blocks are joined, whenever it differs, since only joined
    /// blocks are stored.
    pub fn replaces(self, offered: u64, held: u64) -> bool {
        if self.joins() { offered != held } else { self.supersedes(offered, held) }
    }

    /// Whether a reader who has seen version `seen` learns anything from version `held`.
    pub fn is_news(self, held: u64, seen: u64) -> bool {
        if self.joins() { held != seen } else { held > seen }
    }

    /// Whether version `held` will do for a reader who wants one that is at least as new as
    /// `least`. Where blocks are joined only heights are compared: of two blocks of one height
    /// neither is newer.
    pub fn reaches(self, held: u64, least: u64) -> bool {
        if self.joins() {
            self.rules().rank(held) >= self.rules().rank(least)
        } else {
            held >= least
        }
    }

    /// Whether a node that holds the verified block `held` has no use for `offered`, a verified block
    /// of the same key.
    pub fn includes(self, held: &[u8], offered: &[u8], versions: (u64, u64)) -> bool {
        match self.joins() {
            true => self.join(held, offered).is_some_and(|(joined, _)| joined == held),
            false => held == offered || self.supersedes(versions.0, versions.1),
        }
    }

    /// Whether a replica takes a verified block that its writer has just written, and of which it
    /// holds `held`.
    pub fn admit(
        self,
        held: Option<&[u8]>,
        offered: &[u8],
        now_ms: u64,
    ) -> Result<(), NotAdmitted> {
        self.rules().admit(held, offered, now_ms)
    }

    /// Whether a replica takes a verified block that another node brings: any may bring any.
    pub fn admit_copy(self, offered: &[u8], now_ms: u64) -> Result<(), NotAdmitted> {
        self.rules().admit_copy(offered, now_ms)
    }

    /// What part of its publisher's quota a block may use.
    pub fn quota_class(self) -> QuotaClass {
        self.rules().quota_class()
    }

    /// What `bytes`, a verified block of this kind, say that they belong to: the first half of an
    /// inode's key, or a volume's public key. Those who may write that may release the block
    /// ([`Release`]). `None` for kinds without releases.
    pub fn belongs_to(self, bytes: &[u8]) -> Option<[u8; 32]> {
        self.rules().belongs_to(bytes)
    }

    /// Whether a release has replicas remove the block, rather than end its lease sooner
    /// ([`ReleaseEffect`]): they must then know when it was put or renewed last.
    pub fn release_removes(self) -> bool {
        self.rules().release_removes()
    }

    /// Whether `bytes`, a verified block of this kind, are a tombstone: a version by which those
    /// who may write the block say that it has been removed. It is kept and replicated as any
    /// version, so that no older one comes back, until its lease ends.
    pub fn is_tombstone(self, bytes: &[u8]) -> bool {
        self.rules().is_tombstone(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::BlockHash;

    #[test]
    fn oversized_blocks_are_refused_before_they_are_hashed() {
        let bytes = vec![0; MAX_BLOCK_BYTES + 1];
        let key = BlockHash::of(&bytes).key();
        for kind in BlockKind::ALL {
            assert_eq!(kind.verify(&key, &bytes), Err(InvalidBlock::TooLong(bytes.len())));
        }
    }

    #[test]
    fn an_unknown_kind_is_refused() {
        assert_eq!(BlockKind::from_u8(9), Err(InvalidBlock::UnknownKind(9)));
        for kind in BlockKind::ALL {
            assert_eq!(BlockKind::from_u8(*kind as u8), Ok(*kind));
        }
    }

    /// Two replicas that both took the other's block for the newer would swap them for ever.
    #[test]
    fn of_two_versions_at_most_one_supersedes_the_other() {
        for kind in BlockKind::ALL {
            for (a, b) in [(0, 0), (0, 1), (3, 12), (3, 13), (u64::MAX - 1, u64::MAX)] {
                assert!(!kind.supersedes(a, b) || !kind.supersedes(b, a), "{kind:?} {a} {b}");
                assert!(kind.is_mutable() || !kind.supersedes(b, a), "{kind:?} never changes");
            }
        }
    }
}
