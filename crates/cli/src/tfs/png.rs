//! PNG pictures of few colours: a byte that is the same as three bytes before it costs next to
//! nothing, which is all the compression there is.
//!
//! After RFC 2083 (PNG), 1950 (zlib), 1951 (deflate: one block of fixed codes).

/// A picture of 8-bit red, green and blue; each line begins with its filter's byte.
///
/// # Panics
/// If there are not as many bytes as that is.
pub fn rgb(width: usize, height: usize, lines: &[u8]) -> Vec<u8> {
    assert_eq!(lines.len(), height * (1 + 3 * width), "whole lines");
    let mut png = b"\x89PNG\r\n\x1a\n".to_vec();
    let mut head = Vec::new();
    head.extend_from_slice(&(width as u32).to_be_bytes());
    head.extend_from_slice(&(height as u32).to_be_bytes());
    // 8 bits, colours, the only compression, the only filtering, not interlaced.
    head.extend_from_slice(&[8, 2, 0, 0, 0]);
    chunk(&mut png, b"IHDR", &head);
    chunk(&mut png, b"IDAT", &zlib(lines));
    chunk(&mut png, b"IEND", &[]);
    png
}

fn chunk(png: &mut Vec<u8>, kind: &[u8; 4], bytes: &[u8]) {
    png.extend_from_slice(&(bytes.len() as u32).to_be_bytes());
    let start = png.len();
    png.extend_from_slice(kind);
    png.extend_from_slice(bytes);
    let checksum = crc32fast::hash(&png[start..]);
    png.extend_from_slice(&checksum.to_be_bytes());
}

/// Bits, the lowest of a byte first.
#[derive(Default)]
struct Bits {
    bytes: Vec<u8>,
    free: u32,
}

impl Bits {
    fn put(&mut self, bit: bool) {
        if self.free == 0 {
            self.bytes.push(0);
            self.free = 8;
        }
        if let Some(last) = self.bytes.last_mut() {
            *last |= u8::from(bit) << (8 - self.free);
        }
        self.free -= 1;
    }

    /// A code, which begins with its highest bit.
    fn code(&mut self, code: u32, len: u32) {
        (0..len).rev().for_each(|bit| self.put(code >> bit & 1 == 1));
    }

    /// A literal byte or the code of a length, in deflate's fixed code.
    fn symbol(&mut self, symbol: u32) {
        match symbol {
            0..=143 => self.code(0x30 + symbol, 8),
            144..=255 => self.code(0x190 + symbol - 144, 9),
            256..=279 => self.code(symbol - 256, 7),
            _ => self.code(0xc0 + symbol - 280, 8),
        }
    }

    /// So many bytes again, from three bytes before: 3 to 10, or 258.
    fn again(&mut self, len: usize) {
        self.symbol(if len == LONGEST { 285 } else { 254 + len as u32 });
        // The third distance is 3.
        self.code(2, 5);
    }
}

/// The longest repetition of deflate, bytes.
const LONGEST: usize = 258;
/// The longest that has a code without further bits, but for that.
const PLAIN: usize = 10;

fn zlib(bytes: &[u8]) -> Vec<u8> {
    let mut bits = Bits { bytes: vec![0x78, 0x01], free: 0 };
    // The last block, of fixed codes.
    bits.put(true);
    bits.put(true);
    bits.put(false);
    let mut at = 0;
    while at < bytes.len() {
        let ahead = (at..bytes.len()).take(LONGEST);
        let same = ahead.take_while(|i| *i >= 3 && bytes[*i] == bytes[*i - 3]).count();
        let len = match same {
            LONGEST.. => LONGEST,
            PLAIN.. => PLAIN,
            3.. => same,
            _ => 1,
        };
        if len == 1 {
            bits.symbol(u32::from(bytes[at]));
        } else {
            bits.again(len);
        }
        at += len;
    }
    bits.symbol(256);
    let mut stream = bits.bytes;
    stream.extend_from_slice(&adler32(bytes).to_be_bytes());
    stream
}

fn adler32(bytes: &[u8]) -> u32 {
    let (mut a, mut b) = (1u32, 0u32);
    for byte in bytes {
        a = (a + u32::from(*byte)) % 65_521;
        b = (b + a) % 65_521;
    }
    b << 16 | a
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_those_of_the_standards() {
        assert_eq!(adler32(b"Wikipedia"), 0x11e6_0398);
        let mut end = Vec::new();
        chunk(&mut end, b"IEND", &[]);
        assert_eq!(end, [0, 0, 0, 0, b'I', b'E', b'N', b'D', 0xae, 0x42, 0x60, 0x82]);
    }

    #[test]
    fn what_repeats_costs_little() {
        assert!(zlib(&[7; 100_000]).len() < 1000);
        let many: Vec<u8> = (0..=255).cycle().take(1000).collect();
        assert!(zlib(&many).len() < 1200, "and what does not, little more than itself");
    }

    #[test]
    fn streams_are_deflates() {
        assert_eq!(zlib(b""), [0x78, 1, 3, 0, 0, 0, 0, 1]);
        let repeated = [b"abcabcabcabcabcabd".as_slice(), &[200, 255]].concat();
        // Zlib itself reads it as these bytes.
        let stream = [
            0x78, 0x01, 0x4b, 0x4c, 0x4a, 0x46, 0x20, 0x10, 0x4a, 0x39, 0xf1, 0x1f, 0x00, 0x51,
            0xd8, 0x08, 0xad,
        ];
        assert_eq!(zlib(&repeated), stream);
    }
}
