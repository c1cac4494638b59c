//! What each mechanism beyond the papers buys: rings go through what it is for with all
//! mechanisms on, and with this one off.
//!
//! `docs/design/mechanisms.md` has the results, and names the tests that show what is lost
//! without those mechanisms whose purpose is a single attack or fault. A difference counts only
//! if it is larger than that between seeds: the points have the least and the most of each.

mod cases;
mod situation;

use atoll_dht::DhtConfig;
use atoll_overlay::chord::ChordConfig;

use crate::LabError;
use crate::chart::{Axis, Chart, Ink, Mark, Point, Series, highest};
use crate::experiment::{Context, Experiment, Group, runs};
use crate::outcome::{Comparison, Csv, Outcome};
use crate::statistics::{Summary, summary};
use cases::{CASES, Case};
use situation::{Measured, Situation, Size, measure};

pub(crate) const GROUP: Group = Group {
    experiments: &[Experiment {
        name: "mechanisms",
        title: "lookups, puts and upkeep with each mechanism switched off",
        source: "Atoll",
        nodes: Some(30..=2000),
    }],
    run,
};

/// A quantity, by the name of its columns.
type Quantity = (&'static str, fn(&Measured) -> f64);

const QUANTITIES: [Quantity; 12] = [
    ("lookup_rpcs", |m| m.lookup_rpcs),
    ("lookup_bytes", |m| m.lookup_bytes),
    ("lookup_median_ms", |m| m.lookup_median_ms),
    ("lookup_p95_ms", |m| m.lookup_p95_ms),
    ("failed_lookups", |m| m.failed_lookups),
    ("busiest_share", |m| m.busiest_share),
    ("put_rpcs", |m| m.put_rpcs),
    ("put_bytes", |m| m.put_bytes),
    ("put_median_ms", |m| m.put_median_ms),
    ("put_p95_ms", |m| m.put_p95_ms),
    ("failed_puts", |m| m.failed_puts),
    ("upkeep_bytes_per_sec", |m| m.upkeep_bytes_per_sec),
];

/// All runs of a situation with everything on, or of a case.
struct Found<'a> {
    situation: Situation,
    case: Option<&'a Case>,
    runs: Vec<Measured>,
}

impl Found<'_> {
    fn of(&self, value: fn(&Measured) -> f64) -> Summary {
        summary(self.runs.iter().map(value))
    }

    fn name(&self) -> &'static str {
        self.case.map_or("all on", |case| case.name)
    }
}

/// All is on.
fn nothing(_: &mut ChordConfig, _: &mut DhtConfig) {}

fn run(context: &Context<'_>) -> Result<Vec<Outcome>, LabError> {
    let size = Size {
        nodes: context.nodes(150, 50),
        blocks: context.size(300, 64),
        lookups: context.size(400, 60),
        puts: context.size(40, 10),
        rest_secs: context.size(300, 60) as u64,
    };
    let seeds = context.seeds(3, 1);
    let is_quick = context.options.quick;
    let cases: Vec<&Case> = CASES.iter().filter(|case| case.is_quick || !is_quick).collect();
    let wanted = |situation: &Situation| cases.iter().any(|case| case.situation == *situation);
    let bases = Situation::ALL.into_iter().filter(wanted).map(|situation| (situation, None));
    let all: Vec<(Situation, Option<&Case>)> =
        bases.chain(cases.iter().map(|case| (case.situation, Some(*case)))).collect();
    let parts: Vec<(Situation, Option<&Case>, u64)> = all
        .iter()
        .flat_map(|(situation, case)| seeds.iter().map(|seed| (*situation, *case, *seed)))
        .collect();
    let measured = context.each(&parts, |(situation, case, seed)| {
        let switch_off = case.map_or(nothing as _, |case| case.switch_off);
        measure(context, size, *situation, switch_off, *seed)
    })?;
    let of_each = all.into_iter().zip(measured.chunks(seeds.len()));
    let found: Vec<Found<'_>> = of_each
        .map(|((situation, case), runs)| Found { situation, case, runs: runs.to_vec() })
        .collect();
    Ok(vec![outcome(&found, size, &seeds)])
}

