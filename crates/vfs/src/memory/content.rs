//! The bytes of one file in memory: chunks of 64 KiB, holes between them.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

use crate::{Errno, SeekTo};

/// Bytes a chunk covers. Holes are kept at this grain.
const CHUNK_BYTES: u64 = 64 << 10;

/// Linux keeps file offsets in signed 64 bits.
pub(super) const MAX_SIZE_BYTES: u64 = i64::MAX as u64;

/// What one file holds. A chunk may be shorter than [`CHUNK_BYTES`]: zeros follow. No
/// byte at or beyond `size_bytes` is kept, so a file that shrinks and grows again shows
/// zeros.
#[derive(Default, Debug)]
pub(super) struct Content {
    chunks: BTreeMap<u64, Arc<Vec<u8>>>,
    size_bytes: u64,
}

/// The parts of a read, cut out under the lock and put together outside it.
pub(super) struct Pieces {
    parts: Vec<(usize, Arc<Vec<u8>>, usize, usize)>,
    len: usize,
}

impl Pieces {
    /// The bytes read.
    pub(super) fn assemble(self) -> Bytes {
        let mut out = Vec::with_capacity(self.len);
        for (at, chunk, from, to) in self.parts {
            out.resize(at, 0);
            out.extend_from_slice(&chunk[from..to]);
        }
        out.resize(self.len, 0);
        Bytes::from(out)
    }
}

impl Content {
    pub(super) fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Bytes of memory taken.
    pub(super) fn used_bytes(&self) -> u64 {
        self.chunks.len() as u64 * CHUNK_BYTES
    }

    /// Up to `len` bytes at `offset`.
    pub(super) fn read(&self, offset: u64, len: u32) -> Pieces {
        let end = offset.saturating_add(u64::from(len)).min(self.size_bytes);
        if offset >= end {
            return Pieces { parts: Vec::new(), len: 0 };
        }
        let mut parts = Vec::new();
        for (&index, chunk) in self.chunks.range(offset / CHUNK_BYTES..=(end - 1) / CHUNK_BYTES) {
            let start = index * CHUNK_BYTES;
            let from = small(offset.saturating_sub(start));
            let to = small((end - start).min(chunk.len() as u64));
            if from < to {
                let at = small(start + from as u64 - offset);
                parts.push((at, chunk.clone(), from, to));
            }
        }
        Pieces { parts, len: small(end - offset) }
    }

    /// How many more bytes of memory a write would take.
    pub(super) fn cost_bytes(&self, offset: u64, len: u64) -> u64 {
        if len == 0 {
            return 0;
        }
        let last = offset.saturating_add(len - 1) / CHUNK_BYTES;
        let present = self.chunks.range(offset / CHUNK_BYTES..=last).count() as u64;
        (last - offset / CHUNK_BYTES + 1 - present) * CHUNK_BYTES
    }

    pub(super) fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), Errno> {
        let end = offset.checked_add(data.len() as u64).filter(|&e| e <= MAX_SIZE_BYTES);
        let end = end.ok_or(Errno::EFBIG)?;
        let mut at = offset;
        let mut rest = data;
        while !rest.is_empty() {
            let from = small(at % CHUNK_BYTES);
            let (now, later) = rest.split_at(rest.len().min(CHUNK_BYTES as usize - from));
            let chunk = Arc::make_mut(self.chunks.entry(at / CHUNK_BYTES).or_default());
            if chunk.len() < from + now.len() {
                chunk.resize(from + now.len(), 0);
            }
            chunk[from..from + now.len()].copy_from_slice(now);
            at += now.len() as u64;
            rest = later;
        }
        if !data.is_empty() {
            self.size_bytes = self.size_bytes.max(end);
        }
        Ok(())
    }

    /// Cuts, or extends with a hole.
    pub(super) fn resize(&mut self, size_bytes: u64) -> Result<(), Errno> {
        if size_bytes > MAX_SIZE_BYTES {
            return Err(Errno::EFBIG);
        }
        if size_bytes < self.size_bytes {
            self.chunks.split_off(&size_bytes.div_ceil(CHUNK_BYTES));
            if let Some(chunk) = self.chunks.get_mut(&(size_bytes / CHUNK_BYTES)) {
                Arc::make_mut(chunk).truncate(small(size_bytes % CHUNK_BYTES));
            }
        }
        self.size_bytes = size_bytes;
        Ok(())
    }

    /// Makes zeros of a range, as far as the file reaches.
    pub(super) fn punch(&mut self, range: Range<u64>) {
        let end = range.end.min(self.size_bytes);
        if range.start >= end {
            return;
        }
        let indices = range.start / CHUNK_BYTES..=(end - 1) / CHUNK_BYTES;
        let touched: Vec<u64> = self.chunks.range(indices).map(|(index, _)| *index).collect();
        for index in touched {
            let start = index * CHUNK_BYTES;
            let from = small(range.start.saturating_sub(start));
            let to = small((end - start).min(CHUNK_BYTES));
            let chunk = self.chunks.entry(index).or_default();
            // A chunk may be shorter than what it covers.
            if from == 0 && to >= chunk.len() {
                self.chunks.remove(&index);
            } else if from < chunk.len() {
                let to = to.min(chunk.len());
                Arc::make_mut(chunk)[from..to].fill(0);
            }
        }
    }

    /// The next data or hole at or after `offset`.
    pub(super) fn seek(&self, offset: u64, to: SeekTo) -> Result<u64, Errno> {
        if offset >= self.size_bytes {
            return Err(Errno::ENXIO);
        }
        let here = offset / CHUNK_BYTES;
        let index = match to {
            SeekTo::Data => {
                let next = self.chunks.range(here..).next();
                next.map(|(&index, _)| index).ok_or(Errno::ENXIO)?
            }
            SeekTo::Hole => {
                let mut index = here;
                while self.chunks.contains_key(&index) {
                    index += 1;
                }
                index
            }
        };
        Ok((index * CHUNK_BYTES).clamp(offset, self.size_bytes))
    }
}

