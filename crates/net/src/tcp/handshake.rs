//! From a TCP connection to an authenticated one: TLS, then the proof of the network
//! secret ([`crate::hello`]), the dialler first.
//!
//! The dialler does not wait for the listener's proof before it sends: see
//! [`super::proving`]. Until it has succeeded a connection costs its TLS state and at most 1 KiB of hello,
//! and all of it must be over within [`HANDSHAKE_LIMIT`]. A dialler that cannot prove
//! the secret is answered nothing after TLS.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use atoll_key::PeerId;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::time::Instant;
use tokio_rustls::{TlsAcceptor, TlsConnector, TlsStream};

use super::proving::{Outcome, Proving};
use super::tls::{ALPN, Tls, peer_key};
use crate::hello::{self, Binding, Hello, HelloError, PROTOCOL_VERSION, Role, Verdict};
use crate::{Peer, RefusalReason};

/// The longest a handshake may take, on either side, connecting included.
pub const HANDSHAKE_LIMIT: Duration = Duration::from_secs(5);
/// Bytes read from a socket at once. TLS itself reads in steps of 4 KiB, which costs a
/// system call for each.
const READ_BYTES: usize = 64 << 10;
/// Bytes encrypted before they are written in one go.
const WRITE_BYTES: usize = 256 << 10;
const EXPORTER_LABEL: &[u8] = b"EXPORTER-atoll-network-proof";

/// A TLS connection as the multiplexer gets it.
pub type Stream = Proving<TlsStream<BufReader<TcpStream>>>;

/// Who this node is and what it proves.
pub struct Identity {
    pub id: PeerId,
    pub tls: Tls,
    pub network_secret: [u8; 32],
    /// BLAKE3 of the network profile.
    pub profile: [u8; 32],
    /// The listening address this node claims.
    pub claimed: SocketAddr,
}

/// Why a dial failed, for people and for the log.
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    /// TCP or TLS failed; also a key that is not the expected one.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// TLS could not be set up, or the peer does not speak this protocol.
    #[error("{0}")]
    Tls(String),
    /// The peer closed where its proof belongs.
    #[error(
        "the peer closed the connection during the handshake: it may belong to another network"
    )]
    ClosedByPeer,
    /// The peer does not know the network secret.
    #[error("the peer does not prove the network secret: {0}")]
    Unproven(HelloError),
    /// The peer told that it speaks another version.
    #[error("the peer speaks another protocol version")]
    OtherVersion,
    /// The peer told that its profile differs.
    #[error("the peer's network has another profile")]
    OtherProfile,
    /// It took too long.
    #[error("the handshake took too long")]
    TimedOut,
}

impl Identity {
    /// Connects to `to`, which must hold the key `to.id`. The stream may be written to at
    /// once; it can be read from when the peer has proven the rest, and the outcome tells.
    pub async fn dial(&self, to: Peer) -> Result<(Stream, Outcome), DialError> {
        let limit = Instant::now() + HANDSHAKE_LIMIT;
        let dialled = tokio::time::timeout_at(limit, self.dial_unlimited(to, limit)).await;
        dialled.unwrap_or(Err(DialError::TimedOut))
    }

    /// Connects to `to` and waits for its proof.
    pub async fn reach(&self, to: Peer) -> Result<(), DialError> {
        let (mut stream, _) = self.dial(to).await?;
        std::future::poll_fn(|cx| stream.poll_proof(cx)).await
    }

    async fn dial_unlimited(
        &self,
        to: Peer,
        limit: Instant,
    ) -> Result<(Stream, Outcome), DialError> {
        let tcp = TcpStream::connect(to.addr).await?;
        tcp.set_nodelay(true)?;
        let config = self.tls.client(to.id).map_err(|error| DialError::Tls(error.to_string()))?;
        let name = ServerName::from(to.addr.ip());
        let io = BufReader::with_capacity(READ_BYTES, tcp);
        let mut stream = TlsConnector::from(config).connect(name, io).await?;
        let (_, session) = stream.get_mut();
        session.set_buffer_limit(Some(WRITE_BYTES));
        if session.alpn_protocol() != Some(ALPN) {
            return Err(DialError::Tls("the peer does not speak atoll/1".to_owned()));
        }
        let exporter = session.export_keying_material([0; 32], EXPORTER_LABEL, None);
        let exporter = exporter.map_err(|error| DialError::Tls(error.to_string()))?;
        let binding = Binding::new(&self.network_secret, &exporter, self.id, to.id);
        let ours = self.hello(Role::Dialler, Verdict::Welcome).encode(&binding);
        stream.write_all(&ours).await?;
        stream.flush().await?;
        let profile = self.profile;
        let check = Box::new(move |hello: &[u8]| check_listener(hello, &binding, &profile));
        let limit = tokio::time::sleep_until(limit);
        Ok(Proving::awaiting(TlsStream::Client(stream), limit, check))
    }

