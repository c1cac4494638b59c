//! The real transport: TCP with TLS 1.3.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use atoll_env::BoxFuture;
use atoll_key::{PeerId, SecretKey};
use bytes::Bytes;

use crate::stats::{NetStats, RefusalReason};
use crate::{CallError, Peer, Reply, Request, Service, Transport};

/// What a node must know to belong to a network.
#[derive(Clone)]
pub struct NetworkAuth {
    /// The network secret: 32 bytes of good randomness. Proven, never sent.
    pub secret: [u8; 32],
    /// The network's profile (how IDs are chosen, k, …) in its owner's encoding. Both
    /// sides of a connection must hold the same bytes.
    pub profile: Bytes,
}

/// How to start a [`TcpTransport`]. Take [`TcpConfig::new`] and change what differs.
#[derive(Clone)]
pub struct TcpConfig {
    /// The node's key.
    pub secret: SecretKey,
    /// The network it belongs to.
    pub network: NetworkAuth,
    /// Where to listen; port 0 takes a free one.
    pub listen: SocketAddr,
    /// The address other nodes should dial, if it is not the one listened on.
    pub advertise: Option<SocketAddr>,
    /// The most authenticated connections; beyond it the least recently used is closed.
    pub max_connections: usize,
    /// The most connections that have not proven the network secret yet.
    pub max_handshakes: usize,
}

impl TcpConfig {
    /// The defaults: 512 connections, 64 handshakes.
    pub fn new(secret: SecretKey, network: NetworkAuth, listen: SocketAddr) -> TcpConfig {
        TcpConfig {
            secret,
            network,
            listen,
            advertise: None,
            max_connections: 512,
            max_handshakes: 64,
        }
    }
}

/// Why the transport could not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The listening address cannot be taken.
    #[error("cannot listen on {addr}: {source}")]
    Listen {
        /// The address asked for.
        addr: SocketAddr,
        /// What the system said.
        source: std::io::Error,
    },
    /// TLS could not be set up.
    #[error("cannot set up TLS: {0}")]
    Tls(String),
}

/// TCP with TLS 1.3 between nodes of one network.
pub struct TcpTransport {}

impl TcpTransport {
    /// Listens and returns the transport; incoming calls are refused as overloaded until
    /// [`Transport::serve`]. Must be called within a tokio runtime.
    pub async fn start(config: TcpConfig) -> Result<Arc<TcpTransport>, StartError> {
        let _ = config;
        unimplemented!()
    }

    /// The counters, for `status`.
    pub fn stats(&self) -> NetStats {
        unimplemented!()
    }

    /// Incoming connections refused, by reason.
    pub fn refusals(&self) -> BTreeMap<RefusalReason, u64> {
        unimplemented!()
    }

    /// Stops listening, closes every connection (pending calls fail as unreachable,
    /// requests being served are dropped) and waits for the tasks to end.
    pub async fn shutdown(&self) {
        unimplemented!()
    }
}

impl Transport for TcpTransport {
    fn local(&self) -> Peer {
        unimplemented!()
    }

    fn call(
        &self,
        _to: Peer,
        _request: Request,
        _limit: Duration,
    ) -> BoxFuture<'static, Result<Reply, CallError>> {
        unimplemented!()
    }

    fn round_trip(&self, _peer: &PeerId) -> Option<Duration> {
        unimplemented!()
    }

    fn serve(&self, _service: Arc<dyn Service>) {
        unimplemented!()
    }
}
