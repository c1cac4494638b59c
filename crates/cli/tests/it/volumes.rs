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
    run(second().arg(&elsewhere)).failed(5, &["a mount on this machine writes it", "unmount"]);
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

    // While the node is away, what is written waits in the spool, and fsync says that it does.
    ring.nodes[0].kill();
    fs::write(mount.join("waits"), "x").expect("is in the spool");
    sync(&mount.join("waits")).expect_err("the ring cannot be asked");
    ring.nodes[0].restart();
    until("the ring has it", || sync(&mount.join("waits")).is_ok());

    kill_server(&mount);
    fs::read_dir(&mount).map(drop).expect_err("its process is gone");
    run(atoll().arg("unmount").arg(&mount)).ok();
    let mount = ring.mount(0, "work", &[]);
    assert!(fs::read(mount.join("synced")).expect("reads") == noise(1 << 20, 1));
    assert_eq!(fs::read(mount.join("waits")).expect("reads"), b"x");
}

#[test]
fn what_was_closed_survives_the_death_of_mount_and_node() {
    if !can_mount("what_was_closed_survives_the_death_of_mount_and_node") {
        return;
    }
    let mut ring = Ring::of(3);
    run(&mut ring.nodes[0].command(["volume", "create", "work"])).ok();
    let mount = ring.mount(0, "work", &[]);
    let tree = ring.path("tree");
    make_tree(&tree);
    sync(&mount).expect("is on the ring");
    ring.nodes[0].kill();
    run(std::process::Command::new("cp").arg("-a").arg(&tree).arg(mount.join("tree"))).ok();
    fs::write(mount.join("big"), noise(3 << 20, 5)).expect("is in the spool");
    kill_server(&mount);
    run(atoll().arg("unmount").arg(&mount)).ok();
    ring.nodes[0].restart();

    let status = run(&mut ring.nodes[0].command(["status"])).ok();
    assert!(status.stdout.contains("changes to work wait for the ring, and it is not mounted"));
    let pending = || run(&mut ring.nodes[0].command(["status", "--json"])).ok().json();
    assert!(pending()["pending"][0]["bytes"].as_u64() > Some(3 << 20));
    run(&mut ring.nodes[0].command(["volume", "recover", "work", "/nowhere"]))
        .failed(4, &["nothing is set aside", "atoll mount work"]);

    let mount = ring.mount(0, "work", &[]);
    assert_same(&tree, &mount.join("tree"));
    assert!(fs::read(mount.join("big")).expect("reads") == noise(3 << 20, 5));
    sync(&mount).expect("is on the ring");
    let pending = || run(&mut ring.nodes[0].command(["status", "--json"])).ok().json();
    until("nothing waits", || pending()["pending"].as_array().is_some_and(|all| all.is_empty()));
}

/// The same volume written by two nodes: the second one takes over while the first is cut off. What the
/// first one has written is not in the volume, and not lost.
#[test]
fn what_another_node_has_overtaken_is_recovered() {
    if !can_mount("what_another_node_has_overtaken_is_recovered") {
        return;
    }
    let mut ring = Ring::of(3);
    run(&mut ring.nodes[0].command(["volume", "create", "--encrypt", "work"])).ok();
    ring.nodes[1].stop();
    let keys = |node: &crate::processes::NodeProcess| node.dir.join("volumes/work");
    let copy = run(std::process::Command::new("cp")
        .arg("-a")
        .arg(keys(&ring.nodes[0]))
        .arg(keys(&ring.nodes[1])));
    copy.ok();
    ring.nodes[1].restart();

    let mount = ring.mount(0, "work", &[]);
    fs::write(mount.join("old"), "both have it").expect("writes");
    sync(&mount).expect("is on the ring");
    let elsewhere = ring.path("elsewhere");
    fs::create_dir(&elsewhere).expect("a directory");
    run(ring.nodes[1].command(["mount", "work"]).arg(&elsewhere))
        .failed(5, &["another mount writes the volume", "--take-over"]);
    ring.nodes[0].freeze();
    fs::create_dir(mount.join("dir")).expect("is in the spool");
    fs::write(mount.join("dir/mine"), "not on the ring").expect("is in the spool");
    fs::remove_file(mount.join("old")).expect("is in the spool");
    fs::write(mount.join("empty"), "").expect("is in the spool");
    let other = ring.mount(1, "work", &["--take-over"]);
    fs::write(other.join("theirs"), "x").expect("writes");
    sync(&other).expect("is on the ring");

    ring.nodes[0].signal("CONT");
    sync(&mount).expect_err("it is fenced");
    assert!(status_of(&mount).contains("another writer"), "{}", status_of(&mount));
    fs::write(mount.join("more"), "x").expect_err("it is fenced");
    unmount(atoll().arg("unmount").arg(&mount));
    unmount(atoll().arg("unmount").arg(&other));
    let second = || ring.nodes[0].command(["mount", "work"]);
    let mut said = String::new();
    until("the other mount has ended", || {
        let mounted = run(second().arg(&mount));
        said = mounted.stderr;
        mounted.code == Some(0)
    });
    assert!(said.contains("atoll volume recover work"), "{said}");
    assert_eq!(fs::read(mount.join("theirs")).expect("reads"), b"x");
    assert!(!mount.join("dir").exists());

    let saved = ring.path("saved");
    run(&mut ring.nodes[0].command(["volume", "recover", "work"])).ok();
    let recovered = run(ring.nodes[0].command(["volume", "recover", "work"]).arg(&saved)).ok();
    assert!(recovered.stdout.contains("removed: old"), "{}", recovered.stdout);
    let aside = fs::read_dir(&saved).expect("is made").next().expect("one").expect("reads").path();
    assert_eq!(fs::read(aside.join("dir/mine")).expect("reads"), b"not on the ring");
    assert_eq!(fs::read(aside.join("empty")).expect("reads"), b"");
    run(ring.nodes[0].command(["volume", "recover", "work"]).arg(&saved)).failed(1, &["saved"]);
    run(&mut ring.nodes[0].command(["volume", "recover", "work", "--discard"])).ok();
    let told = run(&mut ring.nodes[0].command(["volume", "recover", "work", "--json"])).ok().json();
    assert_eq!(told["set_aside"].as_array().map(Vec::len), Some(0));
    unmount(atoll().arg("unmount").arg(&mount));
}
