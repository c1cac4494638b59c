//! A node's part in the DHT: what it holds, whom it asks, what it answers.
//!
//! The work is split as the paper's figures are: `lookup` fetches (CFS Figure 5), `store_blocks`
//! puts, `replicas` keeps blocks here and at the successors (§5.1), `serve` answers peers,
//! `repair` keeps the replicas up (`exchange` and `reconcile` compare ranges for it),
//! `upkeep` drops what has expired and looks for rot.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use atoll_env::{BoxFuture, Env};
use atoll_key::{BlockHash, Key, SignedBlock};
use atoll_net::{Peer, Refusal, Reply, Request, Service, Transport};
use atoll_overlay::Overlay;
use atoll_overlay::clock::network_time;
use atoll_store::{BlockInfo, BlockStore, StoreError};
use bytes::Bytes;

use crate::accounting::confirm::Confirmations;
use crate::accounting::quota::{Quota, QuotaConfig, QuotaReport};
use crate::accounting::receipt::Attestor;
use crate::blocks::{Blocks, GetError, PutError};
use crate::cache as path_cache;
use crate::cache::lru::Cache;
use crate::client::get::{self, Fetched};
use crate::client::put;
use crate::client::replica_selection::HedgeBudget;
use crate::client::seen::SeenVersions;
use crate::diversion::Diversion;
use crate::durable::DurableState;
use crate::holdings::pending_removals::Leaving;
use crate::inner::{DhtConfig, Inner};
use crate::lease_clock::{self, LeaseClock};
use crate::placement::present_replicas;
use crate::replication::eviction;
use crate::replication::handoff::{self, Handoff};
use crate::replication::losses::Losses;
use crate::replication::state::Repair;
use crate::replication::status::RepairStatus;
use crate::replication::writes::Writes;
use crate::replication::{pointer_upkeep, repair, upkeep};
use crate::rpc::quorum::Background;
use crate::server;
use crate::server::work_limit::{Limits, WorkLimiter};
use crate::stats::{Counters, DhtStats};

/// A node's part in the DHT. Cheap to clone; clones are the same node.
#[derive(Clone)]
pub struct Dht {
    pub(crate) inner: Arc<Inner>,
}

impl Dht {
    /// A node's block layer. `attestor` signs with the key that `transport` proves; `durable`
    /// is what the node's earlier incarnations left. Nothing
    /// runs in the background before [`Dht::start`].
    ///
    /// # Panics
    /// If `config.replicas` is zero.
    pub fn new(
        env: Env,
        transport: Arc<dyn Transport>,
        overlay: Arc<dyn Overlay>,
        store: Arc<dyn BlockStore>,
        attestor: Arc<dyn Attestor>,
        durable: Arc<dyn DurableState>,
        config: DhtConfig,
    ) -> Arc<Dht> {
        assert!(config.replicas > 0, "a block has at least one copy");
        let mut salt = [0; 32];
        for chunk in salt.chunks_mut(8) {
            chunk.copy_from_slice(&env.random_u64().to_be_bytes());
        }
        let cache = Cache::new(config.cache_bytes, config.cache_asks, salt);
        // Receipts and leases need clocks that agree.
        let env = network_time(env, overlay.clone());
        let limited = config.mechanisms.turns;
        let clock = LeaseClock::resume(&*durable, env.now(), env.unix_ms() / 1000);
        let losses = Losses::remembering(&*durable, env.now());
        let inner = Inner {
            env,
            transport,
            overlay,
            store,
            attestor,
            seen: Arc::new(SeenVersions::remembered(&*durable)),
            diversion: Diversion::new(durable.pointers()),
            clock,
            quota: Quota::new(config.quota),
            confirmations: Confirmations::default(),
            counters: Counters::default(),
            repair: Repair::remembering(&*durable, config.replicas),
            losses,
            handoff: Handoff::default(),
            leaving: Leaving::default(),
            giving_up: futures_util::lock::Mutex::default(),
            cache: Mutex::new(cache),
            hedges: HedgeBudget::default(),
            fetch_times: Arc::default(),
            comparing: WorkLimiter::new(if limited {
                server::reconcile::LIMITS
            } else {
                Limits::NONE
            }),
            proving: WorkLimiter::new(if limited { server::prove::LIMITS } else { Limits::NONE }),
            writes: Writes::default(),
            put_times: Arc::default(),
            under_way: Arc::default(),
            background: Background::default(),
            durable,
            config,
        };
        Arc::new(Dht { inner: Arc::new(inner) })
    }

