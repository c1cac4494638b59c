//! How calls reach the server.

use std::sync::Arc;
use std::time::Duration;

use atoll_env::BoxFuture;
use atoll_net::{CallError, Peer, Reply, Request, Transport};

/// Carries calls to the server of a pool, wherever it is by now.
pub trait Route: Send + Sync + 'static {
    /// Calls the server and waits for its reply, at most until `limit` has passed.
    ///
    /// # Errors
    /// As [`Transport::call`].
    fn call(
        &self,
        request: Request,
        limit: Duration,
    ) -> BoxFuture<'static, Result<Reply, CallError>>;
}

/// The server is one peer.
#[derive(Clone)]
pub struct PeerRoute {
    transport: Arc<dyn Transport>,
    peer: Peer,
}

impl PeerRoute {
    /// A route to `peer`.
    pub fn new(transport: Arc<dyn Transport>, peer: Peer) -> PeerRoute {
        PeerRoute { transport, peer }
    }
}

impl Route for PeerRoute {
    fn call(
        &self,
        request: Request,
        limit: Duration,
    ) -> BoxFuture<'static, Result<Reply, CallError>> {
        self.transport.call(self.peer, request, limit)
    }
}
