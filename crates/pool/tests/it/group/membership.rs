//! Members that come and go, while clients work.

use std::collections::BTreeSet;

use super::failover::{read_file, stall, write_file};
use super::*;
use crate::workload::{Dice, for_each_seed};

impl Group {
    /// Those that have everything, as the primary knows.
    fn complete(&self) -> BTreeSet<usize> {
        let primary = self.primary().expect("there is a primary");
        let members = self.status(primary).members;
        let at = |peer| self.hosts.iter().position(|host| self.sim.peer(*host).id == peer);
        members.iter().filter(|one| one.is_member).filter_map(|one| at(one.peer.id)).collect()
    }

    fn map(&self) -> PoolMap {
        self.some().map()
    }

    fn voters(&self) -> BTreeSet<usize> {
        let map = self.map();
        let is_voter = |at: &usize| map.voters.keys.contains(&self.sim.peer(self.hosts[*at]).id);
        (0..self.hosts.len()).filter(is_voter).collect()
    }

    /// Makes a file through a member's machine.
    fn write_at(&self, at: usize, name: &str, text: &str) {
        let fs = self.mount(at);
        self.sim.block_on(LONG, write_file(&*fs, name, text)).unwrap();
    }

    fn read_at(&self, at: usize, name: &str) -> String {
        let fs = self.mount(at);
        self.sim.block_on(LONG, read_file(&*fs, name)).unwrap()
    }
}

#[test]
fn a_pool_grows_from_one_member_to_five_and_survives_the_loss_of_two_at_once() {
    let mut group = Group::of(1, 1, 1);
    group.write_at(0, "alone", "made by the first");
    let mut voters = vec![group.voters().len()];
    for count in 2..=5 {
        let at = group.join(0).unwrap();
        group.write_at(at, &format!("by {at}"), "made at once");
        group.await_quiet().unwrap();
        // Voters come when they have everything.
        group.run_for(Duration::from_secs(2));
        assert_eq!(group.complete().len(), count);
        voters.push(group.voters().len());
    }
    assert_eq!(voters, [1, 1, 3, 3, 5]);
    group.settle_and_compare().unwrap();
    let primary = group.primary().unwrap();
    let other = (primary + 1) % 5;
    let third = (primary + 2) % 5;
    group.kill(primary, InFlight::Lost);
    group.kill(other, InFlight::Lost);
    let fs = group.mount(third);
    let (text, took) = stall(&group, read_file(&*fs, "alone"));
    assert_eq!(text, "made by the first");
    assert!(took < Duration::from_secs(2), "{took:?}");
    group.restart(primary);
    group.restart(other);
    group.settle_and_compare().unwrap();
}

#[test]
fn members_go_one_after_the_other_until_one_is_left_the_primary_too() {
    for seed in 0..6 {
        let mut group = Group::of(5, seed, 1);
        group.write_at(0, "first", "kept");
        let mut dice = Dice(seed);
        while group.all().len() > 1 {
            let all = group.all();
            let gone = match dice.below(2) {
                0 => group.primary().unwrap(),
                _ => all[dice.below(all.len() as u64) as usize],
            };
            let via = all[dice.below(all.len() as u64) as usize];
            group.remove(via, gone).unwrap_or_else(|why| panic!("seed {seed}: {gone}: {why}"));
            group.await_quiet().unwrap();
            let stays = group.all();
            assert!(!stays.contains(&gone) && stays.len() == all.len() - 1);
            group.write_at(stays[0], &format!("without {gone}"), "written");
            // It is told, takes no part, and answers nobody.
            group.run_for(Duration::from_secs(3));
            let own = group.members()[gone].take();
            if let Some(own) = own {
                let problem = own.status().members[0].problem.clone();
                assert!(problem.is_some(), "seed {seed}");
            }
        }
        let last = group.all()[0];
        let why = group.remove(last, last).unwrap_err();
        assert!(why.contains("no other member has everything"), "{why}");
        assert_eq!(group.read_at(last, "first"), "kept");
        group.settle_and_compare().unwrap();
    }
}

