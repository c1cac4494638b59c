//! Where ordinary, transparent, overwritten and free blocks lie, as the paper's Figure 10: a disk
//! as a row of cells of equally many blocks, each with how many are in which state.
//!
//! It knows nothing of pictures.

use atoll_vfs::Errno;

use crate::ext2::StateCounts;
use crate::fs::Tfs;

/// The most cells of a map.
pub const MAX_CELLS: u32 = 1 << 20;

/// A map of a file system's blocks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BlockMap {
    /// Size of a block, bytes.
    pub block_bytes: u32,
    /// Blocks in all.
    pub blocks: u64,
    /// Blocks of each cell; the last may have fewer.
    pub cell_blocks: u32,
    /// The cells, from the start of the disk.
    pub cells: Vec<StateCounts>,
}

impl Tfs {
    /// The map in `cells` cells, or fewer where there are fewer blocks. Blocks before the
    /// first group (the boot block) count as allocated.
    ///
    /// # Errors
    /// `EINVAL` for no cells or more than [`MAX_CELLS`], `EIO`.
    pub fn block_map(&self, cells: u32) -> Result<BlockMap, Errno> {
        if cells == 0 || cells > MAX_CELLS {
            return Err(Errno::EINVAL);
        }
        let (block_bytes, blocks, groups) = self.geometry();
        let cell_blocks = blocks.div_ceil(cells).max(1);
        let count = blocks.div_ceil(cell_blocks);
        let mut map = BlockMap {
            block_bytes,
            blocks: u64::from(blocks),
            cell_blocks,
            cells: vec![StateCounts::default(); count as usize],
        };
        map.cells[0].allocated += u64::from(self.first_block_of_group(0));
        for group in 0..groups {
            let first = self.first_block_of_group(group);
            for (run, state) in self.group_bitmaps(group)?.runs() {
                let end = first + run.end;
                let mut at = first + run.start;
                while at < end {
                    let cell = at / cell_blocks;
                    let stop = u64::from(cell + 1) * u64::from(cell_blocks);
                    let stop = stop.min(u64::from(end)) as u32;
                    map.cells[cell as usize].add(state, u64::from(stop - at));
                    at = stop;
                }
            }
        }
        Ok(map)
    }
}

impl BlockMap {
    /// All cells together.
    pub fn totals(&self) -> StateCounts {
        self.cells.iter().fold(StateCounts::default(), |sum, cell| StateCounts {
            free: sum.free + cell.free,
            allocated: sum.allocated + cell.allocated,
            transparent: sum.transparent + cell.transparent,
            allocated_and_overwritten: sum.allocated_and_overwritten
                + cell.allocated_and_overwritten,
            free_and_overwritten: sum.free_and_overwritten + cell.free_and_overwritten,
        })
    }
}
