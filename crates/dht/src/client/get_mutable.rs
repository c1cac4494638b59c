//! Reading mutable blocks at their replica set, in one round trip if the set is known.
//!
//! All replicas are asked at once, the nearest for the block and the others for their versions
//! only. An update is acknowledged by a majority, so any majority has a member that knows it: once
//! a majority says the same version and the block of it has come, the others are not waited for. A
//! replica that says a higher version has to show the block. A version older than one that this
//! node has read or written before is never returned (`seen`). A reader that needs *at least* some
//! version takes the first block that fits (Pastis §3.3).
//!
//! If the versions of a kind are joined, the reader fetches each different block that a replica names
//! and joins them: each pair of three updates may have one replica in common, and all three none.
//! It waits for all replicas that answer in time, as in Pastis (§3.4), so that a liar and a stale
//! replica hide nothing that the third one holds.
//!
//! A replica that answers neither in its usual time nor to a ping (`rpc::overdue`) is not waited for once a majority
//! has answered. Its answer still counts, and if it sends the block, another is asked for it at once.
//!
//! If the set has to be looked up, a node before the root names it, and the root is asked last. Meanwhile the nodes
//! that were named are asked for the block already (*early questions*). They count only if the lookup ends at the
//! same set, so they are trusted no more than others. This takes the place of Past's fast `lookupHandles`, whose
//! root passes a reader's question on to the replicas (Pastis §3.3): it saves the same trip.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use atoll_env::{BoxFuture, Instant, Moment, Notify, sleep};
use atoll_key::{BlockId, Key};
use atoll_net::CallError;
use atoll_overlay::walk::{WalkError, may_follow};
use atoll_overlay::{Node, distinct_peers};
use futures_util::StreamExt;
use futures_util::future::{Either, pending, select};
use futures_util::stream::FuturesUnordered;

use super::ask::verified;
use super::get::{limits, search, send_copies};
use super::known_sets::{KnownSets, NamedNodes};
use super::replica_selection::by_nearness;
use super::{Client, FIRST_PAUSE};
use crate::blocks::{GetError, HeldBlock, Wanted};
use crate::cache::promised::{Asking, promised_by_majority};
use crate::placement::size_of;
use crate::rpc::overdue::{Heard, ended, hear};
use crate::rpc::quorum::answers;
use crate::rpc::{Block, BlockHeader, Read, ReadReply, Stamp, Watch};
use crate::stats::add;

/// A newer version that was seen before is looked for at so many further replica sets' worth of
/// nodes after the set. A guess.
const BEYOND_SETS: usize = 2;

/// A block that came from a replica, verified.
#[derive(Clone, Debug)]
struct Sent {
    stamp: Stamp,
    block: Block,
}

/// Fetches a mutable block.
pub(crate) async fn get_mutable(
    client: &Arc<Client>,
    id: BlockId,
    wanted: Wanted,
) -> Result<HeldBlock, GetError> {
    add(&client.counters.gets, 1);
    if let Some(held) = client.promised.get(&id.key, Moment::now(&*client.env))
        && id.kind.reaches(held.version, wanted.least())
    {
        return held.unless_removed(id);
    }
    let deadline = client.env.now() + client.config.get_limit;
    let mut pause = FIRST_PAUSE;
    loop {
        let error = match read_set(client, id, wanted, deadline).await {
            Ok(Sent { stamp: Stamp { version, .. }, block }) => {
                saw(client, id.key, version);
                return HeldBlock { version, bytes: block.bytes }.unless_removed(id);
            }
            Err(error) => error,
        };
        let final_answer = matches!(error, GetError::NotFound { .. });
        if final_answer || client.env.now() + pause >= deadline {
            return Err(error);
        }
        sleep(&*client.env, pause).await;
        pause *= 2;
    }
}

/// This node has read or written that version of a mutable block.
pub(crate) fn saw(client: &Client, key: Key, version: u64) {
    if !client.config.mechanisms.seen_versions {
        return;
    }
    client.seen.saw(&client.env, &client.durable, key, version);
}

