//! Requests about open directories.

use atoll_vfs::FileSystem;
use fuser::{FileHandle, FopenFlags, INodeNo, ReplyEmpty};

use super::{Bridge, handle, inode};
use crate::fuse::convert;
use crate::fuse::directory::{self, Sink};
use crate::fuse::reply::reply_empty;

#[allow(clippy::too_many_arguments)]
impl Bridge {
    pub(super) fn opendir(&self, request: &fuser::Request, ino: INodeNo, reply: fuser::ReplyOpen) {
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

    pub(super) fn readdir(
        &self,
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

    pub(super) fn readdirplus(
        &self,
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

    pub(super) fn releasedir(&self, ino: INodeNo, fh: FileHandle, reply: ReplyEmpty) {
        let call = move |fs: &dyn FileSystem| fs.closedir(inode(ino), handle(fh));
        self.run("closedir", call, |outcome| reply_empty(reply, outcome));
    }

    pub(super) fn fsyncdir(
        &self,
        ino: INodeNo,
        fh: FileHandle,
        data_only: bool,
        reply: ReplyEmpty,
    ) {
        let call = move |fs: &dyn FileSystem| fs.fsyncdir(inode(ino), handle(fh), data_only);
        self.run_aside("fsyncdir", call, |outcome| reply_empty(reply, outcome));
    }
}
