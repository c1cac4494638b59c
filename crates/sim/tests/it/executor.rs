//! Tasks, timers, wakers, and what drives them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};
use std::time::Duration;

use atoll_sim::{HostConfig, HostId, RunEnd, Sim, SimConfig, Step};

use crate::ping::{Echo, flat, millis, request, secs};

type Log = Arc<Mutex<Vec<u64>>>;

fn note(log: &Log, value: u64) {
    log.lock().unwrap().push(value);
}

#[test]
fn timers_fire_in_order_of_time_and_then_of_creation() {
    let config = SimConfig { shuffle_tasks: false, ..flat(1) };
    let sim = Sim::new(config);
    let env = sim.env(sim.add_host(HostConfig::default()));
    let log = Log::default();
    for (number, ms) in [30, 10, 20, 10, 0, 30].into_iter().enumerate() {
        let (log, sleep) = (log.clone(), atoll_env::sleep(&*env, millis(ms)));
        env.spawn(Box::pin(async move {
            sleep.await;
            note(&log, number as u64);
        }));
    }
    assert_eq!(sim.run_until_idle_or(secs(1)), RunEnd::Idle);
    assert_eq!(*log.lock().unwrap(), [4, 1, 3, 2, 0, 5]);
    assert_eq!(sim.now().as_nanos(), 30_000_000);
}

#[test]
fn shuffled_tasks_run_in_an_order_that_follows_from_the_seed() {
    let order = |seed| {
        let sim = Sim::new(SimConfig { seed, ..flat(1) });
        let env = sim.outside();
        let log = Log::default();
        for number in 0..20 {
            let log = log.clone();
            env.spawn(Box::pin(async move { note(&log, number) }));
        }
        sim.run_for(millis(1));
        Arc::into_inner(log).unwrap().into_inner().unwrap()
    };
    assert_eq!(order(1), order(1));
    assert_ne!(order(1), order(2));
    let mut sorted = order(3);
    sorted.sort_unstable();
    assert_eq!(sorted, (0..20).collect::<Vec<_>>());
}

#[test]
fn a_run_goes_up_to_its_limit_and_no_further() {
    let sim = Sim::new(flat(1));
    let env = sim.outside();
    let log = Log::default();
    let (inner, noted) = (env.clone(), log.clone());
    env.spawn(Box::pin(async move {
        loop {
            atoll_env::sleep(&*inner, secs(1)).await;
            note(&noted, inner.now().as_nanos());
        }
    }));
    sim.run_for(millis(2500));
    assert_eq!(log.lock().unwrap().len(), 2);
    assert_eq!(sim.now().as_nanos(), 2_500_000_000);
    sim.run_for(millis(500));
    assert_eq!(log.lock().unwrap().len(), 3, "what is due at the limit happens");
    assert_eq!(sim.run_until_idle_or(secs(10)), RunEnd::Limit);
    assert!(sim.run_until_true(secs(10), |_| log.lock().unwrap().len() == 15));
    assert!(!sim.run_until_true(secs(10), |_| false));
}

#[test]
fn an_aborted_task_is_dropped_and_a_second_abort_is_harmless() {
    let sim = Sim::new(flat(1));
    let env = sim.env(sim.add_host(HostConfig::default()));
    let token = Arc::new(());
    let (held, inner) = (token.clone(), env.clone());
    let task = env.spawn(Box::pin(async move {
        let _held = held;
        atoll_env::sleep(&*inner, secs(9)).await;
    }));
    sim.run_for(secs(1));
    assert_eq!(Arc::strong_count(&token), 2);
    task.abort();
    task.abort();
    assert_eq!((Arc::strong_count(&token), sim.task_count()), (1, 0));
    assert_eq!(sim.run_until_idle_or(secs(20)), RunEnd::Idle, "its timer went with it");
    // The slot is used again; the old handle does not reach the new task.
    let held = token.clone();
    env.spawn(Box::pin(async move {
        let _held = held;
        std::future::pending::<()>().await;
    }));
    task.abort();
    assert_eq!(Arc::strong_count(&token), 2);
}

