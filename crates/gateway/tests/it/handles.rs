//! File handles (`open_by_handle_at(2)`): what an NFS server names files by.

use std::fs::{self, File};
use std::io::read_to_string;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::Arc;

use atoll_gateway::fuse::{MountOptions, mount};

use crate::place::{Place, memory, skipped, unmount_unused};
use crate::raw::{handle_of, open_handle};

const ESTALE: i32 = 116;

/// The path by which the kernel knows an open directory.
fn path_of(directory: &File) -> std::path::PathBuf {
    fs::read_link(format!("/proc/self/fd/{}", directory.as_raw_fd())).unwrap()
}

/// The story: a handle was ESTALE as soon as the kernel had forgotten the file. A second mount of
/// the same file system has known none of its files.
#[test]
fn a_handle_leads_to_its_file_when_the_kernel_knows_it_no_longer() {
    if !rustix::process::geteuid().is_root() {
        skipped("opening files by handle needs root");
        return;
    }
    let mut made = None;
    let Some(place) = Place::with(&MountOptions::default(), |runtime| {
        let fs = Arc::new(memory(runtime));
        made = Some(fs.clone());
        fs
    }) else {
        return;
    };
    fs::create_dir_all(place.join("a/b/c")).unwrap();
    for name in ["a/b/kept", "a/b/removed"] {
        fs::write(place.join(name), name).unwrap();
    }
    let [kept, removed, directory, root] =
        ["a/b/kept", "a/b/removed", "a/b/c", ""].map(|name| handle_of(&place.join(name)).unwrap());
    let second = tempfile::tempdir().unwrap();
    let options = MountOptions::default();
    let mut again =
        mount(made.unwrap(), second.path(), &options, place.runtime().handle()).unwrap();
    let top = File::open(second.path()).unwrap();
    assert_eq!(read_to_string(open_handle(&top, &kept).unwrap()).unwrap(), "a/b/kept");
    let found = open_handle(&top, &directory).unwrap();
    // The kernel has asked for the way to the root.
    assert_eq!(path_of(&found), second.path().join("a/b/c"));
    assert_eq!(path_of(&open_handle(&top, &root).unwrap()), second.path());
    fs::remove_file(place.join("a/b/removed")).unwrap();
    forget_everything(place.path());
    let gone = open_handle(&top, &removed).unwrap_err();
    assert_eq!(gone.raw_os_error(), Some(ESTALE));
    drop((top, found));
    unmount_unused(place.runtime(), &mut again);
    place.unmount();
}

/// Makes the kernel give back what it knows of files that are not in use.
fn forget_everything(mount: &Path) {
    File::open(mount).unwrap().sync_all().unwrap();
    fs::write("/proc/sys/vm/drop_caches", "2").unwrap();
}
