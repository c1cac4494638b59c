//! New blocks on their way to the ring.

use std::collections::BTreeSet;
use std::sync::Arc;

use atoll_dht::{Blocks, PutError};
use atoll_env::BoxFuture;
use atoll_key::{BlockHash, VolumeCipher};
use bytes::Bytes;
use futures_util::stream::{FuturesUnordered, StreamExt};

use super::FlushError;
use crate::blocks::cache::BlockCache;
use crate::format::build::Sink;
use crate::owned::batch::{MAX_BATCH_BLOCKS, MAX_BATCH_BYTES, MAX_BATCHES};

/// Blocks that are written and not on the ring yet.
pub(super) struct Outbox<'a> {
    pub(super) blocks: &'a Arc<dyn Blocks>,
    /// What was written is read again soon.
    pub(super) cache: &'a Arc<BlockCache>,
    pub(super) cipher: Option<&'a VolumeCipher>,
    batch: Vec<(BlockHash, Bytes)>,
    batch_bytes: usize,
    written: BTreeSet<BlockHash>,
    full: Vec<Vec<(BlockHash, Bytes)>>,
    on_their_way: FuturesUnordered<BoxFuture<'static, Result<(), PutError>>>,
    /// What has gone wrong while blocks were written.
    failure: Option<FlushError>,
}

impl<'a> Outbox<'a> {
    pub(super) fn new(
        blocks: &'a Arc<dyn Blocks>,
        cache: &'a Arc<BlockCache>,
        cipher: Option<&'a VolumeCipher>,
    ) -> Outbox<'a> {
        Outbox {
            blocks,
            cache,
            cipher,
            batch: Vec::new(),
            batch_bytes: 0,
            written: BTreeSet::new(),
            full: Vec::new(),
            on_their_way: FuturesUnordered::new(),
            failure: None,
        }
    }

    /// Sends full batches; waits while too many are on their way.
    pub(super) async fn advance(&mut self) -> Result<(), FlushError> {
        if let Some(failure) = self.failure.take() {
            return Err(failure);
        }
        for batch in std::mem::take(&mut self.full) {
            if self.on_their_way.len() >= MAX_BATCHES {
                self.on_their_way.next().await.expect("there are some")?;
            }
            self.on_their_way.push(self.blocks.put(batch));
        }
        Ok(())
    }

    /// Resolves when the ring has all blocks.
    pub(super) async fn finish(&mut self) -> Result<(), FlushError> {
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
        let plain = Bytes::from(block);
        let sealed = match self.cipher {
            None => plain.clone(),
            Some(cipher) => Bytes::from(cipher.seal(&plain)),
        };
        let hash = BlockHash::of(&sealed);
        if self.written.insert(hash) {
            self.cache.insert(hash, plain);
            if self.batch_bytes + sealed.len() > MAX_BATCH_BYTES {
                self.end_batch();
            }
            self.batch_bytes += sealed.len();
            self.batch.push((hash, sealed));
            if self.batch.len() >= MAX_BATCH_BLOCKS {
                self.end_batch();
            }
        }
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
