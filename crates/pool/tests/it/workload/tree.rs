//! All files as a client sees them.

use std::collections::{BTreeMap, BTreeSet};

use atoll_pool::disk::simulated::Loss;
use atoll_vfs::{Errno, FileKind, FileSystem, InodeNumber, OpenFlags};
use bytes::Bytes;

use super::steps::MAX_FILE_BYTES;
use super::{ROOT, me};

/// A file as a client sees it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Seen {
    pub(crate) inode: InodeNumber,
    pub(crate) kind: FileKind,
    pub(crate) mode: u32,
    pub(crate) owner: (u32, u32),
    pub(crate) nlink: u32,
    /// The target of a link; a file's bytes.
    pub(crate) text: Vec<u8>,
    /// Extended attributes.
    pub(crate) xattrs: BTreeMap<Bytes, Bytes>,
}

pub(crate) type Tree = BTreeMap<String, Seen>;

/// All files by their paths. Every name leads to a file, every directory has one name.
pub(crate) async fn tree(fs: &dyn FileSystem) -> Tree {
    tree_after(fs, Loss::Ordered).await
}

/// All files by their paths, after such a loss of power.
pub(crate) async fn tree_after(fs: &dyn FileSystem, order: Loss) -> Tree {
    let mut all = Tree::new();
    let mut directories = BTreeSet::from([ROOT]);
    let mut open = vec![(ROOT, String::new())];
    while let Some((dir, path)) = open.pop() {
        let handle = fs.opendir(me(), dir).await.unwrap().handle;
        let names = fs.readdir(dir, handle, 0, usize::MAX, false).await.unwrap();
        fs.closedir(dir, handle).await.unwrap();
        for listed in names {
            let path = format!("{path}/{}", String::from_utf8_lossy(&listed.name));
            let found = fs.lookup(me(), dir, &listed.name).await;
            if found == Err(Errno::EIO) && order == Loss::Arbitrary {
                // The disk kept the name of a directory that was removed, and not the directory.
                fs.rmdir(me(), dir, &listed.name).await.expect("it can be removed");
                continue;
            }
            let attr = found.unwrap_or_else(|errno| panic!("{path}: {errno}")).attr;
            assert_eq!((listed.inode, listed.kind), (attr.inode, attr.kind), "{path} as listed");
            let text = match attr.kind {
                FileKind::Directory => {
                    assert!(directories.insert(attr.inode), "{path} has another name, too");
                    open.push((attr.inode, path.clone()));
                    Vec::new()
                }
                FileKind::Symlink => fs.readlink(attr.inode).await.unwrap().to_vec(),
                FileKind::Regular => read(fs, attr.inode).await,
                _ => Vec::new(),
            };
            let seen = Seen {
                inode: attr.inode,
                kind: attr.kind,
                mode: attr.mode,
                owner: (attr.uid, attr.gid),
                nlink: attr.nlink,
                text,
                xattrs: xattrs(fs, attr.inode).await,
            };
            all.insert(path, seen);
            fs.forget(attr.inode, 1);
        }
    }
    all
}

async fn read(fs: &dyn FileSystem, inode: InodeNumber) -> Vec<u8> {
    let handle = fs.open(me(), inode, OpenFlags::READ).await.unwrap().handle;
    let bytes = fs.read(inode, handle, 0, MAX_FILE_BYTES).await.unwrap();
    fs.close(inode, handle).await.unwrap();
    bytes.to_vec()
}

async fn xattrs(fs: &dyn FileSystem, inode: InodeNumber) -> BTreeMap<Bytes, Bytes> {
    let mut all = BTreeMap::new();
    for name in fs.listxattr(inode).await.unwrap() {
        let value = fs.getxattr(inode, &name).await.unwrap();
        all.insert(name, value);
    }
    all
}