/// Reads at the replica set; a remembered one that its root does not confirm is looked up again.
async fn read_set(
    client: &Arc<Client>,
    id: BlockId,
    wanted: Wanted,
    deadline: Instant,
) -> Result<Sent, GetError> {
    let mut anew = false;
    loop {
        let mut reading = Reading::new(client, id, wanted);
        reading.find_set(anew).await;
        reading.hear_all().await;
        let is_confirmed = anew || reading.is_confirmed();
        if is_confirmed || reading.fits().is_some() {
            let promised = reading.promised().filter(|_| is_confirmed);
            let asking = reading.asking.take();
            let found = reading.finish(deadline).await?;
            if let (Some(asking), Some(promised)) = (asking, promised) {
                let (version, bytes) = (found.stamp.version, found.block.bytes.clone());
                asking.keep(HeldBlock { version, bytes }, promised);
            }
            return Ok(found);
        }
        anew = true;
    }
}

/// What one replica says.
#[derive(Clone, Debug)]
struct Said {
    held: Option<Stamp>,
    block: Option<Block>,
    /// The tag of the replica set, if the replica is its root.
    set: Option<u64>,
    /// For how long it tells this node of the next change, if it does.
    promised: Option<Duration>,
}

type Answer = Result<Said, CallError>;
type Call = BoxFuture<'static, (usize, Heard<Answer>)>;

/// A block that is being read at its replica set.
struct Reading<'a> {
    client: &'a Arc<Client>,
    id: BlockId,
    wanted: Wanted,
    /// Asks to be told of the next change.
    asking: Option<Asking>,
    named: NamedNodes,
    /// Why no root was found: a liar may stand on the way. The block is looked for then.
    no_root: Option<String>,
    replicas: Vec<Node>,
    calls: FuturesUnordered<Call>,
    /// Of each replica.
    heard: Vec<Option<Answer>>,
    /// Those whose answer is waited for while no majority agrees.
    waited_for: BTreeSet<usize>,
    /// Those of `waited_for` that answered neither the call nor a ping: the read waits for them only until a majority has
    /// answered.
    silent: BTreeSet<usize>,
    /// The replicas asked for the block, and not only for its version.
    sends: BTreeSet<usize>,
}

