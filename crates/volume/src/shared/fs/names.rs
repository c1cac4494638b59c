//! Names: making, linking, removing and renaming files.
//!
//! A directory is one inode, so a change of one directory is atomic. Where two inodes change, the order
//! makes sure that a crash in between leaves a name too many or an inode that nothing names, and never
//! a name without its inode:
//!
//! | | first | then |
//! |---|---|---|
//! | making | the inode | its name |
//! | linking | the inode's link | the name |
//! | removing | the name | the link; the inode, if it was the last |
//! | renaming to another directory | the link to the new one | the new name, then without the old name, then without the old link |

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use atoll_env::Instant;
use atoll_key::kinds::certified::Dot;
use atoll_vfs::{Caller, Entry, Errno, FileKind, FileTime, RenameFlags, check_name};
use bytes::Bytes;

use super::{Freshness, Shared, Version};
use crate::format::MAX_TARGET_BYTES;
use crate::shared::entries::Entries;
use crate::shared::fault::Fault;
use crate::shared::inode::{self, Attributes, Contents, Inode, InodeKey, Link, Written};
use crate::shared::inodes::Base;
use crate::shared::merged;
use crate::shared::table::ROOT;

const SETGID: u32 = 0o2000;

/// What is made.
pub(super) enum Birth {
    File,
    /// Anything else.
    Other(Contents),
}

impl Birth {
    fn kind(&self) -> FileKind {
        match self {
            Birth::File => FileKind::Regular,
            Birth::Other(contents) => contents.kind(),
        }
    }

    /// The contents, as the write `dot` makes them.
    fn contents(self, dot: Dot, time_ms: u64) -> Contents {
        let written = Written { dot, time_ms };
        match self {
            Birth::File => Contents::Regular { size_bytes: 0, blocks_512: 0, data: None, written },
            Birth::Other(contents) => contents,
        }
    }
}

/// How often a call is made again whose names were changed meanwhile by others on this mount.
const MAX_RACES: usize = 16;

/// Directories between a file and the root, at most: more can only be a circle.
const MAX_DEPTH: usize = 4096;

/// A symbolic link.
pub(super) fn symlink(target: Bytes) -> Result<Contents, Errno> {
    if target.is_empty() || target.contains(&0) {
        return Err(Errno::EINVAL);
    }
    if target.len() > MAX_TARGET_BYTES {
        return Err(Errno::ENAMETOOLONG);
    }
    Ok(Contents::Symlink(target))
}

/// The entries of a directory.
fn entries(inode: &mut Inode) -> Result<&mut Entries, Errno> {
    match &mut inode.contents {
        Contents::Directory(entries) => Ok(entries),
        _ => Err(Errno::ENOTDIR),
    }
}

/// What `name` stands for in a directory that is being changed.
fn named(inode: &mut Inode, name: &[u8]) -> Result<Option<Vec<inode::Entry>>, Errno> {
    Ok(merged::named(entries(inode)?, name))
}

/// Takes names away that [`named`] has found. Other entries of the same names keep those that they are
/// shown by: if one became the plain name, `rm -r` would not find it, and a file saved by a rename would
/// give its name to what it replaces.
fn take_away(inode: &mut Inode, found: &[inode::Entry], dot: Dot) -> Result<(), Errno> {
    let entries = entries(inode)?;
    let names: BTreeSet<&Bytes> = found.iter().map(|entry| &entry.name).collect();
    let is_other = |entry: &inode::Entry| !found.contains(entry);
    if names.iter().any(|name| entries.of_name(name).any(is_other)) {
        for (shown, others) in merged::names(entries) {
            let first = &others[0];
            if shown == first.name || !names.contains(&first.name) || found.contains(first) {
                continue;
            }
            let kept = (first.inode, first.file_kind());
            entries.insert(inode::Entry::new(shown, kept, dot, first.time_ms));
            for entry in &others {
                entries.remove(entry);
            }
        }
    }
    for entry in found {
        entries.remove(entry);
    }
    Ok(())
}

/// How many names of `key` a directory has.
fn names_of(directory: &Inode, key: InodeKey) -> usize {
    match &directory.contents {
        Contents::Directory(entries) => entries.iter().filter(|e| e.inode == key).count(),
        _ => 0,
    }
}

fn modified(inode: &mut Inode, now: FileTime) {
    inode.attributes.mtime = now;
    inode.attributes.ctime = now;
}

