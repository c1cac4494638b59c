//! The directory of a `FileStore`: its files, its owner, and whether it is present.
//!
//! ```text
//! DIR/atoll-store          whose blocks these are: 32 hex digits; an ordinary file
//! DIR/00 … DIR/ff          directories, transparent as DIR is
//! DIR/7a/KEY               a block of version 0, exactly its bytes; KEY in hex, 64 or 128 digits
//! DIR/7a/KEY.VERSION       one of another version; VERSION in hex, 16 digits
//! ```
//!
//! A block's directory is named by eight bits of a checksum of its key, so that the keys of
//! one node, which lie close together on the ring, spread over all of them.
//!
//! **Away.** A directory without its own owner file, or that is not transparent, is not the
//! store's directory at the moment: TFS is not mounted there, or another file system is. Then a
//! missing file does not mean that a block is lost, and nothing is written. As a file system may be
//! unmounted at any moment, every file is reached through a handle of the directory that was
//! looked at ([`BlockDir::enter`]), never by a path that may lead elsewhere by now.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use atoll_key::{Key, MAX_BLOCK_BYTES};
use rustix::fs::{
    AtFlags, CWD, Dir, FileType, Mode, OFlags, XattrFlags, fstat, fsync, getxattr, mkdirat,
    mknodat, openat, setxattr, statvfs, unlinkat,
};
use rustix::io::Errno;

/// The owner file's name.
const OWNER_NAME: &str = "atoll-store";
/// Bytes of what it holds.
pub(super) const OWNER_DIGITS: usize = 32;
/// The extended attribute with which TFS marks what is transparent.
const FLAG: &str = "user.tfs.transparent";
/// One that only TFS answers: elsewhere the other may have come with a copy, and means nothing.
const TFS_ONLY: &str = "user.tfs.usage";
/// Bytes that the answer may have.
const MAX_ANSWER_BYTES: usize = 4096;
/// How many directories the blocks spread over.
const FAN_OUT: u32 = 256;
/// How files are opened: neither through a link that a user put there, nor waiting for the
/// other end of a pipe.
const SAFELY: OFlags = OFlags::CLOEXEC.union(OFlags::NOFOLLOW).union(OFlags::NONBLOCK);
/// `lost+found` is part of an empty ext2 file system.
const NO_STRANGERS: [&str; 2] = [OWNER_NAME, "lost+found"];

/// Whether a directory must say of itself that it is transparent.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum FlagCheck {
    /// Its attribute `user.tfs.transparent` must be `1`.
    #[default]
    Attribute,
    /// Anything goes: for tests without a mounted TFS.
    Assumed,
}

/// Why a directory cannot be used for blocks.
#[derive(Debug, thiserror::Error)]
pub enum UnfitDir {
    /// It is not there.
    #[error("{} does not exist", path.display())]
    Missing {
        /// Which.
        path: PathBuf,
    },
    /// It is something else.
    #[error("{} is not a directory", path.display())]
    NotADirectory {
        /// Which.
        path: PathBuf,
    },
    /// What is written there would cost room.
    #[error(
        "{} is not transparent: mount a TFS and run `atoll tfs set --transparent {}` first",
        path.display(), path.display()
    )]
    NotTransparent {
        /// Which.
        path: PathBuf,
    },
    /// It holds other files.
    #[error(
        "{} holds files that are none of this node's ({name}, for instance); name an empty \
         directory", path.display()
    )]
    Strangers {
        /// Which.
        path: PathBuf,
        /// One of them.
        name: String,
    },
    /// Another node keeps its blocks there.
    #[error("{} is used by another node", path.display())]
    Taken {
        /// Which.
        path: PathBuf,
    },
    /// The operating system failed a request.
    #[error("cannot use {}: {source}", path.display())]
    Io {
        /// Which.
        path: PathBuf,
        /// What it said.
        source: io::Error,
    },
}

