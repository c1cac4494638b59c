//! How any member has a map decided, or learns which one holds.
//!
//! All members are asked at once, each again and again. One of the voters leads, or will soon, and the others say at once that they do not:
//! nobody has to find out first that the leader is dead. Who knows a newer map says it, whether or not it votes: there may be other voters
//! by now. A proposal that arrives twice is decided once, for it follows one map.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use atoll_env::{Env, jittered, sleep, timeout};
use atoll_net::{CallError, Peer, Request, Transport};
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;

use super::PoolMap;
use super::voter::MapVoter;
use super::wire::{PROPOSE, ProposeCall, ProposeReply};
use crate::messages::{decode, encode, refused};
use crate::routing::{PoolId, addressed};

/// How long a voter may take to answer; one that leads answers after a round through the others and their disks.
const CALL_LIMIT: Duration = Duration::from_millis(500);
/// Until a voter that does not lead is asked again.
const PAUSE: Duration = Duration::from_millis(25);

/// Why it is not known which map holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum AskError {
    /// The proposed map cannot be one of this pool.
    #[error("such a map of the pool cannot be")]
    Unsound,
    /// A majority of the voters that it knows says that this node is no member of the pool.
    #[error("this node is no member of the pool any more")]
    NotAMember,
    /// The time passed. A proposal may have been decided, or may still be.
    #[error("no majority of the pool's voters answers")]
    NoAnswer,
}

/// What is known of the voters.
struct KnownMap {
    /// The newest map that is known.
    map: PoolMap,
    /// The voter of this member, if it has one.
    own: Option<Arc<MapVoter>>,
}

/// A member that asks its pool's voters.
pub(super) struct MapAsker {
    env: Env,
    transport: Arc<dyn Transport>,
    pool: PoolId,
    known: Mutex<KnownMap>,
}

/// What a voter said.
enum VoterAnswer {
    /// This map held.
    Holds(PoolMap),
    /// There are others by now.
    OtherVoters,
    NotAMember,
}

impl std::fmt::Debug for MapAsker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MapAsker").finish_non_exhaustive()
    }
}

impl MapAsker {
    /// For this node, a member of the pool as `map` says, which was decided, with its own voter if it has one.
    pub(super) fn new(
        env: Env,
        transport: Arc<dyn Transport>,
        pool: PoolId,
        map: PoolMap,
        own: Option<Arc<MapVoter>>,
    ) -> MapAsker {
        MapAsker { env, transport, pool, known: Mutex::new(KnownMap { map, own }) }
    }

    fn known(&self) -> MutexGuard<'_, KnownMap> {
        self.known.lock().expect("no holder of this lock panics")
    }

    /// A map that was decided.
    pub(super) fn note_map(&self, map: &PoolMap) {
        let mut known = self.known();
        if map.is_sound() && map.epoch > known.map.epoch {
            known.map = map.clone();
        }
    }

    /// The newest map that it has heard of.
    pub(super) fn map(&self) -> PoolMap {
        self.known().map.clone()
    }

    /// The voter of this member is another one by now.
    pub(super) fn set_voter(&self, own: Arc<MapVoter>) {
        self.known().own = Some(own);
    }

    /// Has `map` decided if the map before it still holds, and returns the one that holds then: `map`, if that was decided and no
    /// other since. May be called again with the same map.
    ///
    /// # Errors
    /// [`AskError::NoAnswer`] after `limit`.
    pub(super) async fn propose(
        &self,
        map: &PoolMap,
        limit: Duration,
    ) -> Result<PoolMap, AskError> {
        match map.is_sound() {
            true => self.until_answered(Some(map), limit).await,
            false => Err(AskError::Unsound),
        }
    }

    /// A map that held at some moment during this call.
    ///
    /// # Errors
    /// [`AskError::NoAnswer`] after `limit`.
    pub(super) async fn ask(&self, limit: Duration) -> Result<PoolMap, AskError> {
        self.until_answered(None, limit).await
    }

    async fn until_answered(
        &self,
        map: Option<&PoolMap>,
        limit: Duration,
    ) -> Result<PoolMap, AskError> {
        let answered = timeout(&*self.env, limit, self.ask_voters(map)).await;
        answered.unwrap_or(Err(AskError::NoAnswer))
    }

    async fn ask_voters(&self, map: Option<&PoolMap>) -> Result<PoolMap, AskError> {
        'voters: loop {
            let known = self.map();
            let generation = known.voters.generation;
            // Also those that do not vote: they may know who does by now.
            let asking = known
                .all_peers()
                .map(async |peer| (peer.id, self.ask_member(peer, generation, map).await));
            let mut asking: FuturesUnordered<_> = asking.collect();
            let (count, mut refused) = (known.enrolled.peers().len(), 0);
            while let Some((id, answer)) = asking.next().await {
                match answer {
                    VoterAnswer::Holds(map) => return Ok(map),
                    VoterAnswer::OtherVoters => continue 'voters,
                    // This one's own voter may know no more than it. A node without files may have been away when the caller joined.
                    VoterAnswer::NotAMember => {
                        refused += usize::from(known.enrolled.contains(id));
                    }
                }
                if 2 * refused > count {
                    break;
                }
            }
            return Err(AskError::NotAMember);
        }
    }

    /// Asks one voter until it knows, or the voters are others than those of this generation.
    async fn ask_member(&self, voter: Peer, generation: u64, map: Option<&PoolMap>) -> VoterAnswer {
        let local = self.transport.local().id;
        loop {
            let (known, own) = {
                let known = self.known();
                (known.map.clone(), known.own.clone().filter(|_| voter.id == local))
            };
            let call = ProposeCall { map: map.cloned(), known };
            let asked = match own {
                Some(own) => {
                    let answer = timeout(&*self.env, CALL_LIMIT, own.propose(call)).await;
                    answer.map_err(|_| CallError::TimedOut).and_then(|answer| Ok(answer?))
                }
                None => self.call(voter, &call).await,
            };
            match asked {
                Ok(ProposeReply::Holds(map)) if map.is_sound() => {
                    self.note_map(&map);
                    if map.voters.generation == generation {
                        return VoterAnswer::Holds(map);
                    }
                    // Others may have decided more meanwhile.
                }
                Ok(ProposeReply::NotLeader(Some(newer))) => self.note_map(&newer),
                Ok(_) => {}
                Err(CallError::Refused(refusal)) if refusal.code == refused::NOT_A_MEMBER => {
                    return VoterAnswer::NotAMember;
                }
                Err(error) => tracing::debug!("voter {voter}: {error}"),
            }
            if self.known().map.voters.generation != generation {
                return VoterAnswer::OtherVoters;
            }
            sleep(&*self.env, jittered(&*self.env, PAUSE)).await;
        }
    }

    async fn call(&self, voter: Peer, call: &ProposeCall) -> Result<ProposeReply, CallError> {
        let header = addressed(&self.pool, &encode(call));
        let request = Request { method: PROPOSE, header, parts: Vec::new() };
        let reply = self.transport.call(voter, request, CALL_LIMIT).await?;
        Ok(decode(&reply.header).unwrap_or(ProposeReply::NotLeader(None)))
    }
}
