//! Renaming: of one name over another or none, or two exchanged.

use atoll_vfs::{Caller, Errno, FileKind, FileTime, InodeNumber, RenameFlags, check_name};

use super::access::{check_mutable, check_removable};
use super::held::{Ending, to_ext2};
use super::names::{Failure, MAKE_BLOCKS, MAX_LINKS};
use super::{Core, Shared, errno};
use crate::ext2::{BLOCKS_A_STEP, Ext2Error, Found};
use crate::format::inode::Inode;

impl Shared {
    pub(super) fn rename(
        &self,
        caller: Caller,
        (parent, name): (InodeNumber, &[u8]),
        (new_parent, new_name): (InodeNumber, &[u8]),
        flags: RenameFlags,
    ) -> Result<(), Errno> {
        check_name(name)?;
        check_name(new_name)?;
        if flags.exchange && flags.no_replace {
            return Err(Errno::EINVAL);
        }
        let from = (to_ext2(parent)?, name);
        let to = (to_ext2(new_parent)?, new_name);
        let ended = self.with_space(MAKE_BLOCKS + BLOCKS_A_STEP, |core, now| {
            core.rename(caller, from, to, flags, now)
        })?;
        ended.map_or(Ok(()), |ending| self.end_inode(ending))
    }
}

impl Core {
    /// Renames; returns an inode that the caller shall end.
    fn rename(
        &mut self,
        caller: Caller,
        (parent, name): (u32, &[u8]),
        (new_parent, new_name): (u32, &[u8]),
        flags: RenameFlags,
        now: FileTime,
    ) -> Result<Option<Ending>, Failure> {
        let (mut holder, found) = self.find(parent, name)?;
        let found = found.ok_or(Errno::ENOENT)?;
        let mut inode = self.named(parent, found.inode)?;
        let kind = inode.kind().map_err(|_| Errno::EIO)?;
        let is_directory = kind == FileKind::Directory;
        let (mut new_holder, target) = self.find(new_parent, new_name)?;
        if new_holder.links == 0 {
            return Err(Errno::ENOENT.into());
        }
        if is_directory && self.lies_within(new_parent, found.inode)? {
            return Err(Errno::EINVAL.into());
        }
        let target = match target {
            Some(target) => {
                let inode = self.named(new_parent, target.inode)?;
                Some((target, inode))
            }
            None => None,
        };
        if flags.no_replace && target.is_some() {
            return Err(Errno::EEXIST.into());
        }
        if target.as_ref().is_some_and(|(target, _)| target.inode == found.inode) {
            return Ok(None);
        }
        check_removable(&holder, &inode)?;
        match &target {
            Some((_, target_inode)) => check_removable(&new_holder, target_inode)?,
            None => check_mutable(&new_holder)?,
        }
        if flags.exchange {
            let Some((target, target_inode)) = target else { return Err(Errno::ENOENT.into()) };
            let one = (parent, holder, found, inode);
            let other = (new_parent, new_holder, target, target_inode);
            return self.exchange(one, other, now).map(|()| None);
        }
        if let Some((target, target_inode)) = &target {
            self.check_replace(is_directory, target, target_inode)?;
        }
        let same = parent == new_parent;
        if is_directory && !same && target.is_none() && new_holder.links >= MAX_LINKS {
            return Err(Errno::EMLINK.into());
        }
        // The new name first: it is the only thing there may be no space for.
        let entry = (found.inode, kind);
        match &target {
            Some((target, _)) => {
                self.ext2.replace_entry(new_parent, &new_holder, target.at, entry)?;
            }
            None => {
                let goal = self.directory_goal(new_parent, caller);
                self.ext2.add_entry(new_parent, &mut new_holder, new_name, entry, goal)?;
            }
        }
        if same {
            holder = new_holder.clone();
        }
        self.ext2.remove_entry(parent, &mut holder, name, found.at).map_err(Failure::Broken)?;
        if same {
            new_holder = holder.clone();
        }
        self.finish_rename(
            (parent, holder),
            (new_parent, new_holder),
            (found.inode, &mut inode),
            target,
            now,
        )
        .map_err(Failure::Broken)
    }

