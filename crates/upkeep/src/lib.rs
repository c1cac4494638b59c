//! What a node does in the background for its user's volumes, and what of them is on its disk.
//!
//! - [`subsystems`] are what `atoll up` runs beside the node: the replay of what mounts have left
//!   in their spools, the renewal of what the user shares, and the pools of which the node is a
//!   member ([`pools`]).
//! - [`user`], [`own_group`] are the user's keys and groups, [`spool`] and [`shared_spool`] the
//!   changes of mounts that wait for the ring, [`own_volume`] the volumes whose keys the node has.
//!   Commands and mounts use the same.
//!
//! It reaches volumes as any client does, over the node's control socket. It knows no arguments,
//! no terminal and no kernel: errors are values, which the command line puts into words.

#![allow(
    clippy::disallowed_methods,
    reason = "files, locks and threads of a real machine; protocol code is in the crates below"
)]

mod background;
pub mod connection;
pub mod own_group;
pub mod own_volume;
pub mod pools;
mod shared_renewal;
pub mod shared_spool;
pub mod spool;
mod spool_replay;
pub mod user;
mod volume_walk;

use atoll_node::MakeSubsystem;

pub use shared_renewal::{StillWritable, Walk};
pub use volume_walk::VolumeWalk;

/// What runs beside a node for its user's volumes. What is known of them outlives a node that
/// starts anew in its process.
pub fn subsystems() -> Vec<MakeSubsystem> {
    vec![spool_replay::subsystem(), shared_renewal::subsystem(), pools::subsystem()]
}
