//! Blocks on a ring.
//!
//! [`Blocks`] is what file systems see of it: put and get by key, whoever stores them.

pub mod blocks;

pub use blocks::{Blocks, GetError, MemoryBlocks, PutError};
