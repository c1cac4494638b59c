//! What a file system sees of the ring: blocks by identity (CFS Table 1: `put_h`, `put_s`, `get`).
//!
//! A block is named by its kind and key ([`BlockId`]); `key::kinds` says what a kind allows. A
//! reader of a mutable block says which version will do ([`Wanted`], Pastis §3.3), a writer gives
//! each block of a batch a lease and gets an outcome for each, and a watcher hears of new versions
//! by a long poll.
//!
//! Implemented by the node itself, by the client of a node's socket, and by [`MemoryBlocks`] for
//! tests. Every implementation verifies what it returns: a caller never sees bytes that are not
//! what the block's name says.
//!
//! It does not know what blocks are for.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use atoll_env::{BoxFuture, Notify};
use atoll_key::kinds::Release;
use atoll_key::kinds::certified::CertifiedBlock;
use atoll_key::{BlockHash, BlockId, BlockKind, InvalidBlock, Key, NotAdmitted, SignedBlock};
use bytes::Bytes;

use crate::locks::{LockGrant, LockLease, LockMode, LockRefusal, LockStep};

/// Which version of a block a reader needs. Blocks that never change have one version, 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// The newest that a majority of the replicas which answer knows of, and none older than was
    /// read or written here before.
    Newest,
    /// The first that is found of this version or a newer one.
    AtLeast(u64),
}

impl Wanted {
    /// The lowest version that will do.
    pub fn least(self) -> u64 {
        match self {
            Wanted::Newest => 0,
            Wanted::AtLeast(version) => version,
        }
    }
}

/// How much room a ring has, estimated, in bytes of files: copies are divided out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RingRoom {
    /// What there is, used or free.
    pub total_bytes: u64,
    /// What no publisher uses.
    pub free_bytes: u64,
    /// What of it the local node's quota leaves to its users.
    pub available_bytes: u64,
}

/// A block that was read, verified.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldBlock {
    /// Its version.
    pub version: u64,
    /// Its bytes.
    pub bytes: Bytes,
}

impl HeldBlock {
    /// The block `id` if `bytes` are it.
    ///
    /// # Errors
    /// If they are not, or are its tombstone.
    pub fn verified(id: BlockId, bytes: Bytes) -> Result<HeldBlock, GetError> {
        let unfit = |error: InvalidBlock| GetError::Unavailable {
            key: id.key,
            told: format!("what was sent is not the block: {error}"),
        };
        let version = id.verify(&bytes).map_err(unfit)?;
        HeldBlock { version, bytes }.unless_removed(id)
    }

    /// This block, unless it is a tombstone.
    pub(crate) fn unless_removed(self, id: BlockId) -> Result<HeldBlock, GetError> {
        match id.kind.is_tombstone(&self.bytes) {
            true => Err(GetError::Removed {
                key: id.key,
                version: self.version,
                tombstone: self.bytes.into(),
            }),
            false => Ok(self),
        }
    }
}

/// A block to be stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewBlock {
    /// What names it.
    pub id: BlockId,
    /// Its bytes.
    pub bytes: Bytes,
    /// How long it is to be kept, seconds; `None` for as long as the network keeps blocks that say
    /// nothing.
    pub lease_secs: Option<u64>,
}

impl From<(BlockHash, Bytes)> for NewBlock {
    fn from((hash, bytes): (BlockHash, Bytes)) -> NewBlock {
        NewBlock { id: hash.id(), bytes, lease_secs: None }
    }
}

impl From<&CertifiedBlock> for NewBlock {
    fn from(block: &CertifiedBlock) -> NewBlock {
        NewBlock { id: block.id(), bytes: block.bytes().clone(), lease_secs: None }
    }
}

impl From<SignedBlock> for NewBlock {
    fn from(block: SignedBlock) -> NewBlock {
        NewBlock { id: block.id(), bytes: block.bytes().clone(), lease_secs: None }
    }
}

