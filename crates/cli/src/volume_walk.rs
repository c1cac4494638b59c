//! Lists the blocks of volumes for the node, which knows no file formats.

use std::sync::Arc;

use atoll_dht::Blocks;
use atoll_env::{BoxFuture, Env};
use atoll_key::{BlockHash, ReadKey, SignedBlock, VolumeId};
use atoll_node::TreeWalk;
use atoll_volume::owned::blocks_below;

/// Walks trees of owned volumes.
#[derive(Debug)]
pub(crate) struct VolumeWalk;

impl TreeWalk for VolumeWalk {
    fn blocks_below(
        &self,
        env: Env,
        blocks: Arc<dyn Blocks>,
        volume: VolumeId,
        root: SignedBlock,
        read_key: Option<ReadKey>,
    ) -> BoxFuture<'static, Result<Vec<BlockHash>, String>> {
        Box::pin(blocks_below(env, blocks, volume, root, read_key))
    }
}
