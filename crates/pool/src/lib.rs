//! Pools: one tree of ordinary files in ordinary directories, on the disks of many machines, mounted over FUSE and NFS
//! (Kosha, SC 2004).
//!
//! ```text
//! remote    calls of a file system over the network: a gateway works on a member's
//! group     a member of several at work: the primary's sessions with its backups, and theirs with it
//! fs        vfs::FileSystem over one member's disk
//! member    a member's D: made, opened, brought in order after a crash, changed, walked through
//! map       who the primary is and which members have everything: decided by a majority of voters
//! backups   what a primary hands to its backups, until they have it
//! marks     where bytes of members may differ
//! messages  what a primary and its backups say to each other, as bytes
//! members   the list of the members, which does not change
//! routing   which pool a call is about
//! held      files that somebody holds, and open nodes
//! turns     locks by number
//! index     where each file is by its number
//! journal   what was changed since the index was last written
//! change    one change of names and attributes, as bytes
//! calls     calls that are made once, and known after restarts
//! layout    slots, numbers, placeholders
//! disk      what is asked of the file system under D: real, and simulated
//! ```
//!
//! A pool has one member, or several that do not change, each with a copy of every file. Files lie in D with their own names,
//! owners, modes, times and attributes. Everything else in D can be made again from them.

mod backups;
mod calls;
mod change;
pub mod disk;
mod fs;
mod group;
mod held;
mod index;
mod journal;
mod layout;
pub mod map;
mod marks;
mod member;
mod members;
mod messages;
pub mod remote;
mod routing;
mod turns;

pub use calls::{CallId, CallOrigin, ClientKey, RemembersCalls};
pub use fs::PoolFs;
pub use group::{GroupMember, GroupStatus, MemberStatus};
pub use layout::OWN_DIRECTORY;
pub use member::{
    CheckReport, CreateError, LeaveReport, OpenError, OpenReport, PoolSettings, check,
    check_usable, create, create_member, is_in_use, leave, read_members, read_settings,
};
pub use members::PoolMembers;
pub use messages::{example_member_messages, is_member_message};
pub use routing::{FAMILY, PoolId, PoolRouter, addressed};
