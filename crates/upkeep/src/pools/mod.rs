//! Pools of several machines (`atoll_pool::PoolMachine`): what a node does for those to which it belongs.
//!
//! ```text
//! records      which pools this node has, on its disk
//! directories  where a machine's members lie in a pool's directory
//! invitation   the code by which a node joins one
//! joining      how a node comes to belong to one
//! relay        calls of mounts and servers of files on this machine, through the node, to the primaries of a pool's groups
//! votes        what a machine without files keeps of a pool
//! standing     how a pool stands, for commands and people
//! ```
//!
//! The node looks at the records when it starts, when a command says that one has changed, and now and then. A pool to which it belongs
//! is served until the node stops. Pools of one are no concern of the node.

mod directories;
mod invitation;
mod joining;
pub mod records;
mod relay;
mod standing;
mod votes;

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use atoll_env::{BoxFuture, Notify, Task, sleep};
pub use atoll_net::{CallError, Peer};
use atoll_net::{Refusal, Reply, Request, Service};
use atoll_node::{
    Calls, MAX_OUTSIDE_BYTES, MakeSubsystem, NodeParts, StartError, Status, StatusPart, StatusRow,
    Subsystem,
};
use atoll_pool::disk::directory::Directory;
use atoll_pool::{
    FAMILY, MachineDisks, PoolEditError, PoolId, PoolMachine, PoolMap, PoolRouter, PoolSettings,
};
use bytes::Bytes;
use futures_util::future::select;

use self::directories::PoolDirectories;
use self::joining::{AskedPools, JOIN, JOIN_WITHOUT_FILES};
use self::records::PoolRecord;
use self::votes::PoolVotes;

pub use directories::directories;
pub use invitation::PoolInvitation;
pub use relay::NodeRoute;
pub use standing::{
    PoolDrain, PoolGroupState, PoolMachineState, PoolMemberState, PoolOfNode, PoolWitnessState,
};
pub use votes::votes_path;

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
    /// Has a machine belong to a pool no more: the pool, 16 bytes, and the machine's key, 32 bytes.
    pub(super) const REMOVE: u16 = 0x038c;
    /// Has a machine go when others have what it has, or stay: the same, and a byte, 1 or 0.
    pub(super) const LET_GO: u16 = 0x038d;
    /// A rule for a pool's files: the pool, 16 bytes, which rule ([`super::PoolRule`]), and a number, a byte each.
    pub(super) const RULE: u16 = 0x038e;
}

/// While something is missing.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Otherwise: a disk may have failed, and work again.
const CHECK_EVERY: Duration = Duration::from_secs(10);
/// How long a command waits until a machine is removed: a primary may have to leave its part to another one.
const REMOVE_LIMIT: Duration = Duration::from_secs(20);

/// How far a pool has come.
enum Stage {
    /// This node does not belong to it yet, or its directory cannot be read; why, for people.
    Waiting(String),
    Serving(Arc<PoolMachine<Directory>>),
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

/// Has a machine belong to a pool no more, through a node that serves it.
///
/// # Errors
/// If the node does not answer; why not, for people.
pub async fn remove(
    client: &atoll_node::Client,
    pool: &PoolId,
    machine: atoll_key::PeerId,
) -> Result<(), atoll_node::ClientError> {
    let request = Bytes::from([&pool[..], &machine.0].concat());
    client.outside_call(call::REMOVE, request).await.map(|_| ())
}

/// Has a machine of a pool go when others have what it has; or has it stay.
///
/// # Errors
/// If the node does not answer; why not, for people.
pub async fn let_go(
    client: &atoll_node::Client,
    pool: &PoolId,
    machine: atoll_key::PeerId,
    goes: bool,
) -> Result<(), atoll_node::ClientError> {
    let request = Bytes::from([&pool[..], &machine.0, &[u8::from(goes)]].concat());
    client.outside_call(call::LET_GO, request).await.map(|_| ())
}

/// What people may say of the files of a pool, with a number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PoolRule {
    /// On how many machines each file is to be.
    Copies = 0,
    /// How many members of a group must have everything so that it takes changes.
    MinCopies = 1,
    /// Down to which level directories are distributed that are made from then on.
    Level = 2,
}

