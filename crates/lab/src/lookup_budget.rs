//! How many RPCs a lookup takes for how much upkeep: the adaptive routing table.
//!
//! CFS needs ½·log2 N RPCs (6.7 at 4,096 servers, Figure 9), whatever its nodes could
//! spare. Atoll's table grows with a bandwidth budget, after Li, Stribling, Morris and
//! Kaashoek, "Bandwidth-efficient management of DHT routing tables" (NSDI 2005). Here
//! nodes come and go ([`crate::churn`]) while blocks are looked up from nodes all over the
//! ring, once for each budget, and once with fingers alone.
//!
//! What upkeep costs is measured, not believed: the bytes of all overlay messages, both
//! ways, with the simulated network's overhead for each, over the nodes that are up.

use std::sync::Arc;
use std::time::Duration;

use atoll_dht::Blocks;
use atoll_env::random_below;
use atoll_overlay::chord::ChordConfig;
use atoll_sim::Stats;
use futures_util::{StreamExt, stream};

use crate::LabError;
use crate::chart::{Axis, Chart, Ink, Mark, Point, Series};
use crate::churn::schedule;
use crate::churning::ChurningRing;
use crate::experiment::{Context, Experiment, Group};
use crate::outcome::{Comparison, Csv, Outcome};
use crate::ring::{LIMIT, Network, Plan, block};
use crate::setting::{self, Setting};
use crate::statistics::{Summary, summary};

pub(crate) const GROUP: Group = Group {
    experiments: &[Experiment {
        name: "lookup-budget",
        title: "RPCs per lookup against the bandwidth given to upkeep, under churn",
        source: "CFS §7.2.1; Accordion, NSDI 2005",
        nodes: Some(32..=20_000),
    }],
    run,
};

/// Bytes a second for each node.
const BUDGETS: [u64; 7] = [16, 64, 128, 256, 512, 1024, 4096];
const QUICK_BUDGETS: [u64; 2] = [16, 1024];
/// The claim: "at most 2.0 RPCs on average within a budget of 1 KiB/s per node".
const CLAIMED_BUDGET: u64 = 1024;
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

/// One ring: with a budget, or with fingers alone.
struct Found {
    budget: Option<u64>,
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
    let budgets = if context.options.quick { &QUICK_BUDGETS[..] } else { &BUDGETS[..] };
    let mut parts: Vec<(Option<u64>, u64)> = Vec::new();
    for seed in &seeds {
        parts.push((None, *seed));
        parts.extend(budgets.iter().rev().map(|budget| (Some(*budget), *seed)));
    }
    let mut found = context.each(&parts, |(budget, seed)| {
        let plan = plan(context, *budget, nodes, *seed);
        measure(context, plan, *budget, nodes, lookups, warm_up)
    })?;
    found.sort_by_key(|found| (found.budget, found.seed));
    Ok(vec![outcome(context, &found, nodes, lookups, warm_up, &seeds)])
}

fn plan(context: &Context<'_>, budget: Option<u64>, nodes: usize, seed: u64) -> Plan {
    let (chord, setting): (ChordConfig, _) = match budget {
        None => (Setting::Paper.chord(nodes), Setting::Paper),
        Some(budget) => {
            let mut chord = Setting::Default.chord(nodes);
            setting::set_budget(&mut chord, budget);
            (chord, Setting::Default)
        }
    };
    let mut dht = setting.dht();
    // The same blocks on the same nodes for all, and no cache that would do the work.
    dht.replicas = Setting::Default.dht().replicas;
    dht.cache_bytes = 0;
    let network = Network::plain(context.options.latency.clone());
    Plan { seed, nodes, chord, dht, upkeep: true, virtual_servers: Vec::new(), network }
}

