//! Directories whose names lie in leaves, which several mounts change at the same time.

use std::collections::BTreeSet;
use std::time::Duration;

use atoll_vfs::{Caller, FileKind, FileSystem, InodeNumber, RenameFlags};
use futures_util::future::{join, join3};

use super::offline::{Setting, names};
use crate::write::spool::MemorySpool;

const ROOT: InodeNumber = InodeNumber::ROOT;
/// How many names each mount makes: together too many for the inode, so they lie in leaves.
const NAMES: u32 = 150;

fn me() -> Caller {
    Caller::default()
}

/// The first change of a directory that several mounts had changed has new leaves. If the version before was not kept as a
/// past one, since sixteen of the hour were, they counted as if they had been put, and the directory could not be
/// read any more by anybody else: 2,000 names were gone without any fault.
#[test]
fn leaves_that_are_merged_are_on_the_ring_whether_or_not_the_version_before_is_kept() {
    for seed in 9800..9803 {
        let all = Setting::new(seed);
        let fs = all.mounted();
        let mounts = [&fs, &all.others[0], &all.others[1]];
        let made = all.run(fs.mkdir(me(), ROOT, b"d", 0o755)).expect("makes").attr.inode;
        let directories = mounts.map(|fs| {
            let found = all.run(fs.lookup(me(), ROOT, b"d")).expect("is there");
            found.attr.inode
        });
        assert_eq!(directories[0], made);
        let make = async |at: usize, letter: &str| {
            for n in 0..NAMES {
                let (name, kind) = (format!("{letter}{n:04}"), FileKind::Regular);
                let (fs, directory) = (mounts[at], directories[at]);
                let made = fs.mknod(me(), directory, name.as_bytes(), kind, 0o644, 0);
                made.await.expect("is made");
            }
        };
        all.run(join3(make(0, "a"), make(1, "b"), make(2, "c")));
        let rename = async {
            for n in 0..NAMES {
                let (from, to) = (format!("b{n:04}"), format!("B{n:04}"));
                let (from, to) = (from.as_bytes(), to.as_bytes());
                let at = directories[1];
                let flags = RenameFlags::default();
                mounts[1].rename(me(), at, from, at, to, flags).await.expect("is renamed");
            }
        };
        all.run(join(make(0, "d"), rename));
        all.wait(Duration::from_secs(10));
        let named = |letter| (0..NAMES).map(move |n| format!("{letter}{n:04}"));
        let expected: Vec<String> = ["B", "a", "c", "d"].into_iter().flat_map(named).collect();
        for (fs, directory) in mounts.into_iter().zip(directories) {
            let listed = all.run(names(fs, directory)).expect("is listed");
            assert_eq!(Vec::from_iter(listed), expected, "seed {seed}");
        }
        // By one who has not seen any of it.
        let anew = all.mounted();
        let found = all.run(anew.lookup(me(), ROOT, b"d")).expect("is there").attr.inode;
        let listed = all.run(names(&anew, found)).expect("is listed");
        assert_eq!(Vec::from_iter(listed), expected, "seed {seed}");
    }
}

/// A mount merges what three have changed, as another one does, and its machine is gone before all of it is on the ring.
#[test]
fn leaves_that_a_mount_has_merged_and_not_put_have_names_nowhere() {
    let long = |letter: &str, n: u32| format!("{letter}{n:04}{}", "x".repeat(200));
    for puts in 0..6 {
        // Its spool is found again, or not.
        for is_spool_lost in [false, true] {
            let context = format!("after {puts} puts, {is_spool_lost}");
            let mut all = Setting::new(9810 + puts);
            let fs = all.mounted();
            let mounts = [&fs, &all.others[0], &all.others[1]];
            all.run(fs.mkdir(me(), ROOT, b"d", 0o755)).expect("makes");
            let directories =
                mounts.map(|fs| all.run(fs.lookup(me(), ROOT, b"d")).expect("is there").attr.inode);
            let make = async |at: usize, name: String| {
                let (fs, directory) = (mounts[at], directories[at]);
                fs.mknod(me(), directory, name.as_bytes(), FileKind::Regular, 0o644, 0).await
            };
            let make_all = async |at: usize, letter: &str| {
                for n in 0..24 {
                    make(at, long(letter, n)).await.expect("is made");
                }
            };
            // More than are kept of an hour.
            let rename_all = async |at: usize, letter: &str, to: &str| {
                for n in 0..18 {
                    let (from, to) = (long(letter, n), long(to, n));
                    let (fs, at) = (mounts[at], directories[at]);
                    let renamed = fs.rename(
                        me(),
                        at,
                        from.as_bytes(),
                        at,
                        to.as_bytes(),
                        RenameFlags::default(),
                    );
                    renamed.await.expect("is renamed");
                }
            };
            all.run(join3(make_all(0, "a"), make_all(1, "b"), make_all(2, "c")));
            all.run(join3(rename_all(0, "a", "A"), make_all(1, "e"), rename_all(2, "c", "C")));
            all.machine.node.stop_after(puts);
            let merges =
                all.run(join3(make(0, long("x", 0)), make(1, long("y", 0)), make(2, long("z", 0))));
            assert!(merges.1.is_ok() && merges.2.is_ok(), "{context}: {merges:?}");
            let named = |letter: &'static str, range: std::ops::Range<u32>| {
                range.map(move |n| long(letter, n))
            };
            let mut expected: BTreeSet<String> = named("A", 0..18)
                .chain(named("C", 0..18))
                .chain(named("a", 18..24))
                .chain(named("c", 18..24))
                .chain(named("b", 0..24))
                .chain(named("e", 0..24))
                .chain(["y", "z"].map(|letter| long(letter, 0)))
                .collect();
            drop(fs);
            if is_spool_lost {
                all.machine.disk = MemorySpool::default();
            } else if merges.0.is_ok() {
                expected.insert(long("x", 0));
            }
            all.machine.node.start();
            all.wait(Duration::from_secs(10));
            let anew = all.mounted();
            all.wait(Duration::from_secs(60));
            // Whoever changes it next takes over what is there.
            all.run(async {
                let d = all.others[0].lookup(me(), ROOT, b"d").await.expect("is there").attr.inode;
                let (name, kind) = (long("w", 0), FileKind::Regular);
                let made = all.others[0].mknod(me(), d, name.as_bytes(), kind, 0o644, 0).await;
                made.expect("is made");
            });
            expected.insert(long("w", 0));
            all.wait(Duration::from_secs(2));
            for fs in [&anew, &all.others[0], &all.others[1]] {
                let d = all.run(fs.lookup(me(), ROOT, b"d")).expect("is there").attr.inode;
                let mut listed = all.run(names(fs, d)).expect("is listed");
                // It may have reached the ring all the same.
                if is_spool_lost {
                    listed.remove(&long("x", 0));
                }
                let differ: Vec<String> = listed
                    .symmetric_difference(&expected)
                    .map(|name| name[..5].to_owned())
                    .collect();
                assert!(differ.is_empty(), "{context}: {differ:?}");
            }
        }
    }
}
