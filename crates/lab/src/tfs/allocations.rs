//! TFS §3.3, Figures 4 and 5: where ordinary files are allocated, and what it costs to keep
//! away from there.
//!
//! Figure 4: "Cumulative histogram of two user machine's block allocations. 70% of the blocks on
//! machine 2's disk were never allocated during the test period, and 90% of the blocks were
//! allocated at a rate of 0.1kB/s or less."
//!
//! Figure 5: "The simulator processes the trace sequentially, and periodically picks a set of
//! chunks to avoid. Whenever the simulator sees an allocation to a chunk which is not being
//! avoided, it counts this as an overwrite. We ran this simulator with various fixed values of
//! f … and recorded the average amount of space contributed, and the rate of data being
//! overwritten."
//!
//! The paper's traces were never published: here two people ([`super::activity`]) work on
//! Atoll's file system, whose allocator says where. The choice is the file system's own
//! ([`atoll_tfs::avoid`]), once an hour. Nothing is counted before the end of the first day:
//! until then nobody knows where it is hot.
//!
//! In the paper's settings f is fixed and all of the past counts; as shipped f follows from a
//! target for the loss, and the past counts for two weeks.

use std::sync::{Arc, Mutex};

use atoll_env::Runtime;
use atoll_tfs::avoid::{WINDOW_SECS, aging, hottest, share_to_avoid};
use atoll_tfs::fs::{AllocationObserver, MountOptions};
use atoll_tfs::records::header::DEFAULT_TARGET_LOSS_BYTES_PER_SEC;

use super::activity::Person;
use super::capacity::{self, Given};
use super::desktop::{BLOCK_BYTES, Desktop, made, quiet};
use crate::LabError;
use crate::chart::{Axis, Chart, Ink, Mark, Point, Series, highest};
use crate::experiment::{Context, Experiment, Group};
use crate::outcome::{Comparison, Csv, Outcome};
use crate::setting::Setting;

pub(crate) const GROUP: Group = Group {
    experiments: &[
        Experiment {
            name: "tfs-fig4",
            title: "where ordinary files are allocated, over the disk",
            source: "TFS §3.3, Figure 4",
            nodes: None,
        },
        Experiment {
            name: "tfs-fig5",
            title: "transparent data lost against usable space, avoiding hot spots",
            source: "TFS §3.3, Figure 5",
            nodes: None,
        },
        Experiment {
            name: "tfs-fig6",
            title: "storage against bandwidth, corporate network",
            source: "TFS §5.1, Figure 6",
            nodes: None,
        },
        Experiment {
            name: "tfs-fig7",
            title: "storage against bandwidth, Internet",
            source: "TFS §5.1, Figure 7",
            nodes: None,
        },
    ],
    run,
};

/// The two people: machine 1 and machine 2.
const MACHINES: [(&str, usize); 2] = [("machine 1", 4), ("machine 2", 1)];
const DAY_SECS: f64 = 86_400.0;
/// A block group of 128 MiB has eight chunks.
const CHUNK_BLOCKS: u64 = 4096;
/// How often chunks are chosen.
const CHOSEN_EVERY_SECS: f64 = 3600.0;
/// Nothing is counted before.
const LEARNING_SECS: f64 = DAY_SECS;
/// Fixed values of f: "the highest value for f we used in our test … was 0.99999".
const FIXED: [f64; 11] = [0.0, 0.3, 0.5, 0.7, 0.9, 0.95, 0.99, 0.999, 0.9999, 0.999_99, 1.0];
/// Targets for the loss, bytes a second.
const TARGETS: [f64; 7] = [10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0];
/// The points of a curve of Figure 4.
const CURVE: usize = 200;

/// Ordinary blocks allocated in one go.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Allocation {
    at_secs: f64,
    first: u64,
    blocks: u64,
}

/// All of them, of one machine.
#[derive(Clone, Debug)]
struct Trace {
    machine: usize,
    blocks: u64,
    secs: f64,
    allocations: Vec<Allocation>,
}

/// How chunks are chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Choice {
    /// A fixed share of allocations is avoided; all of the past counts.
    Share(f64),
    /// A loss of so many bytes a second is aimed at, as shipped.
    Target(f64),
}

