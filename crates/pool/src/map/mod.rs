//! The *map* of a pool of several: which member is the primary, and which members have everything that was answered. One map after
//! the other is decided by a majority of *voters*, so that all members agree on each (Raft, Ongaro and Ousterhout, ATC 2014; the
//! configuration manager of PacificA, MSR-TR-2008-25, §2.3).
//!
//! ```text
//! asking     any member: proposes a map, or asks for the one that holds
//! voter      a voter at work: timers, messages, the disk
//! storage    what a voter must not forget: two files
//! consensus  the rules of voting as plain state, over the crate `noraft`
//! wire       what voters and members say to each other
//! ```
//!
//! The voters are the first founding members: one of two, three of three or four, five of more. They do not change.
//!
//! **Invariants.** There is at most one map for each epoch, ever; epochs grow by one. A map is decided only if it *follows* the one
//! that held: whoever proposes it knew that one. What was answered to a proposal holds after the loss of any minority of voters, and
//! after a loss of power of all.
//!
//! **It does not know** when a map should change, nor what a primary does.

mod asking;
mod consensus;
mod storage;
mod voter;
mod wire;

use atoll_net::Peer;

pub use self::asking::{AskError, MapAsker};
pub use self::storage::VoterError;
pub(crate) use self::storage::{NAMES as VOTE_FILES, make_votes};
pub use self::voter::MapVoter;
pub use self::wire::{PROPOSE, VOTER_MESSAGE, example_map_messages};
use self::wire::{ProposeCall, ProposeReply, VoterMessage};
use crate::members::PoolMembers;
use crate::messages::decode;
pub use crate::pool_map::PoolMap;

/// The founding members that decide the map.
pub fn voters(founding: &PoolMembers) -> &[Peer] {
    let peers = founding.peers();
    let count = match peers.len() {
        0..=2 => 1,
        3 | 4 => 3,
        _ => 5,
    };
    &peers[..count]
}

/// For fuzzing: whether bytes are some message about maps. One of a voter is handed to another.
pub fn is_map_message(bytes: &[u8]) -> bool {
    if let Some(message) = decode::<VoterMessage>(bytes) {
        consensus::try_message(&message);
        return true;
    }
    decode::<ProposeCall>(bytes).is_some() || decode::<ProposeReply>(bytes).is_some()
}

#[cfg(test)]
mod tests {
    use atoll_key::PeerId;

    use super::*;

    pub(super) fn founding(count: u8) -> PoolMembers {
        let peer = |n: u8| Peer { id: PeerId([n; 32]), addr: ([10, 0, 0, n], 4711).into() };
        PoolMembers::new((1..=count).map(peer).collect()).unwrap()
    }

    #[test]
    fn voters_are_one_three_or_five_of_the_first_members() {
        let count = |members| voters(&founding(members)).len();
        assert_eq!([2, 3, 4, 5, 6, 16].map(count), [1, 3, 3, 5, 5, 5]);
        assert_eq!(voters(&founding(4))[0], founding(4).founder());
    }
}
