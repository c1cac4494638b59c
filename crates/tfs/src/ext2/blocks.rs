//! Ordinary allocation of blocks: ext2's, with and without transparent data the same.
//!
//! A file's next block should follow its last; a new file's first lies in the group of its
//! inode. From the goal on, the rest of its group is searched, then the other groups in turn
//! (`ext2_new_blocks`). A block is free when ext2's bitmap says so: transparent and
//! overwritten blocks are (§3.1). Three kinds of free blocks are left alone all the same:
//! those that rest until a commit ([`Meta::is_resting`](crate::meta::Meta::is_resting)),
//! those in another file's window (while others are left), and those of transparent files
//! that are open (§3.2).

use super::{Ext2, Ext2Error, Part, damaged};
use crate::bitmap;
use crate::meta::Block;
use crate::states::BlockEvent;

/// Blocks that follow each other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Run {
    /// The first.
    pub start: u32,
    /// How many.
    pub len: u32,
}

/// Where blocks should be, and for which file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Goal {
    /// The best first block.
    pub block: u32,
    /// The file they are for.
    pub inode: u32,
    /// Whether the file will likely grow from there: a window is kept for it.
    pub grows: bool,
    /// Whether the blocks kept for the administrator may be used.
    pub privileged: bool,
}

/// Is told of each allocation of blocks to ordinary files, first block and count, as the
/// paper's kernel that recorded block allocations (§3.3). It must not call the file system.
#[derive(Clone)]
pub struct AllocationObserver(pub std::sync::Arc<dyn Fn(u32, u32) + Send + Sync>);

impl std::fmt::Debug for AllocationObserver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("AllocationObserver")
    }
}

/// A search within one group takes the first free run of this length, or of what is wanted if
/// that is less; if there is none, the first free block. ext2 looks for a free byte of its
/// bitmap first.
const GOOD_RUN_BLOCKS: usize = 8;

impl Ext2 {
    /// The goal for the first block of a file: the group of its inode.
    pub fn goal_of_inode(&self, inode: u32) -> u32 {
        let group = (inode - 1) / self.superblock.inodes_per_group();
        self.superblock.first_block_of_group(group)
    }

    /// Takes at least one block and at most `want` that follow each other, as near to the
    /// goal as ext2 would.
    ///
    /// # Errors
    /// [`Ext2Error::NoSpace`]; [`Ext2Error::NoSpaceYet`] if freed blocks rest.
    pub fn allocate(&mut self, goal: Goal, want: u32) -> Result<Run, Ext2Error> {
        let free = self.superblock.free_blocks();
        let kept = if goal.privileged { 0 } else { self.superblock.reserved_blocks() };
        if free <= kept {
            return Err(Ext2Error::NoSpace);
        }
        let want = want.min(free - kept).max(1);
        let (goal_group, goal_bit) = self.group_of_block(goal.block).unwrap_or((0, 0));
        for keep_windows in [true, false] {
            let groups = self.superblock.groups();
            for i in 0..groups {
                let group = (goal_group + i) % groups;
                if self.descriptor(group)?.free_blocks == 0 {
                    continue;
                }
                let from = if i == 0 { goal_bit as usize } else { 0 };
                if let Some(run) = self.search(group, from, want, goal, keep_windows)? {
                    return self.take(run, goal);
                }
            }
            // The part of the goal's group before the goal comes last.
            if let Some(run) = self.search(goal_group, 0, want, goal, keep_windows)? {
                return self.take(run, goal);
            }
        }
        if self.meta.resting() > 0 { Err(Ext2Error::NoSpaceYet) } else { Err(Ext2Error::NoSpace) }
    }

    fn search(
        &mut self,
        group: u32,
        from: usize,
        want: u32,
        goal: Goal,
        keep_windows: bool,
    ) -> Result<Option<Run>, Ext2Error> {
        let (bits, _) = self.block_bitmap(group)?;
        let first = self.superblock.first_block_of_group(group);
        let end = self.superblock.blocks_of_group(group) as usize;
        let good = GOOD_RUN_BLOCKS.min(want as usize);
        let mut fallback = None;
        let mut bit = from;
        while let Some(start) = bitmap::next(&bits, bit..end, false) {
            let limit = end.min(start + want as usize);
            let free = bitmap::run_end(&bits, start..limit, false) - start;
            let run = Run { start: first + start as u32, len: free as u32 };
            match self.usable(run, goal.inode, keep_windows)? {
                Usable::Blocks(len) => {
                    let run = Run { len, ..run };
                    // At the goal itself any length will do: the file goes on there.
                    if len as usize >= good || run.start == goal.block {
                        return Ok(Some(run));
                    }
                    fallback = fallback.or(Some(run));
                    bit = start + len as usize;
                }
                Usable::Skip(blocks) => bit = start + blocks.max(1) as usize,
            }
        }
        Ok(fallback)
    }

