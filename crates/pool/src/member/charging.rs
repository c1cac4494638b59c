//! What files take of the limits of users and directories ([`crate::quota`]): looked at before and after each call that changes it.
//!
//! A call on the primary first keeps room for what it is going to take, of all limits that concern it, and is refused without
//! (`EDQUOT`). Then it is made, and what its files take by then is noted, whether it was made or not. Whoever makes it has the locks of
//! its files, so nothing else changes what they take meanwhile; a count of all files has the barrier of the member to itself for a few
//! files at a time.
//!
//! Nothing is refused that has been decided already, in this group or another one. A directory that is moved is charged itself; what is
//! below it is counted afterwards, and not refused.
//!
//! A limited directory may lie in another group than a file below it. Then the file's group asks which directories are above, before bytes are
//! written ([`PoolMember::unknown_above`]) and now and then ([`PoolMember::wanted_above`]).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use atoll_env::sleep;
use atoll_vfs::{Errno, FileKind};

use super::seeking::MAX_DEPTH;
use super::{Decided, PoolMember, whole};
use crate::change::{BirthKind, PoolChange};
use crate::disk::{Disk, DiskResult};
use crate::layout::FileId;
use crate::quota::{QuotaAmount, QuotaCharge, QuotaSubject, QuotaTable, Quotas, pages};

/// So many files are counted while no call changes anything.
const COUNTED_AT_ONCE: usize = 64;
/// Calls get this part of the time at least while files are counted.
const PAUSES: u32 = 3;

/// Room that is kept for a call until this is dropped.
#[derive(Default)]
pub(crate) struct ReservedRoom {
    of: Option<(Arc<Mutex<Quotas>>, Vec<QuotaCharge>)>,
}

impl Drop for ReservedRoom {
    fn drop(&mut self) {
        if let Some((quotas, charges)) = &self.of {
            quotas.lock().expect("no holder of this lock panics").release(charges);
        }
    }
}

/// A call that changes what files take.
pub(super) struct ChargedCall {
    before: BTreeMap<FileId, QuotaCharge>,
    /// It may be a change of names.
    is_of_names: bool,
    _room: ReservedRoom,
}

