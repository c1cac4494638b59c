//! What nodes say to each other about blocks: one table of methods, and everything that follows
//! from it.
//!
//! [`method_table!`](crate::method_table) lists each method with its number, the types of its
//! request and reply, its limits, the time a caller waits, and which peers may call. From the table
//! follow the [`Method`] implementations, reading requests ([`read_request`]), checking replies
//! ([`send`]), the server's dispatch, the fuzz target and the table in `docs/design/wire.md` (a
//! test compares the two). Nothing outside this folder builds a request or checks the length of a
//! reply.
//!
//! Headers are CBOR with numbered fields (minicbor), so fields can be added; blocks travel beside
//! the header as parts, one for each block in the order of the header's entries. Leases are sent
//! as the seconds that remain, so that clocks which disagree do not lose data.
//!
//! **Invariant:** decoding allocates no more than the header that has arrived justifies: every
//! list has a cap, checked before it is read.
//!
//! It does not know what a method does.

mod background;
pub(crate) mod backoff;
pub(crate) mod budget;
mod call;
mod charging;
mod diversion;
mod encoding;
mod holdings;
mod locking;
mod lookup;
pub(crate) mod overdue;
mod promises;
mod put;
pub(crate) mod put_times;
pub(crate) mod quorum;
mod reading;
mod receipt;
mod reconcile;
mod release;
mod renewal;
mod uses;

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use atoll_env::BoxFuture;
use atoll_key::MAX_BLOCK_BYTES;
use atoll_net::header::Capped;
pub use atoll_net::header::{from_header, to_header};
use atoll_net::{CallError, Peer, Refusal, Reply, Request, Transport};
use bytes::Bytes;
use minicbor::{Decode, Encode};

pub(crate) use call::Answered;
pub use charging::{AskRoom, AskRoomReply, Confirm, ConfirmReply, OverQuota, QuotaOf};
pub use diversion::{Divert, DivertReply, Diverted};
pub use holdings::{AskHoldings, HeldCopy, HoldingsReply, Pointing, Proof, Prove, ProveReply};
pub use locking::{Lock, LockReply, LockStatus};
pub use lookup::{CacheCopy, CacheReply, LookupReply, LookupStep};
pub use promises::{Changed, ChangedReply, MAX_HOLDERS, PromiseHolder, PromisesReply};
pub(crate) use promises::{PROMISE_TIME, promise_time};
pub(crate) use put::{Block, from_blocks, to_blocks};
pub use put::{BlockHeader, Fetch, FetchReply, Put, PutReply, PutStatus, There};
pub(crate) use reading::short_hash;
pub use reading::{Read, ReadReply, Stamp, Watch, WatchReply};
pub use receipt::WireReceipt;
pub use reconcile::{Answer, Claim, Item, MAX_ITEMS, Reconcile, ReconcileReply, Summary};
pub use release::{ReleaseBlocks, ReleaseReply, ReleaseStatus};
pub use renewal::{NAME_BYTES, Name, Renew, RenewReply, RenewStatus};
pub use uses::{AskUses, BlockReader, LockUse, MAX_LOCK_HOLDERS, UsesReply};

use crate::context::{Context, layer_above};
pub(crate) use crate::expected_replicas::{is_majority, leaves_no_majority};
pub(crate) use background::Background;
use backoff::Backoff;
use put_times::PutTimes;
use quorum::MAX_IN_BACKGROUND;

/// Answers a call of this node to itself.
type AnswerOwn = Box<dyn Fn(Request) -> BoxFuture<'static, Result<Reply, Refusal>> + Send + Sync>;

/// Calls, and what they have shown of peers.
pub(crate) struct Rpc {
    context: Context,
    answer_own: OnceLock<AnswerOwn>,
    /// Peers left alone for a while.
    pub backoff: Backoff,
    /// How long puts may take.
    pub put_times: Arc<PutTimes>,
    /// Calls of puts that no caller waits for any more.
    pub background: Background,
}
layer_above!(Rpc, context: Context);

impl Rpc {
    pub(crate) fn new(context: Context) -> Rpc {
        let (backoff, put_times) = (Backoff::default(), Arc::default());
        let (answer_own, background) = (OnceLock::new(), Background::new(MAX_IN_BACKGROUND));
        Rpc { context, answer_own, backoff, put_times, background }
    }

    /// Has calls of this node to itself answered so from now on.
    pub(crate) fn answer_own_by(&self, answer: AnswerOwn) {
        assert!(self.answer_own.set(answer).is_ok(), "a node is built once");
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

#[doc(hidden)]
pub use atoll_key::kinds::MAX_RELEASED;

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
            /// Ask which of some blocks are held, and whom they are charged to or kept for.
            HOLDINGS = 0x0207: AskHoldings => HoldingsReply, {
                entries: MAX_KEYS, answers: OneEach, part_bytes: (0, 0),
                time: Call, caller: Member
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
            /// Ask a replica for its version of a mutable block, and for the block.
            READ = 0x020B: Read => ReadReply, {
                entries: 0, answers: OneEach, part_bytes: (0, MAX_BLOCK_BYTES),
                time: Lookup, caller: Member
            };
            /// Wait for a newer version of a mutable block.
            WATCH = 0x020C: Watch => WatchReply, {
                entries: 0, answers: OneEach, part_bytes: (0, 0),
                time: Watch, caller: Member
            };
            /// A mutable block has changed of which the callee was promised to be told.
            CHANGED = 0x020D: Changed => ChangedReply, {
                entries: 0, answers: OneEach, part_bytes: (0, 0),
                time: Quarter, caller: Member
            };
            /// Take, renew or give up a lock lease.
            LOCK = 0x020E: Lock => LockReply, {
                entries: 0, answers: OneEach, part_bytes: (0, 0),
                time: Lookup, caller: Member
            };
            /// Ask a replica which nodes use a mutable block.
            USES = 0x020F: AskUses => UsesReply, {
                entries: 0, answers: OneEach, part_bytes: (0, 0),
                time: Call, caller: Member
            };
            /// Keep copies for a replica that has no room (PAST §3.3).
            DIVERT = 0x0210: Divert => DivertReply, {
                entries: MAX_BATCH_BLOCKS, answers: OneEach, part_bytes: (MAX_BATCH_BYTES, 0),
                time: Call, caller: Member
            };
            /// Have leases of blocks of an inode's content end sooner.
            RELEASE = 0x0211: ReleaseBlocks => ReleaseReply, {
                entries: MAX_RELEASED, answers: OneEach, part_bytes: (0, 0),
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
    /// As `Call`, after [`WATCH_WAIT`].
    Watch,
}

/// How long a node lets a watcher wait before it says that nothing has changed. A guess: one call
/// each half minute for each replica costs little, and a replica that has left is noticed.
pub const WATCH_WAIT: Duration = Duration::from_secs(30);

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

/// A time as messages have it: whole milliseconds.
pub(crate) fn whole_ms(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
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

/// Messages without parts, and where their entries are.
macro_rules! messages {
    ($($Message:ident$(: $($entries:tt).+)?;)*) => {$(
        impl Message for $Message {
            $(fn entries(&self) -> usize {
                self.$($entries).+.len()
            })?
        }
    )*};
}

messages! {
    RenewReply: statuses;
    ReleaseReply: statuses;
    Reconcile: claims;
    ReconcileReply: answers.0;
    Confirm;
    ConfirmReply;
    AskHoldings: keys;
    HoldingsReply: held.0;
    AskRoom;
    AskRoomReply;
    Prove: keys;
    ProveReply: proofs.0;
    DivertReply: blocks.0;
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
mod tests;
