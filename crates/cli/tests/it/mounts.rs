//! Mounts: the kernel's view of a volume, which outlives its node's restarts.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::processes::{
    Ring, TIMED_OUT, assert_holds, assert_same, atoll, can_mount, make_tree, noise, run, unmount,
    unpublished, until,
};

#[test]
fn a_mount_shows_the_tree_through_another_node() {
    if !can_mount("a_mount_shows_the_tree_through_another_node") {
        return;
    }
    let mut ring = Ring::of(3);
    let (source, address) = ring.publish_tree();
    let mount = ring.mount(1, &address, &[]);
    assert_same(&source, &mount);
    let written = fs::write(mount.join("new"), "x").expect_err("read-only");
    assert_eq!(written.raw_os_error(), Some(30), "EROFS");
    assert_eq!(fs::metadata(&mount).expect("there").uid(), rustix::process::geteuid().as_raw());
    let twice = run(ring.nodes[1].command(["mount", &address]).arg(&mount));
    twice.failed(1, &["mounted at", "already"]);
    unmount(atoll().arg("unmount").arg(&mount));
    assert_eq!(fs::read_dir(&mount).expect("there").count(), 0, "unmounted");
    run(atoll().arg("unmount").arg(&mount)).failed(4, &["nothing is mounted"]);
}

#[test]
fn what_cannot_be_mounted_is_explained_at_once() {
    if !can_mount("what_cannot_be_mounted_is_explained_at_once") {
        return;
    }
    let ring = Ring::of(1);
    let (source, address) = ring.publish_tree();
    let mount_on = |place: &std::path::Path, address: &str| {
        run(ring.nodes[0].command(["mount", address]).arg(place))
    };
    mount_on(&ring.path("missing"), &address).failed(4, &["does not exist", "mkdir"]);
    mount_on(&source, &address).failed(1, &["not empty"]);
    mount_on(&source.join("run.sh"), &address).failed(1, &["not a directory"]);
    let empty = ring.path("empty");
    fs::create_dir(&empty).expect("a directory");
    let said = mount_on(&empty, &unpublished()).failed(4, &["cannot open"]);
    assert_eq!(said.stdout, "");
    assert!(!said.stderr.contains("log"), "the reason is told, not where to look: {said:?}");
}

#[test]
fn a_mount_survives_a_restart_of_its_node() {
    if !can_mount("a_mount_survives_a_restart_of_its_node") {
        return;
    }
    let mut ring = Ring::of(3);
    let source = ring.path("tree");
    make_tree(&source);
    fs::write(source.join("big"), noise(5 << 20, 5)).expect("a file");
    let address = ring.publish(&source);
    // No memory for blocks: whatever the kernel does not have comes through the node.
    let mount = ring.mount(1, &address, &["--cache", "0"]);
    assert_eq!(fs::read(mount.join("run.sh")).expect("reads"), b"#!/bin/sh\necho hello\n");
    ring.nodes[1].kill();
    let reader = {
        let mount = mount.clone();
        std::thread::spawn(move || fs::read(mount.join("big")))
    };
    ring.nodes[1].restart();
    // It waits for a few seconds, which may not be enough on a busy machine.
    match reader.join().expect("no panic") {
        Err(error) if error.raw_os_error() == Some(TIMED_OUT) => {}
        read => assert!(read.expect("is read") == noise(5 << 20, 5), "the bytes are the file's"),
    }
    assert_holds(&mount.join("big"), &noise(5 << 20, 5));
    assert_same(&source, &mount);
}

/// What the root of a mount says of itself.
fn status_of(mount: &Path) -> String {
    let mut text = [0; 1000];
    let len = rustix::fs::getxattr(mount, "user.atoll.status", &mut text[..]).expect("is said");
    String::from_utf8_lossy(&text[..len]).into_owned()
}

/// `ls` hung for a minute in a mount whose node was down, and nothing said why.
#[test]
fn a_mount_whose_node_is_down_says_so_and_recovers() {
    if !can_mount("a_mount_whose_node_is_down_says_so_and_recovers") {
        return;
    }
    let mut ring = Ring::of(2);
    let (source, address) = ring.publish_tree();
    let mount = ring.mount(1, &address, &["--cache", "0"]);
    assert_eq!(status_of(&mount), "ok");
    let read = |name: &str| fs::read(mount.join("docs").join(name));
    ring.nodes[1].kill();
    for name in ["file01.txt", "file02.txt", "file03.txt"] {
        let error = read(name).expect_err("nobody can be asked");
        assert_eq!(error.raw_os_error(), Some(TIMED_OUT));
    }
    let why = status_of(&mount);
    assert!(why.contains("no node runs in") && why.contains("atoll up --dir"), "{why}");
    let logs = || -> String {
        let logs = fs::read_dir(ring.nodes[1].dir.join("logs")).expect("logs");
        let text = |log: std::io::Result<fs::DirEntry>| {
            fs::read_to_string(log.expect("a log").path()).expect("reads")
        };
        logs.map(text).collect()
    };
    // A thread of the mount writes what it says.
    until("it is said", || logs().contains("blocks cannot be fetched"));
    let said = logs().matches("blocks cannot be fetched").count();
    assert_eq!(said, 1, "once for all that fails: {}", logs());
    ring.nodes[1].restart();
    until("the mount works again", || read("file01.txt").is_ok() && status_of(&mount) == "ok");

    // Stopped, it keeps its socket and says nothing.
    ring.nodes[1].freeze();
    let error = read("file05.txt").expect_err("nobody answers");
    assert_eq!(error.raw_os_error(), Some(TIMED_OUT));
    assert!(status_of(&mount).contains("did not answer in time"), "{}", status_of(&mount));
    ring.nodes[1].signal("CONT");
    until("the mount works again", || read("file05.txt").is_ok());
    assert_same(&source, &mount);
}

#[test]
fn a_mount_follows_the_publisher() {
    if !can_mount("a_mount_follows_the_publisher") {
        return;
    }
    let mut ring = Ring::of(3);
    let (source, address) = ring.publish_tree();
    let mount = ring.mount(2, &address, &["--max-age", "1s"]);
    assert_same(&source, &mount);
    fs::write(source.join("docs/file01.txt"), "newer and longer than before\n").expect("a file");
    fs::write(source.join("docs/new.txt"), "new\n").expect("a file");
    fs::remove_file(source.join("docs/file02.txt")).expect("removed");
    ring.publish(&source);
    let follows = || {
        let text = fs::read_to_string(mount.join("docs/file01.txt")).unwrap_or_default();
        text.starts_with("newer")
            && mount.join("docs/new.txt").exists()
            && !mount.join("docs/file02.txt").exists()
    };
    until("the mount shows the new version", follows);
    assert_same(&source, &mount);
}

#[test]
fn a_foreground_mount_ends_with_a_signal() {
    if !can_mount("a_foreground_mount_ends_with_a_signal") {
        return;
    }
    let ring = Ring::of(1);
    let (_, address) = ring.publish_tree();
    let mount = ring.path("mnt");
    fs::create_dir(&mount).expect("a directory");
    let mut command = ring.nodes[0].command(["mount", "--foreground", &address]);
    let mut server = command.arg(&mount).spawn().expect("runs");
    until("it is mounted", || mount.join("run.sh").exists());
    crate::processes::signal(server.id(), "INT");
    assert!(server.wait().expect("ends").success());
    assert_eq!(fs::read_dir(&mount).expect("there").count(), 0, "unmounted");
}
