//! The proof of the network secret: one message each way, right after TLS.
//!
//! CFS has no such proof; a private network refuses every node that does not know its secret. The
//! secret is never sent. Each side sends a keyed BLAKE3 MAC over the TLS exporter of this
//! connection, so that a recorded proof is worth nothing on another, and over its own hello. The
//! dialler proves first: a listener answers nothing, not even which versions it speaks, to a
//! dialler that cannot.
//!
//! ```text
//! offset   size
//!      0      2  length of all that follows this field: 121, or more
//!      2      1  role: 1 dialler, 2 listener
//!      3      1  verdict: 0 welcome; from a listener also 1 no common version,
//!                2 other profile, 3 removed, 4 secret replaced
//!      4      2  lowest protocol version the speaker speaks
//!      6      2  highest
//!      8     16  claimed listening address: IPv6, or IPv4-mapped
//!     24      2  its port
//!     26     32  BLAKE3 of the network profile
//!     58      1  zero
//!     59      n  fields of later versions, skipped
//! 59 + n     32  MAC with the speaker's current secret
//! 91 + n     32  MAC with the secret before it; zeros if it knows none
//! ```
//!
//! A MAC's key is derived from a network secret; its message is the exporter (32 bytes),
//! the dialler's public key, the listener's, and every byte of the hello before the MACs.
//! There are two MACs because a network can replace its secret while it runs: a node that has the
//! new secret proves both, so that a node that does not have it yet still recognises a member.
//!
//! A hello is sent before the version is known, so its form is the same in all versions:
//! a later one may add fields before the MACs and change nothing else.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use atoll_key::PeerId;

/// The protocol versions this build speaks.
pub const SPOKEN: Versions = Versions { min: 2, max: 2 };
/// The longest hello that is read, in bytes.
pub const MAX_HELLO_BYTES: usize = 1024;
/// Length of a hello of this build, in bytes.
pub const HELLO_BYTES: usize = WORDS_BYTES + MACS_BYTES;
/// Length of a hello's length field, in bytes.
pub const LENGTH_BYTES: usize = 2;
/// What every hello says, its length field included, in bytes.
const WORDS_BYTES: usize = 59;
const MAC_BYTES: usize = 32;
const MACS_BYTES: usize = 2 * MAC_BYTES;
const KEY_CONTEXT: &str = "atoll 2026 network secret: proof of membership";

/// A range of protocol versions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Versions {
    /// The lowest.
    pub min: u16,
    /// The highest, at least `min`.
    pub max: u16,
}

impl Versions {
    /// The highest version in both ranges: the one that two such nodes speak.
    pub fn common(self, other: Versions) -> Option<u16> {
        let highest = self.max.min(other.max);
        (highest >= self.min.max(other.min)).then_some(highest)
    }
}

impl fmt::Display for Versions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Versions { min, max } if min == max => write!(f, "version {min}"),
            Versions { min, max } => write!(f, "versions {min} to {max}"),
        }
    }
}

/// The secrets of a network that a node knows.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Secrets {
    /// The one that counts.
    pub current: [u8; 32],
    /// The one it replaced, if that is known.
    pub former: Option<[u8; 32]>,
}

impl From<[u8; 32]> for Secrets {
    fn from(current: [u8; 32]) -> Secrets {
        Secrets { current, former: None }
    }
}

/// Which of our own secrets a peer has proven.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Secret {
    /// [`Secrets::current`].
    Current,
    /// Only [`Secrets::former`].
    Former,
}

/// Which side speaks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Role {
    /// Opened the connection.
    Dialler = 1,
    /// Accepted it.
    Listener = 2,
}

/// What the listener thinks of a dialler that proved a secret.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Verdict {
    /// Calls may follow.
    Welcome = 0,
    /// There is no protocol version that both speak.
    NoCommonVersion = 1,
    /// The network profiles differ.
    OtherProfile = 2,
    /// The dialler was removed from the network.
    Removed = 3,
    /// The dialler only knows a secret that has been replaced.
    SecretReplaced = 4,
}

/// What one side says of itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Hello {
    /// Which side speaks.
    pub role: Role,
    /// The listener's verdict; a dialler says `Welcome`.
    pub verdict: Verdict,
    /// The protocol versions the speaker speaks.
    pub versions: Versions,
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
    /// Unknown role or verdict, a range of versions that is none, or a reserved byte is set.
    #[error("a field has no meaning")]
    Field,
    /// Neither MAC was made with a secret known here on this connection.
    #[error("the network secret is not proven")]
    Mac,
}

/// A value that only the two ends of one connection know: binds the proofs to it.
pub struct Binding {
    current: [u8; 32],
    former: Option<[u8; 32]>,
    prefix: [u8; 96],
}

impl Binding {
    /// From the network's secrets, the TLS exporter, and the keys the handshake proved.
    pub fn new(
        secrets: &Secrets,
        exporter: &[u8; 32],
        dialler: PeerId,
        listener: PeerId,
    ) -> Binding {
        let mut prefix = [0; 96];
        prefix[..32].copy_from_slice(exporter);
        prefix[32..64].copy_from_slice(&dialler.0);
        prefix[64..].copy_from_slice(&listener.0);
        let key = |secret: &[u8; 32]| blake3::derive_key(KEY_CONTEXT, secret);
        Binding { current: key(&secrets.current), former: secrets.former.as_ref().map(key), prefix }
    }

