//! How many RPCs a lookup takes for how much upkeep, while nodes come and go.
//!
//! CFS needs ½·log2 N RPCs (6.7 at 4,096 servers, Figure 9), and does not say what keeping
//! the tables costs. Here nodes come and go ([`crate::churn`]) while blocks are looked up
//! from nodes all over the ring: with the paper's fingers, whose upkeep runs at its pace
//! and ever more slowly, and with the adaptive table on several budgets. (Li, Stribling, Morris and Kaashoek,
//! "Bandwidth-efficient management of DHT routing tables", NSDI 2005, look at Chord in the
//! same plane.)
//!
//! What upkeep costs is measured, not believed: the bytes of all overlay messages, both
//! ways, with the simulated network's overhead for each, over the nodes that are up.

use std::sync::Arc;
use std::time::Duration;

use atoll_dht::Blocks;
use atoll_env::random_below;
use atoll_sim::Stats;
use futures_util::{StreamExt, stream};

use crate::LabError;
use crate::chart::{Axis, Chart, Ink, Mark, Point, Series};
use crate::churn::schedule;
use crate::churning::ChurningRing;
use crate::experiment::{Context, Experiment, Group};
use crate::outcome::{Comparison, Csv, Outcome};
use crate::ring::{LIMIT, Network, Plan, block};
use crate::setting::Setting;
use crate::statistics::{Summary, summary};

pub(crate) const GROUP: Group = Group {
    experiments: &[Experiment {
        name: "lookup-budget",
        title: "RPCs per lookup against the bandwidth of upkeep, under churn",
        source: "CFS §7.2.1; Accordion, NSDI 2005",
        nodes: Some(32..=20_000),
    }],
    run,
};

/// Upkeep so many times slower than by default.
const SLOWER: [u32; 4] = [1, 2, 4, 8];
const QUICK_SLOWER: [u32; 2] = [1, 4];
/// Budgets of the adaptive table, bytes a second; what the stabilisation of successor lists
/// costs is in them, and is spent also where it exceeds them.
const BUDGETS: [u64; 5] = [64, 512, 1024, 2048, 4096];
const QUICK_BUDGETS: [u64; 2] = [64, 2048];
/// Wanted of a table that adapts: at 4,096 nodes, 2.0 RPCs within 1 KiB/s.
const WANTED: (f64, f64) = (1024.0, 2.0);
/// Ends of the plot, bytes a second.
const LEAST_BYTES: f64 = 64.0;
const MOST_BYTES: f64 = 4096.0;
const BLOCK_BYTES: usize = 64;
/// Lookups under way at a time.
const PARALLEL: usize = 20;
/// Lookups are spread over so many moments, so that churn goes on between them.
const ROUNDS: usize = 20;
const QUICK_ROUNDS: usize = 8;
const ROUND: Duration = Duration::from_secs(15);
/// Methods of the overlay: `0x01xx`.
const OVERLAY_FAMILY: u16 = 0x01;
/// The upper byte of a method is its family.
const FAMILY_SHIFT: u16 = 8;
/// Beside the header, by `SimConfig::message_overhead_bytes`.
const MESSAGE_BYTES: u64 = 96;

/// A ring's tables and their upkeep.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Upkeep {
    /// Fingers alone, looked after so many times more slowly.
    Fingers(u32),
    /// The adaptive table with so many bytes a second.
    Budget(u64),
    /// As shipped.
    Shipped,
}

impl Upkeep {
    fn name(self) -> String {
        match self {
            Upkeep::Fingers(1) => "fingers".to_owned(),
            Upkeep::Fingers(times) => format!("fingers-{times}-times-slower"),
            Upkeep::Budget(bytes) => format!("budget-{bytes}"),
            Upkeep::Shipped => "default".to_owned(),
        }
    }
}

/// One ring.
struct Found {
    upkeep: Upkeep,
    seed: u64,
    nodes: f64,
    rpcs: Summary,
    unanswered: f64,
    failed: usize,
    upkeep_bytes_per_sec: f64,
}

