//! The calls a Chord node makes.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use atoll_key::Key;
use atoll_net::{CallError, Peer, Refusal, Request};
use futures_util::FutureExt;
use futures_util::future::{Either, select};
use minicbor::Decode;

use super::Chord;
use super::messages::{
    self, Alive, AskRoute, FailureReport, Introduce, Leaving, MAX_REPORTED, NOT_JOINED, Nudge,
    Ping, Reached, Seen, Surroundings, VirtualIndex, WireKey, WireNode, WireNodes, WireRoute,
};
use crate::chord::ring::servers::SuccessorAnswer;
use crate::chord::ring::state::Told;
use crate::walk::{Answer, Found, Start, Step, WalkError, WalkLimits, walk_from};
use crate::{Named, Node, Route};
use atoll_env::{BoxFuture, sleep};

/// Whether the node that gave this answer cannot serve as a neighbour: it is dead, on no ring, or
/// its answer does not decode. An overloaded node will answer later, and a node that does not know
/// the method lives: it runs another version.
pub(super) fn is_no_neighbour(error: &CallError) -> bool {
    let overloaded = matches!(error, CallError::Refused(r) if r.code == Refusal::OVERLOADED);
    !overloaded && !error.is_unknown_method()
}

/// Whether the answer says that the peer lives and only the virtual server does not.
pub(super) fn is_vacant(error: &CallError) -> bool {
    matches!(error, CallError::Refused(r) if r.code == NOT_JOINED)
}

impl Chord {
    /// A call to a virtual server; one of this node's own answers without the network.
    pub(super) async fn call_raw(
        &self,
        to: &Node,
        method: u16,
        header: bytes::Bytes,
    ) -> Result<bytes::Bytes, CallError> {
        self.call_within(to, method, header, self.config.call_limit).await
    }

    async fn call_within(
        &self,
        to: &Node,
        method: u16,
        header: bytes::Bytes,
        limit: Duration,
    ) -> Result<bytes::Bytes, CallError> {
        if self.owns(to) {
            return Ok(self.answer(self.transport.local(), method, header).await?);
        }
        self.spent(method, header.len());
        let request = Request { method, header, parts: Vec::new() };
        let start = self.env.now();
        let answer = self.transport.call(to.peer, request, limit).await;
        let now = self.env.now();
        match &answer {
            Err(error) if error.is_failure_of_peer() => self.peer_book.silent(&to.peer, now),
            _ => self.peer_book.answered(&to.peer.id, now.since(start), now),
        }
        if let Ok(reply) = &answer {
            self.spent(method, reply.header.len());
            self.table_answered(to, method);
        }
        Ok(answer?.header)
    }

