//! One fault at the moment that matters.

use std::collections::BTreeMap;
use std::sync::Mutex;

use atoll_net::{CallError, Peer, Request};
use atoll_pool::addressed;
use atoll_pool::disk::simulated::DiskCall;
use atoll_vfs::{
    Errno, FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE, FileKind, Handle, InodeNumber, OpenFlags,
    RenameFlags, SetAttr, Writer,
};
use bytes::Bytes;
use minicbor::{Decode, Encode};

use super::*;
use crate::workload::{ROOT, me};

type Fs = PoolFs<SimulatedDisk>;

const MIB: u64 = 1 << 20;

/// What a call answers, once it does.
struct Pending<T>(Arc<Mutex<Option<T>>>);

impl<T> Pending<T> {
    fn answer(&self) -> Option<T> {
        self.0.lock().unwrap().take()
    }
}

impl Group {
    /// Makes a call that goes on beside the test, as long as the primary lives.
    fn begin<T: Send + 'static>(
        &self,
        call: impl Future<Output = T> + Send + 'static,
    ) -> Pending<T> {
        let answer = Arc::new(Mutex::new(None));
        let to = answer.clone();
        self.sim.outside().spawn(Box::pin(async move {
            let done = call.await;
            *to.lock().unwrap() = Some(done);
        }));
        Pending(answer)
    }

    fn run<T>(&self, call: impl Future<Output = T>) -> T {
        self.sim.block_on(LONG, call).unwrap()
    }

    fn run_ms(&self, millis: u64) {
        self.sim.run_for(Duration::from_millis(millis));
    }

    fn make(&self, name: &str) -> (InodeNumber, Handle) {
        let fs = self.fs();
        self.run(async {
            let flags = OpenFlags::READ_WRITE;
            let made = fs.create(me(), ROOT, name.as_bytes(), 0o644, flags).await.unwrap();
            (made.0.attr.inode, made.1.handle)
        })
    }

    /// Has nothing that changes beside the test.
    fn set_latency(&self, at: usize, millis: u64) {
        self.disks[at].set_latency(1, Duration::from_millis(millis));
    }

    /// Whether a name of the root is there.
    fn has(&self, name: &str) -> bool {
        let fs = self.fs();
        self.run(async { fs.lookup(me(), ROOT, name.as_bytes()).await.is_ok() })
    }

    fn problems(&self) -> Vec<String> {
        let members = self.status(PRIMARY).members;
        members.into_iter().filter_map(|member| member.problem).collect()
    }
}

async fn write(
    fs: &Fs,
    file: (InodeNumber, Handle),
    offset: u64,
    data: Vec<u8>,
) -> Result<u32, Errno> {
    fs.write(Writer::At(me()), file.0, file.1, offset, Bytes::from(data)).await
}

async fn resize(fs: &Fs, file: (InodeNumber, Handle), size_bytes: u64) {
    let changes = SetAttr { size_bytes: Some(size_bytes), ..SetAttr::default() };
    fs.setattr(me(), file.0, None, changes).await.unwrap();
}

#[test]
fn what_is_written_is_on_all_members() {
    let group = Group::new(1, 1);
    let fs = group.fs();
    let home = group.run(fs.mkdir(me(), ROOT, b"home", 0o755)).unwrap().attr.inode;
    let work = async {
        let flags = OpenFlags::READ_WRITE;
        let (file, opened) = fs.create(me(), home, b"file", 0o644, flags).await.unwrap();
        let file = (file.attr.inode, opened.handle);
        assert_eq!(write(&fs, file, 0, b"some bytes".to_vec()).await, Ok(10));
        fs.fsync(file.0, file.1, false).await.unwrap();
    };
    group.run(work);
    group.await_quiet().unwrap();
    group.compare(Compared { times: true }).unwrap();
}

