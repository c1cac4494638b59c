//! Copies a file or a tree within this machine, with all that a file system says of it: modes, owners where that is
//! allowed, times, extended attributes, holes. Names of one file become files of their own.
//!
//! Both trees may be changed by others meanwhile. Every name is looked up in the open directory that it was found in
//! ([`crate::beneath`]), so whatever they put in its place, nothing is read or written outside the two trees.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, OFlags, SeekFrom, Timespec, Timestamps};

use crate::beneath::{Directory, Held};

const BUFFER_BYTES: usize = 1 << 20;

/// What was copied.
#[derive(Default, Debug)]
pub(crate) struct Copied {
    /// All but directories.
    pub files: u64,
    /// Of regular files, without holes.
    pub bytes: u64,
}

/// What could not be copied, and why.
#[derive(Debug)]
pub(crate) struct CopyError {
    /// Whether reading failed, and not writing.
    pub is_reading: bool,
    /// The file.
    pub path: PathBuf,
    /// What was wrong.
    pub error: io::Error,
}

impl CopyError {
    fn reading(path: PathBuf) -> impl FnOnce(io::Error) -> CopyError {
        move |error| CopyError { is_reading: true, path, error }
    }

    fn writing(path: PathBuf) -> impl FnOnce(io::Error) -> CopyError {
        move |error| CopyError { is_reading: false, path, error }
    }

    /// Whether one file cannot be read, and others perhaps can.
    fn is_of_one_file(&self) -> bool {
        use rustix::io::Errno;
        let errno = Errno::from_io_error(&self.error);
        self.is_reading && matches!(errno, Some(Errno::IO | Errno::STALE | Errno::ACCESS))
    }
}

/// A directory that is being copied.
struct Level {
    from: Directory,
    to: Directory,
    /// Those that are left. The directory gets its attributes after the last one.
    names: std::vec::IntoIter<OsString>,
}

/// A name that is being copied.
struct Entry<'a> {
    from: &'a Directory,
    to: &'a Directory,
    name: &'a OsStr,
    becomes: &'a OsStr,
}

/// Copies `from.1` in the directory `from.0` to `to.1` in `to.0`, which must not be there. Regular files are durable
/// when it returns. `progress` hears of each name before it is copied. Files and directories below `from.1` that cannot be read
/// are left out, and come into `unread`. What an attempt leaves that fails is the caller's.
pub(crate) fn copy_tree(
    from: (&Directory, &OsStr),
    to: (&Directory, &OsStr),
    progress: &mut dyn FnMut(&Copied, &Path),
    unread: &mut Vec<CopyError>,
) -> Result<Copied, CopyError> {
    let mut copied = Copied::default();
    let mut levels: Vec<Level> = Vec::new();
    let top = Entry { from: from.0, to: to.0, name: from.1, becomes: to.1 };
    levels.extend(top.copy(&mut copied, progress)?);
    while let Some(level) = levels.last_mut() {
        let Some(name) = level.names.next() else {
            let here = OsStr::new(".");
            let (from_path, to_path) = (level.from.path_of(here), level.to.path_of(here));
            progress(&copied, &from_path);
            let from = level.from.hold(here).map_err(CopyError::reading(from_path.clone()))?;
            let to = level.to.hold(here).map_err(CopyError::writing(to_path.clone()))?;
            set_attributes((&from, &from_path), (&to, &to_path))?;
            levels.pop();
            continue;
        };
        let entry = Entry { from: &level.from, to: &level.to, name: &name, becomes: &name };
        match entry.copy(&mut copied, progress) {
            Ok(below) => levels.extend(below),
            Err(error) if error.is_of_one_file() => {
                // Remove the part that was copied: it is not the file.
                match level.to.remove(&name) {
                    Err(left) if left.kind() != io::ErrorKind::NotFound => {
                        return Err(CopyError::writing(level.to.path_of(&name))(left));
                    }
                    _ => unread.push(error),
                }
            }
            Err(error) => return Err(error),
        }
    }
    Ok(copied)
}

