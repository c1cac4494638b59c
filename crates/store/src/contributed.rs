//! `ContributedStore`: the store of a node whose way of giving disk may change while it runs.
//!
//! It is one store to its callers. Behind it stands one *backend*, a log of segments or a
//! directory of files, or two while blocks move from the former backend to the present one:
//!
//! - New blocks go to the present backend. Reads look in both; of two versions the higher counts,
//!   of two leases the longer.
//! - [`ContributedStore::move_some`] moves blocks, bit by bit: copy, catch up with what was
//!   renewed meanwhile, remove. A removal waits for the batch that is being moved, so that no
//!   removed block comes back.
//! - **A block is in the present backend, durably, before it leaves the former one.** A move that
//!   was interrupted at any point goes on with the same two backends.
//! - **A backend that is away keeps its blocks**: that it lists none does not mean it is empty.
//! - Blocks for which the present backend has no space must be given up; [`farthest`] says which
//!   go first.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, RwLock};

use atoll_env::BoxFuture;
use atoll_key::{Key, KeyRange};

use crate::summary::{Changed, Question, Summaries};
use crate::{
    BlockInfo, BlockStore, DiskFailure, DiskStore, FileStore, Holding, Owner, OwnerUsage, Owners,
    Part, ScrubStep, StoreError, StoredBlock, Summary, Usage,
};

/// Where blocks are.
#[derive(Clone, Debug)]
pub enum Backend {
    /// In a log, synced and for good.
    Log(Arc<DiskStore>),
    /// In files that may vanish.
    Files(Arc<FileStore>),
}

impl Backend {
    /// It as any store.
    pub fn store(&self) -> &dyn BlockStore {
        match self {
            Backend::Log(store) => &**store,
            Backend::Files(store) => &**store,
        }
    }

    /// Changes what it may take.
    pub fn set_capacity(&self, capacity_bytes: u64) {
        match self {
            Backend::Log(store) => store.set_capacity(capacity_bytes),
            Backend::Files(store) => store.set_capacity(capacity_bytes),
        }
    }

    /// Makes everything durable.
    pub fn flush(&self) -> BoxFuture<'static, Result<(), StoreError>> {
        match self {
            Backend::Log(store) => store.flush(),
            Backend::Files(store) => store.flush(),
        }
    }

    /// Makes durable what was put: a log has done so when it answered.
    async fn settle(&self) -> Result<(), StoreError> {
        match self {
            Backend::Log(_) => Ok(()),
            Backend::Files(store) => store.flush().await,
        }
    }

    /// Tells `changed` of each change of what is held.
    fn watch(&self, changed: &Arc<Changed>) {
        match self {
            Backend::Log(store) => store.watch(changed),
            Backend::Files(store) => store.watch(changed),
        }
    }

    /// How often its directory has become present or away.
    fn comings(&self) -> u64 {
        match self {
            Backend::Log(_) => 0,
            Backend::Files(store) => store.comings(),
        }
    }

    /// Does work that may wait for the disk where it may.
    async fn waiting<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, StoreError> {
        match self {
            Backend::Log(store) => store.waiting(work).await,
            Backend::Files(store) => store.waiting(work).await,
        }
    }

    fn holders(&self) -> usize {
        match self {
            Backend::Log(store) => Arc::strong_count(store),
            Backend::Files(store) => Arc::strong_count(store),
        }
    }

    fn is(&self, other: &Backend) -> bool {
        match (self, other) {
            (Backend::Log(a), Backend::Log(b)) => Arc::ptr_eq(a, b),
            (Backend::Files(a), Backend::Files(b)) => Arc::ptr_eq(a, b),
            _ => false,
        }
    }
}

#[derive(Clone, Debug)]
struct Backends {
    present: Backend,
    former: Option<Backend>,
    /// Of both backends together, while there are two.
    merged: Arc<Merged>,
}

/// Summaries of what two backends hold together.
#[derive(Debug, Default)]
struct Merged {
    summaries: Summaries,
    /// [`Backend::comings`] of both at the last question.
    comings: AtomicU64,
}

impl Backends {
    fn new(present: Backend, former: Option<Backend>) -> Backends {
        let merged: Arc<Merged> = Arc::default();
        if let Some(former) = &former {
            present.watch(&merged.summaries.changed);
            former.watch(&merged.summaries.changed);
        }
        Backends { present, former, merged }
    }

