//! The bytes of a simulated file: blocks that are there, and holes.

use std::collections::BTreeMap;
use std::sync::Arc;

use atoll_vfs::{Errno, FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE, FALLOC_ZERO_RANGE, SeekTo};
use bytes::Bytes;

use super::generator::Generator;
use crate::disk::DiskResult;

/// Bytes of a block: the unit of space and of holes.
pub(super) const BLOCK: u64 = 4096;
/// Bytes that a device writes whole or not at all.
const SECTOR: usize = 512;
/// The longest file, bytes (ext4's with blocks of 4 KiB).
pub(super) const MAX_BYTES: u64 = (1 << 44) - BLOCK;

type Block = Arc<[u8; BLOCK as usize]>;

/// A file's length and its blocks. A block of `None` has space and was never written.
#[derive(Clone, Debug, Default)]
pub(super) struct FileContents {
    pub(super) size: u64,
    blocks: BTreeMap<u64, Option<Block>>,
}

impl FileContents {
    /// Space taken, blocks.
    pub(super) fn blocks(&self) -> u64 {
        self.blocks.len() as u64
    }

    pub(super) fn read(&self, offset: u64, len: usize) -> Bytes {
        let rest = usize::try_from(self.size.saturating_sub(offset)).unwrap_or(usize::MAX);
        let mut out = vec![0; len.min(rest)];
        for (block, within, range) in pieces(offset, out.len()) {
            if let Some(Some(bytes)) = self.blocks.get(&block) {
                let len = range.len();
                out[range].copy_from_slice(&bytes[within..within + len]);
            }
        }
        out.into()
    }

    /// Writes as much as there is room for, in blocks; returns how many bytes.
    pub(super) fn write(&mut self, offset: u64, data: &[u8], mut room: u64) -> DiskResult<usize> {
        if data.is_empty() {
            return Ok(0);
        }
        if i64::try_from(offset.saturating_add(data.len() as u64)).is_err() {
            return Err(Errno::EINVAL);
        }
        if offset >= MAX_BYTES {
            return Err(Errno::EFBIG);
        }
        let fits = usize::try_from(MAX_BYTES - offset).unwrap_or(usize::MAX);
        let data = &data[..data.len().min(fits)];
        let mut written = 0;
        for (block, within, range) in pieces(offset, data.len()) {
            if !self.blocks.contains_key(&block) {
                let Some(left) = room.checked_sub(1) else { break };
                room = left;
            }
            written = range.end;
            let bytes = self.blocks.entry(block).or_default().get_or_insert_with(empty);
            Arc::make_mut(bytes)[within..within + range.len()].copy_from_slice(&data[range]);
        }
        if written == 0 {
            return Err(Errno::ENOSPC);
        }
        self.size = self.size.max(offset + written as u64);
        Ok(written)
    }

    pub(super) fn set_len(&mut self, size: u64) -> DiskResult<()> {
        if i64::try_from(size).is_err() {
            return Err(Errno::EINVAL);
        }
        if size > MAX_BYTES {
            return Err(Errno::EFBIG);
        }
        self.cut(size);
        Ok(())
    }

    /// Sets the length; what lies behind it is gone.
    fn cut(&mut self, size: u64) {
        if size < self.size {
            self.blocks.split_off(&size.div_ceil(BLOCK));
            self.zero(size, size.next_multiple_of(BLOCK));
        }
        self.size = size;
    }

    /// Puts zeros into blocks that were written.
    fn zero(&mut self, from: u64, to: u64) {
        let len = usize::try_from(to.saturating_sub(from)).unwrap_or(usize::MAX);
        for (block, within, range) in pieces(from, len) {
            if let Some(Some(bytes)) = self.blocks.get_mut(&block) {
                Arc::make_mut(bytes)[within..within + range.len()].fill(0);
            }
        }
    }

