//! Past versions of inodes ([`past`]): keeping those that are replaced, and finding them again.
//!
//! A version that is replaced goes into a block of its own if the volume's policy keeps it. That block is on
//! the ring before the version that refers to it; as long as it is not there it waits with the leaves of
//! directories that are not there either.
//!
//! Invariant: keeping what was never makes a write fail. If the block of earlier versions cannot be read,
//! the version that is replaced is not kept, and those before it stay.

use std::sync::Arc;

use atoll_dht::{GetError, Wanted};
use atoll_key::kinds::certified::CertifiedBlock;
use atoll_key::{BlockHash, GroupId, UserId};
use atoll_vfs::Errno;
use bytes::Bytes;
use futures_util::stream::{self, StreamExt, TryStreamExt};

use super::{Freshness, Inodes, LEAF_BYTES, LEAVES_AT_ONCE, State, Version};
use crate::blocks::error::BlockError;
use crate::blocks::outbox::{NewContent, Outbox};
use crate::blocks::pace;
use crate::keep::Keep;
use crate::shared::entries::{Entries, Leaf, Leaves};
use crate::shared::fault::Fault;
use crate::shared::inode::{Contents, Inode, InodeKey};
use crate::shared::merged;
use crate::shared::past::{self, PastVersion, Place, Replaced};
use crate::shared::sealing::Sealer;

/// About how long the block of a past version is.
const PAST_BYTES: u64 = 2 << 10;
/// Past versions that are read at once.
const READS_AT_ONCE: usize = 16;

/// What the next version of an inode refers to.
pub(super) struct Kept {
    pub(super) past: Option<BlockHash>,
    /// What has to be on the ring before it.
    pub(super) blocks: Vec<NewContent>,
}

/// What an inode was at some time.
pub(in crate::shared) struct PastInode {
    /// The entries of a directory have been read.
    pub(in crate::shared) inode: Inode,
    pub(in crate::shared) user: UserId,
    pub(in crate::shared) began_ms: u64,
    /// When it was replaced, unless it is the present version.
    pub(in crate::shared) ended_ms: Option<u64>,
}

/// The newest version of an inode.
struct Head {
    block: CertifiedBlock,
    /// `None` if the inode has been removed.
    present: Option<Arc<Version>>,
    past: Option<BlockHash>,
}

impl Head {
    /// When it was written, or removed.
    fn began_ms(&self) -> u64 {
        past::began_ms(&self.block, self.present.as_ref().map(|present| present.inode()))
    }
}

/// The versions of an inode that are there.
pub(in crate::shared) struct Log {
    /// The newest first.
    pub(in crate::shared) versions: Vec<PastInode>,
    /// When the inode was removed, and by whom.
    pub(in crate::shared) removed: Option<(u64, UserId)>,
    /// The groups that may write it.
    pub(in crate::shared) groups: Vec<GroupId>,
}

/// What a name of a directory meant, by one of the directory's versions.
pub(in crate::shared) struct Meaning {
    /// When the version began.
    pub(in crate::shared) began_ms: u64,
    /// The states that show it: those after the first time, up to the second.
    pub(in crate::shared) shown_ms: (u64, u64),
    /// Who wrote the directory's version.
    pub(in crate::shared) user: UserId,
    /// `None`: nothing had the name.
    pub(in crate::shared) inode: Option<InodeKey>,
}

/// A past version of an inode that is kept.
pub(in crate::shared) struct KeptVersion {
    /// Milliseconds since 1970.
    pub(in crate::shared) until_ms: u64,
    pub(in crate::shared) block: BlockHash,
    pub(in crate::shared) inode: Inode,
}

/// The past versions of an inode that are kept beyond some time.
pub(in crate::shared) struct KeptBeyond {
    /// The block that the inode refers to, which lists all others.
    pub(in crate::shared) newest: Option<BlockHash>,
    pub(in crate::shared) versions: Vec<KeptVersion>,
}

