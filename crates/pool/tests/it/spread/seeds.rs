//! Clients of a pool of three groups whose network, processes and machines fail, by seeds.

use std::sync::atomic::{AtomicUsize, Ordering};

use atoll_sim::Loss as MessageLoss;
use atoll_vfs::Errno;

use super::*;
use crate::workload::clients::{Client, Grounds, judge, look_at_everything};
use crate::workload::history::History;
use crate::workload::{Dice, NETWORK_FAULTS, disturb_network, for_each_seed};

const CLIENTS: u32 = 3;
/// Of each client.
const STEPS: u64 = 600;
/// The clients have made their steps so long after all faults have ended.
const DONE_WITHIN: Duration = Duration::from_secs(900);

/// Which faults a test has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Faults {
    None,
    /// Of the network, and of processes that stand still.
    Delays,
    /// And of processes that are killed.
    Kills,
    /// And of machines that lose power.
    Power,
}

fn trial(seed: u64, faults: Faults) -> Result<(), String> {
    let machines = Machines::new(seed);
    let sim = machines.sim.clone();
    let _end = ShutDown(sim.clone());
    sim.block_on(LONG, machines.make((seed % 4) as u8 + 1)).unwrap();
    machines.await_quiet()?;
    let history = History::new(sim.outside());
    let grounds = async {
        let fs = machines.mount(0).await;
        Grounds::make(&*fs, CLIENTS as usize, 3).await
    };
    let grounds = Arc::new(sim.block_on(LONG, grounds).unwrap());
    quotas::set_high_limits(&machines);
    for disk in machines.disks.lock().unwrap().values() {
        disk.set_latency(seed, Duration::from_millis(2));
    }
    let running = Arc::new(AtomicUsize::new(CLIENTS as usize));
    let env = sim.env(machines.clients);
    for number in 0..CLIENTS {
        let fs = sim.block_on(LONG, machines.mount(number as usize)).unwrap();
        let client = Client {
            number,
            grounds: grounds.clone(),
            history: history.clone(),
            seed: seed * 100 + u64::from(number),
            steps: STEPS,
            pause: Duration::from_millis(20),
            persists: false,
        };
        let work = client.run(fs, env.clone());
        let running = running.clone();
        env.spawn(Box::pin(async move {
            work.await;
            running.fetch_sub(1, Ordering::SeqCst);
        }));
    }
    let mut dice = Dice(seed);
    let mut frozen = [false; MACHINES];
    if faults != Faults::None {
        for _ in 0..8 {
            machines.run_for(Duration::from_millis(dice.below(1500)));
            disturb(&machines, &mut dice, &mut frozen, (faults, &history));
            let pause = [100, 1000, 4000][dice.below(3) as usize];
            machines.run_for(Duration::from_millis(dice.below(pause)));
            if dice.below(2) == 0 {
                thaw(&machines, &mut frozen);
            }
            let at = dice.below(MACHINES as u64) as usize;
            if dice.below(2) == 0 && !machines.is_up(at) {
                machines.restart(at);
            }
            if dice.below(3) == 0 {
                sim.heal();
            }
        }
    }
    sim.heal();
    sim.set_loss(MessageLoss::None);
    thaw(&machines, &mut frozen);
    for at in 0..MACHINES {
        if !machines.is_up(at) {
            machines.restart(at);
        }
    }
    let until = sim.now() + DONE_WITHIN;
    while running.load(Ordering::SeqCst) > 0 {
        if sim.now() > until {
            return Err("clients have no answer".to_owned());
        }
        machines.run_for(Duration::from_millis(500));
    }
    machines.settle_and_compare()?;
    machines.run_for(Duration::from_secs(3));
    quotas::check_used(&machines)?;
    history.settled();
    let look = async {
        let fs = machines.mount(0).await;
        look_at_everything(&fs, &history, &grounds).await;
    };
    sim.block_on(LONG, look).unwrap();
    judge(&history, &grounds, &[Errno::EAGAIN, Errno::ETIMEDOUT])
}

pub(super) fn thaw(machines: &Machines, frozen: &mut [bool; MACHINES]) {
    for (at, frozen) in frozen.iter_mut().enumerate() {
        if std::mem::take(frozen) {
            machines.sim.thaw(machines.hosts[at]);
        }
    }
}

/// Something goes wrong.
pub(super) fn disturb(
    machines: &Machines,
    dice: &mut Dice,
    frozen: &mut [bool; MACHINES],
    (faults, history): (Faults, &History),
) {
    let one = dice.below(MACHINES as u64) as usize;
    let other = (one + 1 + dice.below(MACHINES as u64 - 1) as usize) % MACHINES;
    let chance = dice.below(30) as f64 / 100.0;
    let kinds = match faults {
        Faults::None => return,
        Faults::Delays => 6,
        Faults::Kills => 9,
        Faults::Power => 11,
    };
    match dice.below(kinds) {
        kind if kind < NETWORK_FAULTS => {
            let hosts = (machines.hosts[one], machines.hosts[other]);
            disturb_network(&machines.sim, hosts, chance, kind);
        }
        5 => {
            if machines.is_up(one) && !frozen[one] {
                machines.sim.freeze(machines.hosts[one]);
                frozen[one] = true;
            }
        }
        6 | 7 => {
            frozen[one] = false;
            let calls = if dice.below(2) == 0 { InFlight::Lost } else { InFlight::Late };
            if machines.is_up(one) {
                machines.kill(one, calls);
            }
        }
        8 => {
            frozen.fill(false);
            for at in 0..MACHINES {
                if machines.is_up(at) {
                    machines.kill(at, InFlight::Lost);
                }
            }
        }
        kind => {
            let all: Vec<usize> = if kind == 9 { vec![one] } else { (0..MACHINES).collect() };
            for at in all {
                frozen[at] = false;
                machines.lose_power(at, Loss::Ordered, dice.below(1 << 32));
            }
            history.power_lost();
        }
    }
}

#[test]
fn groups_agree_when_nothing_fails() {
    for_each_seed(3, |seed| trial(seed, Faults::None));
}

#[test]
fn groups_agree_after_delays() {
    for_each_seed(3, |seed| trial(seed, Faults::Delays));
}

#[test]
fn groups_agree_after_kills() {
    for_each_seed(4, |seed| trial(seed, Faults::Kills));
}

#[test]
fn groups_agree_after_losses_of_power() {
    for_each_seed(4, |seed| trial(seed, Faults::Power));
}
