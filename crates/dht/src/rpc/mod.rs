//! What nodes say to each other about blocks: the headers of methods `0x02xx`.
//!
//! Headers are CBOR maps with numbered fields (minicbor), so fields can be added; blocks
//! travel beside the header as parts, one part per block in the order of the header's
//! entries. `docs/design/dht.md` has the table. Leases are sent as the seconds that
//! remain, so that clocks which disagree do not lose data.
//!
//! Decoding allocates no more than the header that has arrived justifies: every list has
//! a cap, checked while it is read.

pub(crate) mod budget;
mod charging;
mod diversion;
mod proving;
pub(crate) mod put_times;
pub(crate) mod quorum;
mod renewal;

use atoll_key::{BlockKind, Key, KeyRange};
use atoll_net::header::{Capped, WirePeer};
pub use atoll_net::header::{from_header, to_header};
use atoll_net::{Peer, Refusal};
use atoll_overlay::wire::{WireNodes, WireRoute};
use atoll_overlay::{Node, Route};
use atoll_store::MAX_PARTS;
use minicbor::{Decode, Decoder, Encode, Encoder, decode, encode};

pub use charging::{AskRoom, AskRoomReply, Confirm, ConfirmReply, Vouch, VouchReply, Vouched};
pub use diversion::{Divert, DivertReply, Hold, HoldReply, There};
pub use proving::{Proof, Prove, ProveReply};
pub(crate) use renewal::has;
pub use renewal::{NAME_BYTES, Name, Renew, RenewReply};

use crate::accounting::quota::{OverQuota, QuotaOf};
use crate::accounting::receipt::WireReceipt;
use crate::replication::reconcile::{Answer, Claim, Item, MAX_ITEMS, Summary};

/// CFS Figure 5's `lookup_step`.
pub const LOOKUP_STEP: u16 = 0x0201;
/// Store blocks, as their root or as a replica.
pub const PUT: u16 = 0x0202;
/// Extend leases and learn which blocks are held.
pub const RENEW: u16 = 0x0203;
/// Compare key ranges.
pub const RECONCILE: u16 = 0x0204;
/// Fetch blocks by key from a replica.
pub const FETCH: u16 = 0x0205;
/// Ask a publisher whether it made a receipt.
pub const CONFIRM: u16 = 0x0206;
/// Ask a neighbour whom it charges blocks to.
pub const VOUCH: u16 = 0x0207;
/// Ask a replica whether a publisher may put more.
pub const ROOM: u16 = 0x0209;
/// A copy of a block, for the cache (CFS §5.2).
pub const CACHE: u16 = 0x0208;
/// Keep copies for a replica that has no room (PAST §3.3).
pub const DIVERT: u16 = 0x0210;
/// Ask for copies kept so, and for how many more there is room.
pub const HOLD: u16 = 0x0211;

/// Show that blocks are held.
pub const PROVE: u16 = 0x020A;

/// The most blocks in one `PUT` or `FETCH`.
pub const MAX_BATCH_BLOCKS: usize = 256;
/// The most keys, or names, in one `RENEW`, `VOUCH` or `PROVE`.
pub const MAX_RENEW_KEYS: usize = 1024;
/// The most claims in one `RECONCILE`.
pub const MAX_CLAIMS: usize = 64;
/// A key, as a CBOR byte string of 64 bytes.
mod key_bytes {
    use super::*;

    pub fn encode<C, W: encode::Write>(
        key: &Key,
        e: &mut Encoder<W>,
        _: &mut C,
    ) -> Result<(), encode::Error<W::Error>> {
        e.bytes(&key.0)?.ok()
    }

    pub fn decode<C>(d: &mut Decoder<'_>, _: &mut C) -> Result<Key, decode::Error> {
        let position = d.position();
        Key::from_slice(d.bytes()?)
            .ok_or_else(|| decode::Error::message("a key has 64 bytes").at(position))
    }
}

/// Many keys, as one CBOR byte string.
mod keys_bytes {
    use super::*;

