//! Locks across mounts on a ring in the simulator: programs on two mounts that keep a file open all the
//! time and take turns by a lock, names that are made exclusively, and what becomes of a lock that is lost.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use atoll_dht::{
    Blocks, DhtConfig, GetError, HeldBlock, LeaseRenewal, LockGrant, LockLease, LockRefusal,
    NewBlock, PutError, Renewed, Wanted,
};
use atoll_env::{BoxFuture, Env, sleep};
use atoll_key::BlockId;
use atoll_sim::{HostId, Latency, SimConfig};
use atoll_vfs::{
    Caller, Errno, FileLock, FileSystem, Handle, InodeNumber, LockKind, LockOwner, LockRange,
    OpenFlags, RenameFlags, Writer,
};
use atoll_volume::shared::{Consistency, SharedFs, SharedOptions};
use bytes::Bytes;
use futures_util::future::{join, join_all};

use super::mounts::{created, mounted_with};
use crate::simulated_ring::Ring;

const LONG: Duration = Duration::from_secs(3600);
const ROOT: InodeNumber = InodeNumber::ROOT;
pub(super) const EXCLUSIVE: FileLock =
    FileLock { kind: LockKind::Exclusive, range: LockRange::WHOLE, pid: 7, through: None };
pub(super) const SHARED: FileLock = FileLock { kind: LockKind::Shared, ..EXCLUSIVE };

fn me() -> Caller {
    Caller::default()
}

/// A ring with mounts of one volume at its first nodes.
pub(super) struct Mounts {
    pub(super) ring: Ring,
    pub(super) mounts: Vec<SharedFs>,
}

impl Mounts {
    pub(super) fn new(seed: u64, nodes: usize, mounts: usize, consistency: Consistency) -> Mounts {
        let sim = SimConfig { seed, jitter: 0.3, ..SimConfig::default() };
        Mounts::with(sim, nodes, mounts, consistency)
    }

    pub(super) fn with(
        sim: SimConfig,
        nodes: usize,
        mounts: usize,
        consistency: Consistency,
    ) -> Mounts {
        let names_max_age = Duration::ZERO;
        let options = SharedOptions { names_max_age, consistency, ..SharedOptions::default() };
        Mounts::with_options(sim, nodes, mounts, options)
    }

    pub(super) fn with_options(
        sim: SimConfig,
        nodes: usize,
        mounts: usize,
        options: SharedOptions,
    ) -> Mounts {
        Mounts::on(Ring::with(sim, DhtConfig::default(), nodes), mounts, options)
    }

    /// Mounts at the first nodes of a ring.
    pub(super) fn on(ring: Ring, mounts: usize, options: SharedOptions) -> Mounts {
        let mut all = Mounts { ring, mounts: Vec::new() };
        let blocks = all.ring.members[0].dht.clone() as std::sync::Arc<dyn atoll_dht::Blocks>;
        let env = all.env(0);
        all.run(created(&env, &blocks));
        for at in 0..mounts {
            let (env, blocks) = (all.env(at), all.ring.members[at].dht.clone() as _);
            let mounted = all.run(mounted_with(&env, &blocks, at as u8 + 1, options.clone()));
            all.mounts.push(mounted);
        }
        all
    }

    pub(super) fn env(&self, at: usize) -> Env {
        self.ring.sim.env(self.ring.members[at].host)
    }

    pub(super) fn run<T>(&self, work: impl Future<Output = T>) -> T {
        self.ring.sim.block_on(LONG, work).expect("calls have deadlines")
    }

    /// Opens a file that is there.
    pub(super) fn open(&self, at: usize, name: &str) -> Open {
        self.open_as(at, name, OpenFlags::READ_WRITE)
    }

    fn open_as(&self, at: usize, name: &str, flags: OpenFlags) -> Open {
        let fs = self.mounts[at].clone();
        self.run(async move {
            let inode = fs.lookup(me(), ROOT, name.as_bytes()).await.expect("there").attr.inode;
            let opened = fs.open(me(), inode, flags).await.expect("opens");
            Open { fs, inode, handle: opened.handle, owner: LockOwner(1) }
        })
    }

    pub(super) fn hosts(&self, range: std::ops::Range<usize>) -> Vec<HostId> {
        self.ring.members[range].iter().map(|member| member.host).collect()
    }
}

