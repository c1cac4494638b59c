//! Keeping blocks on this node and, as their root, on the nodes after it (CFS §5.1, §5.5).
//!
//! Every block is verified against its key before it is stored; a block that fails is
//! dropped, counted and its sender marked. Of signed blocks the higher version stays.

use atoll_key::{BlockKind, Key};
use atoll_net::header::Capped;
use atoll_net::{Peer, Refusal, Request};
use atoll_overlay::{Neighbourhood, Route};
use atoll_store::StoreError;
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
    let failed = match inner.store.put(batch).await {
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

/// Whether this node, so surrounded, is the root of `key`, as far as it knows.
fn is_root(inner: &Inner, neighbourhood: &Neighbourhood, key: &Key) -> bool {
    match neighbourhood.range() {
        Some(range) => range.contains(key),
        None => matches!(inner.overlay.route(key, true),
            Route::Root(nodes) if nodes[0] == neighbourhood.me),
    }
}

/// Stores a batch whose root this node is and sends it to the replicas; resolves when
/// all of them have answered or failed.
pub(crate) async fn store_as_root(
    inner: &Inner,
    from: &Peer,
    blocks: Vec<Block>,
) -> Vec<PutStatus> {
    let mut statuses = vec![PutStatus::NotRoot; blocks.len()];
    let neighbourhood = inner.overlay.neighbourhood();
    let (mut mine, mut indices, mut checked) = (Vec::new(), Vec::new(), Vec::new());
    for (index, block) in blocks.into_iter().enumerate() {
        if !is_root(inner, &neighbourhood, &block.header.key) {
            continue;
        }
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
        let acknowledged = replicate(inner, &mine).await;
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
        futures_util::join!(replicate(inner, &mine), store_checked(inner, &mine, &checked))
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

/// Sends a batch to the k − 1 nodes after this one; one that fails is replaced by the
/// node after it, once.
async fn replicate(inner: &Inner, blocks: &[Block]) -> Acknowledged {
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
    for _wave in 0..2 {
        let successors = inner.overlay.neighbourhood().successors;
        let replicas = &successors[..successors.len().min(inner.config.replicas - 1)];
        result.wanted = expected_replicas(inner);
        let targets: Vec<_> =
            replicas.iter().filter(|node| !asked.contains(*node)).copied().collect();
        if targets.is_empty() {
            break;
        }
        asked.extend(&targets);
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
    let held = inner
        .store
        .renew(&renew.keys, expiry)
        .map_err(|e| Refusal::new(Refusal::INTERNAL, e.to_string()))?;
    let mut held: Vec<u8> = held.into_iter().map(u8::from).collect();
    if !renew.as_root {
        return Ok(held);
    }
    let neighbourhood = inner.overlay.neighbourhood();
    for (state, key) in held.iter_mut().zip(&renew.keys) {
        if !is_root(inner, &neighbourhood, key) {
            *state = 2;
        }
    }
    let header = to_header(&Renew { as_root: false, ..renew.clone() });
    let request = Request { method: messages::RENEW, header, parts: Vec::new() };
    let replicas = neighbourhood.successors.iter().take(inner.config.replicas - 1);
    let answers = join_all(replicas.map(|node| inner.call(node, request.clone()))).await;
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
            lacking |= held[i] == 1 && theirs != 1;
        }
    }
    if lacking {
        inner.repair.kick();
    }
    let wanted = u32::try_from(expected_replicas(inner) + 1).expect("k is small");
    for (state, copies) in held.iter_mut().zip(copies) {
        // A minority cannot say that the ring lacks a block either.
        let unsure = match *state {
            0 => !is_majority(answered, wanted),
            1 => !is_majority(copies, wanted),
            _ => false,
        };
        if unsure {
            *state = 3;
        }
    }
    Ok(held)
}

/// The replicas a put must count on, see [`Repair::expected_replicas`].
pub(crate) fn expected_replicas(inner: &Inner) -> usize {
    let present = inner.overlay.neighbourhood().successors.len();
    let replicas = present.min(inner.config.replicas - 1);
    inner.repair.expected_replicas(inner.env.now(), replicas, inner.config.shrink_after)
}
