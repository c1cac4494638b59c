//! Blocks in memory, up to a number; those used again stay longer (CLOCK).

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use super::Block;

#[derive(Debug)]
struct Held {
    bytes: Block,
    used_again: bool,
}

/// Blocks by number. The queue holds each number in `held` once, and numbers of removed
/// blocks until the hand passes them.
#[derive(Debug)]
pub(super) struct Cache {
    held: BTreeMap<u32, Held>,
    hand: VecDeque<u32>,
    room: usize,
    /// The bytes of a block that went, for the next that comes.
    spare: Option<Block>,
}

impl Cache {
    /// With room for so many blocks; those that must stay may go beyond it.
    pub(super) fn new(room: usize) -> Cache {
        Cache { held: BTreeMap::new(), hand: VecDeque::new(), room: room.max(1), spare: None }
    }

    /// Whether a block is here; it is then known to be used again.
    pub(super) fn touch(&mut self, block: u32) -> bool {
        match self.held.get_mut(&block) {
            Some(held) => {
                held.used_again = true;
                true
            }
            None => false,
        }
    }

    pub(super) fn block_mut(&mut self, block: u32) -> Option<&mut Block> {
        self.held.get_mut(&block).map(|held| &mut held.bytes)
    }

    /// A block of `len` bytes of anything, with no other holder. Mostly one that went: blocks that
    /// come and go all the time, on several threads, would leave holes in the heaps of each.
    pub(super) fn spare(&mut self, len: usize) -> Block {
        let spare = self.spare.take().filter(|block| block.len() == len);
        spare
            .filter(|block| Arc::strong_count(block) == 1)
            .unwrap_or_else(|| Arc::new(vec![0; len]))
    }

    /// Keeps a block, in place of one that need not stay.
    pub(super) fn insert(&mut self, block: u32, bytes: Block, must_stay: impl Fn(u32) -> bool) {
        if self.held.insert(block, Held { bytes, used_again: false }).is_none() {
            self.hand.push_back(block);
        }
        // Each number is looked at twice at most: as used again, then as idle.
        for _ in 0..2 * self.hand.len() {
            if self.held.len() <= self.room {
                break;
            }
            let Some(candidate) = self.hand.pop_front() else { break };
            let Some(held) = self.held.get_mut(&candidate) else { continue };
            if candidate == block || held.used_again || must_stay(candidate) {
                held.used_again = false;
                self.hand.push_back(candidate);
            } else {
                self.spare = self.held.remove(&candidate).map(|held| held.bytes);
            }
        }
    }

    pub(super) fn remove(&mut self, block: u32) {
        if self.held.remove(&block).is_some() && self.hand.len() > 2 * (self.held.len() + self.room)
        {
            let held = &self.held;
            self.hand.retain(|number| held.contains_key(number));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_must_stay_and_what_is_used_again_stays() {
        let mut cache = Cache::new(4);
        for block in 0..100 {
            cache.insert(block, Arc::new(vec![block as u8]), |other| other == 3);
            if block > 5 {
                assert!(cache.touch(5), "used again each time");
            }
            assert!(cache.held.len() <= 5);
        }
        assert!(cache.touch(3) && cache.touch(5) && cache.touch(99) && !cache.touch(50));
    }

    #[test]
    fn what_had_to_stay_beyond_the_room_goes_when_it_need_not() {
        let mut cache = Cache::new(8);
        for block in 0..100 {
            cache.insert(block, Arc::new(Vec::new()), |_| true);
            cache.touch(block);
        }
        assert_eq!(cache.held.len(), 100, "a transaction stays whole");
        cache.insert(100, Arc::new(Vec::new()), |_| false);
        assert_eq!(cache.held.len(), 8);
        for block in 0..10_000 {
            cache.insert(block, Arc::new(Vec::new()), |_| false);
            assert!(cache.held.len() <= 8 && cache.hand.len() <= 16, "whatever is read");
        }
    }

    #[test]
    fn a_number_that_comes_and_goes_takes_no_room() {
        let mut cache = Cache::new(4);
        for _ in 0..1000 {
            cache.insert(7, Arc::new(Vec::new()), |_| false);
            cache.remove(7);
        }
        assert!(cache.hand.len() <= 20, "{}", cache.hand.len());
        assert!(!cache.touch(7));
    }

    #[test]
    fn bytes_of_a_block_that_went_are_used_again_unless_somebody_reads_them() {
        let mut cache = Cache::new(1);
        let read = Arc::new(vec![1; 64]);
        cache.insert(1, read.clone(), |_| false);
        cache.insert(2, Arc::new(vec![2; 64]), |_| false);
        assert_eq!(*cache.spare(64), [0; 64], "block 1 is still read");
        cache.insert(3, Arc::new(vec![3; 64]), |_| false);
        assert_eq!(*cache.spare(64), [2; 64]);
        assert_eq!(*cache.spare(64), [0; 64], "once");
        assert_eq!(*read, [1; 64]);
    }
}
