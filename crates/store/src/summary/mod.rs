//! Summaries of key ranges: two stores compare what they hold at a cost in proportion to what
//! has changed.
//!
//! The digest of a set of blocks is a function of their keys and versions and of nothing else,
//! so that two stores with equal blocks in a range have equal digests whatever else they hold
//! and whatever happened before:
//!
//! - up to 64 blocks: BLAKE3 of `atoll summary list`, then each key and version, in key order;
//! - more: the blocks are divided by the first hexadecimal digit in which their keys differ.
//!   BLAKE3 of `atoll summary branch`, then digit (1 byte), count (8 bytes) and digest of each
//!   part that is not empty. All integers are big-endian.
//!
//! An attacker cannot make two different sets with equal digests, as with sums of hashes
//! (Wagner, *A generalized birthday problem*, CRYPTO 2002), so no secret or salt takes part, and
//! digests may be stored. [`tree`] keeps them for intervals of about 256 blocks and upwards.
//! A change marks its key ([`Changed`]); the next question reads the leaves of marked keys again.
//!
//! Only blocks whose lease has not ended count. Each stored digest knows from when to when it is
//! true, so nothing needs to be done when a lease ends.

mod digest;
mod merged;
mod tree;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard};

use atoll_key::{Key, KeyRange};
use futures_util::lock::OwnedMutexGuard;

use crate::StoreError;
use digest::Interval;
use tree::{Known, Node, Reading, Stop};

pub use merged::Merged;
pub(crate) use tree::List;

/// What a range holds, in few bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Summary {
    /// A digest of the keys and versions of the unexpired blocks; zeros if there are none.
    pub digest: [u8; 32],
    /// How many they are.
    pub count: u64,
}

impl Summary {
    /// Of a range without blocks.
    pub const EMPTY: Summary = Summary { digest: [0; 32], count: 0 };
}

/// A range and its summary.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Part {
    /// The range.
    pub range: KeyRange,
    /// What it holds.
    pub summary: Summary,
}

/// A range is cut until it has this many parts, or no part with more than 64 blocks is left.
const PARTS_WANTED: usize = 16;

/// The most parts a range is cut into.
pub const MAX_PARTS: usize = 32;

/// Blocks read in one step of a question: some ten milliseconds.
const STEP_BLOCKS: usize = 16 << 10;

/// Changed keys remembered one by one; 4 MiB. Beyond that only their first digits are remembered.
const MAX_CHANGED_KEYS: usize = 64 << 10;

/// The digits that are remembered of keys when too many have changed.
const COARSE_DIGITS: usize = 4;

/// Answers remembered, so that asking again costs nothing.
const MAX_ANSWERS: usize = 256;

/// What has changed since the last question.
#[derive(Debug, Default)]
pub(crate) struct Changed(Mutex<Marks>);

#[derive(Debug, Default)]
struct Marks {
    /// The latest time a question was about; `None` before the first one.
    latest_now: Option<u64>,
    keys: Vec<Key>,
    /// First keys of the intervals of the first digits.
    coarse: BTreeSet<Key>,
}

/// What a summary depends on: a block's version and the end of its lease.
pub(crate) type Seen = Option<(u64, u64)>;

impl Changed {
    fn marks(&self) -> MutexGuard<'_, Marks> {
        self.0.lock().expect("no panic while the lock is held")
    }

    /// `new` is held under `key` instead of `old`. To be called when the change can be seen, and
    /// before anybody is told that it has been made.
    pub(crate) fn note(&self, key: &Key, old: Seen, new: Seen) {
        if old == new {
            return;
        }
        let mut marks = self.marks();
        let Some(latest_now) = marks.latest_now else { return };
        // A longer lease matters only to a block that some question took for expired. Otherwise a
        // stored digest remains true until the former end of the lease.
        let is_renewal = old.zip(new).is_some_and(|(old, new)| old.0 == new.0 && old.1 < new.1);
        if is_renewal && old.is_some_and(|(_, expires)| expires > latest_now) {
            return;
        }
        marks.keys.push(*key);
        if marks.keys.len() >= MAX_CHANGED_KEYS {
            let Marks { keys, coarse, .. } = &mut *marks;
            coarse.extend(keys.drain(..).map(|key| *Interval::around(&key, COARSE_DIGITS).first()));
        }
    }

    /// Takes what is marked, for a question about `now`.
    fn take(&self, now: u64) -> (Vec<Key>, BTreeSet<Key>) {
        let mut marks = self.marks();
        marks.latest_now = marks.latest_now.max(Some(now));
        (std::mem::take(&mut marks.keys), std::mem::take(&mut marks.coarse))
    }
}

/// What is asked of a store's summaries.
#[derive(Clone, Debug)]
pub(crate) enum Question {
    /// The summaries of ranges.
    Summaries(Vec<KeyRange>),
    /// The parts of a range.
    Cut(KeyRange),
}

impl Question {
    /// What a store without blocks says.
    pub(crate) fn of_nothing(&self) -> Vec<Part> {
        let ranges = match self {
            Question::Summaries(ranges) => ranges.clone(),
            Question::Cut(range) => vec![*range],
        };
        ranges.into_iter().map(|range| Part { range, summary: Summary::EMPTY }).collect()
    }
}

