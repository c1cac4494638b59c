//! Files and directories of the destination. Every name is used relative to an open
//! directory and never through a symbolic link, so nothing in a volume, and no process that
//! changes the destination meanwhile, leads a copy out of it.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use atoll_key::BlockHash;
use atoll_vfs::{FileTime, MAX_NAME_BYTES};
use bytes::Bytes;
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, Timespec, Timestamps};
use rustix::io::Errno;

use super::GetTreeError;
use super::pool::PoolShared;

/// What is set on a file besides its bytes.
#[derive(Clone, Debug)]
pub(super) struct Attributes {
    pub(super) mode: u32,
    pub(super) mtime: FileTime,
    pub(super) xattrs: Vec<(Bytes, Bytes)>,
}

/// A directory being filled. When the last holder lets go of it, its attributes are set,
/// since filling it changes its time and may need more rights than its mode gives.
pub(super) struct DestDir {
    open: Option<OpenDir>,
    /// Nothing was there: nothing needs comparing.
    pub(super) fresh: bool,
    pool: Arc<PoolShared>,
}

struct OpenDir {
    fd: OwnedFd,
    path: PathBuf,
    attributes: Attributes,
    parent: Option<Arc<DestDir>>,
}

impl Drop for DestDir {
    fn drop(&mut self) {
        let Some(open) = self.open.take() else { return };
        let pool = self.pool.clone();
        self.pool.push(Box::new(move || {
            if let Err(error) = set(&open.fd, &open.attributes) {
                pool.note(wrong(&open.path)(error));
            }
            drop(open.parent);
        }));
    }
}

/// Makes an error of a system call one about `path`.
pub(super) fn wrong(path: &Path) -> impl FnOnce(Errno) -> GetTreeError {
    let path = path.to_path_buf();
    move |source| GetTreeError::Write { path, source: source.into() }
}

const DIRECTORY: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

impl DestDir {
    /// Opens or makes the top directory. A symbolic link there is followed, since the caller
    /// named it, but not one that takes the place of a directory that was just made.
    pub(super) fn top(
        pool: &Arc<PoolShared>,
        path: &Path,
        attributes: Attributes,
    ) -> Result<Arc<DestDir>, GetTreeError> {
        let (fresh, flags) = match rustix::fs::mkdir(path, Mode::from_raw_mode(0o700)) {
            Ok(()) => (true, DIRECTORY | OFlags::NOFOLLOW),
            Err(Errno::EXIST) => (false, DIRECTORY),
            Err(error) => return Err(wrong(path)(error)),
        };
        let fd = rustix::fs::open(path, flags, Mode::empty()).map_err(wrong(path))?;
        Ok(DestDir::opened(pool, fd, path.to_path_buf(), attributes, None, fresh))
    }

    /// The directory that holds `path`, whose attributes stay as they are.
    pub(super) fn holding(path: &Path) -> Result<OwnedFd, GetTreeError> {
        let parent = match path.parent() {
            Some(parent) if parent != Path::new("") => parent,
            _ => Path::new("."),
        };
        rustix::fs::open(parent, DIRECTORY, Mode::empty()).map_err(wrong(parent))
    }

    /// Opens or makes the directory `name` below this one. A file or link of that name is
    /// replaced.
    pub(super) fn child(
        self: &Arc<Self>,
        name: &[u8],
        attributes: Attributes,
    ) -> Result<Arc<DestDir>, GetTreeError> {
        let (here, path) = (self.fd(), self.path_of(name));
        let mut fresh = true;
        match rustix::fs::mkdirat(here, name, Mode::from_raw_mode(0o700)) {
            Ok(()) => {}
            Err(Errno::EXIST) => fresh = false,
            Err(error) => return Err(wrong(&path)(error)),
        }
        let fd = match rustix::fs::openat(here, name, DIRECTORY | OFlags::NOFOLLOW, Mode::empty()) {
            Ok(fd) => fd,
            Err(Errno::NOTDIR | Errno::LOOP) => {
                fresh = true;
                rustix::fs::unlinkat(here, name, AtFlags::empty()).map_err(wrong(&path))?;
                let mode = Mode::from_raw_mode(0o700);
                rustix::fs::mkdirat(here, name, mode).map_err(wrong(&path))?;
                rustix::fs::openat(here, name, DIRECTORY | OFlags::NOFOLLOW, Mode::empty())
                    .map_err(wrong(&path))?
            }
            Err(error) => return Err(wrong(&path)(error)),
        };
        Ok(DestDir::opened(&self.pool, fd, path, attributes, Some(self.clone()), fresh))
    }

