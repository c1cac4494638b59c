//! `docs/results/andrew.md`.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use crate::ROUNDS;
use crate::disks::{Disk, Subject};
use crate::everyday;
use crate::phases::{PHASES, Times};
use atoll_bench::{machine, today};

/// What lies at this share of the values, between neighbours in proportion.
pub(crate) fn quantile(values: &[f64], share: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let Some(last) = sorted.len().checked_sub(1) else { return f64::NAN };
    let at = share * last as f64;
    let (below, above) = (sorted[at.floor() as usize], sorted[at.ceil() as usize]);
    below + (above - below) * at.fract()
}

/// Rows of the tables below the phases.
const SUMS: [&str; 3] = ["all", "all but compile", "server's CPU"];

/// Rows of the tables, numbered.
fn rows() -> impl Iterator<Item = (usize, &'static str)> {
    PHASES.into_iter().chain(SUMS).enumerate()
}

/// Seconds of a row in each round.
fn secs(times: &[Times], row: usize) -> Vec<f64> {
    let of = |times: &Times| match row.checked_sub(PHASES.len()) {
        None => times.phases[row],
        Some(0) => times.total(),
        Some(1) => times.without_compiler(),
        Some(_) => times.server_cpu_secs,
    };
    times.iter().map(of).collect()
}

/// The rounds' ratios: what else the machine did in a round cancels out.
fn ratios(one: &[Times], other: &[Times], row: usize) -> Vec<f64> {
    let pairs = secs(one, row).into_iter().zip(secs(other, row));
    pairs.map(|(one, other)| one / other).collect()
}

/// The median, and the quartiles; nothing of what does not exist (the kernel's server).
fn spread(values: &[f64], digits: usize) -> String {
    if values.iter().all(|value| *value == 0.0) {
        return "–".to_owned();
    }
    let [low, middle, high] = [0.25, 0.5, 0.75].map(|share| quantile(values, share));
    format!("{middle:.digits$} ({low:.digits$}–{high:.digits$})")
}

/// Writes the parts that were measured; of the other what stood there stays.
pub(crate) fn write(andrew: Option<String>, everyday: Option<String>) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/results/andrew.md");
    let before = fs::read_to_string(&path).unwrap_or_default();
    let at = before.find(everyday::HEADING).unwrap_or(before.len());
    let (old_andrew, old_everyday) = before.split_at(at);
    let andrew = andrew.unwrap_or_else(|| old_andrew.to_owned());
    let everyday = everyday.unwrap_or_else(|| old_everyday.to_owned());
    let text = format!("{}\n\n{everyday}", andrew.trim_end());
    print!("{text}");
    fs::create_dir_all(path.parent().expect("docs/results")).expect("docs/results");
    fs::write(path, text.trim_end().to_owned() + "\n").expect("docs/results/andrew.md");
}

pub(crate) fn text(
    disks: &[Disk],
    figures: &[Vec<Times>],
    missing: &[(Subject, String)],
    rounds: usize,
) -> String {
    let mut text = String::from("# The Andrew benchmark\n\n");
    let options = if rounds == ROUNDS { "" } else { &format!(" ANDREW='--rounds {rounds}'") };
    let command = format!("`make bench-andrew{options}`");
    let _ = writeln!(text, "Measured {} by {command} on {}.\n", today(), machine());
    let mb = disks.first().map_or(0.0, |disk| disk.tree_bytes as f64 / 1e6);
    let _ = writeln!(
        text,
        "A source tree of {mb:.0} MB, {rounds} rounds in which the file systems take turns; seconds, \
         the median of the rounds (quartiles). \"Full\": all free space holds transparent files; \
         \"aged\": after 200 rounds of deleting and making a twentieth of them. A copy ends when \
         the file system has the data, sync when all of it is durable; delete is durable at its \
         end.\n"
    );
    let heads: Vec<&str> = disks.iter().map(|disk| disk.subject.name()).collect();
    let _ =
        writeln!(text, "| phase | {} |\n|---|{}", heads.join(" | "), "---|".repeat(disks.len()));
    for (row, name) in rows() {
        let _ = write!(text, "| {name} |");
        for times in figures {
            let _ = write!(text, " {} |", spread(&secs(times, row), 2));
        }
        text.push('\n');
    }
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
        text.push_str(
            "Time as a multiple of TFS' without transparent data: the median of the rounds' ratios \
             (quartiles). A difference from 1 that the quartiles enclose is not one.\n\n",
        );
        let others: Vec<&Disk> = disks.iter().filter(|d| d.subject != Subject::Tfs).collect();
        let heads: Vec<&str> = others.iter().map(|disk| disk.subject.name()).collect();
        let _ = writeln!(
            text,
            "| phase | {} |\n|---|{}",
            heads.join(" | "),
            "---|".repeat(others.len())
        );
        for (row, name) in rows() {
            let _ = write!(text, "| {name} |");
            for disk in &others {
                let times = of(disk.subject).expect("one of the disks");
                let _ = write!(text, " {} |", spread(&ratios(times, tfs, row), 3));
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
