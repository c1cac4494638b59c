//! What a node answers its peers (CFS Figure 5, server side, and §5.1, §5.5).
//!
//! Requests are decoded with caps, and their lengths checked, before anything is done.

pub(crate) mod host;
pub(crate) mod renew;
pub(crate) mod work_limit;

use std::sync::Arc;
use std::time::Duration;

use atoll_key::Key;
use atoll_net::header::Capped;
use atoll_net::{Peer, Refusal, Reply, Request};
use atoll_overlay::Route;
use atoll_store::Owner;
use bytes::Bytes;

use crate::accounting::admission::Origin;
use crate::accounting::attribution;
use crate::accounting::quota::{Room, Want};
use crate::cache;
use crate::diversion::follow;
use crate::holdings::proof;
use crate::inner::{Block, Inner, REPLY_BYTES, note_store_error};
use crate::replication::exchange;
use crate::replication::reconcile;
use crate::replication::store::{store_as_root, store_put};
use crate::rpc::{
    AskRoom, AskRoomReply, BlockHeader, Confirm, Fetch, FetchReply, LookupReply, LookupStep,
    MAX_BATCH_BLOCKS, Name, Prove, Put, PutReply, Reconcile, ReconcileReply, Renew, Vouch,
    from_header, to_header,
};
use crate::server::renew::renew_here;
use crate::server::work_limit::Limits;
use crate::stats::add;

pub(crate) fn reply(header: Bytes, parts: Vec<Bytes>) -> Reply {
    Reply { header, parts }
}

/// Blocks looked at for one `RECONCILE` before further claims are left unanswered. A guess:
/// some milliseconds of work.
const MAX_VISITED: u64 = 16_384;
/// What comparing may cost, blocks looked at a second. Guesses: a look takes about half a
/// microsecond, so together some tenths of a core.
pub(crate) const COMPARING: Limits =
    Limits { at_once: 16, of_one: 1, peer: 50_000, strangers: 100_000, acquaintances: 200_000 };

/// `lookup_step`: the block, or where to ask next.
pub(crate) async fn lookup_step(inner: &Inner, request: Request) -> Result<Reply, Refusal> {
    let LookupStep { key, as_root, cached_ms } = from_header(&request.header)?;
    match inner.store.get(&key).await {
        Ok(Some(block)) if !inner.leaving.denies(&key) => {
            add(&inner.counters.served, 1);
            add(&inner.counters.served_bytes, block.bytes.len() as u64);
            let found = LookupReply::Found(inner.header_of(&block.info));
            return Ok(reply(to_header(&found), vec![block.bytes]));
        }
        Ok(_) => {}
        Err(error) => note_store_error(inner, &error),
    }
    if let Some(there) = follow::there(inner, &key).await {
        return Ok(reply(to_header(&LookupReply::There(there.holder.0)), Vec::new()));
    }
    // Whoever asks a root or a replica asks for what is stored, and must learn if it is not.
    let cached_ms = cached_ms.filter(|_| !as_root && !inner.leaving.denies(&key));
    if let Some(max_age_ms) = cached_ms
        && let Some((found, bytes)) = cache::serve(inner, &key, Duration::from_millis(max_age_ms))
    {
        add(&inner.counters.served, 1);
        add(&inner.counters.served_bytes, bytes.len() as u64);
        return Ok(reply(to_header(&found), vec![bytes]));
    }
    let answer = match inner.overlay.route(&key, as_root) {
        Route::Root(nodes) if inner.is_me(&nodes[0]) => LookupReply::Absent(nodes[1..].to_vec()),
        route if cached_ms.is_some() && cache::wants(inner, &key) => LookupReply::Wanted(route),
        route => LookupReply::Route(route),
    };
    Ok(reply(to_header(&answer), Vec::new()))
}

/// Pairs the headers of a request with its parts.
pub(crate) fn blocks_of(
    headers: Vec<BlockHeader>,
    parts: Vec<Bytes>,
) -> Result<Vec<Block>, Refusal> {
    if headers.len() != parts.len() {
        let text = format!("{} blocks announced, {} sent", headers.len(), parts.len());
        return Err(Refusal::new(Refusal::MALFORMED, text));
    }
    let pair = |(header, bytes)| Block { header, bytes };
    Ok(headers.into_iter().zip(parts).map(pair).collect())
}

/// Stores blocks, and as their root sends them on to the replicas.
pub(crate) async fn put(
    inner: &Arc<Inner>,
    from: Peer,
    request: Request,
) -> Result<Reply, Refusal> {
    let Put { blocks: Capped(headers), as_root, receipt } = from_header(&request.header)?;
    let blocks = blocks_of(headers, request.parts)?;
    let keys: Vec<Key> = blocks.iter().map(|block| block.header.key).collect();
    let origin = Origin::of(inner, &from, receipt, &keys).await?;
    let statuses = if as_root {
        store_as_root(inner, &from, &origin, blocks).await?
    } else {
        store_put(inner, &from, &origin, blocks).await?
    };
    Ok(reply(to_header(&PutReply { statuses: statuses.into() }), Vec::new()))
}

