//! Locks of mounts on different machines, while members die, lose power, stand still, come and go, and clients are cut off for longer than
//! their locks last.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use atoll_vfs::{
    Errno, FileLock, FileSystem, Handle, InodeNumber, Invalidation, LockKind, LockOwner, LockRange,
    OpenFlags, RenameFlags, Writer,
};
use bytes::Bytes;

use super::*;
use crate::workload::{ROOT, for_each_seed, me};

/// After so long without a word a client loses its locks.
pub(super) const TERM: Duration = Duration::from_secs(15);
/// What is answered without waiting for anybody.
const SOON: Duration = Duration::from_secs(1);
const NAME: &[u8] = b"counter";

/// What becomes of a client's calls on their way.
#[derive(Default)]
pub(super) struct Wire {
    pub(super) is_cut: AtomicBool,
    /// What is sent while it is cut arrives when that ends, however late.
    pub(super) holds: AtomicBool,
}

/// A way to the pool that can be cut.
struct CutRoute {
    inner: Arc<OwnNode>,
    wire: Arc<Wire>,
    outside: Env,
}

impl Route for CutRoute {
    fn call(
        &self,
        request: Request,
        limit: Duration,
    ) -> BoxFuture<'static, Result<Reply, CallError>> {
        let (inner, wire, outside) = (self.inner.clone(), self.wire.clone(), self.outside.clone());
        let (sender, answer) = futures_channel::oneshot::channel();
        let env = inner.env.clone();
        outside.clone().spawn(Box::pin(async move {
            while wire.is_cut.load(Ordering::SeqCst) {
                if !wire.holds.load(Ordering::SeqCst) {
                    return;
                }
                sleep(&*outside, Duration::from_millis(20)).await;
            }
            let _ = sender.send(inner.call(request, limit).await);
        }));
        Box::pin(async move {
            let lost = async {
                match answer.await {
                    Ok(answered) => answered,
                    Err(_) => std::future::pending().await,
                }
            };
            atoll_env::timeout(&*env, limit, lost).await.unwrap_or(Err(CallError::TimedOut))
        })
    }
}

/// A mount on a machine of its own.
#[derive(Clone)]
pub(super) struct Mount {
    pub(super) fs: Arc<RemoteFs>,
    pub(super) host: HostId,
    pub(super) wire: Arc<Wire>,
    pub(super) env: Env,
}

impl Group {
    /// The pool as a mount on a machine of its own has it, through this member's node.
    pub(super) fn mount_apart(&self, at: usize) -> Mount {
        let host = self.sim.add_host(HostConfig::default());
        let env = self.sim.env(host);
        let inner = OwnNode {
            sim: self.sim.clone(),
            at,
            host: self.hosts[at],
            members: self.members.clone(),
            env: env.clone(),
        };
        let wire = Arc::new(Wire::default());
        let outside = self.sim.outside();
        let route = CutRoute { inner: Arc::new(inner), wire: wire.clone(), outside };
        let begun = self.sim.block_on(LONG, RemoteFs::begin(env.clone(), Arc::new(route)));
        let fs = Arc::new(begun.unwrap().expect("the pool is served"));
        Mount { fs, host, wire, env }
    }

    pub(super) fn now<T>(&self, work: impl Future<Output = T>) -> T {
        self.sim.block_on(LONG, work).unwrap()
    }

    /// How long something takes.
    fn timed<T>(&self, work: impl Future<Output = T>) -> (T, Duration) {
        let began = self.sim.now();
        let done = self.now(work);
        (done, self.sim.now().since(began))
    }

    /// Lock sessions and locks, as each member that runs knows them.
    pub(super) fn lock_counts(&self) -> Vec<(usize, usize)> {
        let running = self.all().into_iter().filter(|at| self.is_up(*at));
        running.map(|at| self.status(at).locks).collect()
    }
}

/// A file that is open on a mount, and an owner of locks on it.
#[derive(Clone)]
pub(super) struct OpenCounter {
    pub(super) mount: Mount,
    inode: InodeNumber,
    handle: Handle,
    owner: LockOwner,
}

fn lock_of(kind: LockKind, handle: Handle) -> FileLock {
    FileLock { kind, range: LockRange::WHOLE, pid: 7, through: Some(handle) }
}

impl Mount {
    pub(super) async fn open(&self, owner: u64) -> Result<OpenCounter, Errno> {
        let flags = OpenFlags::READ_WRITE;
        let made = self.fs.create(me(), ROOT, NAME, 0o644, flags).await;
        let (inode, handle) = match made {
            Ok((entry, opened)) => (entry.attr.inode, opened.handle),
            Err(errno) => return Err(errno),
        };
        Ok(OpenCounter { mount: self.clone(), inode, handle, owner: LockOwner(owner) })
    }
}

impl OpenCounter {
    pub(super) async fn lock(&self, waits: bool) -> Result<(), Errno> {
        let locks = self.mount.fs.locks().expect("it has locks");
        let wanted = lock_of(LockKind::Exclusive, self.handle);
        locks.lock(self.inode, self.owner, wanted, waits).await
    }

    async fn is_locked(&self) -> Result<bool, Errno> {
        let locks = self.mount.fs.locks().expect("it has locks");
        let wanted = lock_of(LockKind::Exclusive, self.handle);
        Ok(locks.conflict(self.inode, self.owner, wanted).await?.is_some())
    }

