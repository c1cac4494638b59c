//! Lock leases, as file systems ask for them: which mount may do something that others may not do
//! at the same time.
//!
//! A lock is named by a key that its users agree on, and kept by the replica set of that key, in
//! memory and in a journal (`holdings::lock_leases`, `holdings::lease_journal`, `client::lock_leases`). The first 32 bytes of the key are the
//! hash of a block: the lock is kept by the nodes that hold the block, which its users have found
//! already ([`place`]). A holder has it for
//! [`LOCK_LEASE`] and renews it while it needs it: a lock whose holder has died, or is cut off,
//! ends without anybody's doing.
//!
//! The three times that make this safe:
//!
//! | | counted |
//! |---|---|
//! | a replica keeps a lease for [`LOCK_LEASE`] | from when it granted it |
//! | a holder relies on it for [`LOCK_HOLD`], one second less | from before it asked |
//! | a replica's grant counts when the replica has been in the replica set for [`SETTLE`], until it was away from it for as long | by the root's record |
//!
//! It does not know files, nor what a lock protects.

use std::time::Duration;

use atoll_key::Key;
use minicbor::{Decode, Encode};

/// How long a replica keeps a lease that is not renewed.
pub const LOCK_LEASE: Duration = Duration::from_secs(15);

/// How long a holder may rely on a lease, from before it asked for it. One second less than
/// replicas keep it: clocks that run at slightly different speeds disagree by far less.
pub const LOCK_HOLD: Duration = Duration::from_secs(14);

/// How often a holder renews a lease: a renewal that fails can be made again once.
pub const LOCK_RENEW_EVERY: Duration = Duration::from_secs(5);

/// How long a node must have belonged to a key's replica set before its grants count, and be away from it
/// before those of another one count instead. Longer than
/// [`LOCK_LEASE`], so that what nodes granted which belonged to it before has ended; the ten
/// seconds are those in which the former ones notice that they do not belong to it any more. A
/// guess: overlays notice a failure in some five seconds.
pub const SETTLE: Duration = Duration::from_secs(25);

/// The key of the block that stands where the lock of this key does. No node stands between the two,
/// so both have one root.
pub fn place(lock: &Key) -> Key {
    Key::hashed(*lock.0.first_chunk().expect("64 bytes"))
}

/// How a lock excludes others.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Encode, Decode)]
#[cbor(index_only)]
pub enum LockMode {
    /// Excludes exclusive holders.
    #[n(0)]
    Shared,
    /// Excludes all other holders.
    #[n(1)]
    Exclusive,
}

impl LockMode {
    /// Whether two holders can have the lock in these modes at a time.
    pub fn goes_with(self, other: LockMode) -> bool {
        self == LockMode::Shared && other == LockMode::Shared
    }
}

/// What is to become of a lock lease.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
#[cbor(index_only)]
pub enum LockStep {
    /// The holder gives it up.
    #[n(0)]
    Release,
    /// The holder does not have it, and wants it.
    #[n(1)]
    Take,
    /// The holder has it, and keeps it for another [`LOCK_LEASE`].
    #[n(2)]
    Renew,
    /// The holder shares it, and wants it for itself. If that fails, it shares it as before.
    #[n(3)]
    Upgrade,
}

impl LockStep {
    /// What undoes it where it was done in vain.
    pub(crate) fn undone(self) -> Option<(LockStep, LockMode)> {
        match self {
            LockStep::Take => Some((LockStep::Release, LockMode::Shared)),
            LockStep::Upgrade => Some((LockStep::Renew, LockMode::Shared)),
            LockStep::Release | LockStep::Renew => None,
        }
    }
}

/// A request for a lock lease.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LockLease {
    /// Which lock.
    pub key: Key,
    /// Which of the caller's holders asks: drawn at random, so that no two callers share one.
    pub holder: [u8; 16],
    /// Grows with each request of the holder's about this lock, by four at least: those between are
    /// the holder's node's, which asks a second time if need be, and undoes what was done in vain. A request that arrives after
    /// a later one is void.
    pub number: u64,
    /// What is asked.
    pub step: LockStep,
    /// In which mode; of no meaning for a release.
    pub mode: LockMode,
}

/// A lock lease that was granted, or was given up.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Encode, Decode)]
#[cbor(map)]
pub struct LockGrant {
    /// Another holder has asked for it in vain a short while ago.
    #[n(0)]
    pub is_wanted: bool,
}

/// Why a lock lease was not granted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Encode, Decode)]
pub enum LockRefusal {
    /// Another holder has it.
    #[error("another holder has the lock")]
    #[n(0)]
    Held,
    /// Too many members of the replica set do not answer, or are new to it: the lock can be had when
    /// they are back, or [`SETTLE`] after others have taken their places.
    #[error("the nodes that keep the lock do not answer, or have changed a moment ago")]
    #[n(1)]
    Settling,
    /// No majority of the nodes that should keep the lock can be found, or these have lost half of the
    /// network's nodes.
    #[error("no majority of the nodes that keep the lock: {0}")]
    #[n(2)]
    NoMajority(#[n(0)] String),
}
