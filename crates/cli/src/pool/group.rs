//! Pools of several machines: `atoll pool invite`, `join`, `drain`, `remove`, `copies`, `level`. The node has the members, and serves the pool
//! (`atoll_upkeep::pools`); commands write records, have it look at them, and ask it for changes.

use std::path::{Path, PathBuf};
use std::time::Duration;

use atoll_key::PeerId;
use atoll_node::Client;
use atoll_pool::{MAX_COPIES, PoolId, USUAL_COPIES, epoch_parts};
use atoll_upkeep::pools::{
    self, Peer, PoolDrain, PoolGroupState, PoolInvitation, PoolMachineState, PoolMemberState,
    PoolOfNode, PoolRule, PoolWitnessState,
};

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
/// When a command that waits for other machines says what else can be done.
const GOING_HINT: Duration = Duration::from_secs(15);
/// How often a command that waits for other machines looks.
const GOING_PAUSE: Duration = Duration::from_millis(500);

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
  atoll pool join atoll-pool:aaaa... home

The nodes of all machines belong to one network (`atoll join`). The pool can be used at once. As long as it has fewer machines than copies of
files, this one is given a copy of everything meanwhile; later it brings room for new directories. `atoll pool status` tells how far that is.

Without FILES this machine gets no files: it can mount and serve the pool, and where the others are two or four it is a witness, which votes on who is
the primary. Two machines stop when one of them dies; with a witness they do not. A small machine will do. Its votes lie in the node's own directory.")]
pub(super) struct JoinArgs {
    /// The code that `atoll pool invite` prints on a member; - reads it from standard input
    #[arg(value_name = "CODE")]
    code: String,

    /// The pool's name on this node
    name: String,

    /// The directory that holds this machine's copy of the files: an empty one, or a new one. Without it this machine gets no files
    #[arg(value_name = "FILES")]
    files: Option<PathBuf>,
}

/// Arguments of `atoll pool remove`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll pool remove home 3f9c21d0a4b7
  atoll pool remove home 10.0.0.7:4711

For a machine that does not come back, or whose disk is lost: the others stop waiting for it, and other machines are given copies of what it
had. The only machine that has something cannot be removed. One that works is drained (`atoll pool drain`), or leaves (`atoll pool leave`): so
nothing lacks a copy meanwhile.")]
pub(super) struct RemoveMemberArgs {
    /// The pool's name on this node
    name: String,

    /// The machine: its node's key as `atoll pool status` shows it, or its address
    #[arg(value_name = "MACHINE")]
    machine: String,
}

/// Arguments of `atoll pool drain`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll pool drain home
  atoll pool drain home 3f9c21d0a4b7
  atoll pool drain home --stop

Other machines are given copies of what this one has, and then take its place, while the pool is used; `atoll pool status` tells how far that
is. The command does not wait for it. Where no other machine is left, files have fewer copies.")]
pub(super) struct DrainArgs {
    /// The pool's name on this node
    name: String,

    /// The machine: its node's key as `atoll pool status` shows it, or its address; this one if it is not given
    #[arg(value_name = "MACHINE")]
    machine: Option<String>,

    /// Have it stay, if it has not gone yet
    #[arg(long)]
    stop: bool,
}

/// Arguments of `atoll pool copies`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll pool copies home 2
  atoll pool copies home --min-copies 2

Machines are given copies, or let go of them, while the pool is used. --min-copies says how many machines must have everything so that changes are
taken. While fewer do, files can be read, and changes fail with \"Read-only file system\"; what was under way when a machine died is done all the same.")]
pub(super) struct CopiesArgs {
    /// The pool's name on this node
    name: String,

    /// On how many machines each file is to be, 1 to 5
    #[arg(value_name = "N", value_parser = clap::value_parser!(u8).range(1..=MAX_COPIES as i64), required_unless_present = "min_copies")]
    copies: Option<u8>,

    /// How many machines must have everything so that changes are taken, 1 to the number of copies
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=MAX_COPIES as i64))]
    min_copies: Option<u8>,
}

/// Arguments of `atoll pool level`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll pool level home 2

