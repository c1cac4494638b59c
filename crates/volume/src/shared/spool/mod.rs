//! The ring as a shared mount sees it, with a spool on this machine's disk for the time in which the ring cannot be
//! reached.
//!
//! While the ring takes what is put, nothing of this is in the way. When it does not take a block because it
//! cannot be reached, the mount is *offline*: that block and all that are put after it go to the spool, and the
//! put succeeds when they are durable there. What is kept shows as if the ring had it: a content block is read from the
//! spool, a version of an inode is joined with what the ring holds. When the ring is back, a task of the mount brings
//! the inodes there ([`super::inodes`]), their content blocks first, and the mount is online again.
//!
//! An offline mount asks the ring for what it reads until an answer fails to come and the volume's record cannot be
//! read either. From then on the ring is *out of reach*: reads fail at once, or show what is known, until the task has
//! read the record.
//!
//! | | content blocks, inodes | locks |
//! |---|---|---|
//! | online | the ring | the ring |
//! | offline | the spool | renewed and given up, none is taken |
//!
//! Pastis has no such thing: a node there is a part of the ring.
//!
//! Invariants:
//!
//! - A put that succeeded is at a majority of its replicas, or durable in the spool, or covered by one that is.
//! - An inode with a version in the spool is put there until the ring has that version, so the ring never has a
//!   later version of a directory whose names lead nowhere yet.
//! - The mount goes online when nothing is left that the ring could take.
//!
//! Without a directory to keep files in, all calls go to the ring.
//!
//! It does not know the order in which inodes have to reach the ring, nor how they are signed again.

mod disk;

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use atoll_dht::{
    Blocks, GetError, HeldBlock, LeaseRenewal, LockGrant, LockLease, LockRefusal, LockStep,
    NewBlock, PutError, Renewed, RingRoom, Wanted,
};
use atoll_env::{BoxFuture, Env, Instant, timeout};
use atoll_key::kinds::Release;
use atoll_key::kinds::certified::CertifiedBlock;
use atoll_key::{BlockHash, BlockId, Key, SignedBlock, UserId, VolumeId};
use futures_channel::oneshot;

use self::disk::{Disk, KeepError};
pub use self::disk::{SPOOL_BLOCK, SPOOL_INODE};
use super::inode::InodeKey;
use crate::spool_directory::SpoolDirectory;

/// How long a put may take before the ring counts as out of reach. A call of a program may take 60 s, and a slow
/// line is not to be taken for a broken one. A guess.
const PUT_LIMIT: Duration = Duration::from_secs(40);
/// After how long a put that still waits for the ring is told of, and again. It holds up a program.
const TOLD_AFTER: [Duration; 2] = [Duration::from_secs(2), Duration::from_secs(10)];
/// How long the volume's record may take.
const PROBE_LIMIT: Duration = Duration::from_secs(10);

/// Content blocks that are brought to the ring in one put.
const BATCH_BLOCKS: usize = 64;
const BATCH_BYTES: u64 = 1 << 20;

/// What a spool says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SpoolStatus {
    /// Inodes of which the ring does not have the last version.
    pub(super) inodes: usize,
    /// Bytes of files.
    pub(super) bytes: u64,
    /// Files that were set aside, since they are not what they should be.
    pub(super) damaged: usize,
    /// Why the mount is offline, and since when, milliseconds since 1970.
    pub(super) offline: Option<(u64, String)>,
    /// How many inodes the ring does not take, and why one of them.
    pub(super) refused: Option<(usize, String)>,
}

/// See the module. Cheap to clone.
#[derive(Clone)]
pub(super) struct SpooledBlocks {
    inner: Arc<Inner>,
}

struct Inner {
    env: Env,
    ring: Arc<dyn Blocks>,
    volume: VolumeId,
    spool: Option<Spool>,
}

struct Spool {
    disk: Disk,
    /// Held while blocks are kept, and while the mount goes online.
    turn: futures_util::lock::Mutex<()>,
    /// Held while the volume's record is read.
    probing: futures_util::lock::Mutex<()>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    offline: Option<(u64, String)>,
    is_out_of_reach: bool,
    /// When the volume's record was read last.
    reached: Option<Instant>,
    /// Inodes that the ring does not take, and why.
    refused: BTreeMap<InodeKey, String>,
    /// Since when the puts wait that are under way.
    waiting: Vec<Instant>,
}

