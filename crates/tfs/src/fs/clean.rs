//! The cleaner (§3.1): "if TFS writes transparent files and never uses them again, the disk
//! will eventually fill with overwritten blocks that could otherwise be used".
//!
//! The paper's cleaner opens and closes every transparent file. Here an overwritten block names
//! its file, by the head of its extent, so that only what was lost costs work; a thorough
//! cleaning opens and closes the rest too.
//!
//! A shortage of inodes is met in the same way: inodes of transparent files are ordinary
//! (§3.2), so one of the files goes.

use atoll_vfs::Errno;

use super::transparent::STEP_BLOCKS;
use super::{Shared, Tfs, errno};
use crate::ext2::{Overwritten, Run};

/// What was cleaned.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Cleaned {
    /// Transparent files that were lost and are gone now.
    pub files: u64,
    /// Blocks that are no longer overwritten.
    pub blocks: u64,
}

impl Shared {
    /// Removes the files of overwritten blocks, at most `most_files`.
    pub(super) fn clean_overwritten(&self, most_files: u64) -> Result<Cleaned, Errno> {
        let before = self.overwritten_blocks();
        let mut cleaned = Cleaned::default();
        let groups = self.core().ext2.superblock().groups();
        'all: for group in 0..groups {
            let mut bit = 0;
            loop {
                if cleaned.files >= most_files || self.overwritten_blocks() == 0 {
                    break 'all;
                }
                let found = self.core().ext2.overwritten_from(group, bit);
                let Some(found) = found.map_err(|error| errno(&error))? else { break };
                let Overwritten { run, owner } = found;
                bit = self.end_within_group(run);
                match owner {
                    Some(owner) => cleaned.files += u64::from(self.clean_file(owner)?),
                    None => self.clean_ownerless(run)?,
                }
            }
        }
        cleaned.blocks = before.saturating_sub(self.overwritten_blocks());
        Ok(cleaned)
    }

    fn overwritten_blocks(&self) -> u64 {
        self.core().ext2.records().map_or(0, |records| records.totals().overwritten)
    }

    fn end_within_group(&self, run: Run) -> usize {
        let core = self.core();
        let end = core.ext2.group_of_block(run.start).map_or(0, |(_, bit)| bit + run.len);
        end as usize
    }

    /// Removes a file if it is lost and not open; returns whether it did.
    fn clean_file(&self, number: u32) -> Result<bool, Errno> {
        {
            let mut core = self.core();
            // One that lost its name already ends when the front end lets it go.
            let named = core.ext2.inode(number).is_ok_and(|inode| inode.links > 0);
            if !named || core.open_map(number).is_some() {
                return Ok(false);
            }
        }
        match self.open_transparent(number) {
            Ok(()) => {
                self.core().close_transparent(number);
                Ok(false)
            }
            Err(Errno::ENOENT) => Ok(true),
            // Its last name was removed meanwhile.
            Err(Errno::ESTALE) => Ok(false),
            Err(errno) => Err(errno),
        }
    }

    /// Blocks that no map reaches: something is damaged there.
    fn clean_ownerless(&self, run: Run) -> Result<(), Errno> {
        let _handle = self.join_transaction(STEP_BLOCKS)?;
        let released = self.core().ext2.release_ownerless(run);
        released.map_err(|error| self.broken(&error))
    }

    /// Opens and closes every transparent file; how many were lost.
    fn clean_all(&self) -> Result<u64, Errno> {
        let inodes = self.core().ext2.superblock().inodes();
        let mut lost = 0;
        let mut from = 1;
        while let Some(number) = self.next_transparent(from)? {
            lost += u64::from(self.clean_file(number)?);
            if number >= inodes {
                break;
            }
            from = number + 1;
        }
        Ok(lost)
    }

    /// The first inode from `from` on that has a map; groups without transparent files are
    /// passed over.
    fn next_transparent(&self, from: u32) -> Result<Option<u32>, Errno> {
        let (inodes, per_group) = {
            let core = self.core();
            let superblock = core.ext2.superblock();
            (superblock.inodes(), superblock.inodes_per_group())
        };
        let mut from = from;
        while from <= inodes {
            let group = (from - 1) / per_group;
            let end = (group + 1) * per_group + 1;
            let mut core = self.core();
            let Some((records, meta)) = core.ext2.records_and_meta() else { return Ok(None) };
            let summary = records.summary(meta, group).map_err(|error| errno(&error))?;
            if summary.transparent_inodes > summary.transparent_directories {
                let found = records.next_map_entry(meta, from..end);
                if let Some(number) = found.map_err(|error| errno(&error))? {
                    return Ok(Some(number));
                }
            }
            from = end;
        }
        Ok(None)
    }

    /// Removes a transparent file so that an ordinary one can have its inode; false if there
    /// is none that is not held.
    pub(super) fn evict_one(&self) -> Result<bool, Errno> {
        let mut from = 1;
        while let Some(number) = self.next_transparent(from)? {
            from = number + 1;
            let idle = {
                let mut core = self.core();
                let inode = core.ext2.inode(number).map_err(|error| errno(&error))?;
                // One with more names would not go with the one it is known by.
                let named = inode.links == 1 && inode.is_transparent_file();
                (named && !core.held.is_held(number)).then_some(inode.generation)
            };
            let Some(generation) = idle else { continue };
            match self.lose(number, generation) {
                Ok(()) | Err(Errno::ENOENT | Errno::ESTALE) => {}
                Err(errno) => return Err(errno),
            }
            // One whose name cannot be found stays.
            if self.core().ext2.inode(number).is_ok_and(|inode| inode.links == 0) {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

impl Tfs {
    /// Removes every transparent file that is lost: those of overwritten blocks, and those
    /// that opening finds to be.
    ///
    /// # Errors
    /// `EROFS`, `EIO`.
    pub fn clean(&self) -> Result<Cleaned, Errno> {
        let mut cleaned = self.shared.clean_overwritten(u64::MAX)?;
        cleaned.files += self.shared.clean_all()?;
        self.shared.core().last_cleaned = cleaned;
        Ok(cleaned)
    }

    /// What the last [`Tfs::clean`] of this mount removed.
    pub fn last_cleaned(&self) -> Cleaned {
        self.shared.core().last_cleaned
    }
}
