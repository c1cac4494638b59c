//! Pastis §5.4, Figure 8: the benchmark by several clients at once.
//!
//! "We ran from one up to 16 concurrent Andrew Benchmark clients, each client writing to a different
//! directory so that no conflicts are generated. In all cases we use a Past network of 16 nodes, with
//! k = 4, and a 100 ms inter-node delay. The consistency model is close-to-open. … the total runtime
//! for a single client is 311.2 seconds. … only a 2% increase for 4 concurrent clients. … on the Ivy
//! file system … a 70% increase when going from 1 to 4 … running 16 concurrent client produces only a
//! 11.3% increase".
//!
//! The paper's nodes were real machines. Here clients share lines of 100 Mbit/s, a guess at the paper's
//! LAN, and no processors.

use std::time::Duration;

use atoll_sim::Latency;

use super::bench::{Measured, PHASES, Run};
use super::{more, of_runs, on_sphere, secs};
use crate::LabError;
use crate::chart::{Axis, Chart, Ink, Mark, Point, Series, highest};
use crate::experiment::{Context, Experiment, Group, crossed, runs};
use crate::outcome::{Comparison, Csv, Outcome};
use crate::setting::Setting;
use crate::statistics::Summary;

pub(crate) const GROUP: Group = Group {
    experiments: &[Experiment {
        name: "pastis-fig8",
        title: "time of the Andrew benchmark against the number of clients",
        source: "Pastis §5.4, Figure 8",
        nodes: None,
    }],
    run,
};

const NODES: usize = 16;
const REPLICAS: usize = 4;
const DELAY: Duration = Duration::from_millis(100);
/// 100 Mbit/s. A guess.
const LINK_BYTES_PER_SEC: u64 = 12_500_000;
const CLIENTS: [usize; 5] = [1, 2, 4, 8, 16];
const QUICK_CLIENTS: [usize; 3] = [1, 4, 16];
/// What §5.4 says: clients and how much longer they take than one.
const PAPER_ONE: f64 = 311.2;
const PAPER_MORE: [(usize, f64); 2] = [(4, 0.02), (16, 0.113)];
/// Of four Ivy clients over one, which §5.4 quotes.
const IVY_MORE: (usize, f64) = (4, 0.70);

type Case = (Setting, usize);

fn run(context: &Context<'_>) -> Result<Vec<Outcome>, LabError> {
    let seeds = context.seeds(4, 1);
    let clients: &[usize] = if context.options.quick { &QUICK_CLIENTS } else { &CLIENTS };
    let parts = crossed(&Setting::BOTH, clients, &seeds);
    let found = context.each(&parts, |(setting, clients, seed)| {
        let run = Run {
            clients: *clients,
            latency: Latency::Flat(DELAY),
            link: Some(LINK_BYTES_PER_SEC),
            ..on_sphere(*setting, NODES, REPLICAS, *seed)
        };
        Ok(((*setting, *clients), run.measure()?))
    })?;
    Ok(vec![outcome(&found, clients, seeds)])
}

fn outcome(found: &[(Case, Measured)], clients: &[usize], seeds: Vec<u64>) -> Outcome {
    let total = |setting, clients| of_runs(found, &(setting, clients), Measured::total);
    let mut csv = Csv::new(&["setting", "clients", "phase", "mean_secs", "sd", "runs"]);
    for setting in Setting::BOTH {
        for clients in clients {
            let mut row = |phase: &str, of: Summary| {
                let (mean, sd) = (format!("{:.3}", of.mean), format!("{:.3}", of.deviation));
                csv.row(&[&setting, clients, &phase, &mean, &sd, &of.count]);
            };
            for (number, phase) in PHASES.iter().enumerate() {
                row(phase, of_runs(found, &(setting, *clients), |m| m.phase(number)));
            }
            row("total", total(setting, *clients));
        }
    }
    let mut comparison = Vec::new();
    for clients in clients {
        let paper = if *clients == 1 { format!("{PAPER_ONE}") } else { String::new() };
        let [ours, shipped] = Setting::BOTH.map(|setting| secs(total(setting, *clients)));
        let what = match clients {
            1 => "seconds, one client".to_owned(),
            _ => format!("seconds, {clients} clients (their mean)"),
        };
        comparison.push(Comparison::new(what, paper, ours, shipped));
    }
    for clients in &clients[1..] {
        let said = |(of, share): &(usize, f64)| {
            (of == clients).then(|| format!("{:+.1} %", 100.0 * share))
        };
        let mut paper = PAPER_MORE.iter().find_map(said).unwrap_or_default();
        if let Some(ivy) = said(&IVY_MORE) {
            paper += &format!(" (Ivy: {ivy})");
        }
        let tell = |setting| more(total(setting, *clients), total(setting, 1));
        let [ours, shipped] = Setting::BOTH.map(tell);
        comparison.push(Comparison::new(
            format!("{clients} clients, more than one"),
            paper,
            ours,
            shipped,
        ));
    }
    Outcome {
        name: "pastis-fig8",
        title: "Concurrent clients".into(),
        source: "Pastis §5.4, Figure 8",
        setup: format!(
            "{NODES} nodes, {REPLICAS} replicas, close-to-open; every two nodes 100 ms apart one way, \
             lines of 100 Mbit/s; mean ± standard deviation of the runs"
        ),
        comparison,
        notes: vec![
            "The paper ran 16 real machines. Clients share no processor here: what is measured is \
             whether they wait for each other's writes and lines."
                .into(),
        ],
        csv,
        chart: chart(found, clients, &seeds),
        seeds,
    }
}

fn chart(found: &[(Case, Measured)], clients: &[usize], seeds: &[u64]) -> Chart {
    let line = |setting: Setting| {
        let points = clients.iter().map(|clients| {
            let Summary { mean, deviation, .. } =
                of_runs(found, &(setting, *clients), Measured::total);
            Point::spread(*clients as f64, mean, mean - deviation, mean + deviation)
        });
        setting.line("", points)
    };
    let [ours, shipped] = Setting::BOTH.map(line);
    let said =
        |(clients, more): &(usize, f64)| Point::new(*clients as f64, PAPER_ONE * (1.0 + more));
    let paper = [Point::new(1.0, PAPER_ONE)].into_iter().chain(PAPER_MORE.iter().map(said));
    let series = vec![
        ours,
        shipped,
        Series::new("Pastis paper (real machines)", Ink::Black, Mark::Crosses, paper),
        Series::new("Ivy, if it took as long alone", Ink::Grey, Mark::Pluses, [said(&IVY_MORE)]),
    ];
    let ticks = clients.iter().map(|clients| *clients as f64).collect();
    Chart {
        title: "Concurrent clients (Pastis Figure 8)".into(),
        subtitle: format!("{NODES} nodes, {REPLICAS} replicas, 100 ms, {}", runs(seeds)),
        x: Axis { ticks, ..Axis::linear("clients", 0.0, 17.0) },
        y: Axis::up_to("seconds (mean of the clients)", highest(&series)),
        series,
    }
}
