//! Keeping blocks on this node and, as their root, on the nodes after it (CFS §5.1, §5.5).
//!
//! Every block is verified against its key before it is stored; a block that fails is
//! dropped, counted and its sender marked. Of signed blocks the higher version stays.

use atoll_key::{BlockKind, Key};
use atoll_net::header::Capped;
use atoll_net::{Peer, Refusal, Request};
use atoll_overlay::{Neighbourhood, Node, Route, distinct_peers};
use atoll_store::{Owner, StoreError, StoredBlock};
use bytes::Bytes;
use futures_util::future::join_all;

use crate::inner::{Block, Inner};
use crate::messages::{
    self, Put, PutReply, PutStatus, Renew, RenewReply, from_header, is_majority, to_header,
};

/// What a block was verified to be, or why it is not taken.
type Checked = Result<(BlockKind, u64), PutStatus>;

/// Stores a batch on this node; one status per block.
pub(crate) async fn store_here(inner: &Inner, from: &Peer, blocks: &[Block]) -> Vec<PutStatus> {
    let checked: Vec<Checked> = blocks.iter().map(|block| verify(inner, from, block)).collect();
    store_checked(inner, blocks, &checked).await
}

/// Stores those blocks of a batch that were found sound; one status per block.
async fn store_checked(inner: &Inner, blocks: &[Block], checked: &[Checked]) -> Vec<PutStatus> {
    let mut statuses = Vec::with_capacity(blocks.len());
    let mut batch = Vec::with_capacity(blocks.len());
    for (block, checked) in blocks.iter().zip(checked) {
        match checked {
            Ok((kind, version)) => {
                batch.push(inner.to_store(block, *kind, *version));
                statuses.push(PutStatus::Stored { copies: 1, wanted: 1 });
            }
            Err(status) => statuses.push(*status),
        }
    }
    if batch.is_empty() {
        return statuses;
    }
    let failed = match store_batch(inner, batch).await {
        Ok(()) => {
            for (block, status) in blocks.iter().zip(&mut statuses) {
                if matches!(status, PutStatus::Stored { .. })
                    && let Some(superseded) = other_held(inner, block).await
                {
                    *status = superseded;
                }
            }
            return statuses;
        }
        Err(StoreError::Full { .. }) => PutStatus::Full,
        Err(error) => {
            tracing::error!(%error, "blocks could not be stored");
            PutStatus::Failed
        }
    };
    for status in &mut statuses {
        if matches!(status, PutStatus::Stored { .. }) {
            *status = failed;
        }
    }
    statuses
}

/// Puts verified blocks into this node's store. They stay even if they were about to be
/// handed over as strays.
pub(crate) async fn store_batch(inner: &Inner, batch: Vec<StoredBlock>) -> Result<(), StoreError> {
    inner.strays.keep(batch.iter().map(|block| &block.info.key)).await;
    inner.store.put(batch).await
}

/// Checks one block against its key and against what is held; its kind and version.
fn verify(inner: &Inner, from: &Peer, block: &Block) -> Checked {
    let key = &block.header.key;
    let checked = BlockKind::from_u8(block.header.kind)
        .and_then(|kind| Ok((kind, kind.verify(key, &block.bytes)?)));
    let (kind, version) = match checked {
        Ok(checked) => checked,
        Err(error) => {
            tracing::warn!(%key, %from, %error, "dropped a bad block");
            inner.counters.mark(from.id);
            return Err(PutStatus::Invalid);
        }
    };
    if kind == BlockKind::Signed
        && let Ok(Some(held)) = inner.store.info(key)
        && held.version > version
    {
        return Err(PutStatus::Superseded { held: held.version });
    }
    Ok((kind, version))
}

/// Who should hold the blocks whose root is the virtual server so surrounded: it and the
/// nodes after it, one virtual server of each physical node (CFS §5.1, §5.3), at most k.
pub(crate) fn replica_set(inner: &Inner, neighbourhood: &Neighbourhood) -> Vec<Node> {
    let mut nodes = vec![neighbourhood.me];
    nodes.extend(&neighbourhood.successors);
    distinct_peers(&nodes, inner.config.replicas)
}

