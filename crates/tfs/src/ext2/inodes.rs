//! Allocation of inodes: Orlov's for directories, the parent's group for files.
//!
//! As the kernel's ext2 does it (`find_group_orlov`, `find_group_other`), after G. Orlov's
//! allocator of FreeBSD: directories at the top of the tree are spread over the disk, those
//! below stay near their parent while that has room, files lie with their directory.
//!
//! **Transparent files' inodes do not change where ordinary files go**, as long as any are
//! left: choices are made with the counts that there would be without them
//! (`docs/design/tfs.md`, group summary), and they are taken from the end of a group's
//! table, ordinary ones from its start.

use std::collections::BTreeMap;

use super::{Ext2, Ext2Error, damaged};
use crate::bitmap;
use crate::format::group::GroupDescriptor;
use crate::format::inode::TOP_DIRECTORY;
use crate::format::superblock::ROOT_INODE;
use crate::meta::Part;

/// What an inode is wanted for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NewInode<'a> {
    /// The directory its name will be in.
    pub parent: u32,
    /// Its name: which group a directory at the top of the tree begins in follows from it,
    /// so that the same calls make the same file system (ext2 draws it at random).
    pub name: &'a [u8],
    /// Whether it will be a directory.
    pub directory: bool,
    /// Whether it will be a transparent file or directory.
    pub transparent: bool,
}

/// ext2's `INODE_COST`.
const INODE_COST: u32 = 64;
/// ext2's `BLOCK_COST`.
const BLOCK_COST: u32 = 256;
/// The most groups with debts that are remembered; a debt that is forgotten spreads
/// directories less.
const MAX_DEBTORS: usize = 4096;

/// Orlov's debts: directories made in a group since files were.
#[derive(Debug, Default)]
pub(super) struct Debts(BTreeMap<u32, u8>);

impl Debts {
    fn of(&self, group: u32) -> u32 {
        self.0.get(&group).copied().map_or(0, u32::from)
    }

    fn note(&mut self, group: u32, directory: bool) {
        if directory {
            if self.0.len() < MAX_DEBTORS || self.0.contains_key(&group) {
                let debt = self.0.entry(group).or_default();
                *debt = debt.saturating_add(1);
            }
        } else if let Some(debt) = self.0.get_mut(&group) {
            *debt -= 1;
            if *debt == 0 {
                self.0.remove(&group);
            }
        }
    }
}

/// What a group has for a decision: without transparent files' inodes.
struct Standing {
    free_inodes: u32,
    free_blocks: u32,
    directories: u32,
    /// Whether an inode is really free.
    has_inode: bool,
}

impl Ext2 {
    fn standing(&mut self, group: u32) -> Result<Standing, Ext2Error> {
        let descriptor = self.descriptor(group)?;
        let hidden = match &mut self.records {
            Some(records) => {
                let summary = records.summary(&mut self.meta, group)?;
                (summary.transparent_inodes, summary.transparent_directories, summary.name_blocks)
            }
            None => (0, 0, 0),
        };
        Ok(Standing {
            free_inodes: u32::from(descriptor.free_inodes).saturating_add(hidden.0),
            free_blocks: u32::from(descriptor.free_blocks).saturating_add(hidden.2),
            directories: u32::from(descriptor.directories).saturating_sub(hidden.1),
            has_inode: descriptor.free_inodes > 0,
        })
    }

    /// Directories but transparent ones: counted once, for there may be very many groups.
    fn ordinary_directories(&mut self) -> Result<u32, Ext2Error> {
        if let Some(directories) = self.directories {
            return Ok(directories);
        }
        let mut directories = 0u32;
        for group in 0..self.superblock.groups() {
            directories = directories.saturating_add(self.standing(group)?.directories);
        }
        self.directories = Some(directories);
        Ok(directories)
    }

    fn count_ordinary_directory(&mut self, change: i32) {
        let directories = &mut self.directories;
        *directories = directories.map(|count| count.saturating_add_signed(change));
    }

    fn hidden_inodes(&self) -> u32 {
        let hidden = self.records.as_ref().map_or(0, |r| r.totals().transparent_inodes);
        u32::try_from(hidden).unwrap_or(u32::MAX)
    }

    /// Free blocks as there would be without transparent directories.
    fn free_or_hidden_blocks(&self) -> u32 {
        self.superblock.free_blocks().saturating_add(self.hidden_blocks())
    }

