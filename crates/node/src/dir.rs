//! The node's directory: which file is what, who may read it, and how it is written.
//!
//! The layout is described for people in `docs/design/node-directory.md`. The rules:
//!
//! - the directory is 0700 and every file in it 0600;
//! - a file that matters is written beside its name, synced, and renamed, so that a
//!   crash leaves the old one or the new one ([`write_atomically`]);
//! - a secret that others could read is refused, with the command that mends it
//!   ([`read_secret`]);
//! - one daemon per directory: it holds a lock on `node.lock` while it runs.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, Mode, OFlags};

/// The longest file of this directory that is read whole, bytes.
const MAX_SMALL_FILE_BYTES: u64 = 1 << 20;

/// The longest path of a Unix socket (`sun_path` less its NUL), less what the server
/// appends while it makes one.
const MAX_SOCKET_PATH_BYTES: usize = 107 - ".new".len();

/// The directory used when none is named: `$XDG_DATA_HOME/atoll`, or
/// `~/.local/share/atoll`; `None` when neither variable is set.
pub fn default_dir() -> Option<PathBuf> {
    default_dir_from(std::env::var_os("XDG_DATA_HOME"), std::env::var_os("HOME"))
}

fn default_dir_from(data_home: Option<OsString>, home: Option<OsString>) -> Option<PathBuf> {
    // The XDG specification has relative paths ignored.
    let absolute = |var: Option<OsString>| var.map(PathBuf::from).filter(|p| p.is_absolute());
    absolute(data_home)
        .or_else(|| absolute(home).map(|home| home.join(".local/share")))
        .map(|base| base.join("atoll"))
}

/// Why the node's directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DirError {
    /// The operating system failed a request.
    #[error("{doing} {path}: {source}", path = path.display())]
    Io {
        /// What was tried, e.g. "cannot read".
        doing: &'static str,
        /// On what.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Others can read a secret.
    #[error(
        "{path} can be read by others (mode {mode:04o}); if nobody else knows it yet, run: chmod 600 {path}",
        path = path.display()
    )]
    Readable {
        /// The secret's file.
        path: PathBuf,
        /// Its mode.
        mode: u32,
    },
    /// A file does not hold what it should.
    #[error("{path} is damaged: {what}", path = path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// A directory full of something else.
    #[error("{path} is not empty and holds no node; name an empty or new directory", path = path.display())]
    Foreign {
        /// The directory.
        path: PathBuf,
    },
    /// Another daemon runs here.
    #[error("a node runs in {path} already (process {process})", path = path.display())]
    Locked {
        /// The directory.
        path: PathBuf,
        /// The process number its lock file tells, or "unknown".
        process: String,
    },
}

impl DirError {
    pub(crate) fn io(
        doing: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(io::Error) -> DirError {
        let path = path.into();
        move |source| DirError::Io { doing, path, source }
    }

    pub(crate) fn damaged(path: impl Into<PathBuf>, what: impl ToString) -> DirError {
        DirError::Damaged { path: path.into(), what: what.to_string() }
    }
}

/// A node's directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NodeDir {
    root: PathBuf,
}

impl NodeDir {
    /// The directory at `root`, which need not exist.
    pub(crate) fn at(root: impl Into<PathBuf>) -> NodeDir {
        NodeDir { root: root.into() }
    }

    /// Where it is.
    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// The node's secret key.
    pub(crate) fn identity(&self) -> PathBuf {
        self.root.join("identity.key")
    }

    /// The network's parameters and secret.
    pub(crate) fn network(&self) -> PathBuf {
        self.root.join("network.cbor")
    }

    /// The secret key of the network's administrator: only where the network was made.
    pub(crate) fn admin_key(&self) -> PathBuf {
        self.root.join("admin.key")
    }

    /// The network's state since its secret was first replaced.
    pub(crate) fn membership(&self) -> PathBuf {
        self.root.join("membership")
    }

