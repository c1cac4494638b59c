//! The binary end to end: real processes, real sockets on loopback, real mounts.

// Tests run programs on a real machine and wait for them.
#![allow(clippy::disallowed_methods)]

mod copied;
mod crashes;
mod encrypted;
mod full_disk;
mod full_node;
mod installing;
mod json;
mod keys;
mod lab;
mod live;
mod members;
mod mounts;
mod moving;
mod nfs;
mod pool;
mod pool_group;
mod pool_import;
mod processes;
mod publishing;
mod room;
mod running;
mod secrets;
mod shared;
mod shared_history;
mod shared_locks;
mod shared_offline;
mod status;
mod strangers;
mod tfs;
mod tfs_access;
mod tfs_mounts;
mod usage;
mod volumes;
