//! How many changes of the pool calls make, each of which is a sync of every member's journal. Counts, never times.

use atoll_pool::disk::simulated::DiskCall;
use atoll_vfs::{
    Attr, Caller, Errno, FileTime, Handle, InodeNumber, OpenFlags, SetAttr, SetTime, Writer,
    XattrFlags,
};
use bytes::Bytes;

use super::*;
use crate::workload::{ROOT, me};

type Fs = PoolFs<SimulatedDisk>;

const MIB: usize = 1 << 20;
const ACCESS_LIST: &[u8] = b"system.posix_acl_access";

/// What a call cost.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Cost {
    changes: u64,
    /// Syncs of files, of each member.
    syncs: Vec<u64>,
}

impl Group {
    fn spent(&self) -> Cost {
        let primary = self.primary().expect("there is a primary");
        let changes = self.status(primary).members[0].applied;
        let syncs = self.disks.iter().map(|disk| disk.calls(DiskCall::SyncFile)).collect();
        Cost { changes, syncs }
    }

    /// Does work, and says what it cost.
    fn cost<T>(&self, work: impl Future<Output = T>) -> (T, Cost) {
        let before = self.spent();
        let done = self.run(work);
        let after = self.spent();
        let syncs = after.syncs.iter().zip(&before.syncs).map(|(now, then)| now - then).collect();
        (done, Cost { changes: after.changes - before.changes, syncs })
    }

    /// How many changes a call makes.
    fn changes_of<T>(&self, work: impl Future<Output = T>) -> u64 {
        self.cost(work).1.changes
    }

    fn attr(&self, inode: InodeNumber) -> Attr {
        self.run(self.fs().getattr(inode, None)).unwrap().attr
    }
}

/// A list that says no more than this mode.
fn list_of(mode: u16) -> Bytes {
    let mut list = 2u32.to_le_bytes().to_vec();
    for (tag, shift) in [(1u16, 6), (4, 3), (32, 0)] {
        list.extend(tag.to_le_bytes());
        list.extend((mode >> shift & 7).to_le_bytes());
        list.extend(u32::MAX.to_le_bytes());
    }
    list.into()
}

async fn create(fs: &Fs, dir: InodeNumber, name: &[u8], mode: u32) -> (InodeNumber, Handle) {
    let made = fs.create(me(), dir, name, mode, OpenFlags::READ_WRITE).await.unwrap();
    (made.0.attr.inode, made.1.handle)
}

async fn write(fs: &Fs, file: (InodeNumber, Handle), at_mib: usize, mib: usize) {
    let bytes = Bytes::from(vec![at_mib as u8 + 1; mib * MIB]);
    let offset = (at_mib * MIB) as u64;
    let written = fs.write(Writer::At(me()), file.0, file.1, offset, bytes).await;
    assert_eq!(written, Ok((mib * MIB) as u32));
}

async fn set(fs: &Fs, inode: InodeNumber, changes: SetAttr) {
    fs.setattr(me(), inode, None, changes).await.unwrap();
}

fn mode(mode: u32) -> SetAttr {
    SetAttr { mode: Some(mode), ..SetAttr::default() }
}

fn owner(uid: u32, gid: u32) -> SetAttr {
    SetAttr { uid: Some(uid), gid: Some(gid), ..SetAttr::default() }
}

fn times(secs: i64) -> SetAttr {
    let time = Some(SetTime::To(FileTime { secs, nanos: 5 }));
    SetAttr { atime: time, mtime: time, ..SetAttr::default() }
}

#[test]
fn a_file_that_is_written_from_front_to_back_takes_few_changes() {
    let mut group = Group::new(1, 1);
    let fs = group.fs();
    let (file, made) = group.cost(create(&fs, ROOT, b"file", 0o644));
    assert_eq!(made, Cost { changes: 1, syncs: vec![1; 3] });
    // Up to 1, 2, 4, 8, 16, 32 and 64 MiB; the first MiB is marked since the file was made.
    let ((), written) = group.cost(async {
        for at in 0..40 {
            write(&fs, file, at, 1).await;
        }
    });
    assert_eq!(written, Cost { changes: 6, syncs: vec![6; 3] });
    let synced = group.changes_of(fs.fsync(file.0, file.1, false));
    assert_eq!(synced, 1);
    // All marks are cleared, also those of ranges in which nothing was written.
    assert_eq!(group.changes_of(write(&fs, file, 50, 1)), 1);
    group.settle_and_compare().unwrap();
}

