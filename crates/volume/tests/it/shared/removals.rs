//! Names that are removed: gone on their mount at once, on the ring a moment later.

use std::collections::BTreeSet;
use std::time::Duration;

use atoll_sim::{Latency, SimConfig};
use atoll_vfs::{Caller, Errno, FileKind, FileSystem, InodeNumber, RenameFlags};
use atoll_volume::shared::{Consistency, SharedFs, SharedOptions};
use bytes::Bytes;
use futures_util::future::join;

use super::locks::Mounts;

const ROOT: InodeNumber = InodeNumber::ROOT;
const ROUND_TRIP: Duration = Duration::from_millis(100);

fn me() -> Caller {
    Caller::default()
}

fn name(n: usize) -> Bytes {
    // Long, so that some hundred names need leaves.
    format!("{n:04} {}", "x".repeat(100)).into()
}

fn at_distance(seed: u64) -> SimConfig {
    SimConfig { seed, latency: Latency::Flat(ROUND_TRIP / 2), ..SimConfig::default() }
}

fn mounts(seed: u64, count: usize) -> Mounts {
    Mounts::with(at_distance(seed), 7, count, Consistency::CloseToOpen)
}

async fn make(fs: &SharedFs, parent: InodeNumber, names: impl Iterator<Item = usize>) {
    for n in names {
        let made = fs.mknod(me(), parent, &name(n), FileKind::Regular, 0o644, 0);
        made.await.expect("is made");
    }
}

async fn names(fs: &SharedFs, parent: InodeNumber) -> BTreeSet<usize> {
    let opened = fs.opendir(me(), parent).await.expect("opens");
    let listed = fs.readdir(parent, opened.handle, 0, 10_000, false).await.expect("lists");
    fs.closedir(parent, opened.handle).await.expect("closes");
    let number = |name: &[u8]| std::str::from_utf8(&name[..4]).expect("ours").parse();
    listed.into_iter().map(|entry| number(&entry.name).expect("ours")).collect()
}

/// The directory has leaves; other calls change it while names that are gone are not on the ring yet.
#[test]
fn many_names_are_removed_in_few_round_trips_and_nothing_else_is_lost() {
    let all = Mounts::with_options(at_distance(9200), 7, 2, SharedOptions::default());
    let [one, two] = [&all.mounts[0], &all.mounts[1]];
    all.run(make(one, ROOT, 0..300));
    let start = all.ring.sim.now();
    all.run(async {
        for n in 0..200 {
            one.unlink(me(), ROOT, &name(n)).await.expect("is removed");
            assert_eq!(one.lookup(me(), ROOT, &name(n)).await.err(), Some(Errno::ENOENT), "{n}");
            match n {
                50 => drop(one.mkdir(me(), ROOT, &name(1000), 0o755).await.expect("is made")),
                100 => one
                    .rename(me(), ROOT, &name(299), ROOT, &name(1001), RenameFlags::default())
                    .await
                    .expect("is renamed"),
                150 => make(one, ROOT, std::iter::once(7)).await,
                _ => {}
            }
        }
        one.sync().await.expect("is on the ring");
    });
    let round_trips = all.ring.sim.now().since(start).as_nanos() / ROUND_TRIP.as_nanos();
    assert!(round_trips < 50, "{round_trips}");
    let left: BTreeSet<usize> = (200..299).chain([7, 1000, 1001]).collect();
    // Names may be a second old.
    all.ring.sim.run_for(Duration::from_secs(1));
    for fs in [one, two] {
        assert_eq!(all.run(names(fs, ROOT)), left);
    }
}

/// What both do at the same time is kept, and what one removes stays removed.
#[test]
fn a_mount_removes_names_while_another_adds_some() {
    for seed in 0..4 {
        let all = mounts(9210 + seed, 2);
        let [one, two] = [&all.mounts[0], &all.mounts[1]];
        all.run(make(one, ROOT, 0..40));
        let removes = async {
            for n in 0..40 {
                one.unlink(me(), ROOT, &name(n)).await.expect("is removed");
            }
            one.sync().await.expect("is on the ring");
        };
        all.run(join(removes, make(two, ROOT, 100..110)));
        for fs in [one, two] {
            assert_eq!(all.run(names(fs, ROOT)), (100..110).collect(), "seed {seed}");
        }
    }
}

