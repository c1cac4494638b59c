//! Leases of the blocks that inodes refer to: extending those that are taken over from a version which was read long
//! ago, and having those end sooner that were replaced.
//!
//! It does not know which blocks are still needed: `fs::releases` does.

use std::collections::BTreeSet;
use std::sync::MutexGuard;
use std::time::Duration;

use atoll_dht::{LeaseRenewal, Renewed};
use atoll_key::kinds::MAX_RELEASED;
use atoll_key::kinds::certified::{CertifiedBlock, InodeRelease};
use atoll_key::{BlockHash, BlockId};
use atoll_vfs::Errno;

use super::{Inodes, State};
use crate::shared::entries::Leaves;
use crate::shared::fault::Fault;
use crate::shared::inode::InodeKey;

/// Blocks of a version that was read longer ago may have been released and be gone: a release leaves them two
/// days.
pub(in crate::shared) const MAX_BASE_AGE: Duration = Duration::from_secs(24 * 3600);
/// Leases that are extended at once.
const RENEWED_AT_ONCE: usize = 1024;

/// Leaves of a directory, and blocks of past versions, that a version which this mount has written does not refer to any more.
pub(in crate::shared) struct ReplacedLeaves {
    pub(in crate::shared) key: InodeKey,
    /// The version that was written.
    pub(in crate::shared) block: CertifiedBlock,
    pub(in crate::shared) leaves: BTreeSet<BlockHash>,
}

impl Inodes {
    /// Leaves that versions written here have replaced since this was asked last.
    pub(in crate::shared) fn take_replaced_leaves(&self) -> Vec<ReplacedLeaves> {
        std::mem::take(&mut *self.replaced_leaves())
    }

    pub(super) fn replaced_leaves(&self) -> MutexGuard<'_, Vec<ReplacedLeaves>> {
        self.replaced_leaves.lock().expect("no holder of this lock panics")
    }

    /// Leaves of a base that was read long ago may have been released meanwhile: sees to it that the ring has
    /// those which the next version refers to.
    pub(super) async fn check_reused(&self, state: &State, leaves: &Leaves) -> Result<(), Fault> {
        let reused = {
            let known = state.known();
            let read_at = known.version.as_ref().map(|(_, at)| *at);
            if read_at.is_none_or(|at| self.env.now().since(at) < MAX_BASE_AGE) {
                return Ok(());
            }
            let reused = leaves.keys().filter(|hash| !known.unsent.contains_key(hash));
            reused.copied().collect()
        };
        self.renew(&reused).await
    }

    /// Extends the leases of content blocks.
    ///
    /// # Errors
    /// If the ring lacks one, or does not answer.
    pub(in crate::shared) async fn renew(
        &self,
        content: &BTreeSet<BlockHash>,
    ) -> Result<(), Fault> {
        let ids: Vec<BlockId> = content.iter().map(BlockHash::inode_content_id).collect();
        for ids in ids.chunks(RENEWED_AT_ONCE) {
            let (ids, lease_secs) = (ids.to_vec(), None);
            let renewal = LeaseRenewal { ids, lease_secs, will_be_put: false };
            for outcome in self.blocks.renew_blocks(renewal).await {
                if outcome? == Renewed::Lacking {
                    let why = "blocks of a version that was read more than a day ago are gone: \
                               others have replaced it since";
                    return Err(Fault::new(Errno::EIO, why));
                }
            }
        }
        Ok(())
    }

    /// Has blocks of an inode's content end after `lease_secs`; the blocks of which not all replicas have heard it.
    pub(in crate::shared) async fn release(
        &self,
        key: InodeKey,
        inode: &CertifiedBlock,
        lease_secs: u64,
        content: &BTreeSet<BlockHash>,
    ) -> Result<BTreeSet<BlockHash>, Fault> {
        if content.is_empty() {
            return Ok(BTreeSet::new());
        }
        let author = self.credentials.author(inode.groups(), self.state(key).writer()).await?;
        let all: Vec<BlockHash> = content.iter().copied().collect();
        let mut left = BTreeSet::new();
        for some in all.chunks(MAX_RELEASED) {
            let release = InodeRelease::sign(inode, &author, self.env.unix_ms(), lease_secs, some);
            let release = release.ok_or(Fault::new(Errno::EACCES, "a release cannot be signed"))?;
            let outcomes = self.blocks.release_blocks(release.into()).await;
            let failed = some.iter().zip(outcomes).filter(|(_, outcome)| outcome.is_err());
            left.extend(failed.map(|(hash, _)| *hash));
        }
        Ok(left)
    }
}
