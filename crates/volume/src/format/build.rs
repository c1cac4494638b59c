//! Building what is larger than one block as its parts come by: directories from entries
//! in order of their names, pointer trees from data blocks in order.
//!
//! Both keep one unfinished block per level and hand finished ones to a sink, so their
//! memory does not depend on the size of what they build.

use atoll_env::BoxFuture;
use atoll_key::BlockHash;
use atoll_vfs::FileKind;
use bytes::Bytes;

use super::directory::{self, Child, DirectoryEntry, DirectoryRef, starts_block};
use super::inode::{self, Shape};
use super::{
    DIRECTORY_BLOCK_BYTES, FormatError, INDIRECT_POINTERS, MAX_DIRECTORY_LEVELS, Pointer,
    PointerBlock,
};

/// A directory block is not ended by a name before it has this many bytes. With entries
/// of some 90 bytes and one name in 128 that ends a block, leaves have 28 KiB on average
/// and one in twenty is ended by its size instead.
const MIN_DIRECTORY_BLOCK_BYTES: usize = 16 << 10;

/// Takes a finished block and returns its hash.
pub(crate) trait Sink<E> {
    fn emit(&mut self, block: Vec<u8>) -> Result<BlockHash, E>;

    /// Resolves when it can take more; false if it never will.
    fn pace(&mut self) -> BoxFuture<'_, bool> {
        Box::pin(async { true })
    }
}

impl<E, F: FnMut(Vec<u8>) -> Result<BlockHash, E>> Sink<E> for F {
    fn emit(&mut self, block: Vec<u8>) -> Result<BlockHash, E> {
        self(block)
    }
}

/// Builds a directory. Entries come in ascending order of their names.
#[derive(Default)]
pub(crate) struct DirectoryBuilder {
    levels: Vec<Level>,
    scratch: Vec<u8>,
    total: Counts,
}

#[derive(Clone, Copy, Default)]
struct Counts {
    entries: u64,
    subdirectories: u64,
}

impl Counts {
    fn add(&mut self, other: Counts) {
        self.entries += other.entries;
        self.subdirectories += other.subdirectories;
    }
}

/// The unfinished block of one level.
#[derive(Default)]
struct Level {
    block: Vec<u8>,
    nodes: usize,
    counts: Counts,
    first_name: Bytes,
    /// The first child, in an interior block.
    first_child: Option<BlockHash>,
}

impl DirectoryBuilder {
    /// Adds the next entry.
    pub(crate) fn push<E: From<FormatError>>(
        &mut self,
        entry: &DirectoryEntry,
        sink: &mut impl Sink<E>,
    ) -> Result<(), E> {
        let subdirectories = u64::from(entry.kind() == FileKind::Directory);
        let counts = Counts { entries: 1, subdirectories };
        self.total.add(counts);
        let mut bytes = std::mem::take(&mut self.scratch);
        bytes.clear();
        entry.encode(&mut bytes);
        self.add(0, &bytes, &entry.name, counts, sink)?;
        self.scratch = bytes;
        Ok(())
    }

    /// Whether a block of `level` that begins with `name` can be added as it is: blocks of this
    /// level and below are ended, if `name` or their size ends them.
    pub(crate) fn ends_before<E: From<FormatError>>(
        &mut self,
        name: &[u8],
        level: u8,
        sink: &mut impl Sink<E>,
    ) -> Result<bool, E> {
        let upto = self.levels.len().min(usize::from(level) + 1);
        let ends = |at: usize, held: &Level| {
            held.nodes == 0
                || held.block.len() >= MIN_DIRECTORY_BLOCK_BYTES && starts_block(name, at as u8)
        };
        if !self.levels[..upto].iter().enumerate().all(|(at, held)| ends(at, held)) {
            return Ok(false);
        }
        for at in 0..upto {
            if self.levels[at].nodes > 0 {
                let child = self.end_block(at, sink)?;
                self.add_child(at + 1, &child, sink)?;
            }
        }
        Ok(true)
    }

    /// Adds a block of `level` of another directory with all that lies below it, after
    /// [`ends_before`](Self::ends_before) has allowed it.
    pub(crate) fn push_block<E: From<FormatError>>(
        &mut self,
        level: u8,
        child: &Child,
        sink: &mut impl Sink<E>,
    ) -> Result<(), E> {
        self.total.add(Counts { entries: child.entries, subdirectories: child.subdirectories });
        self.add_child(usize::from(level) + 1, child, sink)
    }

    /// Ends the directory.
    pub(crate) fn finish<E: From<FormatError>>(
        mut self,
        sink: &mut impl Sink<E>,
    ) -> Result<DirectoryRef, E> {
        let mut hash = None;
        let mut level = 0;
        while level < self.levels.len() {
            let is_top = level + 1 == self.levels.len();
            let held = &self.levels[level];
            if is_top && held.nodes == 1 && held.first_child.is_some() {
                // A block with one child says no more than the child.
                hash = held.first_child;
                break;
            }
            if held.nodes == 0 {
                level += 1;
                continue;
            }
            let child = self.end_block(level, sink)?;
            if is_top {
                hash = Some(child.hash);
                break;
            }
            self.add_child(level + 1, &child, sink)?;
            level += 1;
        }
        let Counts { entries, subdirectories } = self.total;
        Ok(DirectoryRef { entries, subdirectories, hash })
    }