impl Shared {
    pub(super) async fn lookup(&self, parent: u64, name: &[u8]) -> Result<Entry, Fault> {
        check_name(name)?;
        let (_, directory) = self.directory(parent, self.names_age()).await?;
        let key = directory.entry(name)?.ok_or(Errno::ENOENT)?.inode;
        match self.entry(key, self.names_age()).await {
            // Its removal is known, and that of the name not yet.
            Err(Fault { errno: Errno::ESTALE, .. }) => Err(Errno::ENOENT.into()),
            found => found,
        }
    }

    /// A directory in which names are to be made; [`Errno::ENOENT`] if it has been removed.
    async fn living_directory(&self, number: u64) -> Result<(InodeKey, Arc<Version>), Fault> {
        if self.table().node(number)?.orphan.is_some() {
            return Err(Errno::ENOENT.into());
        }
        match self.directory(number, Freshness::Newest).await {
            Err(Fault { errno: Errno::ESTALE, .. }) => Err(Errno::ENOENT.into()),
            found => found,
        }
    }

    /// Makes a file, and counts one lookup of it.
    pub(super) async fn make(
        &self,
        caller: Caller,
        (parent, name): (u64, &Bytes),
        birth: Birth,
        mode: u32,
    ) -> Result<Entry, Fault> {
        check_name(name)?;
        let (directory_key, directory) = self.living_directory(parent).await?;
        if directory.entry(name)?.is_some() {
            return Err(Errno::EEXIST.into());
        }
        let above = &directory.inode().attributes;
        let inherits = above.mode & SETGID != 0;
        let kind = birth.kind();
        let inherited = if inherits && kind == FileKind::Directory { SETGID } else { 0 };
        let (now, time_ms) = (self.now(), self.env.unix_ms());
        let attributes = Attributes {
            mode: mode & 0o7777 | inherited,
            uid: caller.uid,
            gid: if inherits { above.gid } else { caller.gid },
            mtime: now,
            ctime: now,
            atime: now,
            xattrs: Vec::new(),
        };
        // Whoever may write the directory may write what is made in it (design §4).
        let groups = directory.block.groups();
        let made = self.inodes.create(groups, self.random_number(), |added| Inode {
            attributes,
            links: BTreeSet::from([Link { added, directory: directory_key }]),
            contents: birth.contents(added, time_ms),
        });
        let (key, version) = made.await?;
        let added = self.inodes.update(directory_key, Base::Version(&directory), |inode, dot| {
            if named(inode, name)?.is_some() {
                return Err(Errno::EEXIST);
            }
            let entry = inode::Entry::new(name.clone(), (key, kind), dot, time_ms);
            entries(inode)?.insert(entry);
            modified(inode, now);
            Ok(())
        });
        if let Err(fault) = added.await {
            if fault.errno != Errno::ETIMEDOUT {
                self.drop_unnamed(key, &version).await;
            }
            return Err(fault);
        }
        Ok(self.hold(key, &version))
    }

    /// Removes an inode that was made and has got no name. If that fails, it ends with its lease.
    async fn drop_unnamed(&self, key: InodeKey, version: &Arc<Version>) {
        let removed = self.inodes.write(key, Base::Version(version), |_, _| Ok(((), true)));
        if let Err(fault) = removed.await {
            tracing::debug!("an inode without a name stays until its lease ends: {fault:?}");
        }
    }

    /// Gives a file another name.
    pub(super) async fn link(
        &self,
        number: u64,
        (parent, name): (u64, &Bytes),
    ) -> Result<Entry, Fault> {
        check_name(name)?;
        let (key, kind) = {
            let table = self.table();
            let node = table.node(number)?;
            match (node.kind, &node.orphan) {
                (FileKind::Directory, _) => return Err(Errno::EPERM.into()),
                (_, Some(_)) => return Err(Errno::ENOENT.into()),
                (kind, None) => (node.key, kind),
            }
        };
        let (directory_key, directory) = self.living_directory(parent).await?;
        if directory.entry(name)?.is_some() {
            return Err(Errno::EEXIST.into());
        }
        let (now, time_ms) = (self.now(), self.env.unix_ms());
        let linked = self.change(key, |inode, added| {
            inode.links.insert(Link { added, directory: directory_key });
            inode.attributes.ctime = now;
            Ok(())
        });
        linked.await?;
        let added = self.inodes.update(directory_key, Base::Version(&directory), |inode, dot| {
            if named(inode, name)?.is_some() {
                return Err(Errno::EEXIST);
            }
            entries(inode)?.insert(inode::Entry::new(name.clone(), (key, kind), dot, time_ms));
            modified(inode, now);
            Ok(names_of(inode, key))
        });
        if let Err(fault) = added.await {
            if fault.errno != Errno::ETIMEDOUT {
                let names = names_of(directory.inode(), key);
                self.drop_link(key, directory_key, (names, 1)).await;
            }
            return Err(fault);
        }
        let attr = self.attr(number).await?;
        self.table().hold(key, kind);
        Ok(super::entry(attr))
    }

