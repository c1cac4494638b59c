//! A member with a new disk, in a pool whose log does not reach back: it is given all files.

use std::sync::atomic::{AtomicUsize, Ordering};

use atoll_pool::CopyProgress;
use atoll_pool::disk::{Disk, Making};
use atoll_vfs::{
    FileKind, Handle, InodeNumber, OpenFlags, RenameFlags, SetAttr, Writer, XattrFlags,
};
use bytes::Bytes;

use super::*;
use crate::workload::clients::{Client, Grounds, judge, look_at_everything};
use crate::workload::history::History;
use crate::workload::{Dice, ROOT, for_each_seed, me};

const FOURTH: usize = 3;

async fn write(fs: &dyn FileSystem, file: (InodeNumber, Handle), offset: u64, data: Vec<u8>) {
    let len = data.len() as u32;
    let written = fs.write(Writer::At(me()), file.0, file.1, offset, Bytes::from(data)).await;
    assert_eq!(written, Ok(len));
}

async fn make(fs: &dyn FileSystem, dir: InodeNumber, name: &[u8]) -> (InodeNumber, Handle) {
    let made = fs.create(me(), dir, name, 0o644, OpenFlags::READ_WRITE).await.unwrap();
    (made.0.attr.inode, made.1.handle)
}

/// Files of all kinds.
async fn fill(fs: &dyn FileSystem) {
    let home = fs.mkdir(me(), ROOT, b"home", 0o751).await.unwrap().attr.inode;
    let mut deep = home;
    for level in 0..40 {
        let name = vec![b'a' + level % 26; if level % 3 == 0 { 255 } else { 3 }];
        deep = fs.mkdir(me(), deep, &name, 0o700).await.unwrap().attr.inode;
    }
    let file = make(fs, deep, b"deepest").await;
    write(fs, file, 0, b"some bytes".to_vec()).await;
    let linked = make(fs, home, b"linked").await;
    write(fs, linked, 5, vec![7; 300_000]).await;
    fs.link(me(), linked.0, ROOT, b"other name").await.unwrap();
    fs.link(me(), linked.0, deep, b"third name").await.unwrap();
    // Directories that are older than what they lie in.
    let moved = fs.mkdir(me(), home, b"moved", 0o755).await.unwrap().attr.inode;
    fs.mkdir(me(), moved, b"empty", 0o711).await.unwrap();
    let later = fs.mkdir(me(), home, b"later", 0o755).await.unwrap().attr.inode;
    fs.rename(me(), home, b"moved", later, b"moved", RenameFlags::default()).await.unwrap();
    for (name, target) in [
        (&b"plain"[..], &b"somewhere/else"[..]),
        (b"like-a-placeholder", b"../../123/0123456789abcdef"),
        (b"escaped", b"./../../123/0123456789abcdef"),
    ] {
        fs.symlink(me(), later, name, target).await.unwrap();
    }
    for (name, kind, rdev) in [
        (&b"fifo"[..], FileKind::Fifo, 0),
        (b"socket", FileKind::Socket, 0),
        (b"char", FileKind::CharDevice, 0x103),
        (b"block", FileKind::BlockDevice, 0x801),
    ] {
        fs.mknod(me(), moved, name, kind, 0o4640, rdev).await.unwrap();
    }
    let sparse = make(fs, home, b"sparse").await;
    write(fs, sparse, 9 << 20, b"end".to_vec()).await;
    let hole = SetAttr { size_bytes: Some(20 << 20), ..SetAttr::default() };
    fs.setattr(me(), sparse.0, None, hole).await.unwrap();
    let large = make(fs, home, b"large").await;
    for mib in 0..5 {
        write(fs, large, mib << 20, vec![mib as u8 + 1; 1 << 20]).await;
    }
    for (inode, name, value) in [
        (large.0, &b"user.large"[..], Bytes::from(vec![3; 64 << 10])),
        (moved, b"user.dir", Bytes::from_static(b"of a directory")),
        (ROOT, b"user.root", Bytes::from_static(b"of the root")),
    ] {
        fs.setxattr(me(), inode, name, value, XattrFlags::default()).await.unwrap();
    }
    for number in 0..100u32 {
        let file = make(fs, later, format!("small-{number}").as_bytes()).await;
        write(fs, file, 0, number.to_be_bytes().repeat(1 + number as usize * 20)).await;
        fs.close(file.0, file.1).await.unwrap();
    }
    let owner = SetAttr { uid: Some(7), mode: Some(0o4711), ..SetAttr::default() };
    fs.setattr(me(), linked.0, None, owner).await.unwrap();
    for (inode, handle) in [file, linked, sparse, large] {
        fs.close(inode, handle).await.unwrap();
    }
    // It is open, and has no name.
    make(fs, home, b"nameless").await;
    fs.unlink(me(), home, b"nameless").await.unwrap();
}

