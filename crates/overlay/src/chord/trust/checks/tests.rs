//! Tests of [`super`].

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use super::*;
use crate::VirtualServerId;

fn id(n: u16) -> PeerId {
    let mut id = [0; 32];
    id[..2].copy_from_slice(&n.to_be_bytes());
    PeerId(id)
}

fn node(n: u16) -> Node {
    Node::of(Peer { id: id(n), addr: SocketAddr::from((Ipv4Addr::LOCALHOST, n)) })
}

/// A peer that was checked, at an address of its own.
fn known(n: u16) -> Origin {
    Origin::Known(id(n), IpAddr::from([10, 0, (n >> 8) as u8, n as u8]))
}

const START: Instant = Instant(1_000_000_000_000);

/// Makes all checks that may start within a second, each ending at once.
fn in_a_second(queue: &mut CheckQueue<()>, second: u64, is_refuted: bool) -> usize {
    let mut made = 0;
    for tick in 0..100 {
        let now = START + Duration::from_millis(second * 1000 + tick * 10);
        while let Some(peer) = queue.next(now) {
            queue.finished(&peer, is_refuted);
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
            queue.ask(node(1000 + n), known(n % 50), None);
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
            queue.ask(node(1000 + n), known(1), None);
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
            queue.ask(node(1000 + n), known(n % 3), None);
        }
        in_a_second(&mut queue, second, false);
    }
    for n in 0..180 {
        queue.ask(node(2000 + n), known(n % 3), None);
    }
    queue.ask(node(7), known(7), None);
    assert_eq!(queue.next(START + Duration::from_secs(6)), Some(node(7).peer));
}

#[test]
fn a_peer_address_is_checked_once_at_a_time_for_all_waiting_callers() {
    let mut queue = CheckQueue::default();
    queue.ask(node(1), known(9), Some('a'));
    queue.ask(node(1), known(8), Some('b'));
    assert_eq!(queue.next(START), Some(node(1).peer));
    queue.ask(node(1), known(8), Some('c'));
    assert_eq!(queue.next(START), None);
    assert_eq!(queue.finished(&node(1).peer, false).unwrap().waiters, vec!['a', 'b', 'c']);
    assert_eq!(queue.len(), 0);
}

/// The index named last used to replace the others: a liar that named a false one of a
/// newcomer kept it out, for only that one was asked about.
#[test]
fn a_false_index_does_not_displace_the_true_one() {
    let mut queue = CheckQueue::<()>::default();
    let at =
        |index| Node::at(node(1).peer, VirtualServerId { index, ..VirtualServerId::default() });
    queue.ask(at(0), known(1), None);
    queue.ask(at(77), known(9), None);
    assert_eq!(queue.next(START), Some(node(1).peer));
    queue.ask(at(3), known(9), None);
    let claim = queue.finished(&node(1).peer, false).unwrap();
    assert_eq!(claim.indices, BTreeSet::from([0, 3, 77]));
}

#[test]
fn a_claim_that_a_flooder_makes_too_waits_no_longer_for_that() {
    let mut queue = CheckQueue::<()>::default();
    for n in 0..40 {
        queue.ask(node(1000 + n), known(1), None);
    }
    in_a_second(&mut queue, 0, false);
    for n in 0..40 {
        queue.ask(node(2000 + n), known(1), None);
    }
    queue.ask(node(3000), known(1), None);
    queue.ask(node(3000), known(3000), None);
    assert_eq!(queue.next(START + Duration::from_secs(2)), Some(node(3000).peer));
}

#[test]
fn addresses_that_never_answer_leave_room_for_others_and_for_this_node() {
    let mut queue = CheckQueue::<()>::default();
    let started = |queue: &mut CheckQueue<()>| std::iter::from_fn(|| queue.next(START)).count();
    for n in 0..60 {
        queue.ask(node(1000 + n), known(1), None);
    }
    assert_eq!(started(&mut queue), MAX_UNDER_WAY_OF_ONE);
    for n in 0..60 {
        queue.ask(node(2000 + n), known(100 + n), None);
    }
    assert_eq!(started(&mut queue), MAX_UNDER_WAY - KEPT_FOR_OWN - MAX_UNDER_WAY_OF_ONE);
    queue.ask(node(1), Origin::Own, None);
    assert_eq!(started(&mut queue), 1);
}

#[test]
fn an_address_with_many_refuted_claims_is_dialled_no_more() {
    let mut queue = CheckQueue::<()>::default();
    let (mut made, mut key) = (0, 1000);
    for second in 0..9 {
        for source in 0..50 {
            key += 1;
            queue.ask(node(key), known(source), None);
        }
        made += in_a_second(&mut queue, second, true);
    }
    assert_eq!(made, MAX_REFUTED_NAMED as usize);
    // A node there that calls itself is accepted all the same, and so are own questions.
    queue.ask(node(7), known(7), None);
    queue.ask(node(8), Origin::Own, None);
    assert_eq!(in_a_second(&mut queue, 9, false), 2);
}

/// Each of many keys has caused little; their address has caused much.
#[test]
fn a_peer_with_many_keys_at_one_address_is_served_last() {
    let mut queue = CheckQueue::<()>::default();
    let at_one = |n: u16| Origin::Known(id(n), IpAddr::from([10, 9, 9, 9]));
    for n in 0..250 {
        queue.ask(node(1000 + n), at_one(n), None);
    }
    in_a_second(&mut queue, 0, false);
    for n in 0..500 {
        queue.ask(node(2000 + n), at_one(3000 + n), None);
        assert!(queue.len() <= MAX_WAITING);
    }
    // The queue is full of them, and yet there is room, in the place of one of theirs.
    queue.ask(node(9000), known(7), None);
    queue.ask(node(9001), known(7), None);
    assert_eq!(queue.len(), MAX_WAITING);
    let now = START + Duration::from_secs(2);
    assert_eq!([queue.next(now), queue.next(now)], [9000, 9001].map(|n| Some(node(n).peer)));
}

#[test]
fn strangers_cause_half_of_all_checks_at_most_and_known_peers_the_rest() {
    let mut queue = CheckQueue::<()>::default();
    let (mut of_strangers, mut of_known) = (0, 0);
    for tick in 0..900u16 {
        for n in 0..4 {
            let n = tick * 4 + n;
            queue.ask(node(10_000 + n), Origin::Stranger(id(10_000 + n)), None);
        }
        // As many as may be checked in all.
        if tick % 3 == 0 {
            queue.ask(node(tick), known(tick % 50), None);
        }
        let now = START + Duration::from_millis(u64::from(tick) * 10);
        while let Some(peer) = queue.next(now) {
            let is_stranger = peer.id >= id(10_000);
            *(if is_stranger { &mut of_strangers } else { &mut of_known }) += 1;
            queue.finished(&peer, false);
        }
    }
    assert_eq!(of_strangers, MAX_FOR_STRANGERS);
    assert!(of_known > 230, "{of_known} of 300");
}

#[test]
fn strangers_that_take_calls_and_never_answer_leave_room_for_known_peers() {
    let mut queue = CheckQueue::<()>::default();
    for n in 0..500 {
        queue.ask(node(1000 + n), Origin::Stranger(id(1000 + n)), None);
    }
    assert_eq!(queue.len(), MAX_STRANGERS_WAITING);
    let started = std::iter::from_fn(|| queue.next(START)).count();
    assert_eq!(started, MAX_UNDER_WAY_FOR_STRANGERS);
    queue.ask(node(7), known(7), None);
    assert_eq!(queue.next(START), Some(node(7).peer));
}
