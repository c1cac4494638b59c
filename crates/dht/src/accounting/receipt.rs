//! Receipts: a publisher's signed word that it wants blocks kept (CFS §5.4).
//!
//! CFS charges the address that a block came from. Here blocks come by their root, so the
//! node that publishes signs a receipt for each batch, and it travels with the blocks to
//! every replica: each charges the true publisher, and a root that lies can at most leave
//! a block out. A receipt names its blocks' keys, so it cannot be used for other blocks;
//! and the time it was made, so that a recorded one keeps no blocks alive.
//!
//! The signature is by the node's key, which a simulated node does not have: the maker of
//! a [`Dht`](crate::Dht) hands it an [`Attestor`].

use atoll_key::{Key, PeerId, SecretKey, VolumeId};
use atoll_net::header::WirePeer;
use atoll_net::{Peer, Refusal};

use crate::rpc::{MAX_KEYS, NAME_BYTES, Name, WireReceipt};

/// A refusal's code: the receipt is missing, not its publisher's, too old, or not for these
/// blocks; or the publisher could not be confirmed at its address.
pub const BAD_RECEIPT: u16 = 101;

/// How old a receipt may be, and how far in the future by clocks that disagree.
pub const RECEIPT_SECS: u64 = 24 * 3600;
/// Clocks may differ by this much at no cost to the publisher; of an older receipt the lease
/// is shorter by its age beyond this, so that repeating it extends nothing by more.
pub const CLOCK_SLACK_SECS: u64 = 3600;

/// Bytes of a key's tag.
const TAG_BYTES: usize = NAME_BYTES;
const CONTEXT: &[u8] = b"atoll v1 put receipt\0";
const TAG_CONTEXT: &str = "atoll v1 receipt key tag";

/// Signs as this node, and checks what other nodes have signed.
pub trait Attestor: Send + Sync + 'static {
    /// This node's signature of `message`.
    fn sign(&self, message: &[u8]) -> [u8; 64];

    /// Whether `by` has signed `message` so.
    fn verify(&self, by: &PeerId, message: &[u8], signature: &[u8; 64]) -> bool;
}

/// Real nodes sign with their Ed25519 keys.
impl Attestor for SecretKey {
    fn sign(&self, message: &[u8]) -> [u8; 64] {
        SecretKey::sign(self, message)
    }

    fn verify(&self, by: &PeerId, message: &[u8], signature: &[u8; 64]) -> bool {
        VolumeId(by.0).verify(message, signature)
    }
}

/// For simulated networks, whose nodes have no keys: a signature is a hash of the signer and the
/// message. It tells a changed receipt from a sound one, and does not stop a forger.
#[derive(Clone, Copy, Debug)]
pub struct SimulatedKeys(pub PeerId);

impl SimulatedKeys {
    fn signature(by: &PeerId, message: &[u8]) -> [u8; 64] {
        let mut hasher = blake3::Hasher::new_derive_key("atoll v1 simulated signature");
        hasher.update(&by.0).update(message);
        let mut signature = [0; 64];
        hasher.finalize_xof().fill(&mut signature);
        signature
    }
}

impl Attestor for SimulatedKeys {
    fn sign(&self, message: &[u8]) -> [u8; 64] {
        SimulatedKeys::signature(&self.0, message)
    }

    fn verify(&self, by: &PeerId, message: &[u8], signature: &[u8; 64]) -> bool {
        SimulatedKeys::signature(by, message) == *signature
    }
}

/// A short stand-in for a key in a receipt.
type Tag = [u8; TAG_BYTES];

/// Of a hashed key its [`Name`]: a node can check a receipt for names of blocks that it does not
/// hold. Other keys may share their first bytes.
fn tag(key: &Key) -> Tag {
    if key.as_hash().is_some() {
        return Name::of(key).0;
    }
    let hash = blake3::derive_key(TAG_CONTEXT, &key.0);
    hash[..TAG_BYTES].try_into().expect("16 of 32 bytes")
}

/// Which publisher wants which blocks kept, from when and how long; signed by it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Receipt {
    /// The publishing node, and where it says that it is.
    pub publisher: Peer,
    /// When it was made by the publisher's clock, seconds since 1970.
    pub issued_unix_secs: u64,
    /// The longest lease it asks for, seconds.
    pub lease_secs: u64,
    tags: Vec<Tag>,
    signature: [u8; 64],
}