    pub(super) async fn unlock(&self) -> Result<(), Errno> {
        let locks = self.mount.fs.locks().expect("it has locks");
        locks.unlock(self.inode, self.owner, LockRange::WHOLE).await
    }

    pub(super) async fn read(&self) -> Result<u64, Errno> {
        let bytes = self.mount.fs.read(self.inode, self.handle, 0, 8).await?;
        Ok(<[u8; 8]>::try_from(&bytes[..]).map_or(0, u64::from_be_bytes))
    }

    pub(super) async fn write(&self, number: u64) -> Result<(), Errno> {
        let bytes = Bytes::copy_from_slice(&number.to_be_bytes());
        let fs = &self.mount.fs;
        let written = fs.write(Writer::At(me()), self.inode, self.handle, 0, bytes).await?;
        assert_eq!(written, 8, "a short write of a few bytes");
        Ok(())
    }

    pub(super) async fn sync(&self) -> Result<(), Errno> {
        self.mount.fs.fsync(self.inode, self.handle, false).await
    }

    pub(super) async fn close(&self) -> Result<(), Errno> {
        self.mount.fs.close(self.inode, self.handle).await
    }
}

/// A call that goes on beside the test.
struct Begun<T>(Arc<Mutex<Option<T>>>);

impl<T> Begun<T> {
    fn answer(&self) -> Option<T> {
        self.0.lock().unwrap().take()
    }
}

/// Begins a call on the mount's machine.
fn begin<T: Send + 'static>(env: &Env, call: impl Future<Output = T> + Send + 'static) -> Begun<T> {
    let answer = Arc::new(Mutex::new(None));
    let to = answer.clone();
    env.spawn(Box::pin(async move {
        let done = call.await;
        *to.lock().unwrap() = Some(done);
    }));
    Begun(answer)
}

/// A counter that is open on mounts through these two members' nodes.
fn open_through(group: &Group, [one, other]: [usize; 2]) -> [OpenCounter; 2] {
    [(one, 1), (other, 2)].map(|(at, owner)| {
        let mount = group.mount_apart(at);
        group.now(mount.open(owner)).unwrap()
    })
}

/// A counter that is open on two mounts, none of them through the primary's node.
fn two(group: &Group) -> [OpenCounter; 2] {
    let [_, one, other] = group.roles();
    open_through(group, [one, other])
}

/// Begins to wait for the lock.
fn begin_wait(counter: &OpenCounter) -> Begun<Result<(), Errno>> {
    let counter = counter.clone();
    begin(&counter.mount.env.clone(), async move { counter.lock(true).await })
}

#[test]
fn a_lock_is_there_after_its_primary_has_died_and_calls_are_answered_within_a_second() {
    for_each_seed(3, |seed| {
        let mut group = Group::new(seed, 1);
        // Through the node of a member that does not die.
        let [_, own, _] = group.roles();
        let [mine, theirs] =
            [1, 2].map(|owner| group.now(group.mount_apart(own).open(owner)).unwrap());
        group.now(mine.lock(false)).unwrap();
        assert_eq!(group.lock_counts(), [(1, 1); 3]);
        let mut deaths = 0;
        while let [primary, ..] = group.roles()
            && primary != own
            && deaths < 4
        {
            deaths += 1;
            group.kill(primary, InFlight::Lost);
            let (locked, took) = group.timed(theirs.is_locked());
            assert_eq!(locked, Ok(true));
            assert!(took < SOON, "{took:?}");
            assert_eq!(group.now(theirs.lock(false)), Err(Errno::EAGAIN));
            // A retry finds its own.
            group.now(mine.lock(false)).unwrap();
            group.now(mine.write(seed)).unwrap();
            group.restart(primary);
            group.await_quiet()?;
        }
        group.now(mine.unlock()).unwrap();
        group.now(theirs.lock(false)).unwrap();
        assert_eq!(group.now(theirs.read()), Ok(seed));
        group.settle_and_compare()
    });
}

#[test]
fn an_unlock_right_after_a_death_is_done_within_a_second() {
    let mut group = Group::new(1, 1);
    let [mine, theirs] = two(&group);
    group.now(mine.lock(false)).unwrap();
    let [primary, ..] = group.roles();
    group.kill(primary, InFlight::Lost);
    let (unlocked, took) = group.timed(mine.unlock());
    assert_eq!(unlocked, Ok(()));
    assert!(took < SOON, "{took:?}");
    group.now(theirs.lock(false)).unwrap();
}

/// One that comes back is told all locks before it can be a member.
#[test]
fn a_member_that_has_come_back_knows_the_locks_when_it_is_the_primary() {
    for_each_seed(3, |seed| {
        let mut group = Group::new(seed, 1);
        let [primary, returning, other] = group.roles();
        let mount = group.mount_apart(primary);
        let mine = group.now(mount.open(1)).unwrap();
        group.now(mine.lock(false)).unwrap();
        group.kill(returning, InFlight::Lost);
        group.run_for(Duration::from_secs(1));
        group.restart(returning);
        group.await_quiet()?;
        group.kill(other, InFlight::Lost);
        group.run_for(Duration::from_secs(1));
        group.kill(primary, InFlight::Lost);
        // It votes, and has missed what was changed meanwhile.
        group.restart(other);
        group.run_for(Duration::from_secs(2));
        assert_eq!(group.primary(), Some(returning));
        let mount = group.mount_apart(returning);
        let theirs = group.now(mount.open(2)).unwrap();
        assert_eq!(group.now(theirs.lock(false)), Err(Errno::EAGAIN));
        group.restart(primary);
        group.await_quiet()?;
        group.now(mine.write(1)).unwrap();
        group.now(mine.unlock()).unwrap();
        group.now(theirs.lock(false)).map_err(|errno| errno.to_string())
    });
}

