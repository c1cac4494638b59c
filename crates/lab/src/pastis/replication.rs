//! Pastis §5.3, Figures 5, 6 and 7: the benchmark against the number of replicas.
//!
//! "we ran the Andrew Benchmark with different replication factors on a network of 32 768 nodes. The
//! other settings were the same as in the previous experiment. … the total execution time … increas[es]
//! by only 4% between replication factors 2 (354 s) and 16 (369 s)." Figure 6 shows the phases that
//! write and read files; Figure 7 how far the nearest and the farthest replica of a block are, "as
//! measured after the benchmark completes".

use super::bench::{Distances, Measured};
use super::{NODES, QUICK_NODES, more, of_runs, on_sphere, secs};
use crate::LabError;
use crate::chart::{Axis, Chart, Ink, Mark, Point, Series, highest};
use crate::experiment::{Context, Experiment, Group, crossed, runs};
use crate::outcome::{Comparison, Csv, Outcome};
use crate::setting::Setting;
use crate::statistics::Summary;

const SOURCES: [&str; 3] =
    ["Pastis §5.3, Figure 5", "Pastis §5.3, Figure 6", "Pastis §5.3, Figure 7"];

pub(crate) const GROUP: Group = Group {
    experiments: &[
        Experiment {
            name: "pastis-fig5",
            title: "time of the Andrew benchmark against the number of replicas",
            source: SOURCES[0],
            nodes: Some(32..=65_536),
        },
        Experiment {
            name: "pastis-fig6",
            title: "time to write and to read files against the number of replicas",
            source: SOURCES[1],
            nodes: Some(32..=65_536),
        },
        Experiment {
            name: "pastis-fig7",
            title: "distance of the nearest and the farthest replica",
            source: SOURCES[2],
            nodes: Some(32..=65_536),
        },
    ],
    run,
};

const REPLICAS: [usize; 5] = [2, 4, 8, 12, 16];
const QUICK_REPLICAS: [usize; 2] = [2, 16];
/// Phases that write and read files.
const COPY: usize = 1;
const READ: usize = 3;
/// Of §5.3: at 2 and at 16 replicas.
const PAPER_TOTAL: [f64; 2] = [354.0, 369.0];
const PAPER_COPY: [f64; 2] = [93.0, 109.0];
const PAPER_READ: [f64; 2] = [52.5, 43.5];
/// In the order of [`Measured::distances`].
const KINDS: [&str; 3] = ["inodes", "content blocks", "keys everywhere"];

type Case = (Setting, usize);

struct Told<'a> {
    found: &'a [(Case, Measured)],
    nodes: usize,
    replicas: &'a [usize],
    seeds: &'a [u64],
}

fn run(context: &Context<'_>) -> Result<Vec<Outcome>, LabError> {
    let nodes = context.nodes(NODES, QUICK_NODES);
    // Few runs do not tell: whether the copy takes as long as call-back promises last decides about what is read after it.
    let seeds = context.seeds(4, 8);
    let replicas: &[usize] = if context.options.quick { &QUICK_REPLICAS } else { &REPLICAS };
    let parts = crossed(&Setting::BOTH, replicas, &seeds);
    let found = context.each(&parts, |(setting, replicas, seed)| {
        let measured = on_sphere(*setting, nodes, *replicas, *seed).measure()?;
        Ok(((*setting, *replicas), measured))
    })?;
    let told = Told { found: &found, nodes, replicas, seeds: &seeds };
    Ok(vec![told.totals(), told.phases(), told.distances()])
}

