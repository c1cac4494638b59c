//! Clients of a pool whose network, processes, machines and disks fail, by seeds.

use std::sync::atomic::{AtomicUsize, Ordering};

use atoll_pool::ask_scrub;
use atoll_sim::Loss as MessageLoss;

use super::*;
use crate::workload::clients::{Client, Grounds, judge, look_at_everything};
use crate::workload::history::History;
use crate::workload::{Dice, NETWORK_FAULTS, disturb_network, for_each_seed};

const CLIENTS: u32 = 3;
/// Of each client.
const STEPS: u64 = 1500;
/// The clients have made their steps so long after all faults have ended.
const DONE_WITHIN: Duration = Duration::from_secs(600);
const SCRUB_ASKED: Duration = Duration::from_millis(200);

/// Which faults a test has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Faults {
    /// Of the network, of processes that stand still, and of slow disks.
    Delays,
    /// And of processes that are killed.
    Kills,
    /// And of machines that lose power.
    Power(Loss),
    /// And of disks that hang for up to three seconds.
    Hangs,
    /// And of disks that are set back to an older state, one at a time.
    SetBack,
}

/// A group and its clients.
struct Trial {
    group: Group,
    grounds: Arc<Grounds>,
    history: History,
    seed: u64,
    dice: Dice,
    /// Clients that have steps to make.
    running: Arc<AtomicUsize>,
    frozen: [bool; MEMBERS.len()],
}

impl Trial {
    fn new(seed: u64) -> Trial {
        let group = Group::new(seed, (seed % 4) as u8);
        let history = History::new(group.sim.outside());
        let fs = group.mount(0);
        let grounds = group.sim.block_on(LONG, Grounds::make(&*fs, CLIENTS as usize, 3)).unwrap();
        let mut trial = Trial {
            group,
            grounds: Arc::new(grounds),
            history,
            seed,
            dice: Dice(seed),
            running: Arc::default(),
            frozen: [false; MEMBERS.len()],
        };
        for disk in &trial.group.disks {
            disk.set_latency(seed, Duration::from_millis(2));
        }
        trial.start_clients();
        trial
    }

    /// Each on a mount of another member.
    fn start_clients(&mut self) {
        self.running = Arc::new(AtomicUsize::new(CLIENTS as usize));
        let env = self.group.sim.env(self.group.clients);
        for number in 0..CLIENTS {
            let fs: Arc<dyn FileSystem> = self.group.mount(number as usize);
            let client = Client {
                number,
                grounds: self.grounds.clone(),
                history: self.history.clone(),
                seed: self.seed * 100 + u64::from(number),
                steps: STEPS,
                pause: Duration::from_millis(20),
                persists: false,
            };
            let work = client.run(fs.clone(), env.clone());
            let running = self.running.clone();
            env.spawn(Box::pin(async move {
                work.await;
                running.fetch_sub(1, Ordering::SeqCst);
            }));
        }
    }

    fn host(&mut self) -> usize {
        self.dice.below(MEMBERS.len() as u64) as usize
    }

    fn kill(&mut self, at: usize) {
        let calls = if self.dice.below(2) == 0 { InFlight::Lost } else { InFlight::Late };
        self.frozen[at] = false;
        if self.group.is_up(at) {
            self.group.kill(at, calls);
        }
    }

    fn lose_power(&mut self, at: usize, loss: Loss) {
        self.frozen[at] = false;
        let seed = self.dice.below(1 << 32);
        // What runs no more can still lose what it left.
        self.group.lose_power(at, loss, seed);
        self.history.power_lost();
    }

    fn restart(&mut self, at: usize) {
        if self.group.is_up(at) {
            return;
        }
        self.group.restart(at);
    }

    fn thaw(&mut self) {
        for at in MEMBERS {
            if std::mem::take(&mut self.frozen[at]) {
                self.group.sim.thaw(self.group.hosts[at]);
            }
        }
    }

    /// Something goes wrong.
    fn disturb(&mut self, faults: Faults) {
        let sim = &self.group.sim;
        let hosts = self.group.hosts.clone();
        let (one, other) = (self.dice.below(3) as usize, 1 + self.dice.below(2) as usize);
        let other = (one + other) % MEMBERS.len();
        let chance = self.dice.below(30) as f64 / 100.0;
        let kinds = match faults {
            Faults::Delays => 7,
            Faults::Kills => 10,
            Faults::Power(_) | Faults::Hangs | Faults::SetBack => 13,
        };
        match self.dice.below(kinds) {
            kind if kind < NETWORK_FAULTS => {
                disturb_network(sim, (hosts[one], hosts[other]), chance, kind);
            }
            5 => {
                let bound = Duration::from_millis([2, 30, 200][self.dice.below(3) as usize]);
                self.group.disks[one].set_latency(self.seed, bound);
            }
            6 => {
                if self.group.is_up(one) && !self.frozen[one] {
                    self.group.sim.freeze(hosts[one]);
                    self.frozen[one] = true;
                }
            }
            7 | 8 => self.kill(one),
            9 => match self.dice.below(3) {
                0 => [1, 2].into_iter().for_each(|at| self.kill(at)),
                _ => MEMBERS.into_iter().for_each(|at| self.kill(at)),
            },
            10.. if faults == Faults::Hangs => {
                let time = Duration::from_millis(self.dice.below(3000));
                self.group.disks[one].hang_for(time);
            }
            10.. if faults == Faults::SetBack => self.set_back(one),
            10 | 11 => {
                let Faults::Power(loss) = faults else { unreachable!("too many kinds") };
                self.lose_power(one, loss);
            }
            _ => {
                let Faults::Power(loss) = faults else { unreachable!("too many kinds") };
                MEMBERS.into_iter().for_each(|at| self.lose_power(at, loss));
            }
        }
    }

