//! What the log and the files share: the index on disk, the catalogue over it, the threads
//! that write and read.

pub(crate) mod catalog;
pub(crate) mod holdings;
pub(crate) mod index;
pub(crate) mod queue;
pub(crate) mod shared;
