//! Groups whose disks are full: new directories go to others (Kosha §3.3), and no change that was decided lacks room.

use atoll_pool::disk::Disk;
use atoll_vfs::{Errno, OpenFlags, StatFs, Writer};
use bytes::Bytes;

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

    async fn group_of(&self, path: &str) -> usize {
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
    one.set_capacity((blocks - blocks_free) * u64::from(block_size_bytes) + 500 * MIB, 10_000);
    machines.run_for(2 * REFRESH_EVERY);
    pool.run(async {
        let inode = find(&**fs, &homes[2]).await.unwrap();
        let stat = fs.statfs(inode).await.unwrap();
        let available = stat.blocks_available * u64::from(stat.block_size_bytes);
        assert!(available <= 500 * MIB, "{available}");
    });
}
