//! Keeping a shared volume alive: extending the leases of all that can be reached from its root directory
//! (CFS §5.5: "Publishers must periodically refresh their blocks"; Pastis does not say who does).
//!
//! Every sibling counts, also those that are not shown: what was written at the same time must not be lost
//! before somebody has kept it. What nothing names any more is not renewed and ends with its lease.
//!
//! It remembers the keys of the inodes it has seen, 32 bytes each, since directories that members write
//! may name each other in circles.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use atoll_dht::{Blocks, GetError, LeaseRenewal, PutError, Renewed, Wanted};
use atoll_env::Env;
use atoll_key::kinds::certified::CertifiedBlock;
use atoll_key::{BlockHash, BlockId, VolumeId};
use futures_util::stream::{FuturesUnordered, StreamExt};

use super::access::ReaderRecord;
use super::entries;
use super::inline_blocks::InlineBlocks;
use super::inode::{Contents, FileData, InodeKey};
use super::sealing::Sealing;
use crate::blocks::cache::BlockCache;
use crate::owned::reachable::Node;

/// Inodes that are read at once. A guess.
const WINDOW: usize = 16;
/// Leases that are extended at once.
const BATCH: usize = 1024;
/// Blocks of pointers kept in memory: few are read twice.
const CACHE_BYTES: u64 = 8 << 20;
/// How many inodes that could not be read are named; others are counted.
const MAX_NAMED: usize = 20;

/// What was kept.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Kept {
    /// Inodes that were found.
    pub inodes: u64,
    /// Blocks whose leases were extended, inodes included.
    pub renewed: u64,
    /// Blocks that the ring does not have.
    pub lacking: u64,
    /// Inodes of which not everything could be read, so that not everything was renewed.
    pub unread: u64,
    /// The first of these, and why.
    pub named: Vec<String>,
}

/// Extends the leases of everything below the root directory, and of the record of an encrypted volume's
/// readers.
///
/// # Errors
/// If leases are not extended: for lack of room, or since the ring does not answer.
pub async fn keep(
    env: &Env,
    blocks: &Arc<dyn Blocks>,
    volume: VolumeId,
    root: InodeKey,
    sealing: &Sealing,
) -> Result<Kept, PutError> {
    let inline = InlineBlocks::over(blocks.clone(), sealing.clone());
    let over: Arc<dyn Blocks> = inline.clone();
    let cache = BlockCache::new(env.clone(), (over, None), CACHE_BYTES);
    let walk = Walk { blocks, inline, cache, volume, sealing };
    let (mut kept, mut due) = (Kept::default(), Vec::new());
    if sealing.is_encrypted() {
        due.push(ReaderRecord::id(volume));
    }
    let mut seen = BTreeSet::from([root]);
    let mut waiting = VecDeque::from([root]);
    let mut running = FuturesUnordered::new();
    loop {
        while running.len() < WINDOW
            && let Some(key) = waiting.pop_front()
        {
            running.push(walk.visit(key));
        }
        let Some((key, found)) = running.next().await else { break };
        let Found { ids, children, failure } = found;
        kept.inodes += 1;
        if let Some(why) = failure {
            kept.unread += 1;
            if kept.named.len() < MAX_NAMED {
                kept.named.push(format!("{}: {why}", key.key()));
            }
        }
        due.extend(ids);
        waiting.extend(children.into_iter().filter(|child| seen.insert(*child)));
        while due.len() >= BATCH {
            let rest = due.split_off(BATCH);
            renew(blocks, std::mem::replace(&mut due, rest), &mut kept).await?;
        }
    }
    renew(blocks, due, &mut kept).await?;
    Ok(kept)
}

async fn renew(
    blocks: &Arc<dyn Blocks>,
    ids: Vec<BlockId>,
    kept: &mut Kept,
) -> Result<(), PutError> {
    if ids.is_empty() {
        return Ok(());
    }
    let renewal = LeaseRenewal { ids, lease_secs: None, will_be_put: false };
    for outcome in blocks.renew_blocks(renewal).await {
        match outcome? {
            Renewed::Held => kept.renewed += 1,
            Renewed::Lacking => kept.lacking += 1,
        }
    }
    Ok(())
}

struct Walk<'a> {
    blocks: &'a Arc<dyn Blocks>,
    inline: Arc<InlineBlocks>,
    cache: Arc<BlockCache>,
    volume: VolumeId,
    sealing: &'a Sealing,
}

/// What one inode leads to.
#[derive(Default)]
struct Found {
    ids: Vec<BlockId>,
    children: BTreeSet<InodeKey>,
    /// Why not all was found.
    failure: Option<String>,
}

impl Walk<'_> {
    async fn visit(&self, key: InodeKey) -> (InodeKey, Found) {
        let mut found = Found::default();
        if let Err(why) = self.find(key, &mut found).await {
            found.failure = Some(why);
        }
        (key, found)
    }

    async fn find(&self, key: InodeKey, found: &mut Found) -> Result<(), String> {
        let id = CertifiedBlock::id_at(key.key());
        let held = match self.blocks.get_block(id, Wanted::Newest).await {
            // It has been removed, and its name is left.
            Err(GetError::Removed { .. }) => return Ok(()),
            held => held.map_err(|error| error.to_string())?,
        };
        found.ids.push(id);
        let block = CertifiedBlock::decode_verified(&held.bytes);
        let block = block.map_err(|error| error.to_string())?;
        if block.volume() != self.volume {
            found.ids.clear();
            return Err("it belongs to another volume".into());
        }
        found.ids.extend(entries::leaves_of(&block, self.sealing).iter().map(BlockHash::id));
        let leaves = entries::fetch(self.blocks, &block, self.sealing).await;
        let leaves = leaves.map_err(|error| error.to_string())?;
        for leaf in leaves.values() {
            found.children.extend(leaf.entries().iter().map(|entry| entry.inode));
        }
        for sibling in block.siblings().iter().filter(|sibling| !sibling.is_removal) {
            let inode = self.sealing.inode(&sibling.payload);
            let inode = inode.map_err(|error| error.to_string())?;
            match inode.contents {
                Contents::Directory(entries) => {
                    found.children.extend(entries.iter().map(|entry| entry.inode));
                }
                Contents::Regular { data: Some(data), .. } => self.find_data(data, found).await?,
                _ => {}
            }
        }
        Ok(())
    }

    /// The blocks of a file's data.
    async fn find_data(&self, data: FileData, found: &mut Found) -> Result<(), String> {
        let (top, _pin) = match data {
            FileData::Elsewhere(hash) => {
                found.ids.push(hash.id());
                (hash, None)
            }
            FileData::Here(block) => {
                let pin = self.inline.pin(block.encode().into());
                (pin.hash, Some(pin))
            }
        };
        let mut waiting = vec![Node::Inode(top)];
        // A few blocks can describe endless data.
        let mut read = BTreeSet::new();
        while let Some(node) = waiting.pop() {
            if !read.insert(node) {
                continue;
            }
            let below = node.below(&self.cache).await;
            let below = below.map_err(|error| error.at(b"").to_string())?;
            found.ids.extend(below.nodes.iter().map(|node| node.hash().id()));
            let data: BTreeSet<BlockId> = below.data.iter().map(BlockHash::id).collect();
            found.ids.extend(data);
            waiting.extend(below.nodes);
        }
        Ok(())
    }
}
