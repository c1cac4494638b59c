//! Fetching signed blocks: the newest version that a majority of the replica set holds.
//!
//! An update is acknowledged by a majority, so any majority has a member that knows it. A version
//! older than one that this node has read or written before is never returned (`seen`).

use std::collections::BTreeSet;
use std::sync::Arc;

use atoll_env::{BoxFuture, Instant, sleep};
use atoll_key::{Key, SignedBlock};
use atoll_net::CallError;
use atoll_overlay::peer_book::Standing;
use atoll_overlay::walk::Step;
use atoll_overlay::{Node, distinct_peers};
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;

use super::Client;
use super::ask::ask;
use super::get::{FIRST_PAUSE, limits, search, send_copies};
use crate::blocks::GetError;
use crate::diversion::follow;
use crate::rpc::{Block, BlockHeader};
use crate::stats::add;

/// A newer version that was seen before is looked for at so many further replica sets' worth of
/// nodes after the set. A guess.
const BEYOND_SETS: usize = 2;
/// Fetches the newest signed block that the replicas which answer hold.
pub(crate) async fn get_signed(client: &Arc<Client>, key: Key) -> Result<SignedBlock, GetError> {
    add(&client.counters.gets, 1);
    let deadline = client.env.now() + client.config.get_limit;
    let mut pause = FIRST_PAUSE;
    loop {
        let error = match ask_all_replicas(client, key, deadline).await {
            Ok(block) => {
                saw(client, key, block.version);
                return Ok(block);
            }
            Err(error) => error,
        };
        let final_answer = matches!(error, GetError::NotFound { .. });
        if final_answer || client.env.now() + pause >= deadline {
            add(&client.counters.failed_gets, 1);
            return Err(error);
        }
        sleep(&*client.env, pause).await;
        pause *= 2;
    }
}

/// This node has read or written that version of a signed block.
pub(crate) fn saw(client: &Client, key: Key, version: u64) {
    if !client.config.mechanisms.seen_versions {
        return;
    }
    client.seen.saw(&client.env, &client.durable, key, version);
}

async fn ask_all_replicas(
    client: &Arc<Client>,
    key: Key,
    deadline: Instant,
) -> Result<SignedBlock, GetError> {
    let nodes = client.overlay.find_successors(&key).await;
    let replicas = distinct_peers(nodes.as_deref().unwrap_or(&[]), client.config.replicas);
    let (answers, late) = ask_signed_of(client, &replicas, key).await;
    add(&client.counters.get_calls, replicas.len() as u64);
    let holders = answers.iter().filter(|answer| matches!(answer, Ok(Some(_)))).count();
    let elsewhere = if 2 * holders > replicas.len() || client.config.routes <= 1 {
        None
    } else {
        // Hardly anybody who should have it has it: they may not be its replica set at all.
        let found = search(client, key, false, limits(client, deadline)).await;
        found.ok().and_then(|found| signed(&key, found.block))
    };
    let of_set = || answers.iter().filter_map(|answer| answer.as_ref().ok()?.as_ref());
    let best = of_set().chain(&elsewhere).map(|(block, _)| block.version).max();
    let seen = client.seen.version(&key).filter(|seen| best.is_none_or(|best| best < *seen));
    let beyond = match seen {
        Some(seen) => beyond_set(client, nodes.as_deref().unwrap_or(&[]), key, seen).await,
        None => None,
    };
    let newest = of_set()
        .chain(&elsewhere)
        .chain(&beyond)
        .max_by(|a, b| a.0.version.cmp(&b.0.version).then_with(|| a.0.bytes().cmp(b.0.bytes())));
    if let Some((newest, header)) = newest {
        if let Some(seen) = seen.filter(|seen| newest.version < *seen) {
            let held = newest.version;
            tracing::warn!(%key, held, seen, "only an older version is found than seen before");
            let told = format!(
                "only version {held} is found, and this node has seen version {seen}: the nodes \
                 that hold it may come back (or publish again; if they are gone for good, accept \
                 the older one with `atoll settings --forget-absent`)"
            );
            return Err(GetError::Unavailable { key, told });
        }
        let stale: Vec<Node> = replicas
            .iter()
            .zip(&answers)
            .filter(|(_, answer)| match answer {
                Ok(Some((held, _))) => held.version < newest.version,
                Ok(None) => true,
                Err(_) => false,
            })
            .map(|(node, _)| *node)
            .collect();
        let (newest, header) = (newest.clone(), *header);
        if !(stale.is_empty() && late.is_empty()) {
            let update = update_stale(client.clone(), stale, late, newest.clone(), header);
            client.env.spawn(Box::pin(update));
        }
        return Ok(newest);
    }
    Err(missing(key, nodes.err().map(|e| e.to_string()), &replicas, &answers))
}

