//! `atoll grant` and `atoll revoke`: who may write a shared volume, and read an encrypted one.

use std::sync::Arc;
use std::time::Instant;

use atoll_env::Env;
use atoll_key::{GroupAddress, GroupId, UserAddress, UserId, volume_group};
use atoll_volume::shared::access::groups::{
    add_volume_member, begin_epoch, change_volume, remove_member,
};
use atoll_volume::shared::access::read_access::KEY_AGE;
use atoll_volume::shared::access::readers::{add_reader, remove_reader};
use atoll_volume::shared::access::{VolumeRecord, read_group};
use serde::Serialize;

use crate::connection;
use crate::failure::{Exit, Failure};
use crate::global::Global;
use crate::moment::Moment;
use crate::output;
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
  atoll grant board alice=atolluser:KEY --read

A user joins the volume's default group, which may write all of it. A group (`atoll group`) gets the
right to write everything that is there from the path down; what is made later has the groups of its
directory. Run it again if it was interrupted. The user mounts the volume by its address.
An encrypted volume (`atoll volume create --shared --encrypt`) can be read by its members, and by users to
whom --read is granted. Members of groups need --read as well.
Members get certificates for a week at a time, which this node renews daily while it runs.")]
pub(crate) struct Args {
    /// The volume's name on this node; for a group, also a path in it
    #[arg(value_name = "NAME[/PATH]")]
    target: String,

    /// A user as `atoll id` prints it there, with LABEL= in front if it is to have a name in lists; or a
    /// group: atollgroup:KEY, or the name of one of yours
    #[arg(value_name = "USER|GROUP", value_parser = Grantee::parse)]
    to: Grantee,

    /// Let the user read an encrypted volume, and not write it
    #[arg(long)]
    read: bool,

    /// Let the user or the group write, which is also done without this option
    #[arg(long, conflicts_with = "read")]
    write: bool,

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

A user's certificate is not renewed any more, and ends within a week. With --now the other members
get certificates of a new group, and everything in the volume is bound to that: the user can write nothing
from then on. That takes two messages a file; run it again if it was interrupted. A group can write
nothing any more as soon as the command has ended.
Of an encrypted volume a user can read what is written until somebody is shut out with --now; with it,
nothing that is written after the command has ended.")]
pub(crate) struct RevokeArgs {
    /// The volume's name on this node; for a group, also a path in it
    #[arg(value_name = "NAME[/PATH]")]
    target: String,

    /// A member's label or key, or a group: atollgroup:KEY, or the name of one of yours
    #[arg(value_name = "USER|GROUP", value_parser = Grantee::parse)]
    from: Grantee,

