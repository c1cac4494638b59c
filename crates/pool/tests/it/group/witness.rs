//! A node without files votes where two members alone would stop at one death.

use std::collections::BTreeSet;

use atoll_env::Instant;
use atoll_pool::map::VoterError;
use atoll_pool::{Witness, WitnessSeat};

use super::failover::{read_file, stall, write_file};
use super::*;
use crate::workload::for_each_seed;

/// Two members, and a node without files.
struct Pair {
    group: Group,
    host: HostId,
    disk: SimulatedDisk,
    seat: Option<Arc<WitnessSeat<SimulatedDisk>>>,
}

impl Pair {
    /// All of them vote.
    fn new(seed: u64) -> Pair {
        let mut group = Group::of(2, seed, 1);
        let host = group.sim.add_host(HostConfig::default());
        let disk = SimulatedDisk::new(group.sim.outside());
        let map = list(&mut group, host, 1);
        let mut pair = Pair { group, host, disk, seat: None };
        pair.start(&map, 1).unwrap();
        pair.until("all three vote", |pair| pair.votes() && pair.voters() == 3);
        pair
    }

    fn start(&mut self, map: &PoolMap, incarnation: u64) -> Result<(), VoterError> {
        let env = self.group.sim.env(self.host);
        let transport: Arc<dyn Transport> = self.group.sim.transport(self.host);
        let place = (POOL, map.clone());
        let peers = (env, transport.clone());
        let start = WitnessSeat::start(peers, self.disk.clone(), place, incarnation);
        let seat = self.group.run(start)?;
        let pools = PoolRouter::default();
        pools.add(POOL, seat.service());
        transport.serve(Arc::new(Router::new().route(FAMILY, Arc::new(pools))));
        self.seat = Some(seat);
        Ok(())
    }

    fn kill(&mut self) {
        self.group.sim.crash(self.host);
        self.seat = None;
        self.disk.kill(InFlight::Lost);
    }

    /// Starts it again in this incarnation, with a map that may be old.
    fn restart(&mut self, map: &PoolMap, incarnation: u64) {
        self.group.sim.restart(self.host);
        self.disk = self.disk.reopen();
        self.start(map, incarnation).unwrap();
    }

    fn seat(&self) -> &WitnessSeat<SimulatedDisk> {
        self.seat.as_ref().expect("it runs")
    }

    fn votes(&self) -> bool {
        self.seat.as_ref().is_some_and(|seat| seat.is_voting())
    }

    /// How many voters there are, as the primary knows.
    fn voters(&self) -> usize {
        let primary = self.group.primary();
        primary.map_or(0, |primary| self.group.status(primary).voters.len())
    }

    #[track_caller]
    fn until(&mut self, what: &str, holds: impl Fn(&Pair) -> bool) {
        let until: Instant = self.group.sim.now() + QUIET_WITHIN;
        while !holds(self) {
            assert!(self.group.sim.now() < until, "{what}");
            self.group.run_for(Duration::from_millis(50));
        }
    }

    /// The primary, and the other member.
    fn roles(&self) -> [usize; 2] {
        let primary = self.group.primary().expect("there is a primary");
        [primary, 1 - primary]
    }
}

/// Has a node belong to the pool without files.
fn list(group: &mut Group, host: HostId, incarnation: u64) -> PoolMap {
    let witness = Witness { peer: group.sim.peer(host), incarnation };
    let via = group.primary().expect("there is a primary");
    let listed = group.edit(via, move |member| {
        Box::pin(async move { member.add_witness(witness, EDIT_LIMIT).await })
    });
    listed.expect("it is listed")
}

