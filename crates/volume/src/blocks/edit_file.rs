//! A file with some of its blocks changed: data and indirect blocks in which nothing changes stay
//! as they are, so that a change writes its data block, the indirect blocks above it and the inode
//! block. Of a data block that changes in part the rest is read.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use atoll_env::BoxFuture;
use atoll_key::BlockHash;
use bytes::Bytes;

use super::error::{BlockError, EditError};
use super::file::File;
use crate::format::build::Sink;
use crate::format::inode::{self, Shape};
use crate::format::{Pointer, PointerBlock, is_zero};

/// Bases of changed pages that are read ahead of the block that is written.
const BASES_AHEAD: usize = 16;

/// A data block that takes the place of the old one.
#[derive(Clone, Debug)]
pub(crate) enum NewData {
    /// These bytes, and zeros where the block is longer.
    Whole(HeldBytes),
    /// Pages, by number: these bytes, and zeros where the page is longer. The rest of the block is
    /// as it was.
    Pages(BTreeMap<u64, HeldBytes>),
    /// Zeros.
    Hole,
}

/// Bytes that are not stored yet.
#[derive(Clone, Debug)]
pub(crate) enum HeldBytes {
    /// In memory.
    Data(Arc<Vec<u8>>),
    /// In the swap file.
    Swapped(Swapped),
}

impl HeldBytes {
    pub(crate) fn len(&self) -> usize {
        match self {
            HeldBytes::Data(data) => data.len(),
            HeldBytes::Swapped(swapped) => swapped.len as usize,
        }
    }

    pub(crate) fn truncate(&mut self, len: usize) {
        match self {
            HeldBytes::Data(data) if data.len() > len => Arc::make_mut(data).truncate(len),
            HeldBytes::Data(_) => {}
            HeldBytes::Swapped(swapped) => swapped.len = swapped.len.min(len as u32),
        }
    }
}

/// The bytes of a block are held by pages of 2^this bytes: of 4 KiB, as programs and the kernel write,
/// but at most 16 a block, since each may have to be fetched by itself.
pub(crate) fn page_size_log2(block_size_log2: u8) -> u8 {
    block_size_log2.saturating_sub(4).max(12)
}

/// Where bytes lie in a swap file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Swapped {
    /// Which file, of those that were there one after another.
    pub(crate) generation: u64,
    /// Where they begin.
    pub(crate) offset: u64,
    /// How long they are there.
    pub(crate) stored_len: u32,
    /// How many of them count.
    pub(crate) len: u32,
}

/// Reads what was swapped out.
pub(crate) trait SwapIn: Send + Sync {
    /// The bytes; `None` if they are not needed any more, or somewhere else. An error says why they
    /// cannot be read.
    fn swap_in(&self, swapped: Swapped) -> BoxFuture<'_, Result<Option<Bytes>, String>>;
}

/// Where nothing is swapped out.
pub(crate) struct NoSwap;

impl SwapIn for NoSwap {
    fn swap_in(&self, _: Swapped) -> BoxFuture<'_, Result<Option<Bytes>, String>> {
        Box::pin(async { Err("nothing was swapped out".into()) })
    }
}

/// The changes of a file.
pub(crate) struct FileEdit<'a> {
    /// The file as it was.
    pub(crate) old: File,
    /// Its bytes from here on are zeros now, if it has that many.
    pub(crate) cut: u64,
    /// What it becomes.
    pub(crate) shape: Shape,
    /// Blocks that are new, by number.
    pub(crate) new: BTreeMap<u64, NewData>,
    /// Where some of them are.
    pub(crate) swap: &'a dyn SwapIn,
}

/// A file that was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EditedFile {
    /// Its inode block.
    pub(crate) inode: BlockHash,
    /// Space its data takes, in units of 512 bytes.
    pub(crate) blocks_512: u64,
}

