//! The journal of what this node's next incarnation must know of lock leases and call-back promises:
//! which were granted, and since when nodes belong to the replica sets whose root this node is.
//!
//! A node that was killed and started again on the same machine goes on as if it had not been away. What
//! an answer depends on is written before the answer leaves; what was not written was not answered. A
//! node that recovers nothing says for a lease's time that it may have forgotten some, and does
//! so again if it is killed within that time.
//!
//! Invariants:
//!
//! - A record is kept for [`GENERATION`] at least, which is longer than leases and promises last. Each
//!   generation begins with what lasts longer.
//! - A record that cannot be read makes all of the journal void.
//!
//! It does not know where the records are, nor when a lease may be granted.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use atoll_env::{BoxFuture, Instant};
use atoll_net::header::WirePeer;
use minicbor::{Decode, Encode};

use super::set_history::Sets;
use crate::journal::Journal;
use crate::locks::{LOCK_LEASE, LockMode};
use crate::rpc::{PROMISE_TIME, from_header, to_header};

/// Records are kept for this time at least.
const GENERATION: Duration = Duration::from_secs(20);
const _: () = assert!(GENERATION.as_secs() > LOCK_LEASE.as_secs());
const _: () = assert!(GENERATION.as_secs() > PROMISE_TIME.as_secs());
/// What replica sets were is noted for so long after a lock was asked for last. A guess: nodes whose locks
/// nobody uses write nothing.
const USED_FOR: Duration = Duration::from_secs(3600);
/// How often it is noted that they are as they were and have been confirmed, at most.
const NOTE_EVERY: Duration = Duration::from_secs(1);

/// What stands in the journal. Times are nanoseconds of [`Journal::now`].
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
enum Record {
    /// A generation begins.
    #[n(0)]
    Begin {
        /// When.
        #[n(0)]
        at: u64,
        /// Until when leases and promises may last that are not in the journal.
        #[n(1)]
        forgotten_until: u64,
    },
    /// A lock lease was granted or given up.
    #[n(1)]
    Lease(#[n(0)] LeaseRecord),
    /// A promise was made.
    #[n(2)]
    Promise(#[n(0)] PromiseRecord),
    /// The replica sets whose root this node is have changed, or their places were confirmed since.
    #[n(3)]
    Sets(#[n(0)] Sets),
}

/// A lock lease, as `holdings::lock_leases` has it.
#[derive(Clone, Copy, Debug, PartialEq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct LeaseRecord {
    #[cbor(n(0), with = "minicbor::bytes")]
    pub key: [u8; 64],
    #[cbor(n(1), with = "minicbor::bytes")]
    pub peer: [u8; 32],
    #[cbor(n(2), with = "minicbor::bytes")]
    pub holder: [u8; 16],
    #[n(3)]
    pub number: u64,
    /// `None`: it was given up.
    #[n(4)]
    pub mode: Option<LockMode>,
    #[n(5)]
    pub until: u64,
}

/// A promise, as `holdings::promises` has it.
#[derive(Clone, Copy, Debug, PartialEq, Encode, Decode)]
#[cbor(map)]
pub(crate) struct PromiseRecord {
    #[cbor(n(0), with = "minicbor::bytes")]
    pub key: [u8; 64],
    #[n(1)]
    pub peer: WirePeer,
    #[n(2)]
    pub number: u64,
    #[n(3)]
    pub until: u64,
}

/// What an incarnation begins with.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Recovered {
    /// Until when leases and promises may last that are not known.
    pub forgotten_until: Instant,
    pub leases: Vec<LeaseRecord>,
    pub promises: Vec<PromiseRecord>,
    pub sets: Sets,
}

/// See the module.
pub(crate) struct LeaseJournal {
    journal: Arc<dyn Journal>,
    forgotten_until: Instant,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// When the present generation began.
    began: Instant,
    /// When a lock was asked for last.
    used_at: Option<Instant>,
    /// The replica sets as they were written last; `None` if they may be others by now.
    sets: Option<Sets>,
    /// When they were written last.
    noted_at: Instant,
}

impl LeaseJournal {
    /// Goes on with what earlier incarnations have left. If that is nothing, an earlier one
    /// `may_have_granted` leases.
    pub(crate) fn open(
        journal: Arc<dyn Journal>,
        may_have_granted: bool,
    ) -> (LeaseJournal, Recovered) {
        let now = journal.now();
        let records = journal.recover();
        let read = records.and_then(|records| {
            let records: Option<Vec<Record>> =
                records.iter().map(|bytes| from_header(bytes).ok()).collect();
            recovered(records?)
        });
        // Times that are to come are of another clock, as in a container that shares the machine's boot and
        // counts its own time.
        let lasting = LOCK_LEASE.max(PROMISE_TIME);
        let read = read.filter(|(began, known)| {
            let is_past = *began <= now && known.sets.confirmed() <= now;
            is_past && known.forgotten_until <= now + lasting
        });
        let mut state = State::default();
        let is_whole = read.is_some();
        let recovered = match read {
            Some((began, recovered)) => {
                state.began = began;
                // Whether or not a lock is asked for soon.
                state.used_at = (!recovered.sets.is_empty()).then_some(now);
                recovered
            }
            None => {
                let forgotten_until = if may_have_granted { now + lasting } else { now };
                Recovered { forgotten_until, ..Recovered::default() }
            }
        };
        let forgotten_until = recovered.forgotten_until;
        let lease_journal = LeaseJournal { journal, forgotten_until, state: Mutex::new(state) };
        if !is_whole {
            lease_journal.begin(&mut lease_journal.state(), now);
        }
        (lease_journal, recovered)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder of this lock panics")
    }

