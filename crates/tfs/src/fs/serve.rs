//! The mounted file system as [`FileSystem`].
//!
//! Every call does its work on the thread that polls it first: nothing here waits but for the
//! device and for mutexes that are held for as long as memory takes. One call waits for another:
//! [`Tfs::set_transparent`] for the end of opens that programs have closed already.
//!
//! An image is mounted once, so its files change by this mount's calls alone: locks are left to
//! the front end (the kernel does them without asking, and finds deadlocks), and there are no
//! invalidations.

use std::future::ready;
use std::time::Duration;

use atoll_vfs::{
    Answer, AttrReply, Caller, CreateVerifier, DirEntry, Entry, Errno, FileKind, FileSystem,
    Handle, InodeFlags, InodeNumber, MAX_NAME_BYTES, OpenFlags, Opened, PersistentHandle,
    RenameFlags, SeekTo, SetAttr, StatFs, Writer, XattrFlags,
};
use bytes::Bytes;

use super::access::{check_changeable, check_open};
use super::held::to_ext2;
use super::names::{Birth, MAX_LINKS};
use super::transparent::TRANSPARENT_XATTR;
use super::{FOR_EVER, Shared, Tfs, errno};
use crate::ext2::{AclKind, Records, Totals};
use crate::format::inode::TRANSPARENT;
use crate::format::superblock::Superblock;

/// What an inode, its bitmaps and a block of attributes take.
pub(super) const XATTR_BLOCKS: usize = 12;

fn answer<T: Send + 'static>(result: Result<T, Errno>) -> Answer<T> {
    Box::pin(ready(result))
}

/// How long a change of `user.tfs.transparent` waits for a file's last open to end, and how often
/// it looks. A guess: `close(2)` returns before the kernel has told a FUSE server of it.
const CLOSE_PATIENCE: Duration = Duration::from_millis(500);
const CLOSE_INTERVAL: Duration = Duration::from_millis(5);

fn opened(handle: Handle) -> Opened {
    Opened { handle, keep_cache: true, direct_io: false }
}

/// Blocks of all groups' own metadata.
fn overhead_blocks(superblock: &Superblock) -> u64 {
    (0..superblock.groups())
        .map(|group| {
            let copies = superblock.copy_blocks_of_group(group);
            u64::from(copies + 2 + superblock.inode_table_blocks())
        })
        .sum::<u64>()
        + u64::from(superblock.first_data_block())
}

impl Shared {
    fn open_file(
        &self,
        caller: Caller,
        number: InodeNumber,
        flags: OpenFlags,
    ) -> Result<Opened, Errno> {
        let number = to_ext2(number)?;
        let truncates = flags.has(OpenFlags::TRUNCATE);
        if (flags.writes() || truncates) && self.read_only {
            return Err(Errno::EROFS);
        }
        let transparent = {
            let mut core = self.core();
            let inode = core.live_inode(number)?;
            match inode.kind() {
                Ok(FileKind::Regular) => {}
                Ok(FileKind::Directory) => return Err(Errno::EISDIR),
                Ok(FileKind::Symlink) => return Err(Errno::ELOOP),
                _ => return Err(Errno::ENXIO),
            }
            check_open(&inode, flags)?;
            inode.is_transparent_file()
        };
        if transparent {
            self.open_transparent(number)?;
        }
        let handle = self.core().open(number, caller, flags);
        // Also of a file that is opened for reading only: that it may be written was checked.
        if truncates && let Err(errno) = self.set_size(number, 0) {
            self.close(number, handle)?;
            return Err(errno);
        }
        Ok(opened(handle))
    }