    pub fn encode<C, W: encode::Write>(
        keys: &[Key],
        e: &mut Encoder<W>,
        _: &mut C,
    ) -> Result<(), encode::Error<W::Error>> {
        let all: Vec<u8> = keys.iter().flat_map(|key| key.0).collect();
        e.bytes(&all)?.ok()
    }

    pub fn decode<C>(d: &mut Decoder<'_>, _: &mut C) -> Result<Vec<Key>, decode::Error> {
        let bytes = d.bytes()?;
        if !bytes.len().is_multiple_of(64) || bytes.len() / 64 > MAX_RENEW_KEYS {
            return Err(decode::Error::message("not a list of keys"));
        }
        Ok(bytes.chunks(64).map(|key| Key::from_slice(key).expect("64 bytes")).collect())
    }
}

/// One element for each block of a message.
pub type Batch<T> = Capped<T, MAX_BATCH_BLOCKS>;

/// A block's description; its bytes are the part of the same number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct BlockHeader {
    /// Where it lives.
    #[cbor(n(0), with = "key_bytes")]
    pub key: Key,
    /// The number of its [`BlockKind`].
    #[n(1)]
    pub kind: u8,
    /// Seconds its lease still has.
    #[n(2)]
    pub lease_secs: u64,
}

impl BlockHeader {
    /// The block's kind, or a refusal.
    pub fn block_kind(&self) -> Result<BlockKind, Refusal> {
        BlockKind::from_u8(self.kind).map_err(|e| Refusal::new(Refusal::MALFORMED, e.to_string()))
    }
}

/// `LOOKUP_STEP`: is the block here, and if not, who is nearer?
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct LookupStep {
    /// What is looked for.
    #[cbor(n(0), with = "key_bytes")]
    pub key: Key,
    /// The asker takes this node for the root or one of its replicas.
    #[n(1)]
    pub as_root: bool,
    /// A cached copy will do; a signed block's at most so many milliseconds old.
    #[n(2)]
    pub cached_ms: Option<u64>,
}

/// The answer to a [`LookupStep`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LookupReply {
    /// COMPLETE: a cached copy of the block is the reply's only part.
    Cached {
        /// What it is.
        header: BlockHeader,
        /// How long ago a replica had it, milliseconds.
        age_ms: u64,
    },
    /// CONTINUE: ask there; and this node would cache a copy of the block.
    Wanted(Route),
    /// COMPLETE: the block is the reply's only part.
    Found(BlockHeader),
    /// CONTINUE: this peer keeps the block for the answerer, which has no room for it.
    There(Peer),
    /// NONEXISTENT: this node is the root and does not have it; its replicas follow.
    Absent(Vec<Node>),
    /// CONTINUE: ask there.
    Route(Route),
}

#[derive(Encode, Decode)]
#[cbor(map)]
struct WireLookupReply {
    #[n(0)]
    found: Option<BlockHeader>,
    #[n(1)]
    absent: Option<WireNodes>,
    #[n(2)]
    route: Option<WireRoute>,
    #[n(3)]
    age_ms: Option<u64>,
    #[n(4)]
    wanted: Option<bool>,
    #[n(5)]
    there: Option<WirePeer>,
}

impl<C> Encode<C> for LookupReply {
    fn encode<W: encode::Write>(
        &self,
        e: &mut Encoder<W>,
        ctx: &mut C,
    ) -> Result<(), encode::Error<W::Error>> {
        let none = WireLookupReply {
            found: None,
            absent: None,
            route: None,
            age_ms: None,
            wanted: None,
            there: None,
        };
        let wire = match self.clone() {
            LookupReply::Cached { header, age_ms } => {
                WireLookupReply { found: Some(header), age_ms: Some(age_ms), ..none }
            }
            LookupReply::Wanted(route) => {
                WireLookupReply { route: Some(WireRoute(route)), wanted: Some(true), ..none }
            }
            LookupReply::Found(header) => WireLookupReply { found: Some(header), ..none },
            LookupReply::There(holder) => WireLookupReply { there: Some(WirePeer(holder)), ..none },
            LookupReply::Absent(nodes) => {
                WireLookupReply { absent: Some(WireNodes(nodes)), ..none }
            }
            LookupReply::Route(route) => WireLookupReply { route: Some(WireRoute(route)), ..none },
        };
        wire.encode(e, ctx)
    }
}

