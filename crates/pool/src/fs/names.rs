//! Names: looked up, made, linked, removed, renamed.
//!
//! A call first has the locks of all directories and files that it touches. Which those are depends on what stands under the
//! names, so it looks, takes the locks, and looks again ([`PoolFs::with_names`]).

use std::collections::BTreeSet;
use std::time::Duration;

use atoll_vfs::{
    Caller, CreateVerifier, Entry, Errno, FileKind, OpenFlags, Opened, RenameFlags, check_name,
};

use super::PoolFs;
use super::calls::entry_elsewhere;
use crate::change::{BirthKind, FileBirth, PoolChange, PoolPlace};
use crate::crossings::HeldByCrossings;
use crate::disk::{Disk, DiskResult, Stat, missing_is_none};
use crate::layout::{FileId, GroupNumber, Referral, Slot};
use crate::member::{Changing, FoundFile};
use crate::turns::Turn;

const SET_GID: u32 = 0o2000;
/// How long a call waits for a change over several groups.
const FREE_LIMIT: Duration = Duration::from_secs(10);

/// A name in a directory whose lock the caller has.
struct NamedFile<D: Disk> {
    place: PoolPlace,
    dir: D::Node,
    dir_stat: Stat,
    found: Option<FoundFile>,
}

/// Locks that are held until a change is made.
struct LockedNames {
    _changing: Changing,
    _turns: Vec<Turn>,
}

impl<D: Disk> PoolFs<D> {
    pub(super) async fn look_up(&self, parent: FileId, name: &[u8]) -> DiskResult<Entry> {
        check_name(name)?;
        let place = PoolPlace::new(parent, name);
        let found = loop {
            let turn = self.free_name(&place, FREE_LIMIT).await?;
            let dir = self.member.node(parent).await?;
            // The disk says whether it is a directory at all.
            let found = self.member.find(parent, &dir, name).await?;
            // Another group may have decided that the file loses or gets a name there: how many it has is to be right.
            let Err(needed) = self.member.check_free(|| HeldByCrossings::of_file(found.id)) else {
                break found;
            };
            drop(turn);
            self.member.until_free(&needed, FREE_LIMIT).await?;
        };
        self.member.keep_up();
        self.entry(found.id, &found.stat)
    }

    /// The lock of a directory for looks, at a time when no change over several groups holds this name of it.
    pub(super) async fn free_name(&self, place: &PoolPlace, limit: Duration) -> DiskResult<Turn> {
        loop {
            let turn = self.member.turns.read(place.parent.0).await;
            let Err(needed) = self.member.check_free(|| HeldByCrossings::of_name(place)) else {
                return Ok(turn);
            };
            drop(turn);
            self.member.until_free(&needed, limit).await?;
        }
    }

    pub(super) async fn parent_entry(&self, id: FileId) -> DiskResult<Entry> {
        if self.member.record(id)?.is_none_or(|record| record.referral(id).is_none()) {
            self.member.directory(id).await?;
        }
        if self.siblings().is_some() {
            // Its directory may be just another one.
            self.member.until_free(&HeldByCrossings::of_file(id), FREE_LIMIT).await?;
        }
        let parent = match self.member.parent_of(id)? {
            // The directory that holds its referral does.
            Some(outside) if outside.is_fixed() && outside != FileId::ROOT => {
                let place = self.member.places(id)?.into_iter().next().ok_or(Errno::ESTALE)?;
                let referral = Referral::of_outside_name(&place.name).ok_or(Errno::EIO)?;
                return Ok(entry_elsewhere(referral.id, FileKind::Symlink));
            }
            parent => parent.unwrap_or(FileId::ROOT),
        };
        let stat = self.stat(parent).await?;
        self.entry(parent, &stat)
    }

    /// What stands under a name, under the directory's lock.
    async fn look(&self, parent: FileId, name: &[u8]) -> DiskResult<NamedFile<D>> {
        let (dir, dir_stat) = self.member.directory(parent).await?;
        check_name(name)?;
        let found = missing_is_none(self.member.find(parent, &dir, name).await)?;
        Ok(NamedFile { place: PoolPlace::new(parent, name), dir, dir_stat, found })
    }

    /// Looks at names with the locks of their directories, of the files under them, and of `also`.
    async fn with_names(
        &self,
        names: &[(FileId, &[u8])],
        also: &[FileId],
    ) -> DiskResult<(Vec<NamedFile<D>>, LockedNames)> {
        loop {
            match self.try_with_names(names, also).await? {
                Ok(locked) => return Ok(locked),
                Err(needed) => self.member.until_free(&needed, FREE_LIMIT).await?,
            }
        }
    }

