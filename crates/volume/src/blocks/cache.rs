//! Blocks in memory, by hash. The block of a hash never changes, so nothing here is ever
//! invalidated; the least useful blocks go when the cache is full (CFS §5.2 keeps blocks
//! by LRU; quick_cache's S3-FIFO keeps directories better through a long sequential read).
//!
//! A block that several readers ask for at once is fetched once. The fetch is cancelled if all
//! of them give up. [`Pace`] limits how many fetches run at once.

use std::collections::BTreeMap;
use std::hash::{BuildHasherDefault, DefaultHasher};
use std::sync::{Arc, Mutex, MutexGuard};

use atoll_dht::{Blocks, GetError, Wanted as Version};
use atoll_env::{BoxFuture, Env, Instant};
use atoll_key::BlockHash;
use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::future::{Shared, WeakShared};
use quick_cache::sync::{Cache, DefaultLifecycle};
use quick_cache::{OptionsBuilder, Weighter};

use super::error::BlockError;
use super::form::BlockForm;
use super::pace::{Pace, Wanted};
use crate::blocks::window::Limits;
use crate::format::{DirectoryBlock, DirectoryEntry, Nodes};

/// The share of the cache that directory blocks, kept decoded, may take: a quarter.
const DIRECTORY_SHARE: u64 = 4;

/// About how long a directory block is, bytes.
const DIRECTORY_BYTES: u64 = 28 << 10;

/// Not seeded at random: a simulated run evicts the same blocks each time.
type FixedState = BuildHasherDefault<DefaultHasher>;

type Fetch = BoxFuture<'static, Result<Bytes, BlockError>>;

#[derive(Clone)]
struct ByBytes;

/// What a cached block costs besides its bytes.
const OVERHEAD_BYTES: u64 = 128;

impl Weighter<BlockHash, Bytes> for ByBytes {
    fn weight(&self, _: &BlockHash, bytes: &Bytes) -> u64 {
        bytes.len() as u64 + OVERHEAD_BYTES
    }
}

#[derive(Clone)]
struct ByMemory;

impl Weighter<BlockHash, Arc<DirectoryBlock>> for ByMemory {
    fn weight(&self, _: &BlockHash, block: &Arc<DirectoryBlock>) -> u64 {
        // Names are slices of the encoded block, which stays in memory with them; an
        // encoded node is some 100 bytes, the decoded one less than twice that.
        let nodes = match &block.nodes {
            Nodes::Leaf(entries) => entries.len(),
            Nodes::Interior(children) => children.len(),
        };
        nodes as u64 * (size_of::<DirectoryEntry>() as u64 + 100) + OVERHEAD_BYTES
    }
}

/// See the module.
pub(crate) struct BlockCache {
    env: Env,
    ring: Arc<Ring>,
    raw: Cache<BlockHash, Bytes, ByBytes, FixedState>,
    directories: Cache<BlockHash, Arc<DirectoryBlock>, ByMemory, FixedState>,
    fetching: Mutex<Fetching>,
}

/// Where blocks come from, and how they are opened.
struct Ring {
    blocks: Arc<dyn Blocks>,
    pace: Arc<Pace>,
    form: BlockForm,
    env: Env,
    outage: Mutex<Option<Outage>>,
}

/// Blocks cannot be asked for: the local node is gone, or the ring does not answer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Outage {
    /// Since when none was answered.
    pub since: Instant,
    /// What was said first.
    pub reason: String,
}

impl Ring {
    async fn get(&self, hash: BlockHash, wanted: Wanted) -> Result<Bytes, BlockError> {
        let permit = self.pace.enter(wanted).await;
        let fetched = self.blocks.get_block(self.form.id(&hash), Version::Newest).await;
        let fetched = fetched.map(|held| held.bytes);
        self.watch(&fetched);
        permit.ended(fetched.as_ref().map(Bytes::len));
        let bytes = fetched.map_err(BlockError::Fetch)?;
        self.form.open(bytes).map_err(BlockError::bad(hash))
    }
}

impl Ring {
    /// Notes whether blocks can be asked for, and logs when that changes: one line for all
    /// that fails meanwhile.
    fn watch(&self, fetched: &Result<Bytes, GetError>) {
        let outage = || self.outage.lock().expect("no holder of this lock panics");
        match fetched {
            Err(GetError::Unavailable { told, .. }) => {
                {
                    let mut outage = outage();
                    if outage.is_some() {
                        return;
                    }
                    *outage = Some(Outage { since: self.env.now(), reason: told.clone() });
                }
                tracing::warn!("blocks cannot be fetched: {told}");
            }
            Ok(_) | Err(GetError::NotFound { .. }) => {
                let past = outage().take();
                if let Some(past) = past {
                    let secs = self.env.now().since(past.since).as_secs();
                    tracing::info!("blocks can be fetched again, after {secs} s");
                }
            }
            Err(_) => {}
        }
    }
}

#[derive(Default)]
struct Fetching {
    by_hash: BTreeMap<BlockHash, (u64, WeakShared<Fetch>)>,
    next_id: u64,
}

