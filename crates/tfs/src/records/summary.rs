//! The summary of a group: counts, the checksum of its bitmap, the histogram (§3.3).

use super::layout::SUMMARY_BYTES;
use crate::format::{put_u32, u32_at};

/// Chunks of a group: one eighth of it each, so that a byte tells which are avoided (§3.3).
pub const CHUNKS: usize = 8;

/// The summary of a group, decoded.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct GroupSummary {
    /// Blocks in state transparent.
    pub transparent: u32,
    /// Blocks in a state overwritten.
    pub overwritten: u32,
    /// Inodes of transparent files.
    pub transparent_inodes: u32,
    /// Transparent directories.
    pub transparent_directories: u32,
    /// Checksum of ext2's block bitmap as TFS last wrote it.
    pub bitmap_checksum: u32,
    /// Avoided chunks, one bit each.
    pub avoided: u8,
    /// Ordinary allocations in each chunk, blocks; older ones count less.
    pub histogram: [f32; CHUNKS],
    /// Blocks of transparent directories, which were taken from the end of the group.
    pub name_blocks: u32,
}

impl GroupSummary {
    /// From its bytes; none if they are damaged.
    ///
    /// # Panics
    /// If there are fewer than [`SUMMARY_BYTES`].
    pub fn decode(bytes: &[u8]) -> Option<GroupSummary> {
        if crc32fast::hash(&bytes[..60]) != u32_at(bytes, 60) {
            return None;
        }
        let count = |at: usize| f32::from_bits(u32_at(bytes, at));
        let sound = |count: f32| if count.is_finite() && count > 0.0 { count } else { 0.0 };
        Some(GroupSummary {
            transparent: u32_at(bytes, 0),
            overwritten: u32_at(bytes, 4),
            transparent_inodes: u32_at(bytes, 8),
            transparent_directories: u32_at(bytes, 12),
            bitmap_checksum: u32_at(bytes, 16),
            avoided: bytes[20],
            histogram: std::array::from_fn(|chunk| sound(count(24 + 4 * chunk))),
            name_blocks: u32_at(bytes, 56),
        })
    }

    /// Into its bytes.
    ///
    /// # Panics
    /// If there are fewer than [`SUMMARY_BYTES`].
    pub fn encode(&self, bytes: &mut [u8]) {
        bytes[..SUMMARY_BYTES].fill(0);
        put_u32(bytes, 0, self.transparent);
        put_u32(bytes, 4, self.overwritten);
        put_u32(bytes, 8, self.transparent_inodes);
        put_u32(bytes, 12, self.transparent_directories);
        put_u32(bytes, 16, self.bitmap_checksum);
        bytes[20] = self.avoided;
        for (chunk, count) in self.histogram.iter().enumerate() {
            put_u32(bytes, 24 + 4 * chunk, count.to_bits());
        }
        put_u32(bytes, 56, self.name_blocks);
        let checksum = crc32fast::hash(&bytes[..60]);
        put_u32(bytes, 60, checksum);
    }
}
