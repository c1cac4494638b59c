//! The bytes of a file: as the ring has them, and what has changed since.
//!
//! Three layers, the upper hides the lower: blocks changed since the last flush began, blocks that
//! are being flushed, and the stored file. A truncation is a *cut*: from there on the layers below
//! read as zeros.
//!
//! It is plain data: a call that needs something stored changes nothing and returns
//! [`ContentStop::Need`]; the caller fetches it into [`LoadedContent`] and makes the call again. What
//! is loaded is named by hashes of contents, so that it cannot be out of date.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use atoll_key::BlockHash;
use atoll_vfs::Errno;
use bytes::Bytes;

use super::cache::BlockCache;
use super::edit_file::{NewData, SwapIn, Swapped};
use super::error::LoadError;
use super::file::File;
use crate::format::MAX_FILE_BYTES;
use crate::format::inode::Shape;
use crate::format::is_zero;

/// Stored blocks that one call may turn into holes: each costs memory until the next flush.
const MAX_PUNCHED_BLOCKS: u64 = 1 << 20;

/// About what a hole costs in memory, and a block that was swapped out: enough of them make a writer
/// wait, as data does.
const HOLE_BYTES: u64 = 64;

/// A file as the ring has it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Stored {
    pub(crate) inode: Option<BlockHash>,
    pub(crate) size_bytes: u64,
    pub(crate) blocks_512: u64,
}

/// Where bytes are to be found.
#[derive(Clone, Debug)]
pub(crate) enum Piece {
    /// These.
    Data(Arc<Vec<u8>>, Range<usize>),
    /// In the swap file; these of them.
    Swapped(Swapped, Range<usize>),
    /// So many zeros.
    Zeros(usize),
    /// In the stored file.
    Stored(Range<u64>),
}

/// What a search for data or a hole needs at an offset.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    /// Where the bytes from there to the end of the block are.
    pub(crate) pieces: Vec<Piece>,
    /// The end of the block, or of the file.
    pub(crate) end: u64,
    /// The next offset with data that is not stored yet.
    pub(crate) next_unstored: u64,
    pub(crate) stored: Stored,
    pub(crate) size_bytes: u64,
}

/// What a call on a file's contents needs of what is stored.
#[derive(Clone, Debug)]
pub(crate) enum ContentNeed {
    /// The block size of a file.
    Shape(Stored),
    /// Bytes of a file.
    Bytes(Stored, Range<u64>),
    /// Bytes that were swapped out.
    Swapped(Swapped),
}

/// Why a call did nothing.
#[derive(Clone, Debug)]
pub(crate) enum ContentStop {
    /// It may not, or cannot.
    Errno(Errno),
    /// Something stored is needed first.
    Need(ContentNeed),
}

impl From<Errno> for ContentStop {
    fn from(errno: Errno) -> ContentStop {
        ContentStop::Errno(errno)
    }
}

impl From<ContentNeed> for ContentStop {
    fn from(need: ContentNeed) -> ContentStop {
        ContentStop::Need(need)
    }
}

/// What was fetched for a call.
#[derive(Debug, Default)]
pub(crate) struct LoadedContent {
    shapes: BTreeMap<BlockHash, Shape>,
    bytes: BTreeMap<(BlockHash, u64), Bytes>,
    swapped: BTreeMap<Swapped, Arc<Vec<u8>>>,
}

impl LoadedContent {
    /// Fetches what a call needs.
    pub(crate) async fn load(
        &mut self,
        need: ContentNeed,
        cache: &Arc<BlockCache>,
        swap: &dyn SwapIn,
    ) -> Result<(), LoadError> {
        match need {
            ContentNeed::Shape(stored) => {
                let file = File::open(cache, stored.inode, stored.size_bytes).await?;
                let hash = stored.inode.expect("only stored files are asked about");
                self.shapes.insert(hash, file.shape().expect("it has an inode block"));
            }
            ContentNeed::Bytes(stored, range) => {
                let file = File::open(cache, stored.inode, stored.size_bytes).await?;
                let len = u32::try_from(range.end - range.start).expect("a block is short");
                let bytes = file.read(range.start, len).await?;
                let hash = stored.inode.expect("only stored files are asked about");
                self.bytes.insert((hash, range.start), bytes);
            }
            ContentNeed::Swapped(swapped) => {
                // If it is somewhere else by now, the next call says where.
                if let Some(bytes) = swap.swap_in(swapped).await.map_err(LoadError::Swap)? {
                    self.swapped.insert(swapped, Arc::new(bytes.to_vec()));
                }
            }
        }
        Ok(())
    }

