//! Pools of several members (`atoll_pool::GroupMember`): what a node does for those of which it is a member.
//!
//! ```text
//! records      which pools this node has, on its disk
//! invitation   the code by which a node joins one
//! joining      how the members come together
//! relay        calls of mounts and servers of files on this machine, through the node, to the pool's primary
//! ```
//!
//! The node looks at the records when it starts, when a command says that one has changed, and now and then. A pool whose members
//! have come together is opened and served until the node stops; again if its disk failed. Pools of one are no concern of the node.

mod invitation;
mod joining;
pub mod records;
mod relay;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use atoll_env::{BoxFuture, Notify, Task, sleep};
use atoll_net::{Peer, Refusal, Reply, Request, Service};
use atoll_node::{
    Calls, MAX_OUTSIDE_BYTES, MakeSubsystem, NodeParts, StartError, Status, StatusPart, StatusRow,
    Subsystem,
};
use atoll_pool::disk::directory::Directory;
use atoll_pool::remote::{METHODS, RemoteServer};
use atoll_pool::{
    CreateError, FAMILY, GroupMember, MemberStatus, PoolId, PoolMembers, PoolRouter, PoolSettings,
    create_member, read_settings,
};
use bytes::Bytes;
use futures_util::future::select;
use serde::{Deserialize, Serialize};

use self::joining::JOIN;
use self::records::{GroupRecord, PoolRecord};

pub use invitation::PoolInvitation;
pub use relay::NodeRoute;

/// The control calls.
mod call {
    /// How this node's pools stand: JSON, a list of [`super::PoolOfNode`].
    pub(super) const STATUS: u16 = 0x0388;
    /// A record has changed.
    pub(super) const LOOK: u16 = 0x0389;
    /// A call of a pool's file system (`relay.rs`).
    pub(super) const RELAY: u16 = 0x038a;
    /// Who this node is for others: its key, 32 bytes, and its address as text.
    pub(super) const OWN: u16 = 0x038b;
}

/// While something is missing.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Otherwise: a disk may have failed, and work again.
const CHECK_EVERY: Duration = Duration::from_secs(10);

/// How one of this node's pools stands.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct PoolOfNode {
    /// Its name on this node.
    pub name: String,
    /// Whether this node is its primary.
    pub is_primary: bool,
    /// How many members it has, or will have.
    pub members: usize,
    /// How many have come together.
    pub joined: usize,
    /// Why this node does not serve it, for people.
    pub problem: Option<String>,
    /// How its members stand, as far as this node knows: on the primary all, itself first; elsewhere this one.
    pub states: Vec<PoolMemberState>,
}

/// How a member stands.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct PoolMemberState {
    /// The node, in short, and where it listens.
    pub node: String,
    /// Why it does not take part.
    pub problem: Option<String>,
    /// The last change that it has made.
    pub applied: u64,
    /// Room on its disk, bytes; none if that is not known.
    pub free_bytes: Option<u64>,
    /// Files of which it gets ranges again.
    pub files_to_mend: usize,
}

impl From<MemberStatus> for PoolMemberState {
    fn from(status: MemberStatus) -> PoolMemberState {
        let MemberStatus { peer, problem, applied, free_bytes, files_to_mend } = status;
        PoolMemberState { node: peer.to_string(), problem, applied, free_bytes, files_to_mend }
    }
}

/// How far a pool has come.
enum Stage {
    /// Members are missing, or its directory cannot be opened; why, for people.
    Waiting(String),
    Serving(Arc<ServedMember>),
}

/// A member at work.
struct ServedMember {
    member: GroupMember<Directory>,
    /// The file system, on the primary.
    server: Option<RemoteServer>,
    members: PoolMembers,
}

struct PoolOfSubsystem {
    pool: PoolId,
    group: GroupRecord,
    stage: Stage,
}

/// See the module.
struct Pools {
    node: NodeParts,
    router: Arc<PoolRouter>,
    pools: Mutex<BTreeMap<String, PoolOfSubsystem>>,
    /// Held while a record is read and written again.
    records: tokio::sync::Mutex<()>,
    has_news: Notify,
    looking: Mutex<Option<Task>>,
}

/// What a node runs for its pools.
pub(crate) fn subsystem() -> MakeSubsystem {
    Arc::new(|node| {
        Arc::new(Pools {
            node,
            router: Arc::default(),
            pools: Mutex::default(),
            records: tokio::sync::Mutex::default(),
            has_news: Notify::default(),
            looking: Mutex::default(),
        })
    })
}