#[test]
fn a_waiter_gets_the_lock_of_a_mount_that_has_died_within_its_term() {
    for_each_seed(3, |seed| {
        let mut group = Group::new(seed, 1);
        let [mine, theirs] = two(&group);
        group.now(mine.lock(true)).unwrap();
        group.now(mine.write(1)).unwrap();
        let waiting = begin_wait(&theirs);
        group.run_for(Duration::from_secs(40));
        assert_eq!(waiting.answer(), None, "its holder lives");
        group.sim.freeze(mine.mount.host);
        group.run_for(TERM - Duration::from_secs(5));
        assert_eq!(waiting.answer(), None, "it may live");
        if seed % 2 == 1 {
            // Terms begin anew with a new primary.
            let [primary, ..] = group.roles();
            group.kill(primary, InFlight::Lost);
            group.run_for(TERM - Duration::from_secs(1));
            assert_eq!(waiting.answer(), None, "its term has begun anew");
            group.restart(primary);
        }
        group.run_for(Duration::from_secs(7));
        assert_eq!(waiting.answer(), Some(Ok(())));
        group.now(theirs.write(2)).unwrap();
        // The first one finds out.
        group.sim.thaw(mine.mount.host);
        assert_eq!(group.now(mine.write(3)), Err(Errno::EIO));
        assert_eq!(group.now(mine.read()), Ok(2), "reading goes on");
        assert_eq!(group.now(mine.lock(false)), Err(Errno::EIO));
        assert_eq!(group.now(mine.sync()), Err(Errno::EIO));
        assert_eq!(group.now(mine.unlock()), Err(Errno::EIO));
        group.now(mine.close()).unwrap();
        let mine = group.now(mine.mount.open(1)).unwrap();
        assert_eq!(group.now(mine.lock(false)), Err(Errno::EAGAIN));
        group.now(theirs.unlock()).unwrap();
        group.now(mine.lock(false)).unwrap();
        group.now(mine.write(3)).unwrap();
        group.now(mine.unlock()).unwrap();
        assert_eq!(group.now(theirs.read()), Ok(3));
        group.settle_and_compare()
    });
}

#[test]
fn a_mount_that_ends_gives_its_locks_up_at_once() {
    let group = Group::new(1, 1);
    let [mine, theirs] = two(&group);
    group.now(mine.lock(false)).unwrap();
    drop(mine);
    let (locked, took) = group.timed(theirs.lock(true));
    assert_eq!(locked, Ok(()));
    assert!(took < SOON, "{took:?}");
    assert_eq!(group.lock_counts(), [(1, 1); 3]);
}

/// What was on its way when the locks were lost arrives late, and is not written over what the next holder has written.
#[test]
fn a_late_write_under_a_lost_lock_is_refused() {
    for_each_seed(3, |seed| {
        let mut group = Group::new(seed, 1);
        let [mine, theirs] = two(&group);
        group.now(mine.lock(false)).unwrap();
        group.now(mine.write(1)).unwrap();
        mine.mount.wire.holds.store(true, Ordering::SeqCst);
        mine.mount.wire.is_cut.store(true, Ordering::SeqCst);
        let late = {
            let mine = mine.clone();
            begin(&mine.mount.env.clone(), async move { mine.write(100).await })
        };
        group.run_for(TERM + Duration::from_secs(3));
        group.now(theirs.lock(false)).unwrap();
        group.now(theirs.write(2)).unwrap();
        mine.mount.wire.is_cut.store(false, Ordering::SeqCst);
        group.run_for(Duration::from_secs(5));
        assert_eq!(late.answer(), Some(Err(Errno::EIO)));
        assert_eq!(group.now(theirs.read()), Ok(2));
        group.settle_and_compare()
    });
}

/// A write that has begun is waited for before its lock is another's.
#[test]
fn a_slow_write_under_a_lock_is_done_before_the_lock_is_given_to_another() {
    let mut slow_ones = 0;
    for seed in 0..6 {
        let mut group = Group::new(seed, 1);
        let [primary, ..] = group.roles();
        let [mine, theirs] = two(&group);
        group.now(mine.lock(false)).unwrap();
        let waiting = {
            let theirs = theirs.clone();
            begin(&theirs.mount.env.clone(), async move {
                theirs.lock(true).await?;
                theirs.read().await
            })
        };
        // The first call of the disk takes up to so long.
        group.disks[primary].set_latency(seed, Duration::from_secs(60));
        let written = {
            let mine = mine.clone();
            begin(&mine.mount.env.clone(), async move { mine.write(9).await })
        };
        group.run_for(Duration::from_millis(20));
        group.disks[primary].set_latency(seed, Duration::ZERO);
        group.sim.freeze(mine.mount.host);
        group.run_for(TERM + Duration::from_secs(5));
        slow_ones += usize::from(waiting.answer().is_none_or(|read| {
            assert_eq!(read, Ok(9), "seed {seed}: what was written under the lock is there");
            false
        }));
        let mut read = None;
        for _ in 0..60 {
            group.run_for(Duration::from_secs(1));
            read = read.or_else(|| waiting.answer());
        }
        assert!(read.is_none_or(|read| read == Ok(9)), "seed {seed}: {read:?}");
        assert_eq!(group.now(theirs.read()), Ok(9));
        group.sim.thaw(mine.mount.host);
        group.run_for(Duration::from_secs(5));
        assert!(written.answer().is_some());
        group.settle_and_compare().unwrap();
    }
    assert!(slow_ones > 0, "no write takes longer than the lock lasts");
}

