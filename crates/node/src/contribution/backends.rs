//! Which store backends a policy needs, and opening them.
//!
//! The log is `store/` in the node's directory. A directory of files has its index in
//! `files/ID/`, ID being made of its path, so that one can be left for another.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use atoll_store::{
    Backend, BlockStore, ContributedStore, DiskConfig, DiskStore, FileConfig, FileStore, FlagCheck,
    Space,
};

use super::dynamic_capacity;
use crate::config::StartError;
use crate::dir::{self, NodeDir};
use crate::policy::{Place, Policy};
use crate::settings::Settings;

/// How long the last users of a backend that has been left may take.
const LEAVING_LIMIT: Duration = Duration::from_secs(60);
/// How often that is looked at.
const LEAVING_LOOK: Duration = Duration::from_millis(50);

impl Place {
    pub(crate) fn of_backend(backend: &Backend) -> Place {
        match backend {
            Backend::Log(_) => Place::Log,
            Backend::Files(files) => Place::Files(files.dir().to_path_buf()),
        }
    }

    /// The directory of the blocks, to look at.
    pub(crate) fn path(&self, node: &NodeDir) -> PathBuf {
        match self {
            Place::Log => node.store(),
            Place::Files(dir) => dir.clone(),
        }
    }

    /// Where its index is.
    pub(crate) fn index_dir(&self, node: &NodeDir) -> PathBuf {
        match self {
            Place::Log => node.store(),
            Place::Files(path) => {
                let id = blake3::hash(&dir::path_to_bytes(path));
                node.root().join("files").join(&id.to_hex()[..16])
            }
        }
    }

    /// Opens it, or makes it. Waits for the disk.
    pub(crate) fn open(
        &self,
        node: &NodeDir,
        capacity_bytes: u64,
        flag: FlagCheck,
    ) -> Result<Backend, String> {
        let index_dir = self.index_dir(node);
        match self {
            Place::Log => {
                dir::make_private_dir(&index_dir).map_err(|error| error.to_string())?;
                let config = DiskConfig { capacity_bytes, ..DiskConfig::default() };
                let store = DiskStore::open(&index_dir, config);
                Ok(Backend::Log(Arc::new(store.map_err(|error| error.to_string())?)))
            }
            Place::Files(blocks_dir) => {
                let parent = node.root().join("files");
                dir::make_private_dir(&parent).map_err(|error| error.to_string())?;
                let disk = DiskConfig { capacity_bytes, ..DiskConfig::default() };
                let store = FileStore::open(&index_dir, blocks_dir, FileConfig { flag, disk });
                Ok(Backend::Files(Arc::new(store.map_err(|error| error.to_string())?)))
            }
        }
    }
}

/// The store of a node at its start.
pub(crate) struct Opened {
    pub store: Arc<ContributedStore>,
    /// Renewals since the blocks came are forgotten.
    pub rebuilt_index: bool,
}

impl Opened {
    /// Opens the backends that the settings speak of. Waits for the disk: there may be a log to
    /// replay.
    pub(crate) fn open(
        node: &NodeDir,
        settings: &Settings,
        flag: FlagCheck,
    ) -> Result<Opened, StartError> {
        let policy = settings.policy();
        let place = Place::of(&policy);
        let failed = |why: String| StartError::Store(why);
        let present = place.open(node, settings.storage_bytes(), flag).map_err(failed)?;
        let capacity = capacity_bytes(&policy, node, &present);
        present.set_capacity(capacity.map_err(|error| failed(error.to_string()))?);
        let former = settings.former().filter(|former| *former != place);
        let former = match former {
            None => None,
            Some(former) => {
                Some(former.open(node, settings.storage_bytes(), flag).map_err(failed)?)
            }
        };
        if place != Place::Log && !matches!(former, Some(Backend::Log(_))) {
            // Its blocks had been moved when the node stopped before it could be removed.
            remove_dir(&node.store()).map_err(|error| failed(error.to_string()))?;
        }
        let rebuilt = |backend: &Backend| match backend {
            Backend::Log(log) => log.report().rebuilt_index,
            Backend::Files(files) => files.adopted_blocks() > 0,
        };
        let rebuilt_index = rebuilt(&present) || former.as_ref().is_some_and(rebuilt);
        Ok(Opened { store: Arc::new(ContributedStore::new(present, former)), rebuilt_index })
    }
}

/// What `policy` lets the backend take at present. Waits for the disk.
///
/// # Errors
/// The file system cannot be looked at. A backend that is away may take nothing.
pub(crate) fn capacity_bytes(
    policy: &Policy,
    node: &NodeDir,
    backend: &Backend,
) -> io::Result<u64> {
    match (policy, backend) {
        (Policy::Fixed { size_bytes }, _) => Ok(*size_bytes),
        (Policy::Dynamic { low, high }, _) => {
            let space = Space::of(node.root())?;
            Ok(dynamic_capacity(&space, backend.store().usage().disk_bytes, *low, *high))
        }
        (Policy::Transparent { .. }, Backend::Files(files)) => {
            let Ok(space) = files.look() else { return Ok(0) };
            // The space that TFS counts as free contains this node's own blocks.
            Ok(space.free_bytes.max(files.usage().disk_bytes))
        }
        // The settings speak of another backend than the one that is open; never for long.
        (Policy::Transparent { .. }, Backend::Log(log)) => Ok(log.usage().disk_bytes),
    }
}

/// Forgets a directory that is gone, once its last users are done. Waits for them.
pub(crate) fn forget_files(files: Arc<FileStore>, node: &NodeDir) -> io::Result<()> {
    let index_dir = Place::Files(files.dir().to_path_buf()).index_dir(node);
    drop(alone(files)?);
    remove_dir(&index_dir)
}

/// Removes a backend whose blocks are elsewhere, once its last users are done. Waits.
pub(crate) fn remove_backend(backend: Backend, node: &NodeDir) -> io::Result<()> {
    let index_dir = Place::of_backend(&backend).index_dir(node);
    match backend {
        Backend::Log(log) => {
            drop(alone(log)?);
            remove_log(&index_dir)
        }
        Backend::Files(files) => alone(files)?.remove_all(&index_dir),
    }
}

/// Waits until `shared` has no other holder, and takes it.
fn alone<T>(mut shared: Arc<T>) -> io::Result<T> {
    let mut waited = Duration::ZERO;
    loop {
        shared = match Arc::try_unwrap(shared) {
            Ok(alone) => return Ok(alone),
            Err(_) if waited >= LEAVING_LIMIT => {
                return Err(io::Error::other("it is still in use"));
            }
            Err(shared) => shared,
        };
        std::thread::sleep(LEAVING_LOOK);
        waited += LEAVING_LOOK;
    }
}

/// Removes a log except the damaged segments that its recovery has set aside for people.
fn remove_log(path: &Path) -> io::Result<()> {
    let entries: Vec<_> = std::fs::read_dir(path)?.collect::<io::Result<_>>()?;
    let is_damaged = |name: &std::ffi::OsString| name.to_string_lossy().ends_with(".damaged");
    let (kept, gone): (Vec<_>, Vec<_>) =
        entries.into_iter().partition(|entry| is_damaged(&entry.file_name()));
    if kept.is_empty() {
        return remove_dir(path);
    }
    gone.iter().try_for_each(|entry| std::fs::remove_file(entry.path()))
}

fn remove_dir(path: &Path) -> io::Result<()> {
    match std::fs::remove_dir_all(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}
