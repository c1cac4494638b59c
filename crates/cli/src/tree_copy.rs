//! Copies a file or a tree within this machine, with all that a file system says of it: modes, owners where that is
//! allowed, times, extended attributes, holes. Names of one file become files of their own.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{
    AtFlags, CWD, FileType, Gid, Mode, SeekFrom, Timespec, Timestamps, Uid, XattrFlags,
};

use crate::units;

/// Between two lines of progress.
const LINE_EVERY: Duration = Duration::from_secs(5);
/// The most bytes of a list of attributes, or of a value.
const MAX_XATTR_BYTES: usize = 64 << 10;
const BUFFER_BYTES: usize = 1 << 20;

/// What was copied.
#[derive(Default, Debug)]
pub(crate) struct Copied {
    /// All but directories.
    pub files: u64,
    /// Of regular files, without holes.
    pub bytes: u64,
    told: Option<Instant>,
}

/// What could not be copied, and why.
pub(crate) struct CopyError {
    /// The file.
    pub path: PathBuf,
    /// What was wrong.
    pub error: io::Error,
}

impl CopyError {
    /// At a path.
    pub(crate) fn at(path: &Path, error: io::Error) -> CopyError {
        CopyError { path: path.to_owned(), error }
    }
}

/// Copies `from` to `to`, which must not be there; says each five seconds how far it is, unless `quiet`. Regular files are
/// durable when it returns. What an attempt leaves that fails is the caller's.
pub(crate) fn copy_tree(from: &Path, to: &Path, quiet: bool) -> Result<Copied, CopyError> {
    let mut copied = Copied { told: (!quiet).then(Instant::now), ..Copied::default() };
    // Directories get their attributes after what is in them.
    let mut directories = Vec::new();
    let mut waiting = vec![(from.to_owned(), to.to_owned())];
    while let Some((from, to)) = waiting.pop() {
        let unread = |error| CopyError::at(&from, error);
        let meta = fs::symlink_metadata(&from).map_err(unread)?;
        if meta.is_dir() {
            for entry in fs::read_dir(&from).map_err(unread)? {
                let name = entry.map_err(unread)?.file_name();
                waiting.push((from.join(&name), to.join(&name)));
            }
            fs::create_dir(&to).map_err(|error| CopyError::at(&to, error))?;
            directories.push((from, to, meta));
            continue;
        }
        copy_one(&from, &to, &meta, &mut copied)?;
        set_attributes(&from, &to, &meta)?;
        copied.files += 1;
        if let Some(told) = &mut copied.told
            && told.elapsed() >= LINE_EVERY
        {
            *told = Instant::now();
            let files = units::counted(copied.files, "file", "files");
            eprintln!("{files} so far, {}", units::size(copied.bytes));
        }
    }
    for (from, to, meta) in directories.iter().rev() {
        set_attributes(from, to, meta)?;
    }
    Ok(copied)
}

fn copy_one(
    from: &Path,
    to: &Path,
    meta: &fs::Metadata,
    copied: &mut Copied,
) -> Result<(), CopyError> {
    let kind = meta.file_type();
    if kind.is_file() {
        return copy_data(from, to, copied);
    }
    if kind.is_symlink() {
        let target = fs::read_link(from).map_err(|error| CopyError::at(from, error))?;
        return std::os::unix::fs::symlink(target, to).map_err(|error| CopyError::at(to, error));
    }
    let special = if kind.is_fifo() {
        FileType::Fifo
    } else if kind.is_socket() {
        FileType::Socket
    } else if kind.is_char_device() {
        FileType::CharacterDevice
    } else {
        FileType::BlockDevice
    };
    let made = rustix::fs::mknodat(CWD, to, special, Mode::RUSR | Mode::WUSR, meta.rdev());
    made.map_err(|error| CopyError::at(to, error.into()))
}

