//! A pool of several members at work: one is the *primary*, the others follow it (PacificA, MSR-TR-2008-25; Kosha §4.2 keeps
//! replicas of each directory in the same way, without an order).
//!
//! ```text
//! primary     the primary's links to the others: begun, watched, given what they lack
//! membership  which members the primary waits for, as the pool's map says, and whether it may answer
//! copying     what the primary gives to a member that lacks everything
//! quotas      limits on what users and directories take
//! scrub       comparing the members' copies, and healing those that are wrong
//! witnesses   nodes without files, of which some vote
//! backup      a member that follows: its answers to the primary
//! ```
//!
//! The pool's map ([`crate::map`]) says who belongs to the pool, who is the primary, and who is a *member of the epoch*: has everything that was answered.
//! The primary decides every change and gives it its place in one order. A change of names or attributes is answered when all
//! members of the epoch have it durably in their journals and the primary has made it; the others make it when they hear that. Bytes go
//! to all in place, and are durable on all after a sync. Clients work with the primary, through any member ([`GroupMember::call`]); reads of
//! files whose bytes all members have, the member may answer itself.
//!
//! **Who proposes maps.** The primary leaves out a member that is silent, and adds one that has everything again. A member that has not heard
//! of the primary for longer than its own promise to it proposes itself. All members of an epoch have all answered changes, so each of
//! them will do; one that was not restarted has all answered bytes, too, so it comes first. Nobody else ever proposes. A restart ends a
//! membership.
//!
//! **A new primary** gives its first change, which says its epoch, to all members with what they lack; when they have it, everything
//! that it has inherited is made and released, and clients are served. What a member had beyond is cut off: it was never answered.
//!
//! **Invariants.** There is one primary that answers. What a member has made, all members of the epoch have durably. What was answered
//! survives as long as one member of the last epoch does. When nothing is under way, all members have the same files, with the same bytes.
//!
//! **It does not know** what to do when no member of the last epoch lives, or no majority of the voters: then the pool waits.

mod backup;
mod copying;
mod membership;
mod open_names;
mod primary;
mod quotas;
mod scrub;
mod witnesses;

use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use atoll_env::{BoxFuture, Env, Instant, sleep, timeout};
use atoll_key::PeerId;
use atoll_net::{CallError, Peer, Refusal, Reply, Request, Service, Transport};
use atoll_vfs::Errno;
use bytes::Bytes;
use futures_channel::oneshot;
use futures_util::future::{Either, join_all, select};

use self::backup::{Backup, Follower, FollowerStanding};
pub(crate) use self::membership::DEAD_AFTER;
use self::membership::{EpochMembership, NotEdited};
use self::open_names::keep_open_names;
use self::primary::Primary;
pub use self::quotas::{QuotaError, ask_quotas};
use self::quotas::{keep_above, keep_quotas};
use self::scrub::Scrub;
pub use self::scrub::{ScrubReport, ask_scrub};
pub use self::witnesses::WitnessStatus;
use crate::backups::Backups;
pub use crate::backups::CopyProgress;
use crate::change::PoolChange;
use crate::disk::{Disk, DiskResult};
use crate::fs::PoolFs;
use crate::layout::{GroupNumber, OWN_DIRECTORY};
use crate::map::{
    AskError, MapSeat, PROPOSE, PoolMap, SEEN, VOTER_MESSAGE, VoterError, revival, revival_secs,
};
use crate::member::{Makes, OpenError, PoolMember, PoolSettings};
use crate::members::PoolMembers;
use crate::messages::{
    self, BEAT, BEGIN, CHECK, COPY, COPY_BATCH, CROSSING, CrossingCall, EDIT, HELLO, HelloReply,
    ITEM, ItemKind, MAP, PoolEdit, QUOTAS, QuotaCall, SCRUB, refused,
};
use crate::pool_groups::LocalGroup;
use crate::remote::{
    LockKeeper, METHODS, REOPENED_WITHIN, RemoteServer, ReplicaRead, SESSION_TIME,
};
use crate::roster::RosterRules;
use crate::routing::addressed;
use crate::siblings::SiblingGroups;
use crate::witnesses::Witness;

