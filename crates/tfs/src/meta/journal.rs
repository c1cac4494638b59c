//! The journal: two areas, each with room for one transaction, used in turn.
//!
//! Transaction n goes to area n mod 2. It is written only when the blocks of n-1 are durable
//! at home, so that the whole transaction with the highest number is the only one that
//! recovery needs.
//!
//! An area, from its first block:
//!
//! | offset | bytes | descriptor block |
//! |---|---|---|
//! | 0 | 8 | `AtollTxn` |
//! | 8 | 8 | number of the transaction |
//! | 16 | 4 | blocks in it |
//! | 20 | 4 | 0 |
//! | 24 | 4 each | where each belongs, ascending; goes on in the next blocks from byte 0 |
//!
//! then the blocks, then the commit block: `AtollEnd` (8), number (8), the BLAKE3 hash of
//! all blocks before it (32).

use std::io;
use std::sync::Arc;

use super::{Block, write_blocks, write_home};
use crate::device::Device;
use crate::format::{put_u32, put_u64, u32_at, u64_at};
use crate::records::header::MAX_NUMBER;

const BEGIN: &[u8; 8] = b"AtollTxn";
const END: &[u8; 8] = b"AtollEnd";
const LIST_AT: usize = 24;
const END_BYTES: usize = 48;

/// Its number, and its blocks with where they belong.
type Transaction = (u64, Vec<(u32, Block)>);

/// Blocks in order as runs of neighbours.
fn runs(blocks: &[u32]) -> impl Iterator<Item = &[u32]> {
    blocks.chunk_by(|block, next| block.checked_add(1) == Some(*next))
}

/// Where transactions are kept until they are at home.
#[derive(Debug)]
pub struct Journal {
    device: Arc<dyn Device>,
    block_bytes: usize,
    /// Blocks of the file system: where a transaction's may belong.
    blocks: u32,
    /// The device's blocks of each area, in order.
    areas: [Vec<u32>; 2],
}

impl Journal {
    /// With two areas of the same length.
    ///
    /// # Panics
    /// If they are not, or too short for any transaction.
    pub fn new(
        device: Arc<dyn Device>,
        block_bytes: usize,
        blocks: u32,
        areas: [Vec<u32>; 2],
    ) -> Journal {
        assert_eq!(areas[0].len(), areas[1].len(), "areas of the same length");
        assert!(areas[0].len() > 2, "room for a descriptor, a block and a commit block");
        Journal { device, block_bytes, blocks, areas }
    }

    pub(super) fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    pub(super) fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// The most blocks of a transaction.
    pub fn capacity(&self) -> usize {
        let area = self.areas[0].len();
        (1..area).rev().find(|count| self.descriptor_blocks(*count) + count < area).unwrap_or(0)
    }

    fn descriptor_blocks(&self, count: usize) -> usize {
        (LIST_AT + 4 * count).div_ceil(self.block_bytes)
    }

    /// Writes a transaction to its area. It counts once the device is synced.
    ///
    /// # Panics
    /// If it has more blocks than [`Journal::capacity`].
    pub(super) fn write(&self, number: u64, blocks: &[(u32, Block)]) -> io::Result<()> {
        assert!(blocks.len() <= self.capacity(), "a transaction fits into its area");
        let mut head = vec![0; self.descriptor_blocks(blocks.len()) * self.block_bytes];
        head[..8].copy_from_slice(BEGIN);
        put_u64(&mut head, 8, number);
        put_u32(&mut head, 16, blocks.len() as u32);
        for (i, (home, _)) in blocks.iter().enumerate() {
            put_u32(&mut head, LIST_AT + 4 * i, *home);
        }
        let mut hasher = blake3::Hasher::new();
        hasher.update(&head);
        for (_, block) in blocks {
            hasher.update(block);
        }
        let mut end = vec![0; self.block_bytes];
        end[..8].copy_from_slice(END);
        put_u64(&mut end, 8, number);
        end[16..END_BYTES].copy_from_slice(hasher.finalize().as_bytes());
        let all = head.chunks_exact(self.block_bytes);
        let all = all.chain(blocks.iter().map(|(_, block)| &block[..])).chain([&end[..]]);
        let area = &self.areas[(number % 2) as usize];
        write_blocks(&*self.device, self.block_bytes, area.iter().copied().zip(all))
    }

    /// Makes sure that both areas can be written.
    ///
    /// # Errors
    /// What the device says.
    pub fn reserve(&self) -> io::Result<()> {
        for run in self.areas.iter().flat_map(|area| runs(area)) {
            self.device.reserve(self.offset_of(run), (run.len() * self.block_bytes) as u64)?;
        }
        Ok(())
    }

    /// Where a run begins on the device.
    fn offset_of(&self, run: &[u32]) -> u64 {
        u64::from(run[0]) * self.block_bytes as u64
    }

    fn read_block(&self, area: usize, index: usize, into: &mut [u8]) -> io::Result<()> {
        let block = u64::from(self.areas[area][index]);
        self.device.read_at(block * self.block_bytes as u64, into)
    }

    /// The transaction of an area, if it is whole.
    fn read(&self, area: usize) -> io::Result<Option<Transaction>> {
        let mut first = vec![0; self.block_bytes];
        self.read_block(area, 0, &mut first)?;
        let number = u64_at(&first, 8);
        let count = u32_at(&first, 16) as usize;
        let numbered = number % 2 == area as u64 && number <= MAX_NUMBER;
        if &first[..8] != BEGIN || !numbered || count > self.capacity() {
            return Ok(None);
        }
        let descriptors = self.descriptor_blocks(count);
        let mut bytes = vec![0; (descriptors + count + 1) * self.block_bytes];
        for (index, block) in bytes.chunks_exact_mut(self.block_bytes).enumerate() {
            self.read_block(area, index, block)?;
        }
        let (body, end) = bytes.split_at((descriptors + count) * self.block_bytes);
        let hash = blake3::hash(body);
        if &end[..8] != END || u64_at(end, 8) != number || hash.as_bytes()[..] != end[16..END_BYTES]
        {
            return Ok(None);
        }
        let (list, payload) = body.split_at(descriptors * self.block_bytes);
        let homes = (0..count).map(|i| u32_at(list, LIST_AT + 4 * i));
        if homes.clone().any(|home| home >= self.blocks) {
            return Ok(None);
        }
        let blocks = homes
            .zip(payload.chunks_exact(self.block_bytes))
            .map(|(home, bytes)| (home, Arc::new(bytes.to_vec())))
            .collect();
        Ok(Some((number, blocks)))
    }

    /// The highest number in use, `settled` if no whole transaction has a higher one. Of a
    /// journal that is void, new transactions must be numbered after it, or a crash would
    /// bring the old one home.
    ///
    /// # Errors
    /// What the device says.
    pub fn newest_number(&self, settled: u64) -> io::Result<u64> {
        let numbers = [self.read(0)?, self.read(1)?].into_iter().flatten().map(|(n, _)| n);
        Ok(numbers.max().unwrap_or(settled).max(settled))
    }

    /// Brings home the whole transaction with the highest number above `settled`, and returns
    /// the highest number in use. May be repeated.
    ///
    /// # Errors
    /// What the device says.
    pub fn recover(&self, settled: u64) -> io::Result<u64> {
        let (zero, one) = (self.read(0)?, self.read(1)?);
        let newest = zero.into_iter().chain(one).max_by_key(|(number, _)| *number);
        match newest {
            Some((number, blocks)) if number > settled => {
                write_home(&*self.device, self.block_bytes, &blocks)?;
                self.device.sync()?;
                Ok(number)
            }
            _ => Ok(settled),
        }
    }
}