    /// Removes a name that is not a directory.
    pub(super) async fn unlink(&self, parent: u64, name: &Bytes) -> Result<(), Fault> {
        check_name(name)?;
        let (directory_key, directory) = self.living_directory(parent).await?;
        let now = self.now();
        let removed = self.inodes.update(directory_key, Base::Version(&directory), |inode, dot| {
            let found = named(inode, name)?.ok_or(Errno::ENOENT)?;
            if found[0].file_kind() == FileKind::Directory {
                return Err(Errno::EISDIR);
            }
            take_away(inode, &found, dot)?;
            modified(inode, now);
            Ok((found[0].inode, (names_of(inode, found[0].inode), found.len())))
        });
        let ((key, names), _) = removed.await?;
        self.drop_link(key, directory_key, names).await;
        Ok(())
    }

    /// Notes in an inode that a directory has only so many names of it left, and how many it has lost;
    /// removes the inode if it has none anywhere. A link more than that may be of a name which is just
    /// being made. The name is gone already: what fails here leaves an inode that ends with its lease.
    async fn drop_link(&self, key: InodeKey, directory: InodeKey, names: (usize, usize)) {
        if let Err(fault) = self.try_drop_link(key, directory, names).await {
            tracing::debug!("a removed name is still in its inode: {fault:?}");
        }
    }

    async fn try_drop_link(
        &self,
        key: InodeKey,
        directory: InodeKey,
        (left_names, lost_names): (usize, usize),
    ) -> Result<(), Fault> {
        let now = self.now();
        let keep = |inode: &mut Inode| {
            let here = |link: &&Link| link.directory == directory;
            let surplus = inode.links.iter().filter(here).count().saturating_sub(left_names);
            let surplus = surplus.min(lost_names);
            let gone: Vec<Link> = inode.links.iter().filter(here).take(surplus).copied().collect();
            for link in &gone {
                inode.links.remove(link);
            }
            inode.attributes.ctime = now;
        };
        let newest = self.inodes.read(key, Freshness::Newest).await?;
        let mut left = newest.inode().clone();
        keep(&mut left);
        if !left.links.is_empty() {
            let kept = self.change(key, |inode, _| {
                keep(inode);
                Ok(())
            });
            return kept.await;
        }
        // Those who have it open go on reading and writing, and nothing of that is kept.
        let turn = {
            let mut table = self.table();
            let number = table.number_of(&key);
            number.and_then(|number| {
                let node = table.node_mut(number).ok()?;
                node.orphan = Some(newest.clone());
                Some(node.turn.clone())
            })
        };
        let _turn = match &turn {
            Some(turn) => Some(turn.lock().await),
            None => None,
        };
        let written = self.inodes.write(key, Base::Version(&newest), |inode, _| {
            keep(inode);
            Ok(((), inode.links.is_empty()))
        });
        if let (_, Some(_)) = written.await? {
            // It has got another name here meanwhile.
            let mut table = self.table();
            if let Some(number) = table.number_of(&key) {
                table.node_mut(number)?.orphan = None;
            }
        }
        Ok(())
    }

    /// Removes an empty directory.
    pub(super) async fn rmdir(&self, parent: u64, name: &Bytes) -> Result<(), Fault> {
        check_name(name)?;
        let (directory_key, directory) = self.living_directory(parent).await?;
        let entry = directory.entry(name)?.ok_or(Errno::ENOENT)?;
        if entry.file_kind() != FileKind::Directory {
            return Err(Errno::ENOTDIR.into());
        }
        let key = entry.inode;
        self.check_empty(key).await?;
        let now = self.now();
        let removed = self.inodes.update(directory_key, Base::Version(&directory), |inode, dot| {
            let found = named(inode, name)?.ok_or(Errno::ENOENT)?;
            if found[0].inode != key {
                return Err(Errno::EAGAIN);
            }
            take_away(inode, &found, dot)?;
            modified(inode, now);
            Ok(found)
        });
        let (found, _) = removed.await?;
        if let Err(fault) = self.remove_directory(key).await {
            // Somebody has made a name in it meanwhile.
            self.restore_name(directory_key, &found[0]).await?;
            return Err(fault);
        }
        self.watch_removed(directory_key, found[0].clone());
        Ok(())
    }

