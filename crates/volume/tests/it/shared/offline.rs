//! A mount whose ring cannot be reached: what it writes waits in the spool, whatever happens to the mount, and is on
//! the ring when that is back.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use atoll_dht::{
    Blocks, DhtConfig, GetError, HeldBlock, LeaseRenewal, LockGrant, LockLease, LockRefusal,
    NewBlock, PutError, Renewed, RingRoom, Wanted,
};
use atoll_env::{BoxFuture, Env, sleep};
use atoll_key::{BlockId, GroupId, volume_group};
use atoll_sim::SimConfig;
use atoll_vfs::{
    Caller, Errno, FileKind, FileLock, FileSystem, Handle, InodeNumber, LockKind, LockOwner,
    LockRange, OpenFlags, RenameFlags, SetAttr, Writer,
};
use atoll_volume::shared::access::{Credentials, groups, rebind};
use atoll_volume::shared::sealing::Sealing;
use atoll_volume::shared::{OpenError, SharedFs, SharedOptions};
use bytes::Bytes;

use super::mounts::{created_with, mounted_with, user, volume};
use crate::simulated_ring::Ring;
use crate::write::spool::{Life, MemorySpool};

pub(super) const ROOT: InodeNumber = InodeNumber::ROOT;
const RW: OpenFlags = OpenFlags::READ_WRITE;
const LONG: Duration = Duration::from_secs(3600);
const MINUTE: Duration = Duration::from_secs(60);

pub(super) fn me() -> Caller {
    Caller::default()
}

/// The node of a machine, which can be stopped.
pub(super) struct Node {
    env: Env,
    ring: Arc<dyn Blocks>,
    is_stopped: AtomicBool,
    /// It stops after so many more puts.
    puts_left: AtomicU64,
    /// Whether it takes nothing, and what it has refused.
    pub(super) is_full: AtomicBool,
    /// It has room for so many more puts.
    pub(super) puts_with_room: AtomicU64,
    /// How often something was put.
    pub(super) puts: AtomicU64,
    refused_bytes: AtomicU64,
    /// Whether a majority takes nothing of what is put, though some nodes may have it.
    pub(super) is_unconfirmed: AtomicBool,
}

impl Node {
    pub(super) fn stop(&self) {
        self.is_stopped.store(true, Ordering::Relaxed);
    }

    pub(super) fn stop_at_next_put(&self) {
        self.puts_left.store(0, Ordering::Relaxed);
    }

    pub(super) fn stop_after(&self, puts: u64) {
        self.puts_left.store(puts, Ordering::Relaxed);
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.is_stopped.load(Ordering::Relaxed)
    }

    pub(super) fn start(&self) {
        self.is_stopped.store(false, Ordering::Relaxed);
        self.puts_left.store(u64::MAX, Ordering::Relaxed);
    }

    /// Resolves at once, or after as long as a mount waits for its node, if it is stopped.
    fn is_there(&self) -> BoxFuture<'static, bool> {
        let (env, is_stopped) = (self.env.clone(), self.is_stopped.load(Ordering::Relaxed));
        Box::pin(async move {
            if is_stopped {
                sleep(&*env, Duration::from_secs(5)).await;
            }
            !is_stopped
        })
    }
}

/// What the ring says of its room.
pub(super) const ROOM: RingRoom =
    RingRoom { total_bytes: 8 << 30, free_bytes: 6 << 30, available_bytes: 1 << 30 };

impl Blocks for Node {
    fn room(&self) -> BoxFuture<'static, Option<RingRoom>> {
        let is_there = self.is_there();
        Box::pin(async move { is_there.await.then_some(ROOM) })
    }

    fn get_block(
        &self,
        id: BlockId,
        wanted: Wanted,
    ) -> BoxFuture<'static, Result<HeldBlock, GetError>> {
        let (is_there, got) = (self.is_there(), self.ring.get_block(id, wanted));
        Box::pin(async move {
            match is_there.await {
                true => got.await,
                false => Err(GetError::Unavailable { key: id.key, told: "no node".into() }),
            }
        })
    }

    fn put_blocks(&self, blocks: Vec<NewBlock>) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        let left = self.puts_left.load(Ordering::Relaxed);
        match left {
            0 => self.stop(),
            u64::MAX => {}
            _ => self.puts_left.store(left - 1, Ordering::Relaxed),
        }
        let (is_there, count) = (self.is_there(), blocks.len());
        self.puts.fetch_add(1, Ordering::Relaxed);
        match self.puts_with_room.load(Ordering::Relaxed) {
            0 => self.is_full.store(true, Ordering::Relaxed),
            u64::MAX => {}
            left => self.puts_with_room.store(left - 1, Ordering::Relaxed),
        }
        if self.is_full.load(Ordering::Relaxed) {
            let bytes: usize = blocks.iter().map(|block| block.bytes.len()).sum();
            self.refused_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
            return Box::pin(async move { vec![Err(PutError::Full("all are".into())); count] });
        }
        let put = self.ring.put_blocks(blocks);
        let is_unconfirmed = self.is_unconfirmed.load(Ordering::Relaxed);
        Box::pin(async move {
            match is_there.await {
                true if is_unconfirmed => {
                    put.await;
                    vec![Err(PutError::Unavailable("1 of 3 nodes has it".into())); count]
                }
                true => put.await,
                false => vec![Err(PutError::Unavailable("no node".into())); count],
            }
        })
    }

    fn put_in_order(&self, blocks: Vec<NewBlock>) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        self.put_blocks(blocks)
    }

    fn renew_blocks(
        &self,
        renewal: LeaseRenewal,
    ) -> BoxFuture<'static, Vec<Result<Renewed, PutError>>> {
        self.ring.renew_blocks(renewal)
    }

    fn watch(
        &self,
        id: BlockId,
        seen: u64,
    ) -> BoxFuture<'static, Result<Option<HeldBlock>, GetError>> {
        self.ring.watch(id, seen)
    }

    fn lock_lease(&self, ask: LockLease) -> BoxFuture<'static, Result<LockGrant, LockRefusal>> {
        let (is_there, asked) = (self.is_there(), self.ring.lock_lease(ask));
        Box::pin(async move {
            match is_there.await {
                true => asked.await,
                false => Err(LockRefusal::NoMajority("no node".into())),
            }
        })
    }
}

