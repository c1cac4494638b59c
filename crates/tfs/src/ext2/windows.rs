//! Preallocation: blocks after the end of a growing file that others leave to it.
//!
//! ext2 keeps eight blocks for each file that grows (Card, Ts'o, Tweedie 1994), so that
//! files written at the same time do not interleave; since 2007 as a reservation window in
//! memory that doubles while it is used up. This is the latter: nothing on the disk says
//! so, and when space runs short windows are ignored.

use std::collections::BTreeMap;

/// Blocks of a first window (ext2: `EXT2_DEFAULT_RESERVE_BLOCKS`).
pub(super) const FIRST_WINDOW_BLOCKS: u32 = 8;
/// Blocks of the largest window (ext2: `EXT2_MAX_RESERVE_BLOCKS`).
pub(super) const MAX_WINDOW_BLOCKS: u32 = 1027;
/// The most windows; the one that was there longest gives way (a guess: files that grow
/// at the same time).
const MAX_WINDOWS: usize = 1024;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Window {
    inode: u32,
    len: u32,
    /// Size of the file's next window.
    next_len: u32,
    age: u64,
}

/// The windows of all growing files, by their first block; they do not overlap.
#[derive(Debug, Default)]
pub(super) struct Windows {
    by_start: BTreeMap<u32, Window>,
    start_of: BTreeMap<u32, u32>,
    clock: u64,
}

impl Windows {
    /// How many of the `len` blocks from `start` on no other file's window covers.
    pub(super) fn open_to(&self, inode: u32, start: u32, len: u32) -> u32 {
        if self.end_of_other(inode, start).is_some() {
            return 0;
        }
        let end = start.saturating_add(len);
        let other = self.by_start.range(start..end).find(|(_, window)| window.inode != inode);
        other.map_or(len, |(first, _)| first - start)
    }

    /// Where the window that covers `start` ends, if it is another file's.
    pub(super) fn end_of_other(&self, inode: u32, start: u32) -> Option<u32> {
        let (first, window) = self.by_start.range(..=start).next_back()?;
        (window.inode != inode && start - first < window.len).then(|| first + window.len)
    }

    /// Says that `inode` was given blocks up to `end`: its window now begins there, `room`
    /// blocks at most, and is larger if the last one was used up.
    pub(super) fn advance(&mut self, inode: u32, end: u32, room: u32) {
        let old = self.remove(inode);
        let len = match old {
            Some((start, window)) if end >= start && end - start < window.len => {
                window.len - (end - start)
            }
            Some((_, window)) => window.next_len,
            None => FIRST_WINDOW_BLOCKS,
        };
        let used_up = old.is_some_and(|(start, window)| end.wrapping_sub(start) >= window.len);
        let next_len = match old {
            Some((_, window)) if used_up => (window.next_len * 2).min(MAX_WINDOW_BLOCKS),
            Some((_, window)) => window.next_len,
            None => FIRST_WINDOW_BLOCKS,
        };
        let len = self.open_to(inode, end, len.min(room));
        if len == 0 {
            return;
        }
        if self.by_start.len() >= MAX_WINDOWS {
            let oldest = self.by_start.values().min_by_key(|w| w.age).map(|w| w.inode);
            oldest.and_then(|inode| self.remove(inode));
        }
        self.clock += 1;
        self.by_start.insert(end, Window { inode, len, next_len, age: self.clock });
        self.start_of.insert(inode, end);
    }

    /// Forgets a file's window: it is closed, cut off or gone.
    pub(super) fn drop_of(&mut self, inode: u32) {
        self.remove(inode);
    }

    fn remove(&mut self, inode: u32) -> Option<(u32, Window)> {
        let start = self.start_of.remove(&inode)?;
        self.by_start.remove(&start).map(|window| (start, window))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_is_its_files_own_and_grows_as_it_is_used_up() {
        let mut windows = Windows::default();
        windows.advance(12, 100, 1000);
        assert_eq!(windows.open_to(12, 100, 8), 8);
        assert_eq!(windows.open_to(13, 100, 8), 0);
        assert_eq!(windows.open_to(13, 107, 8), 0);
        assert_eq!(windows.open_to(13, 108, 8), 8);
        assert_eq!(windows.open_to(13, 96, 8), 4);
        assert_eq!(windows.end_of_other(13, 103), Some(108));
        windows.advance(12, 108, 1000);
        assert_eq!(windows.open_to(13, 108, 1), 0, "the next one");
        windows.advance(12, 116, 1000);
        assert_eq!(windows.end_of_other(13, 116), Some(132), "twice as long");
        windows.drop_of(12);
        assert_eq!(windows.open_to(13, 100, 100), 100);
    }

    #[test]
    fn windows_do_not_overlap_and_are_limited_in_number() {
        let mut windows = Windows::default();
        windows.advance(12, 100, 1000);
        windows.advance(13, 96, 1000);
        assert_eq!(windows.end_of_other(14, 96), Some(100));
        for inode in 0..5000 {
            windows.advance(100 + inode, 1000 + 20 * inode, 1000);
        }
        assert!(windows.by_start.len() <= MAX_WINDOWS);
        assert_eq!(windows.by_start.len(), windows.start_of.len());
    }
}
