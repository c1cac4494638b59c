//! Tests of whole file systems.

mod calls;
mod conformance;
mod corrupt;
mod crash;
mod dice;
mod e2fsck;
mod fsx;
mod foreign;
mod identical_maps;
mod mkfs;
mod own_bytes;
mod recorder;
mod sparse;
mod transparent;
