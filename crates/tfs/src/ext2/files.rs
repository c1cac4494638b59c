//! The blocks of ordinary files: where they are, growing, cutting off.
//!
//! Work is done in steps that change a bounded number of metadata blocks each, so that a step
//! fits into any transaction; between steps the file is whole, only not yet as long or as
//! short as it shall be.

use std::ops::Range;

use super::blocks::Run;
use super::mapping::Path;
use super::{Ext2, Ext2Error, Goal};
use crate::format::inode::{DIRECT, Inode, POINTERS};
use crate::format::{put_u32, u32_at};
use crate::meta::Part;

/// Blocks of a file that follow each other on the disk too, or a hole.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    /// First block within the file.
    pub logical: u32,
    /// First block on the disk, 0 for a hole.
    pub start: u32,
    /// Blocks.
    pub len: u32,
}

/// The most runs one step takes or gives back: each may lie in a group of its own and so
/// change its bitmap, descriptor, summary and overwritten bitmap.
const RUNS_A_STEP: usize = 4;

/// Metadata blocks that a step of [`Ext2::fill_holes`], [`Ext2::cut_off`] or [`Ext2::punch`]
/// changes at most: four for each run (and as many for indirect blocks), the inode, the
/// superblock, two ways of indirect blocks.
pub const BLOCKS_A_STEP: usize = 2 * 4 * RUNS_A_STEP + 2 + 6;

/// A range of blocks that a file gives back, and what is left of a step of that.
struct Removal {
    /// Blocks of the file.
    range: Range<u64>,
    /// Whether the file ends where the range begins.
    cuts: bool,
    /// Runs of data that may still be given back.
    runs: usize,
    /// Blocks of pointers that may still be given back.
    tables: usize,
}

impl Removal {
    fn of(range: Range<u64>, cuts: bool) -> Removal {
        Removal { range, cuts, runs: RUNS_A_STEP, tables: RUNS_A_STEP }
    }

    fn is_spent(&self) -> bool {
        self.runs == 0
    }
}

impl Ext2 {
    /// The longest that a file may become, bytes, as in the kernel's drivers (`ext2_max_size`):
    /// what three levels of indirect blocks reach, and no more than 2^32 - 1 units of 512
    /// bytes with the indirect blocks that it has without holes.
    pub fn longest_file_bytes(&self) -> u64 {
        let block_bytes = u64::from(self.superblock().block_bytes());
        let most = u64::from(u32::MAX) / (block_bytes / 512);
        let reach = self.reach_blocks();
        if reach + self.indirect_blocks(reach) <= most {
            return reach * block_bytes;
        }
        (most - self.indirect_blocks(most)) * block_bytes
    }

    /// The longest that a file can be, bytes: a length beyond is damage.
    pub fn reach_bytes(&self) -> u64 {
        self.reach_blocks() * u64::from(self.superblock().block_bytes())
    }

    /// Blocks that three levels of indirect blocks reach.
    fn reach_blocks(&self) -> u64 {
        let each = u64::from(self.superblock().block_bytes()) / 4;
        DIRECT as u64 + each + each.pow(2) + each.pow(3)
    }

    /// Indirect blocks of a file of so many blocks without holes; it needs two levels at least.
    fn indirect_blocks(&self, blocks: u64) -> u64 {
        let each = u64::from(self.superblock().block_bytes()) / 4;
        let beyond_one = blocks - DIRECT as u64 - each;
        let beyond_two = beyond_one.saturating_sub(each.pow(2));
        let two = 1 + beyond_one.div_ceil(each).min(each);
        let three = beyond_two.div_ceil(each) + beyond_two.div_ceil(each.pow(2)) + 1;
        1 + two + if beyond_two > 0 { three } else { 0 }
    }

