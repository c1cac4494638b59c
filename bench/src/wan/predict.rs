//! The same downloads in the simulator: what they should take.
//!
//! The nodes' own code, with the real nodes' identities and so their places on the ring,
//! the same round trips, rates and queues, and connections that behave as TCP does. The
//! blocks are those of the same files, put by the same node. What the simulator does not
//! know, the time that a command and a node compute, is measured apart and added:
//! [`crate::report`] says how much that is.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use atoll_dht::durable::MemoryState;
use atoll_dht::{
    Blocks, Dht, DhtConfig, MemoryBlocks, NewBlock, OverMemory, PutError, SimulatedKeys,
};
use atoll_env::{BoxFuture, TokioRuntime};
use atoll_key::{Key, PeerId, SecretKey, VolumeId};
use atoll_net::Router;
use atoll_overlay::chord::{Chord, ChordConfig};
use atoll_sim::{Connections, HostConfig, HostId, Sim, SimConfig, TcpModel};
use atoll_store::MemoryStore;
use atoll_volume::owned::{
    NoLeaseRecorder, NoProgress, PublishOptions, Volume, VolumeOptions, publish,
};
use futures_util::StreamExt;
use futures_util::stream;

use crate::sites::Sites;

/// A TLS record and our frame.
const MESSAGE_OVERHEAD_BYTES: usize = 46;
/// TCP and TLS 1.3; the proof of the secret travels with the first request.
pub(crate) const HANDSHAKE_ROUND_TRIPS: u32 = 2;
/// Bytes of one put, and puts under way, as `publish` has them.
const PUT_BYTES: usize = (4 << 20) - (64 << 10);
const PUTS_AT_ONCE: usize = 4;
const STORE_BYTES: u64 = 1 << 40;
const LIMIT: Duration = Duration::from_secs(24 * 3600);

/// What the simulation is made like.
pub(crate) struct Setting<'a> {
    pub sites: &'a Sites,
    pub rate_bytes_per_sec: f64,
    pub tcp: TcpModel,
    pub identities: Vec<PeerId>,
    pub config: DhtConfig,
    pub seed: u64,
}

/// A simulated ring.
pub(crate) struct Model {
    sim: Sim,
    hosts: Vec<HostId>,
    nodes: Vec<(Arc<Dht>, Arc<Chord>)>,
    tcp: TcpModel,
}

/// A published tree: its volume, and where its root block was put.
pub(crate) struct Tree {
    volume: VolumeId,
}

/// What reading a file should take.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Reading {
    pub took: Duration,
    /// Bytes of blocks that other nodes sent.
    pub received_bytes: u64,
    /// Second replicas that were asked, and those that were faster.
    pub hedges: u64,
    pub hedges_won: u64,
}

impl Model {
    /// Nodes that have joined one after another, and rested as long as the real ones.
    pub(crate) fn new(setting: &Setting<'_>) -> Model {
        let tcp = TcpModel { handshake_round_trips: HANDSHAKE_ROUND_TRIPS, ..setting.tcp };
        let sim = Sim::new(SimConfig {
            seed: setting.seed,
            latency: setting.sites.latency(),
            connections: Connections::Tcp(tcp),
            message_overhead_bytes: MESSAGE_OVERHEAD_BYTES,
            ..SimConfig::default()
        });
        let rate = Some(setting.rate_bytes_per_sec as u64);
        let host = |identity: &PeerId| HostConfig {
            upload_bytes_per_sec: rate,
            download_bytes_per_sec: rate,
            identity: Some(*identity),
            ..HostConfig::default()
        };
        let hosts: Vec<HostId> =
            setting.identities.iter().map(|identity| sim.add_host(host(identity))).collect();
        let mut model = Model { sim, hosts, nodes: Vec::new(), tcp: setting.tcp };
        for index in 0..model.hosts.len() {
            model.join(index, &setting.config);
        }
        model.sim.run_for(Duration::from_secs(60));
        model
    }

    fn join(&mut self, index: usize, config: &DhtConfig) {
        let host = self.hosts[index];
        let (env, transport) = (self.sim.env(host), self.sim.transport(host));
        let chord = Chord::new(env.clone(), transport.clone(), ChordConfig::default());
        let store = Arc::new(MemoryStore::new(STORE_BYTES));
        let dht = {
            let keys = Arc::new(SimulatedKeys(transport.local().id));
            Dht::new(
                env,
                transport.clone(),
                chord.clone(),
                store,
                keys,
                Arc::new(MemoryState::default()),
                config.clone(),
            )
        };
        let services = Router::new().route(0x01, chord.clone()).route(0x02, dht.clone());
        transport.serve(Arc::new(services));
        if index == 0 {
            chord.create();
        } else {
            let bootstrap = vec![self.sim.peer(self.hosts[0])];
            let joined = self.sim.block_on(LIMIT, chord.join(bootstrap));
            joined.expect("joining ends").expect("the first node answers");
        }
        dht.start();
        self.nodes.push((dht, chord));
    }

