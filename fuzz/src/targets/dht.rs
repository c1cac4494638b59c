//! What nodes say to each other about blocks: a target for each request and reply of the table.

use std::fmt::Debug;

use atoll_dht::receipt::Receipt;
use atoll_dht::reconcile::{difference, well_formed_items, well_formed_parts};
use atoll_dht::rpc::*;
use atoll_dht::{LockMode, LockStep, SimulatedKeys, method_table};
use atoll_key::{BlockKind, KeyRange};
use atoll_overlay::Route;
use minicbor::{Decode, Encode};

use super::key::releases;
use super::{Target, key, node, round_trip, target};

/// Messages to begin with.
trait Seeds: Sized {
    fn seeds() -> Vec<Self>;
}

macro_rules! seeds {
    ($($Message:ident: $seeds:expr;)*) => {$(
        impl Seeds for $Message {
            fn seeds() -> Vec<$Message> {
                $seeds
            }
        }
    )*};
}

seeds! {
    LookupStep: vec![
        LookupStep { key: key(1), as_root: true, may_be_cached: false },
        LookupStep { key: key(1), as_root: false, may_be_cached: true },
    ];
    LookupReply: vec![
        LookupReply::Found(header()),
        LookupReply::Cached(header()),
        LookupReply::There(node(1).peer),
        LookupReply::Wanted(Route::closer(vec![node(1), node(2)])),
        LookupReply::Absent(vec![node(1), node(2)]),
        LookupReply::Route(Route::Root(vec![node(1), node(2)])),
        LookupReply::Route(Route::closer(vec![node(1), node(2)])),
        LookupReply::Route(Route::NotRoot(node(1))),
        LookupReply::Route(Route::Nowhere),
    ];
    Put: receipts()
        .into_iter()
        .map(|receipt| Put { blocks: vec![header(); 3].into(), as_root: true, receipt, promises: vec![5, 6].into() })
        .collect();
    PutReply: vec![PutReply {
        statuses: statuses().into(),
        set: Some(7),
        promises: vec![PromisesReply {
            promised_ms: Some(15_000),
            holders: vec![PromiseHolder { peer: node(1).peer, number: 8, left_ms: 9 }].into(),
            forgotten_ms: 10,
        }]
        .into(),
    }];
    Read: vec![Read { key: key(1), with_bytes: true, promise: Some(6) }];
    ReadReply: vec![
        ReadReply::default(),
        ReadReply {
            held: Some(Stamp { version: 3, digest: u64::MAX }),
            block: Some(header()),
            set: Some(7),
            promised_ms: Some(2_000),
        },
    ];
    Watch: vec![Watch { key: key(1), seen: 3 }];
    WatchReply: vec![WatchReply { version: Some(4) }, WatchReply { version: None }];
    Changed: vec![Changed { key: key(1) }];
    ChangedReply: vec![ChangedReply {}];
    Lock: [LockStep::Release, LockStep::Take, LockStep::Renew, LockStep::Upgrade]
        .map(|step| Lock {
            key: key(1),
            holder: [2; 16],
            number: u64::MAX,
            step,
            mode: LockMode::Exclusive,
        })
        .into();
    LockReply: vec![
        LockReply { status: LockStatus::Granted, is_wanted: true, set: Some(7), settled: 7 },
        LockReply { status: LockStatus::Minority, is_wanted: false, set: None, settled: 0 },
    ];
    AskUses: vec![AskUses { key: key(1), lock: key(2) }];
    UsesReply: vec![UsesReply {
        readers: vec![BlockReader { peer: node(1).peer, left_ms: 15_000 }].into(),
        locks: vec![LockUse { peer_id: [3; 32], mode: LockMode::Shared, left_ms: 14_999 }].into(),
    }];
    ReleaseBlocks: releases().into_iter().map(|release| ReleaseBlocks { release, is_pointed: false }).collect();
    ReleaseReply: vec![ReleaseReply {
        statuses: vec![ReleaseStatus::Lacking, ReleaseStatus::Released, ReleaseStatus::Refused, ReleaseStatus::PutSince],
    }];
    Renew: receipts()
        .into_iter()
        .map(|receipt| Renew {
            names: [key(1), key(2)].iter().map(Name::of).collect(),
            lease_secs: 5,
            as_root: true,
            receipt,
            will_be_put: Some(true),
        })
        .collect();
    RenewReply: vec![RenewReply {
        statuses: vec![RenewStatus::Lacking, RenewStatus::Held, RenewStatus::NotRoot],
        over: Some(OVER),
    }];
    Reconcile: vec![Reconcile { claims: vec![claim(), claim()] }];
    ReconcileReply: reconcile_replies();
    Fetch: vec![Fetch { keys: vec![key(9), key(8)] }];
    FetchReply: vec![FetchReply {
        blocks: vec![header()].into(),
        there: vec![There { key: key(9), holder: node(1).peer }].into(),
    }];
    Confirm: vec![Confirm { nonce: [1; 16], digest: [2; 32] }];
    ConfirmReply: vec![ConfirmReply { nonce: [1; 16], is_mine: true }];
    AskHoldings: vec![AskHoldings { keys: vec![key(1), key(2)], pointing: Pointing::Yes }];
    HoldingsReply: vec![HoldingsReply { held: vec![Some(HELD), None].into(), spare_bytes: 7 }];
    CacheCopy: vec![CacheCopy { block: header() }];
    CacheReply: vec![CacheReply { taken: true }];
    AskRoom: vec![AskRoom { publisher: [1; 16], ip: [2; 16], bytes: 3, is_root: true }];
    AskRoomReply: vec![AskRoomReply { over: None }, AskRoomReply { over: Some(OVER) }];
    Prove: vec![Prove { nonce: [5; 32], keys: vec![key(1), key(2)] }];
    ProveReply: vec![ProveReply {
        proofs: vec![Some(Proof { version: 1, lease_secs: 2, mac: [3; 32] }), None].into(),
    }];
    Divert: receipts()
        .into_iter()
        .map(|receipt| Divert { blocks: vec![header(); 3].into(), receipt })
        .collect();
    DivertReply: vec![DivertReply {
        blocks: statuses()
            .into_iter()
            .map(|status| Diverted { status, held: Some(HELD) })
            .collect::<Vec<_>>()
            .into(),
        spare_bytes: 7,
    }];
}

