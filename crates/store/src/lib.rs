//! Where one machine keeps its blocks.
//!
//! A [`BlockStore`] maps keys to verified blocks, keeps them in key order, and
//! answers a `put` only when the block would survive power loss. Implementations:
//! `DiskStore` (append-only segment log with a redb index), `FileStore` (one file for each
//! block, on a file system that may take them back) and `MemoryStore`.
//!
//! The disk format and the reasoning about crashes are in `docs/design/store.md`.
//!
//! A store does not verify hashes or signatures and does not know peers, replicas or
//! files: it keeps what it is given, byte for byte, checksummed at rest.

mod contributed;
pub mod disk;
mod engine;
mod files;
mod log;
mod memory;
pub mod segment;
mod summary;

use std::path::PathBuf;

use atoll_env::BoxFuture;
use atoll_key::{BlockKind, Key, KeyRange};
use bytes::Bytes;

pub use contributed::{Backend, Busy, ContributedStore, Moved, farthest};
pub use engine::holdings::{Holding, OwnerUsage, Owners};
pub use engine::{DiskConfig, IndexFailure, OpenError};
pub use files::{Care, FileConfig, FileStore, FlagCheck, OpenFilesError, Space, UnfitDir};
pub use log::{DiskStore, OpenReport};
pub use memory::MemoryStore;
pub use summary::{MAX_PARTS, Merged, Part, Summary};

/// How much longer a version may be than the one that it replaces, to use the room that is kept for versions. A directory that
/// loses a name grows by the certificate of whoever removes it, about a KiB.
pub(crate) const MAX_GROWTH_BYTES: usize = 4 << 10;

/// The owner a block is charged to: the node that had it stored and its address (CFS §5.4).
/// Opaque here. All zeros, [`Owner::NOBODY`], for blocks that are charged to no publisher.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Owner {
    /// The first 16 bytes of the publishing node's public key.
    pub publisher: [u8; 16],
    /// The address it is charged to, as IPv6, IPv4 mapped.
    pub ip: [u8; 16],
}

impl Owner {
    /// No owner.
    pub const NOBODY: Owner = Owner { publisher: [0; 16], ip: [0; 16] };

    /// Its length on disk.
    pub(crate) const BYTES: usize = 32;

    /// As it is on disk: the publisher, then the address.
    pub(crate) fn to_bytes(self) -> [u8; Owner::BYTES] {
        let mut out = [0; Owner::BYTES];
        out[..16].copy_from_slice(&self.publisher);
        out[16..].copy_from_slice(&self.ip);
        out
    }

    pub(crate) fn from_bytes(bytes: &[u8; Owner::BYTES]) -> Owner {
        let half = |at: usize| bytes[at..at + 16].try_into().expect("16 bytes");
        Owner { publisher: half(0), ip: half(16) }
    }
}

/// What is known of a stored block without reading it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockInfo {
    /// Where it lives on the ring.
    pub key: Key,
    /// What the key promises about the bytes.
    pub kind: BlockKind,
    /// What its bytes say, 0 if they never change.
    pub version: u64,
    /// When its lease ends, seconds since 1970.
    pub expires_unix_secs: u64,
    /// Length of the block, bytes.
    pub len_bytes: u32,
    /// The owner it is charged to, who gave it its present lease.
    pub owner: Owner,
}

/// A block and what is known of it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StoredBlock {
    /// What is known of it; `len_bytes` equals `bytes.len()`.
    pub info: BlockInfo,
    /// Its bytes.
    pub bytes: Bytes,
}

/// How full a store is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Usage {
    /// Blocks held.
    pub blocks: u64,
    /// Sum of the lengths of the blocks held, bytes.
    pub block_bytes: u64,
    /// What the store takes on its disk, bytes, garbage included.
    pub disk_bytes: u64,
    /// What it may take at most, bytes.
    pub capacity_bytes: u64,
}

/// Why the store could not do what was asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// The configured capacity or the disk is full; nothing of the batch was kept.
    #[error("no room: {used_bytes} of {capacity_bytes} bytes are used")]
    Full {
        /// Bytes used.
        used_bytes: u64,
        /// Bytes allowed.
        capacity_bytes: u64,
    },
    /// A block's bytes no longer match their checksum. It has been set aside and
    /// counts as missing from now on.
    #[error("block {key} is damaged on disk")]
    Corrupted {
        /// The damaged block.
        key: Key,
    },
    /// The directory of the blocks is not there; its blocks come back with it.
    #[error("{} is not there", dir.display())]
    Away {
        /// Which.
        dir: PathBuf,
    },
    /// The operating system failed a request.
    #[error("disk: {0}")]
    Io(String),
}

/// A disk that does not take writes, though it is not full.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DiskFailure {
    /// What the operating system said.
    pub why: String,
    /// When that was first so, seconds since 1970.
    pub since_unix_secs: u64,
}

