//! One fault at the moment that matters.

use atoll_net::CallError;
use atoll_pool::addressed;
use atoll_pool::disk::simulated::DiskCall;
use atoll_pool::map::{AskError, PROPOSE, VOTER_MESSAGE, example_map_messages};

use super::*;

const SECOND: Duration = Duration::from_secs(1);

fn first(pool: &Pool) -> PoolMap {
    PoolMap::first(&pool.founding)
}

#[test]
fn a_dead_leaders_successor_is_there_soon() {
    let mut waits = Vec::new();
    for seed in 0..60 {
        let mut pool = Pool::new(seed, [3, 5][(seed % 2) as usize]);
        pool.await_leader();
        // At some moment between two heartbeats.
        pool.sim.run_for(Duration::from_millis(1000 + seed * 7 % 75));
        let leader = pool.await_leader();
        match seed % 4 {
            0 | 1 => pool.kill(leader, InFlight::Lost),
            _ => pool.lose_power(leader, Loss::Ordered, seed),
        }
        let died = pool.sim.now();
        pool.await_leader();
        let map = pool.map_after(&first(&pool), (leader + 1) % 3, &[]);
        let holds = pool.propose((leader + 1) % 3, &map, SECOND);
        assert_eq!(holds, Ok(map), "seed {seed}");
        waits.push(pool.sim.now().since(died));
    }
    waits.sort();
    println!("decided after {:?}, {:?}, {:?}", waits[0], waits[30], waits[59]);
    assert!(waits[59] <= Duration::from_millis(350), "{waits:?}");
}

#[test]
fn the_first_leader_is_there_soon_and_members_that_do_not_vote_propose_too() {
    let pool = Pool::new(1, 4);
    let began = pool.sim.now();
    assert_eq!(pool.ask(3, SECOND), Ok(first(&pool)));
    assert!(pool.sim.now().since(began) <= Duration::from_millis(350));
    let map = pool.map_after(&first(&pool), 3, &[0, 1]);
    assert_eq!(pool.propose(3, &map, SECOND), Ok(map.clone()));
    assert_eq!(pool.propose(3, &map, SECOND), Ok(map.clone()), "it may be proposed again");
    let other = pool.map_after(&first(&pool), 1, &[]);
    assert_eq!(pool.propose(1, &other, SECOND), Ok(map.clone()), "the other was first");
    assert_eq!(pool.ask(2, SECOND), Ok(map));
    let stranger = PoolMap { primary: atoll_key::PeerId([1; 32]), ..other };
    assert_eq!(pool.propose(1, &stranger, SECOND), Err(AskError::Unsound));
}

#[test]
fn a_voter_alone_decides_at_once_and_does_nothing_meanwhile() {
    let mut pool = Pool::new(2, 2);
    let map = pool.map_after(&first(&pool), 1, &[]);
    let began = pool.sim.now();
    assert_eq!(pool.propose(1, &map, SECOND), Ok(map.clone()));
    assert!(pool.sim.now().since(began) <= Duration::from_millis(30));
    pool.sim.run_for(SECOND);
    let idle = pool.sim.run_until_idle_or(LONG);
    assert_eq!(idle, atoll_sim::RunEnd::Idle, "nothing is planned");
    pool.lose_power(0, Loss::Ordered, 3);
    assert_eq!(pool.ask(1, SECOND), Err(AskError::NoAnswer));
    pool.restart(0).unwrap();
    assert_eq!(pool.ask(0, SECOND), Ok(map));
}

#[test]
fn a_minority_decides_nothing_and_a_majority_goes_on() {
    let mut pool = Pool::new(3, 5);
    let leader = pool.await_leader();
    let others: Vec<usize> = (0..5).filter(|at| *at != leader).collect();
    let minority = [pool.hosts[leader], pool.hosts[others[0]]];
    pool.sim.partition(&[&minority]);
    let lost = pool.map_after(&first(&pool), leader, &[]);
    assert_eq!(pool.propose(leader, &lost, SECOND), Err(AskError::NoAnswer));
    let map = pool.map_after(&first(&pool), others[1], &[]);
    assert_eq!(pool.propose(others[1], &map, SECOND), Ok(map.clone()));
    pool.sim.heal();
    assert_eq!(pool.propose(leader, &lost, SECOND), Ok(map.clone()));
    for at in &others[..3] {
        pool.kill(*at, InFlight::Lost);
    }
    assert_eq!(pool.ask(leader, SECOND), Err(AskError::NoAnswer));
}

