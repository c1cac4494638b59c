//! The calls of a mount: those for the past go there, all others to the present.

use std::sync::Arc;
use std::time::Duration;

use atoll_vfs::{
    Answer, AttrReply, Caller, CreateVerifier, DirEntry, Entry, Errno, FileKind, FileSystem,
    Handle, InodeNumber, InvalidationQueue, Locks, OpenFlags, Opened, PersistentHandle,
    RenameFlags, SeekTo, SetAttr, StatFs, Writer, XattrFlags,
};
use bytes::Bytes;

use super::{LogOf, NAME, is_past};
use crate::shared::fs::{Present, SharedFs};
use crate::shared::inode::InodeKey;

fn refuse<T: Send + 'static>(errno: Errno) -> Answer<T> {
    Box::pin(async move { Err(errno) })
}

/// Whether a name of the root directory is that of the past.
fn is_top(parent: InodeNumber, name: &[u8]) -> bool {
    parent == InodeNumber::ROOT && name == NAME
}

/// Why a name cannot be made.
fn check_made(parent: InodeNumber, name: &[u8]) -> Result<(), Errno> {
    if is_past(parent) {
        return Err(Errno::EROFS);
    }
    if is_top(parent, name) { Err(Errno::EEXIST) } else { Ok(()) }
}

/// Why a name cannot be removed or moved.
fn check_removed(parent: InodeNumber, name: &[u8]) -> Result<(), Errno> {
    if is_past(parent) {
        return Err(Errno::EROFS);
    }
    if is_top(parent, name) { Err(Errno::EPERM) } else { Ok(()) }
}

impl SharedFs {
    /// The file system that an inode belongs to.
    fn of(&self, inode: InodeNumber) -> &dyn FileSystem {
        if is_past(inode) { &self.past } else { &self.present }
    }

    /// That inode's, if it can be changed.
    fn changeable(&self, inode: InodeNumber) -> Result<&Present, Errno> {
        if is_past(inode) { Err(Errno::EROFS) } else { Ok(&self.present) }
    }
}

impl FileSystem for SharedFs {
    fn locks(&self) -> Option<Arc<dyn Locks>> {
        self.present.locks()
    }

    fn invalidations(&self) -> Option<Arc<InvalidationQueue>> {
        self.present.invalidations()
    }

    fn has_acls(&self) -> bool {
        self.present.has_acls()
    }

    fn missing_ttl(&self) -> Duration {
        self.present.missing_ttl()
    }

    fn lookup(&self, caller: Caller, parent: InodeNumber, name: &[u8]) -> Answer<Entry> {
        if is_top(parent, name) {
            let past = self.past.clone();
            return self.present.shared.answer(async move { past.top().await });
        }
        self.of(parent).lookup(caller, parent, name)
    }

    fn parent(&self, caller: Caller, inode: InodeNumber) -> Answer<Entry> {
        self.of(inode).parent(caller, inode)
    }

    fn handle_of(&self, inode: InodeNumber) -> Answer<PersistentHandle> {
        self.of(inode).handle_of(inode)
    }

    fn by_handle(&self, caller: Caller, handle: &PersistentHandle) -> Answer<Entry> {
        match handle.as_bytes().len() == size_of::<InodeKey>() {
            true => self.present.by_handle(caller, handle),
            false => self.past.by_handle(caller, handle),
        }
    }

    fn forget(&self, inode: InodeNumber, count: u64) {
        self.of(inode).forget(inode, count);
    }

    fn getattr(&self, inode: InodeNumber, handle: Option<Handle>) -> Answer<AttrReply> {
        self.of(inode).getattr(inode, handle)
    }

    fn setattr(
        &self,
        caller: Caller,
        inode: InodeNumber,
        handle: Option<Handle>,
        changes: SetAttr,
    ) -> Answer<AttrReply> {
        match self.changeable(inode) {
            Ok(present) => present.setattr(caller, inode, handle, changes),
            Err(errno) => refuse(errno),
        }
    }

    fn readlink(&self, inode: InodeNumber) -> Answer<Bytes> {
        self.of(inode).readlink(inode)
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
        match check_made(parent, name) {
            Ok(()) => self.present.mknod(caller, parent, name, kind, mode, rdev),
            Err(errno) => refuse(errno),
        }
    }

    fn create_exclusive(
        &self,
        caller: Caller,
        parent: InodeNumber,
        name: &[u8],
        mode: u32,
        verifier: CreateVerifier,
    ) -> Answer<Entry> {
        match check_made(parent, name) {
            Ok(()) => self.present.create_exclusive(caller, parent, name, mode, verifier),
            Err(errno) => refuse(errno),
        }
    }

    fn mkdir(&self, caller: Caller, parent: InodeNumber, name: &[u8], mode: u32) -> Answer<Entry> {
        match check_made(parent, name) {
            Ok(()) => self.present.mkdir(caller, parent, name, mode),
            Err(errno) => refuse(errno),
        }
    }

    fn symlink(
        &self,
        caller: Caller,
        parent: InodeNumber,
        name: &[u8],
        target: &[u8],
    ) -> Answer<Entry> {
        match check_made(parent, name) {
            Ok(()) => self.present.symlink(caller, parent, name, target),
            Err(errno) => refuse(errno),
        }
    }

