//! The machine's directories and files, opened so that no process that changes the tree
//! meanwhile can lead us out of it: every name is opened relative to its directory and
//! never through a symbolic link.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use atoll_vfs::{FileKind, FileTime};
use bytes::Bytes;
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, Stat, StatxFlags};
use rustix::io::Errno;

use super::run::Stopped;
use super::{PublishOptions, SourceFilter};
use crate::format::xattrs;

/// An open directory of the source.
pub(super) struct SourceDir {
    pub(super) fd: OwnedFd,
    /// Relative to the source; empty for its top.
    pub(super) path: PathBuf,
    /// Its file system's number.
    device: u64,
    /// Whether a file on it that has changed has another time.
    pub(super) has_times: bool,
}

/// Why a directory is not read.
pub(super) enum DirError {
    /// The work is to end.
    Stopped,
    /// It is not there any more.
    Vanished,
    /// It is never published.
    Withheld(String),
    /// It cannot be read.
    Unreadable(String),
    /// Something else has taken its place.
    Replaced,
}

impl From<Stopped> for DirError {
    fn from(_: Stopped) -> DirError {
        DirError::Stopped
    }
}

impl From<Errno> for DirError {
    fn from(error: Errno) -> DirError {
        match error {
            Errno::NOENT => DirError::Vanished,
            Errno::NOTDIR | Errno::LOOP | Errno::STALE => DirError::Replaced,
            _ => DirError::Unreadable(error.to_string()),
        }
    }
}

/// The number of the file system that `name` in `dir` is on. The file system itself is not
/// asked: one that is served over a network, or by a process that has died, may not answer.
fn device_of(dir: impl AsFd, name: &[u8], flags: AtFlags) -> rustix::io::Result<u64> {
    let flags = flags | AtFlags::STATX_DONT_SYNC | AtFlags::NO_AUTOMOUNT;
    let stat = rustix::fs::statx(dir, name, flags, StatxFlags::empty())?;
    Ok(rustix::fs::makedev(stat.stx_dev_major, stat.stx_dev_minor))
}

impl SourceDir {
    pub(super) fn top(source: &Path, filter: &dyn SourceFilter) -> rustix::io::Result<SourceDir> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = rustix::fs::open(source, flags, Mode::empty())?;
        let device = device_of(&fd, b"", AtFlags::EMPTY_PATH)?;
        let has_times = filter.trusts_times(fd.as_fd());
        Ok(SourceDir { fd, path: PathBuf::new(), device, has_times })
    }

    /// Opens a directory below this one, unless it is on a file system that is not entered.
    pub(super) fn child(
        &self,
        name: &[u8],
        options: &PublishOptions,
    ) -> Result<SourceDir, DirError> {
        self.check_mount(device_of(&self.fd, name, AtFlags::SYMLINK_NOFOLLOW)?, options)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(&self.fd, name, flags, Mode::empty())?;
        // Opening it may have mounted something there.
        let device = device_of(&fd, b"", AtFlags::EMPTY_PATH)?;
        self.check_mount(device, options)?;
        let has_times = match device == self.device {
            true => self.has_times,
            false => options.filter.trusts_times(fd.as_fd()),
        };
        Ok(SourceDir { fd, path: self.path_of(name), device, has_times })
    }

    fn check_mount(&self, device: u64, options: &PublishOptions) -> Result<(), DirError> {
        if device == self.device {
            return Ok(());
        }
        if let Some(reason) = options.filter.withholds_mount(device) {
            return Err(DirError::Withheld(reason));
        }
        if options.one_file_system {
            return Err(DirError::Withheld("it is on another file system".into()));
        }
        Ok(())
    }

    pub(super) fn file(&self, name: &[u8]) -> rustix::io::Result<OwnedFd> {
        // Not blocking: a FIFO may have replaced the file by now.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        rustix::fs::openat(&self.fd, name, flags, Mode::empty())
    }

    pub(super) fn stat(&self, name: &[u8]) -> rustix::io::Result<Stat> {
        rustix::fs::statat(&self.fd, name, AtFlags::SYMLINK_NOFOLLOW)
    }

    pub(super) fn path_of(&self, name: &[u8]) -> PathBuf {
        self.path.join(std::ffi::OsStr::from_bytes(name))
    }

    /// The directory's names in byte order, without those that the options exclude.
    pub(super) fn names(&self, options: &PublishOptions) -> Result<Names, DirError> {
        let exclude = &options.exclude;
        let mut names = Names::default();
        for entry in Dir::read_from(&self.fd)? {
            let entry = entry?;
            let name = entry.file_name().to_bytes();
            if matches!(name, b"." | b"..") {
                continue;
            }
            if !exclude.is_empty() && exclude.is_match(self.path_of(name)) {
                continue;
            }
            let kind = match entry.file_type() {
                FileType::Unknown => match self.stat(name) {
                    Ok(stat) => kind_of(&stat),
                    // Removed since: as if it had not been there.
                    Err(Errno::NOENT) => continue,
                    Err(error) => return Err(error.into()),
                },
                known => kind_of_type(known),
            };
            names.push(name, kind);
        }
        // Checked after its names are read: a file that makes the directory a withheld one may
        // appear meanwhile, and is then not among them.
        if let Some(reason) = options.filter.withholds(self.fd.as_fd()) {
            return Err(DirError::Withheld(reason));
        }
        names.sort();
        Ok(names)
    }
}

