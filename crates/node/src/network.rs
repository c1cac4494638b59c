//! The network a node belongs to: its public parameters and its secret.
//!
//! A network is made by the node that starts without a join code, and copied into the
//! directory of each that joins. Its secret can be replaced ([`crate::membership`]), the
//! rest never changes; joining another network needs another directory, because blocks and
//! ring positions belong to one network.

use std::fmt;

use atoll_key::IdProfile;
use bytes::Bytes;
use minicbor::{Decode, Encode};

use crate::dir::{self, DirError, NodeDir};

/// The largest number of copies a network may ask for: half a successor list, a guess.
pub const MAX_REPLICAS: u32 = 8;

/// Copies of each block unless a network is made with another number.
pub const DEFAULT_REPLICAS: u32 = 3;

/// An [`IdProfile`] by its number, in files and join codes.
mod profile_number {
    use super::IdProfile;
    use minicbor::decode::Error as DecodeError;
    use minicbor::encode::{Error as EncodeError, Write};
    use minicbor::{Decoder, Encoder};

    pub(super) fn encode<C, W: Write>(
        profile: &IdProfile,
        e: &mut Encoder<W>,
        _: &mut C,
    ) -> Result<(), EncodeError<W::Error>> {
        e.u8(*profile as u8)?.ok()
    }

    pub(super) fn decode<C>(d: &mut Decoder<'_>, _: &mut C) -> Result<IdProfile, DecodeError> {
        match d.u8()? {
            1 => Ok(IdProfile::Address),
            2 => Ok(IdProfile::Identity),
            other => Err(DecodeError::message(format!("no known profile of node IDs: {other}"))),
        }
    }
}

/// What all nodes of a network agree on. Printed without its secret.
///
/// CBOR map: 0 profile, 1 replicas, 2 secret (32 bytes), 3 the administrator's public key
/// (32 bytes), 4 epoch.
#[derive(Clone, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Network {
    /// How node IDs are chosen.
    #[cbor(n(0), with = "profile_number")]
    pub profile: IdProfile,
    /// Copies of each block.
    #[n(1)]
    pub replicas: u32,
    /// What members prove to each other and never send.
    #[cbor(n(2), with = "minicbor::bytes")]
    pub secret: [u8; 32],
    /// The administrator's Ed25519 public key: its holder may replace the secret and remove nodes.
    #[cbor(n(3), with = "minicbor::bytes")]
    pub admin: [u8; 32],
    /// How often the secret had been replaced when this one came.
    #[cbor(n(4), default)]
    pub epoch: u64,
}

/// Names a network without giving its secret away.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NetworkId(pub [u8; 32]);

impl fmt::Display for NetworkId {
    /// The first eight bytes in hexadecimal.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0[..8].iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl Network {
    /// A new network, whose administrator has the public key `admin`.
    pub fn generate(profile: IdProfile, replicas: u32, admin: [u8; 32]) -> Network {
        Network { profile, replicas, secret: random_seed(), admin, epoch: 0 }
    }

    /// Names the network: a hash of its parameters and its administrator's key.
    pub fn id(&self) -> NetworkId {
        let mut hasher = blake3::Hasher::new_derive_key("atoll v2 network id");
        hasher.update(&[self.profile as u8]).update(&self.replicas.to_be_bytes());
        hasher.update(&self.admin);
        NetworkId(*hasher.finalize().as_bytes())
    }

    /// What is known of this network when a join code says `other`; none if that is another
    /// network.
    pub(crate) fn joined_with(&self, other: &Network) -> Option<Network> {
        let parameters = |network: &Network| (network.admin, network.profile, network.replicas);
        if parameters(self) != parameters(other) {
            return None;
        }
        Some(if other.epoch >= self.epoch { other.clone() } else { self.clone() })
    }

    /// What both sides of a connection must agree on besides the secret.
    pub(crate) fn profile_bytes(&self) -> Bytes {
        let mut bytes = b"atoll 1\0".to_vec();
        bytes.push(self.profile as u8);
        bytes.extend_from_slice(&self.replicas.to_be_bytes());
        bytes.into()
    }

    /// Whether the parameters are within this program's limits.
    pub(crate) fn check(&self) -> Result<(), String> {
        check_replicas(self.replicas)
    }

    /// Whether its node IDs are chosen, and blocks copied, as is wished for: that is settled for ever.
    pub(crate) fn agrees_with(
        &self,
        wished: Option<IdProfile>,
        replicas: Option<u32>,
    ) -> Result<(), String> {
        if replicas.is_some_and(|replicas| replicas != self.replicas) {
            return Err(format!(
                "this network keeps {} copies of each block; that cannot be changed",
                self.replicas
            ));
        }
        let from = |profile| match profile {
            IdProfile::Identity => "from keys",
            IdProfile::Address => "from addresses",
        };
        match wished {
            Some(wished) if wished != self.profile => Err(format!(
                "in this network node IDs are made {}, not {}; that cannot be changed",
                from(self.profile),
                from(wished)
            )),
            _ => Ok(()),
        }
    }

