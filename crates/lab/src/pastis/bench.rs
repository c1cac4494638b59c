//! One run of the paper's benchmark: a ring at rest, a shared volume on it, and clients that do the
//! five phases, each through a node of its own (Pastis §5).
//!
//! Unless all upkeep is wanted, only the clients' nodes keep their tables up: nothing changes in the ring, and
//! the upkeep of ten thousands of nodes would cost the processor more than all the rest. They rest for two
//! minutes before the first phase, so that they know how far other nodes are.
//!
//! Invariant: a run follows from its [`Run`], bytes for bytes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use atoll_dht::{Blocks, DhtConfig, ReplicaChoice};
use atoll_env::Env;
use atoll_key::{BlockId, Key, PeerId, SecretKey, volume_group};
use atoll_overlay::chord::ChordConfig;
use atoll_sim::{Connections, HostConfig, Latency, TcpModel};
use atoll_store::{StoreError, StoredBlock};
use atoll_vfs::{Errno, FileSystem};
use atoll_volume::keep::Keep;
use atoll_volume::shared::access::{self, NewVolume, groups};
use atoll_volume::shared::{Consistency, SharedFs, SharedOptions};
use bytes::Bytes;
use futures_util::future::try_join_all;

use super::observed::{Observed, Spent};
use super::outdated::name_outdated_sets;
use crate::LabError;
use crate::andrew::{self, Below, Files, InFileSystem, Names, SourceTree, TreeSize};
use crate::ring::{Network, Plan, Ring};
use crate::setting::{Setting, select_servers};

/// The paper's phases, §5.
pub(super) const PHASES: [&str; 5] = ["mkdir", "copy", "stat", "read", "make"];

/// A client's node rests for so long before it begins.
const REST: Duration = Duration::from_secs(120);
/// TCP, and TLS 1.3 with our greeting; the first requests go along.
const HANDSHAKE_ROUND_TRIPS: u32 = 2;
/// Each client works below a directory of this name and its number.
const CLIENT: &str = "client";
/// Of the inodes, or of the remembered replica sets, one in so many is out of date (§5.5, §5.6).
pub(super) const ONE_IN: u64 = 10;

/// What is out of date in a run.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum OutOfDate {
    /// Nothing.
    Nothing,
    /// After the second phase the nearest replicas of a tenth of the inodes hold the version before, if there
    /// was one (§5.5).
    Inodes,
    /// A tenth of the times that a remembered replica set is used its root names another one (§5.6).
    Sets,
}

/// How nodes find their way.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Routing {
    /// By Atoll's tables.
    AsShipped,
    /// By CFS's fingers, choosing among them by distance (CFS §4.3).
    Fingers,
}

/// A run.
#[derive(Clone, Debug)]
pub(super) struct Run {
    pub seed: u64,
    pub nodes: usize,
    pub replicas: usize,
    pub clients: usize,
    pub setting: Setting,
    pub routing: Routing,
    pub latency: Latency,
    /// Bytes a second that each node sends and receives at most.
    pub link: Option<u64>,
    /// Whether calls travel on TCP connections with TLS, which their first caller opens.
    pub over_tcp: bool,
    /// Whether all nodes keep their tables up, and not only those of the clients.
    pub upkeep: bool,
    pub consistency: Consistency,
    /// Whether replica sets are remembered.
    pub knows_sets: bool,
    /// Whether new files lie near their directories, and are put together with their names.
    pub makes_near: bool,
    /// Whether replicas are asked while their set is looked up: what there is of fast `lookupHandles`.
    pub asks_early: bool,
    pub out_of_date: OutOfDate,
}

/// A phase of one client.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Phase {
    pub secs: f64,
    pub spent: Spent,
}

/// The blocks of one kind, and how far their replicas are from the client: means of round trips,
/// milliseconds.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Distances {
    pub blocks: usize,
    pub nearest_ms: f64,
    pub farthest_ms: f64,
}

