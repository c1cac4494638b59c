//! The real transport: TCP with TLS 1.3.
//!
//! A connection is made when a call needs it, kept, and used by both sides. TLS proves
//! the nodes' keys ([`tls`]), a message each way proves the network secret
//! ([`crate::hello`], [`handshake`]), then calls are multiplexed ([`crate::mux`]).
//! [`pool`] says which connection is used and which is given up.
//!
//! Measured before this was chosen over QUIC: about half the processor time per reply of
//! 64 KiB. Nodes behind NATs would need another transport beside this one.

mod handshake;
mod listener;
mod pool;
mod proving;
mod recent;
#[cfg(test)]
mod tests;
mod tls;

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use atoll_env::BoxFuture;
use atoll_key::{PeerId, SecretKey};
use bytes::Bytes;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

use self::handshake::{HANDSHAKE_LIMIT, Identity, Stream};
use self::pool::{Pool, Remote};
use self::proving::Outcome;
use self::tls::Tls;
use crate::hello::{SPOKEN, Versions};
use crate::mux::{self, Keepalive, Mux, MuxError};
use crate::stats::{Counters, bump};
use crate::stats::{NetStats, RefusalReason};
use crate::{CallError, Members, PROBE, Peer, Refusal, Reply, Request, Service, Transport};

/// What a node must know to belong to a network.
#[derive(Clone)]
pub struct NetworkAuth {
    /// Its secrets, proven and never sent, and who may be connected with. A secret has 32
    /// bytes of good randomness; where it never changes, it is all that is needed here.
    pub members: Arc<dyn Members>,
    /// The protocol versions to speak; [`SPOKEN`] but in tests.
    pub versions: Versions,
    /// The network's profile (how IDs are chosen, k, …) in its owner's encoding. Both
    /// sides of a connection must hold the same bytes.
    pub profile: Bytes,
}

impl NetworkAuth {
    /// What this build speaks, in the network of `members`.
    pub fn new(members: Arc<dyn Members>, profile: Bytes) -> NetworkAuth {
        NetworkAuth { members, versions: SPOKEN, profile }
    }
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
    /// How connections watch over themselves.
    pub keepalive: Keepalive,
}

