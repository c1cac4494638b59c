//! Crashes, restarts, partitions, loss.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use atoll_env::{BoxFuture, Env};
use atoll_net::{CallError, Peer, Refusal, Reply, Request, Service};
use atoll_sim::{HostConfig, Loss, Sim, SimConfig};

use crate::ping::{Echo, flat, millis, pair, request, secs, timed_call};

#[test]
fn a_crash_drops_the_hosts_tasks_and_timers() {
    let sim = Sim::new(flat(10));
    let hosts = sim.add_hosts(2, &HostConfig::default());
    let token = Arc::new(());
    for host in &hosts {
        let (held, env) = (token.clone(), sim.env(*host));
        let inner = env.clone();
        env.spawn(Box::pin(async move {
            let _held = held;
            loop {
                atoll_env::sleep(&*inner, secs(1)).await;
            }
        }));
    }
    sim.run_for(secs(2));
    assert_eq!(Arc::strong_count(&token), 3);
    sim.crash(hosts[0]);
    assert_eq!((Arc::strong_count(&token), sim.task_count()), (2, 1));
    let before = sim.stats().timer_count;
    sim.run_for(secs(10));
    assert_eq!(sim.stats().timer_count - before, 10, "only the survivor's timers fire");
}

#[test]
fn a_dead_process_is_unreachable_after_one_round_trip_and_a_dead_machine_silent() {
    let (sim, a, b) = pair(flat(10));
    sim.crash(b);
    let (reply, took) = timed_call(&sim, a, b, request("x"), secs(1));
    assert!(matches!(reply, Err(CallError::Unreachable(_))), "{reply:?}");
    assert_eq!(took, millis(20));
    sim.crash_silently(b);
    let (reply, took) = timed_call(&sim, a, b, request("x"), secs(1));
    assert_eq!((reply, took), (Err(CallError::TimedOut), secs(1)));
}

#[test]
fn callers_of_a_process_that_dies_at_work_learn_it() {
    for is_silent in [false, true] {
        let sim = Sim::new(flat(10));
        let hosts = sim.add_hosts(2, &HostConfig::default());
        Echo::serve(&sim, hosts[1], secs(60));
        let call = sim.transport(hosts[0]).call(sim.peer(hosts[1]), request("x"), secs(5));
        let env = sim.outside();
        let (sender, receiver) = futures_channel::oneshot::channel();
        env.spawn(Box::pin(async move { sender.send(call.await).unwrap() }));
        sim.run_for(secs(1));
        if is_silent {
            sim.crash_silently(hosts[1])
        } else {
            sim.crash(hosts[1])
        }
        let result = sim.block_on(secs(60), receiver).unwrap().unwrap();
        let expected_ns: u64 = if is_silent { 5_000_000_000 } else { 1_010_000_000 };
        assert_eq!((sim.now().as_nanos(), result.is_err()), (expected_ns, true), "{result:?}");
    }
}

#[test]
fn nothing_a_dead_incarnation_sent_is_delivered() {
    let sim = Sim::new(flat(10));
    let hosts = sim.add_hosts(2, &HostConfig::default());
    let echo = Echo::serve(&sim, hosts[1], Duration::ZERO);
    // A request under way when its sender dies, even if it comes back before.
    let call = sim.transport(hosts[0]).call(sim.peer(hosts[1]), request("old"), secs(5));
    sim.env(hosts[0]).spawn(Box::pin(async move { drop(call.await) }));
    sim.run_for(millis(5));
    sim.crash(hosts[0]);
    sim.restart(hosts[0]);
    sim.run_for(secs(1));
    assert_eq!(echo.heard_count(), 0);
    // A reply under way when its sender dies and comes back.
    let call = sim.transport(hosts[0]).call(sim.peer(hosts[1]), request("x"), secs(5));
    let (sender, receiver) = futures_channel::oneshot::channel();
    sim.outside().spawn(Box::pin(async move { sender.send(call.await).unwrap() }));
    sim.run_for(millis(15));
    assert_eq!(echo.heard_count(), 1);
    sim.restart(hosts[1]);
    let result = sim.block_on(secs(60), receiver).unwrap().unwrap();
    assert!(matches!(result, Err(CallError::Unreachable(_))), "{result:?}");
}

