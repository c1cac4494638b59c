//! The inodes that a front end knows, by number, and what it has open.
//!
//! A front end holds an inode by counted lookups, which `forget` takes back, and by opens. The
//! table keeps an inode for as long as it is held, as an inode below it is in the table, or as the
//! file system itself needs it ([`TableInode::is_needed`]): a name leads to it, or it has changes
//! that are stored nowhere else. So a file whose last name is gone lives on until it is closed and
//! forgotten.
//!
//! The table is plain data without a lock. It does not know where an inode comes from, how its
//! number is chosen ([`InodeTable::free_number`] helps), or what an open is.

use std::collections::{BTreeMap, btree_map};
use std::ops::{Index, RangeInclusive};

use crate::types::{Errno, InodeNumber};

const ROOT: u64 = InodeNumber::ROOT.0;

/// What a file system keeps of an inode.
pub trait TableInode {
    /// Whether the inode stays in the table though nothing holds it.
    fn is_needed(&self) -> bool {
        false
    }
}

#[derive(Debug)]
struct Slot<T> {
    inode: T,
    /// The inode that stays in the table as long as this one does; 0 if there is none.
    above: u64,
    lookups: u64,
    opens: u64,
    /// Inodes in the table that this one stays for.
    below: u64,
}

/// See the module. `T` is what the file system keeps of an inode, `O` of an open.
///
/// Calls that may end an inode take a function, which is given every inode that leaves the table:
/// the one that was let go, and those above it that stayed for it alone.
#[derive(Debug)]
pub struct InodeTable<T, O> {
    slots: BTreeMap<u64, Slot<T>>,
    /// The inode and the open, by handle.
    opens: BTreeMap<u64, (u64, O)>,
    next_handle: u64,
}

impl<T: TableInode, O> InodeTable<T, O> {
    /// A table of the root directory, which never leaves it.
    pub fn new(root: T) -> InodeTable<T, O> {
        let mut table = InodeTable::without_root(1);
        table.insert(ROOT, None, root);
        table
    }

    /// An empty table, whose handles count from `first_handle` on. If it gets a root directory, that
    /// never leaves it.
    pub fn without_root(first_handle: u64) -> InodeTable<T, O> {
        InodeTable { slots: BTreeMap::new(), opens: BTreeMap::new(), next_handle: first_handle }
    }

    /// What is kept of an inode; [`Errno::ESTALE`] if it is not in the table.
    pub fn get(&self, number: u64) -> Result<&T, Errno> {
        self.slots.get(&number).map(|slot| &slot.inode).ok_or(Errno::ESTALE)
    }

    /// As [`get`](Self::get).
    pub fn get_mut(&mut self, number: u64) -> Result<&mut T, Errno> {
        self.slots.get_mut(&number).map(|slot| &mut slot.inode).ok_or(Errno::ESTALE)
    }

    /// Whether an inode is in the table.
    pub fn contains(&self, number: u64) -> bool {
        self.slots.contains_key(&number)
    }

    /// Number of inodes in the table.
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// Whether the table has no inode.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// The inodes in the table, by ascending number.
    pub fn iter(&self) -> impl Iterator<Item = (u64, &T)> {
        self.slots.iter().map(|(number, slot)| (*number, &slot.inode))
    }

    /// As [`iter`](Self::iter).
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (u64, &mut T)> {
        self.slots.iter_mut().map(|(number, slot)| (*number, &mut slot.inode))
    }

    /// The number `first`, or the next one of `range` that no inode has; the number of an inode on the way that
    /// `is_same`. After the end of the range comes its beginning.
    pub fn free_number(
        &self,
        first: u64,
        range: RangeInclusive<u64>,
        is_same: impl Fn(&T) -> bool,
    ) -> u64 {
        let mut number = first;
        while let Some(slot) = self.slots.get(&number)
            && !is_same(&slot.inode)
        {
            number = if number >= *range.end() { *range.start() } else { number + 1 };
        }
        number
    }

    /// Puts an inode into the table. Nothing holds it yet. `above` must be in the table, and stays there as long.
    ///
    /// # Panics
    /// If the table has an inode of this number, or none of the number `above`.
    pub fn insert(&mut self, number: u64, above: Option<u64>, inode: T) {
        self.insert_with(number, above, 0, inode);
    }

    /// As [`insert`](Self::insert), and counts a lookup.
    pub fn insert_looked_up(&mut self, number: u64, above: Option<u64>, inode: T) {
        self.insert_with(number, above, 1, inode);
    }

