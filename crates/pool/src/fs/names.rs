//! Names: looked up, made, linked, removed, renamed.
//!
//! A call first has the locks of all directories and files that it touches. Which those are depends on what stands under the
//! names, so it looks, takes the locks, and looks again ([`PoolFs::with_names`]).

use atoll_vfs::{
    Caller, CreateVerifier, Entry, Errno, FileKind, OpenFlags, Opened, RenameFlags, check_name,
};

use super::PoolFs;
use crate::change::{BirthKind, FileBirth, PoolChange, PoolPlace};
use crate::disk::{
    ACCESS_LIST, DEFAULT_LIST, Disk, DiskResult, Making, Stat, TimeToSet, missing_is_none,
};
use crate::index::FileRecord;
use crate::layout::{FileId, Placeholder, Slot};
use crate::member::{Changing, FoundFile};
use crate::turns::Turn;

const SET_GID: u32 = 0o2000;

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
        let found = {
            let _turn = self.member.turns.read(parent.0).await;
            let dir = self.member.node(parent).await?;
            // The disk says whether it is a directory at all.
            self.member.find(parent, &dir, name).await?
        };
        self.member.keep_up();
        self.entry(found.id, &found.stat)
    }

    pub(super) async fn parent_entry(&self, id: FileId) -> DiskResult<Entry> {
        self.member.directory(id).await?;
        let parent = self.member.parent_of(id)?.unwrap_or(FileId::ROOT);
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
                return Ok((all, LockedNames { _changing: changing, _turns: turns }));
            }
            wanted.truncate(also.len() + names.len());
            wanted.extend(under);
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
        check_name(name)?;
        let _changing = self.member.begin_change().await?;
        let _turn = self.member.turns.write(parent.0).await;
        let named = self.look(parent, name).await?;
        self.make_named(caller, &named, what, mode, verifier).await
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
        let parent = named.place.parent;
        self.member.held().forget_listing(parent);
        let home = self.member.home(parent)?;
        let what = match what {
            BirthKind::Directory if self.member.is_to_be_distributed(parent)? => {
                BirthKind::Distributed(Slot::of_directory(parent, &named.place.name, 0))
            }
            what => what,
        };
        let stored = what.stored_target().ok_or(Errno::ENAMETOOLONG)?;
        let slot = what.slot();
        let id = self.member.new_id(slot.unwrap_or(home.slot))?;
        let inherits = named.dir_stat.mode & SET_GID != 0;
        let mut mode = mode & 0o7777;
        if inherits && what.kind() == FileKind::Directory {
            mode |= SET_GID;
        }
        // What has a default list gets its mode from that, and the caller's mode.
        let is_listed =
            !matches!(what, BirthKind::Symlink(_)) && self.has_default_list(&named.dir).await?;
        if !is_listed {
            mode &= !(caller.umask & 0o777);
        }
        let birth = FileBirth {
            uid: caller.uid,
            gid: if inherits { named.dir_stat.gid } else { caller.gid },
            mode: (!is_listed && !matches!(what, BirthKind::Symlink(_))).then_some(mode),
            times: verifier.map(|verifier| {
                let (atime, mtime) = verifier.times();
                (atime.into(), mtime.into())
            }),
            what,
        };
        let change = PoolChange::Make { id, at: named.place.clone(), birth: birth.clone() };
        let work = async {
            match slot {
                Some(slot) => {
                    self.make_distributed(named, id, slot, home.steps, &birth, mode).await
                }
                None => {
                    let making = birth.what.making(&stored);
                    let made =
                        self.make_at(&named.dir, &named.place.name, making, id, &birth, mode).await;
                    if made.is_err() {
                        self.unmake(&named.dir, &named.place.name, &birth.what).await;
                    }
                    made
                }
            }
        };
        let (node, stat) = self.member.logged(change, work).await?;
        let placeholders = u32::from(birth.what.is_escaped());
        let record = FileRecord { ino: stat.ino, generation: stat.generation, slot, placeholders };
        self.member.index.put_file(id, record);
        self.member.index.add_place(id, &named.place);
        if slot.is_some() {
            self.member.count_placeholder(parent, true)?;
        }
        let entry = self.entry(id, &stat)?;
        self.member.held().keep_node(id, node);
        Ok(entry)
    }

    async fn has_default_list(&self, dir: &D::Node) -> DiskResult<bool> {
        match self.member.disk.xattr(dir, DEFAULT_LIST).await {
            Ok(_) => Ok(true),
            Err(Errno::ENODATA | Errno::EOPNOTSUPP) => Ok(false),
            Err(errno) => Err(errno),
        }
    }

    /// Makes a file with all that it has.
    async fn make_at(
        &self,
        dir: &D::Node,
        name: &[u8],
        making: Making<'_>,
        id: FileId,
        birth: &FileBirth,
        mode: u32,
    ) -> DiskResult<(D::Node, Stat)> {
        let disk = &self.member.disk;
        disk.make(dir, name, making, mode).await?;
        let node = disk.node(dir, name).await?;
        let made = disk.stat(&node).await?;
        if (made.uid, made.gid) != (birth.uid, birth.gid) {
            disk.set_owner(&node, Some(birth.uid), Some(birth.gid)).await?;
        }
        if let Some(mode) = birth.mode
            && (made.mode != mode || mode & 0o7000 != 0)
        {
            disk.set_mode(&node, mode).await?;
        }
        if let Some((atime, mtime)) = birth.times {
            let time = |time: crate::change::Time| Some(TimeToSet::To(time.into()));
            disk.set_times(&node, time(atime), time(mtime)).await?;
        }
        // Last: what has its number is as it was to be.
        self.member.set_id(&node, id).await;
        let mut stat = disk.stat(&node).await?;
        if let BirthKind::Symlink(target) = &birth.what {
            stat.size_bytes = target.len() as u64;
        }
        Ok((node, stat))
    }

    async fn unmake(&self, dir: &D::Node, name: &[u8], what: &BirthKind) {
        // What stays is found by its attribute or as a file that nobody knows.
        let _ = match what.kind() {
            FileKind::Directory => self.member.disk.rmdir(dir, name).await,
            _ => self.member.disk.unlink(dir, name).await,
        };
    }

    async fn make_distributed(
        &self,
        named: &NamedFile<D>,
        id: FileId,
        slot: Slot,
        steps: usize,
        birth: &FileBirth,
        mode: u32,
    ) -> DiskResult<(D::Node, Stat)> {
        let in_slot = self.member.slot_to_fill(slot).await?;
        let name = id.to_string();
        let made = async {
            let made =
                self.make_at(&in_slot, name.as_bytes(), Making::Directory, id, birth, mode).await?;
            if birth.mode.is_none() {
                self.inherit_list(&named.dir, &made.0, mode).await?;
            }
            let stat = self.member.disk.stat(&made.0).await?;
            // Last, so that a name leads to all of it.
            let target = Placeholder { slot, id }.target(steps);
            self.member
                .disk
                .make(&named.dir, &named.place.name, Making::Symlink(&target), 0o777)
                .await?;
            Ok((made.0.clone(), stat))
        };
        let made = made.await;
        if made.is_err() {
            let _ = self.member.disk.rmdir(&in_slot, name.as_bytes()).await;
        }
        made
    }

    /// Hands a directory's default list on to one that does not lie in it.
    async fn inherit_list(&self, from: &D::Node, to: &D::Node, mode: u32) -> DiskResult<()> {
        let disk = &self.member.disk;
        let list = disk.xattr(from, DEFAULT_LIST).await?;
        let flags = atoll_vfs::XattrFlags::default();
        disk.set_xattr(to, DEFAULT_LIST, &list, flags).await?;
        disk.set_xattr(to, ACCESS_LIST, &list, flags).await?;
        // The bits of the list that the caller's mode does not have are taken away, as the kernel does it.
        let listed = disk.stat(to).await?.mode;
        disk.set_mode(to, listed & mode & 0o777 | mode & 0o7000).await
    }

    pub(super) async fn create_and_open(
        &self,
        caller: Caller,
        parent: FileId,
        name: &[u8],
        mode: u32,
        flags: OpenFlags,
    ) -> DiskResult<(Entry, Opened)> {
        check_name(name)?;
        let (entry, flags) = {
            let _changing = self.member.begin_change().await?;
            let _turn = self.member.turns.write(parent.0).await;
            let named = self.look(parent, name).await?;
            match named.found {
                Some(_) if flags.has(OpenFlags::EXCLUSIVE) => return Err(Errno::EEXIST),
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
        if stat.nlink == 0 {
            return Err(Errno::ENOENT);
        }
        let change = PoolChange::Link { id, at: named.place.clone() };
        let work = self.member.disk.link(&node, &named.dir, name);
        self.member.logged(change, work).await?;
        self.member.index.add_place(id, &named.place);
        let stat = self.member.stat(id, &node).await?;
        self.entry(id, &stat)
    }

    pub(super) async fn remove(
        &self,
        parent: FileId,
        name: &[u8],
        is_rmdir: bool,
    ) -> DiskResult<()> {
        let (names, _locked) = match self.with_names(&[(parent, name)], &[]).await {
            Err(Errno::EIO) if is_rmdir => return self.remove_lost(parent, name).await,
            names => names?,
        };
        let named = &names[0];
        let found = named.found.ok_or(Errno::ENOENT)?;
        match (found.stat.kind == FileKind::Directory, is_rmdir) {
            (true, false) => return Err(Errno::EISDIR),
            (false, true) => return Err(Errno::ENOTDIR),
            _ => {}
        }
        if is_rmdir {
            self.check_empty(found.id).await?;
        }
        let change = PoolChange::Unlink { id: found.id, at: named.place.clone() };
        let ending = self.begin_ending(&found).await?;
        self.member.logged(change, self.take_away(named, &found)).await?;
        self.lose_place(&found, &named.place, ending)
    }

    /// Removes the name of a directory that is gone from its slot.
    async fn remove_lost(&self, parent: FileId, name: &[u8]) -> DiskResult<()> {
        let _changing = self.member.begin_change().await?;
        let _turn = self.member.turns.write(parent.0).await;
        let (dir, _) = self.member.directory(parent).await?;
        let id = self.member.lost_directory(&dir, name).await?.ok_or(Errno::EIO)?;
        self.member.held().forget_listing(parent);
        let at = PoolPlace::new(parent, name);
        let change = PoolChange::Unlink { id, at: at.clone() };
        self.member.logged(change, self.member.disk.unlink(&dir, name)).await?;
        self.member.index.remove_place(id, &at);
        self.member.count_placeholder(parent, false)?;
        if let Some(record) = self.member.record(id)? {
            let removed = self.member.index.remove_file(id, record);
            removed.map_err(|error| self.member.index_failed(&error))?;
        }
        Ok(())
    }

    async fn check_empty(&self, id: FileId) -> DiskResult<()> {
        let (node, _) = self.member.directory(id).await?;
        match self.member.disk.list(&node).await?.is_empty() {
            true => Ok(()),
            false => Err(Errno::ENOTEMPTY),
        }
    }

    /// Removes a name from the disk, and what is behind a placeholder.
    async fn take_away(&self, named: &NamedFile<D>, found: &FoundFile) -> DiskResult<()> {
        let disk = &self.member.disk;
        let name = &named.place.name;
        match (found.slot, found.stat.kind) {
            (Some(slot), _) => {
                disk.unlink(&named.dir, name).await?;
                self.remove_unnamed(found.id, slot).await;
                Ok(())
            }
            (None, FileKind::Directory) => disk.rmdir(&named.dir, name).await,
            (None, _) => disk.unlink(&named.dir, name).await,
        }
    }

    /// Before a name goes: keeps a file alive that somebody holds. Whether its last name goes.
    async fn begin_ending(&self, found: &FoundFile) -> DiskResult<bool> {
        let is_last = found.stat.kind == FileKind::Directory || found.stat.nlink <= 1;
        if is_last && self.member.held().is_held(found.id) {
            self.member.node(found.id).await?;
        }
        Ok(is_last)
    }

    /// After a name is gone.
    fn lose_place(&self, found: &FoundFile, place: &PoolPlace, is_last: bool) -> DiskResult<()> {
        let FoundFile { id, slot, .. } = *found;
        self.member.index.remove_place(id, place);
        if slot.is_some() {
            self.member.count_placeholder(place.parent, false)?;
        }
        if is_last {
            if let Some(record) = self.member.record(id)? {
                let removed = self.member.index.remove_file(id, record);
                removed.map_err(|error| self.member.index_failed(&error))?;
            }
            self.member.held().lose_name(id);
        }
        Ok(())
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
        // Two moves of directories at once could make a loop; of other files they are not known yet.
        let _moving = match from.0 == to.0 {
            true => None,
            false => Some(self.member.move_turn().await),
        };
        let (names, _locked) = self.with_names(&[from, to], &[]).await?;
        let [old, new] = &names[..] else { return Err(Errno::EIO) };
        let moved = old.found.ok_or(Errno::ENOENT)?;
        self.check_lives(new)?;
        self.check_loop(&moved, new)?;
        let Some(other) = new.found else {
            if flags.exchange {
                return Err(Errno::ENOENT);
            }
            let (from, to) = (old.place.clone(), new.place.clone());
            let change = PoolChange::Rename { id: moved.id, from, to, replaced: None };
            self.member.logged(change, self.move_on_disk(old, new, RenameFlags::default())).await?;
            return self.moved(&moved, old, new).await;
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
            let change = PoolChange::Exchange { id: moved.id, from, other: other.id, to };
            self.member.logged(change, self.move_on_disk(old, new, flags)).await?;
            self.moved(&moved, old, new).await?;
            return self.moved(&other, new, old).await;
        }
        match (moved.stat.kind == FileKind::Directory, other.stat.kind == FileKind::Directory) {
            (false, true) => return Err(Errno::EISDIR),
            (true, false) => return Err(Errno::ENOTDIR),
            (true, true) => self.check_empty(other.id).await?,
            (false, false) => {}
        }
        let (from, to) = (old.place.clone(), new.place.clone());
        let change = PoolChange::Rename { id: moved.id, from, to, replaced: Some(other.id) };
        let is_last = self.begin_ending(&other).await?;
        let work = self.replace_on_disk((old, &moved), (new, &other));
        self.member.logged(change, work).await?;
        self.lose_place(&other, &new.place, is_last)?;
        self.moved(&moved, old, new).await
    }

    /// Moves a file over another one, which the caller has found to be replaceable. Both are as they were if that fails.
    async fn replace_on_disk(
        &self,
        (old, moved): (&NamedFile<D>, &FoundFile),
        (new, other): (&NamedFile<D>, &FoundFile),
    ) -> DiskResult<()> {
        let disk = &self.member.disk;
        let exchange = RenameFlags { exchange: true, no_replace: false };
        // One of them is a directory and the other a placeholder: `rename(2)` would refuse that.
        if moved.slot.is_some() != other.slot.is_some() {
            self.move_on_disk(old, new, exchange).await?;
            let removed = match other.slot {
                Some(_) => disk.unlink(&old.dir, &old.place.name).await,
                None => disk.rmdir(&old.dir, &old.place.name).await,
            };
            if let Err(errno) = removed {
                return match self.move_on_disk(old, new, exchange).await {
                    Ok(()) => Err(errno),
                    // Half of it is made: the journal makes the rest when the pool is opened again.
                    Err(_) => Err(self.member.fail()),
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
            let in_slot = self.member.slot_node(slot).await?;
            self.member.disk.rmdir(&in_slot, id.to_string().as_bytes()).await
        };
        if let Err(errno) = removed.await {
            tracing::warn!("directory {id} stays in slot {slot}: {errno}");
        }
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

    async fn move_on_disk(
        &self,
        old: &NamedFile<D>,
        new: &NamedFile<D>,
        flags: RenameFlags,
    ) -> DiskResult<()> {
        self.member
            .disk
            .rename((&old.dir, &old.place.name), (&new.dir, &new.place.name), flags)
            .await
    }

    /// Tells the index of a file that has moved, and lets placeholders go up as far as they lie deep.
    async fn moved(
        &self,
        moved: &FoundFile,
        old: &NamedFile<D>,
        new: &NamedFile<D>,
    ) -> DiskResult<()> {
        let id = moved.id;
        self.member.index.remove_place(id, &old.place);
        self.member.index.add_place(id, &new.place);
        if let Some(slot) = moved.slot {
            self.member.count_placeholder(old.place.parent, false)?;
            self.member.count_placeholder(new.place.parent, true)?;
            let mended =
                self.member.mend_placeholder(&new.place, &new.dir, Placeholder { slot, id }).await;
            if let Err(errno) = mended {
                // It matters to those alone who read the tree by hand, and a check mends it.
                tracing::warn!("the link to directory {id} leads elsewhere by hand: {errno}");
            }
        }
        Ok(())
    }
}
