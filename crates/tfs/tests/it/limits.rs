//! What the kernel's drivers set the limits of: lengths of files, features that the first use
//! brings, times.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use atoll_env::TokioRuntime;
use atoll_tfs::check::{CheckOptions, check};
use atoll_tfs::device::{Device, FaultyDevice};
use atoll_tfs::fs::{MountOptions, Tfs};
use atoll_vfs::{
    CreateVerifier, Errno, FileSystem, FileTime, InodeNumber, OpenFlags, SetAttr, SetTime, Writer,
    XattrFlags,
};
use bytes::Bytes;
use tempfile::NamedTempFile;

use crate::calls::{ME, ROOT, write};
use crate::e2fsck::{assert_image_clean, open_image};
use crate::kernel::{KernelMount, drivers};

/// An image of mke2fs with these options.
fn made(options: &[&str]) -> NamedTempFile {
    let image = NamedTempFile::new().unwrap();
    image.as_file().set_len(16 << 20).unwrap();
    let mut mke2fs = Command::new("mke2fs");
    mke2fs.args(["-q", "-F", "-t", "ext2"]).args(options).arg(image.path());
    assert!(mke2fs.status().unwrap().success(), "mke2fs {options:?}");
    image
}

fn mount(image: &Path) -> Tfs {
    let env = Arc::new(TokioRuntime::current());
    let quiet = MountOptions { background: false, ..MountOptions::default() };
    Tfs::mount(env, open_image(image, false), &quiet).unwrap().0
}

async fn set_len(tfs: &Tfs, number: InodeNumber, size_bytes: u64) -> Result<(), Errno> {
    let changes = SetAttr { size_bytes: Some(size_bytes), ..SetAttr::default() };
    tfs.setattr(ME, number, None, changes).await.map(|_| ())
}

/// The kernel's longest file was called damaged, and was not in any listing.
#[tokio::test]
async fn a_file_may_be_as_long_as_the_kernels_drivers_let_it() {
    for (block_bytes, longest) in
        [("1024", 17_247_252_480u64), ("2048", 275_415_851_008), ("4096", 2_196_873_666_560)]
    {
        let image = made(&["-b", block_bytes]);
        for driver in drivers() {
            let kernel = KernelMount::new(image.path(), driver, "rw");
            let file = std::fs::File::create(kernel.path().join(driver)).unwrap();
            file.set_len(longest).unwrap();
            let refused = file.set_len(longest + 1).unwrap_err();
            assert_eq!(refused.raw_os_error(), Some(Errno::EFBIG.0), "{driver}, {block_bytes}");
            drop(file);
            kernel.unmount();
        }
        let tfs = mount(image.path());
        assert_eq!(tfs.statfs(ROOT).await.unwrap().max_file_bytes, longest);
        for driver in drivers() {
            let found = tfs.lookup(ME, ROOT, driver.as_bytes()).await.unwrap();
            assert_eq!(found.attr.size_bytes, longest, "{driver}");
        }
        let number = write(&tfs, ROOT, "ours", b"begin").await.unwrap();
        set_len(&tfs, number, longest).await.unwrap();
        assert_eq!(set_len(&tfs, number, longest + 1).await, Err(Errno::EFBIG));
        let handle = tfs.open(ME, number, OpenFlags::READ_WRITE).await.unwrap().handle;
        let data = Bytes::from_static(b"the end");
        let last = longest - data.len() as u64;
        assert_eq!(tfs.write(Writer::At(ME), number, handle, last, data.clone()).await, Ok(7));
        assert_eq!(
            tfs.write(Writer::At(ME), number, handle, last + 1, data.clone()).await,
            Err(Errno::EFBIG)
        );
        assert_eq!(tfs.fallocate(ME, number, handle, last, 8, 0).await, Err(Errno::EFBIG));
        assert_eq!(tfs.read(number, handle, last, 100).await.unwrap(), data);
        tfs.close(number, handle).await.unwrap();
        tfs.unmount().unwrap();
        drop(tfs);
        assert_image_clean(image.path(), &format!("files of {longest} bytes"));
        for driver in drivers() {
            let kernel = KernelMount::new(image.path(), driver, "ro");
            let len = std::fs::metadata(kernel.path().join("ours")).unwrap().len();
            assert_eq!(len, longest, "{driver}");
            kernel.unmount();
        }
    }
}

