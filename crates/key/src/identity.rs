//! Ed25519 keys: a node's ([`PeerId`]) and a volume's ([`VolumeId`]).
//!
//! CFS §4.4 ties a node's ID to its IP address; the default profile here ties it to
//! the node's public key, which its peer proves when it connects. CFS §5.5 ties a
//! root block to its publisher's key; so do we.

use std::fmt;
use std::net::IpAddr;

use ed25519_dalek::{Signature, Signer, SigningKey, VerifyingKey};

use crate::hash;
use crate::ring::{Key, NodeId};
use crate::verified;

/// How a network chooses its node IDs; fixed when the network is made.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
#[repr(u8)]
pub enum IdProfile {
    /// Hash of the node's IP address and a virtual index (CFS §4.4): an attacker who wants many
    /// positions needs many addresses. For open networks.
    Address = 1,
    /// Hash of the node's public key and a virtual index. For networks whose members
    /// were invited: keys cost nothing, so a member can try many.
    #[default]
    Identity = 2,
}

impl IdProfile {
    /// The ring position of virtual server `virtual_index` of the node with key `peer`
    /// at `ip`. An IPv4 address and its IPv6-mapped form are one address.
    pub fn position(self, peer: &PeerId, ip: IpAddr, virtual_index: u32) -> NodeId {
        match self {
            IdProfile::Identity => peer.position(virtual_index),
            IdProfile::Address => {
                let ip = match ip {
                    IpAddr::V4(ip) => ip.to_ipv6_mapped(),
                    IpAddr::V6(ip) => ip,
                };
                NodeId(hash::address_key(&ip, virtual_index))
            }
        }
    }
}

/// A node's public key, proven in the handshake; its ring positions follow from it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerId(pub [u8; 32]);

impl PeerId {
    /// The ring position of the node's virtual server number `virtual_index`.
    pub fn position(&self, virtual_index: u32) -> NodeId {
        NodeId(hash::node_key(&self.0, virtual_index))
    }
}

impl fmt::Debug for PeerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PeerId({})", Key::hashed(self.0))
    }
}

impl fmt::Display for PeerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Key::hashed(self.0).fmt(f)
    }
}

/// A volume's public key, with which anybody can find and check the volume's root block.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VolumeId(pub [u8; 32]);

impl VolumeId {
    /// Where the volume's root block lives (CFS §5: hash of the public key).
    pub fn root_key(&self) -> Key {
        hash::signed_key(&self.0, b"")
    }

    /// Whether `signature` over `message` was made by the volume's secret key.
    pub fn verify(&self, message: &[u8], signature: &[u8; 64]) -> bool {
        verify(&self.0, message, signature)
    }
}

/// Strict: malleable signatures and weak keys are refused.
fn verify(public: &[u8; 32], message: &[u8], signature: &[u8; 64]) -> bool {
    verified::is_good(public, message, signature, || {
        VerifyingKey::from_bytes(public)
            .is_ok_and(|key| key.verify_strict(message, &Signature::from_bytes(signature)).is_ok())
    })
}

impl fmt::Debug for VolumeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "VolumeId({})", Key::hashed(self.0))
    }
}

/// A user's public key: who writes in shared volumes (Pastis §3.4).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UserId(pub [u8; 32]);

/// A group's public key: its holder says who belongs to the group.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupId(pub [u8; 32]);

impl UserId {
    /// Whether `signature` over `message` was made by the user's secret key.
    pub fn verify(&self, message: &[u8], signature: &[u8; 64]) -> bool {
        verify(&self.0, message, signature)
    }
}

impl GroupId {
    /// Whether `signature` over `message` was made by the group's secret key.
    pub fn verify(&self, message: &[u8], signature: &[u8; 64]) -> bool {
        verify(&self.0, message, signature)
    }
}

impl fmt::Debug for UserId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "UserId({})", Key::hashed(self.0))
    }
}

impl fmt::Debug for GroupId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GroupId({})", Key::hashed(self.0))
    }
}

/// A secret signing key. Wiped when dropped; never printed.
#[derive(Clone)]
pub struct SecretKey(SigningKey);

impl SecretKey {
    /// From 32 bytes of good randomness, or from a key file.
    pub fn from_seed(seed: &[u8; 32]) -> SecretKey {
        SecretKey(SigningKey::from_bytes(seed))
    }

    /// The 32 bytes to keep in a key file.
    pub fn seed(&self) -> [u8; 32] {
        self.0.to_bytes()
    }

    /// The public half.
    pub fn public(&self) -> [u8; 32] {
        self.0.verifying_key().to_bytes()
    }

    /// The public half, as a node's identity.
    pub fn peer_id(&self) -> PeerId {
        PeerId(self.public())
    }

    /// The public half, as a volume's identity.
    pub fn volume_id(&self) -> VolumeId {
        VolumeId(self.public())
    }

    /// The public half, as a user's identity.
    pub fn user_id(&self) -> UserId {
        UserId(self.public())
    }

    /// The public half, as a group's identity.
    pub fn group_id(&self) -> GroupId {
        GroupId(self.public())
    }

