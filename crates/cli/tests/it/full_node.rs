//! A node without room in a ring of nodes that have some (PAST §3.3).

use std::fs;

use crate::processes::{Ring, assert_same, noise, run, until};

/// What a node says of diverted copies: those it points to, and those it keeps for others.
fn diverted(ring: &Ring, node: usize) -> (u64, u64) {
    let status = ring.nodes[node].atoll(["status", "--json"]).ok().json();
    let count = |name: &str| status["diverted"][name].as_u64().expect("a number");
    (count("pointers"), count("held_for_others"))
}

/// One of five nodes gave 16 MiB, the others 2 GiB each: every publish failed with "no room on
/// the ring". The ring was as large as its smallest member.
#[test]
fn a_small_node_is_no_hole_in_a_ring_of_five() {
    let mut ring = Ring::of(5);
    ring.nodes[4].atoll(["contribute", "fixed", "16MiB"]).ok();
    let source = ring.path("tree");
    fs::create_dir(&source).expect("a directory");
    for n in 0..10 {
        fs::write(source.join(format!("file-{n}")), noise(4 << 20, n)).expect("written");
    }
    let address = ring.publish(&source);
    until("copies are counted", || diverted(&ring, 4).0 > 0);
    let (pointers, _) = diverted(&ring, 4);
    let kept: u64 = (0..4).map(|node| diverted(&ring, node).1).sum();
    assert_eq!(kept, pointers, "each pointer leads to a copy");
    let shown = ring.nodes[4].atoll(["status"]).ok().stdout;
    assert!(shown.contains("for which there is no room here"), "{shown}");
    ring.nodes[0].atoll(["renew"]).ok();
    ring.nodes[4].kill();
    ring.nodes[4].restart();
    assert_eq!(diverted(&ring, 4).0, pointers, "pointers are on the disk");
    for reader in [1, 4] {
        let dest = ring.path(&format!("copy-{reader}"));
        run(ring.nodes[reader].command(["get", &address]).arg(&dest)).ok();
        assert_same(&source, &dest);
    }
}
