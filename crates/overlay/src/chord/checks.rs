//! Claims waiting to be checked (CFS §4.4), and how many checks a node makes.
//!
//! What is checked is a *card*, key and address; the answer says how many virtual servers its
//! node runs. Whoever is named by that card meanwhile, with whatever index, waits for the
//! same outcome.
//!
//! A check dials an address that somebody else has named. Therefore their number is
//! bounded whatever is claimed: [`MAX_UNDER_WAY`] at a time, [`CHECKS_PER_SEC`] on
//! average, [`MAX_PER_SOURCE`] in ten seconds for the claims of one peer; and who has
//! caused fewer checks lately comes first, so that a flood of claims delays nobody else's
//! for long. One claim costs its target one connection at most, so a node that is lied to
//! dials a third party no more often than the liar calls the node; and an IP address where
//! [`MAX_REFUTED_NAMED`] claims have proved false is left in peace until the ten seconds are
//! over. Who speaks for itself is heard there longer ([`MAX_REFUTED_CALLERS`]): others shall
//! not be able to keep it out by naming its address.
//!
//! Plain data; time is an argument. `W` is whoever waits for the outcome.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use atoll_env::Instant;
use atoll_key::PeerId;
use atoll_net::Peer;

use crate::Node;

/// The most claims of others waiting, and of this node's own questions as many.
pub const MAX_WAITING: usize = 256;
/// The most checks under way.
pub const MAX_UNDER_WAY: usize = 16;
/// Of these, some are kept for this node's own questions: whoever claims addresses that
/// take a call without ever answering it shall not stop a node from joining.
const KEPT_FOR_OWN: usize = 4;
/// The most checks under way for the claims of one peer.
const MAX_UNDER_WAY_OF_ONE: usize = 4;
/// The most checks on average. A guess: a node that joins a ring makes some forty.
pub const CHECKS_PER_SEC: u32 = 32;
/// The most checks in a burst.
pub const MAX_BURST: u32 = 128;
/// The most checks for the claims of one peer in a [`WINDOW`].
pub const MAX_PER_SOURCE: u32 = 64;
/// See [`MAX_PER_SOURCE`].
pub const WINDOW: Duration = Duration::from_secs(10);
/// After so many false claims in a [`WINDOW`], all made by others than who is claimed, no
/// more such claims are checked at the IP address they name. A guess.
pub const MAX_REFUTED_NAMED: u32 = 16;
/// The same for claims that callers make of themselves: each costs the caller a connection.
pub const MAX_REFUTED_CALLERS: u32 = 64;
/// The most peers whose claims are counted in a window; those of others are not heard.
pub const MAX_SOURCES: usize = 1024;
/// The most who wait for one check.
const MAX_WAITERS: usize = 64;

/// See the module.
pub struct CheckQueue<W> {
    waiting: BTreeMap<Peer, Claim<W>>,
    under_way: BTreeMap<Peer, Claim<W>>,
    /// Checks caused in this window, by whose claims they were.
    caused: BTreeMap<PeerId, u32>,
    /// False claims in this window by the IP address claimed, and by whether the claimed node
    /// was the one that called.
    refuted: BTreeMap<(IpAddr, bool), u32>,
    window_began: Instant,
    /// Checks that may start now, and when that was last reckoned.
    allowance: f64,
    reckoned: Instant,
}

/// Claims of one card.
#[derive(Debug)]
pub struct Claim<W> {
    /// By whom: of several, who has caused the fewest checks; none if this node wants to know.
    source: Option<PeerId>,
    /// The virtual indices claimed: never more than there are.
    pub indices: BTreeSet<u16>,
    /// Who waits for the outcome.
    pub waiters: Vec<W>,
}

impl<W> Claim<W> {
    fn add(&mut self, node: &Node, waiter: Option<W>) {
        self.indices.insert(node.seat.index);
        if self.waiters.len() < MAX_WAITERS {
            self.waiters.extend(waiter);
        }
    }
}

impl<W> Default for CheckQueue<W> {
    fn default() -> CheckQueue<W> {
        CheckQueue {
            waiting: BTreeMap::new(),
            under_way: BTreeMap::new(),
            caused: BTreeMap::new(),
            refuted: BTreeMap::new(),
            window_began: Instant::default(),
            allowance: f64::from(MAX_BURST),
            reckoned: Instant::default(),
        }
    }
}

impl<W> CheckQueue<W> {
    /// Queues a check of `node`, which `source` has named: another peer, or this node itself
    /// (`None`), which comes first. A waiter is dropped if there is no room.
    pub fn ask(&mut self, node: Node, source: Option<PeerId>, waiter: Option<W>) {
        if let Some(claim) = self.under_way.get_mut(&node.peer) {
            claim.add(&node, waiter);
            return;
        }
        if !self.waiting.contains_key(&node.peer) {
            if !self.has_room(&node.peer, source) {
                return;
            }
            let claim = Claim { source, indices: BTreeSet::new(), waiters: Vec::new() };
            self.waiting.insert(node.peer, claim);
        }
        let rank = self.rank(source);
        let present = self.waiting[&node.peer].source;
        // Who waits behind a liar's claim of the same card shall not wait as long as the liar.
        let is_sooner = rank < self.rank(present) && self.may_check(&node.peer, source);
        let claim = self.waiting.get_mut(&node.peer).expect("it is there, or was just put there");
        claim.add(&node, waiter);
        if is_sooner {
            claim.source = source;
        }
    }

