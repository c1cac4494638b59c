//! A member's disk: where its files are, and in what order they change.
//!
//! **A change** is checked, written to the journal, made on the disk, and noted in the index, under the locks of the directories
//! and files that it names ([`Turns`]); what the disk refuses after all is withdrawn in the journal. It is acknowledged without
//! waiting for the device; [`PoolMember::sync_changes`] waits.
//!
//! **A checkpoint** makes all files durable, then the index, and lets the journal begin anew. It is begun while no change is
//! between journal and index.
//!
//! **A file is found** by its number: its node if that is open, else by the names that the index has, from the next directory
//! that is known or that lies in a slot. What stands under a name must be the inode that the index has; where it is not, the
//! disk is right, and the index learns.

mod applying;
mod charging;
mod checking;
mod copied;
mod file_bytes;
mod following;
mod handing;
mod importing;
mod leaving;
mod opening;
mod redo;
mod reserve;
mod reviving;
mod scanning;
mod scrubbing;
mod seeking;
mod unlinked;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

use atoll_env::{Env, Instant, timeout};
use atoll_vfs::Errno;
use bytes::Bytes;

use self::file_bytes::WritesUnderWay;
use self::following::FollowedChanges;
use self::unlinked::UnlinkedFiles;
use crate::backups::Backups;
use crate::calls::{CallId, DoneCall, DoneCalls, KnownCall};
use crate::change::{CrossingId, PoolChange};
use crate::change_log::ChangeLog;
use crate::crossings::{CrossingHolds, Crossings, HeldByCrossings, HoldingPart};
use crate::disk::{Disk, DiskResult};
use crate::held::HeldFiles;
use crate::index::{GroupEntries, IndexMeta, PoolIndex, PoolIndexError, WrittenTables};
use crate::journal::{AppendedRecord, PoolJournal, RecordOrder};
use crate::layout::{FileId, Slot};
use crate::marks::Marks;
use crate::messages::{CopyStage, ItemKind};
use crate::quota::Quotas;
use crate::turns::{Turn, Turns};

pub(crate) use applying::{Decided, MadeFile};
pub use checking::CheckReport;
pub(crate) use copied::{CopiedMember, CopyBatchError, xattr_names};
pub(crate) use handing::FileToCopy;
pub use importing::{ImportError, InPlaceReport, import_in_place};
pub use leaving::LeaveReport;
use opening::last_of_unbroken;
pub use opening::{
    CreateError, OpenError, OpenReport, PoolSettings, check, check_usable, create, create_member,
    is_in_use, leave, read_map, read_settings, share,
};
pub(crate) use opening::{LogStand, UnrecoveredMember};
pub(crate) use redo::Makes;
pub use reviving::{CopyStand, ReviveError, copy_stand, revive};
pub use scrubbing::ASIDE_DIRECTORY;
pub(crate) use seeking::FoundFile;

/// The attribute that says which file this is, so that the index can be made again. Where the process may not set it, the
/// index alone knows.
pub(crate) const ID_ATTRIBUTE: &[u8] = b"trusted.atoll.id";

/// After a change, all is durable and the index up to date after this time at the latest: so much has to be made again after a
/// crash, and files that were put there by hand have got their numbers for good.
const CHECKPOINT_WITHIN: Duration = Duration::from_secs(30);

/// A change that cannot be begun for so long, since a backup cannot be reached, is refused.
const ALL_UP_LIMIT: Duration = Duration::from_secs(10);

/// How often a call that waits for a change over several groups looks whether this member still is the primary.
const FREE_CHECK_EVERY: Duration = Duration::from_secs(1);

/// The most changes that are read from the log at once.
const MAX_LOGGED: usize = 1024;

/// More numbers than members give to files while one is away; there are 2^20 times as many.
const SKIPPED_NUMBERS: u64 = 1 << 32;
/// Revivals that differ by fewer seconds pass over other numbers. At most a sixty-fourth of all are passed over at once.
const SKIPPED_PARTS: u64 = 1 << 14;

/// Entries of the index in memory beyond which a checkpoint is made soon.
const MAX_PENDING: usize = 200_000;

