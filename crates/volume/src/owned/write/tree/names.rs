//! The names of a directory: as the ring has them, and what has changed since.

use std::collections::BTreeMap;

use bytes::Bytes;

use crate::format::DirectoryRef;

/// For each changed name the file that it means now, or that it is gone.
pub(super) type Slots = BTreeMap<Bytes, Option<u64>>;

/// See the module. A change hides what is stored under its name; one that is being flushed is
/// hidden by a later one.
#[derive(Debug, Default)]
pub(super) struct Names {
    pub(super) stored: DirectoryRef,
    pub(super) changed: Slots,
    pub(super) flushing: Slots,
    /// How many there are now, and how many of them are directories.
    pub(super) entries: u64,
    pub(super) subdirectories: u64,
}

impl Names {
    pub(super) fn of(stored: DirectoryRef) -> Names {
        let (entries, subdirectories) = (stored.entries, stored.subdirectories);
        Names { stored, entries, subdirectories, ..Names::default() }
    }

    /// What has become of `name`; `None` if it is as it is stored.
    pub(super) fn change(&self, name: &[u8]) -> Option<Option<u64>> {
        self.changed.get(name).or_else(|| self.flushing.get(name)).copied()
    }

    /// All changes, in order of the names.
    pub(super) fn changes(&self) -> Slots {
        let mut all = self.flushing.clone();
        all.extend(self.changed.iter().map(|(name, slot)| (name.clone(), *slot)));
        all
    }
}
