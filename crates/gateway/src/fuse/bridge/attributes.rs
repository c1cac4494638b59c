//! Requests about attributes, extended attributes and inode flags.

use std::ffi::OsStr;

use atoll_vfs::{FileSystem, SetAttr, XattrFlags};
use bytes::{BufMut, Bytes, BytesMut};
use fuser::{FileHandle, INodeNo, ReplyEmpty, ReplyXattr};

use super::{Bridge, handle, inode, name};
use crate::fuse::convert;
use crate::fuse::flags::FlagsCall;
use crate::fuse::reply::{reply_attr, reply_empty, reply_xattr};
use crate::privileges;

const XATTR_CREATE: i32 = 1;
const XATTR_REPLACE: i32 = 2;

#[allow(clippy::too_many_arguments)]
impl Bridge {
    pub(super) fn getattr(&self, ino: INodeNo, fh: Option<FileHandle>, reply: fuser::ReplyAttr) {
        let call = move |fs: &dyn FileSystem| fs.getattr(inode(ino), fh.map(handle));
        self.run("getattr", call, |outcome| reply_attr(reply, outcome));
    }

    pub(super) fn setattr(
        &self,
        request: &fuser::Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<fuser::TimeOrNow>,
        mtime: Option<fuser::TimeOrNow>,
        fh: Option<FileHandle>,
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

    pub(super) fn statfs(&self, ino: INodeNo, reply: fuser::ReplyStatfs) {
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

    pub(super) fn setxattr(
        &self,
        request: &fuser::Request,
        ino: INodeNo,
        name_: &OsStr,
        value: &[u8],
        flags: i32,
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

    pub(super) fn getxattr(&self, ino: INodeNo, name_: &OsStr, size: u32, reply: ReplyXattr) {
        let name = name(name_);
        let call = move |fs: &dyn FileSystem| fs.getxattr(inode(ino), &name);
        self.run("getxattr", call, move |outcome| reply_xattr(reply, size, outcome));
    }

    pub(super) fn listxattr(
        &self,
        request: &fuser::Request,
        ino: INodeNo,
        size: u32,
        reply: ReplyXattr,
    ) {
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

    pub(super) fn removexattr(
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

    pub(super) fn ioctl(
        &self,
        request: &fuser::Request,
        ino: INodeNo,
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
