//! Tests of whole file systems.

mod e2fsck;
mod mkfs;
