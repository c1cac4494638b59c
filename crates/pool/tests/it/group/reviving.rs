//! One copy becomes the group, when the others are lost for good.

use atoll_pool::{ReviveError, copy_stand, revive};
use atoll_vfs::{FileKind, OpenFlags, Writer};
use bytes::Bytes;

use super::*;
use crate::workload::{ROOT, me};

const LIMIT: Duration = Duration::from_secs(20);

impl Group {
    fn put_text(&self, name: &str, text: &'static str) {
        let fs = self.fs();
        self.run(async {
            let flags = OpenFlags::WRITE;
            let (made, opened) =
                fs.create(me(), ROOT, name.as_bytes(), 0o644, flags).await.unwrap();
            let bytes = Bytes::from_static(text.as_bytes());
            let (inode, handle) = (made.attr.inode, opened.handle);
            fs.write(Writer::At(me()), inode, handle, 0, bytes).await.unwrap();
            fs.fsync(inode, handle, false).await.unwrap();
            fs.close(inode, handle).await.unwrap();
        });
    }

    fn text(&self, name: &str) -> Option<String> {
        let fs = self.fs();
        self.run(async {
            let found = fs.lookup(me(), ROOT, name.as_bytes()).await.ok()?;
            assert_eq!(found.attr.kind, FileKind::Regular);
            let opened = fs.open(me(), found.attr.inode, OpenFlags::READ).await.unwrap();
            let bytes = fs.read(found.attr.inode, opened.handle, 0, 1000).await.unwrap();
            fs.close(found.attr.inode, opened.handle).await.unwrap();
            Some(String::from_utf8(bytes.to_vec()).unwrap())
        })
    }

    /// Makes a member's copy the group. Its process does not run.
    fn revive(&mut self, at: usize, also_incomplete: bool) -> Result<(), ReviveError> {
        let (env, local) = (self.sim.outside(), self.sim.peer(self.hosts[at]));
        self.disks[at] = self.disks[at].reopen();
        let revived = revive(env, self.disks[at].clone(), local, also_incomplete);
        self.sim.block_on(LONG, revived).unwrap().map(drop)
    }
}

/// Two of three are lost with their disks: no majority of the voters is left, and the third one serves nothing until people say that its copy
/// is to count.
#[test]
fn the_last_copy_becomes_the_group_and_members_of_before_belong_to_it_no_more() {
    let mut group = Group::new(7, 1);
    let [primary, other, third] = group.roles();
    group.put_text("file", "text");
    group.settle_and_compare().unwrap();
    for at in [primary, other] {
        group.kill(at, InFlight::Late);
    }
    group.run_for(LIMIT);
    assert_eq!(group.primary(), None, "one of three voters is no majority");
    group.kill(third, InFlight::Late);
    group.revive(third, false).unwrap();
    group.restart(third);
    group.run_for(Duration::from_secs(3));
    assert_eq!(group.primary(), Some(third));
    assert_eq!(group.text("file").as_deref(), Some("text"));
    group.put_text("after", "more");
    // They come back after all, and are a majority of the voters that they know.
    for at in [primary, other] {
        group.restart(at);
    }
    group.settle_and_compare().unwrap();
    assert_eq!(group.primary(), Some(third));
    assert_eq!(group.text("file").as_deref(), Some("text"));
    assert_eq!(group.text("after").as_deref(), Some("more"));
    assert_eq!(group.status(third).members.iter().filter(|member| member.is_member).count(), 3);
    // And it can die as any other one.
    group.kill(third, InFlight::Late);
    group.run_for(LIMIT);
    assert_eq!(group.text("after").as_deref(), Some("more"));
    group.restart(third);
    group.settle_and_compare().unwrap();
}

