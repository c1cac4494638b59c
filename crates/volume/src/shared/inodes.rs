//! The inodes of a volume as one mount knows them: reading their newest versions, and writing new ones.
//!
//! Reading follows Pastis §3.2:
//!
//! - **Close-to-open**: all replicas are asked, and what they hold is joined.
//! - **Read-your-writes**: the first replica that is found will do if its version is at least the one
//!   that this mount has seen or written. What it holds is joined with that one, since two versions of
//!   one height may both be needed.
//!
//! Which of the two counts is the mount's choice, or the file's ([`super::consistency`]).
//!
//! Invariants:
//!
//! - What this mount shows of an inode never goes back: each version that is read is joined with what
//!   was seen before, for as long as the inode is in memory.
//! - A version that is written covers all that this mount has signed of the inode, whether or not that
//!   was acknowledged: two of a writer's versions must not have one height. A mount that has forgotten
//!   what it has signed continues under a new name: each inode in memory has a [`WriterId`] of its own.
//! - An inode is put by one call of this mount at a time, and what is put covers what was put before.
//! - What was read before a lock was granted is read again before it is shown: its former holder may have changed it.
//!
//! A change may be shown here before it is put ([`behind`]). While the ring is out of reach, what is known is shown,
//! and what is put waits in the spool ([`bring`]). [`mod@write`] makes, signs and puts versions. What is replaced is kept for a while ([`mod@past`]).
//!
//! It does not know numbers, handles or what is in memory of a file's contents.

mod behind;
mod bring;
mod leases;
mod past;
mod together;
mod write;

pub(super) use self::past::{KeptVersion, Meaning, PastInode};
pub(super) use self::together::Together;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

use atoll_dht::{Blocks, GetError, Wanted};
use atoll_env::{Env, Instant};
use atoll_key::kinds::certified::{Binding, CertifiedBlock, Dot, WriterId};
use atoll_key::{BlockHash, BlockId, GroupId, UserId, VolumeId};
use atoll_vfs::Errno;
use bytes::Bytes;
use futures_util::stream::{self, StreamExt, TryStreamExt};

pub(super) use self::bring::{Brought, OutOfReach};
pub(super) use self::leases::{MAX_BASE_AGE, ReplacedLeaves};
use self::write::{Next, Over, Signed};
use super::access::{Credentials, ReadAccess};
use super::consistency::Consistency;
use super::entries::{self, Leaf, Leaves, LeavesOf};
use super::fault::Fault;
use super::inode::{Contents, Entry, Inode, InodeKey};
use super::merged::{self, Merged};
use super::spool::SpooledBlocks;
use super::standing::{Standing, Trusted};
use crate::blocks::cache::BlockCache;
use crate::blocks::error::BlockError;
use crate::blocks::outbox::NewContent;
use crate::blocks::pace;
use crate::format::FormatError;
use crate::keep::Keep;

/// How old what is read may be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Freshness {
    /// All replicas are asked, whatever the consistency: what is read under a lock is what was
    /// written under it before.
    Latest,
    /// The ring is asked.
    Newest,
    /// The ring is asked if it was not asked within this time, or not since a lock was granted. With
    /// [`Duration::MAX`] what is known will do.
    Within(Duration),
}

/// What a write is based on.
pub(super) enum Base<'a> {
    /// The newest version.
    Newest,
    /// This version; what others have written since stays beside it.
    Version(&'a Arc<Version>),
}

impl Base<'_> {
    /// This version if there is one, else the newest.
    pub(super) fn of(version: Option<&Arc<Version>>) -> Base<'_> {
        version.map_or(Base::Newest, Base::Version)
    }
}

/// Inodes in memory, unless more are in use. A guess: some 100 MB.
const MAX_STATES: usize = 32_768;

/// About how long a leaf of a directory is, and how many are read at once.
const LEAF_BYTES: u64 = 28 << 10;
const LEAVES_AT_ONCE: usize = 16;

/// How often a write is tried whose base was not the newest, or whose certificate had run out.
const MAX_ATTEMPTS: usize = 5;