Only directories that are made from now on obey it: those that are there stay where they are, and so does what is made below a directory that
lies with its parent and is deeper than the level. With level 1 each directory in the pool's root goes somewhere else, with 2 also those in these.")]
pub(super) struct LevelArgs {
    /// The pool's name on this node
    name: String,

    /// Down to which depth new directories are distributed, 0 to 16
    #[arg(value_name = "LEVEL", value_parser = clap::value_parser!(u8).range(0..=16))]
    level: u8,
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
        let copies = record.copies.filter(|copies| (1..=MAX_COPIES).contains(copies));
        let copies = copies.unwrap_or(USUAL_COPIES);
        let least = record.min_copies.unwrap_or(1).clamp(1, copies);
        atoll_pool::share(super::env(), disk, own, (copies, least)).await.map(|()| level)
    });
    let level = level.await?;
    let token = hex(&random_bytes::<16>()?);
    let group = GroupRecord {
        level,
        token,
        joins: None,
        is_leaving: false,
        is_without_files: false,
        is_set_down: false,
    };
    let shared = PoolRecord { group: Some(group.clone()), ..record.clone() };
    records::replace(&global.dir()?, name, &shared, what)?;
    Ok(group)
}

/// A pool of several, and the node that serves it.
struct PoolOnNode {
    client: Client,
    pool: PoolId,
}

/// The node of a pool of several.
async fn pool_on_node(name: &str, global: &Global, what: &str) -> Result<PoolOnNode, Failure> {
    let record = known(name, global, what)?;
    if record.group.is_none() {
        return Err(Failure::new(Exit::Usage, what).because("it is a pool of one machine"));
    }
    let pool = record.pool_id();
    let pool =
        pool.ok_or_else(|| Failure::new(Exit::Failed, what).because("its record is damaged"))?;
    Ok(PoolOnNode { client: connection::impatient(global).await?, pool })
}

/// The machines of a pool, as the node knows them.
async fn machines_of(
    client: &Client,
    name: &str,
    what: &str,
) -> Result<Vec<PoolMachineState>, Failure> {
    let all = pools::status(client).await.map_err(connection::failure)?;
    let stands = all.into_iter().find(|pool| pool.name == name);
    let unknown = || Failure::new(Exit::Unavailable, what);
    let stands = stands.ok_or_else(|| unknown().because("the node does not serve it yet"))?;
    match (stands.machines.is_empty(), stands.problem) {
        (true, Some(problem)) => Err(unknown().because(problem)),
        _ => Ok(stands.machines),
    }
}

/// The machines of a pool that have no files of it, as the node knows them.
async fn witnesses_of(client: &Client, name: &str) -> Result<Vec<PoolWitnessState>, Failure> {
    let all = pools::status(client).await.map_err(connection::failure)?;
    let stands = all.into_iter().find(|pool| pool.name == name);
    Ok(stands.map_or_else(Vec::new, |pool| pool.witnesses))
}

/// Whether a text names a machine with this key, which status calls `node`.
fn is_called(text: &str, key: &str, node: &str) -> bool {
    text.len() >= 6 && key.starts_with(text)
        || node == text
        || node.split_once('@').is_some_and(|(_, at)| at == text)
}

/// The machine that is meant.
fn meant(
    machines: &[PoolMachineState],
    text: &str,
    what: &str,
) -> Result<(PeerId, PoolMachineState), Failure> {
    let is_meant = |machine: &&PoolMachineState| is_called(text, &machine.key, &machine.node);
    let found: Vec<_> = machines.iter().filter(is_meant).collect();
    let [machine] = found[..] else {
        let why = match found.len() {
            0 => format!("it has no machine {}", safe_message(text)),
            _ => format!("{} may be several of its machines", safe_message(text)),
        };
        return Err(Failure::new(Exit::NotFound, what)
            .because(why)
            .advice("`atoll pool status` lists them."));
    };
    let unreadable = || Failure::new(Exit::Failed, what).because("the node's answer has no key");
    Ok((machine.peer_id().ok_or_else(unreadable)?, machine.clone()))
}

