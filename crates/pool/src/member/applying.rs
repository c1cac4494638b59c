//! A change of names and attributes, made on the disk as its record says.
//!
//! The member that decides a change and those that follow it make it by this one code, from the record alone: which directory,
//! which name, which file, with which owner and mode. Whatever was to be checked has been checked, so a failure is the disk's. A
//! change that fails is undone as far as it was made; one that cannot be undone stops the member ([`PoolMember::fail`]).
//!
//! The caller has the locks of the files and directories that the change names.

use atoll_vfs::{Errno, FileKind, RenameFlags, XattrFlags};

use super::{FoundFile, PoolMember};
use crate::change::{BirthKind, FileBirth, NewTime, PoolChange, PoolPlace, Time};
use crate::disk::{ACCESS_LIST, DEFAULT_LIST, Disk, DiskResult, Making, Stat, TimeToSet};
use crate::index::FileRecord;
use crate::layout::{FileId, Placeholder, Slot};

/// A file that a change has made: its node, and what is known of it.
pub(crate) type MadeFile<D> = (<D as Disk>::Node, Stat);

/// Which member has decided a change.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Decided {
    Here,
    Elsewhere,
}

/// A name, and its directory.
struct NameOnDisk<'a, D: Disk> {
    place: &'a PoolPlace,
    dir: D::Node,
}

impl<D: Disk> PoolMember<D> {
    /// Makes a change on the disk and in the index; returns the file that it made.
    pub(super) async fn apply(
        &self,
        change: &PoolChange,
        decided: Decided,
    ) -> DiskResult<Option<MadeFile<D>>> {
        let mut made = None;
        for (at, part) in change.parts().iter().enumerate() {
            let must_be_made = at > 0
                || decided == Decided::Elsewhere
                || matches!(change, PoolChange::PartMade { .. });
            let mut applied = self.apply_part(part, decided).await;
            if must_be_made && matches!(applied, Err(Errno::ENOSPC)) && self.use_reserve().await? {
                applied = self.apply_part(part, decided).await;
            }
            match applied {
                Ok(file) => made = file.or(made),
                Err(errno) if at == 0 => return Err(errno),
                // The journal makes the rest when the pool is opened again.
                Err(_) => return Err(self.fail()),
            }
        }
        self.note_crossing(change);
        self.note_quotas(change, decided);
        Ok(made)
    }