/// How long changes that are under way may take when a primary ends its work.
const END_LIMIT: Duration = Duration::from_secs(3);
/// How often a member looks whether the primary is still there.
const LOOK_EVERY: Duration = Duration::from_millis(25);
/// How often a member whose disk is full tries again to write what maps want.
const FULL_DISK_PAUSE: Duration = Duration::from_secs(2);
/// How often a member that hears of no primary asks who it is.
const ASK_EVERY: Duration = Duration::from_secs(1);
/// How long a map is proposed, or asked for, until that is begun anew.
const ASK_LIMIT: Duration = Duration::from_secs(1);
/// How often a primary looks whether changes over several groups wait for something.
const RESUME_EVERY: Duration = Duration::from_millis(500);
/// How long a member is asked whether it was restarted.
const HELLO_LIMIT: Duration = Duration::from_millis(300);
/// How long a read of this member's own copy may take until the primary is asked.
const READ_LIMIT: Duration = Duration::from_millis(500);
/// For so long a restarted member leaves it to others to become the primary that were not.
const DEFERS: Duration = Duration::from_secs(5);

/// A member of a pool of several, at work in a node.
pub struct GroupMember<D: Disk> {
    seat: Arc<GroupSeat<D>>,
}

/// The primary's work.
struct Lead<D: Disk> {
    primary: Arc<Primary<D>>,
    /// The file system, once it is served.
    server: Option<RemoteServer>,
}

struct GroupSeat<D: Disk> {
    env: Env,
    transport: Arc<dyn Transport>,
    /// The pool's other groups.
    siblings: Option<Arc<dyn SiblingGroups>>,
    settings: PoolSettings,
    /// Random bits.
    run: u64,
    maps: MapSeat<D>,
    backup: Arc<Backup<D>>,
    lead: Mutex<Option<Lead<D>>>,
}

/// Why the members of a pool are as they were.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PoolEditError {
    /// The primary does not do that; why, for people.
    #[error("{0}")]
    Refused(String),
    /// The time passed. It may be done later.
    #[error("the pool has no primary now that answers; it may be done all the same")]
    NoAnswer,
}

/// How a member stands.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MemberStatus {
    /// Which.
    pub peer: Peer,
    /// Whether it has everything that was answered.
    pub is_member: bool,
    /// Why it does not take part, for people; none if it does.
    pub problem: Option<String>,
    /// The last change that it has made.
    pub applied: u64,
    /// Room on its disk, bytes; none if that is not known.
    pub free_bytes: Option<u64>,
    /// Files of which it gets ranges again, since it may have lost them.
    pub files_to_mend: usize,
    /// How far it is if it is given all files, as the primary knows it.
    pub copying: Option<CopyProgress>,
    /// For how long it has not answered, as the primary knows it.
    pub silence: Duration,
}

/// How a pool of several stands, as one member knows it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GroupStatus {
    /// Counts the pool's maps.
    pub epoch: u64,
    /// Who decides changes, as far as this member knows.
    pub primary: Peer,
    /// Whether this member is the primary, and serves clients.
    pub is_primary: bool,
    /// All members of the pool, as far as this member knows.
    pub enrolled: PoolMembers,
    /// Who decides the next map.
    pub voters: Vec<Peer>,
    /// The nodes that belong to the group and have no files, on the primary.
    pub witnesses: Vec<WitnessStatus>,
    /// The members that it knows the state of: on the primary all, itself first; elsewhere that one alone.
    pub members: Vec<MemberStatus>,
    /// Copies that the last scrub found to be wrong and could not heal, as the primary knows it.
    pub unhealed: u64,
    /// How many clients have lock sessions, and how many locks on files they hold, as this member knows it.
    pub locks: (usize, usize),
}

impl<D: Disk> GroupMember<D> {
    /// Opens a member's disk, and begins its work.
    ///
    /// # Errors
    /// As for a pool of one; [`OpenError::NotAMember`] if this node is not in the list, or there is none.
    pub async fn start(
        env: Env,
        transport: Arc<dyn Transport>,
        disk: D,
        siblings: Option<Arc<dyn SiblingGroups>>,
    ) -> Result<GroupMember<D>, OpenError> {
        let local = transport.local();
        let unrecovered = PoolMember::open_unrecovered(env.clone(), disk).await?;
        let map = unrecovered.map().cloned().ok_or(OpenError::NotAMember)?;
        if !map.enrolled.contains(local.id) {
            return Err(OpenError::NotAMember);
        }
        let settings = unrecovered.settings();
        let failed = |errno| OpenError::Disk("cannot open its .atoll", errno);
        let disk = unrecovered.disk();
        let own = disk.node(&disk.top(), OWN_DIRECTORY.as_bytes()).await.map_err(failed)?;
        let named = (settings.address(), map.clone());
        let maps = MapSeat::start(env.clone(), transport.clone(), (disk, own), named).await;
        let maps = maps.map_err(OpenError::Votes)?;
        let backup = Backup::new(env.clone(), local, &map, unrecovered)?;
        let (run, lead) = (env.random_u64(), Mutex::new(None));
        let seat = GroupSeat { env, transport, siblings, settings, run, maps, backup, lead };
        let seat = Arc::new(seat);
        seat.env.spawn(Box::pin(keep_seat(Arc::downgrade(&seat), seat.env.clone())));
        seat.env.spawn(Box::pin(keep_map(Arc::downgrade(&seat), seat.env.clone())));
        Ok(GroupMember { seat })
    }

