//! What is told of the benchmark beside contributed files ([`super::bench`]): TFS Figures 1,
//! 8, 9 and 10.

use super::bench::{BAD, CELLS, COPY, LARGE, Measured, PHASES, SMALL, System};
use crate::chart::{Axis, Chart, Ink, Mark, Point, Series, highest};
use crate::experiment::runs;
use crate::outcome::{Comparison, Csv, Outcome};
use crate::statistics::{Summary, summary};
use crate::tfs::desktop::BLOCK_BYTES;

/// Where Figure 1 shows all free space of a disk half full, hundredths.
const ALL_FREE: u32 = 50;

/// Rows of Figure 10: what, whether aged, and what the paper says.
const ROWS: [(System, bool, Ink, &str); 5] = [
    (System::Ext2(0), false, Ink::Black, "very little fragmentation"),
    (System::Ext2(BAD), false, Ink::Blue, "a high degree of fragmentation"),
    (System::Ext2(LARGE), true, Ink::Sky, ""),
    (System::Tfs(None), false, Ink::Vermilion, "very little fragmentation"),
    (System::Tfs(None), true, Ink::Orange, ""),
];

/// Everything measured, and how.
pub(super) struct Told<'a> {
    pub found: &'a [Measured],
    pub seeds: &'a [u64],
    pub setup: &'a str,
}

