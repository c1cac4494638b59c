//! Members that die, come back, and take each other's place.

use super::*;
use crate::workload::{ROOT, for_each_seed, me, read_file_in, write_file_in};

/// More than any call takes.
const SOON: Duration = Duration::from_secs(40);

pub(super) async fn write_file(fs: &dyn FileSystem, name: &str, text: &str) {
    write_file_in(fs, ROOT, name, text).await;
}

pub(super) async fn read_file(fs: &dyn FileSystem, name: &str) -> String {
    read_file_in(fs, ROOT, name).await
}

/// How long a call takes that is made now.
pub(super) fn stall<T>(group: &Group, call: impl Future<Output = T>) -> (T, Duration) {
    let before = group.sim.now();
    let done = group.sim.block_on(SOON, call).unwrap();
    (done, group.sim.now().since(before))
}

/// POOL: "no error at the client, no acknowledged operation lost", and a stall below one second.
#[test]
fn another_member_becomes_the_primary_when_it_dies() {
    for_each_seed(10, |seed| {
        let mut group = Group::new(seed, 1);
        let [first, other, _] = group.roles();
        let fs = group.mount(other);
        group.sim.block_on(SOON, write_file(&*fs, "before", "made before")).unwrap();
        group.kill(first, InFlight::Lost);
        let (text, took) = stall(&group, read_file(&*fs, "before"));
        assert_eq!(text, "made before");
        assert!(took < Duration::from_secs(1), "seed {seed}: {took:?}");
        group.sim.block_on(SOON, write_file(&*fs, "after", "made after")).unwrap();
        assert_ne!(group.primary(), Some(first));
        group.restart(first);
        group.settle_and_compare().unwrap();
        // And again, with the one that has come back among those who take its place.
        let [second, other, _] = group.roles();
        let fs = group.mount(other);
        group.kill(second, InFlight::Lost);
        let (text, took) = stall(&group, read_file(&*fs, "after"));
        assert_eq!(text, "made after");
        assert!(took < Duration::from_secs(1), "seed {seed}: {took:?}");
        group.restart(second);
        group.settle_and_compare()
    });
}

#[test]
fn a_backup_that_dies_is_waited_for_less_than_a_second() {
    for_each_seed(10, |seed| {
        let mut group = Group::new(seed, 1);
        let [primary, backup, other] = group.roles();
        let fs = group.mount(other);
        group.kill(backup, InFlight::Lost);
        let ((), took) = stall(&group, write_file(&*fs, "file", "made without it"));
        assert!(took < Duration::from_secs(1), "seed {seed}: {took:?}");
        assert_eq!(group.primary(), Some(primary));
        // It missed bytes that were synced meanwhile, too.
        group.sim.block_on(SOON, fs.sync()).unwrap().unwrap();
        group.restart(backup);
        group.settle_and_compare()
    });
}

/// One member of the last epoch is enough, and no other will do.
#[test]
fn the_last_member_waits_for_nobody_and_all_wait_for_it() {
    let mut group = Group::new(1, 1);
    let [last, others @ ..] = group.roles();
    let fs = group.mount(last);
    group.kill(others[0], InFlight::Lost);
    let ((), took) = stall(&group, write_file(&*fs, "two", "members"));
    assert!(took < Duration::from_secs(1), "{took:?}");
    group.restart(others[0]);
    group.await_quiet().unwrap();
    // Nobody else hears of this.
    group.kill(others[0], InFlight::Lost);
    group.run_for(Duration::from_secs(1));
    group.sim.block_on(SOON, write_file(&*fs, "without one", "of them")).unwrap();
    group.lose_power(others[1], Loss::Ordered, 1);
    group.kill(last, InFlight::Lost);
    group.restart(others[0]);
    group.run_for(Duration::from_secs(5));
    assert_eq!(group.primary(), None, "it may lack what was answered");
    group.restart(others[1]);
    group.run_for(Duration::from_secs(5));
    let through_other = group.mount(others[1]);
    group.sim.block_on(SOON, read_file(&*through_other, "without one")).unwrap();
    group.restart(last);
    group.settle_and_compare().unwrap();
}

/// A primary that stood still does not answer as if no time had passed.
#[test]
fn a_primary_that_was_stopped_finds_out_before_it_answers() {
    let mut group = Group::new(1, 1);
    let [first, other, _] = group.roles();
    let (through_first, fs) = (group.mount(first), group.mount(other));
    group.sim.freeze(group.hosts[first]);
    let ((), took) = stall(&group, write_file(&*fs, "file", "made elsewhere"));
    assert!(took < Duration::from_secs(2), "{took:?}");
    group.sim.thaw(group.hosts[first]);
    let text = group.sim.block_on(SOON, read_file(&*through_first, "file")).unwrap();
    assert_eq!(text, "made elsewhere");
    group.settle_and_compare().unwrap();
}

