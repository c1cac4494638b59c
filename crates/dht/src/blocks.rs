//! What a file system sees of the ring (CFS Table 1: `put_h`, `put_s`, `get`).
//!
//! Implemented by the node itself, by the client of a node's socket, and by
//! [`MemoryBlocks`] for tests. Every implementation verifies what it returns: a
//! caller never sees bytes that do not match their key.

use std::collections::BTreeMap;
use std::sync::Mutex;

use atoll_env::BoxFuture;
use atoll_key::{BlockHash, InvalidBlock, Key, SignedBlock};
use bytes::Bytes;

/// Why a block could not be fetched.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GetError {
    /// All nodes that should have it answered, and none has it.
    #[error("block {key} is nowhere on the ring: {told}")]
    NotFound {
        /// The block.
        key: Key,
        /// Who was asked and what each said, for people.
        told: String,
    },
    /// Some of the nodes that should have it could not be asked in time.
    #[error("block {key} could not be fetched: {told}")]
    Unavailable {
        /// The block.
        key: Key,
        /// Who was asked and what each said, for people.
        told: String,
    },
}

/// Why blocks could not be stored.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PutError {
    /// The nodes that should hold them have no room.
    #[error("no room on the ring: {0}")]
    Full(String),
    /// The publisher has used up its share of the nodes that should hold them (CFS §5.4).
    #[error("over quota: {who} uses {used_bytes} of {allowed_bytes} bytes allowed")]
    OverQuota {
        /// What the node that refused already keeps for the publisher, bytes.
        used_bytes: u64,
        /// What it would keep at most, bytes.
        allowed_bytes: u64,
        /// Who is over quota, and where; for people.
        who: String,
    },
    /// Too few of the nodes that should hold them acknowledged in time.
    #[error("the ring did not take the blocks: {0}")]
    Unavailable(String),
    /// A higher version of the signed block exists.
    #[error("version {offered} of the signed block is older than the ring's {held}")]
    Superseded {
        /// What was put.
        offered: u64,
        /// What the ring has.
        held: u64,
    },
    /// The block is not what its key says.
    #[error("refused: {0}")]
    Invalid(#[from] InvalidBlock),
}

/// The ring, as a place to keep blocks. Calls may run many at a time; a caller bounds
/// how many. Every call ends within a deadline of the implementation's.
pub trait Blocks: Send + Sync + 'static {
    /// Fetches a content block; its bytes match its hash.
    fn get(&self, hash: BlockHash) -> BoxFuture<'static, Result<Bytes, GetError>>;

    /// Fetches the newest signed block under `key` that the replicas which answer hold; never
    /// one older than was read or written here before.
    fn get_signed(&self, key: Key) -> BoxFuture<'static, Result<SignedBlock, GetError>>;

    /// Stores content blocks (each hash must be its block's); resolves when a majority
    /// of each block's replica set has them durably. At most 4 MiB a call, less 64 KiB. Each
    /// block has its own outcome: the error says how many failed, all others are stored, and
    /// [`Blocks::renew`] says which those are.
    fn put(&self, blocks: Vec<(BlockHash, Bytes)>) -> BoxFuture<'static, Result<(), PutError>>;

    /// Stores a signed block; refused if the ring holds a higher version, or another
    /// block of the same version.
    fn put_signed(&self, block: SignedBlock) -> BoxFuture<'static, Result<(), PutError>>;

    /// Extends the leases of the content blocks the ring holds; returns those it lacks,
    /// in the order given. At most 1,024 a call.
    fn renew(&self, hashes: Vec<BlockHash>)
    -> BoxFuture<'static, Result<Vec<BlockHash>, PutError>>;

    /// The same for blocks that the caller puts if they are lacking. One node may be believed
    /// that the ring lacks a block: putting it once more does no harm.
    fn renew_or_lack(
        &self,
        hashes: Vec<BlockHash>,
    ) -> BoxFuture<'static, Result<Vec<BlockHash>, PutError>> {
        self.renew(hashes)
    }
}

/// A ring of one, in memory: for tests of what lives above.
#[derive(Debug, Default)]
pub struct MemoryBlocks {
    held: Mutex<Held>,
}

#[derive(Debug, Default)]
struct Held {
    content: BTreeMap<BlockHash, Bytes>,
    signed: BTreeMap<Key, SignedBlock>,
    counts: Counts,
}

/// What was asked of a [`MemoryBlocks`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Blocks asked for by `get`.
    pub gets: u64,
    /// Blocks given to `put`.
    pub puts: u64,
    /// Bytes given to `put`.
    pub put_bytes: u64,
}

impl MemoryBlocks {
    /// An empty one.
    pub fn new() -> MemoryBlocks {
        MemoryBlocks::default()
    }

    /// What was asked so far.
    pub fn counts(&self) -> Counts {
        self.lock().counts
    }

    /// How many content blocks are held.
    pub fn len(&self) -> usize {
        self.lock().content.len()
    }

    /// Whether nothing is held.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Loses a content block; whether it was held.
    pub fn lose(&self, hash: &BlockHash) -> bool {
        self.lock().content.remove(hash).is_some()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Held> {
        self.held.lock().expect("no holder of this lock panics")
    }
}

impl Blocks for MemoryBlocks {
    fn get(&self, hash: BlockHash) -> BoxFuture<'static, Result<Bytes, GetError>> {
        let mut held = self.lock();
        held.counts.gets += 1;
        let found = held.content.get(&hash).cloned();
        let missing =
            GetError::NotFound { key: hash.key(), told: "memory does not have it".into() };
        Box::pin(async move { found.ok_or(missing) })
    }

    fn get_signed(&self, key: Key) -> BoxFuture<'static, Result<SignedBlock, GetError>> {
        let found = self.lock().signed.get(&key).cloned();
        let missing = GetError::NotFound { key, told: "memory does not have it".into() };
        Box::pin(async move { found.ok_or(missing) })
    }

    fn put(&self, blocks: Vec<(BlockHash, Bytes)>) -> BoxFuture<'static, Result<(), PutError>> {
        let wrong = blocks.iter().any(|(hash, bytes)| BlockHash::of(bytes) != *hash);
        if wrong {
            return Box::pin(async { Err(InvalidBlock::WrongHash.into()) });
        }
        let mut held = self.lock();
        for (hash, bytes) in blocks {
            held.counts.puts += 1;
            held.counts.put_bytes += bytes.len() as u64;
            held.content.insert(hash, bytes);
        }
        Box::pin(async { Ok(()) })
    }

    fn put_signed(&self, block: SignedBlock) -> BoxFuture<'static, Result<(), PutError>> {
        let mut held = self.lock();
        let result = match held.signed.get(&block.key()) {
            Some(old)
                if old.version > block.version
                    || (old.version == block.version && *old != block) =>
            {
                Err(PutError::Superseded { offered: block.version, held: old.version })
            }
            _ => {
                held.signed.insert(block.key(), block);
                Ok(())
            }
        };
        Box::pin(async move { result })
    }

    fn renew(
        &self,
        hashes: Vec<BlockHash>,
    ) -> BoxFuture<'static, Result<Vec<BlockHash>, PutError>> {
        let held = self.lock();
        let lacking = hashes.into_iter().filter(|hash| !held.content.contains_key(hash)).collect();
        Box::pin(async move { Ok(lacking) })
    }
}
