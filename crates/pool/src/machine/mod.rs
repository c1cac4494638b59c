//! One machine's part in a pool of several groups: the members that it has, and what keeps each group's members as they should be.
//!
//! ```text
//! coming    machines that come, and go
//! without_files  a machine that has no files: its part in each group's votes
//! rules     what the primary of a group wants to be changed
//! ```
//!
//! A machine keeps the newest map of the first group that it has heard of, for that map's roster ([`crate::roster`]) says which groups there
//! are: a machine without a member of the first group asks for it. The machine opens a member of each group that it belongs to, again
//! and again if that fails, and makes the directories that it lacks. Where one of its members is a primary, the machine
//! sees to it that the group has as many members as files are to have copies, and says in the roster who they are (the paper's daemon
//! re-creates replicas where a node has gone, Kosha §4.2, §4.4).
//!
//! **Machines come** ([`PoolMachine::admit`]) into the first group as long as that lacks copies, and otherwise with a group of their own,
//! which then gets its other members. So the room of a pool grows with each machine. **They go** ([`PoolMachine::let_go`]) when others have what they
//! had, or at once ([`PoolMachine::remove`]), if nothing is lost by that.
//!
//! **Invariants.** A group is made once, by the machine that begins it, and only if its disk never held it. Directories are made in a group only when it
//! had all its copies once. A machine makes the directory of a group that others began only if that group's map names it, and neither as
//! one that has everything nor as a voter.
//!
//! **It does not know** where directories lie ([`MachineDisks`]), and how a machine gets the code to join.

mod coming;
mod rules;
mod without_files;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use atoll_env::{BoxFuture, Env, Instant, Notify, sleep};
use atoll_key::PeerId;
use atoll_net::{CallError, Peer, Refusal, Reply, Request, Transport};
use futures_util::future::{join_all, select};

use self::rules::{GroupStand, Wanted, belongs, is_machine, wanted};
pub use self::without_files::{VoteDirectories, VotingStatus};
use crate::disk::Disk;
use crate::group::{DEAD_AFTER, GroupMember, GroupStatus, PoolEditError};
use crate::layout::GroupNumber;
use crate::member::{OpenError, PoolSettings};
use crate::members::PoolMembers;
use crate::messages::{self, CHECK, EDIT, MAP, PoolEdit, QUOTAS, refused};
use crate::pool_groups::{LocalGroup, PoolGroups};
use crate::pool_map::PoolMap;
use crate::remote::{METHODS, Route};
use crate::roster::{PoolRoster, RosterEdit};
use crate::routing::{PoolRouter, addressed};
use crate::siblings::SiblingGroups;
use crate::witness_seat::WitnessSeat;

/// How often a machine looks what has changed in the pool.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How often the groups are asked what room they have.
const ROOMS_EVERY: Duration = Duration::from_secs(5);
/// It is forgotten that a machine was to go when it has been in no group for so long: some group may not have said yet that it is there.
const GONE_AFTER: Duration = Duration::from_secs(60);
/// How soon a member that takes no part any more is found.
const FAILURE_CHECK_EVERY: Duration = Duration::from_millis(100);
/// How long others are asked for a map.
const MAP_LIMIT: Duration = Duration::from_secs(1);
/// How long one try of an edit takes.
const EDIT_LIMIT: Duration = Duration::from_secs(5);

/// The directories of a machine, one for each of its members.
pub trait MachineDisks<D: Disk>: Send + Sync + 'static {
    /// The directory of a group; none if there is none.
    ///
    /// # Errors
    /// Why it cannot be opened, for people.
    fn open(&self, group: GroupNumber) -> BoxFuture<'_, Result<Option<D>, String>>;

    /// Makes the directory of a group, whole or not at all ([`crate::create_member`]).
    ///
    /// # Errors
    /// Why not, for people: also if it was made before, and is gone.
    fn make<'a>(
        &'a self,
        settings: PoolSettings,
        map: &'a PoolMap,
    ) -> BoxFuture<'a, Result<(), String>>;

    /// Puts the directory of a group away, of which this machine is no member any more, so that another one can be made.
    ///
    /// # Errors
    /// Why not, for people.
    fn retire(&self, group: GroupNumber) -> BoxFuture<'_, Result<(), String>>;

    /// Keeps the newest map of the first group, durably.
    ///
    /// # Errors
    /// Why not, for people.
    fn keep(&self, first: &PoolMap) -> Result<(), String>;

    /// Returns the directories of votes of a machine without files; none on a machine with files.
    fn votes(&self) -> Option<&dyn VoteDirectories<D>> {
        None
    }
}

