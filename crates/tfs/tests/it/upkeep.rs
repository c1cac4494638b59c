//! What a mounted file system does by itself (commits, cleaning, choosing chunks to avoid),
//! and what it does when space or inodes run short.

use std::sync::Arc;
use std::time::Duration;

use atoll_env::TokioRuntime;
use atoll_tfs::device::{Device, FaultyDevice};
use atoll_tfs::fs::{MountOptions, Tfs};
use atoll_tfs::mkfs::{MkfsOptions, mkfs};
use atoll_vfs::{Errno, FileSystem, FileTime, OpenFlags, SetAttr, SetTime};

use crate::calls::{ME, ROOT, contribution, fill, owned, read, write};
use crate::e2fsck::assert_clean;
use crate::mkfs::options;

fn made(mib: usize, options: &MkfsOptions) -> FaultyDevice {
    let device = FaultyDevice::new(mib << 20, 1);
    mkfs(&(Arc::new(device.clone()) as Arc<dyn Device>), options).unwrap();
    device
}

fn mount(device: &FaultyDevice) -> Tfs {
    let env = Arc::new(TokioRuntime::current());
    Tfs::mount(env, Arc::new(device.clone()), &MountOptions::default()).unwrap().0
}

async fn pass(secs: u64) {
    atoll_env::sleep(&TokioRuntime::current(), Duration::from_secs(secs)).await;
}

#[tokio::test(start_paused = true)]
async fn what_was_written_is_durable_after_a_second_without_a_sync() {
    let device = made(16, &options(1024));
    let tfs = mount(&device);
    write(&tfs, ROOT, "early", &owned(1, 50_000)).await.unwrap();
    pass(2).await;
    write(&tfs, ROOT, "late", &owned(2, 50_000)).await.unwrap();
    drop(tfs);
    device.power_cycle();
    let tfs = mount(&device);
    assert_eq!(read(&tfs, ROOT, "early").await.unwrap(), owned(1, 50_000));
    assert_eq!(read(&tfs, ROOT, "late").await, Err(Errno::ENOENT));
    // Nothing happens on the disk while nothing changes.
    pass(60).await;
    let operations = device.operations();
    pass(300).await;
    assert_eq!(device.operations(), operations);
    tfs.unmount().unwrap();
    pass(60).await;
    assert_clean(&device.bytes(), "unmounted");
}

#[tokio::test(start_paused = true)]
async fn reads_change_access_times_unless_that_was_declined() {
    for no_access_times in [false, true] {
        let device = made(16, &options(1024));
        let env = Arc::new(TokioRuntime::current());
        let options = MountOptions { no_access_times, ..MountOptions::default() };
        let tfs = Tfs::mount(env, Arc::new(device.clone()), &options).unwrap().0;
        let number = write(&tfs, ROOT, "file", b"text").await.unwrap();
        let times = async || tfs.getattr(number, None).await.unwrap().attr;
        let before = times().await;
        let long_ago = SetTime::To(FileTime { secs: 1_000_000_000, nanos: 0 });
        let changes = SetAttr { atime: Some(long_ago), ..SetAttr::default() };
        tfs.setattr(ME, number, None, changes).await.unwrap();
        read(&tfs, ROOT, "file").await.unwrap();
        let after = times().await;
        assert_eq!(after.atime.secs == 1_000_000_000, no_access_times);
        assert_eq!(after.mtime, before.mtime);
        tfs.unmount().unwrap();
    }
}

/// A call that finds the transaction full must wait for the disk; so it is committed before that.
#[tokio::test(start_paused = true)]
async fn a_transaction_that_fills_up_is_committed_beside_the_calls() {
    for others_run in [false, true] {
        let device = made(16, &options(1024));
        let tfs = mount(&device);
        for n in 0..14 {
            let name = format!("directory{n}");
            tfs.mkdir(ME, ROOT, name.as_bytes(), 0o755).await.unwrap();
        }
        if others_run {
            tokio::task::yield_now().await;
        }
        drop(tfs);
        device.power_cycle();
        let tfs = mount(&device);
        let found = tfs.lookup(ME, ROOT, b"directory0").await;
        assert_eq!(found.is_ok(), others_run, "no time has passed");
        tfs.unmount().unwrap();
        assert_clean(&device.bytes(), "unmounted");
    }
}

