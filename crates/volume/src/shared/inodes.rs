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
//!
//! A change may be shown here before it is put ([`behind`]). While the ring is out of reach, what is known is shown,
//! and what is put waits in the spool ([`bring`]). What is replaced is kept for a while ([`mod@past`]).
//!
//! It does not know numbers, handles or what is in memory of a file's contents.

mod behind;
mod bring;
mod leases;
mod past;
mod together;

pub(super) use self::past::PastInode;
pub(super) use self::together::Together;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

use atoll_dht::{Blocks, GetError, PutError, Wanted};
use atoll_env::{Env, Instant};
use atoll_key::kinds::certified::{Binding, CertifiedBlock, Dot, WriterId};
use atoll_key::{BlockHash, BlockId, GroupId, NotAdmitted, UserId, VolumeId};
use atoll_vfs::{Errno, FileKind};
use bytes::Bytes;
use futures_util::stream::{self, StreamExt, TryStreamExt};

pub(super) use self::bring::OutOfReach;
pub(super) use self::leases::{MAX_BASE_AGE, ReplacedLeaves};
use self::together::{Child, Unrecorded};
use super::access::{Credentials, ReadAccess};
use super::consistency::Consistency;
use super::entries::{self, Leaf, Leaves};
use super::fault::Fault;
use super::inode::{Contents, Entry, Inode, InodeKey};
use super::merged::{self, Merged};
use super::past::{Replaced, left_by_removal};
use super::spool::SpooledBlocks;
use crate::blocks::cache::BlockCache;
use crate::blocks::outbox::{NewContent, Outbox};
use crate::blocks::pace;
use crate::keep::Keep;

/// How old what is read may be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Freshness {
    /// All replicas are asked, whatever the consistency: what is read under a lock is what was
    /// written under it before.
    Latest,
    /// The ring is asked.
    Newest,
    /// The ring is asked if it was not asked within this time.
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

/// What the next version of an inode is made of.
struct Next<'a> {
    version: &'a Version,
    /// The version that the caller's change was for, if replicas hold newer ones.
    refused_base: Option<&'a Version>,
    covers_conflicts: bool,
    /// Whether later versions cover it in any case. Else the caller says so when the ring has it.
    is_recorded: bool,
}

/// A version that was signed.
struct Signed<T> {
    block: CertifiedBlock,
    inode: Inode,
    leaves: Leaves,
    /// What the edit has answered.
    value: T,
    is_removed: bool,
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
    /// Leaves that the versions written here have replaced.
    replaced_leaves: Mutex<Vec<ReplacedLeaves>>,
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
            credentials,
            reading,
            consistency,
            keep,
            states: Mutex::default(),
            unput: Mutex::default(),
            has_forgotten: AtomicBool::new(false),
            replaced_leaves: Mutex::default(),
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

