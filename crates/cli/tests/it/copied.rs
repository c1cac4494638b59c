//! A node's directory that was copied, and both copies run: one of the two processes ends.

use std::process::Command;

use crate::processes::{NodeProcess, Ring, assert_same, run, until};

/// Copies the directory of a node, which is stopped meanwhile.
#[track_caller]
fn copy_of(ring: &mut Ring, node: usize) -> std::path::PathBuf {
    assert_eq!(ring.nodes[node].stop(), Some(0));
    let copy = ring.path("copy");
    let copied = Command::new("cp").arg("-r").arg(&ring.nodes[node].dir).arg(&copy).status();
    assert!(copied.expect("cp runs").success());
    ring.nodes[node].restart();
    ring.nodes.iter().for_each(|node| node.wait_for(&["nodes=3", "replicated"]));
    // If both had been started at the same time, either of them might end.
    let uptime = || status(&ring.nodes[node])["uptime_secs"].as_u64().expect("seconds");
    until("it has run longer than the copy will", || uptime() >= 8);
    copy
}

fn status(node: &NodeProcess) -> serde_json::Value {
    node.atoll(["status", "--json"]).ok().json()
}

/// The original serves its blocks, knows of the copy, and the copy has said why it has ended.
#[track_caller]
fn the_original_goes_on(ring: &Ring, copy: &NodeProcess, source: &std::path::Path, address: &str) {
    let original = &ring.nodes[1];
    let listens = status(original)["listen"].as_str().expect("an address").to_owned();
    let said = copy.log();
    for words in
        [&*listens, "copy of the other", "only while the node is stopped", "atoll --dir DIR up"]
    {
        assert!(said.contains(words), "no {words:?} in {said}");
    }
    let warns =
        || status(original)["warnings"].to_string().contains("a copy of this node's directory");
    until("the original warns of the copy", warns);
    until("the log says it too", || original.log().contains("a copy of this node's directory"));
    for node in &ring.nodes {
        node.wait_for(&["nodes=3", "replicated"]);
        let dest = node.dir.with_extension("got");
        run(node.command(["get", address]).arg(&dest)).ok();
        assert_same(source, &dest);
    }
}

/// Both ran, and counted as one node: acknowledged blocks had fewer copies than was said.
#[test]
fn a_copy_of_the_directory_of_a_running_node_does_not_start() {
    let mut ring = Ring::of(3);
    let (source, address) = ring.publish_tree();
    let dir = copy_of(&mut ring, 1);
    // At the same port it cannot listen.
    let same = NodeProcess::start_by(Command::new("env"), dir.clone(), &[], "").ended();
    assert_eq!(same.0, Some(1), "{}", same.1.log());
    assert!(same.1.log().contains("cannot listen on 127.0.0.1:"), "{}", same.1.log());
    // A copy that is started again and again ends no other.
    let mut last = same.1;
    for _ in 0..3 {
        let elsewhere = ["--listen", "127.0.0.1:0"];
        let (code, copy) =
            NodeProcess::start_by(Command::new("env"), dir.clone(), &elsewhere, "").ended();
        assert_eq!(code, Some(1), "{}", copy.log());
        last = copy;
    }
    the_original_goes_on(&ring, &last, &source, &address);
}

/// As a machine that is suspended, and another one that was restored from its snapshot meanwhile.
#[test]
fn a_copy_ends_when_the_original_is_there_again() {
    let mut ring = Ring::of(3);
    let (source, address) = ring.publish_tree();
    let dir = copy_of(&mut ring, 1);
    ring.nodes[1].freeze();
    let elsewhere = ["--listen", "127.0.0.1:0"];
    let copy = NodeProcess::start_by(Command::new("env"), dir, &elsewhere, "");
    copy.wait_for(&["nodes=3"]);
    ring.nodes[1].signal("CONT");
    let (code, copy) = copy.ended();
    assert_eq!(code, Some(1), "{}", copy.log());
    the_original_goes_on(&ring, &copy, &source, &address);
}
