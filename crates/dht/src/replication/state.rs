//! The shared state of repair: what it has found, what it was told of, how fast it may go.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::time::Duration;

use atoll_env::{Instant, Notify};
use atoll_key::{Key, PeerId};
use atoll_overlay::ServedRanges;
use minicbor::{Decode, Encode};

use crate::durable::DurableState;
use crate::replication::status::RepairStatus;
use crate::rpc::{from_header, is_majority, to_header};

/// The durable record of how many replicas a put must count on.
const RECORD: &str = "expected-replicas";

/// What that record holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
struct Expected {
    /// How many other nodes hold a block besides its root.
    #[n(0)]
    others: u32,
}

/// Damaged blocks remembered one by one.
const MAX_DAMAGED: usize = 4096;

/// Nodes remembered that failed, had no room, or did not keep what they acknowledged.
const MAX_SET_BACK: usize = 256;
/// How long such a node is left alone; twice as long each time. Guesses.
const SET_BACK_FOR: Duration = Duration::from_secs(60);
/// At most so many doublings.
const MAX_STRIKES: u32 = 8;
/// Blocks remembered that a node refused.
const MAX_DECLINED: usize = 8192;
/// How long such a block is not offered to it again. A guess.
const DECLINED_FOR: Duration = Duration::from_secs(3600);

/// After so long a block that one node was asked for is fetched from another as well. A guess: a
/// mebibyte over a line that is not poor.
const FETCH_PATIENCE: Duration = Duration::from_secs(1);

/// The shared state of repair.
#[derive(Default)]
pub(crate) struct Repair {
    kicked: Notify,
    state: Mutex<State>,
    /// The expected number that a restart would find.
    remembered: futures_util::lock::Mutex<usize>,
}

#[derive(Default)]
struct State {
    status: RepairStatus,
    /// The ranges that were last found without a difference, if nothing was noticed since.
    clean: Option<ServedRanges>,
    next_slot: Instant,
    /// Blocks that were damaged here, to be fetched from another holder.
    damaged: BTreeSet<Key>,
    /// How many replicas a put must count on.
    expected: usize,
    /// Since when there have been fewer than that, and the most there have been since.
    fewer: Option<(Instant, usize)>,
    /// Nodes that failed, had no room, or did not keep what they acknowledged: how often in a
    /// row, and until when they are left alone. This node, if its own store takes nothing.
    set_back: BTreeMap<PeerId, (u32, Instant)>,
    /// Blocks that are being fetched, and since when: exchanges with several nodes go on side by
    /// side.
    fetching: BTreeMap<Key, Instant>,
    /// Blocks that a node refused, and until when they are not offered to it.
    declined: BTreeMap<(PeerId, Key), Instant>,
}

/// Blocks that are being fetched from one node, until this is dropped.
pub(crate) struct Fetching<'a> {
    repair: &'a Repair,
    pub keys: Vec<Key>,
    since: Instant,
}

impl Drop for Fetching<'_> {
    fn drop(&mut self) {
        let mut state = self.repair.lock();
        for key in &self.keys {
            // Another node may have been asked since.
            if state.fetching.get(key) == Some(&self.since) {
                state.fetching.remove(key);
            }
        }
    }
}

impl Repair {
    /// With what an earlier run of this node knew of its replica set, which has `replicas`
    /// members at most.
    pub fn remembering(durable: &dyn DurableState, replicas: usize) -> Repair {
        let record = durable.load(RECORD).and_then(|bytes| from_header::<Expected>(&bytes).ok());
        let others = record.map_or(0, |record| record.others as usize).min(replicas - 1);
        let repair = Repair { remembered: others.into(), ..Repair::default() };
        repair.lock().expected = others;
        repair
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().expect("no holder of this lock panics")
    }

    /// Something is missing somewhere: a round should run.
    pub fn kick(&self) {
        self.lock().clean = None;
        self.kicked.notify();
    }

    /// A block was damaged here: it should be fetched again. Beyond [`MAX_DAMAGED`] only
    /// comparing ranges finds it.
    pub fn refetch(&self, key: Key) {
        {
            let mut state = self.lock();
            if state.damaged.len() < MAX_DAMAGED {
                state.damaged.insert(key);
            }
        }
        self.kick();
    }

