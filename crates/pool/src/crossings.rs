//! Changes over several groups: all of them make their part, or none does. Plain state; [`crate::group`] drives it.
//!
//! The group whose directory loses a name, or gets one, *coordinates*. It asks each other group to *prepare* its part: that group
//! checks it, writes it to its journal, and holds the names and files that it is about; calls that need one of them wait. When all are
//! prepared, the coordinator *decides* by a change of its own journal, which is its own part, too, and answers. Then it *tells* the
//! others, which make theirs, until each has said so.
//!
//! This is two-phase commit with presumed abort (Mohan, Lindsay and Obermarck, 1986). Each group is a state machine that survives its
//! members, so a group that is prepared waits for its coordinator no longer than that group is away.
//!
//! **Invariants.** A part that is prepared is kept until its outcome is known, by all members of the group. A crossing that was
//! decided is known to the coordinator's group until all others have made their parts. One that this group does not know, and that
//! no primary of it is at work on, never happened and never will: its number is random, and only the primary that began it can
//! decide it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use futures_channel::oneshot;
use minicbor::{Decode, Encode};

use crate::change::{CrossingId, CrossingPart, PoolChange, PoolPlace};
use crate::layout::{FileId, GroupNumber};

/// A group has at most so many prepared parts.
pub(crate) const MAX_PREPARED: usize = 1024;

/// The number of ended parts that a group remembers.
const MAX_ENDED: usize = 1024;

/// The names and files that a change over several groups holds, or that a call needs.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(crate) struct HeldByCrossings {
    places: BTreeSet<PoolPlace>,
    files: BTreeSet<FileId>,
    /// Directories that names are made in, or that go.
    directories: BTreeSet<FileId>,
    /// Files that are looked at.
    looked: BTreeSet<FileId>,
    moves: bool,
}

impl HeldByCrossings {
    /// The names and files that these changes touch.
    pub(crate) fn of(changes: &[PoolChange], moves: bool) -> HeldByCrossings {
        let mut held = HeldByCrossings { moves, ..HeldByCrossings::default() };
        for change in changes {
            let (files, places) = change.needs();
            held.files.extend(files);
            held.directories.extend(places.iter().map(|place| place.parent));
            held.places.extend(places.into_iter().cloned());
        }
        held
    }

    /// What a change of these names needs, and of these files.
    pub(crate) fn of_names<'a>(
        files: impl IntoIterator<Item = FileId>,
        places: impl IntoIterator<Item = &'a PoolPlace>,
    ) -> HeldByCrossings {
        let places: BTreeSet<PoolPlace> = places.into_iter().cloned().collect();
        let directories = places.iter().map(|place| place.parent).collect();
        let files = files.into_iter().collect();
        HeldByCrossings { places, files, directories, ..HeldByCrossings::default() }
    }

    /// What a look at a file needs that may be just made, or moved.
    pub(crate) fn of_file(id: FileId) -> HeldByCrossings {
        HeldByCrossings { looked: BTreeSet::from([id]), ..HeldByCrossings::default() }
    }

    /// What a lookup of a name needs.
    pub(crate) fn of_name(place: &PoolPlace) -> HeldByCrossings {
        HeldByCrossings { places: BTreeSet::from([place.clone()]), ..HeldByCrossings::default() }
    }

    /// Whether a change that needs these has to wait for one that has those.
    pub(crate) fn meets(&self, other: &HeldByCrossings) -> bool {
        // A directory that goes gets no names, and one that gets names does not go.
        let goes_into = |one: &HeldByCrossings, other: &HeldByCrossings| {
            !one.files.is_disjoint(&other.directories)
        };
        !self.places.is_disjoint(&other.places)
            || !self.files.is_disjoint(&other.files)
            || goes_into(self, other)
            || goes_into(other, self)
            || !self.looked.is_disjoint(&other.files)
            || !other.looked.is_disjoint(&self.files)
            || (self.moves && other.moves)
    }
}