impl Entry<'_> {
    /// Copies what has the name; a directory without what is in it.
    fn copy(
        &self,
        copied: &mut Copied,
        progress: &mut dyn FnMut(&Copied, &Path),
    ) -> Result<Option<Level>, CopyError> {
        let (from_path, to_path) = (self.from.path_of(self.name), self.to.path_of(self.becomes));
        progress(copied, &from_path);
        let unread = || CopyError::reading(from_path.clone());
        let unwritten = || CopyError::writing(to_path.clone());
        let from = self.from.hold(self.name).map_err(unread())?;
        if from.kind() == FileType::Directory {
            let from = from.open_directory(from_path.clone()).map_err(unread())?;
            let names = from.names().map_err(unread())?.into_iter();
            let to = self.to.make_child(self.becomes).map_err(unwritten())?;
            return Ok(Some(Level { from, to, names }));
        }
        let to = match from.kind() {
            FileType::RegularFile => {
                let source = from.open_file(OFlags::RDONLY).map_err(unread())?;
                let target = self.to.make_file(self.becomes).map_err(unwritten())?;
                copied.bytes += copy_data((source, &from_path), (&target, &to_path))?;
                Held::of(target).map_err(unwritten())?
            }
            FileType::Symlink => {
                let target = from.target().map_err(unread())?;
                self.to.make_link(self.becomes, &target).map_err(unwritten())?;
                self.made(|made| made.target().is_ok_and(|made| made == target))?
            }
            kind => {
                let device = from.stat().st_rdev;
                self.to.make_node(self.becomes, kind, device).map_err(unwritten())?;
                self.made(|made| made.kind() == kind && made.stat().st_rdev == device)?
            }
        };
        set_attributes((&from, &from_path), (&to, &to_path))?;
        copied.files += 1;
        Ok(None)
    }

    /// Takes hold of what was made without being opened, if it is still what has the name.
    fn made(&self, is_it: impl FnOnce(&Held) -> bool) -> Result<Held, CopyError> {
        let path = self.to.path_of(self.becomes);
        let held = self.to.hold(self.becomes).map_err(CopyError::writing(path.clone()))?;
        if is_it(&held) {
            return Ok(held);
        }
        let replaced = io::Error::other("another program has put something else in its place");
        Err(CopyError::writing(path)(replaced))
    }
}

/// Copies the bytes of a file; how many there were.
fn copy_data(
    (mut source, from): (File, &Path),
    (mut target, to): (&File, &Path),
) -> Result<u64, CopyError> {
    let unread = |error: io::Error| CopyError::reading(from.to_owned())(error);
    let unwritten = |error: io::Error| CopyError::writing(to.to_owned())(error);
    let len = source.metadata().map_err(unread)?.len();
    let mut buffer = vec![0; BUFFER_BYTES];
    let (mut at, mut bytes) = (0, 0);
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
        rustix::fs::seek(target, SeekFrom::Start(data)).map_err(|error| unwritten(error.into()))?;
        at = data;
        while at < end {
            let most = buffer.len().min(usize::try_from(end - at).unwrap_or(usize::MAX));
            let read = source.read(&mut buffer[..most]).map_err(unread)?;
            if read == 0 {
                return Err(unread(io::ErrorKind::UnexpectedEof.into()));
            }
            target.write_all(&buffer[..read]).map_err(unwritten)?;
            at += read as u64;
            bytes += read as u64;
        }
    }
    target.set_len(len).map_err(unwritten)?;
    target.sync_all().map_err(unwritten)?;
    Ok(bytes)
}

fn set_attributes(
    (from, from_path): (&Held, &Path),
    (to, to_path): (&Held, &Path),
) -> Result<(), CopyError> {
    let unread = || CopyError::reading(from_path.to_owned());
    let unwritten = || CopyError::writing(to_path.to_owned());
    let (stat, here) = (from.stat(), to.stat());
    let mut is_given = true;
    if (here.st_uid, here.st_gid) != (stat.st_uid, stat.st_gid) {
        match to.set_owner(stat.st_uid, stat.st_gid) {
            // Only the superuser gives files away.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => is_given = false,
            given => given.map_err(unwritten())?,
        }
    }
    if from.kind() != FileType::Symlink {
        for (name, value) in from.xattrs().map_err(unread())? {
            to.set_xattr(&name, &value).map_err(unwritten())?;
        }
        to.set_mode(kept_mode(stat.st_mode, from.kind(), is_given)).map_err(unwritten())?;
    }
    let time = |secs, nanos| Timespec { tv_sec: secs, tv_nsec: nanos };
    let times = Timestamps {
        last_access: time(stat.st_atime, stat.st_atime_nsec as _),
        last_modification: time(stat.st_mtime, stat.st_mtime_nsec as _),
    };
    to.set_times(&times).map_err(unwritten())
}

