//! Locks that are lost while other programs of the mount use the file: what they show and write then.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use atoll_dht::Blocks;
use atoll_env::sleep;
use atoll_key::volume_group;
use atoll_vfs::{Caller, Errno, FileSystem, InodeNumber, LockOwner, OpenFlags, RenameFlags};
use atoll_volume::shared::Consistency;
use atoll_volume::shared::access::{groups, read_volume};
use bytes::Bytes;
use futures_util::future::join;

use super::locks::{EXCLUSIVE, Mounts, Open, SHARED, Slow, make, names};
use super::mounts::{user, volume};
use super::offline::{Setting, rebind_all, tree, write};

const ROOT: InodeNumber = InodeNumber::ROOT;

/// The texts of all files, as the first mount shows them, ascending.
fn texts(all: &Mounts) -> Vec<String> {
    let mut texts: Vec<String> = all
        .run(names(&all.mounts[0]))
        .iter()
        .map(|name| {
            let file = all.open(0, name);
            let text = all.run(file.text());
            all.run(file.fs.close(file.inode, file.handle)).expect("it is open");
            text
        })
        .collect();
    texts.sort();
    texts
}

/// A version that was signed in time reaches the ring when the lock is lost. Its mount went on showing what was there before,
/// for as long as a program had the file open, and what that program wrote covered it.
#[test]
fn a_version_that_arrives_after_its_lock_is_lost_is_what_its_mount_shows() {
    for seed in 0..3 {
        let mut all = Mounts::new(8950 + seed, 5, 1, Consistency::CloseToOpen);
        let slow = Slow::mounted(&mut all, 1);
        all.run(make(&all.mounts[0], "file", ""));
        let [reader, one] = [0, 1].map(|at| all.open(at, "file"));
        let neighbour = Open { owner: LockOwner(2), ..all.open(1, "file") };
        all.run(one.lock(EXCLUSIVE, true)).expect("free");
        all.run(one.write("mine")).expect("locked");
        slow.stores.store(false, Ordering::Relaxed);
        slow.locks.store(false, Ordering::Relaxed);
        let env = all.env(1);
        let until_lost = async {
            sleep(&*env, Duration::from_secs(35)).await;
            // What it would write finds that the lock is lost.
            neighbour.flush().await.expect("it has written nothing");
            slow.stores.store(true, Ordering::Relaxed);
        };
        let (flushed, ()) = all.run(join(one.flush(), until_lost));
        assert_eq!(flushed, Err(Errno::EIO), "seed {seed}: the lock is lost");
        all.run(reader.lock(SHARED, true)).expect("free by now");
        let arrived = all.run(reader.text());
        all.run(reader.unlock()).expect("nothing is to be published");
        assert_eq!(arrived, "mine", "seed {seed}");
        assert_eq!(all.run(neighbour.text()), arrived, "seed {seed}");
        all.run(neighbour.write("M")).expect("it has no lock");
        all.run(neighbour.flush()).expect("the ring takes it");
        all.ring.sim.run_for(Duration::from_secs(10));
        assert_eq!(texts(&all), ["Mine"], "seed {seed}");
    }
}

