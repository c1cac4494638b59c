//! Which entries share a slot, which of them keeps it, and which are dropped when the table has to
//! be smaller.

use super::entry::Entry;
use super::{Anchor, MAX_BITS, Table, UNSURE_SHARE};

impl Table {
    /// The virtual server of ours that precedes a place, and the distance from it.
    pub(super) fn anchor_of(&self, place: u64) -> (&Anchor, u64) {
        let at = self.anchors.partition_point(|anchor| anchor.place <= place);
        let last = self.anchors.len() - 1;
        let anchor = &self.anchors[if at == 0 { last } else { at - 1 }];
        (anchor, place.wrapping_sub(anchor.place))
    }

    /// The places that share a slot with this one; `None` within reach of a successor
    /// list, where all nodes stay.
    pub(super) fn slot_of(&self, place: u64) -> Option<(u64, u64)> {
        let (anchor, distance) = self.anchor_of(place);
        if distance <= anchor.near {
            return None;
        }
        let (low, high) = slot(distance, self.bits);
        let low = low.max(anchor.near + 1);
        let high = high.min(self.arc_of(anchor) - 1);
        Some((anchor.place.wrapping_add(low), anchor.place.wrapping_add(high)))
    }

    /// The distance from a virtual server of ours to the next one.
    fn arc_of(&self, anchor: &Anchor) -> u64 {
        let at = self.anchors.partition_point(|other| other.place <= anchor.place);
        let next = self.anchors[at % self.anchors.len()].place;
        match next.wrapping_sub(anchor.place) {
            0 => u64::MAX,
            arc => arc,
        }
    }

    pub(super) fn is_own(&self, place: u64) -> bool {
        self.anchors.binary_search_by_key(&place, |anchor| anchor.place).is_ok()
    }

    pub(super) fn most_unsure(&self) -> usize {
        self.max_entries.div_ceil(UNSURE_SHARE)
    }

    /// Puts a newcomer into the table if its slot is free or it deserves it more.
    pub(super) fn insert(&mut self, place: u64, entry: Entry, now: u32) -> bool {
        if self.is_own(place) {
            return false;
        }
        if let Some((low, high)) = self.slot_of(place) {
            let holders: Vec<u64> = self.places(low.wrapping_sub(1), high).collect();
            if holders.iter().any(|at| !self.displaces(&entry, &self.entries[at], now)) {
                return false;
            }
            for at in holders {
                self.remove(at);
            }
        }
        self.unsure += usize::from(!entry.sure);
        self.entries.insert(place, entry);
        while self.entries.len() > self.max_entries {
            self.shrink(now);
        }
        self.entries.contains_key(&place)
    }

    pub(super) fn remove(&mut self, place: u64) {
        if let Some(entry) = self.entries.remove(&place) {
            self.unsure -= usize::from(!entry.sure);
        }
    }

    pub(super) fn make_sure(&mut self, place: u64) {
        if let Some(entry) = self.entries.get_mut(&place)
            && !entry.sure
        {
            entry.sure = true;
            self.unsure -= 1;
        }
    }

    /// One bit less, or, where there is none left, the entry least likely to live.
    fn shrink(&mut self, now: u32) {
        if self.bits > 0 {
            self.set_bits(self.bits - 1, now);
            return;
        }
        let worst = self.entries.iter().min_by_key(|(_, e)| (e.sure, e.heard));
        if let Some(place) = worst.map(|(place, _)| *place) {
            self.remove(place);
        }
    }

    /// Whether a newcomer deserves the slot of another: that one probably is dead, or is unsure and
    /// the newcomer is sure. The unsure never displace the sure.
    fn displaces(&self, newcomer: &Entry, holder: &Entry, now: u32) -> bool {
        newcomer.sure >= holder.sure
            && self.is_likely(newcomer, now)
            && ((newcomer.sure && !holder.sure) || !self.is_likely(holder, now))
    }

    pub(super) fn set_bits(&mut self, bits: u32, now: u32) {
        let fewer = bits < self.bits;
        self.bits = bits.min(MAX_BITS);
        if fewer {
            self.prune(now);
        }
    }

    /// Leaves one entry a slot.
    pub(super) fn prune(&mut self, now: u32) {
        let entries = std::mem::take(&mut self.entries);
        self.unsure = 0;
        let mut holder: Option<(u64, u64)> = None;
        // From a place of ours on, since a slot may lie across the circle's zero.
        let (before, after): (Vec<_>, Vec<_>) =
            entries.into_iter().partition(|(place, _)| *place < self.anchors[0].place);
        for (place, entry) in after.into_iter().chain(before) {
            let slot = self.slot_of(place);
            if let (Some((low, _)), Some((held_low, held))) = (slot, holder)
                && low == held_low
            {
                if !self.displaces(&entry, &self.entries[&held], now) {
                    continue;
                }
                self.remove(held);
            }
            holder = slot.map(|(low, _)| (low, place));
            self.unsure += usize::from(!entry.sure);
            self.entries.insert(place, entry);
        }
        self.bound_unsure();
    }

    /// Drops unsure entries beyond their share.
    fn bound_unsure(&mut self) {
        while self.unsure > self.most_unsure() {
            let unsure = self.entries.iter().filter(|(_, e)| !e.sure);
            let Some(place) = unsure.min_by_key(|(_, e)| e.heard).map(|(at, _)| *at) else {
                return;
            };
            self.remove(place);
        }
    }

    /// The places of entries in `(after, upto]`, clockwise; all if the ends are equal.
    pub(super) fn places(&self, after: u64, upto: u64) -> impl Iterator<Item = u64> + '_ {
        let (first, second) = self.ranges(after, upto);
        first.chain(second).map(|(place, _)| *place)
    }

    pub(super) fn ranges(
        &self,
        after: u64,
        upto: u64,
    ) -> (
        std::collections::btree_map::Range<'_, u64, Entry>,
        std::collections::btree_map::Range<'_, u64, Entry>,
    ) {
        use std::ops::Bound::{Excluded, Included, Unbounded};
        if after < upto {
            let none = self.entries.range((Excluded(u64::MAX), Unbounded));
            (self.entries.range((Excluded(after), Included(upto))), none)
        } else {
            let start = self.entries.range((Excluded(after), Unbounded));
            (start, self.entries.range(..=upto))
        }
    }
}

/// The slot of a distance, first and last: it and all that agree with it in the leading
/// one and `bits` bits after it.
pub(super) fn slot(distance: u64, bits: u32) -> (u64, u64) {
    let exponent = 63 - (distance | 1).leading_zeros();
    let width = 1 << exponent.saturating_sub(bits);
    let low = distance & !(width - 1);
    (low, low + (width - 1))
}