impl Reading<'_> {
    fn new(client: &Arc<Client>, id: BlockId, wanted: Wanted) -> Reading<'_> {
        Reading {
            client,
            id,
            wanted,
            asking: ask_for_promises(client, id),
            named: NamedNodes { nodes: Vec::new(), is_remembered: false },
            no_root: None,
            replicas: Vec::new(),
            calls: FuturesUnordered::new(),
            heard: Vec::new(),
            waited_for: BTreeSet::new(),
            silent: BTreeSet::new(),
            sends: BTreeSet::new(),
        }
    }

    /// Finds the replica set, by a lookup if it is not known, and asks it.
    async fn find_set(&mut self, anew: bool) {
        let named = match KnownSets::known(self.client, &self.id.key, anew) {
            Some(named) => Ok(named),
            None => self.look_up().await,
        };
        match named {
            Ok(named) => {
                self.ask_set(distinct_peers(&named.nodes, self.client.config.replicas));
                self.named = named;
            }
            Err(error) => {
                self.ask_set(Vec::new());
                self.no_root = Some(error.to_string());
            }
        }
    }

    /// Looks the replica set up, and asks the nodes that are named as such on the way meanwhile.
    async fn look_up(&mut self) -> Result<NamedNodes, WalkError> {
        let (client, key) = (self.client, self.id.key);
        let told = Arc::new((Mutex::new(Vec::new()), Notify::default()));
        let tells = told.clone();
        let asks_early = client.config.mechanisms.early_questions;
        let named = move |nodes: &[Node]| {
            if asks_early {
                *tells.0.lock().expect("no holder of this lock panics") = nodes.to_vec();
                tells.1.notify();
            }
        };
        let mut lookup = Box::pin(KnownSets::look_up(client, &key, Box::new(named)));
        loop {
            let answered = {
                let (named, answer) = (told.1.notified(), next_of(&mut self.calls));
                let (named, answer) = (std::pin::pin!(named), std::pin::pin!(answer));
                match select(&mut lookup, select(named, answer)).await {
                    Either::Left((found, _)) => return found,
                    Either::Right((Either::Left(_), _)) => None,
                    Either::Right((Either::Right((answered, _)), _)) => Some(answered),
                }
            };
            if let Some((at, answer)) = answered {
                self.take(at, answer);
                continue;
            }
            let named = told.0.lock().expect("no holder of this lock panics").clone();
            let set = distinct_peers(&named, client.config.replicas);
            // A shorter list cannot be the set. Once a lookup: liars on the way could name ever new nodes.
            let may_be_it =
                set.len() == client.config.replicas && may_follow(&*client.overlay, &key, &named);
            if may_be_it && self.replicas.is_empty() {
                self.ask_set(set);
            }
        }
    }

    /// Asks all of a replica set: the nearest for the block, the others for their versions. Does nothing if these
    /// are being asked.
    fn ask_set(&mut self, replicas: Vec<Node>) {
        if self.replicas == replicas {
            return;
        }
        self.calls = FuturesUnordered::new();
        self.heard = vec![None; replicas.len()];
        (self.sends, self.silent) = (BTreeSet::new(), BTreeSet::new());
        self.replicas = replicas;
        let all = 0..self.replicas.len();
        self.waited_for = all.filter(|at| answers(self.client, &self.replicas[*at])).collect();
        let nearest = self.nearest(0..self.replicas.len());
        for at in 0..self.replicas.len() {
            self.ask(at, Some(at) == nearest);
        }
    }

    fn take(&mut self, at: usize, heard: Heard<Answer>) {
        match heard {
            Heard::Answer(answer) => {
                self.waited_for.remove(&at);
                self.silent.remove(&at);
                self.heard[at] = Some(answer);
            }
            Heard::Silent(call) => {
                self.silent.insert(at);
                self.calls.push(Box::pin(async move { (at, Heard::Answer(call.await)) }));
            }
        }
        self.ask_for_newest();
    }

    /// Hears all replicas, until what is wanted has come or no more is to be expected in time.
    ///
    /// Once one was found that holds the block, replicas that left an earlier call unanswered are
    /// not waited for: of many nodes that died at once each would cost the reader its whole
    /// patience.
    async fn hear_all(&mut self) {
        while !self.is_over() {
            let Some((at, answer)) = self.calls.next().await else { return };
            self.take(at, answer);
        }
    }

    /// The replica expected to answer first: this node, or the nearest.
    fn nearest(&self, among: impl Iterator<Item = usize>) -> Option<usize> {
        let nodes: Vec<Node> = among.map(|at| self.replicas[at]).collect();
        let own = nodes.iter().find(|node| self.client.is_me(node)).copied();
        let nearest = own.or_else(|| by_nearness(self.client, nodes).pop())?;
        self.replicas.iter().position(|node| *node == nearest)
    }

    fn ask(&mut self, at: usize, with_bytes: bool) {
        if with_bytes {
            self.sends.insert(at);
        }
        let (client, node, id) = (self.client.clone(), self.replicas[at], self.id);
        let promise = self.asking.as_ref().map(Asking::number);
        let asked = async move { ask(&client, node, (id, with_bytes), promise).await };
        let heard = hear(self.client, node, asked);
        self.calls.push(Box::pin(async move { (at, heard.await) }));
    }

    fn said(&self) -> impl Iterator<Item = (usize, &Said)> {
        let heard = self.heard.iter().enumerate();
        heard.filter_map(|(at, heard)| Some((at, heard.as_ref()?.as_ref().ok()?)))
    }

    /// The highest version that was said and not disproved; of several blocks of that version the
    /// one that most replicas hold.
    fn newest_said(&self) -> Option<Stamp> {
        let stamps = || self.said().filter_map(|(_, said)| said.held);
        let holders = |stamp: &Stamp| stamps().filter(|held| held == stamp).count();
        stamps().max_by_key(|stamp| (stamp.version, holders(stamp), stamp.digest))
    }

    /// The blocks that are needed, of those that were said to be held: the newest, or each different
    /// one where they are joined.
    fn needed(&self) -> BTreeSet<Stamp> {
        match self.id.kind.joins() {
            true => self.said().filter_map(|(_, said)| said.held).collect(),
            false => self.newest_said().into_iter().collect(),
        }
    }

    fn sent(&self) -> impl Iterator<Item = Sent> {
        self.said()
            .filter_map(|(_, said)| Some(Sent { stamp: said.held?, block: said.block.clone()? }))
    }

    /// The block that was said to be the newest, if it has come; all that have come where they are
    /// joined.
    fn newest(&self) -> Option<Sent> {
        if self.id.kind.joins() {
            return self.sent().fold(None, |all, one| newer(self.id, all, Some(one)));
        }
        let newest = self.newest_said()?;
        self.sent().find(|sent| sent.stamp == newest)
    }

    /// A block that is needed and has not come.
    fn missing_block(&self) -> Option<Stamp> {
        self.needed().into_iter().rev().find(|stamp| self.sent().all(|sent| sent.stamp != *stamp))
    }

    /// The newest block that has come, if a version that is new enough is all that is wanted.
    fn fits(&self) -> Option<Sent> {
        let Wanted::AtLeast(least) = self.wanted else { return None };
        let least = least.max(self.client.seen.version(&self.id.key));
        let newest = self.sent().max_by_key(|sent| sent.stamp);
        newest.filter(|sent| self.id.kind.reaches(sent.stamp.version, least))
    }

    fn is_confirmed(&self) -> bool {
        let root = self.heard.first().and_then(|heard| heard.as_ref()?.as_ref().ok());
        self.named.is_confirmed(&self.replicas, root.and_then(|root| root.set))
    }

    /// For how long a majority tells this node of the next change, if no replica that answered will not.
    fn promised(&self) -> Option<Duration> {
        let promised: Option<Vec<Duration>> = self.said().map(|(_, said)| said.promised).collect();
        promised_by_majority(promised?, size_of(self.client, &self.replicas))
    }

    /// Whether enough has come.
    fn is_over(&self) -> bool {
        if self.fits().is_some() {
            return true;
        }
        let (Some(newest), holders) = (self.newest(), self.holders()) else { return false };
        let agrees = self.said().all(|(_, said)| said.held == Some(newest.stamp));
        let majority = 2 * holders > self.replicas.len();
        // A liar and a replica that has missed an update may be a majority. Where versions are joined
        // each replica may have something that the rest lacks besides, so all are waited for.
        let by_majority = self.client.config.mechanisms.mutable_majority && !self.id.kind.joins();
        let root_was_heard = !self.named.is_remembered || !self.is_waited_for(0);
        let waits = self.waited_for.iter().any(|at| self.is_waited_for(*at));
        majority && agrees && by_majority && root_was_heard || !waits
    }

    /// Whether a replica's answer is worth waiting for.
    fn is_waited_for(&self, at: usize) -> bool {
        // Without a majority a read could miss an update.
        let has_majority = 2 * self.said().count() > size_of(self.client, &self.replicas);
        self.waited_for.contains(&at) && !(has_majority && self.silent.contains(&at))
    }

    fn holders(&self) -> usize {
        self.said().filter(|(_, said)| said.held.is_some()).count()
    }

    /// If a block that is needed has not come, asks the nearest replica that holds it.
    fn ask_for_newest(&mut self) {
        let comes = |at: &usize| self.heard[*at].is_none() && !self.silent.contains(at);
        let under_way = self.sends.iter().any(comes);
        if under_way {
            return;
        }
        let Some(missing) = self.missing_block() else { return };
        let can_send =
            self.said().filter(|(at, s)| s.held == Some(missing) && !self.sends.contains(at));
        let can_send: Vec<usize> = can_send.map(|(at, _)| at).collect();
        if let Some(at) = self.nearest(can_send.into_iter()) {
            self.heard[at] = None;
            self.waited_for.insert(at);
            self.ask(at, true);
        }
    }

    /// The newest block of all that can be found, and sends it to replicas that lack it.
    async fn finish(self, deadline: Instant) -> Result<Sent, GetError> {
        let (client, id) = (self.client, self.id);
        add(&client.counters.get_calls, self.replicas.len() as u64);
        let fits = self.fits();
        let wants_more = fits.is_none();
        let mut best = fits.or_else(|| self.newest());
        if wants_more && 2 * self.holders() <= self.replicas.len() && client.config.routes > 1 {
            // Hardly any replica has it: they may not be its replica set at all.
            let found = search(client, id.key, false, limits(client, deadline)).await;
            best = newer(id, best, found.ok().and_then(|found| sent(id, found.block)));
        }
        let seen = client.seen.version(&id.key);
        let least = seen.max(self.wanted.least());
        let reaches = |best: &Sent| id.kind.reaches(best.stamp.version, least);
        if !best.as_ref().is_some_and(reaches) {
            best = newer(id, best, beyond_set(client, &self.named.nodes, id, least).await);
        }
        let Some(best) = best else { return Err(self.missing()) };
        if !reaches(&best) {
            return Err(too_old(id.key, best.stamp.version, seen, least));
        }
        self.update_stale(&best);
        Ok(best)
    }

    /// Sends the block to replicas that hold an older version or none: those heard, and those
    /// that answer late.
    fn update_stale(self, Sent { stamp, block }: &Sent) {
        if block.header.lease_secs == 0 {
            return;
        }
        let version = stamp.version;
        let kind = self.id.kind;
        let is_stale =
            move |said: &Said| said.held.is_none_or(|held| kind.replaces(version, held.version));
        let stale = self.said().filter(|(_, said)| is_stale(said)).map(|(at, _)| at);
        let mut stale: Vec<Node> = stale.map(|at| self.replicas[at]).collect();
        let (client, block, replicas, mut late) =
            (self.client.clone(), block.clone(), self.replicas, self.calls);
        if stale.is_empty() && late.is_empty() {
            return;
        }
        self.client.env.spawn(Box::pin(async move {
            while let Some((at, heard)) = late.next().await {
                if ended(heard).await.is_ok_and(|said| is_stale(&said)) {
                    stale.push(replicas[at]);
                }
            }
            if !stale.is_empty() {
                send_copies(client, stale, block).await;
            }
        }));
    }

    /// Why no block was found.
    fn missing(&self) -> GetError {
        let said = |(node, heard): (&Node, &Option<Answer>)| match heard {
            Some(Ok(_)) => format!("{node} does not have it"),
            Some(Err(error)) => format!("{node} {error}"),
            None => format!("{node} {}", CallError::TimedOut),
        };
        let key = self.id.key;
        if let Some(told) = self.no_root.clone() {
            return GetError::Unavailable { key, told };
        }
        let told: Vec<String> = self.replicas.iter().zip(&self.heard).map(said).collect();
        let told = told.join("; ");
        match self.heard.iter().all(|heard| matches!(heard, Some(Ok(_)))) {
            true => GetError::NotFound { key, told },
            false => GetError::Unavailable { key, told },
        }
    }
}

