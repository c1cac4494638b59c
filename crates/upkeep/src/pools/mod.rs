//! Pools of several members (`atoll_pool::GroupMember`): what a node does for those of which it is a member.
//!
//! ```text
//! records      which pools this node has, on its disk
//! invitation   the code by which a node joins one
//! joining      how a node becomes a member
//! relay        calls of mounts and servers of files on this machine, through the node, to the pool's primary
//! standing     how a pool stands, for commands and people
//! ```
//!
//! The node looks at the records when it starts, when a command says that one has changed, and now and then. A pool that it has joined
//! is opened and served until the node stops. It is opened again, soon, if its disk failed, or another member took this
//! one's place as the primary. Pools of one are no concern of the node.

mod invitation;
mod joining;
pub mod records;
mod relay;
mod standing;

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use atoll_env::{BoxFuture, Notify, Task, sleep};
pub use atoll_net::Peer;
use atoll_net::{Refusal, Reply, Request, Service};
use atoll_node::{
    Calls, MAX_OUTSIDE_BYTES, MakeSubsystem, NodeParts, StartError, Status, StatusPart, StatusRow,
    Subsystem,
};
use atoll_pool::disk::directory::Directory;
use atoll_pool::{
    CreateError, FAMILY, GroupMember, OpenError, PoolEditError, PoolId, PoolMap, PoolRouter,
    PoolSettings, create_member, read_settings,
};
use bytes::Bytes;
use futures_util::future::{Either, select};

use self::joining::{AskedPools, JOIN};
use self::records::{GroupRecord, PoolRecord};

pub use invitation::PoolInvitation;
pub use relay::NodeRoute;
pub use standing::{PoolMemberState, PoolOfNode};

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
    /// Has a member be none any more: the pool, 16 bytes, and the member's key, 32 bytes.
    pub(super) const REMOVE: u16 = 0x038c;
}

/// While something is missing.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Otherwise: a disk may have failed, and work again.
const CHECK_EVERY: Duration = Duration::from_secs(10);
/// How soon a member that takes no part any more is found.
const FAILURE_CHECK_EVERY: Duration = Duration::from_millis(100);
/// How long a command waits until a member is removed: the primary may have to leave its part to another one.
const REMOVE_LIMIT: Duration = Duration::from_secs(20);
/// How long calls that are under way may have the disk of a member that is opened again.
const RELEASE_LIMIT: Duration = Duration::from_secs(2);

/// How far a pool has come.
enum Stage {
    /// It is not a member yet, or its directory cannot be opened; why, for people.
    Waiting(String),
    Serving(Arc<GroupMember<Directory>>),
}

struct PoolOfSubsystem {
    pool: PoolId,
    stage: Stage,
}

/// See the module.
struct Pools {
    node: NodeParts,
    router: Arc<PoolRouter>,
    pools: Mutex<BTreeMap<String, PoolOfSubsystem>>,
    /// What became of asking to join pools; none while that is going on.
    asked: Mutex<AskedPools>,
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
            asked: Mutex::default(),
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

/// Has a member of a pool be none any more, through a node that serves it.
///
/// # Errors
/// If the node does not answer; why not, for people.
pub async fn remove(
    client: &atoll_node::Client,
    pool: &PoolId,
    member: atoll_key::PeerId,
) -> Result<(), atoll_node::ClientError> {
    let request = Bytes::from([&pool[..], &member.0].concat());
    client.outside_call(call::REMOVE, request).await.map(|_| ())
}

impl Pools {
    fn pools(&self) -> MutexGuard<'_, BTreeMap<String, PoolOfSubsystem>> {
        self.pools.lock().expect("no holder of this lock panics")
    }

    fn local(&self) -> Peer {
        self.node.transport.local()
    }

