//! Everyday work on TFS beside the kernel's own driver: a copy, a backup and the removal of a tree,
//! very many files in one directory, dbench's office, and the memory that stays.
//!
//! As the Andrew phases: both take turns, and what counts is the ratio within a round.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::disks::{Disk, Subject, run};
use crate::report::quantile;

/// The tree that `cp`, `tar` and `rm` work on.
const TREE: &str = "/usr/include";
/// Files made in one directory.
const FILES: usize = 100_000;
/// Processes of dbench, and its time.
const CLIENTS: &str = "4";
const DBENCH_SECS: &str = "10";
/// Files that are listed and forgotten: in so many directories so many each.
const LISTED: (usize, usize) = (100, 5_000);
/// Longer than it takes the server to give memory back.
const TRIMMED_AFTER: Duration = Duration::from_secs(12);
/// The image must have inodes for those files.
const LISTED_DISK_MIB: u64 = 4608;

const TASKS: [&str; 5] =
    ["cp -a /usr/include", "tar of it, warm", "rm -r of it", "100,000 creates", "rm -r of them"];

/// One round on one file system.
pub(crate) struct Day {
    secs: [f64; TASKS.len()],
    /// MB/s, if dbench is installed.
    dbench: Option<f64>,
    server_cpu_secs: f64,
}

fn timed(work: impl FnOnce()) -> f64 {
    let began = Instant::now();
    work();
    began.elapsed().as_secs_f64()
}

fn remove(path: &Path) {
    run(Command::new("rm").arg("-r").arg(path));
}

fn tar(tree: &Path) {
    // Into a pipe: tar does not read what it writes to /dev/null.
    let mut child = Command::new("tar")
        .args(["-cf", "-", "."])
        .current_dir(tree)
        .stdout(Stdio::piped())
        .spawn();
    let child = child.as_mut().expect("tar");
    io::copy(child.stdout.as_mut().expect("its output"), &mut io::sink()).expect("an archive");
    assert!(child.wait().expect("tar").success());
}

fn make_files(directory: &Path, count: usize) {
    fs::create_dir(directory).expect("a directory");
    for n in 0..count {
        File::create_new(directory.join(format!("file{n:06}"))).expect("a file");
    }
}

fn dbench(place: &Path) -> Option<f64> {
    let mut command = Command::new("dbench");
    command.args(["-t", DBENCH_SECS, "-D"]).arg(place).arg(CLIENTS);
    let said = String::from_utf8(command.output().ok()?.stdout).ok()?;
    let line = said.lines().find_map(|line| line.strip_prefix("Throughput "))?;
    fs::remove_dir_all(place.join("clients")).expect("what dbench left");
    line.split_whitespace().next()?.parse().ok()
}

/// One round.
pub(crate) fn day(disk: &Disk) -> Day {
    disk.settle();
    let mount = disk.mount();
    let (copy, many) = (mount.place.join("copy"), mount.place.join("many"));
    let mut secs = [0.0; TASKS.len()];
    secs[0] = timed(|| run(Command::new("cp").arg("-a").arg(TREE).arg(&copy)));
    tar(&copy);
    secs[1] = timed(|| tar(&copy));
    secs[2] = timed(|| remove(&copy));
    secs[3] = timed(|| make_files(&many, FILES));
    secs[4] = timed(|| remove(&many));
    let dbench = dbench(&mount.place);
    let server_cpu_secs = mount.cpu_secs();
    mount.unmount();
    Day { secs, dbench, server_cpu_secs }
}

/// Memory of TFS' server, MiB: when files were listed, and when the kernel has forgotten them.
fn memory(temp: &Path) -> Option<(f64, f64)> {
    let disk = Disk::blank(Subject::Tfs, temp, LISTED_DISK_MIB);
    let mount = disk.mount();
    for n in 0..LISTED.0 {
        make_files(&mount.place.join(format!("directory{n}")), LISTED.1);
    }
    mount.unmount();
    let mount = disk.mount();
    run(Command::new("find").arg(&mount.place).args(["-size", "+1"]).stdout(Stdio::null()));
    let listed = mount.memory_mib("VmRSS:");
    rustix::fs::sync();
    fs::write("/proc/sys/vm/drop_caches", "2").ok()?;
    std::thread::sleep(TRIMMED_AFTER);
    let dropped = mount.memory_mib("VmRSS:");
    mount.unmount();
    Some((listed?, dropped?))
}