/// One point of Figure 5.
#[derive(Clone, Copy, Debug)]
struct Kept {
    machine: usize,
    choice: Choice,
    /// The share of the disk that is not avoided, over the time.
    usable: f64,
    loss_bytes_per_sec: f64,
}

fn run(context: &Context<'_>) -> Result<Vec<Outcome>, LabError> {
    let disk_bytes = context.size(16 << 30, 1 << 30) as u64;
    let days = context.size(21, 3);
    let machines: Vec<usize> = (0..MACHINES.len()).collect();
    let seed = context.options.seed;
    let traces = context.each(&machines, |machine| recorded(*machine, disk_bytes, days, seed))?;
    let choices = FIXED.map(Choice::Share).into_iter().chain(TARGETS.map(Choice::Target));
    let kept: Vec<Kept> = choices
        .flat_map(|choice| traces.iter().map(move |trace| simulated(trace, choice)))
        .collect();
    let setup = format!("{} GiB, half full; {days} days", disk_bytes >> 30);
    let shipped = kept
        .iter()
        .find(|kept| {
            kept.machine == 1 && kept.choice == Choice::Target(DEFAULT_TARGET_LOSS_BYTES_PER_SEC)
        })
        .expect("the default is among the targets");
    // The disk is half full of ordinary data; what is avoided is taken from the free half, as
    // in the paper: 3 % avoided leave 47 %.
    let given = Given {
        share: (shipped.usable - 0.5).max(0.0),
        loss_bytes_per_sec: shipped.loss_bytes_per_sec,
    };
    let mut outcomes = vec![histogram(&traces, &setup, seed), avoidance(&kept, &setup, seed)];
    outcomes.extend(capacity::outcomes(context, given)?);
    Ok(outcomes)
}

/// Lets a person work for so many days and notes every allocation.
fn recorded(machine: usize, disk_bytes: u64, days: usize, seed: u64) -> Result<Trace, LabError> {
    let disk = made(disk_bytes)?;
    let noted: Arc<Mutex<Vec<(u32, u32)>>> = Arc::default();
    let listener = noted.clone();
    let note = move |first, blocks| {
        listener.lock().expect("no holder panics").push((first, blocks));
    };
    let options = MountOptions { observer: Some(AllocationObserver(Arc::new(note))), ..quiet() };
    let desktop = Desktop::mount(&disk, seed, &options)?;
    let env = desktop.env();
    let mut person = Person::new(&desktop, MACHINES[machine].1)?;
    desktop.sync()?;
    let taken = || std::mem::take(&mut *noted.lock().expect("no holder panics"));
    drop(taken());
    let begun = env.now();
    let mut allocations = Vec::new();
    for day in 0..days {
        person.live(day, &mut |env: &dyn Runtime| {
            let at_secs = env.now().since(begun).as_secs_f64();
            allocations.extend(taken().into_iter().map(|(first, blocks)| {
                let (first, blocks) = (u64::from(first), u64::from(blocks));
                Allocation { at_secs, first, blocks }
            }));
        })?;
    }
    drop(person);
    desktop.unmount()?;
    let blocks = disk_bytes / u64::from(BLOCK_BYTES);
    Ok(Trace { machine, blocks, secs: days as f64 * DAY_SECS, allocations })
}

impl Trace {
    fn bytes_per_sec(&self) -> f64 {
        let blocks: u64 = self.allocations.iter().map(|allocation| allocation.blocks).sum();
        blocks as f64 * f64::from(BLOCK_BYTES) / self.secs
    }

    /// How often each block was allocated, ascending.
    fn counts(&self) -> Vec<u32> {
        let mut counts = vec![0; self.blocks as usize];
        for Allocation { first, blocks, .. } in &self.allocations {
            let end = (first + blocks).min(self.blocks);
            counts[*first as usize..end as usize].iter_mut().for_each(|count| *count += 1);
        }
        counts.sort_unstable();
        counts
    }

    fn chunks(&self) -> usize {
        self.blocks.div_ceil(CHUNK_BLOCKS) as usize
    }
}