/// e2fsck takes what needs a feature for damage where the superblock does not name the feature.
#[tokio::test]
async fn a_feature_is_set_when_a_file_needs_it_first() {
    for options in [&["-O", "^ext_attr,^large_file"][..], &["-O", "none", "-r", "0"]] {
        let image = made(options);
        let tfs = mount(image.path());
        let number = write(&tfs, ROOT, "large", b"begin").await.unwrap();
        set_len(&tfs, number, 3 << 30).await.unwrap();
        tfs.sync().await.unwrap();
        let number = write(&tfs, ROOT, "attr", b"begin").await.unwrap();
        let value = Bytes::from_static(b"value");
        tfs.setxattr(ME, number, b"user.name", value, XattrFlags::default()).await.unwrap();
        tfs.unmount().unwrap();
        drop(tfs);
        assert_image_clean(image.path(), &format!("features were set, {options:?}"));
        for driver in drivers() {
            let kernel = KernelMount::new(image.path(), driver, "ro");
            let len = std::fs::metadata(kernel.path().join("large")).unwrap().len();
            assert_eq!(len, 3 << 30, "{driver}");
            kernel.unmount();
        }
    }
}

/// A crash between the commits that bring two features: the mark by which TFS knows its own
/// superblock must know all three states.
#[tokio::test]
async fn a_crash_while_features_are_set_is_recovered_from() {
    let image = made(&["-O", "^ext_attr,^large_file"]);
    let bytes = std::fs::read(image.path()).unwrap();
    for commits in 0..3 {
        let device = FaultyDevice::holding(bytes.clone(), 1);
        let env = || Arc::new(TokioRuntime::current());
        let quiet = MountOptions { background: false, ..MountOptions::default() };
        let (tfs, _) = Tfs::mount(env(), Arc::new(device.clone()), &quiet).unwrap();
        let number = write(&tfs, ROOT, "file", b"begin").await.unwrap();
        set_len(&tfs, number, 3 << 30).await.unwrap();
        if commits > 0 {
            tfs.sync().await.unwrap();
        }
        let value = Bytes::from_static(b"value");
        tfs.setxattr(ME, number, b"user.name", value, XattrFlags::default()).await.unwrap();
        if commits > 1 {
            tfs.sync().await.unwrap();
        }
        drop(tfs);
        device.power_cycle();
        let (tfs, report) = Tfs::mount(env(), Arc::new(device.clone()), &quiet).unwrap();
        assert!(report.recovered && !report.foreign, "{commits} commits: {report:?}");
        tfs.unmount().unwrap();
        drop(tfs);
        std::fs::write(image.path(), device.bytes()).unwrap();
        assert_image_clean(image.path(), &format!("a crash after {commits} commits"));
    }
}

#[tokio::test]
async fn the_check_misses_features_that_files_need() {
    for (feature, needs) in [("large_file", "large"), ("ext_attr", "attr")] {
        let image = made(&[]);
        let tfs = mount(image.path());
        let number = write(&tfs, ROOT, needs, b"begin").await.unwrap();
        if needs == "large" {
            set_len(&tfs, number, 3 << 30).await.unwrap();
        } else {
            let value = Bytes::from_static(b"value");
            tfs.setxattr(ME, number, b"user.name", value, XattrFlags::default()).await.unwrap();
        }
        tfs.unmount().unwrap();
        drop(tfs);
        let command = format!("feature -{feature}");
        let done = Command::new("debugfs").args(["-w", "-R", &command]).arg(image.path()).output();
        assert!(done.unwrap().status.success());
        let e2fsck = Command::new("e2fsck").arg("-fn").arg(image.path()).output().unwrap();
        assert!(!e2fsck.status.success(), "e2fsck finds that {feature} is missing");
        let device: Arc<dyn Device> = open_image(image.path(), true);
        let report = check(&device, &CheckOptions::default()).unwrap();
        let said = |text: &str| report.findings.iter().any(|found| found.text.contains(text));
        assert!(said(feature) && said(&format!("inode {}", number.0)), "{report:?}");
    }
}

