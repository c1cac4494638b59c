//! What a crash has left, and what is to be done about it: the changes in the journal that the index has not are made again.
//!
//! The disk may have any of them or none, and some that the journal has lost. So they are not made one after the other: the
//! *outcome* of all is computed ([`FileOutcomes`]), and each file that they name is sought by its number and brought there. What is
//! there already is left alone, so doing it twice changes nothing.
//!
//! In a pool of one, where the disk knows something newer, it is right: a file that stands under a name that the journal does not know stays, and
//! whatever stands in the way of a file that is brought back stays, too; the file then goes to `.atoll/old`. In a pool of several, journals have every
//! change before it is made: what stands under a name of these changes, and is no file of theirs, is a stranger. A loss of power
//! leaves one when it undoes the removal of a file and takes its number; it goes to `.atoll/old`. A file is made anew, empty, only if it was made by one of these changes and is
//! nowhere: its bytes were never promised, its name was.
//!
//! Attributes are set again unless the file was synced since, and a file gets its number again as an attribute.

mod locating;
mod outcomes;

use std::collections::{BTreeMap, BTreeSet};

use atoll_vfs::{Errno, FileKind, RenameFlags};

use self::outcomes::{FileOutcomes, LastAttributes, numbers};
use super::following::{self, FollowedChanges};
use super::opening::{checkpoint_of, last_of_unbroken, released_of};
use super::{Decided, OpenError, OpenReport, PoolMember};
use crate::change::{FileBirth, PoolChange, PoolPlace, Time};
use crate::disk::{Disk, DiskResult, Making, Stat, TimeToSet, missing_is_none};
use crate::index::{FileRecord, IndexMeta};
use crate::journal::JournalRecord;
use crate::layout::{FileId, OWN_DIRECTORY, Placeholder, Slot};
use crate::marks::WHOLE;

impl<D: Disk> PoolMember<D> {
    /// Makes the changes again that the index has not, and the index if it is gone. Afterwards disk, index and journal agree.
    pub(crate) async fn recover(
        &self,
        records: Vec<JournalRecord>,
        meta: Option<IndexMeta>,
        makes: Makes,
    ) -> Result<OpenReport, OpenError> {
        let mut report = OpenReport::default();
        let last_record = records.last().map_or(0, |record| record.sequence);
        let highest = records
            .iter()
            .flat_map(|record| numbers(&record.change))
            .map(|id| id.count() + 1)
            .max();
        let next =
            highest.unwrap_or(0).max(meta.map_or(0, |meta| meta.next)).max(FileId::FIRST_COUNT);
        self.pass_over(next);
        if let Some(meta) = meta {
            self.note_unsure(meta.next);
        }
        let last_boot = records.iter().rev().find_map(|record| match record.change {
            PoolChange::Checkpoint { boot, .. } => Some(boot),
            _ => None,
        });
        let has_stopped = last_boot != Some(self.disk.boot());
        let (known, order) = checkpoint_of(&records, meta);
        let released = released_of(&records);
        let has_gap = meta.is_some_and(|meta| meta.sequence < known);
        let index_failed =
            |error: crate::index::PoolIndexError| OpenError::Index(error.to_string());
        let group = self.index.group().map_err(index_failed)?;
        for (id, marks) in &group.marks {
            self.marks().add(*id, &marks.iter().copied().collect::<Vec<_>>());
        }
        for (id, marks) in group.remembered {
            self.marks().remember(id, marks);
        }
        *self.log() = group.log;
        *self.done() = group.calls;
        *self.crossings() = group.crossings;
        self.quotas().set_table(group.quotas);
        let mut decided = self.index.logged(order, usize::MAX).map_err(index_failed)?;
        let newer = records.into_iter().filter(|record| record.sequence > known);
        for record in newer.filter(|record| record.order > 0) {
            self.note_in_log(record.order, &record.change);
            decided.insert(record.order, record.change);
        }
        if meta.is_none() || has_gap {
            // What the index had of the log is gone.
            self.log().begin_after(order);
        }
        let unbroken = last_of_unbroken(order, &decided);
        let (upto, last_decided) = match &makes {
            Makes::All => (u64::MAX, u64::MAX),
            Makes::Released { upto, last, .. } => (*upto, (*last).min(unbroken)),
        };
        if order.max(released) > last_decided {
            return Err(OpenError::PrimaryIsOlder);
        }
        let (made, pending, mut withdrawn) = following::split_released(decided, last_decided, upto);
        if let Makes::Released { withdrawn: also, .. } = &makes {
            withdrawn.extend(also);
        }
        let order = made.keys().next_back().copied().unwrap_or(0).max(order);
        if meta.is_none() || has_gap {
            report.files_indexed = self.index_again().await?;
            if self.in_group {
                // The marks were in the index.
                for id in self.index.all_files().map_err(index_failed)?.into_keys() {
                    self.marks().add(id, &[WHOLE]);
                }
            }
        }
        for (order, change) in &made {
            if !withdrawn.contains(order) {
                self.note_done(*order, change);
                self.crossings().note(change);
                self.note_quotas(change, Decided::Elsewhere);
            }
        }
        report.changes_redone = made.len();
        let failed = |errno| OpenError::Disk("cannot make the changes of its journal again", errno);
        if self.in_group {
            for (order, change) in &made {
                for part in change.parts() {
                    self.note_contents(part);
                }
                if *change == PoolChange::LogBegins {
                    self.log().begin_after(*order - 1);
                }
            }
        }
        if report.changes_redone > 0 {
            // What was decided is made again, also on a full disk.
            if self.is_nearly_full().await.map_err(failed)? {
                self.use_reserve().await.map_err(failed)?;
            }
            let outcomes = FileOutcomes::of(&made, &withdrawn, |id| self.index.places(id));
            let outcomes = outcomes.map_err(index_failed)?;
            report.names_mended = Redo::new(self, outcomes, has_stopped)
                .await
                .map_err(failed)?
                .run()
                .await
                .map_err(failed)?;
        }
        let sequence = last_record.max(known);
        let last = pending.keys().next_back().copied().unwrap_or(order);
        self.log().cut(last);
        if makes != Makes::All {
            let withdrawn = withdrawn.split_off(&(order + 1));
            let followed = FollowedChanges { applied: order, pending, withdrawn };
            *self.followed.lock().expect("no holder of this lock panics") = Some(followed);
        }
        self.settle(sequence, order, last).await.map_err(failed)?;
        Ok(report)
    }
}