    /// Starts repair, expiry, scrubbing and the care of diverted copies.
    pub fn start(&self) {
        let env = &self.inner.env;
        env.spawn(Box::pin(lease_clock::run(self.inner.clone())));
        env.spawn(Box::pin(repair::run(self.inner.clone())));
        env.spawn(Box::pin(handoff::run(self.inner.clone())));
        env.spawn(Box::pin(upkeep::expire(self.inner.clone())));
        env.spawn(Box::pin(upkeep::scrub(self.inner.clone())));
        env.spawn(Box::pin(pointer_upkeep::run(self.inner.clone())));
    }

    /// Gives every block held here at least one whole lease from now on, and says how many
    /// there are: for a store that has lost what it knew of renewals. Call it before
    /// [`Dht::start`].
    ///
    /// # Errors
    /// If the store fails.
    pub async fn extend_leases(&self) -> Result<u64, StoreError> {
        upkeep::extend_leases(&self.inner).await
    }

    /// The state of repair.
    pub fn repair_status(&self) -> RepairStatus {
        let served = self.inner.overlay.served_ranges(self.inner.config.replicas);
        let lost = self.inner.losses.report();
        RepairStatus {
            vanished_nodes: lost.nodes,
            vanished_ring_ppm: lost.ring_ppm,
            vanished_since_unix_ms: lost.since_unix_ms,
            ..self.inner.repair.status(&served)
        }
    }

    /// Fetches a content block and says who was asked on the way.
    ///
    /// # Errors
    /// As [`Blocks::get`].
    pub async fn lookup(&self, hash: BlockHash) -> Result<Fetched, GetError> {
        get::get(&self.inner, hash.key()).await
    }

    /// Takes the operator's word that nodes and updates which are not to be found are gone for
    /// good: from now on the nodes that are there now are all that a put counts on, older
    /// versions of signed blocks than those seen before are read again, and replica sets that
    /// have disappeared are no longer told. Without that word a
    /// node never takes fewer than half of a replica set for all of it.
    ///
    /// # Errors
    /// If it cannot be recorded; what the system said, for people.
    pub async fn forget_absent(&self) -> Result<(), String> {
        let inner = &self.inner;
        inner.repair.expect_only(present_replicas(inner));
        inner.seen.forget_all();
        inner.seen.save(&*inner.durable).await?;
        inner.losses.forget();
        inner.losses.remember(&*inner.durable).await;
        match inner.repair.remember_expected(&*inner.durable).await {
            true => Ok(()),
            false => Err("the number of nodes expected could not be saved".to_owned()),
        }
    }

    /// Asks for a round of repair at once rather than when it is due.
    pub fn repair_now(&self) {
        self.inner.repair.kick();
    }

    /// Removes those of the blocks held here that enough others are seen to hold, because there
    /// is no room for them here, and says which they are (TFS §2).
    ///
    /// # Errors
    /// If the store fails.
    pub async fn give_up(&self, blocks: Vec<BlockInfo>) -> Result<Vec<BlockInfo>, StoreError> {
        eviction::give_up(&self.inner, blocks).await
    }

    /// What is used and allowed, for the `limit` publishers and the `limit` addresses for
    /// whom most is kept here (CFS §5.4).
    pub fn quota_report(&self, limit: usize) -> QuotaReport {
        let Inner { quota, store, overlay, .. } = &*self.inner;
        quota.report(&**store, overlay.estimated_peers(), limit)
    }

