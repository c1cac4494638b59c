//! One seed, one run: a churny scenario, twice.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use atoll_env::{Env, random_below};
use atoll_net::{Peer, Transport};
use atoll_sim::{EventKind, HostConfig, HostId, Latency, Loss, Sim, SimConfig};

use crate::ping::{Echo, millis, request, secs};

const HOSTS: usize = 40;

/// A host that pings random others for ever.
fn start(sim: &Sim, host: HostId, peers: Arc<Vec<Peer>>, answered: Arc<AtomicU64>) {
    let (env, transport) = (sim.env(host), sim.transport(host));
    Echo::serve(sim, host, millis(3));
    env.clone().spawn(Box::pin(ping_forever(env, transport, peers, answered)));
}

async fn ping_forever(
    env: Env,
    transport: Arc<dyn Transport>,
    peers: Arc<Vec<Peer>>,
    answered: Arc<AtomicU64>,
) {
    loop {
        atoll_env::sleep(&*env, atoll_env::jittered(&*env, millis(200))).await;
        let to = peers[random_below(&*env, peers.len() as u64) as usize];
        let call = transport.call(to, request("ping"), millis(800));
        // Some callers lose patience before the deadline.
        let patience = millis(100 + random_below(&*env, 2000));
        if let Ok(Ok(_)) = atoll_env::timeout(&*env, patience, call).await {
            answered.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Crashes, restarts, cuts and heals at random, as a task of no host.
async fn wreak_havoc(sim: Sim, hosts: Vec<HostId>, restart: impl Fn(HostId) + Send) {
    let env = sim.outside();
    let below = |bound: usize| random_below(&*env, bound as u64) as usize;
    loop {
        atoll_env::sleep(&*env, millis(150)).await;
        let host = hosts[below(hosts.len())];
        match below(6) {
            0 => sim.crash(host),
            1 => sim.crash_silently(host),
            2 | 3 => restart(host),
            4 => match below(3) {
                0 => sim.partition(&[&hosts[..below(hosts.len())]]),
                _ => sim.cut(&[host], &hosts[..HOSTS / 2]),
            },
            _ => sim.heal(),
        }
    }
}

struct Outcome {
    hash: u128,
    events: u64,
    stats: atoll_sim::Stats,
}

fn scenario(seed: u64) -> Outcome {
    let sim = Sim::new(SimConfig {
        seed,
        latency: Latency::Sphere { max: millis(300) },
        jitter: 0.2,
        loss: Loss::Drop { chance: 0.02 },
        ..SimConfig::default()
    });
    let line = HostConfig {
        upload_bytes_per_sec: Some(100_000),
        download_bytes_per_sec: Some(400_000),
        ..HostConfig::default()
    };
    let hosts = sim.add_hosts(HOSTS, &line);
    let mut steps = 0u64;
    sim.step_hook(move |sim, _| {
        steps += 1;
        if steps.is_multiple_of(7) {
            sim.check_invariants();
        }
    });
    let peers: Arc<Vec<Peer>> = Arc::new(hosts.iter().map(|host| sim.peer(*host)).collect());
    let answered = Arc::new(AtomicU64::new(0));
    hosts.iter().for_each(|host| start(&sim, *host, peers.clone(), answered.clone()));
    let havoc = {
        let (sim, peers, answered) = (sim.clone(), peers.clone(), answered.clone());
        let handle = sim.clone();
        wreak_havoc(handle, hosts.clone(), move |host| {
            sim.restart(host);
            start(&sim, host, peers.clone(), answered.clone());
        })
    };
    let havoc = sim.outside().spawn(Box::pin(havoc));
    sim.run_for(secs(60));
    let amid_faults = answered.load(Ordering::Relaxed);
    assert!(amid_faults > 500, "{amid_faults} pings were answered in spite of it all");

    // Then the faults end, and within a while every ping is answered.
    havoc.abort();
    sim.heal();
    sim.set_loss(Loss::None);
    for host in &hosts {
        sim.restart(*host);
        start(&sim, *host, peers.clone(), answered.clone());
    }
    let (timed_out, before) = (sim.stats().timed_out_count, answered.load(Ordering::Relaxed));
    sim.eventually(secs(20), "hosts ping each other again", |_| {
        answered.load(Ordering::Relaxed) > before + 400
    });
    assert_eq!(sim.stats().timed_out_count, timed_out);
    Outcome { hash: sim.trace_hash(), events: sim.event_count(), stats: sim.stats() }
}

#[test]
fn one_seed_gives_one_event_trace() {
    let (first, again, other) = (scenario(42), scenario(42), scenario(43));
    assert_eq!((first.hash, first.events, &first.stats), (again.hash, again.events, &again.stats));
    assert_ne!(first.hash, other.hash);
    assert!(first.events > 10_000, "{} events", first.events);
    let stats = &first.stats;
    assert!(stats.lost_count > 100 && stats.timed_out_count > 100, "{stats:?}");
}

#[test]
fn the_trace_tells_the_last_events_in_words() {
    let sim = Sim::new(SimConfig {
        latency: Latency::Flat(millis(10)),
        trace_last_count: 3,
        ..SimConfig::default()
    });
    let hosts = sim.add_hosts(2, &HostConfig::default());
    Echo::serve(&sim, hosts[1], Duration::ZERO);
    let _ = crate::ping::timed_call(&sim, hosts[0], hosts[1], request("four"), secs(1));
    sim.crash(hosts[1]);
    let trace = sim.trace();
    let kinds: Vec<EventKind> = trace.iter().map(|event| event.kind).collect();
    assert_eq!(kinds, [EventKind::Request, EventKind::Reply, EventKind::Crash]);
    assert_eq!(trace[1].to_string(), "0.020000s Reply h1 -> h0 method 0x0101, 4 bytes");
}

/// A late change of one byte's length anywhere shows in the hash.
#[test]
fn the_hash_depends_on_every_event() {
    let run = |text: &'static str, ms: u64| {
        let sim =
            Sim::new(SimConfig { latency: Latency::Flat(millis(ms)), ..SimConfig::default() });
        let hosts = sim.add_hosts(2, &HostConfig::default());
        let _ = crate::ping::timed_call(&sim, hosts[0], hosts[1], request(text), secs(1));
        let _ = crate::ping::timed_call(&sim, hosts[0], hosts[1], request("end"), secs(1));
        sim.trace_hash()
    };
    assert_eq!(run("ab", 5), run("cd", 5), "content is not part of it, as events are not");
    assert_ne!(run("ab", 5), run("abc", 5));
    assert_ne!(run("ab", 5), run("ab", 6));
}
