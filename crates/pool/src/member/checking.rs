//! Comparing a member's index with its files, and putting right what can be.

use std::collections::{BTreeMap, BTreeSet};

use atoll_vfs::{Errno, FileKind};

use super::seeking::MAX_DEPTH;
use super::{OpenError, PoolMember};
use crate::change::PoolPlace;
use crate::disk::{Disk, DiskResult, Making, missing_is_none};
use crate::layout::{FileId, Placeholder, Referral, Slot, outside_directory};

/// What a check has found, and put right.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct CheckReport {
    /// Files and directories that there are.
    pub files: u64,
    /// Files that the index did not have: somebody put them there by hand, or a crash lost their entries. They have numbers now.
    pub files_added: u64,
    /// Entries of the index whose files are gone.
    pub files_gone: u64,
    /// Directories in slots to which no name led: those with something in them have one in the root now, `orphan-ID`.
    pub orphans_named: u64,
    /// And those with nothing in them, which were removed.
    pub orphans_removed: u64,
    /// Placeholders that read wrong by hand, since a directory above them was moved. They read right now.
    pub placeholders_mended: u64,
    /// Names of directories that are gone from their slots, as paths. They were left.
    pub names_without_directory: Vec<String>,
    /// Names of files of other groups.
    pub referrals: u64,
    /// Files of this group with names in directories of others, once for each such name.
    pub outside_names: u64,
    /// Those of both kinds to which nothing in another group belongs, as can be seen in this one: somebody has copied or made them by
    /// hand. As paths. They were left.
    pub names_without_partner: Vec<String>,
}

impl CheckReport {
    /// Whether everything was in order.
    pub fn is_clean(&self) -> bool {
        let CheckReport {
            files_added,
            files_gone,
            orphans_named,
            orphans_removed,
            placeholders_mended,
            ..
        } = self;
        [files_added, files_gone, orphans_named, orphans_removed, placeholders_mended]
            .iter()
            .all(|count| **count == 0)
            && self.names_without_directory.is_empty()
            && self.names_without_partner.is_empty()
    }
}

impl<D: Disk> PoolMember<D> {
    /// Walks through all files, makes the index again, and puts right what can be. Nobody else may use the member.
    pub(crate) async fn check(&self) -> Result<CheckReport, OpenError> {
        let failed = |errno| OpenError::Disk("cannot check it", errno);
        let index_failed =
            |error: crate::index::PoolIndexError| OpenError::Index(error.to_string());
        let before: BTreeSet<FileId> =
            self.index.all_files().map_err(index_failed)?.into_keys().collect();
        let files = self.index_again().await?;
        let after = self.index.all_files().map_err(index_failed)?;
        let mut report = CheckReport {
            files,
            files_added: after.keys().filter(|id| !before.contains(id)).count() as u64,
            files_gone: before.iter().filter(|id| !after.contains_key(id)).count() as u64,
            ..CheckReport::default()
        };
        let distributed: BTreeMap<FileId, Slot> =
            after.iter().filter_map(|(id, record)| Some((*id, record.slot?))).collect();
        for (id, slot) in &distributed {
            if !id.is_fixed() && self.places(*id).map_err(failed)?.is_empty() {
                self.name_orphan(*id, *slot, &mut report).await.map_err(failed)?;
            }
        }
        self.check_placeholders(&distributed, &mut report).await.map_err(failed)?;
        self.checkpoint().await.map_err(failed)?;
        Ok(report)
    }

