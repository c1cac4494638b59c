//! Room that is kept for the index: a full disk must not keep a member from being opened, or from removing files.
//!
//! `.atoll/reserve` takes room that nobody uses. When the disk is nearly full at a checkpoint, it is removed, the index is
//! written, and whatever takes room is refused with `ENOSPC` until there is room for the reserve again.

use std::sync::atomic::Ordering;

use atoll_vfs::Errno;

use super::Member;
use crate::disk::{Disk, DiskResult, Making, missing_is_none};

/// Of Atoll's own files.
pub(super) const RESERVE: &[u8] = b"reserve";
/// More than a checkpoint writes: at most some hundred thousand entries.
const RESERVE_BYTES: u64 = 32 << 20;
/// With less than this free the reserve is used.
const TIGHT_BYTES: u64 = 16 << 20;
/// With more than this free it is made again.
const AMPLE_BYTES: u64 = 4 * RESERVE_BYTES;

impl<D: Disk> Member<D> {
    /// Refuses what takes room while the disk is full.
    pub(crate) fn check_room(&self) -> DiskResult<()> {
        match self.is_tight.load(Ordering::Relaxed) {
            true => Err(Errno::ENOSPC),
            false => Ok(()),
        }
    }

    /// Before the index is written: makes room for it if there is none, or takes room for the next time.
    pub(super) async fn make_room(&self) -> DiskResult<()> {
        let found = self.disk.stat_fs().await?;
        let free = found.blocks_free.saturating_mul(u64::from(found.block_size_bytes));
        let own = self.own().await?;
        if free < TIGHT_BYTES {
            self.is_tight.store(true, Ordering::Relaxed);
            missing_is_none(self.disk.unlink(&own, RESERVE).await)?;
        } else if free > AMPLE_BYTES {
            if missing_is_none(self.disk.stat_at(&own, RESERVE).await)?.is_none()
                && self.take_reserve(&own).await.is_err()
            {
                // Half a reserve is none.
                missing_is_none(self.disk.unlink(&own, RESERVE).await)?;
            }
            self.is_tight.store(false, Ordering::Relaxed);
        }
        Ok(())
    }

    async fn take_reserve(&self, own: &D::Node) -> DiskResult<()> {
        self.disk.make(own, RESERVE, Making::File, 0o600).await?;
        let file = self.disk.open(&self.disk.node(own, RESERVE).await?).await?;
        match self.disk.allocate(&file, 0, 0, RESERVE_BYTES).await {
            // A file system that allocates nothing ahead: the reserve is what it is.
            Err(Errno::EOPNOTSUPP) => Ok(()),
            allocated => allocated,
        }
    }
}
