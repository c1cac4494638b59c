//! `RENEW`: extending leases (CFS §5.5: "Publishers must periodically refresh their blocks").
//!
//! A publisher that extends a block's lease is charged for the block from then on, so it needs a
//! receipt, and room if the block was charged to another publisher.

use std::sync::Arc;

use atoll_key::Key;
use atoll_net::{Peer, Refusal};
use atoll_overlay::Node;
use atoll_store::{BlockInfo, Owner, StoreError};
use bytes::Bytes;
use futures_util::future::join_all;

use super::Handle;
use crate::accounting::admission::{Origin, added_bytes, expires};
use crate::accounting::attribution::Charge;
use crate::accounting::quota::{ChargeClass, Want};
use crate::accounting::receipt::BAD_RECEIPT;
use crate::diversion::follow;
use crate::holdings::pointers::Pointers;
use crate::placement::{expected_replicas, replica_set};
use crate::rpc::put_times::WaitsFor;
use crate::rpc::quorum::{Calls, Event};
use crate::rpc::{Answered, Name, Renew, RenewReply, RenewStatus, is_majority};
use crate::server::Server;

impl Handle<Renew> for Arc<Server> {
    async fn handle(
        &self,
        from: Peer,
        mut renew: Renew,
        _: Vec<Bytes>,
    ) -> Result<Answered<Renew>, Refusal> {
        let firsts: Vec<Key> = renew.names.iter().map(Name::first).collect();
        let keys = resolve_all(self, &renew)?;
        if keys.iter().all(Option::is_none) && (!renew.as_root || renew.will_be_put()) {
            // No lease is extended and no other node is asked: the receipt need not be verified.
            return Ok((none_held(self, &renew, &firsts), Vec::new()));
        }
        let origin = Origin::of(self, &from, renew.receipt.take(), &firsts).await?;
        let here = renew_alone(self, &origin, &keys, renew.lease_secs).await?;
        let reply =
            if renew.as_root { renew_as_root(self, &origin, &renew, here).await } else { here };
        Ok((reply, Vec::new()))
    }
}

/// The answer of a node that holds none of the blocks.
fn none_held(server: &Server, renew: &Renew, firsts: &[Key]) -> RenewReply {
    let mut statuses = vec![RenewStatus::Lacking; firsts.len()];
    if renew.as_root {
        statuses.fill(RenewStatus::NotRoot);
        let mine = server.overlay.group_by_own_root(firsts);
        for index in mine.into_iter().flat_map(|(_, indices)| indices) {
            statuses[index] = RenewStatus::Lacking;
        }
    }
    RenewReply { statuses, over: None }
}

/// Extends leases at the replicas of this node, which has itself what `here` says.
async fn renew_as_root(
    server: &Arc<Server>,
    origin: &Origin,
    renew: &Renew,
    RenewReply { mut statuses, mut over }: RenewReply,
) -> RenewReply {
    let firsts: Vec<Key> = renew.names.iter().map(Name::first).collect();
    let parts = server.overlay.group_by_own_root(&firsts).into_iter().map(|(root, indices)| {
        let names = indices.iter().map(|index| renew.names[*index]).collect();
        let here = indices.iter().map(|index| statuses[*index]).collect();
        let part = Renew { names, as_root: false, receipt: None, ..*renew };
        let here = RenewReply { statuses: here, over };
        async move { (indices, renew_at_replicas(server, origin, &root, &part, here).await) }
    });
    let answers = join_all(parts).await;
    statuses.fill(RenewStatus::NotRoot);
    for (indices, part) in answers {
        over = over.or(part.over);
        for (index, state) in indices.into_iter().zip(part.statuses) {
            statuses[index] = state;
        }
    }
    RenewReply { statuses, over }
}

