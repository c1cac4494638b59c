use std::collections::VecDeque;

use atoll_key::PeerId;
use proptest::prelude::*;

use super::super::tests::founding;
use super::*;
use crate::messages::encode;

/// SimulatedVoters that are told everything at once, and what came of proposals.
struct SimulatedVoters {
    all: Vec<RaftVoter>,
    saved: Vec<DurableVotes>,
    /// From, to, what.
    under_way: VecDeque<(usize, usize, VoterMessage)>,
    ended: BTreeMap<u64, ProposalEnd>,
    away: Vec<usize>,
}

impl SimulatedVoters {
    fn new(members: u8) -> SimulatedVoters {
        let first = DurableVotes::first(&PoolMap::first(&founding(members)));
        let count = first.voters.keys.len();
        let all = (0..count).map(|own| RaftVoter::new(own, first.clone())).collect();
        let mut new = SimulatedVoters {
            all,
            saved: vec![first; count],
            under_way: VecDeque::new(),
            ended: BTreeMap::new(),
            away: Vec::new(),
        };
        for own in 0..count {
            let todo = new.all[own].begin();
            new.perform(own, todo);
        }
        new
    }

    fn perform(&mut self, own: usize, todo: Todo) {
        if let Some(votes) = todo.save {
            assert!(votes.is_sound(), "{votes:?}");
            self.saved[own] = votes;
        }
        self.under_way.extend(todo.send.into_iter().map(|(to, message)| (own, to, message)));
        self.ended.extend(todo.ended);
    }

    /// Until nothing is under way.
    fn deliver(&mut self) {
        while let Some((from, to, message)) = self.under_way.pop_front() {
            if self.away.contains(&from) || self.away.contains(&to) {
                continue;
            }
            assert!(message.is_sound(), "{message:?}");
            let todo = self.all[to].receive(from, message, false).expect("by the rules");
            self.perform(to, todo);
        }
    }

    fn time_is_up(&mut self, own: usize) {
        let todo = self.all[own].time_is_up();
        self.perform(own, todo);
        self.deliver();
    }

    fn propose(&mut self, own: usize, number: u64, map: Option<PoolMap>) {
        let todo = self.all[own].propose(number, map).expect("it leads");
        self.perform(own, todo);
        self.deliver();
    }

    fn restart(&mut self, own: usize) {
        self.all[own] = RaftVoter::new(own, self.saved[own].clone());
        let todo = self.all[own].begin();
        self.perform(own, todo);
    }
}

/// A map of this epoch with one member alone, in a pool of three.
fn map(epoch: u64, primary: u8) -> PoolMap {
    map_of(3, epoch, primary)
}

fn map_of(members: u8, epoch: u64, primary: u8) -> PoolMap {
    let primary = PeerId([primary; 32]);
    PoolMap { epoch, primary, members: [primary].into(), ..PoolMap::first(&founding(members)) }
}

#[test]
fn one_voter_decides_alone_at_once_without_a_timer() {
    let mut voter = RaftVoter::new(0, DurableVotes::first(&PoolMap::first(&founding(2))));
    let begun = voter.begin();
    assert!(begun.save.is_some() && begun.timer.is_none() && begun.send.is_empty());
    let todo = voter.propose(5, Some(map_of(2, 2, 2))).unwrap();
    assert_eq!(todo.ended, [(5, ProposalEnd::Decided(map_of(2, 2, 2)))]);
    assert!(todo.timer.is_none());
    let again = RaftVoter::new(0, todo.save.expect("it is durable first"));
    let mut again = again;
    let begun = again.begin();
    assert_eq!(again.map(), &map_of(2, 2, 2));
    assert!(begun.save.is_some());
}

#[test]
fn a_map_is_decided_only_if_it_follows_the_one_that_holds() {
    let mut voters = SimulatedVoters::new(3);
    voters.time_is_up(1);
    assert!(voters.all[1].is_leader());
    assert_eq!(voters.all[0].propose(1, None), Err(NotProposed::NotLeader));
    voters.propose(1, 1, Some(map(2, 2)));
    voters.propose(1, 2, Some(map(2, 3)));
    voters.propose(1, 3, Some(map(4, 3)));
    voters.propose(1, 4, None);
    voters.propose(1, 5, Some(map(3, 1)));
    let holds = |map| ProposalEnd::Decided(map);
    let expected = [map(2, 2), map(2, 2), map(2, 2), map(2, 2), map(3, 1)].map(holds);
    assert_eq!(voters.ended.into_values().collect::<Vec<_>>(), expected);
    assert!(voters.all.iter().all(|voter| voter.map() == &map(3, 1)), "followers learn at once");
}