/// Leases to be extended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseRenewal {
    /// Of which blocks; at most 1,024.
    pub ids: Vec<BlockId>,
    /// As [`NewBlock::lease_secs`], from now on.
    pub lease_secs: Option<u64>,
    /// The caller puts those that are lacking. One node may be believed that the ring lacks a
    /// block then: putting it once more does no harm.
    pub will_be_put: bool,
}

/// What became of a lease that was to be extended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Renewed {
    /// The ring holds the block for so long.
    Held,
    /// The ring does not have the block.
    Lacking,
}

/// Why a block could not be fetched.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GetError {
    /// All nodes that should have it answered, and none has it.
    #[error("block {key} is nowhere on the ring: {told}")]
    NotFound {
        /// The block.
        key: Key,
        /// Who was asked and what each said, for people.
        told: String,
    },
    /// Some of the nodes that should have it could not be asked in time.
    #[error("block {key} could not be fetched: {told}")]
    Unavailable {
        /// The block.
        key: Key,
        /// Who was asked and what each said, for people.
        told: String,
    },
    /// Those who may write it have removed it.
    #[error("block {key} was removed by its owner")]
    Removed {
        /// The block.
        key: Key,
        /// The version of the tombstone; a higher one brings the block back.
        version: u64,
        /// The tombstone, verified.
        tombstone: Box<Bytes>,
    },
}

