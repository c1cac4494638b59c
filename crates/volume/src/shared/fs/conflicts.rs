//! Contents of one file that were written at the same time (Pastis §3.1 keeps the ones with the later
//! time and loses the others).
//!
//! A file shows one of them. Before anything that was written at the same time is covered by a newer
//! version, it becomes a file of its own beside the first: `NAME~USER~TIME`. Whoever may write the
//! directory and meets such contents does that. The new inode's number follows from the contents' dot,
//! so that mounts which do it at the same time make one file and not two.

use std::collections::BTreeSet;
use std::sync::Arc;

use atoll_vfs::Errno;

use super::{Freshness, Shared, Version};
use crate::shared::fault::Fault;
use crate::shared::inode::{self, Contents, Inode, InodeKey, Link, Written};
use crate::shared::inodes::Base;
use crate::shared::merged::{self, Conflict, Merged};

/// How often a file is read again that others write meanwhile.
const MAX_ROUNDS: usize = 8;

impl Shared {
    /// Makes files of all contents but those that are shown, and covers them. With `based`, of all
    /// contents that differ from those, the shown ones included: something newer takes their place.
    /// Returns a version that has no contents beside those that are shown.
    pub(super) async fn keep_conflicts(
        &self,
        key: InodeKey,
        based: Option<&Arc<Version>>,
    ) -> Result<Arc<Version>, Fault> {
        let mut kept = BTreeSet::new();
        for _ in 0..MAX_ROUNDS {
            let newest = self.inodes.read(key, Freshness::Newest).await?;
            let Merged { inode, conflicts, .. } = &newest.merged;
            let mut others = conflicts.clone();
            if let Some(based) = based
                && let Contents::Regular { written: Written { dot, time_ms }, .. } = inode.contents
                && !inode.contents.is_same(&based.inode().contents)
            {
                others.push(Conflict { dot, time_ms, inode: inode.clone() });
            }
            // The new contents take the place of what they are based on, and of earlier attempts to
            // write them: what this mount has signed since.
            others.retain(|one| {
                let is_replaced = based.is_some_and(|based| {
                    let is_attempt =
                        one.dot.height > based.block.height() && self.inodes.is_own(key, &one.dot);
                    is_attempt || one.inode.contents.is_same(&based.inode().contents)
                });
                !is_replaced && !kept.contains(&one.dot)
            });
            if others.is_empty() {
                return self.cover(key, &newest).await;
            }
            for conflict in others {
                self.keep_beside(key, &newest, &conflict).await?;
                kept.insert(conflict.dot);
            }
        }
        Err(Fault::conflict())
    }

    /// Writes a version that covers all siblings of `version`, which have been kept.
    async fn cover(&self, key: InodeKey, version: &Arc<Version>) -> Result<Arc<Version>, Fault> {
        if version.merged.conflicts.is_empty() {
            return Ok(version.clone());
        }
        self.inodes.cover(key, version).await
    }

    /// Makes a file of contents that were written at the same time, in a directory that names the inode.
    async fn keep_beside(
        &self,
        key: InodeKey,
        newest: &Version,
        Conflict { dot, time_ms, inode }: &Conflict,
    ) -> Result<(), Fault> {
        let number = inode::conflict_number(&key, dot);
        let directories: BTreeSet<InodeKey> =
            newest.inode().links.iter().map(|link| link.directory).collect();
        // One name is enough to find it.
        for directory_key in directories {
            let directory = match self.inodes.read(directory_key, Freshness::Newest).await {
                Err(Fault { errno: Errno::ESTALE, .. }) => continue,
                directory => directory?,
            };
            let Contents::Directory(entries) = &directory.inode().contents else { continue };
            let Some(first) = entries.iter().find(|entry| entry.inode == key) else { continue };
            let name = merged::conflict_name(&first.name, dot, *time_ms, 1);
            let kind = inode.contents.kind();
            let groups = newest.block.groups();
            let made = self.inodes.create(groups, number, |added| Inode {
                links: BTreeSet::from([Link { added, directory: directory_key }]),
                past: None,
                ..inode.clone()
            });
            let (kept_key, _) = made.await?;
            let time_ms = *time_ms;
            let named =
                self.inodes.update(directory_key, Base::Version(&directory), |above, dot| {
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
            self.drop_surplus_links(kept_key, directory_key).await;
            tracing::info!(
                "contents written at the same time are kept as {}",
                String::from_utf8_lossy(&name)
            );
            return Ok(());
        }
        Err(Fault::conflict())
    }
}
