//! The bytes of a segment: frames, one after another.
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 4 | magic `ATSP` |
//! | 4 | 4 | length of the payload |
//! | 8 | 8 | the number of its first record |
//! | 16 | 16 | BLAKE3 of the segment's first number, this frame's, and the payload; its first bytes |
//! | 32 | … | the payload: records as CBOR, one after another; of an encrypted volume, sealed |
//!
//! A frame without a payload is a *mark*: the records before its number are durable. One follows each
//! sync, so that damage can be told from an end that was never made durable.
//!
//! All numbers are big-endian.

use atoll_key::{BlockHash, VolumeCipher};
use bytes::{Buf, Bytes};
use minicbor::Decoder;

use super::super::tree::Record;

const MAGIC: &[u8; 4] = b"ATSP";
const HEADER_BYTES: usize = 32;
const CHECK_BYTES: usize = 16;

/// How each mark begins.
const MARK: &[u8; 8] = b"ATSP\0\0\0\0";

/// A frame is ended before its payload is longer.
const FRAME_BYTES: usize = 8 << 20;

/// What can be read of a segment.
#[derive(Debug, Default)]
pub(super) struct Segment {
    /// The records of its frames, up to the first frame that is not whole.
    pub(super) records: Vec<Record>,
    /// Bytes of all, and from there on.
    pub(super) bytes: u64,
    pub(super) rest: usize,
    /// Records before this number were durable, as its marks say, also those after damage.
    pub(super) durable: u64,
}

/// Frames with `records`, of a segment.
pub(super) fn encode(
    segment: u64,
    mut first: u64,
    records: &[Record],
    cipher: Option<&VolumeCipher>,
) -> Vec<u8> {
    let mut out = Vec::new();
    let mut left = records;
    while !left.is_empty() {
        let start = out.len();
        let payload = start + HEADER_BYTES;
        out.resize(payload, 0);
        let mut count = 0;
        while count < left.len()
            && (count == 0 || out.len() - payload + left[count].len() <= FRAME_BYTES)
        {
            minicbor::encode(&left[count], &mut out).expect("memory takes it");
            count += 1;
        }
        if let Some(cipher) = cipher {
            let sealed = cipher.seal_local(&out[payload..]);
            out.truncate(payload);
            out.extend_from_slice(&sealed);
        }
        let header = header(segment, first, &out[payload..]);
        out[start..payload].copy_from_slice(&header);
        first += count as u64;
        left = &left[count..];
    }
    out
}

/// A mark, of a segment.
pub(super) fn mark(segment: u64, durable: u64) -> Vec<u8> {
    header(segment, durable, b"")
}

fn header(segment: u64, number: u64, payload: &[u8]) -> Vec<u8> {
    let len = payload.len() as u32;
    let check = check(segment, number, payload);
    [&MAGIC[..], &len.to_be_bytes(), &number.to_be_bytes(), &check].concat()
}

/// What the bytes of a segment hold.
pub(super) fn decode(segment: u64, bytes: &Bytes, cipher: Option<&VolumeCipher>) -> Segment {
    let mut found = Segment { bytes: bytes.len() as u64, ..Segment::default() };
    let mut left = bytes.clone();
    while let Some((number, payload)) = whole_frame(segment, &left) {
        if payload.is_empty() {
            found.durable = found.durable.max(number);
        } else {
            let next = segment.checked_add(found.records.len() as u64);
            let records = (next == Some(number)).then(|| records_of(&payload, cipher)).flatten();
            let Some(records) = records else { break };
            found.records.extend(records);
        }
        left.advance(HEADER_BYTES + payload.len());
    }
    found.rest = left.len();
    for (at, _) in left.windows(MARK.len()).enumerate().filter(|(_, bytes)| bytes == MARK) {
        let mark = whole_frame(segment, &left.slice(at..));
        found.durable = found.durable.max(mark.map_or(0, |(number, _)| number));
    }
    found
}

/// The number and the payload of a frame, if it is as it was written.
fn whole_frame(segment: u64, bytes: &Bytes) -> Option<(u64, Bytes)> {
    let header = bytes.get(..HEADER_BYTES)?;
    let len = u32::from_be_bytes(*header[4..].first_chunk()?) as usize;
    let number = u64::from_be_bytes(*header[8..].first_chunk()?);
    let end = HEADER_BYTES.checked_add(len).filter(|end| *end <= bytes.len())?;
    let payload = bytes.slice(HEADER_BYTES..end);
    let is_whole = header.starts_with(MAGIC) && header[16..] == check(segment, number, &payload);
    is_whole.then_some((number, payload))
}

fn records_of(payload: &Bytes, cipher: Option<&VolumeCipher>) -> Option<Vec<Record>> {
    let plain = match cipher {
        Some(cipher) => cipher.open_local(payload).ok()?,
        None => payload.clone(),
    };
    let mut decoder = Decoder::new(&plain);
    let mut records = Vec::new();
    while decoder.position() < plain.len() {
        records.push(decoder.decode().ok()?);
    }
    Some(records)
}

fn check(segment: u64, number: u64, payload: &[u8]) -> [u8; CHECK_BYTES] {
    let payload = BlockHash::of(payload);
    let numbers = [segment.to_be_bytes(), number.to_be_bytes()].concat();
    let all = BlockHash::of(&[&numbers[..], &payload.0[..]].concat());
    *all.0.first_chunk().expect("a hash has 32 bytes")
}