fn run(context: &Context<'_>) -> Result<Vec<Outcome>, LabError> {
    let nodes = context.nodes(4096, 128);
    let lookups = context.size(4000, 400);
    let warm_up = Duration::from_secs(context.size(1800, 240) as u64);
    let seeds = context.seeds(1, 1);
    let slower = if context.options.quick { &QUICK_SLOWER[..] } else { &SLOWER[..] };
    let budgets = if context.options.quick { &QUICK_BUDGETS[..] } else { &BUDGETS[..] };
    let fingers = slower.iter().map(|times| Upkeep::Fingers(*times));
    let adaptive = budgets.iter().map(|bytes| Upkeep::Budget(*bytes));
    let kinds: Vec<Upkeep> = fingers.chain(adaptive).chain([Upkeep::Shipped]).collect();
    let parts: Vec<(Upkeep, u64)> =
        seeds.iter().flat_map(|seed| kinds.iter().map(|kind| (*kind, *seed))).collect();
    let mut found = context.each(&parts, |(upkeep, seed)| {
        let plan = plan(context, *upkeep, nodes, *seed);
        measure(context, plan, *upkeep, nodes, lookups, warm_up)
    })?;
    found.sort_by_key(|found| (found.upkeep, found.seed));
    Ok(vec![outcome(context, &found, &kinds, nodes, lookups, warm_up, &seeds)])
}

fn plan(context: &Context<'_>, upkeep: Upkeep, nodes: usize, seed: u64) -> Plan {
    let setting = match upkeep {
        Upkeep::Fingers(_) => Setting::Paper,
        Upkeep::Budget(_) | Upkeep::Shipped => Setting::Default,
    };
    let (mut chord, mut dht) = (setting.chord(nodes), setting.dht());
    if let Upkeep::Fingers(times) = upkeep {
        chord.stabilize_every *= times;
        chord.fix_fingers_every *= times;
        chord.merge_every *= times;
        // Under churn the dead must be forgotten as usual.
        chord.suspect_for = Setting::Default.chord(nodes).suspect_for;
    }
    if let Upkeep::Budget(bytes) = upkeep {
        chord.table_budget_bytes_per_sec = bytes;
    }
    // The same blocks on the same nodes for all, and no cache that would do the work.
    dht.replicas = Setting::Default.dht().replicas;
    dht.cache_bytes = 0;
    let network = Network::plain(context.options.latency.clone());
    Plan { seed, nodes, chord, dht, upkeep: true, virtual_servers: Vec::new(), network }
}

fn measure(
    context: &Context<'_>,
    plan: Plan,
    upkeep: Upkeep,
    nodes: usize,
    lookups: usize,
    warm_up: Duration,
) -> Result<Found, LabError> {
    let seed = plan.seed;
    let rounds = context.size(ROUNDS, QUICK_ROUNDS);
    let length = warm_up + ROUND * (rounds as u32 + 2);
    let random = atoll_sim::Sim::new(atoll_sim::SimConfig { seed, ..Default::default() }).outside();
    let trace = context.options.availability.as_deref();
    let schedule = schedule(trace, nodes, length.as_secs_f64(), &random)?;
    let mut ring = ChurningRing::new(plan, schedule);
    ring.run_until(atoll_env::Instant(0) + warm_up);
    put(&ring, lookups)?;
    let (before, began) = (ring.sim.stats(), ring.sim.now());
    let mut found = Found {
        upkeep,
        seed,
        nodes: 0.0,
        rpcs: Summary::default(),
        unanswered: 0.0,
        failed: 0,
        upkeep_bytes_per_sec: 0.0,
    };
    let (mut rpcs, mut unanswered, mut up) = (Vec::new(), 0, 0);
    for _ in 0..rounds {
        let until = ring.sim.now() + ROUND;
        for result in look_up(&ring, lookups, lookups / rounds)? {
            match result {
                Some((answered, silent)) => {
                    rpcs.push(answered as f64);
                    unanswered += silent;
                }
                None => found.failed += 1,
            }
        }
        ring.run_until(until);
        up += ring.up_count();
    }
    let secs = ring.sim.now().since(began).as_secs_f64();
    found.nodes = up as f64 / rounds as f64;
    found.unanswered = unanswered as f64 / rpcs.len().max(1) as f64;
    found.rpcs = summary(rpcs);
    let bytes = overlay_bytes(&ring.sim.stats()) - overlay_bytes(&before);
    // Each message is sent by one node and received by another, and both pay.
    found.upkeep_bytes_per_sec = 2.0 * bytes as f64 / secs / found.nodes;
    Ok(found)
}

