//! Going through the records after other software has written, or a summary was damaged:
//! what they say of blocks and inodes is made to agree with ext2 before any of it is trusted.
//!
//! - A map whose inode is not in use, of another generation, or has blocks or a length goes;
//!   an inode that other software gave blocks is ordinary from then on.
//! - A block that no extent of a remaining map covers belongs to no file.
//! - What other software allocated was overwritten; the counts are counted again.
//!
//! Whether the bytes are still the file's is not asked here: the epoch has risen, so that each
//! file is compared with its tags when it is opened next.

use super::blocks::Run;
use super::{Ext2, Ext2Error};
use crate::bitmap;
use crate::format::inode::TRANSPARENT;
use crate::format::superblock::ROOT_INODE;
use crate::records::map::MapEntry;
use crate::states::BlockEvent;
use atoll_vfs::FileKind;

/// Blocks that a step of going through the records changes at most.
pub const VERIFY_STEP_BLOCKS: usize = 40;
/// Inodes that a step looks at.
const INODES_A_STEP: u32 = 2048;

/// What going through the records found.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Verified {
    /// Maps that were kept.
    pub maps: u64,
    /// Maps without the inode they were made for, removed.
    pub stale_maps: u64,
    /// Inodes that were transparent and are ordinary now.
    pub ordinary: u64,
    /// Blocks that were marked as transparent and covered by no map.
    pub ownerless_blocks: u64,
    /// Blocks that were overwritten.
    pub overwritten_blocks: u64,
}

/// How far going through a group has come.
#[derive(Clone, Copy, Debug)]
pub struct VerifyAt {
    index: u32,
    files: u32,
    done: bool,
}

impl VerifyAt {
    /// At its beginning.
    pub fn start() -> VerifyAt {
        VerifyAt { index: 0, files: 0, done: false }
    }

    /// Whether the group is done.
    pub fn is_done(&self) -> bool {
        self.done
    }
}

/// An overwritten run, and the file it belonged to, if a map still says so.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Overwritten {
    /// Blocks within one group.
    pub run: Run,
    /// Inode of the file.
    pub owner: Option<u32>,
}

impl Ext2 {
    /// Whether an inode is allocated.
    ///
    /// # Errors
    /// What reading the disk says.
    pub fn is_inode_in_use(&mut self, number: u32) -> Result<bool, Ext2Error> {
        let per_group = self.superblock().inodes_per_group();
        let descriptor = self.descriptor((number - 1) / per_group)?;
        let bits = self.meta.read(descriptor.inode_bitmap)?;
        Ok(bitmap::is_set(&bits, ((number - 1) % per_group) as usize))
    }

    /// The map entry of an inode, if it was made for it as it is now.
    fn sound_entry(&mut self, number: u32) -> Result<Option<MapEntry>, Ext2Error> {
        if number < self.superblock().first_inode() || number > self.superblock().inodes() {
            return Ok(None);
        }
        let Some((records, meta)) = self.records_and_meta() else { return Ok(None) };
        let Some(entry) = records.map_entry(meta, number)? else { return Ok(None) };
        if !self.is_inode_in_use(number)? {
            return Ok(None);
        }
        let inode = self.inode(number)?;
        let sound = inode.generation == entry.generation && inode.is_transparent_file();
        Ok(sound.then_some(entry))
    }

    /// Goes through the maps of a group's inodes, a step of it.
    ///
    /// # Errors
    /// What reading the disk says.
    pub fn verify_maps(
        &mut self,
        group: u32,
        at: &mut VerifyAt,
        verified: &mut Verified,
    ) -> Result<(), Ext2Error> {
        let per_group = self.superblock().inodes_per_group();
        let first = group * per_group + 1;
        let end = at.index.saturating_add(INODES_A_STEP).min(per_group);
        while at.index < end {
            let Some((records, meta)) = self.records_and_meta() else { break };
            let range = first + at.index..first + end;
            let Some(number) = records.next_map_entry(meta, range)? else {
                at.index = end;
                break;
            };
            at.index = number - first;
            if self.sound_entry(number)?.is_some() {
                verified.maps += 1;
                at.files += 1;
                at.index += 1;
                continue;
            }
            // One map a step, or a part of one.
            if self.drop_map(number)? {
                verified.stale_maps += 1;
                verified.ordinary += u64::from(self.make_ordinary(number)?);
                at.index += 1;
            }
            return Ok(());
        }
        if at.index >= per_group {
            at.done = true;
            self.count_inodes(group, at.files)?;
        }
        Ok(())
    }

    /// Takes the mark of transparent files off an inode that is none any more; whether it had
    /// it.
    fn make_ordinary(&mut self, number: u32) -> Result<bool, Ext2Error> {
        if number < self.superblock().first_inode() || !self.is_inode_in_use(number)? {
            return Ok(false);
        }
        let mut inode = self.inode(number)?;
        if inode.flags & TRANSPARENT == 0 || inode.kind() != Ok(FileKind::Regular) {
            return Ok(false);
        }
        inode.flags &= !TRANSPARENT;
        self.put_inode(number, &inode)?;
        Ok(true)
    }

