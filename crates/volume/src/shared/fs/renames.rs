//! Renaming files.
//!
//! A directory changes its parent while its mount holds the lock lease of the volume's directory moves, and is checked
//! against what was moved before it, as a kernel does within one mutex of the file system (`s_vfs_rename_mutex` of Linux).
//! Otherwise two mounts could move two directories into each other, and nobody would find them again.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use atoll_key::kinds::certified::Dot;
use atoll_vfs::{Errno, FileKind, RenameFlags, check_name};
use bytes::Bytes;
use futures_util::future::join_all;

use super::lost::links_to;
use super::names::{entries, modified, named, names_of, take_away};
use super::removals::{Lost, NewLink};
use super::{Freshness, Shared, Version};
use crate::shared::fault::Fault;
use crate::shared::inode::{self, Inode, InodeKey, Link};
use crate::shared::inodes::Base;

/// How often a call is made again whose names were changed meanwhile by others on this mount.
const MAX_RACES: usize = 16;

/// Directories above one, at most.
const MAX_DEPTH: usize = 4096;

impl Shared {
    /// Renames, as `renameat2(2)`.
    pub(super) async fn rename(
        self: &Arc<Self>,
        (parent, name): (u64, &Bytes),
        (new_parent, new_name): (u64, &Bytes),
        flags: RenameFlags,
    ) -> Result<(), Fault> {
        if flags.exchange && flags.no_replace {
            return Err(Errno::EINVAL.into());
        }
        check_name(name)?;
        check_name(new_name)?;
        self.name_newborn_at(parent, name).await?;
        self.name_newborn_at(new_parent, new_name).await?;
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
        self: &Arc<Self>,
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
        match &target {
            None if flags.exchange => return Err(Errno::ENOENT.into()),
            Some(_) if flags.no_replace => return Err(Errno::EEXIST.into()),
            Some(target) if target.inode == key => return Ok(()),
            Some(_) if flags.exchange => {}
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
        let replaced = target.as_ref().filter(|_| !flags.exchange);
        let replaced = replaced.map(|target| (target, self.seen(target.inode)));
        if let Some((target, _)) = &replaced {
            self.keep_known_conflicts(target.inode).await?;
        }
        let other = target.as_ref().filter(|_| flags.exchange).map(|target| target.inode);
        let steps = Steps {
            from: (from_key, &from, name),
            to: (to_key, &to, new_name),
            moved: (key, kind),
            target: target.as_ref().map(|target| (target.inode, target.file_kind())),
            is_exchange: flags.exchange,
        };
        let other_kind = steps.target.filter(|_| steps.is_exchange).map(|(_, kind)| kind);
        if from_key == to_key {
            let renamed = join_all([Some(key), other].into_iter().flatten().map(async |key| {
                (key, self.inodes.read(key, Freshness::Within(Duration::MAX)).await.ok())
            }));
            let renamed = renamed.await;
            let moved_aside = self.rename_within(&steps).await?;
            let relinked = renamed.iter().map(|(key, before)| self.relink(*key, before, to_key));
            join_all(relinked).await;
            self.relink_all(&moved_aside, to_key).await;
        } else if [Some(kind), other_kind].contains(&Some(FileKind::Directory)) {
            self.while_no_directory_moves(self.move_directory(&steps)).await?;
        } else {
            self.rename_across(&steps).await?;
        }
        self.note_renamed(key, (to_key, new_name));
        if let Some(other) = other {
            self.note_renamed(other, (from_key, name));
        }
        self.table().place(&key, to_key, new_name);
        if let Some((target, seen)) = replaced {
            self.replaced(target, to_key, seen).await;
        }
        Ok(())
    }

    /// Moves a directory to another one, or exchanges it with something there, while nobody else moves one.
    async fn move_directory(&self, steps: &Steps<'_>) -> Result<(), Fault> {
        let ((from, _, name), (to, ..)) = (steps.from, steps.to);
        // Another mount may have moved it until now.
        let above = self.inodes.read(from, Freshness::Latest).await?;
        if above.entry(name)?.is_none_or(|entry| entry.inode != steps.moved.0) {
            return Err(Errno::EAGAIN.into());
        }
        self.check_no_circle(steps.moved.0, to).await?;
        if let Some((target, FileKind::Directory)) = steps.target.filter(|_| steps.is_exchange) {
            self.check_no_circle(target, from).await?;
        }
        self.rename_across(steps).await
    }

    /// A directory does not move into itself or below itself. A directory has two above it if a mount died while it
    /// moved it.
    async fn check_no_circle(&self, key: InodeKey, into: InodeKey) -> Result<(), Fault> {
        let (mut next, mut seen) = (vec![into], BTreeSet::new());
        while let Some(above) = next.pop() {
            if above == key {
                return Err(Errno::EINVAL.into());
            }
            if !seen.insert(above) {
                continue;
            }
            if seen.len() > MAX_DEPTH {
                return Err(Errno::ELOOP.into());
            }
            match self.inodes.read(above, Freshness::Latest).await {
                Ok(version) => next.extend(version.inode().links.iter().map(|l| l.directory)),
                // Nothing leads through it any more.
                Err(Fault { errno: Errno::ESTALE, .. }) => {}
                Err(fault) => return Err(fault),
            }
        }
        Ok(())
    }

    /// The other inodes whose names are written anew.
    async fn rename_within(&self, steps: &Steps<'_>) -> Result<Vec<InodeKey>, Fault> {
        let (directory, base, name) = steps.from;
        let (_, _, new_name) = steps.to;
        let (now, time_ms) = (self.now(), self.env.unix_ms());
        let renamed = self.inodes.update(directory, Base::Version(base), |inode, dot| {
            let moved = steps.still(inode, name, Some(steps.moved.0))?;
            let target = steps.still(inode, new_name, steps.target.map(|(key, _)| key))?;
            let moved_aside = take_away(inode, &[moved, target].concat(), dot)?;
            let new = inode::Entry::new(new_name.clone(), steps.moved, dot, time_ms);
            entries(inode)?.insert(new);
            if let (true, Some(target)) = (steps.is_exchange, steps.target) {
                entries(inode)?.insert(inode::Entry::new(name.clone(), target, dot, time_ms));
            }
            modified(inode, now);
            Ok(moved_aside)
        });
        Ok(renamed.await?.0)
    }

    /// Renames to another directory: nothing is left of it if it fails, at the latest when the ring is within reach again.
    async fn rename_across(&self, steps: &Steps<'_>) -> Result<(), Fault> {
        let (from_key, from, name) = steps.from;
        let (to_key, to, new_name) = steps.to;
        for directory in [from, to] {
            self.check_may_write(directory).await?;
        }
        let (old, new) = ((from_key, name.clone()), (to_key, new_name.clone()));
        let exchanged = steps.target.filter(|_| steps.is_exchange);
        let mut links = vec![self.new_link(steps.moved.0, &new).await?];
        if let Some((key, _)) = exchanged {
            match self.new_link(key, &old).await {
                Ok(link) => links.push(link),
                Err(fault) => return Err(undone(links, fault).await),
            }
        }
        let lost_names = match self.rename_linked(steps).await {
            Ok(lost_names) => lost_names,
            Err(fault) => return Err(undone(links, fault).await),
        };
        links.into_iter().for_each(NewLink::keep);
        self.drop_links(steps.moved.0, old, Lost::Names(lost_names)).await;
        if let Some((key, _)) = exchanged {
            self.drop_links(key, new, Lost::Names(1)).await;
        }
        Ok(())
    }

    /// Renames what has links to both directories; how many names of it the first one has lost.
    async fn rename_linked(&self, steps: &Steps<'_>) -> Result<usize, Fault> {
        let (from_key, from, name) = steps.from;
        let (to_key, to, new_name) = steps.to;
        let (now, time_ms) = (self.now(), self.env.unix_ms());
        let exchanged = steps.target.filter(|_| steps.is_exchange);
        let mut renamed = HalfRenamed { shared: self, done: Vec::new() };
        let mut moved_aside = [Vec::new(), Vec::new()];
        let named_new = self.inodes.update(to_key, Base::Version(to), |inode, dot| {
            let target = steps.still(inode, new_name, steps.target.map(|(key, _)| key))?;
            moved_aside[0] = take_away(inode, &target, dot)?;
            let new = inode::Entry::new(new_name.clone(), steps.moved, dot, time_ms);
            entries(inode)?.insert(new);
            modified(inode, now);
            let (given, taken) = (Some((new_name.clone(), steps.moved.0)), target.first().cloned());
            renamed.done = vec![Renamed { directory: to_key, given, taken }];
            Ok(())
        });
        if let Err(fault) = named_new.await {
            renamed.undo().await;
            return Err(fault);
        }
        let unnamed = self.inodes.update(from_key, Base::Version(from), |inode, dot| {
            // Gone if somebody else has removed it meanwhile: then it is at its new name alone.
            let found = named(inode, name)?.unwrap_or_default();
            let moved: Vec<_> =
                found.into_iter().filter(|entry| entry.inode == steps.moved.0).collect();
            moved_aside[1] = take_away(inode, &moved, dot)?;
            if let Some(target) = exchanged {
                entries(inode)?.insert(inode::Entry::new(name.clone(), target, dot, time_ms));
            }
            modified(inode, now);
            let given = exchanged.map(|(key, _)| (name.clone(), key));
            renamed.done.truncate(1);
            renamed.done.push(Renamed {
                directory: from_key,
                given,
                taken: moved.first().cloned(),
            });
            Ok(moved.len())
        });
        let lost_names = match unnamed.await {
            Ok((lost_names, _)) => lost_names,
            // Another mount has removed the directory with its names.
            Err(Fault { errno: Errno::ESTALE, .. }) if exchanged.is_none() => 1,
            Err(fault) => {
                renamed.undo().await;
                return Err(fault);
            }
        };
        renamed.done.clear();
        for (moved_aside, directory) in moved_aside.iter().zip([to_key, from_key]) {
            self.relink_all(moved_aside, directory).await;
        }
        Ok(lost_names)
    }

    /// Gives an inode whose name in a directory was written anew a new link to it in the place of one that it had, and the time
    /// of that, as ext4 does, when the directory has the name. Another mount that moves or removes the file at the same time
    /// has either found that name, or has not seen this change: then the new link stays when the former one goes, and the file
    /// with it. Which place of a directory counts is said by its links, so it keeps those that it has
    /// ([`places`](super::places)). The inode stays as it was `before` if it was removed already and the directory names it.
    async fn relink(&self, key: InodeKey, before: &Option<Arc<Version>>, directory: InodeKey) {
        let now = self.now();
        let above = self.inodes.known(directory);
        let names = above.map_or(0, |above| names_of(above.inode(), key));
        let relinked = self.change(key, |inode, added| {
            inode.attributes.ctime = now;
            if inode.contents.kind() != FileKind::Directory {
                let former = inode.links.iter().find(|link| link.directory == directory).copied();
                // If it is that of a name which another mount has given it, it stays.
                if let Some(former) = former.filter(|_| links_to(inode, directory) >= names) {
                    inode.links.remove(&former);
                }
                inode.links.insert(Link { added, directory });
            }
            Ok(())
        });
        let relinked = match (relinked.await, before) {
            (Err(Fault { errno: Errno::ESTALE, .. }), Some(before)) => {
                self.restore_renamed(key, before, directory).await
            }
            (relinked, _) => relinked,
        };
        if let Err(fault) = relinked {
            tracing::debug!("a renamed file has its old time: {fault:?}");
        }
    }

    /// The same of inodes that [`take_away`] gave other names.
    pub(super) async fn relink_all(&self, inodes: &[InodeKey], directory: InodeKey) {
        join_all(inodes.iter().map(|key| self.relink(*key, &None, directory))).await;
    }

    pub(super) async fn add_link(&self, key: InodeKey, directory: InodeKey) -> Result<(), Fault> {
        let now = self.now();
        let linked = self.change(key, |inode, added: Dot| {
            inode.links.insert(Link { added, directory });
            inode.attributes.ctime = now;
            Ok(())
        });
        match linked.await {
            // Its removal is known, and that of its name not yet.
            Err(Fault { errno: Errno::ESTALE, .. }) => Err(Errno::ENOENT.into()),
            done => done,
        }
    }
}

/// Takes back the links of a rename that has failed.
async fn undone(links: Vec<NewLink<'_>>, fault: Fault) -> Fault {
    for link in links {
        link.undo().await;
    }
    fault
}

/// The names of a rename between two directories that are changed. If the call is given up, the file has both names, and
/// what it has replaced gets a name again.
struct HalfRenamed<'a> {
    shared: &'a Shared,
    done: Vec<Renamed>,
}