/// How the pools of a node stand.
///
/// # Errors
/// If the node does not answer.
pub async fn status(
    client: &atoll_node::Client,
) -> Result<Vec<PoolOfNode>, atoll_node::ClientError> {
    let reply = client.outside_call(call::STATUS, Bytes::new()).await?;
    serde_json::from_slice(&reply)
        .map_err(|error| atoll_node::ClientError::Subsystem(format!("its answer: {error}")))
}

/// Who a node is for the members of a pool.
///
/// # Errors
/// If the node does not answer.
pub async fn own_peer(client: &atoll_node::Client) -> Result<Peer, atoll_node::ClientError> {
    let unreadable = || atoll_node::ClientError::Subsystem("its answer cannot be read".into());
    let reply = client.outside_call(call::OWN, Bytes::new()).await?;
    let (key, addr) = reply.split_first_chunk().ok_or_else(unreadable)?;
    let addr = std::str::from_utf8(addr).ok().and_then(|addr| addr.parse().ok());
    Ok(Peer { id: atoll_key::PeerId(*key), addr: addr.ok_or_else(unreadable)? })
}

/// Has a node look at the records of its pools.
///
/// # Errors
/// If the node does not answer.
pub async fn look(client: &atoll_node::Client) -> Result<(), atoll_node::ClientError> {
    client.outside_call(call::LOOK, Bytes::new()).await.map(|_| ())
}

