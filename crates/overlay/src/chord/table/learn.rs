//! Asking a peer about the nodes after it, by difference.
//!
//! The question names the nodes that the asker knows there, three bytes each. The answer says of
//! each how long ago it was known to live, and names in full the nodes that the asker lacks and has
//! a slot for. `docs/design/chord.md` has the byte tables.

use std::collections::{BTreeMap, BTreeSet};

use minicbor::{Decode, Encode};

use super::entry::{from_code, place_of, tag_of, to_code};
use super::sweep::FRESH_SHARE;
use super::{Evidence, MAX_BITS, Table, slot};
use crate::Node;
use crate::wire::WireNodes;

/// Tell me about the nodes after you: [`Learn`]; answered by [`Learned`].
pub const LEARN: u16 = 0x0110;
/// The most nodes named in a question.
pub const MAX_ASKED: usize = 128;
/// The most nodes named in an answer.
pub const MAX_TOLD: usize = 128;
/// Bytes of a tag.
const TAG_BYTES: usize = 3;
/// An age that says: not known.
const UNKNOWN: u8 = 0x7f;
/// A successor list may not have a node yet that lived so many seconds ago.
const NEWS_SECS: u32 = 5;
/// So many nodes more than twice the expected are believed to be in a range.
const MARGIN: f64 = 24.0;
/// How far one answer moves the measured coverage.
const AVERAGE_OVER: f64 = 16.0;

/// The question. Places are the upper 64 bits of ring positions.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct Learn {
    /// The nodes after this place are meant: a position of the node that is asked.
    #[n(0)]
    pub after: u64,
    /// The last place that is meant.
    #[n(1)]
    pub upto: u64,
    /// The asker's position, from which it counts distances.
    #[n(2)]
    pub origin: u64,
    /// The bits of distance that tell the asker's slots apart.
    #[n(3)]
    pub bits: u8,
    /// The tags of the nodes that the asker knows there, in ring order, three bytes each.
    #[cbor(n(4), with = "minicbor::bytes")]
    pub known: Vec<u8>,
}

/// The answer.
#[derive(Clone, PartialEq, Eq, Debug, Default, Encode, Decode)]
pub struct Learned {
    /// The last place that the answer speaks of.
    #[n(0)]
    pub upto: u64,
    /// The last place that the answerer's successor list reaches.
    #[n(1)]
    pub near: u64,
    /// For each tag of the question up to that place a code: how long ago the node was
    /// known to live, 127 for unknown.
    #[cbor(n(2), with = "minicbor::bytes")]
    pub ages: Vec<u8>,
    /// Nodes that the asker has not named, in ring order.
    #[n(3)]
    pub nodes: WireNodes,
    /// For each of these the code of how long ago it was known to live.
    #[cbor(n(4), with = "minicbor::bytes")]
    pub node_ages: Vec<u8>,
}

/// A question under way.
#[derive(Clone, Debug)]
pub struct Question {
    /// The node to ask.
    pub to: Node,
    /// The question.
    pub learn: Learn,
    /// Which region is being swept.
    pub(super) region: usize,
    /// The places of the tags.
    pub(super) places: Vec<u64>,
}

impl Table {
    /// Answers a question from this table: of each slot of the asker's in which it knows no live
    /// node one is named.
    pub fn answer(&self, learn: &Learn, now: u32) -> Learned {
        let asked = learn.known.chunks_exact(TAG_BYTES).take(MAX_ASKED);
        let mut ages = vec![UNKNOWN; asked.len()];
        let index_of: BTreeMap<&[u8], usize> = asked.enumerate().map(|(i, tag)| (tag, i)).collect();
        let bits = u32::from(learn.bits).min(MAX_BITS);
        let slot_of = |offer: &Offer| slot(offer.place.wrapping_sub(learn.origin), bits).0;
        let offers = self.offers(learn, now);
        let known = offers.iter().filter(|offer| index_of.contains_key(&offer.tag[..]));
        let mut taken: BTreeSet<u64> = known.map(slot_of).collect();
        let (mut nodes, mut node_ages) = (Vec::new(), Vec::new());
        let (mut upto, mut last) = (learn.upto, learn.after);
        for offer in &offers {
            let age = to_code(offer.age).min(UNKNOWN - 1);
            if let Some(i) = index_of.get(&offer.tag[..]) {
                ages[*i] = age;
            } else if nodes.len() >= MAX_TOLD {
                upto = last;
                break;
            } else if taken.insert(slot_of(offer)) {
                nodes.push(match self.entries.get(&offer.place) {
                    Some(entry) => entry.node(),
                    None => self.anchor_of(offer.place).0.node,
                });
                node_ages.push(age);
            }
            last = offer.place;
        }
        let anchor = self.anchors.iter().find(|anchor| anchor.place == learn.after);
        let near = anchor.map_or(learn.after, |a| a.place.wrapping_add(a.near));
        Learned { upto, near, ages, nodes: WireNodes(nodes), node_ages }
    }

