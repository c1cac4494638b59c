//! The next question: each octave of distance is swept from its near end to its far one,
//! over and over, and the time that takes decides how large the table can be.
//!
//! An octave with m entries takes m / [`MAX_ASKED`] questions a sweep. Sweeps of an octave should
//! come every C seconds with C growing as the square root of m: other nodes ask a node about its
//! near surroundings, so that the near octaves are worth more than the far ones, and a half-known
//! far octave less than that of its neighbours. The octave whose next question is the most overdue
//! by that measure comes first; the budget decides when.
//!
//! Entries that lookups have kept fresh are passed over without a question.

use super::entry::Entry;
use super::learn::{Learn, MAX_ASKED, Question};
use super::{Anchor, MAX_BITS, Table, Trust};

/// A range whose evidence is younger than this share of the acceptable is passed over.
pub(super) const FRESH_SHARE: u32 = 6;
/// How many entries before the place to be explored may be asked. With four, upkeep is a third more
/// for the same lookups; with two, tables fill slower (`docs/design/mechanisms.md`).
const ASK_AMONG: usize = 8;
/// The table does not grow while more than one in so many entries is unsure. A guess.
const UNSURE_ENOUGH: usize = 3;
/// How long a table without a region rests. A guess.
const REST_SECS: u32 = 60;
/// Sweeping a small octave more often than this teaches nothing.
const LEAST_PERIOD: f64 = 4.0;

/// An octave of distances from a virtual server of this node, clipped where the next
/// one begins.
#[derive(Clone, Debug)]
pub(super) struct Region {
    anchor: u64,
    /// First and last distance.
    low: u64,
    high: u64,
    /// The distance up to which this sweep has come.
    cursor: u64,
    /// When a question about it was last chosen.
    asked: u32,
    /// When this sweep began.
    began: u32,
    /// Until when it needs no look.
    rests_until: u32,
}

/// The next action of a table.
#[derive(Clone, Debug)]
pub enum Wish {
    /// A node should be asked.
    Ask(Question),
    /// A node that is only hearsay should be checked.
    Check(crate::Node),
    /// All is fresh for so many seconds.
    Rest(u32),
}

/// The octaves of distances from all virtual servers of this node.
pub(super) fn regions(anchors: &[Anchor], now: u32) -> Vec<Region> {
    let of_anchor = |(i, anchor): (usize, &Anchor)| {
        let (place, next) = (anchor.place, anchors[(i + 1) % anchors.len()].place);
        // The whole circle if there is but one.
        let last = next.wrapping_sub(place).wrapping_sub(1);
        (0..u64::BITS).map(|exponent| 1u64 << exponent).take_while(move |low| *low <= last).map(
            move |low| Region {
                anchor: place,
                low,
                high: (low + (low - 1)).min(last),
                cursor: low - 1,
                asked: now,
                began: now,
                rests_until: now,
            },
        )
    };
    anchors.iter().enumerate().flat_map(of_anchor).collect()
}

impl Region {
    /// How many entries it should hold on a ring of so many nodes, and how many questions
    /// a sweep takes.
    fn size(&self, nodes: f64, bits: u32) -> (f64, f64) {
        let width = (self.high - self.low) as f64 + 1.0;
        let share = width / self.low as f64;
        let entries = (width / 2f64.powi(64) * nodes).min(share * f64::from(1u32 << bits));
        (entries, (entries / MAX_ASKED as f64).max(1.0))
    }

    /// How overdue its next question is.
    fn urgency(&self, nodes: f64, bits: u32, now: u32) -> f64 {
        let (entries, questions) = self.size(nodes, bits);
        let period = entries.max(1.0).sqrt().max(LEAST_PERIOD);
        f64::from(now.saturating_sub(self.asked).max(1)) * questions / period
    }

    fn begin_again(&mut self, now: u32) {
        self.cursor = self.low - 1;
        self.began = now;
    }
}

impl Table {
    /// Bytes of a typical question and its answer, to be spent before it is asked.
    pub const QUESTION_BYTES: usize = 1024;

    /// The next action on a ring of about `nodes` nodes.
    pub fn next_question(&mut self, nodes: f64, now: u32) -> Wish {
        if let Some(node) = self.to_check() {
            return Wish::Check(node);
        }
        loop {
            let due = self.regions.iter().enumerate().filter(|(_, region)| {
                region.rests_until <= now && self.reach(region.anchor) < region.high
            });
            let urgency = |region: &Region| region.urgency(nodes, self.bits, now);
            let next = due.max_by(|(_, a), (_, b)| urgency(a).total_cmp(&urgency(b)));
            let Some(region) = next.map(|(i, _)| i) else { return Wish::Rest(self.rest(now)) };
            if let Some(question) = self.ask_in(region, now) {
                return Wish::Ask(question);
            }
        }
    }

    /// The first unsure node after a virtual server, where only this node's own checks make it sure.
    fn to_check(&self) -> Option<crate::Node> {
        if self.unsure == 0 || self.trust == Trust::TwoPeers {
            return None;
        }
        self.anchors.iter().find_map(|anchor| {
            let (first, second) = self.ranges(anchor.place, anchor.place);
            let unsure = first.chain(second).find(|(_, entry)| !entry.sure);
            unsure.map(|(_, entry)| entry.node())
        })
    }

