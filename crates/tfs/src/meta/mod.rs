//! Metadata: blocks in memory, and changes of them that reach the disk all or not at all.
//!
//! [`Meta`] holds blocks of metadata (superblock, descriptors, bitmaps, inodes, directories,
//! indirect blocks, attributes, records) up to a fixed number, and collects the changes of
//! the running *transaction*. [`Meta::take`] fixes a transaction; [`Commit::write`], which
//! needs no lock, brings it to the disk as `docs/design/tfs.md` (The journal) says; calls go
//! on in the next transaction meanwhile; [`Meta::finish`] takes the commit back.
//!
//! Invariants, checked where they could break:
//! - a block with changes that are not at home yet is never dropped from memory;
//! - a block freed by a transaction is not given out again before that transaction is
//!   committed ([`Meta::is_resting`]), so that neither the journal nor an older state of the
//!   file system refers to a block that holds something new;
//! - a transaction never outgrows a journal area.
//!
//! It does not know what the blocks mean, and takes no locks: the file system keeps it under
//! its own.

mod cache;
mod journal;

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use thiserror::Error;

use crate::device::Device;
use crate::format::superblock::Superblock;
use crate::runs::Runs;

use cache::Cache;
pub use journal::Journal;

/// A block in memory, shared between readers; changed by copying when it is shared.
pub type Block = Arc<Vec<u8>>;

/// Why metadata could not be read or changed.
#[derive(Debug, Error)]
pub enum MetaError {
    /// A block number lies outside the file system: something that refers to it is damaged.
    #[error("block {0} lies outside the file system")]
    OutOfRange(u32),
    /// The device failed a write.
    #[error("writing: {0}")]
    Write(io::Error),
    /// The device failed.
    #[error("reading block {block}: {error}")]
    Read {
        /// Which block.
        block: u32,
        /// Why.
        error: io::Error,
    },
}

/// What a block belongs to: transactions are committed early by the number of ordinary ones,
/// so that records alone change nothing of when.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Part {
    /// ext2's own.
    Ordinary,
    /// TFS's records.
    Records,
}

/// Blocks of metadata and their transactions.
#[derive(Debug)]
pub struct Meta {
    device: Arc<dyn Device>,
    block_bytes: usize,
    blocks: u32,
    cache: Cache,
    /// Blocks that the running transaction has changed.
    changed: BTreeMap<u32, Part>,
    changed_ordinary: usize,
    /// Blocks that the running transaction has freed.
    freed: Runs,
    /// Blocks freed by the transaction being committed.
    freed_before: Runs,
    /// Blocks of the transaction being committed: at home only when it is done.
    committing: BTreeMap<u32, Block>,
    /// The most blocks of a transaction.
    capacity: usize,
    next_number: u64,
}

/// A fixed transaction on its way to the disk.
#[derive(Debug)]
pub struct Commit {
    number: u64,
    blocks: Vec<(u32, Block)>,
}

impl Meta {
    /// For a file system of `blocks` blocks on `device`, with room for `cached_blocks` and
    /// transactions of what `journal` holds, numbered after `last_number`.
    pub fn new(
        device: Arc<dyn Device>,
        blocks: u32,
        journal: &Journal,
        cached_blocks: usize,
        last_number: u64,
    ) -> Meta {
        Meta {
            capacity: journal.capacity(),
            next_number: last_number + 1,
            ..Meta::empty(device, journal.block_bytes(), blocks, cached_blocks)
        }
    }

    /// For a file system that has no journal yet: changes reach the disk by
    /// [`Meta::flush`].
    pub fn unjournaled(
        device: Arc<dyn Device>,
        superblock: &Superblock,
        cached_blocks: usize,
    ) -> Meta {
        let block_bytes = superblock.block_bytes() as usize;
        Meta::empty(device, block_bytes, superblock.blocks(), cached_blocks)
    }

