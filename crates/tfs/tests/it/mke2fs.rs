//! File systems as the real mke2fs makes them: those of `-t ext2` are taken with whatever
//! options, worked on and left clean; others are refused by the name of what is not understood.

use std::process::Command;
use std::sync::Arc;

use atoll_env::TokioRuntime;
use atoll_tfs::fs::{MountError, MountOptions, MountReport, Tfs};
use atoll_vfs::{Errno, FileSystem, OpenFlags, SetAttr, SetTime, Writer};
use atoll_vfs::{FileTime, InodeNumber};
use bytes::Bytes;
use tempfile::NamedTempFile;

use crate::calls::{ME, ROOT, contribution, fill, owned, read, write};
use crate::e2fsck::{assert_image_clean, open_image};

/// An image of mke2fs with these options.
fn made(mib: u64, options: &[&str]) -> NamedTempFile {
    let image = NamedTempFile::new().unwrap();
    image.as_file().set_len(mib << 20).unwrap();
    let output = Command::new("mke2fs")
        .arg("-q")
        .arg("-F")
        .args(options)
        .arg(image.path())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "mke2fs {options:?}: {said}");
    image
}

fn mount(image: &NamedTempFile) -> Result<(Tfs, MountReport), MountError> {
    let device = open_image(image.path(), false);
    let env = Arc::new(TokioRuntime::current());
    let quiet = MountOptions { background: false, ..MountOptions::default() };
    Tfs::mount(env, device, &quiet)
}

/// Mounts twice, with ordinary and transparent files, and lets e2fsck judge.
async fn work_on(mib: u64, options: &[&str]) {
    let story = format!("mke2fs {}", options.join(" "));
    let image = made(mib, options);
    let (tfs, report) = mount(&image).unwrap_or_else(|error| panic!("{story}: {error}"));
    assert!(report.established && !report.foreign && !report.recovered, "{story}: {report:?}");
    let parent = contribution(&tfs).await;
    // More and longer than is kept when ordinary files come.
    let count = fill(&tfs, parent, 150_000).await;
    assert!(count * 150_000 > (mib << 20) / 2, "{story}: {count} transparent files");
    let directory = tfs.mkdir(ME, ROOT, b"directory", 0o750).await.unwrap().attr.inode;
    for n in 0..40u64 {
        let (name, len) = (format!("ordinary{n}"), n as usize * 9000);
        write(&tfs, directory, &name, &owned(500 + n, len)).await.unwrap();
    }
    // Two levels of indirect blocks, and three with a hole.
    let long = tfs.create(ME, ROOT, b"long", 0o600, OpenFlags::WRITE).await.unwrap();
    let (number, handle) = (long.0.attr.inode, long.1.handle);
    for at in [0, 5 << 20, 66 << 20] {
        assert_eq!(
            tfs.write(Writer::At(ME), number, handle, at, Bytes::from(owned(at, 3000))).await,
            Ok(3000)
        );
    }
    tfs.close(number, handle).await.unwrap();
    let time = FileTime { secs: 1_234_567_890, nanos: 0 };
    let changes =
        SetAttr { mtime: Some(SetTime::To(time)), uid: Some(70_000), ..SetAttr::default() };
    tfs.setattr(ME, number, None, changes).await.unwrap();
    tfs.unmount().unwrap();
    drop(tfs);
    assert_image_clean(image.path(), &story);

    let (tfs, report) = mount(&image).unwrap_or_else(|error| panic!("{story}: {error}"));
    assert_eq!(report, MountReport { ..MountReport::default() }, "{story}");
    for n in 0..40u64 {
        let bytes = read(&tfs, directory, &format!("ordinary{n}")).await.unwrap();
        assert_eq!(bytes, owned(500 + n, n as usize * 9000), "{story}: ordinary{n}");
    }
    assert_long_file(&tfs, number, time, &story).await;
    let mut left = 0;
    for n in 0..count {
        match read(&tfs, parent, &format!("t{n}")).await {
            Ok(bytes) => {
                assert!(bytes == owned(n, 150_000), "{story}: t{n} has other bytes");
                left += 1;
            }
            Err(errno) => assert_eq!(errno, Errno::ENOENT, "{story}: t{n}"),
        }
    }
    assert!(left > 0 && left < count, "{story}: {left} of {count} transparent files");
    for n in 0..40u64 {
        tfs.unlink(ME, directory, format!("ordinary{n}").as_bytes()).await.unwrap();
    }
    tfs.rmdir(ME, ROOT, b"directory").await.unwrap();
    tfs.unmount().unwrap();
    drop(tfs);
    assert_image_clean(image.path(), &story);
}