    /// Names an inode again whose name was taken away.
    async fn restore_name(&self, directory: InodeKey, entry: &inode::Entry) -> Result<(), Fault> {
        let restored = self.inodes.update(directory, Base::Newest, |inode, dot| {
            let entries = entries(inode)?;
            if entries.iter().all(|there| there.inode != entry.inode) {
                entries.insert(inode::Entry { added: dot, ..entry.clone() });
            }
            Ok(())
        });
        restored.await?;
        Ok(())
    }

    fn watch_removed(&self, parent: InodeKey, entry: inode::Entry) {
        let mut removed = self.removed.lock().expect("no holder of this lock panics");
        removed.push((parent, entry, self.env.now()));
    }

    /// Names directories again that were removed here while another mount made a name in them: such a
    /// removal does not count, and what was made there must be found.
    /// Looks once at each that was removed at least `age` ago.
    pub(super) async fn restore_removed(&self, age: Duration) {
        let now = self.env.now();
        let due: Vec<_> = {
            let mut removed = self.removed.lock().expect("no holder of this lock panics");
            let is_due = |at: Instant| now.since(at) >= age;
            let due = removed.iter().filter(|(_, _, at)| is_due(*at)).cloned().collect();
            removed.retain(|(_, _, at)| !is_due(*at));
            due
        };
        for (parent, entry, _) in due {
            match self.restore_if_living(parent, &entry).await {
                Ok(()) | Err(Fault { errno: Errno::ESTALE, .. }) => {}
                Err(fault) => {
                    tracing::debug!("a removed directory is looked at again: {fault:?}");
                    self.watch_removed(parent, entry);
                }
            }
        }
    }

    async fn restore_if_living(&self, parent: InodeKey, entry: &inode::Entry) -> Result<(), Fault> {
        if self.inodes.read(entry.inode, Freshness::Newest).await?.is_empty_directory() {
            return Ok(());
        }
        {
            let mut table = self.table();
            if let Some(number) = table.number_of(&entry.inode) {
                table.node_mut(number)?.orphan = None;
            }
        }
        tracing::info!("a removed directory is named again: another mount made names in it");
        self.restore_name(parent, entry).await
    }

    async fn check_empty(&self, key: InodeKey) -> Result<(), Fault> {
        match self.inodes.read(key, Freshness::Newest).await {
            Ok(version) if version.is_empty_directory() => Ok(()),
            Ok(_) => Err(Errno::ENOTEMPTY.into()),
            // It has been removed, and its name is left.
            Err(Fault { errno: Errno::ESTALE, .. }) => Ok(()),
            Err(fault) => Err(fault),
        }
    }

    /// Removes the inode of a directory whose name is gone; [`Errno::ENOTEMPTY`] if there are names in
    /// it now.
    async fn remove_directory(&self, key: InodeKey) -> Result<(), Fault> {
        let newest = match self.inodes.read(key, Freshness::Newest).await {
            Err(Fault { errno: Errno::ESTALE, .. }) => return Ok(()),
            newest => newest?,
        };
        let removed = self.inodes.write(key, Base::Version(&newest), |inode, _| {
            match entries(inode)?.is_empty() {
                true => Ok(((), true)),
                false => Err(Errno::ENOTEMPTY),
            }
        });
        removed.await?;
        let mut table = self.table();
        if let Some(number) = table.number_of(&key) {
            table.node_mut(number)?.orphan = Some(newest);
        }
        Ok(())
    }

    /// Renames, as `renameat2(2)`.
    pub(super) async fn rename(
        &self,
        (parent, name): (u64, &Bytes),
        (new_parent, new_name): (u64, &Bytes),
        flags: RenameFlags,
    ) -> Result<(), Fault> {
        if flags.exchange && flags.no_replace {
            return Err(Errno::EINVAL.into());
        }
        check_name(name)?;
        check_name(new_name)?;
        for _ in 0..MAX_RACES {
            match self.rename_once((parent, name), (new_parent, new_name), flags).await {
                Err(Fault { errno: Errno::EAGAIN, .. }) => {}
                done => return done,
            }
        }
        Err(Errno::EBUSY.into())
    }

