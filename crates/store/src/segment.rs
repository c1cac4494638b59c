//! The bytes of a segment: its header, the headers of its records, and a walk over them.
//!
//! A segment is a file `NNNNNNNNNNNNNNNN.seg` (its number in 16 hex digits): a segment
//! header, then records one after another, each beginning at a multiple of 8 bytes.
//! All integers are big-endian.
//!
//! The first 1,024 bytes hold the segment header twice, at 0 and at 512, so that one
//! bad sector does not take the salt and with it the whole segment. Segment header, 40
//! bytes:
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 8 | magic `ATOLLSEG` |
//! | 8 | 4 | layout, 3 |
//! | 12 | 4 | zero |
//! | 16 | 8 | the segment's number |
//! | 24 | 8 | salt, random |
//! | 32 | 4 | CRC-32 of bytes 0..32 |
//! | 36 | 4 | zero |
//!
//! Record header, 144 bytes, followed by the value and zeros up to a multiple of 8:
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 4 | magic `ATRC` |
//! | 4 | 4 | CRC-32 of the segment's salt and the header from byte 8 on |
//! | 8 | 4 | CRC-32 of the value |
//! | 12 | 4 | length of the value |
//! | 16 | 1 | what the record says: 1 block, 2 removal, 3 lease |
//! | 17 | 1 | block: kind of the block; otherwise 0 |
//! | 18 | 6 | zero |
//! | 24 | 8 | sequence number |
//! | 32 | 8 | block: version; removal: number of the segment that held the block; otherwise 0 |
//! | 40 | 8 | block and lease: end of the lease, seconds since 1970; otherwise 0 |
//! | 48 | 64 | key |
//! | 112 | 32 | block and lease: the owner, publisher before address; zeros for no owner |
//!
//! The header has a checksum of its own so that a damaged value does not hide where the
//! next record begins. Where a header is damaged the walk looks for the next one at
//! every multiple of 8. The salt never leaves this machine, so the bytes of a block that
//! a stranger wrote cannot pass for a record then.

use std::io;

use atoll_key::{BlockKind, Key, MAX_BLOCK_BYTES};

use crate::Owner;
use crate::disk::DiskFile;

/// Length of a segment's header.
pub const SEGMENT_HEADER_BYTES: usize = 40;
/// Where the second copy of the header lies.
pub const SECOND_HEADER_OFFSET: usize = 512;
/// Where the first record begins.
pub const FIRST_RECORD_OFFSET: u64 = 1024;
/// Length of a record's header.
pub const RECORD_HEADER_BYTES: usize = 144;
/// The layout this code writes, and the only one it reads.
pub const LAYOUT: u32 = 3;
/// Records begin at multiples of this.
pub const ALIGNMENT: usize = 8;

const SEGMENT_MAGIC: &[u8; 8] = b"ATOLLSEG";
const RECORD_MAGIC: &[u8; 4] = b"ATRC";
const SUFFIX: &str = ".seg";

/// The header of a segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SegmentHeader {
    /// The segment's number; later segments have higher ones.
    pub number: u64,
    /// Mixed into the checksums of its records' headers.
    pub salt: u64,
}

/// What a record says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RecordBody {
    /// Here is a block.
    Block {
        /// The kind of the block.
        kind: BlockKind,
        /// Its version.
        version: u64,
        /// When its lease ends, seconds since 1970.
        expires_unix_secs: u64,
        /// Its length, bytes.
        len_bytes: u32,
        /// CRC-32 of its bytes.
        value_crc: u32,
    },
    /// The block is no longer held.
    Removal {
        /// The segment that held it; once that is gone the removal says nothing.
        target_segment: u64,
    },
    /// The block's lease ends at the given time or later.
    Lease {
        /// Seconds since 1970.
        expires_unix_secs: u64,
    },
}

/// The header of a record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RecordHeader {
    /// The block it speaks of.
    pub key: Key,
    /// Orders all that was ever said about a key; a copied record keeps its number.
    pub sequence: u64,
    /// The owner the block is charged to. [`Owner::NOBODY`] for a block without one, a lease
    /// that does not change it, and a removal.
    pub owner: Owner,
    /// What it says.
    pub body: RecordBody,
}

/// Why bytes are not a header.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum InvalidHeader {
    /// Fewer bytes than a header has.
    #[error("too short")]
    Short,
    /// It does not begin like one.
    #[error("no magic")]
    Magic,
    /// The checksum is wrong.
    #[error("wrong checksum")]
    Checksum,
    /// Written by another version of this program.
    #[error("layout {0} is not {LAYOUT}")]
    OtherLayout(u32),
    /// The checksum is right but a field makes no sense.
    #[error("impossible field")]
    Field,
}

/// The highest number a segment may have: the index has six bytes for it, and one is needed for
/// the next.
const MAX_NUMBER: u64 = (1 << 48) - 2;

