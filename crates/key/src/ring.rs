//! The identifier circle: 512-bit keys compared as big-endian bytes.
//!
//! CFS §4.1: the node responsible for a key is its *successor*, the node with the
//! smallest ID greater than or equal to the key, with wrap-around. Intervals are
//! therefore written `(after, upto]`, open at the start and closed at the end, and
//! an interval whose ends are equal is the whole circle.

use std::fmt;

/// A point on the identifier circle.
///
/// Two families live on it: *hashed* keys (a 32-byte hash followed by 32 zero
/// bytes) and, later, *ordered* keys (D2 §4.2).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key(pub [u8; 64]);

/// A ring position of a node: the ID of one of its virtual servers.
///
/// The same circle as [`Key`], kept as its own type so that a node is never
/// passed where a block is meant.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub Key);

impl Key {
    /// The smallest key.
    pub const MIN: Key = Key([0; 64]);
    /// The largest key.
    pub const MAX: Key = Key([0xff; 64]);
    /// Bits in a key.
    pub const BITS: u32 = 512;

    /// The key of something named by a 32-byte hash.
    pub fn hashed(hash: [u8; 32]) -> Key {
        let mut bytes = [0; 64];
        bytes[..32].copy_from_slice(&hash);
        Key(bytes)
    }

    /// The hash a hashed key was made of, or `None` for a key of another family.
    pub fn as_hash(&self) -> Option<[u8; 32]> {
        if self.0[32..].iter().any(|b| *b != 0) {
            return None;
        }
        let mut hash = [0; 32];
        hash.copy_from_slice(&self.0[..32]);
        Some(hash)
    }

    /// Reads a key of exactly 64 bytes.
    pub fn from_slice(bytes: &[u8]) -> Option<Key> {
        Some(Key(bytes.try_into().ok()?))
    }

    /// `self + other` on the circle.
    #[must_use]
    pub fn wrapping_add(&self, other: &Key) -> Key {
        let mut out = [0; 64];
        let mut carry = 0u16;
        for i in (0..64).rev() {
            let sum = u16::from(self.0[i]) + u16::from(other.0[i]) + carry;
            out[i] = sum as u8;
            carry = sum >> 8;
        }
        Key(out)
    }

    /// `self - other` on the circle: the clockwise distance from `other` to `self`.
    #[must_use]
    pub fn wrapping_sub(&self, other: &Key) -> Key {
        let mut out = [0; 64];
        let mut borrow = 0i16;
        for i in (0..64).rev() {
            let diff = i16::from(self.0[i]) - i16::from(other.0[i]) - borrow;
            out[i] = diff as u8;
            borrow = i16::from(diff < 0);
        }
        Key(out)
    }

    /// The clockwise distance from `from` to `self`.
    #[must_use]
    pub fn distance_from(&self, from: &Key) -> Key {
        self.wrapping_sub(from)
    }

    /// `2^bit`, for `bit < 512`.
    pub fn power_of_two(bit: u32) -> Key {
        assert!(bit < Key::BITS, "a key has 512 bits");
        let mut bytes = [0; 64];
        bytes[63 - (bit / 8) as usize] = 1 << (bit % 8);
        Key(bytes)
    }

    /// The number of zero bits above the highest set bit; 512 for zero.
    pub fn leading_zeros(&self) -> u32 {
        let mut zeros = 0;
        for byte in self.0 {
            zeros += byte.leading_zeros();
            if byte != 0 {
                break;
            }
        }
        zeros
    }

    /// Half of the key, as a number.
    #[must_use]
    pub fn half(&self) -> Key {
        let mut out = [0; 64];
        let mut carry = 0;
        for (to, from) in out.iter_mut().zip(self.0) {
            *to = (from >> 1) | carry;
            carry = from << 7;
        }
        Key(out)
    }

    /// The next key on the circle.
    #[must_use]
    pub fn next(&self) -> Key {
        self.wrapping_add(&Key::power_of_two(0))
    }

    /// The key before this one on the circle.
    #[must_use]
    pub fn previous(&self) -> Key {
        self.wrapping_sub(&Key::power_of_two(0))
    }

    /// The key as a fraction of the circle, `0.0..1.0`, for estimates and pictures.
    pub fn as_fraction(&self) -> f64 {
        let mut top = [0; 8];
        top.copy_from_slice(&self.0[..8]);
        u64::from_be_bytes(top) as f64 / 2f64.powi(64)
    }

    /// Whether `self` lies strictly between `after` and `before`, clockwise.
    /// When both ends are equal, everything but that point does.
    pub fn strictly_between(&self, after: &Key, before: &Key) -> bool {
        if after == before {
            return self != after;
        }
        self != before && KeyRange::new(*after, *before).contains(self)
    }
}

impl NodeId {
    /// The key at this position.
    pub fn key(&self) -> &Key {
        &self.0
    }
}

fn short_hex(bytes: &[u8]) -> String {
    bytes.iter().take(6).map(|b| format!("{b:02x}")).collect()
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({}…)", short_hex(&self.0))
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&short_hex(&self.0))
    }
}