fn measure(
    context: &Context<'_>,
    plan: Plan,
    budget: Option<u64>,
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
        budget,
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

fn outcome(
    context: &Context<'_>,
    found: &[Found],
    nodes: usize,
    lookups: usize,
    warm_up: Duration,
    seeds: &[u64],
) -> Outcome {
    let half_log = (nodes as f64).log2() / 2.0;
    let of = |budget: Option<u64>| {
        let runs = || found.iter().filter(move |f| f.budget == budget);
        let rpcs = summary(runs().map(|f| f.rpcs.mean)).mean;
        let unanswered = summary(runs().map(|f| f.unanswered)).mean;
        let upkeep = summary(runs().map(|f| f.upkeep_bytes_per_sec)).mean;
        (rpcs, unanswered, upkeep)
    };
    let said = |budget| {
        let (rpcs, unanswered, upkeep) = of(budget);
        format!("{rpcs:.2} (+{unanswered:.2} unanswered) at {upkeep:.0} B/s")
    };
    let fingers = said(None);
    let mut budgets: Vec<u64> = found.iter().filter_map(|f| f.budget).collect();
    budgets.dedup();
    let comparison = budgets
        .iter()
        .map(|budget| {
            let paper = if *budget == CLAIMED_BUDGET && nodes == 4096 { "6.7" } else { "" };
            let quantity = format!("RPCs per lookup, budget {budget} B/s");
            Comparison::new(quantity, paper, fingers.clone(), said(Some(*budget)))
        })
        .collect();
    let mut csv = Csv::new(&[
        "budget_bytes_per_sec",
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
        let budget = f.budget.map_or_else(|| "fingers".to_owned(), |budget| budget.to_string());
        let [nodes, mean, deviation, unanswered, upkeep] =
            [f.nodes, f.rpcs.mean, f.rpcs.deviation, f.unanswered, f.upkeep_bytes_per_sec]
                .map(|n| format!("{n:.3}"));
        let count = f.rpcs.count + f.failed;
        csv.row(&[
            &budget,
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
    let churn = if context.options.availability.is_some() { "of the file" } else { "Overnet's" };
    let failed: usize = found.iter().map(|f| f.failed).sum();
    let all: usize = found.iter().map(|f| f.failed + f.rpcs.count).sum();
    Outcome {
        name: "lookup-budget",
        title: "RPCs per lookup by upkeep bandwidth".into(),
        source: "CFS §7.2.1; Accordion, NSDI 2005",
        setup: format!(
            "about {nodes} nodes up, churn {churn}; {lookups} lookups from random nodes after \
             {} minutes",
            warm_up.as_secs() / 60
        ),
        comparison,
        notes: vec![
            format!("{failed} of {all} lookups failed."),
            "Upkeep is measured: all overlay messages, sent and received, 96 bytes besides the \
             header each."
                .into(),
        ],
        csv,
        chart: chart(found, &budgets, nodes, half_log, churn, &of),
        seeds: seeds.to_vec(),
    }
}

fn chart(
    found: &[Found],
    budgets: &[u64],
    nodes: usize,
    half_log: f64,
    churn: &str,
    of: &dyn Fn(Option<u64>) -> (f64, f64, f64),
) -> Chart {
    let ends = [budgets[0] as f64, budgets[budgets.len() - 1] as f64];
    let across = |y: f64| vec![Point::new(ends[0], y), Point::new(ends[1], y)];
    let with_budget = |value: &dyn Fn(Option<u64>) -> f64| -> Vec<Point> {
        budgets.iter().map(|budget| Point::new(*budget as f64, value(Some(*budget)))).collect()
    };
    let line = |name: String, ink, mark, points| Series { name, ink, mark, points };
    let mut series = vec![
        line("½·log2 N".into(), Ink::Grey, Mark::Dashed, across(half_log)),
        line(
            "Atoll, paper's settings: fingers alone".into(),
            Ink::Blue,
            Mark::Line,
            across(of(None).0),
        ),
        line(
            "Atoll, default settings, this budget".into(),
            Ink::Vermilion,
            Mark::Discs,
            with_budget(&|b| of(b).0),
        ),
        line(
            "the same, calls without an answer counted too".into(),
            Ink::Orange,
            Mark::Triangles,
            with_budget(&|b| of(b).0 + of(b).1),
        ),
    ];
    if nodes == 4096 {
        let claimed = vec![Point::new(CLAIMED_BUDGET as f64, 2.0)];
        series.push(line("wanted: 2.0 RPCs at 1 KiB/s".into(), Ink::Black, Mark::Pluses, claimed));
        series.push(line("CFS paper: 6.7 RPCs".into(), Ink::Black, Mark::Dotted, across(6.7)));
    }
    let up = summary(found.iter().map(|f| f.nodes)).mean;
    Chart {
        title: "RPCs per lookup by upkeep bandwidth".into(),
        subtitle: format!("{up:.0} nodes up on average, churn {churn}"),
        x: Axis::log(
            "budget of a node (bytes/s)",
            ends[0],
            ends[1],
            budgets.iter().map(|b| *b as f64).collect(),
        ),
        y: Axis::up_to(
            "RPCs per lookup (mean)",
            half_log.max(if nodes == 4096 { 6.7 } else { 0.0 }),
        ),
        series,
    }
}
