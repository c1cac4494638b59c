//! Storing and fetching blocks: the headers of `PUT` and `FETCH`.

use atoll_key::{BlockKind, Key};
use atoll_net::Peer;
use bytes::Bytes;
use minicbor::{Decode, Encode};

use super::receipt::WireReceipt;
use super::{Batch, Message, OverQuota, PromisesReply, QuotaOf, encoding};

/// A block's description; its bytes are the part of the same number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct BlockHeader {
    /// Where it lives.
    #[cbor(n(0), with = "encoding::key")]
    pub key: Key,
    /// What its key promises.
    #[cbor(n(1), with = "encoding::kind")]
    pub kind: BlockKind,
    /// Seconds its lease still has.
    #[n(2)]
    pub lease_secs: u64,
}

/// A block on its way: its description and its bytes.
#[derive(Clone, Debug)]
pub(crate) struct Block {
    pub header: BlockHeader,
    pub bytes: Bytes,
}

impl Block {
    pub(crate) fn is_mutable(&self) -> bool {
        self.header.kind.is_mutable()
    }
}

/// The blocks of a message, one part for each header.
pub(crate) fn to_blocks(headers: Batch<BlockHeader>, parts: Vec<Bytes>) -> Vec<Block> {
    let block = |(header, bytes)| Block { header, bytes };
    headers.0.into_iter().zip(parts).map(block).collect()
}

/// Headers and parts of a message that carries `blocks`.
pub(crate) fn from_blocks(blocks: Vec<Block>) -> (Batch<BlockHeader>, Vec<Bytes>) {
    let (headers, parts): (Vec<BlockHeader>, Vec<Bytes>) =
        blocks.into_iter().map(|block| (block.header, block.bytes)).unzip();
    (headers.into(), parts)
}

/// `PUT`: store the blocks in the parts.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Put {
    /// What the parts are.
    #[n(0)]
    pub blocks: Batch<BlockHeader>,
    /// True: store and send on to the replicas, as root. False: only store, as replica.
    #[n(1)]
    pub as_root: bool,
    /// Their publisher's; without one they are copies of what the ring has.
    #[n(2)]
    pub receipt: Option<WireReceipt>,
    /// For each block the number of the promise that its writer asks for, to be told of the next change by
    /// others; none if it asks for none.
    #[n(3)]
    pub promises: Batch<u64>,
}

/// What became of one block of a [`Put`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub enum PutStatus {
    /// Durable on so many nodes, of so many that should have it.
    #[n(0)]
    Stored {
        /// Nodes that acknowledged.
        #[n(0)]
        copies: u32,
        /// Nodes that should hold it.
        #[n(1)]
        wanted: u32,
    },
    /// This node is not the key's root.
    #[n(1)]
    NotRoot,
    /// A higher version, or another block of the same version, is held.
    #[n(2)]
    Superseded {
        /// The version held.
        #[n(0)]
        held: u64,
    },
    /// The bytes are not what the key says.
    #[n(3)]
    Invalid,
    /// No room here.
    #[n(4)]
    Full,
    /// The disk failed here.
    #[n(5)]
    Failed,
    /// The publisher's share of this node is used up.
    #[n(6)]
    OverQuota {
        /// Bytes kept for it.
        #[n(0)]
        used_bytes: u64,
        /// Bytes that would be kept at most.
        #[n(1)]
        allowed_bytes: u64,
        /// Whether its key is over quota or its address.
        #[n(2)]
        of: QuotaOf,
    },
    /// Its writer's certificate is not valid now, or it was not written now.
    #[n(7)]
    NotAdmitted,
    /// It is a copy of a block that its owner has released.
    #[n(8)]
    Released,
}

impl From<OverQuota> for PutStatus {
    fn from(over: OverQuota) -> PutStatus {
        let OverQuota { used_bytes, allowed_bytes, of } = over;
        PutStatus::OverQuota { used_bytes, allowed_bytes, of }
    }
}

/// The answer to a [`Put`]: one status for each block.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct PutReply {
    /// In the order of the request.
    #[n(0)]
    pub statuses: Batch<PutStatus>,
    /// The tag of the replica set of mutable blocks, if this node is the root of all of them.
    #[n(1)]
    pub set: Option<u64>,
    /// What was promised to readers of those blocks that were stored, if all have a kind whose versions are joined.
    #[n(2)]
    pub promises: Batch<PromisesReply>,
}

impl Message for Put {
    fn entries(&self) -> usize {
        self.blocks.0.len()
    }

    fn parts(&self) -> usize {
        self.entries()
    }
}

impl Message for PutReply {
    fn entries(&self) -> usize {
        self.statuses.0.len()
    }
}

/// `FETCH`: send these blocks.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Fetch {
    /// Which blocks.
    #[cbor(n(0), with = "encoding::packed")]
    pub keys: Vec<Key>,
}

/// The answer to a [`Fetch`]: the blocks held, as many as fit one message.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct FetchReply {
    /// What the parts are.
    #[n(0)]
    pub blocks: Batch<BlockHeader>,
    /// Blocks that other nodes keep for this one.
    #[n(1)]
    pub there: Batch<There>,
}

/// Where another node keeps a block for the one that was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct There {
    /// Which block.
    #[cbor(n(0), with = "encoding::key")]
    pub key: Key,
    /// The node that has it.
    #[cbor(n(1), with = "encoding::peer")]
    pub holder: Peer,
}

impl Message for Fetch {
    fn entries(&self) -> usize {
        self.keys.len()
    }
}

impl Message for FetchReply {
    fn entries(&self) -> usize {
        self.blocks.0.len() + self.there.0.len()
    }

    fn parts(&self) -> usize {
        self.blocks.0.len()
    }
}