    fn link(
        &self,
        caller: Caller,
        inode: InodeNumber,
        new_parent: InodeNumber,
        new_name: &[u8],
    ) -> Answer<Entry> {
        let changeable = self.changeable(inode);
        match check_made(new_parent, new_name).and(changeable) {
            Ok(present) => present.link(caller, inode, new_parent, new_name),
            Err(errno) => refuse(errno),
        }
    }

    fn unlink(&self, caller: Caller, parent: InodeNumber, name: &[u8]) -> Answer<()> {
        match check_removed(parent, name) {
            Ok(()) => self.present.unlink(caller, parent, name),
            Err(errno) => refuse(errno),
        }
    }

    fn rmdir(&self, caller: Caller, parent: InodeNumber, name: &[u8]) -> Answer<()> {
        match check_removed(parent, name) {
            Ok(()) => self.present.rmdir(caller, parent, name),
            Err(errno) => refuse(errno),
        }
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
        match check_removed(parent, name).and(check_removed(new_parent, new_name)) {
            Ok(()) => self.present.rename(caller, parent, name, new_parent, new_name, flags),
            Err(errno) => refuse(errno),
        }
    }

    fn open(&self, caller: Caller, inode: InodeNumber, flags: OpenFlags) -> Answer<Opened> {
        self.of(inode).open(caller, inode, flags)
    }

    fn create(
        &self,
        caller: Caller,
        parent: InodeNumber,
        name: &[u8],
        mode: u32,
        flags: OpenFlags,
    ) -> Answer<(Entry, Opened)> {
        match check_made(parent, name) {
            Ok(()) => self.present.create(caller, parent, name, mode, flags),
            Err(errno) => refuse(errno),
        }
    }

    fn read(&self, inode: InodeNumber, handle: Handle, offset: u64, len: u32) -> Answer<Bytes> {
        self.of(inode).read(inode, handle, offset, len)
    }

    fn write(
        &self,
        writer: Writer,
        inode: InodeNumber,
        handle: Handle,
        offset: u64,
        data: Bytes,
    ) -> Answer<u32> {
        match self.changeable(inode) {
            Ok(present) => present.write(writer, inode, handle, offset, data),
            Err(errno) => refuse(errno),
        }
    }

    fn flush(&self, inode: InodeNumber, handle: Handle) -> Answer<()> {
        self.of(inode).flush(inode, handle)
    }

    fn fsync(&self, inode: InodeNumber, handle: Handle, data_only: bool) -> Answer<()> {
        self.of(inode).fsync(inode, handle, data_only)
    }

    fn seek(&self, inode: InodeNumber, handle: Handle, offset: u64, to: SeekTo) -> Answer<u64> {
        self.of(inode).seek(inode, handle, offset, to)
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
        match self.changeable(inode) {
            Ok(present) => present.fallocate(caller, inode, handle, offset, len, mode),
            Err(errno) => refuse(errno),
        }
    }

    fn close(&self, inode: InodeNumber, handle: Handle) -> Answer<()> {
        self.of(inode).close(inode, handle)
    }

    fn opendir(&self, caller: Caller, inode: InodeNumber) -> Answer<Opened> {
        self.of(inode).opendir(caller, inode)
    }

    fn readdir(
        &self,
        inode: InodeNumber,
        handle: Handle,
        cookie: u64,
        limit: usize,
        with_entries: bool,
    ) -> Answer<Vec<DirEntry>> {
        self.of(inode).readdir(inode, handle, cookie, limit, with_entries)
    }

    fn closedir(&self, inode: InodeNumber, handle: Handle) -> Answer<()> {
        self.of(inode).closedir(inode, handle)
    }

    fn fsyncdir(&self, inode: InodeNumber, handle: Handle, data_only: bool) -> Answer<()> {
        self.of(inode).fsyncdir(inode, handle, data_only)
    }

    fn persist(&self, inodes: &[InodeNumber]) -> Answer<()> {
        self.present.persist(inodes)
    }

    fn sync(&self) -> Answer<()> {
        self.present.sync()
    }

    fn statfs(&self, inode: InodeNumber) -> Answer<StatFs> {
        self.of(inode).statfs(inode)
    }

    fn getxattr(&self, inode: InodeNumber, name: &[u8]) -> Answer<Bytes> {
        if let Some(of) = LogOf::parse(name).filter(|_| !is_past(inode)) {
            let shared = self.present.shared.clone();
            let logged = async move {
                let key = shared.table().node(inode.0)?.key;
                shared.log(key, of).await
            };
            return self.present.shared.answer(logged);
        }
        self.of(inode).getxattr(inode, name)
    }

    fn listxattr(&self, inode: InodeNumber) -> Answer<Vec<Bytes>> {
        self.of(inode).listxattr(inode)
    }

    fn setxattr(
        &self,
        caller: Caller,
        inode: InodeNumber,
        name: &[u8],
        value: Bytes,
        flags: XattrFlags,
    ) -> Answer<()> {
        match self.changeable(inode) {
            Ok(present) => present.setxattr(caller, inode, name, value, flags),
            Err(errno) => refuse(errno),
        }
    }

    fn removexattr(&self, caller: Caller, inode: InodeNumber, name: &[u8]) -> Answer<()> {
        match self.changeable(inode) {
            Ok(present) => present.removexattr(caller, inode, name),
            Err(errno) => refuse(errno),
        }
    }
}
