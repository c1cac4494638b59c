//! How a record spreads from node to node.
//!
//! Once for each record, a node compares epochs with every peer that it is connected with. The
//! side with the newer record gives it to the other, if the other may know it. A new record
//! therefore spreads as fast as nodes call each other, and a node that withholds it delays only
//! nodes that know no other node.

use std::sync::Arc;
use std::time::Duration;

use atoll_env::{BoxFuture, jittered, timeout};
use atoll_key::PeerId;
use atoll_net::{Peer, Refusal, Reply, Request, Service, TcpTransport, Transport};
use bytes::Bytes;
use futures_util::future::join_all;
use minicbor::{Decode, Encode};

use super::Membership;
use crate::control::message::{decode, encode};

/// The upper byte of the methods here.
pub(crate) const FAMILY: u8 = 0x04;
/// Compare epochs: [`Epoch`]; answered by [`Newer`].
const COMPARE: u16 = 0x0400;
/// Take a record over: its bytes are the only part, the header is empty; so is the answer.
const GIVE: u16 = 0x0401;

/// How often connections are looked at for a peer that was not told yet.
const LOOK_EVERY: Duration = Duration::from_secs(2);
/// The least time between two writes of the members met.
const SAVE_EVERY: Duration = Duration::from_secs(10);
/// The most peers told at once.
const MAX_AT_ONCE: usize = 32;
/// How long a peer may take to answer.
const LIMIT: Duration = Duration::from_secs(5);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct Epoch {
    /// Of the caller's record; 0 for none.
    #[n(0)]
    pub epoch: u64,
}

/// With the record as the only part, where the caller's is older and it may have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct Newer {
    /// Of the answerer's record; 0 for none.
    #[n(0)]
    pub epoch: u64,
}

impl Membership {
    /// Spreads the record and closes connections that it does not allow, for ever.
    pub(crate) async fn run(self: Arc<Self>, transport: Arc<TcpTransport>) {
        let mut saved = self.env.now();
        loop {
            self.enforce(&transport);
            self.tell_all(&transport).await;
            if self.env.now().since(saved) >= SAVE_EVERY {
                let members = self.clone();
                let _ = tokio::task::spawn_blocking(move || members.save_known()).await;
                saved = self.env.now();
            }
            let pause = jittered(&*self.env, LOOK_EVERY);
            let _ = timeout(&*self.env, pause, self.news.notified()).await;
        }
    }

    /// Closes connections with nodes that are not members any more.
    pub(super) fn enforce(&self, transport: &TcpTransport) {
        let connected = transport.connected();
        self.lock().known.seen(&connected, self.env.unix_ms());
        // One that is being dialled has proven nothing yet, and learns nothing.
        let stays = |id: &PeerId| {
            let (is_met, is_removed) = {
                let state = self.lock();
                (state.known.get(id).is_some(), state.is_removed(id))
            };
            !is_removed && (!is_met || self.may_know(id))
        };
        transport.close_unless(stays, "the network's secret was replaced, or the node removed");
    }

    /// Compares epochs with every connected peer that has not been told yet. Returns how many
    /// connected members have the record now, and how many are connected.
    pub(super) async fn tell_all(self: &Arc<Self>, transport: &TcpTransport) -> (usize, usize) {
        let connected = transport.connected();
        let untold: Vec<Peer> = {
            let mut state = self.lock();
            state.told.retain(|id, _| connected.contains(id));
            let untold = connected.iter().filter(|id| !state.told.contains_key(id));
            untold.filter_map(|id| Some(state.known.get(id)?.peer.0)).collect()
        };
        for some in untold.chunks(MAX_AT_ONCE) {
            join_all(some.iter().map(|peer| self.compare(transport, *peer))).await;
        }
        let state = self.lock();
        let members = connected.iter().filter(|id| state.known.get(id).is_some());
        (state.told.len(), members.count())
    }

    async fn compare(self: &Arc<Self>, transport: &TcpTransport, peer: Peer) {
        let (epoch, bytes) = self.held();
        let header = encode(&Epoch { epoch });
        let asked = Request { method: COMPARE, header, parts: Vec::new() };
        let theirs = match transport.call(peer, asked, LIMIT).await {
            Ok(reply) => {
                let Ok(newer) = decode::<Newer>(&reply.header) else { return };
                if let Some(record) = reply.parts.first() {
                    self.take_over_from(peer, record.clone()).await;
                }
                newer.epoch
            }
            // It lives, and its version knows of no records.
            Err(error) if error.is_unknown_method() => epoch,
            Err(_) => return,
        };
        if theirs < epoch && self.may_know(&peer.id) {
            let parts = bytes.into_iter().collect();
            let give = Request { method: GIVE, header: Bytes::new(), parts };
            if transport.call(peer, give, LIMIT).await.is_err() {
                return;
            }
        }
        let mut state = self.lock();
        if state.record_epoch() == epoch {
            state.told.insert(peer.id, epoch);
        }
    }

    /// The record's epoch and bytes.
    fn held(&self) -> (u64, Option<Bytes>) {
        let state = self.lock();
        let bytes = state.record.as_ref().map(|record| Bytes::copy_from_slice(record.bytes()));
        (state.record_epoch(), bytes)
    }

    async fn take_over_from(self: &Arc<Self>, peer: Peer, bytes: Bytes) {
        if !self.may_be_newer(&bytes) {
            return;
        }
        let members = self.clone();
        let taken = tokio::task::spawn_blocking(move || members.take_over(&bytes)).await;
        if let Ok(Err(why)) = taken
            && self.count_refused_record()
        {
            tracing::warn!(%peer, "a record of the network's state is refused: {why}");
        }
    }

    async fn answer(self: Arc<Self>, from: Peer, request: Request) -> Result<Reply, Refusal> {
        match request.method {
            COMPARE => {
                let theirs: Epoch = decode(&request.header)?;
                let (epoch, bytes) = self.held();
                let gives = theirs.epoch < epoch && self.may_know(&from.id);
                let parts = bytes.filter(|_| gives).into_iter().collect();
                if theirs.epoch == epoch {
                    self.lock().told.insert(from.id, epoch);
                }
                Ok(Reply { header: encode(&Newer { epoch }), parts })
            }
            GIVE => {
                if let Some(record) = request.parts.into_iter().next() {
                    self.take_over_from(from, record).await;
                }
                Ok(Reply::default())
            }
            other => {
                let text = format!("method {other:#06x} is not known here");
                Err(Refusal::new(Refusal::UNKNOWN_METHOD, text))
            }
        }
    }
}

/// What peers ask.
pub(crate) struct MembershipService(pub Arc<Membership>);

impl Service for MembershipService {
    fn handle(&self, from: Peer, request: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        Box::pin(self.0.clone().answer(from, request))
    }
}
