//! Trust: nodes are checked before they enter a table (CFS §4.4), and no single peer is believed.
//!
//! [`admission`] remembers checks and suspicions, [`checks`] limits how many checks are made and
//! [`failure_reports`] how many pings: plain data. [`verify`] makes the checks, [`audit`]
//! cross-checks successor lists, [`probe`] pings nodes that may have failed and [`reachability`] asks other nodes whether a joining node can be
//! reached.

pub mod admission;
pub(in crate::chord) mod audit;
pub(in crate::chord) mod audit_schedule;
pub(in crate::chord) mod checks;
pub(in crate::chord) mod failure_reports;
pub(in crate::chord) mod probe;
pub(in crate::chord) mod reachability;
pub(in crate::chord) mod verify;
