//! Names, attributes and bytes of a simulated file system, and how calls of Linux change them.
//!
//! Files have an identity of their own that is never used again ([`Id`]), beside the inode number that is. Every change of names
//! and attributes is a [`TreeChange`], which a crash can apply again to an older state, or leave out: it is refused there if it makes
//! no sense, so that no state has a name without a file or a file with a wrong count of names.

use std::collections::BTreeMap;
use std::sync::Arc;

use atoll_vfs::{Errno, FileKind, FileTime, MAX_NAME_BYTES, RenameFlags, XattrFlags};
use bytes::Bytes;

use super::contents::{BLOCK, FileContents};
use crate::disk::{ACCESS_LIST, DiskResult, Listed, Stat, mode_of_minimal_list};

/// Which file, for as long as the simulation runs.
pub(super) type Id = u64;

/// D itself.
pub(super) const TOP: Id = 1;
/// The first inode number that a file can have; D has ext4's 2.
const FIRST_NUMBER: u64 = 11;
/// Names that fit into a block of a directory.
const NAMES_PER_BLOCK: u64 = 64;
/// Bytes of a symbolic link, and of attributes, that fit into the inode.
const INLINE_BYTES: usize = 59;
/// The longest path that a call takes, with its NUL (Linux `PATH_MAX`).
const PATH_BYTES: usize = 4096;
/// The longest name and value of an extended attribute (Linux `XATTR_NAME_MAX`, `XATTR_SIZE_MAX`).
const XATTR_NAME_BYTES: usize = 255;
const XATTR_BYTES: usize = 64 << 10;

/// What a file is.
#[derive(Clone, Debug)]
pub(super) enum InodeBody {
    Regular(FileContents),
    Directory { names: BTreeMap<Bytes, Id>, parent: Id },
    Symlink(Bytes),
    Special(FileKind, u64),
}

#[derive(Clone, Debug)]
pub(super) struct Inode {
    pub(super) number: u64,
    pub(super) generation: u64,
    pub(super) mode: u32,
    pub(super) nlink: u32,
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) atime: FileTime,
    pub(super) mtime: FileTime,
    pub(super) ctime: FileTime,
    pub(super) xattrs: BTreeMap<Bytes, Bytes>,
    pub(super) body: InodeBody,
}

impl Inode {
    pub(super) fn kind(&self) -> FileKind {
        match &self.body {
            InodeBody::Regular(_) => FileKind::Regular,
            InodeBody::Directory { .. } => FileKind::Directory,
            InodeBody::Symlink(_) => FileKind::Symlink,
            InodeBody::Special(kind, _) => *kind,
        }
    }

    fn is_directory(&self) -> bool {
        matches!(self.body, InodeBody::Directory { .. })
    }

    fn names_mut(&mut self) -> &mut BTreeMap<Bytes, Id> {
        match &mut self.body {
            InodeBody::Directory { names, .. } => names,
            _ => unreachable!("the caller has checked that it is a directory"),
        }
    }

    /// Space taken, blocks.
    fn blocks(&self) -> u64 {
        let own = match &self.body {
            InodeBody::Regular(contents) => contents.blocks(),
            InodeBody::Directory { names, .. } => 1 + names.len() as u64 / NAMES_PER_BLOCK,
            InodeBody::Symlink(target) => u64::from(target.len() > INLINE_BYTES),
            InodeBody::Special(..) => 0,
        };
        let xattrs: usize = self.xattrs.iter().map(|(name, value)| name.len() + value.len()).sum();
        match xattrs > INLINE_BYTES {
            true => own + (xattrs as u64).div_ceil(BLOCK),
            false => own,
        }
    }

    pub(super) fn stat(&self) -> Stat {
        let size_bytes = match &self.body {
            InodeBody::Regular(contents) => contents.size,
            InodeBody::Directory { names, .. } => {
                (1 + names.len() as u64 / NAMES_PER_BLOCK) * BLOCK
            }
            InodeBody::Symlink(target) => target.len() as u64,
            InodeBody::Special(..) => 0,
        };
        let rdev = match self.body {
            InodeBody::Special(FileKind::CharDevice | FileKind::BlockDevice, rdev) => rdev,
            _ => 0,
        };
        Stat {
            ino: self.number,
            generation: self.generation,
            kind: self.kind(),
            mode: self.mode,
            nlink: self.nlink,
            uid: self.uid,
            gid: self.gid,
            rdev,
            size_bytes,
            blocks_512: self.blocks() * (BLOCK / 512),
            block_size_bytes: BLOCK as u32,
            atime: self.atime,
            mtime: self.mtime,
            ctime: self.ctime,
        }
    }
}

