//! Proposers on all members while network, processes, machines and disks fail, by seeds.

use atoll_env::random_below;
use atoll_pool::disk::simulated::DiskCall;
use atoll_sim::Loss as MessageLoss;

use super::history::History;
use super::*;
use crate::workload::{Dice, NETWORK_FAULTS, disturb_network, for_each_seed};

/// A proposal succeeds so long after all faults have ended.
const DECIDED_WITHIN: Duration = Duration::from_secs(2);
const STEPS: u64 = 25;

/// Which faults a test has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Faults {
    /// Of the network, of processes that stand still, and of slow disks.
    Delays,
    /// And of processes that are killed, and of disks that refuse a write.
    Kills,
    /// And of machines that lose power.
    Power(Loss),
}

struct Trial {
    pool: Pool,
    history: History,
    seed: u64,
    dice: Dice,
    frozen: Vec<bool>,
    is_over: Arc<AtomicBool>,
}

/// Asks and proposes, as long as its process lives.
async fn propose_on(
    env: atoll_env::Env,
    seat: Arc<MapSeat<SimulatedDisk>>,
    (own, founding): (usize, PoolMembers),
    history: History,
    is_over: Arc<AtomicBool>,
) {
    let mut known = PoolMap::first(&founding);
    while !is_over.load(Ordering::SeqCst) {
        let limit = Duration::from_millis(50 + random_below(&*env, 1000));
        let begun = env.now();
        let holds = if random_below(&*env, 3) == 0 {
            seat.ask(limit).await
        } else {
            // No two members propose the same.
            let primary = founding.peers()[own].id;
            let chosen = founding.peers().iter().filter(|_| random_below(&*env, 2) == 0);
            let members = chosen.map(|peer| peer.id).chain([primary]).collect();
            let mut map = PoolMap { epoch: known.epoch + 1, primary, members, ..known.clone() };
            if random_below(&*env, 4) == 0 {
                let mut all: Vec<_> = founding.peers().iter().map(|peer| peer.id).collect();
                let count = [1, 3, 3, 5][random_below(&*env, 4) as usize];
                while all.len() > count {
                    all.swap_remove(random_below(&*env, all.len() as u64) as usize);
                }
                if all.len() == count {
                    let generation = known.voters.generation + 1;
                    map.voters = MapVoters { generation, keys: all.into_iter().collect() };
                }
            }
            history.proposing(&map, &known);
            let holds = seat.propose(&map, limit).await;
            if holds.as_ref() == Ok(&map) {
                history.won();
            }
            holds
        };
        if let Ok(map) = holds {
            history.answered(begun, env.now(), &map);
            known = map;
        }
        sleep(&*env, Duration::from_millis(random_below(&*env, 60))).await;
    }
}

impl Trial {
    fn new(seed: u64) -> Trial {
        let members = [3, 5, 3, 4, 7, 2][(seed % 6) as usize];
        let pool = Pool::new(seed, members);
        let history = History::new(&PoolMap::first(&pool.founding));
        let trial = Trial {
            frozen: vec![false; members],
            pool,
            history,
            seed,
            dice: Dice(seed),
            is_over: Arc::default(),
        };
        (0..members).for_each(|at| trial.start_proposer(at));
        trial
    }

    fn start_proposer(&self, at: usize) {
        self.pool.follow(at);
        let env = self.pool.sim.env(self.pool.hosts[at]);
        env.spawn(Box::pin(propose_on(
            env.clone(),
            self.pool.seat(at),
            (at, self.pool.founding.clone()),
            self.history.clone(),
            self.is_over.clone(),
        )));
    }

    fn some(&mut self) -> usize {
        self.dice.below(self.pool.hosts.len() as u64) as usize
    }

    /// Time passes, and all voters are looked at often.
    fn run_for(&mut self, ms: u64) {
        let until = self.pool.sim.now() + Duration::from_millis(ms);
        while self.pool.sim.now() < until {
            self.pool.sim.run_for(Duration::from_millis(5));
            self.pool.voters().for_each(|(_, voter)| self.history.seen(&voter.map()));
        }
    }

    fn restart(&mut self, at: usize) -> Result<(), String> {
        if !self.pool.is_up(at) {
            self.pool.restart(at).map_err(|error| format!("member {at}: {error}"))?;
            self.start_proposer(at);
        }
        Ok(())
    }

    fn thaw(&mut self) {
        for at in 0..self.frozen.len() {
            if std::mem::take(&mut self.frozen[at]) {
                self.pool.sim.thaw(self.pool.hosts[at]);
            }
        }
    }

    fn kill(&mut self, at: usize) {
        let calls = if self.dice.below(2) == 0 { InFlight::Lost } else { InFlight::Late };
        self.frozen[at] = false;
        if self.pool.is_up(at) {
            self.pool.kill(at, calls);
        }
    }

    fn lose_power(&mut self, at: usize, loss: Loss) {
        self.frozen[at] = false;
        let seed = self.dice.below(1 << 32);
        self.pool.lose_power(at, loss, seed);
    }

    /// While a leader is sought, voters die and are there again at once: they must not have forgotten whom they gave their votes.
    fn storm(&mut self, faults: Faults) -> Result<(), String> {
        (0..self.pool.hosts.len()).try_for_each(|at| self.restart(at))?;
        self.thaw();
        self.pool.sim.heal();
        let bound = Duration::from_millis([2, 10, 40][self.dice.below(3) as usize]);
        self.pool.disks.iter().for_each(|disk| disk.set_latency(self.seed, bound));
        // Messages that come late have several voters want the same term.
        let first_timeout = Duration::from_millis(10 + self.dice.below(40));
        self.pool.sim.set_loss(MessageLoss::Retransmit { chance: 0.5, first_timeout });
        if let Some(leader) = self.pool.leader() {
            self.kill(leader);
        }
        let pause = 100 + self.dice.below(150);
        self.run_for(pause);
        for _ in 0..12 {
            let at = self.some();
            match faults {
                Faults::Power(loss) if self.dice.below(2) == 0 => self.lose_power(at, loss),
                _ => self.kill(at),
            }
            self.restart(at)?;
            let pause = self.dice.below(25);
            self.run_for(pause);
        }
        self.pool.sim.set_loss(MessageLoss::None);
        Ok(())
    }

