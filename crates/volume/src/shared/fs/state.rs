//! What this mount knows of a file, as the virtual attributes of [`file_state`](crate::shared::file_state).
//!
//! Asking changes nothing but what reading the file changes: the newest version is read from the ring, which
//! brings replicas up to date that were found behind.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use atoll_key::kinds::certified::Sibling;
use atoll_key::{GroupId, UserId};
use atoll_vfs::{Errno, FileKind};
use bytes::Bytes;
use futures_util::future::join_all;
use futures_util::stream::{self, StreamExt, TryStreamExt};

use super::{Freshness, Shared, Version};
use crate::shared::access::{GroupRecord, read_group};
use crate::shared::consistency::Consistency;
use crate::shared::fault::Fault;
use crate::shared::file_state::{
    BLOCKS_AT_ONCE, BLOCKS_XATTR, CONFLICTS_XATTR, DirectoryConflicts, FileState, NAMES_AT_ONCE,
    PendingChanges, STATE_XATTR, UnopenedContents, WritingGroup, WrittenVersion,
};
use crate::shared::inode::{self, InodeKey};
use crate::shared::merged::{self, Conflict};
use crate::shared::origin::Origin;
use crate::shared::reach::Reach;
use crate::shared::table::View;

/// Inodes of a directory that are read at once.
const READS_AT_ONCE: usize = 32;

/// A virtual attribute of every file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum VirtualXattr {
    /// The state.
    State,
    /// Hashes of content blocks, from this number on.
    Blocks(usize),
    /// What of a directory's names was written at the same time as something else, from this number on.
    Conflicts(usize),
}

impl VirtualXattr {
    /// The attribute of this name, if it is a virtual one.
    pub(super) fn of(name: &[u8]) -> Option<VirtualXattr> {
        if name == STATE_XATTR.as_bytes() {
            return Some(VirtualXattr::State);
        }
        let from = |beginning: &str| -> Option<usize> {
            let from = name.strip_prefix(beginning.as_bytes())?;
            std::str::from_utf8(from).ok()?.parse().ok()
        };
        let conflicts = || from(CONFLICTS_XATTR).map(VirtualXattr::Conflicts);
        from(BLOCKS_XATTR).map(VirtualXattr::Blocks).or_else(conflicts)
    }
}

/// The records of groups, or why they cannot be read.
type Records = BTreeMap<GroupId, Result<Option<GroupRecord>, String>>;

impl Shared {
    pub(super) async fn virtual_xattr(
        &self,
        number: u64,
        xattr: VirtualXattr,
    ) -> Result<Bytes, Fault> {
        match xattr {
            VirtualXattr::State => Ok(self.state_of(number).await?.encode().into()),
            VirtualXattr::Blocks(from) => self.blocks_of(number, from).await,
            VirtualXattr::Conflicts(from) => {
                Ok(self.conflicts_of(number, from).await?.encode().into())
            }
        }
    }

    /// The newest version of a file, or the one that is known, and why there is no newer one.
    async fn newest_or_known(
        &self,
        number: u64,
    ) -> Result<(InodeKey, Arc<Version>, Option<String>), Fault> {
        let (key, here) = {
            let table = self.table();
            let node = table.node(number)?;
            let is_unput = node.birthplace.as_ref().is_some_and(|place| !place.is_stored);
            let view = node.view.as_ref().filter(|_| is_unput);
            (node.key, node.orphan.clone().or_else(|| view.map(|view| view.version.clone())))
        };
        if let Some(version) = here {
            return Ok((key, version, None));
        }
        match self.inodes.read(key, Freshness::Newest).await {
            Ok(version) => Ok((key, version, None)),
            Err(fault) => {
                let known = self.inodes.known(key).ok_or_else(|| fault.clone())?;
                Ok((key, known, Some(fault.why.unwrap_or_else(|| fault.errno.to_string()))))
            }
        }
    }

    async fn state_of(&self, number: u64) -> Result<FileState, Fault> {
        let (key, version, ring_trouble) = self.newest_or_known(number).await?;
        let block = &version.block;
        let mut siblings: Vec<&Sibling> = block.siblings().iter().collect();
        let standing = self.inodes.standing(block);
        let rank = |one: &&Sibling| (!one.is_removal, standing.precedence(one));
        siblings.sort_by_key(|one| std::cmp::Reverse(rank(one)));
        let of_siblings = siblings.iter().map(|one| one.certificate.group);
        let groups: BTreeSet<GroupId> = block.groups().iter().copied().chain(of_siblings).collect();
        let (records, certificate) = futures_util::join!(
            self.records(groups),
            self.inodes.credentials.valid_until(block.groups()),
        );
        let origin = version.inode().attributes.origin;
        let written = |one: &&Sibling| {
            let (user, time_ms) = Origin::of(origin, block, one);
            WrittenVersion {
                user: user.0,
                label: label_of(&records, user),
                height: one.dot.height,
                time_ms,
                is_removal: one.is_removal,
            }
        };
        let group = |group: &GroupId| {
            let record = match &records[group] {
                Ok(Some(record)) => Ok(record),
                Ok(None) => Err("its record is not on the ring".to_owned()),
                Err(told) => Err(told.clone()),
            };
            WritingGroup {
                group: group.0,
                label: record.as_ref().map(|record| record.label.clone()).unwrap_or_default(),
                members: record.as_ref().map_or(0, |record| record.members.len() as u64),
                trouble: record.err(),
            }
        };
        let (opens, pending) = self.pending(number, key, &version)?;
        Ok(FileState {
            volume: block.volume().0,
            label: self.label.clone(),
            is_encrypted: self.inodes.reading.sealing().is_encrypted(),
            inode: key.0,
            lock: super::locks::file_key(key).0.to_vec(),
            version: block.version(),
            ring_trouble,
            siblings: siblings.iter().map(written).collect(),
            conflicts: version.merged.conflicts.len() as u64,
            unreadable: version.merged.unreadable.first().map(|(_, error)| error.to_string()),
            groups: block.groups().iter().map(group).collect(),
            user: self.inodes.credentials.user().map(|user| user.0),
            certificate_until_secs: certificate.as_ref().ok().copied(),
            why_not: certificate.err().map(|why| why.to_string()),
            pending,
            opens,
            has_lock: self.has_lock(number),
            consistency: self.inodes.consistency(Some(&version)).name().to_owned(),
            chooses_consistency: Consistency::chosen(&version.inode().attributes).is_some(),
        })
    }