/// A name of a directory.
pub(super) type TreePlace = (Id, Bytes);

/// A change of names or attributes.
#[derive(Clone, Debug)]
pub(super) enum TreeChange {
    Make { place: TreePlace, id: Id, inode: Box<Inode> },
    Link { id: Id, place: TreePlace },
    Rename { from: TreePlace, to: TreePlace, flags: RenameFlags },
    Unlink(TreePlace),
    Rmdir(TreePlace),
    SetMode(Id, u32),
    SetOwner(Id, Option<u32>, Option<u32>),
    SetTimes(Id, Option<FileTime>, Option<FileTime>),
    SetXattr(Id, Bytes, Option<Bytes>, XattrFlags),
}

/// Whose names a change has changed: the file that was under the (old) name, and the one that was under the new name.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Effect {
    pub(super) file: Option<Id>,
    pub(super) other: Option<Id>,
}

/// Most of everything.
#[derive(Clone, Copy, Debug)]
pub(super) struct DiskLimits {
    pub(super) blocks: u64,
    pub(super) inodes: u64,
    pub(super) links: u32,
}

#[derive(Clone, Debug)]
pub(super) struct DiskTree {
    inodes: BTreeMap<Id, Arc<Inode>>,
    numbers: BTreeMap<u64, Id>,
    /// All numbers below this one are taken.
    lowest_number: u64,
    used_blocks: u64,
    pub(super) limits: DiskLimits,
}

fn is_dots(name: &[u8]) -> bool {
    matches!(name, b"." | b"..")
}

/// What the kernel, or the library before it, finds wrong with a name before it looks anywhere.
fn check_bytes(name: &[u8]) -> DiskResult<()> {
    match name {
        _ if name.iter().any(|byte| matches!(byte, 0 | b'/')) => Err(Errno::EINVAL),
        _ if name.len() >= PATH_BYTES => Err(Errno::ENAMETOOLONG),
        _ => Ok(()),
    }
}

impl DiskTree {
    pub(super) fn new(limits: DiskLimits, now: FileTime, generation: u64) -> DiskTree {
        let mut tree = DiskTree {
            inodes: BTreeMap::new(),
            numbers: BTreeMap::new(),
            lowest_number: FIRST_NUMBER,
            used_blocks: 0,
            limits,
        };
        let top = Inode {
            number: 2,
            generation,
            mode: 0o700,
            nlink: 2,
            uid: 0,
            gid: 0,
            atime: now,
            mtime: now,
            ctime: now,
            xattrs: BTreeMap::new(),
            body: InodeBody::Directory { names: BTreeMap::new(), parent: TOP },
        };
        tree.insert(TOP, top);
        tree
    }

    // --- inodes

    fn insert(&mut self, id: Id, inode: Inode) {
        self.used_blocks += inode.blocks();
        self.numbers.insert(inode.number, id);
        self.inodes.insert(id, Arc::new(inode));
    }

    /// Forgets a file without names that nobody has open.
    pub(super) fn remove_if_nameless(&mut self, id: Id) {
        if self.inodes.get(&id).is_some_and(|inode| inode.nlink == 0) {
            let inode = self.inodes.remove(&id).expect("just found");
            self.used_blocks -= inode.blocks();
            self.numbers.remove(&inode.number);
            if inode.number >= FIRST_NUMBER {
                self.lowest_number = self.lowest_number.min(inode.number);
            }
        }
    }

    /// Forgets all files without names but those that are `kept`.
    pub(super) fn remove_nameless(&mut self, kept: impl Fn(Id) -> bool) {
        let nameless = self.inodes.iter().filter(|(id, inode)| inode.nlink == 0 && !kept(**id));
        let nameless: Vec<Id> = nameless.map(|(id, _)| *id).collect();
        for id in nameless {
            self.remove_if_nameless(id);
        }
    }