    async fn apply_part(
        &self,
        change: &PoolChange,
        decided: Decided,
    ) -> DiskResult<Option<MadeFile<D>>> {
        match change {
            PoolChange::Make { id, at, birth, .. } => {
                return Ok(Some(self.apply_make(*id, at, birth).await?));
            }
            PoolChange::Link { id, at, .. } => {
                let (node, at) = (self.node(*id).await?, self.on_disk(at).await?);
                self.disk.link(&node, &at.dir, &at.place.name).await?;
                self.add_place(*id, at.place);
            }
            PoolChange::Unlink { id, at, .. } => {
                let at = self.on_disk(at).await?;
                match self.found_as(*id, &at).await {
                    Ok(found) => {
                        let is_last = self.begin_ending(&found).await?;
                        self.take_away(&at, &found).await?;
                        self.lose_place(&found, at.place, is_last)?;
                    }
                    Err(Errno::ENOENT) => return Err(Errno::ENOENT),
                    // Nothing is behind the placeholder.
                    Err(Errno::ESTALE) => self.remove_lost(*id, &at).await?,
                    Err(errno) => return Err(errno),
                }
            }
            PoolChange::Rename { id, from, to, replaced, .. } => {
                let (old, new) = (self.on_disk(from).await?, self.on_disk(to).await?);
                let moved = self.found_as(*id, &old).await?;
                match replaced {
                    None => self.move_on_disk(&old, &new, RenameFlags::default()).await?,
                    Some(other) => {
                        let other = self.found_as(*other, &new).await?;
                        let is_last = self.begin_ending(&other).await?;
                        self.replace_on_disk((&old, &moved), (&new, &other)).await?;
                        self.lose_place(&other, new.place, is_last)?;
                    }
                }
                self.moved(&moved, &old, &new).await?;
            }
            PoolChange::Exchange { id, from, other, to, .. } => {
                let (old, new) = (self.on_disk(from).await?, self.on_disk(to).await?);
                let moved = self.found_as(*id, &old).await?;
                let other = self.found_as(*other, &new).await?;
                let exchange = RenameFlags { exchange: true, no_replace: false };
                self.move_on_disk(&old, &new, exchange).await?;
                self.moved(&moved, &old, &new).await?;
                self.moved(&other, &new, &old).await?;
            }
            PoolChange::Attributes { id, mode, uid, gid, atime, mtime } => {
                let node = self.node(*id).await?;
                let sets_owner = uid.is_some() || gid.is_some();
                let sets_times = atime.is_some() || mtime.is_some();
                let steps = [sets_owner, mode.is_some(), sets_times];
                let before = match decided {
                    Decided::Here if steps.into_iter().filter(|is_made| *is_made).count() > 1 => {
                        Some(self.disk.stat(&node).await?)
                    }
                    _ => None,
                };
                if sets_owner {
                    self.disk.set_owner(&node, *uid, *gid).await?;
                }
                let rest = async {
                    if let Some(mode) = mode {
                        self.disk.set_mode(&node, *mode).await?;
                    }
                    if sets_times {
                        let time = |time: &Option<NewTime>| match (time, decided) {
                            (None, _) => None,
                            (Some(NewTime::Now(_)), Decided::Here) => Some(TimeToSet::Now),
                            (Some(time), _) => to_set(time.time()),
                        };
                        self.disk.set_times(&node, time(atime), time(mtime)).await?;
                    }
                    Ok(())
                };
                if let Err(errno) = rest.await {
                    self.put_back(&node, before).await?;
                    return Err(errno);
                }
            }
            PoolChange::Extended { id, name, value, .. } => {
                let node = self.node(*id).await?;
                let set = match value {
                    Some(value) => {
                        self.disk.set_xattr(&node, name, value, XattrFlags::default()).await
                    }
                    None => self.disk.remove_xattr(&node, name).await,
                };
                match (set, decided) {
                    // As when a journal is made again: the member that decided it may have died before it withdrew it.
                    (
                        Err(
                            Errno::ENODATA
                            | Errno::EOPNOTSUPP
                            | Errno::EPERM
                            | Errno::ENOSPC
                            | Errno::E2BIG
                            | Errno::ERANGE,
                        ),
                        Decided::Elsewhere,
                    ) => {}
                    (set, _) => set?,
                }
            }
            PoolChange::Synced { .. }
            | PoolChange::Marked { .. }
            | PoolChange::Verified { .. }
            | PoolChange::AllSynced { .. }
            | PoolChange::Checkpoint { .. }
            | PoolChange::Released { .. }
            | PoolChange::Began { .. }
            | PoolChange::LogBegins
            | PoolChange::Withdrawn { .. }
            | PoolChange::Prepared { .. }
            | PoolChange::Decided { .. }
            | PoolChange::PartMade { .. }
            | PoolChange::Abandoned { .. }
            | PoolChange::Told { .. }
            | PoolChange::Quotas { .. } => {}
        }
        Ok(None)
    }

    /// After a change of attributes that was made in part: gives a file the owner and the mode that it had. No other member makes the change,
    /// and a call that repeats it must not find it half made.
    async fn put_back(&self, node: &D::Node, before: Option<Stat>) -> DiskResult<()> {
        let Some(Stat { uid, gid, mode, kind, .. }) = before else { return Ok(()) };
        let put_back = async {
            self.disk.set_owner(node, Some(uid), Some(gid)).await?;
            // A new owner takes bits away.
            match kind {
                FileKind::Symlink => Ok(()),
                _ => self.disk.set_mode(node, mode).await,
            }
        };
        put_back.await.map_err(|_| self.fail())
    }

