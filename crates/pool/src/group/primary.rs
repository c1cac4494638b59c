//! The primary's links to the other members: begun when one is reached, watched by beats, and what one lacks that comes back.
//!
//! A member that was restarted is one no more: it may have lost bytes. It learns, as does one that was away: it gets the changes of the
//! log that it lacks, until it has nearly all; from then on it gets all items, and first all locks that clients hold; then all ranges of
//! files that had marks since all members had everything, and makes them durable. Then it can be a member ([`super::membership`]). One that
//! lacks more than the log has is given all files before ([`super::copying`]).
//!
//! When a new primary begins, the other members may have got bytes that it has not, and the other way round: they get all marked
//! ranges from it.

use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use atoll_env::{Env, jittered, sleep};
use atoll_net::{CallError, Peer, Request, Transport};
use bytes::Bytes;
use futures_util::future::{join_all, select, try_join};

use super::MemberStatus;
use super::membership::AskedEdit;
use super::scrub::Scrubber;
use super::witnesses::{WitnessWatch, watch_witnesses};
use crate::backups::{BackupLink, Backups, HandedItem, LinkEnd};
use crate::change::PoolChange;
use crate::disk::{Disk, DiskResult};
use crate::map::{PoolMap, revival};
use crate::member::PoolMember;
use crate::messages::{
    self, BEGIN, BeginSession, CopiedBytes, CopyStage, GroupSession, HELLO, HelloReply, ItemKind,
    MAP, refused,
};
use crate::remote::LockKeeper;
use crate::routing::{PoolId, addressed};

/// Between beats.
const BEAT_EVERY: Duration = Duration::from_millis(50);
/// Between attempts to reach a member; a guess.
const RETRY_EVERY: Duration = Duration::from_millis(50);
const HELLO_LIMIT: Duration = Duration::from_millis(500);
/// A member makes the changes of its journal again meanwhile; one that is not done by then is asked again.
pub(super) const BEGIN_LIMIT: Duration = Duration::from_secs(5);
/// A learner that lacks no more changes than this gets all items.
const NEARLY_ALL: u64 = 64;

/// See the module.
pub(super) struct Primary<D: Disk> {
    pub(super) env: Env,
    pub(super) transport: Arc<dyn Transport>,
    pub(super) pool: PoolId,
    pub(super) member: Arc<PoolMember<D>>,
    pub(super) backups: Arc<Backups>,
    /// The locks of the pool's clients.
    pub(super) locks: Arc<LockKeeper>,
    /// Random bits.
    pub(super) run: u64,
    /// Changes of who the members are that the next map is to have.
    edits: Mutex<Vec<AskedEdit>>,
    pub(super) scrubber: Arc<Scrubber>,
    /// The nodes without files.
    pub(super) witnesses: Arc<WitnessWatch>,
    /// The last map that a member outside of the epoch has answered with.
    heard: Mutex<Option<PoolMap>>,
    /// All members have what this one began with, and it is known which ranges of files they are to get again.
    is_ready: AtomicBool,
}

impl<D: Disk> Primary<D> {
    /// Begins to speak with the other members.
    pub(super) fn start(
        env: &Env,
        transport: &Arc<dyn Transport>,
        (member, backups, locks): (Arc<PoolMember<D>>, Arc<Backups>, Arc<LockKeeper>),
        run: u64,
    ) -> Arc<Primary<D>> {
        let primary = Arc::new(Primary {
            env: env.clone(),
            transport: transport.clone(),
            pool: member.settings.address(),
            run,
            member,
            backups,
            locks,
            edits: Mutex::default(),
            scrubber: Arc::default(),
            witnesses: Arc::new(WitnessWatch::new(env.now())),
            heard: Mutex::default(),
            is_ready: AtomicBool::new(false),
        });
        primary.backups.links().iter().for_each(|link| primary.keep(link));
        env.spawn(Box::pin(watch_witnesses(Arc::downgrade(&primary), env.clone())));
        primary
    }

    fn keep(self: &Arc<Self>, link: &Arc<BackupLink>) {
        let (primary, link, env) = (Arc::downgrade(self), link.clone(), self.env.clone());
        self.env.spawn(Box::pin(keep_link(primary, link, env)));
    }

    /// A newer map by which this member is the primary.
    pub(super) fn set_map(self: &Arc<Self>, map: &PoolMap) {
        self.backups.set_map(map).iter().for_each(|link| self.keep(link));
    }