    pub(super) fn ids(&self) -> impl Iterator<Item = Id> {
        self.inodes.keys().copied()
    }

    /// The lowest inode number that no file has.
    pub(super) fn free_number(&mut self) -> u64 {
        while self.numbers.contains_key(&self.lowest_number) {
            self.lowest_number += 1;
        }
        self.lowest_number
    }

    pub(super) fn is_free(&self, number: u64) -> bool {
        !self.numbers.contains_key(&number)
    }

    pub(super) fn inode(&self, id: Id) -> DiskResult<&Inode> {
        self.inodes.get(&id).map(|inode| &**inode).ok_or(Errno::ENOENT)
    }

    /// Changes a file, and keeps count of the space.
    pub(super) fn edit<T>(&mut self, id: Id, edit: impl FnOnce(&mut Inode) -> T) -> DiskResult<T> {
        let inode = Arc::make_mut(self.inodes.get_mut(&id).ok_or(Errno::ENOENT)?);
        self.used_blocks -= inode.blocks();
        let done = edit(inode);
        self.used_blocks += inode.blocks();
        Ok(done)
    }

    pub(super) fn free_blocks(&self) -> u64 {
        self.limits.blocks.saturating_sub(self.used_blocks)
    }

    pub(super) fn free_inodes(&self) -> u64 {
        self.limits.inodes.saturating_sub(self.inodes.len() as u64)
    }

    fn check_room(&self, blocks: u64, inodes: u64) -> DiskResult<()> {
        match blocks <= self.free_blocks() && inodes <= self.free_inodes() {
            true => Ok(()),
            false => Err(Errno::ENOSPC),
        }
    }

    // --- looking up

    fn names(&self, dir: Id) -> DiskResult<&BTreeMap<Bytes, Id>> {
        match &self.inode(dir)?.body {
            InodeBody::Directory { names, .. } => Ok(names),
            _ => Err(Errno::ENOTDIR),
        }
    }

    fn parent(&self, dir: Id) -> Option<Id> {
        match self.inode(dir).ok()?.body {
            InodeBody::Directory { parent, .. } => Some(parent),
            _ => None,
        }
    }

    /// The file at a name that is no dot.
    pub(super) fn at(&self, (dir, name): &TreePlace) -> DiskResult<Option<Id>> {
        let names = self.names(*dir)?;
        if self.inode(*dir)?.nlink == 0 {
            return Err(Errno::ENOENT);
        }
        if name.len() > MAX_NAME_BYTES {
            return Err(Errno::ENAMETOOLONG);
        }
        Ok(names.get(name).copied())
    }

    /// What can be told of a name without looking for it: that it is one, and its directory a directory.
    fn check_place(&self, (dir, name): &TreePlace) -> DiskResult<()> {
        if name.is_empty() {
            return Err(Errno::ENOENT);
        }
        self.names(*dir).map(drop)
    }

    /// The file at a name, `.` and `..` too.
    pub(super) fn find(&self, place: &TreePlace) -> DiskResult<Id> {
        check_bytes(&place.1)?;
        self.check_place(place)?;
        match &place.1[..] {
            b"." => Ok(place.0),
            b".." => {
                self.parent(place.0).filter(|id| self.inodes.contains_key(id)).ok_or(Errno::ENOENT)
            }
            _ => self.at(place)?.ok_or(Errno::ENOENT),
        }
    }

    /// Checks that a name can be made.
    pub(super) fn check_vacant(&self, place: &TreePlace) -> DiskResult<()> {
        check_bytes(&place.1)?;
        self.check_place(place)?;
        match is_dots(&place.1) || self.at(place)?.is_some() {
            true => Err(Errno::EEXIST),
            false => Ok(()),
        }
    }

    /// Blocks that one more name takes.
    fn growth(&self, dir: Id) -> DiskResult<u64> {
        let len = self.names(dir)?.len() as u64;
        Ok((len + 1) / NAMES_PER_BLOCK - len / NAMES_PER_BLOCK)
    }

    /// Whether `dir` is `ancestor` or lies below it.
    fn is_within(&self, dir: Id, ancestor: Id) -> bool {
        let mut at = dir;
        while at != ancestor {
            match self.parent(at) {
                Some(parent) if parent != at => at = parent,
                _ => return false,
            }
        }
        true
    }

