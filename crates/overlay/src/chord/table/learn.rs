//! Asking a peer about the nodes after it, by difference.
//!
//! The question names the nodes that the asker knows there, three bytes each. The answer says of
//! each how long ago it was known to live, and names in full the nodes that the asker lacks and has
//! a slot for. `docs/design/chord.md` has the byte tables.

use minicbor::{Decode, Encode};

use super::entry::{from_code, place_of, tag_of, to_code, to_code_up};
use super::{Evidence, KEEP_P, Table, Trust, slot};
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
/// Set in an age that says how long ago the node was found dead.
const DEAD: u8 = 0x80;
/// What becomes of news of a death between neighbours, seconds.
const NEIGHBOURS_NEWS_SECS: u32 = 5;
/// An entry less likely to live than this is not passed on.
const TELL_P: f64 = 0.5;
/// So many nodes more than twice the expected are believed to be in a range.
const MARGIN: f64 = 24.0;
/// How far one answer moves the measured averages.
const AVERAGE_OVER: f64 = 16.0;

/// The question. Places are the upper 64 bits of ring positions.
#[derive(Clone, PartialEq, Eq, Debug, Encode, Decode)]
pub struct Learn {
    /// The nodes after this place are meant: a position of the one who is asked.
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
    /// How long the answerer has been up, coded.
    #[n(2)]
    pub up: u8,
    /// The bits that the answerer's budget allows it.
    #[n(6)]
    pub bits: u8,
    /// For each tag of the question up to that place a code: how long ago the node was
    /// known to live, 127 for unknown; with the highest bit set, how long ago it was found
    /// dead.
    #[cbor(n(3), with = "minicbor::bytes")]
    pub ages: Vec<u8>,
    /// Nodes that the asker has not named, in ring order.
    #[n(4)]
    pub nodes: WireNodes,
    /// For each of these, two codes: how long ago it was known to live, and for how long
    /// it had lived then, 127 for unknown.
    #[cbor(n(5), with = "minicbor::bytes")]
    pub lives: Vec<u8>,
}

impl Learned {
    /// Leaves out who is said to be dead.
    pub fn leave_out_deaths(&mut self) {
        self.ages.iter_mut().filter(|age| **age & DEAD != 0).for_each(|age| *age = UNKNOWN);
    }

    /// Leaves out nodes named that cannot be on the asker's network at all.
    pub fn leave_out(&mut self, is_impossible: impl Fn(&Node) -> bool) {
        if !self.nodes.0.iter().any(&is_impossible) {
            return;
        }
        let named = std::mem::take(&mut self.nodes.0);
        let lives = std::mem::take(&mut self.lives);
        for (node, life) in named.into_iter().zip(lives.chunks_exact(2)) {
            if !is_impossible(&node) {
                self.nodes.0.push(node);
                self.lives.extend_from_slice(life);
            }
        }
    }
}

/// A question under way.
#[derive(Clone, Debug)]
pub struct Question {
    /// The node to ask.
    pub to: Node,
    /// What.
    pub learn: Learn,
    /// Which region is being swept.
    pub(super) region: usize,
    /// The places of the tags.
    pub(super) places: Vec<u64>,
}

impl Table {
    /// Answers a question from this table.
    pub fn answer(&self, learn: &Learn, now: u32) -> Learned {
        let asked: Vec<&[u8]> = learn.known.chunks_exact(TAG_BYTES).take(MAX_ASKED).collect();
        let mut tags: Vec<([u8; TAG_BYTES], usize)> = Vec::with_capacity(asked.len());
        for (i, tag) in asked.iter().enumerate() {
            tags.push(([tag[0], tag[1], tag[2]], i));
        }
        tags.sort_unstable();
        let index_of = |tag: [u8; TAG_BYTES]| {
            let at = tags.partition_point(|(other, _)| *other < tag);
            tags.get(at).filter(|(other, _)| *other == tag).map(|(_, i)| *i)
        };
        let mut ages = vec![UNKNOWN; asked.len()];
        let mut told = Told::new(learn);
        for (offer, tag) in self.offers(learn, now) {
            if let Some(i) = index_of(tag) {
                ages[i] = to_code_up(offer.age).min(UNKNOWN - 1);
                told.known(offer.place);
            } else if !told.offer(offer) {
                break;
            }
        }
        for (place, grave) in self.graves.iter() {
            if is_within(*place, learn.after, learn.upto)
                && let Some(i) = index_of(grave.tag)
                && ages[i] == UNKNOWN
            {
                let age = now.saturating_sub(grave.died);
                ages[i] = DEAD | to_code(age).min(UNKNOWN - 1);
            }
        }
        let anchor = self.anchors.iter().find(|anchor| anchor.place == learn.after);
        let near = anchor.map_or(learn.after, |a| a.place.wrapping_add(a.near));
        let (upto, chosen) = told.end();
        let mut nodes = Vec::with_capacity(chosen.len());
        let mut lives = Vec::with_capacity(2 * chosen.len());
        for offer in chosen {
            nodes.push(match offer.is_own {
                false => self.entries[&offer.place].node(),
                true => self.anchor_of(offer.place).0.node,
            });
            let up = offer.up.map_or(UNKNOWN, |up| to_code(up).min(UNKNOWN - 1));
            lives.extend([to_code_up(offer.age).min(UNKNOWN - 1), up]);
        }
        let up = to_code(now.saturating_sub(self.since));
        let bits = u8::try_from(self.bits).expect("bits are few");
        Learned { upto, near, up, bits, ages, nodes: WireNodes(nodes), lives }
    }