/// The next answer; never, if none is under way.
async fn next_of(calls: &mut FuturesUnordered<Call>) -> (usize, Heard<Answer>) {
    match calls.next().await {
        Some(answered) => answered,
        None => pending().await,
    }
}

/// The newer of two blocks, or both of them joined.
fn newer(id: BlockId, a: Option<Sent>, b: Option<Sent>) -> Option<Sent> {
    let (a, b) = match (a, b) {
        (Some(a), Some(b)) if id.kind.joins() => (a, b),
        (a, b) => return a.into_iter().chain(b).max_by_key(|sent| sent.stamp.version),
    };
    let lease_secs = a.block.header.lease_secs.max(b.block.header.lease_secs);
    let (joined, version) = id.kind.join(&a.block.bytes, &b.block.bytes)?;
    let stamp = Stamp::of(version, &joined);
    let header = BlockHeader { lease_secs, ..a.block.header };
    Some(Sent { stamp, block: Block { header, bytes: joined.into() } })
}

/// Why a block will not do that is older than it must be.
fn too_old(key: Key, held: u64, seen: u64, least: u64) -> GetError {
    if held >= seen {
        let told = format!("only version {held} is found, and version {least} is wanted");
        return GetError::Unavailable { key, told };
    }
    tracing::warn!(%key, held, seen, "only an older version is found than seen before");
    let told = format!(
        "only version {held} is found, and this node has seen version {seen}: the nodes that hold \
         it may come back (or publish again; if they are gone for good, accept the older one with \
         `atoll settings --forget-absent`)"
    );
    GetError::Unavailable { key, told }
}

