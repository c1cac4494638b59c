//! Machines that have no files: they vote in every group that needs it, mount the pool, and get no files.

use super::*;
use crate::workload::{ROOT, me, read_file_in, write_file_in};

/// The groups in which a machine without files votes.
fn votes_in(pool: &Pool, at: usize) -> BTreeSet<GroupNumber> {
    let machine = pool.machine(at);
    machine.and_then(|machine| machine.status().voting).unwrap_or_default().votes_in
}

#[track_caller]
pub(super) fn until(pool: &Pool, what: &str, holds: impl Fn(&Pool) -> bool) {
    let until = pool.sim.now() + QUIET_WITHIN;
    while !holds(pool) {
        assert!(pool.sim.now() < until, "{what}");
        pool.run_for(Duration::from_millis(250));
    }
}

pub(super) fn block_on<T>(pool: &Pool, work: impl Future<Output = T>) -> T {
    pool.sim.block_on(LONG, work).unwrap()
}

/// Two machines with files, and one without.
pub(super) fn pair(seed: u64) -> Pool {
    let pool = Pool::new(3, seed);
    pool.join(0, 1).unwrap();
    pool.join_without_files(0, 2);
    until(&pool, "it votes", |pool| !votes_in(pool, 2).is_empty());
    pool.settle();
    pool
}

#[test]
fn a_machine_without_files_votes_and_mounts_and_gets_no_files() {
    let pool = pair(1);
    let _ends = ShutDown(pool.sim.clone());
    assert_eq!(pool.members_of(GroupNumber::FIRST), [0, 1].into(), "there are to be three copies");
    let fs = block_on(&pool, pool.mount(2));
    block_on(&pool, write_file_in(&*fs, ROOT, "file", "made without files"));
    pool.kill(0, InFlight::Lost);
    assert_eq!(block_on(&pool, read_file_in(&*fs, ROOT, "file")), "made without files");
    pool.restart(0);
    pool.settle();
    pool.kill(1, InFlight::Lost);
    assert_eq!(block_on(&pool, read_file_in(&*fs, ROOT, "file")), "made without files");
    pool.restart(1);
    pool.compare().unwrap();
}

#[test]
fn a_machine_without_files_votes_in_all_groups_that_need_it() {
    let pool = Pool::with_copies(5, 2, 2, 4);
    let _ends = ShutDown(pool.sim.clone());
    pool.join_without_files(3, 4);
    let groups = pool.groups();
    assert!(groups.len() > 1, "{groups:?}");
    until(&pool, "it votes", |pool| {
        let even = pool.groups().into_iter().filter(|group| pool.members_of(*group).len() % 2 == 0);
        votes_in(pool, 4).is_superset(&even.collect())
    });
    for group in groups {
        assert!(!pool.members_of(group).contains(&4), "it has no files");
        let stands = pool.stands(group).unwrap();
        assert!(stands.voters.len() >= 3, "{stands:?}");
    }
    let fs = block_on(&pool, pool.mount(4));
    block_on(&pool, async {
        for number in 0..8 {
            let name = format!("directory {number}");
            let made = fs.mkdir(me(), ROOT, name.as_bytes(), 0o755).await.unwrap();
            write_file_in(&*fs, made.attr.inode, "file", "made").await;
        }
    });
    // Any machine may die.
    for at in 0..4 {
        pool.kill(at, InFlight::Lost);
        block_on(&pool, async {
            for number in 0..8 {
                let name = format!("directory {number}");
                let found = fs.lookup(me(), ROOT, name.as_bytes()).await.unwrap();
                assert_eq!(read_file_in(&*fs, found.attr.inode, "file").await, "made");
            }
        });
        pool.restart(at);
        pool.settle();
    }
    pool.compare().unwrap();
}

