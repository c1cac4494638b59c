//! Simulated nodes for the other modules.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use atoll_key::{Key, NodeId};
use atoll_net::{CallError, Peer, Reply, Request, Router};
use atoll_overlay::checker::{Violation, check_base, check_ideal, check_ring};
use atoll_overlay::chord::messages::FAMILY;
use atoll_overlay::chord::ring::state::ChordState;
use atoll_overlay::chord::{Chord, ChordConfig, JoinError};
use atoll_overlay::walk::{Found, WalkError};
use atoll_overlay::{Neighbourhood, Node, Overlay, VirtualServerId};
use atoll_sim::{HostConfig, HostId, Latency, Sim, SimConfig};
use bytes::Bytes;

pub(crate) const MINUTE: Duration = Duration::from_secs(60);

type Chords = Arc<Mutex<BTreeMap<HostId, Arc<Chord>>>>;

/// A simulated network and the nodes that run on it.
pub(crate) struct Cluster {
    pub sim: Sim,
    pub config: ChordConfig,
    chords: Chords,
}

/// Latency of a LAN, so that a round trip is far below a period.
pub(crate) fn lan(seed: u64) -> SimConfig {
    SimConfig { seed, latency: Latency::Flat(Duration::from_millis(1)), ..SimConfig::default() }
}

impl Cluster {
    pub(crate) fn new(sim: SimConfig, config: ChordConfig) -> Cluster {
        Cluster { sim: Sim::new(sim), config, chords: Arc::default() }
    }

    /// A node that is on no ring.
    pub(crate) fn add(&self) -> HostId {
        self.add_with(self.config.virtual_servers)
    }

    /// A node of so many virtual servers that is on no ring.
    pub(crate) fn add_with(&self, virtual_servers: u16) -> HostId {
        let host = self.sim.add_host(HostConfig::default());
        let config = ChordConfig { virtual_servers, ..self.config.clone() };
        let chord = Chord::new(self.sim.env(host), self.sim.transport(host), config);
        self.serve(host, chord);
        host
    }

    /// The ring positions of a host.
    pub(crate) fn places(&self, host: HostId) -> Vec<Node> {
        let (peer, profile) = (self.sim.peer(host), self.config.profile);
        let place = |index| Node::at(peer, VirtualServerId { profile, index });
        (0..self.config.virtual_servers).map(place).collect()
    }

    pub(crate) fn serve(&self, host: HostId, chord: Arc<Chord>) {
        self.sim.transport(host).serve(Arc::new(Router::new().route(FAMILY, chord.clone())));
        self.chords.lock().unwrap().insert(host, chord);
    }

    /// `count` nodes on a ring at rest. Their upkeep runs only if `started`.
    pub(crate) fn perfect(
        sim: SimConfig,
        config: ChordConfig,
        count: usize,
        started: bool,
    ) -> Cluster {
        let cluster = Cluster::new(sim, config);
        let hosts = cluster.sim.add_hosts(count, &HostConfig::default());
        let mut ring: Vec<Node> = hosts.iter().flat_map(|h| cluster.places(*h)).collect();
        ring.sort_unstable_by_key(|n| n.id);
        for host in hosts {
            let length = cluster.config.list_length();
            let places = cluster.places(host).into_iter();
            let states = places.map(|me| ChordState::perfect(me, &ring, length)).collect();
            let (env, transport) = (cluster.sim.env(host), cluster.sim.transport(host));
            let chord = Chord::with_states(env, transport, cluster.config.clone(), states);
            chord.check_invariants();
            cluster.serve(host, chord.clone());
            if started {
                chord.start();
            }
        }
        cluster
    }

    /// A first node and `count - 1` that join through it, one after the other.
    pub(crate) fn grown(sim: SimConfig, config: ChordConfig, count: usize) -> Cluster {
        let cluster = Cluster::new(sim, config);
        let first = cluster.add();
        cluster.chord(first).create();
        for _ in 1..count {
            let host = cluster.add();
            cluster.join(host, &[first]).unwrap();
        }
        cluster
    }

    pub(crate) fn chord(&self, host: HostId) -> Arc<Chord> {
        self.chords.lock().unwrap()[&host].clone()
    }

    pub(crate) fn peer(&self, host: HostId) -> Peer {
        self.sim.peer(host)
    }

    pub(crate) fn hosts(&self) -> Vec<HostId> {
        self.chords.lock().unwrap().keys().copied().collect()
    }

    pub(crate) fn join(&self, host: HostId, via: &[HostId]) -> Result<(), JoinError> {
        let via = via.iter().map(|h| self.peer(*h)).collect();
        let chord = self.chord(host);
        self.sim.block_on(MINUTE, async move { chord.join(via).await }).unwrap()
    }

    /// Starts a join and does not wait for it.
    pub(crate) fn join_in_background(&self, host: HostId, via: HostId) {
        let (chord, via) = (self.chord(host), self.peer(via));
        self.sim.env(host).spawn(Box::pin(async move {
            // It may fail where the bootstrap node crashes meanwhile.
            let _ = chord.join(vec![via]).await;
        }));
    }

