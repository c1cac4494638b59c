//! What happens to blocks (§3.1, Figure 2), on the bitmaps of the disk: the two of the records
//! follow ext2's, and so do the counts in the groups' summaries.
//!
//! Every change of a block's state goes through [`Records::happen`]; a transition that
//! Figure 2 does not have is refused, for the disk then says what cannot be true.

use super::blocks::Run;
use super::{Ext2Error, Records, damaged};
use crate::bitmap;
use crate::meta::{Block, Meta};
use crate::records::summary::CHUNKS;
use crate::states::{BlockBits, BlockEvent, BlockState};

/// Blocks by state: how many of a group, or of the file system.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StateCounts {
    /// Free.
    pub free: u64,
    /// Allocated.
    pub allocated: u64,
    /// Transparent.
    pub transparent: u64,
    /// Allocated and overwritten.
    pub allocated_and_overwritten: u64,
    /// Free and overwritten.
    pub free_and_overwritten: u64,
}

impl StateCounts {
    /// Counts blocks in a state.
    pub fn add(&mut self, state: BlockState, blocks: u64) {
        let count = match state {
            BlockState::Free => &mut self.free,
            BlockState::Allocated => &mut self.allocated,
            BlockState::Transparent => &mut self.transparent,
            BlockState::AllocatedAndOverwritten => &mut self.allocated_and_overwritten,
            BlockState::FreeAndOverwritten => &mut self.free_and_overwritten,
        };
        *count += blocks;
    }

    /// In either state overwritten.
    pub fn overwritten(&self) -> u64 {
        self.allocated_and_overwritten + self.free_and_overwritten
    }
}

/// The three bitmaps of a group.
#[derive(Clone, Debug)]
pub struct GroupBitmaps {
    /// ext2's.
    pub allocated: Block,
    /// The records': blocks that transparent files count as their own.
    pub transparent: Block,
    /// The records': those of them that were overwritten.
    pub overwritten: Block,
    /// Blocks of the group.
    pub blocks: u32,
}

impl GroupBitmaps {
    /// The state of a block, and the end of the run of blocks in it, before `end`.
    ///
    /// # Panics
    /// If the block is not one of the group's.
    pub fn state_at(&self, bit: usize, end: usize) -> (BlockState, usize) {
        let bits = BlockBits {
            allocated: bitmap::is_set(&self.allocated, bit),
            transparent: bitmap::is_set(&self.transparent, bit),
            overwritten: bitmap::is_set(&self.overwritten, bit),
        };
        let state = BlockState::of(bits);
        let same = bitmap::run_end(&self.allocated, bit..end, bits.allocated);
        let same = bitmap::run_end(&self.transparent, bit..same, bits.transparent);
        // Where nothing is transparent, the other map means nothing.
        let same = match bits.transparent {
            true => bitmap::run_end(&self.overwritten, bit..same, bits.overwritten),
            false => same,
        };
        (state, same)
    }

    /// The runs of blocks in one state, within the group, in order.
    pub fn runs(&self) -> impl Iterator<Item = (std::ops::Range<u32>, BlockState)> + '_ {
        let end = self.blocks as usize;
        let mut bit = 0;
        std::iter::from_fn(move || {
            let start = bit;
            let (state, after) = (start < end).then(|| self.state_at(start, end))?;
            bit = after;
            Some((start as u32..after as u32, state))
        })
    }

    /// How many blocks of a range are in state free.
    pub fn free_between(&self, range: std::ops::Range<u32>) -> u64 {
        let end = range.end.min(self.blocks) as usize;
        let mut bit = range.start as usize;
        let mut free = 0;
        while bit < end {
            let (state, after) = self.state_at(bit, end);
            free += if state == BlockState::Free { (after - bit) as u64 } else { 0 };
            bit = after;
        }
        free
    }

    /// How many blocks are in which state.
    pub fn counts(&self) -> StateCounts {
        let mut counts = StateCounts::default();
        self.runs().for_each(|(run, state)| counts.add(state, u64::from(run.end - run.start)));
        counts
    }
}

