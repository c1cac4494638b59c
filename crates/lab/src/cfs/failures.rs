//! CFS §7.2.5, Figures 13, 14 and 15: what massive failure does to lookups.
//!
//! "1,000 blocks are inserted into a 1,000-server system. Each block has six replicas
//! (including the main copy …). After the insertions, a fraction of the servers fail
//! without warning. Before Chord starts rebuilding its routing tables, 1,000 fetches of
//! randomly selected blocks are attempted from a single server." Five runs; the bars are
//! the least and the most of them.
//!
//! In the paper's settings nothing repairs anything, and a lookup may take as long as it
//! needs. As shipped, upkeep begins at the moment of the failure, lookups have their
//! deadline, and there are as many copies as the default says; a third column of the CSV
//! and a third line of the plots keep six copies, so that Figure 13 can be compared.

use std::time::Duration;

use atoll_dht::{Fetched, GetError, rpc};

use crate::LabError;
use crate::chart::{Axis, Chart, Ink, Mark, Point, Series, highest};
use crate::experiment::{Context, Experiment, Group, crossed, runs};
use crate::outcome::{Comparison, Csv, Outcome};
use crate::ring::{Network, Plan, Ring};
use crate::setting::Setting;
use crate::statistics::{Summary, summary};

const NODES: std::ops::RangeInclusive<usize> = 20..=20_000;

pub(crate) const GROUP: Group = Group {
    experiments: &[
        Experiment {
            name: "cfs-fig13",
            title: "failed lookups against the share of servers that fail at once",
            source: "CFS §7.2.5, Figure 13",
            nodes: Some(NODES),
        },
        Experiment {
            name: "cfs-fig14",
            title: "RPCs per lookup against the share of servers that fail at once",
            source: "CFS §7.2.5, Figure 14",
            nodes: Some(NODES),
        },
        Experiment {
            name: "cfs-fig15",
            title: "timeouts per lookup against the share of servers that fail at once",
            source: "CFS §7.2.5, Figure 15",
            nodes: Some(NODES),
        },
    ],
    run,
};

const BLOCK_BYTES: usize = 64;
/// "Each block has six replicas (including the main copy …)."
const PAPER_REPLICAS: usize = 6;
/// Lookups under way at a time where upkeep runs: before it has done much.
const PARALLEL: usize = 50;

/// Lines of the plots.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Case {
    Paper,
    Default,
    DefaultSixCopies,
}

impl Case {
    const ALL: [Case; 3] = [Case::Paper, Case::Default, Case::DefaultSixCopies];

    fn name(self) -> &'static str {
        match self {
            Case::Paper => "paper",
            Case::Default => "default",
            Case::DefaultSixCopies => "default-six-copies",
        }
    }

    fn plan(self, context: &Context<'_>, nodes: usize, seed: u64) -> Plan {
        let setting = if self == Case::Paper { Setting::Paper } else { Setting::Default };
        let mut dht = setting.dht();
        if self != Case::Default {
            dht.replicas = PAPER_REPLICAS;
        }
        if self == Case::Paper {
            // The paper's lookups end when there is no node left to ask.
            dht.call_limit = Duration::from_secs(1);
            dht.get_limit = Duration::from_secs(300);
        }
        Plan {
            seed,
            nodes,
            chord: setting.chord(nodes),
            dht,
            upkeep: self != Case::Paper,
            virtual_servers: Vec::new(),
            network: Network::plain(context.options.latency.clone()),
        }
    }
}

/// What one run with one share of failures came to.
struct Found {
    case: Case,
    failed_percent: usize,
    /// Share of lookups that failed.
    failures: f64,
    /// Share of the blocks wanted that no living server held.
    lost: f64,
    rpcs: f64,
    /// Questions that were answered, for each lookup: also those of lookups that failed, and
    /// those that were asked because an answer was overdue and came too late themselves.
    answers: f64,
    timeouts: f64,
}