    fn list(&self, range: KeyRange, limit: usize) -> Result<Vec<BlockInfo>, StoreError> {
        let present = self.present.store();
        let Some(former) = &self.former else { return present.list(range, limit) };
        // The former first: what moves meanwhile is found in the present one.
        let former = former.store().list(range, limit)?;
        Ok(merge_lists(&range.after, former, present.list(range, limit)?, limit))
    }

    /// Answers for two backends.
    async fn summarize(self, question: Question, now: u64) -> Result<Vec<Part>, StoreError> {
        let comings = self.present.comings() + self.former.as_ref().map_or(0, Backend::comings);
        if self.merged.comings.swap(comings, Ordering::Relaxed) != comings {
            self.merged.summaries.forget().await;
        }
        let mut asked = self.merged.summaries.ask(question, now).await;
        loop {
            let backends = self.clone();
            let step = self.present.waiting(move || {
                let answer = asked.step(Some(&|range, limit| backends.list(range, limit)));
                (asked, answer)
            });
            let (going_on, answer) = step.await?;
            asked = going_on;
            if let Some(parts) = answer? {
                return Ok(parts);
            }
        }
    }
}

/// The store; see the module.
#[derive(Debug)]
pub struct ContributedStore {
    backends: Arc<RwLock<Backends>>,
    /// Held while blocks move and while any are removed.
    moving: Arc<futures_util::lock::Mutex<()>>,
}

/// Blocks move between two other backends.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("blocks are being moved already")]
pub struct Busy;

/// What a step of [`ContributedStore::move_some`] did.
#[derive(Debug, Default)]
pub struct Moved {
    /// Blocks that are in the present backend now.
    pub blocks: u64,
    /// Their bytes.
    pub bytes: u64,
    /// The backend that has become empty; it is no longer part of the store.
    pub emptied: Option<Backend>,
}

/// Blocks moved in one batch, and their bytes: each ends with a sync.
const BATCH_BLOCKS: usize = 256;
const BATCH_BYTES: u64 = 1 << 20;

/// Blocks listed at once while the farthest are chosen.
const FARTHEST_PAGE: usize = 64;

impl ContributedStore {
    /// Blocks in `present`, and in `former` what has not been moved yet.
    pub fn new(present: Backend, former: Option<Backend>) -> ContributedStore {
        let backends = Arc::new(RwLock::new(Backends::new(present, former)));
        ContributedStore { backends, moving: Arc::default() }
    }

    fn backends(&self) -> Backends {
        self.backends.read().expect("no holder of this lock panics").clone()
    }

    /// Where new blocks go.
    pub fn present(&self) -> Backend {
        self.backends().present
    }

    /// Where blocks are moved from.
    pub fn former(&self) -> Option<Backend> {
        self.backends().former
    }

    /// From now on blocks go to `backend`, and those held are to be moved there. Back to the
    /// backend they are being moved from, what has been moved is moved back.
    ///
    /// # Errors
    /// Blocks are being moved from another backend.
    pub fn change_to(&self, backend: Backend) -> Result<(), Busy> {
        let mut backends = self.backends.write().expect("no holder of this lock panics");
        if backend.is(&backends.present) {
            return Ok(());
        }
        if backends.former.as_ref().is_some_and(|former| !former.is(&backend)) {
            return Err(Busy);
        }
        let former = backends.present.clone();
        *backends = Backends::new(backend, Some(former));
        Ok(())
    }

    /// Gives up the backend that blocks are being moved from, and the blocks left there.
    pub fn abandon_former(&self) -> Option<Backend> {
        self.backends.write().expect("no holder of this lock panics").former.take()
    }