#[test]
fn a_majority_goes_on_and_what_returns_learns_all_by_a_snapshot() {
    let mut voters = SimulatedVoters::new(5);
    voters.time_is_up(0);
    voters.away = vec![3, 4];
    for epoch in 2..100 {
        voters.propose(0, epoch, Some(map_of(5, epoch, 1)));
    }
    assert_eq!(voters.ended.len(), 98);
    voters.away = vec![0, 1];
    // Neither of those that were away can win.
    voters.time_is_up(3);
    assert!(!voters.all[3].is_leader());
    voters.time_is_up(2);
    assert!(voters.all[2].is_leader());
    assert!(voters.all[2..].iter().all(|voter| voter.map() == &map_of(5, 99, 1)));
    voters.propose(2, 200, Some(map_of(5, 100, 2)));
    voters.away = Vec::new();
    voters.time_is_up(2);
    assert!(!voters.all[0].is_leader());
    assert!(voters.all.iter().all(|voter| voter.map() == &map_of(5, 100, 2)));
}

#[test]
fn what_a_voter_must_not_forget_stays_small() {
    let mut voters = SimulatedVoters::new(16);
    let full = PoolMap::first(&founding(16));
    voters.time_is_up(0);
    for epoch in 2..1000 {
        voters.propose(0, epoch, Some(PoolMap { epoch, ..full.clone() }));
        let longest = voters.saved.iter().map(|saved| encode(saved).len()).max();
        assert!(longest <= Some(20 << 10), "{longest:?}");
    }
    // And if nothing is decided.
    voters.away = vec![1, 2, 3, 4];
    let refused = (1000..1100).find_map(|number| {
        let todo = voters.all[0].propose(number, Some(full.clone()));
        let refused = todo.clone().err();
        todo.into_iter().for_each(|todo| voters.perform(0, todo));
        refused
    });
    assert_eq!(refused, Some(NotProposed::TooMany));
    assert!(encode(&voters.saved[0]).len() <= 50 << 10);
}

#[test]
fn a_leader_that_lost_its_followers_says_that_a_proposal_is_lost() {
    let mut voters = SimulatedVoters::new(3);
    voters.time_is_up(0);
    voters.away = vec![0];
    voters.propose(0, 1, Some(map(2, 1)));
    assert!(voters.ended.is_empty());
    voters.time_is_up(1);
    voters.propose(1, 2, Some(map(2, 2)));
    voters.away = Vec::new();
    voters.time_is_up(1);
    assert_eq!(voters.ended[&1], ProposalEnd::Lost);
    assert_eq!(voters.ended[&2], ProposalEnd::Decided(map(2, 2)));
    assert_eq!(voters.all[0].map(), &map(2, 2));
}

#[test]
fn a_voter_gives_one_vote_a_term_also_over_a_restart() {
    let mut voters = SimulatedVoters::new(3);
    let call = VoterMessage::VoteCall { term: 5, last: LogPlace::default() };
    let granted = VoterMessage::VoteReply { term: 5, is_granted: true };
    let todo = voters.all[2].receive(0, call.clone(), false).unwrap();
    assert_eq!(todo.send, [(0, granted.clone())]);
    assert_eq!(todo.save.as_ref().map(|votes| (votes.term, votes.vote)), Some((5, Some(0))));
    voters.perform(2, todo);
    voters.restart(2);
    assert_eq!(voters.all[2].receive(1, call.clone(), false).unwrap().send, []);
    assert_eq!(voters.all[2].receive(0, call, false).unwrap().send, [(0, granted)]);
}

#[test]
fn a_voter_that_has_a_leader_ends_no_term_for_one_that_has_none() {
    let mut voters = SimulatedVoters::new(3);
    voters.time_is_up(0);
    let call = VoterMessage::VoteCall { term: 9, last: LogPlace { term: 9, index: 100 } };
    assert_eq!(voters.all[1].receive(2, call.clone(), true), Ok(Todo::default()));
    assert_eq!(voters.all[0].receive(2, call.clone(), false), Ok(Todo::default()));
    assert!(voters.all[0].is_leader());
    let todo = voters.all[1].receive(2, call, false).unwrap();
    assert_eq!(todo.send, [(2, VoterMessage::VoteReply { term: 9, is_granted: true })]);
}