/// What a rename has changed in one directory.
struct Renamed {
    directory: InodeKey,
    given: Option<(Bytes, InodeKey)>,
    taken: Option<inode::Entry>,
}

impl HalfRenamed<'_> {
    /// Gives the names back: here at once, on the ring as soon as it is within reach. What was signed and not acknowledged
    /// would come there with the next change.
    async fn undo(mut self) {
        let inodes = &self.shared.inodes;
        while let Some(Renamed { directory, given, taken }) = self.done.pop() {
            let mut moved_aside = Vec::new();
            let undone = inodes.update_behind(directory, Duration::MAX, |inode, dot| {
                if let Some((name, key)) = &given {
                    let found = named(inode, name)?.unwrap_or_default();
                    let given: Vec<_> =
                        found.into_iter().filter(|entry| entry.inode == *key).collect();
                    moved_aside = take_away(inode, &given, dot)?;
                }
                let entries = entries(inode)?;
                if let Some(taken) = &taken
                    && entries.iter().all(|entry| entry.inode != taken.inode)
                {
                    entries.insert(inode::Entry { added: dot, ..taken.clone() });
                }
                Ok(())
            });
            let put = match undone.await {
                Ok(_) => inodes.put_behind(directory).await,
                Err(fault) => Err(fault),
            };
            // It is tried again with names that were removed.
            match put {
                Ok(()) => {
                    moved_aside.extend(taken.iter().map(|taken| taken.inode));
                    self.shared.relink_all(&moved_aside, directory).await;
                }
                Err(fault) => {
                    tracing::debug!("a rename that has failed is not undone yet: {fault:?}");
                }
            }
        }
    }
}

impl Drop for HalfRenamed<'_> {
    fn drop(&mut self) {
        for Renamed { directory, taken, .. } in self.done.drain(..) {
            taken.into_iter().for_each(|taken| self.shared.watch_removed(directory, taken));
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