    fn has_room(&self, card: &Peer, source: Option<PeerId>) -> bool {
        let waits = self.waiting.values();
        let from_source = waits.filter(|claim| claim.source == source).count();
        match &source {
            // What this node itself needs to know has room of its own.
            None => from_source < MAX_WAITING,
            Some(_) => {
                from_source < MAX_PER_SOURCE as usize
                    && self.waiting.len() < MAX_WAITING
                    && self.may_check(card, source)
            }
        }
    }

    /// Whether a claim of `source` is still heard in this window.
    fn may_check(&self, card: &Peer, source: Option<PeerId>) -> bool {
        let Some(source) = source else { return true };
        let has_share = match self.caused.get(&source) {
            Some(caused) => *caused < MAX_PER_SOURCE,
            None => self.caused.len() < MAX_SOURCES,
        };
        let calls_itself = source == card.id;
        let most = if calls_itself { MAX_REFUTED_CALLERS } else { MAX_REFUTED_NAMED };
        let refuted = self.refuted.get(&(card.addr.ip(), calls_itself)).copied().unwrap_or(0);
        has_share && refuted < most
    }

    /// The less, the sooner.
    fn rank(&self, source: Option<PeerId>) -> Option<u32> {
        source.map(|peer| self.caused.get(&peer).copied().unwrap_or(0))
    }

    /// The next card to check now, which is under way from then on; `None` when nothing
    /// waits or nothing more may start yet.
    pub fn next(&mut self, now: Instant) -> Option<Peer> {
        if now.since(self.window_began) >= WINDOW {
            self.window_began = now;
            self.caused.clear();
            self.refuted.clear();
        }
        let earned = now.since(self.reckoned).as_secs_f64() * f64::from(CHECKS_PER_SEC);
        self.allowance = (self.allowance + earned).min(f64::from(MAX_BURST));
        self.reckoned = now;
        if self.under_way.len() >= MAX_UNDER_WAY || self.allowance < 1.0 {
            return None;
        }
        let under_way = || self.under_way.values().filter_map(|claim| claim.source);
        let others_may = under_way().count() < MAX_UNDER_WAY - KEPT_FOR_OWN;
        let may_start = |card: &Peer, source: Option<PeerId>| match source {
            None => true,
            Some(peer) => {
                others_may
                    && under_way().filter(|source| *source == peer).count() < MAX_UNDER_WAY_OF_ONE
                    && self.may_check(card, source)
            }
        };
        let startable = self.waiting.iter().filter(|(card, claim)| may_start(card, claim.source));
        let next = startable.min_by_key(|(_, claim)| self.rank(claim.source));
        let next = next.map(|(card, _)| *card)?;
        let claim = self.waiting.remove(&next).expect("it was just found");
        self.allowance -= 1.0;
        if let Some(source) = claim.source {
            *self.caused.entry(source).or_default() += 1;
        }
        self.under_way.insert(next, claim);
        Some(next)
    }

    /// The check of a card has ended; what was claimed, and who waited for it.
    pub fn finished(&mut self, card: &Peer, is_refuted: bool) -> Option<Claim<W>> {
        let claim = self.under_way.remove(card)?;
        if is_refuted && let Some(source) = claim.source {
            *self.refuted.entry((card.addr.ip(), source == card.id)).or_default() += 1;
        }
        Some(claim)
    }

    #[cfg(test)]
    fn len(&self) -> usize {
        self.waiting.len()
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddr};

    use super::*;
    use crate::Seat;

    fn id(n: u16) -> PeerId {
        let mut id = [0; 32];
        id[..2].copy_from_slice(&n.to_be_bytes());
        PeerId(id)
    }

    fn node(n: u16) -> Node {
        Node::of(Peer { id: id(n), addr: SocketAddr::from((Ipv4Addr::LOCALHOST, n)) })
    }

    const START: Instant = Instant(1_000_000_000_000);

    /// Makes all checks that may start within a second, each ending at once.
    fn in_a_second(queue: &mut CheckQueue<()>, second: u64, is_refuted: bool) -> usize {
        let mut made = 0;
        for tick in 0..100 {
            let now = START + Duration::from_millis(second * 1000 + tick * 10);
            while let Some(card) = queue.next(now) {
                queue.finished(&card, is_refuted);
                made += 1;
            }
        }
        made
    }

