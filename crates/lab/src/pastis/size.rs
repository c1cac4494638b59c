//! Pastis §5.2, Figure 4: the time of the benchmark against the number of nodes.
//!
//! "We ran the benchmark on simulated networks of various size, using the sphere topology. The maximal
//! network latency … was set to of 300ms. We used the close-to-open consistency model, and Past's
//! replication was disabled. … We observe that the total execution time increases only by 13.5% between
//! 16 (311 s) and 32 768 nodes (353 s)."
//!
//! With one replica the time of a run depends much on where the few directories lie, so there are more
//! runs than the paper's four.

use super::bench::{Measured, PHASES, Routing, Run};
use super::{NODES, QUICK_NODES, more, of_runs, on_sphere, secs};
use crate::LabError;
use crate::chart::{Axis, Chart, Ink, Mark, Point, Series, highest};
use crate::experiment::{Context, Experiment, Group, crossed, runs};
use crate::outcome::{Comparison, Csv, Outcome};
use crate::setting::Setting;
use crate::statistics::Summary;

pub(crate) const GROUP: Group = Group {
    experiments: &[Experiment {
        name: "pastis-fig4",
        title: "time of the Andrew benchmark against the number of nodes",
        source: "Pastis §5.2, Figure 4",
        nodes: Some(16..=65_536),
    }],
    run,
};

const SIZES: [usize; 5] = [16, 128, 1024, 8192, NODES];
/// Of Figure 4, from the text of §5.2.
const PAPER: [(usize, f64); 2] = [(16, 311.0), (NODES, 353.0)];

/// A line of the figure.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Case {
    Paper,
    Default,
    /// The default settings, but no replica set is looked up before it is needed.
    NotNear,
    Tcp,
    Fingers,
}

impl Case {
    const ALL: [Case; 5] = [Case::Paper, Case::Default, Case::NotNear, Case::Tcp, Case::Fingers];

    fn name(self) -> &'static str {
        match self {
            Case::Paper => "paper",
            Case::Default => "default",
            Case::NotNear => "default-not-near",
            Case::Tcp => "default-over-tcp",
            Case::Fingers => "paper-with-fingers",
        }
    }

    fn run(self, nodes: usize, seed: u64) -> Run {
        let is_paper = matches!(self, Case::Paper | Case::Fingers);
        let setting = if is_paper { Setting::Paper } else { Setting::Default };
        let routing = if self == Case::Fingers { Routing::Fingers } else { Routing::AsShipped };
        let usual = on_sphere(setting, nodes, 1, seed);
        let makes_near = usual.makes_near && self != Case::NotNear;
        Run { routing, over_tcp: self == Case::Tcp, makes_near, ..usual }
    }
}

type Found = [((Case, usize), Measured)];

fn run(context: &Context<'_>) -> Result<Vec<Outcome>, LabError> {
    let most = context.nodes(NODES, QUICK_NODES);
    let seeds = context.seeds(8, 4);
    let smaller = SIZES.into_iter().filter(|nodes| *nodes < most);
    let sizes: Vec<usize> = smaller.chain([most]).collect();
    // The largest rings take longest, so they begin first.
    let largest_first: Vec<usize> = sizes.iter().rev().copied().collect();
    let parts = crossed(&largest_first, &Case::ALL, &seeds);
    let found = context.each(&parts, |(nodes, case, seed)| {
        Ok(((*case, *nodes), case.run(*nodes, *seed).measure()?))
    })?;
    Ok(vec![outcome(&found, &sizes, seeds)])
}

