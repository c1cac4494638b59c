//! `docs/results/andrew.md`.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use crate::disks::{Disk, Subject};
use crate::phases::{PHASES, Times};

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => f64::NAN,
        len if len % 2 == 1 => values[middle],
        _ => (values[middle - 1] + values[middle]) / 2.0,
    }
}

/// Seconds of a phase in each round; the last "phase" is all of them.
fn secs(times: &[Times], phase: usize) -> Vec<f64> {
    times
        .iter()
        .map(|times| times.phases.get(phase).copied().unwrap_or_else(|| times.total()))
        .collect()
}

/// The median of the rounds' ratios: what else the machine did in a round cancels out.
fn ratio(one: &[Times], other: &[Times], phase: usize) -> f64 {
    let pairs = secs(one, phase).into_iter().zip(secs(other, phase));
    median(pairs.map(|(one, other)| one / other).collect())
}

pub fn write(disks: &[Disk], figures: &[Vec<Times>], missing: &[(Subject, String)], rounds: usize) {
    let text = text(disks, figures, missing, rounds);
    print!("{text}");
    let results = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/results");
    fs::create_dir_all(&results).expect("docs/results");
    fs::write(results.join("andrew.md"), text).expect("docs/results/andrew.md");
}

fn text(
    disks: &[Disk],
    figures: &[Vec<Times>],
    missing: &[(Subject, String)],
    rounds: usize,
) -> String {
    let mut text = String::from("# The Andrew benchmark\n\n");
    let mb = disks.first().map_or(0.0, |disk| disk.tree_bytes as f64 / 1e6);
    let _ = writeln!(
        text,
        "A source tree of {mb:.0} MB, {rounds} rounds in which the file systems take turns; seconds, \
         the median of the rounds (least to most). \"Full\": all free space holds transparent \
         files; \"aged\": after 200 rounds of deleting and making a twentieth of them. copy and \
         delete end with `syncfs`. Made by `make bench-andrew`.\n"
    );
    let heads: Vec<&str> = disks.iter().map(|disk| disk.subject.name()).collect();
    let _ =
        writeln!(text, "| phase | {} |\n|---|{}", heads.join(" | "), "---|".repeat(disks.len()));
    for phase in 0..=PHASES.len() {
        let _ = write!(text, "| {} |", PHASES.get(phase).unwrap_or(&"all"));
        for times in figures {
            let all = secs(times, phase);
            let least = all.iter().copied().fold(f64::INFINITY, f64::min);
            let most = all.iter().copied().fold(0.0, f64::max);
            let _ = write!(text, " {:.2} ({least:.2}–{most:.2}) |", median(all));
        }
        text.push('\n');
    }
    text.push_str("| server's CPU |");
    for (disk, times) in disks.iter().zip(figures) {
        match disk.subject {
            Subject::Kernel => text.push_str(" – |"),
            _ => {
                let all = times.iter().map(|times| times.server_cpu_secs).collect();
                let _ = write!(text, " {:.2} |", median(all));
            }
        }
    }
    text.push('\n');
    text.push_str("| server's memory, MiB |");
    for disk in disks {
        match disk.subject {
            Subject::Kernel => text.push_str(" – |"),
            _ => {
                let _ = write!(text, " {:.0} |", disk.peak_mib);
            }
        }
    }
    text.push_str("\n\n");
    let of =
        |subject| disks.iter().position(|disk| disk.subject == subject).map(|at| &figures[at][..]);
    if let Some(tfs) = of(Subject::Tfs) {
        text.push_str("Time as a multiple of TFS' without transparent data, the median of the rounds' ratios:\n\n");
        let others: Vec<&Disk> = disks.iter().filter(|d| d.subject != Subject::Tfs).collect();
        let heads: Vec<&str> = others.iter().map(|disk| disk.subject.name()).collect();
        let _ = writeln!(
            text,
            "| phase | {} |\n|---|{}",
            heads.join(" | "),
            "---|".repeat(others.len())
        );
        for phase in 0..=PHASES.len() {
            let _ = write!(text, "| {} |", PHASES.get(phase).unwrap_or(&"all"));
            for disk in &others {
                let times = of(disk.subject).expect("one of the disks");
                let _ = write!(text, " {:.3} |", ratio(times, tfs, phase));
            }
            text.push('\n');
        }
        text.push('\n');
    }
    for (subject, why) in missing {
        let _ = writeln!(text, "{}: not measured, {why}.", subject.name());
    }
    text
}
