//! What the TFS paper measured (J. Cipar, M. Corner, E. Berger, "TFS: A Transparent File System
//! for Contributory Storage", FAST 2007), measured again with Atoll's file system.
//!
//! | module | figures |
//! |---|---|
//! | [`capacity`] | 6, 7: how much a network stores, by equations 1 to 7 |
//! | [`availability`] | sessions and copies under lazy replication, for the equations |
//! | [`allocations`] | 4, 5: where a user's files are allocated, and what avoiding that costs |
//! | [`copying`] | 1, 8, 9, 10: an Andrew-style benchmark beside contributed files |
//! | [`disk`] | the disk under it: a disk of 2004, as a model |
//! | [`desktop`] | a computer with that disk, and file populations |
//! | [`activity`] | what a person does on it all day |
//!
//! The file system is Atoll's own, in memory; its time is the modelled disk's, so that a run
//! follows from its seed. Times of real machines are benchmarks' (`make bench`).

mod activity;
pub(crate) mod allocations;
pub(crate) mod availability;
pub(crate) mod capacity;
pub(crate) mod copying;
mod desktop;
mod disk;
