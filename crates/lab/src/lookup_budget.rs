//! How many RPCs a lookup takes for how much upkeep, while nodes come and go.
//!
//! CFS needs ½·log2 N RPCs (6.7 at 4,096 servers, Figure 9), and does not say what keeping
//! the tables costs. Here nodes come and go ([`crate::churn`]) while blocks are looked up
//! from nodes all over the ring: with the paper's fingers, whose upkeep runs at its pace
//! and ever more slowly, and with the adaptive table on several budgets. (Li, Stribling, Morris and Kaashoek,
//! "Bandwidth-efficient management of DHT routing tables", NSDI 2005, look at Chord in the
//! same plane.)
//!
//! `lookup-budget` shows what lookups take in the long run. The large ring on the default
//! budget begins with tables as full as they become ([`Tables::Full`]), goes on for
//! [`REST_SECS`] and is measured then, so that a table that cannot stay so has lost much. All
//! others begin cold: successor lists and fingers are right, and the adaptive tables hold
//! no other node. `lookup-cold` shows over time how these fill.
//!
//! What upkeep costs is measured, not believed: the bytes of all overlay messages, both
//! ways, with the simulated network's overhead for each, over the nodes that are up.
//! Lookups that are measured themselves are in it; they are few.
//!
//! The whole range of budgets is run on a smaller ring ([`CURVE_NODES`]); of the large one
//! the paper's fingers, a tiny budget and the default.

mod views;

use std::sync::Arc;
use std::time::Duration;

use atoll_dht::Blocks;
use atoll_env::{Instant, random_below};
use atoll_sim::Stats;
use futures_util::{StreamExt, stream};

use crate::LabError;
use crate::churn::schedule;
use crate::churning::{ChurningRing, Tables};
use crate::experiment::{Context, Experiment, Group};
use crate::outcome::Outcome;
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
const BUDGETS: [u64; 5] = [TINY, 256, 512, DEFAULT, 2048];
const QUICK_BUDGETS: [u64; 3] = [TINY, DEFAULT, 2048];
/// Less than stabilisation takes.
const TINY: u64 = 32;
const DEFAULT: u64 = 1024;
/// The ring on which all budgets are tried.
const CURVE_NODES: usize = 512;
const BLOCK_BYTES: usize = 64;
/// Lookups under way at a time.
const PARALLEL: usize = 20;
/// When lookups are made to see tables fill, seconds since the cold start; the last is when
/// the tables count as filled.
const MOMENTS_SECS: [u64; 5] = [15, 30, 60, 120, 240];
const QUICK_MOMENTS_SECS: [u64; 3] = [30, 60, 240];
/// When lookups are made in the ring that begins with full tables.
const REST_SECS: [u64; 3] = [120, 300, 600];
const QUICK_REST_SECS: [u64; 2] = [60, 240];
/// Lookups at each of them.
const AT_MOMENT: usize = 400;
const QUICK_AT_MOMENT: usize = 100;
/// Afterwards lookups are spread over so many moments, so that churn goes on between them.
const ROUNDS: usize = 8;
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

/// A ring, but for its seed.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Case {
    nodes: usize,
    upkeep: Upkeep,
    begins: Tables,
}

/// What was found of one ring.
struct Found {
    case: Case,
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
    /// Lookups at each moment.
    at_moment: usize,
    moments_secs: &'static [u64],
    rest_secs: &'static [u64],
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
        at_moment: context.size(AT_MOMENT, QUICK_AT_MOMENT),
        moments_secs: if quick { &QUICK_MOMENTS_SECS } else { &MOMENTS_SECS },
        rest_secs: if quick { &QUICK_REST_SECS } else { &REST_SECS },
        seeds: context.seeds(1, 1),
        found: Vec::new(),
    };
    let cases = runs.cases();
    let parts: Vec<(Case, u64)> =
        cases.iter().flat_map(|case| runs.seeds.iter().map(|seed| (*case, *seed))).collect();
    let mut found = context.each(&parts, |(case, seed)| runs.measure(*case, *seed))?;
    found.sort_by_key(|found| (found.case, found.seed));
    runs.found = found;
    let mut outcomes = Vec::new();
    if context.wants(BUDGET) {
        outcomes.push(runs.by_budget());
    }
    if context.wants(COLD) {
        outcomes.push(runs.by_time());
    }
    Ok(outcomes)
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
    /// What is run; the dear ones first, so that the processors end together.
    fn cases(&self) -> Vec<Case> {
        let quick = self.context.options.quick;
        let cold = |nodes, upkeep| Case { nodes, upkeep, begins: Tables::Cold };
        let mut cases = Vec::new();
        if self.context.wants(BUDGET) {
            cases.push(Case { begins: Tables::Full, ..cold(self.nodes, Upkeep::SHIPPED) });
        }
        if self.context.wants(COLD) {
            cases.push(cold(self.nodes, Upkeep::SHIPPED));
        }
        cases.extend([Upkeep::PAPER, Upkeep::Budget(TINY)].map(|kind| cold(self.nodes, kind)));
        if self.context.wants(BUDGET) {
            let slower = if quick { &QUICK_SLOWER[..] } else { &SLOWER[..] };
            let budgets = if quick { &QUICK_BUDGETS[..] } else { &BUDGETS[..] };
            let fingers = slower.iter().map(|times| Upkeep::Fingers(*times));
            let curve = fingers.chain(budgets.iter().map(|bytes| Upkeep::Budget(*bytes)));
            for case in curve.map(|kind| cold(self.curve_nodes, kind)) {
                if !cases.contains(&case) {
                    cases.push(case);
                }
            }
        }
        cases
    }

    fn measure(&self, case: Case, seed: u64) -> Result<Found, LabError> {
        let Case { nodes, upkeep, begins } = case;
        let context = self.context;
        let rounds = context.size(ROUNDS, QUICK_ROUNDS);
        let moments = match begins {
            Tables::Cold => self.moments_secs,
            Tables::Full => self.rest_secs,
        };
        let last = moments.last().copied().unwrap_or_default();
        let length = Duration::from_secs(last) + ROUND * (rounds as u32 + 2);
        let sim = atoll_sim::SimConfig { seed, ..Default::default() };
        let random = atoll_sim::Sim::new(sim).outside();
        let trace = context.options.availability.as_deref();
        let schedule = schedule(trace, nodes, length.as_secs_f64(), &random)?;
        let mut ring = ChurningRing::new(plan(context, upkeep, nodes, seed), schedule, begins);
        put(&ring, self.lookups)?;
        let mut filling = Vec::new();
        let (mut began, mut before) = (Instant(0), 0);
        for secs in moments.iter().copied() {
            ring.run_until(Instant(0) + Duration::from_secs(secs));
            let (now, bytes) = (ring.sim.now(), overlay_bytes(&ring.sim.stats()));
            let per_sec = per_node(bytes - before, now.since(began), ring.up_count() as f64);
            (began, before) = (now, bytes);
            let rpcs = look_up(&ring, self.lookups, self.at_moment)?.into_iter().flatten();
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
            case,
            seed,
            up,
            unanswered: unanswered as f64 / rpcs.len().max(1) as f64,
            rpcs: summary(rpcs),
            failed,
            upkeep_bytes_per_sec: per_node(bytes, ring.sim.now().since(began), up),
            filling,
        })
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
