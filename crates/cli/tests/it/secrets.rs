//! What a publish never takes along: directories of nodes, and mounts of Atoll.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use rustix::mount::{MountFlags, UnmountFlags};

use crate::processes::{Ring, can_mount, make_tree, run, until};

/// A mount of the test's own; gone when the test ends.
struct OwnMount(PathBuf);

impl OwnMount {
    /// Shows `what` at `at` as well; `None` where this is not allowed.
    fn bind(what: &Path, at: &Path) -> Option<OwnMount> {
        fs::create_dir_all(at).expect("a mount point");
        rustix::mount::mount_bind(what, at).ok().map(|()| OwnMount(at.to_path_buf()))
    }

    /// An empty file system in memory.
    fn memory(at: &Path) -> Option<OwnMount> {
        fs::create_dir_all(at).expect("a mount point");
        let mounted = rustix::mount::mount("none", at, "tmpfs", MountFlags::empty(), None);
        mounted.ok().map(|()| OwnMount(at.to_path_buf()))
    }
}

impl Drop for OwnMount {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.0, UnmountFlags::DETACH);
    }
}

/// `atoll publish ~` gave the node's identity, the network's secret and the keys of all
/// volumes to any reader of the log.
#[test]
fn a_nodes_directory_is_never_published_however_it_is_reached() {
    let ring = Ring::of(1);
    let node = &ring.nodes[0];
    let home = ring.path("home");
    make_tree(&home);
    fs::create_dir_all(home.join("backup/old")).expect("made");
    for name in ["identity.key", "network.cbor", "settings.cbor"] {
        fs::copy(node.dir.join(name), home.join("backup/old").join(name)).expect("copied");
    }
    let volume = ring.publish(&home.join("docs"));
    fs::create_dir(home.join("keys")).expect("made");
    for name in ["key", "info"] {
        let from = node.dir.join("volumes/docs").join(name);
        fs::copy(from, home.join("keys").join(name)).expect("copied");
    }
    symlink(&node.dir, home.join("a link to it")).expect("linked");
    let bound = [("node bound", ""), ("store bound", "store"), ("one volume", "volumes/docs")]
        .map(|(at, what)| Some((at, OwnMount::bind(&node.dir.join(what), &home.join(at))?)));
    let mut secret = vec!["backup/old", "keys"];
    secret.extend(bound.iter().flatten().map(|(at, _)| *at));

    let json = run(node.command(["publish", "--json", "--name", "home"]).arg(&home)).ok().json();
    let omissions = json["omissions"].as_array().expect("a list");
    let mut withheld: Vec<_> = omissions.iter().filter_map(|o| o["path"].as_str()).collect();
    withheld.sort_unstable();
    secret.sort_unstable();
    assert_eq!(withheld, secret);
    assert_eq!(json["withheld"].as_u64(), Some(secret.len() as u64));
    assert_eq!(json["complete"].as_bool(), Some(true), "they were not to be published");
    let address = json["address"].as_str().expect("an address");
    let tree = node.atoll(["tree", address]).ok().stdout;
    for name in ["identity.key", "network.cbor", "index.redb", ".seg", "node.lock"] {
        assert!(!tree.contains(name), "{name}: {tree}");
    }
    let said = run(node.command(["publish", "--name", "home"]).arg(&home)).ok();
    assert!(said.stderr.contains("never published: backup/old: it is a node's"), "{said:?}");
    assert!(said.stdout.contains("directories are never published"), "{said:?}");
    // A pattern cannot hide the files that make it a node's directory.
    let mut command = node.command(["publish", "--json", "--name", "home"]);
    let json = run(command.args(["--exclude", "*.key", "--exclude", "*.cbor"]).arg(&home));
    assert_eq!(json.ok().json()["withheld"].as_u64(), Some(secret.len() as u64));
    drop(bound);

    let inside = home.join("a link to it/volumes/docs");
    for private in [&node.dir, &node.dir.join("store"), &inside, &home.join("backup/old")] {
        let said = run(node.command(["publish", "--name", "leak"]).arg(private));
        said.failed(1, &["never published", "a directory that does not lie in it"]);
    }
    let volumes = node.atoll(["volumes"]).ok().stdout;
    assert!(!volumes.contains("leak") && volumes.contains(&volume), "{volumes}");
}

#[test]
fn the_directory_around_a_node_is_published_without_it() {
    let ring = Ring::of(2);
    let everything = ring.temp.path();
    fs::write(ring.path("mine"), "mine").expect("a file");
    let said = run(ring.nodes[0].command(["publish", "--name", "all"]).arg(everything));
    // The nodes' logs are written meanwhile, so they may be kept or left out.
    assert!(matches!(said.code, Some(0 | 7)), "{said:?}");
    for node in ["node0", "node1"] {
        assert!(said.stderr.contains(&format!("never published: {node}: ")), "{said:?}");
    }
    let names = ring.nodes[1].atoll(["ls", said.last_line()]).ok().stdout;
    assert!(names.contains("mine") && !names.lines().any(|name| name == "node0"), "{names}");
}

#[test]
fn mounts_of_atoll_are_not_entered_dead_or_alive() {
    if !can_mount("mounts_of_atoll_are_not_entered_dead_or_alive") {
        return;
    }
    let mut ring = Ring::of(1);
    let tree = ring.path("tree");
    make_tree(&tree);
    let address = ring.publish(&tree);
    let home = ring.path("home");
    fs::create_dir_all(home.join("dead")).expect("made");
    fs::write(home.join("file"), "x").expect("a file");
    let alive = ring.mount(0, &address, &[]);
    let mut command = ring.nodes[0].command(["mount", "--foreground", &address]);
    let mut server = command.arg(home.join("dead")).spawn().expect("runs");
    until("it is mounted", || home.join("dead/run.sh").exists());
    server.kill().expect("killed");
    server.wait().expect("ends");
    let dead = OwnMount(home.join("dead"));
    let other = OwnMount::bind(&alive, &home.join("bound"));

    let json = run(ring.nodes[0].command(["publish", "--json"]).arg(&home)).ok().json();
    let expected = 1 + u64::from(other.is_some());
    assert_eq!((json["withheld"].as_u64(), json["files"].as_u64()), (Some(expected), Some(1)));
    assert!(json["omissions"][0]["reason"].as_str().expect("text").contains("mount of Atoll"));
    drop((dead, other));
}

#[test]
fn one_file_system_stays_on_it() {
    let ring = Ring::of(1);
    let home = ring.path("home");
    make_tree(&home);
    let Some(mount) = OwnMount::memory(&home.join("elsewhere")) else { return };
    fs::write(home.join("elsewhere/file"), "x").expect("a file");
    let publish = |options: &[&str]| {
        run(ring.nodes[0].command(["publish", "--json"]).args(options).arg(&home)).ok().json()
    };
    assert_eq!(publish(&[])["files"].as_u64(), Some(46));
    let json = publish(&["--one-file-system"]);
    assert_eq!((json["files"].as_u64(), json["withheld"].as_u64()), (Some(45), Some(1)));
    assert_eq!(json["omissions"][0]["path"], "elsewhere");
    assert_eq!(publish(&["-x"])["files"].as_u64(), Some(45));
    drop(mount);
}