    /// The members this node has met.
    pub(crate) fn members(&self) -> PathBuf {
        self.root.join("members.cbor")
    }

    /// What the last `up` was told: addresses, storage.
    pub(crate) fn settings(&self) -> PathBuf {
        self.root.join("settings.cbor")
    }

    /// The peers this node knew last.
    pub(crate) fn peers(&self) -> PathBuf {
        self.root.join("peers.cbor")
    }

    /// The block store.
    pub(crate) fn store(&self) -> PathBuf {
        self.root.join("store")
    }

    /// The volumes published from here.
    pub(crate) fn volumes(&self) -> PathBuf {
        self.root.join("volumes")
    }

    /// What the block layer must not forget at a restart.
    pub(crate) fn ring_state(&self) -> PathBuf {
        self.root.join("ring")
    }

    /// Which nodes keep blocks for this one, and it for which.
    pub(crate) fn pointers(&self) -> PathBuf {
        self.root.join("pointers")
    }

    /// Which blocks were released.
    pub(crate) fn releases(&self) -> PathBuf {
        self.root.join("releases")
    }

    /// The control socket.
    pub(crate) fn socket(&self) -> PathBuf {
        self.root.join("control.sock")
    }

    fn lock_file(&self) -> PathBuf {
        self.root.join("node.lock")
    }

    /// Makes the directory, or takes an existing one: an empty one or a node's. It is
    /// 0700 afterwards.
    pub(crate) fn prepare(&self) -> Result<(), DirError> {
        let root = &self.root;
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(root)
            .map_err(DirError::io("cannot create", root))?;
        let entries = fs::read_dir(root).map_err(DirError::io("cannot read", root))?;
        // `atoll nfs` serves a TFS without a node.
        let names = entries.flatten().map(|entry| entry.file_name());
        let mut foreign = names.filter(|name| !["nfs", "logs"].iter().any(|own| name == own));
        let ours = self.lock_file().exists() || self.identity().exists();
        if !ours && foreign.next().is_some() {
            return Err(DirError::Foreign { path: root.clone() });
        }
        fs::set_permissions(root, fs::Permissions::from_mode(0o700))
            .map_err(DirError::io("cannot chmod", root))?;
        make_private_dir(&self.volumes())
    }

    /// Takes the lock that keeps a second daemon out, until it is dropped.
    pub(crate) fn lock(&self) -> Result<DirLock, DirError> {
        let path = self.lock_file();
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&path)
            .map_err(DirError::io("cannot open", &path))?;
        if let Err(errno) = rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            if errno != rustix::io::Errno::WOULDBLOCK {
                return Err(DirError::io("cannot lock", path)(errno.into()));
            }
            let mut process = String::new();
            let _ = file.take(20).read_to_string(&mut process);
            let process = process.trim();
            let process = if process.is_empty() { "unknown" } else { process }.to_owned();
            return Err(DirError::Locked { path: self.root.clone(), process });
        }
        file.set_len(0)
            .and_then(|()| writeln!(file, "{}", std::process::id()))
            .map_err(DirError::io("cannot write", path))?;
        Ok(DirLock { _file: file })
    }

    /// A path for the control socket that fits into a socket address: its own, or one
    /// through an open handle on the directory, which must be kept until bound or connected.
    pub(crate) fn socket_address(&self) -> Result<SocketAddress, DirError> {
        let path = self.socket();
        if path.as_os_str().len() <= MAX_SOCKET_PATH_BYTES {
            return Ok(SocketAddress { path, _dir: None });
        }
        let dir = rustix::fs::open(
            &self.root,
            OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        )
        .map_err(|errno| DirError::io("cannot open", &self.root)(errno.into()))?;
        let number = std::os::fd::AsRawFd::as_raw_fd(&dir);
        let path = PathBuf::from(format!("/proc/self/fd/{number}/control.sock"));
        Ok(SocketAddress { path, _dir: Some(dir) })
    }
}