/// All have everything before the change with which logs begin, also who lacks that change itself.
#[test]
fn members_that_die_while_the_log_begins_anew_come_back() {
    for_each_seed(8, |seed| {
        let mut group = Group::new(seed, 1);
        let [_, backup, other] = group.roles();
        let (fs, mounted) = (group.fs(), group.mount(other));
        let make = async {
            for number in 0..1010 {
                fs.mkdir(me(), ROOT, format!("dir-{number}").as_bytes(), 0o755).await.unwrap();
            }
        };
        group.sim.block_on(LONG, make).unwrap();
        for at in MEMBERS {
            group.disks[at].set_latency(seed, Duration::from_millis(8));
        }
        let make = async {
            for number in 0..20 {
                fs.mkdir(me(), ROOT, format!("more-{number}").as_bytes(), 0o755).await.unwrap();
            }
        };
        group.sim.block_on(LONG, make).unwrap();
        drop(fs);
        group.sim.run_for(Duration::from_millis(seed * 6));
        group.kill(backup, InFlight::Lost);
        let ((), took) = stall(&group, write_file(&*mounted, "file", "made without it"));
        assert!(took < Duration::from_secs(1), "seed {seed}: {took:?}");
        if seed % 2 == 1 {
            for at in MEMBERS {
                group.lose_power(at, Loss::Ordered, seed);
            }
        }
        for at in MEMBERS {
            group.disks[at].set_latency(seed, Duration::ZERO);
            if !group.is_up(at) {
                group.restart(at);
            }
        }
        group.settle_and_compare()
    });
}

/// A backup is killed while it makes a file whose removal is in its journal already.
#[test]
fn a_file_that_a_killed_backup_was_making_is_removed_as_its_journal_says() {
    for_each_seed(24, |seed| {
        let mut group = Group::new(seed, 1);
        let [_, backup, _] = group.roles();
        let fs = group.fs();
        group.disks[backup].set_latency(seed, Duration::from_millis(6));
        let make = async {
            for number in 0..4 {
                let name = format!("file-{number}");
                let kind = atoll_vfs::FileKind::Regular;
                fs.mknod(me(), ROOT, name.as_bytes(), kind, 0o644, 0).await.unwrap();
                fs.unlink(me(), ROOT, name.as_bytes()).await.unwrap();
            }
        };
        group.sim.block_on(SOON, make).unwrap();
        drop(fs);
        group.sim.run_for(Duration::from_millis(seed * 2));
        group.kill(backup, InFlight::Lost);
        group.disks[backup].set_latency(seed, Duration::ZERO);
        group.restart(backup);
        group.await_quiet()?;
        let fs = group.fs();
        let again = async {
            for number in 0..4 {
                let name = format!("file-{number}");
                fs.mkdir(me(), ROOT, name.as_bytes(), 0o755).await.unwrap();
            }
        };
        group.sim.block_on(SOON, again).unwrap();
        drop(fs);
        group.settle_and_compare()
    });
}

/// A member that comes back with a full disk holds nobody up, and takes part again when it has room.
#[test]
fn a_member_whose_disk_is_full_when_it_comes_back_is_waited_for_by_nobody() {
    let mut group = Group::new(3, 1);
    let [_, backup, other] = group.roles();
    let fs = group.mount(other);
    group.kill(backup, InFlight::Lost);
    // The journal and the reserve fit, and little else.
    group.disks[backup].set_capacity((16 << 20) + (40 << 20), 500);
    let large = "x".repeat(1 << 20);
    for number in 0..60 {
        let name = format!("large-{number}");
        group.sim.block_on(SOON, write_file(&*fs, &name, &large)).unwrap();
    }
    group.restart(backup);
    for number in 0..20 {
        let name = format!("more-{number}");
        let ((), took) = stall(&group, write_file(&*fs, &name, &large));
        assert!(took < Duration::from_secs(3), "{took:?}");
        group.run_for(Duration::from_millis(300));
    }
    let takes_part = |group: &Group| {
        let primary = group.primary().unwrap();
        let status = group.status(primary);
        status.members.iter().filter(|member| member.is_member).count()
    };
    assert_eq!(takes_part(&group), 2, "its disk is full");
    group.disks[backup].set_capacity(1 << 34, 1 << 20);
    group.await_quiet().unwrap();
    assert_eq!(takes_part(&group), 3);
    group.failed.clear();
    group.settle_and_compare().unwrap();
}
