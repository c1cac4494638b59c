//! Pools of several machines: `atoll pool invite`, `join`, `remove`. The node is the member, and serves the pool (`atoll_upkeep::pools`);
//! commands write records, and have it look at them.

use std::path::PathBuf;
use std::time::Duration;

use atoll_node::Client;
use atoll_pool::PoolMembers;
use atoll_upkeep::pools::{self, Peer, PoolInvitation, PoolMemberState, PoolOfNode};

use super::create::{canonical, make_directory};
use super::known;
use super::records::{self, GroupRecord, JoiningRecord, PeerRecord, PoolRecord};
use crate::connection;
use crate::failure::{Exit, Failure};
use crate::global::Global;
use crate::messages::note;
use crate::output::{Output, hex, safe_message};
use crate::tfs::random_bytes;
use crate::units;

/// How long a command waits for the node to have looked at a record, and to have joined.
const LOOK_LIMIT: Duration = Duration::from_secs(12);

/// Arguments of `atoll pool invite`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll pool invite home
  atoll pool invite home | ssh other atoll pool join - home /srv/home

Any node of the network can join with the code, at any time, through this one: keep it secret. A pool of one machine becomes one of
several by this: from then on the node serves it, so nothing may have it mounted now.")]
pub(super) struct InviteArgs {
    /// The pool's name on this node
    name: String,
}

/// Arguments of `atoll pool join`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll pool join atoll-pool:aaaa... home /srv/home
  atoll pool join - home /srv/home < code

The nodes of all members belong to one network (`atoll join`). The pool can be used at once; this machine is given a copy of all its files
meanwhile, as `atoll pool status` tells, and counts when it has them.")]
pub(super) struct JoinArgs {
    /// The code that `atoll pool invite` prints on a member; - reads it from standard input
    #[arg(value_name = "CODE")]
    code: String,

    /// The pool's name on this node
    name: String,

    /// The directory that holds this member's copy of the files: an empty one, or a new one
    #[arg(value_name = "FILES")]
    files: PathBuf,
}

/// Arguments of `atoll pool remove`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll pool remove home 3f9c21d0a4b7
  atoll pool remove home 10.0.0.7:4711

For a machine that does not come back, or whose disk is lost: the others stop waiting for it, and another one votes in its place. The last
member that has everything cannot be removed. A machine that works leaves by itself: `atoll pool leave`.")]
pub(super) struct RemoveMemberArgs {
    /// The pool's name on this node
    name: String,

    /// The member: its node's key as `atoll pool status` shows it, or its address
    #[arg(value_name = "MEMBER")]
    member: String,
}

/// Prints a code; a pool of one becomes one of several.
pub(super) async fn invite(args: &InviteArgs, global: &Global) -> Result<(), Failure> {
    let what = format!("cannot invite to pool {}", args.name);
    let record = known(&args.name, global, &what)?;
    let client = connection::impatient(global).await?;
    let own = pools::own_peer(&client).await.map_err(connection::failure)?;
    let group = match &record.group {
        Some(group) if group.joins.is_some() => {
            return Err(Failure::new(Exit::Failed, what).because("it has not joined that pool yet"));
        }
        Some(group) => group.clone(),
        None => share(&record, (&args.name, own), global, &what).await?,
    };
    let invitation = || {
        let (pool, token) = (record.pool_id()?, group.token()?);
        Some(PoolInvitation { pool, token, level: group.level, member: own })
    };
    let invitation = invitation()
        .ok_or_else(|| Failure::new(Exit::Failed, &*what).because("its record is damaged"))?;
    if record.group.is_none() {
        let stands = stands_after_look(&client, &args.name).await?;
        if !global.quiet {
            note!(
                "{stands}; on each of the other machines run: atoll pool join CODE {} FILES",
                args.name
            );
        }
    }
    Output::new().line(invitation.to_string())
}

/// Makes a pool of one a pool of several, whose only member is this node.
async fn share(
    record: &PoolRecord,
    (name, own): (&str, Peer),
    global: &Global,
    what: &str,
) -> Result<GroupRecord, Failure> {
    let level = super::when_free(record, what, async |disk| {
        let level = atoll_pool::read_settings(&disk).await?.level;
        atoll_pool::share(super::env(), disk, own).await.map(|()| level)
    });
    let level = level.await?;
    let token = hex(&random_bytes::<16>()?);
    let group = GroupRecord { level, token, joins: None, is_leaving: false };
    let shared = PoolRecord { group: Some(group.clone()), ..record.clone() };
    records::replace(&global.dir()?, name, &shared, what)?;
    Ok(group)
}

