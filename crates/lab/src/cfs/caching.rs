//! CFS §7.2.3, Figure 11: what caching along the lookup path does for a popular block.
//!
//! "A single block is inserted into a 1,000 server system. Then a sequence of randomly
//! chosen servers fetch the block. The graph shows how the number of RPCs required to fetch
//! the block decreases with the number of cumulative fetches … Each plotted point is the
//! average of 10 sequential fetches." It falls from 5.7 to 3.2 after ten.
//!
//! The paper's settings cache at every server of the path, at the first fetch, as its
//! experiment did. Atoll as shipped caches at the second-to-last server only (the paper's
//! "future versions"), and only what has been asked for before; and its tables are full, so
//! that the second-to-last server is mostly the one that fetches. Each setting is measured
//! without its cache as well, so that one sees what is the cache's doing, and how many of the
//! fetches the busiest server answers: caches are there so that no server is overloaded (§5.2).

use std::collections::BTreeMap;
use std::time::Duration;

use atoll_dht::CacheAt;
use atoll_key::NodeId;
use atoll_overlay::walk::{Said, Trace};

use crate::LabError;
use crate::chart::{Axis, Chart, Ink, Mark, Point, Series, highest};
use crate::experiment::{Context, Experiment, Group, crossed, runs};
use crate::outcome::{Comparison, Csv, Outcome};
use crate::ring::{Network, Plan, Ring};
use crate::setting::Setting;
use crate::statistics::{Summary, summary};

pub(crate) const GROUP: Group = Group {
    experiments: &[Experiment {
        name: "cfs-fig11",
        title: "RPCs per fetch against the number of earlier fetches of the block",
        source: "CFS §7.2.3, Figure 11",
        nodes: Some(20..=20_000),
    }],
    run,
};

const BLOCK_BYTES: usize = 8192;
/// "Each plotted point is the average of 10 sequential fetches."
const FETCHES_A_POINT: usize = 10;
/// A fetch's copies arrive before the next one begins.
const BETWEEN: Duration = Duration::from_secs(1);
/// The paper's points: before any fetch (from Figure 9), and after ten.
const PAPER: [(f64, f64); 2] = [(0.0, 5.7), (10.0, 3.2)];

/// What is fetched with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Case {
    setting: Setting,
    has_cache: bool,
}

impl Case {
    const ALL: [Case; 4] = {
        const fn case(setting: Setting, has_cache: bool) -> Case {
            Case { setting, has_cache }
        }
        let (paper, shipped) = (Setting::Paper, Setting::Default);
        [case(paper, true), case(paper, false), case(shipped, true), case(shipped, false)]
    };

    fn plan(self, context: &Context<'_>, nodes: usize, seed: u64) -> Plan {
        let mut dht = self.setting.dht();
        match (self.has_cache, self.setting) {
            (false, _) => (dht.cache_at, dht.cache_bytes) = (CacheAt::Off, 0),
            (true, Setting::Default) => {}
            (true, Setting::Paper) => {
                dht.cache_at = CacheAt::WholePath;
                dht.cache_bytes = 1 << 20;
                dht.cache_asks = 1;
            }
        }
        Plan {
            seed,
            nodes,
            chord: self.setting.chord(nodes),
            dht,
            upkeep: self.setting == Setting::Default,
            virtual_servers: Vec::new(),
            network: Network::plain(context.options.latency.clone()),
        }
    }
}

/// The fetches of one run.
struct Run {
    case: Case,
    /// The RPCs of each, in order.
    rpcs: Vec<f64>,
    /// The share of them that the busiest server answered.
    busiest: f64,
}

fn run(context: &Context<'_>) -> Result<Vec<Outcome>, LabError> {
    let nodes = context.nodes(1000, 200);
    let fetches = context.size(200, 60);
    let seeds = context.seeds(10, 4);
    let found = context.each(&crossed(&Case::ALL, &[nodes], &seeds), |(case, nodes, seed)| {
        fetch_again_and_again(&case.plan(context, *nodes, *seed), *case, fetches)
    })?;
    Ok(vec![outcome(&found, nodes, fetches, &seeds)])
}

fn fetch_again_and_again(plan: &Plan, case: Case, fetches: usize) -> Result<Run, LabError> {
    let ring = Ring::new(plan);
    ring.put(1, BLOCK_BYTES)?;
    let mut rpcs = Vec::with_capacity(fetches);
    let mut answered: BTreeMap<NodeId, usize> = BTreeMap::new();
    for _ in 0..fetches {
        let at = ring.random_below(plan.nodes);
        let found = ring.look_up(at, &[0], BLOCK_BYTES, 1)?.pop();
        let found = found.expect("a result for each block");
        let Trace(asked) = found.map_err(|error| LabError::Failed(error.to_string()))?.trace;
        let had_it = asked.iter().find(|asked| asked.said == Said::Done && !asked.local);
        if let Some(asked) = had_it {
            *answered.entry(asked.node.id).or_default() += 1;
        }
        rpcs.push(Trace(asked).calls() as f64);
        ring.sim.run_for(BETWEEN);
    }
    let busiest = answered.into_values().max().unwrap_or(0);
    Ok(Run { case, rpcs, busiest: busiest as f64 / fetches as f64 })
}

