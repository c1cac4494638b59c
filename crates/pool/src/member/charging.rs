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
//! A limited directory may lie in another group than a file below it. Then the file's group asks which directories are above
//! ([`PoolMember::wanted_above`]); until it has heard, the file does not count there.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use atoll_env::sleep;
use atoll_vfs::{Errno, FileKind};

use super::{Decided, PoolMember, whole};
use crate::change::{BirthKind, PoolChange};
use crate::disk::{Disk, DiskResult};
use crate::layout::FileId;
use crate::quota::{Charge, QuotaAmount, QuotaSubject, QuotaTable, Quotas, pages};

/// So many files are counted while no call changes anything.
const COUNTED_AT_ONCE: usize = 64;
/// Calls get this part of the time at least while files are counted.
const PAUSES: u32 = 3;
/// More directories above a file than there can be.
const MAX_ABOVE: usize = 1 << 16;

/// Room that is kept for a call until this is dropped.
#[derive(Default)]
pub(crate) struct ReservedRoom {
    of: Option<(Arc<Mutex<Quotas>>, Vec<Charge>)>,
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
    before: Vec<(FileId, Charge)>,
    /// A directory gets another parent: what is below it may have to be counted again.
    moves_directory: bool,
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
            quotas.note_recorded();
            quotas.table().clone()
        };
        self.write_quotas(table).await
    }

    /// The limits for what an owner has in a directory.
    pub(crate) fn limits_of(&self, uid: u32, directory: FileId) -> DiskResult<Vec<QuotaSubject>> {
        let user = QuotaSubject::User(uid);
        let mut subjects: Vec<_> =
            Some(user).filter(|user| self.quotas().limits(*user)).into_iter().collect();
        if self.quotas().limits_directories() {
            subjects.extend(self.limited_above(directory)?);
        }
        Ok(subjects)
    }

    /// The limits for what a file has, and for what is below it.
    pub(crate) async fn limits_at(&self, id: FileId) -> DiskResult<Vec<QuotaSubject>> {
        let is_directory =
            self.record(id)?.is_some_and(|record| record.kind == FileKind::Directory);
        let limits_directories = self.quotas().limits_directories();
        match limits_directories {
            false => Ok(Vec::new()),
            true if is_directory => self.limited_above(id),
            true => self.parent_of(id)?.map_or(Ok(Vec::new()), |dir| self.limited_above(dir)),
        }
    }

    /// Which of this directory and those above it are limited.
    fn limited_above(&self, directory: FileId) -> DiskResult<Vec<QuotaSubject>> {
        let mut limited = Vec::new();
        let mut at = directory;
        for _ in 0..MAX_ABOVE {
            let subject = QuotaSubject::Directory(at.0);
            if self.quotas().limits(subject) {
                limited.push(subject);
            }
            let Some(parent) = self.parent_of(at)? else { return Ok(limited) };
            if parent == FileId::outside(at.group()) {
                let mut elsewhere = self.above_elsewhere();
                let known = elsewhere.entry(at).or_default();
                let known = known.iter().flatten().map(|id| QuotaSubject::Directory(id.0));
                limited.extend(known.filter(|subject| self.quotas().limits(*subject)));
                return Ok(limited);
            }
            at = parent;
        }
        Err(Errno::ELOOP)
    }

    fn above_elsewhere(&self) -> MutexGuard<'_, super::AboveElsewhere> {
        self.above_elsewhere.lock().expect("no holder of this lock panics")
    }

    /// Directories of this group of which it is to be asked what is above them in others.
    pub(crate) fn wanted_above(&self, also_known: bool) -> Vec<FileId> {
        let elsewhere = self.above_elsewhere();
        let wanted = elsewhere.iter().filter(|(_, known)| also_known || known.is_none());
        wanted.map(|(id, _)| *id).collect()
    }

    /// What is above a directory in other groups, as these say.
    pub(crate) fn note_above(&self, directory: FileId, above: Vec<FileId>) {
        let is_new = {
            let mut elsewhere = self.above_elsewhere();
            let known = elsewhere.insert(directory, Some(above.clone()));
            known.is_none_or(|known| known.as_ref() != Some(&above))
        };
        let is_limited = |id: &FileId| self.quotas().limits(QuotaSubject::Directory(id.0));
        // What it was above before may have been limited, too.
        if is_new && (above.iter().any(is_limited) || self.quotas().table().is_counted()) {
            self.quotas().want_count();
        }
    }

    /// What a file takes of the limits: nothing if it is not there, or has no name.
    pub(crate) async fn charge(&self, id: FileId) -> DiskResult<Charge> {
        let Some(record) = self.record(id)?.filter(|record| record.leads_to.is_none()) else {
            return Ok(Charge::default());
        };
        if self.held().is_nameless(id) {
            return Ok(Charge::default());
        }
        let parent = match self.parent_of(id) {
            Err(Errno::ESTALE) => return Ok(Charge::default()),
            parent => parent?,
        };
        let node = match self.node(id).await {
            Err(Errno::ESTALE | Errno::ENOENT) => return Ok(Charge::default()),
            node => node?,
        };
        let stat = self.disk.stat(&node).await?;
        if stat.nlink == 0 || (id.is_fixed() && id != FileId::ROOT) {
            return Ok(Charge::default());
        }
        let directory = match record.kind {
            FileKind::Directory => id,
            _ => parent.ok_or(Errno::EIO)?,
        };
        let subjects = self.limits_of(stat.uid, directory)?;
        let amount = QuotaAmount::of(record.kind, stat.size_bytes);
        Ok(Charge { subjects, amount })
    }

    /// What a change of names or attributes is going to take, beside what its files take before it.
    async fn growth(&self, change: &PoolChange) -> DiskResult<Option<Charge>> {
        match change {
            PoolChange::Make { at, birth, .. } => {
                let kind = birth.what.kind();
                if matches!(birth.what, BirthKind::Referral(_)) {
                    return Ok(None);
                }
                let subjects = self.limits_of(birth.uid, at.parent)?;
                Ok(Some(Charge { subjects, amount: QuotaAmount::of(kind, 0) }))
            }
            PoolChange::Attributes { id, uid: Some(uid), .. } => {
                let now = self.charge(*id).await?;
                let user = QuotaSubject::User(*uid);
                let is_new = self.quotas().limits(user) && !now.subjects.contains(&user);
                Ok(is_new.then(|| Charge { subjects: vec![user], amount: now.amount }))
            }
            PoolChange::Rename { id, from, to, .. } if from.parent != to.parent => {
                if !self.quotas().limits_directories() {
                    return Ok(None);
                }
                let before: BTreeSet<_> = self.limited_above(from.parent)?.into_iter().collect();
                let after = self.limited_above(to.parent)?;
                let subjects: Vec<_> =
                    after.into_iter().filter(|subject| !before.contains(subject)).collect();
                match subjects.is_empty() {
                    true => Ok(None),
                    false => Ok(Some(Charge { subjects, amount: self.charge(*id).await?.amount })),
                }
            }
            _ => Ok(None),
        }
    }

    /// Keeps room for a change of names or attributes, and looks what its files take; none if there are no limits.
    pub(super) async fn begin_charging(
        &self,
        change: &PoolChange,
    ) -> DiskResult<Option<ChargedCall>> {
        if !self.has_quotas() {
            return Ok(None);
        }
        let (parts, is_refused) = match change {
            // What others have decided is made.
            PoolChange::PartMade { changes, .. } => (&changes[..], false),
            change => (change.parts(), true),
        };
        let mut charges = Vec::new();
        let mut call = ChargedCall {
            before: Vec::new(),
            moves_directory: false,
            _room: ReservedRoom::default(),
        };
        let mut ids = BTreeSet::new();
        for part in parts {
            ids.extend(part.needs().0);
            match part {
                PoolChange::Attributes { id, uid: Some(_), .. } => drop(ids.insert(*id)),
                PoolChange::Rename { from, to, .. } | PoolChange::Exchange { from, to, .. } => {
                    call.moves_directory |= from.parent != to.parent;
                }
                _ => {}
            }
            if is_refused {
                charges.extend(self.growth(part).await?);
            }
        }
        if ids.is_empty() {
            return Ok(None);
        }
        call._room = self.reserve_room(charges)?;
        let mut has_directory = false;
        for id in ids {
            has_directory |=
                self.record(id)?.is_some_and(|record| record.kind == FileKind::Directory);
            call.before.push((id, self.charge(id).await?));
        }
        call.moves_directory &= has_directory && self.quotas().limits_directories();
        Ok(Some(call))
    }

    /// Whether what a part of a change over several groups takes would be refused.
    pub(crate) async fn check_growth(&self, changes: &[PoolChange]) -> DiskResult<()> {
        if !self.has_quotas() {
            return Ok(());
        }
        let mut charges = Vec::new();
        for change in changes {
            charges.extend(self.growth(change).await?);
        }
        self.reserve_room(charges).map(drop)
    }

    fn reserve_room(&self, charges: Vec<Charge>) -> DiskResult<ReservedRoom> {
        self.quotas().reserve(&charges)?;
        Ok(ReservedRoom { of: Some((self.quotas.clone(), charges)) })
    }

    /// Notes what the files of a change take by now.
    pub(super) async fn end_charging(&self, call: Option<ChargedCall>) {
        let Some(ChargedCall { before, moves_directory, _room }) = call else { return };
        for (id, before) in before {
            match self.charge(id).await {
                Ok(after) => self.quotas().note(id, &before, &after),
                Err(_) => self.quotas().want_count(),
            }
        }
        if moves_directory {
            self.quotas().want_count();
        }
    }

    /// Keeps room for a file that is to be `size_bytes` long, and looks what it takes; none if there are no limits.
    pub(super) async fn begin_growing(
        &self,
        id: FileId,
        size_bytes: u64,
    ) -> DiskResult<Option<ChargedCall>> {
        if !self.has_quotas() || self.held().is_nameless(id) {
            return Ok(None);
        }
        let before = self.charge(id).await?;
        let more = pages(size_bytes).saturating_sub(before.amount.bytes);
        let amount = QuotaAmount { bytes: more, files: 0 };
        let room = self.reserve_room(vec![Charge { subjects: before.subjects.clone(), amount }])?;
        let before = vec![(id, before)];
        Ok(Some(ChargedCall { before, moves_directory: false, _room: room }))
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