    /// Something goes wrong.
    fn disturb(&mut self, faults: Faults) {
        let hosts = self.pool.hosts.clone();
        let one = match self.pool.leader() {
            // Whoever leads is met more often than others.
            Some(leader) if self.dice.below(2) == 0 => leader,
            _ => self.some(),
        };
        let other = (one + 1 + self.dice.below(hosts.len() as u64 - 1) as usize) % hosts.len();
        let chance = self.dice.below(40) as f64 / 100.0;
        let kinds = match faults {
            Faults::Delays => 7,
            Faults::Kills => 11,
            Faults::Power(_) => 15,
        };
        let sim = &self.pool.sim;
        match self.dice.below(kinds) {
            kind if kind < NETWORK_FAULTS => {
                disturb_network(sim, (hosts[one], hosts[other]), chance, kind);
            }
            5 => {
                let bound = Duration::from_millis([2, 20, 150][self.dice.below(3) as usize]);
                self.pool.disks[one].set_latency(self.seed, bound);
            }
            6 => {
                if self.pool.is_up(one) && !self.frozen[one] {
                    sim.freeze(hosts[one]);
                    self.frozen[one] = true;
                }
            }
            7 | 8 => self.kill(one),
            9 => (0..hosts.len()).for_each(|at| self.kill(at)),
            10 => {
                let call = [DiskCall::Write, DiskCall::SyncFile][self.dice.below(2) as usize];
                self.pool.disks[one].fail_next(call, Errno::EIO);
            }
            11..=13 => {
                let Faults::Power(loss) = faults else { unreachable!("too many kinds") };
                self.lose_power(one, loss);
            }
            _ => {
                let Faults::Power(loss) = faults else { unreachable!("too many kinds") };
                (0..hosts.len()).for_each(|at| self.lose_power(at, loss));
            }
        }
    }

    fn run(mut self, faults: Faults) -> Result<(), String> {
        for _ in 0..STEPS {
            let pause = self.dice.below(500);
            self.run_for(pause);
            match faults {
                Faults::Kills | Faults::Power(_) if self.dice.below(4) == 0 => {
                    self.storm(faults)?;
                }
                _ => self.disturb(faults),
            }
            let pause = [20, 200, 1000][self.dice.below(3) as usize];
            let pause = self.dice.below(pause);
            self.run_for(pause);
            if self.dice.below(2) == 0 {
                self.thaw();
            }
            let at = self.some();
            if self.dice.below(3) > 0 {
                self.restart(at)?;
            }
            if self.dice.below(4) == 0 {
                self.pool.sim.heal();
            }
        }
        self.end()
    }

    /// All faults end, and everything is judged.
    fn end(mut self) -> Result<(), String> {
        self.pool.sim.heal();
        self.pool.sim.set_loss(MessageLoss::None);
        self.thaw();
        // One that stood still may have to learn that its disk has failed.
        self.run_for(5);
        for at in 0..self.pool.hosts.len() {
            self.pool.disks[at].set_latency(self.seed, Duration::from_millis(2));
            // A voter whose disk failed votes again after a restart; a fault may still wait for its call.
            let found = self.pool.voters().find(|(number, _)| *number == at);
            let process = self.pool.processes[at].as_ref();
            let has_failed = found.is_some_and(|(_, voter)| voter.failed().is_some())
                || process.is_some_and(|process| process.has_failed.load(Ordering::SeqCst));
            if has_failed || self.pool.disks[at].faults_left() > 0 {
                self.kill(at);
            }
            self.restart(at)?;
        }
        let healed = self.pool.sim.now();
        let before = (self.history.newest(), self.history.count_won());
        while self.history.count_won() == before.1 {
            if self.pool.sim.now().since(healed) > DECIDED_WITHIN {
                return Err(format!("nothing is decided after all faults, since {before:?}"));
            }
            self.run_for(5);
        }
        self.is_over.store(true, Ordering::SeqCst);
        self.run_for(3000);
        // And all agree which one holds.
        let holds = self.pool.ask(0, DECIDED_WITHIN).map_err(|error| error.to_string())?;
        self.history.seen(&holds);
        if holds.epoch < self.history.newest() {
            return Err(format!("an older map holds than was decided: {holds:?}"));
        }
        let now = holds.voters.generation;
        for (at, voter) in self.pool.voters().filter(|(_, voter)| voter.generation() == now) {
            if voter.map() != holds {
                return Err(format!("voter {at} knows another map: {:?}", voter.map()));
            }
        }
        self.history.judge()
    }
}

#[test]
fn voters_agree_after_delays() {
    for_each_seed(12, |seed| Trial::new(seed).run(Faults::Delays));
}

#[test]
fn voters_agree_after_kills() {
    for_each_seed(12, |seed| Trial::new(seed).run(Faults::Kills));
}

#[test]
fn voters_agree_after_losses_of_power() {
    for_each_seed(12, |seed| Trial::new(seed).run(Faults::Power(Loss::Ordered)));
}

#[test]
fn voters_agree_after_losses_of_power_on_disks_without_order() {
    for_each_seed(12, |seed| Trial::new(seed).run(Faults::Power(Loss::Arbitrary)));
}