#[test]
fn restarted_members_know_no_locks_and_their_holders_are_told() {
    let mut group = Group::new(1, 1);
    let [mine, theirs] = two(&group);
    group.now(mine.lock(false)).unwrap();
    group.now(mine.write(1)).unwrap();
    MEMBERS.into_iter().for_each(|at| group.kill(at, InFlight::Lost));
    MEMBERS.into_iter().for_each(|at| group.restart(at));
    group.await_quiet().unwrap();
    group.now(theirs.lock(false)).unwrap();
    group.now(theirs.write(2)).unwrap();
    assert_eq!(group.now(mine.write(100)), Err(Errno::EIO));
    assert_eq!(group.now(mine.unlock()), Err(Errno::EIO));
    // What it would have sent again is not.
    group.run_for(Duration::from_secs(60));
    assert_eq!(group.now(theirs.read()), Ok(2));
    group.now(mine.close()).unwrap();
    group.settle_and_compare().unwrap();
}

/// An unlock makes durable what would be sent again: it never replaces what the next holder has made durable.
#[test]
fn what_was_written_under_a_lock_does_not_come_again_after_a_loss_of_power() {
    let mut group = Group::new(2, 1);
    let [mine, theirs] = two(&group);
    group.now(mine.lock(false)).unwrap();
    group.now(mine.write(1)).unwrap();
    group.now(mine.unlock()).unwrap();
    group.now(theirs.lock(false)).unwrap();
    group.now(theirs.write(2)).unwrap();
    group.now(theirs.sync()).unwrap();
    group.now(theirs.unlock()).unwrap();
    MEMBERS.into_iter().for_each(|at| group.lose_power(at, Loss::Ordered, 1));
    MEMBERS.into_iter().for_each(|at| group.restart(at));
    group.await_quiet().unwrap();
    group.run_for(Duration::from_secs(60));
    group.now(mine.lock(false)).unwrap();
    assert_eq!(group.now(mine.read()), Ok(2));
}

#[test]
fn those_who_wait_get_the_lock_in_the_order_in_which_they_came() {
    let mut group = Group::new(1, 1);
    let [mine, theirs] = two(&group);
    group.now(mine.lock(false)).unwrap();
    let order = Arc::new(Mutex::new(Vec::new()));
    for number in 0..6 {
        let one = OpenCounter { owner: LockOwner(100 + number), ..theirs.clone() };
        let one =
            if number % 2 == 0 { one } else { OpenCounter { mount: mine.mount.clone(), ..one } };
        let one = OpenCounter { handle: Handle(1000 + number), ..one };
        let order = order.clone();
        let env = one.mount.env.clone();
        env.spawn(Box::pin(async move {
            one.lock(true).await.unwrap();
            order.lock().unwrap().push(number);
            one.unlock().await.unwrap();
        }));
        group.run_for(Duration::from_millis(700));
    }
    group.now(mine.unlock()).unwrap();
    group.run_for(Duration::from_secs(2));
    assert_eq!(*order.lock().unwrap(), [0, 1, 2, 3, 4, 5]);
    assert_eq!(group.lock_counts(), [(2, 0); 3]);
    // Their sessions end, too.
    group.run_for(TERM + Duration::from_secs(40));
    assert!(group.lock_counts().iter().all(|(_, locks)| *locks == 0));
}

/// A wait that is given up leaves no lock, and what its owner does next is not undone by it.
#[test]
fn a_wait_that_is_given_up_leaves_what_was_held_before() {
    let mut group = Group::new(1, 1);
    let [mine, theirs] = two(&group);
    let locks = theirs.mount.fs.locks().unwrap();
    let shared = lock_of(LockKind::Shared, theirs.handle);
    group.now(locks.lock(theirs.inode, theirs.owner, shared, false)).unwrap();
    let locks = mine.mount.fs.locks().unwrap();
    let (shared, exclusive) =
        (lock_of(LockKind::Shared, mine.handle), lock_of(LockKind::Exclusive, mine.handle));
    group.now(locks.lock(mine.inode, mine.owner, shared, false)).unwrap();
    for millis in 0..12 {
        let waiting = locks.lock(mine.inode, mine.owner, exclusive, true);
        let wait = atoll_env::timeout(&*mine.mount.env, Duration::from_millis(300), waiting);
        let unlock = async {
            sleep(&*mine.mount.env, Duration::from_millis(290 + millis)).await;
            theirs.unlock().await.unwrap();
        };
        let (waited, ()) = group.now(async { futures_util::join!(wait, unlock) });
        let wanted = if waited.is_ok() { LockKind::Exclusive } else { LockKind::Shared };
        // The next call of the owner comes after whatever became of the wait.
        let found = group.now(async {
            let locks = theirs.mount.fs.locks().unwrap();
            mine.lock(false).await.unwrap();
            locks
                .conflict(theirs.inode, theirs.owner, lock_of(LockKind::Shared, theirs.handle))
                .await
        });
        assert_eq!(found.unwrap().map(|lock| lock.kind), Some(LockKind::Exclusive), "{wanted:?}");
        group.run_for(Duration::from_secs(2));
        assert_eq!(group.now(theirs.is_locked()), Ok(true), "{wanted:?}");
        group.now(async {
            let locks = mine.mount.fs.locks().unwrap();
            locks.lock(mine.inode, mine.owner, shared, false).await.unwrap();
            let locks = theirs.mount.fs.locks().unwrap();
            let shared = lock_of(LockKind::Shared, theirs.handle);
            locks.lock(theirs.inode, theirs.owner, shared, false).await.unwrap();
        });
    }
}

