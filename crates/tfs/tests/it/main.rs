//! Tests of whole file systems.

mod calls;
mod conformance;
mod corrupt;
mod crash;
mod dice;
mod e2fsck;
mod foreign;
mod fsx;
mod full_host;
mod holes;
mod identical_maps;
mod kernel;
mod limits;
mod listing;
mod mke2fs;
mod mkfs;
mod numbers;
mod own_bytes;
mod recorder;
mod snapshot;
mod sparse;
mod stat;
mod states;
mod threads;
mod transparent;
mod upkeep;