    /// What the pool was made with.
    pub fn settings(&self) -> PoolSettings {
        self.seat.settings
    }

    /// The newest map that this member knows to be decided.
    pub fn map(&self) -> PoolMap {
        self.seat.maps.map()
    }

    /// A map of the group that was decided, as others say: this member may have been away while all members that it knew were replaced.
    pub fn note_map(&self, map: &PoolMap) {
        self.seat.maps.note_map(map);
    }

    /// Has a node be a member of the pool, or be one at this address: returns the map with which its directory is made
    /// ([`crate::create_member`]). Then it is given all that the pool holds.
    ///
    /// # Errors
    /// If the pool has as many members as it can have; if nobody answers.
    pub async fn enrol(&self, peer: Peer, limit: Duration) -> Result<PoolMap, PoolEditError> {
        self.edit(PoolEdit::Enrol(peer), limit).await
    }

    /// Has a member be none any more, whether it is there or not. If it is the primary, another one becomes that first.
    ///
    /// # Errors
    /// If no other member has everything; [`PoolEditError::NoAnswer`] also if this one was the primary: it is to be asked again when it was opened
    /// again.
    pub async fn remove(&self, id: PeerId, limit: Duration) -> Result<PoolMap, PoolEditError> {
        self.edit(PoolEdit::Remove(id), limit).await
    }

    /// Has a node belong to the group without files, or in another incarnation, or listen elsewhere.
    ///
    /// # Errors
    /// If it has files, or there are too many such nodes; if nobody answers.
    pub async fn add_witness(
        &self,
        witness: Witness,
        limit: Duration,
    ) -> Result<PoolMap, PoolEditError> {
        self.edit(PoolEdit::Witness(witness), limit).await
    }

    /// Has the primary change who belongs to the pool.
    pub(crate) async fn edit(
        &self,
        edit: PoolEdit,
        limit: Duration,
    ) -> Result<PoolMap, PoolEditError> {
        let seat = &self.seat;
        let until = seat.env.now() + limit;
        loop {
            let left = until.since(seat.env.now());
            // One that takes no part any more, as a primary that was to go, does not learn who is the primary.
            if left.is_zero() || self.has_failed() {
                return Err(PoolEditError::NoAnswer);
            }
            let header = messages::encode(&edit);
            let request = Request { method: EDIT, header, parts: Vec::new() };
            match self.call(request, left).await {
                Ok(reply) => match messages::decode::<PoolMap>(&reply.header) {
                    Some(map) if map.is_sound() => return Ok(map),
                    _ => return Err(PoolEditError::Refused("its answer cannot be read".into())),
                },
                Err(CallError::Refused(refusal)) if refusal.code == refused::EDIT => {
                    return Err(PoolEditError::Refused(refusal.text));
                }
                // Another one is the primary soon.
                Err(error) => tracing::debug!("the members of the pool: {error}"),
            }
            sleep(&*seat.env, LOOK_EVERY).await;
        }
    }

    /// Answers calls of the family `0x05` that are the pool's: those of other members, and of the file system.
    pub fn service(&self) -> Arc<dyn Service> {
        Arc::new(SeatService { seat: Arc::downgrade(&self.seat) })
    }

    /// Makes a call of the file system, on whoever is the primary ([`crate::remote`]); a read may be answered from this member's own copy.
    ///
    /// # Errors
    /// [`CallError::Unreachable`] also if there is no primary now, or another one before there was an answer.
    pub async fn call(&self, request: Request, limit: Duration) -> Result<Reply, CallError> {
        self.seat.call_primary(request, limit).await
    }

    /// The file system, on the primary alone. Its answers hold only as long as this member is the primary: what calls it gets wrong
    /// answers when another one is, and it does not know. For tests.
    #[doc(hidden)]
    pub fn file_system(&self) -> Option<PoolFs<D>> {
        let lead = self.seat.lead();
        let served = lead.as_ref().filter(|lead| lead.server.is_some())?;
        Some(PoolFs::of_primary(served.primary.member.clone(), self.seat.siblings.clone()))
    }

    /// How many reads this member has answered from its own copy while it followed. For tests.
    #[doc(hidden)]
    pub fn reads_answered(&self) -> u64 {
        self.seat.backup.reads_done()
    }

