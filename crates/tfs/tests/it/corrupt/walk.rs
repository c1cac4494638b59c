//! Goes through a mounted file system as a curious user would, and then changes things: what
//! happens does not matter, as long as it happens soon and nothing panics.

use std::collections::VecDeque;

use atoll_tfs::fs::Tfs;
use atoll_vfs::{
    Errno, FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE, FileKind, FileSystem, InodeNumber, OpenFlags,
    RenameFlags, SeekTo, SetAttr, Writer, XattrFlags,
};
use bytes::Bytes;

use super::image::{ME, now};

/// The most files looked at; a circle of directories ends here.
const MOST_FILES: usize = 300;
/// Entries asked for at a time.
const PAGE: usize = 37;

/// What a walk met.
#[derive(Default, Debug)]
pub(super) struct Walked {
    pub files: usize,
    pub errors: Vec<Errno>,
}

impl Walked {
    fn note<T>(&mut self, result: Result<T, Errno>) -> Option<T> {
        result.map_err(|errno| self.errors.push(errno)).ok()
    }
}

/// Reads everything, then writes here and there.
pub(super) fn walk(tfs: &Tfs) -> Walked {
    let mut walked = Walked::default();
    let _ = now(tfs.statfs(InodeNumber::ROOT));
    let mut queue = VecDeque::from([(InodeNumber::ROOT, FileKind::Directory)]);
    let mut files = Vec::new();
    while let Some((inode, kind)) = queue.pop_front() {
        if walked.files >= MOST_FILES {
            break;
        }
        walked.files += 1;
        look(tfs, inode, kind, &mut walked);
        match kind {
            FileKind::Directory => list(tfs, inode, &mut queue, &mut walked),
            FileKind::Regular => files.push(inode),
            _ => {}
        }
    }
    for inode in files.into_iter().take(20) {
        change(tfs, inode, &mut walked);
    }
    names(tfs, &mut walked);
    let _ = tfs.clean();
    let _ = tfs.usage();
    let _ = tfs.block_map(64);
    let _ = tfs.choose_avoided();
    walked.note(now(tfs.sync()));
    walked
}

fn look(tfs: &Tfs, inode: InodeNumber, kind: FileKind, walked: &mut Walked) {
    walked.note(now(tfs.getattr(inode, None)));
    for name in walked.note(now(tfs.listxattr(inode))).unwrap_or_default() {
        walked.note(now(tfs.getxattr(inode, &name)));
    }
    match kind {
        FileKind::Symlink => {
            walked.note(now(tfs.readlink(inode)));
        }
        FileKind::Directory => {
            walked.note(now(tfs.parent(ME, inode)));
        }
        FileKind::Regular => {
            let Some(opened) = walked.note(now(tfs.open(ME, inode, OpenFlags::READ))) else {
                return;
            };
            for offset in [0, 30_000, 270_000, 399_990, 1 << 33] {
                walked.note(now(tfs.read(inode, opened.handle, offset, 8192)));
            }
            for to in [SeekTo::Data, SeekTo::Hole] {
                let _ = now(tfs.seek(inode, opened.handle, 0, to));
            }
            walked.note(now(tfs.close(inode, opened.handle)));
            let _ = tfs.file_extents(inode);
        }
        _ => {}
    }
}

fn list(
    tfs: &Tfs,
    directory: InodeNumber,
    queue: &mut VecDeque<(InodeNumber, FileKind)>,
    walked: &mut Walked,
) {
    let Some(opened) = walked.note(now(tfs.opendir(ME, directory))) else { return };
    let mut cookie = 0;
    while queue.len() < MOST_FILES {
        let page = now(tfs.readdir(directory, opened.handle, cookie, PAGE, true));
        let page = walked.note(page).unwrap_or_default();
        let Some(last) = page.last() else { break };
        assert!(last.cookie > cookie, "a listing goes on");
        cookie = last.cookie;
        for entry in page {
            let found = match entry.entry {
                Some(found) => Some(found),
                None => walked.note(now(tfs.lookup(ME, directory, &entry.name))),
            };
            if let Some(found) = found {
                queue.push_back((found.attr.inode, found.attr.kind));
            }
        }
    }
    walked.note(now(tfs.closedir(directory, opened.handle)));
}

