//! The stored digests: a radix tree over the keys, sixteen children to a branch.
//!
//! A leaf stands for an interval with at most [`LEAF_ITEMS`] blocks, which are read from the
//! store when the leaf's digest is needed and not stored. A branch stands where keys first
//! differ, so a run of digits that all keys share costs one branch and not one for each digit.
//!
//! Expiry needs no scan: each stored digest knows the times for which it is true.

use atoll_key::{Key, KeyRange};

use super::digest::{self, Interval, Item, LIST_ITEMS, common_digits, digit};
use super::{MAX_PARTS, PARTS_WANTED, Part, Summary};
use crate::{BlockInfo, StoreError};

/// Blocks a leaf may stand for. A change costs reading one leaf at the next question; at 256
/// the stored digests take less than a byte a block.
const LEAF_ITEMS: usize = 256;

/// A branch with fewer blocks becomes a leaf again: far enough from [`LEAF_ITEMS`] that one
/// block that comes and goes does not build and drop a branch each time.
const MERGE_ITEMS: u64 = LEAF_ITEMS as u64 / 2;

/// What is known of the blocks of an interval, or of those of them that lie in a range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Known {
    pub(super) summary: Summary,
    /// Blocks held, expired ones included.
    held: u64,
    /// It is true for `from <= now < until`.
    from: u64,
    until: u64,
}

impl Known {
    pub(super) const NOTHING: Known =
        Known { summary: Summary::EMPTY, held: 0, from: 0, until: u64::MAX };

    pub(super) fn is_true_at(&self, now: u64) -> bool {
        self.from <= now && now < self.until
    }

    fn is_empty(&self) -> bool {
        self.summary.count == 0
    }
}

/// Why a question cannot go on.
#[derive(Debug)]
pub(super) enum Stop {
    /// It may read no more blocks for now; the digests so far are stored.
    Budget,
    Failed(StoreError),
}

/// Lists blocks of the store.
pub(crate) type List<'a> = dyn Fn(KeyRange, usize) -> Result<Vec<BlockInfo>, StoreError> + 'a;

/// What a question may use.
pub(super) struct Reading<'a> {
    pub(super) now: u64,
    /// `None` if it must do with what is stored.
    pub(super) list: Option<&'a List<'a>>,
    /// Blocks it may still read.
    pub(super) budget: usize,
}

impl Reading<'_> {
    /// Reads up to `limit` blocks from `first` to `last`, both included.
    fn read(&mut self, first: &Key, last: &Key, limit: usize) -> Result<Vec<BlockInfo>, Stop> {
        let list = self.list.ok_or(Stop::Budget)?;
        let found = list(KeyRange::new(first.previous(), *last), limit).map_err(Stop::Failed)?;
        self.budget = self.budget.saturating_sub(found.len().max(1));
        Ok(found)
    }
}

/// How an interval lies to a range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Overlap {
    Inside,
    Outside,
    Partial,
}

fn overlap(at: &Interval, range: &KeyRange) -> Overlap {
    let (first, last) = (range.contains(at.first()), range.contains(at.last()));
    // Does an end of the range lie between them?
    let within = |key: &Key| at.first() <= key && key < at.last();
    match (first, last, !range.is_full() && (within(&range.after) || within(&range.upto))) {
        (true, true, false) => Overlap::Inside,
        (false, false, false) => Overlap::Outside,
        _ => Overlap::Partial,
    }
}

#[derive(Debug, Default)]
pub(super) struct Node {
    /// What was found when it was looked at last, unless something has changed since.
    known: Option<Known>,
    branch: Option<Box<Branch>>,
}

/// Keys that agree in the first `depth` digits, and are told apart by the next one.
#[derive(Debug)]
struct Branch {
    prefix: Key,
    depth: usize,
    children: [Node; 16],
}

impl Branch {
    fn new(prefix: Key, depth: usize) -> Branch {
        Branch { prefix, depth, children: Default::default() }
    }

    fn child(&self, digit: usize) -> Interval {
        Interval::child(&self.prefix, self.depth, digit)
    }
}

/// Where a range is cut: between the children of a branch.
struct Fork {
    prefix: Key,
    depth: usize,
}

impl Node {
    /// Something has changed about keys that have the first `digits` digits of `key`.
    pub(super) fn note(&mut self, key: &Key, digits: usize) {
        self.known = None;
        let Some(branch) = &mut self.branch else { return };
        let common = common_digits(key, &branch.prefix).min(digits);
        if common == digits && branch.depth >= digits {
            self.branch = None;
        } else if common >= branch.depth {
            branch.children[digit(key, branch.depth)].note(key, digits);
        } else {
            // None of the branch's, so there was no such key: the branch gets one above it.
            let mut above = Branch::new(branch.prefix, common);
            for child in &mut above.children {
                child.known = Some(Known::NOTHING);
            }
            let place = digit(&branch.prefix, common);
            above.children[digit(key, common)].known = None;
            above.children[place] = Node { known: None, branch: self.branch.take() };
            self.branch = Some(Box::new(above));
        }
    }

