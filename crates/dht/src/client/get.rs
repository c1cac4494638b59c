//! Fetching blocks (CFS Figure 5, client side: `lookup`).
//!
//! A fetch looks into the node's own store and cache, then walks the ring asking
//! `lookup_step`; once the replica set is known, [`fetch`](crate::client::replica_selection) chooses among it;
//! the walk goes on to the root's replicas when the root fails, does not have the block, or
//! sends bytes that are not what the key names. What comes back is verified here. Every
//! fetch ends by its deadline, and a failure says who was asked and what each said.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use atoll_env::{BoxFuture, Instant, sleep};
use atoll_key::{Key, SignedBlock};
use atoll_net::{CallError, Refusal};
use atoll_overlay::peer_book::{Misdeed, Standing};
use atoll_overlay::walk::{Asked, Said, Step, Trace, WalkError, WalkLimits, walk};
use atoll_overlay::{Node, Route, distinct_peers};
use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;

use super::replica_selection::{Replicas, ask_root};
use crate::accounting::admission::Origin;
use crate::blocks::GetError;
use crate::cache;
use crate::client::Client;
use crate::diversion::follow;
use crate::placement::{expected_replicas, present_replicas};
use crate::replication::store::{put_message, store_here};
use crate::rpc::{Block, BlockHeader, LookupReply, LookupStep};
use crate::stats::add;

/// The first pause before trying again; doubled each time.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// The most questions of one walk: six routes, each of as many as the longest lookup takes.
const MAX_ASKS: usize = 160;
/// So many routes must lead to the same root before it is believed that a block is nowhere.
const CONFIRM_ABSENCE: usize = 2;
/// A newer version that was seen before is looked for at so many further replica sets' worth of
/// nodes after the set. A guess.
const BEYOND_SETS: usize = 2;
/// A refusal's code for bytes that are not what their key says; made here, never sent.
const BAD_BLOCK: u16 = 100;

/// A block that was fetched.
#[derive(Clone, Debug)]
pub struct Fetched {
    /// Its bytes, verified.
    pub bytes: Bytes,
    /// Who was asked on the way; empty if this node had it.
    pub trace: Trace,
    /// Whether it came from a cache, here or on the way.
    pub cached: bool,
}

/// What a walk found.
pub(crate) struct Found {
    pub block: Block,
    pub trace: Trace,
    /// If it came from a cache: how long ago a replica had it.
    pub age: Option<Duration>,
    /// Who on the way would cache a copy.
    wanted: Vec<Node>,
}

/// Fetches a content block.
pub(crate) async fn get(client: &Arc<Client>, key: Key) -> Result<Fetched, GetError> {
    add(&client.counters.gets, 1);
    if let Some(bytes) = local(client, &key).await {
        return Ok(Fetched { bytes, trace: Trace::default(), cached: false });
    }
    if let Some(block) = cache::own(&client.cache, &key, Duration::ZERO) {
        return Ok(Fetched { bytes: block.bytes, trace: Trace::default(), cached: true });
    }
    let cached = client.cache.is_on().then_some(Duration::ZERO);
    let found = find(client, key, cached).await?;
    heal(client, &found.block, &found.trace);
    cache::spread(&client.cache, &found.block, &found.trace, &found.wanted);
    cache::keep_own(&client.cache, &found.block, found.age.unwrap_or_default());
    let cached = found.age.is_some();
    Ok(Fetched { bytes: found.block.bytes, trace: found.trace, cached })
}

/// Fetches a block of any kind from another node. With `cached`, a copy from a cache will
/// do, a signed block's no older than that; otherwise only what a replica holds.
pub(crate) async fn find(
    client: &Arc<Client>,
    key: Key,
    cached: Option<Duration>,
) -> Result<Found, GetError> {
    let deadline = client.env.now() + client.config.get_limit;
    let mut pause = FIRST_PAUSE;
    loop {
        let limits = limits(client, deadline);
        let error = match search(client, key, cached, limits).await {
            Ok(found) => return Ok(found),
            Err(error) => error,
        };
        // Everybody who should have it has answered: asking again will not help.
        let all_answered =
            matches!(&error, WalkError::Absent { trace, .. } if trace.all_answered());
        if all_answered || client.env.now() + pause >= deadline {
            add(&client.counters.failed_gets, 1);
            let told = told(&error);
            // A node that is cut off speaks only for itself.
            let present = present_replicas(client);
            return Err(if all_answered && present >= expected_replicas(client) {
                GetError::NotFound { key, told }
            } else {
                GetError::Unavailable { key, told }
            });
        }
        sleep(&*client.env, pause).await;
        pause *= 2;
    }
}

