//! Making a [`Tree`] real: on a disk, or in a file system that can be written.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::path::Path;

use bytes::Bytes;
use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, XattrFlags as DiskXattrFlags};

use super::tree::{Body, Content, Node, Tree};
use crate::{
    Caller, Errno, FileKind, FileSystem, FileTime, InodeNumber, OpenFlags, SetAttr, SetTime,
    Writer, XattrFlags,
};

/// Bytes written at a time.
const CHUNK_BYTES: usize = 256 << 10;

/// What the disk could keep of a tree.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Written {
    /// Whether extended attributes were kept.
    pub xattrs: bool,
}

/// Makes `tree` at `path`, whose parent must exist; `path` itself may, if empty. Owners
/// are those of the calling process.
pub fn write_tree_to_disk(tree: &Tree, path: &Path) -> io::Result<Written> {
    let mut written = Written { xattrs: true };
    let nodes = tree.nodes();
    let place = |relative: &Bytes| match relative.is_empty() {
        true => path.to_owned(),
        false => path.join(OsStr::from_bytes(relative)),
    };
    for (relative, node) in &nodes {
        let path = place(relative);
        match &node.body {
            Body::Directory(_) if path.is_dir() => {}
            Body::Directory(_) => fs::create_dir(&path)?,
            Body::Symlink(target) => symlink(OsStr::from_bytes(target), &path)?,
            Body::File(content) => write_content(content, &File::create_new(&path)?)?,
        }
    }
    // Children first: writing into a directory changes its time and needs its mode.
    for (relative, node) in nodes.iter().rev() {
        written.xattrs &= set_metadata(node, &place(relative))?;
    }
    Ok(written)
}

fn write_content(content: &Content, file: &File) -> io::Result<()> {
    for range in content.data_ranges() {
        let mut at = range.start;
        while at < range.end {
            let len = (range.end - at).min(CHUNK_BYTES as u64) as usize;
            file.write_all_at(&content.read(at, len), at)?;
            at += len as u64;
        }
    }
    file.set_len(content.len_bytes())
}

/// Returns whether extended attributes could be kept.
fn set_metadata(node: &Node, path: &Path) -> io::Result<bool> {
    let mut kept = true;
    for (name, value) in &node.xattrs {
        let flags = DiskXattrFlags::empty();
        match rustix::fs::lsetxattr(path, OsStr::from_bytes(name), value, flags) {
            Ok(()) => {}
            Err(rustix::io::Errno::OPNOTSUPP) => kept = false,
            Err(errno) => return Err(errno.into()),
        }
    }
    if !matches!(node.body, Body::Symlink(_)) {
        fs::set_permissions(path, Permissions::from_mode(node.mode))?;
    }
    let time = Timespec { tv_sec: node.mtime.secs, tv_nsec: node.mtime.nanos.into() };
    let times = Timestamps { last_access: time, last_modification: time };
    rustix::fs::utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW)?;
    Ok(kept)
}

/// Makes `tree` in an empty file system that can be written.
pub async fn write_tree_to_fs(tree: &Tree, fs: &dyn FileSystem) -> Result<(), Errno> {
    let caller = Caller::default();
    let mut inodes = BTreeMap::from([(Bytes::new(), InodeNumber::ROOT)]);
    let nodes = tree.nodes();
    for (path, node) in &nodes[1..] {
        let (parent, name) = match path.iter().rposition(|&b| b == b'/') {
            Some(at) => (path.slice(..at), path.slice(at + 1..)),
            None => (Bytes::new(), path.clone()),
        };
        let parent = inodes[&parent];
        let entry = match &node.body {
            Body::Directory(_) => fs.mkdir(caller, parent, &name, node.mode).await?,
            Body::Symlink(target) => fs.symlink(caller, parent, &name, target).await?,
            Body::File(content) => {
                let kind = FileKind::Regular;
                let entry = fs.mknod(caller, parent, &name, kind, node.mode, 0).await?;
                fill(fs, entry.attr.inode, content).await?;
                entry
            }
        };
        inodes.insert(path.clone(), entry.attr.inode);
    }
    for (path, node) in nodes.iter().rev() {
        let inode = inodes[path];
        for (name, value) in &node.xattrs {
            let flags = XattrFlags::default();
            fs.setxattr(caller, inode, name, value.clone(), flags).await?;
        }
        fs.setattr(caller, inode, None, metadata(node)).await?;
        if inode != InodeNumber::ROOT {
            fs.forget(inode, 1);
        }
    }
    Ok(())
}

fn metadata(node: &Node) -> SetAttr {
    let is_symlink = matches!(node.body, Body::Symlink(_));
    let time: FileTime = node.mtime;
    SetAttr {
        mode: (!is_symlink).then_some(node.mode),
        atime: Some(SetTime::To(time)),
        mtime: Some(SetTime::To(time)),
        ..SetAttr::default()
    }
}

async fn fill(fs: &dyn FileSystem, inode: InodeNumber, content: &Content) -> Result<(), Errno> {
    let caller = Caller::default();
    let opened = fs.open(caller, inode, OpenFlags::WRITE).await?;
    for range in content.data_ranges() {
        let mut at = range.start;
        while at < range.end {
            let len = (range.end - at).min(CHUNK_BYTES as u64) as usize;
            let data = Bytes::from(content.read(at, len));
            let taken = fs.write(Writer::At(caller), inode, opened.handle, at, data).await?;
            if taken == 0 {
                return Err(Errno::EIO);
            }
            at += u64::from(taken);
        }
    }
    let size = SetAttr { size_bytes: Some(content.len_bytes()), ..SetAttr::default() };
    fs.setattr(caller, inode, Some(opened.handle), size).await?;
    match fs.flush(inode, opened.handle).await {
        Ok(()) | Err(Errno::ENOSYS) => {}
        Err(errno) => return Err(errno),
    }
    fs.close(inode, opened.handle).await
}