/// A put that is under way, until this is dropped.
struct WaitingPut<'a> {
    spool: &'a Spool,
    since: Instant,
}

impl Drop for WaitingPut<'_> {
    fn drop(&mut self) {
        let waiting = &mut self.spool.state().waiting;
        let at = waiting.iter().position(|since| *since == self.since);
        at.map(|at| waiting.swap_remove(at));
    }
}

/// Whether the order counts in which blocks are put.
#[derive(Clone, Copy)]
enum Order {
    Any,
    AsGiven,
}

impl Spool {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder of this lock panics")
    }

    fn keeps(&self, id: &BlockId) -> bool {
        let is_offline = self.state().offline.is_some();
        if id.kind.joins() {
            return is_offline || self.disk.has_versions(&InodeKey::of(&id.key));
        }
        is_offline && !id.kind.is_mutable()
    }

    fn keeps_any(&self, blocks: &[NewBlock]) -> bool {
        blocks.iter().any(|block| self.keeps(&block.id))
    }

    /// Keeps blocks. The caller has the turn.
    async fn keep(&self, blocks: Vec<NewBlock>) -> Result<(), KeepError> {
        let (contents, versions): (Vec<_>, Vec<_>) =
            blocks.into_iter().partition(|block| !block.id.kind.is_mutable());
        let contents = contents.into_iter().map(|block| (hash_of(&block.id), block.bytes));
        self.disk.keep_contents(contents.collect()).await?;
        for NewBlock { bytes, .. } in versions {
            let block = CertifiedBlock::decode_verified(&bytes).map_err(io::Error::other);
            let block = block.map_err(KeepError::Io)?;
            self.disk.keep_version(&block).await?;
            self.state().refused.remove(&InodeKey::of(&block.key()));
        }
        Ok(())
    }
}

impl SpooledBlocks {
    /// The ring alone.
    pub(super) fn without_spool(
        env: Env,
        ring: Arc<dyn Blocks>,
        volume: VolumeId,
    ) -> SpooledBlocks {
        SpooledBlocks { inner: Arc::new(Inner { env, ring, volume, spool: None }) }
    }

    /// The ring and what a directory has, of which this process is the only user. With anything in it the mount
    /// begins offline.
    ///
    /// # Errors
    /// If the disk fails.
    pub(super) async fn open(
        env: Env,
        ring: Arc<dyn Blocks>,
        (volume, user): (VolumeId, UserId),
        (directory, max_bytes): (Arc<dyn SpoolDirectory>, u64),
    ) -> io::Result<SpooledBlocks> {
        let disk = Disk::open(directory, (volume, user), max_bytes).await?;
        let (_, bytes, _) = disk.counts();
        let why = "what an earlier mount has left is on its way to the ring";
        let offline = (bytes > 0).then(|| (env.unix_ms(), why.to_owned()));
        let state = Mutex::new(State { offline, ..State::default() });
        let (turn, probing) = Default::default();
        let spool = Some(Spool { disk, turn, probing, state });
        Ok(SpooledBlocks { inner: Arc::new(Inner { env, ring, volume, spool }) })
    }

    pub(super) fn has_spool(&self) -> bool {
        self.inner.spool.is_some()
    }

    /// Whether what is put goes to the spool.
    pub(super) fn is_offline(&self) -> bool {
        self.inner.spool.as_ref().is_some_and(|spool| spool.state().offline.is_some())
    }

    /// Whether reads of what is not here fail at once.
    pub(super) fn is_out_of_reach(&self) -> bool {
        self.inner.spool.as_ref().is_some_and(|spool| spool.state().is_out_of_reach)
    }

    /// Whether there is something to be brought to the ring, or to be found out.
    pub(super) fn has_work(&self) -> bool {
        let has_files = |spool: &Spool| spool.disk.counts().1 > 0;
        self.is_offline() || self.inner.spool.as_ref().is_some_and(has_files)
    }

