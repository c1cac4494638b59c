//! Giving the inodes of a volume other groups, from a directory down.
//!
//! Only the volume's owner can. An inode is read, its block put with a [`Rebinding`], and a directory's
//! entries follow. A replica that holds a newer binding takes no more fresh siblings of an older one, so
//! a member of a group that is left out is shut out of the inode from then on. Where the owner is a
//! member too and nothing is in conflict, the inode is written anew under the new binding: then siblings
//! with false times, brought as copies, cannot cover it either.
//!
//! Inodes that have the right groups are left alone, so that a rebinding which was interrupted is run
//! again. A directory is read once more after it was rebound: what is added to it later is made by
//! writers who have seen its new groups.
//!
//! It remembers the keys of the inodes it has seen, 32 bytes each, since directories that members write
//! may name each other in circles.

use std::collections::{BTreeSet, VecDeque};
use std::fmt;
use std::sync::Arc;

use atoll_dht::{Blocks, GetError, HeldBlock, NewBlock, PutError, Wanted};
use atoll_env::Env;
use atoll_key::kinds::certified::{CertifiedBlock, Rebinding, WriterId};
use atoll_key::{BlockHash, BlockId, GroupId, SecretKey};
use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;

use super::credentials::Credentials;
use super::{ATTEMPTS, AccessError};
use crate::keep::Keep;
use crate::shared::entries;
use crate::shared::inode::{Contents, Inode, InodeKey};
use crate::shared::merged::{self, Merged, names};
use crate::shared::past::{PastVersion, Replaced};
use crate::shared::sealing::{ContentSealer, Sealing};

/// Inodes that are read or put at once. A guess.
const WINDOW: usize = 16;
/// How many inodes that failed are named; others are counted.
const MAX_NAMED: usize = 20;

/// How far a rebinding has come.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RebindReport {
    /// Inodes that were found.
    pub inodes: u64,
    /// Those of them that have other groups now.
    pub changed: u64,
    /// Those that could not be read or put.
    pub failed: u64,
    /// Paths of the first of these, and why.
    pub named: Vec<(Bytes, String)>,
}

/// What is at hand for each inode.
struct Rebinder<'a> {
    env: &'a Env,
    blocks: &'a Arc<dyn Blocks>,
    volume: &'a SecretKey,
    sealing: &'a Sealing,
    keep: Keep,
    credentials: &'a Credentials,
    writer: Option<WriterId>,
    groups: &'a (dyn Fn(&[GroupId]) -> Vec<GroupId> + Sync),
}

/// An inode to be visited.
struct Visit {
    inode: InodeKey,
    path: Bytes,
}

/// What a visit found: whether the groups were changed, and the directory's entries.
type Visited = Result<(bool, Vec<(Bytes, InodeKey)>), String>;

/// Binds `top` and all inodes below it to what `groups` makes of their groups. The volume's owner is,
/// as a user, the one of `credentials`; an encrypted volume's inodes are written anew as `sealing` seals
/// them, and `keep` says which versions are kept that are replaced. `progress` is called after each inode.
pub async fn rebind(
    env: &Env,
    blocks: &Arc<dyn Blocks>,
    (volume, sealing, keep): (&SecretKey, &Sealing, Keep),
    credentials: &Credentials,
    top: InodeKey,
    groups: &(dyn Fn(&[GroupId]) -> Vec<GroupId> + Sync),
    progress: &mut (dyn FnMut(&RebindReport) + Send),
) -> RebindReport {
    // No other writes are made by this name, and each inode is written once or covers what was.
    let random = env.random_u64().to_be_bytes();
    let writer = credentials.user().map(|user| WriterId::new(&user, random));
    let rebinder = Rebinder { env, blocks, volume, sealing, keep, credentials, writer, groups };
    let mut report = RebindReport::default();
    let mut seen = BTreeSet::from([top]);
    let mut waiting = VecDeque::from([Visit { inode: top, path: Bytes::new() }]);
    let mut running = FuturesUnordered::new();
    loop {
        while running.len() < WINDOW
            && let Some(visit) = waiting.pop_front()
        {
            running.push(rebinder.visit(visit));
        }
        let Some((path, visited)) = running.next().await else { return report };
        report.inodes += 1;
        match visited {
            Ok((changed, entries)) => {
                report.changed += u64::from(changed);
                for (name, inode) in entries {
                    if seen.insert(inode) {
                        let path = if path.is_empty() { name } else { joined(&path, &name) };
                        waiting.push_back(Visit { inode, path });
                    }
                }
            }
            Err(told) => {
                report.failed += 1;
                if report.named.len() < MAX_NAMED {
                    report.named.push((path, told));
                }
            }
        }
        progress(&report);
    }
}