/// This node's virtual servers, and for each the numbers of those of `keys` whose root it
/// is; keys of other roots are left out.
fn seats_of(inner: &Inner, keys: &[Key]) -> Vec<(Neighbourhood, Vec<usize>)> {
    let mut seats: Vec<(Neighbourhood, Vec<usize>)> =
        inner.overlay.neighbourhoods().into_iter().map(|seat| (seat, Vec::new())).collect();
    for (index, key) in keys.iter().enumerate() {
        if let Some(place) = place_of(inner, &seats, key) {
            seats[place].1.push(index);
        }
    }
    seats.retain(|(_, indices)| !indices.is_empty());
    seats
}

/// Which of this node's virtual servers is the root of `key`, as far as it knows.
fn place_of(inner: &Inner, seats: &[(Neighbourhood, Vec<usize>)], key: &Key) -> Option<usize> {
    let holds = |seat: &Neighbourhood| seat.range().is_some_and(|range| range.contains(key));
    if let Some(place) = seats.iter().position(|(seat, _)| holds(seat)) {
        return Some(place);
    }
    // One that does not know its predecessor may be the root.
    if seats.iter().all(|(seat, _)| seat.range().is_some()) {
        return None;
    }
    let Route::Root(nodes) = inner.overlay.route(key, true) else { return None };
    let root = nodes.first()?;
    seats.iter().position(|(seat, _)| seat.me == *root)
}

/// Stores a batch whose root this node is and sends it to the replicas; resolves when
/// all of them have answered or failed.
pub(crate) async fn store_as_root(
    inner: &Inner,
    from: &Peer,
    blocks: Vec<Block>,
) -> Vec<PutStatus> {
    let mut statuses = vec![PutStatus::NotRoot; blocks.len()];
    let keys: Vec<Key> = blocks.iter().map(|block| block.header.key).collect();
    let parts = seats_of(inner, &keys).into_iter().map(|(seat, indices)| {
        let part = indices.iter().map(|index| blocks[*index].clone()).collect();
        async move { (indices, store_at_seat(inner, from, &seat, part).await) }
    });
    for (indices, part) in join_all(parts).await {
        for (index, status) in indices.into_iter().zip(part) {
            statuses[index] = status;
        }
    }
    statuses
}

/// Stores blocks whose root is one virtual server of this node.
async fn store_at_seat(
    inner: &Inner,
    from: &Peer,
    seat: &Neighbourhood,
    blocks: Vec<Block>,
) -> Vec<PutStatus> {
    let mut statuses = vec![PutStatus::Failed; blocks.len()];
    let (mut mine, mut indices, mut checked) = (Vec::new(), Vec::new(), Vec::new());
    for (index, block) in blocks.into_iter().enumerate() {
        // A bad block goes no further: the replicas would take this node for its source.
        match verify(inner, from, &block) {
            Err(status) => statuses[index] = status,
            sound => {
                mine.push(block);
                indices.push(index);
                checked.push(sound);
            }
        }
    }
    if mine.is_empty() {
        return statuses;
    }
    if let Some(status) = conflict(inner, &mine).await {
        for index in indices {
            statuses[index] = status;
        }
        return statuses;
    }
    let is_new = |block: &&Block| matches!(inner.store.info(&block.header.key), Ok(None));
    let new = mine.iter().filter(is_new).count();
    let (acknowledged, own) = if mine.iter().any(is_signed) {
        // A replica that has another block of the same version decides before this node
        // keeps one that nothing would make equal again.
        let acknowledged = replicate(inner, seat, &mine).await;
        let refused = |held: &Option<u64>| match held {
            Some(held) => PutStatus::Superseded { held: *held },
            None => PutStatus::Failed,
        };
        let own = if acknowledged.superseded.iter().any(Option::is_some) {
            acknowledged.superseded.iter().map(refused).collect()
        } else {
            store_checked(inner, &mine, &checked).await
        };
        (acknowledged, own)
    } else {
        // The network first: it works while this node writes.
        futures_util::join!(replicate(inner, seat, &mine), store_checked(inner, &mine, &checked))
    };
    if own.iter().all(|status| matches!(status, PutStatus::Stored { .. })) {
        inner.repair.count_root_blocks(new as u64);
    }
    let wanted = u32::try_from(acknowledged.wanted + 1).expect("k is small");
    for (position, index) in indices.into_iter().enumerate() {
        statuses[index] = match own[position] {
            PutStatus::Stored { .. } => match acknowledged.superseded[position] {
                Some(held) => PutStatus::Superseded { held },
                None => PutStatus::Stored { copies: 1 + acknowledged.copies[position], wanted },
            },
            other => other,
        };
    }
    statuses
}