    /// Moves about `budget_bytes` of blocks to the present backend.
    ///
    /// # Errors A backend failed; what has been moved is. [`StoreError::Full`] if the present
    /// backend has no place: removing some of [`ContributedStore::farthest`] makes it.
    /// [`StoreError::Away`] if it is not there: it may have place.
    pub async fn move_some(&self, budget_bytes: u64) -> Result<Moved, StoreError> {
        let mut moved = Moved::default();
        while moved.bytes <= budget_bytes {
            let _moving = self.moving.lock().await;
            let Backends { present, former: Some(former), .. } = self.backends() else { break };
            let mut infos = former.store().list(KeyRange::full(), BATCH_BLOCKS)?;
            if infos.is_empty() {
                moved.emptied = self.close_former(&present, &former).await?;
                break;
            }
            let (mut bytes, most) = (0, BATCH_BYTES.min(budget_bytes - moved.bytes));
            infos.retain(|info| {
                bytes += u64::from(info.len_bytes);
                bytes <= most || bytes == u64::from(info.len_bytes)
            });
            move_batch(&present, &former, &infos, &mut moved).await?;
        }
        Ok(moved)
    }

    async fn close_former(
        &self,
        present: &Backend,
        former: &Backend,
    ) -> Result<Option<Backend>, StoreError> {
        // One that is away shows nothing and may have all; only once it is known to be there
        // does an empty list say that it is empty.
        if let Backend::Files(files) = former
            && (files.look_aside().await.is_err() || !files.list(KeyRange::full(), 1)?.is_empty())
        {
            return Ok(None);
        }
        let mut backends = self.backends.write().expect("no holder of this lock panics");
        let same =
            backends.present.is(present) && backends.former.as_ref().is_some_and(|f| f.is(former));
        // One holder is the caller, one these backends; a third may be putting something into it.
        Ok(if same && former.holders() == 2 { backends.former.take() } else { None })
    }

    /// Blocks of about `want_bytes`, those first of which this node is the farthest holder;
    /// `positions` are its places on the ring. From the former backend, if blocks are being moved,
    /// else from the present one.
    ///
    /// # Errors
    /// A backend failed.
    pub fn farthest(
        &self,
        positions: &[Key],
        want_bytes: u64,
    ) -> Result<Vec<BlockInfo>, StoreError> {
        let backends = self.backends();
        farthest(
            backends.former.as_ref().unwrap_or(&backends.present).store(),
            positions,
            want_bytes,
        )
    }
}

/// Moves some blocks; with the moving held. One that cannot be read now stays, and keeps the
/// others of the batch from nothing.
async fn move_batch(
    present: &Backend,
    former: &Backend,
    infos: &[BlockInfo],
    moved: &mut Moved,
) -> Result<(), StoreError> {
    let (mut batch, mut unreadable) = (Vec::with_capacity(infos.len()), None);
    for info in infos {
        match former.store().get(&info.key).await {
            Ok(Some(found)) => batch.push(joined_with(present, found).await),
            Ok(None) => {}
            // Set aside: it counts as missing, and repair fetches it.
            Err(StoreError::Corrupted { key }) => tracing::warn!(%key, "a block has rotted"),
            Err(error) => unreadable = Some(error),
        }
    }
    if let Some(error) = unreadable.filter(|_| batch.is_empty()) {
        return Err(error);
    }
    let keys: Vec<Key> = batch.iter().map(|block| block.info.key).collect();
    let bytes: u64 = batch.iter().map(|block| block.bytes.len() as u64).sum();
    let before: BTreeMap<Key, u64> =
        batch.iter().map(|block| (block.info.key, block.info.expires_unix_secs)).collect();
    if !batch.is_empty() {
        present.store().put(batch).await?;
        present.settle().await?;
    }
    for key in &keys {
        // Renewed while it was copied? From here on renewals reach both.
        if let Some(now) = former.store().info(key)?
            && now.expires_unix_secs > before[key]
        {
            present.store().renew(&[*key], now.expires_unix_secs, now.owner)?;
        }
    }
    moved.blocks += keys.len() as u64;
    moved.bytes += bytes;
    former.store().remove(keys).await
}

/// A block of the former backend, joined with what the present one holds if its kind is. That is there
/// only after a crash.
async fn joined_with(present: &Backend, block: StoredBlock) -> StoredBlock {
    let BlockInfo { key, kind, .. } = block.info;
    if !kind.joins() {
        return block;
    }
    let Ok(Some(held)) = present.store().get(&key).await else { return block };
    let Some((bytes, version)) = kind.join(&held.bytes, &block.bytes) else { return held };
    let len_bytes = u32::try_from(bytes.len()).expect("verified blocks are short");
    StoredBlock { info: BlockInfo { version, len_bytes, ..block.info }, bytes: bytes.into() }
}