/// Extends the leases of the blocks this node holds, itself or at other nodes.
async fn renew_alone(
    server: &Server,
    origin: &Origin,
    keys: &[Option<Key>],
    lease_secs: u64,
) -> Result<RenewReply, Refusal> {
    let _arriving = server.pending.keep(keys.iter().flatten()).await;
    let again = keep_released(server, origin, keys).await;
    again.map_err(|error| Refusal::new(Refusal::INTERNAL, error.to_string()))?;
    let mut reply = renew_stored(server, origin, keys, lease_secs)?;
    follow::renew(server, origin, keys, lease_secs, &mut reply).await;
    Ok(reply)
}

/// Notes when a publisher renews blocks, also those that other nodes keep for this one: a release from before counts
/// for nothing.
async fn keep_released(
    server: &Server,
    origin: &Origin,
    keys: &[Option<Key>],
) -> Result<(), StoreError> {
    let Origin::Publisher { receipt, .. } = origin else { return Ok(()) };
    let removes = |key: &Key| server.known(key).is_some_and(|held| held.kind.release_removes());
    let keys = keys.iter().flatten().copied().filter(removes);
    let now = server.env.unix_ms() / 1000;
    server.releases.put_again(keys, receipt.issued_unix_secs, now).await
}

fn resolve_all(server: &Server, renew: &Renew) -> Result<Vec<Option<Key>>, Refusal> {
    let resolved: Result<Vec<Option<Key>>, StoreError> =
        renew.names.iter().map(|name| resolve(server, name)).collect();
    resolved.map_err(|e| Refusal::new(Refusal::INTERNAL, e.to_string()))
}

/// The key that is meant by a name, of those that this node holds or points to; none if there
/// are several.
fn resolve(server: &Server, name: &Name) -> Result<Option<Key>, StoreError> {
    let range = name.range();
    let here = server.store.list(range, 2)?;
    let elsewhere = server.pointers.list(range, 2)?;
    let mut keys = here.iter().chain(Pointers::pointers(&elsewhere)).map(|info| info.key);
    Ok(keys.next().filter(|first| keys.all(|key| key == *first)))
}

/// Extends the leases of the blocks in this node's store, as far as the publisher has room for
/// those that were charged to another.
fn renew_stored(
    server: &Server,
    origin: &Origin,
    keys: &[Option<Key>],
    lease_secs: u64,
) -> Result<RenewReply, Refusal> {
    let internal = |e: StoreError| Refusal::new(Refusal::INTERNAL, e.to_string());
    let now = server.env.unix_ms() / 1000;
    let Origin::Publisher { receipt, owner } = origin else {
        return Err(Refusal::new(BAD_RECEIPT, "leases are extended only for a receipt"));
    };
    let lease_secs = receipt.lease_left_secs(now, lease_secs).unwrap_or(0);
    let mut reply = RenewReply { statuses: vec![RenewStatus::Lacking; keys.len()], over: None };
    for (status, key) in reply.statuses.iter_mut().zip(keys) {
        let Some(key) = key else { continue };
        let Some(held) = server.store.info(key).map_err(internal)? else { continue };
        let class = ChargeClass::of_published(held.kind);
        let charge = Charge { owner: *owner, lease_secs, class };
        let expires_unix_secs = expires(server, origin, key, &charge);
        let longer = BlockInfo { owner: *owner, expires_unix_secs, ..held };
        let want = Want { owner: *owner, bytes: added_bytes(server, &longer), class };
        // What bears out a root that says it has seen to the renewal here.
        let renewed = if server.lease_left(&held) >= lease_secs / 2 {
            RenewStatus::Held
        } else {
            RenewStatus::Late
        };
        let peers = server.overlay.estimated_peers();
        let (verdicts, _room) = server.quota.reserve(&*server.store, peers, &[want]);
        let by = match verdicts[0] {
            Ok(()) => *owner,
            // From before owners were kept: it must not end because they are kept now.
            Err(_) if held.owner == Owner::NOBODY => Owner::NOBODY,
            Err(over) => {
                reply.over = reply.over.or(Some(over));
                *status = RenewStatus::OverQuota;
                continue;
            }
        };
        if server.store.renew(&[*key], expires_unix_secs, by).map_err(internal)?[0] {
            *status = renewed;
        }
    }
    Ok(reply)
}