/// The members that had everything are gone; one that was left out before has an older state, which is better than nothing.
#[test]
fn a_copy_that_was_left_out_says_how_old_it_is_and_becomes_the_group() {
    let mut group = Group::new(8, 1);
    let [primary, other, third] = group.roles();
    group.put_text("before", "text");
    group.settle_and_compare().unwrap();
    group.kill(third, InFlight::Late);
    group.run_for(Duration::from_secs(3));
    group.put_text("missed", "text");
    let fs = group.fs();
    group.run(async { fs.sync().await.unwrap() });
    drop(fs);
    let stand = |group: &mut Group, at: usize| {
        group.disks[at] = group.disks[at].reopen();
        let (env, disk) = (group.sim.outside(), group.disks[at].clone());
        let stand = group.sim.block_on(LONG, copy_stand(env, disk)).unwrap().unwrap();
        group.disks[at].kill(InFlight::Lost);
        stand
    };
    for at in [primary, other] {
        group.kill(at, InFlight::Late);
    }
    let (newer, older) = (stand(&mut group, primary), stand(&mut group, third));
    assert!((newer.epoch, newer.last_change) > (older.epoch, older.last_change));
    assert!(!older.is_incomplete && older.members.peers().len() == 3);
    group.revive(third, false).unwrap();
    group.restart(third);
    group.run_for(Duration::from_secs(3));
    assert_eq!(group.primary(), Some(third));
    assert_eq!(group.text("before").as_deref(), Some("text"));
    assert_eq!(group.text("missed"), None);
    group.put_text("missed", "again");
    // Those that have more come back: what people have decided counts.
    for at in [primary, other] {
        group.restart(at);
    }
    group.settle_and_compare().unwrap();
    assert_eq!(group.text("missed").as_deref(), Some("again"));
}

/// Somebody first picks the wrong machine. What it gets meanwhile, and numbers that it gives, are not the pool's.
#[test]
fn of_two_copies_that_were_revived_the_later_one_counts() {
    let mut group = Group::new(9, 1);
    let [primary, other, third] = group.roles();
    group.put_text("file", "text");
    group.settle_and_compare().unwrap();
    for at in [primary, other, third] {
        group.kill(at, InFlight::Late);
    }
    let mut numbers = Vec::new();
    for (at, names) in [(other, ["mine", "mine2"]), (third, ["after", "after2"])] {
        group.revive(at, false).unwrap();
        group.restart(at);
        group.run_for(Duration::from_secs(3));
        assert_eq!(group.primary(), Some(at));
        for name in names {
            group.put_text(name, "more");
            let fs = group.fs();
            let found = group.run(fs.lookup(me(), ROOT, name.as_bytes())).unwrap();
            numbers.push(found.attr.inode);
        }
        group.kill(at, InFlight::Late);
        group.run_for(Duration::from_secs(2));
    }
    numbers.sort_unstable();
    numbers.dedup();
    assert_eq!(numbers.len(), 4, "no number is given twice");
    for at in [other, primary, third] {
        group.restart(at);
        group.run_for(Duration::from_millis(300));
    }
    group.settle_and_compare().unwrap();
    for (name, text) in [("file", Some("text")), ("after", Some("more")), ("after2", Some("more"))]
    {
        assert_eq!(group.text(name).as_deref(), text, "{name}");
    }
    assert_eq!((group.text("mine"), group.text("mine2")), (None, None));
}

/// The member that votes dies, and the other one is revived; then the first one comes back where it reaches nobody, and is the primary of what it
/// has until it hears of the other one.
#[test]
fn a_primary_of_before_that_was_cut_off_follows_the_revived_one() {
    let mut group = Group::of(2, 11, 1);
    group.put_text("file", "text");
    group.settle_and_compare().unwrap();
    let voter = group.status(0).voters[0];
    let first = (0..2).find(|at| group.sim.peer(group.hosts[*at]).id == voter.id).unwrap();
    let second = 1 - first;
    for at in [first, second] {
        group.kill(at, InFlight::Late);
    }
    group.revive(second, false).unwrap();
    group.restart(second);
    group.run_for(Duration::from_secs(3));
    group.put_text("after", "more");
    group.sim.partition(&[&[group.hosts[first]]]);
    group.restart(first);
    group.run_for(Duration::from_secs(5));
    assert!(group.status(first).is_primary, "it hears of nobody");
    group.sim.heal();
    group.settle_and_compare().unwrap();
    assert_eq!(group.primary(), Some(second));
    assert_eq!(group.text("after").as_deref(), Some("more"));
    assert_eq!(group.status(second).members.iter().filter(|member| member.is_member).count(), 2);
}