    fn opened(
        pool: &Arc<PoolShared>,
        fd: OwnedFd,
        path: PathBuf,
        attributes: Attributes,
        parent: Option<Arc<DestDir>>,
        fresh: bool,
    ) -> Arc<DestDir> {
        if !fresh {
            // An earlier run may have left it without rights to write. Another user's
            // stays as it is, and says so when it is written to.
            let mode = Mode::from_raw_mode(attributes.mode | 0o700);
            let _ = rustix::fs::fchmod(&fd, mode);
        }
        let open = Some(OpenDir { fd, path, attributes, parent });
        Arc::new(DestDir { open, fresh, pool: pool.clone() })
    }

    pub(super) fn fd(&self) -> &OwnedFd {
        &self.open().fd
    }

    pub(super) fn path_of(&self, name: &[u8]) -> PathBuf {
        self.open().path.join(std::ffi::OsStr::from_bytes(name))
    }

    fn open(&self) -> &OpenDir {
        self.open.as_ref().expect("it is open until it is dropped")
    }
}

/// The name a file has until it is complete.
pub(super) fn part_name(name: &[u8]) -> Vec<u8> {
    const SUFFIX: &[u8] = b".atoll-part";
    if name.len() + 1 + SUFFIX.len() <= MAX_NAME_BYTES {
        [b".", name, SUFFIX].concat()
    } else {
        hashed_part_name(name)
    }
}

/// Another one, for a name too long, or where the volume itself has a file of that name.
pub(super) fn hashed_part_name(name: &[u8]) -> Vec<u8> {
    format!(".{}.atoll-part", BlockHash::of(name).to_hex()).into_bytes()
}

/// Whether the file is there already: same kind, length and time. Its mode is set if it
/// is another.
pub(super) fn is_there(
    dir: &OwnedFd,
    name: &[u8],
    size_bytes: u64,
    mode: u32,
    mtime: FileTime,
) -> bool {
    let Ok(fd) = hold(dir, name) else { return false };
    let Ok(stat) = rustix::fs::fstat(&fd) else { return false };
    let same = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
        && stat.st_size as u64 == size_bytes
        && stat.st_mtime == mtime.secs
        && stat.st_mtime_nsec as u32 == mtime.nanos;
    if !same || stat.st_mode & 0o7777 == mode {
        return same;
    }
    // There is no system call for it before Linux 6.6.
    rustix::fs::chmod(held_path(&fd), Mode::from_raw_mode(mode)).is_ok()
}

/// Takes hold of what has a name, which may not be ours to open: whatever others put in its place, what is looked at is
/// what is changed.
fn hold(dir: &OwnedFd, name: &[u8]) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(dir, name, flags, Mode::empty())
}

/// Leads to what is held, also if that is a symbolic link, and not to what the link leads to.
fn held_path(fd: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", fd.as_raw_fd())
}

/// Opens a file that is not complete, of an earlier run or new; with its length then.
pub(super) fn open_part(dir: &OwnedFd, part: &[u8]) -> rustix::io::Result<(OwnedFd, u64)> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let open = || {
        let mode = Mode::from_raw_mode(0o600);
        rustix::fs::openat(dir, part, flags | OFlags::CLOEXEC, mode)
    };
    match open() {
        Ok(fd) => {
            let stat = rustix::fs::fstat(&fd)?;
            let regular = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
            if regular && stat.st_nlink == 1 {
                return Ok((fd, stat.st_size as u64));
            }
        }
        Err(Errno::NOENT) => return Err(Errno::NOENT),
        Err(_) => {}
    }
    // A link, a FIFO, another name of some file: not ours to write through.
    rustix::fs::unlinkat(dir, part, AtFlags::empty())?;
    let fd = rustix::fs::openat(
        dir,
        part,
        flags | OFlags::EXCL | OFlags::CLOEXEC,
        Mode::from_raw_mode(0o600),
    )?;
    Ok((fd, 0))
}

