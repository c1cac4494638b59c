//! Pools of several machines: `atoll pool create --members`, `invite`, `join`. The node brings the members together and serves
//! them (`atoll_upkeep::pools`); commands write records, and have it look at them.

use std::path::PathBuf;
use std::time::Duration;

use atoll_node::Client;
use atoll_pool::PoolMembers;
use atoll_upkeep::pools::{self, PoolInvitation, PoolMemberState, PoolOfNode};

use super::create::{canonical, make_directory};
use super::known;
use super::records::{self, GroupRecord, PeerRecord, PoolRecord};
use crate::connection;
use crate::failure::{Exit, Failure};
use crate::global::Global;
use crate::messages::note;
use crate::output::{Output, hex, safe_message};
use crate::tfs::random_bytes;
use crate::units;

/// How long a command waits for the node to have looked at a record.
const LOOK_LIMIT: Duration = Duration::from_secs(5);

/// Arguments of `atoll pool invite`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll pool invite home
  atoll pool invite home | ssh other atoll pool join - home /srv/home

Any node of the network can join with the code while members are missing.")]
pub(super) struct InviteArgs {
    /// The pool's name on this node
    name: String,
}

/// Arguments of `atoll pool join`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll pool join atoll-pool:aaaa... home /srv/home
  atoll pool join - home /srv/home < code

The nodes of all members belong to one network (`atoll join`). The pool can be used when all its members have joined;
`atoll pool status` tells.")]
pub(super) struct JoinArgs {
    /// The code that `atoll pool invite` prints on the machine that made the pool; - reads it from standard input
    #[arg(value_name = "CODE")]
    code: String,

    /// The pool's name on this node
    name: String,

    /// The directory that holds this member's copy of the files: an empty one, or a new one
    #[arg(value_name = "FILES")]
    files: PathBuf,
}

/// Makes a pool that waits for its other members.
pub(super) async fn found(
    (name, files): (&str, &PathBuf),
    (members, level): (usize, u8),
    global: &Global,
) -> Result<(), Failure> {
    let what = format!("cannot make pool {name}");
    if !(2..=PoolMembers::MAX).contains(&members) {
        let why = format!("a pool has between 2 and {} members", PoolMembers::MAX);
        return Err(Failure::new(Exit::Usage, what).because(why));
    }
    let client = connection::impatient(global).await?;
    let invitation = PoolInvitation {
        pool: random_bytes()?,
        token: random_bytes()?,
        level,
        members,
        founder: pools::own_peer(&client).await.map_err(connection::failure)?,
    };
    let stands = take_part((name, files), &invitation, (&client, global), &what).await?;
    Output::new().line(invitation.to_string())?;
    if !global.quiet {
        note!("{stands}; on each of the other machines run: atoll pool join CODE {name} FILES");
    }
    Ok(())
}

/// Prints the code again.
pub(super) fn invite(args: &InviteArgs, global: &Global) -> Result<(), Failure> {
    let what = format!("cannot invite to pool {}", args.name);
    let record = known(&args.name, global, &what)?;
    let group = record.group.as_ref().ok_or_else(|| {
        Failure::new(Exit::Usage, &*what)
            .because("it is a pool of one machine")
            .advice("`atoll pool create NAME FILES --members 3` makes one of three.")
    })?;
    if group.is_made {
        let why = "it has all its members already, and they do not change yet";
        return Err(Failure::new(Exit::Failed, what).because(why));
    }
    let code = invitation(&record, &what)?;
    Output::new().line(code)
}

fn invitation(record: &PoolRecord, what: &str) -> Result<String, Failure> {
    let parts = || {
        let group = record.group.as_ref()?;
        Some(PoolInvitation {
            pool: record.pool_id()?,
            token: group.token()?,
            level: group.level,
            members: group.members,
            founder: group.founder.peer()?,
        })
    };
    let invitation =
        parts().ok_or_else(|| Failure::new(Exit::Failed, what).because("its record is damaged"))?;
    Ok(invitation.to_string())
}

