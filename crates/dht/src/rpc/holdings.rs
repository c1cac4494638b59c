//! What nodes hold: the headers of `HOLDINGS` and `PROVE`.

use atoll_key::Key;
use atoll_net::header::Capped;
use atoll_store::Owner;
use minicbor::{Decode, Encode};

use super::{MAX_KEYS, encoding};

/// `HOLDINGS`: what do you have of these blocks? Without keys the question is only how much room
/// there is.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct AskHoldings {
    /// Which blocks.
    #[cbor(n(0), with = "encoding::packed")]
    pub keys: Vec<Key>,
    /// Whether the sender has its copies of them kept by the receiver.
    #[n(1)]
    pub pointing: Pointing,
}

/// Whether the sender of a question points to the receiver for the blocks (PAST §3.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(index_only)]
pub enum Pointing {
    /// It does not.
    #[n(0)]
    No,
    /// It does: the receiver says what it keeps for it, and goes on to keep that.
    #[n(1)]
    Yes,
    /// It does no longer: the receiver need not keep them.
    #[n(2)]
    NoLonger,
}

/// The answer to an [`AskHoldings`].
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct HoldingsReply {
    /// One for each key; nothing of what is not held, has expired, or is not kept for the sender
    /// that points here for it.
    #[n(0)]
    pub held: Capped<Option<HeldCopy>, MAX_KEYS>,
    /// Bytes this node would still take for others.
    #[n(1)]
    pub spare_bytes: u64,
}

/// What a node says of a block it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct HeldCopy {
    /// The version held.
    #[n(0)]
    pub version: u64,
    /// Seconds its lease still has.
    #[n(1)]
    pub lease_secs: u64,
    /// Whom it is charged to: the publisher.
    #[cbor(n(2), with = "minicbor::bytes")]
    pub publisher: [u8; 16],
    /// The address.
    #[cbor(n(3), with = "minicbor::bytes")]
    pub ip: [u8; 16],
    /// The node that keeps it for the answerer, if one does.
    #[cbor(n(4), with = "minicbor::bytes")]
    pub holder: Option<[u8; 32]>,
}

impl HeldCopy {
    /// Whom it is charged to.
    pub fn owner(&self) -> Owner {
        Owner { publisher: self.publisher, ip: self.ip }
    }
}

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