/// An unlock that the pool cannot answer is done when it can.
#[test]
fn an_unlock_that_has_no_answer_is_done_later() {
    let mut group = Group::new(1, 1);
    let [mine, theirs] = two(&group);
    group.now(mine.lock(false)).unwrap();
    for at in MEMBERS {
        group.sim.freeze(group.hosts[at]);
    }
    let (unlocked, _) = group.timed(mine.unlock());
    assert_eq!(unlocked, Err(Errno::EIO));
    for at in MEMBERS {
        group.sim.thaw(group.hosts[at]);
    }
    group.await_quiet().unwrap();
    group.run_for(Duration::from_secs(5));
    assert_eq!(group.now(theirs.lock(false)), Ok(()));
}

/// Whoever joins is told all locks before it can be a member: all others that have everything die as soon as it is one.
#[test]
fn a_member_that_has_just_joined_knows_the_locks_when_it_is_the_primary() {
    for_each_seed(6, |seed| {
        let mut group = Group::new(seed, 1);
        let [mine, theirs] = two(&group);
        group.now(mine.lock(false)).unwrap();
        let joined = group.join(0)?;
        let peer = group.sim.peer(group.hosts[joined]);
        // A lock that is taken while it is given everything.
        let also = OpenCounter { owner: LockOwner(3), handle: Handle(77), ..theirs.clone() };
        let range = LockRange { first: 1 << 40, last: 1 << 41 };
        let kind = LockKind::Shared;
        let wanted = FileLock { kind, range, pid: 9, through: Some(also.handle) };
        let locks = also.mount.fs.locks().unwrap();
        // Mine has all of the file: of another one.
        let inode = InodeNumber(also.inode.0 + 1000);
        group.now(locks.lock(inode, also.owner, wanted, false)).unwrap();
        // Whoever hears of it first: it may not know it itself.
        let is_member = |at: usize| {
            let map = group.members()[at].as_ref().map(|member| member.map());
            map.is_some_and(|map| map.members.contains(&peer.id))
        };
        while !group.all().into_iter().any(is_member) {
            group.sim.run_for(Duration::from_millis(1));
        }
        group.sim.run_for(Duration::from_millis(seed % 20 * 3));
        // They vote, and have missed nothing but their memory.
        MEMBERS.into_iter().for_each(|at| group.kill(at, InFlight::Lost));
        MEMBERS.into_iter().for_each(|at| group.restart(at));
        group.await_quiet()?;
        assert_eq!(group.primary(), Some(joined));
        assert_eq!(group.lock_counts(), [(2, 2); 4]);
        let other = group.now(group.mount_apart(joined).open(4)).unwrap();
        assert_eq!(group.now(other.lock(false)), Err(Errno::EAGAIN));
        group.now(mine.write(1)).unwrap();
        group.now(mine.unlock()).unwrap();
        group.now(other.lock(false)).unwrap();
        group.settle_and_compare()
    });
}

/// A pool of one that is shared has no locks: those of its mount are the kernel's, and it is not shared as long as it is mounted. From then on they
/// are the pool's.
#[test]
fn a_pool_of_one_that_is_shared_keeps_the_locks_of_its_mounts_as_it_grows() {
    let mut group = Group::of(1, 3, 1);
    group.members()[0] = None;
    let disk = SimulatedDisk::new(group.sim.outside());
    let settings = PoolSettings::new(POOL, 1);
    let (env, local) = (group.sim.env(group.hosts[0]), group.sim.peer(group.hosts[0]));
    group.now(atoll_pool::create(&disk, settings)).unwrap();
    let (mounted, _) = group.now(PoolFs::open(env.clone(), disk.clone())).unwrap();
    assert!(mounted.locks().is_none());
    let shared = group.now(atoll_pool::share(env.clone(), disk.clone(), local, (3, 1)));
    assert_eq!(shared, Err(OpenError::InUse));
    drop(mounted);
    disk.kill(InFlight::Lost);
    let disk = disk.reopen();
    group.now(atoll_pool::share(env, disk.clone(), local, (3, 1))).unwrap();
    disk.kill(InFlight::Lost);
    group.disks[0] = disk.reopen();
    group.start(0).unwrap();
    group.run_for(Duration::from_secs(2));
    let [mine, theirs] = open_through(&group, [0, 0]);
    group.now(mine.lock(false)).unwrap();
    group.now(mine.write(5)).unwrap();
    let waiting = begin_wait(&theirs);
    for _ in 0..2 {
        group.join(0).unwrap();
    }
    group.await_quiet().unwrap();
    // Until three vote.
    group.run_for(Duration::from_secs(2));
    assert_eq!(group.lock_counts(), [(2, 1); 3]);
    let other = group.now(group.mount_apart(1).open(3)).unwrap();
    group.kill(0, InFlight::Lost);
    let (locked, took) = group.timed(other.is_locked());
    assert_eq!(locked, Ok(true));
    assert!(took < SOON, "{took:?}");
    group.restart(0);
    group.await_quiet().unwrap();
    assert_eq!(waiting.answer(), None);
    group.now(mine.unlock()).unwrap();
    group.run_for(Duration::from_secs(2));
    assert_eq!(waiting.answer(), Some(Ok(())));
    assert_eq!(group.now(theirs.read()), Ok(5));
    group.settle_and_compare().unwrap();
}

