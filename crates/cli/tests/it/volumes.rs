//! Volumes of one's own: made, written through a mount, read anywhere.

use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;

use crate::processes::{
    Ring, assert_same, atoll, can_mount, make_tree, noise, run, unmount, until,
};

/// Reads the status attribute of a mount's root.
fn status_of(mount: &Path) -> String {
    let mut text = [0; 1000];
    let len = rustix::fs::getxattr(mount, "user.atoll.status", &mut text[..]).expect("is said");
    String::from_utf8_lossy(&text[..len]).into_owned()
}

fn sync(path: &Path) -> std::io::Result<()> {
    File::open(path).and_then(|file| file.sync_all())
}

/// SIGKILL for the process that serves a mount.
fn kill_server(mount: &Path) {
    let serves = |process: &fs::DirEntry| {
        let arguments = fs::read(process.path().join("cmdline")).unwrap_or_default();
        let arguments: Vec<&[u8]> = arguments.split(|byte| *byte == 0).collect();
        arguments.contains(&mount.as_os_str().as_bytes()) && arguments.contains(&&b"--announce"[..])
    };
    let processes = fs::read_dir("/proc").expect("processes").flatten();
    let server = processes.into_iter().find(serves).expect("it runs");
    let pid = server.file_name().to_string_lossy().parse().expect("a number");
    let pid = rustix::process::Pid::from_raw(pid).expect("a process");
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("is killed");
}

#[test]
fn a_volume_is_written_through_a_mount_and_read_through_another_node() {
    if !can_mount("a_volume_is_written_through_a_mount_and_read_through_another_node") {
        return;
    }
    let mut ring = Ring::of(3);
    let create =
        |name: &str| run(&mut ring.nodes[0].command(["volume", "create", "--encrypt", name]));
    let address = create("work").ok().last_line().to_owned();
    assert!(address.starts_with("atoll:") && address.contains('#'), "{address}");
    create("work").failed(1, &["has a volume of that name"]);
    create("a:b").failed(2, &["taken for an address"]);

    let tree = ring.path("tree");
    make_tree(&tree);
    fs::write(tree.join("big"), noise(3 << 20, 7)).expect("a file");
    let mount = ring.mount(0, "work", &[]);
    run(std::process::Command::new("cp").arg("-a").arg(&tree).arg(mount.join("tree"))).ok();
    fs::hard_link(mount.join("tree/big"), mount.join("linked")).expect("links");
    symlink("linked", mount.join("link")).expect("links");
    sync(&mount).expect("is on the ring");
    assert_eq!(status_of(&mount), "ok");
    assert_same(&tree, &mount.join("tree"));
    assert_eq!(fs::metadata(mount.join("linked")).expect("there").nlink(), 2);

    let reader = ring.mount(2, &address, &[]);
    assert_same(&tree, &reader.join("tree"));
    assert!(fs::read(reader.join("linked")).expect("reads") == noise(3 << 20, 7));
    if rustix::process::geteuid().is_root() {
        std::os::unix::fs::chown(mount.join("linked"), Some(12), Some(34)).expect("changes");
        sync(&mount).expect("is on the ring");
        let of = |mount: &Path| fs::metadata(mount.join("linked")).map(|m| (m.uid(), m.gid()));
        let fresh = ring.mount(1, &address, &[]);
        assert_eq!(of(&fresh).expect("there"), (12, 34));
        let mapped = ring.mount(1, &address, &["--map-owners"]);
        assert_eq!(of(&mapped).expect("there"), (0, 0));
    }
    let elsewhere = ring.path("elsewhere");
    fs::create_dir(&elsewhere).expect("a directory");
    let second = || ring.nodes[0].command(["mount", "work"]);
    run(second().arg(&elsewhere)).failed(5, &["another mount writes the volume", "--take-over"]);
    run(ring.nodes[1].command(["mount", "work"]).arg(&elsewhere)).failed(4, &["volume create"]);

    // Unmounted and mounted again, all of it is there, and its leases are the node's to renew.
    fs::write(mount.join("last"), "not synced").expect("writes");
    unmount(atoll().arg("unmount").arg(&mount));
    until("the node keeps the volume", || {
        let volumes = run(&mut ring.nodes[0].command(["volume", "list", "--json"])).ok();
        volumes.json()["kept_blocks"].as_u64() > Some(50)
    });
    until("the mount has ended", || run(second().arg(&mount)).code == Some(0));
    assert_eq!(fs::read(mount.join("last")).expect("reads"), b"not synced");
    assert_same(&tree, &mount.join("tree"));
    unmount(atoll().arg("unmount").arg(&mount));
}

#[test]
fn what_was_synced_survives_the_death_of_mount_and_node() {
    if !can_mount("what_was_synced_survives_the_death_of_mount_and_node") {
        return;
    }
    let mut ring = Ring::of(3);
    run(&mut ring.nodes[0].command(["volume", "create", "work"])).ok();
    let mount = ring.mount(0, "work", &[]);
    fs::write(mount.join("synced"), noise(1 << 20, 1)).expect("writes");
    sync(&mount.join("synced")).expect("is on the ring");

    // While the node is away, what is written waits in memory, and fsync says that it does.
    ring.nodes[0].kill();
    fs::write(mount.join("waits"), "x").expect("is in memory");
    sync(&mount.join("waits")).expect_err("the ring cannot be asked");
    ring.nodes[0].restart();
    until("the ring has it", || sync(&mount.join("waits")).is_ok());

    kill_server(&mount);
    fs::read_dir(&mount).map(drop).expect_err("its process is gone");
    run(atoll().arg("unmount").arg(&mount)).ok();
    let mount = ring.mount(0, "work", &["--take-over"]);
    assert!(fs::read(mount.join("synced")).expect("reads") == noise(1 << 20, 1));
    assert_eq!(fs::read(mount.join("waits")).expect("reads"), b"x");
}