/// As a mount sends it: several writes are under way, and come in another order.
#[test]
fn a_file_that_is_written_nearly_in_order_takes_few_changes() {
    let mut group = Group::new(2, 1);
    let fs = group.fs();
    let file = group.run(create(&fs, ROOT, b"file", 0o644));
    let written = group.changes_of(async {
        for at in (0..40).step_by(4) {
            for swapped in [1, 0, 3, 2] {
                write(&fs, file, at + swapped, 1).await;
            }
        }
    });
    assert!(written <= 12, "{written} changes");
    group.settle_and_compare().unwrap();
}

#[test]
fn writes_here_and_there_make_a_change_each() {
    let group = Group::new(3, 1);
    let fs = group.fs();
    let file = group.run(create(&fs, ROOT, b"file", 0o644));
    let written = group.changes_of(async {
        for at in [30, 20, 10, 25, 15, 5] {
            write(&fs, file, at, 1).await;
        }
    });
    assert_eq!(written, 6);
}

/// A member that comes back is handed what lies in marked ranges, and nothing for those behind the end of the file.
#[test]
fn marks_behind_the_end_of_a_file_cost_nothing() {
    let mut group = Group::new(4, 1);
    let [_, b, _] = group.roles();
    let fs = group.fs();
    let file = group.run(create(&fs, ROOT, b"file", 0o644));
    // Marks 0 to 31.
    group.run(async {
        for at in 0..18 {
            write(&fs, file, at, 1).await;
        }
    });
    group.kill(b, InFlight::Lost);
    group.run_for(Duration::from_secs(1));
    group.restart(b);
    let before = group.disks[b].calls(DiskCall::SetTimes);
    group.await_quiet().unwrap();
    // Each range that is handed over brings the file's time.
    assert_eq!(group.disks[b].calls(DiskCall::SetTimes) - before, 18);
    group.settle_and_compare().unwrap();
}

/// Marks ahead are as durable as others: all members have the primary's bytes in these ranges afterwards.
#[test]
fn what_was_written_in_ranges_that_were_marked_ahead_is_the_same_on_all_after_a_loss_of_power() {
    for seed in 0..5 {
        let mut group = Group::new(seed, 1);
        let fs = group.fs();
        let file = group.run(create(&fs, ROOT, b"file", 0o644));
        group.run(async {
            write(&fs, file, 0, 1).await;
            fs.fsync(file.0, file.1, false).await.unwrap();
            for at in 1..12 {
                write(&fs, file, at, 1).await;
            }
        });
        MEMBERS.into_iter().for_each(|at| group.lose_power(at, Loss::Ordered, seed + at as u64));
        group.run_for(Duration::from_secs(1));
        MEMBERS.into_iter().for_each(|at| group.restart(at));
        group.settle_and_compare().unwrap_or_else(|wrong| panic!("seed {seed}: {wrong}"));
    }
}