impl Told<'_> {
    fn of(&self, case: Case, quantity: impl Fn(&Measured) -> f64) -> Summary {
        of_runs(self.found, &case, quantity)
    }

    fn setup(&self) -> String {
        format!(
            "one client, close-to-open; {} nodes on a sphere with at most 300 ms one way; mean ± \
             standard deviation of the runs",
            self.nodes
        )
    }

    fn subtitle(&self) -> String {
        format!("{} nodes, sphere of 300 ms, {}", self.nodes, runs(self.seeds))
    }

    /// What a quantity is at each number of replicas, and how it changes.
    fn lines(
        &self,
        what: &str,
        paper: [f64; 2],
        change: &str,
        quantity: impl Fn(&Measured) -> f64,
    ) -> Vec<Comparison> {
        let (least, most) = (self.replicas[0], self.replicas[self.replicas.len() - 1]);
        let both = |what: String, paper: String, tell: &dyn Fn(Setting) -> String| {
            let [ours, shipped] = Setting::BOTH.map(tell);
            Comparison::new(what, paper, ours, shipped)
        };
        let mut lines = Vec::new();
        for replicas in self.replicas {
            let paper = match *replicas {
                2 => format!("{}", paper[0]),
                16 => format!("{}", paper[1]),
                _ => String::new(),
            };
            let tell = |setting| secs(self.of((setting, *replicas), &quantity));
            lines.push(both(format!("{what}, {replicas} replicas"), paper, &tell));
        }
        let of = |setting, replicas| self.of((setting, replicas), &quantity);
        let tell = |setting| more(of(setting, most), of(setting, least));
        lines.push(both(format!("{what}, change"), change.into(), &tell));
        lines
    }

    fn points(&self, setting: Setting, quantity: impl Fn(&Measured) -> f64) -> Vec<Point> {
        let point = |replicas: &usize| {
            let Summary { mean, deviation, .. } = self.of((setting, *replicas), &quantity);
            Point::spread(*replicas as f64, mean, mean - deviation, mean + deviation)
        };
        self.replicas.iter().map(point).collect()
    }

    fn x(&self) -> Axis {
        let ticks = self.replicas.iter().map(|replicas| *replicas as f64).collect();
        Axis { ticks, ..Axis::linear("replicas of a block", 0.0, 17.0) }
    }

    fn paper(&self, secs: [f64; 2], what: &str) -> Series {
        let points = [Point::new(2.0, secs[0]), Point::new(16.0, secs[1])];
        Series::new(format!("Pastis paper{what}"), Ink::Black, Mark::Crosses, points)
    }

    fn outcome(
        &self,
        number: usize,
        title: &str,
        comparison: Vec<Comparison>,
        notes: Vec<String>,
        (csv, series, y): (Csv, Vec<Series>, &str),
    ) -> Outcome {
        Outcome {
            name: GROUP.experiments[number].name,
            title: title.into(),
            source: SOURCES[number],
            setup: self.setup(),
            comparison,
            notes,
            csv,
            chart: Chart {
                title: format!("{title} (Pastis Figure {})", number + 5),
                subtitle: self.subtitle(),
                x: self.x(),
                y: Axis::up_to(y, highest(&series)),
                series,
            },
            seeds: self.seeds.to_vec(),
        }
    }

    fn totals(&self) -> Outcome {
        let mut csv = Csv::new(&["setting", "replicas", "mean_secs", "sd", "runs"]);
        for setting in Setting::BOTH {
            for replicas in self.replicas {
                let of = self.of((setting, *replicas), Measured::total);
                let (mean, sd) = (format!("{:.3}", of.mean), format!("{:.3}", of.deviation));
                csv.row(&[&setting, replicas, &mean, &sd, &of.count]);
            }
        }
        let line = |setting: Setting| setting.line("", self.points(setting, Measured::total));
        let [ours, shipped] = Setting::BOTH.map(line);
        let series = vec![ours, shipped, self.paper(PAPER_TOTAL, "")];
        let notes = vec![
            "A reader of an inode waits for all replicas that answer in time and joins what they hold, \
             so each one more makes it wait longer; the paper's reader asks for handles and fetches the \
             newest."
                .into(),
        ];
        let comparison = self.lines("seconds", PAPER_TOTAL, "+4 %", Measured::total);
        self.outcome(0, "Replication factor", comparison, notes, (csv, series, "seconds"))
    }

    fn phases(&self) -> Outcome {
        let mut csv = Csv::new(&["setting", "replicas", "phase", "mean_secs", "sd", "runs"]);
        for setting in Setting::BOTH {
            for replicas in self.replicas {
                for (phase, number) in [("copy", COPY), ("read", READ)] {
                    let of = self.of((setting, *replicas), |m| m.phase(number));
                    let (mean, sd) = (format!("{:.3}", of.mean), format!("{:.3}", of.deviation));
                    csv.row(&[&setting, replicas, &phase, &mean, &sd, &of.count]);
                }
            }
        }
        let mut comparison =
            self.lines("seconds to write files", PAPER_COPY, "+17 %", |m| m.phase(COPY));
        comparison
            .extend(self.lines("seconds to read files", PAPER_READ, "-17 %", |m| m.phase(READ)));
        let points = |setting, phase: usize| self.points(setting, move |m| m.phase(phase));
        let series = vec![
            Setting::Paper.line(": write", points(Setting::Paper, COPY)),
            Setting::Default.line(": write", points(Setting::Default, COPY)),
            Series::new("paper's settings: read", Ink::Sky, Mark::Triangles, {
                points(Setting::Paper, READ)
            }),
            Series::new("default settings: read", Ink::Orange, Mark::Dotted, {
                points(Setting::Default, READ)
            }),
            self.paper(PAPER_COPY, ": write"),
            Series { mark: Mark::Pluses, ..self.paper(PAPER_READ, ": read") },
        ];
        let chart = (csv, series, "seconds");
        self.outcome(1, "Replication factor, writing and reading", comparison, Vec::new(), chart)
    }

    fn distances(&self) -> Outcome {
        let mut csv =
            Csv::new(&["replicas", "blocks", "count", "nearest_ms", "farthest_ms", "runs"]);
        let of = |replicas: usize, kind: usize, quantity: fn(&Distances) -> f64| {
            self.of((Setting::Default, replicas), |m| quantity(&m.distances[kind]))
        };
        let mut comparison = Vec::new();
        for replicas in self.replicas {
            for (kind, name) in KINDS.iter().enumerate() {
                let count = of(*replicas, kind, |d| d.blocks as f64).mean;
                let nearest = of(*replicas, kind, |d| d.nearest_ms);
                let farthest = of(*replicas, kind, |d| d.farthest_ms);
                let ms = |of: Summary| format!("{:.1}", of.mean);
                let (near, far) = (ms(nearest), ms(farthest));
                csv.row(&[replicas, name, &format!("{count:.1}"), &near, &far, &nearest.count]);
                let what = format!("{name}, {replicas} replicas: nearest, farthest");
                let said = format!("{:.0} ms, {:.0} ms", nearest.mean, farthest.mean);
                comparison.push(Comparison::new(what, "", "", said));
            }
        }
        let looks =
            [(Ink::Vermilion, Mark::Discs), (Ink::Blue, Mark::Squares), (Ink::Grey, Mark::Line)];
        let mut series = Vec::new();
        for (end, quantity) in [
            ("farthest", (|d| d.farthest_ms) as fn(&Distances) -> f64),
            ("nearest", |d: &Distances| d.nearest_ms),
        ] {
            for (kind, name) in KINDS.iter().enumerate() {
                let (ink, mark) = looks[kind];
                let points = self
                    .replicas
                    .iter()
                    .map(|k| Point::new(*k as f64, of(*k, kind, quantity).mean));
                series.push(Series::new(format!("{name}: {end}"), ink, mark, points));
            }
        }
        let notes = vec![
            "Round trips from the client to the replicas of a block, means over the blocks that the \
             benchmark has written and, as the paper's reference, over a block at each node's place. \
             The paper gives no numbers. Files up to 16 KiB lie in their inodes, so there are few \
             content blocks."
                .into(),
        ];
        self.outcome(2, "Distances of replicas", comparison, notes, (csv, series, "round trip, ms"))
    }
}
