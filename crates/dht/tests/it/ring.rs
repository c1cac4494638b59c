//! A ring of nodes in the simulator, as the tests want it.

use std::sync::Arc;
use std::time::Duration;

use atoll_dht::durable::MemoryState;
use atoll_dht::rpc::{self, Method};
use atoll_dht::{Blocks, Dht, DhtConfig, GetError, PutError, SimulatedKeys};
use atoll_key::{BlockHash, Key};
use atoll_net::{CallError, Peer, Router, Service, Transport};
use atoll_overlay::chord::{Chord, ChordConfig};
use atoll_overlay::{Node, Overlay};
use atoll_sim::{HostConfig, HostId, Sim, SimConfig};
use atoll_store::{BlockInfo, BlockStore, MemoryStore, StoredBlock};
use bytes::Bytes;

pub(crate) const MINUTE: Duration = Duration::from_secs(60);
pub(crate) const HOUR: Duration = Duration::from_secs(3600);

/// Room enough for any test that is not about room.
pub(crate) const ROOMY: u64 = 1 << 30;

/// One node: its parts live as long as its incarnation, its store longer.
pub(crate) struct Member {
    pub host: HostId,
    pub dht: Arc<Dht>,
    pub chord: Arc<Chord>,
    pub store: Arc<dyn BlockStore>,
    /// What survives a restart besides the store.
    pub durable: Arc<MemoryState>,
}

/// Makes one transport of another.
pub(crate) type Via = dyn Fn(Arc<dyn Transport>) -> Arc<dyn Transport>;

pub(crate) struct Ring {
    pub sim: Sim,
    pub members: Vec<Member>,
    pub config: DhtConfig,
    /// How nodes that start from now on look after their places.
    pub chord: ChordConfig,
    /// What nodes' blocks travel by, made of what the simulator gives.
    pub via: Box<Via>,
}

/// Nodes that drop strays as soon as others prove to hold them.
pub(crate) fn prompt() -> DhtConfig {
    DhtConfig { stray_grace: Duration::ZERO, ..DhtConfig::default() }
}

/// A block made of a number.
pub(crate) fn block(n: u32) -> (BlockHash, Bytes) {
    sized_block(n, 100)
}

pub(crate) fn sized_block(n: u32, len: usize) -> (BlockHash, Bytes) {
    let mut bytes = vec![n as u8; len];
    bytes[..4].copy_from_slice(&n.to_be_bytes());
    (BlockHash::of(&bytes), Bytes::from(bytes))
}

impl Ring {
    /// `count` nodes that have joined one after another and settled.
    pub(crate) fn new(seed: u64, count: usize) -> Ring {
        Ring::configured(seed, prompt(), count)
    }

    /// The same with nodes that behave as `config` says.
    pub(crate) fn configured(seed: u64, config: DhtConfig, count: usize) -> Ring {
        Ring::with(SimConfig { seed, ..SimConfig::default() }, config, count)
    }

    pub(crate) fn with(sim: SimConfig, config: DhtConfig, count: usize) -> Ring {
        let via = Box::new(|transport| transport);
        let chord = ChordConfig::default();
        let mut ring = Ring { sim: Sim::new(sim), members: Vec::new(), config, chord, via };
        for _ in 0..count {
            ring.join(Arc::new(MemoryStore::new(ROOMY)));
        }
        ring.settle();
        ring
    }

    /// Adds a node with the given store; it joins through the first.
    pub(crate) fn join(&mut self, store: Arc<dyn BlockStore>) -> usize {
        self.join_as(store, |dht| dht)
    }

    /// Adds a node whose wall clock is off by `clock_skew_ms`.
    pub(crate) fn join_skewed(&mut self, clock_skew_ms: i64) {
        self.join_skewed_with(Arc::new(MemoryStore::new(ROOMY)), clock_skew_ms);
    }

    /// Adds a node with the given store, whose wall clock is off by `clock_skew_ms`.
    pub(crate) fn join_skewed_with(&mut self, store: Arc<dyn BlockStore>, clock_skew_ms: i64) {
        let host = self.sim.add_host(HostConfig { clock_skew_ms, ..HostConfig::default() });
        let member = self.start(host, (store, Arc::default()), |dht| dht);
        self.members.push(member);
    }

    /// Adds a node on a host of this kind.
    pub(crate) fn join_host(&mut self, host: HostConfig) -> usize {
        let host = self.sim.add_host(host);
        let member =
            self.start(host, (Arc::new(MemoryStore::new(ROOMY)), Arc::default()), |dht| dht);
        self.members.push(member);
        self.members.len() - 1
    }

    /// Adds a node whose block service is replaced by what `disguise` makes of it.
    pub(crate) fn join_as(
        &mut self,
        store: Arc<dyn BlockStore>,
        disguise: impl Fn(Arc<dyn Service>) -> Arc<dyn Service>,
    ) -> usize {
        self.join_host_as(HostConfig::default(), store, disguise)
    }