fn copy_data(from: &Path, to: &Path, copied: &mut Copied) -> Result<(), CopyError> {
    let unread = |error: io::Error| CopyError::at(from, error);
    let unwritten = |error: io::Error| CopyError::at(to, error);
    let mut source = File::open(from).map_err(unread)?;
    let len = source.metadata().map_err(unread)?.len();
    let target = OpenOptions::new().write(true).create_new(true).mode(0o600).open(to);
    let mut target = target.map_err(unwritten)?;
    let mut buffer = vec![0; BUFFER_BYTES];
    let mut at = 0;
    while at < len {
        let data = match rustix::fs::seek(&source, SeekFrom::Data(at)) {
            Ok(data) => data,
            // A hole up to the end.
            Err(rustix::io::Errno::NXIO) => break,
            Err(error) => return Err(unread(error.into())),
        };
        let end = rustix::fs::seek(&source, SeekFrom::Hole(data));
        let end = end.map_err(|error| unread(error.into()))?;
        rustix::fs::seek(&source, SeekFrom::Start(data)).map_err(|error| unread(error.into()))?;
        rustix::fs::seek(&target, SeekFrom::Start(data))
            .map_err(|error| unwritten(error.into()))?;
        at = data;
        while at < end {
            let most = buffer.len().min(usize::try_from(end - at).unwrap_or(usize::MAX));
            let read = source.read(&mut buffer[..most]).map_err(unread)?;
            if read == 0 {
                return Err(unread(io::ErrorKind::UnexpectedEof.into()));
            }
            target.write_all(&buffer[..read]).map_err(unwritten)?;
            at += read as u64;
            copied.bytes += read as u64;
        }
    }
    target.set_len(len).map_err(unwritten)?;
    target.sync_all().map_err(unwritten)
}

fn set_attributes(from: &Path, to: &Path, meta: &fs::Metadata) -> Result<(), CopyError> {
    let unwritten = |error: rustix::io::Errno| CopyError::at(to, error.into());
    let here = fs::symlink_metadata(to).map_err(|error| CopyError::at(to, error))?;
    if (here.uid(), here.gid()) != (meta.uid(), meta.gid()) {
        let owner = (Some(Uid::from_raw(meta.uid())), Some(Gid::from_raw(meta.gid())));
        match rustix::fs::chownat(CWD, to, owner.0, owner.1, AtFlags::SYMLINK_NOFOLLOW) {
            // Only the superuser gives files away.
            Ok(()) | Err(rustix::io::Errno::PERM) => {}
            Err(error) => return Err(unwritten(error)),
        }
    }
    if !meta.is_symlink() {
        copy_xattrs(from, to)?;
        let mode = fs::Permissions::from_mode(meta.mode() & 0o7777);
        fs::set_permissions(to, mode).map_err(|error| CopyError::at(to, error))?;
    }
    let time = |secs, nanos| Timespec { tv_sec: secs, tv_nsec: nanos };
    let times = Timestamps {
        last_access: time(meta.atime(), meta.atime_nsec()),
        last_modification: time(meta.mtime(), meta.mtime_nsec()),
    };
    rustix::fs::utimensat(CWD, to, &times, AtFlags::SYMLINK_NOFOLLOW).map_err(unwritten)
}

fn copy_xattrs(from: &Path, to: &Path) -> Result<(), CopyError> {
    let unread = |error: rustix::io::Errno| CopyError::at(from, error.into());
    let mut names = vec![0; MAX_XATTR_BYTES];
    let len = rustix::fs::llistxattr(from, &mut names[..]).map_err(unread)?;
    for name in names[..len].split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        let mut value = vec![0; MAX_XATTR_BYTES];
        let len = rustix::fs::lgetxattr(from, name, &mut value[..]).map_err(unread)?;
        let set = rustix::fs::lsetxattr(to, name, &value[..len], XattrFlags::empty());
        set.map_err(|error| CopyError::at(to, error.into()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_tree_is_copied_with_all_that_is_said_of_it() -> io::Result<()> {
        let scratch = tempfile::tempdir()?;
        let (from, to) = (scratch.path().join("from"), scratch.path().join("to"));
        fs::create_dir_all(from.join("a/b"))?;
        fs::write(from.join("a/text"), "text")?;
        fs::set_permissions(from.join("a/text"), fs::Permissions::from_mode(0o640))?;
        let holes = File::create(from.join("holes"))?;
        holes.set_len(3 << 20)?;
        std::os::unix::fs::FileExt::write_all_at(&holes, b"middle", 1 << 20)?;
        symlink("nowhere", from.join("a/link"))?;
        let times = fs::FileTimes::new().set_modified(std::time::UNIX_EPOCH + LINE_EVERY);
        File::open(from.join("a"))?.set_times(times)?;
        let copied = copy_tree(&from, &to, true).map_err(|error| error.error)?;
        assert_eq!(copied.files, 3);
        assert_eq!(fs::read(to.join("a/text"))?, b"text");
        assert_eq!(fs::metadata(to.join("a/text"))?.mode() & 0o7777, 0o640);
        assert_eq!(fs::read(to.join("holes"))?, fs::read(from.join("holes"))?);
        assert_eq!(fs::read_link(to.join("a/link"))?, Path::new("nowhere"));
        assert_eq!(fs::metadata(to.join("a"))?.mtime(), 5);
        assert!(fs::metadata(to.join("a/b"))?.is_dir());
        // Nothing is overwritten.
        assert!(copy_tree(&from, &to, true).is_err());
        Ok(())
    }
}