/// A machine with a node and a disk. Processes on it come and go.
pub(super) struct Machine {
    pub(super) env: Env,
    pub(super) node: Arc<Node>,
    pub(super) disk: MemorySpool,
    user: u8,
    options: SharedOptions,
}

impl Machine {
    pub(super) fn at(ring: &Ring, member: usize, user: u8, options: SharedOptions) -> Machine {
        let env = ring.sim.env(ring.members[member].host);
        let node = Arc::new(Node {
            env: env.clone(),
            ring: ring.members[member].dht.clone(),
            is_stopped: AtomicBool::new(false),
            puts_left: AtomicU64::new(u64::MAX),
            is_full: AtomicBool::new(false),
            puts_with_room: AtomicU64::new(u64::MAX),
            puts: AtomicU64::new(0),
            refused_bytes: AtomicU64::new(0),
            is_unconfirmed: AtomicBool::new(false),
        });
        Machine { env, node, disk: MemorySpool::default(), user, options }
    }

    pub(super) async fn mount(&self) -> (Result<SharedFs, OpenError>, Arc<Life>) {
        let (directory, life) = self.disk.used_by(&self.env);
        let user = (volume().volume_id(), user(self.user));
        let blocks: Arc<dyn Blocks> = self.node.clone();
        let options = self.options.clone();
        let fs = SharedFs::open_spooled(self.env.clone(), blocks, user, options, directory).await;
        (fs, life)
    }

    pub(super) async fn mounted(&self) -> SharedFs {
        self.mount().await.0.expect("mounts")
    }
}

/// A ring with a machine of user 1, and mounts of users 2 and 3 elsewhere.
pub(super) struct Setting {
    pub(super) ring: Ring,
    pub(super) machine: Machine,
    pub(super) others: Vec<SharedFs>,
}

impl Setting {
    pub(super) fn new(seed: u64) -> Setting {
        Setting::with(seed, SharedOptions::default(), false)
    }

    pub(super) fn with(seed: u64, options: SharedOptions, is_encrypted: bool) -> Setting {
        let sim = SimConfig { seed, jitter: 0.3, ..SimConfig::default() };
        let ring = Ring::with(sim, DhtConfig::default(), 7);
        let options = SharedOptions { names_max_age: Duration::ZERO, ..options };
        let machine = Machine::at(&ring, 0, 1, options.clone());
        let mut all = Setting { ring, machine, others: Vec::new() };
        let at = |member: usize| {
            let blocks: Arc<dyn Blocks> = all.ring.members[member].dht.clone();
            (all.ring.sim.env(all.ring.members[member].host), blocks)
        };
        let (env, blocks) = at(6);
        all.run(created_with(&env, &blocks, is_encrypted));
        let others = [2, 3].map(|number| {
            let (env, blocks) = at(number.into());
            all.run(mounted_with(&env, &blocks, number, options.clone()))
        });
        all.others = others.into();
        all
    }

    pub(super) fn run<T>(&self, work: impl Future<Output = T>) -> T {
        self.ring.sim.block_on(LONG, work).expect("calls have deadlines")
    }

    pub(super) fn wait(&self, time: Duration) {
        self.ring.sim.run_for(time);
    }

    pub(super) fn mounted(&self) -> SharedFs {
        self.run(self.machine.mounted())
    }

    /// The ring is back, and has what was spooled.
    pub(super) fn reconnect(&self) {
        self.machine.node.start();
        self.wait(MINUTE * 2);
    }

    pub(super) fn status(&self, fs: &SharedFs) -> String {
        let told = self.run(fs.getxattr(ROOT, b"user.atoll.status")).expect("a text");
        String::from_utf8_lossy(&told).into_owned()
    }

    pub(super) fn is_spool_empty(&self) -> bool {
        self.machine.disk.names().is_empty()
    }
}

/// Replaces what is in a file of a directory, which is made if it is not there. What the close answers.
pub(super) async fn write(
    fs: &SharedFs,
    parent: InodeNumber,
    name: &str,
    bytes: impl Into<Bytes>,
) -> Result<(), Errno> {
    let (entry, opened) = fs.create(me(), parent, name.as_bytes(), 0o644, RW).await?;
    let (number, handle) = (entry.attr.inode, opened.handle);
    let size = SetAttr { size_bytes: Some(0), ..SetAttr::default() };
    let written = async {
        fs.setattr(me(), number, Some(handle), size).await?;
        fs.write(Writer::At(me()), number, handle, 0, bytes.into()).await?;
        fs.flush(number, handle).await
    };
    let written = written.await;
    fs.close(number, handle).await?;
    fs.forget(number, 1);
    written
}

pub(super) async fn read(fs: &SharedFs, parent: InodeNumber, name: &str) -> Result<Bytes, Errno> {
    let entry = fs.lookup(me(), parent, name.as_bytes()).await?;
    let number = entry.attr.inode;
    let handle = fs.open(me(), number, OpenFlags::default()).await?.handle;
    let bytes = fs.read(number, handle, 0, 1 << 20).await;
    fs.close(number, handle).await?;
    fs.forget(number, 1);
    bytes
}

