//! Calls over the network: the conformance kit, lost and late calls, broken connections, restarts of the server.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use atoll_env::{BoxFuture, Env};
use atoll_net::{CallError, Peer, Refusal, Reply, Request, Service};
use atoll_pool::disk::simulated::{InFlight, Loss, SimulatedDisk};
use atoll_pool::remote::{METHODS, PeerRoute, RemoteFs, RemoteServer, Route};
use atoll_pool::{PoolFs, PoolSettings, create};
use atoll_sim::{HostConfig, HostId, Latency, Sim, SimConfig};
use atoll_vfs::kit::{
    Features, Report, Restart, RestartSubject, Subject, Tree, run_read_suite, run_restart_suite,
    run_write_suite, write_tree_to_fs,
};
use atoll_vfs::memory::MemoryFs;
use atoll_vfs::{
    Caller, CreateVerifier, Errno, FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE, FileKind, FileSystem,
    FileTime, Handle, InodeNumber, OpenFlags, RenameFlags, SetAttr, SetTime, Writer, XattrFlags,
};
use bytes::Bytes;
use futures_util::future::join_all;

const ROOT: InodeNumber = InodeNumber::ROOT;

fn me() -> Caller {
    Caller { uid: 1000, gid: 1000, ..Caller::default() }
}

/// How many seeds to try: so many, or so many times as many as `ATOLL_SEEDS` says.
fn seeds(usual: u64) -> std::ops::Range<u64> {
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

    fn serve(&self, disk: SimulatedDisk, fs: Arc<dyn FileSystem>) {
        let remote = RemoteServer::new(self.sim.env(self.server), fs.clone());
        self.sim.transport(self.server).serve(Arc::new(remote.clone()));
        *self.served.lock().unwrap() = Some(Served { disk, fs, remote });
    }

    async fn open(&self, disk: &SimulatedDisk) -> Arc<dyn FileSystem> {
        Arc::new(PoolFs::open(self.sim.env(self.server), disk.clone()).await.expect("it opens").0)
    }

    /// Makes a file system and serves it.
    async fn start(&self, tree: Option<&Tree>) {
        // The disk outlives the process that uses it.
        let disk = SimulatedDisk::new(self.sim.outside());
        let fs: Arc<dyn FileSystem> = match self.behind {
            Behind::Memory => Arc::new(MemoryFs::new(self.sim.env(self.server))),
            Behind::Pool(level) => {
                create(&disk, PoolSettings { pool: [7; 16], level }).await.unwrap();
                self.open(&disk).await
            }
        };
        if let Some(tree) = tree {
            write_tree_to_fs(tree, &*fs).await.unwrap();
        }
        self.serve(disk, fs);
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
        let (disk, fs) = match self.behind {
            // Its files live on, as if they were on a disk.
            Behind::Memory => (disk, fs),
            Behind::Pool(_) => {
                drop(fs);
                let disk = disk.reopen();
                let fs = self.open(&disk).await;
                (disk, fs)
            }
        };
        self.serve(disk, fs);
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

// ---- the conformance kit ----

impl World {
    fn run(&self, suite: impl Future<Output = Report>) {
        let report = self.block_on(suite);
        assert!(report.passed() > 5, "{report}");
        report.assert_passes();
        self.check_ended();
    }
}

impl Subject for World {
    fn name(&self) -> String {
        "a remote file system".to_owned()
    }

    fn features(&self) -> Features {
        Features::FULL
    }

    fn env(&self) -> Env {
        self.sim.env(self.client)
    }

    fn make(&self, tree: Arc<Tree>) -> BoxFuture<'_, Result<Arc<dyn FileSystem>, String>> {
        Box::pin(async move {
            self.start(Some(&tree)).await;
            Ok(self.mount().await as Arc<dyn FileSystem>)
        })
    }
}

/// A client that goes on while its server is started again.
struct Surviving {
    world: World,
    fs: Arc<RemoteFs>,
}

impl Restart for Surviving {
    fn fs(&self) -> Arc<dyn FileSystem> {
        self.fs.clone()
    }

    fn restart(&mut self) -> BoxFuture<'_, Result<(), String>> {
        Box::pin(async move {
            self.world.restart(None, Duration::from_secs(1)).await;
            Ok(())
        })
    }
}

impl RestartSubject for World {
    fn start(&self, tree: Arc<Tree>) -> BoxFuture<'_, Result<Box<dyn Restart>, String>> {
        Box::pin(async move {
            World::start(self, Some(&tree)).await;
            let fs = self.mount().await;
            Ok(Box::new(Surviving { world: self.clone(), fs }) as Box<dyn Restart>)
        })
    }
}

#[test]
fn a_remote_file_system_reads_as_the_kit_says() {
    let world = World::new(1, Behind::Memory);
    world.run(run_read_suite(&world));
}

#[test]
fn a_remote_file_system_changes_as_the_kit_says() {
    let world = World::new(2, Behind::Memory);
    world.run(run_write_suite(&world));
}

#[test]
fn a_remote_pool_reads_as_the_kit_says() {
    let world = World::new(3, Behind::Pool(1));
    world.run(run_read_suite(&world));
}

