//! A routing table that is as large as a bandwidth budget keeps fresh.
//!
//! The idea is Accordion's (Li, Stribling, Morris, Kaashoek, "Bandwidth-efficient
//! management of DHT routing tables", NSDI 2005): learn of nodes from every message,
//! explore with the rest of the budget, spread the entries so that their density falls
//! with the distance (1/x, a small world), and give up first entries that are likely dead.
//! Between a handful of entries and all nodes there is no other protocol, only more or
//! fewer bits:
//!
//! **Spacing.** The distance x of an entry from this node is written as a floating-point
//! number, an octave and [`Table::bits`] bits after the leading one. Entries whose numbers
//! are equal share a *slot*, and only one stays. With 0 bits there is one entry an octave,
//! Chord's fingers; each bit more halves the spacing, which stays in proportion to x; with
//! log2 N + 3 bits hardly any two nodes share a slot and the table holds all nodes. Taking
//! a bit away merges pairs of slots: the entry with the smallest scaled gap goes. A slot stays with
//! the node that has it while that one probably lives, so that old nodes have most of them.
//!
//! **Evidence.** An entry says when its node was last known to live, by whatever evidence is the
//! freshest; ages are passed on. How many of the nodes that others were asked about have died
//! since says how old evidence may become: the acceptable staleness S, in which one node in twenty
//! dies ([`evidence`]).
//!
//! **Exploration** ([`sweep`], [`learn`]). A node asks an entry about the nodes after it, and sends
//! three bytes for each that it knows there. The answer is one byte for each of these, its age, and
//! in full only nodes that the asker lacks. Refreshing an entry so costs four bytes and its share
//! of the message's 300, a new one 44: 6 bytes at 128 entries a question. (Accordion sends entries
//! whole, whether or not they are known.) It sweeps each octave in turn, the near ones more often:
//! a node is the authority on its successor list and must know its surroundings well for others
//! that ask it.
//!
//! A node that answers a walk or calls is refreshed too, at no cost in messages.
//!
//! **Size.** The budget keeps M = budget × S / (2 × bytes per refresh) entries fresh, since each
//! node is asked as often as it asks. If a sweep of the far octave takes longer than S, the table
//! loses a bit; if it takes less than three quarters of S, it gains one. With Overnet's sessions
//! (Javadi et al., JPDC 2013, `Overnet03`: LogNormal µ = 0.19, σ = 0.98, mean 1.95 h) S is some 350
//! s: with 400 bytes/s left by stabilisation, M = 400 × 350 / 12 = 11,000, more than 4,096 nodes,
//! even if half of it goes for newcomers, checks and octaves swept more often. With 10 bytes/s it
//! is 290.
//!
//! **Admission.** Positions are derived from keys (CFS §4.4), and only the holder of a
//! key answers a call, so a false entry can waste a call, never misdirect one. To keep
//! liars from filling the table or emptying it:
//! - An entry is *sure* once this node has heard of it first-hand, or two different peers
//!   have named it ([`Trust`]), or it is in a successor list of ours. Only sure ones are
//!   used as next hops, passed on,
//!   guessed to be a root, or survive against others; those not sure take at most one
//!   in [`UNSURE_SHARE`] of the most entries and never displace a sure one.
//! - Of one answer no more is believed than twice as many nodes as their density lets expect.
//! - A node that did not answer this one is not accepted from hearsay for
//!   [`DEATH_REMEMBERED_SECS`].
//! - Deaths are not taken from others, except from the node whose successor the dead one would be.
//!
//! Invariants ([`Table::check_invariants`]): at most `max_entries`; never a position of this
//! node's own; beyond the successor lists at most one entry a slot; the number of unsure entries
//! is within its share.
//!
//! Time is an argument in whole seconds ([`secs`]); there is no clock, no network and no
//! task here. It does not know the root of a key, which successor lists tell, and only guesses it.
//! It needs hashed IDs: two nodes whose first 64 bits agree cannot both be in.

pub mod budget;
mod entry;
mod evidence;
pub(in crate::chord) mod explore;
pub mod learn;
mod slots;
pub mod sweep;

use std::collections::BTreeMap;

use atoll_env::Instant;
use atoll_key::{Key, PeerId};

use crate::{MAX_CLOSER, Node};
use entry::{Entry, place_of};
use evidence::Lifetimes;
use slots::slot;
use sweep::{Region, regions};

pub use evidence::{Evidence, Trust};