/// Another member leads from then on; nobody loses a lock, and those who wait go on.
#[test]
fn locks_and_waits_for_them_last_while_the_primary_is_removed() {
    for_each_seed(4, |seed| {
        let mut group = Group::of(4, seed, 1);
        let primary = group.primary().unwrap();
        let (one, other) = ((primary + 1) % 4, (primary + 2) % 4);
        let [mine, theirs] = open_through(&group, [one, other]);
        group.now(mine.lock(false)).unwrap();
        group.now(mine.write(seed)).unwrap();
        let waiting = begin_wait(&theirs);
        group.run_for(Duration::from_millis(300 * (seed % 8)));
        group.remove(if seed % 2 == 0 { other } else { primary }, primary)?;
        assert_ne!(group.primary(), Some(primary));
        assert_eq!(group.now(theirs.is_locked()), Ok(true));
        group.now(mine.lock(false)).unwrap();
        group.run_for(Duration::from_secs(40));
        assert_eq!(waiting.answer(), None, "it is held");
        group.now(mine.write(seed + 1)).unwrap();
        let (unlocked, took) = group.timed(mine.unlock());
        assert_eq!(unlocked, Ok(()));
        assert!(took < SOON, "{took:?}");
        group.run_for(SOON);
        assert_eq!(waiting.answer(), Some(Ok(())));
        assert_eq!(group.now(theirs.read()), Ok(seed + 1));
        group.members()[primary] = None;
        group.settle_and_compare()
    });
}

/// Its mounts cannot reach the pool any more, whoever asked for it, and whether it was the primary.
#[test]
fn the_locks_of_mounts_on_a_member_that_is_removed_are_free_when_their_term_is_over() {
    for_each_seed(4, |seed| {
        let mut group = Group::of(4, seed, 1);
        let primary = group.primary().unwrap();
        let (gone, other) = match seed % 2 {
            0 => ((primary + 1) % 4, (primary + 2) % 4),
            _ => (primary, (primary + 2) % 4),
        };
        let [mine, theirs] = open_through(&group, [gone, other]);
        group.now(mine.lock(false)).unwrap();
        group.now(mine.write(1)).unwrap();
        let waiting = begin_wait(&theirs);
        group.run_for(Duration::from_secs(1));
        group.remove(if seed < 2 { other } else { gone }, gone)?;
        assert_eq!(group.now(theirs.is_locked()), Ok(true), "its mount may write until then");
        // It is sent again as long as its program waits, and is never written.
        let late = {
            let mine = mine.clone();
            begin(&mine.mount.env.clone(), async move { mine.write(100).await })
        };
        group.run_for(TERM + Duration::from_secs(3));
        assert_eq!(waiting.answer(), Some(Ok(())));
        group.now(theirs.write(2)).unwrap();
        group.run_for(Duration::from_secs(20));
        assert_eq!(late.answer(), Some(Err(Errno::EIO)));
        assert_eq!(group.now(theirs.read()), Ok(2));
        assert_eq!(group.lock_counts(), [(1, 1); 3]);
        // It joins again, with an empty disk, and its mount is the one that it was.
        group.members()[gone] = None;
        group.disks[gone] = SimulatedDisk::new(group.sim.outside());
        group.join_as(other, gone)?;
        group.await_quiet()?;
        assert_eq!(group.now(mine.write(100)), Err(Errno::EIO));
        assert_eq!(group.now(mine.unlock()), Err(Errno::EIO));
        group.now(mine.close()).unwrap();
        let mine = group.now(mine.mount.open(1)).unwrap();
        assert_eq!(group.now(mine.lock(false)), Err(Errno::EAGAIN));
        group.now(theirs.unlock()).unwrap();
        group.now(mine.lock(false)).unwrap();
        assert_eq!(group.now(mine.read()), Ok(2));
        group.settle_and_compare()
    });
}

