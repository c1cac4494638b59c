//! One change over several groups after the other.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};

use atoll_vfs::{Errno, FileLock, LockKind, LockOwner, LockRange, OpenFlags, Writer};
use bytes::Bytes;

use super::*;
use crate::workload::me;
use crate::workload::steps::{Step, find, take};

/// A pool in which these directories of the root lie in groups 0, 1 and 2.
pub(super) struct Spread {
    _end: ShutDown,
    pub(super) machines: Machines,
    pub(super) fs: Arc<dyn FileSystem>,
    pub(super) homes: [String; 3],
}

impl Spread {
    pub(super) fn new(level: u8) -> Spread {
        let machines = Machines::new(5);
        let (fs, homes) = machines
            .sim
            .clone()
            .block_on(LONG, async {
                machines.make(level).await;
                let fs = machines.mount(0).await;
                let mut homes: [Option<String>; 3] = [None, None, None];
                for number in 0..100 {
                    if homes.iter().all(Option::is_some) {
                        break;
                    }
                    let path = format!("/home-{number}");
                    take(&*fs, &Step::Mkdir(path.clone())).await.unwrap();
                    let inode = find(&*fs, &path).await.unwrap();
                    let number = usize::from(GroupNumber::of(inode).number());
                    if homes[number].is_none() {
                        homes[number] = Some(path);
                    } else {
                        take(&*fs, &Step::Rmdir(path)).await.unwrap();
                    }
                }
                (fs, homes.map(|home| home.expect("directories are spread over all groups")))
            })
            .unwrap();
        Spread { _end: ShutDown(machines.sim.clone()), machines, fs, homes }
    }

    pub(super) fn run<T>(&self, work: impl Future<Output = T>) -> T {
        self.machines.sim.block_on(LONG, work).unwrap()
    }
}

/// Kosha §3.1: directories of the first level are spread; what is in them stays with them. Nothing moves when names do.
#[test]
fn directories_are_spread_and_files_stay_where_they_were_made_whatever_their_names() {
    let pool = Spread::new(1);
    let Spread { fs, homes, .. } = &pool;
    pool.run(async {
        for (number, home) in homes.iter().enumerate() {
            for name in ["file", "second"] {
                let path = format!("{home}/{name}");
                take(&**fs, &Step::Create(path.clone())).await.unwrap();
                take(&**fs, &Step::Write(path.clone(), number as u8 + 1)).await.unwrap();
                let inode = find(&**fs, &path).await.unwrap();
                assert_eq!(GroupNumber::of(inode), group(number));
            }
            take(&**fs, &Step::Mkdir(format!("{home}/dir"))).await.unwrap();
            take(&**fs, &Step::Create(format!("{home}/dir/below"))).await.unwrap();
        }
        let mut numbers = BTreeSet::new();
        for (one, other) in [(0, 1), (1, 2), (2, 0)] {
            let (from, to) = (format!("{}/file", homes[one]), format!("{}/got", homes[other]));
            let before = find(&**fs, &from).await.unwrap();
            take(&**fs, &Step::Rename(from.clone(), to.clone())).await.unwrap();
            assert_eq!(find(&**fs, &to).await, Ok(before));
            assert!(find(&**fs, &from).await.is_err());
            numbers.insert(before);
            let (from, to) = (format!("{}/dir", homes[one]), format!("{}/gotten", homes[other]));
            take(&**fs, &Step::Rename(from, to.clone())).await.unwrap();
            assert!(find(&**fs, &format!("{to}/below")).await.is_ok());
        }
        // Onwards, and back home.
        for number in [0, 1, 2] {
            let (here, next) = (&homes[(number + 1) % 3], &homes[(number + 2) % 3]);
            take(&**fs, &Step::Rename(format!("{here}/got"), format!("{next}/on"))).await.unwrap();
        }
        for number in [0, 1, 2] {
            let (there, home) = (&homes[(number + 2) % 3], &homes[number]);
            let back = format!("{home}/file");
            take(&**fs, &Step::Rename(format!("{there}/on"), back.clone())).await.unwrap();
            assert!(numbers.contains(&find(&**fs, &back).await.unwrap()));
        }
    });
    pool.machines.settle_and_compare().unwrap();
}

#[test]
fn names_of_one_file_in_several_groups_are_links_of_it() {
    let pool = Spread::new(1);
    let Spread { fs, homes, .. } = &pool;
    pool.run(async {
        let file = format!("{}/file", homes[1]);
        take(&**fs, &Step::Create(file.clone())).await.unwrap();
        let inode = find(&**fs, &file).await.unwrap();
        let nlink = async || fs.getattr(inode, None).await.unwrap().attr.nlink;
        for (count, home) in [(2, &homes[0]), (3, &homes[2]), (4, &homes[1])] {
            let link = format!("{home}/link");
            take(&**fs, &Step::Link(file.clone(), link.clone())).await.unwrap();
            assert_eq!((find(&**fs, &link).await, nlink().await), (Ok(inode), count));
        }
        take(&**fs, &Step::Unlink(file)).await.unwrap();
        // Two names of one file: nothing happens.
        let rename = Step::Rename(format!("{}/link", homes[0]), format!("{}/link", homes[2]));
        take(&**fs, &rename).await.unwrap();
        assert_eq!(nlink().await, 3);
        for home in homes {
            take(&**fs, &Step::Unlink(format!("{home}/link"))).await.unwrap();
        }
        assert!(find(&**fs, &format!("{}/link", homes[1])).await.is_err());
    });
    pool.machines.settle_and_compare().unwrap();
}

