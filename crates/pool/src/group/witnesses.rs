//! The primary watches the nodes without files ([`crate::witnesses`]): it asks each node whether it runs, and sends it the newest map.
//!
//! One is *ready* to vote when it has answered of late in the incarnation that the map lists: then it knows that it may have to. One that votes, and
//! has been silent for as long as a dead member, is replaced by another one that is ready.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, Weak};
use std::time::Duration;

use atoll_env::{Env, Instant, sleep};
use atoll_key::PeerId;
use atoll_net::{CallError, Peer, Request};
use futures_util::future::join_all;

use super::primary::Primary;
use crate::disk::Disk;
use crate::map::PoolMap;
use crate::messages::{self, WITNESS, WitnessReply};
use crate::routing::addressed;
use crate::witnesses::PoolWitnesses;

/// Between two questions.
const ASK_EVERY: Duration = Duration::from_millis(500);
/// How long an answer may take.
const ASK_LIMIT: Duration = Duration::from_millis(500);
/// For so long after an answer a node counts as there.
const READY_FOR: Duration = Duration::from_secs(3);

/// How a node without files stands.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WitnessStatus {
    /// Which.
    pub peer: Peer,
    /// Whether it is one of the voters.
    pub votes: bool,
    /// Why it is not there, for people; none if it is, or that is not known.
    pub problem: Option<String>,
}

#[derive(Default)]
struct WitnessAnswers {
    /// When it has answered last, and in which incarnation.
    last: Option<(Instant, u64)>,
    problem: Option<String>,
}

/// See the module.
pub(super) struct WitnessWatch {
    since: Instant,
    heard: Mutex<BTreeMap<PeerId, WitnessAnswers>>,
}

impl WitnessWatch {
    pub(super) fn new(now: Instant) -> WitnessWatch {
        WitnessWatch { since: now, heard: Mutex::default() }
    }

    fn heard(&self) -> MutexGuard<'_, BTreeMap<PeerId, WitnessAnswers>> {
        self.heard.lock().expect("no holder of this lock panics")
    }

    /// Those of them that are ready to vote.
    pub(super) fn ready(&self, listed: &PoolWitnesses, now: Instant) -> BTreeSet<PeerId> {
        let heard = self.heard();
        let is_ready = |id: PeerId, incarnation: u64| {
            let last = heard.get(&id).and_then(|heard| heard.last);
            last.is_some_and(|(at, of)| of == incarnation && now.since(at) < READY_FOR)
        };
        let ready = listed.all().iter().filter(|one| is_ready(one.peer.id, one.incarnation));
        ready.map(|one| one.peer.id).collect()
    }

    /// For how long one has not answered.
    pub(super) fn silence(&self, id: PeerId, now: Instant) -> Duration {
        let last = self.heard().get(&id).and_then(|heard| heard.last);
        now.since(last.map_or(self.since, |(at, _)| at))
    }

    fn note(&self, id: PeerId, now: Instant, answer: Result<WitnessReply, String>) {
        let mut heard = self.heard();
        let heard = heard.entry(id).or_default();
        match answer {
            Ok(WitnessReply { incarnation, .. }) => {
                *heard = WitnessAnswers { last: Some((now, incarnation)), problem: None };
            }
            Err(problem) => heard.problem = Some(problem),
        }
    }

    /// How all of them stand.
    pub(super) fn status(&self, map: &PoolMap, now: Instant) -> Vec<WitnessStatus> {
        let ready = self.ready(&map.witnesses, now);
        let heard = self.heard();
        let stands = |peer: Peer| {
            let problem = heard.get(&peer.id).and_then(|heard| heard.problem.clone());
            let is_away = !ready.contains(&peer.id) && now.since(self.since) > READY_FOR;
            let away = || problem.unwrap_or_else(|| "it has not answered yet".to_owned());
            let votes = map.voters.keys.contains(&peer.id);
            WitnessStatus { peer, votes, problem: is_away.then(away) }
        };
        map.witnesses.all().iter().map(|witness| stands(witness.peer)).collect()
    }
}

/// Asks all of them, as long as this member is the primary.
pub(super) async fn watch_witnesses<D: Disk>(primary: Weak<Primary<D>>, env: Env) {
    loop {
        let Some(own) = primary.upgrade().filter(|own| !own.member.has_failed()) else { return };
        let (transport, pool, watch) = (own.transport.clone(), own.pool, own.witnesses.clone());
        let map = own.backups.map();
        drop(own);
        let header = addressed(&pool, &messages::encode(&map));
        let asked = map.witnesses.all().iter().map(async |witness| {
            let header = header.clone();
            let request = Request { method: WITNESS, header, parts: Vec::new() };
            let answer = match transport.call(witness.peer, request, ASK_LIMIT).await {
                Ok(reply) => messages::decode::<WitnessReply>(&reply.header)
                    .ok_or_else(|| "its answer cannot be read".to_owned()),
                Err(CallError::Refused(refusal)) => Err(refusal.text),
                Err(error) => Err(error.to_string()),
            };
            watch.note(witness.peer.id, env.now(), answer);
        });
        join_all(asked).await;
        sleep(&*env, ASK_EVERY).await;
    }
}