    /// Signs `message`.
    pub fn sign(&self, message: &[u8]) -> [u8; 64] {
        self.0.sign(message).to_bytes()
    }

    /// A secret that only this key's holder and the holder of the key `with` know: X25519 of both keys on
    /// the curve's Montgomery form. A signing key may serve for this too (Thormarker, "On using the same
    /// key pair for Ed25519 and an X25519 based KEM", 2021). `None` if `with` is no key, or a weak one.
    pub(crate) fn agree(&self, with: &[u8; 32]) -> Option<[u8; 32]> {
        let with = VerifyingKey::from_bytes(with).ok().filter(|key| !key.is_weak())?;
        let agreed = with.to_montgomery().mul_clamped(self.0.to_scalar_bytes()).to_bytes();
        Some(agreed).filter(|agreed| *agreed != [0; 32])
    }
}

impl fmt::Debug for SecretKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SecretKey(…)")
    }
}

/// The key of a volume's default group: whoever has the volume's key has it, and nothing else needs a
/// backup. A later epoch is another group, whose certificates the former members do not have.
pub fn volume_group(volume: &SecretKey, epoch: u32) -> SecretKey {
    derived("atoll v1 group of a volume", volume, epoch, b"")
}

/// The key of a group that a user has made, in the same way.
pub fn user_group(user: &SecretKey, name: &str, epoch: u32) -> SecretKey {
    derived("atoll v1 group of a user", user, epoch, name.as_bytes())
}

fn derived(context: &str, secret: &SecretKey, epoch: u32, name: &[u8]) -> SecretKey {
    let mut hasher = blake3::Hasher::new_derive_key(context);
    hasher.update(&secret.seed()).update(&epoch.to_be_bytes()).update(name);
    SecretKey::from_seed(hasher.finalize().as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_message_or_signature_does_not_verify() {
        let secret = SecretKey::from_seed(&[1; 32]);
        let mut signature = secret.sign(b"message");
        assert!(secret.volume_id().verify(b"message", &signature));
        assert!(!secret.volume_id().verify(b"massage", &signature));
        signature[3] ^= 1;
        assert!(!secret.volume_id().verify(b"message", &signature));
    }

    #[test]
    fn a_public_key_that_is_no_point_verifies_nothing() {
        assert!(!VolumeId([0xff; 32]).verify(b"", &[0; 64]));
        assert!(!VolumeId([0; 32]).verify(b"", &[0; 64]));
    }

    #[test]
    fn virtual_servers_have_positions_of_their_own() {
        let peer = SecretKey::from_seed(&[1; 32]).peer_id();
        assert_ne!(peer.position(0), peer.position(1));
    }

    #[test]
    fn a_position_comes_from_the_key_or_from_the_address_as_the_profile_says() {
        let (a, b) = (PeerId([1; 32]), PeerId([2; 32]));
        let v4: IpAddr = "10.0.0.1".parse().unwrap();
        let mapped: IpAddr = "::ffff:10.0.0.1".parse().unwrap();
        let address = IdProfile::Address;
        assert_eq!(address.position(&a, v4, 3), address.position(&b, mapped, 3));
        assert_ne!(address.position(&a, v4, 3), address.position(&a, v4, 4));
        let identity = IdProfile::Identity;
        assert_eq!(identity.position(&a, v4, 3), a.position(3));
        assert_ne!(identity.position(&a, v4, 3), identity.position(&b, v4, 3));
    }

    /// Groups are found again by these keys only.
    #[test]
    fn the_keys_of_groups_never_change() {
        let secret = SecretKey::from_seed(&[1; 32]);
        let hex = |key: SecretKey| Key::hashed(key.public()).to_string();
        assert_eq!(hex(volume_group(&secret, 0)), "43eafc8b5a0b");
        assert_eq!(hex(volume_group(&secret, 1)), "4c0585a2c5db");
        assert_eq!(hex(user_group(&secret, "band", 0)), "986f47238db2");
        assert_ne!(user_group(&secret, "", 0).seed(), volume_group(&secret, 0).seed());
    }

    #[test]
    fn two_keys_agree_on_a_secret_and_weak_ones_on_none() {
        let [a, b, c] = [1, 2, 3].map(|n| SecretKey::from_seed(&[n; 32]));
        assert_eq!(a.agree(&b.public()), b.agree(&a.public()));
        assert!(a.agree(&b.public()).is_some() && a.agree(&b.public()) != a.agree(&c.public()));
        // As RFC 7748 written down in Python has it.
        let agreed = a.agree(&b.public()).expect("keys").map(|byte| format!("{byte:02x}"));
        assert_eq!(agreed.concat(), AGREED);
        // A point of order four, the neutral one, and what is no point.
        let mut neutral = [0; 32];
        neutral[0] = 1;
        for weak in [[0; 32], neutral, [2; 32]] {
            assert_eq!(a.agree(&weak), None);
        }
    }

    const AGREED: &str = "4181d7302557342bdb6d061c4b1eebea828ecb625c3368b7111680793307220b";

    #[test]
    fn a_secret_key_is_not_printed() {
        assert_eq!(format!("{:?}", SecretKey::from_seed(&[1; 32])), "SecretKey(…)");
    }
}