#[test]
fn handles_of_a_dead_incarnation_do_nothing() {
    let (sim, a, b) = pair(flat(10));
    let (old_env, old_transport) = (sim.env(a), sim.transport(a));
    let sleep = atoll_env::sleep(&*old_env, secs(1));
    let (env, transport) = sim.restart(a);
    let token = Arc::new(());
    let held = token.clone();
    old_env.spawn(Box::pin(async move { drop(held) }));
    assert_eq!(Arc::strong_count(&token), 1, "dropped at once");
    old_transport.serve(Arc::new(Refuse));
    let call = old_transport.call(sim.peer(b), request("x"), secs(1));
    assert!(matches!(sim.block_on(secs(2), call), Ok(Err(CallError::Unreachable(_)))));
    assert!(sim.block_on(secs(5), sleep).is_err(), "an old sleep never ends");
    // The new ones work; the old one's service was not taken.
    sim.block_on(secs(5), atoll_env::sleep(&*env, secs(1))).unwrap();
    let call = transport.call(sim.peer(b), request("x"), secs(1));
    assert!(sim.block_on(secs(2), call).unwrap().is_ok());
    let (reply, _) = timed_call(&sim, b, a, request("x"), secs(1));
    let Err(CallError::Refused(refusal)) = reply else { panic!("{reply:?}") };
    assert_eq!(refusal.code, Refusal::OVERLOADED);
}

struct Refuse;

impl Service for Refuse {
    fn handle(&self, _: Peer, _: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        Box::pin(async { Err(Refusal::new(100, "no")) })
    }
}

#[test]
fn a_restarted_host_answers_again_and_has_another_random_stream() {
    let (sim, a, b) = pair(flat(10));
    let first = sim.env(b).random_u64();
    let (env, _) = sim.restart(b);
    assert_ne!(env.random_u64(), first);
    Echo::serve(&sim, b, Duration::ZERO);
    assert!(timed_call(&sim, a, b, request("x"), secs(1)).0.is_ok());
}

/// Locks a mutex that is locked in its destructor too, and asks the runtime for things:
/// what a careless protocol does when it is dropped.
struct Careless {
    env: Env,
    drops: Arc<AtomicU64>,
}

impl Drop for Careless {
    fn drop(&mut self) {
        self.drops.fetch_add(1, Ordering::Relaxed);
        self.env.now();
        self.env.random_u64();
        let env = self.env.clone();
        self.env.spawn(Box::pin(async move { assert!(env.unix_ms() > 0) }));
    }
}

impl Service for Careless {
    fn handle(&self, _: Peer, _: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        let held = Careless { env: self.env.clone(), drops: self.drops.clone() };
        Box::pin(async move {
            let _held = held;
            std::future::pending().await
        })
    }
}

#[test]
fn destructors_of_a_crashed_host_may_use_its_handles() {
    let (sim, a, b) = pair(flat(10));
    let drops = Arc::new(AtomicU64::new(0));
    sim.transport(b).serve(Arc::new(Careless { env: sim.env(b), drops: drops.clone() }));
    let held = Careless { env: sim.env(b), drops: drops.clone() };
    let nested = sim.transport(b).call(sim.peer(a), request("x"), secs(60));
    sim.env(b).spawn(Box::pin(async move {
        let _held = held;
        let _ = nested.await;
        std::future::pending::<()>().await;
    }));
    let (reply, _) = timed_call(&sim, a, b, request("x"), secs(1));
    assert_eq!(reply, Err(CallError::TimedOut));
    sim.crash(b);
    assert_eq!(drops.load(Ordering::Relaxed), 3, "a handler, a service and a task");
}

#[test]
fn a_host_may_crash_itself_and_others_from_within_a_task() {
    let (sim, a, b) = pair(flat(10));
    let inner = sim.clone();
    let token = Arc::new(());
    let held = token.clone();
    sim.env(a).spawn(Box::pin(async move {
        let _held = held;
        inner.crash(a);
        inner.crash_silently(b);
        std::future::pending::<()>().await;
    }));
    sim.run_for(secs(1));
    assert!(!sim.is_up(a) && !sim.is_up(b));
    assert_eq!((Arc::strong_count(&token), sim.task_count()), (1, 0));
}

