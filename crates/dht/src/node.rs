//! A node's part in the DHT: what it holds, whom it asks, what it answers.
//!
//! The work is split as the paper's figures are: `lookup` fetches (CFS Figure 5), `store_blocks`
//! puts and replicates (§5.1), `serve` answers peers, `repair` keeps the replicas up,
//! `upkeep` drops what has expired and looks for rot.

use std::sync::Arc;
use std::time::Duration;

use atoll_env::{BoxFuture, Env};
use atoll_key::{BlockHash, BlockKind, Key, SignedBlock};
use atoll_net::{CallError, Peer, Refusal, Reply, Request, Service, Transport};
use atoll_overlay::{Node, Overlay, Route};
use atoll_store::{BlockInfo, BlockStore, StoreError, StoredBlock};
use bytes::Bytes;

use crate::blocks::{Blocks, GetError, PutError};
use crate::messages::{self, BlockHeader};
use crate::repair::Repair;
use crate::stats::{Counters, DhtStats};
use crate::status::RepairStatus;

/// How a node's block layer behaves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DhtConfig {
    /// Copies of each block: k. At least 1. CFS §7.3 uses 6; 3 is what file systems of
    /// this kind default to.
    pub replicas: usize,
    /// The lease given to blocks stored by this node's clients.
    pub lease: Duration,
    /// The longest lease accepted from anybody.
    pub max_lease: Duration,
    /// How long a peer may take to answer one call.
    pub call_limit: Duration,
    /// How long a client's fetch may take, all attempts together.
    pub get_limit: Duration,
    /// How long a client's put may take, all attempts together.
    pub put_limit: Duration,
    /// How long fewer nodes than k must be all there are before fewer copies will do.
    pub shrink_after: Duration,
    /// How often neighbours are compared when nothing seems to have changed.
    pub repair_every: Duration,
    /// How long the neighbourhood must be quiet before repair begins.
    pub repair_settle: Duration,
    /// How many bytes a second repair may copy.
    pub repair_bytes_per_sec: u64,
    /// How many bytes a second the scrubber may read.
    pub scrub_bytes_per_sec: u64,
    /// How often expired blocks are looked for.
    pub expire_every: Duration,
}

impl Default for DhtConfig {
    fn default() -> DhtConfig {
        const DAY: u64 = 24 * 3600;
        DhtConfig {
            replicas: 3,
            lease: Duration::from_secs(30 * DAY),
            max_lease: Duration::from_secs(90 * DAY),
            call_limit: Duration::from_secs(10),
            get_limit: Duration::from_secs(20),
            put_limit: Duration::from_secs(60),
            // A guess: longer than a reboot.
            shrink_after: Duration::from_secs(600),
            repair_every: Duration::from_secs(60),
            repair_settle: Duration::from_millis(500),
            // Guesses: repair may take half of a gigabit link, scrubbing must not be noticed.
            repair_bytes_per_sec: 64 << 20,
            scrub_bytes_per_sec: 1 << 20,
            expire_every: Duration::from_secs(3600),
        }
    }
}

/// A block on its way: its description and its bytes.
#[derive(Clone, Debug)]
pub(crate) struct Block {
    pub header: BlockHeader,
    pub bytes: Bytes,
}

/// A node's part in the DHT. Cheap to clone; clones are the same node.
#[derive(Clone)]
pub struct Dht {
    pub(crate) inner: Arc<Inner>,
}

pub(crate) struct Inner {
    pub env: Env,
    pub transport: Arc<dyn Transport>,
    pub overlay: Arc<dyn Overlay>,
    pub store: Arc<dyn BlockStore>,
    pub config: DhtConfig,
    pub counters: Counters,
    pub repair: Repair,
}

impl Dht {
    /// A node's block layer. Nothing runs in the background before [`Dht::start`].
    ///
    /// # Panics
    /// If `config.replicas` is zero.
    pub fn new(
        env: Env,
        transport: Arc<dyn Transport>,
        overlay: Arc<dyn Overlay>,
        store: Arc<dyn BlockStore>,
        config: DhtConfig,
    ) -> Arc<Dht> {
        assert!(config.replicas > 0, "a block has at least one copy");
        let inner = Inner {
            env,
            transport,
            overlay,
            store,
            config,
            counters: Counters::default(),
            repair: Repair::default(),
        };
        Arc::new(Dht { inner: Arc::new(inner) })
    }

    /// Starts repair, expiry and scrubbing.
    pub fn start(&self) {
        let env = &self.inner.env;
        env.spawn(Box::pin(crate::repair::run(self.inner.clone())));
        env.spawn(Box::pin(crate::upkeep::expire(self.inner.clone())));
        env.spawn(Box::pin(crate::upkeep::scrub(self.inner.clone())));
    }

    /// Gives every block held here at least one whole lease from now on, and says how many
    /// there are: for a store that has lost what it knew of renewals. Call it before
    /// [`Dht::start`].
    ///
    /// # Errors
    /// If the store fails.
    pub async fn extend_leases(&self) -> Result<u64, StoreError> {
        crate::upkeep::extend_leases(&self.inner).await
    }

