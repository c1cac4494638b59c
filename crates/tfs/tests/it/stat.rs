//! Numbers and maps of a file system, mounted and not.

use std::sync::Arc;

use atoll_env::TokioRuntime;
use atoll_tfs::device::{Device, FaultyDevice};
use atoll_tfs::fs::{MountOptions, Tfs, Usage};
use atoll_tfs::map::BlockMap;
use atoll_tfs::mkfs::mkfs;
use atoll_tfs::stat::{CLEAN_XATTR, USAGE_XATTR, map_xattr};
use atoll_vfs::{Errno, FileSystem, XattrFlags};

use crate::calls::{ME, ROOT, contribution, fill, owned, write};
use crate::e2fsck::assert_clean;
use crate::mkfs::options;

fn mount(device: &FaultyDevice, read_only: bool) -> Tfs {
    let shared: Arc<dyn Device> = Arc::new(device.clone());
    let options = MountOptions { read_only, background: false, ..MountOptions::default() };
    Tfs::mount(Arc::new(TokioRuntime::current()), shared, &options).unwrap().0
}

#[tokio::test]
async fn numbers_and_map_agree_and_tell_an_unmounted_file_system_too() {
    let device = FaultyDevice::new(16 << 20, 1);
    mkfs(&(Arc::new(device.clone()) as Arc<dyn Device>), &options(1024)).unwrap();
    let tfs = mount(&device, false);
    let before = tfs.usage().unwrap();
    let parent = contribution(&tfs).await;
    let files = fill(&tfs, parent, 50_000).await;
    write(&tfs, ROOT, "ordinary", &owned(1, 2_000_000)).await.unwrap();
    let usage = tfs.usage().unwrap();
    assert_eq!((usage.transparent_files, usage.transparent_directories), (files, 1));
    assert!(usage.transparent_blocks > 1000 && usage.overwritten_blocks > 1000, "{usage:?}");
    let ordinary = usage.ordinary_blocks() - before.ordinary_blocks();
    assert!((1954..2200).contains(&ordinary), "{ordinary}");
    // The figures of `df` do not include transparent files.
    assert_eq!(usage.free_blocks, tfs.statfs(ROOT).await.unwrap().blocks_free);
    for cells in [1, 64, 1000, 16_384, 1 << 20] {
        let totals = tfs.block_map(cells).unwrap().totals();
        assert_eq!(totals.transparent, usage.transparent_blocks, "{cells}");
        assert_eq!(totals.overwritten(), usage.overwritten_blocks, "{cells}");
        let free = totals.free + totals.transparent + totals.free_and_overwritten;
        assert_eq!(free, usage.free_blocks, "{cells}");
        let used = totals.allocated + totals.allocated_and_overwritten;
        assert_eq!(used + free, usage.blocks, "{cells}");
    }
    assert_eq!(tfs.block_map(0), Err(Errno::EINVAL));
    assert_eq!(tfs.block_map((1 << 20) + 1), Err(Errno::EINVAL));

    // As another process asks.
    let lines = tfs.getxattr(parent, USAGE_XATTR.as_bytes()).await.unwrap();
    let mut asked = Usage::from_lines(std::str::from_utf8(&lines).unwrap()).unwrap();
    // Time has passed.
    asked.avoidance.observed_secs = usage.avoidance.observed_secs;
    asked.avoidance.rate_bytes_per_sec = usage.avoidance.rate_bytes_per_sec;
    asked.avoidance.share = usage.avoidance.share;
    assert_eq!(asked, usage);
    let mut told: Option<BlockMap> = None;
    while !told.as_ref().is_some_and(BlockMap::is_whole) {
        let first = told.as_ref().map_or(0, |map| map.cells.len() as u32);
        let part = tfs.getxattr(ROOT, map_xattr(8000, first).as_bytes()).await.unwrap();
        assert!(part.len() <= 65_536 && BlockMap::add_part(&mut told, &part));
    }
    assert_eq!(told.unwrap(), tfs.block_map(8000).unwrap());
    let (name, flags) = (CLEAN_XATTR.as_bytes(), XattrFlags::default());
    let told = tfs.getxattr(ROOT, name).await.unwrap();
    assert_eq!(told, "files 0\nblocks 0\n", "asking cleans nothing");
    tfs.setxattr(ME, ROOT, name, "1".into(), flags).await.unwrap();
    let cleaned = tfs.getxattr(ROOT, name).await.unwrap();
    let cleaned = String::from_utf8(cleaned.to_vec()).unwrap();
    assert!(cleaned.starts_with("files ") && !cleaned.starts_with("files 0"), "{cleaned}");
    assert_eq!(tfs.usage().unwrap().overwritten_blocks, 0);
    let usage = tfs.usage().unwrap();
    let nothing = tfs.getxattr(ROOT, b"user.tfs.map.x.0").await;
    assert_eq!(nothing, Err(Errno::ENODATA));

    let map = tfs.block_map(100).unwrap();
    tfs.unmount().unwrap();
    drop(tfs);
    let operations = device.operations();
    let asleep = mount(&device, true);
    assert_eq!(asleep.block_map(100).unwrap(), map);
    let again = asleep.usage().unwrap();
    assert_eq!(again.transparent_blocks, usage.transparent_blocks);
    assert_eq!(again.overwritten_blocks, usage.overwritten_blocks);
    asleep.unmount().unwrap();
    assert_eq!(device.operations(), operations, "nothing was written");
    assert_clean(&device.bytes(), "filled and cleaned");
}
