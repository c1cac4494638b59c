//! What `atoll status` says of copies, and its exit codes.

use crate::processes::{NodeProcess, Ring, until};

const DEGRADED: Option<i32> = Some(8);

/// A node's status as JSON, and the exit code.
fn status(node: &NodeProcess) -> (serde_json::Value, Option<i32>) {
    let said = node.atoll(["status", "--json"]);
    let code = said.code;
    (said.ok().json(), code)
}

/// Why the copies are not complete, in one text.
fn reasons(status: &serde_json::Value) -> String {
    status["health_reasons"].to_string()
}

/// With two of three nodes down it was said: "1 copy of each … complete", and that everything was
/// fully replicated.
#[test]
fn a_ring_that_lost_nodes_says_which_copies_it_lacks_and_who_is_away() {
    let mut ring = Ring::of(3);
    let (_, _) = ring.publish_tree();
    ring.nodes.iter().for_each(|node| node.wait_for(&["nodes=3", "replicated"]));
    for node in &ring.nodes {
        until("it is healthy", || status(node).1 == Some(0));
        assert_eq!(status(node).0["health"], "healthy");
        let said = node.atoll(["status"]);
        assert!(said.code == Some(0) && said.stdout.contains("complete: 3 copies"), "{said:?}");
    }
    let address = |node: &NodeProcess| status(node).0["advertise"].to_string().replace('"', "");
    let dead = [address(&ring.nodes[1]), address(&ring.nodes[2])];
    ring.nodes[1].kill();
    ring.nodes[2].kill();
    let left = &ring.nodes[0];
    left.wait_for(&["nodes=1"]);
    let mut json = serde_json::Value::Null;
    until("it has looked, and says who is away", || {
        let (now, code) = status(left);
        json = now;
        let repair = &json["repair"];
        let is_known = repair["stage"] == "in_step" && repair["replicas_present"] == 1;
        is_known && code == DEGRADED && dead.iter().all(|addr| reasons(&json).contains(addr))
    });
    assert_eq!(json["health"], "degraded", "{json}");
    let repair = &json["repair"];
    assert_eq!(
        (&repair["fully_replicated"], &repair["replicas_wanted"]),
        (&false.into(), &3.into())
    );
    let said = left.atoll(["status"]);
    assert!(said.code == DEGRADED && said.stderr.is_empty(), "{said:?}");
    assert!(said.stdout.contains("not complete: 1 of 3 copies"), "{said:?}");
    left.atoll(["status", "--wait", "replicated", "--timeout", "5s"])
        .failed(5, &["1 of 3 copies", &dead[0]]);
    // What was waited for is there.
    assert_eq!(left.atoll(["status", "--wait", "joined"]).code, Some(0));
    ring.nodes[1].restart();
    ring.nodes[2].restart();
    ring.nodes.iter().for_each(|node| node.wait_for(&["nodes=3", "replicated"]));
}

/// Nothing is wrong with a node that has just been started: it says what to do next.
#[test]
fn the_first_node_of_a_network_says_how_many_are_wanted() {
    let ring = Ring::of(1);
    let node = &ring.nodes[0];
    until("it has looked", || status(node).0["repair"]["stage"] == "in_step");
    assert_eq!(status(node).1, DEGRADED);
    let said = node.atoll(["status"]).stdout;
    assert!(said.contains("add 2 nodes (`atoll invite`)"), "{said}");
    assert!(!said.contains("degraded") && !said.contains("warning"), "{said}");
}

/// Its status said that all copies were there, for ever.
#[test]
fn a_removed_node_is_not_healthy() {
    let mut ring = Ring::of(4);
    let (_, _) = ring.publish_tree();
    ring.nodes.iter().for_each(|node| node.wait_for(&["nodes=4", "replicated"]));
    let id = status(&ring.nodes[3]).0["peer_id"].as_str().expect("a key")[..12].to_owned();
    ring.nodes[0].atoll(["member", "remove", &id]).ok();
    let out = ring.nodes.pop().expect("four");
    until("it is alone, has looked, and says why", || {
        let (json, code) = status(&out);
        let (stage, is_full) = (&json["repair"]["stage"], &json["repair"]["fully_replicated"]);
        let is_known = json["known_nodes"] == 1 && stage == "in_step" && is_full == false;
        is_known && code == DEGRADED && reasons(&json).contains("removed")
    });
    // It is not missed by the others.
    ring.nodes.iter().for_each(|node| node.wait_for(&["nodes=3", "replicated"]));
    until("the others are healthy", || ring.nodes.iter().all(|node| status(node).1 == Some(0)));
}

/// It waited for a minute without a word, and then did not say which nodes were missing.
#[test]
fn a_command_that_waits_for_the_ring_says_for_which_nodes_and_what_to_do() {
    let mut ring = Ring::of(3);
    ring.nodes.iter().for_each(|node| node.wait_for(&["nodes=3", "replicated"]));
    let address = |node: &NodeProcess| status(node).0["advertise"].to_string().replace('"', "");
    let dead = [address(&ring.nodes[1]), address(&ring.nodes[2])];
    ring.nodes[1].kill();
    ring.nodes[2].kill();
    let said = ring.nodes[0].atoll(["volume", "create", "work"]);
    let waits = "waiting for the ring to store the volume work";
    said.failed(5, &[waits, "away", &dead[0], &dead[1], "start what is away", "--forget-absent"]);
}