/// What a program has written goes with a lock of another one, and what it has not read is still unread.
#[test]
fn contents_that_a_writer_has_not_read_are_kept_though_what_he_wrote_was_dropped() {
    for (seed, others_write) in [(0, false), (1, true), (2, false), (3, true)] {
        let all = Mounts::new(8960 + seed, 7, 2, Consistency::CloseToOpen);
        all.run(make(&all.mounts[0], "file", "first"));
        let writer = all.open(1, "file");
        let theirs = all.open(0, "file");
        all.run(theirs.write("acknowledged")).expect("writes");
        all.run(theirs.flush()).expect("the ring takes it");
        // Another program sees it, and locks it.
        let holder = Open { owner: LockOwner(2), ..all.open(1, "file") };
        all.run(holder.lock(EXCLUSIVE, true)).expect("free");
        all.run(writer.write("dropped")).expect("writes");
        if seed >= 2 {
            // That makes a version of the same contents.
            let (fs, flags) = (&all.mounts[1], RenameFlags::default());
            let renamed = fs.rename(Caller::default(), ROOT, b"file", ROOT, b"renamed", flags);
            all.run(renamed).expect("is renamed");
        }
        all.ring.sim.partition(&[&all.hosts(1..2)]);
        all.ring.sim.run_for(Duration::from_secs(40));
        if others_write {
            all.run(theirs.lock(EXCLUSIVE, true)).expect("the other's lease ends");
            all.run(theirs.write("others'")).expect("locked");
            all.run(theirs.unlock()).expect("is published");
        }
        assert_eq!(all.run(holder.flush()), Err(Errno::EIO), "seed {seed}: the lock is lost");
        all.ring.sim.heal();
        all.ring.sim.run_for(Duration::from_secs(300));
        all.run(writer.write("mine")).expect("it has no lock");
        all.run(writer.flush()).expect("the ring takes it");
        all.ring.sim.run_for(Duration::from_secs(10));
        let others = if others_write { "others'edged" } else { "acknowledged" };
        let mut expected = [others, "mineowledged"];
        expected.sort_unstable();
        assert_eq!(texts(&all), expected, "seed {seed}");
    }
}

/// The same of a member who is shut out and let in again.
#[test]
fn contents_that_a_writer_has_not_read_are_kept_though_he_was_shut_out_meanwhile() {
    (8970..8973).for_each(shut_out_and_let_in);
}

fn shut_out_and_let_in(seed: u64) {
    let all = Setting::new(seed);
    let (fs, other) = (all.mounted(), &all.others[0]);
    all.run(write(&fs, ROOT, "f", "first")).expect("is written");
    let open = |owner| {
        all.run(async {
            let found = fs.lookup(Caller::default(), ROOT, b"f").await.expect("is there");
            let inode = found.attr.inode;
            let opened = fs.open(Caller::default(), inode, OpenFlags::READ_WRITE).await;
            let handle = opened.expect("opens").handle;
            Open { fs: fs.clone(), inode, handle, owner: LockOwner(owner) }
        })
    };
    let writer = open(1);
    all.run(write(other, ROOT, "f", "acknowledged")).expect("is written");
    let holder = open(2);
    all.run(holder.lock(EXCLUSIVE, true)).expect("free");
    all.run(writer.write("dropped")).expect("writes");
    let env = all.ring.sim.env(all.ring.members[6].host);
    let blocks: Arc<dyn Blocks> = all.ring.members[6].dht.clone();
    all.run(async {
        let begun = groups::begin_epoch(&env, &blocks, &volume(), user(1).user_id()).await;
        let (_, record) = begun.expect("begins");
        let group = |epoch| volume_group(&volume(), epoch).group_id();
        rebind_all(&all, group(0), group(record.group_epoch)).await;
    });
    all.wait(Duration::from_secs(120));
    assert_eq!(all.run(holder.flush()), Err(Errno::EIO), "seed {seed}: the lock is lost");
    all.run(async {
        let read = read_volume(&blocks, volume().volume_id()).await.expect("is read");
        let (_, record) = read.expect("there");
        let (volume, member) = (volume(), (user(1).user_id(), ""));
        let added = groups::add_volume_member(&env, &blocks, (&volume, &record), member, 0);
        added.await.expect("is added");
    });
    all.wait(Duration::from_secs(600));
    all.run(writer.write("mine")).expect("it has no lock");
    all.run(writer.flush()).expect("the ring takes it");
    all.wait(Duration::from_secs(10));
    let texts: BTreeSet<Bytes> = all.run(tree(other, ROOT, String::new())).into_values().collect();
    let expected = ["acknowledged", "mineowledged"].map(Bytes::from);
    assert_eq!(texts, BTreeSet::from(expected), "seed {seed}");
}
