//! ext2's bitmaps and counts, against what inodes and directories say.

use atoll_vfs::FileKind;

use super::{CheckError, Checker};
use crate::bitmap;

/// The totals of all groups.
#[derive(Default)]
struct Totals {
    free_blocks: u64,
    free_inodes: u64,
}

impl Checker {
    pub(super) fn check_bitmaps(&mut self) -> Result<(), CheckError> {
        let mut totals = Totals::default();
        for group in 0..self.superblock.groups() {
            self.check_block_bitmap(group, &mut totals)?;
            self.check_inode_bitmap(group, &mut totals)?;
            self.progress.done(1);
        }
        for (what, said, counted) in [
            ("blocks", self.superblock.free_blocks(), totals.free_blocks),
            ("inodes", self.superblock.free_inodes(), totals.free_inodes),
        ] {
            if u64::from(said) != counted {
                self.found(format!("the superblock says {said} {what} are free, {counted} are"));
            }
        }
        Ok(())
    }

    fn check_block_bitmap(&mut self, group: u32, totals: &mut Totals) -> Result<(), CheckError> {
        let descriptor = self.descriptors[group as usize];
        let read = self.ext2.meta.read(descriptor.block_bitmap).map_err(Into::into);
        let Some(bits) = self.noted(read)? else { return Ok(()) };
        let first = self.superblock.first_block_of_group(group) as usize;
        let blocks = self.superblock.blocks_of_group(group) as usize;
        let (mut lost, mut unmarked, mut used) = (Vec::new(), Vec::new(), 0);
        for bit in 0..blocks {
            let is_used = bitmap::is_set(&self.used, first + bit);
            used += u64::from(is_used);
            match (bitmap::is_set(&bits, bit), is_used) {
                (true, false) => lost.push(first + bit),
                (false, true) => unmarked.push(first + bit),
                _ => {}
            }
        }
        self.note_difference(group, "blocks", "marked as used and belong to no file", &lost);
        self.note_difference(group, "blocks", "used and marked as free", &unmarked);
        if bitmap::next(&bits, blocks..8 * bits.len(), false).is_some() {
            self.found(format!("the block bitmap of group {group} does not end in ones"));
        }
        let free = blocks as u64 - used;
        totals.free_blocks += free;
        if u64::from(descriptor.free_blocks) != free {
            let said = descriptor.free_blocks;
            self.found(format!("group {group} says that {said} blocks are free, {free} are"));
        }
        Ok(())
    }

    fn check_inode_bitmap(&mut self, group: u32, totals: &mut Totals) -> Result<(), CheckError> {
        let descriptor = self.descriptors[group as usize];
        let read = self.ext2.meta.read(descriptor.inode_bitmap).map_err(Into::into);
        let Some(bits) = self.noted(read)? else { return Ok(()) };
        let per_group = self.superblock.inodes_per_group();
        let first = group * per_group + 1;
        let mut used = vec![0; (per_group as usize).div_ceil(8)];
        let reserved = (self.superblock.first_inode() - 1).saturating_sub(first - 1);
        bitmap::put(&mut used, 0..reserved.min(per_group) as usize, true);
        let mut directories = 0;
        for (number, known) in self.known.range(first..first + per_group) {
            let bit = (number - first) as usize;
            bitmap::put(&mut used, bit..bit + 1, true);
            directories += u32::from(known.kind == Some(FileKind::Directory));
        }
        let (mut lost, mut unmarked) = (Vec::new(), Vec::new());
        for bit in 0..per_group as usize {
            match (bitmap::is_set(&bits, bit), bitmap::is_set(&used, bit)) {
                (true, false) => lost.push(first as usize + bit),
                (false, true) => unmarked.push(first as usize + bit),
                _ => {}
            }
        }
        self.note_difference(group, "inodes", "marked as used and are not", &lost);
        self.note_difference(group, "inodes", "used and marked as free", &unmarked);
        if bitmap::next(&bits, per_group as usize..8 * bits.len(), false).is_some() {
            self.found(format!("the inode bitmap of group {group} does not end in ones"));
        }
        let free = per_group - bitmap::count(&used, 0..per_group as usize) as u32;
        totals.free_inodes += u64::from(free);
        if u32::from(descriptor.free_inodes) != free {
            let said = descriptor.free_inodes;
            self.found(format!("group {group} says that {said} inodes are free, {free} are"));
        }
        if u32::from(descriptor.directories) != directories {
            let said = descriptor.directories;
            self.found(format!(
                "group {group} says that it has {said} directories, it has {directories}"
            ));
        }
        Ok(())
    }

    fn note_difference(&mut self, group: u32, what: &str, how: &str, numbers: &[usize]) {
        let Some(first) = numbers.first() else { return };
        let count = numbers.len();
        self.found(format!("group {group}: {count} {what} are {how}, the first is {first}"));
    }
}
