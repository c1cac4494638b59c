//! Figures 6, 7 and 8 of CFS as seen from the downloads and transfers measured.

use super::{BLOCK_BYTES, Case, Download, Found, MODELLED, TRANSFERS, Window};
use crate::cfs::sites;
use crate::chart::{Axis, Chart, Ink, Mark, Point, Series, highest};
use crate::experiment::runs;
use crate::outcome::{Comparison, Csv, Outcome};
use crate::statistics::{Summary, percentile, steps, summary};

/// "CFS with a 40 KByte pre-fetch window achieves speeds competitive with TCP".
const COMPETITIVE: Window = Window::Blocks(5);
/// Windows of Figure 7, in blocks.
const FIGURE_7: [(usize, Ink); 3] = [(1, Ink::Blue), (3, Ink::Green), (5, Ink::Purple)];
const BLOCK_KIB: usize = BLOCK_BYTES / 1024;

pub(super) fn outcomes(found: &Found) -> Vec<Outcome> {
    vec![figure_6(found), figure_7(found), figure_8(found)]
}

impl Found {
    fn of(&self, case: Case, window: Window) -> impl Iterator<Item = &Download> {
        self.downloads.iter().filter(move |d| d.case == case && d.window == window)
    }

    fn speeds(&self, case: Case, window: Window) -> Vec<f64> {
        let mut speeds: Vec<f64> = self.of(case, window).map(|d| d.kib_per_sec).collect();
        speeds.sort_by(f64::total_cmp);
        speeds
    }

    fn speed(&self, case: Case, window: Window) -> Summary {
        summary(self.speeds(case, window))
    }

    fn transfer_speeds(&self, len_bytes: u64) -> Vec<f64> {
        let of_length = self.transfers.iter().filter(|t| t.len_bytes == len_bytes);
        let mut speeds: Vec<f64> = of_length.map(|t| t.kib_per_sec).collect();
        speeds.sort_by(f64::total_cmp);
        speeds
    }

    fn setup(&self) -> String {
        format!(
            "a file of 1 MiB in blocks of 8 KiB from 12 sites ({} distances), one site after \
             another",
            self.sites
        )
    }

    fn subtitle(&self) -> String {
        format!("1 MiB in 8 KiB blocks, 12 sites, {}", runs(&self.seeds))
    }

    fn csv(&self) -> Csv {
        let mut csv = Csv::new(&[
            "setting",
            "window_blocks",
            "seed",
            "site",
            "kib_per_sec",
            "rpcs_per_block",
        ]);
        for d in &self.downloads {
            let window = match d.window {
                Window::Blocks(blocks) => blocks.to_string(),
                Window::Adaptive => "adaptive".to_owned(),
            };
            let speed = format!("{:.2}", d.kib_per_sec);
            let rpcs = format!("{:.3}", d.rpcs_per_block);
            csv.row(&[&d.case.name(), &window, &d.seed, &sites::name(d.site), &speed, &rpcs]);
        }
        csv
    }
}

