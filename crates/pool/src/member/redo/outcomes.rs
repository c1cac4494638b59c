//! What the changes of a journal come to, file by file, whatever the disk has of them. Plain data: it asks for nothing but the
//! names that files had before.

use std::collections::{BTreeMap, BTreeSet};

use crate::change::{Birth, Change, Place, Time};
use crate::index::IndexError;
use crate::journal::Record;
use crate::layout::FileId;

/// Attributes as the last of several changes has left them.
#[derive(Clone, Copy, Default, PartialEq, Debug)]
pub(super) struct Attributes {
    pub(super) mode: Option<u32>,
    pub(super) uid: Option<u32>,
    pub(super) gid: Option<u32>,
    pub(super) atime: Option<Time>,
    pub(super) mtime: Option<Time>,
}

/// What several changes come to for one file.
#[derive(Clone, Default, PartialEq, Debug)]
pub(super) struct Outcome {
    /// What it was made as, if one of the changes made it.
    pub(super) birth: Option<Birth>,
    /// The names that it had before.
    pub(super) before: BTreeSet<Place>,
    /// The names that it has in the end.
    pub(super) after: BTreeSet<Place>,
    /// All names that it ever had.
    pub(super) ever: BTreeSet<Place>,
    pub(super) attributes: Attributes,
    /// The last change that set attributes.
    attributes_at: u64,
    /// Its bytes were promised: it is not made again, empty.
    pub(super) is_filled: bool,
    /// When it was first named: files are made in this order, directories before what is in them.
    pub(super) rank: usize,
}

/// What the changes of a journal come to.
#[derive(Default)]
pub(super) struct Outcomes {
    pub(super) files: BTreeMap<FileId, Outcome>,
}

impl Outcomes {
    /// `places` says which names a file had before all of them.
    pub(super) fn of(
        records: &[Record],
        mut places: impl FnMut(FileId) -> Result<Vec<Place>, IndexError>,
    ) -> Result<Outcomes, IndexError> {
        let withdrawn: BTreeSet<u64> = records
            .iter()
            .filter_map(|record| match record.change {
                Change::Withdrawn { sequence } => Some(sequence),
                _ => None,
            })
            .collect();
        let mut all = Outcomes::default();
        for Record { sequence, change } in records {
            let is_withdrawn = withdrawn.contains(sequence);
            for id in named(change) {
                if !all.files.contains_key(&id) {
                    let before: BTreeSet<Place> = places(id)?.into_iter().collect();
                    let rank = all.files.len();
                    let (after, ever) = (before.clone(), before.clone());
                    all.files
                        .insert(id, Outcome { before, after, ever, rank, ..Outcome::default() });
                }
            }
            all.add(*sequence, change, is_withdrawn);
        }
        Ok(all)
    }

    pub(super) fn file(&mut self, id: FileId) -> &mut Outcome {
        self.files.entry(id).or_default()
    }

    fn add(&mut self, sequence: u64, change: &Change, is_withdrawn: bool) {
        let mut gains = |id: FileId, at: &Place, is_lasting: bool| {
            let file = self.file(id);
            file.ever.insert(at.clone());
            if is_lasting && !is_withdrawn {
                file.after.insert(at.clone());
            }
        };
        // A change that was withdrawn may have been made in part.
        match change {
            Change::Make { id, at, .. } | Change::Link { id, at } => gains(*id, at, true),
            Change::Rename { id, from, to, replaced } => {
                gains(*id, to, true);
                // Where a directory and a placeholder are exchanged before one of them goes.
                if let Some(replaced) = replaced {
                    gains(*replaced, from, false);
                }
            }
            Change::Exchange { id, from, other, to } => {
                gains(*id, to, true);
                gains(*other, from, true);
            }
            Change::Unlink { .. }
            | Change::Attributes { .. }
            | Change::Synced { .. }
            | Change::Checkpoint { .. }
            | Change::Withdrawn { .. } => {}
        }
        if is_withdrawn {
            return;
        }
        match change {
            Change::Make { id, birth, .. } => {
                let Birth { uid, gid, mode, times, .. } = birth.clone();
                let file = self.file(*id);
                file.birth = Some(birth.clone());
                let (atime, mtime) = times.unzip();
                file.attributes = Attributes { mode, uid: Some(uid), gid: Some(gid), atime, mtime };
                file.attributes_at = sequence;
            }
            Change::Unlink { id, at } => {
                self.file(*id).after.remove(at);
            }
            Change::Rename { id, from, to, replaced } => {
                if from != to {
                    self.file(*id).after.remove(from);
                }
                if let Some(replaced) = replaced.filter(|replaced| replaced != id) {
                    self.file(replaced).after.remove(to);
                }
            }
            Change::Exchange { id, from, other, to } => {
                self.file(*id).after.remove(from);
                self.file(*other).after.remove(to);
            }
            Change::Attributes { id, mode, uid, gid, atime, mtime } => {
                self.file(*id).attributes_at = sequence;
                let now = &mut self.file(*id).attributes;
                *now = Attributes {
                    mode: mode.or(now.mode),
                    uid: uid.or(now.uid),
                    gid: gid.or(now.gid),
                    atime: atime.or(now.atime),
                    mtime: mtime.or(now.mtime),
                };
            }
            Change::Synced { id, upto } => {
                let file = self.file(*id);
                file.is_filled = true;
                if file.attributes_at <= *upto {
                    file.attributes = Attributes::default();
                }
            }
            Change::Link { .. } | Change::Checkpoint { .. } | Change::Withdrawn { .. } => {}
        }
    }
}

/// The files that a change names.
pub(super) fn named(change: &Change) -> impl Iterator<Item = FileId> {
    let (first, second) = match change {
        Change::Make { id, .. }
        | Change::Link { id, .. }
        | Change::Unlink { id, .. }
        | Change::Attributes { id, .. }
        | Change::Synced { id, .. } => (Some(*id), None),
        Change::Rename { id, replaced, .. } => (Some(*id), *replaced),
        Change::Exchange { id, other, .. } => (Some(*id), Some(*other)),
        Change::Checkpoint { .. } | Change::Withdrawn { .. } => (None, None),
    };
    first.into_iter().chain(second)
}
