//! `atoll pool revive`: make this machine's copy what a group of a pool has, when the other copies are lost.

use std::path::{Path, PathBuf};
use std::time::Duration;

use atoll_pool::{CopyStand, GroupNumber, OpenError, ReviveError, ask_scrub, copy_stand, revive};
use atoll_upkeep::pools::{self, NodeRoute};
use serde::Serialize;

use super::group::epoch_words;
use super::records::{GroupRecord, PoolRecord};
use super::{env, failure, known, records, tell_node, when_free};
use crate::connection;
use crate::failure::{Exit, Failure};
use crate::global::Global;
use crate::messages::note;
use crate::output::Output;
use crate::terminal;

/// How long a group's primary may take to answer.
const WORKS_WITHIN: Duration = Duration::from_secs(5);
/// A group without a primary for so long is not just between two of them.
const STUCK_AFTER: Duration = Duration::from_secs(30);
/// The same when people have been asked meanwhile.
const LOOK_AGAIN: Duration = Duration::from_secs(8);
const ASK_EVERY: Duration = Duration::from_millis(500);

/// Arguments of `atoll pool revive`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll pool revive home --list
  atoll pool revive home
  atoll pool revive home --group 2 --yes

For the day after the fire: a group of machines serves nothing when most of its voters are gone, or all that had every file. If they do not come
back, one copy can be what the group has from now on. Run --list on each machine that is left: the copy with the greatest epoch, and of these
the one with the greatest last change, is the newest. Then run this there. What that copy lacks is lost. Other machines that come back after all are
given what it has; what they had goes to FILES/.atoll/old. If two copies were made the group, the later one counts. `atoll pool remove` says which ones do not come back.")]
pub(super) struct Args {
    /// The pool's name on this node
    name: String,

    /// Only this group
    #[arg(long, value_name = "N")]
    group: Option<u8>,

    /// Only say how this machine's copies stand
    #[arg(long)]
    list: bool,

    /// Also a copy that was being made and lacks bytes of files
    #[arg(long, conflicts_with = "list")]
    incomplete: bool,

    /// Do not ask
    #[arg(long, conflicts_with = "list")]
    yes: bool,

    /// With --list: one JSON object a line
    #[arg(long, requires = "list")]
    json: bool,
}

/// A copy, as JSON.
#[derive(Serialize)]
struct CopyLine {
    group: u8,
    dir: PathBuf,
    epoch: u64,
    last_change: u64,
    is_incomplete: bool,
    members: Vec<String>,
}

/// A group of which this machine has a copy, and that has no primary.
struct StuckGroup {
    number: GroupNumber,
    dir: PathBuf,
    stand: CopyStand,
}

/// Revives.
pub(super) async fn run(args: &Args, global: &Global) -> Result<(), Failure> {
    let what = format!("cannot revive pool {}", args.name);
    let record = known(&args.name, global, &what)?;
    let refused = |why: &str| Failure::new(Exit::Failed, &what).because(why);
    let Some(group) = record.group.clone() else {
        return Err(refused("it is a pool of one machine: nothing is missing"));
    };
    if group.is_leaving || group.joins.is_some() {
        return Err(refused("this machine is joining or leaving it"));
    }
    if group.is_set_down {
        // One that was interrupted has left it so: the node is to serve what it can before anybody asks.
        set_flag(&args.name, false, global, &what).await?;
    }
    let dirs = pools::directories(&record.dir).map_err(|error| Failure::io(&what, &error))?;
    let dirs: Vec<(GroupNumber, PathBuf)> = dirs
        .into_iter()
        .filter(|(number, _)| args.group.is_none_or(|group| group == number.number()))
        .collect();
    if dirs.is_empty() {
        return Err(refused("this machine has no copy of that group"));
    }
    if !global.quiet && !args.json {
        note!("asking for half a minute at most whether the groups have a primary");
    }
    let stuck = without_primary(&record, dirs, STUCK_AFTER, global, &what).await?;
    if stuck.is_empty() {
        if !args.json {
            note!(
                "each group of which this machine has a copy has a primary: nothing is to be done"
            );
        }
        return Ok(());
    }
    let stands = async {
        let mut stands = Vec::new();
        for (number, dir) in &stuck {
            let stand = async |disk| copy_stand(env(), disk).await;
            let stand = copy_at(&record, dir, &what, stand).await?;
            stands.push(StuckGroup { number: *number, dir: dir.clone(), stand });
        }
        Ok(stands)
    };
    let stuck = set_down(&args.name, global, &what, stands).await?;
    show(args, &stuck)?;
    if args.list {
        return Ok(());
    }
    confirm(args, &what)?;
    // Others may have come back meanwhile.
    let dirs = stuck.iter().map(|group| (group.number, group.dir.clone())).collect();
    let still = without_primary(&record, dirs, LOOK_AGAIN, global, &what).await?;
    if still.len() < stuck.len() {
        return Err(refused("one of these groups has a primary by now"));
    }
    let (_, client) = connection::for_mount(global).await?;
    let local = pools::own_peer(&client).await.map_err(connection::failure)?;
    let revived = async {
        for StuckGroup { number, dir, .. } in &stuck {
            let incomplete = args.incomplete;
            let work = async |disk| revive(env(), disk, local, incomplete).await;
            copy_at(&record, dir, &what, work).await?;
            note!("group {number} has what this machine's copy has from now on");
        }
        Ok(())
    };
    set_down(&args.name, global, &what, revived).await
}

