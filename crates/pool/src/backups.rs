//! A primary's queues to its backups: changes in their order, and bytes of files; an item is done when all backups have it
//! (PacificA, MSR-TR-2008-25, section 2.2).
//!
//! Each backup has a [`BackupLink`] with a queue of items that it has not answered. An item is one call; calls overlap, and the
//! backup puts changes into their order. An item whose call fails is sent again under its number, and the backup does it once. When
//! the backup knows the session no more, for it was restarted, or has been silent for a while, the link is down until another session
//! is begun ([`BackupLink::resume`]); then all items of the queue are sent again, and doing one again changes nothing.
//!
//! A change is *released* when it and all before it are durable on all members and made on the primary: backups make it then.
//!
//! Nothing here gives a backup up: while one cannot be reached, changes wait.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use atoll_env::{Env, Instant, Notify, sleep};
use atoll_net::{CallError, Peer, Refusal, Request, Transport};
use atoll_vfs::Errno;
use bytes::Bytes;
use futures_channel::oneshot;
use futures_util::future::join_all;

use crate::disk::DiskResult;
use crate::layout::FileId;
use crate::messages::{
    self, BEAT, BackupReport, Beat, GroupSession, ITEM, ItemHeader, ItemKind, refused,
};
use crate::routing::{PoolId, addressed};

/// A call that takes so long is made again: it may have been lost. A backup whose disk is slow is still at work on the first one.
const CALL_LIMIT: Duration = Duration::from_secs(3);
/// A beat takes a round trip.
const BEAT_LIMIT: Duration = Duration::from_millis(500);
/// A backup that has answered nothing for so long cannot be reached.
const SILENT_LIMIT: Duration = Duration::from_secs(2);
/// Between a call that failed and the next; a guess.
const RETRY_AFTER: Duration = Duration::from_millis(50);

/// A change, or bytes of a file, for all backups.
#[derive(Debug)]
pub(crate) struct Item {
    pub(crate) what: ItemKind,
    /// Bytes of a file.
    pub(crate) bytes: Bytes,
}

struct Waiting {
    item: Arc<Item>,
    done: oneshot::Sender<()>,
}

#[derive(Default)]
struct LinkState {
    /// None: the backup cannot be reached, or not be spoken to.
    session: Option<GroupSession>,
    next_number: u64,
    queue: BTreeMap<u64, Waiting>,
    report: Option<BackupReport>,
    /// When it answered last.
    heard: Option<Instant>,
    /// Why the link is down.
    problem: Option<String>,
    /// The backup's run, as of the last session.
    run: Option<u64>,
    /// Ranges of files that it may have lost, and has not got again.
    to_mend: BTreeMap<FileId, Vec<u64>>,
    /// How often it may have lost some.
    losses: u64,
    /// The release that a beat under way says.
    beating: Option<u64>,
    /// This member has stopped its work.
    is_closed: bool,
    /// Calls that wait for the link to be up.
    waiting_for_session: Vec<oneshot::Sender<()>>,
}

/// The primary's side of its connection to one backup: session, queue, and what is known of it.
pub(crate) struct BackupLink {
    pub(crate) peer: Peer,
    pool: PoolId,
    env: Env,
    transport: Arc<dyn Transport>,
    state: Mutex<LinkState>,
    /// The last released change.
    released: Arc<AtomicU64>,
    /// The link went down.
    pub(crate) went_down: Notify,
}

/// The changes that are made, and those that are released.
#[derive(Default)]
struct FinishedOrders {
    finished: BTreeSet<u64>,
    /// Files that changes made which are not released.
    made: BTreeMap<FileId, u64>,
}

/// See the module.
pub(crate) struct Backups {
    pub(crate) links: Vec<Arc<BackupLink>>,
    orders: Mutex<FinishedOrders>,
    released: Arc<AtomicU64>,
}

