//! How many there are of each of some things, as long as there are any.

use std::collections::BTreeMap;

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
