//! Files and directories below an open directory.
//!
//! Every name is looked up in the directory that is open and never through a symbolic link, and what is found is
//! held open while it is read, changed or removed. So no process that changes the tree meanwhile can lead a command
//! out of it. Only the directory that the caller names at first is opened by its path ([`crate::user_path`] opens those that
//! a user has typed).

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{
    AtFlags, CWD, Dir, FileType, Gid, Mode, OFlags, Stat, Timestamps, Uid, XattrFlags,
};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// What a directory is held open with: names are looked up in it without the right to list it.
const DIRECTORY: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);
/// The most bytes of a list of attributes, or of a value.
const MAX_XATTR_BYTES: usize = 64 << 10;

/// An open directory.
#[derive(Debug)]
pub(crate) struct Directory {
    fd: OwnedFd,
    /// Where it was found, for messages.
    path: PathBuf,
}

/// A file, directory, link or device that is held by its handle, whatever becomes of its name.
#[derive(Debug)]
pub(crate) struct Held {
    fd: OwnedFd,
    stat: Stat,
}

/// Lets this process hold as many directories open as the system allows: a walk holds one for each level of a tree, or
/// two. Where that is refused, a very deep tree cannot be walked to its end, and the walk says so.
pub(crate) fn open_many_files() {
    let files = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: files.maximum, ..files });
}

impl Directory {
    /// Opens a directory by its path, through links if that has any.
    pub(crate) fn open(path: &Path) -> io::Result<Directory> {
        let fd = rustix::fs::open(path, DIRECTORY, Mode::empty())?;
        Ok(Directory { fd, path: path.to_owned() })
    }

    /// Opens a directory in this one.
    pub(crate) fn child(&self, name: &OsStr) -> io::Result<Directory> {
        let flags = DIRECTORY | OFlags::NOFOLLOW;
        let fd = rustix::fs::openat(&self.fd, name, flags, Mode::empty())?;
        Ok(Directory { fd, path: self.path_of(name) })
    }

    /// Opens a directory some levels below this one; the path has plain names alone.
    pub(crate) fn below(&self, path: &Path) -> io::Result<Directory> {
        let mut at = self.child(OsStr::new("."))?;
        at.path.clone_from(&self.path);
        for component in path.components() {
            let Component::Normal(name) = component else {
                return Err(io::ErrorKind::InvalidInput.into());
            };
            at = at.child(name)?;
        }
        Ok(at)
    }

    /// Makes a directory that only this user can use, and opens it.
    pub(crate) fn make_child(&self, name: &OsStr) -> io::Result<Directory> {
        rustix::fs::mkdirat(&self.fd, name, Mode::RWXU)?;
        self.child(name)
    }