impl TcpConfig {
    /// The defaults: 512 connections, 256 handshakes.
    pub fn new(secret: SecretKey, network: NetworkAuth, listen: SocketAddr) -> TcpConfig {
        TcpConfig {
            secret,
            network,
            listen,
            advertise: None,
            max_connections: 512,
            max_handshakes: 256,
            keepalive: Keepalive::default(),
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

/// The most dials under way at once; others wait their turn within their deadline.
const MAX_DIALS: usize = 128;
/// How often a call takes another connection when the one it got was closed before
/// anything of the request was sent: an open one may be closing, and a fresh one may make
/// way for one that the peer dialled at the same time.
const MAX_ATTEMPTS: usize = 3;
/// Of the time for a check, the part in which an open connection may answer: one in so many.
const PROBE_SHARE: u32 = 4;

/// TCP with TLS 1.3 between nodes of one network. Dropping it closes everything.
pub struct TcpTransport {
    inner: Arc<Inner>,
}

/// What the transport's tasks share.
struct Inner {
    local: Peer,
    identity: Identity,
    context: mux::Context,
    pool: Mutex<Pool>,
    dial_slots: Semaphore,
    handshakes: listener::Handshakes,
    refusal_log: listener::RefusalLog,
    /// None once the transport is shut down: then no task is started any more.
    tasks: Mutex<Option<JoinSet<()>>>,
}

impl TcpTransport {
    /// Listens and returns the transport; incoming calls are refused as overloaded until
    /// [`Transport::serve`]. Must be called within a tokio runtime.
    ///
    /// Where the unspecified address is listened on and none is advertised, peers take
    /// the address they see the node come from, and [`Transport::local`] shows the one
    /// this machine would use towards the internet.
    pub async fn start(config: TcpConfig) -> Result<Arc<TcpTransport>, StartError> {
        let failed = |source| StartError::Listen { addr: config.listen, source };
        let listener = TcpListener::bind(config.listen).await.map_err(failed)?;
        let bound = listener.local_addr().map_err(failed)?;
        let tls = Tls::new(&config.secret).map_err(|error| StartError::Tls(error.to_string()))?;
        let id = config.secret.peer_id();
        let addr = config.advertise.unwrap_or_else(|| reachable(bound));
        let identity = Identity {
            id,
            tls,
            members: config.network.members,
            versions: config.network.versions,
            profile: *blake3::hash(&config.network.profile).as_bytes(),
            claimed: config.advertise.unwrap_or(bound),
        };
        let inner = Arc::new(Inner {
            local: Peer { id, addr },
            identity,
            context: mux::Context { keepalive: config.keepalive, ..mux::Context::default() },
            pool: Mutex::new(Pool::new(id, config.max_connections)),
            dial_slots: Semaphore::new(MAX_DIALS),
            handshakes: listener::Handshakes::new(config.max_handshakes),
            refusal_log: listener::RefusalLog::default(),
            tasks: Mutex::new(Some(JoinSet::new())),
        });
        inner.spawn(listener::listen(inner.clone(), listener));
        Ok(Arc::new(TcpTransport { inner }))
    }

    /// The counters, for `status`.
    pub fn stats(&self) -> NetStats {
        self.inner.counters().snapshot()
    }

    /// Incoming connections refused, by reason.
    pub fn refusals(&self) -> BTreeMap<RefusalReason, u64> {
        self.inner.counters().refusals()
    }

    /// The peers with an open connection.
    pub fn connected(&self) -> Vec<PeerId> {
        self.inner.pool().connected()
    }

    /// Closes the connections of every peer that `stays` does not hold for: calls under
    /// way with it fail.
    pub fn close_unless(&self, stays: impl Fn(&PeerId) -> bool, why: &str) {
        self.inner.pool().close_unless(stays, why);
    }

    /// Stops listening, closes every connection (pending calls fail as unreachable,
    /// requests being served are dropped) and waits for the connections' tasks to end.
    pub async fn shutdown(&self) {
        let tasks = self.inner.stop();
        if let Some(mut tasks) = tasks {
            tasks.shutdown().await;
        }
    }
}

impl Drop for TcpTransport {
    fn drop(&mut self) {
        // Dropping the set aborts its tasks.
        drop(self.inner.stop());
    }
}

/// Where others of this machine's network would reach `bound`. Sends nothing: connecting
/// a UDP socket only asks the system which of its addresses it would use.
pub fn reachable(bound: SocketAddr) -> SocketAddr {
    if !bound.ip().is_unspecified() {
        return bound;
    }
    let outward = || {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
        // An address for documentation (RFC 5737): any outside one would do.
        socket.connect((Ipv4Addr::new(192, 0, 2, 1), 9))?;
        socket.local_addr()
    };
    let ip = outward().map_or(IpAddr::V4(Ipv4Addr::LOCALHOST), |addr| addr.ip());
    SocketAddr::new(ip, bound.port())
}

impl Inner {
    fn counters(&self) -> &Counters {
        &self.context.counters
    }

    fn pool(&self) -> MutexGuard<'_, Pool> {
        self.pool.lock().expect("nothing panics while holding it")
    }

    /// Starts a task that lives no longer than the transport.
    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let mut tasks = self.tasks.lock().expect("nothing panics while holding it");
        if let Some(tasks) = tasks.as_mut() {
            while tasks.try_join_next().is_some() {}
            tasks.spawn(task);
        }
    }

    fn stop(&self) -> Option<JoinSet<()>> {
        let mut tasks = self.tasks.lock().expect("nothing panics while holding it").take();
        if let Some(tasks) = &mut tasks {
            tasks.abort_all();
        }
        self.pool().close_all("this node is shutting down");
        tasks
    }

    /// Starts to carry calls over a connection that `peer` has made.
    fn accepted(self: &Arc<Inner>, stream: Stream, peer: Peer, from: SocketAddr) {
        bump(&self.counters().connections_accepted);
        if peer.id == self.local.id {
            // It brings one call ([`Transport::call_own_key`]); no call of this side goes over it.
            let (_, driver) = Mux::new(stream, peer, self.context.clone());
            self.spawn(async move {
                let _ = tokio::time::timeout(HANDSHAKE_LIMIT, driver).await;
            });
            return;
        }
        self.connected(stream, peer, Remote::Accepted(from.ip()), None);
    }

    /// Starts to carry calls over an authenticated connection. `outcome` is that of the
    /// peer's proof, if the connection was made here.
    fn connected(
        self: &Arc<Inner>,
        stream: Stream,
        peer: Peer,
        remote: Remote,
        outcome: Option<Outcome>,
    ) -> Mux {
        let (mux, driver) = Mux::new(stream, peer, self.context.clone());
        let serial = self.pool().add(peer.id, mux.clone(), remote, Instant::now());
        tracing::debug!(%peer, ?remote, "connected");
        let inner = self.clone();
        self.spawn(async move {
            driver.await;
            inner.pool().remove(&peer.id, serial);
            tracing::debug!(%peer, "disconnected");
            match outcome.as_ref().and_then(|outcome| outcome.get()) {
                Some(Ok(())) => inner.pool().forgive(&peer.id),
                Some(Err(why)) => inner.dial_failed(peer, why.clone()),
                None => {}
            }
        });
        mux
    }

    /// The holder of the key answers at this address.
    fn reached(&self, peer: Peer) {
        self.handshakes.proven(peer.addr.ip());
        self.pool().note_reached(peer);
    }

    fn dial_failed(&self, to: Peer, why: String) {
        bump(&self.counters().dials_failed);
        tracing::debug!(%to, why, "dialling failed");
        self.pool().dial_failed(to, why, Instant::now());
    }

    /// A connection to `to`: an open one, or one that is being dialled, or a new one.
    async fn connection(self: &Arc<Inner>, to: Peer) -> Result<Mux, String> {
        let mut dialled = {
            let mut pool = self.pool();
            if let Some(mux) = pool.use_open(&to.id) {
                return Ok(mux);
            }
            if let Some(why) = pool.backing_off(&to, Instant::now()) {
                return Err(format!("{why} (a moment ago)"));
            }
            match pool.dials.get(&to) {
                Some(dialled) => dialled.clone(),
                None => {
                    let (tell, dialled) = watch::channel(None);
                    pool.dials.insert(to, dialled.clone());
                    drop(pool);
                    self.spawn(self.clone().dial(to, tell));
                    dialled
                }
            }
        };
        match dialled.wait_for(Option::is_some).await {
            Ok(result) => result.clone().expect("waited for it"),
            Err(_) => {
                // The dialling task was stopped.
                self.pool().dials.remove(&to);
                Err("this node is shutting down".to_owned())
            }
        }
    }

    async fn dial(self: Arc<Inner>, to: Peer, tell: watch::Sender<Option<Result<Mux, String>>>) {
        let _slot = self.dial_slots.acquire().await.expect("never closed");
        let result = match self.identity.dial(to).await {
            Ok((stream, outcome)) => {
                bump(&self.counters().connections_dialled);
                self.reached(to);
                Ok(self.connected(stream, to, Remote::Dialled(to.addr), Some(outcome)))
            }
            Err(error) => Err(error.to_string()),
        };
        // The peer may have dialled us meanwhile.
        let result = result.or_else(|why| {
            let open = self.pool().use_open(&to.id);
            open.ok_or_else(|| {
                self.dial_failed(to, why.clone());
                why
            })
        });
        self.pool().dials.remove(&to);
        tell.send_replace(Some(result));
    }

    async fn call(
        self: &Arc<Inner>,
        to: Peer,
        request: Request,
        limit: Duration,
    ) -> Result<Reply, CallError> {
        if to.id == self.local.id {
            return self.call_self(request, limit).await;
        }
        let deadline = Instant::now() + limit;
        let mut error = String::new();
        for _ in 0..MAX_ATTEMPTS {
            let mux = match tokio::time::timeout_at(deadline, self.connection(to)).await {
                Ok(connected) => connected.map_err(CallError::Unreachable)?,
                Err(_) => return Err(CallError::TimedOut),
            };
            let left = deadline.saturating_duration_since(Instant::now());
            match mux.call(request.clone(), left).await {
                // It closed, or made way for another, just now; not a byte was sent.
                Err(MuxError::NotSent(why)) => error = why,
                result => return Ok(result?),
            }
        }
        Err(CallError::Unreachable(error))
    }

    /// Whether the key answers at the address, see [`Transport::reach`].
    async fn reach(&self, to: Peer, limit: Duration) -> Result<(), CallError> {
        let deadline = Instant::now() + limit;
        // A connection that was dialled to this address still ends there.
        let dialled = self.pool().dialled_to(&to);
        if let Some(mux) = dialled
            && answers(&mux, limit / PROBE_SHARE).await
        {
            return Ok(());
        }
        // The listener may have no place for us while the peer lives, and calls us.
        let other = self.pool().reached_before(&to);
        let reserved = if other.is_some() { limit / PROBE_SHARE } else { Duration::ZERO };
        // A connection of its own: an open one may have been dialled by the peer, from
        // wherever it is.
        let dial = async {
            let _slot = self.dial_slots.acquire().await.expect("never closed");
            self.identity.reach(to).await
        };
        let error = match tokio::time::timeout_at(deadline - reserved, dial).await {
            Ok(Ok(())) => {
                self.reached(to);
                return Ok(());
            }
            Ok(Err(error)) => CallError::Unreachable(error.to_string()),
            Err(_) => CallError::TimedOut,
        };
        match other {
            Some(mux) if answers(&mux, reserved).await => Ok(()),
            _ => Err(error),
        }
    }

    /// See [`Transport::call_own_key`]. The pool does not know the connection.
    async fn call_own_key(
        &self,
        addr: SocketAddr,
        request: Request,
        limit: Duration,
    ) -> Result<Reply, CallError> {
        let to = Peer { id: self.local.id, addr };
        let deadline = Instant::now() + limit;
        let dial = async {
            let _slot = self.dial_slots.acquire().await.expect("never closed");
            self.identity.dial(to).await
        };
        let dialled = tokio::time::timeout_at(deadline, dial).await;
        let (stream, _) = dialled
            .map_err(|_| CallError::TimedOut)?
            .map_err(|error| CallError::Unreachable(error.to_string()))?;
        let (mux, driver) = Mux::new(stream, to, self.context.clone());
        let left = deadline.saturating_duration_since(Instant::now());
        let mut answer = std::pin::pin!(mux.call(request, left));
        let answer = tokio::select! {
            answer = &mut answer => answer,
            // It has brought the answer, or ended the call.
            () = driver => answer.await,
        };
        Ok(answer?)
    }

    /// Protocol code need not know that a peer is itself.
    async fn call_self(&self, request: Request, limit: Duration) -> Result<Reply, CallError> {
        if !crate::frame::within_limits(&request.header, &request.parts) {
            return Err(CallError::TooLarge);
        }
        let service = self.context.service.read().expect("no holder panics").clone();
        let Some(service) = service else {
            return Err(Refusal::new(Refusal::OVERLOADED, "the node is still starting").into());
        };
        match tokio::time::timeout(limit, service.handle(self.local, request)).await {
            Ok(result) => Ok(result?),
            Err(_) => Err(CallError::TimedOut),
        }
    }
}

/// Whether the peer answers on this connection.
async fn answers(mux: &Mux, limit: Duration) -> bool {
    let probe = Request { method: PROBE, ..Request::default() };
    matches!(mux.call(probe, limit).await, Ok(_) | Err(MuxError::Refused(_)))
}

impl Transport for TcpTransport {
    fn local(&self) -> Peer {
        self.inner.local
    }