impl BlockCache {
    /// A cache of at most `capacity_bytes` of blocks, which the ring has in a form.
    pub(crate) fn new(
        env: Env,
        (blocks, form): (Arc<dyn Blocks>, BlockForm),
        capacity_bytes: u64,
    ) -> Arc<BlockCache> {
        let options = |bytes: u64, typical: u64| {
            OptionsBuilder::new()
                .shards(1)
                .estimated_items_capacity((bytes / typical).clamp(16, 1 << 20) as usize)
                .weight_capacity(bytes)
                // Blocks read ahead are new, and must outlive blocks read before them:
                // half of the cache is for blocks seen once.
                .hot_allocation(0.5)
                .build()
                .expect("all that must be set is set")
        };
        let for_directories = capacity_bytes / DIRECTORY_SHARE;
        let pace = Pace::new(env.clone(), Limits::default());
        Arc::new(BlockCache {
            ring: Arc::new(Ring { blocks, pace, form, env: env.clone(), outage: Mutex::default() }),
            env,
            raw: Cache::with_options(
                options(capacity_bytes - for_directories, 32 << 10),
                ByBytes,
                FixedState::default(),
                DefaultLifecycle::default(),
            ),
            directories: Cache::with_options(
                options(for_directories, 64 << 10),
                ByMemory,
                FixedState::default(),
                DefaultLifecycle::default(),
            ),
            fetching: Mutex::default(),
        })
    }

    /// A block's bytes, from memory or the ring.
    pub(crate) async fn get(
        self: &Arc<Self>,
        hash: BlockHash,
        wanted: Wanted,
    ) -> Result<Bytes, BlockError> {
        if let Some(bytes) = self.raw.get(&hash) {
            return Ok(bytes);
        }
        let fetch = self.fetch(hash, wanted);
        if let Wanted::Soon(_) = wanted {
            // The fetch must go on, and give its permit back, while its caller is not polled.
            self.drive(fetch.clone());
        }
        fetch.await
    }

    /// Since when and why blocks cannot be asked for, if the last one could not.
    pub(crate) fn outage(&self) -> Option<Outage> {
        self.ring.outage.lock().expect("no holder of this lock panics").clone()
    }

    /// What may be on its way at once now, bytes.
    pub(crate) fn window_bytes(&self) -> u64 {
        self.ring.pace.window_bytes()
    }

    /// A block's bytes, not cached: for callers that read everything once.
    /// The caller must poll this, since others wait for its place.
    pub(crate) async fn get_once(
        self: &Arc<Self>,
        hash: BlockHash,
        wanted: Wanted,
    ) -> Result<Bytes, BlockError> {
        if let Some(bytes) = self.raw.get(&hash) {
            return Ok(bytes);
        }
        self.ring.get(hash, wanted).await
    }

    /// Keeps a block that was just written.
    pub(crate) fn insert(&self, hash: BlockHash, bytes: Bytes) {
        self.raw.insert(hash, bytes);
    }

    /// The hash under which the ring would have a block of these contents.
    pub(crate) fn hash_of(&self, bytes: &[u8]) -> BlockHash {
        self.ring.form.hash_of(bytes)
    }

    /// How the ring has the blocks.
    pub(crate) fn form(&self) -> &BlockForm {
        &self.ring.form
    }

    /// A directory block, decoded.
    pub(crate) async fn directory(
        self: &Arc<Self>,
        hash: BlockHash,
    ) -> Result<Arc<DirectoryBlock>, BlockError> {
        if let Some(block) = self.directories.get(&hash) {
            return Ok(block);
        }
        let bytes = self.get(hash, Wanted::Now(DIRECTORY_BYTES)).await?;
        let block = DirectoryBlock::decode(&bytes).map_err(BlockError::bad(hash))?;
        let block = Arc::new(block);
        self.directories.insert(hash, block.clone());
        self.raw.remove(&hash);
        Ok(block)
    }

    /// Begins to fetch a directory block that will be wanted soon. Errors are left to who
    /// wants it.
    pub(crate) fn prefetch(self: &Arc<Self>, hash: BlockHash) {
        if self.raw.contains_key(&hash) || self.directories.contains_key(&hash) {
            return;
        }
        self.drive(self.fetch(hash, Wanted::Soon(DIRECTORY_BYTES)));
    }

    fn drive(&self, fetch: Shared<Fetch>) {
        self.env.spawn(Box::pin(async move {
            let _ = fetch.await;
        }));
    }

    /// Time and tasks.
    pub(crate) fn env(&self) -> &Env {
        &self.env
    }

    /// Runs `work` beside everything else.
    pub(crate) fn spawn(&self, work: BoxFuture<'static, ()>) {
        self.env.spawn(work);
    }

    /// The fetch of a block that is under way, or a new one.
    fn fetch(self: &Arc<Self>, hash: BlockHash, wanted: Wanted) -> Shared<Fetch> {
        let mut fetching = self.fetching();
        if let Some(fetch) = fetching.by_hash.get(&hash).and_then(|(_, weak)| weak.upgrade()) {
            return fetch;
        }
        if let Some(bytes) = self.raw.peek(&hash) {
            // It came between the caller's look and this one.
            let ready: Fetch = Box::pin(async move { Ok(bytes) });
            return ready.shared();
        }
        let id = fetching.next_id;
        fetching.next_id += 1;
        let entry = Forget { cache: self.clone(), hash, id };
        let fetch: Fetch = Box::pin(async move {
            let cache = &entry.cache;
            let bytes = cache.ring.get(entry.hash, wanted).await?;
            cache.raw.insert(entry.hash, bytes.clone());
            Ok(bytes)
        });
        let fetch = fetch.shared();
        let weak = fetch.downgrade().expect("it has not been polled");
        fetching.by_hash.insert(hash, (id, weak));
        fetch
    }

    fn fetching(&self) -> MutexGuard<'_, Fetching> {
        self.fetching.lock().expect("no holder of this lock panics")
    }
}

/// Takes a fetch off the list when it ends or no caller wants it.
struct Forget {
    cache: Arc<BlockCache>,
    hash: BlockHash,
    id: u64,
}

impl Drop for Forget {
    fn drop(&mut self) {
        let mut fetching = self.cache.fetching();
        if fetching.by_hash.get(&self.hash).is_some_and(|(id, _)| *id == self.id) {
            fetching.by_hash.remove(&self.hash);
        }
    }
}
