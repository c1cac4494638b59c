//! The bytes of a segment: frames, one after another, until one that is not whole.
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 4 | magic `ATSP` |
//! | 4 | 4 | length of the payload |
//! | 8 | 8 | the number of its first record |
//! | 16 | 16 | BLAKE3 of the segment's first number, this frame's, and the payload; its first bytes |
//! | 32 | … | the payload: records as CBOR, one after another; of an encrypted volume, sealed |
//!
//! All numbers are big-endian.

use atoll_key::{BlockHash, VolumeCipher};
use bytes::Bytes;
use minicbor::Decoder;

use super::super::tree::Record;

const MAGIC: &[u8; 4] = b"ATSP";
const HEADER_BYTES: usize = 32;
const CHECK_BYTES: usize = 16;

/// A frame is ended before its payload is longer.
const FRAME_BYTES: usize = 8 << 20;

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
        let len = (out.len() - payload) as u32;
        let check = check(segment, first, &out[payload..]);
        let header = [&MAGIC[..], &len.to_be_bytes(), &first.to_be_bytes(), &check].concat();
        out[start..payload].copy_from_slice(&header);
        first += count as u64;
        left = &left[count..];
    }
    out
}

/// The records of the frames of a segment that are whole, and how many bytes follow them.
pub(super) fn decode(
    segment: u64,
    bytes: &Bytes,
    cipher: Option<&VolumeCipher>,
) -> (Vec<Record>, usize) {
    let mut records = Vec::new();
    let mut left = bytes.clone();
    while let Some((frame, len)) = decode_frame(segment, records.len(), &left, cipher) {
        records.extend(frame);
        bytes::Buf::advance(&mut left, len);
    }
    (records, left.len())
}

fn decode_frame(
    segment: u64,
    before: usize,
    bytes: &Bytes,
    cipher: Option<&VolumeCipher>,
) -> Option<(Vec<Record>, usize)> {
    let header = bytes.get(..HEADER_BYTES)?;
    let len = u32::from_be_bytes(*header[4..].first_chunk()?) as usize;
    let first = u64::from_be_bytes(*header[8..].first_chunk()?);
    let payload = bytes.get(HEADER_BYTES..HEADER_BYTES.checked_add(len)?)?;
    let is_whole = header.starts_with(MAGIC)
        && first == segment.checked_add(before as u64)?
        && header[16..] == check(segment, first, payload);
    if !is_whole {
        return None;
    }
    let plain = match cipher {
        Some(cipher) => cipher.open_local(payload).ok()?,
        None => bytes.slice(HEADER_BYTES..HEADER_BYTES + len),
    };
    let mut decoder = Decoder::new(&plain);
    let mut records = Vec::new();
    while decoder.position() < plain.len() {
        records.push(decoder.decode().ok()?);
    }
    Some((records, HEADER_BYTES + len))
}

fn check(segment: u64, first: u64, payload: &[u8]) -> [u8; CHECK_BYTES] {
    let payload = BlockHash::of(payload);
    let numbers = [segment.to_be_bytes(), first.to_be_bytes()].concat();
    let all = BlockHash::of(&[&numbers[..], &payload.0[..]].concat());
    *all.0.first_chunk().expect("a hash has 32 bytes")
}
