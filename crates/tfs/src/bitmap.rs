//! Bitmaps as ext2 keeps them: bit n is bit n mod 8 of byte n / 8.

use std::ops::Range;

/// Whether a bit is set.
///
/// # Panics
/// If it lies beyond the bitmap, as all functions here do.
pub(crate) fn is_set(bitmap: &[u8], bit: usize) -> bool {
    bitmap[bit / 8] & 1 << (bit % 8) != 0
}

/// Sets or clears a range of bits.
pub(crate) fn put(bitmap: &mut [u8], range: Range<usize>, value: bool) {
    let mut bit = range.start;
    while bit < range.end {
        if bit.is_multiple_of(8) && range.end - bit >= 8 {
            let end = range.end / 8;
            bitmap[bit / 8..end].fill(if value { 0xff } else { 0 });
            bit = end * 8;
            continue;
        }
        let mask = 1 << (bit % 8);
        if value {
            bitmap[bit / 8] |= mask;
        } else {
            bitmap[bit / 8] &= !mask;
        }
        bit += 1;
    }
}

/// The first bit of a range with this value.
pub(crate) fn next(bitmap: &[u8], range: Range<usize>, value: bool) -> Option<usize> {
    let uniform = if value { 0 } else { 0xff };
    let mut bit = range.start;
    while bit < range.end {
        if bit.is_multiple_of(8) {
            // Whole bytes without such a bit are passed over together.
            let bytes = &bitmap[bit / 8..range.end / 8];
            bit += 8 * bytes.iter().take_while(|byte| **byte == uniform).count();
            if bit >= range.end {
                break;
            }
        }
        if is_set(bitmap, bit) == value {
            return Some(bit);
        }
        bit += 1;
    }
    None
}

/// The end of the run of bits with this value that begins at the start of `range`.
pub(crate) fn run_end(bitmap: &[u8], range: Range<usize>, value: bool) -> usize {
    let end = range.end;
    next(bitmap, range, !value).unwrap_or(end)
}

/// How many bits of a range are set.
pub(crate) fn count(bitmap: &[u8], range: Range<usize>) -> usize {
    let (first, last) = (range.start.div_ceil(8), range.end / 8);
    if first >= last {
        return range.filter(|bit| is_set(bitmap, *bit)).count();
    }
    let edges = (range.start..first * 8).chain(last * 8..range.end);
    let whole: u32 = bitmap[first..last].iter().map(|byte| byte.count_ones()).sum();
    edges.filter(|bit| is_set(bitmap, *bit)).count() + whole as usize
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn ranges_do_what_single_bits_do(
            bytes in proptest::collection::vec(prop_oneof![Just(0u8), Just(0xff), any::<u8>()], 12),
            (a, b) in (0usize..97, 0usize..97),
            value in any::<bool>(),
        ) {
            let range = a.min(b)..a.max(b);
            let expected = range.clone().find(|bit| is_set(&bytes, *bit) == value);
            prop_assert_eq!(next(&bytes, range.clone(), value), expected);
            prop_assert_eq!(
                count(&bytes, range.clone()),
                range.clone().filter(|bit| is_set(&bytes, *bit)).count()
            );
            let mut changed = bytes.clone();
            put(&mut changed, range.clone(), value);
            for bit in 0..96 {
                let expected = if range.contains(&bit) { value } else { is_set(&bytes, bit) };
                prop_assert_eq!(is_set(&changed, bit), expected);
            }
            prop_assert_eq!(run_end(&changed, range.clone(), value), range.end);
        }
    }
}
