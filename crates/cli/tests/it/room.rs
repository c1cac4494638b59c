//! A deleted file and a deleted volume free the disk space of their blocks on the nodes.

use std::fs::{self, File};
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
    let mount = ring.mount(0, "work", &[]);
    for n in 0..2 {
        fs::write(mount.join(format!("file-{n}")), noise(FILE as usize, n)).expect("written");
    }
    let sync = || File::open(&mount).and_then(|dir| dir.sync_all()).expect("is on the ring");
    sync();
    until_held(&ring, "three copies of two files", |held| held >= 6 * FILE);
    fs::remove_file(mount.join("file-0")).expect("removed");
    sync();
    until_held(&ring, "three copies of one", |held| held < 4 * FILE);
    assert_eq!(fs::read(mount.join("file-1")).expect("is there"), noise(FILE as usize, 1));
    unmount(atoll().arg("unmount").arg(&mount));
    let said = ring.nodes[0].atoll(["volume", "delete", "work", "--yes"]).ok().stdout;
    assert!(said.contains("back within minutes"), "{said}");
    until_held(&ring, "nothing", |held| held < FILE);
}
