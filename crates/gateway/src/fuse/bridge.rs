//! Each request of the FUSE protocol as a call of [`FileSystem`].
//!
//! What the kernel would refuse in a reply, and then leave the process waiting, is never
//! sent: longer data than asked for, errors out of range, link targets beyond a page.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::SystemTime;

use atoll_vfs::{
    Answer, Caller, Errno, FileSystem, Handle, InodeNumber, LockOwner, LockRange, OpenFlags,
    RenameFlags, SeekTo, SetAttr, XattrFlags,
};
use bytes::{BufMut, Bytes, BytesMut};
use fuser::{
    FileHandle, FopenFlags, Generation, INodeNo, InitFlags, Notifier, ReplyEmpty, ReplyXattr,
};

use super::convert;
use super::directory::{self, Sink};
use super::dispatch::Dispatcher;
use super::flags::FlagsCall;
use super::locks::{self, Holder, MountLocks, Wanted};
use super::privileges;
use super::reply::{open_flags, reply_attr, reply_empty, reply_entry, reply_missing, reply_xattr};

/// The largest write the kernel sends in one request, and (by `max_pages`, which fuser
/// derives from it) the largest read.
pub(super) const MAX_REQUEST_BYTES: u32 = 1 << 20;

/// Requests the kernel keeps under way on its own account (read-ahead, write-back).
const MAX_BACKGROUND: u16 = 64;

/// The kernel gives a link target one page, with its NUL.
const MAX_TARGET_BYTES: usize = 4095;

const SEEK_DATA: i32 = 3;
const SEEK_HOLE: i32 = 4;
const XATTR_CREATE: i32 = 1;
const XATTR_REPLACE: i32 = 2;

/// The file system as fuser calls it.
pub(super) struct Bridge {
    fs: Arc<dyn FileSystem>,
    dispatcher: Dispatcher,
    /// Where the file system keeps locks; elsewhere the kernel does.
    locks: Option<Arc<MountLocks>>,
    /// Tells the kernel what to forget, once there is a mount.
    notifier: Arc<OnceLock<Notifier>>,
    /// The kernel leaves `opendir` out once it was told that nothing comes of it.
    skips_opendir: bool,
    /// It is ours to take away set-user-ID and set-group-ID bits.
    reduces_modes: bool,
}

fn inode(number: INodeNo) -> InodeNumber {
    InodeNumber(number.0)
}

fn handle(number: FileHandle) -> Handle {
    Handle(number.0)
}

fn holder(ino: INodeNo, fh: FileHandle, owner: fuser::LockOwner) -> Holder {
    Holder { inode: inode(ino), handle: handle(fh), owner: LockOwner(owner.0) }
}

fn name(name: &OsStr) -> Bytes {
    Bytes::copy_from_slice(name.as_bytes())
}

impl Bridge {
    pub(super) fn new(
        fs: Arc<dyn FileSystem>,
        dispatcher: Dispatcher,
        notifier: Arc<OnceLock<Notifier>>,
    ) -> Bridge {
        let locks = fs.locks().map(|locks| Arc::new(MountLocks::new(locks)));
        Bridge { fs, dispatcher, locks, notifier, skips_opendir: false, reduces_modes: false }
    }

    /// Whether something is to be done at each close of a file opened so: a delayed error to be
    /// reported, locks to be given up.
    fn is_flushed(&self, flags: OpenFlags) -> bool {
        flags.writes() || self.locks.is_some()
    }

