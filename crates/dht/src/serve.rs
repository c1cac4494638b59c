//! What a node answers its peers (CFS Figure 5, server side, and §5.1, §5.5).
//!
//! Every block is verified against its key before it is stored; a block that fails is
//! dropped, counted and its sender marked. Requests are decoded with caps and lengths
//! checked before anything is done.

use atoll_key::BlockKind;
use atoll_net::header::Capped;
use atoll_net::{Peer, Refusal, Reply, Request};
use atoll_overlay::Route;
use atoll_store::StoreError;
use bytes::Bytes;
use futures_util::future::join_all;

use crate::messages::{
    self, BlockHeader, Fetch, FetchReply, LookupReply, LookupStep, MAX_BATCH_BLOCKS, Put, PutReply,
    PutStatus, Reconcile, ReconcileReply, Renew, RenewReply, from_header, to_header,
};
use crate::node::{Block, Inner};
use crate::reconcile;
use crate::repair::expected_replicas;
use crate::stats::add;

/// Blocks in one reply stop at this many bytes (one block at least is sent).
pub(crate) const REPLY_BYTES: usize = 1 << 20;

fn reply(header: Bytes, parts: Vec<Bytes>) -> Reply {
    Reply { header, parts }
}

/// `lookup_step`: the block, or where to ask next.
pub(crate) async fn lookup_step(inner: &Inner, request: Request) -> Result<Reply, Refusal> {
    let LookupStep { key, as_root } = from_header(&request.header)?;
    match inner.store.get(&key).await {
        Ok(Some(block)) => {
            add(&inner.counters.served, 1);
            add(&inner.counters.served_bytes, block.bytes.len() as u64);
            let found = LookupReply::Found(inner.header_of(&block.info));
            return Ok(reply(to_header(&found), vec![block.bytes]));
        }
        Ok(None) => {}
        Err(error) => note_store_error(inner, &error),
    }
    let answer = match inner.overlay.route(&key, as_root) {
        Route::Root(nodes) if nodes[0] == inner.me() => LookupReply::Absent(nodes[1..].to_vec()),
        route => LookupReply::Route(route),
    };
    Ok(reply(to_header(&answer), Vec::new()))
}

/// A damaged block counts as missing from now on: repair fetches it again.
pub(crate) fn note_store_error(inner: &Inner, error: &StoreError) {
    tracing::warn!(%error, "a block could not be read");
    if let StoreError::Corrupted { key } = error {
        add(&inner.counters.damaged_blocks, 1);
        inner.repair.refetch(*key);
    }
}

/// Pairs the headers of a request with its parts.
fn blocks_of(headers: Vec<BlockHeader>, parts: Vec<Bytes>) -> Result<Vec<Block>, Refusal> {
    if headers.len() != parts.len() {
        let text = format!("{} blocks announced, {} sent", headers.len(), parts.len());
        return Err(Refusal::new(Refusal::MALFORMED, text));
    }
    let pair = |(header, bytes)| Block { header, bytes };
    Ok(headers.into_iter().zip(parts).map(pair).collect())
}

/// Stores blocks, and as their root sends them on to the replicas.
pub(crate) async fn put(inner: &Inner, from: Peer, request: Request) -> Result<Reply, Refusal> {
    let Put { blocks: Capped(headers), as_root } = from_header(&request.header)?;
    let blocks = blocks_of(headers, request.parts)?;
    let statuses = if as_root {
        store_as_root(inner, &from, blocks).await
    } else {
        store_here(inner, &from, &blocks).await
    };
    Ok(reply(to_header(&PutReply { statuses: statuses.into() }), Vec::new()))
}

