//! Reads that members answer from their own copies (`docs/design/pool.md`, *Reads from replicas*).

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use atoll_sim::Loss as MessageLoss;
use atoll_vfs::{Errno, Handle, InodeNumber, OpenFlags, SetAttr, Writer};
use bytes::Bytes;
use futures_util::future::join_all;

use super::*;
use crate::workload::{Dice, NETWORK_FAULTS, ROOT, disturb_network, for_each_seed, me};

/// Longer than members take to know that all have something.
const SETTLED: Duration = Duration::from_millis(500);

/// A call between members that was lost is made again by then.
const CALLED_AGAIN: Duration = Duration::from_secs(5);

type Open = (InodeNumber, Handle);

async fn write(fs: &dyn FileSystem, file: Open, offset: u64, text: &str) -> Result<u32, Errno> {
    fs.write(Writer::At(me()), file.0, file.1, offset, Bytes::from(text.to_owned())).await
}

async fn read(fs: &dyn FileSystem, file: Open) -> Result<String, Errno> {
    let bytes = fs.read(file.0, file.1, 0, 4096).await?;
    Ok(String::from_utf8(bytes.to_vec()).expect("tests write text"))
}

async fn open(fs: &dyn FileSystem, inode: InodeNumber) -> Open {
    let opened = fs.open(me(), inode, OpenFlags::READ_WRITE).await.unwrap();
    (inode, opened.handle)
}

/// A file that a mount of each member has open.
struct Shared {
    group: Group,
    mounts: Vec<Arc<RemoteFs>>,
    opens: Vec<Open>,
}

impl Shared {
    /// It holds `old`, which all members are known to have.
    fn new(seed: u64) -> Shared {
        Shared::of(MEMBERS.len(), seed)
    }

    /// Of a group of so many members.
    fn of(members: usize, seed: u64) -> Shared {
        let mut group = Group::of(members, seed, 1);
        let mounts: Vec<_> = (0..members).map(|at| group.mount(at)).collect();
        let opens = group.sim.block_on(LONG, async {
            let flags = OpenFlags::READ_WRITE;
            let made = mounts[0].create(me(), ROOT, b"file", 0o644, flags).await.unwrap();
            let inode = made.0.attr.inode;
            let opens = join_all(mounts.iter().map(|fs| open(&**fs, inode))).await;
            write(&*mounts[0], opens[0], 0, "old").await.unwrap();
            opens
        });
        let opens = opens.unwrap();
        group.run_for(SETTLED);
        Shared { group, mounts, opens }
    }

    /// How many reads a member has answered as a backup.
    fn answered(&self, at: usize) -> u64 {
        self.group.members()[at].as_ref().map_or(0, |member| member.reads_answered())
    }

    fn run<T>(&self, work: impl Future<Output = T>) -> T {
        self.group.sim.block_on(LONG, work).unwrap()
    }

    /// Begins something that goes on beside the test.
    fn begin<T: Send + 'static>(&self, work: impl Future<Output = T> + Send + 'static) -> Late<T> {
        let done: Late<T> = Late::default();
        let to = done.clone();
        self.group.sim.env(self.group.clients).spawn(Box::pin(async move {
            let answer = work.await;
            *to.0.lock().unwrap() = Some(answer);
        }));
        done
    }

    fn read_at(&self, at: usize) -> String {
        let (fs, file) = (&self.mounts[at], self.opens[at]);
        self.run(read(&**fs, file)).unwrap()
    }

    fn begin_read_at(&self, at: usize) -> Late<String> {
        let (fs, file) = (self.mounts[at].clone(), self.opens[at]);
        self.begin(async move { read(&*fs, file).await.unwrap() })
    }

    fn begin_write_at(&self, at: usize, text: &'static str) -> Late<Result<u32, Errno>> {
        let (fs, file) = (self.mounts[at].clone(), self.opens[at]);
        self.begin(async move { write(&*fs, file, 0, text).await })
    }
}

/// The answer of something that goes on beside the test.
struct Late<T>(Arc<Mutex<Option<T>>>);