impl Pools {
    fn pools(&self) -> MutexGuard<'_, BTreeMap<String, PoolOfSubsystem>> {
        self.pools.lock().expect("no holder of this lock panics")
    }

    fn local(&self) -> Peer {
        self.node.transport.local()
    }

    fn set_stage(&self, name: &str, (pool, group): (PoolId, &GroupRecord), stage: Stage) {
        let state = PoolOfSubsystem { pool, group: group.clone(), stage };
        self.pools().insert(name.to_owned(), state);
    }

    /// Looks at all records, and goes on with each pool as far as it can; whether something is missing.
    async fn look(self: &Arc<Self>) -> bool {
        let dir = &self.node.dir;
        let is_leaving = |name: &String| match records::find(dir, name) {
            Ok(Some(PoolRecord { group: Some(group), .. })) => group.is_leaving,
            _ => false,
        };
        let names: Vec<String> = match records::all(dir) {
            Ok(names) => names.into_iter().filter(|name| !is_leaving(name)).collect(),
            Err(error) => {
                tracing::warn!("the records of pools cannot be read: {error}");
                return true;
            }
        };
        self.end_forgotten(&names).await;
        let mut is_missing = false;
        for name in names {
            let is_at_work = match self.pools().get(&name).map(|state| &state.stage) {
                Some(Stage::Serving(served)) => Some(!served.member.has_failed()),
                Some(Stage::Waiting(_)) | None => None,
            };
            match is_at_work {
                Some(true) => continue,
                // Opened again, it makes what was left half-made.
                Some(false) => self.end_one(&name).await,
                None => {}
            }
            let record = match records::find(dir, &name) {
                Ok(Some(record)) => record,
                Ok(None) => continue,
                Err(error) => {
                    tracing::warn!("pool {name}: {error}");
                    continue;
                }
            };
            let (Some(group), Some(pool)) = (record.group.clone(), record.pool_id()) else {
                continue;
            };
            if let Some(other) = self.served_as(&name, &pool) {
                let problem = format!("this node has that pool as {other}");
                self.set_stage(&name, (pool, &group), Stage::Waiting(problem));
                continue;
            }
            let went_on = match group.is_made {
                true => Ok(()),
                false => self.come_together(&name, pool, record.clone()).await,
            };
            let stage = match went_on {
                Ok(()) => match self.serve(&name, pool).await {
                    Ok(served) => Stage::Serving(served),
                    Err(problem) => Stage::Waiting(problem),
                },
                Err(waits_for) => Stage::Waiting(waits_for),
            };
            is_missing |= matches!(stage, Stage::Waiting(_));
            let group = match records::find(dir, &name) {
                Ok(Some(PoolRecord { group: Some(group), .. })) => group,
                _ => group,
            };
            self.set_stage(&name, (pool, &group), stage);
        }
        is_missing
    }

    async fn end_forgotten(&self, names: &[String]) {
        let forgotten: Vec<_> = {
            let mut pools = self.pools();
            let gone: Vec<String> =
                pools.keys().filter(|name| !names.contains(name)).cloned().collect();
            gone.iter().filter_map(|name| pools.remove(name)).collect()
        };
        for state in forgotten {
            self.end_pool(state).await;
        }
    }

    async fn end_one(&self, name: &str) {
        let ended = self.pools().remove(name);
        if let Some(state) = ended {
            tracing::warn!("the disk of pool {name} failed; it is opened again");
            self.end_pool(state).await;
        }
    }

    /// Under which other name this node has a pool.
    fn served_as(&self, name: &str, pool: &PoolId) -> Option<String> {
        let pools = self.pools();
        let is_other =
            |(other, state): &(&String, &PoolOfSubsystem)| *other != name && state.pool == *pool;
        pools.iter().find(is_other).map(|(other, _)| other.clone())
    }

    async fn end_pool(&self, state: PoolOfSubsystem) {
        // Another record of the same pool has its calls.
        if self.served_as("", &state.pool).is_none() {
            self.router.remove(&state.pool);
        }
        if let Stage::Serving(served) = state.stage
            && let Err(errno) = served.member.end().await
        {
            tracing::warn!("a pool was not ended in order: {errno}");
        }
    }

    /// Makes this member's directory, when all members are known.
    async fn make(
        &self,
        name: &str,
        mut record: PoolRecord,
        members: &PoolMembers,
    ) -> Result<(), String> {
        let pool = record.pool_id().ok_or("its record is damaged")?;
        let group = record.group.as_mut().ok_or("it has one member")?;
        let disk = Directory::open(&record.dir)
            .map_err(|error| format!("{}: {error}", record.dir.display()))?;
        let settings = PoolSettings { pool, level: group.level };
        match create_member(&disk, settings, Some(members)).await {
            Ok(()) => {}
            // It was made before a crash.
            Err(CreateError::NotEmpty(_)) if read_settings(&disk).await == Ok(settings) => {}
            Err(error) => return Err(format!("{}: {error}", record.dir.display())),
        }
        group.is_made = true;
        let _one = self.records.lock().await;
        // A command may have had it forgotten meanwhile.
        match records::find(&self.node.dir, name) {
            Ok(Some(now)) if now.pool == record.pool => {}
            Ok(_) => return Err("it was forgotten".into()),
            Err(error) => return Err(error.to_string()),
        }
        records::replace(&self.node.dir, name, &record).map_err(|error| error.to_string())
    }

    /// Opens the directory of a pool whose members are known.
    async fn serve(
        self: &Arc<Self>,
        name: &str,
        pool: PoolId,
    ) -> Result<Arc<ServedMember>, String> {
        let record = records::find(&self.node.dir, name).map_err(|error| error.to_string())?;
        let record = record.ok_or("it was forgotten")?;
        let token = record.group.as_ref().and_then(GroupRecord::token);
        let disk = Directory::open(&record.dir)
            .map_err(|error| format!("{}: {error}", record.dir.display()))?;
        let settings = read_settings(&disk).await.map_err(|error| error.to_string())?;
        if settings.pool != pool {
            return Err(format!("{} holds another pool", record.dir.display()));
        }
        let node = &self.node;
        let started = GroupMember::start(node.env.clone(), node.transport.clone(), disk).await;
        let (member, report) = started.map_err(|error| error.to_string())?;
        tracing::info!(?report, "pool {name} is open");
        let server = member
            .file_system()
            .map(|fs| RemoteServer::remembering(node.env.clone(), Arc::new(fs)));
        let members = member.members().clone();
        let served = Arc::new(ServedMember { member, server, members });
        let service = MemberService { served: Arc::downgrade(&served), token };
        self.router.add(pool, Arc::new(service));
        Ok(served)
    }

    fn status(&self) -> Vec<PoolOfNode> {
        let local = self.local().id;
        let state = |(name, state): (&String, &PoolOfSubsystem)| {
            let PoolOfSubsystem { group, stage, .. } = state;
            let (problem, states) = match stage {
                Stage::Waiting(why) => (Some(why.clone()), Vec::new()),
                Stage::Serving(served) => {
                    (None, served.member.status().members.into_iter().map(Into::into).collect())
                }
            };
            let joined = match group.is_made {
                true => group.members,
                false => group.joined.len() + 1,
            };
            PoolOfNode {
                name: name.clone(),
                is_primary: group.primary.peer().is_some_and(|peer| peer.id == local),
                members: group.members,
                joined,
                problem,
                states,
            }
        };
        self.pools().iter().map(state).collect()
    }

    fn served(&self, pool: &PoolId) -> Option<Arc<ServedMember>> {
        self.pools().values().find_map(|state| match &state.stage {
            Stage::Serving(served) if state.pool == *pool => Some(served.clone()),
            _ => None,
        })
    }
}