#[test]
fn a_remote_pool_changes_as_the_kit_says() {
    let world = World::new(4, Behind::Pool(1));
    world.run(run_write_suite(&world));
}

#[test]
fn handles_of_a_remote_pool_last_as_the_kit_says() {
    let world = World::new(5, Behind::Pool(1));
    world.run(run_restart_suite(&world));
}

// ---- a network that loses, repeats and delays ----

/// Of a hundred calls so many meet with a fault.
struct FaultyRoute {
    inner: PeerRoute,
    env: Env,
    dice: Mutex<Dice>,
    percent: u64,
}

impl FaultyRoute {
    fn new(world: &World, seed: u64, percent: u64) -> Arc<FaultyRoute> {
        let (inner, env) = (world.route(), world.sim.env(world.client));
        Arc::new(FaultyRoute { inner, env, dice: Mutex::new(Dice(seed)), percent })
    }

    /// Sends a request after a while; nobody hears of the answer.
    fn send_unheard(&self, request: &Request, after: Duration) {
        let wait = atoll_env::sleep(&*self.env, after);
        let (inner, request) = (self.inner.clone(), request.clone());
        self.env.spawn(Box::pin(async move {
            wait.await;
            let _ = inner.call(request, Duration::from_secs(600)).await;
        }));
    }
}

impl Route for FaultyRoute {
    fn call(
        &self,
        request: Request,
        limit: Duration,
    ) -> BoxFuture<'static, Result<Reply, CallError>> {
        let mut dice = self.dice.lock().unwrap();
        let broken = || CallError::Unreachable("it broke".to_owned());
        let times_out = |env: &Env| {
            let wait = atoll_env::sleep(&**env, limit);
            Box::pin(async move {
                wait.await;
                Err(CallError::TimedOut)
            })
        };
        if dice.below(100) >= self.percent {
            return self.inner.call(request, limit);
        }
        match dice.below(6) {
            // The request is lost.
            0 => times_out(&self.env),
            // The reply is lost.
            1 => {
                self.send_unheard(&request, Duration::ZERO);
                times_out(&self.env)
            }
            // The request is late.
            2 => {
                self.send_unheard(&request, dice.millis(20_000));
                times_out(&self.env)
            }
            // The connection breaks, before and after the request.
            3 => Box::pin(async move { Err(broken()) }),
            4 => {
                self.send_unheard(&request, Duration::ZERO);
                let wait = atoll_env::sleep(&*self.env, dice.millis(3));
                Box::pin(async move {
                    wait.await;
                    Err(broken())
                })
            }
            // The request arrives once more, later.
            _ => {
                self.send_unheard(&request, dice.millis(20_000));
                self.inner.call(request, limit)
            }
        }
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

/// Changes of which each shows if it was made twice, or not at all. Returns how many had no answer.
async fn change_once(fs: Arc<RemoteFs>, worker: u64, mut dice: Dice, shared: InodeNumber) -> u64 {
    let mut unanswered = 0;
    let open = OpenFlags::READ_WRITE;
    let shared_handle = until_answered(|| fs.open(me(), shared, open)).await.handle;
    let name = |number: u64| format!("chain-{worker}-{number}").into_bytes();
    let mut at = 0;
    let kind = FileKind::Regular;
    match fs.mknod(me(), ROOT, &name(0), kind, 0o644, 0).await {
        Ok(_) => {}
        Err(Errno::EIO) => {
            until_answered(|| async {
                let verifier = CreateVerifier([1; 8]);
                match fs.lookup(me(), ROOT, &name(0)).await {
                    Err(Errno::ENOENT) => {
                        fs.create_exclusive(me(), ROOT, &name(0), 0o644, verifier).await
                    }
                    found => found,
                }
            })
            .await;
        }
        Err(errno) => panic!("mknod: {errno}"),
    }
    for step in 0..40 {
        match dice.below(4) {
            // Another name for one file: a second time there is none.
            0 => {
                let flags = RenameFlags::default();
                match fs.rename(me(), ROOT, &name(at), ROOT, &name(at + 1), flags).await {
                    Ok(()) => at += 1,
                    Err(Errno::EIO) => {
                        unanswered += 1;
                        let there = until_answered(|| async {
                            match fs.lookup(me(), ROOT, &name(at + 1)).await {
                                Err(Errno::ENOENT) => Ok(false),
                                found => found.map(|_| true),
                            }
                        });
                        at += u64::from(there.await);
                    }
                    Err(errno) => panic!("rename {at}: {errno}"),
                }
            }
            // A name that nobody else makes.
            1 => {
                let own = format!("own-{worker}-{step}").into_bytes();
                match fs
                    .create(me(), ROOT, &own, 0o644, OpenFlags(open.0 | OpenFlags::EXCLUSIVE))
                    .await
                {
                    Ok((entry, opened)) => {
                        let mut possibly_gone = false;
                        loop {
                            match fs.unlink(me(), ROOT, &own).await {
                                Ok(()) => break,
                                Err(Errno::EIO) => possibly_gone = true,
                                Err(Errno::ENOENT) if possibly_gone => break,
                                Err(errno) => panic!("unlink: {errno}"),
                            }
                        }
                        let _ = fs.close(entry.attr.inode, opened.handle).await;
                    }
                    Err(Errno::EIO) => unanswered += 1,
                    Err(errno) => panic!("create: {errno}"),
                }
            }
            // A line in a file that others write, too.
            _ => {
                let line = Bytes::from(format!("{worker:04} {step:04}\n"));
                match fs.write(Writer::AtEnd(me()), shared, shared_handle, 0, line).await {
                    Ok(written) => assert_eq!(written, 10),
                    Err(Errno::EIO) => unanswered += 1,
                    Err(errno) => panic!("append: {errno}"),
                }
            }
        }
    }
    until_answered(|| fs.lookup(me(), ROOT, &name(at))).await;
    unanswered
}

async fn lines(fs: &dyn FileSystem, inode: InodeNumber) -> Vec<String> {
    let handle = fs.open(me(), inode, OpenFlags::READ).await.unwrap().handle;
    let all = String::from_utf8(read_all(fs, inode, handle).await).unwrap();
    fs.close(inode, handle).await.unwrap();
    all.lines().map(str::to_owned).collect()
}

#[test]
fn each_change_is_made_once_however_often_its_call_arrives() {
    let mut unanswered = 0;
    for seed in seeds(12) {
        let _seed = Seed(seed);
        let world = World::new(seed, Behind::Pool(1));
        unanswered += world.block_on(async {
            world.start(None).await;
            let (shared, handle) = file(&*world.served().fs, "shared").await;
            let mut clients = Vec::new();
            for number in 0..2 {
                clients
                    .push(world.mount_over(FaultyRoute::new(&world, 2 * seed + number, 25)).await);
            }
            let work = (0..6).map(|worker| {
                let dice = Dice(seed * 100 + worker);
                change_once(clients[worker as usize % 2].clone(), worker, dice, shared)
            });
            let unanswered = join_all(work).await;
            // What is late arrives.
            world.pause(Duration::from_secs(60)).await;
            let served = world.served();
            let lines = lines(&*served.fs, shared).await;
            let different: BTreeSet<&String> = lines.iter().collect();
            assert_eq!(different.len(), lines.len(), "a line was written twice");
            served.remote.check_invariants();
            served.fs.close(shared, handle).await.unwrap();
            unanswered.iter().sum::<u64>()
        });
    }
    // Most are answered, or the test shows little.
    assert!(unanswered < seeds(12).end * 10, "{unanswered} calls without an answer");
}

/// Answered appends are there.
#[test]
fn what_was_answered_was_made() {
    for seed in seeds(6) {
        let _seed = Seed(seed);
        let world = World::new(seed, Behind::Memory);
        world.block_on(async {
            world.start(None).await;
            let fs = world.mount_over(FaultyRoute::new(&world, seed, 30)).await;
            let (inode, handle) = file(&*world.served().fs, "log").await;
            let own = until_answered(|| fs.open(me(), inode, OpenFlags::WRITE)).await.handle;
            let mut answered = BTreeSet::new();
            for number in 0..60 {
                let line = Bytes::from(format!("{number:09}\n"));
                if fs.write(Writer::AtEnd(me()), inode, own, 0, line).await.is_ok() {
                    answered.insert(format!("{number:09}"));
                }
            }
            world.pause(Duration::from_secs(60)).await;
            let there = lines(&*world.served().fs, inode).await;
            let unique: BTreeSet<String> = there.iter().cloned().collect();
            assert_eq!(unique.len(), there.len(), "a line was written twice");
            assert!(answered.is_subset(&unique) && answered.len() > 50, "{}", answered.len());
            world.served().fs.close(inode, handle).await.unwrap();
        });
    }
}

// ---- restarts ----

/// A client's file, and what it should hold.
struct OwnFile {
    fs: Arc<RemoteFs>,
    inode: InodeNumber,
    handle: Handle,
    model: Vec<u8>,
    dice: Dice,
    loses_power: bool,
}

impl OwnFile {
    fn bytes(&mut self, len: usize) -> Vec<u8> {
        let first = self.dice.below(256) as u8;
        (0..len).map(|at| first.wrapping_add(at as u8)).collect()
    }

