//! Copies kept on other nodes for want of room: the headers of `DIVERT` and `HOLD`, and how a
//! node names the holder of such a copy (PAST, SOSP 2001, §3.3).

use atoll_key::Key;
use atoll_net::header::{Capped, WirePeer};
use minicbor::{Decode, Encode};

use super::{Batch, BlockHeader, MAX_RENEW_KEYS, PutStatus, Vouched, key_bytes, keys_bytes};
use crate::accounting::receipt::WireReceipt;

/// `DIVERT`: keep the blocks in the parts for the sender, which has no room for them.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Divert {
    /// What the parts are.
    #[n(0)]
    pub blocks: Batch<BlockHeader>,
    /// Their publisher's; without one they are copies of what the ring has.
    #[n(1)]
    pub receipt: Option<WireReceipt>,
}

/// The answer to a [`Divert`].
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct DivertReply {
    /// What became of each block. [`PutStatus::NotRoot`]: this node may not keep it for the
    /// sender, because it holds the block itself or should.
    #[n(0)]
    pub statuses: Batch<PutStatus>,
    /// What is kept of each block that was taken.
    #[n(1)]
    pub held: Batch<Option<Vouched>>,
    /// Bytes this node would still take for others.
    #[n(2)]
    pub spare_bytes: u64,
}

/// `HOLD`: the sender points to the receiver for these blocks; are they there? Without keys the
/// question is only how much room there is.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Hold {
    /// Which blocks.
    #[cbor(n(0), with = "keys_bytes")]
    pub keys: Vec<Key>,
    /// False: the sender points here for them no longer.
    #[n(1)]
    pub keep: bool,
}

/// The answer to a [`Hold`].
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct HoldReply {
    /// For each key: what is kept for the sender, if anything.
    #[n(0)]
    pub held: Capped<Option<Vouched>, MAX_RENEW_KEYS>,
    /// Bytes this node would still take for others.
    #[n(1)]
    pub spare_bytes: u64,
}

/// Of a block that was asked for: the node that keeps it for the answerer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct There {
    /// Which block.
    #[cbor(n(0), with = "key_bytes")]
    pub key: Key,
    /// Who has it.
    #[n(1)]
    pub holder: WirePeer,
}
