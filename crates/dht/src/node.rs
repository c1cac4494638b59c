//! A node's part in the DHT: its parts wired together, each above those that it needs (the picture
//! is in `lib.rs`).

use std::sync::Arc;

use atoll_env::{BoxFuture, Env};
use atoll_key::kinds::Release;
use atoll_key::{BlockHash, BlockId, Key};
use atoll_net::{Peer, Refusal, Reply, Request, Service, Transport};
use atoll_overlay::Overlay;
use atoll_overlay::clock::network_time;
use atoll_store::{BlockInfo, BlockStore, StoreError};
use futures_util::future::join;

use crate::accounting::Accounting;
use crate::accounting::quota::{QuotaConfig, QuotaReport};
use crate::accounting::receipt::Attestor;
use crate::blocks::{
    Blocks, GetError, HeldBlock, LeaseRenewal, NewBlock, PutError, Renewed, RingRoom, Wanted,
};
use crate::cache::PathCache;
use crate::client::get::{self, Fetched};
use crate::client::inspect::{self, Replica, Uses};
use crate::client::{Client, get_mutable, known_sets, lock_leases, put, release, renew, room};
use crate::config::DhtConfig;
use crate::context::Context;
use crate::diversion::Diversion;
use crate::durable::DurableState;
use crate::expected_replicas::ExpectedReplicas;
use crate::holdings::{Holdings, ring_watch};
use crate::lease_clock::LeaseClock;
use crate::lease_upkeep;
use crate::locks::{LockGrant, LockLease, LockRefusal};
use crate::most_peers::MostPeers;
use crate::replication::status::RepairStatus;
use crate::replication::{
    Replication, eviction, handoff, pointer_upkeep, released, repair, upkeep,
};
use crate::rpc::Rpc;
use crate::server::{self, Server};
use crate::stats::{Counters, DhtStats};

/// A node's part in the DHT. Cheap to clone; clones are the same node.
#[derive(Clone)]
pub struct Dht {
    replication: Arc<Replication>,
    server: Arc<Server>,
    client: Arc<Client>,
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
        // Receipts and leases need clocks that agree.
        let env = network_time(env, overlay.clone());
        let context = Context {
            clock: LeaseClock::resume(&*durable, env.now(), env.unix_ms() / 1000),
            expected: ExpectedReplicas::remembering(&*durable, config.replicas),
            most_peers: MostPeers::remembering(&*durable),
            counters: Counters::default(),
            env,
            transport,
            overlay,
            store,
            durable,
            config,
        };
        let rpc = Arc::new(Rpc::new(context));
        let holdings = Arc::new(Holdings::new(rpc.clone()));
        let accounting = Arc::new(Accounting::new(holdings, attestor));
        let replication = Arc::new(Replication::new(Arc::new(Diversion::new(accounting))));
        let cache = Arc::new(PathCache::new(rpc.clone()));
        let server = Arc::new(Server::new(replication.clone(), cache));
        let itself = Arc::downgrade(&server);
        rpc.answer_own_by(Box::new(move |request| {
            let server = itself.upgrade();
            Box::pin(async move {
                let stopped = || Refusal::new(Refusal::INTERNAL, "the node has stopped");
                let server = server.ok_or_else(stopped)?;
                server::dispatch(&server, server.transport.local(), request).await
            })
        }));
        let client = Arc::new(Client::new(server.clone()));
        Arc::new(Dht { replication, server, client })
    }

    /// Starts repair, expiry, scrubbing and the care of diverted copies.
    pub fn start(&self) {
        let (env, replication, client) = (&self.client.env, &self.replication, self.client.clone());
        let fetch: repair::FetchBlock = Arc::new(move |key| {
            let client = client.clone();
            Box::pin(async move { Ok(get::find(&client, key, false).await?.block) })
        });
        let rpc: &Arc<Rpc> = replication;
        env.spawn(Box::pin(lease_upkeep::run(rpc.clone())));
        env.spawn(Box::pin(repair::run(replication.clone(), fetch)));
        env.spawn(Box::pin(handoff::run(replication.clone())));
        let (expire, remove) =
            (upkeep::expire(replication.clone()), released::run(replication.clone()));
        env.spawn(Box::pin(async {
            join(expire, remove).await;
        }));
        env.spawn(Box::pin(upkeep::scrub(replication.clone())));
        env.spawn(Box::pin(pointer_upkeep::run(replication.clone())));
        let holdings: &Arc<Holdings> = replication;
        env.spawn(Box::pin(ring_watch::run(holdings.clone())));
    }

    /// Gives every block held here at least one whole lease from now on, and says how many
    /// there are: for a store that has lost what it knew of renewals. Call it before
    /// [`Dht::start`].
    ///
    /// # Errors
    /// If the store fails.
    pub async fn extend_leases(&self) -> Result<u64, StoreError> {
        lease_upkeep::extend_leases(&self.client).await
    }

    /// The state of repair.
    pub fn repair_status(&self) -> RepairStatus {
        self.replication.status()
    }

    /// Fetches a content block and says which nodes were asked on the way.
    ///
    /// # Errors
    /// As [`Blocks::get`].
    pub async fn lookup(&self, hash: BlockHash) -> Result<Fetched, GetError> {
        get::get(&self.client, hash.key()).await
    }

    /// Which nodes should hold each of some blocks, and what each of them says of it; or why its replicas were not
    /// found.
    pub async fn replicas(&self, keys: Vec<Key>) -> Vec<Result<Vec<Replica>, String>> {
        inspect::replicas(&self.client, keys).await
    }

    /// Which nodes use a mutable block, and the lock that stands where it does.
    ///
    /// # Errors
    /// If the block's replicas are not found.
    pub async fn uses(&self, key: Key, lock: Key) -> Result<Uses, String> {
        inspect::uses(&self.client, key, lock).await
    }

    /// Takes the operator's word that nodes and updates which are not to be found are gone for
    /// good: from now on the nodes that are there now are all that a put counts on, older
    /// versions of signed blocks than those seen before are read again, and replica sets that
    /// have disappeared are no longer told; locks need more than half of the nodes that are there. Without that word a
    /// node never takes fewer than half of a replica set for all of it.
    ///
    /// # Errors
    /// If it cannot be recorded; what the system said, for people.
    pub async fn forget_absent(&self) -> Result<(), String> {
        self.client.forget_seen().await?;
        self.replication.forget_absent().await
    }

    /// Asks for a round of repair at once rather than when it is due.
    pub fn repair_now(&self) {
        self.client.requests.kick();
    }

    /// Removes those of the blocks held here that enough others are seen to hold, because there
    /// is no room for them here, and says which they are (TFS §2).
    ///
    /// # Errors
    /// If the store fails.
    pub async fn give_up(&self, blocks: Vec<BlockInfo>) -> Result<Vec<BlockInfo>, StoreError> {
        eviction::give_up(&self.replication, blocks).await
    }

    /// What is used and allowed, for the `limit` publishers and the `limit` addresses for
    /// whom most is kept here (CFS §5.4).
    pub fn quota_report(&self, limit: usize) -> QuotaReport {
        let peers = self.client.overlay.estimated_peers();
        self.client.quota.report(&*self.client.store, peers, limit)
    }

    /// Sets how much publishers may use from now on. What is kept stays.
    pub fn set_quota(&self, config: QuotaConfig) {
        self.client.quota.set_config(config);
    }

    /// Sets how much memory the cache may take from now on; 0 for no cache.
    pub fn set_cache_bytes(&self, limit_bytes: u64) {
        self.server.cache.set_limit(limit_bytes);
    }

    /// Why this node's disk does not take blocks, if a write has failed for another reason than
    /// room. It is a replica no longer then but for what it holds: new blocks go to other nodes.
    pub fn disk_trouble(&self) -> Option<String> {
        self.client.headroom.disk_trouble()
    }

    /// Asks the store whether its disk has failed, also where no put had to wait for it; from then
    /// on [`Dht::disk_trouble`] says so.
    pub fn check_disk(&self) {
        if let Some(failure) = self.client.store.disk_failure() {
            self.client.headroom.disk_failed(failure.why);
        }
    }

    /// What happened since the node started.
    pub fn stats(&self) -> DhtStats {
        let (cache_bytes, cache_blocks, cache_evictions) = self.server.cache.usage();
        let (pointers, held_for_others) = self.client.pointers.counts();
        let counted = self.client.counters.snapshot();
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
        let server = self.server.clone();
        Box::pin(async move { server::dispatch(&server, from, request).await })
    }
}

