//! `atoll grant` and `atoll revoke`: who may write a shared volume, and read an encrypted one.

use std::sync::Arc;
use std::time::Instant;

use atoll_env::Env;
use atoll_key::{GroupAddress, GroupId, UserAddress, UserId, VolumeAddress};
use atoll_node::shell_word;
use atoll_volume::shared::access::groups::{
    add_member, add_volume_member, begin_epoch, begin_epoch_without_keeper, change_volume,
    remove_member,
};
use atoll_volume::shared::access::keepers::{add_keeper, follow_epochs, remove_volume_member};
use atoll_volume::shared::access::read_access::KEY_AGE;
use atoll_volume::shared::access::readers::{
    add_reader, add_reading_group, remove_reader, remove_reading_group,
};
use atoll_volume::shared::access::rebind::in_present_epoch;
use atoll_volume::shared::access::{GroupRecord, VolumeRecord, read_group};
use atoll_volume::shared::inode::InodeKey;
use serde::Serialize;

use crate::connection;
use crate::failure::{Exit, Failure};
use crate::global::Global;
use crate::messages::note;
use crate::moment::Moment;
use crate::output;
use crate::own_group::{self, OwnGroup, path_group};
use crate::shared_volume::{self, Grantee, Owned, inodes};
use crate::units;
use crate::user;

/// Arguments of `atoll grant`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll grant work alice=atolluser:KEY
  atoll grant work atolluser:KEY --until 2027-01-31
  atoll grant work band
  atoll grant work/project atollgroup:KEY
  atoll grant work/project alice=atolluser:KEY --until 2027-01-31
  atoll grant board alice=atolluser:KEY --read
  atoll grant work alice --keeper

A user joins the volume's default group, which may write all of it. With a path the user may write what is
there from the path down: the user joins a group that is made for the path (`atoll group list` shows it as
VOLUME:PATH). A group of yours or of somebody else (`atoll group`) gets the right to write everything that is
there from the path down; what is made later has the groups of its directory. Run it again if it was interrupted.
The user mounts the volume by its address.
An encrypted volume (`atoll volume create --shared --encrypt`) can be read by its members, by members of groups
that may write it or a part of it, and by users and groups to whom --read is granted; all of these can read
all of it. Those who join a group later can read within a day.
Members get certificates for a week at a time, which this node renews daily while it runs. So does the node of a
keeper (--keeper), once that has joined the volume (`atoll volume join`): the members can write while this node is
away. A keeper gets the key of the members' group. Until that is taken away (`atoll revoke`, with or without --keeper),
a keeper could let anybody write the volume, or remove members; never name keepers, nor read what it could not.")]
pub(crate) struct Args {
    /// The volume's name on this node, and a path in it if the right is to begin there
    #[arg(value_name = "NAME[/PATH]")]
    target: String,

    /// A user as `atoll id` prints it there, with LABEL= in front if it is to have a name in lists; or a
    /// group: atollgroup:KEY, or the name of one of yours
    #[arg(value_name = "USER|GROUP", value_parser = Grantee::parse)]
    to: Grantee,

    /// Let the user or the group read an encrypted volume, and not write it
    #[arg(long)]
    read: bool,

    /// Let the user or the group write, which is also done without this option
    #[arg(long, conflicts_with = "read")]
    write: bool,

    /// Make the user, a member by its label or its key, a keeper too, whose node renews the members' certificates
    #[arg(long, conflicts_with_all = ["read", "until"])]
    keeper: bool,

    /// Until when the user may write: a date or a minute of UTC. What was readable then stays so until
    /// `atoll revoke --now` names somebody
    #[arg(long, value_name = "TIME")]
    until: Option<Moment>,

    /// One JSON object
    #[arg(long)]
    json: bool,
}

/// Arguments of `atoll revoke`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll revoke work alice
  atoll revoke work atolluser:KEY --now
  atoll revoke work band
  atoll revoke work/project atollgroup:KEY
  atoll revoke work/project alice --now
  atoll revoke work alice --keeper

