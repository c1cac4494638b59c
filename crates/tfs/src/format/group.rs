//! Group descriptors: 32 bytes each, in the blocks after the superblock.
//!
//! | offset | bytes | ext2's name |
//! |---|---|---|
//! | 0 | 4 | `bg_block_bitmap` |
//! | 4 | 4 | `bg_inode_bitmap` |
//! | 8 | 4 | `bg_inode_table` |
//! | 12 | 2 | `bg_free_blocks_count` |
//! | 14 | 2 | `bg_free_inodes_count` |
//! | 16 | 2 | `bg_used_dirs_count` |
//! | 18 | 14 | unused |

use super::superblock::Superblock;
use super::{put_u16, put_u32, u16_at, u32_at};

/// Where a group keeps its bitmaps and inodes, and what is free in it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct GroupDescriptor {
    /// Block of the block bitmap.
    pub block_bitmap: u32,
    /// Block of the inode bitmap.
    pub inode_bitmap: u32,
    /// First block of the inode table.
    pub inode_table: u32,
    /// Blocks free.
    pub free_blocks: u16,
    /// Inodes free.
    pub free_inodes: u16,
    /// Directories whose inode is here.
    pub directories: u16,
}

impl GroupDescriptor {
    /// From the 32 bytes of a descriptor.
    ///
    /// # Panics
    /// If there are fewer.
    pub fn decode(bytes: &[u8]) -> GroupDescriptor {
        GroupDescriptor {
            block_bitmap: u32_at(bytes, 0),
            inode_bitmap: u32_at(bytes, 4),
            inode_table: u32_at(bytes, 8),
            free_blocks: u16_at(bytes, 12),
            free_inodes: u16_at(bytes, 14),
            directories: u16_at(bytes, 16),
        }
    }

    /// Into the 32 bytes of a descriptor; the unused ones are left.
    ///
    /// # Panics
    /// If there are fewer.
    pub fn encode(&self, bytes: &mut [u8]) {
        put_u32(bytes, 0, self.block_bitmap);
        put_u32(bytes, 4, self.inode_bitmap);
        put_u32(bytes, 8, self.inode_table);
        put_u16(bytes, 12, self.free_blocks);
        put_u16(bytes, 14, self.free_inodes);
        put_u16(bytes, 16, self.directories);
    }

    /// The group's own metadata as runs, first block and number: the copies of superblock
    /// and descriptors, the two bitmaps, the inode table.
    pub fn own_runs(&self, superblock: &Superblock, group: u32) -> [(u32, u32); 4] {
        let first = superblock.first_block_of_group(group);
        let copies = superblock.copy_blocks_of_group(group);
        [
            (first, copies.min(superblock.blocks_of_group(group))),
            (self.block_bitmap, 1),
            (self.inode_bitmap, 1),
            (self.inode_table, superblock.inode_table_blocks()),
        ]
    }

    /// Whether everything of it lies within its own group and nothing overlaps, as without
    /// `flex_bg` it must.
    pub fn fits(&self, superblock: &Superblock, group: u32) -> bool {
        let first = superblock.first_block_of_group(group);
        let end = first + superblock.blocks_of_group(group);
        let within = |block: u32, count: u32| block >= first && block < end && count <= end - block;
        // Sums below cannot overflow: what is within its group ends with the file system.
        let own = self.own_runs(superblock, group);
        let apart =
            |(a, a_len): (u32, u32), (b, b_len): (u32, u32)| a + a_len <= b || b + b_len <= a;
        own.iter().all(|(start, len)| within(*start, *len) || *len == 0)
            && (1..own.len()).all(|i| own[..i].iter().all(|other| apart(*other, own[i])))
            && u32::from(self.free_blocks) <= superblock.blocks_of_group(group)
            && u32::from(self.free_inodes) <= superblock.inodes_per_group()
            && u32::from(self.directories) <= superblock.inodes_per_group()
    }
}