async fn assert_long_file(tfs: &Tfs, number: InodeNumber, time: FileTime, story: &str) {
    let attr = tfs.getattr(number, None).await.unwrap().attr;
    assert_eq!((attr.mtime, attr.uid), (time, 70_000), "{story}");
    assert_eq!(attr.size_bytes, (66 << 20) + 3000, "{story}");
    let handle = tfs.open(ME, number, OpenFlags::READ).await.unwrap().handle;
    for at in [0, 5 << 20, 66 << 20] {
        let bytes = tfs.read(number, handle, at, 3000).await.unwrap();
        assert_eq!(bytes, owned(at, 3000), "{story}: at {at}");
        let hole = tfs.read(number, handle, at + (1 << 20), 5000).await.unwrap();
        assert!(hole.iter().all(|byte| *byte == 0), "{story}: behind {at}");
    }
    tfs.close(number, handle).await.unwrap();
}

#[tokio::test]
async fn whatever_mke2fs_makes_as_ext2_is_taken() {
    let cases: &[(u64, &[&str])] = &[
        (20, &["-t", "ext2"]),
        (20, &["-t", "ext2", "-b", "1024"]),
        (32, &["-t", "ext2", "-b", "2048"]),
        (48, &["-t", "ext2", "-b", "4096"]),
        (16, &["-t", "ext2", "-b", "1024", "-I", "128", "-N", "1024"]),
        (24, &["-t", "ext2", "-b", "4096", "-I", "128", "-m", "0"]),
        (24, &["-t", "ext2", "-b", "4096", "-I", "512", "-N", "3000"]),
        (16, &["-t", "ext2", "-b", "1024", "-m", "20", "-g", "1024"]),
        (16, &["-t", "ext2", "-b", "1024", "-O", "none", "-I", "128"]),
        (16, &["-t", "ext2", "-b", "1024", "-O", "none,filetype"]),
        (16, &["-t", "ext2", "-b", "1024", "-O", "^sparse_super,^resize_inode"]),
        (16, &["-t", "ext2", "-b", "1024", "-O", "^dir_index,^large_file,^ext_attr"]),
        (16, &["-t", "ext2", "-b", "1024", "-E", "resize=4194304,lazy_itable_init=0"]),
        (16, &["-t", "ext2", "-b", "1024", "-L", "a label", "-E", "stride=16,stripe_width=64"]),
        (16, &["-t", "ext2", "-b", "1024", "-r", "0", "-I", "128"]),
        (16, &["-t", "ext2", "-b", "1024", "-i", "65536"]),
        (24, &["-t", "ext2", "-b", "1024", "-i", "1024"]),
    ];
    for (mib, options) in cases {
        work_on(*mib, options).await;
    }
}

#[tokio::test]
async fn what_is_not_understood_is_refused_by_name() {
    let cases: &[(&[&str], &[&str])] = &[
        (&["-t", "ext4"], &["has_journal", "extent", "64bit", "flex_bg", "metadata_csum"]),
        (&["-t", "ext3"], &["has_journal"]),
        (&["-t", "ext2", "-O", "has_journal"], &["has_journal"]),
        (&["-t", "ext2", "-O", "extent"], &["extent"]),
        (&["-t", "ext2", "-O", "64bit,extent"], &["64bit", "extent"]),
        (&["-t", "ext2", "-O", "flex_bg"], &["flex_bg"]),
        (&["-t", "ext2", "-O", "meta_bg,^resize_inode"], &["meta_bg"]),
        (&["-t", "ext2", "-O", "uninit_bg"], &["uninit_bg"]),
        (&["-t", "ext2", "-O", "metadata_csum"], &["metadata_csum"]),
        (&["-t", "ext2", "-O", "huge_file"], &["huge_file"]),
        (&["-t", "ext2", "-O", "quota"], &["quota"]),
        (&["-t", "ext2", "-O", "mmp"], &["mmp"]),
        (&["-t", "ext2", "-O", "inline_data"], &["inline_data"]),
        (&["-t", "ext2", "-O", "encrypt"], &["encrypt"]),
        (&["-t", "ext2", "-O", "casefold"], &["casefold"]),
        (&["-t", "ext2", "-O", "sparse_super2,^resize_inode"], &["sparse_super2"]),
        (&["-t", "ext2", "-O", "bigalloc,extent"], &["bigalloc"]),
        (&["-t", "ext2", "-O", "ea_inode"], &["ea_inode"]),
        (&["-t", "ext2", "-O", "large_dir"], &["large_dir"]),
        (&["-t", "ext2", "-O", "dir_nlink"], &["dir_nlink"]),
        (&["-t", "ext2", "-O", "extra_isize"], &["extra_isize"]),
        (&["-t", "ext2", "-O", "project,quota"], &["project"]),
    ];
    for (options, names) in cases {
        let image = made(24, options);
        let before = blake3::hash(&std::fs::read(image.path()).unwrap());
        let Err(error) = mount(&image) else { panic!("mke2fs {options:?} was taken") };
        let said = error.to_string();
        for name in *names {
            assert!(said.contains(name), "mke2fs {options:?}: {said}");
        }
        let after = blake3::hash(&std::fs::read(image.path()).unwrap());
        assert_eq!(before, after, "mke2fs {options:?}: nothing is changed");
    }
}

