//! Peers that are left alone for a while because they failed.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use atoll_env::Instant;
use atoll_key::PeerId;

/// Nodes remembered that failed, had no room, or did not keep what they acknowledged.
const MAX_SET_BACK: usize = 256;
/// How long such a node is left alone; twice as long each time. Guesses.
const SET_BACK_FOR: Duration = Duration::from_secs(60);
/// At most so many doublings.
const MAX_STRIKES: u32 = 8;
/// Nodes that failed, had no room, or did not keep what they acknowledged: how often in a row, and
/// until when they are left alone. This node, if its own store takes nothing.
#[derive(Debug, Default)]
pub(crate) struct Backoff(Mutex<BTreeMap<PeerId, (u32, Instant)>>);

impl Backoff {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<PeerId, (u32, Instant)>> {
        self.0.lock().expect("no holder of this lock panics")
    }

    /// Whether `node` may be given work, as far as it has not failed of late.
    pub(crate) fn is_fit(&self, node: &PeerId, now: Instant) -> bool {
        self.lock().get(node).is_none_or(|(_, until)| *until <= now)
    }

    /// `node` failed, has no room, or has not kept what it acknowledged: it is left alone for a
    /// while.
    pub(crate) fn set_back(&self, node: PeerId, now: Instant) {
        let mut peers = self.lock();
        if peers.len() >= MAX_SET_BACK && !peers.contains_key(&node) {
            peers.pop_first();
        }
        let (strikes, until) = peers.entry(node).or_default();
        if *until > now {
            return;
        }
        *until = now + SET_BACK_FOR * 2u32.pow(*strikes);
        *strikes = (*strikes + 1).min(MAX_STRIKES);
    }

    /// `node` has all that it should have.
    pub(crate) fn kept(&self, node: &PeerId) {
        self.lock().remove(node);
    }
}
