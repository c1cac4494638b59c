//! The calls a Chord node answers.

use atoll_env::BoxFuture;
use atoll_net::{Peer, Refusal, Reply, Request, Service};
use bytes::Bytes;
use futures_util::future::join_all;

use super::Chord;
use super::messages::{
    self, Alive, AskRoute, Doubt, FailureReport, Introduce, Leaving, MAX_REPORTED, NOT_JOINED,
    Nudge, Ping, Reached, Seen, Surroundings, WireNode, WireNodes, WirePeer, WireRoute,
};
use super::table::learn::LEARN;
use crate::Node;
use crate::chord::membership::ring_merge::{INTRODUCE_HOPS, Introduction};

impl Service for Chord {
    fn handle(&self, from: Peer, request: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        self.heard(&from);
        self.table_called(&from);
        self.spent(request.method, request.header.len());
        let (chord, method) = (self.arc(), request.method);
        Box::pin(async move {
            let answer = chord.answer(from, method, request.header).await;
            chord.spent(method, answer.as_ref().map_or(0, Bytes::len));
            answer.map(|header| Reply { header, parts: Vec::new() })
        })
    }
}

/// A message whose fields may all be absent, and with them its header.
fn decode_or_default<T>(header: &[u8]) -> Result<T, Refusal>
where
    T: Default + for<'b> minicbor::Decode<'b, ()>,
{
    if header.is_empty() { Ok(T::default()) } else { messages::decode(header) }
}

fn not_joined() -> Refusal {
    Refusal::new(NOT_JOINED, "this virtual server is not on a ring")
}

