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

/// Why a node is left alone.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum SetBack {
    /// It has no room.
    Full,
    /// It answers too slowly.
    Slow,
    /// It refuses calls, or what it says makes no sense.
    Refuses,
    /// It lacks what it has acknowledged.
    Forgets,
}

/// A node that is left alone.
#[derive(Clone, Copy, Debug)]
struct Entry {
    /// How often in a row it was set back.
    strikes: u32,
    until: Instant,
    why: SetBack,
}

/// Nodes that failed, had no room, or did not keep what they acknowledged: how often in a row, and
/// until when they are left alone. This node, if its own store takes nothing.
#[derive(Debug, Default)]
pub(crate) struct Backoff(Mutex<BTreeMap<PeerId, Entry>>);

impl Backoff {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<PeerId, Entry>> {
        self.0.lock().expect("no holder of this lock panics")
    }

    /// Whether `node` may be given work, as far as it has not failed of late.
    pub(crate) fn is_fit(&self, node: &PeerId, now: Instant) -> bool {
        self.set_back_for(node, now).is_none()
    }

    /// Why `node` is left alone at present, if it is.
    pub(crate) fn set_back_for(&self, node: &PeerId, now: Instant) -> Option<SetBack> {
        self.lock().get(node).filter(|entry| entry.until > now).map(|entry| entry.why)
    }

    /// `node` failed, has no room, or has not kept what it acknowledged: it is left alone for a
    /// while.
    pub(crate) fn set_back(&self, node: PeerId, now: Instant, why: SetBack) {
        let mut peers = self.lock();
        if peers.len() >= MAX_SET_BACK && !peers.contains_key(&node) {
            peers.pop_first();
        }
        let entry = peers.entry(node).or_insert(Entry { strikes: 0, until: now, why });
        if entry.until > now {
            return;
        }
        entry.why = why;
        entry.until = now + SET_BACK_FOR * 2u32.pow(entry.strikes);
        entry.strikes = (entry.strikes + 1).min(MAX_STRIKES);
    }

    /// `node` has all that it should have.
    pub(crate) fn kept(&self, node: &PeerId) {
        self.lock().remove(node);
    }
}
