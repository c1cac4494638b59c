//! The reconciliation of one key range with one other node: both sides of the exchange
//! whose rules are in [`crate::replication::reconcile`], and the copying of what differs.
//!
//! Nothing here holds more than a page of items or a batch of blocks in memory, however
//! large the range.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use atoll_env::sleep;
use atoll_key::{BlockKind, Key, KeyRange, PeerId};
use atoll_net::header::{Capped, WirePeer};
use atoll_net::{CallError, Refusal, Reply, Request};
use atoll_overlay::Node;
use atoll_store::{StoreError, StoredBlock};
use bytes::Bytes;
use futures_util::future::{Either, select};

use crate::diversion::{self, follow};
use crate::holdings::ranges::{self, CUT_LOOKS, first_items, page, summaries};
use crate::inner::{Block, Inner, REPLY_BYTES, note_store_error};
use crate::replication::reconcile::{
    Answer, Claim, Difference, Item, Plan, difference, plan, well_formed_items, well_formed_parts,
};
use crate::replication::store::store_fetched;
use crate::rpc::budget::Allowance;
use crate::rpc::{
    self, BlockHeader, Fetch, FetchReply, MAX_BATCH_BLOCKS, Put, PutReply, PutStatus, Reconcile,
    ReconcileReply, There, from_header, is_majority, to_header,
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
/// How long an answer to a comparison is waited for. A guess: a store that has just been opened
/// reads all blocks of the range, a million in a second, and the other side may be busy.
const COMPARE_LIMIT: Duration = Duration::from_secs(40);

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

/// Answers a peer's claim; also says what that cost, in blocks looked at.
pub(crate) async fn answer(inner: &Inner, claim: &Claim) -> Result<(Answer, u64), StoreError> {
    let (own, mut looks) = match claim.summary.count {
        // A newcomer takes all there is, whatever it sums up to.
        0 => (None, 0),
        _ => ranges::summary(inner, claim.range).await.map(|(own, looks)| (Some(own), looks))?,
    };
    match plan(claim, own.as_ref()) {
        Plan::Same => return Ok((Answer::Same, looks)),
        Plan::Parts => {
            looks = 2 * looks + CUT_LOOKS;
            let parts = ranges::cut(inner, claim.range).await?;
            if parts.len() > 1 {
                return Ok((Answer::Parts(parts), looks));
            }
        }
        Plan::Items => {}
    }
    let (items, rest) = first_items(inner, claim.range)?;
    looks += items.len() as u64 + 1;
    let answer = match rest {
        None if items.is_empty() && claim.summary.count == 0 => Answer::Same,
        None => Answer::Items(items),
        Some(rest) => Answer::Some { items, upto: rest.after },
    };
    Ok((answer, looks))
}

/// Some of what a replica acknowledged earlier in a round.
pub(crate) type Given = BTreeSet<Item>;

/// Makes this node and `other` hold the same blocks of `ranges`, as far as that goes in the time
/// that `other` has in a round. What `other` has been given before and lacks again is not given
/// again.
pub(crate) async fn reconcile_with(
    inner: &Inner,
    other: &Node,
    ranges: Vec<KeyRange>,
    given: &mut Given,
) -> Result<Outcome, ExchangeError> {
    let outcome = Outcome::default();
    let time = Allowance::of(inner, other.peer.id);
    let mut session = Session { inner, other, todo: ranges, outcome, given, time };
    let ended = session.run().await;
    if ended.is_ok() && session.outcome == Outcome::default() {
        inner.repair.kept(&other.peer.id);
    }
    session.time.end(inner);
    ended.map(|()| session.outcome)
}

struct Session<'a> {
    inner: &'a Inner,
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
            if self.time.is_over(self.inner.env.now()) {
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
        let ours = summaries(self.inner, ranges.clone()).await?;
        let claims: Vec<Claim> =
            ranges.into_iter().zip(ours).map(|(range, summary)| Claim { range, summary }).collect();
        let header = to_header(&Reconcile { claims: claims.clone() });
        let request = Request { method: rpc::RECONCILE, header, parts: Vec::new() };
        let began = self.inner.env.now();
        let limit = COMPARE_LIMIT.min(self.time.left(began));
        let reply = compare(self.inner, self.other, request, limit).await;
        self.time.waited(self.inner.env.now().since(began));
        let reply = reply?;
        let ReconcileReply { answers } = from_header(&reply.header)?;
        if answers.is_empty() || answers.len() > claims.len() {
            return Err(ExchangeError::IllFormed);
        }
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
                let ours = summaries(self.inner, ranges).await?;
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
            let (ours, rest) = page(self.inner, range)?;
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
            self.inner.repair.set_back(replica.peer.id, self.inner.env.now());
            self.outcome.left += again.len() as u64;
        }
        new
    }

    /// Copies what differs, both ways.
    async fn level(&mut self, mut found: Difference) -> Result<(), ExchangeError> {
        found.give = self.may_be_given(&found.give);
        let repair = &self.inner.repair;
        let queued = (found.take.len() + found.give.len()) as u64;
        repair.queue(queued);
        let (other, time) = (self.other, &mut self.time);
        let taken = take(self.inner, other, other, &found.take, time).await;
        let given = match &taken {
            Ok(_) => give(self.inner, other, &found.give, time).await,
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
    inner: &Inner,
    other: &Node,
    request: Request,
    limit: Duration,
) -> Result<Reply, ExchangeError> {
    let mut call = inner.transport.call(other.peer, request, limit);
    let result = loop {
        let epoch = inner.overlay.epoch();
        if !inner.is_acquaintance(&other.peer.id) {
            break Err(CallError::TimedOut);
        }
        match select(call, inner.overlay.changed(epoch)).await {
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
                inner.overlay.report_failure(&other.peer);
            }
            Err(error.into())
        }
        Ok(reply) => Ok(reply),
    }
}

