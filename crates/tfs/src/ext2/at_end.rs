//! What transparent files need besides their blocks, kept out of ordinary files' way.
//!
//! Their names are ordinary data ("TFS stores transparent meta-data such as inodes and indirect
//! blocks as ordinary data", §3.2). Were the blocks of their directories taken by ext2's rules,
//! each would move all that is allocated behind it in its group by one. They are taken from the
//! end of the emptiest group instead, where ordinary files come last, and left out of the counts
//! by which directories choose their groups: nothing moves until that group is full. Inodes are taken from the end of a group's table, and no
//! group gives away more than half of those it has while others have more.

use super::blocks::Run;
use super::{Ext2, Ext2Error, Goal};
use crate::bitmap;
use crate::format::inode::{Inode, TRANSPARENT};

/// Where transparent files' inodes are taken.
#[derive(Debug, Default)]
pub(super) struct InodeCursor {
    /// The group from which to look on, downwards; none: the last.
    group: Option<u32>,
    /// How often the share of a group's inodes that is left to ordinary files was halved.
    halvings: u32,
}

fn holds_transparent_names(inode: &Inode) -> bool {
    inode.flags & TRANSPARENT != 0 && !inode.is_transparent_file()
}

impl Ext2 {
    /// A block for a directory, or for its indirect blocks.
    ///
    /// # Errors
    /// As [`Ext2::allocate`].
    pub(super) fn allocate_for_names(
        &mut self,
        inode: &Inode,
        goal: Goal,
    ) -> Result<u32, Ext2Error> {
        if !holds_transparent_names(inode) {
            return Ok(self.allocate(Goal { grows: false, ..goal }, 1)?.start);
        }
        let kept = if goal.privileged { 0 } else { self.superblock.reserved_blocks() };
        if self.superblock.free_blocks() <= kept {
            return Err(Ext2Error::NoSpace);
        }
        let emptiest = self.emptiest_group()?;
        for group in [emptiest].into_iter().chain((0..self.superblock.groups()).rev()) {
            if self.descriptor(group)?.free_blocks == 0 {
                continue;
            }
            if let Some(block) = self.last_free_block(group)? {
                let run = self.take(Run { start: block, len: 1 }, Goal { grows: false, ..goal })?;
                self.count_names(run, true)?;
                return Ok(run.start);
            }
        }
        if self.meta.resting() > 0 { Err(Ext2Error::NoSpaceYet) } else { Err(Ext2Error::NoSpace) }
    }

    /// The group that ordinary files will fill last, as far as one can tell: the one with the
    /// most blocks that they have not, the last of several.
    fn emptiest_group(&mut self) -> Result<u32, Ext2Error> {
        let (mut emptiest, mut most) = (0, 0);
        for group in (0..self.superblock.groups()).rev() {
            let mut left = u32::from(self.descriptor(group)?.free_blocks);
            if let Some((records, meta)) = self.records_and_meta() {
                left = left.saturating_add(records.summary(meta, group)?.name_blocks);
            }
            if left > most {
                (emptiest, most) = (group, left);
            }
        }
        Ok(emptiest)
    }

    /// The last free block of a group. (A transparent file may lose it: to look for another
    /// would be to take one from among the ordinary files.)
    fn last_free_block(&mut self, group: u32) -> Result<Option<u32>, Ext2Error> {
        let (allocated, _) = self.block_bitmap(group)?;
        let first = self.superblock.first_block_of_group(group);
        let free = (0..self.superblock.blocks_of_group(group)).rev().find(|bit| {
            let block = first + bit;
            let pinned = self.records.as_ref().is_some_and(|r| r.pinned_until(block).is_some());
            !bitmap::is_set(&allocated, *bit as usize) && !pinned && !self.meta.is_resting(block)
        });
        Ok(free.map(|bit| first + bit))
    }

    /// Notes that blocks of a file are given back.
    pub(super) fn note_given_back(&mut self, inode: &Inode, run: Run) -> Result<(), Ext2Error> {
        if holds_transparent_names(inode) { self.count_names(run, false) } else { Ok(()) }
    }

    /// Counts blocks of transparent directories, to leave them out of ordinary decisions. (One
    /// that had blocks before it became transparent takes them out of the count when it goes:
    /// the count is then too low, and spreads directories a little otherwise.)
    fn count_names(&mut self, run: Run, taken: bool) -> Result<(), Ext2Error> {
        let (group, _) = self.group_of_block(run.start)?;
        let Some((records, meta)) = self.records_and_meta() else { return Ok(()) };
        records.change_summary(meta, group, |summary| {
            let count = summary.name_blocks;
            summary.name_blocks =
                if taken { count.saturating_add(run.len) } else { count.saturating_sub(run.len) };
        })
    }

    /// Blocks of transparent directories on the whole disk.
    pub(super) fn hidden_blocks(&self) -> u32 {
        let hidden = self.records.as_ref().map_or(0, |r| r.totals().name_blocks);
        u32::try_from(hidden).unwrap_or(u32::MAX)
    }

    /// The group for a transparent file's inode.
    pub(super) fn group_for_transparent_file(&mut self) -> Result<u32, Ext2Error> {
        let groups = self.superblock.groups();
        let per_group = self.superblock.inodes_per_group();
        loop {
            let halvings = self.inode_cursor.halvings + 1;
            let kept = per_group.checked_shr(halvings).unwrap_or(0);
            let from = self.inode_cursor.group.unwrap_or(groups - 1).min(groups - 1);
            for group in (0..=from).rev() {
                if u32::from(self.descriptor(group)?.free_inodes) > kept {
                    self.inode_cursor.group = Some(group);
                    return Ok(group);
                }
            }
            if kept == 0 {
                self.inode_cursor = InodeCursor::default();
                return Err(Ext2Error::NoInodes);
            }
            self.inode_cursor = InodeCursor { group: None, halvings };
        }
    }

    /// Notes that a transparent file's inode was given back.
    pub(super) fn reset_inode_cursor(&mut self) {
        self.inode_cursor = InodeCursor::default();
    }
}