/// An inode as it was read or written.
pub(super) struct Version {
    pub(super) block: CertifiedBlock,
    pub(super) merged: Merged,
    /// The leaves of a large directory.
    leaves: Leaves,
    names: OnceLock<BTreeMap<Bytes, Vec<Entry>>>,
}

impl Version {
    fn of(block: CertifiedBlock, merged: Merged, leaves: Leaves) -> Arc<Version> {
        Arc::new(Version { block, merged, leaves, names: OnceLock::new() })
    }

    pub(super) fn inode(&self) -> &Inode {
        &self.merged.inode
    }

    /// What the file itself says of when changes are seen.
    fn chosen_consistency(&self) -> Option<Consistency> {
        Consistency::chosen(&self.inode().attributes)
    }

    /// The names of a directory, each with the entries that it stands for.
    pub(super) fn names(&self) -> Result<&BTreeMap<Bytes, Vec<Entry>>, Errno> {
        match &self.inode().contents {
            Contents::Directory(entries) => Ok(self.names.get_or_init(|| merged::names(entries))),
            _ => Err(Errno::ENOTDIR),
        }
    }

    pub(super) fn is_empty_directory(&self) -> bool {
        matches!(&self.inode().contents, Contents::Directory(entries) if entries.is_empty())
    }

    /// The entry that a name of a directory stands for.
    pub(super) fn entry(&self, name: &[u8]) -> Result<Option<Entry>, Errno> {
        match &self.inode().contents {
            Contents::Directory(entries) => {
                let found = merged::named(entries, name);
                Ok(found.and_then(|entries| entries.into_iter().next()))
            }
            _ => Err(Errno::ENOTDIR),
        }
    }
}

/// What a mount knows of one inode.
struct State {
    /// The name under which versions are signed.
    writer: Mutex<WriterId>,
    /// Held while the inode is put.
    turn: futures_util::lock::Mutex<()>,
    /// Held while a version of it is made and signed.
    signing: futures_util::lock::Mutex<()>,
    known: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    /// All that was read or written, joined, and when the ring was asked last.
    version: Option<(Arc<Version>, Instant)>,
    /// How many locks had been granted when the newest version was last asked for; `None` if it never was.
    read_after: Option<u64>,
    /// The last version that was signed here.
    signed: Option<CertifiedBlock>,
    /// Leaves of the last version that was signed which the ring may not have.
    unsent: BTreeMap<BlockHash, (Arc<Leaf>, NewContent)>,
    /// Blocks of past versions that the ring may not have.
    unsent_past: BTreeMap<BlockHash, NewContent>,
    /// Leaves on the ring that the last version which was signed does not refer to any more, unlike one
    /// before it.
    dropped: BTreeSet<BlockHash>,
    /// Whether the version that is known has changes that are to be put.
    is_unput: bool,
}

impl State {
    fn writer(&self) -> WriterId {
        *self.writer.lock().expect("no holder of this lock panics")
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().expect("no holder of this lock panics")
    }

    /// What is known, if it is the block of these bytes.
    fn unchanged(&self, bytes: &Bytes, at: Instant) -> Option<Arc<Version>> {
        let mut known = self.known();
        let (version, read_at) = known.version.as_mut()?;
        // A version that could not be read is tried again: there may be a key for it now.
        if version.block.bytes() != bytes || !version.merged.unreadable.is_empty() {
            return None;
        }
        *read_at = at.max(*read_at);
        Some(version.clone())
    }

    /// What a block says together with what is known. `None` if nothing of it is new; else the version
    /// that was joined, whether it is still the one that is known, and the joined block.
    fn join(&self, block: &CertifiedBlock, at: Instant) -> Result<Option<Joined>, Errno> {
        let mut known = self.known();
        let mut joined = block.clone();
        if let Some((version, read_at)) = &mut known.version {
            *read_at = at.max(*read_at);
            if version.block.includes(block) && version.merged.unreadable.is_empty() {
                return Ok(None);
            }
            joined = joined.join(&version.block).ok_or(Errno::EIO)?;
        }
        if let Some(signed) = &known.signed {
            joined = joined.join(signed).ok_or(Errno::EIO)?;
        }
        Ok(Some(Joined { block: joined, earlier: known.version().cloned() }))
    }
}

