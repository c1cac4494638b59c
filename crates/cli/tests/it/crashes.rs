//! Nodes that are killed: nothing acknowledged is lost, and copies are restored.

use std::fs;
use std::process::Stdio;

use crate::processes::{NodeProcess, Ring, assert_same, make_tree, noise, run, until};

#[test]
fn two_of_five_nodes_may_die_at_once() {
    let mut ring = Ring::of(5);
    let source = ring.path("tree");
    make_tree(&source);
    let published = run(ring.nodes[0].command(["publish", "--json"]).arg(&source)).ok().json();
    let address = published["address"].as_str().expect("an address").to_owned();
    let blocks = published["blocks"].as_u64().expect("a number");
    for node in &ring.nodes {
        node.wait_for(&["nodes=5", "replicated"]);
    }
    // Published is what two nodes have; what only those two have they must not take with them.
    until("three copies of every block", || {
        let held =
            |node: &NodeProcess| node.atoll(["status", "--json"]).ok().json()["blocks"].as_u64();
        let copies: u64 = ring.nodes.iter().filter_map(held).sum();
        copies >= 3 * blocks && copies.is_multiple_of(3)
    });
    ring.nodes[0].kill();
    ring.nodes[3].kill();
    let dest = ring.path("copy");
    run(ring.nodes[4].command(["get", &address]).arg(&dest)).ok();
    assert_same(&source, &dest);
    let survivors = [1, 2, 4];
    for i in survivors {
        ring.nodes[i].wait_for(&["nodes=3", "replicated"]);
    }
    until("three copies of every block again", || {
        let status = |i: &usize| ring.nodes[*i].atoll(["status", "--json"]).ok().json();
        let statuses: Vec<_> = survivors.iter().map(status).collect();
        let sum = |field: &str| -> u64 {
            let number = |status: &serde_json::Value| status.pointer(field)?.as_u64();
            statuses.iter().map(|status| number(status).expect("a number")).sum()
        };
        let (copies, roots) = (sum("/blocks"), sum("/repair/root_blocks"));
        roots >= blocks && copies == 3 * roots && sum("/repair/queue_blocks") == 0
    });
}

/// Each write waited for the node that did not answer, and the next for it again.
#[test]
fn publishing_and_reading_go_on_while_a_node_is_frozen() {
    let ring = Ring::of(5);
    ring.nodes[3].freeze();
    let (source, address) = ring.publish_tree();
    fs::write(source.join("more"), noise(100_000, 9)).expect("a file");
    assert_eq!(ring.publish(&source), address);
    let dest = ring.path("copy");
    run(ring.nodes[4].command(["get", &address]).arg(&dest)).ok();
    assert_same(&source, &dest);
}

/// One node alone holds everything, and is killed while it takes blocks. All blocks
/// acknowledged to an earlier publish must be there; the interrupted publish must finish.
#[test]
fn a_node_killed_under_load_loses_nothing_it_acknowledged() {
    let mut ring = Ring::of(1);
    let first = ring.path("first");
    make_tree(&first);
    let first_address = ring.publish(&first);
    let second = ring.path("second");
    fs::create_dir(&second).expect("a directory");
    for i in 0..24 {
        fs::write(second.join(format!("big{i}")), noise(4 << 20, i + 50)).expect("a file");
    }
    let held = |ring: &Ring| {
        let status = ring.nodes[0].atoll(["status", "--json"]).ok().json();
        status["block_bytes"].as_u64().expect("a number")
    };
    for _ in 0..3 {
        let before = held(&ring);
        let mut publish = ring.nodes[0].command(["publish", "-q"]);
        publish.arg(&second).stdout(Stdio::null()).stderr(Stdio::null());
        let mut publish = publish.spawn().expect("runs");
        until("blocks arrive", || {
            held(&ring) > before + (4 << 20) || publish.try_wait().expect("waits").is_some()
        });
        ring.nodes[0].kill();
        let _ = publish.kill();
        let _ = publish.wait();
        ring.nodes[0].restart();
        assert!(held(&ring) >= before, "acknowledged blocks are there after the crash");
        let copy = ring.path("copy-of-first");
        run(ring.nodes[0].command(["get", &first_address]).arg(&copy)).ok();
        assert_same(&first, &copy);
        fs::remove_dir_all(&copy).expect("removed");
    }
    let address = ring.publish(&second);
    let copy = ring.path("copy-of-second");
    run(ring.nodes[0].command(["get", &address]).arg(&copy)).ok();
    assert_same(&second, &copy);
}

/// A publish under way when its node dies goes on when the node is back.
#[test]
fn publishing_waits_for_a_node_that_is_restarted() {
    let mut ring = Ring::of(1);
    let source = ring.path("tree");
    make_tree(&source);
    for i in 0..16 {
        fs::write(source.join(format!("big{i}")), noise(4 << 20, i + 80)).expect("a file");
    }
    let mut publish = ring.nodes[0].command(["publish", "-q"]);
    let publish = publish.arg(&source).stdout(Stdio::piped()).stderr(Stdio::piped());
    let publish = publish.spawn().expect("runs");
    until("blocks arrive", || {
        let status = ring.nodes[0].atoll(["status", "--json"]).ok().json();
        status["blocks"].as_u64() > Some(20)
    });
    ring.nodes[0].kill();
    ring.nodes[0].restart();
    let output = publish.wait_with_output().expect("ends");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    let copy = ring.path("copy");
    run(ring.nodes[0].command(["get", said.lines().last().expect("an address")]).arg(&copy)).ok();
    assert_same(&source, &copy);
}
