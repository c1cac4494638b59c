//! What a node holds: blocks in its store, pointers to copies on other nodes, copies about to
//! be removed; and the proof that it holds them.

pub(crate) mod pending_removals;
pub(crate) mod pointers;
pub(crate) mod proof;
pub(crate) mod ranges;
pub(crate) mod vouch;
