//! The canonical digest of a set of blocks, and the aligned intervals it is built on.

use atoll_key::{Key, KeyRange};

/// A set of at most this many items is hashed as a list. One list is about as long as two
/// levels of branches.
pub(super) const LIST_ITEMS: usize = 64;

/// Hexadecimal digits of a key.
const KEY_DIGITS: usize = 128;

const LIST: &[u8] = b"atoll summary list";
const BRANCH: &[u8] = b"atoll summary branch";

/// A block as a summary sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Item {
    pub(super) key: Key,
    pub(super) version: u64,
}

/// Hexadecimal digit number `index` of `key`, the highest first.
pub(super) fn digit(key: &Key, index: usize) -> usize {
    let byte = key.0[index / 2];
    usize::from(if index.is_multiple_of(2) { byte >> 4 } else { byte & 0x0f })
}

/// How many leading digits `a` and `b` have in common.
pub(super) fn common_digits(a: &Key, b: &Key) -> usize {
    match a.0.iter().zip(b.0).position(|(a, b)| *a != b) {
        Some(at) => at * 2 + usize::from((a.0[at] ^ b.0[at]) & 0xf0 == 0),
        None => KEY_DIGITS,
    }
}

/// All keys that begin with the same digits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Interval {
    first: Key,
    last: Key,
}

impl Interval {
    /// The whole circle.
    pub(super) const FULL: Interval = Interval { first: Key::MIN, last: Key::MAX };

    /// The keys that have the first `digits` digits of `key`.
    pub(super) fn around(key: &Key, digits: usize) -> Interval {
        let mut interval = Interval { first: *key, last: *key };
        let whole = digits / 2;
        if digits % 2 == 1 {
            interval.first.0[whole] &= 0xf0;
            interval.last.0[whole] |= 0x0f;
        }
        interval.first.0[digits.div_ceil(2)..].fill(0);
        interval.last.0[digits.div_ceil(2)..].fill(0xff);
        interval
    }

    /// Of the keys that have the first `digits` digits of `key`, those that have `digit` next.
    pub(super) fn child(key: &Key, digits: usize, digit: usize) -> Interval {
        let (mut first, byte) = (*key, digits / 2);
        let digit = u8::try_from(digit).expect("a hexadecimal digit");
        let high = first.0[byte] & 0xf0;
        first.0[byte] = if digits.is_multiple_of(2) { digit << 4 } else { high | digit };
        Interval::around(&first, digits + 1)
    }

    /// What of `range` lies in it: two ranges if only a gap between its keys does not.
    pub(super) fn pieces(&self, range: &KeyRange) -> Vec<KeyRange> {
        if range.is_full() {
            return vec![KeyRange::new(self.first.previous(), self.last)];
        }
        let runs = range.linear().into_iter();
        let within = runs.map(|(first, last)| (first.max(self.first), last.min(self.last)));
        let pieces = within.filter(|(first, last)| first <= last);
        pieces.map(|(first, last)| KeyRange::new(first.previous(), last)).collect()
    }

    /// The smallest of the keys.
    pub(super) fn first(&self) -> &Key {
        &self.first
    }

    /// The largest of the keys.
    pub(super) fn last(&self) -> &Key {
        &self.last
    }
}

/// The digest of a set, given in key order. It depends on the set alone.
pub(super) fn of_items(items: &[Item]) -> [u8; 32] {
    if items.len() <= LIST_ITEMS {
        let mut hasher = blake3::Hasher::new();
        hasher.update(LIST);
        for item in items {
            hasher.update(&item.key.0);
            hasher.update(&item.version.to_be_bytes());
        }
        return hasher.finalize().into();
    }
    let (first, last) = (&items[0].key, &items[items.len() - 1].key);
    let depth = common_digits(first, last);
    let parts = items.chunk_by(|a, b| digit(&a.key, depth) == digit(&b.key, depth));
    of_parts(parts.map(|part| (digit(&part[0].key, depth), part.len() as u64, of_items(part))))
}

/// The digest of a set of more than [`LIST_ITEMS`], of the digests of its parts: those that
/// are not empty, each with the digit its keys have where they first differ.
pub(super) fn of_parts(parts: impl Iterator<Item = (usize, u64, [u8; 32])>) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(BRANCH);
    for (digit, count, digest) in parts {
        hasher.update(&[u8::try_from(digit).expect("a hexadecimal digit")]);
        hasher.update(&count.to_be_bytes());
        hasher.update(&digest);
    }
    hasher.finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(bytes: &[u8]) -> Key {
        let mut key = Key::MIN;
        key.0[..bytes.len()].copy_from_slice(bytes);
        key
    }

    #[test]
    fn digits_count_from_the_top() {
        let key = key(&[0x12, 0x34]);
        assert_eq!((0..5).map(|i| digit(&key, i)).collect::<Vec<_>>(), [1, 2, 3, 4, 0]);
        for (other, common) in [([0x12, 0x34], 128), ([0x12, 0x35], 3), ([0x12, 0x44], 2)] {
            assert_eq!(common_digits(&key, &self::key(&other)), common);
        }
        assert_eq!(common_digits(&Key::MIN, &Key::MAX), 0);
    }

    #[test]
    fn children_make_up_their_interval() {
        for digits in [0, 1, 2, 37, 126, 127] {
            let parent = Interval::around(&key(&[0xab; 64]), digits);
            let mut next = parent.first;
            for digit in 0..16 {
                let child = Interval::child(&parent.first, digits, digit);
                assert_eq!(child.first, next, "{digits} {digit}");
                assert_eq!(child, Interval::child(&parent.last, digits, digit));
                next = child.last.next();
            }
            assert_eq!(next, parent.last.next());
        }
        assert_eq!(Interval::around(&Key::MAX, 0), Interval::FULL);
    }

    #[test]
    fn a_digest_tells_keys_and_versions_apart() {
        let items: Vec<Item> = (0..200u8).map(|n| Item { key: key(&[n]), version: 0 }).collect();
        let digest = of_items(&items);
        assert_ne!(of_items(&items[1..]), digest);
        for (at, item) in items.iter().enumerate() {
            let mut changed = items.clone();
            changed[at] = Item { version: 1, ..*item };
            assert_ne!(of_items(&changed), digest);
        }
    }
}