/// Figure 5's simulator.
fn simulated(trace: &Trace, choice: Choice) -> Kept {
    let mut histogram = vec![0f32; trace.chunks()];
    let mut observed_secs = 0.0;
    let mut avoided = vec![false; trace.chunks()];
    let (mut usable, mut lost_blocks, mut counted) = (0.0, 0u64, 0.0);
    let mut next = trace.allocations.iter().peekable();
    let mut now = 0.0;
    while now < trace.secs {
        let end = now + CHOSEN_EVERY_SECS;
        let counts = now >= LEARNING_SECS;
        while let Some(allocation) = next.next_if(|allocation| allocation.at_secs < end) {
            for block in allocation.first..(allocation.first + allocation.blocks).min(trace.blocks)
            {
                let chunk = (block / CHUNK_BLOCKS) as usize;
                histogram[chunk] += 1.0;
                lost_blocks += u64::from(counts && !avoided[chunk]);
            }
        }
        if counts {
            let used = avoided.iter().filter(|avoided| !**avoided).count();
            usable += used as f64 / avoided.len() as f64;
            counted += 1.0;
        }
        now = end;
        observed_secs += CHOSEN_EVERY_SECS;
        avoided = match choice {
            Choice::Share(share) => hottest(&histogram, share),
            Choice::Target(target) => {
                let factor = aging(observed_secs);
                observed_secs *= factor;
                histogram.iter_mut().for_each(|count| *count *= factor as f32);
                let blocks: f64 = histogram.iter().map(|count| f64::from(*count)).sum();
                let rate = blocks * f64::from(BLOCK_BYTES) / observed_secs;
                hottest(&histogram, share_to_avoid(target, rate))
            }
        };
    }
    let lost = lost_blocks as f64 * f64::from(BLOCK_BYTES);
    Kept {
        machine: trace.machine,
        choice,
        usable: usable / counted,
        loss_bytes_per_sec: lost / (counted * CHOSEN_EVERY_SECS),
    }
}

const LOOK: [(Ink, Mark); 2] = [(Ink::Blue, Mark::Dashed), (Ink::Vermilion, Mark::Line)];

// ---- Figure 4 ----

/// The rate at which the coldest so many blocks together are allocated, bytes a second.
fn coldest(counts: &[u32], blocks: usize, secs: f64) -> f64 {
    let sum: u64 = counts[..blocks.min(counts.len())].iter().map(|count| u64::from(*count)).sum();
    sum as f64 * f64::from(BLOCK_BYTES) / secs
}

fn histogram(traces: &[Trace], setup: &str, seed: u64) -> Outcome {
    let mut csv = Csv::new(&["machine", "share_of_disk", "allocated_bytes_per_sec"]);
    let mut series = Vec::new();
    let mut comparison = Vec::new();
    for (trace, (ink, mark)) in traces.iter().zip(LOOK) {
        let (name, _) = MACHINES[trace.machine];
        let counts = trace.counts();
        let mut points = Vec::new();
        for n in 0..=CURVE {
            let share = n as f64 / CURVE as f64;
            let blocks = (share * counts.len() as f64) as usize;
            let rate = coldest(&counts, blocks, trace.secs);
            csv.row(&[&name, &share, &format!("{rate:.3}")]);
            points.push(Point::new(share * 100.0, rate / 1e3));
        }
        series.push(Series::new(name, ink, mark, points));
        let never = counts.partition_point(|count| *count == 0) as f64 / counts.len() as f64;
        let of_second = |text: &'static str| if trace.machine == 1 { text } else { "" };
        let line = |what: &str, paper: &str, ours: String| {
            Comparison::new(format!("{name}: {what}"), paper, ours, "(the same)")
        };
        comparison.extend([
            line("blocks never allocated", of_second("70 %"), format!("{:.0} %", never * 100.0)),
            line("the coldest 90 % are allocated at", of_second("0.1 kB/s"), {
                let rate = coldest(&counts, counts.len() * 9 / 10, trace.secs);
                format!("{:.2} kB/s", rate / 1e3)
            }),
            line("all are allocated at", "", format!("{:.2} kB/s", trace.bytes_per_sec() / 1e3)),
        ]);
    }
    Outcome {
        name: "tfs-fig4",
        title: "allocations of ordinary blocks".into(),
        source: "TFS §3.3, Figure 4",
        setup: setup.into(),
        seeds: vec![seed],
        comparison,
        notes: vec![
            "The paper's two traces were not published. Two made-up people work here; where their \
             files lie is decided by the file system's allocator."
                .into(),
        ],
        csv,
        chart: Chart {
            title: "Where files are allocated (TFS Figure 4)".into(),
            subtitle: setup.into(),
            x: Axis::linear("coldest part of the disk (%)", 0.0, 100.0),
            y: Axis::up_to("blocks allocated there (kB/s)", highest(&series)),
            series,
        },
    }
}

