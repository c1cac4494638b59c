//! Lists the blocks of volumes for the node, which knows no file formats.

use std::sync::Arc;

use atoll_dht::Blocks;
use atoll_env::{BoxFuture, Env};
use atoll_key::{BlockHash, ReadKey, SignedBlock, VolumeId};
use atoll_node::TreeWalk;
use atoll_volume::owned::blocks_below;
use atoll_volume::shared::access::is_shared;

/// Walks trees of owned volumes. Of shared ones it lists nothing.
#[derive(Debug)]
pub struct VolumeWalk;

impl TreeWalk for VolumeWalk {
    fn blocks_below(
        &self,
        env: Env,
        blocks: Arc<dyn Blocks>,
        volume: VolumeId,
        root: SignedBlock,
        read_key: Option<ReadKey>,
    ) -> BoxFuture<'static, Result<Vec<BlockHash>, String>> {
        // Of a shared volume the node keeps the record; see `docs/design/shared.md`, "Not done yet".
        if is_shared(&root.payload) {
            return Box::pin(async { Ok(Vec::new()) });
        }
        Box::pin(blocks_below(env, blocks, volume, root, read_key))
    }
}
