//! Mount points: whether one can be used, what is mounted on it, and unmounting.
//!
//! Nothing here asks the mounted file system itself, which may be slow or dead: what is
//! mounted where is read from the kernel's table.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use atoll_vfs::Errno;
use rustix::mount::UnmountFlags;
use thiserror::Error;

use super::MountError;

/// How the kernel's table names our mounts: `fuse.atoll`.
pub(super) const SUBTYPE: &str = "atoll";

const DEVICE: &str = "/dev/fuse";
const HELPER: &str = "fusermount3";
const ENOTCONN: i32 = 107;

/// Why a file system could not be unmounted.
#[derive(Debug, Error)]
pub enum UnmountError {
    /// Nothing is mounted there.
    #[error("nothing is mounted at {}", path.display())]
    NotMounted {
        /// Where.
        path: PathBuf,
    },
    /// Something else is mounted there.
    #[error("what is mounted at {} is {kind}, not a mount of atoll", path.display())]
    NotOurs {
        /// Where.
        path: PathBuf,
        /// Type of the file system mounted there.
        kind: String,
    },
    /// A program uses it.
    #[error(
        "{} is in use: close the files and leave the directories below it \
         (`fuser -vm {}` lists who), or unmount lazily",
        path.display(), path.display()
    )]
    Busy {
        /// Where.
        path: PathBuf,
    },
    /// Ordinary users need a helper program, and it is missing.
    #[error("unmounting without root needs {HELPER}, which is not installed: apt install fuse3")]
    NoHelper,
    /// The mount point cannot be looked at.
    #[error("cannot look at {}: {source}", path.display())]
    Unreadable {
        /// Where.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The kernel or the helper refused.
    #[error("cannot unmount {}: {reason}", path.display())]
    Refused {
        /// Where.
        path: PathBuf,
        /// What it said.
        reason: String,
    },
}

/// One line of the kernel's table.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Mount {
    /// Major and minor number, as `0:45`.
    pub(super) device: String,
    pub(super) path: PathBuf,
    /// For instance `fuse.atoll`.
    pub(super) kind: String,
    /// What is mounted, as [`super::MountOptions::fs_name`] had it.
    pub(super) source: OsString,
}

/// Where this machine has mounted what is called `fs_name` (as in [`super::MountOptions`]).
pub fn mounts_of(fs_name: &OsStr) -> io::Result<Vec<PathBuf>> {
    let found = mounts()?.into_iter().filter(|mount| mount.source == fs_name);
    Ok(found.map(|mount| mount.path).collect())
}

/// The mount points below a directory. Its path has no symbolic links.
pub fn mounts_below(path: &Path) -> io::Result<Vec<PathBuf>> {
    let all = mounts()?.into_iter().map(|mount| mount.path);
    Ok(all.filter(|at| at != path && at.starts_with(path)).collect())
}

/// All mounts, in the order they were made.
fn mounts() -> io::Result<Vec<Mount>> {
    Ok(fs::read("/proc/self/mountinfo")?.split(|&b| b == b'\n').filter_map(parse).collect())
}

/// `36 35 98:0 /root /path opts [fields] - type source opts` (proc(5)).
fn parse(line: &[u8]) -> Option<Mount> {
    let mut fields = line.split(|&b| b == b' ');
    let device = String::from_utf8_lossy(fields.nth(2)?).into_owned();
    let path = PathBuf::from(OsString::from_vec(unescape(fields.nth(1)?)));
    let mut fields = fields.skip_while(|field| *field != b"-").skip(1);
    let kind = String::from_utf8_lossy(fields.next()?).into_owned();
    let source = OsString::from_vec(unescape(fields.next()?));
    Some(Mount { device, path, kind, source })
}

/// Blanks and backslashes stand as `\040`.
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&first, after)) = rest.split_first() {
        let octal = after
            .get(..3)
            .filter(|d| first == b'\\' && d.iter().all(|b| (b'0'..=b'7').contains(b)));
        match octal {
            Some(digits) => {
                let value = digits.iter().fold(0u32, |v, d| v * 8 + u32::from(d - b'0'));
                out.push(value as u8);
                rest = &after[3..];
            }
            None => {
                out.push(first);
                rest = after;
            }
        }
    }
    out
}

/// What is mounted exactly at `path` (the topmost).
pub(super) fn mounted_at(path: &Path) -> Option<Mount> {
    mounts().ok()?.into_iter().rev().find(|mount| mount.path == path)
}

