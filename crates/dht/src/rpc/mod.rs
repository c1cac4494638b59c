//! What nodes say to each other about blocks: one table of methods, and everything that follows
//! from it.
//!
//! [`method_table!`](crate::method_table) lists each method with its number, the types of its
//! request and reply, its limits, the time a caller waits, and which peers may call. From the table follow the
//! [`Method`] implementations, reading requests ([`read_request`]), checking replies ([`send`]),
//! the server's dispatch, the fuzz target and the table in `docs/design/wire.md` (a test compares
//! the two). Nothing outside this folder builds a request or checks the length of a reply.
//!
//! Headers are CBOR with numbered fields (minicbor), so fields can be added; blocks travel beside
//! the header as parts, one for each block in the order of the header's entries. Leases are sent
//! as the seconds that remain, so that clocks which disagree do not lose data.
//!
//! **Invariant:** decoding allocates no more than the header that has arrived justifies: every
//! list has a cap, checked before it is read.
//!
//! It does not know what a method does.

pub(crate) mod backoff;
pub(crate) mod budget;
mod call;
mod charging;
mod diversion;
mod encoding;
mod lookup;
mod proving;
mod put;
pub(crate) mod put_times;
pub(crate) mod quorum;
mod receipt;
mod reconcile;
mod renewal;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use atoll_key::MAX_BLOCK_BYTES;
use atoll_net::header::Capped;
pub use atoll_net::header::{from_header, to_header};
use atoll_net::{CallError, Peer, Refusal, Reply, Request, Transport};
use bytes::Bytes;
use minicbor::{Decode, Encode};

pub(crate) use call::Answered;
pub use charging::{
    AskRoom, AskRoomReply, Confirm, ConfirmReply, OverQuota, QuotaOf, Vouch, VouchReply, Vouched,
};
pub use diversion::{Divert, DivertReply, Diverted, Hold, HoldReply};
pub use lookup::{CacheCopy, CacheReply, LookupReply, LookupStep};
pub use proving::{Proof, Prove, ProveReply};
pub(crate) use put::{Block, from_blocks, to_blocks};
pub use put::{BlockHeader, Fetch, FetchReply, Put, PutReply, PutStatus, There};
pub use receipt::WireReceipt;
pub use reconcile::{Answer, Claim, Item, MAX_ITEMS, Reconcile, ReconcileReply, Summary};
pub use renewal::{NAME_BYTES, Name, Renew, RenewReply, RenewStatus};

use crate::context::{Context, layer_above};
pub(crate) use crate::expected_replicas::is_majority;
use backoff::Backoff;
use put_times::PutTimes;
use quorum::Background;

/// What calls to peers have shown of them.
pub(crate) struct Rpc {
    context: Context,
    /// Peers left alone for a while.
    pub backoff: Backoff,
    /// How long puts may take.
    pub put_times: Arc<PutTimes>,
    /// Calls of puts that no caller waits for any more.
    pub background: Background,
}
layer_above!(Rpc, context: Context);

impl Rpc {
    pub fn new(context: Context) -> Rpc {
        let (backoff, put_times) = (Backoff::default(), Arc::default());
        Rpc { context, backoff, put_times, background: Background::default() }
    }
}

/// The most blocks in one message.
pub const MAX_BATCH_BLOCKS: usize = 256;
/// The most keys, or names, in one message.
pub const MAX_KEYS: usize = 1024;
/// The most claims in one `RECONCILE`.
pub const MAX_CLAIMS: usize = 64;
/// The most bytes of blocks in one message: as much as a frame holds.
const MAX_BATCH_BYTES: usize = 4 << 20;

/// One element for each block of a message.
pub type Batch<T> = Capped<T, MAX_BATCH_BLOCKS>;

