//! Copies that come without a receipt: from repair, from readers that heal what they found
//! missing, from nodes that hand over what is no longer theirs (CFS §5.1).
//!
//! A receipt does not travel with them: it would have to be kept with every block. Instead
//! the receiver asks other nodes around it, which should hold such a block if a majority of
//! its replica set ever took it. What one of them vouches for is taken, charged to whom
//! it charges it and leased no longer. What nobody vouches for is charged to its bearer, the
//! node that brought it, which may bring [`QuotaConfig::copy_share`] of a node as a
//! neighbour and a publisher's share otherwise: so a flood in this disguise fills no node,
//! and the last holder of a block can still restore its copies. Blocks charged to a bearer
//! are not vouched for, until their publisher renews them.
//!
//! [`QuotaConfig::copy_share`]: crate::QuotaConfig::copy_share

use atoll_key::{BlockKind, Key};
use atoll_net::{Peer, Refusal};
use atoll_overlay::{Neighbourhood, Node};
use atoll_store::Owner;
use futures_util::future::join_all;

use crate::inner::Inner;
use crate::messages::{Vouch, VouchReply, Vouched};
use crate::owner::{bearer, is_bearer};
use crate::quota::Room;
use crate::witness::ask;

/// Nodes asked to vouch for a batch.
const MAX_WITNESSES: usize = 3;

/// A copy to be judged.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Copy {
    pub key: Key,
    pub kind: BlockKind,
    pub version: u64,
    pub lease_secs: u64,
}

/// Whom a block is charged to, and for how long it may stay.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Charge {
    pub owner: Owner,
    pub lease_secs: u64,
    pub room: Room,
}

impl Charge {
    /// For what is held already: a copy extends no lease.
    const HELD: Charge = Charge { owner: Owner::NOBODY, lease_secs: 0, room: Room::Free };
}

/// Says for each copy that `from` brought whom it is charged to.
///
/// # Errors
/// If it has to be charged to `from`, which could not be confirmed at its address.
pub(crate) async fn charges(
    inner: &Inner,
    from: &Peer,
    copies: &[Copy],
) -> Result<Vec<Charge>, Refusal> {
    let mut charges = vec![Charge::HELD; copies.len()];
    let unknown: Vec<usize> = (0..copies.len()).filter(|i| !is_held(inner, &copies[*i])).collect();
    if unknown.is_empty() {
        return Ok(charges);
    }
    let keys: Vec<Key> = unknown.iter().map(|index| copies[*index].key).collect();
    let vouched = ask_witnesses(inner, from, &keys).await;
    let mut unvouched = Vec::new();
    for (index, said) in unknown.into_iter().zip(vouched) {
        let copy = &copies[index];
        let sound = said.into_iter().filter(|said| said.version >= copy.version);
        match sound.max_by_key(|said| said.lease_secs) {
            Some(said) => {
                let lease_secs = copy.lease_secs.min(said.lease_secs);
                charges[index] = Charge { owner: said.owner(), lease_secs, room: Room::Repair };
            }
            None => unvouched.push(index),
        }
    }
    if !unvouched.is_empty() {
        let brought = bearer_of(inner, from).await?;
        for index in unvouched {
            charges[index] = Charge { lease_secs: copies[index].lease_secs, ..brought };
        }
    }
    Ok(charges)
}

/// Whether this node has the block, or a newer one, with a lease that has not ended.
fn is_held(inner: &Inner, copy: &Copy) -> bool {
    let now = inner.env.unix_ms() / 1000;
    let held = inner.store.info(&copy.key).ok().flatten();
    held.is_some_and(|held| held.version >= copy.version && held.expires_unix_secs > now)
}

/// The charge of what only `from` knows of.
async fn bearer_of(inner: &Inner, from: &Peer) -> Result<Charge, Refusal> {
    if from.id != inner.transport.local().id {
        inner.confirm(from, *from, None).await?;
    }
    let owner = bearer(&from.id, from.addr.ip(), &inner.quota.config());
    let room = if is_neighbour(inner, from) { Room::Copy } else { Room::Content };
    Ok(Charge { owner, lease_secs: 0, room })
}

/// Whether `from` may share blocks with this node: it stands beside one of its virtual
/// servers, or is this node itself.
fn is_neighbour(inner: &Inner, from: &Peer) -> bool {
    let beside = |seat: &Neighbourhood| {
        let near = seat.successors.iter().take(2 * inner.config.replicas);
        near.chain(&seat.predecessor).any(|node| node.peer.id == from.id)
    };
    from.id == inner.transport.local().id || inner.overlay.neighbourhoods().iter().any(beside)
}

/// What the witnesses say of each key.
async fn ask_witnesses(inner: &Inner, from: &Peer, keys: &[Key]) -> Vec<Vec<Vouched>> {
    let mut said = vec![Vec::new(); keys.len()];
    let asks = by_seat(inner, keys).into_iter().flat_map(|(seat, indices)| {
        let witnesses = witnesses(inner, from, &seat);
        witnesses.into_iter().map(move |witness| (witness, indices.clone()))
    });
    let answers = join_all(asks.map(|(witness, indices)| async move {
        let asked: Vec<Key> = indices.iter().map(|index| keys[*index]).collect();
        (indices, ask(inner, &witness, asked).await.unwrap_or_default())
    }))
    .await;
    for (indices, answer) in answers {
        for (index, vouched) in indices.into_iter().zip(answer) {
            said[index].extend(vouched);
        }
    }
    said
}

/// The keys by which of this node's virtual servers is the first at or after them.
fn by_seat(inner: &Inner, keys: &[Key]) -> Vec<(Neighbourhood, Vec<usize>)> {
    let mut seats: Vec<(Neighbourhood, Vec<usize>)> =
        inner.overlay.neighbourhoods().into_iter().map(|seat| (seat, Vec::new())).collect();
    for (index, key) in keys.iter().enumerate() {
        let after = seats.iter_mut().min_by_key(|(seat, _)| seat.me.id.key().distance_from(key));
        after.expect("a node has at least one virtual server").1.push(index);
    }
    seats.retain(|(_, indices)| !indices.is_empty());
    seats
}

/// Others that may hold what a node so placed holds.
fn witnesses(inner: &Inner, from: &Peer, seat: &Neighbourhood) -> Vec<Node> {
    let me = inner.transport.local().id;
    let mut witnesses: Vec<Node> = Vec::new();
    for node in seat.predecessor.iter().chain(&seat.successors).take(4 * MAX_WITNESSES) {
        let id = node.peer.id;
        let is_new = witnesses.iter().all(|witness| witness.peer.id != id);
        if is_new && id != me && id != from.id && witnesses.len() < MAX_WITNESSES {
            witnesses.push(*node);
        }
    }
    witnesses
}

/// What this node can say of blocks: whom it charges those that were not just brought here.
pub(crate) fn vouch(inner: &Inner, asked: &Vouch) -> Result<VouchReply, Refusal> {
    let now = inner.env.unix_ms() / 1000;
    let mut vouched = Vec::with_capacity(asked.keys.len());
    for key in &asked.keys {
        let held = inner.store.info(key);
        let held = held.map_err(|e| Refusal::new(Refusal::INTERNAL, e.to_string()))?;
        let live = held.filter(|held| held.expires_unix_secs > now && !is_bearer(&held.owner));
        vouched.push(live.map(|held| Vouched {
            version: held.version,
            lease_secs: held.expires_unix_secs - now,
            publisher: held.owner.publisher,
            ip: held.owner.ip,
        }));
    }
    Ok(VouchReply { vouched: vouched.into() })
}