/// "The disk will eventually fill with overwritten blocks that could otherwise be used by the
/// transparent storage application" (§3.1): the cleaner gives them back, unasked.
#[tokio::test(start_paused = true)]
async fn overwritten_blocks_are_given_back_by_themselves() {
    let device = made(16, &options(1024));
    let tfs = mount(&device);
    let parent = contribution(&tfs).await;
    let count = fill(&tfs, parent, 100_000).await;
    write(&tfs, ROOT, "ordinary", &owned(7, 3_000_000)).await.unwrap();
    let before = tfs.usage().unwrap();
    assert!(before.overwritten_blocks > 2000, "{before:?}");
    assert!(before.transparent_room_blocks < 200, "{before:?}");
    pass(90).await;
    let after = tfs.usage().unwrap();
    assert_eq!(after.overwritten_blocks, 0);
    assert!(after.transparent_files < before.transparent_files);
    let mut whole = 0;
    for n in 0..count {
        match read(&tfs, parent, &format!("t{n}")).await {
            Ok(bytes) => {
                assert!(bytes == owned(n, 100_000), "t{n}");
                whole += 1;
            }
            Err(errno) => assert_eq!(errno, Errno::ENOENT),
        }
    }
    assert_eq!(whole, after.transparent_files, "only what was lost was cleaned");
    // The ordinary file goes, and there is room for transparent data again.
    tfs.unlink(ME, ROOT, b"ordinary").await.unwrap();
    pass(10).await;
    assert!(tfs.usage().unwrap().transparent_room_blocks >= 2900);
    write(&tfs, parent, "again", &owned(99, 2_500_000)).await.unwrap();
    tfs.unmount().unwrap();
    assert_clean(&device.bytes(), "cleaned");
}

#[tokio::test]
async fn cleaning_when_asked_finds_every_lost_file() {
    let device = made(16, &options(1024));
    let tfs = mount(&device);
    let parent = contribution(&tfs).await;
    fill(&tfs, parent, 100_000).await;
    write(&tfs, ROOT, "ordinary", &owned(7, 1_000_000)).await.unwrap();
    tfs.unlink(ME, ROOT, b"ordinary").await.unwrap();
    let before = tfs.usage().unwrap();
    assert!(before.overwritten_blocks >= 900);
    let cleaned = tfs.clean().unwrap();
    assert_eq!(cleaned.blocks, before.overwritten_blocks);
    let after = tfs.usage().unwrap();
    assert_eq!(after.transparent_files, before.transparent_files - cleaned.files);
    assert_eq!(after.overwritten_blocks, 0);
    assert_eq!(tfs.clean().unwrap().files, 0);
    tfs.unmount().unwrap();
    assert_clean(&device.bytes(), "cleaned");
}

