//! Membership: joining a ring, leaving it, remembering peers and merging rings that lost sight of
//! each other.

pub(in crate::chord) mod lifecycle;
pub(in crate::chord) mod remembered;
pub(in crate::chord) mod ring_merge;

use remembered::RememberedPeers;
use ring_merge::Introductions;

/// The peers that a node remembers and the introductions that wait.
pub(in crate::chord) struct Membership {
    pub remembered: RememberedPeers,
    pub introductions: Introductions,
}