    fn empty(
        device: Arc<dyn Device>,
        block_bytes: usize,
        blocks: u32,
        cached_blocks: usize,
    ) -> Meta {
        Meta {
            device,
            block_bytes,
            blocks,
            cache: Cache::new(cached_blocks),
            changed: BTreeMap::new(),
            changed_ordinary: 0,
            freed: Runs::default(),
            freed_before: Runs::default(),
            committing: BTreeMap::new(),
            capacity: 0,
            next_number: 0,
        }
    }

    /// Writes all changes where they belong, without a journal: a crash may leave any part of
    /// them.
    ///
    /// # Errors
    /// [`MetaError::Write`].
    pub fn flush(&mut self) -> Result<(), MetaError> {
        let changed = std::mem::take(&mut self.changed);
        self.changed_ordinary = 0;
        let blocks: Vec<(u32, Block)> = changed
            .into_keys()
            .map(|at| {
                let bytes = self.cache.block_mut(at).expect("changed blocks stay in memory");
                (at, bytes.clone())
            })
            .collect();
        write_home(&*self.device, self.block_bytes, &blocks).map_err(MetaError::Write)
    }

    /// Size of a block, bytes.
    pub fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    fn load(&mut self, block: u32) -> Result<&mut Block, MetaError> {
        if block >= self.blocks {
            return Err(MetaError::OutOfRange(block));
        }
        if !self.cache.touch(block) {
            let bytes = match self.committing.get(&block) {
                Some(bytes) => bytes.clone(),
                None => {
                    let mut bytes = self.cache.spare(self.block_bytes);
                    let offset = u64::from(block) * self.block_bytes as u64;
                    self.device
                        .read_at(offset, Arc::<Vec<u8>>::make_mut(&mut bytes))
                        .map_err(|error| MetaError::Read { block, error })?;
                    bytes
                }
            };
            let changed = &self.changed;
            self.cache.insert(block, bytes, |other| changed.contains_key(&other));
        }
        Ok(self.cache.block_mut(block).expect("present, or just inserted"))
    }

    /// A block as it is now.
    ///
    /// # Errors
    /// [`MetaError`].
    pub fn read(&mut self, block: u32) -> Result<Block, MetaError> {
        self.load(block).cloned()
    }

    /// A block to change, within the running transaction.
    ///
    /// # Errors
    /// [`MetaError`].
    pub fn change(&mut self, block: u32, part: Part) -> Result<&mut [u8], MetaError> {
        self.load(block)?;
        self.note(block, part);
        let held = self.cache.block_mut(block).expect("just loaded");
        Ok(Arc::<Vec<u8>>::make_mut(held))
    }

    /// A block of zeros to fill, within the running transaction, without reading what it held.
    ///
    /// # Errors
    /// [`MetaError::OutOfRange`].
    pub fn blank(&mut self, block: u32, part: Part) -> Result<&mut [u8], MetaError> {
        if block >= self.blocks {
            return Err(MetaError::OutOfRange(block));
        }
        self.note(block, part);
        let changed = &self.changed;
        let mut zeros = self.cache.spare(self.block_bytes);
        Arc::<Vec<u8>>::make_mut(&mut zeros).fill(0);
        self.cache.insert(block, zeros, |other| changed.contains_key(&other));
        let held = self.cache.block_mut(block).expect("just inserted");
        Ok(Arc::<Vec<u8>>::make_mut(held))
    }

    fn note(&mut self, block: u32, part: Part) {
        if self.changed.insert(block, part).is_none() && part == Part::Ordinary {
            self.changed_ordinary += 1;
        }
    }

    /// Says that `count` blocks from `first` on were freed: what was changed in them needs not
    /// reach the disk, and they rest until the running transaction is committed.
    pub fn free(&mut self, first: u32, count: u32) {
        for block in first..first.saturating_add(count) {
            if self.changed.remove(&block) == Some(Part::Ordinary) {
                self.changed_ordinary -= 1;
            }
            self.cache.remove(block);
        }
        self.freed.insert(first, count);
    }

    /// Whether a free block must not be used yet, because the transaction that freed it is
    /// not committed.
    pub fn is_resting(&self, block: u32) -> bool {
        self.freed.contains(block) || self.freed_before.contains(block)
    }

