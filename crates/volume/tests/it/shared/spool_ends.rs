//! What no majority has taken stays in the spool: until when, if the mount ends, the member is shut out or the volume is
//! removed.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use atoll_dht::Blocks;
use atoll_key::{SignedBlock, volume_group};
use atoll_vfs::{Errno, InodeNumber};
use atoll_volume::shared::access::{groups, read_volume};

use super::mounts::{user, volume};
use super::offline::{Setting, large, read, rebind_all, write};

const ROOT: InodeNumber = InodeNumber::ROOT;
const MINUTE: Duration = Duration::from_secs(60);

fn unconfirmed(all: &Setting, is_unconfirmed: bool) {
    all.machine.node.is_unconfirmed.store(is_unconfirmed, Ordering::Relaxed);
}

/// How often something is put within ten minutes.
fn puts(all: &Setting) -> u64 {
    let puts = || all.machine.node.puts.load(Ordering::Relaxed);
    let before = puts();
    all.wait(MINUTE * 10);
    puts() - before
}

#[test]
fn a_mount_that_ends_tells_what_no_majority_has_taken() {
    for seed in 9430..9433 {
        let all = Setting::new(seed);
        let fs = all.mounted();
        all.run(write(&fs, ROOT, "f", "old")).expect("is written");
        unconfirmed(&all, true);
        all.run(write(&fs, ROOT, "f", "new")).expect("is spooled");
        all.run(write(&fs, ROOT, "g", large(5))).expect("is spooled");
        all.run(fs.end()).expect("nothing is lost");
        let told = fs.spooled().expect("it waits");
        assert!(told.files >= 2 && told.why.contains("offline"), "seed {seed}: {told:?}");
        drop(fs);
        assert!(!all.is_spool_empty(), "seed {seed}");
        // The next mount sends no less.
        let fs = all.mounted();
        all.wait(MINUTE * 8);
        all.run(fs.end()).expect("nothing is lost");
        assert!(fs.spooled().is_some() && !all.is_spool_empty(), "seed {seed}");
        drop(fs);
        unconfirmed(&all, false);
        let fs = all.mounted();
        all.wait(MINUTE * 2);
        all.run(fs.end()).expect("nothing is lost");
        assert_eq!((fs.spooled(), all.is_spool_empty()), (None, true), "seed {seed}");
        assert_eq!(all.run(read(&all.others[0], ROOT, "f")), Ok("new".into()), "seed {seed}");
        assert_eq!(all.run(read(&all.others[0], ROOT, "g")), Ok(large(5)), "seed {seed}");
    }
}

/// The owner has bound it anew: what the ring has is no more the member's to put.
#[test]
fn what_no_majority_has_taken_of_a_member_who_is_shut_out_is_not_put_for_ever() {
    for is_down in [false, true] {
        let all = Setting::new(9440);
        let fs = all.mounted();
        // Nothing has to be on the ring before the version that replaces these contents.
        all.run(write(&fs, ROOT, "f", "")).expect("is written");
        unconfirmed(&all, true);
        all.run(write(&fs, ROOT, "f", "new")).expect("is spooled");
        if is_down {
            all.machine.node.stop();
        }
        let env = all.ring.sim.env(all.ring.members[6].host);
        let blocks: Arc<dyn Blocks> = all.ring.members[6].dht.clone();
        all.run(async {
            let begun = groups::begin_epoch(&env, &blocks, &volume(), user(1).user_id()).await;
            let (_, record) = begun.expect("begins");
            let group = |epoch| volume_group(&volume(), epoch).group_id();
            rebind_all(&all, group(0), group(record.group_epoch)).await;
        });
        all.wait(MINUTE * 10);
        unconfirmed(&all, false);
        all.reconnect();
        let theirs = &all.others[0];
        assert_eq!(all.run(read(theirs, ROOT, "f")), Ok("new".into()), "{is_down}");
        let puts = puts(&all);
        assert!(puts <= 30, "{is_down}: {puts} puts within ten minutes, {}", all.status(&fs));
        assert!(all.is_spool_empty(), "{is_down}: {}", all.status(&fs));
        assert_eq!(all.run(write(&fs, ROOT, "h", "x")), Err(Errno::EACCES), "{is_down}");
        all.run(fs.end()).expect("nothing is lost");
        assert_eq!(fs.spooled(), None, "{is_down}");
    }
}

#[test]
fn the_spool_of_a_removed_volume_ends() {
    for is_unconfirmed in [false, true] {
        let all = Setting::new(9450);
        let fs = all.mounted();
        all.run(write(&fs, ROOT, "f", "old")).expect("is written");
        match is_unconfirmed {
            true => unconfirmed(&all, true),
            false => all.machine.node.stop(),
        }
        all.run(write(&fs, ROOT, "f", "new")).expect("is spooled");
        all.run(write(&fs, ROOT, "g", large(5))).expect("is spooled");
        let blocks: Arc<dyn Blocks> = all.ring.members[6].dht.clone();
        all.run(async {
            let read = read_volume(&blocks, volume().volume_id()).await.expect("is read");
            let version = read.expect("there").0.version;
            let tombstone = SignedBlock::sign_tombstone(&volume(), b"", version + 1);
            let removed = blocks.remove_blocks(vec![tombstone.into()]).await;
            assert!(removed.iter().all(Result::is_ok), "{removed:?}");
        });
        all.wait(MINUTE * 10);
        unconfirmed(&all, false);
        all.reconnect();
        let puts = puts(&all);
        assert!(puts <= 30, "{is_unconfirmed}: {puts} puts within ten minutes");
        assert!(all.is_spool_empty(), "{is_unconfirmed}: {}", all.status(&fs));
        all.run(fs.end()).expect("nothing waits");
        assert_eq!(fs.spooled(), None, "{is_unconfirmed}");
    }
}
