//! What is looked at when an inode is used: whether its fields can be true, and whether it is
//! what the directory says.

use atoll_vfs::FileKind;

use super::{Ext2, Ext2Error, damaged};
use crate::format::inode::Inode;

impl Ext2 {
    /// Refuses an inode whose length or number of blocks is impossible.
    ///
    /// # Errors
    /// [`Ext2Error::Damaged`].
    pub fn check_sizes(&self, number: u32, inode: &Inode) -> Result<(), Ext2Error> {
        let size = inode.size_bytes;
        if inode.kind() == Ok(FileKind::Regular) && size > self.reach_bytes() {
            return damaged(format!("inode {number} has an impossible length of {size}"));
        }
        let all = u64::from(self.superblock.blocks()) * u64::from(self.superblock.block_bytes());
        if u64::from(inode.blocks_512) * 512 > all {
            let blocks = inode.blocks_512;
            return damaged(format!("inode {number} has {blocks} half kilobytes of blocks"));
        }
        Ok(())
    }

    /// The inode that an entry of directory `parent` names: one that is in use, and a directory
    /// only if it is this directory's.
    ///
    /// # Errors
    /// [`Ext2Error::Damaged`].
    pub fn named_inode(&mut self, parent: u32, number: u32) -> Result<Inode, Ext2Error> {
        if number < self.superblock.first_inode() {
            return damaged(format!("directory {parent} names reserved inode {number}"));
        }
        let inode = self.inode(number)?;
        let Ok(kind) = inode.kind() else {
            return damaged(format!("inode {number} is of no kind of file"));
        };
        if inode.links == 0 {
            return damaged(format!("directory {parent} names inode {number}, which is free"));
        }
        self.check_sizes(number, &inode)?;
        // A directory with two names is a way to walk in circles.
        if kind == FileKind::Directory {
            let up = self.find_entry(number, &inode, b"..")?.map(|found| found.inode);
            if up != Some(parent) {
                return damaged(format!("directory {number} is named in {parent} and in another"));
            }
        }
        Ok(inode)
    }

    /// The target of a symbolic link.
    ///
    /// # Errors
    /// [`Ext2Error::Damaged`] if there is none.
    pub fn target_of(&mut self, number: u32, inode: &Inode) -> Result<Vec<u8>, Ext2Error> {
        let len = usize::try_from(inode.size_bytes).unwrap_or(usize::MAX);
        match self.target_place(number, inode)?.get(..len) {
            Some(target) if len > 0 && !target.contains(&0) => Ok(target.to_vec()),
            _ => damaged(format!("symbolic link {number} has an impossible target")),
        }
    }

    /// All bytes of the place where the target of a symbolic link stands: in the inode, or in a
    /// block.
    ///
    /// # Errors
    /// [`Ext2Error`].
    pub fn target_place(&mut self, number: u32, inode: &Inode) -> Result<Vec<u8>, Ext2Error> {
        if inode.is_short_link(self.superblock.block_bytes()) {
            return Ok(inode.pointers.iter().flat_map(|pointer| pointer.to_le_bytes()).collect());
        }
        match self.block_of(inode, 0)? {
            0 => damaged(format!("symbolic link {number} has an impossible target")),
            block => Ok(self.meta.read(block)?.to_vec()),
        }
    }
}