/// The table of methods: gives its rows to the macro `$with`.
#[doc(hidden)]
#[macro_export]
macro_rules! method_table {
    ($with:ident) => {
        $with! {
            /// CFS Figure 5's `lookup_step`: the block, or where to ask next.
            LOOKUP_STEP = 0x0201: LookupStep => LookupReply, {
                entries: 0, answers: UpToOneEach, part_bytes: (0, MAX_BLOCK_BYTES),
                time: Lookup, caller: Member
            };
            /// Store blocks, as their root or as a replica.
            PUT = 0x0202: Put => PutReply, {
                entries: MAX_BATCH_BLOCKS, answers: OneEach, part_bytes: (MAX_BATCH_BYTES, 0),
                time: Call, caller: Member
            };
            /// Extend leases and learn which blocks are held.
            RENEW = 0x0203: Renew => RenewReply, {
                entries: MAX_KEYS, answers: OneEach, part_bytes: (0, 0),
                time: Call, caller: Publisher
            };
            /// Compare key ranges.
            RECONCILE = 0x0204: Reconcile => ReconcileReply, {
                entries: MAX_CLAIMS, answers: First, part_bytes: (0, 0),
                time: Compare, caller: Metered
            };
            /// Fetch blocks by key from a replica.
            FETCH = 0x0205: Fetch => FetchReply, {
                entries: MAX_BATCH_BLOCKS, answers: UpToOneEach, part_bytes: (0, MAX_BATCH_BYTES),
                time: Call, caller: Member
            };
            /// Ask a publisher whether it made a receipt.
            CONFIRM = 0x0206: Confirm => ConfirmReply, {
                entries: 0, answers: OneEach, part_bytes: (0, 0),
                time: Half, caller: Member
            };
            /// Ask which of some blocks are held, and whom they are charged to.
            VOUCH = 0x0207: Vouch => VouchReply, {
                entries: MAX_KEYS, answers: OneEach, part_bytes: (0, 0),
                time: Quarter, caller: Member
            };
            /// Send a copy of a block for the cache (CFS §5.2).
            CACHE = 0x0208: CacheCopy => CacheReply, {
                entries: 0, answers: OneEach, part_bytes: (MAX_BLOCK_BYTES, 0),
                time: Call, caller: Member
            };
            /// Ask a replica whether a publisher may put more.
            ROOM = 0x0209: AskRoom => AskRoomReply, {
                entries: 0, answers: OneEach, part_bytes: (0, 0),
                time: Quarter, caller: Member
            };
            /// Ask for proof that blocks are held.
            PROVE = 0x020A: Prove => ProveReply, {
                entries: MAX_KEYS, answers: First, part_bytes: (0, 0),
                time: Call, caller: Metered
            };
            /// Keep copies for a replica that has no room (PAST §3.3).
            DIVERT = 0x0210: Divert => DivertReply, {
                entries: MAX_BATCH_BLOCKS, answers: OneEach, part_bytes: (MAX_BATCH_BYTES, 0),
                time: Call, caller: Member
            };
            /// Ask for copies kept so, and for how many more there is room.
            HOLD = 0x0211: Hold => HoldReply, {
                entries: MAX_KEYS, answers: OneEach, part_bytes: (0, 0),
                time: Call, caller: Member
            };
        }
    };
}

/// A row of the table.
#[derive(Clone, Copy, Debug)]
pub struct Spec {
    /// What it is called.
    pub name: &'static str,
    /// Its number in a frame.
    pub number: u16,
    /// The type of the request.
    pub request: &'static str,
    /// The type of the reply.
    pub reply: &'static str,
    /// The most entries (blocks, keys, names or claims) of a request; 0 if it has no list.
    pub entries: usize,
    /// How many of them a reply answers.
    pub answers: Answers,
    /// The most bytes of the parts of a request, and of a reply.
    pub part_bytes: (usize, usize),
    /// How long a caller waits.
    pub time: TimeLimit,
    /// Which peers may call it.
    pub caller: Caller,
}

/// How many entries of a request its reply answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answers {
    /// Each, in its order.
    OneEach,
    /// The first of them, at least one; the caller asks again about the others.
    First,
    /// Any of them, in any order.
    UpToOneEach,
}

/// How long a caller waits for a reply. A caller may have less time for other reasons.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TimeLimit {
    /// What the peer book expects of this peer's short answers: a lookup meets several dead nodes
    /// when many have failed at once.
    Lookup,
    /// `call_limit` of the configuration.
    Call,
    /// Half of it: another caller waits for this one.
    Half,
    /// A quarter of it: the question is one of several on the way to an answer that another
    /// caller waits for. A peer that takes longer is not taken for failed.
    Quarter,
    /// [`COMPARE_LIMIT`].
    Compare,
}

/// How long an answer to a comparison is waited for. A guess: a store that has just been opened
/// reads all blocks of the range, a million in a second, and the other side may be busy.
pub const COMPARE_LIMIT: Duration = Duration::from_secs(40);

/// Which peers may call a method. All are members of the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caller {
    /// Every one.
    Member,
    /// A member that sends a publisher's receipt.
    Publisher,
    /// A member for which not too much work was done of late (`server::work_limit`).
    Metered,
}

/// A header, of a request or of a reply.
pub trait Message: Encode<()> + for<'b> Decode<'b, ()> + Send + Sync + 'static {
    /// How many blocks, keys, names or claims it is about.
    fn entries(&self) -> usize {
        0
    }

    /// How many parts go with it.
    fn parts(&self) -> usize {
        0
    }

    /// Whether it carries a publisher's receipt, where one is required.
    fn is_signed_by_publisher(&self) -> bool {
        false
    }
}

/// A request of the table.
pub trait Method: Message {
    /// What answers it.
    type Reply: Message;
    /// Its row.
    const SPEC: Spec;
}

