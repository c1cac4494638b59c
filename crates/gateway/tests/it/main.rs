//! Real mounts of file systems in memory, used by real system calls and programs. Where
//! FUSE is not to be had the tests say so and do nothing.

// These tests run programs and threads; nothing here is simulated.
#![allow(clippy::disallowed_methods)]

mod concurrency;
mod direct;
mod handles;
mod locks;
mod mounting;
mod nfs;
mod place;
mod posix;
mod programs;
mod raw;
mod scripted;
mod shared;
mod trees;