/// Has a member be none any more.
pub(super) async fn remove(args: &RemoveMemberArgs, global: &Global) -> Result<(), Failure> {
    let what = format!("cannot remove a member of pool {}", args.name);
    let record = known(&args.name, global, &what)?;
    let pool =
        record.group.as_ref().and_then(|_| record.pool_id()).ok_or_else(|| {
            Failure::new(Exit::Usage, &*what).because("it is a pool of one machine")
        })?;
    let client = connection::impatient(global).await?;
    let map = members_of(&record, &what).await?;
    let is_meant = |peer: &&Peer| {
        let key = hex(&peer.id.0);
        args.member.len() >= 6 && key.starts_with(&args.member)
            || peer.addr.to_string() == args.member
    };
    let meant: Vec<&Peer> = map.peers().iter().filter(is_meant).collect();
    let [member] = meant[..] else {
        let why = match meant.len() {
            0 => format!("it has no member {}", safe_message(&args.member)),
            _ => format!("{} may be several of its members", safe_message(&args.member)),
        };
        return Err(Failure::new(Exit::NotFound, what)
            .because(why)
            .advice("`atoll pool status` on the primary lists them."));
    };
    pools::remove(&client, &pool, member.id).await.map_err(connection::failure)?;
    if !global.quiet {
        note!("{member} is no member of pool {} any more", args.name);
    }
    Ok(())
}

/// Takes this node out of a pool, unless it is the only member.
pub(super) async fn remove_itself(
    record: &PoolRecord,
    global: &Global,
    what: &str,
) -> Result<(), Failure> {
    let advice = "`atoll pool status` tells how it stands; --alone leaves all the same, and on another member `atoll pool remove` says so.";
    let pool = record.pool_id();
    let pool =
        pool.ok_or_else(|| Failure::new(Exit::Failed, what).because("its record is damaged"))?;
    let removed = async {
        let client = connection::impatient(global).await?;
        let own = pools::own_peer(&client).await.map_err(connection::failure)?;
        let members = members_of(record, what).await?;
        // The only one, or one that was removed before.
        if members.peers().iter().all(|peer| peer.id == own.id) || !members.contains(own.id) {
            return Ok(());
        }
        pools::remove(&client, &pool, own.id).await.map_err(connection::failure)
    };
    removed.await.map_err(|failure| {
        Failure::new(Exit::Failed, what).because(failure.reason()).advice(advice)
    })
}

/// The pool's members, read from its directory on this machine.
async fn members_of(record: &PoolRecord, what: &str) -> Result<PoolMembers, Failure> {
    let map = atoll_pool::read_map(&super::disk(&record.dir, what)?).await;
    let map = map.map_err(|error| super::failure(&error, what))?;
    map.map(|map| map.enrolled)
        .ok_or_else(|| Failure::new(Exit::Failed, what).because("it is not made yet"))
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
    let joins =
        JoiningRecord { member: PeerRecord::of(invitation.member), token: hex(&invitation.token) };
    let (level, token) = (invitation.level, hex(&random_bytes::<16>()?));
    let group = GroupRecord { level, token, joins: Some(joins), is_leaving: false };
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
                let members = units::counted(members as u64, "member", "members");
                return Ok(format!("pool {name} has {members}"));
            }
            Some(PoolOfNode { problem: Some(problem), .. })
                if tokio::time::Instant::now() > deadline =>
            {
                return Ok(format!("pool {name}: {problem}"));
            }
            _ if tokio::time::Instant::now() > deadline => {
                return Ok(format!("pool {name}: the node has not looked at it yet"));
            }
            _ => tokio::time::sleep(LOOK_LIMIT / 120).await,
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
    let mut lines = vec![format!(
        "    {}, a copy on each{role}",
        units::counted(pool.members as u64, "machine", "machines")
    )];
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
    if pool.locks > 0 {
        let locks = units::counted(pool.locks as u64, "lock", "locks");
        let mounts = units::counted(pool.lock_sessions as u64, "mount", "mounts");
        lines.push(format!("    {locks} on files, of {mounts}"));
    }
    lines.extend(pool.needed_member().map(|why| format!("    warning: {why}")));
    lines
}
