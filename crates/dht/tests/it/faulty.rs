//! Peers that answer otherwise than they should.

use std::sync::Arc;

use atoll_dht::rpc::{
    self, AskHoldings, Divert, DivertReply, Diverted, HeldCopy, HoldingsReply, Method, Proof,
    Prove, ProveReply, Put, PutReply, PutStatus, Renew, RenewReply, RenewStatus,
};
use atoll_env::BoxFuture;
use atoll_net::{Peer, Refusal, Reply, Request, Service};
use bytes::Bytes;

struct Faulty<F> {
    honest: Arc<dyn Service>,
    lie: F,
}

impl<F> Service for Faulty<F>
where
    F: Fn(&Peer, &Request) -> Option<Reply> + Send + Sync + 'static,
{
    fn handle(&self, from: Peer, request: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        match (self.lie)(&from, &request) {
            Some(reply) => Box::pin(async move { Ok(reply) }),
            None => self.honest.handle(from, request),
        }
    }
}

/// A service that answers as `lie` does, and honestly where that says nothing.
pub(crate) fn faulty(
    honest: Arc<dyn Service>,
    lie: impl Fn(&Peer, &Request) -> Option<Reply> + Send + Sync + 'static,
) -> Arc<dyn Service> {
    Arc::new(Faulty { honest, lie })
}

/// The answer to a call of one method; nothing to others.
pub(crate) fn reply_to<M: Method>(
    request: &Request,
    answer: impl FnOnce(M) -> M::Reply,
) -> Option<Reply> {
    if request.method != M::SPEC.number {
        return None;
    }
    let asked = rpc::from_header(&request.header).expect("honest callers");
    Some(Reply { header: rpc::to_header(&answer(asked)), parts: Vec::new() })
}

struct Altered<F> {
    honest: Arc<dyn Service>,
    alter: Arc<F>,
}

impl<F> Service for Altered<F>
where
    F: Fn(&Request, &mut Reply) + Send + Sync + 'static,
{
    fn handle(&self, from: Peer, request: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        let (honest, alter) = (self.honest.handle(from, request.clone()), self.alter.clone());
        Box::pin(async move {
            let mut reply = honest.await?;
            alter(&request, &mut reply);
            Ok(reply)
        })
    }
}

/// A service that changes what it should answer.
pub(crate) fn altered(
    honest: Arc<dyn Service>,
    alter: impl Fn(&Request, &mut Reply) + Send + Sync + 'static,
) -> Arc<dyn Service> {
    Arc::new(Altered { honest, alter: Arc::new(alter) })
}

/// Flips a bit of every block in a reply.
pub(crate) fn flip_a_bit(reply: &mut Reply) {
    for part in &mut reply.parts {
        let mut bytes = part.to_vec();
        bytes[0] ^= 1;
        *part = Bytes::from(bytes);
    }
}

/// What liars say of any block.
pub(crate) const ALL: HeldCopy =
    HeldCopy { version: 0, lease_secs: u64::MAX, publisher: [7; 16], ip: [0; 16], holder: None };

/// Proofs made up for what is asked.
pub(crate) fn made_up_proofs(asked: Prove) -> ProveReply {
    let proof = Proof { version: 0, lease_secs: u64::MAX, mac: asked.nonce };
    ProveReply { proofs: vec![Some(proof); asked.keys.len()].into() }
}

/// Says that it holds whatever it is asked about.
pub(crate) fn holds_all(asked: AskHoldings) -> HoldingsReply {
    HoldingsReply { held: vec![Some(ALL); asked.keys.len()].into(), spare_bytes: u64::MAX }
}

/// Says that it keeps whatever it is sent by members without room.
pub(crate) fn takes_all(divert: Divert) -> DivertReply {
    let status = PutStatus::Stored { copies: 1, wanted: 1 };
    let blocks = vec![Diverted { status, held: Some(ALL) }; divert.blocks.0.len()].into();
    DivertReply { blocks, spare_bytes: u64::MAX }
}

/// Says that it has stored whatever it is sent, so many times.
pub(crate) fn stores_all(put: Put, copies: u32) -> PutReply {
    let stored = PutStatus::Stored { copies, wanted: copies };
    PutReply {
        statuses: vec![stored; put.blocks.0.len()].into(),
        set: None,
        promises: Vec::new().into(),
    }
}

/// A node that says that it holds whatever it is asked about, takes whatever it is given, and keeps
/// nothing.
pub(crate) fn denier(honest: Arc<dyn Service>) -> Arc<dyn Service> {
    faulty(honest, |_, request| {
        let renewed = |asked: Renew| RenewReply {
            statuses: vec![RenewStatus::Held; asked.names.len()],
            over: None,
        };
        reply_to(request, holds_all)
            .or_else(|| reply_to(request, made_up_proofs))
            .or_else(|| reply_to(request, renewed))
            .or_else(|| reply_to(request, |put| stores_all(put, 3)))
            .or_else(|| reply_to(request, takes_all))
    })
}
