//! The proof of the network secret: one message each way, right after TLS.
//!
//! CFS runs in the open and has nothing of the kind; a private network refuses whoever
//! does not know its secret. The secret is never sent. Each side shows a keyed BLAKE3
//! MAC over the TLS exporter of this very connection, so that a recorded proof is worth
//! nothing on another, and over its own words. The dialler proves first: a listener says
//! nothing, not even that it runs Atoll's newest version, to one that cannot.
//!
//! ```text
//! offset size
//!      0    2  length of all that follows this field: 87 in version 1
//!      2    1  role: 1 dialler, 2 listener
//!      3    1  verdict: 0 welcome; from a listener also 1 other version, 2 other profile
//!      4    2  protocol version
//!      6   16  claimed listening address: IPv6, or IPv4-mapped
//!     22    2  its port
//!     24   32  BLAKE3 of the network profile
//!     56    1  zero
//!     57   32  MAC
//! ```
//!
//! The MAC's key is derived from the network secret; its message is the exporter (32
//! bytes), the dialler's public key, the listener's, and every byte of the hello before
//! the MAC. A hello of another version may be longer, but keeps the first six bytes and
//! has the MAC last, so a mismatch can be told to one that proved the secret.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use atoll_key::PeerId;

/// The version of everything this crate puts on a connection.
pub const PROTOCOL_VERSION: u16 = 1;
/// The longest hello that is read, in bytes.
pub const MAX_HELLO_BYTES: usize = 1024;
/// Length of a hello of this version, in bytes.
pub const HELLO_BYTES: usize = 89;
/// Length of a hello's length field, in bytes.
pub const LENGTH_BYTES: usize = 2;
const MAC_BYTES: usize = 32;
const KEY_CONTEXT: &str = "atoll 2026 network secret: proof of membership";

/// Which side speaks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Role {
    /// Opened the connection.
    Dialler = 1,
    /// Accepted it.
    Listener = 2,
}

/// What the listener thinks of a dialler that proved the secret.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Verdict {
    /// Calls may follow.
    Welcome = 0,
    /// The protocol versions differ.
    OtherVersion = 1,
    /// The network profiles differ.
    OtherProfile = 2,
}

/// What one side says of itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Hello {
    /// Which side speaks.
    pub role: Role,
    /// The listener's verdict; a dialler says `Welcome`.
    pub verdict: Verdict,
    /// The speaker's protocol version.
    pub version: u16,
    /// Where the speaker listens; an unspecified IP means "where you see me".
    pub addr: SocketAddr,
    /// BLAKE3 of the speaker's network profile.
    pub profile: [u8; 32],
}

/// What is wrong with a hello.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum HelloError {
    /// Longer or shorter than a hello may be, or than its length field says.
    #[error("its length is wrong")]
    Length,
    /// Unknown role or verdict, or a reserved byte is set.
    #[error("a field has no meaning")]
    Field,
    /// The MAC was not made with this secret on this connection.
    #[error("the network secret is not proven")]
    Mac,
    /// The speaker proved the secret, but speaks another version.
    #[error("it speaks protocol version {0}")]
    OtherVersion(u16),
}

/// What both sides of one connection know, and nobody else: binds the proofs to it.
pub struct Binding {
    key: [u8; 32],
    prefix: [u8; 96],
}

impl Binding {
    /// From the network secret, the TLS exporter, and the keys the handshake proved.
    pub fn new(
        secret: &[u8; 32],
        exporter: &[u8; 32],
        dialler: PeerId,
        listener: PeerId,
    ) -> Binding {
        let mut prefix = [0; 96];
        prefix[..32].copy_from_slice(exporter);
        prefix[32..64].copy_from_slice(&dialler.0);
        prefix[64..].copy_from_slice(&listener.0);
        Binding { key: blake3::derive_key(KEY_CONTEXT, secret), prefix }
    }

    fn mac(&self, words: &[u8]) -> blake3::Hash {
        blake3::Hasher::new_keyed(&self.key).update(&self.prefix).update(words).finalize()
    }
}

impl Hello {
    /// The hello with its MAC, as it goes on the wire.
    pub fn encode(&self, binding: &Binding) -> [u8; HELLO_BYTES] {
        let mut out = [0; HELLO_BYTES];
        out[..2].copy_from_slice(&((HELLO_BYTES - LENGTH_BYTES) as u16).to_be_bytes());
        out[2] = self.role as u8;
        out[3] = self.verdict as u8;
        out[4..6].copy_from_slice(&self.version.to_be_bytes());
        let ip = match self.addr.ip() {
            IpAddr::V4(ip) => ip.to_ipv6_mapped(),
            IpAddr::V6(ip) => ip,
        };
        out[6..22].copy_from_slice(&ip.octets());
        out[22..24].copy_from_slice(&self.addr.port().to_be_bytes());
        out[24..56].copy_from_slice(&self.profile);
        let words = HELLO_BYTES - MAC_BYTES;
        let mac = binding.mac(&out[..words]);
        out[words..].copy_from_slice(mac.as_bytes());
        out
    }
}

/// How long a hello is whose length field is `field`, that field included.
pub fn hello_bytes(field: [u8; LENGTH_BYTES]) -> Result<usize, HelloError> {
    let total = LENGTH_BYTES + usize::from(u16::from_be_bytes(field));
    if !(6 + MAC_BYTES..=MAX_HELLO_BYTES).contains(&total) {
        return Err(HelloError::Length);
    }
    Ok(total)
}