/// The directory with an owner.
#[derive(Clone, Debug)]
pub(crate) struct BlockDir {
    path: PathBuf,
    owner: String,
    flag: FlagCheck,
    /// Device and inode of the directory that was found to be the store's.
    known: Arc<Mutex<Option<(u64, u64)>>>,
}

/// How full the file system is that a directory is on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Space {
    /// Its size, bytes.
    pub total_bytes: u64,
    /// What can still be written by everybody, bytes. TFS counts transparent blocks as free.
    pub free_bytes: u64,
    /// Its smallest unit of a file, bytes.
    pub unit_bytes: u64,
}

impl Space {
    /// Of the file system that `path` is on.
    ///
    /// # Errors
    /// What the system says.
    pub fn of(path: &Path) -> io::Result<Space> {
        let stat = statvfs(path)?;
        Ok(Space {
            total_bytes: stat.f_blocks.saturating_mul(stat.f_frsize),
            free_bytes: stat.f_bavail.saturating_mul(stat.f_frsize),
            unit_bytes: stat.f_frsize.max(1),
        })
    }
}

/// Looks whether `path` could be given to a store whose owner file says `owner` (`None` for
/// one that is to be made).
///
/// # Errors
/// Why not.
pub(crate) fn check_fit(path: &Path, owner: Option<&str>, flag: FlagCheck) -> Result<(), UnfitDir> {
    let path_buf = || path.to_path_buf();
    let io = |source| UnfitDir::Io { path: path_buf(), source };
    match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(UnfitDir::Missing { path: path_buf() });
        }
        Err(error) => return Err(io(error)),
        Ok(found) if !found.is_dir() => return Err(UnfitDir::NotADirectory { path: path_buf() }),
        Ok(_) => {}
    }
    if flag == FlagCheck::Attribute && !is_transparent(path).map_err(io)? {
        return Err(UnfitDir::NotTransparent { path: path_buf() });
    }
    let held = open_dir(path).and_then(read_owner).map_err(io)?;
    match (held, owner) {
        (Some(held), Some(owner)) if held == owner => return Ok(()),
        (Some(_), _) => return Err(UnfitDir::Taken { path: path_buf() }),
        (None, _) => {}
    }
    for entry in fs::read_dir(path).map_err(io)? {
        let name = entry.map_err(io)?.file_name().to_string_lossy().into_owned();
        if !NO_STRANGERS.contains(&name.as_str()) {
            return Err(UnfitDir::Strangers { path: path_buf(), name });
        }
    }
    Ok(())
}

/// Whether what is made in `path` is transparent: it is on a TFS, and the attribute says so.
fn is_transparent(path: &Path) -> io::Result<bool> {
    let mut value = [0; MAX_ANSWER_BYTES];
    // No attribute, or a file system without attributes.
    let known = |answer| match answer {
        Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(None),
        Err(error) => Err(io::Error::from(error)),
        Ok(len) => Ok(Some(len)),
    };
    if known(getxattr(path, TFS_ONLY, &mut value[..]))?.is_none() {
        return Ok(false);
    }
    let len = known(getxattr(path, FLAG, &mut value[..]))?;
    Ok(len.is_some_and(|len| value[..len] == *b"1"))
}

fn read_owner(dir: impl AsFd) -> io::Result<Option<String>> {
    let flags = OFlags::RDONLY | SAFELY;
    let file = match openat(dir, OWNER_NAME, flags, Mode::empty()) {
        Err(Errno::NOENT) => return Ok(None),
        file => File::from(file?),
    };
    let mut owner = String::new();
    file.take(OWNER_DIGITS as u64 + 1).read_to_string(&mut owner)?;
    // An empty one is what is left of an interrupted attempt.
    Ok(Some(owner).filter(|owner| !owner.is_empty()))
}

/// A directory, to reach what is in it.
fn open_dir(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(openat(CWD, path, flags, Mode::empty())?)
}

