//! Names: making, linking and removing files.
//!
//! A directory is one inode, so a change of one directory is atomic. Where two inodes change, the order
//! makes sure that a crash in between leaves a name too many or an inode that nothing names, and never
//! a name without its inode:
//!
//! | | first | then |
//! |---|---|---|
//! | making, [creating](super::newborns) | the inode | its name |
//! | linking | the inode's link | the name |
//! | [removing](super::removals) | the name | the link; the inode, if it was the last |
//! | [renaming](super::renames) to another directory | the link to the new one | the new name, then without the old name, then without the old link |

use std::collections::BTreeSet;
use std::sync::Arc;

use atoll_key::kinds::certified::Dot;
use atoll_vfs::{Caller, CreateVerifier, Entry, Errno, FileKind, FileTime, check_name};
use bytes::Bytes;

use super::newborns::Unlinked;
use super::{Freshness, Shared, Version};
use crate::format::MAX_TARGET_BYTES;
use crate::shared::consistency;
use crate::shared::entries::Entries;
use crate::shared::fault::Fault;
use crate::shared::inode::{self, Attributes, Contents, Inode, InodeKey, Link, Written};
use crate::shared::inodes::{Base, Together};
use crate::shared::merged;

const SETGID: u32 = 0o2000;

/// What is made.
pub(super) enum Birth {
    File,
    /// A regular file that its creator recognises by this.
    Exclusive(CreateVerifier),
    /// Anything else.
    Other(Contents),
}

impl Birth {
    fn kind(&self) -> FileKind {
        match self {
            Birth::File | Birth::Exclusive(_) => FileKind::Regular,
            Birth::Other(contents) => contents.kind(),
        }
    }

    /// The contents, as the write `dot` makes them.
    fn contents(&self, dot: Dot, time_ms: u64) -> Contents {
        let written = Written { dot, time_ms };
        match self {
            Birth::File | Birth::Exclusive(_) => {
                Contents::Regular { size_bytes: 0, blocks_512: 0, data: None, written }
            }
            Birth::Other(contents) => contents.clone(),
        }
    }
}

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
pub(super) fn entries(inode: &mut Inode) -> Result<&mut Entries, Errno> {
    match &mut inode.contents {
        Contents::Directory(entries) => Ok(entries),
        _ => Err(Errno::ENOTDIR),
    }
}

/// What `name` stands for in a directory that is being changed.
pub(super) fn named(inode: &mut Inode, name: &[u8]) -> Result<Option<Vec<inode::Entry>>, Errno> {
    Ok(merged::named(entries(inode)?, name))
}

/// Takes names away that [`named`] has found. Other entries of the same names keep those that they are
/// shown by: if one became the plain name, `rm -r` would not find it, and a file saved by a rename would
/// give its name to what it replaces. Returns the inodes of such others: their names are new ones, which need new links
/// ([`Shared::relink_all`]).
pub(super) fn take_away(
    inode: &mut Inode,
    found: &[inode::Entry],
    dot: Dot,
) -> Result<Vec<InodeKey>, Errno> {
    let mut moved_aside = Vec::new();
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
            moved_aside.push(first.inode);
            entries.insert(inode::Entry::new(shown, kept, dot, first.time_ms));
            for entry in &others {
                entries.remove(entry);
            }
        }
    }
    for entry in found {
        entries.remove(entry);
    }
    Ok(moved_aside)
}

/// How many names of `key` a directory has.
pub(super) fn names_of(directory: &Inode, key: InodeKey) -> usize {
    let Contents::Directory(entries) = &directory.contents else { return 0 };
    let names = entries.iter().filter(|entry| entry.inode == key).map(|entry| &entry.name);
    names.collect::<BTreeSet<_>>().len()
}

pub(super) fn modified(inode: &mut Inode, now: FileTime) {
    inode.attributes.mtime = now;
    inode.attributes.ctime = now;
}

/// The attributes of what `caller` makes in a directory.
pub(super) fn new_attributes(
    directory: &Version,
    caller: Caller,
    (kind, mode): (FileKind, u32),
    now: FileTime,
) -> Attributes {
    let above = &directory.inode().attributes;
    let inherits = above.mode & SETGID != 0;
    let inherited = if inherits && kind == FileKind::Directory { SETGID } else { 0 };
    Attributes {
        mode: mode & 0o7777 | inherited,
        uid: caller.uid,
        gid: if inherits { above.gid } else { caller.gid },
        mtime: now,
        ctime: now,
        atime: now,
        xattrs: consistency::inherited(above),
        origin: None,
    }
}