    /// Publishes a directory from a node. The key is made so that the root block has the
    /// same replicas as the real one, at `root_holders`.
    pub(crate) fn publish(&self, at: usize, source: &Path, real: VolumeId) -> Tree {
        let secret = self.secret_near(real);
        let recorded = record(source, &secret);
        let dht = &self.nodes[at].0;
        let work = async {
            let batches = batches(recorded.content);
            let puts = stream::iter(batches).map(|batch| dht.put_blocks(batch));
            let puts: Vec<_> = puts.buffer_unordered(PUTS_AT_ONCE).collect().await;
            let root = dht.put_blocks(vec![recorded.root]).await;
            puts.into_iter().flatten().chain(root).collect::<Result<(), PutError>>()
        };
        self.sim.block_on(LIMIT, work).expect("publishing ends").expect("the ring takes all");
        self.sim.run_for(Duration::from_secs(10));
        Tree { volume: VolumeId(secret.public()) }
    }

    /// A key whose root block goes where that of `real` is.
    fn secret_near(&self, real: VolumeId) -> SecretKey {
        let wanted = self.root_of(&real.root_key());
        (0u64..)
            .map(|number| {
                let mut seed = [0; 32];
                seed[..8].copy_from_slice(&number.to_be_bytes());
                SecretKey::from_seed(&seed)
            })
            .find(|secret| self.root_of(&VolumeId(secret.public()).root_key()) == wanted)
            .expect("one key in so many as there are nodes has this root")
    }

    fn root_of(&self, key: &Key) -> PeerId {
        let ids = self.nodes.iter().map(|(_, chord)| {
            use atoll_overlay::Overlay;
            chord.neighbourhood().me
        });
        let mut ids: Vec<_> = ids.collect();
        ids.sort_by_key(|node| node.id);
        let at = ids.partition_point(|node| node.id.key() < key) % ids.len();
        ids[at].peer.id
    }

    /// Reads a file at a node as `atoll cat` does.
    pub(crate) fn read(&self, at: usize, tree: &Tree, path: &str) -> Reading {
        let served = || self.nodes.iter().map(|(dht, _)| dht.stats().served_bytes).sum::<u64>();
        let (served_before, before) = (served(), self.nodes[at].0.stats());
        let env = self.sim.env(self.hosts[at]);
        let blocks: Arc<dyn Blocks> = self.nodes[at].0.clone();
        let began = self.sim.now();
        let work = async {
            let options = VolumeOptions::default();
            let volume = Volume::open(env.clone(), blocks, tree.volume, options).await;
            let snapshot = volume.expect("the volume opens").snapshot().await;
            let item = snapshot.resolve(path.as_bytes()).await.expect("the file is there");
            let mut stream = snapshot.read_stream(&item);
            while let Some(bytes) = stream.next().await {
                bytes.expect("the file can be read");
            }
        };
        self.sim.block_on(LIMIT, work).expect("reading ends");
        let took = self.sim.now().since(began);
        self.sim.run_for(Duration::from_secs(2));
        let after = self.nodes[at].0.stats();
        Reading {
            took,
            received_bytes: served() - served_before,
            hedges: after.hedges - before.hedges,
            hedges_won: after.hedges_won - before.hedges_won,
        }
    }

    /// One plain TCP stream, with nothing else going on but the ring's upkeep.
    pub(crate) fn stream(&self, server: usize, reader: usize, len_bytes: u64) -> Duration {
        let transfer =
            self.sim.transfer(self.hosts[server], self.hosts[reader], len_bytes, &self.tcp);
        let took = self.sim.block_on(LIMIT, transfer).expect("a transfer ends");
        self.sim.run_for(Duration::from_secs(2));
        took
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        self.sim.shut_down();
    }
}

struct Recorded {
    content: Vec<NewBlock>,
    root: NewBlock,
}

/// The blocks of a tree, without a ring.
fn record(source: &Path, secret: &SecretKey) -> Recorded {
    let recorder = Arc::new(Recorder::default());
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.expect("a runtime");
    runtime
        .block_on(async {
            let env = Arc::new(TokioRuntime::current());
            let (blocks, progress) = (recorder.clone(), Arc::new(NoProgress));
            let options = PublishOptions::default();
            publish(env, blocks, source, secret, options, progress, Arc::new(NoLeaseRecorder)).await
        })
        .expect("memory takes all");
    let mut content = std::mem::take(&mut *recorder.taken.lock().expect("no holder panics"));
    let root = content.pop().expect("a root was put last");
    Recorded { content, root }
}

/// Keeps what is put.
#[derive(Default)]
struct Recorder {
    blocks: MemoryBlocks,
    taken: Mutex<Vec<NewBlock>>,
}

impl OverMemory for Recorder {
    fn memory(&self) -> &MemoryBlocks {
        &self.blocks
    }

    fn put_blocks(&self, blocks: Vec<NewBlock>) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        self.taken.lock().expect("no holder panics").extend(blocks.iter().cloned());
        self.blocks.put_blocks(blocks)
    }
}

fn batches(blocks: Vec<NewBlock>) -> Vec<Vec<NewBlock>> {
    let mut batches: Vec<Vec<NewBlock>> = Vec::new();
    let mut room = 0;
    for block in blocks {
        if block.bytes.len() > room {
            batches.push(Vec::new());
            room = PUT_BYTES;
        }
        room -= block.bytes.len();
        batches.last_mut().expect("it was just begun").push(block);
    }
    batches
}