/// How carefully a walk looks that is to end by then.
fn limits(client: &Client, deadline: Instant) -> WalkLimits {
    WalkLimits {
        replicas: client.config.replicas,
        deadline: deadline.since(client.env.now()),
        selection: client.config.selection,
        routes: client.config.routes,
        confirm: if client.config.mechanisms.confirmed_absence { CONFIRM_ABSENCE } else { 1 },
        asks: MAX_ASKS,
        hedge: client.config.hedge && client.config.mechanisms.hedged_walks,
        guess: true,
    }
}

/// What one walk has learned besides what the walker keeps.
#[derive(Default)]
struct Notes {
    age: Option<Duration>,
    wanted: Vec<Node>,
}

/// One walk.
async fn search(
    client: &Arc<Client>,
    key: Key,
    cached: Option<Duration>,
    limits: WalkLimits,
) -> Result<Found, WalkError> {
    let notes = Arc::new(Mutex::new(Notes::default()));
    let replicas = match client.overlay.known_successors(&key) {
        Some(named) => {
            let mut known = Replicas::default();
            known.set_nodes(named);
            known
        }
        None if !client.config.mechanisms.guessed_sets => Replicas::default(),
        None => Replicas::guessed(client.overlay.likely_roots(&key)),
    };
    let replicas = Arc::new(Mutex::new(replicas));
    let step = |node, as_root| -> BoxFuture<'static, _> {
        let (client, notes, replicas) = (client.clone(), notes.clone(), replicas.clone());
        Box::pin(async move {
            if as_root {
                return ask_root(client, node, key, replicas).await;
            }
            let answer = ask(client, node, key, false, cached).await?;
            match &answer {
                Answer::Cached(_, age) => lock(&notes).age = Some(*age),
                Answer::Wanted(_) => lock(&notes).wanted.push(node),
                _ => {}
            }
            let step = answer.into_step();
            if let Step::Route(Route::Root(named)) = &step {
                lock(&replicas).set_nodes(named.clone());
            }
            Ok(step)
        })
    };
    let result = walk(&*client.env, &*client.overlay, &key, limits, step).await;
    let replicas = std::mem::take(&mut *lock(&replicas));
    let asked_before = Trace(replicas.asked.clone()).calls();
    let calls = match &result {
        Ok(found) => found.trace.calls(),
        Err(error) => error.trace().map_or(0, Trace::calls),
    };
    add(&client.counters.get_calls, (calls + asked_before) as u64);
    let mut found = result?;
    let last = found.trace.0.pop();
    found.trace.0.extend(replicas.asked);
    found.trace.0.extend(
        last.map(|asked| Asked { node: replicas.served_by.unwrap_or(asked.node), ..asked }),
    );
    let Notes { age, wanted } = std::mem::take(&mut *lock(&notes));
    Ok(Found { block: found.value, trace: found.trace, age, wanted })
}

fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().expect("no holder of this lock panics")
}

fn told(error: &WalkError) -> String {
    error.trace().map_or_else(|| error.to_string(), Trace::to_string)
}

/// The block from this node's own store, if it is there and sound.
async fn local(client: &Client, key: &Key) -> Option<Bytes> {
    let held = client.read(key).await?;
    held.info.kind.verify(key, &held.bytes).is_ok().then_some(held.bytes)
}

/// What one node answered.
pub(crate) enum Answer {
    /// As the walk understands it.
    Plain(Step<Block>),
    /// It had it in its cache; how long ago a replica had it.
    Cached(Block, Duration),
    /// It does not have it, and would cache it.
    Wanted(Route),
}

impl Answer {
    pub fn into_step(self) -> Step<Block> {
        match self {
            Answer::Plain(step) => step,
            Answer::Cached(block, _) => Step::Done(block),
            Answer::Wanted(route) => Step::Route(route),
        }
    }
}

/// Asks one node once, and verifies what it sends.
pub(crate) async fn ask(
    client: Arc<Client>,
    node: Node,
    key: Key,
    as_root: bool,
    cached: Option<Duration>,
) -> Result<Answer, CallError> {
    if client.is_me(&node) {
        if let Some(block) = follow::own(&client, &key).await {
            return Ok(Answer::Plain(Step::Done(block)));
        }
        return Ok(Answer::Plain(Step::Absent(client.overlay.successors_of(&node))));
    }
    let cached_ms = cached.map(|age| u64::try_from(age.as_millis()).unwrap_or(u64::MAX));
    let step = LookupStep { key, as_root, cached_ms };
    let (answer, parts) = client.call(&node, &step, Vec::new()).await?;
    Ok(match answer {
        LookupReply::Absent(successors) => Answer::Plain(Step::Absent(successors)),
        LookupReply::Route(route) => Answer::Plain(Step::Route(route)),
        LookupReply::Wanted(route) => Answer::Wanted(route),
        LookupReply::Found(header) => {
            Answer::Plain(Step::Done(verified(&client, &node, key, header, parts)?))
        }
        LookupReply::There(holder) => {
            let (header, parts) = follow::ask_holder(&client, &node, holder, key).await?;
            let block = verified(&client, &Node::of(holder), key, header, parts)?;
            Answer::Plain(Step::Done(block))
        }
        LookupReply::Cached { header, age_ms } => {
            let block = verified(&client, &node, key, header, parts)?;
            let (age, limit) = (Duration::from_millis(age_ms), cached.unwrap_or_default());
            if header.kind.is_mutable() && age > limit {
                return Err(Refusal::new(BAD_BLOCK, "it sent a stale copy").into());
            }
            Answer::Cached(block, age)
        }
    })
}