/// POOL: what forgets rejoins as new (same key, new incarnation).
#[test]
fn a_machine_whose_votes_were_set_back_or_are_gone_is_listed_anew_by_itself() {
    for is_emptied in [false, true] {
        let pool = pair(3);
        let _ends = ShutDown(pool.sim.clone());
        let (disks, incarnation) = {
            let hosts = pool.hosts();
            let kept = hosts[2].disks.kept();
            let old = kept.votes[&GroupNumber::FIRST].snapshot();
            let incarnation = kept.incarnation;
            drop(kept);
            ((hosts[2].disks.clone(), old), incarnation)
        };
        // Maps are decided with its vote.
        pool.set_copies(0, 4).unwrap();
        pool.set_copies(0, 3).unwrap();
        pool.run_for(Duration::from_secs(2));
        pool.kill(2, InFlight::Lost);
        {
            let (disks, old) = &disks;
            let mut kept = disks.kept();
            match is_emptied {
                true => drop(std::mem::take(&mut kept.votes)),
                false => kept.votes[&GroupNumber::FIRST].rollback(old),
            }
        }
        pool.restart(2);
        let is_other = |pool: &Pool| {
            let now = pool.hosts()[2].disks.kept().incarnation;
            let listed = pool.first().witnesses.get(pool.peer(2).id);
            now > incarnation && listed.map(|one| one.incarnation) == now
        };
        until(&pool, "it is listed anew", is_other);
        until(&pool, "it votes again", |pool| !votes_in(pool, 2).is_empty());
        let fs = block_on(&pool, pool.mount(2));
        pool.kill(0, InFlight::Lost);
        block_on(&pool, write_file_in(&*fs, ROOT, "file", "made by one"));
        pool.restart(0);
        pool.compare().unwrap();
    }
}

#[test]
fn a_machine_without_files_that_is_removed_votes_no_more_and_does_not_come_back_by_itself() {
    let pool = pair(4);
    let _ends = ShutDown(pool.sim.clone());
    pool.remove(0, 2).unwrap();
    pool.run_for(Duration::from_secs(10));
    let first = pool.first();
    assert!(first.witnesses.all().is_empty());
    assert_eq!(first.voters.keys.len(), 1);
    assert!(pool.status(2).is_removed);
    pool.compare().unwrap();
}

/// It took the primary for a stranger, which never told it a map then.
#[test]
fn a_machine_without_files_that_was_away_votes_also_if_the_primary_joined_meanwhile() {
    let pool = Pool::new(4, 6);
    let _ends = ShutDown(pool.sim.clone());
    pool.join(0, 1).unwrap();
    pool.join_without_files(0, 2);
    until(&pool, "it votes", |pool| !votes_in(pool, 2).is_empty());
    pool.settle();
    pool.kill(2, InFlight::Lost);
    pool.join(0, 3).unwrap();
    pool.settle();
    let newest = pool.peer(3).id;
    let primary = |pool: &Pool| pool.stands(GroupNumber::FIRST).map(|stands| stands.primary.id);
    for _ in 0..10 {
        let at = (0..4).find(|at| primary(&pool) == Some(pool.peer(*at).id));
        let Some(at) = at.filter(|_| primary(&pool) != Some(newest)) else { break };
        pool.kill(at, InFlight::Lost);
        until(&pool, "another primary", |pool| {
            primary(pool).is_some_and(|id| id != pool.peer(at).id)
        });
        pool.restart(at);
        pool.settle();
    }
    assert_eq!(primary(&pool), Some(newest));
    pool.restart(2);
    until(&pool, "it answers", |pool| {
        let stands = pool.stands(GroupNumber::FIRST);
        stands.is_some_and(|stands| {
            stands.witnesses.len() == 1
                && stands.witnesses.iter().all(|one| one.problem.is_none())
                && stands.primary.id == newest
        })
    });
    pool.remove(3, 0).unwrap();
    until(&pool, "it votes again", |pool| !votes_in(pool, 2).is_empty());
}

#[test]
fn a_machine_without_files_is_not_taken_up_with_files_before_it_has_left() {
    let pool = pair(7);
    let _ends = ShutDown(pool.sim.clone());
    let refused = pool.join(0, 2).unwrap_err().to_string();
    assert!(refused.contains("without files"), "{refused}");
}
