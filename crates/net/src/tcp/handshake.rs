//! From a TCP connection to an authenticated one: TLS, then the proof of the network
//! secret ([`crate::hello`]), the dialler first.
//!
//! The dialler does not wait for the listener's proof before it sends: see
//! [`super::proving`]. Until it has succeeded a connection costs its TLS state and at most 1 KiB of hello,
//! and all of it must be over within [`HANDSHAKE_LIMIT`]. A dialler that cannot prove
//! the secret gets no answer after TLS.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use atoll_key::PeerId;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::time::Instant;
use tokio_rustls::{TlsAcceptor, TlsConnector, TlsStream};

use super::proving::{DialError, Outcome, Proving};
use super::tls::{ALPN, Tls, peer_key};
use crate::hello::{self, Binding, Hello, HelloError, Role, Verdict, Versions};
use crate::{Admission, Members, Peer, Proven, RefusalReason};

/// The longest a handshake may take, on either side, connecting included.
pub(super) const HANDSHAKE_LIMIT: Duration = Duration::from_secs(5);
/// Bytes read from a socket at once. TLS itself reads in steps of 4 KiB, which costs a
/// system call for each.
const READ_BYTES: usize = 64 << 10;
/// Bytes encrypted before they are written in one go.
const WRITE_BYTES: usize = 256 << 10;
const EXPORTER_LABEL: &[u8] = b"EXPORTER-atoll-network-proof";

/// A TLS connection as the multiplexer gets it.
pub(super) type Stream = Proving<TlsStream<BufReader<TcpStream>>>;

/// Why an incoming connection is refused, and what the log says of it besides.
pub(super) struct Refused {
    pub reason: RefusalReason,
    pub detail: Option<String>,
}

impl From<RefusalReason> for Refused {
    fn from(reason: RefusalReason) -> Refused {
        Refused { reason, detail: None }
    }
}

/// This node's identity and what it proves.
pub(super) struct Identity {
    pub id: PeerId,
    pub tls: Tls,
    pub members: Arc<dyn Members>,
    pub versions: Versions,
    /// BLAKE3 of the network profile.
    pub profile: [u8; 32],
    /// The listening address this node claims.
    pub claimed: SocketAddr,
}

impl Identity {
    /// Connects to `to`, which must hold the key `to.id`. The stream may be written to at
    /// once; it can be read from when the peer has proven the rest, and the outcome tells.
    pub(super) async fn dial(&self, to: Peer) -> Result<(Stream, Outcome), DialError> {
        let limit = Instant::now() + HANDSHAKE_LIMIT;
        let dialled = tokio::time::timeout_at(limit, self.dial_unlimited(to, limit)).await;
        dialled.unwrap_or(Err(DialError::TimedOut))
    }

    /// Connects to `to` and waits for its proof.
    pub(super) async fn reach(&self, to: Peer) -> Result<(), DialError> {
        let (mut stream, _) = self.dial(to).await?;
        std::future::poll_fn(|cx| stream.poll_proof(cx)).await
    }

    async fn dial_unlimited(
        &self,
        to: Peer,
        limit: Instant,
    ) -> Result<(Stream, Outcome), DialError> {
        if self.members.is_removed(&to.id) {
            return Err(DialError::Removed);
        }
        let tcp = TcpStream::connect(to.addr).await?;
        tcp.set_nodelay(true)?;
        let config = self.tls.client(to.id).map_err(|error| DialError::Tls(error.to_string()))?;
        let name = ServerName::from(to.addr.ip());
        let io = BufReader::with_capacity(READ_BYTES, tcp);
        let mut stream = TlsConnector::from(config).connect(name, io).await?;
        let (_, session) = stream.get_mut();
        session.set_buffer_limit(Some(WRITE_BYTES));
        if session.alpn_protocol() != Some(ALPN) {
            return Err(DialError::Tls("the peer does not speak atoll/2".to_owned()));
        }
        let exporter = session.export_keying_material([0; 32], EXPORTER_LABEL, None);
        let exporter = exporter.map_err(|error| DialError::Tls(error.to_string()))?;
        let binding = Binding::new(&self.members.secrets(), &exporter, self.id, to.id);
        let ours = self.hello(Role::Dialler, Verdict::Welcome).encode(&binding);
        stream.write_all(&ours).await?;
        stream.flush().await?;
        let (profile, ours, members) = (self.profile, self.versions, self.members.clone());
        let check = Box::new(move |hello: &[u8]| {
            check_listener(hello, to, &binding, &profile, ours, &*members)
        });
        let limit = tokio::time::sleep_until(limit);
        Ok(Proving::awaiting(TlsStream::Client(stream), limit, check))
    }

    /// Authenticates a connection that `from` opened.
    pub(super) async fn accept(
        &self,
        tcp: TcpStream,
        from: SocketAddr,
    ) -> Result<(Stream, Peer), Refused> {
        let accepted = tokio::time::timeout(HANDSHAKE_LIMIT, self.accept_unlimited(tcp, from));
        accepted.await.unwrap_or(Err(RefusalReason::HandshakeTimedOut.into()))
    }

