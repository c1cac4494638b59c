//! How many RPCs a lookup takes for how much upkeep, while nodes come and go.
//!
//! CFS needs ½·log2 N RPCs (6.7 at 4,096 servers, Figure 9), and does not say what keeping
//! the tables costs. Here nodes come and go ([`crate::churn`]) while blocks are looked up
//! from nodes all over the ring: with the paper's fingers, whose upkeep runs at its pace
//! and ever more slowly, and with the adaptive table on several budgets. (Li, Stribling, Morris and Kaashoek,
//! "Bandwidth-efficient management of DHT routing tables", NSDI 2005, look at Chord in the
//! same plane.)
//!
//! Rings begin cold: successor lists and fingers are right, and the adaptive tables hold
//! nobody else. `lookup-cold` shows the same runs over time.
//!
//! What upkeep costs is measured, not believed: the bytes of all overlay messages, both
//! ways, with the simulated network's overhead for each, over the nodes that are up.
//! Lookups that are measured themselves are in it; they are few.
//!
//! The whole range of budgets is run on a smaller ring ([`CURVE_NODES`]); of the large one
//! the paper's fingers, a tiny budget and the default.

use std::sync::Arc;
use std::time::Duration;

use atoll_dht::Blocks;
use atoll_env::{Instant, random_below};
use atoll_sim::Stats;
use futures_util::{StreamExt, stream};

use crate::LabError;
use crate::chart::{Axis, Chart, Ink, Mark, Point, Series, highest};
use crate::churn::schedule;
use crate::churning::ChurningRing;
use crate::experiment::{Context, Experiment, Group};
use crate::outcome::{Comparison, Csv, Outcome};
use crate::ring::{LIMIT, Network, Plan, block};
use crate::setting::Setting;
use crate::statistics::{Summary, summary};

const BUDGET: &str = "lookup-budget";
const COLD: &str = "lookup-cold";
const SOURCE: &str = "CFS §7.2.1; Accordion, NSDI 2005";

pub(crate) const GROUP: Group = Group {
    experiments: &[
        Experiment {
            name: BUDGET,
            title: "RPCs per lookup against the bandwidth of upkeep, under churn",
            source: SOURCE,
            nodes: Some(32..=20_000),
        },
        Experiment {
            name: COLD,
            title: "RPCs per lookup against the time since a cold start, under churn",
            source: SOURCE,
            nodes: Some(32..=20_000),
        },
    ],
    run,
};

/// Upkeep of fingers so many times slower than by default.
const SLOWER: [u32; 3] = [1, 2, 4];
const QUICK_SLOWER: [u32; 1] = [1];
/// Budgets of the adaptive table, bytes a second; what the stabilisation of successor lists
/// costs is in them, and is spent also where it exceeds them.
const BUDGETS: [u64; 7] = [TINY, 64, 128, 256, 512, DEFAULT, 2048];
const QUICK_BUDGETS: [u64; 3] = [TINY, DEFAULT, 2048];
/// Less than stabilisation takes.
const TINY: u64 = 32;
const DEFAULT: u64 = 1024;
/// The ring on which all budgets are tried.
const CURVE_NODES: usize = 512;
/// Wanted of a table that adapts: at 4,096 nodes, 2.0 RPCs within 1 KiB/s.
const WANTED: (f64, f64) = (1024.0, 2.0);
/// Ends of the plot, bytes a second.
const LEAST_BYTES: f64 = 128.0;
const MOST_BYTES: f64 = 4096.0;
const BLOCK_BYTES: usize = 64;
/// Lookups under way at a time.
const PARALLEL: usize = 20;
/// When lookups are made to see tables fill, seconds since the cold start; the last is when
/// the tables count as filled.
const MOMENTS_SECS: [u64; 6] = [30, 60, 120, 240, 480, 900];
const QUICK_MOMENTS_SECS: [u64; 3] = [30, 60, 240];
/// Lookups at each of them.
const AT_MOMENT: usize = 400;
const QUICK_AT_MOMENT: usize = 100;
/// Afterwards lookups are spread over so many moments, so that churn goes on between them.
const ROUNDS: usize = 10;
const QUICK_ROUNDS: usize = 6;
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
}