    /// What was to be fetched again; the list is empty afterwards.
    pub fn take_damaged(&self) -> BTreeSet<Key> {
        std::mem::take(&mut self.lock().damaged)
    }

    /// Whether `node` may be given work, as far as it has not failed of late.
    pub fn is_fit(&self, node: &PeerId, now: Instant) -> bool {
        self.lock().set_back.get(node).is_none_or(|(_, until)| *until <= now)
    }

    /// `node` failed, has no room, or has not kept what it acknowledged: it is left alone for a
    /// while.
    pub fn set_back(&self, node: PeerId, now: Instant) {
        let mut state = self.lock();
        if state.set_back.len() >= MAX_SET_BACK && !state.set_back.contains_key(&node) {
            state.set_back.pop_first();
        }
        let (strikes, until) = state.set_back.entry(node).or_default();
        if *until > now {
            return;
        }
        *until = now + SET_BACK_FOR * 2u32.pow(*strikes);
        *strikes = (*strikes + 1).min(MAX_STRIKES);
    }

    /// `node` has all that it should have.
    pub fn kept(&self, node: &PeerId) {
        self.lock().set_back.remove(node);
    }

    /// `node` refused a block. Beyond [`MAX_DECLINED`] it is left alone as a whole.
    pub fn decline(&self, node: PeerId, key: Key, now: Instant) {
        let is_remembered = {
            let mut state = self.lock();
            if state.declined.len() >= MAX_DECLINED {
                state.declined.retain(|_, until| *until > now);
            }
            let has_room = state.declined.len() < MAX_DECLINED;
            if has_room {
                state.declined.insert((node, key), now + DECLINED_FOR);
            }
            has_room
        };
        if !is_remembered {
            self.set_back(node, now);
        }
    }

    /// Whether a block may be offered to `node`: it has not refused it of late.
    pub fn may_offer(&self, node: &PeerId, key: &Key, now: Instant) -> bool {
        self.lock().declined.get(&(*node, *key)).is_none_or(|until| *until <= now)
    }

    /// Begins to fetch those of `keys` that another node has not just been asked for, and says how
    /// many it has.
    pub fn begin_fetch(&self, mut keys: Vec<Key>, now: Instant) -> (Fetching<'_>, u64) {
        let (mut state, wanted) = (self.lock(), keys.len());
        keys.retain(|key| {
            let asked = state.fetching.get(key);
            let is_due = asked.is_none_or(|since| now.since(*since) >= FETCH_PATIENCE);
            if is_due {
                state.fetching.insert(*key, now);
            }
            is_due
        });
        let others = (wanted - keys.len()) as u64;
        (Fetching { repair: self, keys, since: now }, others)
    }

    /// A pass over all replicas has ended; `equal` are the duties if none differed.
    pub fn pass_ended(&self, equal: Option<&ServedRanges>, root_blocks: u64, unix_ms: u64) {
        let mut state = self.lock();
        state.status.root_blocks = root_blocks;
        state.status.rounds += 1;
        state.status.last_round_unix_ms = unix_ms;
        state.clean = equal.cloned();
    }

    /// Resolves when somebody has kicked since it last did. One waiter at a time.
    pub async fn wait_for_kick(&self) {
        self.kicked.notified().await;
    }

    pub fn queue(&self, blocks: u64) {
        self.lock().status.queue_blocks += blocks;
    }

    pub fn unqueue(&self, blocks: u64) {
        let mut state = self.lock();
        state.status.queue_blocks = state.status.queue_blocks.saturating_sub(blocks);
    }

    pub fn done(&self, blocks: u64, bytes: u64) {
        let mut state = self.lock();
        state.status.repaired_blocks += blocks;
        state.status.repaired_bytes += bytes;
    }

