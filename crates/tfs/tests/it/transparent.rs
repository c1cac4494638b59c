//! Transparent files in the paper's words: they may vanish at any moment, cost ordinary files
//! nothing, and never show anybody else's bytes.

use std::io;
use std::sync::Arc;

use atoll_env::TokioRuntime;
use atoll_tfs::device::{Device, FaultyDevice};
use atoll_tfs::fs::{MountOptions, Tfs};
use atoll_tfs::mkfs::mkfs;
use atoll_vfs::{Errno, FileSystem, OpenFlags, SetAttr, XattrFlags};
use bytes::Bytes;

use crate::calls::{ME, ROOT, contribution, fill, owned, read, write};
use crate::e2fsck::assert_clean;
use crate::mkfs::options;

const TRANSPARENT: &[u8] = b"user.tfs.transparent";

fn made(mib: usize, block_bytes: u32) -> FaultyDevice {
    let device = FaultyDevice::new(mib << 20, 1);
    mkfs(&(Arc::new(device.clone()) as Arc<dyn Device>), &options(block_bytes)).unwrap();
    device
}

fn mount(device: &FaultyDevice) -> Tfs {
    let shared: Arc<dyn Device> = Arc::new(device.clone());
    let env = Arc::new(TokioRuntime::current());
    Tfs::mount(env, shared, &MountOptions::default()).unwrap().0
}

async fn free_blocks(tfs: &Tfs) -> u64 {
    tfs.statfs(ROOT).await.unwrap().blocks_free
}

#[tokio::test]
async fn transparent_files_hold_bytes_and_cost_no_free_space() {
    for block_bytes in [1024, 4096] {
        let device = made(32, block_bytes);
        let tfs = mount(&device);
        let parent = contribution(&tfs).await;
        let before = free_blocks(&tfs).await;
        let bytes = owned(3, 300_000);
        let number = write(&tfs, parent, "file", &bytes).await.unwrap();
        assert_eq!(read(&tfs, parent, "file").await.unwrap(), bytes);
        assert_eq!(free_blocks(&tfs).await, before, "df counts it as free");
        let attr = tfs.getattr(number, None).await.unwrap().attr;
        assert_eq!(attr.size_bytes, 300_000);
        assert!(attr.blocks_512 >= 300_000 / 512);
        tfs.unmount().unwrap();
        assert_clean(&device.bytes(), "with a transparent file");
        let tfs = mount(&device);
        assert_eq!(read(&tfs, parent, "file").await.unwrap(), bytes);
        tfs.unlink(ME, parent, b"file").await.unwrap();
        tfs.unmount().unwrap();
        assert_clean(&device.bytes(), "without it");
    }
}

/// "If any part of the file is overwritten, the file system returns an error to open. This
/// signals that the file has been deleted. TFS then deletes the inode and directory entry"
/// (§3.1).
#[tokio::test]
async fn ordinary_files_take_the_space_of_transparent_ones_which_are_then_gone() {
    let device = made(16, 1024);
    let tfs = mount(&device);
    let parent = contribution(&tfs).await;
    let count = fill(&tfs, parent, 100_000).await;
    assert!(count > 80, "{count}");
    let free = free_blocks(&tfs).await;
    let ordinary = owned(1000, 3_000_000);
    write(&tfs, ROOT, "ordinary", &ordinary).await.unwrap();
    assert_eq!(read(&tfs, ROOT, "ordinary").await.unwrap(), ordinary);
    assert!(free - free_blocks(&tfs).await >= 3_000_000 / 1024);
    let mut lost = 0;
    for n in 0..count {
        match read(&tfs, parent, &format!("t{n}")).await {
            Ok(bytes) => assert_eq!(bytes, owned(n, 100_000), "t{n}"),
            Err(Errno::ENOENT) => {
                lost += 1;
                let again = tfs.lookup(ME, parent, format!("t{n}").as_bytes()).await;
                assert_eq!(again.map(|e| e.attr.inode), Err(Errno::ENOENT), "its name is gone");
            }
            Err(errno) => panic!("t{n}: {errno:?}"),
        }
    }
    assert!((30..=count).contains(&lost), "{lost} of {count}");
    tfs.unmount().unwrap();
    assert_clean(&device.bytes(), "after losses");
}

/// "It prevents the file system from overwriting the data of open transparent files" (§3.2).
#[tokio::test]
async fn an_open_transparent_file_is_not_overwritten() {
    let device = made(16, 1024);
    let tfs = mount(&device);
    let parent = contribution(&tfs).await;
    let count = fill(&tfs, parent, 100_000).await;
    let mut open = Vec::new();
    for n in 0..count / 2 {
        let name = format!("t{n}");
        let number = tfs.lookup(ME, parent, name.as_bytes()).await.unwrap().attr.inode;
        match tfs.open(ME, number, OpenFlags::READ).await {
            Ok(opened) => open.push((n, number, opened.handle)),
            // The directory that names them all is ordinary, and grew (§3.2).
            Err(errno) => assert_eq!(errno, Errno::ENOENT),
        }
    }
    assert!(open.len() as u64 + 3 >= count / 2, "{} of {count}", open.len());
    // As much as there is left for ordinary files.
    let mut n = 0;
    while write(&tfs, ROOT, &format!("o{n}"), &owned(n, 200_000)).await.is_ok() {
        n += 1;
    }
    for (n, number, handle) in open {
        let bytes = tfs.read(number, handle, 0, 1 << 20).await.unwrap();
        assert_eq!(bytes, owned(n, 100_000), "t{n}");
        tfs.close(number, handle).await.unwrap();
    }
    assert_eq!(tfs.failure(), None);
    tfs.unmount().unwrap();
    assert_clean(&device.bytes(), "full");
}