/// A block that is to be known, and what was known when it was joined.
struct Joined {
    block: CertifiedBlock,
    earlier: Option<Arc<Version>>,
}

impl Known {
    fn version(&self) -> Option<&Arc<Version>> {
        self.version.as_ref().map(|(version, _)| version)
    }
}

/// See the module.
pub(super) struct Inodes {
    env: Env,
    blocks: Arc<dyn Blocks>,
    spool: SpooledBlocks,
    /// Leaves of directories.
    cache: Arc<BlockCache>,
    volume: VolumeId,
    pub(super) credentials: Credentials,
    /// The user of the mount.
    own: Trusted,
    /// Opens and seals the inodes of an encrypted volume.
    pub(super) reading: ReadAccess,
    consistency: Consistency,
    /// Which versions are kept that are replaced.
    keep: Keep,
    states: Mutex<BTreeMap<InodeKey, Arc<State>>>,
    /// Those with changes that are to be put.
    unput: Mutex<BTreeMap<InodeKey, Arc<State>>>,
    /// Whether anything that was seen has been forgotten.
    has_forgotten: AtomicBool,
    /// How many locks were granted: what was read before the last of them is read again before it is shown.
    grants: AtomicU64,
    /// Leaves that the versions written here have replaced.
    replaced_leaves: Mutex<Vec<ReplacedLeaves>>,
    /// What has come to the ring from the spool.
    brought: Mutex<Vec<Brought>>,
}

impl Inodes {
    pub(super) fn new(
        env: Env,
        (spool, cache): (SpooledBlocks, Arc<BlockCache>),
        volume: VolumeId,
        (credentials, reading): (Credentials, ReadAccess),
        (consistency, keep): (Consistency, Keep),
    ) -> Inodes {
        Inodes {
            env,
            blocks: Arc::new(spool.clone()),
            spool,
            cache,
            volume,
            own: credentials.user().into_iter().collect(),
            credentials,
            reading,
            consistency,
            keep,
            states: Mutex::default(),
            unput: Mutex::default(),
            has_forgotten: AtomicBool::new(false),
            grants: AtomicU64::new(0),
            replaced_leaves: Mutex::default(),
            brought: Mutex::default(),
        }
    }

    fn new_writer(&self) -> WriterId {
        let user = self.credentials.user().unwrap_or(UserId([0; 32]));
        WriterId::new(&user, self.env.random_u64().to_be_bytes())
    }

    fn state(&self, key: InodeKey) -> Arc<State> {
        let mut states = self.states.lock().expect("no holder of this lock panics");
        if let Some(state) = states.get(&key) {
            return state.clone();
        }
        if states.len() >= MAX_STATES {
            // Those in use stay. Every other one of the rest goes, so that this is done seldom.
            let mut goes = false;
            states.retain(|_, state| {
                goes = !goes;
                Arc::strong_count(state) > 1 || !goes
            });
            self.has_forgotten.store(true, Ordering::Relaxed);
        }
        let writer = Mutex::new(self.new_writer());
        let known = Mutex::default();
        let state = State { writer, turn: Default::default(), signing: Default::default(), known };
        let state = Arc::new(state);
        states.insert(key, state.clone());
        state
    }

    /// By which model an inode is read, as far as it is known: as it says itself, or the mount's default.
    pub(super) fn consistency(&self, known: Option<&Version>) -> Consistency {
        known.and_then(Version::chosen_consistency).unwrap_or(self.consistency)
    }

    /// An inode; [`Errno::ESTALE`] if it has been removed.
    pub(super) async fn read(
        &self,
        key: InodeKey,
        freshness: Freshness,
    ) -> Result<Arc<Version>, Fault> {
        self.read_state(&self.state(key), key, freshness).await
    }

