//! The words of [`FileSystem`](crate::FileSystem): numbers, attributes, errors.

use std::fmt;
use std::io;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;

use crate::caller::Caller;

/// The longest file name, in bytes (Linux `NAME_MAX`).
pub const MAX_NAME_BYTES: usize = 255;

/// The greatest cookie of a directory entry. Front ends number `.` and `..` themselves
/// and Linux keeps directory offsets in signed 64 bits.
pub const MAX_COOKIE: u64 = (1 << 62) - 1;

/// Names a file within one file system, for as long as a lookup of it is held.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct InodeNumber(pub u64);

impl InodeNumber {
    /// The root directory.
    pub const ROOT: InodeNumber = InodeNumber(1);
}

/// Names an open file or directory.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Handle(pub u64);

impl Handle {
    /// For file systems that keep nothing per open.
    pub const NONE: Handle = Handle(0);
}

/// Flags of an inode, as Linux numbers them for `FS_IOC_GETFLAGS`; `chattr(1)` sets and
/// `lsattr(1)` lists them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct InodeFlags(pub u32);

impl InodeFlags {
    /// Writes are synchronous.
    pub const SYNC: u32 = 0x8;
    /// Nothing about the file may be changed, and it may not be linked or removed.
    pub const IMMUTABLE: u32 = 0x10;
    /// The file may only grow; a directory may only gain names.
    pub const APPEND_ONLY: u32 = 0x20;
    /// `dump(8)` leaves the file out.
    pub const NO_DUMP: u32 = 0x40;
    /// Reads do not change the access time.
    pub const NO_ATIME: u32 = 0x80;

    /// Whether any flag of `flags` is set.
    pub fn has(self, flags: u32) -> bool {
        self.0 & flags != 0
    }
}

/// What a name stands for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, PartialOrd, Ord)]
pub enum FileKind {
    /// A regular file.
    Regular,
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink,
    /// A FIFO.
    Fifo,
    /// A socket.
    Socket,
    /// A character device.
    CharDevice,
    /// A block device.
    BlockDevice,
}

/// A time of a file; may lie before 1970.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Hash)]
pub struct FileTime {
    /// Whole seconds since 1970.
    pub secs: i64,
    /// Nanoseconds after them, below 1,000,000,000.
    pub nanos: u32,
}

impl FileTime {
    /// The time as the standard library has it; clamped to what that can hold.
    pub fn to_system_time(self) -> SystemTime {
        let nanos = Duration::from_nanos(u64::from(self.nanos.min(999_999_999)));
        let whole = Duration::from_secs(self.secs.unsigned_abs());
        let time = if self.secs >= 0 {
            UNIX_EPOCH.checked_add(whole)
        } else {
            UNIX_EPOCH.checked_sub(whole)
        };
        time.and_then(|t| t.checked_add(nanos)).unwrap_or(UNIX_EPOCH)
    }

    /// The time so many milliseconds after the beginning of 1970.
    pub fn from_unix_ms(ms: u64) -> FileTime {
        let secs = i64::try_from(ms / 1000).unwrap_or(i64::MAX);
        FileTime { secs, nanos: u32::try_from(ms % 1000).expect("below 1000") * 1_000_000 }
    }

    /// The time the standard library says; clamped to what 64 bits of seconds can hold.
    pub fn from_system_time(time: SystemTime) -> FileTime {
        match time.duration_since(UNIX_EPOCH) {
            Ok(after) => FileTime {
                secs: i64::try_from(after.as_secs()).unwrap_or(i64::MAX),
                nanos: after.subsec_nanos(),
            },
            Err(error) => {
                let before = error.duration();
                let secs = i64::try_from(before.as_secs()).map_or(i64::MIN, |s| -s);
                match before.subsec_nanos() {
                    0 => FileTime { secs, nanos: 0 },
                    nanos => {
                        FileTime { secs: secs.saturating_sub(1), nanos: 1_000_000_000 - nanos }
                    }
                }
            }
        }
    }
}

