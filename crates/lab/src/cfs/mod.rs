//! F. Dabek, M. F. Kaashoek, D. Karger, R. Morris, I. Stoica, "Wide-area cooperative
//! storage with CFS" (SOSP 2001), §7: one module for each group of figures.

pub(crate) mod balance;
pub(crate) mod caching;
pub(crate) mod downloads;
pub(crate) mod failures;
pub(crate) mod lookup_cost;
pub(crate) mod sites;
