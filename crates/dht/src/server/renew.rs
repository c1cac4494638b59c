//! Extending leases (CFS §5.5: "Publishers must periodically refresh their blocks").
//!
//! Whoever extends a block's lease is charged for it from then on, so it takes a receipt, and
//! room if the block was somebody else's.

use std::sync::Arc;

use atoll_key::{BlockKind, Key};
use atoll_net::Refusal;
use atoll_overlay::Node;
use atoll_store::{BlockInfo, Owner, StoreError};
use futures_util::future::join_all;

use crate::accounting::admission::{Origin, added_bytes, expires};
use crate::accounting::attribution::Charge;
use crate::accounting::quota::{Room, Want};
use crate::accounting::receipt::BAD_RECEIPT;
use crate::client::ack_verification::ask_to_renew;
use crate::diversion::{Records, follow};
use crate::inner::Inner;
use crate::replication::store::{expected_replicas, replica_set};
use crate::rpc::put_times::WaitsFor;
use crate::rpc::quorum::{Calls, Event};
use crate::rpc::{Name, Renew, RenewReply, has, is_majority};

/// Extends leases on this node and, as root, at its replicas.
pub(crate) async fn renew_here(
    inner: &Arc<Inner>,
    origin: &Origin,
    renew: &Renew,
) -> Result<RenewReply, Refusal> {
    if !renew.as_root {
        return renew_alone(inner, origin, renew).await;
    }
    let RenewReply { mut held, mut over } = renew_alone(inner, origin, renew).await?;
    let firsts: Vec<Key> = renew.names.iter().map(Name::first).collect();
    let parts = inner.overlay.group_by_own_root(&firsts).into_iter().map(|(root, indices)| {
        let names = indices.iter().map(|index| renew.names[*index]).collect();
        let here = indices.iter().map(|index| held[*index]).collect();
        let part = Renew { names, lease_secs: renew.lease_secs, as_root: false, receipt: None };
        let here = RenewReply { held: here, over };
        async move { (indices, renew_at_replicas(inner, origin, &root, &part, here).await) }
    });
    let answers = join_all(parts).await;
    held.fill(2);
    for (indices, part) in answers {
        over = over.or(part.over);
        for (index, state) in indices.into_iter().zip(part.held) {
            held[index] = state;
        }
    }
    Ok(RenewReply { held, over })
}

/// Extends the leases of the blocks this node holds, itself or at other nodes.
async fn renew_alone(inner: &Inner, origin: &Origin, renew: &Renew) -> Result<RenewReply, Refusal> {
    let resolved: Result<Vec<Option<Key>>, StoreError> =
        renew.names.iter().map(|name| resolve(inner, name)).collect();
    let keys = resolved.map_err(|e| Refusal::new(Refusal::INTERNAL, e.to_string()))?;
    let _arriving = inner.leaving.keep(keys.iter().flatten()).await;
    let mut reply = renew_stored(inner, origin, &keys, renew.lease_secs)?;
    follow::renew(inner, origin, &keys, renew.lease_secs, &mut reply).await;
    Ok(reply)
}

/// The key that is meant by a name, of those that this node holds or points to; none if there
/// are several.
fn resolve(inner: &Inner, name: &Name) -> Result<Option<Key>, StoreError> {
    let range = name.range();
    let here = inner.store.list(range, 2)?;
    let elsewhere = inner.diversion.records.list(range, 2)?;
    let mut keys = here.iter().chain(Records::pointers(&elsewhere)).map(|info| info.key);
    Ok(keys.next().filter(|first| keys.all(|key| key == *first)))
}