/// Which changes of the journal are made again.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Makes {
    /// All.
    All,
    /// Those that the primary has released; the others wait. Those after its last are lost. Some were withdrawn by changes that are
    /// not here yet.
    Released { upto: u64, last: u64, withdrawn: BTreeSet<u64> },
}

/// What is done with files in rounds.
#[derive(Clone, Copy, Debug)]
enum Round {
    Remove,
    PutInPlace,
}

/// Files on their way to where they belong.
struct Redo<'a, D: Disk> {
    member: &'a PoolMember<D>,
    outcomes: FileOutcomes,
    /// The machine has stopped since: the disk may have lost what was not synced.
    has_stopped: bool,
    /// The disk keeps the numbers of files as attributes.
    keeps_numbers: bool,
    own: D::Node,
    /// Open nodes of files and directories that were found, or are nowhere.
    nodes: BTreeMap<FileId, Option<D::Node>>,
    /// Files that were found without their number, or made.
    unfinished: BTreeSet<FileId>,
    /// Names that several of the files have had.
    shared: BTreeSet<PoolPlace>,
    /// Files that were found without their number, and may be others: the disk may have lost those, with their names.
    doubtful: BTreeSet<FileId>,
    /// Where directories lie that are distributed.
    slots: BTreeMap<FileId, Slot>,
    /// Which files inodes were taken for.
    taken: BTreeMap<u64, FileId>,
    /// Where each file was found.
    found: BTreeMap<FileId, BTreeSet<PoolPlace>>,
    mended: usize,
    /// The number of the next stranger that is set aside, unless it is taken.
    next_stranger: u64,
}