#[test]
fn a_voter_that_is_heard_and_hears_nobody_does_not_end_terms() {
    let pool = Pool::new(4, 3);
    let leader = pool.await_leader();
    pool.sim.run_for(SECOND);
    let deaf = (leader + 1) % 3;
    let others: Vec<_> = (0..3).filter(|at| *at != deaf).map(|at| pool.hosts[at]).collect();
    pool.sim.cut(&others, &[pool.hosts[deaf]]);
    for _ in 0..500 {
        pool.sim.run_for(Duration::from_millis(10));
        assert_eq!(pool.leader(), Some(leader));
    }
    let map = pool.map_after(&first(&pool), leader, &[]);
    let began = pool.sim.now();
    assert_eq!(pool.propose(leader, &map, SECOND), Ok(map));
    assert!(pool.sim.now().since(began) <= Duration::from_millis(30));
}

#[test]
fn a_voter_whose_disk_failed_votes_no_more_until_it_is_opened_again() {
    for call in [DiskCall::Write, DiskCall::SyncFile] {
        let mut pool = Pool::new(5, 3);
        let leader = pool.await_leader();
        pool.sim.run_for(SECOND);
        pool.disks[leader].fail_next(call, Errno::EIO);
        let map = pool.map_after(&first(&pool), 1, &[]);
        assert_eq!(pool.propose(1, &map, SECOND), Ok(map.clone()), "the others go on");
        let failed = |pool: &Pool| {
            let voter = pool.seat(leader).voter().unwrap();
            (voter.failed(), voter.is_leader())
        };
        assert_eq!(failed(&pool), (Some(VoterError::Disk(Errno::EIO)), false));
        // With one more away no majority is left.
        let other = (leader + 1) % 3;
        pool.kill(other, InFlight::Lost);
        assert_eq!(pool.ask(leader, SECOND), Err(AskError::NoAnswer));
        pool.kill(leader, InFlight::Lost);
        pool.restart(leader).unwrap();
        assert_eq!(pool.ask(leader, SECOND), Ok(map));
    }
}

#[test]
fn a_disk_whose_votes_are_gone_is_refused() {
    let mut pool = Pool::new(6, 3);
    pool.await_leader();
    pool.kill(0, InFlight::Lost);
    let disk = pool.disks[0].reopen();
    let removed = async {
        let own = disk.node(&disk.top(), OWN_DIRECTORY.as_bytes()).await?;
        disk.unlink(&own, b"votes-1").await
    };
    pool.sim.block_on(LONG, removed).unwrap().unwrap();
    drop(disk);
    assert_eq!(pool.restart(0), Err(VoterError::Missing));
    assert_eq!(pool.ask(1, SECOND), Ok(first(&pool)), "the others go on");
}

#[test]
fn an_idle_pool_sends_heartbeats_and_nothing_else() {
    let pool = Pool::new(7, 3);
    pool.await_leader();
    pool.sim.run_for(SECOND);
    let before = pool.sim.stats();
    pool.sim.run_for(10 * SECOND);
    let after = pool.sim.stats();
    // To two followers, each 75 ms, their answers, and the network's own answers to both.
    let sent = after.sent_count - before.sent_count;
    assert!((800..=1120).contains(&sent), "{sent}");
    let polls = after.poll_count - before.poll_count;
    assert!(polls <= 4 * sent, "{polls}");
}

#[test]
fn strangers_and_hostile_bytes_are_refused_and_change_nothing() {
    let pool = Pool::new(8, 4);
    pool.await_leader();
    let stranger = pool.sim.add_host(HostConfig::default());
    let call = |from: HostId, to: usize, method, header: &[u8]| {
        let request = Request { method, header: addressed(&POOL, header), parts: Vec::new() };
        let call = pool.sim.transport(from).call(pool.sim.peer(pool.hosts[to]), request, SECOND);
        pool.sim.block_on(LONG, call).unwrap()
    };
    let code = |answer: Result<Reply, CallError>| match answer {
        Err(CallError::Refused(refusal)) => refusal.code,
        other => panic!("{other:?}"),
    };
    let examples = example_map_messages();
    for bytes in &examples {
        for method in [VOTER_MESSAGE, PROPOSE] {
            assert_eq!(code(call(stranger, 0, method, bytes)), 104, "a stranger");
        }
        // The fourth member does not vote.
        assert_eq!(code(call(pool.hosts[3], 0, VOTER_MESSAGE, bytes)), 104);
        // And a voter does not send such maps, nor to itself.
        for len in 0..bytes.len() {
            for (from, method) in [(1, VOTER_MESSAGE), (3, PROPOSE)] {
                let answer = call(pool.hosts[from], 0, method, &bytes[..len]);
                assert_eq!(code(answer), Refusal::MALFORMED);
            }
        }
    }
    let long = vec![0; 65 << 10];
    assert_eq!(code(call(pool.hosts[1], 0, VOTER_MESSAGE, &long)), Refusal::MALFORMED);
    assert_eq!(pool.ask(3, SECOND), Ok(first(&pool)));
}