/// What a run has given.
#[derive(Clone, Debug)]
pub(super) struct Measured {
    /// By client.
    pub clients: Vec<[Phase; 5]>,
    /// Of inodes, of content blocks, and of as many keys as there are nodes.
    pub distances: [Distances; 3],
}

impl Measured {
    /// Seconds of a phase, the mean of the clients.
    pub(super) fn phase(&self, phase: usize) -> f64 {
        self.mean(|phases| phases[phase].secs)
    }

    /// Seconds of all phases, the mean of the clients.
    pub(super) fn total(&self) -> f64 {
        self.mean(|phases| phases.iter().map(|phase| phase.secs).sum())
    }

    /// Of all phases, by kind of work; the mean of the clients.
    pub(super) fn spent(&self, work: usize) -> f64 {
        self.mean(|phases| phases.iter().map(|phase| phase.spent.secs[work]).sum())
    }

    fn mean(&self, of: impl Fn(&[Phase; 5]) -> f64) -> f64 {
        self.clients.iter().map(of).sum::<f64>() / self.clients.len() as f64
    }
}

impl Run {
    /// The ring, and the block layer on it.
    fn layers(&self) -> (ChordConfig, DhtConfig) {
        let of_routing = match self.routing {
            Routing::AsShipped => Setting::Default,
            Routing::Fingers => Setting::Paper,
        };
        let (mut chord, mut dht) = (of_routing.chord(self.nodes), of_routing.dht());
        select_servers(&mut chord, &mut dht);
        dht.replicas = self.replicas;
        // Past fetches from the nearest replica that its routing finds (§2.2).
        dht.replica_choice = ReplicaChoice::Nearest;
        dht.mechanisms.known_sets = self.knows_sets;
        dht.mechanisms.sets_ahead = self.setting == Setting::Default;
        dht.mechanisms.joint_puts = self.makes_near;
        dht.mechanisms.early_questions = self.asks_early;
        // In the paper each open reads the inode anew (§3.2).
        dht.mechanisms.call_backs = self.setting == Setting::Default;
        // A node names a root from its list with at least half of the list, which has to hold a replica
        // set: with 16 replicas and a list of 16, blocks near the writer would never find a majority.
        chord.successors = chord.successors.max(2 * self.replicas);
        (chord, dht)
    }

    fn plan(&self) -> Plan {
        let (chord, dht) = self.layers();
        let connections = match self.over_tcp {
            false => Connections::Instant,
            true => Connections::Tcp(TcpModel::today().with_handshake(HANDSHAKE_ROUND_TRIPS)),
        };
        let link = HostConfig {
            upload_bytes_per_sec: self.link,
            download_bytes_per_sec: self.link,
            ..HostConfig::default()
        };
        Plan {
            seed: self.seed,
            nodes: self.nodes,
            chord,
            dht,
            upkeep: self.upkeep,
            virtual_servers: Vec::new(),
            network: Network {
                latency: Some(self.latency.clone()),
                connections,
                links: self.link.map_or_else(Vec::new, |_| vec![link; self.nodes]),
            },
        }
    }

    fn options(&self) -> SharedOptions {
        let mut options =
            SharedOptions { consistency: self.consistency, ..SharedOptions::default() };
        if self.setting == Setting::Paper {
            // §3.2: what is cached of a file is dropped at its close. In the paper no name is shown
            // without asking.
            options.names_max_age = Duration::ZERO;
            options.cache_bytes = 0;
        }
        options
    }

