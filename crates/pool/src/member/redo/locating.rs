//! Where files are after a crash: each is sought under all names that it may have, its directories before it; and in all of D if it
//! is under none of them.
//!
//! A file is known by its inode, by its number in an attribute, or by being what it was made as where nothing else is known.

use std::collections::BTreeSet;

use atoll_vfs::{Errno, FileKind};

use super::Redo;
use super::outcomes::FileOutcome;
use crate::change::PoolPlace;
use crate::disk::{Disk, DiskResult, Stat, missing_is_none};
use crate::layout::{FileId, Placeholder, Referral, Slot};

/// How sure it is that a file is the one that is sought.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Likeness {
    Possible,
    Certain,
}

/// What stands under a name of a file that is sought, and may be that file.
struct Stand<D: Disk> {
    place: PoolPlace,
    node: D::Node,
    ino: u64,
    likeness: Likeness,
}

impl<D: Disk> Redo<'_, D> {
    /// Seeks a file under all its names; its node is kept. The directories of its names are sought first, and theirs: by a stack
    /// of our own, for there may be thousands above each other.
    pub(super) async fn locate(&mut self, id: FileId) -> DiskResult<Option<D::Node>> {
        let mut stack = vec![id];
        let mut under_way = BTreeSet::from([id]);
        while let Some(top) = stack.last().copied() {
            if !self.nodes.contains_key(&top) {
                let candidates = self.candidates(top)?;
                // A directory that is sought below itself is not there.
                let is_next = |place: &&PoolPlace| {
                    !self.nodes.contains_key(&place.parent) && !under_way.contains(&place.parent)
                };
                if let Some(next) = candidates.iter().find(is_next) {
                    under_way.insert(next.parent);
                    stack.push(next.parent);
                    continue;
                }
                self.locate_in_known(top, candidates).await?;
            }
            stack.pop();
        }
        Ok(self.nodes.get(&id).cloned().flatten())
    }

    /// Seeks files again that were not found, until none more is: two directories may each have been in the other one, and then
    /// one of them was sought while the other was not known.
    pub(super) async fn locate_again(&mut self, order: &[FileId]) -> DiskResult<()> {
        loop {
            let is_nowhere = |id: &&FileId| self.nodes.get(id).is_some_and(Option::is_none);
            let nowhere: Vec<FileId> = order.iter().filter(is_nowhere).copied().collect();
            for id in &nowhere {
                self.nodes.remove(id);
                self.locate(*id).await?;
            }
            if nowhere.iter().all(|id| self.nodes.get(id).is_some_and(Option::is_none)) {
                return Ok(());
            }
        }
    }

    /// Seeks a file in directories that were sought.
    async fn locate_in_known(
        &mut self,
        id: FileId,
        candidates: BTreeSet<PoolPlace>,
    ) -> DiskResult<()> {
        let slot = self.slot(id)?;
        let mut node = match slot {
            Some(slot) => {
                let node = self.in_slot(id, slot).await?;
                if let Some(node) = &node
                    && self.member.id_of(node).await.is_none()
                {
                    self.unfinished.insert(id);
                }
                node
            }
            // A crash while this was done before.
            None => missing_is_none(self.member.disk.node(&self.own, &Self::aside(id)).await)?,
        };
        let mut stands = Vec::new();
        for place in candidates {
            let Some(Some(dir)) = self.nodes.get(&place.parent) else { continue };
            stands.extend(self.stands(id, slot, dir, place).await?);
        }
        // A file that may be this one is not, if another one is.
        let best = stands.iter().map(|stand| stand.likeness).max();
        stands.retain(|stand| Some(stand.likeness) == best);
        if best == Some(Likeness::Possible) {
            let ino = self.likeliest(id, &stands).await?;
            stands.retain(|stand| Some(stand.ino) == ino);
        }
        for Stand { place, node: found, ino, likeness } in stands {
            if slot.is_none() {
                if *self.taken.entry(ino).or_insert(id) != id {
                    continue;
                }
                node = Some(found);
            }
            if likeness == Likeness::Possible {
                self.unfinished.insert(id);
                if self.has_stopped && self.shared.contains(&place) {
                    self.doubtful.insert(id);
                }
            }
            self.found.entry(id).or_default().insert(place);
        }
        self.nodes.insert(id, node);
        Ok(())
    }

    /// The inode of those that may be a file: rather that of a directory which holds its files, or else one under a name that it
    /// should have.
    async fn likeliest(&self, id: FileId, stands: &[Stand<D>]) -> DiskResult<Option<u64>> {
        let is_directory =
            self.birth(id).is_some_and(|birth| birth.what.kind() == FileKind::Directory);
        let mut likeliest = None;
        for Stand { place, node, ino, .. } in stands {
            let files = if is_directory { self.files_of(id, node).await? } else { 0 };
            let outcome = self.outcomes.files.get(&id);
            let is_meant = outcome.is_some_and(|outcome| outcome.after.contains(place));
            let likely = (files, is_meant);
            if likeliest.is_none_or(|(most, _)| likely > most) {
                likeliest = Some((likely, *ino));
            }
        }
        Ok(likeliest.map(|(_, ino)| ino))
    }

    /// How many files a directory holds under names that they have had in directory `id`.
    async fn files_of(&self, id: FileId, node: &D::Node) -> DiskResult<usize> {
        let disk = &self.member.disk;
        let mut files = 0;
        for listed in disk.list(node).await? {
            let Some(below) = missing_is_none(disk.node(node, &listed.name).await)? else {
                continue;
            };
            let place = PoolPlace::new(id, &listed.name);
            if let Some(said) = self.member.id_of(&below).await
                && self.candidates(said)?.contains(&place)
            {
                files += 1;
            }
        }
        Ok(files)
    }

    async fn in_slot(&self, id: FileId, slot: Slot) -> DiskResult<Option<D::Node>> {
        let in_slot = match self.member.slot_node(slot).await {
            Err(Errno::ENOENT) => return Ok(None),
            in_slot => in_slot?,
        };
        missing_is_none(self.member.disk.node(&in_slot, id.to_string().as_bytes()).await)
    }

    /// The node under a name if that is this file, or its placeholder.
    async fn stands(
        &self,
        id: FileId,
        slot: Option<Slot>,
        dir: &D::Node,
        place: PoolPlace,
    ) -> DiskResult<Option<Stand<D>>> {
        let disk = &self.member.disk;
        let node = missing_is_none(disk.node(dir, &place.name).await)?;
        let Some(node) = node else { return Ok(None) };
        let stat = disk.stat(&node).await?;
        let placeholder = match stat.kind {
            FileKind::Symlink => Placeholder::parse(&disk.read_node(&node).await?),
            _ => None,
        };
        let likeness = match (slot, placeholder) {
            (Some(slot), placeholder) if placeholder == Some(Placeholder { slot, id }) => {
                Some(Likeness::Certain)
            }
            (Some(_), _) | (None, Some(_)) => None,
            (None, None) => self.likeness(id, &node, &stat).await?,
        };
        Ok(likeness.map(|likeness| Stand { place, node, ino: stat.ino, likeness }))
    }

    async fn likeness(
        &self,
        id: FileId,
        node: &D::Node,
        stat: &Stat,
    ) -> DiskResult<Option<Likeness>> {
        let certain = |is_it: bool| is_it.then_some(Likeness::Certain);
        if stat.kind == FileKind::Symlink
            && let Some(referral) = Referral::parse(&self.member.disk.read_node(node).await?)
        {
            // One that was put in the place of another has its name alone.
            return Ok(certain(referral.id == id));
        }
        let said = self.member.id_of(node).await;
        // What the index knows is that inode, and no copy of it with its attributes.
        if let Some(record) = self.member.record(id)? {
            let is_inode = (record.ino, record.generation) == (stat.ino, stat.generation);
            return Ok(certain(is_inode && said.is_none_or(|said| said == id)));
        }
        if let Some(said) = said {
            return Ok(certain(said == id));
        }
        let outcome = self.outcomes.files.get(&id);
        if self.keeps_numbers
            && !self.member.in_group
            && outcome.is_some_and(|outcome| outcome.is_filled)
        {
            // It was synced, and its number with it. (In a pool of several another member may have synced it.)
            return Ok(None);
        }
        let is_to_go = outcome.is_some_and(|outcome| outcome.after.is_empty());
        let is_empty = stat.kind != FileKind::Regular || stat.size_bytes == 0;
        // A backup may have been making it when it was killed, and known already that it is to go.
        let may_be_half_made = self.has_stopped || self.member.in_group;
        if is_to_go && !(may_be_half_made && is_empty) {
            // To be removed: somebody may have put another one there by hand.
            return Ok(None);
        }
        if is_to_go
            && stat.kind == FileKind::Directory
            && !self.member.disk.list(node).await?.is_empty()
        {
            // A directory was empty when it was removed: this is another one, whose attribute is lost.
            return Ok(None);
        }
        // Without attributes: a file of this kind that is no other one. It may have been made before it got its attribute.
        if self.taken.get(&stat.ino).is_some_and(|other| *other != id) {
            return Ok(None);
        }
        let known = self
            .member
            .index
            .by_inode(stat.ino)
            .map_err(|error| self.member.index_failed(&error))?;
        let is_free = match known {
            Some(other) => {
                self.member.record(other)?.is_none_or(|record| record.generation != stat.generation)
            }
            None => true,
        };
        let is_alike = self.birth(id).is_some_and(|birth| birth.what.kind() == stat.kind);
        Ok((is_free && is_alike).then_some(Likeness::Possible))
    }

    /// Walks through all of D if a file that should be there is under none of its names: then it was renamed in a change that
    /// the journal has lost, and the disk not.
    pub(super) async fn seek_the_missing(&mut self) -> DiskResult<()> {
        let is_missing = |(id, outcome): (&FileId, &FileOutcome)| {
            let is_aside =
                !self.slots.contains_key(id) && self.nodes.get(id).is_some_and(Option::is_some);
            let is_away = self.found.get(id).is_none_or(BTreeSet::is_empty) && !is_aside;
            (!outcome.after.is_empty() && is_away).then_some(*id)
        };
        let missing: BTreeSet<FileId> = self.outcomes.files.iter().filter_map(is_missing).collect();
        if missing.is_empty() {
            return Ok(());
        }
        // Where others follow, no change is made before all journals have it.
        let knows_all = self.member.in_group;
        let mut seen = Vec::new();
        let mut walk = self.member.walk().await?;
        while let Some(step) = walk.next().await? {
            let id = match (step.slot, step.placeholder) {
                (None, Some(Placeholder { id, .. })) => Some(id),
                (Some(_), _) => step.said,
                (None, None) => match step.said {
                    Some(id) => Some(id),
                    None => self
                        .member
                        .index
                        .by_inode(step.stat.ino)
                        .map_err(|error| self.member.index_failed(&error))?,
                },
            };
            let Some(id) = id else { continue };
            if let Some(place) = step.place
                && missing.contains(&id)
                // A directory in itself is what is left of a lost name whose inode was used again. Where the journal knows all, it is
                // removed as any name that it does not know.
                && (knows_all || place.parent != id)
                && step.placeholder.map(|placeholder| placeholder.slot)
                    == self.slots.get(&id).copied()
            {
                seen.push((id, place, step.node.clone()));
            }
            if step.stat.kind == FileKind::Directory {
                walk.enter(id, &step.node).await?;
            }
        }
        for (id, place, node) in seen {
            if !self.slots.contains_key(&id) {
                self.nodes.insert(id, Some(node));
            }
            let found = self.found.entry(id).or_default();
            found.insert(place.clone());
            let outcome = self.outcomes.file(id);
            // A name that the journal knows is an older one.
            if outcome.ever.insert(place) && !knows_all {
                outcome.after.clone_from(found);
            }
        }
        Ok(())
    }
}
