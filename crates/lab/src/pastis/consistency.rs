//! Pastis §5.5 and §5.6, Figures 9 and 10: what consistency costs, and what remembering replica sets
//! saves.
//!
//! Figure 9 has three runs: close-to-open, read-your-writes, and the latter with "10% of the closest
//! inode replicas … stale. This simulates an execution in which the nodes holding these replicas would be
//! down when inodes are updated in phase 2, and would be up again when the file system client must
//! retrieve an inode replica in phases 3-5." Each time is split as [`super::observed`] says.
//!
//! Figure 10 has five: without any optimisation; with fast `lookupHandles` calls, which the root
//! forwards to the replicas; with remembered replica sets; the same with a tenth of the sets out of date;
//! and that with fast calls. In their place Atoll has early questions: a reader asks the nodes that are named
//! as the replica set while the lookup asks the root. It asks the nearest for the block and the others for
//! their versions, and fetches nothing after.

use atoll_volume::shared::Consistency;

use super::bench::{Measured, OutOfDate, PHASES, Run};
use super::observed::Work;
use super::{MOST_REPLICAS, NODES, QUICK_NODES, more, of_runs, on_sphere, secs};
use crate::LabError;
use crate::chart::{Axis, Chart, Ink, Mark, Point, Series, highest};
use crate::experiment::{Context, Experiment, Group, crossed, runs};
use crate::outcome::{Comparison, Csv, Outcome};
use crate::setting::Setting;
use crate::statistics::Summary;

pub(crate) const GROUP: Group = Group {
    experiments: &[
        Experiment {
            name: "pastis-fig9",
            title: "close-to-open against read-your-writes",
            source: "Pastis §5.5, Figure 9",
            nodes: Some(32..=65_536),
        },
        Experiment {
            name: "pastis-fig10",
            title: "remembered replica sets",
            source: "Pastis §5.6, Figure 10",
            nodes: Some(32..=65_536),
        },
    ],
    run,
};

/// What differs between the bars.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Case {
    CloseToOpen,
    ReadYourWrites,
    StaleInodes,
    NoSets,
    Early,
    Sets,
    OutdatedSets,
    OutdatedEarly,
}

const MODELS: [Case; 3] = [Case::CloseToOpen, Case::ReadYourWrites, Case::StaleInodes];
const SETS: [Case; 5] =
    [Case::NoSets, Case::Early, Case::Sets, Case::OutdatedSets, Case::OutdatedEarly];

/// Kinds of work from the lowest part of a bar up.
const WORKS: [(Work, &str); 3] = [
    (Work::Content, "content blocks"),
    (Work::WriteInode, "writing inodes"),
    (Work::ReadInode, "reading inodes"),
];

impl Case {
    fn name(self) -> &'static str {
        match self {
            Case::CloseToOpen => "close-to-open",
            Case::ReadYourWrites => "read-your-writes",
            Case::StaleInodes => "read-your-writes, 10 % stale",
            Case::NoSets => "sets looked up",
            Case::Early => "sets looked up, early questions",
            Case::Sets => "sets remembered",
            Case::OutdatedSets => "10 % out of date",
            Case::OutdatedEarly => "10 % out of date, early questions",
        }
    }

    /// Its name below a bar.
    fn bar(self) -> &'static str {
        match self {
            Case::CloseToOpen => "CTO",
            Case::ReadYourWrites => "RYW",
            Case::StaleInodes => "RYW, stale",
            Case::NoSets => "looked up",
            Case::Early => "early",
            Case::Sets => "known",
            Case::OutdatedSets => "stale",
            Case::OutdatedEarly => "both",
        }
    }

    fn run(self, setting: Setting, nodes: usize, seed: u64) -> Run {
        let usual = on_sphere(setting, nodes, MOST_REPLICAS, seed);
        let (read_your_writes, nothing) = (Consistency::ReadYourWrites, OutOfDate::Nothing);
        let with = |knows_sets, asks_early, out_of_date| {
            let makes_near = knows_sets && usual.makes_near;
            Run { knows_sets, makes_near, asks_early, out_of_date, ..usual.clone() }
        };
        match self {
            Case::CloseToOpen => usual,
            Case::ReadYourWrites => Run { consistency: read_your_writes, ..usual },
            Case::StaleInodes => {
                Run { consistency: read_your_writes, out_of_date: OutOfDate::Inodes, ..usual }
            }
            Case::NoSets => with(false, false, nothing),
            Case::Early => with(false, true, nothing),
            Case::Sets => with(true, false, nothing),
            Case::OutdatedSets => with(true, false, OutOfDate::Sets),
            Case::OutdatedEarly => with(true, true, OutOfDate::Sets),
        }
    }
}