    fn create_file(
        &self,
        caller: Caller,
        parent: InodeNumber,
        name: &[u8],
        mode: u32,
        flags: OpenFlags,
    ) -> Result<(Entry, Opened), Errno> {
        let birth = Birth::Node { kind: FileKind::Regular, rdev: 0 };
        match self.make(caller, parent, name, mode, &birth, Some(flags)) {
            Ok((entry, handle)) => Ok((entry, opened(handle))),
            Err(Errno::EEXIST) if !flags.has(OpenFlags::EXCLUSIVE) => {
                let entry = self.lookup(parent, name)?;
                let number = to_ext2(entry.attr.inode)?;
                let again = self.open_file(caller, entry.attr.inode, flags).and_then(|opened| {
                    // Opening may have emptied it.
                    let mut core = self.core();
                    let inode = core.live_inode(number)?;
                    Ok((Entry { attr: core.attr(number, &inode)?, ..entry }, opened))
                });
                if again.is_err() {
                    self.forget(number, 1)?;
                }
                again
            }
            Err(errno) => Err(errno),
        }
    }

    fn create_exclusive(
        &self,
        caller: Caller,
        parent: InodeNumber,
        name: &[u8],
        mode: u32,
        verifier: CreateVerifier,
    ) -> Result<Entry, Errno> {
        let made = self.make(caller, parent, name, mode, &Birth::Exclusive(verifier), None);
        match made {
            Err(Errno::EEXIST) => {}
            made => return made.map(|made| made.0),
        }
        match self.lookup(parent, name) {
            Ok(entry) if verifier.has_made(&entry.attr) => Ok(entry),
            Ok(entry) => {
                self.forget(to_ext2(entry.attr.inode)?, 1)?;
                Err(Errno::EEXIST)
            }
            // Removed meanwhile.
            Err(Errno::ENOENT) => Err(Errno::EEXIST),
            Err(errno) => Err(errno),
        }
    }

    fn statfs(&self) -> StatFs {
        let core = self.core();
        let superblock = core.ext2.superblock();
        // Transparent blocks are free in ext2's bitmap, and transparent files give way when
        // inodes run short: "utilities such as df … ignore transparent data" (§3.4).
        let free = u64::from(superblock.free_blocks());
        let totals = core.ext2.records().map_or_else(Totals::default, Records::totals);
        let transparent = totals.transparent_inodes.saturating_sub(totals.transparent_directories);
        StatFs {
            block_size_bytes: superblock.block_bytes(),
            blocks: u64::from(superblock.blocks()).saturating_sub(overhead_blocks(superblock)),
            blocks_free: free,
            blocks_available: free.saturating_sub(u64::from(superblock.reserved_blocks())),
            files: u64::from(superblock.inodes()),
            files_free: u64::from(superblock.free_inodes()) + transparent,
            max_links: MAX_LINKS.into(),
            max_file_bytes: core.ext2.longest_file_bytes(),
            time_granularity: match superblock.has_nanoseconds() {
                true => Duration::from_nanos(1),
                false => Duration::from_secs(1),
            },
            ..StatFs::default()
        }
    }

    fn xattr(&self, number: InodeNumber, name: &[u8]) -> Result<Bytes, Errno> {
        let number = to_ext2(number)?;
        let mut core = self.core();
        let inode = core.live_inode(number)?;
        if name == TRANSPARENT_XATTR {
            let on = inode.flags & TRANSPARENT != 0;
            return if on { Ok(Bytes::from_static(b"1")) } else { Err(Errno::ENODATA) };
        }
        let xattrs = core.ext2.xattrs(number, &inode).map_err(|error| errno(&error))?;
        xattrs.value(name).map(Bytes::copy_from_slice).ok_or(Errno::ENODATA)
    }

    fn xattr_names(&self, number: InodeNumber) -> Result<Vec<Bytes>, Errno> {
        let number = to_ext2(number)?;
        let mut core = self.core();
        let inode = core.live_inode(number)?;
        let xattrs = core.ext2.xattrs(number, &inode).map_err(|error| errno(&error))?;
        let own = Bytes::from_static(TRANSPARENT_XATTR);
        let own = (inode.flags & TRANSPARENT != 0).then_some(own);
        Ok(own.into_iter().chain(xattrs.names().map(Bytes::from)).collect())
    }