#[test]
fn a_dead_member_is_removed_and_joins_again_with_an_empty_disk() {
    let mut group = Group::of(3, 4, 1);
    let [_, dead, via] = group.roles();
    group.write_at(via, "one", "before");
    group.lose_power(dead, Loss::Ordered, 1);
    group.run_for(Duration::from_secs(2));
    group.remove(via, dead).unwrap();
    group.write_at(via, "two", "meanwhile");
    assert_eq!(group.all().len(), 2);
    // Of two members one votes, and of three again three.
    assert_eq!(group.voters().len(), 1);
    group.sim.restart(group.hosts[dead]);
    group.disks[dead] = SimulatedDisk::new(group.sim.outside());
    group.join_as(via, dead).unwrap();
    group.await_quiet().unwrap();
    group.run_for(Duration::from_secs(2));
    assert_eq!(group.voters().len(), 3);
    assert_eq!(group.read_at(dead, "two"), "meanwhile");
    group.settle_and_compare().unwrap();
    // It counts: the others may go.
    for at in group.all() {
        if at != dead {
            group.remove(dead, at).unwrap();
        }
    }
    assert_eq!(group.read_at(dead, "one"), "before");
}

/// A former voter that comes back with its old disk knows a generation that ended, and changes nothing.
#[test]
fn a_removed_member_that_was_away_finds_out() {
    let mut group = Group::of(4, 5, 1);
    let [primary, gone, _] = group.roles();
    group.kill(gone, InFlight::Lost);
    group.run_for(Duration::from_secs(1));
    group.remove(primary, gone).unwrap();
    group.write_at(primary, "file", "without it");
    group.sim.restart(group.hosts[gone]);
    group.disks[gone] = group.disks[gone].reopen();
    group.start(gone).unwrap();
    group.run_for(Duration::from_secs(10));
    let problem = group.status(gone).members[0].problem.clone().unwrap();
    assert_eq!(problem, "the pool knows this member no more");
    group.settle_and_compare().unwrap();
}

/// Who votes next is there: otherwise a machine that is dead would have the only vote.
#[test]
fn a_member_that_leaves_while_the_first_is_away_leaves_a_pool_that_goes_on() {
    for (founding, away) in [(3, 1), (5, 2)] {
        for seed in 0..4 {
            let mut group = Group::of(founding, seed, 1);
            (0..away).for_each(|at| group.kill(at, InFlight::Lost));
            group.run_for(Duration::from_secs(2));
            let gone = match seed % 2 {
                0 => group.primary().unwrap(),
                _ => (away..founding).find(|at| Some(*at) != group.primary()).unwrap(),
            };
            let via = (away..founding).find(|at| *at != gone).unwrap();
            group.remove(via, gone).unwrap_or_else(|why| panic!("{founding}, seed {seed}: {why}"));
            group.write_at(via, "file", "without them");
            (0..away).for_each(|at| group.restart(at));
            group.settle_and_compare().unwrap();
        }
    }
}

/// The founder of a pool of two leaves, and loses power as soon as somebody knows of it.
#[test]
fn the_only_voter_that_leaves_is_not_the_only_one_that_knows() {
    for seed in 0..30 {
        let mut group = Group::of(2, seed, 1);
        let voter = *group.voters().iter().next().unwrap();
        let other = 1 - voter;
        if group.primary() == Some(voter) {
            // The other one leads, as when the founder has handed its part over.
            group.kill(voter, InFlight::Lost);
            group.restart(voter);
            group.run_for(Duration::from_secs(2));
        }
        let id = group.sim.peer(group.hosts[voter]).id;
        let member = group.members()[other].clone().unwrap();
        group.sim.env(group.hosts[other]).spawn(Box::pin(async move {
            let _ = member.remove(id, EDIT_LIMIT).await;
        }));
        group.sim.run_for(Duration::from_millis(seed * 3));
        let knows = group.members()[voter].as_ref().is_none_or(|one| {
            let map = one.map();
            !map.voters.keys.contains(&id) || !map.enrolled.contains(id)
        });
        if !knows {
            continue;
        }
        group.lose_power(voter, Loss::Ordered, seed);
        // It comes back, or not: whoever it told goes on, and otherwise it says what it has decided.
        group.run_for(Duration::from_secs(1));
        group.sim.restart(group.hosts[voter]);
        group.disks[voter] = group.disks[voter].reopen();
        match group.start(voter) {
            Ok(()) => {}
            Err(OpenError::NotAMember) => group.left.push(voter),
            Err(error) => panic!("seed {seed}: {error}"),
        }
        group.run_for(Duration::from_secs(15));
        group.write_at(other, "file", "it goes on");
    }
}