#[test]
fn setting_what_a_file_has_makes_no_change_but_of_its_change_time() {
    let mut group = Group::new(5, 1);
    let fs = group.fs();
    let (file, _) = group.run(create(&fs, ROOT, b"file", 0o644));
    let dir = group.run(fs.mkdir(me(), ROOT, b"dir", 0o2755)).unwrap().attr.inode;
    let link = group.run(fs.symlink(me(), ROOT, b"link", b"file")).unwrap().attr.inode;
    let xattr = async |value: &'static [u8]| {
        let flags = XattrFlags::default();
        fs.setxattr(me(), file, b"user.a", value.into(), flags).await.unwrap();
    };
    let list = async |inode, bits| {
        fs.setxattr(me(), inode, ACCESS_LIST, list_of(bits), XattrFlags::default()).await.unwrap();
    };
    assert_eq!(group.changes_of(xattr(b"one")), 1);
    for (inode, bits) in [(file, 0o644), (dir, 0o2755), (link, 0)] {
        let before = group.attr(inode);
        let mut cost = Vec::new();
        for owner in [owner(1000, 1000), SetAttr { uid: None, ..owner(0, 1000) }] {
            group.run_for(Duration::from_millis(10));
            cost.push(group.cost(set(&fs, inode, owner)).1);
            assert!(group.attr(inode).ctime > before.ctime, "{inode:?}");
        }
        if inode != link {
            group.run_for(Duration::from_millis(10));
            let touched = group.attr(inode).ctime;
            cost.push(group.cost(set(&fs, inode, mode(bits))).1);
            cost.push(
                group.cost(set(&fs, inode, SetAttr { mode: Some(bits), ..owner(1000, 1000) })).1,
            );
            cost.push(group.cost(list(inode, bits as u16 & 0o777)).1);
            assert!(group.attr(inode).ctime > touched, "{inode:?}");
        }
        if inode == file {
            cost.push(group.cost(xattr(b"one")).1);
        }
        let nothing = Cost { changes: 0, syncs: vec![0; 3] };
        assert!(cost.iter().all(|cost| *cost == nothing), "{inode:?}: {cost:?}");
        assert_eq!(group.attr(inode), Attr { ctime: group.attr(inode).ctime, ..before });
    }
    let (uid, gid) = (SetAttr { gid: None, ..owner(7, 0) }, SetAttr { uid: None, ..owner(0, 8) });
    for (change, mode_after) in [
        (mode(0o600), 0o600),
        (uid, 0o600),
        (gid, 0o600),
        (SetAttr { mode: Some(0o640), ..owner(7, 8) }, 0o640),
        // Those of the primary's file may be no other member's.
        (times(1), 0o640),
        (times(1), 0o640),
    ] {
        assert_eq!(group.changes_of(set(&fs, file, change)), 1, "{change:?}");
        assert_eq!(group.attr(file).mode, mode_after);
    }
    assert_eq!(group.changes_of(xattr(b"two")), 1);
    assert_eq!(group.changes_of(list(file, 0o664)), 1);
    assert_eq!(group.attr(file).mode, 0o664);
    group.settle_and_compare().unwrap();
    // Another member is the primary, which knows it from the changes alone.
    let before = [file, dir, link].map(|inode| group.attr(inode));
    let primary = group.primary().unwrap();
    group.kill(primary, InFlight::Lost);
    group.run_for(Duration::from_secs(2));
    for attr in before {
        let after = group.attr(attr.inode);
        assert_eq!((after.mode, after.uid, after.gid), (attr.mode, attr.uid, attr.gid));
    }
    let fs = group.fs();
    let again = group.changes_of(set(&fs, file, SetAttr { mode: Some(0o664), ..owner(7, 8) }));
    assert_eq!(again, 0);
    group.restart(primary);
    group.settle_and_compare().unwrap();
}

/// A caller that is not in a file's group takes its set-group-ID bit away with a list, also with one that it has.
#[test]
fn a_list_that_takes_a_bit_away_is_a_change() {
    let mut group = Group::new(6, 1);
    let fs = group.fs();
    let (file, _) = group.run(create(&fs, ROOT, b"file", 0o644));
    group.run(set(&fs, file, SetAttr { mode: Some(0o2750), ..owner(1000, 8) }));
    let list = async |caller: Caller| {
        let flags = XattrFlags::default();
        fs.setxattr(caller, file, ACCESS_LIST, list_of(0o750), flags).await.unwrap();
    };
    assert_eq!(group.changes_of(list(Caller { gid: 8, ..me() })), 0);
    assert_eq!(group.attr(file).mode, 0o2750);
    assert_eq!(group.changes_of(list(me())), 1);
    assert_eq!(group.attr(file).mode, 0o750);
    group.settle_and_compare().unwrap();
}

/// So does setting the owner that the file has. After a crash the change that had set the bits does not bring them back.
#[test]
fn a_new_owner_takes_set_user_id_away_for_good() {
    for (power, uid) in [(false, 1000), (true, 1000), (false, 7), (true, 7)] {
        let mut group = Group::new(u64::from(uid), 1);
        let fs = group.fs();
        let (file, _) = group.run(create(&fs, ROOT, b"file", 0o755));
        assert_eq!(group.changes_of(set(&fs, file, mode(0o6755))), 1);
        let change = SetAttr { uid: Some(uid), ..SetAttr::default() };
        assert_eq!(group.changes_of(set(&fs, file, change)), 1);
        assert_eq!(group.attr(file).mode, 0o755);
        // It has neither any more.
        assert_eq!(group.changes_of(set(&fs, file, change)), 0);
        let primary = group.primary().unwrap();
        let struck = if power { MEMBERS.to_vec() } else { vec![primary] };
        for at in &struck {
            match power {
                true => group.lose_power(*at, Loss::Ordered, 3),
                false => group.kill(*at, InFlight::Lost),
            }
        }
        group.run_for(Duration::from_secs(2));
        struck.iter().for_each(|at| group.restart(*at));
        group.await_quiet().unwrap();
        let found = group.attr(file);
        assert_eq!((found.mode, found.uid), (0o755, uid), "power: {power}");
        group.settle_and_compare().unwrap();
    }
}