    fn set_stage(&self, name: &str, pool: PoolId, stage: Stage) {
        let state = PoolOfSubsystem { pool, stage };
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
                Some(Stage::Serving(member)) => Some(!member.has_failed()),
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
                self.set_stage(&name, pool, Stage::Waiting(problem));
                continue;
            }
            let went_on = match &group.joins {
                None => Ok(()),
                Some(joins) => match self.asked_to_join(&name, pool, joins) {
                    Some(Ok(map)) => self.make(&name, record.clone(), &map).await,
                    Some(Err(why)) => Err(why),
                    // What it waits for was said before, or will be soon.
                    None if self.pools().contains_key(&name) => continue,
                    None => Err("it asks to join".into()),
                },
            };
            let stage = match went_on {
                Ok(()) => match self.serve(&name, pool).await {
                    Ok(member) => Stage::Serving(member),
                    Err(problem) => Stage::Waiting(problem),
                },
                Err(waits_for) => Stage::Waiting(waits_for),
            };
            is_missing |= matches!(stage, Stage::Waiting(_));
            self.set_stage(&name, pool, stage);
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
            if let Stage::Serving(member) = &state.stage {
                let own = member.status().members.into_iter().next();
                let why = own.and_then(|own| own.problem).unwrap_or_default();
                tracing::warn!("pool {name} is opened again: {why}");
            }
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
        if let Stage::Serving(member) = state.stage
            && let Err(errno) = member.end().await
        {
            tracing::warn!("a pool was not ended in order: {errno}");
        }
    }

    /// Makes the directory of this node, which is a member by this map.
    async fn make(&self, name: &str, mut record: PoolRecord, map: &PoolMap) -> Result<(), String> {
        let pool = record.pool_id().ok_or("its record is damaged")?;
        let group = record.group.take().ok_or("it has one member")?;
        let disk = Directory::open(&record.dir)
            .map_err(|error| format!("{}: {error}", record.dir.display()))?;
        let settings = PoolSettings::new(pool, group.level);
        match create_member(&disk, settings, Some(map)).await {
            Ok(()) => {}
            // It was made before a crash.
            Err(CreateError::NotEmpty(_)) if read_settings(&disk).await == Ok(settings) => {}
            Err(error) => return Err(format!("{}: {error}", record.dir.display())),
        }
        record.group = Some(group.made());
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
    ) -> Result<Arc<GroupMember<Directory>>, String> {
        let record = records::find(&self.node.dir, name).map_err(|error| error.to_string())?;
        let record = record.ok_or("it was forgotten")?;
        let token = record.group.as_ref().and_then(GroupRecord::token);
        let disk = || {
            Directory::open(&record.dir)
                .map_err(|error| format!("{}: {error}", record.dir.display()))
        };
        let settings = read_settings(&disk()?).await.map_err(|error| error.to_string())?;
        if settings.pool != pool {
            return Err(format!("{} holds another pool", record.dir.display()));
        }
        let (env, transport) = (&self.node.env, &self.node.transport);
        let until = env.now() + RELEASE_LIMIT;
        let member = loop {
            match GroupMember::start(env.clone(), transport.clone(), disk()?, None).await {
                Err(OpenError::InUse) if env.now() < until => {
                    sleep(&**env, FAILURE_CHECK_EVERY).await;
                }
                started => break started.map_err(|error| error.to_string())?,
            }
        };
        tracing::info!("pool {name} is open");
        let member = Arc::new(member);
        let service =
            MemberService { token, group: member.service(), member: Arc::downgrade(&member) };
        self.router.add(pool, Arc::new(service));
        Ok(member)
    }

    fn status(&self) -> Vec<PoolOfNode> {
        let stands = |(name, state): (&String, &PoolOfSubsystem)| {
            let served = match &state.stage {
                Stage::Waiting(why) => Err(why.clone()),
                Stage::Serving(member) => Ok(member.status()),
            };
            PoolOfNode::new(name, served)
        };
        self.pools().iter().map(stands).collect()
    }

    /// Has a member of a pool be none any more, as a command asks; why not, for people.
    async fn remove(&self, request: &[u8]) -> Result<(), String> {
        let (pool, key) = request.split_first_chunk().ok_or("a pool has 16 bytes")?;
        let key = key.try_into().map_err(|_| "a key has 32 bytes")?;
        let env = &self.node.env;
        let until = env.now() + REMOVE_LIMIT;
        loop {
            // A primary that is to go takes no part any more, and is opened again.
            let asked = match self.served(pool) {
                Some(member) => member.remove(atoll_key::PeerId(key), REMOVE_LIMIT).await,
                None => Err(PoolEditError::NoAnswer),
            };
            match asked {
                Ok(_) => return Ok(()),
                Err(PoolEditError::NoAnswer) if env.now() < until => {
                    sleep(&**env, FAILURE_CHECK_EVERY).await;
                }
                Err(error) => return Err(error.to_string()),
            }
        }
    }

    fn served(&self, pool: &PoolId) -> Option<Arc<GroupMember<Directory>>> {
        self.pools().values().find_map(|state| match &state.stage {
            Stage::Serving(member) if state.pool == *pool => Some(member.clone()),
            _ => None,
        })
    }

    /// Waits until the records are to be looked at, or a pool is to be opened again.
    async fn until_work(&self, is_missing: bool) {
        let env = &*self.node.env;
        let due = env.now() + if is_missing { LOOK_EVERY } else { CHECK_EVERY };
        let has_failed = |state: &PoolOfSubsystem| match &state.stage {
            Stage::Serving(member) => member.has_failed(),
            Stage::Waiting(_) => false,
        };
        loop {
            let (is_idle, has_failed) = {
                let pools = self.pools();
                (pools.is_empty(), pools.values().any(has_failed))
            };
            let left = due.since(env.now());
            if has_failed || left.is_zero() {
                return;
            }
            let pause = if is_idle { left } else { left.min(FAILURE_CHECK_EVERY) };
            let pause = sleep(env, pause);
            if let Either::Left(_) = select(pin!(self.has_news.notified()), pause).await {
                return;
            }
        }
    }
}