/// A path short enough for a Unix socket; see [`NodeDir::socket_address`].
#[derive(Debug)]
pub(crate) struct SocketAddress {
    path: PathBuf,
    _dir: Option<rustix::fd::OwnedFd>,
}

impl SocketAddress {
    /// The path to bind or connect.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

/// Keeps other daemons out of a directory.
#[derive(Debug)]
pub(crate) struct DirLock {
    _file: File,
}

/// Makes a directory for this user only; an existing one is taken as it is.
pub fn make_private_dir(path: &Path) -> Result<(), DirError> {
    match fs::DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        other => other.map_err(DirError::io("cannot create", path)),
    }
}

/// Creates a file for this user only, empty.
pub(crate) fn create_private_file(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create(true).truncate(true).mode(0o600).open(path)
}

/// Replaces `path` by `bytes`: after a crash it has the old content or the new, and
/// when this returns, the new.
pub fn write_atomically(path: &Path, bytes: &[u8]) -> Result<(), DirError> {
    let beside = beside(path);
    let written = create_private_file(&beside)
        .and_then(|mut file| file.write_all(bytes).and_then(|()| file.sync_all()))
        .and_then(|()| fs::rename(&beside, path))
        .and_then(|()| sync_parent(path));
    if written.is_err() {
        let _ = fs::remove_file(&beside);
    }
    written.map_err(DirError::io("cannot write", path))
}

/// Like [`write_atomically`], but fails if `path` exists: a secret is never overwritten.
pub fn create_atomically(path: &Path, bytes: &[u8]) -> Result<(), DirError> {
    let beside = beside(path);
    let written = create_private_file(&beside)
        .and_then(|mut file| file.write_all(bytes).and_then(|()| file.sync_all()))
        .and_then(|()| fs::hard_link(&beside, path))
        .and_then(|()| sync_parent(path));
    let _ = fs::remove_file(&beside);
    written.map_err(DirError::io("cannot create", path))
}

/// Makes renames and new names in `path`'s directory durable.
pub(crate) fn sync_parent(path: &Path) -> io::Result<()> {
    let parent = path.parent().unwrap_or(Path::new("/"));
    File::open(parent)?.sync_all()
}

fn beside(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".new");
    path.with_file_name(name)
}

/// Reads a small file; `None` if there is none.
pub(crate) fn read_small(path: &Path) -> Result<Option<Vec<u8>>, DirError> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(DirError::io("cannot read", path)(error)),
    };
    read_capped(path, file).map(Some)
}

/// Reads a small file that no other user may read; `None` if there is none.
pub fn read_secret(path: &Path) -> Result<Option<Vec<u8>>, DirError> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(DirError::io("cannot read", path)(error)),
    };
    let mode = file.metadata().map_err(DirError::io("cannot stat", path))?.mode() & 0o7777;
    if mode & 0o077 != 0 {
        return Err(DirError::Readable { path: path.to_owned(), mode });
    }
    read_capped(path, file).map(Some)
}

fn read_capped(path: &Path, file: File) -> Result<Vec<u8>, DirError> {
    let mut bytes = Vec::new();
    file.take(MAX_SMALL_FILE_BYTES + 1)
        .read_to_end(&mut bytes)
        .map_err(DirError::io("cannot read", path))?;
    if bytes.len() as u64 > MAX_SMALL_FILE_BYTES {
        return Err(DirError::damaged(path, "it is far too long"));
    }
    Ok(bytes)
}

/// A path as it is stored and sent: the system's bytes.
pub(crate) fn path_to_bytes(path: &Path) -> Vec<u8> {
    path.as_os_str().as_bytes().to_vec()
}