/// Extends leases; as root, also at the replicas.
pub(crate) async fn renew(
    inner: &Arc<Inner>,
    from: Peer,
    request: Request,
) -> Result<Reply, Refusal> {
    let mut renew: Renew = from_header(&request.header)?;
    let keys: Vec<Key> = renew.names.iter().map(Name::first).collect();
    let origin = Origin::of(inner, &from, renew.receipt.take(), &keys).await?;
    let renewed = renew_here(inner, &origin, &renew).await?;
    Ok(reply(to_header(&renewed), Vec::new()))
}

/// Says whether this node made a receipt (CFS §5.4).
pub(crate) fn confirm(inner: &Inner, request: &Request) -> Result<Reply, Refusal> {
    let asked: Confirm = from_header(&request.header)?;
    Ok(reply(to_header(&inner.confirmations.answer(&asked)), Vec::new()))
}

/// Says whether a publisher may put more.
pub(crate) fn room(inner: &Inner, request: &Request) -> Result<Reply, Refusal> {
    let AskRoom { publisher, ip, bytes, is_root } = from_header(&request.header)?;
    let room = if is_root { Room::Root } else { Room::Content };
    let want = Want { owner: Owner { publisher, ip }, bytes, room };
    let checked = inner.quota.check(&*inner.store, inner.overlay.estimated_peers(), &want);
    Ok(reply(to_header(&AskRoomReply { over: checked.err() }), Vec::new()))
}

/// Says whom blocks are charged to.
pub(crate) async fn vouch(inner: &Inner, request: &Request) -> Result<Reply, Refusal> {
    let asked: Vouch = from_header(&request.header)?;
    Ok(reply(to_header(&attribution::vouch(inner, &asked).await?), Vec::new()))
}

/// Shows that blocks are held.
pub(crate) async fn prove(inner: &Inner, from: Peer, request: Request) -> Result<Reply, Refusal> {
    let asked: Prove = from_header(&request.header)?;
    Ok(reply(to_header(&proof::prove(inner, &from, &asked).await?), Vec::new()))
}

/// Takes a copy for the cache.
pub(crate) fn cache(inner: &Inner, from: Peer, request: Request) -> Result<Reply, Refusal> {
    let taken = cache::take(inner, &from, &request)?;
    Ok(reply(to_header(&taken), Vec::new()))
}

/// Sends blocks asked for by key, as many as fit.
pub(crate) async fn fetch(inner: &Inner, request: Request) -> Result<Reply, Refusal> {
    let Fetch { keys } = from_header(&request.header)?;
    let (mut headers, mut parts, mut total) = (Vec::new(), Vec::new(), 0);
    let mut there = Vec::new();
    for key in keys.iter().take(MAX_BATCH_BLOCKS) {
        match inner.store.get(key).await {
            Ok(Some(block)) if !inner.leaving.denies(key) => {
                if total > 0 && total + block.bytes.len() > REPLY_BYTES {
                    break;
                }
                total += block.bytes.len();
                headers.push(inner.header_of(&block.info));
                parts.push(block.bytes);
            }
            Ok(_) if inner.leaving.denies(key) => {}
            Ok(_) => there.extend(follow::there(inner, key).await),
            Err(error) => note_store_error(inner, &error),
        }
    }
    add(&inner.counters.served, parts.len() as u64);
    add(&inner.counters.served_bytes, total as u64);
    let answer = FetchReply { blocks: headers.into(), there: there.into() };
    Ok(reply(to_header(&answer), parts))
}

/// Compares ranges. At least one claim is answered, whatever that costs; others only while
/// little has been looked at.
pub(crate) async fn reconcile(
    inner: &Inner,
    from: Peer,
    request: Request,
) -> Result<Reply, Refusal> {
    let Reconcile { claims } = from_header(&request.header)?;
    let is_acquaintance = inner.is_acquaintance(&from.id);
    let turn = inner.comparing.take(from.id, is_acquaintance, inner.env.now())?;
    let mut answers = Vec::with_capacity(claims.len());
    let (mut estimated_bytes, mut visited) = (0, 0);
    for claim in claims {
        let (answer, looks) = exchange::answer(inner, &claim)
            .await
            .map_err(|e| Refusal::new(Refusal::INTERNAL, e.to_string()))?;
        turn.spend(looks, inner.env.now());
        visited += looks;
        estimated_bytes += match &answer {
            reconcile::Answer::Same => 8,
            reconcile::Answer::Items(items) | reconcile::Answer::Some { items, .. } => {
                items.len() * 72 + 80
            }
            reconcile::Answer::Parts(parts) => parts.len() * 192,
        };
        answers.push(answer);
        // The reply must fit a header, and one answer has at most 2,048 × 72 bytes: the
        // asker asks again about the claims that are not answered.
        if estimated_bytes > 100_000 || visited > MAX_VISITED {
            break;
        }
    }
    Ok(reply(to_header(&ReconcileReply { answers }), Vec::new()))
}