/// Has a machine belong to the pool no more.
pub(super) async fn remove(args: &RemoveMemberArgs, global: &Global) -> Result<(), Failure> {
    let what = format!("cannot remove a machine of pool {}", args.name);
    let PoolOnNode { client, pool } = pool_on_node(&args.name, global, &what).await?;
    let machines = machines_of(&client, &args.name, &what).await?;
    let without_files = witnesses_of(&client, &args.name).await?;
    let one = without_files.into_iter().find(|one| is_called(&args.machine, &one.key, &one.node));
    let (key, node) = match one.and_then(|one| Some((one.peer_id()?, one.node))) {
        Some(found) => found,
        None => {
            let (key, machine) = meant(&machines, &args.machine, &what)?;
            (key, machine.node)
        }
    };
    pools::remove(&client, &pool, key).await.map_err(connection::failure)?;
    if !global.quiet {
        note!("{node} belongs to pool {} no more", args.name);
    }
    Ok(())
}

/// Has a machine go when others have what it has.
pub(super) async fn drain(args: &DrainArgs, global: &Global) -> Result<(), Failure> {
    let what = format!("cannot drain a machine of pool {}", args.name);
    let PoolOnNode { client, pool } = pool_on_node(&args.name, global, &what).await?;
    let machines = machines_of(&client, &args.name, &what).await?;
    let (key, machine) = match (&args.machine, machines.iter().find(|machine| machine.is_here)) {
        (Some(text), _) => meant(&machines, text, &what)?,
        (None, Some(own)) => meant(&machines, &own.key, &what)?,
        (None, None) => {
            let why = "this machine belongs to it no more";
            return Err(Failure::new(Exit::NotFound, what).because(why));
        }
    };
    pools::let_go(&client, &pool, key, !args.stop).await.map_err(connection::failure)?;
    if !global.quiet {
        match args.stop {
            true => note!("{} stays in pool {}", machine.node, args.name),
            false => note!(
                "{} goes from pool {} when other machines have what it has; `atoll pool status` tells how far that is",
                machine.node,
                args.name
            ),
        }
    }
    Ok(())
}

/// Says how many copies files have.
pub(super) async fn copies(args: &CopiesArgs, global: &Global) -> Result<(), Failure> {
    let what = format!("cannot change the copies of pool {}", args.name);
    let PoolOnNode { client, pool } = pool_on_node(&args.name, global, &what).await?;
    let mut rules = Vec::new();
    rules.extend(args.copies.map(|copies| (PoolRule::Copies, copies)));
    rules.extend(args.min_copies.map(|least| (PoolRule::MinCopies, least)));
    let all = pools::status(&client).await.map_err(connection::failure)?;
    let now = all.into_iter().find(|pool| pool.name == args.name).map_or(0, |pool| pool.min_copies);
    if args.copies.is_some_and(|copies| usize::from(copies) < now) {
        // Files never are to have fewer copies than changes need.
        rules.reverse();
    }
    for rule in rules {
        pools::set_rule(&client, &pool, rule).await.map_err(connection::failure)?;
    }
    if !global.quiet {
        if let Some(copies) = args.copies {
            let machines = units::counted(copies.into(), "machine", "machines");
            note!("each file of pool {} is to be on {machines}", args.name);
        }
        if let Some(least) = args.min_copies {
            let machines = units::counted(least.into(), "machine has", "machines have");
            note!("pool {} takes changes while at least {machines} everything", args.name);
        }
    }
    Ok(())
}

/// Says down to which level new directories are distributed.
pub(super) async fn level(args: &LevelArgs, global: &Global) -> Result<(), Failure> {
    let what = format!("cannot change the level of pool {}", args.name);
    let PoolOnNode { client, pool } = pool_on_node(&args.name, global, &what).await?;
    let rule = (PoolRule::Level, args.level);
    pools::set_rule(&client, &pool, rule).await.map_err(connection::failure)?;
    if !global.quiet {
        note!(
            "directories that are made in pool {} from now on are distributed down to level {}; those that are there stay where they are",
            args.name,
            args.level
        );
    }
    Ok(())
}