impl<T> Default for Late<T> {
    fn default() -> Late<T> {
        Late(Arc::default())
    }
}

impl<T> Clone for Late<T> {
    fn clone(&self) -> Late<T> {
        Late(self.0.clone())
    }
}

impl<T: Clone> Late<T> {
    fn answer(&self) -> Option<T> {
        self.0.lock().unwrap().clone()
    }
}

#[test]
fn a_member_answers_reads_of_its_machine_from_its_own_copy() {
    let shared = Shared::new(1);
    let [primary, backup, other] = shared.group.roles();
    for at in [primary, backup, other] {
        assert_eq!(shared.read_at(at), "old");
    }
    assert_eq!([primary, backup, other].map(|at| shared.answered(at)), [0, 1, 1]);
    // And with the primary out of its reach, until its lease ends.
    shared.group.sim.partition(&[&[shared.group.hosts[backup], shared.group.clients]]);
    assert_eq!(shared.read_at(backup), "old");
    assert_eq!(shared.answered(backup), 2);
}

#[test]
fn a_mount_that_is_told_so_reads_at_the_primary() {
    let shared = Shared::new(1);
    let [_, backup, _] = shared.group.roles();
    shared.mounts[backup].read_at_server(true);
    assert_eq!(shared.read_at(backup), "old");
    assert_eq!(shared.answered(backup), 0);
}

#[test]
fn who_has_written_reads_what_was_written_and_soon_reads_it_here() {
    let mut shared = Shared::new(2);
    let [_, backup, _] = shared.group.roles();
    shared.run(write(&*shared.mounts[backup], shared.opens[backup], 0, "new")).unwrap();
    assert_eq!(shared.read_at(backup), "new");
    shared.group.run_for(SETTLED);
    let before = shared.answered(backup);
    assert_eq!(shared.read_at(backup), "new");
    assert_eq!(shared.answered(backup), before + 1);
}

/// A file that is open for writing alone is not read here: the primary refuses it.
#[test]
fn what_is_open_for_writing_alone_is_not_read() {
    let shared = Shared::new(1);
    let [_, backup, _] = shared.group.roles();
    let (fs, inode) = (&shared.mounts[backup], shared.opens[0].0);
    let handle = shared.run(fs.open(me(), inode, OpenFlags::WRITE)).unwrap().handle;
    assert_eq!(shared.run(fs.read(inode, handle, 0, 10)), Err(Errno::EBADF));
    assert_eq!(shared.answered(backup), 0);
}

/// "As long as the lease lasts no other primary answers, and the primary makes no change without this member": one that is cut off stops answering
/// before others go on without it.
#[test]
fn a_member_that_is_cut_off_answers_nothing_that_is_old() {
    for_each_seed(10, |seed| {
        let shared = Shared::new(seed);
        let [primary, backup, other] = shared.group.roles();
        let hosts = &shared.group.hosts;
        shared.group.sim.run_for(Duration::from_millis(seed * 7));
        shared.group.sim.cut(&[hosts[backup]], &[hosts[primary], hosts[other]]);
        shared.group.sim.cut(&[hosts[primary], hosts[other]], &[hosts[backup]]);
        let written = shared.begin_write_at(other, "new");
        let mut last = shared.begin_read_at(backup);
        for _ in 0..600 {
            shared.group.sim.run_for(Duration::from_millis(1));
            let is_written = written.answer().is_some();
            if let Some(text) = last.answer() {
                assert_eq!(text, "old");
                last = shared.begin_read_at(backup);
            }
            if is_written {
                break;
            }
        }
        assert_eq!(written.answer(), Some(Ok(3)), "the others go on");
        assert!(shared.answered(backup) > 10);
        // Those that began before may still be answered.
        shared.group.sim.run_for(Duration::from_millis(20));
        let after = shared.begin_read_at(backup);
        shared.group.sim.run_for(Duration::from_secs(2));
        assert_eq!(after.answer(), None, "seed {seed}: nobody can tell it");
        shared.group.sim.heal();
        shared.group.sim.run_for(Duration::from_secs(5));
        assert_eq!(after.answer().as_deref(), Some("new"), "seed {seed}");
        Ok(())
    });
}