/// Nobody answers any more, ever: what closes the file is told so, also when an unlock before it is still on its way.
#[test]
fn calls_about_locks_end_on_a_mount_whose_member_is_removed() {
    let mut group = Group::of(4, 1, 1);
    let primary = group.primary().unwrap();
    let gone = (primary + 1) % 4;
    let [mine, theirs] = open_through(&group, [gone, primary]);
    let third = OpenCounter { owner: LockOwner(3), handle: Handle(33), ..mine.clone() };
    group.now(mine.lock(false)).unwrap();
    group.now(mine.write(1)).unwrap();
    let waiting = begin_wait(&third);
    group.run_for(Duration::from_secs(1));
    group.remove(primary, gone).unwrap();
    for round in 0..3 {
        for counter in [&mine, &third] {
            let (unlocked, took) = group.timed(counter.unlock());
            assert_eq!(unlocked, Err(Errno::EIO), "round {round}");
            assert!(took < Duration::from_secs(90), "{took:?}");
        }
        assert_eq!(group.now(mine.lock(false)), Err(Errno::EIO));
    }
    assert_eq!(waiting.answer(), None, "until a signal ends it");
    group.now(theirs.lock(true)).unwrap();
    group.members()[gone] = None;
    group.settle_and_compare().unwrap();
}

// ---- what the front end shows ----

/// A front end with a cache, as the kernel: it notes what it is told to drop, and writes a page back that a program has changed.
#[derive(Clone, Default)]
struct CachingFrontEnd {
    told: Arc<Mutex<Vec<Invalidation>>>,
    changed: Arc<Mutex<Option<u64>>>,
    /// It never finishes.
    is_stuck: Arc<AtomicBool>,
}

impl CachingFrontEnd {
    fn of(group: &Group, counter: &OpenCounter) -> CachingFrontEnd {
        let front_end = CachingFrontEnd::default();
        let (own, counter) = (front_end.clone(), counter.clone());
        let env = counter.mount.env.clone();
        env.spawn(Box::pin(async move {
            let queue = counter.mount.fs.invalidations().expect("it has some");
            loop {
                let told = queue.next().await;
                while own.is_stuck.load(Ordering::SeqCst) {
                    sleep(&*counter.mount.env, SOON).await;
                }
                let is_data =
                    matches!(&told, Invalidation::Data { inode, .. } if *inode == counter.inode);
                let changed = own.changed.lock().unwrap().take_if(|_| is_data);
                if let Some(number) = changed {
                    let bytes = Bytes::copy_from_slice(&number.to_be_bytes());
                    let (fs, writer) = (&counter.mount.fs, Writer::Mapping);
                    fs.write(writer, counter.inode, counter.handle, 0, bytes).await.unwrap();
                }
                own.told.lock().unwrap().push(told);
            }
        }));
        group.sim.run_for(Duration::from_millis(10));
        front_end
    }
}

#[test]
fn what_is_written_through_a_mapping_is_there_when_the_lock_is_given_up() {
    let mut group = Group::new(1, 1);
    let [mine, theirs] = two(&group);
    let front_end = CachingFrontEnd::of(&group, &mine);
    group.now(mine.lock(false)).unwrap();
    *front_end.changed.lock().unwrap() = Some(7);
    group.now(mine.unlock()).unwrap();
    group.now(theirs.lock(false)).unwrap();
    assert_eq!(group.now(theirs.read()), Ok(7));
    group.settle_and_compare().unwrap();
}

#[test]
fn names_that_were_told_just_now_are_dropped_before_a_lock_is_answered() {
    let group = Group::new(1, 1);
    let [mine, theirs] = two(&group);
    let front_end = CachingFrontEnd::of(&group, &mine);
    let entry = group.now(mine.mount.fs.lookup(me(), ROOT, NAME)).unwrap();
    assert!(!entry.name_ttl.is_zero());
    let listed = group.now(mine.mount.fs.opendir(me(), ROOT)).unwrap();
    group.now(mine.mount.fs.readdir(ROOT, listed.handle, 0, 10, true)).unwrap();
    let (fs, old) = (&theirs.mount.fs, b"counter.old");
    group.now(fs.rename(me(), ROOT, NAME, ROOT, old, RenameFlags::default())).unwrap();
    group.now(mine.lock(false)).unwrap();
    let name = Invalidation::Name { parent: ROOT, name: Bytes::from_static(NAME) };
    assert!(front_end.told.lock().unwrap().contains(&name));
}

#[test]
fn a_lock_is_not_taken_where_old_pages_would_be_shown() {
    let mut group = Group::new(1, 1);
    let [mine, theirs] = two(&group);
    let front_end = CachingFrontEnd::of(&group, &mine);
    front_end.is_stuck.store(true, Ordering::SeqCst);
    assert_eq!(group.now(mine.lock(true)), Err(Errno::EIO));
    group.run_for(SOON);
    assert_eq!(group.now(theirs.lock(false)), Ok(()));
    group.now(theirs.unlock()).unwrap();
    front_end.is_stuck.store(false, Ordering::SeqCst);
    group.run_for(SOON);
    assert_eq!(group.now(mine.lock(true)), Ok(()));
}

// ---- calls that are given up, or come late ----

