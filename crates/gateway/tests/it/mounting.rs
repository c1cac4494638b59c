//! Mounting and unmounting, and what can go wrong with both.

use std::ffi::CString;
use std::fs::{self, File};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use atoll_gateway::fuse::{
    Draining, MountError, MountOptions, OurMount, UnmountError, mount, unmount,
};
use rustix::mount::MountFlags;

use crate::place::{Place, fuse_is_here, memory, runtime, unmount_unused, until};

fn is_mounted(path: &Path) -> bool {
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    table.lines().any(|line| line.split(' ').nth(4) == path.to_str())
}

fn try_mount(path: &Path) -> MountError {
    let runtime = runtime();
    let fs = Arc::new(memory(&runtime));
    mount(fs, path, &MountOptions::default(), runtime.handle()).unwrap_err()
}

#[test]
fn a_mount_ends_when_it_is_unmounted() {
    let Some(mut place) = Place::memory() else { return };
    let path = place.path().to_owned();
    assert!(is_mounted(&path));
    fs::write(path.join("f"), "x").unwrap();
    let mut mounted = place.mounted.take().unwrap();
    unmount_unused(place.runtime(), &mut mounted);
    assert!(!is_mounted(&path));
    assert!(fs::read_dir(&path).unwrap().next().is_none());
    // Both again: nothing is left to do, and nothing to wait for.
    place.runtime().block_on(mounted.unmount(false)).unwrap();
    place.runtime().block_on(mounted.wait()).unwrap();
}

#[test]
fn waiting_ends_when_another_unmounts() {
    let Some(mut place) = Place::memory() else { return };
    let path = place.path().to_owned();
    let mut mounted = place.mounted.take().unwrap();
    let waiting = place.runtime().spawn(async move { mounted.wait().await });
    unmount(&path, false).unwrap();
    place.runtime().block_on(waiting).unwrap().unwrap();
    assert!(matches!(unmount(&path, false), Err(UnmountError::NotMounted { .. })));
}

#[test]
fn dropping_a_mount_unmounts() {
    let Some(mut place) = Place::memory() else { return };
    let path = place.path().to_owned();
    drop(place.mounted.take());
    assert!(!is_mounted(&path));
}

#[test]
fn a_mount_in_use_is_busy_until_it_is_let_go() {
    let Some(mut place) = Place::memory() else { return };
    let path = place.path().to_owned();
    fs::write(path.join("f"), "still here").unwrap();
    let file = File::open(path.join("f")).unwrap();
    let mut mounted = place.mounted.take().unwrap();
    let refused = place.runtime().block_on(mounted.unmount(false)).unwrap_err();
    assert!(matches!(refused, UnmountError::Busy { .. }), "{refused}");
    assert!(refused.to_string().contains("in use"), "{refused}");
    assert!(is_mounted(&path));
    place.runtime().block_on(mounted.unmount(true)).unwrap();
    assert!(!is_mounted(&path));
    // A program that has it open goes on using it, and then it ends.
    assert_eq!(std::io::read_to_string(&file).unwrap(), "still here");
    drop(file);
    place.runtime().block_on(mounted.wait()).unwrap();
}

/// The story: processes that had a file open when the server was told to end got ENOTCONN.
#[test]
fn a_mount_that_is_drained_serves_open_files_until_they_are_closed() {
    let Some(mut place) = Place::memory() else { return };
    let path = place.path().to_owned();
    let mut file = File::create(path.join("f")).unwrap();
    let mut mounted = place.mounted.take().unwrap();
    let (tell, mut told) = tokio::sync::mpsc::unbounded_channel();
    let draining = place.runtime().spawn(async move {
        let say = |draining: Draining<'_>| tell.send(draining.to_string()).unwrap();
        mounted.drain(Duration::from_millis(300), say).await
    });
    let mut next = || place.runtime().block_on(told.recv()).unwrap();
    assert!(next().contains("in use: waiting up to 0 s"));
    assert!(next().contains("open files are served"));
    // The lazy unmount follows.
    until(|| !is_mounted(&path));
    file.write_all(b"still here").unwrap();
    assert!(!draining.is_finished());
    drop(file);
    place.runtime().block_on(draining).unwrap().unwrap();
}

#[test]
fn a_mount_that_is_let_go_in_time_is_drained_at_once() {
    let Some(mut place) = Place::memory() else { return };
    let file = File::create(place.join("f")).unwrap();
    let mut mounted = place.mounted.take().unwrap();
    let (tell, mut told) = tokio::sync::mpsc::unbounded_channel();
    let draining = place.runtime().spawn(async move {
        let say = |draining: Draining<'_>| tell.send(draining.to_string()).unwrap();
        mounted.drain(Duration::from_secs(3600), say).await
    });
    let said = place.runtime().block_on(told.recv()).unwrap();
    assert!(said.contains("in use: waiting up to 3600 s"), "{said}");
    drop(file);
    place.runtime().block_on(draining).unwrap().unwrap();
    assert_eq!(place.runtime().block_on(told.recv()), None, "nothing more was said");
    assert!(!is_mounted(place.path()));
}

