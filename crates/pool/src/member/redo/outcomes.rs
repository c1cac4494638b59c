//! What the changes of a journal come to, file by file, whatever the disk has of them. Plain data: it asks for nothing but the
//! names that files had before.

use std::collections::{BTreeMap, BTreeSet};

use crate::change::{FileBirth, NewTime, PoolChange, PoolPlace, Time};
use crate::index::PoolIndexError;
use crate::layout::FileId;

/// Attributes as the last of several changes has left them.
#[derive(Clone, Copy, Default, PartialEq, Debug)]
pub(super) struct LastAttributes {
    pub(super) mode: Option<u32>,
    pub(super) uid: Option<u32>,
    pub(super) gid: Option<u32>,
    pub(super) atime: Option<Time>,
    pub(super) mtime: Option<Time>,
}

/// What several changes come to for one file.
#[derive(Clone, Default, PartialEq, Debug)]
pub(super) struct FileOutcome {
    /// What it was made as, if one of the changes made it.
    pub(super) birth: Option<FileBirth>,
    /// The names that it had before.
    pub(super) before: BTreeSet<PoolPlace>,
    /// The names that it has in the end.
    pub(super) after: BTreeSet<PoolPlace>,
    /// All names that it ever had.
    pub(super) ever: BTreeSet<PoolPlace>,
    pub(super) attributes: LastAttributes,
    /// Extended attributes that were set, or removed.
    pub(super) extended: BTreeMap<Vec<u8>, Option<Vec<u8>>>,
    /// The last change that set attributes.
    attributes_at: u64,
    /// Its bytes were promised: they are not taken away, and in a pool of one it is not made again, empty.
    pub(super) is_filled: bool,
    /// When it was first named: files are made in this order, directories before what is in them.
    pub(super) rank: usize,
}

/// What the changes of a journal come to.
#[derive(Default)]
pub(super) struct FileOutcomes {
    pub(super) files: BTreeMap<FileId, FileOutcome>,
}

impl FileOutcomes {
    /// Of these changes, but for those that were withdrawn. `places` says which names a file had before all of them.
    pub(super) fn of(
        changes: &BTreeMap<u64, PoolChange>,
        withdrawn: &BTreeSet<u64>,
        mut places: impl FnMut(FileId) -> Result<Vec<PoolPlace>, PoolIndexError>,
    ) -> Result<FileOutcomes, PoolIndexError> {
        let mut all = FileOutcomes::default();
        let parts = changes
            .iter()
            .flat_map(|(order, change)| change.parts().iter().map(move |change| (order, change)));
        for (order, change) in parts {
            let is_withdrawn = withdrawn.contains(order);
            for id in named(change) {
                if !all.files.contains_key(&id) {
                    let before: BTreeSet<PoolPlace> = places(id)?.into_iter().collect();
                    let rank = all.files.len();
                    let (after, ever) = (before.clone(), before.clone());
                    all.files.insert(
                        id,
                        FileOutcome { before, after, ever, rank, ..FileOutcome::default() },
                    );
                }
            }
            all.add(*order, change, is_withdrawn);
        }
        Ok(all)
    }

    /// Names that several files have had.
    pub(super) fn shared_names(&self) -> BTreeSet<PoolPlace> {
        let mut seen = BTreeSet::new();
        let names = self.files.values().flat_map(|file| &file.ever);
        names.filter(|place| !seen.insert(*place)).cloned().collect()
    }

    pub(super) fn file(&mut self, id: FileId) -> &mut FileOutcome {
        self.files.entry(id).or_default()
    }

