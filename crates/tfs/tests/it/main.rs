//! Tests of whole file systems.

mod conformance;
mod e2fsck;
mod mkfs;