pub(super) async fn names(
    fs: &SharedFs,
    directory: InodeNumber,
) -> Result<BTreeSet<String>, Errno> {
    let handle = fs.opendir(me(), directory).await?.handle;
    let listed = fs.readdir(directory, handle, 0, 10_000, false).await;
    fs.closedir(directory, handle).await?;
    let name = |name: &[u8]| String::from_utf8_lossy(name).into_owned();
    Ok(listed?.into_iter().map(|entry| name(&entry.name)).collect())
}

/// All files below a directory, by path, with their contents. That each name leads to a file is checked besides.
pub(super) fn tree(
    fs: &SharedFs,
    at: InodeNumber,
    path: String,
) -> BoxFuture<'_, BTreeMap<String, Bytes>> {
    Box::pin(async move {
        let mut all = BTreeMap::new();
        for name in names(fs, at).await.expect("lists") {
            let path = format!("{path}/{name}");
            let found = fs.lookup(me(), at, name.as_bytes()).await;
            let found = found.unwrap_or_else(|errno| panic!("{path} leads nowhere: {errno}"));
            match found.attr.kind {
                FileKind::Directory => all.extend(tree(fs, found.attr.inode, path).await),
                FileKind::Regular => {
                    let read = read(fs, at, &name).await;
                    let bytes = read.unwrap_or_else(|errno| panic!("{path}: {errno}"));
                    all.insert(path, bytes);
                }
                _ => {}
            }
        }
        all
    })
}

pub(super) fn large(seed: u8) -> Bytes {
    (0..300_000u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8 ^ seed).collect()
}

/// A put that no majority takes leaves its block at one node. A mount that found it there took it for acknowledged and dropped
/// it from its spool: when that node died, closed files were gone.
#[test]
fn what_no_majority_has_taken_stays_in_the_spool() {
    for seed in 9330..9333 {
        let all = Setting::new(seed);
        let fs = all.mounted();
        all.run(write(&fs, ROOT, "before", "x")).expect("is written");
        all.machine.node.is_unconfirmed.store(true, Ordering::Relaxed);
        for n in 0..3 {
            all.run(write(&fs, ROOT, &format!("f{n}"), "x")).expect("is spooled");
        }
        all.run(write(&fs, ROOT, "before", "y")).expect("is spooled");
        for _ in 0..3 {
            all.wait(MINUTE * 8);
            let status = all.status(&fs);
            assert!(!all.is_spool_empty() && status != "ok", "seed {seed}: {status}");
        }
        all.machine.node.is_unconfirmed.store(false, Ordering::Relaxed);
        all.wait(MINUTE * 2);
        assert_eq!((all.is_spool_empty(), &*all.status(&fs)), (true, "ok"), "seed {seed}");
        let left = ["before", "f0", "f1", "f2"].map(str::to_owned);
        assert_eq!(all.run(names(&all.others[0], ROOT)), Ok(left.into()), "seed {seed}");
    }
}

/// The mount shows what another member has closed, its own program has not read that, and the ring goes away before it writes.
#[test]
fn contents_that_a_writer_has_not_read_are_kept_offline_too() {
    let all = Setting::new(9340);
    let (fs, other) = (all.mounted(), &all.others[0]);
    all.run(write(&fs, ROOT, "f", "first")).expect("is written");
    let (file, handle) = all.run(async {
        let file = fs.lookup(me(), ROOT, b"f").await.expect("is there").attr.inode;
        (file, fs.open(me(), file, RW).await.expect("opens").handle)
    });
    all.run(write(other, ROOT, "f", "acknowledged")).expect("is written");
    all.wait(Duration::from_secs(2));
    let shown = all.run(fs.getattr(file, None)).expect("is there").attr;
    assert_eq!(shown.size_bytes, 12, "the file has followed");
    all.machine.node.stop();
    all.run(async {
        fs.write(Writer::At(me()), file, handle, 0, "mine".into()).await.expect("is written");
        fs.flush(file, handle).await.expect("is spooled");
        fs.close(file, handle).await.expect("it is open");
    });
    all.reconnect();
    assert_eq!((all.is_spool_empty(), &*all.status(&fs)), (true, "ok"));
    for fs in [&fs, other] {
        let texts: BTreeSet<Bytes> = all.run(tree(fs, ROOT, String::new())).into_values().collect();
        assert_eq!(texts, BTreeSet::from(["acknowledged".into(), "mineowledged".into()]));
    }
}