    fn add<E: From<FormatError>>(
        &mut self,
        level: usize,
        node: &[u8],
        name: &Bytes,
        counts: Counts,
        sink: &mut impl Sink<E>,
    ) -> Result<(), E> {
        while level >= self.levels.len() {
            self.levels.push(Level::default());
        }
        let held = &self.levels[level];
        let full = held.block.len() + node.len() > DIRECTORY_BLOCK_BYTES;
        let ends = held.block.len() >= MIN_DIRECTORY_BLOCK_BYTES && starts_block(name, level as u8);
        if held.nodes > 0 && (full || ends) {
            let child = self.end_block(level, sink)?;
            if level + 1 == usize::from(MAX_DIRECTORY_LEVELS) {
                return Err(FormatError::TooManyLevels(MAX_DIRECTORY_LEVELS + 1).into());
            }
            self.add_child(level + 1, &child, sink)?;
        }
        let held = &mut self.levels[level];
        if held.nodes == 0 {
            held.block.resize(directory::HEADER_BYTES, 0);
            held.first_name = name.clone();
        }
        held.block.extend_from_slice(node);
        held.nodes += 1;
        held.counts.add(counts);
        Ok(())
    }

    fn add_child<E: From<FormatError>>(
        &mut self,
        level: usize,
        child: &Child,
        sink: &mut impl Sink<E>,
    ) -> Result<(), E> {
        let mut bytes = Vec::with_capacity(64);
        child.encode(&mut bytes);
        let counts = Counts { entries: child.entries, subdirectories: child.subdirectories };
        if level >= usize::from(MAX_DIRECTORY_LEVELS) {
            return Err(FormatError::TooManyLevels(MAX_DIRECTORY_LEVELS + 1).into());
        }
        self.add(level, &bytes, &child.first_name, counts, sink)?;
        let held = &mut self.levels[level];
        held.first_child.get_or_insert(child.hash);
        Ok(())
    }

    fn end_block<E>(&mut self, level: usize, sink: &mut impl Sink<E>) -> Result<Child, E> {
        let mut held = std::mem::take(&mut self.levels[level]);
        directory::write_header(&mut held.block, level as u8, held.nodes);
        let hash = sink.emit(held.block)?;
        Ok(Child {
            hash,
            entries: held.counts.entries,
            subdirectories: held.counts.subdirectories,
            first_name: held.first_name,
        })
    }
}

/// Builds the pointer tree of a file that is longer than one data block.
pub(crate) struct PointerBuilder {
    shape: Shape,
    /// Pointers of level *i* that are not in a block yet; the last level goes into the inode.
    levels: Vec<Vec<Pointer>>,
    pushed_blocks: u64,
}

impl PointerBuilder {
    pub(crate) fn new(shape: Shape) -> PointerBuilder {
        let levels = usize::from(shape.indirect_levels()) + 1;
        PointerBuilder { shape, levels: vec![Vec::new(); levels], pushed_blocks: 0 }
    }

    /// Adds the next data block.
    pub(crate) fn push<E>(&mut self, hash: BlockHash, sink: &mut impl Sink<E>) -> Result<(), E> {
        self.pushed_blocks += 1;
        self.add(0, Some(hash), sink)
    }

    /// Adds a hole of `blocks` data blocks, in steps as large as they can be.
    pub(crate) fn push_hole<E>(
        &mut self,
        mut blocks: u64,
        sink: &mut impl Sink<E>,
    ) -> Result<(), E> {
        while blocks > 0 {
            let level = self.hole_level(blocks);
            let span = Shape::span_blocks(level);
            self.pushed_blocks += span;
            self.add(usize::from(level), None, sink)?;
            blocks -= span;
        }
        Ok(())
    }

    /// The highest level at which one pointer can stand for part of a hole that long.
    fn hole_level(&self, blocks: u64) -> u8 {
        let mut level = 0;
        while usize::from(level) + 1 < self.levels.len()
            && self.levels[usize::from(level)].is_empty()
            && Shape::span_blocks(level + 1) <= blocks
        {
            level += 1;
        }
        level
    }

    /// The inode block. All of the file's blocks must have been pushed.
    pub(crate) fn finish<E>(mut self, sink: &mut impl Sink<E>) -> Result<Vec<u8>, E> {
        assert_eq!(self.pushed_blocks, self.shape.data_blocks(), "every block is pushed once");
        for level in 0..self.levels.len() - 1 {
            if !self.levels[level].is_empty() {
                self.end_block(level, sink)?;
            }
        }
        let top = self.levels.pop().expect("there is at least the inode's level");
        Ok(inode::with_pointers(self.shape, &top))
    }

    fn add<E>(&mut self, level: usize, pointer: Pointer, sink: &mut impl Sink<E>) -> Result<(), E> {
        self.levels[level].push(pointer);
        let is_top = level + 1 == self.levels.len();
        if !is_top && self.levels[level].len() as u64 == INDIRECT_POINTERS {
            self.end_block(level, sink)?;
        }
        Ok(())
    }

    /// Moves the pointers of `level` into an indirect block, or into a hole if they are
    /// nothing else.
    fn end_block<E>(&mut self, level: usize, sink: &mut impl Sink<E>) -> Result<(), E> {
        let pointers = std::mem::take(&mut self.levels[level]);
        let above = if pointers.iter().all(Option::is_none) {
            None
        } else {
            Some(sink.emit(PointerBlock::encode(level as u8 + 1, &pointers))?)
        };
        self.add(level + 1, above, sink)
    }
}
