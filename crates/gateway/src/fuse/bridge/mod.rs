//! Each request of the FUSE protocol as a call of [`FileSystem`]. The requests are here in one
//! table; a method of [`Bridge`] for each is in the module of its kind.
//!
//! What the kernel would refuse in a reply, and then leave the process waiting, is never
//! sent: longer data than asked for, errors out of range, link targets beyond a page.

mod attributes;
mod directories;
mod files;
mod names;

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::SystemTime;

use atoll_vfs::{Answer, Caller, Errno, FileSystem, Handle, InodeNumber, LockOwner, OpenFlags};
use bytes::Bytes;
use fuser::{FileHandle, INodeNo, InitFlags, Notifier, ReplyEmpty, ReplyXattr};

use super::dispatch::Dispatcher;
use super::executing::Executing;
use super::locks::{Holder, MountLocks};
use super::privileges;

/// The largest write the kernel sends in one request, and (by `max_pages`, which fuser
/// derives from it) the largest read.
pub(super) const MAX_REQUEST_BYTES: u32 = 1 << 20;

/// Requests the kernel keeps under way on its own account (read-ahead, write-back).
const MAX_BACKGROUND: u16 = 64;

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
    executing: Executing,
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
        Bridge {
            fs,
            dispatcher,
            locks,
            notifier,
            skips_opendir: false,
            reduces_modes: false,
            executing: Executing::default(),
        }
    }

    /// Whether something is to be done at each close of a file opened so: a delayed error to be
    /// reported, locks to be given up.
    fn is_flushed(&self, flags: OpenFlags) -> bool {
        flags.writes() || flags.has(OpenFlags::TRUNCATE) || self.locks.is_some()
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

    /// As [`Bridge::run`], once the set-user-ID and set-group-ID bits of the inode in `reduced`
    /// were taken away, on behalf of that caller.
    fn run_reducing<T: Send + 'static>(
        &self,
        what: &'static str,
        reduced: Option<(Caller, INodeNo)>,
        call: impl FnOnce(&dyn FileSystem) -> Answer<T> + Send + 'static,
        reply: impl FnOnce(Result<T, Errno>) + Send + 'static,
    ) {
        let (fs, notifier) = (self.fs.clone(), self.notifier.clone());
        let work = async move {
            if let Some((caller, ino)) = reduced {
                privileges::take_away(&*fs, notifier.get(), caller, inode(ino)).await?;
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

/// The requests that take no part in the session itself: each with the arguments that fuser gives
/// it, and those that the method of the same name of [`Bridge`] takes.
macro_rules! requests {
    ($($name:ident($request:ident $(, $arg:ident: $type:ty)*) => ($($taken:ident),*);)*) => {$(
        fn $name(&self, $request: &fuser::Request $(, $arg: $type)*) {
            Bridge::$name(self $(, $taken)*);
        }
    )*};
}

#[allow(clippy::too_many_arguments)]
impl fuser::Filesystem for Bridge {
    fn init(
        &mut self,
        _request: &fuser::Request,
        config: &mut fuser::KernelConfig,
    ) -> io::Result<()> {
        // Not FUSE_ASYNC_DIO. With it the kernel takes what an asynchronous direct write replaces
        // out of its cache when the write begins, but not when it ends: a read in between
        // brings the old bytes back, for good. And a write cut short by a full disk is EIO to it.
        // With FUSE_ATOMIC_O_TRUNC an open empties the file, so a file system that shows others a file when it is closed
        // does not show an empty one before. Without, the kernel truncates it after the open as truncate(2) does, and
        // the two cannot be told apart. `executing` has what the kernel leaves to us then.
        for wanted in [
            InitFlags::FUSE_ATOMIC_O_TRUNC,
            InitFlags::FUSE_PARALLEL_DIROPS,
            InitFlags::FUSE_DO_READDIRPLUS,
            InitFlags::FUSE_READDIRPLUS_AUTO,
            InitFlags::FUSE_AUTO_INVAL_DATA,
            InitFlags::FUSE_EXPORT_SUPPORT,
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
            // Without them the kernel would admit users that a list keeps out.
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

    requests! {
        // `names`
        lookup(request, parent: INodeNo, name_: &OsStr, reply: fuser::ReplyEntry)
            => (request, parent, name_, reply);
        forget(_request, ino: INodeNo, count: u64) => (ino, count);
        readlink(_request, ino: INodeNo, reply: fuser::ReplyData) => (ino, reply);
        mknod(request, parent: INodeNo, name_: &OsStr, mode: u32, umask: u32, rdev: u32,
            reply: fuser::ReplyEntry)
            => (request, parent, name_, mode, umask, rdev, reply);
        mkdir(request, parent: INodeNo, name_: &OsStr, mode: u32, umask: u32,
            reply: fuser::ReplyEntry)
            => (request, parent, name_, mode, umask, reply);
        unlink(request, parent: INodeNo, name_: &OsStr, reply: ReplyEmpty)
            => (request, parent, name_, reply);
        rmdir(request, parent: INodeNo, name_: &OsStr, reply: ReplyEmpty)
            => (request, parent, name_, reply);
        symlink(request, parent: INodeNo, link_name: &OsStr, target: &Path,
            reply: fuser::ReplyEntry)
            => (request, parent, link_name, target, reply);
        rename(request, parent: INodeNo, name_: &OsStr, new_parent: INodeNo, new_name: &OsStr,
            flags: fuser::RenameFlags, reply: ReplyEmpty)
            => (request, parent, name_, new_parent, new_name, flags, reply);
        link(request, ino: INodeNo, new_parent: INodeNo, new_name: &OsStr,
            reply: fuser::ReplyEntry)
            => (request, ino, new_parent, new_name, reply);
        // `attributes`
        getattr(_request, ino: INodeNo, fh: Option<FileHandle>, reply: fuser::ReplyAttr)
            => (ino, fh, reply);
        setattr(request, ino: INodeNo, mode: Option<u32>, uid: Option<u32>, gid: Option<u32>,
            size: Option<u64>, atime: Option<fuser::TimeOrNow>, mtime: Option<fuser::TimeOrNow>,
            _ctime: Option<SystemTime>, fh: Option<FileHandle>, _crtime: Option<SystemTime>,
            _chgtime: Option<SystemTime>, _bkuptime: Option<SystemTime>,
            _flags: Option<fuser::BsdFileFlags>, reply: fuser::ReplyAttr)
            => (request, ino, mode, uid, gid, size, atime, mtime, fh, reply);
        statfs(_request, ino: INodeNo, reply: fuser::ReplyStatfs) => (ino, reply);
        setxattr(request, ino: INodeNo, name_: &OsStr, value: &[u8], flags: i32, _position: u32,
            reply: ReplyEmpty)
            => (request, ino, name_, value, flags, reply);
        getxattr(_request, ino: INodeNo, name_: &OsStr, size: u32, reply: ReplyXattr)
            => (ino, name_, size, reply);
        listxattr(request, ino: INodeNo, size: u32, reply: ReplyXattr)
            => (request, ino, size, reply);
        removexattr(request, ino: INodeNo, name_: &OsStr, reply: ReplyEmpty)
            => (request, ino, name_, reply);
        ioctl(request, ino: INodeNo, _fh: FileHandle, _flags: fuser::IoctlFlags, command: u32,
            data: &[u8], out_size: u32, reply: fuser::ReplyIoctl)
            => (request, ino, command, data, out_size, reply);
        // `files`
        open(request, ino: INodeNo, flags: fuser::OpenFlags, reply: fuser::ReplyOpen)
            => (request, ino, flags, reply);
        create(request, parent: INodeNo, name_: &OsStr, mode: u32, umask: u32, flags: i32,
            reply: fuser::ReplyCreate)
            => (request, parent, name_, mode, umask, flags, reply);
        read(_request, ino: INodeNo, fh: FileHandle, offset: u64, size: u32,
            _flags: fuser::OpenFlags, _lock_owner: Option<fuser::LockOwner>,
            reply: fuser::ReplyData)
            => (ino, fh, offset, size, reply);
        write(request, ino: INodeNo, fh: FileHandle, offset: u64, data: &[u8],
            write_flags: fuser::WriteFlags, flags: fuser::OpenFlags,
            _lock_owner: Option<fuser::LockOwner>, reply: fuser::ReplyWrite)
            => (request, ino, fh, offset, data, write_flags, flags, reply);
        flush(_request, ino: INodeNo, fh: FileHandle, lock_owner: fuser::LockOwner,
            reply: ReplyEmpty)
            => (ino, fh, lock_owner, reply);
        release(_request, ino: INodeNo, fh: FileHandle, flags: fuser::OpenFlags,
            _lock_owner: Option<fuser::LockOwner>, _flush: bool, reply: ReplyEmpty)
            => (ino, fh, flags, reply);
        fsync(_request, ino: INodeNo, fh: FileHandle, data_only: bool, reply: ReplyEmpty)
            => (ino, fh, data_only, reply);
        getlk(_request, ino: INodeNo, fh: FileHandle, lock_owner: fuser::LockOwner, start: u64,
            end: u64, kind: i32, pid: u32, reply: fuser::ReplyLock)
            => (ino, fh, lock_owner, start, end, kind, pid, reply);
        setlk(request, ino: INodeNo, fh: FileHandle, lock_owner: fuser::LockOwner, start: u64,
            end: u64, kind: i32, pid: u32, waits: bool, reply: ReplyEmpty)
            => (request, ino, fh, lock_owner, start, end, kind, pid, waits, reply);
        fallocate(request, ino: INodeNo, fh: FileHandle, offset: u64, length: u64, mode: i32,
            reply: ReplyEmpty)
            => (request, ino, fh, offset, length, mode, reply);
        lseek(_request, ino: INodeNo, fh: FileHandle, offset: i64, whence: i32,
            reply: fuser::ReplyLseek)
            => (ino, fh, offset, whence, reply);
        // `directories`
        opendir(request, ino: INodeNo, _flags: fuser::OpenFlags, reply: fuser::ReplyOpen)
            => (request, ino, reply);
        readdir(_request, ino: INodeNo, fh: FileHandle, offset: u64, reply: fuser::ReplyDirectory)
            => (ino, fh, offset, reply);
        readdirplus(_request, ino: INodeNo, fh: FileHandle, offset: u64,
            reply: fuser::ReplyDirectoryPlus)
            => (ino, fh, offset, reply);
        releasedir(_request, ino: INodeNo, fh: FileHandle, _flags: fuser::OpenFlags,
            reply: ReplyEmpty)
            => (ino, fh, reply);
        fsyncdir(_request, ino: INodeNo, fh: FileHandle, data_only: bool, reply: ReplyEmpty)
            => (ino, fh, data_only, reply);
    }
}