    /// The extents of `count` blocks of a file from `logical` on, holes among them.
    ///
    /// # Errors
    /// [`Ext2Error::Damaged`] if a pointer names no block that a file may have.
    pub fn extents(
        &mut self,
        inode: &Inode,
        logical: u32,
        count: u32,
    ) -> Result<Vec<Extent>, Ext2Error> {
        let mut extents: Vec<Extent> = Vec::new();
        let mut at = logical;
        let end = logical.saturating_add(count);
        while at < end {
            let (start, skip) = self.block_or_hole(inode, at)?;
            let len = skip.min(end - at);
            let follows = |last: &Extent| match (last.start, start) {
                (0, 0) => true,
                (0, _) | (_, 0) => false,
                (last_start, start) => last_start + last.len == start,
            };
            match extents.last_mut().filter(|last| follows(last)) {
                Some(last) => last.len += len,
                None => extents.push(Extent { logical: at, start, len }),
            }
            at += len;
        }
        Ok(extents)
    }

    /// The block at `logical`, or 0 and how far the hole reaches at least.
    fn block_or_hole(&mut self, inode: &Inode, logical: u32) -> Result<(u32, u32), Ext2Error> {
        let Some(path) = Path::to(logical, self.meta.block_bytes()) else {
            return Ok((0, u32::MAX - logical));
        };
        let each = (self.meta.block_bytes() / 4) as u64;
        let indices = path.indices();
        let mut block = inode.pointers[indices[0] as usize];
        for (level, index) in indices[1..].iter().enumerate() {
            let below = (indices.len() - 2 - level) as u32;
            if block == 0 {
                // The whole tree below is missing: up to its end from here.
                let mut within = 0;
                for index in &indices[1 + level..] {
                    within = within * each + u64::from(*index);
                }
                let reach = each.pow(below + 1) - within;
                return Ok((0, u32::try_from(reach).unwrap_or(u32::MAX)));
            }
            self.check_pointer(block)?;
            let table = self.meta.read(block)?;
            block = u32_at(&table, 4 * *index as usize);
            if block == 0 && below == 0 {
                let rest = &table[4 * *index as usize..];
                let zeros = rest.chunks_exact(4).take_while(|pointer| *pointer == [0; 4]);
                return Ok((0, zeros.count() as u32));
            }
        }
        if block != 0 {
            self.check_pointer(block)?;
        }
        Ok((block, 1))
    }

    /// Gives blocks to the holes among `count` blocks from `logical` on, as many as one step
    /// can; returns what it gave, in the order of the file, and how many blocks from
    /// `logical` on have blocks now. The inode in memory is changed; the caller writes it.
    /// What stands in new blocks is not yet the file's: the caller fills them.
    ///
    /// # Errors
    /// [`Ext2Error::NoSpace`] if nothing could be given.
    pub fn fill_holes(
        &mut self,
        number: u32,
        inode: &mut Inode,
        logical: u32,
        count: u32,
        privileged: bool,
    ) -> Result<(Vec<Extent>, u32), Ext2Error> {
        let mut given = Vec::new();
        let mut done = 0;
        for extent in self.extents(inode, logical, count)? {
            let mut filled = if extent.start == 0 { 0 } else { extent.len };
            while filled < extent.len {
                if given.len() >= RUNS_A_STEP {
                    return Ok((given, done));
                }
                let at = extent.logical + filled;
                match self.give_run(number, inode, at, extent.len - filled, privileged) {
                    Ok(run) => {
                        given.push(Extent { logical: at, start: run.start, len: run.len });
                        filled += run.len;
                        done += run.len;
                    }
                    Err(Ext2Error::NoSpace | Ext2Error::NoSpaceYet) if done > 0 => {
                        return Ok((given, done));
                    }
                    Err(error) => return Err(error),
                }
            }
            if extent.start != 0 {
                done += extent.len;
            }
        }
        Ok((given, done))
    }

    /// Makes holes again of what [`Ext2::fill_holes`] gave just now. The inode in memory is
    /// changed; the caller writes it.
    ///
    /// # Errors
    /// [`Ext2Error::Damaged`], and what reading metadata says.
    pub fn take_back(&mut self, inode: &mut Inode, given: &[Extent]) -> Result<(), Ext2Error> {
        for extent in given {
            for i in 0..extent.len {
                self.put_block(inode, extent.logical + i, 0)?;
            }
            self.give_back(inode, Run { start: extent.start, len: extent.len })?;
        }
        Ok(())
    }

