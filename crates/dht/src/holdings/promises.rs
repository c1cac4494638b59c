//! Call-back promises that this node has made to readers of mutable blocks (the call-backs of AFS,
//! Howard et al. 1988; not in Pastis, whose every open asks the replicas).
//!
//! A reader that a majority of a block's replicas has made a promise may show what it has read without asking again
//! for as long as the promise lasts: a hundred round trips between the two, at least 2 s and at most [`PROMISE_TIME`]. A replica that stores a newer version names the readers
//! with promises to the version's writer, and the writer's node tells them before it acknowledges the
//! write, or waits until their promises have ended. A majority that has a write and a majority that has made a
//! promise have a replica in common, so a write that is acknowledged is seen by every read that
//! begins after it.
//!
//! The writer tells the readers, not the replica: a writer that leaves it out delays its own write by
//! as long as a promise lasts, and a replica's answer waits for nobody.
//!
//! Invariants:
//!
//! - A promise is made before the replica looks at what it holds, so each change is in what the
//!   reader gets or comes after the promise.
//! - Promises are bounded for each block and each peer; a reader that is refused one asks the ring again.
//! - What was promised before a restart is in the journal (`super::lease_journal`). A node that has lost it
//!   says so for [`PROMISE_TIME`].
//!
//! It does not know whether anybody was told: a promise stays until it ends or is made anew.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use atoll_env::Instant;
use atoll_key::{Key, PeerId};
use atoll_net::Peer;
use atoll_net::header::WirePeer;

use super::lease_journal::PromiseRecord;
use crate::multiset::Counts;
use crate::rpc::{MAX_HOLDERS, PROMISE_TIME, PromiseHolder, promise_time, whole_ms};

/// Promises in all. A guess: some ten megabytes.
const MAX_PROMISES: usize = 65_536;
/// Promises to one peer: what it may read in 15 seconds without being slowed down.
const MAX_OF_PEER: usize = 8_192;

/// Readers whose distance is remembered. A guess: as the peer book.
const MAX_NEAREST: usize = 4_096;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Promises {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// By block, and of each the readers.
    made: BTreeMap<Key, BTreeMap<PeerId, Promise>>,
    of_peer: Counts<PeerId>,
    /// The shortest round trip that was measured to a reader. One that was stopped seems far when it goes on, and its
    /// promises are not to last longer when it is stopped again.
    nearest: BTreeMap<PeerId, Duration>,
    /// When promises that have ended are looked for next.
    sweep_at: Instant,
}

#[derive(Clone, Copy, Debug)]
struct Promise {
    peer: Peer,
    number: u64,
    until: Instant,
}

impl State {
    fn sweep(&mut self, now: Instant) {
        if now < self.sweep_at {
            return;
        }
        self.sweep_at = now + PROMISE_TIME;
        let of_peer = &mut self.of_peer;
        self.made.retain(|_, readers| {
            readers.retain(|id, promise| {
                let lasts = promise.until > now;
                if !lasts {
                    of_peer.take(id);
                }
                lasts
            });
            !readers.is_empty()
        });
    }
}

impl Promises {
    /// Those that an earlier incarnation has made.
    pub(crate) fn remembering(now: Instant, records: &[PromiseRecord]) -> Promises {
        let promises = Promises::default();
        let mut state = promises.state();
        for record in records.iter().filter(|record| Instant(record.until) > now) {
            let WirePeer(peer) = record.peer;
            // None lasts longer, whenever it was made.
            let until = Instant(record.until).min(now + PROMISE_TIME);
            let promise = Promise { peer, number: record.number, until };
            let readers = state.made.entry(Key(record.key)).or_default();
            if readers.insert(peer.id, promise).is_none() {
                state.of_peer.add(peer.id);
            }
        }
        drop(state);
        promises
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder of this lock panics")
    }