    fn insert_with(&mut self, number: u64, above: Option<u64>, lookups: u64, inode: T) {
        if let Some(above) = above {
            self.slots.get_mut(&above).expect("the inode above is in the table").below += 1;
        }
        let above = above.unwrap_or_default();
        let slot = Slot { inode, above, lookups, opens: 0, below: 0 };
        let before = self.slots.insert(number, slot);
        assert!(before.is_none(), "inode {number} is in the table");
    }

    /// The inode that stays in the table for this one.
    pub fn above(&self, number: u64) -> Option<u64> {
        self.slots.get(&number).map(|slot| slot.above).filter(|above| *above != 0)
    }

    /// Lets another inode stay in the table for this one, or none.
    ///
    /// # Panics
    /// If one of the two is not in the table.
    pub fn set_above(&mut self, number: u64, above: Option<u64>, left: impl FnMut(u64, T)) {
        if let Some(above) = above {
            self.slots.get_mut(&above).expect("the inode above is in the table").below += 1;
        }
        let slot = self.slots.get_mut(&number).expect("the inode is in the table");
        let before = std::mem::replace(&mut slot.above, above.unwrap_or_default());
        if let Some(slot) = self.slots.get_mut(&before) {
            slot.below -= 1;
            self.reap(before, left);
        }
    }

    /// Counts a lookup; whether the inode is in the table.
    pub fn look_up(&mut self, number: u64) -> bool {
        let Some(slot) = self.slots.get_mut(&number) else { return false };
        slot.lookups = slot.lookups.saturating_add(1);
        true
    }

    /// Takes back lookups, at most those that were counted.
    pub fn forget(&mut self, number: u64, count: u64, left: impl FnMut(u64, T)) {
        if let Some(slot) = self.slots.get_mut(&number) {
            slot.lookups = slot.lookups.saturating_sub(count);
            if slot.is_unused() {
                self.reap(number, left);
            }
        }
    }

    /// Whether the front end holds an inode, by lookups or opens.
    pub fn is_held(&self, number: u64) -> bool {
        self.slots.get(&number).is_some_and(|slot| slot.lookups > 0 || slot.opens > 0)
    }

    /// Number of opens of an inode.
    pub fn open_count(&self, number: u64) -> u64 {
        self.slots.get(&number).map_or(0, |slot| slot.opens)
    }

    /// Takes an inode from the table, and those above that stay for it alone, unless something holds
    /// or needs it. Called when [`TableInode::is_needed`] may have become false.
    pub fn reap(&mut self, mut number: u64, mut left: impl FnMut(u64, T)) {
        while number != ROOT
            && let btree_map::Entry::Occupied(entry) = self.slots.entry(number)
            && entry.get().is_unused()
        {
            let slot = entry.remove();
            left(number, slot.inode);
            let Some(above) = self.slots.get_mut(&slot.above) else { break };
            above.below -= 1;
            number = slot.above;
        }
    }

    /// Opens an inode; returns the handle. [`Errno::ESTALE`] if it is not in the table.
    pub fn open(&mut self, number: u64, open: O) -> Result<u64, Errno> {
        self.slots.get_mut(&number).ok_or(Errno::ESTALE)?.opens += 1;
        let handle = self.next_handle;
        self.next_handle += 1;
        self.opens.insert(handle, (number, open));
        Ok(handle)
    }

    /// What a handle is of; [`Errno::EBADF`] if it is not of an open of this inode.
    pub fn opened(&self, number: u64, handle: u64) -> Result<&O, Errno> {
        let opened = self.opens.get(&handle).filter(|(of, _)| *of == number);
        opened.map(|(_, open)| open).ok_or(Errno::EBADF)
    }

    /// As [`opened`](Self::opened).
    pub fn opened_mut(&mut self, number: u64, handle: u64) -> Result<&mut O, Errno> {
        let opened = self.opens.get_mut(&handle).filter(|(of, _)| *of == number);
        opened.map(|(_, open)| open).ok_or(Errno::EBADF)
    }

    /// All opens, each with its handle and its inode.
    pub fn opens(&self) -> impl Iterator<Item = (u64, u64, &O)> {
        self.opens.iter().map(|(handle, (number, open))| (*handle, *number, open))
    }

    /// As [`opens`](Self::opens).
    pub fn opens_mut(&mut self) -> impl Iterator<Item = (u64, u64, &mut O)> {
        self.opens.iter_mut().map(|(handle, (number, open))| (*handle, *number, open))
    }