/// Blocks of about `want_bytes`, those first that lie farthest before the place of this node
/// that is responsible for them.
///
/// A block's copies are on the nodes that follow its key (CFS §4.2), so the farther a key lies
/// before the node, the more others hold it who are asked and who repair before this one: its
/// replica is the last of the set, or none of the set any more.
///
/// # Errors
/// The store failed.
pub fn farthest(
    store: &dyn BlockStore,
    positions: &[Key],
    want_bytes: u64,
) -> Result<Vec<BlockInfo>, StoreError> {
    let mut places: Vec<Key> = positions.to_vec();
    places.sort();
    places.dedup();
    if places.is_empty() {
        places.push(Key::MAX);
    }
    // The range left before each place, by how far it reaches back.
    let mut arcs: BTreeMap<(Key, Key), KeyRange> = BTreeMap::new();
    let span = |range: &KeyRange| range.upto.wrapping_sub(&range.after);
    for (i, upto) in places.iter().enumerate() {
        let after = places[(i + places.len() - 1) % places.len()];
        let range = KeyRange::new(after, *upto);
        // The whole ring is no distance by subtraction.
        let reach = if range.is_full() { Key::MAX } else { span(&range) };
        arcs.insert((reach, *upto), range);
    }
    let (mut chosen, mut bytes) = (Vec::new(), 0);
    while let Some((_, range)) = arcs.pop_last() {
        let page = store.list(range, FARTHEST_PAGE)?;
        for info in &page {
            if bytes >= want_bytes {
                return Ok(chosen);
            }
            bytes += u64::from(info.len_bytes);
            chosen.push(*info);
        }
        let last = page.last().filter(|last| page.len() == FARTHEST_PAGE && last.key != range.upto);
        if let Some(last) = last {
            let rest = KeyRange::new(last.key, range.upto);
            arcs.insert((span(&rest), rest.upto), rest);
        }
    }
    Ok(chosen)
}

/// What two backends know of one block.
fn merged(former: Option<BlockInfo>, present: Option<BlockInfo>) -> Option<BlockInfo> {
    let (Some(former), Some(present)) = (former, present) else { return former.or(present) };
    let is_newer = former.kind.supersedes(former.version, present.version);
    let newer = if is_newer { former } else { present };
    let lease = if former.expires_unix_secs > present.expires_unix_secs { former } else { present };
    let BlockInfo { expires_unix_secs, owner, .. } = lease;
    Some(BlockInfo { expires_unix_secs, owner, ..newer })
}

/// Two lists of the same range as one, in ring order from `after`.
fn merge_lists(
    after: &Key,
    former: Vec<BlockInfo>,
    present: Vec<BlockInfo>,
    limit: usize,
) -> Vec<BlockInfo> {
    // The end of the range is at no distance by subtraction: it comes last.
    let place = |key: &Key| key.wrapping_sub(&after.next());
    let mut all: BTreeMap<Key, BlockInfo> = BTreeMap::new();
    for info in former.into_iter().chain(present) {
        let place = place(&info.key);
        let known = all.get(&place).copied();
        all.extend(merged(known, Some(info)).map(|info| (place, info)));
    }
    all.into_values().take(limit).collect()
}

fn sum(a: Holding, b: Holding) -> Holding {
    Holding { block_bytes: a.block_bytes + b.block_bytes, blocks: a.blocks + b.blocks }
}

/// The `limit` largest of two lists of holdings.
fn merge_holdings(
    a: Vec<([u8; 16], Holding)>,
    b: Vec<([u8; 16], Holding)>,
    limit: usize,
) -> Vec<([u8; 16], Holding)> {
    let mut all: BTreeMap<[u8; 16], Holding> = BTreeMap::new();
    for (who, held) in a.into_iter().chain(b) {
        let known = all.entry(who).or_default();
        *known = sum(*known, held);
    }
    let mut all: Vec<_> = all.into_iter().collect();
    all.sort_by(|a, b| b.1.cmp(&a.1).then(a.0.cmp(&b.0)));
    all.truncate(limit);
    all
}

