//! What a mount says of itself: whether it works, how much room there is, and what of a file waits in the spool.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use atoll_dht::Blocks;
use atoll_key::volume_group;
use atoll_vfs::{Caller, Errno, FileSystem, Handle, InodeNumber, OpenFlags, Writer};
use atoll_volume::shared::access::groups;
use atoll_volume::shared::file_state::{FileState, PendingChanges, STATE_XATTR};
use atoll_volume::shared::{SharedFs, SharedOptions};

use super::mounts::{user, volume};
use super::offline::{ROOM, Setting, large, read, rebind_all, write};

const ROOT: InodeNumber = InodeNumber::ROOT;

fn me() -> Caller {
    Caller::default()
}

#[test]
fn the_status_of_a_member_who_was_shut_out_says_so() {
    let all = Setting::new(9710);
    let fs = all.mounted();
    let env = all.ring.sim.env(all.ring.members[6].host);
    let blocks: Arc<dyn Blocks> = all.ring.members[6].dht.clone();
    assert_eq!((all.status(&fs), all.status(&all.others[0])), ("ok".into(), "ok".into()));
    all.run(async {
        let begun = groups::begin_epoch(&env, &blocks, &volume(), user(1).user_id()).await;
        let (_, record) = begun.expect("begins");
        let group = |epoch| volume_group(&volume(), epoch).group_id();
        rebind_all(&all, group(0), group(record.group_epoch)).await;
    });
    let told = all.status(&fs);
    assert!(told.contains("you are not a member"), "{told}");
    assert_eq!(all.status(&all.others[0]), "ok");
}

#[test]
fn a_spool_with_nothing_in_it_is_not_told_as_files() {
    let all = Setting::new(9711);
    let fs = all.mounted();
    all.run(write(&fs, ROOT, "before", "x")).expect("is written");
    all.machine.node.stop();
    assert_eq!(all.run(fs.lookup(me(), ROOT, b"x")).err(), Some(Errno::ENOENT));
    let told = all.status(&fs);
    assert!(told.starts_with("no file waits in the spool; offline since"), "{told}");
    all.run(write(&fs, ROOT, "x", "x")).expect("is spooled");
    let told = all.status(&fs);
    assert!(told.starts_with("2 files wait in the spool"), "{told}");
}

/// The first write after the ring was gone took 41 s, and nothing said for what it waited.
#[test]
fn a_write_that_waits_for_the_ring_is_told_while_it_waits() {
    let all = Setting::new(9715);
    let fs = all.mounted();
    all.run(write(&fs, ROOT, "before", "x")).expect("is written");
    assert_eq!(all.status(&fs), "ok");
    all.machine.node.stop_at_next_put();
    let (writer, env) = (fs.clone(), all.ring.sim.env(all.ring.members[6].host));
    env.spawn(Box::pin(async move {
        let _ = write(&writer, ROOT, "x", "x").await;
    }));
    all.wait(Duration::from_secs(4));
    let told = all.status(&fs);
    assert!(told.starts_with("a write has waited for the ring for "), "{told}");
    assert!(told.contains("`atoll status` says which nodes are away"), "{told}");
    all.wait(Duration::from_secs(20));
    assert!(!all.status(&fs).contains("has waited"), "it is in the spool");
}

/// `ENOSPC` alone says nothing of where there is no room.
#[test]
fn a_full_spool_is_named_with_its_limit() {
    let options = SharedOptions { max_spool_bytes: 400_000, ..SharedOptions::default() };
    let all = Setting::with(9712, options, false);
    let fs = all.mounted();
    all.run(write(&fs, ROOT, "f", "x")).expect("is written");
    all.machine.node.stop();
    all.run(write(&fs, ROOT, "fits", large(6))).expect("is spooled");
    assert_eq!(all.run(write(&fs, ROOT, "does not", large(7))).err(), Some(Errno::ENOSPC));
    let told = all.status(&fs);
    assert!(told.contains("the spool on this machine is full"), "{told}");
    assert!(told.contains("400000 bytes") && !told.contains("room on the ring"), "{told}");
}

/// `df` showed 8.0E: the size of the largest file.
#[test]
fn the_room_is_that_of_the_ring_or_of_the_spool() {
    let options = SharedOptions { max_spool_bytes: 1 << 20, ..SharedOptions::default() };
    let all = Setting::with(9713, options, false);
    let fs = all.mounted();
    let bytes = || {
        let figures = all.run(fs.statfs(ROOT)).expect("always");
        assert_eq!((figures.files, figures.files_free), (0, 0));
        let block = u64::from(figures.block_size_bytes);
        (figures.blocks * block, figures.blocks_available * block)
    };
    let ring = (ROOM.total_bytes, ROOM.available_bytes);
    all.run(write(&fs, ROOT, "before", "x")).expect("is written");
    assert_eq!(bytes(), ring);
    all.machine.node.stop();
    assert_eq!(bytes(), ring, "what was known last");
    all.run(write(&fs, ROOT, "f", large(8))).expect("is spooled");
    let (whole, left) = bytes();
    assert_eq!(whole, 1 << 20);
    assert!(left < whole - 200_000, "{left}");
    all.reconnect();
    assert_eq!(bytes(), ring);
}

async fn pending(fs: &SharedFs, name: &str) -> PendingChanges {
    let inode = fs.lookup(me(), ROOT, name.as_bytes()).await.expect("is there").attr.inode;
    let state = fs.getxattr(inode, STATE_XATTR.as_bytes()).await.expect("is told");
    fs.forget(inode, 1);
    FileState::decode(&state).expect("is one").pending
}