    /// Calls the file system inside the request's own future, so that even a call that
    /// panics before it returns one is answered.
    fn run<T: Send + 'static>(
        &self,
        what: &'static str,
        call: impl FnOnce(&dyn FileSystem) -> Answer<T> + Send + 'static,
        reply: impl FnOnce(Result<T, Errno>) + Send + 'static,
    ) {
        self.run_reducing(what, None, call, reply);
    }

    /// As [`Bridge::run`], once the set-user-ID and set-group-ID bits of the inode in `reduced` were
    /// taken away, on behalf of that caller.
    fn run_reducing<T: Send + 'static>(
        &self,
        what: &'static str,
        reduced: Option<(Caller, INodeNo)>,
        call: impl FnOnce(&dyn FileSystem) -> Answer<T> + Send + 'static,
        reply: impl FnOnce(Result<T, Errno>) + Send + 'static,
    ) {
        let fs = self.fs.clone();
        let work = async move {
            if let Some((caller, ino)) = reduced {
                privileges::take_away(&*fs, caller, inode(ino)).await?;
            }
            call(&*fs).await
        };
        self.dispatcher.run(what, work, reply);
    }

    /// As [`Bridge::run`], for a call that may hold up its thread.
    fn run_aside<T: Send + 'static>(
        &self,
        what: &'static str,
        call: impl FnOnce(&dyn FileSystem) -> Answer<T> + Send + 'static,
        reply: impl FnOnce(Result<T, Errno>) + Send + 'static,
    ) {
        let fs = self.fs.clone();
        self.dispatcher.run_aside(what, async move { call(&*fs).await }, reply);
    }
}

#[allow(clippy::too_many_arguments)]
impl fuser::Filesystem for Bridge {
    fn init(
        &mut self,
        _request: &fuser::Request,
        config: &mut fuser::KernelConfig,
    ) -> io::Result<()> {
        // Not FUSE_ASYNC_DIO. With it the kernel takes what an asynchronous direct write replaces
        // out of its cache when the write begins, but not when it ends: who reads meanwhile
        // brings the old bytes back, for good. And a write cut short by a full disk is EIO to it.
        for wanted in [
            InitFlags::FUSE_PARALLEL_DIROPS,
            InitFlags::FUSE_DO_READDIRPLUS,
            InitFlags::FUSE_READDIRPLUS_AUTO,
            InitFlags::FUSE_AUTO_INVAL_DATA,
            InitFlags::FUSE_EXPORT_SUPPORT,
            InitFlags::FUSE_ATOMIC_O_TRUNC,
            InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP,
        ] {
            if config.add_capabilities(wanted).is_err() {
                tracing::debug!(?wanted, "the kernel does not offer this");
            }
        }
        self.skips_opendir = self.fs.has_stateless_directories()
            && config.capabilities().contains(InitFlags::FUSE_NO_OPENDIR_SUPPORT);
        self.reduces_modes = config.add_capabilities(InitFlags::FUSE_HANDLE_KILLPRIV_V2).is_ok();
        if self.locks.is_some() {
            let needed = InitFlags::FUSE_POSIX_LOCKS | InitFlags::FUSE_FLOCK_LOCKS;
            let too_old = |_| io::Error::other("this kernel's FUSE does not pass locks on");
            config.add_capabilities(needed).map_err(too_old)?;
        }
        if self.fs.has_acls() {
            // Without them the kernel would let in whom a list keeps out.
            let needed = InitFlags::FUSE_POSIX_ACL | InitFlags::FUSE_DONT_MASK;
            let too_old = |_| io::Error::other("this kernel's FUSE cannot enforce POSIX ACLs");
            config.add_capabilities(needed).map_err(too_old)?;
        }
        let refused = |value| io::Error::other(format!("fuser would have {value}"));
        config.set_max_write(MAX_REQUEST_BYTES).map_err(refused)?;
        config.set_max_background(MAX_BACKGROUND).map_err(|value| refused(value.into()))?;
        if let Err(most) = config.set_max_readahead(MAX_REQUEST_BYTES) {
            config.set_max_readahead(most.max(1)).map_err(refused)?;
        }
        Ok(())
    }

    fn destroy(&mut self) {
        if let Some(locks) = self.locks.clone() {
            self.dispatcher.spawn(async move {
                if let Err(error) = locks.end_all().await {
                    tracing::warn!(%error, "locks are left of a mount that has ended");
                }
            });
        }
    }

    fn lookup(
        &self,
        request: &fuser::Request,
        parent: INodeNo,
        name_: &OsStr,
        reply: fuser::ReplyEntry,
    ) {
        let (caller, name) = (convert::caller(request), name(name_));
        let (fs, parent) = (self.fs.clone(), inode(parent));
        let missing_ttl = fs.missing_ttl();
        let work = async move {
            match &name[..] {
                // A file handle, of which the kernel has kept the number and compares the
                // generation; and the way from a directory found so to the root.
                b"." => fs.by_handle(caller, &fs.handle_of(parent).await?).await,
                b".." => fs.parent(caller, parent).await,
                name => fs.lookup(caller, parent, name).await,
            }
        };
        self.dispatcher.run("lookup", work, move |outcome| match outcome {
            Err(Errno::ENOENT) if !missing_ttl.is_zero() => reply_missing(reply, missing_ttl),
            outcome => reply_entry(reply, outcome),
        });
    }

