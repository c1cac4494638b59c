//! The file system of CFS §3: a tree of blocks named by the hashes of their contents,
//! below one root block that its publisher signs and replaces in place.
//!
//! ```text
//! root (signed) ─► directory blocks ─► inode blocks ─► indirect blocks ─► data blocks
//! ```
//!
//! - [`root`] and [`sealed_root`]: the bytes of the root; all other blocks are those of
//!   [`crate::format`].
//! - [`publish()`]: a directory of this machine becomes a volume, or its next version.
//! - [`Volume`], [`Snapshot`]: reading by path.
//! - [`VolumeFs`]: reading through a mount.
//! - [`WritableFs`]: writing through a mount; [`history`]: the old states that it keeps.
//! - [`get_tree`]: copying back to this machine's disk.
//! - [`release_blocks`]: a volume that was removed leaves the ring.
//!
//! Every hash below a root is a hash of contents, so a snapshot never changes, and all of
//! it may be cached for ever; only which root is the newest needs asking again (CFS §5.2).

mod fault;
mod fs;
mod get;
pub mod history;
mod progress;
mod publish;
pub(crate) mod reachable;
mod read;
mod remove;
pub mod root;
pub mod sealed_root;
mod write;

pub use crate::blocks::Outage;
pub use fs::VolumeFs;
pub use get::{GetOptions, GetTreeError, Gotten, Unread, get_newest, get_tree};
pub use progress::{NoProgress, Phase, Progress};
pub use publish::{
    AllOfSource, LeaseRecorder, MAX_LISTED, NoLeaseRecorder, Omission, OmissionList, Omissions,
    PublishError, PublishOptions, Published, SourceFilter, Visibility, exclude_set, publish,
};
pub use reachable::{blocks_below, newest_root};
pub use read::{
    Item, Listing, OpenError, ReadError, Snapshot, Volume, VolumeOptions, VolumeStatus,
};
pub use remove::{releasable_blocks, release_blocks};
pub use root::Root;
pub use sealed_root::RootError;
pub use write::{
    Copied, CopyError, FlushError, LeaseKeeper, NoLeaseKeeper, RestoreError, SPOOL_BASE,
    SPOOL_RECORDS, WritableFs, WriteError, WriteOptions, empty_root,
};