    /// How the pool stands.
    pub fn status(&self) -> GroupStatus {
        let map = self.seat.backup.map();
        let primary = map.primary_peer();
        let lead = self.seat.lead();
        let (is_primary, members, locks, unhealed) = match &*lead {
            Some(Lead { primary, server }) => {
                let unhealed = primary.scrubber.unhealed();
                (server.is_some(), primary.status(), primary.locks.counts(), unhealed)
            }
            None => (false, vec![self.seat.backup.status()], self.seat.backup.count_locks(), 0),
        };
        let witnesses = lead.as_ref().map_or_else(Vec::new, |lead| {
            let Primary { witnesses, env, .. } = &*lead.primary;
            witnesses.status(&map, env.now())
        });
        let voters = map.voting().collect();
        GroupStatus {
            epoch: map.epoch,
            primary,
            is_primary,
            enrolled: map.enrolled,
            voters,
            witnesses,
            members,
            unhealed,
            locks,
        }
    }

    /// Whether others say that it is no member any more.
    pub fn is_removed(&self) -> bool {
        self.seat.lead().is_none() && self.seat.backup.is_removed()
    }

    /// Whether it takes no part any more until it is opened again: its disk has failed, or another member has taken its place as the
    /// primary.
    pub fn has_failed(&self) -> bool {
        let lead = self.seat.lead();
        self.seat.backup.has_failed()
            || self.seat.maps.voter().is_some_and(|voter| voter.failed().is_some())
            || lead.as_ref().is_some_and(|lead| lead.primary.member.has_failed())
    }

    /// Makes everything durable that this member has, so that the next start has little to do, and stops its work: calls that are
    /// under way fail, and the disk is free when this and all file systems of it are dropped.
    ///
    /// # Errors
    /// What the disk says; [`Errno::ETIMEDOUT`] if changes wait for a member that is away. The next start makes them again.
    pub async fn end(&self) -> Result<(), Errno> {
        let lead = self.seat.lead().take();
        match lead {
            Some(lead) => {
                let member = &lead.primary.member;
                let ended = timeout(&*member.env, END_LIMIT, member.checkpoint()).await;
                lead.primary.close();
                ended.unwrap_or(Err(Errno::ETIMEDOUT))
            }
            None => self.seat.backup.end().await,
        }
    }
}

impl<D: Disk> LocalGroup for GroupMember<D> {
    fn is_removed(&self) -> bool {
        GroupMember::is_removed(self)
    }

    fn call(
        self: Arc<Self>,
        request: Request,
        limit: Duration,
    ) -> BoxFuture<'static, Result<Reply, CallError>> {
        Box::pin(async move { GroupMember::call(&self, request, limit).await })
    }
}

