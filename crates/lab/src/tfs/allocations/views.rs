//! What is told of where files are allocated, and of avoiding it ([`super::trace`]): TFS
//! Figures 4 and 5.

use atoll_tfs::avoid::WINDOW_SECS;
use atoll_tfs::records::header::DEFAULT_TARGET_LOSS_BYTES_PER_SEC;

use super::trace::{Choice, DAY_SECS, Kept, MACHINES, Trace, coldest};
use crate::chart::{Axis, Chart, Ink, Mark, Point, Series, highest};
use crate::outcome::{Comparison, Csv, Outcome};
use crate::setting::Setting;
use crate::tfs::desktop::BLOCK_BYTES;

const LOOK: [(Ink, Mark); 2] = [(Ink::Blue, Mark::Dashed), (Ink::Vermilion, Mark::Line)];

// ---- Figure 4 ----

/// The points of a curve: so many a decade, from this share of the disk to all of it.
const POINTS_PER_DECADE: i32 = 20;
const LEAST_LEFT_OUT: f64 = 1e-4;

/// Shares of the disk: all of it, less and less, and nothing.
fn left_out() -> impl Iterator<Item = f64> {
    let decades = -LEAST_LEFT_OUT.log10().round() as i32;
    let step = |n: i32| 10f64.powf(-f64::from(n) / f64::from(POINTS_PER_DECADE));
    (0..=decades * POINTS_PER_DECADE).map(step).chain([0.0])
}

pub(super) fn histogram(traces: &[Trace], setup: &str, seed: u64) -> Outcome {
    let mut csv = Csv::new(&["machine", "share_of_disk", "allocated_bytes_per_sec"]);
    let mut series = Vec::new();
    let mut comparison = Vec::new();
    let mut notes = vec![
        "The paper's two traces were not published. Two made-up people work here; where their \
         files lie is decided by the file system's allocator."
            .into(),
    ];
    for (trace, (ink, mark)) in traces.iter().zip(LOOK) {
        let (name, _) = MACHINES[trace.machine];
        let counts = trace.counts();
        let mut points = Vec::new();
        for hottest in left_out() {
            let share = 1.0 - hottest;
            let blocks = (share * counts.len() as f64) as usize;
            let rate = coldest(&counts, blocks, trace.secs);
            csv.row(&[&name, &format!("{share:.5}"), &format!("{rate:.3}")]);
            points.push(Point::new(hottest * 100.0, rate / 1e3));
        }
        points.reverse();
        series.push(Series::new(name, ink, mark, points));
        let never = counts.partition_point(|count| *count == 0) as f64 / counts.len() as f64;
        let of_second = |text: &'static str| if trace.machine == 1 { text } else { "" };
        let line = |what: &str, paper: &str, ours: String| {
            Comparison::new(format!("{name}: {what}"), paper, "", ours)
        };
        comparison.extend([
            line("blocks never allocated", of_second("70 %"), format!("{:.1} %", never * 100.0)),
            line("the coldest 90 % are allocated at", of_second("0.1 kB/s"), {
                let rate = coldest(&counts, counts.len() * 9 / 10, trace.secs);
                format!("{:.2} kB/s", rate / 1e3)
            }),
            line("all are allocated at", "", format!("{:.2} kB/s", trace.bytes_per_sec() / 1e3)),
        ]);
        let allocated = trace.bytes_per_sec() * trace.secs;
        let of_disk = allocated / (trace.blocks as f64 * f64::from(BLOCK_BYTES));
        notes.push(format!(
            "{:.2} GB are allocated on {name} in {:.0} days, {:.0} % of the disk: had no block been \
             used twice, {:.0} % would still never have been allocated.",
            allocated / 1e9,
            trace.secs / DAY_SECS,
            of_disk * 100.0,
            (1.0 - of_disk) * 100.0,
        ));
    }
    notes.push(
        "The paper's machine 2 allocated 30 % of its disk in 13 days: it wrote more for its disk, \
         or its disk was smaller; how large it was is not said."
            .into(),
    );
    let papers = [Point::new(10.0, 0.1), Point::new(30.0, 0.0)];
    series.push(Series::new("TFS paper, machine 2", Ink::Black, Mark::Crosses, papers));
    Outcome {
        name: "tfs-fig4",
        title: "allocations of ordinary blocks".into(),
        source: "TFS §3.3, Figure 4",
        setup: setup.into(),
        seeds: vec![seed],
        comparison,
        notes,
        csv,
        chart: Chart {
            title: "Where files are allocated (TFS Figure 4)".into(),
            subtitle: setup.into(),
            x: Axis::log_over(
                "hottest part of the disk left out (%)",
                LEAST_LEFT_OUT * 100.0,
                100.0,
            ),
            y: Axis::up_to("allocated in the rest (kB/s)", highest(&series)),
            series,
        },
    }
}