/// A version of a block at least as high as `least`, from this node's own store or the nodes after
/// the replica set: those that were the set while others were cut off, or will be when the ring
/// has closed again. `nodes` are the root and its successors.
async fn beyond_set(client: &Arc<Client>, nodes: &[Node], id: BlockId, least: u64) -> Option<Sent> {
    let replicas = client.config.replicas;
    let me = Node::of(client.transport.local());
    let near = distinct_peers(nodes, replicas + BEYOND_SETS * replicas);
    let near = near.into_iter().skip(replicas).filter(|node| !client.is_me(node));
    let ask = |node: Node| {
        let asking = client.clone();
        hear(client, node, async move { ask(&asking, node, (id, true), None).await })
    };
    let mut calls: FuturesUnordered<_> = std::iter::once(me).chain(near).map(ask).collect();
    while let Some(heard) = calls.next().await {
        if let Heard::Answer(Ok(Said { held: Some(stamp), block: Some(block), .. })) = heard
            && id.kind.reaches(stamp.version, least)
        {
            return Some(Sent { stamp, block });
        }
    }
    None
}

/// What one replica holds; a block that comes is verified.
async fn ask(
    client: &Arc<Client>,
    node: Node,
    (id, with_bytes): (BlockId, bool),
    promise: Option<u64>,
) -> Answer {
    let key = id.key;
    let (ReadReply { held, block, set, promised_ms }, parts) =
        client.call(&node, &Read { key, with_bytes, promise }, Vec::new()).await?;
    let promised = promised_ms.map(Duration::from_millis);
    if !with_bytes {
        return Ok(Said { held, block: None, set, promised });
    }
    // A replica that does not send the block on request does not have it.
    let sent = match block {
        Some(header) => sent(id, verified(client, &node, key, header, parts)?),
        None => None,
    };
    let (held, block) = sent.map(|Sent { stamp, block }| (stamp, block)).unzip();
    Ok(Said { held, block, set, promised })
}