impl<D: Disk> GroupSeat<D> {
    fn lead(&self) -> MutexGuard<'_, Option<Lead<D>>> {
        self.lead.lock().expect("no holder of this lock panics")
    }

    /// Makes a call that the primary answers.
    async fn call_primary(&self, request: Request, limit: Duration) -> Result<Reply, CallError> {
        let primary = self.backup.primary();
        if primary.id == self.transport.local().id {
            let answered = self.answer(self.transport.local(), request);
            return match timeout(&*self.env, limit, answered).await {
                Ok(Ok(reply)) => Ok(reply),
                Ok(Err(refusal)) => Err(CallError::Refused(refusal)),
                Err(_) => Err(CallError::TimedOut),
            };
        }
        let until = self.env.now() + limit;
        if let Some(read) = ReplicaRead::of(&request) {
            let read = self.backup.read(read);
            if let Ok(Some(bytes)) = timeout(&*self.env, limit.min(READ_LIMIT), read).await {
                return Ok(ReplicaRead::reply(bytes));
            }
        }
        let limit = until.since(self.env.now());
        let Request { method, header, parts } = request;
        let request =
            Request { method, header: addressed(&self.settings.address(), &header), parts };
        let answered = self.transport.call(primary, request, limit);
        match select(answered, pin!(self.until_other_primary(primary))).await {
            Either::Left((answered, _)) => answered,
            Either::Right(_) => {
                Err(CallError::Unreachable("another one is the primary now".into()))
            }
        }
    }

    async fn until_other_primary(&self, primary: Peer) {
        while self.backup.primary().id == primary.id {
            sleep(&*self.env, LOOK_EVERY).await;
        }
    }

    /// Returns the pool's rules for files, from the newest roster that this member knows.
    fn rules(&self) -> RosterRules {
        match (self.settings.group, &self.siblings) {
            (GroupNumber::FIRST, _) | (_, None) => self.backup.map().roster.rules(),
            (_, Some(siblings)) => siblings.rules(),
        }
    }

    /// Takes the newest map over that somebody here has heard of.
    fn note_maps(&self) {
        self.maps.note_map(&self.backup.map());
        self.backup.note_map(&self.maps.map());
    }

    /// Does what the newest map that is known wants of this member.
    async fn follow_map(&self) -> Result<(), OpenError> {
        let followed = self.maps.follow().await;
        if !self.maps.map().enrolled.contains(self.transport.local().id) {
            return Err(OpenError::NotAMember);
        }
        match followed {
            Ok(()) => Ok(()),
            // It goes on as a member, and votes when there is room.
            Err(VoterError::Disk(Errno::ENOSPC)) => {
                tracing::warn!(
                    "the disk is full: this member cannot vote, or keep who the members are"
                );
                sleep(&*self.env, FULL_DISK_PAUSE).await;
                Ok(())
            }
            Err(error) => Err(OpenError::Votes(error)),
        }
    }

    /// It takes no part any more until it is opened again.
    fn fail(&self, problem: String) {
        let lead = self.lead().take();
        if let Some(lead) = lead {
            lead.primary.close();
        }
        self.backup.fail(problem);
    }

    /// Answers a call of the file system, or one about the members, if this member is the primary.
    async fn answer(&self, from: Peer, request: Request) -> Result<Reply, Refusal> {
        match request.method {
            EDIT => return self.answer_edit(&request).await,
            CROSSING => return self.answer_crossing(from.id, &request).await,
            MAP => return Ok(self.answer_map()),
            CHECK => return self.answer_check(&request),
            QUOTAS => return self.answer_quotas(from.id, &request).await,
            _ => {}
        }
        let served = {
            let lead = self.lead();
            let served =
                lead.as_ref().and_then(|lead| Some((lead.server.clone()?, lead.primary.clone())));
            served.ok_or_else(|| refuse("it is not the pool's primary"))?
        };
        let (server, primary) = served;
        let answered = server.handle(from, request).await;
        // What was read, or was wrong, may be so no more if there is another primary.
        primary.confirm().await.map_err(|()| {
            // Not the refusal of a call that no service has seen: it may have been made.
            Refusal::new(refused::UNCONFIRMED, "it is not the pool's primary any more")
        })?;
        answered
    }

    /// Answers what the primary of another group asks.
    async fn answer_crossing(&self, from: PeerId, request: &Request) -> Result<Reply, Refusal> {
        let malformed = || Refusal::new(Refusal::MALFORMED, "a call that cannot be read");
        let call = messages::decode::<CrossingCall>(&request.header).ok_or_else(malformed)?;
        let primary = self.serving().ok_or_else(|| refuse("it is not the pool's primary"))?;
        let fs = PoolFs::of_primary(primary.member.clone(), self.siblings.clone());
        let work = async move { fs.answer_crossing(Some(from), call).await };
        let answer = self.confirmed(&primary, work).await?.map_err(|errno| errno.0);
        Ok(Reply { header: messages::encode(&answer), parts: Vec::new() })
    }

    /// Runs a primary's work to its end, also if the caller stops waiting, and returns its result. The answer is refused if this member
    /// is no longer the primary at that time.
    async fn confirmed<T: Send + 'static>(
        &self,
        primary: &Arc<Primary<D>>,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Result<T, Refusal> {
        let (sender, answer) = oneshot::channel();
        self.env.spawn(Box::pin(async move {
            let _ = sender.send(work.await);
        }));
        let answered = answer.await.map_err(|oneshot::Canceled| refuse("it is being ended"))?;
        let ended =
            |()| Refusal::new(refused::UNCONFIRMED, "it is not the pool's primary any more");
        primary.confirm().await.map_err(ended)?;
        Ok(answered)
    }

    /// The newest map that this member knows.
    fn answer_map(&self) -> Reply {
        Reply { header: messages::encode(&self.maps.map()), parts: Vec::new() }
    }

    /// Answers a call that changes who the members are, if this member is the primary.
    async fn answer_edit(&self, request: &Request) -> Result<Reply, Refusal> {
        let malformed = || Refusal::new(Refusal::MALFORMED, "an edit that cannot be read");
        let edit = messages::decode::<PoolEdit>(&request.header).ok_or_else(malformed)?;
        let primary = self.serving().ok_or_else(|| refuse("it is not the pool's primary"))?;
        match primary.edit(edit).await {
            Ok(map) => Ok(Reply { header: messages::encode(&map), parts: Vec::new() }),
            Err(NotEdited::Refused(why)) => Err(Refusal::new(refused::EDIT, why)),
            Err(NotEdited::Ended) => Err(refuse("it is not the pool's primary any more")),
            Err(NotEdited::HandsOver) => {
                // The others notice its silence.
                self.fail("another member is to be the primary".into());
                Err(Refusal::new(refused::HANDS_OVER, "another member is to be the primary"))
            }
        }
    }

    /// Answers how far the scrub is, and begins one if that is asked for, if this member is the primary.
    fn answer_check(&self, request: &Request) -> Result<Reply, Refusal> {
        let malformed = || Refusal::new(Refusal::MALFORMED, "a call that cannot be read");
        let begins: bool = messages::decode(&request.header).ok_or_else(malformed)?;
        let primary = self.serving().ok_or_else(|| refuse("it is not the pool's primary"))?;
        let report = primary.scrubber.report(begins, self.env.now());
        Ok(Reply { header: messages::encode(&report), parts: Vec::new() })
    }

    /// Answers a call about limits, if this member is the primary.
    async fn answer_quotas(&self, from: PeerId, request: &Request) -> Result<Reply, Refusal> {
        let malformed = || Refusal::new(Refusal::MALFORMED, "a call that cannot be read");
        let call = messages::decode::<QuotaCall>(&request.header);
        let call = call.filter(QuotaCall::is_sound).ok_or_else(malformed)?;
        let primary = self.serving().ok_or_else(|| refuse("it is not the pool's primary"))?;
        let (own, siblings) = (primary.clone(), self.siblings.clone());
        let work = async move { own.answer_quotas(from, call, siblings.as_ref()).await };
        let answer = self.confirmed(&primary, work).await??;
        Ok(Reply { header: messages::encode(&answer), parts: Vec::new() })
    }

    /// This member as the primary, if it serves clients.
    fn serving(&self) -> Option<Arc<Primary<D>>> {
        let lead = self.lead();
        let served = lead.as_ref().filter(|lead| lead.server.is_some())?;
        Some(served.primary.clone())
    }

    /// Tells the pool where this node listens, if that is not known.
    async fn say_address(&self) {
        let local = self.transport.local();
        let known = self.backup.map().enrolled.get(local.id);
        if known.is_none_or(|known| known == local) {
            return;
        }
        let header = messages::encode(&PoolEdit::Enrol(local));
        let request = Request { method: EDIT, header, parts: Vec::new() };
        // What fails is tried again.
        drop(self.call_primary(request, ASK_LIMIT).await);
    }

    /// Becomes the primary, if the primary is gone and nobody else has become it.
    async fn propose_itself(self: &Arc<Self>, standing: FollowerStanding) -> Result<(), OpenError> {
        let local = self.transport.local().id;
        let Some(current) = self.backup.give_up(standing) else { return Ok(()) };
        let (members, verifier) = match standing {
            FollowerStanding::Content => return Ok(()),
            // Bytes may have been lost with the memory of its machine.
            FollowerStanding::Restarted => ([local].into(), self.run),
            FollowerStanding::Uninterrupted => {
                let mut members = current.members.clone();
                // Its own proposal may have been decided without its hearing of that: then nobody has led since.
                if current.primary != local {
                    members.remove(&current.primary);
                }
                (members, current.verifier)
            }
        };
        let epoch = current.epoch.saturating_add(1);
        let map = PoolMap { epoch, primary: local, run: self.run, verifier, members, ..current };
        // It may be decided at any time from now on: until it is known, the primary of this epoch is answered no more.
        let decided = match self.maps.propose(&map, ASK_LIMIT).await {
            Ok(decided) => decided,
            Err(error) => {
                self.backup.note_removed(error == AskError::NotAMember);
                return Ok(());
            }
        };
        self.backup.note_map(&decided);
        if decided != map {
            return Ok(());
        }
        tracing::info!("this member is the primary of epoch {epoch} of its pool");
        self.begin_lead(&map).await
    }

    async fn begin_lead(self: &Arc<Self>, map: &PoolMap) -> Result<(), OpenError> {
        let Ok(follower) = self.backup.lead().await else { return Ok(()) };
        let failed = |errno| OpenError::Disk("cannot begin as the primary", errno);
        let (member, applied) = match follower {
            Follower::Uninterrupted(member) => {
                let applied = member.followed().map_or(0, |(applied, _)| applied);
                (member, applied)
            }
            Follower::Restarted(unrecovered) => {
                let (member, report) = unrecovered.recover(Makes::All).await?;
                tracing::info!(?report, "the disk is in order");
                let applied = member.changes_so_far();
                let last_epoch = member.log().epoch_of(applied);
                if revival(last_epoch) != revival(map.epoch) {
                    let secs = revival_secs(map.epoch);
                    member.skip_numbers(secs).await.map_err(failed)?;
                }
                (member, applied)
            }
        };
        let pool = self.settings.address();
        let backups = Arc::new(Backups::new(&self.env, &self.transport, pool, map, applied));
        let (env, copy) = (&self.env, self.backup.take_locks());
        let locks = LockKeeper::of_primary(env, &backups, copy.for_primary(map.epoch));
        let parts = (member.clone(), backups.clone(), locks.clone());
        member.set_rules(self.rules());
        let primary = Primary::start(env, &self.transport, parts, map.run);
        *self.lead() = Some(Lead { primary: primary.clone(), server: None });
        self.env.spawn(Box::pin(EpochMembership::keep(Arc::downgrade(self), primary.clone())));
        let began = PoolChange::Began { epoch: map.epoch };
        let inherited = async {
            match member.followed() {
                Some(_) => inherit(&member, &backups, began).await?,
                None => {
                    member.lead(backups.clone());
                    member.change(began).await?;
                }
            }
            locks.hand_whole().await
        };
        match inherited.await {
            // Another member has become the primary meanwhile, and this one's work was ended.
            Err(_) if self.lead().is_none() => return Ok(()),
            inherited => inherited.map_err(failed)?,
        }
        member.begin_unlinked(REOPENED_WITHIN, SESSION_TIME).await.map_err(failed)?;
        self.env.spawn(Box::pin(keep_open_names(Arc::downgrade(&primary), self.env.clone())));
        primary.note_ready();
        let scrub =
            Scrub::keep(Arc::downgrade(&primary), primary.scrubber.clone(), self.env.clone());
        self.env.spawn(Box::pin(scrub));
        let limits = keep_quotas(Arc::downgrade(&primary), self.siblings.clone(), self.env.clone());
        self.env.spawn(Box::pin(limits));
        if let Some(siblings) = &self.siblings {
            let (primary, siblings) = (Arc::downgrade(&primary), siblings.clone());
            self.env.spawn(Box::pin(keep_above(primary, siblings, self.env.clone())));
        }
        if self.siblings.is_some() {
            let primary = Arc::downgrade(&primary);
            self.env.spawn(Box::pin(keep_crossings(primary, self.siblings.clone())));
        }
        let fs = Arc::new(PoolFs::of_primary(member, self.siblings.clone()));
        let server = RemoteServer::with_locks(self.env.clone(), fs, map.verifier, locks);
        let mut lead = self.lead();
        // It may have been ended, or another member the primary, meanwhile.
        if let Some(lead) = lead.as_mut().filter(|lead| Arc::ptr_eq(&lead.primary, &primary)) {
            backups.serve(server.boot());
            lead.server = Some(server);
        }
        Ok(())
    }

    /// A map was decided by which another member is the primary.
    fn end_lead(&self, primary: &Arc<Primary<D>>, decided: &PoolMap) {
        self.backup.note_map(decided);
        primary.close();
        let mut lead = self.lead();
        if lead.as_ref().is_some_and(|lead| Arc::ptr_eq(&lead.primary, primary)) {
            *lead = None;
            drop(lead);
            self.backup.fail("another member is the primary now".into());
        }
    }

    /// What other members of the epoch say, of those that answer.
    async fn others_stand(&self) -> Vec<HelloReply> {
        let map = self.backup.map();
        let local = self.transport.local().id;
        let others = map.enrolled.peers().iter();
        let others = others.filter(|peer| peer.id != local && map.members.contains(&peer.id));
        let asked = others.map(|peer| async {
            let header = addressed(&self.settings.address(), &[]);
            let request = Request { method: HELLO, header, parts: Vec::new() };
            let reply = self.transport.call(*peer, request, HELLO_LIMIT).await.ok()?;
            messages::decode::<HelloReply>(&reply.header)
        });
        join_all(asked).await.into_iter().flatten().collect()
    }

    /// Whether this member, which was restarted, may propose itself: since `since` it leaves that to others that were not. It never
    /// does if another one has more changes: all have those that were answered, so its own disk was set back to an older state, or
    /// that one has changes that nobody waits for.
    async fn may_propose_itself(&self, since: Instant) -> bool {
        let others = self.others_stand().await;
        let own = self.backup.found();
        let has_more = |other: &HelloReply| (other.last_epoch, other.last) > (own.epoch, own.last);
        let is_uninterrupted = |other: &HelloReply| other.session > 0;
        let defers = self.env.now().since(since) > DEFERS;
        !others.iter().any(has_more) && (defers || !others.iter().any(is_uninterrupted))
    }
}