// ---- Figure 5 ----

fn setting_of(choice: Choice) -> Setting {
    match choice {
        Choice::Share(_) => Setting::Paper,
        Choice::Target(_) => Setting::Default,
    }
}

fn avoidance(kept: &[Kept], setup: &str, seed: u64) -> Outcome {
    let mut csv = Csv::new(&[
        "setting",
        "machine",
        "share_avoided",
        "target_bytes_per_sec",
        "usable_share",
        "loss_bytes_per_sec",
    ]);
    for Kept { machine, choice, usable, loss_bytes_per_sec } in kept {
        let (share, target) = match choice {
            Choice::Share(share) => (share.to_string(), String::new()),
            Choice::Target(target) => (String::new(), target.to_string()),
        };
        let name = MACHINES[*machine].0;
        let (usable, loss) = (format!("{usable:.5}"), format!("{loss_bytes_per_sec:.3}"));
        csv.row(&[&setting_of(*choice), &name, &share, &target, &usable, &loss]);
    }
    let mut comparison = Vec::new();
    for (machine, (name, _)) in MACHINES.iter().enumerate() {
        let of = |setting| {
            kept.iter()
                .filter(move |kept| kept.machine == machine && setting_of(kept.choice) == setting)
        };
        for most in [80.0, 1000.0] {
            let usable = |setting| {
                let good = of(setting).filter(|kept| kept.loss_bytes_per_sec <= most);
                let best = good.map(|kept| kept.usable).fold(0.0, f64::max);
                format!("{:.1} %", best * 100.0)
            };
            let paper = if machine == 1 && most < 100.0 { "97 %" } else { "" };
            comparison.push(Comparison::new(
                format!("{name}: usable at a loss of at most {:.2} kB/s", most / 1e3),
                paper,
                usable(Setting::Paper),
                usable(Setting::Default),
            ));
        }
        let default = of(Setting::Default)
            .find(|kept| kept.choice == Choice::Target(DEFAULT_TARGET_LOSS_BYTES_PER_SEC))
            .expect("the default is among the targets");
        comparison.push(Comparison::new(
            format!("{name}: usable and lost as shipped"),
            "",
            "",
            format!(
                "{:.1} %, {:.2} kB/s",
                default.usable * 100.0,
                default.loss_bytes_per_sec / 1e3
            ),
        ));
    }
    Outcome {
        name: "tfs-fig5",
        title: "usable space and lost transparent data".into(),
        source: "TFS §3.3, Figure 5",
        setup: setup.into(),
        seeds: vec![seed],
        comparison,
        notes: vec![format!(
            "The paper's settings: a fixed share of the allocations is avoided. As shipped: a loss \
             of {:.1} kB/s is aimed at, and the past counts for {:.0} days. Usable is the share of \
             the disk that is not avoided, ordinary data included, as in the paper.",
            DEFAULT_TARGET_LOSS_BYTES_PER_SEC / 1e3,
            WINDOW_SECS / DAY_SECS,
        )],
        csv,
        chart: avoidance_chart(kept, setup),
    }
}

/// What the logarithmic axis shows of "nothing", bytes a second.
const LEAST_SHOWN: f64 = 1.0;