    pub(super) fn status(&self) -> Option<SpoolStatus> {
        let spool = self.inner.spool.as_ref()?;
        let (inodes, bytes, damaged) = spool.disk.counts();
        let state = spool.state();
        let refused = state.refused.values().next().cloned();
        let refused = refused.map(|why| (state.refused.len(), why));
        Some(SpoolStatus { inodes, bytes, damaged, offline: state.offline.clone(), refused })
    }

    /// While the mount is offline: how many bytes the spool may have, and how many it has.
    pub(super) fn room_offline(&self) -> Option<(u64, u64)> {
        let spool = self.inner.spool.as_ref().filter(|_| self.is_offline())?;
        Some((spool.disk.max_bytes(), spool.disk.counts().1))
    }

    /// That a put waits for the ring, and since when, if it has for some seconds.
    pub(super) fn waiting_told(&self) -> Option<String> {
        let since = self.inner.spool.as_ref()?.state().waiting.iter().min().copied()?;
        let waited = self.inner.env.now().since(since);
        (waited >= TOLD_AFTER[0]).then(|| told_of_waiting(waited))
    }

    /// Whether a version of an inode waits, and why the ring does not take it.
    pub(super) fn waits(&self, key: &InodeKey) -> (bool, Option<String>) {
        let Some(spool) = &self.inner.spool else { return (false, None) };
        (spool.disk.has_versions(key), spool.state().refused.get(key).cloned())
    }

    /// The inodes with versions in the spool, in the order in which the last ones were kept.
    pub(super) fn waiting(&self) -> Vec<InodeKey> {
        self.inner.spool.as_ref().map_or(Vec::new(), |spool| spool.disk.inodes())
    }

    /// Whether a version of an inode waits that is not its removal.
    pub(super) fn is_living_waiting(&self, key: &InodeKey) -> bool {
        self.inner.spool.as_ref().is_some_and(|spool| spool.disk.has_living(key))
    }

    /// The versions of an inode that wait: one of each writer.
    pub(super) async fn versions(&self, key: &InodeKey) -> io::Result<Vec<CertifiedBlock>> {
        match &self.inner.spool {
            Some(spool) => spool.disk.versions(key).await,
            None => Ok(Vec::new()),
        }
    }

    /// Keeps a version that takes the place of one that waits.
    pub(super) async fn keep_again(&self, block: &CertifiedBlock) -> Result<(), PutError> {
        let Some(spool) = &self.inner.spool else { return Ok(()) };
        let _turn = spool.turn.lock().await;
        spool.disk.keep_version(block).await.map_err(not_kept)
    }

    /// Puts a version that waits.
    pub(super) async fn send(&self, block: &CertifiedBlock) -> Result<(), PutError> {
        let sent = self.inner.put_to_ring(vec![block.into()], Order::Any).await.pop();
        let sent = sent.unwrap_or_else(|| Err(PutError::Unavailable("no outcome".into())));
        match (sent, &self.inner.spool) {
            (Ok(()), Some(spool)) => {
                self.delivered(block).await;
                spool.state().refused.remove(&InodeKey::of(&block.key()));
                Ok(())
            }
            (sent, _) => sent,
        }
    }

    /// The ring has a version, or one that includes it.
    pub(super) async fn delivered(&self, block: &CertifiedBlock) {
        if let Some(spool) = &self.inner.spool {
            spool.disk.remove_version(block).await;
        }
    }

    /// What the ring alone holds.
    pub(super) async fn on_ring(&self, key: &InodeKey) -> Result<CertifiedBlock, GetError> {
        let id = CertifiedBlock::id_at(key.key());
        let held = self.inner.ring.get_block(id, Wanted::Newest).await?;
        let told = |error: atoll_key::InvalidBlock| error.to_string();
        CertifiedBlock::decode_verified(&held.bytes)
            .map_err(|error| GetError::Unavailable { key: id.key, told: told(error) })
    }