#[test]
fn what_is_written_offline_is_seen_there_at_once_and_elsewhere_later() {
    let all = Setting::new(9300);
    let fs = all.mounted();
    let made = all.run(async {
        write(&fs, ROOT, "before", "online").await.expect("is written");
        write(&fs, ROOT, "goes", "away").await.expect("is written");
        fs.mkdir(me(), ROOT, b"old", 0o755).await.expect("is made").attr.inode
    });
    assert_eq!(all.status(&fs), "ok");
    all.machine.node.stop();
    all.run(async {
        write(&fs, ROOT, "small", "x").await.expect("is spooled");
        write(&fs, ROOT, "large", large(1)).await.expect("is spooled");
        write(&fs, ROOT, "before", "offline").await.expect("is spooled");
        let new = fs.mkdir(me(), made, b"new", 0o755).await.expect("is spooled").attr.inode;
        write(&fs, new, "deep", large(2)).await.expect("is spooled");
        fs.symlink(me(), new, b"link", b"deep").await.expect("is spooled");
        fs.unlink(me(), ROOT, b"goes").await.expect("is spooled");
        let moved = fs.rename(me(), ROOT, b"small", new, b"moved", RenameFlags::default());
        moved.await.expect("is spooled");
        fs.fsyncdir(ROOT, Handle(0), false).await.expect("is durable");
    });
    let told = all.status(&fs);
    assert!(told.contains("files wait in the spool") && told.contains("offline since"), "{told}");
    let there = [
        ("/before", Bytes::from_static(b"offline")),
        ("/large", large(1)),
        ("/old/new/deep", large(2)),
        ("/old/new/moved", Bytes::from_static(b"x")),
    ];
    let there: BTreeMap<String, Bytes> =
        there.into_iter().map(|(path, bytes)| (path.to_owned(), bytes)).collect();
    assert_eq!(all.run(tree(&fs, ROOT, String::new())), there);
    assert_eq!(all.run(names(&all.others[0], ROOT)).expect("lists").len(), 3);
    all.reconnect();
    assert_eq!(all.status(&fs), "ok");
    assert!(all.is_spool_empty(), "{:?}", all.machine.disk.names());
    for fs in [&fs, &all.others[0]] {
        assert_eq!(all.run(tree(fs, ROOT, String::new())), there);
    }
}

/// A program that writes many files is not to wait for a deadline with each, nor one that reads.
#[test]
fn an_offline_mount_answers_at_once() {
    let all = Setting::new(9301);
    let fs = all.mounted();
    all.run(write(&all.others[0], ROOT, "theirs", "x")).expect("is written");
    all.run(write(&fs, ROOT, "first", "x")).expect("is written");
    all.machine.node.stop();
    all.run(write(&fs, ROOT, "second", "y")).expect("is spooled");
    let begin = all.ring.sim.now();
    all.run(async {
        for n in 0..100 {
            write(&fs, ROOT, &format!("f{n}"), "x").await.expect("is spooled");
        }
        assert_eq!(read(&fs, ROOT, "first").await.expect("is in memory"), "x");
        // It is known by name, and was never read.
        assert_eq!(read(&fs, ROOT, "theirs").await, Err(Errno::ETIMEDOUT));
    });
    let took = all.ring.sim.now().since(begin);
    assert!(took < Duration::from_secs(5), "{took:?}");
}

#[test]
fn locks_and_exclusive_creation_are_refused_offline() {
    let all = Setting::new(9302);
    let fs = all.mounted();
    all.run(write(&fs, ROOT, "f", "x")).expect("is written");
    all.machine.node.stop();
    all.run(write(&fs, ROOT, "g", "x")).expect("is spooled");
    all.run(async {
        let exclusive = OpenFlags(RW.0 | OpenFlags::EXCLUSIVE);
        let made = fs.create(me(), ROOT, b"lock", 0o600, exclusive).await;
        assert_eq!(made.err(), Some(Errno::ENOLCK));
        let number = fs.lookup(me(), ROOT, b"f").await.expect("is known").attr.inode;
        let handle = fs.open(me(), number, RW).await.expect("opens").handle;
        let (kind, range) = (LockKind::Exclusive, LockRange::WHOLE);
        let wanted = FileLock { kind, range, pid: 7, through: Some(handle) };
        let locks = fs.locks().expect("it has locks");
        let locked = locks.lock(number, LockOwner(1), wanted, false).await;
        assert_eq!(locked, Err(Errno::ENOLCK));
    });
}

/// What was removed before the lock is given up cannot be brought to the ring; the unlock ends all the same.
#[test]
fn a_lock_is_given_up_offline_after_a_removal() {
    for mode in [LockKind::Shared, LockKind::Exclusive] {
        let all = Setting::new(9303);
        let fs = all.mounted();
        all.run(write(&fs, ROOT, "f", "x")).expect("is written");
        all.run(write(&fs, ROOT, "g", "x")).expect("is written");
        all.run(async {
            let number = fs.lookup(me(), ROOT, b"f").await.expect("there").attr.inode;
            let handle = fs.open(me(), number, RW).await.expect("opens").handle;
            let range = LockRange::WHOLE;
            let wanted = FileLock { kind: mode, range, pid: 7, through: Some(handle) };
            let locks = fs.locks().expect("it has locks");
            locks.lock(number, LockOwner(1), wanted, false).await.expect("free");
            all.machine.node.stop();
            fs.unlink(me(), ROOT, b"g").await.expect("removes");
            // The lock is lost, or what was removed is told to wait for the ring.
            let _ = locks.unlock(number, LockOwner(1), range).await;
            assert_eq!(names(&fs, ROOT).await.expect("is known"), BTreeSet::from(["f".into()]));
        });
        all.reconnect();
        let seen = all.run(names(&all.others[0], ROOT)).expect("the ring is there");
        assert_eq!(seen, BTreeSet::from(["f".into()]));
        assert_eq!(all.status(&fs), "ok");
        assert!(all.is_spool_empty());
    }
}

