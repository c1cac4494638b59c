//! A node that lies about what it holds.

use std::sync::Arc;

use atoll_dht::messages::{
    self, Proof, Prove, ProveReply, Put, PutReply, PutStatus, Renew, RenewReply, Vouch, VouchReply,
    Vouched,
};
use atoll_env::BoxFuture;
use atoll_net::{Peer, Refusal, Reply, Request, Service};

/// Says that it holds whatever it is asked about, takes whatever it is given, and keeps nothing.
pub struct Denier(pub Arc<dyn Service>);

impl Service for Denier {
    fn handle(&self, from: Peer, request: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        let header = match request.method {
            messages::VOUCH => {
                let asked: Vouch = messages::from_header(&request.header).expect("honest");
                let (publisher, ip) = ([7; 16], [0; 16]);
                let lease_secs = u64::MAX;
                let all = Vouched { version: 0, lease_secs, publisher, ip, holder: None };
                let vouched = vec![Some(all); asked.keys.len()].into();
                messages::to_header(&VouchReply { vouched })
            }
            messages::PROVE => {
                let asked: Prove = messages::from_header(&request.header).expect("honest");
                let proof = Proof { version: 0, lease_secs: u64::MAX, mac: asked.nonce };
                let proofs = vec![Some(proof); asked.keys.len()].into();
                messages::to_header(&ProveReply { proofs })
            }
            messages::RENEW => {
                let asked: Renew = messages::from_header(&request.header).expect("honest");
                let held = vec![1; asked.names.len()];
                messages::to_header(&RenewReply { held, over: None })
            }
            messages::PUT => {
                let put: Put = messages::from_header(&request.header).expect("honest");
                let stored = PutStatus::Stored { copies: 3, wanted: 3 };
                let statuses = vec![stored; put.blocks.0.len()].into();
                messages::to_header(&PutReply { statuses })
            }
            _ => return self.0.handle(from, request),
        };
        Box::pin(async move { Ok(Reply { header, parts: Vec::new() }) })
    }
}