/// A file that a program has open.
#[derive(Clone)]
pub(super) struct Open {
    pub(super) fs: SharedFs,
    pub(super) inode: InodeNumber,
    pub(super) handle: Handle,
    pub(super) owner: LockOwner,
}

impl Open {
    pub(super) async fn lock(&self, wanted: FileLock, waits: bool) -> Result<(), Errno> {
        let locks = self.fs.locks().expect("it has locks");
        let wanted = FileLock { through: Some(self.handle), ..wanted };
        locks.lock(self.inode, self.owner, wanted, waits).await
    }

    pub(super) async fn unlock(&self) -> Result<(), Errno> {
        let locks = self.fs.locks().expect("it has locks");
        locks.unlock(self.inode, self.owner, LockRange::WHOLE).await
    }

    pub(super) async fn text(&self) -> String {
        let read = self.fs.read(self.inode, self.handle, 0, 1000).await.expect("reads");
        String::from_utf8(read.to_vec()).expect("a test's")
    }

    pub(super) async fn write(&self, text: &str) -> Result<(), Errno> {
        let data = Bytes::copy_from_slice(text.as_bytes());
        self.fs.write(Writer::At(me()), self.inode, self.handle, 0, data).await.map(drop)
    }

    pub(super) async fn flush(&self) -> Result<(), Errno> {
        self.fs.flush(self.inode, self.handle).await
    }

    /// Adds one to the number in the file under a lock.
    async fn count(&self, env: &Env) {
        self.lock(EXCLUSIVE, true).await.expect("is granted in the end");
        let count: u32 = self.text().await.parse().expect("a number");
        // A lock is held for a while.
        sleep(&**env, Duration::from_millis(env.random_u64() % 40)).await;
        self.write(&format!("{:06}", count + 1)).await.expect("the lock is here");
        self.unlock().await.expect("is published");
    }
}

pub(super) async fn make(fs: &SharedFs, name: &str, text: &str) {
    let flags = OpenFlags(OpenFlags::READ_WRITE.0 | OpenFlags::TRUNCATE);
    let (entry, opened) = fs.create(me(), ROOT, name.as_bytes(), 0o644, flags).await.expect("new");
    let data = Bytes::copy_from_slice(text.as_bytes());
    fs.write(Writer::At(me()), entry.attr.inode, opened.handle, 0, data).await.expect("writes");
    fs.flush(entry.attr.inode, opened.handle).await.expect("is stored");
    fs.close(entry.attr.inode, opened.handle).await.expect("closes");
}

pub(super) async fn create_exclusively(fs: &SharedFs, name: &str) -> Result<(), Errno> {
    let flags = OpenFlags(OpenFlags::READ_WRITE.0 | OpenFlags::EXCLUSIVE);
    let (entry, opened) = fs.create(me(), ROOT, name.as_bytes(), 0o644, flags).await?;
    fs.close(entry.attr.inode, opened.handle).await
}

pub(super) async fn names(fs: &SharedFs) -> Vec<String> {
    let opened = fs.opendir(me(), ROOT).await.expect("opens");
    let listed = fs.readdir(ROOT, opened.handle, 0, 1000, false).await.expect("lists");
    fs.closedir(ROOT, opened.handle).await.expect("closes");
    listed.into_iter().map(|entry| String::from_utf8_lossy(&entry.name).into_owned()).collect()
}

/// Three programs on two mounts keep one file open; a node that keeps locks and blocks crashes meanwhile.
#[test]
fn no_count_is_lost_that_was_made_under_a_lock() {
    for (seed, consistency, crashes) in [
        (1, Consistency::CloseToOpen, false),
        (2, Consistency::CloseToOpen, true),
        (3, Consistency::ReadYourWrites, false),
        (4, Consistency::ReadYourWrites, true),
    ] {
        let all = Mounts::new(8000 + seed, 6, 2, consistency);
        all.run(make(&all.mounts[0], "count", "000000"));
        let mut programs: Vec<Open> = (0..2).map(|at| all.open(at, "count")).collect();
        programs.push(Open { owner: LockOwner(2), ..all.open(1, "count") });
        let env = all.ring.sim.outside();
        let work = programs.into_iter().map(|program| {
            let env = env.clone();
            async move {
                for _ in 0..20 {
                    program.count(&env).await;
                }
            }
        });
        let sim = all.ring.sim.clone();
        let host = all.ring.members[4].host;
        let fault = async {
            sleep(&*env, Duration::from_secs(2)).await;
            if crashes {
                sim.crash_silently(host);
            }
        };
        all.run(join(join_all(work), fault));
        let reader = all.open(0, "count");
        assert_eq!(all.run(reader.text()), "000060", "seed {seed}");
        assert_eq!(all.run(names(&all.mounts[1])), ["count"], "seed {seed}");
    }
}