    /// As [`Ring::join_as`], on a host of this kind.
    pub(crate) fn join_host_as(
        &mut self,
        host: HostConfig,
        store: Arc<dyn BlockStore>,
        disguise: impl Fn(Arc<dyn Service>) -> Arc<dyn Service>,
    ) -> usize {
        let host = self.sim.add_host(host);
        let member = self.start(host, (store, Arc::default()), disguise);
        self.members.push(member);
        self.members.len() - 1
    }

    fn start(
        &self,
        host: HostId,
        (store, durable): (Arc<dyn BlockStore>, Arc<MemoryState>),
        disguise: impl Fn(Arc<dyn Service>) -> Arc<dyn Service>,
    ) -> Member {
        let (env, transport) = (self.sim.env(host), self.sim.transport(host));
        let chord = Chord::new(env.clone(), transport.clone(), self.chord.clone());
        let (keys, config) = (SimulatedKeys(transport.local().id), self.config.clone());
        let (keys, transport) = (Arc::new(keys), (self.via)(transport));
        let dht = Dht::new(
            env,
            transport.clone(),
            chord.clone(),
            store.clone(),
            keys,
            durable.clone(),
            config,
        );
        let router = Router::new().route(0x01, chord.clone()).route(0x02, disguise(dht.clone()));
        transport.serve(Arc::new(router));
        // The first that answers counts: one may be out of reach.
        let up = self.members.iter().map(|m| m.host).filter(|other| *other != host);
        let bootstrap: Vec<Peer> =
            up.filter(|other| self.sim.is_up(*other)).map(|other| self.sim.peer(other)).collect();
        match bootstrap.is_empty() {
            true => chord.create(),
            false => {
                let join = || {
                    let joined = chord.join(bootstrap.clone());
                    self.sim.block_on(Duration::from_secs(120), joined).expect("joining ends")
                };
                // Those it is sent to may have died a moment ago. A node tries again.
                let mut joined = join();
                for _ in 0..10 {
                    if joined.is_err() {
                        self.sim.run_for(Duration::from_secs(1));
                        joined = join();
                    }
                }
                joined.expect("one of the others answers");
            }
        }
        dht.start();
        Member { host, dht, chord, store, durable }
    }

    /// Changes how many virtual servers a node runs.
    pub(crate) fn set_virtual_servers(&self, member: usize, count: u16) {
        let chord = self.members[member].chord.clone();
        let changed = async move { chord.set_virtual_servers(count).await };
        let changed = self.sim.block_on(Duration::from_secs(120), changed);
        changed.expect("ends").expect("not too many");
    }

    /// Kills a node's process; its store stays.
    pub(crate) fn crash(&self, member: usize) {
        self.sim.crash(self.members[member].host);
    }

    /// Starts a crashed node again with what its store kept.
    pub(crate) fn restart(&mut self, member: usize) {
        self.restart_as(member, |dht| dht);
    }

    /// As [`Ring::restart`], with a block service as `disguise` makes it.
    pub(crate) fn restart_as(
        &mut self,
        member: usize,
        disguise: impl Fn(Arc<dyn Service>) -> Arc<dyn Service>,
    ) {
        let Member { host, store, durable, .. } = &self.members[member];
        let (host, kept) = (*host, (store.clone(), durable.clone()));
        self.sim.restart(host);
        self.members[member] = self.start(host, kept, disguise);
    }

    pub(crate) fn settle(&self) {
        self.sim.run_for(Duration::from_secs(60));
    }

    /// Runs until every node that is up says that all its blocks have as many copies as there are
    /// nodes for.
    pub(crate) fn until_replicated(&self) {
        // Failures are noticed first, then repaired.
        self.sim.run_for(Duration::from_secs(30));
        let replicated = |_: &Sim| self.up().all(|m| m.dht.repair_status().is_in_step());
        let reached = self.sim.run_until_true(Duration::from_secs(600), replicated);
        assert!(
            reached,
            "repair does not end (seed {}): {:?}",
            self.sim.seed(),
            self.up().map(|m| m.dht.repair_status()).collect::<Vec<_>>()
        );
    }

    pub(crate) fn up(&self) -> impl Iterator<Item = &Member> {
        self.members.iter().filter(|m| self.sim.is_up(m.host))
    }

    pub(crate) fn node(&self, member: usize) -> Node {
        Node::of(self.sim.peer(self.members[member].host))
    }

    pub(crate) fn try_put(
        &self,
        from: usize,
        blocks: Vec<(BlockHash, Bytes)>,
    ) -> Result<(), PutError> {
        let put = self.members[from].dht.put(blocks);
        self.sim.block_on(Duration::from_secs(300), put).expect("puts have deadlines")
    }

    pub(crate) fn put(&self, from: usize, numbers: std::ops::Range<u32>) {
        self.try_put(from, numbers.map(block).collect()).expect("the ring is healthy");
    }

    pub(crate) fn try_get(&self, at: usize, hash: BlockHash) -> Result<Bytes, GetError> {
        let get = self.members[at].dht.get(hash);
        self.sim.block_on(Duration::from_secs(300), get).expect("gets have deadlines")
    }

