//! A static ring: every node knows all nodes, and nothing ever changes.
//!
//! The simplest [`Overlay`], for tests of the layers above: a layer that works on it and on
//! [`Chord`](crate::chord::Chord) depends on the trait alone. It sends no message. Failures that
//! are reported to it are only noted in the peer book, whose readers avoid the node.

use std::sync::Arc;

use atoll_env::{BoxFuture, Env};
use atoll_key::Key;
use atoll_net::Peer;

use crate::peer_book::PeerBook;
use crate::walk::WalkError;
use crate::{Neighbourhood, Node, Overlay, Route, distinct_peers};

/// One node's view of a ring that never changes.
pub struct StaticRing {
    env: Env,
    /// This node's virtual servers, by virtual index.
    own: Vec<Node>,
    /// All virtual servers of all nodes, in ring order.
    ring: Arc<Vec<Node>>,
    peer_book: PeerBook,
}

impl StaticRing {
    /// The view of `me` on a ring of exactly these virtual servers, among them its own.
    ///
    /// # Panics
    /// If none of them is `me`'s.
    pub fn new(env: Env, me: Peer, mut ring: Vec<Node>) -> StaticRing {
        ring.sort_unstable_by_key(|node| node.id);
        let mut own: Vec<Node> = ring.iter().filter(|node| node.peer == me).copied().collect();
        own.sort_unstable_by_key(|node| node.virtual_server.index);
        assert!(!own.is_empty(), "a node has a virtual server");
        StaticRing { env, own, ring: Arc::new(ring), peer_book: PeerBook::default() }
    }

    /// All virtual servers, beginning with the first at or after `key`.
    fn from(&self, key: &Key) -> Vec<Node> {
        let at = self.ring.partition_point(|node| node.id.key() < key);
        let (before, after) = self.ring.split_at(at);
        after.iter().chain(before).copied().collect()
    }
}

impl Overlay for StaticRing {
    fn neighbourhoods(&self) -> Vec<Neighbourhood> {
        let around = |me: &Node| {
            let successors = self.from(&me.id.key().next()).into_iter().filter(|node| node != me);
            let successors: Vec<Node> = successors.collect();
            let predecessor = successors.last().copied();
            Neighbourhood { epoch: 0, me: *me, predecessor, successors, joined: true }
        };
        self.own.iter().map(around).collect()
    }

    fn epoch(&self) -> u64 {
        0
    }

    fn changed(&self, _: u64) -> BoxFuture<'static, u64> {
        Box::pin(std::future::pending())
    }

    fn route(&self, key: &Key, as_root: bool) -> Route {
        let nodes = self.from(key);
        if as_root && !self.own.contains(&nodes[0]) {
            return Route::NotRoot(nodes[0]);
        }
        Route::Root(nodes)
    }

    fn find_root(&self, key: &Key) -> BoxFuture<'static, Result<Vec<Node>, WalkError>> {
        let nodes = self.from(key);
        Box::pin(async { Ok(nodes) })
    }

    fn estimated_nodes(&self) -> f64 {
        self.ring.len() as f64
    }

    fn estimated_peers(&self) -> f64 {
        distinct_peers(&self.ring, usize::MAX).len() as f64
    }

    fn peer_book(&self) -> &PeerBook {
        &self.peer_book
    }

    fn report_failure(&self, failed: &Peer) {
        self.peer_book.silent(failed, self.env.now());
    }
}