/// A program that took away every name of a file but one, as `st_nlink` had it, took the last one: the group of the file had not made
/// its part of the change yet, and said how many names there had been before.
#[test]
fn the_number_of_names_is_right_as_soon_as_a_change_is_answered() {
    let pool = Spread::new(1);
    let Spread { fs, homes, .. } = &pool;
    pool.run(async {
        let (file, link) = (format!("{}/file", homes[1]), format!("{}/link", homes[0]));
        take(&**fs, &Step::Create(file.clone())).await.unwrap();
        let inode = find(&**fs, &file).await.unwrap();
        let nlink = async || fs.getattr(inode, None).await.unwrap().attr.nlink;
        for round in 0..10 {
            take(&**fs, &Step::Link(file.clone(), link.clone())).await.unwrap();
            assert_eq!(nlink().await, 2, "round {round}");
            take(&**fs, &Step::Unlink(link.clone())).await.unwrap();
            assert_eq!(nlink().await, 1, "round {round}");
        }
    });
    pool.machines.settle_and_compare().unwrap();
}

/// A primary dies at every moment of a change over two groups: that of the group which coordinates, or of the one that prepares. Neither
/// makes a part that is not decided.
#[test]
fn a_change_over_groups_is_made_by_both_or_none_whenever_a_primary_of_one_dies() {
    let pool = Spread::new(1);
    let Spread { fs, homes, machines, .. } = &pool;
    let file = format!("{}/file", homes[1]);
    pool.run(take(&**fs, &Step::Create(file.clone()))).unwrap();
    for (millis, dies) in (1..46).step_by(3).flat_map(|millis| [(millis, 0), (millis, 1)]) {
        machines.await_quiet().unwrap();
        let primary = machines.primary(group(dies)).expect("it is served");
        let fs = pool.run(machines.mount((primary + 1) % MACHINES));
        let link = Step::Link(file.clone(), format!("{}/{millis}-{dies}", homes[0]));
        let done = Arc::new(AtomicBool::new(false));
        let linked = done.clone();
        machines.sim.env(machines.clients).spawn(Box::pin(async move {
            // Whether it is made does not matter.
            let _ = take(&*fs, &link).await;
            linked.store(true, Ordering::SeqCst);
        }));
        machines.sim.run_for(Duration::from_millis(millis));
        machines.kill(primary, InFlight::Lost);
        machines.run_for(Duration::from_secs(2));
        machines.restart(primary);
        while !done.load(Ordering::SeqCst) {
            machines.run_for(Duration::from_millis(100));
        }
    }
    machines.settle_and_compare().unwrap();
}

/// No rename puts a directory into itself, however many groups are in between.
#[test]
fn directories_of_several_groups_make_no_loop() {
    let pool = Spread::new(1);
    let Spread { fs, homes, .. } = &pool;
    pool.run(async {
        let [first, second, third] = homes;
        take(&**fs, &Step::Rename(second.clone(), format!("{first}/b"))).await.unwrap();
        take(&**fs, &Step::Rename(third.clone(), format!("{first}/b/c"))).await.unwrap();
        take(&**fs, &Step::Mkdir(format!("{first}/b/c/d"))).await.unwrap();
        let looping = [
            (first.clone(), format!("{first}/x")),
            (first.clone(), format!("{first}/b/c/d/x")),
            (format!("{first}/b"), format!("{first}/b/c/x")),
        ];
        for (from, to) in looping {
            let taken = take(&**fs, &Step::Rename(from.clone(), to.clone())).await;
            assert_eq!(taken, Err(Errno::EINVAL), "{from} to {to}");
        }
        let parent = find(&**fs, &format!("{first}/b/c")).await.unwrap();
        let above = fs.parent(me(), parent).await.unwrap().attr.inode;
        assert_eq!(Ok(above), find(&**fs, &format!("{first}/b")).await);
    });
    pool.machines.settle_and_compare().unwrap();
}

