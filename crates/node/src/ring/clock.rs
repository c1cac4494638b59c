//! Warnings about wrong clocks: this machine's and those of other nodes.

use std::sync::Arc;
use std::time::Duration;

use atoll_env::{Env, sleep};
use atoll_net::Peer;
use atoll_overlay::Overlay;
use atoll_overlay::clock::ClockReport;

use crate::status::{Clock, WrongClock};

/// How often the clock is compared to log that it has become wrong, or right again.
const LOOK_EVERY: Duration = Duration::from_secs(30);

/// Contradicting clocks of which none is known to be right that are named.
const UNDECIDED_NAMED: usize = 3;

/// How this node's clock stands, for `status`.
pub(crate) fn status(report: &ClockReport) -> Clock {
    let clock = |(peer, off_ms): &(Peer, i64)| WrongClock {
        peer_id: crate::status::hex(&peer.id.0),
        addr: peer.addr.to_string(),
        off_secs: off_ms / 1000,
    };
    Clock {
        compared: report.compared,
        agreeing: report.agreeing,
        off_secs: -report.correction_ms / 1000,
        wrong: report.wrong.iter().map(clock).collect(),
        undecided: report.undecided.iter().map(clock).collect(),
    }
}

/// Warnings for people.
pub(crate) fn warnings(clock: &Clock) -> Vec<String> {
    let mut warnings = Vec::new();
    if clock.off_secs != 0 {
        warnings.push(format!(
            "this machine's clock is {} by those of other nodes ({} of {} contradict it): set it, \
             e.g. with `timedatectl set-ntp true`; until then this node uses their time",
            off(clock.off_secs),
            clock.compared - clock.agreeing,
            clock.compared,
        ));
    }
    for other in clock.undecided.iter().take(UNDECIDED_NAMED) {
        warnings.push(format!(
            "the clock of the node at {} is {} by this machine's, and too few others tell which is \
             right: set the wrong one, or they refuse each other's blocks",
            other.addr,
            off(other.off_secs)
        ));
    }
    for wrong in &clock.wrong {
        warnings.push(format!(
            "the clock of the node at {} is {}: tell its operator",
            wrong.addr,
            off(wrong.off_secs)
        ));
    }
    warnings
}

/// How far a clock is off, in words.
fn off(off_secs: i64) -> String {
    const UNITS: [(u64, &str); 3] = [(365 * 86_400, "years"), (86_400, "days"), (3600, "hours")];
    let secs = off_secs.unsigned_abs();
    let direction = if off_secs < 0 { "behind" } else { "ahead" };
    let fits = UNITS.iter().find(|(unit_secs, _)| secs >= 2 * unit_secs);
    let (unit_secs, unit) = fits.unwrap_or(&(60, "minutes"));
    format!("{} {unit} {direction}", secs / unit_secs)
}

/// Writes to the log what `status` would say when it changes, for ever.
pub(crate) async fn watch(env: Env, overlay: Arc<dyn Overlay>) {
    let mut before = false;
    loop {
        sleep(&*env, LOOK_EVERY).await;
        let clock = status(&overlay.clock());
        let is_wrong = clock.off_secs != 0;
        if is_wrong && !before {
            warnings(&clock).iter().for_each(|warning| tracing::warn!("{warning}"));
        } else if before && !is_wrong {
            tracing::info!("this machine's clock agrees with those of other nodes again");
        }
        before = is_wrong;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_clock_is_told_with_how_far_it_is_off_and_what_to_do() {
        let report = ClockReport {
            compared: 4,
            agreeing: 1,
            correction_ms: 56 * 365 * 86_400_000,
            ..ClockReport::default()
        };
        let told = warnings(&status(&report));
        assert_eq!(told.len(), 1);
        assert!(told[0].contains("clock is 56 years behind"), "{told:?}");
        assert!(told[0].contains("3 of 4") && told[0].contains("timedatectl"), "{told:?}");
        assert!(warnings(&status(&ClockReport::default())).is_empty());
    }

    #[test]
    fn other_nodes_with_wrong_clocks_are_named() {
        let peer =
            atoll_net::Peer { id: atoll_key::PeerId([7; 32]), addr: ([10, 1, 2, 3], 7543).into() };
        let wrong = vec![(peer, 11 * 60_000)];
        let report = ClockReport { compared: 3, agreeing: 2, wrong, ..ClockReport::default() };
        let told = warnings(&status(&report));
        assert_eq!(told.len(), 1);
        assert!(told[0].contains("10.1.2.3:7543 is 11 minutes ahead"), "{told:?}");
    }

    #[test]
    fn two_nodes_that_contradict_each_other_are_told_so() {
        let peer =
            atoll_net::Peer { id: atoll_key::PeerId([7; 32]), addr: ([10, 1, 2, 3], 7543).into() };
        let undecided = vec![(peer, 2 * 3_600_000)];
        let report = ClockReport { compared: 1, undecided, ..ClockReport::default() };
        let told = warnings(&status(&report));
        let said = "the clock of the node at 10.1.2.3:7543 is 2 hours ahead by this machine's";
        assert!(told[0].starts_with(said), "{told:?}");
    }
}
