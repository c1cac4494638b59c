//! Maps of transparent files: an entry for each inode, a chain of extents from there.

use super::layout::{EXTENT_HEAD_BYTES, MAP_ENTRY_BYTES};
use crate::format::{put_u32, put_u64, u32_at, u64_at};

/// The most extents of one transparent file.
pub const MAX_EXTENTS: usize = 65_536;

/// What is known of one transparent file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MapEntry {
    /// Generation of the inode it belongs to, not 0.
    pub generation: u32,
    /// The directory that holds its name.
    pub parent: u32,
    /// First block of the first extent, 0: none.
    pub first_extent: u32,
    /// Blocks.
    pub blocks: u32,
    /// Length, bytes.
    pub size_bytes: u64,
    /// Epoch in which all tags were last compared.
    pub epoch: u32,
}

impl MapEntry {
    /// From its bytes; none if there is no entry or it is damaged.
    ///
    /// # Panics
    /// If there are fewer than [`MAP_ENTRY_BYTES`].
    pub fn decode(inode: u32, bytes: &[u8]) -> Option<MapEntry> {
        let generation = u32_at(bytes, 0);
        if generation == 0 || checksum(inode, &bytes[..28]) != u32_at(bytes, 28) {
            return None;
        }
        Some(MapEntry {
            generation,
            parent: u32_at(bytes, 4),
            first_extent: u32_at(bytes, 8),
            blocks: u32_at(bytes, 12),
            size_bytes: u64_at(bytes, 16),
            epoch: u32_at(bytes, 24),
        })
    }

    /// Into its bytes.
    ///
    /// # Panics
    /// If there are fewer than [`MAP_ENTRY_BYTES`].
    pub fn encode(&self, inode: u32, bytes: &mut [u8]) {
        assert_ne!(self.generation, 0, "generation 0 means no entry");
        put_u32(bytes, 0, self.generation);
        put_u32(bytes, 4, self.parent);
        put_u32(bytes, 8, self.first_extent);
        put_u32(bytes, 12, self.blocks);
        put_u64(bytes, 16, self.size_bytes);
        put_u32(bytes, 24, self.epoch);
        let checksum = checksum(inode, &bytes[..28]);
        put_u32(bytes, 28, checksum);
    }

    /// Removes an entry.
    pub fn clear(bytes: &mut [u8]) {
        bytes[..MAP_ENTRY_BYTES].fill(0);
    }
}

fn checksum(inode: u32, bytes: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&inode.to_le_bytes());
    hasher.update(bytes);
    hasher.finalize()
}

/// The head of an extent, at the place of its first block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ExtentHead {
    /// Inode of the owner, not 0.
    pub owner: u32,
    /// First block within the file.
    pub logical: u32,
    /// Blocks, not 0.
    pub len: u32,
    /// First block of the next extent, 0 at the end.
    pub next: u32,
}

impl ExtentHead {
    /// From its bytes; none if no extent begins here.
    ///
    /// # Panics
    /// If there are fewer than [`EXTENT_HEAD_BYTES`].
    pub fn decode(bytes: &[u8]) -> Option<ExtentHead> {
        let head = ExtentHead {
            owner: u32_at(bytes, 0),
            logical: u32_at(bytes, 4),
            len: u32_at(bytes, 8),
            next: u32_at(bytes, 12),
        };
        (head.owner != 0 && head.len != 0).then_some(head)
    }

    /// Into its bytes.
    ///
    /// # Panics
    /// If there are fewer than [`EXTENT_HEAD_BYTES`].
    pub fn encode(&self, bytes: &mut [u8]) {
        put_u32(bytes, 0, self.owner);
        put_u32(bytes, 4, self.logical);
        put_u32(bytes, 8, self.len);
        put_u32(bytes, 12, self.next);
    }

    /// Removes a head.
    pub fn clear(bytes: &mut [u8]) {
        bytes[..EXTENT_HEAD_BYTES].fill(0);
    }
}