#[test]
fn nothing_that_is_decided_is_taken_back_for_a_voter_that_breaks_the_rules() {
    let mut voters = SimulatedVoters::new(3);
    voters.time_is_up(0);
    voters.propose(0, 1, Some(map(2, 1)));
    let decided = voters.all[1].node.commit_index().get();
    let append = |base, items: &[LogItem]| VoterMessage::AppendCall {
        term: 7,
        decided: 100,
        base,
        items: items.to_vec().into(),
    };
    let other = LogPlace { term: 7, index: decided };
    assert_eq!(voters.all[1].receive(2, append(other, &[]), false), Err(NotByTheRules));
    let items = [LogItem::Began(7), LogItem::Change(map(2, 3))];
    let from_start = append(LogPlace::default(), &items);
    assert_eq!(voters.all[1].receive(2, from_start, false), Err(NotByTheRules));
    let snapshot = VoterMessage::Snapshot { term: 7, at: other, map: map(2, 3) };
    assert_eq!(voters.all[1].receive(2, snapshot, false), Err(NotByTheRules));
    let vote = VoterMessage::VoteReply { term: 7, is_granted: true };
    assert_eq!(voters.all[1].receive(1, vote.clone(), false), Err(NotByTheRules), "itself");
    assert_eq!(voters.all[1].receive(9, vote, false), Err(NotByTheRules), "nobody");
    assert_eq!(voters.all[1].map(), &map(2, 1));
    voters.time_is_up(0);
    assert!(voters.all[0].is_leader());
}

/// Few numbers, so that they meet, and some that are far too great.
fn number(below: u64) -> impl Strategy<Value = u64> {
    prop_oneof![40 => 0..below, 1 => Just((1 << 60) - 1), 1 => Just(1 << 60), 1 => Just(u64::MAX)]
}

fn place() -> impl Strategy<Value = LogPlace> {
    (number(6), number(20)).prop_map(|(term, index)| LogPlace { term, index })
}

fn some_map() -> impl Strategy<Value = PoolMap> {
    (number(6), 1..4u8).prop_map(|(epoch, primary)| map(epoch, primary))
}

fn item() -> impl Strategy<Value = LogItem> {
    prop_oneof![
        (number(6)).prop_map(LogItem::Began),
        some_map().prop_map(LogItem::Change),
        Just(LogItem::Asked),
    ]
}

fn message() -> impl Strategy<Value = VoterMessage> {
    prop_oneof![
        (number(6), place()).prop_map(|(term, last)| VoterMessage::VoteCall { term, last }),
        (number(6), any::<bool>())
            .prop_map(|(term, is_granted)| VoterMessage::VoteReply { term, is_granted }),
        (number(6), number(20), place(), proptest::collection::vec(item(), 0..12)).prop_map(
            |(term, decided, base, items)| {
                VoterMessage::AppendCall { term, decided, base, items: items.into() }
            }
        ),
        (number(6), place()).prop_map(|(term, last)| VoterMessage::AppendReply { term, last }),
        (number(6), place(), some_map()).prop_map(|(term, at, map)| VoterMessage::Snapshot {
            term,
            at,
            map
        }),
    ]
}

/// What happens to a voter that nobody treats by the rules.
#[derive(Clone, Debug)]
enum Blow {
    Message(usize, VoterMessage),
    TimeIsUp,
    Proposal(Option<PoolMap>),
    Restart,
}

fn blow() -> impl Strategy<Value = Blow> {
    prop_oneof![
        8 => (0..4usize, message()).prop_map(|(from, message)| Blow::Message(from, message)),
        2 => Just(Blow::TimeIsUp),
        2 => proptest::option::of(some_map()).prop_map(Blow::Proposal),
        1 => Just(Blow::Restart),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_message_makes_a_voter_panic_or_forget(blows in proptest::collection::vec(blow(), 1..60)) {
        let mut voters = SimulatedVoters::new(3);
        let mut known: BTreeMap<u64, PoolMap> = BTreeMap::new();
        let mut decided = 0;
        for (number, blow) in (0..).zip(blows) {
            let todo = match blow {
                Blow::Message(from, message) if message.is_sound() => {
                    voters.all[0].receive(from, message, false).ok()
                }
                Blow::Message(..) => None,
                Blow::TimeIsUp => Some(voters.all[0].time_is_up()),
                Blow::Proposal(map) => {
 let map = map.filter(|map| map.is_sound());
 voters.all[0].propose(number, map).ok()
}
                Blow::Restart => {
                    voters.restart(0);
                    (decided, known) = (0, BTreeMap::new());
                    None
                }
            };
            todo.into_iter().for_each(|todo| voters.perform(0, todo));
            let voter = &voters.all[0];
            prop_assert!(voter.applied >= decided);
            decided = voter.applied;
            let map = known.entry(voter.map.epoch).or_insert_with(|| voter.map.clone());
            prop_assert_eq!(&*map, &voter.map);
            voters.under_way.clear();
        }
    }
}