impl Shared {
    pub(super) async fn lookup(
        self: &Arc<Self>,
        parent: u64,
        name: &Bytes,
    ) -> Result<Entry, Fault> {
        check_name(name)?;
        if let Some(newborn) = self.newborn_entry(parent, name)? {
            return Ok(newborn);
        }
        let mut found = self.lookup_within(parent, name, self.names_age()).await;
        // Another mount may have made it, or replaced it, a moment ago: programs rely on finding what a file that
        // they have just read refers to.
        if let Err(Fault { errno: Errno::ENOENT | Errno::ESTALE, .. }) = found
            && !self.options.names_max_age.is_zero()
        {
            found = self.lookup_within(parent, name, Freshness::Newest).await;
        }
        // Its removal is known, and that of the name not yet, or there was none.
        if let Err(Fault { errno: Errno::ESTALE, .. }) = found {
            found = self.lost_entry(parent, name).await;
        }
        match found {
            Err(Fault { errno: Errno::ESTALE, .. }) => Err(Errno::ENOENT.into()),
            found => found,
        }
    }

    async fn lookup_within(
        self: &Arc<Self>,
        parent: u64,
        name: &Bytes,
        freshness: Freshness,
    ) -> Result<Entry, Fault> {
        let (directory_key, directory) = self.directory(parent, freshness).await?;
        let named = directory.entry(name)?.ok_or(Errno::ENOENT)?;
        let key = named.inode;
        self.read_ahead((directory_key, &directory), name, key);
        if named.file_kind() == FileKind::Directory {
            self.check_place(key, directory_key).await?;
        }
        self.show_named_unused(key);
        let found = self.entry(key, self.names_age()).await?;
        self.table().place(&key, directory_key, name);
        Ok(found)
    }

    /// A directory in which names are to be made; [`Errno::ENOENT`] if it has been removed.
    pub(super) async fn living_directory(
        &self,
        number: u64,
    ) -> Result<(InodeKey, Arc<Version>), Fault> {
        if self.table().node(number)?.orphan.is_some() {
            return Err(Errno::ENOENT.into());
        }
        match self.directory(number, Freshness::Newest).await {
            Err(Fault { errno: Errno::ESTALE, .. }) => Err(Errno::ENOENT.into()),
            found => found,
        }
    }

    /// [`Errno::EEXIST`] if the name is taken, also by a file that is not on the ring yet.
    pub(super) fn check_free(
        &self,
        directory_key: InodeKey,
        directory: &Version,
        name: &Bytes,
    ) -> Result<(), Errno> {
        match self.table().newborn(directory_key, name).is_none()
            && directory.entry(name)?.is_none()
        {
            true => Ok(()),
            false => Err(Errno::EEXIST),
        }
    }

    /// Makes a file, and counts one lookup of it.
    pub(super) async fn make(
        self: &Arc<Self>,
        caller: Caller,
        (parent, name): (u64, &Bytes),
        birth: Birth,
        mode: u32,
    ) -> Result<Entry, Fault> {
        check_name(name)?;
        let (directory_key, directory) = self.living_directory(parent).await?;
        self.check_free(directory_key, &directory, name)?;
        let kind = birth.kind();
        let (now, time_ms) = (self.now(), self.env.unix_ms());
        let mut attributes = new_attributes(&directory, caller, (kind, mode), now);
        if let Birth::Exclusive(verifier) = &birth {
            (attributes.atime, attributes.mtime) = verifier.times();
        }
        // Whoever may write the directory may write what is made in it (design §4).
        let groups = directory.block.groups();
        let number = match kind {
            FileKind::Directory => self.number_of_directory(groups),
            _ => self.number_near(directory_key, &directory, groups).await,
        };
        let made = |added: Dot| Inode {
            attributes: attributes.clone(),
            links: BTreeSet::from([Link { added, directory: directory_key }]),
            past: None,
            contents: birth.contents(added, time_ms),
        };
        let add = |key, inode: &mut Inode, dot| {
            let newborn = self.table().newborn(directory_key, name);
            match named(inode, name)? {
                // By an attempt before.
                Some(found) if found.iter().any(|entry| entry.inode == key) => return Ok(()),
                found if found.is_some() || newborn.is_some() => return Err(Errno::EEXIST),
                _ => {}
            }
            let entry = inode::Entry::new(name.clone(), (key, kind), dot, time_ms);
            entries(inode)?.insert(entry);
            modified(inode, now);
            Ok(())
        };
        let create = |number| {
            let above = (directory_key, Base::Version(&directory));
            self.inodes.create_in((groups, number), &made, above, add)
        };
        let mut both = create(number).await?;
        if matches!(both.1, Together::Refused(_)) {
            // With a certificate that is read anew, and under another number: two versions of a writer must not have
            // one height.
            both = create(self.random_number()).await?;
        }
        let (key, version, added) = match both {
            (key, Together::Stored(version, added)) => (key, version, added),
            (_, Together::Neither(fault) | Together::Refused(fault)) => {
                self.note_refused(directory_key, &fault);
                return Err(fault);
            }
        };
        if let Err(fault) = added {
            if fault.errno != Errno::ETIMEDOUT {
                self.drop_unnamed(key, &version).await;
            }
            return Err(fault);
        }
        if kind == FileKind::Directory {
            self.draw_directories(groups);
        }
        let made = self.hold(key, &version);
        self.table().place(&key, directory_key, name);
        Ok(made)
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
        self.name_newborn(number).await?;
        let (key, kind) = {
            let table = self.table();
            let node = table.node(number)?;
            match (node.kind, &node.orphan) {
                (FileKind::Directory, _) => return Err(Errno::EPERM.into()),
                (_, Some(_)) => return Err(Errno::ENOENT.into()),
                _ if self.is_removed_with_lock(number) => return Err(Errno::ENOENT.into()),
                (kind, None) => (node.key, kind),
            }
        };
        let (directory_key, directory) = self.living_directory(parent).await?;
        self.check_free(directory_key, &directory, name)?;
        let (now, time_ms) = (self.now(), self.env.unix_ms());
        let link = self.new_link(key, &(directory_key, name.clone())).await?;
        let added = self.inodes.update(directory_key, Base::Version(&directory), |inode, dot| {
            if named(inode, name)?.is_some() {
                return Err(Errno::EEXIST);
            }
            entries(inode)?.insert(inode::Entry::new(name.clone(), (key, kind), dot, time_ms));
            modified(inode, now);
            Ok(())
        });
        if let Err(fault) = added.await {
            link.undo().await;
            return Err(fault);
        }
        link.keep();
        let attr = self.attr(number).await?;
        self.table().hold(key, kind);
        Ok(super::entry(attr))
    }

