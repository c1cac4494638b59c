//! Names: making, linking, removing and renaming files.

use atoll_vfs::{Caller, Errno, FileTime, RenameFlags};
use bytes::Bytes;

use super::journal::{self, Name, Record};
use super::names::Names;
use super::{Body, FIRST_DERIVED, Loaded, Node, NodeXattrs, Place, ROOT, Stop, Tree};
use crate::blocks::content::{Content, Stored};
use crate::format::MAX_TARGET_BYTES;
use crate::mount::Birth;

const SETGID: u32 = 0o2000;

/// The most names of a file, as ext4 has it.
pub(in crate::owned::write) const MAX_LINKS: u32 = 65_000;

impl Tree {
    /// The file that a name means, counted as one lookup.
    pub(in crate::owned::write) fn lookup(
        &mut self,
        parent: u64,
        name: &[u8],
        loaded: &Loaded,
    ) -> Result<u64, Stop> {
        let inode = self.child(parent, name, loaded)?.ok_or(Errno::ENOENT)?;
        self.hold(inode);
        Ok(inode)
    }

    /// That `name` can be made in `parent`.
    fn check_free(&mut self, parent: u64, name: &[u8], loaded: &Loaded) -> Result<(), Stop> {
        match self.child(parent, name, loaded)? {
            Some(_) => Err(Errno::EEXIST.into()),
            None if self.node(parent)?.links == 0 => Err(Errno::ENOENT.into()),
            None => Ok(()),
        }
    }

    /// The number of the next file. The root may lie about which are free.
    fn new_number(&self) -> Result<u64, Stop> {
        let number = self.nodes.free_number(self.next_inode, ROOT + 1..=u64::MAX, |_| false);
        match number < FIRST_DERIVED {
            true => Ok(number),
            false => Err(Errno::ENOSPC.into()),
        }
    }

    /// Makes a file, and counts one lookup of it.
    pub(in crate::owned::write) fn make(
        &mut self,
        caller: Caller,
        (parent, name): (u64, &[u8]),
        birth: Birth,
        mode: u32,
        now: FileTime,
        loaded: &Loaded,
    ) -> Result<u64, Stop> {
        self.check_free(parent, name, loaded)?;
        let is_recorded = self.note_place(parent);
        let parts = journal::parts(&birth);
        let directory = self.node(parent)?;
        let inherits = directory.mode & SETGID != 0;
        let inode = self.new_number()?;
        let gid = if inherits { directory.gid } else { caller.gid };
        let totals = &mut self.totals;
        let body = match birth {
            Birth::File => {
                totals.files = totals.files.saturating_add(1);
                let content = Content::of(Stored::default(), self.block_size_log2);
                Body::File(content.holding_pages())
            }
            Birth::Directory => {
                totals.dirs = totals.dirs.saturating_add(1);
                Body::Directory(Names::default())
            }
            Birth::Symlink(target) => {
                if target.is_empty() || target.contains(&0) {
                    return Err(Errno::EINVAL.into());
                }
                if target.len() > MAX_TARGET_BYTES {
                    return Err(Errno::ENAMETOOLONG.into());
                }
                totals.symlinks = totals.symlinks.saturating_add(1);
                Body::Symlink(target)
            }
            Birth::Special(kind, rdev) => Body::Special(kind, rdev),
        };
        let inherited = match body {
            Body::Directory(_) if inherits => SETGID,
            _ => 0,
        };
        self.next_inode = inode + 1;
        let name = Bytes::copy_from_slice(name);
        let made_name = name.clone();
        let node = Node {
            mode: mode & 0o7777 | inherited,
            uid: caller.uid,
            gid,
            links: 1,
            atime: now,
            mtime: now,
            ctime: now,
            body,
            xattrs: NodeXattrs::Stored(None),
            place: Place::Named(parent, name.clone()),
            changes: 0,
        };
        let is_directory = node.is_directory();
        self.nodes.insert_looked_up(inode, Some(parent), node);
        self.count_name(parent, is_directory, true);
        self.set_name(parent, name, Some(inode));
        self.changes += 1;
        self.modified(parent, now);
        self.record(is_recorded, || {
            let ((kind, target, rdev), Caller { uid, gid, .. }) = (parts, caller);
            let (name, now) = (Name::new((parent, &made_name)), now.into());
            Record::Make { inode, name, kind, target, rdev, mode, uid, gid, now }
        });
        Ok(inode)
    }

