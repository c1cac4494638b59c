//! Machines come and go, one after the other.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::*;
use crate::workload::history::make_ground;
use crate::workload::{ROOT, me, read_file_in, write_file_in};

/// Longer than a machine is silent until it is replaced.
const DEAD: Duration = Duration::from_secs(620);

impl Pool {
    /// Makes a directory in the root with a file, and a file in the root, through a machine.
    fn write(&self, at: usize, name: &str) {
        let work = async {
            let fs = self.mount(at).await;
            let dir = make_ground(&*fs, ROOT, name).await;
            write_file_in(&*fs, dir, "file", name).await;
            write_file_in(&*fs, ROOT, &format!("{name}.txt"), name).await;
        };
        self.sim.block_on(LONG, work).unwrap();
    }

    /// That all directories made so are there, with their files.
    #[track_caller]
    fn assert_reads(&self, at: usize, names: &[String]) {
        let work = async {
            let fs = self.mount(at).await;
            for name in names {
                let dir = fs.lookup(me(), ROOT, name.as_bytes()).await.unwrap().attr.inode;
                assert_eq!(read_file_in(&*fs, dir, "file").await, *name);
                assert_eq!(read_file_in(&*fs, ROOT, &format!("{name}.txt")).await, *name);
            }
        };
        self.sim.block_on(LONG, work).unwrap();
    }

    /// A pool of so many machines, which is settled, and the directories that were made in it.
    fn of(machines: usize, more: usize, seed: u64) -> (Pool, Vec<String>) {
        let pool = Pool::new(machines + more, seed);
        pool.run_for(Duration::from_secs(3));
        let mut names = Vec::new();
        for at in 0..machines {
            if at > 0 {
                // Any machine's code will do, also of one without a member of the first group.
                pool.join(at - 1, at).unwrap();
                pool.settle();
            }
            for number in 0..4 {
                let name = format!("dir-{at}-{number}");
                pool.write(at, &name);
                names.push(name);
            }
        }
        (pool, names)
    }

    /// In how many groups each machine is.
    fn memberships(&self) -> Vec<usize> {
        let groups = self.groups();
        let members: Vec<_> = groups.iter().map(|group| self.members_of(*group)).collect();
        (0..self.count()).map(|at| members.iter().filter(|of| of.contains(&at)).count()).collect()
    }
}

/// Kosha §3.1: "the directories are distributed" over the nodes; §4.3: a node that joins takes its share.
#[test]
fn each_machine_brings_room_and_every_file_has_its_copies() {
    let (pool, names) = Pool::of(6, 0, 1);
    let _end = ShutDown(pool.sim.clone());
    // The first three machines have one group, each of the others has begun one.
    assert_eq!(pool.groups().len(), 4);
    for group in pool.groups() {
        assert_eq!(pool.members_of(group).len(), 3, "{group}");
    }
    let memberships = pool.memberships();
    assert!(memberships.iter().all(|groups| (1..=3).contains(groups)), "{memberships:?}");
    let files_of = |group| {
        let at = *pool.members_of(group).first().unwrap();
        let disk = pool.hosts()[at].disks.kept().disks[&group].clone();
        let tree = pool.sim.block_on(LONG, plain_tree(&disk)).unwrap().unwrap();
        tree.keys().filter(|path| path.ends_with("/file")).count()
    };
    let files: Vec<usize> = pool.groups().into_iter().map(files_of).collect();
    assert_eq!(files.iter().sum::<usize>(), 24);
    assert!(files.iter().all(|files| *files > 0), "{files:?}");
    for at in [0, 5] {
        pool.assert_reads(at, &names);
    }
    pool.compare().unwrap();
    // What machines know of the groups survives them.
    for at in 0..6 {
        pool.kill(at, InFlight::Lost);
    }
    for at in 0..6 {
        pool.restart(at);
    }
    pool.settle();
    assert_eq!(pool.memberships(), memberships);
    pool.assert_reads(3, &names);
}