/// The mount that `path` lies in.
fn mount_of(path: &Path) -> Option<Mount> {
    let within = mounts().ok()?.into_iter().filter(|mount| path.starts_with(&mount.path));
    within.max_by_key(|mount| mount.path.as_os_str().len())
}

/// `path` without symbolic links, not looking at its last component, which may be the
/// root of a dead mount.
fn resolve(path: &Path) -> io::Result<PathBuf> {
    let path = std::path::absolute(path)?;
    match fs::canonicalize(&path) {
        Err(error) if error.raw_os_error() == Some(ENOTCONN) => {}
        resolved => return resolved,
    }
    match (path.parent(), path.file_name()) {
        (Some(parent), Some(name)) => Ok(fs::canonicalize(parent)?.join(name)),
        _ => Ok(path),
    }
}

/// Checks that something can be mounted at `path`, and returns it without symbolic links.
///
/// # Errors
/// Why not; [`super::mount`] would say the same.
pub fn check(path: &Path, nonempty: bool) -> Result<PathBuf, MountError> {
    let unusable = |source: io::Error| match source.raw_os_error() {
        Some(ENOTCONN) => {
            let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
            let broken = mount_of(&absolute).map_or(absolute, |mount| mount.path);
            MountError::Broken { path: broken }
        }
        _ if source.kind() == io::ErrorKind::NotFound => {
            MountError::NoMountpoint { path: path.to_owned() }
        }
        _ => MountError::Unreadable { path: path.to_owned(), source },
    };
    let resolved = fs::canonicalize(path).map_err(unusable)?;
    if !fs::metadata(&resolved).map_err(unusable)?.is_dir() {
        return Err(MountError::NotADirectory { path: resolved });
    }
    if nonempty {
        return Ok(resolved);
    }
    if mounted_at(&resolved).is_some_and(|mount| mount.kind == kind()) {
        return Err(MountError::AlreadyMounted { path: resolved });
    }
    match fs::read_dir(&resolved).map_err(unusable)?.next() {
        Some(_) => Err(MountError::NotEmpty { path: resolved }),
        None => Ok(resolved),
    }
}

/// Checks that this process has what mounting needs.
pub(super) fn check_machine() -> Result<(), MountError> {
    if !Path::new(DEVICE).exists() {
        return Err(MountError::NoDevice);
    }
    if !rustix::process::geteuid().is_root() && find_helper().is_none() {
        return Err(MountError::NoHelper);
    }
    if !device_opens() {
        return Err(MountError::DeviceForbidden);
    }
    Ok(())
}

/// Whether this process can open the device itself: fuser does first of all, and again for
/// each thread's own channel.
fn device_opens() -> bool {
    File::options().read(true).write(true).open(DEVICE).is_ok()
}

pub(super) fn kind() -> String {
    format!("fuse.{SUBTYPE}")
}

fn find_helper() -> Option<PathBuf> {
    if let Some(path) = std::env::var_os("FUSERMOUNT_PATH") {
        return Some(path.into());
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let places = std::env::split_paths(&path).chain(["/usr/bin".into(), "/bin".into()]);
    places.map(|place| place.join(HELPER)).find(|program| program.is_file())
}

/// Unmounts the file system that this or another process mounted at `path`; also one
/// whose process has died. With `lazy` it vanishes from the tree of names at once and
/// ends when the last who uses it is done.
///
/// Blocks while the kernel writes back what is dirty.
pub fn unmount(path: &Path, lazy: bool) -> Result<(), UnmountError> {
    let resolved = resolve(path)
        .map_err(|source| UnmountError::Unreadable { path: path.to_owned(), source })?;
    let Some(mount) = mounted_at(&resolved) else {
        return Err(UnmountError::NotMounted { path: resolved });
    };
    detach(mount, lazy)
}

/// One of our mounts, of this process or another. Its file system is not asked.
#[derive(Clone, Debug)]
pub struct OurMount {
    /// What it shows as its source ([`super::MountOptions::fs_name`]).
    pub source: OsString,
    device: String,
}

impl OurMount {
    /// What is mounted at `path`, if it is ours.
    pub fn at(path: &Path) -> Option<OurMount> {
        let Mount { kind, source, device, .. } = mounted_at(&resolve(path).ok()?)?;
        (kind == self::kind()).then_some(OurMount { source, device })
    }

    /// A process in another mount namespace that has it mounted too: there it stays when it is
    /// unmounted here.
    pub fn mounted_elsewhere(&self) -> Option<u32> {
        mounted_elsewhere(&self.device)
    }
}

/// A process of another mount namespace in which the file system with this device number is
/// mounted, as far as this user may look.
pub(super) fn mounted_elsewhere(device: &str) -> Option<u32> {
    let namespace = |process: &str| fs::read_link(format!("/proc/{process}/ns/mnt")).ok();
    let mut looked_at = BTreeSet::from([namespace("self")?]);
    fs::read_dir("/proc").ok()?.flatten().find_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        let process = name.parse().ok()?;
        if !looked_at.insert(namespace(&name)?) {
            return None;
        }
        let table = fs::read(entry.path().join("mountinfo")).ok()?;
        let mut mounts = table.split(|&b| b == b'\n').filter_map(parse);
        mounts.any(|mount| mount.device == device).then_some(process)
    })
}