    /// Makes the run.
    pub(super) fn measure(&self) -> Result<Measured, LabError> {
        assert!(self.clients <= self.nodes, "a client has a node of its own");
        let ring = match self.upkeep {
            true => Ring::new(&self.plan()),
            false => Ring::with_idle_nodes(&self.plan()),
        };
        if self.out_of_date == OutOfDate::Sets {
            name_outdated_sets(&ring);
        }
        if !self.upkeep {
            (0..self.clients).for_each(|client| ring.start_upkeep(client));
        }
        ring.sim.run_for(REST);
        let tree = SourceTree::new(TreeSize::Small);
        let clients = ring.block_on(self.prepare(&ring))?.map_err(LabError::Failed)?;
        let early = clients.iter().map(|client| client.work(&tree, 0..2));
        let mut phases: Vec<Vec<Phase>> = ring.block_on(try_join_all(early))?.map_err(broke_off)?;
        if self.out_of_date == OutOfDate::Inodes {
            for client in &clients {
                client.put_back(&ring, self.replicas)?;
            }
        }
        let late = clients.iter().map(|client| client.work(&tree, 2..5));
        let late: Vec<Vec<Phase>> = ring.block_on(try_join_all(late))?.map_err(broke_off)?;
        for (phases, late) in phases.iter_mut().zip(late) {
            phases.extend(late);
        }
        let whole = |phases: Vec<Phase>| <[Phase; 5]>::try_from(phases).expect("five phases");
        Ok(Measured {
            clients: phases.into_iter().map(whole).collect(),
            distances: self.distances(&ring, &clients[0]),
        })
    }

    /// Makes the volume, and mounts it for each client.
    async fn prepare(&self, ring: &Ring) -> Result<Vec<Client>, String> {
        let volume = SecretKey::from_seed(&[200; 32]);
        let user = |number: usize| SecretKey::from_seed(&[number as u8 + 1; 32]);
        let env = |number: usize| ring.sim.env(ring.members[number].host);
        let blocks = |number: usize| ring.members[number].dht.clone() as Arc<dyn Blocks>;
        let told = |error: &dyn std::fmt::Display| error.to_string();
        let options = NewVolume {
            label: "pastis".into(),
            member_label: "0".into(),
            block_size_log2: 16,
            owner: (0, 0),
            mode: 0o755,
            is_encrypted: false,
            // Nothing by minutes: a run of a dozen seconds that meets the end of one would pay for it, and
            // another one not.
            keep: "24h/7d/4w".parse::<Keep>().map_err(|error| told(&error))?,
        };
        let made = access::create(&env(0), &blocks(0), &volume, &user(0), &options).await;
        made.map_err(|error| told(&error))?;
        let group = volume_group(&volume, 0);
        for number in 1..self.clients {
            let id = user(number).user_id();
            let added = groups::add_member(&env(0), &blocks(0), &group, id, "", 0).await;
            added.map_err(|error| told(&error))?;
        }
        let mut clients = Vec::new();
        for number in 0..self.clients {
            let env = env(number);
            let observed = Observed::new(env.clone(), blocks(number), self.upkeep);
            let (id, user) = (volume.volume_id(), Some(user(number)));
            let opened =
                SharedFs::open(env.clone(), observed.clone(), id, user, self.options()).await;
            let fs: Arc<dyn FileSystem> = Arc::new(opened.map_err(|error| told(&error))?);
            let files = InFileSystem::new(fs);
            let own = format!("{CLIENT}{number}");
            files.make_directory(&own).await.map_err(|error| told(&error))?;
            clients.push(Client { number, env, observed, files: Below::new(files, &own) });
        }
        Ok(clients)
    }

    /// How far the replicas of what the client has written are from it.
    fn distances(&self, ring: &Ring, client: &Client) -> [Distances; 3] {
        let written = client.observed.written();
        let keys = |is_inode: bool| -> Vec<Key> {
            let ids = written.keys().filter(|id| id.kind.is_mutable() == is_inode);
            ids.map(|id| id.key).collect()
        };
        let circle = circle(ring);
        let everywhere: Vec<Key> = circle.iter().map(|(key, _)| *key).collect();
        [keys(true), keys(false), everywhere].map(|keys| {
            let mut found = Distances { blocks: keys.len(), ..Distances::default() };
            for key in &keys {
                let of = replica_set(&circle, key, self.replicas);
                let ms = of.map(|member| round_trip_ms(ring, client.number, member));
                let ms: Vec<f64> = ms.collect();
                let count = keys.len() as f64;
                found.nearest_ms += ms.iter().copied().fold(f64::INFINITY, f64::min) / count;
                found.farthest_ms += ms.iter().copied().fold(0.0, f64::max) / count;
            }
            found
        })
    }
}

