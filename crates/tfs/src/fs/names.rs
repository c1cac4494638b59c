//! Names: looking up, making, linking, removing.
//!
//! Each call first looks whether it can be done, then changes; an error after the first
//! change ends all changes ([`Shared::broken`]), for half a call must not be committed.

use atoll_vfs::{
    Caller, CreateVerifier, DirEntry, Entry, Errno, FileKind, FileTime, Handle, InodeNumber,
    OpenFlags, PersistentHandle, check_name,
};
use bytes::Bytes;

use super::access::{check_changeable, check_mutable, check_removable};
use super::held::{Ending, to_ext2, to_vfs};
use super::{Core, Shared, errno};
use crate::ext2::{AclKind, BLOCKS_A_STEP, Ext2Error, Found, Goal, NewInode};
use crate::format::inode::{Inode, SHORT_TARGET_BYTES, TRANSPARENT, inherited_flags, kind_bits};
use crate::format::superblock::ROOT_INODE;
use crate::meta::Part;

/// Most names of a file (ext2's `EXT2_LINK_MAX`).
pub(super) const MAX_LINKS: u16 = 32_000;
/// Blocks that making a file changes at most: inode, its bitmap and descriptor, the directory
/// and its inode, a new block for each of the two with bitmap, descriptor and three blocks
/// of records, a block of attributes with as many, ways of indirect blocks, the superblock.
pub(super) const MAKE_BLOCKS: usize = 38;
/// Set-group-ID.
const SET_GID: u16 = 0o2000;

/// What a new file is.
pub(super) enum Birth<'a> {
    /// A regular file, FIFO, socket or device.
    Node { kind: FileKind, rdev: u64 },
    /// A regular file that its creator recognises by this.
    Exclusive(CreateVerifier),
    /// A directory.
    Directory,
    /// A symbolic link to this.
    Symlink(&'a [u8]),
}

/// A file to be made.
#[derive(Clone, Copy)]
struct Wanted<'a> {
    caller: Caller,
    parent: u32,
    name: &'a [u8],
    mode: u32,
    birth: &'a Birth<'a>,
    open: Option<OpenFlags>,
}

impl Birth<'_> {
    fn kind(&self) -> FileKind {
        match self {
            Birth::Node { kind, .. } => *kind,
            Birth::Exclusive(_) => FileKind::Regular,
            Birth::Directory => FileKind::Directory,
            Birth::Symlink(_) => FileKind::Symlink,
        }
    }
}

impl Core {
    /// The entry of a name, with the directory's inode.
    pub(super) fn find(
        &mut self,
        parent: u32,
        name: &[u8],
    ) -> Result<(Inode, Option<Found>), Errno> {
        check_name(name)?;
        let directory = self.live_directory(parent)?;
        let found = self.ext2.find_entry(parent, &directory, name).map_err(|e| errno(&e))?;
        Ok((directory, found))
    }

    /// The inode an entry of directory `parent` names.
    pub(super) fn named(&mut self, parent: u32, number: u32) -> Result<Inode, Errno> {
        self.ext2.named_inode(parent, number).map_err(|error| errno(&error))
    }

    /// Where a directory should grow.
    pub(super) fn directory_goal(&self, directory: u32, caller: Caller) -> Goal {
        Goal {
            block: self.ext2.goal_of_inode(directory),
            inode: directory,
            grows: false,
            privileged: self.may_use_reserve(caller),
        }
    }

    pub(super) fn touch(
        &mut self,
        number: u32,
        inode: &mut Inode,
        now: FileTime,
    ) -> Result<(), Ext2Error> {
        inode.mtime = now;
        inode.ctime = now;
        self.ext2.put_inode(number, inode)
    }

    /// The directory that holds a directory.
    pub(super) fn parent_of(&mut self, number: u32, directory: &Inode) -> Result<u32, Errno> {
        let found = self.ext2.find_entry(number, directory, b"..").map_err(|e| errno(&e))?;
        found.map(|found| found.inode).ok_or(Errno::EIO)
    }