/// POOL: "two members without a witness stop at one death", and with one they do not.
#[test]
fn either_member_may_die_and_the_other_one_goes_on() {
    for_each_seed(10, |seed| {
        let mut pair = Pair::new(seed);
        for round in 0..2 {
            let [first, other] = pair.roles();
            let fs = pair.group.mount(other);
            pair.group.sim.block_on(LONG, write_file(&*fs, "before", "made before")).unwrap();
            pair.group.kill(first, InFlight::Lost);
            let (text, took) = stall(&pair.group, read_file(&*fs, "before"));
            assert_eq!(text, "made before");
            assert!(took < Duration::from_secs(1), "seed {seed}, the primary dies: {took:?}");
            let name = format!("alone {round}");
            pair.group.sim.block_on(LONG, write_file(&*fs, &name, "made alone")).unwrap();
            pair.group.restart(first);
            pair.group.settle_and_compare().unwrap();
            let [primary, backup] = pair.roles();
            let fs = pair.group.mount(primary);
            pair.group.kill(backup, InFlight::Lost);
            let name = format!("without a backup {round}");
            let ((), took) = stall(&pair.group, write_file(&*fs, &name, "made"));
            assert!(took < Duration::from_secs(1), "seed {seed}, the backup dies: {took:?}");
            pair.group.restart(backup);
            pair.group.settle_and_compare().unwrap();
        }
        assert!(pair.votes(), "its votes were asked for all the time");
        Ok(())
    });
}

#[test]
fn members_go_on_without_the_witness_and_it_votes_again_when_it_is_back() {
    let mut pair = Pair::new(1);
    let [_, other] = pair.roles();
    let fs = pair.group.mount(other);
    pair.kill();
    let ((), took) = stall(&pair.group, write_file(&*fs, "file", "made without it"));
    assert!(took < Duration::from_millis(200), "nobody waits for it: {took:?}");
    pair.group.run_for(Duration::from_secs(5));
    let [primary, _] = pair.roles();
    let status = pair.group.status(primary);
    let [witness] = &status.witnesses[..] else { panic!("{status:?}") };
    assert!(witness.votes && witness.problem.is_some(), "{witness:?}");
    assert_eq!(status.voters.len(), 3, "it keeps its vote");
    // Without a majority of the voters the one that is left does not go on by itself.
    let map = pair.group.some().map();
    let [first, other] = pair.roles();
    pair.group.kill(first, InFlight::Lost);
    pair.group.run_for(Duration::from_secs(5));
    assert_eq!(pair.group.primary(), None);
    pair.restart(&map, 1);
    pair.until("the other one is the primary", |pair| pair.group.primary() == Some(other));
    let text = pair.group.sim.block_on(LONG, read_file(&*fs, "file")).unwrap();
    assert_eq!(text, "made without it");
    pair.group.restart(first);
    pair.group.settle_and_compare().unwrap();
}

/// The side that has the witness goes on, and the other one does not answer.
#[test]
fn a_member_that_is_cut_off_from_the_other_and_the_witness_does_not_answer() {
    for_each_seed(6, |seed| {
        let mut pair = Pair::new(seed);
        let [first, other] = pair.roles();
        let (through_first, fs) = (pair.group.mount(first), pair.group.mount(other));
        pair.group.sim.block_on(LONG, write_file(&*fs, "file", "before")).unwrap();
        // Mounts reach their own nodes all the same.
        pair.group.sim.partition(&[&[pair.group.hosts[first]]]);
        let ((), took) = stall(&pair.group, write_file(&*fs, "other", "made on the larger side"));
        assert!(took < Duration::from_secs(1), "seed {seed}: {took:?}");
        let cut_off =
            pair.group.sim.block_on(Duration::from_secs(5), read_file(&*through_first, "file"));
        assert!(cut_off.is_err(), "it may be old: {cut_off:?}");
        pair.group.sim.heal();
        pair.group.settle_and_compare().unwrap();
        Ok(())
    });
}

