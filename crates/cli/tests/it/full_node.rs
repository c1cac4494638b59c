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
    let source = ring.path("tree");
    fs::create_dir(&source).expect("a directory");
    let write = |n: u64| {
        fs::write(source.join(format!("file-{n}")), noise(4 << 20, n)).expect("written");
    };
    write(0);
    ring.publish(&source);
    ring.nodes.iter().for_each(|node| node.wait_for(&["replicated"]));
    // Keys are random: one with a small part of the ring would have room for it.
    let held =
        |node: &usize| ring.nodes[*node].atoll(["status", "--json"]).ok().json()["blocks"].as_u64();
    let small = (1..5).max_by_key(held).expect("four");
    ring.nodes[small].atoll(["contribute", "fixed", "16MiB"]).ok();
    (1..10).for_each(write);
    let address = ring.publish(&source);
    // A publish is over before the last copy is stored.
    until("each pointer leads to a copy", || {
        let kept: u64 = (0..5).map(|node| diverted(&ring, node).1).sum();
        kept > 0 && kept == diverted(&ring, small).0
    });
    ring.nodes.iter().for_each(|node| node.wait_for(&["replicated"]));
    let shown = ring.nodes[small].atoll(["status"]).ok().stdout;
    assert!(shown.contains("for which there is no room here"), "{shown}");
    ring.nodes[0].atoll(["renew"]).ok();
    let (pointers, _) = diverted(&ring, small);
    ring.nodes[small].kill();
    ring.nodes[small].restart();
    assert_eq!(diverted(&ring, small).0, pointers, "pointers are on the disk");
    for reader in [0, small] {
        let dest = ring.path(&format!("copy-{reader}"));
        run(ring.nodes[reader].command(["get", &address]).arg(&dest)).ok();
        assert_same(&source, &dest);
    }
}