A user's certificate is not renewed any more, and ends within a week. With --now the other members
get certificates of a new group, and everything in the volume is bound to that: the user can write nothing
from then on. That takes two messages a file; run it again if it was interrupted. A group can write
nothing any more as soon as the command has ended, and so does the last user who was granted a path.
A group is taken away from the path down: what was moved or linked out of the path keeps it, since the group
may have been granted elsewhere too. `atoll revoke NAME GROUP` takes it away in all of the volume. A user who was
granted a path by name loses what is elsewhere by now, too.
A keeper is shut out at once, with --now or without it; with --keeper the user stays a member, and the group's
key is replaced in the same way.
Of an encrypted volume a user can read what is written until somebody is shut out with --now; with it,
nothing that is written after the command has ended.")]
pub(crate) struct RevokeArgs {
    /// The volume's name on this node, and the path that was granted
    #[arg(value_name = "NAME[/PATH]")]
    target: String,

    /// A member's label or key, or a group: atollgroup:KEY, or the name of one of yours
    #[arg(value_name = "USER|GROUP", value_parser = Grantee::parse)]
    from: Grantee,

    /// Do not wait until the user's certificate ends, and give the others a new read key
    #[arg(long)]
    now: bool,

    /// Let a keeper be a keeper no more, and stay a member
    #[arg(long, conflicts_with = "now")]
    keeper: bool,

    /// One JSON object
    #[arg(long)]
    json: bool,
}

/// The outcome of `grant` or `revoke`, for `--json`.
#[derive(Default, Serialize)]
struct Done {
    volume: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    user: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    group: Option<String>,
    /// What was granted: `write`, or `read` alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    access: Option<&'static str>,
    /// Until when the user may write, at least (grant) or at most (revoke).
    #[serde(skip_serializing_if = "Option::is_none")]
    until_unix_secs: Option<u64>,
    /// Files and directories whose groups were changed.
    rebound: u64,
    /// Members of a group who could not read an encrypted volume before.
    #[serde(skip_serializing_if = "Option::is_none")]
    readers: Option<usize>,
}

/// Lets a user or a group write.
pub(crate) async fn run(args: &Args, global: &Global) -> Result<(), Failure> {
    let what = format!("cannot grant {}", args.target);
    let (volume, path) = split(&args.target);
    if args.keeper {
        if !is_whole(path) {
            return Err(keeps_whole(&what));
        }
        let (env, owned) = open(volume, global, &what).await?;
        return grant_keeper(args, &env, &owned, (&what, global)).await;
    }
    match &args.to {
        Grantee::User(user, label) if !is_whole(path) => {
            let (env, owned) = open(volume, global, &what).await?;
            grant_on_path(args, &env, &owned, (*user, label), (&what, global)).await
        }
        Grantee::User(user, label) => {
            let (env, owned) = open(volume, global, &what).await?;
            grant_user(args, &env, &owned, (*user, label), &what).await
        }
        to => {
            if args.until.is_some() {
                return Err(Failure::new(Exit::Usage, what)
                    .because("--until goes with a user")
                    .advice("`atoll group add GROUP USER --until TIME` says it of a member."));
            }
            if args.read && !is_whole(path) {
                return Err(reads_whole(&what));
            }
            let (env, owned) = open(volume, global, &what).await?;
            let group = group(to, global, &what)?;
            if args.read && !owned.record.is_encrypted {
                return Err(is_public(&what));
            }
            let readers = let_read(&env, &owned, group, &what).await?;
            if args.read {
                let mut done = done_with_group(volume, group, 0);
                (done.access, done.readers) = (Some("read"), readers);
                let line = format!("{volume}: the group may read it{}", readers_text(readers));
                return output::show(args.json, &done, [line]);
            }
            let add = |groups: &[GroupId]| match groups.contains(&group) {
                true => groups.to_vec(),
                false => [groups, &[group]].concat(),
            };
            let rebound = rebind_at(&env, &owned, path, &add, (&what, global)).await?;
            let mut done = done_with_group(volume, group, rebound);
            (done.access, done.readers) = (Some("write"), readers);
            let line = format!(
                "{}: the group may write it, {rebound} changed{}",
                args.target,
                readers_text(readers)
            );
            output::show(args.json, &done, [line])
        }
    }
}