/// Whether the file system of this number (`st_dev`) is one of our mounts, of this process or
/// another. The file system itself is not asked.
pub fn is_mount_of_ours(device: u64) -> bool {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let device = format!("{major}:{minor}");
    let ours = |mount: Mount| mount.kind == kind() && mount.device == device;
    mounts().is_ok_and(|mounts| mounts.into_iter().any(ours))
}

/// Unmounts the file system with this device number, if it is still mounted at `path`,
/// and not another that has taken its place.
pub(super) fn unmount_own(path: &Path, device: &str, lazy: bool) -> Result<(), UnmountError> {
    match mounted_at(path) {
        Some(mount) if mount.device == device => detach(mount, lazy),
        _ => Err(UnmountError::NotMounted { path: path.to_owned() }),
    }
}

fn detach(mount: Mount, lazy: bool) -> Result<(), UnmountError> {
    let Mount { path, kind, .. } = mount;
    if kind != self::kind() {
        return Err(UnmountError::NotOurs { path, kind });
    }
    let flags = if lazy { UnmountFlags::DETACH } else { UnmountFlags::empty() };
    match rustix::mount::unmount(&path, flags | UnmountFlags::NOFOLLOW) {
        Ok(()) => Ok(()),
        Err(rustix::io::Errno::BUSY) => Err(UnmountError::Busy { path }),
        Err(rustix::io::Errno::PERM) => unmount_by_helper(path, lazy),
        Err(errno) => {
            let reason = Errno(errno.raw_os_error()).to_string();
            Err(UnmountError::Refused { path, reason })
        }
    }
}

/// Linux lets only root unmount; the set-uid helper does it for a mount's owner.
fn unmount_by_helper(path: PathBuf, lazy: bool) -> Result<(), UnmountError> {
    let helper = find_helper().ok_or(UnmountError::NoHelper)?;
    let mut command = Command::new(helper);
    command.arg("-u").args(lazy.then_some("-z")).arg("--").arg(&path).stdin(Stdio::null());
    let output = command.output().map_err(|_| UnmountError::NoHelper)?;
    let said = OsStr::from_bytes(output.stderr.trim_ascii()).to_string_lossy().into_owned();
    match output.status.success() {
        true => Ok(()),
        false if said.contains("busy") => Err(UnmountError::Busy { path }),
        false => Err(UnmountError::Refused { path, reason: said }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_table_is_read() {
        let line =
            b"42 30 0:45 / /tmp/a\\040b\\134c rw,nosuid shared:1 - fuse.atoll atoll:x\\040y rw";
        let mount = parse(line).unwrap();
        assert_eq!(mount.device, "0:45");
        assert_eq!(mount.path, Path::new("/tmp/a b\\c"));
        assert_eq!((mount.kind.as_str(), mount.source.to_str()), ("fuse.atoll", Some("atoll:x y")));
        for line in [&b""[..], b"1 2", b"1 2 0:3 / /x rw", b"1 2 0:3 / /x rw -"] {
            assert_eq!(parse(line), None);
        }
        assert!(mounts().unwrap().iter().any(|mount| mount.path == Path::new("/")));
    }

    #[test]
    fn a_backslash_that_begins_no_number_stays() {
        assert_eq!(unescape(b"a\\09\\"), b"a\\09\\");
        assert_eq!(unescape(b"\\011\\012"), b"\t\n");
    }
}