/// Goes on with changes over several groups that a primary before has left, or whose messages were lost.
async fn keep_crossings<D: Disk>(
    primary: Weak<Primary<D>>,
    siblings: Option<Arc<dyn SiblingGroups>>,
) {
    loop {
        let Some((env, member)) =
            primary.upgrade().map(|own| (own.env.clone(), own.member.clone()))
        else {
            return;
        };
        if member.has_failed() {
            return;
        }
        PoolFs::of_primary(member, siblings.clone()).resume_crossings().await;
        sleep(&*env, RESUME_EVERY).await;
    }
}

/// Gives all members what this one has, and makes it.
async fn inherit<D: Disk>(
    member: &Arc<PoolMember<D>>,
    backups: &Arc<Backups>,
    began: PoolChange,
) -> DiskResult<()> {
    let order = member.changes_so_far() + 1;
    let change = began.encode();
    member.accept(order, began).await?;
    member.sync_changes().await?;
    backups.hand(ItemKind::Append { order, change }, Bytes::new()).await?;
    member.release(order).await?;
    backups.release_inherited(order);
    member.lead(backups.clone());
    Ok(())
}

/// Does what maps want of this member, as long as it is at work: beside [`keep_seat`], which does not wait for the disk.
async fn keep_map<D: Disk>(seat: Weak<GroupSeat<D>>, env: Env) {
    loop {
        sleep(&*env, LOOK_EVERY).await;
        let Some(own) = seat.upgrade() else { return };
        own.note_maps();
        if own.backup.has_failed() {
            continue;
        }
        match own.follow_map().await {
            Ok(()) => own.say_address().await,
            Err(error) => own.fail(error.to_string()),
        }
    }
}

