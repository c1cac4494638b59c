//! CFS §7.2.1, Figure 9: RPCs per lookup against the number of servers.
//!
//! "For each of a range of numbers of servers, 10,000 blocks were inserted into the
//! system. Then 10,000 lookups were done, from a single server, for randomly selected
//! blocks. … The actual values are about ½ log2(N); for example, with 4096 servers,
//! lookups averaged 6.7 RPCs."
//!
//! As shipped the routing tables are full when the lookups begin, as after a rest: how many
//! RPCs a lookup takes then depends on what upkeep may cost, not on the number of servers
//! (see `lookup-budget`).

use crate::LabError;
use crate::chart::{Axis, Chart, Ink, Mark, Point, Series, highest};
use crate::experiment::{Context, Experiment, Group, runs};
use crate::outcome::{Comparison, Csv, Outcome};
use crate::ring::{Network, Plan, Ring};
use crate::setting::Setting;
use crate::statistics::{Summary, percentile, summary};

pub(crate) const GROUP: Group = Group {
    experiments: &[Experiment {
        name: "cfs-fig9",
        title: "RPCs per lookup against the number of servers",
        source: "CFS §7.2.1, Figure 9",
        nodes: Some(16..=65_536),
    }],
    run,
};

/// The smallest ring of the figure.
const FEWEST: usize = 16;
const BLOCK_BYTES: usize = 64;
/// Lookups under way at a time: they do not disturb each other, and the ring's upkeep
/// is simulated for so much less time.
const PARALLEL: usize = 50;
/// Read from the paper's text: servers and mean RPCs (Figures 9 and 11).
const PAPER: [(f64, f64); 2] = [(1000.0, 5.7), (4096.0, 6.7)];

struct Size {
    setting: Setting,
    nodes: usize,
    calls: Summary,
    p99: f64,
}

fn run(context: &Context<'_>) -> Result<Vec<Outcome>, LabError> {
    let most = context.nodes(4096, 256);
    let blocks = context.size(10_000, 500);
    let seeds = context.seeds(1, 1);
    let sizes: Vec<usize> =
        std::iter::successors(Some(FEWEST), |n| Some(n * 2)).take_while(|n| *n < most).collect();
    // The largest ring takes longest, so it begins first.
    let mut parts: Vec<(Setting, usize)> = Vec::new();
    for nodes in std::iter::once(most).chain(sizes.into_iter().rev()) {
        parts.extend(Setting::BOTH.map(|setting| (setting, nodes)));
    }
    let mut found = context.each(&parts, |(setting, nodes)| {
        let mut calls = Vec::new();
        for seed in &seeds {
            calls.extend(calls_per_lookup(context, *setting, *nodes, blocks, *seed)?);
        }
        calls.sort_by(f64::total_cmp);
        let p99 = percentile(&calls, 0.99);
        Ok(Size { setting: *setting, nodes: *nodes, calls: summary(calls), p99 })
    })?;
    found.sort_by_key(|size| (size.nodes, size.setting));
    Ok(vec![outcome(&found, most, blocks, seeds)])
}

fn calls_per_lookup(
    context: &Context<'_>,
    setting: Setting,
    nodes: usize,
    blocks: usize,
    seed: u64,
) -> Result<Vec<f64>, LabError> {
    let plan = Plan {
        seed,
        nodes,
        chord: setting.chord(nodes),
        dht: setting.dht(),
        upkeep: true,
        virtual_servers: Vec::new(),
        network: Network::plain(context.options.latency.clone()),
    };
    let ring = Ring::new(&plan);
    ring.put(blocks, BLOCK_BYTES)?;
    let at = ring.random_below(nodes);
    let wanted: Vec<usize> = (0..blocks).map(|_| ring.random_below(blocks)).collect();
    let found = ring.look_up(at, &wanted, BLOCK_BYTES, PARALLEL)?;
    found
        .into_iter()
        .map(|fetched| match fetched {
            Ok(fetched) => Ok(fetched.trace.calls() as f64),
            Err(error) => Err(LabError::Failed(format!("on a healthy ring: {error}"))),
        })
        .collect()
}