    /// The nodes in the asked range that this one may name, in order, with their tags.
    fn offers(&self, learn: &Learn, now: u32) -> Vec<(Offer, [u8; TAG_BYTES])> {
        let own = self.anchors.iter().map(|anchor| {
            let up = Some(now.saturating_sub(self.since));
            let tag = tag_of(&anchor.node.peer.id, anchor.node.virtual_server);
            (Offer { place: anchor.place, age: 0, up, is_own: true }, tag)
        });
        let mut lives: Vec<(Offer, [u8; TAG_BYTES])> =
            own.filter(|(own, _)| is_within(own.place, learn.after, learn.upto)).collect();
        let (first, second) = self.ranges(learn.after, learn.upto);
        for (place, entry) in first.chain(second) {
            if entry.sure && entry.doubter == 0 && entry.p_alive(now) >= TELL_P {
                let (age, up) = (entry.age_secs(now), entry.is_dated.then(|| entry.up_secs()));
                lives.push((Offer { place: *place, age, up, is_own: false }, entry.tag()));
            }
        }
        lives.sort_by_key(|(offer, _)| offer.place.wrapping_sub(learn.after));
        lives
    }

    /// Takes in the answer to a question. `expected` is how many nodes the asked range
    /// should hold by the density of the ring.
    pub fn take_in(&mut self, question: &Question, answer: &Learned, nodes: f64, now: u32) {
        let Question { to, learn, region, .. } = question;
        match self.trust {
            Trust::TwoPeers => self.heard(to, now),
            Trust::OwnChecks => self.called(to, now),
        }
        self.said_up(to, from_code(answer.up), now);
        self.begin_with_bits(u32::from(answer.bits));
        let span = |place: u64| place.wrapping_sub(learn.after);
        let covered = span(answer.upto).min(span(learn.upto).wrapping_sub(1).wrapping_add(1));
        let mut ups = Vec::new();
        let confirmed = self.take_ages(question, answer, covered, now, &mut ups);
        let expected = covered as f64 / 2f64.powi(64) * nodes;
        let believed = ((2.0 * expected + MARGIN) as usize).saturating_sub(confirmed);
        let news = self.take_nodes(question, answer, covered, believed, now, &mut ups);
        self.measured(confirmed, news);
        ups.sort_unstable();
        if let Some(median) = ups.get(ups.len() / 2) {
            self.sweeps.met(*median);
        }
        self.swept(*region, answer.upto, covered > 0, nodes, now);
    }

    /// Takes in what is said of the nodes that the question named, as far as the answer covers
    /// them; how many are confirmed to live.
    fn take_ages(
        &mut self,
        question: &Question,
        answer: &Learned,
        covered: u64,
        now: u32,
        ups: &mut Vec<u32>,
    ) -> usize {
        let Question { to, learn, places, .. } = question;
        let (teller, mut confirmed) = (to.peer.id, 0);
        let span = |place: u64| place.wrapping_sub(learn.after);
        for (place, code) in places.iter().zip(&answer.ages) {
            if span(*place) > covered {
                break;
            }
            let is_near = span(*place) <= span(answer.near);
            match *code {
                dead if dead & DEAD != 0 => {
                    let died = now.saturating_sub(from_code(dead & !DEAD));
                    self.doubt(*place, died, &teller, is_near);
                }
                UNKNOWN if is_near => {
                    let died = now.saturating_sub(NEIGHBOURS_NEWS_SECS);
                    self.doubt(*place, died, &teller, true);
                }
                UNKNOWN => self.drop_unless_likely(*place, now),
                code => {
                    let heard = now.saturating_sub(from_code(code));
                    if let Some(entry) = self.entries.get(place) {
                        confirmed += 1;
                        if entry.is_dated {
                            ups.push(entry.up_secs());
                        }
                        let said = Evidence { node: entry.node(), heard, since: None };
                        self.named(&said, &teller, now);
                    }
                }
            }
        }
        confirmed
    }