    /// Whether directory `number` is `above`, or lies below it.
    pub(super) fn lies_within(&mut self, mut number: u32, above: u32) -> Result<bool, Errno> {
        // As deep as there are directories, or a loop on a damaged disk: then it comes back to
        // a directory that is looked at again after 1, 2, 4, 8 … steps (R. Brent 1980).
        let (mut mark, mut steps, mut limit) = (0, 0u32, 1u32);
        while number != above {
            if number == ROOT_INODE {
                return Ok(false);
            }
            if number == mark {
                return Err(Errno::EIO);
            }
            if steps == limit {
                (mark, steps, limit) = (number, 0, limit.saturating_mul(2));
            }
            steps += 1;
            let directory = self.live_directory(number)?;
            number = self.parent_of(number, &directory)?;
        }
        Ok(true)
    }
}

impl Shared {
    pub(super) fn lookup(&self, parent: InodeNumber, name: &[u8]) -> Result<Entry, Errno> {
        let parent = to_ext2(parent)?;
        let mut core = self.core();
        let (_, found) = core.find(parent, name)?;
        let found = found.ok_or(Errno::ENOENT)?;
        let inode = core.named(parent, found.inode)?;
        let entry = core.entry(found.inode, &inode, parent)?;
        let moved = core.was_moved(found.inode, &inode, parent)?;
        drop(core);
        if moved {
            // Where that cannot be noted, the file is found all the same.
            let _ = self.note_parent(found.inode, parent);
        }
        Ok(entry)
    }

    /// Entries of a directory that is open, after the one whose cookie is `from`.
    pub(super) fn list(
        &self,
        number: InodeNumber,
        from: u64,
        limit: usize,
        with_entries: bool,
    ) -> Result<Vec<DirEntry>, Errno> {
        let number = to_ext2(number)?;
        let (listed, moved) = self.core().list(number, from, limit, with_entries)?;
        for file in moved {
            // As for a lookup.
            let _ = self.note_parent(file, number);
        }
        Ok(listed)
    }

    pub(super) fn parent(&self, number: InodeNumber) -> Result<Entry, Errno> {
        let number = to_ext2(number)?;
        let mut core = self.core();
        let directory = core.live_directory(number)?;
        let parent = core.parent_of(number, &directory)?;
        let inode = core.live_directory(parent)?;
        core.entry(parent, &inode, parent)
    }

    /// The handle of an inode, which need not be held.
    pub(super) fn handle_of(&self, number: InodeNumber) -> Result<PersistentHandle, Errno> {
        let inode = self.core().inode_in_use(to_ext2(number)?)?;
        Ok(PersistentHandle::of_number(number, inode.generation.into()))
    }

    /// The entry of an inode that the front end may have forgotten, or never known.
    pub(super) fn by_handle(&self, handle: &PersistentHandle) -> Result<Entry, Errno> {
        let (number, generation) = handle.number()?;
        let number = to_ext2(number)?;
        let mut core = self.core();
        let inode = core.inode_in_use(number)?;
        if u64::from(inode.generation) != generation {
            return Err(Errno::ESTALE);
        }
        let map = match inode.is_transparent_file() {
            true => core.map_entry(number, &inode).map_err(|error| errno(&error))?,
            false => None,
        };
        // Unknown, where neither the map nor a lookup told it.
        let parent = map.map(|map| map.parent).or_else(|| core.held.parent_of(number));
        core.entry(number, &inode, parent.unwrap_or(0))
    }

    /// Makes a file, and opens it if `open` says how.
    pub(super) fn make(
        &self,
        caller: Caller,
        parent: InodeNumber,
        name: &[u8],
        mode: u32,
        birth: &Birth<'_>,
        open: Option<OpenFlags>,
    ) -> Result<(Entry, Handle), Errno> {
        check_name(name)?;
        let wanted = Wanted { caller, parent: to_ext2(parent)?, name, mode, birth, open };
        loop {
            // Whether an ordinary file found no inode: a transparent one gives way (§3.2).
            let mut short = false;
            match self.try_make(wanted, &mut short) {
                Err(Errno::ENOSPC) if short && self.evict_one()? => {}
                made => return made,
            }
        }
    }