/// The name of segment `number`.
pub fn file_name(number: u64) -> String {
    format!("{number:016x}{SUFFIX}")
}

/// The number of the segment called `name`.
pub fn parse_file_name(name: &str) -> Option<u64> {
    let digits = name.strip_suffix(SUFFIX)?;
    let number = u64::from_str_radix(digits, 16).ok().filter(|number| *number <= MAX_NUMBER)?;
    (name == file_name(number)).then_some(number)
}

/// What a record with a value of `value_bytes` takes.
pub(crate) fn record_bytes(value_bytes: u32) -> u64 {
    let whole = RECORD_HEADER_BYTES as u64 + u64::from(value_bytes);
    whole.next_multiple_of(ALIGNMENT as u64)
}

/// Writes a segment's header.
pub fn encode_segment_header(header: &SegmentHeader) -> [u8; SEGMENT_HEADER_BYTES] {
    let mut out = [0; SEGMENT_HEADER_BYTES];
    out[..8].copy_from_slice(SEGMENT_MAGIC);
    out[8..12].copy_from_slice(&LAYOUT.to_be_bytes());
    out[16..24].copy_from_slice(&header.number.to_be_bytes());
    out[24..32].copy_from_slice(&header.salt.to_be_bytes());
    let crc = crc32fast::hash(&out[..32]);
    out[32..36].copy_from_slice(&crc.to_be_bytes());
    out
}

/// The bytes a segment begins with: its header twice.
pub fn encode_segment_start(header: &SegmentHeader) -> [u8; FIRST_RECORD_OFFSET as usize] {
    let mut out = [0; FIRST_RECORD_OFFSET as usize];
    let encoded = encode_segment_header(header);
    for at in [0, SECOND_HEADER_OFFSET] {
        out[at..at + SEGMENT_HEADER_BYTES].copy_from_slice(&encoded);
    }
    out
}

/// Reads the header from the bytes a segment begins with: from its second copy if the
/// first is damaged.
pub fn decode_segment_start(bytes: &[u8]) -> Result<SegmentHeader, InvalidHeader> {
    let first = decode_segment_header(bytes);
    match first {
        Err(InvalidHeader::OtherLayout(_)) | Ok(_) => first,
        Err(_) => decode_segment_header(bytes.get(SECOND_HEADER_OFFSET..).unwrap_or(&[])),
    }
}

/// Reads a segment's header.
pub fn decode_segment_header(bytes: &[u8]) -> Result<SegmentHeader, InvalidHeader> {
    let bytes = bytes.get(..SEGMENT_HEADER_BYTES).ok_or(InvalidHeader::Short)?;
    if &bytes[..8] != SEGMENT_MAGIC {
        return Err(InvalidHeader::Magic);
    }
    if be32(bytes, 32) != crc32fast::hash(&bytes[..32]) {
        return Err(InvalidHeader::Checksum);
    }
    match be32(bytes, 8) {
        LAYOUT => Ok(SegmentHeader { number: be64(bytes, 16), salt: be64(bytes, 24) }),
        other => Err(InvalidHeader::OtherLayout(other)),
    }
}

/// Writes a record's header for a segment with `salt`.
pub fn encode_record_header(header: &RecordHeader, salt: u64) -> [u8; RECORD_HEADER_BYTES] {
    let mut out = [0; RECORD_HEADER_BYTES];
    out[..4].copy_from_slice(RECORD_MAGIC);
    out[24..32].copy_from_slice(&header.sequence.to_be_bytes());
    out[48..112].copy_from_slice(&header.key.0);
    out[112..].copy_from_slice(&header.owner.to_bytes());
    match header.body {
        RecordBody::Block { kind, version, expires_unix_secs, len_bytes, value_crc } => {
            out[8..12].copy_from_slice(&value_crc.to_be_bytes());
            out[12..16].copy_from_slice(&len_bytes.to_be_bytes());
            out[16] = 1;
            out[17] = kind as u8;
            out[32..40].copy_from_slice(&version.to_be_bytes());
            out[40..48].copy_from_slice(&expires_unix_secs.to_be_bytes());
        }
        RecordBody::Removal { target_segment } => {
            out[16] = 2;
            out[32..40].copy_from_slice(&target_segment.to_be_bytes());
        }
        RecordBody::Lease { expires_unix_secs } => {
            out[16] = 3;
            out[40..48].copy_from_slice(&expires_unix_secs.to_be_bytes());
        }
    }
    let crc = header_crc(&out, salt);
    out[4..8].copy_from_slice(&crc.to_be_bytes());
    out
}

