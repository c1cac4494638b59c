//! What rings go through, and what is measured of them.

use std::sync::Arc;
use std::time::Duration;

use atoll_dht::{Blocks, Dht, DhtConfig, rpc};
use atoll_env::{BoxFuture, Env, Instant, random_below, sleep};
use atoll_net::{Peer, Refusal, Reply, Request, Service};
use atoll_overlay::chord::{ChordConfig, TablePolicy};
use atoll_sim::{Connections, HostConfig, Latency, Sim, SimConfig, Stats, TcpModel};
use futures_util::{StreamExt, stream};

use crate::LabError;
use crate::cfs::sites;
use crate::churn::schedule;
use crate::churning::{ChurningRing, Tables};
use crate::experiment::Context;
use crate::malicious::let_lie;
use crate::ring::{LIMIT, Network, Plan, Ring, block};
use crate::setting::Setting;
use crate::statistics::percentile;

/// What a ring goes through.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Situation {
    /// Nothing happens.
    Rest,
    /// Nodes come and go as in Overnet; tables are full at the beginning.
    Churn,
    /// The same; all nodes have just begun.
    Cold,
    /// Three in ten nodes have vanished a moment ago; six copies.
    Dead,
    /// The same, and puts come before lookups: three copies.
    DeadPuts,
    /// One in five nodes lies, as in `malicious`; tables are fingers, as if there were no budget
    /// for more. With full tables hardly any lookup asks a liar for the way.
    Lying,
    /// Measured distances, TCP.
    Wan,
    /// The same; everybody reads one block.
    Popular,
    /// The same; one node in five answers one question in three a second and a half late.
    Stall,
    /// The same; uplinks carry four megabits a second and puts are long.
    Lines,
}

impl Situation {
    pub(super) const ALL: [Situation; 10] = [
        Situation::Rest,
        Situation::Churn,
        Situation::Cold,
        Situation::Dead,
        Situation::DeadPuts,
        Situation::Lying,
        Situation::Wan,
        Situation::Popular,
        Situation::Stall,
        Situation::Lines,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            Situation::Rest => "rest",
            Situation::Churn => "churn",
            Situation::Cold => "cold tables",
            Situation::Dead => "30 % just died",
            Situation::DeadPuts => "30 % just died; puts first",
            Situation::Lying => "20 % lie",
            Situation::Wan => "WAN",
            Situation::Popular => "popular block",
            Situation::Stall => "20 % stall",
            Situation::Lines => "slow lines",
        }
    }

    fn is_wide(self) -> bool {
        matches!(self, Situation::Wan | Situation::Popular | Situation::Stall | Situation::Lines)
    }

    fn block_bytes(self) -> usize {
        if self == Situation::Lines { 65_536 } else { 8192 }
    }
}

/// How much is done.
#[derive(Clone, Copy)]
pub(super) struct Size {
    pub nodes: usize,
    pub blocks: usize,
    pub lookups: usize,
    pub puts: usize,
    pub rest_secs: u64,
}

/// What was measured of one ring; times are those of lookups and puts that succeeded.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Measured {
    /// Calls of the block layer for each lookup, those that were not answered included.
    pub lookup_rpcs: f64,
    pub lookup_bytes: f64,
    pub lookup_median_ms: f64,
    pub lookup_p95_ms: f64,
    /// Shares of all.
    pub failed_lookups: f64,
    pub busiest_share: f64,
    pub put_rpcs: f64,
    pub put_bytes: f64,
    pub put_median_ms: f64,
    pub put_p95_ms: f64,
    pub failed_puts: f64,
    /// Sent and received by a node for its tables.
    pub upkeep_bytes_per_sec: f64,
}