/// A primary that most have left gives no leases, though a member still hears it.
#[test]
fn a_member_that_hears_a_primary_whom_others_have_left_answers_nothing_that_is_old() {
    for_each_seed(6, |seed| {
        let shared = Shared::of(5, seed);
        let primary = shared.group.primary().expect("there is one");
        let [backup, other] = [1, 2].map(|next| (primary + next) % 5);
        let hosts = &shared.group.hosts;
        shared.group.sim.run_for(Duration::from_millis(seed * 7));
        let rest: Vec<_> = (2..5).map(|next| hosts[(primary + next) % 5]).collect();
        for left in [hosts[primary], hosts[backup]] {
            shared.group.sim.cut(&[left], &rest);
            shared.group.sim.cut(&rest, &[left]);
        }
        let written = shared.begin_write_at(other, "new");
        let mut last = shared.begin_read_at(backup);
        for _ in 0..5_000 {
            shared.group.sim.run_for(Duration::from_millis(1));
            if written.answer().is_some() {
                break;
            }
            if last.answer().is_some() {
                last = shared.begin_read_at(backup);
            }
        }
        assert_eq!(written.answer(), Some(Ok(3)), "the others go on");
        let after = shared.begin_read_at(backup);
        shared.group.sim.run_for(Duration::from_secs(2));
        assert_eq!(after.answer(), None, "seed {seed}: nobody can tell it");
        shared.group.sim.heal();
        shared.group.sim.run_for(CALLED_AGAIN);
        assert_eq!(after.answer().as_deref(), Some("new"), "seed {seed}");
        Ok(())
    });
}

/// A process that stood still has a session, and a lease as of then.
#[test]
fn a_member_that_stood_still_answers_nothing_that_is_old() {
    for_each_seed(10, |seed| {
        let shared = Shared::new(seed);
        let [_, backup, other] = shared.group.roles();
        shared.group.disks[backup].set_latency(seed, Duration::from_millis(30));
        // One is at the disk, the other one comes later.
        let during = shared.begin_read_at(backup);
        shared.group.sim.run_for(Duration::from_millis(4 + 6 * seed));
        shared.group.sim.freeze(shared.group.hosts[backup]);
        let written = shared.begin_write_at(other, "new");
        shared.group.sim.run_for(Duration::from_secs(1));
        assert_eq!(written.answer(), Some(Ok(3)));
        let answered = during.answer().is_some();
        let after = shared.begin_read_at(backup);
        shared.group.sim.run_for(Duration::from_millis(50));
        shared.group.sim.thaw(shared.group.hosts[backup]);
        shared.group.sim.run_for(Duration::from_secs(5));
        assert_eq!(after.answer().as_deref(), Some("new"), "seed {seed}");
        if !answered {
            assert_eq!(during.answer().as_deref(), Some("new"), "seed {seed}: its lease is over");
        }
        Ok(())
    });
}

/// A primary looks at the others' promises when a call is done, for it may have stood still in the middle of it.
#[test]
fn a_primary_that_stood_still_during_a_call_answers_nothing_that_is_old() {
    let during_call = AtomicU64::new(0);
    for_each_seed(10, |seed| {
        let shared = Shared::new(seed);
        let [primary, _, other] = shared.group.roles();
        shared.group.disks[primary].set_latency(seed, Duration::from_millis(30));
        let during = shared.begin_read_at(primary);
        shared.group.sim.run_for(Duration::from_millis(1 + 2 * seed));
        shared.group.sim.freeze(shared.group.hosts[primary]);
        let written = shared.begin_write_at(other, "new");
        // For so short that the client still waits for the first attempt's answer.
        for _ in 0..1_000 {
            if written.answer().is_none() {
                shared.group.sim.run_for(Duration::from_millis(1));
            }
        }
        assert_eq!(written.answer(), Some(Ok(3)), "the others go on");
        let answered = during.answer().is_some();
        shared.group.sim.thaw(shared.group.hosts[primary]);
        shared.group.sim.run_for(CALLED_AGAIN);
        if !answered {
            during_call.fetch_add(1, Ordering::SeqCst);
            assert_eq!(during.answer().as_deref(), Some("new"), "seed {seed}");
        }
        Ok(())
    });
    assert!(during_call.into_inner() > 0, "some primary stood still during the call");
}