/// Looks whether this member has to be the primary, as long as it is at work.
async fn keep_seat<D: Disk>(seat: Weak<GroupSeat<D>>, env: Env) {
    let mut asked = env.now();
    let mut silent_since = None;
    loop {
        sleep(&*env, LOOK_EVERY).await;
        let Some(own) = seat.upgrade() else { return };
        if own.backup.has_failed() {
            continue;
        }
        own.note_maps();
        if own.lead().is_some() || own.backup.has_failed() {
            continue;
        }
        let standing = own.backup.stand();
        let is_due = match standing {
            FollowerStanding::Content => {
                silent_since = None;
                false
            }
            FollowerStanding::Uninterrupted => true,
            FollowerStanding::Restarted => {
                let since = *silent_since.get_or_insert(env.now());
                own.may_propose_itself(since).await
            }
        };
        if is_due {
            if let Err(error) = own.propose_itself(standing).await {
                own.backup.fail(error.to_string());
            }
        } else if own.backup.is_silent() && env.now().since(asked) > ASK_EVERY {
            asked = env.now();
            match own.maps.ask(ASK_LIMIT).await {
                Ok(map) => own.backup.note_map(&map),
                Err(error) => own.backup.note_removed(error == AskError::NotAMember),
            }
        }
    }
}