impl Backups {
    /// All changes up to `released` are made.
    pub(crate) fn new(
        env: &Env,
        transport: &Arc<dyn Transport>,
        (pool, peers): (PoolId, &[Peer]),
        released: u64,
    ) -> Backups {
        let released = Arc::new(AtomicU64::new(released));
        let link = |peer: &Peer| {
            Arc::new(BackupLink {
                peer: *peer,
                pool,
                env: env.clone(),
                transport: transport.clone(),
                state: Mutex::default(),
                released: released.clone(),
                went_down: Notify::default(),
            })
        };
        let links = peers.iter().map(link).collect();
        Backups { links, orders: Mutex::default(), released }
    }

    fn orders(&self) -> MutexGuard<'_, FinishedOrders> {
        self.orders.lock().expect("no holder of this lock panics")
    }

    /// Hands something to all backups; returns when all have it. [`Errno::EIO`] if this member has stopped its work before.
    pub(crate) async fn hand(&self, what: ItemKind, bytes: Bytes) -> DiskResult<()> {
        let item = Arc::new(Item { what, bytes });
        let handed = join_all(self.links.iter().map(|link| link.hand(item.clone()))).await;
        handed.into_iter().collect()
    }

    /// Stops the work: whatever waits for a backup fails.
    pub(crate) fn close(&self) {
        for link in &self.links {
            let (queue, waiting) = {
                let mut state = link.state();
                state.session = None;
                state.is_closed = true;
                state.to_mend.clear();
                (std::mem::take(&mut state.queue), std::mem::take(&mut state.waiting_for_session))
            };
            drop((queue, waiting));
            link.went_down.notify();
        }
    }

    /// The change that a file waits for which was made lately; 0 if its change is released.
    pub(crate) fn made_by(&self, id: FileId) -> u64 {
        self.orders().made.get(&id).copied().unwrap_or(0)
    }

    /// A change makes a file.
    pub(crate) fn note_made(&self, id: FileId, order: u64) {
        self.orders().made.insert(id, order);
    }

    /// The last released change.
    pub(crate) fn released(&self) -> u64 {
        self.released.load(Ordering::SeqCst)
    }

    /// A change is made, or withdrawn.
    pub(crate) fn finish(&self, order: u64) {
        {
            let mut orders = self.orders();
            orders.finished.insert(order);
            let before = self.released();
            let mut released = before;
            while orders.finished.remove(&(released + 1)) {
                released += 1;
            }
            if released == before {
                return;
            }
            self.released.store(released, Ordering::SeqCst);
            orders.made.retain(|_, made| *made > released);
        }
        for link in &self.links {
            // Bytes may wait at the backup for the file to be made.
            if link.has_bytes_waiting() {
                link.beat();
            }
        }
    }

    /// Waits until all backups can be spoken to.
    pub(crate) async fn all_up(&self) {
        join_all(self.links.iter().map(|link| link.up())).await;
    }

    /// How often backups may have lost bytes.
    pub(crate) fn losses(&self) -> u64 {
        self.links.iter().map(|link| link.losses()).sum()
    }

    /// Room on the fullest backup's disk, less what is on its way, bytes.
    pub(crate) fn free_bytes(&self) -> u64 {
        self.links.iter().map(|link| link.free_bytes()).min().unwrap_or(u64::MAX)
    }
}