impl Upkeep {
    const PAPER: Upkeep = Upkeep::Fingers(1);
    const SHIPPED: Upkeep = Upkeep::Budget(DEFAULT);

    fn name(self) -> String {
        match self {
            Upkeep::PAPER => "fingers".to_owned(),
            Upkeep::Fingers(times) => format!("fingers-{times}-times-slower"),
            Upkeep::Budget(bytes) => format!("budget-{bytes}"),
        }
    }
}

/// The lookups of one moment.
struct Sample {
    secs: u64,
    rpcs: Summary,
    bytes_per_sec: f64,
}

/// One ring.
struct Found {
    nodes: usize,
    upkeep: Upkeep,
    seed: u64,
    up: f64,
    rpcs: Summary,
    unanswered: f64,
    failed: usize,
    upkeep_bytes_per_sec: f64,
    filling: Vec<Sample>,
}

/// What was run.
struct Runs<'a> {
    context: &'a Context<'a>,
    nodes: usize,
    curve_nodes: usize,
    lookups: usize,
    moments_secs: &'static [u64],
    seeds: Vec<u64>,
    found: Vec<Found>,
}

fn run(context: &Context<'_>) -> Result<Vec<Outcome>, LabError> {
    let nodes = context.nodes(4096, 128);
    let quick = context.options.quick;
    let mut runs = Runs {
        context,
        nodes,
        curve_nodes: nodes.min(CURVE_NODES),
        lookups: context.size(4000, 600),
        moments_secs: if quick { &QUICK_MOMENTS_SECS } else { &MOMENTS_SECS },
        seeds: context.seeds(1, 1),
        found: Vec::new(),
    };
    let slower = if quick { &QUICK_SLOWER[..] } else { &SLOWER[..] };
    let budgets = if quick { &QUICK_BUDGETS[..] } else { &BUDGETS[..] };
    let fingers = slower.iter().map(|times| Upkeep::Fingers(*times));
    let adaptive = budgets.iter().map(|bytes| Upkeep::Budget(*bytes));
    // The dear ones first, so that the processors end together.
    let mut rings: Vec<(usize, Upkeep)> =
        [Upkeep::SHIPPED, Upkeep::PAPER, Upkeep::Budget(TINY)].map(|kind| (nodes, kind)).into();
    for ring in fingers.chain(adaptive).map(|kind| (runs.curve_nodes, kind)) {
        if !rings.contains(&ring) {
            rings.push(ring);
        }
    }
    let parts: Vec<(usize, Upkeep, u64)> = rings
        .iter()
        .flat_map(|(nodes, kind)| runs.seeds.iter().map(|seed| (*nodes, *kind, *seed)))
        .collect();
    let mut found = context.each(&parts, |part| runs.measure(*part))?;
    found.sort_by_key(|found| (found.nodes, found.upkeep, found.seed));
    runs.found = found;
    Ok(vec![runs.by_budget(), runs.by_time()])
}

