//! One fault at the moment that matters.

use std::sync::Mutex;

use atoll_net::{CallError, Peer, Refusal, Request, Service};
use atoll_pool::addressed;
use atoll_pool::disk::Disk;
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

    fn run_ms(&mut self, millis: u64) {
        self.run_for(Duration::from_millis(millis));
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
        let primary = self.primary().expect("there is a primary");
        let members = self.status(primary).members;
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
    let mut group = Group::new(1, 1);
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
        let [p, b, c] = group.roles();
        let fs = group.fs();
        group.disks[p].fail_next(DiskCall::Make, Errno::ENOSPC);
        group.set_latency(b, 50);
        let made = group.begin(async move {
            match call {
                0 => fs.mkdir(me(), ROOT, b"new", 0o755).await.map(drop),
                _ => fs.mknod(me(), ROOT, b"new", FileKind::Regular, 0o644, 0).await.map(drop),
            }
        });
        group.run_ms(millis);
        group.kill(b, InFlight::Lost);
        group.run_ms(1000);
        group.restart(b);
        group.run_ms(5000);
        assert_eq!(made.answer(), Some(Err(Errno::ENOSPC)));
        assert!(!group.has("new"));
        group.make("new");
        group.kill(c, InFlight::Lost);
        group.restart(c);
        group.settle_and_compare().unwrap();
    }
}

/// The primary's disk refuses a change when a later one is made: backups that made all up to the later one would have the refused one.
#[test]
fn a_change_is_released_when_all_before_it_are_made_or_withdrawn() {
    let mut overtaken = 0;
    for seed in 0..10 {
        let mut group = Group::new(seed, 1);
        // Longer than any file that is removed may be open.
        group.run_ms(11_000);
        let [p, ..] = group.roles();
        let fs = group.fs();
        let dir = group.run(fs.mkdir(me(), ROOT, b"dir", 0o755)).unwrap().attr.inode;
        let old = group.make("old");
        group.run(fs.close(old.0, old.1)).unwrap();
        group.disks[p].set_latency(seed, Duration::from_millis(300));
        group.disks[p].fail_next(DiskCall::Make, Errno::ENOSPC);
        let making = fs.clone();
        let made =
            group.begin(async move { making.mkdir(me(), dir, b"new", 0o755).await.map(drop) });
        let removed = group.begin(async move { fs.unlink(me(), ROOT, b"old").await });
        let mut answers = (None, None);
        for _ in 0..100 {
            group.run_ms(100);
            let is_first = answers == (None, None);
            answers = (answers.0.or(made.answer()), answers.1.or(removed.answer()));
            overtaken += u32::from(is_first && answers == (None, Some(Ok(()))));
        }
        assert_eq!(answers, (Some(Err(Errno::ENOSPC)), Some(Ok(()))));
        group.set_latency(p, 0);
        group.settle_and_compare().unwrap_or_else(|wrong| panic!("seed {seed}: {wrong}"));
    }
    assert!(overtaken > 0, "some change was made before the one that was refused");
}

/// The primary withdraws a change which a backup has, and dies before the backup hears of it.
#[test]
fn a_change_that_was_withdrawn_behind_a_backups_back_is_made_nowhere() {
    let mut has_missed = 0;
    for millis in 2..10 {
        let mut group = Group::new(millis, 1);
        let [p, b, _] = group.roles();
        group.make("old");
        let fs = group.fs();
        group.disks[p].fail_next(DiskCall::Make, Errno::ENOSPC);
        let made = group.begin(async move { fs.mkdir(me(), ROOT, b"new", 0o755).await.map(drop) });
        group.run_ms(millis);
        group.sim.cut(&[group.hosts[p]], &[group.hosts[b]]);
        group.run_ms(200);
        let answer = made.answer();
        has_missed += usize::from(answer.is_none());
        group.kill(p, InFlight::Lost);
        group.sim.heal();
        group.restart(p);
        group.run_ms(5000);
        // It was not withdrawn yet if nobody was told.
        assert!(answer.is_none() || !group.has("new"));
        group.settle_and_compare().unwrap_or_else(|wrong| panic!("cut after {millis} ms: {wrong}"));
    }
    assert!(has_missed > 0, "some backup lacked the withdrawal");
}