    /// One run for the hole at `logical`, within one block of pointers.
    fn give_run(
        &mut self,
        number: u32,
        inode: &mut Inode,
        logical: u32,
        want: u32,
        privileged: bool,
    ) -> Result<Run, Ext2Error> {
        let before = if logical == 0 { 0 } else { self.block_of(inode, logical - 1)? };
        let block = if before == 0 { self.goal_of_inode(number) } else { before + 1 };
        let at_end = u64::from(logical) * self.meta.block_bytes() as u64 >= inode.size_bytes;
        let goal = Goal { block, inode: number, grows: at_end, privileged };
        let before_way = inode.blocks_512;
        self.make_way(inode, logical, goal)?;
        // An indirect block was put at the goal: the data follows it.
        let made =
            inode.blocks_512.saturating_sub(before_way) / (self.superblock().block_bytes() / 512);
        let goal = Goal { block: goal.block.saturating_add(made), ..goal };
        let run = self.allocate(goal, want.min(self.in_one_table(logical)))?;
        for i in 0..run.len {
            self.put_block(inode, logical + i, run.start + i)?;
        }
        inode.count_blocks(run.len, self.superblock().block_bytes());
        Ok(run)
    }

    /// How many blocks from `logical` on have their pointers in the same block, or in the
    /// inode.
    fn in_one_table(&self, logical: u32) -> u32 {
        let each = (self.meta.block_bytes() / 4) as u32;
        match logical.checked_sub(DIRECT as u32) {
            None => DIRECT as u32 - logical,
            Some(beyond) => each - beyond % each,
        }
    }

    /// Gives back blocks from the end of a file down to block `keep`, as many as one step
    /// can; returns whether none are left beyond. The length is cut with them. The inode in
    /// memory is changed; the caller writes it.
    ///
    /// # Errors
    /// [`Ext2Error::Damaged`] if a pointer is impossible, or the blocks are not allocated.
    pub fn cut_off(
        &mut self,
        number: u32,
        inode: &mut Inode,
        keep: u32,
    ) -> Result<bool, Ext2Error> {
        self.drop_window(number);
        let keep = u64::from(keep);
        let mut removal = Removal::of(keep..u64::MAX, true);
        let done = self.remove(inode, &mut removal)?;
        if done {
            self.cut_length(inode, keep);
        }
        Ok(done)
    }

    /// Makes a hole of blocks of a file, from the last to the first, as many as one step can;
    /// returns whether none are left. The inode in memory is changed; the caller writes it.
    ///
    /// # Errors
    /// As [`Ext2::cut_off`].
    pub fn punch(&mut self, inode: &mut Inode, range: Range<u32>) -> Result<bool, Ext2Error> {
        let range = u64::from(range.start)..u64::from(range.end);
        self.remove(inode, &mut Removal::of(range, false))
    }