    async fn records(&self, groups: BTreeSet<GroupId>) -> Records {
        let reads = groups.into_iter().map(|group| async move {
            let record = read_group(&self.blocks, group).await;
            (group, record.map_err(|error| error.to_string()))
        });
        join_all(reads).await.into_iter().collect()
    }

    /// How often a file is open here, and what is not on the ring.
    fn pending(
        &self,
        number: u64,
        key: InodeKey,
        version: &Version,
    ) -> Result<(u64, PendingChanges), Fault> {
        let behind = self.inodes.behind();
        let links = || version.inode().links.iter().map(|link| link.directory);
        let (is_spooled, refused) = self.spool.waits(&key);
        let above: Vec<_> = links().map(|directory| self.spool.waits(&directory)).collect();
        let refused_above = above.iter().find_map(|(_, refused)| refused.clone());
        let trouble = self.trouble.lock().expect("no holder of this lock panics").clone();
        let mount_removals = self.removals_under_way() as u64;
        let table = self.table();
        let mount_changes = (table.changed(false).len() + behind.len()) as u64;
        let node = table.node(number)?;
        let changed = node.view.as_ref().filter(|view| View::has_changes(view));
        let pending = PendingChanges {
            is_changed: changed.is_some(),
            changed_bytes: changed.map_or(0, |view| view.content.held_bytes),
            is_unnamed: node.birthplace.is_some(),
            is_removed: node.orphan.is_some(),
            removes_names: links().chain([key]).any(|directory| behind.contains(&directory)),
            mount_changes,
            mount_removals,
            trouble: trouble.filter(|_| mount_changes + mount_removals > 0),
            is_spooled,
            name_is_spooled: above.iter().any(|(waits, _)| *waits),
            spool_refused: refused.or(refused_above),
        };
        Ok((table.opens(number), pending))
    }

    /// The hashes of a file's content blocks as the ring has them, ascending, some from the one of number `from` on.
    async fn blocks_of(&self, number: u64, from: usize) -> Result<Bytes, Fault> {
        let (_, version, _) = self.newest_or_known(number).await?;
        let sealing = self.inodes.reading.sealing();
        let reach = Reach { inline: &self.inline, cache: &self.cache, sealing };
        let mut found = BTreeSet::new();
        let reached = reach.add_inode(&version.block, &mut found).await;
        reached.map_err(|told| Fault::new(Errno::EIO, told))?;
        let hashes = found.into_iter().skip(from).take(BLOCKS_AT_ONCE);
        Ok(hashes.flat_map(|hash| hash.0).collect::<Vec<u8>>().into())
    }
}

impl Shared {
    /// What of a directory's names, from number `from` on, was written at the same time as something else. Each file is
    /// read for it, as for a listing with attributes.
    async fn conflicts_of(&self, number: u64, from: usize) -> Result<DirectoryConflicts, Fault> {
        let (_, version) = match self.directory(number, self.names_age()).await {
            Err(Fault { errno: Errno::ENOTDIR, .. }) => return Err(Errno::ENODATA.into()),
            directory => directory?,
        };
        let names: Vec<(Bytes, inode::Entry)> = {
            let names = version.names()?.iter().skip(from).take(NAMES_AT_ONCE);
            names.map(|(name, entries)| (name.clone(), entries[0].clone())).collect()
        };
        let is_kept = |(name, entry): &&(Bytes, inode::Entry)| merged::is_conflict(name, entry);
        let kept = names.iter().filter(is_kept).map(|(name, _)| name.to_vec()).collect();
        let count = names.len() as u64;
        let reads = names.into_iter().map(|(name, entry)| async move {
            if entry.file_kind() == FileKind::Directory {
                return Ok(Vec::new());
            }
            let found = match self.inodes.read(entry.inode, self.names_age()).await {
                // It is gone.
                Err(Fault { errno: Errno::ESTALE, .. }) => return Ok(Vec::new()),
                found => found?,
            };
            let unopened = |conflict: &Conflict| UnopenedContents {
                name: name.to_vec(),
                user: merged::conflict_user(&conflict.dot),
                time: merged::conflict_time(conflict.time_ms),
            };
            Ok::<_, Fault>(found.merged.conflicts.iter().map(unopened).collect())
        });
        let unopened: Vec<Vec<UnopenedContents>> =
            stream::iter(reads).buffered(READS_AT_ONCE).try_collect().await?;
        let unopened = unopened.into_iter().flatten().collect();
        Ok(DirectoryConflicts { names: count, kept, unopened })
    }
}

/// What a user is called in the record of a group.
fn label_of(records: &Records, user: UserId) -> String {
    let known = records.values().filter_map(|record| record.as_ref().ok()?.as_ref());
    let labels = known.filter_map(|record| Some(record.members.get(&user)?.label.clone()));
    labels.max().unwrap_or_default()
}
