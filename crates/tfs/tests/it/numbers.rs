//! Files by their persistent handles (`open_by_handle_at(2)`, NFS).

use std::sync::Arc;

use atoll_env::TokioRuntime;
use atoll_tfs::device::{Device, FaultyDevice};
use atoll_tfs::fs::{MountOptions, Tfs};
use atoll_tfs::mkfs::mkfs;
use atoll_vfs::{Entry, Errno, FileSystem, InodeNumber};

use crate::calls::{ME, ROOT, contribution, owned, read, write};
use crate::e2fsck::assert_clean;
use crate::mkfs::options;

fn mount(device: &FaultyDevice) -> Tfs {
    let options = MountOptions { background: false, ..MountOptions::default() };
    let env = Arc::new(TokioRuntime::current());
    Tfs::mount(env, Arc::new(device.clone()), &options).unwrap().0
}

/// As FUSE finds a file that the kernel names by its number.
async fn by_number(tfs: &Tfs, number: InodeNumber) -> Result<Entry, Errno> {
    tfs.by_handle(ME, &tfs.handle_of(number).await?).await
}

#[tokio::test]
async fn a_handle_leads_to_its_file_until_that_is_gone_and_never_to_another() {
    let device = FaultyDevice::new(16 << 20, 1);
    mkfs(&(Arc::new(device.clone()) as Arc<dyn Device>), &options(1024)).unwrap();
    let tfs = mount(&device);
    let number = write(&tfs, ROOT, "file", &owned(1, 5000)).await.unwrap();
    let held = tfs.lookup(ME, ROOT, b"file").await.unwrap();
    tfs.forget(number, 1);
    let above = tfs.mkdir(ME, ROOT, b"above", 0o755).await.unwrap().attr.inode;
    let below = tfs.mkdir(ME, above, b"below", 0o755).await.unwrap().attr.inode;
    tfs.unmount().unwrap();
    drop(tfs);
    // Another mount, which has not looked them up.
    let tfs = mount(&device);
    let found = by_number(&tfs, number).await.unwrap();
    assert_eq!((found.attr, found.generation), (held.attr, held.generation));
    let old = tfs.handle_of(number).await.unwrap();
    assert_eq!(by_number(&tfs, below).await.unwrap().attr.inode, below);
    assert_eq!(tfs.parent(ME, below).await.unwrap().attr.inode, above);
    assert_eq!(by_number(&tfs, ROOT).await.unwrap().attr.inode, ROOT);
    // Reserved inodes (the records' too), and numbers of nothing.
    for number in [0, 2, 5, 7, 10, 600, 1 << 31, u64::MAX] {
        let answer = by_number(&tfs, InodeNumber(number)).await;
        assert_eq!(answer, Err(Errno::ESTALE), "{number}");
    }
    tfs.unlink(ME, ROOT, b"file").await.unwrap();
    assert!(by_number(&tfs, number).await.is_ok(), "it lives while it is held");
    tfs.forget(number, 2);
    assert_eq!(by_number(&tfs, number).await, Err(Errno::ESTALE));
    tfs.commit().unwrap();
    assert_eq!(write(&tfs, ROOT, "next", b"").await, Ok(number), "the number is free again");
    let next = by_number(&tfs, number).await.unwrap();
    assert_ne!(next.generation, held.generation);
    assert_eq!(tfs.by_handle(ME, &old).await, Err(Errno::ESTALE), "it named the file before");
    tfs.unmount().unwrap();
    assert_clean(&device.bytes(), "unmounted");
}

/// Its map knows the directory that holds its name, which has not been looked up.
#[tokio::test]
async fn a_transparent_file_found_by_its_handle_vanishes_with_its_name() {
    let device = FaultyDevice::new(16 << 20, 1);
    mkfs(&(Arc::new(device.clone()) as Arc<dyn Device>), &options(1024)).unwrap();
    let tfs = mount(&device);
    let parent = contribution(&tfs).await;
    let number = write(&tfs, parent, "given", &owned(1, 400_000)).await.unwrap();
    tfs.unmount().unwrap();
    drop(tfs);
    let tfs = mount(&device);
    let found = by_number(&tfs, number).await.unwrap();
    assert_eq!(found.attr.size_bytes, 400_000);
    tfs.forget(number, 1);
    // Ordinary data takes its place.
    let mut n = 0;
    while write(&tfs, ROOT, &format!("ordinary{n}"), &owned(n, 1_000_000)).await.is_ok() {
        n += 1;
    }
    assert!(by_number(&tfs, number).await.is_ok());
    tfs.clean().unwrap();
    assert_eq!(read(&tfs, parent, "given").await, Err(Errno::ENOENT));
    tfs.forget(number, 1);
    assert_eq!(by_number(&tfs, number).await, Err(Errno::ESTALE));
    tfs.unmount().unwrap();
    assert_clean(&device.bytes(), "unmounted");
}
