//! A member that follows: it keeps the primary's changes and makes those that are released, writes the bytes that it is handed, and
//! answers when it has them.
//!
//! **Sessions.** The primary begins one with each run of this process; calls of another session are refused, so that a call which
//! comes late changes nothing. A session begins when all that was under way in the one before has ended. Within it each item has a
//! number, and is done once, however often it is called for.
//!
//! **Promises.** An answer within a session promises the primary that this member follows nobody else for a while (PacificA, section
//! 2.3). It keeps that promise by its own silence: before it proposes another primary it has not heard of the one it follows for
//! longer than the promise lasts, and from then on it answers nothing of that epoch any more ([`Backup::stand`]).
//!
//! **Reads** of clients on this machine are answered from its own copy under a lease of the primary ([`reading`]). A lease is of one session: it ends
//! when that ends, when this member proposes another primary, and when its disk fails.
//!
//! Until the first session the disk is as a crash has left it: which changes of the journal are to be made, the primary says, or this
//! member when it becomes the primary. A run without a session may have lost bytes that were answered, with its machine's memory.

mod copied;
mod reading;

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use atoll_env::{BoxFuture, Env, Instant, Moment, Notify, timeout};
use atoll_key::PeerId;
use atoll_net::{Peer, Refusal, Reply, Request, Service};
use atoll_vfs::Errno;
use bytes::Bytes;
use futures_channel::oneshot;

use self::reading::ReplicaReads;
use super::MemberStatus;
use crate::backups::SUSPECT_AFTER;
use crate::change::{MAX_CHANGE_BYTES, PoolChange};
use crate::disk::Disk;
use crate::layout::FileId;
use crate::locks::{CopyOutcome, LockCopy};
use crate::map::PoolMap;
use crate::member::{CopiedMember, LogStand, Makes, OpenError, PoolMember, UnrecoveredMember};
use crate::messages::{
    self, BEAT, BEGIN, BackupReport, Beat, BeginSession, COPY, COPY_BATCH, CopyHeader, CopyStage,
    GroupSession, HELLO, HelloReply, ITEM, ItemHeader, ItemKind, MAX_BATCH_BYTES, SCRUB, ScrubCall,
    refused,
};
use crate::remote::ReplicaRead;
use crate::turns::Turns;

/// How long an item waits for changes that come before it, until it is called for again.
const WAIT_FOR_EARLIER: Duration = Duration::from_millis(500);
/// A primary that has not called for so long is said to be away.
const SILENT_AFTER: Duration = Duration::from_secs(5);
/// How often a primary counts as heard of that begins a session.
const HEAR_EVERY: Duration = Duration::from_millis(100);
/// A run that has not been spoken to waits so long before it proposes itself.
const RESTARTED_WAITS: Duration = Duration::from_secs(1);
/// The most items of a session that are under way.
const MAX_ITEMS: u64 = 16 << 10;

/// What a member that led nobody was, when it becomes the primary.
pub(super) enum Follower<D: Disk> {
    Restarted(Box<UnrecoveredMember<D>>),
    Uninterrupted(Arc<PoolMember<D>>),
}

type ItemOutcome = Result<(), Refusal>;

/// An item of the session.
enum ItemProgress {
    /// It is being done; these calls wait for it.
    UnderWay(Vec<oneshot::Sender<ItemOutcome>>),
    Done(ItemOutcome),
}

enum Phase<D: Disk> {
    /// As a crash has left it.
    Unrecovered(Box<UnrecoveredMember<D>>),
    /// The changes of the journal are being made again.
    Recovering,
    /// It is given names of all files; it has none of its own.
    Copying(Arc<CopiedMember<D>>),
    Serving(Arc<PoolMember<D>>),
    /// This member is the primary, or about to be.
    Leading,
    /// The disk failed, or is not as it should be.
    Failed(String),
}

/// A follower that could be the primary.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum FollowerStanding {
    /// The primary is heard of.
    Content,
    /// It is silent. This run has had everything that was answered, bytes too.
    Uninterrupted,
    /// It is silent. This run has every change that was answered; bytes that were not synced may have been lost.
    Restarted,
}

