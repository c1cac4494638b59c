//! Figure 2 on the disk: what happens to the blocks of a transparent file.

use std::collections::BTreeMap;
use std::sync::Arc;

use atoll_env::TokioRuntime;
use atoll_tfs::device::{Device, FaultyDevice};
use atoll_tfs::fs::{MountOptions, StateCounts, Tfs};
use atoll_tfs::mkfs::mkfs;
use atoll_tfs::states::BlockState;
use atoll_vfs::{Errno, FileSystem};

use crate::calls::{ME, ROOT, contribution, fill, owned, read, write};
use crate::e2fsck::assert_clean;
use crate::mkfs::options;

/// The state of every block.
fn states(tfs: &Tfs) -> BTreeMap<u32, BlockState> {
    let mut states = BTreeMap::new();
    for group in 0..tfs.usage().unwrap().groups {
        let first = tfs.first_block_of_group(group);
        for (run, state) in tfs.group_bitmaps(group).unwrap().runs() {
            states.extend(run.map(|bit| (first + bit, state)));
        }
    }
    states
}

/// The counts in the summaries are those of the bitmaps.
fn assert_counted(tfs: &Tfs) {
    let usage = tfs.usage().unwrap();
    let mut counts = StateCounts::default();
    states(tfs).values().for_each(|state| counts.add(*state, 1));
    assert_eq!(counts.transparent, usage.transparent_blocks);
    assert_eq!(counts.overwritten(), usage.overwritten_blocks);
}

#[tokio::test]
async fn blocks_go_through_the_states_of_figure_2() {
    let device = FaultyDevice::new(16 << 20, 1);
    mkfs(&(Arc::new(device.clone()) as Arc<dyn Device>), &options(1024)).unwrap();
    let env = Arc::new(TokioRuntime::current());
    let options = MountOptions { background: false, ..MountOptions::default() };
    let (tfs, _) = Tfs::mount(env, Arc::new(device.clone()), &options).unwrap();
    let parent = contribution(&tfs).await;
    let count = fill(&tfs, parent, 50_000).await;
    let full = states(&tfs);
    assert_counted(&tfs);

    // "If the block was previously used by transparent data, the file system marks these
    // blocks as allocated-and-overwritten" (§3.1).
    write(&tfs, ROOT, "ordinary", &owned(1, 2_000_000)).await.unwrap();
    let written = states(&tfs);
    assert_counted(&tfs);
    let taken: Vec<u32> = full.keys().copied().filter(|b| full[b] != written[b]).collect();
    assert!(taken.len() >= 2_000_000 / 1024);
    for block in &taken {
        let expected = match full[block] {
            BlockState::Free => BlockState::Allocated,
            BlockState::Transparent => BlockState::AllocatedAndOverwritten,
            state => panic!("{block} was {state:?} and was given out"),
        };
        assert_eq!(written[block], expected, "{block}");
    }

    // The ordinary file goes; transparent data may be written neither to what is transparent
    // nor to what was overwritten.
    tfs.unlink(ME, ROOT, b"ordinary").await.unwrap();
    tfs.sync().await.unwrap();
    let deleted = states(&tfs);
    assert_counted(&tfs);
    for block in &taken {
        let expected = match written[block] {
            BlockState::AllocatedAndOverwritten => BlockState::FreeAndOverwritten,
            _ => BlockState::Free,
        };
        assert_eq!(deleted[block], expected, "{block}");
    }
    let free = deleted.values().filter(|state| **state == BlockState::Free).count();
    let more = (free + 10) * 1024;
    assert_eq!(write(&tfs, parent, "more", &owned(9, more)).await, Err(Errno::ENOSPC));
    for (block, state) in states(&tfs) {
        let (before, now) = (deleted[&block], state);
        assert!(now == before || before == BlockState::Free, "{block}: {before:?} to {now:?}");
    }
    tfs.unlink(ME, parent, b"more").await.unwrap();

    // "TFS then deletes the inode and directory entry for the file, and marks all of the blocks
    // of the file as free, or allocated" (§3.1).
    for n in 0..count {
        let _ = read(&tfs, parent, &format!("t{n}")).await;
    }
    let opened = states(&tfs);
    assert_counted(&tfs);
    for (block, state) in &opened {
        match deleted[block] {
            BlockState::FreeAndOverwritten => assert_eq!(*state, BlockState::Free, "{block}"),
            BlockState::Allocated => assert_eq!(*state, BlockState::Allocated, "{block}"),
            _ => {}
        }
    }
    assert!(opened.values().all(|state| *state != BlockState::AllocatedAndOverwritten));
    // Now there is room for transparent data again.
    write(&tfs, parent, "again", &owned(9, 2_000_000)).await.unwrap();
    assert_eq!(read(&tfs, parent, "again").await.unwrap(), owned(9, 2_000_000));
    tfs.unmount().unwrap();
    assert_clean(&device.bytes(), "all states");
}
