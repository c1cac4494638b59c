//! File handles: a handle is a number, which comes from the file's path and kind.

use std::collections::BTreeSet;

use atoll_vfs::{Errno, InodeNumber, PersistentHandle};

use super::PublishedEngine;
use crate::format::DirectoryEntry;
use crate::handle_table::GENERATION;
use crate::owned::fault::Fault;

/// A lookup that is taken back when this is dropped.
struct Lookup<'a> {
    engine: &'a PublishedEngine,
    inode: InodeNumber,
}

impl Drop for Lookup<'_> {
    fn drop(&mut self) {
        self.engine.inodes().forget(self.inode, 1);
    }
}

impl PublishedEngine {
    /// The handle of a file. It leaves once the table says where the file is.
    pub(super) async fn handle(&self, inode: InodeNumber) -> Result<PersistentHandle, Fault> {
        let table = self.handles.as_ref().ok_or(Errno::EOPNOTSUPP)?;
        let names = self.inodes().names_above(inode);
        match names {
            Some(names) => table.note_all(names)?,
            // It was noted when its number was given out, or there was never a handle of it.
            None => {
                self.hold_number(inode).await?;
                self.inodes().forget(inode, 1);
            }
        }
        Ok(PersistentHandle::of_number(inode, GENERATION))
    }

    /// Counts a lookup of a file that need not be in memory, and returns what it is in the newest
    /// version. [`Errno::ESTALE`] if its path is gone, or the table does not know it.
    pub(super) async fn hold_number(&self, inode: InodeNumber) -> Result<DirectoryEntry, Fault> {
        let table = self.handles.as_ref().ok_or(Errno::ESTALE)?;
        let is_held = self.inodes().table.look_up(inode.0);
        if is_held {
            table.touch(inode.0);
            // Taken back if it fails, or if nobody waits for it any more.
            let lookup = Lookup { engine: self, inode };
            let (entry, _) = self.entry(inode).await?;
            std::mem::forget(lookup);
            return Ok(entry);
        }
        // Names of another volume, or of one that is gone, are of no use.
        let names = table.path(inode.0, &BTreeSet::new()).ok_or(Errno::ESTALE)?;
        let found = self.hold_by_names(names).await;
        if let Err(Fault::Errno(Errno::ESTALE)) = &found {
            table.retire(inode.0);
        }
        found
    }

    /// Looks names up from the root on, and counts a lookup of the last file.
    async fn hold_by_names(&self, names: Vec<(u64, Box<[u8]>)>) -> Result<DirectoryEntry, Fault> {
        let mut at = InodeNumber::ROOT;
        let (mut entry, _) = self.entry(at).await?;
        for (number, name) in names {
            let found = self.look_up(at, &name).await;
            let mut inodes = self.inodes();
            if at != InodeNumber::ROOT {
                inodes.forget(at, 1);
            }
            let inode = match found {
                Ok((inode, found, _)) => {
                    entry = found;
                    inode
                }
                Err(Fault::Errno(Errno::ENOENT | Errno::ENOTDIR)) => {
                    return Err(Errno::ESTALE.into());
                }
                Err(fault) => return Err(fault),
            };
            if inode.0 != number {
                inodes.forget(inode, 1);
                return Err(Errno::ESTALE.into());
            }
            at = inode;
        }
        Ok(entry)
    }
}