/// The primary has no room for it after all, when all members have it in their journals.
#[test]
fn a_change_that_is_withdrawn_while_a_backup_is_restarted_is_made_nowhere() {
    for (call, millis) in [(0, 3), (1, 3), (0, 40), (1, 40)] {
        let mut group = Group::new(call * 100 + millis, 1);
        let fs = group.fs();
        group.disks[PRIMARY].fail_next(DiskCall::Make, Errno::ENOSPC);
        group.set_latency(1, 50);
        let made = group.begin(async move {
            match call {
                0 => fs.mkdir(me(), ROOT, b"new", 0o755).await.map(drop),
                _ => fs.mknod(me(), ROOT, b"new", FileKind::Regular, 0o644, 0).await.map(drop),
            }
        });
        group.run_ms(millis);
        group.kill(1, InFlight::Lost);
        group.run_ms(1000);
        group.restart(1);
        group.run_ms(5000);
        assert_eq!(made.answer(), Some(Err(Errno::ENOSPC)));
        assert!(!group.has("new"));
        group.make("new");
        group.kill(2, InFlight::Lost);
        group.restart(2);
        group.settle_and_compare().unwrap();
    }
}

/// The primary withdraws a change which a backup has, and dies before the backup hears of it.
#[test]
fn a_change_that_was_withdrawn_behind_a_backups_back_is_made_nowhere() {
    let mut has_missed = 0;
    for millis in 2..10 {
        let mut group = Group::new(millis, 1);
        group.make("old");
        let fs = group.fs();
        group.disks[PRIMARY].fail_next(DiskCall::Make, Errno::ENOSPC);
        let made = group.begin(async move { fs.mkdir(me(), ROOT, b"new", 0o755).await.map(drop) });
        group.run_ms(millis);
        group.sim.cut(&[group.hosts[PRIMARY]], &[group.hosts[1]]);
        group.run_ms(500);
        let answer = made.answer();
        has_missed += usize::from(answer.is_none());
        group.kill(PRIMARY, InFlight::Lost);
        group.sim.heal();
        group.restart(PRIMARY);
        group.run_ms(5000);
        // It was not withdrawn yet if nobody was told.
        assert!(answer.is_none() || !group.has("new"));
        group.settle_and_compare().unwrap_or_else(|wrong| panic!("cut after {millis} ms: {wrong}"));
    }
    assert!(has_missed > 0, "some backup lacked the withdrawal");
}

#[test]
fn a_file_that_is_removed_while_it_is_written_is_gone_everywhere() {
    let group = Group::new(2, 1);
    let file = group.make("file");
    group.sim.freeze(group.hosts[1]);
    let fs = group.fs();
    let written = group.begin(async move { write(&fs, file, 0, vec![1; 3 << 20]).await });
    group.run_ms(10);
    let fs = group.fs();
    let removed = group.begin(async move { fs.unlink(me(), ROOT, b"file").await });
    group.run_ms(100);
    let fs = group.fs();
    let also = group.begin(async move { write(&fs, file, 0, vec![2; 3 << 20]).await });
    group.run_ms(1000);
    group.sim.thaw(group.hosts[1]);
    group.run_ms(10_000);
    assert_eq!(written.answer(), Some(Ok(3 << 20)));
    assert_eq!(removed.answer(), Some(Ok(())));
    assert_eq!(also.answer(), Some(Ok(3 << 20)), "to a file without a name");
    group.settle_and_compare().unwrap();
}

/// The sync comes to a backup after the file is gone there.
#[test]
fn a_file_that_is_removed_while_it_is_synced_stops_nobody() {
    let group = Group::new(3, 1);
    let file = group.make("file");
    let fs = group.fs();
    group.run(write(&fs, file, 0, vec![1; 100])).unwrap();
    group.run_ms(1000);
    // The call of the sync is lost, and made again later.
    group.sim.cut(&[group.hosts[PRIMARY]], &[group.hosts[1]]);
    let synced = group.begin(async move { fs.fsync(file.0, file.1, false).await });
    group.run_ms(100);
    group.sim.heal();
    let fs = group.fs();
    group.run(fs.unlink(me(), ROOT, b"file")).unwrap();
    group.run_ms(10_000);
    assert_eq!(synced.answer(), Some(Ok(())));
    assert_eq!(group.problems(), [""; 0]);
    group.settle_and_compare().unwrap();
}

