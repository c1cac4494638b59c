//! A real disk: a directory of this machine.
//!
//! Calls that read and change names and attributes, or write bytes, are made at once, on the thread that asks: they end in memory. Those
//! that wait for the device by their nature ([`Disk::sync_all`]) have a thread of their own; [`Disk::sync_file`], and [`Disk::read`] of bytes that
//! are not in memory, block their thread, from which other tasks are taken away before.
//!
//! A file on another file system than D (a mount below it) is refused with [`Errno::EXDEV`]: its inode numbers are another's.

use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use atoll_vfs::{Errno, FileKind, FileTime, RenameFlags, SeekTo, StatFs, XattrFlags};
use bytes::Bytes;
use rustix::fs::{self as sys, AtFlags, Mode, OFlags, StatxFlags};

use super::{DatabaseFile, Disk, DiskResult, Listed, Making, Stat, TimeToSet};

/// Bytes of a buffer for names of a directory.
const LISTING_BYTES: usize = 64 << 10;
/// The longest value of an extended attribute (Linux `XATTR_SIZE_MAX`), and of the list of their names.
const XATTR_BYTES: usize = 64 << 10;
/// Most open nodes, whatever the system allows.
const MAX_NODES: u64 = 1 << 16;
/// What a process needs beside nodes: sockets, open files, a database.
const OTHER_DESCRIPTORS: u64 = 256;

/// See the module.
#[derive(Debug)]
pub struct Directory {
    top: Arc<OwnedFd>,
    device: (u32, u32),
    max_nodes: usize,
    boot: u64,
    /// D, open to be synced: when there are no descriptors left it must still be possible.
    synced: Arc<OwnedFd>,
    locks: Mutex<Vec<OwnedFd>>,
    /// How many share the room of its file system.
    sharers: Arc<AtomicUsize>,
    /// Files are opened for reading alone.
    only_reads: bool,
}