    /// Opens a directory in this one, which is made if nothing has its name.
    pub(crate) fn child_or_new(&self, name: &OsStr) -> io::Result<Directory> {
        match self.child(name) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => self.make_child(name),
            opened => opened,
        }
    }

    /// Makes a regular file that only this user can use.
    pub(crate) fn make_file(&self, name: &OsStr) -> io::Result<File> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
        let mode = Mode::RUSR | Mode::WUSR;
        Ok(rustix::fs::openat(&self.fd, name, flags | OFlags::CLOEXEC, mode)?.into())
    }

    /// Makes a symbolic link.
    pub(crate) fn make_link(&self, name: &OsStr, target: &[u8]) -> io::Result<()> {
        Ok(rustix::fs::symlinkat(target, &self.fd, name)?)
    }

    /// Makes a file of any kind but a directory or link, without opening it.
    pub(crate) fn make_node(&self, name: &OsStr, kind: FileType, device: u64) -> io::Result<()> {
        let mode = Mode::RUSR | Mode::WUSR;
        Ok(rustix::fs::mknodat(&self.fd, name, kind, mode, device)?)
    }

    /// Takes hold of what has a name here.
    pub(crate) fn hold(&self, name: &OsStr) -> io::Result<Held> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Held::of(rustix::fs::openat(&self.fd, name, flags, Mode::empty())?)
    }

    /// Its path as the user would name it.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The names in it, in order.
    pub(crate) fn names(&self) -> io::Result<Vec<OsString>> {
        let mut names = Vec::new();
        for entry in Dir::new(self.listed()?)? {
            let entry = entry?;
            let name = entry.file_name().to_bytes();
            if !matches!(name, b"." | b"..") {
                names.push(OsStr::from_bytes(name).to_owned());
            }
        }
        names.sort();
        Ok(names)
    }

    /// What it is.
    pub(crate) fn stat(&self) -> io::Result<Stat> {
        Ok(rustix::fs::fstat(&self.fd)?)
    }

    /// Opens it for reading.
    fn listed(&self) -> io::Result<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(rustix::fs::openat(&self.fd, ".", flags, Mode::empty())?)
    }

    /// Makes what was made, removed and renamed in it durable.
    pub(crate) fn sync(&self) -> io::Result<()> {
        Ok(rustix::fs::fsync(self.listed()?)?)
    }

    /// Removes what has a name here, with everything in it.
    pub(crate) fn remove(&self, name: &OsStr) -> io::Result<()> {
        let mut levels: Vec<(Directory, std::vec::IntoIter<OsString>)> = Vec::new();
        let mut next = Some(name.to_owned());
        loop {
            let here = levels.last().map_or(self, |(directory, _)| directory);
            if let Some(name) = next.take()
                && let Some(below) = here.remove_unless_directory(&name)?
            {
                let names = below.names()?.into_iter();
                levels.push((below, names));
            }
            let Some((_, names)) = levels.last_mut() else { return Ok(()) };
            next = names.next();
            if next.is_none() {
                let (emptied, _) = levels.pop().expect("it was there a moment ago");
                let here = levels.last().map_or(self, |(directory, _)| directory);
                let name = emptied.path.file_name().unwrap_or_default();
                rustix::fs::unlinkat(&here.fd, name, AtFlags::REMOVEDIR)?;
            }
        }
    }

    /// Removes a file or link; a directory is opened.
    fn remove_unless_directory(&self, name: &OsStr) -> io::Result<Option<Directory>> {
        match rustix::fs::unlinkat(&self.fd, name, AtFlags::empty()) {
            Ok(()) => Ok(None),
            Err(Errno::ISDIR) => self.child(name).map(Some),
            Err(error) => Err(error.into()),
        }
    }

    /// Names what is in it, for messages.
    pub(crate) fn path_of(&self, name: &OsStr) -> PathBuf {
        self.path.join(name)
    }
}

impl AsFd for Directory {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Held {
    /// Takes hold of an open file.
    pub(crate) fn of(fd: impl Into<OwnedFd>) -> io::Result<Held> {
        let fd = fd.into();
        let stat = rustix::fs::fstat(&fd)?;
        Ok(Held { fd, stat })
    }

    /// What it was when it was taken hold of.
    pub(crate) fn stat(&self) -> &Stat {
        &self.stat
    }

    /// Its kind.
    pub(crate) fn kind(&self) -> FileType {
        FileType::from_raw_mode(self.stat.st_mode)
    }

    /// Opens a regular file.
    pub(crate) fn open_file(&self, flags: OFlags) -> io::Result<File> {
        if self.kind() != FileType::RegularFile {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Ok(rustix::fs::open(self.path(), flags | OFlags::CLOEXEC, Mode::empty())?.into())
    }

    /// Opens a directory; `path` is for messages.
    pub(crate) fn open_directory(&self, path: PathBuf) -> io::Result<Directory> {
        let fd = rustix::fs::openat(&self.fd, ".", DIRECTORY, Mode::empty())?;
        Ok(Directory { fd, path })
    }

    /// What a symbolic link leads to.
    pub(crate) fn target(&self) -> io::Result<Vec<u8>> {
        Ok(rustix::fs::readlinkat(&self.fd, "", Vec::new())?.into_bytes())
    }

    /// Gives it to another user and group.
    pub(crate) fn set_owner(&self, uid: u32, gid: u32) -> io::Result<()> {
        let (uid, gid) = (Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)));
        Ok(rustix::fs::chownat(CWD, self.path(), uid, gid, AtFlags::empty())?)
    }

    /// Sets its permissions; a symbolic link has none.
    pub(crate) fn set_mode(&self, mode: u32) -> io::Result<()> {
        Ok(rustix::fs::chmod(self.path(), Mode::from_raw_mode(mode))?)
    }

    /// Sets when it was read and changed last.
    pub(crate) fn set_times(&self, times: &Timestamps) -> io::Result<()> {
        Ok(rustix::fs::utimensat(CWD, self.path(), times, AtFlags::empty())?)
    }

