//! TFS's records as they stand on the disk: the blocks of inode 5, read and changed in
//! transactions like all metadata.

use std::collections::BTreeSet;

use thiserror::Error;

use super::blocks::Run;
use super::{Ext2Error, mapping};
use crate::bitmap;
use crate::format::inode::POINTERS;
use crate::format::superblock::Superblock;
use crate::meta::{Block, Meta, MetaError, Part};
use crate::records::header::{Header, HeaderError};
use crate::records::layout::{Place, RecordsLayout};
use crate::records::map::{ExtentHead, MapEntry};
use crate::records::summary::{CHUNKS, GroupSummary};
use crate::records::tag::Tag;
use crate::runs::Runs;

/// Why a file system's records cannot be used.
#[derive(Debug, Error)]
pub enum RecordsError {
    /// It has none.
    #[error("the file system has no room set aside for transparent files")]
    None,
    /// Their header.
    #[error(transparent)]
    Header(#[from] HeaderError),
    /// Their file has a hole or a wrong length.
    #[error("the records of transparent files are damaged: {0}")]
    Damaged(String),
    /// The disk.
    #[error(transparent)]
    Disk(#[from] Ext2Error),
}

/// Numbers of blocks by state over the whole file system, and of transparent files.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Totals {
    /// Blocks in state transparent.
    pub transparent: u64,
    /// Blocks in a state overwritten.
    pub overwritten: u64,
    /// Inodes of transparent files.
    pub transparent_inodes: u64,
    /// Transparent directories.
    pub transparent_directories: u64,
}

/// How many of the last places are remembered (a power of two).
const MEMO: usize = 1024;

/// The records.
#[derive(Debug)]
pub struct Records {
    layout: RecordsLayout,
    header: Header,
    blocks: u32,
    first_data_block: u32,
    blocks_per_group: u32,
    pointers: [u32; POINTERS],
    /// Block of the records' file, and the disk's block: at the file block modulo its length.
    memo: Vec<(u32, u32)>,
    /// Blocks of transparent files that are open.
    pins: Runs,
    changed_groups: BTreeSet<u32>,
    totals: Totals,
}

impl Records {
    /// The records whose file has these pointers, with a header that was checked.
    pub fn new(
        superblock: &Superblock,
        header: Header,
        pointers: [u32; POINTERS],
    ) -> Result<Records, RecordsError> {
        let layout = RecordsLayout::new(superblock, header.journal_blocks)
            .ok_or(RecordsError::Header(HeaderError::Damaged))?;
        Ok(Records {
            layout,
            header,
            blocks: superblock.blocks(),
            first_data_block: superblock.first_data_block(),
            blocks_per_group: superblock.blocks_per_group(),
            pointers,
            memo: vec![(u32::MAX, 0); MEMO],
            pins: Runs::default(),
            changed_groups: BTreeSet::new(),
            totals: Totals::default(),
        })
    }

    /// The header in memory.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// The header in memory, to change; it reaches the disk when the file system writes it.
    pub fn header_mut(&mut self) -> &mut Header {
        &mut self.header
    }

    /// Where things stand.
    pub fn layout(&self) -> &RecordsLayout {
        &self.layout
    }

    /// Numbers over the whole file system.
    pub fn totals(&self) -> Totals {
        self.totals
    }

    /// Adds up the summaries of all groups: once, after a mount.
    ///
    /// # Errors
    /// What reading them says.
    pub fn add_up(&mut self, meta: &mut Meta, groups: u32) -> Result<(), Ext2Error> {
        let mut totals = Totals::default();
        for group in 0..groups {
            let summary = self.summary(meta, group)?;
            totals.transparent += u64::from(summary.transparent);
            totals.overwritten += u64::from(summary.overwritten);
            totals.transparent_inodes += u64::from(summary.transparent_inodes);
            totals.transparent_directories += u64::from(summary.transparent_directories);
        }
        self.totals = totals;
        Ok(())
    }