/// The summaries of a store.
#[derive(Debug, Default)]
pub(crate) struct Summaries {
    pub(crate) changed: Arc<Changed>,
    stored: Arc<futures_util::lock::Mutex<Stored>>,
}

#[derive(Debug, Default)]
struct Stored {
    root: Node,
    /// Answers to earlier questions, the latest last.
    answers: Vec<(KeyRange, Known)>,
}

/// A question that is being answered. Others wait for it.
pub(crate) struct Asked {
    stored: OwnedMutexGuard<Stored>,
    question: Question,
    now: u64,
    parts: Vec<Part>,
}

impl Summaries {
    /// Begins to answer a question about the blocks that are unexpired at `now`.
    pub(crate) async fn ask(&self, question: Question, now_unix_secs: u64) -> Asked {
        // At the end of time nothing is unexpired; no digest is true for that second.
        let now = now_unix_secs.min(u64::MAX - 1);
        let mut stored = self.stored.clone().lock_owned().await;
        stored.apply(self.changed.take(now));
        Asked { stored, question, now, parts: Vec::new() }
    }

    /// Answers at once, for a store that waits for nothing.
    pub(crate) fn ask_now(
        &self,
        question: Question,
        now_unix_secs: u64,
        list: &List<'_>,
    ) -> Result<Vec<Part>, StoreError> {
        let asked = futures_util::FutureExt::now_or_never(self.ask(question, now_unix_secs));
        let mut asked = asked.expect("nobody waits with an unanswered question");
        loop {
            if let Some(parts) = asked.step(Some(list))? {
                return Ok(parts);
            }
        }
    }

    /// Forgets all digests, when the list of blocks has changed in ways that were not noted.
    pub(crate) async fn forget(&self) {
        *self.stored.lock().await = Stored::default();
    }
}

impl Stored {
    fn apply(&mut self, (keys, coarse): (Vec<Key>, BTreeSet<Key>)) {
        if !coarse.is_empty() || keys.len() > MAX_ANSWERS {
            self.answers.clear();
        }
        for key in &coarse {
            self.root.note(key, COARSE_DIGITS);
        }
        for key in &keys {
            self.root.note(key, 2 * key.0.len());
            self.answers.retain(|(range, _)| !range.contains(key));
        }
    }

    fn summary(&mut self, range: KeyRange, reading: &mut Reading<'_>) -> Result<Summary, Stop> {
        let found = self
            .answers
            .iter()
            .position(|(asked, known)| *asked == range && known.is_true_at(reading.now));
        if let Some(at) = found {
            let answer = self.answers.remove(at);
            self.answers.push(answer);
            return Ok(answer.1.summary);
        }
        let known = self.root.summarize(Interval::FULL, &range, reading)?;
        self.answers.retain(|(asked, _)| *asked != range);
        if self.answers.len() >= MAX_ANSWERS {
            self.answers.remove(0);
        }
        self.answers.push((range, known));
        Ok(known.summary)
    }
}

