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

/// Blocks that versions need.
#[derive(Debug, Default)]
pub(super) struct Needed {
    /// Each once, ascending.
    pub(super) blocks: Vec<BlockHash>,
    /// How many data blocks only old states need.
    pub(super) old_data_blocks: u64,
    /// Whether these are all: no block that leads to others is lost.
    pub(super) are_all: bool,
}

impl Needed {
    pub(super) fn has(&self, hash: &BlockHash) -> bool {
        self.blocks.binary_search(hash).is_ok()
    }
}

/// All content blocks of a version, of the old states that it keeps, and of the roots that were taken over. A block that
/// leads to others is read once, in however many states it is.
pub(super) async fn blocks_of(cache: &Arc<BlockCache>, root: &Root) -> Result<Needed, BlockError> {
    let mut walk = Walk::new(cache, None);
    walk.pass_tree(root, Lost::IsAnError).await?;
    walk.sort();
    let present = std::mem::take(&mut walk.found);
    walk.pass_old(root).await?;
    walk.sort();
    walk.old_data.sort_unstable();
    walk.old_data.dedup();
    walk.old_data.retain(|hash| present.binary_search(hash).is_err());
    let old_data_blocks = walk.old_data.len() as u64;
    walk.found.extend(present);
    walk.sort();
    Ok(Needed { blocks: walk.found, old_data_blocks, are_all: !walk.has_lost })
}

/// Blocks that `old`, its old states and the roots taken over in it needed, and `needed` does not have. What is lost by now
/// is passed over.
pub(super) async fn not_needed(
    cache: &Arc<BlockCache>,
    old: &Root,
    needed: &Needed,
) -> Result<Vec<BlockHash>, BlockError> {
    // Below a block that is needed all are.
    let mut walk = Walk::new(cache, Some(needed));
    walk.pass_tree(old, Lost::IsSkipped).await?;
    walk.pass_old(old).await?;
    walk.found.retain(|hash| !needed.has(hash));
    walk.sort();
    Ok(walk.found)
}

/// What open files and directories show of what is stored.
#[derive(Debug, Default)]
pub(super) struct Open {
    /// Inode blocks.
    pub(super) files: Vec<BlockHash>,
    /// Top blocks of directories, of which the names are shown.
    pub(super) directories: Vec<BlockHash>,
    /// Blocks of extended attributes.
    pub(super) xattrs: Vec<BlockHash>,
}

/// The blocks that open files and directories show.
pub(super) async fn blocks_of_open(
    cache: &Arc<BlockCache>,
    open: Open,
) -> Result<BTreeSet<BlockHash>, BlockError> {
    let mut walk = Walk { enters_entries: false, ..Walk::new(cache, None) };
    walk.found.extend(open.xattrs);
    let files = open.files.into_iter().map(Node::Inode);
    let nodes = files.chain(open.directories.into_iter().map(Node::Directory));
    walk.pass_nodes(nodes.collect(), Lost::IsSkipped).await?;
    Ok(walk.found.into_iter().collect())
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
    /// Blocks that are not entered.
    passes_over: Option<&'a Needed>,
    found: Vec<BlockHash>,
    /// Data blocks that were found in old states.
    old_data: Vec<BlockHash>,
    /// Those that were read.
    read: BTreeSet<Node>,
    /// Whether any was lost.
    has_lost: bool,
    /// Whether what is in directories is entered too.
    enters_entries: bool,
}

impl<'a> Walk<'a> {
    fn new(cache: &'a Arc<BlockCache>, passes_over: Option<&'a Needed>) -> Walk<'a> {
        Walk {
            cache,
            passes_over,
            found: Vec::new(),
            old_data: Vec::new(),
            read: BTreeSet::new(),
            has_lost: false,
            enters_entries: true,
        }
    }

    fn sort(&mut self) {
        self.found.sort_unstable();
        self.found.dedup();
    }

    fn enters(&self, hash: &BlockHash) -> bool {
        self.passes_over.is_none_or(|needed| !needed.has(hash))
    }

    /// What a version needs beside its present tree.
    async fn pass_old(&mut self, root: &Root) -> Result<(), BlockError> {
        for directory in [root.mounted.history, root.mounted.replaced] {
            self.pass(&[directory], Lost::IsSkipped).await?;
            let passes_over = self.passes_over;
            let enters = |hash: &BlockHash| passes_over.is_none_or(|needed| !needed.has(hash));
            match history::states_in(self.cache, &directory, enters).await {
                Err(error) if is_lost(&error) => {
                    self.has_lost = true;
                    if self.passes_over.is_none() {
                        tracing::warn!("the leases of old states end: {}", error.at(b""));
                    }
                }
                states => {
                    for state in states? {
                        self.pass_tree(&state.root, Lost::IsSkipped).await?;
                    }
                }
            }
        }
        Ok(())
    }

    async fn pass_tree(&mut self, root: &Root, lost: Lost) -> Result<(), BlockError> {
        self.found.extend(root.xattrs);
        self.pass(&[root.directory, root.mounted.links], lost).await
    }

    /// Finds what lies in directories, and below them, and was not passed yet.
    async fn pass(&mut self, tops: &[DirectoryRef], lost: Lost) -> Result<(), BlockError> {
        self.pass_nodes(tops.iter().filter_map(Node::of_directory).collect(), lost).await
    }

    async fn pass_nodes(&mut self, mut waiting: Vec<Node>, lost: Lost) -> Result<(), BlockError> {
        let mut fetches = FuturesUnordered::new();
        loop {
            while fetches.len() < FETCHES
                && let Some(node) = waiting.pop()
            {
                if self.enters(&node.hash()) && self.read.insert(node) {
                    self.found.push(node.hash());
                    fetches.push(node.below(self.cache));
                }
            }
            let Some(below) = fetches.next().await else { return Ok(()) };
            let Below { entries, nodes, data } = match below {
                Err(error) if lost == Lost::IsSkipped && is_lost(&error) => {
                    self.has_lost = true;
                    if self.passes_over.is_none() {
                        tracing::warn!("an old state has lost a block: {}", error.at(b""));
                    }
                    continue;
                }
                below => below?,
            };
            waiting.extend(nodes);
            if lost == Lost::IsSkipped {
                self.old_data.extend(&data);
            }
            self.found.extend(data);
            for entry in entries.into_iter().filter(|_| self.enters_entries) {
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

/// All content blocks of the version of `root` and of the old states that it keeps, each once. An error is for people.
pub async fn blocks_below(
    env: Env,
    blocks: Arc<dyn Blocks>,
    volume: VolumeId,
    root: SignedBlock,
    read_key: Option<ReadKey>,
) -> Result<Vec<BlockHash>, String> {
    let cipher = read_key.map(|key| VolumeCipher::new(&key, &volume));
    let decoded = sealed_root::decode(&root.payload, cipher.as_ref());
    let root = decoded.map_err(|error| error.to_string())?;
    let cache = BlockCache::new(env, (blocks, root.form(volume, cipher)), CACHE_BYTES);
    let below = blocks_of(&cache, &root).await;
    Ok(below.map_err(|error| error.at(b"").to_string())?.blocks)
}
