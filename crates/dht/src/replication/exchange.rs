//! The reconciliation of one key range with one other node: both sides of the exchange
//! whose rules are in [`crate::replication::reconcile`], and the copying of what differs.
//!
//! Nothing here holds more than a page of items or a batch of blocks in memory, however
//! large the range.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use atoll_env::sleep;
use atoll_key::{Key, KeyRange, PeerId};
use atoll_net::header::Capped;
use atoll_net::{CallError, Refusal};
use atoll_overlay::Node;
use atoll_store::{StoreError, StoredBlock};
use futures_util::future::{Either, select};

use super::reconcile::{Difference, difference, well_formed_items, well_formed_parts};
use super::store::{put_message, store_fetched};
use crate::accounting::admission::Origin;
use crate::context::REPLY_BYTES;
use crate::diversion::{self, follow};
use crate::holdings::ranges::{page, summaries};
use crate::replication::Replication;
use crate::rpc::budget::Allowance;
use crate::rpc::{
    Answer, Block, COMPARE_LIMIT, Claim, Fetch, FetchReply, Item, MAX_BATCH_BLOCKS, PutStatus,
    Reconcile, There, is_majority, send, to_blocks,
};

/// Claims sent in one message.
const CLAIMS_AT_ONCE: usize = 16;
/// An exchange is given up after so many messages in a row that led to no copy. An honest
/// one takes log16 of the blocks, and more only where blocks cannot be copied. This also
/// bounds the ranges still to be compared. A guess.
const MAX_IDLE_STEPS: usize = 1000;
/// Blocks given to a replica that are looked for again in the same round, at most: enough
/// to notice one that does not keep what it acknowledges.
const MAX_GIVEN: usize = 1024;
/// Why an exchange ended early.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum ExchangeError {
    #[error("call: {0}")]
    Call(#[from] CallError),
    #[error("store: {0}")]
    Store(#[from] StoreError),
    #[error("the other side's answer is not well-formed")]
    IllFormed,
    #[error("the other side's answers lead nowhere")]
    Endless,
    #[error("the other side is busy")]
    Later,
}

impl ExchangeError {
    /// Whether the exchange should be tried again at once: what failed is not what the other
    /// side says.
    pub fn is_failure(&self) -> bool {
        !self.is_misbehaviour() && !matches!(self, ExchangeError::Later)
    }

    /// Whether the other side says what makes no sense, or no.
    pub fn is_misbehaviour(&self) -> bool {
        use ExchangeError::{Call, Endless, IllFormed};
        matches!(self, IllFormed | Endless | Call(CallError::Refused(_)))
    }
}

impl From<atoll_net::Refusal> for ExchangeError {
    fn from(refusal: atoll_net::Refusal) -> ExchangeError {
        ExchangeError::Call(refusal.into())
    }
}

/// What an exchange did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Outcome {
    /// Blocks copied either way, and those that a put is copying.
    pub moved: u64,
    /// Blocks that differ still, because they could not be copied.
    pub left: u64,
}

/// Some of what a replica acknowledged earlier in a round.
pub(crate) type Given = BTreeSet<Item>;

/// Makes this node and `other` hold the same blocks of `ranges`, as far as that goes in the time
/// that `other` has in a round. What `other` has been given before and lacks again is not given
/// again.
pub(crate) async fn reconcile_with(
    replication: &Replication,
    other: &Node,
    ranges: Vec<KeyRange>,
    given: &mut Given,
) -> Result<Outcome, ExchangeError> {
    let outcome = Outcome::default();
    let time = Allowance::of(replication, other.peer.id);
    let mut session = Session { replication, other, todo: ranges, outcome, given, time };
    let ended = session.run().await;
    if ended.is_ok() && session.outcome == Outcome::default() {
        replication.backoff.kept(&other.peer.id);
    }
    session.time.end(replication);
    ended.map(|()| session.outcome)
}

struct Session<'a> {
    replication: &'a Replication,
    other: &'a Node,
    todo: Vec<KeyRange>,
    outcome: Outcome,
    given: &'a mut Given,
    time: Allowance,
}

