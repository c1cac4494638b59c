//! `atoll pool leave`: a pool's directory as one plain tree. `atoll pool forget`: only off this node.

use std::fs;
use std::path::Path;

use atoll_pool::OWN_DIRECTORY;
use atoll_upkeep::pools;

use super::records::{GroupRecord, PoolRecord};
use super::{disk, env, failure, known, records, when_free};
use crate::failure::{Exit, Failure};
use crate::global::Global;
use crate::messages::note;
use crate::output::safe_message;
use crate::terminal;
use crate::units;

/// Arguments of `atoll pool leave`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll pool leave home
  atoll pool leave home --yes

Other machines are given copies of what this one has before it goes. No data moves here: each directory is renamed to where its name
is. Names of files that other machines have are links that lead nowhere; what has its name on other machines is in outside-GROUP. Interrupted, the command goes on when it is run again.
A machine that joined without a directory has nothing to give back: its vote ends.")]
pub(super) struct LeaveArgs {
    /// The pool's name on this node
    name: String,

    /// Do not ask
    #[arg(long)]
    yes: bool,

    /// Leave at once: others are given copies of what this one has afterwards
    #[arg(long, conflicts_with = "alone")]
    now: bool,

    /// Leave though the other machines cannot be told, or lack something that this one has
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
    if let Some(GroupRecord { is_without_files: true, .. }) = &record.group {
        return leave_without_files(args, &record, global, &what).await;
    }
    if !args.yes {
        let others = match record.group {
            None => "",
            Some(_) => " Its other machines go on without this one.",
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
            super::group::take_itself_out((&args.name, args.now), global, &what).await?;
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

/// Ends the part of a machine without files: nothing is to be given back.
async fn leave_without_files(
    args: &LeaveArgs,
    record: &PoolRecord,
    global: &Global,
    what: &str,
) -> Result<(), Failure> {
    if !args.alone {
        super::group::take_itself_out((&args.name, true), global, what).await?;
    }
    records::remove(&global.dir()?, &args.name, what)?;
    super::tell_node(record, global).await;
    if !global.quiet {
        note!("this machine belongs to pool {} no more; it had no files of it", args.name);
    }
    Ok(())
}

/// Whether leaving was interrupted when it could not be undone any more.
fn is_half_left(record: &PoolRecord) -> bool {
    let all = pools::directories(&record.dir).unwrap_or_default();
    all.iter().any(|(_, dir)| is_begun(dir) || !dir.join(OWN_DIRECTORY).exists())
}

/// How many names that lead to other machines' files `leave` prints.
const MAX_NAMED: usize = 20;
/// The directory into which `leave` moves old copies, of groups that this machine left earlier.
const OLD_COPIES: &str = "old-copies";

/// Whether the files of a group are being moved to where their names are.
fn is_begun(dir: &Path) -> bool {
    dir.join(OWN_DIRECTORY).join("slots").exists()
}

/// Makes one plain tree; how many files and directories it has.
async fn leave_files(record: &PoolRecord, what: &str) -> Result<u64, Failure> {
    let io = |error: std::io::Error| Failure::io(what, &error);
    let mut files = 0;
    let all = pools::directories(&record.dir).map_err(io)?;
    for (_, dir) in all.iter().filter(|(_, dir)| *dir != record.dir) {
        files += leave_group(record, dir, what).await?;
        move_up(record, dir, what)?;
    }
    // Before the first group's files: one of them may have that name.
    let (groups, old) = (record.dir.join("groups"), record.dir.join(OLD_COPIES));
    if groups.join("map").exists() {
        if fs::read_dir(&groups).map_err(io)?.count() > 1 {
            if old.symlink_metadata().is_ok() {
                return Err(taken(&record.dir, OLD_COPIES, what));
            }
            fs::rename(&groups, &old).map_err(io)?;
            fs::remove_file(old.join("map")).map_err(io)?;
            note!(
                "{} is what this machine had of groups that it has left: nobody needs it",
                old.display()
            );
        } else {
            fs::remove_dir_all(&groups).map_err(io)?;
        }
    }
    if all.iter().any(|(_, dir)| *dir == record.dir) {
        files += leave_group(record, &record.dir, what).await?;
    }
    Ok(files)
}

/// Makes a plain tree of what this machine has of a group.
async fn leave_group(record: &PoolRecord, dir: &Path, what: &str) -> Result<u64, Failure> {
    if dir != record.dir && !dir.join(OWN_DIRECTORY).exists() {
        // That was done before an interruption.
        return Ok(0);
    }
    let of_group = PoolRecord { dir: dir.to_owned(), ..record.clone() };
    let report = match is_begun(dir) {
        // An interrupted one has begun to remove what was the pool's, perhaps its stamp.
        true => {
            let left = atoll_pool::leave(env(), disk(dir, what)?).await;
            left.map_err(|error| failure(&error, what))?
        }
        false => {
            when_free(&of_group, what, async |disk| atoll_pool::leave(env(), disk).await).await?
        }
    };
    if !report.names_taken.is_empty() {
        let names = report.names_taken.join(", ");
        return Err(taken(dir, &names, what));
    }
    for name in report.names_elsewhere.iter().take(MAX_NAMED) {
        note!("{}: other machines have it", safe_message(name));
    }
    if let Some(more) = report.names_elsewhere.len().checked_sub(MAX_NAMED).filter(|more| *more > 0)
    {
        note!("and {more} more");
    }
    Ok(report.files)
}

/// Moves what is left of a group beside the first one into the pool's directory.
fn move_up(record: &PoolRecord, dir: &Path, what: &str) -> Result<(), Failure> {
    let io = |error: std::io::Error| Failure::io(what, &error);
    for entry in fs::read_dir(dir).map_err(io)? {
        let entry = entry.map_err(io)?;
        let to = record.dir.join(entry.file_name());
        if to.symlink_metadata().is_ok() {
            return Err(taken(&record.dir, &entry.file_name().to_string_lossy(), what));
        }
        fs::rename(entry.path(), to).map_err(io)?;
    }
    fs::remove_dir(dir).map_err(io)
}

fn taken(dir: &Path, names: &str, what: &str) -> Failure {
    Failure::new(Exit::Failed, what)
        .because(format!(
            "these names of the pool's root are taken in {}: {}",
            dir.display(),
            safe_message(names)
        ))
        .advice("Rename `.atoll` in the pool, others there, and run it again.")
}

/// Removes the record.
pub(super) async fn forget(args: &ForgetArgs, global: &Global) -> Result<(), Failure> {
    let what = format!("cannot forget pool {}", args.name);
    let record = known(&args.name, global, &what)?;
    records::remove(&global.dir()?, &args.name, &what)?;
    super::tell_node(&record, global).await;
    if !global.quiet {
        match record.group.is_some_and(|group| group.is_without_files) {
            true => note!(
                "this node forgets it; the other machines are not told: `atoll pool remove` there does that"
            ),
            false => note!("{} stays as it is", record.dir.display()),
        }
    }
    Ok(())
}