/// What one step of a scrub found.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ScrubStep {
    /// Blocks read and compared with their checksums.
    pub checked: u64,
    /// Bytes read.
    pub checked_bytes: u64,
    /// Blocks that were damaged; set aside, so they can be fetched again.
    pub damaged: Vec<Key>,
    /// Where the next step begins; `None` when the store has been gone through.
    pub next: Option<Key>,
}

/// Keeps blocks. All methods may be called from many tasks at once.
pub trait BlockStore: Send + Sync + 'static {
    /// Keeps a batch, all or nothing; resolves when it would survive power loss.
    ///
    /// A block already held under its key is replaced only as [`BlockKind::replaces`] says, and then
    /// has the new owner. Otherwise its lease is extended (a lease never shortens), and with the lease
    /// the block passes to the owner given, unless that is [`Owner::NOBODY`]. Not cancel-safe in one sense: a dropped future may still have stored
    /// its batch.
    fn put(&self, batch: Vec<StoredBlock>) -> BoxFuture<'static, Result<(), StoreError>>;

    /// The block under `key`, checked against its checksum; expired blocks count as absent
    /// only once removed by [`BlockStore::remove_expired`].
    fn get(&self, key: &Key) -> BoxFuture<'static, Result<Option<StoredBlock>, StoreError>>;

    /// What is known of the block under `key`.
    fn info(&self, key: &Key) -> Result<Option<BlockInfo>, StoreError>;

    /// Up to `limit` blocks of `range`, in ring order from its start.
    fn list(&self, range: KeyRange, limit: usize) -> Result<Vec<BlockInfo>, StoreError>;

    /// Summaries of the blocks of each of `ranges` whose lease ends after `now_unix_secs`.
    ///
    /// Two stores that hold the same keys and versions there give equal summaries, whatever else
    /// they hold. Costs reading what has changed since it was last asked.
    fn summaries(
        &self,
        ranges: Vec<KeyRange>,
        now_unix_secs: u64,
    ) -> BoxFuture<'static, Result<Vec<Summary>, StoreError>>;

    /// Cuts a range into at most [`MAX_PARTS`] parts, in ring order from its start, which make it
    /// up, each with its summary. The cuts lie where this store's blocks do; a range with at most
    /// 64 unexpired blocks stays whole.
    fn cut(
        &self,
        range: KeyRange,
        now_unix_secs: u64,
    ) -> BoxFuture<'static, Result<Vec<Part>, StoreError>>;

    /// Extends the leases of the blocks held; returns for each key whether it is held. A
    /// block whose lease becomes longer passes to `owner`, unless that is [`Owner::NOBODY`].
    /// Durable within a minute rather than at once: losing an extension only means that it is asked
    /// for again.
    fn renew(
        &self,
        keys: &[Key],
        expires_unix_secs: u64,
        owner: Owner,
    ) -> Result<Vec<bool>, StoreError>;

    /// Has the leases of those of `keys` that are held and would end later end at
    /// `expires_unix_secs`. Durable as renewals are: one that is lost leaves the block for longer.
    /// A renewal or a put of the block at the same time wins, or is shortened.
    fn shorten(&self, keys: &[Key], expires_unix_secs: u64) -> Result<(), StoreError>;

    /// Makes renewals durable, which are answered before they are. Resolves when they would
    /// survive power loss.
    fn flush(&self) -> BoxFuture<'static, Result<(), StoreError>> {
        Box::pin(async { Ok(()) })
    }

    /// Forgets blocks.
    fn remove(&self, keys: Vec<Key>) -> BoxFuture<'static, Result<(), StoreError>>;

    /// Forgets blocks whose lease ended before `now_unix_secs`; returns how many.
    fn remove_expired(&self, now_unix_secs: u64) -> BoxFuture<'static, Result<u64, StoreError>>;

    /// How full the store is.
    fn usage(&self) -> Usage;

    /// Whether the disk fails to write, which is not to be full: from a write that failed until one
    /// succeeds, or until the store is opened again where nothing is certain any more.
    fn disk_failure(&self) -> Option<DiskFailure> {
        None
    }

    /// What is held for the publisher and for the address of `owner`. Known without reading.
    fn usage_of(&self, owner: &Owner) -> OwnerUsage;

    /// The `limit` publishers and the `limit` addresses with the largest holdings.
    fn owners(&self, limit: usize) -> Owners;

    /// Reads up to `budget_bytes` of blocks from `from` on (from the start if `None`) and
    /// compares them with their checksums.
    fn scrub(
        &self,
        from: Option<Key>,
        budget_bytes: u64,
    ) -> BoxFuture<'static, Result<ScrubStep, StoreError>>;

    /// Gives back space: drops dead segments, compacts within `budget_bytes` of copying, or until
    /// something has been given back. Returns bytes freed on disk; 0 if there is nothing to gain.
    fn reclaim(&self, budget_bytes: u64) -> BoxFuture<'static, Result<u64, StoreError>>;
}
