//! Recognises directories that hold a node's secrets or other people's blocks, which must not be
//! published or copied by accident.
//!
//! A directory is recognised by its contents, not by its path: the directory of another user's
//! node, a copy of one, or one reached through a bind mount is just as secret.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Mode, OFlags};

/// Names of which two make a node's directory; see `docs/design/node-directory.md`.
const NODE_FILES: [&str; 5] =
    ["identity.key", "network.cbor", "settings.cbor", "peers.cbor", "node.lock"];

/// The length of a secret key's file.
const KEY_BYTES: u64 = 32;

/// What a directory holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PrivateDirectory {
    /// A node: its identity, the network's secret, keys of volumes.
    Node,
    /// The keys of one volume.
    VolumeKeys,
    /// The key of a user of shared volumes.
    UserKey,
    /// The log or the index of a node's blocks.
    Store,
    /// Blocks as files, given by `contribute`.
    Contributed,
}

impl fmt::Display for PrivateDirectory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            PrivateDirectory::Node => "it is a node's directory, with its secret keys",
            PrivateDirectory::VolumeKeys => "it holds the secret keys of a volume",
            PrivateDirectory::UserKey => "it holds the secret key of a user of shared volumes",
            PrivateDirectory::Store => "it is a node's store of blocks",
            PrivateDirectory::Contributed => "a node keeps blocks of the ring there",
        })
    }
}

impl PrivateDirectory {
    /// What is in `directory`, if that is private. A handle opened with `O_PATH` will do.
    pub fn of(directory: BorrowedFd<'_>) -> Option<PrivateDirectory> {
        let file = |name: &str| length(directory, name, FileType::RegularFile);
        let has = |name: &str| file(name).is_some();
        let has_directory = |name| length(directory, name, FileType::Directory).is_some();
        let node_files = NODE_FILES.iter().filter(|name| has(name)).count();
        let identity_alone = || file("identity.key") == Some(KEY_BYTES) && has_directory("volumes");
        if node_files >= 2 || (node_files == 1 && identity_alone()) {
            return Some(PrivateDirectory::Node);
        }
        if file("key") == Some(KEY_BYTES) && has("info") {
            return Some(PrivateDirectory::VolumeKeys);
        }
        if file("user.key") == Some(KEY_BYTES) {
            return Some(PrivateDirectory::UserKey);
        }
        if has("index.redb") && has("lock") {
            return Some(PrivateDirectory::Store);
        }
        has("atoll-store").then_some(PrivateDirectory::Contributed)
    }
}

/// The length of `name` in `directory`, if it is there and of that kind.
fn length(directory: BorrowedFd<'_>, name: &str, kind: FileType) -> Option<u64> {
    let stat = rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW).ok()?;
    (FileType::from_raw_mode(stat.st_mode) == kind).then(|| u64::try_from(stat.st_size).ok())?
}

/// The private directory that `path` is or lies in, links followed: the outermost.
///
/// # Errors
/// If `path` is not there.
pub fn enclosing(path: &Path) -> io::Result<Option<(PathBuf, PrivateDirectory)>> {
    let path = std::fs::canonicalize(path)?;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let found = path.ancestors().filter_map(|at| {
        let directory = rustix::fs::open(at, flags, Mode::empty()).ok()?;
        Some((at.to_path_buf(), PrivateDirectory::of(directory.as_fd())?))
    });
    Ok(found.last())
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};

    use super::*;

    fn found(directory: &Path) -> Option<PrivateDirectory> {
        PrivateDirectory::of(File::open(directory).expect("opens").as_fd())
    }

    #[test]
    fn private_directories_are_known_by_what_is_in_them() {
        type Files<'a> = &'a [(&'a str, &'a [u8])];
        let secret = [7; 32];
        let cases: [(Files<'_>, Option<PrivateDirectory>); 10] = [
            (&[("identity.key", &secret), ("node.lock", b"1")], Some(PrivateDirectory::Node)),
            (&[("node.lock", b"1"), ("settings.cbor", b"")], Some(PrivateDirectory::Node)),
            (&[("identity.key", &secret), ("volumes/x", b"")], Some(PrivateDirectory::Node)),
            (&[("key", &secret), ("info", b"x")], Some(PrivateDirectory::VolumeKeys)),
            (&[("user.key", &secret)], Some(PrivateDirectory::UserKey)),
            (&[("index.redb", b"x"), ("lock", b"1")], Some(PrivateDirectory::Store)),
            (&[("atoll-store", b"x")], Some(PrivateDirectory::Contributed)),
            (&[("identity.key", b"mine"), ("volumes/x", b"")], None),
            (&[("key", b"of another length"), ("info", b"x")], None),
            (&[("node.lock", b""), ("notes", b"")], None),
        ];
        for (files, expected) in cases {
            let temp = tempfile::tempdir().expect("temp");
            for (name, bytes) in files {
                let path = temp.path().join(name);
                fs::create_dir_all(path.parent().expect("it has one")).expect("makes");
                fs::write(path, bytes).expect("writes");
            }
            assert_eq!(found(temp.path()), expected, "{files:?}");
        }
    }

    #[test]
    fn what_lies_in_a_private_directory_is_found_through_a_link() {
        let temp = tempfile::tempdir().expect("temp");
        let node = temp.path().join("n");
        fs::create_dir_all(node.join("volumes/docs")).expect("makes");
        fs::write(node.join("identity.key"), [7; 32]).expect("writes");
        fs::write(node.join("node.lock"), "1").expect("writes");
        let link = temp.path().join("link");
        std::os::unix::fs::symlink(node.join("volumes"), &link).expect("links");
        let (at, kind) = enclosing(&link.join("docs")).expect("is there").expect("is in a node's");
        assert_eq!((at, kind), (fs::canonicalize(&node).expect("there"), PrivateDirectory::Node));
        assert_eq!(enclosing(temp.path()).expect("is there"), None);
    }
}
