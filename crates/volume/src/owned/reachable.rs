//! The blocks below a root: whose leases are to be kept, and what a publish takes over.

use std::collections::BTreeSet;
use std::sync::Arc;

use atoll_dht::{Blocks, GetError};
use atoll_env::Env;
use atoll_key::{BlockHash, ReadKey, SignedBlock, VolumeCipher, VolumeId};
use futures_util::stream::{FuturesUnordered, StreamExt};

use super::read::OpenError;
use super::root::Root;
use super::{history, sealed_root};
use crate::blocks::cache::BlockCache;
use crate::blocks::error::BlockError;
use crate::blocks::pace::Wanted;
use crate::format::inode::{Data, InodeBlock};
use crate::format::{
    Content, DirectoryEntry, DirectoryRef, MIN_BLOCK_SIZE_LOG2, Nodes, PointerBlock,
};

/// Blocks fetched at once by a walk.
const FETCHES: usize = 16;

/// About how long a block of pointers is, bytes.
const BLOCK_BYTES: u64 = 32 << 10;

/// Blocks kept in memory by a walk of its own: few are read twice.
const CACHE_BYTES: u64 = 8 << 20;

/// A block that may lead to others.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Node {
    Directory(BlockHash),
    Inode(BlockHash),
    Indirect(BlockHash),
}

/// What a block leads to.
#[derive(Debug, Default)]
pub(crate) struct Below {
    /// Entries of a directory's leaf.
    pub(crate) entries: Vec<DirectoryEntry>,
    /// Blocks that may lead to others.
    pub(crate) nodes: Vec<Node>,
    /// Data blocks.
    pub(crate) data: Vec<BlockHash>,
}

impl Node {
    /// The block.
    pub(crate) fn hash(self) -> BlockHash {
        let (Node::Directory(hash) | Node::Inode(hash) | Node::Indirect(hash)) = self;
        hash
    }

    /// The block that leads to a directory's entries.
    fn of_directory(directory: &DirectoryRef) -> Option<Node> {
        directory.hash.map(Node::Directory)
    }

    /// The first block of what an entry stands for, and whether others may follow it: a file that
    /// fits the smallest data block lies in its inode block.
    pub(crate) fn of_entry(entry: &DirectoryEntry) -> Option<(Node, bool)> {
        match &entry.content {
            Content::Directory(directory) => Some((Node::of_directory(directory)?, true)),
            Content::Regular { size_bytes, inode, .. } => {
                Some((Node::Inode((*inode)?), *size_bytes > 1 << MIN_BLOCK_SIZE_LOG2))
            }
            Content::Symlink(_) | Content::Special { .. } | Content::Linked { .. } => None,
        }
    }

    /// Fetches the block and reads what it leads to.
    pub(crate) async fn below(self, cache: &Arc<BlockCache>) -> Result<Below, BlockError> {
        let mut below = Below::default();
        let (level, pointers): (u8, Vec<_>) = match self {
            Node::Directory(hash) => {
                match &cache.directory(hash).await?.nodes {
                    Nodes::Interior(children) => {
                        below.nodes.extend(children.iter().map(|c| Node::Directory(c.hash)));
                    }
                    Nodes::Leaf(entries) => below.entries.clone_from(entries),
                }
                return Ok(below);
            }
            Node::Inode(hash) => {
                let bytes = cache.get_once(hash, Wanted::Soon(BLOCK_BYTES)).await?;
                let inode = InodeBlock::decode(&bytes).map_err(BlockError::bad(hash))?;
                let count = match &inode.data {
                    Data::Inline(_) => 0,
                    Data::Pointers(_) => inode.shape.top_pointers(),
                };
                let level = inode.shape.indirect_levels();
                (level, (0..count).filter_map(|at| inode.pointer(at).flatten()).collect())
            }
            Node::Indirect(hash) => {
                let bytes = cache.get_once(hash, Wanted::Soon(BLOCK_BYTES)).await?;
                let block = PointerBlock::decode(&bytes).map_err(BlockError::bad(hash))?;
                let pointers = (0..block.count()).filter_map(|at| block.pointer(at).flatten());
                (block.level - 1, pointers.collect())
            }
        };
        match level {
            0 => below.data = pointers,
            _ => below.nodes.extend(pointers.into_iter().map(Node::Indirect)),
        }
        Ok(below)
    }
}