struct BackupState<D: Disk> {
    phase: Phase<D>,
    /// The number of the last session.
    sessions: u64,
    session: Option<GroupSession>,
    /// The newest map that a primary has told of.
    map: PoolMap,
    /// Primaries of this epoch and of those before are answered no more.
    given_up: u64,
    items: BTreeMap<u64, ItemProgress>,
    /// All items before this one are answered.
    answered: u64,
    released: u64,
    /// When the primary called last, or this run began.
    heard: Instant,
    /// The voters that it knows said so.
    is_removed: bool,
    /// Items that wait for a change to be written or made.
    waiting: Vec<oneshot::Sender<()>>,
    /// The locks of the pool's clients.
    locks: LockCopy,
    /// What may be read here in this session.
    reads: ReplicaReads,
    /// How many reads were answered here.
    reads_done: u64,
}

/// See the module.
pub(super) struct Backup<D: Disk> {
    env: Env,
    local: Peer,
    run: u64,
    /// Where it stood before the first session.
    found: LogStand,
    /// Whether it may have lost changes, with its index.
    is_doubtful: bool,
    state: Mutex<BackupState<D>>,
    /// Shared by items under way; a session begins alone.
    under_way: Turns,
    has_released: Arc<Notify>,
    own: Weak<Backup<D>>,
}

impl<D: Disk> Backup<D> {
    pub(super) fn new(
        env: Env,
        local: Peer,
        map: &PoolMap,
        unrecovered: UnrecoveredMember<D>,
    ) -> Result<Arc<Backup<D>>, OpenError> {
        let found = unrecovered.stands()?;
        let is_doubtful = !unrecovered.has_index();
        let backup = Arc::new_cyclic(|own| Backup {
            run: env.random_u64(),
            local,
            found,
            is_doubtful,
            state: Mutex::new(BackupState {
                phase: Phase::Unrecovered(Box::new(unrecovered)),
                sessions: 0,
                session: None,
                map: map.clone(),
                given_up: 0,
                items: BTreeMap::new(),
                answered: 0,
                released: 0,
                heard: env.now(),
                is_removed: false,
                waiting: Vec::new(),
                locks: LockCopy::default(),
                reads: ReplicaReads::default(),
                reads_done: 0,
            }),
            under_way: Turns::default(),
            has_released: Arc::default(),
            own: own.clone(),
            env,
        });
        Ok(backup)
    }