/// What peers may ask of a member.
struct SeatService<D: Disk> {
    seat: Weak<GroupSeat<D>>,
}

impl<D: Disk> Service for SeatService<D> {
    fn handle(&self, from: Peer, request: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        let seat = self.seat.upgrade();
        Box::pin(async move {
            let seat = seat.ok_or_else(|| refuse("it is being ended"))?;
            let is_for_all = matches!(request.method, CROSSING | EDIT | MAP | CHECK | QUOTAS)
                || METHODS.contains(&request.method);
            let is_sibling = is_for_all
                && seat.siblings.as_ref().is_some_and(|siblings| siblings.is_member(from.id));
            let is_vote = matches!(request.method, VOTER_MESSAGE | PROPOSE | SEEN);
            let is_witness = (is_for_all || is_vote) && seat.maps.map().witnesses.contains(from.id);
            if !seat.backup.is_enrolled(from.id) && !is_sibling && !is_witness {
                let text = "the caller is no member of the pool";
                return Err(Refusal::new(refused::NOT_A_MEMBER, text));
            }
            match request.method {
                HELLO | BEGIN | ITEM | BEAT | COPY | COPY_BATCH | SCRUB => {
                    seat.backup.handle(from, request).await
                }
                VOTER_MESSAGE | PROPOSE | SEEN => seat.maps.handle(from, request).await,
                CROSSING => seat.answer_crossing(from.id, &request).await,
                MAP => Ok(seat.answer_map()),
                method if matches!(method, EDIT | CHECK | QUOTAS) || METHODS.contains(&method) => {
                    seat.answer(from, request).await
                }
                _ => Err(Refusal::new(Refusal::UNKNOWN_METHOD, "no such call")),
            }
        })
    }
}

fn refuse(why: &str) -> Refusal {
    Refusal::new(Refusal::OVERLOADED, why)
}