impl<'b, C> Decode<'b, C> for LookupReply {
    fn decode(d: &mut Decoder<'b>, ctx: &mut C) -> Result<Self, decode::Error> {
        let wire = WireLookupReply::decode(d, ctx)?;
        let wanted = wire.wanted == Some(true);
        match (wire.found, wire.absent, wire.route, wire.there) {
            (Some(header), None, None, None) => Ok(match wire.age_ms {
                Some(age_ms) => LookupReply::Cached { header, age_ms },
                None => LookupReply::Found(header),
            }),
            (None, Some(nodes), None, None) => Ok(LookupReply::Absent(nodes.0)),
            (None, None, Some(route), None) if wanted => Ok(LookupReply::Wanted(route.0)),
            (None, None, Some(route), None) => Ok(LookupReply::Route(route.0)),
            (None, None, None, Some(holder)) => Ok(LookupReply::There(holder.0)),
            _ => Err(decode::Error::message("not one of found, absent, there and a route")),
        }
    }
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
}

impl From<OverQuota> for PutStatus {
    fn from(over: OverQuota) -> PutStatus {
        let OverQuota { used_bytes, allowed_bytes, of } = over;
        PutStatus::OverQuota { used_bytes, allowed_bytes, of }
    }
}

/// Whether a majority has a block. Both numbers may be a peer's, so any.
pub(crate) fn is_majority(copies: u32, wanted: u32) -> bool {
    u64::from(copies) * 2 > u64::from(wanted)
}

/// The answer to a [`Put`]: one status per block.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct PutReply {
    /// In the order of the request.
    #[n(0)]
    pub statuses: Batch<PutStatus>,
}

/// `FETCH`: send these blocks.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Fetch {
    /// Which blocks.
    #[cbor(n(0), with = "keys_bytes")]
    pub keys: Vec<Key>,
}

/// The answer to a [`Fetch`]: those held, as many as fit one message.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct FetchReply {
    /// What the parts are.
    #[n(0)]
    pub blocks: Batch<BlockHeader>,
    /// Those that other nodes keep for this one.
    #[n(1)]
    pub there: Batch<There>,
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

/// `RECONCILE`: compare ranges.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reconcile {
    /// What the sender has.
    pub claims: Vec<Claim>,
}

/// The answer to a [`Reconcile`]: one answer per claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReconcileReply {
    /// In the order of the request.
    pub answers: Vec<Answer>,
}

#[derive(Encode, Decode)]
#[cbor(map)]
struct WireClaim {
    #[cbor(n(0), with = "key_bytes")]
    after: Key,
    #[cbor(n(1), with = "key_bytes")]
    upto: Key,
    #[cbor(n(2), with = "minicbor::bytes")]
    digest: [u8; 32],
    #[n(3)]
    count: u64,
}

impl From<&Claim> for WireClaim {
    fn from(claim: &Claim) -> WireClaim {
        WireClaim {
            after: claim.range.after,
            upto: claim.range.upto,
            digest: claim.summary.digest,
            count: claim.summary.count,
        }
    }
}

impl From<WireClaim> for Claim {
    fn from(wire: WireClaim) -> Claim {
        Claim {
            range: KeyRange::new(wire.after, wire.upto),
            summary: Summary { digest: wire.digest, count: wire.count },
        }
    }
}

#[derive(Encode, Decode)]
#[cbor(map)]
struct WireReconcile {
    #[n(0)]
    claims: Capped<WireClaim, MAX_CLAIMS>,
}

/// Items as one byte string of 72 bytes each.
#[derive(Encode, Decode)]
#[cbor(map)]
struct WireAnswer {
    #[cbor(n(0), with = "minicbor::bytes")]
    items: Option<Vec<u8>>,
    #[n(1)]
    parts: Capped<WireClaim, MAX_PARTS>,
    #[cbor(n(2), with = "minicbor::bytes")]
    upto: Option<Vec<u8>>,
}