    fn forget(&self, _request: &fuser::Request, ino: INodeNo, count: u64) {
        let _turn = self.dispatcher.turn_of_many();
        self.fs.forget(inode(ino), count);
    }

    fn getattr(
        &self,
        _request: &fuser::Request,
        ino: INodeNo,
        fh: Option<FileHandle>,
        reply: fuser::ReplyAttr,
    ) {
        let call = move |fs: &dyn FileSystem| fs.getattr(inode(ino), fh.map(handle));
        self.run("getattr", call, |outcome| reply_attr(reply, outcome));
    }

    fn setattr(
        &self,
        request: &fuser::Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<fuser::TimeOrNow>,
        mtime: Option<fuser::TimeOrNow>,
        _ctime: Option<SystemTime>,
        fh: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<fuser::BsdFileFlags>,
        reply: fuser::ReplyAttr,
    ) {
        let caller = convert::caller(request);
        let changes = SetAttr {
            mode: mode.map(|mode| mode & 0o7777),
            uid,
            gid,
            size_bytes: size,
            atime: atime.map(convert::time),
            mtime: mtime.map(convert::time),
        };
        let (fs, reduces_modes) = (self.fs.clone(), self.reduces_modes);
        let work = async move {
            let changes = match reduces_modes {
                true => privileges::with_reduced_mode(&*fs, caller, inode(ino), changes).await?,
                false => changes,
            };
            fs.setattr(caller, inode(ino), fh.map(handle), changes).await
        };
        self.dispatcher.run("setattr", work, |outcome| reply_attr(reply, outcome));
    }

    fn readlink(&self, _request: &fuser::Request, ino: INodeNo, reply: fuser::ReplyData) {
        self.run(
            "readlink",
            move |fs| fs.readlink(inode(ino)),
            |outcome| match outcome {
                Ok(target) if target.len() > MAX_TARGET_BYTES => {
                    reply.error(fuser::Errno::ENAMETOOLONG);
                }
                Ok(target) => reply.data(&target),
                Err(errno) => reply.error(convert::errno(errno)),
            },
        );
    }

    fn mknod(
        &self,
        request: &fuser::Request,
        parent: INodeNo,
        name_: &OsStr,
        mode: u32,
        umask: u32,
        rdev: u32,
        reply: fuser::ReplyEntry,
    ) {
        let (caller, name) = (convert::maker(request, umask), name(name_));
        self.run(
            "mknod",
            move |fs| match convert::kind_of_mode(mode) {
                Ok(kind) => {
                    fs.mknod(caller, inode(parent), &name, kind, mode & 0o7777, rdev.into())
                }
                Err(errno) => Box::pin(async move { Err(errno) }),
            },
            |outcome| reply_entry(reply, outcome),
        );
    }

    fn mkdir(
        &self,
        request: &fuser::Request,
        parent: INodeNo,
        name_: &OsStr,
        mode: u32,
        umask: u32,
        reply: fuser::ReplyEntry,
    ) {
        let (caller, name) = (convert::maker(request, umask), name(name_));
        self.run(
            "mkdir",
            move |fs| fs.mkdir(caller, inode(parent), &name, mode & 0o7777),
            |outcome| reply_entry(reply, outcome),
        );
    }

    fn unlink(&self, request: &fuser::Request, parent: INodeNo, name_: &OsStr, reply: ReplyEmpty) {
        let (caller, name) = (convert::caller(request), name(name_));
        let call = move |fs: &dyn FileSystem| fs.unlink(caller, inode(parent), &name);
        self.run("unlink", call, |outcome| reply_empty(reply, outcome));
    }