    async fn on_disk<'a>(&self, place: &'a PoolPlace) -> DiskResult<NameOnDisk<'a, D>> {
        Ok(NameOnDisk { place, dir: self.node(place.parent).await? })
    }

    /// What stands under a name as file `id`: [`Errno::ENOENT`] if nothing does, [`Errno::ESTALE`] if its directory is gone from
    /// its slot.
    async fn found_as(&self, id: FileId, at: &NameOnDisk<'_, D>) -> DiskResult<FoundFile> {
        let stands = self.disk.stat_at(&at.dir, &at.place.name).await?;
        if stands.kind != FileKind::Symlink {
            return Ok(FoundFile { id, stat: stands, slot: None });
        }
        // Every link of a user's has a record.
        match self.record(id)?.ok_or(Errno::ESTALE)?.slot {
            None => Ok(FoundFile { id, stat: stands, slot: None }),
            Some(slot) => {
                let stat = self.disk.stat(&self.node(id).await?).await?;
                Ok(FoundFile { id, stat, slot: Some(slot) })
            }
        }
    }

    async fn apply_make(
        &self,
        id: FileId,
        at: &PoolPlace,
        birth: &FileBirth,
    ) -> DiskResult<MadeFile<D>> {
        let at = self.on_disk(at).await?;
        let slot = birth.what.slot();
        let (node, stat) = match slot {
            Some(slot) => self.make_distributed(&at, id, slot, birth).await?,
            None => {
                let stored = birth
                    .what
                    .stored_target(self.home(at.place.parent)?.steps)
                    .ok_or(Errno::ENAMETOOLONG)?;
                let making = birth.what.making(&stored);
                let made = self.make_at(&at.dir, &at.place.name, making, id, birth).await;
                if made.is_err() {
                    self.unmake(&at, &birth.what).await;
                }
                made?
            }
        };
        let record = FileRecord::of(&stat, slot, 0).with_form(birth.what.link_form());
        self.index.put_file(id, record);
        self.add_place(id, at.place);
        if record.is_counted(id) {
            self.count_placeholder(at.place.parent, true)?;
        }
        Ok((node, stat))
    }

    /// Makes a file with all that it has.
    pub(super) async fn make_at(
        &self,
        dir: &D::Node,
        name: &[u8],
        making: Making<'_>,
        id: FileId,
        birth: &FileBirth,
    ) -> DiskResult<MadeFile<D>> {
        let disk = &self.disk;
        let mode = birth.mode;
        disk.make(dir, name, making, mode).await?;
        let node = disk.node(dir, name).await?;
        let made = disk.stat(&node).await?;
        if (made.uid, made.gid) != (birth.uid, birth.gid) {
            disk.set_owner(&node, Some(birth.uid), Some(birth.gid)).await?;
        }
        if birth.sets_mode() && (made.mode != mode || mode & 0o7000 != 0) {
            disk.set_mode(&node, mode).await?;
        }
        if let Some((atime, mtime)) = birth.times {
            disk.set_times(&node, to_set(atime), to_set(mtime)).await?;
        }
        // Last: what has its number is as it was to be.
        self.set_id(&node, id).await;
        let mut stat = disk.stat(&node).await?;
        if let BirthKind::Symlink(target) = &birth.what {
            stat.size_bytes = target.len() as u64;
        }
        Ok((node, stat))
    }

    async fn unmake(&self, at: &NameOnDisk<'_, D>, what: &BirthKind) {
        // What stays is found by its attribute or as a file that nobody knows.
        let _ = match what.kind() {
            FileKind::Directory => self.disk.rmdir(&at.dir, &at.place.name).await,
            _ => self.disk.unlink(&at.dir, &at.place.name).await,
        };
    }

    async fn make_distributed(
        &self,
        at: &NameOnDisk<'_, D>,
        id: FileId,
        slot: Slot,
        birth: &FileBirth,
    ) -> DiskResult<MadeFile<D>> {
        let in_slot = self.slot_to_fill(slot).await?;
        let name = id.to_string();
        let made = async {
            let (node, _) =
                self.make_at(&in_slot, name.as_bytes(), Making::Directory, id, birth).await?;
            if birth.is_listed {
                self.inherit_list(&at.dir, &node, birth.mode).await?;
            }
            let stat = self.disk.stat(&node).await?;
            // Last, so that a name leads to all of it.
            let target = Placeholder { slot, id }.target(self.home(at.place.parent)?.steps);
            self.disk.make(&at.dir, &at.place.name, Making::Symlink(&target), 0o777).await?;
            Ok((node, stat))
        };
        let made = made.await;
        if made.is_err() {
            let _ = self.disk.rmdir(&in_slot, name.as_bytes()).await;
        }
        made
    }

    /// Hands a directory's default list on to one that does not lie in it.
    async fn inherit_list(&self, from: &D::Node, to: &D::Node, mode: u32) -> DiskResult<()> {
        let disk = &self.disk;
        let list = match disk.xattr(from, DEFAULT_LIST).await {
            // A member that is copied has the directory's list of later; it gets what this directory has when it learns.
            Err(Errno::ENODATA) if self.copy_stage().is_some() => {
                return disk.set_mode(to, mode).await;
            }
            list => list?,
        };
        let flags = XattrFlags::default();
        disk.set_xattr(to, DEFAULT_LIST, &list, flags).await?;
        disk.set_xattr(to, ACCESS_LIST, &list, flags).await?;
        // The bits of the list that the caller's mode does not have are taken away, as the kernel does it.
        let listed = disk.stat(to).await?.mode;
        disk.set_mode(to, listed & mode & 0o777 | mode & 0o7000).await
    }

    /// Removes the name of a directory that is gone from its slot.
    async fn remove_lost(&self, id: FileId, at: &NameOnDisk<'_, D>) -> DiskResult<()> {
        self.disk.unlink(&at.dir, &at.place.name).await?;
        self.remove_place(id, at.place);
        self.count_placeholder(at.place.parent, false)?;
        self.forget_file(id)
    }

    /// Removes a name from the disk, and what is behind a placeholder.
    async fn take_away(&self, at: &NameOnDisk<'_, D>, found: &FoundFile) -> DiskResult<()> {
        let name = &at.place.name;
        match (found.slot, found.stat.kind) {
            (Some(slot), _) => {
                self.disk.unlink(&at.dir, name).await?;
                self.remove_unnamed(found.id, slot).await;
                Ok(())
            }
            (None, FileKind::Directory) => self.disk.rmdir(&at.dir, name).await,
            (None, _) => self.disk.unlink(&at.dir, name).await,
        }
    }

    /// Before a name goes: keeps a file alive that somebody holds. Whether its last name goes.
    async fn begin_ending(&self, found: &FoundFile) -> DiskResult<bool> {
        let is_last = found.stat.kind == FileKind::Directory || found.stat.nlink <= 1;
        if is_last && self.held().is_held(found.id) {
            self.node(found.id).await?;
        }
        Ok(is_last)
    }

    /// After a name is gone.
    fn lose_place(&self, found: &FoundFile, place: &PoolPlace, is_last: bool) -> DiskResult<()> {
        let id = found.id;
        self.remove_place(id, place);
        if self.record(id)?.is_some_and(|record| record.is_counted(id)) {
            self.count_placeholder(place.parent, false)?;
        }
        if is_last {
            self.marks().remove(id);
            self.forget_file(id)?;
            self.held().lose_name(id);
        }
        Ok(())
    }

    fn forget_file(&self, id: FileId) -> DiskResult<()> {
        match self.record(id)? {
            Some(record) => {
                let removed = self.index.remove_file(id, record);
                removed.map_err(|error| self.index_failed(&error))
            }
            None => Ok(()),
        }
    }

    /// Moves a file over another one, which the caller has found to be replaceable. Both are as they were if that fails.
    async fn replace_on_disk(
        &self,
        (old, moved): (&NameOnDisk<'_, D>, &FoundFile),
        (new, other): (&NameOnDisk<'_, D>, &FoundFile),
    ) -> DiskResult<()> {
        let exchange = RenameFlags { exchange: true, no_replace: false };
        // One of them is a directory and the other a placeholder: `rename(2)` would refuse that.
        if moved.slot.is_some() != other.slot.is_some() {
            self.move_on_disk(old, new, exchange).await?;
            let removed = match other.slot {
                Some(_) => self.disk.unlink(&old.dir, &old.place.name).await,
                None => self.disk.rmdir(&old.dir, &old.place.name).await,
            };
            if let Err(errno) = removed {
                return match self.move_on_disk(old, new, exchange).await {
                    Ok(()) => Err(errno),
                    // Half of it is made: the journal makes the rest when the pool is opened again.
                    Err(_) => Err(self.fail()),
                };
            }
        } else {
            self.move_on_disk(old, new, RenameFlags::default()).await?;
        }
        if let Some(slot) = other.slot {
            self.remove_unnamed(other.id, slot).await;
        }
        Ok(())
    }

    /// Removes an empty directory from its slot, whose placeholder is gone. One that cannot be removed stays for a check.
    async fn remove_unnamed(&self, id: FileId, slot: Slot) {
        let removed = async {
            let in_slot = self.slot_node(slot).await?;
            self.disk.rmdir(&in_slot, id.to_string().as_bytes()).await
        };
        if let Err(errno) = removed.await {
            tracing::warn!("directory {id} stays in slot {slot}: {errno}");
        }
    }

    async fn move_on_disk(
        &self,
        old: &NameOnDisk<'_, D>,
        new: &NameOnDisk<'_, D>,
        flags: RenameFlags,
    ) -> DiskResult<()> {
        self.disk.rename((&old.dir, &old.place.name), (&new.dir, &new.place.name), flags).await
    }

    /// Tells the index of a file that has moved, and lets placeholders go up as far as they lie deep.
    async fn moved(
        &self,
        moved: &FoundFile,
        old: &NameOnDisk<'_, D>,
        new: &NameOnDisk<'_, D>,
    ) -> DiskResult<()> {
        let id = moved.id;
        self.remove_place(id, old.place);
        self.add_place(id, new.place);
        let record = self.record(id)?;
        if record.is_some_and(|record| record.is_counted(id)) {
            self.count_placeholder(old.place.parent, false)?;
            self.count_placeholder(new.place.parent, true)?;
        }
        let mended = match (moved.slot, record.and_then(|record| record.referral(id))) {
            (Some(slot), _) => {
                let placeholder = Placeholder { slot, id };
                self.mend_placeholder(new.place, &new.dir, placeholder).await.map(drop)
            }
            (None, Some(referral)) => self.mend_referral(new.place, &new.dir, referral).await,
            (None, None) => Ok(()),
        };
        if let Err(errno) = mended {
            // It matters to those alone who read the tree by hand, and a check mends it.
            tracing::warn!("the link to file {id} leads elsewhere by hand: {errno}");
        }
        Ok(())
    }

    /// Whether what is made in a directory gets its mode from a list.
    pub(crate) async fn has_default_list(&self, dir: &D::Node) -> DiskResult<bool> {
        match self.disk.xattr(dir, DEFAULT_LIST).await {
            Ok(_) => Ok(true),
            Err(Errno::ENODATA | Errno::EOPNOTSUPP) => Ok(false),
            Err(errno) => Err(errno),
        }
    }
}

fn to_set(time: Time) -> Option<TimeToSet> {
    Some(TimeToSet::To(time.into()))
}
