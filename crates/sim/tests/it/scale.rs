//! Many hosts, in bounded memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use atoll_env::BoxFuture;
use atoll_net::{Peer, Refusal, Reply, Request, Service};
use atoll_sim::{HostConfig, Latency, PASTIS_SPHERE_MAX, RunEnd, Sim, SimConfig};

use crate::ping::{millis, request, secs};

struct Pong;

impl Service for Pong {
    fn handle(&self, _: Peer, request: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        Box::pin(async move { Ok(Reply { header: request.header, parts: Vec::new() }) })
    }
}

/// Resident memory in KiB; 0 where the system does not tell.
fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap_or("0 0");
    line.split_whitespace().nth(1).and_then(|kib| kib.parse().ok()).unwrap_or(0)
}

#[test]
fn twenty_thousand_hosts_ping_in_bounded_memory() {
    const HOSTS: usize = 20_000;
    const ROUNDS: u64 = 5;
    let before_kib = resident_kib();
    let latency = Latency::Sphere { max: PASTIS_SPHERE_MAX };
    let sim = Sim::new(SimConfig { latency, ..SimConfig::default() });
    let hosts = sim.add_hosts(HOSTS, &HostConfig::default());
    let pong: Arc<dyn Service> = Arc::new(Pong);
    let answered = Arc::new(AtomicU64::new(0));
    for (index, host) in hosts.iter().enumerate() {
        let transport = sim.transport(*host);
        transport.serve(pong.clone());
        let (env, answered) = (sim.env(*host), answered.clone());
        let to = sim.peer(hosts[(index * 7 + 1) % HOSTS]);
        env.clone().spawn(Box::pin(async move {
            for _ in 0..ROUNDS {
                atoll_env::sleep(&*env, atoll_env::jittered(&*env, millis(1000))).await;
                if transport.call(to, request("ping"), secs(30)).await.is_ok() {
                    answered.fetch_add(1, Ordering::Relaxed);
                }
            }
        }));
    }
    assert_eq!(sim.run_until_idle_or(secs(60)), RunEnd::Idle);
    assert_eq!(answered.load(Ordering::Relaxed), HOSTS as u64 * ROUNDS);
    assert_eq!((sim.task_count(), sim.pending_calls().len()), (0, 0));
    // Hosts, their tasks and calls at once, the heap with its dead deadlines; other
    // tests run beside this one, so the bound is a generous 6 KiB a host.
    let used_kib = resident_kib().saturating_sub(before_kib);
    assert!(used_kib < 6 * HOSTS as u64, "{used_kib} KiB for {HOSTS} hosts");
}