/// Why a block could not be stored, or its lease not be extended.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PutError {
    /// The nodes that should hold them have no room, or what keeps them for these until they can be reached; which.
    #[error("no room: {0}")]
    Full(String),
    /// The publisher has used up its share of the nodes that should hold them (CFS §5.4).
    #[error("over quota: {who} uses {used_bytes} of {allowed_bytes} bytes allowed")]
    OverQuota {
        /// What the node that refused already keeps for the publisher, bytes.
        used_bytes: u64,
        /// What it would keep at most, bytes.
        allowed_bytes: u64,
        /// Who is over quota, and where; for people.
        who: String,
    },
    /// Too few of the nodes that should hold them acknowledged in time.
    #[error("the ring did not take the blocks: {0}")]
    Unavailable(String),
    /// The ring holds a version that this one does not supersede, or that its writer has to read first.
    #[error("version {offered} of the block is older than the ring's {held}")]
    Superseded {
        /// What was put.
        offered: u64,
        /// What the ring has.
        held: u64,
    },
    /// The block is not what its key says.
    #[error("refused: {0}")]
    Invalid(#[from] InvalidBlock),
    /// The block's signatures are right, but its writer may not write it now.
    #[error("refused: {0}")]
    NotAdmitted(#[from] NotAdmitted),
}

/// The ring, as a place to keep blocks. Calls may run many at a time; a caller bounds how many.
/// Every call but [`Blocks::watch`] ends within a deadline of the implementation's.
///
/// The provided methods say the same in terms of content hashes and signed blocks.
pub trait Blocks: Send + Sync + 'static {
    /// Fetches a block.
    fn get_block(
        &self,
        id: BlockId,
        wanted: Wanted,
    ) -> BoxFuture<'static, Result<HeldBlock, GetError>>;

    /// Stores blocks, at most 1,024 and 4 MiB a call, less 64 KiB; resolves when a majority of each block's
    /// replica set has it durably, or will not. One outcome for each block, in their order. A
    /// mutable block is refused if the ring holds a version that it does not supersede.
    fn put_blocks(&self, blocks: Vec<NewBlock>) -> BoxFuture<'static, Vec<Result<(), PutError>>>;

    /// Stores a few mutable blocks as [`Blocks::put_blocks`] does, in their order: a node that is sent several stores
    /// none without those before it, and none is sent alone before a majority has those before it. If one is not
    /// stored, those after it have its outcome.
    fn put_in_order(&self, blocks: Vec<NewBlock>) -> BoxFuture<'static, Vec<Result<(), PutError>>>;

    /// Extends leases; one outcome for each block, in their order.
    fn renew_blocks(
        &self,
        renewal: LeaseRenewal,
    ) -> BoxFuture<'static, Vec<Result<Renewed, PutError>>>;

    /// Has blocks of an inode's content end sooner, or those of a volume's removed, as those who may write that
    /// have signed; one outcome for each block, in the order of [`Release::keys`]: whether all nodes of its replica
    /// set have heard of it. A renewal or a put that comes later keeps the block. A volume's release must not be
    /// of a time to come by the local node's clock ([`NotAdmitted::Clock`] says what time it is there): puts are
    /// compared with it by that clock.
    ///
    /// Provided for rings without releases.
    fn release_blocks(&self, release: Release) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        let refused = PutError::Unavailable("nothing is released here".into());
        let outcomes = vec![Err(refused); release.keys().len()];
        Box::pin(async { outcomes })
    }

    /// Resolves with the newest version of a mutable block once there is one above `seen`, or
    /// with `None` when none has come for a while; the caller then asks again.
    ///
    /// # Errors
    /// As [`Blocks::get_block`]; if the block has been removed since, that it has.
    fn watch(
        &self,
        id: BlockId,
        seen: u64,
    ) -> BoxFuture<'static, Result<Option<HeldBlock>, GetError>>;

    /// The last of the keys that have the same replica set as `key`, beginning with that, if it is known without
    /// asking the ring. If not, the set is looked up for the next question. Mutable blocks with such keys are put in
    /// order in one round trip.
    ///
    /// Provided for rings where blocks have no places.
    fn same_set_until(&self, key: Key) -> BoxFuture<'static, Option<Key>> {
        let _ = key;
        Box::pin(async { None })
    }

    /// Takes, renews or gives up a lock lease ([`crate::locks`]). A caller whose request is refused
    /// as held pauses for a random time and asks again.
    ///
    /// Provided for rings without locks: there is no majority.
    fn lock_lease(&self, ask: LockLease) -> BoxFuture<'static, Result<LockGrant, LockRefusal>> {
        let _ = ask;
        Box::pin(async { Err(LockRefusal::NoMajority("nothing keeps locks here".into())) })
    }

    /// How much room the ring has; `None` where that is not known.
    ///
    /// Provided for rings that cannot tell.
    fn room(&self) -> BoxFuture<'static, Option<RingRoom>> {
        Box::pin(async { None })
    }

    /// Removes blocks, by tombstones that those who may write them have made
    /// ([`atoll_key::BlockKind::is_tombstone`]); outcomes as of [`Blocks::put_blocks`]. If one of
    /// them is no tombstone, all are refused. Blocks of a kind without tombstones end with their
    /// leases.
    fn remove_blocks(
        &self,
        tombstones: Vec<NewBlock>,
    ) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        let is_one = |block: &NewBlock| block.id.kind.is_tombstone(&block.bytes);
        if !tombstones.iter().all(is_one) {
            let refused = Err(PutError::Invalid(InvalidBlock::Malformed("not a tombstone")));
            let outcomes = vec![refused; tombstones.len()];
            return Box::pin(async { outcomes });
        }
        self.put_blocks(tombstones)
    }

    /// Fetches a content block.
    fn get(&self, hash: BlockHash) -> BoxFuture<'static, Result<Bytes, GetError>> {
        let held = self.get_block(hash.id(), Wanted::Newest);
        Box::pin(async move { Ok(held.await?.bytes) })
    }

    /// Fetches the newest signed block under `key`.
    fn get_signed(&self, key: Key) -> BoxFuture<'static, Result<SignedBlock, GetError>> {
        let held = self.get_block(SignedBlock::id_at(key), Wanted::Newest);
        Box::pin(async move {
            let block = SignedBlock::decode(&held.await?.bytes);
            block.map_err(|error| GetError::Unavailable { key, told: error.to_string() })
        })
    }

    /// Stores content blocks. The error says how many failed; all others are stored, and
    /// [`Blocks::renew`] says which those are.
    fn put(&self, blocks: Vec<(BlockHash, Bytes)>) -> BoxFuture<'static, Result<(), PutError>> {
        self.put_all(blocks.into_iter().map(NewBlock::from).collect())
    }

    /// The same for blocks of any kind.
    fn put_all(&self, blocks: Vec<NewBlock>) -> BoxFuture<'static, Result<(), PutError>> {
        let outcomes = self.put_blocks(blocks);
        Box::pin(async move { all_or_first(outcomes.await).map(drop) })
    }

    /// Stores a signed block.
    fn put_signed(&self, block: SignedBlock) -> BoxFuture<'static, Result<(), PutError>> {
        let outcomes = self.put_blocks(vec![block.into()]);
        Box::pin(async move { all_or_first(outcomes.await).map(drop) })
    }

    /// Extends the leases of the content blocks the ring holds; returns those it lacks, in the
    /// order given. At most 1,024 a call.
    fn renew(
        &self,
        hashes: Vec<BlockHash>,
    ) -> BoxFuture<'static, Result<Vec<BlockHash>, PutError>> {
        lacking(self, hashes, false)
    }

    /// The same for blocks that the caller puts if they are lacking.
    fn renew_or_lack(
        &self,
        hashes: Vec<BlockHash>,
    ) -> BoxFuture<'static, Result<Vec<BlockHash>, PutError>> {
        lacking(self, hashes, true)
    }
}

