//! `atoll pool check`: compare a pool's index with its files, and of a pool of several all copies of each file.

use std::time::Duration;

use atoll_pool::{CheckReport, GroupNumber, ScrubReport, ask_scrub};
use atoll_upkeep::pools::{self, CallError, NodeRoute};
use serde::Serialize;

use super::records::PoolRecord;
use super::{env, known, when_free};
use crate::connection;
use crate::failure::{Exit, Failure};
use crate::global::Global;
use crate::messages::note;
use crate::output::{Output, safe_message};
use crate::units;

/// How long one call about a scrub may take.
const CALL_LIMIT: Duration = Duration::from_secs(10);
/// How often a scrub is asked how far it is.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// How often people are told.
const SAY_EVERY: Duration = Duration::from_secs(10);
/// For so long a group may be without a primary.
const PATIENCE: Duration = Duration::from_secs(60);

/// Arguments of `atoll pool check`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll pool check home
  atoll pool check home --json

A pool of one machine: compares its index with its files; nobody may use it meanwhile. A pool of several: compares the copies of each file
while the pool is used, heals those that rotted or that somebody has changed behind the pool's back, and puts what was changed under
FILES/.atoll/aside on that machine (`atoll pool adopt` lists it). The nodes do that once a day by themselves, slowly.

The exit status is 0 if everything was in order or was put right. Files that programs write to meanwhile are passed over, and counted.")]
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
        return check_copies(args, &record, global, &what).await;
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

/// The report of one group's scrub, as JSON.
#[derive(Serialize)]
struct GroupFindings {
    group: u8,
    copies: u64,
    files: u64,
    bytes: u64,
    passed_over: u64,
    healed: u64,
    restored: u64,
    moved_back: u64,
    set_aside: u64,
    unhealed: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    stopped: Option<String>,
    findings: Vec<String>,
}

/// Has the primaries of all groups compare all copies, and waits until they have.
async fn check_copies(
    args: &Args,
    record: &PoolRecord,
    global: &Global,
    what: &str,
) -> Result<(), Failure> {
    let (_, client) = connection::for_mount(global).await?;
    let damaged = || Failure::new(Exit::Failed, what).because("its record is damaged");
    let route = NodeRoute::new(client.clone(), record.pool_id().ok_or_else(damaged)?);
    let all = pools::status(&client).await.map_err(connection::failure)?;
    let pool = all.into_iter().find(|pool| pool.name == args.name);
    let unserved = || Failure::new(Exit::Unavailable, what).because("the node does not serve it");
    let pool = pool.ok_or_else(unserved)?;
    if let Some(problem) = pool.problem {
        return Err(Failure::new(Exit::Unavailable, what).because(problem));
    }
    let groups: Vec<GroupNumber> =
        pool.groups.iter().filter_map(|group| GroupNumber::new(group.group)).collect();
    for group in &groups {
        asked(&route.to(*group), true, what).await?;
    }
    let mut output = Output::new();
    let mut found = Vec::new();
    for group in groups {
        let report = until_compared((&args.name, group), &route.to(group), global, what).await?;
        if !args.json {
            let of_group =
                if pool.groups.len() > 1 { format!("group {group}: ") } else { String::new() };
            for line in describe_copies(&report) {
                output.line(format!("{of_group}{line}"))?;
            }
        }
        found.push((group, report));
    }
    let unhealed: u64 = found.iter().map(|(_, report)| report.unhealed).sum();
    let has_stopped = found.iter().any(|(_, report)| report.stopped.is_some());
    if args.json {
        let groups: Vec<GroupFindings> = found.into_iter().map(of_group).collect();
        output.json(&serde_json::json!({ "groups": groups }))?;
    }
    output.flush()?;
    let problem = match (unhealed, has_stopped) {
        (0, false) => return Ok(()),
        (0, true) => "could not be compared to the end".to_owned(),
        _ => {
            let copies = units::counted(unhealed, "copy", "copies");
            format!("has {copies} that could not be healed")
        }
    };
    Err(Failure::new(Exit::Failed, format!("pool {} {problem}", args.name)))
}

fn of_group((group, report): (GroupNumber, ScrubReport)) -> GroupFindings {
    let ScrubReport {
        copies,
        files,
        bytes,
        passed_over,
        healed,
        restored,
        moved_back,
        set_aside,
        unhealed,
        stopped,
        findings,
        ..
    } = report;
    GroupFindings {
        group: group.number(),
        copies,
        files,
        bytes,
        passed_over,
        healed,
        restored,
        moved_back,
        set_aside,
        unhealed,
        stopped,
        findings,
    }
}

/// Asks how far a scrub is, or has one begin; a group may have no primary for a moment.
async fn asked(route: &NodeRoute, begins: bool, what: &str) -> Result<ScrubReport, Failure> {
    let until = tokio::time::Instant::now() + PATIENCE;
    loop {
        match ask_scrub(route, begins, CALL_LIMIT).await {
            Ok(report) => return Ok(report),
            Err(error) if tokio::time::Instant::now() > until => {
                let why = match error {
                    CallError::Refused(refusal) => refusal.text,
                    error => error.to_string(),
                };
                return Err(Failure::new(Exit::Unavailable, what)
                    .because(why)
                    .advice("`atoll pool status` tells how it stands."));
            }
            Err(_) => tokio::time::sleep(LOOK_EVERY).await,
        }
    }
}

async fn until_compared(
    (name, group): (&str, GroupNumber),
    route: &NodeRoute,
    global: &Global,
    what: &str,
) -> Result<ScrubReport, Failure> {
    let mut report = asked(route, false, what).await?;
    let mut said = tokio::time::Instant::now();
    while report.is_running || report.passes == 0 {
        if said.elapsed() > SAY_EVERY && !global.quiet {
            said = tokio::time::Instant::now();
            let (files, size) = (report.files, units::size(report.bytes));
            note!("pool {name}, group {group}: {files} files and directories, {size} compared");
        }
        tokio::time::sleep(LOOK_EVERY).await;
        let before = report;
        report = asked(route, false, what).await?;
        // Another member has become the primary: it begins anew.
        if !report.is_running && report.passes < before.passes + u64::from(before.is_running) {
            report = asked(route, true, what).await?;
        }
    }
    Ok(report)
}

fn describe_copies(report: &ScrubReport) -> Vec<String> {
    let files = units::counted(report.files, "file or directory", "files and directories");
    let copies = units::counted(report.copies, "copy", "copies");
    let mut lines = vec![format!("{files}, {} in each of {copies}", units::size(report.bytes))];
    lines.extend(report.findings.iter().map(|finding| safe_message(finding)));
    let counts = [
        (report.healed, "copies had other bytes or attributes, and were healed"),
        (report.restored, "copies were gone or lacked names, and are there again"),
        (report.moved_back, "files were moved by hand, and are back"),
        (report.set_aside, "were set aside: `atoll pool adopt` lists them on their machines"),
        (report.passed_over, "were passed over: programs write to them, or a machine is away"),
        (report.unhealed, "copies are wrong and could not be healed"),
    ];
    let counts = counts.iter().filter(|(count, _)| *count > 0);
    lines.extend(counts.map(|(count, what)| format!("{count} {what}")));
    lines.extend(report.stopped.iter().map(|why| format!("it stopped: {}", safe_message(why))));
    if lines.len() == 1 {
        let same = match report.copies {
            0 | 1 => "there is one copy of each: there is nothing to compare it with",
            _ => "all copies are the same",
        };
        lines.push(same.to_owned());
    }
    lines
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
