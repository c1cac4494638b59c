//! Comparing two trees of real files, for instance a mount with what was published.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File, Metadata};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Differences kept; further ones are counted.
pub const MAX_DIFFERENCES: usize = 100;

const BUFFER_BYTES: usize = 256 << 10;

/// The longest extended attribute and list of their names (Linux).
const MAX_XATTR_BYTES: usize = 64 << 10;

/// What to compare beside names, kinds, bytes and link targets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CompareOptions {
    /// Permission bits.
    pub modes: bool,
    /// Times of the last change, to the nanosecond.
    pub mtimes: bool,
    /// Extended attributes of the `user` namespace.
    pub xattrs: bool,
}

impl Default for CompareOptions {
    fn default() -> CompareOptions {
        CompareOptions { modes: true, mtimes: true, xattrs: false }
    }
}

/// What a comparison has found so far.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Comparison {
    /// Regular files compared.
    pub files: u64,
    /// Directories compared, the root included.
    pub directories: u64,
    /// Symbolic links compared.
    pub symlinks: u64,
    /// FIFOs, sockets and devices compared (by kind and device number).
    pub others: u64,
    /// Bytes of regular files compared.
    pub bytes: u64,
    /// Differences found.
    pub difference_count: u64,
    /// The first [`MAX_DIFFERENCES`] of them.
    pub differences: Vec<Difference>,
}

/// One difference.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Difference {
    /// Where, relative to both roots.
    pub path: PathBuf,
    /// What differs.
    pub what: String,
}

impl Comparison {
    /// Whether the trees are the same.
    pub fn is_same(&self) -> bool {
        self.difference_count == 0
    }

    fn note(&mut self, path: &Path, what: impl Into<String>) {
        self.difference_count += 1;
        if self.differences.len() < MAX_DIFFERENCES {
            self.differences.push(Difference { path: path.to_owned(), what: what.into() });
        }
    }
}

/// Compares the trees at `a` and `b` byte for byte, calling `progress` after each file
/// and each megabyte or so of large ones. Memory is bounded by the largest directory.
/// Whether a range is a hole is of no account; symbolic links are not followed. What
/// cannot be read counts as a difference; an error is returned only if a root cannot be.
pub fn compare_trees(
    a: &Path,
    b: &Path,
    options: CompareOptions,
    mut progress: impl FnMut(&Comparison),
) -> io::Result<Comparison> {
    fs::read_dir(a)?;
    fs::read_dir(b)?;
    let mut walk = Walk { a, b, options, found: Comparison::default(), progress: &mut progress };
    let mut pending = vec![PathBuf::new()];
    while let Some(relative) = pending.pop() {
        walk.directory(&relative, &mut pending);
    }
    Ok(walk.found)
}

struct Walk<'a> {
    a: &'a Path,
    b: &'a Path,
    options: CompareOptions,
    found: Comparison,
    progress: &'a mut dyn FnMut(&Comparison),
}

fn place(root: &Path, relative: &Path) -> PathBuf {
    // Joining an empty path would append a slash, which follows symbolic links.
    if relative.as_os_str().is_empty() { root.to_owned() } else { root.join(relative) }
}

fn names(directory: &Path) -> io::Result<BTreeSet<OsString>> {
    fs::read_dir(directory)?.map(|entry| Ok(entry?.file_name())).collect()
}

fn kind(metadata: &Metadata) -> &'static str {
    let kind = metadata.file_type();
    match () {
        () if kind.is_file() => "a regular file",
        () if kind.is_dir() => "a directory",
        () if kind.is_symlink() => "a symbolic link",
        () if kind.is_fifo() => "a FIFO",
        () if kind.is_socket() => "a socket",
        () if kind.is_block_device() => "a block device",
        () => "a character device",
    }
}