    /// Do not wait until the user's certificate ends, and give the others a new read key
    #[arg(long)]
    now: bool,

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
}

/// Lets a user or a group write.
pub(crate) async fn run(args: &Args, global: &Global) -> Result<(), Failure> {
    let what = format!("cannot grant {}", args.target);
    let (volume, path) = split(&args.target);
    match &args.to {
        Grantee::User(user, label) => {
            check_whole(path, &what)?;
            let (env, owned) = open(volume, global, &what).await?;
            grant_user(args, &env, &owned, (*user, label), &what).await
        }
        to => {
            if args.until.is_some() {
                return Err(Failure::new(Exit::Usage, what)
                    .because("--until goes with a user")
                    .advice("`atoll group add GROUP USER --until TIME` says it of a member."));
            }
            if args.read {
                return Err(Failure::new(Exit::Usage, what)
                    .because("--read goes with a user: each reader is given the read key"));
            }
            let (env, owned) = open(volume, global, &what).await?;
            let group = group(to, global, &what)?;
            let add = |groups: &[GroupId]| match groups.contains(&group) {
                true => groups.to_vec(),
                false => [groups, &[group]].concat(),
            };
            let rebound = rebind_at(&env, &owned, path, &add, (&what, global)).await?;
            let done = done_with_group(volume, group, rebound);
            let line = format!("{}: {}, {rebound} changed", args.target, "the group may write it");
            output::show(args.json, &done, [line])?;
            if owned.record.is_encrypted && !global.quiet {
                eprintln!(
                    "each of its members needs the read key as well: \
                     `atoll grant {volume} USER --read`"
                );
            }
            Ok(())
        }
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
        return Err(Failure::new(Exit::Usage, what)
            .because("it is not encrypted: everybody who knows its address can read it"));
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
    let who = if label.is_empty() { "the user" } else { label };
    let until = shared_volume::until_text(until_secs);
    output::show(args.json, &done, [format!("{}: {who} {may} {until}", owned.name)])
}

/// Takes the right to write away.
pub(crate) async fn revoke(args: &RevokeArgs, global: &Global) -> Result<(), Failure> {
    let what = format!("cannot revoke {}", args.target);
    let (volume, path) = split(&args.target);
    if let Grantee::User(..) = &args.from {
        check_whole(path, &what)?;
    }
    let (env, owned) = open(volume, global, &what).await?;
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
        check_whole(path, &what)?;
        return revoke_user(args, &env, owned, global, &what).await;
    }
    let group = group(&args.from, global, &what)?;
    let without = |groups: &[GroupId]| -> Vec<GroupId> {
        groups.iter().filter(|one| **one != group).copied().collect()
    };
    let rebound = rebind_at(&env, &owned, path, &without, (&what, global)).await?;
    let done = done_with_group(volume, group, rebound);
    let line = format!("{}: the group may not write it any more, {rebound} changed", args.target);
    output::show(args.json, &done, [line])
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
        Err(_) if args.now && is_unfinished => {
            let rebound = finish_rebinding(env, &mut owned, what, global).await?;
            let done = Done { volume: owned.name.clone(), rebound, ..Done::default() };
            let line = format!("{}: shut out, {rebound} changed", owned.name);
            return output::show(args.json, &done, [line]);
        }
        Err(failure) => return Err(failure),
    };
    let is_member = members.members.contains_key(&user) || readers.readers.contains_key(&user);
    let mut done = Done {
        volume: owned.name.clone(),
        user: Some(UserAddress(user).to_string()),
        ..Done::default()
    };
    if !args.now {
        let group = owned.default_group();
        let removed = remove_member(env, &owned.blocks, &group, user).await.map_err(failed)?;
        let reader = match owned.record.is_encrypted {
            true => remove_reader(env, &owned.blocks, &owned.key, user).await.map_err(failed)?,
            false => None,
        };
        let mut lines = Vec::new();
        match removed {
            Some(member) => {
                let until_secs = member.certificate.not_after_secs;
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
            lines.push(
                "the user can read what is written until somebody is revoked with --now".into(),
            );
        }
        output::show(args.json, &done, lines)?;
    } else {
        let began_at = Instant::now();
        if is_member || !is_unfinished {
            let began = begin_epoch(env, &owned.blocks, &owned.key, user).await;
            let (block, record) = began.map_err(failed)?;
            owned.keep(block, what).await?;
            owned.record = record;
        }
        done.rebound = finish_rebinding(env, &mut owned, what, global).await?;
        if owned.record.is_encrypted {
            // Mounts may seal with the former read key for so long.
            tokio::time::sleep(KEY_AGE.saturating_sub(began_at.elapsed())).await;
        }
        let line = format!("{}: shut out, {} changed", owned.name, done.rebound);
        output::show(args.json, &done, [line])?;
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
    let id = |epoch| volume_group(&owned.key, epoch).group_id();
    let former: Vec<GroupId> = (0..group_epoch).map(id).collect();
    let present = id(group_epoch);
    let swap = |groups: &[GroupId]| -> Vec<GroupId> {
        let of = |group: &GroupId| if former.contains(group) { present } else { *group };
        let mut groups: Vec<GroupId> = groups.iter().map(of).collect();
        groups.sort_unstable();
        groups.dedup();
        groups
    };
    let user = user::key(&user::directory(global)?)?;
    let report = owned.rebind(env, user, root, &swap, (what, global.quiet)).await?;
    let finished = change_volume(env, &owned.blocks, &owned.key, |record| {
        record.bound_epoch = record.bound_epoch.max(group_epoch);
    });
    let (block, record) = finished.await.map_err(|error| shared_volume::failure(what, error))?;
    owned.keep(block, what).await?;
    owned.record = record;
    Ok(report.changed)
}

/// Says if the user belongs to another group that may write the volume's root directory.
async fn warn_of_other_groups(owned: &Owned, user: UserId, what: &str) -> Result<(), Failure> {
    let volume = owned.key.volume_id();
    for group in shared_volume::root_groups(&owned.blocks, volume, what).await? {
        if group == owned.default_group().group_id() {
            continue;
        }
        let record = read_group(&owned.blocks, group).await;
        if let Ok(Some(record)) = record
            && record.members.contains_key(&user)
        {
            eprintln!(
                "warning: the user is a member of {}, which may write the volume too",
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
    let user = user::key(&user::directory(global)?)?;
    let report = owned.rebind(env, user, top, groups, (what, global.quiet)).await?;
    if !global.quiet {
        eprintln!("{} looked at", inodes(report.inodes));
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

/// A user's right is that of the whole volume.
fn check_whole(path: &str, what: &str) -> Result<(), Failure> {
    match path.trim_matches('/').is_empty() {
        true => Ok(()),
        false => Err(Failure::new(Exit::Usage, what)
            .because("a user may write a whole volume, or belong to a group that may write a part")
            .advice("`atoll group create GROUP USER`, then `atoll grant NAME/PATH GROUP`.")),
    }
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
        Some(user) if user::has_group(&dir, name) => Ok(user::group_key(&user, name).group_id()),
        _ => Err(Failure::new(Exit::NotFound, what)
            .because(format!("you have no group {name}"))
            .advice("A user is named by atolluser:KEY, as `atoll id` prints it there.")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_may_follow_the_name() {
        assert_eq!(split("work"), ("work", ""));
        assert_eq!(split("work/a/b"), ("work", "a/b"));
        assert!(check_whole("", "x").is_ok() && check_whole("/", "x").is_ok());
        assert_eq!(check_whole("a", "x").expect_err("a part").exit, Exit::Usage);
    }
}