    /// Counts a group's transparent inodes again.
    fn count_inodes(&mut self, group: u32, files: u32) -> Result<(), Ext2Error> {
        let Some((records, meta)) = self.records_and_meta() else { return Ok(()) };
        let damaged = !records.has_summary(meta, group)?;
        let summary = records.summary(meta, group)?;
        let mut directories = 0;
        // Directories have no map: only a look at all inodes tells.
        if damaged || summary.transparent_directories > 0 {
            let per_group = self.superblock().inodes_per_group();
            for index in 0..per_group {
                let number = group * per_group + index + 1;
                let named = number == ROOT_INODE || number >= self.superblock().first_inode();
                if named && self.is_inode_in_use(number)? {
                    let inode = self.inode(number)?;
                    let directory = inode.kind() == Ok(FileKind::Directory);
                    directories += u32::from(directory && inode.flags & TRANSPARENT != 0);
                }
            }
        }
        let Some((records, meta)) = self.records_and_meta() else { return Ok(()) };
        records.change_summary(meta, group, |summary| {
            summary.transparent_inodes = files + directories;
            summary.transparent_directories = directories;
        })
    }

    /// Goes through a group's blocks, when all maps have been gone through.
    ///
    /// # Errors
    /// What reading the disk says.
    pub fn verify_blocks(&mut self, group: u32, verified: &mut Verified) -> Result<(), Ext2Error> {
        let Some(bitmaps) = self.group_bitmaps(group)? else { return Ok(()) };
        let blocks = bitmaps.blocks as usize;
        if bitmap::next(&bitmaps.transparent, 0..blocks, true).is_some() {
            let covered = self.covered_blocks(group, bitmaps.blocks)?;
            let mut bit = 0;
            while let Some(start) = bitmap::next(&bitmaps.transparent, bit..blocks, true) {
                let end = bitmap::run_end(&bitmaps.transparent, start..blocks, true);
                let Some(bare) = bitmap::next(&covered, start..end, false) else {
                    bit = end;
                    continue;
                };
                bit = bitmap::run_end(&covered, bare..end, false);
                verified.ownerless_blocks += (bit - bare) as u64;
                let Some((records, meta)) = self.records_and_meta() else { return Ok(()) };
                records.put_transparent_bits(meta, group, bare..bit, false)?;
            }
        }
        let (allocated, _) = self.block_bitmap(group)?;
        let Some((records, meta)) = self.records_and_meta() else { return Ok(()) };
        records.count_group(meta, group, &allocated)?;
        verified.overwritten_blocks += u64::from(records.summary(meta, group)?.overwritten);
        Ok(())
    }

    /// The blocks of a group that extents of sound maps cover, as a bitmap.
    fn covered_blocks(&mut self, group: u32, blocks: u32) -> Result<Vec<u8>, Ext2Error> {
        let first = self.superblock().first_block_of_group(group);
        let mut covered = vec![0; self.meta.block_bytes()];
        for bit in 0..blocks {
            let Some((records, meta)) = self.records_and_meta() else { break };
            let Some(head) = records.extent_head(meta, first + bit)? else { continue };
            if records.in_one_group(first + bit, head.len)
                && self.sound_entry(head.owner)?.is_some()
            {
                bitmap::put(&mut covered, bit as usize..(bit + head.len) as usize, true);
            }
        }
        Ok(covered)
    }

    /// The first overwritten run of a group from `bit` on.
    ///
    /// # Errors
    /// What reading the disk says.
    pub fn overwritten_from(
        &mut self,
        group: u32,
        bit: usize,
    ) -> Result<Option<Overwritten>, Ext2Error> {
        let Some((records, meta)) = self.records_and_meta() else { return Ok(None) };
        if records.summary(meta, group)?.overwritten == 0 {
            return Ok(None);
        }
        let Some(bitmaps) = self.group_bitmaps(group)? else { return Ok(None) };
        let blocks = bitmaps.blocks as usize;
        let first = self.superblock().first_block_of_group(group);
        let mut at = bit;
        while let Some(start) = bitmap::next(&bitmaps.overwritten, at..blocks, true) {
            at = bitmap::run_end(&bitmaps.overwritten, start..blocks, true);
            if !bitmap::is_set(&bitmaps.transparent, start) {
                continue;
            }
            let own = bitmap::run_end(&bitmaps.transparent, start..at, true);
            // Back through the blocks of the extent to its head.
            let Some((records, meta)) = self.records_and_meta() else { return Ok(None) };
            let mut owner = None;
            for back in (0..=start).rev() {
                if !bitmap::is_set(&bitmaps.transparent, back) {
                    break;
                }
                if let Some(head) = records.extent_head(meta, first + back as u32)? {
                    let covers = start - back < head.len as usize;
                    owner = covers.then_some((head.owner, back + head.len as usize));
                    break;
                }
            }
            let end = owner.map_or(own, |(_, end)| own.min(end));
            let run = Run { start: first + start as u32, len: (end - start) as u32 };
            let owner = owner.map(|(owner, _)| owner);
            let sound = match owner {
                Some(owner) => self.sound_entry(owner)?.is_some(),
                None => false,
            };
            return Ok(Some(Overwritten { run, owner: owner.filter(|_| sound) }));
        }
        Ok(None)
    }

    /// Gives back overwritten blocks that no map reaches, if that is still so.
    ///
    /// # Errors
    /// What reading the disk says.
    pub fn release_ownerless(&mut self, run: Run) -> Result<(), Ext2Error> {
        let (group, bit) = self.group_of_block(run.start)?;
        let now = self.overwritten_from(group, bit as usize)?;
        if now != Some(Overwritten { run, owner: None }) {
            return Ok(());
        }
        self.happen_to(run, BlockEvent::TransparentDelete)?;
        let Some((records, meta)) = self.records_and_meta() else { return Ok(()) };
        records.put_extent_head(meta, run.start, None)
    }
}
