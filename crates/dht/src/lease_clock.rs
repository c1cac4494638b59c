//! The clock by which this node measures leases (`docs/design/dht.md`, rule R3).
//!
//! It counts seconds. It starts at the wall clock when the node first runs, and takes nothing
//! from it afterwards: it advances by the monotonic clock while the node runs and reaches other
//! nodes. A publisher cannot renew at a node that is off or cut off, so that time does not count
//! against a lease.
//!
//! **Invariants:** within one run the clock never goes back. After a crash it goes on from the
//! last save, at most [`SAVE_EVERY`] and a tick behind: leases get longer by that, never shorter.
//! Where the record is lost, or the stores have lost renewals, the ends of the leases held mean
//! nothing: a record that says otherwise is saved only when all leases have been extended durably,
//! and until then nothing expires.
//!
//! A node that reaches no other and never did is the first of its ring, and its clock runs. A ring
//! that shrinks to one node for good therefore keeps what it holds: from inside, that is the same
//! as a network that is down.

use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use atoll_env::{Instant, sleep};
use atoll_key::{Key, KeyRange};
use atoll_store::{BlockStore, Owner, StoreError};

use crate::context::Context;
use crate::durable::DurableState;

/// The name of the record: 8 bytes of seconds, then a byte of flags.
const RECORD: &str = "lease-clock";
/// The flag of a node that has reached another.
const HAS_MET: u8 = 1;
/// The flag of a node whose leases are to be extended before any of them ends.
const MUST_EXTEND: u8 = 2;
/// How often the clock looks whether the node reaches others.
const TICK: Duration = Duration::from_secs(10);
/// How often it is saved.
const SAVE_EVERY: Duration = Duration::from_secs(60);
/// How long to wait when leases could not be extended.
const EXTEND_AGAIN: Duration = Duration::from_secs(60);

/// Blocks whose leases are extended at once.
const LEASES_AT_ONCE: usize = 1024;

/// The shortest lease that counts as one of `lease_secs`: copies are made, and clocks stand still,
/// at different moments.
pub(crate) fn least_lease(lease_secs: u64) -> u64 {
    lease_secs.saturating_sub(3600 + lease_secs / 100)
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
    pub fn resume(durable: &dyn DurableState, now: Instant, unix_secs: u64) -> LeaseClock {
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
    pub fn secs(&self, now: Instant) -> u64 {
        self.lock().reading(now).as_secs()
    }

    /// Whether all leases held must be extended before any of them may be taken for ended.
    pub fn must_extend(&self) -> bool {
        self.lock().must_extend
    }

    /// Notes whether they must; it is remembered from the next [`save`] on.
    pub fn set_must_extend(&self, must_extend: bool) {
        self.lock().must_extend = must_extend;
    }
}

/// Makes what the clock says durable.
///
/// # Errors
/// What the system said, for people; the old record stays.
async fn save(context: &Context) -> Result<(), String> {
    let record = {
        let state = context.clock.lock();
        let reading = state.reading(context.env.now());
        State { reading, ..*state }.to_record()
    };
    context.durable.save(RECORD, record).await
}

/// Keeps the clock going, for ever.
pub(crate) async fn run(context: Arc<impl Deref<Target = Context>>) {
    while context.clock.must_extend() {
        match extend_leases(&context).await {
            Ok(0) => {}
            Ok(count) => tracing::warn!(count, "the lease clock is new; all leases begin again"),
            Err(error) => {
                tracing::error!(%error, "leases could not be extended; none ends until they are");
                sleep(&*context.env, EXTEND_AGAIN).await;
            }
        }
    }
    let mut saved: Option<(Instant, bool)> = None;
    loop {
        let now = context.env.now();
        let state = {
            let mut state = context.clock.lock();
            state.tick(now, !context.overlay.is_alone());
            *state
        };
        // The first neighbour is remembered at once: a node that forgets it would take the next
        // outage for a ring of one.
        let is_due = saved.is_none_or(|(at, met)| {
            now.since(at) >= SAVE_EVERY && state.running || met != state.has_met
        });
        if is_due {
            match save(&context).await {
                Ok(()) => saved = Some((now, state.has_met)),
                Err(error) => tracing::error!(%error, "the lease clock could not be saved"),
            }
        }
        sleep(&*context.env, TICK).await;
    }
}

/// Gives every block held, and every record of one that another node keeps for this one or it
/// for another, at least one whole lease from now on; says how many blocks are held. A crash
/// before that is durable leaves a record by which the next start does it.
pub(crate) async fn extend_leases(context: &Context) -> Result<u64, StoreError> {
    context.clock.set_must_extend(true);
    save_clock(context).await?;
    let expiry = context.expiry(context.config.lease.as_secs());
    let pointers = context.durable.pointers();
    let extended = extend_all(&*context.store, expiry)?;
    extend_all(&*pointers, expiry)?;
    context.store.flush().await?;
    pointers.flush().await?;
    context.clock.set_must_extend(false);
    save_clock(context).await?;
    Ok(extended)
}

async fn save_clock(context: &Context) -> Result<(), StoreError> {
    save(context).await.map_err(StoreError::Io)
}

/// Extends all leases in a store.
fn extend_all(store: &dyn BlockStore, expiry: u64) -> Result<u64, StoreError> {
    let (mut after, mut extended) = (Key::MAX, 0);
    loop {
        let infos = store.list(KeyRange::new(after, Key::MAX), LEASES_AT_ONCE)?;
        let keys: Vec<Key> = infos.iter().map(|info| info.key).collect();
        store.renew(&keys, expiry, Owner::NOBODY)?;
        extended += keys.len() as u64;
        match keys.last() {
            Some(last) if *last != Key::MAX && keys.len() == LEASES_AT_ONCE => after = *last,
            _ => return Ok(extended),
        }
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