/// Makes so many changes that the log begins anew.
async fn change_much(fs: &dyn FileSystem) {
    for _ in 0..520 {
        fs.mkdir(me(), ROOT, b"again", 0o755).await.unwrap();
        fs.rmdir(me(), ROOT, b"again").await.unwrap();
    }
}

impl Group {
    /// Four members whose log does not reach back.
    fn of_four(seed: u64) -> Group {
        let mut group = Group::of(4, seed, (seed % 4) as u8);
        let fs = group.fs();
        group.sim.block_on(LONG, fill(&fs)).unwrap();
        group.sim.block_on(LONG, change_much(&fs)).unwrap();
        drop(fs);
        group.await_quiet().unwrap();
        group
    }

    /// How far the fourth is, as the primary says.
    fn copied(&self) -> Option<CopyProgress> {
        let primary = self.primary()?;
        let peer = self.sim.peer(self.hosts[FOURTH]);
        let members = self.status(primary).members;
        members.into_iter().find(|member| member.peer.id == peer.id)?.copying
    }
}

#[test]
fn a_member_with_a_new_disk_is_given_everything() {
    for_each_seed(3, |seed| {
        let mut group = Group::of_four(seed);
        group.wipe(FOURTH);
        group.restart(FOURTH);
        let until = group.sim.now() + QUIET_WITHIN;
        group.disks[FOURTH].set_latency(seed, Duration::from_millis(2));
        let mut seen = Vec::new();
        while seen.is_empty() || !group.is_quiet() {
            group.run_for(Duration::from_millis(2));
            seen.extend(group.copied());
            if group.sim.now() > until {
                return Err(format!("not quiet: {:#?}", group.status(group.primary().unwrap())));
            }
        }
        let last = seen.last().expect("it is said how far it is");
        assert!(last.files >= 4 && last.files_done == last.files, "{last:?}");
        group.settle_and_compare()
    });
}

/// Its disk is full, wherever it is by then.
#[test]
fn a_member_whose_disk_is_too_small_is_waited_for_by_nobody_and_copied_when_it_has_room() {
    for (seed, room) in [(1, 100 << 10), (2, 3 << 20)] {
        let mut group = Group::of_four(seed);
        group.wipe(FOURTH);
        // The journal and the votes fit, and little else.
        group.disks[FOURTH].set_capacity((17 << 20) + room, 1000);
        group.restart(FOURTH);
        let mounted = group.mount(0);
        for number in 0..30 {
            let before = group.sim.now();
            let name = format!("made-{number}");
            let made = mounted.mkdir(me(), ROOT, name.as_bytes(), 0o755);
            group.sim.block_on(LONG, made).unwrap().unwrap();
            let took = group.sim.now().since(before);
            assert!(took < Duration::from_secs(3), "{took:?}");
            group.run_for(Duration::from_millis(300));
        }
        let primary = group.primary().unwrap();
        let members = group.status(primary).members;
        assert_eq!(members.iter().filter(|member| member.is_member).count(), 3, "room {room}");
        group.disks[FOURTH].set_capacity(1 << 34, 1 << 20);
        group.failed.clear();
        group.run_for(Duration::from_secs(30));
        group.failed.clear();
        group.settle_and_compare().unwrap_or_else(|wrong| panic!("room {room}: {wrong}"));
    }
}

/// All that was answered is on one other member, which is not there: voters would take a member with a new disk for the primary.
#[test]
fn a_member_with_a_new_disk_never_becomes_the_primary() {
    let mut group = Group::of(4, 1, 1);
    let fs = group.mount(FOURTH);
    let small = (16 << 20) + (40 << 20);
    let [primary, one, two] = group.roles();
    group.kill(one, InFlight::Lost);
    group.disks[one].set_capacity(small, 500);
    let fill = async {
        let file = make(&*fs, ROOT, b"large").await;
        for mib in 0..60 {
            write(&*fs, file, mib << 20, vec![1; 1 << 20]).await;
        }
    };
    group.sim.block_on(LONG, fill).unwrap();
    // It votes, and has no room for what it lacks.
    group.restart(one);
    group.run_for(Duration::from_secs(3));
    group.kill(two, InFlight::Lost);
    group.disks[two].set_capacity(small, 500);
    group.sim.block_on(LONG, fs.mkdir(me(), ROOT, b"answered", 0o755)).unwrap().unwrap();
    let members = group.status(primary).members;
    assert_eq!(members.iter().filter(|member| member.is_member).count(), 2);
    group.kill(primary, InFlight::Lost);
    group.wipe(FOURTH);
    group.restart(FOURTH);
    group.restart(two);
    group.run_for(Duration::from_secs(15));
    assert_eq!(group.primary(), None);
    for at in [one, two] {
        group.disks[at].set_capacity(1 << 34, 1 << 20);
    }
    group.restart(primary);
    group.await_quiet().unwrap();
    group.failed.clear();
    group.settle_and_compare().unwrap();
    let found = group.fs();
    group.sim.block_on(LONG, found.lookup(me(), ROOT, b"answered")).unwrap().unwrap();
}