// ---- Figure 5 ----

fn setting_of(kept: &Kept) -> Setting {
    match kept.choice {
        Choice::Share(_) => Setting::Paper,
        Choice::Target(_) => Setting::Default,
    }
}

/// What one machine's points are.
fn of(kept: &[Kept], machine: usize, setting: Setting) -> impl Iterator<Item = &Kept> + Clone {
    kept.iter().filter(move |kept| kept.machine == machine && setting_of(kept) == setting)
}

/// What a machine keeps and loses with a choice that is among those tried.
fn with(kept: &[Kept], machine: usize, choice: Choice) -> &Kept {
    let mut of_machine = kept.iter().filter(|kept| kept.machine == machine);
    of_machine.find(|kept| kept.choice == choice).expect("it was tried")
}

pub(super) fn avoidance(kept: &[Kept], setup: &str, seed: u64) -> Outcome {
    let mut csv = Csv::new(&[
        "setting",
        "machine",
        "share_avoided",
        "target_bytes_per_sec",
        "usable_share",
        "loss_bytes_per_sec",
        "update_days_bytes_per_sec",
        "other_days_bytes_per_sec",
    ]);
    for point in kept {
        let (share, target) = match point.choice {
            Choice::Share(share) => (share.to_string(), String::new()),
            Choice::Target(target) => (String::new(), target.to_string()),
        };
        let rates = [
            point.loss_bytes_per_sec(),
            point.update_days_bytes_per_sec(),
            point.other_days_bytes_per_sec(),
        ];
        let [all, update, other] = rates.map(|rate| format!("{rate:.3}"));
        let usable = format!("{:.5}", point.usable);
        let name = MACHINES[point.machine].0;
        csv.row(&[&setting_of(point), &name, &share, &target, &usable, &all, &update, &other]);
    }
    let comparison = (0..MACHINES.len()).flat_map(|machine| lines(kept, machine)).collect();
    Outcome {
        name: "tfs-fig5",
        title: "usable space and lost transparent data".into(),
        source: "TFS §3.3, Figure 5",
        setup: setup.into(),
        seeds: vec![seed],
        comparison,
        notes: vec![
            format!(
                "The paper's settings: a fixed share of the allocations is avoided. As shipped: a \
                 loss of {:.1} kB/s is aimed at, and the past counts for {:.0} days. Usable is \
                 the share of the disk that is not avoided, ordinary data included, as in the \
                 paper; all transparent data is taken to fill it.",
                DEFAULT_TARGET_LOSS_BYTES_PER_SEC / 1e3,
                WINDOW_SECS / DAY_SECS,
            ),
            "Once a week a fiftieth of the old files is written anew, and much of that falls where \
             nothing was allocated before, which no histogram of the past tells: on these days \
             the target is missed even if everything is avoided that was ever allocated."
                .into(),
        ],
        csv,
        chart: avoidance_chart(kept, setup),
    }
}

