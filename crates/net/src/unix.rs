//! The same calls over a Unix socket, between commands and the local node.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use atoll_key::PeerId;

use crate::stats::NetStats;
use crate::{CallError, Peer, Reply, Request, Service};

/// Whom a service on a Unix socket sees as the caller: a process of the same user.
pub const LOCAL_CALLER: Peer = Peer {
    id: PeerId([0; 32]),
    addr: std::net::SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 0),
};

/// Why a Unix socket could not be served.
#[derive(Debug, thiserror::Error)]
pub enum UnixServeError {
    /// Somebody answers on this socket.
    #[error("another process already listens on {}", .0.display())]
    InUse(PathBuf),
    /// Something that is not a socket is in the way; it is left alone.
    #[error("{} exists and is not a socket", .0.display())]
    NotASocket(PathBuf),
    /// The path is longer than the system allows for sockets.
    #[error("the socket's path is longer than the {limit} bytes the system allows: {}", .path.display())]
    PathTooLong {
        /// The path asked for.
        path: PathBuf,
        /// The most bytes a socket's path may have here.
        limit: usize,
    },
    /// The system refused.
    #[error("cannot listen on {}: {source}", .path.display())]
    Io {
        /// The path asked for.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
}

/// What a call does when no server answers on the socket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WhenAbsent {
    /// Returns [`CallError::Unreachable`] at once.
    Fail,
    /// Waits for the server to come back, until the call's deadline. The request may
    /// reach the service twice when the server dies under it, so it must be idempotent.
    Wait,
}

/// A service on a Unix socket. Dropping it stops serving.
pub struct UnixServer {}

/// Serves `service` on a socket at `path` (mode 0600) to processes of the same user and
/// root. A stale socket file is replaced. Must be called within a tokio runtime.
pub fn serve_unix(path: &Path, service: Arc<dyn Service>) -> Result<UnixServer, UnixServeError> {
    let _ = (path, service);
    unimplemented!()
}

impl UnixServer {
    /// The counters, for `status`.
    pub fn stats(&self) -> NetStats {
        unimplemented!()
    }

    /// Stops listening, removes the socket file, closes the connections and waits for
    /// the tasks to end.
    pub async fn shutdown(&self) {
        unimplemented!()
    }
}

/// Calls the server on a Unix socket over one connection, made when first needed and
/// again after the server's restart.
pub struct UnixClient {}

impl UnixClient {
    /// A client of the socket at `path`. Nothing is connected yet. Calls must be made
    /// within a tokio runtime.
    pub fn new(path: &Path) -> UnixClient {
        let _ = path;
        unimplemented!()
    }

    /// Calls the server and waits for its reply, at most until `limit` has passed.
    /// Dropping the future gives the call up.
    pub async fn call(
        &self,
        request: Request,
        limit: Duration,
        when_absent: WhenAbsent,
    ) -> Result<Reply, CallError> {
        let _ = (request, limit, when_absent);
        unimplemented!()
    }
}