/// The attributes of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Attr {
    /// Which file.
    pub inode: InodeNumber,
    /// What it is.
    pub kind: FileKind,
    /// Permission bits, with set-id and sticky bits: `0o7777` at most.
    pub mode: u32,
    /// Number of names.
    pub nlink: u32,
    /// Owner.
    pub uid: u32,
    /// Owning group.
    pub gid: u32,
    /// Device number, for devices.
    pub rdev: u64,
    /// Length, bytes.
    pub size_bytes: u64,
    /// Space taken, in units of 512 bytes; holes take none.
    pub blocks_512: u64,
    /// Preferred size of reads and writes, bytes.
    pub block_size_bytes: u32,
    /// Last access.
    pub atime: FileTime,
    /// Last change of contents.
    pub mtime: FileTime,
    /// Last change of contents or attributes.
    pub ctime: FileTime,
}

/// A file found by name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entry {
    /// Its attributes; `attr.inode` is its number.
    pub attr: Attr,
    /// How often the number was used for another file before.
    pub generation: u64,
    /// How long the name may be taken to mean this file.
    pub name_ttl: Duration,
    /// How long the attributes may be taken to be these.
    pub attr_ttl: Duration,
}

/// Attributes and how long they may be believed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AttrReply {
    /// The attributes.
    pub attr: Attr,
    /// How long they may be believed.
    pub ttl: Duration,
}

/// Which attributes to change.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SetAttr {
    /// New permission bits.
    pub mode: Option<u32>,
    /// New owner.
    pub uid: Option<u32>,
    /// New group.
    pub gid: Option<u32>,
    /// New length: truncates or extends with a hole.
    pub size_bytes: Option<u64>,
    /// New access time.
    pub atime: Option<SetTime>,
    /// New modification time.
    pub mtime: Option<SetTime>,
}

/// A time to set.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SetTime {
    /// The file system's idea of now.
    Now,
    /// This time.
    To(FileTime),
}

/// The writer of some bytes, and where they go.
#[derive(Clone, Copy, Debug)]
pub enum Writer {
    /// A program's, at the offset.
    At(Caller),
    /// A program's that appends: at the end, wherever that is by now. That a file was opened with
    /// [`OpenFlags::APPEND`] says it at first; `fcntl(2)` changes it later.
    AtEnd(Caller),
    /// A client's of the front end, at the offset. It may keep the bytes in a cache, and may have
    /// told a program that they are written: what is refused only for now is refused with
    /// [`Errno::EAGAIN`], after which the client sends them again.
    Cached(Caller),
    /// A page of a memory mapping, which the front end writes back at the offset. It does not know
    /// who changed the page; the handle is any that may write.
    Mapping,
}

/// How a file is opened: the flags of `open(2)`, as Linux numbers them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct OpenFlags(pub i32);

impl OpenFlags {
    /// `O_RDONLY`.
    pub const READ: OpenFlags = OpenFlags(0);
    /// `O_WRONLY`.
    pub const WRITE: OpenFlags = OpenFlags(1);
    /// `O_RDWR`.
    pub const READ_WRITE: OpenFlags = OpenFlags(2);
    /// `O_EXCL`.
    pub const EXCLUSIVE: i32 = 0o200;
    /// `O_TRUNC`.
    pub const TRUNCATE: i32 = 0o1000;
    /// `O_APPEND`.
    pub const APPEND: i32 = 0o2000;

    /// Whether the file may be written through this open.
    pub fn writes(self) -> bool {
        self.0 & 3 != 0
    }

    /// Whether the file may be read through this open.
    pub fn reads(self) -> bool {
        self.0 & 3 != 1
    }

    /// Whether `flag` is set.
    pub fn has(self, flag: i32) -> bool {
        self.0 & flag != 0
    }
}