macro_rules! define_methods {
    ($($(#[$doc:meta])* $NUMBER:ident = $number:literal: $Request:ident => $Reply:ident, {
        entries: $entries:expr, answers: $answers:ident, part_bytes: $part_bytes:expr,
        time: $time:ident, caller: $caller:ident
    };)*) => {
        $($(#[$doc])* pub const $NUMBER: u16 = $number;

        impl Method for $Request {
            type Reply = $Reply;
            const SPEC: Spec = Spec {
                name: stringify!($NUMBER),
                number: $number,
                request: stringify!($Request),
                reply: stringify!($Reply),
                entries: $entries,
                answers: Answers::$answers,
                part_bytes: $part_bytes,
                time: TimeLimit::$time,
                caller: Caller::$caller,
            };
        })*

        /// All methods, by number.
        pub const METHODS: &[Spec] = &[$($Request::SPEC),*];
    };
}
method_table!(define_methods);

/// A request on the wire.
pub fn to_request<M: Method>(header: &M, parts: Vec<Bytes>) -> Request {
    assert!(header.entries() <= M::SPEC.entries, "{} has too many entries", M::SPEC.name);
    Request { method: M::SPEC.number, header: to_header(header), parts }
}

/// Reads a request and checks it against its row of the table.
///
/// # Errors
/// If it is malformed, or breaks a limit.
pub fn read_request<M: Method>(request: Request) -> Result<(M, Vec<Bytes>), Refusal> {
    let header: M = from_header(&request.header)?;
    if header.entries() > M::SPEC.entries {
        return Err(malformed(format_args!("{} entries are too many", header.entries())));
    }
    check_parts(&header, &request.parts, M::SPEC.part_bytes.0)?;
    Ok((header, request.parts))
}

/// Reads a reply to a request with so many entries and checks it against its row of the table.
///
/// # Errors
/// If it is malformed, breaks a limit, or does not answer the request.
pub fn read_reply<M: Method>(
    entries: usize,
    reply: Reply,
) -> Result<(M::Reply, Vec<Bytes>), Refusal> {
    let header: M::Reply = from_header(&reply.header)?;
    let answered = header.entries();
    let is_answer = match M::SPEC.answers {
        Answers::OneEach => answered == entries,
        Answers::First => (1..=entries).contains(&answered),
        Answers::UpToOneEach => answered <= entries,
    };
    if !is_answer {
        return Err(malformed(format_args!("{answered} answers to {entries} questions")));
    }
    check_parts(&header, &reply.parts, M::SPEC.part_bytes.1)?;
    Ok((header, reply.parts))
}

fn check_parts(header: &impl Message, parts: &[Bytes], most_bytes: usize) -> Result<(), Refusal> {
    if header.parts() != parts.len() {
        return Err(malformed(format_args!(
            "{} blocks announced, {} sent",
            header.parts(),
            parts.len()
        )));
    }
    let bytes: usize = parts.iter().map(Bytes::len).sum();
    if bytes > most_bytes {
        return Err(malformed(format_args!("{bytes} bytes of blocks are too many")));
    }
    Ok(())
}

pub(crate) fn malformed(text: impl fmt::Display) -> Refusal {
    Refusal::new(Refusal::MALFORMED, text.to_string())
}

/// Sends a request and reads the reply, whatever that says of the peer.
pub(crate) fn send<M: Method>(
    transport: &dyn Transport,
    to: Peer,
    header: &M,
    parts: Vec<Bytes>,
    limit: Duration,
) -> impl Future<Output = Result<(M::Reply, Vec<Bytes>), CallError>> + Send + Unpin + 'static {
    let entries = header.entries();
    let call = transport.call(to, to_request(header, parts), limit);
    Box::pin(async move { Ok(read_reply::<M>(entries, call.await?)?) })
}

#[cfg(test)]
mod tests {
    use std::fmt::Debug;