/// The mode of a copy. A program that ran as its owner must not run as the user who copied it.
fn kept_mode(mode: u32, kind: FileType, is_given: bool) -> u32 {
    match is_given || kind == FileType::Directory {
        true => mode & 0o7777,
        false => mode & 0o1777,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    use super::*;

    fn copy(
        from: &Path,
        to: &Path,
        progress: &mut dyn FnMut(&Copied, &Path),
    ) -> Result<Copied, CopyError> {
        let split = |path: &Path| {
            let directory = Directory::open(path.parent().expect("not the root")).expect("opens");
            (directory, path.file_name().expect("a name").to_owned())
        };
        let (from, to) = (split(from), split(to));
        copy_tree((&from.0, &from.1), (&to.0, &to.1), progress, &mut Vec::new())
    }

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
        let five = std::time::UNIX_EPOCH + std::time::Duration::from_secs(5);
        let times = fs::FileTimes::new().set_modified(five);
        File::open(from.join("a"))?.set_times(times)?;
        let fifo = rustix::fs::CWD;
        let mode = rustix::fs::Mode::RWXU;
        rustix::fs::mknodat(fifo, from.join("a/b/fifo"), FileType::Fifo, mode, 0)?;
        let copied = copy(&from, &to, &mut |_, _| {}).map_err(|error| error.error)?;
        assert_eq!(copied.files, 4);
        assert_eq!(fs::read(to.join("a/text"))?, b"text");
        assert_eq!(fs::metadata(to.join("a/text"))?.mode() & 0o7777, 0o640);
        assert_eq!(fs::read(to.join("holes"))?, fs::read(from.join("holes"))?);
        assert_eq!(fs::read_link(to.join("a/link"))?, Path::new("nowhere"));
        assert_eq!(fs::metadata(to.join("a"))?.mtime(), 5);
        assert!(fs::metadata(to.join("a/b"))?.is_dir());
        assert_eq!(fs::metadata(to.join("a/b/fifo"))?.mode(), 0o010700);
        // Nothing is overwritten.
        assert!(copy(&from, &to, &mut |_, _| {}).is_err());
        Ok(())
    }

    /// Another member of a shared volume replaced a directory by a link while root restored it: files of the member's
    /// choice appeared outside the mount, and root's files could have been copied into it.
    #[test]
    fn a_directory_that_becomes_a_link_meanwhile_leads_nowhere() -> io::Result<()> {
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        enum Side {
            From,
            To,
        }
        let (mut step, mut finished) = (0, 0);
        // At each step of the copy, one of its directories is replaced; until no step is left.
        while finished < 2 {
            finished = 0;
            for side in [Side::From, Side::To] {
                let scratch = tempfile::tempdir()?;
                let place = |name: &str| scratch.path().join(name);
                let (from, to, outside) = (place("from"), place("to"), place("outside"));
                fs::create_dir_all(from.join("b"))?;
                fs::create_dir_all(outside.join("b"))?;
                for file in ["a", "b/c", "d"] {
                    fs::write(from.join(file), "then")?;
                    // Nothing of this name keeps a copy from being made there.
                    if side == Side::From {
                        fs::write(outside.join(file), "secret")?;
                    }
                }
                let outside_times = fs::metadata(&outside)?.mtime_nsec();
                let (mut passed, mut swapped) = (0, false);
                let mut swap = |_: &Copied, _: &Path| {
                    passed += 1;
                    if passed != step + 1 {
                        return;
                    }
                    swapped = true;
                    let victim = if side == Side::From { &from } else { &to };
                    for (name, target) in [("b", outside.join("b")), ("", outside.clone())] {
                        let path = if name.is_empty() { victim.clone() } else { victim.join(name) };
                        if fs::rename(&path, place(&format!("aside{name}"))).is_ok() {
                            symlink(&target, &path).expect("a link");
                        }
                    }
                };
                let copied = copy(&from, &to, &mut swap);
                finished += usize::from(!swapped);
                assert!(copied.is_ok() || swapped, "{copied:?}");
                let context = format!("{side:?} swapped at step {step}");
                // Nothing was written outside.
                let names = |path: &Path| -> io::Result<usize> { Ok(fs::read_dir(path)?.count()) };
                let there = if side == Side::From { (3, 1) } else { (1, 0) };
                assert_eq!((names(&outside)?, names(&outside.join("b"))?), there, "{context}");
                assert_eq!(fs::metadata(&outside)?.mtime_nsec(), outside_times, "{context}");
                // And nothing read there.
                let mut waiting = vec![place("to"), place("aside"), place("asideb")];
                while let Some(path) = waiting.pop() {
                    match fs::symlink_metadata(&path) {
                        Ok(meta) if meta.is_dir() => {
                            for entry in fs::read_dir(&path)? {
                                waiting.push(entry?.path());
                            }
                        }
                        Ok(meta) if meta.is_file() => {
                            assert_ne!(fs::read(&path)?, b"secret", "{context}: {path:?}");
                        }
                        _ => {}
                    }
                }
            }
            step += 1;
        }
        assert!(step > 6, "a step for each name, and for the attributes of directories");
        Ok(())
    }

    #[test]
    fn a_program_that_changes_owners_loses_the_right_to_run_as_its_owner() {
        assert_eq!(kept_mode(0o106755, FileType::RegularFile, true), 0o6755);
        assert_eq!(kept_mode(0o106755, FileType::RegularFile, false), 0o755);
        // There the bit says whose group new files have.
        assert_eq!(kept_mode(0o042775, FileType::Directory, false), 0o2775);
    }
}