    /// The nodes in the asked range that this one may name, in order.
    fn offers(&self, learn: &Learn, now: u32) -> Vec<Offer> {
        let own = self.anchors.iter().map(|anchor| {
            let tag = tag_of(&anchor.node.peer.id, anchor.node.virtual_server);
            Offer { place: anchor.place, age: 0, tag }
        });
        let mut offers: Vec<Offer> =
            own.filter(|own| is_within(own.place, learn.after, learn.upto)).collect();
        let (first, second) = self.ranges(learn.after, learn.upto);
        for (place, entry) in first.chain(second) {
            if entry.sure && self.is_likely(entry, now) {
                offers.push(Offer { place: *place, age: entry.age_secs(now), tag: entry.tag() });
            }
        }
        offers.sort_by_key(|offer| offer.place.wrapping_sub(learn.after));
        offers
    }

    /// Takes in the answer to a question, on a ring of about `nodes`; of the nodes that it names
    /// only those that are possible there.
    pub fn take_in(
        &mut self,
        question: &Question,
        answer: &Learned,
        nodes: f64,
        is_possible: impl Fn(&Node) -> bool,
        now: u32,
    ) {
        let Question { to, learn, region, .. } = question;
        let span = |place: u64| place.wrapping_sub(learn.after);
        let covered = span(answer.upto).min(span(learn.upto));
        let confirmed = self.take_ages(question, answer, covered, now);
        let expected = covered as f64 / 2f64.powi(64) * nodes;
        let believed = ((2.0 * expected + MARGIN) as usize).saturating_sub(confirmed);
        let mut news = 0;
        for (node, age) in answer.nodes.0.iter().zip(&answer.node_ages).take(believed) {
            let place = place_of(node.id.key());
            let is_asked = (1..=covered).contains(&span(place));
            if is_asked && !self.is_own(place) && is_possible(node) {
                // A node that this one has learnt of since it asked is no news.
                news += usize::from(!self.entries.contains_key(&place));
                let heard = now.saturating_sub(from_code(*age));
                self.named(&Evidence { node: *node, heard }, &to.peer.id, now);
            }
        }
        if confirmed + news > 0 {
            let share = confirmed as f64 / (confirmed + news) as f64;
            self.coverage += (share - self.coverage) / AVERAGE_OVER;
        }
        self.swept(*region, answer.upto, covered > 0, nodes, now);
    }

    /// Takes in the ages of the nodes that the question named, as far as the answer covers them.
    /// Returns how many are confirmed to live.
    fn take_ages(
        &mut self,
        question: &Question,
        answer: &Learned,
        covered: u64,
        now: u32,
    ) -> usize {
        let Question { to, learn, places, .. } = question;
        let mut confirmed = 0;
        let span = |place: u64| place.wrapping_sub(learn.after);
        for (place, code) in places.iter().zip(&answer.ages) {
            if span(*place) > covered {
                break;
            }
            let Some(entry) = self.entries.get(place) else { continue };
            let (node, age_secs) = (entry.node(), entry.age_secs(now));
            let is_near = span(*place) <= span(answer.near);
            if *code < UNKNOWN {
                confirmed += 1;
                let heard = now.saturating_sub(from_code(*code));
                self.named(&Evidence { node, heard }, &to.peer.id, now);
            } else if is_near && age_secs > NEWS_SECS {
                // It would be a successor of the node that was asked.
                self.record_death(*place, now - NEWS_SECS);
            } else if !is_near && age_secs > self.acceptable_staleness_secs() / FRESH_SHARE {
                self.remove(*place);
            }
            if is_near {
                self.lifetimes.saw(age_secs, *code >= UNKNOWN);
            }
        }
        confirmed
    }
}

/// Whether a place lies in `(after, upto]`; the whole circle if the ends are equal.
fn is_within(place: u64, after: u64, upto: u64) -> bool {
    place.wrapping_sub(after).wrapping_sub(1) <= upto.wrapping_sub(after).wrapping_sub(1)
}

/// A node that an answer may name.
struct Offer {
    place: u64,
    age: u32,
    tag: [u8; TAG_BYTES],
}