/// Writes the file; new blocks go to `sink`. `old_blocks_512` is the space that the old one took.
pub(crate) async fn edit_file<S: Sink<EditError> + Send>(
    edit: &FileEdit<'_>,
    old_blocks_512: u64,
    sink: &mut S,
) -> Result<EditedFile, EditError> {
    let shape = edit.shape;
    if shape.is_inline() {
        let bytes = edit.bytes(0).await?.unwrap_or_default();
        let mut block = inode::header(shape, shape.size_bytes as usize);
        let inline_from = block.len();
        block.extend_from_slice(&bytes);
        block.resize(inline_from + shape.size_bytes as usize, 0);
        let inode = sink.emit(block)?;
        return Ok(EditedFile { inode, blocks_512: shape.size_bytes.div_ceil(512) });
    }
    let is_cut = edit.old.shape().is_some_and(|old| edit.cut < old.size_bytes);
    let space = if is_cut { Space::All(0) } else { Space::Gained(0) };
    let mut work = Work { edit, sink, space, read_ahead_to: 0 };
    let level = shape.indirect_levels();
    let mut top = Vec::new();
    for index in 0..shape.top_pointers() {
        top.push(work.pointer(level, index * Shape::span_blocks(level)).await?);
    }
    let blocks_512 = match work.space {
        Space::Gained(gained) => old_blocks_512.saturating_add_signed(gained),
        Space::All(space) => space,
    };
    let inode = sink.emit(inode::with_pointers(shape, &top))?;
    Ok(EditedFile { inode, blocks_512: blocks_512.min(shape.size_bytes.div_ceil(512)) })
}

impl FileEdit<'_> {
    /// Bytes of the old file that are still to be seen.
    fn old_size(&self) -> u64 {
        self.old.shape().map_or(0, |shape| shape.size_bytes).min(self.cut)
    }

    /// Block `block` as it becomes; `None` if that is nothing but zeros.
    async fn bytes(&self, block: u64) -> Result<Option<Vec<u8>>, EditError> {
        let len = self.shape.block_len_bytes(block) as usize;
        let mut bytes = match self.new.get(&block) {
            Some(NewData::Hole) => return Ok(None),
            Some(NewData::Whole(held)) => self.held(held, len).await?,
            Some(NewData::Pages(pages)) => {
                let mut bytes = self.base(block).await?;
                bytes.resize(len, 0);
                let page_bytes = 1 << page_size_log2(self.shape.block_size_log2);
                for (page, held) in pages {
                    let from = (*page as usize * page_bytes).min(len);
                    let page = &mut bytes[from..len.min(from + page_bytes)];
                    let held = self.held(held, page.len()).await?;
                    page[..held.len()].copy_from_slice(&held);
                    page[held.len()..].fill(0);
                }
                bytes
            }
            None => self.base(block).await?,
        };
        if is_zero(&bytes) {
            return Ok(None);
        }
        bytes.resize(len, 0);
        Ok(Some(bytes))
    }

    /// Up to `len` bytes that are not stored yet.
    async fn held(&self, held: &HeldBytes, len: usize) -> Result<Vec<u8>, EditError> {
        match held {
            HeldBytes::Data(data) => Ok(data[..data.len().min(len)].to_vec()),
            HeldBytes::Swapped(swapped) => {
                let found = self.swap.swap_in(*swapped).await.map_err(EditError::Swap)?;
                let is_gone = || EditError::Swap("what was swapped out is gone".into());
                let data = found.ok_or_else(is_gone)?;
                Ok(data[..data.len().min(len)].to_vec())
            }
        }
    }

    /// What of the old file's block `block` is still to be seen, unless pages hide all of it.
    async fn base(&self, block: u64) -> Result<Vec<u8>, EditError> {
        let base = self.base_range(block);
        if base.is_empty() {
            return Ok(Vec::new());
        }
        let len = u32::try_from(base.end - base.start).expect("a block is short");
        Ok(self.old.read(base.start, len).await?.to_vec())
    }

    fn base_range(&self, block: u64) -> Range<u64> {
        let start = block << self.shape.block_size_log2;
        let end = self.old_size().min(start + self.shape.block_len_bytes(block)).max(start);
        let pages = (end - start).div_ceil(1 << page_size_log2(self.shape.block_size_log2));
        match self.new.get(&block) {
            Some(NewData::Pages(held)) if held.range(..pages).count() as u64 == pages => {
                start..start
            }
            Some(NewData::Pages(_)) | None => start..end,
            Some(NewData::Whole(_) | NewData::Hole) => start..start,
        }
    }

    /// Begins to read the bases of changed pages from block `first` on; returns the first block
    /// whose base is not among them.
    fn read_ahead(&self, first: u64) -> u64 {
        let changed = self.new.range(first..).filter(|(_, new)| matches!(new, NewData::Pages(_)));
        let bases: Vec<u64> = changed
            .map(|(block, _)| *block)
            .filter(|block| !self.base_range(*block).is_empty())
            .take(BASES_AHEAD)
            .collect();
        let next = bases.last().map_or(u64::MAX, |last| last + 1);
        if bases.len() > 1 {
            self.old.prefetch(bases);
        }
        next
    }

    /// The space that the old file's block `block` took.
    async fn old_space(&self, block: u64) -> Result<u64, BlockError> {
        match self.old.shape() {
            Some(old) if old.is_inline() && block == 0 => Ok(old.size_bytes.div_ceil(512)),
            Some(old) if !old.is_inline() && block < old.data_blocks() => {
                self.old.space_below(0, block).await
            }
            _ => Ok(0),
        }
    }

    /// Whether the old file's blocks from `first` on, as far as a pointer of `level` covers them,
    /// are what they were.
    fn is_unchanged(&self, level: u8, first: u64) -> bool {
        let end = first.saturating_add(Shape::span_blocks(level));
        let end_byte = end.saturating_mul(self.shape.block_size_bytes());
        self.new.range(first..end).next().is_none()
            && self.cut >= end_byte.min(self.shape.size_bytes)
            && self.old.shape().is_some_and(|old| {
                !old.is_inline() && old.block_size_log2 == self.shape.block_size_log2
            })
    }

    /// Whether there is nothing but zeros from block `first` on, as far as a pointer of `level`
    /// covers it.
    fn is_hole(&self, level: u8, first: u64) -> bool {
        let end = first.saturating_add(Shape::span_blocks(level));
        let has_data = |new: &NewData| !matches!(new, NewData::Hole);
        first << self.shape.block_size_log2 >= self.old_size()
            && !self.new.range(first..end).any(|(_, new)| has_data(new))
    }
}