impl BlockDir {
    pub(crate) fn new(path: &Path, owner: &str, flag: FlagCheck) -> BlockDir {
        let known = Arc::default();
        BlockDir { path: path.to_path_buf(), owner: owner.to_owned(), flag, known }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Whether it is there: mounted, transparent, and this store's. Says why not.
    pub(crate) fn presence(&self) -> Result<(), String> {
        *self.known() = None;
        self.enter().map(drop).map_err(|error| error.to_string())
    }

    fn known(&self) -> std::sync::MutexGuard<'_, Option<(u64, u64)>> {
        self.known.lock().expect("no holder of this lock panics")
    }

    /// A handle of the directory if it is the store's. One that was looked at before is known
    /// again by its device, which each mount has of its own, and its inode.
    fn enter(&self) -> io::Result<OwnedFd> {
        let path = self.path.display();
        let unusable = |error: io::Error| match error.kind() {
            io::ErrorKind::NotFound => self.not_here(),
            kind => io::Error::new(kind, format!("{path} cannot be used: {error}")),
        };
        let dir = open_dir(&self.path).map_err(unusable)?;
        let found = fstat(&dir).map_err(|error| unusable(error.into()))?;
        let found = Some((found.st_dev, found.st_ino));
        if *self.known() == found {
            return Ok(dir);
        }
        match read_owner(&dir).map_err(unusable)? {
            Some(owner) if owner == self.owner => {}
            Some(_) => return Err(io::Error::other(format!("{path} is used by another node"))),
            None => return Err(self.not_here()),
        }
        if self.flag == FlagCheck::Attribute && !is_transparent(&self.path).map_err(unusable)? {
            return Err(io::Error::other(format!(
                "{path} is not transparent any more, so that nothing is kept there: \
                 `atoll tfs set --transparent {path}` makes it so"
            )));
        }
        *self.known() = found;
        Ok(dir)
    }

    fn not_here(&self) -> io::Error {
        let path = self.path.display();
        let why = format!("the blocks are not at {path}: is the file system mounted?");
        io::Error::new(io::ErrorKind::NotFound, why)
    }

    /// Takes an empty directory.
    pub(crate) fn take(&self) -> Result<(), UnfitDir> {
        check_fit(&self.path, Some(&self.owner), self.flag)?;
        let io = |source| UnfitDir::Io { path: self.path.clone(), source };
        let dir = open_dir(&self.path).map_err(io)?;
        if read_owner(&dir).map_err(io)?.is_some() {
            return Ok(());
        }
        // Made without being opened: one that is open cannot choose what it is.
        match mknodat(&dir, OWNER_NAME, FileType::RegularFile, Mode::RUSR | Mode::WUSR, 0) {
            // Of an attempt that was interrupted.
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => return Err(io(error.into())),
        }
        let path = self.path.join(OWNER_NAME);
        if self.flag == FlagCheck::Attribute {
            // This one must stay: an empty file may still choose.
            setxattr(&path, FLAG, b"0", XattrFlags::empty()).map_err(|error| io(error.into()))?;
        }
        let mut file = OpenOptions::new().write(true).open(&path).map_err(io)?;
        file.write_all(self.owner.as_bytes()).and_then(|()| file.sync_all()).map_err(io)
    }

    /// Removes all files of the store from it; other files stay.
    pub(crate) fn give_up(&self) -> io::Result<()> {
        let dir = self.enter()?;
        for number in 0..FAN_OUT {
            for (key, version) in names(&dir, number)? {
                remove_if_there(&dir, &place(&key, version))?;
            }
            // Stays if a user put something else into it.
            let _ = unlinkat(&dir, format!("{number:02x}"), AtFlags::REMOVEDIR);
        }
        remove_if_there(&dir, OWNER_NAME)
    }

