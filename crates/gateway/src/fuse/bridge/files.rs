//! Requests about open files: reading, writing, locking.

use std::ffi::OsStr;

use atoll_vfs::{Errno, FileSystem, LockOwner, LockRange, OpenFlags, SeekTo};
use bytes::Bytes;
use fuser::{FileHandle, Generation, INodeNo, ReplyEmpty};

use super::{Bridge, handle, holder, inode, name};
use crate::fuse::convert;
use crate::fuse::locks::{self, Wanted};
use crate::fuse::reply::{open_flags, reply_empty};
use crate::fuse::thread_status::ThreadStatus;

const SEEK_DATA: i32 = 3;
const SEEK_HOLE: i32 = 4;

#[allow(clippy::too_many_arguments)]
impl Bridge {
    pub(super) fn open(
        &self,
        request: &fuser::Request,
        ino: INodeNo,
        flags: fuser::OpenFlags,
        reply: fuser::ReplyOpen,
    ) {
        let (caller, flags) = (convert::caller(request), OpenFlags(flags.0));
        if self.executing.forbids(inode(ino), flags) {
            return reply.error(fuser::Errno::ETXTBSY);
        }
        let (is_flushed, executing) = (self.is_flushed(flags), self.executing.clone());
        // As for a truncation by another call (`privileges`).
        let reduces_mode = self.reduces_modes && flags.has(OpenFlags::TRUNCATE) && caller.uid != 0;
        self.run_reducing(
            "open",
            reduces_mode.then_some((caller, ino)),
            move |fs| fs.open(caller, inode(ino), flags),
            move |outcome| match outcome {
                Ok(opened) => {
                    executing.note_open(inode(ino), flags);
                    reply.opened(FileHandle(opened.handle.0), open_flags(opened, is_flushed));
                }
                Err(errno) => reply.error(convert::errno(errno)),
            },
        );
    }

    pub(super) fn create(
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

    pub(super) fn read(
        &self,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        size: u32,
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

    pub(super) fn write(
        &self,
        request: &fuser::Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        data: &[u8],
        write_flags: fuser::WriteFlags,
        flags: fuser::OpenFlags,
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

    pub(super) fn flush(
        &self,
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

    pub(super) fn release(
        &self,
        ino: INodeNo,
        fh: FileHandle,
        flags: fuser::OpenFlags,
        reply: ReplyEmpty,
    ) {
        self.executing.note_close(inode(ino), OpenFlags(flags.0));
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

    pub(super) fn fsync(&self, ino: INodeNo, fh: FileHandle, data_only: bool, reply: ReplyEmpty) {
        let call = move |fs: &dyn FileSystem| fs.fsync(inode(ino), handle(fh), data_only);
        self.run_aside("fsync", call, |outcome| reply_empty(reply, outcome));
    }

    pub(super) fn getlk(
        &self,
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
        let work = async move {
            let wanted = Wanted::decode(holder.handle, kind, (start, end), pid)?;
            locks.conflict(holder, wanted).await
        };
        self.dispatcher.run("getlk", work, move |outcome| match outcome {
            Ok(found) => {
                let (range, pid) =
                    found.map_or((LockRange::WHOLE, 0), |lock| (lock.range, lock.pid));
                reply.locked(range.first, range.last, locks::type_of(found), pid);
            }
            Err(errno) => reply.error(convert::errno(errno)),
        });
    }

    pub(super) fn setlk(
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
        let work = async move {
            let wanted = Wanted::decode(holder.handle, kind, (start, end), pid)?;
            locks.set(holder, wanted, waiter).await
        };
        let reply = |outcome| reply_empty(reply, outcome);
        // Without a limit only where a signal can end it.
        if waits && ThreadStatus::of(thread).is_some() {
            self.dispatcher.run_waiting("setlk", work, reply);
        } else {
            self.dispatcher.run("setlk", work, reply);
        }
    }

    pub(super) fn fallocate(
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

    pub(super) fn lseek(
        &self,
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
}
