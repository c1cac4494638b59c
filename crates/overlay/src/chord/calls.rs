//! The calls a Chord node makes.

use atoll_key::Key;
use atoll_net::{CallError, Peer, Refusal, Request};
use futures_util::FutureExt;
use minicbor::Decode;

use super::messages::{
    self, Alive, AskRoute, Dead, Leaving, MAX_WARNED, Meet, Seen, Surroundings, WireKey, WireNode,
    WireNodes, WireRoute,
};
use super::{Chord, state::Told};
use crate::walk::{Found, Step, WalkError, WalkLimits, walk, walk_from, walk_to_likely};
use crate::{Node, Route};
use atoll_env::BoxFuture;

/// Whether the node that gave this answer cannot serve as a neighbour: dead, on no ring,
/// or talking nonsense. Only an overloaded one is worth waiting for.
pub(super) fn is_no_neighbour(error: &CallError) -> bool {
    !matches!(error, CallError::Refused(r) if r.code == Refusal::OVERLOADED)
}

impl Chord {
    async fn call_raw(
        &self,
        to: &Node,
        method: u16,
        header: bytes::Bytes,
    ) -> Result<bytes::Bytes, CallError> {
        let request = Request { method, header, parts: Vec::new() };
        let start = self.env.now();
        let answer = self.transport.call(to.peer, request, self.config.call_limit).await;
        let now = self.env.now();
        match &answer {
            Err(error) if error.is_failure_of_peer() => self.peer_book.silent(&to.peer.id, now),
            _ => self.peer_book.answered(&to.peer.id, now.since(start), now),
        }
        Ok(answer?.header)
    }

    /// One call; a second one if the first timed out, since one lost message should not
    /// cost a node its place.
    async fn call<T: for<'b> Decode<'b, ()>>(
        &self,
        to: &Node,
        method: u16,
        header: bytes::Bytes,
    ) -> Result<T, CallError> {
        let reply = match self.call_raw(to, method, header.clone()).await {
            Err(CallError::TimedOut) => self.call_raw(to, method, header).await?,
            reply => reply?,
        };
        messages::decode(&reply).map_err(CallError::Refused)
    }

    /// Whether the node answers and is on a ring.
    pub(super) async fn call_ping(&self, to: &Node) -> Result<bool, CallError> {
        let alive: Alive = self.call(to, messages::PING, bytes::Bytes::new()).await?;
        Ok(alive.joined)
    }

    pub(super) async fn call_neighbours(&self, to: &Node) -> Result<Told, CallError> {
        let header = messages::encode(&Seen { epoch: None });
        let said: Surroundings = self.call(to, messages::NEIGHBOURS, header).await?;
        Ok(Told {
            predecessor: said.predecessor.map(|n| n.0),
            successors: said.successors.unwrap_or_default().0,
        })
    }

    pub(super) async fn call_notify(
        &self,
        to: &Node,
        seen: Option<u64>,
    ) -> Result<Surroundings, CallError> {
        let header = messages::encode(&Seen { epoch: seen });
        self.call(to, messages::NOTIFY, header).await
    }

    pub(super) async fn call_leave(&self, to: &Node, told: &Told) -> Result<(), CallError> {
        let leaving = Leaving {
            predecessor: told.predecessor.map(WireNode),
            successors: WireNodes(told.successors.clone()),
        };
        self.call_raw(to, messages::LEAVE, messages::encode(&leaving)).await.map(drop)
    }

    pub(super) async fn call_meet(
        &self,
        to: &Node,
        stranger: &Node,
        hops_left: u8,
    ) -> Result<(), CallError> {
        let meet = Meet { node: WireNode(*stranger), hops_left };
        self.call_raw(to, messages::MEET, messages::encode(&meet)).await.map(drop)
    }

    pub(super) async fn call_warn(&self, to: Node, failed: &[Peer]) -> Result<(), CallError> {
        let nodes = failed.iter().rev().take(MAX_WARNED).map(|peer| Node::of(*peer)).collect();
        let header = messages::encode(&Dead { nodes: WireNodes(nodes) });
        // The other side pings each of them, twice if need be.
        let request = Request { method: messages::WARN, header, parts: Vec::new() };
        self.transport.call(to.peer, request, self.config.call_limit * 3).await.map(drop)
    }

    /// Tells the predecessor in passing that our list has changed.
    pub(super) fn nudge(&self, node: Node) {
        let chord = self.this.clone();
        let Some(strong) = chord.upgrade() else { return };
        self.env.spawn(Box::pin(async move {
            // Whether it arrives does not matter: the next period tells as well.
            let _ = strong.call_raw(&node, messages::NUDGE, bytes::Bytes::new()).await;
            strong.lock().nudging.remove(&node.id);
        }));
    }

    // --- the way to a key's root ------------------------------------------------------

    /// One question of a walk that looks for a key's root.
    fn route_step(
        &self,
        node: Node,
        key: Key,
        as_root: bool,
    ) -> BoxFuture<'static, Result<Step<Vec<Node>>, CallError>> {
        let chord = self.arc();
        Box::pin(async move {
            let route = if node.id == chord.me().id {
                chord.lock().state.route(&key, as_root)
            } else {
                let header = messages::encode(&AskRoute { key: WireKey(key), as_root });
                chord.call::<WireRoute>(&node, messages::ROUTE, header).await?.0
            };
            Ok(match route {
                Route::Root(list) if list[0].id == node.id => Step::Done(list),
                route => Step::Route(route),
            })
        })
    }

    fn root_limits(&self) -> WalkLimits {
        WalkLimits { replicas: 0, deadline: self.config.call_limit * 16, ..WalkLimits::default() }
    }

    pub(super) async fn walk_to_root(&self, key: &Key) -> Result<Found<Vec<Node>>, WalkError> {
        let step = |node, as_root| self.route_step(node, *key, as_root);
        root_of(walk(&*self.env, self, key, self.root_limits(), step).boxed().await)
    }

    /// The root of `key` on the ring of `start`, other than this node.
    pub(super) async fn walk_to_root_from(
        &self,
        start: &[Node],
        key: &Key,
    ) -> Result<Found<Vec<Node>>, WalkError> {
        let step = |node, as_root| self.route_step(node, *key, as_root);
        root_of(walk_from(&*self.env, self, start, key, self.root_limits(), step).boxed().await)
    }

    /// The root of `key`, which is probably `likely`.
    pub(super) async fn walk_to_likely_root(
        &self,
        likely: Node,
        key: &Key,
    ) -> Result<Found<Vec<Node>>, WalkError> {
        let step = |node, as_root| self.route_step(node, *key, as_root);
        root_of(
            walk_to_likely(&*self.env, self, likely, key, self.root_limits(), step).boxed().await,
        )
    }
}

/// A root that still believes in its dead predecessor says it is not the root; the walk
/// then ends without anybody's `Done`, knowing the live ones.
fn root_of(end: Result<Found<Vec<Node>>, WalkError>) -> Result<Found<Vec<Node>>, WalkError> {
    match end {
        Err(WalkError::Absent { roots, trace, .. }) if !roots.is_empty() => {
            Ok(Found { at: roots[0], value: roots, trace })
        }
        end => end,
    }
}
