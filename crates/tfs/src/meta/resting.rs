//! Freed blocks that wait for the commit of the transaction that freed them.

use std::collections::BTreeMap;

/// A set of blocks as runs: first block and number of blocks, apart from each other.
#[derive(Debug, Default)]
pub(super) struct RestingBlocks {
    runs: BTreeMap<u32, u32>,
    blocks: u64,
}

impl RestingBlocks {
    /// Adds a run. Blocks are freed once a transaction, for they rest until its end; a
    /// damaged file system may free one twice, which changes nothing.
    pub(super) fn insert(&mut self, first: u32, count: u32) {
        let (mut start, mut end) = (first, first.saturating_add(count));
        if start == end {
            return;
        }
        // Every run that touches or overlaps the new one is merged with it.
        while let Some((&run, &len)) = self.runs.range(..=end).next_back() {
            if run + len < start {
                break;
            }
            self.runs.remove(&run);
            self.blocks -= u64::from(len);
            start = start.min(run);
            end = end.max(run + len);
        }
        self.runs.insert(start, end - start);
        self.blocks += u64::from(end - start);
    }

    pub(super) fn contains(&self, block: u32) -> bool {
        self.runs.range(..=block).next_back().is_some_and(|(run, len)| block - run < *len)
    }

    pub(super) fn blocks(&self) -> u64 {
        self.blocks
    }

    pub(super) fn is_empty(&self) -> bool {
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
        fn runs_are_the_set_of_their_blocks(runs in proptest::collection::vec((0u32..64, 0u32..9), 0..20)) {
            let mut resting = RestingBlocks::default();
            let mut model = BTreeSet::new();
            for (first, count) in runs {
                resting.insert(first, count);
                model.extend(first..first + count);
            }
            for block in 0..80 {
                prop_assert_eq!(resting.contains(block), model.contains(&block));
            }
            prop_assert_eq!(resting.blocks(), model.len() as u64);
            prop_assert_eq!(resting.is_empty(), model.is_empty());
        }
    }
}