    pub(super) fn edits(&self) -> MutexGuard<'_, Vec<AskedEdit>> {
        self.edits.lock().expect("no holder of this lock panics")
    }

    /// Whether clients can be served, and ranges of files handed over.
    pub(super) fn is_ready(&self) -> bool {
        self.is_ready.load(Ordering::SeqCst)
    }

    /// All members have what this one began with, and it is made: they get all marked ranges again. No mark is cleared before, since
    /// clients are served after this.
    pub(super) fn note_ready(&self) {
        let marks = self.member.marks().all();
        for link in self.backups.links().iter().filter(|link| link.is_member()) {
            link.begin_mend(marks.clone());
        }
        self.is_ready.store(true, Ordering::SeqCst);
    }

    /// Stops the work: whatever is under way fails.
    pub(super) fn close(&self) {
        self.scrubber.close();
        self.member.close();
        self.edits().clear();
        // The member may not know them yet.
        self.backups.close();
    }

    pub(super) fn status(&self) -> Vec<MemberStatus> {
        let own = MemberStatus {
            peer: self.transport.local(),
            is_member: true,
            problem: None,
            applied: self.backups.released(),
            free_bytes: None,
            files_to_mend: 0,
            copying: None,
            silence: Duration::ZERO,
        };
        let links = self.backups.links();
        let others = links.iter().map(|link| MemberStatus {
            peer: link.peer(),
            is_member: link.is_member(),
            problem: link.problem(),
            applied: link.report().map_or(0, |report| report.applied),
            free_bytes: link.report().map(|report| report.free_bytes),
            files_to_mend: link.files_to_mend(),
            copying: link.copied(),
            silence: link.silence(),
        });
        std::iter::once(own).chain(others).collect()
    }

    /// Begins a session with a member.
    async fn begin(self: &Arc<Self>, link: &Arc<BackupLink>) -> Result<(), LinkEnd> {
        let is_member = link.is_member();
        if !is_member && !self.is_ready() {
            return Err(LinkEnd::Lost("the members come first".into()));
        }
        let reply = match self.call(link.peer(), HELLO, Bytes::new(), HELLO_LIMIT).await {
            Err(LinkEnd::NotPrimary) if !is_member => {
                // By its map another member is the primary: if people have made that one's copy the group, nobody else says so.
                self.hear_map_of(link.peer()).await;
                return Err(LinkEnd::NotPrimary);
            }
            reply => reply?,
        };
        link.note_there();
        let unreadable = || LinkEnd::Interrupted("its answer cannot be read".to_owned());
        let stands: HelloReply = messages::decode(&reply).ok_or_else(unreadable)?;
        // A run that was spoken to was a member all the time.
        let is_trusted = match link.trusted_run() {
            Some(run) => run == stands.run,
            None => stands.session > 0,
        };
        if is_member && !is_trusted {
            link.note_restarted();
            return Err(LinkEnd::Interrupted("it was restarted".into()));
        }
        if is_member && stands.copying.is_some() {
            return Err(LinkEnd::Interrupted("it does not have all files".into()));
        }
        let number = stands.session.saturating_add(1);
        let session = GroupSession { number, primary_run: self.run, backup_run: stands.run };
        if stands.copying == Some(CopyStage::Names) {
            return self.give_names(link, session).await;
        }
        // In this order: what is released, and was withdrawn, is so by a change up to `last`.
        let released = self.backups.released();
        let last = self.member.changes_so_far();
        let (common, begins_after) = {
            let log = self.member.log();
            (log.common(stands.last, &stands.epochs).min(last), log.after)
        };
        if !is_member && revival(stands.last_epoch) != revival(self.backups.map().epoch) {
            // People have decided that what it has counts no more. Nothing of it is the same change under the same number.
            return self.give_names(link, session).await;
        }
        if stands.applied > common {
            let why = "it has made changes that this disk does not know: this disk was set back to \
                       an older state";
            return Err(LinkEnd::Interrupted(why.into()));
        }
        let copying = match stands.copying {
            Some(CopyStage::Bytes(copying)) => Some(copying),
            Some(CopyStage::Names) | None => None,
        };
        // Nobody keeps what it lacks, or has changed while it was copied.
        if common < begins_after || copying.is_some_and(|copying| copying.order < begins_after) {
            return match is_member {
                true => Err(LinkEnd::Interrupted("it was away for too long".into())),
                false => self.give_names(link, session).await,
            };
        }
        let mut withdrawn = Vec::new();
        if stands.applied < common {
            self.scan(common, last, |change| match change {
                PoolChange::Withdrawn { order } if *order <= common => withdrawn.push(*order),
                _ => {}
            })
            .await?;
        }
        let map = self.backups.map();
        let released_of_it = released.min(common);
        let begin =
            BeginSession { session, map, last: common, released: released_of_it, withdrawn };
        self.call(link.peer(), BEGIN, messages::encode(&begin), BEGIN_LIMIT).await?;
        if !link.open(session, common, is_member) {
            return Err(LinkEnd::Lost("its part has changed".into()));
        }
        let (primary, link) = (self.clone(), link.clone());
        self.env.spawn(Box::pin(async move {
            let done = match is_member {
                true => primary.complete_member(&link, session, (common, last)).await,
                false => primary.teach(&link, session, (common, released), copying).await,
            };
            if let Err(errno) = done
                && link.session() == Some(session)
            {
                link.lose(
                    session,
                    LinkEnd::Lost(format!("it cannot be given what it lacks: {errno}")),
                );
            }
        }));
        Ok(())
    }

    async fn hear_map_of(&self, peer: Peer) {
        let asked = self.call(peer, MAP, Bytes::new(), HELLO_LIMIT).await;
        let map = asked.ok().and_then(|reply| messages::decode::<PoolMap>(&reply));
        if let Some(map) = map.filter(PoolMap::is_sound) {
            *self.heard.lock().expect("no holder of this lock panics") = Some(map);
        }
    }

    /// A map that another member has said it knows, if it has come to be by a later revival.
    pub(super) fn heard_of_revival(&self) -> Option<PoolMap> {
        let heard = self.heard.lock().expect("no holder of this lock panics").clone();
        heard.filter(|map| revival(map.epoch) > revival(self.backups.map().epoch))
    }

    /// Looks through the changes of the log after one, up to another one.
    async fn scan(
        &self,
        after: u64,
        last: u64,
        mut look: impl FnMut(&PoolChange),
    ) -> Result<(), LinkEnd> {
        let mut at = after;
        while at < last {
            let changes = self.member.logged(at, last);
            let changes = changes.map_err(|errno| LinkEnd::Lost(format!("the log: {errno}")))?;
            let Some(upto) = changes.keys().next_back().copied() else {
                return Err(LinkEnd::Lost("a change is just being decided".into()));
            };
            changes.values().for_each(&mut look);
            at = upto;
            atoll_env::yield_now().await;
        }
        Ok(())
    }

    /// Hands over all changes of the log after one that are in it by now; returns the last. Those of a change that is just being
    /// decided come by themselves.
    async fn hand_log(
        &self,
        link: &Arc<BackupLink>,
        session: GroupSession,
        mut has: u64,
        last: u64,
    ) -> DiskResult<u64> {
        while has < last {
            let changes = self.member.logged(has, last)?;
            let Some(upto) = changes.keys().next_back().copied() else { break };
            let items = changes.into_iter().map(|(order, change)| {
                let change = match change {
                    // Who was away has not synced the file with the others: attributes are to be set there.
                    PoolChange::Synced { id, kept, .. } => PoolChange::Synced { id, upto: 0, kept },
                    change => change,
                };
                let what = ItemKind::Append { order, change: change.encode() };
                HandedItem::new(what, Bytes::new())
            });
            for handed in join_all(items.map(|item| link.hand_over(session, item))).await {
                handed?;
            }
            has = upto;
        }
        Ok(has)
    }

    /// Hands over all changes of the log after one up to another one, also those that are just being decided.
    async fn hand_whole_log(
        &self,
        link: &Arc<BackupLink>,
        session: GroupSession,
        mut has: u64,
        last: u64,
    ) -> DiskResult<()> {
        loop {
            has = self.hand_log(link, session, has, last).await?;
            if has >= last || link.session() != Some(session) {
                return Ok(());
            }
            sleep(&*self.env, RETRY_EVERY).await;
        }
    }

    /// A member gets the changes that it lacks, and the ranges that it may have otherwise.
    async fn complete_member(
        &self,
        link: &Arc<BackupLink>,
        session: GroupSession,
        (common, last): (u64, u64),
    ) -> DiskResult<()> {
        self.hand_whole_log(link, session, common, last).await?;
        // What is inherited is made without the locks that keep files as they are while they are handed over.
        while !self.is_ready() {
            if self.member.has_failed() {
                return Ok(());
            }
            sleep(&*self.env, RETRY_EVERY).await;
        }
        self.mend_all(link, session).await
    }

    /// A learner gets everything that it lacks.
    async fn teach(
        &self,
        link: &Arc<BackupLink>,
        session: GroupSession,
        (has, released): (u64, u64),
        copying: Option<CopiedBytes>,
    ) -> DiskResult<()> {
        let is_copied = AtomicBool::new(copying.is_none());
        let copy = async {
            if let Some(copying) = copying {
                self.copy_bytes(link, session, copying).await?;
                is_copied.store(true, Ordering::SeqCst);
            }
            Ok(())
        };
        let follow = self.hand_log_until(link, session, (has, released), &is_copied);
        let ((), has) = try_join(copy, follow).await?;
        if link.session() != Some(session) {
            return Ok(());
        }
        link.begin_learning(session);
        self.locks.hand_whole_to(link, session).await?;
        // What was decided before is in the log, or was handed over by the one that decides it.
        let last = self.member.changes_so_far();
        self.hand_whole_log(link, session, has, last).await?;
        link.limit_releases(session, None);
        if link.session() != Some(session) {
            // Another session has begun, which does all this itself.
            return Ok(());
        }
        let remembered = self.member.marks().since_all_had_everything().clone();
        link.begin_mend(remembered.clone());
        self.mend_all(link, session).await?;
        if let Some(copying) = copying {
            self.hand_states(link, session, copying.order, &remembered).await?;
        }
        let hand_over = |what| link.hand_over(session, HandedItem::new(what, Bytes::new()));
        hand_over(ItemKind::SyncAll { after: self.backups.released() }).await?;
        if copying.is_some() {
            hand_over(ItemKind::Complete).await?;
            link.note_copied(None);
        }
        link.complete(session);
        Ok(())
    }

    /// Hands over the changes of the log that a learner lacks, until it has nearly all, and `is_enough`. Returns the last that it has.
    async fn hand_log_until(
        &self,
        link: &Arc<BackupLink>,
        session: GroupSession,
        (mut has, mut released): (u64, u64),
        is_enough: &AtomicBool,
    ) -> DiskResult<u64> {
        loop {
            let last = self.member.changes_so_far();
            has = self.hand_log(link, session, has, last).await?;
            if link.session() != Some(session) {
                return Ok(has);
            }
            // It has whatever withdraws a change up to `released`, which was looked at before `last`.
            link.limit_releases(session, Some(released));
            released = self.backups.released();
            let applied = link.report().map_or(0, |report| report.applied);
            let has_nearly_all = applied.saturating_add(NEARLY_ALL) >= self.member.changes_so_far();
            if has_nearly_all && is_enough.load(Ordering::SeqCst) {
                return Ok(has);
            }
            sleep(&*self.env, BEAT_EVERY).await;
        }
    }

    async fn mend_all(&self, link: &Arc<BackupLink>, session: GroupSession) -> DiskResult<()> {
        while let Some(id) = link.next_to_mend() {
            if link.session() != Some(session) {
                return Ok(());
            }
            self.member.mend(link, id).await?;
        }
        Ok(())
    }

    pub(super) async fn call(
        &self,
        peer: Peer,
        method: u16,
        header: Bytes,
        limit: Duration,
    ) -> Result<Bytes, LinkEnd> {
        let header = addressed(&self.pool, &header);
        let request = Request { method, header, parts: Vec::new() };
        match self.transport.call(peer, request, limit).await {
            Ok(reply) => Ok(reply.header),
            Err(error) => Err(end_of_call(error)),
        }
    }
}