    /// Ends an open; [`Errno::EBADF`] as [`opened`](Self::opened).
    pub fn close(
        &mut self,
        number: u64,
        handle: u64,
        left: impl FnMut(u64, T),
    ) -> Result<O, Errno> {
        let open = match self.opens.entry(handle) {
            btree_map::Entry::Occupied(open) if open.get().0 == number => open.remove().1,
            _ => return Err(Errno::EBADF),
        };
        if let Some(slot) = self.slots.get_mut(&number) {
            slot.opens -= 1;
            if slot.is_unused() {
                self.reap(number, left);
            }
        }
        Ok(open)
    }

    /// Checks that counts agree with what they count, and that no inode is kept for nothing.
    ///
    /// # Panics
    /// If that is not so.
    pub fn check_invariants(&self) {
        let mut below: BTreeMap<u64, u64> = BTreeMap::new();
        let mut opens: BTreeMap<u64, u64> = BTreeMap::new();
        for slot in self.slots.values().filter(|slot| slot.above != 0) {
            *below.entry(slot.above).or_default() += 1;
        }
        for (number, _) in self.opens.values() {
            *opens.entry(*number).or_default() += 1;
        }
        for (number, slot) in &self.slots {
            assert_eq!(slot.below, below.remove(number).unwrap_or(0), "inodes below {number}");
            assert_eq!(slot.opens, opens.remove(number).unwrap_or(0), "opens of {number}");
            assert!(*number == ROOT || !slot.is_unused(), "{number} is kept for nothing");
        }
        assert!(below.is_empty() && opens.is_empty(), "an inode is missing");
    }
}

impl<T: TableInode> Slot<T> {
    fn is_unused(&self) -> bool {
        self.lookups == 0 && self.opens == 0 && self.below == 0 && !self.inode.is_needed()
    }
}

impl<T, O> Index<u64> for InodeTable<T, O> {
    type Output = T;

