//! The most recent of things that were seen, in bounded number.

use std::collections::BTreeMap;

/// How many are remembered. A guess: several times the connections of a node.
pub(super) const MAX_RECENT: usize = 4096;

/// What was noted last; beyond [`MAX_RECENT`] the least recently noted is forgotten.
pub(super) struct Recent<T> {
    /// When each was noted last, by `clock`.
    noted: BTreeMap<T, u64>,
    clock: u64,
}

impl<T> Default for Recent<T> {
    fn default() -> Recent<T> {
        Recent { noted: BTreeMap::new(), clock: 0 }
    }
}

impl<T: Ord + Copy> Recent<T> {
    pub(super) fn note(&mut self, it: T) {
        self.clock += 1;
        self.noted.insert(it, self.clock);
        if self.noted.len() > MAX_RECENT {
            let oldest = self.noted.iter().min_by_key(|(_, at)| **at).map(|(it, _)| *it);
            oldest.map(|oldest| self.noted.remove(&oldest));
        }
    }

    pub(super) fn contains(&self, it: &T) -> bool {
        self.noted.contains_key(it)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn beyond_the_bound_the_least_recently_noted_is_forgotten() {
        let mut recent = Recent::default();
        (0..MAX_RECENT).for_each(|n| recent.note(n));
        recent.note(0);
        recent.note(MAX_RECENT);
        assert_eq!([0, 1, 2, MAX_RECENT].map(|n| recent.contains(&n)), [true, false, true, true]);
    }
}