#[test]
fn a_file_that_is_removed_while_it_is_written_is_gone_everywhere() {
    let mut group = Group::new(2, 1);
    let [_, b, _] = group.roles();
    let file = group.make("file");
    group.sim.freeze(group.hosts[b]);
    let fs = group.fs();
    let written = group.begin(async move { write(&fs, file, 0, vec![1; 3 << 20]).await });
    group.run_ms(10);
    let fs = group.fs();
    let removed = group.begin(async move { fs.unlink(me(), ROOT, b"file").await });
    group.run_ms(100);
    let fs = group.fs();
    let also = group.begin(async move { write(&fs, file, 0, vec![2; 3 << 20]).await });
    group.run_ms(1000);
    group.sim.thaw(group.hosts[b]);
    group.run_ms(10_000);
    assert_eq!(written.answer(), Some(Ok(3 << 20)));
    assert_eq!(removed.answer(), Some(Ok(())));
    assert_eq!(also.answer(), Some(Ok(3 << 20)), "to a file without a name");
    group.settle_and_compare().unwrap();
}

/// The sync comes to a backup after the file is gone there.
#[test]
fn a_file_that_is_removed_while_it_is_synced_stops_nobody() {
    let mut group = Group::new(3, 1);
    let [p, b, _] = group.roles();
    let file = group.make("file");
    let fs = group.fs();
    group.run(write(&fs, file, 0, vec![1; 100])).unwrap();
    group.run_ms(1000);
    // The call of the sync is lost, and made again later.
    group.sim.cut(&[group.hosts[p]], &[group.hosts[b]]);
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
        let [_, b, _] = group.roles();
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
            group.kill(b, InFlight::Lost);
            group.restart(b);
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
        let [_, b, _] = group.roles();
        let file = group.make("file");
        let fs = group.fs();
        group.set_latency(b, 20);
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
            0 => group.kill(b, InFlight::Lost),
            _ => group.lose_power(b, Loss::Ordered, seed),
        }
        group.restart(b);
        group.run_ms(10_000);
        assert!(work.answer().is_some());
        group.settle_and_compare().unwrap();
    }
}