/// Extends the leases of the blocks in this node's store, as far as whoever renews has room for
/// those that were somebody else's.
fn renew_stored(
    inner: &Inner,
    origin: &Origin,
    keys: &[Option<Key>],
    lease_secs: u64,
) -> Result<RenewReply, Refusal> {
    let internal = |e: StoreError| Refusal::new(Refusal::INTERNAL, e.to_string());
    let now = inner.env.unix_ms() / 1000;
    let Origin::Publisher { receipt, owner } = origin else {
        return Err(Refusal::new(BAD_RECEIPT, "leases are extended only for a receipt"));
    };
    let lease_secs = receipt.lease_left_secs(now, lease_secs).unwrap_or(0);
    let mut reply = RenewReply { held: vec![0; keys.len()], over: None };
    for (state, key) in reply.held.iter_mut().zip(keys) {
        let Some(key) = key else { continue };
        let Some(held) = inner.store.info(key).map_err(internal)? else { continue };
        let room = if held.kind == BlockKind::Signed { Room::Root } else { Room::Content };
        let charge = Charge { owner: *owner, lease_secs, room };
        let expires_unix_secs = expires(inner, origin, key, &charge);
        let longer = BlockInfo { owner: *owner, expires_unix_secs, ..held };
        let want = Want { owner: *owner, bytes: added_bytes(inner, &longer), room };
        // What bears out a root that says it has seen to the renewal here.
        let renewed = if inner.lease_left(&held) >= lease_secs / 2 { 1 } else { 5 };
        let peers = inner.overlay.estimated_peers();
        let (verdicts, _room) = inner.quota.reserve(&*inner.store, peers, &[want]);
        *state = match verdicts[0] {
            Ok(()) => {
                let still = inner.store.renew(&[*key], expires_unix_secs, *owner);
                if still.map_err(internal)?[0] { renewed } else { 0 }
            }
            // From before owners were kept: it must not end because they are kept now.
            Err(_) if held.owner == Owner::NOBODY => {
                let still = inner.store.renew(&[*key], expires_unix_secs, Owner::NOBODY);
                if still.map_err(internal)?[0] { renewed } else { 0 }
            }
            Err(over) => {
                reply.over = reply.over.or(Some(over));
                4
            }
        };
    }
    Ok(reply)
}

/// Extends leases at the replicas of one virtual server of this node; `here` says what
/// this node has itself, the result what the replica set has.
async fn renew_at_replicas(
    inner: &Arc<Inner>,
    origin: &Origin,
    root: &Node,
    renew: &Renew,
    here: RenewReply,
) -> RenewReply {
    let RenewReply { mut held, mut over } = here;
    let mut calls = Calls::new(inner, WaitsFor::Replica);
    let set = replica_set(inner, root);
    for node in &set[1..] {
        ask_to_renew(inner, &mut calls, *node, origin, renew, (0..held.len()).collect());
    }
    let (mut lacking, mut answered) = (false, 1);
    let mut copies: Vec<u32> = held.iter().map(|state| u32::from(has(*state))).collect();
    let mut refused: Vec<bool> = held.iter().map(|state| *state == 4).collect();
    // Without a majority the answer is that this root cannot tell, and the publisher asks again,
    // when the ring may have closed over dead nodes.
    while calls.is_patient() {
        let Some(event) = calls.next().await else { break };
        if let Event::Answer(_, Ok((_, theirs))) = event {
            answered += 1;
            over = over.or(theirs.over);
            for (i, theirs) in theirs.held.into_iter().enumerate() {
                copies[i] += u32::from(has(theirs));
                refused[i] |= theirs == 4;
                lacking |= has(held[i]) != has(theirs);
            }
        }
    }
    lacking |= (answered as usize) < set.len();
    calls.finish();
    if lacking {
        inner.repair.kick();
    }
    let wanted = u32::try_from(expected_replicas(inner) + 1).expect("k is small");
    for (i, state) in held.iter_mut().enumerate() {
        // A minority cannot say that the ring lacks a block either. What most of the others
        // have is not lacking: this node has yet to fetch it.
        let unsure = match *state {
            0 => is_majority(copies[i], wanted) || !is_majority(answered, wanted),
            _ => !is_majority(copies[i], wanted),
        };
        if *state == 5 {
            *state = 1;
        }
        if unsure {
            *state = 3;
        } else if refused[i] && over.is_some() {
            *state = 4;
        }
    }
    RenewReply { held, over }
}