/// Has a rule for the files of a pool hold from now on.
///
/// # Errors
/// If the node does not answer; why not, for people.
pub async fn set_rule(
    client: &atoll_node::Client,
    pool: &PoolId,
    (rule, number): (PoolRule, u8),
) -> Result<(), atoll_node::ClientError> {
    let request = Bytes::from([&pool[..], &[rule as u8, number]].concat());
    client.outside_call(call::RULE, request).await.map(|_| ())
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
            Ok(Some(PoolRecord { group: Some(group), .. })) => {
                group.is_leaving || group.is_set_down
            }
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
            if let Some(Stage::Serving(_)) = self.pools().get(&name).map(|state| &state.stage) {
                continue;
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
                Some(joins) => match self.join(&name, &record, pool, joins) {
                    Some(Ok(map)) => self.begin(&name, record.clone(), &map).await,
                    Some(Err(why)) => Err(why),
                    // What it waits for was said before, or will be soon.
                    None if self.pools().contains_key(&name) => continue,
                    None => Err("it asks to join".into()),
                },
            };
            let stage = match went_on {
                Ok(()) => match self.serve(&name, pool).await {
                    Ok(machine) => Stage::Serving(machine),
                    Err(problem) => Stage::Waiting(problem),
                },
                Err(waits_for) => Stage::Waiting(waits_for),
            };
            is_missing |= matches!(stage, Stage::Waiting(_));
            self.set_stage(&name, pool, stage);
        }
        is_missing
    }

    /// Asks to belong to a pool, as its record says.
    fn join(
        self: &Arc<Self>,
        name: &str,
        record: &PoolRecord,
        pool: PoolId,
        joins: &records::JoiningRecord,
    ) -> Option<Result<PoolMap, String>> {
        let incarnation = match &record.group {
            Some(group) if group.is_without_files => match self.votes(record).begin() {
                Ok(incarnation) => Some(incarnation),
                Err(why) => return Some(Err(why)),
            },
            _ => None,
        };
        self.asked_to_join(name, pool, joins, incarnation)
    }

    fn votes(&self, record: &PoolRecord) -> PoolVotes {
        PoolVotes::new(self.node.env.clone(), &record.dir)
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
        if let Stage::Serving(machine) = state.stage {
            machine.end().await;
        }
    }

    /// This node belongs to the pool by this map.
    async fn begin(&self, name: &str, mut record: PoolRecord, map: &PoolMap) -> Result<(), String> {
        let pool = record.pool_id().ok_or("its record is damaged")?;
        let group = record.group.take().ok_or("it has one member")?;
        let directories = PoolDirectories::new(&self.node.dir, name, &record.dir);
        match map.enrolled.contains(self.local().id) {
            _ if group.is_without_files => self.votes(&record).keep(map)?,
            true => directories.make_first(PoolSettings::new(pool, group.level), map).await?,
            false => directories.keep_first(map)?,
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

    /// Begins this machine's work in a pool to which it belongs.
    async fn serve(
        self: &Arc<Self>,
        name: &str,
        pool: PoolId,
    ) -> Result<Arc<PoolMachine<Directory>>, String> {
        let record = records::find(&self.node.dir, name).map_err(|error| error.to_string())?;
        let record = record.ok_or("it was forgotten")?;
        let group = record.group.as_ref().ok_or("it has one member")?;
        let settings = PoolSettings::new(pool, group.level);
        let peers = (self.node.env.clone(), self.node.transport.clone());
        let disks: (PoolMap, Arc<dyn MachineDisks<Directory>>) = if group.is_without_files {
            let votes = self.votes(&record);
            votes.begin()?;
            let lost = "what it knew of the pool is gone: `atoll pool forget`, and join again";
            (votes.kept()?.ok_or(lost)?, Arc::new(votes))
        } else {
            let directories = PoolDirectories::new(&self.node.dir, name, &record.dir);
            let lost =
                || format!("{}: no pool is there. Is its disk mounted?", record.dir.display());
            (directories.kept().await?.ok_or_else(lost)?, Arc::new(directories))
        };
        let machine = PoolMachine::start(peers, settings, disks, self.router.clone());
        tracing::info!("pool {name} is served");
        let token = group.token();
        let service = MachineService { token, machine: Arc::downgrade(&machine) };
        self.router.add(pool, Arc::new(service));
        Ok(machine)
    }

    fn status(&self) -> Vec<PoolOfNode> {
        let stands = |(name, state): (&String, &PoolOfSubsystem)| {
            let served = match &state.stage {
                Stage::Waiting(why) => Err(why.clone()),
                Stage::Serving(machine) => Ok(machine.status()),
            };
            PoolOfNode::new((name, self.local().id), served)
        };
        self.pools().iter().map(stands).collect()
    }

    /// Has a machine belong to a pool no more, as a command asks; why not, for people.
    async fn remove(&self, request: &[u8]) -> Result<(), String> {
        let (pool, key) = request.split_first_chunk().ok_or("a pool has 16 bytes")?;
        let key = key.try_into().map_err(|_| "a key has 32 bytes")?;
        let machine = self.asked(pool)?;
        let removed = machine.remove(atoll_key::PeerId(key), REMOVE_LIMIT).await;
        removed.map_err(|error: PoolEditError| error.to_string())
    }

    /// Has a machine go when others have what it has, or stay; why not, for people.
    async fn let_go(&self, request: &[u8]) -> Result<(), String> {
        let (pool, rest) = request.split_first_chunk().ok_or("a pool has 16 bytes")?;
        let (key, goes) = rest.split_first_chunk().ok_or("a key has 32 bytes")?;
        let machine = self.asked(pool)?;
        let asked = machine.let_go(atoll_key::PeerId(*key), goes == [1]).await;
        asked.map_err(|error| error.to_string())
    }

    /// Has a rule for the files of a pool hold; why not, for people.
    async fn set_rule(&self, request: &[u8]) -> Result<(), String> {
        let (pool, rule) = request.split_first_chunk().ok_or("a pool has 16 bytes")?;
        let [rule, number] = rule else { return Err("a rule is two bytes".into()) };
        let machine = self.asked(pool)?;
        let asked = match rule {
            0 => machine.set_copies(*number).await,
            1 => machine.set_min_copies(*number).await,
            2 => machine.set_level(*number).await,
            _ => return Err("this node does not know that rule".into()),
        };
        asked.map_err(|error| error.to_string())
    }

    fn asked(&self, pool: &PoolId) -> Result<Arc<PoolMachine<Directory>>, String> {
        self.served(pool).ok_or_else(|| "this node does not serve that pool now".to_owned())
    }

    fn served(&self, pool: &PoolId) -> Option<Arc<PoolMachine<Directory>>> {
        self.pools().values().find_map(|state| match &state.stage {
            Stage::Serving(machine) if state.pool == *pool => Some(machine.clone()),
            _ => None,
        })
    }

    /// Waits until the records are to be looked at.
    async fn until_work(&self, is_missing: bool) {
        let env = &*self.node.env;
        let pause = sleep(env, if is_missing { LOOK_EVERY } else { CHECK_EVERY });
        select(pin!(self.has_news.notified()), pause).await;
    }
}

/// What peers may ask of a machine about a pool, and its first group.
struct MachineService {
    token: Option<[u8; 16]>,
    machine: Weak<PoolMachine<Directory>>,
}

impl Service for MachineService {
    fn handle(&self, from: Peer, request: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        let (token, machine) = (self.token, self.machine.upgrade());
        Box::pin(async move {
            let ended = || Refusal::new(Refusal::OVERLOADED, "it is being ended");
            let machine = machine.ok_or_else(ended)?;
            match request.method {
                JOIN | JOIN_WITHOUT_FILES => joining::answer(token, &machine, from, &request).await,
                _ => machine.handle(from, request).await,
            }
        })
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
        let pools = self.clone();
        calls.on(call::LET_GO, 49, move |request| {
            let pools = pools.clone();
            Box::pin(async move { pools.let_go(&request).await.map(|()| Bytes::new()) })
        });
        let pools = self.clone();
        calls.on(call::RULE, 18, move |request| {
            let pools = pools.clone();
            Box::pin(async move { pools.set_rule(&request).await.map(|()| Bytes::new()) })
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
