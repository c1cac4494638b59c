//! Members, and replacing the network's secret, with real processes.

use crate::processes::{NodeProcess, Ring, assert_same, run, until};

/// Whether a node's status warns so; not while it is still starting.
fn warns(node: &NodeProcess, what: &str) -> bool {
    let said = node.atoll(["status", "--json"]);
    if said.code == Some(3) {
        return false;
    }
    said.ok().json()["warnings"].as_array().is_some_and(|warnings| {
        warnings.iter().any(|warning| warning.as_str().is_some_and(|text| text.contains(what)))
    })
}

fn epoch(node: &NodeProcess) -> Option<u64> {
    node.atoll(["member", "list", "--json"]).ok().json()["epoch"].as_u64()
}

fn id(node: &NodeProcess) -> String {
    let status = node.atoll(["status", "--json"]).ok().json();
    status["peer_id"].as_str().expect("a key").to_owned()
}

#[test]
fn a_leaked_code_is_worth_nothing_once_the_secret_is_replaced() {
    let ring = Ring::of(3);
    let (source, address) = ring.publish_tree();
    let leaked = ring.nodes[0].atoll(["invite"]).ok().stdout;
    ring.nodes[1]
        .atoll(["secret", "rotate"])
        .failed(1, &["only the network's administrator", "admin.key"]);
    ring.nodes[0].atoll(["secret", "rotate", "--overlap", "1s"]).failed(1, &["60 seconds to 90"]);
    let said = ring.nodes[0].atoll(["secret", "rotate"]).ok().stdout;
    // A busy node may be told a moment later.
    for part in ["secret number 1", " of 2 members", "join codes given out before", "UTC"] {
        assert!(said.contains(part), "{part}: {said}");
    }
    for node in &ring.nodes {
        until("it has the new secret", || epoch(node) == Some(1));
    }

    let thief = NodeProcess::start(ring.path("thief"), Some(&leaked));
    until("the thief is told", || warns(&thief, "secret was replaced"));
    let status = thief.atoll(["status", "--json"]).ok().json();
    assert_eq!(status["joined"].as_bool(), Some(false));
    let fresh = ring.nodes[1].atoll(["invite"]).ok().stdout;
    assert_ne!(fresh, leaked);
    let newcomer = NodeProcess::start(ring.path("newcomer"), Some(&fresh));
    newcomer.wait_for(&["joined"]);
    for reader in ring.nodes.iter().chain([&newcomer]) {
        let dest = reader.dir.with_extension("copy");
        run(reader.command(["get", &address]).arg(&dest)).ok();
        assert_same(&source, &dest);
    }
}

#[test]
fn a_removed_member_is_listed_as_such_and_on_nobodys_ring() {
    let mut ring = Ring::of(4);
    let (source, address) = ring.publish_tree();
    let removed = id(&ring.nodes[3]);
    let listed = ring.nodes[0].atoll(["member", "list"]).ok().stdout;
    assert!(listed.contains("this node holds the administrator's key"), "{listed}");
    assert!(listed.contains(&removed[..12]) && listed.contains("127.0.0.1:"), "{listed}");
    ring.nodes[0].atoll(["member", "remove", "0123456789"]).failed(4, &["no member", "list"]);
    ring.nodes[0].atoll(["member", "remove", "zz"]).failed(2, &["hexadecimal digits"]);
    let own = id(&ring.nodes[0]);
    ring.nodes[0].atoll(["member", "remove", &own]).failed(1, &["cannot remove itself"]);
    let said = ring.nodes[0].atoll(["member", "remove", &removed[..12]]).ok().stdout;
    assert!(said.starts_with("1 node removed"), "{said}");

    let out = ring.nodes.pop().expect("four");
    until("it is told", || warns(&out, "removed"));
    for node in &ring.nodes {
        until("its ring has three nodes", || {
            let status = node.atoll(["status", "--json"]).ok().json();
            let successors = status["successors"].as_array().expect("a list").clone();
            epoch(node) == Some(1)
                && successors.len() == 2
                && successors.iter().all(|other| other["peer_id"] != removed.as_str())
        });
        let list = node.atoll(["member", "list", "--json"]).ok().json();
        let members = list["members"].as_array().expect("a list");
        let entry = members.iter().find(|member| member["id"] == removed.as_str());
        assert_eq!(entry.expect("listed")["status"], "removed");
        let dest = node.dir.with_extension("copy");
        run(node.command(["get", &address]).arg(&dest)).ok();
        assert_same(&source, &dest);
    }
}