#[test]
fn a_waker_kept_after_the_end_of_its_task_wakes_nobody() {
    let sim = Sim::new(flat(1));
    let env = sim.outside();
    let kept: Arc<Mutex<Option<Waker>>> = Arc::default();
    let slot = kept.clone();
    env.spawn(Box::pin(std::future::poll_fn(move |cx| {
        *slot.lock().unwrap() = Some(cx.waker().clone());
        Poll::Ready(())
    })));
    sim.run_for(millis(1));
    let polls = Arc::new(AtomicU64::new(0));
    let counted = polls.clone();
    // Takes the same slot.
    env.spawn(Box::pin(std::future::poll_fn(move |_| {
        counted.fetch_add(1, Ordering::Relaxed);
        Poll::Pending
    })));
    sim.run_for(millis(1));
    let waker = kept.lock().unwrap().take().unwrap();
    waker.wake_by_ref();
    waker.wake();
    sim.run_for(millis(1));
    assert_eq!(polls.load(Ordering::Relaxed), 1);
    drop(sim);
}

#[test]
fn tasks_talk_by_channels_and_may_be_awaited_from_outside() {
    let sim = Sim::new(flat(1));
    let env = sim.env(sim.add_host(HostConfig::default()));
    let (sender, receiver) = futures_channel::oneshot::channel();
    let inner = env.clone();
    env.spawn(Box::pin(async move {
        atoll_env::sleep(&*inner, secs(3)).await;
        sender.send(5).unwrap();
    }));
    assert_eq!(sim.block_on(secs(5), receiver).unwrap(), Ok(5));
    assert_eq!(sim.now().as_nanos(), 3_000_000_000);
}

#[test]
fn combinators_with_their_own_wakers_work() {
    let sim = Sim::new(flat(1));
    let env = sim.outside();
    let sleeps = (1..=50).map(|i| {
        let sleep = atoll_env::sleep(&*env, millis(100 - i));
        async move {
            sleep.await;
            i
        }
    });
    let all = futures_util::future::join_all(sleeps);
    assert_eq!(sim.block_on(secs(1), all).unwrap().iter().sum::<u64>(), 1275);
    assert_eq!(sim.now().as_nanos(), 99_000_000);
}

#[test]
fn block_on_reports_who_is_stuck() {
    let sim = Sim::new(flat(10));
    let hosts = sim.add_hosts(2, &HostConfig::default());
    Echo::serve(&sim, hosts[1], secs(3600));
    let call = sim.transport(hosts[0]).call(sim.peer(hosts[1]), request("x"), secs(7200));
    let stuck = sim.block_on(secs(5), call).unwrap_err();
    assert_eq!((stuck.at.as_nanos(), stuck.is_idle), (5_000_000_000, false));
    let call = stuck.pending_calls[0];
    assert_eq!((call.from, call.to, call.is_being_served), (hosts[0], hosts[1], true));
    assert_eq!(stuck.tasks_by_host, [(hosts[1], 1)]);
    let text = stuck.to_string();
    assert!(text.contains("h0 calls h1, method 0x0101, for 5s"), "{text}");
    assert!(text.contains("seed 0") && text.contains("being served"), "{text}");
}

#[test]
fn block_on_sees_a_deadlock_without_waiting_for_the_limit() {
    let sim = Sim::new(flat(10));
    let stuck = sim.block_on(secs(1000), std::future::pending::<()>()).unwrap_err();
    assert!(stuck.is_idle && stuck.to_string().contains("nothing is left to happen"));
}

#[test]
fn the_hook_is_called_after_every_step() {
    let sim = Sim::new(flat(10));
    let hosts = sim.add_hosts(2, &HostConfig::default());
    Echo::serve(&sim, hosts[1], millis(1));
    let steps: Arc<Mutex<Vec<Step>>> = Arc::default();
    let seen = steps.clone();
    sim.step_hook(move |sim, step| {
        assert!(sim.now().as_nanos() <= 21_000_000);
        seen.lock().unwrap().push(step);
    });
    let call = sim.transport(hosts[0]).call(sim.peer(hosts[1]), request("x"), secs(1));
    sim.block_on(secs(1), call).unwrap().unwrap();
    let expected = [
        Step::Event(hosts[1]), // the request
        Step::Polled(hosts[1]),
        Step::Event(hosts[1]), // its timer
        Step::Polled(hosts[1]),
        Step::Event(hosts[0]), // the reply
    ];
    assert_eq!(*steps.lock().unwrap(), expected);
    sim.clear_hooks();
    let env = sim.outside();
    sim.block_on(secs(1), atoll_env::sleep(&*env, millis(1))).unwrap();
    assert_eq!(steps.lock().unwrap().len(), 5);
}

