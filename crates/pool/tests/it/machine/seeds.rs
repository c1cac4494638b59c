//! Clients of a pool whose machines come, go and fail, by seeds.

use std::sync::atomic::{AtomicUsize, Ordering};

use atoll_sim::Loss as MessageLoss;
use atoll_vfs::Errno;

use super::*;
use crate::workload::clients::{Client, Grounds, judge, look_at_everything};
use crate::workload::history::History;
use crate::workload::{Dice, NETWORK_FAULTS, disturb_network, for_each_seed};

const MACHINES: usize = 6;
const CLIENTS: u32 = 3;
/// Of each client.
const STEPS: u64 = 400;
/// The clients have made their steps so long after all faults have ended.
const DONE_WITHIN: Duration = Duration::from_secs(900);

/// Which faults a test has beside machines that come and go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Faults {
    None,
    Kills,
    Power,
}

/// A pool whose clients work on machines 0 to 2, which stay; the others come and go.
fn trial(seed: u64, faults: Faults) -> Result<(), String> {
    let pool = Pool::new(MACHINES, seed);
    let sim = pool.sim.clone();
    let _end = ShutDown(sim.clone());
    pool.run_for(Duration::from_secs(3));
    for at in 1..4 {
        pool.join(0, at).map_err(|error| error.to_string())?;
    }
    pool.try_to_settle()?;
    let history = History::new(sim.outside());
    let grounds = async {
        let fs = pool.mount(0).await;
        Grounds::make(&*fs, CLIENTS as usize, 3).await
    };
    let grounds = Arc::new(sim.block_on(LONG, grounds).unwrap());
    let running = Arc::new(AtomicUsize::new(CLIENTS as usize));
    for number in 0..CLIENTS {
        let fs = sim.block_on(LONG, pool.mount(number as usize)).unwrap();
        let client = Client {
            number,
            grounds: grounds.clone(),
            history: history.clone(),
            seed: seed * 100 + u64::from(number),
            steps: STEPS,
            pause: Duration::from_millis(100),
            persists: false,
        };
        let work = client.run(fs, pool.env());
        let running = running.clone();
        pool.env().spawn(Box::pin(async move {
            work.await;
            running.fetch_sub(1, Ordering::SeqCst);
        }));
    }
    let mut dice = Dice(seed);
    for _ in 0..10 {
        pool.run_for(Duration::from_millis(dice.below(4000)));
        come_or_go(&pool, &mut dice);
        if faults != Faults::None {
            disturb(&pool, &mut dice, (faults, &history));
            pool.run_for(Duration::from_millis(dice.below(4000)));
            if dice.below(2) == 0 {
                sim.heal();
            }
            for at in 0..MACHINES {
                if dice.below(2) == 0 && !pool.is_up(at) {
                    pool.restart(at);
                }
            }
        }
    }
    sim.heal();
    sim.set_loss(MessageLoss::None);
    for at in 0..MACHINES {
        if !pool.is_up(at) {
            pool.restart(at);
        }
    }
    let until = sim.now() + DONE_WITHIN;
    while running.load(Ordering::SeqCst) > 0 {
        if sim.now() > until {
            return Err("clients have no answer".to_owned());
        }
        pool.run_for(Duration::from_millis(500));
    }
    for at in (0..MACHINES).filter(|at| !pool.is_up(*at)) {
        // It was begun anew with an empty disk, and was not let in, or never heard that it was.
        pool.remove(0, at).map_err(|error| format!("machine {at} is not removed: {error}"))?;
    }
    pool.compare()?;
    history.settled();
    let look = async {
        let fs = pool.mount(0).await;
        look_at_everything(&fs, &history, &grounds).await;
    };
    sim.block_on(LONG, look).unwrap();
    judge(&history, &grounds, &[Errno::EAGAIN, Errno::ETIMEDOUT])
}

/// A machine comes, is to go, or is removed. What is refused, or not answered, is not done: the pool is as it was.
fn come_or_go(pool: &Pool, dice: &mut Dice) {
    let up: Vec<usize> = (0..3).filter(|at| pool.is_up(*at)).collect();
    let Some(via) = up.first().copied() else { return };
    let at = 3 + dice.below(MACHINES as u64 - 3) as usize;
    let first = pool.first();
    let id = pool.peer(at).id;
    let belongs = first.enrolled.contains(id)
        || first.roster.groups().values().any(|group| group.members.contains(id));
    if !belongs {
        if pool.is_up(at) {
            pool.kill(at, InFlight::Lost);
        }
        pool.sim.restart(pool.host(at));
        *pool.hosts()[at].disks.kept() = Kept::default();
        drop(pool.join(via, at));
        return;
    }
    match dice.below(4) {
        0 => drop(pool.remove(via, at)),
        1 | 2 => drop(pool.let_go(via, at)),
        _ => drop(pool.set_copies(via, 2 + dice.below(2) as u8)),
    }
}

/// Something goes wrong.
fn disturb(pool: &Pool, dice: &mut Dice, (faults, history): (Faults, &History)) {
    let one = dice.below(MACHINES as u64) as usize;
    let other = (one + 1 + dice.below(MACHINES as u64 - 1) as usize) % MACHINES;
    let chance = dice.below(30) as f64 / 100.0;
    let kinds = if faults == Faults::Power { 10 } else { 8 };
    match dice.below(kinds) {
        kind if kind < NETWORK_FAULTS => {
            disturb_network(&pool.sim, (pool.host(one), pool.host(other)), chance, kind);
        }
        kind if kind < 8 => {
            let calls = if dice.below(2) == 0 { InFlight::Lost } else { InFlight::Late };
            if pool.is_up(one) {
                pool.kill(one, calls);
            }
        }
        kind => {
            let all: Vec<usize> = if kind == 8 { vec![one] } else { (0..MACHINES).collect() };
            for at in all.into_iter().filter(|at| pool.is_up(*at)) {
                pool.lose_power(at, Loss::Ordered, dice.below(1 << 32));
            }
            history.power_lost();
        }
    }
}

#[test]
fn groups_agree_while_machines_come_and_go() {
    for_each_seed(3, |seed| trial(seed, Faults::None));
}

#[test]
fn groups_agree_while_machines_come_go_and_are_killed() {
    for_each_seed(4, |seed| trial(seed, Faults::Kills));
}

#[test]
fn groups_agree_while_machines_come_go_and_lose_power() {
    for_each_seed(4, |seed| trial(seed, Faults::Power));
}