/// Lookups and puts under way at a time.
const PARALLEL: usize = 10;
/// Puts before anything is measured that are under way at a time.
const PARALLEL_FIRST_PUTS: usize = 4;
/// Blocks of one put.
const PUT_BLOCKS: usize = 8;
/// Round trips of a new connection: TCP, and TLS 1.3 with our greeting.
const HANDSHAKE_ROUND_TRIPS: u32 = 2;
/// A node's access line in the wide area, if nodes share a site. A guess.
const ACCESS_DELAY: Duration = Duration::from_millis(2);
/// Four megabits.
const UPLINK_BYTES_PER_SEC: u64 = 500_000;
/// CFS §7.2.5.
const PAPER_REPLICAS: usize = 6;
const STALL: Duration = Duration::from_millis(1500);
/// Counted for each message beside its header and parts, as the simulator does.
const MESSAGE_BYTES: u64 = 96;
const OVERLAY: u16 = 1;
const DHT: u16 = 2;

/// Runs a situation with something switched off.
pub(super) fn measure(
    context: &Context<'_>,
    size: Size,
    situation: Situation,
    switch_off: fn(&mut ChordConfig, &mut DhtConfig),
    seed: u64,
) -> Result<Measured, LabError> {
    let setting = Setting::Default;
    let (mut chord, mut dht) = (setting.chord(size.nodes), setting.dht());
    if matches!(situation, Situation::Lying | Situation::Dead) {
        dht.replicas = PAPER_REPLICAS;
    }
    if situation == Situation::Lying {
        chord.table = TablePolicy::Fingers;
    }
    switch_off(&mut chord, &mut dht);
    let mut network = Network::plain(None);
    if situation.is_wide() {
        let file = context.options.latency.clone();
        let matrix = file.map_or_else(|| sites::round_trips(None, seed), Ok)?;
        network.latency = Some(Latency::Matrix(matrix));
        let tcp = TcpModel::today().with_handshake(HANDSHAKE_ROUND_TRIPS);
        network.connections = Connections::Tcp(tcp);
        let mut link = HostConfig { access_delay: ACCESS_DELAY, ..HostConfig::default() };
        if situation == Situation::Lines {
            link.upload_bytes_per_sec = Some(UPLINK_BYTES_PER_SEC);
        }
        network.links = vec![link; size.nodes];
    }
    let (nodes, virtual_servers) = (size.nodes, Vec::new());
    let plan = Plan { seed, nodes, chord, dht, upkeep: true, virtual_servers, network };
    match situation {
        Situation::Churn | Situation::Cold => churning(context, plan, size, situation),
        _ => still(&plan, size, situation),
    }
}

/// A ring whose nodes do not come and go.
fn still(plan: &Plan, size: Size, situation: Situation) -> Result<Measured, LabError> {
    let ring = Ring::new(plan);
    let anybody = || ring.members[ring.random_below(size.nodes)].dht.clone();
    fill(&ring.sim, &anybody, size, situation)?;
    let mut measured = Measured::default();
    let mut others: Vec<usize> = (0..size.nodes).collect();
    let mut choose = |percent: usize| -> Vec<usize> {
        let count = size.nodes * percent / 100;
        for n in 0..count {
            let chosen = n + ring.random_below(others.len() - n);
            others.swap(n, chosen);
        }
        others.drain(..count).collect()
    };
    match situation {
        Situation::Dead | Situation::DeadPuts => {
            let dead = choose(30);
            dead.iter().for_each(|n| ring.sim.crash_silently(ring.members[*n].host));
        }
        Situation::Lying => let_lie(&ring, &choose(20)),
        Situation::Stall => choose(20).iter().for_each(|n| let_stall(&ring, *n)),
        Situation::Rest => {
            let span = Duration::from_secs(size.rest_secs);
            ring.sim.run_for(span);
            let before = ring.sim.stats();
            ring.sim.run_for(span);
            measured.upkeep_bytes_per_sec = upkeep(&before, &ring.sim.stats(), span, size.nodes);
        }
        _ => {}
    }
    let subject = Subject {
        sim: &ring.sim,
        anybody: &|| ring.members[others[ring.random_below(others.len())]].dht.clone(),
        situation,
    };
    if situation == Situation::DeadPuts {
        subject.put(size, &mut measured)?;
        subject.look_up(size, &mut measured)?;
        return Ok(measured);
    }
    let served = || -> Vec<u64> { ring.members.iter().map(|m| m.dht.stats().served).collect() };
    let before = served();
    subject.look_up(size, &mut measured)?;
    let of_each: Vec<u64> = before.iter().zip(served()).map(|(then, now)| now - then).collect();
    let total = of_each.iter().sum::<u64>().max(1);
    measured.busiest_share = *of_each.iter().max().expect("nodes") as f64 / total as f64;
    subject.put(size, &mut measured)?;
    Ok(measured)
}

