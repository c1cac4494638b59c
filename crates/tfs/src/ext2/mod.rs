//! An ext2 file system as transactions: descriptors, bitmaps, inodes.
//!
//! [`Ext2`] is what the file system keeps under its lock. It gives and takes blocks and
//! inodes by ext2's rules, and keeps TFS's records in step with them; files, directories and
//! transparent files are built on it. Each call changes the running transaction of [`Meta`];
//! none of them waits for a commit.
//!
//! Everything read from the disk is checked before it is used as a number of a block, inode
//! or group; what cannot be true is [`Ext2Error::Damaged`], and nothing is changed by it.

mod acl;
mod at_end;
mod blocks;
mod directories;
mod files;
mod inodes;
mod mapping;
mod pointers;
mod records_file;
mod sound;
mod transitions;
mod transparent;
mod verify;
mod windows;
mod xattrs;

use std::collections::BTreeSet;

use thiserror::Error;

use crate::format::DESCRIPTOR_BYTES;
use crate::format::features::Features;
use crate::format::group::GroupDescriptor;
use crate::format::inode::Inode;
use crate::format::superblock::{SUPERBLOCK_BYTES, SUPERBLOCK_OFFSET, Superblock};
use crate::meta::{Block, Meta, MetaError, Part};

pub use acl::{Acl, AclKind};
pub use blocks::{AllocationObserver, Goal, Run};
pub use directories::{Found, Listed};
pub use files::{BLOCKS_A_STEP, Extent};
pub use inodes::NewInode;
use pointers::Pointable;
pub use records_file::{Records, RecordsError, Totals};
pub use transitions::{GroupBitmaps, StateCounts};
pub use transparent::Map;
pub use verify::{Overwritten, VERIFY_STEP_BLOCKS, Verified, VerifyAt};
use windows::Windows;
pub use xattrs::{MAX_VALUE_BYTES, Xattrs};

/// Why a call could not be done.
#[derive(Debug, Error)]
pub enum Ext2Error {
    /// The device failed, or a block number was impossible.
    #[error(transparent)]
    Meta(#[from] MetaError),
    /// Something on the disk cannot be true.
    #[error("the file system is damaged: {0}; unmount it and run e2fsck")]
    Damaged(String),
    /// No block is free for this purpose.
    #[error("no space left")]
    NoSpace,
    /// No block is free now; some are after the next commit.
    #[error("space is free after the next commit")]
    NoSpaceYet,
    /// No inode is free.
    #[error("no inode left")]
    NoInodes,
}

/// For [`Ext2Error::Damaged`].
pub(crate) fn damaged<T>(what: impl Into<String>) -> Result<T, Ext2Error> {
    Err(Ext2Error::Damaged(what.into()))
}

/// An ext2 file system.
#[derive(Debug)]
pub struct Ext2 {
    pub(crate) meta: Meta,
    superblock: Superblock,
    records: Option<Records>,
    windows: Windows,
    pointable: Pointable,
    /// Groups whose bitmap was found to mark the group's own metadata.
    sound_groups: BTreeSet<u32>,
    /// Directories begun in a group since files were (Orlov's debts); groups without one are
    /// not listed.
    debts: inodes::Debts,
    /// Ordinary directories of all groups, once they were counted.
    directories: Option<u32>,
    indices: directories::Indices,
    transparent_cursor: transparent::TransparentCursor,
    /// The block of attributes written last, while it is one: files with the same share it.
    last_xattr_block: Option<u32>,
    observer: Option<AllocationObserver>,
    inode_cursor: at_end::InodeCursor,
}

/// The most groups remembered as sound; beyond it, they are checked again.
const MAX_SOUND_GROUPS: usize = 4096;

impl Ext2 {
    /// Of a checked superblock, with TFS's records where there are any.
    pub fn new(meta: Meta, superblock: Superblock, records: Option<Records>) -> Ext2 {
        Ext2 {
            meta,
            pointable: Pointable::new(&superblock),
            superblock,
            records,
            windows: Windows::default(),
            sound_groups: BTreeSet::new(),
            debts: inodes::Debts::default(),
            directories: None,
            indices: directories::Indices::default(),
            transparent_cursor: transparent::TransparentCursor::default(),
            last_xattr_block: None,
            observer: None,
            inode_cursor: at_end::InodeCursor::default(),
        }
    }

