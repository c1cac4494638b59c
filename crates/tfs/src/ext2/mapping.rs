//! Which block of the disk holds a block of a file: twelve direct pointers, and trees of one,
//! two and three levels of indirect blocks.

use super::pointers::Pointable;
use super::{Ext2, Ext2Error, Goal, damaged};
use crate::format::inode::{DIRECT, Inode, POINTERS};
use crate::format::{put_u32, u32_at};
use crate::meta::{Meta, Part};

/// The way to a block of a file: an index into the inode's pointers, then one into each
/// indirect block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Path {
    indices: [u32; 4],
    len: usize,
}

impl Path {
    /// The way to block `logical`; none if it lies beyond the largest file.
    pub(crate) fn to(logical: u32, block_bytes: usize) -> Option<Path> {
        let each = (block_bytes / 4) as u64;
        let mut rest = u64::from(logical);
        if rest < DIRECT as u64 {
            return Some(Path { indices: [rest as u32, 0, 0, 0], len: 1 });
        }
        rest -= DIRECT as u64;
        for depth in 1..=POINTERS - DIRECT {
            let reach = each.pow(depth as u32);
            if rest < reach {
                let mut indices = [(DIRECT + depth - 1) as u32, 0, 0, 0];
                for level in (1..=depth).rev() {
                    indices[level] = (rest % each) as u32;
                    rest /= each;
                }
                return Some(Path { indices, len: depth + 1 });
            }
            rest -= reach;
        }
        None
    }

    /// The index into the inode's pointers, then into each indirect block.
    pub(crate) fn indices(&self) -> &[u32] {
        &self.indices[..self.len]
    }
}

/// The disk's block that holds block `logical` of a file with these pointers, 0 for a hole.
///
/// # Errors
/// [`Ext2Error::Damaged`] if a pointer names no block that a file may have.
pub(crate) fn find(
    meta: &mut Meta,
    pointable: &mut Pointable,
    pointers: &[u32; POINTERS],
    logical: u32,
) -> Result<u32, Ext2Error> {
    let Some(path) = Path::to(logical, meta.block_bytes()) else { return Ok(0) };
    let (root, below) = path.indices().split_first().expect("a path has a root");
    let mut block = pointers[*root as usize];
    for index in below {
        if block == 0 {
            return Ok(0);
        }
        pointable.check(meta, block)?;
        block = u32_at(&meta.read(block)?, 4 * *index as usize);
    }
    if block != 0 {
        pointable.check(meta, block)?;
    }
    Ok(block)
}

impl Ext2 {
    /// The disk's block that holds block `logical` of a file, 0 for a hole.
    ///
    /// # Errors
    /// [`Ext2Error::Damaged`] if a pointer names no block that a file may have.
    pub fn block_of(&mut self, inode: &Inode, logical: u32) -> Result<u32, Ext2Error> {
        find(&mut self.meta, &mut self.pointable, &inode.pointers, logical)
    }

    /// Makes the indirect blocks on the way to block `logical` of a file, near `goal`, so
    /// that [`Ext2::put_block`] needs none. The inode in memory is changed; the caller
    /// writes it.
    ///
    /// # Errors
    /// [`Ext2Error::NoSpace`]; what was made by then belongs to the file.
    pub fn make_way(
        &mut self,
        inode: &mut Inode,
        logical: u32,
        goal: Goal,
    ) -> Result<(), Ext2Error> {
        let Some(path) = Path::to(logical, self.meta.block_bytes()) else {
            return damaged("a file is longer than any may be");
        };
        let (root, below) = path.indices().split_first().expect("a path has a root");
        if below.is_empty() {
            return Ok(());
        }
        let mut block = inode.pointers[*root as usize];
        if block == 0 {
            block = self.new_indirect_block(inode, goal)?;
            inode.pointers[*root as usize] = block;
        }
        for index in &below[..below.len() - 1] {
            self.check_pointer(block)?;
            let at = 4 * *index as usize;
            let mut next = u32_at(&self.meta.read(block)?, at);
            if next == 0 {
                next = self.new_indirect_block(inode, goal)?;
                put_u32(self.meta.change(block, Part::Ordinary)?, at, next);
            }
            block = next;
        }
        self.check_pointer(block)
    }

    /// Refuses a block number that no file may point at.
    pub(crate) fn check_pointer(&mut self, block: u32) -> Result<(), Ext2Error> {
        self.pointable.check(&mut self.meta, block)
    }

    fn check_way(&mut self, block: u32) -> Result<(), Ext2Error> {
        if block == 0 {
            return damaged("an indirect block is missing");
        }
        self.check_pointer(block)
    }

    fn new_indirect_block(&mut self, inode: &mut Inode, goal: Goal) -> Result<u32, Ext2Error> {
        let block = self.allocate_for_names(inode, goal)?;
        self.meta.blank(block, Part::Ordinary)?;
        inode.count_blocks(1, self.superblock.block_bytes());
        Ok(block)
    }

    /// Sets the pointer of block `logical` of a file, to which a way was made. The inode in
    /// memory is changed; the caller writes it, and counts the blocks.
    ///
    /// # Errors
    /// [`Ext2Error::Damaged`] if there is no way.
    pub fn put_block(
        &mut self,
        inode: &mut Inode,
        logical: u32,
        value: u32,
    ) -> Result<(), Ext2Error> {
        let Some(path) = Path::to(logical, self.meta.block_bytes()) else {
            return damaged("a file is longer than any may be");
        };
        let (root, below) = path.indices().split_first().expect("a path has a root");
        let Some((last, between)) = below.split_last() else {
            inode.pointers[*root as usize] = value;
            return Ok(());
        };
        let mut block = inode.pointers[*root as usize];
        for index in between {
            self.check_way(block)?;
            block = u32_at(&self.meta.read(block)?, 4 * *index as usize);
        }
        self.check_way(block)?;
        put_u32(self.meta.change(block, Part::Ordinary)?, 4 * *last as usize, value);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ways_lead_through_one_two_and_three_levels() {
        let way = |logical| Path::to(logical, 1024).map(|p| p.indices().to_vec());
        assert_eq!(way(0), Some(vec![0]));
        assert_eq!(way(11), Some(vec![11]));
        assert_eq!(way(12), Some(vec![12, 0]));
        assert_eq!(way(12 + 255), Some(vec![12, 255]));
        assert_eq!(way(12 + 256), Some(vec![13, 0, 0]));
        assert_eq!(way(12 + 256 + 65536 - 1), Some(vec![13, 255, 255]));
        assert_eq!(way(12 + 256 + 65536), Some(vec![14, 0, 0, 0]));
        assert_eq!(way(12 + 256 + 65536 + (1 << 24) - 1), Some(vec![14, 255, 255, 255]));
        assert_eq!(way(12 + 256 + 65536 + (1 << 24)), None);
        assert_eq!(Path::to(u32::MAX, 4096), None);
    }
}
