//! Remembered replica sets that are out of date (Pastis §5.6: "we simulated the fact that cached
//! replicas sets were stale in 10% of the calls").
//!
//! The ring stays as it is. One time in ten that a root answers a read or a write of a mutable block it
//! names another replica set than the one that the caller has remembered, so the caller has to look
//! the set up and ask again. A caller that has just looked it up does not compare, as in the paper.

use std::sync::Arc;

use atoll_dht::rpc::{self, PutReply, ReadReply, from_header, to_header};
use atoll_env::{BoxFuture, Env, random_below};
use atoll_net::{Peer, Refusal, Reply, Request, Service};

use super::bench::ONE_IN;
use crate::ring::Ring;

/// A node whose replies name an outdated set now and then.
struct Outdated {
    honest: Arc<dyn Service>,
    env: Env,
}

/// Makes all nodes of a ring do so.
pub(super) fn name_outdated_sets(ring: &Ring) {
    for at in 0..ring.members.len() {
        let env = ring.sim.outside();
        ring.disguise(at, |honest, _| Arc::new(Outdated { honest, env }));
    }
}

impl Service for Outdated {
    fn handle(&self, from: Peer, request: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        let (method, env) = (request.method, self.env.clone());
        let reply = self.honest.handle(from, request);
        if method != rpc::READ && method != rpc::PUT {
            return reply;
        }
        Box::pin(async move {
            let mut reply = reply.await?;
            if random_below(&*env, ONE_IN) > 0 {
                return Ok(reply);
            }
            let other = |set: u64| set ^ 1;
            if method == rpc::READ {
                let said: ReadReply = from_header(&reply.header)?;
                reply.header = to_header(&ReadReply { set: said.set.map(other), ..said });
            } else {
                let said: PutReply = from_header(&reply.header)?;
                reply.header = to_header(&PutReply { set: said.set.map(other), ..said });
            }
            Ok(reply)
        })
    }
}
