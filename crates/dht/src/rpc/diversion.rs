//! Copies kept on other nodes for want of room: the headers of `DIVERT` (PAST, SOSP 2001, §3.3).

use minicbor::{Decode, Encode};

use super::receipt::WireReceipt;
use super::{Batch, BlockHeader, HeldCopy, Message, PutStatus};

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
    pub held: Option<HeldCopy>,
}

impl Message for Divert {
    fn entries(&self) -> usize {
        self.blocks.0.len()
    }

    fn parts(&self) -> usize {
        self.entries()
    }
}