/// POOL: "a dead voter is replaced" after ten minutes, and its vote is not counted any more.
#[test]
fn a_voter_that_is_dead_for_ten_minutes_is_replaced() {
    let mut group = Group::of(4, 7, 1);
    let before = group.voters();
    let primary = group.primary().unwrap();
    let dead = *before.iter().find(|at| **at != primary).unwrap();
    group.kill(dead, InFlight::Lost);
    group.run_for(Duration::from_secs(590));
    assert_eq!(group.voters(), before, "it may still come back");
    group.run_for(Duration::from_secs(20));
    let after = group.voters();
    assert!(!after.contains(&dead) && after.len() == 3, "{after:?}");
    // One more may die now.
    let other = *after.iter().find(|at| **at != primary).unwrap();
    group.kill(other, InFlight::Lost);
    group.run_for(Duration::from_secs(2));
    let via = group.all().into_iter().find(|at| group.is_up(*at)).unwrap();
    group.write_at(via, "file", "two of four are dead");
    // It finds out that it votes no more.
    group.restart(dead);
    group.restart(other);
    group.settle_and_compare().unwrap();
    assert_eq!(group.voters(), after);
}

/// A full disk, and a vote: it goes on as a member, and votes when there is room.
#[test]
fn a_member_whose_disk_is_full_is_no_voter_and_stays_a_member() {
    let mut group = Group::of(4, 8, 1);
    let primary = group.primary().unwrap();
    let full = (0..4).find(|at| !group.voters().contains(at)).unwrap();
    group.write_at(primary, "file", "text");
    group.await_quiet().unwrap();
    group.disks[full].set_capacity(0, 0);
    let gone = group.voters().into_iter().find(|at| *at != primary).unwrap();
    group.remove(primary, gone).unwrap();
    assert!(group.voters().contains(&full));
    group.run_for(Duration::from_secs(5));
    assert_eq!(group.failed, [""; 0], "it takes part");
    assert!(group.complete().contains(&full));
    group.disks[full].set_capacity(1 << 34, 1 << 20);
    group.run_for(Duration::from_secs(5));
    // Its vote counts by now.
    let other = group.voters().into_iter().find(|at| *at != primary && *at != full).unwrap();
    group.kill(other, InFlight::Lost);
    group.write_at(primary, "another", "decided by two");
    group.restart(other);
    group.settle_and_compare().unwrap();
}

/// The primary and others die while members come and go.
#[test]
fn members_come_and_go_while_others_die() {
    for_each_seed(6, |seed| {
        let mut group = Group::of(1 + (seed % 5) as usize, seed, (seed % 3) as u8);
        let mut dice = Dice(seed);
        let mut written = Vec::new();
        for round in 0..8 {
            let all = group.all();
            let some = |dice: &mut Dice| all[dice.below(all.len() as u64) as usize];
            let via = some(&mut dice);
            let name = format!("file {round}");
            group.write_at(via, &name, &name);
            written.push(name);
            match dice.below(3) {
                0 if all.len() > 2 => {
                    let gone = some(&mut dice);
                    group.remove(via, gone)?;
                }
                _ if all.len() < 7 => {
                    group.join(via)?;
                }
                _ => {}
            }
            let pause = dice.below(600);
            group.run_for(Duration::from_millis(pause));
            // One alone has nobody who could go on, and of two one votes.
            let all = group.all();
            let victim = all[dice.below(all.len() as u64) as usize];
            if group.is_up(victim) {
                match dice.below(3) {
                    0 => group.kill(victim, InFlight::Late),
                    1 => group.lose_power(victim, Loss::Ordered, seed),
                    _ => continue,
                }
                let pause = dice.below(1500);
                group.run_for(Duration::from_millis(pause));
                group.restart(victim);
            }
            if dice.below(2) == 0 {
                group.await_quiet()?;
            }
        }
        group.settle_and_compare()?;
        let at = group.all()[0];
        for name in written {
            assert_eq!(group.read_at(at, &name), name, "seed {seed}");
        }
        Ok(())
    });
}