/// Locks of the whole member.
mod whole {
    /// Shared by changes; a checkpoint has it alone.
    pub(super) const BARRIER: u64 = 0;
    /// Moves of directories to another parent.
    pub(super) const MOVES: u64 = 1;
    /// Checkpoints.
    pub(super) const CHECKPOINT: u64 = 2;
    /// Giving numbers to files that Atoll has not made.
    pub(super) const ADOPTION: u64 = 3;
    /// Writing changes of the primary to the journal.
    pub(super) const FOLLOWING: u64 = 4;
    /// Making them.
    pub(super) const RELEASING: u64 = 5;
    /// Clearing marks of all files; shared by writes that begin.
    pub(super) const MARKS: u64 = 6;
    /// Changing the table of limits.
    pub(super) const QUOTAS: u64 = 7;
    /// Counting all files for limits.
    pub(super) const COUNT: u64 = 8;
}

/// See the module.
pub(crate) struct PoolMember<D: Disk> {
    pub(crate) env: Env,
    pub(crate) disk: Arc<D>,
    pub(crate) settings: PoolSettings,
    pub(crate) index: PoolIndex,
    journal: PoolJournal<D>,
    held: Mutex<HeldFiles<D>>,
    /// Locks of directories and files, by their numbers.
    pub(crate) turns: Turns,
    whole: Turns,
    /// Locks of changes over several groups.
    crossing_turns: Turns,
    /// The next number for a file, without its slot.
    next: AtomicU64,
    /// Files that changes since the last checkpoint made, or whose attributes they set, and the last of those changes.
    unsettled: Mutex<BTreeMap<FileId, u64>>,
    /// Numbers that may have been given out between the last checkpoint and the last start.
    unsure: OnceLock<Range<u64>>,
    slots: D::Node,
    /// The disk is full: nothing is made that takes room.
    is_tight: AtomicBool,
    /// What the pool's roster says of all groups: the least number of copies, and the level.
    rules: [AtomicU8; 2],
    /// Whether the pool is one of several members, if also only one is left.
    pub(crate) in_group: bool,
    /// Those that follow this one, if it is the primary.
    backups: Mutex<Option<Arc<Backups>>>,
    /// What this one follows.
    followed: Mutex<Option<FollowedChanges>>,
    /// The changes that some member may not have; none in a pool of one.
    log: Mutex<ChangeLog>,
    /// Where bytes of members may differ; nowhere in a pool of one.
    marks: Mutex<Marks>,
    /// What is being written on all members.
    writes: Mutex<WritesUnderWay>,
    /// It does no more work, whatever its disk could do.
    is_closed: AtomicBool,
    /// The calls that made the last changes.
    done: Mutex<DoneCalls>,
    /// Changes over several groups that wait for something.
    crossings: Mutex<Crossings>,
    /// What those hold that this member coordinates.
    crossing_holds: Mutex<CrossingHolds>,
    /// How far it is that is given all files; none if it is complete.
    copying: Mutex<Option<CopyStage>>,
    /// When the next checkpoint is made, if one is planned.
    planned: Mutex<Option<Instant>>,
    /// Limits of users and directories.
    quotas: Arc<Mutex<Quotas>>,
    /// Directories of this group that lie in other groups' directories, and those above them there that are limited.
    above_elsewhere: Mutex<AboveElsewhere>,
    unlinked: Mutex<UnlinkedFiles>,
    /// Until then clients of an earlier primary may not have opened again what they have open.
    reopened: Mutex<Instant>,
}

/// What is above directories in other groups, as far as these were asked.
type AboveElsewhere = BTreeMap<FileId, Option<Vec<FileId>>>;

/// What a checkpoint has written: everything as of one change.
pub(crate) struct WrittenCheckpoint {
    pub(crate) meta: IndexMeta,
    pub(crate) group: GroupEntries,
    pub(crate) tables: Arc<WrittenTables>,
}

/// A change between its beginning and its end.
pub(crate) struct Changing {
    _barrier: Turn,
}

