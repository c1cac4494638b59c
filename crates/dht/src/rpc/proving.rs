//! Showing that blocks are held: the headers of `PROVE`.

use atoll_key::Key;
use atoll_net::header::Capped;
use minicbor::{Decode, Encode};

use super::{MAX_KEYS, Message, encoding};

/// `PROVE`: show that you hold these blocks.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Prove {
    /// Drawn for this request: an answer to an earlier one proves nothing.
    #[cbor(n(0), with = "minicbor::bytes")]
    pub nonce: [u8; 32],
    /// Which blocks.
    #[cbor(n(1), with = "encoding::packed")]
    pub keys: Vec<Key>,
}

/// The answer to a [`Prove`].
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct ProveReply {
    /// For the first keys of the request, at least one: nothing of what is not held.
    #[n(0)]
    pub proofs: Capped<Option<Proof>, MAX_KEYS>,
}

/// What shows that a block is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Proof {
    /// The version held.
    #[n(0)]
    pub version: u64,
    /// Seconds its lease still has.
    #[n(1)]
    pub lease_secs: u64,
    /// The BLAKE3 hash of its bytes, keyed with the nonce.
    #[cbor(n(2), with = "minicbor::bytes")]
    pub mac: [u8; 32],
}

impl Message for Prove {
    fn entries(&self) -> usize {
        self.keys.len()
    }
}

impl Message for ProveReply {
    fn entries(&self) -> usize {
        self.proofs.0.len()
    }
}
