//! Where things stand within the records' file, in blocks of it.

use crate::format::superblock::Superblock;

/// Length of a group summary, bytes.
pub const SUMMARY_BYTES: usize = 64;
/// Length of an extent head, bytes.
pub const EXTENT_HEAD_BYTES: usize = 16;
/// Length of a tag, bytes.
pub const TAG_BYTES: usize = 8;
/// Length of a map entry, bytes.
pub const MAP_ENTRY_BYTES: usize = 32;
/// Copies of the header.
pub const HEADER_COPIES: u32 = 2;
/// Journal areas.
pub const JOURNAL_AREAS: u32 = 2;
/// The least blocks of a journal area: the largest call changes fewer blocks.
pub const MIN_JOURNAL_BLOCKS: u32 = 128;
/// The most blocks of a journal area; they may all be in memory at once.
pub const MAX_JOURNAL_BLOCKS: u32 = 2048;

/// A place in the records: a block of their file, and a byte within it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Place {
    /// Block of the records' file.
    pub block: u32,
    /// Byte within the block.
    pub at: usize,
}

/// The layout of the records of one file system.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RecordsLayout {
    block_bytes: u32,
    first_data_block: u32,
    blocks_per_group: u32,
    inodes_per_group: u32,
    groups: u32,
    journal_blocks: u32,
}

impl RecordsLayout {
    /// Blocks of a journal area that suit a file system: 1/128 of it, within bounds.
    pub fn journal_blocks_for(superblock: &Superblock) -> u32 {
        (superblock.blocks() / 128).clamp(MIN_JOURNAL_BLOCKS, MAX_JOURNAL_BLOCKS)
    }

    /// The layout with journal areas of `journal_blocks`; none if that is out of bounds.
    pub fn new(superblock: &Superblock, journal_blocks: u32) -> Option<RecordsLayout> {
        (MIN_JOURNAL_BLOCKS..=MAX_JOURNAL_BLOCKS).contains(&journal_blocks).then(|| RecordsLayout {
            block_bytes: superblock.block_bytes(),
            first_data_block: superblock.first_data_block(),
            blocks_per_group: superblock.blocks_per_group(),
            inodes_per_group: superblock.inodes_per_group(),
            groups: superblock.groups(),
            journal_blocks,
        })
    }

    fn blocks_for(&self, count: u32, each_bytes: usize) -> u32 {
        (u64::from(count) * each_bytes as u64).div_ceil(u64::from(self.block_bytes)) as u32
    }

    /// Blocks of the whole file.
    pub fn blocks(&self) -> u32 {
        self.region(self.groups)
    }

    /// Blocks of a journal area.
    pub fn journal_blocks(&self) -> u32 {
        self.journal_blocks
    }

    /// The first block of a journal area.
    pub fn journal_area(&self, area: u32) -> u32 {
        HEADER_COPIES + area * self.journal_blocks
    }

    fn summaries(&self) -> u32 {
        HEADER_COPIES + JOURNAL_AREAS * self.journal_blocks
    }

    /// Blocks of a group's region.
    pub fn region_blocks(&self) -> u32 {
        2 + self.blocks_for(self.blocks_per_group, EXTENT_HEAD_BYTES)
            + self.blocks_for(self.blocks_per_group, TAG_BYTES)
            + self.blocks_for(self.inodes_per_group, MAP_ENTRY_BYTES)
    }

    fn region(&self, group: u32) -> u32 {
        self.summaries()
            + self.blocks_for(self.groups, SUMMARY_BYTES)
            + group * self.region_blocks()
    }

    fn within(&self, first: u32, index: u32, each_bytes: usize) -> Place {
        let at = u64::from(index) * each_bytes as u64;
        Place {
            block: first + (at / u64::from(self.block_bytes)) as u32,
            at: (at % u64::from(self.block_bytes)) as usize,
        }
    }

    /// The group near which a block of the records' file should lie.
    pub fn group_of_record(&self, block: u32) -> u32 {
        let regions = self.region(0);
        if block < regions { 0 } else { (block - regions) / self.region_blocks() }
    }

    /// How many blocks of the records' file from `block` on should lie together.
    pub fn record_run(&self, block: u32) -> u32 {
        let regions = self.region(0);
        if block < regions {
            return regions - block;
        }
        self.region_blocks() - (block - regions) % self.region_blocks()
    }

    /// A group's summary.
    pub fn summary(&self, group: u32) -> Place {
        self.within(self.summaries(), group, SUMMARY_BYTES)
    }

    /// The block of a group's bitmap of transparent blocks.
    pub fn transparent_bitmap(&self, group: u32) -> u32 {
        self.region(group)
    }

    /// The block of a group's bitmap of overwritten blocks.
    pub fn overwritten_bitmap(&self, group: u32) -> u32 {
        self.region(group) + 1
    }

    /// The group of a block of the file system, and its number within.
    fn group_of(&self, block: u32) -> (u32, u32) {
        let block = block - self.first_data_block;
        (block / self.blocks_per_group, block % self.blocks_per_group)
    }

    /// The extent head of a block of the file system.
    pub fn extent_head(&self, block: u32) -> Place {
        let (group, index) = self.group_of(block);
        self.within(self.region(group) + 2, index, EXTENT_HEAD_BYTES)
    }

    /// The tag of a block of the file system.
    pub fn tag(&self, block: u32) -> Place {
        let (group, index) = self.group_of(block);
        let heads = self.blocks_for(self.blocks_per_group, EXTENT_HEAD_BYTES);
        self.within(self.region(group) + 2 + heads, index, TAG_BYTES)
    }

    /// The map entry of an inode.
    pub fn map_entry(&self, inode: u32) -> Place {
        let (group, index) =
            ((inode - 1) / self.inodes_per_group, (inode - 1) % self.inodes_per_group);
        let before = 2
            + self.blocks_for(self.blocks_per_group, EXTENT_HEAD_BYTES)
            + self.blocks_for(self.blocks_per_group, TAG_BYTES);
        self.within(self.region(group) + before, index, MAP_ENTRY_BYTES)
    }
}
