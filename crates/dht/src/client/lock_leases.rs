//! Asking the replica set of a lock for it.
//!
//! All members are asked at once. A lock is the caller's when a majority of the set as large as it
//! should be has granted it, and each of these nodes is a voter of the set, by the word of
//! the root (`holdings::set_history`): so what other holders were granted has ended, or one of these
//! nodes knows of it. A root that does not answer grants nothing.
//!
//! A renewal needs a majority of the voters too, or a majority that others ask afterwards might
//! not know of it. If the root does not answer, those count whom a root has named at most [`NAMED_FOR`] before. If the root
//! answers and is too new to know its voters, those of before count that belong to its set, if they counted until then. So a
//! lease outlives the nodes that granted it, if they go one after another; and a holder whose node does not reach a root that
//! is there loses its lease within [`SETTLE`].
//!
//! Invariant: a majority that has granted a lease, and one by which another holder is granted the lock while that lease
//! lasts, have a node in common. Let a root be asked at a time t, and say which members of its set are its voters:
//!
//! - Until t + [`SETTLE`] it drops none of them: each belonged to the set at t, and is dropped when it has been away for that
//!   long. It never has more voters than copies, so each majority of its voters until then has a node in common with each
//!   majority of those it has named. A lease that is renewed without the root until t + [`NAMED_FOR`] ends by t + [`SETTLE`].
//!   It does not matter which of the voters the root or the newcomer reaches, or that members that say that the lock is held
//!   are outvoted.
//! - A root that says that it has no voters yet will have none until t + [`SETTLE`] but members of its set at t (if no voter of
//!   its former keys was away then). A set has no more members than copies, so majorities within it have a node in common.
//! - Another node that becomes the root has no voters before it has been the root for [`SETTLE`]. A root that was replaced at a
//!   time s names voters until s + `MAX_UNCONFIRMED` at most, since no neighbour confirms its place any more
//!   (`holdings::set_history`), and what these grant then ends by s + [`SETTLE`].
//!
//! So one node at a time takes itself for the root and has voters (`docs/design/dht.md`, *One root*).
//!
//! A member that answers neither in its usual time nor to a ping (`rpc::overdue`) counts as one that does not answer.
//!
//! What was granted in vain is given back at once, so that of two callers which each got a part of
//! the set, one may be served when both ask again.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use atoll_env::{BoxFuture, Instant};
use atoll_key::{Key, PeerId};
use atoll_net::CallError;
use atoll_overlay::{Node, distinct_peers};
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;

use super::Client;
use super::known_sets::KnownSets;
use super::recent::Recent;
use crate::locks::{LOCK_LEASE, LockGrant, LockLease, LockRefusal, LockStep, SETTLE, place};
use crate::placement::{set_tag, size_of};
use crate::rpc::overdue::{Heard, ended, hear};
use crate::rpc::{Lock, LockReply, LockStatus, is_majority};

/// Replica sets whose voters are remembered. A guess: as many as there are known sets.
const MAX_VOTERS: usize = 4096;

/// For how long after a root has named its voters they count although it does not answer: a lease that is renewed
/// at its end has ended when the root may count others.
const NAMED_FOR: Duration = Duration::from_secs(SETTLE.as_secs() - LOCK_LEASE.as_secs());

/// Those whose grants of a lock count, as a root has named them.
#[derive(Debug, Default)]
struct NamedVoters {
    voters: Vec<PeerId>,
    /// When the root was asked.
    asked: Instant,
}

/// The voters that roots have named last, by [`place`].
#[derive(Debug, Default)]
pub(super) struct KnownVoters(Mutex<Recent<NamedVoters, MAX_VOTERS>>);

impl KnownVoters {
    /// Those that count in a request of this time whose root does not answer.
    fn at(&self, now: Instant, place: &Key) -> Vec<PeerId> {
        let known = self.0.lock().expect("no holder of this lock panics");
        let named = known.get(place).filter(|named| now.since(named.asked) <= NAMED_FOR);
        named.map(|named| named.voters.clone()).unwrap_or_default()
    }

    /// Notes what a root has answered that was asked at this time: which of the members of its `set` are its voters.
    /// One that is too new to have any will have others in [`SETTLE`] at the earliest, all of this set, and
    /// those of before count until then. Returns those that count, if the root says anything of them.
    fn note(
        &self,
        asked: Instant,
        place: Key,
        set: &[PeerId],
        settled: u64,
    ) -> Option<Vec<PeerId>> {
        let mut known = self.0.lock().expect("no holder of this lock panics");
        let before = known.get(&place);
        let voters: Vec<PeerId> = if settled == 0 {
            let lasts = |named: &&NamedVoters| asked.since(named.asked) < SETTLE;
            let mut voters = before.filter(lasts)?.voters.clone();
            voters.retain(|voter| set.contains(voter));
            voters
        } else {
            let votes = |(at, _): &(usize, &PeerId)| *at < 64 && settled >> at & 1 == 1;
            set.iter().enumerate().filter(votes).map(|(_, peer)| *peer).collect()
        };
        if before.is_none_or(|named| named.asked <= asked) {
            known.note(place, NamedVoters { voters: voters.clone(), asked });
        }
        Some(voters)
    }
}

