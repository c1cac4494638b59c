//! `atoll pool check`: compare a pool's index with its files.

use atoll_pool::CheckReport;
use serde::Serialize;

use super::{env, known, when_free};
use crate::failure::{Exit, Failure};
use crate::global::Global;
use crate::output::{Output, safe_message};
use crate::units;

/// Arguments of `atoll pool check`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll pool check home
  atoll pool check home --json

Nobody may use the pool meanwhile. The exit status is 0 if everything was in order or was put right.")]
pub(super) struct Args {
    /// The pool's name on this node
    name: String,

    /// One JSON object
    #[arg(long)]
    json: bool,
}

/// The findings, as JSON.
#[derive(Serialize)]
struct Findings {
    files: u64,
    files_added: u64,
    files_gone: u64,
    orphans_named: u64,
    orphans_removed: u64,
    placeholders_mended: u64,
    names_without_directory: Vec<String>,
}

/// Checks.
pub(super) async fn run(args: &Args, global: &Global) -> Result<(), Failure> {
    let what = format!("cannot check pool {}", args.name);
    let record = known(&args.name, global, &what)?;
    if record.group.is_some() {
        return Err(Failure::new(Exit::Failed, what)
            .because("it has several members, and a node serves it; a check is for pools of one")
            .advice("`atoll pool status` tells how it stands."));
    }
    let checked = when_free(&record, &what, async |disk| atoll_pool::check(env(), disk).await);
    let report = checked.await?;
    let mut output = Output::new();
    if args.json {
        output.json(&findings(report.clone()))?;
    } else {
        for line in describe(&report) {
            output.line(line)?;
        }
    }
    output.flush()?;
    match report.names_without_directory.is_empty() {
        true => Ok(()),
        false => Err(Failure::new(Exit::Failed, format!("pool {} has lost directories", args.name))
            .advice("Remove their names, or bring the directories back into its slots from a copy, and check again.")),
    }
}

fn findings(report: CheckReport) -> Findings {
    let CheckReport {
        files,
        files_added,
        files_gone,
        orphans_named,
        orphans_removed,
        placeholders_mended,
        names_without_directory,
        // A pool of one has one group.
        ..
    } = report;
    Findings {
        files,
        files_added,
        files_gone,
        orphans_named,
        orphans_removed,
        placeholders_mended,
        names_without_directory,
    }
}

fn describe(report: &CheckReport) -> Vec<String> {
    let mut lines =
        vec![units::counted(report.files, "file or directory", "files and directories")];
    let found = [
        (
            report.files_added,
            "were put there by hand, or their entries were lost: they have numbers now",
        ),
        (report.files_gone, "in the index are gone: their entries were removed"),
        (report.orphans_named, "directories had no name: look for orphan-* in the root"),
        (report.orphans_removed, "empty directories had no name and were removed"),
        (report.placeholders_mended, "links to directories lead right again by hand"),
    ];
    lines.extend(
        found.iter().filter(|(count, _)| *count > 0).map(|(count, what)| format!("{count} {what}")),
    );
    lines.extend(
        report
            .names_without_directory
            .iter()
            .map(|path| format!("{}: its directory is gone", safe_message(path))),
    );
    if report.is_clean() {
        lines.push("everything is in order".to_owned());
    }
    lines
}