/// A primary that is cut off answers reads of its own machine as long as the others have promised to follow nobody else.
#[test]
fn a_primary_that_is_cut_off_answers_nothing_that_is_old() {
    for_each_seed(20, |seed| {
        let shared = Shared::new(seed);
        let [primary, _, other] = shared.group.roles();
        shared.group.sim.run_for(Duration::from_millis(seed * 7));
        shared.group.sim.partition(&[&[shared.group.hosts[primary]]]);
        let written = shared.begin_write_at(other, "new");
        let mut last = shared.begin_read_at(primary);
        let (mut began_after, mut answered) = (false, 0);
        for _ in 0..1_000 {
            shared.group.sim.run_for(Duration::from_millis(1));
            if let Some(text) = last.answer() {
                assert!(!began_after || text == "new", "seed {seed}: {text}");
                answered += 1;
                began_after = written.answer().is_some();
                last = shared.begin_read_at(primary);
            }
        }
        assert_eq!(written.answer(), Some(Ok(3)), "the others go on");
        assert!(answered > 50, "seed {seed}: it has answered {answered}");
        Ok(())
    });
}

/// A write that one member has not got is seen nowhere: neither at a member that has it nor at the primary.
#[test]
fn a_write_that_a_member_lacks_is_not_seen_elsewhere() {
    for first_is_primary in [false, true] {
        let shared = Shared::new(3);
        let [primary, backup, other] = shared.group.roles();
        let hosts = &shared.group.hosts;
        shared.group.sim.cut(&[hosts[primary]], &[hosts[other]]);
        let written = shared.begin_write_at(primary, "new");
        shared.group.sim.run_for(Duration::from_millis(30));
        let first = shared.begin_read_at(if first_is_primary { primary } else { backup });
        shared.group.sim.run_for(Duration::from_millis(30));
        assert_eq!(written.answer(), None, "one member lacks it");
        assert_eq!(first.answer(), None, "it waits for the write");
        assert_eq!(shared.read_at(other), "old");
        assert_eq!(shared.answered(other), 1);
        shared.group.sim.heal();
        shared.group.sim.run_for(CALLED_AGAIN);
        assert_eq!((written.answer(), first.answer()), (Some(Ok(3)), Some("new".to_owned())));
    }
}

/// What comes while a read is at the disk is no part of it.
#[test]
fn a_write_that_comes_during_a_read_is_not_seen_before_all_have_it() {
    for_each_seed(10, |seed| {
        let shared = Shared::new(seed);
        let [primary, backup, other] = shared.group.roles();
        let hosts = &shared.group.hosts;
        shared.group.disks[backup].set_latency(seed, Duration::from_millis(40));
        shared.group.sim.cut(&[hosts[primary]], &[hosts[other]]);
        let first = shared.begin_read_at(backup);
        shared.group.sim.run_for(Duration::from_millis(30));
        // The write overtakes a read that is at the disk by then.
        shared.group.disks[backup].set_latency(seed, Duration::ZERO);
        let _written = shared.begin_write_at(primary, "new");
        for _ in 0..150 {
            shared.group.sim.run_for(Duration::from_millis(1));
            if first.answer().is_some() {
                break;
            }
        }
        let text = first.answer();
        if text.as_deref() == Some("new") && shared.read_at(other) == "old" {
            return Err("a read at another member finds less".to_owned());
        }
        Ok(())
    });
}