/// The mount is cut off while it removes names, and comes back.
#[test]
fn names_that_the_ring_has_not_heard_of_are_told_and_go_once_it_is_there_again() {
    let all = Mounts::with_options(at_distance(9220), 7, 2, SharedOptions::default());
    let [one, two] = [&all.mounts[0], &all.mounts[1]];
    all.run(make(one, ROOT, 0..10));
    all.ring.sim.partition(&[&all.hosts(0..1)]);
    // The directory was read less than a second ago.
    all.run(one.unlink(me(), ROOT, &name(3))).expect("is removed");
    assert!(all.run(one.sync()).is_err(), "the ring has not heard of it");
    let status = all.run(one.getxattr(ROOT, b"user.atoll.status")).expect("a text");
    assert!(status.starts_with(b"1 file with "), "{status:?}");
    assert_eq!(all.run(names(two, ROOT)).len(), 10);
    all.ring.sim.heal();
    all.ring.sim.run_for(Duration::from_secs(120));
    assert_eq!(all.run(names(two, ROOT)).len(), 9);
    all.run(one.sync()).expect("is on the ring");
    assert_eq!(all.run(one.getxattr(ROOT, b"user.atoll.status")).as_deref(), Ok(&b"ok"[..]));
}

/// A directory that another mount removes at the same time.
#[test]
fn a_directory_that_is_emptied_here_and_removed_there_goes() {
    for seed in 0..4 {
        let all = mounts(9230 + seed, 2);
        let [one, two] = [&all.mounts[0], &all.mounts[1]];
        let made = all.run(one.mkdir(me(), ROOT, &name(0), 0o755)).expect("is made").attr.inode;
        all.run(make(one, made, 0..5));
        all.run(async {
            for n in 0..5 {
                one.unlink(me(), made, &name(n)).await.expect("is removed");
            }
            one.fsyncdir(made, atoll_vfs::Handle(0), false).await.expect("is on the ring");
            assert_eq!(one.rmdir(me(), ROOT, &name(0)).await, Ok(()));
            one.sync().await.expect("nothing is left");
        });
        assert!(all.run(names(two, ROOT)).is_empty(), "seed {seed}");
    }
}

/// First the name, then the inode: whenever the mount dies, what still has a name is there.
#[test]
fn a_mount_that_dies_while_it_removes_leaves_no_name_without_a_file() {
    for seed in 0..8 {
        let all = Mounts::with_options(at_distance(9240 + seed), 7, 2, SharedOptions::default());
        let [one, two] = [&all.mounts[0], &all.mounts[1]];
        all.run(make(one, ROOT, 0..60));
        let env = all.ring.sim.outside();
        let pause = |ms| atoll_env::sleep(&*env, Duration::from_millis(ms));
        let removes = async {
            for n in 0..60 {
                one.unlink(me(), ROOT, &name(n)).await.expect("is removed");
                pause(env.random_u64() % 20).await;
            }
        };
        let removing = std::pin::pin!(removes);
        let died = pause(100 + env.random_u64() % 500);
        all.run(futures_util::future::select(removing, died));
        all.ring.sim.crash_silently(all.hosts(0..1)[0]);
        all.ring.sim.run_for(Duration::from_secs(60));
        let left = all.run(names(two, ROOT));
        for n in &left {
            let found = all.run(two.lookup(me(), ROOT, &name(*n)));
            assert!(found.is_ok(), "seed {seed}: {n} of {}: {found:?}", left.len());
        }
    }
}

/// What another mount has given a new name stays, although this one shows the old name for a second more: a log that
/// is rotated, an editor's backup, a link.
#[test]
fn a_file_that_has_got_another_name_elsewhere_is_not_removed_with_its_old_one() {
    for how in ["rename", "link", "backup", "at once"] {
        let all = Mounts::with_options(at_distance(9260), 7, 2, SharedOptions::default());
        let [one, two] = [&all.mounts[0], &all.mounts[1]];
        all.run(make(one, ROOT, 1..2));
        all.ring.sim.run_for(Duration::from_secs(2));
        let inode = all.run(two.lookup(me(), ROOT, &name(1))).expect("there").attr.inode;
        all.run(one.lookup(me(), ROOT, &name(1))).expect("there");
        let renamed = || two.rename(me(), ROOT, &name(1), ROOT, &name(2), RenameFlags::default());
        let removed = || one.unlink(me(), ROOT, &name(1));
        match how {
            "link" => drop(all.run(two.link(me(), inode, ROOT, &name(2))).expect("is linked")),
            "at once" => drop(all.run(join(renamed(), removed()))),
            _ => all.run(renamed()).expect("is renamed"),
        }
        if how == "backup" {
            all.run(make(two, ROOT, 1..2));
        }
        if how != "at once" {
            all.run(removed()).expect("it is shown still");
        }
        all.run(one.sync()).expect("is on the ring");
        all.ring.sim.run_for(Duration::from_secs(30));
        for fs in [one, two] {
            for n in all.run(names(fs, ROOT)) {
                let found = all.run(fs.lookup(me(), ROOT, &name(n)));
                assert!(found.is_ok(), "{how}: {n}: {found:?}");
            }
        }
        if how != "at once" {
            let left = all.run(names(two, ROOT));
            assert!(left.contains(&2), "{how}: {left:?}");
        }
    }
}
