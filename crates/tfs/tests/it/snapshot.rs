//! What a tree of files holds, read through TFS or through the kernel, to be compared.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use atoll_tfs::fs::Tfs;
use atoll_vfs::{FileKind, FileSystem, FileTime, InodeNumber, OpenFlags};
use bytes::Bytes;

use crate::calls::{ME, ROOT};

/// Bytes read at a time.
const PIECE_BYTES: u32 = 1 << 20;

/// All that a program can see of a file, but when it was read last.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Seen {
    pub kind: FileKind,
    /// The same for all names of a file.
    pub inode: u64,
    pub mode: u32,
    pub names: u32,
    pub owner: (u32, u32),
    pub size_bytes: u64,
    pub blocks_512: u64,
    pub mtime: FileTime,
    pub ctime: FileTime,
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    /// Hash of its bytes, or of its target.
    pub hash: blake3::Hash,
}

/// Files by path, the root as "".
pub(crate) type Snapshot = BTreeMap<String, Seen>;

fn path_of(parent: &str, name: &[u8]) -> String {
    format!("{parent}/{}", String::from_utf8_lossy(name))
}

/// As TFS shows it, but for what lies in `/contributed`.
pub(crate) async fn through_tfs(tfs: &Tfs) -> Snapshot {
    let mut snapshot = Snapshot::new();
    let mut pending = vec![(String::new(), ROOT)];
    while let Some((path, number)) = pending.pop() {
        let seen = seen_by_tfs(tfs, number).await;
        if seen.kind == FileKind::Directory && path != "/contributed" {
            let handle = tfs.opendir(ME, number).await.unwrap().handle;
            for entry in tfs.readdir(number, handle, 0, usize::MAX, false).await.unwrap() {
                pending.push((path_of(&path, &entry.name), entry.inode));
            }
            tfs.closedir(number, handle).await.unwrap();
        }
        snapshot.insert(path, seen);
    }
    snapshot
}

async fn seen_by_tfs(tfs: &Tfs, number: InodeNumber) -> Seen {
    let attr = tfs.getattr(number, None).await.unwrap().attr;
    let mut xattrs = BTreeMap::new();
    if attr.kind != FileKind::Symlink {
        for name in tfs.listxattr(number).await.unwrap() {
            // The kernel knows nothing of this one.
            if name != Bytes::from_static(b"user.tfs.transparent") {
                let value = tfs.getxattr(number, &name).await.unwrap();
                xattrs.insert(name.to_vec(), value.to_vec());
            }
        }
    }
    let hash = match attr.kind {
        FileKind::Regular => hash_through_tfs(tfs, number).await,
        FileKind::Symlink => blake3::hash(&tfs.readlink(number).await.unwrap()),
        _ => blake3::hash(b""),
    };
    Seen {
        kind: attr.kind,
        inode: if number == ROOT { 2 } else { number.0 },
        mode: attr.mode,
        names: attr.nlink,
        owner: (attr.uid, attr.gid),
        size_bytes: attr.size_bytes,
        blocks_512: attr.blocks_512,
        mtime: attr.mtime,
        ctime: attr.ctime,
        xattrs,
        hash,
    }
}

async fn hash_through_tfs(tfs: &Tfs, number: InodeNumber) -> blake3::Hash {
    let handle = tfs.open(ME, number, OpenFlags::READ).await.unwrap().handle;
    let mut hasher = blake3::Hasher::new();
    for at in (0..).step_by(PIECE_BYTES as usize) {
        let bytes = tfs.read(number, handle, at, PIECE_BYTES).await.unwrap();
        hasher.update(&bytes);
        if bytes.len() < PIECE_BYTES as usize {
            break;
        }
    }
    tfs.close(number, handle).await.unwrap();
    hasher.finalize()
}

/// As the kernel shows the file system mounted at `root`, but for what lies in `/contributed`.
pub(crate) fn through_the_kernel(root: &Path) -> Snapshot {
    let mut snapshot = Snapshot::new();
    let mut pending = vec![String::new()];
    while let Some(path) = pending.pop() {
        let place = root.join(path.trim_start_matches('/'));
        let seen = seen_by_the_kernel(&place);
        if seen.kind == FileKind::Directory && path != "/contributed" {
            for entry in fs::read_dir(&place).unwrap() {
                pending.push(path_of(&path, entry.unwrap().file_name().as_bytes()));
            }
        }
        snapshot.insert(path, seen);
    }
    snapshot
}

fn seen_by_the_kernel(place: &Path) -> Seen {
    let metadata = fs::symlink_metadata(place).unwrap();
    let kind = match metadata.file_type() {
        kind if kind.is_file() => FileKind::Regular,
        kind if kind.is_dir() => FileKind::Directory,
        kind if kind.is_symlink() => FileKind::Symlink,
        kind if kind.is_fifo() => FileKind::Fifo,
        kind if kind.is_socket() => FileKind::Socket,
        kind => panic!("{kind:?}"),
    };
    let hash = match kind {
        FileKind::Regular => {
            let mut hasher = blake3::Hasher::new();
            hasher.update_reader(fs::File::open(place).unwrap()).unwrap();
            hasher.finalize()
        }
        FileKind::Symlink => {
            blake3::hash(&fs::read_link(place).unwrap().into_os_string().into_vec())
        }
        _ => blake3::hash(b""),
    };
    let time = |secs, nanos| FileTime { secs, nanos: nanos as u32 };
    Seen {
        kind,
        inode: metadata.ino(),
        mode: metadata.mode() & 0o7777,
        names: metadata.nlink() as u32,
        owner: (metadata.uid(), metadata.gid()),
        size_bytes: metadata.size(),
        blocks_512: metadata.blocks(),
        mtime: time(metadata.mtime(), metadata.mtime_nsec()),
        ctime: time(metadata.ctime(), metadata.ctime_nsec()),
        xattrs: if kind == FileKind::Symlink { BTreeMap::new() } else { xattrs_of(place) },
        hash,
    }
}

fn xattrs_of(place: &Path) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let mut names = vec![0; 4096];
    let len = rustix::fs::llistxattr(place, &mut names[..]).unwrap();
    let names = names[..len].split(|byte| *byte == 0).filter(|name| !name.is_empty());
    names
        .map(|name| {
            let mut value = vec![0; 4096];
            let len =
                rustix::fs::lgetxattr(place, OsStr::from_bytes(name), &mut value[..]).unwrap();
            value.truncate(len);
            (name.to_vec(), value)
        })
        .collect()
}

/// # Panics
/// At the first file that the two show differently.
pub(crate) fn assert_same(one: &Snapshot, other: &Snapshot, story: &str) {
    for (path, seen) in one {
        let theirs = other.get(path).unwrap_or_else(|| panic!("{story}: {path} is missing"));
        assert_eq!(seen, theirs, "{story}: {path}");
    }
    let more = other.keys().find(|path| !one.contains_key(*path));
    assert_eq!(more, None, "{story}: one too many");
}
