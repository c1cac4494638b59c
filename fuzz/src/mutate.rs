//! Mutations: what goes wrong with bytes, by accident and on purpose.

/// A small seeded generator (SplitMix64, Steele et al. 2014).
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Random {
        Random(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }
}

/// Numbers that lie: around zero, around powers of two, enormous.
const LIES: [u64; 12] = [
    0,
    1,
    0x7f,
    0xff,
    0x7fff,
    0xffff,
    0x10_0000,
    0x7fff_ffff,
    0xffff_ffff,
    0x1_0000_0000,
    0x7fff_ffff_ffff_ffff,
    u64::MAX,
];

/// One of `seeds`, changed in one to four ways.
pub(crate) fn mutant(seeds: &[Vec<u8>], random: &mut Random) -> Vec<u8> {
    let mut bytes = seeds[random.below(seeds.len())].clone();
    for _ in 0..=random.below(4) {
        mutate(&mut bytes, seeds, random);
    }
    bytes
}

fn mutate(bytes: &mut Vec<u8>, seeds: &[Vec<u8>], random: &mut Random) {
    let at = random.below(bytes.len());
    match random.below(10) {
        0 => bytes.truncate(at),
        1 => bytes.extend((0..random.below(40)).map(|_| random.next() as u8)),
        2 if !bytes.is_empty() => bytes[at] ^= 1 << random.below(8),
        3 if !bytes.is_empty() => bytes[at] = random.next() as u8,
        4 => overwrite(bytes, at, random),
        5 if !bytes.is_empty() => {
            let end = (at + random.below(16)).min(bytes.len());
            bytes.drain(at..end);
        }
        6 => {
            let end = (at + random.below(64)).min(bytes.len());
            let copy = bytes[at..end].to_vec();
            let to = random.below(bytes.len() + 1);
            bytes.splice(to..to, copy);
        }
        7 => {
            let other = &seeds[random.below(seeds.len())];
            let from = random.below(other.len() + 1);
            bytes.truncate(at);
            bytes.extend_from_slice(&other[from..]);
        }
        8 => {
            let run = vec![[0, 0xff, 0x9b, 0xbf, 0x5b][random.below(5)]; random.below(12)];
            bytes.splice(at..at, run);
        }
        _ => overwrite(bytes, at, random),
    }
}

/// Puts a lie over 1, 2, 4 or 8 bytes, either end first.
fn overwrite(bytes: &mut [u8], at: usize, random: &mut Random) {
    let width = 1 << random.below(4);
    let lie = LIES[random.below(LIES.len())];
    let mut encoded = lie.to_be_bytes()[8 - width..].to_vec();
    if random.below(2) == 0 {
        encoded.reverse();
    }
    for (to, from) in bytes[at..].iter_mut().zip(encoded) {
        *to = from;
    }
}
