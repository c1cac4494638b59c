//! Trust: nodes are checked before they enter a table (CFS §4.4), and no single peer is believed.
//!
//! [`admission`] remembers checks and suspicions, [`checks`] queues checks and [`limiter`] limits
//! the work that peers may cause: plain data. [`verify`] makes the checks, [`audit`] cross-checks
//! successor lists, [`probe`] pings nodes that may have failed, [`reachability`] asks other
//! nodes whether a joining node can be reached and [`duplicates`] finds other processes of this
//! node's key.

pub mod admission;
pub(in crate::chord) mod audit;
pub(in crate::chord) mod audit_schedule;
pub(in crate::chord) mod checks;
pub(in crate::chord) mod duplicates;
pub(in crate::chord) mod limiter;
pub(in crate::chord) mod probe;
pub(in crate::chord) mod reachability;
pub(in crate::chord) mod verify;

use std::collections::BTreeSet;

use atoll_env::Instant;
use atoll_net::Peer;
use futures_channel::oneshot;

use crate::Node;
use checks::CheckQueue;
use duplicates::Duplicates;
use limiter::Limiter;

/// The node's pending checks, pings and limits, besides [`admission::PeerAdmission`].
pub(in crate::chord) struct PeerTrust {
    /// Claims of nodes that have to be checked.
    pub checks: CheckQueue<oneshot::Sender<bool>>,
    /// The pings that failure reports have caused.
    pub pings: Limiter,
    /// The introductions of others that were taken.
    pub introductions: Limiter,
    /// Nodes being pinged because they may have failed.
    pub probing: BTreeSet<Node>,
    /// A successor that says that it cannot reach this node, and that other nodes contradict.
    pub overruled: Option<Peer>,
    /// Whether any node was suspected when that was last asked.
    pub doubted: bool,
    /// Other processes of this node's key.
    pub duplicates: Duplicates,
}

impl PeerTrust {
    /// Of a process that has started at `now`.
    pub(in crate::chord) fn new(now: Instant) -> PeerTrust {
        PeerTrust {
            checks: CheckQueue::default(),
            pings: Limiter::default(),
            introductions: Limiter::default(),
            probing: BTreeSet::new(),
            overruled: None,
            doubted: false,
            duplicates: Duplicates::new(now),
        }
    }
}