    /// As [`PoolFs::with_names`]; what is to be waited for, without locks, if a change over several groups holds it.
    async fn try_with_names(
        &self,
        names: &[(FileId, &[u8])],
        also: &[FileId],
    ) -> DiskResult<Result<(Vec<NamedFile<D>>, LockedNames), HeldByCrossings>> {
        let changing = self.member.begin_change().await?;
        let mut wanted: Vec<u64> = also.iter().map(|id| id.0).collect();
        wanted.extend(names.iter().map(|(parent, _)| parent.0));
        loop {
            let turns = self.member.turns.write_all(wanted.iter().copied()).await;
            let mut all = Vec::with_capacity(names.len());
            for (parent, name) in names {
                all.push(self.look(*parent, name).await?);
                self.member.held().forget_listing(*parent);
            }
            let under: Vec<u64> = all.iter().filter_map(|named| Some(named.found?.id.0)).collect();
            if under.iter().all(|id| wanted.contains(id)) {
                let files = under.iter().map(|id| FileId(*id)).chain(also.iter().copied());
                let places = all.iter().map(|named| &named.place);
                let needed = || HeldByCrossings::of_names(files, places);
                let locked = LockedNames { _changing: changing, _turns: turns };
                return Ok(self.member.check_free(needed).map(|()| (all, locked)));
            }
            wanted.truncate(also.len() + names.len());
            wanted.extend(under);
        }
    }

    /// Looks at a name with the lock of its directory alone, for what is made there.
    async fn with_name(
        &self,
        parent: FileId,
        name: &[u8],
    ) -> DiskResult<(NamedFile<D>, LockedNames)> {
        let needed = || HeldByCrossings::of_names([], [&PoolPlace::new(parent, name)]);
        loop {
            let changing = self.member.begin_change().await?;
            let turns = vec![self.member.turns.write(parent.0).await];
            let Err(needed) = self.member.check_free(needed) else {
                let named = self.look(parent, name).await?;
                return Ok((named, LockedNames { _changing: changing, _turns: turns }));
            };
            drop((turns, changing));
            self.member.until_free(&needed, FREE_LIMIT).await?;
        }
    }

    /// A directory that may get a name: not one that was removed.
    fn check_lives(&self, named: &NamedFile<D>) -> DiskResult<()> {
        match named.dir_stat.nlink == 0 || self.member.held().is_nameless(named.place.parent) {
            true => Err(Errno::ENOENT),
            false => Ok(()),
        }
    }

    pub(super) async fn make(
        &self,
        caller: Caller,
        parent: FileId,
        name: &[u8],
        what: BirthKind,
        mode: u32,
        verifier: Option<CreateVerifier>,
    ) -> DiskResult<Entry> {
        let make = || self.try_to_make(caller, parent, name, what.clone(), mode, verifier);
        self.with_share(parent, make).await
    }

    async fn try_to_make(
        &self,
        caller: Caller,
        parent: FileId,
        name: &[u8],
        what: BirthKind,
        mode: u32,
        verifier: Option<CreateVerifier>,
    ) -> DiskResult<Entry> {
        check_name(name)?;
        let Some(siblings) = self.siblings().filter(|_| what == BirthKind::Directory) else {
            let (named, _locked) = self.with_name(parent, name).await?;
            return self.make_named(caller, &named, what, mode, verifier).await;
        };
        let mut tried = BTreeSet::new();
        loop {
            let group = self.group_for(parent, name).await?;
            if !tried.insert(group) {
                return Err(Errno::ENOSPC);
            }
            let made = if group == self.group() {
                let (named, _locked) = self.with_name(parent, name).await?;
                let what = what.clone();
                self.make_named(caller, &named, what, mode, verifier).await
            } else {
                self.make_directory_elsewhere(&caller, (parent, name), mode, group).await
            };
            match made {
                // What is refused by another group is known already.
                Err(Errno::ENOSPC) if group == self.group() => siblings.note_full(group),
                Err(Errno::ENOSPC) => {}
                made => return made,
            }
        }
    }

    async fn make_directory_elsewhere(
        &self,
        caller: &Caller,
        (parent, name): (FileId, &[u8]),
        mode: u32,
        group: GroupNumber,
    ) -> DiskResult<Entry> {
        // Its name takes room here.
        self.member.check_room()?;
        self.member.check_copies()?;
        let at = PoolPlace::new(parent, name);
        let id = self.make_elsewhere(caller, at, mode, group).await?;
        let stat = self.stat(id).await?;
        self.entry(id, &stat)
    }

