//! How fast the simulator is: hosts that ping random others for ever.
//!
//! `cargo run --release -p atoll-sim --example ping_pong [HOSTS [VIRTUAL_SECONDS]]`

// It measures real time, which the simulator itself never reads.
#![allow(clippy::disallowed_methods)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use atoll_env::{BoxFuture, Env, random_below};
use atoll_net::{Peer, Refusal, Reply, Request, Service, Transport};
use atoll_sim::{HostConfig, Latency, PASTIS_SPHERE_MAX, Sim, SimConfig};
use bytes::Bytes;

struct Pong;

impl Service for Pong {
    fn handle(&self, _: Peer, request: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        Box::pin(async move { Ok(Reply { header: request.header, parts: Vec::new() }) })
    }
}

async fn ping_forever(env: Env, transport: Arc<dyn Transport>, peers: Arc<Vec<Peer>>) {
    loop {
        atoll_env::sleep(&*env, atoll_env::jittered(&*env, Duration::from_secs(1))).await;
        let to = peers[random_below(&*env, peers.len() as u64) as usize];
        let request = Request { method: 1, header: Bytes::from_static(b"ping"), parts: vec![] };
        let reply = transport.call(to, request, Duration::from_secs(5)).await;
        assert!(reply.is_ok(), "{reply:?}");
    }
}

/// Resident memory in KiB; 0 where the system does not tell.
fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap_or("0 0");
    line.split_whitespace().nth(1).and_then(|kib| kib.parse().ok()).unwrap_or(0)
}

fn main() {
    let argument = |at: usize, default: u64| {
        std::env::args().nth(at).map_or(default, |text| text.parse().expect("a number"))
    };
    let (host_count, span_secs) = (argument(1, 4096) as usize, argument(2, 60));
    let latency = Latency::Sphere { max: PASTIS_SPHERE_MAX };
    let sim = Sim::new(SimConfig { latency, ..SimConfig::default() });
    let empty_kib = resident_kib();
    let hosts = sim.add_hosts(host_count, &HostConfig::default());
    let hosts_kib = resident_kib() - empty_kib;
    let peers = Arc::new(hosts.iter().map(|host| sim.peer(*host)).collect::<Vec<Peer>>());
    let pong: Arc<dyn Service> = Arc::new(Pong);
    for host in &hosts {
        let (env, transport) = (sim.env(*host), sim.transport(*host));
        transport.serve(pong.clone());
        env.clone().spawn(Box::pin(ping_forever(env, transport, peers.clone())));
    }
    let began = Instant::now();
    sim.run_for(Duration::from_secs(span_secs));
    let took = began.elapsed().as_secs_f64();
    let (stats, events) = (sim.stats(), sim.event_count());
    let steps = events + stats.poll_count;
    println!("{host_count} hosts, {span_secs} virtual seconds in {took:.2} s");
    println!("{} calls: {:.2} us each", stats.call_count(), took * 1e6 / stats.call_count() as f64);
    println!("{events} events: {:.0} ns each", took * 1e9 / events as f64);
    println!("{steps} events and polls: {:.0} ns each", took * 1e9 / steps as f64);
    let per_host = hosts_kib as f64 * 1024.0 / host_count as f64;
    println!("{per_host:.0} bytes per idle host; {} MiB resident", resident_kib() / 1024);
    println!("trace {:032x}", sim.trace_hash());
}