    /// Sets how much publishers may use from now on. What is kept stays.
    pub fn set_quota(&self, config: QuotaConfig) {
        self.inner.quota.set_config(config);
    }

    /// Sets how much memory the cache may take from now on; 0 for no cache.
    pub fn set_cache_bytes(&self, limit_bytes: u64) {
        path_cache::set_limit(&self.inner, limit_bytes);
    }

    /// Fetches a signed block that a replica had at most `max_age` ago, and at most
    /// [`DhtConfig::signed_cache`]: for readers who may miss an update for so long. A cached
    /// copy will do, and one replica is asked, not all: if replicas differ because an update
    /// is on its way, it may be the older one.
    ///
    /// # Errors
    /// As [`Blocks::get_signed`].
    pub async fn recent_signed(
        &self,
        key: Key,
        max_age: Duration,
    ) -> Result<SignedBlock, GetError> {
        get::recent_signed(&self.inner, key, max_age).await
    }

    /// Why this node's disk does not take blocks, if a write has failed for another reason than
    /// room. It is a replica no longer then but for what it holds: new blocks go to other nodes.
    pub fn disk_trouble(&self) -> Option<String> {
        self.inner.diversion.disk_trouble()
    }

    /// Asks the store whether its disk has failed, also where no put had to wait for it; from then
    /// on [`Dht::disk_trouble`] says so.
    pub fn check_disk(&self) {
        if let Some(failure) = self.inner.store.disk_failure() {
            self.inner.diversion.disk_failed(failure.why);
        }
    }

    /// What happened since the node started.
    pub fn stats(&self) -> DhtStats {
        let (cache_bytes, cache_blocks, cache_evictions) = path_cache::usage(&self.inner);
        let (pointers, held_for_others) = self.inner.diversion.records.counts();
        let counted = self.inner.counters.snapshot();
        DhtStats {
            cache_bytes,
            cache_blocks,
            cache_evictions,
            pointers,
            held_for_others,
            ..counted
        }
    }
}

impl Service for Dht {
    fn handle(&self, from: Peer, request: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        let inner = self.inner.clone();
        Box::pin(async move { server::dispatch(&inner, from, request).await })
    }
}

impl Blocks for Dht {
    fn get(&self, hash: BlockHash) -> BoxFuture<'static, Result<Bytes, GetError>> {
        let inner = self.inner.clone();
        Box::pin(async move { get::get(&inner, hash.key()).await.map(|f| f.bytes) })
    }

    fn get_signed(&self, key: Key) -> BoxFuture<'static, Result<SignedBlock, GetError>> {
        let inner = self.inner.clone();
        Box::pin(async move { get::get_signed(&inner, key).await })
    }

    fn put(&self, blocks: Vec<(BlockHash, Bytes)>) -> BoxFuture<'static, Result<(), PutError>> {
        let inner = self.inner.clone();
        Box::pin(async move { put::put_content(&inner, blocks).await })
    }

    fn put_signed(&self, block: SignedBlock) -> BoxFuture<'static, Result<(), PutError>> {
        let inner = self.inner.clone();
        Box::pin(async move { put::put_signed(&inner, block).await })
    }

    fn renew(
        &self,
        hashes: Vec<BlockHash>,
    ) -> BoxFuture<'static, Result<Vec<BlockHash>, PutError>> {
        let inner = self.inner.clone();
        Box::pin(async move { put::renew(&inner, hashes, false).await })
    }

    fn renew_or_lack(
        &self,
        hashes: Vec<BlockHash>,
    ) -> BoxFuture<'static, Result<Vec<BlockHash>, PutError>> {
        let inner = self.inner.clone();
        Box::pin(async move { put::renew(&inner, hashes, true).await })
    }
}
