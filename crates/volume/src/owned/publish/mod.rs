//! Publishing a directory of this machine as a volume (CFS §3.1, §5.5).

use std::path::{Path, PathBuf};
use std::sync::Arc;

use atoll_dht::{Blocks, PutError};
use atoll_env::{BoxFuture, Env};
use atoll_key::{BlockHash, SecretKey, VolumeId};
use globset::GlobSet;

use super::progress::Progress;

/// How to publish.
#[derive(Clone, Debug)]
pub struct PublishOptions {
    /// Size of a data block: a power of two, 4 KiB to 1 MiB.
    pub block_size_bytes: u32,
    /// Paths to leave out, relative to the source; see [`exclude_set`].
    pub exclude: GlobSet,
    /// A name for people, stored in the root block; at most 255 bytes.
    pub label: Option<String>,
    /// Leave out what cannot be read (and say so) rather than fail.
    pub skip_unreadable: bool,
    /// Bytes of blocks read but not yet acknowledged by the ring.
    pub max_in_flight_bytes: usize,
    /// Threads that read and hash files.
    pub reader_threads: usize,
}

impl Default for PublishOptions {
    fn default() -> PublishOptions {
        PublishOptions {
            block_size_bytes: 64 << 10,
            exclude: GlobSet::empty(),
            label: None,
            skip_unreadable: false,
            max_in_flight_bytes: 32 << 20,
            reader_threads: 4,
        }
    }
}

/// Patterns for [`PublishOptions::exclude`]: one without `/` matches a name anywhere in
/// the tree, one with `/` the path from the source's top. `*` stops at `/`, `**` does not.
pub fn exclude_set<S: AsRef<str>>(patterns: &[S]) -> Result<GlobSet, globset::Error> {
    let mut set = globset::GlobSetBuilder::new();
    for pattern in patterns {
        let pattern = pattern.as_ref().trim_end_matches('/');
        let anchored = match pattern.strip_prefix('/') {
            Some(rest) => rest.to_string(),
            None if pattern.contains('/') => pattern.to_string(),
            None => format!("**/{pattern}"),
        };
        set.add(globset::GlobBuilder::new(&anchored).literal_separator(true).build()?);
    }
    set.build()
}

/// Is told every block of the tree, so that their leases can be kept extended.
pub trait Keeper: Send + Sync + 'static {
    /// These blocks belong to the tree; called many times, at most 1,024 hashes a call,
    /// before the root block is replaced.
    fn keep(&self, hashes: Vec<BlockHash>) -> BoxFuture<'static, Result<(), String>>;
}

/// Keeps nothing: the leases run out unless the tree is published again.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoKeeper;

impl Keeper for NoKeeper {
    fn keep(&self, _: Vec<BlockHash>) -> BoxFuture<'static, Result<(), String>> {
        Box::pin(async { Ok(()) })
    }
}

/// Something of the source that is not in the volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Skipped {
    /// Which, relative to the source.
    pub path: PathBuf,
    /// Why.
    pub reason: String,
}

/// What was published.
#[derive(Clone, Debug)]
pub struct Published {
    /// The volume; its address is `VolumeAddress(volume)`.
    pub volume: VolumeId,
    /// The root's version.
    pub version: u64,
    /// The ring had this very tree already; its root was left as it is.
    pub unchanged: bool,
    /// Regular files.
    pub files: u64,
    /// Directories, the top one included.
    pub dirs: u64,
    /// Symbolic links.
    pub symlinks: u64,
    /// FIFOs, sockets and devices, which a volume does not hold.
    pub special: u64,
    /// What could not be read (only with `skip_unreadable`); the first 1,000.
    pub skipped: Vec<Skipped>,
    /// How many could not be read.
    pub skipped_count: u64,
    /// Lengths of all files together.
    pub bytes: u64,
    /// Blocks of the tree (the root not counted).
    pub blocks: u64,
    /// Blocks of them the ring lacked.
    pub new_blocks: u64,
    /// Bytes of those.
    pub new_bytes: u64,
}

/// Why a tree was not published. The ring's root is then the old one.
#[derive(Debug, thiserror::Error)]
pub enum PublishError {
    /// An option is out of bounds.
    #[error("{0}")]
    Options(String),
    /// A file or directory of the source cannot be read.
    #[error("cannot read {}: {reason}", path.display())]
    Source {
        /// Which.
        path: PathBuf,
        /// What the system said.
        reason: String,
    },
    /// The ring did not take blocks.
    #[error("{0}")]
    Put(#[from] PutError),
    /// The keeper did not take the block list.
    #[error("the blocks' leases cannot be kept: {0}")]
    Keep(String),
}

/// Publishes the directory `source` as the volume of `secret`, or as its next version.
///
/// When this returns, the ring has acknowledged every block, and then the root. Dropping
/// the future stops the work; the ring's root is then the old one.
pub async fn publish(
    env: Env,
    blocks: Arc<dyn Blocks>,
    source: &Path,
    secret: &SecretKey,
    options: PublishOptions,
    progress: Arc<dyn Progress>,
    keeper: Arc<dyn Keeper>,
) -> Result<Published, PublishError> {
    let _ = (env, blocks, source, secret, options, progress, keeper);
    Err(PublishError::Options("publishing is not built yet".into()))
}