/// The most entries of a table by default: 5 MB.
pub const MAX_ENTRIES: usize = 65_536;
/// One in so many entries of a full table may be unsure. A guess.
pub const UNSURE_SHARE: usize = 2;
/// For so long a node that did not answer is not accepted from hearsay. A guess: longer than
/// others take to find it dead.
pub const DEATH_REMEMBERED_SECS: u32 = 600;
/// The most dead nodes remembered.
pub const MAX_DEATHS: usize = 1024;
/// More bits than any ring wants.
pub const MAX_BITS: u32 = 24;
/// With how many bits a table begins. A guess: a few questions an octave.
const FIRST_BITS: u32 = 4;
/// How many sure entries before a key are looked at for good next hops. A guess.
const LOOK_BACK: usize = 24;
/// How many entries at most are looked at to find them.
const SCAN: usize = 256;
/// A root is guessed if so many wrong ones are to be expected: by a node before the key it
/// takes two calls, by a good guess one.
const MOST_BACKS: f64 = 0.8;
/// A gap so many times as wide as one between neighbours is a hole in the table rather than
/// one in the ring (there one in 150 is as wide), and is not guessed across.
const HOLE: f64 = 5.0;
/// How many nodes on each side of a place tell how many there are known. A guess.
const AROUND: f64 = 8.0;
/// No table is taken to know more than this share of all nodes: some have just come.
const MOST_COVERAGE: f64 = 0.98;
/// The most guesses at a root: as many as a block usually has copies, among which a reader chooses.
const MAX_LIKELY_ROOTS: usize = 3;
/// Ages can lie before the node's start: seconds count from here.
const EPOCH_SECS: u32 = 1 << 30;

/// The table's time.
pub fn secs(now: Instant) -> u32 {
    let secs = u32::try_from(now.as_nanos() / 1_000_000_000).unwrap_or(u32::MAX);
    secs.saturating_add(EPOCH_SECS)
}

/// A virtual server of this node and how far its successor list reaches.
#[derive(Clone, Copy, Debug)]
struct Anchor {
    node: Node,
    place: u64,
    /// The distance to the last of its successors: up to there all nodes stay.
    near: u64,
}

/// See the module.
#[derive(Clone, Debug)]
pub struct Table {
    trust: Trust,
    max_entries: usize,
    /// This node's virtual servers by position; never empty.
    anchors: Vec<Anchor>,
    entries: BTreeMap<u64, Entry>,
    unsure: usize,
    /// Where nodes have died, and the last second for which others are not believed that they live.
    deaths: BTreeMap<u64, u32>,
    lifetimes: Lifetimes,
    bits: u32,
    /// Share of the live nodes in explored ranges that were known before.
    coverage: f64,
    regions: Vec<Region>,
}

impl Table {
    /// An empty table of `me`.
    ///
    /// # Panics
    /// If `max_entries` is zero.
    pub fn new(me: Node, max_entries: usize, now: u32) -> Table {
        assert!(max_entries > 0, "a table of nothing");
        let anchor = Anchor { node: me, place: place_of(me.id.key()), near: 0 };
        let mut table = Table {
            trust: Trust::TwoPeers,
            max_entries,
            anchors: vec![anchor],
            entries: BTreeMap::new(),
            unsure: 0,
            deaths: BTreeMap::new(),
            lifetimes: Lifetimes::default(),
            bits: FIRST_BITS,
            coverage: 0.0,
            regions: Vec::new(),
        };
        table.regions = regions(&table.anchors, now);
        table
    }

    /// With another rule for sure entries.
    #[must_use]
    pub fn trusting(mut self, trust: Trust) -> Table {
        self.trust = trust;
        self
    }

    /// How many nodes are in it.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether it is empty.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    // --- this node's own places -------------------------------------------------------

    /// This node's virtual servers, each with its successor list, whose nodes are known to live.
    /// `me` is this node's own key.
    pub fn set_own(&mut self, own: &[(Node, Vec<Node>)], me: PeerId, now: u32) {
        let before = std::mem::take(&mut self.anchors);
        for (node, successors) in own {
            let place = place_of(node.id.key());
            let near = successors.last().map_or(0, |n| place_of(n.id.key()).wrapping_sub(place));
            self.anchors.push(Anchor { node: *node, place, near });
        }
        self.anchors.sort_unstable_by_key(|anchor| anchor.place);
        self.anchors.dedup_by_key(|anchor| anchor.place);
        assert!(!self.anchors.is_empty(), "a node has a virtual server");
        let places = |anchors: &[Anchor]| -> Vec<u64> { anchors.iter().map(|a| a.place).collect() };
        let moved = places(&self.anchors) != places(&before);
        if moved {
            for place in places(&self.anchors) {
                self.remove(place);
            }
            self.regions = regions(&self.anchors, now);
        }
        if moved || self.anchors.iter().zip(&before).any(|(new, old)| new.near < old.near) {
            self.prune(now);
        }
        for (node, successors) in own {
            self.drop_missing(place_of(node.id.key()), successors, now);
            let others = successors.iter().enumerate().filter(|(_, n)| n.peer.id != me);
            for (i, node) in others {
                // Each knows its own successor at first hand; the word takes about a
                // second from list to list.
                let heard = now.saturating_sub(i as u32);
                self.record_neighbour(node, heard, now);
            }
        }
    }

