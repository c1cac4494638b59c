//! How a store that has an index behaves.

use std::time::Duration;

/// How a [`crate::DiskStore`] behaves. Start from the default.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DiskConfig {
    /// What the store may take on its disk, index and garbage included, bytes. A part of
    /// it stays free so that compaction and index have room to work (see `store.md`).
    pub capacity_bytes: u64,
    /// Length at which a segment ends, bytes; at most a 16th of the capacity is used.
    pub segment_bytes: u64,
    /// Memory for pages of the index, bytes.
    pub index_cache_bytes: usize,
    /// Bytes of blocks that may wait for the writer before `put` waits.
    pub queue_bytes: usize,
    /// Threads that read what is not cached.
    pub reader_threads: usize,
    /// Segment files kept open.
    pub open_segments: usize,
    /// Bytes left free on the disk for others (and for the index) before it counts as full.
    pub free_reserve_bytes: u64,
    /// Changed blocks after which the index is committed.
    pub commit_entries: usize,
    /// Bytes of log after which the index is committed.
    pub commit_bytes: u64,
    /// Time after which the index is committed.
    pub commit_interval: Duration,
}

impl Default for DiskConfig {
    fn default() -> DiskConfig {
        DiskConfig {
            capacity_bytes: 10 << 30,
            segment_bytes: 64 << 20,
            index_cache_bytes: 4 << 20,
            queue_bytes: 16 << 20,
            reader_threads: 2,
            open_segments: 64,
            free_reserve_bytes: 16 << 20,
            commit_entries: 8192,
            commit_bytes: 128 << 20,
            commit_interval: Duration::from_secs(15),
        }
    }
}