    async fn step(&mut self) {
        let (fs, inode, handle) = (self.fs.clone(), self.inode, self.handle);
        match self.dice.below(12) {
            0..=3 => {
                let offset = self.dice.below(100_000);
                let len = 1 + self.dice.below(20_000) as usize;
                let data = self.bytes(len);
                let bytes = Bytes::from(data.clone());
                let write = || fs.write(Writer::At(me()), inode, handle, offset, bytes.clone());
                assert_eq!(until_answered(write).await as usize, len);
                let end = offset as usize + len;
                if self.model.len() < end {
                    self.model.resize(end, 0);
                }
                self.model[offset as usize..end].copy_from_slice(&data);
            }
            4..=6 => {
                let len = 1 + self.dice.below(3000) as usize;
                let data = self.bytes(len);
                let bytes = Bytes::from(data.clone());
                match fs.write(Writer::AtEnd(me()), inode, handle, 0, bytes).await {
                    Ok(written) => {
                        assert_eq!(written as usize, len);
                        self.model.extend_from_slice(&data);
                    }
                    Err(Errno::EIO) => {
                        let now = read_all(&*fs, inode, handle).await;
                        assert!(now.len() <= self.model.len() + len);
                        if self.loses_power {
                            // A disk without power may have written some of it.
                            let size_bytes = Some(self.model.len() as u64);
                            let changes = SetAttr { size_bytes, ..SetAttr::default() };
                            until_answered(|| fs.setattr(me(), inode, None, changes)).await;
                        } else if now.len() != self.model.len() {
                            // Made whole.
                            self.model.extend_from_slice(&data);
                        }
                    }
                    Err(errno) => panic!("append: {errno}"),
                }
            }
            7 | 8 => {
                let len = self.dice.below(120_000);
                let size_bytes = Some(len);
                let changes = SetAttr { size_bytes, ..SetAttr::default() };
                until_answered(|| fs.setattr(me(), inode, None, changes)).await;
                self.model.resize(len as usize, 0);
            }
            9 => {
                let (offset, len) = (self.dice.below(100_000), 1 + self.dice.below(30_000));
                let mode = FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE;
                until_answered(|| fs.fallocate(me(), inode, handle, offset, len, mode)).await;
                let end = self.model.len().min((offset + len) as usize);
                let start = end.min(offset as usize);
                self.model[start..end].fill(0);
            }
            10 => until_answered(|| fs.fsync(inode, handle, false)).await,
            _ => self.check().await,
        }
    }