const ITEM_BYTES: usize = 72;

fn items_to_bytes(items: &[Item]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(items.len() * ITEM_BYTES);
    for item in items {
        bytes.extend_from_slice(&item.key.0);
        bytes.extend_from_slice(&item.version.to_be_bytes());
    }
    bytes
}

fn items_from_bytes(bytes: &[u8]) -> Result<Vec<Item>, decode::Error> {
    if !bytes.len().is_multiple_of(ITEM_BYTES) || bytes.len() / ITEM_BYTES > MAX_ITEMS {
        return Err(decode::Error::message("not a list of items"));
    }
    let item = |chunk: &[u8]| Item {
        key: Key::from_slice(&chunk[..64]).expect("64 bytes"),
        version: u64::from_be_bytes(chunk[64..].try_into().expect("8 bytes")),
    };
    Ok(bytes.chunks(ITEM_BYTES).map(item).collect())
}

impl<C> Encode<C> for Reconcile {
    fn encode<W: encode::Write>(
        &self,
        e: &mut Encoder<W>,
        ctx: &mut C,
    ) -> Result<(), encode::Error<W::Error>> {
        let claims = Capped(self.claims.iter().map(WireClaim::from).collect());
        WireReconcile { claims }.encode(e, ctx)
    }
}

impl<'b, C> Decode<'b, C> for Reconcile {
    fn decode(d: &mut Decoder<'b>, ctx: &mut C) -> Result<Self, decode::Error> {
        let wire = WireReconcile::decode(d, ctx)?;
        let claims = wire.claims.0.into_iter().map(Claim::from).collect();
        Ok(Reconcile { claims })
    }
}

impl<C> Encode<C> for ReconcileReply {
    fn encode<W: encode::Write>(
        &self,
        e: &mut Encoder<W>,
        ctx: &mut C,
    ) -> Result<(), encode::Error<W::Error>> {
        e.array(self.answers.len() as u64)?;
        for answer in &self.answers {
            let none = WireAnswer { items: None, parts: Capped(Vec::new()), upto: None };
            let wire = match answer {
                Answer::Same => none,
                Answer::Items(items) => WireAnswer { items: Some(items_to_bytes(items)), ..none },
                Answer::Parts(parts) => WireAnswer {
                    parts: Capped(parts.iter().map(WireClaim::from).collect()),
                    ..none
                },
                Answer::Some { items, upto } => WireAnswer {
                    items: Some(items_to_bytes(items)),
                    upto: Some(upto.0.to_vec()),
                    ..none
                },
            };
            wire.encode(e, ctx)?;
        }
        Ok(())
    }
}