    fn rmdir(&self, request: &fuser::Request, parent: INodeNo, name_: &OsStr, reply: ReplyEmpty) {
        let (caller, name) = (convert::caller(request), name(name_));
        let call = move |fs: &dyn FileSystem| fs.rmdir(caller, inode(parent), &name);
        self.run("rmdir", call, |outcome| reply_empty(reply, outcome));
    }

    fn symlink(
        &self,
        request: &fuser::Request,
        parent: INodeNo,
        link_name: &OsStr,
        target: &Path,
        reply: fuser::ReplyEntry,
    ) {
        let (caller, link_name) = (convert::caller(request), name(link_name));
        let target = name(target.as_os_str());
        self.run(
            "symlink",
            move |fs| fs.symlink(caller, inode(parent), &link_name, &target),
            |outcome| reply_entry(reply, outcome),
        );
    }

    fn rename(
        &self,
        request: &fuser::Request,
        parent: INodeNo,
        name_: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        flags: fuser::RenameFlags,
        reply: ReplyEmpty,
    ) {
        let (no_replace, exchange) =
            (fuser::RenameFlags::RENAME_NOREPLACE, fuser::RenameFlags::RENAME_EXCHANGE);
        if !(no_replace | exchange).contains(flags) {
            return reply.error(fuser::Errno::EINVAL);
        }
        let flags = RenameFlags {
            no_replace: flags.contains(no_replace),
            exchange: flags.contains(exchange),
        };
        let caller = convert::caller(request);
        let (from, to) = (name(name_), name(new_name));
        self.run(
            "rename",
            move |fs| fs.rename(caller, inode(parent), &from, inode(new_parent), &to, flags),
            |outcome| reply_empty(reply, outcome),
        );
    }

    fn link(
        &self,
        request: &fuser::Request,
        ino: INodeNo,
        new_parent: INodeNo,
        new_name: &OsStr,
        reply: fuser::ReplyEntry,
    ) {
        let (caller, new_name) = (convert::caller(request), name(new_name));
        self.run(
            "link",
            move |fs| fs.link(caller, inode(ino), inode(new_parent), &new_name),
            |outcome| reply_entry(reply, outcome),
        );
    }

    fn open(
        &self,
        request: &fuser::Request,
        ino: INodeNo,
        flags: fuser::OpenFlags,
        reply: fuser::ReplyOpen,
    ) {
        let (caller, flags) = (convert::caller(request), OpenFlags(flags.0));
        // (The superuser's truncation leaves the bits.)
        let reduces_mode = self.reduces_modes && flags.has(OpenFlags::TRUNCATE) && caller.uid != 0;
        let is_flushed = self.is_flushed(flags);
        self.run_reducing(
            "open",
            reduces_mode.then_some((caller, ino)),
            move |fs| fs.open(caller, inode(ino), flags),
            move |outcome| match outcome {
                Ok(opened) => {
                    reply.opened(FileHandle(opened.handle.0), open_flags(opened, is_flushed));
                }
                Err(errno) => reply.error(convert::errno(errno)),
            },
        );
    }

    fn create(
        &self,
        request: &fuser::Request,
        parent: INodeNo,
        name_: &OsStr,
        mode: u32,
        umask: u32,
        flags: i32,
        reply: fuser::ReplyCreate,
    ) {
        let (caller, name, flags) = (convert::maker(request, umask), name(name_), OpenFlags(flags));
        let is_flushed = self.is_flushed(flags);
        self.run(
            "create",
            move |fs| fs.create(caller, inode(parent), &name, mode & 0o7777, flags),
            move |outcome| match outcome {
                Ok((entry, opened)) => reply.created(
                    &entry.attr_ttl.min(entry.name_ttl),
                    &convert::attr(&entry.attr),
                    Generation(entry.generation),
                    FileHandle(opened.handle.0),
                    open_flags(opened, is_flushed),
                ),
                Err(errno) => reply.error(convert::errno(errno)),
            },
        );
    }

    fn read(
        &self,
        _request: &fuser::Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: fuser::OpenFlags,
        _lock_owner: Option<fuser::LockOwner>,
        reply: fuser::ReplyData,
    ) {
        self.run(
            "read",
            move |fs| fs.read(inode(ino), handle(fh), offset, size),
            move |outcome| match outcome {
                Ok(data) => reply.data(&data[..data.len().min(size as usize)]),
                Err(errno) => reply.error(convert::errno(errno)),
            },
        );
    }