/// The process or the machine dies at any moment; the next mount finds all that a call has answered for.
#[test]
fn what_a_close_has_answered_for_survives_the_mount() {
    for seed in 0..12u64 {
        let all = Setting::new(9310 + seed);
        let (fs, life) = all.run(all.machine.mount());
        let fs = fs.expect("mounts");
        all.run(write(&fs, ROOT, "f0", "before")).expect("is written");
        all.machine.node.stop();
        let env = all.ring.sim.outside();
        life.ends_after(3 + env.random_u64() % 60);
        let mut answered = BTreeMap::from([("/f0".to_owned(), Bytes::from_static(b"before"))]);
        let mut tried = answered.clone();
        let works = async {
            for n in 0..30u8 {
                let (name, bytes) = (format!("f{}", n % 7), Bytes::from(vec![n; 30_000]));
                tried.insert(format!("/{name}"), bytes.clone());
                if write(&fs, ROOT, &name, bytes.clone()).await.is_ok() {
                    answered.insert(format!("/{name}"), bytes);
                }
            }
        };
        // Calls of a dead disk do not return.
        all.run(futures_util::future::select(
            std::pin::pin!(works),
            sleep(&*env, Duration::from_secs(200)),
        ));
        all.machine.disk.crash(env.random_u64() % 101);
        drop(fs);
        all.machine.node.start();
        // It dies once more while it brings what is there.
        let (fs, life) = all.run(all.machine.mount());
        life.ends_after(env.random_u64() % 40);
        all.wait(MINUTE);
        drop(fs);
        let fs = all.mounted();
        let check = |all: BTreeMap<String, Bytes>, whose: &str| {
            for (path, bytes) in &answered {
                let is_there = all.get(path).is_some_and(|there| {
                    // What was under way when the mount died may be there or not.
                    there == bytes || Some(there) == tried.get(path)
                });
                assert!(is_there, "seed {seed}, {whose}: {path}");
            }
        };
        check(all.run(tree(&fs, ROOT, String::new())), "own");
        all.wait(MINUTE);
        check(all.run(tree(&all.others[0], ROOT, String::new())), "other");
        assert!(all.is_spool_empty(), "seed {seed}: {:?}", all.machine.disk.names());
    }
}

/// Replicas take no version that was signed more than ten minutes ago.
#[test]
fn what_has_waited_for_hours_is_signed_again() {
    let all = Setting::new(9330);
    let fs = all.mounted();
    all.run(write(&fs, ROOT, "f", "old")).expect("is written");
    all.machine.node.stop();
    all.run(write(&fs, ROOT, "f", "new")).expect("is spooled");
    all.run(write(&fs, ROOT, "g", large(3))).expect("is spooled");
    all.wait(2 * LONG);
    // One is written by the mount that signs it again, one by the next.
    all.machine.node.start();
    all.wait(Duration::from_secs(1));
    drop(fs);
    let fs = all.mounted();
    all.reconnect();
    assert_eq!(all.status(&fs), "ok");
    for fs in [&fs, &all.others[0]] {
        assert_eq!(all.run(read(fs, ROOT, "f")).expect("reads"), "new");
        assert_eq!(all.run(read(fs, ROOT, "g")).expect("reads"), large(3));
    }
    // The mount goes on from it, and nothing of it comes back.
    all.run(write(&fs, ROOT, "f", "newer")).expect("is written");
    all.wait(MINUTE);
    assert_eq!(all.run(names(&all.others[0], ROOT)).expect("lists").len(), 2);
    assert_eq!(all.run(read(&all.others[0], ROOT, "f")).expect("reads"), "newer");
}

/// The mount lives on, writes while the ring is back and what is spooled is signed again.
#[test]
fn a_mount_that_goes_on_writing_while_the_ring_comes_back_loses_nothing() {
    for seed in 0..4 {
        let all = Setting::new(9340 + seed);
        let fs = all.mounted();
        all.run(write(&fs, ROOT, "f0", "before")).expect("is written");
        all.machine.node.stop();
        let mut last = BTreeMap::new();
        let mut n = 0;
        for round in 0..3 {
            for _ in 0..20 {
                let (name, text) = (format!("f{}", n % 5), format!("{n}"));
                all.run(write(&fs, ROOT, &name, text.clone())).expect("is spooled or written");
                last.insert(format!("/{name}"), Bytes::from(text));
                all.run(fs.unlink(me(), ROOT, b"f4")).ok();
                last.remove("/f4");
                all.wait(Duration::from_millis(300 * (round % 2)));
                n += 1;
            }
            match round {
                0 => all.wait(Duration::from_secs(1200)),
                _ => all.machine.node.start(),
            }
        }
        all.reconnect();
        assert_eq!(all.status(&fs), "ok", "seed {seed}");
        for fs in [&fs, &all.others[0]] {
            assert_eq!(all.run(tree(fs, ROOT, String::new())), last, "seed {seed}");
        }
    }
}

/// Contents of both, names of both.
#[test]
fn what_others_wrote_meanwhile_is_kept_beside_it() {
    for (seed, wait) in [(9350, MINUTE), (9351, LONG)] {
        let all = Setting::new(seed);
        let fs = all.mounted();
        let theirs = &all.others[0];
        all.run(async {
            write(&fs, ROOT, "both", "base").await.expect("is written");
            write(&fs, ROOT, "goes here", "x").await.expect("is written");
            write(&fs, ROOT, "goes there", "x").await.expect("is written");
            read(&fs, ROOT, "both").await.expect("reads");
        });
        all.machine.node.stop();
        all.run(async {
            write(&fs, ROOT, "both", "mine").await.expect("is spooled");
            write(&fs, ROOT, "mine", "x").await.expect("is spooled");
            fs.unlink(me(), ROOT, b"goes here").await.expect("is spooled");
            write(theirs, ROOT, "both", "theirs").await.expect("is written");
            write(theirs, ROOT, "theirs", "x").await.expect("is written");
            theirs.unlink(me(), ROOT, b"goes there").await.expect("is removed");
            theirs.sync().await.expect("is removed");
        });
        all.wait(wait);
        all.reconnect();
        // Whoever opens it makes files of both contents.
        all.run(read(theirs, ROOT, "both")).expect("reads");
        all.wait(MINUTE);
        let there = all.run(tree(theirs, ROOT, String::new()));
        assert_eq!(all.run(tree(&fs, ROOT, String::new())), there);
        let texts: BTreeSet<&[u8]> = there.values().map(|bytes| &bytes[..]).collect();
        assert!(texts.contains(&b"mine"[..]) && texts.contains(&b"theirs"[..]), "{there:?}");
        assert!(there.contains_key("/mine") && there.contains_key("/theirs"), "{there:?}");
        let kept = |path: &&String| path.starts_with("/both~");
        assert_eq!(there.keys().filter(kept).count(), 1, "{there:?}");
        assert!(!there.contains_key("/goes here") && !there.contains_key("/goes there"));
        assert_eq!(there.len(), 4);
    }
}