/// Stores a batch on this node; one status per block.
pub(crate) async fn store_here(inner: &Inner, from: &Peer, blocks: &[Block]) -> Vec<PutStatus> {
    let mut statuses = Vec::with_capacity(blocks.len());
    let mut batch = Vec::with_capacity(blocks.len());
    for block in blocks {
        match verify(inner, from, block) {
            Ok((kind, version)) => {
                batch.push(inner.to_store(block, kind, version));
                statuses.push(PutStatus::Stored { copies: 1, wanted: 1 });
            }
            Err(status) => statuses.push(status),
        }
    }
    if batch.is_empty() {
        return statuses;
    }
    let failed = match inner.store.put(batch).await {
        Ok(()) => return statuses,
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
fn verify(inner: &Inner, from: &Peer, block: &Block) -> Result<(BlockKind, u64), PutStatus> {
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

/// Stores a batch whose root this node is and sends it to the replicas; resolves when
/// all of them have answered or failed.
pub(crate) async fn store_as_root(
    inner: &Inner,
    from: &Peer,
    blocks: Vec<Block>,
) -> Vec<PutStatus> {
    let mut statuses = vec![PutStatus::NotRoot; blocks.len()];
    let me = inner.me();
    let range = inner.overlay.neighbourhood().range();
    let is_root = |block: &Block| match range {
        Some(range) => range.contains(&block.header.key),
        None => matches!(inner.overlay.route(&block.header.key, true),
            Route::Root(nodes) if nodes[0] == me),
    };
    let (mine, indices): (Vec<Block>, Vec<usize>) = blocks
        .into_iter()
        .enumerate()
        .filter(|(_, block)| is_root(block))
        .map(|(index, block)| (block, index))
        .unzip();
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
    // The network first: it works while this node verifies and writes.
    let (acknowledged, own) =
        futures_util::join!(replicate(inner, &mine), store_here(inner, from, &mine));
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

/// Two different blocks of one version would leave replicas unequal for ever: the root
/// keeps the first. (Only signed blocks come alone in a batch and can conflict.)
async fn conflict(inner: &Inner, blocks: &[Block]) -> Option<PutStatus> {
    let [block] = blocks else { return None };
    let is_signed = block.header.kind == BlockKind::Signed as u8;
    if !is_signed {
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

/// Extends leases; as root, also at the replicas.
pub(crate) async fn renew(inner: &Inner, request: Request) -> Result<Reply, Refusal> {
    let renew: Renew = from_header(&request.header)?;
    let held = renew_here(inner, &renew).await?;
    Ok(reply(to_header(&RenewReply { held }), Vec::new()))
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
    if let Some(range) = neighbourhood.range() {
        for (state, key) in held.iter_mut().zip(&renew.keys) {
            if !range.contains(key) {
                *state = 2;
            }
        }
    }
    let header = to_header(&Renew { as_root: false, ..renew.clone() });
    let request = Request { method: messages::RENEW, header, parts: Vec::new() };
    let replicas = neighbourhood.successors.iter().take(inner.config.replicas - 1);
    let answers = join_all(replicas.map(|node| inner.call(node, request.clone()))).await;
    let lacking = answers.into_iter().any(|answer| {
        let theirs = answer.ok().and_then(|r| from_header::<RenewReply>(&r.header).ok());
        theirs.is_none_or(|theirs| {
            theirs.held.iter().zip(&held).any(|(theirs, ours)| *ours == 1 && *theirs != 1)
        })
    });
    if lacking {
        inner.repair.kick();
    }
    Ok(held)
}

/// Sends blocks asked for by key, as many as fit.
pub(crate) async fn fetch(inner: &Inner, request: Request) -> Result<Reply, Refusal> {
    let Fetch { keys } = from_header(&request.header)?;
    let (mut headers, mut parts, mut total) = (Vec::new(), Vec::new(), 0);
    for key in keys.iter().take(MAX_BATCH_BLOCKS) {
        match inner.store.get(key).await {
            Ok(Some(block)) => {
                if total > 0 && total + block.bytes.len() > REPLY_BYTES {
                    break;
                }
                total += block.bytes.len();
                headers.push(inner.header_of(&block.info));
                parts.push(block.bytes);
            }
            Ok(None) => {}
            Err(error) => note_store_error(inner, &error),
        }
    }
    add(&inner.counters.served, parts.len() as u64);
    add(&inner.counters.served_bytes, total as u64);
    Ok(reply(to_header(&FetchReply { blocks: headers.into() }), parts))
}

/// Compares ranges.
pub(crate) async fn reconcile(inner: &Inner, request: Request) -> Result<Reply, Refusal> {
    let Reconcile { salt, claims } = from_header(&request.header)?;
    let mut answers = Vec::with_capacity(claims.len());
    let mut estimated_bytes = 0;
    for claim in claims {
        let answer = crate::exchange::answer(inner, &salt, &claim)
            .await
            .map_err(|e| Refusal::new(Refusal::INTERNAL, e.to_string()))?;
        estimated_bytes += match &answer {
            reconcile::Answer::Same => 8,
            reconcile::Answer::Items(items) | reconcile::Answer::Some { items, .. } => {
                items.len() * 72 + 80
            }
            reconcile::Answer::Parts(parts) => parts.len() * 172,
        };
        answers.push(answer);
        // The reply must fit a header, and one answer has at most 2,048 × 72 bytes: the
        // asker asks again about the claims that are not answered.
        if estimated_bytes > 100_000 {
            break;
        }
    }
    Ok(reply(to_header(&ReconcileReply { answers }), Vec::new()))
}
