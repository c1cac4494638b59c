//! From a TCP connection to an authenticated one: TLS, then the proof of the network
//! secret ([`crate::hello`]), the dialler first.
//!
//! Until it has succeeded a connection costs its TLS state and at most 1 KiB of hello,
//! and all of it must be over within [`HANDSHAKE_LIMIT`]. A dialler that cannot prove
//! the secret is answered nothing after TLS.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use atoll_key::PeerId;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio_rustls::{TlsAcceptor, TlsConnector, TlsStream};

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
pub type Stream = TlsStream<BufReader<TcpStream>>;

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
    /// Connects to `to`, which must hold the key `to.id`.
    pub async fn dial(&self, to: Peer) -> Result<(Stream, Peer), DialError> {
        let dialled = tokio::time::timeout(HANDSHAKE_LIMIT, self.dial_unlimited(to)).await;
        dialled.unwrap_or(Err(DialError::TimedOut))
    }

    async fn dial_unlimited(&self, to: Peer) -> Result<(Stream, Peer), DialError> {
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
        let theirs = match read_hello(&mut stream).await {
            Ok(bytes) => hello::verify(&bytes, Role::Listener, &binding),
            Err(ReadHelloError::Closed) => return Err(DialError::ClosedByPeer),
            Err(ReadHelloError::Hello(error)) => Err(error),
        };
        let theirs = match theirs {
            Ok(hello) => hello,
            Err(HelloError::OtherVersion(_)) => return Err(DialError::OtherVersion),
            Err(error) => return Err(DialError::Unproven(error)),
        };
        match theirs.verdict {
            Verdict::OtherVersion => return Err(DialError::OtherVersion),
            Verdict::OtherProfile => return Err(DialError::OtherProfile),
            Verdict::Welcome if theirs.profile != self.profile => {
                return Err(DialError::OtherProfile);
            }
            Verdict::Welcome => {}
        }
        let peer = Peer { id: to.id, addr: seen_from(theirs.addr, to.addr) };
        Ok((TlsStream::Client(stream), peer))
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
            Ok(bytes) => hello::verify(&bytes, Role::Dialler, &binding),
            Err(_) => return Err(RefusalReason::MalformedProof),
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
        Ok((TlsStream::Server(stream), peer))
    }

    fn hello(&self, role: Role, verdict: Verdict) -> Hello {
        let (addr, profile) = (self.claimed, self.profile);
        Hello { role, verdict, version: PROTOCOL_VERSION, addr, profile }
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

enum ReadHelloError {
    Closed,
    Hello(HelloError),
}

async fn read_hello(io: &mut (impl AsyncRead + Unpin)) -> Result<Vec<u8>, ReadHelloError> {
    let mut field = [0; hello::LENGTH_BYTES];
    io.read_exact(&mut field).await.map_err(|_| ReadHelloError::Closed)?;
    let mut bytes = vec![0; hello::hello_bytes(field).map_err(ReadHelloError::Hello)?];
    bytes[..field.len()].copy_from_slice(&field);
    io.read_exact(&mut bytes[field.len()..]).await.map_err(|_| ReadHelloError::Closed)?;
    Ok(bytes)
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
