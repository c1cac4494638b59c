//! One trait for every file system, in the shape of FUSE's low-level API and NFSv3's
//! procedures, with explicit `open` and `close` (close-to-open consistency, Pastis §3,
//! needs them).
//!
//! Volumes, pools and tfs implement [`FileSystem`]; FUSE, NFS and HTTP serve it; the
//! conformance kit ([`kit`]) runs over every implementation, and [`memory::MemoryFs`] is
//! the implementation it is itself checked against. This crate knows none of the others.
//!
//! Which side checks what: permissions by mode, owner and access control list are checked by the
//! front end (FUSE's kernel side with `default_permissions`; NFS and HTTP from the attributes), not
//! here. An implementation uses [`Caller`] for the owner of what it makes, for quotas and for
//! reserved space, and enforces what no front end knows: [`InodeFlags`].
//!
//! What most file systems do not have has a default, so that they write nothing about it:
//! [`Locks`], [`PersistentHandle`]s, [`Invalidation`]s, access control lists, inode flags.

mod caller;
mod exclusive;
mod inode_table;
mod invalidation;
pub mod kit;
mod locks;
pub mod memory;
mod persistent_handle;
pub mod types;

use std::sync::Arc;
use std::time::Duration;

use atoll_env::BoxFuture;
use bytes::Bytes;
use futures_util::stream::{self, StreamExt};

pub use caller::{Caller, Groups, ListedGroups};
pub use exclusive::CreateVerifier;
pub use inode_table::{InodeTable, TableInode};
pub use invalidation::{Invalidation, InvalidationQueue};
pub use locks::{
    FileLock, LockKind, LockOwner, LockParty, LockRange, LockTable, Locks, MAX_OFFSET, RangeLocks,
};
pub use persistent_handle::{MAX_PERSISTENT_HANDLE_BYTES, PersistentHandle};
pub use types::*;

/// The answer of one call.
pub type Answer<T> = BoxFuture<'static, Result<T, Errno>>;

fn refuse<T: Send + 'static>(errno: Errno) -> Answer<T> {
    Box::pin(async move { Err(errno) })
}

/// A file system. Inode numbers are handed out by `lookup`, `readdir` and the creating
/// calls; each entry returned counts one *lookup* that `forget` takes back, as in FUSE.
/// The root is [`InodeNumber::ROOT`]. Names are bytes without `/` and NUL, at most
/// [`MAX_NAME_BYTES`] long, never `.` or `..`; an implementation checks them by
/// [`check_name`].
///
/// An inode number of which no lookup is held, and which is not open, may be answered
/// with [`Errno::ESTALE`] (or [`Errno::ENOENT`]). A file whose last name is gone lives on
/// while it is open or its number is held.
///
/// Every call answers within a bounded time, if only with [`Errno::ETIMEDOUT`] or
/// [`Errno::EIO`]: a process that waits for a mounted file cannot be killed.
///
/// Names that [`FileSystem::lookup_all`] looks up side by side, unless a file system does something better.
const LOOKUPS_AT_ONCE: usize = 32;