fn outcome(found: &Found, sizes: &[usize], seeds: Vec<u64>) -> Outcome {
    let mut csv = Csv::new(&["case", "nodes", "phase", "mean_secs", "sd", "runs"]);
    let total = |case, nodes| of_runs(found, &(case, nodes), Measured::total);
    for case in Case::ALL {
        for nodes in sizes {
            let mut row = |phase: &str, of: Summary| {
                let (mean, sd) = (format!("{:.3}", of.mean), format!("{:.3}", of.deviation));
                csv.row(&[&case.name(), nodes, &phase, &mean, &sd, &of.count]);
            };
            for (number, phase) in PHASES.iter().enumerate() {
                row(phase, of_runs(found, &(case, *nodes), |measured| measured.phase(number)));
            }
            row("total", total(case, *nodes));
        }
    }
    let paper = |nodes| PAPER.iter().find(|(of, _)| *of == nodes).map(|(_, secs)| *secs);
    let told = |nodes| paper(nodes).map_or_else(String::new, |secs| format!("{secs}"));
    let both = |what: String, paper: String, tell: &dyn Fn(Case) -> String| {
        Comparison::new(what, paper, tell(Case::Paper), tell(Case::Default))
    };
    let mut comparison = Vec::new();
    for nodes in sizes {
        let tell = |case| secs(total(case, *nodes));
        comparison.push(both(format!("seconds, {nodes} nodes"), told(*nodes), &tell));
    }
    let (least, most) = (sizes[0], sizes[sizes.len() - 1]);
    let grown = |case| more(total(case, most), total(case, least));
    let paper_grown = if most == NODES { "+13.5 %" } else { "" };
    let what = format!("more at {most} nodes than at {least}");
    comparison.push(both(what, paper_grown.into(), &grown));
    for (number, phase) in PHASES.iter().enumerate() {
        let of = |case, nodes| of_runs(found, &(case, nodes), |m| m.phase(number));
        let tell = |case| {
            let (from, to) = (of(case, least), of(case, most));
            let more = more(to, from);
            let more = if more.is_empty() { more } else { format!(" ({more})") };
            format!("{:.1} to {:.1}{more}", from.mean, to.mean)
        };
        comparison.push(both(format!("of these, phase {phase}"), String::new(), &tell));
    }
    let aside = |case, what: &str| {
        format!(
            "{what}: {} s with {least} nodes, {} s with {most} ({}).",
            secs(total(case, least)),
            secs(total(case, most)),
            grown(case)
        )
    };
    Outcome {
        name: "pastis-fig4",
        title: "Network size".into(),
        source: "Pastis §5.2, Figure 4",
        setup: "one client, close-to-open, one replica; sphere with at most 300 ms one way; \
                mean ± standard deviation of the runs"
            .into(),
        comparison,
        notes: vec![
            "With 16 nodes every node knows the place of all others, and no block is looked up. In a \
             large ring the paper's settings look each inode up each time; the default ones look up directories \
             and what others have made, and again when the replica set that is remembered is a minute old."
                .into(),
            aside(
                Case::NotNear,
                "In the default settings a new file's inode lies on the nodes of its directory, and is put together \
                 with its name; without that",
            ),
            aside(
                Case::Tcp,
                "As shipped calls travel on TCP connections with TLS, and the first call to a node \
                 waits two round trips longer, which the paper's simulator does not know either. \
                 With that",
            ),
            aside(
                Case::Fingers,
                "In the paper's settings with CFS's fingers instead of Atoll's table, lookups take \
                 one question after another",
            ),
        ],
        csv,
        chart: chart(found, sizes, &seeds),
        seeds,
    }
}

fn chart(found: &Found, sizes: &[usize], seeds: &[u64]) -> Chart {
    let points = |case| {
        sizes.iter().map(move |nodes| {
            let Summary { mean, deviation, .. } = of_runs(found, &(case, *nodes), Measured::total);
            Point::spread(*nodes as f64, mean, mean - deviation, mean + deviation)
        })
    };
    let most = sizes[sizes.len() - 1];
    let of_paper = PAPER.iter().filter(|(nodes, _)| *nodes <= most);
    let of_paper = of_paper.map(|(nodes, secs)| Point::new(*nodes as f64, *secs));
    let series = vec![
        Series::new("paper's settings, CFS's fingers", Ink::Sky, Mark::Dotted, {
            points(Case::Fingers)
        }),
        Setting::Paper.line("", points(Case::Paper)),
        Series::new("default settings, over TCP", Ink::Orange, Mark::Triangles, points(Case::Tcp)),
        Setting::Default.line("", points(Case::Default)),
        Series::new("Pastis paper", Ink::Black, Mark::Crosses, of_paper),
    ];
    let ticks = sizes.iter().map(|nodes| *nodes as f64).collect();
    Chart {
        title: "Andrew benchmark (Pastis Figure 4)".into(),
        subtitle: format!(
            "one client, one replica, sphere of 300 ms, {}; bars: one standard deviation",
            runs(seeds)
        ),
        x: Axis::log("nodes", sizes[0] as f64, most as f64, ticks),
        y: Axis::up_to("seconds of the network", highest(&series)),
        series,
    }
}
