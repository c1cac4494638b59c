//! File handles: a handle is a number, which no other file of the volume gets.

use std::collections::BTreeSet;
use std::sync::Arc;

use atoll_vfs::{Errno, InodeNumber, PersistentHandle};

use super::{Fault, WritableEngine};
use crate::handle_table::{GENERATION, HandleTable};
use crate::owned::write::tree::{Stop, Tree};

/// How often names that change meanwhile are looked up. Guess: others must rename directories above the file as often.
const MAX_TRIES: usize = 64;

const ROOT: u64 = InodeNumber::ROOT.0;

impl WritableEngine {
    fn table(&self) -> Option<&Arc<HandleTable>> {
        self.shared.options.handles.as_ref()
    }

    /// The handle of a file. It leaves once the table says where the file is.
    pub(super) async fn handle(&self, inode: u64) -> Result<PersistentHandle, Fault> {
        let table = self.table().ok_or(Errno::EOPNOTSUPP)?;
        let noted = match self.on_tree(|tree, _| note_names(table, tree, inode)).await {
            Err(Fault::Errno(Errno::ESTALE)) => {
                self.hold_number(inode).await?;
                let noted = self.on_tree(|tree, _| note_names(table, tree, inode)).await;
                self.shared.tree().forget(inode, 1);
                noted
            }
            noted => noted,
        };
        noted?;
        Ok(PersistentHandle::of_number(InodeNumber(inode), GENERATION))
    }

    /// Counts a lookup of a file that need not be in memory. [`Errno::ESTALE`] if it is gone, or
    /// the table does not know it.
    pub(super) async fn hold_number(&self, inode: u64) -> Result<(), Fault> {
        let table = self.table().ok_or(Errno::ESTALE)?;
        match self.on_tree(|tree, loaded| tree.hold_number(inode, loaded)).await {
            Err(Fault::Errno(Errno::ESTALE)) => {}
            held => {
                table.touch(inode);
                return held;
            }
        }
        let mut outdated = BTreeSet::new();
        let mut tries = 0;
        while let Some(names) = table.path(inode, &outdated) {
            let missing = match self.hold_by_names(names.clone()).await? {
                None => {
                    // If the disk fails, the next handle of the file says so.
                    let _ = self.on_tree(|tree, _| note_names(table, tree, inode)).await;
                    return Ok(());
                }
                Some(missing) => missing,
            };
            tries += 1;
            if tries == MAX_TRIES {
                return Err(Errno::EAGAIN.into());
            }
            // One of the names was changed while they were looked up: the table says by now where it is.
            if table.path(inode, &outdated) != Some(names) {
                continue;
            }
            // A crash may have undone a rename.
            if !outdated.insert(missing) {
                break;
            }
        }
        table.retire(inode);
        Err(Errno::ESTALE.into())
    }

    /// Looks names up from the root on, and counts a lookup of the last file; returns the first
    /// that is not where its name says.
    async fn hold_by_names(&self, names: Vec<(u64, Box<[u8]>)>) -> Result<Option<u64>, Fault> {
        let mut at = ROOT;
        for (inode, name) in names {
            let found = self.on_tree(|tree, loaded| tree.lookup(at, &name, loaded)).await;
            let mut tree = self.shared.tree();
            tree.forget(at, 1);
            match found {
                Ok(found) if found == inode => at = inode,
                Ok(other) => {
                    tree.forget(other, 1);
                    return Ok(Some(inode));
                }
                Err(Fault::Errno(Errno::ENOENT | Errno::ENOTDIR | Errno::ESTALE)) => {
                    return Ok(Some(inode));
                }
                Err(fault) => return Err(fault),
            }
        }
        Ok(None)
    }

    /// Hands renames and removals of a call over to the table.
    pub(super) fn keep_moved(&self, tree: &mut Tree) {
        let Some(table) = self.table() else { return };
        for (inode, place) in tree.take_moved() {
            match place {
                Some((parent, name)) if table.has(inode) => {
                    // If the disk fails, the next handle of the file says so.
                    let _ = table.note(inode, parent, &name);
                }
                Some(_) => {}
                None => table.retire(inode),
            }
        }
    }
}

fn note_names(table: &HandleTable, tree: &Tree, inode: u64) -> Result<(), Stop> {
    Ok(table.note_all(tree.names_above(inode)?)?)
}