impl Told<'_> {
    fn of(&self, system: System, aged: bool) -> impl Iterator<Item = &Measured> {
        self.found.iter().filter(move |m| m.system == system && m.aged == aged)
    }

    fn phase(&self, system: System, aged: bool, phase: usize) -> Summary {
        summary(self.of(system, aged).map(|measured| measured.secs[phase]))
    }

    fn total(&self, system: System, aged: bool) -> Summary {
        summary(self.of(system, aged).map(|measured| measured.secs.iter().sum()))
    }

    fn fragments_per_file(&self, system: System, aged: bool) -> f64 {
        let measured = || self.of(system, aged);
        let files: usize = measured().map(|measured| measured.files).sum();
        measured().map(|measured| measured.fragments).sum::<usize>() as f64 / files as f64
    }

    fn subtitle(&self) -> String {
        format!("{}; {}", self.setup, runs(self.seeds))
    }

    // ---- Figure 1 ----

    pub(super) fn copying(&self, shares: &[u32]) -> Outcome {
        let mut csv = Csv::new(&["system", "share", "copy_secs", "sd", "runs"]);
        let systems = |is_tfs: bool| {
            shares.iter().filter(move |share| **share > 0 || !is_tfs).map(move |share| {
                let system = if is_tfs { System::Tfs(Some(*share)) } else { System::Ext2(*share) };
                (*share, self.phase(system, false, COPY))
            })
        };
        for is_tfs in [false, true] {
            for (share, secs) in systems(is_tfs) {
                let name = if is_tfs { "tfs" } else { "ext2" };
                let (mean, sd) = (format!("{:.3}", secs.mean), format!("{:.3}", secs.deviation));
                csv.row(&[&name, &share, &mean, &sd, &secs.count]);
            }
        }
        let copy = |system| self.phase(system, false, COPY).mean;
        let without = copy(System::Ext2(0));
        let ratio = |system| format!("{:.2}", copy(system) / without);
        let aged = |system| format!("{:.2}", self.phase(system, true, COPY).mean / without);
        let line = |what: &str, paper: &str, ours: String| Comparison::new(what, paper, "", ours);
        let comparison = vec![
            line("copying with no contribution (s of the disk)", "", format!("{without:.1}")),
            line("ext2 with 5 %, times as long", "about 1", ratio(System::Ext2(SMALL))),
            line("ext2 with 35 %, times as long", "up to 2", ratio(System::Ext2(LARGE))),
            line("ext2 with 40 %, times as long", "bad", ratio(System::Ext2(BAD))),
            line("TFS with 35 %, times as long", "about 1", ratio(System::Tfs(Some(LARGE)))),
            line("TFS with all free space, times as long", "about 1", ratio(System::Tfs(None))),
            line("ext2 with 35 %, aged, times as long", "up to 2", aged(System::Ext2(LARGE))),
            line("TFS with all free space, aged, times as long", "about 1", {
                aged(System::Tfs(None))
            }),
        ];
        let point = |share: u32, secs: Summary| {
            let Summary { mean, deviation, .. } = secs;
            Point::spread(f64::from(share), mean, mean - deviation, mean + deviation)
        };
        let points = |is_tfs| systems(is_tfs).map(move |(share, secs)| point(share, secs));
        let series = vec![
            Series::new("ext2: ordinary files", Ink::Blue, Mark::Squares, points(false)),
            Series::new("TFS: transparent files", Ink::Vermilion, Mark::Discs, {
                points(true).chain([point(ALL_FREE, self.phase(System::Tfs(None), false, COPY))])
            }),
            Series::new("ext2, aged", Ink::Sky, Mark::Triangles, {
                [0, SMALL, LARGE]
                    .map(|share| point(share, self.phase(System::Ext2(share), true, COPY)))
            }),
            Series::new("TFS, aged", Ink::Orange, Mark::Triangles, {
                [point(ALL_FREE, self.phase(System::Tfs(None), true, COPY))]
            }),
            Series::new(
                "TFS paper: ext2 takes up to twice as long",
                Ink::Black,
                Mark::Dotted,
                [0.0, f64::from(ALL_FREE)].map(|x| Point::new(x, 2.0 * without)),
            ),
        ];
        Outcome {
            name: "tfs-fig1",
            title: "copying beside contributed files".into(),
            source: "TFS §2, Figure 1",
            setup: self.setup.into(),
            seeds: self.seeds.to_vec(),
            comparison,
            notes: vec![
                "Seconds of a modelled disk; nothing of a processor's time. Fixed and dynamic \
                 contribution are ordinary files on so much of the disk. Aged: as in tfs-fig9."
                    .into(),
            ],
            csv,
            chart: Chart {
                title: "Copying beside contributed files (TFS Figure 1)".into(),
                subtitle: format!("{}; bars: one standard deviation", self.subtitle()),
                x: Axis::up_to("contributed (% of the disk)", f64::from(ALL_FREE)),
                y: Axis::up_to("time to copy the tree (s of the disk)", highest(&series)),
                series,
            },
        }
    }

    // ---- Figures 8 and 9 ----

    pub(super) fn phases(&self, aged: bool, aged_times: usize) -> Outcome {
        let systems =
            [System::Ext2(0), System::Ext2(SMALL), System::Ext2(LARGE), System::Tfs(None)];
        let mut csv = Csv::new(&["system", "phase", "secs", "sd", "runs"]);
        for system in systems {
            for (n, phase) in PHASES.iter().enumerate() {
                let Summary { mean, deviation, count, .. } = self.phase(system, aged, n);
                let (mean, sd) = (format!("{mean:.3}"), format!("{deviation:.3}"));
                csv.row(&[&system.name().replace(", ", " "), phase, &mean, &sd, &count]);
            }
        }
        let (name, source, of) = if aged {
            ("tfs-fig9", "TFS §5.2.1, Figure 9", format!("aged {aged_times} times"))
        } else {
            ("tfs-fig8", "TFS §5.2.1, Figure 8", "not aged".into())
        };
        let figure = source.trim_start_matches("TFS §5.2.1, ");
        let series = self.bars(&systems, aged);
        let names = systems.map(System::name);
        Outcome {
            name,
            title: format!("an Andrew-style benchmark, {of}"),
            source,
            setup: self.setup.into(),
            seeds: self.seeds.to_vec(),
            comparison: self.phase_comparison(&systems, aged),
            notes: vec![
                "Seconds of a modelled disk; nothing of a processor's time, which is most of \
                 compiling on a real machine. The paper's seconds are of another tree on another \
                 machine: only ratios compare."
                    .into(),
            ],
            csv,
            chart: Chart {
                title: format!("Andrew-style benchmark, {of} (TFS {figure})"),
                subtitle: format!("{}; whiskers: one standard deviation", self.subtitle()),
                x: Axis::named("contribution", &names.each_ref().map(String::as_str)),
                y: Axis::up_to("time (s of the disk)", highest(&series)),
                series,
            },
        }
    }

    fn phase_comparison(&self, systems: &[System; 4], aged: bool) -> Vec<Comparison> {
        // "in this case, Ext2 with 35% contribution takes almost 180 seconds … about 20 seconds
        // longer than the same system without aging."
        let papers = if aged {
            ["", "no interference", "almost 180 s, 1.13 × unaged", "comparable to none"]
        } else {
            ["", "nearly equal to none", "about 160 s", "nearly equal to none"]
        };
        let without = self.total(systems[0], aged).mean;
        let mut comparison = Vec::new();
        for (system, paper) in systems.iter().zip(papers) {
            let (total, copy) = (self.total(*system, aged), self.phase(*system, aged, COPY).mean);
            let mut ours = format!("{:.1} ± {:.1} s", total.mean, total.deviation);
            if *system != systems[0] {
                ours += &format!(", {:.2} × none", total.mean / without);
            }
            if aged {
                ours += &format!(", {:.2} × unaged", total.mean / self.total(*system, false).mean);
            }
            ours += &format!("; copy {copy:.1} s");
            let quantity = format!("{}: all phases", system.name());
            comparison.push(Comparison::new(quantity, paper, "", ours));
        }
        comparison
    }

    /// A bar a system, of its phases one upon the other.
    fn bars(&self, systems: &[System], aged: bool) -> Vec<Series> {
        let inks = [Ink::Grey, Ink::Vermilion, Ink::Sky, Ink::Blue, Ink::Green, Ink::Orange];
        let until = |system: System, phase: usize| -> f64 {
            (0..=phase).map(|phase| self.phase(system, aged, phase).mean).sum()
        };
        let bars = PHASES.iter().zip(inks).enumerate().rev().map(|(phase, (name, ink))| {
            let points = systems.iter().zip(1..).map(|(system, place)| {
                let top = until(*system, phase);
                let deviation = self.total(*system, aged).deviation;
                let place = f64::from(place);
                if phase + 1 == PHASES.len() {
                    Point::spread(place, top, top - deviation, top + deviation)
                } else {
                    Point::new(place, top)
                }
            });
            Series::new(*name, ink, Mark::Bars, points)
        });
        bars.collect()
    }

    // ---- Figure 10 ----

    pub(super) fn layout(&self) -> Outcome {
        let seed = self.seeds[0];
        let mut csv = Csv::new(&["system", "aged", "cell", "blocks"]);
        let mut comparison = Vec::new();
        let mut series = Vec::new();
        for (row, (system, aged, ink, paper)) in ROWS.into_iter().enumerate() {
            let measured = self.of(system, aged).find(|measured| measured.seed == seed);
            let cells = &measured.expect("each was measured").cells;
            let most = f64::from(*cells.iter().max().expect("there are cells")).max(1.0);
            let used = cells.iter().filter(|blocks| **blocks > 0).count();
            let base = (ROWS.len() - 1 - row) as f64;
            let mut points = Vec::new();
            for (cell, blocks) in cells.iter().enumerate() {
                csv.row(&[&system.name().replace(", ", " "), &aged, &cell, blocks]);
                let height = base + 0.85 * f64::from(*blocks) / most;
                let share = |cell: usize| 100.0 * cell as f64 / CELLS as f64;
                points.extend([share(cell), share(cell + 1)].map(|x| Point::new(x, height)));
            }
            let name = system.name() + if aged { ", aged" } else { "" };
            let pieces = self.fragments_per_file(system, aged);
            let ours = format!("{pieces:.2}; {used} of {CELLS} parts of the disk");
            comparison.push(Comparison::new(
                format!("{name}: pieces a file; spread"),
                paper,
                "",
                ours,
            ));
            series.push(Series::new(name, ink, Mark::Line, points));
        }
        let mut y =
            Axis::linear("blocks of the copy, each row to its own scale", 0.0, ROWS.len() as f64);
        // Heights mean nothing beyond their row.
        y.ticks = (0..ROWS.len()).map(|row| row as f64).collect();
        y.names = vec![String::new(); ROWS.len()];
        Outcome {
            name: "tfs-fig10",
            title: "where copied files lie".into(),
            source: "TFS §5.3, Figure 10",
            setup: self.setup.into(),
            seeds: self.seeds.to_vec(),
            comparison,
            notes: vec![format!(
                "Blocks of {BLOCK_BYTES} bytes of the tree that the benchmark copied, counted in \
                 {CELLS} parts of the disk; each row of the picture has its own scale. Aged: as in \
                 tfs-fig9."
            )],
            csv,
            chart: Chart {
                title: "Where copied files lie (TFS Figure 10)".into(),
                subtitle: format!("{}; seed {seed}", self.setup),
                x: Axis::linear("place on the disk (%)", 0.0, 100.0),
                y,
                series,
            },
        }
    }
}
