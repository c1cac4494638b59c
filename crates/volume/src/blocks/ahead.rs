//! How far to read ahead of a reader.
//!
//! CFS fetches ahead with a window the reader sets (§7.1); here the distance grows with what the
//! reader has read sequentially, from nothing to its limit, and collapses when it jumps. How
//! much of that distance is on its way at once is not decided here, but by the volume's
//! window ([`crate::window`]), which also gives the limit.

/// Where a reader is and how far it is read ahead of. Offsets and lengths in bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ReadAhead {
    next: u64,
    /// How much was read since the last jump.
    run: u64,
    fetched_upto: u64,
}

/// Nothing is fetched ahead of a shorter run: a program that maps a file and jumps reads some pages
/// at each place, one by one. A guess, of two usual blocks.
const MIN_RUN_BYTES: u64 = 128 << 10;

/// The distance, as a multiple of the run. Guess.
const AHEAD_OF_RUN: u64 = 4;

/// Kernels send the parts of one large read in any order: within this distance a read
/// still counts as sequential.
const SLACK_BYTES: u64 = 512 << 10;

impl ReadAhead {
    /// Notes a read, and returns what to fetch: from (inclusive), up to (exclusive).
    pub(crate) fn on_read(
        &mut self,
        offset: u64,
        len: u64,
        limit_bytes: u64,
        size_bytes: u64,
    ) -> Option<(u64, u64)> {
        let end = offset.saturating_add(len);
        let near = offset.saturating_add(SLACK_BYTES) >= self.next
            && offset <= self.next.saturating_add(SLACK_BYTES);
        let first_read = self.next == 0;
        if first_read || !near {
            *self = ReadAhead { next: end, run: len, fetched_upto: 0 };
            return None;
        }
        self.next = self.next.max(end);
        self.run = self.run.saturating_add(len);
        if self.run < MIN_RUN_BYTES {
            return None;
        }
        let window = self.run.saturating_mul(AHEAD_OF_RUN).min(limit_bytes);
        let from = self.fetched_upto.max(self.next).min(size_bytes);
        let upto = self.next.saturating_add(window).min(size_bytes);
        // Not for every few bytes: when half of the window is used up, or at the end.
        let worth = upto.saturating_sub(from) >= window / 2 || upto == size_bytes;
        if from >= upto || !worth {
            return None;
        }
        self.fetched_upto = upto;
        Some((from, upto))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: u64 = 4 << 20;
    const SIZE: u64 = 100 << 20;

    #[test]
    fn a_sequential_reader_is_read_ahead_of_without_gap_or_repeat_up_to_the_limit() {
        let mut ahead = ReadAhead::default();
        let mut fetched_upto = 128 << 10;
        let mut widest = 0;
        for offset in (0..SIZE).step_by(128 << 10) {
            if let Some((from, upto)) = ahead.on_read(offset, 128 << 10, LIMIT, SIZE) {
                let read_upto = offset + (128 << 10);
                assert_eq!(from, fetched_upto.max(read_upto));
                fetched_upto = upto;
                widest = widest.max(upto - read_upto);
            }
        }
        assert_eq!((fetched_upto, widest), (SIZE, LIMIT));
    }

    #[test]
    fn a_reader_that_jumps_is_not_read_ahead_of() {
        let mut ahead = ReadAhead::default();
        for i in 0..50u64 {
            let offset = (i * 7 % 50) * (2 << 20);
            assert_eq!(ahead.on_read(offset, 4096, LIMIT, SIZE), None, "read {i}");
        }
    }

    /// A program that maps a file: each page that it touches is a read. At each place some megabytes
    /// were fetched ahead, which drove everything else out of the cache.
    #[test]
    fn pages_that_are_read_one_by_one_at_random_places_fetch_nothing_ahead() {
        let mut ahead = ReadAhead::default();
        for place in [70, 3, 45, 12] {
            for page in 0..16 {
                let offset = (place << 20) + page * 4096;
                assert_eq!(ahead.on_read(offset, 4096, LIMIT, SIZE), None, "{place}, {page}");
            }
        }
    }

    #[test]
    fn no_more_is_fetched_ahead_than_a_multiple_of_what_was_read() {
        let mut ahead = ReadAhead::default();
        let mut fetched = 0;
        for offset in (0..LIMIT).step_by(4096) {
            if let Some((from, upto)) = ahead.on_read(offset, 4096, LIMIT, SIZE) {
                fetched += upto - from;
            }
            assert!(fetched <= (AHEAD_OF_RUN + 1) * (offset + 4096), "{fetched} at {offset}");
        }
        assert!(fetched > LIMIT);
    }

    #[test]
    fn reads_that_arrive_out_of_order_are_sequential() {
        let mut ahead = ReadAhead::default();
        ahead.on_read(0, 128 << 10, LIMIT, SIZE);
        let order = [2, 1, 4, 3, 6, 5, 8, 7];
        let fetched = order.iter().filter_map(|i| ahead.on_read(i << 17, 1 << 17, LIMIT, SIZE));
        assert!(fetched.count() > 2);
        assert!(ahead.fetched_upto >= 4 << 20);
    }
}
