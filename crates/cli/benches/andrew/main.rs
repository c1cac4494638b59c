//! The Andrew benchmark (Howell, Kazar, Menees and others 1988; TFS paper §5.2.1) on TFS without
//! and with transparent data, on `fuse2fs`, and on the kernel's own driver.
//!
//! The tree and the phases are those of [`atoll_lab::andrew`], with a real compiler: a source tree
//! of 60 MB lies on the file system that is tested. All file systems are images on the same disk.
//! Before a round and before its second half each is mounted anew and its image dropped from
//! memory, and all writes are waited for, so that none finds anything in memory or another's writes
//! under way. They take turns within each round, in an order that changes, because what else this
//! machine does changes with time; what is compared is the ratio within a round, and how far its
//! quartiles lie apart says what a difference is worth. Then everyday work, on TFS and under the
//! kernel's driver (`everyday`). Root only; writes `docs/results/andrew.md`.

// A benchmark reads the real clock.
#![allow(clippy::disallowed_methods)]

mod disks;
mod everyday;
mod phases;
mod report;

use std::path::Path;
use std::process::ExitCode;

use disks::{Disk, Subject};

/// Rounds, each on every file system; each is the first three times.
const ROUNDS: usize = 15;
/// Rounds of everyday work on TFS and under the kernel's driver.
const EVERYDAY_ROUNDS: usize = 5;

/// In which order the file systems take turns: each is the first in some round, and they go
/// around both ways.
fn order(round: usize, count: usize) -> Vec<usize> {
    let forwards = (round / count).is_multiple_of(2);
    (0..count).map(|i| (round + if forwards { i } else { count - i }) % count).collect()
}

fn main() -> ExitCode {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: mounting images needs root.");
        return ExitCode::SUCCESS;
    }
    // `cargo test --benches` calls this too; the figures are for `cargo bench`.
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let value = |name: &str| {
        let at = arguments.iter().position(|argument| argument == name)?;
        arguments.get(at + 1)?.parse::<usize>().ok()
    };
    let rounds = value("--rounds").unwrap_or(ROUNDS);
    let disk_mib = value("--disk-mib").unwrap_or(1024) as u64;

    let everyday_rounds = value("--everyday-rounds").unwrap_or(EVERYDAY_ROUNDS);

    let temp = tempfile::tempdir().expect("a temporary directory");
    let andrew = (rounds > 0).then(|| andrew(temp.path(), disk_mib, rounds));
    let everyday = (everyday_rounds > 0)
        .then(|| everyday::measured(temp.path(), disk_mib.max(2048), everyday_rounds));
    report::write(andrew, everyday);
    ExitCode::SUCCESS
}

/// Does the Andrew benchmark; its part of the report.
fn andrew(temp: &Path, disk_mib: u64, rounds: usize) -> String {
    let mut disks = Vec::new();
    let mut missing = Vec::new();
    for subject in Subject::ALL {
        match subject.missing() {
            Some(why) => {
                eprintln!("SKIPPED {}: {why}", subject.name());
                missing.push((subject, why));
            }
            None => {
                eprintln!("making a disk of {disk_mib} MiB: {}", subject.name());
                disks.push(Disk::make(subject, temp, disk_mib));
            }
        }
    }
    // Not measured: the compiler, its headers and this program come into memory.
    for disk in &mut disks {
        eprintln!("warming up: {}", disk.subject.name());
        disk.round();
    }
    let mut figures: Vec<Vec<phases::Times>> = vec![Vec::new(); disks.len()];
    for round in 0..rounds {
        for which in order(round, disks.len()) {
            let times = disks[which].round();
            eprintln!(
                "round {} of {rounds}, {}: {:.2} s",
                round + 1,
                disks[which].subject.name(),
                times.total()
            );
            figures[which].push(times);
        }
    }
    report::text(&disks, &figures, &missing, rounds)
}