/// Its inode goes when it has no name anywhere, and that is not known offline.
#[test]
fn a_file_that_others_have_renamed_meanwhile_survives_its_removal_offline() {
    let all = Setting::new(9360);
    let fs = all.mounted();
    all.run(write(&fs, ROOT, "old", "x")).expect("is written");
    all.machine.node.stop();
    all.run(fs.unlink(me(), ROOT, b"old")).expect("is spooled");
    let theirs = &all.others[0];
    all.run(theirs.rename(me(), ROOT, b"old", ROOT, b"new", RenameFlags::default()))
        .expect("is renamed");
    all.reconnect();
    all.wait(MINUTE);
    let there = all.run(tree(theirs, ROOT, String::new()));
    assert_eq!(there, BTreeMap::from([("/new".to_owned(), Bytes::from_static(b"x"))]));
}

/// A name never leads nowhere, whenever what is brought to the ring stops.
#[test]
fn an_inode_reaches_the_ring_before_its_names() {
    for puts in 0..14 {
        let all = Setting::new(9400 + puts);
        let fs = all.mounted();
        let old = all.run(async {
            write(&fs, ROOT, "a", "x").await.expect("is written");
            fs.mkdir(me(), ROOT, b"old", 0o755).await.expect("is made").attr.inode
        });
        all.machine.node.stop();
        all.run(async {
            // The root directory is spooled first, and again when it has what was made after it.
            write(&fs, ROOT, "first", "x").await.expect("is spooled");
            let one = fs.mkdir(me(), ROOT, b"one", 0o755).await.expect("is spooled").attr.inode;
            let two = fs.mkdir(me(), one, b"two", 0o755).await.expect("is spooled").attr.inode;
            write(&fs, two, "deep", large(4)).await.expect("is spooled");
            write(&fs, one, "b", "y").await.expect("is spooled");
            let moved = fs.rename(me(), ROOT, b"a", old, b"a", RenameFlags::default());
            moved.await.expect("is spooled");
            write(&fs, one, "b", "z").await.expect("is spooled");
        });
        all.machine.node.start();
        all.machine.node.puts_left.store(puts, Ordering::Relaxed);
        all.wait(MINUTE);
        let there = all.run(tree(&all.others[0], ROOT, String::new()));
        let has_a = there.contains_key("/a") || there.contains_key("/old/a");
        assert!(has_a, "after {puts}: {there:?}");
        all.reconnect();
        let there = all.run(tree(&all.others[0], ROOT, String::new()));
        assert_eq!(there.len(), 4, "after {puts}: {there:?}");
    }
}

/// A certificate is not looked for only when it is needed.
#[test]
fn what_was_only_read_can_be_written_without_the_ring() {
    let all = Setting::new(9380);
    let fs = all.mounted();
    all.run(write(&all.others[0], ROOT, "f", "old")).expect("is written");
    let env = all.ring.sim.env(all.ring.members[6].host);
    let blocks: Arc<dyn Blocks> = all.ring.members[6].dht.clone();
    all.run(async {
        let begun = groups::begin_epoch(&env, &blocks, &volume(), user(4).user_id()).await;
        let (_, record) = begun.expect("begins");
        let group = |epoch| volume_group(&volume(), epoch).group_id();
        rebind_all(&all, group(0), group(record.group_epoch)).await;
    });
    assert_eq!(all.run(read(&fs, ROOT, "f")).expect("reads"), "old");
    all.wait(Duration::from_secs(20));
    all.machine.node.stop();
    all.run(write(&fs, ROOT, "f", "new")).expect("is spooled");
    all.run(write(&fs, ROOT, "g", "new")).expect("is spooled");
    all.reconnect();
    assert_eq!(all.run(read(&all.others[0], ROOT, "f")).expect("reads"), "new");
}

/// A directory is signed before it is known whether the ring takes the inode that it names.
#[test]
fn a_name_that_was_not_made_for_want_of_room_comes_with_no_later_write() {
    let all = Setting::new(9400);
    let fs = all.mounted();
    all.run(write(&fs, ROOT, "index", "old")).expect("is written");
    all.run(write(&fs, ROOT, "other", "x")).expect("is written");
    let node = &all.machine.node;
    node.is_full.store(true, Ordering::Relaxed);
    let made = all.run(fs.mkdir(me(), ROOT, b"directory", 0o755));
    assert_eq!(made.map(drop), Err(Errno::ENOSPC));
    let exclusive = OpenFlags(OpenFlags::READ_WRITE.0 | OpenFlags::EXCLUSIVE);
    let made = all.run(fs.create(me(), ROOT, b"temporary", 0o644, exclusive));
    assert_eq!(made.map(drop), Err(Errno::ENOSPC));
    node.is_full.store(false, Ordering::Relaxed);
    all.run(fs.unlink(me(), ROOT, b"other")).expect("removes");
    all.wait(Duration::from_secs(20));
    let names = |fs: &SharedFs| -> Vec<String> {
        all.run(tree(fs, ROOT, String::new())).into_keys().collect()
    };
    assert_eq!(names(&all.others[0]), ["/index"]);
    assert_eq!(names(&fs), ["/index"]);
    // As programs save a file: the second attempt succeeds.
    let (entry, opened) =
        all.run(fs.create(me(), ROOT, b"temporary", 0o644, exclusive)).expect("is made");
    all.run(fs.close(entry.attr.inode, opened.handle)).expect("closes");
    all.run(write(&fs, ROOT, "temporary", "new")).expect("is written");
    let to = (ROOT, b"index");
    all.run(fs.rename(me(), ROOT, b"temporary", to.0, to.1, RenameFlags::default()))
        .expect("moves");
    all.run(fs.mkdir(me(), ROOT, b"directory", 0o755)).expect("is made");
    all.wait(Duration::from_secs(20));
    assert_eq!(all.run(read(&all.others[0], ROOT, "index")).expect("reads"), "new");
    assert_eq!(names(&all.others[0]), names(&fs));
}