/// So is its length.
#[test]
fn the_length_of_a_file_is_told_when_all_members_have_it() {
    let shared = Shared::new(3);
    let [primary, _, other] = shared.group.roles();
    let hosts = &shared.group.hosts;
    let (fs, file) = (shared.mounts[primary].clone(), shared.opens[primary]);
    shared.group.sim.cut(&[hosts[primary]], &[hosts[other]]);
    let changes = SetAttr { size_bytes: Some(1), ..SetAttr::default() };
    let setter = fs.clone();
    let _set = shared.begin(async move { setter.setattr(me(), file.0, None, changes).await });
    shared.group.sim.run_for(Duration::from_millis(30));
    let asker = fs.clone();
    let asked =
        shared.begin(async move { asker.getattr(file.0, None).await.unwrap().attr.size_bytes });
    let looker = fs.clone();
    let name = shared
        .begin(async move { looker.lookup(me(), ROOT, b"file").await.unwrap().attr.size_bytes });
    shared.group.sim.run_for(Duration::from_millis(30));
    assert_eq!((asked.answer(), name.answer()), (None, None));
    assert_eq!(shared.read_at(other), "old");
    shared.group.sim.heal();
    shared.group.sim.run_for(CALLED_AGAIN);
    assert_eq!((asked.answer(), name.answer()), (Some(1), Some(1)));
    assert_eq!(shared.read_at(other), "o");
}

/// A session that was lost does not make a member forget that others lack what it has.
#[test]
fn a_member_with_a_new_session_does_not_show_what_others_lack() {
    for_each_seed(6, |seed| {
        let shared = Shared::new(seed);
        let [primary, backup, other] = shared.group.roles();
        let hosts = &shared.group.hosts;
        shared.group.sim.cut(&[hosts[primary]], &[hosts[other]]);
        let written = shared.begin_write_at(primary, "new");
        shared.group.sim.run_for(Duration::from_millis(20));
        // A broken connection: the session is lost, and begun anew. The other member is not left out meanwhile.
        shared.group.sim.cut(&[hosts[backup]], &[hosts[primary]]);
        shared.group.sim.run_for(Duration::from_millis(305));
        shared.group.sim.heal();
        let mut last = String::from("old");
        for _ in 0..200 {
            for at in [backup, other] {
                let text = shared.read_at(at);
                assert!(text == last || last == "old", "seed {seed}: {text} after {last}");
                last = text;
            }
        }
        shared.group.sim.run_for(CALLED_AGAIN);
        assert_eq!(written.answer(), Some(Ok(3)));
        assert_eq!(shared.read_at(backup), "new");
        Ok(())
    });
}

/// A file without a name has its bytes on all members (`member/unlinked.rs`).
#[test]
fn a_file_without_a_name_is_read_as_any_other() {
    for_each_seed(10, |seed| {
        let shared = Shared::new(seed);
        let [_, backup, other] = shared.group.roles();
        shared.group.sim.run_for(Duration::from_millis(seed * 6));
        let (fs, file) = (&shared.mounts[other], shared.opens[other]);
        shared.run(async {
            fs.unlink(me(), ROOT, b"file").await.unwrap();
            write(&**fs, file, 0, "new").await.unwrap();
        });
        for _ in 0..20 {
            assert_eq!(shared.read_at(backup), "new", "seed {seed}");
            shared.group.sim.run_for(Duration::from_millis(5));
        }
        assert!(shared.answered(backup) > 0);
        Ok(())
    });
}

/// A member that is removed is there, and may have a lease: the primary waits until that has ended.
#[test]
fn a_member_that_is_removed_answers_nothing_that_is_old() {
    for_each_seed(20, |seed| {
        let shared = Shared::new(seed);
        let [primary, backup, other] = shared.group.roles();
        let hosts = shared.group.hosts.clone();
        let id = shared.group.sim.peer(hosts[backup]).id;
        let member = shared.group.members()[primary].clone().unwrap();
        let (sender, mut removed) = futures_channel::oneshot::channel();
        shared.group.sim.env(hosts[primary]).spawn(Box::pin(async move {
            let _ = sender.send(member.remove(id, EDIT_LIMIT).await.is_ok());
        }));
        // It does not hear of it.
        shared.group.sim.run_for(Duration::from_millis(seed));
        shared.group.sim.cut(&hosts, &[hosts[backup]]);
        let written = shared.begin_write_at(other, "new");
        let mut last = shared.begin_read_at(backup);
        let mut began_after = false;
        for _ in 0..900 {
            shared.group.sim.run_for(Duration::from_millis(1));
            if let Some(text) = last.answer() {
                assert!(!began_after || text == "new", "seed {seed}: {text}");
                began_after = written.answer().is_some();
                last = shared.begin_read_at(backup);
            }
        }
        assert_eq!(written.answer(), Some(Ok(3)), "the others go on");
        assert!(matches!(removed.try_recv(), Ok(Some(true)) | Ok(None)));
        Ok(())
    });
}