/// What a call that failed says of the member, outside of a session.
pub(super) fn end_of_call(error: CallError) -> LinkEnd {
    match error {
        CallError::Refused(refusal) => match refusal.code {
            refused::NOT_PRIMARY => LinkEnd::NotPrimary,
            refused::DISK => LinkEnd::DiskFailed(refusal.text),
            refused::PRIMARY_IS_OLDER => LinkEnd::Interrupted(refusal.text),
            _ => LinkEnd::Lost(refusal.text),
        },
        error => LinkEnd::Lost(error.to_string()),
    }
}

/// Begins sessions with a member, as long as the primary is at work.
async fn keep_link<D: Disk>(primary: Weak<Primary<D>>, link: Arc<BackupLink>, env: Env) {
    while !link.is_retired() {
        if let Some(hold_off) = link.hold_off() {
            sleep(&*env, hold_off).await;
        }
        let began = match primary.upgrade() {
            Some(primary) if !primary.member.has_failed() => primary.begin(&link).await,
            _ => return,
        };
        if let Err(end) = began {
            link.note_end(end);
            sleep(&*env, jittered(&*env, RETRY_EVERY)).await;
            continue;
        }
        while let Some(session) = link.session() {
            let Some(offer) = primary.upgrade().map(|primary| primary.backups.lease_offer()) else {
                return;
            };
            link.steady_beat(session, offer);
            let beat = sleep(&*env, BEAT_EVERY);
            select(pin!(link.went_down.notified()), beat).await;
        }
    }
}
