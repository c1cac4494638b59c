//! How a node becomes a member of a pool. A member gives out a code; a node that has it asks that member, again and again until it is
//! answered. The member knows the caller by its proven key, and has the pool take it up ([`PoolMachine::admit`]); the answer is the map of the
//! pool's first group, which says what this machine is to do.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use atoll_net::{CallError, Peer, Refusal, Reply, Request};
use atoll_pool::disk::directory::Directory;
use atoll_pool::{PoolEditError, PoolId, PoolMachine, PoolMap, RosterGroup, Witness, addressed};
use bytes::Bytes;

use super::records::{GroupRecord, JoiningRecord};
use super::{NOT_A_MEMBER, Pools};

/// Asks a member of a pool to be one, too: the header is the token of the code.
pub(super) const JOIN: u16 = 0x0510;

/// Asks a member of a pool to belong to it without files: the header is the token of the code, and the caller's incarnation, 8 bytes,
/// big-endian.
pub(super) const JOIN_WITHOUT_FILES: u16 = 0x0511;

/// Pools that this node asks to join, by their names here and numbers.
pub(super) type AskedPools = BTreeMap<(String, PoolId), Option<Result<PoolMap, String>>>;

const JOIN_LIMIT: Duration = Duration::from_secs(10);

/// That the caller has the code, without telling how much of it.
fn check_token(token: Option<[u8; 16]>, said: &[u8]) -> Result<(), Refusal> {
    let is_right = token.is_some_and(|token| {
        said.len() == token.len()
            && said.iter().zip(token).fold(0, |differs, (said, own)| differs | (said ^ own)) == 0
    });
    match is_right {
        true => Ok(()),
        false => Err(Refusal::new(NOT_A_MEMBER, "the code is not that of this pool")),
    }
}

/// The answer of a member.
pub(super) async fn answer(
    token: Option<[u8; 16]>,
    machine: &PoolMachine<Directory>,
    from: Peer,
    request: &Request,
) -> Result<Reply, Refusal> {
    let admitted = match request.method {
        JOIN => {
            check_token(token, &request.header)?;
            machine.admit(from).await
        }
        _ => {
            let unreadable = || Refusal::new(Refusal::MALFORMED, "a call that cannot be read");
            let (said, incarnation) = request.header.split_last_chunk().ok_or_else(unreadable)?;
            check_token(token, said)?;
            let incarnation = u64::from_be_bytes(*incarnation);
            machine.admit_without_files(Witness { peer: from, incarnation }).await
        }
    };
    match admitted {
        Ok(map) => {
            tracing::info!("{from} has joined a pool");
            let header = minicbor::to_vec(&map).expect("a vector takes everything");
            Ok(Reply { header: Bytes::from(header), parts: Vec::new() })
        }
        Err(PoolEditError::Refused(why)) => Err(Refusal::new(NOT_A_MEMBER, why)),
        Err(error @ PoolEditError::NoAnswer) => {
            Err(Refusal::new(Refusal::OVERLOADED, error.to_string()))
        }
    }
}

impl Pools {
    /// What became of asking to be a member, as `joins` says, or to belong to the pool without files in this incarnation; begins to ask if nobody does. Other pools do not wait for that.
    pub(super) fn asked_to_join(
        self: &Arc<Self>,
        name: &str,
        pool: PoolId,
        joins: &JoiningRecord,
        incarnation: Option<u64>,
    ) -> Option<Result<PoolMap, String>> {
        let key = (name.to_owned(), pool);
        let mut asked = self.asked.lock().expect("no holder of this lock panics");
        match asked.get_mut(&key) {
            Some(None) => return None,
            Some(answer) => {
                let answer = answer.take();
                asked.remove(&key);
                return answer;
            }
            None => asked.insert(key.clone(), None),
        };
        drop(asked);
        let (pools, joins) = (Arc::downgrade(self), joins.clone());
        let task = self.node.env.spawn(Box::pin(async move {
            let Some(own) = pools.upgrade() else { return };
            let answer = own.ask_to_join(pool, &joins, incarnation).await;
            own.asked.lock().expect("no holder of this lock panics").insert(key, Some(answer));
            own.has_news.notify();
        }));
        drop(task);
        None
    }

    /// Asks to be a member, as `joins` says, or to belong to the pool without files, in this incarnation; what it waits for, as an error for
    /// people.
    async fn ask_to_join(
        &self,
        pool: PoolId,
        joins: &JoiningRecord,
        incarnation: Option<u64>,
    ) -> Result<PoolMap, String> {
        let damaged = || "its record is damaged".to_owned();
        let member = joins.member.peer().ok_or_else(damaged)?;
        let token = joins.token().ok_or_else(damaged)?;
        let (method, header) = match incarnation {
            None => (JOIN, token.to_vec()),
            Some(bits) => (JOIN_WITHOUT_FILES, [&token[..], &bits.to_be_bytes()].concat()),
        };
        let request = Request { method, header: addressed(&pool, &header), parts: Vec::new() };
        let reply = match self.node.transport.call(member, request, JOIN_LIMIT).await {
            Ok(reply) => reply,
            Err(CallError::Refused(refusal)) => return Err(refusal.text),
            Err(error) => return Err(format!("the member that gave the code: {error}")),
        };
        let map = minicbor::decode::<PoolMap>(&reply.header).ok().filter(PoolMap::is_sound);
        let map = map.ok_or("its answer cannot be read")?;
        let local = self.local().id;
        let in_group = |group: &RosterGroup| group.members.contains(local);
        let is_listed = incarnation.is_some() && map.witnesses.contains(local);
        match is_listed
            || map.enrolled.contains(local)
            || map.roster.groups().values().any(in_group)
        {
            true => Ok(map),
            false => Err("its answer lacks this node".into()),
        }
    }
}

impl GroupRecord {
    /// The record of a node that belongs to the pool.
    pub(super) fn made(self) -> GroupRecord {
        GroupRecord { joins: None, ..self }
    }
}
