//! Where the workload runs.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use atoll_vfs::{Caller, Errno, FileKind, FileSystem, InodeNumber, OpenFlags, Writer};
use bytes::Bytes;

/// One read or write of a program, as `cp` makes them and FUSE passes them on.
const PART_BYTES: usize = 128 * 1024;

/// Entries of a directory asked for at a time.
const LISTED_AT_A_TIME: usize = 128;

/// What a name stands for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// A directory.
    Directory,
    /// Anything else.
    File,
}

/// Files by their paths, which have no `/` at either end; the empty one is the root.
pub trait Files {
    /// Makes a directory.
    fn make_directory(&self, path: &str) -> impl Future<Output = Result<(), Errno>>;

    /// Makes a file of these bytes.
    fn write(&self, path: &str, bytes: &[u8]) -> impl Future<Output = Result<(), Errno>>;

    /// The bytes of a file.
    fn read(&self, path: &str) -> impl Future<Output = Result<Vec<u8>, Errno>>;

    /// The names in a directory.
    fn list(&self, path: &str) -> impl Future<Output = Result<Vec<(String, Kind)>, Errno>>;

    /// The length of a file, from its attributes.
    fn stat(&self, path: &str) -> impl Future<Output = Result<u64, Errno>>;

    /// Removes a file or an empty directory.
    fn remove(&self, path: &str, kind: Kind) -> impl Future<Output = Result<(), Errno>>;
}

/// Files below a directory of others, which has to be there.
#[derive(Clone, Debug)]
pub struct Below<F> {
    files: F,
    above: String,
}

impl<F: Files> Below<F> {
    /// Those of `files` below `above`.
    pub fn new(files: F, above: &str) -> Below<F> {
        Below { files, above: above.to_owned() }
    }

    fn at(&self, path: &str) -> String {
        super::joined(&self.above, path)
    }
}

impl<F: Files> Files for Below<F> {
    async fn make_directory(&self, path: &str) -> Result<(), Errno> {
        self.files.make_directory(&self.at(path)).await
    }

    async fn write(&self, path: &str, bytes: &[u8]) -> Result<(), Errno> {
        self.files.write(&self.at(path), bytes).await
    }

    async fn read(&self, path: &str) -> Result<Vec<u8>, Errno> {
        self.files.read(&self.at(path)).await
    }

    async fn list(&self, path: &str) -> Result<Vec<(String, Kind)>, Errno> {
        self.files.list(&self.at(path)).await
    }

    async fn stat(&self, path: &str) -> Result<u64, Errno> {
        self.files.stat(&self.at(path)).await
    }

    async fn remove(&self, path: &str, kind: Kind) -> Result<(), Errno> {
        self.files.remove(&self.at(path), kind).await
    }
}

/// Files below a directory of this machine. Each call is done when its future is polled first.
#[derive(Clone, Debug)]
pub struct InDirectory {
    root: PathBuf,
}

impl InDirectory {
    /// Those below `root`.
    pub fn new(root: &Path) -> InDirectory {
        InDirectory { root: root.to_owned() }
    }

    /// `path` on this machine.
    fn at(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }
}

impl Files for InDirectory {
    async fn make_directory(&self, path: &str) -> Result<(), Errno> {
        Ok(fs::create_dir(self.at(path))?)
    }

    async fn write(&self, path: &str, bytes: &[u8]) -> Result<(), Errno> {
        Ok(fs::write(self.at(path), bytes)?)
    }

    async fn read(&self, path: &str) -> Result<Vec<u8>, Errno> {
        // Read and written, as by `cp`: not `copy_file_range`, which FUSE may hand back.
        Ok(fs::read(self.at(path))?)
    }

    async fn list(&self, path: &str) -> Result<Vec<(String, Kind)>, Errno> {
        let mut names = Vec::new();
        for entry in fs::read_dir(self.at(path))? {
            let entry = entry?;
            let name = entry.file_name().into_string().map_err(|_| Errno::EINVAL)?;
            let kind = if entry.file_type()?.is_dir() { Kind::Directory } else { Kind::File };
            names.push((name, kind));
        }
        Ok(names)
    }

    async fn stat(&self, path: &str) -> Result<u64, Errno> {
        Ok(fs::symlink_metadata(self.at(path))?.len())
    }

    async fn remove(&self, path: &str, kind: Kind) -> Result<(), Errno> {
        let removed = match kind {
            Kind::Directory => fs::remove_dir(self.at(path)),
            Kind::File => fs::remove_file(self.at(path)),
        };
        Ok(removed?)
    }
}

/// Files of a file system, called as a kernel calls it that remembers the directories which it has
/// looked up, and nothing else.
pub struct InFileSystem {
    fs: Arc<dyn FileSystem>,
    caller: Caller,
    /// Those that are held, by their paths.
    directories: RefCell<BTreeMap<String, InodeNumber>>,
}

/// A path as its directory's path and its name.
fn split(path: &str) -> (&str, &str) {
    path.rsplit_once('/').unwrap_or(("", path))
}