/// Its map would have had an impossible length, and the file been lost.
#[tokio::test]
async fn a_transparent_file_is_not_lengthened_beyond_what_any_file_can_be() {
    let device = made(16, 1024);
    let tfs = mount(&device);
    let parent = contribution(&tfs).await;
    write(&tfs, parent, "file", &owned(1, 5000)).await.unwrap();
    let number = tfs.lookup(ME, parent, b"file").await.unwrap().attr.inode;
    let to = |size| SetAttr { size_bytes: Some(size), ..SetAttr::default() };
    for size in [u64::MAX, 1 << 60, 1 << 44] {
        let set = tfs.setattr(ME, number, None, to(size)).await;
        assert_eq!(set.map(|reply| reply.attr.size_bytes), Err(Errno::EFBIG), "{size}");
    }
    assert_eq!(read(&tfs, parent, "file").await.unwrap(), owned(1, 5000));
    let set = tfs.setattr(ME, number, None, to(1 << 33)).await.unwrap();
    assert_eq!(set.attr.size_bytes, 1 << 33);
    tfs.setattr(ME, number, None, to(3000)).await.unwrap();
    assert_eq!(read(&tfs, parent, "file").await.unwrap(), &owned(1, 5000)[..3000]);
    tfs.unmount().unwrap();
    assert_clean(&device.bytes(), "lengthened");
}

/// Nothing says so but its tag: the read fails, and the file is gone with the next open.
#[tokio::test]
async fn a_file_whose_bytes_were_changed_unseen_is_gone_once_a_read_has_found_out() {
    let device = made(16, 1024);
    let tfs = mount(&device);
    let parent = contribution(&tfs).await;
    let number = write(&tfs, parent, "file", &owned(1, 50_000)).await.unwrap();
    let block = tfs.file_extents(number).unwrap()[0].start + 7;
    tfs.sync().await.unwrap();
    device.write_at(u64::from(block) * 1024, &[9; 1024]).unwrap();
    assert_eq!(read(&tfs, parent, "file").await, Err(Errno::EIO));
    assert_eq!(read(&tfs, parent, "file").await, Err(Errno::ENOENT));
    assert_eq!(tfs.usage().unwrap().transparent_blocks, 0);
    tfs.unmount().unwrap();
    assert_clean(&device.bytes(), "changed unseen");
}

/// A disk that has no room for transparent data, as an image with holes on a full one.
#[derive(Debug)]
struct Short(FaultyDevice);

const REFUSED: [u8; 1024] = [0xee; 1024];

impl Device for Short {
    fn len_bytes(&self) -> u64 {
        self.0.len_bytes()
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.0.read_at(offset, buffer)
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        if data.ends_with(&REFUSED) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.0.write_at(offset, data)
    }

    fn sync(&self) -> io::Result<()> {
        self.0.sync()
    }
}

/// It was the end of all changes, ordinary ones too.
#[tokio::test]
async fn a_device_without_room_for_transparent_data_loses_that_file_alone() {
    let device = made(16, 1024);
    let env = Arc::new(TokioRuntime::current());
    let options = MountOptions::default();
    let (tfs, _) = Tfs::mount(env, Arc::new(Short(device.clone())), &options).unwrap();
    let parent = contribution(&tfs).await;
    write(&tfs, parent, "before", &owned(1, 50_000)).await.unwrap();
    assert_eq!(write(&tfs, parent, "short", &REFUSED.repeat(300)).await, Err(Errno::ENOSPC));
    write(&tfs, ROOT, "ordinary", &owned(2, 50_000)).await.unwrap();
    assert_eq!(tfs.failure(), None);
    assert_eq!(read(&tfs, parent, "short").await, Err(Errno::ENOENT), "gone when it is opened");
    assert_eq!(read(&tfs, parent, "before").await.unwrap(), owned(1, 50_000));
    tfs.unmount().unwrap();
    assert_clean(&device.bytes(), "without room");
}

/// `close(2)` returns before the kernel tells the server of it: of some 450 programs that closed a
/// file and then made it transparent, one was told that it is open.
#[tokio::test]
async fn a_file_can_be_made_transparent_right_after_it_was_closed() {
    let device = made(32, 1024);
    let tfs = Arc::new(mount(&device));
    let (entry, opened) = tfs.create(ME, ROOT, b"file", 0o644, OpenFlags::WRITE).await.unwrap();
    let number = entry.attr.inode;
    let set = |value: &'static [u8]| {
        let value = Bytes::from_static(value);
        tfs.setxattr(ME, number, TRANSPARENT, value, XattrFlags::default())
    };
    let closes_later = async {
        tokio::task::yield_now().await;
        tfs.close(number, opened.handle).await
    };
    let (made_transparent, closed) = tokio::join!(set(b"1"), closes_later);
    assert_eq!((made_transparent, closed), (Ok(()), Ok(())));
    assert_eq!(tfs.getxattr(number, TRANSPARENT).await.as_deref(), Ok(&b"1"[..]));

    let opened = tfs.open(ME, number, OpenFlags::READ).await.unwrap();
    assert_eq!(set(b"0").await, Err(Errno::EBUSY), "it stays open");
    tfs.close(number, opened.handle).await.unwrap();
    assert_eq!(set(b"2").await, Err(Errno::EINVAL));
    assert_eq!(tfs.removexattr(ME, number, TRANSPARENT).await, Ok(()));
}
