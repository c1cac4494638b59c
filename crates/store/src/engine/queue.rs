//! A bounded queue from async tasks to a thread.
//!
//! Pushing waits (without blocking) while the queue holds more than its limit, which is
//! how a slow disk slows its callers down. Popping blocks the calling thread and takes
//! everything there is, which is what makes a group commit a group.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard};
use std::task::{Poll, Waker};
use std::time::Duration;

#[derive(Debug)]
pub(crate) struct Queue<T> {
    limit_weight: usize,
    state: Mutex<State<T>>,
    filled: Condvar,
}

#[derive(Debug)]
struct State<T> {
    items: VecDeque<(T, usize)>,
    weight: usize,
    closed: bool,
    waiting: Vec<Waker>,
}

/// The queue takes nothing more.
#[derive(Debug)]
pub(crate) struct Closed;

impl<T> Queue<T> {
    /// A queue that holds items up to a total weight, or one heavier item.
    pub(crate) fn new(limit_weight: usize) -> Queue<T> {
        let state = State { items: VecDeque::new(), weight: 0, closed: false, waiting: Vec::new() };
        Queue { limit_weight, state: Mutex::new(state), filled: Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().expect("no panic while the lock is held")
    }

    /// Adds `item` once there is room. Cancel-safe: dropped before it resolves, nothing
    /// was added.
    pub(crate) async fn push(&self, item: T, weight: usize) -> Result<(), Closed> {
        let mut item = Some(item);
        std::future::poll_fn(|context| {
            let mut state = self.state();
            if state.closed {
                return Poll::Ready(Err(Closed));
            }
            if !state.items.is_empty() && state.weight + weight > self.limit_weight {
                // A future that is polled again without having been woken registers once.
                if !state.waiting.iter().any(|waker| waker.will_wake(context.waker())) {
                    state.waiting.push(context.waker().clone());
                }
                return Poll::Pending;
            }
            state.weight += weight;
            let item = item.take().expect("a resolved future is not polled again");
            state.items.push_back((item, weight));
            drop(state);
            self.filled.notify_one();
            Poll::Ready(Ok(()))
        })
        .await
    }

    /// Adds `item` whether there is room or not.
    pub(crate) fn push_now(&self, item: T) -> Result<(), Closed> {
        let mut state = self.state();
        if state.closed {
            return Err(Closed);
        }
        state.items.push_back((item, 0));
        drop(state);
        self.filled.notify_one();
        Ok(())
    }

    /// Takes what is queued, up to `most` items, waiting at most `patience` for the first.
    /// `None` once the queue is closed and empty.
    pub(crate) fn pop(&self, most: usize, patience: Duration) -> Option<Vec<T>> {
        let mut state = self.state();
        if state.items.is_empty() && !state.closed && !patience.is_zero() {
            let empty = |state: &mut State<T>| state.items.is_empty() && !state.closed;
            let waited = self.filled.wait_timeout_while(state, patience, empty);
            state = waited.expect("no panic while the lock is held").0;
        }
        if state.items.is_empty() && state.closed {
            return None;
        }
        let count = most.min(state.items.len());
        let taken: Vec<(T, usize)> = state.items.drain(..count).collect();
        state.weight -= taken.iter().map(|(_, weight)| weight).sum::<usize>();
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        waiting.into_iter().for_each(Waker::wake);
        Some(taken.into_iter().map(|(item, _)| item).collect())
    }

    /// Refuses items from now on; those that are queued can still be popped.
    pub(crate) fn close(&self) {
        let mut state = self.state();
        state.closed = true;
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        waiting.into_iter().for_each(Waker::wake);
        self.filled.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    fn pop<T>(queue: &Queue<T>) -> Option<Vec<T>> {
        queue.pop(10, Duration::ZERO)
    }

    #[test]
    fn a_full_queue_takes_more_only_after_a_pop() {
        let queue = Queue::new(10);
        assert!(queue.push(1, 6).now_or_never().is_some());
        assert!(queue.push(2, 6).now_or_never().is_none());
        assert_eq!(pop(&queue), Some(vec![1]));
        assert!(queue.push(3, 99).now_or_never().is_some(), "alone, even the heaviest fits");
        assert_eq!(pop(&queue), Some(vec![3]));
    }

    /// A push among many futures of one task is polled whenever any of them can go on.
    #[test]
    fn a_push_that_is_polled_often_waits_once() {
        let queue = Queue::new(1);
        assert!(queue.push(1, 1).now_or_never().is_some());
        let mut waiting = Box::pin(queue.push(2, 1));
        for _ in 0..100 {
            assert!((&mut waiting).now_or_never().is_none());
        }
        assert_eq!(queue.state().waiting.len(), 1);
        assert_eq!(pop(&queue), Some(vec![1]));
        assert!(waiting.now_or_never().is_some());
    }

    #[test]
    fn a_closed_queue_gives_what_it_holds_and_then_ends() {
        let queue = Queue::new(10);
        queue.push(1, 1).now_or_never().expect("room").expect("open");
        queue.close();
        assert!(matches!(queue.push(2, 1).now_or_never(), Some(Err(Closed))));
        assert_eq!(pop(&queue), Some(vec![1]));
        assert_eq!(pop(&queue), None);
    }
}