/// Joins a pool.
pub(super) async fn join(args: &JoinArgs, global: &Global) -> Result<(), Failure> {
    let what = format!("cannot join pool {}", args.name);
    let code = match args.code.as_str() {
        "-" => {
            std::io::read_to_string(std::io::stdin()).map_err(|error| Failure::io(&what, &error))?
        }
        code => code.to_owned(),
    };
    let invitation: PoolInvitation = code
        .parse()
        .map_err(|error| Failure::new(Exit::Usage, &*what).because(format!("the code: {error}")))?;
    let client = connection::impatient(global).await?;
    let place = (args.name.as_str(), &args.files);
    let stands = take_part(place, &invitation, (&client, global), &what).await?;
    if !global.quiet {
        note!("{stands}");
    }
    Ok(())
}

/// Makes this node a member of a pool, whose files get a directory; how the pool stands then, in words.
async fn take_part(
    (name, files): (&str, &PathBuf),
    invitation: &PoolInvitation,
    (client, global): (&Client, &Global),
    what: &str,
) -> Result<String, Failure> {
    let node = global.dir()?;
    records::check_free(&node, name, what)?;
    let pool = hex(&invitation.pool);
    records::check_other(&node, (name, &pool), what)?;
    records::make_place(&node, what)?;
    let is_new = make_directory(files, what)?;
    let group = GroupRecord {
        members: invitation.members,
        level: invitation.level,
        token: hex(&invitation.token),
        founder: PeerRecord::of(invitation.founder),
        joined: Vec::new(),
        is_made: false,
        is_leaving: false,
    };
    let record = PoolRecord { dir: canonical(files, what)?, pool, group: Some(group) };
    let usable = check_usable(&record, invitation.level, what).await;
    if usable.is_err() && is_new {
        let _ = std::fs::remove_dir(files);
    }
    usable?;
    records::add(&node, name, &record, what)?;
    stands_after_look(client, name).await
}

/// That a directory can become a member's: before the others wait for it.
async fn check_usable(record: &PoolRecord, level: u8, what: &str) -> Result<(), Failure> {
    let disk = super::disk(&record.dir, what)?;
    atoll_pool::check_usable(&disk, level)
        .await
        .map_err(|error| super::create::create_failure(&error, &record.dir, what))
}

/// Has the node look at a new record; how the pool stands then, in words.
async fn stands_after_look(client: &Client, name: &str) -> Result<String, Failure> {
    pools::look(client).await.map_err(connection::failure)?;
    let deadline = tokio::time::Instant::now() + LOOK_LIMIT;
    loop {
        let all = pools::status(client).await.map_err(connection::failure)?;
        match all.into_iter().find(|pool| pool.name == name) {
            Some(PoolOfNode { problem: None, members, .. }) => {
                return Ok(format!("pool {name} has its {members} members"));
            }
            Some(PoolOfNode { problem: Some(problem), .. })
                if tokio::time::Instant::now() > deadline || problem.contains("have joined") =>
            {
                return Ok(format!("pool {name}: {problem}"));
            }
            _ if tokio::time::Instant::now() > deadline => {
                return Ok(format!("pool {name}: the node has not looked at it yet"));
            }
            _ => tokio::time::sleep(LOOK_LIMIT / 50).await,
        }
    }
}

/// How a pool of several stands, for people.
pub(super) fn describe(pool: &PoolOfNode) -> Vec<String> {
    let role = match (&pool.primary, pool.is_primary) {
        (_, true) => format!("; epoch {}, this node is the primary", pool.epoch),
        (Some(primary), false) => format!("; epoch {}, the primary is {primary}", pool.epoch),
        (None, false) => String::new(),
    };
    let mut lines = vec![format!("    {} machines, a copy on each{role}", pool.members)];
    if let Some(problem) = &pool.problem {
        lines.push(format!("    not served: {}", safe_message(problem)));
    }
    for state in &pool.states {
        let PoolMemberState { node, applied, .. } = state;
        let standing = safe_message(&state.standing());
        let mut line = format!("    {node} {standing}; change {applied}");
        if let Some(free) = state.free_bytes {
            line.push_str(&format!(", {} free", units::size(free)));
        }
        if state.is_member && state.files_to_mend > 0 {
            let files = units::counted(state.files_to_mend as u64, "file", "files");
            line.push_str(&format!(", gets parts of {files} again"));
        }
        lines.push(line);
    }
    lines.extend(pool.needed_member().map(|why| format!("    warning: {why}")));
    lines
}