    async fn name_orphan(
        &self,
        id: FileId,
        slot: Slot,
        report: &mut CheckReport,
    ) -> DiskResult<()> {
        let in_slot = self.slot_node(slot).await?;
        match self.disk.rmdir(&in_slot, id.to_string().as_bytes()).await {
            Ok(()) => {
                if let Some(record) = self.record(id)? {
                    self.index
                        .remove_file(id, record)
                        .map_err(|error| self.index_failed(&error))?;
                }
                report.orphans_removed += 1;
                return Ok(());
            }
            Err(Errno::ENOTEMPTY | Errno::EEXIST) => {}
            Err(errno) => return Err(errno),
        }
        let root = self.node(FileId::ROOT).await?;
        let place = PoolPlace::new(FileId::ROOT, format!("orphan-{id}").as_bytes());
        let target = Placeholder { slot, id }.target(0);
        match self.disk.make(&root, &place.name, Making::Symlink(&target), 0o777).await {
            Ok(()) | Err(Errno::EEXIST) => {}
            Err(errno) => return Err(errno),
        }
        self.index.add_place(id, &place);
        self.count_placeholder(FileId::ROOT, true)?;
        report.orphans_named += 1;
        Ok(())
    }

    async fn check_placeholders(
        &self,
        distributed: &BTreeMap<FileId, Slot>,
        report: &mut CheckReport,
    ) -> DiskResult<()> {
        let mut walk = self.walk().await?;
        while let Some(step) = walk.next().await? {
            let by_inode =
                self.index.by_inode(step.stat.ino).map_err(|error| self.index_failed(&error))?;
            let id = match step.slot {
                Some(_) => step.said,
                None => by_inode,
            };
            if step.stat.kind == FileKind::Directory
                && let Some(id) = id
            {
                walk.enter(id, &step.node).await?;
            }
            let Some(place) = step.place else { continue };
            let Some(placeholder) = step.placeholder else {
                let referral = match step.stat.kind {
                    FileKind::Symlink => Referral::parse(&self.disk.read_node(&step.node).await?),
                    _ => None,
                };
                if let Some(id) = id {
                    self.count_name_over_groups(id, step.stat.kind, &place, referral, report)?;
                }
                continue;
            };
            if distributed.get(&placeholder.id) != Some(&placeholder.slot) {
                report.names_without_directory.push(self.path(&place)?);
                continue;
            }
            let Some(dir) = missing_is_none(self.node(place.parent).await)? else { continue };
            report.placeholders_mended +=
                u64::from(self.mend_placeholder(&place, &dir, placeholder).await?);
        }
        Ok(())
    }

    /// Counts a name of a file of another group, or of a file that has its name in one.
    fn count_name_over_groups(
        &self,
        id: FileId,
        kind: FileKind,
        place: &PoolPlace,
        referral: Option<Referral>,
        report: &mut CheckReport,
    ) -> DiskResult<()> {
        if place.is_open_name() {
            return Ok(());
        }
        let own = self.settings.group;
        let has_partner = if place.parent == FileId::outside(own) {
            report.outside_names += 1;
            let of = Referral::of_outside_name(&place.name);
            of.is_some_and(|of| of.file == id && of.kind == kind && of.id.group() != own)
        } else if let Some(referral) = referral {
            report.referrals += 1;
            // A copy has another number than the referral.
            referral.file.group() != own && referral.id == id
        } else {
            return Ok(());
        };
        if !has_partner {
            report.names_without_partner.push(self.path(place)?);
        }
        Ok(())
    }

    /// A name as people see it.
    pub(crate) fn path(&self, place: &PoolPlace) -> DiskResult<String> {
        let names = self.path_names(place)?;
        let names: Vec<_> = names.iter().map(|name| String::from_utf8_lossy(name)).collect();
        Ok(format!("/{}", names.join("/")))
    }

    /// The names that lead to a place from the root on, the last one included.
    pub(super) fn path_names(&self, place: &PoolPlace) -> DiskResult<Vec<Vec<u8>>> {
        let mut names = vec![place.name.to_vec()];
        let mut at = place.parent;
        // A damaged index may say that a directory lies in itself.
        while !at.is_fixed() && names.len() < MAX_DEPTH {
            let above = self.places(at)?.into_iter().next().ok_or(Errno::ESTALE)?;
            names.push(above.name.to_vec());
            at = above.parent;
        }
        if at == FileId::outside(self.settings.group) {
            names.push(outside_directory(self.settings.group).into_bytes());
        }
        names.reverse();
        Ok(names)
    }
}