    fn try_make(&self, wanted: Wanted<'_>, short: &mut bool) -> Result<(Entry, Handle), Errno> {
        let Wanted { caller, parent, name, birth, open, .. } = wanted;
        self.with_space(MAKE_BLOCKS, |core, now| {
            let (mut directory, found) = core.find(parent, name)?;
            if found.is_some() {
                return Err(Errno::EEXIST.into());
            }
            if directory.links == 0 {
                return Err(Errno::ENOENT.into());
            }
            check_mutable(&directory)?;
            core.check_birth(&directory, birth)?;
            let default_acl = core.acl(parent, &directory, AclKind::Default)?;
            let kind = birth.kind();
            let new = NewInode {
                parent,
                name,
                directory: kind == FileKind::Directory,
                transparent: directory.flags & TRANSPARENT != 0
                    && matches!(kind, FileKind::Regular | FileKind::Directory),
            };
            let number = core.ext2.allocate_inode(new).inspect_err(|error| {
                *short = matches!(error, Ext2Error::NoInodes) && !new.transparent;
            })?;
            let mut inode = self.born(&wanted, &directory, new.transparent, now);
            let filled = core
                .ext2
                .clear_inode(number)
                .and_then(|()| core.inherit(caller, default_acl, number, &mut inode))
                .and_then(|()| core.fill_birth(caller, parent, number, &mut inode, birth))
                .and_then(|()| {
                    let goal = core.directory_goal(parent, caller);
                    core.ext2.add_entry(parent, &mut directory, name, (number, kind), goal)
                });
            if let Err(error) = filled {
                core.undo_birth(number, inode, &new)?;
                return Err(error.into());
            }
            directory.links += u16::from(new.directory);
            let inode = core.keep_inode(number, &inode)?;
            if inode.is_transparent_file() {
                core.put_transparent_parent(number, &inode, parent)?;
            }
            core.touch(parent, &mut directory, now)?;
            let entry = core.entry(number, &inode, parent)?;
            if open.is_some() && inode.is_transparent_file() {
                core.look(number)?;
            }
            let handle = open.map_or(Handle::NONE, |flags| core.open(number, caller, flags));
            Ok((entry, handle))
        })
    }

    /// The inode of a new file, as its directory and who makes it want it.
    fn born(
        &self,
        wanted: &Wanted<'_>,
        directory: &Inode,
        transparent: bool,
        now: FileTime,
    ) -> Inode {
        let kind = wanted.birth.kind();
        let mut inode = Inode {
            mode: kind_bits(kind) | (wanted.mode & 0o7777) as u16,
            uid: wanted.caller.uid,
            gid: wanted.caller.gid,
            links: 1,
            atime: now,
            mtime: now,
            ctime: now,
            crtime: now,
            generation: (self.env.random_u64() as u32).max(1),
            flags: inherited_flags(directory.flags, kind),
            ..Inode::blank()
        };
        if let Birth::Exclusive(verifier) = wanted.birth {
            (inode.atime, inode.mtime) = verifier.times();
        }
        if transparent {
            inode.flags |= TRANSPARENT;
        }
        if directory.mode & SET_GID != 0 {
            inode.gid = directory.gid;
            inode.mode |= if kind == FileKind::Directory { SET_GID } else { 0 };
        }
        inode
    }

    pub(super) fn link(
        &self,
        caller: Caller,
        number: InodeNumber,
        new_parent: InodeNumber,
        new_name: &[u8],
    ) -> Result<Entry, Errno> {
        check_name(new_name)?;
        let (number, parent) = (to_ext2(number)?, to_ext2(new_parent)?);
        self.with_space(MAKE_BLOCKS, |core, now| {
            let mut inode = core.live_inode(number)?;
            let kind = inode.kind().map_err(|_| Errno::EIO)?;
            // A transparent file has one name: the one that goes when the file is lost.
            if kind == FileKind::Directory || inode.is_transparent_file() {
                return Err(Errno::EPERM.into());
            }
            if inode.links == 0 {
                return Err(Errno::ENOENT.into());
            }
            if inode.links >= MAX_LINKS {
                return Err(Errno::EMLINK.into());
            }
            let (mut directory, found) = core.find(parent, new_name)?;
            if found.is_some() {
                return Err(Errno::EEXIST.into());
            }
            if directory.links == 0 {
                return Err(Errno::ENOENT.into());
            }
            check_mutable(&directory)?;
            check_changeable(&inode)?;
            let goal = core.directory_goal(parent, caller);
            core.ext2.add_entry(parent, &mut directory, new_name, (number, kind), goal)?;
            inode.links += 1;
            inode.ctime = now;
            let inode = core.keep_inode(number, &inode)?;
            core.touch(parent, &mut directory, now)?;
            Ok(core.entry(number, &inode, parent)?)
        })
    }