impl Inodes {
    /// Keeps a version that is about to be replaced, if it is to be kept.
    pub(super) async fn keep_replaced(
        &self,
        state: &State,
        replaced: Replaced<'_>,
        sealer: &Sealer,
    ) -> Kept {
        let unchanged = Kept { past: replaced.inode.past, blocks: Vec::new() };
        if !replaced.may_be_kept(self.keep) {
            return unchanged;
        }
        let before = match replaced.inode.past {
            None => None,
            Some(hash) => match self.read_past(state, hash).await {
                Ok(before) => before.map(|before| (hash, before)),
                Err(fault) => {
                    tracing::warn!("the version that is replaced is not kept: {fault:?}");
                    return unchanged;
                }
            },
        };
        let content = sealer.of_inode(InodeKey::of(&replaced.block.key()));
        let outbox = Outbox::new(&self.blocks, &self.cache, Some(&content));
        let mut blocks = Vec::new();
        for leaf in replaced.inode.leaves() {
            if leaf.is_named() {
                let unsent = state.known().unsent.get(&leaf.hash()).map(|(_, block)| block.clone());
                blocks.extend(unsent);
            } else {
                let block = outbox.seal(leaf.encode());
                leaf.name(block.hash);
                blocks.push(block);
            }
        }
        let Some(past) = replaced.past(self.keep, before) else { return unchanged };
        let mut block = outbox.seal(past.encode());
        block.lease_secs = Some(past.lease_secs());
        let past = Some(block.hash);
        blocks.push(block);
        Kept { past, blocks }
    }

    /// Whether something that others can have seen in a version is not in the next one. An inode that is removed counts
    /// if a state of a directory that is kept shows it with these contents: a program that replaces files all the time by
    /// renaming others leaves no more old ones than its directory has states.
    pub(super) async fn is_lost(
        &self,
        state: &State,
        (block, before): (&CertifiedBlock, &Inode),
        (next, is_removed): (&Inode, bool),
    ) -> bool {
        if self.keep.kept_secs_within_a_minute() == 0 {
            return false;
        }
        if !is_removed {
            // What is not on the ring yet nobody else has seen.
            let is_unput = state.known().is_unput;
            return !is_unput && before.contents.is_lost_with(&next.contents);
        }
        let mut began_ms = past::began_ms(block, Some(before));
        if let Contents::Regular { written, .. } = &before.contents {
            began_ms = began_ms.min(written.time_ms);
        }
        for link in &before.links {
            let above = self.state(link.directory);
            let directory = above.known().version().cloned();
            // It has been removed as well, with its states.
            let Some(directory) = directory else { return true };
            let Some(past) = directory.inode().past else { continue };
            if let Ok(Some(past)) = self.read_past(&above, past).await
                && past.span.ended_ms > began_ms
            {
                return true;
            }
        }
        false
    }

    /// A past version of the inode of `state`; `None` if its block is not there any more.
    async fn read_past(
        &self,
        state: &State,
        hash: BlockHash,
    ) -> Result<Option<PastVersion>, Fault> {
        match self.past_bytes(state, hash, PAST_BYTES).await {
            Err(BlockError::Fetch(GetError::NotFound { .. })) => Ok(None),
            bytes => Ok(Some(PastVersion::decode(&bytes?)?)),
        }
    }

    /// A block of a past version, also one that is not on the ring yet. `about`: its length in bytes.
    async fn past_bytes(
        &self,
        state: &State,
        hash: BlockHash,
        about: u64,
    ) -> Result<Bytes, BlockError> {
        let unsent = state.known().unsent_past.get(&hash).map(|block| block.plain.clone());
        match unsent {
            Some(plain) => Ok(plain),
            None => self.cache.get(hash, pace::Wanted::Now(about)).await,
        }
    }