/// A time that the inode cannot hold was shown as it was asked for until the cache forgot it.
#[tokio::test]
async fn a_time_is_shown_as_the_inode_holds_it_from_the_beginning() {
    let day = |secs| FileTime { secs, nanos: 123_456_789 };
    // Seconds of -2^31, and of the last moment that each size of inode has (ext4's).
    const FIRST: i64 = i32::MIN as i64;
    for (inode_bytes, last, nanos) in
        [("128", i64::from(i32::MAX), 0), ("256", FIRST + (1 << 34) - 1, 123_456_789)]
    {
        let image = made(&["-I", inode_bytes]);
        let tfs = mount(image.path());
        let number = write(&tfs, ROOT, "file", b"").await.unwrap();
        let unit = Duration::from_nanos(if nanos == 0 { 1_000_000_000 } else { 1 });
        assert_eq!(tfs.statfs(ROOT).await.unwrap().time_granularity, unit);
        let cases = [
            (day(1_000_000_000), FileTime { secs: 1_000_000_000, nanos }),
            (day(-5), FileTime { secs: -5, nanos }),
            (day(1 << 40), FileTime { secs: last, nanos: 0 }),
            (day(-(1 << 40)), FileTime { secs: FIRST, nanos: 0 }),
            (day(i64::MAX), FileTime { secs: last, nanos: 0 }),
        ];
        for (asked, kept) in cases {
            let to = Some(SetTime::To(asked));
            let changes = SetAttr { atime: to, mtime: to, ..SetAttr::default() };
            let said = tfs.setattr(ME, number, None, changes).await.unwrap().attr;
            assert_eq!((said.atime, said.mtime), (kept, kept), "{asked:?}");
            let held = tfs.getattr(number, None).await.unwrap().attr;
            assert_eq!(said, held, "{asked:?}");
        }
        let born = tfs.mkdir(ME, ROOT, b"directory", 0o755).await.unwrap().attr;
        assert_eq!(born, tfs.getattr(born.inode, None).await.unwrap().attr);
        let linked = tfs.link(ME, number, ROOT, b"linked").await.unwrap().attr;
        assert_eq!(linked, tfs.getattr(number, None).await.unwrap().attr);
        tfs.unmount().unwrap();
        drop(tfs);
        assert_image_clean(image.path(), "times");
    }
}

/// Also where times are 32 bits of seconds.
#[tokio::test]
async fn a_verifier_of_an_exclusive_creation_is_kept_whole_by_the_smallest_inode() {
    for inode_bytes in ["128", "256"] {
        let image = made(&["-I", inode_bytes]);
        for (name, bits) in
            [("a", u64::MAX), ("b", 0x8000_0000_7fff_ffff), ("c", 0x7fff_ffff_8000_0000), ("d", 0)]
        {
            let create = async |tfs: &Tfs, bits: u64| {
                let verifier = CreateVerifier(bits.to_be_bytes());
                tfs.create_exclusive(ME, ROOT, name.as_bytes(), 0o600, verifier).await
            };
            let tfs = mount(image.path());
            let made = create(&tfs, bits).await.unwrap().attr;
            tfs.unmount().unwrap();
            drop(tfs);
            let tfs = mount(image.path());
            assert_eq!(create(&tfs, bits).await.unwrap().attr, made);
            for bit in 0..64 {
                let other = create(&tfs, bits ^ 1 << bit).await;
                assert_eq!(other.unwrap_err(), Errno::EEXIST, "bit {bit} of {bits:x}");
            }
            tfs.unmount().unwrap();
        }
        assert_image_clean(image.path(), "exclusive creations");
    }
}

/// An allocation that failed left the file long and the disk full; the kernel, told of the error
/// alone, went on with the old length.
#[tokio::test]
async fn an_allocation_that_finds_too_little_room_leaves_the_file_as_it_was() {
    let image = made(&["-b", "1024", "-m", "0"]);
    let tfs = mount(image.path());
    let number = write(&tfs, ROOT, "file", b"hello world").await.unwrap();
    let handle = tfs.open(ME, number, OpenFlags::WRITE).await.unwrap().handle;
    let free = || tfs.usage().unwrap().free_blocks;
    tfs.commit().unwrap();
    let before = free();
    assert_eq!(tfs.fallocate(ME, number, handle, 0, 1 << 30, 0).await, Err(Errno::ENOSPC));
    assert_eq!(tfs.getattr(number, None).await.unwrap().attr.size_bytes, 11);
    tfs.commit().unwrap();
    assert_eq!(free(), before);
    tfs.fallocate(ME, number, handle, 0, 1 << 20, 0).await.unwrap();
    assert_eq!(tfs.getattr(number, None).await.unwrap().attr.size_bytes, 1 << 20);
    tfs.close(number, handle).await.unwrap();
    tfs.unmount().unwrap();
    drop(tfs);
    assert_image_clean(image.path(), "too little room");
}