    /// Removes a name: of a directory if `directory`, else of anything else.
    pub(super) fn remove(
        &self,
        parent: InodeNumber,
        name: &[u8],
        directory: bool,
    ) -> Result<(), Errno> {
        let parent = to_ext2(parent)?;
        let ended = {
            let _handle = self.join_transaction(MAKE_BLOCKS + BLOCKS_A_STEP)?;
            let mut core = self.core();
            let (mut holder, found) = core.find(parent, name)?;
            let found = found.ok_or(Errno::ENOENT)?;
            let mut inode = core.named(parent, found.inode)?;
            check_removable(&holder, &inode)?;
            let is_directory = inode.kind() == Ok(FileKind::Directory);
            match (directory, is_directory) {
                (true, false) => return Err(Errno::ENOTDIR),
                (false, true) => return Err(Errno::EISDIR),
                _ => {}
            }
            if directory
                && !core.ext2.is_empty_directory(found.inode, &inode).map_err(|e| errno(&e))?
            {
                return Err(Errno::ENOTEMPTY);
            }
            let now = self.now();
            let mut work = || {
                core.ext2.remove_entry(parent, &mut holder, name, found.at)?;
                holder.links = holder.links.saturating_sub(u16::from(directory));
                core.touch(parent, &mut holder, now)?;
                core.drop_name(found.inode, &mut inode, now)
            };
            work().map_err(|error| self.broken(&error))?
        };
        ended.map_or(Ok(()), |ending| self.end_inode(ending))
    }

    pub(super) fn readlink(&self, number: InodeNumber) -> Result<Bytes, Errno> {
        let number = to_ext2(number)?;
        let mut core = self.core();
        let inode = core.live_inode(number)?;
        if inode.kind() != Ok(FileKind::Symlink) {
            return Err(Errno::EINVAL);
        }
        core.ext2.target_of(number, &inode).map(Bytes::from).map_err(|error| errno(&error))
    }
}

/// Why a change of names failed: before anything was changed, or in the middle.
pub(super) enum Failure {
    /// Nothing was changed.
    Refused(Errno),
    /// No space: nothing was changed; some may be free after a commit.
    Space(Ext2Error),
    /// Something was changed, or cannot be read.
    Broken(Ext2Error),
}

impl From<Errno> for Failure {
    fn from(errno: Errno) -> Failure {
        Failure::Refused(errno)
    }
}

impl From<Ext2Error> for Failure {
    fn from(error: Ext2Error) -> Failure {
        match error {
            Ext2Error::NoSpace | Ext2Error::NoSpaceYet | Ext2Error::NoInodes => {
                Failure::Space(error)
            }
            error => Failure::Broken(error),
        }
    }
}

impl Core {
    fn check_birth(&mut self, directory: &Inode, birth: &Birth<'_>) -> Result<(), Errno> {
        match birth {
            Birth::Directory if directory.links >= MAX_LINKS => Err(Errno::EMLINK),
            Birth::Symlink([]) => Err(Errno::ENOENT),
            Birth::Symlink(target) if target.len() >= self.ext2.meta.block_bytes() => {
                Err(Errno::ENAMETOOLONG)
            }
            Birth::Node { kind: FileKind::Directory | FileKind::Symlink, .. } => Err(Errno::EINVAL),
            _ => Ok(()),
        }
    }

    /// Gives a new inode its contents.
    fn fill_birth(
        &mut self,
        caller: Caller,
        parent: u32,
        number: u32,
        inode: &mut Inode,
        birth: &Birth<'_>,
    ) -> Result<(), Ext2Error> {
        let goal = self.directory_goal(number, caller);
        match birth {
            Birth::Node { kind: FileKind::CharDevice | FileKind::BlockDevice, rdev } => {
                inode.set_device(*rdev);
            }
            Birth::Node { .. } | Birth::Exclusive(_) => {}
            Birth::Directory => {
                inode.links = 2;
                self.ext2.add_entry(number, inode, b".", (number, FileKind::Directory), goal)?;
                self.ext2.add_entry(number, inode, b"..", (parent, FileKind::Directory), goal)?;
            }
            Birth::Symlink(target) if target.len() <= SHORT_TARGET_BYTES => {
                for (i, byte) in target.iter().enumerate() {
                    inode.pointers[i / 4] |= u32::from(*byte) << (8 * (i % 4));
                }
                inode.size_bytes = target.len() as u64;
            }
            Birth::Symlink(target) => {
                let run = self.ext2.allocate(goal, 1)?;
                let block = self.ext2.meta.blank(run.start, Part::Ordinary)?;
                block[..target.len()].copy_from_slice(target);
                inode.pointers[0] = run.start;
                inode.blocks_512 = self.ext2.superblock().block_bytes() / 512;
                inode.size_bytes = target.len() as u64;
            }
        }
        Ok(())
    }