    fn write(
        &self,
        request: &fuser::Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        data: &[u8],
        write_flags: fuser::WriteFlags,
        flags: fuser::OpenFlags,
        _lock_owner: Option<fuser::LockOwner>,
        reply: fuser::ReplyWrite,
    ) {
        let caller = convert::caller(request);
        let writer = convert::writer(request, write_flags, flags);
        let data = Bytes::copy_from_slice(data);
        let reduces_mode = write_flags.contains(fuser::WriteFlags::FUSE_WRITE_KILL_SUIDGID);
        self.run_reducing(
            "write",
            reduces_mode.then_some((caller, ino)),
            move |fs| fs.write(writer, inode(ino), handle(fh), offset, data),
            |outcome| match outcome {
                Ok(taken) => reply.written(taken),
                Err(errno) => reply.error(convert::errno(errno)),
            },
        );
    }

    fn flush(
        &self,
        _request: &fuser::Request,
        ino: INodeNo,
        fh: FileHandle,
        lock_owner: fuser::LockOwner,
        reply: ReplyEmpty,
    ) {
        let (fs, locks) = (self.fs.clone(), self.locks.clone());
        let work = async move {
            let flushed = fs.flush(inode(ino), handle(fh)).await;
            let Some(locks) = locks else { return flushed };
            locks.end_owner(inode(ino), LockOwner(lock_owner.0)).await?;
            // The kernel is to go on telling of closes.
            if flushed == Err(Errno::ENOSYS) { Ok(()) } else { flushed }
        };
        self.dispatcher.run("flush", work, |outcome| reply_empty(reply, outcome));
    }

    fn release(
        &self,
        _request: &fuser::Request,
        ino: INodeNo,
        fh: FileHandle,
        _flags: fuser::OpenFlags,
        _lock_owner: Option<fuser::LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        let (fs, locks) = (self.fs.clone(), self.locks.clone());
        let work = async move {
            if let Some(locks) = locks
                && let Err(error) = locks.end_open(inode(ino), handle(fh)).await
            {
                tracing::warn!(%error, "locks are left of a file that was closed");
            }
            fs.close(inode(ino), handle(fh)).await
        };
        self.dispatcher.run("close", work, |outcome| reply_empty(reply, outcome));
    }

    fn getlk(
        &self,
        _request: &fuser::Request,
        ino: INodeNo,
        fh: FileHandle,
        lock_owner: fuser::LockOwner,
        start: u64,
        end: u64,
        kind: i32,
        pid: u32,
        reply: fuser::ReplyLock,
    ) {
        let Some(locks) = self.locks.clone() else { return reply.error(fuser::Errno::ENOSYS) };
        let holder = holder(ino, fh, lock_owner);
        let work =
            async move { locks.conflict(holder, Wanted::decode(kind, start, end, pid)?).await };
        self.dispatcher.run("getlk", work, move |outcome| match outcome {
            Ok(found) => {
                let (range, pid) =
                    found.map_or((LockRange::WHOLE, 0), |lock| (lock.range, lock.pid));
                reply.locked(range.first, range.last, locks::type_of(found), pid);
            }
            Err(errno) => reply.error(convert::errno(errno)),
        });
    }

    fn setlk(
        &self,
        request: &fuser::Request,
        ino: INodeNo,
        fh: FileHandle,
        lock_owner: fuser::LockOwner,
        start: u64,
        end: u64,
        kind: i32,
        pid: u32,
        waits: bool,
        reply: ReplyEmpty,
    ) {
        let Some(locks) = self.locks.clone() else { return reply.error(fuser::Errno::ENOSYS) };
        let (holder, thread) = (holder(ino, fh, lock_owner), request.pid());
        let waiter = waits.then_some(thread);
        let work =
            async move { locks.set(holder, Wanted::decode(kind, start, end, pid)?, waiter).await };
        let reply = |outcome| reply_empty(reply, outcome);
        // Without a limit only where a signal can end it.
        if waits && locks::is_visible(thread) {
            self.dispatcher.run_waiting("setlk", work, reply);
        } else {
            self.dispatcher.run("setlk", work, reply);
        }
    }