    pub(super) fn list(&self, dir: Id) -> DiskResult<Vec<Listed>> {
        let listed = |(name, id): (&Bytes, &Id)| {
            let inode = self.inode(*id)?;
            Ok(Listed { name: name.clone(), kind: inode.kind(), ino: inode.number })
        };
        let names = self.names(dir)?;
        if self.inode(dir)?.nlink == 0 {
            return Err(Errno::ENOENT);
        }
        names.iter().map(listed).collect()
    }

    // --- changes

    /// Makes a change, or says why it cannot be made and makes nothing. `None`: nothing was to be changed.
    pub(super) fn apply(
        &mut self,
        change: &TreeChange,
        now: FileTime,
    ) -> DiskResult<Option<Effect>> {
        let ids = |file, other| Ok(Some(Effect { file, other }));
        match change {
            TreeChange::Make { place, id, inode } => {
                self.make(place, *id, inode, now)?;
                ids(Some(*id), None)
            }
            TreeChange::Link { id, place } => {
                self.link(*id, place, now)?;
                ids(Some(*id), None)
            }
            TreeChange::Rename { from, to, flags } => self.rename(from, to, *flags, now),
            TreeChange::Unlink(place) => ids(Some(self.unlink(place, now)?), None),
            TreeChange::Rmdir(place) => ids(Some(self.rmdir(place, now)?), None),
            TreeChange::SetMode(id, mode) => {
                if self.inode(*id)?.kind() == FileKind::Symlink {
                    return Err(Errno::EOPNOTSUPP);
                }
                self.edit(*id, |inode| (inode.mode, inode.ctime) = (mode & 0o7777, now))?;
                ids(Some(*id), None)
            }
            TreeChange::SetOwner(id, uid, gid) => {
                self.edit(*id, |inode| {
                    // -1 leaves it, as no value does.
                    inode.uid = uid.filter(|uid| *uid != u32::MAX).unwrap_or(inode.uid);
                    inode.gid = gid.filter(|gid| *gid != u32::MAX).unwrap_or(inode.gid);
                    if !inode.is_directory() {
                        inode.mode &= !0o4000;
                        // Without the right to execute, set-group-id once meant mandatory locks.
                        if inode.mode & 0o010 != 0 {
                            inode.mode &= !0o2000;
                        }
                    }
                    inode.ctime = now;
                })?;
                ids(Some(*id), None)
            }
            TreeChange::SetTimes(id, atime, mtime) => {
                if atime.is_none() && mtime.is_none() {
                    return Ok(None);
                }
                self.edit(*id, |inode| {
                    inode.atime = atime.unwrap_or(inode.atime);
                    inode.mtime = mtime.unwrap_or(inode.mtime);
                    inode.ctime = now;
                })?;
                ids(Some(*id), None)
            }
            TreeChange::SetXattr(id, name, value, flags) => {
                self.set_xattr(*id, name, value.as_ref(), *flags, now)?;
                ids(Some(*id), None)
            }
        }
    }

    fn make(&mut self, place: &TreePlace, id: Id, inode: &Inode, now: FileTime) -> DiskResult<()> {
        self.check_vacant(place)?;
        let parent = self.inode(place.0)?;
        if inode.is_directory() && parent.nlink >= self.limits.links {
            return Err(Errno::EMLINK);
        }
        self.check_room(inode.blocks() + self.growth(place.0)?, 1)?;
        let subdirectories = u32::from(inode.is_directory());
        self.insert(id, inode.clone());
        self.put(place, id, now, subdirectories)
    }

    /// Puts a name into its directory.
    fn put(
        &mut self,
        (dir, name): &TreePlace,
        id: Id,
        now: FileTime,
        subdirs: u32,
    ) -> DiskResult<()> {
        self.edit(*dir, |dir| {
            dir.names_mut().insert(name.clone(), id);
            dir.nlink += subdirs;
            (dir.mtime, dir.ctime) = (now, now);
        })?;
        self.edit(id, |inode| {
            if let InodeBody::Directory { parent, .. } = &mut inode.body {
                *parent = *dir;
            }
            inode.ctime = now;
        })
    }