fn change(tfs: &Tfs, inode: InodeNumber, walked: &mut Walked) {
    let both = OpenFlags::READ_WRITE;
    let Some(opened) = walked.note(now(tfs.open(ME, inode, both))) else { return };
    for offset in [10, 13 * 1024 + 5, 500_000] {
        let data = Bytes::from_static(b"changed");
        walked.note(now(tfs.write(Writer::At(ME), inode, opened.handle, offset, data)));
    }
    walked.note(now(tfs.fallocate(ME, inode, opened.handle, 270_000, 5000, 0)));
    let punch = FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE;
    walked.note(now(tfs.fallocate(ME, inode, opened.handle, 20_000, 300_000, punch)));
    walked.note(now(tfs.close(inode, opened.handle)));
    let value = Bytes::from_static(b"value");
    walked.note(now(tfs.setxattr(ME, inode, b"user.new", value, XattrFlags::default())));
    let flags = walked.note(now(tfs.inode_flags(inode))).unwrap_or_default();
    walked.note(now(tfs.set_inode_flags(ME, inode, flags)));
    let mode = SetAttr { mode: Some(0o640), ..SetAttr::default() };
    walked.note(now(tfs.setattr(ME, inode, None, mode)));
    let shorter = SetAttr { size_bytes: Some(14_000), ..SetAttr::default() };
    walked.note(now(tfs.setattr(ME, inode, None, shorter)));
}

/// Makes, moves and removes names in a few directories.
fn names(tfs: &Tfs, walked: &mut Walked) {
    let root = InodeNumber::ROOT;
    let mut directories = vec![root];
    for name in [&b"dir"[..], b"many", b"contributed", b"other"] {
        let found = walked.note(now(tfs.lookup(ME, root, name)));
        directories.extend(found.map(|entry| entry.attr.inode));
    }
    for (n, directory) in directories.iter().enumerate() {
        let made = now(tfs.mkdir(ME, *directory, b"made", 0o755));
        let made = walked.note(made).map(|entry| entry.attr.inode);
        let create = tfs.create(ME, made.unwrap_or(*directory), b"new", 0o644, OpenFlags::WRITE);
        if let Some((entry, opened)) = walked.note(now(create)) {
            let inode = entry.attr.inode;
            let data = Bytes::from(vec![1; 20_000]);
            walked.note(now(tfs.write(Writer::At(ME), inode, opened.handle, 0, data)));
            walked.note(now(tfs.close(inode, opened.handle)));
        }
        walked.note(now(tfs.symlink(ME, *directory, b"link", &[b'y'; 100])));
        let other = directories[(n + 1) % directories.len()];
        let flags = RenameFlags::default();
        walked.note(now(tfs.rename(ME, *directory, b"made", other, b"moved", flags)));
        walked.note(now(tfs.rename(ME, *directory, b"link", other, b"moved link", flags)));
    }
    let exchange = RenameFlags { exchange: true, ..RenameFlags::default() };
    walked.note(now(tfs.rename(ME, root, b"dir", root, b"attr", exchange)));
    walked.note(now(tfs.rename(ME, root, b"attr", root, b"dir", exchange)));
    walked.note(now(tfs.rename(
        ME,
        root,
        b"many",
        directories[1 % directories.len()],
        b"sub",
        exchange,
    )));
    for (directory, name) in [(root, &b"short"[..]), (root, b"long"), (root, b"attr")] {
        walked.note(now(tfs.unlink(ME, directory, name)));
    }
    for directory in &directories[1..] {
        for name in [&b"small"[..], b"file", b"large", b"t0", b"t1", b"moved link"] {
            walked.note(now(tfs.unlink(ME, *directory, name)));
        }
        walked.note(now(tfs.rmdir(ME, *directory, b"sub")));
    }
}
