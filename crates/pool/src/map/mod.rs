//! The *map* of a pool of several: which member is the primary, and which members have everything that was answered. One map after
//! the other is decided by a majority of *voters*, so that all members agree on each (Raft, Ongaro and Ousterhout, ATC 2014; the
//! configuration manager of PacificA, MSR-TR-2008-25, §2.3).
//!
//! ```text
//! seat          what one member has to do with it: the newest map it knows, its vote, its questions
//! asking        any member: proposes a map, or asks for the one that holds
//! voter         a voter at work: timers, messages, the disk
//! storage       what a voter must not forget: two files
//! members_file  who the members are, on each member's disk
//! consensus     the rules of voting as plain state, over the crate `noraft`
//! wire          what voters and members say to each other
//! ```
//!
//! The voters are one of two members, three of three or four, five of more; where members are too few, nodes without files vote, too
//! ([`crate::witnesses`]). A map that names others is the last that those before decide:
//! the others go on from it, as the next *generation* ([`crate::pool_map`]). Whoever speaks to a voter of a former generation is given that map.
//!
//! **Invariants.** There is at most one map for each epoch, ever; epochs grow by one. A map is decided only if it *follows* the one
//! that held: whoever proposes it knew that one. What was answered to a proposal holds after the loss of any minority of voters, and
//! after a loss of power of all.
//!
//! **It does not know** when a map should change, nor what a primary does.

mod asking;
mod consensus;
pub(crate) mod members_file;
mod seat;
mod storage;
mod voter;
mod wire;

pub use self::asking::AskError;
pub use self::seat::MapSeat;
pub use self::storage::VoterError;
pub(crate) use self::storage::{NAMES as VOTE_FILES, make_votes};
pub use self::voter::MapVoter;
pub use self::wire::{PROPOSE, SEEN, VOTER_MESSAGE, example_map_messages};
use self::wire::{ProposeCall, ProposeReply, SeenReply, VoterCall};
use crate::messages::decode;
pub(crate) use crate::pool_map::VotersToBe;
pub use crate::pool_map::{MapVoters, PoolMap};
pub(crate) use crate::pool_map::{revival, revival_secs, revived};

/// For fuzzing: whether bytes are some message about maps. One of a voter is handed to another.
pub fn is_map_message(bytes: &[u8]) -> bool {
    if let Some(call) = decode::<VoterCall>(bytes) {
        consensus::try_message(&call.message);
        return true;
    }
    decode::<ProposeCall>(bytes).is_some()
        || decode::<ProposeReply>(bytes).is_some()
        || decode::<SeenReply>(bytes).is_some()
}

#[cfg(test)]
mod tests {
    use atoll_key::PeerId;
    use atoll_net::Peer;

    use crate::members::PoolMembers;

    pub(super) fn founding(count: u8) -> PoolMembers {
        let peer = |n: u8| Peer { id: PeerId([n; 32]), addr: ([10, 0, 0, n], 4711).into() };
        PoolMembers::new((1..=count).map(peer).collect()).unwrap()
    }
}