/// What peers may ask of a member.
struct MemberService {
    token: Option<[u8; 16]>,
    member: Weak<GroupMember<Directory>>,
    group: Arc<dyn Service>,
}

impl Service for MemberService {
    fn handle(&self, from: Peer, request: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        match request.method {
            JOIN => {
                let (token, member) = (self.token, self.member.upgrade());
                Box::pin(async move {
                    let ended = || Refusal::new(Refusal::OVERLOADED, "it is being ended");
                    joining::answer(token, &*member.ok_or_else(ended)?, from, &request).await
                })
            }
            _ => self.group.handle(from, request),
        }
    }
}

/// A refusal: the caller may not join.
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
        let pools = self.clone();
        calls.on(call::REMOVE, 48, move |request| {
            let pools = pools.clone();
            Box::pin(async move { pools.remove(&request).await.map(|()| Bytes::new()) })
        });
        calls.on(call::RELAY, MAX_OUTSIDE_BYTES, move |request| {
            let pools = self.clone();
            Box::pin(async move { relay::answer(&pools, request).await })
        });
    }

    fn start(self: Arc<Self>) -> BoxFuture<'static, Result<(), StartError>> {
        let pools = Arc::downgrade(&self);
        let task = self.node.env.spawn(Box::pin(async move {
            loop {
                let Some(own) = pools.upgrade() else { return };
                let is_missing = own.look().await;
                own.until_work(is_missing).await;
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
        let row = |pool: &PoolOfNode| StatusRow {
            name: format!("pool {}", pool.name),
            text: pool.summary(),
        };
        let rows = pools.iter().map(row).collect();
        for pool in &pools {
            let warnings = pool.warnings().into_iter();
            status.warnings.extend(warnings.map(|why| format!("pool {}: {why}", pool.name)));
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
