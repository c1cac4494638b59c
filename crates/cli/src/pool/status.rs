//! `atoll pool status`: this node's pools.

use std::path::PathBuf;

use atoll_pool::OWN_DIRECTORY;
use atoll_pool::disk::Disk;
use atoll_upkeep::pools::{self, PoolOfNode};
use serde::Serialize;

use super::{check_identity, disk, group, records};
use crate::connection;
use crate::failure::Failure;
use crate::global::Global;
use crate::messages::note;
use crate::output::Output;
use crate::units;

/// Arguments of `atoll pool status`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll pool status
  atoll pool status --json | jq -r .dir
  atoll pool status --json | jq -r '.group.groups[].primary'

For a pool of several machines, `group` lists the machines and the groups. Each group has its epoch (a number that grows whenever a member goes
or comes), its primary, and `states`: on the primary one of each member, on another node its own. A member takes part, is brought up to date, or
is away.")]
pub(super) struct Args {
    /// One JSON object a line
    #[arg(long)]
    json: bool,
}

/// A pool, as JSON.
#[derive(Serialize)]
struct PoolStatus {
    name: String,
    dir: PathBuf,
    /// Why it cannot be served, if that is so.
    #[serde(skip_serializing_if = "Option::is_none")]
    fault: Option<String>,
    #[serde(flatten)]
    found: Option<FoundPool>,
    /// The state of a pool of several, as the node reports it.
    #[serde(skip_serializing_if = "Option::is_none")]
    group: Option<PoolOfNode>,
    #[serde(skip)]
    is_of_one: bool,
}

/// The state of a pool whose directory can be read.
#[derive(Serialize)]
struct FoundPool {
    level: u8,
    /// Whether a process has it.
    is_served: bool,
    /// Room of the file system that it lies on, bytes.
    size_bytes: u64,
    free_bytes: u64,
}

/// Lists them.
pub(super) async fn run(args: &Args, global: &Global) -> Result<(), Failure> {
    let node = global.dir()?;
    let names = records::all(&node)?;
    let mut output = Output::new();
    let groups = groups(&names, global).await;
    if names.is_empty() && !args.json {
        note!("this node has no pool; `atoll pool create NAME FILES` makes one");
    }
    for name in names {
        let what = format!("cannot read pool {name}");
        let Some(record) = records::find(&node, &name, &what)? else { continue };
        let has_nothing =
            |group: &records::GroupRecord| group.joins.is_some() || group.is_without_files;
        let found = match record.group.as_ref().is_some_and(has_nothing) {
            // There is nothing in its directory yet, or never.
            true => Ok(None),
            false => find(&record, &what).await.map(Some),
        };
        let (found, mut fault) = match found {
            Ok(found) => (found, None),
            Err(failure) => (None, Some(failure.reason())),
        };
        let is_of_one = record.group.is_none();
        let group = match (&record.group, &groups) {
            (None, _) => None,
            (Some(_), Ok(groups)) => groups.iter().find(|pool| pool.name == name).cloned(),
            (Some(_), Err(why)) => {
                fault = fault.or_else(|| Some(why.clone()));
                None
            }
        };
        let status = PoolStatus { name, dir: record.dir, fault, found, group, is_of_one };
        match args.json {
            true => output.json(&status)?,
            false => show(&mut output, &status)?,
        }
    }
    output.flush()
}

/// How the pools of several stand, which the node serves; why that is not known.
async fn groups(names: &[String], global: &Global) -> Result<Vec<PoolOfNode>, String> {
    if names.is_empty() {
        return Ok(Vec::new());
    }
    let client = connection::impatient(global).await.map_err(|failure| failure.reason())?;
    pools::status(&client).await.map_err(|error| error.to_string())
}

async fn find(record: &records::PoolRecord, what: &str) -> Result<FoundPool, Failure> {
    let failed = |error| super::failure(&error, what);
    let of_groups = pools::directories(&record.dir);
    let of_groups = of_groups.map_err(|error| Failure::io(what, &error))?;
    // A machine that joined later has none of the first group.
    let first = of_groups.into_iter().next().map_or(record.dir.clone(), |(_, dir)| dir);
    let disk = disk(&first, what)?;
    let level = match &record.group {
        Some(group) if first == record.dir && !first.join(OWN_DIRECTORY).exists() => group.level,
        _ => {
            check_identity(&disk, record, what).await?;
            atoll_pool::read_settings(&disk).await.map_err(failed)?.level
        }
    };
    let room = disk.stat_fs().await;
    let room =
        room.map_err(|errno| Failure::new(crate::failure::Exit::Failed, what).because(errno))?;
    let is_served = match first.join(OWN_DIRECTORY).exists() {
        true => atoll_pool::is_in_use(&disk).await.map_err(failed)?,
        false => false,
    };
    let bytes = |blocks: u64| blocks.saturating_mul(u64::from(room.block_size_bytes));
    Ok(FoundPool {
        level,
        is_served,
        size_bytes: bytes(room.blocks),
        free_bytes: bytes(room.blocks_available),
    })
}

fn show(output: &mut Output, status: &PoolStatus) -> Result<(), Failure> {
    output.line(format!("{}  {}", status.name, status.dir.display()))?;
    if let Some(fault) = &status.fault {
        output.line(format!("    cannot be served: {fault}"))?;
    }
    if let Some(found) = &status.found {
        let served = match found.is_served {
            true => "served",
            false => "not served",
        };
        let copies = match status.is_of_one {
            true => "one machine, no copies; ",
            false => "",
        };
        let level = match status.group.as_ref().and_then(|group| group.level) {
            Some(now) if now != found.level => {
                format!("{now} for new directories, it was {}", found.level)
            }
            _ => found.level.to_string(),
        };
        output.line(format!("    {copies}distribution level {level}; {served}"))?;
        let (free, size) = (units::size(found.free_bytes), units::size(found.size_bytes));
        output.line(format!("    {free} free of {size}"))?;
    }
    for line in status.group.iter().flat_map(group::describe) {
        output.line(line)?;
    }
    Ok(())
}
