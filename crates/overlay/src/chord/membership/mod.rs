//! Membership: joining a ring, leaving it, remembering peers and merging rings that lost sight of
//! each other.

pub(in crate::chord) mod lifecycle;
pub(in crate::chord) mod remembered;
pub(in crate::chord) mod ring_merge;