fn avoidance_chart(kept: &[Kept], setup: &str) -> Chart {
    let points = |machine: usize, setting: Setting| {
        let mut points: Vec<Point> = kept
            .iter()
            .filter(|kept| kept.machine == machine && setting_of(kept.choice) == setting)
            .map(|kept| {
                let loss = kept.loss_bytes_per_sec.max(LEAST_SHOWN) / 1e3;
                Point::new(kept.usable * 100.0, loss)
            })
            .collect();
        points.sort_by(|a, b| a.x.total_cmp(&b.x));
        points
    };
    let mut series = Vec::new();
    for (machine, (name, _)) in MACHINES.iter().enumerate() {
        let (ink, _) = LOOK[machine];
        let fixed = format!("{name}, fixed share avoided");
        series.push(Series::new(fixed, ink, Mark::Squares, points(machine, Setting::Paper)));
        let shipped = format!("{name}, as shipped: for a target");
        let ink = [Ink::Sky, Ink::Orange][machine];
        series.push(Series::new(shipped, ink, Mark::Discs, points(machine, Setting::Default)));
    }
    series.push(Series::new(
        "TFS paper, machine 2",
        Ink::Black,
        Mark::Crosses,
        [Point::new(97.0, 0.08)],
    ));
    let least = series.iter().flat_map(|s| &s.points).map(|p| p.x).fold(100.0, f64::min);
    let most = highest(&series);
    Chart {
        title: "Loss against usable space (TFS Figure 5)".into(),
        subtitle: setup.into(),
        x: Axis::linear(
            "usable for transparent data (% of the disk)",
            (least / 5.0).floor() * 5.0,
            100.0,
        ),
        y: Axis::log_over("transparent data overwritten (kB/s)", LEAST_SHOWN / 1e3, most),
        series,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A disk of ten chunks: one is written a hundred times a day, another once.
    fn trace(days: usize) -> Trace {
        let allocation =
            |at_secs, chunk: u64| Allocation { at_secs, first: chunk * CHUNK_BLOCKS, blocks: 1 };
        let mut allocations = Vec::new();
        for day in 0..days {
            let begun = day as f64 * DAY_SECS;
            allocations.extend((0..100).map(|n| allocation(begun + f64::from(n) * 600.0, 3)));
            allocations.push(allocation(begun + 80_000.0, 7));
        }
        Trace { machine: 1, blocks: 10 * CHUNK_BLOCKS, secs: days as f64 * DAY_SECS, allocations }
    }

    #[test]
    fn avoiding_the_hot_chunk_loses_what_falls_elsewhere_only() {
        let day_bytes = f64::from(BLOCK_BYTES) / DAY_SECS;
        let all = simulated(&trace(10), Choice::Share(0.0));
        assert_eq!(all.usable, 1.0);
        assert!((all.loss_bytes_per_sec - 101.0 * day_bytes).abs() < 1e-9);
        let hot = simulated(&trace(10), Choice::Share(0.9));
        assert_eq!(hot.usable, 0.9);
        assert!((hot.loss_bytes_per_sec - day_bytes).abs() < 1e-9);
        let both = simulated(&trace(10), Choice::Share(1.0));
        assert_eq!((both.usable, both.loss_bytes_per_sec), (0.8, 0.0));
    }

    #[test]
    fn a_target_is_kept_with_the_least_space_avoided() {
        let day_bytes = f64::from(BLOCK_BYTES) / DAY_SECS;
        let kept = simulated(&trace(30), Choice::Target(2.0 * day_bytes));
        assert_eq!(kept.usable, 0.9);
        assert!(kept.loss_bytes_per_sec <= 2.0 * day_bytes);
        assert_eq!(simulated(&trace(30), Choice::Target(1e9)).usable, 1.0);
    }

    #[test]
    fn the_coldest_blocks_come_first() {
        let counts = trace(2).counts();
        assert_eq!(counts.len() as u64, 10 * CHUNK_BLOCKS);
        assert_eq!(counts[counts.len() - 3..], [0, 2, 200]);
        assert_eq!(coldest(&counts, counts.len() - 2, 1.0), 0.0);
        assert_eq!(coldest(&counts, counts.len() - 1, 2.0), f64::from(BLOCK_BYTES));
    }
}