fn outcome(found: &[Size], most: usize, blocks: usize, seeds: Vec<u64>) -> Outcome {
    let mut csv = Csv::new(&["setting", "servers", "mean_rpcs", "sd", "p99", "most", "lookups"]);
    for Size { setting, nodes, calls, p99 } in found {
        let mean = format!("{:.4}", calls.mean);
        let deviation = format!("{:.4}", calls.deviation);
        csv.row(&[setting, nodes, &mean, &deviation, p99, &calls.most, &calls.count]);
    }
    let at = |setting, nodes| found.iter().find(|s| s.setting == setting && s.nodes == nodes);
    let said = |setting, nodes, tell: &dyn Fn(&Size) -> String| {
        at(setting, nodes).map_or_else(String::new, tell)
    };
    let line = |quantity: String, paper: String, nodes, tell: &dyn Fn(&Size) -> String| {
        let [ours, shipped] = Setting::BOTH.map(|setting| said(setting, nodes, tell));
        Comparison::new(quantity, paper, ours, shipped)
    };
    let mean = |size: &Size| format!("{:.2} ± {:.2}", size.calls.mean, size.calls.deviation);
    let mut comparison = Vec::new();
    for nodes in found.iter().filter(|s| s.setting == Setting::Paper).map(|s| s.nodes) {
        let expected = format!("½·log2 N = {:.1}", (nodes as f64).log2() / 2.0);
        let paper = match nodes {
            4096 => "6.7".to_owned(),
            1024 => "5.7 at 1,000".to_owned(),
            _ => expected,
        };
        comparison.push(line(format!("RPCs per lookup, {nodes} servers"), paper, nodes, &mean));
    }
    let worst = |size: &Size| format!("{} (99 %: {:.0})", size.calls.most, size.p99);
    let paper = if most == 4096 { "hardly above 10" } else { "" };
    comparison.push(line(format!("most RPCs, {most} servers"), paper.into(), most, &worst));
    Outcome {
        name: "cfs-fig9",
        title: "RPCs per lookup".into(),
        source: "CFS §7.2.1, Figure 9",
        setup: format!(
            "{blocks} blocks, {blocks} lookups from one server; mean ± standard deviation"
        ),
        comparison,
        notes: vec![
            "A server whose successor list covers the key names the block's server at once, \
             so that Atoll needs about one RPC less than ½·log2 N even in the paper's settings."
                .into(),
            "As shipped, tables hold whom they would have learnt of in a long rest: everybody, on \
             the default budget. A server that has a copy itself needs no RPC."
                .into(),
        ],
        csv,
        chart: chart(found, most, blocks, &seeds),
        seeds,
    }
}

fn chart(found: &[Size], most: usize, blocks: usize, seeds: &[u64]) -> Chart {
    let ticks: Vec<f64> = std::iter::successors(Some(16.0), |n| Some(n * 2.0))
        .take_while(|n| *n <= most as f64)
        .collect();
    let points = |setting| {
        found.iter().filter(move |size| size.setting == setting).map(|size| {
            let Summary { mean, deviation, .. } = size.calls;
            Point::spread(size.nodes as f64, mean, (mean - deviation).max(0.0), mean + deviation)
        })
    };
    let half_log = ticks.iter().map(|n| Point::new(*n, n.log2() / 2.0));
    let paper = PAPER.iter().filter(|(nodes, _)| *nodes <= most as f64);
    let paper = paper.map(|(x, y)| Point::new(*x, *y));
    let [ours, shipped] = Setting::BOTH.map(|setting| setting.line("", points(setting)));
    let series = vec![
        Series::new("½·log2 N", Ink::Grey, Mark::Dashed, half_log),
        ours,
        shipped,
        Series::new("CFS paper", Ink::Black, Mark::Crosses, paper),
    ];
    Chart {
        title: "Lookup cost (CFS Figure 9)".into(),
        subtitle: format!(
            "{blocks} lookups of {blocks} blocks from one server, {}; bars: one standard deviation",
            runs(seeds)
        ),
        x: Axis::log("servers", FEWEST as f64, most as f64, ticks),
        y: Axis::up_to("RPCs per lookup (mean)", highest(&series)),
        series,
    }
}
