//! What nodes say to each other about blocks.

use std::fmt::Debug;

use atoll_dht::SimulatedKeys;
use atoll_dht::quota::{OverQuota, QuotaOf};
use atoll_dht::receipt::{Receipt, WireReceipt};
use atoll_dht::reconcile::{
    Answer, Claim, Item, Summary, difference, well_formed_items, well_formed_parts,
};
use atoll_dht::rpc::{
    AskRoom, AskRoomReply, BlockHeader, CacheCopy, CacheReply, Confirm, ConfirmReply, Fetch,
    FetchReply, LookupReply, LookupStep, Name, Put, PutReply, PutStatus, Reconcile, ReconcileReply,
    Renew, RenewReply, Vouch, VouchReply, Vouched, from_header, to_header,
};
use atoll_key::KeyRange;
use atoll_overlay::Route;
use minicbor::{Decode, Encode};

use super::{Target, key, node, round_trip, target};

pub fn targets() -> Vec<Target> {
    let header = BlockHeader { key: key(1), kind: 1, lease_secs: 77 };
    let nodes = vec![node(1), node(2)];
    let replies = vec![
        LookupReply::Found(header),
        LookupReply::Cached { header, age_ms: 9 },
        LookupReply::Wanted(Route::closer(nodes.clone())),
        LookupReply::Absent(nodes.clone()),
        LookupReply::Route(Route::Root(nodes.clone())),
        LookupReply::Route(Route::closer(nodes.clone())),
        LookupReply::Route(Route::NotRoot(nodes[0])),
        LookupReply::Route(Route::Nowhere),
    ];
    let statuses = vec![
        PutStatus::Stored { copies: 2, wanted: 3 },
        PutStatus::NotRoot,
        PutStatus::Superseded { held: 9 },
        PutStatus::Invalid,
        PutStatus::Full,
        PutStatus::Failed,
        PutStatus::OverQuota { used_bytes: 7, allowed_bytes: 8, of: QuotaOf::Address },
    ];
    let vouched = Vouched {
        version: 1,
        lease_secs: 2,
        publisher: [3; 16],
        ip: [4; 16],
        holder: Some([5; 32]),
    };
    vec![
        message("dht/lookup-step", vec![step(true, None), step(false, Some(10_000))]),
        message("dht/lookup-reply", replies),
        message("dht/put", puts()),
        target("dht/receipt", encoded(&receipts()[1..]), read_receipt),
        message("dht/put-reply", vec![PutReply { statuses: statuses.into() }]),
        message(
            "dht/renew",
            receipts()
                .into_iter()
                .map(|receipt| Renew {
                    names: [key(1), key(2)].iter().map(Name::of).collect(),
                    lease_secs: 5,
                    as_root: true,
                    receipt,
                })
                .collect(),
        ),
        message("dht/renew-reply", vec![RenewReply { held: vec![0, 1, 2], over: Some(OVER) }]),
        message("dht/confirm", vec![Confirm { nonce: [1; 16], digest: [2; 32] }]),
        message("dht/confirm-reply", vec![ConfirmReply { nonce: [1; 16], is_mine: true }]),
        message("dht/vouch", vec![Vouch { keys: vec![key(1), key(2)] }]),
        message("dht/vouch-reply", vec![VouchReply { vouched: vec![Some(vouched), None].into() }]),
        message(
            "dht/room",
            vec![AskRoom { publisher: [1; 16], ip: [2; 16], bytes: 3, is_root: true }],
        ),
        message(
            "dht/room-reply",
            vec![AskRoomReply { over: None }, AskRoomReply { over: Some(OVER) }],
        ),
        message("dht/fetch", vec![Fetch { keys: vec![key(9), key(8)] }]),
        message(
            "dht/fetch-reply",
            vec![FetchReply { blocks: vec![header].into(), there: Vec::new().into() }],
        ),
        message("dht/cache", vec![CacheCopy { block: header }]),
        message("dht/cache-reply", vec![CacheReply { taken: true }]),
        message("dht/reconcile", vec![Reconcile { claims: vec![claim(), claim()] }]),
        message("dht/reconcile-reply", reconcile_replies()),
        target("dht/reconcile-answers", encoded(&reconcile_replies()), judge_answers),
    ]
}

const OVER: OverQuota = OverQuota { used_bytes: 7, allowed_bytes: 8, of: QuotaOf::Key };

/// No receipt, one for the keys 1 and 2 as the message names them, and one that lists them.
fn receipts() -> Vec<Option<WireReceipt>> {
    let publisher = node(3).peer;
    let keys = [key(1), key(2)];
    let receipt = Receipt::sign(&SimulatedKeys(publisher.id), publisher, 5, 6, keys.into_iter());
    let [whole, part] = [2, 1].map(|count| receipt.to_wire(keys.into_iter().take(count)));
    vec![None, Some(whole), Some(part)]
}

fn puts() -> Vec<Put> {
    let header = BlockHeader { key: key(1), kind: 1, lease_secs: 77 };
    let put = |receipt| Put { blocks: vec![header; 3].into(), as_root: true, receipt };
    receipts().into_iter().map(put).collect()
}

/// A receipt is read, checked and passed on; whatever it says, that allocates no more than
/// it is long. True if it is the one that was signed.
fn read_receipt(input: &[u8]) -> bool {
    let keys = [key(1), key(2)];
    let Ok(Some(wire)) = from_header::<Option<WireReceipt>>(input) else { return false };
    let Ok(receipt) = wire.receipt(keys.into_iter()) else { return false };
    let _ = receipt.covers(&keys);
    let _ = receipt.lease_left_secs(5, u64::MAX);
    let _ = receipt.digest();
    let _ = receipt.to_wire(keys.into_iter());
    receipt.is_signed(&SimulatedKeys(receipt.publisher.id))
}

fn message<T>(name: &'static str, values: Vec<T>) -> Target
where
    T: Encode<()> + for<'b> Decode<'b, ()> + PartialEq + Debug + 'static,
{
    round_trip(name, values, |m| to_header(m).to_vec(), from_header::<T>)
}

fn step(as_root: bool, cached_ms: Option<u64>) -> LookupStep {
    LookupStep { key: key(1), as_root, cached_ms }
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
    vec![ReconcileReply { answers }, ReconcileReply { answers: Vec::new() }]
}

/// What an asker does with a reply before it believes it.
fn judge_answers(input: &[u8]) -> bool {
    let Ok(reply) = from_header::<ReconcileReply>(input) else { return false };
    let ours = [Item { key: claim().range.middle(), version: 1 }];
    for range in [claim().range, KeyRange::full()] {
        for answer in &reply.answers {
            match answer {
                Answer::Items(items) | Answer::Some { items, .. } => {
                    if well_formed_items(range, items) {
                        let found = difference(range, &ours, items);
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