    /// Whether [`Freshness::Newest`] may be older than what all replicas hold.
    pub(super) fn reads_older(&self, key: InodeKey) -> bool {
        self.consistency(self.known(key).as_deref()) != Consistency::CloseToOpen
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
        let seen = state.known().version.clone();
        if let (Freshness::Within(age), Some((version, at))) = (freshness, &seen)
            && began.since(*at) < age
        {
            return Ok(version.clone());
        }
        let consistency = self.consistency(seen.as_ref().map(|(version, _)| &**version));
        let wanted = match (consistency, &seen) {
            _ if freshness == Freshness::Latest => Wanted::Newest,
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
        if let Some(version) = state.unchanged(&held.bytes, began) {
            return Ok(version);
        }
        let malformed = |error| Fault::new(Errno::EIO, error);
        let block = CertifiedBlock::decode_verified(&held.bytes).map_err(malformed)?;
        if block.volume() != self.volume {
            return Err(Fault::new(Errno::EIO, "a directory names an inode of another volume"));
        }
        self.reading.prepare(&block).await;
        self.credentials.saw(block.groups());
        Ok(self.learn(state, &block, began).await?.ok_or(Errno::ESTALE)?)
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
            let merged = merged::merge(&joined, &leaves, self.reading.sealing())?;
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
        let hashes = entries::leaves_of(block, self.reading.sealing());
        let reads =
            hashes.into_iter().map(|hash| (hash, find(&hash))).map(|(hash, found)| async move {
                if let Some(leaf) = found {
                    return Ok((hash, leaf));
                }
                let bytes = self.cache.get(hash, pace::Wanted::Now(LEAF_BYTES)).await?;
                Ok::<_, Fault>((hash, Leaf::named(hash, &bytes)?))
            });
        let reads: Vec<_> = reads.collect();
        stream::iter(reads).buffer_unordered(LEAVES_AT_ONCE).try_collect().await
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
            known.version.as_ref().is_some_and(|(_, at)| now.since(*at) < age)
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

    /// Makes an inode that members of `groups` may write.
    pub(super) async fn create(
        &self,
        groups: &[GroupId],
        number: [u8; 16],
        inode: impl FnOnce(Dot) -> Inode,
    ) -> Result<(InodeKey, Arc<Version>), Fault> {
        let (key, state, made) = self.sign_first(groups, number, inode).await?;
        let _turn = state.turn.lock().await;
        self.put(&made).await?;
        let version = self.learn(&state, &made, self.env.now()).await?.ok_or(Errno::ESTALE)?;
        Ok((key, version))
    }

    /// The same, in memory alone: the next version is the first that is put.
    pub(super) async fn begin(
        &self,
        groups: &[GroupId],
        number: [u8; 16],
        inode: impl FnOnce(Dot) -> Inode,
    ) -> Result<(InodeKey, Arc<Version>), Fault> {
        let (key, state, made) = self.sign_first(groups, number, inode).await?;
        let version = self.learn(&state, &made, self.env.now()).await?.ok_or(Errno::ESTALE)?;
        Ok((key, version))
    }

    async fn sign_first(
        &self,
        groups: &[GroupId],
        number: [u8; 16],
        inode: impl FnOnce(Dot) -> Inode,
    ) -> Result<(InodeKey, Arc<State>, CertifiedBlock), Fault> {
        let binding = Binding::new(self.volume, number, groups).ok_or(Errno::EIO)?;
        let key = InodeKey::of(&binding.key());
        let state = self.state(key);
        let turn = state.turn.lock().await;
        let author = self.credentials.author(groups, state.writer()).await?;
        let sealer = self.reading.sealer().await?;
        let inode = inode(Dot { writer: state.writer(), height: 1 });
        let payload = sealer.seal_inode(inode.encode()?)?;
        let made = CertifiedBlock::create(binding, &author, self.env.unix_ms(), &payload);
        let made = made.ok_or(Fault::new(Errno::EIO, "a new inode cannot be signed"))?;
        state.known().signed = Some(made.clone());
        drop(turn);
        Ok((key, state, made))
    }

    /// Writes the next version of an inode: what `edit` makes of it. `edit` is given the name of the
    /// version, and may be called several times.
    pub(super) async fn update<T>(
        &self,
        key: InodeKey,
        base: Base<'_>,
        mut edit: impl FnMut(&mut Inode, Dot) -> Result<T, Errno>,
    ) -> Result<(T, Arc<Version>), Fault> {
        let made = self.write(key, base, |inode, dot| Ok((edit(inode, dot)?, false))).await?;
        let (value, version) = made;
        Ok((value, version.ok_or(Errno::ESTALE)?))
    }

    /// The same; the inode is removed if `edit` says so.
    pub(super) async fn write<T>(
        &self,
        key: InodeKey,
        base: Base<'_>,
        edit: impl FnMut(&mut Inode, Dot) -> Result<(T, bool), Errno>,
    ) -> Result<(T, Option<Arc<Version>>), Fault> {
        self.write_over(key, base, false, edit).await
    }

    /// Writes what `version` shows in place of all its siblings, whose other contents have been kept.
    pub(super) async fn cover(
        &self,
        key: InodeKey,
        version: &Arc<Version>,
    ) -> Result<Arc<Version>, Fault> {
        let written = self.write_over(key, Base::Version(version), true, |_, _| Ok(((), false)));
        Ok(written.await?.1.ok_or(Errno::ESTALE)?)
    }

    async fn write_over<T>(
        &self,
        key: InodeKey,
        base: Base<'_>,
        covers_conflicts: bool,
        edit: impl FnMut(&mut Inode, Dot) -> Result<(T, bool), Errno>,
    ) -> Result<(T, Option<Arc<Version>>), Fault> {
        let state = self.state(key);
        let _turn = state.turn.lock().await;
        self.write_in_turn((key, &state), (base, None), covers_conflicts, edit).await
    }

    /// The same; the caller holds the inode's turn. The first version that is put goes after `child`, if there is
    /// one.
    async fn write_in_turn<T>(
        &self,
        (key, state): (InodeKey, &State),
        (base, mut child): (Base<'_>, Option<&mut Child<'_>>),
        covers_conflicts: bool,
        mut edit: impl FnMut(&mut Inode, Dot) -> Result<(T, bool), Errno>,
    ) -> Result<(T, Option<Arc<Version>>), Fault> {
        let (mut refused, mut is_stale) = (None, false);
        for _ in 0..MAX_ATTEMPTS {
            let version = match &base {
                Base::Version(version) if !is_stale => (*version).clone(),
                _ => self.read_state(state, key, Freshness::Newest).await?,
            };
            let refused_base = match &base {
                Base::Version(base) if is_stale => Some(&***base),
                _ => None,
            };
            let began = self.env.now();
            let signing = state.signing.lock().await;
            // A version that names a child counts only if the ring has the child; none is signed over it before.
            let tried = child.as_ref().filter(|child| child.is_to_be_put());
            let tried = tried.map(|_| Unrecorded::of(self, state));
            let is_recorded = tried.is_none();
            let next = Next { version: &version, refused_base, covers_conflicts, is_recorded };
            let Signed { block, inode, leaves, value, is_removed } =
                self.sign_next(state, next, &mut edit).await?;
            let unsent: Vec<NewContent> = {
                let known = state.known();
                let leaves = known.unsent.values().map(|(_, content)| content);
                leaves.chain(known.unsent_past.values()).cloned().collect()
            };
            let signing = Some(signing).filter(|_| tried.is_some());
            self.check_reused(state, &leaves).await?;
            self.put_leaves(state, unsent).await?;
            let put = self.put_after(child.as_deref_mut(), &block).await;
            if child.as_ref().is_some_and(|child| child.is_refused()) {
                return Err(put.err().map_or(Errno::EIO.into(), Fault::from));
            }
            if let Some(tried) = tried {
                tried.record(&block);
            }
            drop(signing);
            match put {
                Ok(()) => {
                    let merged = Merged { inode, conflicts: Vec::new(), unreadable: Vec::new() };
                    let written = Version::of(block, merged, leaves);
                    self.wrote(key, state, &written, is_removed, began).await?;
                    return Ok((value, Some(written).filter(|_| !is_removed)));
                }
                // Replicas hold versions that this one has to include, or newer groups of writers.
                Err(
                    why @ (PutError::NotAdmitted(NotAdmitted::Outdated)
                    | PutError::Superseded { .. }),
                ) => (refused, is_stale) = (Some(why), true),
                Err(PutError::NotAdmitted(why @ NotAdmitted::Expired { .. })) => {
                    self.credentials.forget(block.groups());
                    refused = Some(PutError::NotAdmitted(why));
                }
                Err(error) => return Err(error.into()),
            }
        }
        Err(refused.map_or(Errno::EIO.into(), Fault::from))
    }

    /// Signs the next version of an inode, while the caller holds its turn to sign.
    async fn sign_next<T>(
        &self,
        state: &State,
        Next { version, refused_base, covers_conflicts, is_recorded }: Next<'_>,
        edit: &mut impl FnMut(&mut Inode, Dot) -> Result<(T, bool), Errno>,
    ) -> Result<Signed<T>, Fault> {
        let over = match &state.known().signed {
            Some(signed) => version.block.join(signed).ok_or(Errno::EIO)?,
            None => version.block.clone(),
        };
        let merged = match over == version.block {
            true => version.merged.clone(),
            false => {
                let leaves = self.read_leaves(state, &over, Some(version)).await?;
                let merged = merged::merge(&over, &leaves, self.reading.sealing())?;
                merged.ok_or(Errno::ESTALE)?
            }
        };
        if let Some((_, error)) = merged.unreadable.first() {
            let why = format!("the inode has a version that cannot be read: {error}");
            return Err(Fault { why: Some(why), ..Fault::from(error.clone()) });
        }
        // A base that was refused gives way to the newest version: other contents of that are kept
        // elsewhere before anything covers them.
        let is_unseen = refused_base
            .is_some_and(|base| has_other_contents(base, &merged, &over, state.writer()));
        if (is_unseen || !merged.conflicts.is_empty()) && !covers_conflicts {
            return Err(Fault::conflict());
        }
        let author = self.credentials.author(over.groups(), state.writer()).await?;
        let sealer = self.reading.sealer().await?;
        let time_ms = self.env.unix_ms();
        let replaced = Replaced { block: &over, inode: &merged.inode, ended_ms: time_ms };
        let kept = self.keep_replaced(state, replaced, &sealer).await;
        let mut inode = Inode { past: kept.past, ..merged.inode };
        let (value, is_removed) = edit(&mut inode, over.next_dot(state.writer()))?;
        state.known().unsent_past.extend(kept.blocks.into_iter().map(|block| (block.hash, block)));
        let mut leaves = Leaves::new();
        let block = if is_removed {
            state.known().dropped.extend(version.leaves.keys());
            over.remove(&author, time_ms, &left_by_removal(inode.past))
        } else {
            let content = sealer.of_inode(InodeKey::of(&version.block.key()));
            let outbox = Outbox::new(&self.blocks, &self.cache, Some(&content));
            let mut known = state.known();
            for leaf in inode.leaves() {
                if !leaf.is_named() {
                    let content = outbox.seal(leaf.encode());
                    leaf.name(content.hash);
                    known.unsent.insert(content.hash, (leaf.clone(), content));
                }
                leaves.insert(leaf.hash(), leaf.clone());
            }
            let Known { unsent, dropped, .. } = &mut *known;
            let is_sent = |hash: &&BlockHash| !unsent.contains_key(hash);
            dropped.extend(version.leaves.keys().filter(is_sent));
            dropped.retain(|hash| !leaves.contains_key(hash));
            unsent.retain(|hash, _| leaves.contains_key(hash));
            drop(known);
            over.write(&author, time_ms, Some(&sealer.seal_inode(inode.encode()?)?))
        };
        let block = block.ok_or(Fault::new(Errno::EIO, "the inode cannot be signed"))?;
        if is_recorded {
            state.known().signed = Some(block.clone());
        }
        Ok(Signed { block, inode, leaves, value, is_removed })
    }

    /// Notes a version that was written.
    async fn wrote(
        &self,
        key: InodeKey,
        state: &State,
        written: &Arc<Version>,
        is_removed: bool,
        at: Instant,
    ) -> Result<(), Fault> {
        self.note_put(key, state, written);
        let leaves = std::mem::take(&mut state.known().dropped);
        if !leaves.is_empty() {
            let replaced = ReplacedLeaves { key, block: written.block.clone(), leaves };
            self.replaced_leaves().push(replaced);
        }
        {
            let mut known = state.known();
            let covers = |version: &Version| written.block.includes(&version.block);
            if known.version().is_none_or(|version| covers(version)) {
                known.version = Some((written.clone(), at)).filter(|_| !is_removed);
                return Ok(());
            }
        }
        self.learn(state, &written.block, at).await.map(drop)
    }

    /// Brings leaves and past versions to the ring that are not there.
    async fn put_leaves(&self, state: &State, unsent: Vec<NewContent>) -> Result<(), Fault> {
        let sent: Vec<BlockHash> = unsent.iter().map(|content| content.hash).collect();
        // They are sealed already.
        let mut outbox = Outbox::new(&self.blocks, &self.cache, None);
        unsent.into_iter().for_each(|content| outbox.push(content));
        outbox.finish().await?;
        let mut known = state.known();
        for hash in sent {
            let is_past = known.unsent_past.remove(&hash).is_some();
            // What was signed meanwhile may not refer to it any more.
            if known.unsent.remove(&hash).is_none() && !is_past {
                known.dropped.insert(hash);
            }
        }
        Ok(())
    }

    async fn put(&self, block: &CertifiedBlock) -> Result<(), PutError> {
        let put = self.blocks.put_blocks(vec![block.into()]);
        let none = || Err(PutError::Unavailable("the put has no outcome".into()));
        put.await.pop().unwrap_or_else(none)
    }
}

/// Whether a file has contents that are neither those of `base` nor its writer's own.
fn has_other_contents(
    base: &Version,
    merged: &Merged,
    block: &CertifiedBlock,
    writer: WriterId,
) -> bool {
    let contents = &merged.inode.contents;
    let siblings = block.siblings().iter().filter(|sibling| !sibling.is_removal);
    let leading = siblings.map(|one| (one.dot.height, one.time_ms, one.dot.writer)).max();
    contents.kind() != FileKind::Directory
        && *contents != base.inode().contents
        && leading.is_some_and(|(_, _, leading)| leading != writer)
}
