//! The lock leases that this replica has granted, in memory.
//!
//! A lease is a holder's until it gives it up, or until [`LOCK_LEASE`] after it asked last. What a
//! node's last incarnation has granted is in its journal (`super::lease_journal`).
//!
//! What a holder has given up is remembered for as long as a lease: the request before may be late,
//! and would otherwise take the lock for nobody.
//!
//! Invariants:
//!
//! - No two holders whose modes exclude each other have a lease of one key at a time.
//! - Leases are bounded for each peer and in all; one too many is refused, and none is dropped.
//!
//! It does not know which keys belong here, nor whether a majority grants the same.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use atoll_env::Instant;
use atoll_key::{Key, PeerId};

use super::lease_journal::LeaseRecord;
use crate::locks::{LOCK_LEASE, LockLease, LockMode, LockStep};
use crate::multiset::Counts;

/// Leases in all. A guess: some tens of megabytes.
const MAX_LEASES: usize = 131_072;
/// Leases of one peer: many mounts that make files as fast as they can leave some thousands of
/// leases given up.
const MAX_OF_PEER: usize = 16_384;
/// How long a holder is told that another one has asked in vain. A guess: longer than the pauses of
/// those who ask again.
const WANTED_FOR: Duration = Duration::from_secs(3);
/// How often peers are probed while leases are asked for, so that a side which has lost most of its
/// nodes notices it before others grant what it has granted.
const PROBE_EVERY: Duration = Duration::from_secs(3);

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct LockLeases {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    locks: BTreeMap<Key, Lock>,
    by_peer: Counts<PeerId>,
    /// When leases that have ended are dropped next.
    sweep_at: Instant,
    /// When peers were probed last.
    probed_at: Option<Instant>,
}

/// A holder: each peer has its own.
type Holder = (PeerId, [u8; 16]);

#[derive(Debug, Default)]
struct Lock {
    leases: BTreeMap<Holder, Lease>,
    /// Which holder has asked in vain last, and when.
    wanted: Option<(Holder, Instant)>,
}

#[derive(Debug)]
struct Lease {
    /// `None`: it was given up.
    mode: Option<LockMode>,
    /// The holder's latest request.
    number: u64,
    until: Instant,
}

/// What became of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Outcome {
    /// It was done. Whether another holder has asked in vain of late.
    Done { is_wanted: bool },
    /// Another holder has the lock, or the request was late.
    Held,
    /// There are too many leases.
    Full,
}

impl LockLeases {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder of this lock panics")
    }

    /// Those that an earlier incarnation has granted.
    pub(crate) fn remembering(now: Instant, records: &[LeaseRecord]) -> LockLeases {
        let leases = LockLeases::default();
        let mut state = leases.lock();
        for record in records.iter().filter(|record| Instant(record.until) > now) {
            let holder = (PeerId(record.peer), record.holder);
            let lock = state.locks.entry(Key(record.key)).or_default();
            let known = lock.leases.get(&holder).map(|lease| lease.number);
            if known.is_some_and(|number| number >= record.number) {
                continue;
            }
            // None lasts longer, whenever it was granted.
            let until = Instant(record.until).min(now + LOCK_LEASE);
            lock.leases.insert(holder, Lease { mode: record.mode, number: record.number, until });
            if known.is_none() {
                state.by_peer.add(holder.0);
            }
        }
        drop(state);
        leases
    }

    /// Does what a peer asks. What was done is to be in the journal before the peer is told.
    pub(crate) fn ask(
        &self,
        now: Instant,
        peer: PeerId,
        ask: &LockLease,
    ) -> (Outcome, Option<LeaseRecord>) {
        let mut state = self.lock();
        state.sweep(now);
        let holder = (peer, ask.holder);
        let mode = (ask.step != LockStep::Release).then_some(ask.mode);
        let count = state.by_peer.total();
        let of_peer = state.by_peer.of(&peer);
        let State { locks, by_peer, .. } = &mut *state;
        let lock = locks.entry(ask.key).or_default();
        lock.drop_ended(now, by_peer);
        let known = lock.leases.get(&holder);
        if known.is_some_and(|known| known.number >= ask.number) {
            return (Outcome::Held, None);
        }
        let excludes = |(other, lease): (&Holder, &Lease)| {
            let both = lease.mode.zip(mode);
            *other != holder && both.is_some_and(|(theirs, wanted)| !theirs.goes_with(wanted))
        };
        if lock.leases.iter().any(excludes) {
            lock.wanted = Some((holder, now));
            return (Outcome::Held, None);
        }
        if known.is_none() {
            if count >= MAX_LEASES || of_peer >= MAX_OF_PEER {
                return (Outcome::Full, None);
            }
            by_peer.add(peer);
        }
        let (number, until) = (ask.number, now + LOCK_LEASE);
        lock.leases.insert(holder, Lease { mode, number, until });
        let record = LeaseRecord {
            key: ask.key.0,
            peer: peer.0,
            holder: ask.holder,
            number,
            mode,
            until: until.as_nanos(),
        };
        (Outcome::Done { is_wanted: lock.is_wanted_by_others(holder, now) }, Some(record))
    }

    /// The leases of a lock that last: whose, in which mode, and for how long; at most `most`.
    pub(crate) fn holders(
        &self,
        now: Instant,
        key: &Key,
        most: usize,
    ) -> Vec<(PeerId, LockMode, Duration)> {
        let state = self.lock();
        let leases = state.locks.get(key).into_iter().flat_map(|lock| &lock.leases);
        let lasting = leases.filter(|(_, lease)| lease.until > now);
        let held = lasting
            .filter_map(|((peer, _), lease)| Some((*peer, lease.mode?, lease.until.since(now))));
        held.take(most).collect()
    }

    /// Whether it is time to probe peers; the time is counted from then on.
    pub(crate) fn begin_probes(&self, now: Instant) -> bool {
        let mut state = self.lock();
        let is_due = state.probed_at.is_none_or(|at| now.since(at) >= PROBE_EVERY);
        if is_due {
            state.probed_at = Some(now);
        }
        is_due
    }
}