impl Asked {
    /// Goes on with the answer, for some ten milliseconds at most; `None` if there is more to
    /// do. Without `list`, only what is stored is looked at.
    pub(crate) fn step(
        &mut self,
        list: Option<&List<'_>>,
    ) -> Result<Option<Vec<Part>>, StoreError> {
        let mut reading = Reading { now: self.now, list, budget: STEP_BLOCKS };
        let answered = match &self.question {
            Question::Cut(range) => self.stored.root.cut(*range, &mut reading).map(|parts| {
                self.parts = parts;
            }),
            Question::Summaries(ranges) => (|| {
                for range in &ranges[self.parts.len()..] {
                    let summary = self.stored.summary(*range, &mut reading)?;
                    self.parts.push(Part { range: *range, summary });
                }
                Ok(())
            })(),
        };
        match answered {
            Ok(()) => Ok(Some(std::mem::take(&mut self.parts))),
            Err(Stop::Budget) => Ok(None),
            Err(Stop::Failed(error)) => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::collections::BTreeMap;

    use atoll_key::BlockKind;

    use super::*;
    use crate::{BlockInfo, Owner};

    /// Blocks with their leases, and how many of them have been read.
    #[derive(Default)]
    struct Blocks {
        held: BTreeMap<Key, u64>,
        summaries: Summaries,
        read: Cell<usize>,
    }

    impl Blocks {
        fn set(&mut self, key: Key, expires: Option<u64>) {
            let old = match expires {
                Some(expires) => self.held.insert(key, expires),
                None => self.held.remove(&key),
            };
            let seen = |expires| (0, expires);
            self.summaries.changed.note(&key, old.map(seen), expires.map(seen));
        }

        fn list(&self, range: KeyRange, limit: usize) -> Result<Vec<BlockInfo>, StoreError> {
            let runs = range.linear().into_iter();
            let held = runs.flat_map(|(first, last)| self.held.range(first..=last)).take(limit);
            let infos: Vec<BlockInfo> = held
                .map(|(key, expires)| BlockInfo {
                    key: *key,
                    kind: BlockKind::Content,
                    version: 0,
                    expires_unix_secs: *expires,
                    len_bytes: 0,
                    owner: Owner::NOBODY,
                })
                .collect();
            self.read.set(self.read.get() + infos.len());
            Ok(infos)
        }

        fn ask(&self, range: KeyRange, now: u64) -> Summary {
            let list = |range, limit| self.list(range, limit);
            let question = Question::Summaries(vec![range]);
            self.summaries.ask_now(question, now, &list).expect("readable")[0].summary
        }

        /// The summary, and how many blocks were read for it.
        fn cost(&self, range: KeyRange, now: u64) -> (Summary, usize) {
            let before = self.read.get();
            (self.ask(range, now), self.read.get() - before)
        }

        /// The same by a store that has never been asked.
        fn afresh(&self, range: KeyRange, now: u64) -> Summary {
            let fresh = Blocks { held: self.held.clone(), ..Blocks::default() };
            fresh.ask(range, now)
        }

        fn nodes(&self) -> usize {
            let asked = self.summaries.ask(Question::Cut(KeyRange::full()), 0);
            let asked = futures_util::FutureExt::now_or_never(asked).expect("nobody else asks");
            asked.stored.root.count()
        }
    }

    fn hashed(n: u64) -> Key {
        Key::hashed(blake3::hash(&n.to_be_bytes()).into())
    }

    /// A key of a family in which all but the last bytes are equal.
    fn ordered(n: u64) -> Key {
        let mut key = Key([0xab; 64]);
        key.0[56..].copy_from_slice(&n.to_be_bytes());
        key
    }

    #[test]
    fn a_question_reads_what_has_changed_and_no_more() {
        for make in [hashed, ordered] {
            let mut blocks = Blocks::default();
            (0..50_000).for_each(|n| blocks.set(make(n), Some(100)));
            let full = KeyRange::full();
            let (first, cost) = blocks.cost(full, 1);
            assert!((50_000..75_000).contains(&cost), "all is read once: {cost}");
            assert_eq!(blocks.cost(full, 50), (first, 0));
            for n in 0..20 {
                let key = make(n * 1009);
                blocks.set(key, None);
                let (without, cost) = blocks.cost(full, 50);
                assert!(without != first && cost <= 300, "{cost}");
                blocks.set(key, Some(100));
                let (with, cost) = blocks.cost(full, 50);
                assert!(with == first && cost <= 300, "{cost}");
            }
            let half = KeyRange::new(make(3), make(4));
            let (part, cost) = blocks.cost(half, 50);
            assert!(cost <= 1200, "the leaves at both ends: {cost}");
            assert_eq!(part, blocks.afresh(half, 50));
            assert_eq!(blocks.cost(half, 50), (part, 0));
            blocks.set(make(60_000), Some(100));
            assert_eq!(blocks.ask(half, 50), blocks.afresh(half, 50));
        }
    }

    #[test]
    fn renewing_costs_nothing_until_the_former_lease_would_have_ended() {
        let mut blocks = Blocks::default();
        (0..10_000).for_each(|n| blocks.set(hashed(n), Some(100 + n % 7)));
        let full = KeyRange::full();
        let (before, _) = blocks.cost(full, 1);
        (0..10_000).for_each(|n| blocks.set(hashed(n), Some(200)));
        assert_eq!(blocks.cost(full, 99), (before, 0));
        let (later, cost) = blocks.cost(full, 150);
        assert!(later == before && cost >= 10_000, "{cost}");
        // One that was taken for expired is there again.
        blocks.set(hashed(1), Some(201));
        assert_eq!(blocks.ask(full, 200).count, 1);
        blocks.set(hashed(2), Some(300));
        assert_eq!(blocks.ask(full, 200).count, 2);
        assert_eq!(blocks.ask(full, 150), before);
    }

    #[test]
    fn more_changes_than_are_remembered_are_not_forgotten() {
        let mut blocks = Blocks::default();
        (0..1000).for_each(|n| blocks.set(ordered(n), Some(100)));
        let full = KeyRange::full();
        blocks.ask(full, 1);
        for n in 0..MAX_CHANGED_KEYS as u64 + 10 {
            blocks.set(if n % 2 == 0 { ordered(n) } else { hashed(n) }, Some(100));
        }
        assert_eq!(blocks.ask(full, 1), blocks.afresh(full, 1));
    }

    #[test]
    fn what_is_stored_is_in_proportion_to_what_is_held() {
        for make in [hashed, ordered] {
            let mut blocks = Blocks::default();
            (0..60_000).for_each(|n| blocks.set(make(n), Some(100)));
            blocks.ask(KeyRange::full(), 1);
            let many = blocks.nodes();
            assert!((60_000 / 256..60_000 / 8).contains(&many), "{many}");
            (100..60_000).for_each(|n| blocks.set(make(n), None));
            blocks.ask(KeyRange::full(), 1);
            assert_eq!(blocks.nodes(), 1);
        }
    }
}
