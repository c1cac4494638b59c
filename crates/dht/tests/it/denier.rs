//! A node that lies about what it holds.

use std::sync::Arc;

use atoll_dht::rpc::{
    self, Divert, DivertReply, Diverted, Hold, HoldReply, Proof, Prove, ProveReply, Put, PutReply,
    PutStatus, Renew, RenewReply, RenewStatus, Vouch, VouchReply, Vouched,
};
use atoll_env::BoxFuture;
use atoll_net::{Peer, Refusal, Reply, Request, Service};

/// What it says of any block.
const ALL: Vouched =
    Vouched { version: 0, lease_secs: u64::MAX, publisher: [7; 16], ip: [0; 16], holder: None };

/// Says that it holds whatever it is asked about, takes whatever it is given, and keeps nothing.
pub(crate) struct Denier(pub Arc<dyn Service>);

impl Service for Denier {
    fn handle(&self, from: Peer, request: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        let header = match request.method {
            rpc::VOUCH => {
                let asked: Vouch = rpc::from_header(&request.header).expect("honest");
                let vouched = vec![Some(ALL); asked.keys.len()].into();
                rpc::to_header(&VouchReply { vouched })
            }
            rpc::PROVE => {
                let asked: Prove = rpc::from_header(&request.header).expect("honest");
                let proof = Proof { version: 0, lease_secs: u64::MAX, mac: asked.nonce };
                let proofs = vec![Some(proof); asked.keys.len()].into();
                rpc::to_header(&ProveReply { proofs })
            }
            rpc::RENEW => {
                let asked: Renew = rpc::from_header(&request.header).expect("honest");
                let statuses = vec![RenewStatus::Held; asked.names.len()];
                rpc::to_header(&RenewReply { statuses, over: None })
            }
            rpc::PUT => {
                let put: Put = rpc::from_header(&request.header).expect("honest");
                let stored = PutStatus::Stored { copies: 3, wanted: 3 };
                let statuses = vec![stored; put.blocks.0.len()].into();
                rpc::to_header(&PutReply { statuses, set: None })
            }
            rpc::DIVERT => {
                let divert: Divert = rpc::from_header(&request.header).expect("honest");
                let status = PutStatus::Stored { copies: 1, wanted: 1 };
                let taken = Diverted { status, held: Some(ALL) };
                let blocks = vec![taken; divert.blocks.0.len()].into();
                rpc::to_header(&DivertReply { blocks, spare_bytes: u64::MAX })
            }
            rpc::HOLD => {
                let asked: Hold = rpc::from_header(&request.header).expect("honest");
                let held = vec![Some(ALL); asked.keys.len()].into();
                rpc::to_header(&HoldReply { held, spare_bytes: u64::MAX })
            }
            _ => return self.0.handle(from, request),
        };
        Box::pin(async move { Ok(Reply { header, parts: Vec::new() }) })
    }
}