#[test]
fn a_partition_cuts_until_it_heals() {
    let sim = Sim::new(flat(10));
    let hosts = sim.add_hosts(5, &HostConfig::default());
    hosts.iter().for_each(|host| drop(Echo::serve(&sim, *host, Duration::ZERO)));
    sim.partition(&[&hosts[..2], &hosts[2..4]]);
    let reaches =
        |a: usize, b: usize| timed_call(&sim, hosts[a], hosts[b], request("x"), secs(1)).0.is_ok();
    assert!(reaches(0, 1) && reaches(2, 3) && reaches(4, 4));
    assert!(!reaches(0, 2) && !reaches(3, 1) && !reaches(4, 0) && !reaches(2, 4));
    sim.heal();
    assert!(reaches(0, 2) && reaches(4, 0));
}

#[test]
fn a_partition_loses_what_is_under_way() {
    let (sim, a, b) = pair(flat(10));
    let call = sim.transport(a).call(sim.peer(b), request("x"), secs(1));
    sim.env(a).spawn(Box::pin(async move { drop(call.await) }));
    sim.run_for(millis(5));
    sim.partition(&[&[a]]);
    sim.run_for(millis(100));
    assert_eq!(sim.stats().methods[&crate::ping::PING].delivered_count, 0);
    assert!(sim.stats().lost_count >= 1);
}

#[test]
fn a_one_way_cut_loses_replies_but_not_requests() {
    let sim = Sim::new(flat(10));
    let hosts = sim.add_hosts(2, &HostConfig::default());
    let echoes: Vec<_> = hosts.iter().map(|h| Echo::serve(&sim, *h, Duration::ZERO)).collect();
    sim.cut(&hosts[1..], &hosts[..1]);
    let (reply, _) = timed_call(&sim, hosts[0], hosts[1], request("x"), secs(1));
    assert_eq!((reply, echoes[1].heard_count()), (Err(CallError::TimedOut), 1));
    let (reply, _) = timed_call(&sim, hosts[1], hosts[0], request("x"), secs(1));
    assert_eq!((reply, echoes[0].heard_count()), (Err(CallError::TimedOut), 0));
}

#[test]
fn lost_messages_time_out_at_the_rate_asked_for() {
    let loss = Loss::Drop { chance: 0.1 };
    let (sim, a, b) = pair(SimConfig { loss, ..flat(10) });
    let failed =
        (0..2000).filter(|_| timed_call(&sim, a, b, request("x"), secs(1)).0.is_err()).count();
    // 1 − 0.9² = 0.19 of the calls; four standard deviations.
    assert!((310..450).contains(&failed), "{failed} of 2000");
    sim.set_loss(Loss::None);
    assert!((0..100).all(|_| timed_call(&sim, a, b, request("x"), secs(1)).0.is_ok()));
}

#[test]
fn a_retransmitted_message_comes_late_by_doubling_timeouts() {
    let loss = Loss::Retransmit { chance: 0.3, first_timeout: millis(200) };
    let (sim, a, b) = pair(SimConfig { loss, ..flat(10) });
    let mut delays = std::collections::BTreeMap::new();
    for _ in 0..500 {
        let (reply, took) = timed_call(&sim, a, b, request("x"), secs(600));
        if reply.is_ok() {
            *delays.entry((took - millis(20)).as_millis() / 200).or_insert(0) += 1;
        }
    }
    // Request and reply each late by 0, 1, 1 + 2, 1 + 2 + 4 ... timeouts: 0.49 not late.
    assert!((200..290).contains(&delays[&0]), "{delays:?}");
    assert!(delays[&1] > 100 && delays[&2] > 10 && delays[&3] > 20, "{delays:?}");
    assert!(!delays.contains_key(&5), "no sum of two of 0, 1, 3, 7: {delays:?}");
}