fn broke_off(errno: Errno) -> LabError {
    LabError::Failed(format!("the benchmark broke off: {errno}"))
}

/// The places of all nodes in ring order, with the nodes' numbers.
fn circle(ring: &Ring) -> Vec<(Key, usize)> {
    let hosts = ring.members.iter().enumerate();
    let members: BTreeMap<PeerId, usize> =
        hosts.map(|(n, member)| (ring.sim.peer(member.host).id, n)).collect();
    ring.circle.iter().map(|node| (*node.id.key(), members[&node.peer.id])).collect()
}

/// The nodes that keep a block, its root first.
fn replica_set(circle: &[(Key, usize)], key: &Key, replicas: usize) -> impl Iterator<Item = usize> {
    let first = circle.partition_point(|(place, _)| place < key);
    let count = replicas.min(circle.len());
    (first..first + count).map(|at| circle[at % circle.len()].1)
}

fn round_trip_ms(ring: &Ring, from: usize, to: usize) -> f64 {
    let (from, to) = (ring.members[from].host, ring.members[to].host);
    2.0 * 1000.0 * ring.sim.latency(from, to).as_secs_f64()
}

/// A benchmark program, and the mount that it works on.
struct Client {
    number: usize,
    env: Env,
    observed: Arc<Observed>,
    files: Below<InFileSystem>,
}

impl Client {
    /// Does some of the phases, one after another.
    async fn work(
        &self,
        tree: &SourceTree,
        phases: std::ops::Range<usize>,
    ) -> Result<Vec<Phase>, Errno> {
        let files = &self.files;
        let names = Names::of_tree(tree);
        let mut done = Vec::new();
        for phase in phases {
            let (began, before) = (self.env.now(), self.observed.spent());
            match phase {
                0 => andrew::make_directories(files, &names).await?,
                1 => andrew::copy_in(files, tree).await?,
                2 => andrew::stat(files, andrew::COPY).await?.0,
                3 => andrew::read(files, andrew::COPY, &names).await?,
                _ => andrew::compile(files, &names).await?,
            };
            done.push(Phase {
                secs: self.env.now().since(began).as_secs_f64(),
                spent: self.observed.spent().since(&before),
            });
        }
        Ok(done)
    }

    /// Gives the nearest replicas of a tenth of the inodes the version before, or takes those away that have none: as
    /// if their nodes had been down when these inodes were written last.
    fn put_back(&self, ring: &Ring, replicas: usize) -> Result<(), LabError> {
        let circle = circle(ring);
        let written = self.observed.written();
        let mut older: Vec<(BlockId, Option<Bytes>)> = written
            .into_iter()
            .filter(|(id, _)| id.kind.is_mutable())
            .map(|(id, written)| (id, written.before))
            .collect();
        let count = older.len().div_ceil(ONE_IN as usize);
        for _ in 0..count {
            let (id, bytes) = older.swap_remove(ring.random_below(older.len()));
            let nearest = replica_set(&circle, &id.key, replicas)
                .min_by(|a, b| {
                    let ms = |member| round_trip_ms(ring, self.number, member);
                    ms(*a).total_cmp(&ms(*b))
                })
                .expect("a block has a replica");
            let store = ring.members[nearest].store.clone();
            let failed = |error: StoreError| LabError::Failed(error.to_string());
            let replaced = async {
                let held = store.get(&id.key).await?;
                let Some(mut held) = held else { return Ok(()) };
                store.remove(vec![id.key]).await?;
                let Some(bytes) = bytes else { return Ok(()) };
                held.info.version = id.verify(&bytes).expect("it was written");
                held.info.len_bytes = bytes.len() as u32;
                store.put(vec![StoredBlock { info: held.info, bytes }]).await
            };
            ring.block_on(replaced)?.map_err(failed)?;
        }
        Ok(())
    }
}