#[test]
fn one_of_two_mounts_makes_a_name_exclusively() {
    for (seed, consistency) in [(1, Consistency::CloseToOpen), (2, Consistency::ReadYourWrites)] {
        let all = Mounts::new(8100 + seed, 6, 2, consistency);
        for n in 0..12 {
            let name = format!("name {n:02}");
            let [one, two] = [0, 1].map(|at| {
                let (fs, name) = (all.mounts[at].clone(), name.clone());
                async move {
                    match n % 3 {
                        0 => fs.mkdir(me(), ROOT, name.as_bytes(), 0o755).await.map(drop),
                        1 => fs.symlink(me(), ROOT, name.as_bytes(), b"target").await.map(drop),
                        _ => create_exclusively(&fs, &name).await,
                    }
                }
            });
            let made = all.run(join(one, two));
            let is_one =
                matches!(made, (Ok(()), Err(Errno::EEXIST)) | (Err(Errno::EEXIST), Ok(())));
            assert!(is_one, "{name}: {made:?}, seed {seed}");
        }
        let all_names: Vec<String> = (0..12).map(|n| format!("name {n:02}")).collect();
        for fs in &all.mounts {
            assert_eq!(all.run(names(fs)), all_names, "seed {seed}");
        }
    }
}

/// The first mount is cut off with a lock and with changes that are not on the ring.
/// `mv -n`, of two files to one name.
#[test]
fn one_of_two_mounts_renames_to_a_free_name() {
    let free = RenameFlags { no_replace: true, ..RenameFlags::default() };
    for (seed, consistency) in [(1, Consistency::CloseToOpen), (2, Consistency::ReadYourWrites)] {
        let all = Mounts::new(8150 + seed, 6, 2, consistency);
        for n in 0..12 {
            let to = format!("to {n}");
            let renames =
                [0, 1].map(|at| {
                    let (fs, from, to) =
                        (all.mounts[at].clone(), format!("from {at} {n}"), to.clone());
                    all.run(make(&fs, &from, &from));
                    async move {
                        fs.rename(me(), ROOT, from.as_bytes(), ROOT, to.as_bytes(), free).await
                    }
                });
            let [one, two] = renames;
            let renamed = all.run(join(one, two));
            let winner = match renamed {
                (Ok(()), Err(Errno::EEXIST)) => 0,
                (Err(Errno::EEXIST), Ok(())) => 1,
                _ => panic!("{to}: {renamed:?}, seed {seed}"),
            };
            for at in [0, 1] {
                let file = all.open(at, &to);
                assert_eq!(all.run(file.text()), format!("from {winner} {n}"), "seed {seed}");
            }
            assert_eq!(all.run(names(&all.mounts[0])).len(), 2 * (n + 1), "seed {seed}");
        }
    }
}

#[test]
fn a_mount_that_has_lost_its_lock_replaces_nothing() {
    for seed in 0..4 {
        let all = Mounts::new(8200 + seed, 7, 2, Consistency::CloseToOpen);
        all.run(make(&all.mounts[0], "file", "before"));
        let [one, two] = [0, 1].map(|at| all.open(at, "file"));
        all.run(one.lock(EXCLUSIVE, true)).expect("free");
        all.run(one.write("mine 1")).expect("locked");
        assert_eq!(all.run(two.lock(SHARED, false)), Err(Errno::EAGAIN));
        all.ring.sim.partition(&[&all.hosts(0..1)]);
        all.run(two.lock(EXCLUSIVE, true)).expect("the other's lease ends");
        assert_eq!(all.run(two.text()), "before", "seed {seed}");
        all.run(two.write("theirs")).expect("locked");
        for refused in [all.run(one.write("mine 2")), all.run(one.flush())] {
            assert_eq!(refused, Err(Errno::EIO), "seed {seed}");
        }
        assert_eq!(all.run(one.lock(EXCLUSIVE, true)), Err(Errno::ENOLCK), "seed {seed}");
        assert_eq!(all.run(one.write("mine 3")), Err(Errno::EIO), "seed {seed}");
        all.run(two.unlock()).expect("is published");
        all.ring.sim.heal();
        all.ring.sim.run_for(Duration::from_secs(300));
        assert_eq!(all.run(one.write("mine 4")), Err(Errno::EIO), "seed {seed}");
        all.run(one.lock(EXCLUSIVE, true)).expect("free");
        assert_eq!(all.run(one.text()), "theirs", "seed {seed}");
        all.run(one.write("mine 5")).expect("locked anew");
        all.run(one.unlock()).expect("is published");
        all.run(two.lock(SHARED, true)).expect("free");
        assert_eq!(all.run(two.text()), "mine 5", "seed {seed}");
        assert_eq!(all.run(names(&all.mounts[1])), ["file"], "seed {seed}");
    }
}