fn joined(path: &[u8], name: &[u8]) -> Bytes {
    [path, b"/", name].concat().into()
}

impl Rebinder<'_> {
    async fn visit(&self, visit: Visit) -> (Bytes, Visited) {
        let id = CertifiedBlock::id_at(visit.inode.key());
        let (path, mut changed) = (visit.path, false);
        // What was signed here is part of all that is signed later.
        let mut signed: Option<CertifiedBlock> = None;
        let mut told = String::new();
        for _ in 0..ATTEMPTS {
            let held = match self.blocks.get_block(id, Wanted::Newest).await {
                Ok(held) => held,
                // Removed: nobody can write it.
                Err(GetError::Removed { .. }) => return (path, Ok((changed, Vec::new()))),
                Err(error) => return (path, Err(error.to_string())),
            };
            let block = match CertifiedBlock::decode(&held.bytes) {
                Ok(block) => signed.as_ref().and_then(|mine| mine.join(&block)).unwrap_or(block),
                Err(error) => return (path, Err(error.to_string())),
            };
            let leaves = match entries::fetch(self.blocks, &block, self.sealing).await {
                Ok(leaves) => leaves,
                Err(error) => return (path, Err(error.to_string())),
            };
            let merged = merged::merge(&block, &leaves, self.sealing).ok().flatten();
            let wanted = (self.groups)(block.groups());
            if BTreeSet::from_iter(&wanted) == BTreeSet::from_iter(block.groups()) {
                return (path, Ok((changed, merged.map(named).unwrap_or_default())));
            }
            let Some(next) = self.rebound(&block, &wanted, merged.as_ref()).await else {
                let why = "it belongs to another volume, or would have no group or too many";
                return (path, Err(why.to_owned()));
            };
            signed = Some(next.clone());
            let new = NewBlock { id, bytes: next.bytes().clone(), lease_secs: None };
            match self.blocks.put_blocks(vec![new]).await.pop().unwrap_or(Ok(())) {
                Ok(()) => changed = true,
                Err(error @ (PutError::Superseded { .. } | PutError::NotAdmitted(_))) => {
                    told = error.to_string();
                }
                Err(error) => return (path, Err(error.to_string())),
            }
        }
        (path, Err(told))
    }

    /// The block under a new binding.
    async fn rebound(
        &self,
        block: &CertifiedBlock,
        groups: &[GroupId],
        merged: Option<&Merged>,
    ) -> Option<CertifiedBlock> {
        let version = block.binding_version().checked_add(1)?;
        let rebinding = Rebinding::sign(self.volume, &block.key(), version, groups)?;
        let rebound = block.rebound(rebinding)?;
        let written = async {
            // A version that covers others would take their contents away.
            let merged = merged.filter(|it| it.conflicts.is_empty() && it.unreadable.is_empty())?;
            let sealer = self.sealing.sealer();
            let content = sealer.of_inode(InodeKey::of(&block.key()));
            for leaf in merged.inode.leaves().iter().filter(|leaf| !leaf.is_named()) {
                leaf.name(self.put_content(&content, &leaf.encode()).await?);
            }
            let author = self.credentials.author(groups, self.writer?).await.ok()?;
            let ended_ms = self.env.unix_ms();
            let (inode, kept_secs) = (&merged.inode, 0);
            let replaced = Replaced { block, inode, ended_ms, kept_secs, is_lost: false };
            let past = self.keep_replaced(replaced, &content).await;
            let inode = Inode { past, ..merged.inode.clone() };
            let payload = sealer.seal_inode(inode.encode().ok()?).ok()?;
            rebound.write(&author, ended_ms, Some(&payload))
        };
        Some(written.await.unwrap_or(rebound))
    }

    /// Keeps a version that is about to be replaced, if it is to be kept; what the next one refers to.
    async fn keep_replaced(
        &self,
        replaced: Replaced<'_>,
        content: &ContentSealer<'_>,
    ) -> Option<BlockHash> {
        let earlier = replaced.inode.past;
        if !replaced.may_be_kept(self.keep) {
            return earlier;
        }
        let kept = async {
            let before = match earlier {
                None => None,
                Some(hash) => match self.get_content(hash).await {
                    Ok(HeldBlock { bytes, .. }) => {
                        let past = self.sealing.open_block(&bytes);
                        past.and_then(|past| PastVersion::decode(&past)).ok().map(|it| (hash, it))
                    }
                    Err(GetError::NotFound { .. }) => None,
                    Err(_) => return None,
                },
            };
            self.put_content(content, &replaced.past(self.keep, before)?.encode()).await
        };
        kept.await.or(earlier)
    }

    async fn get_content(&self, hash: BlockHash) -> Result<HeldBlock, GetError> {
        self.blocks.get_block(hash.inode_content_id(), Wanted::Newest).await
    }

    /// Puts a content block; its hash, if the ring has it.
    async fn put_content(&self, content: &ContentSealer<'_>, block: &[u8]) -> Option<BlockHash> {
        let bytes = Bytes::from(content.seal(block));
        let hash = BlockHash::of_inode_content(&bytes);
        let new = NewBlock { id: hash.inode_content_id(), bytes, lease_secs: None };
        self.blocks.put_all(vec![new]).await.ok()?;
        Some(hash)
    }
}