    /// What an inode was just before `time_ms`; `None` if it was not there then, or that is not kept.
    pub(in crate::shared) async fn at(
        &self,
        key: InodeKey,
        time_ms: u64,
    ) -> Result<Option<PastInode>, Fault> {
        let head = self.head(key).await?;
        let present = head.present.as_ref().and_then(|present| self.present(present));
        if head.began_ms() < time_ms {
            return Ok(present);
        }
        let (state, now_ms) = (self.state(key), self.env.unix_ms());
        let newest = match head.past {
            // What is not there says nothing of what was.
            Some(hash) => match self.read_past(&state, hash).await? {
                None => return Ok(None),
                newest => newest,
            },
            None => None,
        };
        let read = async |place| match place {
            Place::Here => Ok(newest.clone()),
            Place::Earlier(hash) => self.read_past(&state, hash).await,
        };
        let before = match newest.as_ref().and_then(|newest| newest.before(time_ms)) {
            None => None,
            Some((span, _)) if span.kept_until_ms <= now_ms => return Ok(None),
            Some((_, place)) => match read(place).await? {
                None => return Ok(None),
                before => before,
            },
        };
        if let Some(before) = before.as_ref().filter(|before| before.span.ended_ms >= time_ms) {
            return self.past_inode(&state, before).await.map(Some);
        }
        let next = match newest.as_ref().and_then(|newest| newest.after(time_ms)) {
            None => present,
            Some((_, place)) => match read(place).await? {
                Some(next) => Some(self.past_inode(&state, &next).await?),
                None => None,
            },
        };
        let then_ms = time_ms.saturating_sub(1);
        let next = next.filter(|next| Keep::is_within_a_minute(then_ms, next.began_ms));
        let is_whole = self.keep.has_whole_minute(then_ms, now_ms);
        let inode = next
            .as_ref()
            .and_then(|next| past::before_next(&next.inode, time_ms, before.as_ref(), is_whole));
        match (next.zip(inode), before) {
            (Some((next, inode)), _) => Ok(Some(PastInode { inode, ..next })),
            (None, Some(before)) => self.past_inode(&state, &before).await.map(Some),
            (None, None) => Ok(None),
        }
    }

    /// The versions of an inode that are there.
    pub(in crate::shared) async fn log(&self, key: InodeKey) -> Result<Log, Fault> {
        let head = self.head(key).await?;
        let mut versions = Vec::new();
        let mut removed = None;
        match &head.present {
            Some(present) => versions.extend(self.present(present)),
            None => {
                let user = past::leading(&head.block, &self.own).map(|one| one.certificate.user);
                removed = user.map(|user| (head.began_ms(), user));
            }
        }
        for (_, past) in self.kept_versions(key, head.past, self.env.unix_ms()).await? {
            versions.push(PastInode::unread(&past)?);
        }
        Ok(Log { versions, removed, groups: head.block.groups().to_vec() })
    }