fn run(context: &Context<'_>) -> Result<Vec<Outcome>, LabError> {
    let nodes = context.nodes(1000, 120);
    let blocks = context.size(1000, 120);
    let seeds = context.seeds(5, 2);
    let step = context.size(5, 10);
    let shares: Vec<usize> = (0..=50).step_by(step).collect();
    let found = context.each(&crossed(&Case::ALL, &shares, &seeds), |(case, share, seed)| {
        fail_and_look_up(&case.plan(context, nodes, *seed), *case, *share, blocks)
    })?;
    let setup = format!("{nodes} servers, {blocks} lookups of {blocks} blocks from one server");
    Ok([failed_lookups, rpcs, timeouts].map(|view| view(&found, &shares, &setup, &seeds)).into())
}

fn fail_and_look_up(
    plan: &Plan,
    case: Case,
    failed_percent: usize,
    blocks: usize,
) -> Result<Found, LabError> {
    let ring = Ring::new(plan);
    ring.put(blocks, BLOCK_BYTES)?;
    let client = ring.random_below(plan.nodes);
    let mut others: Vec<usize> = (0..plan.nodes).filter(|n| *n != client).collect();
    for n in 0..plan.nodes * failed_percent / 100 {
        let chosen = n + ring.random_below(others.len() - n);
        others.swap(n, chosen);
        ring.sim.crash_silently(ring.members[others[n]].host);
    }
    let wanted: Vec<usize> = (0..blocks).map(|_| ring.random_below(blocks)).collect();
    let lost = wanted.iter().filter(|n| !ring.has_living_copy(**n, BLOCK_BYTES)).count();
    let before = questions(&ring);
    let parallel = if plan.upkeep { PARALLEL } else { 1 };
    let lookups = ring.look_up(client, &wanted, BLOCK_BYTES, parallel)?;
    // Overdue answers are listened to after the lookup is over.
    ring.sim.run_for(plan.dht.call_limit);
    let after = questions(&ring);
    let count = lookups.len() as f64;
    let done: Vec<&Fetched> =
        lookups.iter().filter_map(|l: &Result<_, GetError>| l.as_ref().ok()).collect();
    Ok(Found {
        case,
        failed_percent,
        failures: (lookups.len() - done.len()) as f64 / count,
        lost: lost as f64 / count,
        rpcs: summary(done.iter().map(|fetched| fetched.trace.calls() as f64)).mean,
        answers: (after.answered - before.answered) as f64 / count,
        timeouts: (after.unanswered - before.unanswered) as f64 / count,
    })
}

/// Questions of lookups so far.
struct Questions {
    answered: u64,
    unanswered: u64,
}

fn questions(ring: &Ring) -> Questions {
    let stats = ring.sim.stats();
    let of_lookups = stats.methods.get(&rpc::LOOKUP_STEP).copied().unwrap_or_default();
    let answered = of_lookups.reply_count;
    Questions { answered, unanswered: of_lookups.call_count - answered }
}

/// The runs of one point.
fn over_runs(found: &[Found], case: Case, percent: usize, value: fn(&Found) -> f64) -> Summary {
    let runs = found.iter().filter(|f| f.case == case && f.failed_percent == percent);
    summary(runs.map(value))
}

fn points(found: &[Found], shares: &[usize], case: Case, value: fn(&Found) -> f64) -> Vec<Point> {
    shares
        .iter()
        .map(|percent| {
            let runs = over_runs(found, case, *percent, value);
            Point::spread(*percent as f64, runs.mean, runs.least, runs.most)
        })
        .collect()
}

fn csv(found: &[Found], shares: &[usize], column: &str, value: fn(&Found) -> f64) -> Csv {
    let (least, most) = (format!("{column}_least"), format!("{column}_most"));
    let mut csv = Csv::new(&["setting", "failed_percent", column, &least, &most, "lost", "runs"]);
    for case in Case::ALL {
        for percent in shares {
            let runs = over_runs(found, case, *percent, value);
            let lost = over_runs(found, case, *percent, |f| f.lost).mean;
            let [mean, least, most, lost] =
                [runs.mean, runs.least, runs.most, lost].map(|n| format!("{n:.5}"));
            csv.row(&[&case.name(), percent, &mean, &least, &most, &lost, &runs.count]);
        }
    }
    csv
}

