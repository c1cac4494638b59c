//! Names whose inode has been removed, and files whose name has been removed while somebody wrote them.
//!
//! **A name without an inode** comes about if a mount dies, or if a change of a directory that was refused is put
//! with the next one. It is shown as a file without links, so that it can be removed; opening it fails with `ESTALE`.
//!
//! **A file without a name.** A removal of an inode does not count if somebody wrote the file at the same time. Its
//! name is gone all the same. The mount that has written, and the one that has removed, look a moment later at
//! what the ring has of the inode: if the removal's writer had not seen the contents, the file gets the name
//! `NAME~USER~TIME`, as contents have that were written at the same time; if it had, the removal is written
//! again. If a mount wrote the file after the removal, and before the ring knew of that, the remover takes the link from the
//! inode and leaves the inode itself ([`removals`](super::removals)). Nodes that have taken a write, and nothing beside it,
//! promise to tell of changes, so this look costs no call to other nodes in most cases.
//!
//! **What has waited in the spool** is looked at in the same way when the ring has it, and directories with it: a directory
//! that others have removed meanwhile, and in which something was made here, gets its own name back. What has another
//! name by now, since it was renamed while another mount removed it, gets its link back.
//!
//! **A file or directory that is renamed while another mount removes it** stays. The renamer changes the inode when its
//! directory has the new name, and the remover reads the inode before the directory: the removal has found that name, or does not cover
//! that change, which is a link in the place of the former one ([`renames`](super::renames)). A renamer that comes after the removal writes the inode as it was.
//!
//! **Links of a file that several mounts rename at once** may be one more than its names in a directory, or one less. Each renamer
//! compares them a moment later.
//!
//! The name goes into the directory where the file was, or the nearest one above that is there; if this mount does not know what
//! was above, into the root directory.
//!
//! Not covered: a partition that lasts longer than the look takes, and a mount that ends before it.

use std::collections::BTreeMap;
use std::sync::{Arc, MutexGuard};

use atoll_vfs::{Entry, Errno, FileKind};
use bytes::Bytes;
use futures_util::future::join_all;

use super::conflicts::{Change, Kept};
use super::names::{entries, names_of};
use super::{Freshness, ROOT, Shared, Version, entry};
use crate::shared::fault::Fault;
use crate::shared::inode::{self, Contents, Inode, InodeKey, Link, Written};
use crate::shared::inodes::{Base, Brought};
use crate::shared::merged;
use crate::shared::table::attr_of_lost;

/// The directories that lead to an inode, the nearest first, with the names in them ([`Table::path_to`]).
///
/// [`Table::path_to`]: crate::shared::table::Table::path_to
pub(super) type Path = Vec<(InodeKey, Bytes)>;

/// An inode that is looked at.
pub(super) struct Look {
    path: Path,
    /// Whether it was found without a name and could not be given one: a link may be there alone.
    has_failed: bool,
    /// Whether it was renamed: others may have renamed it at the same time, and then it has not as many links as names.
    is_renamed: bool,
    /// Whether it had more links than names at the look before. A name that is being made gets its link first.
    had_surplus: bool,
}

/// Inodes that are looked at.
pub(super) type Looks = BTreeMap<InodeKey, Look>;

impl Look {
    fn new(path: Path) -> Look {
        Look { path, has_failed: false, is_renamed: false, had_surplus: false }
    }
}

/// How often the links of an inode are counted again that were wrong.
const MAX_COUNTS: usize = 4;

/// The names that files and directories get of which this mount does not know any.
const UNKNOWN_FILE: &[u8] = b"file";
const UNKNOWN_DIRECTORY: &[u8] = b"directory";

impl Shared {
    /// The entry of a name that the newest version of its directory has, whether or not its inode has been removed,
    /// counted as one lookup.
    pub(super) async fn lost_entry(&self, parent: u64, name: &[u8]) -> Result<Entry, Fault> {
        let (_, directory) = self.directory(parent, Freshness::Latest).await?;
        let found = directory.entry(name)?.ok_or(Errno::ENOENT)?;
        match self.entry(found.inode, Freshness::Latest).await {
            Err(Fault { errno: Errno::ESTALE, .. }) => {}
            living => return living,
        }
        let mut table = self.table();
        let number = table.hold(found.inode, found.file_kind());
        table.node_mut(number)?.is_lost = true;
        Ok(entry(attr_of_lost(number, found.file_kind())))
    }

