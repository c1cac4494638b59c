//! The kernel's own drivers of ext2 read what TFS wrote, and TFS what they wrote: "backwards-
//! compatible with Ext2", as the paper wishes (§3.4).

use std::fs;
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use atoll_env::TokioRuntime;
use atoll_tfs::fs::{MountOptions, MountReport, Tfs};
use atoll_vfs::{Errno, FileSystem};
use tempfile::{NamedTempFile, TempDir};

use crate::calls::{ME, ROOT, read};
use crate::e2fsck::{assert_image_clean, open_image};
use crate::fsx::Fsx;
use crate::identical_maps::{pair, run};
use crate::snapshot::{Snapshot, assert_same, through_tfs, through_the_kernel};

/// Ends a mount of the kernel's: a tool that another test starts holds, for a moment, all that
/// this process has open there.
#[allow(clippy::disallowed_methods)]
pub(crate) fn unmount(directory: &Path) -> bool {
    (0..200).any(|_| {
        let output = Command::new("umount").arg(directory).output().unwrap();
        let done = output.status.success();
        if !done {
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        done
    })
}

/// An image mounted by the kernel, and no longer when this is dropped, however that is.
pub(crate) struct KernelMount {
    directory: TempDir,
    mounted: bool,
}

impl KernelMount {
    /// Mounts an image with one of the kernel's drivers.
    fn try_new(image: &Path, driver: &str, options: &str) -> Result<KernelMount, String> {
        let directory = TempDir::new().unwrap();
        // The loop device goes with the mount.
        let options = format!("loop,noatime,{options}");
        let output = Command::new("mount")
            .args(["-t", driver, "-o", &options])
            .arg(image)
            .arg(directory.path())
            .output()
            .map_err(|error| error.to_string())?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        if output.status.success() {
            Ok(KernelMount { directory, mounted: true })
        } else {
            Err(said)
        }
    }

    pub(crate) fn new(image: &Path, driver: &str, options: &str) -> KernelMount {
        KernelMount::try_new(image, driver, options).unwrap_or_else(|said| panic!("{said}"))
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.directory.path().to_owned()
    }

    /// Unmounts, which fails if anything stays in use.
    pub(crate) fn unmount(mut self) {
        self.mounted = !unmount(self.directory.path());
        assert!(!self.mounted, "umount");
    }
}

impl Drop for KernelMount {
    fn drop(&mut self) {
        if self.mounted {
            let _ = Command::new("umount").arg("-l").arg(self.directory.path()).status();
        }
    }
}

/// The kernel's drivers that can be used here: tried on a file system of mke2fs. Says loudly
/// which cannot.
pub(crate) fn drivers() -> Vec<&'static str> {
    let image = NamedTempFile::new().unwrap();
    image.as_file().set_len(4 << 20).unwrap();
    let made = Command::new("mke2fs").args(["-q", "-F", "-t", "ext2"]).arg(image.path()).status();
    assert!(made.unwrap().success(), "mke2fs");
    let usable = |driver: &&str| match KernelMount::try_new(image.path(), driver, "ro") {
        Ok(mount) => {
            mount.unmount();
            true
        }
        Err(said) => {
            skipped(&format!("the kernel's {driver} cannot be used here: {}", said.trim()));
            false
        }
    };
    ["ext4", "ext2"].into_iter().filter(usable).collect()
}

/// Past the harness, which keeps to itself what a passing test prints.
pub(crate) fn skipped(why: &str) {
    let _ = writeln!(std::io::stderr(), "\nSKIPPED: {why}");
}

pub(crate) fn mount(image: &Path) -> (Tfs, MountReport) {
    let device = open_image(image, false);
    let env = Arc::new(TokioRuntime::current());
    let quiet = MountOptions { background: false, ..MountOptions::default() };
    Tfs::mount(env, device, &quiet).unwrap()
}

async fn snapshot_of(image: &Path) -> Snapshot {
    let (tfs, report) = mount(image);
    assert!(!report.foreign, "nobody has written since");
    let snapshot = through_tfs(&tfs).await;
    tfs.unmount().unwrap();
    snapshot
}

/// As a driver shows it: ext2 knows whole seconds, and 32 bits of them.
fn as_shown_by(driver: &str, snapshot: &Snapshot) -> Snapshot {
    let mut shown = snapshot.clone();
    if driver == "ext2" {
        for seen in shown.values_mut() {
            for time in [&mut seen.mtime, &mut seen.ctime] {
                time.secs = i64::from(time.secs as i32);
                time.nanos = 0;
            }
        }
    }
    shown
}

fn assert_kernel_reads(image: &Path, driver: &str, expected: &Snapshot, story: &str) {
    let mount = KernelMount::new(image, driver, "ro");
    let shown = as_shown_by(driver, &through_the_kernel(&mount.path()));
    assert_same(&as_shown_by(driver, expected), &shown, &format!("{story}, {driver}"));
    mount.unmount();
}

