//! Call-back promises: what a put's reply says of readers, and the header of `CHANGED`.
//!
//! See [`crate::holdings::promises`].

use std::time::Duration;

use atoll_key::Key;
use atoll_net::Peer;
use atoll_net::header::Capped;
use minicbor::{Decode, Encode};

use super::{Message, encoding};

/// The most readers that a replica promises call-backs of one block. A guess: each costs a writer a message.
pub const MAX_HOLDERS: usize = 64;

/// The longest that a promise lasts. The design's figure: a writer waits so long for a far reader that is gone.
pub(crate) const PROMISE_TIME: Duration = Duration::from_secs(15);

/// The shortest. A guess: a program that opens a file again and again mostly does so within that time.
const LEAST_PROMISE: Duration = Duration::from_secs(2);

/// A promise lasts as long as so many round trips to its reader: what asking again costs a reader, and what a dead
/// one costs writers, is about the same share everywhere. A guess.
const PROMISED_ROUND_TRIPS: u32 = 100;

/// How long a promise lasts to a reader that is so far away, if that is known.
pub(crate) fn promise_time(round_trip: Option<Duration>) -> Duration {
    let round_trips = round_trip.unwrap_or_default() * PROMISED_ROUND_TRIPS;
    round_trips.clamp(LEAST_PROMISE, PROMISE_TIME)
}

/// A reader that was promised to be told of the next change of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct PromiseHolder {
    /// The reader's node.
    #[cbor(n(0), with = "encoding::peer")]
    pub peer: Peer,
    /// The number that it gave the promise, the same at all replicas.
    #[n(1)]
    pub number: u64,
    /// How long the promise still lasts, milliseconds.
    #[n(2)]
    pub left_ms: u64,
}

/// What a replica that has stored a block says of promises of call-backs.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct PromisesReply {
    /// For how long the writer is promised to be told of the next change, milliseconds; absent if it is not.
    #[n(0)]
    pub promised_ms: Option<u64>,
    /// The readers that the writer has to tell of this change.
    #[n(1)]
    pub holders: Capped<PromiseHolder, MAX_HOLDERS>,
    /// How long promises may last that the replica has forgotten in a restart, milliseconds; 0 for none.
    #[n(2)]
    pub forgotten_ms: u64,
}

/// `CHANGED`: a block has changed of which the callee has a promise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Changed {
    /// Which block.
    #[cbor(n(0), with = "encoding::key")]
    pub key: Key,
}

/// The answer to a [`Changed`]: the callee does not rely on the promise any more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct ChangedReply {}

impl Message for Changed {}

impl Message for ChangedReply {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_promise_lasts_a_hundred_round_trips_within_bounds() {
        let lasts = |ms| promise_time(Some(Duration::from_millis(ms))).as_millis();
        assert_eq!(
            [0, 1, 20, 21, 100, 150, 60_000].map(lasts),
            [2000, 2000, 2000, 2100, 10_000, 15_000, 15_000]
        );
        assert_eq!(promise_time(None), LEAST_PROMISE, "nobody waits long for a stranger");
    }
}