    /// One call; a second one if the first timed out, since one lost message should not
    /// cost a node its place.
    pub(super) async fn call<T: for<'b> Decode<'b, ()>>(
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

    /// The same where somebody waits for the answer: the second call is made once the first is overdue, and both have
    /// the time of one. A walk waits for a root that was stopped no longer than for one call.
    async fn call_in_time<T: for<'b> Decode<'b, ()>>(
        &self,
        to: &Node,
        method: u16,
        header: bytes::Bytes,
    ) -> Result<T, CallError> {
        let limit = self.config.call_limit;
        let late_after = self.peer_book.late_after(&to.peer.id).min(limit / 2);
        let first = pin!(self.call_raw(to, method, header.clone()));
        let reply = match select(first, sleep(&*self.env, late_after)).await {
            Either::Left((reply, _)) => reply?,
            Either::Right((_, first)) => {
                let second = pin!(self.call_within(to, method, header, limit - late_after));
                select(first, second).await.factor_first().0?
            }
        };
        messages::decode(&reply).map_err(CallError::Refused)
    }

    /// Whether the virtual server answers and is on a ring.
    pub(super) async fn call_ping(&self, to: &Node) -> Result<bool, CallError> {
        let ping = Ping { to: VirtualIndex(to.virtual_server.index), nonce: None };
        let header = messages::encode(&ping);
        let alive: Alive = self.call(to, messages::PING, header).await?;
        Ok(alive.joined)
    }

    /// The surroundings of a virtual server.
    pub(super) async fn call_neighbours(&self, to: &Node) -> Result<Told, CallError> {
        let header = messages::encode(&Seen {
            to: VirtualIndex(to.virtual_server.index),
            ..Seen::default()
        });
        let said: Surroundings = self.call(to, messages::NEIGHBOURS, header).await?;
        Ok(Told {
            predecessor: said.predecessor.map(|n| n.0),
            successors: said.successors.unwrap_or_default().0,
        })
    }

    /// Virtual server `from` takes `to` for its first successor.
    pub(super) async fn call_notify(
        &self,
        from: u16,
        to: &Node,
        seen: Option<u64>,
    ) -> Result<SuccessorAnswer, CallError> {
        let (to_index, from) = (VirtualIndex(to.virtual_server.index), VirtualIndex(from));
        let header = messages::encode(&Seen { epoch: seen, to: to_index, from });
        let said: Surroundings = self.call(to, messages::NOTIFY, header).await?;
        Ok(SuccessorAnswer {
            epoch: said.epoch,
            predecessor: said.predecessor.map(|node| node.0),
            successors: said.successors.map(|nodes| nodes.0),
            doubt: said.doubt,
        })
    }

    /// Whether a node reaches this one where it says it listens.
    pub(super) async fn call_reach_me(&self, to: &Node) -> Result<Reached, CallError> {
        self.call(to, messages::REACH_ME, bytes::Bytes::new()).await
    }

    /// Virtual server `from` has left; `remaining` stay.
    pub(super) async fn call_leave(
        &self,
        from: u16,
        to: &Node,
        told: &Told,
        remaining: u16,
    ) -> Result<(), CallError> {
        let leaving = Leaving {
            predecessor: told.predecessor.map(WireNode),
            successors: WireNodes(told.successors.clone()),
            from: VirtualIndex(from),
            remaining: VirtualIndex(remaining),
        };
        self.call_raw(to, messages::LEAVE, messages::encode(&leaving)).await.map(drop)
    }

    /// Introduces `stranger` to `to`.
    pub(super) async fn call_introduce(
        &self,
        to: &Node,
        stranger: &Node,
        hops_left: u8,
    ) -> Result<(), CallError> {
        let introduce = Introduce { node: WireNode(*stranger), hops_left };
        self.call_raw(to, messages::INTRODUCE, messages::encode(&introduce)).await.map(drop)
    }

    pub(super) async fn call_report_failed(
        &self,
        to: Node,
        failed: &[Peer],
    ) -> Result<(), CallError> {
        let nodes = failed.iter().rev().take(MAX_REPORTED).map(|peer| Node::of(*peer)).collect();
        let header = messages::encode(&FailureReport { nodes: WireNodes(nodes) });
        self.spent(messages::REPORT_FAILED, header.len());
        // The other side pings each of them, twice if need be.
        let request = Request { method: messages::REPORT_FAILED, header, parts: Vec::new() };
        self.transport.call(to.peer, request, self.config.call_limit * 3).await.map(drop)
    }

    /// Tells another node in passing that the list of virtual server `from` has changed.
    pub(super) fn nudge(&self, from: u16, node: Node) {
        let chord = self.this.clone();
        let Some(strong) = chord.upgrade() else { return };
        let nudge = Nudge { to: VirtualIndex(node.virtual_server.index), from: VirtualIndex(from) };
        self.env.spawn(Box::pin(async move {
            // Whether it arrives does not matter: the next period tells as well.
            let _ = strong.call_raw(&node, messages::NUDGE, messages::encode(&nudge)).await;
            strong.lock().maintenance.nudging.remove(&(from, node));
        }));
    }

    // --- the way to a key's root ------------------------------------------------------

    /// One question of a walk that looks for a key's root.
    fn route_step(
        &self,
        node: Node,
        key: Key,
        as_root: bool,
    ) -> BoxFuture<'static, Answer<Vec<Node>>> {
        let chord = self.arc();
        Box::pin(async move {
            let header = messages::encode(&AskRoute { key: WireKey(key), as_root });
            Ok(Step::Route(
                chord.call_in_time::<WireRoute>(&node, messages::ROUTE, header).await?.0,
            ))
        })
    }

    /// The limits of walks to a root.
    pub(super) fn root_limits(&self) -> WalkLimits {
        WalkLimits {
            replicas: 0,
            deadline: self.config.call_limit * 16,
            selection: self.config.selection,
            routes: self.config.routes,
            ..WalkLimits::default()
        }
    }

    /// The root of `key`.
    pub(super) async fn walk_to_root(
        &self,
        key: &Key,
        start: Start<'_>,
        limits: WalkLimits,
    ) -> Result<Found<Vec<Node>>, WalkError> {
        let named: Arc<Named> = Arc::new(Box::new(|_| {}));
        self.walk_to_root_telling(key, start, limits, &named).await
    }

    /// The same; tells of each root that a node on the way names.
    pub(super) async fn walk_to_root_telling(
        &self,
        key: &Key,
        start: Start<'_>,
        limits: WalkLimits,
        named: &Arc<Named>,
    ) -> Result<Found<Vec<Node>>, WalkError> {
        let step = |node, as_root| -> BoxFuture<'static, _> {
            let (answer, named) = (self.route_step(node, *key, as_root), named.clone());
            Box::pin(async move {
                let answer = answer.await;
                if let Ok(Step::Route(Route::Root(nodes))) = &answer
                    && !as_root
                {
                    named(nodes);
                }
                answer
            })
        };
        root_of(walk_from(start, &*self.env, self, key, limits, step).boxed().await)
    }
}

/// A root that still believes in its dead predecessor says it is not the root; the walk
/// then ends without a `Done`, knowing the live ones.
fn root_of(end: Result<Found<Vec<Node>>, WalkError>) -> Result<Found<Vec<Node>>, WalkError> {
    match end {
        Err(WalkError::Absent { roots, trace, .. }) if !roots.is_empty() => {
            Ok(Found { at: roots[0], value: roots, trace })
        }
        end => end,
    }
}