impl Session<'_> {
    async fn run(&mut self) -> Result<(), ExchangeError> {
        let (mut idle_steps, mut moved) = (0, 0);
        while !self.todo.is_empty() {
            if self.time.is_over(self.replication.env.now()) {
                self.outcome.left += 1;
                break;
            }
            if idle_steps == MAX_IDLE_STEPS {
                return Err(ExchangeError::Endless);
            }
            idle_steps += 1;
            self.step().await?;
            if self.outcome.moved > moved {
                (idle_steps, moved) = (0, self.outcome.moved);
            }
        }
        Ok(())
    }

    async fn step(&mut self) -> Result<(), ExchangeError> {
        let start = self.todo.len().saturating_sub(CLAIMS_AT_ONCE);
        let ranges = self.todo.split_off(start);
        let ours = summaries(self.replication, ranges.clone()).await?;
        let claims: Vec<Claim> =
            ranges.into_iter().zip(ours).map(|(range, summary)| Claim { range, summary }).collect();
        let asked = Reconcile { claims: claims.clone() };
        let began = self.replication.env.now();
        let limit = COMPARE_LIMIT.min(self.time.left(began));
        let answers = compare(self.replication, self.other, &asked, limit).await;
        self.time.waited(self.replication.env.now().since(began));
        let answers = answers?;
        self.todo.extend(claims[answers.len()..].iter().map(|claim| claim.range));
        for (claim, answer) in claims.iter().zip(answers) {
            self.take_answer(claim, answer).await?;
        }
        Ok(())
    }

    async fn take_answer(&mut self, claim: &Claim, answer: Answer) -> Result<(), ExchangeError> {
        match answer {
            Answer::Same => {}
            Answer::Parts(parts) => {
                // Parts of a range in which we have nothing would never end.
                if !well_formed_parts(claim.range, &parts) || claim.summary.count == 0 {
                    return Err(ExchangeError::IllFormed);
                }
                let ranges = parts.iter().map(|part| part.range).collect();
                let ours = summaries(self.replication, ranges).await?;
                let differing = parts.iter().zip(ours).filter(|(part, ours)| part.summary != *ours);
                self.todo.extend(differing.map(|(part, _)| part.range));
            }
            Answer::Items(theirs) => {
                if !well_formed_items(claim.range, &theirs) {
                    return Err(ExchangeError::IllFormed);
                }
                self.compare(claim.range, &theirs).await?;
            }
            Answer::Some { items, upto } => {
                let part = KeyRange::new(claim.range.after, upto);
                let honest = !items.is_empty()
                    && claim.range.contains(&upto)
                    && well_formed_items(part, &items);
                if !honest {
                    return Err(ExchangeError::IllFormed);
                }
                self.compare(part, &items).await?;
                if upto != claim.range.upto {
                    self.todo.push(KeyRange::new(upto, claim.range.upto));
                }
            }
        }
        Ok(())
    }

    /// Compares our items of `range`, page by page, with all of theirs.
    async fn compare(&mut self, range: KeyRange, theirs: &[Item]) -> Result<(), ExchangeError> {
        let mut todo = Some(range);
        while let Some(range) = todo {
            let (ours, rest) = page(self.replication, range)?;
            let upto = rest.map_or(range.upto, |rest| rest.after);
            let part = KeyRange::new(range.after, upto);
            let there: Vec<Item> =
                theirs.iter().filter(|item| part.contains(&item.key)).copied().collect();
            self.level(difference(part, &ours, &there)).await?;
            todo = rest;
        }
        Ok(())
    }

    /// What may be given: nothing to a replica that does not keep what it is given.
    fn may_be_given(&mut self, lacking: &[Item]) -> Vec<Item> {
        let (again, new): (Vec<Item>, Vec<Item>) =
            lacking.iter().partition(|item| self.given.contains(item));
        if !again.is_empty() {
            let replica = self.other;
            tracing::warn!(count = again.len(), ?replica, "blocks it took are missing again");
            self.replication.backoff.set_back(replica.peer.id, self.replication.env.now());
            self.outcome.left += again.len() as u64;
        }
        new
    }

    /// Copies what differs, both ways.
    async fn level(&mut self, mut found: Difference) -> Result<(), ExchangeError> {
        found.give = self.may_be_given(&found.give);
        let repair = &self.replication.repair;
        let queued = (found.take.len() + found.give.len()) as u64;
        repair.queue(queued);
        let (other, time) = (self.other, &mut self.time);
        let taken = take(self.replication, other, other, &found.take, time).await;
        let given = match &taken {
            Ok(_) => give(self.replication, other, &found.give, time).await,
            Err(error) => Err(error.clone()),
        };
        repair.unqueue(queued);
        if given.as_ref().is_ok_and(|outcome| outcome.left == 0) {
            let room = MAX_GIVEN.saturating_sub(self.given.len());
            self.given.extend(found.give.iter().take(room));
        }
        for outcome in [taken?, given?] {
            self.outcome.moved += outcome.moved;
            self.outcome.left += outcome.left;
        }
        Ok(())
    }
}