    async fn read_state(
        &self,
        state: &State,
        key: InodeKey,
        freshness: Freshness,
    ) -> Result<Arc<Version>, Fault> {
        let began = self.env.now();
        let (seen, is_of_before) = {
            let known = state.known();
            (known.version.clone(), self.is_of_before_a_grant(&known))
        };
        if let (Freshness::Within(age), Some((version, at))) = (freshness, &seen)
            && began.since(*at) < age
            && (!is_of_before || age == Duration::MAX)
        {
            return Ok(version.clone());
        }
        let consistency = self.consistency(seen.as_ref().map(|(version, _)| &**version));
        let wanted = match (consistency, &seen) {
            _ if freshness == Freshness::Latest || is_of_before => Wanted::Newest,
            (Consistency::CloseToOpen, _) => Wanted::Newest,
            (_, Some((version, _))) => Wanted::AtLeast(version.block.version()),
            (_, None) if self.has_forgotten.load(Ordering::Relaxed) => Wanted::Newest,
            (_, None) => Wanted::AtLeast(0),
        };
        let version = self.read_ring(state, key, (wanted, freshness)).await?;
        // It says itself how it is to be read.
        let reads_older = wanted != Wanted::Newest;
        match reads_older && self.consistency(Some(&version)) == Consistency::CloseToOpen {
            true => self.read_ring(state, key, (Wanted::Newest, freshness)).await,
            false => Ok(version),
        }
    }

    /// An inode as the ring has it, joined with what is known of it.
    async fn read_ring(
        &self,
        state: &State,
        key: InodeKey,
        (wanted, freshness): (Wanted, Freshness),
    ) -> Result<Arc<Version>, Fault> {
        let began = self.env.now();
        let grants = self.grants.load(Ordering::Acquire);
        let id = CertifiedBlock::id_at(key.key());
        let held = match self.blocks.get_block(id, wanted).await {
            Ok(held) => held,
            Err(error) => {
                if matches!(error, GetError::Removed { .. }) {
                    state.known().version = None;
                }
                let known = state.known().version().cloned();
                let is_shown = freshness != Freshness::Latest && self.is_away(&error);
                return known.filter(|_| is_shown).ok_or(error.into());
            }
        };
        let note_read = || {
            let mut known = state.known();
            let asked = Some(grants).filter(|_| wanted == Wanted::Newest);
            known.read_after = known.read_after.max(asked);
        };
        if let Some(version) = state.unchanged(&held.bytes, began) {
            note_read();
            return Ok(version);
        }
        let malformed = |error| Fault::new(Errno::EIO, error);
        let block = CertifiedBlock::decode_verified(&held.bytes).map_err(malformed)?;
        if block.volume() != self.volume {
            return Err(Fault::new(Errno::EIO, "a directory names an inode of another volume"));
        }
        self.reading.prepare(&block).await;
        self.credentials.saw(block.groups());
        let version = self.learn(state, &block, began).await?.ok_or(Errno::ESTALE)?;
        note_read();
        Ok(version)
    }

    /// A lock was granted that another mount may have had: nothing older is shown from now on.
    pub(super) fn note_grant(&self) {
        self.grants.fetch_add(1, Ordering::AcqRel);
    }

    /// Whether a lock was granted since all replicas were asked for an inode.
    fn is_of_before_a_grant(&self, known: &Known) -> bool {
        let grants = self.grants.load(Ordering::Acquire);
        grants > 0 && known.read_after.is_none_or(|read| read < grants)
    }

    /// Whether an inode that is known cannot be read because the nodes that have it are away. A ring that has lost them
    /// says that nobody has it: a removed inode leaves a tombstone.
    fn is_away(&self, error: &GetError) -> bool {
        match error {
            GetError::NotFound { .. } => self.spool.has_spool(),
            GetError::Unavailable { .. } => self.spool.is_out_of_reach(),
            GetError::Removed { .. } => false,
        }
    }