/// See the module. What a member knows of crossings.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(crate) struct Crossings {
    /// Parts that wait for their outcome.
    prepared: BTreeMap<CrossingId, CrossingPart>,
    /// The names and files of each part, so that they need not be gathered for each call that asks.
    held: BTreeMap<CrossingId, HeldByCrossings>,
    /// The last parts that were made or abandoned, so that none is prepared again by a message that comes late.
    ended: VecDeque<CrossingId>,
    /// Crossings that were decided here and not told to all, and the other groups of each.
    decided: BTreeMap<CrossingId, BTreeSet<GroupNumber>>,
}

/// One entry as it is stored.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub(crate) enum CrossingRecord {
    #[n(0)]
    Prepared(#[n(0)] CrossingId, #[n(1)] CrossingPart),
    #[n(1)]
    Decided(#[n(0)] CrossingId, #[n(1)] Vec<GroupNumber>),
    #[n(2)]
    Ended(#[n(0)] CrossingId),
}

impl Crossings {
    /// A change is made.
    pub(crate) fn note(&mut self, change: &PoolChange) {
        match change {
            PoolChange::Prepared { crossing, part } => self.prepare(*crossing, part.clone()),
            PoolChange::Decided { crossing, groups, .. } => {
                self.decided.insert(*crossing, groups.iter().copied().collect());
            }
            PoolChange::PartMade { crossing, .. } | PoolChange::Abandoned { crossing } => {
                self.prepared.remove(crossing);
                self.held.remove(crossing);
                self.end(*crossing);
            }
            PoolChange::Told { crossing } => {
                self.decided.remove(crossing);
            }
            _ => {}
        }
    }

    fn end(&mut self, crossing: CrossingId) {
        self.ended.push_back(crossing);
        if self.ended.len() > MAX_ENDED {
            self.ended.pop_front();
        }
    }

    /// Whether a part was made or abandoned, as far as that is remembered.
    pub(crate) fn has_ended(&self, crossing: CrossingId) -> bool {
        self.ended.contains(&crossing)
    }

    fn prepare(&mut self, crossing: CrossingId, part: CrossingPart) {
        self.held.insert(crossing, HeldByCrossings::of(&part.changes, part.moves));
        self.prepared.insert(crossing, part);
    }

    pub(crate) fn prepared(&self) -> &BTreeMap<CrossingId, CrossingPart> {
        &self.prepared
    }

    /// How many changes of names wait in prepared parts.
    pub(crate) fn changes_waiting(&self) -> usize {
        self.prepared.values().map(|part| part.changes.len()).sum()
    }

    pub(crate) fn decided(&self) -> &BTreeMap<CrossingId, BTreeSet<GroupNumber>> {
        &self.decided
    }

    /// All entries as they are stored.
    pub(crate) fn records(&self) -> impl Iterator<Item = CrossingRecord> + '_ {
        let prepared = self.prepared.iter();
        let prepared = prepared.map(|(id, part)| CrossingRecord::Prepared(*id, part.clone()));
        let decided = self
            .decided
            .iter()
            .map(|(id, groups)| CrossingRecord::Decided(*id, groups.iter().copied().collect()));
        let ended = self.ended.iter().map(|id| CrossingRecord::Ended(*id));
        prepared.chain(decided).chain(ended)
    }

    /// Adds an entry.
    pub(crate) fn add(&mut self, record: CrossingRecord) {
        match record {
            CrossingRecord::Prepared(id, part) => self.prepare(id, part),
            CrossingRecord::Ended(id) => self.end(id),
            CrossingRecord::Decided(id, groups) => {
                self.decided.insert(id, groups.into_iter().collect());
            }
        }
    }
}

/// What a group does in a crossing for which it holds something.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum HoldingPart {
    /// It coordinates.
    Coordinates,
    /// It plans the crossing, or is about to be prepared.
    Prepares,
}

/// What crossings hold that are not prepared, and calls that wait for that, or for a prepared part.
#[derive(Default)]
pub(crate) struct CrossingHolds {
    held: BTreeMap<(CrossingId, HoldingPart), HeldByCrossings>,
    waiting: Vec<oneshot::Sender<()>>,
}

impl CrossingHolds {
    /// A crossing begins.
    pub(crate) fn hold(&mut self, by: (CrossingId, HoldingPart), held: HeldByCrossings) {
        self.held.insert(by, held);
    }