    fn check_replace(
        &mut self,
        is_directory: bool,
        target: &Found,
        target_inode: &Inode,
    ) -> Result<(), Errno> {
        let target_is_directory = target_inode.kind() == Ok(FileKind::Directory);
        match (is_directory, target_is_directory) {
            (true, false) => Err(Errno::ENOTDIR),
            (false, true) => Err(Errno::EISDIR),
            (true, true) => {
                let empty = self.ext2.is_empty_directory(target.inode, target_inode);
                if empty.map_err(|error| errno(&error))? { Ok(()) } else { Err(Errno::ENOTEMPTY) }
            }
            (false, false) => Ok(()),
        }
    }

    /// What follows when the entries are as they shall be.
    fn finish_rename(
        &mut self,
        (parent, mut holder): (u32, Inode),
        (new_parent, mut new_holder): (u32, Inode),
        (number, inode): (u32, &mut Inode),
        target: Option<(Found, Inode)>,
        now: FileTime,
    ) -> Result<Option<Ending>, Ext2Error> {
        let is_directory = inode.kind() == Ok(FileKind::Directory);
        let same = parent == new_parent;
        let replaces_directory = is_directory && target.is_some();
        if same {
            new_holder.links = new_holder.links.saturating_sub(u16::from(replaces_directory));
        } else if is_directory {
            holder.links = holder.links.saturating_sub(1);
            new_holder.links = new_holder.links.saturating_add(u16::from(!replaces_directory));
            if let Some(up) = self.ext2.find_entry(number, inode, b"..")? {
                let entry = (new_parent, FileKind::Directory);
                self.ext2.replace_entry(number, inode, up.at, entry)?;
            }
        }
        inode.ctime = now;
        self.ext2.put_inode(number, inode)?;
        if !same {
            self.held.moved(number, new_parent);
            if inode.is_transparent_file() {
                self.put_transparent_parent(number, inode, new_parent)?;
            }
            self.touch(parent, &mut holder, now)?;
        }
        self.touch(new_parent, &mut new_holder, now)?;
        let Some((target, mut target_inode)) = target else { return Ok(None) };
        self.drop_name(target.inode, &mut target_inode, now)
    }

    /// Swaps two names.
    fn exchange(
        &mut self,
        (parent, mut holder, found, mut inode): (u32, Inode, Found, Inode),
        (other_parent, mut other_holder, other, mut other_inode): (u32, Inode, Found, Inode),
        now: FileTime,
    ) -> Result<(), Failure> {
        let kind = inode.kind().map_err(|_| Errno::EIO)?;
        let other_kind = other_inode.kind().map_err(|_| Errno::EIO)?;
        let directories = (kind == FileKind::Directory, other_kind == FileKind::Directory);
        if directories.1 && self.lies_within(parent, other.inode)? {
            return Err(Errno::EINVAL.into());
        }
        let mut work = || {
            self.ext2.replace_entry(parent, &holder, found.at, (other.inode, other_kind))?;
            self.ext2.replace_entry(other_parent, &other_holder, other.at, (found.inode, kind))?;
            if parent != other_parent {
                for (is_directory, number, inode, up) in [
                    (directories.0, found.inode, &inode, other_parent),
                    (directories.1, other.inode, &other_inode, parent),
                ] {
                    let entry = if is_directory {
                        self.ext2.find_entry(number, inode, b"..")?
                    } else {
                        None
                    };
                    if let Some(entry) = entry {
                        let up = (up, FileKind::Directory);
                        self.ext2.replace_entry(number, inode, entry.at, up)?;
                    }
                }
                let (one, two) = (u16::from(directories.0), u16::from(directories.1));
                let moved =
                    |links: u16, come, gone| links.saturating_add(come).saturating_sub(gone);
                holder.links = moved(holder.links, two, one);
                other_holder.links = moved(other_holder.links, one, two);
                self.touch(other_parent, &mut other_holder, now)?;
            }
            self.touch(parent, &mut holder, now)?;
            for (number, inode, up) in
                [(found.inode, &inode, other_parent), (other.inode, &other_inode, parent)]
            {
                if parent == other_parent {
                    continue;
                }
                self.held.moved(number, up);
                if inode.is_transparent_file() {
                    self.put_transparent_parent(number, inode, up)?;
                }
            }
            for (number, inode) in [(found.inode, &mut inode), (other.inode, &mut other_inode)] {
                if number != parent && number != other_parent {
                    inode.ctime = now;
                    self.ext2.put_inode(number, inode)?;
                }
            }
            Ok(())
        };
        work().map_err(Failure::Broken)
    }
}