/// The story: `unmount` waited without a word for a container that had a copy of the mount.
#[test]
fn a_copy_in_another_mount_namespace_is_told_of() {
    let Some(mut place) = Place::memory() else { return };
    let apart = ["--mount", "--propagation", "private", "sleep", "3600"];
    let root = rustix::process::geteuid().is_root();
    let Some(mut other) = root.then(|| Command::new("unshare").args(apart).spawn().ok()).flatten()
    else {
        crate::place::skipped("another mount namespace needs root and unshare");
        return;
    };
    let namespace = |process: &str| fs::read_link(format!("/proc/{process}/ns/mnt")).unwrap();
    until(|| namespace(&other.id().to_string()) != namespace("self"));
    let ours = OurMount::at(place.path()).unwrap();
    assert_eq!(ours.source, "atoll");
    assert_eq!(ours.mounted_elsewhere(), Some(other.id()));
    let path = place.path().to_owned();
    let mut mounted = place.mounted.take().unwrap();
    let (tell, mut told) = tokio::sync::mpsc::unbounded_channel();
    let draining = place.runtime().spawn(async move {
        let say = |draining: Draining<'_>| tell.send(draining.to_string()).unwrap();
        mounted.drain(Duration::from_secs(3600), say).await
    });
    let said = place.runtime().block_on(told.recv()).unwrap();
    assert!(said.contains(&format!("mount namespace of process {}", other.id())), "{said}");
    assert!(!is_mounted(&path));
    other.kill().unwrap();
    other.wait().unwrap();
    place.runtime().block_on(draining).unwrap().unwrap();
    assert_eq!(ours.mounted_elsewhere(), None);
}

#[test]
fn the_kernels_table_says_what_was_asked_for() {
    let of = |options: &MountOptions| {
        let place = Place::with(options, |runtime| Arc::new(memory(runtime)))?;
        let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let mut lines = table.lines().map(|line| line.split(' ').collect::<Vec<_>>());
        let line = lines.find(|fields| Some(fields[4]) == place.path().to_str()).unwrap();
        let found = line[5].to_owned();
        place.unmount();
        Some(found)
    };
    let plain = MountOptions::default();
    let Some(found) = of(&plain) else { return };
    assert_eq!(found, "rw,nosuid,nodev,noatime");
    let kept = MountOptions { access_times: true, ..plain.clone() };
    assert_eq!(of(&kept).unwrap(), "rw,nosuid,nodev,relatime");
    if !rustix::process::geteuid().is_root() {
        crate::place::skipped("only root may mount with suid and dev");
        return;
    }
    let all = MountOptions { access_times: true, set_user_id: true, devices: true, ..plain };
    assert_eq!(of(&all).unwrap(), "rw,relatime");
}

#[test]
fn unusable_mount_points_are_refused_with_the_reason() {
    let Some(place) = Place::memory() else { return };
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    assert!(matches!(try_mount(&path.join("no")), MountError::NoMountpoint { .. }));
    fs::write(path.join("file"), "").unwrap();
    assert!(matches!(try_mount(&path.join("file")), MountError::NotADirectory { .. }));
    assert!(matches!(try_mount(path), MountError::NotEmpty { .. }));
    assert!(matches!(try_mount(place.path()), MountError::AlreadyMounted { .. }));
    let single = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let fs = Arc::new(memory(place.runtime()));
    let refused = mount(fs, path, &MountOptions::default(), single.handle()).unwrap_err();
    assert!(matches!(refused, MountError::SingleThreaded));
    place.unmount();
}

#[test]
fn a_mount_hides_what_is_below_when_told_to() {
    if !fuse_is_here() {
        return;
    }
    let (runtime, directory) = (runtime(), tempfile::tempdir().unwrap());
    let hidden = directory.path().join("hidden");
    fs::write(&hidden, "").unwrap();
    let options = MountOptions { nonempty: true, ..MountOptions::default() };
    let fs = Arc::new(memory(&runtime));
    let mut mounted = mount(fs, directory.path(), &options, runtime.handle()).unwrap();
    assert!(!hidden.exists());
    unmount_unused(&runtime, &mut mounted);
    assert!(hidden.exists());
}

#[test]
fn only_our_mounts_are_unmounted() {
    let not_ours = unmount(Path::new("/proc"), false).unwrap_err();
    assert!(matches!(&not_ours, UnmountError::NotOurs { kind, .. } if kind == "proc"));
    let nowhere = unmount(Path::new("/no/such/place"), false).unwrap_err();
    assert!(matches!(nowhere, UnmountError::Unreadable { .. }), "{nowhere}");
}

/// Takes a broken mount away if the test fails before it does.
struct Broken<'a>(&'a Path);

impl Drop for Broken<'_> {
    fn drop(&mut self) {
        let _ = unmount(self.0, true);
    }
}

#[test]
fn a_mount_whose_process_died_is_named_and_can_be_taken_away() {
    if !fuse_is_here() || !rustix::process::geteuid().is_root() {
        crate::place::skipped("a dead mount is made by hand, which needs root");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    let device = File::options().read(true).write(true).open("/dev/fuse").unwrap();
    let data =
        format!("fd={},rootmode=40000,user_id=0,group_id=0,subtype=atoll", device.as_raw_fd());
    let data = CString::new(data).unwrap();
    rustix::mount::mount("atoll", path, "fuse", MountFlags::empty(), Some(data.as_c_str()))
        .unwrap();
    let _broken = Broken(path);
    // As when the process that served it is killed.
    drop(device);
    assert_eq!(fs::metadata(path).unwrap_err().raw_os_error(), Some(107));
    for below in [path.to_owned(), path.join("below/it")] {
        let refused = try_mount(&below);
        assert!(matches!(&refused, MountError::Broken { path: p } if p == path), "{refused}");
        assert!(refused.to_string().contains("unmount it first"), "{refused}");
    }
    unmount(path, false).unwrap();
    assert!(fs::metadata(path).unwrap().is_dir());
}