/// Bytes of a write that had no answer are on some members: none shows them before all have those of the new primary.
#[test]
fn members_answer_what_the_new_primary_has() {
    for_each_seed(20, |seed| {
        let mut shared = Shared::new(seed);
        let [primary, backup, other] = shared.group.roles();
        let hosts = shared.group.hosts.clone();
        let lacking = if seed % 2 == 0 { backup } else { other };
        shared.group.sim.cut(&[hosts[primary]], &[hosts[lacking]]);
        let (fs, file) = (shared.mounts[primary].clone(), shared.opens[primary]);
        let _written = shared.begin(async move { write(&*fs, file, 0, "new").await });
        shared.group.sim.run_for(Duration::from_millis(20 + seed));
        shared.group.kill(primary, InFlight::Lost);
        shared.group.sim.heal();
        for at in [backup, other] {
            shared.group.disks[at].set_latency(seed, Duration::from_millis(20));
        }
        // The client of the write has no node: nobody makes it again.
        let mut seen = "old".to_owned();
        for turn in 0..60 {
            let at = if turn % 2 == 0 { backup } else { other };
            let text = shared.read_at(at);
            if seen == "new" && text == "old" {
                return Err(format!("{text} after {seen}, at the turn {turn}"));
            }
            seen = text;
        }
        assert!(shared.answered(backup) + shared.answered(other) > 0);
        Ok(())
    });
}

/// A mount whose session is of an earlier run of the server may have bytes to send again: its reads go to the primary.
#[test]
fn a_restart_of_all_members_has_mounts_send_their_bytes_before_they_read() {
    for_each_seed(6, |seed| {
        let mut shared = Shared::new(seed);
        let [_, backup, _] = shared.group.roles();
        shared.run(write(&*shared.mounts[backup], shared.opens[backup], 0, "new")).unwrap();
        for at in MEMBERS {
            shared.group.lose_power(at, Loss::Ordered, seed);
        }
        for at in MEMBERS {
            shared.group.restart(at);
        }
        shared.group.await_quiet()?;
        // Another client's, which has a session there: leases are given.
        let fs = shared.group.mount(backup);
        let file = shared.run(async { open(&*fs, shared.opens[0].0).await });
        shared.run(read(&*fs, file)).unwrap();
        assert_eq!(shared.read_at(backup), "new", "seed {seed}");
        Ok(())
    });
}

/// The lease is of the primary's run: a primary that dies and comes back is another one.
#[test]
fn a_member_that_was_restarted_answers_reads_when_it_has_everything_again() {
    let mut shared = Shared::new(5);
    let [_, backup, other] = shared.group.roles();
    shared.group.kill(backup, InFlight::Lost);
    shared.run(write(&*shared.mounts[other], shared.opens[other], 0, "new")).unwrap();
    shared.group.restart(backup);
    for _ in 0..100 {
        assert_eq!(shared.read_at(backup), "new");
        shared.group.run_for(Duration::from_millis(10));
    }
    shared.group.await_quiet().unwrap();
    shared.group.run_for(SETTLED);
    let before = shared.answered(backup);
    assert_eq!(shared.read_at(backup), "new");
    assert_eq!(shared.answered(backup), before + 1);
}

// ---- by seeds ----

/// Cells of a file.
const CELLS: usize = 8;
const CELL_BYTES: usize = 64;
const FILES: usize = 4;

/// What is known of a cell that one client writes, with numbers that grow.
#[derive(Clone, Copy, Default)]
struct Cell {
    /// The last write that has begun, and the last that was answered.
    begun: u64,
    answered: u64,
    /// The newest that some read has found which has ended.
    seen: u64,
}

