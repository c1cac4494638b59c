//! Groups whose disks are full: new directories go to others (Kosha §3.3), and no change that was decided lacks room.

use atoll_pool::disk::Disk;
use atoll_pool::disk::simulated::DiskCall;
use atoll_vfs::{Errno, OpenFlags, StatFs, Writer};
use bytes::Bytes;
use futures_util::future::join;

use super::directed::Spread;
use super::*;
use crate::workload::me;
use crate::workload::steps::{Step, find, take};

const MIB: u64 = 1 << 20;

impl Spread {
    /// The disks of a group's members have so much room from now on, and for so many files.
    fn leave_room(&self, number: usize, free_bytes: u64, files: u64) {
        for at in GROUPS[number] {
            let disk = self.machines.disk(group(number), at);
            let StatFs { block_size_bytes, blocks, blocks_free, files: all, files_free, .. } =
                self.run(disk.stat_fs()).unwrap();
            let used = (blocks - blocks_free) * u64::from(block_size_bytes);
            disk.set_capacity(used + free_bytes, all - files_free + files);
        }
    }

    pub(super) async fn group_of(&self, path: &str) -> usize {
        let inode = find(&*self.fs, path).await.unwrap();
        usize::from(GroupNumber::of(inode).number())
    }

    /// Makes a file of so many bytes.
    async fn fill(&self, path: &str, mut bytes: u64) -> Result<(), Errno> {
        take(&*self.fs, &Step::Create(path.to_owned())).await?;
        let inode = find(&*self.fs, path).await?;
        let handle = self.fs.open(me(), inode, OpenFlags::WRITE).await?.handle;
        let mut offset = 0;
        let mut done = Ok(());
        while bytes > 0 && done.is_ok() {
            let data = Bytes::from(vec![1; bytes.min(MIB) as usize]);
            let written = self.fs.write(Writer::At(me()), inode, handle, offset, data).await;
            done = match written {
                Ok(written) => {
                    offset += u64::from(written);
                    bytes -= u64::from(written);
                    Ok(())
                }
                Err(errno) => Err(errno),
            };
        }
        let synced = self.fs.fsync(inode, handle, false).await;
        self.fs.close(inode, handle).await?;
        done.and(synced)
    }
}

/// Kosha §3.3: "redirection is done for all newly created directories when the local disk space has exceeded the pre-specified
/// utilization."
#[test]
fn new_directories_and_what_is_below_go_to_other_groups_when_one_is_nearly_full() {
    let pool = Spread::new(1);
    let Spread { fs, homes, machines, .. } = &pool;
    pool.leave_room(1, 40 * MIB, 10_000);
    machines.run_for(2 * REFRESH_EVERY);
    pool.run(async {
        let mut seen = BTreeSet::new();
        for number in 0..20 {
            let path = format!("/more-{number}");
            take(&**fs, &Step::Mkdir(path.clone())).await.unwrap();
            seen.insert(pool.group_of(&path).await);
        }
        assert_eq!(seen, BTreeSet::from([0, 2]));
        // Also one that would stay with its parent, and all that is below has the room of the other group.
        let below = format!("{}/below", homes[1]);
        take(&**fs, &Step::Mkdir(below.clone())).await.unwrap();
        let other = pool.group_of(&below).await;
        assert_ne!(other, 1);
        take(&**fs, &Step::Mkdir(format!("{below}/deep"))).await.unwrap();
        assert_eq!(pool.group_of(&format!("{below}/deep")).await, other);
        pool.fill(&format!("{below}/deep/large"), 100 * MIB).await.unwrap();
        // What has its place already goes on until nothing is left.
        pool.fill(&format!("{}/small", homes[1]), MIB).await.unwrap();
        assert_eq!(pool.group_of(&format!("{}/small", homes[1])).await, 1);
        let large = format!("{}/large", homes[1]);
        assert_eq!(pool.fill(&large, 100 * MIB).await, Err(Errno::ENOSPC));
        take(&**fs, &Step::Unlink(large)).await.unwrap();
        for path in [below.clone(), format!("{below}/deep")] {
            take(&**fs, &Step::Create(format!("{path}/file"))).await.unwrap();
        }
    });
    pool.leave_room(1, 16 << 30, 100_000);
    machines.run_for(2 * REFRESH_EVERY);
    pool.run(async {
        let mut seen = BTreeSet::new();
        for number in 0..20 {
            let path = format!("/again-{number}");
            take(&**fs, &Step::Mkdir(path.clone())).await.unwrap();
            seen.insert(pool.group_of(&path).await);
        }
        assert_eq!(seen, BTreeSet::from([0, 1, 2]));
        take(&**fs, &Step::Mkdir(format!("{}/stays", homes[1]))).await.unwrap();
        assert_eq!(pool.group_of(&format!("{}/stays", homes[1])).await, 1);
    });
    machines.settle_and_compare().unwrap();
}