    /// The observer of each allocation to ordinary files from now on.
    pub fn observe_allocations(&mut self, observer: Option<AllocationObserver>) {
        self.observer = observer;
    }

    /// The superblock as it is now.
    pub fn superblock(&self) -> &Superblock {
        &self.superblock
    }

    /// Changes the superblock, within the running transaction.
    ///
    /// # Errors
    /// [`Ext2Error::Meta`]; the superblock in memory is changed all the same.
    pub fn change_superblock(
        &mut self,
        change: impl FnOnce(&mut Superblock),
    ) -> Result<(), Ext2Error> {
        change(&mut self.superblock);
        let block_bytes = self.meta.block_bytes() as u64;
        let block = self.meta.change((SUPERBLOCK_OFFSET / block_bytes) as u32, Part::Ordinary)?;
        let at = (SUPERBLOCK_OFFSET % block_bytes) as usize;
        block[at..at + SUPERBLOCK_BYTES].copy_from_slice(self.superblock.bytes());
        Ok(())
    }

    fn descriptor_place(&self, group: u32) -> (u32, usize) {
        assert!(group < self.superblock.groups(), "groups are checked by who computes them");
        let each = self.meta.block_bytes() / DESCRIPTOR_BYTES;
        let block = self.superblock.first_data_block() + 1 + group / each as u32;
        (block, group as usize % each * DESCRIPTOR_BYTES)
    }

    /// A group's descriptor.
    ///
    /// # Errors
    /// [`Ext2Error::Damaged`] if what it names does not lie in the group.
    pub fn descriptor(&mut self, group: u32) -> Result<GroupDescriptor, Ext2Error> {
        let (block, at) = self.descriptor_place(group);
        let descriptor = GroupDescriptor::decode(&self.meta.read(block)?[at..]);
        if !descriptor.fits(&self.superblock, group) {
            return damaged(format!("the descriptor of group {group} is impossible"));
        }
        Ok(descriptor)
    }

    fn put_descriptor(
        &mut self,
        group: u32,
        descriptor: &GroupDescriptor,
    ) -> Result<(), Ext2Error> {
        let (block, at) = self.descriptor_place(group);
        descriptor.encode(&mut self.meta.change(block, Part::Ordinary)?[at..]);
        Ok(())
    }

    /// The group of a block, and its number within.
    ///
    /// # Errors
    /// [`Ext2Error::Damaged`] for a block that no group has.
    pub fn group_of_block(&self, block: u32) -> Result<(u32, u32), Ext2Error> {
        let first = self.superblock.first_data_block();
        if block < first || block >= self.superblock.blocks() {
            return damaged(format!("block {block} does not exist"));
        }
        let per_group = self.superblock.blocks_per_group();
        Ok(((block - first) / per_group, (block - first) % per_group))
    }

    fn inode_place(&mut self, inode: u32) -> Result<(u32, usize), Ext2Error> {
        if inode == 0 || inode > self.superblock.inodes() {
            return damaged(format!("inode {inode} does not exist"));
        }
        let per_group = self.superblock.inodes_per_group();
        let (group, index) = ((inode - 1) / per_group, (inode - 1) % per_group);
        let table = self.descriptor(group)?.inode_table;
        let at = index as usize * self.superblock.inode_bytes() as usize;
        Ok((table + (at / self.meta.block_bytes()) as u32, at % self.meta.block_bytes()))
    }

    /// An inode.
    ///
    /// # Errors
    /// [`Ext2Error::Damaged`] for a number that does not exist.
    pub fn inode(&mut self, inode: u32) -> Result<Inode, Ext2Error> {
        let (block, at) = self.inode_place(inode)?;
        let len = self.superblock.inode_bytes() as usize;
        Ok(Inode::decode(&self.meta.read(block)?[at..at + len]))
    }

