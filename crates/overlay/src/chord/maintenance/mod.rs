//! Maintenance in the background: stabilising, verifying fingers, and how often.

pub(in crate::chord) mod interval;
pub(in crate::chord) mod upkeep;

use std::collections::BTreeSet;

use atoll_env::Task;

use crate::Node;
use interval::AdaptiveInterval;

/// The state that the periodic tasks share.
#[derive(Default)]
pub(in crate::chord) struct Maintenance {
    /// Virtual servers to be stabilised before the next period.
    pub to_stabilize: BTreeSet<u16>,
    /// Nudges under way, by sending virtual server and receiving node.
    pub nudging: BTreeSet<(u16, Node)>,
    /// How long the next periods are.
    pub interval: AdaptiveInterval,
    pub tasks: Vec<Task>,
}
