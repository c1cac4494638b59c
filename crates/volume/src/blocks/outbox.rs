//! New blocks on their way to the ring: several batches at once, so that neither the way to the ring
//! nor its disks wait for the other.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard};

use atoll_dht::{Blocks, NewBlock, PutError};
use atoll_env::BoxFuture;
use atoll_key::{BlockHash, BlockId};
use bytes::Bytes;
use futures_util::stream::{FuturesUnordered, StreamExt};

use super::cache::BlockCache;
use crate::format::build::Sink;

/// Batches on their way at once.
pub(crate) const MAX_BATCHES: usize = 8;

/// Blocks in a batch.
pub(crate) const MAX_BATCH_BLOCKS: usize = 64;

/// Bytes in a batch, unless one block alone has more.
pub(crate) const MAX_BATCH_BYTES: usize = 1 << 20;

/// How the blocks of a volume are made before they are hashed, unless they are put as they are.
pub(crate) trait Seal: Send + Sync {
    /// The block as the ring has it.
    fn seal(&self, block: &[u8]) -> Vec<u8>;

    /// The hash of a block as the ring has it, and what names it there.
    fn name(&self, sealed: &[u8]) -> (BlockHash, BlockId) {
        let hash = BlockHash::of(sealed);
        (hash, hash.id())
    }
}

/// Puts blocks as they are.
struct AsItIs;

impl Seal for AsItIs {
    fn seal(&self, block: &[u8]) -> Vec<u8> {
        block.to_vec()
    }
}

/// A new block, as it is and as the ring is to have it.
#[derive(Clone)]
pub(crate) struct NewContent {
    pub(crate) hash: BlockHash,
    pub(crate) plain: Bytes,
    /// How long the ring is to keep it; `None`: as long as it keeps what is put.
    pub(crate) lease_secs: Option<u64>,
    id: BlockId,
    sealed: Bytes,
}

/// Which blocks were put since the log was taken last, whatever has become of them.
#[derive(Default)]
pub(crate) struct PutLog(Mutex<BTreeSet<BlockHash>>);

impl PutLog {
    fn lock(&self) -> MutexGuard<'_, BTreeSet<BlockHash>> {
        self.0.lock().expect("no holder of this lock panics")
    }

    fn note(&self, hash: BlockHash) {
        self.lock().insert(hash);
    }

    /// Whether a block was put.
    pub(crate) fn has(&self, hash: &BlockHash) -> bool {
        self.lock().contains(hash)
    }

    /// Whether any was.
    pub(crate) fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    /// All that were; the log is empty then.
    pub(crate) fn take(&self) -> BTreeSet<BlockHash> {
        std::mem::take(&mut self.lock())
    }
}

/// Blocks that are written and not on the ring yet.
pub(crate) struct Outbox<'a> {
    blocks: &'a Arc<dyn Blocks>,
    /// What was written is read again soon.
    cache: &'a Arc<BlockCache>,
    cipher: Option<&'a dyn Seal>,
    batch: Vec<NewBlock>,
    batch_bytes: usize,
    written: BTreeSet<BlockHash>,
    log: Option<&'a PutLog>,
    full: Vec<Vec<NewBlock>>,
    on_their_way: FuturesUnordered<BoxFuture<'static, Result<(), PutError>>>,
    /// What has gone wrong while blocks were written.
    failure: Option<PutError>,
}

impl<'a> Outbox<'a> {
    pub(crate) fn new(
        blocks: &'a Arc<dyn Blocks>,
        cache: &'a Arc<BlockCache>,
        cipher: Option<&'a dyn Seal>,
    ) -> Outbox<'a> {
        Outbox {
            blocks,
            cache,
            cipher,
            batch: Vec::new(),
            batch_bytes: 0,
            written: BTreeSet::new(),
            log: None,
            full: Vec::new(),
            on_their_way: FuturesUnordered::new(),
            failure: None,
        }
    }

    /// Notes each block in `log` before it is put.
    pub(crate) fn noting(self, log: &'a PutLog) -> Outbox<'a> {
        Outbox { log: Some(log), ..self }
    }

    /// Seals a block, if the volume is encrypted.
    pub(crate) fn seal(&self, block: Vec<u8>) -> NewContent {
        let plain = Bytes::from(block);
        let sealed = match self.cipher {
            None => plain.clone(),
            Some(cipher) => Bytes::from(cipher.seal(&plain)),
        };
        let (hash, id) = self.cipher.unwrap_or(&AsItIs).name(&sealed);
        NewContent { hash, plain, lease_secs: None, id, sealed }
    }

    /// Adds a block, unless it is there.
    pub(crate) fn push(&mut self, NewContent { hash, plain, lease_secs, id, sealed }: NewContent) {
        if !self.written.insert(hash) {
            return;
        }
        if let Some(log) = self.log {
            log.note(hash);
        }
        self.cache.insert(hash, plain);
        if self.batch_bytes + sealed.len() > MAX_BATCH_BYTES {
            self.end_batch();
        }
        self.batch_bytes += sealed.len();
        self.batch.push(NewBlock { id, bytes: sealed, lease_secs });
        if self.batch.len() >= MAX_BATCH_BLOCKS {
            self.end_batch();
        }
    }

    /// Sends full batches; waits while too many are on their way.
    pub(crate) async fn advance(&mut self) -> Result<(), PutError> {
        if let Some(failure) = self.failure.take() {
            return Err(failure);
        }
        for batch in std::mem::take(&mut self.full) {
            if self.on_their_way.len() >= MAX_BATCHES {
                self.on_their_way.next().await.expect("there are some")?;
            }
            self.on_their_way.push(self.blocks.put_all(batch));
        }
        Ok(())
    }

    /// Resolves when the ring has all blocks.
    pub(crate) async fn finish(&mut self) -> Result<(), PutError> {
        self.end_batch();
        self.advance().await?;
        while let Some(put) = self.on_their_way.next().await {
            put?;
        }
        Ok(())
    }

    fn end_batch(&mut self) {
        if !self.batch.is_empty() {
            self.full.push(std::mem::take(&mut self.batch));
            self.batch_bytes = 0;
        }
    }
}

impl<E: Send> Sink<E> for Outbox<'_> {
    fn emit(&mut self, block: Vec<u8>) -> Result<BlockHash, E> {
        let new = self.seal(block);
        let hash = new.hash;
        self.push(new);
        Ok(hash)
    }

    fn pace(&mut self) -> BoxFuture<'_, bool> {
        Box::pin(async {
            if !self.full.is_empty() && self.failure.is_none() {
                self.failure = self.advance().await.err();
            }
            self.failure.is_none()
        })
    }
}