/// Calls that change something have a default that refuses with [`Errno::EROFS`].
pub trait FileSystem: Send + Sync + 'static {
    /// The entry `name` of directory `parent`.
    fn lookup(&self, caller: Caller, parent: InodeNumber, name: &[u8]) -> Answer<Entry>;

    /// The entries of several names of directory `parent`, in their order, each as [`lookup`](Self::lookup) has it. For file systems
    /// that ask somewhere else: one question instead of many.
    fn lookup_all(
        &self,
        caller: Caller,
        parent: InodeNumber,
        names: Vec<Bytes>,
    ) -> Answer<Vec<Result<Entry, Errno>>> {
        let lookups: Vec<_> = names.iter().map(|name| self.lookup(caller, parent, name)).collect();
        let lookups = stream::iter(lookups).buffered(LOOKUPS_AT_ONCE);
        Box::pin(async move { Ok(lookups.collect().await) })
    }

    /// The directory that holds directory `inode` (the root is its own), counted as one
    /// lookup: NFS looks up `..`, and a re-exported FUSE mount does.
    fn parent(&self, caller: Caller, inode: InodeNumber) -> Answer<Entry> {
        let _ = (caller, inode);
        refuse(Errno::EOPNOTSUPP)
    }

    /// The handle that names file `inode` for as long as it exists. The caller need not hold the
    /// number, so that FUSE, whose handles are numbers, finds its files by this and
    /// [`by_handle`](Self::by_handle). [`Errno::ESTALE`] if no file has the number, or it cannot
    /// be told; [`Errno::EOPNOTSUPP`]: there are no handles.
    fn handle_of(&self, inode: InodeNumber) -> Answer<PersistentHandle> {
        let _ = inode;
        refuse(Errno::EOPNOTSUPP)
    }

    /// The entry of the file that `handle` names, counted as one lookup. [`Errno::ESTALE`] if it
    /// is gone, also if another file has its number now.
    fn by_handle(&self, caller: Caller, handle: &PersistentHandle) -> Answer<Entry> {
        let _ = (caller, handle);
        refuse(Errno::ESTALE)
    }

    /// The table of the locks of `fcntl(2)` and `flock(2)`. None: the front end has one, and locks
    /// of one front end mean nothing to another.
    fn locks(&self) -> Option<Arc<dyn Locks>> {
        None
    }

    /// Where the front end hears of changes that it has not made itself; one that caches takes
    /// them for as long as it serves. None: there are no such changes.
    fn invalidations(&self) -> Option<Arc<InvalidationQueue>> {
        None
    }

    /// Whether the attributes `system.posix_acl_access` and `system.posix_acl_default` are
    /// POSIX access control lists, which the front end then enforces. Such a file system
    /// keeps list and mode in step at `setattr` and `setxattr`, hands a directory's default
    /// list on to what is made in it, and takes [`Caller::umask`] from the mode where there
    /// is none.
    fn has_acls(&self) -> bool {
        false
    }

    /// How long a name that `lookup` did not find may be taken not to exist.
    fn missing_ttl(&self) -> Duration {
        Duration::ZERO
    }

    /// Takes back `count` lookups of `inode`; more than were given, or of an unknown
    /// number, is no error.
    fn forget(&self, inode: InodeNumber, count: u64) {
        let _ = (inode, count);
    }

    /// The attributes of `inode`.
    fn getattr(&self, inode: InodeNumber, handle: Option<Handle>) -> Answer<AttrReply>;

    /// Changes attributes; a `None` in `changes` leaves the attribute.
    fn setattr(
        &self,
        caller: Caller,
        inode: InodeNumber,
        handle: Option<Handle>,
        changes: SetAttr,
    ) -> Answer<AttrReply> {
        let _ = (caller, inode, handle, changes);
        refuse(Errno::EROFS)
    }

    /// The target of a symbolic link.
    fn readlink(&self, inode: InodeNumber) -> Answer<Bytes>;

    /// Makes a regular file (without opening it), FIFO, socket or device.
    fn mknod(
        &self,
        caller: Caller,
        parent: InodeNumber,
        name: &[u8],
        kind: FileKind,
        mode: u32,
        rdev: u64,
    ) -> Answer<Entry> {
        let _ = (caller, parent, name, kind, mode, rdev);
        refuse(Errno::EROFS)
    }

    /// Makes a regular file (without opening it) and keeps `verifier` in its times ([`CreateVerifier::times`]), in one atomic
    /// change. If the name is that of a file made with this very verifier, also before a restart, and not changed since
    /// ([`CreateVerifier::has_made`]), answers that file; [`Errno::EEXIST`] if it is any other file's.
    fn create_exclusive(
        &self,
        caller: Caller,
        parent: InodeNumber,
        name: &[u8],
        mode: u32,
        verifier: CreateVerifier,
    ) -> Answer<Entry> {
        let _ = (caller, parent, name, mode, verifier);
        refuse(Errno::EROFS)
    }

    /// Makes a directory.
    fn mkdir(&self, caller: Caller, parent: InodeNumber, name: &[u8], mode: u32) -> Answer<Entry> {
        let _ = (caller, parent, name, mode);
        refuse(Errno::EROFS)
    }

    /// Makes a symbolic link to `target`.
    fn symlink(
        &self,
        caller: Caller,
        parent: InodeNumber,
        name: &[u8],
        target: &[u8],
    ) -> Answer<Entry> {
        let _ = (caller, parent, name, target);
        refuse(Errno::EROFS)
    }

    /// Makes another name for `inode`.
    fn link(
        &self,
        caller: Caller,
        inode: InodeNumber,
        new_parent: InodeNumber,
        new_name: &[u8],
    ) -> Answer<Entry> {
        let _ = (caller, inode, new_parent, new_name);
        refuse(Errno::EROFS)
    }

    /// Removes a name that is not a directory.
    fn unlink(&self, caller: Caller, parent: InodeNumber, name: &[u8]) -> Answer<()> {
        let _ = (caller, parent, name);
        refuse(Errno::EROFS)
    }

    /// Removes an empty directory.
    fn rmdir(&self, caller: Caller, parent: InodeNumber, name: &[u8]) -> Answer<()> {
        let _ = (caller, parent, name);
        refuse(Errno::EROFS)
    }

    /// Renames, replacing what was there unless `flags` forbid it.
    fn rename(
        &self,
        caller: Caller,
        parent: InodeNumber,
        name: &[u8],
        new_parent: InodeNumber,
        new_name: &[u8],
        flags: RenameFlags,
    ) -> Answer<()> {
        let _ = (caller, parent, name, new_parent, new_name, flags);
        refuse(Errno::EROFS)
    }

    /// Opens a regular file; a directory is [`Errno::EISDIR`]. With
    /// [`OpenFlags::TRUNCATE`] it is emptied. An implementation without per-open state
    /// returns [`Handle::NONE`].
    fn open(&self, caller: Caller, inode: InodeNumber, flags: OpenFlags) -> Answer<Opened>;

    /// Makes and opens a regular file. A name that exists is [`Errno::EEXIST`] with
    /// [`OpenFlags::EXCLUSIVE`]; without, that file is opened as [`open`](Self::open) does.
    fn create(
        &self,
        caller: Caller,
        parent: InodeNumber,
        name: &[u8],
        mode: u32,
        flags: OpenFlags,
    ) -> Answer<(Entry, Opened)> {
        let _ = (caller, parent, name, mode, flags);
        refuse(Errno::EROFS)
    }

    /// Reads up to `len` bytes at `offset`; fewer only at the end of the file.
    fn read(&self, inode: InodeNumber, handle: Handle, offset: u64, len: u32) -> Answer<Bytes>;

    /// Writes `data` where `writer` and `offset` say; returns how many bytes were taken.
    fn write(
        &self,
        writer: Writer,
        inode: InodeNumber,
        handle: Handle,
        offset: u64,
        data: Bytes,
    ) -> Answer<u32> {
        let _ = (writer, inode, handle, offset, data);
        refuse(Errno::EROFS)
    }

    /// Called at each `close(2)` of a handle that may write, and perhaps of others; errors of
    /// delayed writes are reported here. [`Errno::ENOSYS`]: no write is delayed, ask no more.
    fn flush(&self, inode: InodeNumber, handle: Handle) -> Answer<()> {
        let _ = (inode, handle);
        refuse(Errno::ENOSYS)
    }

    /// Makes what was written durable.
    fn fsync(&self, inode: InodeNumber, handle: Handle, data_only: bool) -> Answer<()> {
        let _ = (inode, handle, data_only);
        Box::pin(async { Ok(()) })
    }

    /// The first offset at or after `offset` that lies in data or in a hole;
    /// [`Errno::ENXIO`] past the end, and for data where only a hole follows. The end of
    /// the file counts as a hole. [`Errno::ENOSYS`]: ask no more, take all for data.
    fn seek(&self, inode: InodeNumber, handle: Handle, offset: u64, to: SeekTo) -> Answer<u64> {
        let _ = (inode, handle, offset, to);
        refuse(Errno::ENOSYS)
    }

    /// Reserves space for, or punches a hole into, `len` bytes at `offset`: `mode` is that of
    /// `fallocate(2)`. [`Errno::EOPNOTSUPP`] for a mode that is not offered; [`Errno::EINVAL`] for
    /// no bytes. A range that had no space reads as zeros, and so does a hole; a hole beyond the
    /// end changes nothing.
    fn fallocate(
        &self,
        caller: Caller,
        inode: InodeNumber,
        handle: Handle,
        offset: u64,
        len: u64,
        mode: i32,
    ) -> Answer<()> {
        let _ = (caller, inode, handle, offset, len, mode);
        refuse(Errno::EOPNOTSUPP)
    }

    /// Ends an open; called once for each `open` and `create`.
    fn close(&self, inode: InodeNumber, handle: Handle) -> Answer<()>;

    /// Whether an open of a directory keeps nothing. A front end may then leave `opendir` and
    /// `closedir` out, list under [`Handle::NONE`], and keep a listing until the directory's
    /// attributes change.
    fn has_stateless_directories(&self) -> bool {
        false
    }

    /// Whether a cookie of a directory means the same place in every open of it, also after a restart, and however
    /// names come and go meanwhile: NFS lists directories without opening them.
    fn has_lasting_cookies(&self) -> bool {
        false
    }

    /// Opens a directory for reading: what `readdir` then lists under this handle is
    /// one snapshot.
    fn opendir(&self, caller: Caller, inode: InodeNumber) -> Answer<Opened>;

    /// Entries of a directory after the one whose cookie is `cookie` (0: from the
    /// start), at most `limit`, in an order that is stable while the handle is open.
    /// Cookies lie in `1..=`[`MAX_COOKIE`]. `.` and `..` are not listed. An empty answer
    /// means the end. With `with_entries`, each carries its [`Entry`], which counts one
    /// lookup, unless its attributes cannot be read; names that are gone since `opendir` are
    /// left out.
    fn readdir(
        &self,
        inode: InodeNumber,
        handle: Handle,
        cookie: u64,
        limit: usize,
        with_entries: bool,
    ) -> Answer<Vec<DirEntry>>;

    /// Ends an `opendir`.
    fn closedir(&self, inode: InodeNumber, handle: Handle) -> Answer<()>;

    /// Makes changes of a directory durable.
    fn fsyncdir(&self, inode: InodeNumber, handle: Handle, data_only: bool) -> Answer<()> {
        let _ = (inode, handle, data_only);
        Box::pin(async { Ok(()) })
    }

    /// Has the names and attributes of these files, as calls have changed them by now, survive a crash of this machine: NFS
    /// answers no change before (RFC 1813, section 4.8). What a file system keeps elsewhere in the end may be on this
    /// machine's disk until then; data need not be durable.
    fn persist(&self, inodes: &[InodeNumber]) -> Answer<()> {
        let _ = inodes;
        Box::pin(async { Ok(()) })
    }

    /// Makes everything durable; a front end calls it before it ends.
    fn sync(&self) -> Answer<()> {
        Box::pin(async { Ok(()) })
    }

    /// Sizes and counts of the whole file system.
    fn statfs(&self, inode: InodeNumber) -> Answer<StatFs>;

    /// The flags of an inode. [`Errno::ENOTTY`]: it has none.
    fn inode_flags(&self, inode: InodeNumber) -> Answer<InodeFlags> {
        let _ = inode;
        refuse(Errno::ENOTTY)
    }

    /// Sets the flags of an inode; those that cannot be set stay as they are. Only the owner
    /// may, and of [`InodeFlags::IMMUTABLE`] and [`InodeFlags::APPEND_ONLY`] only root.
    fn set_inode_flags(&self, caller: Caller, inode: InodeNumber, flags: InodeFlags) -> Answer<()> {
        let _ = (caller, inode, flags);
        refuse(Errno::ENOTTY)
    }

    /// The value of an extended attribute; [`Errno::ENODATA`] if there is none.
    fn getxattr(&self, inode: InodeNumber, name: &[u8]) -> Answer<Bytes> {
        let _ = (inode, name);
        refuse(Errno::ENODATA)
    }

    /// The names of the extended attributes.
    fn listxattr(&self, inode: InodeNumber) -> Answer<Vec<Bytes>> {
        let _ = inode;
        Box::pin(async { Ok(Vec::new()) })
    }

    /// Sets an extended attribute.
    fn setxattr(
        &self,
        caller: Caller,
        inode: InodeNumber,
        name: &[u8],
        value: Bytes,
        flags: XattrFlags,
    ) -> Answer<()> {
        let _ = (caller, inode, name, value, flags);
        refuse(Errno::EROFS)
    }

    /// Removes an extended attribute.
    fn removexattr(&self, caller: Caller, inode: InodeNumber, name: &[u8]) -> Answer<()> {
        let _ = (caller, inode, name);
        refuse(Errno::EROFS)
    }
}
