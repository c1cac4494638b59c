//! A ring whose blocks are kept for a time that its user has chosen (CFS §3.1: blocks are stored for an agreed-upon
//! finite interval).
//!
//! [`Leased`] gives the chosen lease to each block that is put or renewed without a lease of its own. The ring never shortens
//! a lease: a block that has a longer one keeps it.

use std::sync::Arc;
use std::time::Duration;

use atoll_env::BoxFuture;
use atoll_key::kinds::Release;
use atoll_key::{BlockId, Key};

use crate::blocks::{
    Blocks, GetError, HeldBlock, LeaseRenewal, NewBlock, PutError, Renewed, RingRoom, Wanted,
};
use crate::locks::{LockGrant, LockLease, LockRefusal};

/// The shortest lease that volumes can be given: their nodes renew it three times in that time, and may be off for
/// hours. A guess.
pub const MIN_VOLUME_LEASE: Duration = Duration::from_secs(24 * 3600);

/// See the module.
pub struct Leased {
    blocks: Arc<dyn Blocks>,
    lease_secs: u64,
}

impl Leased {
    /// The same ring, whose blocks are kept for `lease` at a time; `None` for as long as the ring keeps blocks.
    pub fn over(blocks: Arc<dyn Blocks>, lease: Option<Duration>) -> Arc<dyn Blocks> {
        match lease {
            Some(lease) => Arc::new(Leased { blocks, lease_secs: lease.as_secs() }),
            None => blocks,
        }
    }

    fn leased(&self, mut blocks: Vec<NewBlock>) -> Vec<NewBlock> {
        for block in &mut blocks {
            block.lease_secs.get_or_insert(self.lease_secs);
        }
        blocks
    }
}

impl Blocks for Leased {
    fn get_block(
        &self,
        id: BlockId,
        wanted: Wanted,
    ) -> BoxFuture<'static, Result<HeldBlock, GetError>> {
        self.blocks.get_block(id, wanted)
    }

    fn put_blocks(&self, blocks: Vec<NewBlock>) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        self.blocks.put_blocks(self.leased(blocks))
    }

    fn put_in_order(&self, blocks: Vec<NewBlock>) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        self.blocks.put_in_order(self.leased(blocks))
    }

    fn renew_blocks(
        &self,
        mut renewal: LeaseRenewal,
    ) -> BoxFuture<'static, Vec<Result<Renewed, PutError>>> {
        renewal.lease_secs.get_or_insert(self.lease_secs);
        self.blocks.renew_blocks(renewal)
    }

    fn release_blocks(&self, release: Release) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        self.blocks.release_blocks(release)
    }

    fn watch(
        &self,
        id: BlockId,
        seen: u64,
    ) -> BoxFuture<'static, Result<Option<HeldBlock>, GetError>> {
        self.blocks.watch(id, seen)
    }

    fn same_set_until(&self, key: Key) -> BoxFuture<'static, Option<Key>> {
        self.blocks.same_set_until(key)
    }

    fn lock_lease(&self, ask: LockLease) -> BoxFuture<'static, Result<LockGrant, LockRefusal>> {
        self.blocks.lock_lease(ask)
    }

    fn room(&self) -> BoxFuture<'static, Option<RingRoom>> {
        self.blocks.room()
    }

    fn remove_blocks(
        &self,
        tombstones: Vec<NewBlock>,
    ) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        self.blocks.remove_blocks(tombstones)
    }
}