/// Makes the members of a group readers of an encrypted volume; how many were not.
async fn let_read(
    env: &Env,
    owned: &Owned,
    group: GroupId,
    what: &str,
) -> Result<Option<usize>, Failure> {
    if !owned.record.is_encrypted {
        return Ok(None);
    }
    let added = add_reading_group(env, &owned.blocks, &owned.key, group).await;
    added.map(|(came, _)| Some(came)).map_err(|error| shared_volume::failure(what, error))
}

fn readers_text(readers: Option<usize>) -> String {
    let new = |count| units::counted(count as u64, "new reader", "new readers");
    readers.map(|count| format!("; {}", new(count))).unwrap_or_default()
}

fn is_public(what: &str) -> Failure {
    Failure::new(Exit::Usage, what)
        .because("it is not encrypted: everybody who knows its address can read it")
}

fn reads_whole(what: &str) -> Failure {
    Failure::new(Exit::Usage, what)
        .because("reading is granted for a whole volume, which has one read key at a time")
}

fn keeps_whole(what: &str) -> Failure {
    Failure::new(Exit::Usage, what).because(
        "a keeper renews the certificates of a whole volume's members; those of a path's are renewed by this node alone",
    )
}

/// Makes a user a keeper, and a member before if need be.
async fn grant_keeper(
    args: &Args,
    env: &Env,
    owned: &Owned,
    (what, global): (&str, &Global),
) -> Result<(), Failure> {
    let failed = |error| shared_volume::failure(what, error);
    let members = owned.members(what).await?;
    let user = shared_volume::find_member(&members, &args.to, what)?;
    let (blocks, volume) = (&owned.blocks, (&owned.key, &owned.record));
    let known = members.members.get(&user);
    if known.is_some_and(|member| member.until_secs > 0) {
        return Err(Failure::new(Exit::Failed, what)
            .because("the user is a member until a time, and a keeper's part has no end of its own")
            .advice("`atoll grant` without --until makes the user a member without an end."));
    }
    let label = match &args.to {
        Grantee::User(_, label) => &label[..],
        _ => "",
    };
    if known.is_none_or(|member| !label.is_empty() && member.label != label) {
        add_volume_member(env, blocks, volume, (user, label), 0).await.map_err(failed)?;
    }
    let (block, _) = add_keeper(env, blocks, volume, user).await.map_err(failed)?;
    owned.keep(block, what).await?;
    let done = Done {
        volume: owned.name.clone(),
        user: Some(UserAddress(user).to_string()),
        access: Some("keep"),
        ..Done::default()
    };
    let label = known.map_or(label, |member| &member.label[..]);
    let line = format!("{}: {} is a keeper, and may write it", owned.name, called(label));
    output::show(args.json, &done, [line])?;
    if !global.quiet {
        let address = VolumeAddress(owned.key.volume_id());
        note!(
            "the keeper's node renews the members' certificates once it has joined the volume: by its invitation, or \
             by `atoll volume join {address} NAME`"
        );
    }
    Ok(())
}