    /// The nodes that hold `key`, by member number.
    pub(crate) fn holders(&self, key: &Key) -> Vec<usize> {
        let holds = |m: &Member| m.store.info(key).expect("memory does not fail").is_some();
        (0..self.members.len())
            .filter(|i| self.sim.is_up(self.members[*i].host) && holds(&self.members[*i]))
            .collect()
    }

    /// The replica set of `key` as it should be: the first `replicas` live nodes with a
    /// virtual server at or after it, by member number.
    pub(crate) fn replica_set(&self, key: &Key) -> Vec<usize> {
        let up = (0..self.members.len()).filter(|i| self.sim.is_up(self.members[*i].host));
        let mut places: Vec<(Key, usize)> = up
            .flat_map(|i| {
                let seats = self.members[i].chord.neighbourhoods();
                seats.into_iter().map(move |seat| (seat.me.id.key().distance_from(key), i))
            })
            .collect();
        places.sort_unstable();
        let mut set = Vec::new();
        for (_, member) in places {
            if set.len() < self.config.replicas && !set.contains(&member) {
                set.push(member);
            }
        }
        set.sort_unstable();
        set
    }

    /// The live node that is the root of `key`, by member number.
    pub(crate) fn root(&self, key: &Key) -> usize {
        (0..self.members.len())
            .filter(|i| self.sim.is_up(self.members[*i].host))
            .min_by_key(|i| self.node(*i).id.key().distance_from(key))
            .expect("somebody is up")
    }

    /// Asserts that every block is on exactly its replica set.
    pub(crate) fn assert_placed(&self, numbers: std::ops::Range<u32>) {
        for n in numbers {
            let key = block(n).0.key();
            assert_eq!(
                self.holders(&key),
                self.replica_set(&key),
                "block {n}, seed {}",
                self.sim.seed()
            );
        }
    }

    /// Asserts that every block can be read at every node that is up.
    pub(crate) fn assert_readable(&self, numbers: std::ops::Range<u32>) {
        for n in numbers {
            let (hash, bytes) = block(n);
            for at in 0..self.members.len() {
                if self.sim.is_up(self.members[at].host) {
                    let got = self.try_get(at, hash);
                    assert_eq!(
                        got.as_ref(),
                        Ok(&bytes),
                        "block {n} at {at}, seed {}",
                        self.sim.seed()
                    );
                }
            }
        }
    }

    /// Removes blocks from a node's store, as a disk would lose them.
    pub(crate) fn remove(&self, member: usize, keys: Vec<Key>) {
        let removed = self.members[member].store.remove(keys);
        self.sim.block_on(MINUTE, removed).expect("ends").expect("memory");
    }

    /// What a node's store says of a block.
    pub(crate) fn info(&self, member: usize, key: &Key) -> Option<BlockInfo> {
        self.members[member].store.info(key).expect("memory does not fail")
    }

    /// Puts blocks into a node's store, past the node.
    pub(crate) fn store(&self, member: usize, blocks: Vec<StoredBlock>) {
        let stored = self.members[member].store.put(blocks);
        self.sim.block_on(MINUTE, stored).expect("ends").expect("room");
    }

    /// A block from a node's store.
    pub(crate) fn held(&self, member: usize, key: &Key) -> Option<StoredBlock> {
        let held = self.members[member].store.get(key);
        self.sim.block_on(MINUTE, held).expect("ends").expect("memory")
    }

    /// Extends the leases of blocks as their publisher; those that the ring lacks.
    pub(crate) fn renew(
        &self,
        member: usize,
        hashes: Vec<BlockHash>,
    ) -> Result<Vec<BlockHash>, PutError> {
        let renewed = self.members[member].dht.renew(hashes);
        self.sim.block_on(HOUR, renewed).expect("renewals have deadlines")
    }

    /// Calls a node as another peer does.
    pub(crate) fn call<M: Method>(
        &self,
        from: &Arc<dyn Transport>,
        to: usize,
        header: &M,
        parts: Vec<Bytes>,
    ) -> Result<M::Reply, CallError> {
        let request = rpc::to_request(header, parts);
        let call = from.call(self.node(to).peer, request, Duration::from_secs(30));
        let reply = self.sim.block_on(MINUTE, call);
        let reply = reply.expect("calls have deadlines")?;
        Ok(rpc::from_header(&reply.header).expect("well-formed"))
    }

    /// How often one method was called so far.
    pub(crate) fn calls_of(&self, method: u16) -> u64 {
        self.sim.stats().methods.get(&method).map_or(0, |method| method.call_count)
    }

    /// A transport of an outsider that has no part in the ring.
    pub(crate) fn outsider(&self) -> Arc<dyn Transport> {
        let host = self.sim.add_host(HostConfig::default());
        self.sim.transport(host)
    }

    /// Bytes of blocks and headers sent so far by one method.
    pub(crate) fn bytes_of(&self, method: u16) -> u64 {
        let stats = self.sim.stats();
        stats.methods.get(&method).map_or(0, |m| m.request_bytes + m.reply_bytes)
    }
}
