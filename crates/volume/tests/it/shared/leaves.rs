//! Directories whose names lie in leaves, which several mounts change at the same time.

use std::time::Duration;

use atoll_vfs::{Caller, FileKind, FileSystem, InodeNumber, RenameFlags};
use futures_util::future::{join, join3};

use super::offline::{Setting, names};

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
