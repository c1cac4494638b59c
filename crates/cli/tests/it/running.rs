//! What can be asked of a running node besides reading and publishing.

use crate::processes::{Ring, make_tree, run, until};

#[test]
fn leases_are_renewed_by_name_and_shown_with_their_day() {
    let ring = Ring::of(2);
    let (source, address) = ring.publish_tree();
    let node = &ring.nodes[0];
    let listed = node.atoll(["volumes"]).ok().stdout;
    assert!(listed.contains("kept until 20") && listed.contains("UTC"), "{listed}");
    let renewed = node.atoll(["renew"]).ok().stdout;
    assert!(renewed.starts_with("tree: ") && renewed.contains("kept until 20"), "{renewed}");
    let json = node.atoll(["renew", "tree", "--json"]).ok().json();
    assert_eq!((json["name"].as_str(), json["lost_blocks"].as_u64()), (Some("tree"), Some(0)));
    node.atoll(["renew", "dosc"]).failed(4, &["no volume dosc", "`atoll volumes`"]);
    let gone = node.atoll(["unpublish", "tree"]).ok().stdout;
    assert!(gone.contains("tree: no longer kept; its blocks may go from 20"), "{gone}");
    let listed = node.atoll(["volumes"]).ok().stdout;
    assert!(listed.contains("unpublished; its blocks may go from 20"), "{listed}");
    node.atoll(["renew", "tree"]).failed(4, &["nothing is published as tree"]);
    node.atoll(["unpublish", "tree"]).failed(4, &["nothing is published as tree"]);
    assert_eq!(ring.publish(&source), address, "the key has stayed");
    let other = ring.nodes[1].atoll(["renew"]).ok();
    assert!(other.stderr.contains("nothing is published from this node"), "{other:?}");
}

/// CFS §3.1: blocks are stored for "an agreed-upon finite interval".
#[test]
fn a_publisher_chooses_how_long_its_tree_is_kept() {
    const DAY: u64 = 24 * 3600;
    let ring = Ring::of(2);
    let node = &ring.nodes[0];
    let (source, address) = ring.publish_tree();
    let shown = || {
        let volume = node.atoll(["volumes", "--json"]).ok().json();
        let secs = |name: &str| volume[name].as_u64().expect("a number");
        (secs("lease_secs"), secs("lease_expires_unix_secs") - secs("refreshed_unix_secs"))
    };
    assert_eq!(shown(), (30 * DAY, 30 * DAY));
    let publish = |more: &[&str]| run(node.command(["publish"]).args(more).arg(&source));
    // Nothing else has changed.
    let again = publish(&["--lease", "7days"]).ok().stdout;
    assert!(
        again.contains("nothing has changed") && again.contains("kept for 7d 0h at a time"),
        "{again}"
    );
    assert!(again.contains(&address), "{again}");
    assert_eq!(shown(), (7 * DAY, 7 * DAY));
    let again = publish(&["--json"]).ok().json();
    assert_eq!(again["lease_secs"].as_u64(), Some(7 * DAY), "it is remembered");
    node.atoll(["renew"]).ok();
    assert_eq!(shown(), (7 * DAY, 7 * DAY));
    for wrong in ["23h", "91days", "0s", "week"] {
        publish(&["--lease", wrong]).failed(2, &["--lease"]);
    }
    assert_eq!(shown(), (7 * DAY, 7 * DAY));
}

/// CFS §5.3: the number of virtual servers "can be adjusted from time to time".
#[test]
fn a_node_takes_more_places_on_the_ring_while_it_runs_and_gives_them_back() {
    let ring = Ring::of(3);
    let (source, address) = ring.publish_tree();
    let node = &ring.nodes[1];
    let shown = node.atoll(["settings"]).ok().stdout;
    assert!(shown.contains("auto (1 place on the ring)"), "{shown}");
    let positions = || {
        let status = node.atoll(["status", "--json"]).ok().json();
        status["positions"].as_array().map_or(0, Vec::len)
    };
    for (wanted, places) in [("5", 5), ("2", 2), ("auto", 1)] {
        node.atoll(["settings", "--virtual-servers", wanted]).ok();
        until("it has its places", || positions() == places);
        for reader in &ring.nodes {
            let dest =
                ring.path(&format!("copy-{wanted}-{}", reader.dir.display()).replace('/', "_"));
            run(reader.command(["get", &address]).arg(&dest)).ok();
            crate::processes::assert_same(&source, &dest);
        }
    }
    node.atoll(["settings", "--virtual-servers", "0"]).failed(2, &["`auto` or a number"]);
    node.atoll(["settings", "--cache", "lots"]).failed(2, &["a size is a number"]);
    node.atoll(["settings", "--cache", "100PiB"]).failed(2, &["does not fit", "of memory"]);
    let json = node.atoll(["settings", "--cache", "1MiB", "--json"]).ok().json();
    assert_eq!(json["cache_bytes"].as_u64(), Some(1 << 20));
}

/// CFS §5.4: what a publisher may use of a node, and a refusal that says used and allowed.
#[test]
fn a_publisher_over_its_quota_is_refused_with_what_it_uses_and_may_use() {
    let ring = Ring::of(3);
    let source = ring.path("tree");
    make_tree(&source);
    ring.publish(&source);
    let shown = ring.nodes[1].atoll(["quota"]).ok().stdout;
    assert!(shown.contains("100%") && shown.contains("127.0.0.1"), "{shown}");
    for node in &ring.nodes {
        node.atoll(["quota", "--key-share", "0.01%", "--address-share", "50%"]).ok();
    }
    let json = ring.nodes[1].atoll(["quota", "--json"]).ok().json();
    assert_eq!(json["key_share_set"].as_f64(), Some(0.0001));
    let more = ring.path("more");
    std::fs::create_dir(&more).expect("a directory");
    std::fs::write(more.join("big"), crate::processes::noise(4 << 20, 9)).expect("written");
    let said = crate::processes::run(ring.nodes[0].command(["publish"]).arg(&more));
    said.failed(6, &["over quota", " of ", "allowed", "atoll quota"]);
    for node in &ring.nodes {
        node.atoll(["quota", "--key-share", "auto"]).ok();
    }
    crate::processes::run(ring.nodes[0].command(["publish"]).arg(&more)).ok();
    ring.nodes[0].atoll(["quota", "--key-share", "0"]).failed(2, &["a percentage above 0"]);
}