/// The section about it in `docs/results/andrew.md`, from its heading.
pub(crate) const HEADING: &str = "## Everyday work beside the kernel's driver\n";

/// Does it all.
pub(crate) fn measured(temp: &Path, disk_mib: u64, rounds: usize) -> String {
    let subjects = [Subject::Tfs, Subject::Kernel].map(|subject| {
        let temp = temp.join(format!("everyday-{}", subject.name()));
        fs::create_dir(&temp).expect("a directory");
        Disk::blank(subject, &temp, disk_mib)
    });
    let mut days: [Vec<Day>; 2] = Default::default();
    for round in 0..rounds {
        for which in crate::order(round, subjects.len()) {
            days[which].push(day(&subjects[which]));
            eprintln!(
                "everyday work {} of {rounds}: {}",
                round + 1,
                subjects[which].subject.name()
            );
        }
    }
    let temp = temp.join("everyday-memory");
    fs::create_dir(&temp).expect("a directory");
    text(&days[0], &days[1], memory(&temp), rounds)
}

fn text(tfs: &[Day], kernel: &[Day], memory: Option<(f64, f64)>, rounds: usize) -> String {
    let median = |values: &[f64]| quantile(values, 0.5);
    let spread = |values: &[f64]| {
        let [low, middle, high] = [0.25, 0.5, 0.75].map(|share| quantile(values, share));
        format!("{middle:.2} ({low:.2}–{high:.2})")
    };
    let mut text = String::from(HEADING);
    let _ = writeln!(
        text,
        "\nMeasured {} on {}, {rounds} rounds in turns; medians, and the quartiles of the rounds' \
         ratios.\n\n| task | TFS | kernel | TFS / kernel |\n|---|---|---|---|",
        atoll_bench::today(),
        atoll_bench::machine(),
    );
    let mut row = |task: &str, unit: &str, figures: [Vec<f64>; 2]| {
        let [one, other] = &figures;
        let ratios: Vec<f64> = one.iter().zip(other).map(|(one, other)| one / other).collect();
        let (one, other) = (median(one), median(other));
        let _ = writeln!(
            text,
            "| {task} | {one:.2} {unit} | {other:.2} {unit} | {} |",
            spread(&ratios)
        );
    };
    for (n, task) in TASKS.iter().enumerate() {
        let secs = |days: &[Day]| days.iter().map(|day| day.secs[n]).collect();
        row(task, "s", [secs(tfs), secs(kernel)]);
    }
    let speeds = |days: &[Day]| days.iter().map(|day| day.dbench).collect::<Option<Vec<f64>>>();
    if let (Some(one), Some(other)) = (speeds(tfs), speeds(kernel)) {
        row("dbench 4, 4 clients", "MB/s", [one, other]);
    } else {
        text.push_str("\ndbench: not measured, not installed (Debian: dbench).\n");
    }
    let cpu: Vec<f64> = tfs.iter().map(|day| day.server_cpu_secs).collect();
    // Figures of a busy machine are to be read as ratios, if at all.
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load = load.split(' ').next().unwrap_or_default();
    let _ = write!(text, "\nThe machine's load at the end: {load}. ");
    let _ = write!(text, "The server's CPU time in a round: {:.2} s. ", median(&cpu));
    if let Some((listed, dropped)) = memory {
        let _ = writeln!(
            text,
            "Its memory when {} files in {} directories were listed: {listed:.0} MiB; when the \
             kernel had forgotten them: {dropped:.0} MiB.",
            LISTED.0 * LISTED.1,
            LISTED.0
        );
    }
    text
}
