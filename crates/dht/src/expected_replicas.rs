//! How many replicas a put must count on: a majority is one of the replica set's *expected* size.

use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use atoll_env::Instant;
use atoll_net::header::{from_header, to_header};
use minicbor::{Decode, Encode};

use crate::durable::DurableState;

/// How long fewer nodes than k must be all there are before fewer copies will do; see
/// [`Dht::forget_absent`](crate::Dht::forget_absent) for when that is never. A guess: longer than a
/// reboot.
const SHRINK_AFTER: Duration = Duration::from_secs(600);
/// The durable record of how many replicas a put must count on.
const RECORD: &str = "expected-replicas";

/// What that record holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
struct Record {
    /// How many other nodes hold a block besides its root.
    #[n(0)]
    others: u32,
}

/// Whether a majority has a block. Both numbers may be a peer's, so any.
pub(crate) fn is_majority(copies: u32, wanted: u32) -> bool {
    u64::from(copies) * 2 > u64::from(wanted)
}

/// Whether a block cannot get to a majority, since so many will not have it.
pub(crate) fn leaves_no_majority(refusing: u32, wanted: u32) -> bool {
    !is_majority(wanted.saturating_sub(refusing), wanted)
}

/// See the module.
#[derive(Default)]
pub(crate) struct ExpectedReplicas {
    state: Mutex<State>,
    /// The number that a restart would find.
    remembered: futures_util::lock::Mutex<usize>,
}

#[derive(Default)]
struct State {
    /// How many other nodes hold a block besides its root.
    expected: usize,
    /// Since when there have been fewer than that, and the most there have been since.
    fewer: Option<(Instant, usize)>,
}

impl ExpectedReplicas {
    /// With what an earlier run of this node knew of its replica set, which has `replicas`
    /// members at most.
    pub(crate) fn remembering(durable: &dyn DurableState, replicas: usize) -> ExpectedReplicas {
        let record = durable.load(RECORD).and_then(|bytes| from_header::<Record>(&bytes).ok());
        let others = record.map_or(0, |record| record.others as usize).min(replicas - 1);
        let state = State { expected: others, fewer: None };
        ExpectedReplicas { remembered: others.into(), state: Mutex::new(state) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder of this lock panics")
    }

    /// How many replicas a put must count on when `now` there are `replicas`: as many as
    /// there ever were, or the most there were during [`SHRINK_AFTER`], if with this node
    /// that is a majority of those. A node, or half a ring, that is cut off, or that comes back
    /// first after an outage, must not take itself for all there is, however long it lasts.
    pub(crate) fn update(&self, now: Instant, replicas: usize) -> usize {
        let mut state = self.lock();
        if replicas >= state.expected {
            (state.expected, state.fewer) = (replicas, None);
            return replicas;
        }
        // Counted from when fewer were first seen: this may not have been called for long.
        let (since, most) = state.fewer.unwrap_or((now, replicas));
        let most = most.max(replicas);
        state.fewer = Some((since, most));
        if now.since(since) > SHRINK_AFTER {
            if is_majority(most as u32 + 1, state.expected as u32 + 1) {
                state.expected = most;
            }
            state.fewer = (replicas < state.expected).then_some((now, replicas));
        }
        state.expected
    }

    /// The operator says that no more than `replicas` are left.
    pub(crate) fn expect_only(&self, replicas: usize) {
        let mut state = self.lock();
        (state.expected, state.fewer) = (replicas, None);
    }

    /// Makes the expected number one that survives a restart; whether it does. A number that
    /// has shrunk may be lost: the old one costs no more than patience.
    pub(crate) async fn remember(&self, durable: &dyn DurableState) -> bool {
        let mut remembered = self.remembered.lock().await;
        let expected = self.lock().expected;
        if *remembered == expected {
            return true;
        }
        let record = Record { others: expected as u32 };
        match durable.save(RECORD, to_header(&record).to_vec()).await {
            Ok(()) => *remembered = expected,
            Err(error) => tracing::error!(%error, "the size of replica sets could not be saved"),
        }
        *remembered >= expected
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fewer_replicas_are_believed_only_while_they_are_a_majority_of_the_earlier_set() {
        let at = |minutes: u64| Instant::default() + Duration::from_secs(60 * minutes);
        let shrinks = |from: usize, to: usize| {
            let expected = ExpectedReplicas::default();
            expected.update(at(0), from);
            (0..100).map(|m| expected.update(at(m), to)).last()
        };
        assert_eq!([shrinks(2, 1), shrinks(2, 0), shrinks(1, 0)], [Some(1), Some(2), Some(1)]);
        assert_eq!([shrinks(5, 3), shrinks(5, 2)], [Some(3), Some(5)]);
    }

    #[test]
    fn what_was_expected_survives_a_restart_and_the_word_of_an_operator_ends_it() {
        let durable = crate::durable::MemoryState::default();
        let now = Instant::default();
        let run = |expected: &ExpectedReplicas| {
            let saved = expected.remember(&durable);
            futures_util::FutureExt::now_or_never(saved).expect("memory")
        };
        let first = ExpectedReplicas::remembering(&durable, 3);
        assert_eq!(first.update(now, 2), 2);
        assert!(run(&first));
        let second = ExpectedReplicas::remembering(&durable, 3);
        assert_eq!(second.update(now, 0), 2);
        assert_eq!(ExpectedReplicas::remembering(&durable, 2).update(now, 0), 1);
        second.expect_only(0);
        assert!(run(&second));
        assert_eq!(ExpectedReplicas::remembering(&durable, 3).update(now, 0), 0);
    }
}
