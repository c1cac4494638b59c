//! Claims waiting to be checked (CFS §4.4), and how many checks a node makes.
//!
//! A check dials an address that somebody else has named. Therefore their number is
//! bounded whatever is claimed: [`MAX_UNDER_WAY`] at a time, [`CHECKS_PER_SEC`] on
//! average, [`MAX_PER_SOURCE`] in ten seconds for the claims of one peer; and who has
//! caused fewer checks lately comes first, so that a flood of claims delays nobody else's
//! for long. One claim costs its target one connection at most, so a node that is lied to
//! dials a third party no more often than the liar calls the node.
//!
//! Plain data; time is an argument. `W` is whoever waits for the outcome.

use std::collections::BTreeMap;
use std::time::Duration;

use atoll_env::Instant;
use atoll_key::PeerId;
use atoll_net::Peer;

use crate::Node;

/// The most claims of others waiting, and of this node's own questions as many.
pub const MAX_WAITING: usize = 256;
/// The most checks under way.
pub const MAX_UNDER_WAY: usize = 16;
/// The most checks on average. A guess: a node that joins a ring makes some forty.
pub const CHECKS_PER_SEC: u32 = 32;
/// The most checks in a burst.
pub const MAX_BURST: u32 = 128;
/// The most checks for the claims of one peer in a [`WINDOW`].
pub const MAX_PER_SOURCE: u32 = 64;
/// See [`MAX_PER_SOURCE`].
pub const WINDOW: Duration = Duration::from_secs(10);
/// The most peers whose claims are counted in a window; those of others are not heard.
pub const MAX_SOURCES: usize = 1024;
/// The most who wait for one check.
const MAX_WAITERS: usize = 64;

/// See the module.
pub struct CheckQueue<W> {
    waiting: BTreeMap<Peer, Claim<W>>,
    under_way: BTreeMap<Peer, Vec<W>>,
    /// Checks caused in this window, by whose claims they were.
    caused: BTreeMap<PeerId, u32>,
    window_began: Instant,
    /// Checks that may start now, and when that was last reckoned.
    allowance: f64,
    reckoned: Instant,
}

struct Claim<W> {
    node: Node,
    source: Option<PeerId>,
    waiters: Vec<W>,
}

impl<W> Default for CheckQueue<W> {
    fn default() -> CheckQueue<W> {
        CheckQueue {
            waiting: BTreeMap::new(),
            under_way: BTreeMap::new(),
            caused: BTreeMap::new(),
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
        if let Some(waiters) = self.under_way.get_mut(&node.peer) {
            if waiters.len() < MAX_WAITERS {
                waiters.extend(waiter);
            }
            return;
        }
        if !self.waiting.contains_key(&node.peer) {
            let waits = self.waiting.values();
            let from_source = waits.filter(|claim| claim.source == source).count();
            let has_room = match &source {
                // What this node itself needs to know has room of its own.
                None => from_source < MAX_WAITING,
                Some(peer) => {
                    from_source < MAX_PER_SOURCE as usize
                        && self.waiting.len() < MAX_WAITING
                        && self.may_ask(peer)
                }
            };
            if !has_room {
                return;
            }
        }
        let claim = self.waiting.entry(node.peer);
        let claim = claim.or_insert_with(|| Claim { node, source, waiters: Vec::new() });
        claim.node = node;
        if source.is_none() {
            claim.source = None;
        }
        if claim.waiters.len() < MAX_WAITERS {
            claim.waiters.extend(waiter);
        }
    }

    fn may_ask(&self, source: &PeerId) -> bool {
        match self.caused.get(source) {
            Some(caused) => *caused < MAX_PER_SOURCE,
            None => self.caused.len() < MAX_SOURCES,
        }
    }

    /// The next check to make now, which is under way from then on; `None` when nothing
    /// waits or nothing more may start yet.
    pub fn next(&mut self, now: Instant) -> Option<Node> {
        if now.since(self.window_began) >= WINDOW {
            self.window_began = now;
            self.caused.clear();
        }
        let earned = now.since(self.reckoned).as_secs_f64() * f64::from(CHECKS_PER_SEC);
        self.allowance = (self.allowance + earned).min(f64::from(MAX_BURST));
        self.reckoned = now;
        if self.under_way.len() >= MAX_UNDER_WAY || self.allowance < 1.0 {
            return None;
        }
        let rank = |claim: &Claim<W>| {
            claim.source.map(|peer| self.caused.get(&peer).copied().unwrap_or(0))
        };
        let next = self
            .waiting
            .iter()
            .filter(|(_, claim)| claim.source.is_none_or(|peer| self.may_ask(&peer)))
            .min_by_key(|(_, claim)| rank(claim))
            .map(|(peer, _)| *peer)?;
        let claim = self.waiting.remove(&next).expect("it was just found");
        self.allowance -= 1.0;
        if let Some(source) = claim.source {
            *self.caused.entry(source).or_default() += 1;
        }
        self.under_way.insert(next, claim.waiters);
        Some(claim.node)
    }

    /// The check of a card has ended; who waited for it.
    pub fn finished(&mut self, peer: &Peer) -> Vec<W> {
        self.under_way.remove(peer).unwrap_or_default()
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
    fn in_a_second(queue: &mut CheckQueue<()>, second: u64) -> Vec<Node> {
        let mut made = Vec::new();
        for tick in 0..100 {
            let now = START + Duration::from_millis(second * 1000 + tick * 10);
            while let Some(node) = queue.next(now) {
                queue.finished(&node.peer);
                made.push(node);
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
            made += in_a_second(&mut queue, second).len();
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
            made += in_a_second(&mut queue, second).len();
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
            in_a_second(&mut queue, second);
        }
        for n in 0..180 {
            queue.ask(node(2000 + n), Some(id(n % 3)), None);
        }
        queue.ask(node(7), Some(id(7)), None);
        assert_eq!(queue.next(START + Duration::from_secs(6)), Some(node(7)));
    }

    #[test]
    fn a_card_is_checked_once_at_a_time_for_all_who_wait() {
        let mut queue = CheckQueue::default();
        queue.ask(node(1), Some(id(9)), Some('a'));
        queue.ask(node(1), Some(id(8)), Some('b'));
        assert_eq!(queue.next(START), Some(node(1)));
        queue.ask(node(1), Some(id(8)), Some('c'));
        assert_eq!(queue.next(START), None);
        assert_eq!(queue.finished(&node(1).peer), vec!['a', 'b', 'c']);
        assert_eq!(queue.len(), 0);
    }
}