    fn state(&self) -> MutexGuard<'_, BackupState<D>> {
        self.state.lock().expect("no holder of this lock panics")
    }

    /// Whether the pool knows this member no more.
    pub(super) fn is_removed(&self) -> bool {
        self.state().is_removed
    }

    pub(super) fn status(&self) -> MemberStatus {
        let state = self.state();
        let is_silent = self.env.now().since(state.heard) > SILENT_AFTER;
        let problem = match (&state.phase, state.session) {
            (Phase::Failed(problem), _) => Some(problem.clone()),
            _ if state.is_removed => Some("the pool knows this member no more".to_owned()),
            (Phase::Copying(_), _) => Some("it is given the names of all files".to_owned()),
            (Phase::Unrecovered(_) | Phase::Serving(_), None) => {
                Some("no primary has called yet".to_owned())
            }
            (Phase::Recovering, _) => Some("it is being brought in order".to_owned()),
            (Phase::Leading, _) => Some("it becomes the primary".to_owned()),
            (_, Some(_)) if is_silent => Some("the primary does not call".to_owned()),
            (_, Some(_)) => None,
        };
        let applied = match &state.phase {
            Phase::Serving(member) => member.followed().map_or(0, |(applied, _)| applied),
            _ => self.found.applied,
        };
        MemberStatus {
            peer: self.local,
            is_member: state.map.members.contains(&self.local.id),
            problem,
            applied,
            free_bytes: None,
            files_to_mend: 0,
            copying: None,
            silence: Duration::ZERO,
        }
    }

    pub(super) fn has_failed(&self) -> bool {
        matches!(self.state().phase, Phase::Failed(_))
    }

    pub(super) async fn end(&self) -> Result<(), Errno> {
        let member = match &self.state().phase {
            Phase::Serving(member) => member.clone(),
            _ => return Ok(()),
        };
        member.checkpoint().await
    }

    /// Where it stood when it was opened.
    pub(super) fn found(&self) -> LogStand {
        self.found.clone()
    }

    /// Whether a node is a member of the pool, as far as this one knows.
    pub(super) fn is_enrolled(&self, id: PeerId) -> bool {
        self.state().map.enrolled.contains(id)
    }

    /// Who is the primary, as far as this member knows.
    pub(super) fn primary(&self) -> Peer {
        self.state().map.primary_peer()
    }

    /// The newest map that it knows.
    pub(super) fn map(&self) -> PoolMap {
        self.state().map.clone()
    }

    /// A map that was decided.
    pub(super) fn note_map(&self, map: &PoolMap) {
        let mut state = self.state();
        if map.epoch > state.map.epoch {
            state.map = map.clone();
            // Its primary has time to call.
            state.heard = self.env.now();
        }
    }

    /// Whether the voters say that this is no member any more.
    pub(super) fn note_removed(&self, is_removed: bool) {
        self.state().is_removed = is_removed;
    }

    /// Whether it could be the primary, and should be.
    pub(super) fn stand(&self) -> FollowerStanding {
        self.standing(&self.state())
    }

    fn standing(&self, state: &BackupState<D>) -> FollowerStanding {
        let silence = self.env.now().since(state.heard);
        let is_member = state.map.members.contains(&self.local.id)
            && !self.is_doubtful
            && self.copy_stage(state).is_none()
            // A disk without any change is that of a pool that begins, or was made anew.
            && (state.map.epoch == 1 || self.found.last > 0 || state.sessions > 0);
        match (&state.phase, state.sessions) {
            (Phase::Serving(_), _) if is_member && silence > SUSPECT_AFTER => {
                FollowerStanding::Uninterrupted
            }
            // Promises of the run before have ended, and members that were not restarted come first.
            (Phase::Unrecovered(_), 0) if is_member && silence > RESTARTED_WAITS => {
                FollowerStanding::Restarted
            }
            _ => FollowerStanding::Content,
        }
    }

    /// How far it is that is given all files; none if it is complete.
    fn copy_stage(&self, state: &BackupState<D>) -> Option<CopyStage> {
        match &state.phase {
            Phase::Unrecovered(member) => member.copy_stage(),
            Phase::Serving(member) => member.copy_stage(),
            Phase::Copying(_) => Some(CopyStage::Names),
            Phase::Recovering | Phase::Leading | Phase::Failed(_) => None,
        }
    }

    /// Whether no primary has called for long.
    pub(super) fn is_silent(&self) -> bool {
        self.env.now().since(self.state().heard) > SUSPECT_AFTER
    }

    /// Answers nothing of the present epoch any more: this member proposes the next one. Returns the map of the present one; none if
    /// it does not stand like that any more, since a primary was heard of meanwhile.
    pub(super) fn give_up(&self, standing: FollowerStanding) -> Option<PoolMap> {
        let mut state = self.state();
        if self.standing(&state) != standing {
            return None;
        }
        state.given_up = state.map.epoch;
        state.session = None;
        Some(state.map.clone())
    }

    /// Ends its work as a follower, to be the primary. Everything that it was called for has ended.
    pub(super) async fn lead(&self) -> Result<Follower<D>, ()> {
        let _alone = self.under_way.write(0).await;
        let mut state = self.state();
        state.session = None;
        match std::mem::replace(&mut state.phase, Phase::Leading) {
            Phase::Unrecovered(unrecovered) => Ok(Follower::Restarted(unrecovered)),
            Phase::Serving(member) => Ok(Follower::Uninterrupted(member)),
            other => {
                state.phase = other;
                Err(())
            }
        }
    }

    /// Takes the copy of the locks, for a member that becomes the primary.
    pub(super) fn take_locks(&self) -> LockCopy {
        std::mem::take(&mut self.state().locks)
    }

    /// How many lock sessions there are, and how many locks, as this member knows it.
    pub(super) fn count_locks(&self) -> (usize, usize) {
        self.state().locks.counts()
    }

    fn serving(&self) -> Result<Arc<PoolMember<D>>, Refusal> {
        match &self.state().phase {
            Phase::Serving(member) => Ok(member.clone()),
            Phase::Failed(problem) => Err(Refusal::new(refused::DISK, problem.clone())),
            Phase::Unrecovered(_) | Phase::Recovering | Phase::Copying(_) => Err(no_session()),
            Phase::Leading => Err(not_primary()),
        }
    }

    /// Nothing is done any more on this disk until it is opened again.
    pub(super) fn fail(&self, problem: String) -> Refusal {
        tracing::error!("this member of a pool takes no part any more: {problem}");
        let mut state = self.state();
        state.phase = Phase::Failed(problem.clone());
        state.session = None;
        Refusal::new(refused::DISK, problem)
    }

    fn hello(&self) -> Result<Reply, Refusal> {
        let state = self.state();
        let LogStand { last, epoch, epochs, applied } = match &state.phase {
            Phase::Serving(member) => member.log_stand().unwrap_or_default(),
            Phase::Unrecovered(_) => self.found.clone(),
            Phase::Copying(_) => LogStand::default(),
            Phase::Recovering => {
                return Err(Refusal::new(Refusal::OVERLOADED, "it is being brought in order"));
            }
            Phase::Leading => return Err(not_primary()),
            Phase::Failed(problem) => return Err(Refusal::new(refused::DISK, problem.clone())),
        };
        let (run, session, copying) = (self.run, state.sessions, self.copy_stage(&state));
        Ok(reply(&HelloReply { run, session, last, last_epoch: epoch, epochs, applied, copying }))
    }

    async fn begin(self: Arc<Self>, from: PeerId, begin: BeginSession) -> Result<Reply, Refusal> {
        let BeginSession { session, map, last, released, withdrawn } = begin;
        if map.primary != from || !map.is_sound() || !map.enrolled.contains(self.local.id) {
            return Err(Refusal::new(Refusal::MALFORMED, "a map that names another primary"));
        }
        let mut alone = pin!(self.under_way.write(0));
        let _alone = loop {
            // A sync under way may take long: the caller is there all the same.
            self.hear(&mut self.state(), &map)?;
            if let Ok(alone) = timeout(&*self.env, HEAR_EVERY, alone.as_mut()).await {
                break alone;
            }
        };
        let member = {
            let mut state = self.state();
            self.hear(&mut state, &map)?;
            if session.backup_run != self.run
                || session.number <= state.sessions
                || self.copy_stage(&state) == Some(CopyStage::Names)
            {
                return Err(no_session());
            }
            state.sessions = session.number;
            state.session = None;
            match std::mem::replace(&mut state.phase, Phase::Recovering) {
                Phase::Unrecovered(member) => Err(member),
                other => {
                    state.phase = other;
                    Ok(())
                }
            }
        };
        match member {
            Err(unrecovered) => {
                let withdrawn = withdrawn.into_iter().collect();
                let makes = Makes::Released { upto: released.min(last), last, withdrawn };
                match unrecovered.recover(makes).await {
                    Ok((member, report)) => {
                        if report.changes_redone > 0 {
                            tracing::info!("{} changes were made again", report.changes_redone);
                        }
                        self.serve(member);
                    }
                    Err(error) => return Err(self.fail(error.to_string())),
                }
            }
            Ok(()) => match self.serving()?.cut_off(last).await {
                Ok(()) => self.serving()?.note_withdrawn(withdrawn),
                Err(Errno::ESTALE) => {
                    let text = OpenError::PrimaryIsOlder.to_string();
                    return Err(Refusal::new(refused::PRIMARY_IS_OLDER, text));
                }
                Err(errno) => return Err(self.fail(format!("its journal: {errno}"))),
            },
        }
        {
            let mut state = self.state();
            // It may have taken long.
            self.hear(&mut state, &map)?;
            state.session = Some(session);
            state.reads = ReplicaReads::default();
            state.items.clear();
            state.answered = 0;
            state.released = 0;
        }
        self.note_released(session, released);
        Ok(Reply::default())
    }

    /// From now on it follows.
    fn serve(&self, member: Arc<PoolMember<D>>) {
        self.state().phase = Phase::Serving(member);
        let own = self.own.clone();
        self.env.spawn(Box::pin(make_released(own)));
    }

    /// A primary calls, by this map. Refused if another one is known, or was proposed.
    fn hear(&self, state: &mut BackupState<D>, map: &PoolMap) -> Result<(), Refusal> {
        if map.epoch < state.map.epoch || map.epoch <= state.given_up {
            return Err(not_primary());
        }
        if map.epoch > state.map.epoch {
            state.map = map.clone();
        }
        state.heard = self.env.now();
        state.is_removed = false;
        Ok(())
    }

    // ---- reads ----

    /// The session in which clients of a run of the primary's server may be answered now.
    fn read_session(&self, state: &BackupState<D>, boot: u64) -> Option<GroupSession> {
        let session = state.session?;
        // A newer map may be known that no primary has told of yet.
        let is_member =
            state.map.run == session.primary_run && state.map.members.contains(&self.local.id);
        let is_leased = || state.reads.is_leased(boot, Moment::now(&*self.env));
        (is_member && is_leased()).then_some(session)
    }

    /// Answers a read from this member's own copy; none if it must be asked of the primary.
    pub(super) async fn read(&self, read: ReplicaRead) -> Option<Bytes> {
        let ReplicaRead { boot, inode, offset, len } = read;
        let id = FileId::from(inode);
        let (member, session) = {
            let state = self.state();
            let Phase::Serving(member) = &state.phase else { return None };
            let session = self.read_session(&state, boot)?;
            (member.clone(), session)
        };
        let may_read = || {
            let state = self.state();
            self.read_session(&state, boot) == Some(session) && state.reads.is_settled(id)
        };
        let bytes = member.read_here(id, (offset, len), may_read).await;
        // One that cannot be read here may be so elsewhere.
        let bytes = bytes.ok().flatten()?;
        let mut state = self.state();
        if self.read_session(&state, boot) != Some(session) {
            // The bytes may be old by now.
            return None;
        }
        state.reads_done += 1;
        Some(bytes)
    }

    /// How many reads were answered here.
    pub(super) fn reads_done(&self) -> u64 {
        self.state().reads_done
    }

    /// What the primary has released is made by [`make_released`].
    fn note_released(&self, session: GroupSession, released: u64) {
        let mut state = self.state();
        if state.session == Some(session) && released > state.released {
            state.released = released;
            self.has_released.notify();
        }
    }

    /// Why a call's session is not the one of this member.
    fn no_session_of(&self, state: &BackupState<D>) -> Refusal {
        match state.session.is_none() && state.given_up >= state.map.epoch {
            true => not_primary(),
            false => no_session(),
        }
    }

    async fn report(&self, member: &PoolMember<D>) -> Result<Reply, Refusal> {
        let (free_bytes, size_bytes) = member.room().await.unwrap_or_default();
        let applied = member.followed().map_or(0, |(applied, _)| applied);
        Ok(reply(&BackupReport { free_bytes, size_bytes, applied }))
    }

    async fn beat(self: Arc<Self>, beat: Beat) -> Result<Reply, Refusal> {
        let member = self.serving()?;
        {
            let mut state = self.state();
            if state.session != Some(beat.session) {
                return Err(self.no_session_of(&state));
            }
            match beat.map {
                Some(map) if !map.is_sound() => {
                    return Err(Refusal::new(Refusal::MALFORMED, "a map that cannot be"));
                }
                Some(map) => self.hear(&mut state, &map)?,
                None => state.heard = self.env.now(),
            }
            let now = Moment::now(&*self.env);
            state.reads.note_settled(beat.settled);
            state.reads.note_beat(beat.number, beat.lease, now);
        }
        self.note_released(beat.session, beat.released);
        self.report(&member).await
    }

    async fn item(self: Arc<Self>, header: ItemHeader, bytes: Bytes) -> Result<Reply, Refusal> {
        let member = self.serving()?;
        if !header.what.is_sound(bytes.len()) {
            return Err(Refusal::new(Refusal::MALFORMED, "an item with lengths that cannot be"));
        }
        let answer = {
            let mut state = self.state();
            if state.session != Some(header.session) {
                return Err(self.no_session_of(&state));
            }
            state.heard = self.env.now();
            state.reads.note_settled(header.settled);
            state.answered = state.answered.max(header.answered);
            let answered = state.answered;
            if header.number < answered {
                return Err(Refusal::new(Refusal::MALFORMED, "an item that was answered"));
            }
            state.items = state.items.split_off(&answered);
            if header.number - answered >= MAX_ITEMS {
                return Err(Refusal::new(Refusal::OVERLOADED, "too many items at once"));
            }
            let (sender, answer) = oneshot::channel();
            match state.items.get_mut(&header.number) {
                Some(ItemProgress::Done(answer)) => {
                    let _ = sender.send(answer.clone());
                }
                Some(ItemProgress::UnderWay(waiting)) => waiting.push(sender),
                None => {
                    state.items.insert(header.number, ItemProgress::UnderWay(vec![sender]));
                    if header.what.changes_bytes()
                        && let Some(id) = header.what.file()
                    {
                        state.reads.note_item(header.number, id);
                    }
                    // It goes on if the call is given up.
                    let (backup, member) = (self.clone(), member.clone());
                    let ItemHeader { session, number, released, what, .. } = header.clone();
                    self.env.spawn(Box::pin(async move {
                        let done = backup.do_item(&member, (session, released), what, bytes).await;
                        backup.end_item(session, number, done);
                    }));
                }
            }
            answer
        };
        self.note_released(header.session, header.released);
        match answer.await {
            Ok(done) => done?,
            Err(oneshot::Canceled) => return Err(no_session()),
        }
        self.report(&member).await
    }

    fn end_item(&self, session: GroupSession, number: u64, done: ItemOutcome) {
        let waiting = {
            let mut state = self.state();
            if state.session != Some(session) {
                return;
            }
            let is_final = !matches!(&done, Err(refusal) if refusal.code == Refusal::OVERLOADED);
            let progress = match is_final {
                true => state.items.insert(number, ItemProgress::Done(done.clone())),
                // It is done when it is called for again.
                false => state.items.remove(&number),
            };
            match progress {
                Some(ItemProgress::UnderWay(waiting)) => waiting,
                _ => Vec::new(),
            }
        };
        for waiting in waiting {
            let _ = waiting.send(done.clone());
        }
    }

    async fn do_item(
        &self,
        member: &Arc<PoolMember<D>>,
        (session, released): (GroupSession, u64),
        what: ItemKind,
        bytes: Bytes,
    ) -> ItemOutcome {
        let _under_way = self.under_way.read(0).await;
        if self.state().session != Some(session) {
            return Err(no_session());
        }
        if let ItemKind::Locks(place) = &what {
            return match self.state().locks.take(session.primary_run, *place, &bytes) {
                Ok(CopyOutcome::Made) => Ok(()),
                Ok(CopyOutcome::TooEarly) => Err(too_early()),
                Err(_) => Err(Refusal::new(Refusal::MALFORMED, "locks that cannot be")),
            };
        }
        if let ItemKind::Append { order, change } = &what {
            let Some(change) = PoolChange::decode(change) else {
                return Err(Refusal::new(Refusal::MALFORMED, "a change that cannot be read"));
            };
            self.once_ready(|| member.followed().is_some_and(|(_, last)| last + 1 >= *order))
                .await?;
            match member.accept(*order, change).await {
                Ok(()) => {}
                Err(Errno::EAGAIN) => return Err(too_early()),
                Err(errno) => return Err(self.fail(format!("its journal: {errno}"))),
            }
            self.wake_waiting();
            // A change before it may wait for the release that came with it.
            self.has_released.notify();
            let synced = member.sync_changes().await;
            return synced.map_err(|errno| self.fail(format!("its journal: {errno}")));
        }
        // What was released before is made before: the file may be that of a change which was released just now.
        let after = what.after().max(released);
        self.once_ready(|| member.followed().is_some_and(|(applied, _)| applied >= after)).await?;
        match member.take_bytes(&what, &bytes).await {
            Ok(()) => Ok(()),
            Err(errno) => {
                let file = what.file().map_or_else(String::new, |id| format!(" file {id}:"));
                Err(self.fail(format!("its disk:{file} {errno}")))
            }
        }
    }

    /// Answers what the primary asks about copies of files. What the disk refuses does not end this member's part. It may still be done when
    /// this member follows another one, or nobody: it holds locks where it puts names right.
    async fn scrub(self: Arc<Self>, call: ScrubCall, bytes: Bytes) -> Result<Reply, Refusal> {
        let ScrubCall { session, after, ask } = call;
        malformed(ask.is_sound(bytes.len()).then_some(()))?;
        let member = self.serving()?;
        if member.copy_stage().is_some() {
            return Err(Refusal::new(Refusal::OVERLOADED, "it does not have all files"));
        }
        self.once_ready(|| member.followed().is_some_and(|(applied, _)| applied >= after)).await?;
        if self.state().session != Some(session) {
            return Err(no_session());
        }
        let answered = member.answer_scrub(&ask, &bytes).await;
        let refuse = |errno| Refusal::new(refused::COPY, format!("its disk: {errno}"));
        let (reply, bytes) = answered.map_err(refuse)?;
        Ok(Reply { header: messages::encode(&reply), parts: vec![bytes] })
    }

    /// Waits until a change is written or made; not for long.
    async fn once_ready(&self, is_ready: impl Fn() -> bool) -> ItemOutcome {
        let ready = async {
            loop {
                let woken = {
                    let mut state = self.state();
                    state.waiting.retain(|waiting| !waiting.is_canceled());
                    let (sender, woken) = oneshot::channel();
                    state.waiting.push(sender);
                    woken
                };
                if is_ready() {
                    return;
                }
                let _ = woken.await;
            }
        };
        timeout(&*self.env, WAIT_FOR_EARLIER, ready).await.map_err(|_| too_early())
    }

    fn wake_waiting(&self) {
        let waiting = std::mem::take(&mut self.state().waiting);
        for waiting in waiting {
            let _ = waiting.send(());
        }
    }
}

