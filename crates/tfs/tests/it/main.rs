//! Tests of whole file systems.

mod conformance;
mod crash;
mod e2fsck;
mod mkfs;
mod transparent;