fn figure_6(found: &Found) -> Outcome {
    let mean = |case, window| format!("{:.0}", found.speed(case, window).mean);
    let blocks = Window::Blocks;
    let line = |quantity: &str, paper: &str, case, window| {
        let shipped = match case {
            Case::PaperPlain => "(nearest replica)".to_owned(),
            _ => mean(Case::Default, window),
        };
        Comparison::new(quantity, paper, mean(case, window), shipped)
    };
    let fetch_ms = |case| {
        let taken = found.of(case, blocks(1)).map(|d| BLOCK_KIB as f64 / d.kib_per_sec * 1e3);
        format!("{:.0}", summary(taken).mean)
    };
    let rpcs = |case| {
        let calls = found.of(case, blocks(1)).map(|d| d.rpcs_per_block);
        format!("{:.2}", summary(calls).mean)
    };
    let best = |case| {
        let speeds = found.windows.iter().map(|w| (*w, found.speed(case, blocks(*w)).mean));
        let best = speeds.max_by(|a, b| a.1.total_cmp(&b.1)).unwrap_or_default();
        format!("{:.0} at {} KiB", best.1, best.0 * BLOCK_KIB)
    };
    let plain = Case::PaperPlain;
    let selecting = Case::PaperSelecting;
    Outcome {
        name: "cfs-fig6",
        title: "download speed against the prefetch window (KiB/s)".into(),
        source: "CFS §7.1, Figure 6",
        setup: found.setup(),
        comparison: vec![
            line("8 KiB window, no server selection", "about 20", plain, blocks(1)),
            line("8 KiB window, with server selection", "almost twice", selecting, blocks(1)),
            line("24 KiB window, no server selection", "about 50", plain, blocks(3)),
            line("24 KiB window, with server selection", "", selecting, blocks(3)),
            line("40 KiB window, no server selection", "", plain, COMPETITIVE),
            line("40 KiB window, with server selection", "", selecting, COMPETITIVE),
            Comparison::new("best of the fixed windows", "", best(plain), best(Case::Default)),
            Comparison::new(
                "adaptive window",
                "future work (§8)",
                "",
                mean(Case::Default, Window::Adaptive),
            ),
            Comparison::new(
                "a block at a time takes (ms)",
                "about 430",
                fetch_ms(plain),
                fetch_ms(Case::Default),
            ),
            Comparison::new("RPCs per block", "3", rpcs(plain), rpcs(Case::Default)),
        ],
        notes: notes_6(found),
        csv: found.csv(),
        chart: figure_6_chart(found),
        seeds: found.seeds.clone(),
    }
}

fn notes_6(found: &Found) -> Vec<String> {
    let mut notes = vec![
        "With so few RPCs there is little to select among, until there are replicas: as shipped \
         the nearest of three is asked."
            .to_owned(),
    ];
    if found.sites == MODELLED {
        let why = "Distances are chosen so that a fetch of three RPCs takes the paper's 430 ms; \
                   Atoll is faster where it needs fewer.";
        notes.insert(0, why.to_owned());
    }
    notes
}

fn figure_6_chart(found: &Found) -> Chart {
    let curve = |case, name: &str, ink, mark| {
        let points = found.windows.iter().map(|w| {
            let speed = found.speed(case, Window::Blocks(*w)).mean;
            Point::new((w * BLOCK_KIB) as f64, speed)
        });
        Series::new(name, ink, mark, points)
    };
    let widest = (found.windows.last().copied().unwrap_or(1) * BLOCK_KIB) as f64;
    let adaptive = found.speed(Case::Default, Window::Adaptive).mean;
    let paper = |name: &str, mark, points: &[(f64, f64)]| {
        Series::new(name, Ink::Black, mark, points.iter().map(|(x, y)| Point::new(*x, *y)))
    };
    let series = vec![
        curve(
            Case::PaperPlain,
            "Atoll, paper's settings, no server selection",
            Ink::Blue,
            Mark::Squares,
        ),
        curve(
            Case::PaperSelecting,
            "Atoll, paper's settings, server selection",
            Ink::Green,
            Mark::Triangles,
        ),
        curve(Case::Default, "Atoll, default settings, fixed window", Ink::Vermilion, Mark::Discs),
        Series::new(
            "Atoll, default settings, adaptive window",
            Ink::Vermilion,
            Mark::Dashed,
            [0.0, widest + 4.0].map(|x| Point::new(x, adaptive)),
        ),
        paper("CFS paper, no server selection", Mark::Crosses, &[(8.0, 20.0), (24.0, 50.0)]),
        paper("CFS paper, server selection: “almost doubling”", Mark::Pluses, &[(8.0, 38.0)]),
    ];
    Chart {
        title: "Download speed against the prefetch window (CFS Figure 6)".into(),
        subtitle: format!("{}; mean of all downloads", found.subtitle()),
        x: Axis::linear("prefetch window (KiB)", 0.0, widest + 4.0),
        y: Axis::up_to("speed (KiB/s)", highest(&series)),
        series,
    }
}