/// Sends claims to `other`. A slow answer is no sign of a failure: the overlay's own probes find a
/// dead neighbour sooner, and end the wait.
async fn compare(
    replication: &Replication,
    other: &Node,
    asked: &Reconcile,
    limit: Duration,
) -> Result<Vec<Answer>, ExchangeError> {
    let mut call = send(&*replication.transport, other.peer, asked, Vec::new(), limit);
    let result = loop {
        let epoch = replication.overlay.epoch();
        if !replication.is_known_peer(&other.peer.id) {
            break Err(CallError::TimedOut);
        }
        match select(call, replication.overlay.changed(epoch)).await {
            Either::Left((result, _)) => break result,
            Either::Right((_, unanswered)) => call = unanswered,
        }
    };
    match result {
        Err(CallError::TimedOut) => Err(ExchangeError::Later),
        Err(CallError::Refused(refusal)) if refusal.code == Refusal::OVERLOADED => {
            Err(ExchangeError::Later)
        }
        Err(error) => {
            if error.is_failure_of_peer() {
                replication.overlay.report_failure(&other.peer);
            }
            Err(error.into())
        }
        Ok((reply, _)) => Ok(reply.answers.0),
    }
}

/// Of `items`, the keys that may be offered to `node`, which may be this one. Counts those that a
/// put is sending there as moved, and the others as left.
fn offered(
    replication: &Replication,
    node: &PeerId,
    items: &[Item],
    outcome: &mut Outcome,
) -> Vec<Key> {
    let (repair, now) = (&replication.repair, replication.env.now());
    let is_fit = replication.backoff.is_fit(node, now);
    let leaves = replication.config.mechanisms.under_way;
    let is_on_its_way = |i: &&Item| leaves && replication.in_flight.is_in_flight(node, &i.key);
    let (on_their_way, others): (Vec<&Item>, Vec<&Item>) = items.iter().partition(is_on_its_way);
    let may = |item: &&Item| is_fit && repair.may_offer(node, &item.key, now);
    let count = others.len();
    let offered: Vec<Key> = others.into_iter().filter(may).map(|item| item.key).collect();
    outcome.moved += on_their_way.len() as u64;
    outcome.left += (count - offered.len()) as u64;
    offered
}