    use atoll_key::{BlockKind, Key, KeyRange};
    use atoll_net::header::with_later_fields;
    use atoll_overlay::{Node, Route};
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
        let header = BlockHeader { key: key(1), kind: BlockKind::Content, lease_secs: 77 };
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
        let over = super::OverQuota { used_bytes: 1, allowed_bytes: 2, of: QuotaOf::Key };
        use RenewStatus::*;
        let all = [Lacking, Held, NotRoot, Undecided, OverQuota, Late];
        for over in [None, Some(over)] {
            round_trip(RenewReply { statuses: all.to_vec(), over });
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
        let there = There { key: key(9), holder: publisher };
        round_trip(FetchReply { blocks: vec![header].into(), there: vec![there].into() });
        round_trip(LookupReply::There(publisher));
        round_trip(Divert { blocks: vec![header].into(), receipt: None });
        let blocks = vec![
            Diverted { status: PutStatus::Full, held: None },
            Diverted { status: PutStatus::Failed, held: Some(one) },
        ];
        round_trip(DivertReply { blocks: blocks.into(), spare_bytes: 7 });
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
            ]
            .into(),
        });
    }

    #[test]
    fn a_list_longer_than_its_cap_is_refused_before_it_is_read() {
        let header = BlockHeader { key: key(1), kind: BlockKind::Content, lease_secs: 77 };
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

    /// A method with a request of one entry and its reply, for the checks that the table asks for.
    fn put_reply(statuses: usize, parts: usize) -> Reply {
        let header = PutReply { statuses: vec![PutStatus::Full; statuses].into() };
        Reply { header: to_header(&header), parts: vec![Bytes::new(); parts] }
    }

    #[test]
    fn a_reply_that_does_not_answer_its_request_is_refused() {
        assert!(read_reply::<Put>(2, put_reply(2, 0)).is_ok());
        for (answered, parts) in [(1, 0), (3, 0), (0, 0), (2, 1)] {
            let read = read_reply::<Put>(2, put_reply(answered, parts));
            assert!(read.is_err(), "{answered} answers, {parts} parts");
        }
        let proofs = |count: usize| Reply {
            header: to_header(&ProveReply { proofs: vec![None; count].into() }),
            parts: Vec::new(),
        };
        for (count, is_answer) in [(0, false), (1, true), (2, true), (3, false)] {
            assert_eq!(read_reply::<Prove>(2, proofs(count)).is_ok(), is_answer, "{count} of 2");
        }
    }

    #[test]
    fn a_request_whose_parts_are_not_those_announced_or_too_many_bytes_is_refused() {
        let block = BlockHeader { key: key(1), kind: BlockKind::Content, lease_secs: 1 };
        let read = |blocks: usize, parts: Vec<Bytes>| {
            let put = Put { blocks: vec![block; blocks].into(), as_root: false, receipt: None };
            let request = Request { method: PUT, header: to_header(&put), parts };
            read_request::<Put>(request).is_ok()
        };
        let part = Bytes::from(vec![0; 1 << 20]);
        assert!(read(1, vec![part.clone()]) && !read(1, vec![]) && !read(0, vec![part.clone()]));
        assert!(read(4, vec![part.clone(); 4]) && !read(5, vec![part; 5]));
    }

    #[test]
    fn no_two_methods_have_one_number_and_all_have_that_of_blocks() {
        let numbers: std::collections::BTreeSet<u16> = METHODS.iter().map(|m| m.number).collect();
        assert_eq!(numbers.len(), METHODS.len());
        assert!(numbers.iter().all(|number| number >> 8 == 2));
    }

    /// The table as `docs/design/wire.md` shows it.
    fn page() -> String {
        let mut page = String::from(
            "| number | request → reply | entries | a reply answers | bytes of blocks | \
             caller waits | who may call |\n|---|---|---:|---|---|---|---|\n",
        );
        for m in METHODS {
            let answers = match (m.entries, m.answers) {
                (0, _) => "",
                (_, Answers::OneEach) => "each entry",
                (_, Answers::First) => "the first entries, at least one",
                (_, Answers::UpToOneEach) => "any of them",
            };
            let bytes = match m.part_bytes {
                (0, 0) => "none".to_owned(),
                (0, reply) => format!("reply {reply}"),
                (request, _) => format!("request {request}"),
            };
            let time = match m.time {
                TimeLimit::Lookup => "as the peer book expects".to_owned(),
                TimeLimit::Call => "a call".to_owned(),
                TimeLimit::Half => "half a call".to_owned(),
                TimeLimit::Quarter => "a quarter of a call".to_owned(),
                TimeLimit::Compare => format!("{} s", COMPARE_LIMIT.as_secs()),
            };
            let caller = match m.caller {
                Caller::Member => "members",
                Caller::Publisher => "with a receipt",
                Caller::Metered => "members, metered",
            };
            page += &format!(
                "| `{:#06x}` | `{}` → `{}` | {} | {answers} | {bytes} | {time} | {caller} |\n",
                m.number, m.request, m.reply, m.entries,
            );
        }
        page
    }

    #[test]
    fn the_page_shows_the_table() {
        let wire = include_str!("../../../../docs/design/wire.md");
        assert!(wire.contains(&page()), "docs/design/wire.md should have:\n{}", page());
    }

    macro_rules! decode_all {
        ($($(#[$doc:meta])* $NUMBER:ident = $number:literal: $Request:ident => $Reply:ident, $spec:tt;)*) => {
            fn decode_all(bytes: &[u8]) {
                $(let _ = from_header::<$Request>(bytes);
                let _ = from_header::<$Reply>(bytes);)*
            }
        };
    }
    method_table!(decode_all);

    proptest! {
        #[test]
        fn any_bytes_decode_or_fail_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            decode_all(&bytes);
            let _ = from_header::<WireReceipt>(&bytes);
        }
    }
}