/// Clients of all machines work while a pool grows.
#[test]
fn nobody_who_works_meanwhile_meets_an_error() {
    let (pool, _) = Pool::of(1, 4, 2);
    let _end = ShutDown(pool.sim.clone());
    let (is_over, made) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let running = Arc::new(AtomicUsize::new(0));
    for at in 0..5 {
        if at > 0 {
            pool.join(at - 1, at).unwrap();
        }
        let (is_over, made, pool_of) = (is_over.clone(), made.clone(), pool.clone());
        running.fetch_add(1, Ordering::SeqCst);
        let running = running.clone();
        pool.env().spawn(Box::pin(async move {
            sleep(&*pool_of.env(), Duration::from_secs(1)).await;
            let fs = pool_of.mount(at).await;
            for number in 0.. {
                if is_over.load(Ordering::SeqCst) {
                    break;
                }
                let name = format!("{at}-{number}");
                let dir = make_ground(&*fs, ROOT, &name).await;
                write_file_in(&*fs, dir, "file", &name).await;
                assert_eq!(read_file_in(&*fs, dir, "file").await, name);
                made.fetch_add(1, Ordering::SeqCst);
                sleep(&*pool_of.env(), Duration::from_millis(150)).await;
            }
            running.fetch_sub(1, Ordering::SeqCst);
        }));
        pool.run_for(Duration::from_secs(15));
    }
    is_over.store(true, Ordering::SeqCst);
    pool.run_for(Duration::from_secs(10));
    assert_eq!(running.load(Ordering::SeqCst), 0, "all have ended, by themselves");
    assert!(made.load(Ordering::SeqCst) > 200);
    pool.settle();
    assert_eq!(pool.groups().len(), 3);
    pool.compare().unwrap();
}

#[test]
fn a_machine_goes_when_others_have_taken_its_place() {
    let (pool, names) = Pool::of(5, 0, 3);
    let _end = ShutDown(pool.sim.clone());
    let gone = *pool.members_of(GroupNumber::FIRST).first().unwrap();
    let other = (gone + 1) % 5;
    pool.let_go(gone, gone).unwrap();
    pool.settle();
    assert_eq!(pool.memberships()[gone], 0);
    for group in pool.groups() {
        assert_eq!(pool.members_of(group).len(), 3, "{group}");
    }
    pool.run_for(Duration::from_secs(5));
    assert!(pool.status(gone).is_removed, "{:?}", pool.status(gone).groups);
    pool.kill(gone, InFlight::Lost);
    pool.assert_reads(other, &names);
    pool.compare().unwrap();
    // It comes again, with an empty disk.
    pool.sim.restart(pool.host(gone));
    *pool.hosts()[gone].disks.kept() = Kept::default();
    pool.join(other, gone).unwrap();
    pool.settle();
    assert!(pool.memberships()[gone] > 0);
    pool.assert_reads(gone, &names);
    pool.compare().unwrap();
}

#[test]
fn a_machine_that_is_removed_at_once_is_replaced_afterwards() {
    let (pool, names) = Pool::of(5, 0, 4);
    let _end = ShutDown(pool.sim.clone());
    pool.lose_power(4, Loss::Ordered, 1);
    pool.run_for(Duration::from_secs(2));
    pool.remove(0, 4).unwrap();
    pool.settle();
    assert_eq!(pool.memberships()[4], 0);
    for group in pool.groups() {
        assert_eq!(pool.members_of(group).len(), 3, "{group}");
    }
    pool.assert_reads(1, &names);
    pool.compare().unwrap();
}