    /// How many blocks of a free run can be used from its start, or how many to skip.
    fn usable(&mut self, run: Run, inode: u32, keep_windows: bool) -> Result<Usable, Ext2Error> {
        if self.meta.is_resting(run.start) {
            return Ok(Usable::Skip(1));
        }
        if let Some(end) = self.windows.end_of_other(inode, run.start).filter(|_| keep_windows) {
            return Ok(Usable::Skip(end - run.start));
        }
        if let Some(end) = self.records.as_ref().and_then(|r| r.pinned_until(run.start)) {
            return Ok(Usable::Skip(end - run.start));
        }
        let mut len = run.len;
        if keep_windows {
            len = self.windows.open_to(inode, run.start, len);
        }
        if let Some(records) = &self.records {
            len = len.min(records.unpinned(run.start, len));
        }
        let resting = (0..len).find(|i| self.meta.is_resting(run.start + i));
        Ok(Usable::Blocks(resting.unwrap_or(len)))
    }

    pub(super) fn take(&mut self, run: Run, goal: Goal) -> Result<Run, Ext2Error> {
        self.put_allocated(run, true)?;
        if goal.grows {
            let (group, bit) = self.group_of_block(run.start + run.len - 1)?;
            let room = self.superblock.blocks_of_group(group) - bit - 1;
            self.windows.advance(goal.inode, run.start + run.len, room);
        }
        if let Some(records) = &mut self.records {
            records.note_allocation(&mut self.meta, run)?;
        }
        if let Some(observer) = &self.observer {
            (observer.0)(run.start, run.len);
        }
        Ok(run)
    }

    /// Gives blocks back; they rest until the running transaction is committed.
    ///
    /// # Errors
    /// [`Ext2Error::Damaged`] if they are not all allocated blocks of files.
    pub fn release(&mut self, run: Run) -> Result<(), Ext2Error> {
        let mut rest = run;
        while rest.len > 0 {
            let (group, bit) = self.group_of_block(rest.start)?;
            let len = rest.len.min(self.superblock.blocks_of_group(group) - bit);
            let part = Run { start: rest.start, len };
            self.check_not_metadata(group, part)?;
            self.put_allocated(part, false)?;
            self.meta.free(part.start, part.len);
            self.transparent_cursor.note_returned(part.len);
            rest = Run { start: rest.start + len, len: rest.len - len };
        }
        Ok(())
    }

    /// Forgets the window of a file that is closed, cut off or gone.
    pub fn drop_window(&mut self, inode: u32) {
        self.windows.drop_of(inode);
    }

    /// Refuses a run that touches a group's own metadata: a damaged pointer.
    pub(crate) fn check_not_metadata(&mut self, group: u32, run: Run) -> Result<(), Ext2Error> {
        let own = self.descriptor(group)?.own_runs(&self.superblock, group);
        let end = run.start + run.len;
        if own.iter().any(|(start, len)| run.start < start + len && *start < end) {
            return damaged(format!("blocks {}..{end} belong to the file system", run.start));
        }
        Ok(())
    }

    /// Marks a run within one group, and keeps the counts.
    fn put_allocated(&mut self, run: Run, allocated: bool) -> Result<(), Ext2Error> {
        let (group, bit) = self.group_of_block(run.start)?;
        let (bits, mut descriptor): (Block, _) = self.block_bitmap(group)?;
        let range = bit as usize..(bit + run.len) as usize;
        if range.end > self.superblock.blocks_of_group(group) as usize {
            return damaged(format!("blocks {}+{} cross a group", run.start, run.len));
        }
        if bitmap::next(&bits, range.clone(), allocated).is_some() {
            let was = if allocated { "allocated already" } else { "not allocated" };
            return damaged(format!("blocks {}+{} are {was}", run.start, run.len));
        }
        let len = run.len as u16;
        let count = if allocated {
            descriptor.free_blocks.checked_sub(len)
        } else {
            descriptor.free_blocks.checked_add(len)
        };
        let total = self.superblock.free_blocks();
        let total = if allocated { total.checked_sub(run.len) } else { total.checked_add(run.len) };
        let (Some(count), Some(total)) = (count, total) else {
            return damaged(format!("the number of free blocks of group {group} is wrong"));
        };
        descriptor.free_blocks = count;
        if let Some(records) = &mut self.records {
            let event =
                if allocated { BlockEvent::OrdinaryWrite } else { BlockEvent::OrdinaryDelete };
            records.happen(&mut self.meta, &bits, run, event)?;
            records.note_changed_group(&mut self.meta, group)?;
        }
        drop(bits);
        bitmap::put(self.meta.change(descriptor.block_bitmap, Part::Ordinary)?, range, allocated);
        self.put_descriptor(group, &descriptor)?;
        self.change_superblock(|superblock| superblock.set_free_blocks(total))
    }
}

enum Usable {
    Blocks(u32),
    Skip(u32),
}
