//! What a node answers its peers: one handler for each method of the table in [`crate::rpc`].
//!
//! A request is read and checked against the method's limits before its handler sees it.

mod cache;
mod charging;
mod divert;
mod fetch;
mod holdings;
mod lock;
mod lookup_step;
mod prove;
mod put;
mod read;
mod reconcile;
mod release;
pub(crate) mod renew;
mod work_limit;

use std::sync::Arc;

use atoll_net::{Peer, Refusal, Reply, Request};
use bytes::Bytes;

use crate::accounting::receipt::BAD_RECEIPT;
use crate::cache::PathCache;
use crate::cache::promised::Promised;
use crate::context::layer_above;
use crate::method_table;
use crate::replication::Replication;
use crate::rpc::{self, Answered, Caller, Method, read_request, to_header};
use work_limit::{Limits, WorkLimiter};

/// A node as its peers see it.
pub(crate) struct Server {
    replication: Arc<Replication>,
    pub cache: Arc<PathCache>,
    pub promised: Promised,
    comparing: WorkLimiter,
    proving: WorkLimiter,
}
layer_above!(Server, replication: Arc<Replication>);

impl Server {
    pub(crate) fn new(replication: Arc<Replication>, cache: Arc<PathCache>) -> Server {
        let limits = |of| if replication.config.mechanisms.work_limits { of } else { Limits::NONE };
        let comparing = WorkLimiter::new(limits(reconcile::LIMITS));
        let proving = WorkLimiter::new(limits(prove::LIMITS));
        Server { replication, cache, promised: Promised::default(), comparing, proving }
    }
}

/// Answers one method.
pub(crate) trait Handle<M: Method> {
    /// The reply to a request of `from`'s, which keeps the method's limits.
    fn handle(
        &self,
        from: Peer,
        request: M,
        parts: Vec<Bytes>,
    ) -> impl Future<Output = Result<Answered<M>, Refusal>> + Send;
}

async fn answer<M: Method>(
    server: &impl Handle<M>,
    from: Peer,
    request: Request,
) -> Result<Reply, Refusal> {
    let (request, parts) = read_request::<M>(request)?;
    if M::SPEC.caller == Caller::Publisher && !request.is_signed_by_publisher() {
        return Err(Refusal::new(BAD_RECEIPT, "only a publisher with a receipt may ask for this"));
    }
    let (header, parts) = server.handle(from, request, parts).await?;
    Ok(Reply { header: to_header(&header), parts })
}

macro_rules! define_dispatch {
    ($($(#[$doc:meta])* $NUMBER:ident = $number:literal: $Request:ident => $Reply:ident, $spec:tt;)*) => {
        /// Answers any request of the table.
        pub(crate) async fn dispatch(
            server: &Arc<Server>,
            from: Peer,
            request: Request,
        ) -> Result<Reply, Refusal> {
            match request.method {
                $(rpc::$NUMBER => answer::<rpc::$Request>(server, from, request).await,)*
                other => Err(Refusal::new(
                    Refusal::UNKNOWN_METHOD,
                    format!("method {other:#06x} is not known here"),
                )),
            }
        }
    };
}
method_table!(define_dispatch);