impl Directory {
    /// The directory at `path`.
    pub fn open(path: &Path) -> io::Result<Directory> {
        let top =
            sys::open(path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        let found = sys::statx(&top, "", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let synced = Arc::new(sys::openat(&top, ".", flags, Mode::empty())?);
        Ok(Directory {
            top: Arc::new(top),
            device: (found.stx_dev_major, found.stx_dev_minor),
            max_nodes: raise_descriptors(),
            boot: boot_of_this_machine(),
            synced,
            locks: Mutex::default(),
            sharers: Arc::new(AtomicUsize::new(1)),
            only_reads: false,
        })
    }

    /// The same directory, whose files are opened for reading alone, and keep their access times where the kernel lets this process ask for that.
    #[must_use]
    pub fn for_reading(self) -> Directory {
        Directory { only_reads: true, ..self }
    }

    /// The number of its file system on this machine.
    pub fn device(&self) -> u64 {
        sys::makedev(self.device.0, self.device.1)
    }

    /// A directory of the same file system that need not be below this one; [`Errno::EXDEV`] if no file can be renamed from there to here: it is
    /// on another file system, or seen through another mount.
    pub fn beside(&self, path: &Path) -> DiskResult<Arc<OwnedFd>> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = sys::open(path, flags, Mode::empty()).map_err(errno)?;
        self.statx(dir.as_fd(), b"")?;
        let mount = |dir: &OwnedFd| {
            let found = sys::statx(dir, "", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID);
            // A kernel that does not say it refuses to rename.
            found.map(|found| found.stx_mnt_id).map_err(errno)
        };
        match mount(&dir)? == mount(&self.top)? {
            true => Ok(Arc::new(dir)),
            false => Err(Errno::EXDEV),
        }
    }

    /// The same directory, as one of so many that share a file system: each says that it has an equal part of the room, so that the sum
    /// of all is no more than there is.
    #[must_use]
    pub fn shared_by(self, sharers: Arc<AtomicUsize>) -> Directory {
        Directory { sharers, ..self }
    }

    fn statx(&self, dir: BorrowedFd<'_>, name: &[u8]) -> DiskResult<Stat> {
        let flags = match name.is_empty() {
            true => AtFlags::EMPTY_PATH,
            false => AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT,
        };
        let wanted = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
        let found = sys::statx(dir, name, flags, wanted).map_err(errno)?;
        if (found.stx_dev_major, found.stx_dev_minor) != self.device {
            return Err(Errno::EXDEV);
        }
        let kind = kind_of(sys::FileType::from_raw_mode(u32::from(found.stx_mode)));
        let time = |time: sys::StatxTimestamp| FileTime { secs: time.tv_sec, nanos: time.tv_nsec };
        let born = found.stx_btime;
        let knows_birth = found.stx_mask & StatxFlags::BTIME.bits() != 0;
        Ok(Stat {
            ino: found.stx_ino,
            generation: match knows_birth {
                true => (born.tv_sec as u64)
                    .wrapping_mul(1_000_000_000)
                    .wrapping_add(born.tv_nsec.into()),
                false => 0,
            },
            kind: kind.ok_or(Errno::EIO)?,
            mode: u32::from(found.stx_mode) & 0o7777,
            nlink: found.stx_nlink,
            uid: found.stx_uid,
            gid: found.stx_gid,
            rdev: sys::makedev(found.stx_rdev_major, found.stx_rdev_minor),
            size_bytes: found.stx_size,
            blocks_512: found.stx_blocks,
            block_size_bytes: found.stx_blksize,
            atime: time(found.stx_atime),
            mtime: time(found.stx_mtime),
            ctime: time(found.stx_ctime),
        })
    }
}

/// Waits for the device. Other tasks of this thread go on elsewhere, where there are other threads: a node has peers to answer.
#[allow(clippy::disallowed_methods, reason = "a real disk runs only for real")]
fn waiting_for_device<T>(work: impl FnOnce() -> T) -> T {
    use tokio::runtime::{Handle, RuntimeFlavor};
    match Handle::try_current().map(|handle| handle.runtime_flavor()) {
        Ok(RuntimeFlavor::MultiThread) => tokio::task::block_in_place(work),
        _ => work(),
    }
}

/// Reads what is in memory; returns how much that is, from the beginning on.
fn read_cached(file: &File, out: &mut [u8], offset: u64) -> usize {
    let mut out = [io::IoSliceMut::new(out)];
    // A read that fails is made again, and waits for the device.
    rustix::io::preadv2(file, &mut out, offset, rustix::io::ReadWriteFlags::NOWAIT).unwrap_or(0)
}

/// Reads until `out` is full or the file ends; returns how much.
fn read_all(file: &File, out: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut filled = 0;
    while filled < out.len() {
        match file.read_at(&mut out[filled..], offset + filled as u64) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

/// Lets the process open as many files as it may; returns how many nodes fit.
fn raise_descriptors() -> usize {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: maximum, maximum };
    let limit = match setrlimit(Resource::Nofile, raised) {
        Ok(()) => maximum,
        Err(_) => current,
    };
    let nodes = limit.unwrap_or(u64::MAX).saturating_sub(OTHER_DESCRIPTORS) / 2;
    nodes.clamp(16, MAX_NODES) as usize
}

/// 64 bits of the kernel's boot id. Where it has none, each process takes itself for the first after a crash.
fn boot_of_this_machine() -> u64 {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let digits: String = id.chars().filter(char::is_ascii_hexdigit).take(16).collect();
    u64::from_str_radix(&digits, 16).unwrap_or_else(|_| u64::from(std::process::id()))
}

fn errno(error: rustix::io::Errno) -> Errno {
    Errno(error.raw_os_error())
}

fn io_errno(error: &io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::EIO, Errno)
}

fn kind_of(kind: sys::FileType) -> Option<FileKind> {
    Some(match kind {
        sys::FileType::RegularFile => FileKind::Regular,
        sys::FileType::Directory => FileKind::Directory,
        sys::FileType::Symlink => FileKind::Symlink,
        sys::FileType::Fifo => FileKind::Fifo,
        sys::FileType::Socket => FileKind::Socket,
        sys::FileType::CharacterDevice => FileKind::CharDevice,
        sys::FileType::BlockDevice => FileKind::BlockDevice,
        sys::FileType::Unknown => return None,
    })
}

/// The path by which the kernel finds an open node, for calls that take none by its descriptor. It leads to the node itself,
/// also if that is a symbolic link.
fn path_of(node: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", node.as_raw_fd())
}

fn timespec(time: Option<TimeToSet>) -> sys::Timespec {
    match time {
        None => sys::Timespec { tv_sec: 0, tv_nsec: sys::UTIME_OMIT },
        Some(TimeToSet::Now) => sys::Timespec { tv_sec: 0, tv_nsec: sys::UTIME_NOW },
        Some(TimeToSet::To(time)) => {
            sys::Timespec { tv_sec: time.secs, tv_nsec: time.nanos.min(999_999_999).into() }
        }
    }
}

impl Disk for Directory {
    type Node = Arc<OwnedFd>;
    type File = Arc<File>;