    pub(crate) fn load(dir: &NodeDir) -> Result<Option<StoredNetwork>, DirError> {
        let path = dir.network();
        let Some(bytes) = dir::read_secret(&path)? else { return Ok(None) };
        let stored: StoredNetwork =
            minicbor::decode(&bytes).map_err(|error| DirError::damaged(&path, error))?;
        stored.network.check().map_err(|what| DirError::damaged(&path, what))?;
        Ok(Some(stored))
    }
}

impl fmt::Debug for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Network({}, {:?}, {} replicas)", self.id(), self.profile, self.replicas)
    }
}

/// Whether a network may keep so many copies of each block.
pub(crate) fn check_replicas(replicas: u32) -> Result<(), String> {
    if (1..=MAX_REPLICAS).contains(&replicas) {
        return Ok(());
    }
    Err(format!("{replicas} replicas; it can be 1 to {MAX_REPLICAS}"))
}

/// The file `network.cbor`: the network and the peers that its join code named.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
#[cbor(map)]
pub(crate) struct StoredNetwork {
    #[n(0)]
    pub network: Network,
    /// Bootstrap peers of the join code; empty for the network's founder.
    #[n(1)]
    pub bootstrap: crate::peers::PeerList,
}

impl StoredNetwork {
    pub(crate) fn save(&self, dir: &NodeDir) -> Result<(), DirError> {
        let bytes = minicbor::to_vec(self).expect("a vector takes all that is written");
        dir::write_atomically(&dir.network(), &bytes)
    }
}

/// 32 bytes from the operating system.
pub(crate) fn random_seed() -> [u8; 32] {
    let mut seed = [0; 32];
    getrandom::fill(&mut seed).expect("the operating system gives randomness");
    seed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_not_printed() {
        let network =
            Network { secret: [0x5a; 32], ..Network::generate(IdProfile::Identity, 3, [9; 32]) };
        let printed = format!("{network:?} {}", network.id());
        assert!(!printed.contains("5a5a") && !printed.contains("90, 90"), "{printed}");
    }

    #[test]
    fn how_node_ids_are_made_is_settled_for_ever() {
        let network = Network::generate(IdProfile::Address, 3, [9; 32]);
        assert_eq!(network.agrees_with(None, None), Ok(()));
        assert_eq!(network.agrees_with(Some(IdProfile::Address), None), Ok(()));
        let error = network.agrees_with(Some(IdProfile::Identity), None).expect_err("another");
        assert!(error.contains("from addresses, not from keys"), "{error}");
    }

    #[test]
    fn the_number_of_copies_is_settled_for_ever() {
        let network = Network::generate(IdProfile::Identity, 3, [9; 32]);
        assert_eq!(network.agrees_with(None, Some(3)), Ok(()));
        let error = network.agrees_with(None, Some(4)).expect_err("another");
        assert!(error.contains("3 copies"), "{error}");
    }

    #[test]
    fn each_parameter_changes_the_network_id() {
        let network = Network::generate(IdProfile::Identity, 3, [9; 32]);
        let others = [
            Network { replicas: 2, ..network.clone() },
            Network { admin: [1; 32], ..network.clone() },
        ];
        assert!(others.iter().all(|other| other.id() != network.id()));
    }

    #[test]
    fn a_network_stays_itself_when_its_secret_is_replaced() {
        let before = Network::generate(IdProfile::Identity, 3, [9; 32]);
        let after = Network { secret: [2; 32], epoch: 1, ..before.clone() };
        assert_eq!(before.id(), after.id());
        assert_eq!(before.joined_with(&after), Some(after.clone()));
        assert_eq!(after.joined_with(&before), Some(after.clone()), "an older code");
        let other = Network { admin: [3; 32], ..after.clone() };
        assert_eq!(before.joined_with(&other), None);
    }

    #[test]
    fn what_is_saved_is_loaded_and_damage_is_told() {
        let temp = tempfile::tempdir().expect("temp");
        let dir = NodeDir::at(temp.path());
        assert_eq!(Network::load(&dir).expect("none"), None);
        let stored = StoredNetwork {
            network: Network::generate(IdProfile::Address, 3, [9; 32]),
            bootstrap: Default::default(),
        };
        stored.save(&dir).expect("save");
        assert_eq!(Network::load(&dir).expect("load"), Some(stored));
        std::fs::write(dir.network(), b"\xa1\x00").expect("cut short");
        assert!(matches!(Network::load(&dir), Err(DirError::Damaged { .. })));
    }
}
