//! The owned file system, end to end on blocks in memory and trees on this machine's disk.

// Tests wait on tokio's clock, often a paused one.
#![allow(clippy::disallowed_methods)]

mod encrypted;
mod formats;
mod get;
mod golden;
mod handles;
mod hostile;
mod live;
mod mount;
mod publish;
mod ring;
mod roots;
mod scale;
mod shared;
#[allow(dead_code, reason = "the tests of `dht` use all of it")]
#[path = "../../../dht/tests/it/ring.rs"]
mod simulated_ring;
mod trees;
mod unread;
mod window;
mod write;