fn churning(
    context: &Context<'_>,
    plan: Plan,
    size: Size,
    situation: Situation,
) -> Result<Measured, LabError> {
    let random = Sim::new(SimConfig { seed: plan.seed, ..SimConfig::default() }).outside();
    let trace = context.options.availability.as_deref();
    let schedule = schedule(trace, size.nodes, 4.0 * size.rest_secs as f64 + 600.0, &random)?;
    let tables = if situation == Situation::Cold { Tables::Cold } else { Tables::Full };
    let mut ring = ChurningRing::new(plan, schedule, tables);
    let span = Duration::from_secs(size.rest_secs);
    let mut measured = Measured::default();
    fill(&ring.sim, &|| ring.anybody().1, size, situation)?;
    ring.run_until(ring.sim.now() + span);
    let before = ring.sim.stats();
    ring.run_until(ring.sim.now() + span);
    measured.upkeep_bytes_per_sec = upkeep(&before, &ring.sim.stats(), span, ring.up_count());
    let subject = Subject { sim: &ring.sim, anybody: &|| ring.anybody().1, situation };
    subject.look_up(size, &mut measured)?;
    subject.put(size, &mut measured)?;
    Ok(measured)
}

/// Puts the blocks that are looked up later. One that is not taken is not found then, and counted.
fn fill(
    sim: &Sim,
    anybody: &dyn Fn() -> Arc<Dht>,
    size: Size,
    situation: Situation,
) -> Result<(), LabError> {
    let all: Vec<usize> = (0..size.blocks).collect();
    let puts: Vec<_> = all
        .chunks(PUT_BLOCKS)
        .map(|batch| {
            let blocks = batch.iter().map(|n| block(*n, situation.block_bytes())).collect();
            let dht = anybody();
            async move { dht.put(blocks).await }
        })
        .collect();
    let puts = stream::iter(puts).buffer_unordered(PARALLEL_FIRST_PUTS).collect::<Vec<_>>();
    let puts = sim.block_on(LIMIT, puts).map_err(|stuck| LabError::Failed(stuck.to_string()))?;
    let failed = puts.iter().filter(|put| put.is_err()).count();
    if failed * 2 > puts.len() {
        return Err(LabError::Failed(format!("{failed} of {} puts failed", puts.len())));
    }
    Ok(())
}

/// What is measured, in a run that has come so far.
struct Subject<'a> {
    sim: &'a Sim,
    anybody: &'a dyn Fn() -> Arc<Dht>,
    situation: Situation,
}