struct Work<'a, S> {
    edit: &'a FileEdit<'a>,
    sink: &'a mut S,
    space: Space,
    /// The bases of the blocks before this one are on their way.
    read_ahead_to: u64,
}

/// The space of a file's data, in units of 512 bytes.
enum Space {
    /// Of new data, less that of data that it replaces.
    Gained(i64),
    /// Of all data: how much a cut took away is not known.
    All(u64),
}

impl<S: Sink<EditError> + Send> Work<'_, S> {
    /// The pointer of `level` to what begins at block `first`.
    fn pointer(&mut self, level: u8, first: u64) -> BoxFuture<'_, Result<Pointer, EditError>> {
        Box::pin(async move {
            let (edit, shape) = (self.edit, self.edit.shape);
            if edit.is_unchanged(level, first)
                && let Some(kept) = edit.old.pointer(level, first, shape).await?
            {
                if let (Space::All(space), Some(_)) = (&mut self.space, kept) {
                    *space += edit.old.space_below(level, first).await?;
                }
                return Ok(kept);
            }
            if level == 0 {
                return self.data(first).await;
            }
            if edit.is_hole(level, first) {
                return Ok(None);
            }
            let mut pointers = Vec::new();
            for index in 0..shape.pointers_below(level, first) {
                let below = first + index * Shape::span_blocks(level - 1);
                pointers.push(self.pointer(level - 1, below).await?);
            }
            if pointers.iter().all(Option::is_none) {
                return Ok(None);
            }
            Ok(Some(self.sink.emit(PointerBlock::encode(level, &pointers))?))
        })
    }

    async fn data(&mut self, block: u64) -> Result<Pointer, EditError> {
        let edit = self.edit;
        if block >= self.read_ahead_to {
            self.read_ahead_to = edit.read_ahead(block);
        }
        let bytes = edit.bytes(block).await?;
        let new_512 = bytes.as_ref().map_or(0, |bytes| bytes.len().div_ceil(512) as u64);
        match &mut self.space {
            Space::All(space) => *space += new_512,
            Space::Gained(gained) => {
                *gained += new_512 as i64 - self.edit.old_space(block).await? as i64
            }
        }
        Ok(match bytes {
            None => None,
            Some(bytes) => {
                let hash = self.sink.emit(bytes)?;
                if !self.sink.pace().await {
                    return Err(EditError::Refused);
                }
                Some(hash)
            }
        })
    }
}
