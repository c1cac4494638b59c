//! CFS §7.2.3, Figure 11: what caching along the lookup path does for a popular block.
//!
//! "A single block is inserted into a 1,000 server system. Then a sequence of randomly
//! chosen servers fetch the block. The graph shows how the number of RPCs required to fetch
//! the block decreases with the number of cumulative fetches … Each plotted point is the
//! average of 10 sequential fetches." It falls from 5.7 to 3.2 after ten.
//!
//! The paper's settings cache at every server of the path, at the first fetch, as its
//! experiment did. What is shipped caches at the second-to-last server only (the paper's
//! "future versions"), and only what has been asked for before.

use std::time::Duration;

use atoll_dht::CacheAt;

use crate::LabError;
use crate::chart::{Axis, Chart, Ink, Mark, Point, Series};
use crate::experiment::{Context, Experiment, Group};
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

/// The RPCs of each fetch of one run, in order.
struct Run {
    setting: Setting,
    rpcs: Vec<f64>,
}

fn run(context: &Context<'_>) -> Result<Vec<Outcome>, LabError> {
    let nodes = context.nodes(1000, 300);
    let fetches = context.size(200, 60);
    let seeds = context.seeds(10, 4);
    let parts: Vec<(Setting, u64)> = Setting::BOTH
        .iter()
        .flat_map(|setting| seeds.iter().map(|seed| (*setting, *seed)))
        .collect();
    let found = context.each(&parts, |(setting, seed)| {
        let mut dht = setting.dht();
        if *setting == Setting::Paper {
            dht.cache_at = CacheAt::WholePath;
            dht.cache_bytes = 1 << 20;
            dht.cache_asks = 1;
        }
        let plan = Plan {
            seed: *seed,
            nodes,
            chord: setting.chord(nodes),
            dht,
            upkeep: *setting == Setting::Default,
            virtual_servers: Vec::new(),
            network: Network::plain(context.options.latency.clone()),
        };
        Ok(Run { setting: *setting, rpcs: fetch_again_and_again(&plan, fetches)? })
    })?;
    Ok(vec![outcome(&found, nodes, fetches, &seeds)])
}

fn fetch_again_and_again(plan: &Plan, fetches: usize) -> Result<Vec<f64>, LabError> {
    let ring = Ring::new(plan);
    ring.put(1, BLOCK_BYTES)?;
    let mut rpcs = Vec::with_capacity(fetches);
    for _ in 0..fetches {
        let at = ring.random_below(plan.nodes);
        let found = ring.look_up(at, &[0], BLOCK_BYTES, 1)?.pop();
        let found = found.expect("a result for each block");
        let fetched = found.map_err(|error| LabError::Failed(error.to_string()))?;
        rpcs.push(fetched.trace.calls() as f64);
        ring.sim.run_for(BETWEEN);
    }
    Ok(rpcs)
}

/// The fetches of all runs that had `earlier` or a few more before them.
fn after(found: &[Run], setting: Setting, earlier: usize) -> Summary {
    let runs = found.iter().filter(|run| run.setting == setting);
    summary(runs.flat_map(|run| run.rpcs.iter().skip(earlier).take(FETCHES_A_POINT).copied()))
}

fn outcome(found: &[Run], nodes: usize, fetches: usize, seeds: &[u64]) -> Outcome {
    let earlier: Vec<usize> = (0..fetches).step_by(FETCHES_A_POINT).collect();
    let mut csv = Csv::new(&["setting", "earlier_fetches", "mean_rpcs", "sd", "fetches"]);
    for setting in Setting::BOTH {
        for earlier in &earlier {
            let rpcs = after(found, setting, *earlier);
            let (mean, deviation) = (format!("{:.3}", rpcs.mean), format!("{:.3}", rpcs.deviation));
            csv.row(&[&setting, earlier, &mean, &deviation, &rpcs.count]);
        }
    }
    let first = |setting| {
        let runs = found.iter().filter(|run| run.setting == setting);
        format!("{:.2}", summary(runs.map(|run| run.rpcs[0])).mean)
    };
    let mean = |setting, earlier| format!("{:.2}", after(found, setting, earlier).mean);
    let [paper, shipped] = Setting::BOTH;
    let line = |quantity: String, paper_said: &str, earlier| {
        Comparison::new(quantity, paper_said, mean(paper, earlier), mean(shipped, earlier))
    };
    let last = *earlier.last().expect("there are fetches");
    let series = |setting, name: &str, ink, mark| Series {
        name: name.into(),
        ink,
        mark,
        points: earlier
            .iter()
            .map(|earlier| {
                let rpcs = after(found, setting, *earlier);
                let (low, high) = (rpcs.mean - rpcs.deviation, rpcs.mean + rpcs.deviation);
                Point::spread(*earlier as f64, rpcs.mean, low.max(0.0), high)
            })
            .collect(),
    };
    let runs = seeds.len();
    Outcome {
        name: "cfs-fig11",
        title: "RPCs to fetch one popular block".into(),
        source: "CFS §7.2.3, Figure 11",
        setup: format!("{nodes} servers, {fetches} fetches of one block from random servers"),
        comparison: vec![
            Comparison::new("RPCs, the first fetch", "5.7", first(paper), first(shipped)),
            line("RPCs, fetches 1 to 10".into(), "", 0),
            line("RPCs, fetches 11 to 20".into(), "3.2", 10),
            line(format!("RPCs, fetches {} to {fetches}", last + 1), "", last),
        ],
        notes: vec![
            "A server that holds or caches the block itself needs no RPC here; the paper's always \
             asked another."
                .into(),
        ],
        csv,
        chart: Chart {
            title: "Caching along the lookup path (CFS Figure 11)".into(),
            subtitle: format!(
                "one block, {nodes} servers, {runs} runs; points: mean of {FETCHES_A_POINT} \
                 successive fetches; bars: one standard deviation"
            ),
            x: Axis::linear("earlier fetches of the block", -3.0, fetches as f64),
            y: Axis::up_to("RPCs per fetch (mean)", 7.0),
            series: vec![
                series(
                    paper,
                    "Atoll, paper's settings: cached along the whole path",
                    Ink::Blue,
                    Mark::Squares,
                ),
                series(
                    shipped,
                    "Atoll, default settings: cached at the second-to-last server",
                    Ink::Vermilion,
                    Mark::Discs,
                ),
                Series {
                    name: "CFS paper".into(),
                    ink: Ink::Black,
                    mark: Mark::Crosses,
                    points: PAPER.iter().map(|(x, y)| Point::new(*x, *y)).collect(),
                },
            ],
        },
        seeds: seeds.to_vec(),
    }
}