impl<D: Disk> PoolMember<D> {
    pub(crate) fn quotas(&self) -> MutexGuard<'_, Quotas> {
        self.quotas.lock().expect("no holder of this lock panics")
    }

    /// A change is made: what it says of limits.
    pub(super) fn note_quotas(&self, change: &PoolChange, decided: Decided) {
        let PoolChange::Quotas { table } = change else { return };
        match decided {
            // Calls that are made meanwhile go on counting.
            Decided::Here => self.quotas().set_limits(table.clone()),
            Decided::Elsewhere => self.quotas().set_table(table.clone()),
        }
    }

    /// Whether calls have to look what their files take.
    pub(crate) fn has_quotas(&self) -> bool {
        !self.quotas().is_empty()
    }

    /// Has all members have the table that `edit` returns, if that is another one than it has left.
    pub(crate) async fn edit_quotas(
        self: &Arc<Self>,
        edit: impl FnOnce(&mut Quotas) -> QuotaTable,
    ) -> DiskResult<()> {
        let _one = self.whole.write(whole::QUOTAS).await;
        let changed = {
            let mut quotas = self.quotas();
            let table = edit(&mut quotas);
            (table != *quotas.table()).then_some(table)
        };
        match changed {
            Some(table) => self.write_quotas(table).await,
            None => Ok(()),
        }
    }

    async fn write_quotas(self: &Arc<Self>, table: QuotaTable) -> DiskResult<()> {
        let _changing = self.begin_change().await?;
        self.change(PoolChange::Quotas { table }).await.map(|_| ())
    }

    /// Has all members know what is used by now.
    pub(crate) async fn record_quotas(self: &Arc<Self>) -> DiskResult<()> {
        let _one = self.whole.write(whole::QUOTAS).await;
        let table = {
            let mut quotas = self.quotas();
            if !quotas.is_to_be_recorded() {
                return Ok(());
            }
            quotas.note_recorded(true);
            quotas.table().clone()
        };
        let written = self.write_quotas(table).await;
        if written.is_err() {
            self.quotas().note_recorded(false);
        }
        written
    }

    /// The limits for what an owner has in a directory, or for a file of his.
    pub(crate) fn limits_of(&self, uid: u32, id: FileId) -> DiskResult<Vec<QuotaSubject>> {
        let user = QuotaSubject::User(uid);
        let mut subjects: Vec<_> =
            Some(user).filter(|user| self.quotas().limits(*user)).into_iter().collect();
        if self.quotas().limits_directories() {
            subjects.extend(self.limited_above(id)?);
        }
        Ok(subjects)
    }

    /// Whether all groups together have room for one more directory there, as far as this group knows: [`Errno::EDQUOT`] if not.
    pub(crate) fn check_left(&self, uid: u32, parent: FileId) -> DiskResult<()> {
        if !self.has_quotas() {
            return Ok(());
        }
        let subjects = self.limits_of(uid, parent)?;
        let charge = QuotaCharge { subjects, amount: QuotaAmount::of(FileKind::Directory, 0) };
        let has_left = self.quotas().have_left(&charge);
        if has_left { Ok(()) } else { Err(Errno::EDQUOT) }
    }

    /// Which limited directories are above a file, itself included, in all groups as far as that is known.
    pub(crate) fn limited_above(&self, id: FileId) -> DiskResult<Vec<QuotaSubject>> {
        let (mut limited, asked) = self.limited_here(id)?;
        if let Some(asked) = asked {
            let above = self.above_elsewhere().entry(asked).or_default().clone();
            let above = above.into_iter().flatten().map(|id| QuotaSubject::Directory(id.0));
            let quotas = self.quotas();
            limited.extend(above.filter(|subject| quotas.limits(*subject)));
        }
        Ok(limited)
    }

    /// Which limited directories are above a file in this group, itself included, and of which file other groups know what is above; none if that
    /// is the root. A file that has a name here and others elsewhere is below the one here.
    fn limited_here(&self, id: FileId) -> DiskResult<(Vec<QuotaSubject>, Option<FileId>)> {
        let outside = FileId::outside(id.group());
        let mut limited = Vec::new();
        let mut at = id;
        for _ in 0..MAX_DEPTH {
            let subject = QuotaSubject::Directory(at.0);
            if self.quotas().limits(subject) {
                limited.push(subject);
            }
            if at.is_fixed() {
                return Ok((limited, None));
            }
            let mut places = self.places(at)?;
            places.retain(|place| !place.is_open_name());
            let mut parents = places.into_iter().map(|place| place.parent).peekable();
            // It is just being renamed, or clients see no name of it any more.
            if parents.peek().is_none() {
                return Ok((limited, None));
            }
            match parents.find(|parent| *parent != outside) {
                Some(parent) => at = parent,
                None => return Ok((limited, Some(at))),
            }
        }
        Err(Errno::ELOOP)
    }

    fn above_elsewhere(&self) -> MutexGuard<'_, super::AboveElsewhere> {
        self.above_elsewhere.lock().expect("no holder of this lock panics")
    }

    /// A file of this group of which other groups are to be asked what is above it, before what is done to `id` is charged.
    pub(crate) fn unknown_above(&self, id: FileId) -> DiskResult<Option<FileId>> {
        if !self.quotas().limits_directories() {
            return Ok(None);
        }
        let (_, asked) = self.limited_here(id)?;
        Ok(asked.filter(|asked| self.above_elsewhere().get(asked).is_none_or(Option::is_none)))
    }

    /// Files of this group of which it is to be asked what is above them in others.
    pub(crate) fn wanted_above(&self, also_known: bool) -> Vec<FileId> {
        let elsewhere = self.above_elsewhere();
        let wanted = elsewhere.iter().filter(|(_, known)| also_known || known.is_none());
        wanted.map(|(id, _)| *id).collect()
    }

    /// What is above a file in other groups, as these say.
    pub(crate) async fn note_above(
        self: &Arc<Self>,
        id: FileId,
        above: Vec<FileId>,
    ) -> DiskResult<()> {
        let _changing = self.begin_change().await?;
        let _turn = self.turns.write(id.0).await;
        let before = self.charge(id).await?;
        self.above_elsewhere().insert(id, Some(above));
        let after = self.charge(id).await?;
        self.quotas().note(id, &before, &after);
        self.recount_below(id, &before, &after).await;
        Ok(())
    }

    /// What is below a directory that is below other limits than before is counted again.
    async fn recount_below(&self, id: FileId, before: &QuotaCharge, after: &QuotaCharge) {
        let directories = |charge: &QuotaCharge| -> BTreeSet<QuotaSubject> {
            let is_directory = |of: &&QuotaSubject| matches!(of, QuotaSubject::Directory(_));
            charge.subjects.iter().filter(is_directory).copied().collect()
        };
        let is_there = before.amount.files > 0 && after.amount.files > 0;
        if !is_there || directories(before) == directories(after) {
            return;
        }
        let is_empty = async {
            if self.record(id)?.is_none_or(|record| record.kind != FileKind::Directory) {
                return Ok(true);
            }
            Ok::<_, Errno>(self.disk.list(&self.node(id).await?).await?.is_empty())
        };
        if !is_empty.await.unwrap_or(false) {
            self.quotas().want_count();
        }
    }

    /// What a file takes of the limits: nothing if it is not there, or has no name.
    pub(crate) async fn charge(&self, id: FileId) -> DiskResult<QuotaCharge> {
        let Some(record) = self.record(id)?.filter(|record| record.leads_to.is_none()) else {
            self.above_elsewhere().remove(&id);
            return Ok(QuotaCharge::default());
        };
        let is_unnamed = self.held().is_nameless(id);
        let is_own = id.is_fixed() && id != FileId::ROOT;
        if is_unnamed || is_own || (!id.is_fixed() && self.places(id)?.is_empty()) {
            return Ok(QuotaCharge::default());
        }
        let node = match self.node(id).await {
            Err(Errno::ESTALE | Errno::ENOENT) => return Ok(QuotaCharge::default()),
            node => node?,
        };
        let stat = self.disk.stat(&node).await?;
        if stat.nlink == 0 {
            return Ok(QuotaCharge::default());
        }
        let subjects = self.limits_of(stat.uid, id)?;
        let amount = QuotaAmount::of(record.kind, stat.size_bytes);
        Ok(QuotaCharge { subjects, amount })
    }

    /// What the files that changes of names or owners concern take now.
    async fn charges_of(
        &self,
        changes: &[PoolChange],
    ) -> DiskResult<BTreeMap<FileId, QuotaCharge>> {
        let mut charges = BTreeMap::new();
        for change in changes {
            let owned = match change {
                PoolChange::Attributes { id, uid: Some(_), .. } => Some(*id),
                _ => None,
            };
            for id in change.needs().0.into_iter().chain(owned) {
                charges.insert(id, self.charge(id).await?);
            }
        }
        Ok(charges)
    }

    /// What a change of names or owners is going to take, beside what its files take by now.
    fn growth(
        &self,
        change: &PoolChange,
        now: &BTreeMap<FileId, QuotaCharge>,
    ) -> DiskResult<Vec<QuotaCharge>> {
        match change {
            PoolChange::Make { at, birth, .. } => {
                if matches!(birth.what, BirthKind::Referral(_)) {
                    return Ok(Vec::new());
                }
                let subjects = self.limits_of(birth.uid, at.parent)?;
                let amount = QuotaAmount::of(birth.what.kind(), 0);
                Ok(vec![QuotaCharge { subjects, amount }])
            }
            PoolChange::Attributes { id, uid: Some(uid), .. } => {
                let (user, now) = (QuotaSubject::User(*uid), &now[id]);
                let is_new = self.quotas().limits(user) && !now.subjects.contains(&user);
                let charge = QuotaCharge { subjects: vec![user], amount: now.amount };
                Ok(is_new.then_some(charge).into_iter().collect())
            }
            PoolChange::Link { id, at, .. } => self.coming(&now[id], at.parent, None),
            PoolChange::Rename { id, from, to, replaced, .. } if from.parent != to.parent => {
                self.coming(&now[id], to.parent, replaced.map(|replaced| &now[&replaced]))
            }
            PoolChange::Exchange { id, from, other, to, .. } if from.parent != to.parent => {
                let mut charges = self.coming(&now[id], to.parent, Some(&now[other]))?;
                charges.extend(self.coming(&now[other], from.parent, Some(&now[id]))?);
                Ok(charges)
            }
            _ => Ok(Vec::new()),
        }
    }

    /// What a file takes of the limits of a directory into which it comes, where another one goes. One that gets another name there has to
    /// have room, too: it may lose those that it has.
    fn coming(
        &self,
        comes: &QuotaCharge,
        into: FileId,
        goes: Option<&QuotaCharge>,
    ) -> DiskResult<Vec<QuotaCharge>> {
        if !self.quotas().limits_directories() {
            return Ok(Vec::new());
        }
        let new = self.limited_above(into)?.into_iter();
        let new = new.filter(|subject| !comes.subjects.contains(subject)).map(|subject| {
            let gone = goes.filter(|goes| goes.subjects.contains(&subject));
            let amount =
                comes.amount.minus(gone.map_or(QuotaAmount::default(), |gone| gone.amount));
            QuotaCharge { subjects: vec![subject], amount }
        });
        Ok(new.collect())
    }

    /// Keeps room for a change of names or owners, and looks what its files take; none if there are no limits.
    pub(super) async fn begin_charging(
        &self,
        change: &PoolChange,
    ) -> DiskResult<Option<ChargedCall>> {
        if !self.has_quotas() {
            return Ok(None);
        }
        let before = self.charges_of(change.parts()).await?;
        if before.is_empty() {
            return Ok(None);
        }
        let room = match change {
            // What others have decided is made.
            PoolChange::PartMade { .. } => ReservedRoom::default(),
            change => self.reserve_growth(change.parts(), &before)?,
        };
        Ok(Some(ChargedCall { before, is_of_names: true, _room: room }))
    }

    /// Whether what a part of a change over several groups takes would be refused.
    pub(crate) async fn check_growth(&self, changes: &[PoolChange]) -> DiskResult<()> {
        if !self.has_quotas() {
            return Ok(());
        }
        let before = self.charges_of(changes).await?;
        self.reserve_growth(changes, &before).map(drop)
    }

    fn reserve_growth(
        &self,
        changes: &[PoolChange],
        before: &BTreeMap<FileId, QuotaCharge>,
    ) -> DiskResult<ReservedRoom> {
        let mut charges = Vec::new();
        for change in changes {
            charges.extend(self.growth(change, before)?);
        }
        self.reserve_room(charges)
    }

    fn reserve_room(&self, charges: Vec<QuotaCharge>) -> DiskResult<ReservedRoom> {
        self.quotas().reserve(&charges)?;
        Ok(ReservedRoom { of: Some((self.quotas.clone(), charges)) })
    }

    /// Notes what the files of a change take by now.
    pub(super) async fn end_charging(&self, call: Option<ChargedCall>) {
        let Some(ChargedCall { before, is_of_names, _room }) = call else { return };
        for (id, before) in before {
            if is_of_names && let Some(known) = self.above_elsewhere().get_mut(&id) {
                // It may have another name in another group.
                *known = None;
            }
            match self.charge(id).await {
                Ok(after) => {
                    self.quotas().note(id, &before, &after);
                    self.recount_below(id, &before, &after).await;
                }
                Err(_) => self.quotas().want_count(),
            }
        }
    }

    /// Keeps room for a file that is to be `size_bytes` long, and looks what it takes; none if there are no limits.
    async fn begin_growing(&self, id: FileId, size_bytes: u64) -> DiskResult<Option<ChargedCall>> {
        if !self.has_quotas() || self.held().is_nameless(id) {
            return Ok(None);
        }
        let before = self.charge(id).await?;
        let more = pages(size_bytes).saturating_sub(before.amount.bytes);
        let amount = QuotaAmount { bytes: more, files: 0 };
        let room =
            self.reserve_room(vec![QuotaCharge { subjects: before.subjects.clone(), amount }])?;
        let before = [(id, before)].into();
        Ok(Some(ChargedCall { before, is_of_names: false, _room: room }))
    }

    /// Makes a file longer, up to `size_bytes`, if limits leave room for that.
    pub(super) async fn while_growing<T>(
        &self,
        id: FileId,
        size_bytes: u64,
        work: impl Future<Output = DiskResult<T>>,
    ) -> DiskResult<T> {
        let call = self.begin_growing(id, size_bytes).await?;
        let done = work.await;
        self.end_charging(call).await;
        done
    }

    /// Counts all files for the limits, while calls are made.
    pub(crate) async fn count_for_quotas(self: &Arc<Self>) -> DiskResult<()> {
        let _one = self.whole.write(whole::COUNT).await;
        self.quotas().begin_count();
        let mut after = FileId(0);
        loop {
            let begun = self.env.now();
            {
                let _alone = self.whole.write(whole::BARRIER).await;
                self.journal.check()?;
                let next = self.index.files_after(after, COUNTED_AT_ONCE);
                let (last, files) = next.map_err(|error| self.index_failed(&error))?;
                for (id, _) in files {
                    // One that cannot be read takes nothing.
                    if let Ok(charge) = self.charge(id).await {
                        self.quotas().count(&charge);
                    }
                }
                self.quotas().counted_upto(last);
                after = last;
            }
            if after.0 == u64::MAX {
                break;
            }
            sleep(&*self.env, self.env.now().since(begun).max(Duration::from_micros(100)) * PAUSES)
                .await;
        }
        self.quotas().end_count();
        Ok(())
    }
}