    /// Brings the content blocks that wait to the ring.
    pub(super) async fn send_contents(&self) -> Result<(), PutError> {
        let Some(spool) = &self.inner.spool else { return Ok(()) };
        loop {
            let hashes = spool.disk.unsent_contents((BATCH_BLOCKS, BATCH_BYTES));
            if hashes.is_empty() {
                return Ok(());
            }
            let mut blocks = Vec::new();
            for hash in &hashes {
                let content = spool.disk.content(hash).await;
                let content = content.map_err(|error| not_kept(KeepError::Io(error)))?;
                let id = hash.inode_content_id();
                blocks.extend(content.map(|bytes| NewBlock { id, bytes, lease_secs: None }));
            }
            let outcomes = self.inner.put_to_ring(blocks, Order::Any).await;
            outcomes.into_iter().collect::<Result<(), _>>()?;
            spool.disk.note_sent(&hashes);
        }
    }

    /// The ring does not take an inode, until something about it changes.
    pub(super) fn refuse(&self, key: InodeKey, why: String) {
        let Some(spool) = &self.inner.spool else { return };
        let before = spool.state().refused.insert(key, why.clone());
        if before.as_ref() != Some(&why) {
            tracing::warn!("the ring does not take a file of the spool: {why}");
        }
    }

    /// The ring has no room for what waits.
    pub(super) fn explain(&self, why: &str) {
        let Some(spool) = &self.inner.spool else { return };
        if let Some((_, told)) = &mut spool.state().offline {
            why.clone_into(told);
        }
    }

    /// Goes online if nothing is left that the ring could take; whether that is so.
    pub(super) async fn settle(&self) -> bool {
        let Some(spool) = &self.inner.spool else { return true };
        let _turn = spool.turn.lock().await;
        let waiting = spool.disk.inodes();
        let has_unsent = !spool.disk.unsent_contents((1, 0)).is_empty();
        let was_offline = {
            let mut state = spool.state();
            state.refused.retain(|key, _| waiting.contains(key));
            if state.is_out_of_reach || has_unsent || state.refused.len() < waiting.len() {
                return false;
            }
            state.offline.take().is_some()
        };
        if was_offline {
            tracing::info!("the ring is within reach again, and has what was spooled");
        }
        if waiting.is_empty() {
            spool.disk.remove_contents().await;
        }
        true
    }

    /// Finds out whether the ring is within reach.
    pub(super) async fn probe(&self) -> bool {
        match &self.inner.spool {
            Some(spool) => self.inner.probe(spool).await,
            None => true,
        }
    }
}

impl Inner {
    /// Puts blocks on the ring; within a limit, unless there is no spool.
    async fn put_to_ring(&self, blocks: Vec<NewBlock>, order: Order) -> Vec<Result<(), PutError>> {
        let count = blocks.len();
        let put = match order {
            Order::Any => self.ring.put_blocks(blocks),
            Order::AsGiven => self.ring.put_in_order(blocks),
        };
        let Some(spool) = &self.spool else { return put.await };
        let waiting = WaitingPut { spool, since: self.env.now() };
        spool.state().waiting.push(waiting.since);
        let waited = || self.env.now().since(waiting.since);
        let mut put = put;
        for until in TOLD_AFTER.into_iter().chain([PUT_LIMIT]) {
            let answer = timeout(&*self.env, until.saturating_sub(waited()), &mut put).await;
            match answer {
                Ok(outcomes) => return outcomes,
                Err(_) if until < PUT_LIMIT => tracing::warn!("{}", told_of_waiting(waited())),
                Err(_) => {}
            }
        }
        let told = format!("the ring did not answer within {} s", PUT_LIMIT.as_secs());
        vec![Err(PutError::Unavailable(told)); count]
    }

    /// Puts blocks on the ring, or in the spool those that it cannot be reached for.
    async fn put(
        self: Arc<Self>,
        blocks: Vec<NewBlock>,
        order: Order,
    ) -> Vec<Result<(), PutError>> {
        let Some(spool) = &self.spool else { return self.put_to_ring(blocks, order).await };
        if spool.keeps_any(&blocks)
            && let Some(kept) = self.keep(blocks.clone(), None).await
        {
            return kept;
        }
        let mut outcomes = self.put_to_ring(blocks.clone(), order).await;
        let missed: Vec<usize> = (0..outcomes.len())
            .filter(|at| matches!(outcomes[*at], Err(PutError::Unavailable(_))))
            .collect();
        let why =
            missed.first().and_then(|at| outcomes[*at].as_ref().err().map(ToString::to_string));
        let Some(why) = why else { return outcomes };
        let kept = missed.iter().map(|at| blocks[*at].clone()).collect();
        let kept = self.keep(kept, Some(why)).await.unwrap_or_default();
        for (at, kept) in missed.iter().zip(kept) {
            outcomes[*at] = kept;
        }
        outcomes
    }