    /// Takes an inode. Its bytes are as the last owner left them.
    ///
    /// # Errors
    /// [`Ext2Error::NoInodes`].
    pub fn allocate_inode(&mut self, new: NewInode<'_>) -> Result<u32, Ext2Error> {
        let parent_group = (new.parent - 1) / self.superblock.inodes_per_group();
        let group = if new.directory {
            self.group_for_directory(new, parent_group)?
        } else if new.transparent {
            self.group_for_transparent_file()?
        } else {
            self.group_for_file(new.parent, parent_group)?
        };
        let groups = self.superblock.groups();
        for i in 0..groups {
            let group = (group + i) % groups;
            if let Some(inode) = self.take_inode(group, new)? {
                return Ok(inode);
            }
        }
        Err(Ext2Error::NoInodes)
    }

    /// `find_group_other`: the parent's group, then a few found by hashing, then any.
    fn group_for_file(&mut self, parent: u32, parent_group: u32) -> Result<u32, Ext2Error> {
        let groups = self.superblock.groups();
        let first = self.standing(parent_group)?;
        if first.has_inode && first.free_blocks > 0 {
            return Ok(parent_group);
        }
        let mut group = parent_group.wrapping_add(parent) % groups;
        let mut step = 1;
        while step < groups {
            group = (group + step) % groups;
            let standing = self.standing(group)?;
            if standing.has_inode && standing.free_blocks > 0 {
                return Ok(group);
            }
            step *= 2;
        }
        for i in 0..groups {
            let group = (parent_group + i) % groups;
            if self.standing(group)?.has_inode {
                return Ok(group);
            }
        }
        Err(Ext2Error::NoInodes)
    }

    /// `find_group_orlov`.
    fn group_for_directory(
        &mut self,
        new: NewInode<'_>,
        parent_group: u32,
    ) -> Result<u32, Ext2Error> {
        let groups = self.superblock.groups();
        let average_inodes =
            self.superblock.free_inodes().saturating_add(self.hidden_inodes()) / groups;
        let average_blocks = self.free_or_hidden_blocks() / groups;
        let at_top = new.parent == ROOT_INODE || self.inode(new.parent)?.flags & TOP_DIRECTORY != 0;
        let mut from = parent_group;
        if at_top {
            let mut hasher = blake3::Hasher::new();
            hasher.update(&self.superblock.uuid()).update(&new.parent.to_le_bytes());
            let hash = hasher.update(new.name).finalize();
            from = crate::format::u32_at(hash.as_bytes(), 0) % groups;
            let mut best: Option<(u32, u32)> = None;
            for i in 0..groups {
                let group = (from + i) % groups;
                let standing = self.standing(group)?;
                let fewer = best.is_none_or(|(_, directories)| standing.directories < directories);
                if standing.has_inode
                    && fewer
                    && standing.free_inodes >= average_inodes
                    && standing.free_blocks >= average_blocks
                {
                    best = Some((group, standing.directories));
                }
            }
            if let Some((group, _)) = best {
                return Ok(group);
            }
        } else if let Some(group) = self.group_near(parent_group, average_inodes, average_blocks)? {
            return Ok(group);
        }
        for at_least in [average_inodes, 0] {
            for i in 0..groups {
                let group = (from + i) % groups;
                let standing = self.standing(group)?;
                if standing.has_inode && standing.free_inodes >= at_least {
                    return Ok(group);
                }
            }
        }
        Err(Ext2Error::NoInodes)
    }

    /// A group near the parent's that is not crowded with directories.
    fn group_near(
        &mut self,
        parent_group: u32,
        average_inodes: u32,
        average_blocks: u32,
    ) -> Result<Option<u32>, Ext2Error> {
        let groups = self.superblock.groups();
        let inodes_per_group = self.superblock.inodes_per_group();
        let blocks_per_group = self.superblock.blocks_per_group();
        let directories = self.ordinary_directories()?;
        let used_blocks = self.superblock.blocks().saturating_sub(self.free_or_hidden_blocks());
        let blocks_per_directory = used_blocks / directories.max(1);
        let most_directories = directories / groups + inodes_per_group / 16;
        let least_inodes = average_inodes.saturating_sub(inodes_per_group / 4);
        let least_blocks = average_blocks.saturating_sub(blocks_per_group / 4);
        let most_debt = (blocks_per_group / blocks_per_directory.max(BLOCK_COST))
            .min(inodes_per_group / INODE_COST)
            .clamp(1, 255);
        for i in 0..groups {
            let group = (parent_group + i) % groups;
            let standing = self.standing(group)?;
            if self.debts.of(group) < most_debt
                && standing.directories < most_directories
                && standing.has_inode
                && standing.free_inodes >= least_inodes
                && standing.free_blocks >= least_blocks
            {
                return Ok(Some(group));
            }
        }
        Ok(None)
    }

