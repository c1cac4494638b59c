//! Between the words of `vfs` and those of the FUSE protocol.

use std::time::{SystemTime, UNIX_EPOCH};

use atoll_vfs::{Attr, Caller, Errno, FileKind, FileTime, Groups, OpenFlags, SetTime, Writer};

use super::groups;

/// Replies with an error outside of this are refused by the kernel, and the process that
/// asked would wait for ever.
const KERNEL_ERRNOS: std::ops::RangeInclusive<i32> = 1..=511;

pub(super) fn errno(errno: Errno) -> fuser::Errno {
    let number = if KERNEL_ERRNOS.contains(&errno.0) { errno.0 } else { Errno::EIO.0 };
    fuser::Errno::from_i32(number)
}

pub(super) fn caller(request: &fuser::Request) -> Caller {
    let groups = Groups::OnDemand(groups::of_process);
    Caller { uid: request.uid(), gid: request.gid(), pid: request.pid(), umask: 0, groups }
}

/// The caller of a request that creates a file, with its umask. The kernel applies the umask to the
/// mode itself unless the file system has access control lists.
pub(super) fn maker(request: &fuser::Request, umask: u32) -> Caller {
    Caller { umask, ..caller(request) }
}

/// The writer, and where it writes: `flags` are those of the open file by now (`F_SETFL`).
pub(super) fn writer(
    request: &fuser::Request,
    kind: fuser::WriteFlags,
    flags: fuser::OpenFlags,
) -> Writer {
    if kind.contains(fuser::WriteFlags::FUSE_WRITE_CACHE) {
        Writer::Mapping
    } else if OpenFlags(flags.0).has(OpenFlags::APPEND) {
        Writer::AtEnd(caller(request))
    } else {
        Writer::At(caller(request))
    }
}

pub(super) fn kind(kind: FileKind) -> fuser::FileType {
    match kind {
        FileKind::Regular => fuser::FileType::RegularFile,
        FileKind::Directory => fuser::FileType::Directory,
        FileKind::Symlink => fuser::FileType::Symlink,
        FileKind::Fifo => fuser::FileType::NamedPipe,
        FileKind::Socket => fuser::FileType::Socket,
        FileKind::CharDevice => fuser::FileType::CharDevice,
        FileKind::BlockDevice => fuser::FileType::BlockDevice,
    }
}

/// The kind in the upper bits of a mode, as `mknod(2)` gives it.
pub(super) fn kind_of_mode(mode: u32) -> Result<FileKind, Errno> {
    match mode & 0o170_000 {
        0 | 0o100_000 => Ok(FileKind::Regular),
        0o010_000 => Ok(FileKind::Fifo),
        0o140_000 => Ok(FileKind::Socket),
        0o020_000 => Ok(FileKind::CharDevice),
        0o060_000 => Ok(FileKind::BlockDevice),
        _ => Err(Errno::EINVAL),
    }
}

pub(super) fn attr(attr: &Attr) -> fuser::FileAttr {
    fuser::FileAttr {
        ino: fuser::INodeNo(attr.inode.0),
        // The kernel takes a size beyond its signed range for a broken file system.
        size: attr.size_bytes.min(i64::MAX as u64),
        blocks: attr.blocks_512,
        atime: attr.atime.to_system_time(),
        mtime: attr.mtime.to_system_time(),
        ctime: attr.ctime.to_system_time(),
        crtime: UNIX_EPOCH,
        kind: kind(attr.kind),
        perm: (attr.mode & 0o7777) as u16,
        nlink: attr.nlink,
        uid: attr.uid,
        gid: attr.gid,
        rdev: attr.rdev as u32,
        blksize: attr.block_size_bytes,
        flags: 0,
    }
}

/// fuser 0.18 reads the kernel's (seconds, nanoseconds) of a time before 1970 as
/// `epoch - (|seconds| + nanoseconds)`, where the nanoseconds count forwards. This takes
/// its result apart the same way, so that the kernel's pair comes out.
pub(super) fn time(time: fuser::TimeOrNow) -> SetTime {
    match time {
        fuser::TimeOrNow::Now => SetTime::Now,
        fuser::TimeOrNow::SpecificTime(time) => SetTime::To(specific(time)),
    }
}

fn specific(time: SystemTime) -> FileTime {
    match time.duration_since(UNIX_EPOCH) {
        Ok(_) => FileTime::from_system_time(time),
        Err(error) => FileTime {
            secs: i64::try_from(error.duration().as_secs()).map_or(i64::MIN, |secs| -secs),
            nanos: error.duration().subsec_nanos(),
        },
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn errors_the_kernel_would_refuse_become_eio() {
        for number in [0, -5, 512, 5000, i32::MIN, i32::MAX] {
            assert_eq!(errno(Errno(number)).code(), Errno::EIO.0);
        }
        assert_eq!(errno(Errno::ENOENT).code(), 2);
        assert_eq!(errno(Errno::EDQUOT).code(), 122);
    }

    #[test]
    fn times_before_1970_come_out_as_the_kernel_sent_them() {
        // fuser's conversion of seconds -5 and 250 ms.
        let broken = UNIX_EPOCH - Duration::new(5, 250_000_000);
        assert_eq!(specific(broken), FileTime { secs: -5, nanos: 250_000_000 });
        let sound = UNIX_EPOCH + Duration::new(5, 1);
        assert_eq!(specific(sound), FileTime { secs: 5, nanos: 1 });
    }
}