    /// How long a promise to a reader is to last, to which a round trip takes so long at present, if that is known.
    pub(crate) fn time_for(&self, reader: PeerId, round_trip: Option<Duration>) -> Duration {
        let nearest = &mut self.state().nearest;
        let least = nearest.get(&reader).copied().into_iter().chain(round_trip).min();
        if let Some(least) = least {
            nearest.insert(reader, least);
            if nearest.len() > MAX_NEAREST {
                nearest.pop_first();
            }
        }
        promise_time(least)
    }

    /// Makes a promise of the reader's `number`, if it can be made. It is to be in the journal before the reader
    /// is told.
    pub(crate) fn make(
        &self,
        now: Instant,
        key: Key,
        (peer, number): (Peer, u64),
        lasts: Duration,
    ) -> Option<PromiseRecord> {
        let mut state = self.state();
        state.sweep(now);
        let state = &mut *state;
        let readers = state.made.entry(key).or_default();
        if !readers.contains_key(&peer.id) {
            if readers.len() >= MAX_HOLDERS
                || state.of_peer.of(&peer.id) >= MAX_OF_PEER
                || state.of_peer.total() >= MAX_PROMISES
            {
                if readers.is_empty() {
                    state.made.remove(&key);
                }
                return None;
            }
            state.of_peer.add(peer.id);
        }
        // The reader may still go by a longer one that it had.
        let before = readers.get(&peer.id).map_or(now, |promise| promise.until);
        let until = before.max(now + lasts.min(PROMISE_TIME));
        readers.insert(peer.id, Promise { peer, number, until });
        let until = until.as_nanos();
        Some(PromiseRecord { key: key.0, peer: WirePeer(peer), number, until })
    }

    /// Those to be told of a change of a block that `writer` has made.
    pub(crate) fn holders(&self, now: Instant, key: &Key, writer: &PeerId) -> Vec<PromiseHolder> {
        let state = self.state();
        let readers = state.made.get(key).into_iter().flatten();
        let others = readers.filter(|(id, promise)| *id != writer && promise.until > now);
        let holder = |promise: &Promise| PromiseHolder {
            peer: promise.peer,
            number: promise.number,
            left_ms: whole_ms(promise.until.since(now)),
        };
        others.map(|(_, promise)| holder(promise)).collect()
    }