    /// The disk's block of a block of the records' file.
    ///
    /// # Errors
    /// [`Ext2Error::Damaged`] for a hole.
    pub fn disk_block(&mut self, meta: &mut Meta, block: u32) -> Result<u32, Ext2Error> {
        let slot = block as usize % MEMO;
        if self.memo[slot].0 != block {
            let found = mapping::find(meta, self.blocks, &self.pointers, block)?;
            if found == 0 {
                return super::damaged(format!("block {block} of TFS's records is missing"));
            }
            self.memo[slot] = (block, found);
        }
        Ok(self.memo[slot].1)
    }

    fn read(&mut self, meta: &mut Meta, block: u32) -> Result<Block, Ext2Error> {
        let block = self.disk_block(meta, block)?;
        Ok(meta.read(block)?)
    }

    fn change<'m>(&mut self, meta: &'m mut Meta, block: u32) -> Result<&'m mut [u8], Ext2Error> {
        let block = self.disk_block(meta, block)?;
        Ok(meta.change(block, Part::Records)?)
    }

    fn change_at<'m>(
        &mut self,
        meta: &'m mut Meta,
        place: Place,
        len: usize,
    ) -> Result<&'m mut [u8], Ext2Error> {
        Ok(&mut self.change(meta, place.block)?[place.at..place.at + len])
    }

    /// A group's summary. One that is damaged counts nothing; `meet_group` counts again.
    ///
    /// # Errors
    /// What reading it says.
    pub fn summary(&mut self, meta: &mut Meta, group: u32) -> Result<GroupSummary, Ext2Error> {
        let place = self.layout.summary(group);
        let bytes = self.read(meta, place.block)?;
        Ok(GroupSummary::decode(&bytes[place.at..]).unwrap_or_default())
    }

    /// Changes a group's summary, and the totals with it.
    ///
    /// # Errors
    /// What reading it says.
    pub fn change_summary(
        &mut self,
        meta: &mut Meta,
        group: u32,
        change: impl FnOnce(&mut GroupSummary),
    ) -> Result<(), Ext2Error> {
        let before = self.summary(meta, group)?;
        let mut after = before;
        change(&mut after);
        let moved = |total: u64, before: u32, after: u32| {
            total.saturating_sub(u64::from(before)) + u64::from(after)
        };
        let totals = &mut self.totals;
        totals.transparent = moved(totals.transparent, before.transparent, after.transparent);
        totals.overwritten = moved(totals.overwritten, before.overwritten, after.overwritten);
        totals.transparent_inodes =
            moved(totals.transparent_inodes, before.transparent_inodes, after.transparent_inodes);
        totals.transparent_directories = moved(
            totals.transparent_directories,
            before.transparent_directories,
            after.transparent_directories,
        );
        let place = self.layout.summary(group);
        after.encode(self.change_at(meta, place, crate::records::layout::SUMMARY_BYTES)?);
        Ok(())
    }

    /// Looks at a group's bitmaps when the group is met first: if other software changed
    /// ext2's, each transparent block that is allocated now was overwritten.
    pub(super) fn meet_group(
        &mut self,
        meta: &mut Meta,
        group: u32,
        allocated: &[u8],
    ) -> Result<(), Ext2Error> {
        let summary = self.summary(meta, group)?;
        if summary.bitmap_checksum == crc32fast::hash(allocated) {
            return Ok(());
        }
        let blocks = self.blocks_of_group(group);
        let transparent = self.transparent_bitmap(meta, group)?;
        let block = self.layout.overwritten_bitmap(group);
        let overwritten = self.change(meta, block)?;
        for (byte, overwritten) in overwritten.iter_mut().enumerate() {
            let (transparent, allocated) =
                (transparent.get(byte).unwrap_or(&0), allocated.get(byte).unwrap_or(&0));
            *overwritten = (*overwritten | allocated) & transparent;
        }
        let lost = bitmap::count(overwritten, 0..blocks) as u32;
        let owned = bitmap::count(&transparent, 0..blocks) as u32;
        self.change_summary(meta, group, |summary| {
            summary.transparent = owned.saturating_sub(lost);
            summary.overwritten = lost;
            summary.bitmap_checksum = crc32fast::hash(allocated);
        })
    }

    fn blocks_of_group(&self, group: u32) -> usize {
        let first = self.first_data_block + group * self.blocks_per_group;
        (self.blocks - first).min(self.blocks_per_group) as usize
    }

    /// Whether the file system has this block, in a group.
    pub(super) fn has_block(&self, block: u32) -> bool {
        (self.first_data_block..self.blocks).contains(&block)
    }

    /// Whether `len` blocks from `start` on lie in one group.
    pub(super) fn in_one_group(&self, start: u32, len: u32) -> bool {
        let (group, bit) = self.group_of(start);
        len as usize <= self.blocks_of_group(group) - bit
    }

    fn group_of(&self, block: u32) -> (u32, usize) {
        let block = block - self.first_data_block;
        (block / self.blocks_per_group, (block % self.blocks_per_group) as usize)
    }

    /// A group's bitmap of blocks that transparent files count as their own.
    ///
    /// # Errors
    /// What reading it says.
    pub fn transparent_bitmap(&mut self, meta: &mut Meta, group: u32) -> Result<Block, Ext2Error> {
        let block = self.layout.transparent_bitmap(group);
        self.read(meta, block)
    }

    /// A group's bitmap of those that were overwritten.
    ///
    /// # Errors
    /// What reading it says.
    pub fn overwritten_bitmap(&mut self, meta: &mut Meta, group: u32) -> Result<Block, Ext2Error> {
        let block = self.layout.overwritten_bitmap(group);
        self.read(meta, block)
    }

    /// Sets or clears a run within one group in a bitmap of the records.
    ///
    /// # Errors
    /// What reading it says.
    pub fn put_bits(
        &mut self,
        meta: &mut Meta,
        which: RecordsBitmap,
        run: Run,
        value: bool,
    ) -> Result<(), Ext2Error> {
        let (group, bit) = self.group_of(run.start);
        let block = match which {
            RecordsBitmap::Transparent => self.layout.transparent_bitmap(group),
            RecordsBitmap::Overwritten => self.layout.overwritten_bitmap(group),
        };
        bitmap::put(self.change(meta, block)?, bit..bit + run.len as usize, value);
        Ok(())
    }

    /// Ordinary data is written to a run within one group, which was just allocated: what
    /// transparent files had there is overwritten (§3.1), and the histogram counts it (§3.3).
    pub(super) fn ordinary_write(&mut self, meta: &mut Meta, run: Run) -> Result<(), Ext2Error> {
        let (group, bit) = self.group_of(run.start);
        let range = bit..bit + run.len as usize;
        let transparent = self.transparent_bitmap(meta, group)?;
        let mut lost = 0;
        let mut at = range.start;
        while let Some(start) = bitmap::next(&transparent, at..range.end, true) {
            let end = bitmap::run_end(&transparent, start..range.end, true);
            let block = self.layout.overwritten_bitmap(group);
            let overwritten = self.change(meta, block)?;
            lost += (end - start) - bitmap::count(overwritten, start..end);
            bitmap::put(overwritten, start..end, true);
            at = end;
        }
        let chunk_of = |bit: usize| bit * CHUNKS / self.blocks_per_group as usize;
        let (first, last) = (chunk_of(range.start), chunk_of(range.end - 1));
        let chunk_blocks = (self.blocks_per_group as usize).div_ceil(CHUNKS);
        self.change_summary(meta, group, |summary| {
            summary.transparent = summary.transparent.saturating_sub(lost as u32);
            summary.overwritten += lost as u32;
            for chunk in first..=last {
                let start = range.start.max(chunk * chunk_blocks);
                let end = range.end.min((chunk + 1) * chunk_blocks);
                summary.histogram[chunk] += end.saturating_sub(start) as f32;
            }
        })
    }

    pub(super) fn note_changed_group(&mut self, group: u32) {
        self.changed_groups.insert(group);
    }

    pub(super) fn take_changed_groups(&mut self) -> BTreeSet<u32> {
        std::mem::take(&mut self.changed_groups)
    }

    /// Keeps ordinary data off a run while its file is open (§3.2).
    pub fn pin(&mut self, run: Run) {
        self.pins.insert(run.start, run.len);
    }

    /// Gives a run free again.
    pub fn unpin(&mut self, run: Run) {
        self.pins.remove(run.start, run.len);
    }

    /// The end of the pinned run that covers a block, if one does.
    pub fn pinned_until(&self, block: u32) -> Option<u32> {
        self.pins.end_of(block)
    }

    /// How many of `len` blocks from `start` on come before the next pinned one.
    pub fn unpinned(&self, start: u32, len: u32) -> u32 {
        self.pins.next(start, len).map_or(len, |pin| pin - start)
    }

    /// The extent that begins at a block.
    ///
    /// # Errors
    /// What reading it says.
    pub fn extent_head(
        &mut self,
        meta: &mut Meta,
        block: u32,
    ) -> Result<Option<ExtentHead>, Ext2Error> {
        let place = self.layout.extent_head(block);
        Ok(ExtentHead::decode(&self.read(meta, place.block)?[place.at..]))
    }

    /// Writes or removes the head of the extent that begins at a block.
    ///
    /// # Errors
    /// What reading it says.
    pub fn put_extent_head(
        &mut self,
        meta: &mut Meta,
        block: u32,
        head: Option<&ExtentHead>,
    ) -> Result<(), Ext2Error> {
        let place = self.layout.extent_head(block);
        let bytes = self.change_at(meta, place, crate::records::layout::EXTENT_HEAD_BYTES)?;
        match head {
            Some(head) => head.encode(bytes),
            None => ExtentHead::clear(bytes),
        }
        Ok(())
    }

    /// The tag of a block.
    ///
    /// # Errors
    /// What reading it says.
    pub fn tag(&mut self, meta: &mut Meta, block: u32) -> Result<Tag, Ext2Error> {
        let place = self.layout.tag(block);
        let bytes = self.read(meta, place.block)?;
        Ok(Tag(bytes[place.at..place.at + 8].try_into().expect("eight bytes")))
    }

    /// Writes the tag of a block.
    ///
    /// # Errors
    /// What reading it says.
    pub fn put_tag(&mut self, meta: &mut Meta, block: u32, tag: Tag) -> Result<(), Ext2Error> {
        let place = self.layout.tag(block);
        self.change_at(meta, place, tag.0.len())?.copy_from_slice(&tag.0);
        Ok(())
    }

    /// What is known of a transparent file.
    ///
    /// # Errors
    /// What reading it says.
    pub fn map_entry(
        &mut self,
        meta: &mut Meta,
        inode: u32,
    ) -> Result<Option<MapEntry>, Ext2Error> {
        let place = self.layout.map_entry(inode);
        Ok(MapEntry::decode(inode, &self.read(meta, place.block)?[place.at..]))
    }

    /// Writes or removes what is known of a transparent file.
    ///
    /// # Errors
    /// What reading it says.
    pub fn put_map_entry(
        &mut self,
        meta: &mut Meta,
        inode: u32,
        entry: Option<&MapEntry>,
    ) -> Result<(), Ext2Error> {
        let place = self.layout.map_entry(inode);
        let bytes = self.change_at(meta, place, crate::records::layout::MAP_ENTRY_BYTES)?;
        match entry {
            Some(entry) => entry.encode(inode, bytes),
            None => MapEntry::clear(bytes),
        }
        Ok(())
    }
}

/// A bitmap of the records.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RecordsBitmap {
    /// Blocks that transparent files count as their own.
    Transparent,
    /// Those of them that were overwritten.
    Overwritten,
}

impl From<MetaError> for RecordsError {
    fn from(error: MetaError) -> RecordsError {
        RecordsError::Disk(error.into())
    }
}
