//! What file handles need: files by number, where they are, and which numbers are free.

use atoll_vfs::Errno;
use bytes::Bytes;

use super::{FIRST_DERIVED, Loaded, Place, ROOT, Stop, Tree};
use crate::format::link_name;

/// A file, its directory, and its name there.
pub(in crate::owned::write) type NamedFile = (u64, u64, Bytes);

/// A file, and its directory and its name there, unless it is removed.
pub(in crate::owned::write) type MovedFile = (u64, Option<(u64, Bytes)>);

/// How many numbers a mount passes over whose predecessor has not ended in order: that one may have
/// given out numbers that no root and no spool has. More than it can have made files.
const NUMBERS_OF_A_MOUNT: u64 = 1 << 32;

/// The number of the next file of a mount that follows one which has not ended in order.
pub(in crate::owned::write) fn numbers_after_crash(next_inode: u64) -> u64 {
    next_inode.saturating_add(NUMBERS_OF_A_MOUNT).min(FIRST_DERIVED)
}

impl Tree {
    /// Numbers below `next_inode` are not given to new files.
    pub(in crate::owned::write) fn pass_over_numbers(&mut self, next_inode: u64) {
        self.next_inode = self.next_inode.max(next_inode);
    }

    /// Counts a lookup of a file that is in memory, or in the table of links; [`Errno::ESTALE`] if
    /// it is neither.
    pub(in crate::owned::write) fn hold_number(
        &mut self,
        inode: u64,
        loaded: &Loaded,
    ) -> Result<(), Stop> {
        if let Ok(node) = self.nodes.get(inode) {
            // A flush may still have files that are gone.
            if node.place == Place::Removed && !self.nodes.is_held(inode) {
                return Err(Errno::ESTALE.into());
            }
        } else {
            let name = link_name(inode);
            if self.links.change(&name).is_some()
                || loaded.name(self.links.stored, &name)?.is_none()
            {
                return Err(Errno::ESTALE.into());
            }
            self.enter_linked(inode, loaded)?;
        }
        self.hold(inode);
        Ok(())
    }

    /// The names that lead to a file in memory, beginning with its own: none for one that is found
    /// by its number, or that has no name any more.
    pub(in crate::owned::write) fn names_above(&self, inode: u64) -> Result<Vec<NamedFile>, Stop> {
        let mut names = Vec::new();
        let mut at = inode;
        while at != ROOT
            && let Place::Named(parent, name) = &self.node(at)?.place
        {
            names.push((at, *parent, name.clone()));
            at = *parent;
        }
        Ok(names)
    }

    /// From now on [`take_moved`](Self::take_moved) says which files have moved.
    pub(in crate::owned::write) fn keep_moved(&mut self) {
        self.moved = Some(Vec::new());
    }

    /// Notes where a file is, before it moves and afterwards, or that it is removed.
    pub(super) fn note_moved(&mut self, inode: u64, is_removed: bool) {
        let Some(moved) = &mut self.moved else { return };
        match self.nodes.get(inode).map(|node| &node.place) {
            _ if is_removed => moved.push((inode, None)),
            Ok(Place::Named(parent, name)) => moved.push((inode, Some((*parent, name.clone())))),
            _ => {}
        }
    }

    /// The files that were renamed or removed since the last call: a directory and a name for each
    /// place that one has had, none for one that is removed.
    pub(in crate::owned::write) fn take_moved(&mut self) -> Vec<MovedFile> {
        self.moved.as_mut().map(std::mem::take).unwrap_or_default()
    }
}
