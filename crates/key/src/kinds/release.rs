//! Releases: signed statements that blocks are not needed any more.
//!
//! A kind whose blocks name what they belong to can be released by those who may write that. Who that is, and what
//! a replica does then, the kind decides: [`InodeRelease`] has leases of an inode's content end after some days,
//! [`VolumeRelease`] has a volume's content removed within minutes.
//!
//! | bytes | field |
//! |---|---|
//! | 1 | number of the kind of the blocks: 4 or 5 |
//! | … | the statement |

use bytes::Bytes;

use super::certified::InodeRelease;
use super::{BlockKind, InvalidBlock, NotAdmitted, VolumeRelease};
use crate::ring::Key;

/// The most blocks of one release: 4 KiB of hashes. A guess.
pub const MAX_RELEASED: usize = 128;

/// A statement that blocks are not needed any more. See the module.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Release {
    /// Of content of an inode.
    Inode(Box<InodeRelease>),
    /// Of content of a volume.
    Volume(VolumeRelease),
}

/// What a replica does with a block that is released.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReleaseEffect {
    /// The block's lease ends so many seconds from now, unless it ends before.
    EndsAfter {
        /// At least two days.
        lease_secs: u32,
    },
    /// The block is removed [`REMOVED_AFTER_SECS`](super::REMOVED_AFTER_SECS) after this time, unless it was put or
    /// renewed then or later. No copy of it that comes from another replica is taken until the lease of
    /// a block put at this time would have ended.
    Removed {
        /// Seconds since 1970.
        as_of_unix_secs: u64,
    },
}

impl From<InodeRelease> for Release {
    fn from(release: InodeRelease) -> Release {
        Release::Inode(Box::new(release))
    }
}

impl From<VolumeRelease> for Release {
    fn from(release: VolumeRelease) -> Release {
        Release::Volume(release)
    }
}

impl Release {
    /// Reads a release. Signatures are not checked, see [`Release::verify`].
    ///
    /// # Errors
    /// If it is malformed.
    pub fn decode(bytes: &Bytes) -> Result<Release, InvalidBlock> {
        let kind = *bytes.first().ok_or(InvalidBlock::Malformed("an empty release"))?;
        let statement = bytes.slice(1..);
        match BlockKind::from_u8(kind)? {
            BlockKind::InodeContent => InodeRelease::decode(&statement).map(Release::from),
            BlockKind::VolumeContent => VolumeRelease::decode(&statement).map(Release::from),
            _ => Err(InvalidBlock::Malformed("a release of a kind that has none")),
        }
    }

    /// Its bytes, as the table of the module says.
    pub fn to_bytes(&self) -> Vec<u8> {
        let statement = match self {
            Release::Inode(release) => release.bytes(),
            Release::Volume(release) => release.bytes(),
        };
        [&[self.kind() as u8], &statement[..]].concat()
    }

    fn kind(&self) -> BlockKind {
        match self {
            Release::Inode(_) => BlockKind::InodeContent,
            Release::Volume(_) => BlockKind::VolumeContent,
        }
    }

    /// Checks that it is signed by those who may release such blocks.
    ///
    /// # Errors
    /// If not.
    pub fn verify(&self) -> Result<(), InvalidBlock> {
        match self {
            Release::Inode(release) => release.verify(),
            Release::Volume(release) => release.verify(),
        }
    }

    /// Whether a replica takes it now.
    ///
    /// # Errors
    /// Why not.
    pub fn admit(&self, now_ms: u64) -> Result<(), NotAdmitted> {
        match self {
            Release::Inode(release) => release.admit(now_ms),
            Release::Volume(release) => release.admit(now_ms),
        }
    }

    /// Whether it may release the verified block `bytes` of `kind`.
    pub fn covers(&self, kind: BlockKind, bytes: &[u8]) -> bool {
        let owner = match self {
            Release::Inode(release) => release.inode(),
            Release::Volume(release) => release.volume().0,
        };
        kind == self.kind() && kind.belongs_to(bytes) == Some(owner)
    }

    /// What a replica does with the blocks.
    pub fn effect(&self) -> ReleaseEffect {
        match self {
            Release::Inode(release) => ReleaseEffect::EndsAfter { lease_secs: release.lease_secs },
            Release::Volume(release) => {
                ReleaseEffect::Removed { as_of_unix_secs: release.as_of_unix_secs }
            }
        }
    }

    /// The keys of the blocks.
    pub fn keys(&self) -> impl ExactSizeIterator<Item = Key> + use<> {
        let keys: Vec<Key> = match self {
            Release::Inode(release) => release.keys().collect(),
            Release::Volume(release) => release.keys().collect(),
        };
        keys.into_iter()
    }
}