    // --- nodes to ask -----------------------------------------------------------------

    /// Nodes before the key, nearest first: those likely to be alive if there are some,
    /// otherwise any. At most [`MAX_CLOSER`].
    pub fn before(&self, key: &Key, now: u32) -> Vec<Node> {
        let place = place_of(key);
        let back = || self.entries.range(..place).rev().chain(self.entries.range(place..).rev());
        let some = || back().map(|(_, entry)| entry).take(SCAN);
        let sure: Vec<&Entry> = some().filter(|entry| entry.sure).take(LOOK_BACK).collect();
        let is_good = |entry: &&Entry| self.is_likely(entry, now);
        let good: Vec<&Entry> = sure.iter().copied().filter(is_good).collect();
        let chosen = if good.len() >= MAX_CLOSER / 2 { good } else { sure };
        chosen.into_iter().take(MAX_CLOSER).map(Entry::node).collect()
    }

    /// Nodes one of which is probably the root of `key`, on a ring of about `nodes`; none
    /// where the way by a node before the key is shorter.
    ///
    /// A wrong guess costs a call for each node between the key and the guess: each names
    /// its predecessor. As many are expected there as the gap holds of those that the
    /// table does not know.
    pub fn likely_roots(&self, key: &Key, nodes: f64, now: u32) -> Vec<Node> {
        let place = place_of(key);
        let after = self.entries.range(place..).chain(self.entries.range(..place)).take(SCAN);
        // A live node that is left out here makes the guess wrong.
        let may_live = |e: &Entry| e.sure && self.is_likely(e, now);
        let mut good = after.filter(|(_, entry)| may_live(entry)).take(MAX_LIKELY_ROOTS);
        let Some((first, entry)) = good.next() else { return Vec::new() };
        let known = self.known_around(place, nodes);
        let gap = first.wrapping_sub(place) as f64 / 2f64.powi(64) * nodes;
        if gap > HOLE || gap * (1.0 - known.min(MOST_COVERAGE)) > MOST_BACKS {
            return Vec::new();
        }
        std::iter::once(entry.node()).chain(good.map(|(_, entry)| entry.node())).collect()
    }

    /// The share of the nodes around a place that are in the table and sure, as far as the
    /// density of the ring tells.
    fn known_around(&self, place: u64, nodes: f64) -> f64 {
        let share = (AROUND / nodes.max(1.0)).min(0.49);
        let half = (2f64.powi(64) * share) as u64;
        let (first, second) = self.ranges(place.wrapping_sub(half), place.wrapping_add(half));
        let sure = first.chain(second).filter(|(_, entry)| entry.sure).count();
        (sure as f64 / (2.0 * share * nodes.max(1.0))).min(1.0)
    }

    /// At most `count` sure entries, evenly spread over the table.
    pub fn sample(&self, count: usize) -> Vec<Node> {
        let step = self.entries.len().div_ceil(count.max(1)).max(1);
        let sure = self.entries.values().filter(|entry| entry.sure);
        sure.step_by(step).map(Entry::node).collect()
    }

    /// The few entries after each place of this node's own, sure ones only.
    pub fn followers(&self) -> Vec<Node> {
        let after = |anchor: &Anchor| {
            let (first, second) = self.ranges(anchor.place, anchor.place);
            let sure = first.chain(second).filter(|(_, entry)| entry.sure);
            sure.take(MAX_CLOSER).map(|(_, entry)| entry.node()).collect::<Vec<_>>()
        };
        self.anchors.iter().flat_map(after).collect()
    }

    /// Panics with a description if an invariant of the module does not hold.
    pub fn check_invariants(&self) {
        assert!(self.entries.len() <= self.max_entries, "{} entries", self.entries.len());
        let unsure = self.entries.values().filter(|entry| !entry.sure).count();
        assert_eq!(unsure, self.unsure, "unsure entries are miscounted");
        assert!(self.deaths.len() <= MAX_DEATHS, "too many deaths");
        let mut held = None;
        let first = self.anchors[0].place;
        for (place, entry) in self.entries.range(first..).chain(self.entries.range(..first)) {
            assert!(!self.is_own(*place), "{entry:?} is this node");
            let slot = self.slot_of(*place);
            assert!(slot.is_none() || slot != held, "{entry:?} shares its slot");
            held = slot;
        }
    }
}

#[cfg(test)]
mod tests;
