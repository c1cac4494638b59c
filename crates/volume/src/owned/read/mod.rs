//! Reading a volume by path.

use std::sync::Arc;
use std::time::Duration;

use atoll_dht::{Blocks, GetError};
use atoll_env::Env;
use atoll_key::{BlockHash, VolumeId};
use atoll_vfs::Errno;
use bytes::Bytes;
use futures_util::stream::BoxStream;

use super::format::Entry;

/// How to read a volume.
#[derive(Clone, Debug)]
pub struct VolumeOptions {
    /// How old the root may be before the ring is asked for a newer one.
    pub max_age: Duration,
    /// Blocks kept in memory.
    pub cache_bytes: u64,
    /// How far a sequential reader is read ahead of, at most.
    pub read_ahead_bytes: u64,
}

impl Default for VolumeOptions {
    fn default() -> VolumeOptions {
        VolumeOptions {
            max_age: Duration::from_secs(30),
            cache_bytes: 32 << 20,
            read_ahead_bytes: 4 << 20,
        }
    }
}

/// Why a volume could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The ring has no such volume, or cannot be asked.
    #[error("the volume's root: {0}")]
    Fetch(#[from] GetError),
    /// The signed root is not a volume's.
    #[error("the volume's root block is bad: {0}")]
    Bad(String),
}

/// Why something in a volume could not be read. Paths are relative to the volume's root.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// There is no such name.
    #[error("{path}: no such file or directory")]
    NoSuchEntry {
        /// Which.
        path: String,
    },
    /// Something other than a directory where one is needed.
    #[error("{path}: not a directory")]
    NotADirectory {
        /// Which.
        path: String,
    },
    /// Something other than a regular file where one is needed.
    #[error("{path}: not a regular file")]
    NotAFile {
        /// Which.
        path: String,
    },
    /// The block cannot be fetched.
    #[error("{path}: {source}")]
    Fetch {
        /// What it belongs to.
        path: String,
        /// Which block.
        hash: BlockHash,
        /// What the ring said.
        source: GetError,
    },
    /// The publisher signed nonsense.
    #[error("{path}: block {hash} is bad: {reason}")]
    Bad {
        /// What it belongs to.
        path: String,
        /// Which block.
        hash: BlockHash,
        /// What is wrong with it.
        reason: String,
    },
}

impl ReadError {
    /// As the kernel understands it.
    pub fn errno(&self) -> Errno {
        Errno::EIO
    }
}

/// What is known of a volume's freshness.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeStatus {
    /// Version of the root in use.
    pub version: u64,
    /// How long ago the ring confirmed it.
    pub age: Duration,
    /// Why it may be stale, if the last refresh failed.
    pub stale: Option<String>,
}

/// A volume that is being read; follows its publisher's updates.
pub struct Volume {
    _private: (),
}

impl Volume {
    /// Fetches the volume's root.
    pub async fn open(
        env: Env,
        blocks: Arc<dyn Blocks>,
        id: VolumeId,
        options: VolumeOptions,
    ) -> Result<Arc<Volume>, OpenError> {
        let _ = (env, blocks, id, options);
        Err(OpenError::Bad("not built yet".into()))
    }

    /// The newest root known, asked for again if it is older than `max_age`. When the
    /// ring cannot be reached, the old one ([`Volume::status`] says so).
    pub async fn snapshot(&self) -> Arc<Snapshot> {
        unreachable!("a volume cannot be opened yet")
    }

    /// How fresh the volume is.
    pub fn status(&self) -> VolumeStatus {
        unreachable!("a volume cannot be opened yet")
    }
}

/// One version of a volume; never changes.
pub struct Snapshot {
    _private: (),
}

/// A file, directory or link found in a snapshot.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Item {
    /// Its path from the volume's root, without a leading slash; empty for the root.
    pub path: Bytes,
    /// What its directory says about it. The root's name is empty.
    pub entry: Entry,
}

/// A directory being listed.
pub struct Listing {
    _private: (),
}

impl Listing {
    /// The next entries in order of their names, at most `limit`; empty at the end.
    pub async fn next_page(&mut self, limit: usize) -> Result<Vec<Item>, ReadError> {
        let _ = limit;
        unreachable!("a volume cannot be opened yet")
    }
}

impl Snapshot {
    /// The version its publisher gave it.
    pub fn version(&self) -> u64 {
        unreachable!("a volume cannot be opened yet")
    }

    /// The root directory.
    pub fn root(&self) -> Item {
        unreachable!("a volume cannot be opened yet")
    }

    /// Finds `path` (components separated by `/`; empty ones and `.` are ignored, `..`
    /// is refused). Symbolic links are not followed.
    pub async fn resolve(&self, path: &[u8]) -> Result<Item, ReadError> {
        let _ = path;
        unreachable!("a volume cannot be opened yet")
    }

    /// Lists a directory.
    pub fn list(&self, directory: &Item) -> Result<Listing, ReadError> {
        let _ = directory;
        unreachable!("a volume cannot be opened yet")
    }

    /// Up to `len` bytes of a file at `offset`; fewer only at its end.
    pub async fn read_range(&self, file: &Item, offset: u64, len: u32) -> Result<Bytes, ReadError> {
        let _ = (file, offset, len);
        unreachable!("a volume cannot be opened yet")
    }

    /// A whole file in order, read ahead.
    pub fn read_stream(&self, file: &Item) -> BoxStream<'static, Result<Bytes, ReadError>> {
        let _ = file;
        unreachable!("a volume cannot be opened yet")
    }

    /// The extended attributes of an item, in order of their names.
    pub async fn xattrs(&self, item: &Item) -> Result<Vec<(Bytes, Bytes)>, ReadError> {
        let _ = item;
        unreachable!("a volume cannot be opened yet")
    }
}