    /// Keeps blocks in the spool, and goes offline if the ring could not be reached for them. `None` if the mount has
    /// gone online meanwhile. A call that is given up leaves no file that is not counted.
    async fn keep(
        self: &Arc<Self>,
        blocks: Vec<NewBlock>,
        missed: Option<String>,
    ) -> Option<Vec<Result<(), PutError>>> {
        let (sender, receiver) = oneshot::channel();
        let (inner, count) = (self.clone(), blocks.len());
        self.env.spawn(Box::pin(async move {
            let Some(spool) = &inner.spool else { return };
            let _turn = spool.turn.lock().await;
            let kept = match missed {
                None if !spool.keeps_any(&blocks) => None,
                missed => {
                    missed.iter().for_each(|why| inner.go_offline(spool, why));
                    let kept = spool.keep(blocks).await.map_err(not_kept);
                    Some(vec![kept; count])
                }
            };
            // Those that waited may have given up.
            let _ = sender.send(kept);
        }));
        let ended = || PutError::Unavailable("the put was given up".into());
        receiver.await.unwrap_or_else(|_| Some(vec![Err(ended()); count]))
    }

    fn go_offline(&self, spool: &Spool, why: &str) {
        {
            let mut state = spool.state();
            if state.offline.is_some() {
                return;
            }
            state.offline = Some((self.env.unix_ms(), why.to_owned()));
        }
        tracing::warn!("offline, what is written is spooled: {why}");
    }

    async fn get(self: Arc<Self>, id: BlockId, wanted: Wanted) -> Result<HeldBlock, GetError> {
        let Some(spool) = &self.spool else { return self.ring.get_block(id, wanted).await };
        let failed =
            |told: &dyn ToString| GetError::Unavailable { key: id.key, told: told.to_string() };
        if !id.kind.is_mutable() {
            let hash = hash_of(&id);
            if spool.disk.has_content(&hash)
                && let Some(bytes) =
                    spool.disk.content(&hash).await.map_err(|error| failed(&error))?
            {
                return Ok(HeldBlock { version: 0, bytes });
            }
        }
        // They are read before the ring is asked, which may have them a moment later.
        let waiting = match id.kind.joins() {
            true => spool.disk.versions(&InodeKey::of(&id.key)).await,
            false => Ok(Vec::new()),
        };
        let waiting = waiting.map_err(|error| failed(&error))?;
        // The ring has no version of the one that waits here.
        let wanted = if waiting.is_empty() { wanted } else { Wanted::Newest };
        let is_out_of_reach = spool.state().is_out_of_reach;
        let held = match is_out_of_reach {
            true => Err(failed(&"the ring is out of reach; it is asked again every few seconds")),
            false => self.ring.get_block(id, wanted).await,
        };
        let is_away = |error: &GetError| !matches!(error, GetError::Removed { .. });
        if held.as_ref().is_err_and(is_away) && !spool.state().is_out_of_reach {
            self.suspect(spool).await;
        }
        if waiting.is_empty() {
            return held;
        }
        // Whoever removed it has not seen the version that waits: such a removal does not count.
        let mut joined = held.ok();
        for block in waiting {
            let (bytes, version) = match joined {
                None => (block.bytes().to_vec(), block.version()),
                Some(held) => {
                    let joined = id.kind.join(&held.bytes, block.bytes());
                    joined.ok_or_else(|| failed(&"it cannot be joined"))?
                }
            };
            joined = Some(HeldBlock { version, bytes: bytes.into() });
        }
        match joined {
            Some(held) if id.kind.is_tombstone(&held.bytes) => Err(GetError::Removed {
                key: id.key,
                version: held.version,
                tombstone: held.bytes.into(),
            }),
            held => held.ok_or_else(|| failed(&"nothing waits")),
        }
    }