    /// # Panics
    /// If the inode is not in the table.
    fn index(&self, number: u64) -> &T {
        &self.slots[&number].inode
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// An inode of the model.
    #[derive(Clone, PartialEq, Eq, Debug)]
    struct Named(bool);

    impl TableInode for Named {
        fn is_needed(&self) -> bool {
            self.0
        }
    }

    type Table = InodeTable<Named, &'static str>;

    /// The table, said another way: inodes and what holds them, and every inode that nothing keeps
    /// is searched for anew.
    #[derive(Default)]
    struct Model {
        inodes: BTreeMap<u64, (Option<u64>, bool, u64)>,
        opens: BTreeMap<u64, u64>,
    }

    impl Model {
        /// Removes what nothing keeps; returns it.
        fn swept(&mut self) -> Vec<u64> {
            let mut gone = Vec::new();
            loop {
                let is_kept = |number: u64, needed: bool, lookups: u64| {
                    let has_open = self.opens.values().any(|of| *of == number);
                    let has_below = self.inodes.values().any(|(above, ..)| *above == Some(number));
                    number == ROOT || needed || lookups > 0 || has_open || has_below
                };
                let unused = self
                    .inodes
                    .iter()
                    .find(|(number, (_, needed, lookups))| !is_kept(**number, *needed, *lookups));
                let Some((number, _)) = unused else { return gone };
                let number = *number;
                self.inodes.remove(&number);
                gone.push(number);
            }
        }
    }

    #[derive(Clone, Debug)]
    enum Step {
        Insert { number: u64, above: u64 },
        LookUp(u64),
        Forget(u64, u64),
        Open(u64),
        Close(u64, u64),
        SetAbove(u64, u64),
        SetNeeded(u64, bool),
    }

    fn step() -> impl Strategy<Value = Step> {
        let number = || 1..9u64;
        prop_oneof![
            3 => (number(), 0..9u64).prop_map(|(number, above)| Step::Insert { number, above }),
            2 => number().prop_map(Step::LookUp),
            3 => (number(), 0..4u64).prop_map(|(number, count)| Step::Forget(number, count)),
            1 => number().prop_map(Step::Open),
            2 => (number(), 1..12u64).prop_map(|(number, handle)| Step::Close(number, handle)),
            1 => (number(), 0..9u64).prop_map(|(number, above)| Step::SetAbove(number, above)),
            2 => (number(), any::<bool>()).prop_map(|(number, on)| Step::SetNeeded(number, on)),
        ]
    }

    /// Does the step on both; what left the table, and what left the model.
    fn apply(table: &mut Table, model: &mut Model, step: &Step) -> (Vec<u64>, Vec<u64>) {
        let mut left = Vec::new();
        let mut leave = |number: u64, _: Named| left.push(number);
        match *step {
            Step::Insert { number, above } => {
                let above = Some(above).filter(|above| model.inodes.contains_key(above));
                model.inodes.entry(number).or_insert_with(|| {
                    table.insert_looked_up(number, above, Named(false));
                    (above, false, 1)
                });
            }
            Step::LookUp(number) => {
                let inode = model.inodes.get_mut(&number);
                assert_eq!(table.look_up(number), inode.is_some());
                inode.into_iter().for_each(|(.., lookups)| *lookups += 1);
            }
            Step::Forget(number, count) => {
                table.forget(number, count, &mut leave);
                let inode = model.inodes.get_mut(&number);
                inode.into_iter().for_each(|(.., held)| *held = held.saturating_sub(count));
            }
            Step::Open(number) => {
                let opened = table.open(number, "open");
                assert_eq!(opened.is_ok(), model.inodes.contains_key(&number));
                opened.into_iter().for_each(|handle| {
                    assert!(model.opens.insert(handle, number).is_none(), "a handle is new");
                });
            }
            Step::Close(number, handle) => {
                let is_open = model.opens.get(&handle) == Some(&number);
                let closed = table.close(number, handle, &mut leave);
                assert_eq!(closed, if is_open { Ok("open") } else { Err(Errno::EBADF) });
                if is_open {
                    model.opens.remove(&handle);
                }
            }
            Step::SetAbove(number, above) => {
                // No inode is above itself, at any height.
                let mut at = Some(above);
                while let Some(next) = at.filter(|next| *next != number) {
                    at = model.inodes.get(&next).and_then(|(above, ..)| *above);
                }
                if let (None, Some(inode)) = (at, model.inodes.get(&number)) {
                    let (_, needed, lookups) = *inode;
                    let above = Some(above).filter(|above| model.inodes.contains_key(above));
                    table.set_above(number, above, &mut leave);
                    model.inodes.insert(number, (above, needed, lookups));
                }
            }
            Step::SetNeeded(number, on) => {
                let inode = table.get_mut(number).map(|inode| inode.0 = on);
                assert_eq!(inode.is_ok(), model.inodes.contains_key(&number));
                table.reap(number, &mut leave);
                let inode = model.inodes.get_mut(&number);
                inode.into_iter().for_each(|(_, needed, _)| *needed = on);
            }
        }
        (left, model.swept())
    }

    proptest! {
        #[test]
        fn an_inode_stays_as_long_as_something_holds_or_needs_it(
            steps in prop::collection::vec(step(), 1..200)
        ) {
            let mut table = Table::new(Named(false));
            let mut model = Model::default();
            model.inodes.insert(ROOT, (None, false, 0));
            for step in &steps {
                let (mut left, mut gone) = apply(&mut table, &mut model, step);
                left.sort_unstable();
                gone.sort_unstable();
                prop_assert_eq!(left, gone);
                table.check_invariants();
                let numbers: Vec<u64> = table.iter().map(|(number, _)| number).collect();
                prop_assert_eq!(numbers, model.inodes.keys().copied().collect::<Vec<_>>());
                for (number, (above, _, lookups)) in &model.inodes {
                    let opens = model.opens.values().filter(|of| *of == number).count() as u64;
                    prop_assert_eq!(table.above(*number), *above);
                    prop_assert_eq!(table.open_count(*number), opens);
                    prop_assert_eq!(table.is_held(*number), *lookups + opens > 0);
                }
                let opens: Vec<_> = table.opens().map(|(handle, of, _)| (handle, of)).collect();
                prop_assert_eq!(opens, model.opens.clone().into_iter().collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn inodes_above_leave_with_the_last_one_below() {
        let mut table = Table::new(Named(false));
        table.insert(2, Some(ROOT), Named(false));
        table.insert(3, Some(2), Named(false));
        table.insert(4, Some(3), Named(false));
        table.look_up(4);
        let mut left = Vec::new();
        table.forget(4, 1, |number, _| left.push(number));
        assert_eq!((left, table.len()), (vec![4, 3, 2], 1));
    }

    #[test]
    fn a_number_that_is_taken_gives_way_to_the_next_one_of_the_range() {
        let mut table = Table::new(Named(false));
        for number in [8, 9, 5] {
            table.insert(number, None, Named(number == 9));
        }
        assert_eq!(table.free_number(7, 5..=9, |_| false), 7);
        assert_eq!(table.free_number(8, 5..=9, |_| false), 6, "round the end of the range");
        assert_eq!(table.free_number(8, 5..=9, |inode| inode.0), 9, "the same inode");
        assert_eq!(table.free_number(u64::MAX, 5..=u64::MAX, |_| false), u64::MAX);
    }
}