/// What peers may ask of a member.
struct MemberService {
    served: std::sync::Weak<ServedMember>,
    token: Option<[u8; 16]>,
}

impl Service for MemberService {
    fn handle(&self, from: Peer, request: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        let refuse = |code, why: &'static str| -> BoxFuture<'static, Result<Reply, Refusal>> {
            Box::pin(async move { Err(Refusal::new(code, why)) })
        };
        let Some(served) = self.served.upgrade() else {
            return refuse(Refusal::OVERLOADED, "it is being ended");
        };
        match request.method {
            JOIN => {
                let answer = joining::answer_made(self.token, &served.members, from, &request);
                Box::pin(async move { answer })
            }
            method if METHODS.contains(&method) => match &served.server {
                Some(server) if served.members.contains(from.id) => server.handle(from, request),
                Some(_) => refuse(NOT_A_MEMBER, "the caller is no member of the pool"),
                None => refuse(Refusal::OVERLOADED, "it is not the pool's primary"),
            },
            _ => match served.member.service() {
                Some(service) => service.handle(from, request),
                None => refuse(Refusal::UNKNOWN_METHOD, "no such call"),
            },
        }
    }
}

/// A refusal: the caller may not.
const NOT_A_MEMBER: u16 = 110;

impl Subsystem for Pools {
    fn service(self: Arc<Self>) -> Option<(u8, Arc<dyn Service>)> {
        Some((FAMILY, self.router.clone()))
    }

    fn control_calls(self: Arc<Self>, calls: &mut Calls) {
        let mut calls = calls.range(call::STATUS..=0x038f);
        let pools = self.clone();
        calls.on(call::STATUS, 0, move |_| {
            let status = serde_json::to_vec(&pools.status());
            Box::pin(async move { status.map(Bytes::from).map_err(|error| error.to_string()) })
        });
        let pools = self.clone();
        calls.on(call::OWN, 0, move |_| {
            let Peer { id, addr } = pools.local();
            let own = [&id.0[..], addr.to_string().as_bytes()].concat();
            Box::pin(async move { Ok(Bytes::from(own)) })
        });
        let pools = self.clone();
        calls.on(call::LOOK, 0, move |_| {
            pools.has_news.notify();
            Box::pin(async { Ok(Bytes::new()) })
        });
        calls.on(call::RELAY, MAX_OUTSIDE_BYTES, move |request| {
            let pools = self.clone();
            Box::pin(async move { relay::answer(&pools, request).await })
        });
    }

    fn start(self: Arc<Self>) -> BoxFuture<'static, Result<(), StartError>> {
        let pools = Arc::downgrade(&self);
        let env = self.node.env.clone();
        let task = env.clone().spawn(Box::pin(async move {
            loop {
                let Some(own) = pools.upgrade() else { return };
                let is_missing = own.look().await;
                let again = sleep(&*env, if is_missing { LOOK_EVERY } else { CHECK_EVERY });
                select(std::pin::pin!(own.has_news.notified()), again).await;
            }
        }));
        *self.looking.lock().expect("no holder of this lock panics") = Some(task);
        Box::pin(async { Ok(()) })
    }

    fn report(&self, status: &mut Status) {
        let pools = self.status();
        if pools.is_empty() {
            return;
        }
        let mut rows = Vec::new();
        for pool in &pools {
            let down = pool.states.iter().filter(|state| state.problem.is_some()).count();
            let text = match &pool.problem {
                Some(problem) => problem.clone(),
                None if down > 0 => {
                    let why = format!("pool {}: {down} of its members take no part", pool.name);
                    status.warnings.push(why);
                    format!("{} of {} members take part", pool.members - down, pool.members)
                }
                None if pool.is_primary => format!("{} members", pool.members),
                None => "a backup of its primary".to_owned(),
            };
            rows.push(StatusRow { name: format!("pool {}", pool.name), text });
        }
        let json = serde_json::to_value(&pools).unwrap_or_default();
        status.parts.insert("pools".into(), StatusPart { rows, json });
    }

    fn stop(self: Arc<Self>) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            if let Some(task) = self.looking.lock().expect("no holder of this lock panics").take() {
                task.abort();
            }
            let pools = std::mem::take(&mut *self.pools());
            for (_, state) in pools {
                self.end_pool(state).await;
            }
        })
    }
}