/// Has other machines take this one's place in a pool, and waits for that, unless it is the only one; `at_once` does not wait.
pub(super) async fn take_itself_out(
    (name, at_once): (&str, bool),
    global: &Global,
    what: &str,
) -> Result<(), Failure> {
    let advice = "`atoll pool status` tells how it stands; --alone leaves all the same, and on another machine `atoll pool remove` says so.";
    let gone = async {
        let PoolOnNode { client, pool } = pool_on_node(name, global, what).await?;
        let own = pools::own_peer(&client).await.map_err(connection::failure)?.id;
        let all = pools::status(&client).await.map_err(connection::failure)?;
        let stands = all.into_iter().find(|pool| pool.name == name);
        if stands.as_ref().is_some_and(is_gone) {
            return Ok(());
        }
        if stands.is_some_and(|pool| pool.witnesses.iter().any(|one| one.is_here)) {
            return pools::remove(&client, &pool, own).await.map_err(connection::failure);
        }
        if is_alone(&machines_of(&client, name, what).await?) {
            return Ok(());
        }
        if at_once {
            return pools::remove(&client, &pool, own).await.map_err(connection::failure);
        }
        pools::let_go(&client, &pool, own, true).await.map_err(connection::failure)?;
        wait_until_gone(&client, name, global).await
    };
    gone.await.map_err(|failure: Failure| {
        Failure::new(Exit::Failed, what).because(failure.reason()).advice(advice)
    })
}

/// Whether this machine belongs to a pool no more.
fn is_gone(pool: &PoolOfNode) -> bool {
    let is_here = pool.machines.iter().any(|machine| machine.is_here)
        || pool.witnesses.iter().any(|one| one.is_here);
    !pool.machines.is_empty() && (pool.is_removed || !is_here)
}

/// Whether this machine is the only one of a pool. A node that does not know the machines does not know that.
fn is_alone(machines: &[PoolMachineState]) -> bool {
    !machines.is_empty() && machines.iter().all(|machine| machine.is_here)
}

/// Waits until others have what this machine has; says from time to time what it waits for.
async fn wait_until_gone(client: &Client, name: &str, global: &Global) -> Result<(), Failure> {
    let mut said = None;
    let mut hint = Some(tokio::time::Instant::now() + GOING_HINT);
    loop {
        let all = pools::status(client).await.map_err(connection::failure)?;
        let Some(pool) = all.into_iter().find(|pool| pool.name == name) else { return Ok(()) };
        if is_gone(&pool) {
            return Ok(());
        }
        let left = pool.machines.iter().find(|machine| machine.is_here).map(|own| own.groups);
        let copied = pool.groups.iter().flat_map(|group| &group.states);
        let copied = copied.filter(|state| !state.takes_part());
        let mut waits: Vec<String> =
            copied.map(|state| format!("{} {}", state.node, state.standing())).collect();
        waits.sort_unstable();
        waits.dedup();
        let groups = units::counted(left.unwrap_or(0) as u64, "group", "groups");
        let line =
            format!("others take the place of this machine in {groups}; {}", waits.join("; "));
        if !global.quiet && said.as_ref() != Some(&line) {
            note!("{}", line.trim_end_matches("; "));
            said = Some(line);
        }
        if hint.is_some_and(|due| tokio::time::Instant::now() > due) && !global.quiet {
            hint = None;
            note!(
                "it goes on in the background if this is interrupted; `atoll pool drain {name} --stop` ends that, and --now leaves though files lack copies then"
            );
        }
        tokio::time::sleep(GOING_PAUSE).await;
    }
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
    let place = (args.name.as_str(), args.files.as_deref());
    let stands = take_part(place, &invitation, (&client, global), &what).await?;
    if !global.quiet {
        note!("{stands}");
    }
    Ok(())
}

/// Makes this node a member of a pool, whose files get a directory, or without one lets it belong to the pool; how that stands then, in words.
async fn take_part(
    (name, files): (&str, Option<&Path>),
    invitation: &PoolInvitation,
    (client, global): (&Client, &Global),
    what: &str,
) -> Result<String, Failure> {
    let node = global.dir()?;
    records::check_free(&node, name, what)?;
    let pool = hex(&invitation.pool);
    records::check_other(&node, (name, &pool), what)?;
    records::make_place(&node, what)?;
    let dir = match files {
        Some(files) => {
            let is_new = make_directory(files, what)?;
            let usable = usable_directory(files, invitation.level, what).await;
            if usable.is_err() && is_new {
                let _ = std::fs::remove_dir(files);
            }
            usable?
        }
        None => pools::votes_path(&node, name),
    };
    let joins =
        JoiningRecord { member: PeerRecord::of(invitation.member), token: hex(&invitation.token) };
    let (level, token) = (invitation.level, hex(&random_bytes::<16>()?));
    let group = GroupRecord {
        level,
        token,
        joins: Some(joins),
        is_leaving: false,
        is_without_files: files.is_none(),
        is_set_down: false,
    };
    let record = PoolRecord { dir, pool, copies: None, min_copies: None, group: Some(group) };
    records::add(&node, name, &record, what)?;
    stands_after_look(client, name).await
}