    /// What lies in `range` of this node's interval `at`.
    pub(super) fn summarize(
        &mut self,
        at: Interval,
        range: &KeyRange,
        reading: &mut Reading<'_>,
    ) -> Result<Known, Stop> {
        let overlap = overlap(&at, range);
        if overlap == Overlap::Outside {
            return Ok(Known::NOTHING);
        }
        let stored = self.known.filter(|known| known.is_true_at(reading.now));
        if let Some(known) = stored.filter(|known| overlap == Overlap::Inside || known.held == 0) {
            return Ok(known);
        }
        let mut known = None;
        if self.branch.is_none() {
            known = self.read_leaf(&at, range, reading)?;
        }
        let known = match (known, &mut self.branch) {
            (Some(known), _) => known,
            (None, Some(branch)) => branch.summarize(range, reading)?,
            (None, None) => unreachable!("what is not read as a leaf has become a branch"),
        };
        if overlap == Overlap::Inside {
            self.known = Some(known);
            self.simplify(known.held);
        }
        Ok(known)
    }

    /// Reads the blocks of a leaf; makes it a branch, and returns `None`, if there are many.
    fn read_leaf(
        &mut self,
        at: &Interval,
        range: &KeyRange,
        reading: &mut Reading<'_>,
    ) -> Result<Option<Known>, Stop> {
        if reading.budget == 0 {
            return Err(Stop::Budget);
        }
        let found = reading.read(at.first(), at.last(), LEAF_ITEMS + 1)?;
        if let [first, .., last] = &found[..]
            && found.len() > LEAF_ITEMS
        {
            // The first digits that all keys of the interval share, not only those read.
            let mut depth = common_digits(&first.key, &last.key);
            while let rest = Interval::around(&first.key, depth)
                && rest.last() < at.last()
            {
                let beyond = reading.read(&rest.last().next(), at.last(), 1)?;
                let Some(other) = beyond.first() else { break };
                depth = common_digits(&first.key, &other.key);
            }
            self.branch = Some(Box::new(Branch::new(first.key, depth)));
            return Ok(None);
        }
        let (items, known) = unexpired(&found, range, reading.now);
        Ok(Some(with_digest(known, &items)))
    }

    /// Drops branches that have become needless.
    fn simplify(&mut self, held: u64) {
        let Some(branch) = &mut self.branch else { return };
        if held <= MERGE_ITEMS {
            self.branch = None;
            return;
        }
        let in_use = |child: &Node| child.known.is_none_or(|known| known.held > 0);
        let mut used = branch.children.iter_mut().filter(|child| in_use(child));
        if let (Some(only), None) = (used.next(), used.next())
            && only.branch.is_some()
        {
            self.branch = only.branch.take();
        }
    }

    /// Adds the unexpired items of `range` in this node's interval `at`.
    fn collect(
        &self,
        at: Interval,
        range: &KeyRange,
        reading: &mut Reading<'_>,
        items: &mut Vec<Item>,
    ) -> Result<(), Stop> {
        let stored = self.known.filter(|known| known.is_true_at(reading.now));
        if overlap(&at, range) == Overlap::Outside || stored.is_some_and(|known| known.is_empty()) {
            return Ok(());
        }
        if let Some(branch) = &self.branch {
            for (digit, child) in branch.children.iter().enumerate() {
                child.collect(branch.child(digit), range, reading, items)?;
            }
            return Ok(());
        }
        // More than a leaf's worth only if many have come in the last moment.
        let found = reading.read(at.first(), at.last(), usize::MAX)?;
        items.extend(unexpired(&found, range, reading.now).0);
        Ok(())
    }

    /// Where the blocks of `range` in this node's interval `at` first differ.
    fn fork(
        &mut self,
        at: Interval,
        range: &KeyRange,
        reading: &mut Reading<'_>,
    ) -> Result<Option<Fork>, Stop> {
        let Some(branch) = &mut self.branch else {
            let found = reading.read(at.first(), at.last(), LEAF_ITEMS + 1)?;
            let (items, _) = unexpired(&found, range, reading.now);
            let [first, .., last] = &items[..] else { return Ok(None) };
            let depth = common_digits(&first.key, &last.key);
            return Ok(Some(Fork { prefix: first.key, depth }));
        };
        let mut used = None;
        for digit in 0..16 {
            let at = branch.child(digit);
            if branch.children[digit].summarize(at, range, reading)?.is_empty() {
                continue;
            }
            if used.replace(digit).is_some() {
                return Ok(Some(Fork { prefix: branch.prefix, depth: branch.depth }));
            }
        }
        match used {
            Some(digit) => branch.children[digit].fork(branch.child(digit), range, reading),
            None => Ok(None),
        }
    }

