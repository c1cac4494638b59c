//! A table by key of bounded size: beyond `MOST` entries the least recently noted is forgotten.

use std::collections::BTreeMap;

use atoll_key::Key;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Recent<T, const MOST: usize> {
    /// What was noted, and when by `clock`.
    noted: BTreeMap<Key, (u64, T)>,
    clock: u64,
}

impl<T, const MOST: usize> Recent<T, MOST> {
    pub(super) fn get(&self, key: &Key) -> Option<&T> {
        self.noted.get(key).map(|(_, value)| value)
    }

    /// Replaces what was noted for a key.
    pub(super) fn note(&mut self, key: Key, value: T) {
        self.clock += 1;
        self.noted.insert(key, (self.clock, value));
        if self.noted.len() > MOST {
            let oldest = self.noted.iter().min_by_key(|(_, (at, _))| *at).map(|(key, _)| *key);
            oldest.map(|oldest| self.noted.remove(&oldest));
        }
    }

    pub(super) fn forget(&mut self, key: &Key) {
        self.noted.remove(key);
    }

    /// All entries, the least recently noted first.
    pub(super) fn oldest_first(&self) -> Vec<(&Key, &T)> {
        let mut all: Vec<_> = self.noted.iter().collect();
        all.sort_unstable_by_key(|(_, (at, _))| *at);
        all.into_iter().map(|(key, (_, value))| (key, value)).collect()
    }

    pub(super) fn clear(&mut self) {
        self.noted.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn beyond_the_bound_the_least_recently_noted_is_forgotten() {
        let (mut recent, key) = (Recent::<u8, 3>::default(), |n| Key::hashed([n; 32]));
        for n in [0, 1, 2, 0, 3] {
            recent.note(key(n), n);
        }
        assert_eq!(
            [0, 1, 2, 3].map(|n| recent.get(&key(n)).copied()),
            [Some(0), None, Some(2), Some(3)]
        );
        let in_order: Vec<u8> = recent.oldest_first().into_iter().map(|(_, n)| *n).collect();
        assert_eq!(in_order, [2, 0, 3]);
    }
}