fn lines(kept: &[Kept], machine: usize) -> Vec<Comparison> {
    let name = MACHINES[machine].0;
    let usable = |setting, most: f64| {
        let good = of(kept, machine, setting).filter(|kept| kept.loss_bytes_per_sec() <= most);
        let best = good.map(|kept| kept.usable).reduce(f64::max);
        best.map_or("nothing".into(), |best| format!("{:.1} %", best * 100.0))
    };
    let mut lines: Vec<Comparison> = [80.0, 200.0, 500.0]
        .into_iter()
        .map(|most| {
            let paper = if machine == 1 && most == 80.0 { "97 %" } else { "" };
            let quantity = format!("{name}: usable at a loss of at most {:.2} kB/s", most / 1e3);
            let both = Setting::BOTH.map(|setting| usable(setting, most));
            Comparison::new(quantity, paper, &*both[0], &*both[1])
        })
        .collect();
    let default = Choice::Target(DEFAULT_TARGET_LOSS_BYTES_PER_SEC);
    let pair = [Choice::Share(1.0), default].map(|choice| with(kept, machine, choice));
    let mut line = |what: &str, said: &dyn Fn(&Kept) -> String| {
        let quantity = format!("{name}, all ever allocated avoided; as shipped: {what}");
        lines.push(Comparison::new(quantity, "", said(pair[0]), said(pair[1])));
    };
    let kb = |rate: f64| format!("{:.2} kB/s", rate / 1e3);
    line("usable", &|kept| format!("{:.1} %", kept.usable * 100.0));
    line("lost", &|kept| kb(kept.loss_bytes_per_sec()));
    line("lost on days with an update", &|kept| kb(kept.update_days_bytes_per_sec()));
    line("lost on other days", &|kept| kb(kept.other_days_bytes_per_sec()));
    lines
}

/// What the logarithmic axis shows of less, bytes a second.
const LEAST_SHOWN: f64 = 10.0;

fn avoidance_chart(kept: &[Kept], setup: &str) -> Chart {
    let points = |machine: usize, setting: Setting, loss: fn(&Kept) -> f64| {
        let points = of(kept, machine, setting);
        let mut points: Vec<Point> = points
            .map(|kept| Point::new(kept.usable * 100.0, loss(kept).max(LEAST_SHOWN) / 1e3))
            .collect();
        points.sort_by(|a, b| a.x.total_cmp(&b.x));
        points
    };
    let mut series = Vec::new();
    for (machine, (name, _)) in MACHINES.iter().enumerate() {
        let (ink, _) = LOOK[machine];
        let fixed = points(machine, Setting::Paper, Kept::loss_bytes_per_sec);
        series.push(Series::new(format!("{name}, fixed share avoided"), ink, Mark::Squares, fixed));
        let ink = [Ink::Sky, Ink::Orange][machine];
        let shipped = points(machine, Setting::Default, Kept::loss_bytes_per_sec);
        let what = format!("{name}, as shipped: for a target");
        series.push(Series::new(what, ink, Mark::Discs, shipped));
        let other = points(machine, Setting::Default, Kept::other_days_bytes_per_sec);
        let what = format!("{name}, as shipped, without the days of updates");
        series.push(Series::new(what, ink, Mark::Dotted, other));
    }
    series.push(Series::new(
        "TFS paper, machine 2",
        Ink::Black,
        Mark::Crosses,
        [Point::new(97.0, 0.08)],
    ));
    let all = || series.iter().flat_map(|s| &s.points);
    let leftmost = all().map(|p| p.x).fold(100.0, f64::min);
    let lowest = all().map(|p| p.y).fold(f64::INFINITY, f64::min);
    Chart {
        title: "Loss against usable space (TFS Figure 5)".into(),
        subtitle: setup.into(),
        x: Axis::linear(
            "usable for transparent data (% of the disk)",
            (leftmost / 5.0).floor() * 5.0,
            100.0,
        ),
        y: Axis::log_over("transparent data overwritten (kB/s)", lowest, highest(&series)),
        series,
    }
}