/// A volume's newest root, read.
pub async fn newest_root(
    blocks: &dyn Blocks,
    volume: &VolumeId,
    read_key: Option<&ReadKey>,
) -> Result<(SignedBlock, Root), OpenError> {
    let block = blocks.get_signed(volume.root_key()).await?;
    let cipher = read_key.map(|key| VolumeCipher::new(key, volume));
    let root = sealed_root::decode(&block.payload, cipher.as_ref())?;
    Ok((block, root))
}

/// All content blocks of a version and of the old states that it keeps, in no order; some may come
/// twice. A block that leads to others is read once, in however many states it is.
pub(super) async fn blocks_of(
    cache: &Arc<BlockCache>,
    root: &Root,
) -> Result<Vec<BlockHash>, BlockError> {
    let mut walk = Walk { cache, found: Vec::new(), read: BTreeSet::new() };
    walk.pass_tree(root, Lost::IsAnError).await?;
    walk.pass(&[root.mounted.history], Lost::IsSkipped).await?;
    let states = match history::states(cache, root).await {
        Err(error) if is_lost(&error) => {
            tracing::warn!("the leases of old states end: {}", error.at(b""));
            return Ok(walk.found);
        }
        states => states?,
    };
    for state in states {
        walk.pass_tree(&state.root, Lost::IsSkipped).await?;
    }
    Ok(walk.found)
}

/// What a block that is lost or bad means. In an old state it must not end the leases of the present.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Lost {
    IsAnError,
    IsSkipped,
}

fn is_lost(error: &BlockError) -> bool {
    !matches!(error, BlockError::Fetch(GetError::Unavailable { .. }))
}

struct Walk<'a> {
    cache: &'a Arc<BlockCache>,
    found: Vec<BlockHash>,
    /// Those that were read.
    read: BTreeSet<Node>,
}

impl Walk<'_> {
    async fn pass_tree(&mut self, root: &Root, lost: Lost) -> Result<(), BlockError> {
        self.found.extend(root.xattrs);
        self.pass(&[root.directory, root.mounted.links], lost).await
    }

    /// Finds what lies in directories, and below them, and was not passed yet.
    async fn pass(&mut self, tops: &[DirectoryRef], lost: Lost) -> Result<(), BlockError> {
        let mut waiting: Vec<Node> = tops.iter().filter_map(Node::of_directory).collect();
        let mut fetches = FuturesUnordered::new();
        loop {
            while fetches.len() < FETCHES
                && let Some(node) = waiting.pop()
            {
                if self.read.insert(node) {
                    self.found.push(node.hash());
                    fetches.push(node.below(self.cache));
                }
            }
            let Some(below) = fetches.next().await else { return Ok(()) };
            let Below { entries, nodes, data } = match below {
                Err(error) if lost == Lost::IsSkipped && is_lost(&error) => {
                    tracing::warn!("an old state has lost a block: {}", error.at(b""));
                    continue;
                }
                below => below?,
            };
            waiting.extend(nodes);
            self.found.extend(data);
            for entry in entries {
                self.found.extend(entry.xattrs);
                match Node::of_entry(&entry) {
                    Some((node, true)) => waiting.push(node),
                    Some((node, false)) => self.found.push(node.hash()),
                    None => {}
                }
            }
        }
    }
}

/// All content blocks of the version of `root` and of the old states that it keeps, in no order;
/// some may come twice. An error is for people.
pub async fn blocks_below(
    env: Env,
    blocks: Arc<dyn Blocks>,
    volume: VolumeId,
    root: SignedBlock,
    read_key: Option<ReadKey>,
) -> Result<Vec<BlockHash>, String> {
    let cipher = read_key.map(|key| VolumeCipher::new(&key, &volume));
    let decoded = sealed_root::decode(&root.payload, cipher.as_ref());
    let cache = BlockCache::new(env, (blocks, cipher), CACHE_BYTES);
    let below = blocks_of(&cache, &decoded.map_err(|error| error.to_string())?).await;
    below.map_err(|error| error.at(b"").to_string())
}