    async fn check(&self) {
        let now = read_all(&*self.fs, self.inode, self.handle).await;
        self.compare(&now);
        let attr = until_answered(|| self.fs.getattr(self.inode, None)).await.attr;
        assert_eq!(attr.size_bytes, self.model.len() as u64);
    }

    fn compare(&self, now: &[u8]) {
        assert_eq!(now.len(), self.model.len(), "length of file {:?}", self.inode);
        if let Some(at) = (0..now.len()).find(|at| now[*at] != self.model[*at]) {
            panic!("byte {at} of file {:?} is another one", self.inode);
        }
    }
}

/// Work of a client on files of its own, while the server ends again and again.
fn survive_restarts(seed: u64, percent: u64, loses_power: bool) {
    let _seed = Seed(seed);
    let world = World::new(seed, Behind::Pool(1));
    world.block_on(async {
        world.start(None).await;
        let route = FaultyRoute::new(&world, seed, percent);
        let fs = world.mount_over(route).await;
        let mut files = Vec::new();
        for number in 0..3 {
            let path = format!("file-{number}");
            let inode = {
                let served = world.served().fs;
                let (inode, handle) = file(&*served, &path).await;
                served.close(inode, handle).await.unwrap();
                inode
            };
            let handle =
                until_answered(|| fs.open(me(), inode, OpenFlags::READ_WRITE)).await.handle;
            let (fs, dice) = (fs.clone(), Dice(seed * 10 + number));
            files.push(OwnFile { fs, inode, handle, model: Vec::new(), dice, loses_power });
        }
        // Names are another matter.
        world.served().fs.sync().await.unwrap();
        let done = Arc::new(Mutex::new(false));
        let restarts = async {
            let mut dice = Dice(seed ^ 0xdead);
            while !*done.lock().unwrap() {
                world.pause(dice.millis(400 + 300 * percent)).await;
                let power = (loses_power && dice.below(2) == 0).then(|| dice.below(1000));
                world.restart(power, dice.millis(3000)).await;
            }
        };
        let work = async {
            let steps = files.iter_mut().map(|file| async move {
                for _ in 0..60 {
                    file.step().await;
                }
            });
            join_all(steps).await;
            for file in &files {
                until_answered(|| fs.fsync(file.inode, file.handle, false)).await;
            }
            *done.lock().unwrap() = true;
        };
        futures_util::future::join(work, restarts).await;
        // What was synced survives the loss of power without its client.
        drop(fs);
        for file in &mut files {
            file.fs = world.mount().await;
        }
        world.restart(Some(7), Duration::ZERO).await;
        for file in &files {
            let served = world.served().fs;
            let handle = served.open(me(), file.inode, OpenFlags::READ).await.unwrap().handle;
            file.compare(&read_all(&*served, file.inode, handle).await);
            served.close(file.inode, handle).await.unwrap();
        }
    });
}

#[test]
fn a_client_goes_on_over_restarts_of_the_server() {
    seeds(8).for_each(|seed| survive_restarts(seed, 0, false));
}

#[test]
fn answered_bytes_survive_the_servers_loss_of_power() {
    seeds(8).for_each(|seed| survive_restarts(seed, 0, true));
}

#[test]
fn answered_bytes_survive_loss_of_power_and_a_faulty_network() {
    seeds(8).for_each(|seed| survive_restarts(seed, 20, true));
}

#[test]
fn changes_of_names_are_made_at_most_once_over_restarts() {
    for seed in seeds(8) {
        let _seed = Seed(seed);
        let world = World::new(seed, Behind::Pool(1));
        world.block_on(async {
            world.start(None).await;
            let shared = {
                let served = world.served().fs;
                let (inode, handle) = file(&*served, "shared").await;
                served.close(inode, handle).await.unwrap();
                inode
            };
            let fs = world.mount_over(FaultyRoute::new(&world, seed, 15)).await;
            let done = Arc::new(Mutex::new(false));
            let restarts = async {
                let mut dice = Dice(seed ^ 0xbeef);
                while !*done.lock().unwrap() {
                    world.pause(dice.millis(1500)).await;
                    world.restart(None, dice.millis(2000)).await;
                }
            };
            let work = async {
                let work = (0..4).map(|worker| {
                    change_once(fs.clone(), worker, Dice(seed * 100 + worker), shared)
                });
                join_all(work).await;
                *done.lock().unwrap() = true;
            };
            futures_util::future::join(work, restarts).await;
            world.pause(Duration::from_secs(60)).await;
            let lines = lines(&*world.served().fs, shared).await;
            let different: BTreeSet<&String> = lines.iter().collect();
            assert_eq!(different.len(), lines.len(), "a line was written twice");
        });
    }
}

#[test]
fn a_file_that_was_removed_while_open_is_stale_after_a_restart_and_others_are_not() {
    let world = World::new(1, Behind::Pool(1));
    world.block_on(async {
        world.start(None).await;
        let fs = world.mount().await;
        let (removed, of_removed) = file(&*fs, "removed").await;
        let (kept, of_kept) = file(&*fs, "kept").await;
        let line = Bytes::from_static(b"text");
        for (inode, handle) in [(removed, of_removed), (kept, of_kept)] {
            fs.write(Writer::At(me()), inode, handle, 0, line.clone()).await.unwrap();
        }
        fs.unlink(me(), ROOT, b"removed").await.unwrap();
        assert_eq!(fs.read(removed, of_removed, 0, 10).await, Ok(line.clone()));
        world.restart(None, Duration::from_secs(1)).await;
        assert_eq!(fs.read(removed, of_removed, 0, 10).await, Err(Errno::ESTALE));
        assert_eq!(fs.read(kept, of_kept, 0, 10).await, Ok(line));
        assert_eq!(fs.close(removed, of_removed).await, Ok(()));
        assert_eq!(fs.close(kept, of_kept).await, Ok(()));
        assert_eq!(fs.read(kept, of_kept, 0, 10).await, Err(Errno::EBADF));
    });
    world.check_ended();
}

#[test]
fn a_half_read_directory_goes_on_after_a_restart() {
    for (seed, behind) in [(1, Behind::Memory), (2, Behind::Pool(0)), (3, Behind::Pool(1))] {
        let world = World::new(seed, behind);
        world.block_on(async {
            world.start(None).await;
            let fs = world.mount().await;
            let name = |number: u32| format!("name-{number:05}");
            for number in 0..1500 {
                let name = name(number).into_bytes();
                let made = fs.mknod(me(), ROOT, &name, FileKind::Regular, 0o644, 0).await;
                fs.forget(made.unwrap().attr.inode, 1);
            }
            let handle = fs.opendir(me(), ROOT).await.unwrap().handle;
            let mut listed = Vec::new();
            let mut cookie = 0;
            for round in 0.. {
                let piece = fs.readdir(ROOT, handle, cookie, 301, round % 2 == 0).await.unwrap();
                let Some(last) = piece.last() else { break };
                cookie = last.cookie;
                for entry in piece {
                    entry.entry.into_iter().for_each(|found| fs.forget(found.attr.inode, 1));
                    listed.push(String::from_utf8(entry.name.to_vec()).unwrap());
                }
                if round == 1 || round == 2 {
                    fs.unlink(me(), ROOT, name(round * 7).as_bytes()).await.unwrap();
                    world.restart(None, Duration::from_secs(1)).await;
                }
            }
            let mut sorted = listed.clone();
            sorted.sort();
            sorted.dedup();
            assert_eq!(sorted.len(), listed.len(), "a name twice");
            // Those that were removed may be missing.
            assert!(sorted.len() >= 1498, "{}", sorted.len());
            fs.closedir(ROOT, handle).await.unwrap();
        });
        world.check_ended();
    }
}

#[test]
fn times_that_were_set_after_a_write_stay_when_bytes_are_sent_again() {
    let world = World::new(1, Behind::Pool(1));
    world.block_on(async {
        world.start(None).await;
        let fs = world.mount().await;
        let (inode, handle) = file(&*fs, "copied").await;
        fs.sync().await.unwrap();
        fs.write(Writer::At(me()), inode, handle, 0, vec![7; 100].into()).await.unwrap();
        let mtime = FileTime { secs: 1_000_000, nanos: 5 };
        let changes = SetAttr { mtime: Some(SetTime::To(mtime)), ..SetAttr::default() };
        fs.setattr(me(), inode, None, changes).await.unwrap();
        fs.persist(&[inode]).await.unwrap();
        world.restart(Some(3), Duration::ZERO).await;
        // A listing with attributes shows the bytes, too.
        let found = fs.lookup(me(), ROOT, b"copied").await.unwrap();
        assert_eq!((found.attr.size_bytes, found.attr.mtime), (100, mtime));
        fs.fsync(inode, handle, false).await.unwrap();
        let attr = fs.getattr(inode, None).await.unwrap().attr;
        assert_eq!((attr.size_bytes, attr.mtime), (100, mtime));
    });
}

#[test]
fn bytes_that_cannot_be_sent_again_are_said_once() {
    let world = World::new(1, Behind::Pool(1));
    world.block_on(async {
        world.start(None).await;
        let fs = world.mount().await;
        let (inode, handle) = file(&*fs, "lost").await;
        fs.sync().await.unwrap();
        let data = Bytes::from(vec![7; 500_000]);
        fs.write(Writer::At(me()), inode, handle, 0, data).await.unwrap();
        world.restart(Some(3), Duration::ZERO).await;
        let full = world.served().disk;
        full.fail_after(0, Errno::ENOSPC);
        // The call that finds it out is answered all the same.
        let attr = fs.getattr(inode, None).await;
        assert!(attr.is_ok() || full.faults_left() == 0, "{attr:?}");
        let synced = [fs.fsync(inode, handle, false).await, fs.fsync(inode, handle, false).await];
        assert_eq!(synced, [Err(Errno::EIO), Ok(())]);
        assert_eq!(fs.flush(inode, handle).await, Ok(()));
    });
}

#[test]
fn much_that_is_unstable_is_made_durable_by_the_client() {
    let world = World::new(1, Behind::Pool(1));
    world.block_on(async {
        world.start(None).await;
        let fs = world.mount().await;
        let (inode, handle) = file(&*fs, "large").await;
        fs.sync().await.unwrap();
        for number in 0..70u64 {
            let data = Bytes::from(vec![number as u8; 1 << 20]);
            let offset = number << 20;
            let written = fs.write(Writer::At(me()), inode, handle, offset, data).await;
            assert_eq!(written, Ok(1 << 20));
        }
        // The disk has those of which the client keeps none.
        let synced = world.served().disk;
        drop(fs);
        world.pause(Duration::from_secs(1)).await;
        drop(synced);
        world.restart(Some(1), Duration::ZERO).await;
        let served = world.served().fs;
        let size = served.getattr(inode, None).await.unwrap().attr.size_bytes;
        assert!(size > 60 << 20, "{size}");
    });
}

#[test]
fn what_is_unstable_for_long_is_made_durable_by_the_client() {
    let world = World::new(1, Behind::Pool(1));
    world.block_on(async {
        world.start(None).await;
        let fs = world.mount().await;
        let (inode, handle) = file(&*fs, "old").await;
        fs.sync().await.unwrap();
        fs.write(Writer::At(me()), inode, handle, 0, vec![7; 100].into()).await.unwrap();
        fs.close(inode, handle).await.unwrap();
        world.pause(Duration::from_secs(40)).await;
        world.sim.crash(world.client);
        drop(fs);
        world.restart(Some(1), Duration::ZERO).await;
        let served = world.served().fs;
        assert_eq!(served.getattr(inode, None).await.unwrap().attr.size_bytes, 100);
    });
}

// ---- sessions ----

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

#[test]
fn nobody_else_may_use_a_session() {
    let world = World::new(1, Behind::Memory);
    let stranger = world.sim.add_host(HostConfig::default());
    world.block_on(async {
        world.start(None).await;
        let recorder = Arc::new(Recorder { inner: world.route(), sent: Mutex::default() });
        let fs = world.mount_over(recorder.clone()).await;
        let (inode, handle) = file(&*fs, "secret").await;
        fs.write(Writer::At(me()), inode, handle, 0, Bytes::from_static(b"secret")).await.unwrap();
        assert_eq!(fs.read(inode, handle, 0, 9).await, Ok(Bytes::from_static(b"secret")));
        let sent = recorder.sent.lock().unwrap().clone();
        assert!(sent.len() >= 4);
        let transport = world.sim.transport(stranger);
        for request in &sent {
            let to = world.sim.peer(world.server);
            let answer = transport.call(to, request.clone(), Duration::from_secs(9)).await;
            match answer {
                Err(CallError::Refused(Refusal { code: 100, .. })) => {}
                // Its beginning says no more than that there is one.
                Ok(reply) if request.method == *METHODS.start() => {
                    assert!(reply.header.len() < 8, "{:?}", reply.header);
                }
                answer => panic!("{answer:?}"),
            }
        }
        assert_eq!(world.served().remote.counts(), (1, 1));
        // Its own peer may repeat all of it: nothing is done twice, or is told that it is not waited for.
        let before = fs.getattr(inode, None).await.unwrap();
        for request in sent {
            match world.route().call(request, Duration::from_secs(9)).await {
                Ok(_) | Err(CallError::Refused(Refusal { code: 102, .. })) => {}
                answer => panic!("{answer:?}"),
            }
        }
        assert_eq!(fs.getattr(inode, None).await, Ok(before));
        assert_eq!(world.served().remote.counts(), (1, 1));
    });
}

#[test]
fn the_session_of_a_dead_client_ends_and_closes_what_it_had_open() {
    let world = World::new(1, Behind::Memory);
    world.block_on(async {
        world.start(None).await;
        let fs = world.mount().await;
        let (inode, _) = file(&*fs, "removed").await;
        fs.opendir(me(), ROOT).await.unwrap();
        fs.unlink(me(), ROOT, b"removed").await.unwrap();
        let served = world.served();
        world.sim.crash_silently(world.client);
        drop(fs);
        world.pause(Duration::from_secs(500)).await;
        assert_eq!(served.remote.counts(), (1, 2));
        assert!(served.fs.getattr(inode, None).await.is_ok());
        world.pause(Duration::from_secs(200)).await;
        assert_eq!(served.remote.counts(), (0, 0));
        // Nobody holds it, and so it is gone.
        assert!(served.fs.getattr(inode, None).await.is_err());
    });
}

#[test]
fn an_idle_client_keeps_its_session() {
    let world = World::new(1, Behind::Memory);
    world.block_on(async {
        world.start(None).await;
        let fs = world.mount().await;
        let (inode, handle) = file(&*fs, "removed").await;
        fs.unlink(me(), ROOT, b"removed").await.unwrap();
        world.pause(Duration::from_secs(5000)).await;
        assert_eq!(fs.read(inode, handle, 0, 10).await, Ok(Bytes::new()));
        assert_eq!(world.served().remote.counts(), (1, 1));
        // One that was cut off for long begins anew.
        world.sim.partition(&[&[world.server], &[world.client]]);
        world.pause(Duration::from_secs(700)).await;
        world.sim.heal();
        assert_eq!(world.served().remote.counts(), (0, 0));
        let root = fs.lookup(me(), ROOT, b"removed").await;
        assert_eq!(root, Err(Errno::ENOENT));
        assert_eq!(world.served().remote.counts(), (1, 0));
    });
}

#[test]
fn what_a_caller_has_given_up_is_given_back() {
    let world = World::new(1, Behind::Memory);
    world.block_on(async {
        world.start(None).await;
        let fs = world.mount().await;
        let (inode, handle) = file(&*fs, "file").await;
        let env = world.sim.outside();
        let moment = Duration::from_micros(150);
        for _ in 0..10 {
            let opened = fs.open(me(), inode, OpenFlags::READ);
            assert!(atoll_env::timeout(&*env, moment, opened).await.is_err());
            let found = fs.lookup(me(), ROOT, b"file");
            assert!(atoll_env::timeout(&*env, moment, found).await.is_err());
        }
        world.pause(Duration::from_secs(1)).await;
        assert_eq!(world.served().remote.counts(), (1, 1));
        fs.close(inode, handle).await.unwrap();
        fs.unlink(me(), ROOT, b"file").await.unwrap();
        fs.forget(inode, 1);
        world.pause(Duration::from_secs(1)).await;
        assert!(world.served().fs.getattr(inode, None).await.is_err(), "somebody holds it");
    });
}

#[test]
fn a_change_that_is_given_up_is_made_whole_and_its_number_is_free() {
    let world = World::new(1, Behind::Pool(1));
    world.block_on(async {
        world.start(None).await;
        let fs = world.mount().await;
        world.served().disk.set_latency(1, Duration::from_secs(2));
        let env = world.sim.outside();
        let name = |number: u32| format!("name-{number}").into_bytes();
        for number in 0..5 {
            let name = name(number);
            let made = fs.mkdir(me(), ROOT, &name, 0o755);
            assert!(atoll_env::timeout(&*env, Duration::from_millis(1), made).await.is_err());
        }
        world.pause(Duration::from_secs(60)).await;
        world.served().disk.set_latency(1, Duration::ZERO);
        for number in 0..5 {
            let name = name(number);
            let found = fs.lookup(me(), ROOT, &name).await;
            assert_eq!(found.map(|entry| entry.attr.kind), Ok(FileKind::Directory));
        }
        drop(fs);
    });
    world.check_ended();
}

#[test]
fn a_slow_disk_is_waited_for() {
    let world = World::new(1, Behind::Pool(1));
    world.block_on(async {
        world.start(None).await;
        let fs = world.mount().await;
        let (inode, handle) = file(&*fs, "file").await;
        world.served().disk.set_latency(1, Duration::from_secs(4));
        let written = fs.write(Writer::At(me()), inode, handle, 0, vec![1; 9].into()).await;
        assert_eq!(written, Ok(9));
        // Longer than a change may take, while the server says that it is at it.
        world.served().disk.set_latency(1, Duration::from_secs(50));
        let began = world.sim.now();
        assert_eq!(fs.fsync(inode, handle, false).await, Ok(()));
        let took = world.sim.now().since(began);
        assert!(took > Duration::from_secs(31), "{took:?}");
        let began = world.sim.now();
        world.served().disk.set_latency(1, Duration::from_secs(500));
        let renamed = fs.rename(me(), ROOT, b"file", ROOT, b"other", RenameFlags::default()).await;
        assert_eq!(renamed, Err(Errno::EIO));
        assert!(world.sim.now().since(began) < Duration::from_secs(31));
    });
}

#[test]
fn calls_end_in_time_without_a_server() {
    let world = World::new(1, Behind::Memory);
    world.block_on(async {
        world.start(None).await;
        let fs = world.mount().await;
        let (inode, handle) = file(&*fs, "file").await;
        for is_silent in [false, true] {
            match is_silent {
                true => world.sim.crash_silently(world.server),
                false => world.sim.crash(world.server),
            }
            let began = world.sim.now();
            assert_eq!(fs.getattr(inode, None).await.map(|_| ()), Err(Errno::ETIMEDOUT));
            assert_eq!(fs.lookup(me(), ROOT, b"x").await, Err(Errno::ETIMEDOUT));
            assert!(world.sim.now().since(began) < Duration::from_secs(21));
            let began = world.sim.now();
            assert_eq!(fs.unlink(me(), ROOT, b"x").await, Err(Errno::EIO));
            assert!(world.sim.now().since(began) < Duration::from_secs(31));
            // Many at once wait no longer than one.
            let began = world.sim.now();
            let reads = join_all((0..100).map(|_| fs.read(inode, handle, 0, 10))).await;
            assert!(reads.iter().all(|read| *read == Err(Errno::ETIMEDOUT)));
            assert!(world.sim.now().since(began) < Duration::from_secs(31));
        }
    });
}

// ---- hostile bytes ----

#[test]
fn a_server_refuses_what_it_does_not_understand() {
    let world = World::new(1, Behind::Memory);
    world.block_on(async {
        world.start(None).await;
        let recorder = Arc::new(Recorder { inner: world.route(), sent: Mutex::default() });
        let fs = world.mount_over(recorder.clone()).await;
        let (inode, handle) = file(&*fs, "file").await;
        fs.write(Writer::At(me()), inode, handle, 0, Bytes::from_static(b"text")).await.unwrap();
        fs.setxattr(me(), inode, b"user.a", Bytes::from_static(b"b"), XattrFlags::default())
            .await
            .unwrap();
        fs.readdir(ROOT, handle, 0, 10, true).await.unwrap_err();
        let sent = recorder.sent.lock().unwrap().clone();
        let mut dice = Dice(1);
        for round in 0..5000 {
            let mut request = sent[dice.below(sent.len() as u64) as usize].clone();
            let mut header = request.header.to_vec();
            match dice.below(5) {
                0 => header = (0..dice.below(100)).map(|_| dice.below(256) as u8).collect(),
                1 => request.method = METHODS.start() + dice.below(16) as u16,
                2 => request.parts = (0..dice.below(3)).map(|_| vec![0; 2 << 20].into()).collect(),
                _ => {
                    for _ in 0..=dice.below(3) {
                        let at = dice.below(header.len() as u64) as usize;
                        header[at] = dice.below(256) as u8;
                    }
                }
            }
            request.header = header.into();
            if request.parts.len() > 1 && round % 20 > 0 {
                continue;
            }
            let _ = world.route().call(request, Duration::from_secs(5)).await;
        }
        world.served().remote.check_invariants();
        assert_eq!(fs.statfs(ROOT).await.map(|_| ()), Ok(()));
    });
}

/// Answers with damaged replies.
struct Liar {
    inner: RemoteServer,
    dice: Mutex<Dice>,
    honest: u64,
}

impl Service for Liar {
    fn handle(&self, from: Peer, request: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        let answer = self.inner.handle(from, request);
        let mut dice = Dice(self.dice.lock().unwrap().below(u64::MAX));
        let honest = self.honest;
        Box::pin(async move {
            let mut reply = answer.await?;
            if dice.below(100) < honest {
                return Ok(reply);
            }
            let mut header = reply.header.to_vec();
            match dice.below(6) {
                0 => header = (0..dice.below(60)).map(|_| dice.below(256) as u8).collect(),
                1 => reply.parts = vec![Bytes::from(vec![0; dice.below(2 << 20) as usize])],
                2 => reply.parts.clear(),
                3 => return Err(Refusal::new(99 + dice.below(5) as u16, "no")),
                _ if header.is_empty() => {}
                _ => {
                    let at = dice.below(header.len() as u64) as usize;
                    header[at] = dice.below(256) as u8;
                }
            }
            reply.header = header.into();
            Ok(reply)
        })
    }
}

#[test]
fn a_client_survives_a_server_that_lies() {
    for seed in seeds(10) {
        let _seed = Seed(seed);
        let world = World::new(seed, Behind::Memory);
        world.block_on(async {
            world.start(None).await;
            let fs = world.mount().await;
            let liar = Liar {
                inner: world.served().remote,
                dice: Mutex::new(Dice(seed)),
                honest: 30 + 5 * (seed % 10),
            };
            world.sim.transport(world.server).serve(Arc::new(liar));
            for number in 0..30 {
                let name = format!("name-{number}").into_bytes();
                let flags = OpenFlags::READ_WRITE;
                let made = fs.create(me(), ROOT, &name, 0o644, flags).await;
                let _ = fs.lookup(me(), ROOT, &name).await;
                let _ = fs.listxattr(ROOT).await;
                let _ = fs.statfs(ROOT).await;
                if let Ok(opened) = fs.opendir(me(), ROOT).await {
                    let _ = fs.readdir(ROOT, opened.handle, 0, 100, true).await;
                    let _ = fs.closedir(ROOT, opened.handle).await;
                }
                let Ok((entry, opened)) = made else { continue };
                let (inode, handle) = (entry.attr.inode, opened.handle);
                let data = Bytes::from(vec![1; 3000]);
                let _ = fs.write(Writer::AtEnd(me()), inode, handle, 0, data).await;
                let read = fs.read(inode, handle, 0, 3_000_000).await;
                assert!(read.is_ok_and(|read| read.len() <= 3_000_000) || number < 30);
                let _ = fs.fsync(inode, handle, false).await;
                let _ = fs.close(inode, handle).await;
                fs.forget(inode, 1);
            }
        });
    }
}