#[test]
fn the_smaller_side_of_a_partition_has_no_locks_and_goes_on_making_names() {
    for seed in 0..2 {
        let all = Mounts::new(8300 + seed, 5, 3, Consistency::CloseToOpen);
        all.run(make(&all.mounts[0], "file", "before"));
        let [small, large] = [0, 2].map(|at| all.open(at, "file"));
        all.ring.sim.partition(&[&all.hosts(0..2)]);
        all.ring.sim.run_for(Duration::from_secs(120));
        assert_eq!(all.run(small.lock(EXCLUSIVE, true)), Err(Errno::ENOLCK), "seed {seed}");
        assert_eq!(all.run(small.lock(SHARED, false)), Err(Errno::ENOLCK), "seed {seed}");
        let made = all.run(create_exclusively(&all.mounts[0], "lock"));
        assert_eq!(made, Err(Errno::ENOLCK), "seed {seed}");
        // All copies of the root directory may be on the other side.
        let made = all.run(all.mounts[0].mkdir(me(), ROOT, b"directory", 0o755));
        assert_ne!(made.map(drop), Err(Errno::ENOLCK), "seed {seed}");
        all.run(large.lock(EXCLUSIVE, true)).expect("most of the nodes are here");
        assert_eq!(all.run(create_exclusively(&all.mounts[2], "lock")), Ok(()), "seed {seed}");
    }
}

/// Programs of one mount lock ranges of bytes, and an upgrade that is refused leaves what was held.
#[test]
fn mounts_share_a_file_for_reading_and_one_upgrades_when_the_other_is_gone() {
    let all = Mounts::new(8400, 5, 2, Consistency::CloseToOpen);
    all.run(make(&all.mounts[0], "file", "before"));
    let [one, two] = [0, 1].map(|at| all.open(at, "file"));
    for program in [&one, &two] {
        assert_eq!(all.run(program.lock(SHARED, false)), Ok(()));
    }
    assert_eq!(all.run(one.lock(EXCLUSIVE, false)), Err(Errno::EAGAIN));
    assert_eq!(all.run(two.lock(EXCLUSIVE, false)), Err(Errno::EAGAIN), "one shares it still");
    all.run(two.unlock()).expect("nothing is to be published");
    assert_eq!(all.run(one.lock(EXCLUSIVE, true)), Ok(()));
    // By another process.
    let half = FileLock { range: LockRange { first: 0, last: 9 }, pid: 8, ..EXCLUSIVE };
    let neighbour = Open { owner: LockOwner(9), ..one.clone() };
    assert_eq!(all.run(neighbour.lock(half, false)), Err(Errno::EAGAIN));
    all.run(one.unlock()).expect("nothing is to be published");
    let rest = FileLock { range: LockRange { first: 10, last: 20 }, ..EXCLUSIVE };
    assert_eq!(all.run(neighbour.lock(half, false)), Ok(()));
    assert_eq!(all.run(one.lock(rest, false)), Ok(()), "other bytes, on the same mount");
    assert_eq!(all.run(two.lock(rest, false)), Err(Errno::EAGAIN), "another mount");
    all.run(async { join(one.unlock(), neighbour.unlock()).await }).0.expect("given up");
    assert_eq!(all.run(two.lock(SHARED, true)), Ok(()));
}

