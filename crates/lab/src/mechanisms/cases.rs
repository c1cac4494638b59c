//! Which mechanisms are switched off, and in which situation each should show.

use atoll_dht::DhtConfig;
use atoll_overlay::chord::{ChordConfig, TablePolicy};
use atoll_overlay::walk::Selection;

use super::situation::Situation::{
    self, Churn, Cold, Dead, DeadPuts, Lines, Lying, Popular, Rest, Stall, Wan,
};

/// A mechanism, and a situation that it is for.
#[derive(Clone, Copy)]
pub(super) struct Case {
    pub name: &'static str,
    pub situation: Situation,
    pub switch_off: fn(&mut ChordConfig, &mut DhtConfig),
    /// Whether a quick run makes it too.
    pub is_quick: bool,
}

const fn case(
    name: &'static str,
    situation: Situation,
    switch_off: fn(&mut ChordConfig, &mut DhtConfig),
) -> Case {
    Case { name, situation, switch_off, is_quick: false }
}

/// One that a quick run makes too.
const fn quick(
    name: &'static str,
    situation: Situation,
    switch_off: fn(&mut ChordConfig, &mut DhtConfig),
) -> Case {
    Case { name, situation, switch_off, is_quick: true }
}

pub(super) const CASES: &[Case] = &[
    // The cost of upkeep, and how well it keeps tables.
    quick("adaptive-interval", Rest, |chord, _| chord.mechanisms.adaptive_interval = false),
    case("audits", Rest, |chord, _| chord.mechanisms.audits = false),
    case("nudges", Churn, |chord, _| chord.mechanisms.nudges = false),
    case("adaptive-table", Churn, |chord, _| chord.table = TablePolicy::Fingers),
    case("exploration", Churn, |chord, _| chord.mechanisms.exploration = false),
    quick("exploration", Cold, |chord, _| chord.mechanisms.exploration = false),
    case("guesses", Churn, |chord, _| chord.mechanisms.guesses = false),
    case("guesses", Wan, |chord, _| chord.mechanisms.guesses = false),
    case("confirmed-absence", Churn, |_, dht| dht.mechanisms.confirmed_absence = false),
    // Nodes that died a moment ago.
    quick("silence", Dead, |chord, _| chord.mechanisms.silence = false),
    case("failure-reports", Dead, |_, dht| dht.mechanisms.failure_reports = false),
    case("failure-reports", Churn, |_, dht| dht.mechanisms.failure_reports = false),
    case("hedged-walks", Dead, |_, dht| dht.mechanisms.hedged_walks = false),
    case("hedged-fetches", Dead, |_, dht| dht.mechanisms.hedged_fetches = false),
    quick("hedged-puts", DeadPuts, |_, dht| dht.mechanisms.hedged_puts = false),
    case("silence", DeadPuts, |chord, _| chord.mechanisms.silence = false),
    case("healing", Dead, |_, dht| dht.mechanisms.healing = false),
    case("side-by-side", Dead, |_, dht| dht.mechanisms.side_by_side = false),
    case("expected-replicas", DeadPuts, |_, dht| dht.mechanisms.expected_replicas = false),
    // Liars.
    quick("routes", Lying, |_, dht| dht.routes = 1),
    case("density", Lying, |_, dht| dht.mechanisms.density = false),
    quick("conduct", Lying, |chord, _| chord.mechanisms.conduct = false),
    case("confirmed-absence", Lying, |_, dht| dht.mechanisms.confirmed_absence = false),
    case("hedged-walks", Lying, |_, dht| dht.mechanisms.hedged_walks = false),
    // Distances.
    quick("selection", Wan, |chord, dht| {
        chord.selection = Selection::NearestKey;
        dht.selection = Selection::NearestKey;
    }),
    case("guessed-sets", Wan, |_, dht| dht.mechanisms.guessed_sets = false),
    case("busy-replicas", Wan, |_, dht| dht.mechanisms.busy_replicas = false),
    case("hedged-fetches", Wan, |_, dht| dht.mechanisms.hedged_fetches = false),
    case("block-times", Wan, |_, dht| dht.mechanisms.block_times = false),
    case("verified-acks", Wan, |_, dht| dht.mechanisms.verified_acks = false),
    case("confirmations", Wan, |_, dht| dht.mechanisms.confirmations = false),
    // One block that everybody reads.
    quick("path-cache", Popular, |_, dht| dht.cache_bytes = 0),
    case("second-question", Popular, |_, dht| dht.cache_asks = 1),
    quick("equal-replicas", Popular, |_, dht| dht.mechanisms.equal_replicas = false),
    case("busy-replicas", Popular, |_, dht| dht.mechanisms.busy_replicas = false),
    case("guessed-sets", Popular, |_, dht| dht.mechanisms.guessed_sets = false),
    // Nodes that answer late now and then.
    quick("hedged-fetches", Stall, |_, dht| dht.mechanisms.hedged_fetches = false),
    case("hedged-walks", Stall, |_, dht| dht.mechanisms.hedged_walks = false),
    case("block-times", Stall, |_, dht| dht.mechanisms.block_times = false),
    case("silence", Stall, |chord, _| chord.mechanisms.silence = false),
    case("hedged-puts", Stall, |_, dht| dht.mechanisms.hedged_puts = false),
    // Uplinks that are full.
    quick("line-window", Lines, |_, dht| dht.mechanisms.line_window = false),
    case("line-rate", Lines, |_, dht| dht.mechanisms.line_rate = false),
    case("hedged-puts", Lines, |_, dht| dht.mechanisms.hedged_puts = false),
    case("in-flight", Lines, |_, dht| dht.mechanisms.in_flight = false),
    case("block-times", Lines, |_, dht| dht.mechanisms.block_times = false),
    case("busy-replicas", Lines, |_, dht| dht.mechanisms.busy_replicas = false),
];
