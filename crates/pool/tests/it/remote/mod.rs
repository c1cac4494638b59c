//! Calls over the network: the conformance kit, lost and late calls, broken connections, restarts of the server.

mod hostile;
mod kit;
mod network;
mod restarts;
mod retries;
mod sessions;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use atoll_env::BoxFuture;
use atoll_net::{CallError, Reply, Request};
use atoll_pool::disk::simulated::{InFlight, Loss, SimulatedDisk};
use atoll_pool::remote::{PeerRoute, RemoteFs, RemoteServer, Route};
use atoll_pool::{PoolFs, PoolSettings, create};
use atoll_sim::{HostConfig, HostId, Latency, Sim, SimConfig};
use atoll_vfs::kit::{Tree, write_tree_to_fs};
use atoll_vfs::memory::MemoryFs;
use atoll_vfs::{Caller, Errno, FileSystem, Handle, InodeNumber, OpenFlags};
const ROOT: InodeNumber = InodeNumber::ROOT;

fn me() -> Caller {
    Caller { uid: 1000, gid: 1000, ..Caller::default() }
}

/// Which seeds to try: so many, or so many times as many as `ATOLL_SEEDS` says, or the one that `ATOLL_SEED` names.
fn seeds(usual: u64) -> std::ops::Range<u64> {
    if let Ok(seed) = std::env::var("ATOLL_SEED") {
        let seed = seed.parse::<u64>().expect("ATOLL_SEED is a number");
        return seed..seed + 1;
    }
    let times = std::env::var("ATOLL_SEEDS").ok().and_then(|times| times.parse::<u64>().ok());
    0..usual * times.unwrap_or(1)
}

/// Says which seed failed.
struct Seed(u64);

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("seed {} failed", self.0);
        }
    }
}

/// Numbers of a seed (splitmix64).
#[derive(Clone)]
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % bound
    }

    fn millis(&mut self, bound: u64) -> Duration {
        Duration::from_millis(self.below(bound))
    }
}

/// What stands behind the server.
#[derive(Clone, Copy, PartialEq)]
enum Behind {
    Memory,
    /// A pool of this distribution level.
    Pool(u8),
}

/// What a server is made with.
enum BehindServer {
    Memory(Arc<dyn FileSystem>),
    Pool(Arc<PoolFs<SimulatedDisk>>),
}

/// What is served by now.
#[derive(Clone)]
struct Served {
    disk: SimulatedDisk,
    fs: Arc<dyn FileSystem>,
    remote: RemoteServer,
}

/// A host that serves, and one that is a client.
#[derive(Clone)]
struct World {
    sim: Sim,
    server: HostId,
    client: HostId,
    behind: Behind,
    served: Arc<Mutex<Option<Served>>>,
}

impl World {
    fn new(seed: u64, behind: Behind) -> World {
        // A network of one room: the kit makes thousands of calls, one after another.
        let latency = Latency::Flat(Duration::from_micros(100));
        let sim = Sim::new(SimConfig { seed, latency, ..SimConfig::default() });
        let (server, client) =
            (sim.add_host(HostConfig::default()), sim.add_host(HostConfig::default()));
        World { sim, server, client, behind, served: Arc::default() }
    }

    fn route(&self) -> PeerRoute {
        PeerRoute::new(self.sim.transport(self.client), self.sim.peer(self.server))
    }

    async fn mount(&self) -> Arc<RemoteFs> {
        self.mount_over(Arc::new(self.route())).await
    }

    async fn mount_over(&self, route: Arc<dyn Route>) -> Arc<RemoteFs> {
        let env = self.sim.env(self.client);
        Arc::new(RemoteFs::begin(env, route).await.expect("the server answers"))
    }

    fn served(&self) -> Served {
        self.served.lock().unwrap().clone().expect("something is served")
    }

    fn serve(&self, disk: SimulatedDisk, behind: BehindServer) {
        let env = self.sim.env(self.server);
        let (remote, fs) = match behind {
            BehindServer::Memory(fs) => (RemoteServer::new(env, fs.clone()), fs),
            BehindServer::Pool(pool) => {
                let fs: Arc<dyn FileSystem> = pool.clone();
                (RemoteServer::remembering(env.clone(), pool, env.random_u64()), fs)
            }
        };
        self.sim.transport(self.server).serve(Arc::new(remote.clone()));
        *self.served.lock().unwrap() = Some(Served { disk, fs, remote });
    }

    async fn open(&self, disk: &SimulatedDisk) -> BehindServer {
        let opened = PoolFs::open(self.sim.env(self.server), disk.clone()).await;
        BehindServer::Pool(Arc::new(opened.expect("it opens").0))
    }

