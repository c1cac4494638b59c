//! Requests about names: finding, making, renaming and removing them.

use std::ffi::OsStr;
use std::path::Path;

use atoll_vfs::{Errno, FileSystem, RenameFlags};
use fuser::{INodeNo, ReplyEmpty};

use super::{Bridge, inode, name};
use crate::fuse::convert;
use crate::fuse::reply::{reply_empty, reply_entry, reply_missing};

/// The kernel gives a link target one page, with its NUL.
const MAX_TARGET_BYTES: usize = 4095;

#[allow(clippy::too_many_arguments)]
impl Bridge {
    pub(super) fn lookup(
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

    pub(super) fn forget(&self, ino: INodeNo, count: u64) {
        let _serving = self.dispatcher.begin_part();
        self.fs.forget(inode(ino), count);
    }

    pub(super) fn readlink(&self, ino: INodeNo, reply: fuser::ReplyData) {
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

    pub(super) fn mknod(
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

    pub(super) fn mkdir(
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

    pub(super) fn unlink(
        &self,
        request: &fuser::Request,
        parent: INodeNo,
        name_: &OsStr,
        reply: ReplyEmpty,
    ) {
        let (caller, name) = (convert::caller(request), name(name_));
        let call = move |fs: &dyn FileSystem| fs.unlink(caller, inode(parent), &name);
        self.run("unlink", call, |outcome| reply_empty(reply, outcome));
    }

    pub(super) fn rmdir(
        &self,
        request: &fuser::Request,
        parent: INodeNo,
        name_: &OsStr,
        reply: ReplyEmpty,
    ) {
        let (caller, name) = (convert::caller(request), name(name_));
        let call = move |fs: &dyn FileSystem| fs.rmdir(caller, inode(parent), &name);
        self.run("rmdir", call, |outcome| reply_empty(reply, outcome));
    }

    pub(super) fn symlink(
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

    pub(super) fn rename(
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

    pub(super) fn link(
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
}
