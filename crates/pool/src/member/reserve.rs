//! Room that is kept for the index: a full disk must not keep a member from being opened, or from removing files.
//!
//! `.atoll/reserve` takes room that nobody uses. When the disk is nearly full at a checkpoint, it is removed, the index is
//! written, and whatever takes room is refused with `ENOSPC` until there is room for the reserve again.
//!
//! A change that was decided over several groups, or by another member, must be made, also when others have filled the disk since it was
//! checked. It has the reserve, too ([`PoolMember::use_reserve`]): a member on which such a change is checked has one, or refuses it.

use std::sync::atomic::Ordering;

use atoll_vfs::{Errno, StatFs};

use super::PoolMember;
use crate::disk::{Disk, DiskResult, Making, missing_is_none};
use crate::roster::RosterRules;

/// Of Atoll's own files.
pub(super) const RESERVE: &[u8] = b"reserve";
/// More than a checkpoint writes: at most some hundred thousand entries.
const MAX_RESERVE_BYTES: u64 = 32 << 20;

/// A backup with less room is full: more than changes take which are under way.
const MIN_ROOM_BYTES: u64 = 256 << 10;
/// And so is one on which fewer files can be made.
const MIN_ROOM_FILES: u64 = 64;

/// More than one change of names takes: a link of a block, blocks for two directories, one for attributes.
const CHANGE_BYTES: u64 = 16 << 10;
/// Prepared changes take one part in so many of the reserve at most: the index needs the rest.
const PREPARED_SHARE: u64 = 4;

/// What counts as full, on a disk of so many bytes.
#[derive(Clone, Copy)]
struct Room {
    /// A sixteenth of a small disk.
    reserve_bytes: u64,
    /// With less than this free the reserve is used.
    tight_bytes: u64,
    /// With more than this free it is made.
    enough_bytes: u64,
    /// With more than this free it is made again after it was used.
    ample_bytes: u64,
}

impl Room {
    fn of(size_bytes: u64) -> Room {
        let reserve_bytes = (size_bytes / 16).min(MAX_RESERVE_BYTES);
        Room {
            reserve_bytes,
            tight_bytes: reserve_bytes / 2,
            enough_bytes: reserve_bytes * 2,
            ample_bytes: reserve_bytes * 4,
        }
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

    /// What the roster says of all groups, as this member knows it from now on.
    pub(crate) fn set_rules(&self, rules: RosterRules) {
        let level = rules.level.unwrap_or(self.settings.level);
        self.rules[0].store(rules.min_copies, Ordering::Relaxed);
        self.rules[1].store(level, Ordering::Relaxed);
    }

    /// Down to which level directories are distributed that are made now.
    pub(crate) fn level(&self) -> u8 {
        self.rules[1].load(Ordering::Relaxed)
    }

    /// Refuses changes as long as fewer members have everything than changes need: [`Errno::EROFS`], which programs show as what it is, and after
    /// which they do not try again.
    pub(crate) fn check_copies(&self) -> DiskResult<()> {
        let least = usize::from(self.rules[0].load(Ordering::Relaxed));
        match least > 1 && self.backups().is_some_and(|backups| backups.copies() < least) {
            true => Err(Errno::EROFS),
            false => Ok(()),
        }
    }

    /// The size of the disk of the member with the least room, and how much of it is free; nothing is available while calls that take room
    /// are refused.
    pub(crate) async fn room_of_all(&self) -> DiskResult<StatFs> {
        let mut found = self.disk.stat_fs().await?;
        let blocks = |bytes: u64| bytes / u64::from(found.block_size_bytes).max(1);
        let elsewhere = self.backups().and_then(|backups| backups.least_room());
        let elsewhere = elsewhere.map(|(free, size)| (blocks(free), blocks(size)));
        if let Some((free, size)) = elsewhere.filter(|(free, _)| *free < found.blocks_available) {
            found.blocks = if size == 0 { found.blocks } else { size };
            found.blocks_available = free;
            found.blocks_free = free.min(found.blocks_free);
        }
        if self.check_room().is_err() {
            found.blocks_available = 0;
        }
        Ok(found)
    }

    /// Whether all members can make these changes of names whenever they are told to, and `waiting` others: there is room for them now,
    /// and if it is taken the reserve is theirs. [`Errno::EAGAIN`] if too many wait.
    pub(crate) async fn check_room_to_prepare(
        &self,
        changes: usize,
        waiting: usize,
    ) -> DiskResult<()> {
        self.check_room()?;
        if self.is_nearly_full().await? {
            return Err(Errno::ENOSPC);
        }
        let found = self.disk.stat_fs().await?;
        let size_bytes = found.blocks.saturating_mul(u64::from(found.block_size_bytes));
        let wanted_bytes = (changes + waiting) as u64 * CHANGE_BYTES;
        // One alone never waits.
        match waiting > 0 && wanted_bytes > Room::of(size_bytes).reserve_bytes / PREPARED_SHARE {
            true => Err(Errno::EAGAIN),
            false => Ok(()),
        }
    }

    /// Whether there is less room than changes take that are under way.
    pub(super) async fn is_nearly_full(&self) -> DiskResult<bool> {
        Ok(self.room_left().await? < MIN_ROOM_BYTES)
    }

    /// Gives the reserve to a change that must be made and has found no room; whether there was one. Nothing else that takes room
    /// is done from now on.
    pub(super) async fn use_reserve(&self) -> DiskResult<bool> {
        self.is_tight.store(true, Ordering::Relaxed);
        let own = self.own().await?;
        Ok(missing_is_none(self.disk.unlink(&own, RESERVE).await)?.is_some())
    }

    /// [`PoolMember::room_left`], and the size of the disk, bytes.
    pub(crate) async fn room(&self) -> DiskResult<(u64, u64)> {
        let found = self.disk.stat_fs().await?;
        let size = found.blocks.saturating_mul(u64::from(found.block_size_bytes));
        Ok((self.room_left().await?, size))
    }

    /// Room that is not kept for the index, bytes; none while that is short, or where hardly a file can be made.
    pub(crate) async fn room_left(&self) -> DiskResult<u64> {
        let found = self.disk.stat_fs().await?;
        let bytes = |blocks: u64| blocks.saturating_mul(u64::from(found.block_size_bytes));
        let room = Room::of(bytes(found.blocks));
        // Some file systems do not count files.
        let has_few_files = found.files > 0 && found.files_free < MIN_ROOM_FILES;
        if has_few_files || self.is_tight.load(Ordering::Relaxed) {
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
            return Ok(());
        }
        let mut is_enough = missing_is_none(self.disk.stat_at(&own, RESERVE).await)?.is_some();
        if !is_enough {
            // A reserve that was used is not made for a few files that were removed.
            is_enough = match self.is_tight.load(Ordering::Relaxed) {
                true => free > room.ample_bytes,
                false => free > room.enough_bytes,
            };
            if is_enough && self.take_reserve(&own, room.reserve_bytes).await.is_err() {
                // Half a reserve is none.
                missing_is_none(self.disk.unlink(&own, RESERVE).await)?;
            }
        }
        self.is_tight.store(!is_enough, Ordering::Relaxed);
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