/// Makes what the primary releases, as long as the backup is at work.
async fn make_released<D: Disk>(backup: Weak<Backup<D>>) {
    while let Some(own) = backup.upgrade() {
        let released = own.state().released;
        let Ok(member) = own.serving() else { return };
        if let Err(errno) = member.release(released).await {
            own.fail(format!("its disk: {errno}"));
            return;
        }
        own.wake_waiting();
        let has_released = own.has_released.clone();
        drop((own, member));
        has_released.notified().await;
    }
}

impl<D: Disk> Drop for Backup<D> {
    fn drop(&mut self) {
        // Ends the task that makes what is released.
        self.has_released.notify();
    }
}

fn no_session() -> Refusal {
    Refusal::new(refused::NO_SESSION, "there is no such session")
}

fn not_primary() -> Refusal {
    Refusal::new(refused::NOT_PRIMARY, "the caller is not the primary any more")
}

fn too_early() -> Refusal {
    Refusal::new(Refusal::OVERLOADED, "changes before it are not here yet")
}

fn reply(message: &impl minicbor::Encode<()>) -> Reply {
    Reply { header: messages::encode(message), parts: Vec::new() }
}

fn malformed<T>(message: Option<T>) -> Result<T, Refusal> {
    message.ok_or_else(|| Refusal::new(Refusal::MALFORMED, "a message that cannot be read"))
}