/// "The rate at which transparent data is overwritten t is approximately β = (1 − f)α. Solving
/// for f gives f = 1 − β/α" and "the smallest set of blocks responsible for a given fraction
/// of the allocations" (§3.3).
#[tokio::test(start_paused = true)]
async fn chunks_that_take_the_share_f_of_allocations_are_avoided() {
    let device = made(64, &options(1024));
    let tfs = mount(&device);
    let parent = contribution(&tfs).await;
    for n in 0..20 {
        write(&tfs, ROOT, &format!("o{n}"), &owned(n, 200_000)).await.unwrap();
    }
    pass(4000).await;
    let avoidance = tfs.avoidance().unwrap();
    assert!((3999.0..4010.0).contains(&avoidance.observed_secs), "{avoidance:?}");
    // 4 MB in 4000 seconds, and a few blocks of pointers.
    let alpha = avoidance.rate_bytes_per_sec;
    assert!((1000.0..1100.0).contains(&alpha), "{avoidance:?}");
    for (beta, share) in [(2.0 * alpha, 0.0), (alpha / 4.0, 0.75), (0.0, 1.0)] {
        tfs.set_target_loss(beta).unwrap();
        let chosen = tfs.choose_avoided().unwrap();
        assert!((chosen.share - share).abs() < 0.01, "{chosen:?}");
        assert_eq!(chosen.avoided_chunks == 0, share == 0.0, "{chosen:?}");
        assert_eq!(tfs.usage().unwrap().avoidance.avoided_chunks, chosen.avoided_chunks);
    }
    // Everything that was ever allocated in is avoided now, and stays so over a mount.
    tfs.unmount().unwrap();
    let tfs = mount(&device);
    let usage = tfs.usage().unwrap();
    assert!(usage.avoidance.avoided_chunks >= 4, "{usage:?}");
    assert!((3999.0..4010.0).contains(&usage.avoidance.observed_secs), "{usage:?}");
    let parent = tfs.lookup(ME, ROOT, b"contributed").await.map(|e| e.attr.inode).unwrap_or(parent);
    let room = usage.transparent_room_blocks;
    let count = fill(&tfs, parent, 100_000).await;
    assert!(count * 98 + 300 > room, "all that is not avoided: {count} files for {room} blocks");
    for n in 0..count {
        let number = tfs.lookup(ME, parent, format!("t{n}").as_bytes()).await.unwrap().attr.inode;
        for extent in tfs.file_extents(number).unwrap() {
            for block in extent.start..extent.start + extent.len {
                let (group, bit) = ((block - 1) / 8192, (block - 1) % 8192);
                let chunk = (bit / tfs.chunk_blocks()) as usize;
                assert!(!tfs.avoided_chunks(group).unwrap()[chunk], "block {block}");
            }
        }
    }
    assert!(tfs.usage().unwrap().avoided_free_blocks > 0);
    tfs.unmount().unwrap();
    assert_clean(&device.bytes(), "avoiding");
}

#[tokio::test(start_paused = true)]
async fn the_choice_is_made_by_itself_and_the_past_forgotten_by_halves() {
    let device = made(64, &options(1024));
    let tfs = mount(&device);
    tfs.set_target_loss(10.0).unwrap();
    write(&tfs, ROOT, "ordinary", &owned(1, 4_000_000)).await.unwrap();
    assert_eq!(tfs.usage().unwrap().avoidance.avoided_chunks, 0);
    pass(700).await;
    let early = tfs.usage().unwrap().avoidance;
    assert!(early.avoided_chunks > 0 && early.rate_bytes_per_sec > 5000.0, "{early:?}");
    // Two weeks and a day later it is no more than 4 MB in a week.
    pass(15 * 86_400).await;
    let late = tfs.usage().unwrap().avoidance;
    assert!(late.observed_secs < 9.0 * 86_400.0, "{late:?}");
    assert!((2.0..10.0).contains(&late.rate_bytes_per_sec), "{late:?}");
    assert_eq!((late.avoided_chunks, late.share), (0, 0.0), "below the target");
    tfs.unmount().unwrap();
    assert_clean(&device.bytes(), "chosen");
}

#[tokio::test]
async fn ordinary_allocations_are_told_to_the_observer() {
    let device = made(16, &options(1024));
    let told = Arc::new(std::sync::Mutex::new(Vec::new()));
    let observer = {
        let told = told.clone();
        atoll_tfs::fs::AllocationObserver(Arc::new(move |first, count| {
            told.lock().unwrap().push((first, count));
        }))
    };
    let options =
        MountOptions { background: false, observer: Some(observer), ..Default::default() };
    let env = Arc::new(TokioRuntime::current());
    let (tfs, _) = Tfs::mount(env, Arc::new(device.clone()), &options).unwrap();
    let parent = contribution(&tfs).await;
    told.lock().unwrap().clear();
    write(&tfs, parent, "transparent", &owned(1, 100_000)).await.unwrap();
    let by_directory: u32 = told.lock().unwrap().drain(..).map(|(_, count)| count).sum();
    assert!(by_directory <= 1, "only the directory's own: {by_directory}");
    let number = write(&tfs, ROOT, "ordinary", &owned(1, 100_000)).await.unwrap();
    let told = told.lock().unwrap().clone();
    for extent in tfs.file_extents(number).unwrap() {
        for block in extent.start..extent.start + extent.len {
            assert!(told.iter().any(|(first, n)| (*first..first + n).contains(&block)), "{block}");
        }
    }
    tfs.unmount().unwrap();
    assert_clean(&device.bytes(), "observed");
}

