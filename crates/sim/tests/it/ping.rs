//! Services and calls that the tests share.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use atoll_env::{BoxFuture, Env};
use atoll_net::{CallError, Peer, Refusal, Reply, Request, Service, Transport};
use atoll_sim::{HostConfig, HostId, Latency, Loss, Sim, SimConfig};
use bytes::Bytes;

pub(crate) const PING: u16 = 0x0101;

/// Answers with what it was sent, after a while, and remembers who sent what.
pub(crate) struct Echo {
    env: Env,
    work: Duration,
    pub heard: Mutex<Vec<(Peer, Bytes)>>,
}

impl Echo {
    pub(crate) fn serve(sim: &Sim, host: HostId, work: Duration) -> Arc<Echo> {
        let echo = Arc::new(Echo { env: sim.env(host), work, heard: Mutex::new(Vec::new()) });
        sim.transport(host).serve(echo.clone());
        echo
    }

    pub(crate) fn heard_count(&self) -> usize {
        self.heard.lock().unwrap().len()
    }
}

impl Service for Echo {
    fn handle(&self, from: Peer, request: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        self.heard.lock().unwrap().push((from, request.header.clone()));
        let rest = atoll_env::sleep(&*self.env, self.work);
        Box::pin(async move {
            rest.await;
            Ok(Reply { header: request.header, parts: request.parts })
        })
    }
}

pub(crate) fn millis(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

pub(crate) fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

pub(crate) fn request(header: &'static str) -> Request {
    Request { method: PING, header: Bytes::from_static(header.as_bytes()), parts: Vec::new() }
}

/// Two hosts 10 ms apart, the second with an echo.
pub(crate) fn pair(config: SimConfig) -> (Sim, HostId, HostId) {
    let sim = Sim::new(config);
    let hosts = sim.add_hosts(2, &HostConfig::default());
    Echo::serve(&sim, hosts[1], Duration::ZERO);
    (sim, hosts[0], hosts[1])
}

pub(crate) fn flat(ms: u64) -> SimConfig {
    SimConfig { latency: Latency::Flat(millis(ms)), loss: Loss::None, ..SimConfig::default() }
}

/// A call from one host to another, with the virtual time it took.
pub(crate) fn timed_call(
    sim: &Sim,
    from: HostId,
    to: HostId,
    request: Request,
    limit: Duration,
) -> (Result<Reply, CallError>, Duration) {
    let transport: Arc<dyn Transport> = sim.transport(from);
    let began = sim.now();
    let work = transport.call(sim.peer(to), request, limit);
    let result = sim.block_on(secs(3600), work).expect("a call ends by its deadline");
    (result, sim.now().since(began))
}