/// Files of one writer each, which all clients read: a read finds no less than what was answered, or seen, before it began.
#[derive(Clone)]
struct Registers {
    cells: Arc<Mutex<Vec<[Cell; CELLS]>>>,
    /// A write of the file has no answer: it may be made later.
    is_lost: Arc<[AtomicBool; FILES]>,
    wrong: Arc<Mutex<Vec<String>>>,
    stop: Arc<AtomicBool>,
    done: Arc<AtomicU64>,
}

impl Registers {
    fn new() -> Registers {
        Registers {
            cells: Arc::new(Mutex::new(vec![[Cell::default(); CELLS]; FILES])),
            is_lost: Arc::default(),
            wrong: Arc::default(),
            stop: Arc::default(),
            done: Arc::default(),
        }
    }

    async fn write(&self, fs: &dyn FileSystem, (at, file): (usize, Open), dice: &mut Dice) {
        let first = dice.below(CELLS as u64) as usize;
        let last = (first + dice.below(4) as usize).min(CELLS - 1);
        let mut bytes = Vec::new();
        let numbers: Vec<u64> = {
            let mut cells = self.cells.lock().unwrap();
            (first..=last)
                .map(|cell| {
                    cells[at][cell].begun += 1;
                    cells[at][cell].begun
                })
                .collect()
        };
        for number in &numbers {
            bytes.extend(number.to_be_bytes().repeat(CELL_BYTES / 8));
        }
        let offset = (first * CELL_BYTES) as u64;
        let len = bytes.len() as u32;
        match fs.write(Writer::At(me()), file.0, file.1, offset, bytes.into()).await {
            Ok(written) if written == len => {
                let mut cells = self.cells.lock().unwrap();
                for (cell, number) in (first..=last).zip(numbers) {
                    cells[at][cell].answered = number;
                }
            }
            Ok(_) | Err(_) => self.is_lost[at].store(true, Ordering::SeqCst),
        }
    }

    async fn read(&self, fs: &dyn FileSystem, (at, file): (usize, Open), who: usize) {
        let floor = self.cells.lock().unwrap()[at];
        let Ok(bytes) = fs.read(file.0, file.1, 0, (CELLS * CELL_BYTES) as u32).await else {
            return;
        };
        if self.is_lost[at].load(Ordering::SeqCst) {
            return;
        }
        let mut cells = self.cells.lock().unwrap();
        for cell in 0..CELLS {
            let number = bytes.get(cell * CELL_BYTES..).and_then(|bytes| bytes.first_chunk());
            let number = number.map_or(0, |bytes: &[u8; 8]| u64::from_be_bytes(*bytes));
            let Cell { answered, seen, .. } = floor[cell];
            let now = &mut cells[at][cell];
            if number < answered.max(seen) || number > now.begun {
                let line = format!(
                    "client {who}, file {at}, cell {cell}: found {number}, answered {answered}, seen \
                     {seen}, begun {}",
                    now.begun
                );
                self.wrong.lock().unwrap().push(line);
            }
            now.seen = now.seen.max(number);
        }
        self.done.fetch_add(1, Ordering::SeqCst);
    }

    /// Client `who` writes the files with its number, and reads all.
    async fn work(self, fs: Arc<RemoteFs>, env: Env, who: usize, opens: Vec<Open>, seed: u64) {
        let mut dice = Dice(seed);
        while !self.stop.load(Ordering::SeqCst) {
            let at = dice.below(FILES as u64) as usize;
            let is_own = at % MEMBERS.len() == who && !self.is_lost[at].load(Ordering::SeqCst);
            match dice.below(8) {
                0 | 1 if is_own => self.write(&*fs, (at, opens[at]), &mut dice).await,
                2 if is_own => drop(fs.fsync(opens[at].0, opens[at].1, false).await),
                _ => self.read(&*fs, (at, opens[at]), who).await,
            }
            let pause = [0, 1_000, 20_000][dice.below(3) as usize];
            sleep(&*env, Duration::from_micros(dice.below(pause + 1))).await;
        }
    }
}