/// A group is full before anybody has asked it: it refuses, and others have the directory.
#[test]
fn a_directory_that_a_full_group_refuses_is_made_in_another_one() {
    let pool = Spread::new(1);
    let Spread { fs, homes, machines, .. } = &pool;
    machines.run_for(2 * REFRESH_EVERY);
    pool.leave_room(1, 0, 10_000);
    pool.run(async {
        for number in 0..20 {
            let path = format!("/more-{number}");
            take(&**fs, &Step::Mkdir(path.clone())).await.unwrap();
            assert_ne!(pool.group_of(&path).await, 1);
            take(&**fs, &Step::Create(format!("{path}/file"))).await.unwrap();
            take(&**fs, &Step::Write(format!("{path}/file"), 7)).await.unwrap();
        }
        // The name of a new directory takes room in its parent's group, and a file takes it where it lies.
        let file = format!("{}/file", homes[1]);
        assert_eq!(take(&**fs, &Step::Create(file)).await, Err(Errno::ENOSPC));
        let below = format!("{}/below", homes[1]);
        assert_eq!(take(&**fs, &Step::Mkdir(below)).await, Err(Errno::ENOSPC));
    });
    pool.leave_room(1, 16 << 30, 100_000);
    machines.settle_and_compare().unwrap();
}

/// And `df` of the root is the sum of all groups, of any other directory what its group has.
#[test]
fn the_root_has_the_room_of_all_groups_and_a_directory_that_of_its_own() {
    let pool = Spread::new(1);
    let Spread { fs, homes, machines, .. } = &pool;
    for (number, free) in [(0, 1000), (1, 200), (2, 3000)] {
        pool.leave_room(number, free * MIB, 10_000);
    }
    machines.run_for(2 * REFRESH_EVERY);
    pool.run(async {
        let available = async |path: &str| {
            let inode = find(&**fs, path).await.unwrap();
            let stat = fs.statfs(inode).await.unwrap();
            assert!(stat.blocks_available <= stat.blocks_free && stat.blocks_free < stat.blocks);
            stat.blocks_available * u64::from(stat.block_size_bytes) / MIB
        };
        // The others' less what is kept for the index; of each group the member with the least counts.
        let [first, second, third] =
            [available(&homes[0]).await, available(&homes[1]).await, available(&homes[2]).await];
        assert!((900..=1000).contains(&first), "{first}");
        assert!((150..=200).contains(&second), "{second}");
        assert!((2900..=3000).contains(&third), "{third}");
        let sum = available("/").await;
        assert!(sum.abs_diff(first + second + third) <= 3, "{sum}");
    });
    let one = machines.disk(group(2), GROUPS[2][0]);
    let StatFs { block_size_bytes, blocks, blocks_free, .. } = pool.run(one.stat_fs()).unwrap();
    let size = (blocks - blocks_free) * u64::from(block_size_bytes) + 500 * MIB;
    one.set_capacity(size, 10_000);
    machines.run_for(2 * REFRESH_EVERY);
    pool.run(async {
        let inode = find(&**fs, &homes[2]).await.unwrap();
        let stat = fs.statfs(inode).await.unwrap();
        let available = stat.blocks_available * u64::from(stat.block_size_bytes);
        assert!(available <= 500 * MIB, "{available}");
        // The size is that member's, too: how full a group is says whether directories are made in it.
        let of_group = stat.blocks * u64::from(stat.block_size_bytes);
        assert!(of_group.abs_diff(size) < MIB, "{of_group} of {size}");
    });
}