/// POOL: "Repair of a silent member's slots starts after 10 minutes".
#[test]
fn a_machine_that_is_dead_is_replaced_and_takes_part_again_when_it_comes_back() {
    let (pool, names) = Pool::of(5, 0, 5);
    let _end = ShutDown(pool.sim.clone());
    let dead = *pool.members_of(GroupNumber::FIRST).first().unwrap();
    let groups = pool.memberships()[dead];
    pool.kill(dead, InFlight::Lost);
    pool.run_for(Duration::from_secs(60));
    for group in pool.groups() {
        assert_eq!(pool.members_of(group).len(), 3, "{group}: nobody is replaced yet");
    }
    pool.run_for(DEAD);
    let alive = |group| {
        let stands = pool.stands(group).unwrap();
        stands.members.iter().filter(|member| member.problem.is_none() && member.is_member).count()
    };
    for group in pool.groups() {
        assert_eq!(alive(group), 3, "{group}");
    }
    let via = (dead + 1) % 5;
    pool.write(via, "meanwhile");
    pool.restart(dead);
    pool.settle();
    pool.run_for(Duration::from_secs(20));
    pool.settle();
    // Whoever is too many has gone, but for those that it would take their home from, and nobody is left without a group.
    for group in pool.groups() {
        assert!([3, 4].contains(&pool.members_of(group).len()), "{group}");
    }
    let memberships = pool.memberships();
    assert!(memberships.iter().all(|groups| *groups > 0), "{memberships:?}, {groups} before");
    pool.assert_reads(dead, &[&names[..], &["meanwhile".to_owned()]].concat());
    pool.compare().unwrap();
}

#[test]
fn copies_are_more_or_fewer_while_the_pool_lives() {
    let (pool, names) = Pool::of(5, 0, 6);
    let _end = ShutDown(pool.sim.clone());
    let counts = |pool: &Pool| -> Vec<usize> {
        pool.groups().into_iter().map(|group| pool.members_of(group).len()).collect()
    };
    assert_eq!(counts(&pool), [3, 3, 3]);
    pool.set_copies(0, 4).unwrap();
    pool.settle();
    assert_eq!(counts(&pool), [4, 4, 4]);
    pool.set_copies(4, 2).unwrap();
    pool.run_for(Duration::from_secs(30));
    pool.settle();
    // The last group of a machine is not taken from it.
    assert!(counts(&pool).iter().all(|count| (2..=3).contains(count)), "{:?}", counts(&pool));
    assert!(pool.memberships().iter().all(|groups| *groups > 0));
    assert!(pool.set_copies(0, 6).is_err());
    // A machine that has left a group finds it also when the members that it knew of are others.
    for group in pool.groups() {
        let primary = pool.at(&pool.stands(group).unwrap().primary);
        pool.kill(primary, InFlight::Lost);
        pool.run_for(Duration::from_secs(5));
        pool.restart(primary);
        pool.run_for(Duration::from_secs(5));
    }
    pool.settle();
    for at in 0..5 {
        pool.assert_reads(at, &names);
        pool.write(at, &format!("late-{at}"));
    }
    pool.compare().unwrap();
    // And has no directory of it.
    for at in 0..5 {
        let held = pool.hosts()[at].disks.kept().disks.len();
        let status = pool.status(at);
        assert_eq!(held, pool.memberships()[at], "machine {at}: {status:?}");
    }
}

/// Else a pool would have no group numbers left some day.
#[test]
fn a_machine_that_takes_anothers_place_begins_no_group_too_many() {
    let (pool, names) = Pool::of(4, 0, 10);
    let _end = ShutDown(pool.sim.clone());
    for round in 0..3 {
        let gone = 1 + round % 3;
        pool.let_go(0, gone).unwrap();
        pool.settle();
        pool.kill(gone, InFlight::Lost);
        pool.sim.restart(pool.host(gone));
        *pool.hosts()[gone].disks.kept() = Kept::default();
        pool.join(0, gone).unwrap();
        pool.settle();
        assert_eq!(pool.groups().len(), 2, "round {round}");
        assert!(pool.memberships().iter().all(|groups| *groups > 0));
    }
    pool.assert_reads(1, &names);
    pool.compare().unwrap();
}

#[test]
fn one_machine_stays_whoever_is_to_go() {
    let (pool, names) = Pool::of(2, 0, 11);
    let _end = ShutDown(pool.sim.clone());
    pool.let_go(0, 0).unwrap();
    let refused = pool.let_go(0, 1).unwrap_err();
    assert!(refused.to_string().contains("no machine would stay"), "{refused}");
    pool.settle();
    pool.kill(0, InFlight::Lost);
    pool.assert_reads(1, &names);
}