impl Subject<'_> {
    /// Looks random blocks up from random nodes.
    fn look_up(&self, size: Size, measured: &mut Measured) -> Result<(), LabError> {
        let (random, env) = (self.sim.outside(), self.sim.outside());
        let blocks = if self.situation == Situation::Popular { 1 } else { size.blocks };
        let work = (0..size.lookups).map(|_| {
            let dht = (self.anybody)();
            let n = random_below(&*random, blocks as u64) as usize;
            let hash = block(n, self.situation.block_bytes()).0;
            timed(&env, async move { dht.lookup(hash).await.is_ok() })
        });
        let done = self.run(work.collect())?;
        let cost = |value: f64| value / size.lookups.max(1) as f64;
        (measured.lookup_rpcs, measured.lookup_bytes) = (cost(done.calls), cost(done.bytes));
        measured.lookup_median_ms = percentile(&done.times_ms, 0.5);
        measured.lookup_p95_ms = percentile(&done.times_ms, 0.95);
        measured.failed_lookups = cost(done.failed);
        Ok(())
    }

    /// Puts new blocks from random nodes.
    fn put(&self, size: Size, measured: &mut Measured) -> Result<(), LabError> {
        let env = self.sim.outside();
        let work = (0..size.puts).map(|nth| {
            let dht = (self.anybody)();
            let first = size.blocks + nth * PUT_BLOCKS;
            let blocks = first..first + PUT_BLOCKS;
            let blocks = blocks.map(|n| block(n, self.situation.block_bytes())).collect();
            timed(&env, async move { dht.put(blocks).await.is_ok() })
        });
        let done = self.run(work.collect())?;
        let cost = |value: f64| value / size.puts.max(1) as f64;
        (measured.put_rpcs, measured.put_bytes) = (cost(done.calls), cost(done.bytes));
        measured.put_median_ms = percentile(&done.times_ms, 0.5);
        measured.put_p95_ms = percentile(&done.times_ms, 0.95);
        measured.failed_puts = cost(done.failed);
        Ok(())
    }

    fn run(&self, work: Vec<BoxFuture<'static, (bool, Duration)>>) -> Result<Done, LabError> {
        let before = self.sim.stats();
        let work = stream::iter(work).buffer_unordered(PARALLEL).collect::<Vec<_>>();
        let done = self.sim.block_on(LIMIT, work);
        let done = done.map_err(|stuck| LabError::Failed(stuck.to_string()))?;
        let (calls, bytes) = spent(&before, &self.sim.stats(), DHT);
        let succeeded = done.iter().filter(|(is_done, _)| *is_done);
        let mut times_ms: Vec<f64> = succeeded.map(|(_, took)| took.as_secs_f64() * 1e3).collect();
        times_ms.sort_unstable_by(f64::total_cmp);
        let failed = done.iter().filter(|(is_done, _)| !is_done).count() as f64;
        if times_ms.is_empty() {
            return Err(LabError::Failed("all lookups or puts failed".into()));
        }
        Ok(Done { times_ms, failed, calls: calls as f64, bytes: bytes as f64 })
    }
}

struct Done {
    times_ms: Vec<f64>,
    failed: f64,
    calls: f64,
    bytes: f64,
}

fn timed(
    env: &Env,
    work: impl Future<Output = bool> + Send + 'static,
) -> BoxFuture<'static, (bool, Duration)> {
    let env = env.clone();
    Box::pin(async move {
        let start: Instant = env.now();
        let is_done = work.await;
        (is_done, env.now().since(start))
    })
}

/// Calls of a family, and their bytes.
fn spent(before: &Stats, after: &Stats, family: u16) -> (u64, u64) {
    let sum = |stats: &Stats| {
        let of_family = stats.methods.iter().filter(|(method, _)| **method >> 8 == family);
        of_family.fold((0, 0), |(calls, bytes), (_, m)| {
            let messages = m.call_count + m.reply_count;
            let sent = m.request_bytes + m.reply_bytes + MESSAGE_BYTES * messages;
            (calls + m.call_count, bytes + sent)
        })
    };
    let ((calls, bytes), (now_calls, now_bytes)) = (sum(before), sum(after));
    (now_calls - calls, now_bytes - bytes)
}

/// Bytes a second of upkeep that a node sends and receives.
fn upkeep(before: &Stats, after: &Stats, span: Duration, nodes: usize) -> f64 {
    let (_, bytes) = spent(before, after, OVERLAY);
    2.0 * bytes as f64 / span.as_secs_f64() / nodes.max(1) as f64
}

/// From now on a node answers some questions of the block layer late.
fn let_stall(ring: &Ring, at: usize) {
    let env = ring.sim.env(ring.members[at].host);
    ring.disguise(at, |honest, _| Arc::new(Stalling { env, honest }));
}

struct Stalling {
    env: Env,
    honest: Arc<dyn Service>,
}

impl Service for Stalling {
    fn handle(&self, from: Peer, request: Request) -> BoxFuture<'static, Result<Reply, Refusal>> {
        let is_late = random_below(&*self.env, 3) == 0;
        let is_block = matches!(request.method, rpc::LOOKUP_STEP | rpc::PUT);
        let (env, answer) = (self.env.clone(), self.honest.handle(from, request));
        Box::pin(async move {
            if is_late && is_block {
                sleep(&*env, STALL).await;
            }
            answer.await
        })
    }
}