/// Extends leases of content blocks; returns those that the ring lacks.
fn lacking(
    blocks: &(impl Blocks + ?Sized),
    hashes: Vec<BlockHash>,
    will_be_put: bool,
) -> BoxFuture<'static, Result<Vec<BlockHash>, PutError>> {
    let ids = hashes.iter().map(BlockHash::id).collect();
    let outcomes = blocks.renew_blocks(LeaseRenewal { ids, lease_secs: None, will_be_put });
    Box::pin(async move {
        let outcomes = all_or_first(outcomes.await)?;
        let lacking = hashes.into_iter().zip(outcomes);
        Ok(lacking.filter(|(_, o)| *o == Renewed::Lacking).map(|(hash, _)| hash).collect())
    })
}

/// What became of a batch as a whole.
///
/// # Errors
/// The first failure, which says of how many blocks of a batch it is one.
fn all_or_first<T>(outcomes: Vec<Result<T, PutError>>) -> Result<Vec<T>, PutError> {
    let (count, failed) = (outcomes.len(), outcomes.iter().filter(|o| o.is_err()).count());
    let of_batch = |told: String| match count {
        0 | 1 => told,
        _ => format!("{failed} of {count} blocks: {told}"),
    };
    let all: Result<Vec<T>, PutError> = outcomes.into_iter().collect();
    all.map_err(|error| match error {
        PutError::Full(told) => PutError::Full(of_batch(told)),
        PutError::Unavailable(told) => PutError::Unavailable(of_batch(told)),
        other => other,
    })
}

/// A ring of one, in memory: for tests of what lives above. Leases never end.
#[derive(Clone, Debug, Default)]
pub struct MemoryBlocks {
    held: Arc<Mutex<Held>>,
}

#[derive(Debug, Default)]
struct Held {
    blocks: BTreeMap<BlockId, HeldBlock>,
    counts: Counts,
    /// Notified, and forgotten, when a mutable block changes.
    watchers: Vec<Arc<Notify>>,
    /// By lock and holder: each holder's latest request, and its lease, which never ends.
    locks: BTreeMap<(Key, [u8; 16]), (u64, Option<LockMode>)>,
    /// Blocks that were released, and neither put nor renewed since.
    released: BTreeSet<BlockId>,
}

impl Held {
    fn get(&self, id: BlockId) -> Result<HeldBlock, GetError> {
        let told = || "memory does not have it".into();
        let missing = || GetError::NotFound { key: id.key, told: told() };
        self.blocks.get(&id).cloned().ok_or_else(missing)?.unless_removed(id)
    }