/// A group for each machine up to 16; later ones take part in these.
#[test]
fn a_pool_of_twenty_machines_gives_each_a_part() {
    let pool = Pool::new(20, 12);
    let _end = ShutDown(pool.sim.clone());
    pool.run_for(Duration::from_secs(3));
    pool.set_copies(0, 1).unwrap();
    for at in 1..20 {
        pool.join(at - 1, at).unwrap();
        pool.run_for(Duration::from_secs(3));
    }
    pool.settle();
    assert_eq!(pool.groups().len(), 16);
    let memberships = pool.memberships();
    assert!(memberships.iter().all(|groups| *groups > 0), "{memberships:?}");
}

#[test]
fn with_one_copy_each_machine_has_its_own_files() {
    let pool = Pool::new(4, 7);
    let _end = ShutDown(pool.sim.clone());
    pool.run_for(Duration::from_secs(3));
    pool.set_copies(0, 1).unwrap();
    for at in 1..4 {
        pool.join(0, at).unwrap();
        pool.settle();
    }
    assert_eq!(pool.memberships(), [1, 1, 1, 1]);
    let names: Vec<String> = (0..12).map(|number| format!("dir-{number}")).collect();
    for name in &names {
        pool.write(1, name);
    }
    pool.assert_reads(3, &names);
    let files = |at: usize| -> usize {
        let disks = pool.hosts()[at].disks.kept().disks.clone();
        let trees = disks.values().map(|disk| {
            let tree = pool.sim.block_on(LONG, plain_tree(disk)).unwrap().unwrap();
            tree.keys().filter(|path| path.ends_with("/file")).count()
        });
        trees.sum()
    };
    let files: Vec<usize> = (0..4).map(files).collect();
    assert_eq!(files.iter().sum::<usize>(), 12);
    assert!(files.iter().filter(|files| **files > 0).count() >= 3, "{files:?}");
    // The only copies of files do not go.
    let id = pool.peer(2).id;
    let removed = pool.remove(0, 2);
    assert!(removed.is_err(), "{id} had the only copies");
    assert!(pool.first().roster.to_go().is_empty(), "it stays");
    pool.assert_reads(0, &names);
}

/// A machine that asked to join, and never came, is removed like any other.
#[test]
fn a_machine_that_never_came_is_in_nobodys_way() {
    let (pool, mut names) = Pool::of(3, 2, 8);
    let _end = ShutDown(pool.sim.clone());
    let peer = pool.peer(3);
    let admit = move |machine: Machine| -> BoxFuture<'static, _> {
        Box::pin(async move { machine.admit(peer).await })
    };
    pool.run_at(1, admit).unwrap().unwrap();
    // It asks again, as it does after a crash.
    pool.run_at(2, admit).unwrap().unwrap();
    pool.run_for(Duration::from_secs(20));
    assert_eq!(pool.first().roster.groups().len(), 1);
    pool.write(0, "more");
    names.push("more".to_owned());
    pool.join(0, 4).unwrap();
    pool.run_for(Duration::from_secs(20));
    pool.remove(0, 3).unwrap();
    pool.settle();
    assert_eq!(pool.groups().len(), 2);
    pool.assert_reads(4, &names);
    pool.compare().unwrap();
}

#[test]
fn a_machine_whose_disk_is_gone_is_not_let_in_as_another_one() {
    let (pool, names) = Pool::of(4, 0, 9);
    let _end = ShutDown(pool.sim.clone());
    pool.kill(3, InFlight::Lost);
    pool.sim.restart(pool.host(3));
    let before = std::mem::take(&mut *pool.hosts()[3].disks.kept());
    let refused = pool.join(0, 3).unwrap_err();
    assert!(refused.to_string().contains("has this node as a member already"), "{refused}");
    *pool.hosts()[3].disks.kept() = before;
    pool.start(3);
    pool.settle();
    // Of one group alone.
    let group = GroupNumber::new(1).unwrap();
    pool.kill(3, InFlight::Lost);
    pool.sim.restart(pool.host(3));
    pool.hosts()[3].disks.kept().disks.remove(&group);
    pool.start(3);
    pool.run_for(Duration::from_secs(10));
    let status = pool.status(3);
    let problem = status.groups.iter().find(|(of, _)| *of == group).unwrap().1.clone();
    assert!(problem.unwrap_err().contains("which is gone"), "it is not made anew by itself");
    pool.assert_reads(0, &names);
}
