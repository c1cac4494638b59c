//! Shared volumes: the file system of Pastis, in which many people write without a server.
//!
//! Each file, directory or other object is an *inode* in a certified block of its own
//! ([`atoll_key::kinds::certified`]); a directory names the keys of inodes (Pastis §3, Figure 1).
//! Changing a file replaces its inode and no other, up to no root: that is what Pastis gains over
//! CFS.
//!
//! - [`add_wins`]: sets whose concurrent versions merge.
//! - [`origin`]: who wrote what the owner has signed anew.
//! - [`inode`]: the bytes of an inode, which are the payload of a sibling.
//! - [`sealing`]: how blocks of an encrypted volume are sealed.
//! - [`entries`]: the entries of a directory, also of a large one.
//! - [`standing`]: how the siblings of a block rank after it was rebound.
//! - [`merged`]: what the siblings of a block say together, as a mount shows it.
//! - [`past`]: the bytes of past versions.
//! - [`access`]: who may write and read: the records of volumes, groups and readers, a user's certificates
//!   and read keys.
//! - `spool`: the ring, and what waits for it on this machine's disk.
//! - [`consistency`]: when a mount sees what others have written.
//! - `inodes`: reading the newest versions of inodes, and writing new ones (Pastis §3.2).
//! - `lock_lease`: locks of one mount against the others.
//! - `reach`: which blocks an inode refers to.
//! - `table`: the files that the kernel holds and has open, as plain data.
//! - [`file_state`]: what a mount knows of a file, for people who ask.
//! - [`SharedFs`]: the calls of a file system.
//! - [`upkeep`]: extending the leases of a volume.
//!
//! Each knows only those before it.

pub mod access;
pub mod add_wins;
pub mod consistency;
pub mod entries;
mod fault;
pub mod file_state;
mod fs;
mod inline_blocks;
pub mod inode;
mod inodes;
mod lock_lease;
pub mod merged;
pub mod origin;
pub mod past;
mod reach;
pub mod sealing;
mod spool;
pub mod standing;
mod table;
pub mod upkeep;

pub use consistency::Consistency;
pub use fs::{EndError, OpenError, PastFs, SharedFs, SharedOptions, Spooled};
pub use spool::{SPOOL_BLOCK, SPOOL_INODE};
