//! Contents of one file that were written at the same time (Pastis §3.1 keeps the ones with the later
//! time and loses the others).
//!
//! A file shows one of them. **What a caller has not seen is never covered by what he does**: before a version, or a
//! removal, covers other contents, each of these becomes a file of its own beside the first, `NAME~USER~TIME`
//! ([`Shared::keep_unseen`], the one place where that is decided). The new inode's number follows from the contents'
//! dot, so that mounts which do it at the same time make one file and not two.
//!
//! | a caller who | has seen | contents that are shown and that he has not seen |
//! |---|---|---|
//! | opens the file, or changes its attributes | what the file shows | |
//! | writes contents | those that he opened, or read or locked through that open since ([`Table::overwritten`]) | become a file too, unless he appends to them |
//! | removes its last name, or gives that to another file | what his mount showed when he asked ([`Seen`]) | keep the inode, which gets the name `NAME~USER~TIME` ([`lost`](super::lost)) |
//! | has removed it, as the ring says | what the context of the removal includes | the same |
//!
//! [`Table::overwritten`]: crate::shared::table::Table::overwritten

use std::collections::BTreeSet;
use std::sync::Arc;

use atoll_key::kinds::certified::{Dot, Sibling};
use atoll_vfs::Errno;
use bytes::Bytes;

use super::lost::Path;
use super::{Freshness, ROOT, Shared, Version};
use crate::shared::fault::Fault;
use crate::shared::inode::{self, Contents, Inode, InodeKey, Link, Written};
use crate::shared::inodes::Base;
use crate::shared::merged::{self, Conflict, Merged};
use crate::shared::standing::{Standing, Trusted};

/// How often a file is read again that others write meanwhile.
const MAX_ROUNDS: usize = 8;