/// What a user does with the kernel's driver, some of it to transparent files.
fn write_through_the_kernel(root: &Path, transparent: &[&String]) {
    let directory = root.join("from the kernel");
    fs::create_dir(&directory).unwrap();
    for n in 0..40 {
        let bytes: Vec<u8> = (0..n * 9000).map(|i| (i * 7 / 3 + n) as u8).collect();
        let file = directory.join(format!("file{n}"));
        fs::write(&file, bytes).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o4711)).unwrap();
    }
    fs::remove_file(directory.join("file7")).unwrap();
    fs::rename(directory.join("file8"), root.join("moved")).unwrap();
    fs::hard_link(root.join("moved"), directory.join("linked")).unwrap();
    symlink("y".repeat(500), directory.join("long")).unwrap();
    symlink("short", directory.join("short")).unwrap();
    let file = fs::File::options().write(true).open(directory.join("file30")).unwrap();
    file.set_len(1000).unwrap();
    file.set_len(50_000_000).unwrap();
    let flags = rustix::fs::XattrFlags::empty();
    rustix::fs::lsetxattr(root.join("moved"), "user.kernel", b"value", flags).unwrap();
    for entry in fs::read_dir(root).unwrap() {
        let entry = entry.unwrap();
        if entry.file_type().unwrap().is_file() && entry.file_name() != "moved" {
            let mut file = fs::File::options().append(true).open(entry.path()).unwrap();
            file.write_all(b"and more").unwrap();
        }
    }
    let contributed = root.join("contributed");
    for name in transparent {
        let len = fs::metadata(contributed.join(name)).unwrap().len();
        assert_eq!(len, 0, "others see a transparent file as an empty one");
    }
    fs::remove_file(contributed.join(transparent[0])).unwrap();
    fs::write(contributed.join(transparent[1]), b"ordinary now").unwrap();
}

async fn check(block_bytes: u32, seed: u64) {
    let drivers = drivers();
    let mut fsx = Fsx::new(block_bytes, seed).await;
    fsx.run(12_000).await;
    let (device, _, transparent) = fsx.finish().await;
    let image = device.image_without(|_| false);
    let expected = snapshot_of(image.path()).await;
    assert!(expected.len() > 30, "{} files", expected.len());
    for driver in &drivers {
        let story = format!("what TFS wrote in blocks of {block_bytes}");
        assert_kernel_reads(image.path(), driver, &expected, &story);
    }

    for driver in &drivers {
        let image = device.image_without(|_| false);
        let kernel = KernelMount::new(image.path(), driver, "rw");
        let names: Vec<&String> = transparent.keys().collect();
        write_through_the_kernel(&kernel.path(), &names);
        kernel.unmount();
        let story = format!("what {driver} wrote in blocks of {block_bytes}");
        assert_image_clean(image.path(), &story);
        let kernel = KernelMount::new(image.path(), driver, "ro");
        let expected = as_shown_by(driver, &through_the_kernel(&kernel.path()));
        kernel.unmount();

        let (tfs, report) = mount(image.path());
        assert!(report.foreign, "{story}: TFS notices");
        let shown = as_shown_by(driver, &through_tfs(&tfs).await);
        assert_same(&expected, &shown, &story);
        let parent = tfs.lookup(ME, ROOT, b"contributed").await.unwrap().attr.inode;
        assert_eq!(read(&tfs, parent, names[0]).await, Err(Errno::ENOENT), "removed");
        assert_eq!(read(&tfs, parent, names[1]).await.unwrap(), b"ordinary now");
        let (mut left, mut lost) = (0, 0);
        for (name, bytes) in transparent.iter().skip(2) {
            match read(&tfs, parent, name).await {
                Ok(read) => {
                    assert!(read == *bytes, "{story}: {name} has other bytes");
                    left += 1;
                }
                Err(errno) => {
                    assert_eq!(errno, Errno::ENOENT, "{story}: {name}");
                    lost += 1;
                }
            }
        }
        assert!(left > 0 && lost > 0, "{story}: {left} transparent files left, {lost} lost");
        tfs.unmount().unwrap();
        drop(tfs);
        assert_image_clean(image.path(), &format!("TFS after {story}"));
    }
}

#[tokio::test]
async fn the_kernel_and_tfs_read_what_the_other_wrote_1k() {
    check(1024, 11).await;
}

#[tokio::test]
async fn the_kernel_and_tfs_read_what_the_other_wrote_4k() {
    check(4096, 12).await;
}

#[tokio::test]
async fn the_kernel_reads_a_tree_that_took_the_place_of_transparent_files() {
    let (_, full) = pair(2048, 4).await;
    run(&full, 31, 2048).await;
    // Transparent files' bytes are of no account here.
    let image = full.image_without(|byte| (1..=200).contains(&byte));
    let expected = snapshot_of(image.path()).await;
    for driver in drivers() {
        assert_kernel_reads(image.path(), driver, &expected, "a disk full of transparent files");
    }
}