    /// Takes a name away.
    fn take(&mut self, (dir, name): &TreePlace, now: FileTime, subdirs: u32) -> DiskResult<()> {
        self.edit(*dir, |dir| {
            dir.names_mut().remove(name);
            dir.nlink -= subdirs;
            (dir.mtime, dir.ctime) = (now, now);
        })
    }

    fn link(&mut self, id: Id, place: &TreePlace, now: FileTime) -> DiskResult<()> {
        self.check_vacant(place)?;
        let inode = self.inode(id)?;
        match inode.nlink {
            _ if inode.is_directory() => return Err(Errno::EPERM),
            0 => return Err(Errno::ENOENT),
            links if links >= self.limits.links => return Err(Errno::EMLINK),
            _ => {}
        }
        self.check_room(self.growth(place.0)?, 0)?;
        self.edit(id, |inode| inode.nlink += 1)?;
        self.put(place, id, now, 0)
    }

    /// Counts a name less; all of a directory's.
    fn drop_link(&mut self, id: Id, now: FileTime) -> DiskResult<()> {
        self.edit(id, |inode| {
            inode.nlink = if inode.is_directory() { 0 } else { inode.nlink - 1 };
            inode.ctime = now;
        })
    }

    fn unlink(&mut self, place: &TreePlace, now: FileTime) -> DiskResult<Id> {
        check_bytes(&place.1)?;
        self.check_place(place)?;
        if is_dots(&place.1) {
            return Err(Errno::EISDIR);
        }
        let id = self.at(place)?.ok_or(Errno::ENOENT)?;
        if self.inode(id)?.is_directory() {
            return Err(Errno::EISDIR);
        }
        self.take(place, now, 0)?;
        self.drop_link(id, now)?;
        Ok(id)
    }

    fn rmdir(&mut self, place: &TreePlace, now: FileTime) -> DiskResult<Id> {
        check_bytes(&place.1)?;
        self.check_place(place)?;
        match &place.1[..] {
            b"." => return Err(Errno::EINVAL),
            b".." => return Err(Errno::ENOTEMPTY),
            _ => {}
        }
        let id = self.at(place)?.ok_or(Errno::ENOENT)?;
        if !self.names(id)?.is_empty() {
            return Err(Errno::ENOTEMPTY);
        }
        self.take(place, now, 1)?;
        self.drop_link(id, now)?;
        Ok(id)
    }

    /// The order of the checks is that of Linux' `do_renameat2`.
    fn rename(
        &mut self,
        from: &TreePlace,
        to: &TreePlace,
        flags: RenameFlags,
        now: FileTime,
    ) -> DiskResult<Option<Effect>> {
        check_bytes(&from.1)?;
        check_bytes(&to.1)?;
        if flags.no_replace && flags.exchange {
            return Err(Errno::EINVAL);
        }
        self.check_place(from)?;
        self.check_place(to)?;
        if is_dots(&from.1) {
            return Err(Errno::EBUSY);
        }
        if is_dots(&to.1) {
            return Err(if flags.no_replace { Errno::EEXIST } else { Errno::EBUSY });
        }
        let id = self.at(from)?.ok_or(Errno::ENOENT)?;
        let over = self.at(to)?;
        if flags.no_replace && over.is_some() {
            return Err(Errno::EEXIST);
        }
        if flags.exchange && over.is_none() {
            return Err(Errno::ENOENT);
        }
        if self.is_within(to.0, id) {
            return Err(Errno::EINVAL);
        }
        if over.is_some_and(|over| self.is_within(from.0, over)) {
            return Err(if flags.exchange { Errno::EINVAL } else { Errno::ENOTEMPTY });
        }
        if over == Some(id) {
            return Ok(None);
        }
        let is_dir = self.inode(id)?.is_directory();
        let over_is_dir = match over {
            Some(over) => self.inode(over)?.is_directory(),
            None => false,
        };
        let is_full = |tree: &DiskTree, dir: Id| -> DiskResult<bool> {
            Ok(tree.inode(dir)?.nlink >= tree.limits.links)
        };
        if from.0 != to.0
            && ((is_dir && !over_is_dir && is_full(self, to.0)?)
                || (flags.exchange && over_is_dir && !is_dir && is_full(self, from.0)?))
        {
            return Err(Errno::EMLINK);
        }
        if let Some(over) = over.filter(|_| !flags.exchange) {
            match (is_dir, over_is_dir) {
                (true, false) => return Err(Errno::ENOTDIR),
                (false, true) => return Err(Errno::EISDIR),
                (true, true) if !self.names(over)?.is_empty() => return Err(Errno::ENOTEMPTY),
                _ => {}
            }
        }
        if over.is_none() && from.0 != to.0 {
            self.check_room(self.growth(to.0)?, 0)?;
        }
        self.take(from, now, u32::from(is_dir))?;
        if let Some(over) = over {
            self.take(to, now, u32::from(over_is_dir))?;
            match flags.exchange {
                true => self.put(from, over, now, u32::from(over_is_dir))?,
                false => self.drop_link(over, now)?,
            }
        }
        self.put(to, id, now, u32::from(is_dir))?;
        Ok(Some(Effect { file: Some(id), other: over }))
    }