fn put(ring: &ChurningRing, blocks: usize) -> Result<(), LabError> {
    let all: Vec<usize> = (0..blocks).collect();
    let puts = stream::iter(all.chunks(32).map(|numbers| {
        let (_, dht) = ring.anybody();
        let blocks = numbers.iter().map(|n| block(*n, BLOCK_BYTES)).collect();
        async move { dht.put(blocks).await }
    }));
    let puts = ring.sim.block_on(LIMIT, puts.buffer_unordered(PARALLEL).collect::<Vec<_>>());
    let puts = puts.map_err(|stuck| LabError::Failed(stuck.to_string()))?;
    // Under churn a put may fail; its blocks are then not found, and counted.
    let failed = puts.iter().filter(|put| put.is_err()).count();
    if failed * 10 > puts.len() {
        return Err(LabError::Failed(format!("{failed} of {} puts failed", puts.len())));
    }
    Ok(())
}

/// Looks random blocks up from random nodes: calls answered and not answered of each, or
/// nothing where it failed.
fn look_up(
    ring: &ChurningRing,
    blocks: usize,
    count: usize,
) -> Result<Vec<Option<(usize, usize)>>, LabError> {
    let random = ring.sim.outside();
    let lookups = (0..count).map(|_| {
        let (_, dht): (_, Arc<atoll_dht::Dht>) = ring.anybody();
        let hash = block(random_below(&*random, blocks as u64) as usize, BLOCK_BYTES).0;
        async move {
            let fetched = dht.lookup(hash).await.ok()?;
            Some((fetched.trace.calls(), fetched.trace.failures()))
        }
    });
    let lookups: Vec<_> = lookups.collect();
    let work = stream::iter(lookups).buffer_unordered(PARALLEL).collect::<Vec<_>>();
    ring.sim.block_on(LIMIT, work).map_err(|stuck| LabError::Failed(stuck.to_string()))
}

fn overlay_bytes(stats: &Stats) -> u64 {
    stats
        .methods
        .iter()
        .filter(|(method, _)| **method >> FAMILY_SHIFT == OVERLAY_FAMILY)
        .map(|(_, m)| {
            m.request_bytes + m.reply_bytes + MESSAGE_BYTES * (m.call_count + m.reply_count)
        })
        .sum()
}

/// Over the runs of one kind: RPCs, calls without an answer, bytes a second.
fn over_runs(found: &[Found], upkeep: Upkeep) -> [f64; 3] {
    let mean = |value: fn(&Found) -> f64| {
        summary(found.iter().filter(|f| f.upkeep == upkeep).map(value)).mean
    };
    [mean(|f| f.rpcs.mean), mean(|f| f.unanswered), mean(|f| f.upkeep_bytes_per_sec)]
}

fn csv(found: &[Found]) -> Csv {
    let mut csv = Csv::new(&[
        "tables",
        "seed",
        "nodes_up",
        "mean_rpcs",
        "sd",
        "unanswered",
        "failed",
        "lookups",
        "upkeep_bytes_per_sec",
    ]);
    for f in found {
        let [nodes, mean, deviation, unanswered, upkeep] =
            [f.nodes, f.rpcs.mean, f.rpcs.deviation, f.unanswered, f.upkeep_bytes_per_sec]
                .map(|n| format!("{n:.3}"));
        let (name, count) = (f.upkeep.name(), f.rpcs.count + f.failed);
        csv.row(&[
            &name,
            &f.seed,
            &nodes,
            &mean,
            &deviation,
            &unanswered,
            &f.failed,
            &count,
            &upkeep,
        ]);
    }
    csv
}