/// A directory that can become a member's: before the others wait for it.
async fn usable_directory(files: &Path, level: u8, what: &str) -> Result<PathBuf, Failure> {
    let dir = canonical(files, what)?;
    let disk = super::disk(&dir, what)?;
    let usable = atoll_pool::check_usable(&disk, level).await;
    usable.map_err(|error| super::create::create_failure(&error, &dir, what))?;
    Ok(dir)
}

/// Has the node look at a new record; how the pool stands then, in words.
async fn stands_after_look(client: &Client, name: &str) -> Result<String, Failure> {
    pools::look(client).await.map_err(connection::failure)?;
    let deadline = tokio::time::Instant::now() + LOOK_LIMIT;
    loop {
        let all = pools::status(client).await.map_err(connection::failure)?;
        match all.into_iter().find(|pool| pool.name == name) {
            Some(PoolOfNode { problem: None, machines, witnesses, .. }) => {
                let machines = units::counted(machines.len() as u64, "machine", "machines");
                let here = match witnesses.iter().any(|one| one.is_here) {
                    true => " with files, and this one without",
                    false => "",
                };
                return Ok(format!("pool {name} has {machines}{here}"));
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
    let machines = units::counted(pool.machines.len() as u64, "machine", "machines");
    let mut lines = Vec::new();
    if let Some(problem) = &pool.problem {
        lines.push(format!("    not served: {}", safe_message(problem)));
    }
    match &pool.groups[..] {
        [only] => {
            let copies = match only.members == pool.machines.len() {
                true => format!("{machines}, a copy on each"),
                false => format!("{machines}, a copy on {}", only.members),
            };
            lines.push(format!("    {copies}{}", role(only)));
            lines.extend(describe_members(only, &pool.witnesses, "    "));
        }
        groups => {
            let all = units::counted(groups.len() as u64, "group", "groups");
            if !groups.is_empty() {
                lines
                    .push(format!("    {machines} in {all}, each file on {} of them", pool.copies));
            }
            for group in groups {
                let members = units::counted(group.members as u64, "member", "members");
                let state = match (group.is_here, group.is_open) {
                    (_, false) => "; holds nothing before it has its copies",
                    (false, true) => "; none here",
                    (true, true) => "",
                };
                lines.push(format!("    group {}: {members}{state}{}", group.group, role(group)));
                lines.extend(describe_members(group, &pool.witnesses, "        "));
            }
        }
    }
    if pool.min_copies > 1 {
        lines.push(format!(
            "    changes need {} machines that have everything; with fewer, files can only be read",
            pool.min_copies
        ));
    }
    let refusing = pool.groups.iter().filter_map(|group| pool.refuses_changes(group));
    lines.extend(refusing.map(|why| format!("    warning: {why}")));
    for witness in &pool.witnesses {
        let here = if witness.is_here { " (this machine)" } else { "" };
        lines.push(format!("    {}{here} {}", witness.node, safe_message(&witness.standing())));
    }
    for machine in pool.machines.iter().filter(|machine| machine.is_to_go) {
        let here = if machine.is_here { " (this machine)" } else { "" };
        let groups = units::counted(machine.groups as u64, "group", "groups");
        let left = machine.drain.as_ref().map(drain_words).unwrap_or_default();
        lines.push(format!(
            "    {}{here} goes when others have what it has: {groups} left{left}",
            machine.node
        ));
    }
    lines
}

/// Describes the rest of a drain, bytes and time, as the end of a line of `status`.
fn drain_words(drain: &PoolDrain) -> String {
    let mut words = String::new();
    if let Some(bytes) = drain.bytes_left.filter(|_| drain.groups_known > 0) {
        words.push_str(&format!(", {} to be copied", units::size(bytes)));
    } else if drain.groups_known > 0 {
        words.push_str(", how much is to be copied is not known yet");
    }
    match drain.seconds_left {
        Some(seconds) if seconds >= 120 => {
            words.push_str(&format!(", about {} minutes", seconds / 60));
        }
        Some(seconds) => words.push_str(&format!(", about {seconds} seconds")),
        None => {}
    }
    let unknown = drain.groups_left - drain.groups_known;
    if unknown > 0 {
        let groups = units::counted(unknown as u64, "group", "groups");
        words.push_str(&format!(" (the primaries of {groups} know the rest)"));
    }
    words
}

/// Epoch and primary of a group, as the end of its line in the status.
fn role(group: &PoolGroupState) -> String {
    match (&group.primary, group.is_primary) {
        (_, true) => format!("; {}, this node is the primary", epoch_words(group.epoch)),
        (Some(primary), false) => {
            format!("; {}, the primary is {primary}", epoch_words(group.epoch))
        }
        (None, false) => String::new(),
    }
}

fn describe_members(
    group: &PoolGroupState,
    witnesses: &[PoolWitnessState],
    indent: &str,
) -> Vec<String> {
    let mut lines = Vec::new();
    lines.extend(
        group.problem.iter().map(|why| format!("{indent}not served: {}", safe_message(why))),
    );
    for state in &group.states {
        let PoolMemberState { node, applied, .. } = state;
        let standing = safe_message(&state.standing());
        let mut line = format!("{indent}{node} {standing}; change {applied}");
        if let Some(left) = state.copying.as_ref().and_then(|copying| copying.bytes_left()) {
            line.push_str(&format!(", {} to be copied", units::size(left)));
        }
        if let Some(free) = state.free_bytes {
            line.push_str(&format!(", {} free", units::size(free)));
        }
        if state.is_member && state.files_to_mend > 0 {
            let files = units::counted(state.files_to_mend as u64, "file", "files");
            line.push_str(&format!(", gets parts of {files} again"));
        }
        lines.push(line);
    }
    if group.locks > 0 {
        let locks = units::counted(group.locks as u64, "lock", "locks");
        let mounts = units::counted(group.lock_sessions as u64, "mount", "mounts");
        lines.push(format!("{indent}{locks} on files, of {mounts}"));
    }
    let warnings = group.needed_member(witnesses).into_iter().chain(group.unhealed_copies());
    lines.extend(warnings.map(|why| format!("{indent}warning: {why}")));
    lines
}

/// An epoch, and which copy of a group that was lost it is of.
pub(super) fn epoch_words(epoch: u64) -> String {
    match epoch_parts(epoch) {
        (count, None) => format!("epoch {count}"),
        (count, Some(secs)) => {
            format!("epoch {count} since one copy was revived on {}", units::unix_date(secs))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drain_says_how_long_it_takes_and_what_others_know() {
        let drain = |groups_known, bytes_left, seconds_left| {
            drain_words(&PoolDrain { groups_left: 2, groups_known, bytes_left, seconds_left })
        };
        assert_eq!(drain(2, Some(3 << 30), Some(200)), ", 3.0 GiB to be copied, about 3 minutes");
        assert_eq!(drain(2, None, None), ", how much is to be copied is not known yet");
        let half = drain(1, Some(0), None);
        assert_eq!(half, ", 0 B to be copied (the primaries of 1 group know the rest)");
        assert_eq!(drain(0, Some(0), None), " (the primaries of 2 groups know the rest)");
    }

    #[test]
    fn a_machine_is_alone_only_if_its_node_knows_the_pool() {
        let machine = |is_here| PoolMachineState {
            node: "node".into(),
            key: "key".into(),
            is_here,
            groups: 1,
            is_to_go: false,
            drain: None,
        };
        assert!(!is_alone(&[]), "others may count on what it has");
        assert!(is_alone(&[machine(true)]));
        assert!(!is_alone(&[machine(true), machine(false)]));
    }
}
