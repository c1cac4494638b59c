//! Maintenance in the background: stabilising, verifying fingers, and how often.

pub(in crate::chord) mod interval;
pub(in crate::chord) mod upkeep;