    /// A read has failed: the ring may be out of reach.
    async fn suspect(&self, spool: &Spool) {
        let began = self.env.now();
        let _turn = spool.probing.lock().await;
        let is_known = {
            let state = spool.state();
            state.is_out_of_reach || state.reached.is_some_and(|at| at >= began)
        };
        if is_known || self.reads_record(spool).await {
            return;
        }
        let _keeping = spool.turn.lock().await;
        self.go_offline(spool, "the volume's record cannot be read");
        spool.state().is_out_of_reach = true;
    }

    async fn probe(&self, spool: &Spool) -> bool {
        let _turn = spool.probing.lock().await;
        let is_reached = self.reads_record(spool).await;
        spool.state().is_out_of_reach = !is_reached;
        is_reached
    }

    async fn reads_record(&self, spool: &Spool) -> bool {
        let id = SignedBlock::id_at(self.volume.root_key());
        let began = self.env.now();
        let read = timeout(&*self.env, PROBE_LIMIT, self.ring.get_block(id, Wanted::Newest)).await;
        let is_reached = matches!(read, Ok(Ok(_) | Err(GetError::Removed { .. })));
        if is_reached {
            spool.state().reached = Some(began);
        }
        is_reached
    }
}

fn hash_of(id: &BlockId) -> BlockHash {
    BlockHash(*id.key.0.first_chunk().expect("a key has 64 bytes"))
}

fn not_kept(error: KeepError) -> PutError {
    match error {
        KeepError::NoRoom { max_bytes } => PutError::Full(format!(
            "the ring cannot be reached, and the spool on this machine is full, which may have {max_bytes} bytes (--spool)"
        )),
        KeepError::Io(error) if error.kind() == io::ErrorKind::StorageFull => {
            PutError::Full("the ring cannot be reached, and the disk of the spool is full".into())
        }
        KeepError::Io(error) => PutError::Unavailable(format!(
            "the ring cannot be reached, and the spool fails: {error}"
        )),
    }
}

fn told_of_waiting(waited: Duration) -> String {
    format!(
        "a write has waited for the ring for {} s, and goes to the spool after {} s: `atoll status` \
         says which nodes are away and what to do",
        waited.as_secs(),
        PUT_LIMIT.as_secs()
    )
}

impl Blocks for SpooledBlocks {
    fn get_block(
        &self,
        id: BlockId,
        wanted: Wanted,
    ) -> BoxFuture<'static, Result<HeldBlock, GetError>> {
        Box::pin(self.inner.clone().get(id, wanted))
    }

    fn put_blocks(&self, blocks: Vec<NewBlock>) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        match &self.inner.spool {
            None => self.inner.ring.put_blocks(blocks),
            Some(_) => Box::pin(self.inner.clone().put(blocks, Order::Any)),
        }
    }

    fn put_in_order(&self, blocks: Vec<NewBlock>) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        match &self.inner.spool {
            None => self.inner.ring.put_in_order(blocks),
            Some(_) => Box::pin(self.inner.clone().put(blocks, Order::AsGiven)),
        }
    }

    fn renew_blocks(
        &self,
        renewal: LeaseRenewal,
    ) -> BoxFuture<'static, Vec<Result<Renewed, PutError>>> {
        self.inner.ring.renew_blocks(renewal)
    }

    fn release_blocks(&self, release: Release) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        self.inner.ring.release_blocks(release)
    }

    fn same_set_until(&self, key: Key) -> BoxFuture<'static, Option<Key>> {
        self.inner.ring.same_set_until(key)
    }

    fn watch(
        &self,
        id: BlockId,
        seen: u64,
    ) -> BoxFuture<'static, Result<Option<HeldBlock>, GetError>> {
        self.inner.ring.watch(id, seen)
    }

    fn room(&self) -> BoxFuture<'static, Option<RingRoom>> {
        self.inner.ring.room()
    }

    /// What is written under a lock has to be where the next holder reads.
    fn lock_lease(&self, ask: LockLease) -> BoxFuture<'static, Result<LockGrant, LockRefusal>> {
        let takes = matches!(ask.step, LockStep::Take | LockStep::Upgrade);
        if takes && self.is_offline() {
            let told = "what is written here is not on the ring";
            return Box::pin(async { Err(LockRefusal::NoMajority(told.into())) });
        }
        self.inner.ring.lock_lease(ask)
    }
}