/// Does what is asked, at the replica set.
pub(crate) async fn ask(client: &Arc<Client>, ask: LockLease) -> Result<LockGrant, LockRefusal> {
    match ask_set(client, ask, false).await {
        // The set may be another one by now. What the first attempt undoes has the number between.
        Err(LockRefusal::NoMajority(_) | LockRefusal::Settling) => {
            ask_set(client, LockLease { number: ask.number + 2, ..ask }, true).await
        }
        done => done,
    }
}

type Answer = (usize, Heard<Result<LockReply, CallError>>);

async fn ask_set(
    client: &Arc<Client>,
    ask: LockLease,
    anew: bool,
) -> Result<LockGrant, LockRefusal> {
    let place = place(&ask.key);
    // This node's tables may name a node that the root does not reach.
    let named = match KnownSets::known(client, &place, anew).filter(|_| !anew) {
        Some(named) => Ok(named),
        None => KnownSets::look_up(client, &place, Box::new(|_| {})).await,
    };
    let named = named.map_err(|error| LockRefusal::NoMajority(error.to_string()))?;
    let set = distinct_peers(&named.nodes, client.config.replicas);
    let wanted = u32::try_from(size_of(client, &set)).expect("k is small");
    let asked = client.env.now();
    let mut calls: FuturesUnordered<BoxFuture<'static, Answer>> = FuturesUnordered::new();
    for (at, node) in set.iter().enumerate() {
        let (asking, node) = (client.clone(), *node);
        let called = hear(client, node, async move {
            let called = asking.call(&node, &Lock::from(ask), Vec::new()).await;
            called.map(|(reply, _)| reply)
        });
        calls.push(Box::pin(async move { (at, called.await) }));
    }
    let members = set.iter().map(|node| node.peer.id).collect();
    let tag = set_tag(&set);
    let voters = Voters { client: client.clone(), place, step: ask.step, members, tag, asked };
    let mut said = Said {
        step: ask.step,
        tag,
        wanted,
        voters: match ask.step {
            LockStep::Renew => client.known_voters.at(asked, &place),
            _ => Vec::new(),
        },
        of: vec![None; set.len()],
    };
    let (mut outcome, mut late) = (None, Vec::new());
    while let Some((at, heard)) = calls.next().await {
        let answer = match heard {
            Heard::Answer(answer) => answer,
            Heard::Silent(call) => {
                late.push((at, call));
                Err(CallError::TimedOut)
            }
        };
        if let Some(named) = voters.of_answer(at, &answer) {
            said.voters = named;
        }
        said.of[at] = Some(answer);
        outcome = said.outcome(false, &set);
        if outcome.is_some() {
            break;
        }
    }
    // The others hear of it all the same.
    for (at, call) in late {
        calls.push(Box::pin(async move { (at, Heard::Answer(call.await)) }));
    }
    client.background.run(&client.env, async move {
        while let Some((at, heard)) = calls.next().await {
            voters.of_answer(at, &ended(heard).await);
        }
    });
    let outcome = outcome.or_else(|| said.outcome(true, &set)).expect("all have answered");
    if outcome.is_err()
        && let Some((step, mode)) = ask.step.undone()
    {
        // What some have granted, and others may.
        let undo = Lock::from(LockLease { step, mode, number: ask.number + 1, ..ask });
        for node in set {
            let asking = client.clone();
            client.env.spawn(Box::pin(async move {
                drop(asking.call(&node, &undo, Vec::new()).await);
            }));
        }
    }
    outcome
}

/// Collects what the answers to one request say about the voters.
struct Voters {
    client: Arc<Client>,
    place: Key,
    step: LockStep,
    /// The set that was asked.
    members: Vec<PeerId>,
    tag: u64,
    /// When.
    asked: Instant,
}

impl Voters {
    /// Notes what the answer of a member says of them, if it is the root. Returns those that count in this request, if
    /// it says so.
    fn of_answer(&self, at: usize, answer: &Result<LockReply, CallError>) -> Option<Vec<PeerId>> {
        if at == 0 && answer.is_err() {
            KnownSets::forget(&self.client, &self.place);
        }
        let reply = answer.as_ref().ok()?;
        let is_silent = match self.step {
            // A root that is asked to forget a lease does not look who they are.
            LockStep::Release => true,
            // Those of before count for holders.
            LockStep::Take | LockStep::Upgrade => reply.settled == 0,
            LockStep::Renew => false,
        };
        if at != 0 || reply.set != Some(self.tag) || is_silent {
            return None;
        }
        let known = &self.client.known_voters;
        known.note(self.asked, self.place, &self.members, reply.settled)
    }
}