macro_rules! define_targets {
    ($($(#[$doc:meta])* $NUMBER:ident = $number:literal: $Request:ident => $Reply:ident, $spec:tt;)*) => {
        fn messages() -> Vec<Target> {
            vec![$(
                message::<$Request>(concat!("dht/", stringify!($Request))),
                message::<$Reply>(concat!("dht/", stringify!($Reply))),
            )*]
        }
    };
}
method_table!(define_targets);

pub(super) fn targets() -> Vec<Target> {
    let mut targets = messages();
    targets.push(target("dht/receipt", encoded(&receipts()[1..]), read_receipt));
    targets.push(target("dht/reconcile-answers", encoded(&reconcile_replies()), judge_answers));
    targets
}

fn message<T>(name: &'static str) -> Target
where
    T: Seeds + Encode<()> + for<'b> Decode<'b, ()> + PartialEq + Debug + 'static,
{
    round_trip(name, T::seeds(), |m| to_header(m).to_vec(), from_header::<T>)
}

fn header() -> BlockHeader {
    BlockHeader { key: key(1), kind: BlockKind::Content, lease_secs: 77 }
}

fn statuses() -> Vec<PutStatus> {
    vec![
        PutStatus::Stored { copies: 2, wanted: 3 },
        PutStatus::NotRoot,
        PutStatus::Superseded { held: 9 },
        PutStatus::Invalid,
        PutStatus::Full,
        PutStatus::Failed,
        PutStatus::OverQuota { used_bytes: 7, allowed_bytes: 8, of: QuotaOf::Address },
    ]
}

const HELD: HeldCopy =
    HeldCopy { version: 1, lease_secs: 2, publisher: [3; 16], ip: [4; 16], holder: Some([5; 32]) };

const OVER: OverQuota = OverQuota { used_bytes: 7, allowed_bytes: 8, of: QuotaOf::Key };

/// No receipt, one for the keys 1 and 2 as the message names them, and one that lists them.
fn receipts() -> Vec<Option<WireReceipt>> {
    let publisher = node(3).peer;
    let keys = [key(1), key(2)];
    let receipt = Receipt::sign(&SimulatedKeys(publisher.id), publisher, 5, 6, keys.into_iter());
    let [whole, part] = [2, 1].map(|count| receipt.to_wire(keys.into_iter().take(count)));
    vec![None, Some(whole), Some(part)]
}

/// A receipt is read, checked and passed on; whatever it says, that allocates no more than
/// it is long. True if it is the one that was signed.
fn read_receipt(input: &[u8]) -> bool {
    let keys = [key(1), key(2)];
    let Ok(Some(wire)) = from_header::<Option<WireReceipt>>(input) else { return false };
    let Ok(receipt) = Receipt::from_wire(wire, keys.into_iter()) else { return false };
    let _ = receipt.covers(&keys);
    let _ = receipt.lease_left_secs(5, u64::MAX);
    let _ = receipt.digest();
    let _ = receipt.to_wire(keys.into_iter());
    receipt.is_signed(&SimulatedKeys(receipt.publisher.id))
}

fn encoded<T: Encode<()>>(messages: &[T]) -> Vec<Vec<u8>> {
    messages.iter().map(|message| to_header(message).to_vec()).collect()
}

/// Of a range whose ends are far from each other.
fn claim() -> Claim {
    let summary = Summary { digest: [12; 32], count: 3 };
    Claim { range: KeyRange::new(key(1), key(2)), summary }
}

fn reconcile_replies() -> Vec<ReconcileReply> {
    let range = claim().range;
    let middle = range.middle();
    let halves = vec![
        Claim { range: KeyRange::new(range.after, middle), ..claim() },
        Claim { range: KeyRange::new(middle, range.upto), ..claim() },
    ];
    let items =
        vec![Item { key: range.after.next(), version: 4 }, Item { key: middle, version: 0 }];
    let answers = vec![
        Answer::Same,
        Answer::Items(items.clone()),
        Answer::Parts(halves),
        Answer::Some { items, upto: middle },
    ];
    vec![ReconcileReply { answers: answers.into() }, ReconcileReply { answers: Vec::new().into() }]
}

/// What an asker does with a reply before it believes it.
fn judge_answers(input: &[u8]) -> bool {
    let Ok(reply) = from_header::<ReconcileReply>(input) else { return false };
    let ours = [Item { key: claim().range.middle(), version: 1 }];
    for range in [claim().range, KeyRange::full()] {
        for answer in &reply.answers.0 {
            match answer {
                Answer::Items(items) | Answer::Some { items, .. } => {
                    if well_formed_items(range, items) {
                        let found = difference(range, &ours, items, |_| true);
                        assert!(found.take.len() <= items.len(), "more to take than was offered");
                    }
                }
                Answer::Parts(parts) => {
                    if well_formed_parts(range, parts) {
                        let inside = parts.iter().all(|part| range.contains(&part.range.upto));
                        assert!(inside, "a part ends outside its range");
                    }
                }
                Answer::Same => {}
            }
        }
    }
    true
}