/// A new owner takes the attribute away on each member.
#[test]
fn an_owner_of_a_file_with_capabilities_is_a_change() {
    let group = Group::new(8, 1);
    let fs = group.fs();
    let (file, _) = group.run(create(&fs, ROOT, b"file", 0o755));
    let flags = XattrFlags::default();
    let capability =
        Bytes::from_static(&[1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    group.run(fs.setxattr(me(), file, b"security.capability", capability, flags)).unwrap();
    assert_eq!(group.changes_of(set(&fs, file, owner(1000, 1000))), 1);
    assert_eq!(group.changes_of(set(&fs, file, mode(0o755))), 0);
}

/// The primary alone has a file without a name.
#[test]
fn attributes_of_a_file_without_a_name_stop_nobody() {
    let mut group = Group::new(9, 1);
    let fs = group.fs();
    let (file, handle) = group.run(create(&fs, ROOT, b"file", 0o644));
    group.run(async {
        fs.unlink(me(), ROOT, b"file").await.unwrap();
        fs.setattr(me(), file, Some(handle), mode(0o600)).await.unwrap();
        let flags = XattrFlags::default();
        fs.setxattr(me(), file, b"user.a", b"one".as_slice().into(), flags).await.unwrap();
        fs.removexattr(me(), file, b"user.a").await.unwrap();
    });
    assert_eq!(group.attr(file).mode, 0o600);
    group.run_for(Duration::from_secs(1));
    group.settle_and_compare().unwrap();
}

/// The calls of `cp -a` by which a tree of root's is copied (coreutils 9): a file is made for its owner alone, gets its bytes, its times
/// and a list that says its mode; a directory also its owner.
#[test]
fn a_copy_of_a_tree_makes_three_changes_a_name() {
    let mut group = Group::new(10, 1);
    let fs = group.fs();
    let flags = XattrFlags::default();
    let dir = async |name: &'static [u8], mode: u16| {
        let made = fs.mkdir(me(), ROOT, name, 0o700).await.unwrap().attr.inode;
        set(&fs, made, times(3)).await;
        set(&fs, made, owner(1000, 1000)).await;
        fs.setxattr(me(), made, ACCESS_LIST, list_of(mode), flags).await.unwrap();
    };
    let file = async |name: &'static [u8], mode: u16| {
        let file = create(&fs, ROOT, name, 0o600).await;
        write(&fs, file, 0, 1).await;
        set(&fs, file.0, times(3)).await;
        fs.setxattr(me(), file.0, ACCESS_LIST, list_of(mode), flags).await.unwrap();
    };
    let cost = |changes| Cost { changes, syncs: vec![changes; 3] };
    assert_eq!(group.cost(dir(b"dir", 0o755)).1, cost(3));
    assert_eq!(group.cost(file(b"file", 0o644)).1, cost(3));
    assert_eq!(group.cost(dir(b"own dir", 0o700)).1, cost(2));
    assert_eq!(group.cost(file(b"own file", 0o600)).1, cost(2));
    group.settle_and_compare().unwrap();
}

/// The owner was set on the primary, and the mode was not: the same owner made no change then, and the others never had it.
#[test]
fn a_change_that_the_disk_refused_in_part_is_made_when_it_is_repeated() {
    let mut group = Group::new(7, 1);
    let fs = group.fs();
    let (file, _) = group.run(create(&fs, ROOT, b"file", 0o644));
    let primary = group.primary().unwrap();
    for call in [DiskCall::SetMode, DiskCall::SetTimes] {
        let both = SetAttr { mode: Some(0o600), ..owner(7, 8) };
        let all = SetAttr { mode: Some(0o600), ..times(5) };
        group.disks[primary].fail_next(call, Errno::ENOSPC);
        let changes = if call == DiskCall::SetMode { both } else { all };
        let refused = group.run(fs.setattr(me(), file, None, changes));
        assert_eq!(refused.err(), Some(Errno::ENOSPC), "{call:?}");
        let part = if call == DiskCall::SetMode { owner(7, 8) } else { mode(0o600) };
        assert_eq!(group.changes_of(set(&fs, file, part)), 1, "{call:?}");
        group.settle_and_compare().unwrap();
    }
}
