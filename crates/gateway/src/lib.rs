//! Front ends for any [`atoll_vfs::FileSystem`].
//!
//! A front end translates: [`fuse`] from the kernel's requests, [`nfs`] from those of its clients. It knows nothing of
//! blocks, rings or volumes, and it runs only for real, never in the simulator.

// Tasks, timers and threads of a front end belong to the machine it runs on.
#![allow(clippy::disallowed_methods)]

pub mod fuse;
pub mod nfs;
mod privileges;