impl Records {
    /// Something happens to a run within one group whose ext2 bitmap was `allocated` before:
    /// the records' bitmaps and counts follow.
    ///
    /// # Errors
    /// [`Ext2Error::Damaged`] where Figure 2 has no such transition; what reading says.
    pub(super) fn happen(
        &mut self,
        meta: &mut Meta,
        allocated: &Block,
        run: Run,
        event: BlockEvent,
    ) -> Result<(), Ext2Error> {
        let (group, first) = self.group_of(run.start);
        let range = first..first + run.len as usize;
        let transparent = self.transparent_bitmap(meta, group)?;
        let ordinary = matches!(event, BlockEvent::OrdinaryWrite | BlockEvent::OrdinaryDelete);
        if ordinary && bitmap::next(&transparent, range.clone(), true).is_none() {
            // Free to allocated, or back: ext2's bitmap is all there is to it.
            return Ok(());
        }
        let overwritten = self.overwritten_bitmap(meta, group)?;
        let blocks = self.blocks_of_group(group) as u32;
        let bitmaps =
            GroupBitmaps { allocated: allocated.clone(), transparent, overwritten, blocks };
        let (mut before, mut after) = (StateCounts::default(), StateCounts::default());
        let mut bit = range.start;
        while bit < range.end {
            let (state, end) = bitmaps.state_at(bit, range.end);
            let next = match state.after(event) {
                Ok(next) => next,
                // A damaged map names blocks that are free, or that another map gave back:
                // they stay what they are, and the next mount goes through the records.
                Err(_) if event == BlockEvent::TransparentDelete => {
                    self.note_damage();
                    state
                }
                Err(impossible) => {
                    let block = run.start + (bit - range.start) as u32;
                    return damaged(format!("block {block}: {impossible}"));
                }
            };
            before.add(state, (end - bit) as u64);
            after.add(next, (end - bit) as u64);
            let (old, new) = (state.bits(), next.bits());
            if old.transparent != new.transparent {
                self.put_transparent_bits(meta, group, bit..end, new.transparent)?;
            }
            if bitmap::next(&bitmaps.overwritten, bit..end, !new.overwritten).is_some() {
                self.put_overwritten_bits(meta, group, bit..end, new.overwritten)?;
            }
            bit = end;
        }
        self.change_summary(meta, group, |summary| {
            let moved = |count: u32, before: u64, after: u64| {
                (u64::from(count) + after).saturating_sub(before) as u32
            };
            summary.transparent = moved(summary.transparent, before.transparent, after.transparent);
            summary.overwritten =
                moved(summary.overwritten, before.overwritten(), after.overwritten());
        })
    }

    /// Counts a run within one group that was allocated to an ordinary file (§3.3).
    pub(super) fn note_allocation(&mut self, meta: &mut Meta, run: Run) -> Result<(), Ext2Error> {
        let (group, bit) = self.group_of(run.start);
        let range = bit..bit + run.len as usize;
        let chunk_blocks = self.chunk_blocks();
        let (first, last) = (range.start / chunk_blocks, (range.end - 1) / chunk_blocks);
        self.change_summary(meta, group, |summary| {
            for chunk in first..=last.min(CHUNKS - 1) {
                let start = range.start.max(chunk * chunk_blocks);
                let end = range.end.min((chunk + 1) * chunk_blocks);
                summary.histogram[chunk] += end.saturating_sub(start) as f32;
            }
        })
    }

    /// Compares a group's bitmap with what TFS left, when the group is met first. If another
    /// program changed it behind the superblock's back, all tags are compared from now on, and the
    /// next mount goes through the records.
    pub(super) fn meet_group(
        &mut self,
        meta: &mut Meta,
        group: u32,
        allocated: &Block,
    ) -> Result<(), Ext2Error> {
        if !self.is_changed_group(group)
            && self.summary(meta, group)?.bitmap_checksum != crc32fast::hash(allocated)
        {
            self.distrust();
        }
        Ok(())
    }

    /// Makes a group's bitmaps and summary agree with ext2's bitmap, whatever they were.
    pub(super) fn count_group(
        &mut self,
        meta: &mut Meta,
        group: u32,
        allocated: &Block,
    ) -> Result<(), Ext2Error> {
        let mut bitmaps = self.bitmaps(meta, group, allocated)?;
        let runs: Vec<_> = bitmaps.runs().collect();
        for (run, state) in runs {
            let range = run.start as usize..run.end as usize;
            let bits = state.bits();
            if bitmap::next(&bitmaps.overwritten, range.clone(), !bits.overwritten).is_some() {
                self.put_overwritten_bits(meta, group, range, bits.overwritten)?;
            }
        }
        bitmaps.overwritten = self.overwritten_bitmap(meta, group)?;
        let counts = bitmaps.counts();
        self.change_summary(meta, group, |summary| {
            summary.transparent = counts.transparent as u32;
            summary.overwritten = counts.overwritten() as u32;
            summary.bitmap_checksum = crc32fast::hash(allocated);
        })
    }

    /// The bitmaps of a group.
    pub(super) fn bitmaps(
        &mut self,
        meta: &mut Meta,
        group: u32,
        allocated: &Block,
    ) -> Result<GroupBitmaps, Ext2Error> {
        Ok(GroupBitmaps {
            allocated: allocated.clone(),
            transparent: self.transparent_bitmap(meta, group)?,
            overwritten: self.overwritten_bitmap(meta, group)?,
            blocks: self.blocks_of_group(group) as u32,
        })
    }
}
