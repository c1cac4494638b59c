//! A file or directory of an old state, copied to where it was.
//!
//! The copy is made beside its place under a name of its own and then put there by one rename, so
//! that no reader sees a part of it. A copy that was cut off is removed by the next one.

use atoll_env::BoxFuture;
use atoll_vfs::{
    Attr, Caller, DirEntry, Entry, Errno, FileKind, FileSystem, Handle, InodeNumber, OpenFlags,
    RenameFlags, SeekTo, SetAttr, SetTime, Writer, XattrFlags,
};
use bytes::Bytes;

use super::WritableFs;
use crate::format::MAX_DEPTH;
use crate::owned::read::error::shown_path;
use crate::owned::read::snapshot::joined;

/// What a copy is called until it is whole.
const UNFINISHED: &[u8] = b".atoll-restore";

/// Bytes read and written at once.
const CHUNK_BYTES: u32 = 1 << 20;

/// Entries listed at once.
const PAGE: usize = 256;

/// The files and bytes that a copy has written.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Copied {
    /// Everything but directories.
    pub files: u64,
    /// Bytes of regular files, without holes.
    pub bytes: u64,
}

/// Why something was not copied.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CopyError {
    /// There is something in its place.
    #[error("{path}: there is a file or directory of this name now")]
    Exists {
        /// Which.
        path: String,
    },
    /// A call failed.
    #[error("{path}: {errno}")]
    Call {
        /// Which file it was about.
        path: String,
        /// Why.
        errno: Errno,
    },
}

impl CopyError {
    fn at(path: &[u8]) -> impl Fn(Errno) -> CopyError {
        let path = shown_path(path);
        move |errno| CopyError::Call { path: path.clone(), errno }
    }
}

impl WritableFs {
    /// Copies what `path` names in `old` to the same path here, with what lies below it;
    /// directories above it that are missing are made as they were. With `replaces`, what has that
    /// name now is removed.
    pub async fn copy_from(
        &self,
        old: &dyn FileSystem,
        path: &[u8],
        replaces: bool,
    ) -> Result<Copied, CopyError> {
        let mut copy = Copy { from: old, to: self, copied: Copied::default() };
        let mut names: Vec<&[u8]> = path.split(|b| *b == b'/').filter(|n| !n.is_empty()).collect();
        let name = names.pop().ok_or(Errno::EINVAL).map_err(CopyError::at(path))?;
        let (mut from, mut to) = (InodeNumber::ROOT, InodeNumber::ROOT);
        let mut above = Bytes::new();
        for name in names {
            above = joined(&above, name);
            let found = copy.enter(from, to, name).await;
            (from, to) = found.map_err(CopyError::at(&above))?;
        }
        let at = CopyError::at(path);
        let entry = old.lookup(me(), from, name).await.map_err(&at)?;
        let exists = match self.lookup(me(), to, name).await {
            Ok(found) => {
                self.forget(found.attr.inode, 1);
                true
            }
            Err(Errno::ENOENT) => false,
            Err(errno) => return Err(at(errno)),
        };
        if exists && !replaces {
            return Err(CopyError::Exists { path: shown_path(path) });
        }
        copy.remove(to, UNFINISHED, 0).await.map_err(&at)?;
        copy.copy(&entry, to, UNFINISHED, Bytes::copy_from_slice(path), 0).await?;
        let flags = RenameFlags { exchange: exists, no_replace: !exists };
        self.rename(me(), to, UNFINISHED, to, name, flags).await.map_err(&at)?;
        copy.remove(to, UNFINISHED, 0).await.map_err(&at)?;
        Ok(copy.copied)
    }
}

fn me() -> Caller {
    Caller::default()
}

struct Copy<'a> {
    from: &'a dyn FileSystem,
    to: &'a WritableFs,
    copied: Copied,
}

