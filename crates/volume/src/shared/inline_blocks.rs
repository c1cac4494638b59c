//! Blocks as readers of files look for them, by their hashes as if they were content blocks: the ring's, which
//! belong to an inode and may be sealed, and beside them inode blocks of small files, which lie in their inodes
//! and not on the ring.
//!
//! A block is there while somebody holds its [`Pin`].

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use atoll_dht::{
    Blocks, GetError, HeldBlock, LeaseRenewal, LockGrant, LockLease, LockRefusal, NewBlock,
    PutError, Renewed, RingRoom, Wanted,
};
use atoll_env::BoxFuture;
use atoll_key::{BlockHash, BlockId, Key};
use bytes::Bytes;

use super::sealing::Sealing;

/// See the module.
pub(super) struct InlineBlocks {
    ring: Arc<dyn Blocks>,
    sealing: Sealing,
    pinned: Mutex<BTreeMap<BlockId, (Bytes, usize)>>,
}

impl InlineBlocks {
    pub(super) fn over(ring: Arc<dyn Blocks>, sealing: Sealing) -> Arc<InlineBlocks> {
        Arc::new(InlineBlocks { ring, sealing, pinned: Mutex::default() })
    }

    /// Keeps a block until the pin is dropped.
    pub(super) fn pin(self: &Arc<Self>, block: Bytes) -> Pin {
        let hash = BlockHash::of(&block);
        self.pinned().entry(hash.id()).or_insert((block, 0)).1 += 1;
        Pin { blocks: self.clone(), hash }
    }

    fn pinned(&self) -> MutexGuard<'_, BTreeMap<BlockId, (Bytes, usize)>> {
        self.pinned.lock().expect("no holder of this lock panics")
    }
}

/// Keeps one block where readers find it.
pub(super) struct Pin {
    blocks: Arc<InlineBlocks>,
    pub(super) hash: BlockHash,
}

impl Drop for Pin {
    fn drop(&mut self) {
        let mut pinned = self.blocks.pinned();
        let id = self.hash.id();
        if let Some((_, pins)) = pinned.get_mut(&id) {
            *pins -= 1;
            if *pins == 0 {
                pinned.remove(&id);
            }
        }
    }
}

impl Blocks for InlineBlocks {
    fn get_block(
        &self,
        id: BlockId,
        wanted: Wanted,
    ) -> BoxFuture<'static, Result<HeldBlock, GetError>> {
        if let Some((bytes, _)) = self.pinned().get(&id) {
            let held = HeldBlock { version: 0, bytes: bytes.clone() };
            return Box::pin(async { Ok(held) });
        }
        let hash = id.key.as_hash().filter(|_| !id.kind.is_mutable());
        let Some(hash) = hash else { return self.ring.get_block(id, wanted) };
        let held = self.ring.get_block(BlockHash(hash).inode_content_id(), wanted);
        let sealing = self.sealing.clone();
        Box::pin(async move {
            let HeldBlock { version, bytes } = held.await?;
            let opened = sealing.open_block(&bytes);
            let bytes = opened
                .map_err(|error| GetError::Unavailable { key: id.key, told: error.to_string() })?;
            Ok(HeldBlock { version, bytes })
        })
    }

    fn put_blocks(&self, blocks: Vec<NewBlock>) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        self.ring.put_blocks(blocks)
    }

    fn renew_blocks(
        &self,
        renewal: LeaseRenewal,
    ) -> BoxFuture<'static, Vec<Result<Renewed, PutError>>> {
        self.ring.renew_blocks(renewal)
    }

    fn watch(
        &self,
        id: BlockId,
        seen: u64,
    ) -> BoxFuture<'static, Result<Option<HeldBlock>, GetError>> {
        self.ring.watch(id, seen)
    }

    fn put_in_order(&self, blocks: Vec<NewBlock>) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        self.ring.put_in_order(blocks)
    }

    fn same_set_until(&self, key: Key) -> BoxFuture<'static, Option<Key>> {
        self.ring.same_set_until(key)
    }

    fn room(&self) -> BoxFuture<'static, Option<RingRoom>> {
        self.ring.room()
    }

    fn lock_lease(&self, ask: LockLease) -> BoxFuture<'static, Result<LockGrant, LockRefusal>> {
        self.ring.lock_lease(ask)
    }
}