    /// Takes in the nodes that the answer names, at most `believed` of them; how many are new.
    fn take_nodes(
        &mut self,
        question: &Question,
        answer: &Learned,
        covered: u64,
        believed: usize,
        now: u32,
        ups: &mut Vec<u32>,
    ) -> usize {
        let (teller, mut news) = (question.to.peer.id, 0);
        let span = |place: u64| place.wrapping_sub(question.learn.after);
        for (node, life) in answer.nodes.0.iter().zip(answer.lives.chunks_exact(2)).take(believed) {
            let place = place_of(node.id.key());
            if span(place) == 0 || span(place) > covered || self.is_own(place) {
                continue;
            }
            let heard = now.saturating_sub(from_code(life[0]));
            let up = (life[1] < UNKNOWN).then(|| from_code(life[1]));
            let since = up.map(|up| heard.saturating_sub(up));
            let said = Evidence { node: *node, heard, since };
            // A node that we have learnt of since we asked is no news.
            news += usize::from(!self.entries.contains_key(&place));
            self.named(&said, &teller, now);
            ups.extend(up);
        }
        news
    }

    /// The asked node did not answer: another will be asked.
    pub fn record_no_answer(&mut self, question: &Question, now: u32) {
        self.failed(&question.to.peer.id, now);
    }

    fn drop_unless_likely(&mut self, place: u64, now: u32) {
        if self.entries.get(&place).is_some_and(|entry| entry.p_alive(now) < KEEP_P) {
            self.remove(place);
        }
    }

    fn measured(&mut self, confirmed: usize, news: usize) {
        let met = confirmed + news;
        if met > 0 {
            let share = confirmed as f64 / met as f64;
            self.coverage += (share - self.coverage) / AVERAGE_OVER;
        }
    }
}

/// Whether a place lies in `(after, upto]`; the whole circle if the ends are equal.
fn is_within(place: u64, after: u64, upto: u64) -> bool {
    place.wrapping_sub(after).wrapping_sub(1) <= upto.wrapping_sub(after).wrapping_sub(1)
}

#[derive(Clone, Copy, Debug)]
struct Offer {
    place: u64,
    age: u32,
    up: Option<u32>,
    /// Whether it is this node itself.
    is_own: bool,
}

/// What an answer will name: of each slot of the asker's that it has nobody for, the node
/// that has lived longest.
struct Told {
    origin: u64,
    bits: u32,
    upto: u64,
    chosen: Vec<Offer>,
    /// The slot being filled, whether the asker has somebody there, and our candidate.
    slot: Option<u64>,
    taken: bool,
    best: Option<Offer>,
    full_at: Option<u64>,
    last: u64,
}

impl Told {
    fn new(learn: &Learn) -> Told {
        Told {
            origin: learn.origin,
            bits: u32::from(learn.bits).min(super::MAX_BITS),
            upto: learn.upto,
            chosen: Vec::new(),
            slot: None,
            taken: false,
            best: None,
            full_at: None,
            last: learn.after,
        }
    }

    fn enter(&mut self, place: u64) {
        let (low, _) = slot(place.wrapping_sub(self.origin), self.bits);
        if self.slot != Some(low) {
            self.leave();
            self.slot = Some(low);
        }
        self.last = place;
    }

    fn leave(&mut self) {
        if let Some(best) = self.best.take()
            && !self.taken
        {
            self.chosen.push(best);
        }
        self.taken = false;
    }

    fn known(&mut self, place: u64) {
        self.enter(place);
        self.taken = true;
    }

    /// Returns whether there is room for more.
    fn offer(&mut self, offer: Offer) -> bool {
        let before = self.last;
        self.enter(offer.place);
        if self.chosen.len() >= MAX_TOLD {
            self.full_at = Some(before);
            return false;
        }
        if self.best.is_none_or(|best| offer.up > best.up) {
            self.best = Some(offer);
        }
        true
    }

    /// The last place spoken of, and the nodes.
    fn end(mut self) -> (u64, Vec<Offer>) {
        if self.full_at.is_none() {
            self.leave();
        }
        self.chosen.truncate(MAX_TOLD);
        (self.full_at.unwrap_or(self.upto), self.chosen)
    }
}