    /// Authenticates a connection that `from` opened.
    pub async fn accept(
        &self,
        tcp: TcpStream,
        from: SocketAddr,
    ) -> Result<(Stream, Peer), RefusalReason> {
        let accepted = tokio::time::timeout(HANDSHAKE_LIMIT, self.accept_unlimited(tcp, from));
        accepted.await.unwrap_or(Err(RefusalReason::HandshakeTimedOut))
    }

    async fn accept_unlimited(
        &self,
        tcp: TcpStream,
        from: SocketAddr,
    ) -> Result<(Stream, Peer), RefusalReason> {
        tcp.set_nodelay(true).map_err(|_| RefusalReason::Tls)?;
        let io = BufReader::with_capacity(READ_BYTES, tcp);
        let accepted = TlsAcceptor::from(self.tls.server()).accept(io).await;
        let mut stream = accepted.map_err(|_| RefusalReason::Tls)?;
        let (_, session) = stream.get_mut();
        session.set_buffer_limit(Some(WRITE_BYTES));
        let id = peer_key(session.peer_certificates()).ok_or(RefusalReason::Tls)?;
        if session.alpn_protocol() != Some(ALPN) {
            return Err(RefusalReason::Tls);
        }
        let exporter = session.export_keying_material([0; 32], EXPORTER_LABEL, None);
        let exporter = exporter.map_err(|_| RefusalReason::Tls)?;
        let binding = Binding::new(&self.network_secret, &exporter, id, self.id);
        let theirs = match read_hello(&mut stream).await {
            Some(bytes) => hello::verify(&bytes, Role::Dialler, &binding),
            None => return Err(RefusalReason::MalformedProof),
        };
        let (verdict, addr) = match theirs {
            Ok(hello) if hello.profile != self.profile => (Verdict::OtherProfile, hello.addr),
            Ok(hello) => (Verdict::Welcome, hello.addr),
            Err(HelloError::OtherVersion(_)) => (Verdict::OtherVersion, from),
            Err(HelloError::Mac) => return Err(RefusalReason::WrongSecret),
            Err(_) => return Err(RefusalReason::MalformedProof),
        };
        let ours = self.hello(Role::Listener, verdict).encode(&binding);
        let sent = async { stream.write_all(&ours).await.and(stream.flush().await) }.await;
        match verdict {
            Verdict::Welcome => sent.map_err(|_| RefusalReason::Tls)?,
            Verdict::OtherVersion => return Err(close(stream, RefusalReason::WrongVersion).await),
            Verdict::OtherProfile => return Err(close(stream, RefusalReason::WrongProfile).await),
        }
        let peer = Peer { id, addr: seen_from(addr, from) };
        Ok((Proving::proven(TlsStream::Server(stream)), peer))
    }

    fn hello(&self, role: Role, verdict: Verdict) -> Hello {
        let (addr, profile) = (self.claimed, self.profile);
        Hello { role, verdict, version: PROTOCOL_VERSION, addr, profile }
    }
}

/// Checks what a listener says of itself and of us.
fn check_listener(bytes: &[u8], binding: &Binding, profile: &[u8; 32]) -> Result<(), DialError> {
    let theirs = match hello::verify(bytes, Role::Listener, binding) {
        Ok(hello) => hello,
        Err(HelloError::OtherVersion(_)) => return Err(DialError::OtherVersion),
        Err(error) => return Err(DialError::Unproven(error)),
    };
    match theirs.verdict {
        Verdict::OtherVersion => Err(DialError::OtherVersion),
        Verdict::OtherProfile => Err(DialError::OtherProfile),
        Verdict::Welcome if theirs.profile != *profile => Err(DialError::OtherProfile),
        Verdict::Welcome => Ok(()),
    }
}

/// Closes in order, so that the verdict arrives.
async fn close(mut stream: impl AsyncWrite + Unpin, reason: RefusalReason) -> RefusalReason {
    // The peer may be gone already; the reason stays the same.
    let _ = stream.shutdown().await;
    reason
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