    /// Blocks that rest.
    pub fn resting(&self) -> u64 {
        self.freed.blocks() + self.freed_before.blocks()
    }

    /// Whether calls that may change `reserved` blocks more can still be let in.
    pub fn has_room(&self, reserved: usize) -> bool {
        // A quarter: each ordinary block brings at most two blocks of records with it.
        self.changed.len() + reserved <= self.capacity && self.changed_ordinary <= self.capacity / 4
    }

    /// Whether there is soon no room for more: the transaction is more than half full.
    pub fn fills_up(&self) -> bool {
        self.changed.len() > self.capacity / 2 || self.changed_ordinary > self.capacity / 8
    }

    /// The most blocks of a transaction.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Whether nothing waits to be committed.
    pub fn is_settled(&self) -> bool {
        self.changed.is_empty() && self.freed.is_empty()
    }

    /// Fixes the running transaction and begins the next. The caller lets no call be under
    /// way, and finishes each commit before the next.
    ///
    /// # Panics
    /// If a commit is under way.
    pub fn take(&mut self) -> Commit {
        assert!(self.committing.is_empty(), "one commit at a time");
        let changed = std::mem::take(&mut self.changed);
        self.changed_ordinary = 0;
        assert!(changed.len() <= self.capacity, "a transaction fits into its journal area");
        for block in changed.into_keys() {
            let bytes = self.cache.block_mut(block).expect("changed blocks stay in memory");
            self.committing.insert(block, bytes.clone());
        }
        self.freed_before = std::mem::take(&mut self.freed);
        let number = self.next_number;
        let blocks: Vec<(u32, Block)> =
            self.committing.iter().map(|(at, bytes)| (*at, bytes.clone())).collect();
        // One that changes nothing is not written and has no number: areas must be used in turn,
        // or the transaction before the last would be the newest whole one during a write.
        if !blocks.is_empty() {
            self.next_number += 1;
        }
        Commit { number, blocks }
    }

    /// Says that the commit taken last is done. (One that failed is never finished: what
    /// stands on the disk is then unknown, and the file system changes nothing any more.)
    pub fn finish(&mut self) {
        self.committing.clear();
        self.freed_before = Runs::default();
    }

    /// The number of the transaction taken last.
    pub fn last_number(&self) -> u64 {
        self.next_number - 1
    }
}

impl Commit {
    /// Brings the transaction to the disk: after this, it survives power loss, and so does
    /// all data written before the transaction was taken.
    ///
    /// # Errors
    /// What the device says; it is then not known what reached the disk.
    pub fn write(&self, journal: &Journal) -> io::Result<()> {
        let device = journal.device();
        device.sync()?;
        if self.blocks.is_empty() {
            return Ok(());
        }
        journal.write(self.number, &self.blocks)?;
        device.sync()?;
        write_home(&**device, journal.block_bytes(), &self.blocks)
    }
}

fn write_home(device: &dyn Device, block_bytes: usize, blocks: &[(u32, Block)]) -> io::Result<()> {
    write_blocks(device, block_bytes, blocks.iter().map(|(at, bytes)| (*at, &bytes[..])))
}

/// The most bytes that are laid out for one write.
const PIECE_BYTES: usize = 256 << 10;

/// Writes blocks with where they go, neighbours together.
fn write_blocks<'a>(
    device: &dyn Device,
    block_bytes: usize,
    blocks: impl Iterator<Item = (u32, &'a [u8])>,
) -> io::Result<()> {
    let mut piece: Vec<u8> = Vec::new();
    let mut start = 0;
    for (at, bytes) in blocks {
        let offset = u64::from(at) * block_bytes as u64;
        if piece.len() >= PIECE_BYTES || offset != start + piece.len() as u64 {
            write_piece(device, start, &piece)?;
            piece.clear();
            start = offset;
        }
        piece.extend_from_slice(bytes);
    }
    write_piece(device, start, &piece)
}

fn write_piece(device: &dyn Device, start: u64, piece: &[u8]) -> io::Result<()> {
    if piece.is_empty() { Ok(()) } else { device.write_at(start, piece) }
}

#[cfg(test)]
mod tests;
