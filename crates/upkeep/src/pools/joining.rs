//! How the members of a pool come together. Who made the pool (the founder) gives out a code; each node that has it asks
//! the founder to be a member, again and again until it is told who all of them are. The founder knows the callers by their proven
//! keys. When the number is complete, the list is fixed, and each member makes its directory with it.

use std::sync::{Arc, Weak};
use std::time::Duration;

use atoll_env::BoxFuture;
use atoll_net::{CallError, Peer, Refusal, Reply, Request, Service};
use atoll_pool::{PoolId, PoolMembers, addressed};
use bytes::Bytes;
use minicbor::{Decode, Encode};

use super::records::{self, GroupRecord, PeerRecord, PoolRecord};
use super::{NOT_A_MEMBER, Pools};

/// Asks the founder of a pool to be a member: the header is the token of the code.
pub(super) const JOIN: u16 = 0x0510;

const JOIN_LIMIT: Duration = Duration::from_secs(5);

/// The founder's answer: how many have come together, and all members when they have.
#[derive(Encode, Decode)]
struct Joined {
    #[n(0)]
    count: u64,
    #[n(1)]
    members: Vec<WireMember>,
}

#[derive(Encode, Decode)]
struct WireMember {
    #[cbor(n(0), with = "minicbor::bytes")]
    key: [u8; 32],
    #[n(1)]
    addr: String,
}

fn to_wire(members: &PoolMembers) -> Vec<WireMember> {
    let member = |peer: &Peer| WireMember { key: peer.id.0, addr: peer.addr.to_string() };
    members.peers().iter().map(member).collect()
}

fn from_wire(members: Vec<WireMember>) -> Option<PoolMembers> {
    let peer = |WireMember { key, addr }| {
        Some(Peer { id: atoll_key::PeerId(key), addr: addr.parse().ok()? })
    };
    PoolMembers::new(members.into_iter().map(peer).collect::<Option<Vec<Peer>>>()?)
}

fn reply(count: usize, members: Vec<WireMember>) -> Reply {
    let joined = Joined { count: count as u64, members };
    let header = minicbor::to_vec(joined).expect("a vector takes everything");
    Reply { header: Bytes::from(header), parts: Vec::new() }
}

/// That the caller has the code, without telling how much of it.
fn check_token(token: Option<[u8; 16]>, request: &Request) -> Result<(), Refusal> {
    let is_right = token.is_some_and(|token| {
        let said = &request.header;
        said.len() == token.len()
            && said.iter().zip(token).fold(0, |differs, (said, own)| differs | (said ^ own)) == 0
    });
    match is_right {
        true => Ok(()),
        false => Err(Refusal::new(NOT_A_MEMBER, "the code is not that of this pool")),
    }
}

/// The answer of a founder whose pool is made.
pub(super) fn answer_made(
    token: Option<[u8; 16]>,
    members: &PoolMembers,
    from: Peer,
    request: &Request,
) -> Result<Reply, Refusal> {
    check_token(token, request)?;
    match members.contains(from.id) {
        true => Ok(reply(members.peers().len(), to_wire(members))),
        false => Err(Refusal::new(NOT_A_MEMBER, "the pool has all its members already")),
    }
}

/// What a founder answers while members are missing.
struct FounderService {
    pools: Weak<Pools>,
    name: String,
}

impl Service for FounderService {
    fn handle(&self, from: Peer, request: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        let (pools, name) = (self.pools.upgrade(), self.name.clone());
        Box::pin(async move {
            let pools =
                pools.ok_or_else(|| Refusal::new(Refusal::OVERLOADED, "the node is stopping"))?;
            if request.method != JOIN {
                return Err(Refusal::new(Refusal::OVERLOADED, "members of the pool are missing"));
            }
            pools.note_joining(&name, from, &request).await
        })
    }
}

impl Pools {
    /// Brings the members of a pool together, as far as that can be done now, and makes this one's directory when it is done. What
    /// it waits for, as an error for people.
    pub(super) async fn come_together(
        self: &Arc<Self>,
        name: &str,
        pool: PoolId,
        record: PoolRecord,
    ) -> Result<(), String> {
        let group = record.group.clone().ok_or("it has one member")?;
        let founder = group.founder.peer().ok_or("its record is damaged")?;
        if founder.id == self.local().id {
            let Some(members) = all_members(&group, self.local()) else {
                let service = FounderService { pools: Arc::downgrade(self), name: name.to_owned() };
                self.router.add(pool, Arc::new(service));
                let have = group.joined.len() + 1;
                return Err(format!("{have} of {} members have joined", group.members));
            };
            return self.make(name, record, &members).await;
        }
        let token = group.token().ok_or("its record is damaged")?;
        let request = Request { method: JOIN, header: addressed(&pool, &token), parts: Vec::new() };
        let reply = match self.node.transport.call(founder, request, JOIN_LIMIT).await {
            Ok(reply) => reply,
            Err(CallError::Refused(refusal)) => return Err(refusal.text),
            Err(error) => return Err(format!("the node that made the pool: {error}")),
        };
        let joined: Joined =
            minicbor::decode(&reply.header).map_err(|_| "its founder's answer cannot be read")?;
        if joined.members.is_empty() {
            return Err(format!("{} of {} members have joined", joined.count, group.members));
        }
        let members = from_wire(joined.members).ok_or("its founder's list is none")?;
        if members.founder().id != founder.id || !members.contains(self.local().id) {
            return Err("its founder's list lacks this node".into());
        }
        self.make(name, record, &members).await
    }

    async fn note_joining(
        &self,
        name: &str,
        from: Peer,
        request: &Request,
    ) -> Result<Reply, Refusal> {
        let failed = |error: std::io::Error| Refusal::new(Refusal::INTERNAL, error.to_string());
        let _one = self.records.lock().await;
        let record = records::find(&self.node.dir, name).map_err(failed)?;
        let (mut record, mut group) = match record {
            Some(PoolRecord { group: Some(group), dir, pool }) => {
                (PoolRecord { group: None, dir, pool }, group)
            }
            _ => return Err(Refusal::new(NOT_A_MEMBER, "there is no such pool")),
        };
        check_token(group.token(), request)?;
        let key = PeerRecord::of(from).key;
        let is_known =
            group.joined.iter().any(|peer| peer.key == key) || from.id == self.local().id;
        if !is_known {
            if group.joined.len() + 1 >= group.members {
                let why = "the pool has all its members already";
                return Err(Refusal::new(NOT_A_MEMBER, why));
            }
            group.joined.push(PeerRecord::of(from));
            record.group = Some(group.clone());
            records::replace(&self.node.dir, name, &record).map_err(failed)?;
            tracing::info!("{from} has joined pool {name}");
            self.has_news.notify();
        }
        let members = all_members(&group, self.local()).map_or_else(Vec::new, |all| to_wire(&all));
        Ok(reply(group.joined.len() + 1, members))
    }
}

/// All members, if they have come together.
fn all_members(group: &GroupRecord, local: Peer) -> Option<PoolMembers> {
    if group.joined.len() + 1 != group.members {
        return None;
    }
    let joined: Option<Vec<Peer>> = group.joined.iter().map(PeerRecord::peer).collect();
    PoolMembers::new(std::iter::once(local).chain(joined?).collect())
}
