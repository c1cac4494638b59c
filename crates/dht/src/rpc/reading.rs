//! Reading and watching mutable blocks at their replicas: the headers of `READ` and `WATCH`.

use atoll_key::Key;
use minicbor::{Decode, Encode};

use super::{BlockHeader, Message, encoding};

/// `READ`: which version of a mutable block is here?
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Read {
    /// Which block.
    #[cbor(n(0), with = "encoding::key")]
    pub key: Key,
    /// Whether the block is wanted too, or its version alone.
    #[n(1)]
    pub with_bytes: bool,
    /// The number of the promise that the reader asks for, to be told of the next change; absent if it asks for
    /// none.
    #[n(2)]
    pub promise: Option<u64>,
}

/// The answer to a [`Read`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct ReadReply {
    /// What is held; absent if nothing is.
    #[n(0)]
    pub held: Option<Stamp>,
    /// What the reply's only part is; absent if it has none.
    #[n(1)]
    pub block: Option<BlockHeader>,
    /// The tag of the block's replica set, if this node is its root.
    #[n(2)]
    pub set: Option<u64>,
    /// For how long the promise was made, milliseconds; absent if it was not.
    #[n(3)]
    pub promised_ms: Option<u64>,
}

/// Which block a replica holds: its version, and a short hash, since two writers may have made
/// different blocks of one version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Encode, Decode)]
#[cbor(map)]
pub struct Stamp {
    /// Its version.
    #[n(0)]
    pub version: u64,
    /// The first bytes of the BLAKE3 hash of its bytes.
    #[n(1)]
    pub digest: u64,
}

impl Stamp {
    /// That of a block of this version.
    pub(crate) fn of(version: u64, bytes: &[u8]) -> Stamp {
        Stamp { version, digest: short_hash(blake3::hash(bytes)) }
    }
}

/// The first 8 bytes of a hash.
pub(crate) fn short_hash(hash: blake3::Hash) -> u64 {
    u64::from_be_bytes(*hash.as_bytes().first_chunk().expect("32 bytes"))
}

impl Message for Read {}

impl Message for ReadReply {
    fn parts(&self) -> usize {
        usize::from(self.block.is_some())
    }
}

/// `WATCH`: answer once a newer version of a mutable block is here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Watch {
    /// Which block.
    #[cbor(n(0), with = "encoding::key")]
    pub key: Key,
    /// The version that the caller has seen.
    #[n(1)]
    pub seen: u64,
}

/// The answer to a [`Watch`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct WatchReply {
    /// The newer version; absent if none has come in [`super::WATCH_WAIT`].
    #[n(0)]
    pub version: Option<u64>,
}

impl Message for Watch {}

impl Message for WatchReply {}