    /// What a name of a directory has meant as far as the directory's versions are there, the newest first.
    pub(in crate::shared) async fn meanings(
        &self,
        directory: InodeKey,
        name: &[u8],
    ) -> Result<Vec<Meaning>, Fault> {
        let head = self.head(directory).await?;
        let (state, now_ms) = (self.state(directory), self.env.unix_ms());
        let began_ms = head.began_ms();
        let user = match &head.present {
            Some(present) => past::author(&head.block, present.inode(), &self.own),
            None => past::leading(&head.block, &self.own).map(|sibling| sibling.certificate.user),
        };
        let mut meanings: Vec<Meaning> = Vec::new();
        // When the last of these gave the name to what has it; `None` if the last is no version that can be read.
        let mut added_ms: Option<Option<u64>> = None;
        if let Some(user) = user {
            let entry = match &head.present {
                Some(version) => version.entry(name)?,
                None => None,
            };
            added_ms = head.present.as_ref().map(|_| entry.as_ref().map(|entry| entry.time_ms));
            let (shown_ms, inode) = ((began_ms, u64::MAX), entry.map(|entry| entry.inode));
            meanings.push(Meaning { began_ms, shown_ms, user, inode });
        }
        // Versions share most of their leaves.
        let mut read = Leaves::new();
        for (_, past) in self.kept_versions(directory, head.past, now_ms).await? {
            let entries = match past.inode()?.contents {
                Contents::Directory(entries) => Ok(entries),
                Contents::Unread { entries, leaves } => {
                    let unread = leaves.iter().copied().filter(|hash| !read.contains_key(hash));
                    let unread: Vec<BlockHash> = unread.collect();
                    let leaf = async |hash| {
                        let bytes = self.past_bytes(&state, hash, LEAF_BYTES).await.ok()?;
                        Some((hash, Leaf::named(hash, &bytes).ok()?))
                    };
                    let found = stream::iter(unread).map(leaf).buffer_unordered(LEAVES_AT_ONCE);
                    read.extend(found.collect::<Vec<_>>().await.into_iter().flatten());
                    Entries::in_leaves(&leaves, entries, &read)
                }
                _ => return Err(Errno::ENOTDIR.into()),
            };
            // Of a version that cannot be read the one before it speaks.
            let Ok(entries) = entries else {
                added_ms = None;
                continue;
            };
            let (began_ms, ended_ms) = (past.span.began_ms, past.span.ended_ms);
            let mut until_ms = ended_ms;
            if let Some(next) = meanings.last_mut() {
                // As `at` has it.
                let is_gap_known = self.keep.has_whole_minute(ended_ms, now_ms)
                    && Keep::is_within_a_minute(ended_ms, next.began_ms)
                    && !past.is_followed_by_gap(ended_ms);
                until_ms = match added_ms {
                    Some(_) if is_gap_known => ended_ms.min(next.began_ms),
                    _ => next.began_ms,
                };
                if let Some(Some(added_ms)) = added_ms {
                    next.shown_ms.0 = next.began_ms.min(added_ms.max(until_ms));
                }
            }
            let named = merged::named(&entries, name).map(|named| named[0].clone());
            added_ms = Some(named.as_ref().map(|entry| entry.time_ms));
            let (shown_ms, inode) = ((began_ms, until_ms), named.map(|entry| entry.inode));
            meanings.push(Meaning { began_ms, shown_ms, user: past.user, inode });
        }
        if let (Some(oldest), Some(Some(added_ms))) = (meanings.last_mut(), added_ms)
            && self.keep.has_whole_minute(oldest.began_ms, now_ms)
        {
            let since_ms = added_ms.max(Keep::minute_began_ms(oldest.began_ms));
            oldest.shown_ms.0 = oldest.began_ms.min(since_ms);
        }
        Ok(meanings)
    }

    /// The versions of an inode that were replaced and are kept beyond `time_ms`, the newest first. The entries of
    /// large directories are not read.
    pub(in crate::shared) async fn kept_beyond(
        &self,
        key: InodeKey,
        time_ms: u64,
    ) -> Result<KeptBeyond, Fault> {
        let newest = self.head(key).await?.past;
        let kept = self.kept_versions(key, newest, time_ms).await?.into_iter();
        let kept = kept.map(|(block, past)| {
            Ok(KeptVersion { until_ms: past.span.kept_until_ms, block, inode: past.inode()? })
        });
        Ok(KeptBeyond { newest, versions: kept.collect::<Result<_, Fault>>()? })
    }