/// Nobody can take the vote of the dead one yet: fewer vote, and the pool goes on.
#[test]
fn a_dead_voter_is_removed_while_a_member_is_copied() {
    let mut group = Group::of_four(3);
    group.wipe(FOURTH);
    // It is not copied until it has room.
    group.disks[FOURTH].set_capacity(18 << 20, 1000);
    group.restart(FOURTH);
    let primary = group.primary().unwrap();
    let dead = (0..3).find(|at| *at != primary).unwrap();
    group.kill(dead, InFlight::Lost);
    group.run_for(Duration::from_secs(2));
    let before = group.sim.now();
    group.remove(primary, dead).unwrap();
    assert!(group.sim.now().since(before) < Duration::from_secs(2));
    let fs = group.mount(primary);
    group.sim.block_on(LONG, fs.mkdir(me(), ROOT, b"goes on", 0o755)).unwrap().unwrap();
    group.disks[FOURTH].set_capacity(1 << 34, 1 << 20);
    group.run_for(Duration::from_secs(35));
    group.failed.clear();
    group.settle_and_compare().unwrap();
}

/// A pool of one has files that were put there by hand, listed or not. Whoever joins is given them.
#[test]
fn files_that_were_put_by_hand_are_given_to_who_joins() {
    let mut group = Group::of(1, 5, 1);
    // The pool of one takes the place of the one that was made.
    group.members()[0] = None;
    let disk = SimulatedDisk::new(group.sim.outside());
    let settings = PoolSettings::new(POOL, 1);
    let (host, local) = (group.hosts[0], group.sim.peer(group.hosts[0]));
    let env = group.sim.env(host);
    let shared = {
        let disk = disk.clone();
        async move {
            atoll_pool::create(&disk, settings).await.unwrap();
            let mut root = disk.top();
            for name in ["slots", "000", "0000000000000001"] {
                root = disk.node(&root, name.as_bytes()).await.unwrap();
            }
            disk.make(&root, b"by hand", Making::File, 0o640).await.unwrap();
            let file = disk.open(&disk.node(&root, b"by hand").await.unwrap()).await.unwrap();
            disk.write(&file, 0, b"never looked at").await.unwrap();
            disk.make(&root, b"dir", Making::Directory, 0o750).await.unwrap();
            let dir = disk.node(&root, b"dir").await.unwrap();
            disk.make(&dir, b"below", Making::Symlink(b"somewhere"), 0o777).await.unwrap();
            atoll_pool::share(env, disk, local, (3, 1)).await.unwrap();
        }
    };
    group.sim.block_on(LONG, shared).unwrap();
    disk.kill(InFlight::Lost);
    group.disks[0] = disk.reopen();
    group.start(0).unwrap();
    let other = group.join(0).unwrap();
    group.settle_and_compare().unwrap();
    assert!(group.status(0).members.iter().all(|member| member.is_member));
    let fs = group.mount(other);
    let found = group.sim.block_on(LONG, fs.lookup(me(), ROOT, b"by hand")).unwrap().unwrap();
    assert_eq!(found.attr.size_bytes, 15);
}

/// A member that is being given all files goes, or the primary that gives them.
#[test]
fn members_are_removed_while_one_is_copied() {
    for seed in 0..6 {
        let mut group = Group::of_four(seed);
        group.wipe(FOURTH);
        group.disks[FOURTH].set_latency(seed, Duration::from_millis(2));
        group.restart(FOURTH);
        group.run_for(Duration::from_millis(200 + seed * 150));
        let primary = group.primary().unwrap();
        let via = group.all().into_iter().find(|at| ![primary, FOURTH].contains(at)).unwrap();
        let gone = if seed % 2 == 0 { FOURTH } else { primary };
        group.remove(via, gone).unwrap_or_else(|why| panic!("seed {seed}: {why}"));
        group.members()[gone] = None;
        group.settle_and_compare().unwrap_or_else(|wrong| panic!("seed {seed}: {wrong}"));
    }
}