/// What a directory names; nothing for other files.
fn named(merged: Merged) -> Vec<(Bytes, InodeKey)> {
    match merged.inode.contents {
        Contents::Directory(entries) => {
            let shown = names(&entries).into_iter();
            shown
                .flat_map(|(name, same)| same.into_iter().map(move |e| (name.clone(), e.inode)))
                .collect()
        }
        _ => Vec::new(),
    }
}

/// An inode as the ring has it.
async fn read(blocks: &Arc<dyn Blocks>, inode: InodeKey) -> Result<CertifiedBlock, AccessError> {
    let id = CertifiedBlock::id_at(inode.key());
    let held = blocks.get_block(id, Wanted::Newest).await?;
    CertifiedBlock::decode(&held.bytes).map_err(|error| unreadable(&id, &error))
}

fn unreadable(id: &BlockId, told: &dyn fmt::Display) -> AccessError {
    GetError::Unavailable { key: id.key, told: told.to_string() }.into()
}

/// The groups that may write an inode.
///
/// # Errors
/// If it cannot be read.
pub async fn groups_of(
    blocks: &Arc<dyn Blocks>,
    inode: InodeKey,
) -> Result<Vec<GroupId>, AccessError> {
    Ok(read(blocks, inode).await?.groups().to_vec())
}

/// The inode at a path below `top`; `None` if there is none.
///
/// # Errors
/// If a directory on the way cannot be read.
pub async fn find(
    blocks: &Arc<dyn Blocks>,
    top: InodeKey,
    path: &[Vec<u8>],
    sealing: &Sealing,
) -> Result<Option<InodeKey>, AccessError> {
    let mut at = top;
    for name in path {
        let block = read(blocks, at).await?;
        let leaves = entries::fetch(blocks, &block, sealing).await?;
        let merged = merged::merge(&block, &leaves, sealing);
        let merged = merged.map_err(|error| unreadable(&block.id(), &error))?;
        let Some(Contents::Directory(entries)) = merged.map(|merged| merged.inode.contents) else {
            return Ok(None);
        };
        let shown = names(&entries);
        let Some(entry) = shown.get(&name[..]).and_then(|same| same.first()) else {
            return Ok(None);
        };
        at = entry.inode;
    }
    Ok(Some(at))
}