/// Reads a record's header in a segment with `salt`. The length it returns is at most
/// [`MAX_BLOCK_BYTES`].
pub fn decode_record_header(bytes: &[u8], salt: u64) -> Result<RecordHeader, InvalidHeader> {
    let bytes = bytes.get(..RECORD_HEADER_BYTES).ok_or(InvalidHeader::Short)?;
    if &bytes[..4] != RECORD_MAGIC {
        return Err(InvalidHeader::Magic);
    }
    if be32(bytes, 4) != header_crc(bytes, salt) {
        return Err(InvalidHeader::Checksum);
    }
    let len_bytes = be32(bytes, 12);
    let expires_unix_secs = be64(bytes, 40);
    let body = match bytes[16] {
        1 if len_bytes as usize <= MAX_BLOCK_BYTES => RecordBody::Block {
            kind: BlockKind::from_u8(bytes[17]).map_err(|_| InvalidHeader::Field)?,
            version: be64(bytes, 32),
            expires_unix_secs,
            len_bytes,
            value_crc: be32(bytes, 8),
        },
        2 if len_bytes == 0 => RecordBody::Removal { target_segment: be64(bytes, 32) },
        3 if len_bytes == 0 => RecordBody::Lease { expires_unix_secs },
        _ => return Err(InvalidHeader::Field),
    };
    let key = Key::from_slice(&bytes[48..112]).ok_or(InvalidHeader::Short)?;
    let owner = Owner::from_bytes(bytes[112..].try_into().expect("32 bytes"));
    if owner != Owner::NOBODY && matches!(body, RecordBody::Removal { .. }) {
        return Err(InvalidHeader::Field);
    }
    Ok(RecordHeader { key, sequence: be64(bytes, 24), owner, body })
}

impl RecordHeader {
    /// What the record takes, value and padding included.
    pub(crate) fn record_bytes(&self) -> u64 {
        record_bytes(self.value_bytes())
    }

    /// Length of the value behind the header; 0 unless it is a block.
    pub fn value_bytes(&self) -> u32 {
        match self.body {
            RecordBody::Block { len_bytes, .. } => len_bytes,
            RecordBody::Removal { .. } | RecordBody::Lease { .. } => 0,
        }
    }
}

fn header_crc(bytes: &[u8], salt: u64) -> u32 {
    let mut crc = crc32fast::Hasher::new();
    crc.update(&salt.to_be_bytes());
    crc.update(&bytes[8..]);
    crc.finalize()
}

fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes[at..at + 4].try_into().expect("4 bytes"))
}

fn be64(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
}

/// What the walk over a segment met next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Met {
    /// A record with a sound header; its value has not been looked at.
    Record {
        /// Where its header begins.
        offset: u64,
        /// Its header.
        header: RecordHeader,
    },
    /// Bytes that are no record, up to the next sound header or the end.
    Damage {
        /// Where they begin.
        offset: u64,
        /// How many there are.
        len_bytes: u64,
    },
}

/// A walk over the records of one segment, reading through one buffer.
pub(crate) struct Walk<'a> {
    file: &'a dyn DiskFile,
    salt: u64,
    end: u64,
    at: u64,
    buffer: Vec<u8>,
    buffer_at: u64,
}

/// Bytes the walk reads at once: larger than most blocks, small beside a node's memory.
const WALK_BUFFER_BYTES: usize = 256 << 10;