    /// Gives back the blocks of a range, as many as one step can; whether none are left.
    fn remove(&mut self, inode: &mut Inode, removal: &mut Removal) -> Result<bool, Ext2Error> {
        for root in (0..POINTERS).rev() {
            let depth = root.saturating_sub(DIRECT - 1);
            let (first, reach) = self.reach_of(root);
            if first + reach <= removal.range.start {
                break;
            }
            let block = inode.pointers[root];
            if block == 0 || first >= removal.range.end {
                continue;
            }
            if !self.remove_below(inode, block, depth, first, removal)? {
                inode.pointers[root] = 0;
            }
            if removal.is_spent() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The first block of a file that a pointer of its inode reaches, and how many it does.
    fn reach_of(&self, root: usize) -> (u64, u64) {
        let each = (self.meta.block_bytes() / 4) as u64;
        match root {
            0..DIRECT => (root as u64, 1),
            _ => {
                let depth = (root - DIRECT + 1) as u32;
                let before: u64 = (1..depth).map(|d| each.pow(d)).sum();
                (DIRECT as u64 + before, each.pow(depth))
            }
        }
    }

    fn cut_length(&self, inode: &mut Inode, blocks: u64) {
        inode.size_bytes = inode.size_bytes.min(blocks * self.meta.block_bytes() as u64);
    }

    /// Gives back what lies in the range of what a pointer of `depth` levels leads to, and the
    /// blocks of pointers that lead to nothing then; returns whether anything is left below the
    /// pointer. `first` is the first block within the file that it leads to.
    fn remove_below(
        &mut self,
        inode: &mut Inode,
        block: u32,
        depth: usize,
        first: u64,
        removal: &mut Removal,
    ) -> Result<bool, Ext2Error> {
        if depth == 0 {
            if removal.is_spent() {
                return Ok(true);
            }
            self.give_back(inode, Run { start: block, len: 1 })?;
            self.note_removed(inode, first, removal);
            return Ok(false);
        }
        self.check_pointer(block)?;
        let each = (self.meta.block_bytes() / 4) as u64;
        let below = each.pow(depth as u32 - 1);
        // The part of the range that lies here, as blocks from `first` on.
        let low = removal.range.start.saturating_sub(first);
        let high = (removal.range.end - first).min(each * below);
        let mut index = high.div_ceil(below);
        while index > low / below {
            let bytes = self.meta.read(block)?;
            // The last pointer, and those before it that lead to the blocks before.
            let last = index - 1;
            let pointer = u32_at(&bytes, 4 * last as usize);
            if pointer == 0 {
                index = last;
                continue;
            }
            if removal.is_spent() {
                return Ok(true);
            }
            drop(bytes);
            if depth > 1 {
                let below_first = first + last * below;
                if !self.remove_below(inode, pointer, depth - 1, below_first, removal)? {
                    put_u32(self.meta.change(block, Part::Ordinary)?, 4 * last as usize, 0);
                }
                index = last;
            } else {
                index = self.cut_run(inode, block, low..last + 1)?;
                self.note_removed(inode, first + index, removal);
            }
        }
        if self.meta.read(block)?.iter().any(|byte| *byte != 0) {
            return Ok(true);
        }
        if removal.tables == 0 {
            removal.runs = 0;
            return Ok(true);
        }
        removal.tables -= 1;
        self.give_back(inode, Run { start: block, len: 1 })?;
        Ok(false)
    }

    /// Notes that the run from block `first` of a file on was given back.
    fn note_removed(&self, inode: &mut Inode, first: u64, removal: &mut Removal) {
        removal.runs -= 1;
        if removal.cuts {
            self.cut_length(inode, first);
        }
    }

    /// Gives back the run that a table's pointers before the end of `range` name, as far as it
    /// goes within `range` and within one group, so that a step changes no more blocks than it
    /// may; returns the index of its first pointer.
    fn cut_run(
        &mut self,
        inode: &mut Inode,
        table: u32,
        range: Range<u64>,
    ) -> Result<u64, Ext2Error> {
        let bytes = self.meta.read(table)?;
        let pointer = |index: u64| u32_at(&bytes, 4 * index as usize);
        let mut start = range.end - 1;
        let (_, bit) = self.group_of_block(pointer(start))?;
        let mut run = Run { start: pointer(start), len: 1 };
        while start > range.start && run.len <= bit && pointer(start - 1) == run.start - 1 {
            start -= 1;
            run = Run { start: run.start - 1, len: run.len + 1 };
        }
        self.give_back(inode, run)?;
        let bytes = self.meta.change(table, Part::Ordinary)?;
        bytes[4 * start as usize..4 * range.end as usize].fill(0);
        Ok(start)
    }

    fn give_back(&mut self, inode: &mut Inode, run: Run) -> Result<(), Ext2Error> {
        self.release(run)?;
        self.note_given_back(inode, run)?;
        let units = run.len * (self.superblock().block_bytes() / 512);
        inode.blocks_512 = inode.blocks_512.saturating_sub(units);
        Ok(())
    }
}
