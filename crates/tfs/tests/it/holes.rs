//! Punching holes: what a file no longer needs is free again, down to the last indirect block.

use std::sync::Arc;

use atoll_env::TokioRuntime;
use atoll_tfs::device::{Device, FaultyDevice};
use atoll_tfs::fs::{MountOptions, Tfs};
use atoll_tfs::mkfs::mkfs;
use atoll_vfs::{
    Errno, FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE, FALLOC_ZERO_RANGE, FileSystem, Handle, InodeNumber,
    OpenFlags, SeekTo, Writer,
};
use bytes::Bytes;

use crate::calls::{ME, ROOT, contribution, owned, read, write};
use crate::e2fsck::assert_clean;
use crate::mkfs::options;

const PUNCH: i32 = FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE;

fn mounted(block_bytes: u32) -> (FaultyDevice, Tfs) {
    let device = FaultyDevice::new(16 << 20, 1);
    mkfs(&(Arc::new(device.clone()) as Arc<dyn Device>), &options(block_bytes)).unwrap();
    let env = Arc::new(TokioRuntime::current());
    let quiet = MountOptions { background: false, ..MountOptions::default() };
    let (tfs, _) = Tfs::mount(env, Arc::new(device.clone()), &quiet).unwrap();
    (device, tfs)
}

async fn create(tfs: &Tfs) -> (InodeNumber, Handle) {
    let flags = OpenFlags::READ_WRITE;
    let (entry, opened) = tfs.create(ME, ROOT, b"file", 0o644, flags).await.unwrap();
    (entry.attr.inode, opened.handle)
}

async fn blocks_512(tfs: &Tfs, number: InodeNumber) -> u64 {
    tfs.getattr(number, None).await.unwrap().attr.blocks_512
}

/// A block below each kind of pointer, and beside the borders between them.
#[tokio::test]
async fn indirect_blocks_that_lead_to_nothing_are_given_back() {
    for (block_bytes, each) in [(1024u64, 256u64), (4096, 1024)] {
        let (device, tfs) = mounted(block_bytes as u32);
        let (number, handle) = create(&tfs).await;
        let free = tfs.usage().unwrap().free_blocks;
        let (two, three) = (12 + each, 12 + each + each * each);
        let places =
            [0, 11, 12, two - 1, two, two + each, three - 1, three, three + 1, three + 5 * each];
        for place in places {
            let data = Bytes::from(vec![7; block_bytes as usize]);
            tfs.write(Writer::At(ME), number, handle, place * block_bytes, data).await.unwrap();
        }
        let size = tfs.getattr(number, None).await.unwrap().attr.size_bytes;
        // All but the first, one by one, from the middle of a hole to the middle of the next.
        for (n, place) in places.into_iter().enumerate().skip(1) {
            let before = blocks_512(&tfs, number).await;
            let at = place * block_bytes;
            tfs.fallocate(ME, number, handle, at, block_bytes, PUNCH).await.unwrap();
            assert!(blocks_512(&tfs, number).await < before, "block {place}");
            let next = tfs.seek(number, handle, block_bytes, SeekTo::Data).await;
            let expected = places.get(n + 1).map(|place| place * block_bytes);
            assert_eq!(next, expected.ok_or(Errno::ENXIO), "after block {place}");
        }
        assert_eq!(blocks_512(&tfs, number).await, block_bytes / 512, "the first is left");
        assert_eq!(tfs.getattr(number, None).await.unwrap().attr.size_bytes, size);
        tfs.fallocate(ME, number, handle, 0, u64::MAX, PUNCH).await.unwrap();
        assert_eq!(blocks_512(&tfs, number).await, 0);
        tfs.sync().await.unwrap();
        assert_eq!(tfs.usage().unwrap().free_blocks, free);
        tfs.close(number, handle).await.unwrap();
        tfs.unmount().unwrap();
        assert_clean(&device.bytes(), &format!("holes in blocks of {block_bytes}"));
    }
}

/// More runs than one step, or one transaction, gives back.
#[tokio::test]
async fn a_hole_through_many_runs_leaves_what_lies_around_it() {
    const BLOCKS: u64 = 9000;
    let (device, tfs) = mounted(1024);
    let (number, handle) = create(&tfs).await;
    let block = |n: u64| Bytes::from(owned(n, 1024));
    // In an order that leaves no two of them beside each other on the disk.
    for n in (0..BLOCKS / 2).map(|n| n * 2003 % (BLOCKS / 2) * 2) {
        tfs.write(Writer::At(ME), number, handle, n * 1024, block(n)).await.unwrap();
    }
    let whole = blocks_512(&tfs, number).await;
    let range = 300 * 1024 + 100..8000 * 1024 + 100;
    let len = range.end - range.start;
    tfs.fallocate(ME, number, handle, range.start, len, PUNCH).await.unwrap();
    let left = blocks_512(&tfs, number).await;
    assert!(left * 100 < whole * 20, "{left} of {whole} are left");
    for n in 0..BLOCKS - 1 {
        let mut expected = if n % 2 == 0 { owned(n, 1024) } else { vec![0; 1024] };
        for (at, byte) in (n * 1024..).zip(&mut expected) {
            *byte = if range.contains(&at) { 0 } else { *byte };
        }
        let found = tfs.read(number, handle, n * 1024, 1024).await.unwrap();
        assert!(found == expected, "block {n}");
    }
    // Zeros that have room.
    tfs.fallocate(ME, number, handle, range.start, len, FALLOC_ZERO_RANGE).await.unwrap();
    assert!(blocks_512(&tfs, number).await > 2 * (8000 - 300));
    assert_eq!(tfs.seek(number, handle, 301 * 1024, SeekTo::Hole).await, Ok(8001 * 1024));
    let zeros = tfs.read(number, handle, range.start, len as u32).await.unwrap();
    assert!(zeros.iter().all(|byte| *byte == 0));
    tfs.close(number, handle).await.unwrap();
    assert_eq!(tfs.failure(), None);
    tfs.unmount().unwrap();
    assert_clean(&device.bytes(), "a hole through many runs");
}

/// No space can be kept for a transparent file, and its tags speak of whole blocks.
#[tokio::test]
async fn a_transparent_file_refuses_holes_and_keeps_its_bytes() {
    let (device, tfs) = mounted(1024);
    let parent = contribution(&tfs).await;
    let number = write(&tfs, parent, "file", &owned(3, 50_000)).await.unwrap();
    let handle = tfs.open(ME, number, OpenFlags::READ_WRITE).await.unwrap().handle;
    for mode in [0, PUNCH, FALLOC_ZERO_RANGE] {
        let refused = tfs.fallocate(ME, number, handle, 1000, 5000, mode).await;
        assert_eq!(refused, Err(Errno::EOPNOTSUPP), "mode {mode:#x}");
    }
    tfs.close(number, handle).await.unwrap();
    assert!(read(&tfs, parent, "file").await.unwrap() == owned(3, 50_000));
    tfs.unmount().unwrap();
    assert_clean(&device.bytes(), "holes in transparent files");
}
