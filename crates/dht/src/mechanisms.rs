//! Switches for what this crate adds to the papers, so that the laboratory can measure what
//! each mechanism buys (`docs/design/mechanisms.md`). A node runs with all of them on.

macro_rules! switches {
    ($($(#[$doc:meta])* $mechanism:ident,)*) => {
        /// One switch a mechanism; on by default. Caching, diversion and the number of routes have
        /// settings of their own in [`crate::DhtConfig`].
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub struct Mechanisms {
            $($(#[$doc])* pub $mechanism: bool,)*
        }

        impl Default for Mechanisms {
            fn default() -> Mechanisms {
                Mechanisms { $($mechanism: true,)* }
            }
        }
    };
}

switches! {
    /// A lookup asks another node for the way when an answer is overdue.
    hedged_walks,
    /// A lookup doubts roots and lists too sparse for the ring's density.
    density,
    /// A lookup tells the previous hop of dead nodes that it named (CFS Figure 5, `alert`).
    failure_reports,
    /// A lookup asks another replica when one is slow or overdue.
    hedged_fetches,
    /// Blocks have times of their own, and more patience over idle connections, beside those
    /// of short answers (`block_times`).
    block_times,
    /// A replica that is sending blocks counts as farther away.
    busy_replicas,
    /// Replicas about equally near share the load at random.
    equal_replicas,
    /// The routing table's guess of a replica set is enough to choose the nearest of it.
    guessed_sets,
    /// A replica that turns out to lack a block gets it from the reader.
    healing,
    /// A mutable block's readers do not wait for replicas once a majority agrees.
    mutable_majority,
    /// A block whose versions are joined is shown without asking while its replicas' promises last.
    call_backs,
    /// A replica is asked whether it has what the root acknowledged.
    verified_acks,
    /// Slow nodes are not waited for when blocks are stored.
    hedged_puts,
    /// A node whose answer is overdue is pinged on the side, and passed over if it leaves that unanswered too.
    side_pings,
    /// A node is given the time that the line needs before it counts as slow.
    line_rate,
    /// No more is sent at a time than the line carries in two seconds.
    line_window,
    /// Repair leaves alone what a put is sending.
    in_flight,
    /// Each peer has so much time in a round of repair.
    peer_budgets,
    /// A slow exchange of repair does not hold up the next.
    side_by_side,
    /// Comparing and proving for others is limited for each peer.
    work_limits,
    /// The replica sets of mutable blocks are remembered (Pastis §3.3).
    known_sets,
    /// Replica sets of mutable blocks are looked up again before they are forgotten.
    sets_ahead,
    /// Mutable blocks that are put in an order go together to a replica set that they have in common.
    joint_puts,
    /// The nodes that are named as a mutable block's replica set are asked for it while the lookup goes on.
    early_questions,
    /// No version of a mutable block is read below one seen before.
    seen_versions,
    /// Copies are charged to the publisher that two others name.
    vouching,
    /// The publisher of a receipt is asked whether it made it.
    confirmations,
    /// Replicas are asked for room for a publisher near its limit.
    room_questions,
    /// A put counts on as many replicas as there ever were, not on those it sees.
    expected_replicas,
    /// A block is said not to exist only when two routes agree.
    confirmed_absence,
}

impl Mechanisms {
    /// Without a lookup's second question when the first answer is late.
    pub fn without_hedged_lookups() -> Mechanisms {
        Mechanisms { hedged_walks: false, hedged_fetches: false, ..Mechanisms::default() }
    }
}