#[test]
fn a_directory_moves_while_a_file_below_it_is_written() {
    for seed in 0..6 {
        let mut group = Group::new(seed, (seed % 3) as u8);
        let fs = group.fs();
        let dir = group.run(fs.mkdir(me(), ROOT, b"dir", 0o755)).unwrap().attr.inode;
        let sub = group.run(fs.mkdir(me(), dir, b"sub", 0o755)).unwrap().attr.inode;
        group.run(fs.mkdir(me(), ROOT, b"other", 0o755)).unwrap();
        let flags = OpenFlags::READ_WRITE;
        let made = group.run(fs.create(me(), sub, b"file", 0o644, flags)).unwrap();
        let file = (made.0.attr.inode, made.1.handle);
        for at in MEMBERS {
            group.set_latency(at, 5);
        }
        let writer = group.begin(async move {
            for mib in 0..6 {
                write(&fs, file, mib * MIB, vec![mib as u8 + 1; MIB as usize]).await.unwrap();
            }
        });
        let fs = group.fs();
        let mover = group.begin(async move {
            let other = fs.lookup(me(), ROOT, b"other").await.unwrap().attr.inode;
            for _ in 0..6 {
                fs.rename(me(), ROOT, b"dir", other, b"moved", RenameFlags::default())
                    .await
                    .unwrap();
                fs.rename(me(), other, b"moved", ROOT, b"dir", RenameFlags::default())
                    .await
                    .unwrap();
            }
        });
        group.run_ms(100);
        if seed % 2 == 1 {
            group.kill(1, InFlight::Lost);
            group.restart(1);
        }
        group.run_ms(60_000);
        assert!(writer.answer().is_some() && mover.answer().is_some());
        group.settle_and_compare().unwrap();
    }
}

#[test]
fn lengths_and_holes_are_the_same_everywhere() {
    for seed in 0..6 {
        let mut group = Group::new(seed, 1);
        let file = group.make("file");
        let fs = group.fs();
        group.set_latency(1, 20);
        let work = group.begin(async move {
            write(&fs, file, 0, vec![1; 3 << 20]).await.unwrap();
            let punch = FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE;
            fs.fallocate(me(), file.0, file.1, 5000, 2 << 20, punch).await.unwrap();
            fs.fallocate(me(), file.0, file.1, 3 << 20, 1 << 20, 0).await.unwrap();
            let flags = OpenFlags(OpenFlags::READ_WRITE.0 | OpenFlags::TRUNCATE);
            fs.open(me(), file.0, flags).await.unwrap();
            write(&fs, file, 77, vec![2; 100]).await.unwrap();
            resize(&fs, file, 5000).await;
        });
        group.run_ms(20 + seed * 30);
        match seed % 2 {
            0 => group.kill(1, InFlight::Lost),
            _ => group.lose_power(1, Loss::Ordered, seed),
        }
        group.restart(1);
        group.run_ms(10_000);
        assert!(work.answer().is_some());
        group.settle_and_compare().unwrap();
    }
}

#[test]
fn a_backup_without_room_is_an_error_of_the_call_and_of_nothing_else() {
    let group = Group::new(5, 1);
    // The journal, and what is kept for the index.
    let used = (16 << 20) + (32 << 20);
    group.disks[2].set_capacity(used + (32 << 20), 500);
    group.run_ms(1000);
    let fs = group.fs();
    // The primary has room.
    let filled = group.run(async {
        let flags = OpenFlags::READ_WRITE;
        for number in 0..100 {
            let name = format!("large-{number}");
            let made = fs.create(me(), ROOT, name.as_bytes(), 0o644, flags).await?;
            write(&fs, (made.0.attr.inode, made.1.handle), 0, vec![1; 1 << 20]).await?;
        }
        Ok(())
    });
    assert_eq!(filled, Err(Errno::ENOSPC));
    assert_eq!(group.problems(), [""; 0]);
    group.run(async {
        for number in 0..6 {
            fs.unlink(me(), ROOT, format!("large-{number}").as_bytes()).await.unwrap();
        }
    });
    group.run_ms(2000);
    let small = group.run(async {
        for number in 0..3000 {
            let name = format!("small-{number}");
            fs.mkdir(me(), ROOT, name.as_bytes(), 0o755).await?;
        }
        Ok(())
    });
    assert_eq!(small, Err(Errno::ENOSPC));
    assert_eq!(group.problems(), [""; 0]);
    group.run(async {
        for number in 0..100 {
            fs.rmdir(me(), ROOT, format!("small-{number}").as_bytes()).await.unwrap();
        }
    });
    group.run_ms(60_000);
    let file = group.make("again");
    assert_eq!(group.run(write(&fs, file, 0, vec![1; 100_000])), Ok(100_000));
    group.settle_and_compare().unwrap();
}

