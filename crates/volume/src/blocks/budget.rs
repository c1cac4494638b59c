//! A semaphore over bytes of memory: blocks that were asked for and are not written yet. The
//! load on the network is limited by `pace`.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};

use futures_channel::oneshot;

/// Given out in the order asked for, so that no caller starves.
pub(crate) struct Budget {
    limit: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    used: usize,
    waiting: VecDeque<(usize, oneshot::Sender<Permit>)>,
}

/// A share of the budget, given back when dropped.
pub(crate) struct Permit {
    budget: Arc<Budget>,
    bytes: usize,
}

impl Budget {
    pub(crate) fn new(limit: usize) -> Arc<Budget> {
        Arc::new(Budget { limit: limit.max(1), state: Mutex::default() })
    }

    /// Waits for `bytes`, or for the whole budget if that is less. Cancel-safe.
    pub(crate) async fn acquire(self: &Arc<Self>, bytes: usize) -> Permit {
        let bytes = bytes.min(self.limit);
        let waiting = {
            let mut state = self.state();
            if state.waiting.is_empty() && state.used + bytes <= self.limit {
                state.used += bytes;
                return Permit { budget: self.clone(), bytes };
            }
            let (sender, receiver) = oneshot::channel();
            state.waiting.push_back((bytes, sender));
            receiver
        };
        waiting.await.expect("waiting callers are served before the budget is dropped")
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder of this lock panics")
    }

    fn give_back(self: &Arc<Self>, bytes: usize) {
        let mut granted = Vec::new();
        {
            let mut state = self.state();
            state.used -= bytes;
            while let Some((bytes, sender)) = state.waiting.pop_front() {
                // Skipped here: when a copy is cancelled there may be thousands, and each would
                // be served within the drop of the one before.
                if sender.is_canceled() {
                    continue;
                }
                if state.used + bytes > self.limit {
                    state.waiting.push_front((bytes, sender));
                    break;
                }
                state.used += bytes;
                granted.push((sender, Permit { budget: self.clone(), bytes }));
            }
        }
        for (sender, permit) in granted {
            // If the receiver is gone since then, dropping the permit gives it back.
            let _ = sender.send(permit);
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.budget.give_back(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[test]
    fn no_more_than_the_limit_is_given_out_and_all_of_it_comes_back() {
        let budget = Budget::new(10);
        let first = budget.acquire(6).now_or_never().expect("there is room");
        let mut second = Box::pin(budget.acquire(100));
        let mut third = Box::pin(budget.acquire(1));
        assert!((&mut second).now_or_never().is_none());
        assert!((&mut third).now_or_never().is_none(), "it waits behind the second");
        drop(first);
        let second = second.now_or_never().expect("it fits alone, cut to the limit");
        assert_eq!(budget.state().used, 10);
        drop(third);
        drop(second);
        assert_eq!(budget.state().used, 0);
    }
}