    /// Sets or removes an attribute.
    fn change_xattr(
        &self,
        caller: Caller,
        number: InodeNumber,
        name: &[u8],
        value: Option<&[u8]>,
        flags: XattrFlags,
    ) -> Result<(), Errno> {
        if name.len() > MAX_NAME_BYTES {
            return Err(Errno::ERANGE);
        }
        if value.is_some_and(|value| value.len() > crate::ext2::MAX_VALUE_BYTES) {
            return Err(Errno::E2BIG);
        }
        let number = to_ext2(number)?;
        self.with_space(XATTR_BLOCKS, |core, now| {
            let mut inode = core.live_inode(number)?;
            check_changeable(&inode)?;
            let mut xattrs = core.ext2.xattrs(number, &inode).map_err(|error| errno(&error))?;
            let exists = xattrs.value(name).is_some();
            match (exists, value.is_some()) {
                (true, true) if flags.create => return Err(Errno::EEXIST.into()),
                (false, true) if flags.replace => return Err(Errno::ENODATA.into()),
                (false, false) => return Err(Errno::ENODATA.into()),
                _ => {}
            }
            if !xattrs.set(name, value) {
                return Err(Errno::EOPNOTSUPP.into());
            }
            let privileged = core.may_use_reserve(caller);
            core.ext2.put_xattrs(number, &mut inode, &xattrs, privileged)?;
            inode.ctime = now;
            core.ext2.put_inode(number, &inode)?;
            Ok(())
        })
    }

    fn sync_all(&self) -> Result<(), Errno> {
        if self.failed.get().is_some() { Err(Errno::EIO) } else { self.commit() }
    }
}

impl FileSystem for Tfs {
    fn lookup(&self, _: Caller, parent: InodeNumber, name: &[u8]) -> Answer<Entry> {
        answer(self.shared.lookup(parent, name))
    }

    fn parent(&self, _: Caller, inode: InodeNumber) -> Answer<Entry> {
        answer(self.shared.parent(inode))
    }

    fn handle_of(&self, inode: InodeNumber) -> Answer<PersistentHandle> {
        answer(self.shared.handle_of(inode))
    }

    fn by_handle(&self, _: Caller, handle: &PersistentHandle) -> Answer<Entry> {
        answer(self.shared.by_handle(handle))
    }

    fn has_acls(&self) -> bool {
        true
    }

    fn missing_ttl(&self) -> Duration {
        FOR_EVER
    }

    fn forget(&self, inode: InodeNumber, count: u64) {
        if let Ok(inode) = to_ext2(inode) {
            // An error ends all changes, and the next call says so.
            let _ = self.shared.forget(inode, count);
        }
    }

    fn getattr(&self, inode: InodeNumber, _: Option<Handle>) -> Answer<AttrReply> {
        let reply = || {
            let number = to_ext2(inode)?;
            let mut core = self.shared.core();
            let inode = core.live_inode(number)?;
            core.attr_reply(number, &inode)
        };
        answer(reply())
    }

    fn setattr(
        &self,
        caller: Caller,
        inode: InodeNumber,
        _: Option<Handle>,
        changes: SetAttr,
    ) -> Answer<AttrReply> {
        answer(self.shared.setattr(caller, inode, changes))
    }

    fn readlink(&self, inode: InodeNumber) -> Answer<Bytes> {
        answer(self.shared.readlink(inode))
    }

    fn mknod(
        &self,
        caller: Caller,
        parent: InodeNumber,
        name: &[u8],
        kind: FileKind,
        mode: u32,
        rdev: u64,
    ) -> Answer<Entry> {
        let birth = Birth::Node { kind, rdev };
        answer(self.shared.make(caller, parent, name, mode, &birth, None).map(|made| made.0))
    }

