//! A deleted file and a deleted volume free the disk space of their blocks on the nodes.

use std::fs::{self, File};
use std::path::Path;
use std::time::{Duration, Instant};

use crate::processes::{Ring, atoll, can_mount, noise, unmount};

/// Replicas wait two minutes and mounts half a minute; the rest is for slow machines.
const PATIENCE: Duration = Duration::from_secs(1200);

/// Bytes of blocks that all nodes have.
fn held(ring: &Ring) -> u64 {
    let of = |node: usize| {
        let status = ring.nodes[node].atoll(["status", "--json"]).ok().json();
        status["block_bytes"].as_u64().expect("a number")
    };
    (0..ring.nodes.len()).map(of).sum()
}

#[track_caller]
fn until_held(ring: &Ring, what: &str, is_so: impl Fn(u64) -> bool) {
    let begin = Instant::now();
    while !is_so(held(ring)) {
        assert!(begin.elapsed() < PATIENCE, "{what}: {} bytes are held", held(ring));
        std::thread::sleep(Duration::from_secs(1));
    }
}

#[test]
fn a_removed_file_and_a_deleted_volume_give_their_room_back() {
    if !can_mount("a_removed_file_and_a_deleted_volume_give_their_room_back") {
        return;
    }
    const FILE: u64 = 4 << 20;
    let mut ring = Ring::of(3);
    ring.nodes[0].atoll(["volume", "create", "work", "--keep", "none"]).ok();
    ring.nodes[0].atoll(["volume", "create", "old", "--keep", "none"]).ok();
    let work = ring.mount(0, "work", &[]);
    let old = ring.mount(0, "old", &[]);
    let sync =
        |mount: &Path| File::open(mount).and_then(|dir| dir.sync_all()).expect("on the ring");
    for (n, path) in [work.join("file-0"), work.join("file-1"), old.join("file")].iter().enumerate()
    {
        fs::write(path, noise(FILE as usize, n as u64)).expect("written");
    }
    sync(&work);
    sync(&old);
    until_held(&ring, "three copies of three files", |held| held >= 9 * FILE);
    // Replicas wait for two minutes, in which both may wait.
    fs::remove_file(work.join("file-0")).expect("removed");
    sync(&work);
    unmount(atoll().arg("unmount").arg(&old));
    let said = ring.nodes[0].atoll(["volume", "delete", "old", "--yes"]).ok().stdout;
    assert!(said.contains("back within minutes"), "{said}");
    until_held(&ring, "three copies of one file", |held| held < 4 * FILE);
    assert_eq!(fs::read(work.join("file-1")).expect("is there"), noise(FILE as usize, 1));
}