/// Lets a user write what is there from a path down, as a member of the path's group.
async fn grant_on_path(
    args: &Args,
    env: &Env,
    owned: &Owned,
    (user, label): (UserId, &str),
    (what, global): (&str, &Global),
) -> Result<(), Failure> {
    if args.read {
        return Err(reads_whole(what));
    }
    let (_, path) = split(&args.target);
    // Before anything is changed, and once: meanwhile another member may give the name to something else.
    let top = owned.find(path, what).await?;
    let blocks = &owned.blocks;
    let mut group = own_group::open(&path_group(&owned.name, path), env, global)?;
    let made = group.make(env, blocks).await;
    made.map_err(|error| own_group::failure(what, error))?;
    let until_secs = shared_volume::until_secs(args.until);
    let added = add_member(env, blocks, &group.key, user, label, until_secs).await;
    added.map_err(|error| shared_volume::failure(what, error))?;
    let readers = let_read(env, owned, group.id(), what).await?;
    let with = |groups: &[GroupId]| group.with(groups);
    let rebound = rebind_from(env, owned, top, &with, (what, global)).await?;
    let done = Done {
        user: Some(UserAddress(user).to_string()),
        until_unix_secs: args.until.map(|_| until_secs),
        access: Some("write"),
        readers,
        ..done_with_group(&owned.name, group.id(), rebound)
    };
    let who = called(label);
    let until = shared_volume::until_text(until_secs);
    let line = format!(
        "{}: {who} may write it {until}, as a member of {}; {rebound} changed",
        args.target, group.name
    );
    output::show(args.json, &done, [line])?;
    if owned.record.is_encrypted && !global.quiet {
        note!("the volume has one read key at a time: {who} can read all of it");
    }
    Ok(())
}

/// A user's label as it is printed, or words for a user without one.
fn called(label: &str) -> String {
    match label.is_empty() {
        true => "the user".to_owned(),
        false => output::escaped(label.as_bytes()),
    }
}

async fn grant_user(
    args: &Args,
    env: &Env,
    owned: &Owned,
    (user, label): (UserId, &str),
    what: &str,
) -> Result<(), Failure> {
    let until_secs = shared_volume::until_secs(args.until);
    let (blocks, volume, who) = (&owned.blocks, (&owned.key, &owned.record), (user, label));
    if args.read && !owned.record.is_encrypted {
        return Err(is_public(what));
    }
    if args.until.is_some() && owned.keepers(what).await?.contains(&user) {
        return Err(Failure::new(Exit::Failed, what)
            .because("the user is a keeper, whose membership has no end")
            .advice(format!(
                "`atoll revoke {} USER --keeper` ends that.",
                shell_word(&owned.name)
            )));
    }
    let granted = match args.read {
        true => add_reader(env, blocks, &owned.key, who, until_secs).await,
        false => add_volume_member(env, blocks, volume, who, until_secs).await,
    };
    granted.map_err(|error| shared_volume::failure(what, error))?;
    let done = Done {
        volume: owned.name.clone(),
        user: Some(UserAddress(user).to_string()),
        until_unix_secs: args.until.map(|_| until_secs),
        access: Some(if args.read { "read" } else { "write" }),
        ..Done::default()
    };
    let may = if args.read { "may read it" } else { "may write it" };
    let who = called(label);
    let until = shared_volume::until_text(until_secs);
    output::show(args.json, &done, [format!("{}: {who} {may} {until}", owned.name)])
}