/// What covers contents of a file.
pub(super) enum Change<'a> {
    /// An open, or a change of something else.
    Open,
    /// New contents in the place of these.
    Write(&'a Version),
    /// The removal of its last name.
    Removal(&'a mut Seen),
    /// Removals that the ring has.
    Removed,
}

/// What a mount knew of an inode when a program removed one of its names.
pub(super) struct Seen {
    version: Option<Arc<Version>>,
    was_offline: bool,
    /// Milliseconds since 1970.
    at_ms: u64,
    /// Contents that the removal does not count for: when it is tried again they may stand alone.
    unseen: BTreeSet<Dot>,
    /// Whether the file was locked here: those who have it open elsewhere read its last contents when they lock it.
    pub(super) was_locked: bool,
}

/// A file whose contents beside those that it shows are files of their own, or need not be kept.
pub(super) struct Kept {
    pub(super) version: Arc<Version>,
    /// Whether the caller has not seen what it shows.
    pub(super) shows_unseen: bool,
}

impl Seen {
    /// Whether the removal counts for one of the contents of a file.
    fn covers(&self, newest: &Version, one: &Conflict, is_own: bool) -> bool {
        let Conflict { dot, time_ms, inode: Inode { contents, .. } } = one;
        if self.unseen.contains(dot) {
            return false;
        }
        let shown = self.version.as_ref().map(|known| &known.inode().contents);
        let is_shown = |contents: &Contents| shown.is_some_and(|shown| contents.is_same(shown));
        if is_shown(contents) {
            return true;
        }
        let is_beside =
            |version: &Version| version.merged.conflicts.iter().any(|it| it.dot == *dot);
        if self.version.as_ref().is_some_and(|known| is_beside(known)) || is_beside(newest) {
            return false;
        }
        // These lead. If what was shown stands beside them, they were written at the same time.
        if newest.merged.conflicts.iter().any(|beside| is_shown(&beside.inode.contents)) {
            return false;
        }
        let is_known = self.version.as_ref().map(|version| {
            let nobody = Trusted::new();
            let standing = Standing::of(&version.block, &nobody);
            // The context of a late one can claim anything.
            let saw = |one: &Sibling| !standing.is_late(one) && one.context.includes(dot);
            version.block.siblings().iter().any(|one| one.dot == *dot || saw(one))
        });
        match is_known {
            _ if is_own => true,
            Some(false) if self.was_offline => false,
            Some(true) => true,
            _ => *time_ms <= self.at_ms,
        }
    }
}

impl Shared {
    /// What this mount knows of an inode of which a program removes a name now.
    pub(super) fn seen(&self, key: InodeKey) -> Seen {
        let (version, was_offline) = (self.inodes.known(key), self.spool.is_offline());
        let (at_ms, unseen) = (self.env.unix_ms(), BTreeSet::new());
        Seen { version, was_offline, at_ms, unseen, was_locked: false }
    }

    /// Makes files of all contents but those that are shown, and covers them. With `based`, of all
    /// contents that differ from those, the shown ones included: something newer takes their place.
    /// Returns a version that has no contents beside those that are shown.
    pub(super) async fn keep_conflicts(
        &self,
        key: InodeKey,
        based: Option<&Arc<Version>>,
    ) -> Result<Arc<Version>, Fault> {
        let newest = self.inodes.read(key, Freshness::Newest).await?;
        let change = based.map_or(Change::Open, |based| Change::Write(based));
        Ok(self.keep_unseen(key, newest, change, &Path::new()).await?.version)
    }

    /// Makes files of contents that are known to stand beside those which a file shows, before a program takes its name
    /// away: a mount that dies after that loses nothing of them.
    pub(super) async fn keep_known_conflicts(&self, key: InodeKey) -> Result<(), Fault> {
        if self.inodes.known(key).is_none_or(|known| known.merged.conflicts.is_empty()) {
            return Ok(());
        }
        match self.keep_conflicts(key, None).await {
            // It has been removed, or has no name any more: who removes the inode keeps them.
            Err(fault) if fault.errno == Errno::ESTALE || fault.is_conflict => Ok(()),
            kept => kept.map(drop),
        }
    }

    /// Makes files of those contents that a caller has not seen, before `change` covers them, and covers what stands
    /// beside the contents that are shown. `newest` was just read. Files get their names where the inode has some, else
    /// in the first directory of `path` that is there.
    pub(super) async fn keep_unseen(
        &self,
        key: InodeKey,
        mut newest: Arc<Version>,
        mut change: Change<'_>,
        path: &Path,
    ) -> Result<Kept, Fault> {
        let mut kept = BTreeSet::new();
        for _ in 0..MAX_ROUNDS {
            let Merged { conflicts, .. } = &newest.merged;
            let is_unseen = |one: &Conflict| !self.has_seen(&change, &newest, key, one);
            let beside = conflicts.iter().filter(|one| is_unseen(one));
            let mut unseen: Vec<Conflict> = beside.cloned().collect();
            let leading = shown(&newest).filter(is_unseen);
            let shows_unseen = leading.is_some();
            if let Change::Removal(seen) = &mut change {
                seen.unseen.extend(unseen.iter().chain(&leading).map(|one| one.dot));
            }
            unseen.extend(leading.filter(|_| matches!(change, Change::Write(_))));
            unseen.retain(|one| !kept.contains(&one.dot));
            if unseen.is_empty() {
                if conflicts.is_empty() {
                    return Ok(Kept { version: newest, shows_unseen });
                }
                match self.inodes.cover(key, &newest).await {
                    Ok(version) => return Ok(Kept { version, shows_unseen }),
                    // There are others by now.
                    Err(fault) if fault.is_conflict => {}
                    Err(fault) => return Err(fault),
                }
            }
            for one in unseen {
                self.keep_beside(key, &newest, &one, path).await?;
                kept.insert(one.dot);
            }
            newest = self.inodes.read(key, Freshness::Newest).await?;
        }
        Err(Fault::conflict())
    }

    /// Whether the caller has seen some contents of `newest`, the shown ones or others.
    fn has_seen(
        &self,
        change: &Change<'_>,
        newest: &Version,
        key: InodeKey,
        one: &Conflict,
    ) -> bool {
        let is_own = self.inodes.is_own(key, &one.dot);
        match change {
            Change::Open => one.inode.contents.is_same(&newest.inode().contents),
            // The new contents take the place of what they are based on, and of earlier attempts to
            // write them: what this mount has signed since.
            Change::Write(based) => {
                let is_attempt = is_own && one.dot.height > based.block.height();
                is_attempt || one.inode.contents.is_same(&based.inode().contents)
            }
            Change::Removal(seen) => seen.covers(newest, one, is_own),
            Change::Removed => {
                let standing = self.inodes.standing(&newest.block);
                let removals = newest.block.siblings().iter().filter(|one| one.is_removal);
                let mut removals = removals.filter(|removal| !standing.is_late(removal));
                removals.any(|removal| removal.context.includes(&one.dot))
            }
        }
    }

    /// Makes a file of contents that were written at the same time, in a directory that names the inode, or the first
    /// of `path` that is there.
    async fn keep_beside(
        &self,
        key: InodeKey,
        newest: &Version,
        conflict: &Conflict,
        path: &Path,
    ) -> Result<(), Fault> {
        let naming: BTreeSet<InodeKey> =
            newest.inode().links.iter().map(|link| link.directory).collect();
        // One name is enough to find it.
        let mut places: Vec<(InodeKey, Option<Bytes>)> =
            naming.into_iter().map(|directory| (directory, None)).collect();
        if let Some((_, name)) = path.first() {
            let root = self.table().node(ROOT)?.key;
            let above = path.iter().map(|(directory, _)| *directory).chain([root]);
            places.extend(above.map(|directory| (directory, Some(name.clone()))));
        }
        let mut refused = None;
        for (directory, name) in places {
            match self.keep_in(directory, name, (key, newest), conflict).await {
                Ok(true) => return Ok(()),
                Ok(false) | Err(Fault { errno: Errno::ESTALE, .. }) => {}
                Err(fault @ Fault { errno: Errno::EACCES | Errno::EROFS, .. }) => {
                    refused = Some(fault);
                }
                Err(fault) => return Err(fault),
            }
        }
        Err(refused.unwrap_or_else(Fault::conflict))
    }

    /// The same in one directory, beside the name that it has of the inode, else beside `name`; false if there is none.
    async fn keep_in(
        &self,
        directory_key: InodeKey,
        name: Option<Bytes>,
        (key, newest): (InodeKey, &Version),
        Conflict { dot, time_ms, inode }: &Conflict,
    ) -> Result<bool, Fault> {
        let directory = self.inodes.read(directory_key, Freshness::Newest).await?;
        let Contents::Directory(entries) = &directory.inode().contents else { return Ok(false) };
        let first = entries.iter().find(|entry| entry.inode == key);
        let Some(name) = first.map(|first| first.name.clone()).or(name) else { return Ok(false) };
        let name = merged::conflict_name(&name, dot, *time_ms, 1);
        self.check_may_write(&directory).await?;
        let number = inode::conflict_number(&key, dot);
        let kept_key = self.keeping_inode(newest, number, directory_key, inode).await?;
        let (kind, time_ms) = (inode.contents.kind(), *time_ms);
        let named = self.inodes.update(directory_key, Base::Version(&directory), |above, dot| {
            let Contents::Directory(entries) = &mut above.contents else {
                return Err(Errno::ENOTDIR);
            };
            if entries.iter().all(|entry| entry.inode != kept_key) {
                let entry = inode::Entry::new(name.clone(), (kept_key, kind), dot, time_ms);
                entries.insert(entry);
            }
            Ok(())
        });
        named.await?;
        self.count_links(kept_key, directory_key).await;
        tracing::info!(
            "contents written at the same time are kept as {}",
            String::from_utf8_lossy(&name)
        );
        Ok(true)
    }

    /// The inode of contents that were written at the same time, with a link to `directory`. It may be there: an attempt
    /// before could not name it.
    async fn keeping_inode(
        &self,
        newest: &Version,
        number: [u8; 16],
        directory: InodeKey,
        contents: &Inode,
    ) -> Result<InodeKey, Fault> {
        let groups = newest.block.groups();
        let key = InodeKey::of(&self.inodes.block_of(groups, number).ok_or(Errno::EIO)?.key);
        let Some(made) = self.inodes.known(key) else {
            let made = self.inodes.create(groups, number, |added| Inode {
                links: BTreeSet::from([Link { added, directory }]),
                past: None,
                ..contents.clone()
            });
            made.await?;
            return Ok(key);
        };
        if made.inode().links.iter().all(|link| link.directory != directory) {
            let linked = self.inodes.update(key, Base::Newest, |inode, added| {
                inode.links = BTreeSet::from([Link { added, directory }]);
                Ok(())
            });
            linked.await?;
        }
        Ok(key)
    }
}

/// The contents that a file shows; none of a directory.
fn shown(version: &Version) -> Option<Conflict> {
    let inode = version.inode();
    let Contents::Regular { written: Written { dot, time_ms }, .. } = inode.contents else {
        return None;
    };
    Some(Conflict { dot, time_ms, inode: inode.clone() })
}
