//! Which nodes use a mutable block: the headers of `USES`.

use atoll_key::Key;
use atoll_net::Peer;
use atoll_net::header::Capped;
use minicbor::{Decode, Encode};

use super::promises::MAX_HOLDERS;
use super::{Message, encoding};
use crate::locks::LockMode;

/// The most holders of a lock that a reply names.
pub const MAX_LOCK_HOLDERS: usize = 64;

/// `USES`: which nodes were promised to be told of changes of a block, and which have a lock?
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct AskUses {
    /// Which block.
    #[cbor(n(0), with = "encoding::key")]
    pub key: Key,
    /// Which lock.
    #[cbor(n(1), with = "encoding::key")]
    pub lock: Key,
}

/// The answer to an [`AskUses`]: what the callee has in memory.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct UsesReply {
    /// The nodes that have a promise of the block. The numbers of the promises are not told.
    #[n(0)]
    pub readers: Capped<BlockReader, MAX_HOLDERS>,
    /// The lock leases.
    #[n(1)]
    pub locks: Capped<LockUse, MAX_LOCK_HOLDERS>,
}

/// A node that was promised to be told of the next change of a block: it has read or written the block in the
/// last 15 s.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct BlockReader {
    /// The node.
    #[cbor(n(0), with = "encoding::peer")]
    pub peer: Peer,
    /// How long the promise still lasts, milliseconds.
    #[n(1)]
    pub left_ms: u64,
}

/// A lock lease at one replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct LockUse {
    /// The public key of the node that has it.
    #[cbor(n(0), with = "minicbor::bytes")]
    pub peer_id: [u8; 32],
    /// In which mode.
    #[n(1)]
    pub mode: LockMode,
    /// How long it still lasts, milliseconds.
    #[n(2)]
    pub left_ms: u64,
}

impl Message for AskUses {}

impl Message for UsesReply {}