/// The situation with everything on.
fn base<'a, 'c>(found: &'a [Found<'c>], situation: Situation) -> &'a Found<'c> {
    let is_base = |f: &&Found<'_>| f.situation == situation && f.case.is_none();
    found.iter().find(is_base).expect("every situation is run with everything on")
}

/// A cell of the table: what lookups, puts and upkeep cost.
fn said(found: &Found<'_>) -> String {
    let mean = |value| found.of(value).mean;
    let percent = |value| mean(value) * 100.0;
    let mut cell = format!(
        "lookup {:.2} RPCs, {:.0}/{:.0} ms, {:.1} KiB, {:.1} % fail; put {:.1} RPCs, {:.0}/{:.0} ms, \
         {:.0} KiB, {:.1} % fail",
        mean(|m| m.lookup_rpcs),
        mean(|m| m.lookup_median_ms),
        mean(|m| m.lookup_p95_ms),
        mean(|m| m.lookup_bytes) / 1024.0,
        percent(|m| m.failed_lookups),
        mean(|m| m.put_rpcs),
        mean(|m| m.put_median_ms),
        mean(|m| m.put_p95_ms),
        mean(|m| m.put_bytes) / 1024.0,
        percent(|m| m.failed_puts),
    );
    if mean(|m| m.upkeep_bytes_per_sec) > 0.0 {
        cell += &format!("; upkeep {:.0} B/s", mean(|m| m.upkeep_bytes_per_sec));
    }
    if found.situation == Situation::Popular {
        cell += &format!("; busiest node {:.0} %", percent(|m| m.busiest_share));
    }
    cell
}

fn csv(found: &[Found<'_>]) -> Csv {
    let mut csv = Csv::new(&["situation", "off", "quantity", "mean", "least", "most", "runs"]);
    for one in found {
        for (quantity, value) in QUANTITIES {
            let of = one.of(value);
            let [mean, least, most] = [of.mean, of.least, of.most].map(|n| format!("{n:.4}"));
            csv.row(&[
                &one.situation.name(),
                &one.name(),
                &quantity,
                &mean,
                &least,
                &most,
                &of.count,
            ]);
        }
    }
    csv
}

fn outcome(found: &[Found<'_>], size: Size, seeds: &[u64]) -> Outcome {
    let cases = found.iter().filter(|one| one.case.is_some());
    let line = |one: &Found<'_>| {
        let quantity = format!("{}, {}", one.name(), one.situation.name());
        Comparison::new(quantity, "-", said(one), said(base(found, one.situation)))
    };
    Outcome {
        name: "mechanisms",
        title: "what each mechanism buys".into(),
        source: "Atoll",
        setup: format!(
            "{} nodes, {} blocks, {} lookups and {} puts of eight blocks; medians and 95 % of times",
            size.nodes, size.blocks, size.lookups, size.puts
        ),
        comparison: cases.map(line).collect(),
        notes: vec![
            "The column of the paper's settings is as shipped with this one mechanism off.".into(),
        ],
        csv: csv(found),
        chart: chart(found, size.nodes, seeds),
        seeds: seeds.to_vec(),
    }
}

fn chart(found: &[Found<'_>], nodes: usize, seeds: &[u64]) -> Chart {
    let cases: Vec<&Found<'_>> = found.iter().filter(|one| one.case.is_some()).collect();
    let ratio = |one: &Found<'_>, value: fn(&Measured) -> f64| {
        one.of(value).mean / base(found, one.situation).of(value).mean.max(1e-9)
    };
    let line = |name: &str, ink, mark, value: fn(&Measured) -> f64| {
        let points = cases.iter().enumerate();
        let points = points.map(|(n, one)| Point::new((n + 1) as f64, ratio(one, value).min(20.0)));
        Series::new(name, ink, mark, points)
    };
    let series = vec![
        line("RPCs of a lookup", Ink::Blue, Mark::Squares, |m| m.lookup_rpcs),
        line("95 % of lookups' times", Ink::Vermilion, Mark::Discs, |m| m.lookup_p95_ms),
    ];
    Chart {
        title: "Lookups with one mechanism off".into(),
        subtitle: format!("{nodes} nodes, {}", runs(seeds)),
        x: Axis::linear("mechanism, in the order of the table", 0.0, (cases.len() + 1) as f64),
        y: Axis::up_to("off, as a multiple of on", highest(&series)),
        series,
    }
}