/// And of what a length has taken away nothing comes back.
#[test]
fn a_backup_that_lost_unsynced_bytes_gets_them_again() {
    for seed in 0..10 {
        let mut group = Group::new(seed, 1);
        let file = group.make("file");
        let fs = group.fs();
        group.run(async {
            write(&fs, file, 0, vec![1; 6 << 20]).await.unwrap();
            fs.fsync(file.0, file.1, false).await.unwrap();
            write(&fs, file, MIB + 5, vec![2; 3]).await.unwrap();
            write(&fs, file, 3 * MIB, vec![3; 1000]).await.unwrap();
            if seed % 2 == 1 {
                resize(&fs, file, 10).await;
                resize(&fs, file, 6 << 20).await;
            }
        });
        group.lose_power(1, Loss::Ordered, seed);
        group.restart(1);
        group.await_quiet().unwrap();
        group.compare(Compared::default()).unwrap();
        group.settle_and_compare().unwrap();
    }
}

/// It loses power a second time while it gets them.
#[test]
fn a_backup_that_loses_bytes_again_while_it_gets_them_has_them_in_the_end() {
    for seed in 0..20 {
        let mut group = Group::new(seed, 1);
        let file = group.make("file");
        let fs = group.fs();
        group.run(async {
            for mib in 0..6 {
                write(&fs, file, mib * MIB, vec![7; MIB as usize]).await.unwrap();
            }
        });
        group.lose_power(1, Loss::Ordered, seed);
        group.restart(1);
        let fs = group.fs();
        let synced = group.begin(async move { fs.fsync(file.0, file.1, false).await });
        group.set_latency(1, 20);
        group.run_ms(50 + seed * 20);
        group.lose_power(1, Loss::Ordered, seed);
        group.restart(1);
        group.run_ms(60 + seed * 10);
        group.lose_power(1, Loss::Ordered, seed);
        group.restart(1);
        group.run_ms(25_000);
        assert_eq!(synced.answer(), Some(Ok(())), "seed {seed}");
        group.await_quiet().unwrap();
        group.lose_power(1, Loss::Ordered, seed);
        group.restart(1);
        group.settle_and_compare().unwrap_or_else(|wrong| panic!("seed {seed}: {wrong}"));
    }
}

/// Changes that backups alone have are cut off, and others get their places.
#[test]
fn what_a_primary_has_lost_before_it_was_answered_is_lost_everywhere() {
    let mut lost = 0;
    for seed in 0..20 {
        let mut group = Group::new(seed, 1);
        group.set_latency(PRIMARY, 15);
        let fs = group.fs();
        let made = group.begin(async move { fs.mkdir(me(), ROOT, b"new", 0o755).await.map(drop) });
        group.run_ms(5 + seed * 2);
        group.lose_power(PRIMARY, Loss::Ordered, seed);
        if seed % 3 == 0 {
            group.kill(1, InFlight::Lost);
            group.restart(1);
        }
        group.restart(PRIMARY);
        let is_there = group.has("new");
        assert!(is_there || made.answer() != Some(Ok(())), "it was answered");
        lost += u32::from(!is_there);
        let fs = group.fs();
        group.run(fs.mkdir(me(), ROOT, b"other", 0o700)).unwrap();
        group.settle_and_compare().unwrap_or_else(|wrong| panic!("seed {seed}: {wrong}"));
        group.kill(2, InFlight::Lost);
        group.restart(2);
        group.settle_and_compare().unwrap_or_else(|wrong| panic!("seed {seed}: {wrong}"));
    }
    assert!((3..18).contains(&lost), "lost in {lost} of 20");
}

/// All files of a member.
fn tree_of(group: &Group, at: usize) -> crate::workload::replicas::PlainTree {
    group.run(plain_tree(&group.disks[at])).unwrap()
}