/// Clients on all members, while the network fails, processes stand still, disks are slow, and members die one at a time. Returns how many
/// reads backups have answered.
fn reads_at_all_members(seed: u64) -> Result<u64, String> {
    let mut group = Group::new(seed, (seed % 3) as u8);
    let mounts: Vec<_> = MEMBERS.iter().map(|at| group.mount(*at)).collect();
    let registers = Registers::new();
    let files: Vec<InodeNumber> = group
        .sim
        .block_on(LONG, async {
            let mut files = Vec::new();
            for file in 0..FILES {
                let (name, flags) = (format!("file-{file}"), OpenFlags::READ_WRITE);
                let made = mounts[0].create(me(), ROOT, name.as_bytes(), 0o644, flags).await;
                files.push(made.unwrap().0.attr.inode);
            }
            files
        })
        .unwrap();
    for disk in &group.disks {
        disk.set_latency(seed, Duration::from_millis(2));
    }
    let env = group.sim.env(group.clients);
    for (who, fs) in mounts.iter().enumerate() {
        let opens = join_all(files.iter().map(|file| open(&**fs, *file)));
        let opens = group.sim.block_on(LONG, opens).unwrap();
        let work =
            registers.clone().work(fs.clone(), env.clone(), who, opens, seed * 10 + who as u64);
        env.spawn(Box::pin(work));
    }
    let mut dice = Dice(seed);
    let mut answered = 0;
    let mut frozen = [false; MEMBERS.len()];
    for _ in 0..12 {
        group.run_for(Duration::from_millis(dice.below(1500)));
        let hosts = group.hosts.clone();
        let one = dice.below(3) as usize;
        let other = (one + 1 + dice.below(2) as usize) % MEMBERS.len();
        match dice.below(9) {
            kind if kind < NETWORK_FAULTS => {
                let chance = dice.below(30) as f64 / 100.0;
                disturb_network(&group.sim, (hosts[one], hosts[other]), chance, kind);
            }
            5 => {
                let bound = Duration::from_millis([2, 30, 200][dice.below(3) as usize]);
                group.disks[one].set_latency(seed, bound);
            }
            6 => {
                frozen[one] = true;
                group.sim.freeze(hosts[one]);
                group.sim.run_for(Duration::from_millis(dice.below(800)));
            }
            // The others have everything: mounts need not send anything again.
            _ if group.is_quiet() && frozen == [false; 3] => {
                answered += group.members()[one].as_ref().map_or(0, |own| own.reads_answered());
                group.kill(one, InFlight::Late);
                group.run_for(Duration::from_millis(dice.below(1500)));
                group.restart(one);
            }
            _ => {}
        }
        if dice.below(2) == 0 {
            for at in MEMBERS {
                if std::mem::take(&mut frozen[at]) {
                    group.sim.thaw(hosts[at]);
                }
            }
        }
        if dice.below(3) == 0 {
            group.sim.heal();
            group.sim.set_loss(MessageLoss::None);
        }
    }
    for at in MEMBERS {
        if frozen[at] {
            group.sim.thaw(group.hosts[at]);
        }
    }
    group.sim.heal();
    group.sim.set_loss(MessageLoss::None);
    for disk in &group.disks {
        disk.set_latency(seed, Duration::from_millis(2));
    }
    group.run_for(Duration::from_secs(40));
    registers.stop.store(true, Ordering::SeqCst);
    group.run_for(Duration::from_secs(5));
    group.settle_and_compare()?;
    answered += group.members().iter().flatten().map(|own| own.reads_answered()).sum::<u64>();
    let wrong = registers.wrong.lock().unwrap();
    if !wrong.is_empty() {
        return Err(wrong[..wrong.len().min(10)].join("\n"));
    }
    if registers.done.load(Ordering::SeqCst) < 1000 {
        return Err("few reads were answered".to_owned());
    }
    Ok(answered)
}

#[test]
fn no_read_finds_less_than_was_answered_or_seen_before_it() {
    for_each_seed(6, |seed| match reads_at_all_members(seed)? {
        0..200 => Err("backups have answered few reads".to_owned()),
        _ => Ok(()),
    });
}