    /// The time by which leases and promises are measured.
    pub(crate) fn now(&self) -> Instant {
        self.journal.now()
    }

    /// How long leases and promises may still last that this node does not know of.
    pub(crate) fn forgotten(&self) -> Duration {
        self.forgotten_until.since(self.now())
    }

    /// Begins a generation.
    fn begin(&self, state: &mut State, now: Instant) {
        state.began = now;
        let forgotten_until = self.forgotten_until.as_nanos();
        self.push(&Record::Begin { at: now.as_nanos(), forgotten_until });
        if let Some(sets) = &state.sets {
            self.push(&Record::Sets(sets.clone()));
        }
    }

    fn push(&self, record: &Record) {
        self.journal.append(to_header(record).to_vec());
    }

    fn append(&self, state: &mut State, now: Instant, record: &Record) {
        if now.since(state.began) >= GENERATION {
            self.journal.begin_generation();
            self.begin(state, now);
        }
        self.push(record);
    }

    pub(crate) fn lease(&self, lease: LeaseRecord) {
        self.append(&mut self.state(), self.now(), &Record::Lease(lease));
    }

    pub(crate) fn promise(&self, promise: PromiseRecord) {
        self.append(&mut self.state(), self.now(), &Record::Promise(promise));
    }

    /// Notes that a lock is asked for.
    pub(crate) fn note_use(&self) {
        self.state().used_at = Some(self.now());
    }

    /// Notes how the replica sets are `now`; `changed` or not since this was called last.
    pub(crate) fn note_sets(&self, now: Instant, changed: bool, sets: impl FnOnce() -> Sets) {
        let mut state = self.state();
        if state.used_at.is_none_or(|at| now.since(at) >= USED_FOR) {
            state.sets = None;
        } else if changed || state.sets.is_none() || now.since(state.noted_at) >= NOTE_EVERY {
            let sets = sets();
            // Before a new generation begins: it begins with them.
            state.sets = Some(sets.clone());
            state.noted_at = now;
            self.append(&mut state, now, &Record::Sets(sets));
        }
    }

    /// Resolves when all that was noted before is what the next incarnation will know.
    ///
    /// # Errors
    /// If it may not be; what the system said, for people.
    pub(crate) fn written(&self) -> BoxFuture<'static, Result<(), String>> {
        self.journal.written()
    }
}

