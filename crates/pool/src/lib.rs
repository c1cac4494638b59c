//! Pools: one tree of ordinary files in ordinary directories, on the disks of many machines, mounted over FUSE and NFS
//! (Kosha, SC 2004).
//!
//! ```text
//! machine     one machine's part in a pool: its members of several groups
//! group       a member of several at work: the primary, and those that follow it
//! remote      calls of a file system over the network: a gateway works on a member's
//! fs          vfs::FileSystem over one member's disk
//! tree_import a copy of a tree of plain files, made through a pool's file system
//! member      a member's D: made, opened, brought in order after a crash, changed, walked through
//! tree_survey a tree that is to be taken into a pool: walked through, looked at
//! backups     what a primary hands to the others, until they have it
//! witness_seat a node without files, which may vote
//! map         who the primary is and which members have everything: decided by a majority of voters
//! messages    what a primary and the others say to each other, as bytes
//! pool_map    who belongs to the pool, who the primary is and which members have everything
//! roster      the pool's other groups, and machines that are to go
//! witnesses   nodes that belong to a pool and have no files of it
//! members     a list of members and where they listen
//! routing     which pool a call is about
//! held        files that somebody holds, and open nodes
//! turns       locks by number
//! locks       the locks that clients hold on files
//! index       where each file is by its number
//! change_log  the changes that some member may lack
//! marks       where bytes of members may differ
//! scrub       which of several copies of a file is right
//! journal     what was changed since the index was last written
//! change      one change of names and attributes, as bytes
//! crossings   changes over several groups
//! calls       which calls made the last changes, so that none is made twice
//! pool_groups how a node reaches the groups of a pool
//! placement   which group a new directory goes to
//! siblings    the pool's other groups, as one of them sees them
//! quota       what the files of a user, or below a directory, may take
//! layout      slots, numbers, placeholders
//! disk        what is asked of the file system under D: real, and simulated
//! ```
//!
//! A pool has one member, or several, each with a copy of every file. Files lie in D with their own names,
//! owners, modes, times and attributes. Everything else in D can be made again from them.

mod backups;
mod calls;
mod change;
mod change_log;
mod crossings;
pub mod disk;
mod fs;
mod group;
mod held;
mod index;
mod journal;
mod layout;
mod locks;
mod machine;
pub mod map;
mod marks;
mod member;
mod members;
mod messages;
mod placement;
mod pool_groups;
mod pool_map;
mod quota;
pub mod remote;
mod roster;
mod routing;
mod scrub;
mod siblings;
mod tree_import;
mod tree_survey;
mod turns;
mod witness_seat;
mod witnesses;

pub use calls::{CallId, CallOrigin, ClientKey, RemembersCalls};
pub use fs::PoolFs;
pub use group::{
    CopyProgress, GroupMember, GroupStatus, MemberStatus, PoolEditError, QuotaError, ScrubReport,
    WitnessStatus, ask_quotas, ask_scrub,
};
pub use layout::{GroupNumber, OWN_DIRECTORY};
pub use machine::{
    LocalGroupStatus, MachineDisks, MachineStatus, PoolMachine, VoteDirectories, VotingStatus,
};
pub use member::{
    ASIDE_DIRECTORY, CheckReport, CopyStand, CreateError, ImportError, InPlaceReport, LeaveReport,
    OpenError, OpenReport, PoolSettings, ReviveError, check, check_usable, copy_stand, create,
    create_member, import_in_place, is_in_use, leave, read_map, read_settings, revive, share,
};
pub use members::PoolMembers;
pub use messages::{example_member_messages, is_member_message};
pub use placement::{GroupRoom, group_for};
pub use pool_groups::{GroupRoute, LocalGroup, OpenRemote, PoolGroups};
pub use pool_map::{MapVoters, PoolMap, epoch_parts};
pub use quota::{QuotaAmount, QuotaRow, QuotaSubject, QuotaTable};
pub use roster::{MAX_COPIES, PoolRoster, RosterEdit, RosterGroup, RosterRules, USUAL_COPIES};
pub use routing::{FAMILY, PoolId, PoolRouter, addressed};
pub use siblings::SiblingGroups;
pub use tree_import::{CopyProblem, CopyReport, TreeSource, copy_tree_into};
pub use tree_survey::{TreeProblem, TreeSurvey};
pub use witness_seat::WitnessSeat;
pub use witnesses::{PoolWitnesses, Witness};