/// The line has other uses than to carry again and again what there is no room for.
#[test]
fn what_a_full_ring_refuses_is_sent_again_less_and_less_often() {
    let all = Setting::new(9390);
    let fs = all.mounted();
    all.run(write(&fs, ROOT, "f", "old")).expect("is written");
    let node = &all.machine.node;
    node.is_full.store(true, Ordering::Relaxed);
    assert_eq!(all.run(write(&fs, ROOT, "f", large(20))).err(), Some(Errno::ENOSPC));
    assert_eq!(all.run(write(&fs, ROOT, "new", large(20))).err(), Some(Errno::ENOSPC));
    let sent = || node.refused_bytes.load(Ordering::Relaxed);
    all.wait(MINUTE * 5);
    let before = sent();
    all.wait(MINUTE * 10);
    let each = large(20).len() as u64;
    assert!(sent() > before, "it is tried again");
    assert!(sent() - before <= 2 * 6 * each, "{} bytes of a file of {each}", sent() - before);
    node.is_full.store(false, Ordering::Relaxed);
    all.wait(MINUTE * 3);
    for name in ["f", "new"] {
        assert_eq!(all.run(read(&all.others[0], ROOT, name)).expect("reads"), large(20));
    }
}

pub(super) async fn rebind_all(all: &Setting, from: GroupId, to: GroupId) {
    let env = all.ring.sim.env(all.ring.members[6].host);
    let blocks: Arc<dyn Blocks> = all.ring.members[6].dht.clone();
    let (key, owner) = (volume(), Some(user(9)));
    let found = atoll_volume::shared::access::read_volume(&blocks, key.volume_id()).await;
    let (_, record) = found.expect("is read").expect("there");
    let credentials = Credentials::new(env.clone(), blocks.clone(), owner);
    let swap = |groups: &[GroupId]| {
        groups.iter().map(|group| if *group == from { to } else { *group }).collect()
    };
    let sealing = Sealing::none();
    let (owner, mut progress) = ((&key, &sealing), |_: &_| {});
    let top = record.root;
    rebind(&env, &blocks, owner, &credentials, top, &swap, &mut progress).await;
}

/// A member who was shut out meanwhile, and one who was not.
#[test]
fn what_a_member_may_not_write_any_more_stays_in_the_spool() {
    for is_shut_out in [true, false] {
        let all = Setting::new(9370);
        let fs = all.mounted();
        all.run(write(&fs, ROOT, "f", "old")).expect("is written");
        all.machine.node.stop();
        all.run(write(&fs, ROOT, "f", "new")).expect("is spooled");
        all.run(write(&fs, ROOT, "g", large(5))).expect("is spooled");
        let env = all.ring.sim.env(all.ring.members[6].host);
        let blocks: Arc<dyn Blocks> = all.ring.members[6].dht.clone();
        all.run(async {
            let shut_out = user(if is_shut_out { 1 } else { 4 }).user_id();
            let begun = groups::begin_epoch(&env, &blocks, &volume(), shut_out).await;
            let (_, record) = begun.expect("begins");
            let group = |epoch| volume_group(&volume(), epoch).group_id();
            rebind_all(&all, group(0), group(record.group_epoch)).await;
        });
        all.wait(Duration::from_secs(900));
        all.reconnect();
        let theirs = &all.others[0];
        if !is_shut_out {
            assert_eq!(all.status(&fs), "ok");
            assert_eq!(all.run(read(theirs, ROOT, "f")).expect("reads"), "new");
            assert_eq!(all.run(read(theirs, ROOT, "g")).expect("reads"), large(5));
            continue;
        }
        let told = all.status(&fs);
        assert!(told.contains("does not take") && told.contains("copy them out"), "{told}");
        assert_eq!(all.run(read(theirs, ROOT, "f")).expect("reads"), "old");
        assert_eq!(all.run(read(theirs, ROOT, "g")).err(), Some(Errno::ENOENT));
        // What others write goes on being seen, and nothing of this is taken from the user.
        all.run(write(theirs, ROOT, "theirs", "x")).expect("is written");
        assert_eq!(all.run(read(&fs, ROOT, "theirs")).expect("reads"), "x");
        drop(fs);
        let fs = all.mounted();
        all.wait(MINUTE * 5);
        assert_eq!(all.run(read(&fs, ROOT, "f")).expect("reads"), "new");
        assert_eq!(all.run(read(&fs, ROOT, "g")).expect("reads"), large(5));
        assert_eq!(all.run(write(&fs, ROOT, "h", "x")).err(), Some(Errno::EACCES));
        // The owner lets the member in again.
        let (_, record) = all
            .run(atoll_volume::shared::access::read_volume(&blocks, volume().volume_id()))
            .expect("is read")
            .expect("there");
        let member = (user(1).user_id(), "");
        let owner = (&volume(), &record);
        all.run(groups::add_volume_member(&env, &blocks, owner, member, 0)).expect("is added");
        all.wait(Duration::from_secs(600));
        assert_eq!(all.run(read(theirs, ROOT, "f")).expect("reads"), "new", "{}", all.status(&fs));
    }
}

