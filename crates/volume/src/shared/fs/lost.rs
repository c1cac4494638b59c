//! Names whose inode has been removed, and files whose name has been removed while somebody wrote them.
//!
//! **A name without an inode** comes about if a mount dies, or if a change of a directory that was refused is put
//! with the next one. It is shown as a file without links, so that it can be removed; opening it fails with `ESTALE`.
//!
//! **A file without a name.** A removal of an inode does not count if somebody wrote the file at the same time. Its
//! name is gone all the same. The mount that has written, and the one that has removed, look a moment later at
//! what the ring has of the inode: if the removal's writer had not seen the contents, the file gets the name
//! `NAME~USER~TIME`, as contents have that were written at the same time; if it had, the removal is written
//! again. Nodes that have taken a write, and nothing beside it, promise to tell of changes, so this look costs no
//! call to other nodes in most cases.
//!
//! Not covered: a partition that lasts longer than the look takes, a mount that ends before it, and a directory that
//! was removed as well: the file stays without a name.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use atoll_vfs::{Entry, Errno};
use bytes::Bytes;
use futures_util::future::join_all;

use super::names::{entries, names_of};
use super::{Freshness, Shared, Version, entry};
use crate::shared::fault::Fault;
use crate::shared::inode::{self, Contents, InodeKey, Link, Written};
use crate::shared::inodes::Base;
use crate::shared::merged;
use crate::shared::table::attr_of_lost;

/// Files that are looked at, each with its directory and its name there.
pub(super) type Places = BTreeMap<InodeKey, (InodeKey, Bytes)>;

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
        };
        if let Some((key, place)) = place {
            self.written.lock().expect("no holder of this lock panics").insert(key, place);
        }
    }

    /// Looks at the files that were written since.
    pub(super) async fn check_written(&self) {
        if self.spool.is_offline() {
            return;
        }
        let written =
            std::mem::take(&mut *self.written.lock().expect("no holder of this lock panics"));
        let checks = written.iter().map(|(key, place)| self.check_named(*key, place));
        join_all(checks).await;
    }

    /// Names a file again if it was removed by somebody who had not seen its contents.
    pub(super) async fn check_named(&self, key: InodeKey, place: &(InodeKey, Bytes)) {
        match self.name_again(key, place).await {
            Ok(()) | Err(Fault { errno: Errno::ESTALE, .. }) => {}
            Err(fault) => tracing::debug!("a file may have no name: {fault:?}"),
        }
    }

    async fn name_again(
        &self,
        key: InodeKey,
        (directory, name): &(InodeKey, Bytes),
    ) -> Result<(), Fault> {
        let version = self.inodes.read(key, Freshness::Newest).await?;
        let removals: Vec<_> =
            version.block.siblings().iter().filter(|sibling| sibling.is_removal).collect();
        if removals.is_empty() || !version.inode().links.is_empty() {
            return Ok(());
        }
        let Contents::Regular { written: Written { dot, time_ms }, .. } = version.inode().contents
        else {
            return self.remove_again(key, &version).await;
        };
        if removals.iter().any(|removal| removal.context.includes(&dot)) {
            return self.remove_again(key, &version).await;
        }
        let directory = *directory;
        let name = merged::conflict_name(name, &dot, time_ms, 1);
        let linked = self.change(key, |inode, added| {
            if inode.links.is_empty() {
                inode.links.insert(Link { added, directory });
            }
            Ok(())
        });
        linked.await?;
        let kind = version.inode().contents.kind();
        let named = self.inodes.update(directory, Base::Newest, |above, dot| {
            let entries = entries(above)?;
            if entries.iter().all(|entry| entry.inode != key) {
                entries.insert(inode::Entry::new(name.clone(), (key, kind), dot, time_ms));
            }
            Ok(())
        });
        named.await?;
        tracing::info!(
            "a file that was written while its name was removed is kept as {}",
            String::from_utf8_lossy(&name)
        );
        self.show_named(key);
        self.drop_surplus_links(key, directory).await;
        Ok(())
    }

    /// Removes an inode of which somebody has changed attributes while its last name was removed.
    async fn remove_again(&self, key: InodeKey, version: &Arc<Version>) -> Result<(), Fault> {
        let removed = self
            .inodes
            .write(key, Base::Version(version), |inode, _| Ok(((), inode.links.is_empty())));
        removed.await.map(drop)
    }

    /// Drops links of a file to a directory that are more than its names there: two mounts have named it at once.
    pub(super) async fn drop_surplus_links(&self, key: InodeKey, directory: InodeKey) {
        if let Err(fault) = self.try_drop_surplus_links(key, directory).await {
            tracing::debug!("a file may show a link too many: {fault:?}");
        }
    }

    async fn try_drop_surplus_links(
        &self,
        key: InodeKey,
        directory: InodeKey,
    ) -> Result<(), Fault> {
        let above = self.inodes.read(directory, Freshness::Latest).await?;
        let names = names_of(above.inode(), key).max(1);
        let surplus = |links: &BTreeSet<Link>| -> Vec<Link> {
            let here: Vec<Link> =
                links.iter().filter(|link| link.directory == directory).copied().collect();
            // The lowest ones, so that mounts which do it at once drop the same.
            here[..here.len().saturating_sub(names)].to_vec()
        };
        let newest = self.inodes.read(key, Freshness::Latest).await?;
        if surplus(&newest.inode().links).is_empty() {
            return Ok(());
        }
        let dropped = self.inodes.update(key, Base::Newest, |inode, _| {
            for link in surplus(&inode.links) {
                inode.links.remove(&link);
            }
            Ok(())
        });
        dropped.await.map(drop)
    }
}
