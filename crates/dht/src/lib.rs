//! Blocks on a ring.
//!
//! [`Blocks`] is what file systems see of it: put and get by key, whoever stores them.
//! [`Dht`] is a node's part in it.

pub mod blocks;
pub mod messages;
pub mod reconcile;
mod status;

pub use blocks::{Blocks, GetError, MemoryBlocks, PutError};
pub use status::RepairStatus;
