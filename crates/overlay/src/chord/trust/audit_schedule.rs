//! When a virtual server is audited ([`super::audit`]): soon after a join, then as long as audits
//! find something; each that finds nothing doubles the time to the next. Plain data.

use std::collections::BTreeSet;

use atoll_key::PeerId;

/// After its first audit a node leaves out one less than twice so many. A guess.
const FIRST_INTERVAL: u32 = 2;
/// The most audits that are left out while nothing is found.
const MAX_INTERVAL: u32 = 32;
/// So many findings of one audit are many.
const MUCH: usize = 3;
/// The most peers remembered to which this node has introduced itself.
const MAX_INTRODUCED: usize = 64;

/// When a virtual server is audited next.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(in crate::chord) struct AuditSchedule {
    interval: u32,
    left: u32,
    /// Whether an audit found more than newcomers and failures explain, and each one since then
    /// something.
    pub(in crate::chord) is_alert: bool,
    /// Peers to which this node has introduced itself. If one of them still does not know it, that
    /// does not count as a finding.
    introduced: BTreeSet<PeerId>,
}

impl Default for AuditSchedule {
    fn default() -> AuditSchedule {
        AuditSchedule {
            interval: FIRST_INTERVAL,
            left: 0,
            is_alert: false,
            introduced: BTreeSet::new(),
        }
    }
}

impl AuditSchedule {
    /// Counts one tick; returns whether an audit is due.
    pub(in crate::chord) fn take_due(&mut self) -> bool {
        let is_due = self.left == 0;
        self.left = self.left.saturating_sub(1);
        is_due
    }

    /// Records that this node introduces itself to the peer; returns whether it is the first time
    /// that is remembered.
    pub(in crate::chord) fn record_introduction(&mut self, peer: PeerId) -> bool {
        if self.introduced.len() >= MAX_INTRODUCED {
            self.introduced.clear();
        }
        self.introduced.insert(peer)
    }

    /// An audit has ended with so many findings.
    pub(in crate::chord) fn ended(&mut self, found: usize) {
        self.interval = if found == 0 { (self.interval * 2).min(MAX_INTERVAL) } else { 1 };
        self.left = self.interval - 1;
        self.is_alert = found >= if self.is_alert { 1 } else { MUCH };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn audits_grow_rare_while_nothing_is_found_and_come_back_at_once() {
        let mut audits = AuditSchedule::default();
        let mut waits = |found: usize| {
            let mut ticks = 1;
            while !audits.take_due() {
                ticks += 1;
            }
            audits.ended(found);
            ticks
        };
        let calm = [0; 7].map(&mut waits);
        assert_eq!(calm, [1, 4, 8, 16, 32, 32, 32]);
        assert_eq!([1, 1, 0, 0].map(waits), [32, 1, 1, 2]);
    }
}
