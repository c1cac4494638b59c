//! Directory listings as the kernel wants them: with `.` and `..`, as many entries as fit
//! into its buffer, and every entry that was fetched but did not fit forgotten again.
//!
//! Offsets: 0 is the start, 1 lies after `.`, 2 after `..`, and `cookie + 2` after the
//! entry with that cookie.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use atoll_vfs::{
    DirEntry, Errno, FileKind, FileSystem, Handle, InodeNumber, MAX_COOKIE, check_name,
};
use fuser::{FileType, Generation, INodeNo, ReplyDirectory, ReplyDirectoryPlus};

use super::convert;

const AFTER_DOT: u64 = 1;
const AFTER_DOT_DOT: u64 = 2;

/// What stands for an unknown number (libfuse's `FUSE_UNKNOWN_INO`).
const UNKNOWN_INODE: u64 = 0xffff_ffff;

/// Entries asked for at a time. The kernel's buffer is one page to 128 KiB; an entry
/// takes 24 bytes and its name, with attributes 128 more. A guess at 32 KiB and names of
/// twenty bytes.
const NAMES_AT_A_TIME: usize = 512;
const ENTRIES_AT_A_TIME: usize = 128;

/// Where entries go.
pub(super) enum Sink<'a> {
    Names(&'a mut ReplyDirectory),
    Entries(&'a mut ReplyDirectoryPlus),
}

impl Sink<'_> {
    /// Adds `.` or `..`; whether it did not fit.
    fn add_dot(&mut self, inode: u64, offset: u64, name: &str) -> bool {
        let ino = INodeNo(inode);
        match self {
            Sink::Names(reply) => reply.add(ino, offset, FileType::Directory, name),
            Sink::Entries(reply) => {
                let attr = kind_attr(inode, FileKind::Directory);
                reply.add(ino, offset, name, &Duration::ZERO, &attr, Generation(0))
            }
        }
    }

    /// Adds an entry; whether it did not fit.
    fn add(&mut self, entry: &DirEntry) -> bool {
        let name = OsStr::from_bytes(&entry.name);
        let offset = entry.cookie + AFTER_DOT_DOT;
        match (self, &entry.entry) {
            (Sink::Names(reply), _) => {
                reply.add(INodeNo(entry.inode.0), offset, convert::kind(entry.kind), name)
            }
            (Sink::Entries(reply), Some(found)) => reply.add(
                INodeNo(found.attr.inode.0),
                offset,
                name,
                &found.attr_ttl.min(found.name_ttl),
                &convert::attr(&found.attr),
                Generation(found.generation),
            ),
            (Sink::Entries(reply), None) => {
                let attr = kind_attr(InodeNumber::ROOT.0, entry.kind);
                reply.add(attr.ino, offset, name, &Duration::ZERO, &attr, Generation(0))
            }
        }
    }
}

/// Attributes of which only number and kind mean anything: of `.` and `..`, where the kernel
/// ignores the others, and of an entry whose attributes cannot be read.
///
/// Such an entry has the root's number. The kernel then lists the name but makes no entry of it
/// (`fuse_direntplus_link`), so that the first use of the name is a lookup, which says what is
/// wrong; and it forgets the number once, which means nothing for the root. (The protocol has
/// node number 0 for this. fuser would send it as the listed number too, and programs take a
/// listed number 0 for a deleted entry.)
fn kind_attr(inode: u64, kind: FileKind) -> fuser::FileAttr {
    fuser::FileAttr {
        ino: INodeNo(inode),
        size: 0,
        blocks: 0,
        atime: std::time::UNIX_EPOCH,
        mtime: std::time::UNIX_EPOCH,
        ctime: std::time::UNIX_EPOCH,
        crtime: std::time::UNIX_EPOCH,
        kind: convert::kind(kind),
        perm: 0o755,
        nlink: 2,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

/// The entries after `offset` that the kernel will take. Empty only at the end, or where
/// `.` and `..` are still to be sent: the kernel takes an empty reply for the end.
pub(super) async fn page(
    fs: &dyn FileSystem,
    inode: InodeNumber,
    handle: Handle,
    offset: u64,
    with_entries: bool,
) -> Result<Vec<DirEntry>, Errno> {
    let limit = if with_entries { ENTRIES_AT_A_TIME } else { NAMES_AT_A_TIME };
    let mut cookie = offset.saturating_sub(AFTER_DOT_DOT);
    loop {
        let mut page = fs.readdir(inode, handle, cookie, limit, with_entries).await?;
        let Some(last) = page.last() else { return Ok(page) };
        cookie = last.cookie;
        page.retain(|entry| {
            let keep = is_sound(entry);
            if !keep {
                forget(fs, entry);
            }
            keep
        });
        if !page.is_empty() || offset < AFTER_DOT_DOT {
            return Ok(page);
        }
    }
}

/// Puts `.`, `..` and a page into the reply, as far as it has room.
pub(super) fn put(
    fs: &dyn FileSystem,
    inode: InodeNumber,
    offset: u64,
    page: &[DirEntry],
    mut sink: Sink<'_>,
) {
    let parent = if inode == InodeNumber::ROOT { inode.0 } else { UNKNOWN_INODE };
    let mut full = offset < AFTER_DOT && sink.add_dot(inode.0, AFTER_DOT, ".");
    full = full || (offset < AFTER_DOT_DOT && sink.add_dot(parent, AFTER_DOT_DOT, ".."));
    for entry in page {
        full = full || sink.add(entry);
        if full {
            forget(fs, entry);
        }
    }
}

/// Takes back the lookup of an entry that the kernel does not get.
fn forget(fs: &dyn FileSystem, entry: &DirEntry) {
    if let Some(found) = &entry.entry {
        fs.forget(found.attr.inode, 1);
    }
}

/// Whether the kernel will take it. One refused entry makes it refuse the whole listing.
fn is_sound(entry: &DirEntry) -> bool {
    let cookie_fits = (1..=MAX_COOKIE).contains(&entry.cookie);
    let sound = cookie_fits && check_name(&entry.name).is_ok();
    if !sound {
        tracing::warn!(name = ?entry.name, cookie = entry.cookie, "an unusable directory entry");
    }
    sound
}