#[test]
#[should_panic(expected = "livelock")]
fn tasks_that_never_let_time_pass_are_a_livelock() {
    let sim = Sim::new(SimConfig { max_steps_per_instant: 1000, ..flat(1) });
    sim.outside().spawn(Box::pin(std::future::poll_fn(|cx| {
        cx.waker().wake_by_ref();
        Poll::Pending
    })));
    sim.run_for(secs(1));
}

#[test]
#[should_panic(expected = "not run from within itself")]
fn the_simulation_is_not_run_from_within() {
    let sim = Sim::new(flat(1));
    let inner = sim.clone();
    sim.outside().spawn(Box::pin(async move { inner.run_for(secs(1)) }));
    sim.run_for(secs(1));
}

#[test]
fn a_dropped_simulation_drops_its_tasks_and_services() {
    let sim = Sim::new(flat(1));
    let hosts = sim.add_hosts(2, &HostConfig::default());
    let echo = Echo::serve(&sim, hosts[1], millis(1));
    let env = sim.env(hosts[0]);
    let token = Arc::new(());
    let (held, inner) = (token.clone(), env.clone());
    env.spawn(Box::pin(async move {
        let _held = held;
        atoll_env::sleep(&*inner, secs(9)).await;
    }));
    sim.run_for(secs(1));
    drop(sim);
    assert_eq!((Arc::strong_count(&token), Arc::strong_count(&echo)), (1, 1));
}

#[test]
fn clocks_may_be_wrong_and_random_numbers_differ_by_host() {
    let sim = Sim::new(SimConfig { unix_epoch_ms: 1_000_000, ..flat(1) });
    let right = sim.env(sim.add_host(HostConfig::default()));
    let slow = sim.env(sim.add_host(HostConfig { clock_skew_ms: -5000, ..HostConfig::default() }));
    sim.run_for(Duration::from_millis(1500));
    assert_eq!((right.unix_ms(), slow.unix_ms()), (1_001_500, 996_500));
    assert_eq!(right.now(), slow.now());
    assert_ne!(right.random_u64(), slow.random_u64());
    sim.set_clock_skew_ms(HostId(0), 3_600_000);
    assert_eq!((right.unix_ms(), right.now().as_nanos()), (4_601_500, 1_500_000_000));
}

struct LocksOnDrop(Arc<Mutex<u64>>);

impl Drop for LocksOnDrop {
    fn drop(&mut self) {
        *self.0.lock().unwrap() += 1;
    }
}

/// Tokio drops an aborted task later. A protocol that aborts a task while it holds a
/// lock which the task's destructor takes would otherwise hang only when simulated.
#[test]
fn an_aborted_task_is_dropped_only_when_the_aborting_one_suspends() {
    let sim = Sim::new(flat(1));
    let env = sim.env(sim.add_host(HostConfig::default()));
    let dropped = Arc::new(Mutex::new(0));
    let held = LocksOnDrop(dropped.clone());
    let victim = env.spawn(Box::pin(async move {
        let _held = held;
        std::future::pending::<()>().await;
    }));
    sim.run_for(secs(1));
    let count = dropped.clone();
    env.spawn(Box::pin(async move {
        let guard = count.lock().unwrap();
        victim.abort();
        assert_eq!(*guard, 0);
    }));
    sim.run_for(secs(1));
    assert_eq!((*dropped.lock().unwrap(), sim.task_count()), (1, 0));
}

#[test]
#[should_panic(expected = "not within 5s: the moon is reached; stuck at 8s with seed 0")]
fn progress_can_be_demanded() {
    let sim = Sim::new(flat(1));
    let env = sim.outside();
    let (inner, log) = (env.clone(), Log::default());
    env.spawn(Box::pin(async move {
        loop {
            atoll_env::sleep(&*inner, secs(1)).await;
            note(&log, 0);
        }
    }));
    sim.eventually(secs(5), "three seconds pass", |sim| sim.now().as_nanos() == 3_000_000_000);
    sim.eventually(secs(5), "the moon is reached", |_| false);
}
