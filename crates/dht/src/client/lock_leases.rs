//! Asking the replica set of a lock for it.
//!
//! All members are asked at once. A lock is the caller's when a majority of the set as large as it
//! should be has granted it, and each of these nodes is a voter of the set, by the word of
//! the root (`holdings::set_history`): so what other holders were granted has ended, or one of these
//! nodes knows of it. A root that does not answer grants nothing.
//!
//! A renewal needs a majority of the voters too, or a majority that others ask afterwards might
//! not know of it. If the root does not answer, or is too new to know its voters, those count whom a root has
//! named before: another root names others only after those of before have been away for long. So a lease
//! outlives the nodes that granted it, if they go one after another.
//!
//! Not covered: the same root may name others meanwhile, if it is there and this node alone cannot reach it
//! (`docs/design/dht.md`).
//!
//! What was granted in vain is given back at once, so that of two callers which each got a part of
//! the set, one may be served when both ask again.

use std::sync::{Arc, Mutex};

use atoll_env::BoxFuture;
use atoll_key::{Key, PeerId};
use atoll_net::CallError;
use atoll_overlay::{Node, distinct_peers};
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;

use super::Client;
use super::known_sets::KnownSets;
use super::recent::Recent;
use crate::locks::{LockGrant, LockLease, LockRefusal, LockStep, place};
use crate::placement::{set_tag, size_of};
use crate::rpc::{Lock, LockReply, LockStatus, is_majority};

/// Replica sets whose voters are remembered. A guess: as many as there are known sets.
const MAX_VOTERS: usize = 4096;

/// The voters that roots have named last, by [`place`].
#[derive(Debug, Default)]
pub(super) struct KnownVoters(Mutex<Recent<Vec<PeerId>, MAX_VOTERS>>);

impl KnownVoters {
    fn of(&self, place: &Key) -> Vec<PeerId> {
        let voters = self.0.lock().expect("no holder of this lock panics");
        voters.get(place).cloned().unwrap_or_default()
    }

    fn note(&self, place: Key, voters: Vec<PeerId>) {
        self.0.lock().expect("no holder of this lock panics").note(place, voters);
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

type Answer = (usize, Result<LockReply, CallError>);

async fn ask_set(
    client: &Arc<Client>,
    ask: LockLease,
    anew: bool,
) -> Result<LockGrant, LockRefusal> {
    let place = place(&ask.key);
    let named = KnownSets::find(client, &place, anew).await;
    let named = named.map_err(|error| LockRefusal::NoMajority(error.to_string()))?;
    let set = distinct_peers(&named.nodes, client.config.replicas);
    let wanted = u32::try_from(size_of(client, &set)).expect("k is small");
    let mut calls: FuturesUnordered<BoxFuture<'static, Answer>> = FuturesUnordered::new();
    for (at, node) in set.iter().enumerate() {
        let (client, node) = (client.clone(), *node);
        calls.push(Box::pin(async move {
            let called = client.call(&node, &Lock::from(ask), Vec::new()).await;
            (at, called.map(|(reply, _)| reply))
        }));
    }
    let voters = Voters { client: client.clone(), place, set: set.clone(), tag: set_tag(&set) };
    let mut said = Said {
        step: ask.step,
        tag: set_tag(&set),
        wanted,
        voters: if ask.step == LockStep::Renew {
            client.known_voters.of(&place)
        } else {
            Vec::new()
        },
        of: vec![None; set.len()],
    };
    let mut outcome = None;
    while let Some((at, answer)) = calls.next().await {
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
    client.background.run(&client.env, async move {
        while let Some((at, answer)) = calls.next().await {
            voters.of_answer(at, &answer);
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

/// The voters that the root of a set names in its answer.
struct Voters {
    client: Arc<Client>,
    place: Key,
    set: Vec<Node>,
    tag: u64,
}

impl Voters {
    /// Notes those that the answer of a member names, if it is the root and knows any.
    fn of_answer(&self, at: usize, answer: &Result<LockReply, CallError>) -> Option<Vec<PeerId>> {
        let reply = answer.as_ref().ok()?;
        if at != 0 || reply.set != Some(self.tag) || reply.settled == 0 {
            return None;
        }
        let votes = |(at, _): &(usize, &Node)| *at < 64 && reply.settled >> at & 1 == 1;
        let voters = self.set.iter().enumerate().filter(votes).map(|(_, node)| node.peer.id);
        let voters: Vec<PeerId> = voters.collect();
        self.client.known_voters.note(self.place, voters.clone());
        Some(voters)
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
