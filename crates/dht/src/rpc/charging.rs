//! Which publisher is charged for blocks, and whether there is room for more: the headers of
//! `CONFIRM` and `ROOM` (CFS §5.4).

use std::fmt;

use minicbor::{Decode, Encode};

/// `CONFIRM`: did you make this receipt?
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Confirm {
    /// Random; to be repeated (CFS §4.4).
    #[cbor(n(0), with = "minicbor::bytes")]
    pub nonce: [u8; 16],
    /// The receipt's.
    #[cbor(n(1), with = "minicbor::bytes")]
    pub digest: [u8; 32],
}

/// The answer to a [`Confirm`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct ConfirmReply {
    /// As asked.
    #[cbor(n(0), with = "minicbor::bytes")]
    pub nonce: [u8; 16],
    /// Whether it is one of the last this node made.
    #[n(1)]
    pub is_mine: bool,
}

/// `ROOM`: may this publisher put so much?
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct AskRoom {
    /// The publisher, as blocks are charged.
    #[cbor(n(0), with = "minicbor::bytes")]
    pub publisher: [u8; 16],
    /// Its address, as blocks are charged.
    #[cbor(n(1), with = "minicbor::bytes")]
    pub ip: [u8; 16],
    /// What the blocks cost.
    #[n(2)]
    pub bytes: u64,
    /// Whether it is a root block.
    #[n(3)]
    pub is_root: bool,
}

/// The answer to an [`AskRoom`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct AskRoomReply {
    /// Why not, if not.
    #[n(0)]
    pub over: Option<OverQuota>,
}

/// What a quota is of.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Encode, Decode)]
#[cbor(index_only)]
pub enum QuotaOf {
    /// A publisher's key.
    #[n(0)]
    Key,
    /// An address.
    #[n(1)]
    Address,
}

impl fmt::Display for QuotaOf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            QuotaOf::Key => "key",
            QuotaOf::Address => "address",
        })
    }
}

/// A publisher's share is used up.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
#[cbor(map)]
pub struct OverQuota {
    /// What is kept for it here, bytes, with what keeping costs.
    #[n(0)]
    pub used_bytes: u64,
    /// What would be kept at most.
    #[n(1)]
    pub allowed_bytes: u64,
    /// Whether the key is over quota or the address.
    #[n(2)]
    pub of: QuotaOf,
}