impl Blocks for Dht {
    fn get_block(
        &self,
        id: BlockId,
        wanted: Wanted,
    ) -> BoxFuture<'static, Result<HeldBlock, GetError>> {
        let client = self.client.clone();
        Box::pin(async move {
            if id.kind.is_mutable() {
                return get_mutable::get_mutable(&client, id, wanted).await;
            }
            if wanted.least() > 0 {
                let told = "a block that never changes has one version, 0".to_owned();
                return Err(GetError::Unavailable { key: id.key, told });
            }
            let fetched = get::get(&client, id.key).await?;
            Ok(HeldBlock { version: 0, bytes: fetched.bytes })
        })
    }

    fn put_blocks(&self, blocks: Vec<NewBlock>) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        let client = self.client.clone();
        Box::pin(async move { put::put_blocks(&client, blocks).await })
    }

    fn renew_blocks(
        &self,
        renewal: LeaseRenewal,
    ) -> BoxFuture<'static, Vec<Result<Renewed, PutError>>> {
        let client = self.client.clone();
        Box::pin(async move { renew::renew_blocks(&client, renewal).await })
    }

    fn release_blocks(&self, release: Release) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        let client = self.client.clone();
        Box::pin(async move { release::release_blocks(&client, release).await })
    }

    fn watch(
        &self,
        id: BlockId,
        seen: u64,
    ) -> BoxFuture<'static, Result<Option<HeldBlock>, GetError>> {
        let client = self.client.clone();
        Box::pin(async move { get_mutable::watch(&client, id, seen).await })
    }

    fn put_in_order(&self, blocks: Vec<NewBlock>) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        let client = self.client.clone();
        Box::pin(async move { put::put_in_order(&client, blocks).await })
    }

    fn same_set_until(&self, key: Key) -> BoxFuture<'static, Option<Key>> {
        let until = known_sets::same_set_until(&self.client, &key);
        Box::pin(async move { until })
    }

    fn room(&self) -> BoxFuture<'static, Option<RingRoom>> {
        let client = self.client.clone();
        Box::pin(async move { room::room(&client).await })
    }

    fn lock_lease(&self, ask: LockLease) -> BoxFuture<'static, Result<LockGrant, LockRefusal>> {
        let client = self.client.clone();
        Box::pin(async move { lock_leases::ask(&client, ask).await })
    }
}