    /// Removes a name that is not a directory.
    pub(super) async fn unlink(self: &Arc<Self>, parent: u64, name: &Bytes) -> Result<(), Fault> {
        check_name(name)?;
        match self.unlink_newborn(parent, name).await? {
            Unlinked::Newborn => Ok(()),
            Unlinked::OnRing(key) => self.unlink_named((parent, name), Some(key)).await,
            Unlinked::Other => self.unlink_named((parent, name), None).await,
        }
    }

    /// Removes a name that is on the ring; of a certain file, if `only` says so.
    pub(super) async fn unlink_named(
        self: &Arc<Self>,
        (parent, name): (u64, &Bytes),
        only: Option<InodeKey>,
    ) -> Result<(), Fault> {
        let directory_key = {
            let table = self.table();
            let node = table.node(parent)?;
            match (node.kind, &node.orphan) {
                (FileKind::Directory, None) => node.key,
                (FileKind::Directory, Some(_)) => return Err(Errno::ENOENT.into()),
                _ => return Err(Errno::ENOTDIR.into()),
            }
        };
        let known = self.inodes.known(directory_key);
        let known = known.map(|known| known.entry(name)).transpose()?.flatten();
        let seen = known.map(|entry| (entry.inode, self.seen(entry.inode)));
        if let Some((key, _)) = &seen {
            self.keep_known_conflicts(*key).await?;
        }
        let (now, age) = (self.now(), self.options.names_max_age);
        let removed = self.inodes.update_behind(directory_key, age, |inode, dot| {
            let found = named(inode, name)?.ok_or(Errno::ENOENT)?;
            // Another mount has given the name to another file.
            if only.is_some_and(|only| found[0].inode != only) {
                return Err(Errno::ENOENT);
            }
            if found[0].file_kind() == FileKind::Directory {
                return Err(Errno::EISDIR);
            }
            let moved_aside = take_away(inode, &found, dot)?;
            modified(inode, now);
            Ok((found[0].inode, found.len(), moved_aside))
        });
        let ((key, lost_names, moved_aside), begins) = match removed.await {
            Err(Fault { errno: Errno::ESTALE, .. }) => return Err(Errno::ENOENT.into()),
            removed => removed?,
        };
        if begins {
            self.put_removals_soon(directory_key);
        }
        if !moved_aside.is_empty() {
            // First the names.
            if let Err(fault) = self.inodes.put_behind(directory_key).await {
                self.note(Some(&fault));
            }
            self.relink_all(&moved_aside, directory_key).await;
        }
        let seen = seen.filter(|(seen, _)| *seen == key).map(|(_, seen)| seen);
        let seen = seen.unwrap_or_else(|| self.seen(key));
        self.drop_names_soon(key, (directory_key, name.clone()), lost_names, seen).await;
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
                // Another directory has the name by now; this one had lost it before.
                return Err(Errno::ENOENT);
            }
            let moved_aside = take_away(inode, &found, dot)?;
            modified(inode, now);
            Ok((found, moved_aside))
        });
        let ((found, moved_aside), _) = removed.await?;
        self.relink_all(&moved_aside, directory_key).await;
        self.remove_directory(directory_key, &found[0], found.len()).await
    }
}