/// Inodes of transparent files are ordinary (§3.2), so one of the files goes when an ordinary
/// one finds no inode.
#[tokio::test]
async fn ordinary_files_take_the_inodes_of_transparent_ones() {
    let device = made(16, &MkfsOptions { bytes_per_inode: 65_536, ..options(1024) });
    let tfs = mount(&device);
    let parent = contribution(&tfs).await;
    let free = tfs.statfs(ROOT).await.unwrap().files_free;
    assert!((100..300).contains(&free), "{free}");
    let mut count = 0;
    while write(&tfs, parent, &format!("t{count}"), &owned(count, 2000)).await.is_ok() {
        count += 1;
    }
    assert_eq!(count, free, "every inode is a transparent file's");
    assert_eq!(tfs.statfs(ROOT).await.unwrap().files_free, free, "which df does not count");
    let held = tfs.lookup(ME, parent, b"t0").await.unwrap().attr.inode;
    let handle = tfs.open(ME, held, OpenFlags::READ).await.unwrap().handle;
    for n in 0..free - 1 {
        let made = write(&tfs, ROOT, &format!("o{n}"), &owned(n, 1000)).await;
        assert!(made.is_ok(), "o{n} of {free}: {made:?}");
    }
    assert_eq!(write(&tfs, ROOT, "more", b"").await, Err(Errno::ENOSPC), "the last one is open");
    let bytes = tfs.read(held, handle, 0, 4000).await.unwrap();
    assert_eq!(bytes, owned(0, 2000), "and its own");
    tfs.close(held, handle).await.unwrap();
    tfs.forget(held, 1);
    write(&tfs, ROOT, "more", b"").await.unwrap();
    assert_eq!(read(&tfs, parent, "t0").await, Err(Errno::ENOENT));
    for n in 0..free - 1 {
        assert_eq!(read(&tfs, ROOT, &format!("o{n}")).await.unwrap(), owned(n, 1000));
    }
    tfs.unmount().unwrap();
    assert_clean(&device.bytes(), "inodes given away");
}

/// "In our opinion, yielding to open files is the best option" (§3.2): and nothing else keeps
/// an ordinary file from the last block.
#[tokio::test]
async fn the_disk_is_full_only_when_open_transparent_files_hold_the_rest() {
    let wanted = MkfsOptions { reserved_percent: 0, bytes_per_inode: 4096, ..options(1024) };
    let device = made(16, &wanted);
    let tfs = mount(&device);
    let parent = contribution(&tfs).await;
    let count = fill(&tfs, parent, 100_000).await;
    let mut open = Vec::new();
    for n in 0..count / 3 {
        let name = format!("t{n}");
        let number = tfs.lookup(ME, parent, name.as_bytes()).await.unwrap().attr.inode;
        if let Ok(opened) = tfs.open(ME, number, OpenFlags::READ).await {
            open.push((n, number, opened.handle));
        }
    }
    let free = |tfs: &Tfs| tfs.usage().unwrap().free_blocks;
    let mut n = 0;
    while write(&tfs, ROOT, &format!("o{n}"), &owned(n, 200_000)).await.is_ok() {
        n += 1;
    }
    // To the last block, with pieces of one.
    while write(&tfs, ROOT, &format!("o{n}"), &owned(n, 1000)).await.is_ok() {
        n += 1;
    }
    assert_eq!(free(&tfs), tfs.usage().unwrap().pinned_blocks, "the rest is pinned");
    for (n, number, handle) in open {
        assert_eq!(tfs.read(number, handle, 0, 1 << 20).await.unwrap(), owned(n, 100_000), "t{n}");
        tfs.close(number, handle).await.unwrap();
        tfs.forget(number, 1);
    }
    while write(&tfs, ROOT, &format!("m{n}"), &owned(n, 200_000)).await.is_ok() {
        n += 1;
    }
    while write(&tfs, ROOT, &format!("o{n}"), &owned(n, 1000)).await.is_ok() {
        n += 1;
    }
    assert_eq!(free(&tfs), 0, "nothing is pinned any more");
    tfs.unmount().unwrap();
    assert_clean(&device.bytes(), "full to the last block");
}
