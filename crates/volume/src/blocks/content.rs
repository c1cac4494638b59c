//! The bytes of a file: as the ring has them, and what has changed since.
//!
//! Three layers, the upper hides the lower: blocks changed since the last flush began, blocks that
//! are being flushed, and the stored file. A truncation is a *cut*: from there on the layers below
//! read as zeros.
//!
//! Of a stored block that is written in part, a file may hold the written pages
//! alone ([`Content::holding_pages`]); a flush reads the rest. Pages never lie above a whole block that is being flushed, so
//! that a flush which fails can join the two layers without reading anything.
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
use super::edit_file::{HeldBytes, NewData, SwapIn, Swapped, page_size_log2};
use super::error::LoadError;
use super::file::File;
use crate::format::MAX_FILE_BYTES;
use crate::format::inode::Shape;
use crate::format::is_zero;

/// Stored blocks that one call may turn into holes: each costs memory until the next flush.
const MAX_PUNCHED_BLOCKS: u64 = 1 << 20;

/// About what a block or page costs in memory beside its bytes: enough holes, or blocks that were
/// swapped out, make a writer wait, as data does.
const ENTRY_BYTES: u64 = 64;

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
    swapped: BTreeMap<Swapped, Bytes>,
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
                    self.swapped.insert(swapped, bytes);
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

    fn swapped(&self, swapped: Swapped) -> Result<&Bytes, ContentNeed> {
        self.swapped.get(&swapped).ok_or(ContentNeed::Swapped(swapped))
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Content {
    pub(crate) size_bytes: u64,
    pub(crate) block_size_log2: u8,
    /// Whether the block size is known to be that of the stored file, or does not matter.
    knows_block_size: bool,
    /// Whether a stored block may be written in part without being read.
    holds_pages: bool,
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
            holds_pages: false,
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

    /// A file whose written pages are held without the rest of their blocks. Only a flush finds out
    /// then that a block cannot be read, so what was written must be safe without it.
    pub(crate) fn holding_pages(self) -> Content {
        Content { holds_pages: true, ..self }
    }

    fn block_bytes(&self) -> u64 {
        1 << self.block_size_log2
    }

    /// How long the pages are by which changes of a block may be held.
    pub(crate) fn page_bytes(&self) -> u64 {
        1 << page_size_log2(self.block_size_log2)
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
        match self.changed.get(&block) {
            Some(new) => {
                self.pieces_held(new, block, range, pieces, |range, pieces| {
                    self.pieces_below(block, range, pieces);
                });
            }
            None => self.pieces_below(block, range, pieces),
        }
    }

    /// Where the bytes below the changed ones are.
    fn pieces_below(&self, block: u64, range: Range<u64>, pieces: &mut Vec<Piece>) {
        let seen = range.start..range.end.min(self.cut).max(range.start);
        let cut_off = range.end - seen.end;
        match self.flushing.get(&block) {
            Some(new) => {
                self.pieces_held(new, block, seen, pieces, |range, pieces| {
                    self.pieces_stored(range, pieces);
                });
            }
            None => self.pieces_stored(seen, pieces),
        }
        push_zeros(pieces, cut_off);
    }

    fn pieces_stored(&self, range: Range<u64>, pieces: &mut Vec<Piece>) {
        let end = self.stored_end().min(range.end).max(range.start);
        match pieces.last_mut() {
            _ if range.start == end => {}
            Some(Piece::Stored(before)) if before.end == range.start => before.end = end,
            _ => pieces.push(Piece::Stored(range.start..end)),
        }
        push_zeros(pieces, range.end - end);
    }

    /// Where the bytes of a block are of which `new` is held; `below` tells it of bytes that are not.
    fn pieces_held(
        &self,
        new: &NewData,
        block: u64,
        range: Range<u64>,
        pieces: &mut Vec<Piece>,
        below: impl Fn(Range<u64>, &mut Vec<Piece>),
    ) {
        let start = block << self.block_size_log2;
        match new {
            NewData::Hole => push_zeros(pieces, range.end - range.start),
            NewData::Whole(held) => push_held(pieces, held, start, range),
            NewData::Pages(pages) => {
                let mut at = range.start;
                while at < range.end {
                    let page = (at - start) / self.page_bytes();
                    let page_start = start + page * self.page_bytes();
                    let end = range.end.min(page_start + self.page_bytes());
                    match pages.get(&page) {
                        Some(held) => push_held(pieces, held, page_start, at..end),
                        None => below(at..end, pieces),
                    }
                    at = end;
                }
            }
        }
    }

    /// What a unit that is to be changed in part holds now; zeros may follow. Stored bytes are
    /// asked for once a unit.
    fn before(&self, unit: &Unit, loaded: &LoadedContent) -> Result<Vec<u8>, ContentStop> {
        let end = unit.bytes.end.min(self.size_bytes).max(unit.bytes.start);
        let mut bytes = Vec::new();
        let mut zeros = 0;
        for piece in self.pieces(unit.bytes.start..end) {
            let data = match &piece {
                Piece::Zeros(len) => {
                    zeros += len;
                    continue;
                }
                Piece::Data(data, range) => &data[range.clone()],
                Piece::Swapped(swapped, range) => &loaded.swapped(*swapped)?[range.clone()],
                Piece::Stored(range) => {
                    let start = unit.bytes.start;
                    let stored = start..self.stored_end().min(end);
                    let from = (range.start - start) as usize..(range.end - start) as usize;
                    &loaded.bytes(self.stored, stored)?[from]
                }
            };
            bytes.resize(bytes.len() + zeros, 0);
            bytes.extend_from_slice(data);
            zeros = 0;
        }
        Ok(bytes)
    }

    /// Whether nothing of a unit is left when `range` of it is written.
    fn is_covered(&self, unit: &Unit, range: &Range<u64>) -> bool {
        range.start <= unit.bytes.start && range.end >= self.size_bytes.min(unit.bytes.end)
    }

    fn blocks_of(&self, range: &Range<u64>) -> Range<u64> {
        range.start >> self.block_size_log2..range.end.div_ceil(self.block_bytes())
    }

    fn block(&self, block: u64) -> Unit {
        let start = block << self.block_size_log2;
        Unit { block, page: None, bytes: start..start + self.block_bytes() }
    }

    /// Whether a block that changes in part is held by pages: what is stored of it shows through.
    fn is_paged(&self, block: u64) -> bool {
        let is_stored = block << self.block_size_log2 < self.stored_end();
        match (self.changed.get(&block), self.flushing.get(&block)) {
            (Some(new), _) | (None, Some(new)) => matches!(new, NewData::Pages(_)),
            (None, None) => self.holds_pages && is_stored && self.page_bytes() < self.block_bytes(),
        }
    }

    /// What a write of `range` changes, in order.
    fn units(&self, range: &Range<u64>) -> Vec<Unit> {
        let mut units = Vec::new();
        for block in self.blocks_of(range) {
            let whole = self.block(block);
            if !self.is_paged(block) || self.is_covered(&whole, range) {
                units.push(whole);
                continue;
            }
            let (size, start) = (self.page_bytes(), whole.bytes.start);
            let from = range.start.max(start) - start;
            let upto = range.end.min(whole.bytes.end) - start;
            units.extend((from / size..upto.div_ceil(size)).map(|page| {
                let bytes = start + page * size..start + (page + 1) * size;
                Unit { block, page: Some(page), bytes }
            }));
        }
        units
    }

    /// The blocks at both ends of `range` that are changed in part, with what they hold.
    fn ends(
        &self,
        range: &Range<u64>,
        loaded: &LoadedContent,
    ) -> Result<BTreeMap<u64, Vec<u8>>, ContentStop> {
        let blocks = self.blocks_of(range);
        let mut ends = BTreeMap::new();
        for block in [blocks.start, blocks.end - 1] {
            let unit = self.block(block);
            if !self.is_covered(&unit, range) {
                ends.insert(block, self.before(&unit, loaded)?);
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
        let units = self.units(&range);
        let mut ends = BTreeMap::new();
        for unit in [&units[0], &units[units.len() - 1]] {
            if !self.is_covered(unit, &range) && !self.has_in_memory(unit) {
                ends.insert(unit.bytes.start, self.before(unit, loaded)?);
            }
        }
        for unit in units {
            let start = unit.bytes.start;
            let (from, upto) = (range.start.max(start), range.end.min(unit.bytes.end));
            let part = &data[(from - range.start) as usize..(upto - range.start) as usize];
            let before = match (ends.remove(&start), self.take(&unit)) {
                (Some(before), _) => Arc::new(before),
                // Taken away, since bytes that are held twice would be copied.
                (None, Some(HeldBytes::Data(bytes))) => bytes,
                (None, _) => Arc::default(),
            };
            self.put(&unit, HeldBytes::Data(overwritten(before, (from - start) as usize, part)));
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
                truncate(&mut data, len, self.page_bytes());
                self.put_block(last, data);
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
            self.put_block(block, NewData::Hole);
        }
        for (block, mut bytes) in ends {
            let start = block << self.block_size_log2;
            let from = (range.start.max(start) - start) as usize;
            let upto = ((range.end - start) as usize).min(bytes.len());
            if from < upto {
                bytes[from..upto].fill(0);
            }
            if !is_zero(&bytes) {
                self.put_block(block, NewData::Whole(HeldBytes::Data(Arc::new(bytes))));
            }
        }
        self.is_changed = true;
        Ok(())
    }

    fn put_block(&mut self, block: u64, new: NewData) {
        drop(self.remove(block));
        // No page is no change.
        if !matches!(&new, NewData::Pages(pages) if pages.is_empty()) {
            self.held_bytes += held(&new);
            self.changed.insert(block, new);
        }
    }

    fn put_page(&mut self, block: u64, page: u64, bytes: HeldBytes) {
        self.held_bytes += held_page(&bytes);
        let new = self.changed.entry(block).or_insert_with(|| NewData::Pages(BTreeMap::new()));
        let NewData::Pages(pages) = new else { unreachable!("the block is held by pages") };
        if let Some(before) = pages.insert(page, bytes) {
            self.held_bytes -= held_page(&before);
        }
    }

    fn put(&mut self, unit: &Unit, bytes: HeldBytes) {
        match unit.page {
            None => self.put_block(unit.block, NewData::Whole(bytes)),
            Some(page) => self.put_page(unit.block, page, bytes),
        }
    }

    /// Takes a block away from the upper layer.
    fn remove(&mut self, block: u64) -> Option<NewData> {
        let new = self.changed.remove(&block)?;
        self.held_bytes -= held(&new);
        Some(new)
    }

    /// Takes a unit's bytes away from the upper layer.
    fn take(&mut self, unit: &Unit) -> Option<HeldBytes> {
        let Some(page) = unit.page else {
            return match self.remove(unit.block)? {
                NewData::Whole(bytes) => Some(bytes),
                NewData::Pages(_) | NewData::Hole => None,
            };
        };
        let NewData::Pages(pages) = self.changed.get_mut(&unit.block)? else { return None };
        let bytes = pages.remove(&page)?;
        self.held_bytes -= held_page(&bytes);
        Some(bytes)
    }

    /// Whether the upper layer has a unit's bytes in memory.
    fn has_in_memory(&self, unit: &Unit) -> bool {
        let bytes = match (self.changed.get(&unit.block), unit.page) {
            (Some(NewData::Whole(bytes)), None) => Some(bytes),
            (Some(NewData::Pages(pages)), Some(page)) => pages.get(&page),
            _ => None,
        };
        matches!(bytes, Some(HeldBytes::Data(_)))
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
                NewData::Hole if block < below => space -= whole,
                NewData::Hole => {}
                _ if block < below && stored > 0 => {}
                NewData::Whole(bytes) => space += bytes.len().div_ceil(512) as i64,
                NewData::Pages(pages) => {
                    let len: usize = pages.values().map(HeldBytes::len).sum();
                    space += len.div_ceil(512) as i64;
                }
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
        for (block, mut new) in std::mem::take(&mut self.flushing) {
            let start = block << self.block_size_log2;
            self.held_bytes -= held(&new);
            if start >= self.cut {
                continue;
            }
            let left = (self.cut - start).min(self.block_bytes()) as usize;
            truncate(&mut new, left, self.page_bytes());
            match (self.changed.get(&block), new) {
                (None, new) => self.put_block(block, new),
                (Some(NewData::Whole(_) | NewData::Hole), _) => {}
                (Some(NewData::Pages(above)), NewData::Pages(mut below)) => {
                    below.retain(|page, _| !above.contains_key(page));
                    for (page, bytes) in below {
                        self.put_page(block, page, bytes);
                    }
                }
                (Some(NewData::Pages(_)), _) => unreachable!("pages lie above pages"),
            }
        }
        self.cut = self.cut.min(std::mem::replace(&mut self.flushing_cut, u64::MAX));
        self.is_changed = true;
    }

    /// Blocks and pages that can be swapped out, with the number of the block.
    pub(crate) fn in_memory(&self) -> impl Iterator<Item = (u64, &Arc<Vec<u8>>)> {
        let all =
            self.changed.iter().flat_map(|(block, new)| held_of(new).map(|held| (*block, held)));
        all.filter_map(|(block, held)| match held {
            HeldBytes::Data(bytes) => Some((block, bytes)),
            HeldBytes::Swapped(_) => None,
        })
    }

    /// A block, or a page of it, was swapped out, unless it is another one by now.
    pub(crate) fn swap_out(&mut self, block: u64, bytes: &Arc<Vec<u8>>, swapped: Swapped) {
        let is_same =
            |now: &HeldBytes| matches!(now, HeldBytes::Data(now) if Arc::ptr_eq(now, bytes));
        let swapped = HeldBytes::Swapped(swapped);
        match self.changed.get(&block) {
            Some(NewData::Whole(now)) if is_same(now) => {
                self.put_block(block, NewData::Whole(swapped));
            }
            Some(NewData::Pages(pages)) => {
                let page = pages.iter().find(|(_, now)| is_same(now)).map(|(page, _)| *page);
                if let Some(page) = page {
                    self.put_page(block, page, swapped);
                }
            }
            _ => {}
        }
    }

    /// Whether any block is swapped out, or a page of one.
    pub(crate) fn has_swapped(&self) -> bool {
        let mut blocks = self.changed.values().chain(self.flushing.values());
        blocks.any(|new| held_of(new).any(|held| matches!(held, HeldBytes::Swapped(_))))
    }

    /// That the layers are as the module says, and counted.
    ///
    /// # Panics
    /// If they are not.
    pub(crate) fn check_invariants(&self) {
        let layers = self.changed.values().chain(self.flushing.values());
        assert_eq!(self.held_bytes, layers.map(held).sum::<u64>(), "bytes of a file");
        for (block, new) in &self.changed {
            let (start, page_bytes) = (block << self.block_size_log2, self.page_bytes());
            let len = |bytes: &HeldBytes| bytes.len() as u64;
            match new {
                NewData::Whole(bytes) => {
                    assert!(len(bytes) <= self.block_bytes());
                    assert!(start + len(bytes) <= self.size_bytes);
                }
                NewData::Pages(pages) => {
                    let below = self.flushing.get(block);
                    assert!(matches!(below, None | Some(NewData::Pages(_))), "below pages");
                    for (page, bytes) in pages {
                        assert!((page + 1) * page_bytes <= self.block_bytes());
                        assert!(len(bytes) <= page_bytes);
                        assert!(start + page * page_bytes + len(bytes) <= self.size_bytes);
                    }
                }
                NewData::Hole => {}
            }
        }
    }

    /// The shape of the file as it is now; none of an empty one.
    pub(crate) fn shape(&self) -> Option<Shape> {
        Shape::new(self.size_bytes, self.block_size_log2).ok()
    }
}

/// What a write changes: a block, or a page of one.
struct Unit {
    block: u64,
    page: Option<u64>,
    /// Where it lies in the file.
    bytes: Range<u64>,
}

/// What is held of a block, in order.
fn held_of(new: &NewData) -> impl Iterator<Item = &HeldBytes> {
    let (whole, pages) = match new {
        NewData::Whole(bytes) => (Some(bytes), None),
        NewData::Pages(pages) => (None, Some(pages.values())),
        NewData::Hole => (None, None),
    };
    whole.into_iter().chain(pages.into_iter().flatten())
}

fn held(new: &NewData) -> u64 {
    match new {
        NewData::Whole(HeldBytes::Data(bytes)) => bytes.len() as u64,
        NewData::Whole(HeldBytes::Swapped(_)) | NewData::Hole => ENTRY_BYTES,
        NewData::Pages(pages) => pages.values().map(held_page).sum(),
    }
}

fn held_page(bytes: &HeldBytes) -> u64 {
    match bytes {
        HeldBytes::Data(bytes) => bytes.len() as u64 + ENTRY_BYTES,
        HeldBytes::Swapped(_) => ENTRY_BYTES,
    }
}

fn truncate(new: &mut NewData, len: usize, page_bytes: u64) {
    match new {
        NewData::Whole(bytes) => bytes.truncate(len),
        NewData::Pages(pages) => {
            pages.retain(|page, bytes| {
                let left = (len as u64).saturating_sub(page * page_bytes);
                bytes.truncate(left.min(page_bytes) as usize);
                left > 0
            });
        }
        NewData::Hole => {}
    }
}

/// `before`, with `part` from `from` on.
fn overwritten(mut before: Arc<Vec<u8>>, from: usize, part: &[u8]) -> Arc<Vec<u8>> {
    let upto = from + part.len();
    if from == 0 && before.len() <= upto {
        return Arc::new(part.to_vec());
    }
    let held = Arc::make_mut(&mut before);
    if held.len() < upto {
        held.resize(upto, 0);
    }
    held[from..upto].copy_from_slice(part);
    before
}

/// Adds the piece of `range` to `pieces`, of which `held` has the bytes from `start` on.
fn push_held(pieces: &mut Vec<Piece>, held: &HeldBytes, start: u64, range: Range<u64>) {
    let from = ((range.start - start) as usize).min(held.len());
    let upto = ((range.end - start) as usize).min(held.len());
    if from < upto {
        pieces.push(match held {
            HeldBytes::Data(data) => Piece::Data(data.clone(), from..upto),
            HeldBytes::Swapped(swapped) => Piece::Swapped(*swapped, from..upto),
        });
    }
    push_zeros(pieces, range.end - range.start - (upto - from) as u64);
}

fn push_zeros(pieces: &mut Vec<Piece>, len: u64) {
    match pieces.last_mut() {
        _ if len == 0 => {}
        Some(Piece::Zeros(before)) => *before += len as usize,
        _ => pieces.push(Piece::Zeros(len as usize)),
    }
}
