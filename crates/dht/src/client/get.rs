//! Fetching blocks (CFS Figure 5, client side: `lookup`).
//!
//! A fetch looks into the node's own store and cache, then walks the ring asking
//! `lookup_step`; once the replica set is known, [`super::replica_selection`] chooses among it;
//! the walk goes on to the root's replicas when the root fails, does not have the block, or
//! sends bytes that are not what the key names. Received blocks are verified here. Every
//! fetch ends by its deadline, and an error names the nodes asked and the answer of each.

use std::sync::{Arc, Mutex, MutexGuard};

use atoll_env::{BoxFuture, Instant, sleep};
use atoll_key::Key;
use atoll_overlay::walk::{Asked, Said, Step, Trace, WalkError, WalkLimits, walk};
use atoll_overlay::{Node, Route};
use bytes::Bytes;

use super::ask::{Answer, ask};
use super::replica_selection::{Replicas, ask_root};
use super::{Client, FIRST_PAUSE};
use crate::accounting::admission::Origin;
use crate::blocks::GetError;
use crate::cache;
use crate::placement::{expected_replicas, present_replicas};
use crate::replication::store::put_message;
use crate::rpc::Block;
use crate::stats::add;

/// The most questions of one walk: six routes, each of as many as the longest lookup takes.
const MAX_ASKS: usize = 160;
/// So many routes must lead to the same root before it is believed that a block is nowhere.
const CONFIRM_ABSENCE: usize = 2;

/// A block that was fetched.
#[derive(Clone, Debug)]
pub struct Fetched {
    /// Its bytes, verified.
    pub bytes: Bytes,
    /// The nodes asked on the way; empty if this node had it.
    pub trace: Trace,
    /// Whether it came from a cache, here or on the way.
    pub cached: bool,
}

/// What a walk found.
pub(crate) struct Found {
    pub block: Block,
    pub trace: Trace,
    /// Whether it came from a cache.
    cached: bool,
    /// The nodes on the way that would cache a copy.
    wanted: Vec<Node>,
}

/// Fetches a content block.
pub(crate) async fn get(client: &Arc<Client>, key: Key) -> Result<Fetched, GetError> {
    add(&client.counters.gets, 1);
    if let Some(bytes) = local(client, &key).await {
        return Ok(Fetched { bytes, trace: Trace::default(), cached: false });
    }
    if let Some(block) = cache::own(&client.cache, &key) {
        return Ok(Fetched { bytes: block.bytes, trace: Trace::default(), cached: true });
    }
    let found = find(client, key, client.cache.is_on()).await?;
    heal(client, &found.block, &found.trace);
    cache::spread(&client.cache, &found.block, &found.trace, &found.wanted);
    cache::keep_own(&client.cache, &found.block);
    Ok(Fetched { bytes: found.block.bytes, trace: found.trace, cached: found.cached })
}

/// Fetches a block of any kind from another node. A copy from a cache will do if
/// `may_be_cached`; otherwise only what a replica holds.
pub(crate) async fn find(
    client: &Arc<Client>,
    key: Key,
    may_be_cached: bool,
) -> Result<Found, GetError> {
    let deadline = client.env.now() + client.config.get_limit;
    let mut pause = FIRST_PAUSE;
    loop {
        let limits = limits(client, deadline);
        let error = match search(client, key, may_be_cached, limits).await {
            Ok(found) => return Ok(found),
            Err(error) => error,
        };
        // All nodes that should have it have answered: asking again will not help.
        let all_answered =
            matches!(&error, WalkError::Absent { trace, .. } if trace.all_answered());
        if all_answered || client.env.now() + pause >= deadline {
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
pub(super) fn limits(client: &Client, deadline: Instant) -> WalkLimits {
    WalkLimits {
        replicas: client.config.replicas,
        deadline: deadline.since(client.env.now()),
        selection: client.config.selection,
        routes: client.config.routes,
        confirm: if client.config.mechanisms.confirmed_absence { CONFIRM_ABSENCE } else { 1 },
        asks: MAX_ASKS,
        hedge: client.config.mechanisms.hedged_walks,
        guess: true,
        density: client.config.mechanisms.density,
        failure_reports: client.config.mechanisms.failure_reports,
    }
}

/// What one walk has learned besides what the walker keeps.
#[derive(Default)]
struct Notes {
    cached: bool,
    wanted: Vec<Node>,
}

/// One walk.
pub(super) async fn search(
    client: &Arc<Client>,
    key: Key,
    may_be_cached: bool,
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
            let answer = ask(client, node, key, false, may_be_cached).await?;
            match &answer {
                Answer::Cached(_) => lock(&notes).cached = true,
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
    let Notes { cached, wanted } = std::mem::take(&mut *lock(&notes));
    Ok(Found { block: found.value, trace: found.trace, cached, wanted })
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

pub(super) async fn send_copies(client: Arc<Client>, to: Vec<Node>, block: Block) {
    let key = block.header.key;
    let (put, parts) = put_message(&Origin::Carrier, vec![block], false);
    for node in to {
        if let Err(error) = client.call(&node, &put, parts.clone()).await {
            tracing::info!(%key, ?node, %error, "a replica could not be healed");
        }
    }
}
