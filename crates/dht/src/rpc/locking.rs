//! Lock leases at a replica: the headers of `LOCK`.

use atoll_key::Key;
use minicbor::{Decode, Encode};

use super::{Message, encoding};
use crate::locks::{LockLease, LockMode, LockStep};

/// `LOCK`: take, renew or give up a lock lease. The fields are those of [`LockLease`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Lock {
    /// Which lock.
    #[cbor(n(0), with = "encoding::key")]
    pub key: Key,
    /// Which of the caller's holders asks.
    #[cbor(n(1), with = "minicbor::bytes")]
    pub holder: [u8; 16],
    /// Grows with each request of the holder's about this lock, by four at least.
    #[n(2)]
    pub number: u64,
    /// What is asked.
    #[n(3)]
    pub step: LockStep,
    /// In which mode.
    #[n(4)]
    pub mode: LockMode,
}

impl From<LockLease> for Lock {
    fn from(LockLease { key, holder, number, step, mode }: LockLease) -> Lock {
        Lock { key, holder, number, step, mode }
    }
}

impl From<Lock> for LockLease {
    fn from(Lock { key, holder, number, step, mode }: Lock) -> LockLease {
        LockLease { key, holder, number, step, mode }
    }
}

/// The answer to a [`Lock`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct LockReply {
    /// What became of it here.
    #[n(0)]
    pub status: LockStatus,
    /// Another holder has asked for the lock in vain a short while ago.
    #[n(1)]
    pub is_wanted: bool,
    /// The tag of the lock's replica set, if this node is its root, and has noted that it is.
    #[n(2)]
    pub set: Option<u64>,
    /// Of the root: which members of that set, the root being the lowest bit, are its voters
    /// (`holdings::set_history`); none if it is too new to have any, or if a lease is given up.
    #[n(3)]
    pub settled: u64,
}

/// What became of a lock lease at one replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(index_only)]
pub enum LockStatus {
    /// It is the caller's, or was given up.
    #[n(0)]
    Granted,
    /// It is another holder's, or the request has come too late.
    #[n(1)]
    Held,
    /// This node was started a moment ago, and may have granted it to another holder before.
    #[n(2)]
    Settling,
    /// This node sees half of the network's nodes or fewer.
    #[n(3)]
    Minority,
}

impl Message for Lock {}

impl Message for LockReply {}