    /// The same; [`Errno::EAGAIN`] if the names mean something else by now.
    async fn rename_once(
        &self,
        (parent, name): (u64, &Bytes),
        (new_parent, new_name): (u64, &Bytes),
        flags: RenameFlags,
    ) -> Result<(), Fault> {
        let (from_key, from) = self.living_directory(parent).await?;
        let (to_key, to) = match new_parent == parent {
            true => (from_key, from.clone()),
            false => self.living_directory(new_parent).await?,
        };
        let moved = from.entry(name)?.ok_or(Errno::ENOENT)?;
        let target = to.entry(new_name)?;
        let (key, kind) = (moved.inode, moved.file_kind());
        if kind == FileKind::Directory && from_key != to_key {
            self.check_no_cycle(key, to_key).await?;
        }
        match &target {
            None if flags.exchange => return Err(Errno::ENOENT.into()),
            Some(_) if flags.no_replace => return Err(Errno::EEXIST.into()),
            Some(target) if target.inode == key => return Ok(()),
            Some(target) if flags.exchange => {
                let moves_up = target.file_kind() == FileKind::Directory && from_key != to_key;
                if moves_up {
                    self.check_no_cycle(target.inode, from_key).await?;
                }
            }
            Some(target) => match (kind, target.file_kind()) {
                (FileKind::Directory, FileKind::Directory) => {
                    self.check_empty(target.inode).await?
                }
                (FileKind::Directory, _) => return Err(Errno::ENOTDIR.into()),
                (_, FileKind::Directory) => return Err(Errno::EISDIR.into()),
                _ => {}
            },
            None => {}
        }
        let other = target.as_ref().filter(|_| flags.exchange).map(|target| target.inode);
        let steps = Steps {
            from: (from_key, &from, name),
            to: (to_key, &to, new_name),
            moved: (key, kind),
            target: target.as_ref().map(|target| (target.inode, target.file_kind())),
            is_exchange: flags.exchange,
        };
        if from_key == to_key {
            self.rename_within(&steps).await?;
        } else {
            self.rename_across(&steps).await?;
        }
        let now = self.now();
        let touched = [Some(key), other].into_iter().flatten();
        for key in touched {
            // The time of a change, as ext4 has it; nothing depends on it.
            let touched = self.change(key, |inode, _| {
                inode.attributes.ctime = now;
                Ok(())
            });
            if let Err(fault) = touched.await {
                tracing::debug!("a renamed file has its old time: {fault:?}");
            }
        }
        match &target {
            Some(target) if !flags.exchange => self.replaced(target, to_key).await,
            _ => Ok(()),
        }
    }

    /// Removes what a rename has replaced.
    async fn replaced(&self, target: &inode::Entry, directory: InodeKey) -> Result<(), Fault> {
        match target.file_kind() {
            FileKind::Directory => match self.remove_directory(target.inode).await {
                // Somebody has made a name in it meanwhile: it appears beside what replaced it.
                Err(fault) => {
                    tracing::warn!("a directory that was replaced had names: {fault:?}");
                    self.restore_name(directory, target).await
                }
                Ok(()) => {
                    self.watch_removed(directory, target.clone());
                    Ok(())
                }
            },
            _ => {
                let names =
                    match self.inodes.read(directory, Freshness::Within(Duration::MAX)).await {
                        Ok(version) => names_of(version.inode(), target.inode),
                        Err(_) => 0,
                    };
                self.drop_link(target.inode, directory, (names, 1)).await;
                Ok(())
            }
        }
    }

    /// A directory does not move into itself or below itself. The directories above are those that this
    /// mount knows: two mounts that move directories at the same time can still make a circle.
    async fn check_no_cycle(&self, key: InodeKey, into: InodeKey) -> Result<(), Fault> {
        let root = self.table().node(ROOT)?.key;
        let mut above = into;
        for _ in 0..MAX_DEPTH {
            if above == key {
                return Err(Errno::EINVAL.into());
            }
            if above == root {
                return Ok(());
            }
            let version = self.inodes.read(above, self.names_age()).await?;
            match version.inode().links.iter().next() {
                Some(link) => above = link.directory,
                None => return Ok(()),
            }
        }
        Err(Errno::ELOOP.into())
    }

