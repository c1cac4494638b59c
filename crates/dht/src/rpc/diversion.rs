//! Copies kept on other nodes for want of room: the headers of `DIVERT` and `HOLD`, and how a
//! node names the holder of such a copy (PAST, SOSP 2001, §3.3).

use atoll_key::Key;
use atoll_net::header::Capped;
use minicbor::{Decode, Encode};

use super::receipt::WireReceipt;
use super::{Batch, BlockHeader, MAX_KEYS, Message, PutStatus, Vouched, encoding};

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
    /// One for each block, in the order of the request.
    #[n(0)]
    pub blocks: Batch<Diverted>,
    /// Bytes this node would still take for others.
    #[n(1)]
    pub spare_bytes: u64,
}

/// What became of one block of a [`Divert`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Diverted {
    /// [`PutStatus::NotRoot`]: this node may not keep it for the sender, because it holds the
    /// block itself or should.
    #[n(0)]
    pub status: PutStatus,
    /// What is kept, if it was taken.
    #[n(1)]
    pub held: Option<Vouched>,
}

/// `HOLD`: the sender points to the receiver for these blocks; are they there? Without keys the
/// question is only how much room there is.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Hold {
    /// Which blocks.
    #[cbor(n(0), with = "encoding::packed")]
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
    pub held: Capped<Option<Vouched>, MAX_KEYS>,
    /// Bytes this node would still take for others.
    #[n(1)]
    pub spare_bytes: u64,
}

impl Message for Divert {
    fn entries(&self) -> usize {
        self.blocks.0.len()
    }

    fn parts(&self) -> usize {
        self.entries()
    }
}

impl Message for DivertReply {
    fn entries(&self) -> usize {
        self.blocks.0.len()
    }
}

impl Message for Hold {
    fn entries(&self) -> usize {
        self.keys.len()
    }
}

impl Message for HoldReply {
    fn entries(&self) -> usize {
        self.held.0.len()
    }
}