    /// A file was written: it is looked at a moment later.
    pub(super) fn note_written(&self, number: u64) {
        let place = {
            let table = self.table();
            let node = table.node(number).ok();
            node.and_then(|node| Some((node.key, node.place.clone()?)))
                .map(|(key, (directory, name))| (key, table.path_to(directory, name)))
        };
        if let Some((key, path)) = place {
            let mut looks = self.written();
            let is_renamed = looks.get(&key).is_some_and(|look| look.is_renamed);
            looks.insert(key, Look { is_renamed, ..Look::new(path) });
        }
    }

    /// A file has another name: it is looked at a moment later.
    pub(super) fn note_renamed(&self, key: InodeKey, (directory, name): (InodeKey, &Bytes)) {
        let path = self.table().path_to(directory, name.clone());
        self.written().insert(key, Look { is_renamed: true, ..Look::new(path) });
    }

    /// Makes an inode again as it was `before` another mount removed it, if the directory names it.
    pub(super) async fn restore_renamed(
        &self,
        key: InodeKey,
        before: &Arc<Version>,
        directory: InodeKey,
    ) -> Result<(), Fault> {
        let above = self.inodes.read(directory, Freshness::Newest).await?;
        if names_of(above.inode(), key) == 0 {
            return Ok(());
        }
        let now = self.now();
        let restored = self.inodes.update(key, Base::Version(before), |inode, added| {
            inode.links.insert(Link { added, directory });
            inode.attributes.ctime = now;
            Ok(())
        });
        restored.await?;
        self.show_named(key);
        Ok(())
    }

