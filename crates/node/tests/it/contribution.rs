//! Nodes change how they give disk, and lose files, while the ring keeps what it has.

use std::fs;
use std::path::{Path, PathBuf};

use atoll_dht::Blocks;
use atoll_key::BlockHash;
use atoll_node::{Client, ContributionStatus, FlagCheck, Node, NodeConfig, Policy, Share};
use bytes::Bytes;

use crate::world::{Home, blocks, code_of, sees, until};

const BLOCKS: u32 = 120;

/// A ring in which no directory must be on a mounted TFS.
async fn ring(more: usize) -> Vec<(Home, Node)> {
    let first = Home::new();
    let assumed = |config| NodeConfig { flag: FlagCheck::Assumed, ..config };
    let node = Node::start(assumed(first.config(None))).await.expect("starts");
    let code = code_of(&first).await;
    let mut nodes = vec![(first, node)];
    for _ in 0..more {
        let home = Home::new();
        let node = Node::start(assumed(home.config(Some(code.clone())))).await.expect("starts");
        nodes.push((home, node));
    }
    for (_, node) in &nodes {
        sees(node, more).await;
    }
    nodes
}

async fn start_again(home: &Home) -> Node {
    let config = NodeConfig { flag: FlagCheck::Assumed, ..NodeConfig::new(&home.dir) };
    Node::start(config).await.expect("starts")
}

fn share(millionths: u32) -> Share {
    Share::from_millionths(millionths)
}

/// A directory beside the node's, for blocks.
fn blocks_dir(home: &Home, name: &str) -> PathBuf {
    let dir = home.dir.with_file_name(name);
    fs::create_dir_all(&dir).expect("made");
    dir
}

fn transparent(dir: &Path) -> Policy {
    Policy::Transparent { dir: dir.to_path_buf() }
}

/// Changes the policy and waits until nothing moves any more.
async fn contribute(client: &Client, policy: &Policy) -> ContributionStatus {
    let mut status = client.contribute(policy).await.expect("accepted");
    assert_eq!(status.policy, policy.name());
    while status.moving.is_some() {
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        status = client.contribution().await.expect("shown");
    }
    status
}

async fn all_are_read(client: &Client, there: &[(BlockHash, Bytes)]) {
    for (hash, bytes) in there {
        assert_eq!(client.get(*hash).await.as_ref(), Ok(bytes));
    }
}

