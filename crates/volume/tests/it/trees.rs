//! Trees on this machine's disk: made, changed, compared.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use atoll_vfs::{FileKind, FileTime};
use atoll_volume::format::Content;
use atoll_volume::owned::{Item, Snapshot};
use futures_util::TryStreamExt;
use rustix::fs::{AtFlags, Timespec, Timestamps};

/// What a reader can tell about one path.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Seen {
    pub kind: FileKind,
    pub mode: u32,
    pub mtime: FileTime,
    /// A file's bytes, a link's target.
    pub bytes: Vec<u8>,
    pub xattrs: Vec<(Vec<u8>, Vec<u8>)>,
}

pub(crate) type Tree = BTreeMap<Vec<u8>, Seen>;

/// Sets a time, of a link too.
pub(crate) fn set_mtime(path: &Path, secs: i64, nanos: u32) {
    let time = Timespec { tv_sec: secs, tv_nsec: nanos.into() };
    let times = Timestamps { last_access: time, last_modification: time };
    rustix::fs::utimensat(rustix::fs::CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW)
        .expect("sets a time");
}

/// A little of everything that a volume keeps.
pub(crate) fn variety(top: &Path) {
    fs::write(top.join("empty"), b"").expect("writes");
    fs::write(top.join("small"), b"a few bytes\n").expect("writes");
    fs::write(top.join("exactly-one-block"), patterned(4096, 1)).expect("writes");
    fs::write(top.join("one-block-and-a-byte"), patterned(4097, 2)).expect("writes");
    fs::write(top.join("large"), patterned(3_000_001, 3)).expect("writes");
    fs::write(top.join("zeros"), vec![0; 50_000]).expect("writes");
    let name = [b'x'; 255];
    fs::write(top.join(OsStr::from_bytes(&name)), b"long name").expect("writes");
    fs::write(top.join(OsStr::from_bytes(b"not \xff utf-8\n")), b"odd name").expect("writes");
    fs::create_dir_all(top.join("a/b/c")).expect("makes");
    fs::create_dir(top.join("empty-dir")).expect("makes");
    fs::write(top.join("a/b/c/deep"), b"deep").expect("writes");
    symlink("../small", top.join("a/link")).expect("links");
    symlink("/nowhere/at all", top.join("dangling")).expect("links");
    set_xattr(&top.join("small"), "user.colour", b"blue");
    set_xattr(&top.join("a"), "user.shape", b"\x00\xff");
    let modes = [("small", 0o4711), ("large", 0o400), ("a/b", 0o1777), ("empty", 0o666)];
    for (name, mode) in modes {
        fs::set_permissions(top.join(name), fs::Permissions::from_mode(mode)).expect("sets");
    }
    set_mtime(&top.join("small"), 1_000_000_000, 123_456_789);
    set_mtime(&top.join("dangling"), -86_400, 999_999_999);
    set_mtime(&top.join("a/b"), 4_000_000_000, 1);
    set_mtime(top, 1_234_567_890, 5);
}

pub(crate) fn set_xattr(path: &Path, name: &str, value: &[u8]) {
    let flags = rustix::fs::XattrFlags::empty();
    rustix::fs::setxattr(path, name, value, flags).expect("the file system keeps xattrs");
}

/// Bytes that do not repeat from one data block to the next.
pub(crate) fn patterned(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut out = Vec::with_capacity(len + 8);
    while out.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        out.extend_from_slice(&state.to_le_bytes());
    }
    out.truncate(len);
    out
}

/// Everything below `top` (which itself is the empty path), as the disk has it.
pub(crate) fn on_disk(top: &Path) -> Tree {
    let mut tree = Tree::new();
    note_disk(top, Vec::new(), &mut tree);
    tree
}