fn is_signed(block: &Block) -> bool {
    block.header.kind == BlockKind::Signed as u8
}

/// After a signed block was put into the store: whether that keeps another one.
async fn other_held(inner: &Inner, block: &Block) -> Option<PutStatus> {
    if !is_signed(block) {
        return None;
    }
    match inner.store.get(&block.header.key).await {
        Ok(Some(held)) if held.bytes == block.bytes => None,
        Ok(Some(held)) => Some(PutStatus::Superseded { held: held.info.version }),
        Ok(None) | Err(_) => Some(PutStatus::Failed),
    }
}

/// Two different blocks of one version would leave replicas unequal for ever: the root
/// keeps the first. (Only signed blocks come alone in a batch and can conflict.)
async fn conflict(inner: &Inner, blocks: &[Block]) -> Option<PutStatus> {
    let [block] = blocks else { return None };
    if !is_signed(block) {
        return None;
    }
    let version = BlockKind::Signed.verify(&block.header.key, &block.bytes).ok()?;
    let held = inner.store.get(&block.header.key).await.ok()??;
    let differs = held.info.version == version && held.bytes != block.bytes;
    differs.then_some(PutStatus::Superseded { held: version })
}

/// How many replicas took each block of a batch.
struct Acknowledged {
    copies: Vec<u32>,
    superseded: Vec<Option<u64>>,
    wanted: usize,
}

/// Sends a batch to the other k − 1 of the replica set of one virtual server; one that
/// fails is replaced by the node after it, once.
async fn replicate(inner: &Inner, seat: &Neighbourhood, blocks: &[Block]) -> Acknowledged {
    let header = to_header(&Put {
        blocks: Capped(blocks.iter().map(|block| block.header).collect()),
        as_root: false,
    });
    let parts: Vec<Bytes> = blocks.iter().map(|block| block.bytes.clone()).collect();
    let request = Request { method: messages::PUT, header, parts };
    let mut result = Acknowledged {
        copies: vec![0; blocks.len()],
        superseded: vec![None; blocks.len()],
        wanted: 0,
    };
    let mut asked = Vec::new();
    for wave in 0..2 {
        let now = if wave == 0 { None } else { inner.seat(&seat.me) };
        let set = replica_set(inner, now.as_ref().unwrap_or(seat));
        result.wanted = expected_replicas(inner);
        let new = |node: &&Node| !asked.contains(&node.peer.id);
        let targets: Vec<Node> = set[1..].iter().filter(new).copied().collect();
        if targets.is_empty() {
            break;
        }
        asked.extend(targets.iter().map(|node| node.peer.id));
        let calls = targets.iter().map(|node| inner.call(node, request.clone()));
        let mut all_answered = true;
        for answer in join_all(calls).await {
            let statuses = answer.ok().and_then(|r| from_header::<PutReply>(&r.header).ok());
            match statuses {
                Some(reply) if reply.statuses.0.len() == blocks.len() => {
                    for (i, status) in reply.statuses.0.iter().enumerate() {
                        match status {
                            PutStatus::Stored { .. } => result.copies[i] += 1,
                            PutStatus::Superseded { held } => result.superseded[i] = Some(*held),
                            _ => all_answered = false,
                        }
                    }
                }
                _ => all_answered = false,
            }
        }
        if all_answered {
            break;
        }
        inner.repair.kick();
    }
    result
}