    fn shape(&self, stored: Stored) -> Result<Shape, ContentNeed> {
        let hash = stored.inode.expect("a file that is not stored needs no block size");
        self.shapes.get(&hash).copied().ok_or(ContentNeed::Shape(stored))
    }

    fn bytes(&self, stored: Stored, range: Range<u64>) -> Result<&Bytes, ContentNeed> {
        let hash = stored.inode.expect("stored bytes lie in a stored file");
        let key = (hash, range.start);
        let found = self.bytes.get(&key).filter(|b| b.len() as u64 >= range.end - range.start);
        found.ok_or(ContentNeed::Bytes(stored, range))
    }

    fn swapped(&self, swapped: Swapped) -> Result<Arc<Vec<u8>>, ContentNeed> {
        self.swapped.get(&swapped).cloned().ok_or(ContentNeed::Swapped(swapped))
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Content {
    pub(crate) size_bytes: u64,
    pub(crate) block_size_log2: u8,
    /// Whether the block size is known to be that of the stored file, or does not matter.
    knows_block_size: bool,
    pub(crate) stored: Stored,
    pub(crate) changed: BTreeMap<u64, NewData>,
    /// The layers below are zeros from here on.
    pub(crate) cut: u64,
    pub(crate) flushing: BTreeMap<u64, NewData>,
    /// The stored file is zeros from here on.
    pub(crate) flushing_cut: u64,
    /// Whether anything differs from what is stored or being flushed.
    pub(crate) is_changed: bool,
    is_flushing: bool,
    /// Bytes in the upper two layers.
    pub(crate) held_bytes: u64,
}

impl Content {
    pub(crate) fn of(stored: Stored, block_size_log2: u8) -> Content {
        Content {
            size_bytes: stored.size_bytes,
            block_size_log2,
            knows_block_size: stored.inode.is_none(),
            stored,
            changed: BTreeMap::new(),
            cut: u64::MAX,
            flushing: BTreeMap::new(),
            flushing_cut: u64::MAX,
            is_changed: false,
            is_flushing: false,
            held_bytes: 0,
        }
    }

    fn block_bytes(&self) -> u64 {
        1 << self.block_size_log2
    }

    /// The end of the bytes that are read from the stored file, unless an upper layer has them.
    fn stored_end(&self) -> u64 {
        self.stored.size_bytes.min(self.cut).min(self.flushing_cut)
    }

    /// Takes the stored file's block size: its blocks are changed one by one.
    fn know_block_size(&mut self, loaded: &LoadedContent) -> Result<(), ContentStop> {
        if self.knows_block_size || self.stored.inode.is_none() {
            return Ok(());
        }
        let shape = loaded.shape(self.stored)?;
        if shape.block_size_log2 > self.block_size_log2 || !shape.is_inline() {
            self.block_size_log2 = shape.block_size_log2;
        }
        self.knows_block_size = true;
        Ok(())
    }

    /// Where the bytes of `range` are, which lies within the file.
    pub(crate) fn pieces(&self, range: Range<u64>) -> Vec<Piece> {
        let mut pieces = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let block = at >> self.block_size_log2;
            let start = block << self.block_size_log2;
            let end = range.end.min(start + self.block_bytes());
            self.pieces_of(block, at..end, &mut pieces);
            at = end;
        }
        pieces
    }

    /// How the file is laid out at `offset`.
    pub(crate) fn layout(&self, offset: u64) -> Layout {
        let size_bytes = self.size_bytes;
        let block_end = ((offset >> self.block_size_log2) + 1) << self.block_size_log2;
        let end = block_end.min(size_bytes);
        let pieces = if offset < end { self.pieces(offset..end) } else { Vec::new() };
        let next_unstored = self.next_unstored_data(offset);
        Layout { pieces, end, next_unstored, stored: self.stored, size_bytes }
    }

    fn pieces_of(&self, block: u64, range: Range<u64>, pieces: &mut Vec<Piece>) {
        let start = block << self.block_size_log2;
        let (upper, end) = match self.changed.get(&block) {
            Some(data) => (Some(data), range.end),
            None => (self.flushing.get(&block), range.end.min(self.cut)),
        };
        let known = match upper {
            Some(NewData::Hole) => range.start,
            Some(NewData::Data(_) | NewData::Swapped(_)) => {
                let len = upper.map_or(0, len_of);
                let from = (range.start - start) as usize;
                let upto = len.min((end.max(start) - start) as usize);
                match upper {
                    _ if from >= upto => {}
                    Some(NewData::Data(data)) => {
                        pieces.push(Piece::Data(data.clone(), from..upto));
                    }
                    Some(NewData::Swapped(swapped)) => {
                        pieces.push(Piece::Swapped(*swapped, from..upto));
                    }
                    Some(NewData::Hole) | None => {}
                }
                range.start.max(start + upto as u64)
            }
            None => {
                let upto = self.stored_end().min(range.end);
                if range.start < upto {
                    match pieces.last_mut() {
                        Some(Piece::Stored(before)) if before.end == range.start => {
                            before.end = upto;
                        }
                        _ => pieces.push(Piece::Stored(range.start..upto)),
                    }
                }
                range.start.max(upto)
            }
        };
        if known < range.end {
            pieces.push(Piece::Zeros((range.end - known) as usize));
        }
    }

    /// What a block that is to be changed in part holds now.
    fn before(&self, block: u64, loaded: &LoadedContent) -> Result<Arc<Vec<u8>>, ContentStop> {
        let start = block << self.block_size_log2;
        match self.changed.get(&block) {
            Some(NewData::Data(data)) => return Ok(data.clone()),
            Some(NewData::Swapped(swapped)) => return Ok(loaded.swapped(*swapped)?),
            Some(NewData::Hole) => return Ok(Arc::default()),
            None => {}
        }
        let left = self.cut.saturating_sub(start).min(self.block_bytes()) as usize;
        match self.flushing.get(&block) {
            Some(NewData::Data(data)) if data.len() <= left => return Ok(data.clone()),
            Some(NewData::Data(data)) => return Ok(Arc::new(data[..left].to_vec())),
            Some(NewData::Swapped(swapped)) => {
                let mut data = loaded.swapped(*swapped)?;
                if data.len() > left {
                    Arc::make_mut(&mut data).truncate(left);
                }
                return Ok(data);
            }
            Some(NewData::Hole) => return Ok(Arc::default()),
            None => {}
        }
        let end = self.stored_end().min(start + self.block_bytes());
        if end <= start {
            return Ok(Arc::default());
        }
        Ok(Arc::new(loaded.bytes(self.stored, start..end)?.to_vec()))
    }

    /// Whether nothing of a block is left when `range` of it is written.
    fn is_covered(&self, block: u64, range: &Range<u64>) -> bool {
        let start = block << self.block_size_log2;
        let end = self.size_bytes.min(start + self.block_bytes());
        range.start <= start && range.end >= end
    }

    fn blocks_of(&self, range: &Range<u64>) -> Range<u64> {
        range.start >> self.block_size_log2..range.end.div_ceil(self.block_bytes())
    }

    /// The blocks at both ends of `range` that are changed in part, with what they hold.
    fn ends(
        &self,
        range: &Range<u64>,
        loaded: &LoadedContent,
    ) -> Result<BTreeMap<u64, Arc<Vec<u8>>>, ContentStop> {
        let blocks = self.blocks_of(range);
        let mut ends = BTreeMap::new();
        for block in [blocks.start, blocks.end - 1] {
            if !self.is_covered(block, range) {
                ends.insert(block, self.before(block, loaded)?);
            }
        }
        Ok(ends)
    }

    /// Writes `data` at `offset`.
    pub(crate) fn write(
        &mut self,
        offset: u64,
        data: &[u8],
        loaded: &LoadedContent,
    ) -> Result<(), ContentStop> {
        let end = offset.checked_add(data.len() as u64).filter(|end| *end <= MAX_FILE_BYTES);
        let range = offset..end.ok_or(Errno::EFBIG)?;
        if data.is_empty() {
            return Ok(());
        }
        self.know_block_size(loaded)?;
        let mut ends = self.ends(&range, loaded)?;
        for block in self.blocks_of(&range) {
            let start = block << self.block_size_log2;
            let (from, upto) = (range.start.max(start), range.end.min(start + self.block_bytes()));
            let part = &data[(from - range.start) as usize..(upto - range.start) as usize];
            let mut bytes = ends.remove(&block).unwrap_or_default();
            // A block that is held twice would be copied.
            drop(self.remove(block));
            let (from, upto) = ((from - start) as usize, (upto - start) as usize);
            if from == 0 && bytes.len() <= upto {
                bytes = Arc::new(part.to_vec());
            } else {
                let held = Arc::make_mut(&mut bytes);
                if held.len() < upto {
                    held.resize(upto, 0);
                }
                held[from..upto].copy_from_slice(part);
            }
            self.put(block, NewData::Data(bytes));
        }
        self.size_bytes = self.size_bytes.max(range.end);
        self.is_changed = true;
        Ok(())
    }

    /// Makes the file `size_bytes` long.
    pub(crate) fn resize(
        &mut self,
        size_bytes: u64,
        loaded: &LoadedContent,
    ) -> Result<(), ContentStop> {
        if size_bytes > MAX_FILE_BYTES {
            return Err(Errno::EFBIG.into());
        }
        if size_bytes > 0 {
            self.know_block_size(loaded)?;
        }
        if size_bytes < self.size_bytes {
            self.cut = self.cut.min(size_bytes);
            let kept = size_bytes.div_ceil(self.block_bytes());
            let gone: Vec<u64> = self.changed.range(kept..).map(|(block, _)| *block).collect();
            gone.into_iter().for_each(|block| drop(self.remove(block)));
            let last = kept.saturating_sub(1);
            if let Some(mut data) = self.remove(last) {
                let len = (size_bytes - (last << self.block_size_log2)) as usize;
                truncate(&mut data, len);
                self.put(last, data);
            }
        }
        self.is_changed |= size_bytes != self.size_bytes;
        self.size_bytes = size_bytes;
        Ok(())
    }

    /// Makes `range` read as zeros, as far as the file goes.
    pub(crate) fn punch(
        &mut self,
        range: Range<u64>,
        loaded: &LoadedContent,
    ) -> Result<(), ContentStop> {
        let range = range.start..range.end.min(self.size_bytes);
        if range.is_empty() {
            return Ok(());
        }
        self.know_block_size(loaded)?;
        let ends = self.ends(&range, loaded)?;
        let below = self.blocks_of(&(0..self.stored_end())).end;
        let blocks = self.blocks_of(&range);
        let stored = blocks.start..blocks.end.min(below);
        if stored.end.saturating_sub(stored.start) > MAX_PUNCHED_BLOCKS {
            return Err(Errno::EFBIG.into());
        }
        let upper = self.changed.range(blocks.clone()).chain(self.flushing.range(blocks));
        let mut holes: Vec<u64> = upper.map(|(block, _)| *block).chain(stored).collect();
        holes.extend(ends.keys());
        for block in holes {
            drop(self.remove(block));
            self.put(block, NewData::Hole);
        }
        for (block, mut bytes) in ends {
            let start = block << self.block_size_log2;
            let from = (range.start.max(start) - start) as usize;
            let upto = ((range.end - start) as usize).min(bytes.len());
            if from < upto {
                Arc::make_mut(&mut bytes)[from..upto].fill(0);
            }
            if !is_zero(&bytes) {
                self.put(block, NewData::Data(bytes));
            }
        }
        self.is_changed = true;
        Ok(())
    }

    fn put(&mut self, block: u64, data: NewData) {
        self.held_bytes += held(&data);
        if let Some(before) = self.changed.insert(block, data) {
            self.held_bytes -= held(&before);
        }
    }

    /// Takes a block away from the upper layer.
    fn remove(&mut self, block: u64) -> Option<NewData> {
        let data = self.changed.remove(&block)?;
        self.held_bytes -= held(&data);
        Some(data)
    }

    /// The next offset from `at` on with data that is not stored yet.
    fn next_unstored_data(&self, at: u64) -> u64 {
        let block = at >> self.block_size_log2;
        let next = |layer: &BTreeMap<u64, NewData>| {
            let mut data = layer.range(block..).filter(|(_, d)| !matches!(d, NewData::Hole));
            data.next().map(|(block, _)| block << self.block_size_log2)
        };
        let layers = [next(&self.changed), next(&self.flushing)];
        layers.into_iter().flatten().min().map_or(u64::MAX, |start| start.max(at))
    }

    /// Space, in units of 512 bytes. Until it is flushed, stored space that was cut off or
    /// replaced is estimated.
    pub(crate) fn blocks_512(&self) -> u64 {
        if !self.is_changed && self.flushing.is_empty() {
            return self.stored.blocks_512;
        }
        let stored = self.stored.blocks_512.min(self.stored_end().div_ceil(512));
        let below = self.stored_end().div_ceil(self.block_bytes());
        let mut space = stored as i64;
        let mut blocks: BTreeMap<u64, &NewData> =
            self.flushing.iter().map(|(b, d)| (*b, d)).collect();
        blocks.extend(self.changed.iter().map(|(block, data)| (*block, data)));
        for (block, data) in blocks {
            let whole = (self.block_bytes() / 512) as i64;
            match data {
                NewData::Data(_) | NewData::Swapped(_) if block >= below || stored == 0 => {
                    space += len_of(data).div_ceil(512) as i64;
                }
                NewData::Hole if block < below => space -= whole,
                _ => {}
            }
        }
        (space.max(0) as u64).min(self.size_bytes.div_ceil(512))
    }

    /// Hands the changes over to a flush.
    pub(crate) fn begin_flush(&mut self) {
        assert!(self.flushing.is_empty(), "one flush at a time");
        self.flushing = std::mem::take(&mut self.changed);
        self.flushing_cut = std::mem::replace(&mut self.cut, u64::MAX);
        self.is_changed = false;
        self.is_flushing = true;
    }

    /// What was flushed is stored.
    pub(crate) fn end_flush(&mut self, stored: Stored) {
        self.held_bytes -= self.flushing.values().map(held).sum::<u64>();
        self.flushing.clear();
        self.flushing_cut = u64::MAX;
        self.is_flushing = false;
        self.stored = stored;
    }

    /// What was to be flushed is still to be flushed.
    pub(crate) fn undo_flush(&mut self) {
        if !self.is_flushing {
            return;
        }
        self.is_flushing = false;
        for (block, mut data) in std::mem::take(&mut self.flushing) {
            let start = block << self.block_size_log2;
            self.held_bytes -= held(&data);
            if self.changed.contains_key(&block) || start >= self.cut {
                continue;
            }
            let left = (self.cut - start).min(self.block_bytes()) as usize;
            truncate(&mut data, left);
            self.put(block, data);
        }
        self.cut = self.cut.min(std::mem::replace(&mut self.flushing_cut, u64::MAX));
        self.is_changed = true;
    }

    /// Blocks that can be swapped out.
    pub(crate) fn in_memory(&self) -> impl Iterator<Item = (u64, &Arc<Vec<u8>>)> {
        self.changed.iter().filter_map(|(block, data)| match data {
            NewData::Data(bytes) => Some((*block, bytes)),
            NewData::Swapped(_) | NewData::Hole => None,
        })
    }

    /// A block was swapped out, unless it is another one by now.
    pub(crate) fn swap_out(&mut self, block: u64, bytes: &Arc<Vec<u8>>, swapped: Swapped) {
        let is_same = |now: &NewData| matches!(now, NewData::Data(now) if Arc::ptr_eq(now, bytes));
        if self.changed.get(&block).is_some_and(is_same) {
            self.put(block, NewData::Swapped(swapped));
        }
    }

    /// Whether any block is swapped out.
    pub(crate) fn has_swapped(&self) -> bool {
        let mut blocks = self.changed.values().chain(self.flushing.values());
        blocks.any(|data| matches!(data, NewData::Swapped(_)))
    }

    /// The shape of the file as it is now; none of an empty one.
    pub(crate) fn shape(&self) -> Option<Shape> {
        Shape::new(self.size_bytes, self.block_size_log2).ok()
    }
}

fn held(data: &NewData) -> u64 {
    match data {
        NewData::Data(bytes) => bytes.len() as u64,
        NewData::Swapped(_) | NewData::Hole => HOLE_BYTES,
    }
}

fn len_of(data: &NewData) -> usize {
    match data {
        NewData::Data(bytes) => bytes.len(),
        NewData::Swapped(swapped) => swapped.len as usize,
        NewData::Hole => 0,
    }
}

fn truncate(data: &mut NewData, len: usize) {
    match data {
        NewData::Data(bytes) if bytes.len() > len => Arc::make_mut(bytes).truncate(len),
        NewData::Swapped(swapped) => swapped.len = swapped.len.min(len as u32),
        _ => {}
    }
}