/// Takes the right to write away.
pub(crate) async fn revoke(args: &RevokeArgs, global: &Global) -> Result<(), Failure> {
    let what = format!("cannot revoke {}", args.target);
    let (volume, path) = split(&args.target);
    let (env, owned) = open(volume, global, &what).await?;
    if args.keeper && !is_whole(path) {
        return Err(keeps_whole(&what));
    }
    if !is_whole(path)
        && let Some(user) = user_on_path(args, &env, &owned, (&what, global)).await?
    {
        return revoke_on_path(args, &env, owned, user, (&what, global)).await;
    }
    let is_group = match &args.from {
        Grantee::Group(_) => true,
        // Labels of members come first.
        Grantee::Name(name) => {
            let members = owned.members(&what).await?;
            let is_label = members.members.values().any(|member| member.label == *name);
            !is_label && user::has_group(&user::directory(global)?, name)
        }
        Grantee::User(..) => false,
    };
    if !is_group {
        return revoke_user(args, &env, owned, global, &what).await;
    }
    let group = group(&args.from, global, &what)?;
    let without = |groups: &[GroupId]| -> Vec<GroupId> {
        groups.iter().filter(|one| **one != group).copied().collect()
    };
    let rebound = rebind_at(&env, &owned, path, &without, (&what, global)).await?;
    let done = done_with_group(volume, group, rebound);
    let mut lines =
        vec![format!("{}: the group may not write it any more, {rebound} changed", args.target)];
    if !is_whole(path) {
        lines.push(format!(
            "what was moved or linked out of the path keeps the group; `atoll revoke {} GROUP` takes it away \
             everywhere",
            shell_word(volume)
        ));
    }
    if owned.record.is_encrypted {
        lines.push(match is_whole(path) {
            true => {
                let_read_no_more(&env, &owned, group, &what).await?;
                "its members can read what is written until somebody is revoked with --now".into()
            }
            false => format!(
                "its members can read the volume still; `atoll revoke {} GROUP` ends that",
                shell_word(volume)
            ),
        });
    }
    output::show(args.json, &done, lines)
}

async fn let_read_no_more(
    env: &Env,
    owned: &Owned,
    group: GroupId,
    what: &str,
) -> Result<(), Failure> {
    if !owned.record.is_encrypted {
        return Ok(());
    }
    let removed = remove_reading_group(env, &owned.blocks, &owned.key, group).await;
    removed.map(drop).map_err(|error| shared_volume::failure(what, error))
}

/// A user who was granted a path by name, with the path's group; `None` if a group is meant.
async fn user_on_path(
    args: &RevokeArgs,
    env: &Env,
    owned: &Owned,
    (what, global): (&str, &Global),
) -> Result<Option<(UserId, OwnGroup, GroupRecord)>, Failure> {
    let (_, path) = split(&args.target);
    let name = path_group(&owned.name, path);
    let dir = user::directory(global)?;
    let is_own_group =
        |named: &Grantee| matches!(named, Grantee::Name(name) if user::has_group(&dir, name));
    match &args.from {
        Grantee::Group(_) => return Ok(None),
        named if is_own_group(named) && !user::has_group(&dir, &name) => return Ok(None),
        _ if !user::has_group(&dir, &name) => {
            return Err(Failure::new(Exit::NotFound, what)
                .because("no user was granted this path from this node")
                .advice(format!(
                    "`atoll revoke {} USER` is about the whole volume.",
                    shell_word(&owned.name)
                )));
        }
        _ => {}
    }
    let group = own_group::open(&name, env, global)?;
    let record = group.read(&owned.blocks).await;
    let record = record.map_err(|error| shared_volume::failure(what, error))?.unwrap_or_default();
    match shared_volume::find_member(&record, &args.from, what) {
        Ok(user) => Ok(Some((user, group, record))),
        Err(_) if is_own_group(&args.from) => Ok(None),
        Err(failure) => Err(failure),
    }
}