fn of_case(found: &[Run], case: Case) -> impl Iterator<Item = &Run> {
    found.iter().filter(move |run| run.case == case)
}

/// The fetches of all runs that had `earlier` or a few more before them.
fn after(found: &[Run], case: Case, earlier: usize) -> Summary {
    let runs = of_case(found, case);
    summary(runs.flat_map(|run| run.rpcs.iter().skip(earlier).take(FETCHES_A_POINT).copied()))
}

fn busiest(found: &[Run], case: Case) -> f64 {
    summary(of_case(found, case).map(|run| run.busiest)).mean
}

fn csv(found: &[Run], earlier: &[usize]) -> Csv {
    let header =
        ["setting", "cache", "earlier_fetches", "mean_rpcs", "sd", "fetches", "busiest_share"];
    let mut csv = Csv::new(&header);
    for (case, earlier, _) in crossed(&Case::ALL, earlier, &[0]) {
        let rpcs = after(found, case, earlier);
        let [mean, deviation, busiest] =
            [rpcs.mean, rpcs.deviation, busiest(found, case)].map(|n| format!("{n:.3}"));
        let cache = if case.has_cache { "on" } else { "off" };
        csv.row(&[&case.setting, &cache, &earlier, &mean, &deviation, &rpcs.count, &busiest]);
    }
    csv
}

fn comparison(found: &[Run], last: usize, fetches: usize) -> Vec<Comparison> {
    let line = |quantity: String, paper: &str, has_cache, value: &dyn Fn(Case) -> String| {
        let [ours, shipped] = Setting::BOTH.map(|setting| value(Case { setting, has_cache }));
        Comparison::new(quantity, paper, ours, shipped)
    };
    let mean = |earlier| move |case| format!("{:.2}", after(found, case, earlier).mean);
    let first = |case| {
        let rpcs = of_case(found, case).map(|run| run.rpcs[0]);
        format!("{:.2}", summary(rpcs).mean)
    };
    let most = |case| format!("{:.0} %", busiest(found, case) * 100.0);
    vec![
        line("RPCs, the first fetch".into(), "5.7", true, &first),
        line("RPCs, fetches 1 to 10".into(), "", true, &mean(0)),
        line("RPCs, fetches 11 to 20".into(), "3.2", true, &mean(10)),
        line(format!("RPCs, fetches {} to {fetches}", last + 1), "", true, &mean(last)),
        line("the same without the cache".into(), "", false, &mean(last)),
        line("fetches that the busiest server answers".into(), "", true, &most),
        line("the same without the cache".into(), "", false, &most),
    ]
}

fn outcome(found: &[Run], nodes: usize, fetches: usize, seeds: &[u64]) -> Outcome {
    let earlier: Vec<usize> = (0..fetches).step_by(FETCHES_A_POINT).collect();
    let last = *earlier.last().expect("there are fetches");
    Outcome {
        name: "cfs-fig11",
        title: "RPCs to fetch one popular block".into(),
        source: "CFS §7.2.3, Figure 11",
        setup: format!("{nodes} servers, {fetches} fetches of one block from random servers"),
        comparison: comparison(found, last, fetches),
        notes: vec![
            "A server that holds or caches the block itself needs no RPC here; the paper's always \
             asked another."
                .into(),
            "As shipped a server knows whom to ask, so that there is no path to shorten; a copy is \
             cached where the block was fetched, from its second fetch there on."
                .into(),
        ],
        csv: csv(found, &earlier),
        chart: chart(found, &earlier, nodes, seeds),
        seeds: seeds.to_vec(),
    }
}

fn chart(found: &[Run], earlier: &[usize], nodes: usize, seeds: &[u64]) -> Chart {
    let points = |case| {
        earlier.iter().map(move |earlier| {
            let Summary { mean, deviation, .. } = after(found, case, *earlier);
            Point::spread(*earlier as f64, mean, (mean - deviation).max(0.0), mean + deviation)
        })
    };
    let paper = PAPER.map(|(x, y)| Point::new(x, y));
    let plain = |setting| {
        points(Case { setting, has_cache: false }).map(|point| Point { spread: None, ..point })
    };
    let cached = |setting| points(Case { setting, has_cache: true });
    let series = vec![
        Series::new(
            "Atoll, paper's settings, no cache",
            Ink::Blue,
            Mark::Dotted,
            plain(Setting::Paper),
        ),
        Series::new(
            "Atoll, default settings, no cache",
            Ink::Vermilion,
            Mark::Dotted,
            plain(Setting::Default),
        ),
        Setting::Paper.line(": cached along the whole path", cached(Setting::Paper)),
        Setting::Default.line(": cached at the second-to-last server", cached(Setting::Default)),
        Series::new("CFS paper", Ink::Black, Mark::Crosses, paper),
    ];
    let last = earlier.last().map_or(0.0, |last| *last as f64);
    Chart {
        title: "Caching along the lookup path (CFS Figure 11)".into(),
        subtitle: format!(
            "one block, {nodes} servers, {}; points: mean of {FETCHES_A_POINT} successive fetches; \
             bars: one standard deviation",
            runs(seeds)
        ),
        x: Axis::linear("earlier fetches of the block", -3.0, last + 3.0),
        y: Axis::up_to("RPCs per fetch (mean)", highest(&series)),
        series,
    }
}