    fn written(&self) -> MutexGuard<'_, Looks> {
        self.written.lock().expect("no holder of this lock panics")
    }

    /// What has waited in the spool is on the ring: it is looked at.
    pub(super) fn note_brought(&self) {
        for Brought { key, kind, directories } in self.inodes.take_brought() {
            let table = self.table();
            let node = table.number_of(&key).and_then(|number| table.node(number).ok());
            let place = node.and_then(|node| node.place.clone());
            let unknown = || match kind {
                FileKind::Directory => Bytes::from_static(UNKNOWN_DIRECTORY),
                _ => Bytes::from_static(UNKNOWN_FILE),
            };
            let place = place.or_else(|| Some((*directories.first()?, unknown())));
            // The root directory is in none.
            let Some((directory, name)) = place else { continue };
            let path = table.path_to(directory, name);
            self.written().entry(key).or_insert_with(|| Look::new(path));
        }
    }

    /// Looks at what was written since.
    pub(super) async fn check_written(&self) {
        if self.spool.is_offline() {
            return;
        }
        let written = std::mem::take(&mut *self.written());
        let checks = written.into_iter().map(|(key, look)| self.check(key, look));
        join_all(checks).await;
    }

    /// Names an inode again if it was removed by somebody who had not seen what is in it.
    pub(super) async fn check_named(&self, key: InodeKey, path: Path) {
        self.check(key, Look::new(path)).await;
    }

    async fn check(&self, key: InodeKey, look: Look) {
        match self.name_again(key, &look).await {
            Ok(()) | Err(Fault { errno: Errno::ESTALE, .. }) => {}
            Err(fault)
                if fault.is_conflict
                    || matches!(fault.errno, Errno::ETIMEDOUT | Errno::ENOSPC | Errno::EDQUOT) =>
            {
                tracing::debug!("a file may have no name, and is looked at again: {fault:?}");
                self.written().entry(key).or_insert(look).has_failed = true;
            }
            Err(fault) => tracing::warn!("a file may have no name: {fault:?}"),
        }
    }

    async fn name_again(
        &self,
        key: InodeKey,
        look @ Look { path, has_failed, .. }: &Look,
    ) -> Result<(), Fault> {
        let version = self.inodes.read(key, Freshness::Newest).await?;
        let has_link = !version.inode().links.is_empty();
        if has_link && (!has_failed || self.is_named(key, &version).await?) {
            return self.compare_links(key, &version, look).await;
        }
        // It was renamed at the same time.
        let (directory, name) = path.first().ok_or(Errno::ESTALE)?;
        let above = self.inodes.read(*directory, Freshness::Newest).await;
        if above.is_ok_and(|above| names_of(above.inode(), key) > 0) {
            self.keep_unseen(key, version, Change::Open, path).await?;
            self.link_alone(key, *directory).await?;
            self.show_named(key);
            self.count_links(key, *directory).await;
            return Ok(());
        }
        let Kept { version, shows_unseen } =
            self.keep_unseen(key, version, Change::Removed, path).await?;
        let kept = match &version.inode().contents {
            Contents::Regular { written: Written { dot, time_ms }, .. } => {
                shows_unseen.then_some((*dot, *time_ms))
            }
            Contents::Directory(entries) if !entries.is_empty() => {
                let mut siblings =
                    self.inodes.standing(&version.block).leading_first(&version.block);
                siblings.find(|one| !one.is_removal).map(|one| (one.dot, one.time_ms))
            }
            _ => None,
        };
        let Some(written) = kept else {
            return self.remove_again(key, &version).await;
        };
        let kind = version.inode().contents.kind();
        let root = self.table().node(ROOT)?.key;
        let above = path.iter().map(|(directory, _)| *directory).chain([root]);
        let mut refused = None;
        for (at, into) in above.enumerate() {
            // A directory gets the name back that its own one had for it, so all mounts give it the same.
            let is_its_own = at == 0 && kind == FileKind::Directory && *name != UNKNOWN_DIRECTORY;
            let name = match is_its_own {
                true => name.clone(),
                false => merged::conflict_name(name, &written.0, written.1, 1),
            };
            match self.name_in(into, (key, kind), &name, written.1).await {
                Ok(()) => {}
                Err(Fault { errno: Errno::ESTALE, .. }) => continue,
                // Whoever may write the inode need not be one who may write what is above it.
                Err(fault @ Fault { errno: Errno::EACCES | Errno::EROFS | Errno::EPERM, .. }) => {
                    refused = Some(fault);
                    continue;
                }
                Err(fault) => return Err(fault),
            }
            tracing::info!(
                "what was written while its name was removed is kept as {}",
                String::from_utf8_lossy(&name)
            );
            self.show_named(key);
            self.count_links(key, into).await;
            // That one may have lost its name in the same way.
            if into != root
                && let Ok(above) = self.inodes.read(into, Freshness::Newest).await
                && above.inode().links.is_empty()
                && let Some(path) = path.get(at + 1..).filter(|path| !path.is_empty())
            {
                self.written().entry(into).or_insert_with(|| Look::new(path.to_vec()));
            }
            return Ok(());
        }
        Err(refused.unwrap_or(Errno::ESTALE.into()))
    }

    /// Links an inode that has lost its links to a directory: first the link, then the name.
    async fn name_in(
        &self,
        directory: InodeKey,
        (key, kind): (InodeKey, FileKind),
        name: &Bytes,
        time_ms: u64,
    ) -> Result<(), Fault> {
        let above = self.inodes.read(directory, Freshness::Newest).await?;
        self.inodes.credentials.check(above.block.groups()).await?;
        self.link_alone(key, directory).await?;
        let named = self.inodes.update(directory, Base::Newest, |above, dot| {
            let entries = entries(above)?;
            if entries.iter().all(|entry| entry.inode != key) {
                entries.insert(inode::Entry::new(name.clone(), (key, kind), dot, time_ms));
            }
            Ok(())
        });
        match named.await {
            Ok(_) => Ok(()),
            Err(fault) => {
                let unlinked = self.change(key, |inode, _| {
                    inode.links.retain(|link| link.directory != directory);
                    Ok(())
                });
                unlinked.await?;
                Err(fault)
            }
        }
    }

    /// Whether a directory names an inode to which it has a link.
    async fn is_named(&self, key: InodeKey, version: &Version) -> Result<bool, Fault> {
        for link in &version.inode().links {
            match self.inodes.read(link.directory, Freshness::Newest).await {
                Ok(above) if names_of(above.inode(), key) > 0 => return Ok(true),
                Ok(_) | Err(Fault { errno: Errno::ESTALE, .. }) => {}
                Err(fault) => return Err(fault),
            }
        }
        Ok(false)
    }

    /// Gives an inode without links one to a directory.
    async fn link_alone(&self, key: InodeKey, directory: InodeKey) -> Result<(), Fault> {
        let linked = self.change(key, |inode, added| {
            if inode.links.is_empty() {
                inode.links.insert(Link { added, directory });
            }
            Ok(())
        });
        linked.await
    }

    /// Removes an inode of which somebody has changed attributes while its last name was removed. A directory stays in which
    /// somebody has made a name: that it needs one is found with that name.
    async fn remove_again(&self, key: InodeKey, version: &Arc<Version>) -> Result<(), Fault> {
        let removed = self.inodes.write(key, Base::Version(version), |inode, _| {
            let is_empty = match &inode.contents {
                Contents::Directory(entries) => entries.is_empty(),
                _ => true,
            };
            Ok(((), inode.links.is_empty() && is_empty))
        });
        removed.await.map(drop)
    }

    /// Two mounts that have renamed a file at once gave it a link more than it has names in a directory, or one less.
    async fn compare_links(
        &self,
        key: InodeKey,
        version: &Version,
        look: &Look,
    ) -> Result<(), Fault> {
        let Some((directory, _)) = look.path.first() else { return Ok(()) };
        let links = links_to(version.inode(), *directory);
        if !look.is_renamed && links < 2 {
            return Ok(());
        }
        let above = self.inodes.read(*directory, Freshness::Newest).await?;
        if links > names_of(above.inode(), key).max(1) && !look.had_surplus {
            let Look { has_failed, is_renamed, ref path, .. } = *look;
            let again = Look { path: path.clone(), has_failed, is_renamed, had_surplus: true };
            self.written().entry(key).or_insert(again);
            return Ok(());
        }
        self.count_links(key, *directory).await;
        Ok(())
    }

    /// Gives an inode as many links to a directory as it has names there, at least one: two mounts have named it at once. A directory
    /// gets none: its links say which of its places counts.
    pub(super) async fn count_links(&self, key: InodeKey, directory: InodeKey) {
        for _ in 0..MAX_COUNTS {
            match self.try_count_links(key, directory).await {
                // Another mount may have done it at the same time.
                Ok(true) => {}
                Ok(false) => return,
                Err(fault) => {
                    tracing::debug!("a file may show a link too many or too few: {fault:?}");
                    return;
                }
            }
        }
    }

    /// Adds a link, or drops those that are too many; whether there was something to do.
    async fn try_count_links(&self, key: InodeKey, directory: InodeKey) -> Result<bool, Fault> {
        let above = self.inodes.read(directory, Freshness::Newest).await?;
        let names = names_of(above.inode(), key);
        let is_wrong = |inode: &Inode| {
            let links = links_to(inode, directory);
            let is_lacking = links < names && inode.contents.kind() != FileKind::Directory;
            is_lacking || links > names.max(1)
        };
        if !is_wrong(self.inodes.read(key, Freshness::Newest).await?.inode()) {
            return Ok(false);
        }
        // What others rename at this moment.
        let above = self.inodes.read(directory, Freshness::Latest).await?;
        let names = names_of(above.inode(), key);
        let counted = self.inodes.update(key, Base::Newest, |inode, added| {
            let links = links_to(inode, directory);
            if links < names && inode.contents.kind() != FileKind::Directory {
                inode.links.insert(Link { added, directory });
            }
            // The lowest ones, so that mounts which do it at once drop the same.
            let here = inode.links.iter().filter(|link| link.directory == directory).copied();
            let surplus: Vec<Link> = here.take(links.saturating_sub(names.max(1))).collect();
            inode.links.retain(|link| !surplus.contains(link));
            Ok(())
        });
        counted.await.map(|_| true)
    }
}

/// How many links an inode has to a directory.
pub(super) fn links_to(inode: &Inode, directory: InodeKey) -> usize {
    inode.links.iter().filter(|link| link.directory == directory).count()
}