/// A witness whose directory is that of an hour ago, or is a new one, would not know whom it gave its vote.
#[test]
fn a_witness_that_may_have_forgotten_its_vote_does_not_vote_before_it_is_listed_anew() {
    for is_emptied in [false, true] {
        let mut pair = Pair::new(3);
        let old = pair.disk.snapshot();
        let map = pair.group.some().map();
        let [first, other] = pair.roles();
        let fs = pair.group.mount(first);
        // It decides a map with one of them, that the other one does not hear of.
        pair.group.sim.partition(&[&[pair.group.hosts[other]]]);
        let ((), took) = stall(&pair.group, write_file(&*fs, "file", "made by one"));
        assert!(took < Duration::from_secs(1), "{took:?}");
        pair.group.run_for(Duration::from_secs(2));
        pair.kill();
        match is_emptied {
            true => pair.disk = SimulatedDisk::new(pair.group.sim.outside()),
            false => pair.disk.rollback(&old),
        }
        pair.group.sim.heal();
        pair.restart(&map, 1);
        pair.until("it finds out", |pair| pair.seat().failed().is_some());
        assert_eq!(pair.seat().failed(), Some(VoterError::SetBack));
        assert!(!pair.votes());
        pair.group.await_quiet().unwrap();
        // It draws another incarnation, with nothing in its directory, and is listed anew.
        pair.kill();
        pair.disk = SimulatedDisk::new(pair.group.sim.outside());
        let generation = pair.group.some().map().voters.generation;
        pair.restart(&map, 2);
        pair.group.run_for(Duration::from_secs(5));
        assert!(!pair.votes(), "it is not listed");
        let (group, host) = (&mut pair.group, pair.host);
        list(group, host, 2);
        pair.until("all three vote", |pair| pair.votes() && pair.voters() == 3);
        assert!(pair.group.some().map().voters.generation > generation);
        let [first, other] = pair.roles();
        pair.group.kill(first, InFlight::Lost);
        let fs = pair.group.mount(other);
        let text = pair.group.sim.block_on(LONG, read_file(&*fs, "file")).unwrap();
        assert_eq!(text, "made by one");
        pair.group.restart(first);
        pair.group.settle_and_compare().unwrap();
    }
}

#[test]
fn a_witness_leaves_the_vote_to_a_third_member_and_gets_it_back_when_that_leaves() {
    let mut pair = Pair::new(1);
    let third = pair.group.join(0).unwrap();
    let host = pair.host;
    let votes = move |pair: &Pair, at: HostId| {
        let id = pair.group.sim.peer(at).id;
        let primary = pair.group.primary();
        let voters = primary.map_or_else(Vec::new, |at| pair.group.status(at).voters);
        voters.len() == 3 && voters.iter().any(|voter| voter.id == id)
    };
    pair.until("the third member votes", |pair| votes(pair, pair.group.hosts[third]));
    assert!(!votes(&pair, host), "it is a gateway");
    let status = pair.group.status(pair.group.primary().unwrap());
    assert!(status.witnesses.iter().all(|witness| !witness.votes));
    let via = pair.group.primary().filter(|at| *at != third).unwrap_or(0);
    pair.group.remove(via, third).unwrap();
    pair.until("it votes again", |pair| votes(pair, host) && pair.votes());
    let all: BTreeSet<_> = pair.group.all().into_iter().collect();
    assert_eq!(all, [0, 1].into());
    pair.group.settle_and_compare().unwrap();
}

#[test]
fn a_witness_that_goes_takes_no_vote_with_it() {
    let mut pair = Pair::new(1);
    let id = pair.group.sim.peer(pair.host).id;
    let [primary, _] = pair.roles();
    let map = pair
        .group
        .edit(primary, move |member| Box::pin(async move { member.remove(id, EDIT_LIMIT).await }));
    let map = map.unwrap();
    assert!(map.witnesses.all().is_empty());
    assert_eq!(map.voters.keys.len(), 1);
    pair.kill();
    pair.group.settle_and_compare().unwrap();
}

#[test]
fn a_node_with_files_is_listed_as_none_without() {
    let mut group = Group::of(2, 1, 1);
    let witness = Witness { peer: group.sim.peer(group.hosts[1]), incarnation: 1 };
    let listed = group.edit(0, move |member| {
        Box::pin(async move { member.add_witness(witness, EDIT_LIMIT).await })
    });
    assert!(listed.unwrap_err().contains("has files"));
}
