//! `fallocate(2)` that makes zeros: punching holes, zeroing ranges.

use atoll_vfs::Errno;

use super::access::check_changeable;
use super::{Core, INODE_BLOCKS, Shared};
use crate::ext2::{BLOCKS_A_STEP, Ext2Error};
use crate::format::inode::Inode;

impl Shared {
    /// Makes zeros of the bytes `offset..end` of an ordinary file, as far as it reaches: whole
    /// blocks become a hole, parts of blocks are overwritten. The caller holds the file's lock
    /// as a writer. A crash on the way leaves some of the bytes as they were.
    pub(super) fn make_zeros(&self, number: u32, offset: u64, end: u64) -> Result<(), Errno> {
        let block_bytes = u64::from(self.block_bytes);
        loop {
            let _handle = self.join_transaction(BLOCKS_A_STEP + INODE_BLOCKS)?;
            let mut core = self.core();
            let mut inode = core.live_inode(number)?;
            check_changeable(&inode)?;
            // The file's last block goes as a whole: nothing but zeros is behind the end.
            let end = match end < inode.size_bytes {
                true => end,
                false => inode.size_bytes.next_multiple_of(block_bytes),
            };
            if offset >= end {
                return Ok(());
            }
            let blocks = offset.div_ceil(block_bytes)..end / block_bytes;
            let done = if blocks.is_empty() {
                Ok(true)
            } else {
                core.ext2.punch(&mut inode, blocks.start as u32..blocks.end as u32)
            };
            let done = done.map_err(|error| self.broken(&error))?;
            if done {
                let edges = core.edges(&inode, offset, end).map_err(|error| self.broken(&error))?;
                for edge in edges {
                    self.zero(Some(edge)).map_err(|error| self.broken(&error))?;
                }
            }
            let now = self.now();
            inode.mtime = now;
            inode.ctime = now;
            core.ext2.put_inode(number, &inode).map_err(|error| self.broken(&error))?;
            if done {
                return Ok(());
            }
        }
    }
}

impl Core {
    /// Where on the device the bytes of a range lie that fill no whole block: place and length.
    fn edges(
        &mut self,
        inode: &Inode,
        offset: u64,
        end: u64,
    ) -> Result<Vec<(u64, usize)>, Ext2Error> {
        let block_bytes = u64::from(self.ext2.superblock().block_bytes());
        let (first, last) = (offset / block_bytes, end / block_bytes);
        let mut edges = Vec::new();
        for block in [Some(first), (last > first).then_some(last)].into_iter().flatten() {
            let start = block * block_bytes;
            let (from, to) = (offset.max(start), end.min(start + block_bytes));
            if from >= to || to - from == block_bytes {
                continue;
            }
            let at = self.ext2.block_of(inode, block as u32)?;
            if at != 0 {
                edges.push((u64::from(at) * block_bytes + (from - start), (to - from) as usize));
            }
        }
        Ok(edges)
    }
}