#[test]
fn a_primary_whose_disk_was_set_back_changes_nothing() {
    for backups_too in [false, true] {
        let mut group = Group::new(7, 1);
        let file = group.make("file");
        let fs = group.fs();
        group.run(fs.sync()).unwrap();
        let before = group.disks[PRIMARY].snapshot();
        group.run(async {
            write(&fs, file, 0, b"new".to_vec()).await.unwrap();
            fs.fsync(file.0, file.1, false).await.unwrap();
            fs.mkdir(me(), ROOT, b"new", 0o755).await.unwrap();
        });
        group.await_quiet().unwrap();
        let kept = tree_of(&group, 1);
        group.sim.crash_silently(group.hosts[PRIMARY]);
        group.members[PRIMARY] = None;
        group.disks[PRIMARY].rollback(&before);
        if backups_too {
            for at in [1, 2] {
                group.kill(at, InFlight::Lost);
                group.restart(at);
            }
        }
        group.restart(PRIMARY);
        let fs = group.fs();
        let refused = group.run(fs.mkdir(me(), ROOT, b"other", 0o755));
        assert_eq!(refused.map(drop), Err(Errno::EAGAIN));
        let problems = group.problems();
        assert_eq!(problems.len(), 2, "{problems:?}");
        let says_so = |problem: &String| problem.contains("set back");
        assert!(problems.iter().all(says_so), "{problems:?}");
        for at in [1, 2] {
            let wrong =
                differences(("before", &kept), ("now", &tree_of(&group, at)), Compared::default());
            assert_eq!(wrong, [""; 0], "member {at}, restarted: {backups_too}");
        }
    }
}

/// It lacks changes that nobody keeps for it any more.
#[test]
fn a_backup_whose_disk_was_set_back_is_told_so() {
    let mut group = Group::new(8, 1);
    let fs = group.fs();
    group.run(fs.sync()).unwrap();
    let before = group.disks[1].snapshot();
    group.run(fs.mkdir(me(), ROOT, b"new", 0o755)).unwrap();
    group.await_quiet().unwrap();
    group.sim.crash_silently(group.hosts[1]);
    group.members[1] = None;
    group.disks[1].rollback(&before);
    group.restart(1);
    group.run_ms(5000);
    let problems = group.problems();
    assert!(problems.len() == 1 && problems[0].contains("set back"), "{problems:?}");
    let refused = group.run(fs.mkdir(me(), ROOT, b"other", 0o755));
    assert_eq!(refused.map(drop), Err(Errno::EAGAIN));
}

// As in `messages`.
const HELLO: u16 = 0x0500;
const ITEM: u16 = 0x0502;

#[derive(Clone, Copy, Encode, Decode)]
struct Session {
    #[n(0)]
    epoch: u64,
    #[n(1)]
    primary_run: u64,
    #[n(2)]
    backup_run: u64,
}

#[derive(Decode)]
struct Stands {
    #[n(0)]
    run: u64,
    #[n(1)]
    epoch: u64,
    #[n(3)]
    applied: u64,
}

#[derive(Encode)]
enum What {
    #[n(1)]
    Write {
        #[n(0)]
        id: u64,
        #[n(1)]
        after: u64,
        #[n(2)]
        offset: u64,
    },
}

#[derive(Encode)]
struct Item {
    #[n(0)]
    session: Session,
    #[n(1)]
    number: u64,
    #[n(2)]
    answered: u64,
    #[n(3)]
    released: u64,
    #[n(4)]
    what: What,
}