    /// Makes a file system and serves it.
    async fn start(&self, tree: Option<&Tree>) {
        // The disk outlives the process that uses it.
        let disk = SimulatedDisk::new(self.sim.outside());
        let behind = match self.behind {
            Behind::Memory => {
                BehindServer::Memory(Arc::new(MemoryFs::new(self.sim.env(self.server))))
            }
            Behind::Pool(level) => {
                create(&disk, PoolSettings::new([7; 16], level)).await.unwrap();
                self.open(&disk).await
            }
        };
        if let Some(tree) = tree {
            let fs: Arc<dyn FileSystem> = match &behind {
                BehindServer::Memory(fs) => fs.clone(),
                BehindServer::Pool(pool) => pool.clone(),
            };
            write_tree_to_fs(tree, &*fs).await.unwrap();
        }
        self.serve(disk, behind);
    }

    /// The server's process ends and begins anew; with `power`, its machine has lost power meanwhile.
    async fn restart(&self, power: Option<u64>, down: Duration) {
        let Served { disk, fs, remote } = self.served.lock().unwrap().take().unwrap();
        self.sim.crash(self.server);
        drop(remote);
        match power {
            Some(seed) => disk.crash_with(Loss::Ordered, seed),
            None => disk.kill(InFlight::Lost),
        }
        atoll_env::sleep(&*self.sim.outside(), down).await;
        self.sim.restart(self.server);
        let (disk, behind) = match self.behind {
            // Its files live on, as if they were on a disk.
            Behind::Memory => (disk, BehindServer::Memory(fs)),
            Behind::Pool(_) => {
                drop(fs);
                let disk = disk.reopen();
                let behind = self.open(&disk).await;
                (disk, behind)
            }
        };
        self.serve(disk, behind);
    }

    async fn pause(&self, time: Duration) {
        atoll_env::sleep(&*self.sim.outside(), time).await;
    }

    fn block_on<T>(&self, test: impl Future<Output = T>) -> T {
        let done = self.sim.block_on(Duration::from_secs(1 << 20), test);
        done.unwrap_or_else(|stuck| panic!("{stuck:?}"))
    }

    /// All clients are gone, and so is what they held.
    fn check_ended(&self) {
        self.sim.run_for(Duration::from_secs(60));
        let remote = self.served().remote;
        remote.check_invariants();
        assert_eq!(remote.counts(), (0, 0), "the client has ended");
    }
}

async fn file(fs: &dyn FileSystem, name: &str) -> (InodeNumber, Handle) {
    let made = fs.create(me(), ROOT, name.as_bytes(), 0o644, OpenFlags::READ_WRITE).await;
    let (entry, opened) = made.unwrap_or_else(|errno| panic!("create {name}: {errno}"));
    (entry.attr.inode, opened.handle)
}

async fn read_all(fs: &dyn FileSystem, inode: InodeNumber, handle: Handle) -> Vec<u8> {
    let mut all = Vec::new();
    loop {
        let piece = fs.read(inode, handle, all.len() as u64, 1 << 20).await;
        match piece {
            Ok(piece) if piece.is_empty() => return all,
            Ok(piece) => all.extend_from_slice(&piece),
            Err(Errno::ETIMEDOUT) => {}
            Err(errno) => panic!("read: {errno}"),
        }
    }
}

/// A call until it is answered.
async fn until_answered<T, F: Future<Output = Result<T, Errno>>>(call: impl Fn() -> F) -> T {
    for _ in 0..60 {
        match call().await {
            Err(Errno::ETIMEDOUT | Errno::EIO) => {}
            answer => return answer.unwrap_or_else(|errno| panic!("{errno:?}")),
        }
    }
    panic!("no answer in sixty calls")
}

async fn lines(fs: &dyn FileSystem, inode: InodeNumber) -> Vec<String> {
    let handle = fs.open(me(), inode, OpenFlags::READ).await.unwrap().handle;
    let all = String::from_utf8(read_all(fs, inode, handle).await).unwrap();
    fs.close(inode, handle).await.unwrap();
    all.lines().map(str::to_owned).collect()
}

/// Keeps what was sent.
struct Recorder {
    inner: PeerRoute,
    sent: Mutex<Vec<Request>>,
}

impl Route for Recorder {
    fn call(
        &self,
        request: Request,
        limit: Duration,
    ) -> BoxFuture<'static, Result<Reply, CallError>> {
        self.sent.lock().unwrap().push(request.clone());
        self.inner.call(request, limit)
    }
}