/// The path that [`path_to_bytes`] made these bytes of.
pub(crate) fn path_from_bytes(bytes: Vec<u8>) -> PathBuf {
    PathBuf::from(OsString::from_vec(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_directory_follows_xdg() {
        let check = |data: Option<&str>, home: Option<&str>, want: Option<&str>| {
            let got = default_dir_from(data.map(Into::into), home.map(Into::into));
            assert_eq!(got, want.map(PathBuf::from), "{data:?} {home:?}");
        };
        check(Some("/data"), Some("/home/a"), Some("/data/atoll"));
        check(None, Some("/home/a"), Some("/home/a/.local/share/atoll"));
        check(Some("relative"), Some("/home/a"), Some("/home/a/.local/share/atoll"));
        check(Some(""), Some(""), None);
        check(None, None, None);
    }

    #[test]
    fn a_second_lock_is_refused_and_names_the_holder() {
        let temp = tempfile::tempdir().expect("temp");
        let dir = NodeDir::at(temp.path().join("n"));
        dir.prepare().expect("fresh");
        let lock = dir.lock().expect("first");
        let error = dir.lock().expect_err("second");
        assert!(error.to_string().contains(&std::process::id().to_string()), "{error}");
        drop(lock);
        dir.lock().expect("free again");
    }

    #[test]
    fn somebody_elses_directory_is_left_alone() {
        let temp = tempfile::tempdir().expect("temp");
        fs::write(temp.path().join("thesis.tex"), b"").expect("write");
        let error = NodeDir::at(temp.path()).prepare().expect_err("not ours");
        assert!(matches!(error, DirError::Foreign { .. }), "{error}");
    }

    #[test]
    fn a_directory_from_which_only_nfs_was_served_is_taken() {
        let temp = tempfile::tempdir().expect("temp");
        for name in ["nfs", "logs"] {
            make_private_dir(&temp.path().join(name)).expect("made");
        }
        NodeDir::at(temp.path()).prepare().expect("ours");
    }

    #[test]
    fn a_prepared_directory_is_for_its_owner_only() {
        let temp = tempfile::tempdir().expect("temp");
        fs::set_permissions(temp.path(), fs::Permissions::from_mode(0o755)).expect("chmod");
        let dir = NodeDir::at(temp.path());
        dir.prepare().expect("empty");
        for path in [dir.root().to_owned(), dir.volumes()] {
            assert_eq!(fs::metadata(&path).expect("stat").mode() & 0o777, 0o700, "{path:?}");
        }
    }

    #[test]
    fn a_secret_others_can_read_is_refused_with_the_command_that_mends_it() {
        let temp = tempfile::tempdir().expect("temp");
        let path = temp.path().join("identity.key");
        create_atomically(&path, &[7; 32]).expect("create");
        assert_eq!(read_secret(&path).expect("0600"), Some(vec![7; 32]));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).expect("chmod");
        let error = read_secret(&path).expect_err("0640").to_string();
        assert!(error.contains(&format!("chmod 600 {}", path.display())), "{error}");
        assert!(error.contains("0640"), "{error}");
    }

    #[test]
    fn a_secret_is_never_overwritten() {
        let temp = tempfile::tempdir().expect("temp");
        let path = temp.path().join("identity.key");
        create_atomically(&path, &[7; 32]).expect("create");
        create_atomically(&path, &[8; 32]).expect_err("exists");
        assert_eq!(fs::read(&path).expect("read"), [7; 32]);
    }

    #[test]
    fn a_deep_directory_still_has_a_socket_address() {
        let temp = tempfile::tempdir().expect("temp");
        let deep = NodeDir::at(temp.path().join("d".repeat(60)).join("e".repeat(60)));
        deep.prepare().expect("fresh");
        let address = deep.socket_address().expect("through a handle");
        assert!(address.path().as_os_str().len() <= MAX_SOCKET_PATH_BYTES);
        let _listener = std::os::unix::net::UnixListener::bind(address.path()).expect("bind");
        assert!(deep.socket().exists());
        let other = deep.socket_address().expect("again");
        std::os::unix::net::UnixStream::connect(other.path()).expect("connect");
    }
}