/// When the last generation began, and what the records say.
fn recovered(records: Vec<Record>) -> Option<(Instant, Recovered)> {
    let mut began = None;
    let mut all = Recovered::default();
    for record in records {
        match record {
            Record::Begin { at, forgotten_until } => {
                began = Some(Instant(at));
                all.forgotten_until = all.forgotten_until.max(Instant(forgotten_until));
            }
            Record::Lease(lease) => all.leases.push(lease),
            Record::Promise(promise) => all.promises.push(promise),
            Record::Sets(sets) => all.sets = sets,
        }
    }
    Some((began?, all))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    /// A journal of which each generation is known, at a time that is set.
    #[derive(Default)]
    struct Manual {
        now: AtomicU64,
        is_lost: bool,
        generations: Mutex<Vec<Vec<Vec<u8>>>>,
    }

    impl Manual {
        fn at(&self, secs: u64) {
            self.now.store(secs * 1_000_000_000, Ordering::Relaxed);
        }

        /// The journal as the next incarnation finds it.
        fn killed(&self, is_lost: bool) -> Arc<Manual> {
            let generations = self.generations.lock().expect("no panics").clone();
            let now = AtomicU64::new(self.now.load(Ordering::Relaxed));
            Arc::new(Manual { now, is_lost, generations: Mutex::new(generations) })
        }
    }

    impl Journal for Manual {
        fn now(&self) -> Instant {
            Instant(self.now.load(Ordering::Relaxed))
        }

        fn recover(&self) -> Option<Vec<Vec<u8>>> {
            let mut generations = self.generations.lock().expect("no panics");
            if self.is_lost {
                generations.clear();
            }
            let kept = generations.len().saturating_sub(2);
            (!generations.is_empty()).then(|| generations[kept..].concat())
        }

        fn append(&self, record: Vec<u8>) {
            let mut generations = self.generations.lock().expect("no panics");
            if generations.is_empty() {
                generations.push(Vec::new());
            }
            generations.last_mut().expect("there is one").push(record);
        }

        fn begin_generation(&self) {
            self.generations.lock().expect("no panics").push(Vec::new());
        }

        fn written(&self) -> BoxFuture<'static, Result<(), String>> {
            Box::pin(async { Ok(()) })
        }
    }

    fn at(secs: u64) -> Instant {
        Instant::default() + Duration::from_secs(secs)
    }

    fn lease(number: u64) -> LeaseRecord {
        let (key, peer, holder) = ([1; 64], [2; 32], [3; 16]);
        LeaseRecord { key, peer, holder, number, mode: Some(LockMode::Exclusive), until: 9 }
    }

    #[test]
    fn records_are_there_for_longer_than_leases_last_and_sets_for_ever() {
        let files = Arc::new(Manual::default());
        let (journal, first) = LeaseJournal::open(files.clone(), false);
        assert_eq!(first, Recovered::default());
        let sets = Sets::of_one_confirmed(at(3));
        journal.note_use();
        for secs in 0..100 {
            files.at(secs);
            if secs == 3 {
                journal.note_sets(at(3), true, || sets.clone());
            }
            journal.lease(lease(secs));
            let (_, recovered) = LeaseJournal::open(files.killed(false), true);
            let numbers: Vec<u64> = recovered.leases.iter().map(|lease| lease.number).collect();
            let oldest = secs.saturating_sub(LOCK_LEASE.as_secs());
            assert!((oldest..=secs).all(|number| numbers.contains(&number)), "{secs}: {numbers:?}");
            assert!(numbers.len() <= 40 && recovered.forgotten_until == Instant::default());
            assert_eq!(recovered.sets == sets, secs >= 3);
        }
        // Not more often than it matters, unless more than that has changed.
        for (secs, changed, confirmed) in [(100, false, 99), (100, false, 100), (100, true, 98)] {
            files.at(secs);
            let sets = Sets::of_one_confirmed(at(confirmed));
            journal.note_sets(at(secs), changed, || sets.clone());
            let recovered = LeaseJournal::open(files.killed(false), true).1.sets;
            assert_eq!(recovered == sets, confirmed != 100);
        }
        files.at(100 + USED_FOR.as_secs());
        journal.note_sets(files.now(), true, || panic!("nobody uses locks"));
    }

    #[test]
    fn an_incarnation_that_knows_nothing_says_so_and_the_next_one_says_the_same() {
        let files = Manual::default();
        files.at(50);
        let files = files.killed(true);
        let (journal, _) = LeaseJournal::open(files.clone(), true);
        assert_eq!(journal.forgotten(), LOCK_LEASE);
        let again = files.killed(false);
        again.at(60);
        let (journal, _) = LeaseJournal::open(again.clone(), true);
        assert_eq!(journal.forgotten(), LOCK_LEASE - Duration::from_secs(10));
        again.at(70);
        assert_eq!(journal.forgotten(), Duration::ZERO);
        // One record that means nothing.
        again.append(vec![0xff]);
        let (journal, _) = LeaseJournal::open(again.killed(false), true);
        assert_eq!(journal.forgotten(), LOCK_LEASE);
    }
}