const CLIENTS: u32 = 3;
/// Of each client.
const STEPS: u64 = 500;
/// Clients have made their steps so long after all faults have ended.
const DONE_WITHIN: Duration = Duration::from_secs(600);

/// What goes wrong while a member is copied.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Trouble {
    Nothing,
    /// The process of the member that is copied is killed.
    OfTheFourth,
    /// The primary's process is killed.
    OfThePrimary,
    /// Both may lose power.
    Power(Loss),
}

/// Clients change files while the fourth member is given all of them.
fn copied_beside_clients(seed: u64, trouble: Trouble) -> Result<(), String> {
    let mut group = Group::of_four(seed);
    let mut dice = Dice(seed);
    let history = History::new(group.sim.outside());
    let fs = group.mount(0);
    let made = group.sim.block_on(LONG, Grounds::make(&*fs, CLIENTS as usize, 3)).unwrap();
    let grounds = Arc::new(made);
    group.await_quiet()?;
    for disk in &group.disks {
        disk.set_latency(seed, Duration::from_millis(2));
    }
    let running = Arc::new(AtomicUsize::new(CLIENTS as usize));
    let env = group.sim.env(group.clients);
    for number in 0..CLIENTS {
        let fs: Arc<dyn FileSystem> = group.mount(number as usize);
        let client = Client {
            number,
            grounds: grounds.clone(),
            history: history.clone(),
            seed: seed * 100 + u64::from(number),
            steps: STEPS,
            pause: Duration::from_millis(20),
            persists: false,
        };
        let (work, running) = (client.run(fs, env.clone()), running.clone());
        env.spawn(Box::pin(async move {
            work.await;
            running.fetch_sub(1, Ordering::SeqCst);
        }));
    }
    group.run_for(Duration::from_millis(dice.below(2000)));
    group.wipe(FOURTH);
    group.disks[FOURTH].set_latency(seed, Duration::from_millis(2));
    group.restart(FOURTH);
    let rounds = if trouble == Trouble::Nothing { 0 } else { 6 };
    for _ in 0..rounds {
        group.run_for(Duration::from_millis(dice.below(2500)));
        let calls = if dice.below(2) == 0 { InFlight::Lost } else { InFlight::Late };
        let primary = group.primary();
        let at = match (trouble, dice.below(3), primary) {
            (Trouble::OfThePrimary, 0..2, Some(primary)) => primary,
            (Trouble::Power(_), 0, Some(primary)) => primary,
            _ => FOURTH,
        };
        match trouble {
            Trouble::Power(loss) if group.is_up(at) => {
                group.lose_power(at, loss, dice.below(1 << 32));
                history.power_lost();
            }
            _ if group.is_up(at) => group.kill(at, calls),
            _ => {}
        }
        group.run_for(Duration::from_millis(dice.below(1500)));
        for at in group.all() {
            if !group.is_up(at) {
                group.restart(at);
            }
        }
    }
    let until = group.sim.now() + DONE_WITHIN;
    while running.load(Ordering::SeqCst) > 0 {
        group.run_for(Duration::from_millis(500));
        if group.sim.now() > until {
            let all: Vec<_> = group.all().into_iter().map(|at| group.status(at)).collect();
            return Err(format!("clients have no answer: {all:#?}"));
        }
    }
    group.settle_and_compare()?;
    history.settled();
    let fs: Arc<dyn FileSystem> = group.mount(FOURTH);
    group.sim.block_on(LONG, look_at_everything(&fs, &history, &grounds)).unwrap();
    judge(&history, &grounds, &[atoll_vfs::Errno::EAGAIN, atoll_vfs::Errno::ETIMEDOUT])
}

#[test]
fn a_member_is_copied_while_clients_change_files() {
    for_each_seed(2, |seed| copied_beside_clients(seed, Trouble::Nothing));
}

#[test]
fn a_member_that_is_killed_while_it_is_copied_goes_on() {
    for_each_seed(3, |seed| copied_beside_clients(seed, Trouble::OfTheFourth));
}

#[test]
fn a_member_is_copied_by_one_primary_after_another() {
    for_each_seed(3, |seed| copied_beside_clients(seed, Trouble::OfThePrimary));
}

#[test]
fn a_member_is_copied_over_losses_of_power() {
    for_each_seed(3, |seed| copied_beside_clients(seed, Trouble::Power(Loss::Ordered)));
}

#[test]
fn a_member_is_copied_over_losses_of_power_of_disks_without_order() {
    for_each_seed(4, |seed| copied_beside_clients(seed, Trouble::Power(Loss::Arbitrary)));
}