    async fn make_named(
        &self,
        caller: Caller,
        named: &NamedFile<D>,
        what: BirthKind,
        mode: u32,
        verifier: Option<CreateVerifier>,
    ) -> DiskResult<Entry> {
        if named.found.is_some() {
            return Err(Errno::EEXIST);
        }
        self.check_lives(named)?;
        self.member.check_room()?;
        self.member.check_copies()?;
        let parent = named.place.parent;
        self.member.held().forget_listing(parent);
        let home = self.member.home(parent)?;
        let what = match what {
            BirthKind::Directory if self.member.is_to_be_distributed(parent)? => {
                BirthKind::Distributed(Slot::of_directory(parent, &named.place.name, 0))
            }
            what => what,
        };
        // One that is too long is refused before anything is written.
        what.stored_target(0).ok_or(Errno::ENAMETOOLONG)?;
        let id = self.member.new_id(what.slot().unwrap_or(home.slot))?;
        // What has a default list gets its mode from that, and the caller's mode.
        let is_listed = !matches!(what, BirthKind::Symlink(_))
            && self.member.has_default_list(&named.dir).await?;
        let times = verifier.map(|verifier| {
            let (atime, mtime) = verifier.times();
            (atime.into(), mtime.into())
        });
        let birth =
            FileBirth { times, ..birth_in(&named.dir_stat, &caller, what, mode, is_listed) };
        let change = PoolChange::Make { id, at: named.place.clone(), birth, by: self.origin };
        let (node, stat) = self.member.change(change).await?.ok_or(Errno::EIO)?;
        let entry = self.entry(id, &stat)?;
        self.member.held().keep_node(id, node);
        Ok(entry)
    }

    pub(super) async fn create_and_open(
        &self,
        caller: Caller,
        parent: FileId,
        name: &[u8],
        mode: u32,
        flags: OpenFlags,
    ) -> DiskResult<(Entry, Opened)> {
        self.with_share(parent, || self.try_to_create(caller, parent, name, mode, flags)).await
    }

    async fn try_to_create(
        &self,
        caller: Caller,
        parent: FileId,
        name: &[u8],
        mode: u32,
        flags: OpenFlags,
    ) -> DiskResult<(Entry, Opened)> {
        check_name(name)?;
        let (entry, flags) = {
            let (named, _locked) = self.with_name(parent, name).await?;
            match named.found {
                Some(_) if flags.has(OpenFlags::EXCLUSIVE) => return Err(Errno::EEXIST),
                // The caller asks the group that has the file.
                Some(found) if self.referral(found.id, found.stat.kind)?.is_some() => {
                    return Err(Errno::ELOOP);
                }
                Some(found) => (self.entry(found.id, &found.stat)?, flags),
                None => {
                    let entry =
                        self.make_named(caller, &named, BirthKind::Regular, mode, None).await?;
                    (entry, OpenFlags(flags.0 & !OpenFlags::TRUNCATE))
                }
            }
        };
        let id = entry.attr.inode.into();
        match self.open_file(id, flags).await {
            Ok(opened) if flags.has(OpenFlags::TRUNCATE) => {
                let stat = self.stat(id).await?;
                let attr = self.attr(id, &stat)?;
                Ok((Entry { attr, ..entry }, opened))
            }
            Ok(opened) => Ok((entry, opened)),
            Err(errno) => {
                self.member.held().forget(id, 1);
                Err(errno)
            }
        }
    }

    pub(super) async fn link_name(
        &self,
        id: FileId,
        parent: FileId,
        name: &[u8],
    ) -> DiskResult<Entry> {
        if self.siblings().is_some() && id.group() != self.group() {
            let id = self.link_elsewhere(id, PoolPlace::new(parent, name)).await?;
            let stat = self.stat(id).await?;
            return self.entry(id, &stat);
        }
        let (names, _locked) = self.with_names(&[(parent, name)], &[id]).await?;
        let named = &names[0];
        if named.found.is_some() {
            return Err(Errno::EEXIST);
        }
        self.check_lives(named)?;
        let node = self.member.node(id).await?;
        let stat = self.member.disk.stat(&node).await?;
        if stat.kind == FileKind::Directory {
            return Err(Errno::EPERM);
        }
        if self.seen_links(id, &stat) == 0 {
            return Err(Errno::ENOENT);
        }
        self.member.check_copies()?;
        let change = PoolChange::Link { id, at: named.place.clone(), by: self.origin };
        self.member.change(change).await?;
        let stat = self.member.stat(id, &node).await?;
        self.entry(id, &stat)
    }