/// Extends leases at the replicas of one virtual server of this node; `here` says what
/// this node has itself, the result what the replica set has.
async fn renew_at_replicas(
    server: &Arc<Server>,
    origin: &Origin,
    root: &Node,
    renew: &Renew,
    here: RenewReply,
) -> RenewReply {
    let RenewReply { mut statuses, mut over } = here;
    // The caller puts the blocks that are lacking, which brings them to all replicas: these need not
    // be asked about them.
    let is_settled = |status| status == RenewStatus::Lacking && renew.will_be_put();
    let asked: Vec<usize> = (0..statuses.len()).filter(|i| !is_settled(statuses[*i])).collect();
    if asked.is_empty() {
        return RenewReply { statuses, over };
    }
    let mut calls = Calls::new(server, WaitsFor::Replica);
    let set = replica_set(server, root);
    for node in &set[1..] {
        ask_to_renew(server, &mut calls, *node, origin, renew, asked.clone());
    }
    let (mut lacking, mut answered) = (false, 1);
    let mut copies: Vec<u32> = statuses.iter().map(|status| u32::from(status.is_held())).collect();
    let mut refused: Vec<bool> =
        statuses.iter().map(|status| *status == RenewStatus::OverQuota).collect();
    // Without a majority the answer is that this root cannot tell, and the publisher asks again,
    // when the ring may have closed over dead nodes.
    while calls.is_patient() {
        let Some(event) = calls.next().await else { break };
        if let Event::Answer(_, Ok((_, theirs))) = event {
            answered += 1;
            over = over.or(theirs.over);
            for (&i, theirs) in asked.iter().zip(theirs.statuses) {
                copies[i] += u32::from(theirs.is_held());
                refused[i] |= theirs == RenewStatus::OverQuota;
                lacking |= statuses[i].is_held() != theirs.is_held();
            }
        }
    }
    lacking |= (answered as usize) < set.len();
    calls.finish();
    if lacking {
        server.requests.kick();
    }
    let wanted = u32::try_from(expected_replicas(server) + 1).expect("k is small");
    for i in asked {
        let status = &mut statuses[i];
        // A minority cannot say that the ring lacks a block either. What most of the others
        // have is not lacking: this node has yet to fetch it.
        let unsure = match *status {
            RenewStatus::Lacking => {
                is_majority(copies[i], wanted) || !is_majority(answered, wanted)
            }
            _ => !is_majority(copies[i], wanted),
        };
        if *status == RenewStatus::Late {
            *status = RenewStatus::Held;
        }
        if unsure {
            *status = RenewStatus::Undecided;
        } else if refused[i] && over.is_some() {
            *status = RenewStatus::OverQuota;
        }
    }
    RenewReply { statuses, over }
}

/// The part of a renewal with these numbers, for a replica.
pub(crate) fn part_of(origin: &Origin, renew: &Renew, indices: &[usize]) -> Renew {
    let names: Vec<Name> = indices.iter().map(|index| renew.names[*index]).collect();
    let receipt = origin.to_wire(names.iter().map(Name::first));
    Renew { names, as_root: false, receipt, ..*renew }
}

/// Renews, at one replica, those of the names with these numbers.
pub(crate) fn ask_to_renew(
    server: &Arc<Server>,
    calls: &mut Calls<(Vec<usize>, RenewReply)>,
    node: Node,
    origin: &Origin,
    renew: &Renew,
    indices: Vec<usize>,
) {
    let part = part_of(origin, renew, &indices);
    let asker = server.clone();
    calls.ask(node, 0, async move { Ok((indices, asker.call(&node, &part, Vec::new()).await?.0)) });
}
