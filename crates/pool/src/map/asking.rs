//! How any member has a map decided, or learns which one holds.
//!
//! All voters are asked at once, each again and again: one of them leads, or will soon, and the others say at once that they do not.
//! Nobody has to find out first that the leader is dead. A proposal that arrives twice is decided once, for it follows one
//! map.

use std::sync::Arc;
use std::time::Duration;

use atoll_env::{Env, jittered, sleep, timeout};
use atoll_net::{CallError, Peer, Request, Transport};
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;

use super::voter::MapVoter;
use super::wire::{PROPOSE, ProposeCall, ProposeReply};
use super::{PoolMap, voters};
use crate::members::PoolMembers;
use crate::messages::{decode, encode};
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
    /// The time passed. A proposal may have been decided, or may still be.
    #[error("no majority of the pool's voters answers")]
    NoAnswer,
}

/// A member that asks its pool's voters.
pub struct MapAsker {
    env: Env,
    transport: Arc<dyn Transport>,
    pool: PoolId,
    founding: PoolMembers,
    /// The voter of this member, if it has one.
    voter: Option<Arc<MapVoter>>,
}

impl std::fmt::Debug for MapAsker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MapAsker").field("voter", &self.voter).finish_non_exhaustive()
    }
}

impl MapAsker {
    /// For this node, a member of the pool, with its own voter if it has one.
    pub fn new(
        env: Env,
        transport: Arc<dyn Transport>,
        pool: PoolId,
        founding: PoolMembers,
        voter: Option<Arc<MapVoter>>,
    ) -> MapAsker {
        MapAsker { env, transport, pool, founding, voter }
    }

    /// Has `map` decided if the map before it still holds, and returns the one that holds then: `map`, if that was decided and no
    /// other since. May be called again with the same map.
    ///
    /// # Errors
    /// [`AskError::NoAnswer`] after `limit`.
    pub async fn propose(&self, map: &PoolMap, limit: Duration) -> Result<PoolMap, AskError> {
        match map.is_sound(&self.founding) {
            true => self.until_answered(Some(map), limit).await,
            false => Err(AskError::Unsound),
        }
    }

    /// A map that held at some moment during this call.
    ///
    /// # Errors
    /// [`AskError::NoAnswer`] after `limit`.
    pub async fn ask(&self, limit: Duration) -> Result<PoolMap, AskError> {
        self.until_answered(None, limit).await
    }

    async fn until_answered(
        &self,
        map: Option<&PoolMap>,
        limit: Duration,
    ) -> Result<PoolMap, AskError> {
        let asking = voters(&self.founding).iter().map(|voter| self.ask_voter(*voter, map));
        let mut asking: FuturesUnordered<_> = asking.collect();
        let answer = timeout(&*self.env, limit, asking.next()).await;
        answer.ok().flatten().ok_or(AskError::NoAnswer)
    }

    /// Asks one voter until it knows.
    async fn ask_voter(&self, voter: Peer, map: Option<&PoolMap>) -> PoolMap {
        let local = self.transport.local().id;
        loop {
            let asked = match &self.voter {
                Some(own) if voter.id == local => {
                    let answer = timeout(&*self.env, CALL_LIMIT, own.propose(map.cloned())).await;
                    answer.map_err(|_| CallError::TimedOut).and_then(|answer| Ok(answer?))
                }
                _ => self.call(voter, map).await,
            };
            match asked {
                Ok(ProposeReply::Holds(map)) if map.is_sound(&self.founding) => return map,
                Ok(_) => {}
                Err(error) => tracing::debug!("voter {voter}: {error}"),
            }
            sleep(&*self.env, jittered(&*self.env, PAUSE)).await;
        }
    }

    async fn call(&self, voter: Peer, map: Option<&PoolMap>) -> Result<ProposeReply, CallError> {
        let call = ProposeCall { map: map.cloned() };
        let header = addressed(&self.pool, &encode(&call));
        let request = Request { method: PROPOSE, header, parts: Vec::new() };
        let reply = self.transport.call(voter, request, CALL_LIMIT).await?;
        Ok(decode(&reply.header).unwrap_or(ProposeReply::NotLeader))
    }
}
