//! The clock by which this node measures leases (`docs/design/dht.md`, rule R3).
//!
//! It counts seconds. It starts at the wall clock when the node first runs, and takes nothing
//! from it afterwards: it advances by the monotonic clock while the node runs and reaches other
//! nodes. A publisher cannot renew at a node that is off or cut off, so that time does not count
//! against a lease.
//!
//! **Invariants:** within one run the clock never goes back. After a crash it goes on from the
//! last save, at most a minute and a tick behind: leases get longer by that, never shorter.
//! Where the record is lost, or the stores have lost renewals, the ends of the leases held mean
//! nothing: a record that says otherwise is saved only when all leases have been extended durably,
//! and until then nothing expires.
//!
//! A node that reaches no other and never did is the first of its ring, and its clock runs. A ring
//! that shrinks to one node for good therefore keeps what it holds: from inside, that is the same
//! as a network that is down.

use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use atoll_env::Instant;

use crate::durable::DurableState;

/// The name of the record: 8 bytes of seconds, then a byte of flags.
const RECORD: &str = "lease-clock";
/// The flag of a node that has reached another.
const HAS_MET: u8 = 1;
/// The flag of a node whose leases are to be extended before any of them ends.
const MUST_EXTEND: u8 = 2;
/// The shortest lease that counts as one of `lease_secs`: copies are made, and clocks stand still,
/// at different moments.
pub(crate) fn least_lease(lease_secs: u64) -> u64 {
    lease_secs.saturating_sub(3600 + lease_secs / 100)
}

/// What a tick has found.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ticked {
    pub is_running: bool,
    /// Whether the node has ever reached another.
    pub has_met: bool,
}

/// See the module.
pub(crate) struct LeaseClock {
    state: Mutex<State>,
}

#[derive(Clone, Copy, Debug)]
struct State {
    /// What the clock said at `at`.
    reading: Duration,
    at: Instant,
    running: bool,
    /// Whether the node has ever reached another.
    has_met: bool,
    /// Whether the ends of the leases held are by a clock that is lost, or forgotten.
    must_extend: bool,
}

impl State {
    fn reading(&self, now: Instant) -> Duration {
        let passed = if self.running { now.since(self.at) } else { Duration::ZERO };
        self.reading.saturating_add(passed)
    }

    /// Goes on from `now` as a node that reaches others or does not.
    fn tick(&mut self, now: Instant, reaches: bool) {
        (self.reading, self.at) = (self.reading(now), now);
        self.has_met |= reaches;
        self.running = reaches || !self.has_met;
    }

    fn to_record(self) -> Vec<u8> {
        let mut record = self.reading.as_secs().to_be_bytes().to_vec();
        let flag = |is_set: bool, flag: u8| if is_set { flag } else { 0 };
        record.push(flag(self.has_met, HAS_MET) | flag(self.must_extend, MUST_EXTEND));
        record
    }
}

/// The seconds and the flags of a record; `None` if it is not one.
fn from_record(record: &[u8]) -> Option<(u64, u8)> {
    let (secs, flags) = record.split_first_chunk()?;
    (flags.len() == 1).then(|| (u64::from_be_bytes(*secs), flags[0]))
}

impl LeaseClock {
    /// The clock as an earlier incarnation left it, or else one that starts at `unix_secs`.
    pub(crate) fn resume(durable: &dyn DurableState, now: Instant, unix_secs: u64) -> LeaseClock {
        let record = durable.load(RECORD).as_deref().and_then(from_record);
        let (secs, flags) = record.unwrap_or((unix_secs, MUST_EXTEND));
        let (has_met, must_extend) = (flags & HAS_MET != 0, flags & MUST_EXTEND != 0);
        let reading = Duration::from_secs(secs);
        let state = State { reading, at: now, running: !has_met, has_met, must_extend };
        LeaseClock { state: Mutex::new(state) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder of this lock panics")
    }

    /// What the clock says, seconds.
    pub(crate) fn secs(&self, now: Instant) -> u64 {
        self.lock().reading(now).as_secs()
    }

    /// Whether all leases held must be extended before any of them may be taken for ended.
    pub(crate) fn must_extend(&self) -> bool {
        self.lock().must_extend
    }

    /// Notes whether they must; it is remembered from the next [`save`](LeaseClock::save) on.
    pub(crate) fn set_must_extend(&self, must_extend: bool) {
        self.lock().must_extend = must_extend;
    }

    /// Goes on from `now` as a node that reaches others or does not.
    pub(crate) fn tick(&self, now: Instant, reaches: bool) -> Ticked {
        let mut state = self.lock();
        state.tick(now, reaches);
        Ticked { is_running: state.running, has_met: state.has_met }
    }

    /// Makes what the clock says durable.
    ///
    /// # Errors
    /// What the system said, for people; the old record stays.
    pub(crate) async fn save(
        &self,
        durable: &dyn DurableState,
        now: Instant,
    ) -> Result<(), String> {
        let record = {
            let state = self.lock();
            State { reading: state.reading(now), ..*state }.to_record()
        };
        durable.save(RECORD, record).await
    }
}

#[cfg(test)]
mod tests {
    use crate::durable::MemoryState;

    use super::*;

    fn at(secs: u64) -> Instant {
        Instant::default() + Duration::from_secs(secs)
    }

    #[test]
    fn time_in_which_a_node_that_had_neighbours_reaches_none_does_not_count() {
        let clock = LeaseClock::resume(&MemoryState::default(), at(5), 1000);
        assert!(clock.must_extend());
        assert_eq!(clock.secs(at(15)), 1010, "the first of its ring");
        clock.lock().tick(at(15), true);
        clock.lock().tick(at(25), false);
        assert_eq!(clock.secs(at(500)), 1020, "cut off");
        clock.lock().tick(at(500), true);
        assert_eq!(clock.secs(at(510)), 1030);
    }

    #[test]
    fn the_clock_resumes_where_it_was_saved_whatever_the_wall_clock_says() {
        for (has_met, unix_secs) in [(true, 0), (false, 0), (true, u64::MAX), (false, 5_000)] {
            let durable = MemoryState::default();
            let (reading, at_first) = (Duration::from_secs(77), at(0));
            let must_extend = unix_secs == 0;
            let mut state = State { reading, at: at_first, running: true, has_met, must_extend };
            state.tick(at(3), has_met);
            let saved = durable.save(RECORD, state.to_record());
            futures_util::FutureExt::now_or_never(saved).expect("memory").expect("saved");
            let clock = LeaseClock::resume(&durable, at(0), unix_secs);
            assert_eq!(clock.must_extend(), must_extend);
            assert_eq!(clock.secs(at(9)), if has_met { 80 } else { 89 });
        }
    }

    #[test]
    fn a_record_that_is_none_counts_as_missing() {
        for bytes in [&[][..], &[1; 8], &[1; 10]] {
            assert_eq!(from_record(bytes), None);
        }
    }
}