    fn create_exclusive(
        &self,
        caller: Caller,
        parent: InodeNumber,
        name: &[u8],
        mode: u32,
        verifier: CreateVerifier,
    ) -> Answer<Entry> {
        answer(self.shared.create_exclusive(caller, parent, name, mode, verifier))
    }

    fn mkdir(&self, caller: Caller, parent: InodeNumber, name: &[u8], mode: u32) -> Answer<Entry> {
        let made = self.shared.make(caller, parent, name, mode, &Birth::Directory, None);
        answer(made.map(|made| made.0))
    }

    fn symlink(
        &self,
        caller: Caller,
        parent: InodeNumber,
        name: &[u8],
        target: &[u8],
    ) -> Answer<Entry> {
        let made = self.shared.make(caller, parent, name, 0o777, &Birth::Symlink(target), None);
        answer(made.map(|made| made.0))
    }

    fn link(
        &self,
        caller: Caller,
        inode: InodeNumber,
        new_parent: InodeNumber,
        new_name: &[u8],
    ) -> Answer<Entry> {
        answer(self.shared.link(caller, inode, new_parent, new_name))
    }

    fn unlink(&self, _: Caller, parent: InodeNumber, name: &[u8]) -> Answer<()> {
        answer(self.shared.remove(parent, name, false))
    }

    fn rmdir(&self, _: Caller, parent: InodeNumber, name: &[u8]) -> Answer<()> {
        answer(self.shared.remove(parent, name, true))
    }

    fn rename(
        &self,
        caller: Caller,
        parent: InodeNumber,
        name: &[u8],
        new_parent: InodeNumber,
        new_name: &[u8],
        flags: RenameFlags,
    ) -> Answer<()> {
        answer(self.shared.rename(caller, (parent, name), (new_parent, new_name), flags))
    }

    fn open(&self, caller: Caller, inode: InodeNumber, flags: OpenFlags) -> Answer<Opened> {
        answer(self.shared.open_file(caller, inode, flags))
    }

    fn create(
        &self,
        caller: Caller,
        parent: InodeNumber,
        name: &[u8],
        mode: u32,
        flags: OpenFlags,
    ) -> Answer<(Entry, Opened)> {
        answer(self.shared.create_file(caller, parent, name, mode, flags))
    }

    fn read(&self, inode: InodeNumber, handle: Handle, offset: u64, len: u32) -> Answer<Bytes> {
        answer(self.shared.read(inode, handle, offset, len))
    }

    fn write(
        &self,
        writer: Writer,
        inode: InodeNumber,
        handle: Handle,
        offset: u64,
        data: Bytes,
    ) -> Answer<u32> {
        answer(self.shared.write(writer, inode, handle, offset, &data))
    }

    fn fsync(&self, _: InodeNumber, _: Handle, _: bool) -> Answer<()> {
        answer(self.shared.sync_all())
    }

    fn seek(&self, inode: InodeNumber, handle: Handle, offset: u64, to: SeekTo) -> Answer<u64> {
        answer(self.shared.seek(inode, handle, offset, to))
    }

    fn fallocate(
        &self,
        caller: Caller,
        inode: InodeNumber,
        handle: Handle,
        offset: u64,
        len: u64,
        mode: i32,
    ) -> Answer<()> {
        answer(self.shared.fallocate(caller, inode, handle, offset, len, mode))
    }

    fn close(&self, inode: InodeNumber, handle: Handle) -> Answer<()> {
        answer(to_ext2(inode).and_then(|inode| self.shared.close(inode, handle)))
    }

    /// Places of entries are bytes of the directory, and its inode is held by its lookup.
    fn has_stateless_directories(&self) -> bool {
        true
    }

    fn has_lasting_cookies(&self) -> bool {
        true
    }

    fn opendir(&self, _: Caller, inode: InodeNumber) -> Answer<Opened> {
        let live = to_ext2(inode).and_then(|number| self.shared.core().live_directory(number));
        answer(live.map(|_| opened(Handle::NONE)))
    }