/// Works with a pool's directories while the node lets go of them. One that is interrupted leaves them so until it is run again.
async fn set_down<T>(
    name: &str,
    global: &Global,
    what: &str,
    work: impl Future<Output = Result<T, Failure>>,
) -> Result<T, Failure> {
    set_flag(name, true, global, what).await?;
    let done = work.await;
    set_flag(name, false, global, what).await?;
    done
}

async fn set_flag(
    name: &str,
    is_set_down: bool,
    global: &Global,
    what: &str,
) -> Result<(), Failure> {
    // Somebody may have changed it meanwhile.
    let record = known(name, global, what)?;
    let group = record.group.clone().map(|group| GroupRecord { is_set_down, ..group });
    records::replace(&global.dir()?, name, &PoolRecord { group, ..record.clone() }, what)?;
    tell_node(&record, global).await;
    Ok(())
}

/// Returns the groups whose primaries do not answer within `time`.
async fn without_primary(
    record: &PoolRecord,
    dirs: Vec<(GroupNumber, PathBuf)>,
    time: Duration,
    global: &Global,
    what: &str,
) -> Result<Vec<(GroupNumber, PathBuf)>, Failure> {
    let (_, client) = connection::for_mount(global).await?;
    let damaged = || Failure::new(Exit::Failed, what).because("its record is damaged");
    let route = NodeRoute::new(client, record.pool_id().ok_or_else(damaged)?);
    let mut stuck = dirs;
    let until = tokio::time::Instant::now() + time;
    loop {
        let mut still = Vec::new();
        for (number, dir) in stuck {
            if ask_scrub(&route.to(number), false, WORKS_WITHIN).await.is_err() {
                still.push((number, dir));
            }
        }
        stuck = still;
        if stuck.is_empty() || tokio::time::Instant::now() > until {
            return Ok(stuck);
        }
        tokio::time::sleep(ASK_EVERY).await;
    }
}

fn show(args: &Args, stuck: &[StuckGroup]) -> Result<(), Failure> {
    let mut output = Output::new();
    for StuckGroup { dir, stand, .. } in stuck {
        let members = stand.members.peers().iter();
        let members: Vec<String> =
            members.map(|peer| format!("{} at {}", peer.id, peer.addr)).collect();
        let group = stand.group.number();
        let CopyStand { epoch, last_change, is_incomplete, .. } = *stand;
        if args.json {
            let dir = dir.clone();
            output.json(&CopyLine { group, dir, epoch, last_change, is_incomplete, members })?;
            continue;
        }
        output.line(format!("group {group} in {}:", dir.display()))?;
        let lacks = if is_incomplete { "; INCOMPLETE: it was just being made" } else { "" };
        let epoch = epoch_words(epoch);
        output.line(format!("    {epoch}, last change {last_change}{lacks}"))?;
        output.line(format!("    its members were {}", members.join(", ")))?;
    }
    output.flush()
}

fn confirm(args: &Args, what: &str) -> Result<(), Failure> {
    if args.yes {
        return Ok(());
    }
    let question = format!(
        "These groups will have what these copies have, and nothing else, for ever: other machines lose what they have beyond. Type {} to go on",
        args.name
    );
    match terminal::ask(&question, false) {
        Ok(Some(typed)) if typed.trim() == args.name => Ok(()),
        Ok(Some(_)) => Err(Failure::new(Exit::Failed, what).because("that is another name")),
        Ok(None) => Err(Failure::new(Exit::Usage, what)
            .because("there is no terminal to ask on")
            .advice("--yes says that it is meant.")),
        Err(error) => Err(Failure::io(what, &error)),
    }
}

/// Does something with the copy of a group.
async fn copy_at<T>(
    record: &PoolRecord,
    dir: &Path,
    what: &str,
    work: impl AsyncFn(atoll_pool::disk::directory::Directory) -> Result<T, ReviveError>,
) -> Result<T, Failure> {
    let of_group = PoolRecord { dir: dir.to_owned(), ..record.clone() };
    let done = when_free(&of_group, what, async |disk| match work(disk).await {
        Err(ReviveError::Open(OpenError::InUse)) => Err(OpenError::InUse),
        done => Ok(done),
    });
    done.await?.map_err(|error| match error {
        ReviveError::Open(error) => failure(&error, what),
        ReviveError::Incomplete => Failure::new(Exit::Failed, what)
            .because(error)
            .advice("--incomplete takes it all the same: what it lacks reads as zeros."),
        ReviveError::NoFiles | ReviveError::OfOne => {
            Failure::new(Exit::Failed, what).because(error)
        }
    })
}