    /// How many replicas a put must count on when `now` there are `replicas`: as many as
    /// there ever were, or the most there were during the last `memory`, if with this node
    /// that is a majority of those. A node, or half a ring, that is cut off, or that comes back
    /// first after an outage, must not take itself for all there is, however long it lasts.
    pub fn expected_replicas(&self, now: Instant, replicas: usize, memory: Duration) -> usize {
        let mut state = self.lock();
        if replicas >= state.expected {
            (state.expected, state.fewer) = (replicas, None);
            return replicas;
        }
        // Counted from when fewer were first seen: nobody may have looked for long before.
        let (since, most) = state.fewer.unwrap_or((now, replicas));
        let most = most.max(replicas);
        state.fewer = Some((since, most));
        if now.since(since) > memory {
            if is_majority(most as u32 + 1, state.expected as u32 + 1) {
                state.expected = most;
            }
            state.fewer = (replicas < state.expected).then_some((now, replicas));
        }
        state.expected
    }

    /// Somebody who must know says that no more than `replicas` are left.
    pub fn expect_only(&self, replicas: usize) {
        let mut state = self.lock();
        (state.expected, state.fewer) = (replicas, None);
    }

    /// Makes the expected number one that survives a restart; whether it does. A number that
    /// has shrunk may be lost: the old one costs no more than patience.
    pub async fn remember_expected(&self, durable: &dyn DurableState) -> bool {
        let mut remembered = self.remembered.lock().await;
        let expected = self.lock().expected;
        if *remembered == expected {
            return true;
        }
        let record = Expected { others: expected as u32 };
        match durable.save(RECORD, to_header(&record).to_vec()).await {
            Ok(()) => *remembered = expected,
            Err(error) => tracing::error!(%error, "the size of replica sets could not be saved"),
        }
        *remembered >= expected
    }

    /// Counts blocks in that were put since the last round; the next round counts anew.
    pub fn count_root_blocks(&self, new: u64) {
        self.lock().status.root_blocks += new;
    }

    /// Reserves the time that copying `bytes` may take; copying may go on at the result.
    pub fn pace(&self, now: Instant, bytes: u64, bytes_per_sec: u64) -> Instant {
        let mut state = self.lock();
        let cost = Duration::from_secs_f64(bytes as f64 / bytes_per_sec.max(1) as f64);
        state.next_slot = state.next_slot.max(now) + cost;
        state.next_slot
    }

    /// The state of repair, given what the node is responsible for at present.
    pub fn status(&self, served: &ServedRanges) -> RepairStatus {
        let copies = served.ranges.iter().map(|range| range.replicas.len() as u32 + 1);
        let state = self.lock();
        RepairStatus {
            replicas_wanted: copies.max().unwrap_or(0),
            fully_replicated: served.complete && state.clean.as_ref() == Some(served),
            ..state.status
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fewer_replicas_are_believed_only_while_they_are_a_majority_of_the_earlier_set() {
        let (minute, at) =
            (Duration::from_secs(60), |m: u64| Instant::default() + Duration::from_secs(60 * m));
        let shrinks = |from: usize, to: usize| {
            let repair = Repair::default();
            repair.expected_replicas(at(0), from, minute * 10);
            (0..100).map(|m| repair.expected_replicas(at(m), to, minute * 10)).last()
        };
        assert_eq!([shrinks(2, 1), shrinks(2, 0), shrinks(1, 0)], [Some(1), Some(2), Some(1)]);
        assert_eq!([shrinks(5, 3), shrinks(5, 2)], [Some(3), Some(5)]);
    }

    #[test]
    fn what_was_expected_survives_a_restart_and_the_word_of_an_operator_ends_it() {
        let durable = crate::durable::MemoryState::default();
        let now = Instant::default();
        let run = |repair: &Repair| {
            let saved = repair.remember_expected(&durable);
            futures_util::FutureExt::now_or_never(saved).expect("memory")
        };
        let first = Repair::remembering(&durable, 3);
        assert_eq!(first.expected_replicas(now, 2, Duration::ZERO), 2);
        assert!(run(&first));
        let second = Repair::remembering(&durable, 3);
        assert_eq!(second.expected_replicas(now, 0, Duration::MAX), 2);
        assert_eq!(Repair::remembering(&durable, 2).expected_replicas(now, 0, Duration::MAX), 1);
        second.expect_only(0);
        assert!(run(&second));
        assert_eq!(Repair::remembering(&durable, 3).expected_replicas(now, 0, Duration::MAX), 0);
    }
}