    /// Cuts `range` into parts, all of which together make it up, where this store's blocks
    /// lie; a range with few blocks is not cut.
    pub(super) fn cut(
        &mut self,
        range: KeyRange,
        reading: &mut Reading<'_>,
    ) -> Result<Vec<Part>, Stop> {
        let summary = self.summarize(Interval::FULL, &range, reading)?.summary;
        let mut parts = vec![Part { range, summary }];
        while parts.len() < PARTS_WANTED {
            let largest = (0..parts.len()).max_by_key(|at| parts[*at].summary.count);
            let Some(at) = largest.filter(|at| parts[*at].summary.count > LIST_ITEMS as u64) else {
                break;
            };
            let whole = parts[at].range;
            let Some(fork) = self.fork(Interval::FULL, &whole, reading)? else { break };
            let mut cut = Vec::new();
            for range in fork.cut(whole) {
                let summary = self.summarize(Interval::FULL, &range, reading)?.summary;
                cut.push(Part { range, summary });
            }
            if cut.len() < 2 {
                break;
            }
            parts.splice(at..=at, cut);
        }
        assert!(parts.len() <= MAX_PARTS, "a cut makes at most 17 parts of one");
        Ok(parts)
    }

    /// How many nodes there are below and with this one.
    #[cfg(test)]
    pub(super) fn count(&self) -> usize {
        let below = self.branch.iter().flat_map(|branch| &branch.children);
        1 + below.map(Node::count).sum::<usize>()
    }
}

impl Branch {
    fn summarize(&mut self, range: &KeyRange, reading: &mut Reading<'_>) -> Result<Known, Stop> {
        let mut total = Known::NOTHING;
        let mut parts = Vec::new();
        for digit in 0..16 {
            let at = self.child(digit);
            let known = self.children[digit].summarize(at, range, reading)?;
            total.held += known.held;
            total.from = total.from.max(known.from);
            total.until = total.until.min(known.until);
            if !known.is_empty() {
                total.summary.count += known.summary.count;
                parts.push((digit, known.summary.count, known.summary.digest));
            }
        }
        total.summary.digest = match &parts[..] {
            [] => Summary::EMPTY.digest,
            [(_, _, digest)] => *digest,
            _ if total.summary.count <= LIST_ITEMS as u64 => {
                let mut items = Vec::new();
                for (digit, child) in self.children.iter().enumerate() {
                    child.collect(self.child(digit), range, reading, &mut items)?;
                }
                total.summary.count = items.len() as u64;
                digest::of_items(&items)
            }
            _ => digest::of_parts(parts.into_iter()),
        };
        Ok(total)
    }
}

impl Fork {
    fn cut(&self, range: KeyRange) -> Vec<KeyRange> {
        let ends = (0..16).map(|digit| *Interval::child(&self.prefix, self.depth, digit).last());
        let mut ends: Vec<Key> =
            ends.filter(|end| range.contains(end) && *end != range.upto).collect();
        ends.sort_by_key(|end| end.wrapping_sub(&range.after.next()));
        ends.push(range.upto);
        let mut after = range.after;
        let parts =
            ends.into_iter().map(|upto| KeyRange::new(std::mem::replace(&mut after, upto), upto));
        parts.collect()
    }
}

/// Of blocks read, the items of `range` that have not expired at `now`, and what is known of
/// the blocks but for the digest.
fn unexpired(found: &[BlockInfo], range: &KeyRange, now: u64) -> (Vec<Item>, Known) {
    let mut known = Known::NOTHING;
    let mut items = Vec::new();
    for info in found.iter().filter(|info| range.contains(&info.key)) {
        known.held += 1;
        if info.expires_unix_secs > now {
            known.until = known.until.min(info.expires_unix_secs);
            items.push(Item { key: info.key, version: info.version });
        } else {
            known.from = known.from.max(info.expires_unix_secs);
        }
    }
    (items, known)
}

fn with_digest(known: Known, items: &[Item]) -> Known {
    let digest = if items.is_empty() { Summary::EMPTY.digest } else { digest::of_items(items) };
    Known { summary: Summary { digest, count: items.len() as u64 }, ..known }
}