/// Everybody does what maps want.
fn follow_all(pool: &Pool) {
    (0..pool.hosts.len()).for_each(|at| pool.follow(at));
}

#[test]
fn other_voters_go_on_when_those_before_are_gone() {
    let mut pool = Pool::new(10, 6);
    follow_all(&pool);
    let five = pool.ask(5, SECOND).unwrap();
    let three = pool.with_voters(&five, &[3, 4, 5]);
    assert_eq!(pool.propose(5, &three, SECOND), Ok(three.clone()));
    pool.sim.run_for(SECOND);
    for at in 0..3 {
        pool.lose_power(at, Loss::Ordered, 1);
    }
    let map = pool.map_after(&three, 4, &[5]);
    assert_eq!(pool.propose(4, &map, SECOND), Ok(map.clone()));
    // One that was away knows those before alone.
    pool.restart(1).unwrap();
    pool.follow(1);
    assert_eq!(pool.ask(1, SECOND), Ok(map.clone()));
    let one = pool.with_voters(&map, &[0]);
    pool.restart(0).unwrap();
    pool.follow(0);
    assert_eq!(pool.propose(1, &one, SECOND), Ok(one.clone()));
    pool.sim.run_for(SECOND);
    for at in 1..6 {
        pool.kill(at, InFlight::Lost);
    }
    assert_eq!(pool.ask(0, SECOND), Ok(one));
}

/// The voters that stay are told by the one that moved on, though it leads nobody yet.
#[test]
fn a_leader_that_dies_when_it_has_decided_who_votes_next_leaves_enough_behind() {
    for seed in 0..40 {
        let mut pool = Pool::new(seed, 4);
        let leader = pool.await_leader();
        follow_all(&pool);
        let [next, last] = [(leader + 1) % 3, (leader + 2) % 3];
        let first = first(&pool);
        let map = pool.with_voters(&first, &[next, last, 3]);
        // It hears nothing of the decision.
        pool.sim.partition(&[&[pool.hosts[leader], pool.hosts[next]]]);
        // It is decided, but the next voters are no majority there.
        assert_eq!(pool.propose(leader, &map, SECOND), Err(AskError::NoAnswer), "seed {seed}");
        assert_eq!(pool.seat(leader).map(), map, "seed {seed}");
        pool.sim.run_for(Duration::from_millis(seed * 3));
        pool.kill(leader, InFlight::Lost);
        pool.sim.heal();
        let later = pool.map_after(&map, last, &[next]);
        assert_eq!(pool.propose(last, &later, 2 * SECOND), Ok(later), "seed {seed}");
    }
}

#[test]
fn a_voter_of_a_former_generation_decides_nothing_more() {
    let mut pool = Pool::new(11, 4);
    let leader = pool.await_leader();
    follow_all(&pool);
    let first = first(&pool);
    let [next, last] = [(leader + 1) % 3, (leader + 2) % 3];
    // One stays behind, and comes back when the others know no generation but theirs.
    pool.kill(last, InFlight::Lost);
    let map = pool.with_voters(&first, &[next, leader, 3]);
    assert_eq!(pool.propose(leader, &map, SECOND), Ok(map.clone()));
    pool.sim.run_for(SECOND);
    pool.restart(last).unwrap();
    pool.follow(last);
    let stale = pool.map_after(&first, last, &[]);
    assert_eq!(pool.propose(last, &stale, SECOND), Ok(map.clone()));
    assert_eq!(pool.seat(last).map(), map);
    for at in [leader, next] {
        pool.kill(at, InFlight::Lost);
    }
    let later = pool.map_after(&map, 3, &[]);
    assert_eq!(pool.propose(last, &later, SECOND), Err(AskError::NoAnswer));
}