/// Writes a whole small file under its part's name, and gives it its own.
pub(super) fn write_whole(
    dir: &OwnedFd,
    part: &[u8],
    name: &[u8],
    bytes: &[u8],
    attributes: &Attributes,
) -> rustix::io::Result<()> {
    let (fd, len) = open_part(dir, part)?;
    if len > 0 {
        rustix::fs::ftruncate(&fd, 0)?;
    }
    write_at(&fd, bytes, 0)?;
    complete(dir, part, name, &fd, attributes)
}

/// Writes all of `bytes` at `offset`.
pub(super) fn write_at(fd: &OwnedFd, bytes: &[u8], offset: u64) -> rustix::io::Result<()> {
    let mut done = 0;
    while done < bytes.len() {
        match rustix::io::pwrite(fd, &bytes[done..], offset + done as u64) {
            Ok(0) => return Err(Errno::NOSPC),
            Ok(count) => done += count,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Reads `len` bytes at `offset`, unless the file is shorter.
pub(super) fn read_at(
    fd: &OwnedFd,
    offset: u64,
    len: usize,
) -> rustix::io::Result<Option<Vec<u8>>> {
    let mut bytes = vec![0; len];
    let mut done = 0;
    while done < len {
        match rustix::io::pread(fd, &mut bytes[done..], offset + done as u64) {
            Ok(0) => return Ok(None),
            Ok(count) => done += count,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(Some(bytes))
}

/// Sets a finished file's attributes and gives it its name, in place of what had it.
pub(super) fn complete(
    dir: &OwnedFd,
    part: &[u8],
    name: &[u8],
    fd: &OwnedFd,
    attributes: &Attributes,
) -> rustix::io::Result<()> {
    set(fd, attributes)?;
    rustix::fs::renameat(dir, part, dir, name)
}

/// Makes a symbolic link, in place of what had its name, unless it is there.
pub(super) fn make_link(
    dir: &OwnedFd,
    part: &[u8],
    name: &[u8],
    target: &[u8],
    mtime: FileTime,
) -> rustix::io::Result<()> {
    let present = rustix::fs::readlinkat(dir, name, Vec::new());
    if !present.is_ok_and(|present| present.as_bytes() == target) {
        match rustix::fs::unlinkat(dir, part, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(error) => return Err(error),
        }
        rustix::fs::symlinkat(target, dir, part)?;
        rustix::fs::renameat(dir, part, dir, name)?;
    }
    let made = hold(dir, name)?;
    if rustix::fs::readlinkat(&made, "", Vec::new())?.as_bytes() != target {
        return Err(Errno::STALE);
    }
    rustix::fs::utimensat(CWD, held_path(&made), &times(mtime), AtFlags::empty())
}

fn set(fd: impl AsFd, attributes: &Attributes) -> rustix::io::Result<()> {
    for (name, value) in &attributes.xattrs {
        match rustix::fs::fsetxattr(&fd, &name[..], value, rustix::fs::XattrFlags::empty()) {
            Ok(()) => {}
            Err(Errno::NOTSUP) => {
                tracing::warn!("the destination's file system keeps no extended attributes");
                break;
            }
            Err(error) => return Err(error),
        }
    }
    rustix::fs::fchmod(&fd, Mode::from_raw_mode(attributes.mode))?;
    rustix::fs::futimens(&fd, &times(attributes.mtime))
}

fn times(mtime: FileTime) -> Timestamps {
    let mtime = Timespec { tv_sec: mtime.secs, tv_nsec: mtime.nanos.into() };
    Timestamps { last_access: mtime, last_modification: mtime }
}
