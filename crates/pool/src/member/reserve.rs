//! Room that is kept for the index: a full disk must not keep a member from being opened, or from removing files.
//!
//! `.atoll/reserve` takes room that nobody uses. When the disk is nearly full at a checkpoint, it is removed, the index is
//! written, and whatever takes room is refused with `ENOSPC` until there is room for the reserve again.

use std::sync::atomic::Ordering;

use atoll_vfs::Errno;

use super::PoolMember;
use crate::disk::{Disk, DiskResult, Making, missing_is_none};

/// Of Atoll's own files.
pub(super) const RESERVE: &[u8] = b"reserve";
/// More than a checkpoint writes: at most some hundred thousand entries.
const MAX_RESERVE_BYTES: u64 = 32 << 20;

/// A backup with less room is full: more than changes take which are under way.
const MIN_ROOM_BYTES: u64 = 256 << 10;
/// And so is one on which fewer files can be made.
const MIN_ROOM_FILES: u64 = 64;

/// What counts as full, on a disk of so many bytes.
#[derive(Clone, Copy)]
struct Room {
    /// A sixteenth of a small disk.
    reserve_bytes: u64,
    /// With less than this free the reserve is used.
    tight_bytes: u64,
    /// With more than this free it is made again.
    ample_bytes: u64,
}

impl Room {
    fn of(size_bytes: u64) -> Room {
        let reserve_bytes = (size_bytes / 16).min(MAX_RESERVE_BYTES);
        Room { reserve_bytes, tight_bytes: reserve_bytes / 2, ample_bytes: reserve_bytes * 4 }
    }
}

impl<D: Disk> PoolMember<D> {
    /// Refuses what takes room while the disk is full, or a backup's.
    pub(crate) fn check_room(&self) -> DiskResult<()> {
        let is_tight_elsewhere =
            self.backups().is_some_and(|backups| backups.free_bytes() < MIN_ROOM_BYTES);
        match self.is_tight.load(Ordering::Relaxed) || is_tight_elsewhere {
            true => Err(Errno::ENOSPC),
            false => Ok(()),
        }
    }

    /// Room that is not kept for the index, bytes; none where hardly a file can be made.
    pub(crate) async fn room_left(&self) -> DiskResult<u64> {
        let found = self.disk.stat_fs().await?;
        let bytes = |blocks: u64| blocks.saturating_mul(u64::from(found.block_size_bytes));
        let room = Room::of(bytes(found.blocks));
        // Some file systems do not count files.
        if found.files > 0 && found.files_free < MIN_ROOM_FILES {
            return Ok(0);
        }
        Ok(bytes(found.blocks_available).saturating_sub(room.tight_bytes))
    }

    /// Before the index is written: makes room for it if there is none, or takes room for the next time.
    pub(super) async fn make_room(&self) -> DiskResult<()> {
        let found = self.disk.stat_fs().await?;
        let bytes = |blocks: u64| blocks.saturating_mul(u64::from(found.block_size_bytes));
        let (room, free) = (Room::of(bytes(found.blocks)), bytes(found.blocks_free));
        let own = self.own().await?;
        if free < room.tight_bytes {
            self.is_tight.store(true, Ordering::Relaxed);
            missing_is_none(self.disk.unlink(&own, RESERVE).await)?;
        } else if free > room.ample_bytes {
            if missing_is_none(self.disk.stat_at(&own, RESERVE).await)?.is_none()
                && self.take_reserve(&own, room.reserve_bytes).await.is_err()
            {
                // Half a reserve is none.
                missing_is_none(self.disk.unlink(&own, RESERVE).await)?;
            }
            self.is_tight.store(false, Ordering::Relaxed);
        }
        Ok(())
    }

    async fn take_reserve(&self, own: &D::Node, reserve_bytes: u64) -> DiskResult<()> {
        self.disk.make(own, RESERVE, Making::File, 0o600).await?;
        let file = self.disk.open(&self.disk.node(own, RESERVE).await?).await?;
        match self.disk.allocate(&file, 0, 0, reserve_bytes).await {
            // A file system that allocates nothing ahead: the reserve is what it is.
            Err(Errno::EOPNOTSUPP) => Ok(()),
            allocated => allocated,
        }
    }
}