/// `FALLOC_FL_KEEP_SIZE` of `fallocate(2)`: the file does not become longer.
pub const FALLOC_KEEP_SIZE: i32 = 0x1;
/// `FALLOC_FL_PUNCH_HOLE`: the range becomes a hole; with [`FALLOC_KEEP_SIZE`] only.
pub const FALLOC_PUNCH_HOLE: i32 = 0x2;
/// `FALLOC_FL_ZERO_RANGE`: the range becomes zeros that have space.
pub const FALLOC_ZERO_RANGE: i32 = 0x10;

/// What to look for in a sparse file (`lseek(2)` with `SEEK_DATA`, `SEEK_HOLE`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SeekTo {
    /// The next data.
    Data,
    /// The next hole.
    Hole,
}

/// Flags of `renameat2(2)`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RenameFlags {
    /// Fail if the new name exists.
    pub no_replace: bool,
    /// Swap the two names.
    pub exchange: bool,
}

/// Flags of `setxattr(2)`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct XattrFlags {
    /// Fail if the attribute exists.
    pub create: bool,
    /// Fail if the attribute does not exist.
    pub replace: bool,
}

/// What `open` says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Opened {
    /// The open file.
    pub handle: Handle,
    /// What the kernel cached of this file's contents at earlier opens is still true.
    pub keep_cache: bool,
    /// The kernel must not cache at all.
    pub direct_io: bool,
}

/// One entry of a directory listing.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DirEntry {
    /// The name.
    pub name: Bytes,
    /// What it stands for.
    pub kind: FileKind,
    /// Its number (not a counted lookup unless `entry` is present).
    pub inode: InodeNumber,
    /// Where to go on after this entry.
    pub cookie: u64,
    /// The whole entry, when asked for; none if its attributes cannot be read. The name is
    /// listed all the same, or a backup would leave the file out and say nothing: a lookup of
    /// it fails with the reason.
    pub entry: Option<Entry>,
}

/// Sizes, counts and limits of a file system.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StatFs {
    /// Unit of the block counts, bytes.
    pub block_size_bytes: u32,
    /// Blocks in all.
    pub blocks: u64,
    /// Blocks free.
    pub blocks_free: u64,
    /// Blocks free to ordinary users.
    pub blocks_available: u64,
    /// Files in all.
    pub files: u64,
    /// Files that could still be made.
    pub files_free: u64,
    /// Longest name, bytes.
    pub max_name_bytes: u32,
    /// Most names of a file.
    pub max_links: u32,
    /// Longest file, bytes; at most `i64::MAX`.
    pub max_file_bytes: u64,
    /// The unit in which times that are set are kept.
    pub time_granularity: Duration,
}

impl Default for StatFs {
    /// Nothing is counted. Names as long as they may be, one for each file; files as long as Linux' offsets reach; times to the
    /// nanosecond.
    fn default() -> StatFs {
        StatFs {
            block_size_bytes: 0,
            blocks: 0,
            blocks_free: 0,
            blocks_available: 0,
            files: 0,
            files_free: 0,
            max_name_bytes: MAX_NAME_BYTES as u32,
            max_links: 1,
            max_file_bytes: i64::MAX as u64,
            time_granularity: Duration::from_nanos(1),
        }
    }
}

/// Checks a name that comes from outside.
pub fn check_name(name: &[u8]) -> Result<(), Errno> {
    if name.is_empty()
        || name == b"."
        || name == b".."
        || name.iter().any(|b| matches!(b, 0 | b'/'))
    {
        return Err(Errno::EINVAL);
    }
    if name.len() > MAX_NAME_BYTES {
        return Err(Errno::ENAMETOOLONG);
    }
    Ok(())
}

/// Why a call failed, as Linux numbers it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Errno(pub i32);

