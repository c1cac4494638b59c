//! What the node asks of somebody who knows volumes' trees.

use std::fmt;
use std::sync::Arc;

use atoll_dht::Blocks;
use atoll_env::{BoxFuture, Env};
use atoll_key::{BlockHash, ReadKey, SignedBlock, VolumeId};

/// Lists the blocks of a volume. The node knows no file formats; who starts it does.
pub trait TreeWalk: fmt::Debug + Send + Sync + 'static {
    /// The content blocks below a root, those of old states included, in no order; repeats are
    /// allowed. An error is for people.
    fn blocks_below(
        &self,
        env: Env,
        blocks: Arc<dyn Blocks>,
        volume: VolumeId,
        root: SignedBlock,
        read_key: Option<ReadKey>,
    ) -> BoxFuture<'static, Result<Vec<BlockHash>, String>>;
}
