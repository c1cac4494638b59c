//! Sets of blocks as runs.

use std::collections::BTreeMap;

/// A set of blocks: first block and number of blocks of each run, apart from each other.
#[derive(Debug, Default)]
pub(crate) struct Runs {
    runs: BTreeMap<u32, u32>,
    blocks: u64,
}

impl Runs {
    /// Adds a run, of which some may be in the set already.
    pub(crate) fn insert(&mut self, first: u32, count: u32) {
        let (mut start, mut end) = (first, first.saturating_add(count));
        if start == end {
            return;
        }
        // Every run that touches or overlaps the new one is merged with it.
        while let Some((&run, &len)) = self.runs.range(..=end).next_back() {
            if run + len < start {
                break;
            }
            self.take(run, len);
            start = start.min(run);
            end = end.max(run + len);
        }
        self.put(start, end);
    }

    /// Removes a run, of which some may not be in the set.
    pub(crate) fn remove(&mut self, first: u32, count: u32) {
        let (start, end) = (first, first.saturating_add(count));
        if start == end {
            return;
        }
        while let Some((&run, &len)) = self.runs.range(..end).next_back() {
            if run + len <= start {
                break;
            }
            self.take(run, len);
            self.put(run, start.max(run));
            if run + len > end {
                self.put(end, run + len);
            }
        }
    }

    fn take(&mut self, run: u32, len: u32) {
        self.runs.remove(&run);
        self.blocks -= u64::from(len);
    }

    fn put(&mut self, start: u32, end: u32) {
        if start < end {
            self.runs.insert(start, end - start);
            self.blocks += u64::from(end - start);
        }
    }

    pub(crate) fn contains(&self, block: u32) -> bool {
        self.end_of(block).is_some()
    }

    /// The end of the run that a block is in.
    pub(crate) fn end_of(&self, block: u32) -> Option<u32> {
        let (run, len) = self.runs.range(..=block).next_back()?;
        (block - run < *len).then(|| run + len)
    }

    /// The first block of `count` from `first` on that is in the set, if it is none before.
    pub(crate) fn next(&self, first: u32, count: u32) -> Option<u32> {
        if self.contains(first) && count > 0 {
            return Some(first);
        }
        self.runs.range(first..first.saturating_add(count)).next().map(|(run, _)| *run)
    }

    pub(crate) fn blocks(&self) -> u64 {
        self.blocks
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn runs_are_the_set_of_their_blocks(
            steps in proptest::collection::vec((any::<bool>(), 0u32..64, 0u32..9), 0..30),
        ) {
            let mut runs = Runs::default();
            let mut model = BTreeSet::new();
            for (add, first, count) in steps {
                if add {
                    runs.insert(first, count);
                    model.extend(first..first + count);
                } else {
                    runs.remove(first, count);
                    model.retain(|block| !(first..first + count).contains(block));
                }
            }
            for block in 0..80u32 {
                prop_assert_eq!(runs.contains(block), model.contains(&block));
                prop_assert_eq!(runs.next(block, 10), model.range(block..block + 10).next().copied());
                let end = (block..90).find(|b| !model.contains(b)).expect("far enough");
                prop_assert_eq!(runs.end_of(block), model.contains(&block).then_some(end));
            }
            prop_assert_eq!(runs.blocks(), model.len() as u64);
            prop_assert_eq!(runs.is_empty(), model.is_empty());
        }
    }
}