    async fn accept_unlimited(
        &self,
        tcp: TcpStream,
        from: SocketAddr,
    ) -> Result<(Stream, Peer), Refused> {
        tcp.set_nodelay(true).map_err(|_| RefusalReason::Tls)?;
        let io = BufReader::with_capacity(READ_BYTES, tcp);
        let accepted = TlsAcceptor::from(self.tls.server()).accept(io).await;
        let mut stream = accepted.map_err(|_| RefusalReason::Tls)?;
        let (_, session) = stream.get_mut();
        session.set_buffer_limit(Some(WRITE_BYTES));
        let id = peer_key(session.peer_certificates()).ok_or(RefusalReason::Tls)?;
        if session.alpn_protocol() != Some(ALPN) {
            return Err(RefusalReason::Tls.into());
        }
        let exporter = session.export_keying_material([0; 32], EXPORTER_LABEL, None);
        let exporter = exporter.map_err(|_| RefusalReason::Tls)?;
        let binding = Binding::new(&self.members.secrets(), &exporter, id, self.id);
        let theirs = match read_hello(&mut stream).await {
            Some(bytes) => hello::verify(&bytes, Role::Dialler, &binding),
            None => return Err(RefusalReason::MalformedProof.into()),
        };
        let (theirs, secret) = theirs.map_err(|error| match error {
            HelloError::Mac => RefusalReason::WrongSecret,
            _ => RefusalReason::MalformedProof,
        })?;
        let peer = Peer { id, addr: seen_from(theirs.addr, from) };
        let common = self.versions.common(theirs.versions);
        let verdict = match common {
            None => Verdict::NoCommonVersion,
            Some(_) if theirs.profile != self.profile => Verdict::OtherProfile,
            Some(version) => match self.members.admit(peer, Proven { secret, version }) {
                Admission::Member => Verdict::Welcome,
                Admission::Removed => Verdict::Removed,
                Admission::SecretReplaced => Verdict::SecretReplaced,
            },
        };
        let ours = self.hello(Role::Listener, verdict).encode(&binding);
        let sent = async { stream.write_all(&ours).await.and(stream.flush().await) }.await;
        let reason = match verdict {
            Verdict::Welcome => {
                sent.map_err(|_| RefusalReason::Tls)?;
                return Ok((Proving::proven(TlsStream::Server(stream)), peer));
            }
            Verdict::NoCommonVersion => RefusalReason::WrongVersion,
            Verdict::OtherProfile => RefusalReason::WrongProfile,
            Verdict::Removed => RefusalReason::Removed,
            Verdict::SecretReplaced => RefusalReason::SecretReplaced,
        };
        // In order, so that the verdict arrives. The peer may be gone already.
        let _ = stream.shutdown().await;
        let detail = common.is_none().then(|| {
            format!("it speaks protocol {}, this node {}", theirs.versions, self.versions)
        });
        Err(Refused { reason, detail })
    }

    fn hello(&self, role: Role, verdict: Verdict) -> Hello {
        let (versions, addr, profile) = (self.versions, self.claimed, self.profile);
        Hello { role, verdict, versions, addr, profile }
    }
}

/// Checks what a listener says of itself and of us.
fn check_listener(
    bytes: &[u8],
    listener: Peer,
    binding: &Binding,
    profile: &[u8; 32],
    ours: Versions,
    members: &dyn Members,
) -> Result<(), DialError> {
    let (theirs, secret) =
        hello::verify(bytes, Role::Listener, binding).map_err(DialError::Unproven)?;
    match theirs.verdict {
        Verdict::Welcome | Verdict::NoCommonVersion => {}
        Verdict::OtherProfile => return Err(DialError::OtherProfile),
        Verdict::Removed => {
            members.refused_by(listener, theirs.verdict);
            return Err(DialError::RemovedHere);
        }
        Verdict::SecretReplaced => {
            members.refused_by(listener, theirs.verdict);
            return Err(DialError::SecretReplacedHere);
        }
    }
    let common = ours.common(theirs.versions);
    let Some(version) = common.filter(|_| theirs.verdict == Verdict::Welcome) else {
        return Err(DialError::NoCommonVersion { ours, theirs: theirs.versions });
    };
    if theirs.profile != *profile {
        return Err(DialError::OtherProfile);
    }
    match members.admit(listener, Proven { secret, version }) {
        Admission::Member => Ok(()),
        Admission::Removed => Err(DialError::Removed),
        Admission::SecretReplaced => Err(DialError::SecretReplaced),
    }
}

/// The claimed address; where no IP is claimed, the one the connection shows.
fn seen_from(claimed: SocketAddr, observed: SocketAddr) -> SocketAddr {
    if claimed.ip().is_unspecified() {
        SocketAddr::new(observed.ip().to_canonical(), claimed.port())
    } else {
        claimed
    }
}

/// What a dialler says first; none if it is too long or cut off.
async fn read_hello(io: &mut (impl AsyncRead + Unpin)) -> Option<Vec<u8>> {
    let mut field = [0; hello::LENGTH_BYTES];
    io.read_exact(&mut field).await.ok()?;
    let mut bytes = vec![0; hello::hello_bytes(field).ok()?];
    bytes[..field.len()].copy_from_slice(&field);
    io.read_exact(&mut bytes[field.len()..]).await.ok()?;
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unclaimed_ip_is_the_observed_one() {
        let check = |claimed: &str, observed: &str, expected: &str| {
            let [claimed, observed, expected] =
                [claimed, observed, expected].map(|addr| addr.parse().expect("an address"));
            assert_eq!(seen_from(claimed, observed), expected);
        };
        check("0.0.0.0:7", "192.0.2.1:999", "192.0.2.1:7");
        check("[::]:7", "[::ffff:192.0.2.1]:999", "192.0.2.1:7");
        check("198.51.100.1:7", "192.0.2.1:999", "198.51.100.1:7");
    }
}