impl Receipt {
    /// Makes and signs a receipt for blocks with these keys.
    pub fn sign(
        attestor: &dyn Attestor,
        publisher: Peer,
        issued_unix_secs: u64,
        lease_secs: u64,
        keys: impl Iterator<Item = Key>,
    ) -> Receipt {
        let tags = keys.map(|key| tag(&key)).collect();
        let signature = [0; 64];
        let mut receipt = Receipt { publisher, issued_unix_secs, lease_secs, tags, signature };
        receipt.signature = attestor.sign(&receipt.message());
        receipt
    }

    /// What is signed: | `"atoll v1 put receipt\0"` | publisher's key, 32 bytes | IP as IPv6,
    /// 16 | port, 2 | issued, 8 | lease, 8 | number of tags, 4 | tags, 16 each |.
    fn message(&self) -> Vec<u8> {
        let ip = match self.publisher.addr.ip() {
            std::net::IpAddr::V4(ip) => ip.to_ipv6_mapped(),
            std::net::IpAddr::V6(ip) => ip,
        };
        let mut out = Vec::with_capacity(CONTEXT.len() + 70 + self.tags.len() * TAG_BYTES);
        out.extend_from_slice(CONTEXT);
        out.extend_from_slice(&self.publisher.id.0);
        out.extend_from_slice(&ip.octets());
        out.extend_from_slice(&self.publisher.addr.port().to_be_bytes());
        out.extend_from_slice(&self.issued_unix_secs.to_be_bytes());
        out.extend_from_slice(&self.lease_secs.to_be_bytes());
        out.extend_from_slice(&(self.tags.len() as u32).to_be_bytes());
        self.tags.iter().for_each(|tag| out.extend_from_slice(tag));
        out
    }

    /// What the publisher remembers of it, to confirm that it made it.
    pub fn digest(&self) -> [u8; 32] {
        *blake3::hash(&self.message()).as_bytes()
    }

    /// Tells it from all others, also from those that say the same with another signature.
    pub(super) fn fingerprint(&self) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.message()).update(&self.signature);
        *hasher.finalize().as_bytes()
    }

    /// Whether the publisher has signed it.
    pub fn is_signed(&self, attestor: &dyn Attestor) -> bool {
        attestor.verify(&self.publisher.id, &self.message(), &self.signature)
    }

    /// Whether it is for all of `keys`.
    pub fn covers(&self, keys: &[Key]) -> bool {
        let mut tags = self.tags.clone();
        tags.sort_unstable();
        keys.iter().all(|key| tags.binary_search(&tag(key)).is_ok())
    }

    /// The lease it grants at `now_unix_secs`, at most `asked_secs`; `None` if it is too old
    /// or from too far in the future.
    pub fn lease_left_secs(&self, now_unix_secs: u64, asked_secs: u64) -> Option<u64> {
        if now_unix_secs.abs_diff(self.issued_unix_secs) > RECEIPT_SECS {
            return None;
        }
        let age_secs = now_unix_secs.saturating_sub(self.issued_unix_secs);
        let lost_secs = age_secs.saturating_sub(CLOCK_SLACK_SECS);
        Some(asked_secs.min(self.lease_secs).saturating_sub(lost_secs))
    }

    /// As it goes into a message about `keys`: the tags are left out if they are theirs.
    pub fn to_wire(&self, keys: impl Iterator<Item = Key>) -> WireReceipt {
        let plain = keys.map(|key| tag(&key)).eq(self.tags.iter().copied());
        WireReceipt {
            publisher: WirePeer(self.publisher),
            issued_unix_secs: self.issued_unix_secs,
            lease_secs: self.lease_secs,
            tags: (!plain).then(|| self.tags.concat()),
            signature: self.signature,
        }
    }
}

impl Receipt {
    /// The receipt of a message about `keys`. Nothing of it has been checked.
    ///
    /// # Errors
    /// If its tags are not a list of at most [`MAX_KEYS`].
    pub fn from_wire(
        wire: WireReceipt,
        keys: impl Iterator<Item = Key>,
    ) -> Result<Receipt, Refusal> {
        let tags = match wire.tags {
            None => keys.map(|key| tag(&key)).collect(),
            Some(bytes) => {
                let count = bytes.len() / TAG_BYTES;
                if !bytes.len().is_multiple_of(TAG_BYTES) || count > MAX_KEYS {
                    let text = "the receipt's tags are not a list";
                    return Err(Refusal::new(Refusal::MALFORMED, text));
                }
                let whole = |chunk: &[u8]| chunk.try_into().expect("16 bytes");
                bytes.chunks(TAG_BYTES).map(whole).collect()
            }
        };
        Ok(Receipt {
            publisher: wire.publisher.0,
            issued_unix_secs: wire.issued_unix_secs,
            lease_secs: wire.lease_secs,
            tags,
            signature: wire.signature,
        })
    }
}

