//! Switches for what this crate adds to the papers, so that the laboratory can measure what
//! each mechanism buys (`docs/design/mechanisms.md`). A node runs with all of them on.

/// One switch a mechanism; on by default. Caching, diversion and the number of routes have
/// settings of their own in [`crate::DhtConfig`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mechanisms {
    /// A lookup asks another node for the way when an answer is overdue.
    pub hedged_walks: bool,
    /// A lookup asks another replica when one is slow or overdue.
    pub hedged_fetches: bool,
    /// Blocks have times of their own, and more patience over idle connections, beside those
    /// of short answers (`block_times`).
    pub block_times: bool,
    /// A replica that is sending blocks counts as farther away.
    pub busy_replicas: bool,
    /// Replicas about equally near share the load at random.
    pub equal_replicas: bool,
    /// The routing table's guess of a replica set is enough to choose the nearest of it.
    pub guessed_sets: bool,
    /// A replica that turns out to lack a block gets it from the reader.
    pub healing: bool,
    /// A signed block's readers do not wait for replicas once a majority agrees.
    pub signed_majority: bool,
    /// A replica is asked whether it has what the root acknowledged.
    pub verified_acks: bool,
    /// Slow nodes are not waited for when blocks are stored.
    pub hedged_puts: bool,
    /// A node is given the time that the line needs before it counts as slow.
    pub line_rate: bool,
    /// No more is sent at a time than the line carries in two seconds.
    pub line_window: bool,
    /// Repair leaves alone what a put is sending.
    pub in_flight: bool,
    /// Each peer has so much time in a round of repair.
    pub peer_budgets: bool,
    /// A slow exchange of repair does not hold up the next.
    pub side_by_side: bool,
    /// Comparing and proving for others is limited for each peer.
    pub work_limits: bool,
    /// No version of a signed block is read below one seen before.
    pub seen_versions: bool,
    /// Copies are charged to the publisher that two others name.
    pub vouching: bool,
    /// The publisher of a receipt is asked whether it made it.
    pub confirmations: bool,
    /// Replicas are asked for room for a publisher near its limit.
    pub room_questions: bool,
    /// A put counts on as many replicas as there ever were, not on those it sees.
    pub expected_replicas: bool,
    /// A block is said not to exist only when two routes agree.
    pub confirmed_absence: bool,
}

impl Default for Mechanisms {
    fn default() -> Mechanisms {
        Mechanisms {
            hedged_walks: true,
            hedged_fetches: true,
            block_times: true,
            busy_replicas: true,
            equal_replicas: true,
            guessed_sets: true,
            healing: true,
            signed_majority: true,
            verified_acks: true,
            hedged_puts: true,
            line_rate: true,
            line_window: true,
            in_flight: true,
            peer_budgets: true,
            side_by_side: true,
            work_limits: true,
            seen_versions: true,
            vouching: true,
            confirmations: true,
            room_questions: true,
            expected_replicas: true,
            confirmed_absence: true,
        }
    }
}