/// Takes a path away from a user who was granted it by name.
async fn revoke_on_path(
    args: &RevokeArgs,
    env: &Env,
    mut owned: Owned,
    (user, mut group, record): (UserId, OwnGroup, GroupRecord),
    (what, global): (&str, &Global),
) -> Result<(), Failure> {
    let failed = |error| shared_volume::failure(what, error);
    let member = record.members.get(&user);
    let is_last = record.members.keys().all(|other| *other == user);
    let mut done = Done {
        user: Some(UserAddress(user).to_string()),
        ..done_with_group(&owned.name, group.id(), 0)
    };
    if member.is_none() && !args.now {
        return Err(Failure::new(Exit::NotFound, what)
            .because("the user was not granted this path by name")
            .advice("--now also shuts out a former one whose certificate still lasts."));
    }
    if !args.now && !is_last {
        remove_member(env, &owned.blocks, &group.key, user).await.map_err(failed)?;
        let until_secs = member.map_or(0, |member| member.certificate.not_after_secs);
        done.until_unix_secs = Some(until_secs);
        let until = units::unix_date(until_secs);
        let line = format!("{}: removed; can write until {until} UTC at most", args.target);
        let reads = let_read(env, &owned, group.id(), what).await?;
        return output::show(
            args.json,
            &done,
            [line].into_iter().chain(reads.map(|_| READS_ON.into())),
        );
    }
    let begun = group.begin_epoch(env, &owned.blocks, user).await;
    begun.map_err(|error| own_group::failure(what, error))?;
    for former in group.former() {
        let_read_no_more(env, &owned, former, what).await?;
    }
    // Wherever it is now: what was moved or linked out of the path is bound to its group too.
    let rebound = if is_last {
        let without = |groups: &[GroupId]| group.without(groups);
        rebind_at(env, &owned, "", &without, (what, global)).await
    } else {
        let_read(env, &owned, group.id(), what).await?;
        let renewed = |groups: &[GroupId]| group.renewed(groups);
        rebind_at(env, &owned, "", &renewed, (what, global)).await
    };
    // Also if something could not be rebound: the user is not to read on for that.
    if owned.record.is_encrypted && args.now {
        done.rebound = shut_out(env, &mut owned, Some((user, false)), (what, global)).await?;
    }
    done.rebound += rebound?;
    done.group = Some(GroupAddress(group.id()).to_string());
    let mut lines = vec![format!("{}: shut out, {} changed", args.target, done.rebound)];
    if owned.record.is_encrypted && !args.now {
        lines.push(READS_ON.into());
    }
    output::show(args.json, &done, lines)
}

/// Of an encrypted volume.
const READS_ON: &str = "the user can read what is written until somebody is revoked with --now";

/// Shuts a user out of the whole volume at once, or goes on with that if no user is given, since it was interrupted; how many
/// files and directories have other groups now. The user may stay a member, and be no keeper any more.
async fn shut_out(
    env: &Env,
    owned: &mut Owned,
    user: Option<(UserId, bool)>,
    (what, global): (&str, &Global),
) -> Result<u64, Failure> {
    let began_at = Instant::now();
    if let Some((user, stays)) = user {
        let (blocks, key) = (&owned.blocks, &owned.key);
        let began = match stays {
            true => begin_epoch_without_keeper(env, blocks, key, user).await,
            false => begin_epoch(env, blocks, key, user).await,
        };
        let (block, record) = began.map_err(|error| shared_volume::failure(what, error))?;
        owned.keep(block, what).await?;
        owned.record = record;
    }
    let rebound = finish_rebinding(env, owned, what, global).await?;
    if owned.record.is_encrypted {
        // Mounts may seal with the former read key for so long.
        tokio::time::sleep(KEY_AGE.saturating_sub(began_at.elapsed())).await;
    }
    Ok(rebound)
}