    /// A machine's disk is set back to what it was some time ago. The other members have what it had.
    fn set_back(&mut self, at: usize) {
        MEMBERS.into_iter().for_each(|at| self.restart(at));
        self.thaw();
        self.group.sim.heal();
        if self.group.await_quiet().is_err() {
            return;
        }
        let before = self.group.disks[at].snapshot();
        self.group.run_for(Duration::from_millis(self.dice.below(3000)));
        self.group.sim.crash_silently(self.group.hosts[at]);
        self.group.members()[at] = None;
        self.group.disks[at].rollback(&before);
        self.history.power_lost();
    }

    /// Has the primary compare all copies, while clients work and things go wrong. There is never anything to heal.
    fn scrub(&mut self) -> Result<(), String> {
        let at = self.host();
        let route = self.group.route(at);
        let env = self.group.sim.outside();
        let asked = async {
            // What the one before has found, then another one.
            let found = ask_scrub(&*route, false, SCRUB_ASKED).await;
            let _ = ask_scrub(&*route, true, SCRUB_ASKED).await;
            found
        };
        let asked = atoll_env::timeout(&*env, SCRUB_ASKED, asked);
        match self.group.sim.block_on(LONG, asked).unwrap() {
            Ok(Ok(report)) if !report.findings.is_empty() => Err(format!("a scrub: {report:#?}")),
            _ => Ok(()),
        }
    }

    fn run(mut self, faults: Faults) -> Result<(), String> {
        self.group.set_high_limits();
        for _ in 0..10 {
            self.scrub()?;
            self.group.run_for(Duration::from_millis(self.dice.below(1500)));
            self.disturb(faults);
            let pause = [100, 1000, 4000][self.dice.below(3) as usize];
            self.group.run_for(Duration::from_millis(self.dice.below(pause)));
            if self.dice.below(2) == 0 {
                self.thaw();
            }
            let at = self.host();
            if self.dice.below(2) == 0 {
                self.restart(at);
            }
            if self.dice.below(3) == 0 {
                self.group.sim.heal();
            }
        }
        self.end()
    }

    /// All faults end, and everything is judged.
    fn end(mut self) -> Result<(), String> {
        self.group.sim.heal();
        self.group.sim.set_loss(MessageLoss::None);
        self.thaw();
        for disk in &self.group.disks {
            disk.set_latency(self.seed, Duration::from_millis(2));
        }
        for at in MEMBERS {
            self.restart(at);
        }
        let running = self.running.clone();
        let is_done = || running.load(Ordering::SeqCst) == 0;
        let until = self.group.sim.now() + DONE_WITHIN;
        while !is_done() && self.group.sim.now() < until {
            self.group.run_for(Duration::from_millis(500));
        }
        if !is_done() {
            let all: Vec<_> = MEMBERS.into_iter().map(|at| self.group.status(at)).collect();
            return Err(format!("clients have no answer: {all:#?}"));
        }
        self.group.settle_and_compare()?;
        // A new primary has counted.
        self.group.run_for(Duration::from_secs(3));
        self.group.check_used()?;
        // The first may have begun while clients were at work.
        self.group.scrub();
        let report = self.group.scrub();
        if !report.findings.is_empty() || report.passed_over > 0 {
            return Err(format!("the last scrub: {report:#?}"));
        }
        // Calls that were answered with EIO have come to an end, too.
        self.history.settled();
        let fs: Arc<dyn FileSystem> = self.group.mount(0);
        let look = look_at_everything(&fs, &self.history, &self.grounds);
        self.group.sim.block_on(LONG, look).unwrap();
        judge(
            &self.history,
            &self.grounds,
            &[atoll_vfs::Errno::EAGAIN, atoll_vfs::Errno::ETIMEDOUT],
        )
    }
}

#[test]
fn members_agree_after_delays() {
    for_each_seed(4, |seed| Trial::new(seed).run(Faults::Delays));
}

#[test]
fn members_agree_after_kills() {
    for_each_seed(6, |seed| Trial::new(seed).run(Faults::Kills));
}

/// Clocks run up to 4 % too fast or too slow and jump: two of them differ by less than the tenth that those who grant leases wait longer.
#[test]
fn members_agree_with_clocks_that_run_apart() {
    for_each_seed(6, |seed| {
        let trial = Trial::new(seed);
        let mut dice = Dice(seed);
        for host in &trial.group.hosts {
            trial.group.sim.set_clock_rate_ppm(*host, dice.below(80_001) as i32 - 40_000);
            trial.group.sim.set_clock_skew_ms(*host, dice.below(7_200_000) as i64 - 3_600_000);
        }
        trial.run(Faults::Kills)
    });
}

#[test]
fn members_agree_after_disks_hang() {
    for_each_seed(4, |seed| Trial::new(seed).run(Faults::Hangs));
}

#[test]
fn members_agree_after_a_disk_is_set_back() {
    for_each_seed(4, |seed| Trial::new(seed).run(Faults::SetBack));
}

#[test]
fn members_agree_after_losses_of_power() {
    for_each_seed(6, |seed| Trial::new(seed).run(Faults::Power(Loss::Ordered)));
}

#[test]
fn members_agree_after_losses_of_power_on_disks_without_order() {
    for_each_seed(4, |seed| Trial::new(seed).run(Faults::Power(Loss::Arbitrary)));
}