    fn call(
        &self,
        to: Peer,
        request: Request,
        limit: Duration,
    ) -> BoxFuture<'static, Result<Reply, CallError>> {
        let inner = self.inner.clone();
        Box::pin(async move {
            let result = inner.call(to, request, limit).await;
            inner.counters().called(&result);
            result
        })
    }

    fn reach(&self, to: Peer, limit: Duration) -> BoxFuture<'static, Result<(), CallError>> {
        let inner = self.inner.clone();
        Box::pin(async move {
            if to.id == inner.local.id {
                return Ok(());
            }
            inner.reach(to, limit).await
        })
    }

    fn call_own_key(
        &self,
        addr: SocketAddr,
        request: Request,
        limit: Duration,
    ) -> BoxFuture<'static, Result<Reply, CallError>> {
        let inner = self.inner.clone();
        Box::pin(async move { inner.call_own_key(addr, request, limit).await })
    }

    fn remote_ip(&self, peer: &PeerId) -> Option<IpAddr> {
        self.inner.pool().remote_ip(peer)
    }

    fn round_trip(&self, peer: &PeerId) -> Option<Duration> {
        self.inner.pool().open(peer)?.round_trip()
    }

    fn serve(&self, service: Arc<dyn Service>) {
        *self.inner.context.service.write().expect("no holder panics") = Some(service);
    }
}
