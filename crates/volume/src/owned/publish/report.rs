//! What a publish did not take as the source has it.

use std::path::PathBuf;

/// Entries of each list that are named; all are counted.
pub const MAX_LISTED: usize = 1000;

/// Something of the source that is not in the volume as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Omission {
    /// Which, relative to the source.
    pub path: PathBuf,
    /// Why.
    pub reason: String,
}

/// Omissions of one kind.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OmissionList {
    /// The first [`MAX_LISTED`], in the order they were met.
    pub listed: Vec<Omission>,
    /// How many there are.
    pub count: u64,
}

impl OmissionList {
    pub(super) fn add(&mut self, omission: Omission) {
        self.count += 1;
        if self.listed.len() < MAX_LISTED {
            self.listed.push(omission);
        }
    }
}

/// What is not in the volume as the source has it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Omissions {
    /// Has its previous version; a directory, all that was in it.
    pub kept: OmissionList,
    /// Is not in the volume: it has no previous version.
    pub left_out: OmissionList,
    /// Directories that are never published.
    pub withheld: OmissionList,
}

impl Omissions {
    /// Whether everything that may be published is in the volume as it is in the source.
    pub fn is_complete(&self) -> bool {
        self.kept.count == 0 && self.left_out.count == 0
    }
}
