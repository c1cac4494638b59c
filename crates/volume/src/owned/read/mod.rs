//! Reading a volume: its root and the updates of it ([`Volume`]), one version of it by
//! path ([`Snapshot`]), and below them directories and files made of blocks, by way of a
//! cache of blocks that merges fetches of the same one.
//!
//! What a publisher signed is not trusted further than its signature reaches: each block
//! is checked against whatever points to it (levels, counts, lengths, order of names)
//! before it is used.

pub(super) mod error;
pub(super) mod snapshot;
mod volume;

pub use error::{OpenError, ReadError};
pub use snapshot::{Item, Listing, Snapshot};
pub use volume::{Volume, VolumeOptions, VolumeStatus};