    /// How far the successor list of ours at this place reaches.
    fn reach(&self, anchor: u64) -> u64 {
        let at = self.anchors.binary_search_by_key(&anchor, |a| a.place);
        at.map_or(u64::MAX, |at| self.anchors[at].near)
    }

    fn rest(&self, now: u32) -> u32 {
        let wanted = self.regions.iter().filter(|r| self.reach(r.anchor) < r.high);
        let soonest = wanted.map(|region| region.rests_until).min();
        soonest.map_or(REST_SECS, |at| at.saturating_sub(now)).max(1)
    }

    /// The next question about a region; `None` if the rest of it is fresh, or no entry can be
    /// asked: then it rests.
    fn ask_in(&mut self, index: usize, now: u32) -> Option<Question> {
        // As long as sweeps find many newcomers, freshness is not all that is wanted.
        let complete = (2.0 * self.coverage - 1.0).clamp(0.0, 1.0);
        let stale_after = f64::from(self.acceptable_staleness_secs() / FRESH_SHARE) * complete;
        let stale_after = stale_after as u32;
        let reach = self.reach(self.regions[index].anchor);
        let region = &mut self.regions[index];
        region.asked = now;
        let (anchor, high) = (region.anchor, region.high);
        let mut cursor = region.cursor.max(reach.min(high - 1));
        let question = loop {
            if cursor >= high {
                break None;
            }
            let Some(question) = self.question(index, anchor, cursor, high, now) else {
                break None;
            };
            let ages = question.places.iter().map(|at| u64::from(self.entries[at].age_secs(now)));
            let (count, sum) = (question.places.len() as u64, ages.sum::<u64>());
            if count == 0 || sum >= count * u64::from(stale_after) {
                break Some(question);
            }
            cursor = question.learn.upto.wrapping_sub(anchor).max(cursor + 1);
        };
        let region = &mut self.regions[index];
        match &question {
            Some(_) => region.cursor = cursor,
            None => {
                region.rests_until = now.saturating_add((stale_after / 4).max(2));
                region.begin_again(now);
            }
        }
        question
    }

    /// Asks a node at or before `cursor` about the nodes after it, at most to the region's end.
    fn question(
        &self,
        region: usize,
        anchor: u64,
        cursor: u64,
        high: u64,
        now: u32,
    ) -> Option<Question> {
        let end = anchor.wrapping_add(high);
        let to = self.node_to_ask(anchor, anchor.wrapping_add(cursor), now)?;
        let after = super::place_of(to.id.key());
        let mut places: Vec<u64> = self.places(after, end).take(MAX_ASKED + 1).collect();
        let mut upto = end;
        if places.len() > MAX_ASKED {
            places.pop();
            upto = *places.last().expect("there are many");
        }
        let known = places.iter().flat_map(|at| self.entries[at].tag()).collect();
        let bits = u8::try_from(self.bits).expect("bits are few");
        let learn = Learn { after, upto, origin: anchor, bits, known };
        Some(Question { to, learn, region, places })
    }

    /// One of the last few at or before a place, but after `anchor`, that are likely to
    /// live, a different one each time: they know different nodes, and two have to name a node
    /// before it is sure. An answer makes the asked node itself sure.
    fn node_to_ask(&self, anchor: u64, place: u64, now: u32) -> Option<crate::Node> {
        if place == anchor {
            return None;
        }
        let (first, second) = self.ranges(anchor, place);
        let may_ask = |entry: &&Entry| entry.sure || self.trust == Trust::TwoPeers;
        let near = second.rev().chain(first.rev()).map(|(_, entry)| entry).filter(may_ask);
        let near: Vec<&Entry> = near.take(ASK_AMONG).collect();
        let likely = near.iter().filter(|entry| self.is_likely(entry, now)).count();
        let nth = if likely == 0 { 0 } else { (now ^ place as u32) as usize % likely };
        let rank = |entry: &&&Entry| likely == 0 || self.is_likely(entry, now);
        near.iter().filter(rank).nth(nth).map(|entry| entry.node())
    }

    /// A question was answered up to this place.
    pub(super) fn swept(&mut self, index: usize, upto: u64, moved: bool, nodes: f64, now: u32) {
        let Some(region) = self.regions.get_mut(index) else { return };
        let reached = upto.wrapping_sub(region.anchor);
        if moved && reached <= region.high {
            region.cursor = region.cursor.max(reached);
        }
        if region.cursor < region.high {
            return;
        }
        let took = now.saturating_sub(region.began);
        region.begin_again(now);
        // The largest regions take longest.
        let width = region.high - region.low;
        if self.regions.iter().all(|other| other.high - other.low <= width) {
            self.judge(took, nodes, now);
        }
    }

    /// A sweep of the largest region took so long: can the table be larger, or must it be smaller?
    fn judge(&mut self, took: u32, nodes: f64, now: u32) {
        let acceptable = self.acceptable_staleness_secs();
        let most = (nodes.max(2.0).log2().ceil() as u32 + 5).min(MAX_BITS);
        if took > acceptable + acceptable / 5 {
            self.set_bits(self.bits.saturating_sub(1), now);
        } else if took < acceptable / 4 * 3 && self.unsure * UNSURE_ENOUGH <= self.entries.len() {
            // A second peer's word for an unsure entry costs a tenth of a new entry.
            self.set_bits((self.bits + 1).min(most), now);
        }
    }
}