    pub(super) async fn remove(
        &self,
        parent: FileId,
        name: &[u8],
        is_rmdir: bool,
    ) -> DiskResult<()> {
        let outside = [FileId::outside(self.group())];
        let mut also = &outside[..0];
        let (names, _locked, found) = loop {
            let (names, locked) = match self.with_names(&[(parent, name)], also).await {
                Err(Errno::EIO) if is_rmdir => return self.remove_lost(parent, name).await,
                names => names?,
            };
            let found = names[0].found.ok_or(Errno::ENOENT)?;
            if !also.is_empty() || !self.member.needs_open_name(&found) {
                break (names, locked, found);
            }
            also = &outside;
        };
        let named = &names[0];
        if self.referral(found.id, found.stat.kind)?.is_some() {
            let at = named.place.clone();
            drop((names, _locked));
            return self.remove_elsewhere(at, is_rmdir).await;
        }
        match (found.stat.kind == FileKind::Directory, is_rmdir) {
            (true, false) => return Err(Errno::EISDIR),
            (false, true) => return Err(Errno::ENOTDIR),
            _ => {}
        }
        if is_rmdir {
            self.check_empty(found.id).await?;
        }
        self.member.check_copies()?;
        let (id, at) = (found.id, named.place.clone());
        if !also.is_empty() && self.member.needs_open_name(&found) {
            let (from, to) = (at.clone(), PoolPlace::open_name(id));
            let change = PoolChange::Rename { id, from, to, replaced: None, by: self.origin };
            match self.member.change(change).await {
                // There is no room for the open name.
                Err(Errno::ENOSPC | Errno::EDQUOT) => {}
                changed => {
                    self.member.end_unlinked_soon(id);
                    return changed.map(drop);
                }
            }
        }
        let change = PoolChange::Unlink { id, at, by: self.origin };
        self.member.change(change).await.map(|_| ())
    }

    /// Removes the name of a directory that is gone from its slot.
    async fn remove_lost(&self, parent: FileId, name: &[u8]) -> DiskResult<()> {
        let _changing = self.member.begin_change().await?;
        let _turn = self.member.turns.write(parent.0).await;
        let (dir, _) = self.member.directory(parent).await?;
        let id = self.member.lost_directory(&dir, name).await?.ok_or(Errno::EIO)?;
        self.member.check_copies()?;
        self.member.held().forget_listing(parent);
        let at = PoolPlace::new(parent, name);
        self.member.change(PoolChange::Unlink { id, at, by: self.origin }).await.map(|_| ())
    }

    pub(super) async fn check_empty(&self, id: FileId) -> DiskResult<()> {
        let (node, _) = self.member.directory(id).await?;
        match self.member.disk.list(&node).await?.is_empty() {
            true => Ok(()),
            false => Err(Errno::ENOTEMPTY),
        }
    }

