//! `atoll tfs check`: whether an unmounted file system is sound.

use std::path::PathBuf;

use atoll_node::shell_word;
use atoll_tfs::check::{CheckError, CheckOptions, CheckReport, Damaged, check};
use serde::Serialize;

use super::device;
use crate::failure::{Exit, Failure};
use crate::global::Global;
use crate::output;
use crate::units;

/// Arguments of `atoll tfs check`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll tfs check disk.img
  atoll tfs check --tags disk.img
  atoll tfs check --repair disk.img

--repair repairs the records of transparent files; e2fsck repairs damage of ext2 itself.
The exit code is 1 if something was found and is not repaired.")]
pub(super) struct Args {
    /// An image file or a block device that is not mounted
    #[arg(value_name = "DEVICE")]
    device: PathBuf,

    /// Repair the records of transparent files
    #[arg(long)]
    repair: bool,

    /// Also read all transparent data and compare it with its tags
    #[arg(long)]
    tags: bool,

    /// One JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Shown<'a> {
    sound: bool,
    needs_e2fsck: bool,
    has_records: bool,
    foreign: bool,
    files: u64,
    directories: u64,
    transparent_files: u64,
    lost_files: u64,
    used_blocks: u64,
    unlisted: u64,
    findings: Vec<ShownFinding<'a>>,
}

#[derive(Serialize)]
struct ShownFinding<'a> {
    damaged: &'static str,
    text: &'a str,
    repaired: bool,
}

fn name(damaged: Damaged) -> &'static str {
    match damaged {
        Damaged::Ext2 => "ext2",
        Damaged::Records => "records",
    }
}

/// Checks.
pub(super) fn run(args: &Args, global: &Global) -> Result<(), Failure> {
    let device = device::open(&args.device, !args.repair)?;
    let random = device::random()?;
    let checked = device::watched("checking", global.quiet, |progress| {
        let options = CheckOptions {
            repair: args.repair,
            compare_tags: args.tags,
            random,
            now_unix_secs: device::now_unix_secs(),
            progress,
        };
        check(&device, &options)
    });
    let what = format!("cannot check {}", args.device.display());
    let report = checked.map_err(|error| match error {
        CheckError::Io(error) => Failure::io(what, &error),
        error => Failure::new(Exit::Failed, what).because(error),
    })?;
    output::show(args.json, &shown(&report), describe(&report))?;
    if report.is_sound() {
        return Ok(());
    }
    let failure = Failure::new(Exit::Failed, format!("{} is damaged", args.device.display()));
    let path = shell_word(&args.device.display().to_string());
    Err(match report.needs_e2fsck() {
        true => failure.advice(format!("e2fsck -f {path} repairs ext2; then check it again.")),
        false => failure.advice(format!("atoll tfs check --repair {path}")),
    })
}

fn shown(report: &CheckReport) -> Shown<'_> {
    let findings = report.findings.iter().map(|finding| ShownFinding {
        damaged: name(finding.damaged),
        text: &finding.text,
        repaired: finding.repaired,
    });
    Shown {
        sound: report.is_sound(),
        needs_e2fsck: report.needs_e2fsck(),
        has_records: report.has_records,
        foreign: report.foreign,
        files: report.files,
        directories: report.directories,
        transparent_files: report.transparent_files,
        lost_files: report.lost_files,
        used_blocks: report.used_blocks,
        unlisted: report.unlisted,
        findings: findings.collect(),
    }
}

fn describe(report: &CheckReport) -> Vec<String> {
    let mut lines: Vec<String> = report
        .findings
        .iter()
        .map(|finding| {
            let repaired = if finding.repaired { " (repaired)" } else { "" };
            format!("{}: {}{repaired}", name(finding.damaged), finding.text)
        })
        .collect();
    if report.unlisted > 0 {
        lines.push(format!("and {} more", units::count(report.unlisted)));
    }
    let verdict = match (report.is_clean(), report.is_sound()) {
        (true, _) => "sound",
        (false, true) => "sound now",
        (false, false) => "damaged",
    };
    let files = units::counted(report.files, "file", "files");
    let directories = units::counted(report.directories, "directory", "directories");
    let transparent = match report.transparent_files {
        0 => String::new(),
        count => {
            format!(", {} of them transparent ({} lost)", units::count(count), report.lost_files)
        }
    };
    lines.push(format!("{verdict}: {files}{transparent}, {directories}"));
    if !report.has_records {
        lines.push("it has no records of transparent files; the first mount makes them".into());
    }
    if report.foreign {
        lines.push("other software has written since; the next mount looks after that".into());
    }
    lines
}
