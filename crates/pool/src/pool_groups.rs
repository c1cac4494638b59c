//! How one node reaches the groups of a pool: those that it has members of through these, others through one of their members.
//!
//! It does not decide which groups there are: somebody tells it ([`PoolGroups::set_members`]). Somebody also has it ask from time to time
//! what room they have ([`PoolGroups::refresh_rooms`]).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use atoll_env::{BoxFuture, Env};
use atoll_key::PeerId;
use atoll_net::{CallError, Peer, Refusal, Reply, Request, Transport};
use atoll_vfs::{Errno, FileSystem};
use futures_util::future::join_all;

use crate::layout::{FileId, GroupNumber};
use crate::member::PoolSettings;
use crate::members::PoolMembers;
use crate::messages::refused;
use crate::placement::{self, GroupRoom, average_size};
use crate::pool_map::PoolMap;
use crate::remote::{OpenGroup, RemoteFs, Route};
use crate::roster::RosterRules;
use crate::routing::{PoolId, addressed};
use crate::siblings::SiblingGroups;

/// A member of a group that this node has.
pub trait LocalGroup: Send + Sync {
    /// Whether it is a member no more, as others say: what it knows of the group is old.
    fn is_removed(&self) -> bool;

    /// Makes a call of the group's primary.
    fn call(
        self: Arc<Self>,
        request: Request,
        limit: Duration,
    ) -> BoxFuture<'static, Result<Reply, CallError>>;
}

#[derive(Default)]
struct GroupsState {
    members: BTreeMap<GroupNumber, PoolMembers>,
    /// Nodes that belong to the pool and have no files of it.
    without_files: BTreeSet<PeerId>,
    rules: RosterRules,
    /// Those in which no directory is made yet.
    closed: BTreeSet<GroupNumber>,
    local: BTreeMap<GroupNumber, Weak<dyn LocalGroup>>,
    /// Which member of a group was last found to be its primary.
    found: BTreeMap<GroupNumber, PeerId>,
    /// Of groups that were asked.
    rooms: BTreeMap<GroupNumber, GroupRoom>,
}

impl GroupsState {
    /// The room of each group in which directories are made; of those that have not said it, that it is not known.
    fn rooms(&self) -> Vec<GroupRoom> {
        let room = |group: &GroupNumber| {
            self.rooms.get(group).copied().unwrap_or(GroupRoom::unknown(*group))
        };
        self.members.keys().filter(|group| !self.closed.contains(group)).map(room).collect()
    }
}

/// See the module.
pub struct PoolGroups {
    env: Env,
    transport: Arc<dyn Transport>,
    pool: PoolId,
    state: Mutex<GroupsState>,
}

impl PoolGroups {
    /// Of a pool, of which nothing is known yet.
    pub fn new(env: Env, transport: Arc<dyn Transport>, pool: PoolId) -> Arc<PoolGroups> {
        Arc::new(PoolGroups { env, transport, pool, state: Mutex::default() })
    }