    /// Writes a block's file, whatever may be left there of an earlier attempt.
    ///
    /// Neither synced nor renamed into place: the index, which alone makes it a block, is told
    /// of it afterwards, and what power loss leaves of it does not match its checksum then.
    pub(crate) fn write(&self, key: &Key, version: u64, bytes: &[u8]) -> io::Result<()> {
        let (dir, path) = (self.enter()?, place(key, version));
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | SAFELY;
        let open = || openat(&dir, &path, flags, Mode::RUSR | Mode::WUSR);
        let mut file = File::from(match open() {
            Err(Errno::NOENT) => {
                match mkdirat(&dir, fan_out_name(key), Mode::RWXU) {
                    Ok(()) | Err(Errno::EXIST) => {}
                    Err(error) => return Err(error.into()),
                }
                open()?
            }
            file => file?,
        });
        let written = file.write_all(bytes);
        drop(file);
        if written.is_err() {
            let _ = remove_if_there(&dir, &path);
        }
        written
    }

    fn open(&self, key: &Key, version: u64) -> io::Result<File> {
        let flags = OFlags::RDONLY | SAFELY;
        Ok(openat(self.enter()?, place(key, version), flags, Mode::empty())?.into())
    }

    /// Reads a block's file if it is `len_bytes` long; `None` if it has another length.
    pub(crate) fn read(
        &self,
        key: &Key,
        version: u64,
        len_bytes: u32,
    ) -> io::Result<Option<Vec<u8>>> {
        let want = len_bytes as usize;
        let mut bytes = Vec::with_capacity(want + 1);
        self.open(key, version)?.take(want as u64 + 1).read_to_end(&mut bytes)?;
        Ok((bytes.len() == want).then_some(bytes))
    }

    /// What is in the file named as a block's; at most a little more than a block can have.
    pub(crate) fn contents(&self, key: &Key, version: u64) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let limit = MAX_BLOCK_BYTES as u64 + 1;
        self.open(key, version)?.take(limit).read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    /// Opens and closes a block's file, which is how TFS finds out whether it still has all of
    /// it (§3.1), and compares its length.
    pub(crate) fn probe(&self, key: &Key, version: u64, len_bytes: u32) -> io::Result<bool> {
        let found = self.open(key, version)?.metadata()?;
        Ok(found.is_file() && found.len() == u64::from(len_bytes))
    }

    pub(crate) fn remove(&self, key: &Key, version: u64) -> io::Result<()> {
        remove_if_there(&self.enter()?, &place(key, version))
    }

    /// The block files in one of the directories.
    pub(crate) fn names(&self, number: u32) -> io::Result<Vec<(Key, u64)>> {
        names(&self.enter()?, number)
    }

    /// Makes durable what has been written: to TFS the sync of any directory is one of all.
    pub(crate) fn sync(&self) -> io::Result<()> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = openat(self.enter()?, ".", flags, Mode::empty())?;
        Ok(fsync(dir)?)
    }

    /// How many directories there may be.
    pub(crate) fn fan_out() -> u32 {
        FAN_OUT
    }
}

fn names(dir: &OwnedFd, number: u32) -> io::Result<Vec<(Key, u64)>> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | SAFELY;
    let inside = match openat(dir, format!("{number:02x}"), flags, Mode::empty()) {
        // A name that is no directory, or a link to one, is not this store's.
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => return Ok(Vec::new()),
        inside => Dir::new(inside?)?,
    };
    let mut found = Vec::new();
    for entry in inside {
        found.extend(entry?.file_name().to_str().ok().and_then(parse_name));
    }
    Ok(found)
}

fn remove_if_there(dir: &OwnedFd, path: &str) -> io::Result<()> {
    match unlinkat(dir, path, AtFlags::empty()) {
        Err(Errno::NOENT) => Ok(()),
        removed => Ok(removed?),
    }
}

fn fan_out_name(key: &Key) -> String {
    format!("{:02x}", crc32fast::hash(&key.0) % FAN_OUT)
}

/// Where a block's file is, seen from the directory.
fn place(key: &Key, version: u64) -> String {
    format!("{}/{}", fan_out_name(key), file_name(key, version))
}

fn file_name(key: &Key, version: u64) -> String {
    use std::fmt::Write;
    let hash = key.as_hash();
    let bytes: &[u8] = hash.as_ref().map_or(&key.0[..], |hash| &hash[..]);
    let mut name = String::with_capacity(bytes.len() * 2 + 17);
    for byte in bytes {
        let _ = write!(name, "{byte:02x}");
    }
    if version != 0 {
        let _ = write!(name, ".{version:016x}");
    }
    name
}