    fn add(&mut self, order: u64, change: &PoolChange, is_withdrawn: bool) {
        let mut gains = |id: FileId, at: &PoolPlace, is_lasting: bool| {
            let file = self.file(id);
            file.ever.insert(at.clone());
            if is_lasting && !is_withdrawn {
                file.after.insert(at.clone());
            }
        };
        // A change that was withdrawn may have been made in part.
        match change {
            PoolChange::Make { id, at, .. } | PoolChange::Link { id, at, .. } => {
                gains(*id, at, true)
            }
            PoolChange::Rename { id, from, to, replaced, .. } => {
                gains(*id, to, true);
                // Where a directory and a placeholder are exchanged before one of them goes.
                if let Some(replaced) = replaced {
                    gains(*replaced, from, false);
                }
            }
            PoolChange::Exchange { id, from, other, to, .. } => {
                gains(*id, to, true);
                gains(*other, from, true);
            }
            PoolChange::Unlink { .. }
            | PoolChange::Attributes { .. }
            | PoolChange::Extended { .. }
            | PoolChange::Synced { .. }
            | PoolChange::Marked { .. }
            | PoolChange::Verified { .. }
            | PoolChange::AllSynced { .. }
            | PoolChange::Checkpoint { .. }
            | PoolChange::Released { .. }
            | PoolChange::Began { .. }
            | PoolChange::LogBegins
            | PoolChange::Withdrawn { .. }
            | PoolChange::Prepared { .. }
            | PoolChange::Decided { .. }
            | PoolChange::PartMade { .. }
            | PoolChange::Abandoned { .. }
            | PoolChange::Told { .. }
            | PoolChange::Quotas { .. } => {}
        }
        if is_withdrawn {
            return;
        }
        match change {
            PoolChange::Make { id, birth, .. } => {
                let FileBirth { uid, gid, times, .. } = birth.clone();
                let mode = birth.sets_mode().then_some(birth.mode);
                let file = self.file(*id);
                file.birth = Some(birth.clone());
                let (atime, mtime) = times.unzip();
                file.attributes =
                    LastAttributes { mode, uid: Some(uid), gid: Some(gid), atime, mtime };
                file.attributes_at = order;
            }
            PoolChange::Unlink { id, at, .. } => {
                self.file(*id).after.remove(at);
            }
            PoolChange::Rename { id, from, to, replaced, .. } => {
                if from != to {
                    self.file(*id).after.remove(from);
                }
                if let Some(replaced) = replaced.filter(|replaced| replaced != id) {
                    self.file(replaced).after.remove(to);
                }
            }
            PoolChange::Exchange { id, from, other, to, .. } => {
                self.file(*id).after.remove(from);
                self.file(*other).after.remove(to);
            }
            PoolChange::Attributes { id, mode, uid, gid, atime, mtime } => {
                self.file(*id).attributes_at = order;
                let now = &mut self.file(*id).attributes;
                *now = LastAttributes {
                    mode: mode.or(now.mode),
                    uid: uid.or(now.uid),
                    gid: gid.or(now.gid),
                    atime: atime.map(NewTime::time).or(now.atime),
                    mtime: mtime.map(NewTime::time).or(now.mtime),
                };
            }
            PoolChange::Extended { id, name, value, .. } => {
                let file = self.file(*id);
                file.attributes_at = order;
                file.extended.insert(name.clone(), value.clone());
            }
            PoolChange::Synced { id, upto, .. } => {
                let file = self.file(*id);
                file.is_filled = true;
                if file.attributes_at <= *upto {
                    file.attributes = LastAttributes::default();
                    file.extended.clear();
                }
            }
            PoolChange::AllSynced { .. } => {
                self.files.values_mut().for_each(|file| file.is_filled = true);
            }
            PoolChange::Link { .. }
            | PoolChange::Marked { .. }
            | PoolChange::Verified { .. }
            | PoolChange::Checkpoint { .. }
            | PoolChange::Released { .. }
            | PoolChange::Began { .. }
            | PoolChange::LogBegins
            | PoolChange::Withdrawn { .. }
            | PoolChange::Prepared { .. }
            | PoolChange::Decided { .. }
            | PoolChange::PartMade { .. }
            | PoolChange::Abandoned { .. }
            | PoolChange::Told { .. }
            | PoolChange::Quotas { .. } => {}
        }
    }
}

/// The files that a change names, and those that it is going to make.
pub(super) fn numbers(change: &PoolChange) -> impl Iterator<Item = FileId> {
    change.parts().iter().flat_map(named).chain(change.given_numbers())
}

/// The files that a change names, which has no parts.
fn named(change: &PoolChange) -> impl Iterator<Item = FileId> {
    let (first, second) = match change {
        PoolChange::Make { id, .. }
        | PoolChange::Link { id, .. }
        | PoolChange::Unlink { id, .. }
        | PoolChange::Attributes { id, .. }
        | PoolChange::Extended { id, .. }
        | PoolChange::Synced { id, .. } => (Some(*id), None),
        PoolChange::Rename { id, replaced, .. } => (Some(*id), *replaced),
        PoolChange::Exchange { id, other, .. } => (Some(*id), Some(*other)),
        PoolChange::Marked { .. }
        | PoolChange::Verified { .. }
        | PoolChange::AllSynced { .. }
        | PoolChange::Checkpoint { .. }
        | PoolChange::Released { .. }
        | PoolChange::Began { .. }
        | PoolChange::LogBegins
        | PoolChange::Withdrawn { .. }
        | PoolChange::Prepared { .. }
        | PoolChange::Decided { .. }
        | PoolChange::PartMade { .. }
        | PoolChange::Abandoned { .. }
        | PoolChange::Told { .. }
        | PoolChange::Quotas { .. } => (None, None),
    };
    first.into_iter().chain(second)
}