/// An offset within a chunk or a read, both below 4 GiB.
fn small(offset: u64) -> usize {
    usize::try_from(offset).expect("an offset within a chunk or a read is small")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn content_behaves_as_a_plain_vector(
            steps in prop::collection::vec(
                (0u64..300_000, prop::collection::vec(any::<u8>(), 0..3000), 0..3),
                0..40,
            )
        ) {
            let mut model: Vec<u8> = Vec::new();
            let mut content = Content::default();
            for (at, data, step) in steps {
                if step == 0 {
                    content.resize(at).unwrap();
                    model.resize(at as usize, 0);
                } else if step == 1 {
                    let end = at + 100 * data.len() as u64;
                    content.punch(at..end);
                    let end = model.len().min(end as usize);
                    model[end.min(at as usize)..end].fill(0);
                } else {
                    content.write(at, &data).unwrap();
                    if !data.is_empty() {
                        let end = at as usize + data.len();
                        model.resize(model.len().max(end), 0);
                        model[at as usize..end].copy_from_slice(&data);
                    }
                }
                prop_assert_eq!(content.size_bytes(), model.len() as u64);
                let whole = content.read(0, u32::MAX).assemble();
                prop_assert!(whole == model[..]);
                let part = content.read(at / 2, 70_000).assemble();
                let from = model.len().min(at as usize / 2);
                let to = model.len().min(at as usize / 2 + 70_000);
                prop_assert!(part == model[from..to]);
            }
        }
    }

    #[test]
    fn a_punched_hole_takes_no_memory() {
        let mut content = Content::default();
        content.write(10, &[7; 3 * CHUNK_BYTES as usize]).unwrap();
        assert_eq!(content.used_bytes(), 4 * CHUNK_BYTES);
        content.punch(CHUNK_BYTES - 1..3 * CHUNK_BYTES + 1);
        assert_eq!(content.used_bytes(), 2 * CHUNK_BYTES);
        assert_eq!(content.seek(CHUNK_BYTES, SeekTo::Data), Ok(3 * CHUNK_BYTES));
        content.punch(0..u64::MAX);
        assert_eq!((content.used_bytes(), content.size_bytes()), (0, 10 + 3 * CHUNK_BYTES));
    }

    #[test]
    fn a_hole_is_found_and_takes_no_memory() {
        let mut content = Content::default();
        content.resize(1 << 40).unwrap();
        assert_eq!(content.used_bytes(), 0);
        assert_eq!(content.seek(0, SeekTo::Data), Err(Errno::ENXIO));
        assert_eq!(content.seek(5, SeekTo::Hole), Ok(5));
        content.write(1 << 30, b"x").unwrap();
        assert_eq!(content.seek(0, SeekTo::Data), Ok(1 << 30));
        assert_eq!(content.seek(1 << 30, SeekTo::Hole), Ok((1 << 30) + CHUNK_BYTES));
        assert_eq!(content.seek(1 << 40, SeekTo::Hole), Err(Errno::ENXIO));
        assert_eq!(content.write(MAX_SIZE_BYTES, b"x"), Err(Errno::EFBIG));
    }
}