fn lines(found: &[Found], shares: &[usize], value: fn(&Found) -> f64) -> Vec<Series> {
    let copies = Setting::Default.dht().replicas;
    let of_case = |case| points(found, shares, case, value);
    vec![
        Setting::Paper.line(": six copies, no repair", of_case(Case::Paper)),
        Setting::Default.line(&format!(": {copies} copies"), of_case(Case::Default)),
        Series::new(
            "Atoll, default but six copies",
            Ink::Green,
            Mark::Triangles,
            of_case(Case::DefaultSixCopies),
        ),
    ]
}

/// A line of the table for one share of failures, with `decimals`.
fn compared(
    found: &[Found],
    percent: usize,
    quantity: &str,
    paper: &str,
    decimals: usize,
    value: fn(&Found) -> f64,
) -> Comparison {
    let said = |case| {
        let runs = over_runs(found, case, percent, value);
        let (mean, least, most) = (runs.mean, runs.least, runs.most);
        format!("{mean:.decimals$} ({least:.decimals$} to {most:.decimals$})")
    };
    Comparison::new(
        format!("{quantity}, {percent} % failed"),
        paper,
        said(Case::Paper),
        format!("{}; six copies: {}", said(Case::Default), said(Case::DefaultSixCopies)),
    )
}

fn subtitle(setup: &str, seeds: &[u64]) -> String {
    format!("{setup}; {}, bars: least and most", runs(seeds))
}

/// A small number as an exponent.
fn superscript(number: i32) -> String {
    const DIGITS: [char; 10] = ['⁰', '¹', '²', '³', '⁴', '⁵', '⁶', '⁷', '⁸', '⁹'];
    let digit = |c: char| c.to_digit(10).map_or('⁻', |digit| DIGITS[digit as usize]);
    number.to_string().chars().map(digit).collect()
}

/// What the paper says.
fn crosses(places: &[(f64, f64)]) -> Series {
    let points = places.iter().map(|(x, y)| Point::new(*x, *y));
    Series::new("CFS paper", Ink::Black, Mark::Crosses, points)
}

const FAILED_SERVERS: &str = "servers that fail at once (%)";

fn failed_lookups(found: &[Found], shares: &[usize], setup: &str, seeds: &[u64]) -> Outcome {
    let value = |f: &Found| f.failures;
    let copies = Setting::Default.dht().replicas as i32;
    let expected = |copies: i32| {
        (0..=50).map(move |n| Point::new(f64::from(n), (f64::from(n) / 100.0).powi(copies)))
    };
    // From the text: none below 20 %, 0.013 at 50 %.
    let paper = [(0.0, 0.0), (5.0, 0.0), (10.0, 0.0), (15.0, 0.0), (50.0, 0.013)];
    let all_lost = format!("all {copies} copies lost: p{}", superscript(copies));
    let mut series = vec![
        Series::new("all six copies lost: p⁶", Ink::Grey, Mark::Dashed, expected(6)),
        Series::new(all_lost, Ink::Grey, Mark::Dotted, expected(copies)),
    ];
    series.extend(lines(found, shares, value));
    series.push(crosses(&paper));
    let lost = |case| over_runs(found, case, 50, |f| f.lost).mean;
    Outcome {
        name: "cfs-fig13",
        title: "failed lookups after massive failure".into(),
        source: "CFS §7.2.5, Figure 13",
        setup: setup.to_owned(),
        comparison: vec![
            compared(found, 10, "lookups that fail", "0", 4, value),
            compared(found, 20, "lookups that fail", "0 below 20 %", 4, value),
            compared(found, 30, "lookups that fail", "very few", 4, value),
            compared(found, 50, "lookups that fail", "0.013 (0.5⁶ = 0.016)", 4, value),
        ],
        notes: vec![format!(
            "Of the blocks wanted at 50 %, {:.4} had no living copy in the paper's settings; as \
             shipped {:.4} with {copies} copies and {:.4} with six.",
            lost(Case::Paper),
            lost(Case::Default),
            lost(Case::DefaultSixCopies),
        )],
        csv: csv(found, shares, "failed_lookups", value),
        chart: Chart {
            title: "Lookups that fail after servers fail (CFS Figure 13)".into(),
            subtitle: subtitle(setup, seeds),
            x: Axis::linear(FAILED_SERVERS, 0.0, 52.0),
            y: Axis::up_to("failed lookups (share)", highest(&series)),
            series,
        },
        seeds: seeds.to_vec(),
    }
}