/// Its bytes are made durable while the session ends, and another one begins on the mount.
#[test]
fn an_unlock_takes_nothing_in_a_session_that_began_after_it() {
    let mut late_ones = 0;
    for seed in 0..8 {
        let mut group = Group::new(seed, 1);
        let [primary, ..] = group.roles();
        let [mine, theirs] = two(&group);
        group.now(mine.lock(false)).unwrap();
        group.now(mine.write(1)).unwrap();
        // Making them durable takes up to so long.
        group.disks[primary].set_latency(seed, Duration::from_secs(60));
        let unlocked = {
            let mine = mine.clone();
            begin(&mine.mount.env.clone(), async move {
                let locks = mine.mount.fs.locks().unwrap();
                let range = LockRange { first: 1000, last: 2000 };
                locks.unlock(mine.inode, mine.owner, range).await
            })
        };
        group.run_for(Duration::from_millis(20));
        group.disks[primary].set_latency(seed, Duration::ZERO);
        group.sim.freeze(mine.mount.host);
        group.run_for(TERM + Duration::from_secs(3));
        group.sim.thaw(mine.mount.host);
        let third = OpenCounter { owner: LockOwner(3), ..mine.clone() };
        let other = group.now(mine.mount.open(4)).unwrap();
        let third = OpenCounter { handle: other.handle, ..third };
        // Beside what the other one would keep.
        let range = LockRange { first: 1200, last: 1300 };
        let kind = LockKind::Exclusive;
        let wanted = FileLock { kind, range, pid: 9, through: Some(third.handle) };
        let locks = third.mount.fs.locks().unwrap();
        group.now(locks.lock(third.inode, third.owner, wanted, false)).unwrap();
        let mut answer = unlocked.answer();
        late_ones += usize::from(answer.is_none());
        for _ in 0..60 {
            group.run_for(Duration::from_secs(1));
            answer = answer.or_else(|| unlocked.answer());
        }
        assert_eq!(answer, Some(Err(Errno::EIO)), "seed {seed}");
        let range = LockRange { first: 0, last: 999 };
        let wanted = FileLock { kind, range, pid: 7, through: Some(theirs.handle) };
        let locks = theirs.mount.fs.locks().unwrap();
        let taken = group.now(locks.lock(theirs.inode, theirs.owner, wanted, false));
        assert_eq!(taken, Ok(()), "seed {seed}: nobody has it");
    }
    assert!(late_ones > 0, "no unlock takes longer than the lock lasts");
}

/// Another one has a shared lock by then: the exclusive one cannot be had again, and nothing is written as if it were.
#[test]
fn an_owner_whose_exclusive_lock_has_become_a_shared_one_does_not_write_as_before() {
    let mut lost_ones = 0;
    for millis in 0..60 {
        let mut group = Group::new(millis, 1);
        let [mine, theirs] = two(&group);
        group.now(mine.lock(false)).unwrap();
        let shared = |counter: &OpenCounter, waits| {
            let locks = counter.mount.fs.locks().unwrap();
            let wanted = lock_of(LockKind::Shared, counter.handle);
            locks.lock(counter.inode, counter.owner, wanted, waits)
        };
        let env = &mine.mount.env;
        let waiting = begin(&theirs.mount.env, shared(&theirs, true));
        group.run_for(Duration::from_millis(50));
        let given_up =
            atoll_env::timeout(&**env, Duration::from_millis(millis), shared(&mine, true));
        let is_given_up = group.now(given_up).is_err();
        group.run_for(Duration::from_secs(3));
        let written = group.now(mine.write(1));
        match waiting.answer() {
            Some(taken) => {
                assert_eq!(taken, Ok(()));
                if is_given_up {
                    lost_ones += 1;
                    assert_eq!(written, Err(Errno::EIO), "after {millis} ms");
                    assert_eq!(group.now(mine.unlock()), Err(Errno::EIO));
                }
            }
            None => assert_eq!(written, Ok(()), "it is exclusive"),
        }
        group.now(mine.close()).unwrap();
        group.run_for(SOON);
        group.now(theirs.read()).unwrap();
    }
    assert!(lost_ones > 0, "none is given up in time");
}

#[test]
fn a_program_that_waits_for_a_lock_does_not_hold_up_the_other_calls_of_its_mount() {
    let mut group = Group::new(1, 1);
    let [mine, theirs] = two(&group);
    group.now(theirs.lock(false)).unwrap();
    let waiting = begin_wait(&mine);
    group.run_for(Duration::from_millis(20));
    let lookups = (0..1000).map(|_| mine.mount.fs.lookup(me(), ROOT, NAME));
    let (found, took) = group.timed(futures_util::future::join_all(lookups));
    assert!(found.into_iter().all(|entry| entry.is_ok()));
    assert!(took < Duration::from_millis(500), "{took:?}");
    assert_eq!(waiting.answer(), None);
}

/// They ask in turns with other calls of their process.
#[test]
fn a_program_that_locks_while_another_thread_of_it_waits_takes_its_place_from_nobody() {
    let mut group = Group::new(1, 1);
    let [mine, theirs] = two(&group);
    let third = group.now(theirs.mount.open(3)).unwrap();
    group.now(mine.lock(false)).unwrap();
    let first = begin_wait(&theirs);
    group.run_for(Duration::from_millis(100));
    let second = begin_wait(&third);
    group.run_for(Duration::from_millis(100));
    let (kind, range) = (LockKind::Shared, LockRange { first: 0, last: 3 });
    let other = FileLock { kind, range, pid: 9, through: Some(theirs.handle) };
    let locks = theirs.mount.fs.locks().unwrap();
    for _ in 0..3 {
        let taken = group.now(locks.lock(theirs.inode, theirs.owner, other, false));
        assert_eq!(taken, Err(Errno::EAGAIN));
        group.run_for(Duration::from_millis(70));
    }
    group.now(mine.unlock()).unwrap();
    group.run_for(SOON);
    assert_eq!((first.answer(), second.answer()), (Some(Ok(())), None));
}