    async fn rename_within(&self, steps: &Steps<'_>) -> Result<(), Fault> {
        let (directory, base, name) = steps.from;
        let (_, _, new_name) = steps.to;
        let (now, time_ms) = (self.now(), self.env.unix_ms());
        let renamed = self.inodes.update(directory, Base::Version(base), |inode, dot| {
            let moved = steps.still(inode, name, Some(steps.moved.0))?;
            let target = steps.still(inode, new_name, steps.target.map(|(key, _)| key))?;
            take_away(inode, &[moved, target].concat(), dot)?;
            let new = inode::Entry::new(new_name.clone(), steps.moved, dot, time_ms);
            entries(inode)?.insert(new);
            if let (true, Some(target)) = (steps.is_exchange, steps.target) {
                entries(inode)?.insert(inode::Entry::new(name.clone(), target, dot, time_ms));
            }
            modified(inode, now);
            Ok(())
        });
        renamed.await?;
        Ok(())
    }

    async fn rename_across(&self, steps: &Steps<'_>) -> Result<(), Fault> {
        let (from_key, from, name) = steps.from;
        let (to_key, to, new_name) = steps.to;
        let (now, time_ms) = (self.now(), self.env.unix_ms());
        let exchanged = steps.target.filter(|_| steps.is_exchange);
        self.add_link(steps.moved.0, to_key).await?;
        if let Some((key, _)) = exchanged {
            self.add_link(key, from_key).await?;
        }
        let named_new = self.inodes.update(to_key, Base::Version(to), |inode, dot| {
            let target = steps.still(inode, new_name, steps.target.map(|(key, _)| key))?;
            take_away(inode, &target, dot)?;
            let new = inode::Entry::new(new_name.clone(), steps.moved, dot, time_ms);
            entries(inode)?.insert(new);
            modified(inode, now);
            Ok((names_of(inode, steps.moved.0), exchanged.map(|(key, _)| names_of(inode, key))))
        });
        let ((_, left_there), _) = match named_new.await {
            Ok(done) => done,
            Err(fault) => {
                if fault.errno == Errno::EAGAIN {
                    let names = names_of(to.inode(), steps.moved.0);
                    self.drop_link(steps.moved.0, to_key, (names, 1)).await;
                }
                return Err(fault);
            }
        };
        let unnamed = self.inodes.update(from_key, Base::Version(from), |inode, dot| {
            // Gone if somebody else has removed it meanwhile: then it is at its new name alone.
            let found = named(inode, name)?.unwrap_or_default();
            let moved: Vec<_> =
                found.into_iter().filter(|entry| entry.inode == steps.moved.0).collect();
            take_away(inode, &moved, dot)?;
            if let Some(target) = exchanged {
                entries(inode)?.insert(inode::Entry::new(name.clone(), target, dot, time_ms));
            }
            modified(inode, now);
            Ok((names_of(inode, steps.moved.0), moved.len()))
        });
        let (names, _) = unnamed.await?;
        self.drop_link(steps.moved.0, from_key, names).await;
        if let (Some((key, _)), Some(names)) = (exchanged, left_there) {
            self.drop_link(key, to_key, (names, 1)).await;
        }
        Ok(())
    }

    async fn add_link(&self, key: InodeKey, directory: InodeKey) -> Result<(), Fault> {
        let linked = self.change(key, |inode, added: Dot| {
            inode.links.insert(Link { added, directory });
            Ok(())
        });
        match linked.await {
            // Its removal is known, and that of its name not yet.
            Err(Fault { errno: Errno::ESTALE, .. }) => Err(Errno::ENOENT.into()),
            done => done,
        }
    }
}

/// A rename that may be done.
struct Steps<'a> {
    from: (InodeKey, &'a Arc<Version>, &'a Bytes),
    to: (InodeKey, &'a Arc<Version>, &'a Bytes),
    moved: (InodeKey, FileKind),
    target: Option<(InodeKey, FileKind)>,
    is_exchange: bool,
}

impl Steps<'_> {
    /// The entries of a name that still means `key`, or nothing; else [`Errno::EAGAIN`].
    fn still(
        &self,
        inode: &mut Inode,
        name: &[u8],
        key: Option<InodeKey>,
    ) -> Result<Vec<inode::Entry>, Errno> {
        let found = named(inode, name)?;
        match found.as_ref().map(|found| found[0].inode) == key {
            true => Ok(found.unwrap_or_default()),
            false => Err(Errno::EAGAIN),
        }
    }
}
