//! TFS's records as they stand on the disk: the blocks of inode 5, read and changed in
//! transactions like all metadata.

use std::collections::BTreeSet;
use std::ops::Range;

use thiserror::Error;

use super::blocks::Run;
use super::pointers::Pointable;
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
    /// Blocks of transparent directories, which were taken from the end of the group.
    pub name_blocks: u64,
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
    inodes_per_group: u32,
    pointable: Pointable,
    pointers: [u32; POINTERS],
    /// Block of the records' file, and the disk's block: at the file block modulo its length.
    memo: Vec<(u32, u32)>,
    /// Blocks of transparent files that are open.
    pins: Runs,
    changed_groups: BTreeSet<u32>,
    /// Another program has written since TFS did, and the header says so by now.
    distrusted: bool,
    /// The header in memory says what the disk must not miss.
    header_due: bool,
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
            inodes_per_group: superblock.inodes_per_group(),
            pointable: Pointable::new(superblock),
            pointers,
            memo: vec![(u32::MAX, 0); MEMO],
            pins: Runs::default(),
            changed_groups: BTreeSet::new(),
            distrusted: false,
            header_due: false,
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

    /// Notes, once in a mount, that another program has written: from now on no tag counts as
    /// compared, and the records are to be gone through.
    pub fn distrust(&mut self) {
        if !self.distrusted {
            self.distrusted = true;
            self.header.epoch = self.header.epoch.wrapping_add(1).max(1);
            self.note_damage();
        }
    }

    /// Notes that the next mount is to go through the records.
    pub(super) fn note_damage(&mut self) {
        self.header.unverified = true;
        self.header_due = true;
    }

    /// Whether the header must reach the disk before what is changed next does.
    pub fn is_header_due(&self) -> bool {
        self.header_due
    }

    /// Encodes the header, with the next number, to be written over copy `seq % 2`.
    pub fn next_header(&mut self) -> Vec<u8> {
        self.header_due = false;
        self.header.seq += 1;
        self.header.encode()
    }

    /// Where things stand.
    pub fn layout(&self) -> &RecordsLayout {
        &self.layout
    }

    /// Numbers over the whole file system.
    pub fn totals(&self) -> Totals {
        self.totals
    }

    /// Adds up the summaries of all groups: once, after a mount. False if one was damaged.
    ///
    /// # Errors
    /// What reading them says.
    pub fn add_up(&mut self, meta: &mut Meta, groups: u32) -> Result<bool, Ext2Error> {
        let mut totals = Totals::default();
        let mut whole = true;
        for group in 0..groups {
            whole &= self.has_summary(meta, group)?;
            let summary = self.summary(meta, group)?;
            totals.transparent += u64::from(summary.transparent);
            totals.overwritten += u64::from(summary.overwritten);
            totals.transparent_inodes += u64::from(summary.transparent_inodes);
            totals.transparent_directories += u64::from(summary.transparent_directories);
            totals.name_blocks += u64::from(summary.name_blocks);
        }
        self.totals = totals;
        Ok(whole)
    }

    /// The disk's block of a block of the records' file.
    ///
    /// # Errors
    /// [`Ext2Error::Damaged`] for a hole.
    pub fn disk_block(&mut self, meta: &mut Meta, block: u32) -> Result<u32, Ext2Error> {
        let slot = block as usize % MEMO;
        if self.memo[slot].0 != block {
            let found = mapping::find(meta, &mut self.pointable, &self.pointers, block)?;
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

    /// A group's summary. One that is damaged counts nothing, until the group is counted again.
    ///
    /// # Errors
    /// What reading it says.
    pub fn summary(&mut self, meta: &mut Meta, group: u32) -> Result<GroupSummary, Ext2Error> {
        Ok(self.whole_summary(meta, group)?.unwrap_or_default())
    }

    /// Whether a group's summary is whole.
    ///
    /// # Errors
    /// What reading it says.
    pub fn has_summary(&mut self, meta: &mut Meta, group: u32) -> Result<bool, Ext2Error> {
        Ok(self.whole_summary(meta, group)?.is_some())
    }

    fn whole_summary(
        &mut self,
        meta: &mut Meta,
        group: u32,
    ) -> Result<Option<GroupSummary>, Ext2Error> {
        let place = self.layout.summary(group);
        let bytes = self.read(meta, place.block)?;
        let blocks = self.blocks_of_group(group) as u32;
        let possible = |summary: &GroupSummary| {
            summary.transparent.saturating_add(summary.overwritten) <= blocks
                && summary.transparent_inodes <= self.inodes_per_group
                && summary.transparent_directories <= summary.transparent_inodes
        };
        Ok(GroupSummary::decode(&bytes[place.at..]).filter(possible))
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
        totals.name_blocks = moved(totals.name_blocks, before.name_blocks, after.name_blocks);
        let place = self.layout.summary(group);
        after.encode(self.change_at(meta, place, crate::records::layout::SUMMARY_BYTES)?);
        Ok(())
    }

    /// Blocks of a group.
    pub(super) fn blocks_of_group(&self, group: u32) -> usize {
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

    /// Blocks of a chunk: an eighth of a group (§3.3).
    pub(super) fn chunk_blocks(&self) -> usize {
        (self.blocks_per_group as usize).div_ceil(CHUNKS)
    }

    /// The group of a block, and its number within.
    pub(super) fn group_of(&self, block: u32) -> (u32, usize) {
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

    pub(super) fn put_transparent_bits(
        &mut self,
        meta: &mut Meta,
        group: u32,
        range: Range<usize>,
        value: bool,
    ) -> Result<(), Ext2Error> {
        let block = self.layout.transparent_bitmap(group);
        bitmap::put(self.change(meta, block)?, range, value);
        Ok(())
    }

    pub(super) fn put_overwritten_bits(
        &mut self,
        meta: &mut Meta,
        group: u32,
        range: Range<usize>,
        value: bool,
    ) -> Result<(), Ext2Error> {
        let block = self.layout.overwritten_bitmap(group);
        bitmap::put(self.change(meta, block)?, range, value);
        Ok(())
    }

    /// Says that ext2's bitmap of a group changes in the running transaction: its summary will
    /// too, and has its room from now on.
    pub(super) fn note_changed_group(
        &mut self,
        meta: &mut Meta,
        group: u32,
    ) -> Result<(), Ext2Error> {
        self.changed_groups.insert(group);
        let place = self.layout.summary(group);
        self.change(meta, place.block)?;
        Ok(())
    }

    /// Whether ext2's bitmap of a group was changed since its checksum was put down.
    pub(super) fn is_changed_group(&self, group: u32) -> bool {
        self.changed_groups.contains(&group)
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

    /// Blocks of transparent files that are open.
    pub fn pinned_blocks(&self) -> u64 {
        self.pins.blocks()
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

    /// The first of these inodes that has a map entry, whole or damaged.
    ///
    /// # Errors
    /// What reading them says.
    pub fn next_map_entry(
        &mut self,
        meta: &mut Meta,
        inodes: Range<u32>,
    ) -> Result<Option<u32>, Ext2Error> {
        let mut read: Option<(u32, Block)> = None;
        for inode in inodes {
            let place = self.layout.map_entry(inode);
            let bytes = match &read {
                Some((block, bytes)) if *block == place.block => bytes,
                _ => &read.insert((place.block, self.read(meta, place.block)?)).1,
            };
            let entry = &bytes[place.at..place.at + crate::records::layout::MAP_ENTRY_BYTES];
            if entry.iter().any(|byte| *byte != 0) {
                return Ok(Some(inode));
            }
        }
        Ok(None)
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

impl From<MetaError> for RecordsError {
    fn from(error: MetaError) -> RecordsError {
        RecordsError::Disk(error.into())
    }
}
