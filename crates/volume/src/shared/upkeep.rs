//! Keeping a shared volume alive: extending the leases of all that can be reached from its root directory
//! (CFS §5.5: "Publishers must periodically refresh their blocks"; Pastis does not say who does).
//!
//! Every sibling counts, also those that are not shown: what was written at the same time must not be lost
//! before somebody has kept it. What nothing names any more is not renewed and ends with its lease.
//!
//! Any node with a member's key can do it. Who has walked a whole volume leaves a *mark*, a small content block that
//! names the volume and the day, so that others need not do the same on that day. Whoever knows the volume's address can
//! make one, so a mark must not be believed for weeks.
//!
//! It remembers the keys of the inodes it has seen, 32 bytes each, since directories that members write
//! may name each other in circles.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use atoll_dht::{Blocks, GetError, LeaseRenewal, NewBlock, PutError, Renewed, Wanted};
use atoll_env::Env;
use atoll_key::kinds::certified::CertifiedBlock;
use atoll_key::{BlockHash, BlockId, GroupId, SignedBlock, VolumeId};
use bytes::Bytes;
use futures_util::stream::{FuturesUnordered, StreamExt};

use super::access::{GroupRecord, KeeperRecord, ReaderRecord, VolumeRecord};
use super::entries;
use super::inline_blocks::InlineBlocks;
use super::inode::{Contents, Inode, InodeKey};
use super::reach::Reach;
use super::sealing::Sealing;
use crate::blocks::cache::BlockCache;
use crate::blocks::form::BlockForm;

/// Inodes that are read at once. A guess.
const WINDOW: usize = 16;
/// Leases that are extended at once.
const BATCH: usize = 1024;
/// Blocks of pointers kept in memory: few are read twice.
const CACHE_BYTES: u64 = 8 << 20;
/// How long the mark of a walk is kept: longer than anybody asks for it.
const MARK_LEASE_SECS: u32 = 2 * 24 * 3600;
const DAY_MS: u64 = 24 * 3600 * 1000;
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
    /// The groups that may write them.
    pub groups: BTreeSet<GroupId>,
}

/// Extends the leases of everything below the root directory, and of the records of the volume, its readers if it is
/// encrypted, its keepers if it has any, and the groups that may write it.
///
/// # Errors
/// If leases are not extended: for lack of room, or since the ring does not answer.
pub async fn keep(
    env: &Env,
    blocks: &Arc<dyn Blocks>,
    volume: VolumeId,
    record: &VolumeRecord,
    sealing: &Sealing,
) -> Result<Kept, PutError> {
    let root = record.root;
    let inline = InlineBlocks::over(blocks.clone(), sealing.clone());
    let over: Arc<dyn Blocks> = inline.clone();
    let cache = BlockCache::new(env.clone(), (over, BlockForm::default()), CACHE_BYTES);
    let walk = Walk { blocks, inline, cache, volume, sealing };
    let (mut kept, mut due) = (Kept::default(), vec![SignedBlock::id_at(volume.root_key())]);
    if sealing.is_encrypted() {
        due.push(ReaderRecord::id(volume));
    }
    if record.has_keepers {
        due.push(KeeperRecord::id(volume));
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
        let Found { ids, children, groups: bound, failure } = found;
        due.extend(bound.into_iter().filter(|g| kept.groups.insert(*g)).map(GroupRecord::id));
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

/// The mark that a volume was walked on that day, in UTC.
fn mark(volume: VolumeId, now_ms: u64) -> NewBlock {
    let day = (now_ms / DAY_MS).to_be_bytes();
    let bytes = Bytes::from([&b"atoll v1 leases renewed"[..], &volume.0, &day].concat());
    let lease_secs = Some(u64::from(MARK_LEASE_SECS));
    NewBlock { lease_secs, ..NewBlock::from((BlockHash::of(&bytes), bytes)) }
}

/// Whether somebody has left a mark today that all leases of a volume were extended.
pub async fn was_kept_today(env: &Env, blocks: &Arc<dyn Blocks>, volume: VolumeId) -> bool {
    let mark = mark(volume, env.unix_ms());
    blocks.get_block(mark.id, Wanted::Newest).await.is_ok()
}

/// Leaves a mark that all leases were extended today.
///
/// # Errors
/// If the ring does not take it.
pub async fn mark_kept(
    env: &Env,
    blocks: &Arc<dyn Blocks>,
    volume: VolumeId,
) -> Result<(), PutError> {
    let put = blocks.put_blocks(vec![mark(volume, env.unix_ms())]).await;
    put.into_iter().collect()
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
    /// The groups that may write it.
    groups: Vec<GroupId>,
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
        found.groups.extend_from_slice(block.groups());
        let reach = Reach { inline: &self.inline, cache: &self.cache, sealing: self.sealing };
        let mut content = BTreeSet::new();
        let reached = reach.add_inode(&block, &mut content).await;
        found.ids.extend(content.iter().map(BlockHash::inode_content_id));
        // What one writer has left that cannot be read costs nothing of what others have written: `reached` says it.
        for sibling in block.siblings().iter().filter(|sibling| !sibling.is_removal) {
            if let Ok(Inode { contents: Contents::Directory(entries), .. }) =
                self.sealing.inode(&sibling.payload)
            {
                found.children.extend(entries.iter().map(|entry| entry.inode));
            }
        }
        let leaves = entries::fetch(self.blocks, &block, self.sealing).await;
        let leaves = leaves.map_err(|error| error.to_string())?;
        for leaf in leaves.values() {
            found.children.extend(leaf.entries().iter().map(|entry| entry.inode));
        }
        reached
    }
}