fn note_disk(at: &Path, path: Vec<u8>, tree: &mut Tree) {
    let meta = fs::symlink_metadata(at).expect("is there");
    let (kind, bytes) = if meta.is_dir() {
        for child in fs::read_dir(at).expect("lists") {
            let child = child.expect("lists");
            let mut below = path.clone();
            if !below.is_empty() {
                below.push(b'/');
            }
            below.extend_from_slice(child.file_name().as_bytes());
            note_disk(&child.path(), below, tree);
        }
        (FileKind::Directory, Vec::new())
    } else if meta.is_symlink() {
        let target = fs::read_link(at).expect("reads");
        (FileKind::Symlink, target.into_os_string().as_bytes().to_vec())
    } else {
        (FileKind::Regular, fs::read(at).expect("reads"))
    };
    let xattrs = if meta.is_symlink() { Vec::new() } else { disk_xattrs(at) };
    let mtime = FileTime { secs: meta.mtime(), nanos: meta.mtime_nsec() as u32 };
    tree.insert(path, Seen { kind, mode: meta.mode() & 0o7777, mtime, bytes, xattrs });
}

fn disk_xattrs(at: &Path) -> Vec<(Vec<u8>, Vec<u8>)> {
    let mut list = vec![0; 4096];
    let len = rustix::fs::listxattr(at, &mut list[..]).expect("lists xattrs");
    let names = list[..len].split(|b| *b == 0).filter(|name| name.starts_with(b"user."));
    let mut found: Vec<_> = names
        .map(|name| {
            let mut value = vec![0; 4096];
            let len = rustix::fs::getxattr(at, name, &mut value[..]).expect("reads an xattr");
            (name.to_vec(), value[..len].to_vec())
        })
        .collect();
    found.sort();
    found
}

/// Everything in a snapshot.
pub(crate) async fn in_volume(snapshot: &Snapshot) -> Tree {
    let mut tree = Tree::new();
    let mut waiting = vec![snapshot.root()];
    while let Some(item) = waiting.pop() {
        if item.entry.kind() == FileKind::Directory {
            let mut listing = snapshot.list(&item).expect("is a directory");
            loop {
                let page = listing.next_page(7).await.expect("lists");
                if page.is_empty() {
                    break;
                }
                waiting.extend(page);
            }
        }
        tree.insert(item.path.to_vec(), seen(snapshot, &item).await);
    }
    tree
}

async fn seen(snapshot: &Snapshot, item: &Item) -> Seen {
    let bytes = match &item.entry.content {
        Content::Directory(_) | Content::Special { .. } | Content::Linked { .. } => Vec::new(),
        Content::Symlink(target) => target.to_vec(),
        Content::Regular { .. } => {
            let parts: Vec<_> = snapshot.read_stream(item).try_collect().await.expect("reads");
            parts.concat()
        }
    };
    let xattrs = snapshot.xattrs(item).await.expect("reads xattrs");
    Seen {
        kind: item.entry.kind(),
        mode: item.entry.mode,
        mtime: item.entry.mtime,
        bytes,
        xattrs: xattrs.into_iter().map(|(name, value)| (name.to_vec(), value.to_vec())).collect(),
    }
}

/// Compares, and names the first difference without printing megabytes.
pub(crate) fn assert_same(left: &Tree, right: &Tree) {
    let paths = |tree: &Tree| {
        tree.keys().map(|path| String::from_utf8_lossy(path).into_owned()).collect::<Vec<_>>()
    };
    assert_eq!(paths(left), paths(right));
    for (path, seen) in left {
        let other = &right[path];
        let path = String::from_utf8_lossy(path);
        assert_eq!(seen.kind, other.kind, "kind of {path}");
        assert_eq!(seen.mode, other.mode, "mode of {path}");
        assert_eq!(seen.mtime, other.mtime, "time of {path}");
        assert_eq!(seen.xattrs, other.xattrs, "xattrs of {path}");
        assert_eq!(seen.bytes.len(), other.bytes.len(), "length of {path}");
        assert!(seen.bytes == other.bytes, "bytes of {path}");
    }
}