    /// `fallocate(2)`, of which all or nothing happens, within `room` blocks.
    pub(super) fn allocate(
        &mut self,
        mode: i32,
        offset: u64,
        len: u64,
        room: u64,
    ) -> DiskResult<()> {
        if mode < 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        if len == 0 || i64::try_from(offset).is_err() || i64::try_from(len).is_err() {
            return Err(Errno::EINVAL);
        }
        const PUNCH: i32 = FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE;
        const ZERO_KEEP: i32 = FALLOC_ZERO_RANGE | FALLOC_KEEP_SIZE;
        if !matches!(mode, 0 | FALLOC_KEEP_SIZE | PUNCH | FALLOC_ZERO_RANGE | ZERO_KEEP) {
            return Err(Errno::EOPNOTSUPP);
        }
        let end = offset.saturating_add(len);
        if end > MAX_BYTES {
            return Err(Errno::EFBIG);
        }
        if mode != PUNCH {
            let range = offset / BLOCK..end.div_ceil(BLOCK);
            let there = self.blocks.range(range.clone()).count() as u64;
            if range.end - range.start - there > room {
                return Err(Errno::ENOSPC);
            }
            for block in range {
                self.blocks.entry(block).or_default();
            }
        }
        if mode & (FALLOC_PUNCH_HOLE | FALLOC_ZERO_RANGE) != 0 {
            let whole = offset.div_ceil(BLOCK)..end / BLOCK;
            if whole.start > whole.end {
                self.zero(offset, end);
            } else {
                self.zero(offset, whole.start * BLOCK);
                self.zero(whole.end * BLOCK, end);
            }
            let there: Vec<u64> = if whole.is_empty() {
                vec![]
            } else {
                self.blocks.range(whole).map(|(block, _)| *block).collect()
            };
            for block in there {
                match mode {
                    PUNCH => drop(self.blocks.remove(&block)),
                    _ => drop(self.blocks.insert(block, None)),
                }
            }
        }
        if mode & FALLOC_KEEP_SIZE == 0 {
            self.size = self.size.max(end);
        }
        Ok(())
    }

    pub(super) fn seek(&self, offset: u64, to: SeekTo) -> DiskResult<u64> {
        if offset >= self.size {
            return Err(Errno::ENXIO);
        }
        let written = self.blocks.range(offset / BLOCK..).filter(|(_, bytes)| bytes.is_some());
        let written = written.map(|(block, _)| *block);
        let found = match to {
            SeekTo::Data => written.min().ok_or(Errno::ENXIO)? * BLOCK,
            SeekTo::Hole => {
                let mut hole = offset / BLOCK;
                for block in written.take_while(|block| *block < self.size.div_ceil(BLOCK)) {
                    if block != hole {
                        break;
                    }
                    hole += 1;
                }
                (hole * BLOCK).min(self.size)
            }
        };
        match found.max(offset) {
            // Space behind the end is no data.
            found if to == SeekTo::Data && found >= self.size => Err(Errno::ENXIO),
            found => Ok(found),
        }
    }

    /// What a crash leaves of a file that was `self` when it was last synced and `new` in memory: each sector old or new, the
    /// length old or new.
    pub(super) fn torn(&self, new: &FileContents, dice: &mut Generator) -> FileContents {
        let mut left = match dice.below(4) {
            0 => return self.clone(),
            1 => return new.clone(),
            _ => FileContents { size: self.size.max(new.size), ..FileContents::default() },
        };
        let mut numbers: Vec<u64> = self.blocks.keys().chain(new.blocks.keys()).copied().collect();
        numbers.sort_unstable();
        numbers.dedup();
        for number in numbers {
            let (old, new) = (self.blocks.get(&number), new.blocks.get(&number));
            let bytes = |block: Option<&Option<Block>>| block.cloned().flatten();
            let block = match (bytes(old), bytes(new)) {
                (None, None) => None,
                (Some(old), Some(new)) if Arc::ptr_eq(&old, &new) => Some(old),
                (old, new) => {
                    let (mut mixed, new) = (old.unwrap_or_else(empty), new.unwrap_or_else(empty));
                    let into = Arc::make_mut(&mut mixed);
                    for at in (0..BLOCK as usize).step_by(SECTOR) {
                        if dice.coin() {
                            into[at..at + SECTOR].copy_from_slice(&new[at..at + SECTOR]);
                        }
                    }
                    Some(mixed)
                }
            };
            left.blocks.insert(number, block);
        }
        left.cut(if dice.coin() { self.size } else { new.size });
        left
    }
}

fn empty() -> Block {
    Arc::new([0; BLOCK as usize])
}

/// Cuts `len` bytes from `offset` at the bounds of blocks: the block, where in it, and which of the `len` bytes.
fn pieces(offset: u64, len: usize) -> impl Iterator<Item = (u64, usize, std::ops::Range<usize>)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        let at = offset + done as u64;
        let within = (at % BLOCK) as usize;
        let piece = (BLOCK as usize - within).min(len - done);
        let range = done..done + piece;
        done += piece;
        (piece > 0).then_some((at / BLOCK, within, range))
    })
}
