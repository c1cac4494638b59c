//! xoshiro256++ (Blackman and Vigna, "Scrambled Linear Pseudorandom Number
//! Generators", 2019), seeded by splitmix64 as its authors advise.
//!
//! Not cryptographically strong; a simulated run must be predictable.

/// A stream of random numbers.
#[derive(Clone, Debug)]
pub(crate) struct Random {
    state: [u64; 4],
}

fn splitmix64(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Random {
    /// The stream of one purpose: `stream` numbers are independent of each other.
    pub(crate) fn new(seed: u64, stream: u64) -> Random {
        let mut outer = seed;
        let mut state = splitmix64(&mut outer) ^ stream.wrapping_mul(0xd6e8_feb8_6659_fd93);
        Random { state: std::array::from_fn(|_| splitmix64(&mut state)) }
    }

    pub(crate) fn next_u64(&mut self) -> u64 {
        let s = &mut self.state;
        let result = s[0].wrapping_add(s[3]).rotate_left(23).wrapping_add(s[0]);
        let t = s[1] << 17;
        s[2] ^= s[0];
        s[3] ^= s[1];
        s[1] ^= s[2];
        s[0] ^= s[3];
        s[2] ^= t;
        s[3] = s[3].rotate_left(45);
        result
    }

    /// Uniform in `0.0..1.0`.
    pub(crate) fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Uniform below `bound` (which is far below 2^64, so bias does not matter).
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        (self.next_u64() % bound as u64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reference_sequence_is_reproduced() {
        // First outputs of the authors' C code with the state 1, 2, 3, 4.
        let mut random = Random { state: [1, 2, 3, 4] };
        let first: Vec<u64> = (0..4).map(|_| random.next_u64()).collect();
        assert_eq!(first, [41943041, 58720359, 3588806011781223, 3591011842654386]);
    }

    #[test]
    fn streams_and_seeds_differ() {
        let firsts: std::collections::BTreeSet<u64> =
            (0..30).flat_map(|s| (0..30).map(move |t| Random::new(s, t).next_u64())).collect();
        assert_eq!(firsts.len(), 900);
    }

    #[test]
    fn unit_is_uniform() {
        let mut random = Random::new(1, 1);
        let mean = (0..10_000).map(|_| random.unit()).sum::<f64>() / 10_000.0;
        assert!((mean - 0.5).abs() < 0.02, "{mean}");
    }
}