    fn readdir(
        &self,
        inode: InodeNumber,
        _: Handle,
        cookie: u64,
        limit: usize,
        with_entries: bool,
    ) -> Answer<Vec<DirEntry>> {
        answer(self.shared.list(inode, cookie, limit, with_entries))
    }

    fn closedir(&self, _: InodeNumber, _: Handle) -> Answer<()> {
        answer(Ok(()))
    }

    fn fsyncdir(&self, _: InodeNumber, _: Handle, _: bool) -> Answer<()> {
        answer(self.shared.sync_all())
    }

    fn persist(&self, _: &[InodeNumber]) -> Answer<()> {
        answer(self.shared.sync_all())
    }

    fn sync(&self) -> Answer<()> {
        answer(self.shared.sync_all())
    }

    fn statfs(&self, _: InodeNumber) -> Answer<StatFs> {
        answer(Ok(self.shared.statfs()))
    }

    fn inode_flags(&self, inode: InodeNumber) -> Answer<InodeFlags> {
        answer(self.shared.inode_flags(inode))
    }

    fn set_inode_flags(&self, caller: Caller, inode: InodeNumber, flags: InodeFlags) -> Answer<()> {
        answer(self.shared.set_inode_flags(caller, inode, flags))
    }

    fn getxattr(&self, inode: InodeNumber, name: &[u8]) -> Answer<Bytes> {
        if let Some(told) = self.told(name) {
            return answer(told);
        }
        if let Some(kind) = AclKind::of_xattr(name) {
            return answer(self.shared.acl_xattr(inode, kind));
        }
        answer(self.shared.xattr(inode, name))
    }

    fn listxattr(&self, inode: InodeNumber) -> Answer<Vec<Bytes>> {
        answer(self.shared.xattr_names(inode))
    }

    fn setxattr(
        &self,
        caller: Caller,
        inode: InodeNumber,
        name: &[u8],
        value: Bytes,
        flags: XattrFlags,
    ) -> Answer<()> {
        if let Some(changed) = self.change_told(caller, inode, name, &value) {
            return answer(changed);
        }
        if let Some(kind) = AclKind::of_xattr(name) {
            return answer(self.shared.change_acl(caller, inode, kind, Some(&value)));
        }
        if name == TRANSPARENT_XATTR {
            return match &value[..] {
                b"1" => self.set_transparent(caller, inode, true),
                b"0" => self.set_transparent(caller, inode, false),
                _ => answer(Err(Errno::EINVAL)),
            };
        }
        answer(self.shared.change_xattr(caller, inode, name, Some(&value), flags))
    }

    fn removexattr(&self, caller: Caller, inode: InodeNumber, name: &[u8]) -> Answer<()> {
        if let Some(kind) = AclKind::of_xattr(name) {
            return answer(self.shared.change_acl(caller, inode, kind, None));
        }
        if name == TRANSPARENT_XATTR {
            return self.set_transparent(caller, inode, false);
        }
        answer(self.shared.change_xattr(caller, inode, name, None, XattrFlags::default()))
    }
}

impl Tfs {
    /// Makes a file or a directory transparent or ordinary. A file that is open is `EBUSY`, once
    /// that has lasted longer than a `close` is on its way.
    fn set_transparent(&self, caller: Caller, inode: InodeNumber, on: bool) -> Answer<()> {
        let shared = self.shared.clone();
        Box::pin(async move {
            let number = to_ext2(inode)?;
            let until = shared.env.now() + CLOSE_PATIENCE;
            loop {
                match shared.set_transparent(caller, number, on) {
                    Err(Errno::EBUSY) if shared.env.now() < until => {
                        atoll_env::sleep(&*shared.env, CLOSE_INTERVAL).await;
                    }
                    outcome => return outcome,
                }
            }
        })
    }
}