fn rpcs(found: &[Found], shares: &[usize], setup: &str, seeds: &[u64]) -> Outcome {
    let value = |f: &Found| f.rpcs;
    let mut series = lines(found, shares, value);
    // From the text: 5.7 in a 1,000-server system (Figure 9), one more at 50 %.
    series.push(crosses(&[(0.0, 5.7), (50.0, 6.7)]));
    let more = |case| {
        let at = |percent| over_runs(found, case, percent, value).mean;
        format!("{:+.2}", at(50) - at(0))
    };
    Outcome {
        name: "cfs-fig14",
        title: "RPCs per lookup after massive failure".into(),
        source: "CFS §7.2.5, Figure 14",
        setup: setup.to_owned(),
        comparison: vec![
            compared(found, 0, "RPCs per lookup", "5.7", 2, value),
            compared(found, 20, "RPCs per lookup", "", 2, value),
            compared(found, 50, "RPCs per lookup", "", 2, value),
            Comparison::new(
                "RPCs more when 50 % failed",
                "about 1",
                more(Case::Paper),
                format!("{}; six copies: {}", more(Case::Default), more(Case::DefaultSixCopies)),
            ),
        ],
        notes: vec![
            "Of lookups that succeed; calls to failed servers are not counted.".into(),
            format!(
                "As shipped with six copies, {:.2} questions a lookup are answered at 0 % and {:.2} at \
                 20 %, late answers included.",
                over_runs(found, Case::DefaultSixCopies, 0, |f| f.answers).mean,
                over_runs(found, Case::DefaultSixCopies, 20, |f| f.answers).mean,
            ),
        ],
        csv: csv(found, shares, "rpcs", value),
        chart: Chart {
            title: "RPCs per lookup after servers fail (CFS Figure 14)".into(),
            subtitle: subtitle(setup, seeds),
            x: Axis::linear(FAILED_SERVERS, 0.0, 52.0),
            y: Axis::up_to("RPCs per lookup (mean)", highest(&series)),
            series,
        },
        seeds: seeds.to_vec(),
    }
}

fn timeouts(found: &[Found], shares: &[usize], setup: &str, seeds: &[u64]) -> Outcome {
    let value = |f: &Found| f.timeouts;
    let below_one = [0.0, 50.0].map(|x| Point::new(x, 1.0));
    let paper = "CFS paper: always below one";
    let mut series = vec![Series::new(paper, Ink::Black, Mark::Dashed, below_one)];
    series.extend(lines(found, shares, value));
    Outcome {
        name: "cfs-fig15",
        title: "timeouts per lookup after massive failure".into(),
        source: "CFS §7.2.5, Figure 15",
        setup: setup.to_owned(),
        comparison: vec![
            compared(found, 10, "timeouts per lookup", "below 1", 3, value),
            compared(found, 30, "timeouts per lookup", "below 1", 3, value),
            compared(found, 50, "timeouts per lookup", "below 1", 3, value),
        ],
        notes: Vec::new(),
        csv: csv(found, shares, "timeouts", value),
        chart: Chart {
            title: "Timeouts per lookup after servers fail (CFS Figure 15)".into(),
            subtitle: subtitle(setup, seeds),
            x: Axis::linear(FAILED_SERVERS, 0.0, 52.0),
            y: Axis::up_to("timeouts per lookup (mean)", highest(&series)),
            series,
        },
        seeds: seeds.to_vec(),
    }
}