/// A lock is its file's group's, whatever directory the file was found in.
#[test]
fn mounts_lock_each_other_out_of_files_of_every_group() {
    let pool = Spread::new(1);
    let Spread { fs, homes, machines, .. } = &pool;
    pool.run(async {
        let other = machines.mount(2).await;
        let (kind, range) = (LockKind::Exclusive, LockRange::WHOLE);
        let wanted = FileLock { kind, range, pid: 0, through: None };
        let (here, there) = (LockOwner(1), LockOwner(2));
        for (number, home) in homes.iter().enumerate() {
            let (file, moved) =
                (format!("{home}/locked"), format!("{}/moved", homes[(number + 1) % 3]));
            take(&**fs, &Step::Create(file.clone())).await.unwrap();
            let inode = find(&**fs, &file).await.unwrap();
            let locks = fs.locks().expect("a pool has locks");
            locks.lock(inode, here, wanted, false).await.unwrap();
            take(&**fs, &Step::Rename(file, moved.clone())).await.unwrap();
            assert_eq!(find(&*other, &moved).await, Ok(inode));
            let others = other.locks().expect("a pool has locks");
            let refused = others.lock(inode, there, wanted, false).await;
            assert_eq!(refused, Err(Errno::EAGAIN), "{moved}");
            locks.unlock(inode, here, LockRange::WHOLE).await.unwrap();
            others.lock(inode, there, wanted, false).await.unwrap();
            others.unlock(inode, there, LockRange::WHOLE).await.unwrap();
        }
    });
    pool.machines.settle_and_compare().unwrap();
}

/// Close-to-open does not end with a name: an open file lives on when it is renamed over groups, and when its last name goes there.
#[test]
fn an_open_file_lives_on_whatever_group_has_its_last_name() {
    let pool = Spread::new(1);
    let Spread { fs, homes, .. } = &pool;
    pool.run(async {
        let (file, moved) = (format!("{}/open", homes[1]), format!("{}/open", homes[2]));
        take(&**fs, &Step::Create(file.clone())).await.unwrap();
        let home = find(&**fs, &homes[1]).await.unwrap();
        let inode = fs.lookup(me(), home, b"open").await.unwrap().attr.inode;
        let flags = OpenFlags::READ_WRITE;
        let handle = fs.open(me(), inode, flags).await.unwrap().handle;
        let writer = Writer::At(me());
        let first = Bytes::from_static(b"before");
        fs.write(writer, inode, handle, 0, first).await.unwrap();
        take(&**fs, &Step::Rename(file, moved.clone())).await.unwrap();
        take(&**fs, &Step::Unlink(moved.clone())).await.unwrap();
        assert!(find(&**fs, &moved).await.is_err());
        let second = Bytes::from_static(b" and after");
        fs.write(writer, inode, handle, 6, second).await.unwrap();
        let read = fs.read(inode, handle, 0, 100).await.unwrap();
        assert_eq!(read, &b"before and after"[..]);
        fs.close(inode, handle).await.unwrap();
        fs.forget(inode, 1);
    });
    pool.machines.settle_and_compare().unwrap();
}

/// Kosha §3.2: "a system-wide parameter, the distribution level, [...] dictates how many levels of subdirectories will be distributed to
/// multiple nodes"; all lower ones are "stored on the same node as the node on which their parent directory is stored".
#[test]
fn directories_deeper_than_the_level_stay_with_their_parents() {
    for level in [1, 2, 4] {
        let pool = Spread::new(level);
        let Spread { fs, homes, .. } = &pool;
        // Makes directories in one, and says in which groups they are.
        let fill = async |parent: &str| {
            let mut made = BTreeMap::new();
            for number in 0..8 {
                let path = format!("{parent}/in-{number}");
                take(&**fs, &Step::Mkdir(path.clone())).await.unwrap();
                made.entry(pool.group_of(&path).await).or_insert(path);
            }
            made
        };
        pool.run(async {
            let mut parents: BTreeMap<usize, String> = homes.iter().cloned().enumerate().collect();
            for depth in 2..7 {
                let mut next = BTreeMap::new();
                for (group, parent) in &parents {
                    let made = fill(parent).await;
                    let stays = made.keys().eq([group]);
                    assert_eq!(stays, depth > level, "level {level}: {parent} {made:?}");
                    next.extend(made);
                }
                parents = next;
            }
            // One that is moved lies as deep as it lies then.
            let below = format!("{}/a/b/c/d", homes[0]);
            for end in [2, 4, 6, 8] {
                let path = &below[..below.len() - 8 + end];
                take(&**fs, &Step::Mkdir(path.to_owned())).await.unwrap();
            }
            for (deep, shallow) in [(&below, &homes[0]), (&homes[2], &homes[0])] {
                let moved = format!("{deep}/moved");
                let first = format!("/moved-{}", deep.len());
                take(&**fs, &Step::Mkdir(first.clone())).await.unwrap();
                let group = pool.group_of(&first).await;
                take(&**fs, &Step::Rename(first, moved.clone())).await.unwrap();
                let stays = fill(&moved).await.keys().eq([&group]);
                assert_eq!(stays, deep == &below || level < 3, "level {level}: {moved}");
                let up = format!("{shallow}/up-{}", deep.len());
                take(&**fs, &Step::Rename(moved, up.clone())).await.unwrap();
                take(&**fs, &Step::Mkdir(format!("{up}/further"))).await.unwrap();
                let further = fill(&format!("{up}/further"))
                    .await
                    .keys()
                    .eq([&pool.group_of(&format!("{up}/further")).await]);
                assert_eq!(further, level < 4, "level {level}: {up}");
            }
        });
        pool.machines.settle_and_compare().unwrap();
    }
}