    /// Gives a file another name.
    pub(in crate::owned::write) fn link(
        &mut self,
        inode: u64,
        (parent, name): (u64, &[u8]),
        now: FileTime,
        loaded: &Loaded,
    ) -> Result<(), Stop> {
        self.check_free(parent, name, loaded)?;
        let node = self.node(inode)?;
        match (node.is_directory(), node.links) {
            (true, _) => return Err(Errno::EPERM.into()),
            (_, 0) => return Err(Errno::ENOENT.into()),
            (_, MAX_LINKS..) => return Err(Errno::EMLINK.into()),
            _ => {}
        }
        let place = node.place.clone();
        let is_recorded = self.note_place(parent) && self.note_place(inode);
        if let Place::Named(old_parent, old_name) = place {
            self.set_name(old_parent, old_name, Some(inode));
            self.leave_place(inode);
            self.nodes.get_mut(inode).expect("a change refers to it").place = Place::Linked;
            self.links.entries = self.links.entries.saturating_add(1);
        }
        let node = self.nodes.get_mut(inode).expect("it was read above");
        node.links += 1;
        node.ctime = now;
        self.count_name(parent, false, true);
        self.set_name(parent, Bytes::copy_from_slice(name), Some(inode));
        self.touch(inode);
        self.modified(parent, now);
        self.hold(inode);
        self.record(is_recorded, || {
            let (name, now) = (Name::new((parent, name)), now.into());
            Record::Link { inode, name, now }
        });
        Ok(())
    }

    /// Removes a name that is not a directory.
    pub(in crate::owned::write) fn unlink(
        &mut self,
        parent: u64,
        name: &[u8],
        now: FileTime,
        loaded: &Loaded,
    ) -> Result<(), Stop> {
        let inode = self.child(parent, name, loaded)?.ok_or(Errno::ENOENT)?;
        if self.node(inode)?.is_directory() {
            return Err(Errno::EISDIR.into());
        }
        let is_recorded = self.note_place(parent);
        self.detach(parent, name, inode, now);
        self.modified(parent, now);
        self.record(is_recorded, || {
            let (name, now) = (Name::new((parent, name)), now.into());
            Record::Unlink { name, now }
        });
        Ok(())
    }

    /// Removes an empty directory.
    pub(in crate::owned::write) fn rmdir(
        &mut self,
        parent: u64,
        name: &[u8],
        now: FileTime,
        loaded: &Loaded,
    ) -> Result<(), Stop> {
        let inode = self.child(parent, name, loaded)?.ok_or(Errno::ENOENT)?;
        if self.names(inode)?.entries > 0 {
            return Err(Errno::ENOTEMPTY.into());
        }
        let is_recorded = self.note_place(parent);
        self.detach(parent, name, inode, now);
        self.modified(parent, now);
        self.record(is_recorded, || {
            let (name, now) = (Name::new((parent, name)), now.into());
            Record::Rmdir { name, now }
        });
        Ok(())
    }

    /// Renames, as `renameat2(2)`.
    pub(in crate::owned::write) fn rename(
        &mut self,
        (parent, name): (u64, &[u8]),
        (new_parent, new_name): (u64, &[u8]),
        flags: RenameFlags,
        now: FileTime,
        loaded: &Loaded,
    ) -> Result<(), Stop> {
        if flags.exchange && flags.no_replace {
            return Err(Errno::EINVAL.into());
        }
        let inode = self.child(parent, name, loaded)?.ok_or(Errno::ENOENT)?;
        let target = self.child(new_parent, new_name, loaded)?;
        if target.is_none() && self.node(new_parent)?.links == 0 {
            return Err(Errno::ENOENT.into());
        }
        self.check_no_cycle(inode, new_parent)?;
        let is_recorded = self.note_place(parent) && self.note_place(new_parent);
        match target {
            None if flags.exchange => return Err(Errno::ENOENT.into()),
            Some(_) if flags.no_replace => return Err(Errno::EEXIST.into()),
            Some(target) if target == inode => return Ok(()),
            Some(target) if flags.exchange => {
                self.check_no_cycle(target, parent)?;
                self.take_name(new_parent, new_name, target);
                self.take_name(parent, name, inode);
                self.give_name(parent, name, target, now);
            }
            Some(target) => {
                self.check_replaces(inode, target)?;
                self.detach(new_parent, new_name, target, now);
                self.take_name(parent, name, inode);
            }
            None => self.take_name(parent, name, inode),
        }
        self.give_name(new_parent, new_name, inode, now);
        self.modified(parent, now);
        self.modified(new_parent, now);
        self.record(is_recorded, || {
            let (from, to) = (Name::new((parent, name)), Name::new((new_parent, new_name)));
            Record::Rename { from, to, exchange: flags.exchange, now: now.into() }
        });
        Ok(())
    }