/// Block files below a directory of a `FileStore`.
fn files(dir: &Path) -> Vec<PathBuf> {
    let dirs = fs::read_dir(dir).expect("there").map(|entry| entry.expect("readable").path());
    let inside = dirs.filter(|path| path.is_dir()).flat_map(|path| {
        fs::read_dir(path).expect("there").map(|entry| entry.expect("readable").path())
    });
    inside.collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn changing_how_disk_is_given_loses_nothing_that_has_replicas_elsewhere() {
    let mut nodes = ring(2).await;
    let (home, node) = nodes.pop().expect("three");
    let client = home.client().await;
    let there = blocks(7, BLOCKS, 8192);
    client.put(there.clone()).await.expect("put");
    until("a copy of each is here", || node.status().blocks == u64::from(BLOCKS)).await;

    let dir = blocks_dir(&home, "given");
    let status = contribute(&client, &transparent(&dir)).await;
    assert_eq!(status.blocks, u64::from(BLOCKS));
    assert_eq!(files(&dir).len(), BLOCKS as usize, "one file for each block");
    until("nothing is left where they were", || !home.dir.join("store").exists()).await;
    assert!(status.offered_bytes > 0 && status.disk_total_bytes > 0, "{status:?}");
    all_are_read(&client, &there).await;

    // It is remembered.
    node.stop().await;
    let node = start_again(&home).await;
    sees(&node, 2).await;
    let client = home.client().await;
    let status = client.contribution().await.expect("shown");
    assert_eq!((status.policy.as_str(), status.blocks), ("transparent", u64::from(BLOCKS)));

    let other = blocks_dir(&home, "given instead");
    contribute(&client, &transparent(&other)).await;
    assert_eq!(files(&other).len(), BLOCKS as usize);
    until("given up wholly", || fs::read_dir(&dir).expect("there").count() == 0).await;

    let whole = Policy::Dynamic { low: share(1_000_000), high: share(1_000_000) };
    let status = contribute(&client, &whole).await;
    assert_eq!((status.blocks, status.low), (u64::from(BLOCKS), Some(1.0)));
    until("given up wholly", || fs::read_dir(&other).expect("there").count() == 0).await;
    all_are_read(&client, &there).await;

    let status = contribute(&client, &Policy::Fixed { size_bytes: 32 << 20 }).await;
    assert_eq!((status.offered_bytes, status.blocks), (32 << 20, u64::from(BLOCKS)));
    assert_eq!((status.dropped_blocks, status.lost_blocks), (0, 0));
    for (home, _) in &nodes {
        all_are_read(&home.client().await, &there).await;
    }
    all_are_read(&client, &there).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn vanished_files_are_lost_replicas_that_repair_restores() {
    let mut nodes = ring(2).await;
    let (home, node) = nodes.pop().expect("three");
    let client = home.client().await;
    let there = blocks(8, BLOCKS, 8192);
    client.put(there.clone()).await.expect("put");
    until("a copy of each is here", || node.status().blocks == u64::from(BLOCKS)).await;
    let dir = blocks_dir(&home, "given");
    contribute(&client, &transparent(&dir)).await;

    // While it runs: a reader gets another node's copy, and the loss is noticed.
    let held = files(&dir);
    for path in held.iter().step_by(3) {
        fs::remove_file(path).expect("removed");
    }
    fs::write(&held[1], b"somebody else's bytes").expect("written");
    all_are_read(&client, &there).await;
    let noticed = client.contribution().await.expect("shown");
    assert_eq!(noticed.lost_blocks, u64::from(BLOCKS) / 3 + 1);

    // While it stands still: what is left of them is not claimed, and the rest comes back.
    node.stop().await;
    for path in files(&dir).iter().step_by(2) {
        fs::remove_file(path).expect("removed");
    }
    let node = start_again(&home).await;
    sees(&node, 2).await;
    until("all files are there again", || files(&dir).len() == BLOCKS as usize).await;
    until("and all blocks", || node.status().blocks == u64::from(BLOCKS)).await;
    all_are_read(&home.client().await, &there).await;
}

/// The story: a TFS was unmounted while blocks moved to it; as nothing could be put there, the
/// node gave up all it had.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_destination_that_goes_away_costs_no_block() {
    let mut nodes = ring(2).await;
    let (home, node) = nodes.pop().expect("three");
    let client = home.client().await;
    let there = blocks(11, 400, 64 << 10);
    for some in there.chunks(50) {
        client.put(some.to_vec()).await.expect("put");
    }
    until("a copy of each is here", || node.status().blocks == 400).await;
    let (dir, away) = (blocks_dir(&home, "given"), home.dir.with_file_name("away"));
    client.contribute(&transparent(&dir)).await.expect("accepted");
    fs::rename(&dir, &away).expect("unmounted");
    fs::create_dir(&dir).expect("an empty mount point");
    until("it says what is wrong", || {
        node.status().warnings.iter().any(|why| why.contains("is the file system mounted?"))
    })
    .await;
    let status = client.contribution().await.expect("shown");
    let left = status.moving.expect("some were still to come").left_blocks;
    assert!(left > 0, "they were moved before the directory went away");
    assert_eq!((status.dropped_blocks, fs::read_dir(&dir).expect("there").count()), (0, 0));
    all_are_read(&client, &there).await;
    fs::remove_dir(&dir).expect("removed");
    fs::rename(&away, &dir).expect("mounted");
    // The node looks now and then; naming it again makes it look at once.
    let status = contribute(&client, &transparent(&dir)).await;
    assert_eq!((status.blocks, status.dropped_blocks, status.lost_blocks), (400, 0, 0));
    assert_eq!(files(&dir).len(), 400);
}

/// The story: the same directory with a slash at its end was another place to the node, which
/// did not start again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_directory_is_the_same_however_it_is_spelled() {
    let mut nodes = ring(0).await;
    let (home, node) = nodes.pop().expect("one");
    let client = home.client().await;
    let there = blocks(12, 16, 8192);
    client.put(there.clone()).await.expect("put");
    let dir = blocks_dir(&home, "given");
    contribute(&client, &transparent(&dir)).await;
    let parent = dir.parent().expect("below something");
    let link = parent.join("link");
    std::os::unix::fs::symlink(&dir, &link).expect("linked");
    let slash = PathBuf::from(format!("{}/", dir.display()));
    for spelled in [slash, dir.join("."), parent.join("given/../given"), link] {
        let status = client.contribute(&transparent(&spelled)).await.expect("the same");
        assert!(status.moving.is_none(), "{}", spelled.display());
    }
    node.stop().await;
    let _node = start_again(&home).await;
    all_are_read(&home.client().await, &there).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_directory_that_is_gone_is_taken_anew_or_abandoned() {
    let mut nodes = ring(2).await;
    let (home, node) = nodes.pop().expect("three");
    let client = home.client().await;
    let there = blocks(13, BLOCKS, 8192);
    client.put(there.clone()).await.expect("put");
    until("a copy of each is here", || node.status().blocks == u64::from(BLOCKS)).await;
    let dir = blocks_dir(&home, "given");
    contribute(&client, &transparent(&dir)).await;
    let nothing = client.abandon_former().await.expect_err("nothing is being moved").to_string();
    assert!(nothing.contains("nothing to abandon"), "{nothing}");

    // The disk has died, and a new one is mounted in its place.
    fs::remove_dir_all(&dir).expect("removed");
    client.contribute(&transparent(&dir)).await.expect_err("it is not there");
    fs::create_dir(&dir).expect("made");
    client.contribute(&transparent(&dir)).await.expect("taken anew");
    until("it is known that all are lost", || node.status().blocks == 0).await;
    let lost = client.contribution().await.expect("shown").lost_blocks;
    assert_eq!(lost, u64::from(BLOCKS), "and repair will restore them");
    let more = blocks(14, 10, 8192);
    client.put(more).await.expect("put");
    until("it takes blocks again", || !files(&dir).is_empty()).await;

    // It has died again, and the user does not want to wait for it.
    fs::remove_dir_all(&dir).expect("removed");
    let status = client.contribute(&Policy::Fixed { size_bytes: 32 << 20 }).await;
    let status = status.expect("accepted");
    assert!(status.moving.is_some());
    assert!(status.warnings.iter().any(|why| why.contains("--abandon")), "{status:?}");
    let other = blocks_dir(&home, "other");
    let refused = client.contribute(&transparent(&other)).await.expect_err("it waits");
    assert!(refused.to_string().contains("--abandon"), "{refused}");
    let status = client.abandon_former().await.expect("given up");
    assert_eq!(status.moving, None);
    all_are_read(&client, &there).await;
    assert_eq!(fs::read_dir(home.dir.join("files")).expect("there").count(), 0, "no index");
}

/// §2 of the TFS paper; with both watermarks below what the disk holds, all must go.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_above_its_watermark_gives_up_copies_that_others_have() {
    let nodes = ring(2).await;
    let (home, node) = &nodes[2];
    let client = home.client().await;
    let there = blocks(9, BLOCKS, 8192);
    client.put(there.clone()).await.expect("put");
    until("a copy of each is here", || node.status().blocks == u64::from(BLOCKS)).await;
    contribute(&client, &Policy::Dynamic { low: share(1), high: share(1) }).await;
    until("nothing is held any more", || node.status().blocks == 0).await;
    let status = client.contribution().await.expect("shown");
    assert_eq!((status.offered_bytes, status.dropped_blocks), (0, u64::from(BLOCKS)));
    all_are_read(&client, &there).await;
    for (_, other) in &nodes[..2] {
        assert_eq!(other.status().blocks, u64::from(BLOCKS), "the others keep theirs");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_nobody_else_holds_is_not_given_up() {
    let nodes = ring(0).await;
    let (home, node) = &nodes[0];
    let client = home.client().await;
    for seed in 1..=20 {
        client.put(blocks(seed, 16, 64 << 10)).await.expect("put");
    }
    let refused = client.contribute(&Policy::Fixed { size_bytes: 16 << 20 }).await;
    let error = refused.expect_err("too small").to_string();
    assert!(error.contains("held here and nowhere else"), "{error}");
    let tiny = Policy::Dynamic { low: share(1), high: share(1) };
    client.contribute(&tiny).await.expect("accepted");
    until("it says why it stays full", || {
        node.status().warnings.iter().any(|why| why.contains("no other node"))
    })
    .await;
    assert_eq!(node.status().blocks, 320);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn senseless_contributions_are_refused_with_the_reason() {
    let home = Home::new();
    // This one wants to see the attribute.
    let node = home.found().await;
    let client = home.client().await;
    let before = client.contribution().await.expect("shown");
    assert_eq!((before.policy.as_str(), before.size_bytes), ("fixed", Some(64 << 20)));
    let dir = blocks_dir(&home, "given");
    let cases = [
        (Policy::Fixed { size_bytes: 1 }, "at least 16 MiB"),
        (Policy::Fixed { size_bytes: 1 << 60 }, "more than the disk has"),
        (Policy::Dynamic { low: share(900_000), high: share(800_000) }, "(90%) must be above 0"),
        (Policy::Dynamic { low: share(0), high: share(800_000) }, "must be above 0"),
        (transparent(Path::new("given")), "no absolute path"),
        (transparent(&home.dir.join("nowhere")), "does not exist"),
        (transparent(&home.dir.join("settings.cbor")), "not a directory"),
        (transparent(&dir), "atoll tfs set --transparent"),
    ];
    for (policy, reason) in cases {
        let error = client.contribute(&policy).await.expect_err(reason).to_string();
        assert!(error.contains(reason), "{policy:?}: {error}");
    }
    let after = client.contribution().await.expect("shown");
    // Other programs write to the same disk.
    let after = ContributionStatus { disk_free_bytes: before.disk_free_bytes, ..after };
    assert_eq!(after, before, "nothing has changed");
    assert_eq!(fs::read_dir(&dir).expect("there").count(), 0);
    node.stop().await;
}