struct Told<'a> {
    found: &'a [((Setting, Case), Measured)],
    nodes: usize,
    seeds: &'a [u64],
}

fn run(context: &Context<'_>) -> Result<Vec<Outcome>, LabError> {
    let nodes = context.nodes(NODES, QUICK_NODES);
    let seeds = context.seeds(4, 2);
    let mut cases = Vec::new();
    if context.wants("pastis-fig9") {
        cases.extend(MODELS);
    }
    if context.wants("pastis-fig10") {
        cases.extend(SETS);
    }
    let parts = crossed(&Setting::BOTH, &cases, &seeds);
    let found = context.each(&parts, |(setting, case, seed)| {
        Ok(((*setting, *case), case.run(*setting, nodes, *seed).measure()?))
    })?;
    let told = Told { found: &found, nodes, seeds: &seeds };
    Ok(vec![told.models(), told.sets()])
}

impl Told<'_> {
    fn of(&self, setting: Setting, case: Case, quantity: impl Fn(&Measured) -> f64) -> Summary {
        of_runs(self.found, &(setting, case), quantity)
    }

    fn total(&self, setting: Setting, case: Case) -> Summary {
        self.of(setting, case, Measured::total)
    }

    fn work(&self, setting: Setting, case: Case, work: Work) -> Summary {
        self.of(setting, case, |measured| measured.spent(work as usize))
    }

    fn line(&self, what: &str, paper: &str, tell: impl Fn(Setting) -> String) -> Comparison {
        let [ours, shipped] = Setting::BOTH.map(tell);
        Comparison::new(what, paper, ours, shipped)
    }

    /// Each phase of each case, split by kind of work.
    fn csv(&self, cases: &[Case]) -> Csv {
        let mut csv = Csv::new(&["setting", "case", "phase", "work", "mean_secs", "sd", "runs"]);
        for setting in Setting::BOTH {
            for case in cases.iter().copied() {
                let mut row = |phase: &str, work: &str, of: Summary| {
                    let name = case.name().replace(',', ";");
                    let (mean, sd) = (format!("{:.3}", of.mean), format!("{:.3}", of.deviation));
                    csv.row(&[&setting, &name, &phase, &work, &mean, &sd, &of.count]);
                };
                for (number, phase) in PHASES.iter().enumerate() {
                    row(phase, "all", self.of(setting, case, |m| m.phase(number)));
                }
                for (work, name) in WORKS {
                    row("total", name, self.work(setting, case, work));
                }
                row("total", "all", self.total(setting, case));
            }
        }
        csv
    }

    fn models(&self) -> Outcome {
        use Case::{CloseToOpen, ReadYourWrites, StaleInodes};
        let total = |case| move |setting| secs(self.total(setting, case));
        let work = |case, work| move |setting| secs(self.work(setting, case, work));
        let change =
            |case, than| move |setting| more(self.total(setting, case), self.total(setting, than));
        let read = Work::ReadInode;
        let comparison = vec![
            self.line("seconds, close-to-open", "about 376", total(CloseToOpen)),
            self.line("seconds, read-your-writes", "252", total(ReadYourWrites)),
            self.line("change", "-33 %", change(ReadYourWrites, CloseToOpen)),
            self.line("read-your-writes, 10 % stale, change", "+3 %", {
                change(StaleInodes, ReadYourWrites)
            }),
            self.line("seconds reading inodes, close-to-open", "144", work(CloseToOpen, read)),
            self.line("seconds reading inodes, read-your-writes", "21", {
                work(ReadYourWrites, read)
            }),
            self.line("seconds reading inodes, 10 % stale", "", work(StaleInodes, read)),
            self.line("seconds writing inodes, close-to-open", "", {
                work(CloseToOpen, Work::WriteInode)
            }),
            self.line("seconds writing inodes, read-your-writes", "", {
                work(ReadYourWrites, Work::WriteInode)
            }),
        ];
        let notes = vec![
            "The paper's 376 s follow from its 252 s with read-your-writes, which it calls 33 % less."
                .into(),
            "A stale replica is asked once: the reader sends it the newer version, which the paper's \
             does not."
                .into(),
        ];
        let title = "Consistency models";
        self.outcome(0, title, comparison, notes, &MODELS)
    }

    fn sets(&self) -> Outcome {
        use Case::{Early, NoSets, OutdatedEarly, OutdatedSets, Sets};
        let change =
            |case, than| move |setting| more(self.total(setting, case), self.total(setting, than));
        let part = |work, case, than| {
            move |setting| more(self.work(setting, case, work), self.work(setting, than, work))
        };
        let total = |case| move |setting| secs(self.total(setting, case));
        let (read, write) = (Work::ReadInode, Work::WriteInode);
        let comparison = vec![
            self.line("seconds, sets looked up each time", "about 376", total(NoSets)),
            self.line("early questions (fast lookupHandles), change", "-9 %", {
                change(Early, NoSets)
            }),
            self.line("change of reading inodes", "-23 %", part(read, Early, NoSets)),
            self.line("seconds, sets remembered", "282", total(Sets)),
            self.line("change", "-25 %", change(Sets, NoSets)),
            self.line("change of reading inodes", "-38 %", part(read, Sets, NoSets)),
            self.line("change of writing inodes", "-30 %", part(write, Sets, NoSets)),
            self.line("10 % of the sets out of date, change", "", change(OutdatedSets, Sets)),
            self.line("change of reading inodes", "+14 %", part(read, OutdatedSets, Sets)),
            self.line("the same with early questions, change", "", change(OutdatedEarly, Sets)),
            self.line("change of reading inodes", "+7 %", part(read, OutdatedEarly, Sets)),
        ];
        let notes = vec![
            "The paper's second and fifth run have the root forward a reader's question to the \
             replicas. Here the reader asks the nodes that are named as the set itself, while the \
             lookup asks the root."
                .into(),
        ];
        self.outcome(1, "Remembered replica sets", comparison, notes, &SETS)
    }

    fn outcome(
        &self,
        number: usize,
        title: &str,
        comparison: Vec<Comparison>,
        notes: Vec<String>,
        cases: &[Case],
    ) -> Outcome {
        let experiment = &GROUP.experiments[number];
        Outcome {
            name: experiment.name,
            title: title.into(),
            source: experiment.source,
            setup: format!(
                "one client, {MOST_REPLICAS} replicas; {} nodes on a sphere with at most 300 ms one \
                 way; mean ± standard deviation of the runs",
                self.nodes
            ),
            comparison,
            notes,
            csv: self.csv(cases),
            chart: self.chart(&format!("{title} (Pastis Figure {})", number + 9), cases),
            seeds: self.seeds.to_vec(),
        }
    }

    fn chart(&self, title: &str, cases: &[Case]) -> Chart {
        let of = |setting: Setting| cases.iter().map(move |case| (setting, *case));
        let bars: Vec<(Setting, Case)> = Setting::BOTH.into_iter().flat_map(of).collect();
        let names: Vec<&str> = bars.iter().map(|(_, case)| case.bar()).collect();
        let inks = [Ink::Blue, Ink::Orange, Ink::Vermilion];
        // Of stacked bars the highest comes first.
        let series: Vec<Series> = (0..WORKS.len())
            .rev()
            .map(|top| {
                let height = |(setting, case): &(Setting, Case)| {
                    let works = WORKS[..=top].iter();
                    works.map(|(work, _)| self.work(*setting, *case, *work).mean).sum::<f64>()
                };
                let points = bars.iter().enumerate();
                let points = points.map(|(n, bar)| Point::new(n as f64 + 1.0, height(bar)));
                Series::new(WORKS[top].1, inks[top], Mark::Bars, points)
            })
            .collect();
        Chart {
            title: title.into(),
            subtitle: format!(
                "{} nodes, {MOST_REPLICAS} replicas, sphere of 300 ms, {}",
                self.nodes,
                runs(self.seeds)
            ),
            x: Axis::named(
                "in the paper's settings (left) and in the default settings (right)",
                &names,
            ),
            y: Axis::up_to("seconds that the client waits for", highest(&series)),
            series,
        }
    }
}
