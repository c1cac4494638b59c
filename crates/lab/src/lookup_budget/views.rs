//! What was found, as tables and charts.

use super::{BUDGET, COLD, Case, Found, Runs, SOURCE, Sample, TINY, Upkeep};
use crate::chart::{Axis, Chart, Ink, Mark, Point, Series, highest};
use crate::churning::Tables;
use crate::outcome::{Comparison, Csv, Outcome};
use crate::statistics::summary;

/// Wanted of a table that adapts: at 4,096 nodes, 2.0 RPCs within 1 KiB/s.
const WANTED: (f64, f64) = (1024.0, 2.0);
/// Ends of the plot, bytes a second.
const LEAST_BYTES: f64 = 128.0;
const MOST_BYTES: f64 = 4096.0;

impl Runs<'_> {
    fn of(&self, case: Case) -> impl Iterator<Item = &Found> {
        self.found.iter().filter(move |f| f.case == case)
    }

    /// The large ring with tables of a kind that begin cold.
    fn cold(&self, upkeep: Upkeep) -> Case {
        Case { nodes: self.nodes, upkeep, begins: Tables::Cold }
    }

    /// The large ring as shipped, with tables that begin full.
    fn rested(&self) -> Case {
        Case { begins: Tables::Full, ..self.cold(Upkeep::SHIPPED) }
    }

    /// Over the runs of one case: RPCs, calls without an answer, bytes a second.
    fn means(&self, case: Case) -> [f64; 3] {
        let mean = |value: fn(&Found) -> f64| summary(self.of(case).map(value)).mean;
        [mean(|f| f.rpcs.mean), mean(|f| f.unanswered), mean(|f| f.upkeep_bytes_per_sec)]
    }

    fn churn(&self) -> &'static str {
        match self.context.options.availability {
            Some(_) => "churn as in the file",
            None => "churn as in Overnet (sessions of two hours)",
        }
    }

    fn setup(&self, begins: &str, lookups: usize) -> String {
        let churn = self.churn();
        format!(
            "about {} nodes up, {churn}; {begins}; {lookups} lookups from random nodes",
            self.nodes
        )
    }

    /// What is said of an outcome besides its points.
    fn outcome(&self, name: &'static str, setup: String, csv: Csv, chart: Chart) -> Outcome {
        Outcome {
            name,
            title: chart.title.clone(),
            source: SOURCE,
            setup,
            comparison: Vec::new(),
            notes: Vec::new(),
            csv,
            chart,
            seeds: self.seeds.clone(),
        }
    }

    // --- in the long run --------------------------------------------------------------

    pub(super) fn by_budget(&self) -> Outcome {
        let (paper, shipped) = (self.cold(Upkeep::PAPER), self.rested());
        let line = |quantity: &str, paper_says: &str, value: &dyn Fn(Case) -> String| {
            Comparison::new(quantity, paper_says, value(paper), value(shipped))
        };
        let failed = |case| {
            let failed: usize = self.of(case).map(|f| f.failed).sum();
            let all = failed + self.of(case).map(|f| f.rpcs.count).sum::<usize>();
            format!("{failed} of {all}")
        };
        let paper_says = if self.nodes == 4096 { "6.7, without churn" } else { "" };
        let [tiny, _, spent] = self.means(self.cold(Upkeep::Budget(TINY)));
        let half_log = (self.nodes as f64).log2() / 2.0;
        let minutes = |moments: &[u64]| moments.last().copied().unwrap_or_default() / 60;
        let begins = format!(
            "tables as shipped begin full, {} minutes before, others empty, {} minutes before",
            minutes(self.rest_secs),
            minutes(self.moments_secs)
        );
        let setup = self.setup(&begins, self.lookups);
        Outcome {
            comparison: vec![
                line("RPCs per lookup", paper_says, &|case| format!("{:.2}", self.means(case)[0])),
                line("calls without an answer, per lookup", "", &|case| {
                    format!("{:.3}", self.means(case)[1])
                }),
                line("upkeep of a node (bytes/s)", "", &|case| {
                    format!("{:.0}", self.means(case)[2])
                }),
                line("lookups that failed", "", &failed),
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
                format!(
                    "The curve over all budgets is of {} nodes, a few minutes after a cold start.",
                    self.curve_nodes
                ),
            ],
            ..self.outcome(BUDGET, setup, self.budgets_csv(), self.budgets_chart())
        }
    }

    fn budgets_csv(&self) -> Csv {
        let mut csv = Csv::new(&[
            "nodes",
            "tables",
            "begins",
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
            let count = f.rpcs.count + f.failed;
            csv.row(&[
                &f.case.nodes,
                &f.case.upkeep.name(),
                &begins_name(f.case.begins),
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

    /// RPCs over bytes a second of those cases that are wanted.
    fn points(&self, wanted: impl Fn(&Case) -> bool) -> Vec<Point> {
        let mut cases: Vec<Case> = self.found.iter().map(|f| f.case).filter(wanted).collect();
        cases.dedup();
        let point = |case: Case| {
            let [rpcs, _, bytes] = self.means(case);
            Point::new(bytes, rpcs)
        };
        let mut points: Vec<Point> = cases.into_iter().map(point).collect();
        points.sort_by(|a, b| a.x.total_cmp(&b.x));
        points
    }

    fn budgets_chart(&self) -> Chart {
        let (all, few) = (self.nodes, self.curve_nodes);
        let is_fingers = |case: &Case| matches!(case.upkeep, Upkeep::Fingers(_));
        let fingers = |nodes| self.points(move |case| case.nodes == nodes && is_fingers(case));
        let curve =
            |case: &Case| case.nodes == few && !is_fingers(case) && case.begins == Tables::Cold;
        let ends = [self.cold(Upkeep::Budget(TINY)), self.rested()];
        let mut series = vec![
            Series::new(format!("fingers, {few} nodes"), Ink::Blue, Mark::Squares, fingers(few)),
            Series::new(
                format!("adaptive table, {few} nodes"),
                Ink::Green,
                Mark::Triangles,
                self.points(curve),
            ),
            Series::new(
                format!("adaptive table, {all} nodes"),
                Ink::Vermilion,
                Mark::Discs,
                self.points(|case| ends.contains(case)),
            ),
        ];
        if all != few {
            let name = format!("fingers, {all} nodes");
            series.push(Series::new(name, Ink::Black, Mark::Squares, fingers(all)));
        }
        series.push(self.half_log([LEAST_BYTES, MOST_BYTES]));
        if all == 4096 {
            let wanted = [Point::new(WANTED.0, WANTED.1)];
            series.push(Series::new("wanted: 2.0 at 1 KiB/s", Ink::Black, Mark::Pluses, wanted));
        }
        let ticks = std::iter::successors(Some(LEAST_BYTES), |n| Some(n * 2.0));
        Chart {
            title: "RPCs per lookup by upkeep bandwidth".into(),
            subtitle: self.churn().into(),
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

    /// What CFS says, from one end of a chart to the other.
    fn half_log(&self, ends: [f64; 2]) -> Series {
        let half_log = (self.nodes as f64).log2() / 2.0;
        let points = ends.map(|x| Point::new(x, half_log));
        Series::new(format!("½·log2 {}", self.nodes), Ink::Grey, Mark::Dashed, points)
    }

    // --- since a cold start -----------------------------------------------------------

    /// The lookups of all runs of a case, by moment: seconds and mean RPCs.
    fn filling(&self, case: Case) -> Vec<Point> {
        let at = |(moment, secs): (usize, &u64)| {
            let samples = self.of(case).filter_map(|f| f.filling.get(moment));
            Point::new(*secs as f64, summary(samples.map(|sample| sample.rpcs.mean)).mean)
        };
        self.moments_secs.iter().enumerate().map(at).collect()
    }

    pub(super) fn by_time(&self) -> Outcome {
        let [paper, shipped] = [Upkeep::PAPER, Upkeep::SHIPPED].map(|kind| self.cold(kind));
        let line = |(paper, shipped): (Point, Point)| {
            let quantity = format!("RPCs per lookup after {:.0} s", paper.x);
            Comparison::new(quantity, "", format!("{:.2}", paper.y), format!("{:.2}", shipped.y))
        };
        let setup = self.setup("cold start", self.at_moment);
        Outcome {
            comparison: self
                .filling(paper)
                .into_iter()
                .zip(self.filling(shipped))
                .map(line)
                .collect(),
            notes: vec![
                "Cold: every node knows its successors and fingers and nobody else, and has just \
                 begun."
                    .into(),
            ],
            ..self.outcome(COLD, setup, self.filling_csv(), self.filling_chart())
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
        for f in self.found.iter().filter(|f| f.case.begins == Tables::Cold) {
            for Sample { secs, rpcs, bytes_per_sec } in &f.filling {
                let [mean, deviation, upkeep] =
                    [rpcs.mean, rpcs.deviation, *bytes_per_sec].map(|n| format!("{n:.3}"));
                let name = f.case.upkeep.name();
                csv.row(&[&f.case.nodes, &name, &f.seed, secs, &mean, &deviation, &upkeep]);
            }
        }
        csv
    }

    fn filling_chart(&self) -> Chart {
        let ends = [self.moments_secs[0], self.moments_secs[self.moments_secs.len() - 1]];
        let [first, last] = ends.map(|secs| secs as f64);
        let line = |name: &str, ink, mark, kind| {
            Series::new(name, ink, mark, self.filling(self.cold(kind)))
        };
        let tiny = format!("adaptive table on {TINY} bytes/s");
        let series = vec![
            line("Atoll, paper's settings: fingers", Ink::Blue, Mark::Squares, Upkeep::PAPER),
            line(&tiny, Ink::Green, Mark::Triangles, Upkeep::Budget(TINY)),
            line("Atoll, default settings", Ink::Vermilion, Mark::Discs, Upkeep::SHIPPED),
            self.half_log([first, last]),
        ];
        Chart {
            title: "RPCs per lookup since a cold start".into(),
            subtitle: format!("about {} nodes up, {}", self.nodes, self.churn()),
            x: Axis::log(
                "time since the cold start (s)",
                first,
                last,
                self.moments_secs.iter().map(|secs| *secs as f64).collect(),
            ),
            y: Axis::up_to("RPCs per lookup (mean)", highest(&series)),
            series,
        }
    }
}

fn begins_name(begins: Tables) -> &'static str {
    match begins {
        Tables::Cold => "cold",
        Tables::Full => "full",
    }
}