    fn state(&self) -> MutexGuard<'_, GroupsState> {
        self.state.lock().expect("no holder of this lock panics")
    }

    /// These are the members of a group.
    pub fn set_members(&self, group: GroupNumber, members: PoolMembers) {
        self.state().members.insert(group, members);
    }

    /// These are the groups of the pool, by the map of its first one.
    pub fn follow(&self, first: &PoolMap) {
        let groups = first.roster.groups();
        let mut state = self.state();
        state.members = groups.iter().map(|(of, group)| (*of, group.members.clone())).collect();
        state.members.insert(GroupNumber::FIRST, first.enrolled.clone());
        state.without_files = first.witnesses.all().iter().map(|one| one.peer.id).collect();
        state.rules = first.roster.rules();
        let closed = groups.iter().filter(|(_, group)| !group.is_open);
        state.closed = closed.map(|(number, _)| *number).collect();
    }

    /// This node has a member of the group.
    pub fn set_local(&self, group: GroupNumber, member: &Arc<dyn LocalGroup>) {
        self.state().local.insert(group, Arc::downgrade(member));
    }

    /// A group has this room.
    pub fn set_room(&self, room: GroupRoom) {
        self.state().rooms.insert(room.group, room);
    }

    /// Asks each group what room it has. One that does not answer has what it had. Giving it up does no harm.
    pub async fn refresh_rooms(self: &Arc<Self>) {
        let groups: Vec<GroupNumber> = self.state().members.keys().copied().collect();
        let asked = groups.into_iter().map(async |group| match self.ask_room(group).await {
            Ok(room) => self.set_room(room),
            Err(errno) => tracing::debug!("group {group} does not say what room it has: {errno}"),
        });
        join_all(asked).await;
    }

    async fn ask_room(self: &Arc<Self>, group: GroupNumber) -> Result<GroupRoom, Errno> {
        let fs = RemoteFs::begin(self.env.clone(), Arc::new(self.route(group))).await?;
        // Of the root the first group says what all have.
        let stat = fs.statfs(FileId::outside(group).inode()).await?;
        let bytes = |blocks: u64| blocks.saturating_mul(u64::from(stat.block_size_bytes));
        Ok(GroupRoom { group, size: bytes(stat.blocks), free: bytes(stat.blocks_available) })
    }

    fn address(&self, group: GroupNumber) -> PoolId {
        PoolSettings { pool: self.pool, group, level: 0 }.address()
    }

    /// Members of a group, first the one that was its primary.
    fn candidates(&self, group: GroupNumber) -> Vec<Peer> {
        let state = self.state();
        let found = state.found.get(&group).copied();
        let members = state.members.get(&group).map_or(&[][..], PoolMembers::peers);
        let mut candidates = members.to_vec();
        candidates.sort_by_key(|peer| Some(peer.id) != found);
        candidates
    }

    /// Calls members of a group until one does not say that it is not the primary.
    async fn call_away(
        self: Arc<Self>,
        group: GroupNumber,
        request: Request,
        limit: Duration,
    ) -> Result<Reply, CallError> {
        let until = self.env.now() + limit;
        let mut last =
            CallError::Refused(Refusal::new(refused::NO_GROUP, "there is no such group"));
        let candidates = self.candidates(group);
        let count = candidates.len();
        for (at, peer) in candidates.into_iter().enumerate() {
            let left = until.since(self.env.now());
            if left.is_zero() {
                return Err(CallError::TimedOut);
            }
            // So that one that is silent leaves time for the others.
            let left = left / u32::try_from(count - at).unwrap_or(u32::MAX);
            let Request { method, header, parts } = request.clone();
            let header = addressed(&self.address(group), &header);
            let request = Request { method, header, parts };
            match self.transport.call(peer, request, left).await {
                Err(CallError::Refused(refusal)) if refusal.code == Refusal::OVERLOADED => {
                    last = CallError::Unreachable(refusal.text);
                }
                // Calls have identities: one that was made is not made again.
                Err(CallError::Refused(refusal)) if refusal.code == refused::UNCONFIRMED => {
                    last = CallError::Refused(refusal);
                    self.state().found.remove(&group);
                }
                Err(error @ (CallError::Unreachable(_) | CallError::TimedOut)) => {
                    last = error;
                    self.state().found.remove(&group);
                }
                answered => {
                    if answered.is_ok() {
                        self.state().found.insert(group, peer.id);
                    }
                    return answered;
                }
            }
        }
        Err(last)
    }

    /// A way to one group.
    pub fn route(self: &Arc<Self>, group: GroupNumber) -> GroupRoute {
        GroupRoute { groups: self.clone(), group }
    }
}

/// A way to one group of a pool, through this node.
#[derive(Clone)]
pub struct GroupRoute {
    groups: Arc<PoolGroups>,
    group: GroupNumber,
}

impl Route for GroupRoute {
    fn call(
        &self,
        request: Request,
        limit: Duration,
    ) -> BoxFuture<'static, Result<Reply, CallError>> {
        let local = self.groups.state().local.get(&self.group).and_then(Weak::upgrade);
        match local.filter(|local| !local.is_removed()) {
            Some(local) => local.call(request, limit),
            None => Box::pin(self.groups.clone().call_away(self.group, request, limit)),
        }
    }
}

impl SiblingGroups for Arc<PoolGroups> {
    fn are_several(&self) -> bool {
        self.state().members.len() > 1
    }

    fn rules(&self) -> RosterRules {
        self.state().rules
    }

    fn in_use(&self) -> Vec<GroupNumber> {
        self.state().rooms().into_iter().map(|room| room.group).collect()
    }

    fn is_member(&self, node: PeerId) -> bool {
        let state = self.state();
        state.without_files.contains(&node)
            || state.members.values().any(|members| members.contains(node))
    }

    fn is_member_of(&self, group: GroupNumber, node: PeerId) -> bool {
        self.state().members.get(&group).is_some_and(|members| members.contains(node))
    }

    fn group_for(&self, own: GroupNumber, is_spread: bool, seed: u64) -> GroupNumber {
        placement::group_for(&self.state().rooms(), own, is_spread, seed)
    }

    fn note_full(&self, group: GroupNumber) {
        let mut state = self.state();
        let average = average_size(&state.rooms());
        let size = u64::try_from(average).unwrap_or(u64::MAX);
        let room = state.rooms.entry(group).or_insert(GroupRoom { group, size, free: 0 });
        room.free = 0;
    }

    fn rooms(&self) -> Vec<GroupRoom> {
        let rooms = self.state().rooms();
        rooms.into_iter().filter(GroupRoom::is_known).collect()
    }

    fn call(
        &self,
        group: GroupNumber,
        request: Request,
        limit: Duration,
    ) -> BoxFuture<'static, Result<Reply, CallError>> {
        self.route(group).call(request, limit)
    }
}

/// Opens the file systems of groups over the network.
pub struct OpenRemote {
    /// The caller's.
    pub env: Env,
    /// Leads to a group.
    pub route: Box<dyn Fn(GroupNumber) -> Arc<dyn Route> + Send + Sync>,
}

impl OpenGroup for OpenRemote {
    fn open(&self, group: GroupNumber) -> BoxFuture<'static, Result<Arc<dyn FileSystem>, Errno>> {
        let (env, route) = (self.env.clone(), (self.route)(group));
        Box::pin(async move {
            let fs: Arc<dyn FileSystem> = Arc::new(RemoteFs::begin(env, route).await?);
            Ok(fs)
        })
    }
}