/// Extends leases on this node and, as root, at its replicas; one byte per key.
pub(crate) async fn renew_here(inner: &Inner, renew: &Renew) -> Result<Vec<u8>, Refusal> {
    let expiry = inner.expiry(renew.lease_secs);
    if !renew.as_root {
        inner.strays.keep(renew.keys.iter()).await;
    }
    let held = inner
        .store
        .renew(&renew.keys, expiry, Owner::NOBODY)
        .map_err(|e| Refusal::new(Refusal::INTERNAL, e.to_string()))?;
    let mut held: Vec<u8> = held.into_iter().map(u8::from).collect();
    if !renew.as_root {
        return Ok(held);
    }
    let parts = seats_of(inner, &renew.keys).into_iter().map(|(seat, indices)| {
        let keys = indices.iter().map(|index| renew.keys[*index]).collect();
        let here = indices.iter().map(|index| held[*index]).collect();
        let part = Renew { keys, lease_secs: renew.lease_secs, as_root: false };
        async move { (indices, renew_at_replicas(inner, &seat, &part, here).await) }
    });
    let answers = join_all(parts).await;
    held.fill(2);
    for (indices, part) in answers {
        for (index, state) in indices.into_iter().zip(part) {
            held[index] = state;
        }
    }
    Ok(held)
}

/// Extends leases at the replicas of one virtual server of this node; `held` says what
/// this node has itself, the result what the replica set has.
async fn renew_at_replicas(
    inner: &Inner,
    seat: &Neighbourhood,
    renew: &Renew,
    mut held: Vec<u8>,
) -> Vec<u8> {
    let request = Request { method: messages::RENEW, header: to_header(renew), parts: Vec::new() };
    let set = replica_set(inner, seat);
    let answers = join_all(set[1..].iter().map(|node| inner.call(node, request.clone()))).await;
    let (mut lacking, mut answered) = (false, 1);
    let mut copies: Vec<u32> = held.iter().map(|state| u32::from(*state == 1)).collect();
    for answer in answers {
        let theirs = answer.ok().and_then(|r| from_header::<RenewReply>(&r.header).ok());
        let Some(theirs) = theirs.filter(|theirs| theirs.held.len() == held.len()) else {
            lacking = true;
            continue;
        };
        answered += 1;
        for (i, theirs) in theirs.held.into_iter().enumerate() {
            copies[i] += u32::from(theirs == 1);
            lacking |= (held[i] == 1) != (theirs == 1);
        }
    }
    if lacking {
        inner.repair.kick();
    }
    let wanted = u32::try_from(expected_replicas(inner) + 1).expect("k is small");
    for (state, copies) in held.iter_mut().zip(copies) {
        // A minority cannot say that the ring lacks a block either. What most of the others
        // have is not lacking: this node has yet to fetch it.
        let unsure = match *state {
            0 => is_majority(copies, wanted) || !is_majority(answered, wanted),
            _ => !is_majority(copies, wanted),
        };
        if unsure {
            *state = 3;
        }
    }
    held
}

/// How many other nodes of a replica set this node sees at present, at most k − 1.
pub(crate) fn present_replicas(inner: &Inner) -> usize {
    let seats = inner.overlay.neighbourhoods();
    let others = seats.iter().map(|seat| replica_set(inner, seat).len() - 1);
    others.max().expect("a node has at least one virtual server")
}

/// The replicas a put must count on, see [`Repair::expected_replicas`].
pub(crate) fn expected_replicas(inner: &Inner) -> usize {
    let replicas = present_replicas(inner);
    inner.repair.expected_replicas(inner.env.now(), replicas, inner.config.shrink_after)
}