    fn mac(&self, key: &[u8; 32], words: &[u8]) -> blake3::Hash {
        blake3::Hasher::new_keyed(key).update(&self.prefix).update(words).finalize()
    }

    /// Which of our secrets one of the MACs was made with.
    fn proven(&self, words: &[u8], macs: &[u8; MACS_BYTES]) -> Option<Secret> {
        let (macs, _) = macs.as_chunks::<MAC_BYTES>();
        // Comparing two `Hash`es takes the same time whatever they hold.
        let matches = |key: &[u8; 32]| {
            let own = self.mac(key, words);
            macs.iter().any(|mac| own == blake3::Hash::from_bytes(*mac))
        };
        if matches(&self.current) {
            return Some(Secret::Current);
        }
        self.former.as_ref().is_some_and(matches).then_some(Secret::Former)
    }
}

impl Hello {
    /// The hello with its MACs, as it goes on the wire.
    pub fn encode(&self, binding: &Binding) -> [u8; HELLO_BYTES] {
        let mut out = [0; HELLO_BYTES];
        out[..2].copy_from_slice(&((HELLO_BYTES - LENGTH_BYTES) as u16).to_be_bytes());
        out[2] = self.role as u8;
        out[3] = self.verdict as u8;
        out[4..6].copy_from_slice(&self.versions.min.to_be_bytes());
        out[6..8].copy_from_slice(&self.versions.max.to_be_bytes());
        let ip = match self.addr.ip() {
            IpAddr::V4(ip) => ip.to_ipv6_mapped(),
            IpAddr::V6(ip) => ip,
        };
        out[8..24].copy_from_slice(&ip.octets());
        out[24..26].copy_from_slice(&self.addr.port().to_be_bytes());
        out[26..58].copy_from_slice(&self.profile);
        let (words, macs) = out.split_at_mut(WORDS_BYTES);
        let (current, former) = macs.split_at_mut(MAC_BYTES);
        current.copy_from_slice(binding.mac(&binding.current, words).as_bytes());
        if let Some(key) = &binding.former {
            former.copy_from_slice(binding.mac(key, words).as_bytes());
        }
        out
    }
}

/// How long a hello is whose length field is `field`, that field included.
pub fn hello_bytes(field: [u8; LENGTH_BYTES]) -> Result<usize, HelloError> {
    let total = LENGTH_BYTES + usize::from(u16::from_be_bytes(field));
    if !(HELLO_BYTES..=MAX_HELLO_BYTES).contains(&total) {
        return Err(HelloError::Length);
    }
    Ok(total)
}

/// Decodes a hello without checking its MACs. For fuzzing and for [`verify`].
pub fn decode(bytes: &[u8]) -> Result<Hello, HelloError> {
    let field = bytes.first_chunk().ok_or(HelloError::Length)?;
    if hello_bytes(*field)? != bytes.len() {
        return Err(HelloError::Length);
    }
    let role = match bytes[2] {
        1 => Role::Dialler,
        2 => Role::Listener,
        _ => return Err(HelloError::Field),
    };
    let verdict = match (role, bytes[3]) {
        (_, 0) => Verdict::Welcome,
        (Role::Listener, 1) => Verdict::NoCommonVersion,
        (Role::Listener, 2) => Verdict::OtherProfile,
        (Role::Listener, 3) => Verdict::Removed,
        (Role::Listener, 4) => Verdict::SecretReplaced,
        _ => return Err(HelloError::Field),
    };
    let number = |at: usize| u16::from_be_bytes([bytes[at], bytes[at + 1]]);
    let versions = Versions { min: number(4), max: number(6) };
    if versions.min == 0 || versions.min > versions.max || bytes[58] != 0 {
        return Err(HelloError::Field);
    }
    let ip: [u8; 16] = *bytes[8..].first_chunk().expect("the length is checked");
    let addr = SocketAddr::new(Ipv6Addr::from(ip).to_canonical(), number(24));
    let profile = *bytes[26..].first_chunk().expect("the length is checked");
    Ok(Hello { role, verdict, versions, addr, profile })
}