impl<'a, D: Disk> Redo<'a, D> {
    async fn new(
        member: &'a PoolMember<D>,
        outcomes: FileOutcomes,
        has_stopped: bool,
    ) -> DiskResult<Redo<'a, D>> {
        let own = member.own().await?;
        let shared = outcomes.shared_names();
        let mut keeps_numbers = false;
        for id in FileId::fixed(member.settings.group) {
            if let Ok(node) = member.node(id).await {
                keeps_numbers |= member.id_of(&node).await.is_some();
            }
        }
        Ok(Redo {
            member,
            outcomes,
            has_stopped,
            keeps_numbers,
            own,
            nodes: BTreeMap::new(),
            unfinished: BTreeSet::new(),
            shared,
            doubtful: BTreeSet::new(),
            slots: BTreeMap::new(),
            taken: BTreeMap::new(),
            found: BTreeMap::new(),
            mended: 0,
            next_stranger: 0,
        })
    }

    /// Returns how many names were made or removed.
    async fn run(mut self) -> DiskResult<usize> {
        let mut order: Vec<(usize, FileId)> =
            self.outcomes.files.iter().map(|(id, outcome)| (outcome.rank, *id)).collect();
        order.sort_unstable();
        let order: Vec<FileId> = order.into_iter().map(|(_, id)| id).collect();
        for id in &order {
            if let Some(slot) = self.slot(*id)? {
                self.slots.insert(*id, slot);
            }
        }
        for id in &order {
            self.locate(*id).await?;
        }
        self.locate_again(&order).await?;
        self.seek_the_missing().await?;
        for id in &order {
            self.take_aside(*id).await?;
        }
        // What is in the way goes first, and what is in a directory before the directory.
        let last_first = order.iter().rev().copied().collect();
        for id in self.in_rounds(last_first, Round::Remove).await? {
            self.set_full_directory_aside(id).await?;
        }
        self.set_strangers_aside().await?;
        // A file may have moved into a directory that was made later.
        let all = order.clone();
        for id in self.in_rounds(all, Round::PutInPlace).await? {
            self.give_up_aside(id).await?;
        }
        for id in &order {
            self.empty_doubtful(*id).await?;
            self.set_attributes(*id).await?;
            self.enter(*id).await?;
        }
        for id in &order {
            self.count_placeholders(*id)?;
            self.mend_placeholder(*id).await?;
        }
        Ok(self.mended)
    }

    /// Does something with files, again with those for which it could not be done, until it can be done for none of them. Returns
    /// those.
    async fn in_rounds(&mut self, mut files: Vec<FileId>, round: Round) -> DiskResult<Vec<FileId>> {
        loop {
            let before = files.len();
            let mut left = Vec::new();
            for id in files {
                let is_done = match round {
                    Round::Remove => self.remove(id).await?,
                    Round::PutInPlace => self.put_in_place(id).await?,
                };
                if !is_done {
                    left.push(id);
                }
            }
            if left.is_empty() || left.len() == before {
                return Ok(left);
            }
            files = left;
        }
    }

    /// The names under which a file may be.
    fn candidates(&self, id: FileId) -> DiskResult<BTreeSet<PoolPlace>> {
        match self.outcomes.files.get(&id) {
            Some(outcome) => Ok(outcome.ever.clone()),
            None => Ok(self.member.places(id)?.into_iter().collect()),
        }
    }

    fn birth(&self, id: FileId) -> Option<&FileBirth> {
        self.outcomes.files.get(&id)?.birth.as_ref()
    }

    fn slot(&self, id: FileId) -> DiskResult<Option<Slot>> {
        if let Some(slot) = self.slots.get(&id) {
            return Ok(Some(*slot));
        }
        match self.birth(id) {
            Some(birth) => Ok(birth.what.slot()),
            None => Ok(self.member.record(id)?.and_then(|record| record.slot)),
        }
    }

    fn aside(id: FileId) -> Vec<u8> {
        format!("moved-{id}").into_bytes()
    }

    /// Takes a file away from where it does not belong, if it belongs elsewhere.
    async fn take_aside(&mut self, id: FileId) -> DiskResult<()> {
        let after = self.outcomes.file(id).after.clone();
        let found = self.found.get(&id).cloned().unwrap_or_default();
        if self.slot(id)?.is_some() || after.is_empty() || !after.is_disjoint(&found) {
            return Ok(());
        }
        let Some(from) = found.first() else { return Ok(()) };
        let Some(dir) = self.locate(from.parent).await? else { return Ok(()) };
        let aside = Self::aside(id);
        self.member
            .disk
            .rename((&dir, &from.name), (&self.own, &aside), RenameFlags::default())
            .await?;
        self.found.entry(id).or_default().remove(from);
        self.mended += 1;
        Ok(())
    }

    /// Gives a file the names that it lacks; makes it if it is nowhere and was made by one of the changes. Whether
    /// all directories were there that it belongs into.
    async fn put_in_place(&mut self, id: FileId) -> DiskResult<bool> {
        let mut is_whole = true;
        let after = self.outcomes.file(id).after.clone();
        let slot = self.slot(id)?;
        if let Some(slot) = slot.filter(|_| !after.is_empty()) {
            self.make_distributed(id, slot).await?;
        }
        for place in after {
            if self.found.get(&id).is_some_and(|found| found.contains(&place)) {
                continue;
            }
            let Some(dir) = self.locate(place.parent).await? else {
                is_whole = false;
                continue;
            };
            let stands = missing_is_none(self.member.disk.stat_at(&dir, &place.name).await)?;
            if let Some(stands) = stands {
                if !self.is_stranger(&stands, &place)? {
                    // In a pool of one somebody may have put it there since.
                    continue;
                }
                self.set_stranger_aside(&dir, &place).await?;
            }
            let is_there = match slot {
                Some(slot) => self.put_placeholder(id, slot, &dir, &place).await?,
                None => self.put_file(id, &dir, &place).await?,
            };
            if is_there {
                self.mended += 1;
                self.found.entry(id).or_default().insert(place);
            }
        }
        if is_whole {
            self.give_up_aside(id).await?;
        }
        Ok(is_whole)
    }

    /// Sets aside the strangers under names that files of these changes had and have no more.
    async fn set_strangers_aside(&mut self) -> DiskResult<()> {
        if !self.member.in_group || !self.has_stopped {
            return Ok(());
        }
        // Directories that were not empty.
        let found: BTreeSet<PoolPlace> = self.found.values().flatten().cloned().collect();
        let files = self.outcomes.files.values();
        let taken: BTreeSet<PoolPlace> =
            files.clone().flat_map(|outcome| &outcome.after).cloned().collect();
        let free: BTreeSet<PoolPlace> = files.flat_map(|outcome| &outcome.ever).cloned().collect();
        for place in free.difference(&taken).filter(|place| !found.contains(place)) {
            let Some(dir) = self.locate(place.parent).await? else { continue };
            let stands = missing_is_none(self.member.disk.stat_at(&dir, &place.name).await)?;
            if let Some(stands) = stands
                && self.is_stranger(&stands, place)?
            {
                self.set_stranger_aside(&dir, place).await?;
            }
        }
        Ok(())
    }

    /// Whether what stands under a name, and is no file of these changes, is a stranger. A change that was withdrawn names what another file
    /// may have.
    fn is_stranger(&self, stands: &Stat, place: &PoolPlace) -> DiskResult<bool> {
        let Redo { member, outcomes, .. } = self;
        if !member.in_group {
            return Ok(false);
        }
        let failed = |error| member.index_failed(&error);
        let Some(other) = member.index.by_inode(stands.ino).map_err(failed)? else {
            return Ok(true);
        };
        let record = member.record(other)?;
        let is_known = !outcomes.files.contains_key(&other)
            && record.is_some_and(|record| record.generation == stands.generation)
            && member.index.has_place(other, place).map_err(failed)?;
        Ok(!is_known)
    }

    async fn set_stranger_aside(&mut self, dir: &D::Node, place: &PoolPlace) -> DiskResult<()> {
        let old = self.old().await?;
        let plain = RenameFlags { no_replace: true, exchange: false };
        let (mut next, mut step) = (self.next_stranger, 1);
        loop {
            let name = format!("stranger-{next}");
            let to = (&old, name.as_bytes());
            match self.member.disk.rename((dir, &place.name), to, plain).await {
                // Left by earlier losses of power: those are soon passed.
                Err(Errno::EEXIST) => (next, step) = (next + step, step * 2),
                renamed => {
                    self.next_stranger = next + 1;
                    tracing::warn!(
                        "a file without a known number had a name of another one; it is in {OWN_DIRECTORY}/old/{name}"
                    );
                    return renamed;
                }
            }
        }
    }

    /// Makes a distributed directory again that is nowhere, if one of the changes made it.
    async fn make_distributed(&mut self, id: FileId, slot: Slot) -> DiskResult<()> {
        let is_there = self.nodes.get(&id).is_some_and(Option::is_some);
        if is_there || self.birth(id).is_none() {
            return Ok(());
        }
        let disk = &self.member.disk;
        let in_slot = self.member.slot_to_fill(slot).await?;
        let name = id.to_string();
        disk.make(&in_slot, name.as_bytes(), Making::Directory, 0o700).await?;
        let node = disk.node(&in_slot, name.as_bytes()).await?;
        self.unfinished.insert(id);
        self.member.set_id(&node, id).await;
        self.nodes.insert(id, Some(node));
        self.mended += 1;
        Ok(())
    }

    async fn put_placeholder(
        &mut self,
        id: FileId,
        slot: Slot,
        dir: &D::Node,
        place: &PoolPlace,
    ) -> DiskResult<bool> {
        let disk = &self.member.disk;
        if self.nodes.get(&id).is_none_or(Option::is_none) {
            return Ok(false);
        }
        // How far up is put right when all directories are in their places.
        disk.make(dir, &place.name, Making::Symlink(&Placeholder { slot, id }.target(0)), 0o777)
            .await?;
        Ok(true)
    }

    async fn put_file(&mut self, id: FileId, dir: &D::Node, place: &PoolPlace) -> DiskResult<bool> {
        let disk = &self.member.disk;
        let aside = Self::aside(id);
        let to = (dir, &place.name[..]);
        match disk
            .rename((&self.own, &aside), to, RenameFlags { no_replace: true, exchange: false })
            .await
        {
            Ok(()) => return Ok(true),
            Err(Errno::ENOENT) => {}
            Err(errno) => return Err(errno),
        }
        if let Some(Some(node)) = self.nodes.get(&id) {
            return match disk.link(node, dir, &place.name).await {
                Ok(()) => Ok(true),
                // A directory, which has a name already; or a file whose last name went meanwhile.
                Err(Errno::EPERM | Errno::ENOENT | Errno::EMLINK) => Ok(false),
                Err(errno) => Err(errno),
            };
        }
        // The log of a member that was away says what others have synced: the file may have been nowhere here.
        let is_filled = self.outcomes.file(id).is_filled && !self.member.in_group;
        let Some(birth) = self.birth(id).cloned().filter(|_| !is_filled) else { return Ok(false) };
        // How far up a referral leads is put right when all directories are in their places.
        let stored = birth.what.stored_target(0).ok_or(Errno::ENAMETOOLONG)?;
        let making = birth.what.making(&stored);
        // A default access control list of the directory has its effect again.
        disk.make(dir, &place.name, making, birth.mode).await?;
        let node = disk.node(dir, &place.name).await?;
        self.unfinished.insert(id);
        self.member.set_id(&node, id).await;
        self.nodes.insert(id, Some(node));
        Ok(true)
    }

    /// A file that was taken aside and whose place is taken goes to `.atoll/old`.
    async fn give_up_aside(&mut self, id: FileId) -> DiskResult<()> {
        let disk = &self.member.disk;
        let aside = Self::aside(id);
        if missing_is_none(disk.stat_at(&self.own, &aside).await)?.is_none() {
            return Ok(());
        }
        let old = self.old().await?;
        tracing::warn!("file {id} had to make room for a newer one; it is in {OWN_DIRECTORY}/old");
        disk.rename((&self.own, &aside), (&old, id.to_string().as_bytes()), RenameFlags::default())
            .await
    }

    /// A directory that was removed, and in which something still is that no change names, goes to `.atoll/old`.
    async fn set_full_directory_aside(&mut self, id: FileId) -> DiskResult<()> {
        let disk = &self.member.disk;
        let old = self.old().await?;
        if let Some(slot) = self.slot(id)? {
            let in_slot = self.member.slot_node(slot).await?;
            let name = id.to_string();
            disk.rename(
                (&in_slot, name.as_bytes()),
                (&old, name.as_bytes()),
                RenameFlags::default(),
            )
            .await?;
            self.nodes.insert(id, None);
            self.remove(id).await?;
        } else if let Some(place) = self.found.remove(&id).unwrap_or_default().first()
            && let Some(dir) = self.locate(place.parent).await?
        {
            let to = (&old, id.to_string().into_bytes());
            self.member
                .disk
                .rename((&dir, &place.name), (to.0, &to.1), RenameFlags::default())
                .await?;
        }
        tracing::warn!("directory {id} was removed and is not empty; it is in {OWN_DIRECTORY}/old");
        Ok(())
    }

    /// Where things go that nobody is to lose.
    async fn old(&self) -> DiskResult<D::Node> {
        let disk = &self.member.disk;
        match disk.make(&self.own, b"old", Making::Directory, 0o700).await {
            Ok(()) | Err(Errno::EEXIST) => {}
            Err(errno) => return Err(errno),
        }
        disk.node(&self.own, b"old").await
    }

    /// Removes the names that a file should not have; whether it could: not a directory with something in it.
    async fn remove(&mut self, id: FileId) -> DiskResult<bool> {
        if id.is_fixed() {
            return Ok(true);
        }
        let after = self.outcomes.file(id).after.clone();
        let found = self.found.get(&id).cloned().unwrap_or_default();
        let slot = self.slot(id)?;
        let is_directory = match self.nodes.get(&id) {
            Some(Some(node)) => self.member.disk.stat(node).await?.kind == FileKind::Directory,
            _ => false,
        };
        // The directory behind a placeholder goes first, so that one that is not empty keeps its name.
        if let Some(slot) = slot
            && after.is_empty()
            && is_directory
        {
            let in_slot = self.member.slot_node(slot).await?;
            match self.member.disk.rmdir(&in_slot, id.to_string().as_bytes()).await {
                Ok(()) => self.nodes.insert(id, None),
                Err(Errno::ENOTEMPTY | Errno::EEXIST) => return Ok(false),
                Err(errno) => return Err(errno),
            };
        }
        let is_alone = !self.member.in_group;
        for place in found.difference(&after) {
            let Some(dir) = self.locate(place.parent).await? else { continue };
            let is_last_of_file = !is_directory && after.is_empty() && found.len() == 1;
            let removed = match is_directory && slot.is_none() {
                true => self.member.disk.rmdir(&dir, &place.name).await,
                false if is_alone && is_last_of_file && self.has_bytes(id).await? => {
                    // Somebody may have put it back by hand. In a pool of several that is seen by nobody.
                    let old = self.old().await?;
                    let name = id.to_string();
                    tracing::warn!(
                        "file {id} was removed and was there again; it is in {OWN_DIRECTORY}/old"
                    );
                    let to = (&old, name.as_bytes());
                    self.member.disk.rename((&dir, &place.name), to, RenameFlags::default()).await
                }
                false => self.member.disk.unlink(&dir, &place.name).await,
            };
            match removed {
                Ok(()) => {
                    self.mended += 1;
                    self.found.entry(id).or_default().remove(place);
                }
                Err(Errno::ENOTEMPTY | Errno::EEXIST) => return Ok(false),
                Err(Errno::ENOENT) => {}
                Err(errno) => return Err(errno),
            }
        }
        Ok(true)
    }

    async fn has_bytes(&self, id: FileId) -> DiskResult<bool> {
        let Some(Some(node)) = self.nodes.get(&id) else { return Ok(false) };
        let stat = self.member.disk.stat(node).await?;
        Ok(stat.kind == FileKind::Regular && stat.size_bytes > 0)
    }

    /// Takes the bytes away that may be another file's, unless those of this one were promised: then it was synced, and its number
    /// with it.
    async fn empty_doubtful(&mut self, id: FileId) -> DiskResult<()> {
        let disk = &self.member.disk;
        let is_filled = self.outcomes.file(id).is_filled;
        if is_filled || !self.doubtful.contains(&id) || !self.has_bytes(id).await? {
            return Ok(());
        }
        let Some(Some(node)) = self.nodes.get(&id) else { return Ok(()) };
        disk.set_len(&disk.open(node).await?, 0).await
    }

    async fn set_attributes(&mut self, id: FileId) -> DiskResult<()> {
        let LastAttributes { mode, uid, gid, atime, mtime } = self.outcomes.file(id).attributes;
        let Some(Some(node)) = self.nodes.get(&id) else { return Ok(()) };
        if self.member.id_of(node).await.is_none() {
            self.member.set_id(node, id).await;
        }
        // A process that died has set those that it has answered, and somebody may have set others by hand since. What it was about
        // to make has no number yet. Where there are several members, the others set also those that it has not answered.
        let is_alone = !self.member.in_group;
        if is_alone && !self.has_stopped && !self.unfinished.contains(&id) {
            return Ok(());
        }
        let disk = &self.member.disk;
        for (name, value) in self.outcomes.files.get(&id).iter().flat_map(|file| &file.extended) {
            let flags = atoll_vfs::XattrFlags::default();
            let set = match value {
                Some(value) => disk.set_xattr(node, name, value, flags).await,
                None => disk.remove_xattr(node, name).await,
            };
            match set {
                // What it can not have it did not get when the change was made.
                Ok(())
                | Err(
                    Errno::ENODATA
                    | Errno::EOPNOTSUPP
                    | Errno::EPERM
                    | Errno::ENOSPC
                    | Errno::E2BIG
                    | Errno::ERANGE,
                ) => {}
                Err(errno) => return Err(errno),
            }
        }
        let before = disk.stat(node).await?;
        if uid.is_some_and(|uid| uid != before.uid) || gid.is_some_and(|gid| gid != before.gid) {
            disk.set_owner(node, uid, gid).await?;
        }
        if let Some(mode) = mode
            && before.kind != FileKind::Symlink
        {
            disk.set_mode(node, mode).await?;
        }
        if atime.is_some() || mtime.is_some() {
            let time = |time: Option<Time>| time.map(|time| TimeToSet::To(time.into()));
            disk.set_times(node, time(atime), time(mtime)).await?;
        }
        Ok(())
    }

    /// Tells the index how it came out.
    async fn enter(&mut self, id: FileId) -> DiskResult<()> {
        let Redo { member, outcomes, nodes, found, .. } = self;
        let outcome = outcomes.file(id);
        let found = found.get(&id).cloned().unwrap_or_default();
        for place in &outcome.ever {
            member.index.remove_place(id, place);
        }
        let slot = match &outcome.birth {
            Some(birth) => birth.what.slot(),
            None => member.record(id)?.and_then(|record| record.slot),
        };
        let node = nodes.get(&id).cloned().flatten();
        let is_there = !found.is_empty() || id.is_fixed();
        let Some(node) = node.filter(|_| is_there) else {
            if let Some(record) = member.record(id)? {
                member
                    .index
                    .remove_file(id, record)
                    .map_err(|error| member.index_failed(&error))?;
            }
            return Ok(());
        };
        let stat = member.disk.stat(&node).await?;
        let before = member.record(id)?;
        let record = match (&outcome.birth, before) {
            (Some(birth), _) if stat.kind == FileKind::Symlink => {
                FileRecord::of(&stat, slot, 0).with_form(birth.what.link_form())
            }
            (_, Some(before)) => {
                let FileRecord { placeholders, leads_to, .. } = before;
                FileRecord { leads_to, ..FileRecord::of(&stat, slot, placeholders) }
            }
            (_, None) => FileRecord::of(&stat, slot, 0),
        };
        member.index.put_file(id, record);
        for place in &found {
            member.index.add_place(id, place);
        }
        Ok(())
    }

    /// Counts the placeholders that directories have gained and lost.
    fn count_placeholders(&mut self, id: FileId) -> DiskResult<()> {
        let is_counted = match self.birth(id) {
            Some(birth) => birth.what.is_counted(),
            None => self.member.record(id)?.is_some_and(|record| record.is_counted(id)),
        };
        if !is_counted {
            return Ok(());
        }
        let before = self.outcomes.file(id).before.clone();
        let found = self.found.get(&id).cloned().unwrap_or_default();
        for place in before.difference(&found) {
            self.member.count_placeholder(place.parent, false)?;
        }
        for place in found.difference(&before) {
            self.member.count_placeholder(place.parent, true)?;
        }
        Ok(())
    }

    /// Lets the placeholder of a directory go up as far as it lies deep.
    async fn mend_placeholder(&mut self, id: FileId) -> DiskResult<()> {
        let slot = self.slot(id)?;
        let referral = self.member.record(id)?.and_then(|record| record.referral(id));
        if slot.is_none() && referral.is_none() {
            return Ok(());
        }
        for place in self.member.places(id)? {
            let Some(dir) = self.locate(place.parent).await? else { continue };
            if let Some(slot) = slot {
                self.member.mend_placeholder(&place, &dir, Placeholder { slot, id }).await?;
            } else if let Some(referral) = referral
                && let Err(errno) = self.member.mend_referral(&place, &dir, referral).await
            {
                // It matters to those alone who read the tree by hand.
                tracing::warn!("the link to file {} leads elsewhere: {errno}", referral.file);
            }
        }
        Ok(())
    }
}
