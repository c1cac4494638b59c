//! How many there are of each of some things, as long as there are any.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

/// A multiset.
#[derive(Debug)]
pub(crate) struct Counts<T>(BTreeMap<T, usize>);

impl<T> Default for Counts<T> {
    fn default() -> Counts<T> {
        Counts(BTreeMap::new())
    }
}

impl<T: Ord> Counts<T> {
    /// One more.
    pub(crate) fn add(&mut self, one: T) {
        *self.0.entry(one).or_default() += 1;
    }

    /// One less of those that were added.
    pub(crate) fn take(&mut self, one: &T) {
        let count = self.0.get_mut(one).expect("it was added");
        *count -= 1;
        if *count == 0 {
            self.0.remove(one);
        }
    }

    /// How many there are.
    pub(crate) fn of(&self, one: &T) -> usize {
        self.0.get(one).copied().unwrap_or(0)
    }

    /// How many there are of all.
    pub(crate) fn total(&self) -> usize {
        self.0.values().sum()
    }
}

/// What is going on at present, counted until it ends.
#[derive(Debug)]
pub(crate) struct UnderWay<T>(Arc<Mutex<Counts<T>>>);

/// Things that have begun, until this is dropped.
#[derive(Debug)]
pub(crate) struct Begun<T: Ord> {
    all: UnderWay<T>,
    these: Vec<T>,
}

impl<T> Default for UnderWay<T> {
    fn default() -> UnderWay<T> {
        UnderWay(Arc::default())
    }
}

impl<T: Ord + Clone> UnderWay<T> {
    pub(crate) fn begin(&self, these: Vec<T>) -> Begun<T> {
        let mut counts = self.lock();
        these.iter().for_each(|one| counts.add(one.clone()));
        Begun { all: UnderWay(self.0.clone()), these }
    }
}

impl<T: Ord> UnderWay<T> {
    fn lock(&self) -> MutexGuard<'_, Counts<T>> {
        self.0.lock().expect("no holder of this lock panics")
    }

    /// How many there are.
    pub(crate) fn of(&self, one: &T) -> usize {
        self.lock().of(one)
    }
}

impl<T: Ord> Drop for Begun<T> {
    fn drop(&mut self) {
        let mut counts = self.all.lock();
        self.these.iter().for_each(|one| counts.take(one));
    }
}