impl<'a> Walk<'a> {
    /// Walks from the record at `from` to `end`.
    pub(crate) fn new(file: &'a dyn DiskFile, salt: u64, from: u64, end: u64) -> Walk<'a> {
        let at = from.max(FIRST_RECORD_OFFSET).min(end);
        Walk { file, salt, end, at, buffer: Vec::new(), buffer_at: 0 }
    }

    /// Up to `len` bytes at `at`, fewer at the end of the segment.
    fn bytes(&mut self, at: u64, len: usize) -> io::Result<&[u8]> {
        let len = len.min(usize::try_from(self.end.saturating_sub(at)).unwrap_or(usize::MAX));
        let held = self.buffer_at..self.buffer_at + self.buffer.len() as u64;
        if at < held.start || at + len as u64 > held.end {
            let left = usize::try_from(self.end - at).unwrap_or(usize::MAX);
            let want = len.max(WALK_BUFFER_BYTES).min(left);
            self.buffer.resize(want, 0);
            self.buffer_at = at;
            let got = self.file.read_at(at, &mut self.buffer)?;
            self.buffer.truncate(got);
        }
        let start = usize::try_from(at - self.buffer_at).expect("within the buffer");
        let stop = (start + len).min(self.buffer.len());
        Ok(&self.buffer[start.min(stop)..stop])
    }

    fn header_at(&mut self, at: u64) -> io::Result<Result<RecordHeader, InvalidHeader>> {
        let (salt, end) = (self.salt, self.end);
        let header = decode_record_header(self.bytes(at, RECORD_HEADER_BYTES)?, salt);
        Ok(header.and_then(|header| {
            let whole = at + header.record_bytes() <= end;
            if whole { Ok(header) } else { Err(InvalidHeader::Short) }
        }))
    }

    /// The next thing in the segment; `None` at its end.
    pub(crate) fn step(&mut self) -> io::Result<Option<Met>> {
        let start = self.at;
        while self.at < self.end {
            match self.header_at(self.at)? {
                Ok(header) if self.at == start => {
                    let offset = self.at;
                    self.at += header.record_bytes();
                    return Ok(Some(Met::Record { offset, header }));
                }
                Ok(_) => break,
                Err(_) => self.at += ALIGNMENT as u64,
            }
        }
        self.at = self.at.min(self.end);
        let len_bytes = self.at - start;
        Ok((len_bytes > 0).then_some(Met::Damage { offset: start, len_bytes }))
    }

    /// The value of the record at `offset`, or `None` if it does not match its checksum.
    pub(crate) fn value(
        &mut self,
        offset: u64,
        header: &RecordHeader,
    ) -> io::Result<Option<&[u8]>> {
        let RecordBody::Block { len_bytes, value_crc, .. } = header.body else {
            return Ok(Some(&[]));
        };
        let value = self.bytes(offset + RECORD_HEADER_BYTES as u64, len_bytes as usize)?;
        let sound = value.len() == len_bytes as usize && crc32fast::hash(value) == value_crc;
        Ok(sound.then_some(value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const OWNER: Owner = Owner { publisher: [9; 16], ip: [10; 16] };

    fn header() -> RecordHeader {
        RecordHeader {
            key: Key([7; 64]),
            sequence: 12,
            owner: OWNER,
            body: RecordBody::Block {
                kind: BlockKind::Signed,
                version: 3,
                expires_unix_secs: 99,
                len_bytes: 500,
                value_crc: 0xdead_beef,
            },
        }
    }

    #[test]
    fn headers_of_every_kind_read_back() {
        let free = |header| RecordHeader { owner: Owner::NOBODY, ..header };
        let removal = RecordHeader { body: RecordBody::Removal { target_segment: 4 }, ..header() };
        let lease = RecordHeader { body: RecordBody::Lease { expires_unix_secs: 8 }, ..header() };
        for header in [header(), free(header()), free(removal), lease, free(lease)] {
            let bytes = encode_record_header(&header, 5);
            assert_eq!(decode_record_header(&bytes, 5), Ok(header));
            for cut in 0..bytes.len() {
                assert!(decode_record_header(&bytes[..cut], 5).is_err(), "cut at {cut}");
            }
        }
        let bytes = encode_record_header(&removal, 5);
        assert_eq!(decode_record_header(&bytes, 5), Err(InvalidHeader::Field), "nobody owns one");
        let segment = SegmentHeader { number: 77, salt: 5 };
        assert_eq!(decode_segment_header(&encode_segment_header(&segment)), Ok(segment));
    }

    #[test]
    fn every_flipped_bit_of_a_header_is_found() {
        let bytes = encode_record_header(&header(), 5);
        for bit in 0..bytes.len() * 8 {
            let mut bytes = bytes;
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(decode_record_header(&bytes, 5).is_err(), "bit {bit}");
        }
        let bytes = encode_segment_header(&SegmentHeader { number: 1, salt: 2 });
        for bit in 0..36 * 8 {
            let mut bytes = bytes;
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(decode_segment_header(&bytes).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn a_record_of_another_segment_is_refused() {
        let bytes = encode_record_header(&header(), 5);
        assert_eq!(decode_record_header(&bytes, 6), Err(InvalidHeader::Checksum));
    }

    #[test]
    fn a_length_that_lies_is_refused_even_with_a_right_checksum() {
        let mut huge = header();
        if let RecordBody::Block { len_bytes, .. } = &mut huge.body {
            *len_bytes = u32::MAX;
        }
        let bytes = encode_record_header(&huge, 5);
        assert_eq!(decode_record_header(&bytes, 5), Err(InvalidHeader::Field));
    }

    #[test]
    fn only_exact_file_names_are_segments() {
        assert_eq!(parse_file_name(&file_name(0xabc)), Some(0xabc));
        for name in ["index.redb", "1.seg", "+000000000000001.seg", "0000000000000ABC.seg", ".seg"]
        {
            assert_eq!(parse_file_name(name), None, "{name}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_decode_or_fail_without_panic(
            bytes in proptest::collection::vec(any::<u8>(), 0..200),
            salt in any::<u64>(),
        ) {
            let _ = decode_record_header(&bytes, salt);
            let _ = decode_segment_header(&bytes);
            let mut with_magic = b"ATRC".to_vec();
            with_magic.extend(bytes);
            let _ = decode_record_header(&with_magic, salt);
        }
    }
}