    fn fsync(
        &self,
        _request: &fuser::Request,
        ino: INodeNo,
        fh: FileHandle,
        data_only: bool,
        reply: ReplyEmpty,
    ) {
        let call = move |fs: &dyn FileSystem| fs.fsync(inode(ino), handle(fh), data_only);
        self.run_aside("fsync", call, |outcome| reply_empty(reply, outcome));
    }

    fn opendir(
        &self,
        request: &fuser::Request,
        ino: INodeNo,
        _flags: fuser::OpenFlags,
        reply: fuser::ReplyOpen,
    ) {
        if self.skips_opendir {
            return reply.error(fuser::Errno::ENOSYS);
        }
        let caller = convert::caller(request);
        self.run(
            "opendir",
            move |fs| fs.opendir(caller, inode(ino)),
            |outcome| match outcome {
                Ok(opened) => {
                    let mut flags = FopenFlags::empty();
                    flags.set(
                        FopenFlags::FOPEN_CACHE_DIR | FopenFlags::FOPEN_KEEP_CACHE,
                        opened.keep_cache,
                    );
                    reply.opened(FileHandle(opened.handle.0), flags);
                }
                Err(errno) => reply.error(convert::errno(errno)),
            },
        );
    }

    fn readdir(
        &self,
        _request: &fuser::Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        mut reply: fuser::ReplyDirectory,
    ) {
        let (fs, ino) = (self.fs.clone(), inode(ino));
        let reader = fs.clone();
        self.dispatcher.run(
            "readdir",
            async move { directory::page(&*reader, ino, handle(fh), offset, false).await },
            move |outcome| match outcome {
                Ok(page) => {
                    directory::put(&*fs, ino, offset, &page, Sink::Names(&mut reply));
                    reply.ok();
                }
                Err(errno) => reply.error(convert::errno(errno)),
            },
        );
    }

    fn readdirplus(
        &self,
        _request: &fuser::Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        mut reply: fuser::ReplyDirectoryPlus,
    ) {
        let (fs, ino) = (self.fs.clone(), inode(ino));
        let reader = fs.clone();
        self.dispatcher.run(
            "readdirplus",
            async move { directory::page(&*reader, ino, handle(fh), offset, true).await },
            move |outcome| match outcome {
                Ok(page) => {
                    directory::put(&*fs, ino, offset, &page, Sink::Entries(&mut reply));
                    reply.ok();
                }
                Err(errno) => reply.error(convert::errno(errno)),
            },
        );
    }

    fn releasedir(
        &self,
        _request: &fuser::Request,
        ino: INodeNo,
        fh: FileHandle,
        _flags: fuser::OpenFlags,
        reply: ReplyEmpty,
    ) {
        let call = move |fs: &dyn FileSystem| fs.closedir(inode(ino), handle(fh));
        self.run("closedir", call, |outcome| reply_empty(reply, outcome));
    }

    fn fsyncdir(
        &self,
        _request: &fuser::Request,
        ino: INodeNo,
        fh: FileHandle,
        data_only: bool,
        reply: ReplyEmpty,
    ) {
        let call = move |fs: &dyn FileSystem| fs.fsyncdir(inode(ino), handle(fh), data_only);
        self.run_aside("fsyncdir", call, |outcome| reply_empty(reply, outcome));
    }

    fn statfs(&self, _request: &fuser::Request, ino: INodeNo, reply: fuser::ReplyStatfs) {
        self.run(
            "statfs",
            move |fs| fs.statfs(inode(ino)),
            |outcome| match outcome {
                Ok(s) => reply.statfs(
                    s.blocks,
                    s.blocks_free,
                    s.blocks_available,
                    s.files,
                    s.files_free,
                    s.block_size_bytes,
                    s.max_name_bytes,
                    s.block_size_bytes,
                ),
                Err(errno) => reply.error(convert::errno(errno)),
            },
        );
    }

