//! A primary's connection to one other member.
//!
//! Items that the member has not answered are in a queue. An item is one call; calls overlap, and the member puts changes into their
//! order. An item whose call fails is sent again under its number, and the member does it once. When the member knows the session no
//! more, or has been silent for [`SUSPECT_AFTER`], the link is down until another session is begun ([`BackupLink::open`]); then all items of
//! the queue are sent again, and doing one again changes nothing.
//!
//! Beats are sent at a steady pace, whatever becomes of the one before. An answer to a beat or an item is a promise of the member: it
//! follows nobody else until [`LEASE`] after the call was *sent* (the lease of PacificA, section 2.3).
//!
//! **Read leases.** A beat to a member of the epoch that has everything may say that it may answer reads ([`ReadLease`]): from when it got
//! an earlier beat of this session, whose answer is here, for as long as the promises of all members last by now. So its time ends before another member
//! can be the primary, and less than [`LEASE`] after it was heard. Nobody makes a change without it before ([`BackupLink::end_leases`]).

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use atoll_env::{Env, Instant, Moment, Notify, sleep};
use atoll_key::PeerId;
use atoll_net::{CallError, Peer, Refusal, Request, Transport};
use atoll_vfs::Errno;
use bytes::Bytes;
use futures_channel::oneshot;

use super::PrimaryAnnouncement;
use crate::disk::DiskResult;
use crate::layout::FileId;
use crate::marks::MarkTable;
use crate::messages::{
    self, BEAT, BackupReport, Beat, GroupSession, ITEM, ItemHeader, ItemKind, ReadLease, refused,
};
use crate::routing::addressed;

/// How long an answer of a member to a call is a promise, counted from the call's sending.
pub(crate) const LEASE: Duration = Duration::from_millis(250);
/// A member that has answered nothing for this long may be dead. It is longer than [`LEASE`], also by a clock that runs a tenth faster.
pub(crate) const SUSPECT_AFTER: Duration = Duration::from_millis(300);

/// A call that takes so long is made again: it may have been lost. A member whose disk is slow is still at work on the first one.
const CALL_LIMIT: Duration = Duration::from_secs(3);
/// A beat takes a round trip.
const BEAT_LIMIT: Duration = Duration::from_millis(500);
/// A learner that has not done an item for so long, but for syncs, is not waited for. A guess: nobody has to lose more time by it.
const LEARNER_LIMIT: Duration = Duration::from_secs(2);
/// It is tried again after this time.
const SLOW_HOLD_OFF: Duration = Duration::from_secs(30);
/// And a member whose disk failed after this one.
const FAILED_HOLD_OFF: Duration = Duration::from_secs(2);
/// Between a call that failed and the next; a guess.
const RETRY_AFTER: Duration = Duration::from_millis(20);

/// A change, or bytes of a file.
#[derive(Debug)]
pub(crate) struct HandedItem {
    pub(crate) what: ItemKind,
    /// Bytes of a file.
    pub(crate) bytes: Bytes,
    /// How many of those that it is handed to have not done it, and still take part.
    lacked_by: AtomicUsize,
}

impl HandedItem {
    /// Something for one member.
    pub(crate) fn new(what: ItemKind, bytes: Bytes) -> Arc<HandedItem> {
        HandedItem::for_all(what, bytes, 1)
    }

    /// Something for so many members.
    pub(super) fn for_all(what: ItemKind, bytes: Bytes, members: usize) -> Arc<HandedItem> {
        Arc::new(HandedItem { what, bytes, lacked_by: AtomicUsize::new(members) })
    }

    /// One of the members has it, or takes part no more.
    fn note_had(&self) {
        self.lacked_by.fetch_sub(1, Ordering::SeqCst);
    }

    fn is_everywhere(&self) -> bool {
        self.lacked_by.load(Ordering::SeqCst) == 0
    }
}

/// An item that a member lacks, until this is dropped.
struct LackedItem(Arc<HandedItem>);

impl Drop for LackedItem {
    fn drop(&mut self) {
        self.0.note_had();
    }
}