impl fmt::Debug for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NodeId({}…)", short_hex(&self.0.0))
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The interval `(after, upto]` of the circle; the whole circle if its ends are equal.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct KeyRange {
    /// The last key before the interval.
    pub after: Key,
    /// The last key in the interval.
    pub upto: Key,
}

impl KeyRange {
    /// `(after, upto]`.
    pub fn new(after: Key, upto: Key) -> KeyRange {
        KeyRange { after, upto }
    }

    /// The whole circle.
    pub fn full() -> KeyRange {
        KeyRange::new(Key::MAX, Key::MAX)
    }

    /// Whether this interval is the whole circle.
    pub fn is_full(&self) -> bool {
        self.after == self.upto
    }

    /// Whether the interval holds `key`.
    pub fn contains(&self, key: &Key) -> bool {
        if self.after < self.upto {
            self.after < *key && *key <= self.upto
        } else {
            self.after < *key || *key <= self.upto
        }
    }

    /// The interval as one or two runs of keys in byte order, both ends included.
    ///
    /// What a store that iterates in key order needs; the runs come in ring order.
    pub fn linear(&self) -> Vec<(Key, Key)> {
        if self.after < self.upto {
            return vec![(self.after.next(), self.upto)];
        }
        let mut runs = Vec::with_capacity(2);
        if self.after != Key::MAX {
            runs.push((self.after.next(), Key::MAX));
        }
        runs.push((Key::MIN, self.upto));
        runs
    }

    /// The point halfway along the interval.
    pub fn middle(&self) -> Key {
        if self.is_full() {
            return self.after.wrapping_add(&Key::power_of_two(Key::BITS - 1));
        }
        self.after.wrapping_add(&self.upto.wrapping_sub(&self.after).half())
    }

    /// The share of the circle the interval covers, `0.0..=1.0`.
    pub fn fraction(&self) -> f64 {
        if self.is_full() {
            return 1.0;
        }
        self.upto.wrapping_sub(&self.after).as_fraction()
    }
}

impl fmt::Display for KeyRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "({}, {}]", self.after, self.upto)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn key() -> impl Strategy<Value = Key> {
        proptest::collection::vec(any::<u8>(), 64)
            .prop_map(|v| Key::from_slice(&v).expect("64 bytes"))
    }

    fn small(n: u8) -> Key {
        let mut k = Key::MIN;
        k.0[63] = n;
        k
    }

    #[test]
    fn an_interval_is_open_at_its_start_and_closed_at_its_end() {
        let range = KeyRange::new(small(3), small(7));
        assert!(!range.contains(&small(3)));
        assert!(range.contains(&small(4)));
        assert!(range.contains(&small(7)));
        assert!(!range.contains(&small(8)));
    }

    #[test]
    fn an_interval_wraps_around_zero() {
        let range = KeyRange::new(small(7), small(3));
        assert!(range.contains(&small(8)));
        assert!(range.contains(&Key::MAX));
        assert!(range.contains(&small(0)));
        assert!(range.contains(&small(3)));
        assert!(!range.contains(&small(5)));
    }

    #[test]
    fn equal_ends_are_the_whole_circle() {
        let range = KeyRange::new(small(5), small(5));
        assert!(range.is_full() && range.contains(&small(5)) && range.contains(&Key::MAX));
        assert_eq!(range.fraction(), 1.0);
    }

    #[test]
    fn strictly_between_excludes_both_ends_and_wraps() {
        assert!(small(4).strictly_between(&small(3), &small(5)));
        assert!(!small(5).strictly_between(&small(3), &small(5)));
        assert!(!small(3).strictly_between(&small(3), &small(5)));
        assert!(small(9).strictly_between(&small(5), &small(3)));
        assert!(!small(5).strictly_between(&small(5), &small(5)));
        assert!(small(6).strictly_between(&small(5), &small(5)));
    }

    #[test]
    fn powers_and_leading_zeros_agree() {
        for bit in [0, 7, 8, 255, 511] {
            assert_eq!(Key::power_of_two(bit).leading_zeros(), 511 - bit);
        }
        assert_eq!(Key::MIN.leading_zeros(), 512);
    }

    proptest! {
        #[test]
        fn subtraction_undoes_addition(a in key(), b in key()) {
            prop_assert_eq!(a.wrapping_add(&b).wrapping_sub(&b), a);
        }

        #[test]
        fn linear_runs_hold_exactly_the_interval(a in key(), b in key(), k in key()) {
            for range in [KeyRange::new(a, b), KeyRange::new(a, a), KeyRange::new(a, k)] {
                let in_runs = range.linear().iter().any(|(lo, hi)| *lo <= k && k <= *hi);
                prop_assert_eq!(in_runs, range.contains(&k));
            }
        }

        #[test]
        fn the_middle_splits_the_interval(a in key(), b in key()) {
            let range = KeyRange::new(a, b);
            let m = range.middle();
            prop_assume!(m != a);
            prop_assert!(range.contains(&m));
        }

        #[test]
        fn a_hashed_key_gives_its_hash_back(h in any::<[u8; 32]>()) {
            prop_assert_eq!(Key::hashed(h).as_hash(), Some(h));
        }
    }
}
