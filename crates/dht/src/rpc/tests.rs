//! Messages read back, and the table holds.

use std::fmt::Debug;

use atoll_key::{BlockKind, Key, KeyRange};
use atoll_net::header::with_later_fields;
use atoll_overlay::{Node, Route};
use proptest::prelude::*;

use super::*;
use crate::accounting::receipt::{Receipt, SimulatedKeys};
use crate::locks::LockMode;

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

fn header() -> BlockHeader {
    BlockHeader { key: key(1), kind: BlockKind::Content, lease_secs: 77 }
}

fn publisher() -> atoll_net::Peer {
    node(3, "10.0.0.1:7").peer
}

fn promises() -> super::PromisesReply {
    let holder = PromiseHolder { peer: publisher(), number: 8, left_ms: 9 };
    super::PromisesReply {
        promised_ms: Some(2_000),
        holders: vec![holder; 2].into(),
        forgotten_ms: 10,
    }
}

const OVER: super::OverQuota =
    super::OverQuota { used_bytes: 1, allowed_bytes: 2, of: QuotaOf::Key };

const ELSEWHERE: HeldCopy =
    HeldCopy { version: 1, lease_secs: 2, publisher: [3; 16], ip: [4; 16], holder: Some([5; 32]) };

/// Each of these tests: every message reads back, and no prefix of it does.
#[test]
fn messages_of_lookups_read_back() {
    let nodes = vec![node(1, "127.0.0.1:1"), node(2, "[::1]:2")];
    round_trip(LookupStep { key: key(1), as_root: true, may_be_cached: false });
    round_trip(LookupStep { key: key(1), as_root: false, may_be_cached: true });
    round_trip(LookupReply::Cached(header()));
    round_trip(LookupReply::Wanted(Route::Root(nodes.clone())));
    round_trip(CacheCopy { block: header() });
    round_trip(CacheReply { taken: true });
    round_trip(Read { key: key(1), with_bytes: true, promise: Some(u64::MAX) });
    let held = Some(Stamp { version: u64::MAX, digest: 1 });
    round_trip(ReadReply { held, block: Some(header()), set: Some(3), promised_ms: Some(15_000) });
    round_trip(ReadReply::default());
    round_trip(Watch { key: key(1), seen: 7 });
    round_trip(WatchReply { version: Some(8) });
    round_trip(LookupReply::Found(header()));
    round_trip(LookupReply::Absent(nodes.clone()));
    round_trip(LookupReply::Absent(Vec::new()));
    round_trip(LookupReply::Route(Route::Root(nodes.clone())));
    round_trip(LookupReply::Route(Route::closer(nodes.clone())));
    round_trip(LookupReply::Route(Route::NotRoot(nodes[0])));
    round_trip(LookupReply::Route(Route::Nowhere));
    round_trip(LookupReply::There(publisher()));
}

#[test]
fn messages_of_puts_and_renewals_read_back() {
    let (publisher, keys) = (publisher(), [key(1), key(2)]);
    let receipt = Receipt::sign(&SimulatedKeys(publisher.id), publisher, 5, 6, keys.into_iter());
    let [whole, part] = [2, 1].map(|n| Some(receipt.to_wire(keys.into_iter().take(n))));
    for receipt in [None, whole.clone(), part] {
        round_trip(Put {
            blocks: vec![header(); 3].into(),
            as_root: true,
            receipt,
            promises: vec![7, u64::MAX].into(),
        });
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
    round_trip(PutReply {
        statuses: statuses.into(),
        set: Some(u64::MAX),
        promises: vec![promises(); 2].into(),
    });
    round_trip(Changed { key: key(1) });
    round_trip(ChangedReply {});
    for receipt in [None, whole] {
        let names = keys.iter().map(Name::of).collect();
        round_trip(Renew {
            names,
            lease_secs: 5,
            as_root: false,
            receipt,
            will_be_put: Some(true),
        });
    }
    use RenewStatus::*;
    let all = [Lacking, Held, NotRoot, Undecided, OverQuota, Late];
    for over in [None, Some(OVER)] {
        round_trip(RenewReply { statuses: all.to_vec(), over });
    }
}

#[test]
fn messages_of_charging_and_proving_read_back() {
    let keys = [key(1), key(2)];
    round_trip(Confirm { nonce: [1; 16], digest: [2; 32] });
    round_trip(ConfirmReply { nonce: [1; 16], is_mine: true });
    round_trip(AskRoom { publisher: [1; 16], ip: [2; 16], bytes: 3, is_root: true });
    for over in [None, Some(OVER)] {
        round_trip(AskRoomReply { over });
    }
    for pointing in [Pointing::No, Pointing::Yes, Pointing::NoLonger] {
        round_trip(AskHoldings { keys: keys.to_vec(), pointing });
    }
    let held = vec![Some(ELSEWHERE), Some(HeldCopy { holder: None, ..ELSEWHERE }), None].into();
    round_trip(HoldingsReply { held, spare_bytes: 7 });
    round_trip(Prove { nonce: [5; 32], keys: keys.to_vec() });
    let proof = Proof { version: 1, lease_secs: 2, mac: [3; 32] };
    round_trip(ProveReply { proofs: vec![Some(proof), None].into() });
}

#[test]
fn messages_of_uses_read_back() {
    round_trip(AskUses { key: key(1), lock: key(2) });
    let reader = BlockReader { peer: publisher(), left_ms: 15_000 };
    let lock = LockUse { peer_id: [3; 32], mode: LockMode::Exclusive, left_ms: u64::MAX };
    round_trip(UsesReply { readers: vec![reader].into(), locks: vec![lock; 2].into() });
    let header = to_header(&UsesReply { readers: vec![reader; 65].into(), locks: vec![].into() });
    assert!(from_header::<UsesReply>(&header).is_err(), "more readers than there can be");
}

#[test]
fn messages_of_fetching_and_diversion_read_back() {
    round_trip(Fetch { keys: vec![key(9)] });
    let there = There { key: key(9), holder: publisher() };
    round_trip(FetchReply { blocks: vec![header()].into(), there: vec![there].into() });
    round_trip(Divert { blocks: vec![header()].into(), receipt: None });
    let blocks = vec![
        Diverted { status: PutStatus::Full, held: None },
        Diverted { status: PutStatus::Failed, held: Some(ELSEWHERE) },
    ];
    round_trip(DivertReply { blocks: blocks.into(), spare_bytes: 7 });
}

#[test]
fn messages_of_comparing_read_back() {
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
    let many = Put { blocks, as_root: true, receipt: None, promises: Vec::new().into() };
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
    let header = PutReply {
        statuses: vec![PutStatus::Full; statuses].into(),
        set: None,
        promises: Vec::new().into(),
    };
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
        let put = Put {
            blocks: vec![block; blocks].into(),
            as_root: false,
            receipt: None,
            promises: Vec::new().into(),
        };
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
            TimeLimit::Watch => format!("{} s and a call", WATCH_WAIT.as_secs()),
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