    /// The readers of a block whose promises last, each with how long that is.
    pub(crate) fn readers(&self, now: Instant, key: &Key) -> Vec<(Peer, Duration)> {
        let state = self.state();
        let readers = state.made.get(key).into_iter().flatten();
        let lasting = readers.filter(|(_, promise)| promise.until > now);
        lasting.map(|(_, promise)| (promise.peer, promise.until.since(now))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(n: u8) -> Key {
        Key::hashed([n; 32])
    }

    fn peer(n: u8) -> Peer {
        Peer { id: PeerId([n; 32]), addr: "127.0.0.1:1".parse().expect("an address") }
    }

    fn at(secs: u64) -> Instant {
        Instant::default() + Duration::from_secs(secs)
    }

    fn numbers(promises: &Promises, now: Instant, writer: u8) -> Vec<u64> {
        let holders = promises.holders(now, &key(1), &peer(writer).id);
        holders.into_iter().map(|holder| holder.number).collect()
    }

    #[test]
    fn a_writer_is_named_the_readers_whose_promises_last_but_itself() {
        let promises = Promises::default();
        assert!(promises.make(at(0), key(1), (peer(1), 11), PROMISE_TIME).is_some());
        assert!(promises.make(at(5), key(1), (peer(2), 12), PROMISE_TIME).is_some());
        assert!(promises.make(at(5), key(2), (peer(3), 13), PROMISE_TIME).is_some());
        assert_eq!(numbers(&promises, at(6), 9), [11, 12]);
        assert_eq!(numbers(&promises, at(6), 1), [12]);
        assert_eq!(numbers(&promises, at(15), 9), [12]);
        assert_eq!(promises.holders(at(15), &key(1), &peer(9).id)[0].left_ms, 5_000);
        let readers = |secs| promises.readers(at(secs), &key(1));
        assert_eq!(
            readers(6),
            [(peer(1), Duration::from_secs(9)), (peer(2), Duration::from_secs(14))]
        );
        assert_eq!(readers(15), [(peer(2), Duration::from_secs(5))]);
        promises.make(at(16), key(1), (peer(1), 14), PROMISE_TIME);
        assert_eq!(numbers(&promises, at(17), 9), [14, 12], "made anew");
    }

    #[test]
    fn promises_are_bounded_and_those_that_have_ended_make_room() {
        let promises = Promises::default();
        for n in 0..MAX_HOLDERS as u8 {
            assert!(promises.make(at(0), key(1), (peer(n), 0), PROMISE_TIME).is_some());
        }
        assert!(
            promises.make(at(0), key(1), (peer(200), 0), PROMISE_TIME).is_none(),
            "too many of one block"
        );
        assert!(
            promises.make(at(0), key(1), (peer(0), 1), PROMISE_TIME).is_some(),
            "it has one already"
        );
        let of_one = |n: usize| {
            let key = Key::hashed(*blake3::hash(&n.to_be_bytes()).as_bytes());
            promises.make(at(1), key, (peer(201), 0), PROMISE_TIME).is_some()
        };
        assert!((0..MAX_OF_PEER).all(of_one) && !of_one(MAX_OF_PEER), "too many of one peer");
        assert!(promises.make(at(40), key(1), (peer(200), 0), PROMISE_TIME).is_some());
        let state = promises.state();
        assert_eq!((state.made.len(), state.of_peer.total()), (1, 1));
    }

    #[test]
    fn what_was_recorded_is_known_until_it_has_ended() {
        let made = Promises::default();
        let make = |secs, reader, number| {
            made.make(at(secs), key(1), (peer(reader), number), PROMISE_TIME)
        };
        let records = [make(0, 1, 11), make(5, 2, 12), make(9, 1, 13)];
        let records = records.map(|record| record.expect("there is room"));
        let again = Promises::remembering(at(10), &records);
        assert_eq!(numbers(&again, at(10), 9), [13, 12]);
        assert_eq!(again.state().of_peer.total(), 2);
        assert_eq!(numbers(&Promises::remembering(at(20), &records), at(20), 9), [13]);
        assert_eq!(numbers(&Promises::remembering(at(24), &records), at(24), 9), []);
    }

    #[test]
    fn a_reader_that_was_stopped_is_not_promised_for_longer() {
        let (promises, reader) = (Promises::default(), peer(1).id);
        let secs = |ms: u64| promises.time_for(reader, Some(Duration::from_millis(ms))).as_secs();
        assert_eq!([50, 30, 1_300, 30].map(secs), [5, 3, 3, 3]);
        assert_eq!(promises.time_for(reader, None).as_secs(), 3);
        assert_eq!(promises.time_for(peer(2).id, None).as_secs(), 2);
        for n in 0..MAX_NEAREST as u64 {
            let mut id = [0; 32];
            id[..8].copy_from_slice(&n.to_be_bytes());
            promises.time_for(PeerId(id), Some(Duration::ZERO));
        }
        assert_eq!(promises.state().nearest.len(), MAX_NEAREST);
    }

    /// The reader keeps what it was promised for longer if its next question brings nothing that it may keep.
    #[test]
    fn a_shorter_promise_does_not_end_a_longer_one() {
        let promises = Promises::default();
        let secs = Duration::from_secs;
        promises.make(at(0), key(1), (peer(1), 11), secs(10)).expect("there is room");
        let record = promises.make(at(1), key(1), (peer(1), 12), secs(2)).expect("there is room");
        assert_eq!(Instant(record.until), at(10), "also after a restart");
        assert_eq!(
            (numbers(&promises, at(9), 9), numbers(&promises, at(10), 9)),
            (vec![12], vec![])
        );
        promises.make(at(10), key(1), (peer(1), 13), secs(2)).expect("there is room");
        assert_eq!(
            (numbers(&promises, at(11), 9), numbers(&promises, at(12), 9)),
            (vec![13], vec![])
        );
    }
}