#[test]
fn what_of_a_file_waits_in_the_spool_is_told() {
    let all = Setting::new(9714);
    let fs = all.mounted();
    for name in ["before", "old"] {
        all.run(write(&fs, ROOT, name, "x")).expect("is written");
        all.run(read(&fs, ROOT, name)).expect("reads");
    }
    all.machine.node.stop();
    all.run(write(&fs, ROOT, "old", "y")).expect("is spooled");
    let told = all.run(pending(&fs, "old"));
    assert!(told.is_spooled && !told.name_is_spooled, "{told:?}");
    all.run(write(&fs, ROOT, "new", "y")).expect("is spooled");
    let told = all.run(pending(&fs, "new"));
    assert!(told.is_spooled && told.name_is_spooled, "{told:?}");
    let told = all.run(pending(&fs, "before"));
    assert!(!told.is_spooled && told.name_is_spooled, "{told:?}");
    all.reconnect();
    assert_eq!(all.run(pending(&fs, "new")), PendingChanges::default());
}

#[test]
fn why_the_ring_does_not_take_a_file_is_told_with_it() {
    let all = Setting::new(9715);
    let fs = all.mounted();
    all.run(write(&fs, ROOT, "f", "old")).expect("is written");
    all.machine.node.stop();
    all.run(write(&fs, ROOT, "f", "new")).expect("is spooled");
    let env = all.ring.sim.env(all.ring.members[6].host);
    let blocks: Arc<dyn Blocks> = all.ring.members[6].dht.clone();
    all.run(async {
        let begun = groups::begin_epoch(&env, &blocks, &volume(), user(1).user_id()).await;
        let (_, record) = begun.expect("begins");
        let group = |epoch| volume_group(&volume(), epoch).group_id();
        rebind_all(&all, group(0), group(record.group_epoch)).await;
    });
    all.wait(Duration::from_secs(900));
    all.reconnect();
    let told = all.run(pending(&fs, "f"));
    assert!(told.is_spooled, "{told:?}");
    assert!(told.spool_refused.is_some_and(|why| why.contains("not a member")));
}

/// What is open is not spooled before it is closed.
#[test]
fn what_is_not_closed_does_not_wait_in_the_spool() {
    let all = Setting::new(9716);
    let fs = all.mounted();
    all.run(write(&fs, ROOT, "f", "old")).expect("is written");
    all.machine.node.stop();
    all.run(async {
        let inode = fs.lookup(me(), ROOT, b"f").await.expect("is there").attr.inode;
        let handle = fs.open(me(), inode, OpenFlags::READ_WRITE).await.expect("opens").handle;
        fs.write(Writer::At(me()), inode, handle, 0, "new".into()).await.expect("writes");
        let told = pending(&fs, "f").await;
        assert!(told.is_changed && !told.is_spooled, "{told:?}");
        fs.flush(inode, handle).await.expect("is spooled");
        let told = pending(&fs, "f").await;
        assert!(!told.is_changed && told.is_spooled, "{told:?}");
    });
}

/// The story: `atoll unmount` of a mount whose spool could not be written any more returned 0, and files that programs
/// had closed were gone.
#[test]
fn what_is_in_memory_alone_is_named_and_the_root_is_not_synced_before_it_is_stored() {
    let all = Setting::new(9716);
    let fs = all.mounted();
    let docs = all.run(async {
        write(&fs, ROOT, "before", "x").await.expect("is written");
        fs.mkdir(me(), ROOT, b"docs", 0o755).await.expect("is made").attr.inode
    });
    let sync = || all.run(fs.fsyncdir(ROOT, Handle(0), false));
    sync().expect("all is on the ring");
    all.machine.node.stop();
    all.machine.disk.fails.store(true, Ordering::Relaxed);
    for (parent, name) in [(ROOT, "before"), (docs, "a\nb")] {
        assert!(all.run(write(&fs, parent, name, "in memory")).is_err());
    }
    assert_eq!(sync(), Err(Errno::EIO));
    let told = all.status(&fs);
    let named = ["2 files are in memory alone (", "before", "docs/a?b", "the spool fails"];
    assert!(named.iter().all(|part| told.contains(part)), "{told}");
    let ended = all.run(fs.end()).expect_err("nothing takes it").to_string();
    assert!(ended.contains("docs/a?b"), "{ended}");
    all.machine.disk.fails.store(false, Ordering::Relaxed);
    sync().expect("it is in the spool");
    let told = all.status(&fs);
    assert!(told.contains("files wait in the spool") && !told.contains("memory"), "{told}");
    all.machine.node.start();
    all.run(fs.end()).expect("the ring takes it");
    assert!(all.is_spool_empty(), "{:?}", all.machine.disk.names());
}

/// A status has the room of an attribute.
#[test]
fn of_many_files_in_memory_a_few_are_named() {
    let all = Setting::new(9717);
    let fs = all.mounted();
    let short = (0..20).map(|n| format!("file{n}"));
    let long = (0..20).map(|n| format!("long{n}{}", "x".repeat(200)));
    let (short, long): (Vec<String>, Vec<String>) = (short.collect(), long.collect());
    for name in short.iter().chain(&long) {
        all.run(write(&fs, ROOT, name, "x")).expect("is written");
    }
    all.machine.node.stop();
    all.machine.disk.fails.store(true, Ordering::Relaxed);
    let in_memory = |names: &[String]| {
        for name in names {
            assert!(all.run(write(&fs, ROOT, name, "in memory")).is_err());
        }
        all.status(&fs)
    };
    let told = in_memory(&short);
    assert!(told.contains("20 files are in memory alone (file"), "{told}");
    assert!(told.contains(" and 15 more)"), "{told}");
    let told = in_memory(&long);
    assert!(told.contains("40 files are in memory alone (") && told.len() < 1000, "{told}");
}
