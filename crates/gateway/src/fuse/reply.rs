//! Answers of the file system as replies to the kernel.

use std::time::Duration;

use atoll_vfs::{Attr, AttrReply, Entry, Errno, FileKind, FileTime, InodeNumber, Opened};
use bytes::Bytes;
use fuser::{FopenFlags, Generation, ReplyEmpty, ReplyXattr};

use super::convert;

pub(super) fn open_flags(opened: Opened, is_flushed: bool) -> FopenFlags {
    let mut flags = FopenFlags::empty();
    flags.set(FopenFlags::FOPEN_KEEP_CACHE, opened.keep_cache);
    flags.set(FopenFlags::FOPEN_DIRECT_IO, opened.direct_io);
    flags.set(FopenFlags::FOPEN_NOFLUSH, !is_flushed);
    flags
}

pub(super) fn reply_attr(reply: fuser::ReplyAttr, outcome: Result<AttrReply, Errno>) {
    match outcome {
        Ok(answer) => reply.attr(&answer.ttl, &convert::attr(&answer.attr)),
        Err(errno) => reply.error(convert::errno(errno)),
    }
}

pub(super) fn reply_entry(reply: fuser::ReplyEntry, outcome: Result<Entry, Errno>) {
    match outcome {
        // Number 0 would tell the kernel that the name does not exist.
        Ok(entry) if entry.attr.inode.0 == 0 => reply.error(fuser::Errno::EIO),
        Ok(entry) => reply.entry_with_ttls(
            &entry.attr_ttl,
            &entry.name_ttl,
            &convert::attr(&entry.attr),
            Generation(entry.generation),
        ),
        Err(errno) => reply.error(convert::errno(errno)),
    }
}

/// Tells the kernel to remember for `ttl` that a name does not exist.
pub(super) fn reply_missing(reply: fuser::ReplyEntry, ttl: Duration) {
    let nothing = Attr {
        inode: InodeNumber(0),
        kind: FileKind::Regular,
        mode: 0,
        nlink: 0,
        uid: 0,
        gid: 0,
        rdev: 0,
        size_bytes: 0,
        blocks_512: 0,
        block_size_bytes: 0,
        atime: FileTime::default(),
        mtime: FileTime::default(),
        ctime: FileTime::default(),
    };
    reply.entry_with_ttls(&Duration::ZERO, &ttl, &convert::attr(&nothing), Generation(0));
}

pub(super) fn reply_empty(reply: ReplyEmpty, outcome: Result<(), Errno>) {
    match outcome {
        Ok(()) => reply.ok(),
        Err(errno) => reply.error(convert::errno(errno)),
    }
}

/// `size` 0 asks how long the answer is.
pub(super) fn reply_xattr(reply: ReplyXattr, size: u32, outcome: Result<Bytes, Errno>) {
    match outcome {
        Ok(value) => match u32::try_from(value.len()) {
            Ok(len) if size == 0 => reply.size(len),
            Ok(len) if len <= size => reply.data(&value),
            _ => reply.error(fuser::Errno::ERANGE),
        },
        Err(errno) => reply.error(convert::errno(errno)),
    }
}
