//! Listings: what others moved or damaged is in them like everything else.

use std::io;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use atoll_env::TokioRuntime;
use atoll_tfs::device::Device;
use atoll_tfs::fs::{MountOptions, Tfs};
use atoll_tfs::mkfs::mkfs;
use atoll_vfs::{DirEntry, Errno, FileSystem, InodeNumber};
use tempfile::NamedTempFile;

use crate::calls::{ME, ROOT, contribution, owned, read, write};
use crate::e2fsck::{assert_image_clean, open_image};
use crate::mkfs::options;

fn mount(image: &Path) -> Tfs {
    let env = Arc::new(TokioRuntime::current());
    let quiet = MountOptions { background: false, ..MountOptions::default() };
    Tfs::mount(env, open_image(image, false), &quiet).unwrap().0
}

fn debugfs(image: &Path, command: &str) {
    let output = Command::new("debugfs").args(["-w", "-R", command]).arg(image).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.lines().count() <= 1, "{command}: {said}");
}

/// An image of TFS with directories `contributed` (transparent), `other` and `other/sub`, and the
/// same files in the first two.
async fn image() -> NamedTempFile {
    let image = NamedTempFile::new().unwrap();
    image.as_file().set_len(16 << 20).unwrap();
    mkfs(&(open_image(image.path(), false) as _), &options(1024)).unwrap();
    let tfs = mount(image.path());
    let contributed = contribution(&tfs).await;
    let other = tfs.mkdir(ME, ROOT, b"other", 0o755).await.unwrap().attr.inode;
    tfs.mkdir(ME, other, b"sub", 0o755).await.unwrap();
    for n in 0..4 {
        for parent in [contributed, other] {
            write(&tfs, parent, &format!("f{n}"), &owned(n, 50_000)).await.unwrap();
        }
    }
    tfs.unmount().unwrap();
    image
}

/// All entries of a directory, with attributes where they can be read.
async fn list(tfs: &Tfs, directory: InodeNumber) -> Vec<DirEntry> {
    let handle = tfs.opendir(ME, directory).await.unwrap().handle;
    let mut listed = Vec::new();
    loop {
        let cookie = listed.last().map_or(0, |entry: &DirEntry| entry.cookie);
        let page = tfs.readdir(directory, handle, cookie, 2, true).await.unwrap();
        if page.is_empty() {
            break;
        }
        listed.extend(page);
    }
    tfs.closedir(directory, handle).await.unwrap();
    for entry in listed.iter().filter_map(|entry| entry.entry) {
        tfs.forget(entry.attr.inode, 1);
    }
    listed
}

fn names(listed: &[DirEntry]) -> Vec<String> {
    let mut names: Vec<_> =
        listed.iter().map(|entry| String::from_utf8_lossy(&entry.name).into_owned()).collect();
    names.sort();
    names
}

/// The front end finds files by listings with attributes too, and then looks up no name. The
/// record of the directory stayed what it was, and the check took that for damage.
#[tokio::test]
async fn a_transparent_file_that_others_moved_is_known_by_its_new_directory() {
    for is_listed in [true, false] {
        let image = image().await;
        for n in 0..2 {
            debugfs(image.path(), &format!("ln contributed/f{n} other/moved{n}"));
            debugfs(image.path(), &format!("unlink contributed/f{n}"));
        }
        // debugfs alone leaves the superblock as it is; a mount by the kernel does not.
        debugfs(image.path(), "set_super_value mnt_count 7");
        let tfs = mount(image.path());
        if is_listed {
            let other = tfs.lookup(ME, ROOT, b"other").await.unwrap().attr.inode;
            let listed = list(&tfs, other).await;
            let moved = listed.iter().find(|entry| *entry.name == *b"moved0").unwrap();
            let number = moved.entry.unwrap().attr.inode;
            let handle = tfs.open(ME, number, atoll_vfs::OpenFlags::READ).await.unwrap().handle;
            let bytes = tfs.read(number, handle, 0, 60_000).await.unwrap();
            assert!(bytes == owned(0, 50_000), "its own bytes");
            tfs.close(number, handle).await.unwrap();
        } else {
            tfs.clean().unwrap();
        }
        tfs.unmount().unwrap();
        drop(tfs);
        assert_image_clean(image.path(), &format!("moved by others, listed: {is_listed}"));
    }
}