/// What the members of a replica set have said.
struct Said {
    step: LockStep,
    /// The tag of the set that was asked.
    tag: u64,
    /// How many members the set should have.
    wanted: u32,
    /// Those whose grants count.
    voters: Vec<PeerId>,
    /// Of each member, the root first.
    of: Vec<Option<Result<LockReply, CallError>>>,
}

impl Said {
    /// The root's answer, if the root believes in the same set.
    fn root(&self) -> Option<&LockReply> {
        match &self.of[0] {
            Some(Ok(reply)) if reply.set == Some(self.tag) => Some(reply),
            _ => None,
        }
    }

    /// Whether the holder asks for what it does not have.
    fn is_new(&self) -> bool {
        matches!(self.step, LockStep::Take | LockStep::Upgrade)
    }

    /// How many have answered so.
    fn count(&self, is_one: impl Fn(usize, &LockReply) -> bool) -> u32 {
        let answers = self.of.iter().enumerate();
        let is_one = |(at, said): &(usize, &Option<Result<LockReply, CallError>>)| {
            said.as_ref().is_some_and(|said| said.as_ref().is_ok_and(|reply| is_one(*at, reply)))
        };
        answers.filter(is_one).count() as u32
    }

    fn of_status(&self, status: LockStatus) -> u32 {
        self.count(|_, reply| reply.status == status)
    }

    /// What came of it; `None` if that is not sure before more have answered, of whom `is_all` says
    /// that there are no more.
    fn outcome(&self, is_all: bool, set: &[Node]) -> Option<Result<LockGrant, LockRefusal>> {
        let granted = LockGrant { is_wanted: self.count(|_, reply| reply.is_wanted) > 0 };
        let root = self.root();
        let denies = matches!(&self.of[0], Some(Ok(_))) && root.is_none();
        if self.step == LockStep::Renew && (denies || self.of[0].is_none()) && !is_all {
            return None;
        }
        let counts = |at: usize, reply: &LockReply| {
            let votes = self.step == LockStep::Release || self.voters.contains(&set[at].peer.id);
            votes && !denies && reply.status == LockStatus::Granted
        };
        let grants = self.count(counts);
        if is_majority(grants, self.wanted) {
            return Some(Ok(granted));
        }
        let open = self.of.iter().filter(|said| said.is_none()).count() as u32;
        let held = self.of_status(LockStatus::Held);
        // Those who hold it can give it up; those that are new will be old.
        let could =
            self.of_status(LockStatus::Granted) + self.of_status(LockStatus::Settling) + held;
        if !is_all {
            let is_refused = held > 0
                && root.is_some()
                && !is_majority(grants + open, self.wanted)
                && is_majority(could, self.wanted);
            return is_refused.then_some(Err(LockRefusal::Held));
        }
        let has_root = root.is_some() || !self.is_new();
        Some(Err(match self.of_status(LockStatus::Minority) {
            0 if has_root && is_majority(could, self.wanted) && held > 0 => LockRefusal::Held,
            // Those that do not answer have failed, and others take their places; or this node is
            // cut off, and will soon say so itself.
            0 => LockRefusal::Settling,
            _ => LockRefusal::NoMajority(self.told(set)),
        }))
    }

    /// What each has said, for people.
    fn told(&self, set: &[Node]) -> String {
        let said = |(node, said): (&Node, &Option<Result<LockReply, CallError>>)| match said {
            Some(Ok(LockReply { status: LockStatus::Minority, .. })) => {
                format!("{node} sees no more than half of the network's nodes")
            }
            Some(Ok(_)) => format!("{node} has answered"),
            Some(Err(error)) => format!("{node} {error}"),
            None => format!("{node} {}", CallError::TimedOut),
        };
        let all: Vec<String> = set.iter().zip(&self.of).map(said).collect();
        format!("{} of {} nodes; {}", all.len(), self.wanted, all.join("; "))
    }
}

#[cfg(test)]
mod tests {
    use atoll_net::Peer;

    use super::*;

    fn at(secs: u64) -> Instant {
        Instant::default() + Duration::from_secs(secs)
    }

    fn peers(numbers: &[u8]) -> Vec<PeerId> {
        numbers.iter().map(|n| PeerId([*n; 32])).collect()
    }

    fn reply(status: LockStatus, set: Option<u64>) -> Option<Result<LockReply, CallError>> {
        Some(Ok(LockReply { status, is_wanted: false, set, settled: 0 }))
    }

