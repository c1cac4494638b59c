//! Switches for this crate's additions to the papers, so that the laboratory can measure the
//! effect of each mechanism (`docs/design/mechanisms.md`). A node runs with all of them on.

/// One switch a mechanism; on by default.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mechanisms {
    /// Peers that were caught lying are asked last ([`crate::peer_book`]).
    pub conduct: bool,
    /// Peers that left a call unanswered are asked last.
    pub silence: bool,
    /// Nodes that the table takes for a key's root are asked before the way is.
    pub guesses: bool,
    /// Successor lists are cross-checked with others'.
    pub audits: bool,
    /// A newcomer that its successor rejects asks others before it gives up.
    pub reachability_votes: bool,
    /// Stabilize rounds become rarer while nothing changes.
    pub adaptive_interval: bool,
    /// Predecessors are told at once when a list changes, and stabilize then.
    pub nudges: bool,
    /// The adaptive table asks peers about nodes with the rest of its budget.
    pub exploration: bool,
    /// The network's time is the median of the peers' clocks.
    pub clocks: bool,
    /// Reports of death and introductions are limited for each peer.
    pub report_limits: bool,
}

impl Default for Mechanisms {
    fn default() -> Mechanisms {
        Mechanisms {
            conduct: true,
            silence: true,
            guesses: true,
            audits: true,
            reachability_votes: true,
            adaptive_interval: true,
            nudges: true,
            exploration: true,
            clocks: true,
            report_limits: true,
        }
    }
}