/// A backup that lists a directory and copies what it finds left such files out, and said nothing.
#[tokio::test]
async fn a_damaged_file_is_listed_by_name_and_its_lookup_fails() {
    let image = image().await;
    debugfs(image.path(), "sif /other/f1 size 0xffffffffffff");
    debugfs(image.path(), "sif /other/sub block[0] 99999999");
    let tfs = mount(image.path());
    let other = tfs.lookup(ME, ROOT, b"other").await.unwrap().attr.inode;
    let listed = list(&tfs, other).await;
    assert_eq!(names(&listed), ["f0", "f1", "f2", "f3", "sub"]);
    for entry in listed {
        let is_damaged = [&b"f1"[..], b"sub"].contains(&&entry.name[..]);
        assert_eq!(entry.entry.is_none(), is_damaged, "{entry:?}");
        let found = tfs.lookup(ME, other, &entry.name).await.map(|found| found.attr.kind);
        assert_eq!(found, if is_damaged { Err(Errno::EIO) } else { Ok(entry.kind) });
    }
    assert!(read(&tfs, other, "f2").await.unwrap() == owned(2, 50_000));
    assert_eq!(tfs.failure(), None);
    tfs.unmount().unwrap();
}

/// A device that counts its reads.
#[derive(Debug)]
struct Counted {
    device: Arc<dyn Device>,
    reads: AtomicUsize,
}

impl Device for Counted {
    fn len_bytes(&self) -> u64 {
        self.device.len_bytes()
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.reads.fetch_add(1, Ordering::SeqCst);
        self.device.read_at(offset, buffer)
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.device.write_at(offset, data)
    }

    fn sync(&self) -> io::Result<()> {
        self.device.sync()
    }
}

/// A server of NFS holds a directory for as long as one call: each call read the whole directory again.
#[tokio::test]
async fn names_are_found_at_once_in_a_directory_that_nobody_held_meanwhile() {
    const NAMES: usize = 6000;
    const LOOKUPS: usize = 100;
    let image = NamedTempFile::new().unwrap();
    image.as_file().set_len(16 << 20).unwrap();
    mkfs(&(open_image(image.path(), false) as _), &options(1024)).unwrap();
    let tfs = mount(image.path());
    let directory = tfs.mkdir(ME, ROOT, b"many", 0o755).await.unwrap().attr.inode;
    let file = write(&tfs, ROOT, "file", b"").await.unwrap();
    for n in 0..NAMES {
        tfs.link(ME, file, directory, format!("name {n}").as_bytes()).await.unwrap();
    }
    let handle = tfs.handle_of(directory).await.unwrap();
    tfs.unmount().unwrap();
    drop(tfs);

    let device =
        Arc::new(Counted { device: open_image(image.path(), false), reads: AtomicUsize::new(0) });
    let env = Arc::new(TokioRuntime::current());
    // Blocks that were read are not kept either.
    let options =
        MountOptions { background: false, cache_bytes: 16 << 10, ..MountOptions::default() };
    let tfs = Tfs::mount(env, device.clone(), &options).unwrap().0;
    let find = async |n: usize| {
        let directory = tfs.by_handle(ME, &handle).await.unwrap().attr.inode;
        let name = format!("name {n}");
        let file = tfs.lookup(ME, directory, name.as_bytes()).await.unwrap().attr.inode;
        tfs.forget(file, 1);
        tfs.forget(directory, 1);
    };
    find(0).await;
    let before = device.reads.load(Ordering::SeqCst);
    assert!(before >= NAMES / 64, "the directory was read once: {before}");
    for n in 0..LOOKUPS {
        find(n * 59).await;
    }
    let reads = device.reads.load(Ordering::SeqCst) - before;
    assert!(reads < 10 * LOOKUPS, "{reads} reads of {LOOKUPS} lookups");
    tfs.unmount().unwrap();
}
