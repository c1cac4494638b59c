//! Limits how many blocks of a volume are fetched at once: one [`Window`] for all readers of the
//! volume, and a first-come, first-served queue of fetches that it does not admit yet.
//!
//! A block that a reader waits for is fetched at once and only counted. A block that is read
//! ahead or copied in bulk waits. Callers bound the length of the queue: by their read-ahead or
//! their budget of memory.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};

use atoll_dht::GetError;
use atoll_env::{Env, Instant};
use futures_channel::oneshot;

use crate::blocks::window::{Limits, Window};

/// How a block is wanted, and about how long it is, bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Wanted {
    /// A reader waits for it.
    Now(u64),
    /// It may wait for its turn.
    Soon(u64),
}

/// See the module.
pub(crate) struct Pace {
    env: Env,
    state: Mutex<State>,
}

struct State {
    window: Window,
    waiting: VecDeque<(u64, oneshot::Sender<FetchPermit>)>,
}

/// A fetch that is running. Dropped without a result, it counts as cancelled.
pub(crate) struct FetchPermit {
    pace: Arc<Pace>,
    announced: u64,
    began: Instant,
    result: Option<Ended>,
}

#[derive(Clone, Copy)]
enum Ended {
    Came(u64),
    TimedOut,
}

impl Pace {
    pub(crate) fn new(env: Env, limits: Limits) -> Arc<Pace> {
        let state = State { window: Window::new(limits), waiting: VecDeque::new() };
        Arc::new(Pace { env, state: Mutex::new(state) })
    }

    /// How much may be fetched at once now, bytes.
    pub(crate) fn window_bytes(&self) -> u64 {
        self.state().window.bytes()
    }

    /// Waits until the window admits the fetch; a [`Wanted::Now`] is admitted at once.
    /// Cancel-safe.
    pub(crate) async fn enter(self: &Arc<Self>, wanted: Wanted) -> FetchPermit {
        let waiting = {
            let mut state = self.state();
            let (bytes, enters) = match wanted {
                Wanted::Now(bytes) => (bytes, true),
                Wanted::Soon(bytes) => {
                    (bytes, state.waiting.is_empty() && state.window.may_start(bytes))
                }
            };
            if enters {
                return self.permit(&mut state, bytes);
            }
            let (sender, receiver) = oneshot::channel();
            state.waiting.push_back((bytes, sender));
            receiver
        };
        waiting.await.expect("waiting fetches are admitted before the pace is dropped")
    }

    fn permit(self: &Arc<Self>, state: &mut State, bytes: u64) -> FetchPermit {
        let began = self.env.now();
        state.window.started(bytes, began);
        FetchPermit { pace: self.clone(), announced: bytes, began, result: None }
    }

    fn end(self: &Arc<Self>, permit: &FetchPermit) {
        let mut admitted = Vec::new();
        {
            let mut state = self.state();
            let now = self.env.now();
            let took = now.since(permit.began);
            match permit.result {
                Some(Ended::Came(bytes)) => {
                    state.window.completed(permit.announced, bytes, took, now);
                }
                Some(Ended::TimedOut) => state.window.timed_out(permit.announced, now),
                None => state.window.failed(permit.announced, now),
            }
            while let Some((bytes, sender)) = state.waiting.pop_front() {
                // Skipped here: when a copy is cancelled there may be thousands, and each would
                // be admitted within the drop of the one before.
                if sender.is_canceled() {
                    continue;
                }
                if !state.window.may_start(bytes) {
                    state.waiting.push_front((bytes, sender));
                    break;
                }
                admitted.push((sender, self.permit(&mut state, bytes)));
            }
        }
        for (sender, permit) in admitted {
            // If the receiver is gone since then, dropping the permit gives it back.
            let _ = sender.send(permit);
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder of this lock panics")
    }
}

impl FetchPermit {
    /// The block came, with so many bytes, or not.
    pub(crate) fn ended(mut self, result: Result<usize, &GetError>) {
        self.result = match result {
            Ok(bytes) => Some(Ended::Came(bytes as u64)),
            Err(GetError::Unavailable { .. }) => Some(Ended::TimedOut),
            Err(GetError::NotFound { .. } | GetError::Removed { .. }) => None,
        };
    }
}

impl Drop for FetchPermit {
    fn drop(&mut self) {
        let pace = self.pace.clone();
        pace.end(self);
    }
}

#[cfg(test)]
mod tests {
    use atoll_env::TokioRuntime;
    use futures_util::FutureExt;

    use super::*;

    #[tokio::test]
    async fn a_hundred_thousand_who_gave_up_are_passed_over() {
        let limits = Limits { max_blocks: 1, ..Limits::default() };
        let pace = Pace::new(Arc::new(TokioRuntime::current()), limits);
        let first = pace.enter(Wanted::Soon(1)).await;
        let mut waiting: Vec<_> =
            (0..100_000).map(|_| Box::pin(pace.enter(Wanted::Soon(1)))).collect();
        for one in &mut waiting {
            assert!(one.now_or_never().is_none());
        }
        drop(waiting);
        drop(first);
        assert!(pace.enter(Wanted::Soon(1)).now_or_never().is_some());
    }

    #[tokio::test]
    async fn who_waits_now_enters_and_who_waits_for_later_waits_its_turn() {
        let limits = Limits { max_blocks: 2, ..Limits::default() };
        let pace = Pace::new(Arc::new(TokioRuntime::current()), limits);
        let enter = |wanted| pace.enter(wanted).now_or_never();
        let first = enter(Wanted::Soon(100)).expect("there is room");
        let second = enter(Wanted::Soon(100)).expect("there is room");
        let mut third = Box::pin(pace.enter(Wanted::Soon(100)));
        let mut fourth = Box::pin(pace.enter(Wanted::Soon(1)));
        assert!((&mut third).now_or_never().is_none());
        assert!((&mut fourth).now_or_never().is_none());
        let urgent = enter(Wanted::Now(1 << 20)).expect("it does not wait");
        assert_eq!(pace.state().window.in_flight().0, 3);
        drop(urgent);
        first.ended(Ok(100));
        let third = third.now_or_never().expect("its turn");
        assert!((&mut fourth).now_or_never().is_none());
        drop(fourth);
        drop(third);
        second.ended(Err(&GetError::NotFound { key: atoll_key::Key::MIN, told: String::new() }));
        let state = pace.state();
        assert_eq!((state.window.in_flight().0, state.waiting.len()), (0, 0));
    }
}
