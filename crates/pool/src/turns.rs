//! Locks by number, or another key, for calls that wait: readers share, a writer is alone, and who came first is served first.
//!
//! A call that needs several takes them all at once, in the order of their numbers, so that no two wait for each other. One that
//! is given up while it waits leaves the queue; one that is given up while it holds a lock lets go of it.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};

use futures_channel::oneshot;

/// How a lock is wanted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum TurnMode {
    Read,
    Write,
}

struct TurnLock<K: Ord + Copy> {
    readers: usize,
    has_writer: bool,
    queue: VecDeque<(TurnMode, oneshot::Sender<Turn<K>>)>,
}

impl<K: Ord + Copy> TurnLock<K> {
    fn admits(&self, mode: TurnMode) -> bool {
        !self.has_writer && (mode == TurnMode::Read || self.readers == 0)
    }

    fn admit(&mut self, mode: TurnMode) {
        match mode {
            TurnMode::Read => self.readers += 1,
            TurnMode::Write => self.has_writer = true,
        }
    }
}

impl<K: Ord + Copy> Default for TurnLock<K> {
    fn default() -> TurnLock<K> {
        TurnLock { readers: 0, has_writer: false, queue: VecDeque::new() }
    }
}

/// See the module.
#[derive(Clone)]
pub(crate) struct Turns<K: Ord + Copy = u64> {
    locks: Arc<Mutex<BTreeMap<K, TurnLock<K>>>>,
}

impl<K: Ord + Copy> Default for Turns<K> {
    fn default() -> Turns<K> {
        Turns { locks: Arc::default() }
    }
}

/// A lock that is held until this is dropped.
pub(crate) struct Turn<K: Ord + Copy = u64> {
    turns: Turns<K>,
    number: K,
    mode: TurnMode,
}

impl<K: Ord + Copy> Turns<K> {
    /// Shares the lock of `number`.
    pub(crate) async fn read(&self, number: K) -> Turn<K> {
        self.take(number, TurnMode::Read).await
    }

    /// Has the lock of `number` alone.
    pub(crate) async fn write(&self, number: K) -> Turn<K> {
        self.take(number, TurnMode::Write).await
    }

    /// Has the locks of all these numbers alone.
    pub(crate) async fn write_all(&self, numbers: impl IntoIterator<Item = K>) -> Vec<Turn<K>> {
        let mut numbers: Vec<K> = numbers.into_iter().collect();
        numbers.sort_unstable();
        numbers.dedup();
        let mut all = Vec::with_capacity(numbers.len());
        for number in numbers {
            all.push(self.write(number).await);
        }
        all
    }

    async fn take(&self, number: K, mode: TurnMode) -> Turn<K> {
        let waiting = {
            let mut locks = self.locked();
            let lock = locks.entry(number).or_default();
            if lock.queue.is_empty() && lock.admits(mode) {
                lock.admit(mode);
                return self.turn(number, mode);
            }
            let (sender, receiver) = oneshot::channel();
            lock.queue.push_back((mode, sender));
            receiver
        };
        waiting.await.expect("a queue is kept until all in it were served")
    }

    fn turn(&self, number: K, mode: TurnMode) -> Turn<K> {
        Turn { turns: self.clone(), number, mode }
    }

    fn locked(&self) -> MutexGuard<'_, BTreeMap<K, TurnLock<K>>> {
        self.locks.lock().expect("no holder of this lock panics")
    }
}

impl<K: Ord + Copy> Drop for Turn<K> {
    fn drop(&mut self) {
        let mut served = Vec::new();
        {
            let mut locks = self.turns.locked();
            let Some(lock) = locks.get_mut(&self.number) else { return };
            match self.mode {
                TurnMode::Read => lock.readers -= 1,
                TurnMode::Write => lock.has_writer = false,
            }
            while let Some((mode, sender)) = lock.queue.pop_front() {
                if sender.is_canceled() {
                    continue;
                }
                if !lock.admits(mode) {
                    lock.queue.push_front((mode, sender));
                    break;
                }
                lock.admit(mode);
                served.push((mode, sender));
            }
            if lock.readers == 0 && !lock.has_writer {
                locks.remove(&self.number);
            }
        }
        // Outside of the mutex: a turn that nobody waits for any more is dropped here, and gives the lock back.
        for (mode, sender) in served {
            let _ = sender.send(self.turns.turn(self.number, mode));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::pin;

    use futures_util::FutureExt;

    use super::*;

    fn is_ready<F: Future>(future: F) -> bool {
        pin!(future).now_or_never().is_some()
    }

    #[test]
    fn readers_share_and_a_writer_is_alone() {
        let turns = Turns::<u64>::default();
        let first = turns.read(7).now_or_never().unwrap();
        let second = turns.read(7).now_or_never().unwrap();
        assert!(!is_ready(turns.write(7)));
        assert!(is_ready(turns.write(8)), "another number");
        drop(first);
        assert!(!is_ready(turns.write(7)));
        drop(second);
        let writer = turns.write(7).now_or_never().unwrap();
        assert!(!is_ready(turns.read(7)));
        drop(writer);
        assert!(is_ready(turns.read(7)));
        assert!(turns.locked().is_empty(), "nothing is kept of locks that nobody has");
    }

    #[test]
    fn a_writer_that_waits_is_served_before_later_readers_and_one_that_gave_up_is_not() {
        let turns = Turns::<u64>::default();
        let reader = turns.read(1).now_or_never().unwrap();
        let mut writer = Box::pin(turns.write(1));
        assert!((&mut writer).now_or_never().is_none());
        let mut late = Box::pin(turns.read(1));
        assert!((&mut late).now_or_never().is_none(), "the writer came first");
        let mut given_up = Box::pin(turns.write(1));
        assert!((&mut given_up).now_or_never().is_none());
        drop(given_up);
        drop(reader);
        let writing = (&mut writer).now_or_never().expect("the writer's turn");
        assert!((&mut late).now_or_never().is_none());
        drop(writing);
        assert!((&mut late).now_or_never().is_some());
        drop((writer, late));
        assert!(is_ready(turns.write(1)));
    }

    #[test]
    fn a_turn_that_was_given_and_never_taken_goes_on_to_the_next() {
        let turns = Turns::<u64>::default();
        let first = turns.write(1).now_or_never().unwrap();
        let mut second = Box::pin(turns.write(1));
        let mut third = Box::pin(turns.write(1));
        assert!((&mut second).now_or_never().is_none());
        assert!((&mut third).now_or_never().is_none());
        drop(first);
        drop(second);
        assert!((&mut third).now_or_never().is_some());
    }
}
