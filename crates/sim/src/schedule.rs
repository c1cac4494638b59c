//! What happens when: a heap ordered by (time, sequence number).
//!
//! Cancelling leaves the entry in the heap; the sequence number kept by the entry's
//! owner says whether it still counts. When most entries are dead the heap is swept.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// One leg of a call's journey.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Leg {
    /// Caller to callee.
    Request,
    /// Callee to caller.
    Reply,
    /// Callee's machine to caller: no host is there (any more).
    Reset,
    /// Caller to callee: the reply is not wanted any more.
    Cancel,
}

/// Where a chunk of a connection's stream is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Hop {
    /// Its first byte is at the receiver's downlink.
    Down,
    /// Its last byte is there.
    Arrive,
    /// The sender learns that it arrived.
    Acked,
    /// The sender learns that it was dropped.
    Lost,
}

/// What a scheduled entry does; the number is a slot.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum What {
    /// A sleep ends.
    Timer(u32),
    /// A call's deadline.
    Limit(u32),
    /// The first byte reaches the receiver's downlink.
    Head(u32, Leg),
    /// The last byte is there.
    Arrive(u32, Leg),
    /// A message that chance held back goes on its connection.
    Send(u32, Leg),
    /// A chunk of a connection is somewhere.
    Chunk(u32, Hop),
    /// A side of a connection may send.
    Pump(u32, u8),
}

/// A scheduled entry.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Entry {
    pub(crate) at: u64,
    pub(crate) seq: u64,
    pub(crate) what: What,
}

/// Below so many dead entries the heap is never swept.
const MIN_SWEEP_COUNT: usize = 4096;

#[derive(Debug)]
pub(crate) struct Schedule {
    heap: BinaryHeap<Reverse<Entry>>,
    next_seq: u64,
    dead_count: usize,
}

impl Schedule {
    pub(crate) fn new() -> Schedule {
        // Zero is no entry's number, so owners may use it for "none".
        Schedule { heap: BinaryHeap::new(), next_seq: 1, dead_count: 0 }
    }

    pub(crate) fn push(&mut self, at: u64, what: What) -> u64 {
        let seq = self.next_seq;
        self.next_seq += 1;
        self.heap.push(Reverse(Entry { at, seq, what }));
        seq
    }

    /// An entry that was taken out is to happen later.
    pub(crate) fn put_back(&mut self, entry: Entry) {
        self.heap.push(Reverse(entry));
    }

    pub(crate) fn peek(&self) -> Option<&Entry> {
        self.heap.peek().map(|Reverse(entry)| entry)
    }

    pub(crate) fn pop(&mut self) -> Option<Entry> {
        self.heap.pop().map(|Reverse(entry)| entry)
    }

    /// Pops an entry that turned out to be dead.
    pub(crate) fn pop_dead(&mut self) {
        self.heap.pop();
        self.dead_count = self.dead_count.saturating_sub(1);
    }

    /// Notes that an entry's owner gave it up; true when a sweep is due.
    pub(crate) fn cancelled(&mut self) -> bool {
        self.dead_count += 1;
        self.dead_count >= MIN_SWEEP_COUNT && self.dead_count * 2 > self.heap.len()
    }

    pub(crate) fn sweep(&mut self, is_live: impl Fn(&Entry) -> bool) {
        self.heap.retain(|Reverse(entry)| is_live(entry));
        self.dead_count = 0;
    }

    /// Every entry, dead ones too, in no order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Entry> {
        self.heap.iter().map(|Reverse(entry)| entry)
    }

    pub(crate) fn len(&self) -> usize {
        self.heap.len() - self.dead_count.min(self.heap.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_come_in_order_of_time_and_then_of_pushing() {
        let mut schedule = Schedule::new();
        for (slot, at) in [(0, 5), (1, 3), (2, 5), (3, 3), (4, 0)] {
            schedule.push(at, What::Timer(slot));
        }
        let order: Vec<What> =
            std::iter::from_fn(|| schedule.pop().map(|entry| entry.what)).collect();
        assert_eq!(order, [4, 1, 3, 0, 2].map(What::Timer));
    }

    #[test]
    fn dead_entries_never_outnumber_live_ones_by_much() {
        let mut schedule = Schedule::new();
        let mut live: std::collections::BTreeSet<u64> = std::collections::BTreeSet::new();
        for i in 0..100_000 {
            let seq = schedule.push(1_000_000 + i, What::Limit(0));
            // One in ten stays.
            if i % 10 == 0 {
                live.insert(seq);
            } else if schedule.cancelled() {
                schedule.sweep(|entry| live.contains(&entry.seq));
            }
            assert!(schedule.heap.len() <= 2 * live.len() + MIN_SWEEP_COUNT + 1);
        }
        assert_eq!(live.len(), 10_000);
        let kept = std::iter::from_fn(|| schedule.pop()).filter(|e| live.contains(&e.seq)).count();
        assert_eq!(kept, 10_000);
    }
}