struct MachineState<D: Disk> {
    /// The newest map of the first group that is known.
    first: PoolMap,
    members: BTreeMap<GroupNumber, Arc<GroupMember<D>>>,
    /// Of a machine without files.
    seats: BTreeMap<GroupNumber, Arc<WitnessSeat<D>>>,
    /// Why this machine has no member of a group that it belongs to, for people.
    problems: BTreeMap<GroupNumber, String>,
    /// The pool knows this machine no more, as others say.
    is_removed: bool,
    /// Since when machines that are to go have been in no group.
    absent: BTreeMap<PeerId, Instant>,
    is_ended: bool,
}

/// How a machine's member of a group stands; why there is none, for people.
pub type LocalGroupStatus = (GroupNumber, Result<GroupStatus, String>);

/// How a pool stands, as one machine knows it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MachineStatus {
    /// The newest map of the first group that this machine knows.
    pub first: PoolMap,
    /// The groups that it belongs to.
    pub groups: Vec<LocalGroupStatus>,
    /// Others say that it belongs to the pool no more.
    pub is_removed: bool,
    /// How it stands if it has no files.
    pub voting: Option<VotingStatus>,
}

impl MachineStatus {
    /// All groups, and some of their members.
    pub fn all_groups(&self) -> BTreeMap<GroupNumber, PoolMembers> {
        let others = self.first.roster.groups().iter();
        let others = others.map(|(number, group)| (*number, group.members.clone()));
        others.chain([(GroupNumber::FIRST, self.first.enrolled.clone())]).collect()
    }

    /// How the pool's groups and machines are to be.
    pub fn roster(&self) -> &PoolRoster {
        &self.first.roster
    }
}

/// See the module.
pub struct PoolMachine<D: Disk> {
    env: Env,
    transport: Arc<dyn Transport>,
    pool: PoolSettings,
    disks: Arc<dyn MachineDisks<D>>,
    groups: Arc<PoolGroups>,
    router: Arc<PoolRouter>,
    has_news: Notify,
    state: Mutex<MachineState<D>>,
}

impl<D: Disk> PoolMachine<D> {
    /// Begins the work of this machine in a pool; `first` is a map of its first group, which may be an old one. Calls about groups beside the first
    /// one reach its members through `router`; who serves the pool's own calls hands them to [`PoolMachine::handle`].
    pub fn start(
        (env, transport): (Env, Arc<dyn Transport>),
        pool: PoolSettings,
        (first, disks): (PoolMap, Arc<dyn MachineDisks<D>>),
        router: Arc<PoolRouter>,
    ) -> Arc<PoolMachine<D>> {
        let groups = PoolGroups::new(env.clone(), transport.clone(), pool.pool);
        groups.follow(&first);
        let state = MachineState {
            first,
            members: BTreeMap::new(),
            seats: BTreeMap::new(),
            problems: BTreeMap::new(),
            is_removed: false,
            absent: BTreeMap::new(),
            is_ended: false,
        };
        let (has_news, state) = (Notify::default(), Mutex::new(state));
        let machine = PoolMachine { env, transport, pool, disks, groups, router, has_news, state };
        let machine = Arc::new(machine);
        let env = &machine.env;
        env.spawn(Box::pin(keep_members(Arc::downgrade(&machine), env.clone())));
        env.spawn(Box::pin(keep_groups(Arc::downgrade(&machine), env.clone())));
        env.spawn(Box::pin(keep_rooms(Arc::downgrade(&machine), env.clone())));
        machine
    }

