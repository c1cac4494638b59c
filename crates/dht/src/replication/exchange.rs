//! The reconciliation of one key range with one other node: both sides of the exchange
//! whose rules are in [`crate::replication::reconcile`], and the copying of what differs.
//!
//! Nothing here holds more than a page of items or a batch of blocks in memory, however
//! large the range.

use std::collections::BTreeSet;

use atoll_key::{Key, KeyRange};
use atoll_net::{CallError, Refusal};
use atoll_overlay::Node;
use futures_util::future::{Either, select};

use super::Replication;
use super::copying::{ExchangeError, Outcome, give, take};
use super::obstacle::Obstacle;
use super::reconcile::{Difference, difference, well_formed_items, well_formed_parts};
use crate::holdings::ranges::{page, summaries};
use crate::rpc::backoff::SetBack;
use crate::rpc::budget::PeerBudget;
use crate::rpc::{Answer, COMPARE_LIMIT, Claim, Item, Reconcile, send};

/// Claims sent in one message.
const CLAIMS_AT_ONCE: usize = 16;
/// An exchange is given up after so many messages in a row that led to no copy. An honest
/// one takes log16 of the blocks, and more only where blocks cannot be copied. This also
/// bounds the ranges still to be compared. A guess.
const MAX_IDLE_STEPS: usize = 1000;
/// Blocks given to a replica that are looked for again in the same round, at most: enough
/// to notice one that does not keep what it acknowledges.
const MAX_GIVEN: usize = 1024;

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
    let time = PeerBudget::of(replication, other.peer.id);
    let mut session = Session { replication, other, todo: ranges, outcome, given, time };
    let ended = session.run().await;
    if ended.is_ok() && session.outcome == Outcome::default() {
        replication.backoff.kept(&other.peer.id);
    }
    let Session { outcome, .. } = session;
    ended.map(|()| outcome)
}

struct Session<'a> {
    replication: &'a Replication,
    other: &'a Node,
    todo: Vec<KeyRange>,
    outcome: Outcome,
    given: &'a mut Given,
    time: PeerBudget<'a>,
}

impl Session<'_> {
    async fn run(&mut self) -> Result<(), ExchangeError> {
        let (mut idle_steps, mut moved) = (0, 0);
        while !self.todo.is_empty() {
            if self.time.left().is_zero() {
                // What was not compared may differ.
                self.outcome.leave(1, Obstacle::Slow);
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
        let compared = compare(self.replication, self.other, &asked);
        let answers = self.time.wait(compared).await.unwrap_or(Err(ExchangeError::Later))?;
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
            let known = |key: &Key| self.replication.known(key);
            let joins = |key: &Key| known(key).is_some_and(|held| held.kind.joins());
            let mut found = difference(part, &ours, &there, joins);
            found.give = self.may_be_given(&found);
            self.level(found).await?;
            todo = rest;
        }
        Ok(())
    }

    /// What may be given: nothing to a replica that does not keep what it is given. Where versions
    /// are joined and this node cannot take the other's, the two differ although the other has kept
    /// what it was given.
    fn may_be_given(&mut self, found: &Difference) -> Vec<Item> {
        let (again, new): (Vec<Item>, Vec<Item>) =
            found.give.iter().partition(|item| self.given.contains(item));
        let there: BTreeSet<Key> = match again.is_empty() {
            true => BTreeSet::new(),
            false => found.take.iter().map(|item| item.key).collect(),
        };
        let different = again.iter().filter(|item| there.contains(&item.key)).count();
        let missing = again.len() - different;
        if missing > 0 {
            let replica = self.other;
            tracing::warn!(count = missing, ?replica, "blocks it took are missing again");
            let now = self.replication.env.now();
            self.replication.backoff.set_back(replica.peer.id, now, SetBack::Forgets);
        }
        self.outcome.leave(missing as u64, Obstacle::Forgotten);
        self.outcome.leave(different as u64, Obstacle::NotJoined);
        new
    }

    /// Copies what differs, both ways.
    async fn level(&mut self, found: Difference) -> Result<(), ExchangeError> {
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
        self.outcome += taken?;
        let (outcome, acknowledged) = given?;
        // Not what a put is still sending: the replica has not acknowledged that.
        let acknowledged: BTreeSet<Key> = acknowledged.into_iter().collect();
        let kept = found.give.into_iter().filter(|item| acknowledged.contains(&item.key));
        self.given.extend(kept.take(MAX_GIVEN.saturating_sub(self.given.len())));
        self.outcome += outcome;
        Ok(())
    }
}

/// Sends claims to `other`. A slow answer is no sign of a failure: the overlay's own probes find a
/// dead neighbour sooner, and end the wait.
async fn compare(
    replication: &Replication,
    other: &Node,
    asked: &Reconcile,
) -> Result<Vec<Answer>, ExchangeError> {
    let mut call = send(&*replication.transport, other.peer, asked, Vec::new(), COMPARE_LIMIT);
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
