//! Pools: one tree of ordinary files in ordinary directories, on the disks of many machines, mounted over FUSE and NFS
//! (Kosha, SC 2004).
//!
//! ```text
//! remote    calls of a file system over the network: a gateway works on a member's
//! fs        vfs::FileSystem over one member's disk
//! member    a member's D: made, opened, brought in order after a crash, walked through
//! held      files that somebody holds, and open nodes
//! turns     locks by number
//! index     where each file is by its number
//! journal   what was changed since the index was last written
//! change    one change of names and attributes, as bytes
//! layout    slots, numbers, placeholders
//! disk      what is asked of the file system under D: real, and simulated
//! ```
//!
//! A pool of one member is what is built, whose file system other machines can call. Files lie in D with their own
//! names, owners, modes, times and attributes. Everything else in D can be made again from them.

mod backups;
mod change;
pub mod disk;
mod fs;
mod group;
mod held;
mod index;
mod journal;
mod layout;
mod marks;
mod member;
mod messages;
pub mod remote;
mod routing;
mod turns;

pub use fs::PoolFs;
pub use group::{GroupMember, GroupStatus, MemberStatus};
pub use layout::OWN_DIRECTORY;
pub use member::{
    CheckReport, CreateError, LeaveReport, OpenError, OpenReport, PoolMembers, PoolSettings, check,
    check_usable, create, create_member, is_in_use, leave, read_members, read_settings,
};
pub use routing::{FAMILY, PoolId, PoolRouter, addressed};