/// What a change over several groups holds until this is dropped.
pub(crate) struct HeldCrossing<D: Disk> {
    member: Option<Arc<PoolMember<D>>>,
    held: (CrossingId, HoldingPart),
}

impl<D: Disk> HeldCrossing<D> {
    /// Nothing is released, as long as the member is at work.
    pub(crate) fn keep(mut self) {
        self.member = None;
    }
}

impl<D: Disk> Drop for HeldCrossing<D> {
    fn drop(&mut self) {
        let Some(member) = &self.member else { return };
        let mut holds = member.crossing_holds();
        holds.release(self.held);
        holds.wake();
    }
}

impl<D: Disk> PoolMember<D> {
    pub(crate) fn held(&self) -> MutexGuard<'_, HeldFiles<D>> {
        self.held.lock().expect("no holder of this lock panics")
    }

    /// An error of the index: nothing can be changed any more.
    pub(crate) fn index_failed(&self, error: &PoolIndexError) -> Errno {
        tracing::error!("{error}");
        self.journal.fail()
    }

    /// Begins a change. No checkpoint is made before it ends.
    pub(crate) async fn begin_change(self: &Arc<Self>) -> DiskResult<Changing> {
        self.journal.check()?;
        self.wait_for_backups().await?;
        let (soon, now) = self.journal.wants_checkpoint();
        if now {
            self.checkpoint().await?;
        }
        self.checkpoint_later(if soon { Duration::ZERO } else { CHECKPOINT_WITHIN });
        Ok(Changing { _barrier: self.whole.read(whole::BARRIER).await })
    }

    /// Before a change is begun: waits until all backups can be spoken to. [`Errno::EAGAIN`] if that takes too long: nothing was done,
    /// so clients of NFS are told to try again. There are none in a pool of one.
    pub(crate) async fn wait_for_backups(&self) -> DiskResult<()> {
        let Some(backups) = self.backups() else { return Ok(()) };
        let up = timeout(&*self.env, ALL_UP_LIMIT, backups.all_up()).await;
        up.map_err(|_| Errno::EAGAIN)
    }

    /// Has a checkpoint made after this time at the latest, unless the member is closed before.
    fn checkpoint_later(self: &Arc<Self>, delay: Duration) {
        let at = self.env.now() + delay;
        let mut planned = self.planned.lock().expect("no holder of this lock panics");
        if planned.is_some_and(|planned| planned <= at) {
            return;
        }
        *planned = Some(at);
        drop(planned);
        let (member, env) = (Arc::downgrade(self), self.env.clone());
        self.env.spawn(Box::pin(async move {
            env.sleep_until(at).await;
            let Some(member) = member.upgrade() else { return };
            {
                let mut planned = member.planned.lock().expect("no holder of this lock panics");
                if *planned != Some(at) {
                    // One was made earlier, or will be.
                    return;
                }
                *planned = None;
            }
            // What cannot be synced everywhere keeps its marks.
            let _ = member.sync_members().await;
            // A failure is kept by the journal, which refuses the next change.
            let _ = member.checkpoint().await;
        }));
    }

    /// Files that were put there by hand get numbers when they are looked up, which are in memory until a checkpoint.
    pub(crate) fn keep_up(self: &Arc<Self>) {
        match self.index.pending() {
            0 => {}
            pending if pending > MAX_PENDING => self.checkpoint_later(Duration::ZERO),
            _ => self.checkpoint_later(CHECKPOINT_WITHIN),
        }
    }

    /// The lock for moves of directories to another parent: two at once could make a loop.
    pub(crate) async fn move_turn(&self) -> Turn {
        self.whole.write(whole::MOVES).await
    }

    /// Decides a change, makes it, and withdraws it if that fails. Returns the file that it made. [`Errno::EBUSY`] if its call
    /// has made a change before: whoever makes a call again has the same locks, so that is certain here.
    pub(crate) async fn change(&self, change: PoolChange) -> DiskResult<Option<MadeFile<D>>> {
        if let Some((by, _)) = change.done_call()
            && self.find_call(by.id())?.is_some()
        {
            return Err(Errno::EBUSY);
        }
        let charged = self.begin_charging(&change).await?;
        let made = self.decide_and_apply(change).await;
        self.end_charging(charged).await;
        made
    }

    /// As [`PoolMember::change`], for attributes of a file that the caller has locked. A file without a name is changed on this member alone:
    /// no other has it, and a backup that cannot make a change stops.
    pub(crate) async fn change_file(&self, id: FileId, change: PoolChange) -> DiskResult<()> {
        let is_alone = self.in_group && self.held().is_nameless(id);
        let made = match is_alone {
            true => self.apply(&change, Decided::Here).await,
            false => self.change(change).await,
        };
        made.map(drop)
    }

    async fn decide_and_apply(&self, change: PoolChange) -> DiskResult<Option<MadeFile<D>>> {
        let order = self.decide(&change).await?;
        let made = self.apply(&change, Decided::Here).await;
        if made.is_err() {
            // It is not known to others that it was not made: nothing may be said of it any more.
            let withdrawn = self.decide(&PoolChange::Withdrawn { order }).await;
            let withdrawal = withdrawn.map_err(|_| self.fail())?;
            self.finish(withdrawal);
        } else {
            self.note_done(order, &change);
        }
        self.finish(order);
        made
    }

    pub(crate) fn crossings(&self) -> MutexGuard<'_, Crossings> {
        self.crossings.lock().expect("no holder of this lock panics")
    }

    fn crossing_holds(&self) -> MutexGuard<'_, CrossingHolds> {
        self.crossing_holds.lock().expect("no holder of this lock panics")
    }

    /// Whether no change over several groups holds what is needed.
    fn is_free(&self, needed: &HeldByCrossings) -> bool {
        let crossings = self.crossings();
        self.crossing_holds().are_free(needed, &crossings)
    }

    /// As [`PoolMember::is_free`], without making a list of what is needed where nothing is held, as is usual; that list, if it is to be
    /// waited for.
    pub(crate) fn check_free(
        &self,
        needed: impl FnOnce() -> HeldByCrossings,
    ) -> Result<(), HeldByCrossings> {
        let crossings = self.crossings();
        let holds = self.crossing_holds();
        if holds.hold_nothing(&crossings) {
            return Ok(());
        }
        let needed = needed();
        if holds.are_free(&needed, &crossings) { Ok(()) } else { Err(needed) }
    }

    /// Waits until it may be that none holds it; [`Errno::EAGAIN`] if that takes longer than `limit`. The caller has no locks.
    pub(crate) async fn until_free(
        &self,
        needed: &HeldByCrossings,
        limit: Duration,
    ) -> DiskResult<()> {
        let until = self.env.now() + limit;
        loop {
            // In this order: what is released from now on is heard of.
            let released = self.crossing_holds().next_release();
            if self.is_free(needed) {
                return Ok(());
            }
            self.journal.check()?;
            let left = until.since(self.env.now());
            if left.is_zero() {
                return Err(Errno::EAGAIN);
            }
            // Nothing is released where this member is the primary no more.
            let _ = timeout(&*self.env, left.min(FREE_CHECK_EVERY), released).await;
        }
    }

    /// Holds what a change over several groups needs, in the part of `part`; none if it is not free.
    pub(crate) fn hold_for(
        self: &Arc<Self>,
        crossing: CrossingId,
        part: HoldingPart,
        held: HeldByCrossings,
    ) -> Option<HeldCrossing<D>> {
        let crossings = self.crossings();
        let mut holds = self.crossing_holds();
        if !holds.are_free(&held, &crossings) {
            return None;
        }
        holds.hold((crossing, part), held);
        Some(HeldCrossing { member: Some(self.clone()), held: (crossing, part) })
    }

    /// Whether this member is at work on a change over several groups that it began.
    pub(crate) fn coordinates(&self, crossing: CrossingId) -> bool {
        self.crossing_holds().coordinates(crossing)
    }

    /// The lock of one change over several groups.
    pub(crate) async fn crossing_turn(&self, crossing: CrossingId) -> Turn {
        self.crossing_turns.write(crossing.0).await
    }

    /// A change is made: what it says of changes over several groups.
    fn note_crossing(&self, change: &PoolChange) {
        self.crossings().note(change);
        if matches!(change, PoolChange::PartMade { .. } | PoolChange::Abandoned { .. }) {
            self.crossing_holds().wake();
        }
    }

    fn done(&self) -> MutexGuard<'_, DoneCalls> {
        self.done.lock().expect("no holder of this lock panics")
    }

    /// A change is made, and so is the call that made it.
    fn note_done(&self, order: u64, change: &PoolChange) {
        if let Some((by, done)) = change.done_call() {
            self.done().note(order, by, done);
        }
    }

    /// What a call has done; none if it has made no change. [`Errno::EIO`] if that is not known any more, for nobody waits for its
    /// answer.
    pub(crate) fn find_call(&self, call: CallId) -> DiskResult<Option<DoneCall>> {
        match self.done().find(call) {
            KnownCall::Unknown => Ok(None),
            KnownCall::Done(done) => Ok(Some(done)),
            KnownCall::Forgotten => Err(Errno::EIO),
        }
    }

    /// Whether all changes are refused, since the disk has failed.
    pub(crate) fn has_failed(&self) -> bool {
        self.journal.check().is_err()
    }

    /// Ends the work of a primary: whatever is under way fails, and the disk is free when nobody holds this any more.
    pub(crate) fn close(&self) {
        self.is_closed.store(true, Ordering::SeqCst);
        self.journal.fail();
        if let Some(backups) = self.backups() {
            backups.close();
        }
        self.crossing_holds().wake();
    }

    /// Whether it does no more work.
    pub(crate) fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::SeqCst)
    }

    fn finish(&self, order: u64) {
        if let Some(backups) = self.backups() {
            backups.finish(order);
        }
    }

    /// The order of the last change.
    pub(crate) fn changes_so_far(&self) -> u64 {
        self.journal.last_order()
    }

    /// Writes a change to the journal, and returns its order; where others follow, once it is durable on all members.
    async fn decide(&self, change: &PoolChange) -> DiskResult<u64> {
        let AppendedRecord { sequence, order } =
            self.journal.append(&self.disk, RecordOrder::Next, change).await?;
        self.note_in_log(order, change);
        self.note_decided(change, sequence);
        if let Some(backups) = self.backups() {
            for part in change.parts() {
                if let PoolChange::Make { id, .. } | PoolChange::Attributes { id, .. } = part {
                    backups.note_needed(*id, order);
                }
            }
            let append = ItemKind::Append { order, change: change.encode() };
            let handed = backups.hand(append, Bytes::new());
            let (handed, synced) = futures_util::join!(handed, self.journal.sync(&self.disk));
            handed.and(synced)?;
        } else if change.done_call().is_some() {
            // The disk must not know of the change what the journal has lost: its call could not be told from others.
            self.journal.sync(&self.disk).await?;
        }
        Ok(order)
    }

    /// A change of the pool is in the journal.
    fn note_in_log(&self, order: u64, change: &PoolChange) {
        if self.in_group {
            self.log().add(order, change);
        }
    }

    /// A change is in the journal, and is made now.
    fn note_decided(&self, change: &PoolChange, sequence: u64) {
        for part in change.parts() {
            if let PoolChange::Make { id, .. }
            | PoolChange::Attributes { id, .. }
            | PoolChange::Extended { id, .. } = part
            {
                self.unsettled().insert(*id, sequence);
            }
            if self.in_group {
                self.note_contents(part);
            }
        }
    }

    /// What a change says of the bytes of files.
    fn note_contents(&self, part: &PoolChange) {
        self.marks().note(part);
        match part {
            PoolChange::Marked { id, .. } => {
                if let Err(error) = self.index.forget_digest(*id) {
                    self.index_failed(&error);
                }
            }
            PoolChange::Verified { id, digest } => self.index.put_digest(*id, *digest),
            _ => {}
        }
    }

    pub(crate) fn log(&self) -> MutexGuard<'_, ChangeLog> {
        self.log.lock().expect("no holder of this lock panics")
    }

    /// The next changes of the log after `after`, up to `last` at most, without a gap: one that is just being decided may not be there
    /// yet.
    pub(crate) fn logged(&self, after: u64, last: u64) -> DiskResult<BTreeMap<u64, PoolChange>> {
        // In this order: what a checkpoint takes out of the log is in the index before.
        let recent: Vec<(u64, PoolChange)> = {
            let log = self.log();
            let recent = log.recent.range(after.saturating_add(1)..).take(MAX_LOGGED);
            recent.map(|(order, change)| (*order, change.clone())).collect()
        };
        let mut changes =
            self.index.logged(after, MAX_LOGGED).map_err(|error| self.index_failed(&error))?;
        changes.extend(recent);
        let unbroken = last_of_unbroken(after, &changes).min(last);
        changes.split_off(&unbroken.saturating_add(1));
        Ok(changes)
    }

    pub(crate) fn backups(&self) -> Option<Arc<Backups>> {
        self.backups.lock().expect("no holder of this lock panics").clone()
    }

    /// If all members have everything: their logs begin with a change that says so, and only marks of now are remembered.
    pub(crate) async fn begin_log(self: &Arc<Self>) -> DiskResult<()> {
        self.journal.check()?;
        // No mark is made or cleared meanwhile.
        let _alone = self.whole.write(whole::BARRIER).await;
        let Some(backups) = self.backups() else { return Ok(()) };
        if !backups.map().is_whole() || !backups.members_to_mend().is_empty() {
            return Ok(());
        }
        let order = self.decide(&PoolChange::LogBegins).await?;
        // This one itself may be lost on some: who lacks it has all before it.
        self.log().begin_after(order - 1);
        self.finish(order);
        Ok(())
    }

    /// This member decides all changes from now on. It follows nobody any more; all changes that it has are made.
    pub(crate) fn lead(&self, backups: Arc<Backups>) {
        *self.followed.lock().expect("no holder of this lock panics") = None;
        *self.backups.lock().expect("no holder of this lock panics") = Some(backups);
        // Numbers that the primary before gave to files which nobody else has heard of.
        self.pass_over(self.next.load(Ordering::SeqCst));
    }

    pub(crate) fn marks(&self) -> MutexGuard<'_, Marks> {
        self.marks.lock().expect("no holder of this lock panics")
    }

    /// Notes in the journal that the index has everything up to `meta`.
    async fn note_checkpoint(&self, meta: IndexMeta) -> DiskResult<()> {
        let IndexMeta { sequence, order, .. } = meta;
        let checkpoint = PoolChange::Checkpoint { sequence, boot: self.disk.boot(), order };
        self.journal.append(&self.disk, RecordOrder::Own, &checkpoint).await.map(|_| ())
    }

    fn unsettled(&self) -> MutexGuard<'_, BTreeMap<FileId, u64>> {
        self.unsettled.lock().expect("no holder of this lock panics")
    }

    /// Whether a crash would have a file made again, or its attributes set again.
    pub(crate) fn is_in_journal(&self, id: FileId) -> bool {
        self.unsettled().contains_key(&id)
    }

    /// Has every change refused from now on: a change is half-made. The journal makes it whole when the pool is opened again.
    pub(crate) fn fail(&self) -> Errno {
        self.journal.fail()
    }

    /// Waits until all changes so far survive a crash of the machine.
    pub(crate) async fn sync_changes(&self) -> DiskResult<()> {
        self.journal.sync(&self.disk).await
    }

    /// Makes everything durable, and lets the journal begin anew.
    pub(crate) async fn checkpoint(&self) -> DiskResult<()> {
        self.write_checkpoint().await.map(|_| ())
    }

    /// Makes a checkpoint, and returns what it has written.
    pub(crate) async fn write_checkpoint(&self) -> DiskResult<WrittenCheckpoint> {
        let _one = self.whole.write(whole::CHECKPOINT).await;
        let barrier = self.whole.write(whole::BARRIER).await;
        self.journal.check()?;
        let sequence = self.journal.written();
        let order = match self.followed() {
            Some((applied, _)) => applied,
            None => self.journal.last_order(),
        };
        let meta = self.meta(sequence, order);
        let group = self.group_entries();
        let frozen = self.index.freeze(meta, group);
        let resized = self.held().all_resized();
        drop(barrier);
        self.disk.sync_all().await.map_err(|_| self.journal.fail())?;
        for (id, was) in resized {
            self.held().end_resized(id, Some(was));
        }
        self.make_room().await?;
        let tables = self.index.write(&frozen).map_err(|error| self.index_failed(&error))?;
        self.log().note_written(frozen.logged());
        self.journal.note_checkpoint(sequence).await;
        self.unsettled().retain(|_, at| *at > sequence);
        self.note_checkpoint(meta).await?;
        Ok(WrittenCheckpoint { meta, group: frozen.into_group(), tables })
    }

    fn meta(&self, sequence: u64, order: u64) -> IndexMeta {
        IndexMeta { sequence, order, next: self.next.load(Ordering::SeqCst) }
    }

    /// What the index has to know of the group.
    fn group_entries(&self) -> GroupEntries {
        let last = self.journal.last_order();
        let log = {
            let mut log = self.log();
            log.bound(last);
            log.clone()
        };
        let (marks, remembered) = {
            let marks = self.marks();
            (marks.all(), marks.since_all_had_everything().clone())
        };
        let (crossings, quotas) = (self.crossings().clone(), self.quotas().table().clone());
        let calls = self.done().clone();
        GroupEntries { log, last, marks, remembered, calls, crossings, quotas }
    }

    /// After all changes up to record `sequence` are on the disk and in the index, those up to `order` made, and the log's last is
    /// `last`: writes both, and begins the journal anew.
    pub(crate) async fn settle(&self, sequence: u64, order: u64, last: u64) -> DiskResult<()> {
        self.journal.set_last_order(last);
        let meta = self.meta(sequence, order);
        let frozen = self.index.freeze(meta, self.group_entries());
        self.disk.sync_all().await?;
        self.make_room().await?;
        self.index.write(&frozen).map_err(|error| self.index_failed(&error))?;
        self.log().note_written(frozen.logged());
        self.journal.begin(&self.disk, (sequence, last), self.env.random_u64()).await?;
        self.note_checkpoint(meta).await
    }

    /// Gives out no number below `next` from now on, nor any that may have been given out since it was known.
    pub(crate) fn pass_over(&self, next: u64) {
        let next = next.saturating_add(opening::PASSED_OVER);
        self.next.fetch_max(next, Ordering::SeqCst);
    }

    /// What this member has is what the group has since people have said so, by this revival: gives out no number, durably, that lost
    /// members may have given, nor, if somebody has revived one of them too, within some hours, one that that one gives.
    pub(crate) async fn skip_numbers(&self, revival_secs: u64) -> DiskResult<()> {
        let parts = 1 + revival_secs % SKIPPED_PARTS;
        self.next.fetch_add(parts * SKIPPED_NUMBERS, Ordering::SeqCst);
        self.checkpoint().await
    }

    /// Takes numbers from `known` on for given out at some time, up to those that are given out from now on.
    pub(crate) fn note_unsure(&self, known: u64) {
        let _ = self.unsure.set(known..self.next.load(Ordering::SeqCst));
    }

    /// Counts a placeholder that a directory has gained or lost.
    pub(crate) fn count_placeholder(&self, directory: FileId, is_gained: bool) -> DiskResult<()> {
        if let Some(mut record) = self.record(directory)? {
            record.placeholders = match is_gained {
                true => record.placeholders.saturating_add(1),
                false => record.placeholders.saturating_sub(1),
            };
            self.index.put_file(directory, record);
        }
        Ok(())
    }

    /// A new number for a file that is made in `slot`.
    pub(crate) fn new_id(&self, slot: Slot) -> DiskResult<FileId> {
        let count = self.next.fetch_add(1, Ordering::SeqCst);
        FileId::new(slot, count).ok_or(Errno::ENOSPC)
    }
}