/// Decodes a hello without checking its MAC. For fuzzing and for [`verify`].
pub fn decode(bytes: &[u8]) -> Result<Hello, HelloError> {
    let field = bytes.first_chunk().ok_or(HelloError::Length)?;
    if hello_bytes(*field)? != bytes.len() {
        return Err(HelloError::Length);
    }
    let version = u16::from_be_bytes([bytes[4], bytes[5]]);
    if version != PROTOCOL_VERSION {
        return Err(HelloError::OtherVersion(version));
    }
    let bytes: &[u8; HELLO_BYTES] = bytes.try_into().map_err(|_| HelloError::Length)?;
    let role = match bytes[2] {
        1 => Role::Dialler,
        2 => Role::Listener,
        _ => return Err(HelloError::Field),
    };
    let verdict = match (role, bytes[3]) {
        (_, 0) => Verdict::Welcome,
        (Role::Listener, 1) => Verdict::OtherVersion,
        (Role::Listener, 2) => Verdict::OtherProfile,
        _ => return Err(HelloError::Field),
    };
    if bytes[56] != 0 {
        return Err(HelloError::Field);
    }
    let ip: [u8; 16] = *bytes[6..].first_chunk().expect("89 bytes hold it");
    let port = u16::from_be_bytes([bytes[22], bytes[23]]);
    let addr = SocketAddr::new(Ipv6Addr::from(ip).to_canonical(), port);
    let profile = *bytes[24..].first_chunk().expect("89 bytes hold it");
    Ok(Hello { role, verdict, version, addr, profile })
}

/// Checks a hello's MAC, and only then looks at what it says.
pub fn verify(bytes: &[u8], role: Role, binding: &Binding) -> Result<Hello, HelloError> {
    let words = bytes.len().checked_sub(MAC_BYTES).ok_or(HelloError::Length)?;
    let (words, mac) = bytes.split_at(words);
    let mac: [u8; MAC_BYTES] = mac.try_into().expect("split at this length");
    // Comparing two `Hash`es takes the same time whatever they hold. The role is within
    // the MAC's words, so a dialler's proof sent back is seen below.
    if binding.mac(words) != blake3::Hash::from_bytes(mac) {
        return Err(HelloError::Mac);
    }
    if words.get(2) != Some(&(role as u8)) {
        return Err(HelloError::Field);
    }
    decode(bytes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn hello(role: Role) -> Hello {
        let addr = "192.0.2.7:4000".parse().expect("an address");
        Hello { role, verdict: Verdict::Welcome, version: PROTOCOL_VERSION, addr, profile: [5; 32] }
    }

    fn binding() -> Binding {
        Binding::new(&[1; 32], &[2; 32], PeerId([3; 32]), PeerId([4; 32]))
    }

    #[test]
    fn a_hello_survives_the_wire() {
        for addr in ["192.0.2.7:4000", "[2001:db8::1]:9", "0.0.0.0:0", "[::]:1"] {
            let addr = addr.parse().expect("an address");
            let sent = Hello { addr, ..hello(Role::Listener) };
            let received = verify(&sent.encode(&binding()), Role::Listener, &binding());
            assert_eq!(received, Ok(sent));
        }
    }

    #[test]
    fn a_proof_holds_for_one_secret_one_connection_and_one_pair() {
        let bytes = hello(Role::Dialler).encode(&binding());
        let others = [
            Binding::new(&[9; 32], &[2; 32], PeerId([3; 32]), PeerId([4; 32])),
            Binding::new(&[1; 32], &[9; 32], PeerId([3; 32]), PeerId([4; 32])),
            Binding::new(&[1; 32], &[2; 32], PeerId([9; 32]), PeerId([4; 32])),
            Binding::new(&[1; 32], &[2; 32], PeerId([3; 32]), PeerId([9; 32])),
        ];
        for other in others {
            assert_eq!(verify(&bytes, Role::Dialler, &other), Err(HelloError::Mac));
        }
    }

    #[test]
    fn a_changed_byte_is_not_proven() {
        let bytes = hello(Role::Dialler).encode(&binding());
        for at in 0..bytes.len() {
            let mut changed = bytes;
            changed[at] ^= 1;
            assert_eq!(verify(&changed, Role::Dialler, &binding()), Err(HelloError::Mac), "{at}");
        }
    }

    #[test]
    fn a_proof_sent_back_proves_nothing() {
        let bytes = hello(Role::Dialler).encode(&binding());
        assert_eq!(verify(&bytes, Role::Listener, &binding()), Err(HelloError::Field));
    }

    #[test]
    fn another_version_is_seen_only_after_the_proof() {
        let newer = Hello { version: 2, ..hello(Role::Dialler) }.encode(&binding());
        assert_eq!(verify(&newer, Role::Dialler, &binding()), Err(HelloError::OtherVersion(2)));
        let stranger = Binding::new(&[9; 32], &[2; 32], PeerId([3; 32]), PeerId([4; 32]));
        assert_eq!(verify(&newer, Role::Dialler, &stranger), Err(HelloError::Mac));
    }

    #[test]
    fn lengths_beyond_the_limits_are_refused_from_the_field_alone() {
        assert_eq!(hello_bytes([0, 0]), Err(HelloError::Length));
        assert_eq!(hello_bytes([0, 35]), Err(HelloError::Length));
        assert_eq!(hello_bytes([3, 255]), Err(HelloError::Length));
        assert_eq!(hello_bytes([0xff, 0xff]), Err(HelloError::Length));
        assert_eq!(hello_bytes([0, 87]), Ok(HELLO_BYTES));
    }

    proptest! {
        #[test]
        fn noise_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = decode(&bytes);
            prop_assert!(verify(&bytes, Role::Dialler, &binding()).is_err());
        }
    }
}