    #[test]
    fn a_flood_of_claims_makes_no_more_checks_than_are_allowed() {
        let mut queue = CheckQueue::<()>::default();
        let mut made = 0;
        for second in 0..60 {
            for n in 0..1000 {
                // Many sources, each with many claims.
                queue.ask(node(1000 + n), Some(id(n % 50)), None);
                assert!(queue.len() <= MAX_WAITING);
            }
            made += in_a_second(&mut queue, second, false);
        }
        assert!(made <= (MAX_BURST + 61 * CHECKS_PER_SEC) as usize, "{made}");
        assert!(made >= (55 * CHECKS_PER_SEC) as usize, "and no fewer: {made}");
    }

    #[test]
    fn one_source_causes_only_its_share() {
        let mut queue = CheckQueue::<()>::default();
        let mut made = 0;
        for second in 0..10 {
            for n in 0..1000 {
                queue.ask(node(1000 + n), Some(id(1)), None);
            }
            made += in_a_second(&mut queue, second, false);
        }
        assert!(made <= 2 * MAX_PER_SOURCE as usize, "{made}");
    }

    #[test]
    fn an_honest_claim_is_checked_at_once_although_others_flood() {
        let mut queue = CheckQueue::<()>::default();
        for second in 0..5 {
            for n in 0..180 {
                queue.ask(node(1000 + n), Some(id(n % 3)), None);
            }
            in_a_second(&mut queue, second, false);
        }
        for n in 0..180 {
            queue.ask(node(2000 + n), Some(id(n % 3)), None);
        }
        queue.ask(node(7), Some(id(7)), None);
        assert_eq!(queue.next(START + Duration::from_secs(6)), Some(node(7).peer));
    }

    #[test]
    fn a_card_is_checked_once_at_a_time_for_all_who_wait() {
        let mut queue = CheckQueue::default();
        queue.ask(node(1), Some(id(9)), Some('a'));
        queue.ask(node(1), Some(id(8)), Some('b'));
        assert_eq!(queue.next(START), Some(node(1).peer));
        queue.ask(node(1), Some(id(8)), Some('c'));
        assert_eq!(queue.next(START), None);
        assert_eq!(queue.finished(&node(1).peer, false).unwrap().waiters, vec!['a', 'b', 'c']);
        assert_eq!(queue.len(), 0);
    }

    /// The index named last used to replace the others: a liar who named a false one of a
    /// newcomer kept it out, for only that one was asked about.
    #[test]
    fn a_false_index_does_not_displace_the_true_one() {
        let mut queue = CheckQueue::<()>::default();
        let at = |index| Node::at(node(1).peer, Seat { index, ..Seat::default() });
        queue.ask(at(0), Some(id(1)), None);
        queue.ask(at(77), Some(id(9)), None);
        assert_eq!(queue.next(START), Some(node(1).peer));
        queue.ask(at(3), Some(id(9)), None);
        let claim = queue.finished(&node(1).peer, false).unwrap();
        assert_eq!(claim.indices, BTreeSet::from([0, 3, 77]));
    }

    #[test]
    fn a_card_that_a_flooder_has_named_too_waits_no_longer_for_that() {
        let mut queue = CheckQueue::<()>::default();
        for n in 0..40 {
            queue.ask(node(1000 + n), Some(id(1)), None);
        }
        in_a_second(&mut queue, 0, false);
        for n in 0..40 {
            queue.ask(node(2000 + n), Some(id(1)), None);
        }
        queue.ask(node(3000), Some(id(1)), None);
        queue.ask(node(3000), Some(id(3000)), None);
        assert_eq!(queue.next(START + Duration::from_secs(2)), Some(node(3000).peer));
    }

    #[test]
    fn addresses_that_never_answer_leave_room_for_others_and_for_this_node() {
        let mut queue = CheckQueue::<()>::default();
        let started = |queue: &mut CheckQueue<()>| std::iter::from_fn(|| queue.next(START)).count();
        for n in 0..60 {
            queue.ask(node(1000 + n), Some(id(1)), None);
        }
        assert_eq!(started(&mut queue), MAX_UNDER_WAY_OF_ONE);
        for n in 0..60 {
            queue.ask(node(2000 + n), Some(id(100 + n)), None);
        }
        assert_eq!(started(&mut queue), MAX_UNDER_WAY - KEPT_FOR_OWN - MAX_UNDER_WAY_OF_ONE);
        queue.ask(node(1), None, None);
        assert_eq!(started(&mut queue), 1);
    }

    #[test]
    fn an_address_where_nobody_is_found_is_soon_left_in_peace() {
        let mut queue = CheckQueue::<()>::default();
        let (mut made, mut key) = (0, 1000);
        for second in 0..9 {
            for source in 0..50 {
                key += 1;
                queue.ask(node(key), Some(id(source)), None);
            }
            made += in_a_second(&mut queue, second, true);
        }
        assert_eq!(made, MAX_REFUTED_NAMED as usize);
        // Whoever is there and calls itself is heard all the same, and so is this node.
        queue.ask(node(7), Some(id(7)), None);
        queue.ask(node(8), None, None);
        assert_eq!(in_a_second(&mut queue, 9, false), 2);
    }
}