    fn top(&self) -> Arc<OwnedFd> {
        self.top.clone()
    }

    fn boot(&self) -> u64 {
        self.boot
    }

    fn now(&self) -> FileTime {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::RealtimeCoarse);
        FileTime { secs: now.tv_sec, nanos: u32::try_from(now.tv_nsec).unwrap_or(0) }
    }

    fn max_nodes(&self) -> usize {
        self.max_nodes
    }

    async fn node(&self, dir: &Arc<OwnedFd>, name: &[u8]) -> DiskResult<Arc<OwnedFd>> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(Arc::new(sys::openat(dir, name, flags, Mode::empty()).map_err(errno)?))
    }

    async fn stat(&self, node: &Arc<OwnedFd>) -> DiskResult<Stat> {
        self.statx(node.as_fd(), b"")
    }

    async fn stat_at(&self, dir: &Arc<OwnedFd>, name: &[u8]) -> DiskResult<Stat> {
        self.statx(dir.as_fd(), name)
    }

    async fn make(
        &self,
        dir: &Arc<OwnedFd>,
        name: &[u8],
        making: Making<'_>,
        mode: u32,
    ) -> DiskResult<()> {
        let mode = Mode::from_raw_mode(mode);
        match making {
            Making::File => sys::mknodat(dir, name, sys::FileType::RegularFile, mode, 0),
            Making::Directory => sys::mkdirat(dir, name, mode),
            Making::Symlink(target) => sys::symlinkat(target, dir, name),
            Making::Special(kind, rdev) => {
                let kind = match kind {
                    FileKind::Fifo => sys::FileType::Fifo,
                    FileKind::Socket => sys::FileType::Socket,
                    FileKind::CharDevice => sys::FileType::CharacterDevice,
                    FileKind::BlockDevice => sys::FileType::BlockDevice,
                    FileKind::Regular | FileKind::Directory | FileKind::Symlink => {
                        return Err(Errno::EINVAL);
                    }
                };
                sys::mknodat(dir, name, kind, mode, rdev)
            }
        }
        .map_err(errno)
    }

    async fn link(&self, node: &Arc<OwnedFd>, dir: &Arc<OwnedFd>, name: &[u8]) -> DiskResult<()> {
        sys::linkat(sys::CWD, path_of(node), dir, name, AtFlags::SYMLINK_FOLLOW).map_err(errno)
    }

    async fn rename(
        &self,
        (dir, name): (&Arc<OwnedFd>, &[u8]),
        (new_dir, new_name): (&Arc<OwnedFd>, &[u8]),
        flags: RenameFlags,
    ) -> DiskResult<()> {
        let mut how = sys::RenameFlags::empty();
        how.set(sys::RenameFlags::NOREPLACE, flags.no_replace);
        how.set(sys::RenameFlags::EXCHANGE, flags.exchange);
        match how.is_empty() {
            true => sys::renameat(dir, name, new_dir, new_name),
            false => sys::renameat_with(dir, name, new_dir, new_name, how),
        }
        .map_err(errno)
    }

    async fn unlink(&self, dir: &Arc<OwnedFd>, name: &[u8]) -> DiskResult<()> {
        sys::unlinkat(dir, name, AtFlags::empty()).map_err(errno)
    }

    async fn rmdir(&self, dir: &Arc<OwnedFd>, name: &[u8]) -> DiskResult<()> {
        sys::unlinkat(dir, name, AtFlags::REMOVEDIR).map_err(errno)
    }

    async fn list(&self, dir: &Arc<OwnedFd>) -> DiskResult<Vec<Listed>> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let open = sys::openat(dir, ".", flags, Mode::empty()).map_err(errno)?;
        let mut buffer = vec![MaybeUninit::uninit(); LISTING_BYTES];
        let mut raw = sys::RawDir::new(open, &mut buffer);
        let mut all = Vec::new();
        while let Some(entry) = raw.next() {
            let entry = entry.map_err(errno)?;
            let name = entry.file_name().to_bytes();
            if name == b"." || name == b".." {
                continue;
            }
            let kind = match kind_of(entry.file_type()) {
                Some(kind) => kind,
                // File systems that do not say.
                None => match self.statx(dir.as_fd(), name) {
                    Ok(found) => found.kind,
                    Err(Errno::ENOENT) => continue,
                    Err(errno) => return Err(errno),
                },
            };
            all.push(Listed { name: Bytes::copy_from_slice(name), kind, ino: entry.ino() });
        }
        Ok(all)
    }

    async fn read_link(&self, dir: &Arc<OwnedFd>, name: &[u8]) -> DiskResult<Bytes> {
        let target = sys::readlinkat(dir, name, Vec::new()).map_err(errno)?;
        Ok(target.into_bytes().into())
    }

    async fn read_node(&self, node: &Arc<OwnedFd>) -> DiskResult<Bytes> {
        self.read_link(node, b"").await
    }

    async fn set_mode(&self, node: &Arc<OwnedFd>, mode: u32) -> DiskResult<()> {
        sys::chmod(path_of(node), Mode::from_raw_mode(mode)).map_err(errno)
    }

    async fn set_owner(
        &self,
        node: &Arc<OwnedFd>,
        uid: Option<u32>,
        gid: Option<u32>,
    ) -> DiskResult<()> {
        let (uid, gid) = (uid.map(sys::Uid::from_raw), gid.map(sys::Gid::from_raw));
        sys::chownat(node, "", uid, gid, AtFlags::EMPTY_PATH).map_err(errno)
    }

    async fn set_times(
        &self,
        node: &Arc<OwnedFd>,
        atime: Option<TimeToSet>,
        mtime: Option<TimeToSet>,
    ) -> DiskResult<()> {
        let times =
            sys::Timestamps { last_access: timespec(atime), last_modification: timespec(mtime) };
        sys::utimensat(node, "", &times, AtFlags::EMPTY_PATH).map_err(errno)
    }

    async fn xattr(&self, node: &Arc<OwnedFd>, name: &[u8]) -> DiskResult<Bytes> {
        let mut small = [0; 256];
        let path = path_of(node);
        match sys::getxattr(&*path, name, &mut small[..]) {
            Ok(len) => return Ok(Bytes::copy_from_slice(&small[..len])),
            Err(rustix::io::Errno::RANGE) => {}
            Err(error) => return Err(errno(error)),
        }
        let mut value = vec![0; XATTR_BYTES];
        let len = sys::getxattr(&*path, name, &mut value[..]).map_err(errno)?;
        value.truncate(len);
        Ok(value.into())
    }

    async fn xattrs(&self, node: &Arc<OwnedFd>) -> DiskResult<Vec<Bytes>> {
        let mut list = vec![0; XATTR_BYTES];
        let len = sys::listxattr(path_of(node), &mut list[..]).map_err(errno)?;
        let names = list[..len].split(|byte| *byte == 0).filter(|name| !name.is_empty());
        Ok(names.map(Bytes::copy_from_slice).collect())
    }

    async fn set_xattr(
        &self,
        node: &Arc<OwnedFd>,
        name: &[u8],
        value: &[u8],
        flags: XattrFlags,
    ) -> DiskResult<()> {
        let mut how = sys::XattrFlags::empty();
        how.set(sys::XattrFlags::CREATE, flags.create);
        how.set(sys::XattrFlags::REPLACE, flags.replace);
        sys::setxattr(path_of(node), name, value, how).map_err(errno)
    }

    async fn remove_xattr(&self, node: &Arc<OwnedFd>, name: &[u8]) -> DiskResult<()> {
        sys::removexattr(path_of(node), name).map_err(errno)
    }

    async fn open(&self, node: &Arc<OwnedFd>) -> DiskResult<Arc<File>> {
        let open = |flags| {
            sys::open(path_of(node), flags | OFlags::CLOEXEC | OFlags::NONBLOCK, Mode::empty())
        };
        let file = match open(if self.only_reads { OFlags::NOATIME } else { OFlags::RDWR }) {
            // Immutable, or on a file system that is read-only: reading is still possible.
            Err(rustix::io::Errno::PERM | rustix::io::Errno::ACCESS | rustix::io::Errno::ROFS) => {
                open(OFlags::RDONLY)
            }
            other => other,
        };
        Ok(Arc::new(File::from(file.map_err(errno)?)))
    }

    async fn stat_file(&self, file: &Arc<File>) -> DiskResult<Stat> {
        self.statx(file.as_fd(), b"")
    }

    async fn read(&self, file: &Arc<File>, offset: u64, len: usize) -> DiskResult<Bytes> {
        let size = file.metadata().map_err(|error| io_errno(&error))?.len();
        let len = usize::try_from(size.saturating_sub(offset)).unwrap_or(usize::MAX).min(len);
        let mut bytes = vec![0; len];
        let filled = read_cached(file, &mut bytes, offset);
        let rest = || read_all(file, &mut bytes[filled..], offset + filled as u64);
        let filled = match filled == len {
            true => filled,
            false => filled + waiting_for_device(rest).map_err(|error| io_errno(&error))?,
        };
        bytes.truncate(filled);
        Ok(bytes.into())
    }

    async fn write(&self, file: &Arc<File>, offset: u64, data: &[u8]) -> DiskResult<usize> {
        let mut written = 0;
        while written < data.len() {
            match file.write_at(&data[written..], offset + written as u64) {
                Ok(0) => break,
                Ok(count) => written += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if written == 0 => return Err(io_errno(&error)),
                Err(_) => break,
            }
        }
        Ok(written)
    }

    async fn set_len(&self, file: &Arc<File>, size_bytes: u64) -> DiskResult<()> {
        sys::ftruncate(file, size_bytes).map_err(errno)
    }

    async fn allocate(&self, file: &Arc<File>, mode: i32, offset: u64, len: u64) -> DiskResult<()> {
        let mode = u32::try_from(mode).map_err(|_| Errno::EOPNOTSUPP)?;
        let mode = sys::FallocateFlags::from_bits(mode).ok_or(Errno::EOPNOTSUPP)?;
        sys::fallocate(file, mode, offset, len).map_err(errno)
    }

    async fn seek(&self, file: &Arc<File>, offset: u64, to: SeekTo) -> DiskResult<u64> {
        let to = match to {
            SeekTo::Data => sys::SeekFrom::Data(offset),
            SeekTo::Hole => sys::SeekFrom::Hole(offset),
        };
        sys::seek(file, to).map_err(errno)
    }

    async fn sync_file(&self, file: &Arc<File>, data_only: bool) -> DiskResult<()> {
        let sync = || match data_only {
            true => file.sync_data(),
            false => file.sync_all(),
        };
        waiting_for_device(sync).map_err(|error| io_errno(&error))
    }

    async fn sync_all(&self) -> DiskResult<()> {
        let (done, synced) = futures_channel::oneshot::channel();
        let open = self.synced.clone();
        let work = move || {
            let _ = done.send(sys::syncfs(&open).map_err(errno));
        };
        if std::thread::Builder::new().name("atoll-syncfs".into()).spawn(work).is_err() {
            // No thread is left: the caller waits.
            return sys::syncfs(&self.synced).map_err(errno);
        }
        synced.await.unwrap_or(Err(Errno::EIO))
    }

    async fn stat_fs(&self) -> DiskResult<StatFs> {
        let found = sys::fstatvfs(&self.top).map_err(errno)?;
        let unit = u32::try_from(found.f_frsize).unwrap_or(4096);
        let sharers = self.sharers.load(Ordering::Relaxed).max(1) as u64;
        Ok(StatFs {
            block_size_bytes: unit,
            blocks: found.f_blocks / sharers,
            blocks_free: found.f_bfree / sharers,
            blocks_available: found.f_bavail / sharers,
            files: found.f_files / sharers,
            files_free: found.f_ffree / sharers,
            max_name_bytes: u32::try_from(found.f_namemax).unwrap_or(255).min(255),
            max_links: 32_000,
            ..StatFs::default()
        })
    }

    async fn database(&self, dir: &Arc<OwnedFd>, name: &[u8]) -> DiskResult<Arc<dyn DatabaseFile>> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = sys::openat(dir, name, flags, Mode::RUSR | Mode::WUSR).map_err(errno)?;
        Ok(Arc::new(File::from(file)))
    }

    async fn lock(&self, dir: &Arc<OwnedFd>, name: &[u8]) -> DiskResult<()> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = sys::openat(dir, name, flags, Mode::RUSR | Mode::WUSR).map_err(errno)?;
        sys::flock(&file, sys::FlockOperation::NonBlockingLockExclusive).map_err(errno)?;
        self.locks.lock().expect("no holder of this lock panics").push(file);
        Ok(())
    }
}

impl DatabaseFile for File {
    fn size(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.read_exact_at(out, offset)
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.write_all_at(data, offset)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        File::set_len(self, len)
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_data()
    }
}