struct QueuedItem {
    item: LackedItem,
    since: Instant,
    done: oneshot::Sender<()>,
}

/// The lease that a primary can give to members now.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LeaseOffer {
    /// When its own lease ends, at the earliest.
    pub(super) ends: Moment,
    /// The run of its server.
    pub(super) boot: u64,
}

/// The part that another member has in the group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum LinkPart {
    /// It gets what it lacks, and nothing else.
    CatchingUp,
    /// It gets all items. Whether it has everything that it had missed, too.
    Learning { is_complete: bool },
    /// All items wait for it.
    Member,
}

/// How far a member is that is given all files.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct CopyProgress {
    /// Files of all kinds that it was given by name, and nothing else yet; 0 if it has all names.
    pub names: u64,
    /// Regular files whose bytes it has.
    pub files_done: u64,
    /// How many there are, as far as is known.
    pub files: u64,
    /// Bytes of these files that it has.
    pub bytes_done: u64,
    /// And of all, holes left out.
    pub bytes: u64,
    /// How long it takes from now on, as it went until now; none if that is not known yet.
    pub left: Option<Duration>,
}

/// Why a session ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum LinkEnd {
    /// It may be tried again.
    Lost(String),
    /// The member was restarted, or cannot follow this primary: it is no member of the epoch any more.
    Interrupted(String),
    /// Nor is one whose disk failed. It may do so again at once when it is opened again, as a full disk does.
    DiskFailed(String),
    /// Its disk failed while it was given all files: most likely it is too small.
    CopyFailed(String),
    /// It knows a newer map, or has proposed one.
    NotPrimary,
    /// It is a learner for which others would have to wait too long.
    TooSlow,
}

struct LinkState {
    /// None: the member cannot be reached, or not be spoken to.
    session: Option<GroupSession>,
    part: LinkPart,
    next_number: u64,
    queue: BTreeMap<u64, QueuedItem>,
    report: Option<BackupReport>,
    /// When it answered last, or was first to be reached.
    heard: Instant,
    /// When it answered anything last, outside of sessions too.
    was_there: Instant,
    /// When the call was sent that it answered last.
    granted: Option<Moment>,
    /// The number of the next beat.
    next_beat: u64,
    /// The greatest number of a beat of the session that was answered, and when the answer came.
    beat_heard: Option<(u64, Instant)>,
    /// When the answer came from which its last read lease counts: it ends within [`LEASE`] of that.
    leased: Option<Instant>,
    /// It is to be left out: it gets no leases.
    is_to_go: bool,
    /// Items that change bytes and that some member may lack, whether or not this one does.
    unsettled: BTreeMap<u64, Arc<HandedItem>>,
    /// The first item that was handed over in this session. The member does not know which of those before are settled.
    session_from: u64,
    /// Why the link is down.
    end: Option<LinkEnd>,
    /// The run of the member that was heard of, and has had everything since.
    run: Option<u64>,
    /// Ranges of files that it may lack.
    to_mend: MarkTable,
    /// How often ranges were added.
    losses: u64,
    /// It is told of no later release: it may lack that changes up to it were withdrawn.
    release_limit: Option<u64>,
    /// The release that a beat under way says.
    beating: Option<u64>,
    /// The epoch of the newest map that it is known to have.
    told: u64,
    /// The address at which the member listens.
    addr: SocketAddr,
    /// It is no member of the pool any more.
    is_retired: bool,
    /// How far it is, if it is given all files.
    copied: Option<CopyProgress>,
    /// This member has stopped its work.
    is_closed: bool,
    /// Calls that wait for the link to be up.
    waiting_for_session: Vec<oneshot::Sender<()>>,
}

/// See the module.
pub(crate) struct BackupLink {
    /// Which.
    pub(crate) id: PeerId,
    env: Env,
    transport: Arc<dyn Transport>,
    said: Arc<PrimaryAnnouncement>,
    state: Mutex<LinkState>,
    /// The link went down.
    pub(crate) went_down: Notify,
}