#[cfg(test)]
impl Receipt {
    /// The same with a signature that is not its publisher's.
    pub(super) fn with_other_signature(&self) -> Receipt {
        let mut signature = self.signature;
        signature[9] ^= 1;
        Receipt { signature, ..self.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rpc::{from_header, to_header};

    fn keys() -> Vec<Key> {
        (0..5).map(|n| Key::hashed([n; 32])).collect()
    }

    fn receipt(secret: &SecretKey) -> Receipt {
        let addr = "10.1.2.3:4".parse().expect("an address");
        let publisher = Peer { id: secret.peer_id(), addr };
        Receipt::sign(secret, publisher, 1_000_000, 500_000, keys().into_iter())
    }

    #[test]
    fn every_field_of_a_receipt_is_signed() {
        let secret = SecretKey::from_seed(&[1; 32]);
        let sound = receipt(&secret);
        assert!(sound.is_signed(&secret));
        let other = SecretKey::from_seed(&[2; 32]);
        let elsewhere = Peer { addr: "10.1.2.3:5".parse().expect("one"), ..sound.publisher };
        let another = Peer { id: other.peer_id(), ..sound.publisher };
        let mut tags = sound.tags.clone();
        tags[3][0] ^= 1;
        for forged in [
            Receipt { publisher: elsewhere, ..sound.clone() },
            Receipt { publisher: another, ..sound.clone() },
            Receipt { issued_unix_secs: 1_000_001, ..sound.clone() },
            Receipt { lease_secs: 500_001, ..sound.clone() },
            Receipt { tags, ..sound.clone() },
            Receipt { tags: sound.tags[1..].to_vec(), ..sound.clone() },
            sound.with_other_signature(),
        ] {
            assert!(!forged.is_signed(&secret), "{forged:?}");
            assert!(!forged.is_signed(&other), "{forged:?}");
        }
    }

    #[test]
    fn a_receipt_is_for_its_keys_and_no_others() {
        let receipt = receipt(&SecretKey::from_seed(&[1; 32]));
        assert!(receipt.covers(&keys()) && receipt.covers(&keys()[2..4]));
        assert!(!receipt.covers(&[keys()[1], Key::hashed([77; 32])]));
    }

    #[test]
    fn tags_travel_only_when_they_are_not_those_of_the_message() {
        let secret = SecretKey::from_seed(&[1; 32]);
        let receipt = receipt(&secret);
        let whole = receipt.to_wire(keys().into_iter());
        assert_eq!(whole.tags, None);
        let part = receipt.to_wire(keys().into_iter().take(2));
        assert_eq!(part.tags.as_ref().map(Vec::len), Some(80));
        for (wire, count) in [(whole, 5), (part, 2)] {
            let read: WireReceipt = from_header(&to_header(&wire)).expect("well-formed");
            let back =
                Receipt::from_wire(read, keys().into_iter().take(count)).expect("well-formed");
            assert_eq!(back, receipt);
            assert!(back.is_signed(&secret));
        }
        let ragged = WireReceipt { tags: Some(vec![0; 17]), ..receipt.to_wire(keys().into_iter()) };
        assert!(Receipt::from_wire(ragged, keys().into_iter()).is_err());
        let many = vec![0; (MAX_KEYS + 1) * TAG_BYTES];
        let many = WireReceipt { tags: Some(many), ..receipt.to_wire(keys().into_iter()) };
        assert!(Receipt::from_wire(many, keys().into_iter()).is_err());
    }

    /// Otherwise a node that has recorded a receipt could keep its blocks alive for ever, at the
    /// publisher's expense.
    #[test]
    fn repeating_a_receipt_extends_no_lease_by_more_than_the_slack_of_clocks() {
        let receipt = receipt(&SecretKey::from_seed(&[1; 32]));
        let issued = receipt.issued_unix_secs;
        for age_secs in (0..=RECEIPT_SECS).step_by(600) {
            let left = receipt.lease_left_secs(issued + age_secs, u64::MAX).expect("fresh");
            let end = issued + age_secs + left;
            assert!(end <= issued + receipt.lease_secs + CLOCK_SLACK_SECS, "{age_secs}");
        }
        assert_eq!(receipt.lease_left_secs(issued + RECEIPT_SECS + 1, 9), None);
        assert_eq!(receipt.lease_left_secs(issued - RECEIPT_SECS - 1, 9), None);
        assert_eq!(receipt.lease_left_secs(issued - 7200, u64::MAX), Some(500_000), "fast clock");
        assert_eq!(receipt.lease_left_secs(issued + 3600, 400_000), Some(400_000), "slow clock");
    }
}