    fn state(&self) -> MutexGuard<'_, MachineState<D>> {
        self.state.lock().expect("no holder of this lock panics")
    }

    fn settings(&self, group: GroupNumber) -> PoolSettings {
        PoolSettings { group, ..self.pool }
    }

    fn local(&self) -> Peer {
        self.transport.local()
    }

    fn member(&self, group: GroupNumber) -> Option<Arc<GroupMember<D>>> {
        self.state().members.get(&group).cloned()
    }

    /// Ways to the pool's groups from this machine.
    pub fn groups(&self) -> &Arc<PoolGroups> {
        &self.groups
    }

    /// How it stands.
    pub fn status(&self) -> MachineStatus {
        let state = self.state();
        let problems =
            state.problems.iter().filter(|(group, _)| !state.members.contains_key(group));
        let problems = problems.map(|(group, why)| (*group, Err(why.clone())));
        let members = state.members.iter().map(|(group, member)| (*group, Ok(member.status())));
        let mut groups: Vec<_> = members.chain(problems).collect();
        groups.sort_by_key(|(group, _)| *group);
        let voting = self.disks.votes().map(|_| VotingStatus::of(&state.seats, &state.problems));
        let is_removed = state.is_removed;
        MachineStatus { first: state.first.clone(), groups, is_removed, voting }
    }

    /// Takes a newer map of the first group over.
    fn note_first(&self, map: PoolMap) {
        let is_other = {
            let mut state = self.state();
            if map.epoch <= state.first.epoch {
                return;
            }
            let known = (&state.first.enrolled, &state.first.roster, &state.first.witnesses);
            let is_other = (&map.enrolled, &map.roster, &map.witnesses) != known;
            state.first = map.clone();
            is_other
        };
        self.groups.follow(&map);
        if is_other {
            if let Err(why) = self.disks.keep(&map) {
                tracing::warn!("the pool's groups cannot be written: {why}");
            }
            self.has_news.notify();
        }
    }

    /// Asks for the newest map of a group.
    async fn ask_map(
        &self,
        group: GroupNumber,
        members: &PoolMembers,
    ) -> Result<PoolMap, CallError> {
        let address = self.settings(group).address();
        let local = self.local().id;
        let asked = members.peers().iter().filter(|peer| peer.id != local).map(|peer| {
            let request =
                Request { method: MAP, header: addressed(&address, &[]), parts: Vec::new() };
            self.transport.call(*peer, request, MAP_LIMIT)
        });
        let mut newest: Result<PoolMap, CallError> =
            Err(CallError::Unreachable("nobody else knows the group".into()));
        let (mut refused, mut refusals) = (None, 0);
        for answer in join_all(asked).await {
            match answer {
                Ok(reply) => {
                    let map = messages::decode::<PoolMap>(&reply.header);
                    let Some(map) = map.filter(PoolMap::is_sound) else { continue };
                    if newest.as_ref().map_or(0, |newest| newest.epoch) < map.epoch {
                        newest = Ok(map);
                    }
                }
                Err(CallError::Refused(refusal)) if refusal.code == refused::NOT_A_MEMBER => {
                    refused = Some(CallError::Refused(refusal));
                    refusals += 1;
                }
                Err(error) => {
                    newest = newest.or(Err(error));
                }
            }
        }
        // One alone may know less than this machine.
        let refused = refused.filter(|_| refusals > members.peers().len() / 2);
        newest.map_err(|error| refused.unwrap_or(error))
    }

    /// Learns the newest map of the first group.
    async fn ask_first(&self) {
        let member = self.member(GroupNumber::FIRST);
        if let Some(member) = member.filter(|member| !member.is_removed()) {
            self.state().is_removed = false;
            return self.note_first(member.map());
        }
        if let Some(seat) = self.seat(GroupNumber::FIRST) {
            self.note_first(seat.map());
        }
        let known = self.state().first.enrolled.clone();
        match self.ask_map(GroupNumber::FIRST, &known).await {
            Ok(map) => {
                let is_listed = map.witnesses.contains(self.local().id);
                self.state().is_removed = self.disks.votes().is_some() && !is_listed;
                self.note_first(map);
            }
            Err(CallError::Refused(refusal)) if refusal.code == refused::NOT_A_MEMBER => {
                self.state().is_removed = true;
            }
            Err(error) => tracing::debug!("the pool's groups: {error}"),
        }
    }

    /// Which groups this machine belongs to, as far as it knows.
    fn own_groups(&self) -> BTreeSet<GroupNumber> {
        let local = self.local().id;
        let state = self.state();
        let listed = state.first.roster.groups().iter();
        let listed = listed.filter(|(_, group)| group.members.contains(local));
        let mut own: BTreeSet<GroupNumber> = listed.map(|(number, _)| *number).collect();
        if state.first.enrolled.contains(local) {
            own.insert(GroupNumber::FIRST);
        }
        own
    }

    /// Opens what can be opened, and ends what takes no part any more.
    async fn look(self: &Arc<Self>) {
        let failed: BTreeMap<_, _> = {
            let mut state = self.state();
            let all = std::mem::take(&mut state.members);
            let (failed, at_work) = all.into_iter().partition(|(_, member)| member.has_failed());
            state.members = at_work;
            failed
        };
        for (group, member) in failed {
            let own = member.status().members.into_iter().next();
            let why = own.and_then(|own| own.problem).unwrap_or_default();
            tracing::warn!("group {group} is opened again: {why}");
            self.end_member(group, &member).await;
        }
        self.look_at_removed().await;
        // Also those of which it is no member, as far as it knows: its own disk may know more.
        let all: BTreeSet<GroupNumber> = {
            let state = self.state();
            let others = state.first.roster.groups().keys().copied();
            others.chain([GroupNumber::FIRST]).collect()
        };
        if let Some(votes) = self.disks.votes() {
            return self.look_without_files(votes, all).await;
        }
        let own = self.own_groups();
        for group in all {
            if self.member(group).is_some() {
                continue;
            }
            let opened = self.open(group, own.contains(&group)).await;
            if self.note_opened(group, opened).is_break() {
                return;
            }
        }
    }

    /// Notes why this machine takes no part in a group, or that it does. Nothing is to be opened any more once the machine has ended.
    fn note_opened(&self, group: GroupNumber, opened: Result<(), String>) -> ControlFlow<()> {
        let mut state = self.state();
        if state.is_ended {
            return ControlFlow::Break(());
        }
        match opened {
            Ok(()) => drop(state.problems.remove(&group)),
            Err(why) => drop(state.problems.insert(group, why)),
        }
        ControlFlow::Continue(())
    }

    /// A member that is told that it is none any more learns the newest map of its group from the members that the roster lists. If it is none by that,
    /// and this machine has others, its directory is put away.
    async fn look_at_removed(&self) {
        let members = self.state().members.clone();
        for (group, member) in members {
            let is_listed = self.listed(group).is_some();
            if is_listed && !member.is_removed() {
                continue;
            }
            match self.has_left(group).await {
                Ok(true) => {
                    tracing::info!("this machine has left group {group}");
                    self.state().members.remove(&group);
                    self.end_member(group, &member).await;
                    self.put_away(group).await;
                }
                Ok(false) => {}
                Err(map) => member.note_map(&map),
            }
        }
    }

    /// The members of a group, as far as the roster says; none if there is no such group.
    fn listed(&self, group: GroupNumber) -> Option<PoolMembers> {
        let state = self.state();
        match group {
            GroupNumber::FIRST => Some(state.first.enrolled.clone()),
            _ => state.first.roster.groups().get(&group).map(|group| group.members.clone()),
        }
    }

    /// Whether this machine is no member of a group any more, as that says, and belongs to the pool all the same: who does not, or is to go, keeps what
    /// it has.
    ///
    /// # Errors
    /// The map of the group, if it is a member.
    async fn has_left(&self, group: GroupNumber) -> Result<bool, Box<PoolMap>> {
        let local = self.local().id;
        let is_out = match self.listed(group) {
            // It was given up.
            None => true,
            Some(known) => match self.ask_map(group, &known).await {
                Ok(map) if map.enrolled.contains(local) => return Err(Box::new(map)),
                Ok(_) => true,
                Err(CallError::Refused(refusal)) => refusal.code == refused::NOT_A_MEMBER,
                Err(_) => false,
            },
        };
        let has_others = self.own_groups().iter().any(|own| *own != group);
        let state = self.state();
        let stays = !state.is_removed && !state.first.roster.to_go().contains(&local);
        Ok(is_out && has_others && stays)
    }

    async fn put_away(&self, group: GroupNumber) {
        if let Err(why) = self.disks.retire(group).await {
            tracing::warn!("what is left of group {group}: {why}");
        }
    }

    /// Opens the member of a group, if this machine has one; makes it if it is to have one.
    async fn open(self: &Arc<Self>, group: GroupNumber, is_own: bool) -> Result<(), String> {
        let disk = match self.disks.open(group).await? {
            Some(disk) => disk,
            None if !is_own => return Ok(()),
            None => {
                self.make(group).await?;
                let made = self.disks.open(group).await?;
                made.ok_or_else(|| "its directory is gone again".to_owned())?
            }
        };
        let siblings: Arc<dyn SiblingGroups> = Arc::new(self.groups.clone());
        let (env, transport) = (self.env.clone(), self.transport.clone());
        match GroupMember::start(env, transport, disk, Some(siblings)).await {
            Ok(member) if member.settings() != self.settings(group) => {
                Err("its directory holds another pool, or another group".to_owned())
            }
            Ok(member) => {
                self.serve(group, Arc::new(member));
                Ok(())
            }
            Err(OpenError::NotAMember) if is_own => {
                self.replace(group).await?;
                Err("it is a member again, and is given all files anew".to_owned())
            }
            Err(OpenError::NotAMember) if !self.own_groups().is_empty() => {
                if let Ok(true) = self.has_left(group).await {
                    self.put_away(group).await;
                }
                Ok(())
            }
            Err(error) => Err(error.to_string()),
        }
    }

    fn serve(&self, group: GroupNumber, member: Arc<GroupMember<D>>) {
        let mut state = self.state();
        if state.is_ended {
            return;
        }
        let local: Arc<dyn LocalGroup> = member.clone();
        self.groups.set_local(group, &local);
        if group != GroupNumber::FIRST {
            self.router.add(self.settings(group).address(), member.service());
        }
        tracing::info!("the member of group {group} is open");
        state.members.insert(group, member);
    }

    async fn end_member(&self, group: GroupNumber, member: &GroupMember<D>) {
        if group != GroupNumber::FIRST {
            self.router.remove(&self.settings(group).address());
        }
        if let Err(errno) = member.end().await {
            tracing::warn!("group {group} was not ended in order: {errno}");
        }
    }

    /// The map with which the directory of a group is made.
    async fn map_to_join(&self, group: GroupNumber) -> Result<PoolMap, String> {
        let local = self.local();
        let listed = self.state().first.roster.groups().get(&group).cloned();
        let members = match listed {
            Some(listed) if !listed.is_open && listed.members.founder().id == local.id => {
                // It begins it: nobody else ever does.
                if listed.members.peers().len() == 1 {
                    return Ok(PoolMap::first(&listed.members));
                }
                listed.members
            }
            Some(listed) => listed.members,
            None => self.state().first.enrolled.clone(),
        };
        let map = self.ask_map(group, &members).await;
        let map = map.map_err(|error| format!("its members are not known: {error}"))?;
        if !map.enrolled.contains(local.id) {
            return Err("its members do not know this machine yet".to_owned());
        }
        if map.members.contains(&local.id) || map.voters.keys.contains(&local.id) {
            return Err("this machine had a copy, which is gone: `atoll pool remove` on another \
                        machine comes first"
                .to_owned());
        }
        Ok(map)
    }

    async fn make(&self, group: GroupNumber) -> Result<(), String> {
        let map = self.map_to_join(group).await?;
        self.disks.make(self.settings(group), &map).await
    }

    /// Has the directory of a group made anew that this machine was removed from, and belongs to again.
    async fn replace(&self, group: GroupNumber) -> Result<(), String> {
        // Only if that is so.
        self.map_to_join(group).await?;
        self.disks.retire(group).await
    }

    /// Has the first group's map changed.
    async fn edit_first(&self, edit: PoolEdit) -> Result<PoolMap, PoolEditError> {
        let map = self.edit(GroupNumber::FIRST, edit, EDIT_LIMIT).await?;
        self.note_first(map.clone());
        Ok(map)
    }

    /// Has a group's map changed.
    async fn edit(
        &self,
        group: GroupNumber,
        edit: PoolEdit,
        limit: Duration,
    ) -> Result<PoolMap, PoolEditError> {
        let route = self.groups.route(group);
        let until = self.env.now() + limit;
        loop {
            let left = until.since(self.env.now());
            if left.is_zero() {
                return Err(PoolEditError::NoAnswer);
            }
            let header = messages::encode(&edit);
            let request = Request { method: EDIT, header, parts: Vec::new() };
            match route.call(request, left).await {
                Ok(reply) => {
                    let map = messages::decode::<PoolMap>(&reply.header);
                    let map = map.filter(PoolMap::is_sound);
                    let unreadable = || PoolEditError::Refused("its answer cannot be read".into());
                    return map.ok_or_else(unreadable);
                }
                Err(CallError::Refused(refusal)) if refusal.code == refused::EDIT => {
                    return Err(PoolEditError::Refused(refusal.text));
                }
                Err(error) => tracing::debug!("the members of group {group}: {error}"),
            }
            sleep(&*self.env, FAILURE_CHECK_EVERY).await;
        }
    }

    /// The machines that were to go, and have been in no group for a while.
    fn gone(&self, first: &PoolMap) -> BTreeSet<PeerId> {
        let now = self.env.now();
        let absent = first.roster.to_go().iter().filter(|id| !is_machine(first, **id)).copied();
        let absent: BTreeSet<PeerId> = absent.collect();
        let mut state = self.state();
        state.absent.retain(|id, _| absent.contains(id));
        for id in absent {
            state.absent.entry(id).or_insert(now);
        }
        let long = state.absent.iter().filter(|(_, since)| now.since(**since) > GONE_AFTER);
        long.map(|(id, _)| *id).collect()
    }

    /// Does what this machine's primaries want.
    async fn tend_groups(&self) {
        let members = self.state().members.clone();
        for (group, member) in members {
            let status = member.status();
            if !status.is_primary {
                continue;
            }
            let dead = status.members.iter().filter(|member| member.silence > DEAD_AFTER);
            let dead = dead.map(|member| member.peer.id).collect();
            let map = member.map();
            let first = match group {
                GroupNumber::FIRST => map.clone(),
                _ => self.state().first.clone(),
            };
            let stand = GroupStand { group, map, dead, gone: self.gone(&first) };
            let Some(wanted) = wanted(&first, &stand) else { continue };
            tracing::info!("group {group}: {wanted:?}");
            let made = match wanted {
                Wanted::Enrol(peer) => {
                    self.edit(group, PoolEdit::Enrol(peer), EDIT_LIMIT).await.map(drop)
                }
                Wanted::Remove(id) => {
                    self.edit(group, PoolEdit::Remove(id), EDIT_LIMIT).await.map(drop)
                }
                Wanted::Witness(witness) => {
                    self.edit(group, PoolEdit::Witness(witness), EDIT_LIMIT).await.map(drop)
                }
                Wanted::Report(said) => {
                    let edit = PoolEdit::Roster(RosterEdit::Set(group, said));
                    self.edit_first(edit).await.map(drop)
                }
                Wanted::Gone(id) => {
                    let edit = PoolEdit::Roster(RosterEdit::ToGo(id, false));
                    self.edit_first(edit).await.map(drop)
                }
            };
            if let Err(error) = made {
                // It is wanted again soon.
                tracing::debug!("group {group}: {error}");
            }
        }
    }

    /// Answers a call about the pool's first group, or about the pool.
    pub fn handle(
        &self,
        from: Peer,
        request: Request,
    ) -> BoxFuture<'static, Result<Reply, Refusal>> {
        match self.member(GroupNumber::FIRST) {
            Some(member) => member.service().handle(from, request),
            None => match self.seat(GroupNumber::FIRST).filter(|_| request.method != MAP) {
                Some(seat) => seat.service().handle(from, request),
                None => {
                    let answer = self.answer_without_first(from, &request);
                    Box::pin(async { answer })
                }
            },
        }
    }

    fn answer_without_first(&self, from: Peer, request: &Request) -> Result<Reply, Refusal> {
        let first = self.state().first.clone();
        if !belongs(&first, from.id) {
            let text = "the caller is no member of the pool";
            return Err(Refusal::new(refused::NOT_A_MEMBER, text));
        }
        match request.method {
            MAP => Ok(Reply { header: messages::encode(&first), parts: Vec::new() }),
            _ => Err(Refusal::new(Refusal::OVERLOADED, "it has no member of that group now")),
        }
    }

    /// Makes a call of the file system of a group, or one about its scrub ([`crate::ask_scrub`]) or limits
    /// ([`crate::ask_quotas`]), wherever its primary is.
    ///
    /// # Errors
    /// As [`Transport::call`].
    pub async fn call(
        &self,
        group: GroupNumber,
        request: Request,
        limit: Duration,
    ) -> Result<Reply, CallError> {
        if !METHODS.contains(&request.method) && !matches!(request.method, CHECK | QUOTAS) {
            let text = "only calls of its file system are handed to a pool";
            return Err(CallError::Refused(Refusal::new(Refusal::MALFORMED, text)));
        }
        self.groups.route(group).call(request, limit).await
    }

    /// Ends the work of all members in order.
    pub async fn end(&self) {
        let (members, seats) = {
            let mut state = self.state();
            state.is_ended = true;
            (std::mem::take(&mut state.members), std::mem::take(&mut state.seats))
        };
        for (group, seat) in seats {
            self.end_seat(group, &seat).await;
        }
        for (group, member) in members {
            self.end_member(group, &member).await;
        }
    }

    fn is_ended(&self) -> bool {
        self.state().is_ended
    }
}