/// A disk had no room for the second change of a part: the member stopped, and the first change stayed. Now it has the room that is kept for
/// the index, as every member has that follows.
#[test]
fn a_part_that_was_decided_is_made_on_a_full_disk() {
    for at in [0, 1, 2] {
        let pool = Spread::new(1);
        let Spread { fs, homes, machines, .. } = &pool;
        let (old, new) = (format!("{}/old", homes[0]), format!("{}/new", homes[1]));
        pool.run(async {
            take(&**fs, &Step::Create(old.clone())).await.unwrap();
            take(&**fs, &Step::Create(new.clone())).await.unwrap();
        });
        machines.await_quiet().unwrap();
        // In group 1 what is replaced goes, and a referral is made.
        machines.disk(group(1), GROUPS[1][at]).fail_next(DiskCall::Make, Errno::ENOSPC);
        pool.run(async {
            let before = find(&**fs, &old).await.unwrap();
            take(&**fs, &Step::Rename(old.clone(), new.clone())).await.unwrap();
            assert_eq!(find(&**fs, &new).await, Ok(before));
        });
        machines.await_quiet().unwrap();
        assert_eq!(machines.disk(group(1), GROUPS[1][at]).faults_left(), 0);
        // When there is a reserve again.
        machines.run_for(Duration::from_secs(60));
        pool.run(take(&**fs, &Step::Mkdir(format!("{}/more", homes[1])))).unwrap();
        machines.settle_and_compare().unwrap();
    }
}

/// Clients fill a group's disk, while others give files names in its directories, and give its files names elsewhere.
#[test]
fn no_change_over_groups_stops_a_member_whose_disk_fills_up() {
    for free_kib in [200, 600, 1000] {
        let pool = Spread::new(1);
        let Spread { fs, homes, machines, .. } = &pool;
        // A thirty-second of a small disk is no room for clients: these have journals and a reserve of 48 MiB.
        pool.leave_room(1, 50 * MIB / 31 + free_kib * 1024, 10_000);
        let names = async {
            let mut refused = 0;
            for number in 0..150 {
                let (one, other) = (number % 3, (number + 1) % 3);
                let file = format!("{}/file-{number}", homes[one]);
                let moved = format!("{}/moved-{number}", homes[other]);
                let steps = [
                    Step::Create(file.clone()),
                    Step::Link(file.clone(), format!("{}/link-{number}", homes[other])),
                    Step::Rename(file, moved),
                    Step::Mkdir(format!("/dir-{number}")),
                ];
                for step in steps {
                    match take(&**fs, &step).await {
                        Ok(()) => {}
                        Err(Errno::ENOSPC) => refused += 1,
                        // What would have been renamed was not made.
                        Err(Errno::ENOENT) if refused > 0 => {}
                        Err(errno) => panic!("{step:?}: {errno}"),
                    }
                }
            }
            refused
        };
        let filling = async {
            for number in 0..40 {
                let file = format!("{}/filled-{number}", homes[1]);
                if pool.fill(&file, 64 << 10).await.is_err() {
                    return true;
                }
            }
            false
        };
        let (refused, is_full) = pool.run(join(names, filling));
        assert!(refused > 0 && is_full, "{refused}");
        pool.leave_room(1, 16 << 30, 100_000);
        machines.run_for(Duration::from_secs(60));
        machines.settle_and_compare().unwrap();
    }
}
