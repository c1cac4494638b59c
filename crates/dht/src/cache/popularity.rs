//! How often keys were asked for of late, in little memory: a count-min sketch that ages
//! (TinyLFU: Einziger, Friedman and Manes, 2017).
//!
//! Each key has one counter of four bits in each of four rows; the smallest of them is the
//! estimate. It is never too small, and seldom too large. When as many keys have been
//! counted as a row has counters, all are halved, so what was popular last week does not
//! hold its place for ever, and a flood of questions for different keys makes none of them
//! look popular: then two in three counters are not zero, but of one in two hundred keys all
//! four are above one.
//!
//! Salted, so that nobody can choose keys that share counters with another key.

use atoll_key::Key;

/// Rows of counters.
const ROWS: usize = 4;
/// The largest count.
const MAX_COUNT: u8 = 15;
/// Counters in a row for each key to be told from the others.
const COUNTERS_PER_KEY: usize = 4;

/// See the module.
#[derive(Debug)]
pub(super) struct Popularity {
    salt: [u8; 32],
    /// Counters in a row, a power of two.
    width: usize,
    /// Two counters in a byte, row after row; empty until something is counted, so that
    /// an idle node pays nothing.
    counters: Vec<u8>,
    counted: u64,
}

impl Popularity {
    /// For about `keys` different keys.
    pub(super) fn new(salt: [u8; 32], keys: usize) -> Popularity {
        let width = (keys * COUNTERS_PER_KEY).next_power_of_two().clamp(1024, 1 << 22);
        Popularity { salt, width, counters: Vec::new(), counted: 0 }
    }

    /// Begins again, for about `keys` different keys.
    pub(super) fn resized(&self, keys: usize) -> Popularity {
        Popularity::new(self.salt, keys)
    }

    /// Counts `key` once.
    pub(super) fn count(&mut self, key: &Key) {
        if self.counters.is_empty() {
            self.counters = vec![0; ROWS * self.width / 2];
        }
        for place in self.places(key) {
            let count = self.at(place);
            if count < MAX_COUNT {
                self.counters[place / 2] += 1 << (4 * (place % 2));
            }
        }
        self.counted += 1;
        if self.counted >= self.width as u64 {
            self.age();
        }
    }

    /// How often `key` was counted of late: at most 15, and seldom too many.
    pub(super) fn of(&self, key: &Key) -> u8 {
        if self.counters.is_empty() {
            return 0;
        }
        self.places(key).map(|place| self.at(place)).into_iter().min().unwrap_or(0)
    }

    fn at(&self, place: usize) -> u8 {
        self.counters[place / 2] >> (4 * (place % 2)) & 0xf
    }

    fn places(&self, key: &Key) -> [usize; ROWS] {
        let hash = blake3::keyed_hash(&self.salt, &key.0);
        let bytes = hash.as_bytes();
        std::array::from_fn(|row| {
            let part = bytes[row * 8..row * 8 + 8].try_into().expect("8 bytes");
            row * self.width + (u64::from_le_bytes(part) as usize & (self.width - 1))
        })
    }

    fn age(&mut self) {
        for pair in &mut self.counters {
            *pair = (*pair >> 1) & 0x77;
        }
        self.counted /= 2;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(n: u32) -> Key {
        atoll_key::BlockHash::of(&n.to_be_bytes()).key()
    }

    #[test]
    fn counts_are_about_right_and_stop_at_fifteen() {
        let mut popularity = Popularity::new([1; 32], 1024);
        assert_eq!(popularity.of(&key(1)), 0);
        for n in 0..300 {
            (0..n % 5).for_each(|_| popularity.count(&key(n)));
        }
        let estimates = (0..300).map(|n| (n % 5, u32::from(popularity.of(&key(n)))));
        assert!(estimates.clone().all(|(count, estimate)| estimate >= count), "never too small");
        assert!(estimates.filter(|(count, estimate)| estimate > count).count() < 10);
        (0..100).for_each(|_| popularity.count(&key(7)));
        assert_eq!(popularity.of(&key(7)), MAX_COUNT);
    }

    #[test]
    fn a_flood_of_different_keys_makes_none_look_popular() {
        let mut popularity = Popularity::new([1; 32], 1024);
        (0..20_000).for_each(|n| popularity.count(&key(n)));
        let popular = (0..20_000).filter(|n| popularity.of(&key(*n)) > 1).count();
        assert!(popular < 200, "{popular} of 20,000 seem to have been asked for twice");
    }

    #[test]
    fn what_is_no_longer_asked_for_is_forgotten() {
        let mut popularity = Popularity::new([1; 32], 256);
        (0..15).for_each(|_| popularity.count(&key(0)));
        let neighbours = popularity.counters.clone();
        popularity.age();
        assert_eq!(popularity.of(&key(0)), 7);
        assert!(
            neighbours
                .iter()
                .zip(&popularity.counters)
                .all(|(old, new)| { new & 0xf == (old & 0xf) / 2 && new >> 4 == (old >> 4) / 2 })
        );
        // Four halvings forget anything.
        (0..4 * 1024).for_each(|n| popularity.count(&key(n % 40 + 1)));
        assert_eq!(popularity.of(&key(0)), 0);
        assert!(popularity.of(&key(1)) > 5);
    }
}
