//! What the log and the files share.
//!
//! - [`index`]: the redb database on disk, from keys to places; [`catalog`]: the index and the
//!   changes that are not committed to it yet, as one; [`holdings`]: sums over them by owner.
//! - [`threads`]: the one thread that changes a store and the threads that read for it, fed by
//!   a bounded [`queue`].
//! - [`committer`]: commits of the index, and what happens when one fails.
//! - [`walks`]: expiry, scrubbing, renewals and summaries, which go through many blocks.
//!
//! Invariant: only the writer ([`threads::Writer`]) commits, and it alone adds and removes
//! blocks; other threads may extend leases and forget expired blocks in the catalogue.
//!
//! The engine does not know where a block's bytes are: an [`entry::IndexEntry`] has a place, which
//! the log reads as segment and offset and the files as a checksum.

pub(crate) mod catalog;
pub(crate) mod committer;
mod config;
pub(crate) mod entry;
pub(crate) mod error;
pub(crate) mod holdings;
pub(crate) mod index;
mod queue;
pub(crate) mod shared;
pub(crate) mod threads;
mod walks;

pub use config::DiskConfig;
pub(crate) use error::lock;
pub use error::{IndexFailure, OpenError};