/// Whether some process has the file open for writing, or mapped so, as far as the kernel tells: it
/// grants a lease for reading where none has, to the file's owner (fcntl(2), `F_SETLEASE`). For a
/// moment other processes wait when they open it for writing.
#[allow(unsafe_code)]
pub(super) fn is_open_for_writing(file: &OwnedFd) -> bool {
    // From fcntl.h.
    const F_SETSIG: i32 = 10;
    let set = |command: i32, argument: i32| {
        // SAFETY: on a descriptor that is open, with a number; no memory of this process is touched.
        unsafe { libc::fcntl(file.as_raw_fd(), command, argument) }
    };
    // Who waits sends this signal, which is ignored unless it is caught; else it were SIGIO, which
    // ends a process.
    set(F_SETSIG, libc::SIGURG);
    match set(libc::F_SETLEASE, libc::F_RDLCK) {
        -1 => std::io::Error::last_os_error().raw_os_error() == Some(libc::EAGAIN),
        _ => {
            set(libc::F_SETLEASE, libc::F_UNLCK);
            false
        }
    }
}

/// Whether files of the file system of `directory` have a time of status change that is the kernel's
/// word, and moves with every change.
pub(super) fn keeps_ctime(directory: BorrowedFd<'_>) -> bool {
    // ext2 to ext4, XFS, Btrfs, F2FS, bcachefs, ZFS.
    const KEEP: [u64; 6] =
        [0xef53, 0x5846_5342, 0x9123_683e, 0xf2f5_2010, 0xca45_1a4e, 0x2fc1_2fc1];
    let found = rustix::fs::fstatfs(directory);
    found.is_ok_and(|found| KEEP.contains(&(found.f_type as u64 & 0xffff_ffff)))
}

pub(super) fn kind_of(stat: &Stat) -> FileKind {
    kind_of_type(FileType::from_raw_mode(stat.st_mode))
}

fn kind_of_type(kind: FileType) -> FileKind {
    match kind {
        FileType::RegularFile => FileKind::Regular,
        FileType::Directory => FileKind::Directory,
        FileType::Symlink => FileKind::Symlink,
        FileType::Socket => FileKind::Socket,
        FileType::CharacterDevice => FileKind::CharDevice,
        FileType::BlockDevice => FileKind::BlockDevice,
        _ => FileKind::Fifo,
    }
}

pub(super) fn mode_of(stat: &Stat) -> u32 {
    stat.st_mode & 0o7777
}

pub(super) fn mtime_of(stat: &Stat) -> FileTime {
    FileTime { secs: stat.st_mtime, nanos: stat.st_mtime_nsec as u32 }
}

/// The names of one directory, in one allocation: some 16 bytes each besides the name.
#[derive(Default)]
pub(super) struct Names {
    text: Vec<u8>,
    list: Vec<(usize, u8, FileKind)>,
}

impl Names {
    fn push(&mut self, name: &[u8], kind: FileKind) {
        let len = u8::try_from(name.len()).expect("a name has at most 255 bytes");
        self.list.push((self.text.len(), len, kind));
        self.text.extend_from_slice(name);
    }

    fn sort(&mut self) {
        let text = &self.text;
        self.list.sort_unstable_by(|a, b| {
            text[a.0..a.0 + usize::from(a.1)].cmp(&text[b.0..b.0 + usize::from(b.1)])
        });
    }

    pub(super) fn len(&self) -> usize {
        self.list.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&[u8], FileKind)> {
        self.list.iter().map(|&(at, len, kind)| (&self.text[at..at + usize::from(len)], kind))
    }
}

/// The xattr block of an open file or directory, if it has attributes that a volume
/// keeps; or why they cannot be read.
pub(super) fn xattrs_of(fd: impl AsFd) -> Result<Option<Vec<u8>>, String> {
    // Most files have none or few; the kernel's limit for all names is 64 KiB.
    let mut short = [0; 1024];
    let mut long = Vec::new();
    let list = match rustix::fs::flistxattr(&fd, &mut short[..]) {
        Ok(0) | Err(Errno::NOTSUP | Errno::NOSYS) => return Ok(None),
        Ok(len) => &short[..len],
        Err(Errno::RANGE) => {
            long.resize(64 << 10, 0);
            let len = rustix::fs::flistxattr(&fd, &mut long[..])
                .map_err(|error| format!("extended attributes: {error}"))?;
            &long[..len]
        }
        Err(error) => return Err(format!("extended attributes: {error}")),
    };
    let mut found = Vec::new();
    for name in list.split(|byte| *byte == 0) {
        if !name.starts_with(xattrs::PREFIX) || name.len() == xattrs::PREFIX.len() {
            continue;
        }
        if let Some(value) = xattr_of(&fd, name)? {
            found.push((Bytes::copy_from_slice(name), Bytes::from(value)));
        }
    }
    if found.is_empty() {
        return Ok(None);
    }
    found.sort();
    xattrs::encode(&found)
        .map(Some)
        .ok_or_else(|| "its extended attributes do not fit into a block".to_string())
}

fn xattr_of(fd: impl AsFd, name: &[u8]) -> Result<Option<Vec<u8>>, String> {
    // The kernel's limit for one value.
    let mut value = vec![0; 64 << 10];
    match rustix::fs::fgetxattr(fd, name, &mut value[..]) {
        Ok(len) => {
            value.truncate(len);
            value.shrink_to_fit();
            Ok(Some(value))
        }
        Err(Errno::NODATA) => Ok(None),
        Err(error) => Err(format!("extended attribute {}: {error}", String::from_utf8_lossy(name))),
    }
}