/// Fetches blocks from `at`, which is `other` or keeps them for it, verifies and stores them, as
/// far as there is room and time.
async fn take(
    replication: &Replication,
    other: &Node,
    at: &Node,
    items: &[Item],
    time: &mut Allowance,
) -> Result<Outcome, ExchangeError> {
    let mut outcome = Outcome::default();
    let me = replication.transport.local().id;
    let mut wanted = offered(replication, &me, items, &mut outcome);
    let versions: BTreeMap<Key, u64> = items.iter().map(|item| (item.key, item.version)).collect();
    let is_lacking =
        |key: &Key| replication.known(key).is_none_or(|known| known.version < versions[key]);
    let mut elsewhere: BTreeMap<PeerId, (Node, Vec<Item>)> = BTreeMap::new();
    while !wanted.is_empty() {
        // Another exchange may have brought some of them since, or be about to.
        let batch = wanted.drain(..wanted.len().min(MAX_BATCH_BLOCKS));
        let lacking = batch.filter(is_lacking).collect();
        let (asked, elsewhere_asked) =
            replication.repair.begin_fetch(lacking, replication.env.now());
        outcome.left += elsewhere_asked;
        if asked.keys.is_empty() {
            continue;
        }
        let fetch = Fetch { keys: asked.keys.clone() };
        let Some((reply, parts)) = time.call(replication, at, &fetch, Vec::new()).await? else {
            outcome.left += (asked.keys.len() + wanted.len()) as u64;
            return Ok(outcome);
        };
        let asked = &asked.keys;
        let FetchReply { blocks: headers, there: Capped(there) } = reply;
        // An answer may stop early because it is full, never with nothing: what stands after
        // the last block in it, of use or not, is asked for again.
        let place = |named: &Key| asked.iter().position(|key| key == named);
        let named = headers.0.iter().map(|header| &header.key);
        if let Some(last) = named.chain(there.iter().map(|at| &at.key)).filter_map(place).max() {
            wanted.splice(0..0, asked[last + 1..].iter().copied());
        }
        for There { key, holder } in there {
            let item = items.iter().find(|item| item.key == key && asked.contains(&key));
            // A pointer is followed once.
            if at.peer.id == other.peer.id && holder.id != replication.transport.local().id {
                let its = elsewhere.entry(holder.id);
                its.or_insert_with(|| (Node::of(holder), Vec::new())).1.extend(item);
            }
        }
        let mut batch = Vec::new();
        let mut bytes = 0;
        for block in to_blocks(headers, parts) {
            if let Some(stored) = accept(replication, at, asked, &block) {
                bytes += stored.bytes.len() as u64;
                batch.push(stored);
            }
        }
        let count = batch.len() as u64;
        time.moved(count, bytes);
        if count == 0 {
            // Gone since it was listed, or expired: not ours to copy.
            continue;
        }
        let keys: Vec<Key> = batch.iter().map(|block| block.info.key).collect();
        let kept = store_fetched(replication, &other.peer, batch).await;
        if kept == 0 && diversion::has_no_room(replication) {
            replication.backoff.set_back(me, replication.env.now());
            outcome.left += count + wanted.len() as u64;
            return Ok(outcome);
        }
        if kept < count {
            decline_unheld(replication, me, &keys);
        } else {
            replication.backoff.kept(&me);
        }
        outcome.moved += kept;
        outcome.left += count - kept;
        replication.repair.done(kept, bytes);
        pace(replication, bytes).await;
    }
    for (holder, its) in elsewhere.into_values() {
        let mut its_time = time.within(replication, holder.peer.id);
        let taken = Box::pin(take(replication, other, &holder, &its, &mut its_time)).await;
        its_time.end(replication);
        match taken {
            Ok(taken) => {
                outcome.moved += taken.moved;
                outcome.left += taken.left;
            }
            // Other replicas may have these too.
            Err(ExchangeError::Call(error)) => {
                tracing::info!(?holder, %error, "diverted copies could not be fetched");
                outcome.left += its.len() as u64;
            }
            Err(error) => return Err(error),
        }
    }
    Ok(outcome)
}

/// Of blocks that were fetched, those that could be charged to nobody are not fetched again soon.
fn decline_unheld(replication: &Replication, me: PeerId, keys: &[Key]) {
    let is_held = |key: &Key| replication.known(key).is_some();
    for key in keys.iter().filter(|key| !is_held(key)) {
        replication.repair.decline(me, *key, replication.env.now(), &replication.backoff);
    }
}