fn plan(context: &Context<'_>, upkeep: Upkeep, nodes: usize, seed: u64) -> Plan {
    let setting = match upkeep {
        Upkeep::Fingers(_) => Setting::Paper,
        Upkeep::Budget(_) => Setting::Default,
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

impl Runs<'_> {
    fn measure(&self, (nodes, upkeep, seed): (usize, Upkeep, u64)) -> Result<Found, LabError> {
        let (context, quick) = (self.context, self.context.options.quick);
        let rounds = context.size(ROUNDS, QUICK_ROUNDS);
        let last = self.moments_secs.last().copied().unwrap_or_default();
        let length = Duration::from_secs(last) + ROUND * (rounds as u32 + 2);
        let sim = atoll_sim::SimConfig { seed, ..Default::default() };
        let random = atoll_sim::Sim::new(sim).outside();
        let trace = context.options.availability.as_deref();
        let schedule = schedule(trace, nodes, length.as_secs_f64(), &random)?;
        let mut ring = ChurningRing::new(plan(context, upkeep, nodes, seed), schedule);
        put(&ring, self.lookups)?;
        let mut filling = Vec::new();
        let at_moment = if quick { QUICK_AT_MOMENT } else { AT_MOMENT };
        let (mut began, mut before) = (Instant(0), 0);
        for secs in self.moments_secs.iter().copied() {
            ring.run_until(Instant(0) + Duration::from_secs(secs));
            let (now, bytes) = (ring.sim.now(), overlay_bytes(&ring.sim.stats()));
            let per_sec = per_node(bytes - before, now.since(began), ring.up_count() as f64);
            (began, before) = (now, bytes);
            let rpcs = look_up(&ring, self.lookups, at_moment)?.into_iter().flatten();
            let rpcs = summary(rpcs.map(|(answered, _)| answered as f64));
            filling.push(Sample { secs, rpcs, bytes_per_sec: per_sec });
        }
        let (began, before) = (ring.sim.now(), overlay_bytes(&ring.sim.stats()));
        let (mut rpcs, mut unanswered, mut up, mut failed) = (Vec::new(), 0, 0, 0);
        for _ in 0..rounds {
            let until = ring.sim.now() + ROUND;
            for result in look_up(&ring, self.lookups, self.lookups / rounds)? {
                match result {
                    Some((answered, silent)) => {
                        rpcs.push(answered as f64);
                        unanswered += silent;
                    }
                    None => failed += 1,
                }
            }
            ring.run_until(until);
            up += ring.up_count();
        }
        let up = up as f64 / rounds as f64;
        let bytes = overlay_bytes(&ring.sim.stats()) - before;
        Ok(Found {
            nodes,
            upkeep,
            seed,
            up,
            unanswered: unanswered as f64 / rpcs.len().max(1) as f64,
            rpcs: summary(rpcs),
            failed,
            upkeep_bytes_per_sec: per_node(bytes, ring.sim.now().since(began), up),
            filling,
        })
    }

    fn of(&self, nodes: usize, upkeep: Upkeep) -> impl Iterator<Item = &Found> {
        self.found.iter().filter(move |f| f.nodes == nodes && f.upkeep == upkeep)
    }

    /// Over the runs of one kind: RPCs, calls without an answer, bytes a second.
    fn means(&self, nodes: usize, upkeep: Upkeep) -> [f64; 3] {
        let mean = |value: fn(&Found) -> f64| summary(self.of(nodes, upkeep).map(value)).mean;
        [mean(|f| f.rpcs.mean), mean(|f| f.unanswered), mean(|f| f.upkeep_bytes_per_sec)]
    }

    fn churn(&self) -> &'static str {
        match self.context.options.availability {
            Some(_) => "churn of the file",
            None => "churn of Overnet's nodes (sessions of two hours)",
        }
    }

    fn filled_minutes(&self) -> u64 {
        self.moments_secs.last().copied().unwrap_or_default() / 60
    }

    fn setup(&self) -> String {
        format!(
            "about {} nodes up, {}; cold start, then {} minutes, then {} lookups from random nodes",
            self.nodes,
            self.churn(),
            self.filled_minutes(),
            self.lookups
        )
    }

    fn by_budget(&self) -> Outcome {
        let (paper, shipped) = (Upkeep::PAPER, Upkeep::SHIPPED);
        let line = |quantity: &str, paper_says: &str, value: &dyn Fn([f64; 3]) -> String| {
            let [ours, default] = [paper, shipped].map(|kind| value(self.means(self.nodes, kind)));
            Comparison::new(quantity, paper_says, ours, default)
        };
        let failed = |kind| {
            let failed: usize = self.of(self.nodes, kind).map(|f| f.failed).sum();
            let all = failed + self.of(self.nodes, kind).map(|f| f.rpcs.count).sum::<usize>();
            format!("{failed} of {all}")
        };
        let paper_says = if self.nodes == 4096 { "6.7, without churn" } else { "" };
        let [tiny, _, spent] = self.means(self.nodes, Upkeep::Budget(TINY));
        let half_log = (self.nodes as f64).log2() / 2.0;
        Outcome {
            name: BUDGET,
            title: "RPCs per lookup by upkeep bandwidth".into(),
            source: SOURCE,
            setup: self.setup(),
            comparison: vec![
                line("RPCs per lookup", paper_says, &|[rpcs, ..]| format!("{rpcs:.2}")),
                line("calls without an answer, per lookup", "", &|[_, silent, _]| {
                    format!("{silent:.3}")
                }),
                line("upkeep of a node (bytes/s)", "", &|[.., bytes]| format!("{bytes:.0}")),
                Comparison::new("lookups that failed", "", failed(paper), failed(shipped)),
                Comparison::new(
                    format!("RPCs per lookup on a budget of {TINY} bytes/s"),
                    format!("½·log2 N = {half_log:.1}"),
                    "",
                    format!("{tiny:.2} ({spent:.0} bytes/s)"),
                ),
            ],
            notes: vec![
                "Upkeep is measured: all overlay messages, sent and received, 96 bytes besides \
                 the header each."
                    .into(),
                format!("The curve over all budgets is of {} nodes.", self.curve_nodes),
            ],
            csv: self.budgets_csv(),
            chart: self.budgets_chart(),
            seeds: self.seeds.clone(),
        }
    }

    fn budgets_csv(&self) -> Csv {
        let mut csv = Csv::new(&[
            "nodes",
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
        for f in &self.found {
            let [up, mean, deviation, unanswered, upkeep] =
                [f.up, f.rpcs.mean, f.rpcs.deviation, f.unanswered, f.upkeep_bytes_per_sec]
                    .map(|n| format!("{n:.3}"));
            let (name, count) = (f.upkeep.name(), f.rpcs.count + f.failed);
            csv.row(&[
                &f.nodes,
                &name,
                &f.seed,
                &up,
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

    fn budgets_chart(&self) -> Chart {
        let points = |nodes: usize, wanted: fn(&Upkeep) -> bool| {
            let mut kinds: Vec<Upkeep> =
                self.found.iter().filter(|f| f.nodes == nodes).map(|f| f.upkeep).collect();
            kinds.dedup();
            let point = |kind: Upkeep| {
                let [rpcs, _, bytes] = self.means(nodes, kind);
                Point::new(bytes, rpcs)
            };
            let mut points: Vec<Point> = kinds.into_iter().filter(wanted).map(point).collect();
            points.sort_by(|a, b| a.x.total_cmp(&b.x));
            points
        };
        let fingers = |nodes| points(nodes, |kind| matches!(kind, Upkeep::Fingers(_)));
        let adaptive = |nodes| points(nodes, |kind| matches!(kind, Upkeep::Budget(_)));
        let (all, few) = (self.nodes, self.curve_nodes);
        let line = |name: String, ink, mark, points| Series { name, ink, mark, points };
        let mut series = vec![
            line(format!("fingers, {few} nodes"), Ink::Blue, Mark::Squares, fingers(few)),
            line(format!("adaptive table, {few} nodes"), Ink::Green, Mark::Crosses, adaptive(few)),
        ];
        if all != few {
            series.extend([
                line(format!("fingers, {all} nodes"), Ink::Black, Mark::Squares, fingers(all)),
                line(
                    format!("adaptive table, {all} nodes"),
                    Ink::Vermilion,
                    Mark::Discs,
                    adaptive(all),
                ),
            ]);
        }
        let half_log = (all as f64).log2() / 2.0;
        let across = vec![Point::new(LEAST_BYTES, half_log), Point::new(MOST_BYTES, half_log)];
        series.push(line(format!("½·log2 {all}"), Ink::Grey, Mark::Dashed, across));
        if all == 4096 {
            let wanted = vec![Point::new(WANTED.0, WANTED.1)];
            series.push(line("wanted: 2.0 at 1 KiB/s".into(), Ink::Black, Mark::Pluses, wanted));
        }
        let ticks = std::iter::successors(Some(LEAST_BYTES), |n| Some(n * 2.0));
        Chart {
            title: "RPCs per lookup by upkeep bandwidth".into(),
            subtitle: format!(
                "{} minutes after a cold start, {}",
                self.filled_minutes(),
                self.churn()
            ),
            x: Axis::log(
                "upkeep of a node, measured (bytes/s)",
                LEAST_BYTES,
                MOST_BYTES,
                ticks.take_while(|n| *n <= MOST_BYTES).collect(),
            ),
            y: Axis::up_to("RPCs per lookup (mean)", highest(&series)),
            series,
        }
    }

    fn by_time(&self) -> Outcome {
        let at = |kind, moment: usize| {
            let samples = self.of(self.nodes, kind).filter_map(|f| f.filling.get(moment));
            format!("{:.2}", summary(samples.map(|sample| sample.rpcs.mean)).mean)
        };
        let line = |(moment, secs): (usize, &u64)| {
            let [paper, shipped] = [Upkeep::PAPER, Upkeep::SHIPPED].map(|kind| at(kind, moment));
            Comparison::new(format!("RPCs per lookup after {secs} s"), "", paper, shipped)
        };
        Outcome {
            name: COLD,
            title: "RPCs per lookup since a cold start".into(),
            source: SOURCE,
            setup: self.setup(),
            comparison: self.moments_secs.iter().enumerate().map(line).collect(),
            notes: vec![
                "Cold: every node knows its successors and fingers and nobody else, and has just \
                 begun."
                    .into(),
            ],
            csv: self.filling_csv(),
            chart: self.filling_chart(),
            seeds: self.seeds.clone(),
        }
    }

    fn filling_csv(&self) -> Csv {
        let mut csv = Csv::new(&[
            "nodes",
            "tables",
            "seed",
            "secs",
            "mean_rpcs",
            "sd",
            "upkeep_bytes_per_sec",
        ]);
        for f in &self.found {
            for sample in &f.filling {
                let [mean, deviation, upkeep] =
                    [sample.rpcs.mean, sample.rpcs.deviation, sample.bytes_per_sec]
                        .map(|n| format!("{n:.3}"));
                let name = f.upkeep.name();
                csv.row(&[&f.nodes, &name, &f.seed, &sample.secs, &mean, &deviation, &upkeep]);
            }
        }
        csv
    }

    fn filling_chart(&self) -> Chart {
        let points = |kind| {
            let moments = self.moments_secs.iter().enumerate();
            let mean = |moment: usize| {
                let samples = self.of(self.nodes, kind).filter_map(move |f| f.filling.get(moment));
                summary(samples.map(|sample| sample.rpcs.mean)).mean
            };
            moments.map(|(moment, secs)| Point::new(*secs as f64, mean(moment))).collect()
        };
        let line = |name: &str, ink, mark, points| Series { name: name.into(), ink, mark, points };
        let (first, last) = (self.moments_secs[0], self.moments_secs[self.moments_secs.len() - 1]);
        let half_log = (self.nodes as f64).log2() / 2.0;
        let across = [first, last].map(|secs| Point::new(secs as f64, half_log)).into();
        let tiny = format!("adaptive table on {TINY} bytes/s");
        let series = vec![
            line(
                "Atoll, paper's settings: fingers",
                Ink::Blue,
                Mark::Squares,
                points(Upkeep::PAPER),
            ),
            line(&tiny, Ink::Green, Mark::Crosses, points(Upkeep::Budget(TINY))),
            line("Atoll, default settings", Ink::Vermilion, Mark::Discs, points(Upkeep::SHIPPED)),
            line("½·log2 N", Ink::Grey, Mark::Dashed, across),
        ];
        Chart {
            title: "RPCs per lookup since a cold start".into(),
            subtitle: format!("about {} nodes up, {}", self.nodes, self.churn()),
            x: Axis::log(
                "time since the cold start (s)",
                first as f64,
                last as f64,
                self.moments_secs.iter().map(|secs| *secs as f64).collect(),
            ),
            y: Axis::up_to("RPCs per lookup (mean)", highest(&series)),
            series,
        }
    }
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

/// Bytes a second that a node sends and receives: each message is sent by one node and
/// received by another, and both pay.
fn per_node(bytes: u64, time: Duration, nodes: f64) -> f64 {
    2.0 * bytes as f64 / time.as_secs_f64() / nodes.max(1.0)
}

#[cfg(test)]
mod tests {
    use atoll_overlay::chord::ChordConfig;

    use super::*;

    #[test]
    fn the_default_is_a_point_of_the_curve() {
        assert_eq!(ChordConfig::default().table_budget_bytes_per_sec, DEFAULT);
        assert!(BUDGETS.contains(&DEFAULT) && QUICK_BUDGETS.contains(&DEFAULT));
    }
}
