//! The bytes of each block.

pub mod directory;
pub use directory::{Content, DirectoryRef, Entry};