    fn lock(&mut self, ask: LockLease) -> Result<LockGrant, LockRefusal> {
        let mode = (ask.step != LockStep::Release).then_some(ask.mode);
        let all = self.locks.range((ask.key, [0; 16])..=(ask.key, [0xff; 16]));
        let is_kept_away = all.into_iter().any(|((_, holder), (number, theirs))| {
            let excludes = theirs.zip(mode).is_some_and(|(theirs, mode)| !theirs.goes_with(mode));
            if *holder == ask.holder { *number >= ask.number } else { excludes }
        });
        if is_kept_away {
            return Err(LockRefusal::Held);
        }
        self.locks.insert((ask.key, ask.holder), (ask.number, mode));
        Ok(LockGrant::default())
    }

    fn release(&mut self, release: &Release) -> Vec<Result<(), PutError>> {
        let outcome = |key: Key| {
            release.verify()?;
            let mut ids = BlockKind::ALL.iter().map(|kind| BlockId { kind: *kind, key });
            let found = ids.find_map(|id| Some((id, self.blocks.get(&id)?)));
            let Some((id, held)) = found else { return Ok(()) };
            if !release.covers(id.kind, &held.bytes) {
                return Err(PutError::Unavailable("it is not theirs to release".into()));
            }
            self.released.insert(id);
            Ok(())
        };
        release.keys().map(outcome).collect()
    }

    fn join(&mut self, id: BlockId, mut new: HeldBlock) {
        if let Some(old) = self.blocks.get(&id) {
            let joined = id.kind.join(&old.bytes, &new.bytes);
            let (joined, version) = joined.expect("both are verified");
            new = HeldBlock { version, bytes: joined.into() };
        }
        self.blocks.insert(id, new);
        self.watchers.drain(..).for_each(|watcher| watcher.notify());
    }

    fn put(&mut self, NewBlock { id, bytes, .. }: NewBlock) -> Result<(), PutError> {
        let new = HeldBlock { version: id.verify(&bytes)?, bytes };
        if id.kind.joins() {
            // There is no clock here: what comes was written just now, and its certificate is valid.
            let offered = CertifiedBlock::decode_verified(&new.bytes)?;
            let times = offered.siblings().iter().map(|sibling| sibling.time_ms);
            let now_ms = times.max().unwrap_or(0);
            let held = self.blocks.get(&id);
            // The writer's client and the replicas both look.
            for held in [None, held] {
                let held_bytes = held.map(|held| &held.bytes[..]);
                let admitted = id.kind.admit(held_bytes, &new.bytes, now_ms);
                admitted.map_err(|why| match (why, held) {
                    (NotAdmitted::Outdated, Some(HeldBlock { version: held, .. })) => {
                        PutError::Superseded { offered: new.version, held: *held }
                    }
                    (why, _) => PutError::NotAdmitted(why),
                })?;
            }
            self.join(id, new);
            return Ok(());
        }
        if let Some(old) = self.blocks.get(&id).filter(|old| **old != new)
            && !id.kind.supersedes(new.version, old.version)
        {
            return Err(PutError::Superseded { offered: new.version, held: old.version });
        }
        if !id.kind.is_mutable() {
            self.released.remove(&id);
            self.counts.puts += 1;
            self.counts.put_bytes += new.bytes.len() as u64;
        }
        self.blocks.insert(id, new);
        self.watchers.drain(..).for_each(|watcher| watcher.notify());
        Ok(())
    }
}

/// What was asked of a [`MemoryBlocks`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Blocks asked for that never change.
    pub gets: u64,
    /// Blocks stored that never change.
    pub puts: u64,
    /// Their bytes.
    pub put_bytes: u64,
}

impl MemoryBlocks {
    /// An empty one.
    pub fn new() -> MemoryBlocks {
        MemoryBlocks::default()
    }

    /// What was asked so far.
    pub fn counts(&self) -> Counts {
        self.lock().counts
    }

    /// How many blocks are held that never change.
    pub fn len(&self) -> usize {
        self.lock().blocks.keys().filter(|id| !id.kind.is_mutable()).count()
    }

    /// Whether none is held.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Blocks that were released, and neither put nor renewed since. Leases never end here.
    pub fn released(&self) -> Vec<BlockId> {
        self.lock().released.iter().copied().collect()
    }