/// Why no signed block was found.
fn missing(
    key: Key,
    no_root: Option<String>,
    replicas: &[Node],
    answers: &[HeldSigned],
) -> GetError {
    let said: Vec<String> = replicas
        .iter()
        .zip(answers)
        .map(|(node, answer)| match answer {
            Ok(_) => format!("{node} does not have it"),
            Err(error) => format!("{node} {error}"),
        })
        .collect();
    let told = no_root.unwrap_or_else(|| said.join("; "));
    if replicas.is_empty() || answers.iter().any(Result::is_err) {
        GetError::Unavailable { key, told }
    } else {
        GetError::NotFound { key, told }
    }
}

/// A version of a signed block at least as high as `seen`, from this node's own store or the
/// nodes after the replica set: those that were the set while others were cut off, or will be
/// when the ring has closed again. `nodes` are the root and its successors.
async fn beyond_set(
    client: &Arc<Client>,
    nodes: &[Node],
    key: Key,
    seen: u64,
) -> Option<(SignedBlock, BlockHeader)> {
    let replicas = client.config.replicas;
    let me = Node::of(client.transport.local());
    let near = distinct_peers(nodes, replicas + BEYOND_SETS * replicas);
    let near = near.into_iter().skip(replicas).filter(|node| !client.is_me(node));
    let mut calls: FuturesUnordered<_> =
        std::iter::once(me).chain(near).map(|node| ask_signed(client, node, key)).collect();
    while let Some(held) = calls.next().await {
        if let Ok(Some((block, header))) = held
            && block.version >= seen
        {
            return Some((block, header));
        }
    }
    None
}

type HeldSigned = Result<Option<(SignedBlock, BlockHeader)>, CallError>;

/// Questions to replicas that are still under way.
type Late = FuturesUnordered<BoxFuture<'static, (usize, Node, HeldSigned)>>;

/// What each of these replicas holds, in their order, and who was not waited for.
///
/// An update is acknowledged by a majority of the replica set, so any majority has one that
/// knows it: once a majority holds the block, and all who answered hold the same version of
/// it, the others are not waited for. They are while two versions are about (the newest is
/// wanted, and who keeps an old one back may have accomplices). Once one was found that holds
/// it, those that left an earlier call unanswered are not waited for either: of many nodes
/// that died at once each would cost the reader its whole patience.
async fn ask_signed_of(
    client: &Arc<Client>,
    replicas: &[Node],
    key: Key,
) -> (Vec<HeldSigned>, Late) {
    let (book, now) = (client.overlay.peer_book(), client.env.now());
    let answers = |n: &Node| client.is_me(n) || book.standing(&n.peer, now) == Standing::Answers;
    let nodes = replicas.iter().copied().enumerate();
    let mut waited_for: BTreeSet<usize> =
        nodes.clone().filter(|(_, node)| answers(node)).map(|(at, _)| at).collect();
    let mut calls = Late::new();
    for (at, node) in nodes {
        let client = client.clone();
        calls.push(Box::pin(async move { (at, node, ask_signed(&client, node, key).await) }));
    }
    let mut heard: Vec<HeldSigned> = replicas.iter().map(|_| Err(CallError::TimedOut)).collect();
    let (mut holders, mut version, mut agree) = (0, None, true);
    loop {
        let majority = 2 * holders > replicas.len() && client.config.mechanisms.signed_majority;
        if (majority && agree) || (holders > 0 && waited_for.is_empty()) {
            return (heard, calls);
        }
        let Some((at, _, held)) = calls.next().await else { return (heard, calls) };
        waited_for.remove(&at);
        match &held {
            Ok(Some((block, _))) => {
                holders += 1;
                agree &= *version.get_or_insert(block.version) == block.version;
            }
            // A replica that does not have it may have missed an update.
            Ok(None) => agree = false,
            Err(_) => {}
        }
        heard[at] = held;
    }
}

/// Sends the block to replicas that hold an older version or none: those known, and those
/// that answer late.
async fn update_stale(
    client: Arc<Client>,
    mut stale: Vec<Node>,
    mut late: Late,
    newest: SignedBlock,
    header: BlockHeader,
) {
    while let Some((_, node, held)) = late.next().await {
        match held {
            Ok(Some((block, _))) if block.version >= newest.version => {}
            Ok(_) => stale.push(node),
            Err(_) => {}
        }
    }
    if !stale.is_empty() && header.lease_secs > 0 {
        let block = Block { header, bytes: newest.bytes().clone() };
        send_copies(client, stale, block).await;
    }
}

/// The signed block that one replica holds, verified.
async fn ask_signed(client: &Arc<Client>, node: Node, key: Key) -> HeldSigned {
    let found = if client.is_me(&node) {
        match client.read(&key).await {
            Some(block) => {
                Some(Block { header: client.header_of(&block.info), bytes: block.bytes })
            }
            None => follow::own(client, &key).await,
        }
    } else {
        match ask(client.clone(), node, key, true, false).await?.into_step() {
            Step::Done(block) => Some(block),
            Step::Absent(_) | Step::Route(_) => None,
        }
    };
    Ok(found.and_then(|block| signed(&key, block)))
}

fn signed(key: &Key, block: Block) -> Option<(SignedBlock, BlockHeader)> {
    let signed = SignedBlock::decode(&block.bytes).ok()?;
    (signed.key() == *key).then_some((signed, block.header))
}
