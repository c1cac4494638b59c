//! The node's block layer: what it needs of the node's directory and disk.

pub(crate) mod disk_watch;
pub(crate) mod durable;