    /// A directory does not move into itself or below itself.
    fn check_no_cycle(&self, inode: u64, into: u64) -> Result<(), Stop> {
        let mut above = into;
        loop {
            if above == inode {
                return Err(Errno::EINVAL.into());
            }
            match &self.node(above)?.place {
                Place::Named(parent, _) => above = *parent,
                _ => return Ok(()),
            }
        }
    }

    fn check_replaces(&self, inode: u64, target: u64) -> Result<(), Stop> {
        let errno = match (self.node(inode)?.is_directory(), self.node(target)?.is_directory()) {
            (false, true) => Errno::EISDIR,
            (true, false) => Errno::ENOTDIR,
            (true, true) if self.names(target)?.entries > 0 => Errno::ENOTEMPTY,
            _ => return Ok(()),
        };
        Err(errno.into())
    }

    /// Takes a name from a file, and the file away if it was the last.
    fn detach(&mut self, parent: u64, name: &[u8], inode: u64, now: FileTime) {
        let is_directory = self.nodes[inode].is_directory();
        self.count_name(parent, is_directory, false);
        self.hold(inode);
        self.set_name(parent, Bytes::copy_from_slice(name), None);
        let node = self.nodes.get_mut(inode).expect("it is held");
        node.ctime = now;
        node.links -= 1;
        if node.links > 0 {
            self.touch(inode);
        } else {
            self.remove(inode);
        }
        self.forget(inode, 1);
    }

    /// Takes away a file that has no name any more.
    fn remove(&mut self, inode: u64) {
        let node = &self.nodes[inode];
        match &node.body {
            Body::File(content) => {
                self.totals.files = self.totals.files.saturating_sub(1);
                self.totals.bytes = self.totals.bytes.saturating_sub(content.size_bytes);
            }
            Body::Directory(_) => self.totals.dirs = self.totals.dirs.saturating_sub(1),
            Body::Symlink(_) => self.totals.symlinks = self.totals.symlinks.saturating_sub(1),
            Body::Special(..) => {}
        }
        if node.place == Place::Linked {
            self.links.entries = self.links.entries.saturating_sub(1);
            self.set_link(inode, None);
        }
        self.note_emptied(inode);
        self.note_moved(inode, true);
        self.leave_place(inode);
    }

    /// Takes a file's place away.
    fn leave_place(&mut self, inode: u64) {
        let node = self.nodes.get_mut(inode).expect("the caller has found it");
        node.place = Place::Removed;
        let (nodes, left) = self.table();
        nodes.set_above(inode, None, left);
    }

    /// Takes a name from a file that gets another one.
    fn take_name(&mut self, parent: u64, name: &[u8], inode: u64) {
        let is_directory = self.nodes[inode].is_directory();
        self.count_name(parent, is_directory, false);
        // What the caller moves stays in the table meanwhile.
        self.hold(inode);
        self.set_name(parent, Bytes::copy_from_slice(name), None);
    }

    /// Gives a file that [`take_name`](Self::take_name) was called for its new name.
    fn give_name(&mut self, parent: u64, name: &[u8], inode: u64, now: FileTime) {
        let name = Bytes::copy_from_slice(name);
        let is_directory = self.nodes[inode].is_directory();
        self.count_name(parent, is_directory, true);
        if matches!(self.nodes[inode].place, Place::Named(..)) {
            self.note_moved(inode, false);
            let (nodes, left) = self.table();
            nodes.set_above(inode, Some(parent), left);
            let node = self.nodes.get_mut(inode).expect("it is held");
            node.place = Place::Named(parent, name.clone());
            self.note_moved(inode, false);
        }
        self.set_name(parent, name, Some(inode));
        self.nodes.get_mut(inode).expect("it is held").ctime = now;
        self.touch(inode);
        self.forget(inode, 1);
    }

    /// Counts a name that a directory gets or loses.
    fn count_name(&mut self, parent: u64, is_directory: bool, gets: bool) {
        let names = self.names_mut(parent);
        let count = |number: &mut u64| match gets {
            true => *number = number.saturating_add(1),
            false => *number = number.saturating_sub(1),
        };
        count(&mut names.entries);
        if is_directory {
            count(&mut names.subdirectories);
        }
    }

    /// Notes that a directory's names have changed.
    fn modified(&mut self, directory: u64, now: FileTime) {
        let node = self.nodes.get_mut(directory).expect("it has names");
        node.mtime = now;
        node.ctime = now;
        self.touch(directory);
    }
}