/// Checks a hello's MACs, and only then looks at what it says. Which of our secrets is
/// proven with it.
pub fn verify(bytes: &[u8], role: Role, binding: &Binding) -> Result<(Hello, Secret), HelloError> {
    let (words, macs) = bytes.split_last_chunk().ok_or(HelloError::Length)?;
    let secret = binding.proven(words, macs).ok_or(HelloError::Mac)?;
    // The role is within the MACs' words: a dialler's proof sent back is seen here.
    if words.get(2) != Some(&(role as u8)) {
        return Err(HelloError::Field);
    }
    Ok((decode(bytes)?, secret))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const OLD: [u8; 32] = [1; 32];
    const NEW: [u8; 32] = [6; 32];

    fn hello(role: Role) -> Hello {
        let addr = "192.0.2.7:4000".parse().expect("an address");
        Hello { role, verdict: Verdict::Welcome, versions: SPOKEN, addr, profile: [5; 32] }
    }

    fn bound(secrets: Secrets) -> Binding {
        Binding::new(&secrets, &[2; 32], PeerId([3; 32]), PeerId([4; 32]))
    }

    fn binding() -> Binding {
        bound(OLD.into())
    }

    #[test]
    fn a_hello_survives_the_wire() {
        for addr in ["192.0.2.7:4000", "[2001:db8::1]:9", "0.0.0.0:0", "[::]:1"] {
            let addr = addr.parse().expect("an address");
            let sent = Hello { addr, ..hello(Role::Listener) };
            let received = verify(&sent.encode(&binding()), Role::Listener, &binding());
            assert_eq!(received, Ok((sent, Secret::Current)));
        }
    }

    #[test]
    fn a_proof_holds_for_one_secret_one_connection_and_one_pair() {
        let bytes = hello(Role::Dialler).encode(&binding());
        let (old, other) = (OLD.into(), [9; 32].into());
        let others = [
            Binding::new(&other, &[2; 32], PeerId([3; 32]), PeerId([4; 32])),
            Binding::new(&old, &[9; 32], PeerId([3; 32]), PeerId([4; 32])),
            Binding::new(&old, &[2; 32], PeerId([9; 32]), PeerId([4; 32])),
            Binding::new(&old, &[2; 32], PeerId([3; 32]), PeerId([9; 32])),
        ];
        for other in others {
            assert_eq!(verify(&bytes, Role::Dialler, &other), Err(HelloError::Mac));
        }
    }

    #[test]
    fn while_a_secret_is_replaced_both_sides_know_which_one_the_other_has() {
        let (before, after) = (Secrets::from(OLD), Secrets { current: NEW, former: Some(OLD) });
        let newcomer = Secrets::from(NEW);
        for (speaker, reader, expected) in [
            (before, after, Ok(Secret::Former)),
            (after, before, Ok(Secret::Current)),
            (after, after, Ok(Secret::Current)),
            (newcomer, after, Ok(Secret::Current)),
            (after, newcomer, Ok(Secret::Current)),
            (before, newcomer, Err(HelloError::Mac)),
            (newcomer, before, Err(HelloError::Mac)),
        ] {
            let bytes = hello(Role::Dialler).encode(&bound(speaker));
            let read = verify(&bytes, Role::Dialler, &bound(reader));
            assert_eq!(read.map(|(_, secret)| secret), expected);
        }
    }

    #[test]
    fn a_changed_byte_is_not_proven() {
        let bytes = hello(Role::Dialler).encode(&binding());
        for at in 0..bytes.len() - MAC_BYTES {
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
    fn fields_of_later_versions_are_skipped() {
        let sent = hello(Role::Dialler);
        let binding = binding();
        let mut words = sent.encode(&binding)[..WORDS_BYTES].to_vec();
        words.extend_from_slice(b"a field of version 9");
        let length = (words.len() + MACS_BYTES - LENGTH_BYTES) as u16;
        words[..2].copy_from_slice(&length.to_be_bytes());
        let mac = binding.mac(&binding.current, &words);
        words.extend_from_slice(mac.as_bytes());
        words.extend_from_slice(&[0; MAC_BYTES]);
        assert_eq!(verify(&words, Role::Dialler, &binding), Ok((sent, Secret::Current)));
    }

    #[test]
    fn the_highest_version_that_both_speak_is_chosen() {
        let range = |min, max| Versions { min, max };
        for (one, other, common) in [
            (range(1, 1), range(1, 1), Some(1)),
            (range(1, 1), range(1, 2), Some(1)),
            (range(1, 2), range(1, 2), Some(2)),
            (range(1, 3), range(2, 5), Some(3)),
            (range(1, 1), range(2, 2), None),
            (range(1, 2), range(3, 4), None),
        ] {
            assert_eq!((one.common(other), other.common(one)), (common, common));
        }
        let none = Hello { versions: range(2, 1), ..hello(Role::Dialler) };
        let read = verify(&none.encode(&binding()), Role::Dialler, &binding());
        assert_eq!(read, Err(HelloError::Field), "no range at all");
    }

    #[test]
    fn lengths_beyond_the_limits_are_refused_from_the_field_alone() {
        assert_eq!(hello_bytes([0, 0]), Err(HelloError::Length));
        assert_eq!(hello_bytes([0, 120]), Err(HelloError::Length));
        assert_eq!(hello_bytes([3, 255]), Err(HelloError::Length));
        assert_eq!(hello_bytes([0xff, 0xff]), Err(HelloError::Length));
        assert_eq!(hello_bytes([0, 121]), Ok(HELLO_BYTES));
    }

    proptest! {
        #[test]
        fn noise_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = decode(&bytes);
            prop_assert!(verify(&bytes, Role::Dialler, &binding()).is_err());
        }
    }
}
