//! Comparing key ranges: the headers of `RECONCILE`. The rules of the exchange are in
//! `replication::reconcile`.

use atoll_key::{Key, KeyRange};
use atoll_net::header::Capped;
/// A range and what the sender has in it.
pub use atoll_store::Part as Claim;
pub use atoll_store::Summary;
use minicbor::{Decode, Encode};

use super::encoding::Packed;
use super::{MAX_CLAIMS, encoding};

/// The most items in one answer: 2,048 × 72 bytes are about half of what a header holds.
pub const MAX_ITEMS: usize = 2048;

/// A block as reconciliation sees it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Item {
    /// Where it lives.
    pub key: Key,
    /// Its version; 0 for content.
    pub version: u64,
}

/// | key, 64 bytes | version, 8 |
impl Packed for Item {
    const BYTES: usize = 72;
    const MAX: usize = MAX_ITEMS;

    fn write(&self, out: &mut Vec<u8>) {
        self.key.write(out);
        out.extend_from_slice(&self.version.to_be_bytes());
    }

    fn read(bytes: &[u8]) -> Option<Item> {
        let (key, version) = bytes.split_last_chunk()?;
        Some(Item { key: Key::from_slice(key)?, version: u64::from_be_bytes(*version) })
    }
}

/// | after, 64 bytes | upto, 64 | digest, 32 | count, 8 |
impl Packed for Claim {
    const BYTES: usize = 168;
    const MAX: usize = MAX_CLAIMS;

    fn write(&self, out: &mut Vec<u8>) {
        self.range.after.write(out);
        self.range.upto.write(out);
        out.extend_from_slice(&self.summary.digest);
        out.extend_from_slice(&self.summary.count.to_be_bytes());
    }

    fn read(bytes: &[u8]) -> Option<Claim> {
        let (rest, count) = bytes.split_last_chunk()?;
        let (range, digest) = rest.split_last_chunk()?;
        let (after, upto) = range.split_at_checked(64)?;
        Some(Claim {
            range: KeyRange::new(Key::from_slice(after)?, Key::from_slice(upto)?),
            summary: Summary { digest: *digest, count: u64::from_be_bytes(*count) },
        })
    }
}

/// The answer to a [`Claim`].
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub enum Answer {
    /// The answering node has the same.
    #[n(0)]
    Same,
    /// It has few items there, or the caller has none: these are all of them.
    #[n(1)]
    Items(#[cbor(n(0), with = "encoding::packed")] Vec<Item>),
    /// Its own claims for parts that together make up the range.
    #[n(2)]
    Parts(#[cbor(n(0), with = "encoding::packed")] Vec<Claim>),
    /// Too many items for one answer where the caller has none: the first of them, up
    /// to and including the key `upto`; the caller asks again from there.
    #[n(3)]
    Some {
        /// The items found.
        #[cbor(n(0), with = "encoding::packed")]
        items: Vec<Item>,
        /// They are all there are in `(range.after, upto]`.
        #[cbor(n(1), with = "encoding::key")]
        upto: Key,
    },
}

impl Answer {
    /// About how many bytes it takes in a header.
    pub(crate) fn header_bytes(&self) -> usize {
        match self {
            Answer::Same => 8,
            Answer::Items(items) | Answer::Some { items, .. } => items.len() * Item::BYTES + 80,
            Answer::Parts(parts) => parts.len() * Claim::BYTES + 8,
        }
    }
}

/// `RECONCILE`: compare ranges.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Reconcile {
    /// What the sender has.
    #[cbor(n(0), with = "encoding::packed")]
    pub claims: Vec<Claim>,
}

/// The answer to a [`Reconcile`]: one answer for each of the first claims.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct ReconcileReply {
    /// In the order of the request.
    #[n(0)]
    pub answers: Capped<Answer, MAX_CLAIMS>,
}