/// The least, the middle and the most.
fn range(sorted: &[f64]) -> String {
    if sorted.is_empty() {
        return String::new();
    }
    let at = |share| percentile(sorted, share);
    format!("{:.0} / {:.0} / {:.0}", at(0.0), at(0.5), at(1.0))
}

fn figure_7(found: &Found) -> Outcome {
    let series = series_7(found);
    Outcome {
        name: "cfs-fig7",
        title: "download speeds over the sites (KiB/s: least / median / most)".into(),
        source: "CFS §7.1, Figure 7",
        setup: found.setup(),
        comparison: comparison_7(found),
        notes: vec!["The paper gives Figure 7 as curves, in words only what is quoted.".into()],
        csv: found.csv(),
        chart: Chart {
            title: "Distribution of download speeds (CFS Figure 7)".into(),
            subtitle: found.subtitle(),
            x: speeds(&series),
            y: Axis::linear("share of downloads at most so fast", 0.0, 1.0),
            series,
        },
        seeds: found.seeds.clone(),
    }
}

fn comparison_7(found: &Found) -> Vec<Comparison> {
    let range_of = |case, window| range(&found.speeds(case, window));
    let mut comparison = Vec::new();
    for (blocks, _) in FIGURE_7 {
        let window = Window::Blocks(blocks);
        let kib = blocks * BLOCK_KIB;
        let (plain, selecting) =
            if blocks == 1 { ("narrow", "more skewed") } else { Default::default() };
        comparison.push(Comparison::new(
            format!("{kib} KiB window, no server selection"),
            plain,
            range_of(Case::PaperPlain, window),
            "(nearest replica)",
        ));
        comparison.push(Comparison::new(
            format!("{kib} KiB window, server selection"),
            selecting,
            range_of(Case::PaperSelecting, window),
            range_of(Case::Default, window),
        ));
    }
    let adaptive = range_of(Case::Default, Window::Adaptive);
    comparison.push(Comparison::new("adaptive window", "", "", adaptive));
    let large = Window::Blocks(found.windows.last().copied().unwrap_or(1));
    for (quantity, paper, window, best) in [
        ("fastest site, 8 KiB window", "New York University", Window::Blocks(1), true),
        ("slowest site, 8 KiB window", "outside the United States", Window::Blocks(1), false),
        ("slowest site, largest window", "cable modems", large, false),
    ] {
        let [ours, shipped] =
            [Case::PaperPlain, Case::Default].map(|case| extreme_site(found, case, window, best));
        comparison.push(Comparison::new(quantity, paper, ours, shipped));
    }
    comparison
}

fn series_7(found: &Found) -> Vec<Series> {
    let mut series: Vec<Series> = Vec::new();
    for (blocks, ink) in FIGURE_7 {
        let window = Window::Blocks(blocks);
        let kib = blocks * BLOCK_KIB;
        for (case, name, mark) in [
            (Case::PaperPlain, "no server selection", Mark::Dashed),
            (Case::PaperSelecting, "server selection", Mark::Line),
        ] {
            let name = format!("{kib} KiB, {name}");
            series.push(cumulative(name, ink, mark, found.speeds(case, window)));
        }
    }
    let shipped = found.speeds(Case::Default, Window::Adaptive);
    let name = "default settings, adaptive window".to_owned();
    series.push(cumulative(name, Ink::Vermilion, Mark::Dotted, shipped));
    series
}

fn extreme_site(found: &Found, case: Case, window: Window, best: bool) -> String {
    let mean = |site| {
        summary(found.of(case, window).filter(|d| d.site == site).map(|d| d.kib_per_sec)).mean
    };
    let sign = if best { 1.0 } else { -1.0 };
    let site = (0..sites::COUNT).max_by(|a, b| (sign * mean(*a)).total_cmp(&(sign * mean(*b))));
    site.map_or_else(String::new, |site| format!("{} ({:.0})", sites::name(site), mean(site)))
}

fn cumulative(name: String, ink: Ink, mark: Mark, speeds: Vec<f64>) -> Series {
    Series::new(name, ink, mark, steps(speeds).into_iter().map(|(x, y)| Point::new(x, y)))
}