#[test]
fn a_full_spool_is_told_and_keeps_what_it_has() {
    let options = SharedOptions { max_spool_bytes: 400_000, ..SharedOptions::default() };
    let all = Setting::with(9380, options, false);
    let fs = all.mounted();
    all.run(write(&fs, ROOT, "f", "x")).expect("is written");
    all.machine.node.stop();
    all.run(write(&fs, ROOT, "fits", large(6))).expect("is spooled");
    assert_eq!(all.run(write(&fs, ROOT, "does not", large(7))).err(), Some(Errno::ENOSPC));
    all.machine.disk.is_full.store(true, Ordering::Relaxed);
    assert_eq!(all.run(write(&fs, ROOT, "f", "y")).err(), Some(Errno::ENOSPC));
    all.machine.disk.is_full.store(false, Ordering::Relaxed);
    all.reconnect();
    let there = all.run(tree(&all.others[0], ROOT, String::new()));
    assert_eq!(there["/fits"], large(6));
    // It was in memory, and is tried again.
    assert_eq!(there["/does not"], large(7));
    assert_eq!(there["/f"], "y");
    assert!(all.is_spool_empty());
}

#[test]
fn files_that_are_not_a_mounts_own_are_set_aside() {
    let all = Setting::new(9390);
    let fs = all.mounted();
    all.run(write(&fs, ROOT, "f", "x")).expect("is written");
    all.machine.node.stop();
    all.run(write(&fs, ROOT, "f", "y")).expect("is spooled");
    all.run(write(&fs, ROOT, "g", "y")).expect("is spooled");
    drop(fs);
    let names = all.machine.disk.names();
    let inodes: Vec<&String> = names.iter().filter(|name| name.ends_with(".inode")).collect();
    // The second version of the directory.
    all.machine.disk.flip(inodes.last().expect("some"), 500);
    all.machine.node.start();
    let fs = all.mounted();
    let told = all.status(&fs);
    assert!(told.contains("1 file of the spool was damaged and is set aside"), "{told}");
    all.wait(MINUTE * 2);
    assert_eq!(all.run(read(&all.others[0], ROOT, "f")).expect("reads"), "y");
    let left = all.machine.disk.names();
    assert!(left.len() == 1 && left[0].starts_with("aside/"), "{left:?}");
}

/// What is sealed stays sealed on disk, and comes to the ring as it is.
#[test]
fn the_spool_of_an_encrypted_volume_is_sealed() {
    let all = Setting::with(9391, SharedOptions::default(), true);
    let fs = all.mounted();
    all.run(write(&fs, ROOT, "f", "x")).expect("is written");
    all.machine.node.stop();
    let text = "a text that nobody else may read ".repeat(1000);
    all.run(write(&fs, ROOT, "a secret name", text.clone())).expect("is spooled");
    let on_disk = all.machine.disk.all();
    let holds = |what: &[u8]| on_disk.windows(what.len()).any(|bytes| bytes == what);
    assert!(!holds(b"a secret name") && !holds(&text.as_bytes()[..33]) && on_disk.len() > 30_000);
    // Without the record of the readers the key serves for ten minutes.
    all.wait(Duration::from_secs(700));
    assert_eq!(all.run(write(&fs, ROOT, "late", "x")).err(), Some(Errno::ETIMEDOUT));
    all.reconnect();
    let read = all.run(read(&all.others[0], ROOT, "a secret name"));
    assert_eq!(read.expect("reads"), text);
}

/// The node is there and the others are not: another kind of being offline.
#[test]
fn a_mount_cut_off_with_its_node_spools_until_it_is_back() {
    let all = Setting::new(9392);
    let fs = all.mounted();
    all.run(write(&fs, ROOT, "f", "x")).expect("is written");
    let host = all.ring.members[0].host;
    all.ring.sim.partition(&[&[host]]);
    all.run(write(&fs, ROOT, "f", "y")).expect("is spooled");
    all.run(write(&fs, ROOT, "g", large(8))).expect("is spooled");
    all.ring.sim.heal();
    all.wait(Duration::from_secs(1200));
    assert_eq!(all.status(&fs), "ok");
    assert_eq!(all.run(read(&all.others[0], ROOT, "f")).expect("reads"), "y");
    assert_eq!(all.run(read(&all.others[0], ROOT, "g")).expect("reads"), large(8));
}

#[test]
fn a_mount_that_ends_offline_leaves_its_files_to_the_next() {
    let all = Setting::new(9393);
    let fs = all.mounted();
    all.run(write(&fs, ROOT, "f", "x")).expect("is written");
    all.machine.node.stop();
    all.run(write(&fs, ROOT, "f", "y")).expect("is spooled");
    all.run(fs.end()).expect("nothing is lost");
    assert_eq!(fs.spooled().map(|spooled| spooled.files), Some(1));
    drop(fs);
    assert!(matches!(all.run(all.machine.mount()).0, Err(OpenError::Get(_))));
    all.machine.node.start();
    let fs = all.mounted();
    assert_eq!(all.run(read(&fs, ROOT, "f")).expect("reads"), "y");
    all.run(fs.end()).expect("nothing is lost");
    assert_eq!(fs.spooled(), None);
    assert_eq!(all.run(read(&all.others[0], ROOT, "f")).expect("reads"), "y");
}