#[test]
fn a_backup_without_room_is_an_error_of_the_call_and_of_nothing_else() {
    let mut group = Group::new(5, 1);
    let [_, _, c] = group.roles();
    // The journal, and what is kept for the index.
    let used = (16 << 20) + (32 << 20);
    group.disks[c].set_capacity(used + (32 << 20), 500);
    // Longer than any file that is removed may be open.
    group.run_ms(11_000);
    let fs = group.fs();
    // The primary has room.
    let filled = group.run(async {
        let flags = OpenFlags::READ_WRITE;
        for number in 0..100 {
            let name = format!("large-{number}");
            let made = fs.create(me(), ROOT, name.as_bytes(), 0o644, flags).await?;
            let file = (made.0.attr.inode, made.1.handle);
            let written = write(&fs, file, 0, vec![1; 1 << 20]).await;
            fs.close(file.0, file.1).await.unwrap();
            written?;
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
        let [_, b, _] = group.roles();
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
        group.lose_power(b, Loss::Ordered, seed);
        group.restart(b);
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
        let [_, b, _] = group.roles();
        let file = group.make("file");
        let fs = group.fs();
        group.run(async {
            for mib in 0..6 {
                write(&fs, file, mib * MIB, vec![7; MIB as usize]).await.unwrap();
            }
        });
        group.lose_power(b, Loss::Ordered, seed);
        group.restart(b);
        let fs = group.fs();
        let synced = group.begin(async move { fs.fsync(file.0, file.1, false).await });
        group.set_latency(b, 20);
        group.run_ms(50 + seed * 20);
        group.lose_power(b, Loss::Ordered, seed);
        group.restart(b);
        group.run_ms(60 + seed * 10);
        group.lose_power(b, Loss::Ordered, seed);
        group.restart(b);
        group.run_ms(25_000);
        assert_eq!(synced.answer(), Some(Ok(())), "seed {seed}");
        group.await_quiet().unwrap();
        group.lose_power(b, Loss::Ordered, seed);
        group.restart(b);
        group.settle_and_compare().unwrap_or_else(|wrong| panic!("seed {seed}: {wrong}"));
    }
}

/// Changes that backups alone have are cut off, and others get their places.
#[test]
fn what_a_primary_has_lost_before_it_was_answered_is_lost_everywhere() {
    let mut lost = 0;
    for seed in 0..20 {
        let mut group = Group::new(seed, 1);
        let [p, b, c] = group.roles();
        group.set_latency(p, 15);
        let fs = group.fs();
        let made = group.begin(async move { fs.mkdir(me(), ROOT, b"new", 0o755).await.map(drop) });
        group.run_ms(5 + seed * 2);
        group.lose_power(p, Loss::Ordered, seed);
        if seed % 3 == 0 {
            group.kill(b, InFlight::Lost);
            group.restart(b);
        }
        group.run_ms(1000);
        group.restart(p);
        let is_there = group.has("new");
        assert!(is_there || made.answer() != Some(Ok(())), "it was answered");
        lost += u32::from(!is_there);
        let fs = group.fs();
        group.run(fs.mkdir(me(), ROOT, b"other", 0o700)).unwrap();
        group.settle_and_compare().unwrap_or_else(|wrong| panic!("seed {seed}: {wrong}"));
        group.kill(c, InFlight::Lost);
        group.restart(c);
        group.settle_and_compare().unwrap_or_else(|wrong| panic!("seed {seed}: {wrong}"));
    }
    assert!((3..18).contains(&lost), "lost in {lost} of 20");
}

/// All files of a member.
fn tree_of(group: &Group, at: usize) -> crate::workload::replicas::PlainTree {
    group.run(plain_tree(&group.disks[at])).unwrap()
}

/// Whoever was set back gets what it lacks from one that was not, also when all were restarted.
#[test]
fn a_member_whose_disk_was_set_back_is_brought_up_to_date() {
    for (seed, (is_primary, restarts_all)) in
        [(true, false), (true, true), (false, false), (false, true)].into_iter().enumerate()
    {
        let mut group = Group::new(seed as u64, 1);
        let [p, b, c] = group.roles();
        let (set_back, others) = if is_primary { (p, [b, c]) } else { (b, [p, c]) };
        let file = group.make("file");
        let fs = group.fs();
        group.run(fs.sync()).unwrap();
        let before = group.disks[set_back].snapshot();
        group.run(async {
            write(&fs, file, 0, b"new".to_vec()).await.unwrap();
            fs.fsync(file.0, file.1, false).await.unwrap();
            fs.mkdir(me(), ROOT, b"new", 0o755).await.unwrap();
        });
        group.await_quiet().unwrap();
        let kept = tree_of(&group, c);
        drop(fs);
        group.sim.crash_silently(group.hosts[set_back]);
        group.members()[set_back] = None;
        group.disks[set_back].rollback(&before);
        if restarts_all {
            for at in others {
                group.kill(at, InFlight::Lost);
            }
        }
        // It is the first that could be the primary.
        group.restart(set_back);
        if restarts_all {
            group.run_ms(500);
            for at in others {
                group.restart(at);
            }
        }
        group.settle_and_compare().unwrap();
        let names = ("before", &kept);
        let wrong = differences(names, ("now", &tree_of(&group, set_back)), Compared::default());
        assert_eq!(wrong, [""; 0], "the primary: {is_primary}, all restarted: {restarts_all}");
    }
}

/// It lacks changes that nobody keeps any more. What it had is not lost.
#[test]
fn a_member_that_was_away_for_too_long_is_given_all_files_and_waited_for_by_nobody() {
    let mut group = Group::new(8, 1);
    let [_, b, c] = group.roles();
    let fs = group.fs();
    group.make("early");
    group.run(fs.sync()).unwrap();
    let before = group.disks[b].snapshot();
    group.run(async {
        for number in 0..1100 {
            fs.mkdir(me(), ROOT, format!("dir-{number}").as_bytes(), 0o755).await.unwrap();
        }
    });
    drop(fs);
    group.await_quiet().unwrap();
    group.sim.crash_silently(group.hosts[b]);
    group.members()[b] = None;
    group.disks[b].rollback(&before);
    group.restart(b);
    group.run_ms(1000);
    group.make("file");
    group.settle_and_compare().unwrap();
    let disk = &group.disks[b];
    let old = group.run(async {
        let mut dir = disk.top();
        for name in [".atoll", "old", "slots-0", "000", "0000000000000001"] {
            dir = disk.node(&dir, name.as_bytes()).await.unwrap();
        }
        disk.list(&dir).await.unwrap()
    });
    assert_eq!(old.len(), 1, "{old:?}");
    assert_eq!(old[0].name, "early");
    group.kill(c, InFlight::Lost);
    group.make("another");
}

// As in `messages`.
const HELLO: u16 = 0x0500;
const ITEM: u16 = 0x0502;

#[derive(Clone, Copy, Encode, Decode)]
struct Session {
    #[n(0)]
    number: u64,
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
    session: u64,
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
struct ItemAsBytes {
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
    #[n(5)]
    settled: u64,
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
fn a_member_answers_founding_members_alone_and_in_its_session() {
    const NO_SESSION: u16 = 100;
    const NOT_A_MEMBER: u16 = 104;
    let mut group = Group::new(9, 1);
    let [p, b, c] = group.roles();
    let file = group.make("file");
    let fs = group.fs();
    group.run(write(&fs, file, 0, b"right".to_vec())).unwrap();
    let to = group.sim.peer(group.hosts[b]);
    let stranger = group.sim.add_host(HostConfig::default());
    for method in (0x0500..0x0510).chain(0x0540..0x0550) {
        let refused = group.call(stranger, to, method, &[], Vec::new()).err();
        assert_eq!(refused, Some(NOT_A_MEMBER), "{method:x}");
    }
    let hello = group.call(group.hosts[c], to, HELLO, &[], Vec::new()).unwrap();
    let stands: Stands = minicbor::decode(&hello).unwrap();
    let session = Session { number: stands.session, primary_run: 1, backup_run: stands.run };
    let earlier = Session { number: stands.session - 1, ..session };
    for (session, from) in [(session, p), (earlier, p), (session, c)] {
        let what = What::Write { id: file.0.0, after: stands.applied, offset: 0 };
        let (number, answered, released) = (1000, 0, stands.applied);
        let item = ItemAsBytes { session, number, answered, released, what, settled: 0 };
        let item = minicbor::to_vec(item).unwrap();
        let wrong = vec![Bytes::from_static(b"WRONG")];
        let from = group.hosts[from];
        assert_eq!(group.call(from, to, ITEM, &item, wrong).err(), Some(NO_SESSION));
    }
    group.settle_and_compare().unwrap();
}

/// Answers a member's calls, and keeps the items that came.
struct Recorder {
    inner: Arc<dyn Service>,
    items: Mutex<Vec<(Peer, Request)>>,
}

impl Service for Recorder {
    fn handle(&self, from: Peer, request: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        if request.method == ITEM {
            self.items.lock().unwrap().push((from, request.clone()));
        }
        self.inner.handle(from, request)
    }
}

/// The network may deliver a call late: after the answer to its retry, and after later items.
#[test]
fn an_item_that_comes_once_more_is_not_done_again() {
    let mut group = Group::new(12, 1);
    let [_, b, _] = group.roles();
    let member = group.members()[b].clone().unwrap();
    let pools = PoolRouter::default();
    pools.add(POOL, member.service());
    let inner: Arc<dyn Service> = Arc::new(Router::new().route(FAMILY, Arc::new(pools)));
    let recorder = Arc::new(Recorder { inner, items: Mutex::default() });
    group.sim.transport(group.hosts[b]).serve(recorder.clone());
    let file = group.make("file");
    let fs = group.fs();
    group.run(write(&fs, file, 0, b"first".to_vec())).unwrap();
    let before = std::mem::take(&mut *recorder.items.lock().unwrap());
    assert!(before.len() > 1, "changes and bytes: {}", before.len());
    group.run(write(&fs, file, 0, b"later".to_vec())).unwrap();
    for (from, request) in before {
        let again = group.run(recorder.inner.handle(from, request));
        assert_eq!(again.map(drop).map_err(|refusal| refusal.code), Err(Refusal::MALFORMED));
    }
    group.await_quiet().unwrap();
    group.compare(Compared::default()).unwrap();
}

/// Who was the primary once begins no session by its old map.
#[test]
fn a_primary_of_an_older_map_is_refused() {
    const NOT_PRIMARY: u16 = 102;
    let mut group = Group::new(10, 1);
    let [p, b, _] = group.roles();
    let epoch = group.status(p).epoch;
    group.kill(p, InFlight::Lost);
    group.run_ms(2000);
    group.restart(p);
    group.await_quiet().unwrap();
    assert!(group.status(b).epoch > epoch);
    let b = (0..3).find(|at| Some(*at) != group.primary() && *at != p).unwrap();
    let peers = MEMBERS.iter().map(|at| group.sim.peer(group.hosts[*at])).collect();
    let first = PoolMap::first(&PoolMembers::new(peers).unwrap());
    let map = PoolMap { epoch, primary: group.sim.peer(group.hosts[p]).id, ..first };
    let to = group.sim.peer(group.hosts[b]);
    let hello = group.call(group.hosts[p], to, HELLO, &[], Vec::new()).unwrap();
    let stands: Stands = minicbor::decode(&hello).unwrap();
    let session = Session { number: stands.session + 1, primary_run: 1, backup_run: stands.run };
    let mut begin = Vec::new();
    let mut encoder = minicbor::Encoder::new(&mut begin);
    encoder.array(5).unwrap().encode(session).unwrap().u64(0).unwrap().u64(0).unwrap();
    encoder.array(0).unwrap().encode(map).unwrap();
    let refused = group.call(group.hosts[p], to, 0x0501, &begin, Vec::new()).err();
    assert_eq!(refused, Some(NOT_PRIMARY));
    group.settle_and_compare().unwrap();
}

/// A write that begins when a sync clears its mark is marked again, or keeps it.
#[test]
fn a_write_beside_a_sync_is_not_taken_for_synced() {
    for seed in 0..40 {
        let mut group = Group::new(seed, 1);
        let [p, b, _] = group.roles();
        let file = group.make("file");
        let fs = group.fs();
        group.run(write(&fs, file, 0, vec![1; 1000])).unwrap();
        group.set_latency(p, 8);
        let (syncing, writing) = (fs.clone(), fs);
        let synced = group.begin(async move { syncing.fsync(file.0, file.1, false).await });
        group.run_ms(1 + seed);
        let written = group.begin(async move { write(&writing, file, 100, vec![2; 1000]).await });
        group.run_ms(1000);
        assert_eq!((synced.answer(), written.answer()), (Some(Ok(())), Some(Ok(1000))));
        group.lose_power(b, Loss::Ordered, seed);
        group.restart(b);
        group.await_quiet().unwrap();
        group.compare(Compared::default()).unwrap_or_else(|wrong| panic!("seed {seed}: {wrong}"));
    }
}