    /// The past versions that are kept beyond `time_ms` and their blocks, the newest first; `newest` is what the inode
    /// refers to.
    async fn kept_versions(
        &self,
        key: InodeKey,
        newest: Option<BlockHash>,
        time_ms: u64,
    ) -> Result<Vec<(BlockHash, PastVersion)>, Fault> {
        let state = self.state(key);
        let Some(newest_hash) = newest else { return Ok(Vec::new()) };
        let Some(newest) = self.read_past(&state, newest_hash).await? else {
            return Ok(Vec::new());
        };
        let earlier = newest.earlier.iter().filter(|one| one.span.kept_until_ms > time_ms);
        let earlier: Vec<BlockHash> = earlier.map(|one| one.hash).collect();
        let mut kept = Vec::new();
        if newest.span.kept_until_ms > time_ms {
            kept.push((newest_hash, newest));
        }
        let read = async |hash| (hash, self.read_past(&state, hash).await);
        let mut reads = stream::iter(earlier).map(read).buffered(READS_AT_ONCE);
        while let Some((hash, read)) = reads.next().await {
            kept.extend(read?.map(|past| (hash, past)));
        }
        Ok(kept)
    }

    /// What a removed inode was when it was removed; `None` if its removal has not kept that.
    pub(in crate::shared) async fn left_by_removal(
        &self,
        key: InodeKey,
    ) -> Result<Option<Inode>, Fault> {
        let head = self.head(key).await?;
        let (None, Some(hash)) = (&head.present, head.past) else { return Ok(None) };
        let past = self.read_past(&self.state(key), hash).await?;
        let last = past.filter(|past| past.span.ended_ms == head.began_ms());
        Ok(last.map(|past| past.inode()).transpose()?)
    }

    async fn head(&self, key: InodeKey) -> Result<Head, Fault> {
        match self.read(key, Freshness::Newest).await {
            Ok(version) => {
                let (block, past) = (version.block.clone(), version.inode().past);
                return Ok(Head { block, present: Some(version), past });
            }
            Err(Fault { errno: Errno::ESTALE, .. }) => {}
            Err(fault) => return Err(fault),
        }
        let id = CertifiedBlock::id_at(key.key());
        let tombstone = match self.blocks.get_block(id, Wanted::Newest).await {
            Err(GetError::Removed { tombstone, .. }) => *tombstone,
            // Its removal is known here, and not on the ring yet.
            Ok(held) => held.bytes,
            Err(error) => return Err(error.into()),
        };
        let malformed = |error| Fault::new(Errno::EIO, error);
        let block = CertifiedBlock::decode_verified(&tombstone).map_err(malformed)?;
        let removal = past::leading(&block, &self.own).filter(|one| one.is_removal);
        let past = removal.map(|removal| past::decode_left(&removal.payload)).transpose()?;
        match block.volume() == self.volume {
            true => Ok(Head { past: past.flatten(), block, present: None }),
            false => Err(Fault::new(Errno::EIO, "a directory names an inode of another volume")),
        }
    }

    fn present(&self, version: &Version) -> Option<PastInode> {
        Some(PastInode {
            inode: version.inode().clone(),
            user: past::author(&version.block, version.inode(), &self.own)?,
            began_ms: past::began_ms(&version.block, Some(version.inode())),
            ended_ms: None,
        })
    }

    async fn past_inode(&self, state: &State, past: &PastVersion) -> Result<PastInode, Fault> {
        let mut found = PastInode::unread(past)?;
        if let Contents::Unread { entries, leaves: hashes } = &found.inode.contents {
            let reads = hashes.iter().map(|hash| async move {
                let bytes = self.past_bytes(state, *hash, LEAF_BYTES).await?;
                Ok::<_, Fault>((*hash, Leaf::named(*hash, &bytes)?))
            });
            let reads: Vec<_> = reads.collect();
            let leaves = stream::iter(reads).buffer_unordered(LEAVES_AT_ONCE);
            let leaves: Leaves = leaves.try_collect().await?;
            let entries = Entries::in_leaves(hashes, *entries, &leaves)?;
            found.inode.contents = Contents::Directory(entries);
        }
        Ok(found)
    }
}

impl PastInode {
    /// The entries of a large directory are not read.
    fn unread(past: &PastVersion) -> Result<PastInode, Fault> {
        let (began_ms, ended_ms) = (past.span.began_ms, Some(past.span.ended_ms));
        Ok(PastInode { inode: past.inode()?, user: past.user, began_ms, ended_ms })
    }
}