    pub(super) async fn rename_name(
        &self,
        from: (FileId, &[u8]),
        to: (FileId, &[u8]),
        flags: RenameFlags,
    ) -> DiskResult<()> {
        if flags.no_replace && flags.exchange {
            return Err(Errno::EINVAL);
        }
        let across = || {
            let (from, to) = (PoolPlace::new(from.0, from.1), PoolPlace::new(to.0, to.1));
            self.rename_across(from, to, flags)
        };
        if self.siblings().is_some() && to.0.group() != self.group() {
            return across().await;
        }
        // Not with the lock of all moves.
        self.member.wait_for_backups().await?;
        let outside = [FileId::outside(self.group())];
        let mut also = &outside[..0];
        // Two moves of directories at once could make a loop; of other files they are not known yet.
        let (_moving, names, _locked) = loop {
            let moving = match from.0 == to.0 {
                true => None,
                false => Some(self.member.move_turn().await),
            };
            match self.try_with_names(&[from, to], also).await? {
                Ok((names, locked)) => {
                    let replaced = names[1].found.filter(|_| !flags.exchange && !flags.no_replace);
                    if !also.is_empty()
                        || !replaced.is_some_and(|of| self.member.needs_open_name(&of))
                    {
                        break (moving, names, locked);
                    }
                    also = &outside;
                }
                Err(needed) => {
                    drop(moving);
                    self.member.until_free(&needed, FREE_LIMIT).await?;
                }
            }
        };
        let [old, new] = &names[..] else { return Err(Errno::EIO) };
        let moved = old.found.ok_or(Errno::ENOENT)?;
        if self.siblings().is_some() && self.needs_others(&moved, (old, new), flags)? {
            drop((names, _locked, _moving));
            return across().await;
        }
        self.check_lives(new)?;
        self.check_loop(&moved, new)?;
        self.member.check_copies()?;
        let Some(other) = new.found else {
            if flags.exchange {
                return Err(Errno::ENOENT);
            }
            let (from, to) = (old.place.clone(), new.place.clone());
            let change =
                PoolChange::Rename { id: moved.id, from, to, replaced: None, by: self.origin };
            return self.member.change(change).await.map(|_| ());
        };
        if flags.no_replace {
            return Err(Errno::EEXIST);
        }
        if moved.id == other.id {
            // Two names of one file: nothing happens (`rename(2)`).
            return Ok(());
        }
        if flags.exchange {
            self.check_loop(&other, old)?;
            let (from, to) = (old.place.clone(), new.place.clone());
            let change =
                PoolChange::Exchange { id: moved.id, from, other: other.id, to, by: self.origin };
            return self.member.change(change).await.map(|_| ());
        }
        match (moved.stat.kind == FileKind::Directory, other.stat.kind == FileKind::Directory) {
            (false, true) => return Err(Errno::EISDIR),
            (true, false) => return Err(Errno::ENOTDIR),
            (true, true) => self.check_empty(other.id).await?,
            (false, false) => {}
        }
        let keeps_other = !also.is_empty() && self.member.needs_open_name(&other);
        if keeps_other {
            // First, so that the new name never leads nowhere. What is left of it if this ends here goes with the next look.
            let at = PoolPlace::open_name(other.id);
            match self.member.change(PoolChange::Link { id: other.id, at, by: None }).await {
                // There is no room for the open name.
                Ok(_) | Err(Errno::ENOSPC | Errno::EDQUOT) => {}
                Err(errno) => return Err(errno),
            }
        }
        let (id, from, to) = (moved.id, old.place.clone(), new.place.clone());
        let replaced = Some(other.id);
        let changed = self
            .member
            .change(PoolChange::Rename { id, from, to, replaced, by: self.origin })
            .await;
        if keeps_other {
            self.member.end_unlinked_soon(other.id);
        }
        changed.map(drop)
    }

    /// Whether other groups have a part in a rename between directories of this one: what is replaced is a file of theirs; or a
    /// directory gets another parent, which all groups do in one order.
    fn needs_others(
        &self,
        moved: &FoundFile,
        (old, new): (&NamedFile<D>, &NamedFile<D>),
        flags: RenameFlags,
    ) -> DiskResult<bool> {
        let is_other_parent = old.place.parent != new.place.parent;
        let is_directory = |found: &FoundFile| {
            let referral = self.referral(found.id, found.stat.kind)?;
            let kind = referral.map_or(found.stat.kind, |referral| referral.kind);
            Ok::<_, Errno>(kind == FileKind::Directory)
        };
        if is_other_parent && is_directory(moved)? {
            return Ok(true);
        }
        let Some(other) = new.found else { return Ok(false) };
        if flags.exchange {
            return Ok(is_other_parent && is_directory(&other)?);
        }
        Ok(self.referral(other.id, other.stat.kind)?.is_some()
            || self.referral(moved.id, moved.stat.kind)?.is_some())
    }

    /// A directory does not go into itself.
    fn check_loop(&self, moved: &FoundFile, into: &NamedFile<D>) -> DiskResult<()> {
        match moved.stat.kind == FileKind::Directory
            && self.member.is_within(into.place.parent, moved.id)?
        {
            true => Err(Errno::EINVAL),
            false => Ok(()),
        }
    }
}

/// What a file is made with in a directory of these attributes.
pub(super) fn birth_in(
    dir: &Stat,
    caller: &Caller,
    what: BirthKind,
    mode: u32,
    is_listed: bool,
) -> FileBirth {
    let inherits = dir.mode & SET_GID != 0;
    let mut mode = mode & 0o7777;
    if inherits && what.kind() == FileKind::Directory {
        mode |= SET_GID;
    }
    if !is_listed {
        mode &= !(caller.umask & 0o777);
    }
    let gid = if inherits { dir.gid } else { caller.gid };
    FileBirth { what, uid: caller.uid, gid, mode, is_listed, times: None }
}