    fn setxattr(
        &self,
        request: &fuser::Request,
        ino: INodeNo,
        name_: &OsStr,
        value: &[u8],
        flags: i32,
        _position: u32,
        reply: ReplyEmpty,
    ) {
        let (caller, name) = (convert::caller(request), name(name_));
        let value = Bytes::copy_from_slice(value);
        let flags =
            XattrFlags { create: flags & XATTR_CREATE != 0, replace: flags & XATTR_REPLACE != 0 };
        self.run(
            "setxattr",
            move |fs| fs.setxattr(caller, inode(ino), &name, value, flags),
            |outcome| reply_empty(reply, outcome),
        );
    }

    fn getxattr(
        &self,
        _request: &fuser::Request,
        ino: INodeNo,
        name_: &OsStr,
        size: u32,
        reply: ReplyXattr,
    ) {
        let name = name(name_);
        let call = move |fs: &dyn FileSystem| fs.getxattr(inode(ino), &name);
        self.run("getxattr", call, move |outcome| reply_xattr(reply, size, outcome));
    }

    fn listxattr(&self, request: &fuser::Request, ino: INodeNo, size: u32, reply: ReplyXattr) {
        // The kernel keeps the values of trusted attributes from others, but leaves their names to us.
        let shows_trusted = convert::caller(request).uid == 0;
        let call = move |fs: &dyn FileSystem| fs.listxattr(inode(ino));
        self.run("listxattr", call, move |outcome| {
            let joined = outcome.map(|names| {
                let mut joined = BytesMut::new();
                let is_shown = |name: &Bytes| shows_trusted || !name.starts_with(b"trusted.");
                for name in names.into_iter().filter(is_shown) {
                    joined.put(name);
                    joined.put_u8(0);
                }
                joined.freeze()
            });
            reply_xattr(reply, size, joined);
        });
    }

    fn removexattr(
        &self,
        request: &fuser::Request,
        ino: INodeNo,
        name_: &OsStr,
        reply: ReplyEmpty,
    ) {
        let (caller, name) = (convert::caller(request), name(name_));
        let call = move |fs: &dyn FileSystem| fs.removexattr(caller, inode(ino), &name);
        self.run("removexattr", call, |outcome| reply_empty(reply, outcome));
    }

    fn fallocate(
        &self,
        request: &fuser::Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let caller = convert::caller(request);
        let reduces_mode = self.reduces_modes && caller.uid != 0;
        self.run_reducing(
            "fallocate",
            reduces_mode.then_some((caller, ino)),
            move |fs| fs.fallocate(caller, inode(ino), handle(fh), offset, length, mode),
            |outcome| reply_empty(reply, outcome),
        );
    }

    fn lseek(
        &self,
        _request: &fuser::Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: i64,
        whence: i32,
        reply: fuser::ReplyLseek,
    ) {
        let to = match whence {
            SEEK_DATA => SeekTo::Data,
            SEEK_HOLE => SeekTo::Hole,
            _ => return reply.error(fuser::Errno::EINVAL),
        };
        let Ok(offset) = u64::try_from(offset) else {
            return reply.error(fuser::Errno::ENXIO);
        };
        self.run(
            "seek",
            move |fs| fs.seek(inode(ino), handle(fh), offset, to),
            |outcome| match outcome.and_then(|o| i64::try_from(o).map_err(|_| Errno::EOVERFLOW)) {
                Ok(offset) => reply.offset(offset),
                Err(errno) => reply.error(convert::errno(errno)),
            },
        );
    }

    fn ioctl(
        &self,
        request: &fuser::Request,
        ino: INodeNo,
        _fh: FileHandle,
        _flags: fuser::IoctlFlags,
        command: u32,
        data: &[u8],
        out_size: u32,
        reply: fuser::ReplyIoctl,
    ) {
        let call = match FlagsCall::decode(command, data) {
            Ok(call) => call,
            Err(errno) => return reply.error(convert::errno(errno)),
        };
        let (caller, fs) = (convert::caller(request), self.fs.clone());
        let notifier = self.notifier.clone();
        let work = async move { call.make(&*fs, notifier.get(), caller, inode(ino)).await };
        // The kernel may wait within its notification.
        self.dispatcher.run_aside("ioctl", work, move |outcome| match outcome {
            Ok(answer) if answer.len() <= out_size as usize => reply.ioctl(0, &answer),
            Ok(_) => reply.error(fuser::Errno::EINVAL),
            Err(errno) => reply.error(convert::errno(errno)),
        });
    }
}
