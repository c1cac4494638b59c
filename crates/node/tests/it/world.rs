//! Nodes in directories of their own, and how to wait for them.

use std::path::{Path, PathBuf};
use std::time::Duration;

use atoll_key::BlockHash;
use atoll_node::{Client, ClientOptions, JoinCode, Node, NodeConfig, Status};
use bytes::Bytes;

/// How long anything may take before a test gives up; not an expectation.
pub(crate) const LONG: Duration = Duration::from_secs(180);

/// A directory in which nodes are started and stopped.
pub(crate) struct Home {
    pub dir: PathBuf,
    _temp: tempfile::TempDir,
}

impl Home {
    pub(crate) fn new() -> Home {
        let temp = tempfile::tempdir().expect("temp");
        Home { dir: temp.path().join("node"), _temp: temp }
    }

    pub(crate) fn config(&self, join: Option<JoinCode>) -> NodeConfig {
        NodeConfig {
            listen: "127.0.0.1:0".parse().ok(),
            storage_bytes: Some(64 << 20),
            join,
            ..NodeConfig::new(&self.dir)
        }
    }

    /// A first start: a network of its own, or the code's.
    pub(crate) async fn found(&self) -> Node {
        Node::start(self.config(None)).await.expect("a fresh directory")
    }

    pub(crate) async fn join(&self, code: &JoinCode) -> Node {
        Node::start(self.config(Some(code.clone()))).await.expect("a fresh directory")
    }

    /// A later start, told nothing.
    pub(crate) async fn start_again(&self) -> Node {
        Node::start(NodeConfig::new(&self.dir)).await.expect("a node's directory")
    }

    pub(crate) async fn client(&self) -> Client {
        Client::connect(&self.dir).await.expect("a node runs")
    }

    pub(crate) async fn patient_client(&self) -> Client {
        let options = ClientOptions { patience: LONG, ..ClientOptions::default() };
        Client::connect_with(&self.dir, options).await.expect("a node runs")
    }
}

pub(crate) async fn code_of(home: &Home) -> JoinCode {
    home.client().await.invite().await.expect("an invitation").code
}

/// A founder and `more` nodes that joined it, when all see each other.
pub(crate) async fn ring(more: usize) -> Vec<(Home, Node)> {
    let first = Home::new();
    let node = first.found().await;
    let code = code_of(&first).await;
    let mut nodes = vec![(first, node)];
    for _ in 0..more {
        let home = Home::new();
        let node = home.join(&code).await;
        nodes.push((home, node));
    }
    for (_, node) in &nodes {
        sees(node, more).await;
    }
    nodes
}

/// Waits until a node has a predecessor and `others` nodes among its successors; any of them,
/// it included, may have several positions.
pub(crate) async fn sees(node: &Node, others: usize) {
    let closed = || {
        let status = node.status();
        let before = status.predecessor.is_some() == (others > 0);
        let mut seen: Vec<&str> = status.successors.iter().map(|s| s.peer_id.as_str()).collect();
        seen.retain(|id| *id != status.peer_id);
        seen.sort_unstable();
        seen.dedup();
        status.joined && before && seen.len() == others
    };
    let waiting = async {
        while !closed() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let ended = tokio::time::timeout(LONG, waiting).await;
    ended.unwrap_or_else(|_| panic!("never: the ring closes; {:#?}", node.status()));
}

/// Waits until `is_true` holds.
pub(crate) async fn until(what: &str, mut is_true: impl FnMut() -> bool) {
    let waiting = async {
        while !is_true() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(LONG, waiting).await.unwrap_or_else(|_| panic!("never: {what}"));
}

/// `count` different blocks of `len_bytes`.
pub(crate) fn blocks(seed: u8, count: u32, len_bytes: usize) -> Vec<(BlockHash, Bytes)> {
    let block = |i: u32| {
        let mut bytes = vec![seed; len_bytes.max(4)];
        bytes[..4].copy_from_slice(&i.to_be_bytes());
        let bytes = Bytes::from(bytes);
        (BlockHash::of(&bytes), bytes)
    };
    (0..count).map(block).collect()
}

pub(crate) fn mode(path: impl AsRef<Path>) -> u32 {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(path.as_ref()).expect("exists").mode() & 0o777
}

/// The places of a node, for comparison.
pub(crate) fn positions(status: &Status) -> Vec<String> {
    assert!(!status.positions.is_empty());
    status.positions.clone()
}