/// The bytes beside a header.
fn only_part(parts: Vec<Bytes>) -> Result<Bytes, Refusal> {
    let mut parts = parts.into_iter();
    let bytes = parts.next().unwrap_or_default();
    malformed(parts.next().is_none().then_some(bytes))
}

/// Work that goes on if the call is given up.
async fn apart(
    env: Env,
    work: impl Future<Output = Result<Reply, Refusal>> + Send + 'static,
) -> Result<Reply, Refusal> {
    let (sender, answer) = oneshot::channel();
    env.spawn(Box::pin(async move {
        let _ = sender.send(work.await);
    }));
    answer.await.unwrap_or_else(|_| Err(no_session()))
}

impl<D: Disk> Service for Backup<D> {
    fn handle(&self, from: Peer, request: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        let backup = self.own.upgrade();
        Box::pin(async move {
            let backup = backup.ok_or_else(no_session)?;
            if !backup.is_enrolled(from.id) {
                return Err(Refusal::new(
                    Refusal::MALFORMED,
                    "the caller is no member of the pool",
                ));
            }
            let Request { method, header, parts } = request;
            match method {
                HELLO => backup.hello(),
                BEGIN => {
                    let begin = malformed(messages::decode(&header))?;
                    apart(backup.env.clone(), backup.begin(from.id, begin)).await
                }
                ITEM => {
                    let header = malformed(messages::decode(&header))?;
                    backup.item(header, only_part(parts)?).await
                }
                COPY => {
                    let begin = malformed(messages::decode(&header))?;
                    apart(backup.env.clone(), backup.begin_copy(from.id, begin)).await
                }
                COPY_BATCH => {
                    let header: CopyHeader = malformed(messages::decode(&header))?;
                    let part = only_part(parts)?;
                    malformed((part.len() <= MAX_BATCH_BYTES + MAX_CHANGE_BYTES).then_some(()))?;
                    let batch = malformed(messages::decode(&part))?;
                    apart(backup.env.clone(), backup.take_batch(header, batch)).await
                }
                BEAT => backup.beat(malformed(messages::decode(&header))?).await,
                SCRUB => {
                    let call = malformed(messages::decode(&header))?;
                    apart(backup.env.clone(), backup.scrub(call, only_part(parts)?)).await
                }
                _ => Err(Refusal::new(Refusal::UNKNOWN_METHOD, "no such call")),
            }
        })
    }
}