#[tokio::test]
async fn blocks_that_are_too_large_or_no_file_system_are_refused() {
    let said = |image: &NamedTempFile| mount(image).err().map(|error| error.to_string());
    let image = made(64, &["-t", "ext2", "-b", "8192"]);
    assert!(said(&image).is_some_and(|said| said.contains("block size")), "{:?}", said(&image));
    let blank = NamedTempFile::new().unwrap();
    blank.as_file().set_len(1 << 20).unwrap();
    assert!(said(&blank).is_some_and(|said| said.contains("ext2")), "{:?}", said(&blank));
}

/// Directories with an index are read, and changed ones lose it, as with the kernel's ext2.
#[tokio::test]
async fn indexed_directories_are_read_and_changed() {
    let image = made(16, &["-t", "ext2", "-b", "1024", "-O", "dir_index"]);
    let tree = tempfile::tempdir().unwrap();
    let directory = tree.path().join("large");
    std::fs::create_dir(&directory).unwrap();
    for n in 0..400 {
        std::fs::write(directory.join(format!("a rather long name, number {n}")), b"x").unwrap();
    }
    // As e2fsck makes them.
    let image_path = image.path();
    let filled = Command::new("mke2fs")
        .args(["-q", "-F", "-t", "ext2", "-b", "1024", "-O", "dir_index", "-N", "1000", "-d"])
        .arg(tree.path())
        .arg(image_path)
        .status();
    assert!(filled.unwrap().success());
    let optimised = Command::new("e2fsck").arg("-fyD").arg(image_path).output().unwrap();
    assert!(optimised.status.code().is_some_and(|code| code <= 1), "{optimised:?}");
    let indexed =
        Command::new("debugfs").args(["-R", "htree_dump /large"]).arg(image_path).output();
    let dump = String::from_utf8_lossy(&indexed.unwrap().stdout).into_owned();
    assert!(dump.contains("Root node dump"), "e2fsck made an index: {dump}");

    let (tfs, _) = mount(&image).unwrap();
    let large = tfs.lookup(ME, ROOT, b"large").await.unwrap().attr.inode;
    for n in 0..400 {
        let name = format!("a rather long name, number {n}");
        assert_eq!(read(&tfs, large, &name).await.unwrap(), b"x", "{name}");
    }
    for n in (0..400).step_by(3) {
        let name = format!("a rather long name, number {n}");
        tfs.unlink(ME, large, name.as_bytes()).await.unwrap();
        write(&tfs, large, &format!("new {n}"), b"y").await.unwrap();
    }
    tfs.unmount().unwrap();
    drop(tfs);
    assert_image_clean(image.path(), "an indexed directory was changed");
}

#[tokio::test]
async fn a_disk_without_room_for_the_records_is_refused_and_stays_whole() {
    let image = made(1, &["-t", "ext2", "-b", "1024", "-N", "16"]);
    let tree = tempfile::tempdir().unwrap();
    std::fs::write(tree.path().join("most of it"), vec![1; 900_000]).unwrap();
    let filled = Command::new("mke2fs")
        .args(["-q", "-F", "-t", "ext2", "-b", "1024", "-m", "0", "-d"])
        .args([tree.path(), image.path()])
        .status();
    assert!(filled.unwrap().success());
    let Err(error) = mount(&image) else { panic!("there is no room") };
    assert!(error.to_string().contains("space"), "{error}");
    assert_e2fsck_clean(&image);
}

/// As [`assert_image_clean`], for what is no TFS.
fn assert_e2fsck_clean(image: &NamedTempFile) {
    let output = Command::new("e2fsck").arg("-fn").arg(image.path()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}