impl InFileSystem {
    /// Those of `fs`, for a caller that may everything.
    pub fn new(fs: Arc<dyn FileSystem>) -> InFileSystem {
        let directories = RefCell::new(BTreeMap::from([(String::new(), InodeNumber::ROOT)]));
        InFileSystem { fs, caller: Caller::default(), directories }
    }

    async fn directory(&self, path: &str) -> Result<InodeNumber, Errno> {
        let (mut at, mut inode) = (String::new(), InodeNumber::ROOT);
        for name in path.split('/').filter(|name| !name.is_empty()) {
            at = super::joined(&at, name);
            let known = self.directories.borrow().get(&at).copied();
            inode = match known {
                Some(inode) => inode,
                None => {
                    let entry = self.fs.lookup(self.caller, inode, name.as_bytes()).await?;
                    self.directories.borrow_mut().insert(at.clone(), entry.attr.inode);
                    entry.attr.inode
                }
            };
        }
        Ok(inode)
    }

    /// Looks a file up, which is held then.
    async fn file(&self, path: &str) -> Result<InodeNumber, Errno> {
        let (above, name) = split(path);
        let parent = self.directory(above).await?;
        Ok(self.fs.lookup(self.caller, parent, name.as_bytes()).await?.attr.inode)
    }

    async fn read_open(&self, inode: InodeNumber) -> Result<Vec<u8>, Errno> {
        let opened = self.fs.open(self.caller, inode, OpenFlags::READ).await?;
        let mut all = Vec::new();
        loop {
            let part =
                self.fs.read(inode, opened.handle, all.len() as u64, PART_BYTES as u32).await?;
            if part.is_empty() {
                break;
            }
            all.extend_from_slice(&part);
        }
        self.fs.close(inode, opened.handle).await?;
        Ok(all)
    }
}

impl Drop for InFileSystem {
    fn drop(&mut self) {
        for (path, inode) in self.directories.take() {
            if !path.is_empty() {
                self.fs.forget(inode, 1);
            }
        }
    }
}

impl Files for InFileSystem {
    async fn make_directory(&self, path: &str) -> Result<(), Errno> {
        let (above, name) = split(path);
        let parent = self.directory(above).await?;
        let entry = self.fs.mkdir(self.caller, parent, name.as_bytes(), 0o755).await?;
        self.directories.borrow_mut().insert(path.to_owned(), entry.attr.inode);
        Ok(())
    }

    async fn write(&self, path: &str, bytes: &[u8]) -> Result<(), Errno> {
        let (above, name) = split(path);
        let parent = self.directory(above).await?;
        let flags = OpenFlags(OpenFlags::WRITE.0 | OpenFlags::TRUNCATE);
        let created = self.fs.create(self.caller, parent, name.as_bytes(), 0o644, flags).await?;
        let (inode, handle) = (created.0.attr.inode, created.1.handle);
        let mut at = 0;
        while at < bytes.len() {
            let part = &bytes[at..bytes.len().min(at + PART_BYTES)];
            let writer = Writer::At(self.caller);
            let data = Bytes::copy_from_slice(part);
            at += self.fs.write(writer, inode, handle, at as u64, data).await? as usize;
        }
        match self.fs.flush(inode, handle).await {
            Ok(()) | Err(Errno::ENOSYS) => {}
            Err(errno) => return Err(errno),
        }
        self.fs.close(inode, handle).await?;
        self.fs.forget(inode, 1);
        Ok(())
    }

    async fn read(&self, path: &str) -> Result<Vec<u8>, Errno> {
        let inode = self.file(path).await?;
        let read = self.read_open(inode).await;
        self.fs.forget(inode, 1);
        read
    }

    async fn list(&self, path: &str) -> Result<Vec<(String, Kind)>, Errno> {
        let inode = self.directory(path).await?;
        let handle = self.fs.opendir(self.caller, inode).await?.handle;
        let (mut names, mut cookie) = (Vec::new(), 0);
        loop {
            let page = self.fs.readdir(inode, handle, cookie, LISTED_AT_A_TIME, false).await?;
            let Some(last) = page.last() else { break };
            cookie = last.cookie;
            for entry in page {
                let name = String::from_utf8(entry.name.to_vec()).map_err(|_| Errno::EINVAL)?;
                let is_directory = entry.kind == FileKind::Directory;
                names.push((name, if is_directory { Kind::Directory } else { Kind::File }));
            }
        }
        self.fs.closedir(inode, handle).await?;
        Ok(names)
    }

    async fn stat(&self, path: &str) -> Result<u64, Errno> {
        let inode = self.file(path).await?;
        let reply = self.fs.getattr(inode, None).await;
        self.fs.forget(inode, 1);
        Ok(reply?.attr.size_bytes)
    }

    async fn remove(&self, path: &str, kind: Kind) -> Result<(), Errno> {
        let (above, name) = split(path);
        let parent = self.directory(above).await?;
        if kind == Kind::File {
            return self.fs.unlink(self.caller, parent, name.as_bytes()).await;
        }
        self.fs.rmdir(self.caller, parent, name.as_bytes()).await?;
        let held = self.directories.borrow_mut().remove(path);
        if let Some(inode) = held {
            self.fs.forget(inode, 1);
        }
        Ok(())
    }
}