fn outcome(
    context: &Context<'_>,
    found: &[Found],
    kinds: &[Upkeep],
    nodes: usize,
    lookups: usize,
    warm_up: Duration,
    seeds: &[u64],
) -> Outcome {
    let (fingers, shipped) = (Upkeep::Fingers(1), Upkeep::Shipped);
    let line = |quantity: &str, paper: &str, value: &dyn Fn([f64; 3]) -> String| {
        let [ours, default] = [fingers, shipped].map(|kind| value(over_runs(found, kind)));
        Comparison::new(quantity, paper, ours, default)
    };
    let failed = |kind| {
        let of_kind = || found.iter().filter(move |f| f.upkeep == kind);
        let failed: usize = of_kind().map(|f| f.failed).sum();
        format!("{failed} of {}", failed + of_kind().map(|f| f.rpcs.count).sum::<usize>())
    };
    let paper = if nodes == 4096 { "6.7, without churn" } else { "" };
    let churn = if context.options.availability.is_some() { "of the file" } else { "Overnet's" };
    Outcome {
        name: "lookup-budget",
        title: "RPCs per lookup by upkeep bandwidth".into(),
        source: "CFS §7.2.1; Accordion, NSDI 2005",
        setup: format!(
            "about {nodes} nodes up, churn {churn}; {lookups} lookups from random nodes after \
             {} minutes",
            warm_up.as_secs() / 60
        ),
        comparison: vec![
            line("RPCs per lookup", paper, &|[rpcs, ..]| format!("{rpcs:.2}")),
            line("calls without an answer, per lookup", "", &|[_, silent, _]| {
                format!("{silent:.3}")
            }),
            line("upkeep of a node (bytes/s)", "", &|[.., bytes]| format!("{bytes:.0}")),
            Comparison::new("lookups that failed", "", failed(fingers), failed(shipped)),
        ],
        notes: vec![
            "Upkeep is measured: all overlay messages, sent and received, 96 bytes besides the \
             header each."
                .into(),
        ],
        csv: csv(found),
        chart: chart(found, kinds, nodes, churn),
        seeds: seeds.to_vec(),
    }
}

fn chart(found: &[Found], kinds: &[Upkeep], nodes: usize, churn: &str) -> Chart {
    let half_log = (nodes as f64).log2() / 2.0;
    let point = |kind: &Upkeep| {
        let [rpcs, _, bytes] = over_runs(found, *kind);
        Point::new(bytes, rpcs)
    };
    let points = |wanted: &dyn Fn(&Upkeep) -> bool| {
        let mut points: Vec<Point> = kinds.iter().filter(|kind| wanted(kind)).map(point).collect();
        points.sort_by(|a, b| a.x.total_cmp(&b.x));
        points
    };
    let fingers = points(&|kind| matches!(kind, Upkeep::Fingers(_)));
    let adaptive = points(&|kind| matches!(kind, Upkeep::Budget(_)));
    let across = |y: f64| vec![Point::new(LEAST_BYTES, y), Point::new(MOST_BYTES, y)];
    let line = |name: &str, ink, mark, points| Series { name: name.into(), ink, mark, points };
    let mut series = vec![
        line("½·log2 N", Ink::Grey, Mark::Dashed, across(half_log)),
        line(
            "Atoll, paper's settings: fingers, upkeep at several paces",
            Ink::Blue,
            Mark::Squares,
            fingers,
        ),
        line("Atoll, adaptive table on several budgets", Ink::Green, Mark::Crosses, adaptive),
        line("Atoll, default settings", Ink::Vermilion, Mark::Discs, vec![point(&Upkeep::Shipped)]),
    ];
    if nodes == 4096 {
        let wanted = vec![Point::new(WANTED.0, WANTED.1)];
        series.push(line("wanted: 2.0 RPCs at 1 KiB/s", Ink::Black, Mark::Pluses, wanted));
        series.push(line("CFS paper, no churn: 6.7 RPCs", Ink::Black, Mark::Dotted, across(6.7)));
    }
    let up = summary(found.iter().map(|f| f.nodes)).mean;
    let ticks = std::iter::successors(Some(LEAST_BYTES), |n| Some(n * 2.0));
    Chart {
        title: "RPCs per lookup by upkeep bandwidth".into(),
        subtitle: format!("{up:.0} nodes up on average, churn {churn}"),
        x: Axis::log(
            "upkeep of a node, measured (bytes/s)",
            LEAST_BYTES,
            MOST_BYTES,
            ticks.take_while(|n| *n <= MOST_BYTES).collect(),
        ),
        y: Axis::up_to(
            "RPCs per lookup (mean)",
            half_log.max(if nodes == 4096 { 6.7 } else { 0.0 }),
        ),
        series,
    }
}
