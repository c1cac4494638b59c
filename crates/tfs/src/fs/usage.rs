//! Numbers and maps for people: what holds how much, and where.

use atoll_vfs::{Errno, InodeNumber};

use super::held::to_ext2;
use super::{Avoidance, Tfs, errno};
use crate::ext2::{Extent, GroupBitmaps};
use crate::records::summary::CHUNKS;

/// How much each kind of file uses.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Usage {
    /// Size of a block, bytes.
    pub block_bytes: u32,
    /// Blocks in all.
    pub blocks: u64,
    /// Blocks free for ordinary files (transparent ones among them).
    pub free_blocks: u64,
    /// Of these, kept for the administrator.
    pub reserved_blocks: u64,
    /// Blocks of the records of transparent files.
    pub records_blocks: u64,
    /// Blocks in state transparent.
    pub transparent_blocks: u64,
    /// Blocks in a state overwritten: lost files that have not been opened since.
    pub overwritten_blocks: u64,
    /// Free blocks in avoided chunks, with nothing transparent in them.
    pub avoided_free_blocks: u64,
    /// Blocks that transparent data may still be written to.
    pub transparent_room_blocks: u64,
    /// Blocks of transparent files that are open.
    pub pinned_blocks: u64,
    /// Inodes in all.
    pub inodes: u64,
    /// Inodes that are free.
    pub free_inodes: u64,
    /// Transparent files.
    pub transparent_files: u64,
    /// Transparent directories.
    pub transparent_directories: u64,
    /// Block groups.
    pub groups: u32,
    /// What is avoided.
    pub avoidance: Avoidance,
}

impl Tfs {
    /// Counts.
    ///
    /// # Errors
    /// `EIO`.
    pub fn usage(&self) -> Result<Usage, Errno> {
        let mut usage = {
            let core = self.shared.core();
            let superblock = core.ext2.superblock();
            let records = core.ext2.records().ok_or(Errno::EIO)?;
            let totals = records.totals();
            Usage {
                block_bytes: superblock.block_bytes(),
                blocks: u64::from(superblock.blocks()),
                free_blocks: u64::from(superblock.free_blocks()),
                reserved_blocks: u64::from(superblock.reserved_blocks()),
                records_blocks: u64::from(records.layout().blocks()),
                transparent_blocks: totals.transparent,
                overwritten_blocks: totals.overwritten,
                pinned_blocks: records.pinned_blocks(),
                inodes: u64::from(superblock.inodes()),
                free_inodes: u64::from(superblock.free_inodes()),
                transparent_files: totals
                    .transparent_inodes
                    .saturating_sub(totals.transparent_directories),
                transparent_directories: totals.transparent_directories,
                groups: superblock.groups(),
                avoidance: Avoidance::default(),
                ..Usage::default()
            }
        };
        usage.avoidance = self.avoidance()?;
        usage.avoidance.avoided_chunks = 0;
        for group in 0..usage.groups {
            let bitmaps = self.group_bitmaps(group)?;
            let avoided = self.avoided_chunks(group)?;
            usage.avoidance.avoided_chunks += avoided.iter().filter(|a| **a).count() as u64;
            let chunk_blocks = self.chunk_blocks();
            for chunk in 0..CHUNKS as u32 {
                let end = ((chunk + 1) * chunk_blocks).min(bitmaps.blocks);
                let free = bitmaps.free_between(chunk * chunk_blocks..end);
                if avoided[chunk as usize] {
                    usage.avoided_free_blocks += free;
                } else {
                    usage.transparent_room_blocks += free;
                }
            }
        }
        Ok(usage)
    }

    /// Size of a block, blocks, block groups.
    pub(crate) fn geometry(&self) -> (u32, u32, u32) {
        let core = self.shared.core();
        let superblock = core.ext2.superblock();
        (superblock.block_bytes(), superblock.blocks(), superblock.groups())
    }

    /// The states of a group's blocks, from its first on.
    ///
    /// # Errors
    /// `EINVAL` for a group that does not exist, `EIO`.
    pub fn group_bitmaps(&self, group: u32) -> Result<GroupBitmaps, Errno> {
        let mut core = self.shared.core();
        if group >= core.ext2.superblock().groups() {
            return Err(Errno::EINVAL);
        }
        let bitmaps = core.ext2.group_bitmaps(group).map_err(|error| errno(&error))?;
        bitmaps.ok_or(Errno::EIO)
    }

    /// The first block of a group.
    pub fn first_block_of_group(&self, group: u32) -> u32 {
        self.shared.core().ext2.superblock().first_block_of_group(group)
    }

    /// Blocks of a chunk: an eighth of a group (§3.3).
    pub fn chunk_blocks(&self) -> u32 {
        let blocks = self.shared.core().ext2.superblock().blocks_per_group();
        blocks.div_ceil(CHUNKS as u32)
    }

    /// Which chunks of a group are avoided (§3.3).
    ///
    /// # Errors
    /// `EINVAL` for a group that does not exist, `EIO`.
    pub fn avoided_chunks(&self, group: u32) -> Result<[bool; CHUNKS], Errno> {
        let mut core = self.shared.core();
        if group >= core.ext2.superblock().groups() {
            return Err(Errno::EINVAL);
        }
        let (records, meta) = core.ext2.records_and_meta().ok_or(Errno::EIO)?;
        let avoided = records.summary(meta, group).map_err(|error| errno(&error))?.avoided;
        Ok(std::array::from_fn(|chunk| avoided & 1 << chunk != 0))
    }

    /// Where the blocks of a file lie, ordinary or transparent, in the order of the file;
    /// holes are left out.
    ///
    /// # Errors
    /// `ESTALE` for an inode that is not in use, `EIO`.
    pub fn file_extents(&self, inode: InodeNumber) -> Result<Vec<Extent>, Errno> {
        let number = to_ext2(inode)?;
        let mut core = self.shared.core();
        let inode = core.live_inode(number)?;
        if inode.is_transparent_file() {
            let map = core.ext2.lost_map(number).map_err(|error| errno(&error))?;
            return Ok(map.map_or_else(Vec::new, |map| map.extents));
        }
        let block_bytes = u64::from(self.shared.block_bytes);
        let end = inode.size_bytes.div_ceil(block_bytes);
        let mut extents = Vec::new();
        let mut at = 0;
        // A piece at a time: between holes a file may be very long.
        const PIECE_BLOCKS: u64 = 1 << 16;
        while at < end {
            let count = PIECE_BLOCKS.min(end - at);
            let found = core.ext2.extents(&inode, at as u32, count as u32);
            extents.extend(found.map_err(|e| errno(&e))?.into_iter().filter(|e| e.start != 0));
            at += count;
            // Pointers in a circle: more than the disk has.
            if extents.len() > core.ext2.superblock().blocks() as usize {
                return Err(Errno::EIO);
            }
        }
        Ok(extents)
    }
}