impl Chord {
    /// Answers a call of another node, or of one of this node's virtual servers.
    pub(super) fn answer(
        &self,
        from: Peer,
        method: u16,
        header: Bytes,
    ) -> BoxFuture<'static, Result<Bytes, Refusal>> {
        let chord = self.arc();
        Box::pin(async move {
            match method {
                messages::REPORT_FAILED => chord.answer_report_failed(from, &header).await,
                messages::NOTIFY => chord.answer_notify(from, &header).await,
                messages::REACH_ME => {
                    let doubt = chord.check_caller(chord.place(from, 0)).await;
                    Ok(messages::encode(&Reached { doubt }))
                }
                _ => chord.answer_at_once(from, method, &header),
            }
        })
    }

    /// Answers the methods that need no call of this node's own.
    fn answer_at_once(&self, from: Peer, method: u16, header: &[u8]) -> Result<Bytes, Refusal> {
        match method {
            messages::PING => {
                let ping: Ping = decode_or_default(header)?;
                let inner = self.lock();
                Ok(messages::encode(&Alive {
                    joined: inner.servers.state(ping.to.0).is_some_and(|s| s.joined()),
                    nonce: ping.nonce,
                    servers: Some(inner.servers.count()),
                    peer: Some(WirePeer(self.transport.local())),
                    unix_ms: Some(self.env.unix_ms()),
                }))
            }
            messages::NEIGHBOURS => self.surroundings(messages::decode(header)?, None),
            messages::NUDGE => {
                let nudge: Nudge = decode_or_default(header)?;
                let from = self.place(from, nudge.from.0);
                let head = self.lock().servers.state(nudge.to.0).and_then(|s| s.head());
                if head.is_some_and(|head| head.id == from.id) {
                    self.stabilize_soon(nudge.to.0);
                }
                Ok(Bytes::new())
            }
            messages::LEAVE => {
                self.let_go(from, &messages::decode(header)?);
                Ok(Bytes::new())
            }
            messages::ROUTE => {
                let ask: AskRoute = messages::decode(header)?;
                let route = self.routed(&ask.key.0, ask.as_root);
                Ok(messages::encode(&WireRoute(route)))
            }
            LEARN => self.answer_learn(header),
            messages::SEEN_AT => self.answer_seen_at(from, header),
            messages::KEY_CLAIM => self.answer_key_claim(from, header),
            messages::INTRODUCE => {
                let introduce: Introduce = messages::decode(header)?;
                let hops_left = introduce.hops_left.min(INTRODUCE_HOPS);
                let source = (from != self.transport.local()).then_some(from.id);
                let now = self.env.now();
                if let Some(by) = source
                    && self.config.mechanisms.report_limits
                    && !self.lock().trust.introductions.admit_introduction(by, now)
                {
                    let text = "too many introductions of late";
                    return Err(Refusal::new(Refusal::OVERLOADED, text));
                }
                self.queue_introduction(Introduction { node: introduce.node.0, hops_left, source });
                Ok(Bytes::new())
            }
            unknown => Err(Refusal::new(
                Refusal::UNKNOWN_METHOD,
                format!("Chord has no method {unknown:#06x}"),
            )),
        }
    }

    async fn answer_notify(&self, from: Peer, header: &[u8]) -> Result<Bytes, Refusal> {
        let seen: Seen = messages::decode(header)?;
        let (index, from) = (seen.to.0, self.place(from, seen.from.0));
        let doubt = self.check_caller(from).await;
        self.rectify(index, from);
        self.surroundings(seen, doubt)
    }

    fn surroundings(&self, seen: Seen, doubt: Option<Doubt>) -> Result<Bytes, Refusal> {
        let inner = self.lock();
        let state = inner.servers.state(seen.to.0).filter(|state| state.joined());
        let state = state.ok_or_else(not_joined)?;
        let unchanged = seen.epoch == Some(state.epoch());
        Ok(messages::encode(&Surroundings {
            epoch: state.epoch(),
            predecessor: state.predecessor().map(WireNode),
            successors: (!unchanged).then(|| WireNodes(state.successors().to_vec())),
            doubt,
        }))
    }

    /// Zave's *rectify*: `from` takes our virtual server `index` for its successor.
    pub(super) fn rectify(&self, index: u16, from: Node) {
        let recently = self.config.stabilize_every;
        let doubtful = self.update(|servers, now| servers.rectify(index, from, now, recently));
        doubtful.into_iter().for_each(|node| self.probe_soon(node));
    }

    fn let_go(&self, from: Peer, leaving: &Leaving) {
        let until = self.env.now() + self.config.suspect_for;
        let (leaver, told) = (self.place(from, leaving.from.0), leaving.told());
        let remaining = leaving.remaining.0;
        // A stranger's `LEAVE` changes nothing, and the number of strangers is not bounded.
        if !self.lock().servers.known().iter().any(|node| node.peer == from) {
            return;
        }
        let gone = |node: &Node| {
            node.peer.id == from.id && (remaining == 0 || node.virtual_server.index >= remaining)
        };
        self.update(|servers, now| {
            if remaining == 0 {
                servers.admission.suspect_peer(from, until);
            } else {
                let left = servers.known().into_iter().filter(gone);
                left.for_each(|node| servers.admission.suspect_node(node, until));
            }
            servers.neighbour_left(&leaver, &told, &gone, now);
        });
    }

    /// A peer could not reach nodes that this one named: pings them, within the limits.
    async fn answer_report_failed(&self, from: Peer, header: &[u8]) -> Result<Bytes, Refusal> {
        let dead: FailureReport = messages::decode(header)?;
        let (named, suspects) = {
            let now = self.env.now();
            let mut inner = self.lock();
            let mut named = inner.servers.known();
            // By key and address: a dead node is so with all its virtual servers.
            let reported = &dead.nodes.0[..dead.nodes.0.len().min(MAX_REPORTED)];
            named.retain(|n| !self.owns(n) && reported.iter().any(|dead| dead.peer == n.peer));
            named.dedup_by_key(|node| node.peer);
            let mut suspects = named.clone();
            let limits = self.config.mechanisms.report_limits;
            suspects
                .retain(|node| !limits || inner.trust.pings.admit_ping(node.peer, from.id, now));
            (named.len(), suspects)
        };
        if named > 0 && suspects.is_empty() {
            return Err(Refusal::new(Refusal::OVERLOADED, "these have just been pinged"));
        }
        join_all(suspects.iter().map(|node| self.probe_node(node))).await;
        Ok(Bytes::new())
    }
}