    /// Has `from` call a node.
    pub(crate) fn call(
        &self,
        from: HostId,
        to: HostId,
        method: u16,
        header: Bytes,
    ) -> Result<Reply, CallError> {
        let request = Request { method, header, parts: Vec::new() };
        let call = self.sim.transport(from).call(self.peer(to), request, MINUTE);
        self.sim.block_on(MINUTE * 2, call).unwrap()
    }

    /// Has `from` call a node, and does not wait for the answer.
    pub(crate) fn send(&self, from: HostId, to: HostId, method: u16, header: Bytes) {
        let request = Request { method, header, parts: Vec::new() };
        let call = self.sim.transport(from).call(self.peer(to), request, MINUTE);
        self.sim.env(from).spawn(Box::pin(async move {
            let _ = call.await;
        }));
    }

    /// The root of `key` as a node finds it, with the trace.
    pub(crate) fn find_root(&self, host: HostId, key: Key) -> Result<Found<Vec<Node>>, WalkError> {
        let chord = self.chord(host);
        let walk = async move { chord.find_root_traced(&key).await };
        self.sim.block_on(MINUTE, walk).unwrap()
    }

    /// The mean of calls that lookups by nodes at random take; all find the root, and no node
    /// fails.
    pub(crate) fn mean_calls(&self, lookups: u64) -> f64 {
        let hosts = self.hosts();
        let mut dice = Dice(7);
        let mut calls = 0;
        for key in keys(lookups) {
            let found = self.find_root(hosts[dice.below(hosts.len())], key).unwrap();
            assert_eq!(found.value[0].id, self.root(&key));
            assert_eq!(found.trace.failures(), 0);
            calls += found.trace.calls();
        }
        calls as f64 / lookups as f64
    }

    pub(crate) fn crash(&self, host: HostId) {
        self.sim.crash(host);
        self.chords.lock().unwrap().remove(&host);
    }

    pub(crate) fn crash_silently(&self, host: HostId) {
        self.sim.crash_silently(host);
        self.chords.lock().unwrap().remove(&host);
    }

    pub(crate) fn leave(&self, host: HostId) {
        let chord = self.chord(host);
        self.sim.block_on(MINUTE, async move { chord.leave().await }).unwrap();
        self.crash(host);
    }

    pub(crate) fn live(&self) -> Vec<Neighbourhood> {
        live(&self.chords)
    }

    pub(crate) fn ideal(&self) -> Result<(), Violation> {
        check_ideal(&self.live(), self.config.list_length())
    }

    /// Runs until every table is right; how long that took.
    pub(crate) fn run_until_ideal(&self, limit: Duration) -> Duration {
        let start = self.sim.now();
        let tick = Duration::from_millis(20);
        while self.ideal().is_err() {
            assert!(
                self.sim.now().since(start) < limit,
                "seed {}: not at rest after {limit:?}: {}",
                self.sim.seed(),
                self.ideal().unwrap_err()
            );
            self.sim.run_for(tick);
        }
        self.sim.now().since(start)
    }

    /// Has the invariants of the ring asserted after every step from now on.
    pub(crate) fn watch(&self, base: Vec<NodeId>) {
        let chords = self.chords.clone();
        let length = self.config.list_length();
        let mut checked = None;
        self.sim.step_hook(move |sim, step| {
            let epochs: Vec<(HostId, u64)> =
                chords.lock().unwrap().iter().map(|(h, c)| (*h, c.epoch())).collect();
            // A verdict stands until some table or the set of live nodes changes.
            if checked.as_ref() == Some(&epochs) {
                return;
            }
            checked = Some(epochs);
            let live = live(&chords);
            let verdict = check_ring(&live, length).map(drop);
            if let Err(violation) = verdict.and_then(|()| check_base(&live, &base)) {
                panic!("seed {} at {:?}, {step:?}: {violation}", sim.seed(), sim.now());
            }
            for chord in chords.lock().unwrap().values() {
                chord.check_invariants();
            }
        });
    }

    /// The live node that should be the root of `key` (CFS §4.1).
    pub(crate) fn root(&self, key: &Key) -> NodeId {
        let ids: Vec<NodeId> = self.live().iter().filter(|n| n.joined).map(|n| n.me.id).collect();
        ids.into_iter().min_by_key(|id| id.key().distance_from(key)).unwrap()
    }

    pub(crate) fn run_secs(&self, secs: u64) {
        self.sim.run_for(Duration::from_secs(secs));
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.sim.clear_hooks();
        self.sim.shut_down();
    }
}

fn live(chords: &Chords) -> Vec<Neighbourhood> {
    chords.lock().unwrap().values().flat_map(|c| c.neighbourhoods()).collect()
}

/// Keys spread over the circle.
pub(crate) fn keys(count: u64) -> Vec<Key> {
    (0..count).map(|n| atoll_key::BlockHash::of(&n.to_be_bytes()).key()).collect()
}

/// A small generator of random numbers for tests.
pub(crate) struct Dice(pub u64);

impl Dice {
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        // splitmix64
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % bound as u64) as usize
    }
}