    /// Writes an inode, within the running transaction, and gives the superblock the features
    /// that it needs.
    ///
    /// # Errors
    /// As [`Ext2::inode`].
    pub fn put_inode(&mut self, inode: u32, value: &Inode) -> Result<(), Ext2Error> {
        let needed = Features::needed_by(value);
        let features = self.superblock.features();
        if features.with(needed) != features {
            self.change_superblock(|superblock| superblock.add_features(needed))?;
        }
        let (block, at) = self.inode_place(inode)?;
        let len = self.superblock.inode_bytes() as usize;
        value.encode(&mut self.meta.change(block, Part::Ordinary)?[at..at + len]);
        Ok(())
    }

    /// Clears an inode for a new file.
    ///
    /// # Errors
    /// As [`Ext2::inode`].
    pub fn clear_inode(&mut self, inode: u32) -> Result<(), Ext2Error> {
        let (block, at) = self.inode_place(inode)?;
        let len = self.superblock.inode_bytes() as usize;
        let extra = self.superblock.want_extra_inode_bytes();
        Inode::clear(&mut self.meta.change(block, Part::Ordinary)?[at..at + len], extra);
        Ok(())
    }

    /// A group's block bitmap and descriptor. When a group is met first, its bitmap must mark
    /// the group's own metadata, or allocation would overwrite it.
    fn block_bitmap(&mut self, group: u32) -> Result<(Block, GroupDescriptor), Ext2Error> {
        let descriptor = self.descriptor(group)?;
        let bitmap = self.meta.read(descriptor.block_bitmap)?;
        if !self.sound_groups.contains(&group) {
            self.check_block_bitmap(group, &descriptor, &bitmap)?;
            if self.sound_groups.len() >= MAX_SOUND_GROUPS {
                self.sound_groups.clear();
            }
            self.sound_groups.insert(group);
            if let Some(records) = &mut self.records {
                records.meet_group(&mut self.meta, group, &bitmap)?;
            }
        }
        Ok((bitmap, descriptor))
    }

    fn check_block_bitmap(
        &self,
        group: u32,
        descriptor: &GroupDescriptor,
        bitmap: &[u8],
    ) -> Result<(), Ext2Error> {
        let first = self.superblock.first_block_of_group(group);
        for (start, count) in descriptor.own_runs(&self.superblock, group) {
            let start = (start - first) as usize;
            let range = start..start + count as usize;
            if crate::bitmap::next(bitmap, range, false).is_some() {
                return damaged(format!("the bitmap of group {group} has its own metadata free"));
            }
        }
        Ok(())
    }

    /// The three bitmaps of a group.
    ///
    /// # Errors
    /// What reading them says.
    pub fn group_bitmaps(&mut self, group: u32) -> Result<Option<GroupBitmaps>, Ext2Error> {
        let (allocated, _) = self.block_bitmap(group)?;
        match &mut self.records {
            Some(records) => Ok(Some(records.bitmaps(&mut self.meta, group, &allocated)?)),
            None => Ok(None),
        }
    }

    /// TFS's records, where the file system has them.
    pub fn records(&self) -> Option<&Records> {
        self.records.as_ref()
    }

    /// The records and the metadata they are kept in.
    pub fn records_and_meta(&mut self) -> Option<(&mut Records, &mut Meta)> {
        self.records.as_mut().map(|records| (records, &mut self.meta))
    }

    /// What is left to do before a transaction is taken: the checksums of changed bitmaps.
    ///
    /// # Errors
    /// [`Ext2Error::Meta`].
    pub fn before_commit(&mut self) -> Result<(), Ext2Error> {
        let Some(records) = &mut self.records else { return Ok(()) };
        for group in records.take_changed_groups() {
            let descriptor = self.descriptor(group)?;
            let bitmap = self.meta.read(descriptor.block_bitmap)?;
            let checksum = crc32fast::hash(&bitmap);
            let (records, meta) = self.records_and_meta().expect("they were there above");
            records.change_summary(meta, group, |summary| summary.bitmap_checksum = checksum)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