impl BackupLink {
    fn state(&self) -> MutexGuard<'_, LinkState> {
        self.state.lock().expect("no holder of this lock panics")
    }

    /// Hands something to the backup; resolves when it has it. [`Errno::EIO`] as for [`Backups::hand`].
    pub(crate) async fn hand(self: &Arc<Self>, item: Arc<Item>) -> DiskResult<()> {
        let done = {
            let mut state = self.state();
            if state.is_closed {
                return Err(Errno::EIO);
            }
            let number = state.next_number;
            state.next_number += 1;
            let (sender, done) = oneshot::channel();
            state.queue.insert(number, Waiting { item: item.clone(), done: sender });
            if let Some(session) = state.session {
                self.carry(session, number, item);
            }
            done
        };
        // The queue keeps the sender until the backup has it.
        done.await.map_err(|oneshot::Canceled| Errno::EIO)
    }

    /// Whether bytes or a sync are on their way.
    fn has_bytes_waiting(&self) -> bool {
        let is_append = |waiting: &Waiting| matches!(waiting.item.what, ItemKind::Append { .. });
        self.state().queue.values().any(|waiting| !is_append(waiting))
    }

    fn free_bytes(&self) -> u64 {
        let state = self.state();
        let Some(report) = state.report else { return u64::MAX };
        let taken = |waiting: &Waiting| match waiting.item.what {
            ItemKind::Allocate { len, .. } => len,
            _ => waiting.item.bytes.len() as u64,
        };
        let under_way = state.queue.values().map(taken).fold(0, u64::saturating_add);
        report.free_bytes.saturating_sub(under_way)
    }

    /// Sends an item until the backup has it, or the session has ended.
    fn carry(self: &Arc<Self>, session: GroupSession, number: u64, item: Arc<Item>) {
        let link = self.clone();
        self.env.spawn(Box::pin(async move {
            let Item { what, bytes } = &*item;
            loop {
                let answered = {
                    let state = link.state();
                    if state.session != Some(session) {
                        return;
                    }
                    state.queue.keys().next().copied().unwrap_or(number)
                };
                let (what, released) = (what.clone(), link.released.load(Ordering::SeqCst));
                let header = ItemHeader { session, number, answered, released, what };
                let parts = if bytes.is_empty() { Vec::new() } else { vec![bytes.clone()] };
                let header = addressed(&link.pool, &messages::encode(&header));
                let request = Request { method: ITEM, header, parts };
                match link.transport.call(link.peer, request, CALL_LIMIT).await {
                    Ok(reply) => match messages::decode::<BackupReport>(&reply.header) {
                        Some(report) => return link.answered(number, report),
                        None => return link.lose(session, "its answer cannot be read"),
                    },
                    Err(CallError::Refused(refusal)) if refusal.code == Refusal::OVERLOADED => {
                        sleep(&*link.env, RETRY_AFTER).await;
                    }
                    Err(CallError::Refused(refusal)) => return link.refused(session, &refusal),
                    Err(CallError::TooLarge) => return link.lose(session, "a message is too long"),
                    Err(CallError::TimedOut | CallError::Unreachable(_)) => {
                        sleep(&*link.env, RETRY_AFTER).await;
                    }
                }
            }
        }));
    }

    fn answered(&self, number: u64, report: BackupReport) {
        let mut state = self.state();
        let done = state.queue.remove(&number);
        state.note(report, self.env.now());
        drop(state);
        if let Some(Waiting { done, .. }) = done {
            // The call that waited may have given up.
            let _ = done.send(());
        }
    }

    fn refused(&self, session: GroupSession, refusal: &Refusal) {
        match refusal.code {
            refused::NO_SESSION => self.lose(session, "it was restarted"),
            _ => self.lose(session, &refusal.text),
        }
    }

    /// The session has ended.
    pub(crate) fn lose(&self, session: GroupSession, problem: &str) {
        let mut state = self.state();
        if state.session == Some(session) {
            state.session = None;
            state.problem = Some(problem.to_owned());
            self.went_down.notify();
        }
    }

    /// The link is down, and stays so.
    pub(crate) fn note_problem(&self, problem: String) {
        self.state().problem = Some(problem);
    }

    /// Why the link is down; none if it is up.
    pub(crate) fn problem(&self) -> Option<String> {
        let state = self.state();
        match state.session {
            Some(_) => None,
            None => Some(state.problem.clone().unwrap_or_else(|| "it was not reached yet".into())),
        }
    }

    /// The backup's last report.
    pub(crate) fn report(&self) -> Option<BackupReport> {
        self.state().report
    }

    /// A session was begun with the backup, which has all changes up to `last`: sends what it has not.
    pub(crate) fn resume(self: &Arc<Self>, session: GroupSession, last: u64) {
        let mut had = Vec::new();
        let waiting = {
            let mut state = self.state();
            if state.is_closed {
                return;
            }
            state.session = Some(session);
            state.problem = None;
            state.heard = Some(self.env.now());
            let queue = std::mem::take(&mut state.queue);
            for (number, waiting) in queue {
                match waiting.item.what {
                    ItemKind::Append { order, .. } if order <= last => had.push(waiting.done),
                    _ => {
                        self.carry(session, number, waiting.item.clone());
                        state.queue.insert(number, waiting);
                    }
                }
            }
            std::mem::take(&mut state.waiting_for_session)
        };
        for waiting in had.into_iter().chain(waiting) {
            let _ = waiting.send(());
        }
    }

    /// Whether the backup may have lost bytes since the last session, or there was none. It is asked once. Any run may follow one
    /// whose disk failed or was taken away, also where the machine has not stopped.
    pub(crate) fn may_have_lost(&self, run: u64) -> bool {
        self.state().run.replace(run) != Some(run)
    }

    /// These ranges of files are to be handed over again.
    pub(crate) fn begin_mend(&self, marks: BTreeMap<FileId, Vec<u64>>) {
        let mut state = self.state();
        state.to_mend = marks;
        state.losses += 1;
    }

    /// The ranges of a file that are to be handed over again.
    pub(crate) fn to_mend(&self, id: FileId) -> Vec<u64> {
        self.state().to_mend.get(&id).cloned().unwrap_or_default()
    }

    /// How often the backup may have lost bytes.
    pub(crate) fn losses(&self) -> u64 {
        self.state().losses
    }

    /// How many files those are in.
    pub(crate) fn files_to_mend(&self) -> usize {
        self.state().to_mend.len()
    }

    /// The changes that the backup has not answered, as bytes.
    pub(crate) fn queued_changes(&self) -> Vec<(u64, Vec<u8>)> {
        let state = self.state();
        let changes = state.queue.values().filter_map(|waiting| match &waiting.item.what {
            ItemKind::Append { order, change } => Some((*order, change.clone())),
            _ => None,
        });
        changes.collect()
    }

    /// The files of which ranges are to be handed over again.
    pub(crate) fn all_to_mend(&self) -> Vec<FileId> {
        self.state().to_mend.keys().copied().collect()
    }

    /// Some file of which ranges are to be handed over again.
    pub(crate) fn next_to_mend(&self) -> Option<FileId> {
        self.state().to_mend.keys().next().copied()
    }

    /// Ranges were handed over, when the backup had lost bytes so often. What it has lost since is to be handed over again.
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

    async fn up(&self) {
        let up = {
            let mut state = self.state();
            if state.session.is_some() || state.is_closed {
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

    /// Says up to where changes are made. A lost beat is made up for by the next.
    pub(crate) fn beat(self: &Arc<Self>) {
        let (session, first) = {
            let mut state = self.state();
            let Some(session) = state.session.filter(|_| state.beating.is_none()) else { return };
            let released = self.released.load(Ordering::SeqCst);
            state.beating = Some(released);
            (session, released)
        };
        let link = self.clone();
        self.env.spawn(Box::pin(async move {
            let mut said = first;
            loop {
                link.beat_once(session, said).await;
                let mut state = link.state();
                let released = link.released.load(Ordering::SeqCst);
                if released == said || state.session != Some(session) {
                    state.beating = None;
                    return;
                }
                state.beating = Some(released);
                said = released;
            }
        }));
    }

    async fn beat_once(&self, session: GroupSession, released: u64) {
        let header = messages::encode(&Beat { session, released });
        let header = addressed(&self.pool, &header);
        let request = Request { method: BEAT, header, parts: Vec::new() };
        match self.transport.call(self.peer, request, BEAT_LIMIT).await {
            Ok(reply) => {
                if let Some(report) = messages::decode(&reply.header) {
                    self.state().note(report, self.env.now());
                }
            }
            Err(CallError::Refused(refusal)) if refusal.code != Refusal::OVERLOADED => {
                self.refused(session, &refusal);
            }
            Err(error) => {
                let heard = self.state().heard;
                if heard.is_none_or(|heard| self.env.now() > heard + SILENT_LIMIT) {
                    self.lose(session, &error.to_string());
                }
            }
        }
    }
}

impl LinkState {
    fn note(&mut self, report: BackupReport, now: Instant) {
        self.heard = Some(now);
        let applied = self.report.map_or(0, |before| before.applied).max(report.applied);
        self.report = Some(BackupReport { applied, ..report });
    }
}