impl Copy<'_> {
    /// The directory `name` of both sides, made where it is missing.
    async fn enter(
        &self,
        from: InodeNumber,
        to: InodeNumber,
        name: &[u8],
    ) -> Result<(InodeNumber, InodeNumber), Errno> {
        let old = self.from.lookup(me(), from, name).await?;
        if old.attr.kind != FileKind::Directory {
            return Err(Errno::ENOTDIR);
        }
        let entry = match self.to.lookup(me(), to, name).await {
            Err(Errno::ENOENT) => {
                let entry = self.to.mkdir(me(), to, name, old.attr.mode).await?;
                self.set_attributes(&old.attr, entry.attr.inode).await?;
                entry
            }
            found => found?,
        };
        Ok((old.attr.inode, entry.attr.inode))
    }

    /// Copies `old`, which lies at `path`, as `name` of the directory `to`.
    fn copy<'a>(
        &'a mut self,
        old: &'a Entry,
        to: InodeNumber,
        name: &'a [u8],
        path: Bytes,
        depth: usize,
    ) -> BoxFuture<'a, Result<(), CopyError>> {
        Box::pin(async move {
            let at = CopyError::at(&path);
            let (attr, to_fs) = (&old.attr, self.to);
            let made = match attr.kind {
                FileKind::Directory if depth == MAX_DEPTH => Err(Errno::ELOOP),
                FileKind::Directory => to_fs.mkdir(me(), to, name, 0o700).await,
                FileKind::Symlink => match self.from.readlink(attr.inode).await {
                    Ok(target) => to_fs.symlink(me(), to, name, &target).await,
                    Err(errno) => Err(errno),
                },
                kind => to_fs.mknod(me(), to, name, kind, attr.mode, attr.rdev).await,
            };
            let made = made.map_err(&at)?.attr.inode;
            match attr.kind {
                FileKind::Directory => {
                    for child in list(self.from, attr.inode).await.map_err(&at)? {
                        let path = joined(&path, &child.name);
                        let found = self.from.lookup(me(), attr.inode, &child.name).await;
                        let entry = found.map_err(CopyError::at(&path))?;
                        self.copy(&entry, made, &child.name, path, depth + 1).await?;
                        self.from.forget(entry.attr.inode, 1);
                    }
                }
                FileKind::Regular => self.copy_bytes(attr, made).await.map_err(&at)?,
                _ => {}
            }
            self.copied.files += u64::from(attr.kind != FileKind::Directory);
            self.set_attributes(attr, made).await.map_err(&at)?;
            to_fs.forget(made, 1);
            Ok(())
        })
    }

    async fn copy_bytes(&mut self, old: &Attr, new: InodeNumber) -> Result<(), Errno> {
        let source = self.from.open(me(), old.inode, OpenFlags::READ).await?.handle;
        let target = self.to.open(me(), new, OpenFlags::WRITE).await?.handle;
        let mut end = 0;
        while let Some(start) = data_after(self.from, (old.inode, source), end).await? {
            end = self.from.seek(old.inode, source, start, SeekTo::Hole).await?;
            let mut offset = start;
            while offset < end {
                let len = (end - offset).min(CHUNK_BYTES.into()) as u32;
                let bytes = self.from.read(old.inode, source, offset, len).await?;
                if bytes.is_empty() {
                    return Err(Errno::EIO);
                }
                let taken = self.to.write(Writer::At(me()), new, target, offset, bytes).await?;
                offset += u64::from(taken);
                self.copied.bytes += u64::from(taken);
            }
        }
        let size_bytes = Some(old.size_bytes);
        let changes = SetAttr { size_bytes, ..SetAttr::default() };
        self.to.setattr(me(), new, Some(target), changes).await?;
        self.to.close(new, target).await?;
        self.from.close(old.inode, source).await
    }

    async fn set_attributes(&self, old: &Attr, new: InodeNumber) -> Result<(), Errno> {
        for name in self.from.listxattr(old.inode).await? {
            let value = self.from.getxattr(old.inode, &name).await?;
            self.to.setxattr(me(), new, &name, value, XattrFlags::default()).await?;
        }
        let changes = SetAttr {
            mode: Some(old.mode),
            uid: Some(old.uid),
            gid: Some(old.gid),
            size_bytes: None,
            atime: Some(SetTime::To(old.atime)),
            mtime: Some(SetTime::To(old.mtime)),
        };
        self.to.setattr(me(), new, None, changes).await.map(drop)
    }

    /// Removes `name` from a directory, with all below it, if it is there.
    fn remove<'a>(
        &'a self,
        parent: InodeNumber,
        name: &'a [u8],
        depth: usize,
    ) -> BoxFuture<'a, Result<(), Errno>> {
        Box::pin(async move {
            let attr = match self.to.lookup(me(), parent, name).await {
                Err(Errno::ENOENT) => return Ok(()),
                found => found?.attr,
            };
            let removed = match attr.kind {
                FileKind::Directory if depth == MAX_DEPTH => Err(Errno::ELOOP),
                FileKind::Directory => {
                    for child in list(self.to, attr.inode).await? {
                        self.remove(attr.inode, &child.name, depth + 1).await?;
                    }
                    self.to.rmdir(me(), parent, name).await
                }
                _ => self.to.unlink(me(), parent, name).await,
            };
            self.to.forget(attr.inode, 1);
            removed
        })
    }
}

/// Where the next data is, if there is some.
async fn data_after(
    fs: &dyn FileSystem,
    (inode, handle): (InodeNumber, Handle),
    offset: u64,
) -> Result<Option<u64>, Errno> {
    match fs.seek(inode, handle, offset, SeekTo::Data).await {
        Ok(start) => Ok(Some(start)),
        Err(Errno::ENXIO) => Ok(None),
        Err(errno) => Err(errno),
    }
}

/// All entries of a directory.
async fn list(fs: &dyn FileSystem, inode: InodeNumber) -> Result<Vec<DirEntry>, Errno> {
    let handle = fs.opendir(me(), inode).await?.handle;
    let mut all: Vec<DirEntry> = Vec::new();
    loop {
        let cookie = all.last().map_or(0, |entry| entry.cookie);
        let page = fs.readdir(inode, handle, cookie, PAGE, false).await?;
        if page.is_empty() {
            break;
        }
        all.extend(page);
    }
    fs.closedir(inode, handle).await?;
    Ok(all)
}