/// A request of one of this node's clients to be told of the next change of a block, if its kind allows
/// any.
pub(super) fn ask_for_promises(client: &Client, id: BlockId) -> Option<Asking> {
    let asks = client.config.mechanisms.call_backs && id.kind.joins();
    asks.then(|| client.promised.ask(id.key, client.env.random_u64(), Moment::now(&*client.env)))
}

/// A verified block, if it is of the right kind.
fn sent(id: BlockId, block: Block) -> Option<Sent> {
    let version = id.verify(&block.bytes).ok()?;
    (block.header.kind == id.kind).then(|| Sent { stamp: Stamp::of(version, &block.bytes), block })
}

/// Resolves with the newest version of a mutable block once a replica has one above `seen`.
///
/// A replica's word is only a hint: the block is read then as always. The replica set is looked up
/// for each call, so a change of it is noticed with the next call at the latest.
pub(crate) async fn watch(
    client: &Arc<Client>,
    id: BlockId,
    seen: u64,
) -> Result<Option<HeldBlock>, GetError> {
    let named = KnownSets::find(client, &id.key, true).await;
    let unavailable = |told: String| GetError::Unavailable { key: id.key, told };
    let named = named.map_err(|error| unavailable(error.to_string()))?;
    let replicas = distinct_peers(&named.nodes, client.config.replicas);
    let mut calls: FuturesUnordered<_> =
        replicas.into_iter().map(|node| watch_at(client, node, id, seen)).collect();
    let (mut is_quiet, mut told) = (false, Vec::new());
    while let Some((node, newer)) = calls.next().await {
        match newer {
            Ok(Some(_)) => {
                // The writer of the change may not have told this node yet.
                client.promised.changed(&id.key);
                match get_mutable(client, id, Wanted::Newest).await {
                    Ok(held) if id.kind.is_news(held.version, seen) => return Ok(Some(held)),
                    Err(error @ GetError::Removed { version, .. })
                        if id.kind.is_news(version, seen) =>
                    {
                        return Err(error);
                    }
                    _ => told.push(format!("{node} speaks of a version that it does not show")),
                }
            }
            Ok(None) => is_quiet = true,
            Err(error) => told.push(format!("{node} {error}")),
        }
    }
    match is_quiet {
        true => Ok(None),
        false => Err(unavailable(told.join("; "))),
    }
}

/// Waits at one replica.
async fn watch_at(
    client: &Arc<Client>,
    node: Node,
    id: BlockId,
    seen: u64,
) -> (Node, Result<Option<u64>, CallError>) {
    let called = client.call(&node, &Watch { key: id.key, seen }, Vec::new()).await;
    let is_news = |version: &u64| id.kind.is_news(*version, seen);
    (node, called.map(|(reply, _)| reply.version.filter(is_news)))
}