async fn revoke_user(
    args: &RevokeArgs,
    env: &Env,
    mut owned: Owned,
    global: &Global,
    what: &str,
) -> Result<(), Failure> {
    let failed = |error| shared_volume::failure(what, error);
    let (members, readers) = (owned.members(what).await?, owned.readers(what).await?);
    let is_unfinished = owned.record.bound_epoch < owned.record.group_epoch;
    let user = match shared_volume::find_user(&members, &readers, &args.from, what) {
        Ok(user) => user,
        // By label, a member that an interrupted command has removed cannot be found any more.
        Err(_) if (args.now || owned.record.has_keepers) && is_unfinished => {
            let rebound = finish_rebinding(env, &mut owned, what, global).await?;
            let done = Done { volume: owned.name.clone(), rebound, ..Done::default() };
            let line = format!("{}: shut out, {rebound} changed", owned.name);
            return output::show(args.json, &done, [line]);
        }
        Err(failure) => return Err(failure),
    };
    let is_keeper = owned.keepers(what).await?.contains(&user);
    if args.keeper {
        // One that was interrupted goes on.
        if !is_keeper && !is_unfinished {
            return Err(
                Failure::new(Exit::NotFound, what).because("the user is not a keeper of it")
            );
        }
        let shut = is_keeper.then_some((user, true));
        let rebound = shut_out(env, &mut owned, shut, (what, global)).await?;
        let user = Some(UserAddress(user).to_string());
        let done = Done { volume: owned.name.clone(), user, rebound, ..Done::default() };
        let line = format!("{}: no keeper any more, still a member; {rebound} changed", owned.name);
        return output::show(args.json, &done, [line]);
    }
    let is_member = members.members.contains_key(&user) || readers.readers.contains_key(&user);
    let mut done = Done {
        volume: owned.name.clone(),
        user: Some(UserAddress(user).to_string()),
        ..Done::default()
    };
    // A keeper has the group's key: there is no other way.
    if !args.now && !is_keeper {
        let volume = (&owned.key, &owned.record);
        let removed = remove_volume_member(env, &owned.blocks, volume, user).await;
        let removed = removed.map_err(failed)?;
        let reader = match owned.record.is_encrypted {
            true => remove_reader(env, &owned.blocks, &owned.key, user).await.map_err(failed)?,
            false => None,
        };
        let mut lines = Vec::new();
        match removed {
            Some(until_secs) => {
                done.until_unix_secs = Some(until_secs);
                let until = units::unix_date(until_secs);
                lines.push(format!("{}: removed; can write until {until} UTC at most", owned.name));
            }
            None if reader.is_some() => lines.push(format!("{}: removed", owned.name)),
            None => {
                return Err(Failure::new(Exit::NotFound, what)
                    .because("the user is not a member of its default group")
                    .advice(
                        "--now also shuts out a former member whose certificate still lasts.",
                    ));
            }
        }
        if reader.is_some() {
            lines.push(READS_ON.into());
        }
        output::show(args.json, &done, lines)?;
    } else {
        let begins = is_member || !is_unfinished;
        let shut = begins.then_some((user, false));
        done.rebound = shut_out(env, &mut owned, shut, (what, global)).await?;
        let line = match is_member || is_unfinished {
            true => format!("{}: shut out, {} changed", owned.name, done.rebound),
            false => format!(
                "{}: no member has this key; former members are shut out, {} changed",
                owned.name, done.rebound
            ),
        };
        let mut lines = vec![line];
        if !is_member && !is_unfinished {
            let left = members.members.iter();
            lines.push("these may write:".into());
            lines.extend(left.map(|(user, member)| {
                format!("  {}  {}", UserAddress(*user), output::escaped(member.label.as_bytes()))
            }));
        }
        output::show(args.json, &done, lines)?;
    }
    warn_of_other_groups(&owned, user, what).await
}

/// Binds everything that is bound to a former epoch of the default group to the present one.
async fn finish_rebinding(
    env: &Env,
    owned: &mut Owned,
    what: &str,
    global: &Global,
) -> Result<u64, Failure> {
    let VolumeRecord { group_epoch, root, .. } = owned.record;
    let swap = in_present_epoch(&owned.key, group_epoch);
    let user = user::key(&user::directory(global)?)?;
    let report = owned.rebind(env, user, root, &swap, (what, global.quiet)).await?;
    let finished = change_volume(env, &owned.blocks, &owned.key, |record| {
        record.bound_epoch = record.bound_epoch.max(group_epoch);
    });
    let (block, record) = finished.await.map_err(|error| shared_volume::failure(what, error))?;
    owned.keep(block, what).await?;
    owned.record = record;
    if owned.record.has_keepers {
        let followed = follow_epochs(env, &owned.blocks, &owned.key, &owned.record).await;
        followed.map_err(|error| shared_volume::failure(what, error))?;
    }
    Ok(report.changed)
}