    /// Its extended attributes; a symbolic link has none.
    pub(crate) fn xattrs(&self) -> io::Result<Vec<(OsString, Vec<u8>)>> {
        let mut names = vec![0; MAX_XATTR_BYTES];
        let len = rustix::fs::listxattr(self.path(), &mut names[..])?;
        let mut found = Vec::new();
        for name in names[..len].split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
            let mut value = vec![0; MAX_XATTR_BYTES];
            let len = rustix::fs::getxattr(self.path(), name, &mut value[..])?;
            value.truncate(len);
            found.push((OsStr::from_bytes(name).to_owned(), value));
        }
        Ok(found)
    }

    /// The value of an extended attribute.
    pub(crate) fn xattr(&self, name: &OsStr) -> io::Result<Vec<u8>> {
        let mut value = vec![0; MAX_XATTR_BYTES];
        let len = rustix::fs::getxattr(self.path(), name, &mut value[..])?;
        value.truncate(len);
        Ok(value)
    }

    /// Whether it has an extended attribute.
    pub(crate) fn has_xattr(&self, name: &str) -> bool {
        // Without room for the value this asks for its length.
        rustix::fs::getxattr(self.path(), name, &mut [0; 0][..]).is_ok()
    }

    /// Sets an extended attribute.
    pub(crate) fn set_xattr(&self, name: &OsStr, value: &[u8]) -> io::Result<()> {
        Ok(rustix::fs::setxattr(self.path(), name, value, XattrFlags::empty())?)
    }

    /// Leads to the file itself and not through a name: a handle of this kind (`O_PATH`) is all that a file, link or
    /// device can be held by without opening it, and few calls take one.
    fn path(&self) -> String {
        format!("/proc/self/fd/{}", self.fd.as_raw_fd())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt, symlink};

    use rustix::fs::Timespec;

    use super::*;

    #[test]
    fn no_name_is_followed_out_of_an_open_directory() -> io::Result<()> {
        let scratch = tempfile::tempdir()?;
        let (tree, outside) = (scratch.path().join("tree"), scratch.path().join("outside"));
        fs::create_dir_all(tree.join("a"))?;
        fs::create_dir(&outside)?;
        fs::write(outside.join("file"), "secret")?;
        symlink(&outside, tree.join("a/link"))?;
        symlink(outside.join("file"), tree.join("a/file"))?;
        let directory = Directory::open(&tree)?;
        let a = directory.below(Path::new("a"))?;
        assert!(a.child(OsStr::new("link")).is_err());
        assert!(directory.below(Path::new("a/link")).is_err());
        assert!(directory.below(Path::new("a/../a")).is_err());
        assert!(a.make_file(OsStr::new("file")).is_err());
        let held = a.hold(OsStr::new("file"))?;
        assert_eq!(held.kind(), FileType::Symlink);
        assert!(held.open_file(OFlags::RDONLY).is_err());
        // Times are set on the link, whatever it leads to.
        let second = Timespec { tv_sec: 1, tv_nsec: 0 };
        held.set_times(&Timestamps { last_access: second, last_modification: second })?;
        assert_eq!(fs::symlink_metadata(tree.join("a/file"))?.mtime(), 1);
        assert_ne!(fs::metadata(outside.join("file"))?.mtime(), 1);
        assert!(held.set_mode(0o777).is_err());
        Ok(())
    }

    #[test]
    fn what_is_removed_is_what_lies_in_the_directory() -> io::Result<()> {
        let scratch = tempfile::tempdir()?;
        let (tree, outside) = (scratch.path().join("tree"), scratch.path().join("outside"));
        fs::create_dir_all(tree.join("top/a/b/c"))?;
        fs::create_dir(&outside)?;
        fs::write(outside.join("file"), "kept")?;
        fs::write(tree.join("top/a/file"), "removed")?;
        symlink(&outside, tree.join("top/a/b/link"))?;
        symlink(&outside, tree.join("link"))?;
        let directory = Directory::open(&tree)?;
        directory.remove(OsStr::new("top"))?;
        directory.remove(OsStr::new("link"))?;
        assert_eq!(directory.names()?.len(), 0);
        assert_eq!(fs::read(outside.join("file"))?, b"kept");
        assert!(directory.remove(OsStr::new("top")).is_err(), "it is gone");
        Ok(())
    }
}
