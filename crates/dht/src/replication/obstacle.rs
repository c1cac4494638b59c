//! What keeps the copies of a block from being made, for people.

use std::fmt;

use crate::rpc::PutStatus;
use crate::rpc::backoff::SetBack;

/// Why blocks that differ between this node and a replica could not be copied.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Obstacle {
    /// The replica has no room.
    NoRoom,
    /// This node has no room.
    NoRoomHere,
    /// Their publisher has used up its share of the replica.
    OverQuota,
    /// Their publisher has used up its share of this node.
    OverQuotaHere,
    /// By the replica's clock they are of the future.
    OfTheFuture,
    /// By this node's clock they are of the future.
    OfTheFutureHere,
    /// The replica's store has failed, or it refuses for a reason of its own.
    Refused,
    /// This node's store has failed.
    Disk,
    /// The replica did not answer in the time that it has in a round.
    Slow,
    /// The replica is busy.
    Busy,
    /// The replica could not be reached.
    Unreachable,
    /// The replica's answers make no sense.
    Senseless,
    /// The replica has acknowledged them, and lacks them.
    Forgotten,
    /// Both sides were given what the other has, and still differ.
    NotJoined,
}

impl Obstacle {
    /// Why this node has not taken a block.
    pub(super) fn here(status: &PutStatus) -> Obstacle {
        match status {
            PutStatus::Full => Obstacle::NoRoomHere,
            PutStatus::OverQuota { .. } => Obstacle::OverQuotaHere,
            PutStatus::NotAdmitted => Obstacle::OfTheFutureHere,
            _ => Obstacle::Disk,
        }
    }

    /// Why a replica has not taken a block.
    pub(super) fn there(status: &PutStatus) -> Obstacle {
        match status {
            PutStatus::Full => Obstacle::NoRoom,
            PutStatus::OverQuota { .. } => Obstacle::OverQuota,
            PutStatus::NotAdmitted => Obstacle::OfTheFuture,
            _ => Obstacle::Refused,
        }
    }
}

impl From<SetBack> for Obstacle {
    fn from(why: SetBack) -> Obstacle {
        match why {
            SetBack::Full => Obstacle::NoRoom,
            SetBack::Slow => Obstacle::Slow,
            SetBack::Refuses => Obstacle::Refused,
            SetBack::Forgets => Obstacle::Forgotten,
        }
    }
}

/// In words that follow "copies are missing between this node and that one: ".
impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Obstacle::NoRoom => "it has no room",
            Obstacle::NoRoomHere => "this node has no room",
            Obstacle::OverQuota => "their publisher has used up its share of it",
            Obstacle::OverQuotaHere => "their publisher has used up its share of this node",
            Obstacle::OfTheFuture => {
                "by its clock they were written in the future: its clock is behind, or the \
                 writer's is ahead"
            }
            Obstacle::OfTheFutureHere => {
                "by this node's clock they were written in the future: the clock of that node, or \
                 of the writer, is ahead"
            }
            Obstacle::Refused => "it refuses them",
            Obstacle::Disk => "this node's disk does not read or take them",
            Obstacle::Slow => "it answers too slowly",
            Obstacle::Busy => "it is busy",
            Obstacle::Unreachable => "it does not answer",
            Obstacle::Senseless => "its answers make no sense",
            Obstacle::Forgotten => "it has acknowledged them and lacks them again",
            Obstacle::NotJoined => "it has other versions of them",
        })
    }
}