/// Keeps the machine's members open, as long as it is at work.
async fn keep_members<D: Disk>(machine: Weak<PoolMachine<D>>, env: Env) {
    let mut due = env.now();
    loop {
        let Some(own) = machine.upgrade().filter(|own| !own.is_ended()) else { return };
        let has_failed = own.state().members.values().any(|member| member.has_failed());
        if has_failed || env.now() >= due {
            own.look().await;
            due = env.now() + LOOK_EVERY;
        }
        let pause = sleep(&*env, FAILURE_CHECK_EVERY);
        if let futures_util::future::Either::Left(_) =
            select(pin!(own.has_news.notified()), pause).await
        {
            due = env.now();
        }
    }
}

/// Learns what room the groups have, as long as the machine is at work.
async fn keep_rooms<D: Disk>(machine: Weak<PoolMachine<D>>, env: Env) {
    loop {
        {
            let Some(own) = machine.upgrade().filter(|own| !own.is_ended()) else { return };
            // A pool of one group has no choice.
            if !own.state().first.roster.groups().is_empty() {
                own.groups.refresh_rooms().await;
            }
        }
        sleep(&*env, ROOMS_EVERY).await;
    }
}

/// Learns what groups there are, and keeps their members as they should be, as long as the machine is at work.
async fn keep_groups<D: Disk>(machine: Weak<PoolMachine<D>>, env: Env) {
    loop {
        {
            let Some(own) = machine.upgrade().filter(|own| !own.is_ended()) else { return };
            own.ask_first().await;
            own.tend_groups().await;
        }
        sleep(&*env, LOOK_EVERY).await;
    }
}