impl Lock {
    fn drop_ended(&mut self, now: Instant, by_peer: &mut Counts<PeerId>) {
        self.leases.retain(|(peer, _), lease| {
            let lasts = lease.until > now;
            if !lasts {
                by_peer.take(peer);
            }
            lasts
        });
    }

    fn is_wanted_by_others(&mut self, holder: Holder, now: Instant) -> bool {
        if self.wanted.is_some_and(|(by, at)| by == holder || now.since(at) > WANTED_FOR) {
            self.wanted = None;
        }
        self.wanted.is_some()
    }
}

impl State {
    fn sweep(&mut self, now: Instant) {
        if now < self.sweep_at {
            return;
        }
        self.sweep_at = now + LOCK_LEASE;
        let State { locks, by_peer, .. } = self;
        locks.retain(|_, lock| {
            lock.drop_ended(now, by_peer);
            !lock.leases.is_empty()
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DONE: Outcome = Outcome::Done { is_wanted: false };
    const WANTED: Outcome = Outcome::Done { is_wanted: true };

    fn at(secs: u64) -> Instant {
        Instant::default() + Duration::from_secs(secs)
    }

    /// A peer's request, by its only holder.
    struct Asking<'a>(&'a LockLeases, u8);

    impl Asking<'_> {
        fn ask(&self, secs: u64, number: u64, step: LockStep, mode: LockMode) -> Outcome {
            let key = Key::hashed([1; 32]);
            let ask = LockLease { key, holder: [0; 16], number, step, mode };
            self.0.ask(at(secs), PeerId([self.1; 32]), &ask).0
        }

        fn take(&self, secs: u64, number: u64, mode: LockMode) -> Outcome {
            self.ask(secs, number, LockStep::Take, mode)
        }

        fn release(&self, secs: u64, number: u64) -> Outcome {
            self.ask(secs, number, LockStep::Release, LockMode::Shared)
        }
    }

    #[test]
    fn exclusive_holders_exclude_all_others_until_their_lease_ends() {
        let table = LockLeases::default();
        let [a, b] = [1, 2].map(|peer| Asking(&table, peer));
        assert_eq!(a.take(0, 1, LockMode::Shared), DONE);
        assert_eq!(b.take(0, 1, LockMode::Shared), DONE);
        assert_eq!(a.take(1, 2, LockMode::Exclusive), Outcome::Held);
        let held = |secs, most| {
            let held = table.holders(at(secs), &Key::hashed([1; 32]), most);
            held.into_iter().map(|(peer, mode, _)| (peer.0[0], mode)).collect::<Vec<_>>()
        };
        assert_eq!(held(1, 9), [(1, LockMode::Shared), (2, LockMode::Shared)]);
        assert_eq!((held(1, 1).len(), held(15, 9).len()), (1, 0));
        assert_eq!(b.release(1, 2), WANTED);
        assert_eq!(held(1, 9), [(1, LockMode::Shared)], "what was given up is nobody's");
        assert_eq!(a.take(1, 3, LockMode::Exclusive), DONE, "an upgrade");
        assert_eq!(b.take(2, 3, LockMode::Shared), Outcome::Held);
        assert_eq!(a.ask(10, 4, LockStep::Renew, LockMode::Exclusive), DONE, "b has given up");
        assert_eq!(b.take(24, 4, LockMode::Shared), Outcome::Held);
        assert_eq!(b.take(25, 5, LockMode::Shared), DONE, "15 s after it was renewed");
    }

    #[test]
    fn a_request_that_comes_after_its_release_takes_nothing() {
        let table = LockLeases::default();
        let [a, b] = [1, 2].map(|peer| Asking(&table, peer));
        assert_eq!(a.release(0, 7), DONE);
        assert_eq!(a.take(1, 7, LockMode::Exclusive), Outcome::Held);
        assert_eq!(b.take(1, 1, LockMode::Exclusive), DONE);
        assert_eq!(b.release(2, 2), DONE, "what could not be taken elsewhere");
        assert_eq!(a.take(2, 8, LockMode::Exclusive), DONE);
        assert_eq!(a.release(2, 7), Outcome::Held, "of an earlier attempt");
        assert_eq!(b.take(3, 3, LockMode::Exclusive), Outcome::Held);
    }

    #[test]
    fn what_was_recorded_holds_as_before_in_whichever_order_it_was_granted() {
        let mut records = Vec::new();
        let table = LockLeases::default();
        let mut ask = |secs: u64, peer: u8, number: u64, step: LockStep| {
            let (key, mode) = (Key::hashed([1; 32]), LockMode::Exclusive);
            let ask = LockLease { key, holder: [0; 16], number, step, mode };
            let (outcome, record) = table.ask(at(secs), PeerId([peer; 32]), &ask);
            records.extend(record);
            outcome
        };
        assert_eq!(ask(0, 1, 1, LockStep::Take), DONE);
        assert_eq!(ask(1, 1, 2, LockStep::Release), DONE);
        assert_eq!(ask(2, 2, 1, LockStep::Take), DONE);
        assert_eq!(ask(9, 2, 2, LockStep::Renew), DONE);
        for reversed in [false, true] {
            if reversed {
                records.reverse();
            }
            let again = |secs| LockLeases::remembering(at(secs), &records);
            let [a, b] = [1, 2].map(|peer| {
                move |table: &LockLeases, secs, number| {
                    Asking(table, peer).take(secs, number, LockMode::Exclusive)
                }
            });
            assert_eq!(a(&again(10), 10, 2), Outcome::Held, "it was given up");
            assert_eq!(a(&again(10), 23, 3), Outcome::Held);
            assert_eq!(a(&again(10), 24, 3), DONE, "15 s after it was renewed");
            assert_eq!(b(&again(10), 11, 3), DONE);
            assert_eq!(again(10).lock().by_peer.total(), 2);
            assert_eq!(again(24).lock().by_peer.total(), 0);
        }
    }

    #[test]
    fn one_peer_cannot_use_up_all_leases_and_ended_ones_make_room() {
        let table = LockLeases::default();
        let ask = |secs: u64, peer: u8, n: usize| {
            let mut hash = [0; 32];
            hash[..8].copy_from_slice(&n.to_be_bytes());
            let (step, mode) = (LockStep::Take, LockMode::Exclusive);
            let ask = LockLease { key: Key::hashed(hash), holder: [0; 16], number: 1, step, mode };
            table.ask(at(secs), PeerId([peer; 32]), &ask).0
        };
        assert!((0..MAX_OF_PEER).all(|n| ask(0, 1, n) == DONE));
        assert_eq!(ask(1, 1, MAX_OF_PEER), Outcome::Full);
        assert_eq!(ask(1, 2, MAX_OF_PEER), DONE);
        assert_eq!(ask(20, 1, MAX_OF_PEER + 1), DONE);
        let state = table.lock();
        assert_eq!((state.by_peer.total(), state.locks.len()), (1, 1));
    }
}