macro_rules! errnos {
    ($($name:ident = $number:literal, $text:literal;)*) => {
        impl Errno {
            $(#[doc = $text] pub const $name: Errno = Errno($number);)*

            fn known(self) -> Option<(&'static str, &'static str)> {
                match self.0 {
                    $($number => Some((stringify!($name), $text)),)*
                    _ => None,
                }
            }
        }
    };
}

impl Errno {
    /// The error that another machine calls by this number; [`Errno::EIO`] for one that is not in this crate's table.
    pub fn from_number(number: i32) -> Errno {
        let errno = Errno(number);
        if errno.known().is_some() { errno } else { Errno::EIO }
    }
}

errnos! {
    EPERM = 1, "Operation not permitted";
    ENOENT = 2, "No such file or directory";
    EINTR = 4, "Interrupted system call";
    EIO = 5, "Input/output error";
    ENXIO = 6, "No such device or address";
    E2BIG = 7, "Argument list too long";
    EBADF = 9, "Bad file descriptor";
    EAGAIN = 11, "Resource temporarily unavailable";
    ENOMEM = 12, "Cannot allocate memory";
    EACCES = 13, "Permission denied";
    EBUSY = 16, "Device or resource busy";
    EEXIST = 17, "File exists";
    EXDEV = 18, "Invalid cross-device link";
    ENOTDIR = 20, "Not a directory";
    EISDIR = 21, "Is a directory";
    EINVAL = 22, "Invalid argument";
    ENFILE = 23, "Too many open files in system";
    EMFILE = 24, "Too many open files";
    ENOTTY = 25, "Inappropriate ioctl for device";
    EFBIG = 27, "File too large";
    ENOSPC = 28, "No space left on device";
    EROFS = 30, "Read-only file system";
    EMLINK = 31, "Too many links";
    ERANGE = 34, "Numerical result out of range";
    ENAMETOOLONG = 36, "File name too long";
    ENOLCK = 37, "No locks available";
    ENOSYS = 38, "Function not implemented";
    ENOTEMPTY = 39, "Directory not empty";
    ELOOP = 40, "Too many levels of symbolic links";
    ENODATA = 61, "No data available";
    EPROTO = 71, "Protocol error";
    EOVERFLOW = 75, "Value too large for defined data type";
    EOPNOTSUPP = 95, "Operation not supported";
    ETIMEDOUT = 110, "Connection timed out";
    EHOSTUNREACH = 113, "No route to host";
    ESTALE = 116, "Stale file handle";
    EDQUOT = 122, "Disk quota exceeded";
}

impl fmt::Debug for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.known() {
            Some((name, _)) => f.write_str(name),
            None => write!(f, "Errno({})", self.0),
        }
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.known() {
            Some((_, text)) => f.write_str(text),
            None => write!(f, "error {}", self.0),
        }
    }
}

impl std::error::Error for Errno {}

impl From<Errno> for io::Error {
    fn from(errno: Errno) -> io::Error {
        io::Error::from_raw_os_error(errno.0)
    }
}

impl From<io::Error> for Errno {
    fn from(error: io::Error) -> Errno {
        error.raw_os_error().map_or(Errno::EIO, Errno)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_before_1970_keep_their_nanoseconds() {
        for (secs, nanos) in
            [(0, 0), (0, 1), (-1, 999_999_999), (-1, 0), (-2, 1), (1 << 33, 5), (-(1 << 33), 7)]
        {
            let time = FileTime { secs, nanos };
            assert_eq!(FileTime::from_system_time(time.to_system_time()), time);
        }
    }

    #[test]
    fn times_beyond_the_standard_library_do_not_panic() {
        for secs in [i64::MIN, i64::MAX] {
            for nanos in [0, 999_999_999, u32::MAX] {
                let _ = FileTime { secs, nanos }.to_system_time();
            }
        }
    }

    #[test]
    fn names_that_no_directory_may_hold_are_refused() {
        for name in [&b""[..], b".", b"..", b"a/b", b"a\0b", b"/", &[0]] {
            assert_eq!(check_name(name), Err(Errno::EINVAL), "{name:?}");
        }
        assert_eq!(check_name(&[b'x'; 256]), Err(Errno::ENAMETOOLONG));
        for name in [&[b'x'; 255][..], b"...", b"-", b" ", b"\n", &[0xff]] {
            assert_eq!(check_name(name), Ok(()), "{name:?}");
        }
    }
}