    /// Takes a birth back for which there was no space.
    fn undo_birth(
        &mut self,
        number: u32,
        mut inode: Inode,
        new: &NewInode<'_>,
    ) -> Result<(), Failure> {
        let mut undo = || {
            // A new file has a block at most.
            while !self.free_some(number, &mut inode)? {}
            self.ext2.release_xattrs(&mut inode)?;
            self.ext2.clear_inode(number)?;
            self.ext2.forget_directory(number);
            self.ext2.release_inode(number, new.directory, new.transparent)
        };
        undo().map_err(Failure::Broken)
    }

    /// Takes a name off an inode. One that has none left ends at once if it is not held and
    /// a step suffices, or becomes an orphan, which the caller may have to end.
    pub(super) fn drop_name(
        &mut self,
        number: u32,
        inode: &mut Inode,
        now: FileTime,
    ) -> Result<Option<Ending>, Ext2Error> {
        let directory = inode.kind() == Ok(FileKind::Directory);
        inode.links = if directory { 0 } else { inode.links - 1 };
        inode.ctime = now;
        if inode.links > 0 {
            self.ext2.put_inode(number, inode)?;
            return Ok(None);
        }
        if self.held.is_held(number) {
            self.add_orphan(number, inode)?;
            self.ext2.put_inode(number, inode)?;
            return Ok(None);
        }
        if self.free_some(number, inode)? {
            self.finish_inode(number, inode.clone(), now)?;
            return Ok(None);
        }
        self.add_orphan(number, inode)?;
        self.ext2.put_inode(number, inode)?;
        Ok(Some(Ending::of(number, inode)))
    }

    /// Whether other software moved a transparent file to directory `parent`.
    fn was_moved(&mut self, number: u32, inode: &Inode, parent: u32) -> Result<bool, Errno> {
        if !inode.is_transparent_file() {
            return Ok(false);
        }
        let map = self.map_entry(number, inode).map_err(|error| errno(&error))?;
        Ok(map.is_some_and(|map| map.parent != parent))
    }

    /// The entries of a directory, as the front end lists them, and the transparent files among
    /// them that other software moved there.
    fn list(
        &mut self,
        number: u32,
        from: u64,
        limit: usize,
        with_entries: bool,
    ) -> Result<(Vec<DirEntry>, Vec<u32>), Errno> {
        let directory = self.live_directory(number)?;
        let (mut listed, mut moved) = (Vec::new(), Vec::new());
        let mut from = from;
        while listed.len() < limit {
            let part = self
                .ext2
                .list_entries(number, &directory, from, limit - listed.len())
                .map_err(|error| errno(&error))?;
            let Some(last) = part.last() else { break };
            from = last.next;
            for entry in part.into_iter().filter(|e| e.name != b"." && e.name != b"..") {
                // A name whose inode is damaged is listed without attributes: its lookup fails.
                let inode = self.named(number, entry.inode).ok();
                let kind = inode.as_ref().and_then(|inode| inode.kind().ok()).or(entry.kind);
                let kind = kind.unwrap_or(FileKind::Regular);
                let full = inode
                    .filter(|_| with_entries)
                    .and_then(|inode| self.listed_entry(entry.inode, &inode, number, &mut moved));
                listed.push(DirEntry {
                    name: Bytes::from(entry.name),
                    kind,
                    inode: to_vfs(entry.inode),
                    cookie: entry.next,
                    entry: full,
                });
            }
        }
        Ok((listed, moved))
    }

    /// The entry of a listed name, counted as a lookup; none if it cannot be read.
    fn listed_entry(
        &mut self,
        number: u32,
        inode: &Inode,
        parent: u32,
        moved: &mut Vec<u32>,
    ) -> Option<Entry> {
        if self.was_moved(number, inode, parent).ok()? {
            moved.push(number);
        }
        self.entry(number, inode, parent).ok()
    }
}

impl Shared {
    /// As [`Shared::in_transaction`], for work on the core alone.
    pub(super) fn with_space<T>(
        &self,
        blocks: usize,
        mut work: impl FnMut(&mut Core, FileTime) -> Result<T, Failure>,
    ) -> Result<T, Errno> {
        self.in_transaction(blocks, |now| work(&mut self.core(), now))
    }
}