impl Group {
    /// Calls a member from another one's node, or a stranger's.
    fn call(
        &self,
        from: HostId,
        to: Peer,
        method: u16,
        header: &[u8],
        parts: Vec<Bytes>,
    ) -> Result<Bytes, u16> {
        let request = Request { method, header: addressed(&POOL, header), parts };
        let call = self.sim.transport(from).call(to, request, Duration::from_secs(2));
        match self.run(call) {
            Ok(reply) => Ok(reply.header),
            Err(CallError::Refused(refusal)) => Err(refusal.code),
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn a_backup_answers_its_primary_alone_and_in_its_session() {
    const NO_SESSION: u16 = 100;
    const NOT_PRIMARY: u16 = 102;
    let mut group = Group::new(9, 1);
    let file = group.make("file");
    let fs = group.fs();
    group.run(write(&fs, file, 0, b"right".to_vec())).unwrap();
    let to = group.sim.peer(group.hosts[1]);
    let stranger = group.sim.add_host(HostConfig::default());
    for from in [stranger, group.hosts[2]] {
        for method in 0x0500..0x0510 {
            let refused = group.call(from, to, method, &[], Vec::new()).err();
            assert_eq!(refused, Some(NOT_PRIMARY), "{method:x}");
        }
    }
    let hello = group.call(group.hosts[PRIMARY], to, HELLO, &[], Vec::new()).unwrap();
    let stands: Stands = minicbor::decode(&hello).unwrap();
    let session = Session { epoch: stands.epoch, primary_run: 1, backup_run: stands.run };
    let earlier = Session { epoch: stands.epoch - 1, ..session };
    for session in [session, earlier] {
        let what = What::Write { id: file.0.0, after: stands.applied, offset: 0 };
        let (number, answered, released) = (1000, 0, stands.applied);
        let item = Item { session, number, answered, released, what };
        let item = minicbor::to_vec(item).unwrap();
        let wrong = vec![Bytes::from_static(b"WRONG")];
        let from = group.hosts[PRIMARY];
        assert_eq!(group.call(from, to, ITEM, &item, wrong).err(), Some(NO_SESSION));
    }
    group.settle_and_compare().unwrap();
    // The same session after the backup was restarted.
    group.kill(1, InFlight::Lost);
    group.restart(1);
    group.settle_and_compare().unwrap();
}

/// It is answered when the backup returns, or within 30 seconds; and then it may have happened, once.
#[test]
fn a_change_under_way_waits_for_a_backup_that_is_down() {
    for (away_secs, expected) in [(8, Ok(())), (50, Err(Errno::EIO))] {
        let mut group = Group::new(away_secs, 1);
        group.set_latency(1, 100);
        let fs = group.fs();
        let made = group.begin(async move { fs.mkdir(me(), ROOT, b"new", 0o755).await.map(drop) });
        group.run_ms(10);
        group.kill(1, InFlight::Lost);
        group.run_ms(1000 * away_secs.min(31));
        if away_secs > 30 {
            assert_eq!(made.answer(), Some(Err(Errno::EIO)), "within 30 seconds");
            group.run_ms(1000 * (away_secs - 31));
        }
        group.restart(1);
        group.set_latency(1, 0);
        group.run_ms(5000);
        if expected.is_ok() {
            assert_eq!(made.answer(), Some(expected));
        }
        let names: BTreeMap<String, _> = tree_of(&group, PRIMARY);
        let new = names.keys().filter(|name| name.ends_with("/new")).count();
        assert_eq!(new, 1, "it was decided when the backup went down");
        let fs = group.fs();
        let again = group.run(fs.mkdir(me(), ROOT, b"new", 0o755));
        assert_eq!(again.map(drop), Err(Errno::EEXIST));
        group.settle_and_compare().unwrap();
    }
}

/// Without one of them nothing is begun.
#[test]
fn a_change_is_refused_while_a_backup_is_away() {
    let mut group = Group::new(11, 1);
    group.kill(2, InFlight::Lost);
    group.run_ms(4000);
    assert_eq!(group.problems().len(), 1);
    let fs = group.fs();
    let refused = group.run(fs.mkdir(me(), ROOT, b"new", 0o755));
    assert_eq!(refused.map(drop), Err(Errno::EAGAIN));
    assert!(!group.has("new"), "reads go on");
    group.restart(2);
    group.settle_and_compare().unwrap();
    assert!(!group.has("new"));
}

/// A write that begins when a sync clears its mark is marked again, or keeps it.
#[test]
fn a_write_beside_a_sync_is_not_taken_for_synced() {
    for seed in 0..40 {
        let mut group = Group::new(seed, 1);
        let file = group.make("file");
        let fs = group.fs();
        group.run(write(&fs, file, 0, vec![1; 1000])).unwrap();
        group.set_latency(PRIMARY, 8);
        let (syncing, writing) = (fs.clone(), fs);
        let synced = group.begin(async move { syncing.fsync(file.0, file.1, false).await });
        group.run_ms(1 + seed);
        let written = group.begin(async move { write(&writing, file, 100, vec![2; 1000]).await });
        group.run_ms(1000);
        assert_eq!((synced.answer(), written.answer()), (Some(Ok(())), Some(Ok(1000))));
        group.lose_power(1, Loss::Ordered, seed);
        group.restart(1);
        group.await_quiet().unwrap();
        group.compare(Compared::default()).unwrap_or_else(|wrong| panic!("seed {seed}: {wrong}"));
    }
}