/// The block that `node` sent, if it is what its key says.
fn verified(
    client: &Client,
    node: &Node,
    key: Key,
    header: BlockHeader,
    parts: Vec<Bytes>,
) -> Result<Block, CallError> {
    let bytes = parts.into_iter().next().unwrap_or_default();
    if let Err(error) = header.kind.verify(&key, &bytes) {
        tracing::warn!(%key, from = ?node, %error, "dropped a bad block");
        client.counters.mark(node.peer.id);
        client.overlay.peer_book().lied(&node.peer.id, Misdeed::BadBlock, client.env.now());
        return Err(Refusal::new(BAD_BLOCK, format!("it sent a bad block: {error}")).into());
    }
    Ok(Block { header: BlockHeader { key, ..header }, bytes })
}

/// The root did not have what a replica had: it gets it now, not at the next round of repair.
fn heal(client: &Arc<Client>, block: &Block, trace: &Trace) {
    let lacking: Vec<Node> = trace
        .0
        .iter()
        .filter(|asked| asked.said == Said::Absent)
        .map(|asked| asked.node)
        .take(client.config.replicas)
        .collect();
    // A copy of what has expired would outlive it.
    let heals = client.config.mechanisms.healing;
    if lacking.is_empty() || block.header.lease_secs == 0 || !heals {
        return;
    }
    client.env.spawn(Box::pin(send_copies(client.clone(), lacking, block.clone())));
}

async fn send_copies(client: Arc<Client>, to: Vec<Node>, block: Block) {
    let (put, parts) = put_message(&Origin::Carrier, vec![block.clone()], false);
    for node in to {
        if client.is_me(&node) {
            store_here(&client, &node.peer, std::slice::from_ref(&block)).await;
        } else if let Err(error) = client.call(&node, &put, parts.clone()).await {
            tracing::info!(key = %block.header.key, ?node, %error, "a replica could not be healed");
        }
    }
}

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

/// Whether this node has seen a newer version of a signed block.
fn is_older_than_seen(client: &Client, key: &Key, version: u64) -> bool {
    client.config.mechanisms.seen_versions
        && client.seen.version(key).is_some_and(|seen| version < seen)
}

/// Fetches a signed block that a replica had at most `max_age` ago.
pub(crate) async fn recent_signed(
    client: &Arc<Client>,
    key: Key,
    max_age: Duration,
) -> Result<SignedBlock, GetError> {
    add(&client.counters.gets, 1);
    let max_age = max_age.min(client.config.signed_cache);
    let told = |error| GetError::NotFound { key, told: format!("not a signed block: {error}") };
    if let Some(copy) = cache::own(&client.cache, &key, max_age) {
        let block = SignedBlock::decode(&copy.bytes).map_err(told)?;
        if !is_older_than_seen(client, &key, block.version) {
            return Ok(block);
        }
    }
    let cached = (client.cache.is_on() && !max_age.is_zero()).then_some(max_age);
    let found = find(client, key, cached).await?;
    let block = SignedBlock::decode(&found.block.bytes).map_err(told)?;
    if is_older_than_seen(client, &key, block.version) {
        return get_signed(client, key).await;
    }
    cache::keep_own(&client.cache, &found.block, found.age.unwrap_or_default());
    saw(client, key, block.version);
    Ok(block)
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
        let found = search(client, key, None, limits(client, deadline)).await;
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
    let said: Vec<String> = replicas
        .iter()
        .zip(&answers)
        .map(|(node, answer)| match answer {
            Ok(_) => format!("{node} does not have it"),
            Err(error) => format!("{node} {error}"),
        })
        .collect();
    let told = nodes.err().map_or_else(|| said.join("; "), |error| error.to_string());
    if replicas.is_empty() || answers.iter().any(Result::is_err) {
        Err(GetError::Unavailable { key, told })
    } else {
        Err(GetError::NotFound { key, told })
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
            // Who should have it and does not may have missed an update.
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
        match ask(client.clone(), node, key, true, None).await?.into_step() {
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