impl<'b, C> Decode<'b, C> for ReconcileReply {
    fn decode(d: &mut Decoder<'b>, ctx: &mut C) -> Result<Self, decode::Error> {
        let Capped(wires) = Capped::<WireAnswer, MAX_CLAIMS>::decode(d, ctx)?;
        let mut answers = Vec::new();
        for wire in wires {
            let items = wire.items.as_deref().map(items_from_bytes).transpose()?;
            answers.push(match (items, wire.upto) {
                (Some(items), Some(upto)) => Answer::Some {
                    items,
                    upto: Key::from_slice(&upto)
                        .ok_or_else(|| decode::Error::message("a key has 64 bytes"))?,
                },
                (Some(items), None) => Answer::Items(items),
                (None, None) if wire.parts.0.is_empty() => Answer::Same,
                (None, None) => Answer::Parts(wire.parts.0.into_iter().map(Claim::from).collect()),
                (None, Some(_)) => return Err(decode::Error::message("an end without items")),
            });
        }
        Ok(ReconcileReply { answers })
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Debug;

    use atoll_net::header::with_later_fields;
    use proptest::prelude::*;

    use super::*;
    use crate::accounting::receipt::{Receipt, SimulatedKeys};

    fn round_trip<T: Encode<()> + for<'b> Decode<'b, ()> + PartialEq + Debug>(message: T) {
        let header = to_header(&message);
        assert_eq!(from_header::<T>(&header).as_ref(), Ok(&message));
        for cut in 0..header.len() {
            assert!(from_header::<T>(&header[..cut]).is_err(), "cut at {cut}: {message:?}");
        }
        let mut longer = header.to_vec();
        longer.push(0);
        assert!(from_header::<T>(&longer).is_err(), "trailing byte: {message:?}");
        let later = with_later_fields(&header);
        assert_eq!(from_header::<T>(&later).as_ref(), Ok(&message), "fields of a later version");
    }

    fn key(n: u8) -> Key {
        Key::hashed([n; 32])
    }

    fn node(n: u8, addr: &str) -> Node {
        Node::of(atoll_net::Peer {
            id: atoll_key::PeerId([n; 32]),
            addr: addr.parse().expect("an address"),
        })
    }

    #[test]
    fn every_message_reads_back_and_no_prefix_of_it_does() {
        let header = BlockHeader { key: key(1), kind: 1, lease_secs: 77 };
        let nodes = vec![node(1, "127.0.0.1:1"), node(2, "[::1]:2")];
        round_trip(LookupStep { key: key(1), as_root: true, cached_ms: None });
        round_trip(LookupStep { key: key(1), as_root: false, cached_ms: Some(1 << 40) });
        round_trip(LookupReply::Cached { header, age_ms: 0 });
        round_trip(LookupReply::Wanted(Route::Root(nodes.clone())));
        round_trip(CacheCopy { block: header });
        round_trip(CacheReply { taken: true });
        round_trip(LookupReply::Found(header));
        round_trip(LookupReply::Absent(nodes.clone()));
        round_trip(LookupReply::Absent(Vec::new()));
        round_trip(LookupReply::Route(Route::Root(nodes.clone())));
        round_trip(LookupReply::Route(Route::closer(nodes.clone())));
        round_trip(LookupReply::Route(Route::NotRoot(nodes[0])));
        round_trip(LookupReply::Route(Route::Nowhere));
        let publisher = node(3, "10.0.0.1:7").peer;
        let keys = [key(1), key(2)];
        let receipt =
            Receipt::sign(&SimulatedKeys(publisher.id), publisher, 5, 6, keys.into_iter());
        let [whole, part] = [2, 1].map(|n| Some(receipt.to_wire(keys.into_iter().take(n))));
        for receipt in [None, whole.clone(), part] {
            round_trip(Put { blocks: vec![header; 3].into(), as_root: true, receipt });
        }
        let statuses = vec![
            PutStatus::Stored { copies: 2, wanted: 3 },
            PutStatus::NotRoot,
            PutStatus::Superseded { held: 9 },
            PutStatus::Invalid,
            PutStatus::Full,
            PutStatus::Failed,
            PutStatus::OverQuota { used_bytes: 1, allowed_bytes: 2, of: QuotaOf::Address },
        ];
        round_trip(PutReply { statuses: statuses.into() });
        for receipt in [None, whole] {
            let names = keys.iter().map(Name::of).collect();
            round_trip(Renew { names, lease_secs: 5, as_root: false, receipt });
        }
        let over = OverQuota { used_bytes: 1, allowed_bytes: 2, of: QuotaOf::Key };
        for over in [None, Some(over)] {
            round_trip(RenewReply { held: vec![0, 1, 2], over });
        }
        round_trip(Confirm { nonce: [1; 16], digest: [2; 32] });
        round_trip(ConfirmReply { nonce: [1; 16], is_mine: true });
        round_trip(AskRoom { publisher: [1; 16], ip: [2; 16], bytes: 3, is_root: true });
        for over in [None, Some(over)] {
            round_trip(AskRoomReply { over });
        }
        round_trip(Vouch { keys: keys.to_vec() });
        let one = Vouched {
            version: 1,
            lease_secs: 2,
            publisher: [3; 16],
            ip: [4; 16],
            holder: Some([5; 32]),
        };
        let here = Vouched { holder: None, ..one };
        round_trip(VouchReply { vouched: vec![Some(one), Some(here), None].into() });
        round_trip(Prove { nonce: [5; 32], keys: keys.to_vec() });
        let proof = Proof { version: 1, lease_secs: 2, mac: [3; 32] };
        round_trip(ProveReply { proofs: vec![Some(proof), None].into() });
        round_trip(Fetch { keys: vec![key(9)] });
        let there = There { key: key(9), holder: WirePeer(publisher) };
        round_trip(FetchReply { blocks: vec![header].into(), there: vec![there].into() });
        round_trip(LookupReply::There(publisher));
        round_trip(Divert { blocks: vec![header].into(), receipt: None });
        round_trip(DivertReply {
            statuses: vec![PutStatus::Full, PutStatus::Failed].into(),
            held: vec![Some(one), None].into(),
            spare_bytes: 7,
        });
        round_trip(Hold { keys: keys.to_vec(), keep: true });
        round_trip(HoldReply { held: vec![Some(one), None].into(), spare_bytes: 7 });
        let summary = Summary { digest: [12; 32], count: 3 };
        let claim = Claim { range: KeyRange::new(key(1), key(2)), summary };
        round_trip(Reconcile { claims: vec![claim; 2] });
        let items = vec![Item { key: key(3), version: 4 }];
        round_trip(ReconcileReply {
            answers: vec![
                Answer::Same,
                Answer::Items(items.clone()),
                Answer::Items(Vec::new()),
                Answer::Parts(vec![claim; 2]),
                Answer::Some { items, upto: key(5) },
            ],
        });
    }

    #[test]
    fn a_list_longer_than_its_cap_is_refused_before_it_is_read() {
        let header = BlockHeader { key: key(1), kind: 1, lease_secs: 77 };
        let blocks = vec![header; MAX_BATCH_BLOCKS + 1].into();
        let many = Put { blocks, as_root: true, receipt: None };
        assert!(from_header::<Put>(&to_header(&many)).is_err());
        // A map whose field 0 is an array that claims 2^40 elements and has none.
        let lying = [0xa1, 0x00, 0x9b, 0, 0, 1, 0, 0, 0, 0, 0];
        assert!(from_header::<Put>(&lying).is_err());
        assert!(from_header::<PutReply>(&lying).is_err());
    }

    #[test]
    fn a_ring_position_cannot_be_claimed_only_a_key() {
        let honest = node(1, "127.0.0.1:1");
        let liar = Node { id: node(2, "127.0.0.1:1").id, ..honest };
        let header = to_header(&LookupReply::Absent(vec![liar]));
        assert_eq!(from_header(&header), Ok(LookupReply::Absent(vec![honest])));
    }

    proptest! {
        #[test]
        fn any_bytes_decode_or_fail_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let _ = from_header::<LookupStep>(&bytes);
            let _ = from_header::<LookupReply>(&bytes);
            let _ = from_header::<Put>(&bytes);
            let _ = from_header::<PutReply>(&bytes);
            let _ = from_header::<Renew>(&bytes);
            let _ = from_header::<RenewReply>(&bytes);
            let _ = from_header::<WireReceipt>(&bytes);
            let _ = from_header::<Confirm>(&bytes);
            let _ = from_header::<ConfirmReply>(&bytes);
            let _ = from_header::<AskRoom>(&bytes);
            let _ = from_header::<AskRoomReply>(&bytes);
            let _ = from_header::<Vouch>(&bytes);
            let _ = from_header::<VouchReply>(&bytes);
            let _ = from_header::<Fetch>(&bytes);
            let _ = from_header::<Prove>(&bytes);
            let _ = from_header::<ProveReply>(&bytes);
            let _ = from_header::<CacheCopy>(&bytes);
            let _ = from_header::<CacheReply>(&bytes);
            let _ = from_header::<FetchReply>(&bytes);
            let _ = from_header::<Divert>(&bytes);
            let _ = from_header::<DivertReply>(&bytes);
            let _ = from_header::<Hold>(&bytes);
            let _ = from_header::<HoldReply>(&bytes);
            let _ = from_header::<Reconcile>(&bytes);
            let _ = from_header::<ReconcileReply>(&bytes);
        }
    }
}