    /// The outcome of a request to nodes 1 to 3, of which the grants of `voters` count.
    fn outcome(
        step: LockStep,
        voters: &[u8],
        of: [Option<Result<LockReply, CallError>>; 3],
    ) -> Option<Result<(), LockRefusal>> {
        let addr = "127.0.0.1:1".parse().expect("an address");
        let set: Vec<Node> =
            peers(&[1, 2, 3]).into_iter().map(|id| Node::of(Peer { id, addr })).collect();
        let is_all = of.iter().all(Option::is_some);
        let said = Said { step, tag: 7, wanted: 3, voters: peers(voters), of: of.to_vec() };
        said.outcome(is_all, &set).map(|outcome| outcome.map(drop))
    }

    #[test]
    fn voters_count_without_their_root_until_it_may_have_others() {
        let (known, place) = (KnownVoters::default(), Key::hashed([1; 32]));
        let set = peers(&[1, 2, 3]);
        assert_eq!(known.at(at(0), &place), []);
        assert_eq!(known.note(at(1), place, &set, 0), None, "nobody was named before");
        assert_eq!(known.note(at(2), place, &set, 0b101), Some(peers(&[1, 3])));
        assert_eq!(known.at(at(12), &place), peers(&[1, 3]));
        assert_eq!(known.at(at(13), &place), []);
        // The answer to an earlier request.
        assert_eq!(known.note(at(1), place, &set, 0b111), Some(set.clone()));
        assert_eq!(known.at(at(12), &place), peers(&[1, 3]));
        assert_eq!(known.note(at(3), place, &set, 0b111), Some(set.clone()));
        assert_eq!(known.at(at(13), &place), set);
    }

    #[test]
    fn a_root_without_voters_says_how_long_those_of_before_count_that_belong_to_its_set() {
        let (known, place) = (KnownVoters::default(), Key::hashed([1; 32]));
        known.note(at(0), place, &peers(&[1, 2, 3]), 0b111);
        let set = peers(&[2, 3, 4]);
        assert_eq!(known.note(at(20), place, &set, 0), Some(peers(&[2, 3])));
        assert_eq!(known.at(at(30), &place), peers(&[2, 3]));
        assert_eq!(known.note(at(44), place, &peers(&[3, 4, 5]), 0), Some(peers(&[3])));
        assert_eq!(known.note(at(69), place, &set, 0), None, "too long ago");
    }

    #[test]
    fn a_lock_is_granted_by_most_nodes_if_the_root_names_them() {
        let step = LockStep::Take;
        let [granted, held] = [LockStatus::Granted, LockStatus::Held];
        let root = |status| reply(status, Some(7));
        let failed = || Some(Err(CallError::TimedOut));
        let all = [1, 2, 3];
        let cases = [
            ([root(granted), reply(granted, None), None], Some(Ok(()))),
            ([root(held), reply(granted, None), reply(granted, None)], Some(Ok(()))),
            ([root(granted), reply(held, None), None], None),
            ([root(granted), reply(held, None), failed()], Some(Err(LockRefusal::Held))),
            ([root(held), reply(held, None), None], Some(Err(LockRefusal::Held))),
            ([root(granted), failed(), failed()], Some(Err(LockRefusal::Settling))),
            // It means another set.
            ([reply(granted, Some(8)), reply(granted, None), None], None),
            (
                [reply(granted, None), reply(granted, None), reply(granted, None)],
                Some(Err(LockRefusal::Settling)),
            ),
        ];
        for (n, (of, expected)) in cases.into_iter().enumerate() {
            assert_eq!(outcome(step, &all, of), expected, "case {n}");
        }
        let two_new = outcome(step, &[1], [root(granted), reply(granted, None), None]);
        assert_eq!(two_new, None, "2 does not count");
    }

    #[test]
    fn a_renewal_waits_for_the_root_and_counts_those_it_has_named() {
        let step = LockStep::Renew;
        let granted = || reply(LockStatus::Granted, None);
        let root = || reply(LockStatus::Granted, Some(7));
        let failed = || Some(Err(CallError::TimedOut));
        assert_eq!(outcome(step, &[1, 2, 3], [None, granted(), granted()]), None);
        assert_eq!(outcome(step, &[1, 2, 3], [failed(), granted(), granted()]), Some(Ok(())));
        assert_eq!(outcome(step, &[1, 2, 3], [root(), granted(), None]), Some(Ok(())));
        let settling = Some(Err(LockRefusal::Settling));
        assert_eq!(outcome(step, &[1, 3], [failed(), granted(), granted()]), settling);
        assert_eq!(outcome(step, &[], [failed(), granted(), granted()]), settling);
    }
}