impl BackupLink {
    pub(super) fn new(
        env: &Env,
        transport: &Arc<dyn Transport>,
        peer: Peer,
        said: Arc<PrimaryAnnouncement>,
        is_member: bool,
    ) -> BackupLink {
        let state = LinkState {
            session: None,
            part: if is_member { LinkPart::Member } else { LinkPart::CatchingUp },
            next_number: 0,
            queue: BTreeMap::new(),
            report: None,
            heard: env.now(),
            was_there: env.now(),
            granted: None,
            next_beat: 1,
            beat_heard: None,
            leased: None,
            is_to_go: false,
            unsettled: BTreeMap::new(),
            session_from: 0,
            end: None,
            run: None,
            to_mend: BTreeMap::new(),
            losses: 0,
            release_limit: None,
            beating: None,
            told: 0,
            addr: peer.addr,
            is_retired: false,
            copied: None,
            is_closed: false,
            waiting_for_session: Vec::new(),
        };
        BackupLink {
            id: peer.id,
            env: env.clone(),
            transport: transport.clone(),
            said,
            state: Mutex::new(state),
            went_down: Notify::default(),
        }
    }

    fn state(&self) -> MutexGuard<'_, LinkState> {
        self.state.lock().expect("no holder of this lock panics")
    }

    pub(super) fn close(&self) {
        let waiting = {
            let mut state = self.state();
            state.session = None;
            state.is_closed = true;
            state.to_mend.clear();
            (std::mem::take(&mut state.queue), std::mem::take(&mut state.waiting_for_session))
        };
        drop(waiting);
        self.went_down.notify();
    }

    /// The member, where it listens by now.
    pub(crate) fn peer(&self) -> Peer {
        Peer { id: self.id, addr: self.state().addr }
    }

    pub(super) fn set_address(&self, addr: SocketAddr) {
        self.state().addr = addr;
    }

    // ---- its part ----

    /// It is no member of the pool any more, as it is told if it can be reached: what waits for it does so no longer.
    pub(super) fn retire(&self) {
        let (session, peer) = (self.session(), self.peer());
        if let Some(session) = session {
            let map = Some(self.said.map());
            let beat = Beat { session, released: 0, map, number: 0, settled: 0, lease: None };
            let header = addressed(&self.said.pool, &messages::encode(&beat));
            let request = Request { method: BEAT, header, parts: Vec::new() };
            let told = self.transport.call(peer, request, BEAT_LIMIT);
            // If this is lost it finds out when it asks the voters.
            self.env.spawn(Box::pin(async move { drop(told.await) }));
        }
        let waiting = {
            let mut state = self.state();
            state.is_retired = true;
            state.leave()
        };
        waiting.into_iter().for_each(answer);
        self.went_down.notify();
    }

    /// Whether it is no member of the pool any more.
    pub(crate) fn is_retired(&self) -> bool {
        self.state().is_retired
    }

    /// How long it has answered nothing.
    pub(crate) fn silence(&self) -> Duration {
        let state = self.state();
        self.env.now().since(state.heard.max(state.was_there))
    }

    /// It has answered a call that is of no session.
    pub(crate) fn note_there(&self) {
        self.state().was_there = self.env.now();
    }

    /// Whether all items wait for it.
    pub(crate) fn is_member(&self) -> bool {
        self.state().part == LinkPart::Member
    }

    /// It is to be a member: all items wait for it from now on.
    pub(super) fn require(&self) {
        self.state().part = LinkPart::Member;
    }

    /// It is no member: what waits for it does so no longer. One that takes part goes on to.
    pub(super) fn excuse(&self) {
        let waiting = {
            let mut state = self.state();
            match state.part {
                LinkPart::Member => state.leave(),
                LinkPart::Learning { .. } | LinkPart::CatchingUp => return,
            }
        };
        self.went_down.notify();
        waiting.into_iter().for_each(answer);
    }

    /// A learner has nearly all changes: it gets all items from now on.
    pub(crate) fn begin_learning(&self, session: GroupSession) {
        let mut state = self.state();
        if state.session == Some(session) && state.part == LinkPart::CatchingUp {
            state.part = LinkPart::Learning { is_complete: false };
        }
    }

    /// A learner has everything.
    pub(crate) fn complete(&self, session: GroupSession) {
        let mut state = self.state();
        if state.session == Some(session) && state.part != LinkPart::Member {
            state.part = LinkPart::Learning { is_complete: true };
            drop(state);
            self.said.has_news.notify();
        }
    }

    /// Has all items wait for a learner that has everything: it is to be a member.
    pub(crate) fn require_if_complete(&self) {
        let mut state = self.state();
        let is_there = self.env.now().since(state.heard) <= SUSPECT_AFTER;
        if state.session.is_some()
            && is_there
            && state.part == (LinkPart::Learning { is_complete: true })
        {
            state.part = LinkPart::Member;
        }
    }

    /// Whether it takes no part any more, as far as can be known.
    pub(crate) fn is_gone(&self) -> bool {
        let state = self.state();
        match &state.end {
            Some(LinkEnd::Interrupted(_) | LinkEnd::DiskFailed(_)) => true,
            _ => self.env.now().since(state.heard) > SUSPECT_AFTER,
        }
    }

    /// How long no session is to be begun with it.
    pub(crate) fn hold_off(&self) -> Option<Duration> {
        match self.state().end {
            Some(LinkEnd::TooSlow | LinkEnd::CopyFailed(_)) => Some(SLOW_HOLD_OFF),
            Some(LinkEnd::DiskFailed(_)) => Some(FAILED_HOLD_OFF),
            _ => None,
        }
    }

    /// Whether it knows of a newer map.
    pub(crate) fn knows_newer_map(&self) -> bool {
        self.state().end == Some(LinkEnd::NotPrimary)
    }

    pub(super) fn has_granted(&self, now: Moment) -> bool {
        self.state().granted.is_some_and(|sent| !now.until(sent + LEASE).is_zero())
    }

    // ---- items ----

    /// Hands something to a member that takes part; resolves when it has it, or takes part no more. [`Errno::EIO`] as for
    /// [`super::Backups::hand`].
    pub(super) async fn hand(self: &Arc<Self>, item: Arc<HandedItem>) -> DiskResult<()> {
        let done = {
            let mut state = self.state();
            match (state.is_closed, state.part) {
                (true, _) => return Err(Errno::EIO),
                (false, LinkPart::CatchingUp) => {
                    item.note_had();
                    return Ok(());
                }
                (false, LinkPart::Learning { .. } | LinkPart::Member) => {}
            }
            self.enqueue(&mut state, item)
        };
        // The queue keeps the sender until the member has it.
        done.await.map_err(|oneshot::Canceled| Errno::EIO)
    }

    /// Hands something to this one alone, in whatever session there is if it is a member; resolves as [`BackupLink::hand`].
    pub(crate) async fn give(self: &Arc<Self>, item: Arc<HandedItem>) -> DiskResult<()> {
        let done = {
            let mut state = self.state();
            if state.is_closed || state.session.is_none() && state.part != LinkPart::Member {
                return Err(Errno::EIO);
            }
            self.enqueue(&mut state, item)
        };
        done.await.map_err(|oneshot::Canceled| Errno::EIO)
    }

    /// Hands something to this one alone in this session; resolves as [`BackupLink::hand`].
    pub(crate) async fn hand_over(
        self: &Arc<Self>,
        session: GroupSession,
        item: Arc<HandedItem>,
    ) -> DiskResult<()> {
        let done = {
            let mut state = self.state();
            if state.is_closed || state.session != Some(session) {
                return Err(Errno::EIO);
            }
            self.enqueue(&mut state, item)
        };
        done.await.map_err(|oneshot::Canceled| Errno::EIO)
    }

    fn enqueue(
        self: &Arc<Self>,
        state: &mut LinkState,
        item: Arc<HandedItem>,
    ) -> oneshot::Receiver<()> {
        let number = state.next_number;
        state.next_number += 1;
        let (sender, done) = oneshot::channel();
        let since = self.env.now();
        if item.what.changes_bytes() {
            state.unsettled.insert(number, item.clone());
        }
        let lacked = LackedItem(item.clone());
        state.queue.insert(number, QueuedItem { item: lacked, since, done: sender });
        if let Some(session) = state.session {
            self.carry(session, number, item);
        }
        done
    }

    /// Whether bytes or a sync are on their way.
    pub(crate) fn has_bytes_waiting(&self) -> bool {
        let has_none = |waiting: &QueuedItem| {
            matches!(waiting.item.0.what, ItemKind::Append { .. } | ItemKind::Locks(_))
        };
        self.state().queue.values().any(|waiting| !has_none(waiting))
    }

    pub(super) fn free_bytes(&self) -> u64 {
        let state = self.state();
        let Some(report) = state.report else { return u64::MAX };
        let taken = |waiting: &QueuedItem| match waiting.item.0.what {
            ItemKind::Allocate { len, .. } => len,
            _ => waiting.item.0.bytes.len() as u64,
        };
        let under_way = state.queue.values().map(taken).fold(0, u64::saturating_add);
        report.free_bytes.saturating_sub(under_way)
    }

    /// Sends an item until the member has it, or the session has ended.
    fn carry(self: &Arc<Self>, session: GroupSession, number: u64, item: Arc<HandedItem>) {
        let link = self.clone();
        self.env.spawn(Box::pin(async move {
            let HandedItem { what, bytes, .. } = &*item;
            loop {
                let header = {
                    let mut state = link.state();
                    if state.session != Some(session) {
                        return;
                    }
                    let answered = state.queue.keys().next().copied().unwrap_or(number);
                    let (released, settled) = (link.released(&state), state.settled());
                    ItemHeader { session, number, answered, released, what: what.clone(), settled }
                };
                let parts = if bytes.is_empty() { Vec::new() } else { vec![bytes.clone()] };
                let header = addressed(&link.said.pool, &messages::encode(&header));
                let request = Request { method: ITEM, header, parts };
                let sent = Moment::now(&*link.env);
                match link.transport.call(link.peer(), request, CALL_LIMIT).await {
                    Ok(reply) => match messages::decode::<BackupReport>(&reply.header) {
                        Some(report) => return link.answered((session, number), report, sent),
                        None => return link.lose(session, unreadable()),
                    },
                    Err(CallError::Refused(refusal)) if refusal.code == Refusal::OVERLOADED => {
                        sleep(&*link.env, RETRY_AFTER).await;
                    }
                    Err(CallError::Refused(refusal)) => {
                        return link.lose(session, end_of(&refusal));
                    }
                    Err(CallError::TooLarge) => {
                        let end = LinkEnd::Interrupted("a message is too long".into());
                        return link.lose(session, end);
                    }
                    Err(CallError::TimedOut | CallError::Unreachable(_)) => {
                        sleep(&*link.env, RETRY_AFTER).await;
                    }
                }
            }
        }));
    }

    fn released(&self, state: &LinkState) -> u64 {
        let released = self.said.released.load(Ordering::SeqCst);
        state.release_limit.map_or(released, |limit| limit.min(released))
    }

    fn answered(&self, (session, number): (GroupSession, u64), report: BackupReport, sent: Moment) {
        let mut state = self.state();
        if state.session != Some(session) {
            // The next session has it done again.
            return;
        }
        let done = state.queue.remove(&number);
        state.note(report, self.env.now(), sent);
        drop(state);
        done.into_iter().for_each(answer);
    }

    /// The session has ended.
    pub(crate) fn lose(&self, session: GroupSession, end: LinkEnd) {
        let waiting = {
            let mut state = self.state();
            if state.session != Some(session) {
                return;
            }
            if let LinkEnd::DiskFailed(_) = &end {
                // It has ended the session itself before it said so, and reads by it.
                state.leased = None;
            }
            state.end = Some(end);
            match state.part {
                LinkPart::Member => {
                    state.session = None;
                    Vec::new()
                }
                LinkPart::Learning { .. } | LinkPart::CatchingUp => state.leave(),
            }
        };
        self.went_down.notify();
        self.said.has_news.notify();
        waiting.into_iter().for_each(answer);
    }

    /// No session was begun.
    pub(crate) fn note_end(&self, end: LinkEnd) {
        let is_news = !matches!(end, LinkEnd::Lost(_));
        self.state().end = Some(end);
        if is_news {
            self.said.has_news.notify();
        }
    }

    /// Why the link is down; none if it is up.
    pub(crate) fn problem(&self) -> Option<String> {
        let state = self.state();
        match (state.session, &state.end) {
            (Some(_), _) => None,
            (None, None) => Some("it was not reached yet".into()),
            (
                None,
                Some(LinkEnd::Lost(text) | LinkEnd::Interrupted(text) | LinkEnd::DiskFailed(text)),
            ) => Some(text.clone()),
            (None, Some(LinkEnd::CopyFailed(text))) => Some(format!(
                "it cannot be given all files: {text}; that is tried again within half a minute"
            )),
            (None, Some(LinkEnd::NotPrimary)) => Some("it knows another primary".into()),
            (None, Some(LinkEnd::TooSlow)) => {
                Some("its disk does not keep up; it is tried again within half a minute".into())
            }
        }
    }

    /// How far it is that is given all files; none if it is not.
    pub(crate) fn note_copied(&self, progress: Option<CopyProgress>) {
        self.state().copied = progress;
    }

    /// The last that was noted.
    pub(crate) fn copied(&self) -> Option<CopyProgress> {
        self.state().copied
    }

    /// The member's last report.
    pub(crate) fn report(&self) -> Option<BackupReport> {
        self.state().report
    }

    /// The run of the member that has had everything since it was spoken to first.
    pub(crate) fn trusted_run(&self) -> Option<u64> {
        self.state().run
    }

    /// A session was begun with a member of the epoch, or with another one, which has all changes up to `last`: sends what it has not.
    /// False if it is no member of the epoch any more.
    pub(crate) fn open(
        self: &Arc<Self>,
        session: GroupSession,
        last: u64,
        is_member: bool,
    ) -> bool {
        let mut had = Vec::new();
        let waiting = {
            let mut state = self.state();
            if state.is_closed || is_member != (state.part == LinkPart::Member) {
                return false;
            }
            state.session = Some(session);
            state.beat_heard = None;
            state.session_from = state.next_number;
            // It may have been restarted.
            state.told = 0;
            state.run = Some(session.backup_run);
            state.end = None;
            state.heard = self.env.now();
            state.release_limit = (state.part != LinkPart::Member).then_some(0);
            let queue = std::mem::take(&mut state.queue);
            for (number, waiting) in queue {
                match waiting.item.0.what {
                    ItemKind::Append { order, .. } if order <= last => had.push(waiting),
                    _ => {
                        self.carry(session, number, waiting.item.0.clone());
                        state.queue.insert(number, waiting);
                    }
                }
            }
            std::mem::take(&mut state.waiting_for_session)
        };
        had.into_iter().for_each(answer);
        for waiting in waiting {
            let _ = waiting.send(());
        }
        self.said.has_news.notify();
        true
    }

    /// A learner may be told of releases up to this one; of all if there is no limit.
    pub(crate) fn limit_releases(&self, session: GroupSession, limit: Option<u64>) {
        let mut state = self.state();
        if state.session == Some(session) {
            state.release_limit = limit;
        }
    }

    // ---- read leases ----

    /// It is to be left out, or is not: whether it gets no leases any more.
    pub(crate) fn note_to_go(&self, is_to_go: bool) {
        self.state().is_to_go = is_to_go;
    }

    /// Its process is another one than the one that had a lease.
    pub(crate) fn note_restarted(&self) {
        self.state().leased = None;
    }

    /// It gets no leases any more. Returns for how long it may have one.
    pub(super) fn end_leases(&self) -> Duration {
        let mut state = self.state();
        state.is_to_go = true;
        // Longer than the lease, as for promises: its clock may run more slowly than this one.
        state.leased.map_or(Duration::ZERO, |since| (since + SUSPECT_AFTER).since(self.env.now()))
    }

    /// When the promise ends that it has given last.
    pub(super) fn promise_ends(&self) -> Option<Moment> {
        self.state().granted.map(|sent| sent + LEASE)
    }

    // ---- what it may have lost ----

    /// These ranges of files are to be handed over again.
    pub(crate) fn begin_mend(&self, marks: MarkTable) {
        let mut state = self.state();
        state.to_mend = marks;
        state.losses += 1;
        if state.part == LinkPart::Member {
            self.said.losses.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// The ranges of a file that are to be handed over again.
    pub(crate) fn to_mend(&self, id: FileId) -> Vec<u64> {
        self.state().to_mend.get(&id).into_iter().flatten().copied().collect()
    }

    /// How often ranges were added.
    pub(crate) fn losses(&self) -> u64 {
        self.state().losses
    }

    /// How many files they are in.
    pub(crate) fn files_to_mend(&self) -> usize {
        self.state().to_mend.len()
    }

    /// Some file of which ranges are to be handed over again.
    pub(crate) fn next_to_mend(&self) -> Option<FileId> {
        self.state().to_mend.keys().next().copied()
    }

    /// Ranges were handed over, when ranges had been added so often. What was added since is to be handed over again.
    pub(crate) fn end_mend(&self, id: FileId, done: &[u64], losses: u64) {
        let mut state = self.state();
        if state.losses != losses {
            return;
        }
        if let Some(marks) = state.to_mend.get_mut(&id) {
            marks.retain(|mark| !done.contains(mark));
            if marks.is_empty() {
                state.to_mend.remove(&id);
            }
        }
    }

    /// The session under way.
    pub(crate) fn session(&self) -> Option<GroupSession> {
        self.state().session
    }

    pub(super) async fn up(&self) {
        let up = {
            let mut state = self.state();
            if state.session.is_some() || state.is_closed || state.part != LinkPart::Member {
                return;
            }
            let (sender, up) = oneshot::channel();
            // Those that gave up are forgotten.
            state.waiting_for_session.retain(|waiting| !waiting.is_canceled());
            state.waiting_for_session.push(sender);
            up
        };
        let _ = up.await;
    }

    // ---- beats ----

    /// Says at once up to where changes are made. A lost beat is made up for by the next.
    pub(super) fn beat(self: &Arc<Self>) {
        let (session, first) = {
            let mut state = self.state();
            let Some(session) = state.session.filter(|_| state.beating.is_none()) else { return };
            let released = self.released(&state);
            state.beating = Some(released);
            (session, released)
        };
        let link = self.clone();
        self.env.spawn(Box::pin(async move {
            let mut said = first;
            loop {
                link.beat_once(session, None).await;
                let mut state = link.state();
                let released = link.released(&state);
                if released == said || state.session != Some(session) {
                    state.beating = None;
                    return;
                }
                state.beating = Some(released);
                said = released;
            }
        }));
    }

    /// A beat of the steady ones; ends the session of a member that has been silent for too long, and of a learner that is too slow.
    pub(crate) fn steady_beat(self: &Arc<Self>, session: GroupSession, offer: Option<LeaseOffer>) {
        if self.does_not_keep_up() {
            return self.lose(session, LinkEnd::TooSlow);
        }
        if self.env.now().since(self.state().heard) > SUSPECT_AFTER {
            return self.lose(session, LinkEnd::Lost("it does not answer".into()));
        }
        let link = self.clone();
        self.env.spawn(Box::pin(async move { link.beat_once(session, offer).await }));
    }

    fn does_not_keep_up(&self) -> bool {
        let (state, now) = (self.state(), self.env.now());
        let is_sync =
            |what: &ItemKind| matches!(what, ItemKind::Sync { .. } | ItemKind::SyncAll { .. });
        let is_late = |waiting: &QueuedItem| {
            now.since(waiting.since) > LEARNER_LIMIT && !is_sync(&waiting.item.0.what)
        };
        matches!(state.part, LinkPart::Learning { .. }) && state.queue.values().any(is_late)
    }

    async fn beat_once(&self, session: GroupSession, offer: Option<LeaseOffer>) {
        let map = self.said.map();
        let epoch = map.epoch;
        let beat = {
            let mut state = self.state();
            if state.session != Some(session) {
                return;
            }
            let number = state.next_beat;
            state.next_beat += 1;
            let offer = offer.filter(|_| map.members.contains(&self.id));
            let lease = offer.and_then(|offer| state.lease(offer, &self.env));
            let (released, settled) = (self.released(&state), state.settled());
            let map = (state.told < epoch).then_some(map);
            Beat { session, released, map, number, settled, lease }
        };
        let header = addressed(&self.said.pool, &messages::encode(&beat));
        let request = Request { method: BEAT, header, parts: Vec::new() };
        let sent = Moment::now(&*self.env);
        match self.transport.call(self.peer(), request, BEAT_LIMIT).await {
            Ok(reply) => {
                if let Some(report) = messages::decode(&reply.header) {
                    let mut state = self.state();
                    if state.session == Some(session) {
                        state.told = state.told.max(epoch);
                        if state.beat_heard.is_none_or(|(number, _)| number < beat.number) {
                            state.beat_heard = Some((beat.number, self.env.now()));
                        }
                        state.note(report, self.env.now(), sent);
                    }
                }
            }
            Err(CallError::Refused(refusal)) if refusal.code != Refusal::OVERLOADED => {
                self.lose(session, end_of(&refusal));
            }
            // Silence ends the session by and by.
            Err(_) => {}
        }
    }
}

impl LinkState {
    fn note(&mut self, report: BackupReport, now: Instant, sent: Moment) {
        self.heard = now;
        if self.granted.is_none_or(|before| before.steady < sent.steady) {
            self.granted = Some(sent);
        }
        let applied = self.report.map_or(0, |before| before.applied).max(report.applied);
        self.report = Some(BackupReport { applied, ..report });
    }

    /// The first item that some member may lack the bytes of.
    fn settled(&mut self) -> u64 {
        while let Some(first) = self.unsettled.first_entry() {
            if !first.get().is_everywhere() {
                return *first.key();
            }
            first.remove();
        }
        self.next_number
    }

    /// A read lease for a beat that is sent now, if the member may have one: it must have all bytes as the primary has them.
    fn lease(&mut self, LeaseOffer { ends, boot }: LeaseOffer, env: &Env) -> Option<ReadLease> {
        let (since, heard) = self.beat_heard?;
        let is_equal = self.part == LinkPart::Member
            && self.to_mend.is_empty()
            && self.settled() >= self.session_from;
        // Looked at when the answer was here, so that the member's time began before.
        let remaining = Moment::now(&**env).until(ends).min(LEASE);
        let remaining_ms = u16::try_from(remaining.as_millis()).ok().filter(|left| *left > 0)?;
        if !is_equal || self.is_to_go {
            return None;
        }
        self.leased = self.leased.max(Some(heard));
        Some(ReadLease { since, remaining_ms, boot })
    }

    /// It takes part no more. Returns what waited for it.
    fn leave(&mut self) -> Vec<QueuedItem> {
        self.part = LinkPart::CatchingUp;
        self.session = None;
        self.run = None;
        self.granted = None;
        self.beat_heard = None;
        self.leased = None;
        self.is_to_go = false;
        self.unsettled.clear();
        self.to_mend.clear();
        self.copied = None;
        self.waiting_for_session.clear();
        std::mem::take(&mut self.queue).into_values().collect()
    }
}

fn answer(waiting: QueuedItem) {
    // The call that waited may have given up.
    let _ = waiting.done.send(());
}

fn unreadable() -> LinkEnd {
    LinkEnd::Interrupted("its answer cannot be read".into())
}

/// What a refusal in a session says of the member.
fn end_of(refusal: &Refusal) -> LinkEnd {
    match refusal.code {
        refused::NO_SESSION => LinkEnd::Lost("it was restarted".into()),
        refused::NOT_PRIMARY => LinkEnd::NotPrimary,
        refused::DISK => LinkEnd::DiskFailed(refusal.text.clone()),
        _ => LinkEnd::Interrupted(refusal.text.clone()),
    }
}