    // --- extended attributes

    /// Checks the name of an attribute, and the length of its value, in Linux' order; `is_change`: it is to be set or removed.
    fn check_xattr(&self, id: Id, name: &[u8], len: usize, is_change: bool) -> DiskResult<()> {
        if name.contains(&0) {
            return Err(Errno::EINVAL);
        }
        if name.is_empty() || name.len() > XATTR_NAME_BYTES {
            return Err(Errno::ERANGE);
        }
        if len > XATTR_BYTES {
            return Err(Errno::E2BIG);
        }
        let kind = self.inode(id)?.kind();
        let is_users = name.starts_with(b"user.");
        if is_users && !matches!(kind, FileKind::Regular | FileKind::Directory) {
            return Err(if is_change { Errno::EPERM } else { Errno::ENODATA });
        }
        match [&b"user."[..], b"trusted.", b"security."].iter().find(|kind| name.starts_with(kind))
        {
            None => Err(Errno::EOPNOTSUPP),
            Some(prefix) if prefix.len() == name.len() => Err(Errno::EINVAL),
            Some(_) => Ok(()),
        }
    }

    /// Whether the attribute is an access control list, and the file is of a kind that has one.
    fn has_list(&self, id: Id, name: &[u8]) -> bool {
        name == ACCESS_LIST && self.inode(id).is_ok_and(|inode| inode.kind() != FileKind::Symlink)
    }

    /// Sets the mode that a list says, as Linux without regard to the call's flags; without a list changes nothing.
    fn set_list(&mut self, id: Id, value: Option<&Bytes>, now: FileTime) -> DiskResult<()> {
        let before = self.inode(id)?.mode;
        let mode = match value {
            Some(list) => mode_of_minimal_list(list).ok_or(Errno::EOPNOTSUPP)?,
            None => before & 0o777,
        };
        self.edit(id, |inode| (inode.mode, inode.ctime) = (before & !0o777 | mode, now))
    }

    pub(super) fn xattr(&self, id: Id, name: &Bytes) -> DiskResult<Bytes> {
        if self.has_list(id, name) {
            return Err(Errno::ENODATA);
        }
        self.check_xattr(id, name, 0, false)?;
        self.inode(id)?.xattrs.get(name).cloned().ok_or(Errno::ENODATA)
    }

    fn set_xattr(
        &mut self,
        id: Id,
        name: &Bytes,
        value: Option<&Bytes>,
        flags: XattrFlags,
        now: FileTime,
    ) -> DiskResult<()> {
        if self.has_list(id, name) {
            return self.set_list(id, value, now);
        }
        self.check_xattr(id, name, value.map_or(0, Bytes::len), true)?;
        let inode = self.inode(id)?;
        match inode.xattrs.contains_key(name) {
            true if flags.create => return Err(Errno::EEXIST),
            false if flags.replace || value.is_none() => return Err(Errno::ENODATA),
            _ => {}
        }
        let mut after = inode.clone();
        match value {
            Some(value) => drop(after.xattrs.insert(name.clone(), value.clone())),
            None => drop(after.xattrs.remove(name)),
        }
        after.ctime = now;
        self.check_room(after.blocks().saturating_sub(inode.blocks()), 0)?;
        self.edit(id, |inode| *inode = after)
    }
}