/// A member who may only read locked writers out.
#[test]
fn who_may_not_write_takes_shared_locks_alone() {
    let mut all = Mounts::new(8450, 5, 1, Consistency::CloseToOpen);
    all.run(make(&all.mounts[0], "file", "text"));
    let (env, blocks) = (all.env(1), all.ring.members[1].dht.clone() as _);
    let id = super::mounts::volume().volume_id();
    let options = SharedOptions::default();
    let keyless = SharedFs::open(env.clone(), std::sync::Arc::clone(&blocks), id, None, options);
    let keyless = all.run(keyless).expect("opens");
    let stranger = all.run(mounted_with(&env, &blocks, 77, SharedOptions::default()));
    all.mounts.extend([stranger, keyless]);
    let writer = all.open(0, "file");
    for (at, errno) in [(1, Errno::EACCES), (2, Errno::EROFS)] {
        let reader = all.open_as(at, "file", OpenFlags::READ);
        assert_eq!(all.run(reader.lock(EXCLUSIVE, false)), Err(errno));
        // The reader's mount gives its lease back after the call has returned.
        assert_eq!(all.run(writer.lock(EXCLUSIVE, true)), Ok(()));
        assert_eq!(all.run(reader.lock(SHARED, false)), Err(Errno::EAGAIN));
        all.run(writer.unlock()).expect("is free");
        // So does the writer's.
        assert_eq!(all.run(reader.lock(SHARED, true)), Ok(()));
        assert_eq!(
            all.run(reader.lock(EXCLUSIVE, false)),
            Err(errno),
            "not with a shared one either"
        );
        all.run(reader.unlock()).expect("is free");
    }
}

/// A program that waits for a lock gets a signal.
#[test]
fn a_wait_that_is_given_up_leaves_no_lock() {
    let all = Mounts::new(8500, 5, 2, Consistency::CloseToOpen);
    all.run(make(&all.mounts[0], "file", "before"));
    let [one, two] = [0, 1].map(|at| all.open(at, "file"));
    all.run(one.lock(EXCLUSIVE, true)).expect("free");
    let env = all.ring.sim.outside();
    for n in 0..20 {
        let (waiting, env) = (two.clone(), env.clone());
        all.run(async move {
            let limit = Duration::from_millis(env.random_u64() % 2000);
            let given_up = atoll_env::timeout(&*env, limit, waiting.lock(EXCLUSIVE, true)).await;
            assert!(given_up.is_err(), "{n}: {given_up:?}");
        });
    }
    all.run(one.unlock()).expect("nothing is to be published");
    let again = all.run(async {
        let start = all.ring.sim.now();
        one.lock(EXCLUSIVE, true).await.map(|()| all.ring.sim.now().since(start))
    });
    assert!(again.expect("free") < Duration::from_secs(5), "{again:?}");
}

/// On a ring whose nodes do not know each other all: the nodes that keep a lock are those of the inode,
/// or of the directory, which are known.
#[test]
fn a_lock_costs_one_round_trip_while_the_file_is_promised() {
    let round_trip = Duration::from_millis(100);
    let latency = Latency::Flat(round_trip / 2);
    let sim = SimConfig { seed: 8600, latency, ..SimConfig::default() };
    let all = Mounts::with(sim, 40, 1, Consistency::CloseToOpen);
    all.run(make(&all.mounts[0], "file", "before"));
    let file = all.open(0, "file");
    let timed = |work: BoxFuture<'static, Result<(), Errno>>| {
        let start = all.ring.sim.now();
        all.run(work).expect("nobody else is there");
        all.ring.sim.now().since(start).as_nanos() / round_trip.as_nanos()
    };
    let [link, first, lock, unlock] = ["link", "first", "lock", "unlock"].map(|what| {
        let file = file.clone();
        timed(Box::pin(async move {
            match what {
                "lock" => file.lock(EXCLUSIVE, false).await,
                "unlock" => file.unlock().await,
                name => {
                    let linked = file.fs.link(me(), file.inode, ROOT, name.as_bytes());
                    linked.await.map(drop)
                }
            }
        }))
    });
    // The lease, the inode, the directory: what the mount has read before it is promised.
    assert_eq!((link, first, lock, unlock), (3, 3, 1, 0));
}

/// A mail reader replaces a box by a new file, while others wait for the lock of the old one: they got `ESTALE`, for
/// which no program waits that locks.
#[test]
fn a_file_that_another_mount_has_removed_can_be_locked() {
    let all = Mounts::new(8700, 5, 2, Consistency::CloseToOpen);
    all.run(make(&all.mounts[0], "box", "before"));
    let [one, two] = [0, 1].map(|at| all.open(at, "box"));
    all.run(one.lock(EXCLUSIVE, true)).expect("free");
    all.run(one.fs.unlink(me(), ROOT, b"box")).expect("removes");
    all.run(one.fs.sync()).expect("is on the ring");
    all.run(one.unlock()).expect("nothing is to be published");
    all.run(two.lock(EXCLUSIVE, true)).expect("free");
    assert_eq!(all.run(two.text()), "before");
    assert_eq!(all.run(two.fs.lookup(me(), ROOT, b"box")).err(), Some(Errno::ENOENT));
    all.run(two.unlock()).expect("nothing is to be published");
}