    /// Joins a block with what is known of its inode. `None` if the inode has been removed.
    async fn learn(
        &self,
        state: &State,
        block: &CertifiedBlock,
        at: Instant,
    ) -> Result<Option<Arc<Version>>, Fault> {
        loop {
            let Some(Joined { block: joined, earlier }) = state.join(block, at)? else {
                return Ok(state.known().version().cloned());
            };
            let leaves = self.read_leaves(state, &joined, earlier.as_deref()).await?;
            let merged = self.merged(&joined, &leaves)?;
            let mut known = state.known();
            let is_same = match (known.version(), &earlier) {
                (Some(now), Some(earlier)) => Arc::ptr_eq(now, earlier),
                (now, earlier) => now.is_none() && earlier.is_none(),
            };
            if is_same {
                let version = merged.map(|merged| Version::of(joined, merged, leaves));
                known.version = version.clone().map(|version| (version, at));
                return Ok(version);
            }
            // Another call has read or written it meanwhile.
        }
    }

    /// What the siblings of a block say together, as this mount shows it.
    pub(super) fn merged(
        &self,
        block: &CertifiedBlock,
        leaves: &Leaves,
    ) -> Result<Option<Merged>, FormatError> {
        merged::merge_trusting(block, leaves, self.reading.sealing(), &self.own)
    }

    /// How the siblings of a block rank, as this mount shows them.
    pub(in crate::shared) fn standing(&self, block: &CertifiedBlock) -> Standing<'_> {
        Standing::of(block, &self.own)
    }

    /// The leaves that the siblings of a block refer to; those that are known are not read again.
    async fn read_leaves(
        &self,
        state: &State,
        block: &CertifiedBlock,
        base: Option<&Version>,
    ) -> Result<Leaves, Fault> {
        let known = state.known().version().cloned();
        let bases = [base, known.as_deref()];
        let find = |hash: &BlockHash| {
            let found = bases.iter().flatten().find_map(|version| version.leaves.get(hash));
            found.cloned().or_else(|| Some(state.known().unsent.get(hash)?.0.clone()))
        };
        let LeavesOf { needed, of_late } = entries::leaves_of(block, self.reading.sealing());
        let needed = needed.into_iter().map(|hash| (hash, true));
        let hashes = needed.chain(of_late.into_iter().map(|hash| (hash, false)));
        let reads = hashes.map(|(hash, is_needed)| (hash, is_needed, find(&hash))).map(
            |(hash, is_needed, found)| async move {
                if let Some(leaf) = found {
                    return Ok(Some((hash, leaf)));
                }
                // A member who was shut out can name any.
                let bytes = match self.cache.get(hash, pace::Wanted::Now(LEAF_BYTES)).await {
                    Err(BlockError::Fetch(GetError::NotFound { .. }) | BlockError::Bad { .. })
                        if !is_needed =>
                    {
                        return Ok(None);
                    }
                    bytes => bytes?,
                };
                match Leaf::named(hash, &bytes) {
                    Err(_) if !is_needed => Ok(None),
                    leaf => Ok::<_, Fault>(Some((hash, leaf?))),
                }
            },
        );
        let reads: Vec<_> = reads.collect();
        let read = stream::iter(reads).buffer_unordered(LEAVES_AT_ONCE);
        read.try_filter_map(|leaf| async move { Ok(leaf) }).try_collect().await
    }

    /// Whether this mount has signed the version of an inode that has this name.
    pub(super) fn is_own(&self, key: InodeKey, dot: &Dot) -> bool {
        self.state(key).writer() == dot.writer
    }

    /// Whether the ring was asked for an inode within `age`.
    pub(super) fn is_known_within(&self, key: InodeKey, age: Duration, now: Instant) -> bool {
        let states = self.states.lock().expect("no holder of this lock panics");
        states.get(&key).is_some_and(|state| {
            let known = state.known();
            let is_new = known.version.as_ref().is_some_and(|(_, at)| now.since(*at) < age);
            is_new && !self.is_of_before_a_grant(&known)
        })
    }

    /// What is known of an inode, however old it is.
    pub(super) fn known(&self, key: InodeKey) -> Option<Arc<Version>> {
        self.state(key).known().version().cloned()
    }

    /// The block of an inode of this number that `groups` may write.
    pub(super) fn block_of(&self, groups: &[GroupId], number: [u8; 16]) -> Option<BlockId> {
        let binding = Binding::new(self.volume, number, groups)?;
        Some(CertifiedBlock::id_at(binding.key()))
    }
}