/// Of `items`, the keys that may be offered to `node`, which may be this one. Counts those that a
/// put is sending there as moved, and the others as left.
fn offered(inner: &Inner, node: &PeerId, items: &[Item], outcome: &mut Outcome) -> Vec<Key> {
    let (repair, now) = (&inner.repair, inner.env.now());
    let is_fit = repair.is_fit(node, now);
    let leaves = inner.config.mechanisms.under_way;
    let is_on_its_way = |i: &&Item| leaves && inner.under_way.is_on_its_way(node, &i.key);
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
    inner: &Inner,
    other: &Node,
    at: &Node,
    items: &[Item],
    time: &mut Allowance,
) -> Result<Outcome, ExchangeError> {
    let mut outcome = Outcome::default();
    let me = inner.transport.local().id;
    let mut wanted = offered(inner, &me, items, &mut outcome);
    let versions: BTreeMap<Key, u64> = items.iter().map(|item| (item.key, item.version)).collect();
    let is_lacking = |key: &Key| inner.known(key).is_none_or(|known| known.version < versions[key]);
    let mut elsewhere: BTreeMap<PeerId, (Node, Vec<Item>)> = BTreeMap::new();
    while !wanted.is_empty() {
        // Another exchange may have brought some of them since, or be about to.
        let batch = wanted.drain(..wanted.len().min(MAX_BATCH_BLOCKS));
        let lacking = batch.filter(is_lacking).collect();
        let (asked, elsewhere_asked) = inner.repair.begin_fetch(lacking, inner.env.now());
        outcome.left += elsewhere_asked;
        if asked.keys.is_empty() {
            continue;
        }
        let header = to_header(&Fetch { keys: asked.keys.clone() });
        let request = Request { method: rpc::FETCH, header, parts: Vec::new() };
        let Some(reply) = time.call(inner, at, request).await? else {
            outcome.left += (asked.keys.len() + wanted.len()) as u64;
            return Ok(outcome);
        };
        let asked = &asked.keys;
        let FetchReply { blocks: Capped(headers), there: Capped(there) } =
            from_header(&reply.header)?;
        if headers.len() != reply.parts.len() {
            return Err(ExchangeError::IllFormed);
        }
        // An answer may stop early because it is full, never with nothing: what stands after
        // the last block in it, of use or not, is asked for again.
        let place = |named: &Key| asked.iter().position(|key| key == named);
        let named = headers.iter().map(|header| &header.key);
        if let Some(last) = named.chain(there.iter().map(|at| &at.key)).filter_map(place).max() {
            wanted.splice(0..0, asked[last + 1..].iter().copied());
        }
        for There { key, holder: WirePeer(holder) } in there {
            let item = items.iter().find(|item| item.key == key && asked.contains(&key));
            // A pointer is followed once.
            if at.peer.id == other.peer.id && holder.id != inner.transport.local().id {
                let its = elsewhere.entry(holder.id);
                its.or_insert_with(|| (Node::of(holder), Vec::new())).1.extend(item);
            }
        }
        let mut batch = Vec::new();
        let mut bytes = 0;
        for (header, part) in headers.into_iter().zip(reply.parts) {
            let block = Block { header, bytes: part };
            if let Some(stored) = accept(inner, at, asked, &block) {
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
        let kept = store_fetched(inner, &other.peer, batch).await;
        if kept == 0 && diversion::has_no_room(inner) {
            inner.repair.set_back(me, inner.env.now());
            outcome.left += count + wanted.len() as u64;
            return Ok(outcome);
        }
        if kept < count {
            decline_unheld(inner, me, &keys);
        } else {
            inner.repair.kept(&me);
        }
        outcome.moved += kept;
        outcome.left += count - kept;
        inner.repair.done(kept, bytes);
        pace(inner, bytes).await;
    }
    for (holder, its) in elsewhere.into_values() {
        let mut its_time = time.within(inner, holder.peer.id);
        let taken = Box::pin(take(inner, other, &holder, &its, &mut its_time)).await;
        its_time.end(inner);
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
fn decline_unheld(inner: &Inner, me: PeerId, keys: &[Key]) {
    let is_held = |key: &Key| inner.known(key).is_some();
    for key in keys.iter().filter(|key| !is_held(key)) {
        inner.repair.decline(me, *key, inner.env.now());
    }
}

/// A fetched block, if it was asked for, is not expired, and is what its key says.
fn accept(inner: &Inner, from: &Node, asked: &[Key], block: &Block) -> Option<StoredBlock> {
    let key = &block.header.key;
    if !asked.contains(key) || block.header.lease_secs == 0 {
        return None;
    }
    let kind = BlockKind::from_u8(block.header.kind).ok()?;
    match kind.verify(key, &block.bytes) {
        Ok(version) => Some(inner.to_store(block, kind, version)),
        Err(error) => {
            tracing::warn!(%key, ?from, %error, "dropped a bad block");
            inner.counters.mark(from.peer.id);
            None
        }
    }
}

/// Sends blocks to `other`, as to a replica, as far as it takes them in its time.
pub(crate) async fn give(
    inner: &Inner,
    other: &Node,
    items: &[Item],
    time: &mut Allowance,
) -> Result<Outcome, ExchangeError> {
    let mut outcome = Outcome::default();
    let keys = offered(inner, &other.peer.id, items, &mut outcome);
    let mut keys = keys.into_iter().peekable();
    while keys.peek().is_some() {
        let (headers, parts) = read_batch(inner, &mut keys, &mut outcome).await;
        if headers.is_empty() {
            continue;
        }
        let bytes: u64 = parts.iter().map(|part| part.len() as u64).sum();
        let sent: Vec<Key> = headers.iter().map(|header| header.key).collect();
        let header = to_header(&Put { blocks: headers.into(), as_root: false, receipt: None });
        let request = Request { method: rpc::PUT, header, parts };
        let Some(reply) = time.call(inner, other, request).await? else {
            outcome.left += (sent.len() + keys.count()) as u64;
            break;
        };
        let PutReply { statuses: Capped(statuses) } = from_header(&reply.header)?;
        if statuses.len() != sent.len() {
            return Err(ExchangeError::IllFormed);
        }
        let (now, id) = (inner.env.now(), other.peer.id);
        let refused = sent.iter().zip(&statuses).filter(|(_, status)| !is_settled(status));
        let (mut refused_count, mut is_full) = (0, false);
        for (key, status) in refused {
            refused_count += 1;
            match status {
                PutStatus::Full => is_full = true,
                _ => inner.repair.decline(id, *key, now),
            }
        }
        let settled = sent.len() as u64 - refused_count;
        outcome.moved += settled;
        outcome.left += refused_count;
        inner.repair.done(settled, bytes);
        time.moved(settled, bytes);
        if is_full {
            inner.repair.set_back(id, now);
            outcome.left += keys.count() as u64;
            break;
        }
        pace(inner, bytes).await;
    }
    Ok(outcome)
}

/// Reads as many of the next blocks as go into one message.
async fn read_batch(
    inner: &Inner,
    keys: &mut std::iter::Peekable<std::vec::IntoIter<Key>>,
    outcome: &mut Outcome,
) -> (Vec<BlockHeader>, Vec<Bytes>) {
    let (mut headers, mut parts, mut bytes) = (Vec::new(), Vec::new(), 0);
    while bytes < REPLY_BYTES && headers.len() < MAX_BATCH_BLOCKS {
        let Some(key) = keys.next() else { break };
        match inner.store.get(&key).await {
            Ok(Some(block)) => {
                let header = inner.header_of(&block.info);
                if header.lease_secs > 0 {
                    bytes += block.bytes.len();
                    headers.push(header);
                    parts.push(block.bytes);
                }
            }
            // It may be elsewhere, kept for this node.
            Ok(None) => {
                if let Some(block) = follow::own(inner, &key).await
                    && block.header.lease_secs > 0
                {
                    bytes += block.bytes.len();
                    headers.push(block.header);
                    parts.push(block.bytes);
                }
            }
            Err(error) => {
                note_store_error(inner, &error);
                outcome.left += 1;
            }
        }
    }
    (headers, parts)
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
pub(crate) async fn pace(inner: &Inner, bytes: u64) {
    let until = inner.repair.pace(inner.env.now(), bytes, inner.config.repair_bytes_per_sec);
    let wait = until.since(inner.env.now());
    if !wait.is_zero() {
        sleep(&*inner.env, wait).await;
    }
}
