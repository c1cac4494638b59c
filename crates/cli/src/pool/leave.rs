//! `atoll pool leave`: a pool's directory as one plain tree. `atoll pool forget`: only off this node.

use super::records::{GroupRecord, PoolRecord};
use super::{disk, env, failure, known, records, when_free};
use crate::failure::{Exit, Failure};
use crate::global::Global;
use crate::messages::note;
use crate::terminal;
use crate::units;

/// Arguments of `atoll pool leave`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll pool leave home
  atoll pool leave home --yes

No data moves: each directory is renamed to where its name is. Interrupted, the command goes on when it is run again.")]
pub(super) struct LeaveArgs {
    /// The pool's name on this node
    name: String,

    /// Do not ask
    #[arg(long)]
    yes: bool,

    /// Leave though the other members cannot be told, or lack something that this one has
    #[arg(long)]
    alone: bool,
}

/// Arguments of `atoll pool forget`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll pool forget home

`atoll pool attach` brings it back.")]
pub(super) struct ForgetArgs {
    /// The pool's name on this node
    name: String,
}

/// Makes one plain tree.
pub(super) async fn leave(args: &LeaveArgs, global: &Global) -> Result<(), Failure> {
    let what = format!("cannot leave pool {}", args.name);
    let record = known(&args.name, global, &what)?;
    if record.group.as_ref().is_some_and(|group| group.joins.is_some()) {
        return Err(Failure::new(Exit::Failed, what)
            .because("this node has not joined it yet: it has no files")
            .advice("`atoll pool forget` lets this node forget it."));
    }
    if !args.yes {
        let others = match record.group {
            None => "",
            Some(_) => " Its other members go on without this one.",
        };
        let question = format!(
            "{} will be a plain directory, and no pool any more.{others} Type {} to go on",
            record.dir.display(),
            args.name
        );
        match terminal::ask(&question, false) {
            Ok(Some(typed)) if typed.trim() == args.name => {}
            Ok(Some(_)) => {
                return Err(Failure::new(Exit::Failed, what).because("that is another name"));
            }
            Ok(None) => {
                return Err(Failure::new(Exit::Usage, what)
                    .because("there is no terminal to ask on")
                    .advice("--yes says that it is meant."));
            }
            Err(error) => return Err(Failure::io(what, &error)),
        }
    }
    let node = global.dir()?;
    if let Some(group) = &record.group {
        if !args.alone && !group.is_leaving {
            super::group::remove_itself(&record, global, &what).await?;
        }
        // The node lets go of it, also if this is interrupted and goes on later.
        let group = Some(GroupRecord { is_leaving: true, ..group.clone() });
        let leaving = PoolRecord { group, ..record.clone() };
        records::replace(&node, &args.name, &leaving, &what)?;
        super::tell_node(&record, global).await;
    }
    let left = leave_files(&record, &what).await;
    if left.is_err() && record.group.is_some() && !is_half_left(&record) {
        let group = record.group.clone().map(|group| GroupRecord { is_leaving: false, ..group });
        records::replace(&node, &args.name, &PoolRecord { group, ..record.clone() }, &what)?;
        super::tell_node(&record, global).await;
    }
    let files = left?;
    records::remove(&global.dir()?, &args.name, &what)?;
    if !global.quiet {
        let files = units::counted(files, "file or directory", "files and directories");
        note!("{} is a plain directory now: {files}", record.dir.display());
    }
    Ok(())
}

/// Whether leaving was interrupted when it could not be undone any more.
fn is_half_left(record: &PoolRecord) -> bool {
    record.dir.join(".atoll/slots").exists()
}

/// Makes one plain tree; how many files and directories it has.
async fn leave_files(record: &PoolRecord, what: &str) -> Result<u64, Failure> {
    let report = match is_half_left(record) {
        // An interrupted one has begun to remove what was the pool's, perhaps its stamp.
        true => {
            let left = atoll_pool::leave(env(), disk(&record.dir, what)?).await;
            left.map_err(|error| failure(&error, what))?
        }
        false => when_free(record, what, async |disk| atoll_pool::leave(env(), disk).await).await?,
    };
    if !report.names_taken.is_empty() {
        let names = report.names_taken.join(", ");
        return Err(Failure::new(Exit::Failed, what)
            .because(format!(
                "these names of the pool's root are taken in {}: {names}",
                record.dir.display()
            ))
            .advice("Rename `.atoll` in the pool, others there, and run it again."));
    }
    Ok(report.files)
}

/// Removes the record.
pub(super) async fn forget(args: &ForgetArgs, global: &Global) -> Result<(), Failure> {
    let what = format!("cannot forget pool {}", args.name);
    let record = known(&args.name, global, &what)?;
    records::remove(&global.dir()?, &args.name, &what)?;
    super::tell_node(&record, global).await;
    if !global.quiet {
        note!("{} stays as it is", record.dir.display());
    }
    Ok(())
}