async fn get_from(backends: Backends, key: Key) -> Result<Option<StoredBlock>, StoreError> {
    let Some(former) = &backends.former else { return backends.present.store().get(&key).await };
    // The former first: what moves meanwhile is found in the present one.
    let was = former.store().info(&key)?;
    let is = backends.present.store().info(&key)?;
    let Some(info) = merged(was, is) else { return Ok(None) };
    let former_has_it =
        was.is_some_and(|was| is.is_none_or(|is| was.kind.supersedes(was.version, is.version)));
    let found = match former_has_it {
        true => match former.store().get(&key).await? {
            None => backends.present.store().get(&key).await?,
            found => found,
        },
        false => backends.present.store().get(&key).await?,
    };
    Ok(found.map(|found| {
        let info = merged(Some(info), Some(found.info)).unwrap_or(found.info);
        StoredBlock { info: BlockInfo { version: found.info.version, ..info }, ..found }
    }))
}

impl BlockStore for ContributedStore {
    fn put(&self, batch: Vec<StoredBlock>) -> BoxFuture<'static, Result<(), StoreError>> {
        // Held until it is done: a backend is not closed under a batch that goes into it.
        let mut used = self.backends();
        if used.former.is_none() {
            return Box::pin(async move { used.present.store().put(batch).await });
        }
        let (backends, moving) = (self.backends.clone(), self.moving.clone());
        let joined = batch.iter().filter(|block| block.info.kind.joins());
        let joined: Vec<Key> = joined.map(|block| block.info.key).collect();
        Box::pin(async move {
            let _moving = match joined.is_empty() {
                true => None,
                false => Some(moving.lock().await),
            };
            if !joined.is_empty() {
                used = backends.read().expect("no holder of this lock panics").clone();
            }
            let leases: Vec<BlockInfo> = batch.iter().map(|block| block.info).collect();
            used.present.store().put(batch).await?;
            let Some(former) = used.former else { return Ok(()) };
            // A block that is still in the former backend, perhaps in a higher version, has this
            // lease as well, and must not expire there with its own.
            for info in leases {
                former.store().renew(&[info.key], info.expires_unix_secs, info.owner)?;
                // A block has the lease of the one that it replaces, if that is longer: its own
                // would end first and uncover the older version.
                if let Some(held) = former.store().info(&info.key)?
                    && info.kind.replaces(info.version, held.version)
                {
                    let expires_unix_secs = held.expires_unix_secs;
                    used.present.store().renew(&[info.key], expires_unix_secs, Owner::NOBODY)?;
                }
            }
            // It was joined with what the former backend has, and no version says so.
            match joined.is_empty() {
                true => Ok(()),
                false => former.store().remove(joined).await,
            }
        })
    }

    fn get(&self, key: &Key) -> BoxFuture<'static, Result<Option<StoredBlock>, StoreError>> {
        let backends = self.backends();
        match backends.former {
            None => backends.present.store().get(key),
            Some(_) => Box::pin(get_from(backends, *key)),
        }
    }

    fn info(&self, key: &Key) -> Result<Option<BlockInfo>, StoreError> {
        let backends = self.backends();
        let former = backends.former.map_or(Ok(None), |former| former.store().info(key))?;
        Ok(merged(former, backends.present.store().info(key)?))
    }

    fn list(&self, range: KeyRange, limit: usize) -> Result<Vec<BlockInfo>, StoreError> {
        self.backends().list(range, limit)
    }

    fn summaries(
        &self,
        ranges: Vec<KeyRange>,
        now_unix_secs: u64,
    ) -> BoxFuture<'static, Result<Vec<Summary>, StoreError>> {
        let backends = self.backends();
        if backends.former.is_none() {
            return backends.present.store().summaries(ranges, now_unix_secs);
        }
        Box::pin(async move {
            let parts = backends.summarize(Question::Summaries(ranges), now_unix_secs).await?;
            Ok(parts.into_iter().map(|part| part.summary).collect())
        })
    }

    fn cut(
        &self,
        range: KeyRange,
        now_unix_secs: u64,
    ) -> BoxFuture<'static, Result<Vec<Part>, StoreError>> {
        let backends = self.backends();
        if backends.former.is_none() {
            return backends.present.store().cut(range, now_unix_secs);
        }
        Box::pin(async move { backends.summarize(Question::Cut(range), now_unix_secs).await })
    }

    fn renew(
        &self,
        keys: &[Key],
        expires_unix_secs: u64,
        owner: Owner,
    ) -> Result<Vec<bool>, StoreError> {
        let backends = self.backends();
        let was = match backends.former {
            Some(former) => former.store().renew(keys, expires_unix_secs, owner)?,
            None => vec![false; keys.len()],
        };
        let is = backends.present.store().renew(keys, expires_unix_secs, owner)?;
        Ok(was.into_iter().zip(is).map(|(was, is)| was || is).collect())
    }

    fn shorten(&self, keys: &[Key], expires_unix_secs: u64) -> Result<(), StoreError> {
        let backends = self.backends();
        if let Some(former) = backends.former {
            former.store().shorten(keys, expires_unix_secs)?;
        }
        backends.present.store().shorten(keys, expires_unix_secs)
    }

    fn flush(&self) -> BoxFuture<'static, Result<(), StoreError>> {
        let backends = self.backends();
        Box::pin(async move {
            if let Some(former) = &backends.former {
                former.flush().await?;
            }
            backends.present.flush().await
        })
    }

    fn remove(&self, keys: Vec<Key>) -> BoxFuture<'static, Result<(), StoreError>> {
        let (backends, moving) = (self.backends.clone(), self.moving.clone());
        Box::pin(async move {
            let _moving = moving.lock().await;
            let backends = backends.read().expect("no holder of this lock panics").clone();
            if let Some(former) = backends.former {
                former.store().remove(keys.clone()).await?;
            }
            backends.present.store().remove(keys).await
        })
    }

    fn remove_expired(&self, now_unix_secs: u64) -> BoxFuture<'static, Result<u64, StoreError>> {
        let (backends, moving) = (self.backends.clone(), self.moving.clone());
        Box::pin(async move {
            let _moving = moving.lock().await;
            let backends = backends.read().expect("no holder of this lock panics").clone();
            let removed = backends.present.store().remove_expired(now_unix_secs).await?;
            // A block that was renewed in the present backend only has left the former one.
            match backends.former {
                Some(former) => Ok(removed + former.store().remove_expired(now_unix_secs).await?),
                None => Ok(removed),
            }
        })
    }

    fn usage(&self) -> Usage {
        let backends = self.backends();
        let present = backends.present.store().usage();
        let former = backends.former.map(|former| former.store().usage()).unwrap_or_default();
        Usage {
            blocks: present.blocks + former.blocks,
            block_bytes: present.block_bytes + former.block_bytes,
            disk_bytes: present.disk_bytes + former.disk_bytes,
            capacity_bytes: present.capacity_bytes,
        }
    }

    /// Of the present backend: the former is only read and removed from.
    fn disk_failure(&self) -> Option<DiskFailure> {
        self.backends().present.store().disk_failure()
    }

    fn usage_of(&self, owner: &Owner) -> OwnerUsage {
        let backends = self.backends();
        let present = backends.present.store().usage_of(owner);
        let Some(former) = backends.former else { return present };
        let former = former.store().usage_of(owner);
        OwnerUsage {
            publisher: sum(present.publisher, former.publisher),
            ip: sum(present.ip, former.ip),
        }
    }

    fn owners(&self, limit: usize) -> Owners {
        let backends = self.backends();
        let present = backends.present.store().owners(limit);
        let Some(former) = backends.former else { return present };
        let former = former.store().owners(limit);
        Owners {
            publishers: merge_holdings(present.publishers, former.publishers, limit),
            ips: merge_holdings(present.ips, former.ips, limit),
        }
    }

    /// Of the present backend: what is in the former one is read by moving it.
    fn scrub(
        &self,
        from: Option<Key>,
        budget_bytes: u64,
    ) -> BoxFuture<'static, Result<ScrubStep, StoreError>> {
        self.backends().present.store().scrub(from, budget_bytes)
    }

    fn reclaim(&self, budget_bytes: u64) -> BoxFuture<'static, Result<u64, StoreError>> {
        let backends = self.backends();
        Box::pin(async move {
            let freed = match backends.former {
                Some(former) => former.store().reclaim(budget_bytes).await?,
                None => 0,
            };
            Ok(freed + backends.present.store().reclaim(budget_bytes).await?)
        })
    }
}
