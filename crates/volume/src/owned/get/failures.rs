//! The files that a copy could not read, and whether the ring answers at all.

use std::sync::{Mutex, MutexGuard};

use atoll_dht::GetError;
use atoll_env::{Env, Instant};
use bytes::Bytes;

use super::SILENCE;
use crate::owned::publish::MAX_LISTED;
use crate::owned::read::ReadError;

/// Something of a volume that could not be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unread {
    /// Its path in the volume, without a leading slash.
    pub path: Bytes,
    /// For a directory: how many of its entries are not known. Otherwise 0.
    pub hidden_entries: u64,
    /// Why; of a file, the first reason.
    pub error: ReadError,
}

/// See the module.
pub(super) struct Failures {
    env: Env,
    state: Mutex<State>,
}

struct State {
    listed: Vec<Unread>,
    count: u64,
    /// When the ring last answered.
    heard_at: Instant,
}

impl Failures {
    pub(super) fn new(env: Env) -> Failures {
        let heard_at = env.now();
        Failures { env, state: Mutex::new(State { listed: Vec::new(), count: 0, heard_at }) }
    }

    /// The ring gave a block.
    pub(super) fn heard(&self) {
        self.state().heard_at = self.env.now();
    }

    /// Whether this error means that the ring has been silent for too long. *Not found* is
    /// an answer.
    pub(super) fn is_silence(&self, error: &ReadError) -> bool {
        let mut state = self.state();
        match error {
            ReadError::Fetch { source: GetError::Unavailable { .. }, .. } => {
                self.env.now().since(state.heard_at) >= SILENCE
            }
            _ => {
                state.heard_at = self.env.now();
                false
            }
        }
    }

    pub(super) fn note(&self, unread: Unread) {
        let mut state = self.state();
        state.count += unread.hidden_entries.max(1);
        if state.listed.len() < MAX_LISTED {
            state.listed.push(unread);
        }
    }

    /// What was noted, in order of the paths, and how many things that are.
    pub(super) fn take(&self) -> (Vec<Unread>, u64) {
        let mut state = self.state();
        let mut listed = std::mem::take(&mut state.listed);
        listed.sort_by(|a, b| a.path.cmp(&b.path));
        (listed, state.count)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder of this lock panics")
    }
}