    fn take_inode(&mut self, group: u32, new: NewInode<'_>) -> Result<Option<u32>, Ext2Error> {
        let mut descriptor = self.descriptor(group)?;
        if descriptor.free_inodes == 0 {
            return Ok(None);
        }
        let per_group = self.superblock.inodes_per_group();
        let bits = self.meta.read(descriptor.inode_bitmap)?;
        let first_ordinary = self.superblock.first_inode() - 1;
        let from = first_ordinary.saturating_sub(group * per_group).min(per_group) as usize;
        let index = if new.transparent {
            (from..per_group as usize).rev().find(|bit| !bitmap::is_set(&bits, *bit))
        } else {
            bitmap::next(&bits, from..per_group as usize, false)
        };
        drop(bits);
        let Some(index) = index else {
            return damaged(format!("group {group} says it has free inodes and has none"));
        };
        let number = group * per_group + index as u32 + 1;
        if self.inode(number)?.links > 0 {
            return damaged(format!("inode {number} is marked free and has a name"));
        }
        let free_inodes = self.superblock.free_inodes();
        let Some(total) = free_inodes.checked_sub(1) else {
            return damaged("the number of free inodes is wrong");
        };
        descriptor.free_inodes -= 1;
        descriptor.directories += u16::from(new.directory);
        let block = self.meta.change(descriptor.inode_bitmap, Part::Ordinary)?;
        bitmap::put(block, index..index + 1, true);
        self.put_descriptor(group, &descriptor)?;
        self.change_superblock(|superblock| superblock.set_free_inodes(total))?;
        if new.transparent {
            self.count_transparent_inode(group, new.directory, 1)?;
        } else {
            self.debts.note(group, new.directory);
            self.count_ordinary_directory(i32::from(new.directory));
        }
        Ok(Some(number))
    }

    fn count_transparent_inode(
        &mut self,
        group: u32,
        directory: bool,
        change: i32,
    ) -> Result<(), Ext2Error> {
        let Some((records, meta)) = self.records_and_meta() else { return Ok(()) };
        records.change_summary(meta, group, |summary| {
            let inodes = &mut summary.transparent_inodes;
            *inodes = inodes.saturating_add_signed(change);
            if directory {
                let directories = &mut summary.transparent_directories;
                *directories = directories.saturating_add_signed(change);
            }
        })
    }

    /// Notes that an inode in use became a transparent file's or directory's, or no longer is.
    ///
    /// # Errors
    /// What reading the group's summary says.
    pub fn note_transparent(
        &mut self,
        inode: u32,
        directory: bool,
        transparent: bool,
    ) -> Result<(), Ext2Error> {
        let group = (inode - 1) / self.superblock.inodes_per_group();
        let change = if transparent { 1 } else { -1 };
        self.count_ordinary_directory(if directory { -change } else { 0 });
        self.count_transparent_inode(group, directory, change)
    }

    /// Gives an inode back.
    ///
    /// # Errors
    /// [`Ext2Error::Damaged`] if it is not allocated.
    pub fn release_inode(
        &mut self,
        inode: u32,
        directory: bool,
        transparent: bool,
    ) -> Result<(), Ext2Error> {
        if inode < self.superblock.first_inode() || inode > self.superblock.inodes() {
            return damaged(format!("inode {inode} cannot be given back"));
        }
        let per_group = self.superblock.inodes_per_group();
        let (group, index) = ((inode - 1) / per_group, ((inode - 1) % per_group) as usize);
        let mut descriptor: GroupDescriptor = self.descriptor(group)?;
        let bits = self.meta.read(descriptor.inode_bitmap)?;
        if !bitmap::is_set(&bits, index) {
            return damaged(format!("inode {inode} is not allocated"));
        }
        drop(bits);
        let total = self.superblock.free_inodes();
        if u32::from(descriptor.free_inodes) >= per_group || total >= self.superblock.inodes() {
            return damaged(format!("the number of free inodes of group {group} is wrong"));
        }
        descriptor.free_inodes += 1;
        descriptor.directories = descriptor.directories.saturating_sub(u16::from(directory));
        let block = self.meta.change(descriptor.inode_bitmap, Part::Ordinary)?;
        bitmap::put(block, index..index + 1, false);
        self.put_descriptor(group, &descriptor)?;
        self.change_superblock(|superblock| superblock.set_free_inodes(total + 1))?;
        if transparent {
            self.reset_inode_cursor();
            self.count_transparent_inode(group, directory, -1)?;
        } else {
            self.count_ordinary_directory(-i32::from(directory));
        }
        Ok(())
    }
}