/// A node that is slow to store data and does not reach those that keep its locks, for as long as a test wants.
pub(super) struct Slow {
    env: Env,
    ring: Arc<dyn Blocks>,
    pub(super) stores: Arc<AtomicBool>,
    pub(super) locks: AtomicBool,
}

impl Slow {
    /// A mount behind such a node of a ring.
    pub(super) fn mounted(all: &mut Mounts, at: usize) -> Arc<Slow> {
        let (env, ring) = (all.env(at), all.ring.members[at].dht.clone() as Arc<dyn Blocks>);
        let (stores, locks) = (Arc::new(AtomicBool::new(true)), AtomicBool::new(true));
        let slow = Arc::new(Slow { env: env.clone(), ring, stores, locks });
        let (blocks, options) = (slow.clone() as Arc<dyn Blocks>, SharedOptions::default());
        all.mounts.push(all.run(mounted_with(&env, &blocks, 2, options)));
        slow
    }
}

impl Blocks for Slow {
    fn get_block(
        &self,
        id: BlockId,
        wanted: Wanted,
    ) -> BoxFuture<'static, Result<HeldBlock, GetError>> {
        self.ring.get_block(id, wanted)
    }

    fn put_blocks(&self, blocks: Vec<NewBlock>) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        let (env, ring, stores) = (self.env.clone(), self.ring.clone(), self.stores.clone());
        Box::pin(async move {
            while !stores.load(Ordering::Relaxed) {
                sleep(&*env, Duration::from_millis(100)).await;
            }
            ring.put_blocks(blocks).await
        })
    }

    fn put_in_order(&self, blocks: Vec<NewBlock>) -> BoxFuture<'static, Vec<Result<(), PutError>>> {
        self.ring.put_in_order(blocks)
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
        match self.locks.load(Ordering::Relaxed) {
            true => self.ring.lock_lease(ask),
            false => Box::pin(async { Err(LockRefusal::NoMajority("not reached".into())) }),
        }
    }
}

/// A mount stored a large file under a lock, and the lock ran out while it did so: the version that it signed then
/// stood beside the one that the next holder of the lock had written.
#[test]
fn what_is_stored_until_its_lock_is_nearly_over_is_not_signed() {
    for (seed, stored_after, is_signed) in [(0, 3, true), (1, 13, false), (2, 40, false)] {
        let mut all = Mounts::new(8900 + seed, 5, 1, Consistency::CloseToOpen);
        let slow = Slow::mounted(&mut all, 1);
        all.run(make(&all.mounts[0], "file", "before"));
        let [two, one] = [0, 1].map(|at| all.open(at, "file"));
        all.run(one.lock(EXCLUSIVE, true)).expect("free");
        all.run(one.write(&"mine".repeat(50_000))).expect("locked");
        slow.stores.store(false, Ordering::Relaxed);
        slow.locks.store(false, Ordering::Relaxed);
        let clock = all.env(0);
        let others = async {
            sleep(&*clock, Duration::from_secs(stored_after)).await;
            if stored_after > 15 {
                two.lock(EXCLUSIVE, true).await.expect("its holder's lease is over");
                two.write("theirs").await.expect("locked");
                two.unlock().await.expect("is published");
            }
            slow.stores.store(true, Ordering::Relaxed);
        };
        let (flushed, ()) = all.run(join(one.flush(), others));
        let expected = if is_signed { Ok(()) } else { Err(Errno::EIO) };
        assert_eq!(flushed, expected, "stored after {stored_after} s");
        // The mount, whose lock ends now if it has not before, tries no more either.
        all.ring.sim.run_for(Duration::from_secs(60));
        all.run(two.lock(SHARED, true)).expect("free by now");
        let text = all.run(two.text());
        let shown = match stored_after {
            3 => "mine",
            13 => "before",
            _ => "theirs",
        };
        assert!(
            text.starts_with(shown),
            "{}, stored after {stored_after} s",
            &text[..8.min(text.len())]
        );
        assert_eq!(all.run(names(&all.mounts[0])), ["file"], "stored after {stored_after} s");
    }
}