#[test]
fn a_caller_that_crashes_cancels_its_handlers() {
    let sim = Sim::new(flat(10));
    let hosts = sim.add_hosts(2, &HostConfig::default());
    Echo::serve(&sim, hosts[1], secs(60));
    let call = sim.transport(hosts[0]).call(sim.peer(hosts[1]), request("x"), secs(100));
    let seen: Arc<Mutex<Option<Result<Reply, CallError>>>> = Arc::default();
    let slot = seen.clone();
    sim.env(hosts[0]).spawn(Box::pin(async move {
        let result = call.await;
        *slot.lock().unwrap() = Some(result);
    }));
    sim.run_for(secs(1));
    assert_eq!(sim.task_count(), 2);
    sim.crash(hosts[0]);
    sim.run_for(millis(11));
    assert_eq!(sim.task_count(), 0, "the handler was told");
    assert!(seen.lock().unwrap().is_none());
}

#[test]
fn a_stopped_process_does_nothing_until_it_goes_on_and_then_all_that_has_waited() {
    let (sim, a, b) = pair(flat(10));
    Echo::serve(&sim, a, Duration::ZERO);
    let env = sim.env(b);
    let ticks = Arc::new(AtomicU64::new(0));
    let (inner, count) = (env.clone(), ticks.clone());
    env.spawn(Box::pin(async move {
        loop {
            atoll_env::sleep(&*inner, secs(1)).await;
            count.fetch_add(1, Ordering::Relaxed);
        }
    }));
    // Its own call is answered while it is stopped, and its deadline passes.
    let own = sim.transport(b).call(sim.peer(a), request("own"), secs(2));
    let answer = Arc::new(Mutex::new(None));
    let heard = answer.clone();
    env.spawn(Box::pin(async move { *heard.lock().unwrap() = Some(own.await) }));
    sim.run_for(millis(5));
    sim.freeze(b);
    let (reply, took) = timed_call(&sim, a, b, request("short"), secs(1));
    assert_eq!((reply, took), (Err(CallError::TimedOut), secs(1)), "its connections are open");
    let (sender, receiver) = futures_channel::oneshot::channel();
    let patient = sim.transport(a).call(sim.peer(b), request("patient"), secs(60));
    sim.outside().spawn(Box::pin(async move { sender.send(patient.await).unwrap() }));
    sim.run_for(secs(9));
    assert_eq!((ticks.load(Ordering::Relaxed), answer.lock().unwrap().is_none()), (0, true));
    sim.check_invariants();
    let thawed = sim.now();
    sim.thaw(b);
    assert!(sim.block_on(secs(60), receiver).unwrap().unwrap().is_ok());
    assert_eq!(sim.now().since(thawed), millis(10), "the request had arrived");
    assert!(matches!(*answer.lock().unwrap(), Some(Ok(_))), "it had arrived");
    sim.run_for(secs(2));
    assert_eq!(ticks.load(Ordering::Relaxed), 3, "one was due, and then each second");
    sim.check_invariants();
}

#[test]
fn a_stopped_process_can_be_killed() {
    for is_silent in [false, true] {
        let (sim, a, b) = pair(flat(10));
        sim.freeze(b);
        let (sender, receiver) = futures_channel::oneshot::channel();
        let call = sim.transport(a).call(sim.peer(b), request("x"), secs(60));
        sim.outside().spawn(Box::pin(async move { sender.send(call.await).unwrap() }));
        sim.run_for(secs(5));
        if is_silent {
            sim.crash_silently(b)
        } else {
            sim.crash(b)
        }
        let result = sim.block_on(secs(100), receiver).unwrap().unwrap();
        assert_eq!(sim.now().since(atoll_env::Instant(0)) < secs(6), !is_silent, "{result:?}");
        assert!(result.is_err());
        sim.restart(b);
        sim.transport(b).serve(Arc::new(Refuse));
        let (reply, took) = timed_call(&sim, a, b, request("x"), secs(1));
        assert!(matches!(reply, Err(CallError::Refused(_))) && took == millis(20), "{reply:?}");
        sim.check_invariants();
    }
}