    /// It has ended.
    pub(crate) fn release(&mut self, by: (CrossingId, HoldingPart)) {
        self.held.remove(&by);
    }

    /// Whether this member is at work on one.
    pub(crate) fn coordinates(&self, crossing: CrossingId) -> bool {
        self.held.contains_key(&(crossing, HoldingPart::Coordinates))
    }

    /// Whether none of them, nor a prepared part, holds anything.
    pub(crate) fn hold_nothing(&self, crossings: &Crossings) -> bool {
        self.held.is_empty() && crossings.held.is_empty()
    }

    /// Whether none of them, nor a prepared part, holds what is needed.
    pub(crate) fn are_free(&self, needed: &HeldByCrossings, crossings: &Crossings) -> bool {
        let prepared = crossings.held.values();
        !self.held.values().chain(prepared).any(|held| held.meets(needed))
    }

    /// Is resolved when something is released.
    pub(crate) fn next_release(&mut self) -> oneshot::Receiver<()> {
        let (sender, receiver) = oneshot::channel();
        self.waiting.retain(|waiting| !waiting.is_canceled());
        self.waiting.push(sender);
        receiver
    }

    /// Something was released.
    pub(crate) fn wake(&mut self) {
        for waiting in self.waiting.drain(..) {
            let _ = waiting.send(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: CrossingId = CrossingId(1, 2);
    const SECOND: CrossingId = CrossingId(1, 3);

    fn place(parent: u64, name: &str) -> PoolPlace {
        PoolPlace::new(FileId(parent), name.as_bytes())
    }

    fn unlink(id: u64, parent: u64, name: &str) -> PoolChange {
        PoolChange::Unlink { id: FileId(id), at: place(parent, name), by: None }
    }

    fn part(changes: Vec<PoolChange>) -> CrossingPart {
        CrossingPart { coordinator: GroupNumber::FIRST, moves: false, changes }
    }

    #[test]
    fn a_part_is_kept_from_being_prepared_until_its_outcome_and_a_decision_until_all_are_told() {
        let mut crossings = Crossings::default();
        let prepared = part(vec![unlink(20, 1, "a")]);
        crossings.note(&PoolChange::Prepared { crossing: FIRST, part: prepared.clone() });
        crossings.note(&PoolChange::Prepared { crossing: SECOND, part: prepared.clone() });
        let other = GroupNumber::new(9).unwrap();
        let decided = PoolChange::Decided {
            crossing: FIRST,
            groups: vec![other],
            changes: prepared.changes.clone(),
        };
        crossings.note(&decided);
        let mut again = Crossings::default();
        for record in crossings.records() {
            let bytes = minicbor::to_vec(&record).unwrap();
            again.add(minicbor::decode(&bytes).unwrap());
        }
        assert_eq!(again, crossings);
        crossings.note(&PoolChange::PartMade { crossing: FIRST, changes: prepared.changes });
        crossings.note(&PoolChange::Abandoned { crossing: SECOND });
        assert!(crossings.prepared().is_empty());
        assert_eq!(crossings.decided()[&FIRST], BTreeSet::from([other]));
        crossings.note(&PoolChange::Told { crossing: FIRST });
        assert!(crossings.decided().is_empty());
        assert!(crossings.has_ended(FIRST) && crossings.has_ended(SECOND));
    }

    #[test]
    fn changes_wait_for_others_of_the_same_names_files_and_directories_that_go() {
        let held = |changes: &[PoolChange], moves| HeldByCrossings::of(changes, moves);
        let one = held(&[unlink(20, 1, "a")], false);
        for (other, meets) in [
            (held(&[unlink(21, 1, "b")], true), false),
            (held(&[unlink(21, 1, "a")], false), true),
            (held(&[unlink(20, 30, "c")], false), true),
            // A name in the directory that goes.
            (held(&[unlink(31, 20, "c")], false), true),
            (held(&[unlink(31, 32, "c")], true), false),
        ] {
            assert_eq!((one.meets(&other), other.meets(&one)), (meets, meets), "{other:?}");
        }
        let moving = held(&[unlink(40, 41, "x")], true);
        assert!(moving.meets(&held(&[unlink(50, 51, "y")], true)));
    }
}