impl Walk<'_> {
    /// Compares two directories and what is in them, and leaves their subdirectories in
    /// `pending`.
    fn directory(&mut self, relative: &Path, pending: &mut Vec<PathBuf>) {
        let (a, b) = (place(self.a, relative), place(self.b, relative));
        self.found.directories += 1;
        match (fs::metadata(&a), fs::metadata(&b)) {
            (Ok(of_a), Ok(of_b)) => self.metadata(relative, &of_a, &of_b),
            (of_a, of_b) => self.unreadable(relative, of_a.err(), of_b.err()),
        }
        let (in_a, in_b) = match (names(&a), names(&b)) {
            (Ok(in_a), Ok(in_b)) => (in_a, in_b),
            (in_a, in_b) => return self.unreadable(relative, in_a.err(), in_b.err()),
        };
        for name in in_a.difference(&in_b) {
            self.found.note(&relative.join(name), "only in the first tree");
        }
        for name in in_b.difference(&in_a) {
            self.found.note(&relative.join(name), "only in the second tree");
        }
        for name in in_a.intersection(&in_b) {
            let relative = relative.join(name);
            if self.entry(&relative) {
                pending.push(relative);
            }
            (self.progress)(&self.found);
        }
    }

    fn unreadable(&mut self, relative: &Path, a: Option<io::Error>, b: Option<io::Error>) {
        for (error, which) in [(a, "first"), (b, "second")] {
            if let Some(error) = error {
                self.found.note(relative, format!("cannot be read in the {which} tree: {error}"));
            }
        }
    }

    /// Compares all but directories; whether it is one.
    fn entry(&mut self, relative: &Path) -> bool {
        let (a, b) = (place(self.a, relative), place(self.b, relative));
        let (of_a, of_b) = match (fs::symlink_metadata(&a), fs::symlink_metadata(&b)) {
            (Ok(of_a), Ok(of_b)) => (of_a, of_b),
            (of_a, of_b) => {
                self.unreadable(relative, of_a.err(), of_b.err());
                return false;
            }
        };
        if kind(&of_a) != kind(&of_b) {
            let what = format!("{} in the first tree, {} in the second", kind(&of_a), kind(&of_b));
            self.found.note(relative, what);
            return false;
        }
        if of_a.is_dir() {
            return true;
        }
        self.metadata(relative, &of_a, &of_b);
        if of_a.is_symlink() {
            self.found.symlinks += 1;
            self.targets(relative, &a, &b);
        } else if of_a.is_file() {
            self.found.files += 1;
            if of_a.len() != of_b.len() {
                let what =
                    format!("{} bytes in the first tree, {} in the second", of_a.len(), of_b.len());
                self.found.note(relative, what);
            } else if let Err(what) = self.bytes(&a, &b) {
                self.found.note(relative, what);
            }
        } else {
            self.found.others += 1;
            if of_a.rdev() != of_b.rdev() {
                self.found.note(relative, "another device number");
            }
        }
        false
    }

    fn targets(&mut self, relative: &Path, a: &Path, b: &Path) {
        match (fs::read_link(a), fs::read_link(b)) {
            (Ok(of_a), Ok(of_b)) if of_a == of_b => {}
            (Ok(of_a), Ok(of_b)) => {
                self.found.note(
                    relative,
                    format!("links to {of_a:?} in the first tree, {of_b:?} in the second"),
                );
            }
            (of_a, of_b) => self.unreadable(relative, of_a.err(), of_b.err()),
        }
    }

    fn metadata(&mut self, relative: &Path, a: &Metadata, b: &Metadata) {
        let differs = |what: &str, a: String, b: String| {
            (a != b).then(|| format!("{what} {a} in the first tree, {b} in the second"))
        };
        let mut differences = Vec::new();
        if self.options.modes && !a.is_symlink() {
            let mode = |m: &Metadata| format!("{:o}", m.mode() & 0o7777);
            differences.extend(differs("mode", mode(a), mode(b)));
        }
        if self.options.mtimes {
            let time = |m: &Metadata| format!("{}+{}ns", m.mtime(), m.mtime_nsec());
            differences.extend(differs("mtime", time(a), time(b)));
        }
        if self.options.xattrs && !a.is_symlink() {
            let xattrs = |root| match xattrs(&place(root, relative)) {
                Ok(xattrs) => format!("{xattrs:?}"),
                Err(error) => error.to_string(),
            };
            differences.extend(differs("extended attributes", xattrs(self.a), xattrs(self.b)));
        }
        for what in differences {
            self.found.note(relative, what);
        }
    }

    fn bytes(&mut self, a: &Path, b: &Path) -> Result<(), String> {
        let said = |which: &'static str| {
            move |error: io::Error| format!("cannot be read in the {which} tree: {error}")
        };
        let mut file_a = File::open(a).map_err(said("first"))?;
        let mut file_b = File::open(b).map_err(said("second"))?;
        let (mut buffer_a, mut buffer_b) = (vec![0; BUFFER_BYTES], vec![0; BUFFER_BYTES]);
        let mut at = 0u64;
        loop {
            let len_a = read_full(&mut file_a, &mut buffer_a).map_err(said("first"))?;
            let len_b = read_full(&mut file_b, &mut buffer_b).map_err(said("second"))?;
            let (part_a, part_b) = (&buffer_a[..len_a], &buffer_b[..len_b]);
            if part_a != part_b {
                let same = part_a.iter().zip(part_b).take_while(|(x, y)| x == y).count();
                return Err(format!("bytes differ at offset {}", at + same as u64));
            }
            at += len_a as u64;
            self.found.bytes += len_a as u64;
            if len_a == 0 {
                return Ok(());
            }
            if at.is_multiple_of(1 << 20) {
                (self.progress)(&self.found);
            }
        }
    }
}

/// Reads until the buffer is full or the file ends.
fn read_full(file: &mut File, buffer: &mut [u8]) -> io::Result<usize> {
    let mut len = 0;
    while len < buffer.len() {
        match file.read(&mut buffer[len..]) {
            Ok(0) => break,
            Ok(more) => len += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(len)
}

fn xattrs(path: &Path) -> io::Result<Vec<(String, Vec<u8>)>> {
    let mut list = vec![0; MAX_XATTR_BYTES];
    let len = match rustix::fs::llistxattr(path, &mut list[..]) {
        Ok(len) => len,
        Err(rustix::io::Errno::OPNOTSUPP) => 0,
        Err(errno) => return Err(errno.into()),
    };
    let mut found = Vec::new();
    for name in list[..len].split(|&b| b == 0).filter(|name| name.starts_with(b"user.")) {
        let mut value = vec![0; MAX_XATTR_BYTES];
        let len = rustix::fs::lgetxattr(path, OsStr::from_bytes(name), &mut value[..])?;
        value.truncate(len);
        found.push((String::from_utf8_lossy(name).into_owned(), value));
    }
    found.sort();
    Ok(found)
}