/// The key and version that a file is named by; `None` for a foreign file.
fn parse_name(name: &str) -> Option<(Key, u64)> {
    let (digits, version) = match name.split_once('.') {
        Some((digits, version)) if version.len() == 16 => {
            (digits, u64::from_str_radix(version, 16).ok()?)
        }
        Some(_) => return None,
        None => (name, 0),
    };
    if !matches!(digits.len(), 64 | 128) || !digits.is_ascii() {
        return None;
    }
    let mut bytes = [0; 64];
    for (byte, at) in bytes.iter_mut().zip((0..digits.len()).step_by(2)) {
        *byte = u8::from_str_radix(&digits[at..at + 2], 16).ok()?;
    }
    let key = Key(bytes);
    // Only what would be written so: no second name for one block.
    (file_name(&key, version) == name).then_some((key, version))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_says_whose_file_it_is() {
        let mut long = [7; 64];
        long[63] = 1;
        for key in [Key::hashed([0xab; 32]), Key(long), Key::MIN, Key::MAX] {
            for version in [0, 1, u64::MAX] {
                assert_eq!(parse_name(&file_name(&key, version)), Some((key, version)));
            }
        }
        let good = file_name(&Key::hashed([0xab; 32]), 3);
        let upper = good.to_uppercase();
        let zero = format!("{}.{:016x}", file_name(&Key::MIN, 0), 0);
        for bad in ["", "lost+found", OWNER_NAME, &good[1..], &upper, &zero, "é", &"+f".repeat(32)]
        {
            assert_eq!(parse_name(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_directory_is_taken_only_when_it_is_fit() {
        let temp = tempfile::tempdir().expect("a directory");
        let dir = temp.path().join("blocks");
        let fit = |owner, flag| check_fit(&dir, owner, flag);
        let assumed = FlagCheck::Assumed;
        assert!(matches!(fit(None, assumed), Err(UnfitDir::Missing { .. })));
        fs::write(&dir, b"").expect("written");
        assert!(matches!(fit(None, assumed), Err(UnfitDir::NotADirectory { .. })));
        fs::remove_file(&dir).expect("removed");
        fs::create_dir_all(dir.join("lost+found")).expect("made");
        let error = fit(None, FlagCheck::Attribute).expect_err("an ordinary file system");
        assert!(error.to_string().contains("atoll tfs set --transparent"), "{error}");
        fit(None, assumed).expect("empty but for lost+found");
        fs::write(dir.join("thesis.tex"), b"").expect("written");
        let error = fit(None, assumed).expect_err("somebody's thesis");
        assert!(error.to_string().contains("thesis.tex"), "{error}");
        fs::remove_file(dir.join("thesis.tex")).expect("removed");

        let [ours, theirs] = ["1", "2"].map(|digit| digit.repeat(OWNER_DIGITS));
        let block_dir = BlockDir::new(&dir, &ours, assumed);
        assert!(block_dir.presence().is_err());
        fs::write(dir.join(OWNER_NAME), b"").expect("an attempt that was interrupted");
        block_dir.take().expect("taken");
        block_dir.take().expect("taken already");
        block_dir.presence().expect("there");
        assert!(matches!(fit(Some(&theirs), assumed), Err(UnfitDir::Taken { .. })));
        assert!(matches!(fit(None, assumed), Err(UnfitDir::Taken { .. })));
        block_dir.write(&Key::MAX, 3, b"bytes").expect("written");
        let block = dir.join(place(&Key::MAX, 3));
        assert!(block.exists());
        let stranger = block.with_file_name("letter");
        fs::write(&stranger, b"dear").expect("written");
        block_dir.give_up().expect("given up");
        assert!(stranger.exists(), "what is not the store's stays");
        assert!(!block.exists());
        assert!(block_dir.presence().is_err());
    }
}
