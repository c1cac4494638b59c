//! Finding a block (CFS Figure 5), and copies of it for caches (§5.2): the headers of
//! `LOOKUP_STEP` and `CACHE`.

use atoll_key::Key;
use atoll_net::Peer;
use atoll_overlay::{Node, Route};
use minicbor::{Decode, Encode};

use super::{BlockHeader, Message, encoding};

/// `LOOKUP_STEP`: is the block here, and if not, which node is nearer?
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct LookupStep {
    /// What is looked for.
    #[cbor(n(0), with = "encoding::key")]
    pub key: Key,
    /// The caller takes this node for the root or one of its replicas.
    #[n(1)]
    pub as_root: bool,
    /// A cached copy will do.
    #[n(2)]
    pub may_be_cached: bool,
}

/// The answer to a [`LookupStep`].
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub enum LookupReply {
    /// COMPLETE: the block is the reply's only part.
    #[n(0)]
    Found(#[n(0)] BlockHeader),
    /// COMPLETE: a cached copy of the block is the reply's only part.
    #[n(1)]
    Cached(#[n(0)] BlockHeader),
    /// NONEXISTENT: this node is the root and does not have it; its replicas follow.
    #[n(2)]
    Absent(#[cbor(n(0), with = "encoding::nodes")] Vec<Node>),
    /// CONTINUE: ask there.
    #[n(3)]
    Route(#[cbor(n(0), with = "encoding::route")] Route),
    /// CONTINUE: ask there; and this node would cache a copy of the block.
    #[n(4)]
    Wanted(#[cbor(n(0), with = "encoding::route")] Route),
    /// CONTINUE: this peer keeps the block for this node, which has no room for it.
    #[n(5)]
    There(#[cbor(n(0), with = "encoding::peer")] Peer),
}

impl Message for LookupStep {}

impl Message for LookupReply {
    fn parts(&self) -> usize {
        usize::from(matches!(self, LookupReply::Found(_) | LookupReply::Cached(_)))
    }
}

/// `CACHE`: the block in the only part, for the receiver's cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct CacheCopy {
    /// What the part is.
    #[n(0)]
    pub block: BlockHeader,
}

/// The answer to a [`CacheCopy`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct CacheReply {
    /// Whether it is in the cache now.
    #[n(0)]
    pub taken: bool,
}

impl Message for CacheCopy {
    fn parts(&self) -> usize {
        1
    }
}

impl Message for CacheReply {}
