//! The numbers that a front end holds, and how many lookups of each the present session counts. Plain state.
//!
//! A session counts the lookups that it has answered; those of an earlier session ended with it. A front end that forgets some of
//! its lookups takes back those of earlier sessions first, so that the present one never holds less than the front end does.

use std::collections::BTreeMap;

use super::super::wire::{Forgotten, MAX_LIST};

#[derive(Default, Debug)]
struct HeldNumber {
    /// Of the front end.
    total: u64,
    /// Of these, those that the session of this serial number counts.
    here: (u64, u64),
}

/// See the module.
#[derive(Default, Debug)]
pub(super) struct HeldNumbers {
    numbers: BTreeMap<u64, HeldNumber>,
    /// What is to be forgotten, of the session of this serial number.
    to_forget: BTreeMap<u64, u64>,
    serial: u64,
}

impl HeldNumbers {
    /// A session has answered a lookup.
    pub(super) fn look_up(&mut self, inode: u64, serial: u64) {
        let held = self.numbers.entry(inode).or_default();
        held.total += 1;
        if serial > held.here.0 {
            held.here = (serial, 0);
        }
        if serial == held.here.0 {
            held.here.1 += 1;
        }
    }

    /// The front end forgets lookups.
    pub(super) fn forget(&mut self, inode: u64, count: u64) {
        let Some(held) = self.numbers.get_mut(&inode) else { return };
        held.total = held.total.saturating_sub(count);
        let (serial, here) = held.here;
        let too_many = here.saturating_sub(held.total);
        held.here.1 -= too_many;
        if held.total == 0 {
            self.numbers.remove(&inode);
        }
        if serial > self.serial {
            self.serial = serial;
            self.to_forget.clear();
        }
        if serial == self.serial && too_many > 0 {
            *self.to_forget.entry(inode).or_default() += too_many;
        }
    }

    /// Whether the front end holds a number.
    pub(super) fn is_held(&self, inode: u64) -> bool {
        self.numbers.contains_key(&inode)
    }

    /// Whether the session of this serial number is to forget something.
    pub(super) fn has_forgotten(&self, serial: u64) -> bool {
        serial == self.serial && !self.to_forget.is_empty()
    }

    /// What the session of this serial number is to forget next.
    pub(super) fn take_forgotten(&mut self, serial: u64) -> Vec<Forgotten> {
        if serial != self.serial {
            return Vec::new();
        }
        let mut taken = Vec::new();
        while taken.len() < MAX_LIST
            && let Some((inode, count)) = self.to_forget.pop_first()
        {
            taken.push(Forgotten { inode, count });
        }
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn forgotten(inode: u64, count: u64) -> Forgotten {
        Forgotten { inode, count }
    }

    #[test]
    fn lookups_of_a_session_are_forgotten_together() {
        let mut held = HeldNumbers::default();
        (0..3).for_each(|_| held.look_up(7, 1));
        held.look_up(8, 1);
        held.forget(7, 1);
        held.forget(7, 2);
        held.forget(9, 1);
        assert_eq!(held.take_forgotten(1), [forgotten(7, 3)]);
        assert_eq!(held.take_forgotten(1), []);
        held.forget(8, 5);
        assert_eq!(held.take_forgotten(1), [forgotten(8, 1)]);
        assert!(held.numbers.is_empty());
    }

    #[test]
    fn those_of_an_earlier_session_go_first() {
        let mut held = HeldNumbers::default();
        (0..3).for_each(|_| held.look_up(7, 1));
        held.look_up(7, 2);
        // A late answer of the session that is gone.
        held.look_up(7, 1);
        held.forget(7, 4);
        assert_eq!(held.take_forgotten(2), []);
        held.forget(7, 1);
        assert_eq!(held.take_forgotten(1), []);
        assert_eq!(held.take_forgotten(2), [forgotten(7, 1)]);
    }

    #[test]
    fn what_a_session_that_is_gone_should_have_forgotten_is_dropped() {
        let mut held = HeldNumbers::default();
        held.look_up(7, 1);
        held.forget(7, 1);
        held.look_up(8, 2);
        held.forget(8, 1);
        assert_eq!(held.take_forgotten(2), [forgotten(8, 1)]);
    }
}