    /// All blocks that are held.
    pub fn ids(&self) -> Vec<BlockId> {
        self.lock().blocks.keys().copied().collect()
    }

    /// Whether a block is held.
    pub fn holds(&self, id: &BlockId) -> bool {
        self.lock().blocks.contains_key(id)
    }

    /// Loses what was released, as a ring does when leases have ended; how many blocks.
    pub fn lose_released(&self) -> usize {
        let mut held = self.lock();
        let released = std::mem::take(&mut held.released);
        released.iter().filter(|id| held.blocks.remove(id).is_some()).count()
    }

    /// Loses a content block; whether it was held.
    pub fn lose(&self, hash: &BlockHash) -> bool {
        self.lose_block(&hash.id())
    }

    /// Loses any block; whether it was held.
    pub fn lose_block(&self, id: &BlockId) -> bool {
        self.lock().blocks.remove(id).is_some()
    }

    /// Takes a block that joins as a copy, as a replica does from another one: nobody asks whether it may be written now.
    ///
    /// # Errors
    /// If it is not what its key promises.
    pub fn take_copy(&self, NewBlock { id, bytes, .. }: NewBlock) -> Result<(), PutError> {
        assert!(id.kind.joins(), "others are put");
        let version = id.verify(&bytes)?;
        self.lock().join(id, HeldBlock { version, bytes });
        Ok(())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Held> {
        self.held.lock().expect("no holder of this lock panics")
    }
}

/// A test double: blocks in memory, and calls that do something else besides.
pub trait OverMemory: Send + Sync + 'static {
    /// Where the calls go that it leaves alone.
    fn memory(&self) -> &MemoryBlocks;

    /// As [`Blocks::get_block`].
    fn get_block(
        &self,
        id: BlockId,
        wanted: Wanted,
    ) -> BoxFuture<'static, Result<HeldBlock, GetError>> {
        self.memory().get_block(id, wanted)
    }

    /// As [`Blocks::put_blocks`].
    fn put_blocks(&self, blocks: Vec<NewBlock>) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        self.memory().put_blocks(blocks)
    }

    /// As [`Blocks::renew_blocks`].
    fn renew_blocks(
        &self,
        renewal: LeaseRenewal,
    ) -> BoxFuture<'static, Vec<Result<Renewed, PutError>>> {
        self.memory().renew_blocks(renewal)
    }

    /// As [`Blocks::release_blocks`].
    fn release_blocks(&self, release: Release) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        self.memory().release_blocks(release)
    }

    /// As [`Blocks::lock_lease`].
    fn lock_lease(&self, ask: LockLease) -> BoxFuture<'static, Result<LockGrant, LockRefusal>> {
        self.memory().lock_lease(ask)
    }
}

impl<T: OverMemory> Blocks for T {
    fn get_block(
        &self,
        id: BlockId,
        wanted: Wanted,
    ) -> BoxFuture<'static, Result<HeldBlock, GetError>> {
        OverMemory::get_block(self, id, wanted)
    }

    fn put_blocks(&self, blocks: Vec<NewBlock>) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        OverMemory::put_blocks(self, blocks)
    }

    fn put_in_order(&self, blocks: Vec<NewBlock>) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        OverMemory::put_blocks(self, blocks)
    }

    fn renew_blocks(
        &self,
        renewal: LeaseRenewal,
    ) -> BoxFuture<'static, Vec<Result<Renewed, PutError>>> {
        OverMemory::renew_blocks(self, renewal)
    }

    fn watch(
        &self,
        id: BlockId,
        seen: u64,
    ) -> BoxFuture<'static, Result<Option<HeldBlock>, GetError>> {
        self.memory().watch(id, seen)
    }

    fn release_blocks(&self, release: Release) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        OverMemory::release_blocks(self, release)
    }

    fn lock_lease(&self, ask: LockLease) -> BoxFuture<'static, Result<LockGrant, LockRefusal>> {
        OverMemory::lock_lease(self, ask)
    }

    fn room(&self) -> BoxFuture<'static, Option<RingRoom>> {
        self.memory().room()
    }
}