/// The axis of distributions of speeds, which lie far apart.
fn speeds(series: &[Series]) -> Axis {
    let all = || series.iter().flat_map(|s| &s.points).map(|p| p.x);
    let (least, most) = (all().fold(f64::INFINITY, f64::min), all().fold(0.0, f64::max));
    Axis::log_over("speed (KiB/s)", least, most)
}

fn figure_8(found: &Found) -> Outcome {
    let series = series_8(found);
    Outcome {
        name: "cfs-fig8",
        title: "speeds of TCP and of CFS (KiB/s: mean, 10th to 90th percentile)".into(),
        source: "CFS §7.1, Figure 8",
        setup: "each ordered pair of 12 sites, a TCP connection for each file; CFS as in Figure 7"
            .into(),
        comparison: comparison_8(found),
        notes: vec![
            "TCP is that of 2001: initial window of two segments, delayed acknowledgements, at \
             most 64 KiB in flight. Atoll's own connections are TCP of today."
                .into(),
        ],
        csv: csv_8(found),
        chart: Chart {
            title: "Speeds of one TCP stream and of CFS (CFS Figure 8)".into(),
            subtitle: "each pair of 12 sites, over the same links".into(),
            x: speeds(&series),
            y: Axis::linear("share of transfers at most so fast", 0.0, 1.0),
            series,
        },
        seeds: found.seeds.clone(),
    }
}

/// The mean, and the middle eight tenths with how wide they are.
fn spread(sorted: &[f64]) -> String {
    if sorted.is_empty() {
        return String::new();
    }
    let at = |share| percentile(sorted, share);
    let mean = summary(sorted.iter().copied()).mean;
    format!("{mean:.0}, {:.0} to {:.0} (×{:.1})", at(0.1), at(0.9), at(0.9) / at(0.1))
}

fn comparison_8(found: &Found) -> Vec<Comparison> {
    let mut comparison: Vec<Comparison> = TRANSFERS
        .iter()
        .map(|len_bytes| {
            let quantity = format!("TCP, {}", length(*len_bytes));
            let speeds = found.transfer_speeds(*len_bytes);
            Comparison::new(quantity, "a wide distribution", spread(&speeds), "")
        })
        .collect();
    let paper_window = spread(&found.speeds(Case::PaperPlain, COMPETITIVE));
    let shipped = spread(&found.speeds(Case::Default, Window::Adaptive));
    let competitive = "competitive with TCP, narrower";
    comparison.push(Comparison::new("CFS, 40 KiB window", competitive, paper_window, ""));
    comparison.push(Comparison::new("CFS, adaptive window", "", "", shipped));
    comparison
}

fn series_8(found: &Found) -> Vec<Series> {
    let inks = [Ink::Sky, Ink::Purple, Ink::Black];
    let mut series: Vec<Series> = TRANSFERS
        .iter()
        .zip(inks)
        .map(|(len_bytes, ink)| {
            let name = format!("one TCP stream, {}", length(*len_bytes));
            cumulative(name, ink, Mark::Line, found.transfer_speeds(*len_bytes))
        })
        .collect();
    for (case, window, ink, name) in [
        (Case::PaperPlain, COMPETITIVE, Ink::Blue, "Atoll, paper's settings, 40 KiB window"),
        (
            Case::Default,
            Window::Adaptive,
            Ink::Vermilion,
            "Atoll, default settings, adaptive window",
        ),
    ] {
        series.push(cumulative(name.into(), ink, Mark::Dashed, found.speeds(case, window)));
    }
    series
}

fn csv_8(found: &Found) -> Csv {
    let mut csv = Csv::new(&["bytes", "seed", "from", "to", "kib_per_sec"]);
    for t in &found.transfers {
        let speed = format!("{:.2}", t.kib_per_sec);
        csv.row(&[&t.len_bytes, &t.seed, &sites::name(t.from), &sites::name(t.to), &speed]);
    }
    csv
}

fn length(bytes: u64) -> String {
    if bytes >= 1_000_000 {
        format!("{:.1} MB", bytes as f64 / 1e6)
    } else {
        format!("{} KiB", bytes >> 10)
    }
}