/// Says if the user belongs to another group that may write the volume's root directory, or read the volume.
async fn warn_of_other_groups(owned: &Owned, user: UserId, what: &str) -> Result<(), Failure> {
    let volume = owned.key.volume_id();
    let mut groups = owned.readers(what).await?.groups;
    groups.extend(shared_volume::root_groups(&owned.blocks, volume, what).await?);
    for group in groups {
        if group == owned.default_group().group_id() {
            continue;
        }
        let record = read_group(&owned.blocks, group).await;
        if let Ok(Some(record)) = record
            && record.members.contains_key(&user)
        {
            note!(
                "warning: the user is a member of {}, which may use the volume too",
                GroupAddress(group)
            );
        }
    }
    Ok(())
}

/// Changes the groups of everything at a path and below it; of how many files and directories.
async fn rebind_at(
    env: &Env,
    owned: &Owned,
    path: &str,
    groups: &(dyn Fn(&[GroupId]) -> Vec<GroupId> + Sync),
    (what, global): (&str, &Global),
) -> Result<u64, Failure> {
    let top = owned.find(path, what).await?;
    rebind_from(env, owned, top, groups, (what, global)).await
}

/// The same from a directory or file that was found before.
async fn rebind_from(
    env: &Env,
    owned: &Owned,
    top: InodeKey,
    groups: &(dyn Fn(&[GroupId]) -> Vec<GroupId> + Sync),
    (what, global): (&str, &Global),
) -> Result<u64, Failure> {
    let user = user::key(&user::directory(global)?)?;
    let report = owned.rebind(env, user, top, groups, (what, global.quiet)).await?;
    if !global.quiet {
        note!("{} looked at", inodes(report.inodes));
    }
    Ok(report.changed)
}

fn done_with_group(volume: &str, group: GroupId, rebound: u64) -> Done {
    let group = Some(GroupAddress(group).to_string());
    Done { volume: volume.to_owned(), group, rebound, ..Done::default() }
}

async fn open(name: &str, global: &Global, what: &str) -> Result<(Env, Owned), Failure> {
    let (env, client) = connection::to_node(global).await?;
    let owned = shared_volume::owned(Arc::clone(&client), name, what).await?;
    Ok((env, owned))
}

/// The name of a volume and a path in it.
fn split(target: &str) -> (&str, &str) {
    target.split_once('/').unwrap_or((target, ""))
}

/// Whether a path is the root directory.
fn is_whole(path: &str) -> bool {
    path.split('/').all(|name| matches!(name, "" | "."))
}

/// The group that an argument means.
fn group(named: &Grantee, global: &Global, what: &str) -> Result<GroupId, Failure> {
    let name = match named {
        Grantee::Group(group) => return Ok(*group),
        Grantee::Name(name) => name,
        Grantee::User(..) => unreachable!("a user is told from a group before"),
    };
    let dir = user::directory(global)?;
    match user::key(&dir)? {
        Some(user) if user::has_group(&dir, name) => Ok(OwnGroup::of(&dir, &user, name)?.id()),
        _ => Err(Failure::new(Exit::NotFound, what)
            .because(format!("you have no group {name}"))
            .advice("A user is named by atolluser:KEY, as `atoll id` prints it there.")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A label comes from whoever sent the user's name.
    #[test]
    fn a_label_does_not_act_on_the_terminal() {
        assert_eq!(called("alice"), "alice");
        assert_eq!(called(""), "the user");
        assert!(!called("\x1b[2J\r\n").contains(char::is_control));
    }

    #[test]
    fn a_path_may_follow_the_name() {
        assert_eq!(split("work"), ("work", ""));
        assert_eq!(split("work/a/b"), ("work", "a/b"));
        assert!(is_whole("") && is_whole("/") && is_whole("./"));
        assert!(!is_whole("a") && !is_whole("/a/"));
    }
}
