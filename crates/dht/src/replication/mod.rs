//! Keeping k copies of every block (CFS §5.1), and giving up the others.

pub(crate) mod eviction;
pub(crate) mod exchange;
pub(crate) mod handoff;
pub(crate) mod in_flight;
pub(crate) mod losses;
pub(crate) mod pointer_upkeep;
pub mod reconcile;
pub(crate) mod repair;
pub(crate) mod state;
pub(crate) mod status;
pub(crate) mod store;
pub(crate) mod upkeep;
pub(crate) mod writes;