/// A fetched block, if it was asked for, is not expired, and is what its key says.
fn accept(
    replication: &Replication,
    from: &Node,
    asked: &[Key],
    block: &Block,
) -> Option<StoredBlock> {
    let key = &block.header.key;
    if !asked.contains(key) || block.header.lease_secs == 0 {
        return None;
    }
    match block.header.kind.verify(key, &block.bytes) {
        Ok(version) => Some(replication.to_store(block, version)),
        Err(error) => {
            tracing::warn!(%key, ?from, %error, "dropped a bad block");
            replication.counters.mark(from.peer.id);
            None
        }
    }
}

/// Sends blocks to `other`, as to a replica, as far as it takes them in its time.
pub(crate) async fn give(
    replication: &Replication,
    other: &Node,
    items: &[Item],
    time: &mut Allowance,
) -> Result<Outcome, ExchangeError> {
    let mut outcome = Outcome::default();
    let keys = offered(replication, &other.peer.id, items, &mut outcome);
    let mut keys = keys.into_iter().peekable();
    while keys.peek().is_some() {
        let blocks = read_batch(replication, &mut keys, &mut outcome).await;
        if blocks.is_empty() {
            continue;
        }
        let bytes: u64 = blocks.iter().map(|block| block.bytes.len() as u64).sum();
        let sent: Vec<Key> = blocks.iter().map(|block| block.header.key).collect();
        let (put, parts) = put_message(&Origin::Carrier, blocks, false);
        let Some((reply, _)) = time.call(replication, other, &put, parts).await? else {
            outcome.left += (sent.len() + keys.count()) as u64;
            break;
        };
        let (now, id) = (replication.env.now(), other.peer.id);
        let refused = sent.iter().zip(&reply.statuses.0).filter(|(_, status)| !is_settled(status));
        let (mut refused_count, mut is_full) = (0, false);
        for (key, status) in refused {
            refused_count += 1;
            match status {
                PutStatus::Full => is_full = true,
                _ => replication.repair.decline(id, *key, now, &replication.backoff),
            }
        }
        let settled = sent.len() as u64 - refused_count;
        outcome.moved += settled;
        outcome.left += refused_count;
        replication.repair.done(settled, bytes);
        time.moved(settled, bytes);
        if is_full {
            replication.backoff.set_back(id, now);
            outcome.left += keys.count() as u64;
            break;
        }
        pace(replication, bytes).await;
    }
    Ok(outcome)
}

/// Reads as many of the next blocks as go into one message, some of which other nodes may keep for
/// this one.
async fn read_batch(
    replication: &Replication,
    keys: &mut std::iter::Peekable<std::vec::IntoIter<Key>>,
    outcome: &mut Outcome,
) -> Vec<Block> {
    let (mut blocks, mut bytes) = (Vec::new(), 0);
    while bytes < REPLY_BYTES && blocks.len() < MAX_BATCH_BLOCKS {
        let Some(key) = keys.next() else { break };
        let block = match replication.store.get(&key).await {
            Ok(Some(held)) => {
                Some(Block { header: replication.header_of(&held.info), bytes: held.bytes })
            }
            Ok(None) => follow::own(replication, &key).await,
            Err(error) => {
                replication.note_store_error(&error);
                outcome.left += 1;
                None
            }
        };
        if let Some(block) = block.filter(|block| block.header.lease_secs > 0) {
            bytes += block.bytes.len();
            blocks.push(block);
        }
    }
    blocks
}

/// Whether the other side now has the block or a better one.
fn is_settled(status: &PutStatus) -> bool {
    match status {
        PutStatus::Stored { copies, wanted } => is_majority(*copies, *wanted),
        PutStatus::Superseded { .. } => true,
        _ => false,
    }
}

/// Waits so that repair copies no faster than configured.
pub(crate) async fn pace(replication: &Replication, bytes: u64) {
    let until = replication.repair.pace(
        replication.env.now(),
        bytes,
        replication.config.repair_bytes_per_sec,
    );
    let wait = until.since(replication.env.now());
    if !wait.is_zero() {
        sleep(&*replication.env, wait).await;
    }
}