    /// The state of repair.
    pub fn repair_status(&self) -> RepairStatus {
        let neighbourhood = self.inner.overlay.neighbourhood();
        self.inner.repair.status(&neighbourhood, self.inner.config.replicas)
    }

    /// Fetches a content block and says who was asked on the way.
    ///
    /// # Errors
    /// As [`Blocks::get`].
    pub async fn lookup(&self, hash: BlockHash) -> Result<crate::lookup::Fetched, GetError> {
        crate::lookup::get(&self.inner, hash.key()).await
    }

    /// Asks for a round of repair at once rather than when it is due.
    pub fn repair_now(&self) {
        self.inner.repair.kick();
    }

    /// What happened since the node started.
    pub fn stats(&self) -> DhtStats {
        self.inner.counters.snapshot()
    }
}

impl Inner {
    /// This node's place on the ring.
    pub fn me(&self) -> Node {
        self.overlay.neighbourhood().me
    }

    /// When a lease of `lease_secs` from now ends, seconds since 1970.
    pub fn expiry(&self, lease_secs: u64) -> u64 {
        let lease_secs = lease_secs.min(self.config.max_lease.as_secs());
        (self.env.unix_ms() / 1000).saturating_add(lease_secs)
    }

    /// The description of a stored block, for a message.
    pub fn header_of(&self, info: &BlockInfo) -> BlockHeader {
        let now = self.env.unix_ms() / 1000;
        BlockHeader {
            key: info.key,
            kind: info.kind as u8,
            lease_secs: info.expires_unix_secs.saturating_sub(now),
        }
    }

    /// A verified block as the store takes it.
    pub fn to_store(&self, block: &Block, kind: BlockKind, version: u64) -> StoredBlock {
        let info = BlockInfo {
            key: block.header.key,
            kind,
            version,
            expires_unix_secs: self.expiry(block.header.lease_secs),
            len_bytes: u32::try_from(block.bytes.len()).expect("verified blocks are short"),
        };
        StoredBlock { info, bytes: block.bytes.clone() }
    }

    /// Calls a peer; if it seems to have failed, says so to the overlay.
    pub async fn call(&self, to: &Node, request: Request) -> Result<Reply, CallError> {
        let result = self.transport.call(to.peer, request, self.config.call_limit).await;
        if let Err(error) = &result
            && error.is_failure_of_peer()
        {
            self.overlay.alert(&to.peer);
        }
        result
    }

    /// The key's root and its successors, by routing tables or by asking around.
    pub async fn root_list(&self, key: &Key) -> Result<Vec<Node>, String> {
        if let Route::Root(nodes) = self.overlay.route(key, false) {
            return Ok(nodes);
        }
        self.overlay.find_root(key).await.map_err(|e| e.to_string())
    }
}

impl Service for Dht {
    fn handle(&self, from: Peer, request: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        let inner = self.inner.clone();
        Box::pin(async move {
            match request.method {
                messages::LOOKUP_STEP => crate::serve::lookup_step(&inner, request).await,
                messages::PUT => crate::serve::put(&inner, from, request).await,
                messages::RENEW => crate::serve::renew(&inner, request).await,
                messages::FETCH => crate::serve::fetch(&inner, request).await,
                messages::RECONCILE => crate::serve::reconcile(&inner, request).await,
                other => Err(Refusal::new(
                    Refusal::UNKNOWN_METHOD,
                    format!("method {other:#06x} is not known here"),
                )),
            }
        })
    }
}

impl Blocks for Dht {
    fn get(&self, hash: BlockHash) -> BoxFuture<'static, Result<Bytes, GetError>> {
        let inner = self.inner.clone();
        Box::pin(async move { crate::lookup::get(&inner, hash.key()).await.map(|f| f.bytes) })
    }

    fn get_signed(&self, key: Key) -> BoxFuture<'static, Result<SignedBlock, GetError>> {
        let inner = self.inner.clone();
        Box::pin(async move { crate::lookup::get_signed(&inner, key).await })
    }

    fn put(&self, blocks: Vec<(BlockHash, Bytes)>) -> BoxFuture<'static, Result<(), PutError>> {
        let inner = self.inner.clone();
        Box::pin(async move { crate::store_blocks::put_content(&inner, blocks).await })
    }

    fn put_signed(&self, block: SignedBlock) -> BoxFuture<'static, Result<(), PutError>> {
        let inner = self.inner.clone();
        Box::pin(async move { crate::store_blocks::put_signed(&inner, block).await })
    }

    fn renew(
        &self,
        hashes: Vec<BlockHash>,
    ) -> BoxFuture<'static, Result<Vec<BlockHash>, PutError>> {
        let inner = self.inner.clone();
        Box::pin(async move { crate::store_blocks::renew(&inner, hashes).await })
    }
}
