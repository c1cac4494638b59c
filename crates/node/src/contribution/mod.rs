//! How a node gives disk: the policies, and their stored form.
//!
//! There are three, after §2 and §3 of the TFS paper:
//!
//! | policy | what the store may take |
//! |---|---|
//! | fixed | so much, whatever happens on the disk |
//! | dynamic | what keeps the file system at most `low` full; while others fill it up to `high` nothing changes, and beyond that blocks go until it is `low` full again |
//! | transparent | all that is free of a transparent file system, which takes it back as it needs it |
//!
//! The watermarks are those of Elastic Quotas and FS² as the paper describes them ("whenever
//! the current allocation exceeds the maximum watermark ... delete contributory files until the
//! contribution level falls below a lower watermark"). Between the two the store neither
//! grows nor shrinks, so that its own growth never makes it shrink.
//!
//! Fixed and dynamic keep blocks in the log in the node's directory, transparent in files of
//! the directory named; `controller` carries a change out.

mod backends;
mod check;
mod controller;
mod subsystem;

use std::path::PathBuf;

use atoll_dht::Share;
use atoll_store::Space;
use minicbor::{Decode, Encode};
use serde::{Deserialize, Serialize};

pub(crate) use backends::{Opened, Place};
pub(crate) use controller::{ContributionController, State};

use crate::volumes;

/// How a node gives disk.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Policy {
    /// So many bytes.
    Fixed {
        /// What the store may take.
        size_bytes: u64,
    },
    /// What keeps the file system of the node's directory between two watermarks.
    Dynamic {
        /// The store grows until so much of the file system is used.
        low: Share,
        /// Beyond this blocks are given up until `low` is reached.
        high: Share,
    },
    /// All that is free of a transparent file system.
    Transparent {
        /// A transparent directory.
        dir: PathBuf,
    },
}

impl Policy {
    /// The name a person types.
    pub fn name(&self) -> &'static str {
        match self {
            Policy::Fixed { .. } => "fixed",
            Policy::Dynamic { .. } => "dynamic",
            Policy::Transparent { .. } => "transparent",
        }
    }
}

/// A policy in the control protocol and in the node's settings.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub(crate) enum StoredPolicy {
    #[n(0)]
    Fixed {
        #[n(0)]
        size_bytes: u64,
    },
    /// In millionths.
    #[n(1)]
    Dynamic {
        #[n(0)]
        low: u32,
        #[n(1)]
        high: u32,
    },
    /// An absolute path, the system's bytes.
    #[n(2)]
    Transparent {
        #[cbor(n(0), with = "minicbor::bytes")]
        dir: Vec<u8>,
    },
}

impl From<&Policy> for StoredPolicy {
    fn from(policy: &Policy) -> StoredPolicy {
        match policy {
            Policy::Fixed { size_bytes } => StoredPolicy::Fixed { size_bytes: *size_bytes },
            Policy::Dynamic { low, high } => {
                StoredPolicy::Dynamic { low: low.millionths(), high: high.millionths() }
            }
            Policy::Transparent { dir } => {
                StoredPolicy::Transparent { dir: volumes::path_to_bytes(dir) }
            }
        }
    }
}

impl From<StoredPolicy> for Policy {
    fn from(stored: StoredPolicy) -> Policy {
        match stored {
            StoredPolicy::Fixed { size_bytes } => Policy::Fixed { size_bytes },
            StoredPolicy::Dynamic { low, high } => Policy::Dynamic {
                low: Share::from_millionths(low),
                high: Share::from_millionths(high),
            },
            StoredPolicy::Transparent { dir } => {
                Policy::Transparent { dir: volumes::path_from_bytes(dir) }
            }
        }
    }
}

/// Where blocks of an earlier policy still are, in the node's settings.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct FormerPlace {
    /// The directory of files; absent for the log.
    #[cbor(n(0), with = "minicbor::bytes")]
    pub dir: Option<Vec<u8>>,
}

/// What a store of `own_bytes` may take of a file system that is so full.
pub(crate) fn dynamic_capacity(space: &Space, own_bytes: u64, low: Share, high: Share) -> u64 {
    let used_bytes = space.total_bytes.saturating_sub(space.free_bytes);
    let low_bytes = low.of(space.total_bytes);
    if used_bytes <= low_bytes {
        own_bytes + (low_bytes - used_bytes)
    } else if used_bytes <= high.of(space.total_bytes) {
        own_bytes
    } else {
        own_bytes.saturating_sub(used_bytes - low_bytes)
    }
}

/// How a node gives disk and what has become of it; see `atoll contribute`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ContributionStatus {
    /// `fixed`, `dynamic` or `transparent`.
    pub policy: String,
    /// What was set, of `fixed`, bytes.
    pub size_bytes: Option<u64>,
    /// The lower watermark of `dynamic`, from 0 to 1.
    pub low: Option<f64>,
    /// The upper watermark of `dynamic`, from 0 to 1.
    pub high: Option<f64>,
    /// Where the blocks are.
    pub dir: String,
    /// What the store may take at present, bytes.
    pub offered_bytes: u64,
    /// What it takes on its disk, bytes.
    pub used_bytes: u64,
    /// Blocks held.
    pub blocks: u64,
    /// The size of the file system the blocks are on, bytes; 0 if it is not there.
    pub disk_total_bytes: u64,
    /// What is free of it to everybody, bytes. Transparent files count as free.
    pub disk_free_bytes: u64,
    /// Blocks whose files had vanished, since the start.
    pub lost_blocks: u64,
    /// Blocks given up for want of room, since the start.
    pub dropped_blocks: u64,
    /// Blocks that are being moved from where an earlier policy kept them.
    pub moving: Option<Moving>,
    /// Warnings for people, in sentences.
    pub warnings: Vec<String>,
}

/// Blocks on their way from one place to another.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Moving {
    /// From where.
    pub from: String,
    /// Blocks moved since the node started.
    pub moved_blocks: u64,
    /// Blocks still to be moved.
    pub left_blocks: u64,
    /// Their bytes.
    pub left_bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// §2 of the TFS paper.
    #[test]
    fn between_the_watermarks_a_store_neither_grows_nor_shrinks() {
        let (low, high) = (Share::from_millionths(800_000), Share::from_millionths(850_000));
        let capacity = |used_bytes, own_bytes| {
            let free_bytes = 1000 - used_bytes;
            let space = Space { total_bytes: 1000, free_bytes, unit_bytes: 1 };
            dynamic_capacity(&space, own_bytes, low, high)
        };
        assert_eq!(capacity(500, 100), 400, "up to the lower watermark");
        assert_eq!(capacity(800, 400), 400);
        assert_eq!(capacity(820, 400), 400, "the owner has begun to fill the disk");
        assert_eq!(capacity(850, 400), 400);
        assert_eq!(capacity(851, 400), 349, "so that 800 are used");
        assert_eq!(capacity(1000, 100), 0);
        // What it grew to by itself never makes it shrink.
        let grown = capacity(500, 100);
        assert_eq!(capacity(500 - 100 + grown, grown), grown);
    }

    #[test]
    fn policies_are_written_down_without_loss() {
        let share = Share::from_millionths;
        for policy in [
            Policy::Fixed { size_bytes: u64::MAX },
            Policy::Dynamic { low: share(1), high: share(1_000_000) },
            Policy::Transparent { dir: "/srv/ü \u{1}".into() },
        ] {
            let bytes = minicbor::to_vec(StoredPolicy::from(&policy)).expect("a vector");
            let back: StoredPolicy = minicbor::decode(&bytes).expect("own bytes");
            assert_eq!(Policy::from(back), policy);
        }
    }
}
