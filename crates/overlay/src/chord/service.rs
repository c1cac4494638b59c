//! The calls a Chord node answers.

use atoll_env::BoxFuture;
use atoll_net::{Peer, Refusal, Reply, Request, Service};
use bytes::Bytes;
use futures_util::future::join_all;

use super::messages::{
    self, Alive, AskRoute, Dead, Leaving, MAX_WARNED, Meet, NOT_JOINED, Seen, Surroundings,
    WireNode, WireNodes, WireRoute,
};
use super::state::Claim;
use super::{Chord, calls::is_no_neighbour};
use crate::Node;

impl Service for Chord {
    fn handle(&self, from: Peer, request: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        self.heard(&from);
        if request.method == messages::WARN {
            let chord = self.arc();
            return Box::pin(async move { chord.answer_warn(&request.header).await.map(reply) });
        }
        let answer = self.answer(Node::of(from), request.method, &request.header);
        Box::pin(std::future::ready(answer.map(reply)))
    }
}

fn reply(header: Bytes) -> Reply {
    Reply { header, parts: Vec::new() }
}

impl Chord {
    fn answer(&self, from: Node, method: u16, header: &[u8]) -> Result<Bytes, Refusal> {
        match method {
            messages::PING => Ok(messages::encode(&Alive { joined: self.lock().state.joined() })),
            messages::NEIGHBOURS => self.surroundings(messages::decode(header)?),
            messages::NOTIFY => {
                let seen = messages::decode(header)?;
                self.rectify(from);
                self.surroundings(seen)
            }
            messages::NUDGE => {
                if self.lock().state.head().is_some_and(|head| head.id == from.id) {
                    self.stabilize_bell.ring();
                }
                Ok(Bytes::new())
            }
            messages::LEAVE => {
                self.let_go(&from, &messages::decode(header)?);
                Ok(Bytes::new())
            }
            messages::ROUTE => {
                let ask: AskRoute = messages::decode(header)?;
                let route = self.lock().state.route(&ask.key.0, ask.as_root);
                Ok(messages::encode(&WireRoute(route)))
            }
            messages::MEET => {
                let meet: Meet = messages::decode(header)?;
                self.meet_soon(meet.node.0, meet.hops_left.min(super::upkeep::MEET_HOPS));
                Ok(Bytes::new())
            }
            unknown => Err(Refusal::new(
                Refusal::UNKNOWN_METHOD,
                format!("Chord has no method {unknown:#06x}"),
            )),
        }
    }

    /// Notes that a peer lives and calls.
    fn heard(&self, from: &Peer) {
        let now = self.env.now();
        let node = Node::of(*from);
        let mut inner = self.lock();
        inner.remembered.add(*from, &*self.env);
        if inner.state.predecessor().is_some_and(|p| p.id == node.id) {
            inner.predecessor_heard = now;
        }
        let suspected = inner.state.is_suspected(&node.id, now);
        drop(inner);
        if suspected {
            // That it reaches us does not say that we reach it.
            self.check_soon(node);
        }
    }

    fn surroundings(&self, seen: Seen) -> Result<Bytes, Refusal> {
        let inner = self.lock();
        let state = &inner.state;
        if !state.joined() {
            return Err(Refusal::new(NOT_JOINED, "this node is not on a ring"));
        }
        let unchanged = seen.epoch == Some(state.epoch());
        Ok(messages::encode(&Surroundings {
            epoch: state.epoch(),
            predecessor: state.predecessor().map(WireNode),
            successors: (!unchanged).then(|| WireNodes(state.successors().to_vec())),
        }))
    }

    /// Zave's *rectify*: `from` takes us for its successor.
    pub(super) fn rectify(&self, from: Node) {
        if self.lock().state.is_suspected(&from.id, self.env.now()) {
            return; // `heard` has it pinged first
        }
        let claim = self.update(|state, _| state.notified(from));
        if let Claim::Nearer(present) = claim {
            // Only if that one is dead may the claimant replace it; a live one calls us
            // every period and need not be asked.
            let silent = self.env.now().since(self.lock().predecessor_heard);
            if silent > self.config.stabilize_every {
                self.check_soon(present);
            }
        }
    }

    fn let_go(&self, leaver: &Node, leaving: &Leaving) {
        let until = self.env.now() + self.config.suspect_for;
        let told = leaving.told();
        self.update(|state, now| state.left(leaver, &told, now, until));
        self.lock().remembered.remove(&leaver.peer.id);
    }

    /// Somebody could not reach nodes that we named: look for ourselves.
    async fn answer_warn(&self, header: &[u8]) -> Result<Bytes, Refusal> {
        let dead: Dead = messages::decode(header)?;
        let known = self.lock().state.known();
        let is_known = |node: &&Node| known.iter().any(|k| k.id == node.id);
        let suspects: Vec<Node> =
            dead.nodes.0.iter().filter(is_known).take(MAX_WARNED).copied().collect();
        join_all(suspects.iter().map(|node| self.check(node))).await;
        Ok(Bytes::new())
    }

    /// Pings a node and forgets it if it is dead. Returns whether it lives on a ring.
    pub(super) async fn check(&self, node: &Node) -> bool {
        match self.call_ping(node).await {
            Ok(true) => {
                self.update(|state, _| state.unsuspect(&node.id));
                true
            }
            Err(error) if !is_no_neighbour(&error) => true,
            Ok(false) | Err(_) => {
                self.found_dead(node);
                false
            }
        }
    }
}