impl Blocks for MemoryBlocks {
    fn get_block(
        &self,
        id: BlockId,
        wanted: Wanted,
    ) -> BoxFuture<'static, Result<HeldBlock, GetError>> {
        let mut held = self.lock();
        held.counts.gets += u64::from(!id.kind.is_mutable());
        let reaches = |found: &HeldBlock| id.kind.reaches(found.version, wanted.least());
        let found = held.get(id).and_then(|found| match reaches(&found) {
            true => Ok(found),
            false => {
                let told = format!("memory has version {}", found.version);
                Err(GetError::Unavailable { key: id.key, told })
            }
        });
        Box::pin(async { found })
    }

    fn put_blocks(&self, blocks: Vec<NewBlock>) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        let mut held = self.lock();
        let outcomes: Vec<_> = blocks.into_iter().map(|block| held.put(block)).collect();
        Box::pin(async { outcomes })
    }

    fn put_in_order(&self, blocks: Vec<NewBlock>) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        let mut held = self.lock();
        let mut refused = None;
        let mut put = |block| {
            let outcome = refused.clone().map_or_else(|| held.put(block), Err);
            refused = outcome.clone().err();
            outcome
        };
        let outcomes: Vec<_> = blocks.into_iter().map(&mut put).collect();
        Box::pin(async { outcomes })
    }

    fn renew_blocks(
        &self,
        renewal: LeaseRenewal,
    ) -> BoxFuture<'static, Vec<Result<Renewed, PutError>>> {
        let mut held = self.lock();
        // As on a ring, the key alone counts.
        let has = |id: &BlockId| {
            let ids = BlockKind::ALL.iter().map(|kind| BlockId { kind: *kind, key: id.key });
            let found: Vec<BlockId> = ids.filter(|id| held.blocks.contains_key(id)).collect();
            for id in &found {
                held.released.remove(id);
            }
            Ok(if found.is_empty() { Renewed::Lacking } else { Renewed::Held })
        };
        let outcomes: Vec<_> = renewal.ids.iter().map(has).collect();
        Box::pin(async { outcomes })
    }

    fn release_blocks(&self, release: Release) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        let outcomes = self.lock().release(&release);
        Box::pin(async { outcomes })
    }

    fn lock_lease(&self, ask: LockLease) -> BoxFuture<'static, Result<LockGrant, LockRefusal>> {
        let done = self.lock().lock(ask);
        Box::pin(async { done })
    }

    /// Never resolves with `None`: there is no clock here.
    fn watch(
        &self,
        id: BlockId,
        seen: u64,
    ) -> BoxFuture<'static, Result<Option<HeldBlock>, GetError>> {
        let blocks = self.clone();
        Box::pin(async move {
            loop {
                let changed = Arc::new(Notify::default());
                {
                    let mut held = blocks.lock();
                    if held.blocks.get(&id).is_some_and(|now| id.kind.is_news(now.version, seen)) {
                        return held.get(id).map(Some);
                    }
                    held.watchers.push(changed.clone());
                }
                changed.notified().await;
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use atoll_key::kinds::certified::{Author, Binding, Certificate, CertifiedBlock, WriterId};
    use atoll_key::{GroupId, SecretKey, UserId, VolumeId};
    use futures_util::FutureExt;

    use super::*;

    fn version(version: u64) -> SignedBlock {
        SignedBlock::sign(&SecretKey::from_seed(&[1; 32]), b"", version, b"payload")
    }

    /// A future that needs nothing else to resolve.
    fn now<T>(future: BoxFuture<'static, T>) -> T {
        future.now_or_never().expect("memory answers at once")
    }

    #[test]
    fn each_block_of_a_batch_has_its_own_outcome() {
        let blocks = MemoryBlocks::new();
        now(blocks.put_signed(version(5))).expect("new");
        let content = Bytes::from_static(b"content");
        let hash = BlockHash::of(&content);
        let wrong = NewBlock::from((hash, Bytes::from_static(b"other")));
        let batch = vec![version(4).into(), (hash, content.clone()).into(), wrong];
        let outcomes = now(blocks.put_blocks(batch));
        let superseded = PutError::Superseded { offered: 4, held: 5 };
        let invalid = PutError::Invalid(InvalidBlock::WrongHash);
        assert_eq!(outcomes, [Err(superseded), Ok(()), Err(invalid)]);
        assert_eq!(now(blocks.get(hash)), Ok(content));
        let lost = PutError::Unavailable("nobody".into());
        let error = all_or_first(vec![Ok(()), Err(lost.clone()), Err(lost)]).expect_err("two");
        assert_eq!(error, PutError::Unavailable("2 of 3 blocks: nobody".into()));
    }

    /// Pastis §3.3: a look-up can be constrained to versions that are recent enough.
    #[test]
    fn a_reader_gets_at_least_the_version_it_wants() {
        let blocks = MemoryBlocks::new();
        now(blocks.put_signed(version(5))).expect("new");
        let get = |wanted| now(blocks.get_block(version(0).id(), wanted));
        for wanted in [Wanted::Newest, Wanted::AtLeast(0), Wanted::AtLeast(5)] {
            assert_eq!(get(wanted).expect("there").version, 5);
        }
        assert!(matches!(get(Wanted::AtLeast(6)), Err(GetError::Unavailable { .. })));
    }

    /// Two joined blocks of one height have different versions, and neither is newer.
    #[test]
    fn a_reader_gets_a_joined_block_of_the_height_it_wants() {
        let secret = |n| SecretKey::from_seed(&[n; 32]);
        let group = secret(100);
        let groups = [GroupId(group.public())];
        let binding = Binding::new(VolumeId(secret(101).public()), [1; 16], &groups);
        let written = |n: u8| {
            let user = UserId(secret(n).public());
            let certificate = Certificate::issue(&group, user, 0, 1000);
            let writer = WriterId::new(&user, [n; 8]);
            let author = Author { secret: secret(n), certificate, writer };
            let binding = binding.clone().expect("one group");
            CertifiedBlock::create(binding, &author, 5000, &[n]).expect("a member")
        };
        let blocks = MemoryBlocks::new();
        for n in 0..8 {
            let block = written(n);
            let (id, bytes) = (block.id(), block.bytes().clone());
            assert_eq!(
                now(blocks.put_blocks(vec![NewBlock { id, bytes, lease_secs: None }])),
                [Ok(())]
            );
            let held = now(blocks.get_block(id, Wanted::AtLeast(block.version()))).expect("joined");
            assert!(id.kind.reaches(held.version, block.version()));
        }
    }

    #[test]
    fn a_watcher_hears_of_the_next_version_and_of_the_removal() {
        let blocks = MemoryBlocks::new();
        let id = version(0).id();
        let mut watch = blocks.watch(id, 5);
        now(blocks.put_signed(version(5))).expect("new");
        assert!((&mut watch).now_or_never().is_none(), "it has seen that version");
        now(blocks.put_signed(version(6))).expect("newer");
        let heard = now(watch).expect("there").expect("newer");
        assert_eq!(heard.version, 6);
        let secret = SecretKey::from_seed(&[1; 32]);
        let watch = blocks.watch(id, 6);
        let not_one = now(blocks.remove_blocks(vec![version(7).into()]));
        assert!(matches!(not_one[..], [Err(PutError::Invalid(_))]));
        let tombstone = SignedBlock::sign_tombstone(&secret, b"", 7);
        assert_eq!(now(blocks.remove_blocks(vec![tombstone.clone().into()])), [Ok(())]);
        let bytes = tombstone.bytes().clone();
        let removed = GetError::Removed { key: id.key, version: 7, tombstone: bytes.into() };
        assert_eq!(now(watch), Err(removed.clone()));
        assert_eq!(now(blocks.get_signed(id.key)), Err(removed));
        now(blocks.put_signed(version(8))).expect("a higher version brings it back");
        assert!(now(blocks.get_signed(id.key)).is_ok());
    }
}
